//! The contract of every backend, as checks that panic on a violation.
//!
//! Run them in a test of your own backend, for each pair of a device and a host:
//!
//! ```
//! use tensor_offload::DeviceId;
//! use tensor_offload::backend::{Backend, Host, conformance};
//!
//! let host = Host::new();
//! let (cpu, disk) = (host.open(DeviceId::CPU)?, host.open(DeviceId::DISK)?);
//! conformance::check(&*disk, &*cpu);
//! # Ok::<(), tensor_offload::Error>(())
//! ```

use std::fmt::Debug;
use std::time::{Duration, Instant};

use super::{Buf, BufMut, Decompress, Dequantise, Device, Health, Kernels, MemoryKind, Piece, Role, Stream, Transfer};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Missing};
use crate::float::Float;
use crate::ggml::Format;
use crate::lossless::{BLOCK_WEIGHTS, Code, CodePart, compress, longest_block};

/// The longest time that a check waits for anything.
const DEADLINE: Duration = Duration::from_secs(20);

/// The bytes that a check moves: an odd number, more than a page.
const BYTES: usize = 10_007;

/// A check with its name.
type Check = (&'static str, fn(&dyn Device, &dyn Device));

const CHECKS: [Check; 14] = [
    ("bytes come back", bytes_come_back),
    ("pieces land where they should", pieces_land_where_they_should),
    ("parts are filled by streams of their own", parts_are_filled_by_streams_of_their_own),
    ("copies follow each other", copies_follow_each_other),
    ("a copy waits for the readers of its destination", a_copy_waits_for_the_readers_of_its_destination),
    ("streams wait for events", streams_wait_for_events),
    ("dropped flights finish", dropped_flights_finish),
    ("pending memory is not seen", pending_memory_is_not_seen),
    ("a buffer is reclaimed by its last owner", a_buffer_is_reclaimed_by_its_last_owner),
    ("nothing passes the limit", nothing_passes_the_limit),
    ("wrong copies are refused", wrong_copies_are_refused),
    ("empty buffers work", empty_buffers_work),
    ("kernels compute the values of blocks", kernels_compute_the_values_of_blocks),
    ("kernels decode weights", kernels_decode_weights),
];

/// Runs every check on `device`, with `host` at the other end of its copies. Nobody else may use the two devices meanwhile,
/// and memory that was dropped before must already be back in their ledgers.
///
/// A backend may free memory a moment after its last use, on its own thread. So each check begins once both ledgers are at
/// their initial levels again.
///
/// # Panics
/// When the device breaks a promise of the traits.
pub fn check(device: &dyn Device, host: &dyn Device) {
    let levels = || [device, host].map(|device| device.ledger().charged_and_reserved());
    let before = levels();
    assert_eq!(device.health(), Health::Good);
    assert_eq!(device.ledger().reserved(), 0, "a charge without memory before anything was done");
    for (name, check) in CHECKS {
        check(device, host);
        comes_back(name, before, levels);
    }
}

/// Waits until the level is back at `before`.
fn comes_back<T: PartialEq + Debug>(what: &str, before: T, now: impl Fn() -> T) {
    let until = Instant::now() + DEADLINE;
    loop {
        let now = now();
        if now == before {
            return;
        }
        assert!(Instant::now() < until, "{what}: {now:?} is taken and does not come back to {before:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that differ between positions and between seeds.
fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn filled(host: &dyn Device, seed: u8) -> Buf {
    let mut buffer = host.alloc(BYTES, MemoryKind::Pinned).expect("host memory");
    buffer.host_mut().expect("fresh host memory can be written").copy_from_slice(&pattern(seed, BYTES));
    buffer.freeze()
}

fn upload(device: &dyn Device, src: &Buf) -> BufMut {
    let dst = device.alloc(src.bytes(), MemoryKind::Arena).expect("device memory");
    let stream = device.stream(Role::Upload).expect("a stream");
    stream.copy(Transfer::whole(src, dst).expect("a copy of equal sizes")).expect("a queued copy").chain()
}

fn download(device: &dyn Device, host: &dyn Device, src: &Buf) -> Vec<u8> {
    let dst = host.alloc_near(src.bytes(), MemoryKind::Pinned, device.id()).expect("host memory");
    let stream = device.stream(Role::Download).expect("a stream");
    let flight = stream.copy(Transfer::whole(src, dst).expect("a copy of equal sizes")).expect("a queued copy");
    let landed = flight.wait(DEADLINE).expect("the copy lands").freeze();
    landed.host(DEADLINE).expect("landed").expect("host memory").to_vec()
}

/// Keeps a stream busy: for `millis` milliseconds if it supports [`occupy`](Stream::occupy), else with copies of `src`.
fn busy(stream: &dyn Stream, millis: u64, src: &Buf, to: &dyn Device) {
    match stream.occupy(Duration::from_millis(millis)) {
        Err(Error::Missing(Missing::Occupy { .. })) => {
            let mut dst = to.alloc(src.bytes(), MemoryKind::Pinned).expect("memory");
            for _ in 0..32 {
                dst = stream.copy(Transfer::whole(src, dst).expect("fits")).expect("queued").chain();
            }
        }
        queued => queued.expect("work"),
    }
}

fn bytes_come_back(device: &dyn Device, host: &dyn Device) {
    for kind in [MemoryKind::Arena, MemoryKind::Whole] {
        let dst = device.alloc(BYTES, kind).expect("device memory");
        assert_eq!((dst.bytes(), dst.device()), (BYTES, device.id()));
        let stream = device.stream(Role::Upload).expect("a stream");
        let src = filled(host, 1);
        let flight = stream.copy(Transfer::whole(&src, dst).expect("fits")).expect("queued");
        let dst = flight.wait(DEADLINE).expect("lands").freeze();
        assert_eq!(download(device, host, &dst), pattern(1, BYTES));
    }
}

fn pieces_land_where_they_should(device: &dyn Device, host: &dyn Device) {
    let (a, b) = (filled(host, 2), filled(host, 3));
    let dst = upload(device, &filled(host, 4));
    let pieces = vec![
        Piece { src: a, from: 5..105, at: 7 },
        Piece { src: b.clone(), from: 0..3, at: 0 },
        Piece { src: b, from: BYTES - 50..BYTES, at: BYTES - 50 },
    ];
    let stream = device.stream(Role::Upload).expect("a stream");
    let dst = stream.copy(Transfer::new(pieces, dst).expect("fits")).expect("queued").chain().freeze();
    let mut want = pattern(4, BYTES);
    want[7..107].copy_from_slice(&pattern(2, BYTES)[5..105]);
    want[..3].copy_from_slice(&pattern(3, BYTES)[..3]);
    want[BYTES - 50..].copy_from_slice(&pattern(3, BYTES)[BYTES - 50..]);
    assert_eq!(download(device, host, &dst), want);
}

fn parts_are_filled_by_streams_of_their_own(device: &dyn Device, host: &dyn Device) {
    let mut first = upload(device, &filled(host, 5));
    let mut last = first.split_off(4_096).expect("longer");
    let mut middle = std::mem::replace(&mut last, first.split_off(4_096).expect("as long"));
    assert_eq!((first.bytes(), last.bytes(), middle.bytes()), (4_096, 0, BYTES - 4_096));
    let end = middle.split_off(1_000).expect("longer");
    assert!(middle.split_off(1_001).is_err() && middle.bytes() == 1_000, "a split that cannot be changes nothing");
    let source = filled(host, 6);
    let fill = |part: BufMut, from: usize| {
        let piece = Piece { src: source.clone(), from: from..from + part.bytes(), at: 0 };
        let stream = device.stream(Role::Upload).expect("a stream");
        stream.copy(Transfer::new(vec![piece], part).expect("fits")).expect("queued").chain()
    };
    let (first, middle) = (fill(first, 0), fill(middle, 4_096).freeze());
    assert_eq!(download(device, host, &middle), pattern(6, BYTES)[4_096..5_096], "a part is read from its place");
    let middle = middle.try_reclaim().expect("the last clone");
    let mut whole = first;
    let kept = whole.unsplit(end).expect_err("not the next part");
    whole
        .unsplit(last)
        .and_then(|()| whole.unsplit(middle))
        .and_then(|()| whole.unsplit(kept))
        .expect("the next parts");
    let mut want = pattern(5, BYTES);
    want[..5_096].copy_from_slice(&pattern(6, BYTES)[..5_096]);
    assert_eq!(download(device, host, &whole.freeze()), want);
}

fn copies_follow_each_other(device: &dyn Device, host: &dyn Device) {
    // Two streams into one buffer: the second copy waits for the first automatically.
    for round in 0..20 {
        let first = upload(device, &filled(host, round));
        let stream = device.stream(Role::Upload).expect("a stream");
        let second = filled(host, round ^ 0xff);
        let dst = stream.copy(Transfer::whole(&second, first).expect("fits")).expect("queued").chain().freeze();
        assert_eq!(download(device, host, &dst), pattern(round ^ 0xff, BYTES));
    }
}

fn a_copy_waits_for_the_readers_of_its_destination(device: &dyn Device, host: &dyn Device) {
    let compute = device.stream(Role::Compute).expect("a stream");
    let down = device.stream(Role::Download).expect("a stream");
    let slot = upload(device, &filled(host, 9)).freeze();
    // A reader that is still busy when the buffer is reclaimed.
    for event in slot.ready() {
        compute.wait(event).expect("a wait");
    }
    busy(&*compute, 20, &filled(host, 8), device);
    let read = Transfer::whole(&slot, host.alloc(BYTES, MemoryKind::Pinned).expect("memory")).expect("fits");
    let used = compute.record(std::slice::from_ref(&slot)).expect("an event");
    down.wait(&used).expect("a wait");
    let read = down.copy(read).expect("queued");
    let slot = slot.try_reclaim().expect("the last clone");
    assert!(!slot.pending().is_empty() || used.is_complete(), "the uses travel with the buffer");
    let stream = device.stream(Role::Upload).expect("a stream");
    let refill = filled(host, 10);
    let slot = stream.copy(Transfer::whole(&refill, slot).expect("fits")).expect("queued").chain().freeze();
    assert_eq!(download(device, host, &slot), pattern(10, BYTES));
    let old = read.wait(DEADLINE).expect("lands").freeze();
    assert_eq!(*old.host(DEADLINE).expect("landed").expect("host memory"), *pattern(9, BYTES), "refilled too early");
}

fn streams_wait_for_events(device: &dyn Device, host: &dyn Device) {
    let (a, b) = (device.stream(Role::Compute).expect("a stream"), device.stream(Role::Compute).expect("a stream"));
    busy(&*a, 20, &filled(host, 8), device);
    let first = a.record(&[]).expect("an event");
    b.wait(&first).expect("a wait");
    let second = b.record(&[]).expect("an event");
    second.wait(DEADLINE).expect("it fires");
    assert!(first.is_complete(), "the later event fired before the one it waits for");
}

fn dropped_flights_finish(device: &dyn Device, host: &dyn Device) {
    let before = device.ledger().charged();
    let stream = device.stream(Role::Upload).expect("a stream");
    busy(&*stream, 10, &filled(host, 8), device);
    for seed in 0..4 {
        let dst = device.alloc(BYTES, MemoryKind::Arena).expect("memory");
        let src = filled(host, seed);
        drop(stream.copy(Transfer::whole(&src, dst).expect("fits")).expect("queued"));
    }
    stream.record(&[]).expect("an event").wait(DEADLINE).expect("the copies finish");
    // The stream is still alive.
    comes_back("dropped memory", before, || device.ledger().charged());
}

fn pending_memory_is_not_seen(device: &dyn Device, host: &dyn Device) {
    let src = upload(device, &filled(host, 5)).freeze();
    let stream = device.stream(Role::Download).expect("a stream");
    // Before the stream is busy: a driver may wait for its work when it pins memory.
    let dst = host.alloc(BYTES, MemoryKind::Pinned).expect("memory");
    busy(&*stream, 20, &src, host);
    let mut dst = stream.copy(Transfer::whole(&src, dst).expect("fits")).expect("queued").chain();
    // A driver may finish a copy before its call returns. A copy still pending after the check was pending before it.
    let seen = dst.host_mut().is_some();
    assert!(!seen || dst.pending().is_empty(), "bytes that are being written are not to be seen");
    dst.wait_unused(DEADLINE).expect("lands");
    assert_eq!(*dst.host_mut().expect("settled"), *pattern(5, BYTES));
}

fn a_buffer_is_reclaimed_by_its_last_owner(device: &dyn Device, _host: &dyn Device) {
    let buffer = device.alloc(BYTES, MemoryKind::Arena).expect("memory").freeze();
    let clone = buffer.clone();
    let buffer = buffer.try_reclaim().expect_err("another clone reads it");
    drop(buffer);
    clone.try_reclaim().expect("the last clone");
}

fn nothing_passes_the_limit(device: &dyn Device, _host: &dyn Device) {
    let ledger = device.ledger();
    let (charged, limit) = (ledger.charged(), ledger.limit());
    let too_much = usize::try_from(limit - charged).map_or(usize::MAX, |bytes| bytes.saturating_add(1));
    let error = device.alloc(too_much, MemoryKind::Arena).expect_err("more than there is");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == too_much as u64));
    assert_eq!(ledger.charged(), charged, "a refused request takes nothing");
    let mut all = ledger.charge(BYTES as u64).expect("a charge");
    let part = device.allocate(all.split(7).expect("a part"), MemoryKind::Arena).expect("memory");
    assert_eq!((part.bytes(), ledger.charged()), (7, charged + BYTES as u64));
}

fn wrong_copies_are_refused(device: &dyn Device, host: &dyn Device) {
    let src = filled(host, 6);
    for (from, at) in [(0..BYTES, 1), (1..BYTES + 1, 0), (5..5, BYTES + 1), (0..2, usize::MAX)] {
        let dst = device.alloc(BYTES, MemoryKind::Arena).expect("memory");
        let piece = Piece { src: src.clone(), from, at };
        let rejected = Transfer::new(vec![piece], dst).expect_err("a piece outside");
        assert_eq!(rejected.error.kind(), ErrorKind::WrongSize);
        assert_eq!(rejected.dst.bytes(), BYTES, "the destination comes back");
    }
}

fn empty_buffers_work(device: &dyn Device, host: &dyn Device) {
    let src = host.alloc(0, MemoryKind::Pinned).expect("no memory").freeze();
    let dst = upload(device, &src).freeze();
    assert!(download(device, host, &dst).is_empty());
}

/// For every type that the device says it covers: the host's values, after the blocks have arrived, where they should be and nowhere
/// else.
fn kernels_compute_the_values_of_blocks(device: &dyn Device, host: &dyn Device) {
    let Some(kernels) = device.kernels() else { return };
    let (upload, compute) =
        (device.stream(Role::Upload).expect("a stream"), device.stream(Role::Compute).expect("a stream"));
    let source = pattern(11, BYTES);
    for (number, from) in DType::all().filter(|dtype| dtype.is_ggml_block()).enumerate() {
        let to = [DType::F32, DType::F16, DType::BF16][number % 3];
        let (Some(format), Some(float)) = (Format::of(from), Float::of(to)) else { continue };
        if kernels.dequantises(&*compute, from, to).is_err() {
            continue;
        }
        // Blocks at an odd byte, that are still on their way, and values behind others.
        let (offset, at, values) = (3, 64, 512);
        let before = host_bytes(host, &vec![0xa5; at + values * float.size() + 64]);
        let dst = device.alloc(before.bytes(), MemoryKind::Arena).expect("memory");
        let dst = upload.copy(Transfer::whole(&before, dst).expect("fits")).expect("queued").chain();
        let blocks = device.alloc(BYTES, MemoryKind::Arena).expect("memory");
        busy(&*upload, 1, &before, device);
        let blocks = upload.copy(Transfer::whole(&host_bytes(host, &source), blocks).expect("fits")).expect("queued");
        let work = Dequantise::new((blocks.chain().freeze(), offset, from), values, (dst, at, to)).expect("fits");
        let dst = kernels.dequantise(&*compute, work).expect("queued").chain().freeze();
        let mut wanted = vec![0.0; values];
        format.dequantise(&source[offset..offset + values / format.elements() * format.bytes()], &mut wanted);
        let mut stored = vec![0xa5; before.bytes()];
        float.round(&wanted, &mut stored[at..at + values * float.size()]);
        assert!(download(device, host, &dst) == stored, "{to} of {from}");
    }
}

/// For every type that the device says it covers: the weights that were coded, after the code has arrived, where they should be and
/// nowhere else; and a verdict that tells a damaged code among others.
fn kernels_decode_weights(device: &dyn Device, host: &dyn Device) {
    let Some(kernels) = device.kernels() else { return };
    let (upload, compute) =
        (device.stream(Role::Upload).expect("a stream"), device.stream(Role::Compute).expect("a stream"));
    let there = |bytes: &[u8]| {
        let dst = device.alloc(bytes.len(), MemoryKind::Arena).expect("memory");
        upload.copy(Transfer::whole(&host_bytes(host, bytes), dst).expect("fits")).expect("queued").chain()
    };
    for (number, dtype) in DType::all().enumerate() {
        if kernels.decompresses(&*compute, dtype).is_err() {
            continue;
        }
        // Few exponents, so that there is something to code.
        let weights: Vec<u8> = pattern(number as u8, BYTES / 4 * 4).iter().map(|byte| byte & 0x87 | 0x38).collect();
        let code = compress(dtype, &weights).expect("a type that is covered has a code");
        let info = *Code::open(&code).expect("just made").info();
        let mut damaged = code.clone();
        damaged[code.len() - weights.len() / 8] ^= 1;
        let (offset, at, place) = (16, 64, 16);
        let (before, mut told) = (vec![0xa5; at + weights.len() + 64], there(&[[0xa5; 16], [0; 16]].concat()));
        for (code, is_sound) in [(&code, true), (&damaged, false), (&code, false)] {
            busy(&*upload, 1, &host_bytes(host, &before), device);
            let (src, dst) = (there(&[&[0; 16], &code[..]].concat()).freeze(), there(&before));
            let work = Decompress::new((src, offset), info, (dst, at), (told, place)).expect("fits");
            let flight = kernels.decompress(&*compute, work).expect("queued");
            let (decoded, verdict) = (flight.weights.chain().freeze(), flight.verdict.chain().freeze());
            let (decoded, told_now) = (download(device, host, &decoded), download(device, host, &verdict));
            let of_all = told_now[place..].first_chunk().expect("a verdict");
            assert_eq!(Decompress::is_sound(of_all), is_sound, "the verdict on a code of {dtype}");
            assert_eq!(told_now[..place], [0xa5; 16], "what stands before a verdict");
            let (head, others) = decoded.split_at(at);
            let (inside, tail) = others.split_at(weights.len());
            assert!(inside == weights || code == &damaged, "weights of {dtype}");
            assert!(head.iter().chain(tail).all(|byte| *byte == 0xa5), "outside of the weights of {dtype}");
            told = verdict.try_reclaim().expect("the only handle");
        }
        kernels_decode_parts((device, host), kernels, &*compute, (dtype, number as u8));
    }
}

/// A code of some blocks in three parts, each of which arrives with header and index: the weights that were coded, and a verdict on all.
fn kernels_decode_parts(
    (device, host): (&dyn Device, &dyn Device),
    kernels: &dyn Kernels,
    stream: &dyn Stream,
    (dtype, seed): (DType, u8),
) {
    let size = dtype.element_bytes().expect("a type that is coded");
    let random = pattern(seed, (3 * BLOCK_WEIGHTS - 7) * size);
    let coded: Vec<u8> = random.iter().map(|byte| byte & 0x87 | 0x38).collect();
    // Random weights are not worth coding.
    for weights in [coded, random] {
        kernels_decode_parts_of((device, host), kernels, stream, dtype, &weights);
    }
}

fn kernels_decode_parts_of(
    (device, host): (&dyn Device, &dyn Device),
    kernels: &dyn Kernels,
    stream: &dyn Stream,
    dtype: DType,
    weights: &[u8],
) {
    let size = dtype.element_bytes().expect("a type that is coded");
    let code = compress(dtype, weights).expect("a type that is covered has a code");
    let info = *Code::open(&code).expect("just made").info();
    let (head, longest) = (info.head_bytes() as usize, longest_block(size as u64) as usize);
    let upload = device.stream(Role::Upload).expect("a stream");
    let there = |bytes: &[u8]| {
        let dst = device.alloc(bytes.len(), MemoryKind::Arena).expect("memory");
        upload.copy(Transfer::whole(&host_bytes(host, bytes), dst).expect("fits")).expect("queued").chain()
    };
    // The last byte pads the weights or the last block, if anything does.
    for damaged_at in [None, Some(20), Some(1)] {
        let (mut dst, mut told) = (there(&vec![0xa5; weights.len()]), there(&[0; Decompress::VERDICT]));
        let (mut after, third) = (0, code.len() / 3 / 16 * 16);
        for end in [third, 2 * third, code.len()] {
            let begin = after.max(longest) - longest;
            let part = CodePart { begin: begin as u64, after: after as u64, end: end as u64 };
            let mut bytes = [&code[..head], &code[begin..end]].concat();
            if let Some(before) = damaged_at.filter(|_| end == code.len()) {
                let at = bytes.len() - before;
                bytes[at] ^= 1;
            }
            let src = there(&bytes).freeze();
            let work = Decompress::part((src, 0), info, (part, head), (dst, 0), (told, 0)).expect("fits");
            let flight = kernels.decompress(stream, work).expect("queued");
            (dst, told, after) = (flight.weights.chain(), flight.verdict.chain(), end);
        }
        let (decoded, told) = (download(device, host, &dst.freeze()), download(device, host, &told.freeze()));
        let is_sound = Decompress::is_sound(told.first_chunk().expect("a verdict"));
        assert_eq!(
            is_sound,
            damaged_at.is_none(),
            "the verdict on parts of a code of {dtype}, damaged at {damaged_at:?}"
        );
        assert!(damaged_at.is_some() || decoded == weights, "weights of {dtype} in parts");
    }
}

/// Bytes in host memory.
fn host_bytes(host: &dyn Device, bytes: &[u8]) -> Buf {
    let mut buffer = host.alloc(bytes.len(), MemoryKind::Pinned).expect("host memory");
    buffer.host_mut().expect("fresh host memory can be written").copy_from_slice(bytes);
    buffer.freeze()
}
