//! A plan on the virtual clock: the real streamer, over memory that has sizes only.

use std::sync::Arc;
use std::time::Duration;

use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
use tensor_offload::checkpoint::Layout;
use tensor_offload::{Machine, Model, Plan, Registry, Result, Streamer};

/// Steps before the first that counts: the first finds the slots empty.
const BEFORE: u32 = 1;

/// Steps that count.
const COUNTED: u32 = 2;

/// The simulated time of one step of a model that runs already, on average over a few: `passes` times through the
/// network, with `compute` spread evenly over all layers of all passes.
pub(crate) fn step(
    machine: &Machine,
    layout: &Layout,
    plan: &Plan,
    compute: Duration,
    passes: u32,
) -> Result<Duration> {
    let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual).contents(Contents::SizesOnly));
    let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    let model = Arc::new(Model::unfilled(&devices, layout, plan)?);
    let mut streamer = Streamer::new(&model)?;
    let mut begin = simulated.now();
    for step in 0..BEFORE + COUNTED {
        if step == BEFORE {
            begin = simulated.now();
        }
        run(&mut streamer, compute, passes)?;
    }
    Ok((simulated.now() - begin) / COUNTED)
}

/// One step; the host waits for its end, as a caller does who looks at the result.
pub(crate) fn run(streamer: &mut Streamer, compute: Duration, passes: u32) -> Result<()> {
    let layers = streamer.model().layout().layer_ids();
    let turns = layers.len() as u128 * u128::from(passes);
    // Where each turn ends, so that the turns add up to `compute` exactly.
    let until = |turn: u128| Duration::from_nanos((compute.as_nanos() * turn / turns.max(1)) as u64);
    for (turn, layer) in (0..turns).zip(layers.cycle()) {
        let _guard = streamer.layer(layer)?;
        streamer.compute().occupy(until(turn + 1) - until(turn))?;
    }
    streamer.compute().record(&[])?.wait(Duration::from_secs(600))
}
