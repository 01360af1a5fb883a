//! LoRA of experts: one pair of factors for each, or tensors that hold those of all, for weights that are stacked or apart.

use std::rc::Rc;

use super::{Building, Parts};
use crate::adapter::Factor;
use crate::adapter::experts::{Expert, ExpertPart};
use crate::adapter::names::keys::Part;
use crate::error::{AdapterFault, Error, Result};
use crate::patch::{Delta, Matrix, Product, Step};

/// The factors of one expert: `D = up down`, as its program lays out the weight.
struct Pair {
    up: Matrix,
    down: Matrix,
}

impl Pair {
    /// The factors of D's transpose.
    fn flipped(&self) -> Pair {
        Pair { up: self.down.transposed(), down: self.up.transposed() }
    }

    /// The same for some of the rows of D.
    fn rows(&self, start: usize, count: usize) -> Pair {
        let cols = self.up.cols;
        let values = self.up.values[start * cols..(start + count) * cols].to_vec();
        Pair { up: Matrix { rows: count, cols, values }, down: self.down.clone() }
    }

    /// The same with D at column `start` of a matrix of `cols` columns that are else zero.
    fn in_columns(self, start: usize, cols: usize) -> Pair {
        let mut down = Matrix { rows: self.down.rows, cols, values: vec![0.0; self.down.rows * cols] };
        for row in 0..down.rows {
            down.values[row * cols + start..][..self.down.cols].copy_from_slice(self.down.row(row));
        }
        Pair { up: self.up, down }
    }

    fn sides(&self) -> (usize, usize) {
        (self.up.rows, self.down.cols)
    }
}

impl Building<'_, '_> {
    /// The steps of an expert's target, or of all experts of a stack.
    pub(super) fn experts(&mut self, expert: Expert) -> Result<()> {
        let parts = self.parts;
        let other = parts.module.parts.keys().find(|part| !is_of_lora(**part));
        if let Some(&other) = other {
            let kind = format!("{} for experts that the checkpoint keeps otherwise: such", parts.key(other));
            return Err(parts.fault(other, AdapterFault::Unsupported { kind }));
        }
        if expert.interleaved && expert.part != ExpertPart::Whole {
            let kind = format!("gate or up factors for `{}`, where both stand in turn: such", self.weight.name);
            return Err(parts.fault(parts.any_of(&[Part::Down, Part::MlxDown]), AdapterFault::Unsupported { kind }));
        }
        let factors = parts.expert_factors()?;
        let ratio = parts.ratio(factors.rank())?;
        let scale = parts.finite_scale(ratio.value)?;
        match expert.stacked {
            None => self.one_expert(&factors, expert, scale)?,
            Some(count) => {
                let [_, rows, cols] = self.weight.shape[..] else { return Err(self.shape_mismatch(&factors.down)) };
                self.view = Some((self.weight.rows * rows as usize, cols as usize));
                if expert.number.is_none() && factors.form == FactorForm::Pair {
                    let kind = format!("one pair of factors for all experts of `{}`: such", self.weight.name);
                    return Err(parts.fault(Part::Down, AdapterFault::Unsupported { kind }));
                }
                let numbers = expert.number.map_or(0..count, |number| number..number.saturating_add(1));
                if numbers.end > count || factors.experts.is_some_and(|of| of != count as usize) {
                    return Err(self.shape_mismatch(&factors.down));
                }
                for number in numbers {
                    self.in_stack(&factors, expert, number as usize, scale)?;
                }
            }
        }
        self.kinds.push("LoRA");
        self.factor = Some(ratio);
        Ok(())
    }

    /// Adds the change of expert `number` to a stack of [experts, rows, cols].
    fn in_stack(&mut self, factors: &Factors, expert: Expert, number: usize, scale: f32) -> Result<()> {
        let [_, rows, cols] = self.weight.shape[..] else { return Err(self.shape_mismatch(&factors.down)) };
        let (rows, cols) = (rows as usize, cols as usize);
        let pair = factors.pair(number);
        let (outputs, inputs) = pair.sides();
        let parts = if expert.part == ExpertPart::Whole { 1 } else { 2 };
        let straight = (outputs.checked_mul(parts), inputs) == (Some(rows), cols);
        let flipped = (outputs.checked_mul(parts), inputs) == (Some(cols), rows);
        let flip = match (straight, flipped) {
            (true, false) => false,
            (false, true) => true,
            (false, false) => return Err(self.shape_mismatch(&factors.down)),
            (true, true) => self.parts.flips(factors.form, expert.transposed).ok_or_else(|| self.unclear(factors))?,
        };
        let second = expert.part == ExpertPart::Up;
        let first_row = number * rows;
        let (pair, rows) = if flip {
            let start = if second { outputs } else { 0 };
            (pair.flipped().in_columns(start, cols), first_row..first_row + rows)
        } else {
            let start = first_row + if second { outputs } else { 0 };
            (pair, start..start + outputs)
        };
        if flip && expert.part != ExpertPart::Whole {
            self.columns = Some(if second { outputs..cols } else { 0..outputs });
        }
        self.steps.push(Step::add(rows, Delta::Product(Product { up: pair.up, down: pair.down }), scale));
        Ok(())
    }

    /// Adds to the weight of one expert its part of the change of a stack.
    fn one_expert(&mut self, factors: &Factors, expert: Expert, scale: f32) -> Result<()> {
        let number = expert.number.unwrap_or(0) as usize;
        if factors.experts.is_some_and(|count| number >= count) {
            return Err(self.shape_mismatch(&factors.down));
        }
        let pair = factors.pair(number);
        let (rows, cols) = (self.weight.rows, self.weight.cols);
        let parts = if expert.part == ExpertPart::Whole { 1 } else { 2 };
        let wanted = (rows * parts, cols);
        let (outputs, inputs) = pair.sides();
        let flip = match (wanted == (outputs, inputs), wanted == (inputs, outputs)) {
            (true, false) => false,
            (false, true) => true,
            (false, false) => return Err(self.shape_mismatch(&factors.down)),
            (true, true) => self.parts.flips(factors.form, Some(false)).ok_or_else(|| self.unclear(factors))?,
        };
        let pair = if flip { pair.flipped() } else { pair };
        let start = if expert.part == ExpertPart::Up { rows } else { 0 };
        let pair = pair.rows(start, rows);
        self.steps.push(Step::add(0..rows, Delta::Product(Product { up: pair.up, down: pair.down }), scale));
        Ok(())
    }

    fn unclear(&self, factors: &Factors) -> Error {
        let reason = format!(
            "`{}` has as many inputs as outputs, and peft_version does not say which of them `{}` has",
            self.weight.name, factors.down.key
        );
        self.parts.fault(Part::Down, AdapterFault::Config { reason })
    }
}

/// How a module holds the factors of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FactorForm {
    /// One pair: `down` [r, inputs], `up` [outputs, r].
    Pair,
    /// PEFT's of a parameter: `down` [E r, inputs], `up` [outputs, r E] with all experts' values of one k side by side.
    Wrapped,
    /// `down` [E, r, inputs], `up` [E, outputs, r].
    Batched,
}

/// The factors of a module, for one expert or for all.
struct Factors {
    form: FactorForm,
    up: Rc<Factor>,
    down: Rc<Factor>,
    /// How many experts they are for; `None` for one pair.
    experts: Option<usize>,
}

impl Factors {
    fn rank(&self) -> usize {
        match self.form {
            FactorForm::Pair => self.down.shape[0] as usize,
            FactorForm::Wrapped => self.down.shape[0] as usize / self.experts.unwrap_or(1).max(1),
            FactorForm::Batched => self.down.shape[1] as usize,
        }
    }

    /// The factors of one expert; a pair is for any.
    fn pair(&self, number: usize) -> Pair {
        let rank = self.rank();
        match self.form {
            FactorForm::Pair => Pair { up: self.up.flat(), down: self.down.flat() },
            FactorForm::Wrapped => {
                let experts = self.experts.unwrap_or(1);
                let [outputs, inputs] = [self.up.shape[0], self.down.shape[1]].map(|side| side as usize);
                let places = (0..outputs).flat_map(|row| (0..rank).map(move |k| (row * rank + k) * experts + number));
                let up = places.map(|place| self.up.values[place]).collect();
                let down = self.down.values[number * rank * inputs..][..rank * inputs].to_vec();
                Pair {
                    up: Matrix { rows: outputs, cols: rank, values: up },
                    down: Matrix { rows: rank, cols: inputs, values: down },
                }
            }
            FactorForm::Batched => {
                let of = |factor: &Factor| {
                    let [rows, cols] = [factor.shape[1], factor.shape[2]].map(|side| side as usize);
                    let values = factor.values[number * rows * cols..][..rows * cols].to_vec();
                    Matrix { rows, cols, values }
                };
                Pair { up: of(&self.up), down: of(&self.down) }
            }
        }
    }
}

impl Parts<'_> {
    /// The module's LoRA factors, which agree with each other.
    fn expert_factors(&self) -> Result<Factors> {
        let mlx = self.has(Part::MlxDown) || self.has(Part::MlxUp);
        let (up_part, down_part) = if mlx { (Part::MlxUp, Part::MlxDown) } else { (Part::Up, Part::Down) };
        let (mut up, mut down) = (self.shared(up_part, down_part)?, self.shared(down_part, up_part)?);
        if mlx && down.shape.len() == 2 {
            (up, down) = (Rc::new(up.swapped()), Rc::new(down.swapped()));
        }
        let (form, experts) = match (&up.shape[..], &down.shape[..]) {
            (&[_, columns], &[rows, _]) if self.target.of_parameter => {
                let rank = self.peft_rank().unwrap_or(1) as u64;
                if columns != rows || rows % rank != 0 {
                    return Err(self.shape_fault(
                        &down,
                        format!("`{}` of rank {rank} for each expert", up.key),
                        &up.shape,
                    ));
                }
                (FactorForm::Wrapped, Some((rows / rank) as usize))
            }
            (&[_, columns], &[rank, _]) if columns == rank => (FactorForm::Pair, None),
            (&[experts, _, columns], &[count, rank, _]) if experts == count && columns == rank => {
                (FactorForm::Batched, Some(experts as usize))
            }
            _ => return Err(self.shape_fault(&up, format!("`{}`", down.key), &down.shape)),
        };
        Ok(Factors { form, up, down, experts })
    }

    /// As [`need`](Parts::need), read once for all targets of the module.
    fn shared(&self, part: Part, beside: Part) -> Result<Rc<Factor>> {
        let Some(&tensor) = self.module.parts.get(&part) else { return self.need(part, beside).map(Rc::new) };
        if let Some(factor) = self.cache.borrow().get(&tensor) {
            return Ok(Rc::clone(factor));
        }
        let factor = Rc::new(self.need(part, beside)?);
        self.cache.borrow_mut().insert(tensor, Rc::clone(&factor));
        Ok(factor)
    }

    /// Whether D has to be transposed for the weight of an expert, where its shape does not say. `None` if that is not known.
    ///
    /// PEFT gave `down` the first dimension of an expert's stacked weight, whatever it is, until 0.19, and the inputs since.
    fn flips(&self, form: FactorForm, transposed: Option<bool>) -> Option<bool> {
        if form != FactorForm::Wrapped {
            return transposed;
        }
        match self.adapter.peft()?.version? {
            version if version < (0, 19) => Some(true),
            _ => transposed,
        }
    }
}

fn is_of_lora(part: Part) -> bool {
    matches!(part, Part::Up | Part::Down | Part::MlxUp | Part::MlxDown | Part::Alpha)
}
