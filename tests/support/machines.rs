//! Machines as data files describe them, and the time of a pass on the virtual clock.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
use tensor_offload::checkpoint::Layout;
use tensor_offload::{DeviceId, Machine, Model, Plan, Registry, Result, Streamer};

use super::{DEADLINE, described};

/// A machine: its devices as the examples' `--device` has them, and what else there is to say of their links.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineData {
    pub(crate) devices: Vec<String>,
    /// Direct links: two devices and the speed.
    #[serde(default)]
    peers: Vec<(DeviceId, DeviceId, String)>,
    /// Segments that transfers of their members share: a name, the speed, the members.
    #[serde(default)]
    shared: Vec<(String, String, Vec<DeviceId>)>,
    /// Pairs that cannot read each other's memory.
    #[serde(default)]
    unreached: Vec<(DeviceId, DeviceId)>,
}

impl MachineData {
    pub(crate) fn machine(&self) -> Machine {
        let machine = described(&self.devices.iter().map(String::as_str).collect::<Vec<_>>());
        let mut topology = machine.topology().clone();
        for (a, b, speed) in &self.peers {
            topology = topology.peer(*a, *b, speed.parse().unwrap());
        }
        for (name, speed, members) in &self.shared {
            topology = topology.shared(name, speed.parse().unwrap(), members.iter().copied());
        }
        for (a, b) in &self.unreached {
            topology = topology.no_peer_access(*a, *b);
        }
        machine.with_topology(topology)
    }
}

/// The time of a pass of a model that runs already, without contents, each layer computing for its time. An error where the host has
/// no room for staging buffers.
pub(crate) fn clocked(machine: &Machine, layout: &Layout, plan: &Plan, layers: &[Duration]) -> Result<Duration> {
    let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual).contents(Contents::SizesOnly));
    let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    steady_pass(&simulated, &Arc::new(Model::unfilled(&devices, layout, plan)?), layers)
}

/// As [`clocked`], of a model on the devices of a virtual clock.
pub(crate) fn steady_pass(simulated: &Simulated, model: &Arc<Model>, layers: &[Duration]) -> Result<Duration> {
    const BEFORE: u32 = 2;
    const COUNTED: u32 = 2;
    let mut streamer = Streamer::new(model)?;
    let mut pass = || {
        for (layer, &time) in model.layout().layer_ids().zip(layers) {
            let _guard = streamer.layer(layer)?;
            streamer.compute().occupy(time)?;
            if model.plan().compute().is_host() {
                // Compute on the host is the caller's own.
                streamer.compute().record(&[])?.wait(DEADLINE)?;
            }
        }
        streamer.compute().record(&[])?.wait(DEADLINE)
    };
    (0..BEFORE).try_for_each(|_| pass())?;
    let begin = simulated.now();
    (0..COUNTED).try_for_each(|_| pass())?;
    Ok((simulated.now() - begin) / COUNTED)
}
