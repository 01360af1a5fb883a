//! Reads against a file of which every answer of the system is made up.

use std::sync::atomic::AtomicUsize;
use std::sync::{LazyLock, Mutex};

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
    reads: Mutex<Vec<(Way, u64, usize)>>,
    asked: AtomicUsize,
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
            reads: Mutex::default(),
            asked: AtomicUsize::new(0),
        }
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways: Vec<Way> = self.reads.lock().unwrap().iter().map(|read| read.0).collect();
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
        self.asked.fetch_add(1, Ordering::Relaxed);
        let has = |at: &u64| self.cached[(at / STEP) as usize % self.cached.len()];
        Some((range.start.next_multiple_of(512)..range.end).step_by(512).filter(has).count() as u64 * 512)
    }

    fn direct(&self) -> Result<Alignment, NotDirect> {
        Ok(self.alignment)
    }

    fn read(&self, way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize> {
        let number = {
            let mut reads = self.reads.lock().unwrap();
            reads.push((way, at, dst.len()));
            reads.len() - 1
        };
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
    let asked = file.asked.load(Ordering::Relaxed);
    file.check(&reader, 3 * MIB, LEAST - 1);
    assert_eq!((file.asked.load(Ordering::Relaxed), file.ways().pop()), (asked, Some(Way::Cached)));
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
        file.reads.lock().unwrap().clear();
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
            file.reads.lock().unwrap().clear();
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

/// A file system may take any offset and ask for aligned memory all the same. A read that stops then leaves an address that is not.
#[test]
fn a_direct_read_that_stops_anywhere_is_not_continued_at_an_odd_address() {
    let alignment = Alignment { offset: 1, memory: 4 };
    let file = Fake { alignment, most: vec![411_051, usize::MAX], ..Fake::new(2 * MIB, &[false]) };
    for at in [0, 3, 1_000_001] {
        file.check(&Reader::default(), at, MIB - 77);
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

    /// Parts in any order, that touch, overlap, are empty or lie far apart: each gets the file's bytes, and no byte beside them is
    /// written.
    #[test]
    fn each_part_gets_its_bytes(
        parts in prop::collection::vec((0..LONG, prop_oneof![0..600usize, 0..MIB, 0..10 * MIB], 0usize..600), 0..12),
        end in prop_oneof![Just(LONG), (0..LONG)],
        neighbours in any::<bool>(),
        alignment in alignment(),
        cached in prop::collection::vec(any::<bool>(), 1..8),
        most in prop::collection::vec(prop_oneof![(MIB / 8)..MIB, Just(usize::MAX)], 1..4),
        interrupted in 0usize..8,
        (no_direct, no_drop, always) in any::<(bool, bool, bool)>(),
    ) {
        let refused = [(no_direct, Way::Direct), (no_drop, Way::Dropped)];
        let refused = refused.into_iter().filter(|(refused, _)| *refused).map(|(_, way)| way).collect();
        let fails = Some((interrupted, io::ErrorKind::Interrupted));
        let file = Fake { alignment, most, refused, fails, bytes: BYTES[..end].to_vec(), ..Fake::new(0, &cached) };
        let reader = if always && no_drop { Reader::always_cached() } else { Reader::default() };
        let mut from = 0;
        let places = parts.into_iter().map(|(at, len, offset)| {
            // Of a checkpoint, the next part begins where the last one ended, or some bytes later.
            let at = if neighbours { from + at % 300 } else { at }.min(end);
            let len = len.min(end - at);
            from = at + len;
            (at, len, offset)
        });
        let places: Vec<_> = places.collect();
        let mut memory: Vec<Vec<u8>> = places.iter().map(|(_, len, offset)| vec![0xa5; 2 * offset + len]).collect();
        let parts = memory.iter_mut().zip(&places);
        let parts = parts.map(|(dst, &(at, len, offset))| ReadPart::new(at as u64, &mut dst[offset..offset + len]));
        reader.read_parts(&file, parts.collect()).unwrap();
        for (dst, &(at, len, offset)) in memory.iter().zip(&places) {
            prop_assert!(dst[offset..offset + len] == file.bytes[at..at + len]);
            prop_assert!(dst[..offset].iter().chain(&dst[offset + len..]).all(|&byte| byte == 0xa5));
        }
        let ways = reader.ways();
        let wanted: usize = places.iter().map(|(_, len, _)| len).sum();
        prop_assert_eq!(ways.cached + ways.dropped + ways.direct, wanted as u64);
    }

    /// A file that ends early, and a disk's error, are errors of the whole, whichever chunk meets them.
    #[test]
    fn a_scattered_read_fails_as_a_whole(
        lens in prop::collection::vec(prop_oneof![1..600usize, 1..6 * MIB], 1..8),
        missing in 1usize..MIB,
        cached in any::<bool>(),
        at in 0usize..5000,
        fails in 0usize..4,
    ) {
        let end = (at + lens.iter().sum::<usize>()).min(LONG);
        let read = |file: &Fake| {
            let (mut memory, mut from) = (BYTES.to_vec(), at as u64);
            let (mut parts, mut rest) = (Vec::new(), &mut memory[..end - at]);
            for &len in &lens {
                let (dst, after) = rest.split_at_mut(len.min(rest.len()));
                parts.push(ReadPart::new(from, dst));
                (from, rest) = (from + len as u64, after);
            }
            Reader::default().read_parts(file, parts).map_err(|error| error.kind())
        };
        let short = Fake { bytes: BYTES[..end.saturating_sub(missing)].to_vec(), ..Fake::new(0, &[cached]) };
        prop_assert_eq!(read(&short), Err(io::ErrorKind::UnexpectedEof));
        let broken = Fake { bytes: BYTES[..end].to_vec(), fails: Some((fails, io::ErrorKind::Other)), ..Fake::new(0, &[cached]) };
        let failed = read(&broken);
        let reads = broken.reads.lock().unwrap().len();
        prop_assert_eq!(failed, if reads > fails { Err(io::ErrorKind::Other) } else { Ok(()) });
    }
}

/// A file of several chunks.
const LONG: usize = 20 * MIB;

static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| Fake::new(LONG, &[true]).bytes);

/// Small vectors between matrices cost no reads of their own, and chunks begin at whole multiples of their size.
#[test]
fn chunks_ignore_the_borders_of_parts() {
    let file = Fake { bytes: BYTES.clone(), ..Fake::new(0, &[false]) };
    let lens = [5 * MIB, 4096, 100, 0, 6 * MIB, 300, 5 * MIB];
    let mut memory = vec![0; lens.iter().sum()];
    let (mut parts, mut rest, mut at) = (Vec::new(), &mut memory[..], 1000);
    for len in lens {
        let (dst, after) = rest.split_at_mut(len);
        parts.push(ReadPart::new(at, dst));
        // What lies between is read too.
        (rest, at) = (after, at + len as u64 + 2000);
    }
    parts.reverse();
    let reader = Reader::default();
    reader.read_parts(&file, parts).unwrap();
    assert_eq!(reader.ways(), ReadWays { direct: memory.len() as u64, ..ReadWays::default() });
    let mut reads = file.reads.lock().unwrap().clone();
    reads.sort_by_key(|read| read.1);
    let starts: Vec<_> = reads.iter().map(|&(way, at, _)| (way, at)).collect();
    let chunks = (1..=16 * MIB as u64 / scatter::CHUNK).map(|chunk| (Way::Direct, chunk * scatter::CHUNK));
    assert_eq!(starts, [(Way::Direct, 512)].into_iter().chain(chunks).collect::<Vec<_>>());
}

#[test]
fn parts_are_divided_at_multiples() {
    let (mut one, mut two, mut three) = ([0; 10], [0; 3], [0; 0]);
    let parts = vec![ReadPart::new(1 << 40, &mut two), ReadPart::new(7, &mut one), ReadPart::new(3, &mut three)];
    let ranges = divide(parts, 8).into_iter().map(|parts| parts.iter().map(ReadPart::range).collect::<Vec<_>>());
    let ranges: Vec<_> = ranges.flatten().map(|range| (range.start, range.end)).collect();
    assert_eq!(ranges, [(7, 8), (8, 16), (16, 17), (1 << 40, (1 << 40) + 3)]);
}
