//! The package's own codes, codes of any table, and damaged ones.

use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::SafeTensors;

use super::*;

/// A group as its tensors.
#[derive(Clone, Debug)]
struct Tensors {
    luts: Vec<u8>,
    output_positions: Vec<u8>,
    gaps: Vec<u8>,
    encoded: Vec<u8>,
    rests: Vec<u8>,
    threads: u32,
}

impl Tensors {
    fn open(&self) -> Result<Group, CodeFault> {
        Group::new(&Parts {
            luts: &self.luts,
            output_positions: &self.output_positions,
            gaps: &self.gaps,
            threads: self.threads,
            encoded: self.encoded.len() as u64,
            weights: self.rests.len() as u64,
        })
    }

    fn range(&self, group: &Group, weights: Range<u64>) -> Result<Vec<u8>, CodeFault> {
        let bytes = group.encoded_bytes(&weights)?;
        let (encoded, rests) = (&self.encoded[bytes.start as usize..bytes.end as usize], &self.rests);
        let mut to = vec![0xa5; 2 * (weights.end - weights.start) as usize];
        group.decode(weights.clone(), encoded, &rests[weights.start as usize..weights.end as usize], &mut to)?;
        Ok(to)
    }

    fn all(&self) -> Result<Vec<u8>, CodeFault> {
        let group = self.open()?;
        self.range(&group, 0..group.weights())
    }
}

/// The groups of `tests/data/dfloat11/codes.safetensors`, with their weights.
fn of_the_package() -> Vec<(String, Tensors, Vec<u8>)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dfloat11");
    let [codes, expected] =
        ["codes", "codes.expected"].map(|name| std::fs::read(format!("{folder}/{name}.safetensors")).unwrap());
    let [codes, expected] = [&codes, &expected].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let names = codes.names().into_iter().filter_map(|name| name.strip_suffix(".luts"));
    let group = |name: &str| {
        let tensor = |end: &str| codes.tensor(&format!("{name}.{end}")).unwrap().data().to_vec();
        let tensors = Tensors {
            luts: tensor("luts"),
            output_positions: tensor("output_positions"),
            gaps: tensor("gaps"),
            encoded: tensor("encoded_exponent"),
            rests: tensor("sign_mantissa"),
            threads: 512,
        };
        let of_group = (0..).map_while(|index| expected.tensor(&format!("{name}.{index}")).ok());
        (name.to_owned(), tensors, of_group.flat_map(|weights| weights.data().to_vec()).collect())
    };
    names.map(group).collect()
}

/// A code: exponent, bits, and how many these are.
type TestCode = (u8, u32, u32);

/// Which leaf of a tree is split: one by its number modulo the leaves, or the last one.
type Split = Option<usize>;

/// Codes as a tree has them whose leaves are split so, and the code for the end, one of the longest.
fn codes_of(splits: &[Split], exponents: &[u8]) -> (Vec<TestCode>, TestCode) {
    let mut leaves: Vec<(u32, u32)> = vec![(0, 1), (1, 1)];
    for split in splits {
        let before = leaves.clone();
        let leaf = split.unwrap_or(leaves.len() - 1) % leaves.len();
        let (bits, length) = leaves[leaf];
        if length < 32 && leaves.len() <= exponents.len() {
            leaves[leaf] = (bits << 1, length + 1);
            leaves.push((bits << 1 | 1, length + 1));
        }
        // As many tables as can be named.
        if prefixes(leaves.iter().map(|&(bits, length)| (0, bits, length))).len() > 17 {
            leaves = before;
            break;
        }
    }
    // The encoder has no entry for what is before its first code.
    let ends = leaves.iter().enumerate().filter(|(_, (bits, _))| *bits != 0).max_by_key(|(_, (_, length))| *length);
    let end = leaves.remove(ends.unwrap().0);
    (
        exponents.iter().zip(leaves).map(|(&exponent, (bits, length))| (exponent, bits, length)).collect(),
        (0, end.0, end.1),
    )
}

fn text(code: &TestCode) -> String {
    format!("{:0length$b}", code.1, length = code.2 as usize)
}

/// The whole bytes before the last byte of each code.
fn prefixes(codes: impl Iterator<Item = TestCode>) -> Vec<String> {
    let mut prefixes = vec![String::new()];
    for code in codes {
        let last = (code.2 as usize - 1) / 8 * 8;
        for end in (8..=last).step_by(8) {
            let prefix = text(&code)[..end].to_owned();
            if !prefixes.contains(&prefix) {
                prefixes.push(prefix);
            }
        }
    }
    prefixes.sort_by_key(String::len);
    prefixes
}

/// What `get_luts` of the package makes of codes: entries without a code hold the value before them, of whichever table.
fn luts_of(codes: &[TestCode]) -> Vec<u8> {
    let prefixes = prefixes(codes.iter().copied());
    let (mut luts, mut current) = (Vec::new(), 0);
    for prefix in &prefixes {
        let mut row = [None; 256];
        for code in codes.iter().filter(|code| text(code).starts_with(prefix.as_str()) && text(code) != *prefix) {
            let rest = &text(code)[prefix.len()..];
            let (key, value) = match rest.len() {
                0..=8 => (format!("{rest:0<8}"), code.0),
                _ => {
                    let prefix = &text(code)[..prefix.len() + 8];
                    (rest[..8].to_owned(), (256 - prefixes.iter().position(|p| p == prefix).unwrap()) as u8)
                }
            };
            row[usize::from_str_radix(&key, 2).unwrap()] = Some(value);
        }
        for entry in row {
            current = entry.unwrap_or(current);
            luts.push(current);
        }
    }
    let mut lengths = [0; 256];
    codes.iter().for_each(|&(exponent, _, length)| lengths[usize::from(exponent)] = length as u8);
    luts.extend(lengths);
    luts
}

/// What `encode` of the package makes of exponents, which are numbers of codes.
fn encode(codes: &[TestCode], end: TestCode, exponents: &[usize], threads: u32) -> Tensors {
    let (window, block) = (64, 64 * threads as usize);
    let (mut bits, mut gaps, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    let begin = |at: usize, count: usize, gaps: &mut Vec<usize>, positions: &mut Vec<u32>| {
        if at / window + 1 > gaps.len() {
            gaps.push(at % window);
        }
        if at / block + 1 > positions.len() {
            positions.push(count as u32);
        }
    };
    let push =
        |bits: &mut Vec<bool>, code: u32, length: u32| bits.extend((0..length).rev().map(|bit| code >> bit & 1 == 1));
    for (count, &exponent) in exponents.iter().enumerate() {
        begin(bits.len(), count, &mut gaps, &mut positions);
        push(&mut bits, codes[exponent].1, codes[exponent].2);
    }
    let whole = bits.len().next_multiple_of(8);
    if bits.len() < whole {
        begin(bits.len(), exponents.len(), &mut gaps, &mut positions);
        push(&mut bits, end.1, end.2);
        bits.resize(whole, false);
    }
    positions.push(exponents.len() as u32);
    let to_bytes = |bits: &[bool]| {
        let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (at, bit)| byte | u8::from(*bit) << (7 - at));
        bits.chunks(8).map(byte).collect::<Vec<u8>>()
    };
    gaps.resize((bits.len() / 8).div_ceil(block / 8) * threads as usize, 0);
    let gaps: Vec<bool> = gaps.iter().flat_map(|gap| (0..5).rev().map(move |bit| gap >> bit & 1 == 1)).collect();
    Tensors {
        luts: luts_of(codes),
        output_positions: positions.iter().flat_map(|position| position.to_le_bytes()).collect(),
        gaps: to_bytes(&gaps),
        encoded: to_bytes(&bits),
        rests: (0..exponents.len()).map(|at| (at * 37 % 256) as u8).collect(),
        threads,
    }
}

fn joined(exponents: impl Iterator<Item = u8>, rests: &[u8]) -> Vec<u8> {
    let bits = exponents
        .zip(rests)
        .map(|(exponent, rest)| u16::from(rest & 0x80) << 8 | u16::from(exponent) << 7 | u16::from(rest & 0x7f));
    bits.flat_map(u16::to_le_bytes).collect()
}

/// Groups of any codes, of which those with few bits are frequent, with their weights.
fn groups() -> impl Strategy<Value = (Tensors, Vec<u8>)> {
    let exponents = Just((0u8..240).collect::<Vec<u8>>()).prop_shuffle();
    let splits = prop_oneof![
        prop::collection::vec(any::<usize>().prop_map(Some), 1..240),
        // Codes of up to 32 bits.
        prop::collection::vec(prop_oneof![3 => Just(None), 1 => any::<usize>().prop_map(Some)], 1..60),
    ];
    let threads = prop_oneof![Just(512), Just(256), 1u32..9];
    let chosen = prop::collection::vec(any::<(Index, u8)>(), 0..6000);
    (exponents, splits, threads, chosen).prop_map(|(exponents, splits, threads, chosen)| {
        let (codes, end) = codes_of(&splits, &exponents);
        let mut by_length: Vec<usize> = (0..codes.len()).collect();
        by_length.sort_by_key(|&code| codes[code].2);
        let choose = |(index, few): (Index, u8)| match few {
            0..8 => index.index(codes.len()),
            _ => by_length[index.index(codes.len().min(4))],
        };
        let chosen: Vec<usize> = chosen.into_iter().map(choose).collect();
        let tensors = encode(&codes, end, &chosen, threads);
        let weights = joined(chosen.iter().map(|&code| codes[code].0), &tensors.rests);
        (tensors, weights)
    })
}

/// Two places of a group, in order.
fn between(begin: Index, end: Index, count: u64) -> Range<u64> {
    let (begin, end) = (begin.index(count as usize + 1) as u64, end.index(count as usize + 1) as u64);
    begin.min(end)..begin.max(end)
}

#[test]
fn groups_of_the_package_are_their_weights() {
    let groups = of_the_package();
    assert_eq!(groups.len(), 6);
    for (name, tensors, weights) in groups {
        assert!(tensors.all().unwrap() == weights, "{name}");
        let group = tensors.open().unwrap();
        // Every beginning and end of a block, and what is beside them.
        let near = |at: u32| (u64::from(at).saturating_sub(2)..u64::from(at) + 3).filter(|at| *at <= group.weights());
        let places: Vec<u64> = group.starts.iter().flat_map(|start| near(start.weight)).collect();
        for (&begin, &end) in places.iter().flat_map(|begin| places.iter().map(move |end| (begin, end))) {
            if begin <= end {
                let part = tensors.range(&group, begin..end).unwrap();
                assert!(part == weights[2 * begin as usize..2 * end as usize], "{name} {begin}..{end}");
            }
        }
    }
}

#[test]
fn the_position_that_the_encoder_leaves_out_is_not_needed() {
    let groups = of_the_package();
    let (_, crossing, _) = groups.iter().find(|(name, ..)| name == "crossing").unwrap();
    assert_eq!((crossing.encoded.len(), crossing.output_positions.len()), (4097, 8));
    let mut other = crossing.clone();
    other.output_positions.extend((other.rests.len() as u32).to_le_bytes());
    assert_eq!(other.all().unwrap(), crossing.all().unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn codes_of_any_table_are_their_weights((tensors, weights) in groups(), begin: Index, end: Index) {
        let group = tensors.open().unwrap();
        prop_assert!(tensors.range(&group, 0..group.weights()).unwrap() == weights);
        let range = between(begin, end, group.weights());
        let part = tensors.range(&group, range.clone()).unwrap();
        prop_assert!(part == weights[2 * range.start as usize..2 * range.end as usize]);
    }

    /// Positions, and the gaps of blocks, are each bound to the codes on both sides.
    #[test]
    fn damaged_positions_and_gaps_are_noticed((mut tensors, weights) in groups(), at: Index, bits in 1u8..) {
        let blocks = tensors.encoded.len().div_ceil(8 * tensors.threads as usize);
        let positions = tensors.output_positions.len();
        let at = at.index(positions + blocks);
        if at < positions {
            tensors.output_positions[at] ^= bits;
        } else {
            let bit = (at - positions) * tensors.threads as usize * 5;
            tensors.gaps[bit / 8] ^= 0x80 >> (bit % 8);
        }
        match tensors.all() {
            // Where no code begins in the last block, its gap is for none.
            Ok(decoded) => prop_assert!(decoded == weights && at >= positions),
            Err(fault) => {
                let known = matches!(fault, CodeFault::Header { .. } | CodeFault::Block { .. });
                prop_assert!(known, "{}", fault);
            }
        }
    }

    #[test]
    fn damage_is_no_more_than_an_error(
        (mut tensors, _) in groups(),
        part in 0usize..4,
        changes in prop::collection::vec(any::<(Index, u8)>(), 1..20),
        cut in prop::option::of(any::<Index>()),
        threads in prop_oneof![4 => Just(None), 1 => any::<u32>().prop_map(Some)],
        begin: Index,
        end: Index,
    ) {
        let weights = tensors.rests.len() as u64;
        tensors.threads = threads.unwrap_or(tensors.threads);
        let part = [&mut tensors.luts, &mut tensors.output_positions, &mut tensors.gaps, &mut tensors.encoded]
            .into_iter()
            .nth(part)
            .unwrap();
        for (at, bits) in changes.iter().take(if part.is_empty() { 0 } else { usize::MAX }) {
            let at = at.index(part.len());
            part[at] ^= bits;
        }
        if let Some(cut) = cut {
            part.truncate(cut.index(part.len() + 1));
        }
        if let Ok(group) = tensors.open() {
            let _ = tensors.range(&group, 0..weights);
            let _ = tensors.range(&group, between(begin, end, weights));
        }
    }

    #[test]
    fn any_bytes_are_no_more_than_an_error(
        rows in 0usize..20,
        seed: u64,
        threads in 1u32..4,
        encoded in prop::collection::vec(any::<u8>(), 0..200),
        few in any::<bool>(),
    ) {
        let mut state = seed | 1;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        // Few exponents, and now and then the number of a table; or anything.
        let mut entry = || match byte() {
            200.. if few => byte() | 0xf0,
            value if few => value % 5,
            value => value,
        };
        let mut luts: Vec<u8> = (0..256 * rows).map(|_| entry()).collect();
        let lengths = luts.len().saturating_sub(256);
        luts[lengths..].iter_mut().for_each(|length| *length %= 34);
        let blocks = encoded.len().div_ceil(8 * threads as usize);
        let mut positions: Vec<u32> = (0..blocks).map(|_| u32::from(byte())).collect();
        positions.sort_unstable();
        positions.iter_mut().take(1).for_each(|first| *first = 0);
        let last = positions.last().map_or(0, |last| last + u32::from(byte()));
        positions.push(last);
        let gaps = (0..(blocks * threads as usize * 5).div_ceil(8)).map(|at| if at == 0 { 0 } else { byte() }).collect();
        let tensors = Tensors {
            luts,
            output_positions: positions.iter().flat_map(|position| position.to_le_bytes()).collect(),
            gaps,
            encoded,
            rests: vec![0; last as usize],
            threads,
        };
        let _ = tensors.all();
    }
}

#[test]
fn what_is_asked_for_has_to_be_there() {
    let (_, tensors, weights) = of_the_package().into_iter().find(|(name, ..)| name == "several").unwrap();
    let group = tensors.open().unwrap();
    let count = group.weights();
    for range in [0..count + 1, count + 1..count + 1] {
        let fault = CodeFault::Range { begin: range.start, end: range.end, count };
        assert_eq!(group.encoded_bytes(&range), Err(fault));
    }
    let mut to = vec![0; weights.len()];
    let short = group.decode(0..count, &tensors.encoded[1..], &tensors.rests, &mut to);
    assert_eq!(short, Err(CodeFault::Length { expected: 4570, given: 4569 }));
    let short = group.decode(0..count, &tensors.encoded, &tensors.rests[1..], &mut to);
    assert_eq!(short, Err(CodeFault::Length { expected: count, given: count - 1 }));
    let other = group.decode(0..count, &tensors.encoded, &tensors.rests, &mut to[1..]);
    assert_eq!(other, Err(CodeFault::Destination { needed: 2 * count, given: 2 * count - 1 }));
    for threads in [0, 1025] {
        let none = Tensors { threads, ..tensors.clone() };
        assert!(matches!(none.open(), Err(CodeFault::Header { .. })));
    }
}
