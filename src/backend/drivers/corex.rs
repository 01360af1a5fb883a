//! Iluvatar's driver: that of CUDA by another path.

use std::path::{Path, PathBuf};

use super::cuda::{self, Nvml, Variant};
use super::driver::{Driver, installed, named, open_any};
use super::{Cards, Vendor};
use crate::device::{DeviceInfo, DeviceKind};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCOREX";

/// The variable that names the folder of the toolkit, and where that is without it.
const HOME_VARIABLE: &str = "COREX_HOME";
const HOME: &str = "/usr/local/corex";

/// The backend of Iluvatar's devices through CoreX, and of `cpu` with memory that they copy from at full speed.
///
/// The devices are `corex:N`, as the driver numbers them, so `CUDA_VISIBLE_DEVICES` applies. The driver is a `libcuda.so.1` in the
/// toolkit's folder (`COREX_HOME`, or `/usr/local/corex`), or the file that [`library`](Corex::library) or the environment variable
/// `TENSOR_OFFLOAD_LIBCOREX` names. It answers as one of CUDA 10.2 does, so what is newer is used only where it is there. If the
/// management library (`libixml.so`) is beside it, the free memory of devices is known before they are opened. Without a usable
/// driver, [`discover`](crate::backend::Backend::discover) returns the reason; nothing panics.
///
/// In a program that uses NVIDIA's driver, too, open that one first, as [`Registry::system`](crate::Registry::system) does: once this one is
/// loaded, it is found by the name of both.
///
/// Where the driver refuses the texts of kernels, which are PTX, patches and the values of blocks are computed on the host.
///
/// ```
/// use tensor_offload::backend::{Backend, Corex, Found};
/// for found in Corex::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Corex {
    cards: Cards<Iluvatar>,
}

struct Iluvatar;

backend!(Corex);

impl Corex {
    /// The CoreX devices of this system.
    pub fn new() -> Corex {
        Corex { cards: Cards::new(Iluvatar) }
    }
}

/// The file that the caller or the environment names, or the one of the toolkit.
fn driver_file(library: Option<&Path>) -> PathBuf {
    named(library, LIBRARY_VARIABLE).unwrap_or_else(|| installed(&[HOME_VARIABLE], HOME, "lib64/libcuda.so.1"))
}

impl Vendor for Iluvatar {
    const KIND: DeviceKind = DeviceKind::Corex;

    fn load(&self, library: Option<&Path>) -> Result<(Driver, Vec<DeviceInfo>), String> {
        let library = open_any(Some(&driver_file(library)), &[], "CoreX driver")?;
        cuda::load(&library, Iluvatar::KIND, Variant::CoreX)
    }

    fn management(&self, library: Option<&Path>) -> Option<Nvml> {
        let nvml = Nvml::load(Some(&driver_file(library).with_file_name("libixml.so")));
        nvml.inspect_err(|why| tracing::debug!(%why, "no management library")).ok()
    }
}
