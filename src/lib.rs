//! Run models larger than one device.
//!
//! This library reads a checkpoint, decides by an allocation string which weights live on which device, applies
//! adapters to them at full precision, puts every weight where it belongs, and brings the layers that live elsewhere
//! to the compute device while it computes. It does not run the network: your kernels do, between asking for a
//! layer and dropping its guard.
//!
//! # A working example
//!
//! A small Llama and a LoRA come with the crate. The card here is a described one, smaller than the model; with
//! [`Registry::system`] the same code runs on this machine's devices.
//!
//! ```
//! use std::sync::Arc;
//! use tensor_offload::backend::Clock;
//! use tensor_offload::{
//!     Adapter, Checkpoint, DeviceId, Loader, Machine, Matching, ModelCache, Patches, Planner, Registry, Retention,
//!     Streamer,
//! };
//!
//! let card = DeviceId::cuda(0);
//! let machine = Machine::described(&["cuda:0=256kb,link=1".parse()?, "cpu=64mb".parse()?]);
//! let devices = Registry::described(machine, Clock::Virtual);
//!
//! // What the files hold, and what the adapter makes of it. No weight is read yet.
//! let checkpoint = Checkpoint::open("examples/data/tiny-llama")?;
//! let adapter = Adapter::open("examples/data/tiny-llama-lora", 1.0)?;
//! let patches = Patches::resolve(checkpoint.layout(), vec![adapter], Matching::Strict)?;
//! assert!(patches.layout().bytes() > 256 << 10);
//!
//! // Where every module is to live. No memory is taken yet.
//! let plan = Planner::new(patches.layout(), devices.machine())
//!     .allocation("cuda:0,40kb;cpu,*".parse()?)
//!     .depth(1)
//!     .plan()?;
//! println!("{plan}");
//!
//! // Load, patch, distribute.
//! let model = Arc::new(Loader::new(&devices).load(&checkpoint, &patches, &plan)?);
//!
//! // Once through the network. A layer is on the card for work queued while its guard lives.
//! let mut streamer = Streamer::new(&model)?;
//! for layer in model.layout().layer_ids() {
//!     let guard = streamer.layer(layer)?;
//!     for tensor in guard.tensors() {
//!         assert_eq!(tensor.device(), card);
//!     }
//!     // Queue this layer's kernels on `streamer.compute()` here.
//! }
//! drop(streamer);
//!
//! // Keep it for later, or let it go.
//! let cache = ModelCache::new();
//! cache.insert("llama", model, Retention::Unload);
//! assert_eq!(cache.unload_all().unloaded[0].key, "llama");
//! # Ok::<(), tensor_offload::Error>(())
//! ```
//!
//! # The path of a tensor
//!
//! The modules of the library are the stages of that path, and each uses only those above it. The types of the
//! everyday path are re-exported here; the linked modules hold the rest.
//!
//! | stage | what it does | begin at |
//! |---|---|---|
//! | [`error`], bytes, dtype | what can go wrong; sizes; element types | [`Error`], [`ByteSize`], [`DType`] |
//! | [`device`] | devices as values: names, sizes, links | [`DeviceId`], [`Machine`], [`Topology`] |
//! | [`backend`] | memory, streams and events; host, disk, CUDA and simulated devices | [`backend::Backend`], [`backend::Buf`] |
//! | registry | the devices of a machine, opened at first use; how fast their links are | [`Registry`], [`measure_links`] |
//! | [`transfer`] | where bytes come from: files, memory, mappings | [`transfer::Source`] |
//! | allocation | the strings that say which device takes how much | [`Allocation`] |
//! | [`checkpoint`] | files to tensors, modules and layers; writing files | [`Checkpoint`], [`checkpoint::Layout`] |
//! | [`patch`] | what is done to a tensor's numbers, and the arithmetic | [`TensorPatch`] |
//! | [`adapter`] | adapters against a checkpoint's names | [`Adapter`], [`Patches`] |
//! | schedule | which layer is fetched when, into which slot | |
//! | plan | where every module lives, and how long a pass takes at least | [`Planner`], [`Plan`] |
//! | load | load, patch, distribute | [`Loader`], [`Model`] |
//! | stream | layers on the compute device, one after the other | [`Streamer`], [`LayerGuard`] |
//! | cache | models that stay, and leave when told to | [`ModelCache`] |
//! | `cuda` | your own CUDA streams and memory; tensors as cudarc's types | `cuda::adopt_stream` |
//!
//! Adapters stand before the plan because they can change a weight's size and its sharing. Their arithmetic is done by
//! the load, after it, because only then is there memory for the result.
//!
//! # Words
//!
//! - A **tensor** is what a file stores under one name. A **module** is the tensors of one operation (`X.weight`,
//!   `X.bias`, `X.weight_scale`). A **layer** is the modules that run together (`model.layers.7`); it is what is
//!   streamed. Layers whose roles, types and sizes agree are of one **class**.
//! - The **compute device** runs the network. The **remainder device**, the one marked `*` or else `cpu`, takes what
//!   no quota holds.
//! - A module's **home** is the device that keeps it. It is **resident** when that is the compute device, **streamed**
//!   when it is brought for its layer's turn, **in place** when the caller uses it where it lives ([`Use`]).
//! - A **slot** is memory on the compute device for one streamed layer. **Staging** is host memory on the way.
//! - A **pass** goes through the network once. A **step** is what the caller repeats: one pass or several.
//! - To **derive** is to make a model with what another one has in memory. To **demote** is to move resident modules to
//!   the host. To **unload** is to drop a model from the cache. To **trim** is to empty a driver's allocator cache.
//!
//! # What it does
//!
//! - Allocation strings in bytes, ratios, fractions of a device, and bytes that leave the compute device
//!   ([`Allocation`]). Sizes are exact; errors point at the place in the text.
//! - Plans that are values: they print as a table, serialise, compare, and tell the floor of a pass's time
//!   ([`Plan::estimate`]). A plan that does not fit is an error that names the device, the term and the bytes short.
//! - safetensors: one file, sharded with an index, a folder, or in memory; read strictly and by position
//!   ([`Checkpoint`]), written tensor by tensor ([`checkpoint::write_safetensors`]).
//! - LoRA for linear and convolution weights, in the spellings of the common trainers and as PEFT folders; f32, bf16,
//!   f16 and fp8 weights, scaled fp8 too. One rounding, and the same bytes whatever the plan, the number of threads
//!   and the instruction set ([`patch`]), and on the CUDA device that a weight is for ([`backend::Kernels`]).
//! - Loading with progress and cancellation that gives all memory back when it fails ([`Loader`]).
//! - Other strengths, adapters, plans and compute devices for a model that is loaded: only what changes is read again and
//!   patched, from pristine bytes; the rest is shared or copied ([`Loader::derive`]).
//! - Streaming in any order of layers, from all their devices at one time, for several models on one device, into slots of
//!   the library's or the caller's own ([`Streamer`]). Arrivals can be awaited ([`LayerGuard::arrived`]).
//! - A cache that owns its models and unloads exactly the flagged ones, when it is told to, asked to between two jobs,
//!   or short of memory ([`ModelCache`], [`FreeRequest`], [`Pressure`]), and demotes kept ones to make room ([`Evict`]).
//! - Memory as this process counts it beside what drivers report, and where the two part ([`MemorySeries`]).
//! - Devices by description, on a virtual or a wall clock, for plans, tests and examples ([`backend::Simulated`]); a
//!   suite that every backend has to pass ([`backend::conformance`]); a backend that fails on purpose
//!   ([`backend::Faulty`]).
//!
//! # Features
//!
//! `cuda` (default) is the backend of NVIDIA devices; it needs one CUDA version beside it, `cuda-12000` by default, the
//! same in all crates of a build. Nothing of CUDA has to be installed to build, and without a driver the library runs
//! and says why there is no device. Without `cuda`, `cuda:0` still parses and plans against a described machine.
//!
//! What does not exist yet, and the commands to try all of this, are in the repository's README; why it is built this
//! way is in `docs/design.md`.

pub mod adapter;
mod allocation;
pub mod backend;
mod bytes;
mod cache;
pub mod checkpoint;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod dtype;
pub mod error;
mod float;
mod limits;
mod load;
pub mod patch;
mod plan;
mod registry;
mod rounding;
mod schedule;
mod staging;
mod stream;
mod threads;
pub mod transfer;

pub use adapter::{Adapter, MatchReport, Matching, Patches, RotaryRows};
pub use allocation::{Allocation, AllocationBuilder, Mode};
pub use bytes::{ByteSize, Human};
pub use cache::{
    CleanupReport, EntryInfo, Evict, FreeRequest, Identity, ModelCache, Pressure, PressureReadings, PressureReport,
    PressureState, Retention, Unfinished, UnloadReport, Unloaded,
};
pub use checkpoint::{Checkpoint, LayerId, ModuleId, TensorId};
pub use device::{
    Bandwidth, Described, DeviceId, DeviceInfo, DeviceKind, LinkMatrix, Machine, MemoryDrift, MemorySeries,
    MemorySnapshot, MemoryUsage, Topology,
};
pub use dtype::{DType, UnknownDType};
pub use error::{
    AdapterFault, AllocationError, Error, ErrorKind, FileFault, Holder, NoRoom, PlanFault, Result, Shortfall,
};
pub use limits::Limits;
pub use load::{Cancel, LoadReport, Loader, Model, Progress, Reservation, Residency, TensorView, WeightStore};
pub use patch::{PatchOutcome, ScalePolicy, TensorPatch};
pub use plan::{
    Alternative, Assignment, ComputeTime, DeviceBeside, DevicePlan, DeviceReason, DeviceRoom, DeviceWeights, Estimate,
    Explanation, KeptFor, Order, Outlier, Plan, Planner, Preset, SegmentTime, Slots, Unit, Use, Warning,
};
pub use registry::{LinkTiming, Registry, measure_links};
pub use rounding::Rounding;
pub use stream::{LaneReport, LayerGuard, StallCause, Stalls, StreamReport, Streamer, Via};

/// The examples of the README, compiled and run with the other documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
