//! Rounds of tensors in blocks, or compressed, on their way into a slot. They arrive in a landing buffer, from where their values are
//! computed into the slot. The buffer holds the largest tensor, or several small ones, so that hundreds of small ones are few copies.

use super::contents::{Slice, Unpacked};
use crate::checkpoint::Layout;

/// The size up to which a landing buffer grows to hold several tensors, in bytes.
const SEVERAL: u64 = 16 << 20;

/// The bytes at the end of a landing buffer for the verdict on the codes that are decoded from it.
pub(crate) const VERDICT_ROOM: u64 = 256;

/// Tensors that arrive together.
pub(crate) struct Round<'p>(Vec<(&'p Unpacked, usize)>);

impl<'p> Round<'p> {
    /// The tensors, with the offset in the landing buffer at which the blocks of each begin.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'p Unpacked, usize)> + '_ {
        self.0.iter().copied()
    }

    /// The byte ranges that are copied into the landing buffer, in order of offset.
    pub(crate) fn slices(&self) -> Vec<Slice> {
        self.0.iter().map(|&(tensor, at)| Slice { at, ..tensor.slice.clone() }).collect()
    }
}

/// The bytes of a landing buffer for tensors of `largest` bytes at most, `all` of which are the most that one layer brings.
pub(crate) fn landing_bytes(largest: u64, all: u64) -> u64 {
    largest.max(all.min(SEVERAL))
}

/// The bytes that a tensor of `bytes` takes in a landing buffer.
pub(crate) fn landed(bytes: u64) -> u64 {
    Layout::slot_bytes(bytes)
}

/// Divides tensors into rounds, in order, each of as many as a landing buffer of `room` bytes holds, and of one at least.
pub(crate) fn rounds(unpacked: &[Unpacked], room: u64) -> Vec<Round<'_>> {
    let (mut rounds, mut used) = (Vec::<Round<'_>>::new(), 0u64);
    for tensor in unpacked {
        let bytes = landed(tensor.slice.range.len() as u64);
        if rounds.is_empty() || used.saturating_add(bytes) > room {
            rounds.push(Round(Vec::new()));
            used = 0;
        }
        if let Some(Round(tensors)) = rounds.last_mut() {
            tensors.push((tensor, used as usize));
        }
        used += bytes;
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::super::contents::Form;
    use super::*;
    use crate::checkpoint::ModuleId;
    use crate::dtype::DType;

    #[test]
    fn a_round_is_as_many_tensors_as_fit_and_one_at_least() {
        let tensor = |bytes: usize| {
            let slice = Slice { module: ModuleId::new(0), range: 0..bytes, at: 0 };
            let form = Form::Blocks { from: DType::Q8_0, to: DType::F16, values: bytes / 34 * 32 };
            Unpacked { slice, form }
        };
        let tensors = [34, 340, 34, 3400, 34, 34].map(tensor);
        let of = |room: u64| {
            let bytes =
                |round: &Round<'_>| round.tensors().map(|(t, at)| (t.slice.range.len(), at)).collect::<Vec<_>>();
            rounds(&tensors, room).iter().map(bytes).collect::<Vec<_>>()
        };
        let wanted = [vec![(34, 0), (340, 256), (34, 768)], vec![(3400, 0)], vec![(34, 0), (34, 256)]];
        assert_eq!(of(3584), wanted);
        assert_eq!(of(1024), wanted, "a tensor that is too large is alone");
        assert_eq!(of(u64::MAX).len(), 1);
        assert_eq!(of(0).len(), 6);
        assert_eq!((landing_bytes(512, 3 << 10), landing_bytes(512, 1 << 30)), (3 << 10, 16 << 20));
        assert_eq!(landing_bytes(1 << 28, 1 << 30), 1 << 28);
    }
}
