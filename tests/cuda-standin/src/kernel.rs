//! Modules, their functions and launches. The text of a module is parsed when it is loaded (`ptx`), and interpreted when
//! its launch has its turn (`ptx_run`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::code::{Code, Outcome};
use crate::extents::extent;
use crate::graph::Node;
use crate::hazard::{Access, Stamp};
use crate::lane::Work;
use crate::ptx::{Function, Module};
use crate::ptx_op::Width;
use crate::ptx_run::{Launch, Window};
use crate::report::Rule;
use crate::sync::lock;
use crate::world::{Call, State, new_handle};

/// A module that is loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) device: usize,
    pub(crate) call: &'static str,
    /// By the handles that were given for them.
    pub(crate) functions: HashMap<u64, Arc<Function>>,
    parsed: Vec<Arc<Function>>,
    /// The last launch in each lane.
    launches: HashMap<u32, Stamp>,
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
}

/// A text, parsed; the last one is remembered, since tests load the same one hundreds of times.
fn parsed(text: &str) -> Result<Arc<Module>, String> {
    static LAST: Mutex<Option<(String, Arc<Module>)>> = Mutex::new(None);
    let mut last = lock(&LAST);
    if let Some((_, module)) = last.as_ref().filter(|(known, _)| known == text) {
        return Ok(Arc::clone(module));
    }
    let module = Arc::new(Module::parse(text)?);
    *last = Some((text.to_owned(), Arc::clone(&module)));
    Ok(module)
}

impl Call<'_> {
    /// Loads a text: of a version that the driver knows, for a target that the device has, of instructions that the
    /// stand-in knows.
    pub(crate) fn load_module(&self, text: &str) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let config = self.world.config();
        if config.refuse_ptx {
            return Err(Code::INVALID_PTX);
        }
        let module = parsed(text).map_err(|why| {
            eprintln!("cuda-standin: a text is refused: {why}");
            Code::INVALID_PTX
        })?;
        // The driver for CUDA 11.0 knows PTX 7.0, that for 12.0 knows 8.0, and so on.
        let newest = (config.driver_version / 1000 - 4, config.driver_version % 1000 / 10);
        if (module.version.0 as i32, module.version.1 as i32) > newest {
            return Err(Code::UNSUPPORTED_PTX_VERSION);
        }
        let (major, minor) = config.devices[device].compute;
        if module.target as i32 > major * 10 + minor {
            return Err(Code::INVALID_PTX);
        }
        let parsed = module.functions.clone();
        let handle = new_handle();
        state.modules.insert(
            handle,
            Loaded { device, call: self.name, functions: HashMap::new(), parsed, launches: HashMap::new() },
        );
        Ok(handle)
    }

    /// Loads the part of a bundle of code that is for the device. What runs is the text that stands for all such code.
    pub(crate) fn load_code(&self, parts: &[(&str, &[u8])]) -> Outcome<u64> {
        let device = self.device(&self.state())?;
        let config = self.world.config();
        let own = format!("hipv4-amdgcn-amd-amdhsa--{}", config.devices[device].architecture);
        let part = parts.iter().find(|(name, _)| *name == own).ok_or(Code::NO_BINARY_FOR_GPU)?.1;
        // An object of ELF with 64 bits, for AMD's devices.
        let is_code = part.starts_with(b"\x7fELF\x02\x01") && part.get(18..20) == Some(&[224, 0]);
        match &config.code_as_ptx {
            Some(text) if is_code => self.load_module(text),
            _ => Err(Code::INVALID_IMAGE),
        }
    }

    /// Lets a module go, which the host must have seen the end of all launches of.
    pub(crate) fn unload_module(&self, module: u64) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let launches = &self.module(&state, module, device)?.launches;
        if let Some(stamp) = launches.values().find(|stamp| !state.host.covers(stamp)) {
            self.violation(Rule::FreeInUse, || format!("a module that {} runs a function of", stamp.call));
        }
        state.modules.remove(&module);
        Ok(())
    }

    /// Finds a function of a module.
    pub(crate) fn function(&self, module: u64, name: &str) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let found = self.module(&state, module, device)?.parsed.iter().find(|function| function.name == name);
        let function = Arc::clone(found.ok_or(Code::NOT_FOUND)?);
        let handle = new_handle();
        if let Some(module) = state.modules.get_mut(&module) {
            module.functions.insert(handle, function);
        }
        Ok(handle)
    }

    fn module<'s>(&self, state: &'s State, module: u64, device: usize) -> Outcome<&'s Loaded> {
        let found = state.modules.get(&module);
        let Some(loaded) = found.filter(|loaded| loaded.device == device) else {
            if found.is_none() {
                return Err(self.no_handle(state, module, "module", Code::INVALID_HANDLE));
            }
            self.violation(Rule::WrongContext, || format!("the module {module:#x} is not the current context's"));
            return Err(Code::INVALID_HANDLE);
        };
        Ok(loaded)
    }

    /// The bytes of each parameter of a function.
    pub(crate) fn parameters(&self, function: u64) -> Outcome<Vec<usize>> {
        let state = self.state();
        let device = self.device(&state)?;
        let (function, _) = self.known_function(&state, function, device)?;
        Ok(function.params.iter().map(|width| *width as usize).collect())
    }

    /// A function, and its module.
    fn known_function(&self, state: &State, function: u64, device: usize) -> Outcome<(Arc<Function>, u64)> {
        let of_device = state.modules.iter().filter(|(_, module)| module.device == device);
        let mut found = of_device.filter_map(|(module, of)| Some((Arc::clone(of.functions.get(&function)?), *module)));
        let missing = || self.no_handle(state, function, "function of this context", Code::INVALID_HANDLE);
        found.next().ok_or_else(missing)
    }

    /// Enqueues a function. What it may touch, of each allocation that a parameter points into, is all from there on, or less for a
    /// function that is known (`extents`): which of it is read and which is written is known from the text.
    pub(crate) fn launch(&self, function: u64, shape: Shape, stream: u64, params: Vec<u64>) -> Outcome<()> {
        let mut state = self.state();
        let node = || Node::Kernel { function, shape, params: params.clone() };
        let lane = self.lane_for(&mut state, stream, node)?;
        let device = state.lanes[lane as usize].lane.device;
        let (function, module) = self.known_function(&state, function, device)?;
        let threads: u64 = shape.threads.iter().map(|side| u64::from(*side)).product();
        let flat = shape.blocks[1..] == [1, 1] && shape.threads[2] == 1;
        if threads == 0 || threads > function.most_threads || shape.blocks[0] == 0 || shape.blocks[0] > i32::MAX as u32
        {
            return Err(Code::INVALID_VALUE);
        }
        if !flat {
            return Err(Code::NOT_SUPPORTED);
        }
        let mut found = Vec::new();
        for (index, address) in params.iter().enumerate() {
            let (reads, writes) = (function.reads >> index & 1 != 0, function.writes >> index & 1 != 0);
            if function.params[index] != Width::Eight || !(reads || writes) {
                continue;
            }
            let mut range = self.own(&state, *address, 1, lane)?;
            let rest = state.memory.get(range.base).map_or(1, |allocation| allocation.len - range.offset);
            range.len = extent(&function.name, &params, index).map_or(rest, |most| rest.min(most));
            found.push((*address, range, if writes { Access::Write } else { Access::Read }));
        }
        let mut windows = Vec::new();
        let mut lie = None;
        for (address, range, access) in &found {
            let place = self.place(&state, range)?;
            if lie.is_none() && *access == Access::Write && lock(&self.world.faults).plan.lying_functions {
                lie = Some(place.clone());
            }
            windows.push(Window { address: *address, len: range.len, place });
        }
        let turn = state.turn(lane, self.name);
        if let Some(module) = state.modules.get_mut(&module) {
            module.launches.insert(lane, turn.stamp);
        }
        for (_, range, access) in &found {
            self.touch(&mut state, range, *access, &turn);
        }
        let [across, down, _] = shape.threads;
        let launch = Launch { function, blocks: shape.blocks[0], threads: [across, down], params, windows, lie };
        self.submit(&mut state, turn, Work::Kernel(Box::new(launch)));
        Ok(())
    }
}
