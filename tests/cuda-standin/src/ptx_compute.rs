//! What instructions compute of the values of registers.

use crate::ptx_op::{Four, One, Three, Two};

impl One {
    pub(crate) fn of(self, a: u64) -> u64 {
        match self {
            One::Copy => a,
            One::Low16 => a & 0xffff,
            One::Low32 => a & 0xffff_ffff,
            One::Not32 => u64::from(!(a as u32)),
            One::Negative32 => u64::from((a as u32).wrapping_neg()),
            One::NotPredicate => a ^ 1,
            One::FloatOfS32 => bits(a as u32 as i32 as f32),
            One::CountOnes32 => u64::from((a as u32).count_ones()),
        }
    }
}

impl Two {
    /// Registers hold their bits with zeros above, so that logic and comparisons need no width.
    #[inline(always)]
    pub(crate) fn of(self, a: u64, b: u64) -> u64 {
        let (low_a, low_b) = (a as u32, b as u32);
        match self {
            Two::Add32 => low_a.wrapping_add(low_b).into(),
            Two::Add64 => a.wrapping_add(b),
            Two::Sub32 => low_a.wrapping_sub(low_b).into(),
            Two::Sub64 => a.wrapping_sub(b),
            Two::Mul16 => (low_a as u16).wrapping_mul(low_b as u16).into(),
            Two::Mul32 => low_a.wrapping_mul(low_b).into(),
            Two::Mul64 => a.wrapping_mul(b),
            Two::MulWide => a * b,
            // What a card gives for a division by zero is not said.
            Two::Div32 => low_a.checked_div(low_b).unwrap_or(u32::MAX).into(),
            Two::Min => a.min(b),
            Two::Max => a.max(b),
            Two::MaxSigned32 => u64::from((low_a as i32).max(low_b as i32) as u32),
            Two::And => a & b,
            Two::Or => a | b,
            Two::Xor => a ^ b,
            // Shifts by the width and more give zero.
            Two::Shl16 => a.checked_shl(low_b).unwrap_or(0) & 0xffff,
            Two::Shl32 => low_a.checked_shl(low_b).unwrap_or(0).into(),
            Two::Shl64 => a.checked_shl(low_b).unwrap_or(0),
            Two::Shr => a.checked_shr(low_b).unwrap_or(0),
            Two::Equal => u64::from(a == b),
            Two::NotEqual => u64::from(a != b),
            Two::Less => u64::from(a < b),
            Two::LessOrEqual => u64::from(a <= b),
            Two::Greater => u64::from(a > b),
            Two::GreaterOrEqual => u64::from(a >= b),
            Two::LessSigned16 => u64::from((a as i16) < b as i16),
            Two::GreaterSigned16 => u64::from(a as i16 > b as i16),
            Two::AddFloat => bits(float(a) + float(b)),
            Two::SubFloat => bits(float(a) - float(b)),
            Two::MulFloat => bits(float(a) * float(b)),
            Two::DivFloat => bits(float(a) / float(b)),
        }
    }
}

impl Three {
    #[inline(always)]
    pub(crate) fn of(self, a: u64, b: u64, c: u64) -> u64 {
        match self {
            Three::FusedFloat => bits(float(a).mul_add(float(b), float(c))),
            Three::Select => {
                if c != 0 {
                    a
                } else {
                    b
                }
            }
            Three::MulAdd32 => (a as u32).wrapping_mul(b as u32).wrapping_add(c as u32).into(),
            Three::FunnelWrap => ((b << 32 | a & 0xffff_ffff) >> (c & 31)) & 0xffff_ffff,
            Three::FunnelClamp => ((b << 32 | a & 0xffff_ffff) >> c.min(32)) & 0xffff_ffff,
            Three::Permute => {
                let bytes = ((b & 0xffff_ffff) << 32 | a & 0xffff_ffff).to_le_bytes();
                let byte = |place: u32| {
                    let selected = (c >> (4 * place)) as usize;
                    let byte = bytes[selected & 7];
                    // With the highest bit of a selector, the sign in all bits.
                    if selected & 8 == 0 { byte } else { 0u8.wrapping_sub(byte >> 7) }
                };
                u32::from_le_bytes([0, 1, 2, 3].map(byte)).into()
            }
        }
    }
}

impl Four {
    pub(crate) fn of(self, [a, b, c, d]: [u64; 4]) -> u64 {
        let number = match self {
            Four::InsertBits32 => u64::from(u32::MAX),
            Four::InsertBits64 => u64::MAX,
            Four::Logic => return logic([a, b, c], d),
        };
        // Positions and lengths count by their low eight bits; what lies beyond the number is dropped.
        let (from, count) = (c & 0xff, d & 0xff);
        let bits = 1u64.checked_shl(count as u32).unwrap_or(0).wrapping_sub(1);
        let mask = bits.checked_shl(from as u32).unwrap_or(0) & number;
        (a.checked_shl(from as u32).unwrap_or(0) & mask) | (b & !mask & number)
    }
}

/// The bits that a table gives for those of three numbers: bit 4 of its index is the first one's, bit 1 the last one's.
fn logic([a, b, c]: [u64; 3], table: u64) -> u64 {
    let of = |index: u64| {
        let take = |value: u64, bit: u64| if index & bit != 0 { value } else { !value };
        if table >> index & 1 != 0 { take(a, 4) & take(b, 2) & take(c, 1) } else { 0 }
    };
    (0..8).fold(0, |all, index| all | of(index)) & 0xffff_ffff
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// The bits of a result; a card gives one NaN, whatever came in.
fn bits(result: f32) -> u64 {
    if result.is_nan() { 0x7fff_ffff } else { result.to_bits().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_their_width() {
        assert_eq!(Two::Add32.of(0xffff_ffff, 2), 1);
        assert_eq!(Two::Sub32.of(1, 2), 0xffff_ffff);
        assert_eq!(Two::MulWide.of(0xffff_ffff, 4), 0x3_ffff_fffc);
        assert_eq!((Two::Min.of(2, 3), Two::Max.of(2, 3)), (2, 3));
        assert_eq!((Two::Mul16.of(0xffff, 3), Two::Xor.of(0b1100, 0b1010)), (0xfffd, 0b0110));
        assert_eq!((One::CountOnes32.of(0), One::CountOnes32.of(0x8001_0103)), (0, 5));
        assert_eq!((Two::Shl32.of(3, 31), Two::Shl32.of(3, 32), Two::Shr.of(3, 40)), (1 << 31, 0, 0));
        assert_eq!(One::FloatOfS32.of(0xffff_fffe), u64::from((-2.0f32).to_bits()));
        assert_eq!(Two::DivFloat.of(0, 0), 0x7fff_ffff);
        assert_eq!(
            (Two::Shl16.of(0xff00, 4), Two::Sub64.of(1, 2), One::Negative32.of(1)),
            (0xf000, u64::MAX, 0xffff_ffff)
        );
        // The low half of the first in the high half of the second; bytes with their signs.
        assert_eq!(Three::Permute.of(0x1122_3344, 0x5566_8890, 0x7604), 0x5566_4490);
        assert_eq!(Three::Permute.of(0x1122_3344, 0x5566_8890, 0x0dc4), 0x44ff_ff90);
        assert_eq!(Four::InsertBits32.of([0xff, 0x8000_0001, 4, 2]), 0x8000_0031);
        assert_eq!(Four::InsertBits32.of([3, 0, 31, 2]), 0x8000_0000);
        assert_eq!(Four::InsertBits32.of([u64::from(u32::MAX), 0, 0, 32]), 0xffff_ffff);
        assert_eq!(Four::InsertBits64.of([0x1234_5678, 0xffff_ffff_9abc_def0, 32, 32]), 0x1234_5678_9abc_def0);
        assert_eq!(Four::Logic.of([0xff00_ff00, 0x1234_5678, 0x9abc_def0, 0xca]), 0x12bc_56f0);
        assert_eq!(Four::Logic.of([0xff00_ff00, 0x1234_5678, 0x9abc_def0, 0x80]), 0x1200_5600 & 0x9abc_def0);
        assert_eq!(
            (Two::MaxSigned32.of(0xffff_fffe, 1), Two::MaxSigned32.of(0xffff_fffe, 0xffff_ffff)),
            (1, 0xffff_ffff)
        );
        assert_eq!((Two::LessSigned16.of(0xffff, 0), Two::GreaterSigned16.of(0xffff, 0)), (1, 0));
        assert_eq!(Three::MulAdd32.of(0x1_0001, 0x1_0000, 0xffff_ffff), 0xffff);
        let funnel = |op: Three, by| op.of(0x1122_3344, 0x5566_7788, by);
        assert_eq!((funnel(Three::FunnelWrap, 8), funnel(Three::FunnelWrap, 40)), (0x8811_2233, 0x8811_2233));
        assert_eq!((funnel(Three::FunnelWrap, 32), funnel(Three::FunnelClamp, 32)), (0x1122_3344, 0x5566_7788));
        assert_eq!((funnel(Three::FunnelClamp, 31), funnel(Three::FunnelClamp, 99)), (0xaacc_ef10, 0x5566_7788));
    }
}
