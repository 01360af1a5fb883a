//! Measures how fast bytes get from the host to each device, back, and from device to device.
//!
//! `cargo run --release --example transfer` measures this machine's devices in the manner of NVIDIA's nvbandwidth;
//! `cargo run --release --example transfer -- --size 32mb --device cuda:0=1gb,link=2` a described one.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use clap::Parser;
use serde_json::{Value, json};
use support::options::DeviceOptions;
use tensor_offload::backend::{Backend, Clock, Host};
use tensor_offload::device::DeviceKind;
use tensor_offload::device::{LeftOut, Link, LinkMatrix};
use tensor_offload::registry::{LinkTiming, measure_links};
use tensor_offload::{ByteSize, DeviceId, Registry, Result};

/// Measures how fast bytes get from the host to each device, back, and from device to device: with ordinary and with
/// pinned memory, through staging buffers, both ways at once, and between peers. Each figure is the bytes of a copy
/// over the median time of 16 copies after 4 to warm up (fewer where they would take over two seconds), queued while
/// the stream is held where that is possible. What arrived is compared with what was sent.
#[derive(Parser)]
#[command(name = "transfer")]
struct Args {
    /// The bytes of each copy, such as 64mb; less where memory is short
    #[arg(long, value_name = "SIZE", default_value = "512mb")]
    size: String,
    #[command(flatten)]
    devices: DeviceOptions,
    /// Print one JSON value instead of a table
    #[arg(long)]
    json: bool,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let timing = LinkTiming::thorough().bytes(self.size.parse::<ByteSize>()?);
        let registry = self.devices.registry(Clock::Wall)?;
        let mut matrix = measure_links(&registry, &timing)?;
        if !registry.machine().ids().any(computes) {
            let (what, why) =
                ("host to device, device to host, device to device", "there is no device but cpu and disk");
            matrix.left_out.push(LeftOut::new(what, why));
        }
        if !self.json {
            let clock = if self.devices.devices.is_empty() { "the host's clock" } else { "the simulation's clock" };
            support::print_line(&text(&registry, &matrix, clock));
        }
        Ok(report(&registry, &matrix))
    }
}

fn computes(id: DeviceId) -> bool {
    !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk)
}

fn text(registry: &Registry, matrix: &LinkMatrix, clock: &str) -> String {
    support::devices::lines(registry.machine())
        + &format!(
            "{matrix}\nGB/s are 10^9 bytes a second by {clock}. The fixed cost is that of a 4-byte copy, waited for: it is\n\
         part of the pageable figures; queued copies hide it."
        )
}

fn report(registry: &Registry, matrix: &LinkMatrix) -> Value {
    let ends: BTreeSet<DeviceId> = matrix.links.iter().flat_map(|link| [link.from, link.to]).collect();
    let system = Registry::new([Arc::new(Host::new()) as Arc<dyn Backend>]);
    let device = |&id: &DeviceId| {
        let info = registry.machine().device(id).or_else(|_| system.machine().device(id)).ok();
        info.map_or_else(|| json!({ "id": id }), support::devices::report)
    };
    let link = |link: &Link| {
        json!({
            "from": link.from, "to": link.to, "kind": link.kind, "bytes": link.bytes,
            "gb_per_second": link.bandwidth.get() as f64 / 1e9, "median_of": link.median_of,
            "fixed_micros": link.fixed.map(|fixed| fixed.as_secs_f64() * 1e6),
        })
    };
    json!({
        "devices": ends.iter().map(device).collect::<Vec<_>>(),
        "links": matrix.links.iter().map(link).collect::<Vec<_>>(),
        "left_out": matrix.left_out,
    })
}

fn main() {
    support::main::<Args>()
}
