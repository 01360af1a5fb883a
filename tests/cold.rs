//! Files that are not in the page cache, or in part: the bytes, the way they are read, and files that change meanwhile.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{TensorSpec, write_safetensors};
use tensor_offload::error::FileFault;
use tensor_offload::transfer::{FileSource, ReadPart, ReadWays, Source};
use tensor_offload::{Checkpoint, DType, Error, Loader, Machine, Model, Planner, Registry, Weights};

const MIB: usize = 1 << 20;

/// A folder on a disk. The one for temporary files may be in memory.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A file of so many bytes, all on the disk.
fn file(folder: &Path, len: usize) -> PathBuf {
    let path = folder.join("bytes");
    fs::write(&path, bytes(len)).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    path
}

/// Drops a part of a file from the page cache. False if the file system keeps its files there.
fn evict(path: &Path, at: u64, len: u64) -> bool {
    let file = File::open(path).unwrap();
    fadvise(&file, at, std::num::NonZero::new(len), Advice::DontNeed).unwrap();
    let middle = at + file.metadata().unwrap().len().saturating_sub(at).min(if len == 0 { u64::MAX } else { len }) / 2;
    let tried = preadv2(&file, &mut [IoSliceMut::new(&mut [0])], middle, ReadWriteFlags::NOWAIT);
    // The try had the system read ahead.
    fadvise(&file, at, std::num::NonZero::new(len), Advice::DontNeed).unwrap();
    tried == Err(Errno::AGAIN)
}

fn total(ways: &ReadWays) -> u64 {
    ways.cached + ways.dropped + ways.direct
}

#[test]
fn a_cold_file_is_read_directly_and_stays_cold() {
    let folder = folder();
    let len = 20 * MIB + 777;
    let path = file(folder.path(), len);
    let source = FileSource::open(&path).unwrap();
    let is_cold = evict(&path, 0, 0);
    let mut dst = vec![0; len - 100];
    for turn in 1..3 {
        dst.fill(0);
        source.read_at(100, &mut dst).unwrap();
        assert!(dst == bytes(len)[100..]);
        let ways = source.ways();
        assert_eq!(total(&ways), turn * (len as u64 - 100));
        if is_cold && ways.refused.is_none() {
            assert_eq!(ways.direct, total(&ways), "{ways:?}");
        }
    }
    let cached = FileSource::open(&path).unwrap().through_page_cache();
    evict(&path, 0, 0);
    cached.read_at(0, &mut dst).unwrap();
    assert!(dst == bytes(len)[..len - 100]);
    assert_eq!((cached.ways().cached, total(&cached.ways())), (len as u64 - 100, len as u64 - 100));
    // Now it is in the page cache, for the first source too.
    let before = source.ways();
    source.read_at(0, &mut dst).unwrap();
    assert_eq!(source.ways().direct, before.direct);
}

/// A source goes on reading a file that lost its name, directly too.
#[test]
fn a_file_without_a_name_is_read_directly() {
    let folder = folder();
    let path = file(folder.path(), 4 * MIB);
    let source = FileSource::open(&path).unwrap();
    evict(&path, 0, 0);
    fs::remove_file(&path).unwrap();
    fs::write(&path, vec![1; 4 * MIB]).unwrap();
    let mut dst = vec![0; 3 * MIB];
    source.read_at(5, &mut dst).unwrap();
    assert!(dst == bytes(4 * MIB)[5..5 + 3 * MIB]);
}

/// Files in memory are read from there.
#[test]
fn files_in_memory_are_read_from_there() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = file(folder.path(), 3 * MIB);
    let source = FileSource::open(&path).unwrap();
    evict(&path, 0, 0);
    let mut dst = vec![0; 3 * MIB];
    source.read_at(0, &mut dst).unwrap();
    assert!(dst == bytes(3 * MIB));
    assert_eq!(total(&source.ways()), 3 * MIB as u64);
    assert_eq!(source.read_within(3 * MIB as u64, 0, &mut []).unwrap(), 0..0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_bytes_are_those_of_the_file_whatever_is_cached(
        len in 1usize..9 * MIB,
        (at, part) in (0f64..=1.0, 0f64..=1.0),
        evicted in prop::collection::vec((0u64..9, 0u64..4), 0..5),
        offset in 0usize..4100,
    ) {
        let folder = folder();
        let path = file(folder.path(), len);
        let source = FileSource::open(&path).unwrap();
        let at = (len as f64 * at) as usize;
        let wanted = ((len - at) as f64 * part) as usize;
        let all = bytes(len);
        let evict_parts = || {
            for (from, mib) in &evicted {
                let from = from * MIB as u64;
                if *mib > 0 && from < len as u64 {
                    fadvise(File::open(&path).unwrap(), from, std::num::NonZero::new(mib * MIB as u64), Advice::DontNeed).unwrap();
                }
            }
        };
        evict_parts();
        let mut dst = vec![0; offset + wanted];
        source.read_at(at as u64, &mut dst[offset..]).unwrap();
        prop_assert!(dst[offset..] == all[at..at + wanted]);
        prop_assert_eq!(total(&source.ways()), wanted as u64);
        evict_parts();
        let (mut done, mut buffer) = (0, vec![0; offset + wanted]);
        while done < wanted {
            let found = source.read_within((at + done) as u64, wanted - done, &mut buffer[offset..]).unwrap();
            prop_assert!(!found.is_empty() && found.len() <= wanted - done);
            prop_assert!(buffer[offset..][found.clone()] == all[at + done..at + done + found.len()]);
            done += found.len();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn scattered_parts_get_the_bytes_of_the_file(
        parts in prop::collection::vec((0f64..=1.0, prop_oneof![0..5000usize, 0..12 * MIB], 0usize..4100), 1..10),
        evicted in prop::collection::vec((0u64..19, 0u64..8), 0..5),
    ) {
        const LEN: usize = 19 * MIB + 333;
        let folder = folder();
        let path = file(folder.path(), LEN);
        let source = FileSource::open(&path).unwrap();
        for (from, mib) in evicted.iter().filter(|(_, mib)| *mib > 0) {
            evict(&path, from * MIB as u64, mib * MIB as u64);
        }
        let all = bytes(LEN);
        let places = parts.into_iter().map(|(at, len, offset)| {
            let at = (LEN as f64 * at) as usize;
            (at, len.min(LEN - at), offset)
        });
        let places: Vec<_> = places.collect();
        let mut memory: Vec<Vec<u8>> = places.iter().map(|(_, len, offset)| vec![0; len + offset]).collect();
        let mut parts: Vec<_> = memory
            .iter_mut()
            .zip(&places)
            .map(|(dst, &(at, _, offset))| ReadPart::new(at as u64, &mut dst[offset..]))
            .collect();
        source.read_parts(&mut parts).unwrap();
        for (dst, &(at, len, offset)) in memory.iter().zip(&places) {
            prop_assert!(dst[offset..] == all[at..at + len]);
        }
        prop_assert_eq!(total(&source.ways()), places.iter().map(|(_, len, _)| *len as u64).sum::<u64>());
    }
}

/// What is beyond the end is an error before a byte is read, and so is a file that was cut short since.
#[test]
fn scattered_parts_of_a_shorter_file_are_errors() {
    let folder = folder();
    let path = file(folder.path(), 3 * MIB);
    let source = FileSource::open(&path).unwrap();
    let fault = |parts: &mut [ReadPart<'_>]| match source.read_parts(parts) {
        Err(Error::File { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    };
    let (mut first, mut last) = (vec![0; MIB], vec![0; MIB]);
    let beyond = fault(&mut [ReadPart::new(0, &mut first), ReadPart::new(2 * MIB as u64 + 1, &mut last)]);
    assert_eq!(beyond, FileFault::Truncated { expected: 3 * MIB as u64 + 1, actual: 3 * MIB as u64 });
    assert!(first.iter().all(|&byte| byte == 0));
    File::options().write(true).open(&path).unwrap().set_len(2 * MIB as u64).unwrap();
    evict(&path, 0, 0);
    let changed = fault(&mut [ReadPart::new(2 * MIB as u64, &mut last), ReadPart::new(0, &mut first)]);
    assert_eq!(changed, FileFault::Changed);
}

/// A model of weights of a mebibyte and more, and of small ones between.
fn model(folder: &Path) -> (PathBuf, u64) {
    let path = folder.join("model.safetensors");
    let of_layer = |layer: u64| {
        let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
        [
            TensorSpec::new(name("up"), DType::BF16, [1024 + layer, 1024]),
            TensorSpec::new(name("norm"), DType::BF16, [1024 - layer]),
            TensorSpec::new(name("down"), DType::BF16, [1024, 511]),
        ]
    };
    let specs: Vec<_> = (0..6).flat_map(of_layer).collect();
    let mut next = 0u64;
    write_safetensors(&path, &specs, &Default::default(), |_, out| {
        while out.left() > 0 {
            let part: Vec<u8> = (next..next + out.left().min(4096))
                .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8)
                .collect();
            next += part.len() as u64;
            out.put(&part)?;
        }
        Ok(())
    })
    .unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    (path, specs.iter().map(|spec| 2 * spec.shape.iter().product::<u64>()).sum())
}

fn load(weights: &Weights, allocation: &str) -> tensor_offload::Result<Model> {
    let machine = Machine::described(&["cpu=64mb".parse().unwrap(), "cuda:0=64mb".parse().unwrap()]);
    let devices = Registry::described(machine, Clock::Virtual);
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().unwrap());
    let plan = planner.compute("cuda:0".parse().unwrap()).plan().unwrap();
    Loader::new(&devices).workers(3).load(weights, &plan)
}

const ALLOCATIONS: [&str; 3] = ["cpu,*", "cuda:0,100%", "cuda:0,50%;cpu,50%"];

#[test]
fn a_cold_load_gives_the_same_model_and_says_how_it_read() {
    let folder = folder();
    let (path, bytes) = model(folder.path());
    let weights = Weights::new(Checkpoint::open(&path).unwrap());
    for allocation in ALLOCATIONS {
        let contents = |model: &Model| -> Vec<Vec<u8>> {
            let names = weights.layout().tensors().iter().map(|tensor| &tensor.name);
            names
                .map(|name| model.to_vec::<half::bf16>(name).unwrap().iter().flat_map(|v| v.to_le_bytes()).collect())
                .collect()
        };
        fs::read(&path).unwrap();
        let warm = load(&weights, allocation).unwrap();
        assert_eq!((warm.report().direct, warm.report().dropped), (0, 0), "{}", warm.report());
        let is_cold = evict(&path, 0, 0);
        let cold = load(&weights, allocation).unwrap();
        assert!(contents(&warm) == contents(&cold), "{allocation}");
        let report = cold.report();
        assert_eq!(report.read, bytes);
        if is_cold && report.not_direct.is_empty() {
            // All on the host; on the way to a device, all but small vectors and what is left at the ends of tensors.
            let least = if allocation == "cpu,*" { bytes } else { bytes / 10 * 9 };
            assert!(report.direct >= least && report.dropped == 0, "{report}");
            assert!(report.to_string().contains("read directly"), "{report}");
            assert_eq!(serde_json::to_value(report).unwrap()["direct"], report.direct);
        }
    }
}

#[test]
fn a_file_that_changes_under_a_cold_load_is_an_error() {
    let folder = folder();
    for allocation in ALLOCATIONS {
        for change in ["shorter by a byte", "much shorter", "other bytes"] {
            let (path, _) = model(folder.path());
            let weights = Weights::new(Checkpoint::open(&path).unwrap());
            let len = fs::metadata(&path).unwrap().len();
            let file = File::options().write(true).open(&path).unwrap();
            match change {
                "shorter by a byte" => file.set_len(len - 1).unwrap(),
                "much shorter" => file.set_len(len / 3).unwrap(),
                _ => std::os::unix::fs::FileExt::write_all_at(&file, &[1; 100], len / 2).unwrap(),
            }
            file.sync_all().unwrap();
            evict(&path, 0, 0);
            match load(&weights, allocation) {
                Err(Error::File { file, tensor: Some(_), fault }) => {
                    assert_eq!((file, *fault), (path, FileFault::Changed), "{allocation}, {change}");
                }
                other => panic!("{allocation}, {change}: {other:?}"),
            }
        }
    }
}

/// Hundreds of files, each of which may take two descriptors.
#[test]
fn more_files_than_may_be_open_are_read_directly() {
    let folder = folder();
    let sources: Vec<(PathBuf, Arc<FileSource>)> = (0..150)
        .map(|number| {
            let path = folder.path().join(number.to_string());
            fs::write(&path, vec![number as u8; MIB / 2]).unwrap();
            (path.clone(), Arc::new(FileSource::open(path).unwrap()))
        })
        .collect();
    let mut dst = vec![0; MIB / 2];
    for (number, (path, source)) in sources.iter().enumerate() {
        File::open(path).unwrap().sync_all().unwrap();
        evict(path, 0, 0);
        source.read_at(0, &mut dst).unwrap();
        assert!(dst.iter().all(|&byte| byte == number as u8));
    }
}
