//! What a load takes, beside the floors of the same run: reading the file's bytes into memory that is there already,
//! and into fresh memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rayon::prelude::*;
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{TensorSpec, write_safetensors};
use tensor_offload::{Checkpoint, DType, Loader, Machine, Planner, Registry, Weights};

/// Layers of two weights of 8 MiB and two norms.
const LAYERS: usize = 16;

fn checkpoint(folder: &Path) -> PathBuf {
    let path = folder.join("model.safetensors");
    let weight = |layer: usize, name: &str| {
        TensorSpec::new(format!("model.layers.{layer}.{name}.weight"), DType::BF16, [2048, 2048])
    };
    let norm = |layer: usize| TensorSpec::new(format!("model.layers.{layer}.norm.weight"), DType::BF16, [2048]);
    let layers = (0..LAYERS).flat_map(|layer| [weight(layer, "up"), weight(layer, "down"), norm(layer)]);
    let specs: Vec<_> = layers.collect();
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let written = write_safetensors(&path, &specs, &Default::default(), |_, out| {
        while out.left() > 0 {
            let part = block.len().min(out.left() as usize);
            out.put(&block[..part])?;
        }
        Ok(())
    });
    written.expect("a folder that can be written");
    path
}

/// Reads the file with two threads, each into its half of `into`.
fn read(path: &Path, into: &mut [u8]) {
    let half = into.len().div_ceil(2);
    into.par_chunks_mut(half).enumerate().for_each(|(index, part)| {
        let mut file = File::open(path).expect("the file that was written");
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start((index * half) as u64)).expect("a place in the file");
        file.read_exact(part).expect("as many bytes as the file has");
    });
}

fn load(c: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = checkpoint(folder.path());
    let checkpoint = Checkpoint::open(&path).expect("the checkpoint that was written");
    let weights = Weights::new(checkpoint.clone());
    let bytes = std::fs::metadata(&path).expect("the file that was written").len();
    let mut group = c.benchmark_group("load");
    group.sample_size(10).throughput(Throughput::BytesDecimal(bytes));

    let mut reused = vec![1u8; bytes as usize];
    group.bench_function("floor: read into memory that is there", |b| b.iter(|| read(&path, &mut reused)));
    group.bench_function("floor: read into fresh memory", |b| b.iter(|| read(&path, &mut vec![0u8; bytes as usize])));

    let described = ["cpu=1gb", "cuda:0=1gb", "disk=1gb"].map(|text| text.parse().expect("a device"));
    for allocation in ["cpu,*", "cuda:0,100%", "cuda:0,50%;cpu,50%"] {
        let devices = Registry::described(Machine::described(&described), Clock::Virtual);
        let planner =
            Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().expect("an allocation"));
        let plan = planner.compute("cuda:0".parse().expect("a device")).plan().expect("a plan that fits");
        group.bench_function(BenchmarkId::new("load", allocation), |b| {
            b.iter(|| Loader::new(&devices).load(&weights, &plan).expect("a load"));
        });
    }
    group.finish();
}

criterion_group!(benches, load);
criterion_main!(benches);
