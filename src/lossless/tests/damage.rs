//! Codes that were damaged, by chance or on purpose: an error, and never another weight.

use super::*;

/// Codes of every form: blocks with escapes, plain ones, planes left out, a tensor that stays as it was, none.
fn codes() -> Vec<(Vec<u8>, Vec<u8>)> {
    let rare = |(at, value): (usize, f32)| if at % 611 == 0 { f32::from_bits(at as u32 * 77_777) } else { value };
    let some = |count: usize| normal(6, 0.3).enumerate().map(rare).take(count);
    let mut mixed = stored(DType::BF16, some(BLOCK + 3000));
    let mut random = noise(2);
    mixed[..2 * BLOCK].as_chunks_mut::<2>().0.iter_mut().for_each(|weight| *weight = (random() as u16).to_le_bytes());
    mixed.rotate_left(2 * 3000);
    let of_bf16 = stored(DType::F32, some(3000).map(|value| half::bf16::from_f32(value).to_f32()));
    let all = [
        (DType::BF16, stored(DType::BF16, some(BLOCK + 3000))),
        (DType::BF16, mixed),
        (DType::F16, stored(DType::F16, some(3000))),
        (DType::F32, of_bf16),
        (DType::F8E4M3, stored(DType::F8E4M3, some(3000).map(|value| value * 99.0))),
        (DType::F8E5M2, stored(DType::F8E5M2, some(3000))),
        (DType::BF16, vec![0; 3000]),
        (DType::BF16, (0..=255).cycle().take(3000).collect()),
        (DType::F32, vec![]),
    ];
    all.into_iter().map(|(dtype, bytes)| (compress(dtype, &bytes).unwrap(), bytes)).collect()
}

/// Decodes with every tier, which agree.
fn decoded(code: &[u8], length: usize) -> Result<Vec<u8>, CodeFault> {
    let opened = Code::open(code)?;
    let results = Tier::all().into_iter().map(|tier| {
        let mut weights = vec![0; length];
        let mut opened = opened;
        opened.head.tier = tier;
        opened.decode(&mut weights).map(|()| weights)
    });
    let results: Vec<_> = results.collect();
    assert!(results.windows(2).all(|two| two[0] == two[1]), "tiers differ");
    results[0].clone()
}

/// Gives a header the sum that its bytes need, so that what comes after it is reached.
fn reseal(code: &mut [u8]) {
    if code.len() < header::HEADER {
        return;
    }
    let blocks = u32::from_le_bytes([code[12], code[13], code[14], code[15]]) as usize;
    let index = header::length(code[11] == 1, blocks);
    if let Some(index) = code[header::HEADER..].get(..index) {
        let sum = header::sum_of_index(index);
        code[40..48].copy_from_slice(&sum.to_le_bytes());
    }
    let sum = header::sum_of_header(code);
    code[56..64].copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn every_flipped_bit_is_an_error() {
    for (code, bytes) in codes() {
        // All bits of headers and index, and one in some of the others.
        let (few, mut tried) = (if code.len() > 6000 { 61 } else { 13 }, 0);
        let bits = (0..code.len() * 8).filter(|bit| *bit < 8 * 160 || bit % few == 0);
        for bit in bits.chain((code.len().saturating_sub(20) * 8)..code.len() * 8) {
            let mut damaged = code.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let result = decoded(&damaged, bytes.len());
            assert!(result.is_err(), "bit {bit} of {} changed nothing", code.len());
            tried += 1;
        }
        assert!(tried >= 512);
    }
}

#[test]
fn every_truncation_is_an_error() {
    for (code, bytes) in codes() {
        for length in 0..code.len() {
            let fault = Code::open(&code[..length]).unwrap_err();
            let CodeFault::Length { given, expected } = fault else { panic!("{fault}") };
            assert!(given == length as u64 && expected > given);
            // And if the header says that this is all.
            let mut short = code[..length].to_vec();
            if length >= header::HEADER && (length % 16 == 0 || length < 200) {
                short[24..32].copy_from_slice(&(length as u64).to_le_bytes());
                reseal(&mut short);
                assert!(decoded(&short, bytes.len()).is_err(), "{length} of {}", code.len());
            }
        }
        let longer = [&code[..], &[0; 16]].concat();
        assert!(matches!(Code::open(&longer), Err(CodeFault::Length { .. })));
    }
}

#[test]
fn other_files_and_later_versions_are_named() {
    assert_eq!(Code::open(&[7; 200]).unwrap_err(), CodeFault::NotCode);
    let mut code = codes().remove(0).0;
    code[8] = 2;
    assert_eq!(Code::open(&code).unwrap_err(), CodeFault::Version { found: 2, known: 1 });
}

/// The weights of blocks are coded in their order, and by their number.
#[test]
fn blocks_in_another_order_are_an_error() {
    let block = stored(DType::BF16, normal(6, 0.3).take(BLOCK));
    let one = compress(DType::BF16, &block).unwrap();
    let two = compress(DType::BF16, &block.repeat(2)).unwrap();
    let [first, second] = [0, 1].map(|at| Code::open(&two).unwrap().block(at).unwrap());
    assert_eq!(Code::open(&one).unwrap().block(0).unwrap(), first);
    assert_ne!(first, second);
    let swapped = [&two[..two.len() - 2 * first.len()], second, first].concat();
    let fault = decoded(&swapped, 4 * BLOCK).unwrap_err();
    assert_eq!(fault, CodeFault::Block { block: 0, what: "its weights are not those of its sum" });
    // A block of the same number from another tensor shows in the sum of all.
    let other = compress(DType::BF16, &stored(DType::BF16, normal(6, 0.6).take(BLOCK))).unwrap();
    let exchanged = [&one[..one.len() - first.len()], Code::open(&other).unwrap().block(0).unwrap()].concat();
    assert_eq!(exchanged.len(), one.len(), "twice as large weights have the next exponents");
    let fault = decoded(&exchanged, 2 * BLOCK).unwrap_err();
    assert_eq!(fault, CodeFault::Header { what: "its blocks are not those of its header" });
}

/// A header of a few bytes that announces many takes no memory for them.
#[test]
fn numbers_beyond_the_code_are_errors() {
    let code = codes().remove(0).0;
    for at in [12, 16, 24] {
        for value in [1, 1 << 16, 1 << 31, u64::MAX >> 3, u64::MAX] {
            let mut damaged = code.clone();
            let bytes = if at == 12 { 4 } else { 8 };
            damaged[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            reseal(&mut damaged);
            assert!(Code::open(&damaged).is_err(), "{value} at {at}");
            let count = (value & 0xffff_ffff) << 13;
            damaged[16..24].copy_from_slice(&count.to_le_bytes());
            reseal(&mut damaged);
            assert!(Code::open(&damaged).is_err());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Even if header and index are those of the damage.
    #[test]
    fn damage_on_purpose_is_an_error(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..9),
        near in prop::option::of(0usize..256),
    ) {
        let all = codes();
        let (code, bytes) = which.get(&all);
        let mut damaged = code.clone();
        for (at, value) in changes {
            // Most of a code is rests, so some of the damage is within the first bytes.
            let at = at.index(near.map_or(code.len(), |near| code.len().min(near + 1)));
            damaged[at] = value;
        }
        reseal(&mut damaged);
        if let Ok(weights) = decoded(&damaged, bytes.len()) {
            prop_assert!(weights == *bytes);
        }
    }

    #[test]
    fn any_bytes_after_a_header_are_refused(body in prop::collection::vec(any::<u8>(), 0..900), count in 1u64..2000) {
        let mut code = compress(DType::BF16, &stored(DType::BF16, normal(6, 0.3).take(3000))).unwrap();
        code.truncate(header::HEADER);
        let end = (header::HEADER + 16 + body.len()) / 16;
        code.extend_from_slice(&[5u32, end as u32, 0, 0].map(u32::to_le_bytes).concat());
        code.extend_from_slice(&body);
        code.truncate(end * 16);
        code[16..24].copy_from_slice(&count.to_le_bytes());
        code[24..32].copy_from_slice(&(end as u64 * 16).to_le_bytes());
        if let Some(block) = code.get_mut(80..112) {
            // As far as a block's header can be right.
            let length = (end as u16 - 5).to_le_bytes();
            let [escapes, flags] = [block[8] % 9, block[13] & 0x81];
            block[8..16].copy_from_slice(&[escapes, 0, length[0], length[1], 1, flags, 0, 0]);
            block[30..].fill(0);
        }
        reseal(&mut code);
        prop_assert!(decoded(&code, 2 * count as usize).is_err());
    }
}
