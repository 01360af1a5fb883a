//! Sets of files (llama.cpp, `tools/gguf-split` and `src/llama-model-loader.cpp`). Each file says its number, from 0, the number of
//! files, and the number of tensors in all of them; its name says its number from 1: `NAME-00001-of-00003.gguf`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::tensors::restore;
use super::{GgufHeader, GgufValue, unlike};
use crate::checkpoint::folder::noted_unfinished;
use crate::checkpoint::header::Header;
use crate::checkpoint::looked::Looked;
use crate::checkpoint::opened::{Open, Opened};
use crate::error::{Error, GgufFault, Result};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The keys that say which file of a set one is.
pub(super) const KEYS: [&str; 3] = [NUMBER, COUNT, TENSORS];

/// The most files of a set; names have five digits.
const MOST: u64 = 99_999;

/// What a file says of its set.
struct Split {
    number: u64,
    count: u64,
    tensors: u64,
}

impl Split {
    /// `None` for a file that is not of a set of several.
    fn of(header: &GgufHeader, path: &Path) -> Result<Option<Split>> {
        let number = |key, wanted: &'static str, fits: &dyn Fn(u64) -> bool| match header.value(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().filter(|number| fits(*number)) {
                Some(number) => Ok(Some(number)),
                None => Err(Error::file(path, None, unlike(key, value, wanted).into())),
            },
        };
        let Some(count) = number(COUNT, "a number of files up to 99999", &|count| count <= MOST)? else {
            return Ok(None);
        };
        if count <= 1 {
            return Ok(None);
        }
        let missing = |key: &str, wanted| {
            let fault = GgufFault::Value { key: key.to_owned(), found: "missing".to_owned(), wanted };
            Error::file(path, None, fault.into())
        };
        const BELOW: &str = "a number below that of the files";
        let own = number(NUMBER, BELOW, &|number| number < count)?.ok_or_else(|| missing(NUMBER, BELOW))?;
        const OF_TENSORS: &str = "a number of tensors";
        let tensors = number(TENSORS, OF_TENSORS, &|_| true)?.ok_or_else(|| missing(TENSORS, OF_TENSORS))?;
        Ok(Some(Split { number: own, count, tensors }))
    }
}

/// The beginning of a file's name, its number from 1, and the number of files.
fn parse(name: &str) -> Option<(&str, u64, u64)> {
    let stem = name.get(..name.len().checked_sub(5)?).filter(|_| name.to_ascii_lowercase().ends_with(".gguf"))?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits =
        |text: &str| Some(text).filter(|t| t.len() == 5 && t.bytes().all(|b| b.is_ascii_digit()))?.parse().ok();
    Some((base, digits(number)?, digits(count)?))
}

/// The name of a file of a set, with the ending of `like`.
fn name(base: &str, number: u64, count: u64, like: &str) -> String {
    format!("{base}-{number:05}-of-{count:05}{}", &like[like.len() - 5..])
}

/// Whether these names are of files of one set, some of which may be missing.
pub(in crate::checkpoint) fn one_set(names: &[&PathBuf]) -> bool {
    let set = |name: &&PathBuf| name.to_str().and_then(parse).map(|(base, _, count)| (base.to_owned(), count));
    let first = names.first().and_then(set);
    first.is_some() && names.iter().all(|name| set(name) == first)
}

/// Returns an error for bytes in memory of a file of a set, since the others are nowhere.
///
/// # Errors
/// [`Error::File`] called `path`.
pub(in crate::checkpoint) fn alone(path: &Path, header: &Header) -> Result<()> {
    match header.gguf.as_ref().map_or(Ok(None), |gguf| Split::of(gguf, path))? {
        Some(Split { number, count, .. }) => Err(Error::file(path, None, GgufFault::LonePart { number, count }.into())),
        None => Ok(()),
    }
}

/// Opens the other files of the set that the file at `path`, the only one of `files`, is of. Nothing changes for a file that is not of a set.
///
/// # Errors
/// [`Error::File`] when a file is missing or is not of the set, or two have tensors of one name; those of `open`.
pub(in crate::checkpoint) fn complete(
    look: &Looked<'_>,
    path: &Path,
    files: &mut Vec<Opened>,
    open: Open<'_>,
) -> Result<()> {
    let [(_, Header { gguf: Some(own), .. })] = &files[..] else { return Ok(()) };
    let Some(split) = Split::of(own, path)? else { return Ok(()) };
    let Split { number, count, tensors } = split;
    let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((base, ..)) = parse(file_name).filter(|(_, own, of)| (*own, *of) == (number + 1, count)) else {
        return Err(Error::file(path, None, GgufFault::UnnamedPart { number, count }.into()));
    };
    let names: Vec<String> = (1..=count).map(|number| name(base, number, count, file_name)).collect();
    look.look_into(path.parent().unwrap_or(Path::new("")));
    // So is one whose link leads nowhere.
    let missing =
        |name: &&String| matches!(look.is_absent(&path.with_file_name(name)), Ok(true) | Err(Error::File { .. }));
    let absent: Vec<String> = names.iter().filter(missing).cloned().collect();
    if !absent.is_empty() {
        return Err(Error::file(path, None, GgufFault::MissingParts { count, files: absent }.into()));
    }
    let parts: Vec<PathBuf> = names.iter().map(|name| path.with_file_name(name)).collect();
    if let Some((file, fault)) = parts.iter().find_map(|file| Some((file, noted_unfinished(look, file)?))) {
        return Err(Error::file(file, None, fault));
    }
    let others = parts.iter().cloned().enumerate().filter(|(index, _)| *index as u64 != number);
    let mut all = open(others.collect())?;
    let own = Arc::clone(&files[0].0);
    let header = Header::read(&*own, number as usize)?;
    all.insert(number as usize, (own, header));
    for (index, (file, (_, header))) in parts.iter().zip(&all).enumerate() {
        check_part(file, path, header, index as u64, &split)?;
    }
    restore_shapes(&mut all)?;
    check_whole(path, &all, tensors)?;
    *files = all;
    Ok(())
}

/// Gives the tensors of later files the shapes that the first file has of them: a model's metadata is all in the first file of its
/// set (llama.cpp, `tools/gguf-split/gguf-split.cpp`). What a file says of its own tensors counts.
fn restore_shapes(files: &mut [Opened]) -> Result<()> {
    let Some(((source, Header { gguf: Some(first), .. }), others)) = files.split_first_mut() else { return Ok(()) };
    for (_, Header { gguf, tensors, .. }) in others {
        let Some(gguf) = gguf.as_mut().map(Arc::make_mut) else { continue };
        for tensor in tensors {
            if let Some(shape) = first.shape(&**source, &tensor.name)?.filter(|_| !gguf.has_shape(&tensor.name)) {
                restore(tensor, shape, &mut gguf.stored_shapes);
            }
        }
    }
    Ok(())
}

/// Returns an error unless a file says that it is number `number` of the set of `path`.
fn check_part(file: &Path, path: &Path, header: &Header, number: u64, set: &Split) -> Result<()> {
    let other = |key: &str, found: String, wanted: String| {
        let (key, set) = (key.to_owned(), path.display().to_string());
        Err(Error::file(file, None, GgufFault::OtherSet { set, key, found, wanted }.into()))
    };
    let Some(gguf) = &header.gguf else {
        return other("format", "safetensors".to_owned(), "GGUF".to_owned());
    };
    let Some(part) = Split::of(gguf, file)? else {
        let found = gguf.value(COUNT).map_or("missing".to_owned(), GgufValue::to_string);
        return other(COUNT, found, set.count.to_string());
    };
    let pairs = [(COUNT, part.count, set.count), (NUMBER, part.number, number), (TENSORS, part.tensors, set.tensors)];
    match pairs.into_iter().find(|(_, found, wanted)| found != wanted) {
        Some((key, found, wanted)) => other(key, found.to_string(), wanted.to_string()),
        None => Ok(()),
    }
}

/// Returns an error if two files have tensors of one name, or all have more or fewer than `wanted`.
fn check_whole(path: &Path, files: &[Opened], wanted: u64) -> Result<()> {
    let mut holders: HashMap<&str, usize> = HashMap::new();
    for tensor in files.iter().flat_map(|(_, header)| &header.tensors) {
        if let Some(other) = holders.insert(&tensor.name, tensor.file) {
            let fault = GgufFault::InTwoParts { other: files[other].0.path().display().to_string() };
            return Err(Error::file(files[tensor.file].0.path(), Some(&tensor.name), fault.into()));
        }
    }
    let found = holders.len() as u64;
    match found == wanted {
        true => Ok(()),
        false => Err(Error::file(path, None, GgufFault::TensorsOfSet { found, wanted }.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sets_have_five_digits() {
        assert_eq!(parse("m-Q4_K_M-00001-of-00003.gguf"), Some(("m-Q4_K_M", 1, 3)));
        assert_eq!(parse("-00001-of-00003.GGUF"), Some(("", 1, 3)));
        for other in ["m-1-of-3.gguf", "m-00001-of-00003", "m.gguf", "gguf", "é.gguf", "m-00001-of-0000x.gguf"] {
            assert_eq!(parse(other), None, "{other}");
        }
        assert_eq!(name("m", 2, 3, "m-00001-of-00003.gguf"), "m-00002-of-00003.gguf");
    }
}
