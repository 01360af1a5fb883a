//! Weights on a disk: those that nothing changes stay in the model's own files, and are read from there for each use.

mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use support::*;
use tensor_offload::backend::{Backend, Clock, Contents, Countdown, Faulty, Host, Operation, Simulated};
use tensor_offload::cache::Evict;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::error::FileFault;
use tensor_offload::plan::Warning;
use tensor_offload::{
    ByteSize, Checkpoint, DType, Error, ErrorKind, Loader, Matching, Model, ModelCache, Plan, Planner, Registry,
    Result, Retention, Streamer, Weights,
};

/// A model in files, two so that layers span them.
struct InFiles {
    folder: tempfile::TempDir,
    subject: Subject,
}

impl InFiles {
    fn new(tensors: &[TensorSpec], seed: u64) -> InFiles {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let half = tensors.len() / 2;
        let mut map = serde_json::Map::new();
        for (number, part) in [&tensors[..half], &tensors[half..]].into_iter().enumerate() {
            let name = format!("model-{number}.safetensors");
            fs::write(folder.path().join(&name), safetensors(part, seed)).unwrap();
            map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        }
        let index = serde_json::json!({ "weight_map": map }).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let subject = Subject::new(Checkpoint::open(folder.path()).unwrap().into());
        InFiles { folder, subject }
    }

    /// The same files with two LoRAs.
    fn patched(&self, tensors: &[TensorSpec], seed: u64) -> Subject {
        let checkpoint = self.subject.checkpoint().clone();
        Subject::new(Weights::patched(checkpoint, two_loras(tensors, seed), Matching::Strict).unwrap())
    }

    fn file(&self, number: usize) -> PathBuf {
        self.folder.path().join(format!("model-{number}.safetensors"))
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        (0..2).map(|number| fs::read(self.file(number)).unwrap()).collect()
    }
}

/// The host as it is, with its disk tier in a folder that can be looked at.
fn host(folder: &Path) -> Registry {
    Registry::new([Arc::new(Host::new().disk_folder(folder)) as Arc<dyn Backend>])
}

fn on_host<'a>(subject: &'a Subject, devices: &'a Registry, allocation: &str) -> Planner<'a> {
    Planner::new(subject.layout(), devices.machine()).compute(CPU).allocation(allocation.parse().unwrap())
}

fn taken(devices: &Registry, id: tensor_offload::DeviceId) -> u64 {
    devices.device(id).unwrap().ledger().charged()
}

fn in_files(plan: &Plan) -> u64 {
    plan.device(DISK).map_or(0, |share| share.weights.in_files)
}

#[test]
fn unchanged_weights_stay_in_the_model_s_files() {
    let model = InFiles::new(&llama(4, 32), 1);
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let devices = host(scratch.path());
    let plan = on_host(&model.subject, &devices, "disk,*").depth(1).plan().unwrap();
    assert_eq!((in_files(&plan), plan.device(DISK).unwrap().needed()), (plan.bytes(), 0));
    assert!(plan.to_string().contains("stay in the model's own files"), "{plan}");
    let loaded = load(&devices, &model.subject, &plan);
    let report = loaded.report();
    assert_eq!((report.in_files, report.read, report.bytes), (plan.bytes(), 0, plan.bytes()));
    assert!(report.to_string().contains("left in the model's files"), "{report}");
    assert_eq!((taken(&devices, DISK), loaded.bytes().contains_key(&DISK)), (0, false));
    let mut streamer = Streamer::new(&loaded).unwrap();
    for pass in 1..4 {
        check_pass(&mut streamer, &model.subject).unwrap();
        let report = streamer.report();
        // The last pass has prefetched the first layers of the next.
        assert!(report.read == report.bytes[&DISK] && report.read >= pass * plan.streamed_bytes(), "{report}");
    }
    model.subject.check(&loaded);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    drop((streamer, loaded));
    comes_back(&devices);
}

/// Only what changes is written to a second place.
#[test]
fn changed_weights_go_to_a_file_without_a_name() {
    let tensors = llama(4, 32);
    let model = InFiles::new(&tensors, 2);
    let patched = model.patched(&tensors, 3);
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (devices, before) = (host(scratch.path()), model.contents());
    let plan = on_host(&patched, &devices, "disk,*").depth(1).plan().unwrap();
    let loaded = load(&devices, &patched, &plan);
    let matrices: u64 = tensors
        .iter()
        .filter(|t| t.shape.len() == 2 && t.name.contains("layers"))
        .map(|t| t.dtype.bytes_of(&t.shape).unwrap())
        .sum();
    assert_eq!((taken(&devices, DISK), in_files(&plan)), (matrices, plan.bytes() - matrices));
    assert_eq!(loaded.report().in_files, plan.bytes() - matrices);
    // On Windows the name may stay as long as the file.
    assert!(fs::read_dir(scratch.path()).unwrap().count() == 0 || cfg!(windows));
    check_streamed(&loaded, &patched);
    patched.check(&loaded);
    assert_eq!(model.contents(), before);
    drop(loaded);
    comes_back(&devices);
    drop(devices);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

/// A source that is no file may be slow, or in memory, and is copied to the disk.
#[test]
fn other_sources_are_copied_to_the_disk() {
    let subject = Subject::plain(&llama(2, 16), 4);
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let devices = host(scratch.path());
    let plan = on_host(&subject, &devices, "disk,*").plan().unwrap();
    let loaded = load(&devices, &subject, &plan);
    assert_eq!((in_files(&plan), loaded.report().in_files, taken(&devices, DISK)), (0, 0, plan.bytes()));
    check_streamed(&loaded, &subject);
}

/// What stays in files needs no room on the disk, so a full disk, or one in memory, is no obstacle.
#[test]
fn files_need_no_room_on_the_disk() {
    let tensors = llama(3, 32);
    let model = InFiles::new(&tensors, 5);
    let machine = described(&["cuda:0=1mb,link=10", "cpu=64mb", "disk=1kb"]);
    let plan = model.subject.planner(&machine, "disk,*").depth(1).plan().unwrap();
    for clock in [Clock::Virtual, Clock::Wall] {
        let devices = Registry::described(machine.clone(), clock);
        let loaded = load(&devices, &model.subject, &plan);
        check_streamed(&loaded, &model.subject);
    }
    let patched = model.patched(&tensors, 6);
    match patched.planner(&machine, "disk,*").plan().unwrap_err() {
        Error::DoesNotFit(short) => assert_eq!(short.device, DISK),
        other => panic!("{other}"),
    }
    // A plan for unchanged weights is refused memory when they change.
    let error = Loader::new(&Registry::described(machine.clone(), Clock::Virtual)).load(&patched.weights, &plan);
    match error.map(|_| ()).unwrap_err() {
        Error::OutOfMemory { device, .. } => assert_eq!(device, DISK),
        other => panic!("{other}"),
    }
    // Nor does a model without contents take room.
    let sizes = Simulated::new(machine, Clock::Virtual).contents(Contents::SizesOnly);
    let devices = Registry::new([Arc::new(sizes) as Arc<dyn Backend>]);
    let unfilled = Arc::new(Model::unfilled(&devices, model.subject.layout(), &plan).unwrap());
    pass(&mut Streamer::new(&unfilled).unwrap(), std::time::Duration::ZERO).wait(DEADLINE).unwrap();
}

#[test]
fn a_disk_in_memory_is_no_matter_while_nothing_is_copied_there() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let tensors = llama(2, 32);
    let model = InFiles::new(&tensors, 7);
    let devices = host(folder.path());
    let warned = |subject: &Subject| {
        let plan = on_host(subject, &devices, "disk,*").plan().unwrap();
        plan.warnings().iter().any(|warning| matches!(warning, Warning::DiskInMemory { .. }))
    };
    assert!(!warned(&model.subject));
    assert!(warned(&model.patched(&tensors, 8)) || !cfg!(target_os = "linux"));
}

/// The first pass reads everything, the next ones what the cache had no room for. Whoever reads a tensor once takes none of it.
#[test]
fn the_host_keeps_what_was_read_up_to_a_cap() {
    let model = InFiles::new(&llama(6, 32), 9);
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let devices = host(scratch.path());
    let plan = on_host(&model.subject, &devices, "disk,*").depth(1).plan().unwrap();
    let slots = plan.slots().bytes();
    for (cap, all) in [(0, false), (40_000, false), (plan.bytes(), true)] {
        let loader = Loader::new(&devices).host_cache(ByteSize(cap));
        let loaded = Arc::new(loader.load(&model.subject.weights, &plan).unwrap());
        model.subject.check(&loaded);
        assert_eq!(taken(&devices, CPU), slots);
        let mut streamer = Streamer::new(&loaded).unwrap();
        let read = |streamer: &mut Streamer| {
            let before = streamer.report().clone();
            check_pass(streamer, &model.subject).unwrap();
            (streamer.report().read - before.read, streamer.report().bytes[&DISK] - before.bytes[&DISK])
        };
        check_pass(&mut streamer, &model.subject).unwrap();
        let kept = taken(&devices, CPU) - slots;
        assert!(kept <= cap && (cap == 0 || kept > cap / 2), "{kept} of {cap}");
        for _ in 0..2 {
            let (read, bytes) = read(&mut streamer);
            assert_eq!((bytes, read == 0), (plan.streamed_bytes(), all), "{}", streamer.report());
            assert!(read >= bytes - kept && read <= bytes - kept / 2, "{read} of {bytes}, {kept} kept");
        }
        assert_eq!(streamer.report().to_string().contains("kept in host memory"), cap > 0);
        drop((streamer, loaded));
        comes_back(&devices);
    }
}

/// A file that changes under a model is an error of the next layer that reads it, with the file's name. What is resident, and what
/// other files hold, can be used still.
#[test]
fn a_file_that_changes_is_a_typed_error_and_nothing_is_lost() {
    type Change = fn(&Path);
    let changes: [(Change, bool); 4] = [
        (|path| File::options().write(true).open(path).unwrap().set_len(4000).unwrap(), true),
        (|path| fs::write(path, vec![7; fs::metadata(path).unwrap().len() as usize]).unwrap(), true),
        // Whoever replaces a file by a new one leaves the old one to those who have it open.
        (|path| fs::remove_file(path).unwrap(), false),
        (
            |path| {
                let new = path.with_extension("new");
                fs::write(&new, "something else").unwrap();
                fs::rename(new, path).unwrap();
            },
            false,
        ),
    ];
    // Not every Windows lets a file be replaced that is open.
    let changes = changes.into_iter().take(if cfg!(windows) { 3 } else { 4 });
    for (index, (change, fails)) in changes.enumerate() {
        let model = InFiles::new(&llama(4, 32), 10);
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let devices = host(scratch.path());
        let plan = on_host(&model.subject, &devices, "cpu,20kb;disk,*").depth(1).plan().unwrap();
        let loaded = load(&devices, &model.subject, &plan);
        let mut streamer = Streamer::new(&loaded).unwrap();
        check_pass(&mut streamer, &model.subject).unwrap();
        change(&model.file(1));
        let mut failed = 0;
        for _ in 0..2 {
            for layer in layers(&streamer) {
                let outcome = streamer.layer(layer).and_then(|guard| check_layer(&guard, &model.subject));
                let Err(error) = outcome else { continue };
                failed += 1;
                let (tensor, fault) = fault_of(&error).expect("a file's fault");
                assert!(matches!(fault, FileFault::Changed | FileFault::Truncated { .. }), "{error}");
                let named = tensor.is_some_and(|tensor| error.to_string().contains(tensor));
                assert!(named && error.to_string().contains("model-1.safetensors"), "{error}");
            }
        }
        assert_eq!(failed > 0, fails, "change {index}");
        assert!(failed < 2 * layers(&streamer).len(), "the layers of the other file are still there");
        drop((streamer, loaded));
        comes_back(&devices);
    }
}

/// The tensor and the fault of a file that is somewhere among the causes of an error.
fn fault_of(error: &Error) -> Option<(Option<&str>, &FileFault)> {
    match error {
        Error::File { tensor, fault, .. } => Some((tensor.as_deref(), fault)),
        Error::Failed { cause, .. } => fault_of(cause),
        _ => None,
    }
}

/// Models out of models share homes in files, copy to and from them, and never write to them.
#[test]
fn models_are_derived_from_homes_in_files() {
    let tensors = llama(4, 32);
    let model = InFiles::new(&tensors, 11);
    let (plain, patched) = (&model.subject, model.patched(&tensors, 12));
    let before = model.contents();
    for clock in [Clock::Virtual, Clock::Wall] {
        let devices = Registry::described(machine(), clock);
        let loader = Loader::new(&devices);
        let plan = |subject: &Subject, allocation: &str| {
            subject.planner(devices.machine(), allocation).depth(1).plan().unwrap()
        };
        let split = "cuda:0,10kb;cpu,20kb;disk,*";
        let base = load(&devices, plain, &plan(plain, split));
        // Another strength: only what changes leaves the files.
        let changed = Arc::new(loader.derive(&base, &patched.weights, &plan(&patched, split)).unwrap());
        check_streamed(&changed, &patched);
        // Back again: nothing that lay in files is copied.
        let again = Arc::new(loader.derive(&changed, &plain.weights, &plan(plain, split)).unwrap());
        check_streamed(&again, plain);
        assert!(again.report().in_files > 0, "{}", again.report());
        // The same memory, filled again.
        drop(base);
        let refilled = Arc::new(loader.refill(again, &patched.weights, &plan(&patched, split)).unwrap());
        check_streamed(&refilled, &patched);
        let refilled = Arc::new(loader.refill(refilled, &plain.weights, &plan(plain, split)).unwrap());
        check_streamed(&refilled, plain);
        // To other places and back, without the files.
        let moved = Arc::new(loader.relocate(&refilled, &plan(plain, "cpu,20kb;disk,30kb;xpu:0,*")).unwrap());
        check_streamed(&moved, plain);
        let back = Arc::new(loader.relocate(&moved, &plan(plain, "disk,*")).unwrap());
        check_streamed(&back, plain);
        drop((changed, refilled, moved, back));
        comes_back(&devices);
    }
    assert_eq!(model.contents(), before);
}

/// A cache's clean-up reads kept models where they live; a demotion leaves files where they are.
#[test]
fn cached_models_keep_their_homes_in_files() {
    let model = InFiles::new(&llama(4, 32), 13);
    let devices = Registry::described(machine(), Clock::Wall);
    let cache = ModelCache::new();
    let plan = model.subject.planner(devices.machine(), "cuda:0,60kb;disk,*").depth(1).plan().unwrap();
    cache.insert("model", load(&devices, &model.subject, &plan), Retention::Keep);
    cache.full_cleanup(&devices).unwrap();
    let free = devices.device(GPU0).unwrap().memory().unwrap().available();
    cache.make_room(&devices, GPU0, free + 1, Evict::Demote).unwrap();
    let demoted = cache.get("model").unwrap();
    check_streamed(&demoted, &model.subject);
    assert!(in_files(demoted.plan()) > 0 && !demoted.bytes().contains_key(&DISK), "{:?}", demoted.bytes());
}

fn whole_life(devices: &Registry, subject: &Subject, plan: &Plan) -> Result<()> {
    let loader = Loader::new(devices).host_cache(ByteSize(20_000));
    let model = Arc::new(loader.load(&subject.weights, plan)?);
    let mut streamer = Streamer::new(&model)?;
    (0..2).try_for_each(|_| check_pass(&mut streamer, subject))
}

#[test]
fn whatever_operation_fails_nothing_is_wrong_or_kept() {
    let tensors = llama(3, 32);
    let model = InFiles::new(&tensors, 14);
    let one = tensors.iter().filter(|tensor| tensor.name.contains("layers.1.")).cloned().collect::<Vec<_>>();
    let patched = Arc::new(model.patched(&one, 15));
    let plan = patched.planner(&machine(), "cuda:0,8kb;cpu,16kb;disk,*").depth(1).plan().unwrap();
    assert!(in_files(&plan) > 0 && in_files(&plan) < plan.device(DISK).unwrap().weights.bytes, "{plan}");
    let faulty = |countdown: &Countdown| {
        Registry::new([Arc::new(Faulty::new(Simulated::new(machine(), Clock::Wall), countdown.clone())) as _])
    };
    let countdown = Countdown::new();
    whole_life(&faulty(&countdown), &patched, &plan).unwrap();
    let calls = countdown.calls();
    assert!(countdown.calls_of(Operation::ReadOnly) > 3 && calls > 50, "{calls}");
    for nth in 1..=calls {
        let (patched, plan) = (Arc::clone(&patched), plan.clone());
        without_hanging(format!("operation {nth} of {calls} failing"), move || {
            let countdown = Countdown::new();
            let devices = faulty(&countdown);
            countdown.fail_nth(nth);
            if let Err(error) = whole_life(&devices, &patched, &plan) {
                assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            }
            comes_back(&devices);
        });
    }
}

/// Where a test that runs in a mount namespace of its own finds a small file system.
#[cfg(target_os = "linux")]
const SMALL: &str = "TENSOR_OFFLOAD_TEST_SMALL_DISK";

/// A file system of a few MiB, which `unshare` makes where the system lets it; elsewhere this says so and tests nothing.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told_before_a_byte_is_written() {
    let mounted = |then: &str| {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let script = format!(r#"mount -t tmpfs -o size=4m none "${SMALL}" && {then}"#);
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["-Urm", "sh", "-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
        unshare.env(SMALL, folder.path()).output().map(|output| (output, folder))
    };
    if !mounted("true").is_ok_and(|(output, _)| output.status.success()) {
        eprintln!("no file system can be mounted here, so none was full");
        return;
    }
    let (output, _) = mounted(r#"exec "$1" --ignored --exact on_a_small_file_system"#).unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && told.contains("1 passed"),
        "{told}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs a small file system, on which `a_full_disk_is_told_before_a_byte_is_written` runs it"]
fn on_a_small_file_system() {
    let folder = PathBuf::from(std::env::var_os(SMALL).expect("the folder of a small file system"));
    let tensors = llama(3, 192);
    let model = InFiles::new(&tensors, 18);
    let patched = model.patched(&tensors, 19);
    let devices = host(&folder);
    let plan = on_host(&patched, &devices, "disk,*").depth(1).plan().unwrap();
    let needed = plan.device(DISK).unwrap().weights.taken();
    assert!(needed > 1 << 20, "{needed} bytes");
    open_all(&devices);
    // Another program takes what the plan counted on.
    let (other, room) = (folder.join("another"), (4 << 20) - needed);
    fs::write(&other, vec![1; room as usize + 4096]).unwrap();
    let error = Loader::new(&devices).load(&patched.weights, &plan).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { device: DISK, .. }), "{error}");
    comes_back(&devices);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    // With room for it a model is loaded, and a disk that is full by then is none of its business.
    fs::remove_file(&other).unwrap();
    let loaded = load(&devices, &patched, &plan);
    let mut all = File::create(&other).unwrap();
    let full =
        std::iter::repeat_with(|| std::io::Write::write_all(&mut all, &[1; 4096])).find_map(Result::err).unwrap();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    check_streamed(&loaded, &patched);
    let error = Loader::new(&devices).load(&patched.weights, &plan).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { device: DISK, .. }), "{error}");
    drop(loaded);
    comes_back(&devices);
}

/// A folder that one may not write to is an error before any byte is read.
#[test]
fn a_scratch_folder_that_cannot_be_written_is_an_error() {
    let tensors = llama(2, 32);
    let model = InFiles::new(&tensors, 16);
    let patched = model.patched(&tensors, 17);
    let missing = model.folder.path().join("none");
    let devices = host(&missing);
    let plan = on_host(&patched, &devices, "disk,*").plan();
    let error = plan.and_then(|plan| Loader::new(&devices).load(&patched.weights, &plan)).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::DoesNotFit | ErrorKind::OutOfMemory), "{error}");
    // What is unchanged needs no folder.
    let plan = on_host(&model.subject, &devices, "disk,*").plan().unwrap();
    check_streamed(&load(&devices, &model.subject, &plan), &model.subject);
    comes_back(&devices);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever part of the model is on the disk, with whatever prefetch and cache, every layer has the file's bytes.
    #[test]
    fn layers_have_the_bytes_of_the_files(
        (kind, seed) in (0usize..3, any::<u64>()),
        (depth, cap) in (0usize..4, 0u64..200_000),
        shares in (0u64..40, 0u64..40, 1u64..40),
        (virtual_clock, changes) in any::<(bool, bool)>(),
    ) {
        let tensors = vec![llama(3, 16), mixed(2), norms(3)].swap_remove(kind);
        let model = InFiles::new(&tensors, seed);
        let changed = changes.then(|| model.patched(&tensors, seed));
        let subject = changed.as_ref().unwrap_or(&model.subject);
        let devices = Registry::described(machine(), if virtual_clock { Clock::Virtual } else { Clock::Wall });
        let allocation = format!("cuda:0,{}%;cpu,{}%;disk,{}%", shares.0, shares.1, shares.2);
        let plan = subject.planner(devices.machine(), &allocation).depth(depth).plan().unwrap();
        let loader = Loader::new(&devices).host_cache(ByteSize(cap));
        let loaded = Arc::new(loader.load(&subject.weights, &plan).unwrap());
        let report = loaded.report();
        prop_assert_eq!(report.in_files, in_files(&plan));
        let mut streamer = Streamer::new(&loaded).unwrap();
        for _ in 0..2 {
            check_pass(&mut streamer, subject).unwrap();
        }
        subject.check(&loaded);
        drop((streamer, loaded));
        comes_back(&devices);
    }

    /// Tensors of every alignment, and one that is not aligned at all, are read where they are.
    #[test]
    fn tensors_of_any_offset_are_read(sizes in prop::collection::vec(0u64..700_000, 1..6), seed in any::<u64>()) {
        let tensors: Vec<TensorSpec> = sizes.iter().enumerate().flat_map(|(layer, &bytes)| {
            ["a", "b"].map(|name| spec(format!("layers.{layer}.{name}.weight"), DType::U8, &[bytes + layer as u64]))
        }).collect();
        let model = InFiles::new(&tensors, seed);
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let devices = host(scratch.path());
        let plan = on_host(&model.subject, &devices, "disk,*").depth(1).plan().unwrap();
        check_streamed(&load(&devices, &model.subject, &plan), &model.subject);
        prop_assert_eq!(taken(&devices, DISK), 0);
    }
}
