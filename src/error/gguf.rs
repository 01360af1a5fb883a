//! Faults of GGUF files.

use super::fault::List;
use crate::dtype::DType;

/// The fault of a GGUF file. Bytes that the file ends before are [`Truncated`](super::FileFault::Truncated), and tensors that
/// share bytes or leave some out are what they are in a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// A version of the format that is not read.
    #[error("it is GGUF of version {version}; versions 2 and 3 are read: {advice}")]
    Version {
        /// The version.
        version: u32,
        /// What to do.
        advice: &'static str,
    },
    /// The numbers are stored with the most significant byte first.
    #[error(
        "it is big-endian GGUF of version {version}, which is not read: convert it with gguf-py's gguf_convert_endian"
    )]
    BigEndian {
        /// The version.
        version: u32,
    },
    /// The rest of the file is too short for that many.
    #[error(
        "it is said to have {count} {of}, for which the {left} bytes that follow are too few; copy or download it again"
    )]
    Count {
        /// What is counted.
        of: String,
        /// The count.
        count: u64,
        /// The bytes that follow.
        left: u64,
    },
    /// A name of a tensor or of an entry of the metadata that is longer than any program writes.
    #[error("the name at byte {at} is {bytes} bytes long, the limit is {limit}")]
    LongName {
        /// Where it begins in the file.
        at: u64,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A name that is not UTF-8.
    #[error("the name at byte {at} is not UTF-8")]
    NotUtf8 {
        /// Where it begins in the file.
        at: u64,
    },
    /// An entry of the metadata has a value of no known type.
    #[error("the value of `{key}` is of type {number}, which the format does not have")]
    ValueType {
        /// The entry.
        key: String,
        /// The number of the type.
        number: u32,
    },
    /// An entry of the metadata holds a truth value other than 0 and 1.
    #[error("the value of `{key}` holds the truth value {byte}")]
    Bool {
        /// The entry.
        key: String,
        /// The byte.
        byte: u8,
    },
    /// An entry of the metadata holds arrays in arrays, deeper than any program writes.
    #[error("the value of `{key}` is nested deeper than {limit} arrays")]
    Nesting {
        /// The entry.
        key: String,
        /// The limit.
        limit: usize,
    },
    /// A key occurs twice in the metadata.
    #[error("the key `{key}` occurs twice")]
    RepeatedKey {
        /// The key.
        key: String,
    },
    /// An entry of the metadata that the reader needs has a value that it cannot have.
    #[error("`{key}` is {found}, not {wanted}")]
    Value {
        /// The key.
        key: String,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A tensor has more dimensions than GGML.
    #[error("it has {count} dimensions, the format has at most 4")]
    Dimensions {
        /// The number of dimensions.
        count: u32,
    },
    /// A tensor is of a type that GGML has removed, or that is not known.
    #[error("its element type is number {number} of GGML, which {}", why_no_type(*number))]
    Type {
        /// The number.
        number: u32,
    },
    /// A row of a tensor is not a whole number of blocks.
    #[error("a row of {row} elements is no whole number of blocks of {dtype}, of {block} elements each")]
    PartOfABlock {
        /// The element type.
        dtype: DType,
        /// The innermost dimension.
        row: u64,
        /// The elements of a block.
        block: u64,
    },
    /// A tensor is larger than 64 bits count.
    #[error("{dtype} {shape:?} is larger than 64 bits count")]
    Uncountable {
        /// The element type.
        dtype: DType,
        /// The shape, outermost first.
        shape: Vec<u64>,
    },
    /// The bytes of a tensor do not begin at a multiple of the alignment.
    #[error("its offset {offset} is no multiple of {alignment}, the alignment of the file")]
    Unaligned {
        /// The offset, from the beginning of the tensors' bytes.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A file of a set whose name does not say where the others are.
    #[error(
        "it is file {} of a set of {count}, and not called NAME-{:05}-of-{count:05}.gguf; rename the files of the set so, \
         or merge them with llama-gguf-split",
        number + 1,
        number + 1
    )]
    UnnamedPart {
        /// Its number, from 0.
        number: u64,
        /// The number of files.
        count: u64,
    },
    /// Bytes in memory of one file of a set.
    #[error("it is file {} of a set of {count}; write the files to a folder, and open any of them by its path", number + 1)]
    LonePart {
        /// Its number, from 0.
        number: u64,
        /// The number of files.
        count: u64,
    },
    /// Files of a set that are not there.
    #[error("{} of the {count} files of the set are missing: {}; put them beside it", files.len(), List(files))]
    MissingParts {
        /// The number of files.
        count: u64,
        /// The names of the missing ones.
        files: Vec<String>,
    },
    /// A file that is not the part of the set that its name says.
    #[error("it does not belong to the set of {set}: its {key} is {found}, not {wanted}")]
    OtherSet {
        /// The file that was opened.
        set: String,
        /// The entry of the metadata, or what else differs.
        key: String,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// A set with more or fewer tensors than it says.
    #[error("the files of the set have {found} tensors, not {wanted}")]
    TensorsOfSet {
        /// The tensors of all files.
        found: u64,
        /// What they say.
        wanted: u64,
    },
    /// A tensor that two files of a set hold.
    #[error("it is in {other}, too")]
    InTwoParts {
        /// The other file.
        other: String,
    },
    /// A folder of several GGUF files that are not one set.
    #[error("the folder holds {} GGUF files that are not the files of one set; open one by name: {}", files.len(), List(files))]
    SeveralFiles {
        /// The files' names.
        files: Vec<String>,
    },
}

fn why_no_type(number: u32) -> &'static str {
    match number {
        4 | 5 => "was removed (Q4_2 and Q4_3); convert the model again from its original",
        31..=33 => "was removed (Q4_0 in another order, for one kind of processor); use the Q4_0 file of the model",
        36..=38 => "was removed (IQ4_NL in another order, for one kind of processor); use the IQ4_NL file of the model",
        _ => "is not known; use a file of another type",
    }
}
