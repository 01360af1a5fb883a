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
use crate::error::{Error, Result};
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
        let kind = home_kind(assignment);
        // Two at a time, so that one is read while the other is compressed: this takes memory that the plan does not count.
        let _turn = lock(&self.encoding[group % self.encoding.len()]);
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
        let held = |(tensor, stored): (&TensorId, &Stored)| match compresses {
            true => (*tensor, *stored),
            false => (*tensor, Stored { bytes: self.layout.at(*tensor).bytes, is_code: false, is_made: true }),
        };
        lock(&self.encoded).extend(stored.iter().map(held));
        let planned = groups.members(group).iter().map(|&module| self.plan.at(module).taken()).sum();
        let hold = |bytes: u64| lock(reservation).split_planned(assignment.device, planned, bytes);
        if !compresses {
            let (device, charge) = hold(weights.len() as u64)?;
            let (buf, ()) = self.filled(&device, charge, kind, |all| {
                all.copy_from_slice(weights);
                Ok(())
            })?;
            return Ok(Arc::new(Home::new(vec![buf], kind, false)));
        }
        let (places, bytes) = Place::all(tensors.iter().map(|(tensor, _)| stored[tensor]));
        let (device, charge) = hold(bytes)?;
        let filled = self.filled(&device, charge, kind, |all| {
            let mut infos = Vec::new();
            for (((_, range), code), place) in tensors.iter().zip(&codes).zip(&places) {
                let bytes = code.as_ref().map_or(&weights[range.clone()], |(code, _)| code);
                all[place.range.clone()].copy_from_slice(bytes);
                infos.extend(code.as_ref().map(|(_, info)| (place.range.start, *info)));
            }
            Ok(infos)
        })?;
        let placed = tensors.into_iter().zip(places).map(|((tensor, range), place)| Placed { tensor, range, place });
        self.compressed_home(&device, &placed.collect::<Vec<_>>(), filled, kind)
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
