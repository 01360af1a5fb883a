//! Interoperation with the caller's ACL code on Ascend's devices (`npu:N`): `aclrtStream` and device pointers cross the border. The functions are those of the module
//! [`cuda`](crate::cuda), whose notes hold here, too.
//!
//! ```no_run
//! use std::any::Any;
//! use std::ffi::c_void;
//! use std::sync::Arc;
//! use tensor_offload::{Model, Result, Streamer, ascend};
//!
//! /// # Safety
//! /// `stream` is an `aclrtStream` of the default context of the model's compute device for as long as `keep` lives.
//! unsafe fn pass(model: &Arc<Model>, stream: *mut c_void, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
//!     // SAFETY: the caller's promise.
//!     let compute = unsafe { ascend::adopt_raw_stream(model.residency().device(), stream, keep)? };
//!     let mut streamer = Streamer::on(model, compute)?;
//!     for layer in model.layout().layer_ids() {
//!         let guard = streamer.layer(layer)?; // `stream` now waits for the layer
//!         for tensor in guard.tensors() {
//!             let weights = ascend::address(&tensor);
//!             // Launch kernels that read there on `stream`.
//! #           let _ = weights;
//!         }
//!     } // dropping the guard marks the end of the layer's use on `stream`
//!     Ok(())
//! }
//! ```
//!
//! Once the library has made a stream of a device, all streams of its default context stop at their first failure
//! (`ACL_STOP_ON_FAILURE`), an adopted one, too.

#[doc(inline)]
pub use crate::cuda::{LayerAddresses, address, addresses, adopt_raw_stream, owner, storage, stream_handle};
