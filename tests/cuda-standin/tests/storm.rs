//! Random calls with good and bad arguments from several threads: every rule may break, the stand-in may not.

mod common;

use std::ffi::c_void;
use std::sync::Mutex;

use common::{Cuda, MIB, settled};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode, Rule, session};
use cudarc::driver::sys::{self, CUcontext, CUdeviceptr, CUevent, CUresult, CUstream};

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) as usize % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() { None } else { Some(from[self.roll(from.len())]) }
    }
}

/// Handles of all threads, dead ones too.
#[derive(Default)]
struct Things {
    streams: Vec<usize>,
    events: Vec<usize>,
    memory: Vec<CUdeviceptr>,
    pinned: Vec<usize>,
}

/// The result of a call is of no interest, nor whether its handle was kept.
fn done(_: (CUresult, ())) {}

const MOST: usize = 64 << 10;

/// One random call.
///
/// # Safety
/// `local` must stay alive until the driver is reset. With `frees_pinned`, freed pinned memory has to stay mapped.
unsafe fn step(
    dice: &mut Dice,
    contexts: [usize; 2],
    things: &Mutex<Things>,
    local: &'static [u8],
    frees_pinned: bool,
) {
    let mut all = things.lock().unwrap();
    let null = std::ptr::null_mut::<c_void>;
    let stream = dice.pick(&all.streams).unwrap_or_else(|| dice.roll(4)) as CUstream;
    let event = dice.pick(&all.events).unwrap_or(7) as CUevent;
    let (a, b) = (dice.pick(&all.memory).unwrap_or(9), dice.pick(&all.memory).unwrap_or(10));
    let (at, len) = (dice.roll(MOST) as u64, dice.roll(MOST));
    let pinned = dice.pick(&all.pinned).map_or_else(null, |p| p as *mut c_void);
    let context = contexts[dice.roll(2)] as CUcontext;
    let kind = dice.roll(26);
    let mut made = 0_usize;
    let out = &raw mut made;
    // SAFETY: the stand-in checks handles and device addresses; the only host memory that is given are `local`, which
    // lives on, and pinned memory, which the stand-in knows. Sources that are not pinned are within `local`.
    unsafe {
        match kind {
            0 => done((sys::cuStreamCreate(out.cast(), dice.roll(3) as u32), all.streams.push(made))),
            1 => done((sys::cuEventCreate(out.cast(), 0), all.events.push(made))),
            2 | 3 => done((sys::cuMemAlloc_v2(out.cast(), len), all.memory.push(made as u64))),
            4 => done((sys::cuMemAllocAsync(out.cast(), len, stream), all.memory.push(made as u64))),
            5 if all.pinned.len() < 40 => {
                done((sys::cuMemHostAlloc(out.cast(), MOST, dice.roll(2) as u32), all.pinned.push(made)));
            }
            _ => {}
        }
        drop(all);
        let _ = match kind {
            6 => sys::cuMemFree_v2(a),
            7 => sys::cuMemFreeAsync(a, stream),
            8 if dice.roll(4) == 0 && frees_pinned => sys::cuMemFreeHost(pinned),
            9 if dice.roll(4) == 0 => sys::cuStreamDestroy_v2(stream),
            10 if dice.roll(4) == 0 => sys::cuEventDestroy_v2(event),
            11 | 12 => sys::cuMemcpyHtoDAsync_v2(a + at / 4, pinned, len, stream),
            13 => sys::cuMemcpyHtoDAsync_v2(a, local.as_ptr().cast(), len.min(local.len()), stream),
            14 => sys::cuMemcpyDtoHAsync_v2(pinned, a + at / 4, len, stream),
            15 => sys::cuMemcpyDtoDAsync_v2(a + at / 4, b, len, stream),
            16 => sys::cuMemcpyPeerAsync(a, context, b, context, len, stream),
            17 => sys::cuMemsetD8Async(a + at, 3, len, stream),
            18 => sys::cuEventRecord(event, stream),
            19 => sys::cuStreamWaitEvent(stream, event, 0),
            20 => sys::cuEventQuery(event),
            21 => sys::cuEventSynchronize(event),
            22 => sys::cuStreamSynchronize(stream),
            23 => sys::cuCtxSetCurrent(context),
            24 => sys::cuCtxSynchronize(),
            25 => sys::cuCtxEnablePeerAccess(context, 0),
            _ => sys::cuStreamQuery(stream),
        };
    }
}

fn storm(config: &Config, seed: u64, plan: &FaultPlan) {
    static LOCAL: [u8; MOST] = [5; MOST];
    let standin = session(&Config { piece_bytes: 4096, jitter_micros: 20, ..config.clone() }.seed(seed));
    let contexts = [Cuda::open(0), Cuda::open(1)].map(|cuda| cuda.context as usize);
    standin.fault(plan);
    let things = Mutex::new(Things::default());
    // Where memory is handed out again, what is freed is unmapped, and a copy from it would be the program's own fault.
    let frees_pinned = config.memory == MemoryMode::Quarantine;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let things = &things;
            scope.spawn(move || {
                let mut dice = Dice(seed * 1000 + thread + 1);
                for _ in 0..400 {
                    // SAFETY: the memory is static, and freed pinned memory stays mapped in quarantine.
                    unsafe { step(&mut dice, contexts, things, &LOCAL, frees_pinned) };
                }
            });
        }
    });
    let report = settled(&standin);
    assert_eq!(report.count(Rule::Panic), 0, "seed {seed}:\n{report}");
    assert_eq!(report.pending, 0, "seed {seed}:\n{report}");
    assert!(report.violations.len() > 5, "no storm at all:\n{report}");
}

#[test]
fn no_order_of_calls_brings_it_down() {
    for seed in 1..=12 {
        let memory = if seed % 2 == 0 { MemoryMode::Reuse } else { MemoryMode::Quarantine };
        let config = Config::with_devices(&[4 * MIB, 2 * MIB]).all_peers().memory(memory);
        storm(&config.late_micros(seed % 3 * 100), seed, &FaultPlan::default());
    }
}

#[test]
fn nor_do_faults_in_the_middle_of_it() {
    for seed in 1..=12 {
        let effects = [Effect::OutOfMemory, Effect::LateSticky(700), Effect::Sticky(719), Effect::StallMillis(5)];
        let effect = effects[seed as usize % effects.len()];
        let config = Config::with_devices(&[4 * MIB, 2 * MIB]).all_peers();
        storm(&config, seed, &FaultPlan::one(Fault::any(seed * 40, effect)));
    }
}
