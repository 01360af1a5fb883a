//! Replays a table of published step times on the virtual clock, with the real planner, model and streamer.
//!
//! `cargo run --release --example replay -- --csv examples/data/published-step-times.csv`

mod support;

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};
use support::options::OrderOption;
use support::replay::step;
use support::table::{Link, Row, Table};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::{DeviceInfo, Topology};
use tensor_offload::{DType, DeviceId, Error, Machine, Order, Plan, Planner, Result};

/// The card that computes.
const CARD: DeviceId = DeviceId::cuda(0);

/// The card that lends its memory.
const DONOR: DeviceId = DeviceId::cuda(1);

/// Replays a table of published step times: for every row and link, a model of that size with that much kept elsewhere
/// is planned and streamed on devices that are described, on a virtual clock. A step is one of a model that runs
/// already. Its lower bound is the larger of the compute time and the transfer time.
#[derive(Parser)]
#[command(name = "replay")]
struct Args {
    /// The table: columns model, model_gb, offloaded_gb, compute_s, passes, then LINK@GB/s with published seconds per
    /// step; decimal gigabytes; cells may be empty; lines that begin with # are comments
    #[arg(long, value_name = "FILE")]
    csv: PathBuf,
    /// How many layers of equal size each model has
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    layers: u64,
    /// How many layers to prefetch; with 0, a layer's copy begins when the layer is requested
    #[arg(long, value_name = "N", default_value_t = 2)]
    depth: usize,
    /// Whether every layer has a part that stays on the card, or the first layers stay whole
    #[arg(long, value_enum, default_value_t = OrderOption::Interleaved)]
    order: OrderOption,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// What came of one row over one link, in seconds per step.
struct Cell<'a> {
    row: &'a Row,
    link: &'a Link,
    published: Option<f64>,
    seconds: f64,
    floor: f64,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let table = Table::read(&self.csv)?;
        let mut cells = Vec::new();
        for row in &table.rows {
            for (link, &published) in table.links.iter().zip(&row.published) {
                let cell = self.replay(row, link, published)?;
                cells.push(cell);
            }
        }
        if !self.json {
            self.print(&cells);
        }
        Ok(json!({ "cells": cells.iter().map(Cell::json).collect::<Vec<_>>() }))
    }
}

impl Args {
    fn replay<'a>(&self, row: &'a Row, link: &'a Link, published: Option<f64>) -> Result<Cell<'a>> {
        let compute = Duration::from_secs_f64(row.compute);
        let layout = self.layout(row)?;
        let machine = self.machine(row, link);
        let plan = self.plan(row, link, &layout, &machine)?;
        if plan.streamed_bytes() != row.offloaded_bytes {
            let (streamed, wanted) = (plan.streamed_bytes(), row.offloaded_bytes);
            return Err(Error::Invalid {
                reason: format!("{}: {streamed} bytes are streamed, not {wanted}", row.model),
            });
        }
        let seconds = step(&machine, &layout, &plan, compute, row.passes)?.as_secs_f64();
        let transfers = f64::from(row.passes) * row.offloaded_bytes as f64 / link.bandwidth.get() as f64;
        Ok(Cell { row, link, published, seconds, floor: row.compute.max(transfers) })
    }

    /// Layers of two modules each, `stays` and `travels`, cut so that what leaves the card adds up to the byte.
    fn layout(&self, row: &Row) -> Result<Layout> {
        let (layers, kept) = (self.layers, row.model_bytes - row.offloaded_bytes);
        let share = |bytes: u64, layer: u64| {
            let upto = |layers_before: u64| u128::from(bytes) * u128::from(layers_before) / u128::from(layers);
            (upto(layer + 1) - upto(layer)) as u64
        };
        // Where layers stay whole, one of them is cut where the card is full; all are cut there, to be alike.
        let mut before = 0;
        let whole = (0..layers).take_while(|&layer| {
            before += share(row.model_bytes, layer);
            before <= kept
        });
        let whole = whole.count() as u64;
        let cut = kept - (0..whole).map(|layer| share(row.model_bytes, layer)).sum::<u64>();
        let (mut tensors, mut offset) = (Vec::new(), 0);
        for layer in 0..layers {
            let all = share(row.model_bytes, layer);
            let (stays, travels) = match self.order.into() {
                Order::Sequential => (cut, all - cut.min(all)),
                _ => (share(kept, layer), share(row.offloaded_bytes, layer)),
            };
            for (role, bytes) in [("stays", stays), ("travels", travels)].into_iter().filter(|(_, bytes)| *bytes > 0) {
                let name = format!("layers.{layer}.{role}.weight");
                tensors.push(TensorInfo::new(name, DType::U8, &[bytes], 0, offset)?);
                offset += bytes;
            }
        }
        Ok(Layout::new(tensors))
    }

    /// A card with room for what stays and for the slots, and where the rest is kept.
    fn machine(&self, row: &Row, link: &Link) -> Machine {
        let slot = Layout::slot_bytes(row.model_bytes.div_ceil(self.layers)) + Layout::slot_bytes(1);
        let slots = slot.saturating_mul(self.depth.saturating_add(1).min(self.layers as usize) as u64);
        let card = DeviceInfo::new(CARD, (row.model_bytes - row.offloaded_bytes).saturating_add(slots));
        let host = DeviceInfo::new(DeviceId::CPU, row.offloaded_bytes.max(1));
        if link.to_host {
            return Machine::new([host, card], Topology::new().link(CARD, link.bandwidth));
        }
        let donor = DeviceInfo::new(DONOR, row.offloaded_bytes.max(1));
        Machine::new([host, card, donor], Topology::new().peer(CARD, DONOR, link.bandwidth))
    }

    fn plan(&self, row: &Row, link: &Link, layout: &Layout, machine: &Machine) -> Result<Plan> {
        let kept = row.model_bytes - row.offloaded_bytes;
        let donor = if link.to_host { DeviceId::CPU } else { DONOR };
        let allocation = if kept > 0 { format!("{CARD},{kept}b;{donor},*") } else { format!("{donor},*") };
        let planner = Planner::new(layout, machine).compute(CARD).allocation(allocation.parse()?).depth(self.depth);
        let planner = planner.order(self.order.into()).pinned_cap(None);
        match self.order.into() {
            Order::Sequential => planner.plan(),
            _ => planner.keep_resident("layers.*.stays").plan(),
        }
    }

    fn print(&self, cells: &[Cell<'_>]) {
        let Args { layers, depth, .. } = self;
        support::print_line(&format!(
            "simulated seconds per step: {layers} layers, depth {depth}, {}",
            Order::from(self.order)
        ));
        support::print_line(&format!(
            "{:18} {:>7}  {:20} {:>9} {:>9} {:>9} {:>6} {:>9}",
            "model", "off, GB", "kept at", "published", "replayed", "bound", "ratio", "gain"
        ));
        for cell in cells {
            support::print_line(&cell.line());
        }
        let worst = cells.iter().filter_map(Cell::ratio).fold(f64::NAN, f64::max);
        support::print_line(&format!("{} cells, at most {worst:.4} times the lower bound", cells.len()));
    }
}

impl Cell<'_> {
    fn ratio(&self) -> Option<f64> {
        (self.floor > 0.0).then(|| self.seconds / self.floor)
    }

    fn line(&self) -> String {
        let seconds = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        let gain = self.published.filter(|_| self.seconds > 0.0).map(|published| published / self.seconds);
        format!(
            "{:18} {:>7}  {:20} {:>9} {:>9.3} {:>9.3} {:>6} {:>9}",
            self.row.model,
            self.row.offloaded_gb,
            self.link.name,
            seconds(self.published),
            self.seconds,
            self.floor,
            seconds(self.ratio()),
            gain.map_or("-".to_owned(), |gain| format!("{gain:.2} x")),
        )
    }

    fn json(&self) -> Value {
        json!({
            "model": self.row.model, "offloaded_gb": self.row.offloaded_gb, "link": self.link.name,
            "seconds": self.seconds, "floor": self.floor, "published": self.published,
        })
    }
}

fn main() {
    support::main::<Args>()
}
