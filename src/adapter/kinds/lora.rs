//! LoRA and LoCon: a product of two factors, with a third between them for convolutions, and LoRA that pads its weight.

use super::{Building, Parts, Pending, Weight};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::RowOrder;
use crate::checkpoint::is_table;
use crate::dtype::DType;
use crate::error::{AdapterFault, Result};
use crate::patch::{Delta, Product, Step, matrix_of};

impl Building<'_, '_> {
    /// LoRA and LoCon: `D = reshape(flat(up) flat(down))`.
    pub(super) fn lora(&mut self, up_part: Part, down_part: Part) -> Result<()> {
        let (mut up, mut down) = (self.parts.need(up_part, down_part)?, self.parts.need(down_part, up_part)?);
        if up_part == Part::MlxUp {
            (up, down) = (up.swapped(), down.swapped());
        }
        self.pad()?;
        self.widen(&down);
        if let Some(wanted) = self.parts.peft_rank().filter(|&rank| down.shape.first() != Some(&(rank as u64))) {
            return Err(self.parts.shape_fault(&down, "the rank in adapter_config.json", &[wanted as u64]));
        }
        if let Some(mid) = self.parts.read(Part::Mid)? {
            down = self.fold_mid(&down, &mid)?;
        }
        let (left, right) = (up.flat(), down.flat());
        let rank = right.rows;
        if left.cols != rank {
            return Err(self.parts.shape_fault(&up, format!("`{}`", down.key), &down.shape));
        }
        let is_embedding =
            up_part == Part::EmbeddingUp || (up_part == Part::MlxUp && is_table(self.parts.target.module));
        let other_way = self.parts.target.order == RowOrder::Transposed;
        let config = self.parts.adapter.peft().is_some_and(|config| config.transposed);
        let transposed = (config != other_way) || is_embedding;
        let (left, right, up, down) =
            if transposed { (right.transposed(), left.transposed(), &down, &up) } else { (left, right, &up, &down) };
        if transposed && (!other_way || is_embedding) {
            self.parts.needs_rows_as_they_are(up_part, "transposed LoRA")?;
        }
        let left = self.parts.own_rows(up, left)?;
        let rows = self.parts.rows_of(up, left.rows, &self.weight)?;
        if right.cols != self.weight.cols {
            return Err(self.shape_mismatch(down));
        }
        if is_embedding && self.parts.has(Part::MlxMagnitude) {
            let kind = "mlx-lm's DoRA of embeddings: such".to_owned();
            return Err(self.parts.fault(Part::MlxMagnitude, AdapterFault::Unsupported { kind }));
        }
        let delta = Delta::Product(Product { up: left, down: right });
        let ratio = self.parts.ratio(rank)?;
        self.place(Pending { kind: "LoRA", rows, delta, ratio, transposed })
    }

    /// A control LoRA's input has more channels than the checkpoint's: the weight's new columns begin as zeros. Such are Black
    /// Forest Labs' (`img_in`), and diffusers' of the same (`x_embedder`).
    fn widen(&mut self, down: &Factor) {
        const INPUTS: [&str; 2] = ["img_in", "x_embedder"];
        let own = self.parts.target.module.rsplit('.').next().unwrap_or_default();
        let ([rows, cols], [_, wanted]) = (&self.weight.shape[..], &down.shape[..]) else { return };
        let plain = self.parts.target.projection.is_none() && self.parts.target.takes_rows_as_they_are();
        if INPUTS.contains(&own) && plain && *cols > 0 && wanted > cols && wanted % cols == 0 {
            let to = vec![*rows, *wanted];
            self.pad_to(to);
        }
    }

    /// Pads the weight with zeros to a shape that matrices can have.
    pub(super) fn pad_to(&mut self, to: Vec<u64>) {
        let Some((rows, cols)) = matrix_of(&to) else { return };
        self.steps.push(Step::pad(self.weight.shape.clone(), to.clone()));
        self.weight = Weight { shape: to, rows, cols, ..self.weight };
    }

    /// LoCon's third factor: `down' = (flat(down^T) flat(mid^T))` reshaped [in, r, kh, kw], axes 0 and 1 swapped.
    fn fold_mid(&self, down: &Factor, mid: &Factor) -> Result<Factor> {
        let (left, right) = (down.swapped().flat(), mid.swapped().flat());
        let [outer, _, kernel @ ..] = mid.shape.as_slice() else {
            return Err(self.parts.shape_fault(mid, format!("`{}`", down.key), &down.shape));
        };
        if left.cols != right.rows || down.shape.len() < 2 || left.rows > self.weight.cols {
            return Err(self.parts.shape_fault(mid, format!("`{}`", down.key), &down.shape));
        }
        let mut shape = vec![left.rows as u64, *outer];
        shape.extend_from_slice(kernel);
        Ok(Factor { key: down.key.clone(), shape, values: left.times(&right).values }.swapped())
    }

    /// `reshape_weight`: the weight is padded with zeros to that shape first.
    fn pad(&mut self) -> Result<()> {
        let Some(to) = self.parts.read_shape(Part::ReshapeWeight)? else { return Ok(()) };
        let from = self.weight.shape.clone();
        let grows = to.len() == from.len() && to.iter().zip(&from).all(|(to, from)| to >= from);
        let matrix = matrix_of(&to)
            .filter(|_| grows && self.parts.target.projection.is_none() && self.parts.target.takes_rows_as_they_are());
        if matrix.is_none() {
            let what = format!("padding of the target `{}`", self.weight.name);
            let fault = AdapterFault::Shape { found: to, what, wanted: from };
            return Err(self.parts.fault(Part::ReshapeWeight, fault));
        }
        if to != from {
            self.pad_to(to);
        }
        Ok(())
    }
}

impl Parts<'_> {
    /// A part that holds a shape.
    fn read_shape(&self, part: Part) -> Result<Option<Vec<u64>>> {
        let Some(&tensor) = self.module.parts.get(&part) else { return Ok(None) };
        let info = self.adapter.checkpoint.layout().at(tensor);
        let bytes = self.adapter.bytes(tensor)?;
        let whole = |value: f32| (value >= 0.0 && value.fract() == 0.0 && value < 1e9).then_some(value as u64);
        let shape: Option<Vec<u64>> = match info.dtype {
            DType::I64 => bytes.as_chunks().0.iter().map(|raw| u64::try_from(i64::from_le_bytes(*raw)).ok()).collect(),
            DType::I32 => bytes.as_chunks().0.iter().map(|raw| u64::try_from(i32::from_le_bytes(*raw)).ok()).collect(),
            _ => self.adapter.factor(tensor)?.values.into_iter().map(whole).collect(),
        };
        let fault = || {
            let fault =
                AdapterFault::Shape { found: info.shape.clone(), what: "a list of sizes".to_owned(), wanted: vec![] };
            self.fault(part, fault)
        };
        shape.ok_or_else(fault).map(Some)
    }
}
