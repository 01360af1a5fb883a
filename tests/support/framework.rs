//! A framework that owns the memory of its tensors: vectors of the element type, behind a lock each or in the library's hands
//! alone. It knows which of its tensors live, and can be told to fail, to panic, or to give the wrong memory.

#![expect(unsafe_code, reason = "a framework vouches for its memory")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use half::{bf16, f16};
use tensor_offload::backend::{MemoryBlock, SharedMemory, Storage};
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{DType, DeviceId, Error, Result};

/// The elements of a tensor, in memory of their type.
pub(crate) enum Elements {
    Bytes(Vec<u8>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    I64(Vec<i64>),
}

impl Elements {
    /// Zeros; `None` for a type that the framework has no tensors of, and for part of an element.
    fn zeros(dtype: DType, bytes: usize) -> Option<Elements> {
        let of = |size: usize| bytes.is_multiple_of(size).then(|| bytes / size);
        Some(match dtype {
            DType::F16 => Elements::F16(vec![f16::ZERO; of(2)?]),
            DType::BF16 => Elements::BF16(vec![bf16::ZERO; of(2)?]),
            DType::F32 => Elements::F32(vec![0.0; of(4)?]),
            DType::I64 => Elements::I64(vec![0; of(8)?]),
            DType::U8 | DType::Bool | DType::F8E4M3 => Elements::Bytes(vec![0; bytes]),
            _ => return None,
        })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Elements::Bytes(all) => all,
            Elements::F16(all) => bytemuck::cast_slice(all),
            Elements::BF16(all) => bytemuck::cast_slice(all),
            Elements::F32(all) => bytemuck::cast_slice(all),
            Elements::I64(all) => bytemuck::cast_slice(all),
        }
    }

    /// The address, for writing, too.
    fn address(&mut self) -> NonNull<u8> {
        let start: *mut u8 = match self {
            Elements::Bytes(all) => all.as_mut_ptr(),
            Elements::F16(all) => all.as_mut_ptr().cast(),
            Elements::BF16(all) => all.as_mut_ptr().cast(),
            Elements::F32(all) => all.as_mut_ptr().cast(),
            Elements::I64(all) => all.as_mut_ptr().cast(),
        };
        NonNull::new(start).expect("a vector is nowhere at zero")
    }
}

/// A tensor of the framework.
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    /// The tensor of the model that stays there; `None` for a slot.
    pub(crate) name: Option<String>,
    /// The bytes that were asked for.
    pub(crate) bytes: usize,
    elements: RwLock<Elements>,
    /// Whether the framework has dropped its contents under the library.
    gone: AtomicBool,
}

impl Tensor {
    /// Locks it as code of the framework does that reads it.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Elements> {
        self.elements.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Elements> {
        self.elements.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on its memory is not there any more.
    pub(crate) fn lose(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    fn check(&self) -> Result<()> {
        match self.gone.load(Ordering::Relaxed) {
            true => Err(Error::DeviceLost { device: DeviceId::CPU, why: "the framework dropped a tensor".to_owned() }),
            false => Ok(()),
        }
    }
}

/// A tensor as the storage of an allocation, behind its lock.
struct Locked(Arc<Tensor>);

// SAFETY: the vector is never resized, so it has the same initialised bytes while the `Arc` lives. It has no other address.
unsafe impl Storage for Locked {
    fn bytes(&self) -> usize {
        self.0.read().bytes().len()
    }

    fn shared(&self) -> Option<&dyn SharedMemory> {
        Some(self)
    }
}

// SAFETY: the address is passed on while the lock is held, which all others take for each access: a shared one to read, an
// exclusive one to write.
unsafe impl SharedMemory for Locked {
    fn read(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()> {
        self.0.check()?;
        let elements = self.0.read();
        work(NonNull::from(elements.bytes()).cast());
        Ok(())
    }

    fn write(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()> {
        self.0.check()?;
        work(self.0.write().address());
        Ok(())
    }
}

/// A tensor as the storage of an allocation that the library alone uses until it is freed.
struct Lent {
    tensor: Arc<Tensor>,
    address: NonNull<u8>,
}

// SAFETY: the memory that the address names is not bound to a thread.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

// SAFETY: the vector is never resized, so the address is that of its initialised bytes while the `Arc` lives, and the
// framework's own code keeps away from it meanwhile.
unsafe impl Storage for Lent {
    fn bytes(&self) -> usize {
        self.tensor.bytes
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.address)
    }
}

/// The framework's tensor whose memory an allocation is.
pub(crate) fn tensor_of(block: &MemoryBlock) -> Option<Arc<Tensor>> {
    let locked = block.downcast::<Locked>().map(|locked| &locked.0);
    locked.or_else(|| block.downcast::<Lent>().map(|lent| &lent.tensor)).map(Arc::clone)
}

/// What the memory of a framework is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Behind a lock each time.
    Locked,
    /// At an address that the library keeps.
    Lent,
}

/// How an allocator of safe code is wrong, at the request that the countdown names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    Error,
    Panic,
    /// One byte less than was asked for.
    Small,
}

/// A framework that allocates the tensors of models on one device.
pub(crate) struct Framework {
    device: DeviceId,
    storage: TensorGrouping,
    memory: Memory,
    unsupported: Vec<DType>,
    /// What goes wrong, and at which request from now on, the first being 1.
    wrong: Mutex<Option<(Wrong, u64)>>,
    requests: AtomicU64,
    tensors: Mutex<Vec<Weak<Tensor>>>,
}

impl Framework {
    pub(crate) fn new(device: DeviceId, storage: TensorGrouping, memory: Memory) -> Arc<Framework> {
        Framework::without(device, storage, memory, &[])
    }

    /// A framework that has no tensors of these types.
    pub(crate) fn without(
        device: DeviceId,
        storage: TensorGrouping,
        memory: Memory,
        unsupported: &[DType],
    ) -> Arc<Framework> {
        let (wrong, requests, tensors, unsupported) =
            (Mutex::default(), AtomicU64::new(0), Mutex::default(), unsupported.to_vec());
        Arc::new(Framework { device, storage, memory, unsupported, wrong, requests, tensors })
    }

    /// Lets the n-th request from now on go wrong.
    pub(crate) fn go_wrong(&self, wrong: Wrong, n: u64) {
        *self.wrong.lock().unwrap() = Some((wrong, n));
    }

    /// How often it was asked for memory.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The tensors that are held by anyone.
    pub(crate) fn live(&self) -> Vec<Arc<Tensor>> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        tensors.retain(|tensor| tensor.strong_count() > 0);
        tensors.iter().filter_map(Weak::upgrade).collect()
    }

    /// The bytes that they were asked for with.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live().iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// A new tensor, as storage.
    pub(crate) fn tensor(&self, dtype: DType, asked: usize, name: Option<&str>) -> Result<Box<dyn Storage>> {
        let bytes = match self.wrong_now() {
            Some(Wrong::Error) => {
                let (device, requested) = (self.device, asked as u64);
                return Err(Error::OutOfMemory { device, requested, available: 0, limit: 0 });
            }
            Some(Wrong::Panic) => panic!("an allocation on purpose"),
            // A whole element less.
            Some(Wrong::Small) => asked - dtype.block().bytes as usize,
            None => asked,
        };
        let mut elements = Elements::zeros(dtype, bytes).expect("whole elements of a type that it has");
        let (address, name) = (elements.address(), name.map(str::to_owned));
        let tensor = Tensor { dtype, name, bytes, elements: RwLock::new(elements), gone: AtomicBool::new(false) };
        let tensor = Arc::new(tensor);
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&tensor));
        Ok(match self.memory {
            Memory::Locked => Box::new(Locked(tensor)),
            Memory::Lent => Box::new(Lent { tensor, address }),
        })
    }

    /// What goes wrong with this request.
    fn wrong_now(&self) -> Option<Wrong> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        let (kind, left) = wrong.as_mut()?;
        *left -= 1;
        let (kind, now) = (*kind, *left == 0);
        if now {
            *wrong = None;
        }
        now.then_some(kind)
    }
}

impl TensorAllocator for Framework {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn grouping(&self) -> TensorGrouping {
        self.storage
    }

    fn supports(&self, dtype: DType) -> bool {
        !self.unsupported.contains(&dtype) && Elements::zeros(dtype, 0).is_some()
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> Result<Box<dyn Storage>> {
        assert!(request.bytes > 0, "memory for nothing");
        assert!(self.supports(request.dtype), "asked for {}, which it said that it cannot hold", request.dtype);
        self.tensor(request.dtype, request.bytes, request.tensor)
    }
}
