//! Reading the weights of a group.

use std::ops::Range;
use std::sync::OnceLock;

use crate::error::{CodeFault, CompressedFault, Error, Result};
use crate::file::read::Bounce;
use crate::lossless::dfloat11::{Group, Lengths, Parts};
use crate::transfer::{ReadPart, Source};

/// The weights that are decoded at a time. The memory for what they are in is some three quarters of theirs.
const STEP: u64 = 4 << 20;

/// The bytes of a tensor in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// A group in its file, read as its weights, one after the other.
#[derive(Debug)]
pub(in crate::checkpoint::compressed) struct Stored {
    pub(super) threads: u32,
    pub(super) luts: Place,
    pub(super) output_positions: Place,
    pub(super) gaps: Place,
    pub(super) exponents: Place,
    pub(super) rests: Place,
    /// What the first three say, once they have been read.
    pub(super) group: OnceLock<Group>,
}

impl Stored {
    /// The number of weights.
    pub(in crate::checkpoint::compressed) fn weights(&self) -> u64 {
        self.rests.bytes
    }

    /// The bytes that they take in the file.
    pub(in crate::checkpoint::compressed) fn bytes(&self) -> u64 {
        let Stored { luts, output_positions, gaps, exponents, rests, .. } = self;
        [luts, output_positions, gaps, exponents, rests].map(|place| place.bytes).iter().sum()
    }

    /// # Errors
    /// [`CodeFault::Header`] when the lengths of its tensors do not fit each other.
    pub(super) fn check(&self) -> Result<(), CodeFault> {
        let Stored { threads, luts, output_positions, gaps, exponents, rests, .. } = self;
        let [luts, output_positions, gaps] = [luts, output_positions, gaps].map(|place| place.bytes);
        let (encoded, weights) = (exponents.bytes, rests.bytes);
        Lengths { luts, output_positions, gaps, threads: *threads, encoded, weights }.check()
    }

    /// Reads bytes of the weights from byte `at` on.
    ///
    /// # Errors
    /// [`FileFault::Compressed`](crate::error::FileFault::Compressed) where the code is damaged; those of the file.
    pub(in crate::checkpoint::compressed) fn read(&self, file: &dyn Source, at: u64, dst: &mut [u8]) -> Result<()> {
        let (mut at, mut dst) = (at, dst);
        while !dst.is_empty() {
            let (first, skip) = (at / 2, (at % 2) as usize);
            // A byte of a weight, or whole ones.
            let whole = if skip == 0 { (dst.len() as u64 / 2).min(STEP) } else { 0 };
            let (here, rest) = dst.split_at_mut(if whole == 0 { 1 } else { 2 * whole as usize });
            if whole == 0 {
                let mut weight = [0; 2];
                self.read_weights(file, first..first + 1, &mut weight)?;
                here[0] = weight[skip];
            } else {
                self.read_weights(file, first..first + whole, here)?;
            }
            (at, dst) = (at + here.len() as u64, rest);
        }
        Ok(())
    }

    fn read_weights(&self, file: &dyn Source, weights: Range<u64>, dst: &mut [u8]) -> Result<()> {
        let fault = |fault: CodeFault| Error::file(file.path(), None, CompressedFault::Code(fault).into());
        let group = self.group(file)?;
        let encoded = group.encoded_bytes(&weights).map_err(fault)?;
        let (codes, rests) = ((encoded.end - encoded.start) as usize, (weights.end - weights.start) as usize);
        let mut buffer = Bounce::around(codes + rests).map_err(Error::io("map memory to read", file.path()))?;
        let (codes, rests) = buffer.bytes()[..codes + rests].split_at_mut(codes);
        file.read_parts(&mut [
            ReadPart::new(self.exponents.at + encoded.start, codes),
            ReadPart::new(self.rests.at + weights.start, rests),
        ])?;
        group.decode(weights, codes, rests, dst).map_err(fault)
    }

    /// What says how the codes are read. It is read if it has not been.
    fn group(&self, file: &dyn Source) -> Result<&Group> {
        if let Some(group) = self.group.get() {
            return Ok(group);
        }
        let places = [self.luts, self.output_positions, self.gaps];
        let [mut luts, mut output_positions, mut gaps] = places.map(|place| vec![0; place.bytes as usize]);
        file.read_parts(&mut [
            ReadPart::new(self.luts.at, &mut luts),
            ReadPart::new(self.output_positions.at, &mut output_positions),
            ReadPart::new(self.gaps.at, &mut gaps),
        ])?;
        let group = Group::new(&Parts {
            luts: &luts,
            output_positions: &output_positions,
            gaps: &gaps,
            threads: self.threads,
            encoded: self.exponents.bytes,
            weights: self.rests.bytes,
        });
        let group = group.map_err(|fault| Error::file(file.path(), None, CompressedFault::Code(fault).into()))?;
        Ok(self.group.get_or_init(|| group))
    }
}
