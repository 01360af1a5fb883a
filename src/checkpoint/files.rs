//! The files that make up a checkpoint.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::compressed::dfloat11::DFloat11;
use super::folder;
use super::gguf::one_set;
use super::hub::model_folder;
use super::json::Entries;
use super::looked::Looked;
use super::opened::Opened;
use super::quantised::Stated;
use super::shard::Network;
use super::text::read_json;
use crate::error::{Error, FileFault, GgufFault, Result};
use crate::transfer::PathKind;

/// The files of a checkpoint.
#[derive(Debug)]
pub(super) struct FileSet {
    /// The folder of the files and of `config.json`.
    pub(super) folder: PathBuf,
    /// In order of name.
    pub(super) files: Vec<PathBuf>,
    index: Option<Index>,
}

impl FileSet {
    /// The files that `path` stands for: a file, an index, or a folder.
    pub(super) fn at(look: &Looked<'_>, path: &Path) -> Result<FileSet> {
        let set = FileSet::find(look, path)?;
        let unfinished = |file: &PathBuf| Some(Error::file(file, None, folder::noted_unfinished(look, file)?));
        set.files.iter().find_map(unfinished).map_or(Ok(set), Err)
    }

    fn find(look: &Looked<'_>, path: &Path) -> Result<FileSet> {
        if look.kind_of_existing(path)? == PathKind::Folder {
            return FileSet::of_folder(look, path);
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            let all = if folder::ends(path, folder::INDEX) { FileSet::of_groups(look, &folder)? } else { None };
            return all.map_or_else(|| FileSet::of_index(look, folder, path), Ok);
        }
        Ok(FileSet { folder, files: vec![path.to_owned()], index: None })
    }

    fn of_folder(look: &Looked<'_>, folder: &Path) -> Result<FileSet> {
        let folder = &model_folder(look, folder)?;
        let names = folder::files(look, folder)?;
        let ending = |end: &str| -> Vec<&PathBuf> { names.iter().filter(|name| folder::ends(name, end)).collect() };
        let refuse = |fault| Err(Error::file(folder, None, fault));
        let listed = |names: &[&PathBuf]| names.iter().map(|name| name.display().to_string()).collect();
        if ending(folder::SAFETENSORS).len() > 1
            && let Some(set) = FileSet::of_groups(look, folder)?
        {
            return Ok(set);
        }
        match ending(folder::INDEX).as_slice() {
            [] => {}
            [index] => return FileSet::of_index(look, folder.to_owned(), &folder.join(index)),
            several => return refuse(FileFault::SeveralIndexes { files: listed(several) }),
        }
        match ending(folder::SAFETENSORS).as_slice() {
            [file] => Ok(FileSet { folder: folder.to_owned(), files: vec![folder.join(file)], index: None }),
            [] => match ending(folder::GGUF).as_slice() {
                [] => Err(folder::no_safetensors(look, folder, &names)),
                // Any file of a set leads to the others.
                files if files.len() == 1 || one_set(files) => {
                    Ok(FileSet { folder: folder.to_owned(), files: vec![folder.join(files[0])], index: None })
                }
                several => refuse(GgufFault::SeveralFiles { files: listed(several) }.into()),
            },
            several => {
                let pipeline = folder::pipeline(look, folder, &names);
                refuse(pipeline.unwrap_or_else(|| FileFault::NoIndex { files: listed(several) }))
            }
        }
    }

    /// All safetensors files of a folder whose `config.json` says that weights are in DFloat11's form; `None` if it does not. Each
    /// group is in a file of its own, and an index, if there is one, names only what is in none.
    fn of_groups(look: &Looked<'_>, folder: &Path) -> Result<Option<FileSet>> {
        if DFloat11::of(look, folder)?.is_none() {
            return Ok(None);
        }
        let names = folder::files(look, folder)?.into_iter().filter(|name| folder::ends(name, folder::SAFETENSORS));
        let files = names.map(|name| folder.join(name)).collect();
        Ok(Some(FileSet { folder: folder.to_owned(), files, index: None }))
    }

    fn of_index(look: &Looked<'_>, folder: PathBuf, path: &Path) -> Result<FileSet> {
        let index = Index::read(look, path)?;
        let files: Vec<PathBuf> = index.shards.keys().map(|shard| folder.join(shard)).collect();
        look.look_into(&folder);
        let mut missing = Vec::new();
        for (shard, file) in index.shards.keys().zip(&files) {
            if look.is_absent(file)? {
                missing.push(shard.clone());
            }
        }
        if !missing.is_empty() {
            return Err(Error::file(path, None, FileFault::MissingShards { files: missing }));
        }
        Ok(FileSet { folder, files, index: Some(index) })
    }

    /// Keeps the tensors of each file that the index lists for it, and fails if one is missing. Without an index all tensors
    /// are kept, and none may be in two files.
    pub(super) fn select(&self, opened: &mut [Opened]) -> Result<()> {
        let Some(index) = &self.index else {
            let mut seen = HashSet::new();
            let twice = self.files.iter().zip(&*opened).find_map(|(file, (_, header))| {
                let twice = header.tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str()))?;
                Some(Error::file(file, Some(&twice.name), FileFault::DuplicateKey))
            });
            return twice.map_or(Ok(()), Err);
        };
        for ((shard, names), (_, header)) in index.shards.iter().zip(opened) {
            header.tensors.retain(|t| names.binary_search(&t.name).is_ok());
            if header.tensors.len() == names.len() {
                continue;
            }
            let found: HashSet<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
            let absent = names.iter().find(|n| !found.contains(n.as_str())).map(String::as_str);
            return Err(Error::file(&index.path, absent, FileFault::NotInShard { shard: shard.clone() }));
        }
        Ok(())
    }
}

/// The index of a sharded checkpoint.
#[derive(Debug)]
struct Index {
    path: PathBuf,
    /// File -> names of its tensors, sorted.
    shards: BTreeMap<String, Vec<String>>,
}

impl Index {
    fn read(look: &Looked<'_>, path: &Path) -> Result<Index> {
        #[derive(Deserialize)]
        struct Fields {
            weight_map: Entries<String>,
        }

        let bad = |reason| FileFault::BadIndex { reason };
        let fields: Fields = read_json(look, path, bad)?;
        if let Some(name) = fields.weight_map.repeated() {
            return Err(Error::file(path, Some(name), FileFault::DuplicateKey));
        }
        let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, shard) in fields.weight_map.0 {
            if leaves_folder(&shard) {
                return Err(Error::file(path, Some(&name), FileFault::LeavesFolder { entry: shard }));
            }
            shards.entry(shard).or_default().push(name);
        }
        if shards.is_empty() {
            return Err(Error::file(path, None, bad("it names no tensor".to_owned())));
        }
        shards.values_mut().for_each(|names| names.sort());
        Ok(Index { path: path.to_owned(), shards })
    }
}

/// Whether an index's entry could lie outside the index's folder on any system: `../x`, `/x`, `C:\x`, `\\host\x`.
fn leaves_folder(entry: &str) -> bool {
    let separator = |c: char| c == '/' || c == '\\';
    let drive = entry.as_bytes().get(1) == Some(&b':');
    drive || entry.starts_with(separator) || entry.split(separator).any(|part| part == "..")
}

/// What `config.json` says of a model.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) tied: Tied,
    /// Of quantised weights.
    pub(super) stated: Stated,
    pub(super) network: Network,
}

/// What `config.json` in the folder says; nothing without the file.
pub(super) fn configuration(look: &Looked<'_>, folder: &Path) -> Result<Said> {
    let path = folder.join("config.json");
    if !look.exists(&path)? {
        return Ok(Said::default());
    }
    let bad = |reason| FileFault::BadConfig { reason };
    let config: Value = read_json(look, &path, bad)?;
    let tied = tied_embeddings(&config).map_err(|error| Error::file(&path, None, bad(error.to_string())))?;
    Ok(Said { tied, stated: Stated::of(&config), network: Network::of(&config) })
}

/// What a configuration says of the head and the embedding.
fn tied_embeddings(config: &Value) -> Result<Tied, serde_json::Error> {
    #[derive(Deserialize)]
    struct Config {
        architectures: Option<Vec<String>>,
        tie_word_embeddings: Option<bool>,
        text_config: Option<TextConfig>,
    }
    #[derive(Deserialize)]
    struct TextConfig {
        tie_word_embeddings: Option<bool>,
    }

    let config = Config::deserialize(config)?;
    let nested = config.text_config.and_then(|text| text.tie_word_embeddings);
    let has_head = |name: &String| HEADED.iter().any(|end| name.ends_with(end));
    Ok(match config.tie_word_embeddings.or(nested) {
        Some(true) => Tied::Yes,
        Some(false) => Tied::No,
        None if config.architectures.iter().flatten().any(has_head) => Tied::IfHeadless,
        None => Tied::No,
    })
}

/// What a configuration says of the embedding and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tied {
    Yes,
    #[default]
    No,
    /// Nothing, and the model has a head: transformers ties it unless told otherwise, so a file without one has it tied.
    IfHeadless,
}

/// How transformers' names of models with a language model's head end.
const HEADED: [&str; 3] = ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration"];
