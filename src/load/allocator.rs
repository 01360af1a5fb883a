//! Memory of a caller's framework for the tensors of a model.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::backend::{BufMut, Charge, Device, MemoryKind, Storage};
use crate::device::DeviceId;
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};
use crate::plan::{Plan, TensorGrouping};

/// Allocates a device's memory for the tensors of models, in place of the device itself: a framework whose tensors own their
/// memory lets the library fill and stream it.
///
/// It is asked for resident tensors, for tensors that are used in place, and for the slots of streamed layers. All of it is
/// counted by the plan and charged to the device's ledger, and no more memory is taken. What is streamed away from the device
/// stays in the library's own memory.
///
/// Give it to a load with [`Loader::allocator`](super::Loader::allocator), and plan with the [`grouping`](Self::grouping) that it
/// needs; [`ModelBuilder::allocator`](super::ModelBuilder::allocator) does both.
pub trait TensorAllocator: Send + Sync {
    /// The device whose memory it allocates.
    fn device(&self) -> DeviceId;

    /// How its tensors share allocations: [`PerTensor`](TensorGrouping::PerTensor) or [`PerType`](TensorGrouping::PerType).
    fn grouping(&self) -> TensorGrouping;

    /// Whether it can hold elements of this type. Tensors of other types are in memory of the device itself.
    fn supports(&self, dtype: DType) -> bool;

    /// Allocates memory for `request`. Its contents do not matter, but every byte must be initialised.
    ///
    /// # Errors
    /// Any; the load fails with it, and releases all memory. So it does with [`Error::WrongSize`] if the memory is smaller than
    /// what is asked for, and with [`Error::Mismatch`] if the device is the host and the memory has no host address.
    fn allocate(&self, request: &TensorRequest<'_>) -> Result<Box<dyn Storage>>;
}

/// Memory that a [`TensorAllocator`] is asked for.
#[derive(Clone)]
#[non_exhaustive]
pub struct TensorRequest<'a> {
    /// The device whose memory it is.
    pub device: &'a Arc<dyn Device>,
    /// The type of all elements.
    pub dtype: DType,
    /// The size in bytes, not zero.
    pub bytes: usize,
    /// The name of the tensor that stays there. `None` for a slot, whose tensors change.
    pub tensor: Option<&'a str>,
}

/// The allocators of a load, by device.
#[derive(Clone, Default)]
pub(crate) struct Allocators(BTreeMap<DeviceId, Arc<dyn TensorAllocator>>);

impl Allocators {
    /// Adds an allocator; it replaces an earlier one for the same device.
    pub(crate) fn add(&mut self, allocator: Arc<dyn TensorAllocator>) {
        self.0.insert(allocator.device(), allocator);
    }

    /// These allocators, with those of `others` for devices that have none.
    pub(super) fn or(&self, others: &Allocators) -> Allocators {
        let mut all = others.0.clone();
        all.extend(self.0.iter().map(|(&device, allocator)| (device, Arc::clone(allocator))));
        Allocators(all)
    }

    /// The allocator of a device.
    pub(super) fn of(&self, device: DeviceId) -> Option<&Arc<dyn TensorAllocator>> {
        self.0.get(&device)
    }

    /// The division of tensors that a plan needs that computes on `compute`. `None` without allocators.
    pub(super) fn grouping(&self, compute: DeviceId) -> Option<TensorGrouping> {
        let first = || self.0.values().next();
        self.of(compute).or_else(first).map(|allocator| allocator.grouping())
    }

    /// Whether memory of `device` comes from the same place with `other`.
    pub(super) fn agree(&self, other: &Allocators, device: DeviceId) -> bool {
        match (self.of(device), other.of(device)) {
            (Some(one), Some(other)) => std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other)),
            (None, None) => true,
            _ => false,
        }
    }

    /// Checks that the plan divides tensors as the allocators need it.
    pub(super) fn check(&self, plan: &Plan) -> Result<()> {
        for allocator in self.0.values() {
            let (device, planned, needed) = (allocator.device(), plan.grouping(), allocator.grouping());
            if !needed.is_apart() {
                let why = "which makes every tensor part of the library's own memory; it needs per type or per tensor";
                return Err(Error::invalid(format!("the allocator for {device} says `{needed}`, {why}")));
            }
            // Without slots of the library's on the device, the two divisions do not differ.
            let has_slots = device == plan.compute() && !plan.has_external_slots();
            if !planned.is_apart() || (planned != needed && has_slots) {
                return Err(Mismatch::Grouping { device, planned, needed }.into());
            }
        }
        Ok(())
    }

    /// Allocates the bytes of a charge for tensors of one type, from the device's allocator if there is one.
    pub(super) fn alloc(
        &self,
        device: &Arc<dyn Device>,
        charge: Charge,
        (dtype, tensor): (Option<DType>, Option<&str>),
        kind: MemoryKind,
        near: Option<DeviceId>,
    ) -> Result<BufMut> {
        let supports = |dtype: DType| self.of(device.id()).filter(|allocator| allocator.supports(dtype));
        let Some((allocator, dtype)) =
            dtype.and_then(|dtype| Some((supports(dtype)?, dtype))).filter(|_| charge.bytes() > 0)
        else {
            return device.back(charge, kind, near);
        };
        let request = TensorRequest { device, dtype, bytes: charge.bytes() as usize, tensor };
        let storage = allocator.allocate(&request)?;
        if let Err(error) = request.check(&*storage) {
            storage.free(charge);
            return Err(error);
        }
        BufMut::new(storage, charge)
    }
}

impl TensorRequest<'_> {
    /// Checks memory that was allocated for the request, as far as it can be told.
    fn check(&self, storage: &dyn Storage) -> Result<()> {
        let (tensor, needed, given) = (self.tensor.map(str::to_owned), self.bytes as u64, storage.bytes() as u64);
        if given < needed {
            return Err(Error::WrongSize { what: Measured::Allocation { tensor }, needed, given });
        }
        if self.device.id().is_host() && storage.host().is_none() && storage.shared().is_none() {
            return Err(Mismatch::NotOnHost { tensor }.into());
        }
        Ok(())
    }
}

impl fmt::Debug for TensorRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorRequest { device, dtype, bytes, tensor } = self;
        let mut debug = f.debug_struct("TensorRequest");
        debug.field("device", &device.id()).field("dtype", dtype).field("bytes", bytes).field("tensor", tensor).finish()
    }
}

/// Equal if all memory comes from the same places.
impl PartialEq for Allocators {
    fn eq(&self, other: &Allocators) -> bool {
        self.0.keys().eq(other.0.keys()) && self.0.keys().all(|&device| self.agree(other, device))
    }
}

impl Eq for Allocators {}

impl fmt::Debug for Allocators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
