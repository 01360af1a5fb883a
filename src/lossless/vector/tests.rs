//! The loops of each instruction set give what the definition gives, for any input and not only for what coding makes.

use super::super::block::{Definition, Kernels};
use super::super::ladder::{ESCAPE, Levels, THIRD, Tail, WINDOW};
use super::super::table::Table;
use super::super::tests::noise;
use super::super::{CODES, TILE, Tile};

/// Runs a check with the loops of each instruction set that this processor has.
macro_rules! in_each_set {
    ($check:ident) => {
        $check("definition", Definition);
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = super::avx2::Avx2::here() {
            $check("AVX2", avx2);
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(neon) = super::neon::Neon::here() {
            $check("NEON", neon);
        }
    };
}

/// Tiles of numbers up to `most`: each alone, all in turn, one among zeros at every place, rare and frequent large and small ones.
fn tiles(most: u8) -> Vec<Tile> {
    let below = u32::from(most) + 1;
    let mut tiles: Vec<Tile> = (0..=most).map(|number| [number; TILE]).collect();
    tiles.push(std::array::from_fn(|at| (at as u32 % below) as u8));
    tiles.extend((0..TILE).map(|place| {
        let mut tile = [0; TILE];
        tile[place] = 1 + (place as u32 % u32::from(most)) as u8;
        tile
    }));
    for seed in 0..40 {
        let mut random = noise(seed);
        // Of so many, one is random.
        let each = [1, 2, 3, 8, 50][seed as usize % 5];
        let rare: Tile =
            std::array::from_fn(|_| if random().is_multiple_of(each) { (random() % below) as u8 } else { 0 });
        let usual: Tile = std::array::from_fn(|_| (random().leading_zeros() as u8).min(most));
        tiles.extend([rare, usual, rare.map(|number| most - number), usual.map(|number| most - number)]);
    }
    tiles
}

#[test]
fn ranks_are_those_of_the_definition() {
    fn check(set: &str, kernels: impl Kernels) {
        let mut random = noise(1);
        let around = |exponent: u32, number: u32| (exponent + number.leading_zeros()).min(255) as u8;
        let some: Vec<Vec<u8>> = vec![
            vec![0],
            vec![255],
            (0..=255).collect(),
            (0..40).chain([255]).collect(),
            (0..500).map(|_| around(110, random())).chain([0; 9]).collect(),
            (0..500).map(|_| around(0, random())).collect(),
            (0..500).map(|_| around(240, random())).chain([0, 1]).collect(),
            (0..500).map(|_| (random() % 14) as u8 * 19).collect(),
            (0..32).chain(100..132).collect(),
        ];
        let mut all = tiles(255);
        all.push(std::array::from_fn(|at| at as u8));
        for exponents in some {
            let table = Table::of(&exponents, 255);
            for tile in all.iter().rev().step_by(7) {
                let (mut found, mut wanted) = ([0xa5; TILE], [0; TILE]);
                kernels.ranks(&table, tile, &mut found);
                Definition.ranks(&table, tile, &mut wanted);
                assert!(found == wanted, "{set}: {:?}", table.exponents);
            }
        }
    }
    in_each_set!(check);
}

#[test]
fn codes_of_any_ranks_are_those_of_the_definition() {
    fn check(set: &str, kernels: impl Kernels) {
        let (mut found, mut wanted) = (Tail::new(), Tail::new());
        for ranks in tiles(ESCAPE) {
            let mut codes = [[0xa5; CODES], [0; CODES]];
            kernels.encode(&ranks, &mut codes[0], &mut found);
            Definition.encode(&ranks, &mut codes[1], &mut wanted);
            assert!(codes[0] == codes[1], "{set}: {ranks:?}");
            let mut tails = [Vec::new(), Vec::new()];
            found.take(&mut tails[0]);
            wanted.take(&mut tails[1]);
            assert!(tails[0] == tails[1], "{set}: {ranks:?}");
        }
    }
    in_each_set!(check);
}

/// Whatever the codes are, as those of a damaged file.
#[test]
fn exponents_of_any_codes_are_those_of_the_definition() {
    fn check(set: &str, kernels: impl Kernels) {
        let table: [u8; 16] = std::array::from_fn(|rank| 200 - rank as u8);
        let mut random = noise(2);
        let mut bytes = |each: u32| -> [u8; WINDOW] {
            std::array::from_fn(|_| if random().is_multiple_of(each) { random() as u8 } else { 0 })
        };
        let mut tails = vec![[0; WINDOW], [255; WINDOW], [0b1110_1101; WINDOW]];
        tails.extend([1, 1, 2, 5].map(&mut bytes));
        let mut codes: Vec<[u8; CODES]> = vec![[0; CODES], [255; CODES], [0x33; CODES], [0xcc; CODES], [0xa5; CODES]];
        for each in [1, 1, 1, 2, 5, 40] {
            let random: [u8; CODES] = *bytes(each).first_chunk().unwrap();
            // Few codes of 3, and few others.
            codes.extend([random, random.map(|byte| !byte)]);
        }
        codes.extend((0..CODES).map(|place| {
            let mut codes = [0; CODES];
            codes[place] = 3 << (place % 4 * 2);
            codes
        }));
        let mut deepest = Levels::default();
        for codes in &codes {
            for tail in &tails {
                let (mut found, mut wanted) = ([0xa5; TILE], [0; TILE]);
                let levels = kernels.decode(codes, tail, &table, &mut found);
                assert_eq!(levels, Definition.decode(codes, tail, &table, &mut wanted), "{set}: {codes:?}");
                assert!(found == wanted, "{set}: {codes:?} and {tail:?}");
                deepest.second = deepest.second.max(levels.second);
                deepest.third = deepest.third.max(levels.third);
            }
        }
        assert_eq!(deepest, Levels { second: TILE, third: TILE });
        // Codes of any ranks.
        for ranks in tiles(ESCAPE) {
            let (mut codes, mut tail, mut bytes) = ([0; CODES], Tail::new(), Vec::new());
            Definition.encode(&ranks, &mut codes, &mut tail);
            tail.take(&mut bytes);
            bytes.resize(WINDOW, 0xff);
            let mut found = [0; TILE];
            let levels = kernels.decode(&codes, bytes.first_chunk().unwrap(), &table, &mut found);
            assert!(found == ranks.map(|rank| 200 - rank), "{set}: {ranks:?}");
            assert_eq!(levels.third, ranks.iter().filter(|rank| **rank >= THIRD).count(), "{set}");
        }
    }
    in_each_set!(check);
}

#[test]
fn packed_bits_are_those_of_the_definition() {
    fn check_width<const WIDTH: usize>(set: &str, kernels: impl Kernels) {
        for rests in tiles((1 << WIDTH) - 1) {
            let (mut found, mut wanted) = (vec![0xa5; WIDTH * TILE / 8], vec![0; WIDTH * TILE / 8]);
            kernels.pack::<WIDTH>(&rests, &mut found);
            Definition.pack::<WIDTH>(&rests, &mut wanted);
            assert!(found == wanted, "{set}: {WIDTH} bits of {rests:?}");
            let mut unpacked = [0xa5; TILE];
            kernels.unpack::<WIDTH>(&wanted, &mut unpacked);
            assert!(unpacked == rests, "{set}: {WIDTH} bits of {rests:?}");
        }
    }
    fn check(set: &str, kernels: impl Kernels) {
        check_width::<3>(set, kernels);
        check_width::<4>(set, kernels);
        check_width::<2>(set, kernels);
    }
    in_each_set!(check);
}

#[test]
fn sums_are_those_of_the_definition() {
    fn check(set: &str, kernels: impl Kernels) {
        let mut random = noise(3);
        let bytes: Vec<u8> = (0..5000).map(|_| random() as u8).collect();
        for bytes in [&bytes[..], &[0xff; 4096]] {
            for (from, length) in [(0, 0), (0, 3), (1, 64), (3, 67), (0, 1024), (0, 2048), (5, 4001)] {
                for first in [0, 8 * TILE, 77 * TILE + 5] {
                    let bytes = &bytes[from..from + length];
                    assert_eq!(kernels.sum(bytes, first), Definition.sum(bytes, first), "{set}: {length} from {first}");
                }
            }
        }
    }
    in_each_set!(check);
}
