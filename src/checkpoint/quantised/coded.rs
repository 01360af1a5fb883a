//! Which tensors of a checkpoint belong to a packed weight: its codes, and what makes values of them.

use super::packed::{Packed, packed_modules};
use super::siblings::{Siblings, speaks_of_codes};
use crate::checkpoint::{Layout, TensorId, TensorInfo};
use crate::error::Packing;

/// A packed weight of a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Coded {
    pub(crate) weight: TensorId,
    pub(crate) packed: Packed,
    /// The tensors that say what its codes stand for.
    pub(crate) beside: Vec<TensorId>,
}

impl Coded {
    /// The packed weights of a layout, whose tensors are `siblings`.
    pub(crate) fn all(layout: &Layout, siblings: &Siblings<'_>) -> Vec<Coded> {
        let modules = packed_modules(layout);
        let coded = |(weight, info): (TensorId, &TensorInfo)| {
            let packed = Packed::of(info, siblings)?;
            let module = modules.get(&weight).copied();
            // Integers of which nothing says that they are codes are integers.
            let sure = module.is_some() || packed.sign.is_some() || packed.packing != Packing::Unknown;
            let beside = || Coded::beside(info, module, siblings);
            sure.then(|| Coded { weight, packed, beside: beside() })
        };
        layout.tensor_ids().zip(layout.tensors()).filter_map(coded).collect()
    }

    /// The tensors that say what the codes of `weight` stand for, which is the weight of `module` if it has another name than
    /// that.
    pub(crate) fn beside(weight: &TensorInfo, module: Option<&str>, siblings: &Siblings<'_>) -> Vec<TensorId> {
        let stem = module.unwrap_or_else(|| weight.name.strip_suffix(".weight").unwrap_or(&weight.name));
        let known = siblings.beside(weight).into_iter().map(|sibling| sibling.id);
        let (under, own) = (format!("{stem}."), format!("{}.", weight.name));
        // All of the module but its bias, and of what is inside it whatever speaks of codes.
        let of_module = siblings.under(&under).filter(|(rest, _, _)| match rest.split_once('.') {
            None => *rest != "bias",
            Some((first, _)) => speaks_of_codes(first),
        });
        let of_weight = siblings.under(&own);
        let joined = format!("{stem}_");
        let of_stack = siblings
            .under(&joined)
            .filter(|(rest, _, _)| module.is_some() && !rest.contains('.') && speaks_of_codes(rest));
        let others = of_module.chain(of_weight).chain(of_stack);
        let others = others.filter(|(_, _, info)| info.name != weight.name).map(|(_, id, _)| id);
        let mut beside: Vec<TensorId> = known.chain(others).collect();
        beside.sort_unstable();
        beside.dedup();
        beside
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// The packed weights with what is beside them, among these tensors.
    fn found(tensors: &[(&str, DType, &[u64])]) -> Vec<(String, Vec<String>)> {
        let info = |(name, dtype, shape): &(&str, DType, &[u64])| TensorInfo::new(*name, *dtype, shape, 0, 0).unwrap();
        let layout = Layout::new(tensors.iter().map(info).collect());
        let name = |tensor: &TensorId| layout.at(*tensor).name.clone();
        let all = Coded::all(&layout, &Siblings::of(&layout));
        all.iter().map(|coded| (name(&coded.weight), coded.beside.iter().map(name).collect())).collect()
    }

    #[test]
    fn codes_and_what_is_beside_them_are_found_together() {
        use DType::{BF16, F16, F32, I8, I32, U8};
        let gptq: [(&str, DType, &[u64]); 6] = [
            ("a.q.qweight", I32, &[1, 8]),
            ("a.q.qzeros", I32, &[1, 1]),
            ("a.q.scales", F16, &[1, 8]),
            ("a.q.g_idx", I32, &[8]),
            ("a.q.bias", F16, &[8]),
            ("a.norm.weight", F16, &[8]),
        ];
        let scales = ["a.q.qzeros", "a.q.scales", "a.q.g_idx"].map(str::to_owned);
        assert!(found(&gptq).contains(&("a.q.qweight".to_owned(), scales.to_vec())), "{:?}", found(&gptq));
        let nf4: [(&str, DType, &[u64]); 4] = [
            ("a.q.weight", BF16, &[16, 1]),
            ("a.q.weight.absmax", F32, &[1]),
            ("a.q.weight.quant_state.bitsandbytes__nf4", U8, &[8]),
            ("a.q.bias", BF16, &[8]),
        ];
        let state = ["a.q.weight.absmax", "a.q.weight.quant_state.bitsandbytes__nf4"].map(str::to_owned);
        assert!(found(&nf4).contains(&("a.q.weight".to_owned(), state.to_vec())), "{:?}", found(&nf4));
        let mxfp4: [(&str, DType, &[u64]); 3] = [
            ("e.gate_up_proj_blocks", U8, &[2, 4, 1, 16]),
            ("e.gate_up_proj_scales", U8, &[2, 4, 1]),
            ("e.gate_up_proj_bias", BF16, &[2, 4]),
        ];
        let of_blocks = ("e.gate_up_proj_blocks".to_owned(), vec!["e.gate_up_proj_scales".to_owned()]);
        assert!(found(&mxfp4).contains(&of_blocks), "{:?}", found(&mxfp4));
        let int8: [(&str, DType, &[u64]); 2] = [("a.q.weight", I8, &[4, 4]), ("a.q.SCB", F32, &[4])];
        assert_eq!(found(&int8), [("a.q.weight".to_owned(), vec!["a.q.SCB".to_owned()])]);
        let plain: [(&str, DType, &[u64]); 4] = [
            ("a.q.weight", BF16, &[4, 4]),
            ("a.q.bias", BF16, &[4]),
            ("a.position_ids", I32, &[4]),
            ("a.logit_scale", F32, &[]),
        ];
        assert_eq!(found(&plain), []);
    }
}
