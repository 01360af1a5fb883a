//! Weights that stay in the model's own files, on their way to CUDA devices: over the stand-in driver, which sees every access that
//! no event orders, or over the driver that is named.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::fs::{self, File};
use std::sync::Arc;

use card::{DEADLINE, driver, has_devices, registry, whatever_call_fails};
use cuda_standin::{Config, Effect, MemoryMode};
use support::*;
use tensor_offload::stream::Via;
use tensor_offload::{ByteSize, Checkpoint, DType, Loader, Registry, Result, Streamer};

/// A model in a file.
struct InFile {
    _folder: tempfile::TempDir,
    path: std::path::PathBuf,
    subject: Subject,
}

impl InFile {
    fn new(tensors: &[tensor_offload::checkpoint::TensorSpec], seed: u64) -> InFile {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, safetensors(tensors, seed)).unwrap();
        let subject = Subject::new(Checkpoint::open(&path).unwrap().into());
        InFile { _folder: folder, path, subject }
    }

    /// So many passes, each layer compared with the file. Returns the bytes that came from the disk, and those that were fetched.
    fn passes(&self, devices: &Registry, allocation: &str, cache: u64, count: usize) -> Result<(u64, u64)> {
        let planner = self.subject.planner(devices.machine(), allocation);
        let plan = planner.depth(1).plan()?;
        let loader = Loader::new(devices).deadline(DEADLINE).host_cache(ByteSize(cache));
        let model = Arc::new(loader.load(&self.subject.weights, &plan)?);
        assert_eq!(model.report().in_files, plan.device(DISK).map_or(0, |share| share.weights.bytes));
        let mut streamer = Streamer::new(&model)?.deadline(DEADLINE);
        (0..count).try_for_each(|_| check_pass(&mut streamer, &self.subject))?;
        let report = streamer.report();
        assert!(report.lanes.iter().all(|lane| lane.from != DISK || lane.via == Via::Staging), "{report}");
        Ok((report.read, report.bytes.get(&DISK).copied().unwrap_or(0)))
    }
}

fn card() -> Config {
    Config::with_devices(&[256 << 20]).memory(MemoryMode::Reuse).late_micros(2000).seed(6)
}

/// Layers of several pinned buffers, of which several are filled at a time, and layers of small tensors.
#[test]
fn cuda_layers_come_from_the_model_s_files() {
    let large = blocks(&[40_000_003, 300, 17 << 20, 33_000_000]);
    let tensors = [llama(3, 32), large].concat();
    let model = InFile::new(&tensors, 1);
    let driver = driver(&card());
    if has_devices(1) {
        let devices = registry();
        for allocation in ["disk,*", "cuda:0,1mb;cpu,20mb;disk,*"] {
            let (read, bytes) = model.passes(&devices, allocation, 0, 2).unwrap();
            assert_eq!(read, bytes);
            let (read, bytes) = model.passes(&devices, allocation, 18 << 20, 2).unwrap();
            assert!(read < bytes, "{read} of {bytes}");
        }
        drop(devices);
    }
    driver.assert_clean();
}

#[test]
fn cuda_a_file_that_is_cut_short_is_an_error_of_its_layers() {
    let tensors: Vec<_> =
        (0..6).map(|layer| spec(format!("layers.{layer}.up.weight"), DType::BF16, &[256, 256])).collect();
    let model = InFile::new(&tensors, 2);
    let driver = driver(&card());
    if has_devices(1) {
        let devices = registry();
        let plan = model.subject.planner(devices.machine(), "disk,*").depth(1).plan().unwrap();
        let loaded = load(&devices, &model.subject, &plan);
        let mut streamer = Streamer::new(&loaded).unwrap().deadline(DEADLINE);
        check_pass(&mut streamer, &model.subject).unwrap();
        let bytes = fs::read(&model.path).unwrap();
        File::options().write(true).open(&model.path).unwrap().set_len(9000).unwrap();
        let errors = layers(&streamer)
            .filter_map(|layer| streamer.layer(layer).and_then(|guard| check_layer(&guard, &model.subject)).err());
        let errors: Vec<String> = errors.map(|error| error.to_string()).collect();
        assert!(!errors.is_empty() && errors.iter().all(|error| error.contains("model.safetensors")), "{errors:?}");
        drop((streamer, loaded));
        comes_back(&devices);
        // The same bytes again are another file, which is opened anew.
        fs::write(&model.path, bytes).unwrap();
        let again = Subject::new(Checkpoint::open(&model.path).unwrap().into());
        check_streamed(&load(&devices, &again, &plan), &model.subject);
        drop(devices);
    }
    driver.assert_clean();
}

#[test]
fn cuda_whatever_call_fails_nothing_of_the_disk_tier_is_kept() {
    let model = InFile::new(&llama(2, 16), 3);
    let path = |devices: &Registry| model.passes(devices, "cuda:0,2kb;disk,*", 4000, 2).map(|_| ());
    whatever_call_fails(&card(), &[Effect::Fail(304), Effect::Sticky(700)], 0, registry, path);
}
