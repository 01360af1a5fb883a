//! Files that a device reads straight into its memory: over a stand-in for libcufile, which checks its rules, and the one for the
//! driver. The bytes are those of any other load; what does not work goes through host memory, and the report says why.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use card::{
    DEADLINE, Driver, assert_given_back, driver, registry, registry_of, stand_in, wait_until_closed,
    whatever_call_fails,
};
use cuda_standin::{Config, Effect, FaultPlan};
use cufile_standin::{Config as Library, Fault, library_path, session};
use rustix::fs::{Advice, OFlags, fadvise, statfs};
use support::compressed::Compressed;
use support::{GPU0, Subject, blocks, check_pass, llama, safetensors, spec};
use tensor_offload::backend::{Backend, BufMut, Cuda, Device, Gds, MemoryKind, NoFileReads, Role, Transfer};
use tensor_offload::error::FileFault;
use tensor_offload::{
    Cancel, Checkpoint, DType, DeviceId, Error, Loader, Matching, Model, Registry, Result, Streamer, Weights,
};

const MIB: usize = 1 << 20;
const ON_DEVICE: &str = "cuda:0,100%";

fn cards() -> Config {
    Config::with_devices(&[64 << 20, 64 << 20])
}

/// A folder on a disk. The one for temporary files may be in memory.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn devices(gds: Gds) -> Registry {
    registry_of(Cuda::new().gds(gds).cufile(library_path()))
}

/// A model in a file of some MiB, of matrices from 512 KiB on and a few vectors.
fn file(folder: &Path) -> PathBuf {
    let path = folder.join("model.safetensors");
    fs::write(&path, safetensors(&llama(2, 512), 70)).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    path
}

/// A smaller one, to be loaded again and again: its matrices are as small as a device still reads.
fn small_file(folder: &Path) -> PathBuf {
    let path = folder.join("model.safetensors");
    fs::write(&path, safetensors(&llama(1, 384), 72)).unwrap();
    path
}

fn subject(path: &Path) -> Subject {
    Subject::new(Checkpoint::open(path).unwrap().into())
}

fn load(devices: &Registry, subject: &Subject, allocation: &str) -> Result<Model> {
    let plan = subject.planner(devices.machine(), allocation).plan()?;
    Loader::new(devices).workers(2).deadline(DEADLINE).load(&subject.weights, &plan)
}

/// Loads over a library that says this of itself, checks every byte, and that nothing is left of the devices and the library.
/// Returns the bytes that went straight to devices, and why others did not.
fn loaded(gds: Gds, library: &Library, subject: &Subject, allocation: &str) -> (u64, Vec<String>) {
    let (cuda, library) = (driver(&cards()), session(library));
    let report = {
        let devices = devices(gds);
        let model = load(&devices, subject, allocation).unwrap();
        subject.check(&model);
        let report = model.report().clone();
        drop(model);
        devices.opened().iter().for_each(|device| drop(device.trim()));
        report
    };
    close(&cuda);
    cuda.assert_clean();
    library.report().assert_clean();
    assert_eq!(library.report().bytes, report.gds, "{report}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(
        (json["gds"].as_u64(), json["not_gds"].as_array().map(Vec::len)),
        (Some(report.gds), Some(report.not_gds.len()))
    );
    // Where nothing is read so, a load goes as it always did, and its line says nothing of it.
    assert!(report.not_gds.iter().all(|why| report.to_string().contains(why) == (report.gds > 0)), "{report}");
    (report.gds, report.not_gds)
}

/// Waits until no device is open: the library is closed with the last.
fn close(cuda: &Driver) {
    match cuda {
        Driver::StandIn(cuda) => wait_until_closed(cuda, DEADLINE),
        Driver::Named(_) => wait_until_closed(None, DEADLINE),
    }
}

/// The bytes of the tensors that are large enough to be read so.
fn large(subject: &Subject) -> u64 {
    subject.layout().tensors().iter().map(|tensor| tensor.bytes).filter(|&bytes| bytes >= 256 << 10).sum()
}

#[test]
fn cuda_a_device_reads_files_into_its_own_memory() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    for most_bytes in [usize::MAX, 100_003] {
        let library = Library { most_bytes, ..Library::default() };
        assert_eq!(loaded(Gds::Always, &library, &subject, ON_DEVICE), (large(&subject), Vec::new()));
    }
    // What lives on the host is read by the host.
    let (gds, why) = loaded(Gds::Always, &Library::default(), &subject, "cuda:0,50%;cpu,50%");
    assert!(gds > 0 && gds < large(&subject) && why.is_empty(), "{gds} {why:?}");
    let (gds, why) = loaded(Gds::Always, &Library::default(), &subject, "cpu,*");
    assert_eq!((gds, why), (0, Vec::new()));
}

/// A tensor of several pieces, that begins and ends anywhere in the file.
#[test]
fn cuda_a_large_tensor_is_read_in_pieces() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let sizes = [77, (40 * MIB + 77) as u64];
    fs::write(&path, safetensors(&blocks(&sizes), 71)).unwrap();
    let subject = subject(&path);
    let (gds, why) = loaded(Gds::Always, &Library::default(), &subject, ON_DEVICE);
    assert_eq!((gds, why), (sizes[1], Vec::new()));
}

#[test]
fn cuda_two_devices_read_by_one_library() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    if !card::has_devices(2) {
        return;
    }
    let (gds, why) = loaded(Gds::Always, &Library::default(), &subject, "cuda:0,50%;cuda:1,50%");
    assert_eq!((gds, why), (large(&subject), Vec::new()));
}

/// The matrices that a device patches are read by it first. The bytes are those of the host's patch.
#[test]
fn cuda_patched_tensors_are_read_by_the_device_that_patches_them() {
    let folder = folder();
    let checkpoint = Checkpoint::open(file(folder.path())).unwrap();
    let adapters = support::two_loras(&llama(2, 512), 70);
    let subject = Subject::new(Weights::patched(checkpoint, adapters, Matching::Strict).unwrap());
    let (cuda, library) = (driver(&cards()), session(&Library::default()));
    {
        let devices = devices(Gds::Always);
        let model = load(&devices, &subject, ON_DEVICE).unwrap();
        subject.check(&model);
        let report = model.report();
        let patched = report.patched_on_device > 0;
        // A driver that is named may have no kernels; then the host patches, and reads.
        assert!(patched || card::named(), "{report}");
        assert!(report.gds == large(&subject) || !patched, "{report}");
    }
    close(&cuda);
    cuda.assert_clean();
    library.report().assert_clean();
}

/// Drops a file from the page cache. False if its file system keeps it there.
fn evict(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let tried = rustix::io::preadv2(
        &file,
        &mut [std::io::IoSliceMut::new(&mut [0])],
        file.metadata().unwrap().len() / 2,
        rustix::io::ReadWriteFlags::NOWAIT,
    );
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    tried == Err(rustix::io::Errno::AGAIN)
}

/// By default a device reads only what the page cache does not have.
#[test]
fn cuda_what_is_in_the_page_cache_comes_from_there() {
    let folder = folder();
    let path = file(folder.path());
    let subject = subject(&path);
    fs::read(&path).unwrap();
    assert_eq!(loaded(Gds::Direct, &Library::default(), &subject, ON_DEVICE), (0, Vec::new()));
    if evict(&path) {
        let (gds, why) = loaded(Gds::Direct, &Library::default(), &subject, ON_DEVICE);
        assert!(why.is_empty() && gds > large(&subject) / 2, "{gds} {why:?}");
    }
    // A source that always goes through the page cache, and one that is no file, are the host's.
    let cached =
        |path: &Path| Ok(Arc::new(tensor_offload::transfer::FileSource::open(path)?.through_page_cache()) as Arc<_>);
    let cached = Subject::new(Checkpoint::open_with(&path, cached).unwrap().into());
    let memory = Subject::plain(&llama(2, 512), 70);
    for subject in [cached, memory] {
        assert_eq!(loaded(Gds::Always, &Library::default(), &subject, ON_DEVICE), (0, Vec::new()));
    }
}

/// A library that reads through host memory, or may do so and not tell, is no gain over the host's own reads.
#[test]
fn cuda_compatibility_mode_is_not_used_unless_it_is_wanted() {
    let folder = folder();
    let path = file(folder.path());
    let subject = subject(&path);
    let compat = Library { nvidia_fs: (0, 0), allow_compat: true, ..Library::default() };
    let (gds, why) = loaded(Gds::Direct, &compat, &subject, ON_DEVICE);
    assert!(gds == 0 && why.len() == 1 && why[0].contains("compatibility mode"), "{why:?}");
    let peer = Library { peer_to_peer: true, supported: 0, ..compat.clone() };
    if evict(&path) {
        let (gds, why) = loaded(Gds::Direct, &peer, &subject, ON_DEVICE);
        assert!(gds == 0 && why.len() == 1 && why[0].contains("allow_compat_mode"), "{why:?}");
        evict(&path);
        let (gds, why) = loaded(Gds::Direct, &Library { allow_compat: false, ..peer }, &subject, ON_DEVICE);
        assert!(gds > 0 && why.is_empty(), "{why:?}");
    }
    // Wanted all the same, they are made, and the report does not pass them off as direct.
    for (library, why) in
        [(compat.clone(), "compatibility mode"), (Library { nvidia_fs: (2, 17), ..compat }, "does not tell")]
    {
        let (gds, whys) = loaded(Gds::Always, &library, &subject, ON_DEVICE);
        assert_eq!((gds, whys.len()), (large(&subject), 1));
        assert!(whys[0].contains(why), "{whys:?}");
    }
}

#[test]
fn cuda_a_load_says_why_no_device_reads_its_files() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    let reason = |gds: Gds, library: &Path| {
        let (cuda, session) = (driver(&cards()), session(&Library::default()));
        let why = {
            let devices = registry_of(Cuda::new().gds(gds).cufile(library));
            let model = load(&devices, &subject, ON_DEVICE).unwrap();
            subject.check(&model);
            assert_eq!(model.report().gds, 0);
            model.report().not_gds.clone()
        };
        close(&cuda);
        cuda.assert_clean();
        assert_eq!(session.report().calls.len(), 0);
        assert_eq!(why.len(), 1, "{why:?}");
        assert!(why[0].starts_with("cuda:0: "), "{why:?}");
        why[0].clone()
    };
    let library = library_path();
    assert!(reason(Gds::Off, &library).contains("switched off"));
    if !Path::new("/proc/driver/nvidia-fs/version").exists() {
        assert!(reason(Gds::Auto, &library).contains("nvidia-fs is not loaded"));
    }
    assert!(reason(Gds::Always, Path::new("/nowhere/libcufile.so.0")).contains("/nowhere/libcufile.so.0"));
    // A library that is something else.
    assert!(reason(Gds::Always, Path::new("libm.so.6")).contains("libm.so.6 has no cuFileDriverOpen"));
}

/// A file system without direct reads, and one that the library does not take: of two files, the other is read all the same.
#[test]
fn cuda_a_file_that_is_refused_comes_through_host_memory() {
    let folder = folder();
    let path = file(folder.path());
    let subject = subject(&path);
    let number = statfs(&path).unwrap().f_type as u64;
    let refusing = Library { refused_file_systems: vec![number], ..Library::default() };
    let (gds, why) = loaded(Gds::Always, &refusing, &subject, ON_DEVICE);
    assert!(gds == 0 && why.len() == 1, "{why:?}");
    assert!(why[0].contains("CU_FILE_IO_NOT_SUPPORTED") && why[0].contains(path.to_str().unwrap()), "{why:?}");
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = file(memory.path());
    let subject = self::subject(&path);
    let number = statfs(&path).unwrap().f_type as u64;
    let (gds, why) =
        loaded(Gds::Always, &Library { refused_file_systems: vec![number], ..Library::default() }, &subject, ON_DEVICE);
    assert!(gds == 0 && why.len() == 1 && why[0].contains(path.to_str().unwrap()), "{why:?}");
}

/// One call of the library after another fails, or all from one on: the model is the same, and nothing is left.
#[test]
fn cuda_a_model_is_the_same_whatever_call_of_the_library_fails() {
    let folder = folder();
    let subject = subject(&small_file(folder.path()));
    let calls: u64 = {
        let (cuda, library) = (driver(&cards()), session(&Library::default()));
        load(&devices(Gds::Always), &subject, ON_DEVICE).unwrap();
        close(&cuda);
        library.report().calls.values().sum()
    };
    let fault = |nth, status| Fault { driver: 1, ..Fault::any(nth, status) };
    let faults = (1..=calls).flat_map(|nth| {
        let one = [fault(nth, 5030), fault(nth, 5001), fault(nth, 5011), fault(nth, 1)];
        one.into_iter().chain([fault(nth, 5030).onwards(), Fault::errno(nth, 5)])
    });
    for fault in faults {
        let (cuda, library) = (driver(&cards()), session(&Library::default()));
        library.fault(std::slice::from_ref(&fault));
        {
            let devices = devices(Gds::Always);
            let model = load(&devices, &subject, ON_DEVICE).unwrap();
            subject.check(&model);
            let report = model.report();
            let all = report.gds == large(&subject);
            assert_eq!(all, report.not_gds.is_empty(), "{fault:?} {report}");
            drop(model);
            assert_given_back(&devices, None, &format!("{fault:?}"));
        }
        close(&cuda);
        cuda.assert_clean();
        let report = library.report();
        assert!(report.violations.is_empty() && report.files == 0 && report.memory == 0, "{fault:?} {report:?}");
        // What could not be closed stays open.
        assert!(report.open <= 1, "{fault:?} {report:?}");
    }
}

/// The same for the driver's calls, those that the library makes among them.
#[test]
fn cuda_whatever_call_of_the_driver_fails_nothing_is_kept() {
    let folder = folder();
    let subject = subject(&small_file(folder.path()));
    let path = |devices: &Registry| {
        // Always after the driver's session, which is held already.
        let library = session(&Library::default());
        let outcome = load(devices, &subject, ON_DEVICE).and_then(|model| {
            let tensors = subject.layout().tensors().iter().zip(&subject.merged);
            tensors.into_iter().try_for_each(|(tensor, wanted)| {
                let bytes = support::read(&model, &tensor.name)?;
                assert!(bytes == *wanted, "{} is another", tensor.name);
                Ok(())
            })
        });
        let report = library.report();
        assert!(report.violations.is_empty() && report.files == 0, "{report:?}");
        outcome
    };
    let effects = [Effect::OutOfMemory, Effect::Sticky(700)];
    whatever_call_fails(&cards(), &effects, 20, || devices(Gds::Always), path);
}

#[test]
fn cuda_a_file_that_changes_is_an_error_whoever_reads_it() {
    let folder = folder();
    for length in [None, Some(1000), Some(3 * MIB as u64)] {
        let path = file(folder.path());
        let subject = subject(&path);
        let changed = File::options().write(true).open(&path).unwrap();
        match length {
            Some(length) => changed.set_len(length).unwrap(),
            None => changed.write_all_at(&[1; 100], 2 * MIB as u64).unwrap(),
        }
        let (cuda, library) = (driver(&cards()), session(&Library::default()));
        {
            let devices = devices(Gds::Always);
            match load(&devices, &subject, ON_DEVICE) {
                Err(Error::File { file, tensor: Some(_), fault }) => {
                    assert_eq!((file, *fault), (path, FileFault::Changed));
                }
                other => panic!("{length:?}: {other:?}"),
            }
            assert_given_back(&devices, None, "a file that changed");
        }
        close(&cuda);
        cuda.assert_clean();
        library.report().assert_clean();
    }
}

#[test]
fn cuda_a_load_that_is_stopped_registers_nothing_any_more() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    let (cuda, library) = (driver(&cards()), session(&Library { read_micros: 1000, ..Library::default() }));
    {
        let (devices, cancel) = (devices(Gds::Always), Cancel::new());
        let plan = subject.planner(devices.machine(), ON_DEVICE).plan().unwrap();
        let stop = |_: u64, _: u64| cancel.cancel();
        let loader = Loader::new(&devices).workers(2).progress(&stop).cancel(&cancel);
        assert!(matches!(loader.load(&subject.weights, &plan), Err(Error::Cancelled { .. })));
        assert_given_back(&devices, None, "a load that was stopped");
    }
    close(&cuda);
    cuda.assert_clean();
    library.report().assert_clean();
}

/// More files than are registered at one time, by workers that are slow: none is given back while another reads from it.
#[test]
fn cuda_a_model_of_many_files_registers_a_few_at_a_time() {
    const FILES: usize = 40;
    let folder = folder();
    let mut names = serde_json::Map::new();
    for index in 0..FILES {
        let name = format!("model.layers.{index}.weight");
        let file = format!("model-{:05}-of-{FILES:05}.safetensors", index + 1);
        let bytes = safetensors(&[spec(&name, DType::U8, &[300 << 10])], index as u64);
        fs::write(folder.path().join(&file), bytes).unwrap();
        names.insert(name, file.into());
    }
    let index = serde_json::json!({ "weight_map": names }).to_string();
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let subject = subject(folder.path());
    let library = Library { read_micros: 300, ..Library::default() };
    assert_eq!(loaded(Gds::Always, &library, &subject, ON_DEVICE), (large(&subject), Vec::new()));
}

/// A file of so many bytes, open for direct reads, and its bytes.
fn open(folder: &Path, len: usize) -> (File, Vec<u8>) {
    let path = folder.join("bytes");
    let bytes: Vec<u8> = (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap();
    (File::options().read(true).custom_flags(flags).open(&path).unwrap(), bytes)
}

fn contents(cpu: &Arc<dyn Device>, card: &Arc<dyn Device>, memory: BufMut) -> Vec<u8> {
    let (len, there) = (memory.bytes(), memory.freeze());
    let here = cpu.alloc(len, MemoryKind::Pinned).unwrap();
    let down = card.stream(Role::Download).unwrap();
    let mut here = down.copy(Transfer::whole(&there, here).unwrap()).unwrap().wait(DEADLINE).unwrap();
    here.host_mut().unwrap().to_vec()
}

/// The trait by itself: any offset and size, parts of memory, the end of the file, memory that is registered.
#[test]
fn cuda_reads_go_where_they_are_told() {
    let folder = folder();
    let (file, bytes) = open(folder.path(), 2 * MIB + 77);
    let (cuda, library) = (driver(&cards()), session(&Library { most_registered: 4 * MIB, ..Library::default() }));
    {
        let backend = Cuda::new().gds(Gds::Always).cufile(library_path());
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(GPU0).unwrap());
        let reads = card.file_reads().unwrap();
        reads.ready().unwrap();
        assert!(cpu.file_reads().is_none());
        let file = reads.register(file).unwrap();
        let mut memory = card.alloc(3 * MIB, MemoryKind::Arena).unwrap();
        memory.wait_unused(DEADLINE).unwrap();
        let registered = reads.register_memory(memory.block()).unwrap();
        assert_eq!(library.report().memory, 3 * MIB as u64);
        // No room for more.
        let other = card.alloc(2 * MIB, MemoryKind::Whole).unwrap();
        let refused = reads.register_memory(other.block()).map(drop).unwrap_err();
        assert!(matches!(refused, NoFileReads::Refused { call: "cuFileBufRegister", status: 5036, .. }), "{refused}");
        let mut rest = memory.split_off(MIB).unwrap();
        for (at, to) in [(0, 0..MIB), (13, 5..MIB), (4096, 77..78), (2 * MIB, 100..277)] {
            let wanted = to.len().min(bytes.len() - at);
            assert_eq!(file.read(at as u64, &mut rest, to.clone()), Ok(wanted));
        }
        assert_eq!(file.read(bytes.len() as u64, &mut rest, 0..10), Ok(0));
        assert_eq!(file.read(2, &mut memory, 0..0), Ok(0));
        for (to, memory) in [(0..2 * MIB + 1, &mut rest), (0..1, &mut cpu.alloc(1, MemoryKind::Pinned).unwrap())] {
            assert!(matches!(file.read(0, memory, to).unwrap_err(), NoFileReads::Memory { .. }));
        }
        let got = contents(&cpu, &card, rest);
        let mut wanted = bytes[..MIB].to_vec();
        wanted[5..].copy_from_slice(&bytes[13..MIB + 8]);
        wanted[77] = bytes[4096];
        wanted[100..177].copy_from_slice(&bytes[2 * MIB..]);
        assert!(got[..MIB] == wanted);
        drop((memory, registered, file));
        assert_eq!((library.report().memory, library.report().files), (0, 0));
    }
    close(&cuda);
    cuda.assert_clean();
    library.report().assert_clean();
}

/// Memory under a copy is not read into, and memory that is registered outlives its buffer.
#[test]
fn cuda_memory_in_use_is_not_read_into() {
    let folder = folder();
    let (file, _) = open(folder.path(), MIB);
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    let library = session(&Library::default());
    {
        let backend = Cuda::new().gds(Gds::Always).cufile(library_path());
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(GPU0).unwrap());
        let reads = card.file_reads().unwrap();
        let file = reads.register(file).unwrap();
        let (up, here) = (card.stream(Role::Upload).unwrap(), cpu.alloc(MIB, MemoryKind::Pinned).unwrap().freeze());
        let memory = card.alloc(MIB, MemoryKind::Whole).unwrap();
        cuda.fault(&FaultPlan::one(cuda_standin::Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
        let mut memory = up.copy(Transfer::whole(&here, memory).unwrap()).unwrap().chain();
        let used = file.read(0, &mut memory, 0..MIB).unwrap_err();
        assert!(used.to_string().contains("in use"), "{used}");
        cuda.no_faults();
        let registered = reads.register_memory(memory.block()).unwrap();
        drop(memory);
        up.record(&[]).unwrap().wait(DEADLINE).unwrap();
        assert_eq!((card.ledger().charged(), library.report().memory), (MIB as u64, MIB as u64));
        drop(registered);
    }
    wait_until_closed(&cuda, DEADLINE);
    card::assert_clean(&cuda);
    library.report().assert_clean();
}

/// The environment names the library and the setting, for programs that name neither.
#[test]
fn cuda_the_environment_names_the_library() {
    let name = "cuda_the_environment_names_the_library";
    let (setting, variable) = ("TENSOR_OFFLOAD_GDS", "TENSOR_OFFLOAD_LIBCUFILE");
    if std::env::var_os("CUDA_GDS_CHILD").is_some() {
        let folder = folder();
        let subject = subject(&file(folder.path()));
        let (cuda, _library) = (driver(&cards()), session(&Library::default()));
        let wanted = std::env::var(setting).unwrap();
        {
            let model = load(&registry(), &subject, ON_DEVICE).unwrap();
            let report = model.report();
            match wanted.as_str() {
                "always" => assert!(report.gds == large(&subject) && report.not_gds.is_empty(), "{report}"),
                "off" => assert!(report.gds == 0 && report.not_gds[0].contains("switched off"), "{report}"),
                _ => assert!(report.gds == 0 && report.not_gds[0].contains("TENSOR_OFFLOAD_GDS: `on`"), "{report}"),
            }
        }
        close(&cuda);
        return;
    }
    for value in ["always", "off", "on"] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name]).env("CUDA_GDS_CHILD", "1").env(setting, value).env(variable, library_path());
        let output = child.output().unwrap();
        assert!(output.status.success(), "{value}: {}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{value}: no test of this name ran");
    }
}

/// Over the library that the environment names, NVIDIA's for example: the bytes are right, and it says what it did.
#[test]
fn cuda_the_library_that_is_named_gives_the_same_model() {
    if std::env::var_os("TENSOR_OFFLOAD_LIBCUFILE").is_none() || std::env::var_os("CUDA_GDS_CHILD").is_some() {
        eprintln!("skipped: TENSOR_OFFLOAD_LIBCUFILE names no library");
        return;
    }
    let folder = folder();
    let path = file(folder.path());
    let subject = subject(&path);
    let cuda = driver(&cards());
    for gds in [Gds::Off, Gds::Auto, Gds::Direct, Gds::Always] {
        evict(&path);
        let devices = registry_of(Cuda::new().gds(gds));
        let model = load(&devices, &subject, ON_DEVICE).unwrap();
        subject.check(&model);
        let report = model.report();
        println!("{gds}: {report}");
        assert!(report.gds == large(&subject) || !report.not_gds.is_empty() || gds != Gds::Always, "{report}");
        assert!(gds != Gds::Off || report.gds == 0, "{report}");
    }
    close(&cuda);
}

/// Two passes over layers that stay in files, over a library that says this of itself. Returns the bytes that went straight to
/// slots, and why others did not.
fn streamed(gds: Gds, library: &Library, faults: &[Fault], subject: &Subject) -> (u64, Vec<String>) {
    let (cuda, library) = (driver(&cards()), session(library));
    library.fault(faults);
    let (read, slots) = {
        let devices = devices(gds);
        // A file with codes is read as it is, and its codes are decoded in the device's memory.
        let planner = subject.planner(devices.machine(), "cuda:0,10%;cpu,10%;disk,*").depth(1).compress(true);
        let plan = planner.plan().unwrap();
        let model = Arc::new(Loader::new(&devices).deadline(DEADLINE).load(&subject.weights, &plan).unwrap());
        assert!(model.report().in_files > 0);
        let before = library.report().bytes;
        let mut streamer = Streamer::new(&model).unwrap().deadline(DEADLINE);
        (0..2).for_each(|_| check_pass(&mut streamer, subject).unwrap());
        let report = streamer.report().clone();
        let slots = plan.slots().bytes();
        assert!(library.report().memory <= slots, "{} of {slots} bytes", library.report().memory);
        drop(streamer);
        // The last pass has prefetched the first layer of the next.
        assert!(report.gds <= library.report().bytes - before && report.gds <= report.read, "{report}");
        assert_eq!(report.to_string().contains("read by GPUDirect Storage"), report.gds > 0);
        drop(model);
        assert_given_back(&devices, None, "a streamed model");
        ((report.gds, report.not_gds), slots)
    };
    close(&cuda);
    cuda.assert_clean();
    let report = library.report();
    assert!(report.violations.is_empty() && report.files == 0, "{faults:?} {report:?}");
    // What could not be closed stays open, and what could not be deregistered stays so.
    let failed = u64::from(!faults.is_empty());
    assert!(report.open <= failed && report.memory <= failed * slots, "{faults:?} {report:?}");
    read
}

#[test]
fn cuda_a_device_reads_streamed_layers_into_their_slots() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    for most_bytes in [usize::MAX, 100_003] {
        let (gds, why) = streamed(Gds::Always, &Library { most_bytes, ..Library::default() }, &[], &subject);
        assert!(gds > 4 * MIB as u64 && why.is_empty(), "{gds} {why:?}");
    }
    // Slots that cannot be registered are read into all the same.
    let small = Library { most_registered: 0, ..Library::default() };
    let (gds, why) = streamed(Gds::Always, &small, &[], &subject);
    assert!(gds > 4 * MIB as u64 && why.is_empty(), "{gds} {why:?}");
    let (gds, why) = streamed(Gds::Off, &Library::default(), &[], &subject);
    assert!(gds == 0 && why == ["cuda:0: it is switched off"], "{why:?}");
}

#[test]
fn cuda_a_device_reads_codes_and_decodes_them_into_slots() {
    let file = Compressed::new(&llama(1, 512), 73);
    let subject = subject(&file.file());
    let (gds, why) = streamed(Gds::Always, &Library::default(), &[], &subject);
    let stored: u64 = subject.layout().tensor_ids().filter_map(|tensor| subject.checkpoint().compressed(tensor)).sum();
    assert!(gds > stored && gds < 3 * stored && why.is_empty(), "{gds} of {stored} {why:?}");
}

/// A file that changes under a streamed model is an error that names the tensor, whoever reads it.
#[test]
fn cuda_a_streamed_file_that_changes_is_an_error_with_its_tensor() {
    let folder = folder();
    let path = file(folder.path());
    let subject = subject(&path);
    let (cuda, library) = (driver(&cards()), session(&Library::default()));
    {
        let devices = devices(Gds::Always);
        let plan = subject.planner(devices.machine(), "cuda:0,10%;disk,*").depth(0).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).deadline(DEADLINE).load(&subject.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap().deadline(DEADLINE);
        check_pass(&mut streamer, &subject).unwrap();
        assert!(streamer.report().gds > 0, "{}", streamer.report());
        File::options().write(true).open(&path).unwrap().write_all_at(&[1; 100], 2 * MIB as u64).unwrap();
        match check_pass(&mut streamer, &subject) {
            Err(Error::File { file, tensor: Some(_), fault }) => assert_eq!((file, *fault), (path, FileFault::Changed)),
            other => panic!("{other:?}"),
        }
        drop((streamer, model));
        assert_given_back(&devices, None, "a file that changed");
    }
    close(&cuda);
    cuda.assert_clean();
    assert!(library.report().violations.is_empty(), "{:?}", library.report());
}

#[test]
fn cuda_streamed_layers_have_their_bytes_whatever_call_of_the_library_fails() {
    let folder = folder();
    let subject = subject(&file(folder.path()));
    for nth in 1..30 {
        for fault in [Fault::any(nth, 5030), Fault::any(nth, 5022).onwards(), Fault::errno(nth, 5)] {
            streamed(Gds::Always, &Library::default(), &[fault], &subject);
        }
    }
}
