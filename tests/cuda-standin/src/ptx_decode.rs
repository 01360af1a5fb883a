//! Names and operands -> instructions.

use crate::ptx_op::{Address, Atomic, Four, From, Kind, One, Operand, Shuffle, Space, Three, Two, Value, Width};

/// The instruction of this name with these operands; none where there is no such one.
pub(crate) fn decode(name: &str, operands: &[Operand]) -> Option<Kind> {
    use Operand as O;
    if let Some((op, bits)) = four(name) {
        let [O::Register(dst), ref values @ ..] = *operands else { return None };
        let values: [O; 4] = values.try_into().ok()?;
        let [Some(a), Some(b), Some(c), Some(d)] = values.map(O::value) else { return None };
        return Some(Kind::Four { op, dst, values: [a.cut(bits), b.cut(bits), c.cut(32), d.cut(32)] });
    }
    if let Some(from) = name.strip_prefix("shfl.sync.") {
        return shuffle(from, operands);
    }
    if let Some((op, bits)) = three(name) {
        let [O::Register(dst), a, b, c] = *operands else { return None };
        let (a, b, c) = (a.value()?.cut(bits), b.value()?.cut(bits), c.value()?.cut(32));
        return Some(Kind::Three { op, dst, a, b, c });
    }
    if let Some((op, bits)) = two(name) {
        let [O::Register(dst), a, b] = *operands else { return None };
        return Some(Kind::Two { op, dst, a: a.value()?.cut(bits), b: b.value()?.cut(bits) });
    }
    match (name, operands) {
        ("mov.u32", [O::Register(dst), O::Special(what)]) => Some(Kind::Special { dst: *dst, what: *what }),
        ("mov.u64", [O::Register(dst), O::Table(table)]) => Some(Kind::Table { dst: *dst, table: *table }),
        ("mov.u64", [O::Register(dst), O::Shared(address)]) => {
            Some(Kind::One { op: One::Copy, dst: *dst, a: Value::Number(*address) })
        }
        ("bar.sync", [O::Number(0)]) => Some(Kind::Barrier),
        ("ld.param.u32" | "ld.param.u64", [O::Register(dst), O::Param(param)]) => {
            Some(Kind::LoadParam { dst: *dst, param: *param })
        }
        ("bar.warp.sync", [members]) => Some(Kind::WarpBarrier { members: members.value()?.cut(32) }),
        ("atom.global.add.u64", [O::Register(dst), O::Memory(to), value]) => {
            Some(Kind::Atomic { op: Atomic::Add64, dst: *dst, value: value.value()?, to: *to })
        }
        ("atom.global.or.b32", [O::Register(dst), O::Memory(to), value]) => {
            Some(Kind::Atomic { op: Atomic::Or32, dst: *dst, value: value.value()?.cut(32), to: *to })
        }
        ("prefetch.global.L2", [O::Memory(at)]) => Some(Kind::Prefetch { at: *at }),
        ("ret", []) => Some(Kind::Return),
        (_, [O::Register(dst), a]) if one(name).is_some() => {
            let (op, bits) = one(name)?;
            Some(Kind::One { op, dst: *dst, a: a.value()?.cut(bits) })
        }
        (_, [O::Memory(to), values @ ..]) => store(name, values, *to),
        (_, [registers @ .., O::Memory(from)]) => load(name, registers, *from),
        _ => None,
    }
}

/// `up.b32`, `idx.b32` or `bfly.b32`.
fn shuffle(from: &str, operands: &[Operand]) -> Option<Kind> {
    let from = match from {
        "up.b32" => From::Below,
        "idx.b32" => From::Lane,
        "bfly.b32" => From::Partner,
        _ => return None,
    };
    let [dst, value, by, limits, members] = operands else { return None };
    let (dst, found) = match *dst {
        Operand::Register(dst) => (dst, None),
        Operand::Pair(dst, found) => (dst, Some(found)),
        _ => return None,
    };
    let number = |operand: &Operand| Some(operand.value()?.cut(32));
    let (value, by, limits, members) = (number(value)?, number(by)?, number(limits)?, number(members)?);
    Some(Kind::Shuffle(Shuffle { from, dst, found, value, by, limits, members }))
}

fn load(name: &str, registers: &[Operand], from: Address) -> Option<Kind> {
    let (space, kind) = space(name.strip_prefix("ld.")?)?;
    let (count, width) = vector(kind)?;
    if registers.len() != count {
        return None;
    }
    let mut dst = [0; 4];
    for (place, register) in dst.iter_mut().zip(registers) {
        let Operand::Register(register) = register else { return None };
        *place = *register;
    }
    Some(Kind::Load { dst, count: count as u8, width, from, space })
}

fn store(name: &str, operands: &[Operand], to: Address) -> Option<Kind> {
    let (space, kind) = space(name.strip_prefix("st.")?)?;
    // How long a cache keeps it changes nothing here.
    let (count, width) = vector(kind.strip_prefix("cs.").unwrap_or(kind))?;
    if operands.len() != count || space == Space::Constant {
        return None;
    }
    let mut values = [Value::Number(0); 4];
    for (place, operand) in values.iter_mut().zip(operands) {
        *place = operand.value()?;
    }
    Some(Kind::Store { values, count: count as u8, width, to, space })
}

/// The memory that the name of a load or store goes on with, and what comes after it.
fn space(kind: &str) -> Option<(Space, &str)> {
    let of = |(prefix, space)| Some((space, kind.strip_prefix(prefix)?));
    [("global.nc.", Space::Constant), ("global.", Space::Global), ("shared.", Space::Shared)].into_iter().find_map(of)
}

/// How many numbers an instruction loads or stores, and of which width.
fn vector(kind: &str) -> Option<(usize, Width)> {
    let (count, kind) = match kind.split_once('.') {
        None => (1, kind),
        Some(("v2", kind)) => (2, kind),
        Some(("v4", kind)) => (4, kind),
        Some(_) => return None,
    };
    Some((count, width(kind)?))
}

fn width(kind: &str) -> Option<Width> {
    match kind {
        "u8" => Some(Width::One),
        "u16" => Some(Width::Two),
        "u32" | "f32" => Some(Width::Four),
        "u64" => Some(Width::Eight),
        _ => None,
    }
}

/// Instructions of one source, and the bits that an immediate one has.
fn one(name: &str) -> Option<(One, u32)> {
    Some(match name {
        "mov.u16" => (One::Copy, 16),
        "mov.u32" | "mov.b32" | "mov.f32" => (One::Copy, 32),
        "mov.u64" | "mov.b64" | "cvta.to.global.u64" => (One::Copy, 64),
        "cvt.u32.u16" | "cvt.u64.u32" => (One::Copy, 32),
        "cvt.u16.u32" => (One::Low16, 32),
        "cvt.u32.u64" => (One::Low32, 64),
        "not.b32" => (One::Not32, 32),
        "neg.s32" => (One::Negative32, 32),
        "mov.pred" => (One::Copy, 1),
        "not.pred" => (One::NotPredicate, 1),
        "cvt.rn.f32.s32" => (One::FloatOfS32, 32),
        "popc.b32" => (One::CountOnes32, 32),
        _ => return None,
    })
}

/// Instructions of two sources, and the bits that an immediate one has.
fn two(name: &str) -> Option<(Two, u32)> {
    Some(match name {
        "add.s32" => (Two::Add32, 32),
        "add.s64" => (Two::Add64, 64),
        "sub.s32" => (Two::Sub32, 32),
        "sub.s64" => (Two::Sub64, 64),
        "mul.lo.s16" => (Two::Mul16, 16),
        "mul.lo.s32" => (Two::Mul32, 32),
        "mul.lo.s64" => (Two::Mul64, 64),
        "mul.wide.u16" => (Two::MulWide, 16),
        "mul.wide.u32" => (Two::MulWide, 32),
        "div.u32" => (Two::Div32, 32),
        "min.u32" => (Two::Min, 32),
        "min.u64" => (Two::Min, 64),
        "max.u32" => (Two::Max, 32),
        "max.s32" => (Two::MaxSigned32, 32),
        "and.pred" | "and.b16" => (Two::And, 16),
        "and.b32" => (Two::And, 32),
        "and.b64" => (Two::And, 64),
        "or.pred" | "or.b16" => (Two::Or, 16),
        "or.b32" => (Two::Or, 32),
        "or.b64" => (Two::Or, 64),
        "xor.b32" => (Two::Xor, 32),
        "shl.b16" => (Two::Shl16, 32),
        "shl.b32" => (Two::Shl32, 32),
        "shl.b64" => (Two::Shl64, 64),
        "shr.u16" | "shr.u32" => (Two::Shr, 32),
        "shr.u64" => (Two::Shr, 64),
        "setp.eq.s16" => (Two::Equal, 16),
        "setp.eq.s32" => (Two::Equal, 32),
        "setp.eq.s64" => (Two::Equal, 64),
        "setp.ne.s16" => (Two::NotEqual, 16),
        "setp.ne.s32" => (Two::NotEqual, 32),
        "setp.lt.s16" => (Two::LessSigned16, 16),
        "setp.gt.s16" => (Two::GreaterSigned16, 16),
        "setp.lt.u16" => (Two::Less, 16),
        "setp.lt.u32" => (Two::Less, 32),
        "setp.le.u32" => (Two::LessOrEqual, 32),
        "setp.gt.u16" => (Two::Greater, 16),
        "setp.gt.u32" => (Two::Greater, 32),
        "setp.ge.u32" => (Two::GreaterOrEqual, 32),
        "setp.ge.u64" => (Two::GreaterOrEqual, 64),
        "add.rn.f32" => (Two::AddFloat, 32),
        "sub.rn.f32" => (Two::SubFloat, 32),
        "mul.rn.f32" => (Two::MulFloat, 32),
        "div.rn.f32" => (Two::DivFloat, 32),
        _ => return None,
    })
}

/// Instructions of three sources, and the bits that the first two have as immediates.
fn three(name: &str) -> Option<(Three, u32)> {
    Some(match name {
        "fma.rn.f32" => (Three::FusedFloat, 32),
        "mad.lo.s32" => (Three::MulAdd32, 32),
        "shf.r.wrap.b32" => (Three::FunnelWrap, 32),
        "shf.r.clamp.b32" => (Three::FunnelClamp, 32),
        "selp.u16" => (Three::Select, 16),
        "selp.b32" | "selp.u32" | "selp.f32" => (Three::Select, 32),
        "selp.b64" | "selp.u64" => (Three::Select, 64),
        "prmt.b32" => (Three::Permute, 32),
        _ => return None,
    })
}

/// Instructions of four sources, and the bits that the first two have as immediates.
fn four(name: &str) -> Option<(Four, u32)> {
    Some(match name {
        "bfi.b32" => (Four::InsertBits32, 32),
        "bfi.b64" => (Four::InsertBits64, 64),
        "lop3.b32" => (Four::Logic, 32),
        _ => return None,
    })
}

impl Operand {
    fn value(self) -> Option<Value> {
        match self {
            Operand::Register(register) => Some(Value::Register(register)),
            Operand::Number(number) => Some(Value::Number(number)),
            _ => None,
        }
    }
}

impl Value {
    /// An immediate as so many bits; a negative one was read as 64.
    fn cut(self, bits: u32) -> Value {
        match self {
            Value::Number(number) if bits < 64 => Value::Number(number & ((1 << bits) - 1)),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immediate_has_the_bits_of_its_instruction() {
        let negative = decode("and.b32", &[Operand::Register(0), Operand::Register(1), Operand::Number(-8i64 as u64)]);
        assert!(matches!(negative, Some(Kind::Two { b: Value::Number(0xffff_fff8), .. })));
    }

    #[test]
    fn vectors_are_as_many_operands_as_their_names_say() {
        let memory = Operand::Memory(Address { base: 9, offset: 4 });
        let with = |name: &str, registers: u16| {
            let registers = (0..registers).map(Operand::Register);
            let load: Vec<_> = registers.clone().chain([memory]).collect();
            let store: Vec<_> = [memory].into_iter().chain(registers).collect();
            (decode(&format!("ld.{name}"), &load), decode(&format!("st.{name}"), &store))
        };
        for (name, count) in [("global.u16", 1), ("global.v2.u32", 2), ("shared.v4.f32", 4), ("shared.u8", 1)] {
            let (load, store) = with(name, count);
            let space = if name.starts_with("shared") { Space::Shared } else { Space::Global };
            assert!(matches!(load, Some(Kind::Load { count: n, space: s, .. }) if u16::from(n) == count && s == space));
            assert!(
                matches!(store, Some(Kind::Store { count: n, space: s, .. }) if u16::from(n) == count && s == space)
            );
            let (load, store) = with(name, count + 1);
            assert!(load.is_none() && store.is_none(), "{name}");
        }
        let (load, store) = with("global.nc.v2.u32", 2);
        assert!(matches!(load, Some(Kind::Load { space: Space::Constant, .. })) && store.is_none());
        let (load, store) = with("global.cs.v4.u32", 4);
        assert!(load.is_none() && matches!(store, Some(Kind::Store { count: 4, space: Space::Global, .. })));
        assert!(with("local.u32", 1).0.is_none() && with("global.v8.u32", 8).0.is_none());
    }

    #[test]
    fn only_the_barrier_of_all_threads_is_known() {
        assert!(matches!(decode("bar.sync", &[Operand::Number(0)]), Some(Kind::Barrier)));
        assert!(decode("bar.sync", &[Operand::Number(1)]).is_none());
        assert!(decode("bar.sync", &[Operand::Number(0), Operand::Number(64)]).is_none());
        assert!(decode("bar.arrive", &[Operand::Number(0)]).is_none());
    }
}
