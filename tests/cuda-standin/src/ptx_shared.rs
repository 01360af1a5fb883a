//! The memory that the threads of a block share: its arrays, its bytes, and who used them since the last barrier.

use std::collections::HashMap;

use crate::ptx::Refusal;

/// What shared memory holds before it is written.
const RUBBISH: u8 = 0xA5;
/// More than any device has.
const MOST: u64 = 1 << 18;

/// The arrays that a function declares.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    addresses: HashMap<String, u64>,
    begin: u64,
    end: u64,
}

impl Layout {
    /// Takes in `.shared .align 16 .b8 NAME[512]`. Its address is a multiple of its alignment, and of nothing more.
    pub(crate) fn declare(&mut self, declaration: &str) -> Result<(), Refusal> {
        let refused = || format!("`{declaration}`");
        let [".shared", ".align", align, ".b8", name] = declaration.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(refused());
        };
        let align: u64 = align.parse().ok().filter(|align| [1, 2, 4, 8, 16].contains(align)).ok_or_else(refused)?;
        let (name, count) = name.strip_suffix(']').and_then(|name| name.split_once('[')).ok_or_else(refused)?;
        let count: u64 = count.parse().ok().filter(|count| (1..=MOST).contains(count)).ok_or_else(refused)?;
        let at = self.end.next_multiple_of(2 * align) + align;
        if at + count > MOST || self.addresses.insert(name.to_owned(), at).is_some() {
            return Err(refused());
        }
        if self.addresses.len() == 1 {
            self.begin = at;
        }
        self.end = at + count;
        Ok(())
    }

    pub(crate) fn address(&self, name: &str) -> Option<u64> {
        self.addresses.get(name).copied()
    }

    /// The bytes of all arrays, with what lies between them.
    pub(crate) fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// Who used a byte last: number of the thread, and of the barrier before it.
#[derive(Clone, Copy, Default)]
struct Used {
    /// 0 where nobody did.
    wrote: u32,
    wrote_in: u32,
    read: u32,
    read_in: u32,
}

/// In the place of a thread's number: several.
const SEVERAL: u32 = u32::MAX;

/// A block's shared memory while it runs.
pub(crate) struct Memory {
    begin: u64,
    bytes: Vec<u8>,
    used: Vec<Used>,
    /// The barriers that were passed.
    barriers: u32,
}

/// Why an access is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Outside,
    Misaligned,
    /// Nobody wrote what is read.
    NeverWritten,
    /// Another thread uses the same bytes with no barrier between, and one of both writes.
    Race,
}

impl Memory {
    pub(crate) fn new(layout: &Layout) -> Memory {
        let count = layout.bytes() as usize;
        Memory { begin: layout.begin, bytes: vec![RUBBISH; count], used: vec![Used::default(); count], barriers: 0 }
    }

    /// What the next block finds.
    pub(crate) fn forget(&mut self) {
        self.bytes.fill(RUBBISH);
        self.used.fill(Used::default());
        self.barriers = 0;
    }

    pub(crate) fn barrier(&mut self) {
        self.barriers += 1;
    }

    fn range(&self, address: u64, count: u64) -> Result<std::ops::Range<usize>, Fault> {
        let from = address.checked_sub(self.begin).and_then(|from| usize::try_from(from).ok());
        let range = from.and_then(|from| Some(from..from.checked_add(count as usize)?));
        let range = range.filter(|range| range.end <= self.bytes.len()).ok_or(Fault::Outside)?;
        if address.is_multiple_of(count) { Ok(range) } else { Err(Fault::Misaligned) }
    }

    /// Reads `count` bytes for the thread of this number.
    pub(crate) fn read(&mut self, thread: u32, address: u64, count: u64) -> Result<&[u8], Fault> {
        let range = self.range(address, count)?;
        for used in &mut self.used[range.clone()] {
            if used.wrote == 0 {
                return Err(Fault::NeverWritten);
            }
            if used.wrote_in == self.barriers && used.wrote != thread + 1 {
                return Err(Fault::Race);
            }
            let others = used.read != 0 && used.read_in == self.barriers && used.read != thread + 1;
            (used.read, used.read_in) = (if others { SEVERAL } else { thread + 1 }, self.barriers);
        }
        Ok(&self.bytes[range])
    }

    /// The bytes for the thread of this number to write.
    pub(crate) fn write(&mut self, thread: u32, address: u64, count: u64) -> Result<&mut [u8], Fault> {
        let range = self.range(address, count)?;
        for used in &mut self.used[range.clone()] {
            let wrote = used.wrote != 0 && used.wrote_in == self.barriers && used.wrote != thread + 1;
            let read = used.read != 0 && used.read_in == self.barriers && used.read != thread + 1;
            if wrote || read {
                return Err(Fault::Race);
            }
            (used.wrote, used.wrote_in) = (thread + 1, self.barriers);
        }
        Ok(&mut self.bytes[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> (u64, Memory) {
        let mut layout = Layout::default();
        layout.declare(".shared .align 4 .b8 small[6]").unwrap();
        layout.declare(".shared .align 16 .b8 slices[32]").unwrap();
        let at = layout.address("slices").unwrap();
        assert_eq!((at % 32, layout.address("small").unwrap() % 8, layout.address("other")), (16, 4, None));
        (at, Memory::new(&layout))
    }

    #[test]
    fn what_is_no_array_of_bytes_is_refused() {
        for refused in [
            ".shared .align 3 .b8 name[4]",
            ".shared .align 4 .b8 name[0]",
            ".shared .align 4 .b8 name[300000]",
            ".shared .align 4 .b32 name[4]",
            ".shared .align 4 .b8 name",
            ".shared .b8 name[4]",
        ] {
            assert!(Layout::default().declare(refused).is_err(), "{refused}");
        }
        let mut twice = Layout::default();
        twice.declare(".shared .align 4 .b8 name[4]").unwrap();
        assert!(twice.declare(".shared .align 4 .b8 name[8]").is_err());
    }

    #[test]
    fn what_one_thread_writes_another_reads_behind_a_barrier() {
        let (at, mut memory) = memory();
        memory.write(0, at, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
        assert_eq!(memory.read(0, at, 2), Ok(&[1, 2][..]));
        assert_eq!(memory.read(1, at, 4), Err(Fault::Race));
        memory.barrier();
        assert_eq!(memory.read(1, at, 4), Ok(&[1, 2, 3, 4][..]));
        assert_eq!(memory.read(2, at + 2, 1), Ok(&[3][..]));
        for thread in 0..3 {
            assert_eq!(memory.write(thread, at + 2, 1), Err(Fault::Race), "{thread}");
        }
        assert_eq!(memory.write(2, at, 4), Err(Fault::Race));
        memory.barrier();
        memory.write(2, at, 4).unwrap().fill(9);
        assert_eq!(memory.write(1, at, 1), Err(Fault::Race));
        memory.forget();
        assert_eq!(memory.read(2, at, 1), Err(Fault::NeverWritten));
    }

    #[test]
    fn an_access_is_inside_and_aligned_to_all_of_itself() {
        let (at, mut memory) = memory();
        assert!(memory.write(0, at + 16, 16).is_ok());
        assert_eq!(memory.write(0, at + 8, 16), Err(Fault::Misaligned));
        assert_eq!(memory.read(0, at + 18, 4), Err(Fault::Misaligned));
        for outside in [at + 32, at + 31, u64::MAX, u64::MAX - 3, 0] {
            assert_eq!(memory.read(0, outside, 4), Err(Fault::Outside), "{outside:#x}");
        }
    }
}
