//! Models made out of models: what is read again, shared and copied, and whose bytes they have. Numbers are those of the
//! cases that users met.

mod support;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use support::watched::Watched;
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::transfer::{FileSource, Source, Stamp};
use tensor_offload::{
    Adapter, Checkpoint, DType, Error, ErrorKind, LayerId, Loader, Matching, Model, Plan, Registry, Result, Rounding,
    Streamer, Weights,
};

/// A file that lists what is read of it.
#[derive(Debug)]
struct Counting {
    inner: FileSource,
    reads: Reads,
}

type Reads = Arc<Mutex<Vec<Range<u64>>>>;

impl Source for Counting {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn stamp(&self) -> Stamp {
        self.inner.stamp()
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.reads.lock().unwrap().push(at..at + dst.len() as u64);
        self.inner.read_at(at, dst)
    }
}

/// A checkpoint in a file of its own, of which all reads are counted.
struct File {
    _folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    reads: Reads,
}

impl File {
    fn new(tensors: &[tensor_offload::checkpoint::TensorSpec], seed: u64) -> File {
        let (folder, reads) = (tempfile::tempdir().unwrap(), Reads::default());
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, safetensors(tensors, seed)).unwrap();
        let open = |path: &Path| {
            let inner = FileSource::open(path)?;
            Ok(Arc::new(Counting { inner, reads: Arc::clone(&reads) }) as Arc<dyn Source>)
        };
        let checkpoint = Checkpoint::open_with(&path, open).unwrap();
        reads.lock().unwrap().clear();
        File { _folder: folder, checkpoint, reads }
    }

    fn subject(&self, adapters: Vec<Adapter>) -> Subject {
        let weights = Weights::patched(self.checkpoint.clone(), adapters, Matching::Strict).unwrap();
        let subject = Subject::new(weights);
        self.reads.lock().unwrap().clear();
        subject
    }

    /// The tensors that were read since the last time, each with its bytes, and the bytes in all.
    fn read(&self) -> (BTreeMap<String, u64>, u64) {
        let reads = std::mem::take(&mut *self.reads.lock().unwrap());
        let mut of = BTreeMap::new();
        for read in &reads {
            let holds =
                |t: &&tensor_offload::checkpoint::TensorInfo| t.offset <= read.start && read.end <= t.offset + t.bytes;
            let tensor = self.checkpoint.layout().tensors().iter().find(holds).expect("a part of a tensor");
            *of.entry(tensor.name.clone()).or_default() += read.end - read.start;
        }
        (of, reads.iter().map(|read| read.end - read.start).sum())
    }
}

const SPLIT: &str = "cuda:0,20kb;cuda:1,20kb;xpu:0,15kb;disk,15kb;cpu,*";

fn at(strength: f32, factors: &Checkpoint) -> Adapter {
    Adapter::from_checkpoint(factors.clone(), strength).unwrap()
}

fn derive(registry: &Registry, base: &Arc<Model>, subject: &Subject, plan: &Plan) -> Result<Arc<Model>> {
    let loader = Loader::new(registry).workers(2);
    loader.derive(base, &subject.weights, plan).map(Arc::new)
}

/// The tensors that patches change, as their file has them.
fn targeted(subject: &Subject) -> BTreeMap<String, u64> {
    let stored = |(tensor, _)| subject.checkpoint().layout().tensor(tensor).unwrap();
    subject.weights.patches().iter().map(stored).map(|t| (t.name.clone(), t.bytes)).collect()
}

/// A LoRA for some modules of a model.
fn some_lora(tensors: &[tensor_offload::checkpoint::TensorSpec], named: &str, seed: u64) -> Checkpoint {
    let named: Vec<_> = tensors.iter().filter(|tensor| tensor.name.contains(named)).cloned().collect();
    lora(&named, DType::F32, 3, seed)
}

#[test]
fn case_17_adapters_are_swapped_and_removed_by_reading_their_targets_again() {
    let tensors = llama(4, 32);
    let file = File::new(&tensors, 90);
    let (a, b) = (some_lora(&tensors, "q_proj", 91), some_lora(&tensors, "up_proj", 92));
    let plain = file.subject(vec![]);
    let (with_a, with_b) = (file.subject(vec![at(0.75, &a)]), file.subject(vec![at(-1.5, &b)]));
    for allocation in ["cpu,*", "cuda:0,*", SPLIT] {
        for clock in [Clock::Virtual, Clock::Wall] {
            let registry = Registry::described(machine(), clock);
            let plan = plain.planner(&machine(), allocation).depth(1).plan().unwrap();
            let original = hash(&load(&registry, &plain, &plan));
            file.read();
            // A -> B -> none.
            let first = load(&registry, &with_a, &plan);
            assert_eq!(file.read().1, plan.bytes(), "a load reads everything");
            let second = derive(&registry, &first, &with_b, &plan).unwrap();
            let (read, bytes) = file.read();
            let mut both = targeted(&with_a);
            both.extend(targeted(&with_b));
            assert_eq!(read, both, "{allocation}: exactly what A and B target, from pristine bytes");
            let report = second.report();
            assert_eq!((report.read, report.patched), (bytes, targeted(&with_b).len()), "{allocation}");
            assert_eq!((report.shared, report.copied), (plan.bytes() - bytes, 0), "{allocation}");
            let third = derive(&registry, &second, &plain, &plan).unwrap();
            assert_eq!(file.read().0, targeted(&with_b), "{allocation}");
            assert_eq!(hash(&third), original, "{allocation}: A, then B, then none is the original");
            // Each generation keeps its own bytes.
            with_a.check(&first);
            with_b.check(&second);
            [(&first, &with_a), (&second, &with_b), (&third, &plain)]
                .iter()
                .for_each(|(model, of)| check_streamed(model, of));
            drop((second, first));
            plain.check(&third);
            drop(third);
            comes_back(&registry);
        }
    }
}

#[test]
fn case_17_a_changed_strength_is_the_result_of_that_strength() {
    let tensors = llama(3, 32);
    let file = File::new(&tensors, 93);
    let (changed, other) = (some_lora(&tensors, "layers.1.", 94), some_lora(&tensors, "layers.2.", 95));
    let of = |strength: f32| file.subject(vec![at(strength, &changed), at(0.5, &other)]);
    let (weak, full) = (of(0.9), of(1.0));
    let watched = Watched::new(machine(), Clock::Virtual);
    open_all(&watched.registry);
    let plan = weak.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let base = load(&watched.registry, &weak, &plan);
    let (level, _) = (levels(&watched.registry), file.read());
    let model = derive(&watched.registry, &base, &full, &plan).unwrap();
    let targets: BTreeMap<_, _> = targeted(&full).into_iter().filter(|(name, _)| name.contains("layers.1.")).collect();
    assert_eq!(file.read().0, targets, "what the other adapter changes is not read again");
    assert_eq!(hash(&model), full.hash());
    assert_eq!(hash(&load(&watched.registry, &full, &plan)), full.hash());
    // Only what is new was taken.
    let new: u64 = targets.values().sum();
    let taken = |levels: &[(tensor_offload::DeviceId, u64)]| levels.iter().map(|level| level.1).sum::<u64>();
    assert_eq!(taken(&levels(&watched.registry)) - taken(&level), new);
    // The same strengths again: nothing is read and nothing taken.
    let again = derive(&watched.registry, &model, &full, &plan).unwrap();
    assert_eq!((file.read().1, again.report().read, again.report().shared), (plan.bytes(), 0, plan.bytes()));
    assert_eq!(taken(&levels(&watched.registry)) - taken(&level), new);
    drop(base);
    check_streamed(&again, &full);
    // Rounding is a part of what bytes are made from, too.
    let rounded = full.weights.clone().rounding(Rounding::Stochastic { seed: 3 });
    let rounded = Subject::new(rounded);
    let noisy = derive(&watched.registry, &again, &rounded, &plan).unwrap();
    assert_eq!(noisy.report().read, targeted(&full).values().sum::<u64>());
    rounded.check(&noisy);
    drop((model, again, noisy));
    comes_back(&watched.registry);
}

/// A bias beside a weight that changes stays where it is or is copied; an adapter that pads weights changes sizes.
#[test]
fn single_tensors_of_a_module_are_read_again() {
    let tensors = mixed(3);
    let file = File::new(&tensors, 96);
    let factors = some_lora(&tensors, "q_proj.weight", 97);
    let (plain, patched) = (file.subject(vec![]), file.subject(vec![at(1.0, &factors)]));
    for allocation in ["cpu,*", "cuda:0,*", "xpu:0,*", "disk,*", SPLIT] {
        let registry = Registry::described(machine(), Clock::Wall);
        let plan = plain.planner(&machine(), allocation).depth(1).plan().unwrap();
        let base = load(&registry, &plain, &plan);
        file.read();
        let model = derive(&registry, &base, &patched, &plan).unwrap();
        assert_eq!(file.read().0, targeted(&patched), "{allocation}");
        let biases = 3 * 80;
        assert_eq!(model.report().copied, biases, "{allocation}: {}", model.report());
        patched.check(&model);
        plain.check(&base);
        check_streamed(&model, &patched);
    }
}

/// Scaled fp8 weights: a patch needs its scale, and a scale that is computed anew changes with its weight.
#[test]
fn scales_are_of_the_bytes_of_their_weights() {
    let tensors = mixed(2);
    let file = File::new(&tensors, 98);
    let factors = some_lora(&tensors, "down_proj.weight", 99);
    let plain = file.subject(vec![]);
    let anew = |strength: f32| {
        let weights = Weights::patched(file.checkpoint.clone(), vec![at(strength, &factors)], Matching::AllowPartial);
        let weights = weights.unwrap().scales(tensor_offload::ScalePolicy::Recompute).unwrap();
        let subject = Subject::new(weights);
        file.read();
        subject
    };
    let (one, two) = (anew(1.0), anew(2.0));
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = plain.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let base = load(&registry, &plain, &plan);
    file.read();
    let mut model = base;
    for (subject, patched) in [(&one, 4), (&two, 4), (&plain, 0), (&one, 4)] {
        model = derive(&registry, &model, subject, &plan).unwrap();
        assert_eq!((model.report().patched, model.report().read), (patched, file.read().1));
        assert!(model.report().read < plan.bytes() / 10);
        subject.check(&model);
    }
}

#[test]
fn a_checkpoint_that_was_replaced_is_read_whole() {
    let tensors = llama(2, 32);
    let (one, two) = (Subject::plain(&tensors, 100), Subject::plain(&tensors, 101));
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = one.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let base = load(&registry, &one, &plan);
    let model = derive(&registry, &base, &two, &plan).unwrap();
    assert_eq!((model.report().read, model.report().shared), (plan.bytes(), 0));
    two.check(&model);
    one.check(&base);
}

/// Every way between two plans gives the same bytes: shared, copied on the host, between devices, through the host.
#[test]
fn another_plan_takes_what_is_in_memory() {
    let machine = machine();
    let allocations = ["cpu,*", "cuda:0,*", "xpu:0,*", "disk,*", "cuda:1,*", SPLIT, "cuda:0,40kb;xpu:0,20kb;cpu,*"];
    let subjects = [&mixed(3), &norms(3)].map(|tensors| Subject::patched(tensors, 102));
    for (index, from) in allocations.iter().enumerate() {
        for (to, subject) in allocations.iter().flat_map(|to| subjects.iter().map(move |subject| (to, subject))) {
            let clock = if index % 2 == 0 { Clock::Wall } else { Clock::Virtual };
            let registry = Registry::described(machine.clone(), clock);
            let plan = |allocation| subject.planner(&machine, allocation).depth(1).plan().unwrap();
            let base = load(&registry, subject, &plan(from));
            let next = plan(to);
            let model = Arc::new(Loader::new(&registry).workers(2).relocate(&base, &next).unwrap());
            let report = model.report();
            assert_eq!((report.read, report.shared + report.copied), (0, next.bytes()), "{from} -> {to}");
            assert_eq!((report.bytes, report.copied == 0), (next.bytes(), from == to), "{from} -> {to}");
            drop(base);
            subject.check(&model);
            check_streamed(&model, subject);
            let derived = derive(&registry, &model, subject, &plan(from)).unwrap();
            assert_eq!(derived.report().read, 0);
            subject.check(&derived);
            drop((model, derived));
            comes_back(&registry);
        }
    }
}

/// Small vectors of a layer share memory: where one changes, the others are copied, and what is untouched is shared.
#[test]
fn a_group_of_small_modules_is_shared_or_rebuilt() {
    let file = File::new(&norms(3), 108);
    let other =
        Checkpoint::from_bytes("norm", safetensors(&[spec("model.layers.1.norm_3.w_norm", DType::F32, &[64])], 109));
    let (plain, patched) = (file.subject(vec![]), file.subject(vec![at(1.0, &other.unwrap())]));
    let registry = Registry::described(machine(), Clock::Virtual);
    open_all(&registry);
    let plan = plain.planner(&machine(), "cpu,*").depth(0).plan().unwrap();
    let base = load(&registry, &plain, &plan);
    let norm = |index: u64| base.tensor(&format!("model.layers.1.norm_{index}.weight")).unwrap();
    assert!((0..10).all(|index| norm(index).buf().is_same(norm(0).buf())));
    assert!((0..10).all(|index| norm(index).byte_range().start as u64 == index * 256));
    let on_host = || levels(&registry).iter().find(|(id, _)| *id == CPU).unwrap().1;
    assert_eq!(on_host(), plan.bytes());
    let model = derive(&registry, &base, &patched, &plan).unwrap();
    let report = model.report();
    assert_eq!((report.read, report.copied, report.shared), (256, 9 * 256, plan.bytes() - 10 * 256));
    assert_eq!(on_host(), plan.bytes() + 10 * 256);
    patched.check(&model);
    check_streamed(&base, &plain);
    drop(base);
    assert_eq!(on_host(), plan.bytes(), "the group of the base went with it");
    check_streamed(&model, &patched);
    drop(model);
    comes_back(&registry);
}

/// The slots are one streamer's at a time, of all generations that share them, and a guard keeps what it has.
#[test]
fn generations_share_their_slots() {
    let tensors = llama(3, 32);
    let file = File::new(&tensors, 103);
    let factors = some_lora(&tensors, "layers.1.", 104);
    let (plain, patched) = (file.subject(vec![]), file.subject(vec![at(1.0, &factors)]));
    let registry = Registry::described(machine(), Clock::Wall);
    let plan = plain.planner(&machine(), "cuda:0,10kb;cpu,*").depth(1).plan().unwrap();
    let base = load(&registry, &plain, &plan);
    let mut streamer = Streamer::new(&base).unwrap();
    let guard = streamer.layer(LayerId::new(2)).unwrap();
    let model = derive(&registry, &base, &patched, &plan).unwrap();
    let busy = Streamer::new(&model).unwrap_err();
    assert!(busy.to_string().contains("slots"), "{busy}");
    // The streamer and the guard of the base go on with the base's bytes.
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut bytes = vec![0; plain.bytes_of(name).len()];
    guard.read(name, &mut bytes).unwrap();
    assert!(bytes == plain.bytes_of(name));
    drop(streamer.layer(LayerId::new(3)).unwrap());
    drop(streamer);
    // With one of two slots held by a guard, one is left.
    let mut streamer = Streamer::new(&model).unwrap();
    for layer in 0..4 {
        let guard = streamer.layer(LayerId::new(layer)).unwrap();
        for tensor in guard.tensors() {
            let mut bytes = vec![0; tensor.byte_range().len()];
            guard.read(&tensor.info().name, &mut bytes).unwrap();
            assert!(bytes == patched.bytes_of(&tensor.info().name));
        }
    }
    drop((base, streamer));
    guard.read(name, &mut bytes).unwrap();
    assert!(bytes == plain.bytes_of(name), "a guard keeps its generation");
    drop(guard);
    check_streamed(&model, &patched);
    // Another number of slots is another plan, with slots of its own.
    let deeper = plain.planner(&machine(), "cuda:0,10kb;cpu,*").depth(2).plan().unwrap();
    let (streamer, own) = (Streamer::new(&model).unwrap(), derive(&registry, &model, &patched, &deeper).unwrap());
    check_streamed(&own, &patched);
    drop((streamer, model, own));
    comes_back(&registry);
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let subject = Subject::plain(&llama(2, 32), 105);
    let plan = subject.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let (here, there) =
        (Registry::described(machine(), Clock::Virtual), Registry::described(machine(), Clock::Virtual));
    let base = load(&here, &subject, &plan);
    let error = derive(&there, &base, &subject, &plan).unwrap_err();
    assert!(error.kind() == ErrorKind::Mismatch && error.to_string().contains("another registry"), "{error}");
    let other = Subject::plain(&llama(3, 32), 105);
    assert_eq!(derive(&here, &base, &other, &plan).unwrap_err().kind(), ErrorKind::Plan);
    // Nothing is left when there is no room for what is new.
    let needed = plan.device(GPU0).unwrap().needed();
    let tight = described(&["cpu=64mb", "disk=64mb", "cuda:1=24mb", "xpu:0=24mb", &format!("cuda:0={needed}b")]);
    let tight = Registry::described(tight, Clock::Virtual);
    let base = load(&tight, &subject, &plan);
    let level = levels(&tight);
    let all = subject.planner(&machine(), "cuda:0,*").plan().unwrap();
    assert!(matches!(derive(&tight, &base, &subject, &all), Err(Error::OutOfMemory { .. })));
    assert_eq!(levels(&tight), level);
    subject.check(&base);
}

/// Whatever operation fails while a model is derived, all it took is back and the base is as it was.
#[test]
fn every_failing_operation_leaves_the_base_as_it_was() {
    [llama(4, 32), norms(4)].iter().for_each(|tensors| fail_every_operation(tensors));
}

fn fail_every_operation(tensors: &[tensor_offload::checkpoint::TensorSpec]) {
    let plain = Subject::plain(tensors, 106);
    let factors = some_lora(tensors, "layers.0.", 107);
    let weights = Weights::patched(plain.checkpoint().clone(), vec![at(1.0, &factors)], Matching::Strict).unwrap();
    let patched = Subject::new(weights);
    let plan = |allocation: &str| plain.planner(&machine(), allocation).depth(1).plan().unwrap();
    let (from, to) = (plan(SPLIT), plan("cuda:0,10kb;xpu:0,30kb;disk,20kb;cpu,*"));
    let attempt = |watched: &Watched, base: &Arc<Model>| -> Result<()> {
        let same_plan = derive(&watched.registry, base, &patched, &from)?;
        derive(&watched.registry, &same_plan, &patched, &to).map(drop)
    };
    let run = |nth: Option<u64>| {
        let watched = Watched::new(machine(), Clock::Virtual);
        open_all(&watched.registry);
        let base = load(&watched.registry, &plain, &from);
        let (level, before) = (levels(&watched.registry), watched.countdown.calls());
        if let Some(nth) = nth {
            watched.countdown.fail_nth(nth);
        }
        let outcome = attempt(&watched, &base);
        let calls = watched.countdown.calls() - before;
        // How many operations there are is up to the threads; one that did not come must not fail later.
        watched.countdown.fail_nth(1 << 60);
        assert_eq!(levels(&watched.registry), level, "operation {nth:?}");
        plain.check(&base);
        check_streamed(&base, &plain);
        drop(base);
        comes_back(&watched.registry);
        (calls, outcome.is_ok())
    };
    let (calls, fine) = run(None);
    assert!(fine);
    let failed = (1..=calls).filter(|&nth| !run(Some(nth)).1).count() as u64;
    assert!(failed * 10 > calls * 9, "{failed} of {calls} failed");
}

/// Copies on one device count as done when their bytes came from another that failed meanwhile, and brought none.
#[test]
fn nothing_is_made_of_a_device_that_fails_meanwhile() {
    let subject = Subject::patched(&llama(2, 32), 103);
    for (from, to, fails) in [
        ("cuda:1,*", "cuda:0,*", GPU1),
        ("cuda:1,*", "cuda:0,*", GPU0),
        ("cuda:1,*", "cpu,*", GPU1),
        ("xpu:0,40kb;cuda:1,*", "cuda:0,40kb;cpu,*", xpu()),
    ] {
        for nth in 1.. {
            let watched = Watched::new(machine(), Clock::Virtual);
            open_all(&watched.registry);
            let plan = |allocation| subject.planner(watched.machine(), allocation).depth(1).plan().unwrap();
            let base = load(&watched.registry, &subject, &plan(from));
            let (level, what) = (levels(&watched.registry), format!("{from} to {to}, {fails} fails at copy {nth}"));
            watched.copies.take();
            watched.copies.lose_at_nth(fails, nth);
            let outcome = Loader::new(&watched.registry).workers(1).relocate(&base, &plan(to));
            let copies = watched.copies.take().len();
            if nth > copies {
                subject.check(&outcome.unwrap());
                assert!(copies > 5, "{what}: {copies} copies");
                break;
            }
            match outcome.map(drop) {
                Err(Error::DeviceLost { device, .. }) => assert_eq!(device, fails, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
            assert_eq!(levels(&watched.registry), level, "{what}");
            // With files what the device had is read anew, as long as nothing is to be put there.
            if fails != GPU0 {
                subject.check(&derive(&watched.registry, &base, &subject, &plan(to)).unwrap());
            }
            drop(base);
            comes_back(&watched.registry);
        }
    }
}

/// Where a tensor's bytes are.
fn place(model: &Model, name: &str) -> (usize, Range<usize>) {
    let view = model.tensor(name).unwrap();
    (Arc::as_ptr(view.buf().block()).addr(), view.byte_range())
}

/// What nobody else has is written over, so that it takes no memory; what is unchanged stays, and only the rest is read.
#[test]
fn a_base_that_is_given_up_is_refilled_in_place() {
    let tensors = norms(3);
    let file = File::new(&tensors, 95);
    // It changes matrices, and norms that lie in one buffer with others.
    let factors = some_lora(&tensors, "layers.1.", 96);
    let (weak, strong) = (file.subject(vec![at(0.5, &factors)]), file.subject(vec![at(-1.0, &factors)]));
    for allocation in ["cpu,*", "cuda:0,*", SPLIT, "cuda:0,25%;disk,*"] {
        for clock in [Clock::Virtual, Clock::Wall] {
            let registry = Registry::described(machine(), clock);
            let plan = weak.planner(&machine(), allocation).depth(1).plan().unwrap();
            let base = load(&registry, &weak, &plan);
            let (before, taken) = (plan_places(&base), levels(&registry));
            file.read();
            let model = Loader::new(&registry).refill(base, &strong.weights, &plan).unwrap();
            assert_eq!(file.read().0, targeted(&strong), "{allocation}: what changes");
            assert_eq!((plan_places(&model), levels(&registry)), (before, taken), "{allocation}");
            let report = model.report();
            assert_eq!((report.shared + report.read, report.copied), (plan.bytes(), 0), "{allocation}");
            let model = Arc::new(model);
            strong.check(&model);
            check_streamed(&model, &strong);
            // Someone else has it: then it is a derived model, and the base stays.
            let other = Loader::new(&registry).refill(Arc::clone(&model), &weak.weights, &plan).unwrap();
            strong.check(&model);
            weak.check(&other);
            // What the two share is not written over.
            drop(model);
            let last = Arc::new(Loader::new(&registry).refill(Arc::new(other), &strong.weights, &plan).unwrap());
            strong.check(&last);
            check_streamed(&last, &strong);
            drop(last);
            comes_back(&registry);
        }
    }
}

fn plan_places(model: &Model) -> Vec<(usize, Range<usize>)> {
    model.layout().tensors().iter().map(|tensor| place(model, &tensor.name)).collect()
}

#[test]
fn what_two_models_share_is_not_written_over() {
    let tensors = llama(3, 32);
    let file = File::new(&tensors, 97);
    let (one, two) = (some_lora(&tensors, "q_proj", 98), some_lora(&tensors, "up_proj", 99));
    let (plain, first, second) =
        (file.subject(vec![]), file.subject(vec![at(0.5, &one)]), file.subject(vec![at(0.5, &two)]));
    let registry = Registry::described(machine(), Clock::Wall);
    let plan = plain.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let kept = load(&registry, &plain, &plan);
    let base = derive(&registry, &kept, &first, &plan).unwrap();
    // It shares `up_proj` with the plain model, and has `q_proj` to itself.
    let before =
        (place(&base, "model.layers.1.self_attn.q_proj.weight"), place(&base, "model.layers.1.mlp.up_proj.weight"));
    let model = Loader::new(&registry).refill(base, &second.weights, &plan).unwrap();
    plain.check(&kept);
    second.check(&model);
    assert_eq!(place(&model, "model.layers.1.self_attn.q_proj.weight"), before.0);
    assert_ne!(place(&model, "model.layers.1.mlp.up_proj.weight"), before.1);
}

/// A refill that fails leaves nothing: the base was given up.
#[test]
fn every_failing_operation_of_a_refill_gives_everything_back() {
    let tensors = norms(2);
    let plain = Subject::plain(&tensors, 100);
    let factors = some_lora(&tensors, "layers.0.", 101);
    let weights = Weights::patched(plain.checkpoint().clone(), vec![at(1.5, &factors)], Matching::Strict).unwrap();
    let patched = Subject::new(weights);
    let plan = plain.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let run = |nth: Option<u64>| {
        let watched = Watched::new(machine(), Clock::Virtual);
        open_all(&watched.registry);
        let base = load(&watched.registry, &plain, &plan);
        let before = watched.countdown.calls();
        if let Some(nth) = nth {
            watched.countdown.fail_nth(nth);
        }
        let outcome = Loader::new(&watched.registry).refill(base, &patched.weights, &plan);
        let calls = watched.countdown.calls() - before;
        watched.countdown.fail_nth(1 << 60);
        if let Ok(model) = &outcome {
            patched.check(model);
        }
        let fine = outcome.map(drop).is_ok();
        comes_back(&watched.registry);
        (calls, fine)
    };
    let (calls, fine) = run(None);
    assert!(fine);
    let failed = (1..=calls).filter(|&nth| !run(Some(nth)).1).count();
    assert!(failed > 0, "none of {calls} failed");
}
