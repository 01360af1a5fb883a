//! Runs a function of a module on the memory that its parameters name: the blocks one after the other, and of a block the
//! threads one after the other, each to its end or to the next barrier. Where the lanes of a warp work together, each comes to
//! the next instruction of the warp before any goes on.

use crate::backing::Backing;
use crate::code::Code;
use crate::lane::Place;
use crate::ptx::Function;
use crate::ptx_op::{Address, Atomic, Kind, Shuffle, Space, Special, Value, Width};
use crate::ptx_shared::{Fault, Memory};
use crate::ptx_warp::{LANES, Turn, Uses, source};
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
    /// Where a bit is to be wrong afterwards.
    pub(crate) lie: Option<Place>,
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
        let code = &self.function.code;
        let of_warps = code.iter().any(|op| op.kind.is_of_warps());
        // Without a barrier no thread is left before its end, so all have the same registers in turn.
        let waits = of_warps || code.iter().any(|op| matches!(op.kind, Kind::Barrier));
        let mut block = Block {
            launch: self,
            number: 0,
            states: Vec::new(),
            registers: vec![vec![RUBBISH; self.function.registers]; if waits { threads } else { 1 }],
            shared: Memory::new(&self.function.shared),
            uses: of_warps.then(Uses::default),
            warp_barriers: 0,
        };
        for number in 0..self.blocks {
            block.begin(number, threads);
            while block.states.iter().any(|state| *state != State::Ended) {
                if stopped() {
                    return Ok(());
                }
                block.advance()?;
                block.shared.barrier();
            }
        }
        if let Some(place) = &self.lie {
            // SAFETY: the place lies in its backing, which a window keeps alive, too.
            unsafe { *place.at() ^= 1 };
        }
        Ok(())
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
        // Two parameters may point into the same memory.
        let holds = |w: &&Window| {
            let from = address.wrapping_sub(w.address);
            from < w.len && bytes <= w.len - from
        };
        let window = self.windows.iter().find(holds)?;
        let backing: &Backing = &window.place.backing;
        Some(backing.at(window.place.offset + (address - window.address) as usize))
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

/// A block of threads that runs.
struct Block<'a> {
    launch: &'a Launch,
    number: u32,
    states: Vec<State>,
    /// Of each thread, or of one for all.
    registers: Vec<Vec<u64>>,
    shared: Memory,
    /// Who used which bytes of global memory, where lanes work together.
    uses: Option<Uses>,
    /// The barriers of warps that were passed in this launch, by any warp: more than none for each between two of a warp's uses.
    warp_barriers: u32,
}

impl Block<'_> {
    fn begin(&mut self, number: u32, threads: usize) {
        self.number = number;
        self.shared.forget();
        self.states.clear();
        self.states.resize(threads, State::At(0, 0));
    }

    /// Runs each thread to its end or to the next barrier of the block, which has to be the same for all.
    fn advance(&mut self) -> Result<(), Broken> {
        for first in (0..self.states.len()).step_by(LANES) {
            let end = self.states.len().min(first + LANES);
            (first..end).try_for_each(|number| self.run(number))?;
            while let Some(at) = self.meeting(first..end)? {
                self.meet(at, first)?;
                (first..end).try_for_each(|number| self.run(number))?;
            }
        }
        let Some(other) = self.states.iter().position(|state| state.barrier() != self.states[0].barrier()) else {
            return Ok(());
        };
        Err(self.apart(0, other, "barrier"))
    }

    /// Runs a thread to its end, or to the next instruction at which others are waited for.
    fn run(&mut self, number: usize) -> Result<(), Broken> {
        let state = self.states[number];
        let file = number % self.registers.len();
        let registers = &mut self.registers[file];
        if state == State::At(0, 0) {
            registers.fill(RUBBISH);
        }
        let threads = self.states.len() as u64;
        let turn = Turn { thread: u64::from(self.number) * threads + number as u64, barriers: self.warp_barriers };
        let across = self.launch.threads[0];
        let number = number as u32;
        let place = [number % across, number / across, self.number];
        let (launch, shared, uses) = (self.launch, &mut self.shared, self.uses.as_mut());
        self.states[number as usize] = Thread { launch, registers, shared, uses, turn, number, place }.run(state)?;
        Ok(())
    }

    /// The instruction of the warp that its lanes have come to, all to the same one; none where they wait for the block, or ended.
    fn meeting(&self, lanes: std::ops::Range<usize>) -> Result<Option<usize>, Broken> {
        let waits = |state: State| {
            let at = state.barrier().map(|at| at.wrapping_sub(1));
            at.filter(|at| self.launch.function.code.get(*at).is_some_and(|op| op.kind.is_of_warps()))
        };
        let first = waits(self.states[lanes.start]);
        let other = lanes.clone().find(|lane| waits(self.states[*lane]) != first);
        match (first, other) {
            (_, Some(other)) => Err(self.apart(lanes.start, other, "instruction of their warp")),
            (Some(_), None) if lanes.len() < LANES => {
                Err(self.apart(lanes.start, lanes.end, "instruction of their warp"))
            }
            (first, None) => Ok(first),
        }
    }

    /// Does what the lanes of the warp have come together for.
    fn meet(&mut self, at: usize, first: usize) -> Result<(), Broken> {
        let value = |registers: &[u64], value: Value| match value {
            Value::Register(register) => registers[usize::from(register)] as u32,
            Value::Number(number) => number as u32,
        };
        let lanes = &mut self.registers[first..first + LANES];
        let members = match self.launch.function.code[at].kind {
            Kind::WarpBarrier { members } => {
                self.warp_barriers += 1;
                members
            }
            Kind::Shuffle(Shuffle { from, dst, found, value: given, by, limits, members }) => {
                let given: Vec<u32> = lanes.iter().map(|registers| value(registers, given)).collect();
                for (lane, registers) in lanes.iter_mut().enumerate() {
                    let (other, is_there) = source(from, lane as u32, value(registers, by), value(registers, limits));
                    registers[usize::from(dst)] = given[other as usize].into();
                    if let Some(found) = found {
                        registers[usize::from(found)] = is_there.into();
                    }
                }
                members
            }
            _ => return Ok(()),
        };
        if lanes.iter().all(|registers| value(registers, members) == u32::MAX) {
            return Ok(());
        }
        let detail = format!("a part of a warp of {} does without the others", self.launch.function.name);
        Err(Broken { rule: Rule::Unordered, code: Code::LAUNCH_FAILED, detail })
    }

    /// What is wrong where two threads wait for each other at different instructions.
    fn apart(&self, one: usize, other: usize, what: &str) -> Broken {
        let (block, name) = (self.number, &self.launch.function.name);
        let detail = format!("threads {one} and {other} of block {block} of {name} do not come to the same {what}");
        Broken { rule: Rule::Unordered, code: Code::LAUNCH_TIMEOUT, detail }
    }
}

struct Thread<'a> {
    launch: &'a Launch,
    registers: &'a mut [u64],
    shared: &'a mut Memory,
    uses: Option<&'a mut Uses>,
    turn: Turn,
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
                Kind::Prefetch { at } => self.launch.readable(self.address(at), 1).map(drop)?,
                Kind::Atomic { op, dst, value, to } => self.change(op, dst, value, to)?,
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
                Kind::Barrier | Kind::WarpBarrier { .. } | Kind::Shuffle(_) => return Ok(State::At(at, loops)),
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
            if space == Space::Global {
                self.note(address, bytes as u64, false)?;
            }
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
        self.note(address, bytes as u64, true)?;
        // SAFETY: `writable` gives places inside of what the launch was given, for all of the vector.
        unsafe { std::ptr::copy_nonoverlapping(raw.as_ptr(), at, bytes) };
        Ok(())
    }

    /// Changes a number in memory; threads run one after the other.
    fn change(&mut self, op: Atomic, dst: u16, value: Value, to: Address) -> Result<(), Broken> {
        let (address, value) = (self.address(to), self.value(value));
        let old = match op {
            Atomic::Add64 => {
                let at = self.launch.writable(address, 8)?.cast::<u64>();
                // SAFETY: `writable` gives places inside of what the launch was given.
                let old = unsafe { at.read_unaligned() };
                // SAFETY: as above.
                unsafe { at.write_unaligned(old.wrapping_add(value)) };
                old
            }
            Atomic::Or32 => {
                let at = self.launch.writable(address, 4)?.cast::<u32>();
                // SAFETY: as above.
                let old = unsafe { at.read_unaligned() };
                // SAFETY: as above.
                unsafe { at.write_unaligned(old | value as u32) };
                old.into()
            }
        };
        self.set(dst, old);
        Ok(())
    }

    /// Notes a use of global memory, which may not race with another thread's.
    fn note(&mut self, address: u64, bytes: u64, writes: bool) -> Result<(), Broken> {
        let Some(uses) = self.uses.as_mut() else { return Ok(()) };
        uses.note(self.turn, address, bytes, writes).map_err(|()| {
            let (number, name) = (self.number, &self.launch.function.name);
            let detail = format!(
                "{bytes} bytes at {address:#x} that another thread uses, no order between, by thread {number} of {name}"
            );
            Broken { rule: Rule::Unordered, code: Code::LAUNCH_FAILED, detail }
        })
    }
}
