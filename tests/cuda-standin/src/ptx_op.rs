//! The instructions that are known. How their text is read is in `ptx_decode`, and what they compute in `ptx_compute`.

/// Bytes of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    One = 1,
    Two = 2,
    Four = 4,
    Eight = 8,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Special {
    ThreadX,
    ThreadY,
    BlockX,
}

/// An address: what a register holds, and bytes from there on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: u16,
    pub(crate) offset: i64,
}

/// What stands behind an instruction's name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    Register(u16),
    Number(u64),
    Special(Special),
    Param(usize),
    /// The address of a table of the module.
    Table(usize),
    /// An address in the shared memory of a block.
    Shared(u64),
    Memory(Address),
    /// A register for the result, and one for whether there is one.
    Pair(u16, u16),
}

/// A value that an instruction takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Register(u16),
    Number(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) register: u16,
    pub(crate) negated: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) guard: Option<Guard>,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Special {
        dst: u16,
        what: Special,
    },
    LoadParam {
        dst: u16,
        param: usize,
    },
    Load {
        dst: [u16; 4],
        count: u8,
        width: Width,
        from: Address,
        space: Space,
    },
    /// The address of a table.
    Table {
        dst: u16,
        table: usize,
    },
    Store {
        values: [Value; 4],
        count: u8,
        width: Width,
        to: Address,
        space: Space,
    },
    /// Asks for memory to be brought nearer. Nothing changes, but the address has to be one.
    Prefetch {
        at: Address,
    },
    /// Changes a number in memory as one step; the old one is the result.
    Atomic {
        op: Atomic,
        dst: u16,
        value: Value,
        to: Address,
    },
    One {
        op: One,
        dst: u16,
        a: Value,
    },
    Two {
        op: Two,
        dst: u16,
        a: Value,
        b: Value,
    },
    Three {
        op: Three,
        dst: u16,
        a: Value,
        b: Value,
        c: Value,
    },
    Four {
        op: Four,
        dst: u16,
        values: [Value; 4],
    },
    /// To the place in the code.
    Branch(usize),
    /// No thread of the block goes on before all have come here.
    Barrier,
    /// No lane of the warp goes on before all have come here, and what they wrote before it is seen by all after it.
    WarpBarrier {
        members: Value,
    },
    /// All lanes of the warp give a number, and each takes that of another.
    Shuffle(Shuffle),
    Return,
}

/// Which memory an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    /// Global memory past the coherent caches: what is there must not change while the function runs.
    Constant,
    /// The memory of a block.
    Shared,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shuffle {
    pub(crate) from: From,
    pub(crate) dst: u16,
    /// Whether the other lane is there.
    pub(crate) found: Option<u16>,
    pub(crate) value: Value,
    /// The distance, or the lane.
    pub(crate) by: Value,
    /// The last lane, and which bits of a lane's number name its part of the warp.
    pub(crate) limits: Value,
    pub(crate) members: Value,
}

/// Which lane a number is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Below,
    Lane,
    Partner,
}

/// How a number in memory is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Atomic {
    Add64,
    Or32,
}

/// How an instruction uses memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access {
    Load,
    LoadConstant,
    Store,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum One {
    Copy,
    Low16,
    Low32,
    Not32,
    Negative32,
    NotPredicate,
    FloatOfS32,
    CountOnes32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Two {
    Add32,
    Add64,
    Sub32,
    Sub64,
    Mul16,
    Mul32,
    Mul64,
    MulWide,
    Div32,
    Min,
    Max,
    MaxSigned32,
    And,
    Or,
    Xor,
    Shl16,
    Shl32,
    Shl64,
    Shr,
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    LessSigned16,
    GreaterSigned16,
    AddFloat,
    SubFloat,
    MulFloat,
    DivFloat,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Three {
    FusedFloat,
    Select,
    /// Four of the eight bytes of two numbers.
    Permute,
    MulAdd32,
    /// The low half of two numbers, the second above the first, shifted down: by at most 31 bits, ...
    FunnelWrap,
    /// ... or by at most 32.
    FunnelClamp,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Four {
    /// The low bits of the first in place of so many bits of the second.
    InsertBits32,
    InsertBits64,
    /// Of three numbers bit by bit; the fourth has the result for each combination.
    Logic,
}

impl Value {
    fn register(self) -> Option<u16> {
        if let Value::Register(register) = self { Some(register) } else { None }
    }
}

impl Kind {
    /// Whether all lanes of a warp have to come here together.
    pub(crate) fn is_of_warps(&self) -> bool {
        matches!(self, Kind::Shuffle(_) | Kind::WarpBarrier { .. })
    }

    /// The register that it computes from other registers, and those.
    pub(crate) fn computes(&self) -> Option<(u16, Vec<u16>)> {
        let (dst, values) = match *self {
            Kind::Shuffle(Shuffle { dst, value, .. }) => (dst, vec![value]),
            Kind::One { dst, a, .. } => (dst, vec![a]),
            Kind::Two { dst, a, b, .. } => (dst, vec![a, b]),
            Kind::Three { dst, a, b, c, .. } => (dst, vec![a, b, c]),
            Kind::Four { dst, values, .. } => (dst, values.to_vec()),
            _ => return None,
        };
        Some((dst, values.into_iter().filter_map(Value::register).collect()))
    }

    /// The address in global memory that it uses, and how.
    pub(crate) fn touches(&self) -> Option<(Address, Access)> {
        match *self {
            Kind::Load { from, space: Space::Global, .. } => Some((from, Access::Load)),
            Kind::Load { from, space: Space::Constant, .. } => Some((from, Access::LoadConstant)),
            Kind::Store { to, space: Space::Global, .. } | Kind::Atomic { to, .. } => Some((to, Access::Store)),
            _ => None,
        }
    }
}
