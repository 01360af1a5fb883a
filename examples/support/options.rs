//! The options that say which devices there are and what goes where.

use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tensor_offload::backend::Clock;
use tensor_offload::device::Described;
use tensor_offload::plan::Unit;
use tensor_offload::{ByteSize, DType, DeviceId, Machine, Order, Plan, Planner, Registry, Result, Weights};

/// Which devices there are.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceOptions {
    /// A described device, as ID=TOTAL[,free=SIZE][,link=GBPS][,decode=GBPS][,domain=ID][,pinned=MOST][,largest=SIZE] (decimal GB/s each way;
    /// decode: of compressed weights; domain: the device whose memory it shares; pinned: the most of the host's that may be pinned; largest: the largest allocation that its driver makes); with any of these there are no others [default: this machine's]
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
    /// Whether devices take the model in turn, or parts spread evenly over it as streaming wants: by module, or uniform,
    /// so that layers look alike; `auto` chooses by itself
    #[arg(long, value_enum, default_value_t = OrderOption::Interleaved)]
    order: OrderOption,
    /// How many layers to prefetch [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) depth: Option<usize>,
    /// Place the modules of this name first, on the compute device, within its quota; `*` stands for any run of characters,
    /// and a name without it also for a part of names: `--keep self_attn`
    #[arg(long, value_name = "PATTERN")]
    keep: Vec<String>,
    /// Use the modules of this name where they live, instead of streaming them, and leave the compute device to the others:
    /// `--in-place experts` keeps the experts of every layer on the host; names are as for --keep
    #[arg(long, value_name = "PATTERN")]
    in_place: Vec<String>,
    /// Use embeddings where they live, where the compute device's quota does not hold them: their rows are gathered
    #[arg(long)]
    gather_embeddings: bool,
    /// Have slots hold the values of weights in GGML's blocks, as F32, F16 or BF16: blocks cross the links, and the compute
    /// device unpacks them
    #[arg(long, value_name = "TYPE")]
    pub(crate) unpack: Option<DType>,
    /// Memory to leave free on the compute device for activations, such as 1.5gib
    #[arg(long, value_name = "SIZE", default_value = "0b")]
    reserve: String,
}

/// Whether weights stay compressed.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct CompressOption {
    /// Keep streamed weights compressed, as the file has them (`merge --compress`) or as they are compressed on loading: they take less
    /// where they live, less of them crosses the link, and the compute device decodes them
    #[arg(long)]
    pub(crate) compress: bool,
    /// Keep weights compressed, too, that live on the compute device: it holds more of them, and decodes them for each use
    #[arg(long)]
    pub(crate) compress_resident: bool,
}

impl CompressOption {
    /// Whether any weights are kept compressed.
    pub(crate) fn any(self) -> bool {
        self.compress || self.compress_resident
    }

    /// The weights, to be compressed on loading if they are to be kept so.
    pub(crate) fn apply(self, weights: Weights) -> Result<Weights> {
        if self.any() { weights.compress() } else { Ok(weights) }
    }

    /// The planner, with what is kept compressed.
    pub(crate) fn set(self, planner: Planner<'_>) -> Planner<'_> {
        planner.compress(self.compress).compress_resident(self.compress_resident)
    }
}

/// An order of placement, as an option's value.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OrderOption {
    Sequential,
    Interleaved,
    Uniform,
}

impl OrderOption {
    pub(crate) const ALL: [OrderOption; 3] = [OrderOption::Sequential, OrderOption::Interleaved, OrderOption::Uniform];

    pub(crate) fn name(self) -> &'static str {
        match self {
            OrderOption::Sequential => "sequential",
            OrderOption::Interleaved => "interleaved",
            OrderOption::Uniform => "uniform",
        }
    }

    pub(crate) fn apply(self, planner: Planner<'_>) -> Planner<'_> {
        planner.order(self.into()).unit(self.unit())
    }

    /// Whether a plan was made so.
    pub(crate) fn is_of(self, plan: &Plan) -> bool {
        plan.order() == self.into() && (plan.order() == Order::Sequential || plan.unit() == self.unit())
    }

    fn unit(self) -> Unit {
        if matches!(self, OrderOption::Uniform) { Unit::Uniform } else { Unit::Module }
    }
}

impl From<OrderOption> for Order {
    fn from(option: OrderOption) -> Order {
        match option {
            OrderOption::Sequential => Order::Sequential,
            OrderOption::Interleaved | OrderOption::Uniform => Order::Interleaved,
        }
    }
}

/// A time of at most an hour, given in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Milliseconds(pub(crate) Duration);

impl FromStr for Milliseconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.trim().parse::<f64>().ok().filter(|ms| (0.0..=3_600_000.0).contains(ms));
        let ms = number.ok_or("not a number of milliseconds from 0 to an hour")?;
        Ok(Milliseconds(Duration::from_secs_f64(ms / 1000.0)))
    }
}

impl PlanOptions {
    /// The memory to leave free on the compute device, in bytes.
    pub(crate) fn reserve(&self) -> Result<u64> {
        Ok(self.reserve.parse::<ByteSize>()?.get())
    }

    /// The planner with these options set.
    pub(crate) fn apply<'a>(&self, planner: Planner<'a>) -> Result<Planner<'a>> {
        let planner = self.order.apply(planner).reserve(ByteSize(self.reserve()?));
        let planner = self.keep.iter().fold(planner, Planner::keep_resident).gather_embeddings(self.gather_embeddings);
        let planner = self.in_place.iter().fold(planner, Planner::in_place);
        let planner = self.depth.iter().fold(planner, |planner, &depth| planner.depth(depth));
        let planner = self.unpack.iter().fold(planner, |planner, &dtype| planner.unpack(dtype));
        match &self.compute {
            Some(compute) => Ok(planner.compute(compute.parse::<DeviceId>()?)),
            None => Ok(planner),
        }
    }
}
