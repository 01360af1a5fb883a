//! Faults of inputs: model files and adapters.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use super::compressed::CompressedFault;
use super::dfloat11::DFloat11Fault;
use super::gguf::GgufFault;
use super::packing::{Packing, PackingFault};
use crate::dtype::DType;

/// The fault of a model file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The file ends before what its header announces.
    #[error("truncated: {expected} bytes expected, the file {}; copy or download it again", if *actual == 0 { "is empty".to_owned() } else { format!("has {actual}") })]
    Truncated {
        /// Bytes that the header announces.
        expected: u64,
        /// Bytes that there are.
        actual: u64,
    },
    /// Bytes after the last tensor.
    #[error("{extra} bytes follow the last tensor")]
    TrailingBytes {
        /// How many.
        extra: u64,
    },
    /// The header's length exceeds the format's limit.
    #[error("the header is said to be {bytes} bytes long, the limit is {limit}")]
    HeaderTooLarge {
        /// Its announced length.
        bytes: u64,
        /// The format's limit.
        limit: u64,
    },
    /// The header is not JSON, or not in the format's form.
    #[error("the header is not a safetensors header: {reason}")]
    BadHeader {
        /// What the parser met.
        reason: String,
    },
    /// A name occurs twice: in a header, in an index, or in two files of a checkpoint without one.
    #[error("the name occurs twice")]
    DuplicateKey,
    /// The format has no such element type.
    #[error("its element type `{name}` is none of the safetensors format")]
    UnknownDType {
        /// The name in the file.
        name: String,
    },
    /// The byte range ends before it begins.
    #[error("its byte range ends at {end}, before it begins at {begin}")]
    BackwardRange {
        /// Where it is said to begin.
        begin: u64,
        /// Where it is said to end.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("its bytes {}..{} overlap those of `{other}`", range.start, range.end)]
    Overlap {
        /// This tensor's bytes.
        range: Range<u64>,
        /// The other tensor.
        other: String,
    },
    /// Bytes that belong to no tensor.
    #[error("the {} bytes before it, {}..{}, belong to no tensor", hole.end - hole.start, hole.start, hole.end)]
    Hole {
        /// The unclaimed bytes.
        hole: Range<u64>,
    },
    /// The byte range does not hold the shape.
    #[error("{dtype} {shape:?} takes {} bytes, its range holds {actual}", expected.map_or("an uncountable number of".to_owned(), |n| n.to_string()))]
    WrongSize {
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes of that shape; none over `u64` or when they do not end on a byte.
        expected: Option<u64>,
        /// Bytes of the range.
        actual: u64,
    },
    /// The file is of another format; the text names it.
    #[error("this is {format}, which is not read: {advice}")]
    OtherFormat {
        /// What it looks like.
        format: &'static str,
        /// What to do instead.
        advice: &'static str,
    },
    /// The file is text, such as a server's answer in place of the file.
    #[error(
        "this is {kind} and no weights, as a server sends in place of a file; download it again. It begins: {start}"
    )]
    Text {
        /// The kind of text.
        kind: &'static str,
        /// Its first characters.
        start: String,
    },
    /// A link on the way to the file leads nowhere, as in a cache whose files were moved or whose download was interrupted.
    #[error("the link {} points to {}, which is not there", link.display(), target.display())]
    BrokenLink {
        /// The link.
        link: PathBuf,
        /// Its target, as the link states it.
        target: PathBuf,
    },
    /// A folder of several models, or with weights in sub-folders only: one of them has to be opened by its own path.
    #[error("this is {what}; open one of what is in it: {}", List(models))]
    SeveralModels {
        /// What the folder is.
        what: &'static str,
        /// The paths of its models, from the folder.
        models: Vec<String>,
    },
    /// Files whose download has not finished.
    #[error("these downloads have not finished: {}; finish them, or download the files again", List(files))]
    Unfinished {
        /// The files' names.
        files: Vec<String>,
    },
    /// A folder of several weight files without an index.
    #[error(
        "{} safetensors files and no index that says which belong together; open the index, or one file by name: {}",
        files.len(),
        List(files)
    )]
    NoIndex {
        /// The files' names.
        files: Vec<String>,
    },
    /// A folder with several indexes.
    #[error("{} indexes, of which one has to be opened by name: {}", files.len(), List(files))]
    SeveralIndexes {
        /// The indexes' names.
        files: Vec<String>,
    },
    /// The index is no JSON, or not of the form that sharded checkpoints use.
    #[error("this is not the index of a sharded checkpoint: {reason}")]
    BadIndex {
        /// What the parser met.
        reason: String,
    },
    /// The model's configuration is no JSON.
    #[error("this is not a model's configuration: {reason}")]
    BadConfig {
        /// What the parser met.
        reason: String,
    },
    /// A folder without any weights.
    #[error("the folder holds no safetensors file and no GGUF file")]
    NoWeights,
    /// Files that an index names and the folder lacks.
    #[error("{} files named by the index are missing: {}", files.len(), List(files))]
    MissingShards {
        /// Their names.
        files: Vec<String>,
    },
    /// A tensor is not in the file that the index names for it.
    #[error("the index places it in {shard}, which does not hold it")]
    NotInShard {
        /// The file named.
        shard: String,
    },
    /// An index entry points out of the folder.
    #[error("the index names `{entry}`, which leaves the folder")]
    LeavesFolder {
        /// The entry.
        entry: String,
    },
    /// A fault that only GGUF files have.
    #[error(transparent)]
    Gguf(#[from] GgufFault),
    /// A fault that only compressed tensors have.
    #[error(transparent)]
    Compressed(#[from] CompressedFault),
    /// A fault that only weights in DFloat11's form have.
    #[error(transparent)]
    DFloat11(#[from] DFloat11Fault),
    /// The file is not the one that was opened.
    #[error("the file changed while it was in use")]
    Changed,
}

/// What is wrong with an adapter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterFault {
    /// No key of the adapter names a tensor of the checkpoint.
    #[error(
        "none of its {keys} modules is in the checkpoint; it has {}; the checkpoint has {}",
        Sample(adapter_sample),
        Sample(checkpoint_sample)
    )]
    NothingMatches {
        /// How many modules the adapter has.
        keys: usize,
        /// Some of the adapter's names.
        adapter_sample: Vec<String>,
        /// Some of the checkpoint's names.
        checkpoint_sample: Vec<String>,
    },
    /// Some of the adapter's modules are not in the checkpoint.
    #[error("{} of its {keys} modules are not in the checkpoint: {}", unmatched.len(), Sample(unmatched))]
    PartlyMatches {
        /// How many modules the adapter has.
        keys: usize,
        /// Those without a target.
        unmatched: Vec<String>,
    },
    /// A name fits several modules of the checkpoint.
    #[error("the name fits several modules: {}", List(candidates))]
    Ambiguous {
        /// The modules.
        candidates: Vec<String>,
    },
    /// Two tensors of the adapter claim one role.
    #[error("it is for {role}, as `{other}` is")]
    Collision {
        /// The other key.
        other: String,
        /// The module or tensor that both are for.
        role: String,
    },
    /// Two modules of the adapter change the same rows of a tensor, in different ways.
    #[error(
        "it changes rows of `{tensor}`, which `{other}` changes, too, in another way; if they are for two networks, choose \
         one with Adapter::only (--only PREFIX)"
    )]
    Overlap {
        /// The other module.
        other: String,
        /// The checkpoint's tensor.
        tensor: String,
    },
    /// Tensors of the adapter that no known kind has.
    #[error("{} of its tensors are of no known kind of adapter: {}", keys.len(), Sample(keys))]
    NotUnderstood {
        /// Their keys.
        keys: Vec<String>,
    },
    /// A factor's shape does not fit its target.
    #[error("shape {found:?} does not fit {what} of shape {wanted:?}")]
    Shape {
        /// The shape in the adapter.
        found: Vec<u64>,
        /// What it has to fit.
        what: String,
        /// That one's shape.
        wanted: Vec<u64>,
    },
    /// One half of a pair is missing.
    #[error("its counterpart {missing} is missing")]
    Incomplete {
        /// The missing key.
        missing: String,
    },
    /// A factor of a program that always scales its factors, and nothing says by what.
    #[error(
        "PEFT and mlx-lm scale such factors by an alpha, which neither the file nor an adapter_config.json beside it says; \
         put that file beside it, or say the alpha with Adapter::alpha (--alpha)"
    )]
    NoAlpha,
    /// A kind of adapter that is not applied.
    #[error("{kind} adapters are not supported")]
    Unsupported {
        /// Its name.
        kind: String,
    },
    /// The rows of queries or keys may be ordered otherwise than in the adapter.
    #[error("the rows of `{target}` may be in another order; say which with Adapter::rotary_rows")]
    RowOrder {
        /// The module of the checkpoint.
        target: String,
    },
    /// An adapter's GGUF file is for models of another architecture than the checkpoint's, whose rows may be ordered otherwise.
    #[error(
        "it is for GGUF files of architecture `{adapter}`, and the checkpoint is one of `{model}`; use it on the model that it was \
         made for, or convert the original adapter for this one with llama.cpp's convert_lora_to_gguf"
    )]
    OtherArchitecture {
        /// The adapter's `general.architecture`.
        adapter: String,
        /// The checkpoint's.
        model: String,
    },
    /// A checkpoint or an adapter is a GGUF file of an architecture whose conversion is not known, and the other is in
    /// transformers' names: rows may be ordered otherwise, or values changed.
    #[error(
        "`{target}` is of a GGUF file of architecture `{architecture}`, and what the conversion to it changes is not known; use \
         checkpoint and adapter before their conversion, or both after it (llama.cpp's convert_lora_to_gguf), or, if nothing but \
         the rows of queries and keys can differ, say their order with Adapter::rotary_rows"
    )]
    UnknownConversion {
        /// The module in the GGUF file.
        target: String,
        /// The file's `general.architecture`.
        architecture: String,
    },
    /// An element type that a factor or its target cannot have.
    #[error("{what} has element type {dtype}, which cannot be patched")]
    BadDType {
        /// The factor or the target.
        what: String,
        /// Its type.
        dtype: DType,
    },
    /// The target is in blocks of GGML, and its new values have no type.
    #[error(
        "it is in blocks of {dtype}, and nothing says what its new values become: F32, F16 or BF16 by Weights::cast, or blocks \
         again by Weights::requantise; or it stays, and the factors of LoRA come beside it, by Weights::defer"
    )]
    Blocks {
        /// Its type.
        dtype: DType,
    },
    /// The target is in blocks of a type of GGML that values cannot become.
    #[error(
        "it is in blocks of {dtype}, which values cannot become again, as they can those of {}; cast it with Weights::cast",
        List(written)
    )]
    NotWritten {
        /// Its type.
        dtype: DType,
        /// The types that values can become.
        written: Vec<DType>,
    },
    /// The changes of a weight are to be deferred, and are not only products of two factors (LoRA).
    #[error(
        "it is changed by {kind}, which cannot be deferred, only products of two factors can; have its changes merged: defer \
         other weights by a narrower pattern of Weights::defer (--defer PATTERN=TYPE), and if it is in blocks or codes promote it \
         by Weights::cast (--cast) or requantise it by Weights::requantise (--requantise)"
    )]
    NotDeferred {
        /// What else it is changed by: the kind of adapter, or of change.
        kind: String,
    },
    /// The factors of a deferred change are to have a type that they cannot have.
    #[error("the factors of its changes cannot be kept as {dtype}; choose F32, F16 or BF16")]
    FactorType {
        /// The type.
        dtype: DType,
    },
    /// An element of a factor of a deferred change is beyond the range of the factor's type.
    #[error("a factor of its changes has an element of magnitude {value}, beyond the range of {dtype}; keep it as F32")]
    FactorRange {
        /// The magnitude.
        value: String,
        /// The type.
        dtype: DType,
    },
    /// The factors of a deferred change would have the name of another tensor or module of the checkpoint.
    #[error(
        "its changes cannot be deferred, since the checkpoint has a `{name}` already, as their factors would be called; have them \
         merged: promote the weight by Weights::cast (--cast), or requantise it by Weights::requantise (--requantise)"
    )]
    FactorName {
        /// The name.
        name: String,
    },
    /// A factor holds NaN or an infinity.
    #[error("element {index} is {value}")]
    NotFinite {
        /// Its place in row-major order.
        index: u64,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// A scale beside a tensor that is to be patched is zero, NaN or an infinity.
    #[error("its scale holds {value} at {index}")]
    BadScale {
        /// Its place among the scales in row-major order.
        index: u64,
        /// What it is.
        value: String,
    },
    /// A tensor beside a weight of codes may be a scale of it, and is not understood.
    #[error("`{scale}` may be a scale of `{weight}` and is not understood; {DEQUANTISE}")]
    UnknownScale {
        /// The weight.
        weight: String,
        /// The tensor beside it.
        scale: String,
    },
    /// A weight has several tensors beside it that each may be its scale.
    #[error("`{weight}` has several scales: {}; {DEQUANTISE}", List(scales))]
    SeveralScales {
        /// The weight.
        weight: String,
        /// The tensors beside it.
        scales: Vec<String>,
    },
    /// A scale whose shape does not say which of the weight's values each of its numbers is for.
    #[error("the scale `{scale}` of shape {found:?} does not fit `{weight}` of shape {shape:?}; {DEQUANTISE}")]
    ScaleShape {
        /// The weight.
        weight: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The scale.
        scale: String,
        /// The scale's shape.
        found: Vec<u64>,
    },
    /// A note beside a weight says that its codes are made in a way that is not understood.
    #[error("`{note}` says how `{weight}` is quantised, and that is not understood: {reason}; {DEQUANTISE}")]
    QuantisationNote {
        /// The weight.
        weight: String,
        /// The tensor or the entry of the file's metadata.
        note: String,
        /// What is not understood.
        reason: String,
    },
    /// A replacement is made of eight-bit codes, and the weight that it is for has a scale.
    #[error(
        "a replacement of element type {dtype} does not say whether `{scale}` scales it; give it in F32, F16 or BF16"
    )]
    ScaledReplacement {
        /// The element type of the replacement.
        dtype: DType,
        /// The scale of the weight.
        scale: String,
    },
    /// The adapters change a weight and its scale.
    #[error("its scale `{scale}` is changed too, so the values of its codes are not known; leave one of the two out")]
    ChangedScale {
        /// The scale.
        scale: String,
    },
    /// A weight is packed into codes, and nothing says that its new values may be packed again, or they cannot be.
    #[error(
        "its target `{tensor}` of element type {dtype} is packed ({packing}{}); {DEQUANTISE}{}",
        Sign(sign.as_deref()),
        packed_again(*packing)
    )]
    Packed {
        /// The tensor that holds the codes.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// How.
        packing: Packing,
        /// The tensor beside it that shows this.
        sign: Option<String>,
    },
    /// A weight is packed into codes that are not understood, or that its new values cannot become.
    #[error("its target `{tensor}` is packed ({packing}), and {fault}; {DEQUANTISE}")]
    Codes {
        /// The tensor that holds the codes.
        tensor: String,
        /// How.
        packing: Packing,
        /// What is wrong.
        fault: PackingFault,
    },
    /// The metadata in the header of the adapter's file contradicts itself, or is not understood.
    #[error("the metadata in its header: {reason}")]
    Metadata {
        /// What is wrong.
        reason: String,
    },
    /// No key of the adapter begins with the prefix that the caller chose.
    #[error("none of its keys begins with `{prefix}`; it has {}", Sample(sample))]
    NoComponent {
        /// The prefix.
        prefix: String,
        /// Some of the adapter's modules.
        sample: Vec<String>,
    },
    /// `adapter_config.json` is missing, no JSON, or lacks a field.
    #[error("adapter_config.json: {reason}")]
    Config {
        /// What is wrong.
        reason: String,
    },
}

/// What the caller can do about codes that are not understood.
const DEQUANTISE: &str = "dequantise the file first, to BF16 for example, and use that";

/// What else the caller can do about a weight of this packing.
fn packed_again(packing: Packing) -> &'static str {
    use Packing::{Awq, BitsAndBytesInt8, CompressedTensors, Gptq, Int8, Mxfp4};
    match packing {
        _ if packing.is_written() => {
            ", or have its new values packed again by ModelBuilder::requantise or Weights::repacked (--requantise), or the \
             factors of LoRA beside it by ModelBuilder::defer or Weights::deferred (--defer)"
        }
        Gptq | Awq | Int8 | BitsAndBytesInt8 | Mxfp4 | CompressedTensors => {
            ", or, if the tensors beside it tell the shape of its values, have the factors of LoRA beside it by \
             ModelBuilder::defer or Weights::deferred (--defer)"
        }
        _ => "",
    }
}

/// The tensor that shows a packing.
struct Sign<'a>(Option<&'a str>);

impl fmt::Display for Sign<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |sign| write!(f, ", by `{sign}` beside it"))
    }
}

/// Names separated by commas.
pub(super) struct List<'a, T>(pub(super) &'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, item) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{item}")?;
        }
        if self.0.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// The first few names of a list, and how many more there are.
struct Sample<'a>(&'a [String]);

impl fmt::Display for Sample<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let shown = &self.0[..self.0.len().min(SHOWN)];
        write!(f, "{}", List(shown))?;
        if self.0.len() > SHOWN { write!(f, " and {} more", self.0.len() - SHOWN) } else { Ok(()) }
    }
}
