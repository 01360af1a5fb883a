//! What a model's `config.json` says of all its quantised weights together, under `quantization_config`.

use serde_json::Value;

/// What the configuration says of the scales. It speaks of kinds of modules, not of single weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stated {
    /// Rows and columns of a block, if all that it says agrees: `weight_block_size` of DeepSeek and transformers,
    /// `block_structure` of compressed-tensors.
    pub(crate) block: Option<[u64; 2]>,
    /// Whether there are weights in MXFP8, whose scales are exponents stored as U8, row by row: `mxfp8-quantized` of
    /// compressed-tensors, `MXFP8` of ModelOpt.
    pub(crate) mxfp8: bool,
}

impl Stated {
    pub(in crate::checkpoint) fn of(config: &Value) -> Stated {
        let inner = config.get("text_config");
        let of_text = inner.and_then(|inner| inner.get("quantization_config"));
        let Some(said) = config.get("quantization_config").or(of_text) else { return Stated::default() };
        let mut blocks = Vec::new();
        let mut mxfp8 = false;
        visit(said, 0, &mut |field, value| match (field, value) {
            ("weight_block_size" | "block_structure", Value::Array(sides)) => {
                let sides: Vec<Option<u64>> = sides.iter().map(|side| side.as_u64().filter(|&side| side > 0)).collect();
                if let [Some(rows), Some(cols)] = sides[..] {
                    blocks.push([rows, cols]);
                }
            }
            ("format" | "quant_algo" | "quant_method", Value::String(name)) => {
                mxfp8 |= ["mxfp8", "mxfp8-quantized"].contains(&name.to_ascii_lowercase().as_str());
            }
            _ => {}
        });
        let block = blocks.first().copied().filter(|first| blocks.iter().all(|block| block == first));
        Stated { block, mxfp8 }
    }
}

/// Calls `each` with the fields of an object and of the objects in it.
fn visit(value: &Value, depth: usize, each: &mut impl FnMut(&str, &Value)) {
    const DEEPEST: usize = 8;
    if let (Value::Object(fields), true) = (value, depth < DEEPEST) {
        for (field, value) in fields {
            each(field, value);
            // Blocks of activations are not those of weights.
            if !field.contains("activations") {
                visit(value, depth + 1, each);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_and_exponents_are_found_where_programs_write_them() {
        let said = |config: Value| Stated::of(&json!({ "quantization_config": config }));
        let stated = |block, mxfp8| Stated { block, mxfp8 };
        assert_eq!(
            said(json!({"quant_method": "fp8", "weight_block_size": [64, 128]})),
            stated(Some([64, 128]), false)
        );
        assert_eq!(said(json!({"quant_method": "fp8", "weight_block_size": null})), stated(None, false));
        let group = |block: Value| json!({"weights": {"block_structure": block}, "input_activations": {"block_structure": [1, 64]}});
        let groups = |all: &[Value]| json!({"config_groups": {"group_0": all[0], "group_1": all[all.len() - 1]}});
        assert_eq!(said(groups(&[group(json!([128, 128]))])), stated(Some([128, 128]), false));
        assert_eq!(said(groups(&[group(json!([128, 128])), group(json!([64, 64]))])), stated(None, false));
        assert_eq!(said(json!({"format": "mxfp8-quantized"})), stated(None, true));
        assert_eq!(said(json!({"quantization": {"quant_algo": "MXFP8"}})), stated(None, true));
        assert_eq!(said(json!({"quantized_layers": {"a.q": {"quant_algo": "MXFP8"}}})), stated(None, true));
        assert_eq!(said(json!({"format": "float-quantized"})), Stated::default());
        assert_eq!(said(json!([])), Stated::default());
        let text = json!({"text_config": {"quantization_config": {"weight_block_size": [128, 128]}}});
        assert_eq!(Stated::of(&text).block, Some([128, 128]));
        assert_eq!(Stated::of(&json!({})), Stated::default());
    }
}
