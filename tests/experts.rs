//! Mixtures of experts: adapters with factors for each expert or for a stack of all, on checkpoints that keep the experts'
//! weights stacked or apart.

mod reference;

use reference::{Tensor, f32s, file, floats, merged};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error};

const EXPERTS: usize = 3;
const RANK: usize = 2;
/// The scale of every adapter here: alpha / rank.
const SCALE: f32 = 2.0;

/// Numbers that look random.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 37 + seed * 101) % 23) as f32 / 8.0 - 1.25).collect()
}

/// A matrix, row by row.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn new(rows: usize, cols: usize, seed: usize) -> Matrix {
        Matrix { rows, cols, values: numbers(rows * cols, seed) }
    }

    fn times(&self, other: &Matrix) -> Matrix {
        let at = |index: usize| {
            let (row, col) = (index / other.cols, index % other.cols);
            (0..self.cols).map(|k| self.values[row * self.cols + k] * other.values[k * other.cols + col]).sum()
        };
        Matrix { rows: self.rows, cols: other.cols, values: (0..self.rows * other.cols).map(at).collect() }
    }

    fn transposed(&self) -> Matrix {
        let at = |index: usize| self.values[index % self.rows * self.cols + index / self.rows];
        Matrix { rows: self.cols, cols: self.rows, values: (0..self.values.len()).map(at).collect() }
    }

    fn below(&self, other: &Matrix) -> Matrix {
        let values = [&self.values[..], &other.values].concat();
        Matrix { rows: self.rows + other.rows, cols: self.cols, values }
    }

    fn tensor(&self, name: &str) -> Tensor {
        f32s(name, &[self.rows as u64, self.cols as u64], &self.values)
    }
}

/// The factors of one expert for one of its weights: up [outputs, r], down [r, inputs].
#[derive(Clone)]
struct Factors {
    up: Matrix,
    down: Matrix,
}

impl Factors {
    fn new(outputs: usize, inputs: usize, seed: usize) -> Factors {
        Factors { up: Matrix::new(outputs, RANK, seed), down: Matrix::new(RANK, inputs, seed + 7) }
    }

    fn change(&self) -> Matrix {
        let mut change = self.up.times(&self.down);
        change.values.iter_mut().for_each(|value| *value *= SCALE);
        change
    }
}

/// The weights of a layer's experts: `[expert][gate, up, down]`, each [outputs, inputs].
struct Layer {
    weights: Vec<[Matrix; 3]>,
}

impl Layer {
    fn new(hidden: usize, inner: usize) -> Layer {
        let of = |expert: usize| {
            let seed = expert * 3;
            [
                Matrix::new(inner, hidden, seed),
                Matrix::new(inner, hidden, seed + 1),
                Matrix::new(hidden, inner, seed + 2),
            ]
        };
        Layer { weights: (0..EXPERTS).map(of).collect() }
    }

    /// The layer with changes of the same form added.
    fn changed(&self, changes: &[[Matrix; 3]]) -> Layer {
        let sum = |(weight, change): (&Matrix, &Matrix)| {
            let values = weight.values.iter().zip(&change.values).map(|(a, b)| a + b).collect();
            Matrix { values, ..weight.clone() }
        };
        let of = |(weights, changes): (&[Matrix; 3], &[Matrix; 3])| {
            [0, 1, 2].map(|part| sum((&weights[part], &changes[part])))
        };
        Layer { weights: self.weights.iter().zip(changes).map(of).collect() }
    }

    fn apart(&self, holder: &str, names: [&str; 3]) -> Checkpoint {
        let of = |(expert, weights): (usize, &[Matrix; 3])| {
            let name = |part: usize| format!("model.layers.0.{holder}.{expert}.{}.weight", names[part]);
            [0, 1, 2].map(|part| weights[part].tensor(&name(part)))
        };
        file("apart", &self.weights.iter().enumerate().flat_map(of).collect::<Vec<_>>())
    }

    /// `[E, 2 i, h]` and `[E, h, i]`; transposed `[E, h, 2 i]` and `[E, i, h]`.
    fn stacked(&self, transposed: bool) -> Checkpoint {
        let turned = |matrix: &Matrix| if transposed { matrix.transposed() } else { matrix.clone() };
        let stack = |name: &str, all: Vec<Matrix>| {
            let shape = [all.len(), all[0].rows, all[0].cols].map(|side| side as u64);
            let values: Vec<f32> = all.into_iter().flat_map(|matrix| matrix.values).collect();
            f32s(&format!("model.layers.0.mlp.experts.{name}"), &shape, &values)
        };
        let gate_up = self.weights.iter().map(|[gate, up, _]| turned(&gate.below(up))).collect();
        let down = self.weights.iter().map(|[.., down]| turned(down)).collect();
        file("stacked", &[stack("gate_up_proj", gate_up), stack("down_proj", down)])
    }
}

fn values(checkpoint: &Checkpoint) -> Vec<Vec<f32>> {
    reference::tensors(checkpoint).iter().map(|(.., bytes)| floats(DType::F32, bytes)).collect()
}

fn close(got: &[Vec<f32>], wanted: &[Vec<f32>], what: &str) {
    for (got, wanted) in got.iter().zip(wanted) {
        let off = got.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == wanted.len() && off < 1e-4, "{what}: off by {off}");
    }
}

fn config(more: &str) -> String {
    format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": 4{more}}}"#)
}

fn apply(base: &Checkpoint, tensors: &[Tensor], config: &str) -> Vec<Vec<f32>> {
    let adapter = Adapter::from_peft(file("adapter", tensors), config, 1.0).unwrap();
    let (tensors, _) = merged(base, vec![adapter], Matching::Strict);
    tensors.iter().map(|(.., bytes)| floats(DType::F32, bytes)).collect()
}

fn fault(base: &Checkpoint, tensors: &[Tensor], config: &str) -> AdapterFault {
    let adapter = Adapter::from_peft(file("adapter", tensors), config, 1.0).unwrap();
    match Weights::patched(base.clone(), vec![adapter], Matching::Strict) {
        Err(Error::Adapter { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    }
}

/// An adapter with factors for each weight of each expert, and the changes that it makes.
fn per_expert(hidden: usize, inner: usize, holder: &str, names: [&str; 3]) -> (Vec<Tensor>, Vec<[Matrix; 3]>) {
    let (mut tensors, mut changes) = (Vec::new(), Vec::new());
    for expert in 0..EXPERTS {
        let sides = [(inner, hidden), (inner, hidden), (hidden, inner)];
        let factors = [0, 1, 2].map(|part| Factors::new(sides[part].0, sides[part].1, expert * 5 + part));
        for (name, factors) in names.iter().zip(&factors) {
            let module = format!("base_model.model.model.layers.0.{holder}.{expert}.{name}");
            tensors.push(factors.down.tensor(&format!("{module}.lora_A.weight")));
            tensors.push(factors.up.tensor(&format!("{module}.lora_B.weight")));
        }
        changes.push(factors.map(|factors| factors.change()));
    }
    (tensors, changes)
}

/// Factors of a stack as PEFT stores them: A [E r, inputs], B [outputs, r E] with the experts innermost.
fn wrapped(module: &str, factors: &[Factors]) -> Vec<Tensor> {
    let down: Vec<f32> = factors.iter().flat_map(|factors| factors.down.values.clone()).collect();
    let (outputs, inputs) = (factors[0].up.rows, factors[0].down.cols);
    let places = (0..outputs).flat_map(|row| (0..RANK).flat_map(move |k| (0..EXPERTS).map(move |e| (row, k, e))));
    let up: Vec<f32> = places.map(|(row, k, expert)| factors[expert].up.values[row * RANK + k]).collect();
    let rows = (EXPERTS * RANK) as u64;
    let module = format!("base_model.model.model.layers.0.{module}");
    vec![
        f32s(&format!("{module}.lora_A.weight"), &[rows, inputs as u64], &down),
        f32s(&format!("{module}.lora_B.weight"), &[outputs as u64, rows], &up),
    ]
}

/// A `target_parameters` adapter over both stacks, and the changes that it makes. `by_first` says that the factors' inputs are
/// the stack's first dimension for an expert, as before PEFT 0.19, here of [outputs, inputs].
fn of_parameters(hidden: usize, inner: usize, by_first: bool) -> (Vec<Tensor>, Vec<[Matrix; 3]>) {
    let gate_up: Vec<Factors> = (0..EXPERTS).map(|expert| Factors::new(2 * inner, hidden, expert)).collect();
    let down: Vec<Factors> = (0..EXPERTS).map(|expert| Factors::new(hidden, inner, expert + 11)).collect();
    let changes = gate_up.iter().zip(&down).map(|(gate_up, down)| {
        let both = gate_up.change();
        let half = |values: &[f32]| Matrix { rows: inner, cols: hidden, values: values.to_vec() };
        let (gate, up) = both.values.split_at(inner * hidden);
        [half(gate), half(up), down.change()]
    });
    let changes = changes.collect();
    let stored = |all: Vec<Factors>| -> Vec<Factors> {
        let flipped = |f: Factors| Factors { up: f.down.transposed(), down: f.up.transposed() };
        if by_first { all.into_iter().map(flipped).collect() } else { all }
    };
    let mut tensors = wrapped("mlp.experts.base_layer", &stored(gate_up));
    tensors.extend(wrapped("mlp.experts", &stored(down)));
    (tensors, changes)
}

const PARAMETERS: &str = r#", "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]"#;

const NEW: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];

#[test]
fn factors_of_each_expert_go_into_stacks_either_way_round() {
    // Sizes that say which way round a stack is, and sizes that do not by themselves.
    for (hidden, inner) in [(4, 6), (8, 4), (4, 4)] {
        let layer = Layer::new(hidden, inner);
        for (holder, names) in [("mlp.experts", NEW), ("block_sparse_moe.experts", MIXTRAL)] {
            let (tensors, changes) = per_expert(hidden, inner, holder, names);
            for transposed in [false, true] {
                let got = apply(&layer.stacked(transposed), &tensors, &config(""));
                let wanted = values(&layer.changed(&changes).stacked(transposed));
                close(&got, &wanted, &format!("{holder} of {hidden} and {inner}, transposed: {transposed}"));
            }
        }
    }
}

#[test]
fn older_names_of_experts_are_found_in_newer_files_and_the_reverse() {
    let layer = Layer::new(4, 6);
    let forms = [("mlp.experts", NEW), ("block_sparse_moe.experts", MIXTRAL)];
    for (adapter, file) in [(forms[0], forms[1]), (forms[1], forms[0])] {
        let (tensors, changes) = per_expert(4, 6, adapter.0, adapter.1);
        let got = apply(&layer.apart(file.0, file.1), &tensors, &config(""));
        close(&got, &values(&layer.changed(&changes).apart(file.0, file.1)), adapter.0);
    }
    for (adapter, stored) in [("mlp.gate", "block_sparse_moe.gate"), ("block_sparse_moe.gate", "mlp.gate")] {
        let router = file("router", &[f32s(&format!("model.layers.0.{stored}.weight"), &[3, 4], &[0.0; 12])]);
        let module = format!("base_model.model.model.layers.0.{adapter}");
        let ones = |part: &str, shape: [u64; 2]| {
            f32s(&format!("{module}.{part}.weight"), &shape, &vec![1.0; (shape[0] * shape[1]) as usize])
        };
        let got = apply(&router, &[ones("lora_A", [2, 4]), ones("lora_B", [3, 2])], &config(""));
        assert_eq!(got, [[4.0; 12]], "{stored}");
    }
}

#[test]
fn factors_of_parameters_go_into_their_stacks() {
    for (hidden, inner) in [(4, 6), (8, 4)] {
        let layer = Layer::new(hidden, inner);
        for (version, by_first) in [("0.18.0", true), ("0.19.1", false)] {
            let (tensors, changes) = of_parameters(hidden, inner, by_first);
            let config = config(&format!(r#"{PARAMETERS}, "peft_version": "{version}""#));
            let got = apply(&layer.stacked(false), &tensors, &config);
            close(&got, &values(&layer.changed(&changes).stacked(false)), &format!("{version} on [E, out, in]"));
            let got = apply(&layer.apart("mlp.experts", NEW), &tensors, &config);
            close(&got, &values(&layer.changed(&changes).apart("mlp.experts", NEW)), &format!("{version} apart"));
        }
        // Stacks of [inputs, outputs] have the inputs first in every version.
        let (tensors, changes) = of_parameters(hidden, inner, false);
        for version in ["0.17.0", "0.19.1"] {
            let config = config(&format!(r#"{PARAMETERS}, "peft_version": "{version}""#));
            let got = apply(&layer.stacked(true), &tensors, &config);
            close(&got, &values(&layer.changed(&changes).stacked(true)), &format!("{version} on [E, in, out]"));
        }
    }
    // Without a version, sizes that fit both ways are not guessed at.
    let (tensors, _) = of_parameters(8, 4, false);
    let unclear = fault(&Layer::new(8, 4).stacked(false), &tensors, &config(PARAMETERS));
    assert!(matches!(&unclear, AdapterFault::Config { reason } if reason.contains("peft_version")), "{unclear}");
    // Where the sizes say it, no version is needed.
    let (tensors, changes) = of_parameters(4, 6, false);
    let got = apply(&Layer::new(4, 6).stacked(false), &tensors, &config(PARAMETERS));
    close(&got, &values(&Layer::new(4, 6).changed(&changes).stacked(false)), "without a version");
    let missing = fault(&Layer::new(4, 6).stacked(false), &tensors[2..], &config(PARAMETERS));
    assert!(matches!(&missing, AdapterFault::Config { reason } if reason.contains("2 parameters")), "{missing}");
}

#[test]
fn parameters_of_other_names_are_told_apart_by_their_shapes() {
    let names = r#", "target_parameters": ["ffn.experts.w_in", "ffn.experts.a_out"], "peft_version": "0.18.0""#;
    let stack = |name: &str, rows: u64, cols: u64| {
        let values = numbers((3 * rows * cols) as usize, rows as usize);
        f32s(&format!("model.layers.0.ffn.experts.{name}"), &[3, rows, cols], &values)
    };
    // In the order of their definition, which their names do not have.
    let factors = |inner: (usize, usize), outer: (usize, usize)| {
        let of = |(rows, cols): (usize, usize), seed: usize| -> Vec<Factors> {
            (0..EXPERTS).map(|expert| Factors::new(cols, rows, seed + expert)).collect()
        };
        let mut tensors = wrapped("ffn.experts.base_layer", &of(inner, 1));
        tensors.extend(wrapped("ffn.experts", &of(outer, 5)));
        tensors
    };
    let base = file("model", &[stack("w_in", 4, 6), stack("a_out", 5, 4)]);
    let got = apply(&base, &factors((4, 6), (5, 4)), &config(names));
    let before = values(&base);
    for (stack, (rows, cols), seed) in [(0, (4, 6), 1), (1, (5, 4), 5)] {
        let change = (0..EXPERTS).flat_map(|e| Factors::new(cols, rows, seed + e).change().transposed().values);
        let wanted: Vec<f32> = before[stack].iter().zip(change).map(|(a, b)| a + b).collect();
        close(&got[stack..=stack], &[wanted], "by shape");
    }
    let same = file("model", &[stack("w_in", 4, 6), stack("a_out", 6, 4)]);
    let unclear = fault(&same, &factors((4, 6), (6, 4)), &config(names));
    assert!(matches!(&unclear, AdapterFault::Config { reason } if reason.contains("shapes")), "{unclear}");
}

/// A parameter that is named without its module is one of every module that has such a one, and of no other.
#[test]
fn a_bare_parameter_leaves_the_patterns_of_modules_alone() {
    let layer = Layer::new(4, 6);
    let (mut tensors, changes) = of_parameters(4, 6, false);
    let query = |part: &str, shape: [u64; 2]| {
        let name = format!("base_model.model.model.layers.0.self_attn.q_proj.{part}.weight");
        f32s(&name, &shape, &vec![1.0; (shape[0] * shape[1]) as usize])
    };
    tensors.extend([query("lora_A", [1, 4]), query("lora_B", [4, 1])]);
    let more = r#", "target_parameters": ["gate_up_proj", "down_proj"], "peft_version": "0.19.1",
        "rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 3}"#;
    let mut base = reference::tensors(&layer.stacked(false));
    base.push(f32s("model.layers.0.self_attn.q_proj.weight", &[4, 4], &[0.0; 16]));
    let got = apply(&file("model", &base), &tensors, &config(more));
    close(&got[..2], &values(&layer.changed(&changes).stacked(false)), "stacks");
    assert_eq!(got[2], [3.0; 16]);
}

#[test]
fn batched_factors_of_mlx_lm_go_into_stacks_and_apart() {
    let layer = Layer::new(4, 6);
    let (mut tensors, mut changes) = (Vec::new(), Vec::new());
    let sides = [(6, 4), (6, 4), (4, 6)];
    let factors: Vec<[Factors; 3]> =
        (0..EXPERTS).map(|e| [0, 1, 2].map(|part| Factors::new(sides[part].0, sides[part].1, e * 3 + part))).collect();
    for (part, name) in NEW.iter().enumerate() {
        let module = format!("model.layers.0.mlp.switch_mlp.{name}");
        let all = |of: fn(&Factors) -> &Matrix| -> Vec<f32> {
            factors.iter().flat_map(|parts| of(&parts[part]).values.clone()).collect()
        };
        let (outputs, inputs) = sides[part];
        let [e, o, i, r] = [EXPERTS, outputs, inputs, RANK].map(|side| side as u64);
        tensors.push(f32s(&format!("{module}.lora_a"), &[e, r, i], &all(|factors| &factors.down)));
        tensors.push(f32s(&format!("{module}.lora_b"), &[e, o, r], &all(|factors| &factors.up)));
    }
    changes.extend(factors.iter().map(|parts| [0, 1, 2].map(|part| parts[part].change())));
    let config = format!(r#"{{"fine_tune_type": "lora", "lora_parameters": {{"scale": {SCALE}}}}}"#);
    for base in [Layer::stacked(&layer, false), layer.apart("mlp.experts", NEW)] {
        let wanted = match base.layout().tensors().len() {
            2 => values(&layer.changed(&changes).stacked(false)),
            _ => values(&layer.changed(&changes).apart("mlp.experts", NEW)),
        };
        close(&apply(&base, &tensors, &config), &wanted, "mlx");
    }
}

#[test]
fn what_is_not_known_of_experts_is_refused() {
    let layer = Layer::new(4, 6);
    let (tensors, _) = per_expert(4, 6, "mlp.experts", NEW);
    // gpt-oss has gate and up in turn; its experts have biases.
    let mut stacks = reference::tensors(&layer.stacked(true));
    stacks.push(f32s("model.layers.0.mlp.experts.gate_up_proj_bias", &[3, 12], &[0.0; 36]));
    let in_turn = fault(&file("gpt-oss", &stacks), &tensors, &config(""));
    assert!(matches!(&in_turn, AdapterFault::Unsupported { kind } if kind.contains("in turn")), "{in_turn}");
    let stacked = layer.stacked(false);
    // One pair of factors for a stack, by no program that is known.
    let module = "base_model.model.model.layers.0.mlp.experts.down_proj";
    let pair = [
        f32s(&format!("{module}.lora_A.weight"), &[2, 4], &[0.5; 8]),
        f32s(&format!("{module}.lora_B.weight"), &[6, 2], &[0.5; 12]),
    ];
    let refused = fault(&layer.stacked(true), &pair, &config(""));
    assert!(matches!(&refused, AdapterFault::Unsupported { kind } if kind.contains("all experts")), "{refused}");
    // An expert that is not there, and factors of other sizes.
    let mut others = tensors.clone();
    others.iter_mut().for_each(|tensor| tensor.0 = tensor.0.replace("experts.2.", "experts.3."));
    assert!(matches!(fault(&stacked, &others, &config("")), AdapterFault::Shape { .. }));
    let (wrong, _) = per_expert(5, 6, "mlp.experts", NEW);
    assert!(matches!(fault(&stacked, &wrong, &config("")), AdapterFault::Shape { .. }));
    // Another kind than LoRA.
    let lokr = [
        f32s("base_model.model.model.layers.0.mlp.experts.0.up_proj.lokr_w1", &[6, 1], &[1.0; 6]),
        f32s("base_model.model.model.layers.0.mlp.experts.0.up_proj.lokr_w2", &[1, 4], &[1.0; 4]),
    ];
    let refused = fault(&stacked, &lokr, r#"{"peft_type": "LOKR", "r": 2, "alpha": 2}"#);
    assert!(matches!(refused, AdapterFault::Unsupported { .. }), "{refused}");
    // The same expert twice, in another way.
    let mut twice = tensors[..2].to_vec();
    twice.extend(tensors[..2].iter().map(|(name, dtype, shape, bytes)| {
        let name = name.replace("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1");
        (name, *dtype, shape.clone(), bytes.iter().map(|byte| byte ^ 0x80).collect())
    }));
    assert!(matches!(fault(&stacked, &twice, &config("")), AdapterFault::Overlap { .. }));
}

#[test]
fn whole_stacks_are_replaced_and_changed_after_that() {
    let layer = Layer::new(4, 6);
    let stacked = layer.stacked(false);
    let new = [f32s("base_model.model.model.layers.0.mlp.experts.down_proj", &[3, 4, 6], &[0.5; 72])];
    let whole = Adapter::from_peft(file("whole", &new), &config(""), 1.0).unwrap();
    let (tensors, changes) = per_expert(4, 6, "mlp.experts", NEW);
    let factors = Adapter::from_peft(file("factors", &tensors), &config(""), 1.0).unwrap();
    let (got, _) = merged(&stacked, vec![whole, factors], Matching::Strict);
    let mut replaced = Layer::new(4, 6);
    replaced.weights.iter_mut().for_each(|[.., down]| down.values.fill(0.5));
    let got: Vec<Vec<f32>> = got.iter().map(|(.., bytes)| floats(DType::F32, bytes)).collect();
    close(&got, &values(&replaced.changed(&changes).stacked(false)), "replaced");
}
