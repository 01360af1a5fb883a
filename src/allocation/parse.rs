//! Parsing an [`Allocation`]. Every part is a slice of the whole text, so its position is known.

use std::ops::Range;

use super::{AUTO, Allocation, Entry, Mode, Quota, VirtualVram};
use crate::bytes::{ByteSize, Decimal, unit_size};
use crate::device::DeviceId;
use crate::error::{AllocationError, Error, Result};

const ENTRY: &str = "DEVICE,QUOTA, as in cuda:0,2.5gb or cpu,*";
const QUOTA: &str = "a quota: bytes (2.5gb, 5gb*), a ratio (50%), a fraction of the device's memory (0.8) or *";
const RESERVE: &str = "nothing or reserve=SIZE after auto, as in auto,reserve=2gb";
const VIRTUAL: &str = "COMPUTE;GIB;DONOR[,DONOR] after the #, as in cuda:0;4.0;cpu";

pub(super) fn allocation(text: &str) -> Result<Allocation> {
    let parser = Parser { text };
    let whole = text.trim_end_matches(|c: char| c.is_whitespace() || c == ';' || c == '#').trim_start();
    let unbraced = whole.strip_prefix('{').and_then(|inner| inner.strip_suffix('}'));
    let (expert, behind) = match unbraced.unwrap_or(whole).split_once('#') {
        Some((expert, behind)) => (expert, Some(behind)),
        None => (unbraced.unwrap_or(whole), None),
    };
    let expert = if unbraced.is_none() { parser.unbraced(expert)? } else { expert };
    let virtual_vram =
        |behind: Option<&str>| behind.filter(|v| !is_blank(v)).map(|v| parser.virtual_vram(v)).transpose();
    if let Some(auto) = parser.auto(expert) {
        let reserve = parser.reserve(expert, auto)?;
        let virtual_vram = virtual_vram(behind)?;
        return Ok(Allocation { mode: Mode::Auto, entries: Vec::new(), virtual_vram, reserve });
    }
    let entries = parser.entries(expert)?;
    let virtual_vram = virtual_vram(behind)?;
    if entries.is_empty() && virtual_vram.is_none() {
        return Err(parser.syntax(whole, ENTRY));
    }
    parser.checked(entries, virtual_vram)
}

/// The text being read; errors point into it.
pub(super) struct Parser<'a> {
    pub(super) text: &'a str,
}

/// An entry with its source text.
pub(super) struct SourceEntry<'a> {
    pub(super) entry: Entry,
    pub(super) source: &'a str,
}

impl<'a> Parser<'a> {
    /// The bytes of `part` in the whole text.
    fn span(&self, part: &str) -> Range<usize> {
        let start = (part.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        start..start + part.len()
    }

    fn syntax(&self, part: &str, expected: impl Into<String>) -> Error {
        Error::syntax(self.text, self.span(part), expected)
    }

    /// Moves the span of an error about `part` to the whole text.
    fn placed(&self, part: &str, error: Error) -> Error {
        match error {
            Error::Allocation(fault) => match *fault {
                AllocationError::Syntax { expected, .. } => self.syntax(part, expected),
                other => other.into(),
            },
            other => other,
        }
    }

    /// `part` without the braces around it, if it has them.
    fn unbraced(&self, part: &'a str) -> Result<&'a str> {
        let part = part.trim();
        match (part.strip_prefix('{'), part.strip_suffix('}')) {
            (None, None) => Ok(part),
            (Some(inner), Some(_)) => Ok(&inner[..inner.len() - 1]),
            (Some(_), None) => Err(self.syntax(part, "a `}` for the `{` at the beginning")),
            (None, Some(_)) => Err(self.syntax(part, "a `{` for the `}` at the end")),
        }
    }

    /// The entry that begins with the word for mode auto, if there is one.
    fn auto(&self, part: &'a str) -> Option<&'a str> {
        let mut pieces = part.split(';').map(str::trim);
        pieces.find(|piece| piece.split(',').next().is_some_and(|word| word.trim_end().eq_ignore_ascii_case(AUTO)))
    }

    /// The reserve after the word `auto` in the entry `auto`, which must be the only entry of `part`.
    fn reserve(&self, part: &'a str, auto: &'a str) -> Result<Option<ByteSize>> {
        let others =
            || part.split(';').map(str::trim).filter(|piece| !piece.is_empty() && self.span(piece) != self.span(auto));
        if let Some(other) = others().next() {
            let mode = self.entries(other)?.iter().find_map(|entry| entry.entry.quota.mode());
            let alone = || self.syntax(other, "auto alone: it leaves no quota to name");
            let (first, second) = (auto.to_owned(), other.to_owned());
            let mixed = |mode: Mode| {
                AllocationError::MixedModes { first, first_mode: AUTO, second, second_mode: mode.name() }.into()
            };
            return Err(mode.map_or_else(alone, mixed));
        }
        let mut options = auto.split(',').skip(1).map(str::trim);
        let Some(option) = options.next() else { return Ok(None) };
        if let Some(second) = options.next() {
            return Err(self.syntax(second, RESERVE));
        }
        let (key, size) = option.split_once('=').ok_or_else(|| self.syntax(option, RESERVE))?;
        if !key.trim_end().eq_ignore_ascii_case("reserve") {
            return Err(self.syntax(option, RESERVE));
        }
        let size = size.trim_start();
        size.parse().map(Some).map_err(|error| self.placed(size, error))
    }

    fn entries(&self, part: &'a str) -> Result<Vec<SourceEntry<'a>>> {
        let mut entries = Vec::new();
        for piece in part.split(';').map(str::trim).filter(|piece| !piece.is_empty()) {
            let tokens: Vec<&str> = piece.split(',').map(str::trim).collect();
            match tokens.as_slice() {
                [bare] => entries.push(SourceEntry { entry: self.bare(bare)?, source: piece }),
                pairs if pairs.len() % 2 == 0 => {
                    for pair in pairs.chunks_exact(2) {
                        let (device, quota) = (self.device(pair[0])?, self.quota(pair[1])?);
                        let source = &self.text[self.span(pair[0]).start..self.span(pair[1]).end];
                        entries.push(SourceEntry { entry: Entry { device: Some(device), quota }, source });
                    }
                }
                _ => return Err(self.syntax(piece, format!("pairs of device and quota ({ENTRY})"))),
            }
        }
        Ok(entries)
    }

    /// A token that stands alone: a fraction for the compute device.
    fn bare(&self, token: &str) -> Result<Entry> {
        match self.quota(token) {
            Ok(quota @ Quota::Fraction(_)) => Ok(Entry { device: None, quota }),
            _ => Err(self.syntax(token, ENTRY)),
        }
    }

    fn device(&self, token: &str) -> Result<DeviceId> {
        token.parse().map_err(|error| self.placed(token, error))
    }

    fn quota(&self, token: &str) -> Result<Quota> {
        if token == "*" {
            return Ok(Quota::Rest);
        }
        let (amount, starred) = token.strip_suffix('*').map_or((token, false), |amount| (amount.trim_end(), true));
        let decimal = |number: &str| Decimal::parse(number.trim_end()).ok_or_else(|| self.syntax(token, QUOTA));
        if let Some(number) = amount.strip_suffix('%').filter(|_| !starred) {
            return Ok(Quota::Percent(decimal(number)?));
        }
        let number = amount.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let (value, unit) = (decimal(number)?, &amount[number.len()..]);
        match unit_size(unit) {
            Some(unit) => {
                let bytes = value.scaled_floor(unit).ok_or_else(|| self.syntax(token, "at most 2^64 - 1 bytes"))?;
                Ok(if starred { Quota::BytesAndRest(ByteSize(bytes)) } else { Quota::Bytes(ByteSize(bytes)) })
            }
            None if unit.is_empty() && !starred && value.at_most_one() => Ok(Quota::Fraction(value)),
            None => Err(self.syntax(token, QUOTA)),
        }
    }

    fn virtual_vram(&self, part: &'a str) -> Result<VirtualVram> {
        let parts: Vec<&str> = part.split(';').map(str::trim).filter(|p| !p.is_empty()).collect();
        let [compute_token, gib_token, donor_tokens] = parts[..] else {
            return Err(self.syntax(part, VIRTUAL));
        };
        let compute = self.device(compute_token)?;
        let gib = Decimal::parse(gib_token).filter(|gib| gib.scaled_floor(1 << 30).is_some());
        let gib = gib.ok_or_else(|| self.syntax(gib_token, "a number of GiB without unit, such as 4.0"))?;
        let mut seen = vec![(compute, compute_token)];
        for token in donor_tokens.split(',').map(str::trim) {
            let device = self.device(token)?;
            if let Some(&(_, first)) = seen.iter().find(|(other, _)| *other == device) {
                let (first, second) = (first.to_owned(), token.to_owned());
                return Err(AllocationError::DuplicateDevice { device, first, second }.into());
            }
            seen.push((device, token));
        }
        let donors = seen[1..].iter().map(|(device, _)| *device).collect();
        Ok(VirtualVram { compute, gib, donors })
    }

    /// The allocation of these entries, if they do not contradict each other.
    pub(super) fn checked(
        &self,
        entries: Vec<SourceEntry<'_>>,
        virtual_vram: Option<VirtualVram>,
    ) -> Result<Allocation> {
        self.check_devices(&entries)?;
        let mode = match self.common_mode(&entries)? {
            _ if entries.is_empty() => Mode::Virtual,
            mode => mode.unwrap_or(Mode::Bytes),
        };
        let (entries, sources): (Vec<Entry>, Vec<&str>) = entries.into_iter().map(|e| (e.entry, e.source)).unzip();
        let allocation = Allocation { mode, entries, virtual_vram, reserve: None };
        if mode == Mode::Ratio {
            self.check_weights(&allocation, &sources)?;
        }
        Ok(allocation)
    }

    /// Fails if a device occurs twice, or two entries have a `*`.
    fn check_devices(&self, entries: &[SourceEntry<'_>]) -> Result<()> {
        let mut rest: Option<DeviceId> = None;
        for (index, SourceEntry { entry, source }) in entries.iter().enumerate() {
            let earlier = entries[..index].iter().find(|e| e.entry.device == entry.device);
            match (earlier, entry.device) {
                (Some(earlier), Some(device)) => {
                    let (first, second) = (earlier.source.to_owned(), (*source).to_owned());
                    return Err(AllocationError::DuplicateDevice { device, first, second }.into());
                }
                (Some(_), None) => return Err(self.syntax(source, "at most one fraction without a device")),
                (None, _) => (),
            }
            let second = entry.device.filter(|_| entry.quota.takes_rest());
            if let (Some(first), Some(second)) = (rest, second) {
                return Err(AllocationError::MultipleRemainders { first, second }.into());
            }
            rest = rest.or(second);
        }
        Ok(())
    }

    fn common_mode(&self, entries: &[SourceEntry<'_>]) -> Result<Option<Mode>> {
        let mut moded = entries.iter().filter_map(|e| e.entry.quota.mode().map(|mode| (mode, e.source)));
        let Some((mode, first)) = moded.next() else { return Ok(None) };
        match moded.find(|(other, _)| *other != mode) {
            None => Ok(Some(mode)),
            Some((other, second)) => Err(AllocationError::MixedModes {
                first: first.to_owned(),
                first_mode: mode.name(),
                second: second.to_owned(),
                second_mode: other.name(),
            }
            .into()),
        }
    }

    fn check_weights(&self, allocation: &Allocation, sources: &[&str]) -> Result<()> {
        let Some(weights) = allocation.weights() else {
            let longest = sources.iter().max_by_key(|source| source.len()).copied().unwrap_or(self.text);
            return Err(self.syntax(longest, "percentages of fewer digits, 18 between the largest and the smallest"));
        };
        if weights.iter().all(|&weight| weight == 0) {
            return Err(AllocationError::ZeroShare { text: self.text.to_owned() }.into());
        }
        Ok(())
    }
}

fn is_blank(part: &str) -> bool {
    part.chars().all(|c| c.is_whitespace() || c == ';')
}
