//! The whole driver between two resets, and what every call goes through first.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use crate::acl;
use crate::capture::Capture;
use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::contexts::Fate;
use crate::counted::Counting;
use crate::device::Device;
use crate::fault::{FaultPlan, Faults, Spoil, Verdict};
use crate::graph::{Executable, Graph};
use crate::hazard::Clock;
use crate::hip;
use crate::kernel::Loaded;
use crate::lane::{Lane, Ticket};
use crate::memory::Memory;
use crate::pinned::Pinned;
use crate::pool::Pool;
use crate::report::{Report, Rule};
use crate::shared::Shared;
use crate::stream::{Event, LaneState, Stream};
use crate::sync::lock;
use crate::vendor::Vendor;
use crate::worker;

/// The environment variable with a configuration, for programs that know nothing of the stand-in.
const CONFIG_VARIABLE: &str = "CUDA_STANDIN_CONFIG";
/// The environment variable with the path of a file that gets the report of such a program at its end. `%p` in it stands
/// for the number of the process, for programs that start others.
const REPORT_VARIABLE: &str = "CUDA_STANDIN_REPORT";

static WORLD: RwLock<Option<Arc<World>>> = RwLock::new(None);
/// By vendor.
static INITIALIZED: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    /// HIP's current device, and in which world it was chosen.
    static DEVICE: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// The calls of this thread, and in which world it made them.
    static OWN_CALLS: RefCell<(u64, Counts)> = const { RefCell::new((0, Counts::new())) };
}

/// How often each call was made.
type Counts = BTreeMap<&'static str, u64>;

fn named(counts: &Counts) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// A handle that no one can mistake for memory, and that is never given twice, resets included.
pub(crate) fn new_handle() -> u64 {
    0x00C1_0000_0000_0000 | (NEXT_HANDLE.fetch_add(1, Ordering::Relaxed) << 8)
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) shared: Arc<Shared>,
    state: Mutex<State>,
    pub(crate) faults: Mutex<Faults>,
    calls: Mutex<Counts>,
    number: u64,
}

/// All that the calls change; the workers never look at it.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// What the host has seen the end of.
    pub(crate) host: Clock,
    pub(crate) devices: Vec<Device>,
    /// Live contexts and their devices.
    pub(crate) contexts: HashMap<u64, usize>,
    /// Those that the program made itself, and by which calls.
    pub(crate) own_contexts: HashMap<u64, &'static str>,
    /// Of contexts that have had streams.
    pub(crate) fates: HashMap<u64, Arc<Fate>>,
    pub(crate) lanes: Vec<LaneState>,
    /// Those whose streams were destroyed.
    pub(crate) spare: Vec<u32>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) pools: HashMap<u64, Pool>,
    pub(crate) modules: HashMap<u64, Loaded>,
    pub(crate) memory: Memory,
    pub(crate) pinned: Pinned,
    /// The streams that are captured.
    pub(crate) captures: HashMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, Graph>,
    /// Graphs made ready to launch.
    pub(crate) executables: HashMap<u64, Executable>,
    /// Handles that went when someone reset their primary context, which their owner cannot know.
    pub(crate) taken: HashSet<u64>,
    pub(crate) counting: Counting,
}

impl World {
    fn new(config: Config) -> World {
        let number = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        let devices = config.devices.iter().map(|device| Device::fresh(device.others_bytes)).collect();
        let state = State { devices, counting: Counting::new(number), ..State::default() };
        World {
            shared: Arc::new(Shared::new(config)),
            state: Mutex::new(state),
            faults: Mutex::default(),
            calls: Mutex::default(),
            number,
        }
    }

    fn current() -> Arc<World> {
        if let Some(world) = WORLD.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
            return Arc::clone(world);
        }
        let mut world = WORLD.write().unwrap_or_else(|e| e.into_inner());
        Arc::clone(world.get_or_insert_with(|| Arc::new(World::new(config_from_environment()))))
    }

    /// Makes a new world; all that the old one had is gone.
    pub(crate) fn replace(config: Option<Config>) {
        let old = {
            let mut slot = WORLD.write().unwrap_or_else(|e| e.into_inner());
            let config = config.unwrap_or_else(|| match slot.as_ref() {
                Some(world) => world.shared.config.clone(),
                None => config_from_environment(),
            });
            slot.replace(Arc::new(World::new(config)))
        };
        let Some(old) = old else { return };
        let lanes: Vec<Arc<Lane>> = old.state().lanes.iter().map(|l| Arc::clone(&l.lane)).collect();
        lanes.iter().for_each(|lane| lane.stop());
        lanes.iter().for_each(|lane| lane.join(Duration::from_secs(5)));
    }

    pub(crate) fn plan(plan: FaultPlan) {
        let world = World::current();
        world.shared.engines.slow(plan.link);
        // First, so that nothing that the new plan holds is let go of at once.
        let number = world.shared.plan.fetch_add(1, Ordering::AcqRel) + 1;
        *lock(&world.faults) = Faults::new(plan, number);
    }

    /// What was seen; waits a moment for the work that is enqueued, so that its checks are made.
    pub(crate) fn report() -> Report {
        let world = World::current();
        world.shared.nudge();
        let tickets: Vec<Ticket> = world.state().lanes.iter().map(LaneState::ticket).collect();
        let deadline = std::time::Instant::now() + Duration::from_secs(2);
        while !tickets.iter().all(Ticket::is_done) && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut report = world.state().report(&world.shared);
        report.calls = named(&lock(&world.calls));
        // At the end of the process this thread's own may be gone.
        let own_calls = OWN_CALLS.try_with(|own| match &*own.borrow() {
            (of, own) if *of == world.number => named(own),
            _ => BTreeMap::new(),
        });
        report.own_calls = own_calls.unwrap_or_default();
        report
    }

    /// The end of the last piece of work in counted time, which no work of the next stretch begins before.
    pub(crate) fn mark() -> u64 {
        World::current().state().counting.mark()
    }

    /// What the driver says of its version.
    pub(crate) fn version() -> i32 {
        let world = World::current();
        let told = lock(&world.faults).plan.driver_version;
        told.unwrap_or(world.config().driver_version)
    }

    pub(crate) fn first_device_name() -> Option<String> {
        World::current().config().devices.first().map(|device| device.name.clone())
    }

    /// Counts a call, of all threads and of this one.
    fn count(&self, name: &'static str) {
        *lock(&self.calls).entry(name).or_default() += 1;
        // A call may come from the end of a thread, when its own are gone.
        let _ = OWN_CALLS.try_with(|own| {
            let (of, own) = &mut *own.borrow_mut();
            if *of != self.number {
                (*of, *own) = (self.number, Counts::new());
            }
            *own.entry(name).or_default() += 1;
        });
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn config(&self) -> &Config {
        &self.shared.config
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> i32;
}

extern "C" fn write_report() {
    let _ = catch_unwind(|| {
        let Ok(path) = std::env::var(REPORT_VARIABLE) else { return };
        let path = path.replace("%p", &std::process::id().to_string());
        let json = serde_json::to_vec_pretty(&World::report()).unwrap_or_default();
        if let Err(error) = std::fs::write(&path, json) {
            eprintln!("cuda-standin: {path}: {error}");
        }
    });
}

fn config_from_environment() -> Config {
    if std::env::var_os(REPORT_VARIABLE).is_some() {
        // SAFETY: the function has the type that the C library asks for, and keeps its panics inside.
        unsafe { atexit(write_report) };
    }
    let Ok(text) = std::env::var(CONFIG_VARIABLE) else { return Config::default() };
    match serde_json::from_str(&text) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("cuda-standin: {CONFIG_VARIABLE} is no configuration: {error}");
            Config { devices: Vec::new(), ..Config::default() }
        }
    }
}

/// One call of the driver.
#[derive(Debug)]
pub(crate) struct Call<'w> {
    pub(crate) name: &'static str,
    pub(crate) vendor: Vendor,
    pub(crate) world: &'w World,
    /// What is to go wrong with the work that this call enqueues.
    pub(crate) spoil: Spoil,
}

/// Runs one call of the driver: counts it, lets it fail if it is to, and keeps panics inside.
pub(crate) fn enter(vendor: Vendor, name: &'static str, body: impl FnOnce(&Call<'_>) -> Outcome<()>) -> u32 {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let world = World::current();
        let call = Call::begin(vendor, name, &world)?;
        body(&call)
    }));
    let number = match result {
        Ok(Ok(()) | Err(Code::CAPTURED)) => return 0,
        Ok(Err(code)) => vendor.number(code),
        Err(_) => {
            let shared = Arc::clone(&World::current().shared);
            shared.violation(Rule::Panic, name, || "the stand-in panicked".to_owned());
            vendor.number(Code::UNKNOWN)
        }
    };
    if vendor == Vendor::Acl {
        acl::remember(name, number);
    }
    number
}

impl<'w> Call<'w> {
    fn begin(vendor: Vendor, name: &'static str, world: &'w World) -> Outcome<Call<'w>> {
        world.count(name);
        let mut call = Call { name, vendor, world, spoil: Spoil::default() };
        if worker::in_host_function() {
            call.violation(Rule::CallInHostFunction, || "host functions must not call the driver".to_owned());
            return Err(Code::NOT_PERMITTED);
        }
        call.safe_while_capturing()?;
        let verdict = lock(&world.faults).count(name);
        match verdict {
            Some(Verdict::Fail(code)) => return Err(code),
            Some(Verdict::Break(code)) => {
                let current = match vendor {
                    Vendor::Hip => Some(call.thread_device()),
                    _ => world.state().contexts.get(&CURRENT.get()).copied(),
                };
                current.into_iter().for_each(|device| world.shared.break_device(device, code));
                return Err(code);
            }
            Some(Verdict::Later(spoil)) => call.spoil = spoil,
            None => {}
        }
        if vendor == Vendor::Hip && !hip::needs_no_device(name) && call.device_count() == 0 {
            return Err(Code::NO_DEVICE);
        }
        let ready = vendor.needs_no_init(name) || INITIALIZED[vendor as usize].load(Ordering::Acquire);
        if ready { Ok(call) } else { Err(Code::NOT_INITIALIZED) }
    }

    pub(crate) fn init(&self) -> Outcome<()> {
        if self.device_count() == 0 {
            return Err(Code::NO_DEVICE);
        }
        INITIALIZED[self.vendor as usize].store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the vendor's library was initialised before now, which it is no longer.
    pub(crate) fn uninit(&self) -> bool {
        INITIALIZED[self.vendor as usize].swap(false, Ordering::AcqRel)
    }

    pub(crate) fn violation(&self, rule: Rule, detail: impl FnOnce() -> String) {
        self.world.shared.violation(rule, self.name, detail);
    }

    /// Locks the state, and lets the host know what its own functions may have told it.
    pub(crate) fn state(&self) -> MutexGuard<'w, State> {
        let told = self.world.shared.told();
        let mut state = self.world.state();
        state.host.join(&told);
        state
    }

    /// The device of the calling thread's current context, which must be there and whole.
    pub(crate) fn device(&self, state: &State) -> Outcome<usize> {
        if self.vendor == Vendor::Hip {
            let device = self.thread_device();
            self.whole(device)?;
            return Ok(device);
        }
        let current = CURRENT.get();
        if state.taken.contains(&current) {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        let Some(&device) = state.contexts.get(&current) else {
            self.violation(Rule::NoContext, || {
                let what = if current == 0 { "has no current context" } else { "has a context that is gone" };
                format!("the calling thread {what}")
            });
            return Err(Code::INVALID_CONTEXT);
        };
        self.whole(device)?;
        Ok(device)
    }

    /// The result for a handle that there is not; one that a reset took breaks no rule.
    pub(crate) fn no_handle(&self, state: &State, handle: u64, what: &str, result: Code) -> Code {
        if state.taken.contains(&handle) {
            return if state.taken.contains(&CURRENT.get()) { Code::CONTEXT_IS_DESTROYED } else { result };
        }
        self.violation(Rule::UnknownHandle, || format!("there is no {what} {handle:#x}"));
        result
    }

    /// The same for a lane, whose context may have come to an end by itself.
    pub(crate) fn goes_on(&self, lane: &Lane) -> Outcome<()> {
        lane.ended(&self.world.shared).map_or(Ok(()), Err)
    }

    /// A broken device gives the same result to every call.
    pub(crate) fn whole(&self, device: usize) -> Outcome<()> {
        self.world.shared.broken(device).map_or(Ok(()), Err)
    }

    /// The device that HIP's calls of this thread concern: the first one, unless it chose another.
    pub(crate) fn thread_device(&self) -> usize {
        let (of, device) = DEVICE.get();
        if of == self.world.number { device } else { 0 }
    }

    pub(crate) fn set_thread_device(&self, device: usize) {
        DEVICE.set((self.world.number, device));
    }

    /// The context that what is made now belongs to; HIP's belongs to the device alone.
    pub(crate) fn owning_context(&self) -> u64 {
        if self.vendor == Vendor::Hip { 0 } else { CURRENT.get() }
    }

    pub(crate) fn current_context() -> u64 {
        CURRENT.get()
    }

    pub(crate) fn set_current_context(context: u64) {
        CURRENT.set(context);
    }

    /// Waits for work, without holding the state; the host then has seen what the clock stands for.
    pub(crate) fn host_waits(&self, tickets: &[Ticket], clock: &Clock) {
        self.world.shared.nudge();
        tickets.iter().for_each(Ticket::wait);
        let mut state = self.world.state();
        state.host.join(clock);
        tickets.iter().for_each(|ticket| state.counting.saw(ticket.counted));
        state.release_cached();
    }

    /// The host asked whether work has run: true, and it has then seen it, or false.
    pub(crate) fn host_asks(&self, state: &mut State, ticket: &Ticket, clock: &Clock) -> bool {
        let done = ticket.is_done();
        if done {
            state.host.join(clock);
            state.counting.saw(ticket.counted);
        } else {
            self.world.shared.nudge();
        }
        done
    }
}
