//! Homes of modules whose compressed form a load makes: those that no file has compressed, or that adapters change. How long their
//! codes are is known once they are made.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::Reservation;
use super::compressed::Placed;
use super::model::home_kind;
use super::store::Home;
use super::worker::{Block, Job, lock};
use crate::backend::MemoryKind;
use crate::checkpoint::{ModuleId, Stored, TensorId};
use crate::error::{Error, Missing, Result};
use crate::lossless::{self, Info};
use crate::schedule::Place;

impl Job<'_> {
    /// Whether the compressed form of a group is made here: neither the files nor the base have all of it.
    pub(super) fn is_encoded(&self, group: usize) -> bool {
        let is_made = |tensor: TensorId| {
            self.weights().is_none() || self.layout.stored(tensor).is_some_and(|stored| stored.is_made)
        };
        let tensors = self.tensors_of(group, None);
        tensors.iter().any(|(tensor, _)| is_made(*tensor) && self.reuse.compressed_in_base(*tensor).is_none())
    }

    /// The home of a group whose compressed form is made here. If that saves nothing for one of its modules, all stay as they are.
    pub(super) fn encode(&self, group: usize, reservation: &Mutex<&mut Reservation>) -> Result<Arc<Home>> {
        let groups = &self.reuse.groups;
        let (assignment, tensors) = (self.plan.at(groups.members(group)[0]), self.tensors_of(group, None));
        let (id, kind) = (assignment.device, home_kind(assignment));
        if !id.is_host() {
            return Err(Missing::ReadOnly { device: id }.into());
        }
        let memory = self.host.alloc_near(groups.bytes(group) as usize, MemoryKind::Arena, self.plan.compute())?;
        let filled = self.fill_host(vec![Block { tensors: tensors.clone(), memory }])?;
        let filled = filled.first().ok_or_else(|| Error::bug("a block of host memory that was not filled"))?;
        let weights = filled.host(self.loader.deadline)?.ok_or_else(not_addressed)?;
        let codes = tensors.iter().map(|(tensor, range)| self.code_of(*tensor, &weights[range.clone()]));
        let codes = codes.collect::<Result<Vec<_>>>()?;
        let stored = tensors.iter().zip(&codes).map(|((tensor, range), code)| {
            let bytes = code.as_ref().map_or(range.len(), |(code, _)| code.len()) as u64;
            (*tensor, Stored { bytes, is_code: code.is_some(), is_made: true })
        });
        let stored: BTreeMap<TensorId, Stored> = stored.collect();
        let saves =
            |&module: &ModuleId| self.layout.bytes_stored(module, |tensor| stored.get(&tensor).copied()).is_some();
        let compresses = groups.members(group).iter().filter(|&&module| self.layout.at(module).bytes > 0).all(saves);
        lock(&self.encoded).extend(stored.iter().map(|(tensor, stored)| (*tensor, compresses.then_some(*stored))));
        let planned = groups.members(group).iter().map(|&module| self.plan.at(module).taken()).sum();
        let hold = |bytes: usize| {
            let (device, charge) = lock(reservation).split_planned(id, planned, bytes as u64)?;
            Ok::<_, Error>((device.back(charge, kind, Some(self.plan.compute()))?, device))
        };
        if !compresses {
            let (mut memory, _) = hold(weights.len())?;
            memory.host_mut().ok_or_else(not_addressed)?.copy_from_slice(weights);
            return Ok(Arc::new(Home::new(vec![memory.freeze()], kind, false)));
        }
        let (places, bytes) = Place::all(tensors.iter().map(|(tensor, _)| stored[tensor]));
        let (mut memory, device) = hold(bytes as usize)?;
        let (dst, mut infos) = (memory.host_mut().ok_or_else(not_addressed)?, Vec::new());
        for (((_, range), code), place) in tensors.iter().zip(&codes).zip(&places) {
            let bytes = code.as_ref().map_or(&weights[range.clone()], |(code, _)| code);
            dst[place.range.clone()].copy_from_slice(bytes);
            infos.extend(code.as_ref().map(|(_, info)| (place.range.start, *info)));
        }
        let placed = tensors.into_iter().zip(places).map(|((tensor, range), place)| Placed { tensor, range, place });
        self.compressed_home(&*device, &placed.collect::<Vec<_>>(), memory.freeze(), infos, kind)
    }

    /// The code of a tensor, and what its header says; `None` if it is to stay as it is.
    fn code_of(&self, tensor: TensorId, weights: &[u8]) -> Result<Option<(Vec<u8>, Info)>> {
        self.check_cancelled()?;
        let info = self.layout.at(tensor);
        lossless::shorter(info.dtype, weights).map_err(|fault| Error::bug(format!("tensor `{}`: {fault}", info.name)))
    }
}

fn not_addressed() -> Error {
    Error::bug("host memory that the host cannot address")
}
