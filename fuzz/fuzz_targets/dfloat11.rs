//! Any bytes as the tensors of a group in DFloat11's form: no more than an error, and parts of what is decoded are those of the whole.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensor_offload::lossless::dfloat11::{Group, Parts};

fuzz_target!(|data: &[u8]| {
    let Some((&[threads, rows, exponents, encoded, first, place], data)) = data.split_first_chunk() else { return };
    let threads = 1 + u32::from(threads) % 4;
    // Tables of few exponents lead to codes, and lengths of more bits than there can be do not.
    let (mut luts, mut rest) = (Vec::new(), data);
    let mut take = |count: usize| {
        let (taken, left) = rest.split_at(count.min(rest.len()));
        rest = left;
        taken.to_vec()
    };
    for _ in 0..=rows % 6 {
        let mut row = take(256);
        row.resize(256, row.last().copied().unwrap_or(0));
        row.iter_mut().filter(|entry| **entry < 240).for_each(|entry| *entry %= 1 + exponents % 240);
        luts.extend(row);
    }
    let mut lengths = take(256);
    lengths.resize(256, 8);
    luts.extend(lengths.iter().map(|length| length % 34));
    let encoded = take(usize::from(encoded));
    let blocks = encoded.len().div_ceil(8 * threads as usize);
    let mut gaps = take((5 * blocks * threads as usize).div_ceil(8));
    gaps.resize((5 * blocks * threads as usize).div_ceil(8), 0);
    gaps.iter_mut().take(1).for_each(|gap| *gap &= 7);
    let mut positions: Vec<u32> = vec![0];
    for count in take(blocks) {
        positions.push(positions.last().expect("one") + u32::from(count));
    }
    let weights = *positions.last().expect("one");
    positions.resize(blocks + 1, weights);
    let positions: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
    let parts = Parts {
        luts: &luts,
        output_positions: &positions,
        gaps: &gaps,
        threads,
        encoded: encoded.len() as u64,
        weights: weights.into(),
    };
    let Ok(group) = Group::new(&parts) else { return };
    let rests = vec![0; weights as usize];
    let decode = |range: std::ops::Range<u64>| {
        let bytes = group.encoded_bytes(&range).expect("weights of the group");
        let mut to = vec![0; 2 * (range.end - range.start) as usize];
        let (codes, rests) =
            (&encoded[bytes.start as usize..bytes.end as usize], &rests[range.start as usize..range.end as usize]);
        group.decode(range, codes, rests, &mut to).map(|()| to)
    };
    let [one, other] = [first, place].map(|at| u64::from(weights) * u64::from(at) / 255);
    let (begin, end) = (one.min(other), one.max(other));
    let part = decode(begin..end);
    if let Ok(all) = decode(0..weights.into()) {
        assert!(part.expect("a part of what is whole") == all[2 * begin as usize..2 * end as usize]);
    }
});
