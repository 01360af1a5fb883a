//! Models whose files have tensors in compressed form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tensor_offload::Checkpoint;
use tensor_offload::checkpoint::{CompressedReport, TensorSpec, write_compressed};

use super::Subject;

/// The tensors of a checkpoint in a compressed file.
pub(crate) fn compress(checkpoint: &Checkpoint, path: &Path) -> CompressedReport {
    let tensors = checkpoint.layout().tensors();
    let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_compressed(path, &specs, &metadata, |tensor, out| {
        let id = checkpoint.find(&specs[tensor].name).unwrap();
        let mut bytes = vec![0; checkpoint.layout().tensor(id).unwrap().bytes as usize];
        checkpoint.read(id, &mut bytes)?;
        out.put(&bytes)
    })
    .unwrap()
}

/// A model, and a folder with its compressed file.
pub(crate) struct Compressed {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) plain: Subject,
    pub(crate) report: CompressedReport,
}

impl Compressed {
    pub(crate) fn new(tensors: &[TensorSpec], seed: u64) -> Compressed {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let plain = Subject::plain(tensors, seed);
        let report = compress(plain.checkpoint(), &folder.path().join("model.safetensors"));
        Compressed { folder, plain, report }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    pub(crate) fn open(&self) -> Checkpoint {
        Checkpoint::open(self.file()).unwrap()
    }
}
