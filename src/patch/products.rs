//! Patches that devices can apply: those that only add low-rank products.

use super::TensorPatch;
use super::scales::{ScalePolicy, Scales};
use super::steps::{Change, Delta, Step, TILE_COLS, TILE_ROWS};
use crate::backend::{MatrixPatch, PackedProduct};
use crate::rounding::Rounding;

// Devices use the same packing as the host.
const _: () = assert!(MatrixPatch::TILE[0] == TILE_ROWS && MatrixPatch::TILE[1] == TILE_COLS);

impl TensorPatch {
    /// Whether the patch only adds products, rounds to the nearest value of the type that the weight has, and keeps the
    /// weight's scales.
    pub(crate) fn is_products(&self) -> bool {
        let added =
            |step: &Step| matches!(&step.change, Change::Add { delta, .. } if matches!(**delta, Delta::Product(_)));
        let (rows, cols) = self.matrix();
        self.through_whole().is_none()
            && self.scale_of.is_none()
            && self.codes.is_none()
            && !self.casts()
            && self.target.blocks().is_none()
            && self
                .scaling
                .as_ref()
                .is_none_or(|scaling| self.scale_policy == ScalePolicy::Keep && scaling.is_for_devices(rows, cols))
            && self.rounding == Rounding::NearestEven
            && self.shape == self.patched_shape
            && [rows, cols].iter().all(|side| (1..=MatrixPatch::MOST).contains(side))
            && self.steps.iter().all(added)
    }

    /// The patch in the form for devices, with the scales from [`scales`](TensorPatch::scales); `None` if the patch is
    /// not [one of products](TensorPatch::is_products).
    pub(crate) fn products<'a>(&'a self, scales: Option<&'a Scales>) -> Option<MatrixPatch<'a>> {
        let product = |step: &'a Step| {
            let Change::Add { delta, scale } = &step.change else { return None };
            let Delta::Product(product) = &**delta else { return None };
            let (up, down) = product.factors();
            Some(PackedProduct { up, down, rank: product.rank, rows: step.rows.clone(), scale: *scale })
        };
        let products = self.steps.iter().map(product).collect::<Option<Vec<_>>>().filter(|_| self.is_products())?;
        let (rows, cols) = self.matrix();
        let scales = match scales {
            Some(scales) => Some(scales.blocks(rows, cols)?),
            None => None,
        };
        MatrixPatch::new(self.dtype(), (rows, cols), products, scales).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Siblings, TensorInfo};
    use crate::dtype::DType;
    use crate::patch::{Axis, Changes, Dora, Matrix, Product};

    /// A patch of a bf16 weight of 20 by 40.
    fn patch(step: Step, rounding: Rounding) -> TensorPatch {
        let weight = TensorInfo::new("w.weight", DType::BF16, &[20, 40], 0, 0).unwrap();
        let changes = Changes { steps: vec![step], shape: weight.shape.clone(), ..Changes::default() };
        let mut patch = TensorPatch::new(&weight, changes, &Siblings::default()).unwrap();
        patch.set_rounding(rounding);
        patch
    }

    fn lora() -> Delta<Product> {
        let matrix = |rows, cols| Matrix { rows, cols, values: vec![0.25; rows * cols] };
        Delta::Product(Product { up: matrix(20, 3), down: matrix(3, 40) })
    }

    #[test]
    fn only_products_are_for_devices() {
        let lora_patch = patch(Step::add(0..20, lora(), 0.5), Rounding::NearestEven);
        let products = lora_patch.products(None).unwrap();
        assert_eq!((products.rows(), products.cols(), products.products()), (20, 40, 1));
        assert_eq!(products.work_bytes(), 64 + (3 * 8 * 3 + 2 * 32 * 3) * 4);
        let (magnitude, axis, epsilon) = (vec![0.25; 20], Axis::Rows, f32::EPSILON);
        let dora = Dora { ratio: 1.0, magnitude, axis, of_original: true, epsilon, strength: 0.5 };
        let others = [
            patch(Step::add(0..20, lora(), 0.5), Rounding::Stochastic { seed: 1 }),
            patch(Step::add(0..20, Delta::Dense(vec![0.25; 800]), 0.5), Rounding::NearestEven),
            patch(Step::decompose(0..20, lora(), dora), Rounding::NearestEven),
        ];
        for other in others {
            assert!(!other.is_products() && other.products(None).is_none());
        }
    }
}
