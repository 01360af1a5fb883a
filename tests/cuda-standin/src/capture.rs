//! Captures of streams: what is enqueued meanwhile becomes nodes of a graph and is not run, and what breaks a capture breaks it.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::ThreadId;

use crate::code::{Code, Outcome};
use crate::graph::{Graph, Node};
use crate::world::{Call, State, new_handle};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// The calls that a capture of another thread can forbid. The driver's list is longer; these are the ones that
/// programs make without knowing of a capture.
const UNSAFE: [&str; 21] = [
    "cuEventQuery",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "hipEventQuery",
    "hipMalloc",
    "hipFree",
    "hipHostMalloc",
    "hipHostFree",
    "hipHostRegister",
    "hipHostUnregister",
    "hipMemcpyHtoD",
    "hipMemcpyDtoH",
    "aclrtMemcpy",
    "cnMemcpyHtoD",
    "cnMemcpyDtoH",
];

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// The capture of one stream.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: i32,
    thread: ThreadId,
    broken: bool,
    device: usize,
    nodes: Vec<Node>,
}

impl Capture {
    /// Whether it forbids this thread the calls that are not safe meanwhile.
    fn forbids(&self) -> bool {
        let own = self.thread == std::thread::current().id() && self.mode != RELAXED;
        match MODE.get() {
            RELAXED => false,
            THREAD_LOCAL => own,
            _ => own || self.mode == GLOBAL,
        }
    }
}

impl State {
    /// Breaks the captures of which that holds; whether there are any.
    fn break_captures(&mut self, of: impl Fn(u64, &Capture) -> bool) -> bool {
        let mut any = false;
        for (&stream, capture) in &mut self.captures {
            if of(stream, capture) {
                (capture.broken, any) = (true, true);
            }
        }
        any
    }
}

impl Call<'_> {
    /// Refuses a call that a capture forbids this thread, and breaks that capture.
    pub(crate) fn safe_while_capturing(&self) -> Outcome<()> {
        let forbidden = UNSAFE.contains(&self.name) && self.world.state().break_captures(|_, c| c.forbids());
        if forbidden { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Adds work to the stream's capture, if it has one; the call has then done all it does.
    pub(crate) fn capture(&self, state: &mut State, stream: u64, node: impl FnOnce() -> Node) -> Outcome<()> {
        match state.captures.get_mut(&stream) {
            None => Ok(()),
            Some(capture) if capture.broken => Err(Code::STREAM_CAPTURE_INVALIDATED),
            Some(capture) => {
                capture.nodes.push(node());
                Err(Code::CAPTURED)
            }
        }
    }

    /// Refuses work on the legacy default stream beside captures of streams that take turns with it.
    pub(crate) fn legacy_beside_captures(&self, state: &mut State, device: usize, breaks: bool) -> Outcome<()> {
        let takes_turns = |state: &State, stream: u64| {
            let found = state.streams.get(&stream).filter(|found| found.device == device);
            found.is_some_and(|found| state.lanes[found.lane as usize].blocking())
        };
        let streams: Vec<u64> = state.captures.keys().copied().filter(|&stream| takes_turns(state, stream)).collect();
        if streams.is_empty() {
            return Ok(());
        }
        if breaks {
            state.break_captures(|stream, _| streams.contains(&stream));
        }
        Err(Code::STREAM_CAPTURE_IMPLICIT)
    }

    /// Refuses to ask or wait for a stream that captures, and breaks its capture.
    pub(crate) fn not_capturing(&self, state: &mut State, stream: u64) -> Outcome<()> {
        let capturing = state.break_captures(|of, _| of == stream);
        if capturing { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// A wait of a capturing stream for what lies outside its capture, which breaks it.
    pub(crate) fn isolated(&self, state: &mut State, stream: u64, captured: bool) -> Outcome<()> {
        if captured || !state.break_captures(|of, _| of == stream) {
            return Ok(());
        }
        Err(Code::STREAM_CAPTURE_ISOLATION)
    }

    pub(crate) fn begin_capture(&self, stream: u64, mode: i32) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let found = state.streams.get(&stream).filter(|found| found.device == device);
        if found.is_none() || !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if state.captures.contains_key(&stream) {
            return Err(Code::INVALID_VALUE);
        }
        let capture = Capture { mode, thread: std::thread::current().id(), broken: false, device, nodes: Vec::new() };
        state.captures.insert(stream, capture);
        Ok(())
    }

    /// Ends a capture: a graph of what it took.
    pub(crate) fn end_capture(&self, stream: u64) -> Outcome<u64> {
        let mut state = self.state();
        self.device(&state)?;
        let capture = state.captures.remove(&stream).ok_or(Code::INVALID_VALUE)?;
        if capture.broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let (graph, nodes) = (new_handle(), Arc::from(capture.nodes));
        state.graphs.insert(graph, Graph { device: capture.device, nodes });
        Ok(graph)
    }

    /// 0: no; 1: yes; 2: it was, and is broken.
    pub(crate) fn capture_status(&self, stream: u64) -> Outcome<i32> {
        let mut state = self.state();
        if stream < 2 {
            let device = self.device(&state)?;
            self.legacy_beside_captures(&mut state, device, false)?;
        }
        drop(state);
        self.stream_info(stream)?;
        let state = self.state();
        Ok(state.captures.get(&stream).map_or(0, |capture| if capture.broken { 2 } else { 1 }))
    }
}

/// Sets the calling thread's mode; the one before.
pub(crate) fn exchange_mode(mode: i32) -> Outcome<i32> {
    if (GLOBAL..=RELAXED).contains(&mode) { Ok(MODE.replace(mode)) } else { Err(Code::INVALID_VALUE) }
}
