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
        match self {
            Four::InsertBits => {
                // Positions and lengths count by their low eight bits; what lies beyond the number is dropped.
                let (from, count) = (c & 0xff, d & 0xff);
                let bits = 1u64.checked_shl(count as u32).unwrap_or(0).wrapping_sub(1);
                let mask = bits.checked_shl(from as u32).unwrap_or(0) & 0xffff_ffff;
                (a.checked_shl(from as u32).unwrap_or(0) & mask) | (b & !mask & 0xffff_ffff)
            }
        }
    }
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
        assert_eq!(Four::InsertBits.of([0xff, 0x8000_0001, 4, 2]), 0x8000_0031);
        assert_eq!(Four::InsertBits.of([3, 0, 31, 2]), 0x8000_0000);
        assert_eq!(Four::InsertBits.of([u64::from(u32::MAX), 0, 0, 32]), 0xffff_ffff);
    }
}
