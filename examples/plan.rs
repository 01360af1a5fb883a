//! Shows where an allocation puts every module of a model, without loading anything.
//!
//! `cargo run --example plan -- --blocks 10x1gib --alloc "cuda:0,50%;cpu,*" --device cuda:0=24gib --device cpu=64gib`

mod support;

use clap::Parser;
use serde_json::{Value, json};
use support::casts::CastOptions;
use support::model::ModelOptions;
use support::options::{CompressOption, DeviceOptions, Milliseconds, PlanOptions};
use tensor_offload::{Plan, Planner, Registry, Result};

/// Shows where an allocation puts every module of a model, without loading anything.
#[derive(Parser)]
#[command(name = "plan")]
struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    casts: CastOptions,
    /// Which device takes how much: `cuda:0,2.5gb;cpu,*`, `cuda:0,50%;cpu,50%`, `cuda:0,0.8` (of its memory),
    /// `#cuda:0;4.0;cpu` (GiB that leave cuda:0), `auto` or `auto,reserve=2gb` (what makes a pass shortest)
    #[arg(long, value_name = "ALLOCATION")]
    alloc: String,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    plan: PlanOptions,
    #[command(flatten)]
    codes: CompressOption,
    /// Milliseconds of compute in one pass, spread over the layers by their bytes: `auto` hides transfers behind it
    #[arg(long, value_name = "MS", default_value = "0")]
    compute_ms: Milliseconds,
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
        let layout = self.model.layout_of(&self.casts, self.codes)?;
        let planner = self.codes.set(self.plan.apply(Planner::new(&layout, &machine))?).compute_time(self.compute_ms.0);
        let plan = planner.allocation(allocation).plan()?;
        if !self.json {
            println!("{plan}");
        }
        Ok(report(&plan))
    }
}

fn report(plan: &Plan) -> Value {
    let device = |d: &tensor_offload::plan::DevicePlan| json!({ "id": d.id, "bytes": d.weights.bytes, "quota": d.quota, "modules": d.weights.modules, "in_files": d.weights.in_files });
    let assignment = |a: &tensor_offload::plan::Assignment| json!({ "module": a.module, "device": a.device, "use": a.usage, "bytes": a.bytes });
    json!({
        "mode": plan.mode(),
        "order": plan.order(),
        "compute": plan.compute(),
        "devices": plan.devices().iter().map(device).collect::<Vec<_>>(),
        "assignments": plan.assignments().iter().map(assignment).collect::<Vec<_>>(),
        "warnings": plan.warnings(),
        "outliers": plan.outliers(),
        "slots": plan.slots(),
        "explanation": plan.explanation(),
    })
}

fn main() {
    support::main::<Args>()
}
