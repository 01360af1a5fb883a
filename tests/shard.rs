//! Parts of models: of ranks and of stages. Joined again, they are the whole, whatever was done to it.

mod reference;
#[path = "support/examples.rs"]
mod run;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use reference::{Tensor, f32s, file, named, stored, tensor};
use support::{GPU0, Subject, described, spec};
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{Layout, OrderSource, Rank, ShardRules};
use tensor_offload::error::{Mismatch, ShardFault};
use tensor_offload::transfer::{FileSource, ReadPart, Source, Stamp};
use tensor_offload::{
    Adapter, Checkpoint, DType, Error, Loader, Matching, Planner, Registry, Result, Rounding, ScalePolicy, Weights,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora");

fn data(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn rank(rank: u32, of: u32) -> Rank {
    Rank { rank, of }
}

/// All tensors of weights as they are loaded.
fn contents(weights: &Weights) -> Vec<Tensor> {
    let read = |tensor| {
        let info = weights.layout().tensor(tensor).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        weights.read(tensor, &mut bytes).unwrap();
        (info.name.clone(), info.dtype, info.shape.clone(), bytes)
    };
    weights.layout().tensor_ids().map(read).collect()
}

/// Joins the parts of each rank, which differ from the whole in one dimension at most.
fn joined(parts: &[Vec<Tensor>], whole: &[Tensor]) -> Vec<Tensor> {
    let join = |(at, (name, dtype, shape, bytes)): (usize, &Tensor)| {
        let of: Vec<&Tensor> = parts.iter().map(|part| &part[at]).collect();
        assert!(of.iter().all(|(other, ..)| other == name), "{name}");
        let Some(dimension) = (0..shape.len()).find(|&d| of.iter().any(|(_, _, part, _)| part[d] != shape[d])) else {
            assert!(of.iter().all(|(.., part)| part == bytes), "{name} is whole on each rank");
            return of[0].clone();
        };
        let outer: u64 = shape[..dimension].iter().product();
        let mut all = Vec::with_capacity(bytes.len());
        for run in 0..outer as usize {
            for (_, dtype, shape, bytes) in &of {
                let run_bytes = dtype.bytes_of(&shape[dimension..]).unwrap() as usize;
                all.extend_from_slice(&bytes[run * run_bytes..][..run_bytes]);
            }
        }
        (name.clone(), *dtype, shape.clone(), all)
    };
    whole.iter().enumerate().map(join).collect()
}

/// Whether the parts of `of` ranks, each made by `weights`, joined are those of the whole. Returns the bytes of the largest part.
fn check_joined(
    checkpoint: &Checkpoint,
    rules: &ShardRules,
    of: u32,
    weights: impl Fn(Checkpoint) -> Result<Weights>,
) -> u64 {
    let whole = contents(&weights(checkpoint.clone()).unwrap());
    let parts = (0..of).map(|number| weights(checkpoint.shard(rules, rank(number, of)).unwrap()).unwrap());
    let parts: Vec<Weights> = parts.collect();
    let read: Vec<Vec<Tensor>> = parts.iter().map(contents).collect();
    for ((name, dtype, shape, bytes), (_, _, _, wanted)) in joined(&read, &whole).into_iter().zip(&whole) {
        assert!(bytes == *wanted, "{name} {dtype} {shape:?} of {of} ranks");
    }
    parts.iter().map(|part| part.layout().bytes()).max().unwrap()
}

fn plain(checkpoint: Checkpoint) -> Result<Weights> {
    Ok(Weights::new(checkpoint))
}

fn fault<T: std::fmt::Debug>(result: Result<T>) -> (Option<String>, ShardFault) {
    match result {
        Err(Error::Shard { tensor, fault }) => (tensor, *fault),
        other => panic!("{other:?}"),
    }
}

/// A language model of four heads and two key-value heads, whose sizes eight ranks divide.
fn llama() -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = support::safetensors(&support::llama(3, 64), 5);
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let config = r#"{"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn adapters(checkpoint: &Checkpoint) -> Vec<Adapter> {
    let tensors: Vec<_> = checkpoint.layout().tensors().iter().collect();
    let specs: Vec<_> = tensors.iter().map(|info| spec(info.name.clone(), info.dtype, &info.shape)).collect();
    support::two_loras(&specs, 3)
}

#[test]
fn parts_of_two_four_and_eight_ranks_joined_are_the_whole() {
    let (_folder, checkpoint) = llama();
    let rules = ShardRules::megatron();
    for of in [1, 2, 4, 8] {
        let most = check_joined(&checkpoint, &rules, of, plain);
        assert!(most < checkpoint.layout().bytes() / u64::from(of) * 11 / 10, "{of}: {most}");
        check_joined(&checkpoint, &rules, of, |part| Weights::patched(part, adapters(&checkpoint), Matching::Strict));
    }
}

#[test]
fn the_small_model_and_its_adapter_are_divided() {
    let checkpoint = Checkpoint::open(MODEL).unwrap();
    let lora = |part| Weights::patched(part, vec![Adapter::open(LORA, 0.5)?], Matching::Strict);
    check_joined(&checkpoint, &ShardRules::megatron(), 2, lora);
    let part = lora(checkpoint.shard(&ShardRules::megatron(), rank(1, 2)).unwrap()).unwrap();
    // The report is that of the whole, on every rank.
    assert_eq!(part.report().to_string(), lora(checkpoint).unwrap().report().to_string());
}

/// Every kind of adapter, over matrices and convolutions, by rows and by columns.
#[test]
fn patched_and_divided_is_divided_and_patched() {
    let index = std::fs::read_to_string(data("adapters/index.json")).unwrap();
    let index: Vec<serde_json::Value> = serde_json::from_str(&index).unwrap();
    let mut checked = 0;
    for case in &index {
        let name = case["name"].as_str().unwrap();
        let reference = Checkpoint::open(data(&format!("adapters/{name}.safetensors"))).unwrap();
        let strength: f32 = reference.metadata()["strength"].parse().unwrap();
        let (_, _, shape, base) = named(&reference, "base");
        let adapter: Vec<Tensor> = reference::tensors(&reference)
            .into_iter()
            .filter_map(|(key, dtype, shape, bytes)| {
                let rest = key.strip_prefix("adapter.x")?.to_owned();
                Some((format!("diffusion_model.blocks.0.attn.proj{rest}"), dtype, shape, bytes))
            })
            .collect();
        let weight = stored(DType::BF16, &reference::floats(DType::F32, &base));
        let model = file("base", &[tensor("blocks.0.attn.proj.weight", DType::BF16, &shape, weight)]);
        let patched = |part| {
            let adapter = Adapter::from_checkpoint(file("adapter", &adapter), strength)?;
            Weights::patched(part, vec![adapter], Matching::Strict)
        };
        let whole = patched(model.clone()).unwrap();
        let patched_shape = whole.layout().tensors()[0].shape.clone();
        for (rules, dimension) in [(ShardRules::new().rows("proj"), 0), (ShardRules::new().columns("proj"), 1)] {
            for of in [2u32, 4] {
                let divides = |shape: &[u64]| shape[dimension].is_multiple_of(u64::from(of));
                if !divides(&shape) || !divides(&patched_shape) {
                    assert!(matches!(
                        fault(model.shard(&rules, rank(0, of)).and_then(patched)).1,
                        ShardFault::Unequal { .. }
                    ));
                    continue;
                }
                check_joined(&model, &rules, of, patched);
                check_joined(&model, &rules, of, |part| patched(part)?.cast("*", DType::F32));
                let seed = Rounding::Stochastic { seed: 7 };
                check_joined(&model, &rules, of, |part| Ok(patched(part)?.rounding(seed)));
                check_joined(&model, &rules, of, |part| Ok(patched(part)?.cast("*", DType::F8E4M3)?.rounding(seed)));
                checked += 1;
            }
        }
    }
    assert!(checked > 60, "{checked}");
}

/// What a cast alone does, with the noise of each element where it is in the whole.
#[test]
fn casts_of_parts_are_parts_of_casts() {
    let (_folder, checkpoint) = llama();
    let rules = ShardRules::megatron();
    for rounding in [Rounding::NearestEven, Rounding::Stochastic { seed: 2 }] {
        check_joined(&checkpoint, &rules, 4, |part| {
            Weights::new(part).rounding(rounding).cast("*", DType::F16)?.cast("mlp", DType::F8E5M2)
        });
    }
}

#[test]
fn factors_that_are_not_merged_are_divided() {
    let (_folder, checkpoint) = llama();
    let rules = ShardRules::megatron();
    let deferred = |part| Weights::patched(part, adapters(&checkpoint), Matching::Strict)?.defer("*", DType::BF16);
    for of in [2, 4] {
        check_joined(&checkpoint, &rules, of, deferred);
    }
    let part = deferred(checkpoint.shard(&rules, rank(1, 4)).unwrap()).unwrap();
    let shape = |name: &str| part.layout().tensor(part.layout().find(name).unwrap()).unwrap().shape.clone();
    // Divided by rows, B is; by columns, A.
    let (up, down) = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj");
    assert_eq!(shape(&format!("{up}.lora_B.weight"))[0], shape(&format!("{up}.weight"))[0]);
    assert_eq!(shape(&format!("{up}.lora_A.weight"))[1], shape(&format!("{up}.weight"))[1]);
    assert_eq!(shape(&format!("{down}.lora_A.weight"))[1], shape(&format!("{down}.weight"))[1]);
    assert_eq!(shape(&format!("{down}.lora_B.weight"))[0], shape(&format!("{down}.weight"))[0]);
}

/// Codes of eight bits with a scale of each kind, kept or computed anew.
#[test]
fn scales_are_divided_with_their_weights() {
    for case in ["e4m3_plain", "e4m3_scale_weight", "e4m3_weight_scale", "e4m3_block_scale_inv"] {
        let open = |part: &str| Checkpoint::open(data(&format!("fp8/{case}.{part}.safetensors"))).unwrap();
        let base = open("base");
        let strength = open("adapter").metadata()["strength"].parse().unwrap();
        let patched =
            |part| Weights::patched(part, vec![Adapter::from_checkpoint(open("adapter"), strength)?], Matching::Strict);
        // Two blocks by three.
        for (rules, of) in [(ShardRules::new().rows("proj"), 2), (ShardRules::new().columns("proj"), 3)] {
            check_joined(&base, &rules, of, plain);
            check_joined(&base, &rules, of, patched);
            if !case.contains("plain") {
                check_joined(&base, &rules, of, |part| patched(part)?.scales(ScalePolicy::Recompute));
            }
        }
    }
    let weight = |rows: u64| tensor("a.weight", DType::F8E4M3, &[rows, 2], vec![0x58; 2 * rows as usize]);
    let blocks = |rows: u64, scales: u64| {
        let scale = f32s("a.weight_scale_inv", &[scales, 1], &vec![1.0; scales as usize]);
        file("model", &[weight(rows), scale])
    };
    let rows = ShardRules::new().rows("a");
    check_joined(&blocks(256, 2), &rows, 2, plain);
    // Scales in tiles of 128 rows, as ComfyUI stores them, have no rows to divide.
    let note = br#"{"format": "mxfp8"}"#;
    let tiles = file(
        "model",
        &[
            tensor("a.weight", DType::F8E4M3, &[256, 128], vec![0x38; 256 * 128]),
            tensor("a.weight_scale", DType::U8, &[256, 4], vec![127; 1024]),
            tensor("a.comfy_quant", DType::U8, &[note.len() as u64], note.to_vec()),
        ],
    );
    assert!(matches!(fault(tiles.shard(&rows, rank(0, 2))).1, ShardFault::Beside { .. }));
    // Nobody knows what a vector of another length is for.
    let vector = file("model", &[weight(4), f32s("a.weight_scale", &[3], &[1.0; 3])]);
    assert!(matches!(fault(vector.shard(&rows, rank(0, 2))).1, ShardFault::Beside { .. }));
    // A block would be in two parts.
    for (rows_, scales, of) in [(384, 3, 2), (300, 3, 3)] {
        let (tensor, fault) = fault(blocks(rows_, scales).shard(&rows, rank(0, of)));
        assert_eq!(tensor.as_deref(), Some("a.weight_scale_inv"));
        assert!(matches!(fault, ShardFault::Beside { .. }), "{fault}");
    }
}

#[test]
fn blocks_of_gguf_files_are_divided_whole() {
    let checkpoint = Checkpoint::open(data("gguf/mixed.gguf")).unwrap();
    let mut divided = 0;
    for info in checkpoint.layout().tensors().iter().filter(|info| info.shape.len() == 2) {
        for (rules, dimension) in
            [(ShardRules::new().rows(&*info.name), 0), (ShardRules::new().columns(&*info.name), 1)]
        {
            if !info.shape[dimension].is_multiple_of(2) {
                continue;
            }
            let block = if dimension == 1 { info.dtype.block().elements } else { 1 };
            if (info.shape[dimension] / 2).is_multiple_of(block) {
                check_joined(&checkpoint, &rules, 2, plain);
                divided += 1;
            } else {
                let (tensor, fault) = fault(checkpoint.shard(&rules, rank(0, 2)));
                assert_eq!(tensor.as_deref(), Some(&*info.name));
                assert!(matches!(fault, ShardFault::Blocks { .. }), "{fault}");
            }
        }
    }
    assert!(divided > 3, "{divided}");
}

#[test]
fn what_cannot_be_divided_is_said_with_its_name() {
    let (_folder, checkpoint) = llama();
    let megatron = ShardRules::megatron();
    let (of, unequal) = fault(checkpoint.shard(&megatron, rank(0, 3)));
    assert!(of.is_some() && matches!(unequal, ShardFault::Unequal { of: 3, .. }), "{of:?} {unequal}");
    assert_eq!(fault(checkpoint.shard(&megatron, rank(2, 2))).1, ShardFault::Rank { rank: 2, of: 2 });
    assert_eq!(fault(checkpoint.shard(&ShardRules::new(), rank(0, 2))).1, ShardFault::NothingDivided);
    assert_eq!(fault(checkpoint.shard(&ShardRules::new().rows("nowhere"), rank(0, 2))).1, ShardFault::NothingDivided);
    let part = checkpoint.shard(&megatron, rank(1, 2)).unwrap();
    assert_eq!(fault(part.shard(&megatron, rank(0, 2))).1, ShardFault::Divided { rank: 1, of: 2 });
    // In memory there is no configuration.
    let alone = Checkpoint::from_bytes("model", support::safetensors(&support::llama(3, 64), 5)).unwrap();
    let unknown = fault(alone.shard(&megatron, rank(0, 2))).1;
    assert!(matches!(unknown, ShardFault::Heads { .. }), "{unknown}");
    check_joined(&alone, &ShardRules::megatron().heads(8, 8), 2, plain);
    let codes = |name: &str, shape: &[u64]| {
        tensor(name, DType::I32, shape, vec![0; 4 * shape.iter().product::<u64>() as usize])
    };
    let gptq =
        file("gptq", &[codes("a.qweight", &[2, 8]), codes("a.qzeros", &[1, 1]), f32s("a.scales", &[1, 8], &[1.0; 8])]);
    let (_, packed) = fault(gptq.shard(&ShardRules::new().rows("a"), rank(0, 2)));
    assert!(packed.to_string().contains("GPTQ"), "{packed}");
    // The last rule decides.
    let left_out = ShardRules::new().rows("a").whole("a").and("*.scales: columns".parse().unwrap());
    check_joined(&gptq, &left_out, 2, plain);
}

/// The examples take a rank's part, and what they write of each joined is what they write of the whole.
#[test]
fn examples_take_a_part() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = format!("{LORA}:0.5");
    let merge = |out: &str, part: &[&str]| {
        let out = folder.path().join(out);
        let args = [MODEL, "--adapter", &adapter, "--out", out.to_str().unwrap()];
        run::works("merge", &[&args[..], part].concat());
        contents(&Weights::new(Checkpoint::open(&out).unwrap()))
    };
    let whole = merge("whole.safetensors", &[]);
    let parts = [merge("0.safetensors", &["--rank", "0/2"]), merge("1.safetensors", &["--rank", "1/2"])];
    assert!(joined(&parts, &whole) == whole);
    let rules = ["--rank", "1/2", "--rules", "down_proj: whole"];
    let json = run::json_of("inspect", &[&[MODEL], &rules[..]].concat());
    assert_eq!(json["part"]["rank"], "1/2");
    let down = json["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "model.layers.0.mlp.down_proj.weight");
    let (_, _, shape, _) = whole.iter().find(|tensor| tensor.0 == "model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!(down.unwrap()["shape"], serde_json::json!(shape));
    let json = run::json_of("offload", &["--rank", "0/2", "--stage", "1/2", "--steps", "1"]);
    assert_eq!((&json["part"]["rank"], &json["part"]["stage"]), (&"0/2".into(), &"1/2".into()));
    let json = run::json_of(
        "plan",
        &[MODEL, "--stage", "0/2", "--device", "cpu=64mb", "--compute", "cpu", "--alloc", "cpu,*"],
    );
    assert!(!json["assignments"].as_array().unwrap().is_empty());
    for (args, says) in [
        (&["--rank", "0/3"][..], "3 ranks"),
        (&["--rank", "2/2"], "no rank 2 of 2"),
        (&["--stage", "0/99"], "99 stages"),
        (&["--rank", "0/2", "--rules", "a"], "`:` is missing"),
    ] {
        let (_, message) = run::fails("inspect", &[&[MODEL], args].concat());
        assert!(message.contains(says), "{message}");
    }
}

/// A change that needs more than the part is not made of the part alone.
#[test]
fn a_patch_of_a_part_that_needs_the_whole_says_so() {
    let model = file("model", &[f32s("a.proj.weight", &[4, 4], &[1.0; 16])]);
    let dora = [
        f32s("a.proj.lora_up.weight", &[4, 1], &[1.0; 4]),
        f32s("a.proj.lora_down.weight", &[1, 4], &[1.0; 4]),
        f32s("a.proj.dora_scale", &[4, 1], &[2.0; 4]),
    ];
    let part = model.shard(&ShardRules::new().columns("proj"), rank(0, 2)).unwrap();
    let adapter = Adapter::from_checkpoint(file("adapter", &dora), 1.0).unwrap();
    let weights = Weights::patched(part, vec![adapter], Matching::Strict).unwrap();
    let (_, patch) = weights.patches().iter().next().unwrap();
    let error = patch.apply(&mut [0; 32], &[]).unwrap_err();
    assert!(matches!(&error, Error::Mismatch(fault) if matches!(**fault, Mismatch::PartOfTensor { .. })), "{error}");
}

/// Counts the bytes that are read.
#[derive(Debug)]
struct Counting(FileSource, Arc<AtomicU64>);

impl Source for Counting {
    fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    fn stamp(&self) -> Stamp {
        self.0.stamp()
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.1.fetch_add(dst.len() as u64, Ordering::Relaxed);
        self.0.read_at(at, dst)
    }

    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        self.1.fetch_add(parts.iter().map(|part| part.dst.len() as u64).sum(), Ordering::Relaxed);
        self.0.read_parts(parts)
    }
}

#[test]
fn a_rank_reads_its_part_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let specs =
        [spec("layers.0.up.weight", DType::BF16, &[512, 64]), spec("layers.1.down.weight", DType::BF16, &[64, 512])];
    std::fs::write(&path, support::safetensors(&specs, 1)).unwrap();
    let read = Arc::new(AtomicU64::new(0));
    let open =
        |path: &std::path::Path| Ok(Arc::new(Counting(FileSource::open(path)?, Arc::clone(&read))) as Arc<dyn Source>);
    let checkpoint = Checkpoint::open_with(&path, open).unwrap();
    let part = checkpoint.shard(&ShardRules::new().rows("up").columns("down"), rank(1, 4)).unwrap();
    let bytes_for = |name: &str| {
        read.store(0, Ordering::Relaxed);
        let tensor = part.find(name).unwrap();
        part.read(tensor, &mut vec![0; part.layout().tensor(tensor).unwrap().bytes as usize]).unwrap();
        read.load(Ordering::Relaxed)
    };
    assert_eq!(bytes_for("layers.0.up.weight"), 512 * 64 * 2 / 4);
    // All between the first and the last of its columns.
    assert_eq!(bytes_for("layers.1.down.weight"), 63 * 512 * 2 + 128 * 2);
    // The same of an adapter: only the rows that it has.
    let lora = Adapter::from_checkpoint(support::lora(&specs, DType::F32, 4, 1), 1.0).unwrap();
    let weights = Weights::patched(part.clone(), vec![lora], Matching::Strict).unwrap();
    read.store(0, Ordering::Relaxed);
    let tensor = part.find("layers.0.up.weight").unwrap();
    weights.read(tensor, &mut [0; 512 * 64 * 2 / 4]).unwrap();
    assert_eq!(read.load(Ordering::Relaxed), 512 * 64 * 2 / 4);
}

#[test]
fn a_part_is_loaded_streamed_and_derived_from_as_any_checkpoint() {
    let (_folder, checkpoint) = llama();
    let part = checkpoint.shard(&ShardRules::megatron(), rank(1, 2)).unwrap();
    let machine = described(&["cuda:0=24mb,link=10", "cpu=64mb,link=20", "disk=64mb,link=4"]);
    for allocation in ["cpu,*", "cuda:0,30%;cpu,*", "cuda:0,30%;cpu,30%;disk,*"] {
        for patched in [false, true] {
            let registry = Registry::described(machine.clone(), Clock::Virtual);
            let adapters = if patched { adapters(&checkpoint) } else { Vec::new() };
            let subject = Subject::new(Weights::patched(part.clone(), adapters, Matching::Strict).unwrap());
            let plan = subject.planner(&machine, allocation).compute(GPU0).plan().unwrap();
            let model = support::load(&registry, &subject, &plan);
            subject.check(&model);
            support::check_streamed(&model, &subject);
        }
    }
    // What does not change is shared, and another rank's part is another.
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = |weights: &Weights| {
        Planner::new(weights.layout(), &machine).compute(GPU0).allocation("cpu,*".parse().unwrap()).plan().unwrap()
    };
    let base = Weights::new(part.clone());
    let loader = Loader::new(&registry);
    let model = Arc::new(loader.load(&base, &plan(&base)).unwrap());
    let merged = Weights::patched(part, vec![adapters(&checkpoint).remove(0)], Matching::Strict).unwrap();
    let derived = loader.derive(&model, &merged, &plan(&merged)).unwrap();
    Subject::new(merged).check(&derived);
    assert!(derived.report().shared > 0);
    let other = Weights::new(checkpoint.shard(&ShardRules::megatron(), rank(0, 2)).unwrap());
    let of_other = loader.derive(&model, &other, &plan(&other)).unwrap();
    Subject::new(other).check(&of_other);
}

#[test]
fn stages_joined_are_the_whole() {
    let (_folder, checkpoint) = llama();
    let whole = contents(&Weights::patched(checkpoint.clone(), adapters(&checkpoint), Matching::Strict).unwrap());
    for count in [1, 2, 3] {
        let stages = checkpoint.layout().stages(count).unwrap();
        assert_eq!((stages.len(), stages[0].start), (count, 0));
        let (mut all, mut layers) = (Vec::new(), Vec::new());
        for stage in stages {
            let part = checkpoint.stage(stage).unwrap();
            layers.extend(part.layout().layers().iter().map(|layer| layer.name.clone()));
            assert_eq!(part.layout().order(), checkpoint.layout().order());
            let weights = Weights::patched(part, adapters(&checkpoint), Matching::Strict).unwrap();
            all.extend(contents(&weights));
        }
        let names: Vec<String> = checkpoint.layout().layers().iter().map(|layer| layer.name.clone()).collect();
        assert_eq!(layers, names);
        let (mut all, mut wanted) = (all, whole.clone());
        all.sort_by(|one, other| one.0.cmp(&other.0));
        wanted.sort_by(|one, other| one.0.cmp(&other.0));
        assert!(all == wanted, "{count}");
    }
    // A rank of a stage, in either order.
    let rules = ShardRules::megatron();
    let one = checkpoint.stage(1..3).unwrap().shard(&rules, rank(1, 2)).unwrap();
    let other = checkpoint.shard(&rules, rank(1, 2)).unwrap().stage(1..3).unwrap();
    assert_eq!(contents(&Weights::new(one.clone())), contents(&Weights::new(other)));
    assert!(one.stage(0..1).is_err() && checkpoint.stage(0..0).is_err() && checkpoint.stage(0..99).is_err());
    assert!(checkpoint.layout().stages(0).is_err() && checkpoint.layout().stages(99).is_err());
}

/// The head of the small model uses its embedding's weights.
#[test]
fn the_last_stage_has_the_embedding_that_its_head_uses() {
    let folder = tempfile::tempdir().unwrap();
    let specs: Vec<_> = support::llama(3, 64).into_iter().filter(|spec| !spec.name.contains("lm_head")).collect();
    std::fs::write(folder.path().join("model.safetensors"), support::safetensors(&specs, 5)).unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"tie_word_embeddings": true}"#).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let stages = checkpoint.layout().stages(2).unwrap();
    let parts: Vec<Checkpoint> = stages.into_iter().map(|stage| checkpoint.stage(stage).unwrap()).collect();
    for part in &parts {
        let table = part.layout().modules().iter().find(|module| module.name.contains("embed_tokens")).unwrap();
        assert!(table.tied);
    }
}

/// An adapter for the head of a model whose head uses the embedding makes it a tensor of its own, on each rank and in the last stage.
#[test]
fn a_head_that_comes_to_differ_is_divided_too() {
    let folder = tempfile::tempdir().unwrap();
    let specs: Vec<_> = support::llama(2, 64).into_iter().filter(|spec| !spec.name.contains("lm_head")).collect();
    std::fs::write(folder.path().join("model.safetensors"), support::safetensors(&specs, 5)).unwrap();
    let config = r#"{"tie_word_embeddings": true, "num_attention_heads": 8, "num_key_value_heads": 8}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let table = specs.iter().find(|spec| spec.name.contains("embed_tokens")).unwrap().shape.clone();
    let factors = [
        f32s("lm_head.lora_A.weight", &[1, table[1]], &vec![0.5; table[1] as usize]),
        f32s("lm_head.lora_B.weight", &[table[0], 1], &(0..table[0]).map(|row| row as f32).collect::<Vec<_>>()),
    ];
    let patched = |part| {
        Weights::patched(part, vec![Adapter::from_checkpoint(file("adapter", &factors), 1.0)?], Matching::Strict)
    };
    let whole = patched(checkpoint.clone()).unwrap();
    assert!(whole.report().untied.is_some() && whole.layout().tensors().last().unwrap().name == "lm_head.weight");
    check_joined(&checkpoint, &ShardRules::megatron(), 4, patched);
    let of = checkpoint.layout().layers().len();
    let (first, last) = (checkpoint.stage(0..2).unwrap(), checkpoint.stage(2..of).unwrap());
    assert!(patched(first).unwrap().layout().find("lm_head.weight").is_none());
    let last = patched(last).unwrap();
    let head = |weights: &Weights| contents(weights).into_iter().find(|tensor| tensor.0 == "lm_head.weight").unwrap();
    assert_eq!(head(&last), head(&whole));
}

#[test]
fn an_order_that_the_caller_gave_stays() {
    let (_folder, checkpoint) = llama();
    let layout = checkpoint.layout().clone().in_order(&["model.layers.2", "model.layers.0"]).unwrap();
    let names = |layout: &Layout| layout.layers().iter().map(|layer| layer.name.clone()).collect::<Vec<_>>();
    let wanted = names(&layout);
    let checkpoint = checkpoint.with_layout(layout).unwrap();
    let part = checkpoint.shard(&ShardRules::megatron(), rank(0, 2)).unwrap();
    assert_eq!((names(part.layout()), part.layout().order()), (wanted, &OrderSource::Given));
    let again = part.layout().clone().in_order(&["model.layers.1"]).unwrap();
    let part = part.with_layout(again.clone()).unwrap();
    let weights = Weights::patched(part.clone(), adapters(&checkpoint), Matching::Strict).unwrap();
    assert_eq!(names(weights.layout()), names(&again));
    assert!(part.with_layout(Layout::blocks([4])).is_err());
}

/// A file with codes is read in part as the file that it stands for.
#[test]
fn compressed_files_are_divided() {
    let (folder, checkpoint) = llama();
    let path = folder.path().join("compressed.safetensors");
    support::compressed::compress(&checkpoint, &path);
    let compressed = Checkpoint::open(&path).unwrap();
    let rules = ShardRules::megatron().heads(8, 8);
    for of in [2, 4] {
        for number in 0..of {
            let part = |of_: &Checkpoint| contents(&Weights::new(of_.shard(&rules, rank(number, of)).unwrap()));
            let sorted = |mut tensors: Vec<Tensor>| {
                tensors.sort_by(|one, other| one.0.cmp(&other.0));
                tensors
            };
            assert!(sorted(part(&compressed)) == sorted(part(&checkpoint)), "{number} of {of}");
        }
    }
    check_joined(&compressed, &rules, 2, |part| Weights::new(part).compress());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any dimension of a tensor, divided in any way that there is, among any number of ranks.
    #[test]
    fn any_division_joined_is_the_whole(
        shape in proptest::collection::vec(1u64..9, 1..4),
        of in 1u32..5,
        dimension in 0usize..3,
        how in 0usize..4,
    ) {
        let count = shape.iter().product::<u64>();
        let bytes: Vec<u8> = (0..count * 2).map(|at| at as u8).collect();
        let model = file("model", &[tensor("a.weight", DType::BF16, &shape, bytes), f32s("b.weight", &[8], &[1.0; 8])]);
        let how = ["", "uneven", "in heads", "in units of 2"][how];
        let rules: ShardRules = format!("a: dimension {dimension} {how}; b: rows uneven").parse().unwrap();
        let rules = rules.heads(4, 4);
        match model.shard(&rules, rank(0, of)) {
            Ok(_) => { check_joined(&model, &rules, of, plain); }
            Err(error) => prop_assert!(matches!(error, Error::Shard { .. }), "{error}"),
        }
    }
}
