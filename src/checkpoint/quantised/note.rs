//! Notes about quantisation in ComfyUI's files: JSON in a tensor `X.comfy_quant` of bytes, or for all modules together in
//! the header's metadata. Formats and fields are those of ComfyUI's `comfy/ops.py` and of `convert_to_quant`.

use serde_json::{Map, Value};

use crate::checkpoint::{Checkpoint, TensorId, TensorInfo};

/// The last word of a note's name.
pub(super) const TENSOR: &str = "comfy_quant";

/// The entry of the metadata.
pub(super) const METADATA: &str = "_quantization_metadata";

/// What a note says of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) format: Format,
    /// Rows and columns of a block of the scale's grid, if it says so.
    pub(crate) block: Option<[u64; 2]>,
}

/// How the values are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// fp8 with a scale whose shape says which values it is for.
    Fp8,
    /// fp8 with a power of two for each 32 columns of a row.
    Mxfp8,
    /// Codes of four bits, two in a byte, with a scale for each 16 columns of a row and one for all.
    Nvfp4,
}

/// The most bytes of a note. ComfyUI's have some dozens.
const MOST: u64 = 1 << 16;

/// Reads a note.
///
/// # Errors
/// Why it is not understood.
pub(super) fn read(checkpoint: Option<&Checkpoint>, tensor: TensorId, info: &TensorInfo) -> Result<Note, String> {
    let bytes = text(checkpoint, tensor, info)?;
    let fields: Map<String, Value> = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    parse(&fields)
}

/// Reads a tensor of text.
///
/// # Errors
/// Why it cannot be read.
pub(super) fn text(checkpoint: Option<&Checkpoint>, tensor: TensorId, info: &TensorInfo) -> Result<Vec<u8>, String> {
    let Some(checkpoint) = checkpoint else {
        return Err("its text is not at hand; resolve the adapters with `Weights::patched`".to_owned());
    };
    if info.bytes > MOST {
        return Err(format!("it has {} bytes", info.bytes));
    }
    let mut bytes = vec![0; info.bytes as usize];
    checkpoint.read(tensor, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// The note about the module `stem` in the text of the metadata; none if there is none.
///
/// # Errors
/// Why it is not understood.
pub(super) fn of_metadata(text: &str, stem: &str) -> Result<Option<Note>, String> {
    let all: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let Some(layers) = all.get("layers").and_then(Value::as_object) else { return Ok(None) };
    // Some files leave out the model's prefix here, which has no numbers.
    let is_prefix = |prefix: &str| prefix.ends_with('.') && !prefix.contains(|c: char| c.is_ascii_digit());
    let without = layers.keys().find(|key| stem.strip_suffix(key.as_str()).is_some_and(is_prefix));
    match layers.get(stem).or_else(|| layers.get(without?)) {
        None => Ok(None),
        Some(Value::Object(fields)) => parse(fields).map(Some),
        Some(Value::String(format)) => {
            parse(&Map::from_iter([("format".to_owned(), Value::from(format.as_str()))])).map(Some)
        }
        Some(other) => Err(format!("{other} stands for `{stem}`")),
    }
}

fn parse(fields: &Map<String, Value>) -> Result<Note, String> {
    let mut format = None;
    let mut block = None;
    for (field, value) in fields {
        match (field.as_str(), value) {
            ("format", Value::String(name)) => format = Some(format_of(name)?),
            ("group_size", _) => block = Some([size(field, value)?; 2]),
            ("params", Value::Object(params)) => {
                for (field, value) in params {
                    match field.as_str() {
                        "group_size" => block = Some([size(field, value)?; 2]),
                        _ if is_off(value) => {}
                        _ => return Err(format!("`{field}` is {value}")),
                    }
                }
            }
            // How the module multiplies, not what its weight is.
            ("full_precision_matrix_mult" | "per_row" | "orig_dtype" | "orig_shape", _) => {}
            (_, value) if is_off(value) => {}
            (field, value) => return Err(format!("`{field}` is {value}")),
        }
    }
    let format = format.ok_or("it names no format")?;
    Ok(Note { format, block })
}

fn format_of(name: &str) -> Result<Format, String> {
    match name {
        "float8_e4m3fn" | "float8_e5m2" => Ok(Format::Fp8),
        "float8_e4m3fn_rowwise" | "float8_e4m3fn_blockwise" | "float8_e4m3fn_block3d" => Ok(Format::Fp8),
        "mxfp8" => Ok(Format::Mxfp8),
        "nvfp4" => Ok(Format::Nvfp4),
        other => Err(format!("the format is `{other}`")),
    }
}

fn size(field: &str, value: &Value) -> Result<u64, String> {
    value.as_u64().filter(|&size| size > 0).ok_or_else(|| format!("`{field}` is {value}"))
}

/// Whether a field that is not known changes nothing.
fn is_off(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Note, String> {
        parse(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn known_formats_are_read() {
        let note = |format, block: Option<u64>| Ok(Note { format, block: block.map(|side| [side; 2]) });
        assert_eq!(parsed(r#"{"format": "float8_e4m3fn"}"#), note(Format::Fp8, None));
        assert_eq!(parsed(r#"{"format": "nvfp4"}"#), note(Format::Nvfp4, None));
        assert_eq!(parsed(r#"{"format": "mxfp8", "full_precision_matrix_mult": true}"#), note(Format::Mxfp8, None));
        for text in [
            r#"{"format": "float8_e4m3fn_blockwise", "group_size": 64, "convrot": false}"#,
            r#"{"format": "float8_e4m3fn_blockwise", "params": {"group_size": 64}}"#,
        ] {
            assert_eq!(parsed(text), note(Format::Fp8, Some(64)));
        }
    }

    #[test]
    fn what_changes_the_values_is_refused() {
        for (text, word) in [
            (r#"{"format": "hybrid_mxfp8"}"#, "hybrid_mxfp8"),
            (r#"{"format": "float8_e4m3fn", "convrot": true}"#, "convrot"),
            (r#"{"format": "float8_e4m3fn", "params": {"convrot": true}}"#, "convrot"),
            (r#"{"format": "float8_e4m3fn", "rotation": [1]}"#, "rotation"),
            (r#"{"format": "float8_e4m3fn", "group_size": 0}"#, "group_size"),
            (r#"{"full_precision_matrix_mult": true}"#, "format"),
        ] {
            assert!(parsed(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn metadata_names_modules_with_and_without_a_prefix() {
        let text = r#"{"layers": {"a.q": {"format": "mxfp8"}, "k": "float8_e5m2", "odd": 3}}"#;
        assert_eq!(of_metadata(text, "a.q"), Ok(Some(Note { format: Format::Mxfp8, block: None })));
        assert_eq!(of_metadata(text, "model.a.q"), Ok(Some(Note { format: Format::Mxfp8, block: None })));
        assert_eq!(of_metadata(text, "model.k"), Ok(Some(Note { format: Format::Fp8, block: None })));
        assert_eq!(of_metadata(text, "a.qk"), Ok(None));
        assert_eq!(of_metadata("{}", "a"), Ok(None));
        assert!(of_metadata(text, "odd").is_err() && of_metadata("{", "a").is_err());
    }
}
