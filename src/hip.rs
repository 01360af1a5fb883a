//! Interoperation with the caller's HIP code on AMD's devices (`hip:N`): `hipStream_t` and device pointers cross the border. The functions are those of the module
//! [`cuda`](crate::cuda), whose notes hold here, too.
//!
//! ```no_run
//! use std::any::Any;
//! use std::ffi::c_void;
//! use std::sync::Arc;
//! use tensor_offload::{Model, Result, Streamer, hip};
//!
//! /// # Safety
//! /// `stream` is a `hipStream_t` of the model's compute device for as long as `keep` lives.
//! unsafe fn pass(model: &Arc<Model>, stream: *mut c_void, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
//!     // SAFETY: the caller's promise.
//!     let compute = unsafe { hip::adopt_raw_stream(model.residency().device(), stream, keep)? };
//!     let mut streamer = Streamer::on(model, compute)?;
//!     for layer in model.layout().layer_ids() {
//!         let guard = streamer.layer(layer)?; // `stream` now waits for the layer
//!         for tensor in guard.tensors() {
//!             let weights = hip::address(&tensor);
//!             // Launch kernels that read there on `stream`.
//! #           let _ = weights;
//!         }
//!     } // dropping the guard marks the end of the layer's use on `stream`
//!     Ok(())
//! }
//! ```

#[doc(inline)]
pub use crate::cuda::{LayerAddresses, address, addresses, adopt_raw_stream, owner, storage, stream_handle};
