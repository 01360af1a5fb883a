//! Modules that would make slots far larger than the layers in the stacks need: token embeddings and heads.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::value::{Plan, Use};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, ModuleId, is_in_stack};

/// A module outside any stack (a token embedding, a head) that takes more than twice the slot of the largest layer in one.
/// Prints as a line that says how it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Outlier {
    /// The module's name.
    pub module: Arc<str>,
    /// The bytes of a slot for the module.
    pub bytes: u64,
    /// The bytes of a slot for the largest layer in a stack, all of it streamed.
    pub usual: u64,
    /// How the module is used. Resident or in place, it takes no slot.
    #[serde(rename = "use")]
    pub usage: Use,
}

impl Plan {
    /// The modules that would make slots far larger than the layers in the stacks need, in order of execution. Interleaved
    /// orders keep them resident first, within the compute device's quota.
    ///
    /// ```
    /// use tensor_offload::checkpoint::{Layout, TensorInfo};
    /// use tensor_offload::{DType, Machine, Planner, Use};
    /// let tensor = |name: &str, rows, at| TensorInfo::new(name, DType::F32, &[rows, 1024], 0, at);
    /// let mut tensors = vec![tensor("model.embed_tokens.weight", 32_768, 0)?];
    /// for layer in 0..4 {
    ///     tensors.push(tensor(&format!("model.layers.{layer}.mlp.weight"), 4_096, (8 + layer) << 24)?);
    /// }
    /// let (layout, machine) = (Layout::new(tensors), Machine::described(&["cuda:0=1gib".parse()?, "cpu=4gib".parse()?]));
    /// let plan = Planner::new(&layout, &machine).allocation("cuda:0,130mib;cpu,*".parse()?).plan()?;
    /// let outlier = &plan.outliers()[0];
    /// assert_eq!((&*outlier.module, outlier.usage), ("model.embed_tokens", Use::Resident));
    /// assert_eq!(plan.slots().bytes_each, 16 << 20);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn outliers(&self) -> Vec<Outlier> {
        let (usual, found) = outliers(self.assignments().iter().map(|a| (&*a.module, a.layer, a.bytes)));
        let outlier = |index: usize| {
            let a = &self.assignments()[index];
            Outlier { module: Arc::clone(&a.module), bytes: Layout::slot_bytes(a.bytes), usual, usage: a.usage }
        };
        found.into_iter().map(outlier).collect()
    }
}

/// The outliers of a layout, in order.
pub(super) fn outliers_of(layout: &Layout) -> Vec<ModuleId> {
    let modules = layout.modules();
    let (_, found) = outliers(modules.iter().map(|module| (&*module.name, module.layer, module.bytes)));
    found.into_iter().map(|index| modules[index].id).collect()
}

/// The slot bytes of the largest layer in a stack, and the indices of the outliers among a model's modules (name, layer,
/// bytes). A model without a stack has no outliers.
fn outliers<'n, L: Copy + PartialEq>(modules: impl Iterator<Item = (&'n str, L, u64)>) -> (u64, Vec<usize>) {
    let (mut usual, mut stacked, mut alone) = (0u64, None::<(L, u64)>, Vec::new());
    for (index, (name, layer, bytes)) in modules.enumerate() {
        let bytes = Layout::slot_bytes(bytes);
        if !is_in_stack(name) {
            alone.push((index, bytes));
            continue;
        }
        let before = stacked.filter(|(other, _)| *other == layer).map_or(0, |(_, bytes)| bytes);
        let all = bytes.saturating_add(before);
        (stacked, usual) = (Some((layer, all)), usual.max(all));
    }
    alone.retain(|&(_, bytes)| usual > 0 && bytes > usual.saturating_mul(2));
    (usual, alone.into_iter().map(|(index, _)| index).collect())
}

impl fmt::Display for Outlier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, usual) = (ByteSize(self.bytes).human(), ByteSize(self.usual).human());
        write!(f, "{} ({bytes}, layers up to {usual}) ", self.module)?;
        f.write_str(match self.usage {
            Use::Resident => "stays resident, so that slots need not hold it",
            Use::InPlace => "is used in place, so that slots need not hold it",
            Use::Streamed => "is streamed, and needs a slot of its size",
            Use::Unpacked => "stays resident in another form, and needs a slot for its values",
        })
    }
}
