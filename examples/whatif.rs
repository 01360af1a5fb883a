//! Shows what other hardware, another order or another depth would bring, without loading anything.
//!
//! `cargo run --release --example whatif -- --blocks 60x600mb --alloc "cuda:0,16gib;cpu,*" --compute-ms 1500
//! --device cuda:0=24gib,link=12.1 --device cpu=64gib`

mod support;

use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};
use support::model::ModelOptions;
use support::options::{CompressOption, DeviceOptions, Milliseconds, OrderOption, PlanOptions};
use support::replay::step;
use tensor_offload::allocation::Mode;
use tensor_offload::checkpoint::Layout;
use tensor_offload::device::{Bandwidth, DeviceInfo, Topology};
use tensor_offload::plan::Estimate;
use tensor_offload::{Allocation, ByteSize, DeviceId, Machine, Plan, Planner, Registry, Result};

/// Shows what a second card, a faster link, more pinned memory, another order or another depth would bring: for each the
/// lower bound of a pass's time, and the time of a pass replayed on a virtual clock.
#[derive(Parser)]
#[command(name = "whatif")]
struct Args {
    #[command(flatten)]
    model: ModelOptions,
    /// Which device takes how much, as `cuda:0,2.5gb;cpu,*`, or `auto`, which finds it for every case
    #[arg(long, value_name = "ALLOCATION")]
    alloc: String,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    plan: PlanOptions,
    #[command(flatten)]
    codes: CompressOption,
    /// Milliseconds of compute in one pass
    #[arg(long, value_name = "MS", default_value = "1000")]
    compute_ms: Milliseconds,
    /// Speed of a link between two cards, in decimal GB/s
    #[arg(long, value_name = "GBPS", default_value = "50.8")]
    nvlink: String,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// A machine, what goes where on it, and how it is streamed.
#[derive(Clone)]
struct Case {
    name: String,
    machine: Machine,
    allocation: Allocation,
    /// The depth, where it is not that of the options.
    depth: Option<usize>,
    /// The order, likewise.
    order: Option<OrderOption>,
    /// Whether pinning has no limit.
    pins_all: bool,
    /// The model in a compressed file, where it is that.
    compressed: Option<Arc<Layout>>,
}

/// What a case comes to.
struct Outcome {
    plan: Plan,
    estimate: Estimate,
    replayed: Duration,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let machine = self.devices.described()?.unwrap_or_else(|| Registry::system().machine().clone());
        let layout = if self.codes.any() { self.model.compressed()?.0 } else { self.model.layout()? };
        let allocation = self.alloc.parse()?;
        let (name, compressed) = ("as it is".to_owned(), None);
        let current = Case { name, machine, allocation, depth: None, order: None, pins_all: false, compressed };
        let base = self.outcome(&layout, &current)?;
        let others = self.others(&current, &base.plan)?;
        let mut rows = vec![(current.name, Ok(base))];
        rows.extend(others.into_iter().map(|case| (case.name.clone(), self.outcome(&layout, &case))));
        if !self.json {
            print(&rows);
        }
        Ok(json!({ "cases": rows.iter().map(report).collect::<Vec<_>>() }))
    }
}

impl Args {
    fn outcome(&self, layout: &Layout, case: &Case) -> Result<Outcome> {
        let layout = case.compressed.as_deref().unwrap_or(layout);
        let (compute, layers) = (self.compute_ms.0, layout.layers().len());
        let planner = self.plan.apply(Planner::new(layout, &case.machine))?.allocation(case.allocation.clone());
        let planner = self.codes.set(planner);
        let planner = if case.compressed.is_some() { planner.compress(true) } else { planner };
        let planner = case.depth.into_iter().fold(planner, Planner::depth);
        let planner = case.order.into_iter().fold(planner, |planner, order| order.apply(planner));
        // As it is replayed.
        let planner = planner.compute_time(vec![compute / u32::try_from(layers.max(1)).unwrap_or(u32::MAX); layers]);
        let plan = if case.pins_all { planner.pinned_cap(None).plan()? } else { planner.plan()? };
        let estimate = plan.estimate(case.machine.topology(), compute);
        let replayed = step(&case.machine, layout, &plan, compute, 1)?;
        Ok(Outcome { plan, estimate, replayed })
    }

    /// One thing changed in each.
    fn others(&self, base: &Case, plan: &Plan) -> Result<Vec<Case>> {
        let (card, mut cases) = (plan.compute(), Vec::new());
        let named = |name: String| Case { name, ..base.clone() };
        let into = format!("{card} in");
        let link = base.machine.topology().segments().iter().rev().find(|segment| segment.name == into);
        let link = link.map(|segment| segment.bandwidth);
        if let Some(link) = link {
            let twice = Bandwidth::bytes_per_second(link.get().saturating_mul(2));
            let machine = relinked(&base.machine, |topology| topology.link(card, twice));
            cases.push(Case { machine, ..named(format!("a slot twice as fast for {card}")) });
        }
        if plan.streamed_bytes() > 0 && !card.is_host() {
            let second = second(base, plan, link)?;
            let nvlink: Bandwidth = self.nvlink.parse()?;
            let name = format!("the same, linked at {nvlink} GB/s");
            let machine = relinked(&second.1.machine, |topology| topology.peer(card, second.0, nvlink));
            let linked = Case { name, machine, ..second.1.clone() };
            cases.extend([second.1, linked]);
        }
        if plan.streamed_bytes() > 0 && !card.is_host() && !self.codes.compress {
            let (layout, name) = self.model.compressed()?;
            cases.push(Case { compressed: Some(Arc::new(layout)), ..named(name) });
        }
        cases.push(Case { pins_all: true, ..named("no limit to pinned memory".to_owned()) });
        if base.allocation.mode() != Mode::Auto {
            let others = OrderOption::ALL.into_iter().filter(|order| !order.is_of(plan));
            cases.extend(others.map(|order| Case { order: Some(order), ..named(format!("order {}", order.name())) }));
            cases.push(Case { allocation: "auto".parse()?, ..named("auto".to_owned()) });
        }
        let depths = [0, 1, 2, 4].into_iter().filter(|&depth| depth != plan.depth());
        cases.extend(depths.map(|depth| Case { depth: Some(depth), ..named(format!("depth {depth}")) }));
        Ok(cases)
    }
}

/// The same devices with other links.
fn relinked(machine: &Machine, change: impl FnOnce(Topology) -> Topology) -> Machine {
    machine.clone().with_topology(change(machine.topology().clone()))
}

/// A second card like the first, which takes what it can of what is streamed; its name and the case.
fn second(base: &Case, plan: &Plan, link: Option<Bandwidth>) -> Result<(DeviceId, Case)> {
    let card = base.machine.device(plan.compute())?;
    let free = |n: usize| format!("{}:{n}", card.id.kind()).parse::<DeviceId>();
    let taken = |id: &Result<DeviceId>| id.as_ref().is_ok_and(|&id| base.machine.device(id).is_ok());
    let id = (0..).map(free).find(|id| !taken(id)).unwrap_or(Ok(card.id))?;
    let info = DeviceInfo::new(id, card.total).name(card.name.clone()).free(card.free);
    let topology = link.into_iter().fold(base.machine.topology().clone(), |topology, link| topology.link(id, link));
    let machine = Machine::new(base.machine.devices().iter().cloned().chain([info]), topology);
    let name = format!("a second card, {id}");
    if base.allocation.mode() == Mode::Auto {
        return Ok((id, Case { name, machine, ..base.clone() }));
    }
    // What streams most now takes what the second card does not hold.
    let rest = plan.devices().iter().filter(|share| share.id != card.id).max_by_key(|share| share.weights.streamed);
    let rest = rest.map_or(DeviceId::CPU, |share| share.id);
    let own = plan.device(card.id).map_or(0, |share| share.weights.bytes);
    let kept = plan.devices().iter().filter(|share| share.id != card.id && share.id != rest);
    let entries =
        [(card.id, own), (id, card.usable())].into_iter().chain(kept.map(|share| (share.id, share.weights.bytes)));
    let entries = entries.filter(|(_, bytes)| *bytes > 0).map(|(id, bytes)| format!("{id},{bytes}b;"));
    let allocation = format!("{}{rest},*", entries.collect::<String>()).parse()?;
    Ok((id, Case { name, machine, allocation, ..base.clone() }))
}

fn print(rows: &[(String, Result<Outcome>)]) {
    let human = |bytes: u64| ByteSize(bytes).human().to_string();
    support::print_line(&format!(
        "{:34} {:>14} {:>9}  {:20} {:>17} {:>11} {:>18}",
        "", "lower bound, s", "replayed", "limited by", "streamed per pass", "staged", "memory on the card"
    ));
    for (name, outcome) in rows {
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                support::print_line(&format!("{name:34} {error}"));
                continue;
            }
        };
        let Outcome { plan, estimate, replayed } = outcome;
        let staged = plan.devices().iter().map(|share| share.weights.staged).sum();
        let needed = plan.device(plan.compute()).map_or(0, |share| share.needed());
        support::print_line(&format!(
            "{name:34} {:>14.3} {:>9.3}  {:20} {:>17} {:>11} {:>18}",
            estimate.pass.as_secs_f64(),
            replayed.as_secs_f64(),
            estimate.bound().map_or("compute", |segment| &segment.name),
            human(plan.streamed_bytes()),
            human(staged),
            human(needed),
        ));
    }
}

fn report((name, outcome): &(String, Result<Outcome>)) -> Value {
    match outcome {
        Ok(Outcome { plan, estimate, replayed }) => json!({
            "case": name, "estimate": estimate, "replayed": replayed.as_secs_f64(),
            "streamed": plan.streamed_bytes(), "depth": plan.depth(), "order": plan.order(), "unit": plan.unit(),
            "devices": plan.devices(), "explanation": plan.explanation(),
        }),
        Err(error) => json!({ "case": name, "error": { "kind": error.kind(), "message": error.to_string() } }),
    }
}

fn main() {
    support::main::<Args>()
}
