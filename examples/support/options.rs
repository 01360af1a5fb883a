//! The options that say which devices there are and what goes where.

use clap::{Args, ValueEnum};
use tensor_offload::backend::Clock;
use tensor_offload::{ByteSize, Described, DeviceId, Machine, Order, Planner, Registry, Result};

/// Which devices there are.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceOptions {
    /// A described device, as ID=TOTAL[,free=SIZE][,link=GBPS][,domain=ID] (decimal GB/s each way; domain: the device
    /// whose memory it shares); with any of these there are no others [default: this machine's]
    #[arg(long = "device", value_name = "ID=TOTAL")]
    pub(crate) devices: Vec<String>,
}

impl DeviceOptions {
    /// The machine described, if one is.
    pub(crate) fn described(&self) -> Result<Option<Machine>> {
        if self.devices.is_empty() {
            return Ok(None);
        }
        let devices: Vec<Described> = self.devices.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        Ok(Some(Machine::described(&devices)))
    }

    /// The devices described, simulated; this machine's where none is.
    pub(crate) fn registry(&self, clock: Clock) -> Result<Registry> {
        Ok(self.described()?.map_or_else(Registry::system, |machine| Registry::described(machine, clock)))
    }
}

/// How the model is spread and streamed.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanOptions {
    /// The device that computes [default: the first that is neither cpu nor disk]
    #[arg(long, value_name = "ID")]
    pub(crate) compute: Option<String>,
    /// Whether devices take the model in turn, or parts spread evenly over it as streaming wants
    #[arg(long, value_enum, default_value_t = OrderOption::Interleaved)]
    order: OrderOption,
    /// How many layers are brought ahead of the one in use [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) depth: Option<usize>,
    /// Memory to leave free on the compute device for activations, such as 1.5gib
    #[arg(long, value_name = "SIZE", default_value = "0b")]
    reserve: String,
}

/// An order of placement, as an option's value.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OrderOption {
    Sequential,
    Interleaved,
}

impl From<OrderOption> for Order {
    fn from(option: OrderOption) -> Order {
        match option {
            OrderOption::Sequential => Order::Sequential,
            OrderOption::Interleaved => Order::Interleaved,
        }
    }
}

impl PlanOptions {
    /// The planner with these options set.
    pub(crate) fn apply<'a>(&self, planner: Planner<'a>) -> Result<Planner<'a>> {
        let planner = planner.order(self.order.into()).reserve(self.reserve.parse::<ByteSize>()?);
        let planner = self.depth.iter().fold(planner, |planner, &depth| planner.depth(depth));
        match &self.compute {
            Some(compute) => Ok(planner.compute(compute.parse::<DeviceId>()?)),
            None => Ok(planner),
        }
    }
}
