//! Reads against a file of which every answer of the system is made up.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::*;

/// A file whose system does what a test says.
struct Fake {
    bytes: Vec<u8>,
    alignment: Alignment,
    /// Whether each half MiB is in the page cache, in turn.
    cached: Vec<bool>,
    /// The most bytes of each read, in turn.
    most: Vec<usize>,
    /// The error of the read with this number.
    fails: Option<(usize, io::ErrorKind)>,
    /// Ways that are refused.
    refused: Vec<Way>,
    reads: RefCell<Vec<(Way, u64, usize)>>,
    asked: Cell<usize>,
}

const STEP: u64 = 512 << 10;

impl Fake {
    fn new(len: usize, cached: &[bool]) -> Fake {
        Fake {
            bytes: (0..len).map(|at| (at * 31 + at / 251) as u8).collect(),
            alignment: Alignment { offset: 512, memory: 512 },
            cached: cached.to_vec(),
            most: vec![usize::MAX],
            fails: None,
            refused: Vec::new(),
            reads: RefCell::default(),
            asked: Cell::new(0),
        }
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways: Vec<Way> = self.reads.borrow().iter().map(|read| read.0).collect();
        ways.dedup();
        ways
    }

    fn check(&self, reader: &Reader, at: usize, len: usize) {
        let mut dst = vec![0; len];
        reader.read(self, at as u64, &mut dst).unwrap();
        assert!(dst == self.bytes[at..at + len]);
    }
}

impl Calls for Fake {
    fn cached(&self, range: Range<u64>) -> Option<u64> {
        self.asked.set(self.asked.get() + 1);
        let has = |at: &u64| self.cached[(at / STEP) as usize % self.cached.len()];
        Some(range.filter(|at| at % 512 == 0).filter(has).count() as u64 * 512)
    }

    fn direct(&self) -> Result<Alignment, NotDirect> {
        Ok(self.alignment)
    }

    fn read(&self, way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize> {
        let number = self.reads.borrow().len();
        self.reads.borrow_mut().push((way, at, dst.len()));
        if self.refused.contains(&way) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if let Some((_, error)) = self.fails.filter(|(fails, _)| *fails == number) {
            return Err(error.into());
        }
        let mut most = self.most[number % self.most.len()].clamp(1, 1 << 30);
        if way == Way::Direct {
            let Alignment { offset, memory } = self.alignment;
            let whole = at.is_multiple_of(offset as u64) && dst.len().is_multiple_of(offset);
            let aligned = whole && dst.as_ptr().addr().is_multiple_of(memory);
            assert!(aligned, "{at} {} {:p}", dst.len(), dst.as_ptr());
            most = most.next_multiple_of(offset);
        }
        let start = (at as usize).min(self.bytes.len());
        let read = dst.len().min(most).min(self.bytes.len() - start);
        dst[..read].copy_from_slice(&self.bytes[start..start + read]);
        Ok(read)
    }
}

const MIB: usize = 1 << 20;

#[test]
fn each_part_is_read_in_its_way() {
    let (cached, cold) = ([true; 4], [false; 4]);
    let file = Fake::new(9 * MIB, &[cached, cold].concat());
    let reader = Reader::default();
    file.check(&reader, 100, 9 * MIB - 100);
    assert_eq!(file.ways(), [Way::Cached, Way::Direct, Way::Cached, Way::Direct, Way::Cached]);
    let ways = reader.ways();
    assert_eq!((ways.cached, ways.direct, ways.dropped), (5 * MIB as u64 - 100, 4 * MIB as u64, 0));
    assert_eq!(ways.refused, None);
    // Small reads ask nothing.
    let asked = file.asked.get();
    file.check(&reader, 3 * MIB, LEAST - 1);
    assert_eq!((file.asked.get(), file.ways().pop()), (asked, Some(Way::Cached)));
    let always = Reader::always_cached();
    file.check(&always, 0, 9 * MIB);
    assert_eq!(always.ways(), ReadWays { cached: 9 * MIB as u64, ..ReadWays::default() });
}

#[test]
fn what_is_refused_is_read_otherwise_and_not_asked_again() {
    for (refused, then) in [(vec![Way::Direct], Way::Dropped), (vec![Way::Direct, Way::Dropped], Way::Cached)] {
        let file = Fake { refused: refused.clone(), ..Fake::new(3 * MIB, &[false]) };
        let reader = Reader::default();
        file.check(&reader, 1, 2 * MIB);
        assert_eq!(file.ways(), [refused, vec![then]].concat());
        file.reads.borrow_mut().clear();
        file.check(&reader, MIB, MIB);
        assert_eq!(file.ways(), [then]);
        let ways = reader.ways();
        assert_eq!(ways.cached + ways.dropped, 3 * MIB as u64);
        assert!(ways.refused.unwrap().contains("refused"));
    }
}

/// A disk's error, and the end of a file that was cut short, reach the caller from every read, whichever way it goes.
#[test]
fn errors_reach_the_caller() {
    let disk_error = io::ErrorKind::Other;
    for cached in [true, false] {
        for fails in 0..4 {
            let file = Fake { most: vec![MIB / 2], fails: Some((fails, disk_error)), ..Fake::new(4 * MIB, &[cached]) };
            let error = Reader::default().read(&file, 7, &mut vec![0; 2 * MIB]).unwrap_err();
            assert_eq!(error.kind(), disk_error);
            // One that was interrupted is made again.
            let file = Fake { fails: Some((fails, io::ErrorKind::Interrupted)), ..file };
            file.reads.borrow_mut().clear();
            file.check(&Reader::default(), 7, 2 * MIB);
        }
        for missing in [1, 600, MIB, 2 * MIB] {
            let file = Fake::new(4 * MIB - missing, &[cached]);
            for at in [MIB + 3, 2 * MIB] {
                let error = Reader::default().read(&file, at as u64, &mut vec![0; 4 * MIB - at]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{missing} {at}");
                let mut buffer = vec![0; 4 * MIB];
                // A read to anywhere may stop before the end.
                let (mut from, mut outcome) = (at, Ok(0..0));
                while let Ok(found) = &outcome
                    && from < 4 * MIB
                {
                    assert_eq!(buffer[found.clone()], file.bytes[from - found.len()..from]);
                    outcome = Reader::default().read_within(&file, from as u64, 4 * MIB - from, &mut buffer);
                    from += outcome.as_ref().map_or(0, Range::len);
                }
                assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{missing} {at}");
            }
        }
    }
}

/// Where there is no memory for a direct read, the page cache has some.
#[test]
fn a_direct_read_without_memory_is_made_otherwise() {
    let file = Fake { fails: Some((0, io::ErrorKind::OutOfMemory)), ..Fake::new(3 * MIB, &[false]) };
    let reader = Reader::default();
    file.check(&reader, 1, 2 * MIB);
    assert_eq!((file.ways(), reader.ways().refused), (vec![Way::Direct, Way::Dropped], None));
}

/// Where a buffer has no room for the blocks around its bytes, no read of a few bytes is left over.
#[test]
fn no_small_rest_is_left() {
    let file = Fake::new(4 * MIB, &[false]);
    let (mut buffer, mut at, mut parts) = (vec![0; 2 * MIB + 512], 100, Vec::new());
    while at < 2 * MIB + 700 {
        let found = Reader::default().read_within(&file, at as u64, 2 * MIB + 700 - at, &mut buffer).unwrap();
        assert!(buffer[found.clone()] == file.bytes[at..at + found.len()]);
        at += found.len();
        parts.push(found.len());
    }
    assert!(parts.len() == 2 && parts.iter().all(|&bytes| bytes >= LEAST), "{parts:?}");
}

#[test]
fn odd_alignments_are_refused() {
    assert_eq!(Alignment::new(512, 4), Some(Alignment { offset: 512, memory: 4 }));
    for (offset, memory) in [(0, 512), (512, 0), (513, 512), (512, 24), (1 << 20, 512), (512, u32::MAX)] {
        assert_eq!(Alignment::new(offset, memory), None);
    }
}

fn alignment() -> impl Strategy<Value = Alignment> {
    let power = |most: u32| (0..=most).prop_map(|power| 1usize << power);
    (power(16), power(16)).prop_map(|(offset, memory)| Alignment { offset, memory })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the alignment, the cache, and how short each read is: the bytes are the file's.
    #[test]
    fn the_bytes_are_the_files(
        (len, at) in (0usize..3 * MIB).prop_flat_map(|len| (Just(len), 0..=len)),
        part in 0f64..=1.0,
        alignment in alignment(),
        cached in prop::collection::vec(any::<bool>(), 1..8),
        most in prop::collection::vec(prop_oneof![(MIB / 8)..MIB, Just(usize::MAX)], 1..4),
        offset in 0usize..600,
        (no_direct, no_drop, always) in any::<(bool, bool, bool)>(),
    ) {
        let refused = [(no_direct, Way::Direct), (no_drop, Way::Dropped)];
        let refused = refused.into_iter().filter(|(refused, _)| *refused).map(|(_, way)| way).collect();
        let file = Fake { alignment, most, refused, ..Fake::new(len, &cached) };
        let reader = if always && no_drop { Reader::always_cached() } else { Reader::default() };
        let wanted = ((len - at) as f64 * part) as usize;
        // Anywhere in memory.
        let mut dst = vec![0; offset + wanted];
        reader.read(&file, at as u64, &mut dst[offset..]).unwrap();
        prop_assert!(dst[offset..] == file.bytes[at..at + wanted]);
        let ways = reader.ways();
        prop_assert_eq!(ways.cached + ways.dropped + ways.direct, wanted as u64);
        // To wherever it may lie, as often as it takes.
        let mut buffer = vec![0; offset + wanted.max(1) + 7];
        let (mut done, mut calls) = (0, 0);
        while done < wanted {
            let found = reader.read_within(&file, (at + done) as u64, wanted - done, &mut buffer[offset..]).unwrap();
            prop_assert!(!found.is_empty());
            prop_assert!(buffer[offset..][found.clone()] == file.bytes[at + done..at + done + found.len()]);
            done += found.len();
            calls += 1;
        }
        prop_assert!(done == wanted && calls < 100);
    }
}
