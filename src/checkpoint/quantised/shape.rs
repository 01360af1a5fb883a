//! The shape of the values that a packed weight stands for, where the tensors beside its codes leave no doubt.
//!
//! Sources of the forms: transformers and GPTQModel for GPTQ, AutoAWQ (`WQLinear_GEMM`), compressed-tensors' `pack_to_int32`,
//! bitsandbytes' `Linear8bitLt`, ModelOpt and compressed-tensors for MXFP4.

use super::packed::Packed;
use super::siblings::Siblings;
use crate::checkpoint::TensorInfo;
use crate::dtype::DType;
use crate::error::Packing;

impl Packed {
    /// The shape [outputs, inputs] of a matrix whose codes are in `weight`; `None` where it is not known.
    pub(crate) fn shape(&self, weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<Vec<u64>> {
        let &[rows, cols] = &weight.shape[..] else { return None };
        let found = match self.packing {
            Packing::Int8 | Packing::BitsAndBytesInt8 => Some([rows, cols]),
            Packing::Gptq => of_gptq(weight, siblings),
            Packing::Awq => of_awq(weight, siblings),
            Packing::CompressedTensors => of_compressed_tensors(weight, siblings),
            Packing::Mxfp4 => {
                let (_, scale) = siblings.find(self.sign.as_deref()?)?;
                let inputs = cols.checked_mul(2)?;
                (scale.shape == [rows, inputs.div_ceil(32)] && inputs.is_multiple_of(32)).then_some([rows, inputs])
            }
            _ => None,
        };
        found.map(|shape| shape.to_vec())
    }
}

/// Words of 32 bits along the inputs: [inputs * bits / 32, outputs], with zero points [groups, outputs * bits / 32].
fn of_gptq(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<[u64; 2]> {
    let &[words, outputs] = &weight.shape[..] else { return None };
    let module = weight.name.strip_suffix(".qweight").filter(|_| has_words(weight))?;
    let bits_in_all = words.checked_mul(32)?;
    let by_groups = siblings.ending(module, ".g_idx").and_then(|groups| match groups.shape[..] {
        [inputs] if inputs > 0 => Some(inputs),
        _ => None,
    });
    let by_zeros = || {
        let &[_, zeros] = &siblings.ending(module, ".qzeros")?.shape[..] else { return None };
        let bits = divided(zeros.checked_mul(32)?, outputs)?;
        divided(bits_in_all, bits)
    };
    let inputs = by_groups.or_else(by_zeros)?;
    let known = matches!(divided(bits_in_all, inputs), Some(2 | 3 | 4 | 8));
    known.then_some([outputs, inputs])
}

/// Eight values of four bits in a word along the outputs: [inputs, outputs / 8].
fn of_awq(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<[u64; 2]> {
    let &[inputs, words] = &weight.shape[..] else { return None };
    let module = weight.name.strip_suffix(".qweight").filter(|_| has_words(weight))?;
    let &[_, outputs] = &siblings.ending(module, ".scales")?.shape[..] else { return None };
    let &[_, zeros] = &siblings.ending(module, ".qzeros")?.shape[..] else { return None };
    (words.checked_mul(8) == Some(outputs) && zeros == words).then_some([outputs, inputs])
}

/// Words of 32 bits along the inputs, each row by itself: [outputs, inputs * bits / 32], with the shape beside them.
fn of_compressed_tensors(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<[u64; 2]> {
    let &[rows, words] = &weight.shape[..] else { return None };
    let module = weight.name.strip_suffix(".weight_packed").filter(|_| has_words(weight))?;
    let (id, info) = siblings.find(&format!("{module}.weight_shape"))?;
    let sizes: Vec<i64> = match (info.dtype, &info.shape[..]) {
        (DType::I64, [2]) => {
            siblings.bytes(id, info)?.as_chunks().0.iter().map(|raw| i64::from_le_bytes(*raw)).collect()
        }
        (DType::I32, [2]) => {
            siblings.bytes(id, info)?.as_chunks().0.iter().map(|raw| i32::from_le_bytes(*raw).into()).collect()
        }
        _ => return None,
    };
    let &[outputs, inputs] = &sizes[..] else { return None };
    let (outputs, inputs) = (u64::try_from(outputs).ok()?, u64::try_from(inputs).ok()?);
    let packed = |bits: u64| inputs.div_ceil(32 / bits) == words;
    (outputs == rows && inputs > 0 && (packed(4) || packed(8))).then_some([outputs, inputs])
}

fn has_words(weight: &TensorInfo) -> bool {
    matches!(weight.dtype, DType::I32 | DType::U32)
}

/// A quotient that is whole and not zero.
fn divided(all: u64, by: u64) -> Option<u64> {
    (by > 0 && all.is_multiple_of(by)).then(|| all / by).filter(|&quotient| quotient > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Layout;

    fn shape(packing: Packing, tensors: &[(&str, DType, &[u64])]) -> Option<Vec<u64>> {
        let info = |(ending, dtype, shape): &(&str, DType, &[u64])| {
            TensorInfo::new(format!("a.q{ending}"), *dtype, shape, 0, 0).unwrap()
        };
        let layout = Layout::new(tensors.iter().map(info).collect());
        let siblings = Siblings::of(&layout);
        let packed = Packed::of(&layout.tensors()[0], &siblings).unwrap();
        assert_eq!(packed.packing, packing);
        packed.shape(&layout.tensors()[0], &siblings)
    }

    #[test]
    fn shapes_are_those_of_the_values() {
        use DType::{F8E8M0, F16, F32, I8, I32, U8};
        let scales = |groups: u64| vec![groups, 24];
        for bits in [2, 3, 4, 8] {
            let (words, zeros) = ([2 * bits, 32], [1, bits]);
            let mut gptq: Vec<(&str, DType, &[u64])> =
                vec![(".qweight", I32, &words), (".qzeros", I32, &zeros), (".scales", F16, &[1, 32])];
            assert_eq!(shape(Packing::Gptq, &gptq), Some(vec![32, 64]), "{bits} bits");
            gptq.push((".g_idx", I32, &[64]));
            assert_eq!(shape(Packing::Gptq, &gptq), Some(vec![32, 64]));
            gptq[3] = (".g_idx", I32, &[60]);
            assert_eq!(shape(Packing::Gptq, &gptq), None);
        }
        let awq: [(&str, DType, &[u64]); 3] =
            [(".qweight", I32, &[64, 3]), (".qzeros", I32, &[1, 3]), (".scales", F16, &scales(1))];
        assert_eq!(shape(Packing::Awq, &awq), Some(vec![24, 64]));
        let five: [(&str, DType, &[u64]); 3] =
            [(".qweight", I32, &[64, 4]), (".qzeros", I32, &[1, 4]), (".scales", F16, &scales(1))];
        assert_eq!(shape(Packing::Awq, &five), None);
        let int8: [(&str, DType, &[u64]); 2] = [(".weight", I8, &[24, 64]), (".SCB", F32, &[24])];
        assert_eq!(shape(Packing::BitsAndBytesInt8, &int8), Some(vec![24, 64]));
        let mxfp4: [(&str, DType, &[u64]); 2] = [(".weight", U8, &[24, 32]), (".weight_scale", F8E8M0, &[24, 2])];
        assert_eq!(shape(Packing::Mxfp4, &mxfp4), Some(vec![24, 64]));
        let blocks: [(&str, DType, &[u64]); 2] = [(".weight", U8, &[24, 32]), (".weight_scale", F8E8M0, &[24, 4])];
        assert_eq!(shape(Packing::Mxfp4, &blocks), None);
    }
}
