//! Building allocations in code, with the same checks as for strings.

use super::parse::{Parser, SourceEntry};
use super::{Allocation, Entry, Mode, Quota};
use crate::bytes::{ByteSize, Decimal};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// Builds an [`Allocation`] entry by entry, equal to the one parsed from its string.
///
/// ```
/// use tensor_offload::{Allocation, ByteSize, DeviceId};
/// let allocation = Allocation::builder()
///     .bytes(DeviceId::cuda(0), ByteSize(5 << 29))
///     .rest(DeviceId::CPU)
///     .build()?;
/// assert_eq!(allocation, "cuda:0,2.5gb;cpu,*".parse()?);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct AllocationBuilder {
    entries: Vec<Entry>,
    /// The first number that is none.
    wrong: Option<(DeviceId, f64, &'static str)>,
}

impl Allocation {
    /// A builder for an allocation, entry by entry.
    pub fn builder() -> AllocationBuilder {
        AllocationBuilder::default()
    }

    /// Chooses what makes a pass shortest; `reserve` of the compute device stays free for activations.
    pub fn auto(reserve: Option<ByteSize>) -> Allocation {
        Allocation { mode: Mode::Auto, entries: Vec::new(), virtual_vram: None, reserve }
    }
}

impl AllocationBuilder {
    /// Gives `device` at most so many bytes.
    pub fn bytes(self, device: DeviceId, bytes: ByteSize) -> Self {
        self.entry(device, Quota::Bytes(bytes))
    }

    /// Gives `device` so many bytes, and what no other quota holds.
    pub fn bytes_and_rest(self, device: DeviceId, bytes: ByteSize) -> Self {
        self.entry(device, Quota::BytesAndRest(bytes))
    }

    /// Gives `device` a weight; the weights are normalised by their sum. The number counts as its shortest decimal: 33.3 is 33.3.
    pub fn percent(self, device: DeviceId, percent: f64) -> Self {
        self.number(device, percent, "a percentage of 0 or more, such as 33.3", Quota::Percent)
    }

    /// Gives `device` at most this part of its total memory, from 0 to 1. The number counts as its shortest decimal: 0.8 is 0.8.
    pub fn fraction(self, device: DeviceId, fraction: f64) -> Self {
        let expected = "a fraction from 0 to 1, such as 0.8";
        match fraction <= 1.0 {
            true => self.number(device, fraction, expected, Quota::Fraction),
            false => self.wrong(device, fraction, expected),
        }
    }

    /// Gives `device` what no other quota holds; in a ratio, what the others leave of 100 %.
    pub fn rest(self, device: DeviceId) -> Self {
        self.entry(device, Quota::Rest)
    }

    /// Builds the allocation.
    ///
    /// # Errors
    /// [`Error::Allocation`] as for the equivalent string, which the error quotes: for a device that occurs twice, quotas of
    /// two modes, two remainders, weights that are all zero, numbers out of range, and an allocation without entries.
    pub fn build(self) -> Result<Allocation> {
        if let Some((device, number, expected)) = self.wrong {
            let text = format!("{device},{number}");
            let start = device.to_string().len() + 1;
            return Err(Error::syntax(&text, start..text.len(), expected));
        }
        // For errors, which quote what a user would have written.
        let (mut text, mut places) = (String::new(), Vec::new());
        for entry in &self.entries {
            text.push_str(if text.is_empty() { "" } else { ";" });
            let start = text.len();
            text.push_str(&entry.to_string());
            places.push(start..text.len());
        }
        if text.is_empty() {
            return Err(Error::syntax(text, 0..0, "an entry for at least one device"));
        }
        let entries =
            self.entries.into_iter().zip(places).map(|(entry, place)| SourceEntry { entry, source: &text[place] });
        Parser { text: &text }.checked(entries.collect(), None)
    }

    fn entry(mut self, device: DeviceId, quota: Quota) -> Self {
        self.entries.push(Entry { device: Some(device), quota });
        self
    }

    fn number(self, device: DeviceId, number: f64, expected: &'static str, quota: fn(Decimal) -> Quota) -> Self {
        match Decimal::parse(&number.to_string()) {
            Some(decimal) => self.entry(device, quota(decimal)),
            None => self.wrong(device, number, expected),
        }
    }

    fn wrong(mut self, device: DeviceId, number: f64, expected: &'static str) -> Self {
        self.wrong.get_or_insert((device, number, expected));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::AllocationError;
    use proptest::prelude::*;

    const GPU: DeviceId = DeviceId::cuda(0);
    const OTHER: DeviceId = DeviceId::cuda(1);

    fn parsed(text: &str) -> Allocation {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_built_is_what_its_string_says() {
        let gib = |gib: u64| ByteSize(gib << 30);
        let builder = Allocation::builder;
        for (built, text) in [
            (builder().bytes(GPU, gib(2)).rest(DeviceId::CPU), "cuda:0,2gb;cpu,*"),
            (builder().bytes(GPU, gib(0)).bytes_and_rest(OTHER, gib(3)), "cuda:0,0b;cuda:1,3gb*"),
            (builder().percent(GPU, 33.3).percent(DeviceId::CPU, 66.7), "cuda:0,33.3%;cpu,66.7%"),
            (builder().percent(GPU, 25.0).rest(DeviceId::CPU), "cuda:0,25%;cpu,*"),
            (builder().fraction(GPU, 0.8), "cuda:0,0.8"),
            (builder().fraction(GPU, 1.0).fraction(OTHER, 0.1), "cuda:0,1;cuda:1,0.1"),
            (builder().rest(DeviceId::DISK), "disk,*"),
        ] {
            let built = built.build().unwrap();
            assert_eq!((&built, built.to_string()), (&parsed(text), parsed(text).to_string()), "{text}");
        }
        assert_eq!(Allocation::auto(None), parsed("auto"));
        assert_eq!(Allocation::auto(Some(gib(2))), parsed("auto,reserve=2gb"));
        assert_eq!(Allocation::all_on(GPU), parsed("cuda:0,*"));
    }

    #[test]
    fn what_contradicts_itself_is_refused_as_its_string_is() {
        let one = ByteSize(1 << 30);
        let builder = Allocation::builder;
        for (built, text) in [
            (builder().bytes(GPU, one).bytes(GPU, one), "cuda:0,1gb;cuda:0,1gb"),
            (builder().bytes(GPU, one).percent(OTHER, 50.0), "cuda:0,1gb;cuda:1,50%"),
            (builder().rest(GPU).rest(OTHER), "cuda:0,*;cuda:1,*"),
            (builder().percent(GPU, 0.0).percent(OTHER, 0.0), "cuda:0,0%;cuda:1,0%"),
        ] {
            let (built, parsed) = (built.build().unwrap_err(), text.parse::<Allocation>().unwrap_err());
            assert_eq!((built.kind(), built.to_string()), (parsed.kind(), parsed.to_string()), "{text}");
        }
        for wrong in [
            builder(),
            builder().fraction(GPU, 1.5),
            builder().fraction(GPU, -0.5),
            builder().fraction(GPU, f64::NAN),
            builder().percent(GPU, f64::INFINITY).rest(OTHER),
            builder().percent(GPU, 1e300),
        ] {
            assert!(matches!(wrong.build(), Err(Error::Allocation(_))));
        }
        // The error points at the number, behind the device's name and the comma.
        let Err(Error::Allocation(fault)) = builder().fraction(OTHER, 1.5).build() else {
            panic!("1.5 is no fraction")
        };
        let AllocationError::Syntax { text, span, .. } = *fault else { panic!("{fault}") };
        assert_eq!(&text[span], "1.5");
    }

    proptest! {
        #[test]
        fn any_numbers_are_built_or_refused(
            fraction in any::<f64>(), percent in any::<f64>(), bytes in any::<u64>(), other in any::<u64>(),
        ) {
            let built = [
                Allocation::builder().fraction(GPU, fraction).build(),
                Allocation::builder().percent(GPU, percent).rest(OTHER).build(),
                Allocation::builder().bytes(GPU, ByteSize(bytes)).bytes_and_rest(OTHER, ByteSize(other)).build(),
            ];
            for allocation in built.into_iter().flatten() {
                prop_assert_eq!(allocation.to_string().parse::<Allocation>().unwrap(), allocation);
            }
        }
    }
}
