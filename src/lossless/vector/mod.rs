//! The instruction sets that blocks are coded with, of which the best present is chosen at run time.
//!
//! Loops that the compiler makes vectors of are the definition's, compiled for each set. Those that it does not are in
//! intrinsics: the ranks of exponents, and their codes.
#![cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")
)]

use std::sync::OnceLock;

use super::block::Definition;
use super::decode::{self, Damage, Parts};
use super::encode::{self, Scratch};
use super::fields::Fields;

/// An expression for each constant value of the fields, so that loops are made for it.
macro_rules! each_type {
    ($fields:ident, |$name:ident| $work:expr) => {
        match $fields {
            Fields::E8M7 => {
                let $name = Fields::E8M7;
                $work
            }
            Fields::E5M10 => {
                let $name = Fields::E5M10;
                $work
            }
            Fields::E8M23 => {
                let $name = Fields::E8M23;
                $work
            }
            Fields::E4M3 => {
                let $name = Fields::E4M3;
                $work
            }
            Fields::E5M2 => {
                let $name = Fields::E5M2;
                $work
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod window;

/// An instruction set that this processor has; made by asking the processor only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tier(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
    Plain,
}

impl Tier {
    /// The best one.
    pub(super) fn best() -> Tier {
        // Asking takes long where the answer is that of a virtual machine.
        static BEST: OnceLock<Tier> = OnceLock::new();
        *BEST.get_or_init(Tier::ask)
    }

    fn ask() -> Tier {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = avx2::Avx2::here() {
            return Tier(Kind::Avx2(avx2));
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(neon) = neon::Neon::here() {
            return Tier(Kind::Neon(neon));
        }
        Tier(Kind::Plain)
    }

    /// All that there are, the best first.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Tier> {
        let mut tiers = vec![Tier::best(), Tier(Kind::Plain)];
        tiers.dedup();
        tiers
    }

    /// As [`encode::encode`].
    pub(super) fn encode(
        self,
        fields: Fields,
        number: u64,
        weights: &[u8],
        scratch: &mut Scratch,
        out: &mut Vec<u8>,
    ) -> u64 {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value exists only where the processor said that it has these features.
            Kind::Avx2(avx2) => unsafe { avx2::encode(avx2, fields, number, weights, scratch, out) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Kind::Neon(neon) => unsafe { neon::encode(neon, fields, number, weights, scratch, out) },
            Kind::Plain => {
                each_type!(fields, |fields| encode::encode(Definition, fields, number, weights, scratch, out))
            }
        }
    }

    /// As [`decode::decode`].
    pub(super) fn decode(
        self,
        fields: Fields,
        number: u64,
        parts: &Parts<'_>,
        weights: &mut [u8],
    ) -> Result<(), Damage> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx2(avx2) => unsafe { avx2::decode(avx2, fields, number, parts, weights) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Kind::Neon(neon) => unsafe { neon::decode(neon, fields, number, parts, weights) },
            Kind::Plain => each_type!(fields, |fields| decode::decode(Definition, fields, number, parts, weights)),
        }
    }
}
