//! Any text as an allocation string: refused at a place in the text, or it prints as text that means the same, and plans a
//! small model, every module once and no device beyond its memory, or says what does not fit.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tensor_offload::checkpoint::Layout;
use tensor_offload::{Allocation, Error, Machine, Order, Planner};
use tensor_offload::device::Described;
use tensor_offload::error::AllocationError;
use tensor_offload::plan::Unit;

const DEVICES: [&str; 5] =
    ["cuda:0=9kb,link=1", "cuda:1=5kb,free=4kb,link=0.5", "xpu:0=2kb", "cpu=12kb,link=3", "disk=1mb,link=0.1"];

fuzz_target!(|data: &[u8]| {
    let Some((&choice, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let allocation: Allocation = match text.parse() {
        Ok(allocation) => allocation,
        Err(Error::Allocation(fault)) => {
            let AllocationError::Syntax { text: whole, span, .. } = *fault else { return };
            return assert!(whole == text && whole.get(span).is_some());
        }
        Err(other) => panic!("{other}"),
    };
    let printed = allocation.to_string();
    assert_eq!(printed.parse::<Allocation>().expect("what is printed is read"), allocation, "{printed}");
    let described: Vec<Described> = DEVICES.iter().map(|device| device.parse().expect("a device")).collect();
    let machine = Machine::described(&described);
    let sizes = [700u64, 1300, 0, 1300, 40, 2500, 1300, 700, 5000, 1];
    let layout = Layout::blocks(sizes[usize::from(choice & 7)..].iter().copied());
    let order = if choice & 8 == 0 { Order::Interleaved } else { Order::Sequential };
    let unit = if choice & 16 == 0 { Unit::Module } else { Unit::Uniform };
    let planner = Planner::new(&layout, &machine).allocation(allocation).order(order).unit(unit);
    let planner = planner.depth(usize::from(choice >> 5)).compute_time(Duration::from_micros(7));
    let Ok(plan) = planner.plan() else { return };
    plan.verify(&layout).expect("a plan of this model");
    assert_eq!(plan.bytes(), layout.bytes());
    for device in plan.devices() {
        assert!(device.needed() <= device.memory.free.unwrap_or(device.memory.total));
    }
    let kept: tensor_offload::Plan = serde_json::from_str(&serde_json::to_string(&plan).expect("JSON")).expect("a plan");
    assert_eq!(kept, plan);
});
