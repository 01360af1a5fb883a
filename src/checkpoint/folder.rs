//! What a folder holds where no model is found in it.

use std::path::{Path, PathBuf};

use super::format::other_format;
use super::hub;
use super::looked::Looked;
use crate::error::{Error, FileFault, Result};
use crate::transfer::{Entry, PathKind};

/// Endings of safetensors files.
pub(super) const SAFETENSORS: &str = ".safetensors";

/// The ending of GGUF files.
pub(super) const GGUF: &str = ".gguf";

/// Endings of the index of a sharded checkpoint.
pub(super) const INDEX: &str = ".safetensors.index.json";

/// The file in which a pipeline of several models (of diffusers) lists them.
const PIPELINE: &str = "model_index.json";

/// The ending of the file in which aria2 notes what it has downloaded of a file of the full length.
const NOTES: &str = ".aria2";

/// Endings of weights in other formats.
const OTHERS: [&str; 8] = [".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".npz", ".h5"];

/// Endings of archives, and of what weights may be in as well.
const ARCHIVES: [&str; 6] = [".zip", ".tar", ".gz", ".7z", ".pkl", ".npy"];

/// Endings that programs give to files while they download them.
const UNFINISHED: [&str; 5] = [".part", ".incomplete", ".crdownload", ".download", NOTES];

/// How deep in a folder weights are looked for, to name their place.
const DEPTH: usize = 4;

/// How many entries of folders are looked at for that.
const LOOKED_AT: usize = 10_000;

/// Whether a name ends so, in letters of either case.
pub(super) fn ends(name: &Path, end: &str) -> bool {
    let name = name.as_os_str().as_encoded_bytes();
    name.len() > end.len() && name[name.len() - end.len()..].eq_ignore_ascii_case(end.as_bytes())
}

/// All entries of a folder that are not hidden, in order of name.
fn entries(look: &Looked<'_>, folder: &Path) -> Result<Vec<Entry>> {
    let listed = look.list(folder)?;
    // `._model.safetensors` holds no weights.
    let hidden = |entry: &&Entry| entry.name.as_os_str().as_encoded_bytes().starts_with(b".");
    Ok(listed.iter().filter(|entry| !hidden(entry)).cloned().collect())
}

fn names(look: &Looked<'_>, folder: &Path, kind: PathKind) -> Result<Vec<PathBuf>> {
    let of_kind = entries(look, folder)?.into_iter().filter(|entry| entry.kind == kind);
    Ok(of_kind.map(|entry| entry.name).collect())
}

/// The names of a folder's files, in order. A link that leads nowhere is among them: that is found out when it is opened.
pub(super) fn files(look: &Looked<'_>, folder: &Path) -> Result<Vec<PathBuf>> {
    // Links count as what they lead to: hubs' caches hold links to the files.
    names(look, folder, PathKind::File)
}

/// The names of the folders in a folder, in order.
pub(super) fn sub_folders(look: &Looked<'_>, folder: &Path) -> Result<Vec<PathBuf>> {
    names(look, folder, PathKind::Folder)
}

/// The fault of a folder of a pipeline of several models, if it is one.
pub(super) fn pipeline(look: &Looked<'_>, folder: &Path, files: &[PathBuf]) -> Option<FileFault> {
    files.iter().find(|name| name.as_os_str() == PIPELINE)?;
    let models = weights_in(look, folder);
    let what = "the folder of a pipeline of several models";
    (!models.is_empty()).then_some(FileFault::SeveralModels { what, models })
}

/// The error for a folder without a safetensors file: where its weights are, which format they have, or that there are none.
pub(super) fn no_safetensors(look: &Looked<'_>, folder: &Path, files: &[PathBuf]) -> Error {
    let refuse = |fault| Error::file(folder, None, fault);
    if let Some(fault) = pipeline(look, folder, files).or_else(|| unfinished(look, folder, files)) {
        return refuse(fault);
    }
    let other = |name: &PathBuf| {
        let source = look.open(&folder.join(name)).ok()?;
        Some(Error::file(folder.join(name), None, other_format(&*source)?))
    };
    let archive = |name: &&PathBuf| ARCHIVES.iter().any(|end| ends(name, end));
    let weights = files.iter().filter(|name| is_other(name));
    if let Some(error) = weights.chain(files.iter().filter(archive)).find_map(other) {
        return error;
    }
    match with_weights(look, folder) {
        models if models.is_empty() => refuse(FileFault::NoWeights),
        models => refuse(FileFault::SeveralModels { what: "a folder with weights in sub-folders only", models }),
    }
}

/// The fault of a file that has its full length though its download has not finished.
pub(super) fn noted_unfinished(look: &Looked<'_>, file: &Path) -> Option<FileFault> {
    let mut notes = file.as_os_str().to_owned();
    notes.push(NOTES);
    let notes = Path::new(&notes);
    let noted = if look.is_far() { look.is_noted_file(notes) } else { look.is_file(notes).unwrap_or(false) };
    noted.then(|| FileFault::Unfinished { files: vec![text(notes)] })
}

/// The weights in a folder and below, as paths from the folder: safetensors files, and sub-folders with weights.
pub(crate) fn weights_in(look: &Looked<'_>, folder: &Path) -> Vec<String> {
    let own = files(look, folder).unwrap_or_default().into_iter().filter(|name| ends(name, SAFETENSORS));
    own.map(text).chain(with_weights(look, folder)).collect()
}

/// The error for a folder without a safetensors file of its own; `None` if it has one.
pub(crate) fn lacks_weights(look: &Looked<'_>, folder: &Path) -> Option<Error> {
    let files = files(look, folder).ok()?;
    let has = files.iter().any(|name| ends(name, SAFETENSORS));
    (!has).then(|| no_safetensors(look, folder, &files))
}

/// The downloads into a folder that have not finished, if there are any.
fn unfinished(look: &Looked<'_>, folder: &Path, files: &[PathBuf]) -> Option<FileFault> {
    let part = |name: &&PathBuf| UNFINISHED.iter().any(|end| ends(name, end));
    let mut found: Vec<String> = files.iter().filter(part).map(text).collect();
    // Where the hub's client keeps what it downloads to a folder.
    let cache = Path::new(".cache/huggingface/download");
    let names: Vec<PathBuf> =
        entries(look, &folder.join(cache)).unwrap_or_default().into_iter().map(|entry| entry.name).collect();
    found.extend(names.iter().filter(part).map(|name| text(cache.join(name))));
    if !found.is_empty() {
        return Some(FileFault::Unfinished { files: found });
    }
    // `models--ORG--NAME/snapshots/NAME`
    let snapshots = folder.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))?;
    hub::unfinished(look, snapshots.parent()?)
}

/// The sub-folders that hold weights of any format, as paths from the folder, in order.
fn with_weights(look: &Looked<'_>, folder: &Path) -> Vec<String> {
    let (mut found, mut looked_at) = (Vec::new(), 0);
    let mut level = vec![PathBuf::new()];
    // Far away, each folder is a question of its own.
    for depth in 0..=if look.is_far() { 1 } else { DEPTH } {
        let mut next = Vec::new();
        for sub in level {
            let Ok(entries) = entries(look, &folder.join(&sub)) else { continue };
            looked_at += entries.len();
            if looked_at > LOOKED_AT {
                return found;
            }
            let (folders, files): (Vec<_>, Vec<_>) =
                entries.into_iter().partition(|entry| entry.kind == PathKind::Folder);
            let weights = |name: &Path| ends(name, SAFETENSORS) || ends(name, INDEX) || is_other(name);
            if depth > 0 && files.iter().any(|file| weights(&file.name)) {
                found.push(text(&sub));
            } else {
                next.extend(folders.into_iter().map(|folder| sub.join(folder.name)));
            }
        }
        level = next;
    }
    found
}

fn is_other(name: &Path) -> bool {
    OTHERS.iter().any(|end| ends(name, end))
}

fn text(name: impl AsRef<Path>) -> String {
    name.as_ref().display().to_string()
}
