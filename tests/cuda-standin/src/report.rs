//! What the stand-in saw.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::counted::Counted;

/// A rule of the driver that a program can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Rule {
    /// Two accesses to one range, at least one of them a write, with no order between them.
    Unordered,
    /// The same, where one access was to memory that was freed and handed out again since.
    ReusedUnordered,
    /// A copy whose two ranges share bytes.
    Overlap,
    /// A pinned source changed between the call and the end of the copy.
    SourceChanged,
    /// Memory was freed or unpinned that the host has not seen the end of the uses of.
    FreeInUse,
    /// Memory was touched after it was freed.
    UseAfterFree,
    /// Memory was freed twice.
    DoubleFree,
    /// An address was freed that no allocation starts at.
    BadFree,
    /// A range runs past the end of its allocation.
    OutOfBounds,
    /// An address that no allocation ever held.
    UnknownAddress,
    /// The calling thread has no current context.
    NoContext,
    /// The current context is another one than the call's memory or handle belongs to.
    WrongContext,
    /// A stream, event, context, pool or function that does not exist, or no longer does.
    UnknownHandle,
    /// A device reached for the memory of another one without peer access to it.
    NoPeerAccess,
    /// A range that is partly pinned and partly not.
    PartlyPinned,
    /// Pinned memory that is not portable was used with a context other than its own.
    NotPortable,
    /// Host memory was unmapped while it was registered: its addresses lead nowhere, or to other memory.
    StaleRegistration,
    /// A call that a driver of this version does not have.
    NewerCall,
    /// A call that is there and does harm: HIP's memory pools.
    HarmfulCall,
    /// A host function called the driver.
    CallInHostFunction,
    /// The stand-in itself failed.
    Panic,
    /// Something was still alive where everything should have been given back.
    Leak,
}

impl Rule {
    /// Its name in reports: `use_after_free`.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Unordered => "unordered",
            Rule::ReusedUnordered => "reused_unordered",
            Rule::Overlap => "overlap",
            Rule::SourceChanged => "source_changed",
            Rule::FreeInUse => "free_in_use",
            Rule::UseAfterFree => "use_after_free",
            Rule::DoubleFree => "double_free",
            Rule::BadFree => "bad_free",
            Rule::OutOfBounds => "out_of_bounds",
            Rule::UnknownAddress => "unknown_address",
            Rule::NoContext => "no_context",
            Rule::WrongContext => "wrong_context",
            Rule::UnknownHandle => "unknown_handle",
            Rule::NoPeerAccess => "no_peer_access",
            Rule::PartlyPinned => "partly_pinned",
            Rule::NotPortable => "not_portable",
            Rule::StaleRegistration => "stale_registration",
            Rule::NewerCall => "newer_call",
            Rule::HarmfulCall => "harmful_call",
            Rule::CallInHostFunction => "call_in_host_function",
            Rule::Panic => "panic",
            Rule::Leak => "leak",
        }
    }
}

/// A broken rule, counted per call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The exported name of the call that broke it.
    pub call: String,
    /// What happened the first time.
    pub detail: String,
    /// How often.
    pub count: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} by {}: {}", self.count, self.rule.name(), self.call, self.detail)
    }
}

/// What was seen since the last reset, and what is alive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// The broken rules.
    pub violations: Vec<Violation>,
    /// What is alive now and would be a leak at the end: named by the calls that made it. What belongs to a broken
    /// device is not counted, since nothing can give it back.
    pub leaks: Vec<Violation>,
    /// Allocations of device memory that are alive.
    pub live_allocations: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Pinned host regions that are alive.
    pub live_pinned: u64,
    /// Their bytes.
    pub live_pinned_bytes: u64,
    /// Streams that were created and not destroyed.
    pub live_streams: u64,
    /// Events that were created and not destroyed.
    pub live_events: u64,
    /// Contexts: primary ones that are retained, which are no leak, since many programs keep them; and those that the
    /// program made itself.
    pub live_contexts: u64,
    /// Pieces of work that have not run yet.
    pub pending: u64,
    /// The most bytes that were allocated at once, per device.
    pub peak_bytes: Vec<u64>,
    /// How often each call was made, by whatever threads.
    pub calls: BTreeMap<String, u64>,
    /// How often the thread that asks for this report made each call: a count that no background thread changes.
    pub own_calls: BTreeMap<String, u64>,
    /// Counted time, which no processor has a part in.
    pub counted: Counted,
}

impl Report {
    /// How often a rule was broken, by whatever calls; leaks count what is alive now.
    pub fn count(&self, rule: Rule) -> u64 {
        self.violations.iter().chain(&self.leaks).filter(|v| v.rule == rule).map(|v| v.count).sum()
    }

    /// How often a call was made, by its exported name.
    pub fn calls_of(&self, call: &str) -> u64 {
        self.calls.get(call).copied().unwrap_or(0)
    }

    /// How often the thread that asked for this report made a call, by its exported name.
    pub fn own_calls_of(&self, call: &str) -> u64 {
        self.own_calls.get(call).copied().unwrap_or(0)
    }

    /// Whether no rule was broken; what is alive does not matter.
    pub fn is_lawful(&self) -> bool {
        self.violations.is_empty()
    }

    /// Whether no rule was broken and everything was given back.
    pub fn is_clean(&self) -> bool {
        self.is_lawful() && self.leaks.is_empty()
    }

    /// Panics with the list when a rule was broken.
    #[track_caller]
    pub fn assert_lawful(&self) {
        assert!(self.is_lawful(), "the driver's rules were broken:\n{self}");
    }

    /// Panics with the list when a rule was broken or something is still alive.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert!(self.is_clean(), "the driver's rules were broken or something is still alive:\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for violation in self.violations.iter().chain(&self.leaks) {
            writeln!(f, "{violation}")?;
        }
        write!(
            f,
            "alive: {} allocations ({} bytes), {} pinned ({} bytes), {} streams, {} events; {} pieces of work pending",
            self.live_allocations,
            self.live_bytes,
            self.live_pinned,
            self.live_pinned_bytes,
            self.live_streams,
            self.live_events,
            self.pending
        )
    }
}

/// Broken rules by rule and call.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    seen: BTreeMap<(Rule, &'static str), (u64, String)>,
}

impl Violations {
    pub(crate) fn add(&mut self, rule: Rule, call: &'static str, detail: impl FnOnce() -> String) {
        let entry = self.seen.entry((rule, call)).or_insert_with(|| (0, detail()));
        entry.0 += 1;
    }

    pub(crate) fn list(&self) -> Vec<Violation> {
        self.seen
            .iter()
            .map(|((rule, call), (count, detail))| Violation {
                rule: *rule,
                call: (*call).to_owned(),
                detail: detail.clone(),
                count: *count,
            })
            .collect()
    }
}
