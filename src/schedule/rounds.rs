//! Rounds of tensors in blocks, or compressed, on their way into a slot. They arrive in one half of a landing buffer, from where their
//! values are computed into the slot while the next ones arrive in the other. What is larger than a half arrives in parts, so a
//! landing buffer needs no more memory for a large tensor; small tensors arrive together, so that hundreds of them are few copies.

use std::ops::Range;

use super::contents::{Form, Slice, Unpacked};
use crate::checkpoint::Layout;
use crate::lossless::CodePart;

/// The most bytes of a landing buffer, unless the caller says otherwise: two copies of the size at which they reach the speed of a link.
pub(crate) const LANDING_CAP: u64 = 32 << 20;

/// The fewest bytes that half a landing buffer is capped at, and the most parts of a tensor for which it is.
const LEAST_HALF: u64 = 4 << 10;
const MOST_PARTS: u64 = 4096;

/// The bytes at the end of a landing buffer for the verdict on the codes that are decoded from it, and for that on those decoded
/// where they live: a unit for each, which is the most that drivers ask of what kernels of two streams write.
pub(crate) const VERDICT_ROOM: u64 = 2 * UNIT as u64;

/// Where parts begin and end in a landing buffer, and codes are cut: a multiple of it.
const UNIT: usize = 256;

/// Tensors, or parts of them, that arrive together.
#[derive(Debug, Default)]
pub(crate) struct Round<'p> {
    landed: Vec<Landed<'p>>,
    /// What the first of them needs of the round before, if it is the next part of a code.
    carried: Option<Carried>,
}

/// A tensor, or a part of it, that arrives in a round.
#[derive(Debug)]
pub(crate) struct Landed<'p> {
    pub(crate) tensor: &'p Unpacked,
    /// The bytes that arrive, counted from the tensor's first.
    pub(crate) range: Range<usize>,
    /// Where they arrive.
    pub(crate) at: usize,
    /// If it is a part of a code, whose header and index are at the beginning: which, and where the first byte of it is.
    pub(crate) code: Option<(CodePart, usize)>,
}

/// What is copied from the half of the round before to the beginning of the other one: header and index of a code, and behind them
/// the last bytes that arrived of it, in which a block may have begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Carried {
    pub(crate) head: usize,
    pub(crate) tail: Range<usize>,
}

impl Carried {
    /// The bytes that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.head + self.tail.len()
    }
}

impl<'p> Round<'p> {
    /// What arrives, in order.
    pub(crate) fn landed(&self) -> &[Landed<'p>] {
        &self.landed
    }

    /// What it needs of the round before.
    pub(crate) fn carried(&self) -> Option<&Carried> {
        self.carried.as_ref()
    }

    /// The byte ranges that are copied into the landing buffer behind what is carried, in order of offset from there.
    pub(crate) fn slices(&self) -> Vec<Slice> {
        let carried = self.carried.as_ref().map_or(0, Carried::bytes);
        let slice = |landed: &Landed<'_>| {
            let Slice { module, range, .. } = &landed.tensor.slice;
            let range = range.start + landed.range.start..range.start + landed.range.end;
            Slice { module: *module, range, at: landed.at - carried }
        };
        self.landed.iter().map(slice).collect()
    }
}

impl Landed<'_> {
    /// The bytes of weights that are decoded of it, if it is a code.
    pub(crate) fn decoded(&self) -> u64 {
        let Form::Code { weights, .. } = self.tensor.form else { return 0 };
        let weights = weights as u64;
        self.code.map_or(weights, |(part, _)| part.share(weights, self.tensor.slice.range.len() as u64))
    }
}

/// The bytes of a landing buffer, two halves. The largest tensor is of `largest` bytes, `all` are the most that one layer brings, and
/// `carried` the most that a part of a code needs of the one before. It has more bytes than `cap` only if parts would have less of a
/// code than is carried, or if there were thousands of them.
pub(crate) fn landing_bytes(largest: u64, all: u64, carried: u64, cap: u64) -> u64 {
    let half_cap = (cap / 2 / UNIT as u64 * UNIT as u64).max(LEAST_HALF);
    let half_cap = half_cap.max(landed(carried).saturating_mul(2)).max(largest / MOST_PARTS);
    landed(largest.max(all.div_ceil(2)).min(half_cap)).saturating_mul(2)
}

/// The bytes that a tensor of `bytes` takes in a landing buffer.
pub(crate) fn landed(bytes: u64) -> u64 {
    Layout::slot_bytes(bytes)
}

/// Divides tensors into rounds, in order, each of as many as half a landing buffer of `room` bytes holds, and of one part at least.
pub(crate) fn rounds(unpacked: &[Unpacked], room: u64) -> Vec<Round<'_>> {
    let half = usize::try_from(room / 2).unwrap_or(usize::MAX) / UNIT * UNIT;
    let (mut rounds, mut used) = (Vec::<Round<'_>>::new(), 0usize);
    for tensor in unpacked {
        let bytes = tensor.slice.range.len();
        if rounds.is_empty() || landed_in(used, bytes) > half {
            rounds.push(Round::default());
            used = 0;
        }
        for (number, (round, end)) in parts(tensor, used, half).into_iter().enumerate() {
            if number > 0 {
                rounds.push(Round::default());
            }
            used = landed(end as u64) as usize;
            if let Some(last) = rounds.last_mut() {
                last.carried = last.carried.take().or(round.carried);
                last.landed.extend(round.landed);
            }
        }
    }
    rounds
}

/// The end of a tensor of `bytes` that begins at `used`.
fn landed_in(used: usize, bytes: usize) -> usize {
    (landed(bytes as u64) as usize).saturating_add(used)
}

/// A tensor that begins at byte `used` of a half, or its parts, each a round, if it is larger than a half. With each the end of what it
/// takes.
fn parts(tensor: &Unpacked, used: usize, half: usize) -> Vec<(Round<'_>, usize)> {
    let bytes = tensor.slice.range.len();
    let one = |range: Range<usize>, at: usize, code, carried| {
        let end = at + range.len();
        (Round { landed: vec![Landed { tensor, range, at, code }], carried }, end)
    };
    let (unit, head, block) = match tensor.form {
        Form::Blocks { from, .. } => (from.block().bytes.max(1) as usize, 0, 0),
        Form::Code { head, block, .. } => (UNIT, head, block),
    };
    let carries = head > 0;
    let first = half / unit * unit;
    if bytes <= half || first == 0 || (carries && half < 2 * landed((head + block) as u64) as usize) {
        return vec![one(0..bytes, used, None, None)];
    }
    let (mut all, mut begin, mut end_before) = (Vec::new(), 0, 0);
    while begin < bytes {
        // What is carried of the part before: at the beginning of the code that has header and index, too.
        let carried = (carries && begin > 0).then(|| Carried { head, tail: end_before - block..end_before });
        let at = carried.as_ref().map_or(0, Carried::bytes);
        let end = bytes.min(begin + (half - at) / unit * unit);
        let code = carries.then(|| {
            let (before, from) = if begin == 0 { (0, 0) } else { (block, head) };
            (CodePart { begin: (begin - before) as u64, after: begin as u64, end: end as u64 }, from)
        });
        let part = one(begin..end, at, code, carried);
        end_before = part.1;
        all.push(part);
        begin = end;
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::ModuleId;
    use crate::dtype::DType;
    use crate::lossless::needed_before;

    fn blocks(bytes: usize) -> Unpacked {
        let slice = Slice { module: ModuleId::new(0), range: 0..bytes, at: 0 };
        Unpacked { slice, form: Form::Blocks { from: DType::Q8_0, to: DType::F16 } }
    }

    /// A code of `bytes`, of as many bytes of bf16.
    fn code(bytes: usize) -> Unpacked {
        let slice = Slice { module: ModuleId::new(0), range: 64..64 + bytes, at: 0 };
        let (head, block) = needed_before(bytes as u64, bytes as u64 / 2);
        Unpacked { slice, form: Form::Code { weights: bytes, head: head as usize, block: block as usize } }
    }

    #[test]
    fn a_round_is_as_many_tensors_as_fit_and_a_large_one_is_several() {
        let tensors = [34, 340, 34, 3400, 34, 34].map(blocks);
        let of = |room: u64| {
            let rounds = rounds(&tensors, room);
            assert!(rounds.iter().all(|round| round.carried().is_none()));
            let ranges = |round: &Round<'_>| round.landed().iter().map(|l| (l.range.clone(), l.at)).collect::<Vec<_>>();
            rounds.iter().map(ranges).collect::<Vec<_>>()
        };
        let small = vec![(0..34, 0), (0..340, 256), (0..34, 768)];
        let wanted = [small.clone(), vec![(0..3400, 0)], vec![(0..34, 0), (0..34, 256)]];
        assert_eq!(of(2 * 3584), wanted);
        // Whole blocks, and what is left of a half behind the last part is the next ones'.
        let parts = [vec![(0..1020, 0)], vec![(1020..2040, 0)], vec![(2040..3060, 0)]];
        let last = vec![(3060..3400, 0), (0..34, 512), (0..34, 768)];
        assert_eq!(of(2 * 1024), [&[small][..], &parts, &[last]].concat());
        assert_eq!(of(u64::MAX).len(), 1);
        assert_eq!(of(0).len(), 6);
    }

    #[test]
    fn a_landing_buffer_is_two_halves_of_the_largest_tensor_or_of_its_cap() {
        let of = |largest, all, carried| landing_bytes(largest, all, carried, LANDING_CAP);
        assert_eq!(of(512, 3 << 10, 0), 3 << 10);
        assert_eq!(of(512, 1 << 30, 0), 32 << 20);
        assert_eq!(of(1 << 28, 1 << 30, 16 << 10), 32 << 20);
        assert_eq!(of(1 << 35, 1 << 39, 17 << 20), 68 << 20, "twice what a part needs of the one before");
        assert_eq!(of(17 << 20, 17 << 20, 10 << 20), 34 << 20, "and no more than the tensor");
        assert_eq!(of(1 << 50, 1 << 51, 0), 1 << 39, "thousands of parts");
        let capped = |cap| landing_bytes(1 << 20, 1 << 20, 0, cap);
        assert_eq!([0, 9 << 10, u64::MAX].map(capped), [8 << 10, 9 << 10, 2 << 20]);
    }

    proptest! {
        /// Every byte lands once, in order and within a half; a part of a code has what its blocks may take, and finds it where the
        /// last part left it.
        #[test]
        fn every_byte_lands_once(
            tensors in prop::collection::vec((any::<bool>(), 1usize..40), 1..6),
            cap in 0u64..400 << 10,
            more in 0u64..20 << 10,
        ) {
            let tensor = |(is_code, n): (bool, usize)| if is_code { code(n * 16 * 1024) } else { blocks(n * 340) };
            let tensors: Vec<Unpacked> = tensors.into_iter().map(tensor).collect();
            let bytes = |tensor: &Unpacked| landed(tensor.slice.range.len() as u64);
            let carried = |tensor: &Unpacked| match tensor.form {
                Form::Code { head, block, .. } => (head + block) as u64,
                Form::Blocks { .. } => 0,
            };
            let (largest, all) = (tensors.iter().map(bytes).max().unwrap(), tensors.iter().map(bytes).sum());
            let carried = tensors.iter().map(carried).max().unwrap();
            // As large as planned, or larger, if it was planned for estimates.
            let room = landing_bytes(largest, all, carried, cap) + more;
            let half = (room / 2 / 256 * 256) as usize;
            let (mut at, mut number, mut before) = (0, 0, Vec::<u64>::new());
            for round in rounds(&tensors, room) {
                // What is in the half: the place of each 16 bytes of the tensor that arrived last.
                let mut here = vec![u64::MAX; half / 16];
                if let Some(Carried { head, tail }) = round.carried() {
                    let moved = [&before[..head / 16], &before[tail.start / 16..tail.end / 16]].concat();
                    here[..moved.len()].copy_from_slice(&moved);
                }
                for (landed, slice) in round.landed().iter().zip(round.slices()) {
                    prop_assert!(std::ptr::eq(landed.tensor, &tensors[number]));
                    prop_assert_eq!(landed.range.start, at);
                    prop_assert!(landed.at + landed.range.len() <= half);
                    prop_assert_eq!(slice.range.start, landed.tensor.slice.range.start + at);
                    prop_assert_eq!(slice.at + round.carried().map_or(0, Carried::bytes), landed.at);
                    let places = landed.range.clone().step_by(16).map(|place| place as u64);
                    here[landed.at / 16..][..places.len()].copy_from_slice(&places.collect::<Vec<_>>());
                    at = landed.range.end;
                    if let (Some((part, from)), Form::Code { head, block, .. }) = (landed.code, &landed.tensor.form) {
                        prop_assert_eq!((part.after, part.end), (landed.range.start as u64, landed.range.end as u64));
                        prop_assert!(part.after < part.end);
                        prop_assert!(part.begin == 0 || part.begin + *block as u64 <= part.after);
                        prop_assert!((0..head / 16).all(|at| here[at] == at as u64 * 16), "header and index");
                        let bytes = (part.end - part.begin).div_ceil(16) as usize;
                        let found = (0..bytes).all(|at| here[from / 16 + at] == part.begin + at as u64 * 16);
                        prop_assert!(found, "the bytes of the part");
                    }
                    if at == tensors[number].slice.range.len() {
                        (at, number) = (0, number + 1);
                    }
                }
                before = here;
            }
            prop_assert_eq!((at, number), (0, tensors.len()));
        }
    }
}
