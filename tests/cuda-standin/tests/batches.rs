//! Batches of copies, by both interfaces: what they copy, which of them is refused, and which rule a bad one breaks.

mod common;

use std::ffi::{c_int, c_uint, c_void};

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, Driver, Effect, Fault, FaultPlan, Rule, Session, session};
use cudarc::driver::sys::CUresult;

const LEN: usize = 64 << 10;
const STREAM: c_int = 1;
const DURING_CALL: c_int = 2;
const ANY: c_int = 3;
const DONE: Result<(), (u32, Option<usize>)> = Ok(());

/// The attributes of copies: when their sources are read.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    order: c_int,
    hints: [c_int; 4],
    flags: c_uint,
}

fn order(order: c_int) -> Attributes {
    Attributes { order, ..Attributes::default() }
}

type Batch128 = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut usize,
    *mut c_void,
) -> u32;
type Batch130 = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut c_void,
) -> u32;

/// Enqueues copies of `(to, from, bytes)` by the interface of the driver's version; the result and the number of the copy
/// at fault, where the interface tells.
fn batch(
    standin: &Driver,
    version: i32,
    copies: &[(u64, u64, usize)],
    attributes: &[(usize, Attributes)],
    stream: *mut c_void,
) -> Result<(), (u32, Option<usize>)> {
    let dsts: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
    let srcs: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
    let sizes: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
    let (firsts, kinds): (Vec<usize>, Vec<Attributes>) = attributes.iter().copied().unzip();
    let (dsts, srcs, sizes) = (dsts.as_ptr(), srcs.as_ptr(), sizes.as_ptr());
    let (count, of_kinds) = (copies.len(), kinds.len());
    let mut failed = usize::MAX - 1;
    // SAFETY: the calls have these types, and the arrays are as long as is said.
    let (result, failed) = unsafe {
        if version < 13_000 {
            let call: Batch128 = std::mem::transmute(standin.call("cuMemcpyBatchAsync").unwrap());
            let result =
                call(dsts, srcs, sizes, count, kinds.as_ptr(), firsts.as_ptr(), of_kinds, &raw mut failed, stream);
            (result, Some(failed))
        } else {
            let call: Batch130 = std::mem::transmute(standin.call("cuMemcpyBatchAsync_v2").unwrap());
            (call(dsts, srcs, sizes, count, kinds.as_ptr(), firsts.as_ptr(), of_kinds, stream), None)
        }
    };
    if result == 0 { Ok(()) } else { Err((result, failed)) }
}

fn machine(version: i32) -> Session {
    let config = Config::with_devices(&[64 * MIB, 64 * MIB]).all_peers().late_micros(10_000_000);
    session(&Config { driver_version: version, ..config })
}

fn address(host: *mut c_void) -> u64 {
    host.expose_provenance() as u64
}

const VERSIONS: [i32; 2] = [12_080, 13_000];
const INVALID: u32 = CUresult::CUDA_ERROR_INVALID_VALUE as u32;

/// Up from pinned and from ordinary memory, across, and down: each piece lands, in the order of the stream.
#[test]
fn a_batch_copies_each_of_its_pieces() {
    for version in VERSIONS {
        let standin = machine(version);
        let (other, cuda) = (Cuda::open(1), Cuda::open(0));
        cuda.enable_peer(&other);
        other.bind();
        let theirs = other.alloc(LEN);
        cuda.bind();
        let (stream, device) = (cuda.stream(), cuda.alloc(4 * LEN));
        let (pinned, back) = (cuda.pin(&pattern(2 * LEN, 1)), cuda.pin(&vec![0; 2 * LEN]));
        let mut ordinary = pattern(LEN, 2);
        let (source, local) = (address(pinned), ordinary.as_mut_ptr().expose_provenance() as u64);
        let up = [(device, source, LEN), (device + LEN as u64, source + LEN as u64, LEN), (theirs, source, LEN)];
        let with_local = [&up[..], &[(device + 2 * LEN as u64, local, LEN)]].concat();
        let kinds = [(0, order(STREAM)), (3, order(DURING_CALL))];
        assert_eq!(batch(&standin, version, &with_local, &kinds, stream.cast()), DONE);
        // It was read in the call.
        ordinary.fill(0);
        let (low, high) = (device + LEN as u64, device + 2 * LEN as u64);
        let down = [
            (address(back), low, LEN),
            (address(back) + LEN as u64, high, LEN),
            (device + 3 * LEN as u64, theirs, LEN),
        ];
        assert_eq!(batch(&standin, version, &down, &[(0, order(STREAM))], stream.cast()), DONE);
        cuda.synchronize(stream);
        assert!(cuda.host(back, 2 * LEN) == [&pattern(2 * LEN, 1)[LEN..], &pattern(LEN, 2)].concat());
        let mut landed = vec![0_u8; LEN];
        let at = landed.as_mut_ptr().expose_provenance() as u64;
        // Down to ordinary memory: over when the call returns.
        let last = [(at, device + 3 * LEN as u64, LEN)];
        assert_eq!(batch(&standin, version, &last, &[(0, order(ANY))], stream.cast()), DONE);
        assert!(landed == pattern(2 * LEN, 1)[..LEN]);
        let report = standin.report();
        report.assert_lawful();
        let call = if version < 13_000 { "cuMemcpyBatchAsync" } else { "cuMemcpyBatchAsync_v2" };
        assert_eq!((report.own_calls_of(call), report.pending), (3, 0));
    }
}

/// A batch with one piece that cannot be copied copies none, and the older interface says which it is.
#[test]
fn a_batch_that_is_refused_copies_nothing() {
    for version in VERSIONS {
        let standin = machine(version);
        let cuda = Cuda::open(0);
        let (stream, device, pinned) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
        cuda.fill(device, 9, LEN, stream);
        cuda.synchronize(stream);
        let good = (device, address(pinned), LEN);
        let kinds = [(0, order(STREAM))];
        let told = |index: usize| Err((INVALID, (version < 13_000).then_some(index)));
        let of_none = told(usize::MAX);
        let run = |copies: &[_], kinds: &[_], stream: *mut c_void| batch(&standin, version, copies, kinds, stream);
        assert_eq!(run(&[], &kinds, stream.cast()), of_none);
        assert_eq!(run(&[good], &[], stream.cast()), of_none);
        assert_eq!(run(&[good], &[(1, order(STREAM))], stream.cast()), of_none);
        assert_eq!(run(&[good], &[(0, order(STREAM)), (0, order(STREAM))], stream.cast()), of_none);
        assert_eq!(run(&[good], &kinds, std::ptr::null_mut()), of_none, "the legacy stream");
        assert_eq!(run(&[good], &[(0, order(0))], stream.cast()), told(0), "no such order");
        assert_eq!(run(&[good, (device, address(pinned), 0)], &kinds, stream.cast()), told(1));
        assert_eq!(standin.report().violations, []);
        assert_eq!(run(&[good, good, (device, address(pinned), LEN + 1)], &kinds, stream.cast()), told(2));
        let report = standin.report();
        assert!(report.count(Rule::OutOfBounds) == 1 && report.violations.len() == 1, "{report}");
        let mut there = vec![0_u8; LEN];
        // SAFETY: the slice lives during the call, which waits.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut there, device).unwrap() };
        assert!(there.iter().all(|&byte| byte == 9), "nothing was copied");
    }
}

/// The rules of single copies hold for each piece, against other work and against the other pieces.
#[test]
fn a_batch_is_held_to_the_rules_of_single_copies() {
    for version in VERSIONS {
        let caught = |rule: Rule, run: &dyn Fn(&Session, &Cuda, *mut c_void, u64, *mut c_void)| {
            let standin = machine(version);
            let cuda = Cuda::open(0);
            let (stream, device, pinned) = (cuda.stream(), cuda.alloc(2 * LEN), cuda.pin(&pattern(LEN, 1)));
            run(&standin, &cuda, stream.cast(), device, pinned);
            let report = standin.report();
            assert!(report.count(rule) == 1 && report.violations.len() == 1, "{version}, {}: {report}", rule.name());
            assert!(report.violations[0].call.starts_with("cuMemcpyBatchAsync"), "{report}");
        };
        let kinds = |order: Attributes| [(0, order)];
        // Of two pieces of one batch the second writes where the first does, or reads what the first writes.
        caught(Rule::Unordered, &|standin, _, stream, device, pinned| {
            let copies = [(device, address(pinned), LEN), (device + 8, address(pinned), LEN)];
            assert_eq!(batch(standin, version, &copies, &kinds(order(STREAM)), stream), DONE);
        });
        caught(Rule::Unordered, &|standin, _, stream, device, pinned| {
            let copies = [(device, address(pinned), LEN), (device + LEN as u64, device, LEN)];
            assert_eq!(batch(standin, version, &copies, &kinds(order(STREAM)), stream), DONE);
        });
        // Another stream's work.
        caught(Rule::Unordered, &|standin, cuda, stream, device, pinned| {
            cuda.fill(device, 1, LEN, cuda.stream());
            assert_eq!(batch(standin, version, &[(device, address(pinned), LEN)], &kinds(order(STREAM)), stream), DONE);
        });
        // Its own stream's, where the source is read in no order.
        caught(Rule::Unordered, &|standin, cuda, stream, device, pinned| {
            cuda.fill(device, 1, LEN, stream.cast());
            assert_eq!(batch(standin, version, &[(address(pinned), device, LEN)], &kinds(order(ANY)), stream), DONE);
        });
        // A source that is read by the stream and changed before that, pinned or not.
        let ordinary = std::cell::RefCell::new(pattern(LEN, 3));
        for pinned_source in [true, false] {
            caught(Rule::SourceChanged, &|standin, cuda, stream, device, pinned| {
                let at = if pinned_source { pinned } else { ordinary.borrow_mut().as_mut_ptr().cast() };
                assert_eq!(batch(standin, version, &[(device, address(at), LEN)], &kinds(order(STREAM)), stream), DONE);
                // SAFETY: as long as the copy; that the stream may read it meanwhile is what is tested.
                unsafe { at.cast::<u8>().write(0) };
                cuda.synchronize(stream.cast());
            });
        }
    }
}

/// A fault strikes the batch as one call: refused, or broken half way through.
#[test]
fn a_batch_is_one_call_to_a_fault() {
    for version in VERSIONS {
        let standin = machine(version);
        let call = if version < 13_000 { "cuMemcpyBatchAsync" } else { "cuMemcpyBatchAsync_v2" };
        let cuda = Cuda::open(0);
        let (stream, device, pinned) = (cuda.stream(), cuda.alloc(3 * LEN), cuda.pin(&pattern(3 * LEN, 1)));
        let copies = [0, 1, 2].map(|i| (device + (i * LEN) as u64, address(pinned) + (i * LEN) as u64, LEN));
        standin.fault(&FaultPlan::one(Fault::nth(call, 1, Effect::Fail(916))));
        let refused = batch(&standin, version, &copies, &[(0, order(STREAM))], stream.cast());
        assert_eq!(refused.unwrap_err().0, 916);
        standin.fault(&FaultPlan::one(Fault::nth(call, 1, Effect::Torn(719))));
        let back = cuda.pin(&vec![0; 3 * LEN]);
        assert_eq!(batch(&standin, version, &copies, &[(0, order(STREAM))], stream.cast()), DONE);
        let down = [0, 1, 2].map(|i| (address(back) + (i * LEN) as u64, device + (i * LEN) as u64, LEN));
        let _ = batch(&standin, version, &down, &[(0, order(STREAM))], stream.cast());
        // SAFETY: the stream is alive.
        let outcome = unsafe { cudarc::driver::result::stream::synchronize(stream) };
        assert_eq!(outcome.unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
        standin.report().assert_lawful();
    }
}
