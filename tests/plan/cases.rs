//! The plans of `data/plans.json` over the library. What users met is in `data/cases.json`, and in tests of its own.

use std::collections::BTreeMap;

use serde::Deserialize;
use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::{Assignment, Unit};
use tensor_offload::{ByteSize, DeviceId, Order, Plan, Planner, Result};

use super::{GPU0, bytes, machine};

/// The inputs of a plan, and what must come out, as far as it says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    devices: Vec<String>,
    blocks: String,
    alloc: String,
    #[serde(default)]
    order: Option<Order>,
    #[serde(default)]
    unit: Unit,
    #[serde(default)]
    compute: Option<DeviceId>,
    #[serde(default)]
    depth: Option<usize>,
    #[serde(default)]
    reserve: Option<String>,
    #[serde(default)]
    scratch: Option<String>,
    /// Words of the error's message.
    #[serde(default)]
    error: Option<Vec<String>>,
    #[serde(default)]
    kind: Option<String>,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    bytes: BTreeMap<DeviceId, u64>,
    #[serde(default)]
    between: BTreeMap<DeviceId, (u64, u64)>,
    #[serde(default)]
    modules: BTreeMap<DeviceId, Vec<String>>,
    #[serde(default)]
    total: Option<u64>,
    #[serde(default)]
    longest_run: Option<usize>,
    #[serde(default)]
    warns: bool,
}

impl Case {
    fn layout(&self) -> Layout {
        let part = |part: &str| {
            let (count, size) = part.split_once('x').unwrap();
            vec![size.parse::<ByteSize>().unwrap().get(); count.parse().unwrap()]
        };
        Layout::blocks(self.blocks.split(',').flat_map(part))
    }

    fn plan(&self) -> Result<Plan> {
        let (layout, machine) = (self.layout(), machine(&self.devices.iter().map(String::as_str).collect::<Vec<_>>()));
        let size = |text: &Option<String>| text.as_ref().map_or(ByteSize(0), |t| t.parse().unwrap());
        Planner::new(&layout, &machine)
            .allocation(self.alloc.parse()?)
            .compute(self.compute.unwrap_or(GPU0))
            .order(self.order.unwrap_or(Order::Sequential))
            .unit(self.unit)
            .depth(self.depth.unwrap_or(2))
            .reserve(size(&self.reserve))
            .scratch(size(&self.scratch).get())
            .plan()
    }

    /// What is wrong with the result, if anything.
    fn judge(&self, result: Result<Plan>) -> std::result::Result<(), String> {
        let plan = match (result, &self.error) {
            (Err(error), Some(words)) => {
                let (text, kind) = (error.to_string(), error.kind().to_string());
                let kind_is_right = self.kind.as_ref().is_none_or(|wanted| *wanted == kind);
                let said = words.iter().all(|word| text.contains(word.as_str()));
                return if kind_is_right && said { Ok(()) } else { Err(format!("{kind}: {text}")) };
            }
            (Err(error), None) => return Err(error.to_string()),
            (Ok(plan), Some(_)) => return Err(format!("no error, but\n{plan}")),
            (Ok(plan), None) => plan,
        };
        let names = |device: DeviceId| -> Vec<String> {
            plan.assignments().iter().filter(|a| a.device == device).map(|a| a.module.to_string()).collect()
        };
        let all: u64 = plan.assignments().iter().map(|a| a.bytes).sum();
        let longest = plan.assignments().chunk_by(|a, b| a.device == b.device).map(<[Assignment]>::len).max();
        let holds = self.bytes.iter().all(|(&device, &wanted)| bytes(&plan, device) == wanted)
            && self.between.iter().all(|(&device, &(low, high))| (low..=high).contains(&bytes(&plan, device)))
            && self.modules.iter().all(|(&device, wanted)| names(device) == *wanted)
            && self.total.is_none_or(|total| total == all)
            && self.longest_run.is_none_or(|most| longest.unwrap_or(0) <= most)
            && (!self.warns || !plan.warnings().is_empty())
            && self.mode.as_ref().is_none_or(|mode| plan.mode().name() == mode);
        if holds { Ok(()) } else { Err(format!("this is not as it should be:\n{plan}")) }
    }
}

#[test]
fn the_plans_of_the_data_file_hold() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../data/plans.json")).unwrap();
    assert!(cases.len() > 50);
    let judged =
        cases.iter().filter_map(|case| case.judge(case.plan()).err().map(|why| format!("{}: {why}", case.name)));
    let failures: Vec<String> = judged.collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
