//! Graphs: what a capture took, made ready and launched. A launch does what the captured calls would do in that place, with the
//! arguments that they had, so what it reads and writes is checked as if the calls were made then.

use std::ffi::c_void;
use std::sync::Arc;

use crate::code::{Code, Outcome};
use crate::kernel::Shape;
use crate::lane::{HostCall, Record};
use crate::report::Rule;
use crate::world::{Call, State, new_handle};

/// A call that a capture took.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    /// Only its place in the order matters, which is that of the nodes.
    Order,
    /// To the device, from pinned memory.
    Upload {
        dst: u64,
        src: u64,
        len: u64,
    },
    /// To pinned memory.
    Download {
        dst: u64,
        src: u64,
        len: u64,
    },
    /// Between device memories, and the contexts that were named.
    Across {
        dst: (u64, Option<u64>),
        src: (u64, Option<u64>),
        len: u64,
    },
    Fill {
        dst: u64,
        byte: u8,
        len: u64,
    },
    Kernel {
        function: u64,
        shape: Shape,
        params: Vec<u64>,
    },
    Host {
        function: unsafe extern "C" fn(*mut c_void),
        argument: u64,
    },
    /// A graph that was launched on a stream that was captured.
    Graph(Arc<[Node]>),
    /// Anything else: it is counted, and a graph with it cannot be made ready.
    Other,
}

impl Node {
    fn runs(&self) -> bool {
        match self {
            Node::Graph(nodes) => nodes.iter().all(Node::runs),
            Node::Other => false,
            _ => true,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Graph {
    pub(crate) device: usize,
    pub(crate) nodes: Arc<[Node]>,
}

/// A graph that was made ready: a copy of it, which outlives it.
#[derive(Debug)]
pub(crate) struct Executable {
    graph: Graph,
    /// The end of its last launch: launches run one after the other, on whatever streams.
    last: Option<Arc<Record>>,
}

impl Executable {
    pub(crate) fn device(&self) -> usize {
        self.graph.device
    }
}

impl Call<'_> {
    pub(crate) fn graph_nodes(&self, graph: u64) -> Outcome<usize> {
        self.state().graphs.get(&graph).map(|graph| graph.nodes.len()).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn destroy_graph(&self, graph: u64) -> Outcome<()> {
        self.state().graphs.remove(&graph).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    /// Makes a graph ready to launch. Flags are those of uploads, device launches and priorities; only none and freeing
    /// what a launch allocates (which none does) are known here.
    pub(crate) fn instantiate(&self, graph: u64, flags: u64) -> Outcome<u64> {
        let mut state = self.state();
        self.device(&state)?;
        let graph = state.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?.clone();
        if flags > 1 || !graph.nodes.iter().all(Node::runs) {
            return Err(Code::NOT_SUPPORTED);
        }
        let executable = new_handle();
        state.executables.insert(executable, Executable { graph, last: None });
        Ok(executable)
    }

    fn executable<'s>(&self, state: &'s State, executable: u64) -> Outcome<&'s Executable> {
        let found = state.executables.get(&executable);
        found.ok_or_else(|| self.no_handle(state, executable, "graph to launch", Code::INVALID_VALUE))
    }

    pub(crate) fn destroy_executable(&self, executable: u64) -> Outcome<()> {
        let mut state = self.state();
        self.executable(&state, executable)?;
        state.executables.remove(&executable);
        Ok(())
    }

    /// There is nothing to upload here, so only the handles are checked.
    pub(crate) fn upload_graph(&self, executable: u64, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        self.executable(&state, executable)?;
        let lane = self.lane(&mut state, stream)?;
        self.follow(&mut state, lane, None);
        Ok(())
    }

    /// Enqueues the nodes of a graph, or adds them to the stream's capture as one.
    pub(crate) fn launch_graph(&self, executable: u64, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let (nodes, device) = {
            let found = self.executable(&state, executable)?;
            (Arc::clone(&found.graph.nodes), found.device())
        };
        let lane = self.lane_for(&mut state, stream, || Node::Graph(Arc::clone(&nodes)))?;
        let of_stream = state.lanes[lane as usize].lane.device;
        if device != of_stream {
            self.violation(Rule::WrongContext, || {
                format!("a graph of device {device} launched on a stream of device {of_stream}")
            });
            return Err(Code::INVALID_VALUE);
        }
        let last = self.executable(&state, executable)?.last.clone();
        self.follow(&mut state, lane, last.as_deref());
        drop(state);
        self.run_nodes(&nodes, stream)?;
        let mut state = self.state();
        let end = self.point(&mut state, lane);
        if let Some(executable) = state.executables.get_mut(&executable) {
            executable.last = Some(end);
        }
        Ok(())
    }

    fn run_nodes(&self, nodes: &[Node], stream: u64) -> Outcome<()> {
        nodes.iter().try_for_each(|node| match node {
            Node::Order => Ok(()),
            Node::Upload { dst, src, len } => {
                self.pinned_still(*src, *len)?;
                let src = std::ptr::with_exposed_provenance(*src as usize);
                self.upload(*dst, src, *len, stream, false)
            }
            Node::Download { dst, src, len } => {
                self.pinned_still(*dst, *len)?;
                let dst = std::ptr::with_exposed_provenance_mut(*dst as usize);
                self.download(dst, *src, *len, stream, false)
            }
            Node::Across { dst, src, len } => self.across(*dst, *src, *len, stream, false),
            Node::Fill { dst, byte, len } => self.fill(*dst, *byte, *len, stream),
            Node::Kernel { function, shape, params } => self.launch(*function, *shape, stream, params.clone()),
            Node::Host { function, argument } => {
                let argument = std::ptr::with_exposed_provenance_mut(*argument as usize);
                self.launch_host_function(stream, HostCall { function: *function, argument })
            }
            Node::Graph(nodes) => self.run_nodes(nodes, stream),
            Node::Other => Err(Code::NOT_SUPPORTED),
        })
    }

    /// A graph's copies are between the device and pinned memory. Other host memory may be gone by the launch, which nothing
    /// here could tell, so it is refused.
    fn pinned_still(&self, address: u64, len: u64) -> Outcome<()> {
        let state = self.state();
        let known = state.pinned.holding(address).is_some() || state.pinned.gone_at(address).is_some();
        if known || len == 0 { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
    }
}
