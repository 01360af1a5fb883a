//! Checks that a loaded model can still be read.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Model;
use crate::backend::{Buf, BufMut, Device, Health, MemoryKind, Piece, Role, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The most bytes copied to the host at a time.
const CHUNK: usize = 1 << 20;

/// The bytes read of each module to check that its memory can be read.
const TOUCHED: usize = 64;

impl Model {
    /// The error of the first of its devices that is lost; `None` if all work.
    pub(crate) fn lost(&self) -> Option<Error> {
        lost(self.devices())
    }

    /// Reads the beginning of every module where it lives.
    pub(crate) fn touch(&self) -> Result<()> {
        self.scan(TOUCHED, &mut |bytes| {
            std::hint::black_box(bytes.iter().fold(0, |sum: u8, byte| sum ^ byte));
        })
    }

    /// A hash of all bytes of all modules. Two of one model differ when its bytes changed in between.
    pub(crate) fn fingerprint(&self) -> Result<u64> {
        // FNV-1a over words of eight bytes.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut mix = |word: u64| hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        self.scan(usize::MAX, &mut |bytes| {
            let (words, rest) = bytes.as_chunks::<8>();
            words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
            rest.iter().for_each(|&byte| mix(u64::from(byte)));
        })?;
        Ok(hash)
    }

    /// Passes the first `most` bytes of every module to `visit`, in pieces.
    fn scan(&self, most: usize, visit: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut reader = HostReader { model: self, staging: None, streams: BTreeMap::new() };
        for (home, place) in self.homes() {
            let (start, end) = (place.start, place.end.min(place.start.saturating_add(most)));
            if home.read_with(self.limits().work, |bytes| visit(&bytes[start..end]))?.is_some() {
                continue;
            }
            for at in (start..end).step_by(CHUNK) {
                reader.read(home, at, CHUNK.min(end - at), visit)?;
            }
        }
        Ok(())
    }
}

/// The error of the first of these devices that is lost; `None` if all work.
pub(super) fn lost<'d>(devices: impl IntoIterator<Item = &'d Arc<dyn Device>>) -> Option<Error> {
    devices.into_iter().find_map(|device| match device.health() {
        Health::Lost(why) => Some(Error::DeviceLost { device: device.id(), why }),
        Health::Good => None,
    })
}

/// Copies a model's bytes to the host through one staging buffer, with one stream per device.
struct HostReader<'a> {
    model: &'a Model,
    staging: Option<BufMut>,
    streams: BTreeMap<DeviceId, Arc<dyn Stream>>,
}

impl HostReader<'_> {
    fn read(&mut self, home: &Buf, at: usize, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<()> {
        let id = home.device();
        let stream = match self.streams.get(&id) {
            Some(stream) => Arc::clone(stream),
            None => {
                let stream = self.model.device(id)?.stream(Role::Download)?;
                self.streams.insert(id, Arc::clone(&stream));
                stream
            }
        };
        let staging = match self.staging.take().filter(|staging| staging.bytes() >= bytes) {
            Some(staging) => staging,
            None => self.model.host().alloc_near(bytes, MemoryKind::Pinned, id)?,
        };
        let piece = Piece { src: home.clone(), from: at..at + bytes, at: 0 };
        let mut landed = stream.send(Transfer::new(vec![piece], staging)?)?.wait(self.model.limits().work)?;
        let bytes_read = landed.host_mut().ok_or_else(|| Error::bug("staging memory the host cannot address"))?;
        visit(&bytes_read[..bytes]);
        self.staging = Some(landed);
        Ok(())
    }
}
