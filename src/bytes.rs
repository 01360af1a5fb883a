//! Sizes: exact decimals in, whole bytes out.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A number of bytes.
///
/// Parses `2.5gb`, `500 MiB`, `64k`, `123b`: every unit is a power of 1024, letter case does not
/// matter, and a fraction is exact and rounded down to a byte. `Display` prints the shortest of these
/// forms that means the same number, so it parses back to an equal value.
///
/// ```
/// use tensor_offload::ByteSize;
/// let size: ByteSize = "2.5gb".parse()?;
/// assert_eq!(size.get(), 2_684_354_560);
/// assert_eq!(size.to_string(), "2.5gb");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// Unit letters with their sizes, largest first.
const UNITS: [(&str, u64); 4] = [("t", 1 << 40), ("g", 1 << 30), ("m", 1 << 20), ("k", 1 << 10)];

impl ByteSize {
    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + other`; `None` if it exceeds `u64`.
    pub fn checked_add(self, other: ByteSize) -> Option<ByteSize> {
        self.0.checked_add(other.0).map(ByteSize)
    }

    /// `self - other`; `None` if it is below zero.
    pub fn checked_sub(self, other: ByteSize) -> Option<ByteSize> {
        self.0.checked_sub(other.0).map(ByteSize)
    }

    /// `self * count`; `None` if it exceeds `u64`.
    pub fn checked_mul(self, count: u64) -> Option<ByteSize> {
        self.0.checked_mul(count).map(ByteSize)
    }

    /// The size rounded for people: `2.50 GiB`, `13 B`.
    pub fn human(self) -> impl fmt::Display + use<> {
        Human(self.0)
    }
}

impl From<u64> for ByteSize {
    fn from(bytes: u64) -> Self {
        ByteSize(bytes)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in UNITS {
            let thousandths = u128::from(self.0) * 1000;
            if self.0 >= size && thousandths % u128::from(size) == 0 {
                let n = (thousandths / u128::from(size)) as u64;
                write!(f, "{}", n / 1000)?;
                if !n.is_multiple_of(1000) {
                    let digits = format!("{:03}", n % 1000);
                    write!(f, ".{}", digits.trim_end_matches('0'))?;
                }
                return write!(f, "{unit}b");
            }
        }
        write!(f, "{}b", self.0)
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let syntax = |expected: &str| Error::syntax(text, 0..text.len(), expected);
        let trimmed = text.trim();
        let number = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = unit_size(&trimmed[number.len()..])
            .ok_or_else(|| syntax("a size such as 2.5gb, with one unit of b, k, m, g or t"))?;
        let number =
            Decimal::parse(number.trim_end()).ok_or_else(|| syntax("a plain decimal number before the unit"))?;
        let bytes = number.scaled_floor(unit).ok_or_else(|| syntax("at most 2^64 - 1 bytes"))?;
        Ok(ByteSize(bytes))
    }
}

/// The size of a unit word (`k kb kib … b`, any case); `None` for anything else, including the empty word.
pub(crate) fn unit_size(word: &str) -> Option<u64> {
    let word = word.to_ascii_lowercase();
    if word == "b" {
        return Some(1);
    }
    UNITS.iter().find_map(|&(letter, size)| matches!(word.strip_prefix(letter), Some("" | "b" | "ib")).then_some(size))
}

/// A size rounded to two decimals of the unit that suits it.
#[derive(Clone, Copy, Debug)]
struct Human(u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in UNITS {
            if self.0 >= size {
                let text = format!("{:.2} {}iB", self.0 as f64 / size as f64, unit.to_uppercase());
                return f.pad(&text);
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

/// A non-negative decimal kept digit for digit, so that scaling it never rounds but once, downwards.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decimal {
    whole: u64,
    /// Digits after the point, without trailing zeros.
    fraction: String,
}

impl Decimal {
    /// Reads `12`, `1.5`, `.5` and `1.`; no sign, exponent, separator or blank.
    pub(crate) fn parse(text: &str) -> Option<Decimal> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
            return None;
        }
        let whole = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        Some(Decimal { whole, fraction: fraction.trim_end_matches('0').to_owned() })
    }

    /// `floor(self * unit)`, exact; `None` if it exceeds `u64`.
    pub(crate) fn scaled_floor(&self, unit: u64) -> Option<u64> {
        // Horner from the last digit. floor((d * unit + y) / 10) needs only floor(y), since d * unit is whole.
        let part = self
            .fraction
            .bytes()
            .rev()
            .fold(0u128, |below, digit| (u128::from(digit - b'0') * u128::from(unit) + below) / 10);
        u64::try_from(u128::from(self.whole) * u128::from(unit) + part).ok()
    }

    /// How many digits stand after the point, trailing zeros left out.
    pub(crate) fn decimals(&self) -> usize {
        self.fraction.len()
    }

    /// Whether the number is at most one.
    pub(crate) fn at_most_one(&self) -> bool {
        self.whole == 0 || (self.whole == 1 && self.fraction.is_empty())
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.whole)?;
        if !self.fraction.is_empty() {
            write!(f, ".{}", self.fraction)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_powers_of_1024_in_any_case() {
        for (text, bytes) in [
            ("1k", 1 << 10),
            ("1KB", 1 << 10),
            ("1kiB", 1 << 10),
            ("2.5gb", 2_684_354_560),
            (".5GB", 536_870_912),
            ("1tb", 1 << 40),
            ("7 b", 7),
            ("1.9999b", 1),
            ("0.3gb", 322_122_547),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap().get(), bytes, "{text}");
        }
    }

    #[test]
    fn sums_that_exceed_a_u64_are_none() {
        let [seven, three, most] = [7, 3, u64::MAX].map(ByteSize);
        assert_eq!((seven.checked_add(three), seven.checked_add(most)), (Some(ByteSize(10)), None));
        assert_eq!((seven.checked_sub(three), three.checked_sub(seven)), (Some(ByteSize(4)), None));
        assert_eq!((seven.checked_mul(3), most.checked_mul(2)), (Some(ByteSize(21)), None));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "5",
            "gb",
            "1e1gb",
            "2,5gb",
            "-2gb",
            "+2gb",
            "nan",
            "inf",
            "64000MiBGiB",
            "0x10gb",
            "5 g b",
            "1.2.3gb",
            ".gb",
            "16777216t",
            "99999999999999999999b",
            "1gbit",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn long_fractions_round_down_once() {
        let third = "0.3333333333333333333333333333333333333333333333333333333";
        assert_eq!(Decimal::parse(third).unwrap().scaled_floor(3_000_000_000), Some(999_999_999));
        let nearly = "0.99999999999999999999999999999999999999999999";
        assert_eq!(Decimal::parse(nearly).unwrap().scaled_floor(1 << 40), Some((1 << 40) - 1));
    }

    proptest! {
        #[test]
        fn display_parses_back(bytes in any::<u64>()) {
            let size = ByteSize(bytes);
            prop_assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }

        #[test]
        fn parsing_never_panics(text in "\\PC{0,24}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
