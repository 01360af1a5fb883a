//! Shows where an allocation puts every module of a model, without loading anything.
//!
//! `cargo run --example plan -- --blocks 10x1gib --alloc "cuda:0,50%;cpu,*" --device cuda:0=24gib --device cpu=64gib`

mod support;

use std::path::PathBuf;

use clap::Parser;
use serde_json::{Value, json};
use support::options::{DeviceOptions, PlanOptions};
use tensor_offload::checkpoint::Layout;
use tensor_offload::{ByteSize, Checkpoint, Error, Plan, Planner, Registry, Result};

/// The most blocks that `--blocks` makes.
const MOST_BLOCKS: usize = 10_000_000;

/// Shows where an allocation puts every module of a model, without loading anything.
#[derive(Parser)]
#[command(name = "plan")]
struct Args {
    /// The model: a safetensors file, or a folder with one or with an index
    #[arg(required_unless_present = "blocks", conflicts_with = "blocks")]
    model: Option<PathBuf>,
    /// A model of blocks instead of a file, as COUNTxSIZE[,COUNTxSIZE…]: 10x1gib, or 1x5gib,3x1gib
    #[arg(long)]
    blocks: Option<String>,
    /// Which device takes how much: `cuda:0,2.5gb;cpu,*`, `cuda:0,50%;cpu,50%`, `cuda:0,0.8` (of its memory),
    /// `#cuda:0;4.0;cpu` (GiB that leave cuda:0)
    #[arg(long, value_name = "ALLOCATION")]
    alloc: String,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    plan: PlanOptions,
    /// Print one JSON value instead of a table
    #[arg(long)]
    json: bool,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let allocation = self.alloc.parse()?;
        let machine = self.devices.described()?.unwrap_or_else(|| Registry::system().machine().clone());
        let layout = self.layout()?;
        let plan = self.plan.apply(Planner::new(&layout, &machine))?.allocation(allocation).plan()?;
        if !self.json {
            println!("{plan}");
        }
        Ok(report(&plan))
    }
}

impl Args {
    fn layout(&self) -> Result<Layout> {
        match (&self.blocks, &self.model) {
            (Some(blocks), _) => Ok(Layout::blocks(sizes(blocks)?)),
            (None, Some(model)) => Ok(Checkpoint::open(model)?.layout().clone()),
            (None, None) => Err(invalid("name a model or give --blocks")),
        }
    }
}

/// `10x1gib,1x5gib` as the sizes of eleven blocks.
fn sizes(blocks: &str) -> Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for part in blocks.split(',') {
        let form = || invalid(format!("`{part}` in --blocks is not COUNTxSIZE, as in 10x1gib"));
        let (count, size) = part.split_once(['x', 'X']).ok_or_else(form)?;
        let (count, size): (usize, ByteSize) = (count.trim().parse().map_err(|_| form())?, size.parse()?);
        if count > MOST_BLOCKS - sizes.len() {
            return Err(invalid(format!("--blocks makes at most {MOST_BLOCKS} blocks")));
        }
        sizes.resize(sizes.len() + count, size.get());
    }
    Ok(sizes)
}

fn report(plan: &Plan) -> Value {
    let device = |d: &tensor_offload::DevicePlan| json!({ "id": d.id, "bytes": d.bytes, "quota": d.quota, "modules": d.modules });
    let assignment = |a: &tensor_offload::Assignment| json!({ "module": a.module, "device": a.device, "use": a.usage, "bytes": a.bytes });
    json!({
        "mode": plan.mode(),
        "order": plan.order(),
        "compute": plan.compute(),
        "devices": plan.devices().iter().map(device).collect::<Vec<_>>(),
        "assignments": plan.assignments().iter().map(assignment).collect::<Vec<_>>(),
        "warnings": plan.warnings(),
    })
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::Invalid { reason: reason.into() }
}

fn main() {
    support::main::<Args>()
}
