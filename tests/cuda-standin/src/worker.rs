//! What the thread of a stream does with each piece of work.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::backing::{checksum, copy};
use crate::lane::{Check, Copy, Lane, Op, Work, poison};
use crate::report::Rule;
use crate::shared::Shared;
use crate::sync::lock;
use crate::vendor::Vendor;

/// How often work that is held back looks whether the host waits for it.
const HELD_BACK_POLL: Duration = Duration::from_micros(200);

/// A copy that ends this much after its time was slower than its link: the time line follows it.
const LAG: Duration = Duration::from_micros(500);

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is running a function of the program for a stream; it must not call the driver then.
pub(crate) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// Works off a lane until it is closed and empty, or stopped.
pub(crate) fn run(lane: &Arc<Lane>, shared: &Arc<Shared>) {
    let mut chance = Chance::new(shared.config.seed, lane.index);
    while let Some(op) = lane.next() {
        let mut ready = op.enqueued.max(lane.time());
        for ticket in &op.after {
            ticket.wait();
            if ticket.lane.done() == ticket.epoch {
                ready = ready.max(ticket.lane.time());
            }
        }
        hold_back(lane, shared, &op);
        while op.spoil.held == Some(shared.plan.load(Ordering::Acquire)) && !lane.is_stopped() {
            lane.sleep_until(Instant::now() + HELD_BACK_POLL);
            ready = Instant::now();
        }
        let started = Instant::now();
        if op.spoil.stall_millis > 0 {
            lane.sleep_until(started + Duration::from_millis(op.spoil.stall_millis));
            ready = Instant::now();
        }
        let epoch = op.epoch;
        let end = catch_unwind(AssertUnwindSafe(|| perform(lane, shared, op, ready, &mut chance)));
        let end = end.unwrap_or_else(|_| {
            shared.violation(Rule::Panic, "worker", || "a worker of the stand-in panicked".to_owned());
            Instant::now()
        });
        lane.finish(epoch, end);
    }
}

fn hold_back(lane: &Lane, shared: &Shared, op: &Op) {
    while let Some(start) = shared.may_start(op.enqueued) {
        let now = Instant::now();
        if now >= start || lane.is_stopped() {
            return;
        }
        lane.sleep_until(start.min(now + HELD_BACK_POLL));
    }
}

/// Runs one piece of work; returns when it ended on the paced time line.
fn perform(lane: &Lane, shared: &Shared, op: Op, ready: Instant, chance: &mut Chance) -> Instant {
    // HIP calls functions of the program whatever became of the stream.
    let always = matches!(op.work, Work::Host(..)) && Vendor::of(op.call) == Vendor::Hip;
    if lane.is_stopped() || lane.ended(shared).is_some() && !always {
        return Instant::now();
    }
    if let Some(code) = op.spoil.breaks {
        if let Work::Copy(job) = &op.work
            && op.spoil.tears
        {
            // SAFETY: both ranges were checked against their allocations when the copy was enqueued.
            unsafe { copy(job.src.at(), job.dst.at(), job.len / 2) };
        }
        lane.fail(shared, code);
        return Instant::now();
    }
    match op.work {
        Work::Nothing => return ready,
        Work::Copy(copy) => return transfer(lane, shared, op.call, &copy, ready, chance),
        Work::Fill { dst, len, byte } => dst.backing.fill(dst.offset..dst.offset + len, byte),
        Work::Poison { backing, ranges } => poison(&backing, &ranges),
        Work::Kernel(launch) => {
            if let Err(broken) = launch.run(|| lane.is_stopped()) {
                shared.violation(broken.rule, op.call, || broken.detail);
                shared.break_device(lane.device, broken.code);
            }
        }
        Work::Host(host, clock) => {
            let _alone = lane.fate.as_ref().map(|fate| lock(&fate.functions));
            shared.tell(&clock);
            IN_HOST_FUNCTION.set(true);
            // SAFETY: the program handed the function and its argument over for exactly this call.
            unsafe { (host.function)(host.argument) };
            IN_HOST_FUNCTION.set(false);
        }
    }
    Instant::now()
}

/// Copies in pieces, each not before its share of the time the link takes.
fn transfer(
    lane: &Lane,
    shared: &Shared,
    call: &'static str,
    job: &Copy,
    ready: Instant,
    chance: &mut Chance,
) -> Instant {
    let source = job.src.at();
    // SAFETY: the place lies in its backing, which the job keeps alive.
    let fingerprint = || unsafe { checksum(source, job.len) };
    let expected = match job.check {
        Check::Never => None,
        Check::Taken(sum) => Some(sum),
        Check::AtStart => Some(fingerprint()),
    };
    let paced = shared.engines.reserve(&shared.config, job.route, job.len, ready);
    let piece = shared.config.piece_bytes.max(1);
    let mut at = 0;
    while at < job.len {
        if lane.is_stopped() {
            return Instant::now();
        }
        let len = piece.min(job.len - at);
        if let Some((start, end)) = paced {
            let share = (at + len) as f64 / job.len as f64;
            lane.sleep_until(start + end.duration_since(start).mul_f64(share));
        }
        // SAFETY: both ranges were checked against their allocations when the copy was enqueued.
        unsafe { copy(source.wrapping_add(at), job.dst.at().wrapping_add(at), len) };
        at += len;
        chance.pause(lane, shared.config.jitter_micros);
    }
    if job.lie {
        let wrong = job.dst.offset..job.dst.offset + job.len;
        job.dst.backing.fill(wrong, 0);
    }
    let now = Instant::now();
    // What a broken device still reads, nobody can wait for.
    let changed = |sum| lane.ended(shared).is_none() && sum != fingerprint();
    if expected.is_some_and(changed) {
        shared.violation(Rule::SourceChanged, call, || {
            format!("the pinned source of {} bytes at {source:p} changed before the copy had ended", job.len)
        });
    }
    paced.map_or(now, |(_, end)| if now > end + LAG { now } else { end })
}

/// A small generator that decides where a worker pauses.
#[derive(Debug)]
struct Chance(Option<u64>);

impl Chance {
    fn new(seed: Option<u64>, lane: u32) -> Chance {
        Chance(seed.map(|seed| (seed ^ (u64::from(lane) << 32) ^ 0x9E37_79B9_7F4A_7C15).max(1)))
    }

    fn pause(&mut self, lane: &Lane, micros: u64) {
        let Some(state) = &mut self.0 else { return };
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        match *state % 4 {
            0 => std::thread::yield_now(),
            1 if micros > 0 => lane.sleep_until(Instant::now() + Duration::from_micros(*state / 4 % micros)),
            _ => {}
        }
    }
}
