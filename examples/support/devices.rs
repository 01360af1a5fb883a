//! What is known of devices, in a line and as JSON.

use serde_json::{Value, json};
use tensor_offload::device::{DeviceInfo, DeviceKind};
use tensor_offload::{ByteSize, Machine};

/// A line for each device of the machine that is neither the host's memory nor its disk.
pub(crate) fn lines(machine: &Machine) -> String {
    let accelerators =
        machine.devices().iter().filter(|info| !matches!(info.id.kind(), DeviceKind::Cpu | DeviceKind::Disk));
    accelerators.map(|info| line(info) + "\n").collect()
}

/// `cuda:0: NVIDIA H200, 139.80 GiB, 139.21 GiB of it free, PCIe 5 x16`.
fn line(info: &DeviceInfo) -> String {
    let mut line = format!("{}: {}, {}", info.id, info.name, ByteSize(info.total).human());
    match info.free {
        Some(free) if free < info.total => line += &format!(", {} of it free", ByteSize(free).human()),
        _ => {}
    }
    if info.domain != info.id {
        line += &format!(", in the memory of {}", info.domain);
    }
    let links = info.gpu.as_ref().map(ToString::to_string).filter(|links| !links.is_empty());
    links.into_iter().for_each(|links| line += &format!(", {links}"));
    info.aliases.iter().for_each(|alias| line += &format!(", also {alias}"));
    line
}

/// The same as JSON.
pub(crate) fn report(info: &DeviceInfo) -> Value {
    json!({
        "id": info.id, "name": info.name, "total": info.total, "free": info.free, "opening": info.opening,
        "domain": info.domain, "gpu": info.gpu, "aliases": info.aliases,
    })
}
