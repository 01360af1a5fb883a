//! Runs a function of a module on the memory that its parameters name: the blocks one after the other, and of a block the
//! threads one after the other, each to its end or to the next barrier.

use crate::backing::Backing;
use crate::code::Code;
use crate::lane::Place;
use crate::ptx::Function;
use crate::ptx_op::{Address, Kind, Space, Special, Value, Width};
use crate::ptx_shared::{Fault, Memory};
use crate::report::Rule;
use std::sync::Arc;

/// What a register holds before it is written.
const RUBBISH: u64 = 0xA5A5_A5A5_A5A5_A5A5;
/// Jumps back that one thread may take: more are taken for a loop without an end.
const MOST_LOOPS: u64 = 1 << 28;

/// A launch, ready to run.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) blocks: u32,
    /// Threads of a block, across and down.
    pub(crate) threads: [u32; 2],
    pub(crate) params: Vec<u64>,
    pub(crate) windows: Vec<Window>,
}

/// Memory that a launch may touch, from an address on.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) place: Place,
}

/// Why a launch broke its device, for the report.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) rule: Rule,
    pub(crate) code: Code,
    pub(crate) detail: String,
}

/// Where a thread is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the instruction of this number, and as many jumps back were taken.
    At(usize, u64),
    Ended,
}

impl Launch {
    /// Runs all threads, unless `stopped` says that nobody wants the result any more.
    pub(crate) fn run(&self, stopped: impl Fn() -> bool) -> Result<(), Broken> {
        let threads = (self.threads[0] * self.threads[1]) as usize;
        // Without a barrier no thread is left before its end, so all have the same registers in turn.
        let waits = self.function.code.iter().any(|op| matches!(op.kind, Kind::Barrier));
        let mut registers = vec![vec![RUBBISH; self.function.registers]; if waits { threads } else { 1 }];
        let mut shared = Memory::new(&self.function.shared);
        for block in 0..self.blocks {
            shared.forget();
            let mut states = vec![State::At(0, 0); threads];
            while states.iter().any(|state| *state != State::Ended) {
                if stopped() {
                    return Ok(());
                }
                self.to_barrier(block, &mut states, &mut registers, &mut shared)?;
                shared.barrier();
            }
        }
        Ok(())
    }

    /// Runs each thread of a block to its end or to the next barrier, which has to be the same for all.
    fn to_barrier(
        &self,
        block: u32,
        states: &mut [State],
        registers: &mut [Vec<u64>],
        shared: &mut Memory,
    ) -> Result<(), Broken> {
        let files = registers.len();
        for (number, state) in states.iter_mut().enumerate() {
            let registers = &mut registers[number % files];
            if *state == State::At(0, 0) {
                registers.fill(RUBBISH);
            }
            let number = number as u32;
            let place = [number % self.threads[0], number / self.threads[0], block];
            *state = Thread { launch: self, registers, shared, number, place }.run(*state)?;
        }
        let Some(other) = states.iter().position(|state| state.barrier() != states[0].barrier()) else {
            return Ok(());
        };
        let name = &self.function.name;
        let detail = format!("threads 0 and {other} of block {block} of {name} do not come to the same barrier");
        Err(Broken { rule: Rule::Unordered, code: Code::LAUNCH_TIMEOUT, detail })
    }

    /// The memory behind an address that is read from: in what the launch was given, or in a table.
    #[inline(always)]
    fn readable(&self, address: u64, bytes: u64) -> Result<*const u8, Broken> {
        let found = self.in_windows(address, bytes).map(<*mut u8>::cast_const);
        let in_tables = || self.function.tables.iter().find_map(|table| table.bytes_at(address, bytes));
        self.checked(found.or_else(|| in_tables().map(<[u8]>::as_ptr)), address, bytes)
    }

    /// The memory behind an address that is written to.
    #[inline(always)]
    fn writable(&self, address: u64, bytes: u64) -> Result<*mut u8, Broken> {
        self.checked(self.in_windows(address, bytes), address, bytes)
    }

    #[inline(always)]
    fn in_windows(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let window = self.windows.iter().find(|w| address.wrapping_sub(w.address) < w.len)?;
        let from = address - window.address;
        let backing: &Backing = &window.place.backing;
        (from + bytes <= window.len).then(|| backing.at(window.place.offset + from as usize))
    }

    /// What was found at an address, which has to be aligned to its bytes.
    #[inline(always)]
    fn checked<P>(&self, found: Option<P>, address: u64, bytes: u64) -> Result<P, Broken> {
        let (code, what) = match found {
            None => (Code::ILLEGAL_ADDRESS, "outside of what was given to"),
            Some(_) if !address.is_multiple_of(bytes) => (Code::MISALIGNED_ADDRESS, "not aligned, by"),
            Some(found) => return Ok(found),
        };
        let detail = format!("{bytes} bytes at {address:#x}, {what} {}", self.function.name);
        Err(Broken { rule: Rule::OutOfBounds, code, detail })
    }

    /// What an access to shared memory broke.
    fn broken(&self, fault: &Fault, number: u32, (address, bytes): (u64, u64)) -> Broken {
        let (rule, code, what) = match fault {
            Fault::Outside => (Rule::OutOfBounds, Code::ILLEGAL_ADDRESS, "outside of the shared memory"),
            Fault::Misaligned => (Rule::OutOfBounds, Code::MISALIGNED_ADDRESS, "in shared memory, not aligned"),
            Fault::NeverWritten => (Rule::Unordered, Code::LAUNCH_FAILED, "of shared memory that nobody has written"),
            Fault::Race => {
                (Rule::Unordered, Code::LAUNCH_FAILED, "of shared memory that another thread uses, no barrier between")
            }
        };
        let detail = format!("{bytes} bytes at {address:#x}, {what}, by thread {number} of {}", self.function.name);
        Broken { rule, code, detail }
    }
}

impl State {
    /// The barrier that a thread waits at; none behind its end.
    fn barrier(self) -> Option<usize> {
        match self {
            State::At(at, _) => Some(at),
            State::Ended => None,
        }
    }
}

struct Thread<'a> {
    launch: &'a Launch,
    registers: &'a mut [u64],
    shared: &'a mut Memory,
    /// Its number in the block.
    number: u32,
    /// Its place across and down in the block, and the block's.
    place: [u32; 3],
}

impl Thread<'_> {
    fn run(&mut self, from: State) -> Result<State, Broken> {
        let State::At(mut at, mut loops) = from else { return Ok(from) };
        while let Some(op) = self.launch.function.code.get(at) {
            at += 1;
            if op.guard.is_some_and(|guard| (self.registers[usize::from(guard.register)] != 0) == guard.negated) {
                continue;
            }
            match op.kind {
                Kind::Three { op, dst, a, b, c } => self.set(dst, op.of(self.value(a), self.value(b), self.value(c))),
                Kind::Four { op, dst, values } => self.set(dst, op.of(values.map(|value| self.value(value)))),
                Kind::Two { op, dst, a, b } => self.set(dst, op.of(self.value(a), self.value(b))),
                Kind::One { op, dst, a } => self.set(dst, op.of(self.value(a))),
                Kind::Load { dst, count, width, from, space } => {
                    self.load(&dst[..usize::from(count)], width, from, space)?;
                }
                Kind::Store { values, count, width, to, space } => {
                    self.store(&values[..usize::from(count)], width, to, space)?;
                }
                Kind::AtomicAdd { dst, value, to } => {
                    let at = self.launch.writable(self.address(to), 8)?.cast::<u64>();
                    // SAFETY: `writable` gives places inside of what the launch was given.
                    let old = unsafe { at.read_unaligned() };
                    // SAFETY: as above; threads run one after the other.
                    unsafe { at.write_unaligned(old.wrapping_add(self.value(value))) };
                    self.set(dst, old);
                }
                Kind::Table { dst, table } => self.set(dst, self.launch.function.tables[table].address),
                Kind::LoadParam { dst, param } => self.set(dst, self.launch.params[param]),
                Kind::Special { dst, what } => {
                    let [x, y, block] = self.place;
                    let value = match what {
                        Special::ThreadX => x,
                        Special::ThreadY => y,
                        Special::BlockX => block,
                    };
                    self.set(dst, value.into());
                }
                Kind::Branch(target) => {
                    loops += u64::from(target < at);
                    if loops > MOST_LOOPS {
                        let detail = format!("a thread of {} comes to no end", self.launch.function.name);
                        return Err(Broken { rule: Rule::OutOfBounds, code: Code::LAUNCH_TIMEOUT, detail });
                    }
                    at = target;
                }
                Kind::Barrier => return Ok(State::At(at, loops)),
                Kind::Return => break,
            }
        }
        Ok(State::Ended)
    }

    #[inline(always)]
    fn value(&self, value: Value) -> u64 {
        match value {
            Value::Register(register) => self.registers[usize::from(register)],
            Value::Number(number) => number,
        }
    }

    #[inline(always)]
    fn set(&mut self, register: u16, value: u64) {
        self.registers[usize::from(register)] = value;
    }

    fn address(&self, address: Address) -> u64 {
        self.registers[usize::from(address.base)].wrapping_add_signed(address.offset)
    }

    /// A vector is aligned to all of itself.
    fn load(&mut self, dst: &[u16], width: Width, from: Address, space: Space) -> Result<(), Broken> {
        let (address, one) = (self.address(from), width as usize);
        let bytes = one * dst.len();
        let mut raw = [0; 32];
        if space == Space::Shared {
            let found = self.shared.read(self.number, address, bytes as u64);
            let found = found.map_err(|fault| self.launch.broken(&fault, self.number, (address, bytes as u64)))?;
            raw[..bytes].copy_from_slice(found);
        } else {
            let at = self.launch.readable(address, bytes as u64)?;
            // SAFETY: `readable` gives places inside of a table or of what the launch was given, for all of the vector; a
            // vector is four numbers of eight bytes at the most.
            unsafe { std::ptr::copy_nonoverlapping(at, raw.as_mut_ptr(), bytes) };
        }
        for (register, raw) in dst.iter().zip(raw.chunks_exact(one)) {
            let mut number = [0; 8];
            number[..one].copy_from_slice(raw);
            self.set(*register, u64::from_le_bytes(number));
        }
        Ok(())
    }

    /// As `load`.
    fn store(&mut self, values: &[Value], width: Width, to: Address, space: Space) -> Result<(), Broken> {
        let (address, one) = (self.address(to), width as usize);
        let bytes = one * values.len();
        let mut raw = [0; 32];
        for (raw, value) in raw.chunks_exact_mut(one).zip(values) {
            raw.copy_from_slice(&self.value(*value).to_le_bytes()[..one]);
        }
        if space == Space::Shared {
            let place = self.shared.write(self.number, address, bytes as u64);
            let place = place.map_err(|fault| self.launch.broken(&fault, self.number, (address, bytes as u64)))?;
            place.copy_from_slice(&raw[..bytes]);
            return Ok(());
        }
        let at = self.launch.writable(address, bytes as u64)?;
        // SAFETY: `writable` gives places inside of what the launch was given, for all of the vector.
        unsafe { std::ptr::copy_nonoverlapping(raw.as_ptr(), at, bytes) };
        Ok(())
    }
}
