//! What of the arithmetic devices can do: patches that are nothing but products of low rank.

use super::scales::Scales;
use crate::adapter::{Change, Delta, ScalePolicy, Step, TILE_COLS, TILE_ROWS, TensorPatch, matrix_of};
use crate::backend::{MatrixPatch, PackedProduct};
use crate::rounding::Rounding;

// A device takes the factors as they are packed for the host.
const _: () = assert!(MatrixPatch::TILE[0] == TILE_ROWS && MatrixPatch::TILE[1] == TILE_COLS);

impl TensorPatch {
    /// Whether the patch is products added to the weight, rounded to the nearest under the scales that it has.
    pub(crate) fn is_products(&self) -> bool {
        let added =
            |step: &Step| matches!(&step.change, Change::Add { delta, .. } if matches!(**delta, Delta::Product(_)));
        let (rows, cols) = matrix_of(&self.shape).unwrap_or_default();
        self.scale_of.is_none()
            && (self.scaling.is_none() || self.scale_policy == ScalePolicy::Keep)
            && self.rounding == Rounding::NearestEven
            && self.shape == self.patched_shape
            && [rows, cols].iter().all(|side| (1..=MatrixPatch::MOST).contains(side))
            && self.steps.iter().all(added)
    }

    /// The patch as a device takes it, with the scales that [`scales`](TensorPatch::scales) gave; none when it is
    /// something [else](TensorPatch::is_products).
    pub(crate) fn products<'a>(&'a self, scales: Option<&'a Scales>) -> Option<MatrixPatch<'a>> {
        let product = |step: &'a Step| {
            let Change::Add { delta, scale } = &step.change else { return None };
            let Delta::Product(product) = &**delta else { return None };
            let (up, down) = product.factors();
            Some(PackedProduct { up, down, rank: product.rank, rows: step.rows.clone(), scale: *scale })
        };
        let products = self.steps.iter().map(product).collect::<Option<Vec<_>>>().filter(|_| self.is_products())?;
        MatrixPatch::new(self.float.dtype(), matrix_of(&self.shape)?, products, scales.map(Scales::blocks)).ok()
    }
}

#[cfg(test)]
mod tests {
    use crate::adapter::{Adapter, Matching, Patches};
    use crate::checkpoint::{Checkpoint, Layout, TensorInfo};
    use crate::dtype::DType;
    use crate::rounding::Rounding;

    /// A patch of a bf16 weight of 20 by 40 with an adapter of these f32 tensors.
    fn patch(tensors: &[(&str, &[u64])], rounding: Rounding) -> crate::TensorPatch {
        let (mut header, mut end) = (serde_json::Map::new(), 0);
        for (name, shape) in tensors {
            let begin = end;
            end += shape.iter().product::<u64>() * 4;
            let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
            header.insert((*name).to_owned(), entry);
        }
        let header = serde_json::Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes().chain(std::iter::repeat_n(0x3c, end as usize)));
        let adapter = Adapter::from_checkpoint(Checkpoint::from_bytes("adapter", bytes).unwrap(), 0.5).unwrap();
        let weight = TensorInfo::new("w.weight", DType::BF16, &[20, 40], 0, 0).unwrap();
        let patches = Patches::resolve(&Layout::new(vec![weight]), vec![adapter], Matching::Strict).unwrap();
        let mut patch = patches.tensor(0).unwrap().clone();
        patch.rounding = rounding;
        patch
    }

    #[test]
    fn only_products_are_for_devices() {
        let lora: [(&str, &[u64]); 2] = [("w.lora_up.weight", &[20, 3]), ("w.lora_down.weight", &[3, 40])];
        let lora_patch = patch(&lora, Rounding::NearestEven);
        let products = lora_patch.products(None).unwrap();
        assert_eq!((products.rows(), products.cols(), products.products()), (20, 40, 1));
        assert_eq!(products.work_bytes(), 64 + (3 * 8 * 3 + 2 * 32 * 3) * 4);
        let others = [
            patch(&lora, Rounding::Stochastic { seed: 1 }),
            patch(&[("w.diff", &[20, 40])], Rounding::NearestEven),
            patch(&[lora[0], lora[1], ("w.dora_scale", &[20, 1])], Rounding::NearestEven),
        ];
        for other in others {
            assert!(!other.is_products() && other.products(None).is_none());
        }
    }
}
