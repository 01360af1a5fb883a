//! Verdicts of the compute device on the codes that it decoded: they come to the host behind the weights, and are asked for when
//! somebody waits for these, or when the next layer is handed out.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Streamer;
use crate::backend::{Buf, BufMut, Decompress, Device, Event, FenceState, MemoryKind};
use crate::checkpoint::LayerId;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The bytes between two verdicts on the host, which are copied at the same time.
const APART: usize = 64;

/// The verdicts that are allocated together.
const TOGETHER: usize = 64;

/// Host memory for verdicts, which is used again and again.
pub(super) struct Places {
    host: Arc<dyn Device>,
    /// The device that copies verdicts there.
    near: DeviceId,
    free: Mutex<Vec<BufMut>>,
}

/// The verdict on a part of a layer.
pub(super) struct Verdict {
    /// Its bytes, once they have arrived. `None` only once it is dropped.
    place: Option<Buf>,
    places: Arc<Places>,
}

impl Places {
    pub(super) fn new(host: &Arc<dyn Device>, near: DeviceId) -> Arc<Places> {
        Arc::new(Places { host: Arc::clone(host), near, free: Mutex::default() })
    }

    /// Memory for a verdict.
    pub(super) fn take(&self) -> Result<BufMut> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.is_empty() {
            let mut rest = self.host.alloc_near(TOGETHER * APART, MemoryKind::Pinned, self.near)?;
            for _ in 1..TOGETHER {
                let after = rest.split_off(APART)?;
                free.push(std::mem::replace(&mut rest, after));
            }
            free.push(rest);
        }
        free.pop().ok_or_else(|| Error::bug("no memory for a verdict, which was just allocated"))
    }

    /// The verdict that is copied to `place`, memory that was [taken](Places::take) here.
    pub(super) fn verdict(self: &Arc<Self>, place: Buf) -> Arc<Verdict> {
        Arc::new(Verdict { place: Some(place), places: Arc::clone(self) })
    }
}

impl Verdict {
    /// The events of its arrival that are pending or failed.
    pub(super) fn pending(&self) -> impl Iterator<Item = &Event> {
        self.place.iter().flat_map(Buf::ready)
    }

    /// Whether all codes were sound, if that is known by now.
    ///
    /// # Errors
    /// [`Error::Failed`] when the decoding failed, or what came before it.
    pub(super) fn known(&self) -> Result<Option<bool>> {
        let is_pending = self.pending().any(|event| matches!(event.state(), FenceState::Pending));
        if is_pending { Ok(None) } else { self.wait(Duration::ZERO).map(Some) }
    }

    /// Waits until it is known whether all codes were sound.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; as [`known`](Verdict::known).
    pub(super) fn wait(&self, deadline: Duration) -> Result<bool> {
        // Where memory has only sizes there is nothing to be damaged.
        let Some(place) = self.place.as_ref().filter(|place| place.block().has_bytes()) else { return Ok(true) };
        let bytes = place.host(deadline)?.ok_or_else(|| Error::bug("a verdict that the host cannot address"))?;
        let bytes = bytes.first_chunk().ok_or_else(|| Error::bug("a verdict of too few bytes"))?;
        Ok(Decompress::is_sound(bytes))
    }
}

impl Drop for Verdict {
    fn drop(&mut self) {
        if let Some(Ok(place)) = self.place.take().map(Buf::try_reclaim) {
            self.places.free.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        }
    }
}

impl Streamer {
    /// Waits until all layers that were handed out have arrived, and checks that weights were sound that arrived
    /// [compressed](crate::Planner::compress): the device tells so once it has decoded them, which is after the layer was handed out.
    /// Each [`layer`](Streamer::layer) asks for what is known by then; this is for the end, before results are used. Where nothing is
    /// compressed it does nothing.
    ///
    /// # Errors
    /// [`Error::Corrupted`] naming a layer whose weights were not those that were compressed, so that whatever was computed with them
    /// is void; [`Error::TimedOut`] after the deadline; [`Error::Failed`] when a copy failed.
    pub fn verify(&mut self) -> Result<()> {
        self.process.check()?;
        let until = Instant::now() + self.deadline;
        while let Some((layer, verdicts)) = self.unseen.front() {
            let (layer, left) = (self.name_of(*layer), until.saturating_duration_since(Instant::now()));
            let outcome = wait_for(verdicts, layer, left);
            if !matches!(outcome, Err(Error::TimedOut { .. })) {
                self.unseen.pop_front();
            }
            outcome?;
        }
        Ok(())
    }

    /// Looks at the verdicts that have come by now, in the order of the layers.
    pub(super) fn see_verdicts(&mut self) -> Result<()> {
        while let Some((layer, verdicts)) = self.unseen.front() {
            let known = verdicts.iter().map(|verdict| verdict.known()).collect::<Result<Option<Vec<bool>>>>();
            if matches!(known, Ok(None)) {
                break;
            }
            let damaged = || Err(damaged(self.name_of(*layer)));
            let outcome =
                known.and_then(|all| if all.into_iter().flatten().all(|sound| sound) { Ok(()) } else { damaged() });
            self.unseen.pop_front();
            outcome?;
        }
        Ok(())
    }

    fn name_of(&self, layer: LayerId) -> &str {
        &self.model.layout().at(layer).name
    }
}

/// Waits for the verdicts on a layer.
///
/// # Errors
/// [`Error::Corrupted`] naming the layer when any of its codes was damaged; as [`Verdict::wait`].
pub(super) fn wait_for(verdicts: &[Arc<Verdict>], layer: &str, deadline: Duration) -> Result<()> {
    let until = Instant::now() + deadline;
    let sound = |verdict: &Arc<Verdict>| verdict.wait(until.saturating_duration_since(Instant::now()));
    verdicts.iter().try_for_each(|verdict| if sound(verdict)? { Ok(()) } else { Err(damaged(layer)) })
}

/// The error of a layer whose codes were damaged.
fn damaged(layer: &str) -> Error {
    Error::Corrupted { what: format!("the compressed weights of layer `{layer}` are damaged") }
}
