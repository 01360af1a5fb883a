//! Runs a function of a module: all threads one after the other, on the memory that its parameters name.

use crate::backing::Backing;
use crate::code::Code;
use crate::lane::Place;
use crate::ptx::Function;
use crate::ptx_op::{Address, Kind, Special, Value, Width};
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
    pub(crate) code: Code,
    pub(crate) detail: String,
}

impl Launch {
    /// Runs all threads, unless `stopped` says that nobody wants the result any more.
    pub(crate) fn run(&self, stopped: impl Fn() -> bool) -> Result<(), Broken> {
        let mut registers = vec![RUBBISH; self.function.registers];
        for block in 0..self.blocks {
            if stopped() {
                return Ok(());
            }
            for y in 0..self.threads[1] {
                for x in 0..self.threads[0] {
                    registers.fill(RUBBISH);
                    Thread { launch: self, registers: &mut registers, place: [x, y, block] }.run()?;
                }
            }
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
        Err(Broken { code, detail: format!("{bytes} bytes at {address:#x}, {what} {}", self.function.name) })
    }
}

struct Thread<'a> {
    launch: &'a Launch,
    registers: &'a mut [u64],
    /// Its place across and down in the block, and the block's.
    place: [u32; 3],
}

impl Thread<'_> {
    fn run(&mut self) -> Result<(), Broken> {
        let (mut at, mut loops) = (0, 0u64);
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
                Kind::Load { dst, count, width, from, .. } => self.load(&dst[..usize::from(count)], width, from)?,
                Kind::Store { value, width, to } => self.store(value, width, to)?,
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
                        return Err(Broken { code: Code::LAUNCH_TIMEOUT, detail });
                    }
                    at = target;
                }
                Kind::Return => break,
            }
        }
        Ok(())
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
    fn load(&mut self, dst: &[u16], width: Width, from: Address) -> Result<(), Broken> {
        let bytes = width as usize;
        let at = self.launch.readable(self.address(from), (bytes * dst.len()) as u64)?;
        for (place, register) in dst.iter().enumerate() {
            let mut raw = [0; 8];
            // SAFETY: `readable` gives places inside of a table or of what the launch was given, for all of the vector.
            unsafe { std::ptr::copy_nonoverlapping(at.add(place * bytes), raw.as_mut_ptr(), bytes) };
            self.set(*register, u64::from_le_bytes(raw));
        }
        Ok(())
    }

    fn store(&mut self, value: Value, width: Width, to: Address) -> Result<(), Broken> {
        let at = self.launch.writable(self.address(to), width as u64)?;
        let raw = self.value(value).to_le_bytes();
        // SAFETY: `writable` gives places inside of what the launch was given.
        unsafe { std::ptr::copy_nonoverlapping(raw.as_ptr(), at, width as usize) };
        Ok(())
    }
}
