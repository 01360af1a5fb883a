//! Counted time: the same to the nanosecond however late, in pieces and slowly the work really runs.

mod common;

use std::ffi::c_void;
use std::time::Duration;

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, Counted, Effect, Fault, FaultPlan, Link, Peer, Session, session};
use cudarc::driver::result;
use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
use cudarc::driver::sys::{CUevent, CUstream};

const LEN: usize = 1_000_000;

/// Two devices, 1 ms for a copy of `LEN` bytes up and 2 ms down, and 5 ms for a function of the program.
fn machine() -> Config {
    let mut config = Config::with_devices(&[64 * MIB, 64 * MIB]);
    for device in &mut config.devices {
        device.to_device = Link::new(1_000_000_000, 0);
        device.to_host = Link::new(500_000_000, 0);
    }
    config.peers = vec![Peer { link: Link::new(250_000_000, 1000), ..Peer::new(0, 1) }];
    Config { function_micros: 5000, piece_bytes: 64 << 10, ..config }
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn counted(standin: &Session) -> Counted {
    standin.report().counted
}

fn timed(stream: CUstream) -> CUevent {
    let event = result::event::create(CU_EVENT_DEFAULT).unwrap();
    // SAFETY: both handles are alive.
    unsafe { result::event::record(event, stream).unwrap() };
    event
}

/// Time that a stream is taken for by a function that does nothing.
fn compute(stream: CUstream) {
    unsafe extern "C" fn nothing(_: *mut c_void) {}
    // SAFETY: the function asks nothing of its argument.
    unsafe { result::stream::launch_host_function(stream, nothing, std::ptr::null_mut()).unwrap() };
}

#[test]
fn events_measure_what_the_links_say() {
    let standin = session(&Config::with_devices(&[64 * MIB]).links(Link::new(64 << 20, 10_000)));
    let cuda = Cuda::open(0);
    let (stream, source) = (cuda.stream(), cuda.pin(&pattern(4 * MIB as usize, 5)));
    let device = cuda.alloc(4 * MIB as usize);
    let start = timed(stream);
    for _ in 0..2 {
        cuda.upload(device, source, 4 * MIB as usize, stream);
    }
    let end = timed(stream);
    cuda.synchronize(stream);
    // 8 MiB at 64 MiB/s, and what each copy costs beside its bytes.
    // SAFETY: events are alive.
    let (there, back) =
        unsafe { (result::event::elapsed(start, end).unwrap(), result::event::elapsed(end, start).unwrap()) };
    assert_eq!((there, back), (125.02, -125.02));
    assert_eq!(counted(&standin).busy("to device 0"), Duration::from_micros(125_020));
}

/// Copies and compute of two streams side by side, one behind the other where an event says so.
#[test]
fn streams_run_side_by_side_and_after_what_they_wait_for() {
    for config in [machine(), machine().late_micros(2000), machine().seed(3)] {
        let standin = session(&config);
        let cuda = Cuda::open(0);
        let (up, down, run) = (cuda.stream(), cuda.stream(), cuda.stream());
        let (a, b, host) = (cuda.alloc(LEN), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
        let back = cuda.pin(&vec![0; LEN]);
        cuda.upload(a, host, LEN, up); // 0 to 1
        cuda.wait(run, cuda.record(up));
        compute(run); // 1 to 6
        cuda.upload(b, host, LEN, up); // 1 to 2
        cuda.wait(down, cuda.record(up));
        cuda.download(back, b, LEN, down); // 2 to 4
        assert_eq!(counted(&standin).end(), millis(6));
        cuda.wait(up, cuda.record(run));
        cuda.upload(a, host, LEN, up); // 6 to 7
        // On another stream there is room on the link before that.
        let other = cuda.stream();
        cuda.wait(other, cuda.record(down));
        cuda.upload(b, host, LEN, other); // 4 to 5
        cuda.wait(down, cuda.record(other));
        cuda.download(back, b, LEN, down); // 5 to 7
        assert_eq!(counted(&standin).end(), millis(7));
        let busy = counted(&standin);
        assert_eq!((busy.busy("to device 0"), busy.busy("from device 0")), (millis(4), millis(4)));
        standin.report().assert_lawful();
    }
}

/// One copy engine serves both directions, links of two devices are apart, and peers have their own.
#[test]
fn each_link_is_taken_by_its_own_copies() {
    let mut config = machine();
    config.devices[0].copy_engines = 1;
    let standin = session(&config);
    let (one, zero) = (Cuda::open(1), Cuda::open(0));
    let (up, down, host) = (zero.stream(), zero.stream(), zero.pin(&pattern(LEN, 1)));
    let (a, b) = (zero.alloc(LEN), zero.alloc(LEN));
    zero.upload(a, host, LEN, up);
    zero.download(zero.pin(&vec![0; LEN]), b, LEN, down);
    assert_eq!((counted(&standin).end(), counted(&standin).busy("to device 0")), (millis(3), millis(3)));
    one.bind();
    let (stream, there) = (one.stream(), one.alloc(LEN));
    one.upload(there, host, LEN, stream);
    assert_eq!((counted(&standin).end(), counted(&standin).busy("to device 1")), (millis(3), millis(1)));
    one.synchronize(stream);
    zero.bind();
    zero.synchronize(up);
    zero.enable_peer(&one);
    // SAFETY: contexts, memory and stream are alive.
    unsafe { result::memcpy_peer_async(one.context, there, zero.context, a, LEN, down).unwrap() };
    // Behind the copy of its stream, which ended at 3: 4 ms and a microsecond.
    assert_eq!(counted(&standin).end(), Duration::from_micros(7001));
    assert_eq!(counted(&standin).busy("device 0 to device 1"), Duration::from_micros(4001));
}

/// What a thread enqueues begins after the ends that it has seen, and not after those that another one has.
#[test]
fn a_thread_is_after_what_it_has_seen() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    let (first, second, third) = (cuda.stream(), cuda.stream(), cuda.stream());
    let (a, host) = (cuda.alloc(4 * LEN), cuda.pin(&pattern(LEN, 1)));
    compute(first); // 0 to 5
    cuda.synchronize(first);
    cuda.upload(a, host, LEN, second); // 5 to 6
    assert_eq!(counted(&standin).end(), millis(6));
    // Handles and addresses may go to another thread.
    let (context, stream, source) = (cuda.context as usize, third as usize, host as usize);
    let (device, target) = (cuda.device, a + LEN as u64);
    let elsewhere = move || {
        let cuda = Cuda { device, context: context as _ };
        cuda.bind();
        cuda.upload(target, source as _, LEN, stream as _); // 0 to 1
        compute(stream as _); // 1 to 6
    };
    std::thread::spawn(elsewhere).join().unwrap();
    assert_eq!(counted(&standin).end(), millis(6));
    compute(third); // 6 to 11
    assert_eq!((standin.mark(), standin.mark()), (millis(11), millis(11)));
    cuda.upload(a + 2 * LEN as u64, host, LEN, cuda.stream());
    assert_eq!(counted(&standin).end(), millis(12), "not before the mark");
}

#[test]
fn work_that_is_held_runs_when_the_plan_is_replaced() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    let (stream, a, host) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
    cuda.upload(a, host, LEN, stream);
    assert_eq!(standin.report().pending, 1, "it waited two seconds for it");
    standin.no_faults();
    cuda.synchronize(stream);
    assert_eq!((standin.report().pending, counted(&standin).end()), (0, millis(1)));
}
