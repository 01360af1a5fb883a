//! The cache of the Hugging Face hub: `hub/models--ORG--NAME` with the folders `blobs`, `refs` and `snapshots`.
//!
//! `refs/main` holds the name of the snapshot of the branch main, and `snapshots/NAME` links to the files in `blobs`. See
//! <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

use std::path::{Component, Path, PathBuf};

use super::folder::{INDEX, SAFETENSORS, ends, files, sub_folders};
use super::looked::Looked;
use super::text::read_text;
use crate::error::{Error, FileFault, Result};

/// How the folder of a model begins.
const MODEL: &str = "models--";

/// The folder with a model's files: where `folder` is a cache of one model, or a model's folder in one, that of the snapshot;
/// `folder` itself where it is neither.
///
/// # Errors
/// [`Error::File`] with [`FileFault::SeveralModels`] when there are several models, or several snapshots and no `refs/main`
/// that names one of them; [`FileFault::NoWeights`] or [`FileFault::Unfinished`] without a snapshot.
pub(crate) fn model_folder(look: &Looked<'_>, folder: &Path) -> Result<PathBuf> {
    // A folder with weights of its own is no cache, whatever else is in it.
    if files(look, folder)?.iter().any(|name| ends(name, SAFETENSORS) || ends(name, INDEX)) {
        return Ok(folder.to_owned());
    }
    if is_model(look, folder) {
        return snapshot(look, folder);
    }
    let Some((cache, models)) = [folder.to_owned(), folder.join("hub")].into_iter().find_map(|cache| {
        let models = models_in(look, &cache);
        (!models.is_empty()).then_some((cache, models))
    }) else {
        return Ok(folder.to_owned());
    };
    match models.as_slice() {
        [model] => snapshot(look, &cache.join(model)),
        _ => {
            let what = "a cache of several models of the Hugging Face hub";
            Err(several(&cache, what, &models))
        }
    }
}

/// Whether this is the folder of a model in a cache.
fn is_model(look: &Looked<'_>, folder: &Path) -> bool {
    let named = || folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(MODEL.as_bytes()));
    let has = |name: &str| look.is_folder(&folder.join(name));
    has("snapshots") && (has("blobs") || has("refs") || named())
}

/// The folders of models in a cache, in order of name. None in a folder that cannot be listed: there may be none such.
fn models_in(look: &Looked<'_>, cache: &Path) -> Vec<PathBuf> {
    let names = sub_folders(look, cache).unwrap_or_default().into_iter();
    let model = |name: &PathBuf| name.as_os_str().as_encoded_bytes().starts_with(MODEL.as_bytes());
    names.filter(|name| model(name) && is_model(look, &cache.join(name))).collect()
}

/// The folder of the snapshot that `refs/main` names; without that file, of the only one.
fn snapshot(look: &Looked<'_>, model: &Path) -> Result<PathBuf> {
    let folder = model.join("snapshots");
    let snapshots = sub_folders(look, &folder)?;
    let main = model.join("refs").join("main");
    let named = match look.is_file(&main)? {
        true => Some(read_text(look, &main, |reason| Error::file(&main, None, FileFault::BadConfig { reason }))?),
        false => None,
    };
    let is = |name: &str, snapshot: &Path| {
        // A name and nothing that leads out of the folder.
        let mut parts = snapshot.components();
        matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
    };
    let found = match (&named, snapshots.as_slice()) {
        (Some(name), all) => all.iter().find(|snapshot| is(name.trim(), snapshot)),
        (None, [only]) => Some(only),
        (None, _) => None,
    };
    match (found, snapshots.is_empty()) {
        (Some(snapshot), _) => Ok(folder.join(snapshot)),
        (None, false) => {
            let what = match named {
                Some(_) => {
                    "a model's folder in a cache of the Hugging Face hub, whose refs/main names no snapshot that is there"
                }
                None => "a model's folder in a cache of the Hugging Face hub, which has no refs/main",
            };
            let names: Vec<PathBuf> = snapshots.iter().map(|name| Path::new("snapshots").join(name)).collect();
            Err(several(model, what, &names))
        }
        (None, true) => Err(Error::file(model, None, unfinished(look, model).unwrap_or(FileFault::NoWeights))),
    }
}

/// The downloads into a model's folder that have not finished, if there are any.
pub(super) fn unfinished(look: &Looked<'_>, model: &Path) -> Option<FileFault> {
    let names = files(look, &model.join("blobs")).ok()?;
    let part = |name: &&PathBuf| name.extension().is_some_and(|end| end == "incomplete");
    let files: Vec<String> = names.iter().filter(part).map(|name| format!("blobs/{}", name.display())).collect();
    (!files.is_empty()).then_some(FileFault::Unfinished { files })
}

fn several(folder: &Path, what: &'static str, models: &[PathBuf]) -> Error {
    let models = models.iter().map(|model| model.display().to_string()).collect();
    Error::file(folder, None, FileFault::SeveralModels { what, models })
}
