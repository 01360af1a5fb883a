//! Run models larger than one device.
//!
//! This library reads a checkpoint, decides by an allocation string which weights live on which device, merges adapters
//! into them at full precision, puts every weight where it belongs, and brings the layers that live elsewhere to the
//! compute device while it computes. It does not run the network: your kernels do, between asking for a layer and
//! dropping its guard.
//!
//! # A working example
//!
//! ```
//! use tensor_offload::prelude::*;
//!
//! // A simulated card, smaller than the model. `Registry::system()` has this machine's devices.
//! let devices = Registry::simulated(["cuda:0=256kb,link=10", "cpu=64mb"])?;
//! let model = Model::open("examples/data/tiny-llama")?
//!     .adapter("examples/data/tiny-llama-lora", 0.8)?
//!     .allocation("cuda:0,25%;cpu,*")?
//!     .depth(1)
//!     .load(&devices)?;
//! for layer in model.stream()?.pass() {
//!     let layer = layer?; // on the card for the kernels that you queue until it is dropped
//!     let bytes: usize = layer.tensors().map(|tensor| tensor.size()).sum();
//!     println!("{}: {bytes} bytes", layer.name());
//! }
//! # Ok::<(), Error>(())
//! ```
//!
//! # The stages behind it
//!
//! The builder stands for stages that can be called one by one: to look at a plan before memory is taken, to use one
//! checkpoint for several models, to ask for layers in an order of your own.
//!
//! ```
//! use std::sync::Arc;
//! use tensor_offload::prelude::*;
//! # let devices = Registry::simulated(["cuda:0=256kb,link=10", "cpu=64mb"])?;
//!
//! // Headers and the adapter's factors are read; no weight is.
//! let checkpoint = Checkpoint::open("examples/data/tiny-llama")?;
//! let adapter = Adapter::open("examples/data/tiny-llama-lora", 0.8)?;
//! let weights = Weights::patched(checkpoint, vec![adapter], Matching::Strict)?;
//!
//! // Where every module is to live. No memory is taken.
//! let planner = Planner::new(weights.layout(), devices.machine()).allocation("cuda:0,25%;cpu,*".parse()?);
//! let plan = planner.depth(1).plan()?;
//! println!("{plan}");
//!
//! // Everything is read, merged and put where the plan wants it.
//! let model = Arc::new(Loader::new(&devices).load(&weights, &plan)?);
//!
//! let mut streamer = Streamer::new(&model)?;
//! for layer in model.layout().layer_ids().rev() {
//!     let guard = streamer.layer(layer)?;
//!     // Queue this layer's kernels on `streamer.compute()` here.
//!     drop(guard); // marks the end of its use
//! }
//! # Ok::<(), Error>(())
//! ```
//!
//! # The path of a tensor
//!
//! The modules of the library are the stages of that path, and each uses only those above it. The types of the
//! everyday path are re-exported here, those that most programs name in [`prelude`]; the linked modules hold the rest.
//!
//! | stage | what it does | begin at |
//! |---|---|---|
//! | [`error`], bytes, dtype | what can go wrong; sizes; element types | [`Error`], [`ByteSize`], [`DType`], [`Element`] |
//! | [`device`] | devices as values: names, sizes, links | [`DeviceId`], [`Machine`], [`Topology`](device::Topology) |
//! | [`backend`] | memory, streams and events; host, disk, CUDA and simulated devices | [`backend::Backend`], [`backend::Buf`] |
//! | [`registry`] | the devices of a machine, opened at first use; how fast their links are | [`Registry`], [`measure_links`](registry::measure_links) |
//! | [`transfer`] | where bytes come from: files, memory, mappings; where files are | [`transfer::Source`], [`transfer::Storage`] |
//! | [`allocation`] | the strings that say which device takes how much | [`Allocation`] |
//! | [`checkpoint`] | files to tensors, modules and layers; parts of ranks and stages; writing files | [`Checkpoint`], [`checkpoint::Layout`] |
//! | [`patch`] | what is done to a tensor's numbers, and the arithmetic | [`TensorPatch`](patch::TensorPatch) |
//! | [`adapter`] | adapters against a checkpoint's names; a checkpoint with its adapters | [`Adapter`], [`Weights`] |
//! | schedule | which layer is fetched when, into which slot | |
//! | [`plan`] | where every module lives, and how long a pass takes at least | [`Planner`], [`Plan`] |
//! | [`load`] | load, patch, distribute; all stages up to here in one expression | [`Loader`], [`Model`], [`ModelBuilder`] |
//! | [`stream`] | layers on the compute device, one after the other | [`Streamer`], [`Pass`](stream::Pass), [`LayerGuard`] |
//! | [`cache`] | models that stay, and leave when told to | [`ModelCache`] |
//! | `store` | object stores as places of files | `store::ObjectStorage` |
//! | `cuda` | your own CUDA streams and memory; where tensors are | `cuda::address`, `cuda::addresses`, `cuda::adopt_raw_stream` |
//! | `hip`, `corex`, `ascend`, `cambricon` | the same for the drivers of AMD, Iluvatar, Ascend and Cambricon | `hip::address`, `hip::adopt_raw_stream` |
//! | `vulkan`, `wgpu` | your own Vulkan device, or wgpu's; where tensors are | `backend::Vulkan::adopt`, `vulkan::place`, `wgpu::request_device` |
//!
//! Adapters stand before the plan because they can change a weight's size and its sharing. Their arithmetic is done by
//! the load, after it, because only then is there memory for the result.
//!
//! # Words
//!
//! - A **tensor** is what a file stores under one name. A **module** is the tensors of one operation (`X.weight`,
//!   `X.bias`, `X.weight_scale`). A **layer** is the modules that run together (`model.layers.7`); it is what is
//!   streamed. Layers whose roles, types and sizes agree are of one **class**.
//! - The **weights** of a model are a checkpoint and the adapters that are merged into it. A change is **deferred** when it
//!   is not merged: its **factors** are tensors beside the weight, and the caller computes `W x + s B (A x)`.
//! - The **compute device** runs the network. The **remainder device**, the one marked `*` or else `cpu`, takes what
//!   no quota holds.
//! - A module's **home** is the device that keeps it. It is **resident** when that is the compute device, **streamed**
//!   when it is brought for its layer's turn, **in place** when the caller uses it where it lives ([`Use`]).
//! - A **slot** is memory on the compute device for one streamed layer. **Staging** is host memory on the way.
//! - A **pass** goes through the network once. A **step** is what the caller repeats: one pass or several.
//! - To **derive** is to make a model with what another one has in memory. To **demote** is to move resident modules to
//!   the host. To **unload** is to drop a model from the cache. To **trim** is to empty a driver's allocator cache.
//!
//! # Where to find what
//!
//! | you want to | |
//! |---|---|
//! | write an allocation in code, or have one chosen | [`Allocation::builder`], [`Preset`](plan::Preset), [`Allocation::auto`] |
//! | know how long a pass takes | [`Plan::estimate`], [`Plan::forecast`], [`Registry::measured_topology`] |
//! | show progress, cancel a load | [`Loader::progress`], [`Loader::cancel`], [`ModelBuilder::load_with`] |
//! | have weights in another element type than the file's | [`ModelBuilder::cast`], [`Weights::cast`] |
//! | have values of weights in GGML's blocks, or such blocks again | the same, [`ModelBuilder::requantise`], [`patch::dequantise`] |
//! | have values of such blocks on the card, in a layer's turn or in slots | [`LayerGuard::dequantise`], [`Planner::unpack`] |
//! | have LoRA beside weights that stay as they are | [`ModelBuilder::defer`], [`Weights::defer`], [`LayerGuard::deferred`] |
//! | read a tensor | [`TensorView::as_slice`], [`LayerGuard::to_vec`], [`Model::to_vec`], [`Weights::read`] |
//! | wait until a layer has arrived | [`LayerGuard::wait`], [`LayerGuard::arrived`] |
//! | have layers in memory of your own | [`Streamer::with_slots`], [`Planner::external_slots`], [`Planner::fixed_slots`] |
//! | have layers in memory of a framework | [`TensorAllocator`](load::TensorAllocator), [`ModelBuilder::allocator`], [`Streamer::in_slot`] |
//! | change strengths, adapters, plan or device of a loaded model | [`Loader::derive`], [`Loader::relocate`] |
//! | load a model once for all who ask | [`ModelCache::get_or_load`], [`Identity`](cache::Identity) |
//! | free memory between two jobs, or under pressure | [`FreeRequest`](cache::FreeRequest), [`Pressure`](cache::Pressure), [`ModelCache::make_room`], [`Evict`](cache::Evict) |
//! | compare what this process counts with what drivers say | [`MemorySeries`](device::MemorySeries) |
//! | read the metadata of a GGUF file, its tokenizer for one | [`Checkpoint::gguf`] |
//! | open a model in an object store | `store::ObjectStorage`, [`Checkpoint::open_in`], [`Adapter::open_in`] |
//! | have one rank's part of a model, or some of its layers | [`Checkpoint::shard`], [`checkpoint::ShardRules`], [`Checkpoint::stage`] |
//! | write a checkpoint | [`checkpoint::write_safetensors`], [`checkpoint::write_gguf`] |
//! | have files take two thirds of their bytes, bit for bit | [`checkpoint::write_compressed`] |
//! | have streamed weights take as little on the host and the link | [`Planner::compress`], [`Weights::compress`], [`Streamer::verify`] |
//! | read bf16 in DFloat11's form | [`Checkpoint::open`] |
//! | patch matrices of your own on a card | [`backend::Kernels`] |
//! | try a program without a card, in real or in virtual time | [`Registry::simulated`], [`Registry::described`] |
//! | add a kind of device, and test it | [`backend::Backend`], [`backend::conformance`], [`backend::Faulty`] |
//! | set how long is waited for anything | [`Limits`] |
//!
//! Operations give all memory back when they fail. Every variant of [`Error`] is one way to react. Every wait has a
//! deadline.
//!
//! # Features
//!
//! - `cuda` (default) is the backend of NVIDIA devices. Nothing of CUDA has to be installed to build, and no version is
//!   named. Without a driver the library runs and says why there is no device. Without the feature, `cuda:0` still parses
//!   and plans against a described machine.
//! - `hip`, `corex`, `ascend` and `cambricon` are the backends of AMD's devices through ROCm, Iluvatar's through CoreX, Ascend's
//!   through CANN and Cambricon's through CNDrv. They are built like `cuda`, which they turn on; none has run on a device.
//! - `vulkan` is the backend of devices with a driver for Vulkan 1.3, of any vendor. Nothing has to be installed to build.
//! - `wgpu` opens devices that the crate wgpu and the library share, and shows tensors as its buffers. It turns `vulkan` on.
//! - `store` reads weights from S3, Google Cloud Storage, Azure and HTTP servers, through the crate object_store.
//! - `cudarc` shows streams and tensors as the types of that crate. It needs one CUDA version, the same in all crates of a
//!   build: the one that another crate takes, or one of `cuda-11040` to `cuda-13040`, or `cuda-version-from-build-system`,
//!   each of which turns `cudarc` on.
//!
//! Guides are in the package's folder `docs/guide`: allocations, adapters, streaming, object stores, CUDA, Vulkan and wgpu code of your own, the
//! cache, devices. Why the library is built this way is in `docs/design.md`.

pub mod adapter;
pub mod allocation;
#[cfg(feature = "ascend")]
pub mod ascend;
pub mod backend;
mod bytes;
pub mod cache;
#[cfg(feature = "cambricon")]
pub mod cambricon;
pub mod checkpoint;
#[cfg(feature = "corex")]
pub mod corex;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod dtype;
mod encoding;
pub mod error;
mod file;
mod float;
mod ggml;
#[cfg(feature = "hip")]
pub mod hip;
mod interrupt;
mod limits;
pub mod load;
pub mod lossless;
pub mod patch;
pub mod plan;
pub mod prelude;
pub mod registry;
mod rounding;
mod schedule;
mod staging;
#[cfg(feature = "store")]
pub mod store;
pub mod stream;
mod threads;
pub mod transfer;
#[cfg(feature = "vulkan")]
pub mod vulkan;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use adapter::{Adapter, Matching, Weights};
pub use allocation::Allocation;
pub use bytes::ByteSize;
pub use cache::{ModelCache, Retention};
pub use checkpoint::{Checkpoint, LayerId, ModuleId, TensorId};
pub use device::{DeviceId, Machine};
pub use dtype::{BlockSize, DType, Element, UnknownDType};
pub use error::{Error, ErrorKind, Result};
pub use limits::Limits;
pub use load::{Cancel, Deferred, Loader, Model, ModelBuilder, TensorView};
pub use patch::ScalePolicy;
pub use plan::{Order, Plan, Planner, Use};
pub use registry::Registry;
pub use rounding::Rounding;
pub use stream::{LayerGuard, Streamer};

/// The examples of the README and of the guides, compiled and run with the other documentation tests.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/guide/adapters.md")]
    struct Adapters;
    #[doc = include_str!("../docs/guide/allocation.md")]
    struct Allocations;
    #[doc = include_str!("../docs/guide/cache.md")]
    struct Cache;
    #[cfg(feature = "store")]
    #[doc = include_str!("../docs/guide/stores.md")]
    struct Stores;
    #[doc = include_str!("../docs/guide/ranks.md")]
    struct Ranks;
    #[doc = include_str!("../docs/guide/gguf.md")]
    struct Gguf;
    #[doc = include_str!("../docs/guide/streaming.md")]
    struct Streaming;

    #[cfg(feature = "cuda")]
    #[doc = include_str!("../docs/guide/devices.md")]
    struct Devices;

    #[cfg(feature = "wgpu")]
    #[doc = include_str!("../docs/guide/vulkan.md")]
    struct Vulkan;

    mod cuda {
        #[cfg(feature = "cudarc")]
        #[doc = include_str!("../docs/guide/cudarc.md")]
        struct Types;
    }
}
