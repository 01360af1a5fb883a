//! Timed copies: one by one, or back to back on a stream that is held until all are queued.

use std::time::{Duration, Instant};

use crate::backend::{Buf, BufMut, Event, Joined, Piece, Stream, Transfer};
use crate::bytes::ByteSize;
use crate::device::Bandwidth;
use crate::error::{Error, Missing, Result};

/// The times for which a stream is held while its copies are queued, tried in order until they are queued in time.
const HOLDS: [Duration; 3] = [Duration::from_millis(2), Duration::from_millis(8), Duration::from_millis(40)];

/// The size in bytes and the number of the copies that measure the fixed cost of a copy.
const SMALL: (usize, u32) = (4, 15);

/// The parameters of a link measurement: the size and number of copies, and their time budget.
///
/// ```
/// use tensor_offload::backend::Clock;
/// use tensor_offload::{ByteSize, Machine, Registry};
/// use tensor_offload::registry::{LinkTiming, measure_links};
///
/// let machine = Machine::described(&["cuda:0=1gib,link=12.5".parse()?]);
/// let devices = Registry::described(machine, Clock::Virtual);
/// let links = measure_links(&devices, &LinkTiming::quick().bytes(ByteSize(1 << 20)))?;
/// assert!(links.links.iter().all(|link| link.bandwidth.to_string() == "12.5"));
/// println!("{links}");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkTiming {
    pub(super) bytes: ByteSize,
    copies: u32,
    warm_ups: u32,
    budget: Duration,
    pub(super) all_ways: bool,
}

impl LinkTiming {
    /// The measurements that a plan needs, in some tens of milliseconds per link: pinned copies in each direction and peer
    /// copies, of 32 MiB each. One warm-up copy, then 32 copies, or fewer on links where these would take over 40 ms.
    pub fn quick() -> LinkTiming {
        let budget = Duration::from_millis(40);
        LinkTiming { bytes: ByteSize(32 << 20), copies: 32, warm_ups: 1, budget, all_ways: false }
    }

    /// All kinds of route, with the sizes and counts of NVIDIA's nvbandwidth: copies of 512 MiB, 4 warm-up copies, then 16.
    /// The number is reduced if the copies would take over two seconds in all, but to no fewer than three.
    pub fn thorough() -> LinkTiming {
        let budget = Duration::from_secs(2);
        LinkTiming { bytes: ByteSize(512 << 20), copies: 16, warm_ups: 4, budget, all_ways: true }
    }

    /// Sets the size of a copy. It is reduced if memory is short.
    #[must_use]
    pub fn bytes(mut self, bytes: ByteSize) -> LinkTiming {
        self.bytes = bytes;
        self
    }

    /// Sets the most copies that are timed. At least one is.
    #[must_use]
    pub fn copies(mut self, copies: u32) -> LinkTiming {
        self.copies = copies.max(1);
        self
    }

    /// Sets the time budget of all timed copies of one route, which reduces their number on slow links.
    #[must_use]
    pub fn budget(mut self, budget: Duration) -> LinkTiming {
        self.budget = budget;
        self
    }

    /// The number of copies to time if one takes `each`.
    fn fitting(&self, each: Duration) -> u32 {
        let fit = self.budget.as_nanos() / each.as_nanos().max(1);
        u32::try_from(fit).unwrap_or(u32::MAX).max(3).min(self.copies)
    }

    /// Warms up with `once`, which returns the time of one copy. Returns the time of the last copy.
    pub(super) fn warm_up(&self, mut once: impl FnMut() -> Result<Duration>) -> Result<Duration> {
        let start = Instant::now();
        let mut last = once()?;
        for _ in 1..self.warm_ups {
            if start.elapsed() > self.budget / 4 {
                break;
            }
            last = once()?;
        }
        Ok(last)
    }

    /// The times of copies that `once` makes one by one.
    pub(super) fn one_by_one(&self, mut once: impl FnMut() -> Result<Duration>) -> Result<Vec<Duration>> {
        let each = self.warm_up(&mut once)?;
        (0..self.fitting(each)).map(|_| once()).collect()
    }

    /// The times of concurrent copies on all `lanes`, queued ahead if the streams support that.
    pub(super) fn queued(&self, watch: Watch, lanes: &mut [Lane<'_>]) -> Result<Vec<Vec<Duration>>> {
        let mut each = Duration::ZERO;
        for lane in lanes.iter_mut() {
            each = each.max(self.warm_up(|| lane.once(watch, lane.bytes))?);
        }
        let copies = self.fitting(each);
        let mut seen = None;
        for hold in HOLDS {
            let Some(run) = held(watch, lanes, copies, each, hold)? else { continue };
            if watch.simulated || run.iter().all(Run::plausible) {
                return Ok(run.into_iter().map(|run| run.gaps).collect());
            }
            seen = Some(run);
        }
        if let Some(run) = seen {
            return Ok(run.into_iter().map(|run| run.evened(copies)).collect());
        }
        let alone = |lane: &mut Lane<'_>| (0..copies).map(|_| lane.once(watch, lane.bytes)).collect();
        lanes.iter_mut().map(alone).collect()
    }
}

/// A stream with the source and destination of its copies.
pub(super) struct Lane<'a> {
    pub(super) stream: &'a dyn Stream,
    pub(super) src: Buf,
    /// `None` while a copy is being queued, and for good once that failed.
    dst: Option<BufMut>,
    pub(super) bytes: usize,
}

impl<'a> Lane<'a> {
    pub(super) fn new(stream: &'a dyn Stream, src: Buf, dst: BufMut, bytes: usize) -> Lane<'a> {
        Lane { stream, src, dst: Some(dst), bytes }
    }

    /// Queues a copy of `bytes`. Returns its event.
    fn queue(&mut self, bytes: usize) -> Result<Event> {
        let dst = self.dst.take().ok_or_else(|| Error::bug("a copy was refused before"))?;
        let piece = Piece { src: self.src.clone(), from: 0..bytes, at: 0 };
        let flight = self.stream.send(Transfer::new(vec![piece], dst)?)?;
        let done = flight.done().clone();
        self.dst = Some(flight.chain());
        Ok(done)
    }

    /// The time of one copy of `bytes`, from the call until the host observes its completion.
    pub(super) fn once(&mut self, watch: Watch, bytes: usize) -> Result<Duration> {
        let begin = watch.begin(self.stream)?;
        let done = self.queue(bytes)?;
        Ok(watch.see(&done)?.saturating_sub(begin))
    }

    /// The median time of small copies.
    pub(super) fn fixed(&mut self, watch: Watch) -> Result<Duration> {
        let bytes = SMALL.0.min(self.bytes);
        let times: Result<Vec<_>> = (0..SMALL.1).map(|_| self.once(watch, bytes)).collect();
        Ok(median(times?))
    }

    /// Returns the source and destination of its copies.
    ///
    /// # Errors
    /// When an earlier copy was rejected, which lost the destination.
    pub(super) fn ends(self) -> Result<(Buf, BufMut)> {
        let dst = self.dst.ok_or_else(|| Error::bug("a copy was refused before"))?;
        Ok((self.src, dst))
    }
}

/// The clock that times copies: that of simulated devices if they have one, else the host's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    epoch: Instant,
    simulated: bool,
    /// The longest time that any copy may take.
    deadline: Duration,
}

impl Watch {
    /// The clock of the stream's device, with the longest time that any copy may take.
    pub(super) fn of(stream: &dyn Stream, deadline: Duration) -> Result<Watch> {
        let event = stream.record(&[])?;
        event.wait(deadline)?;
        Ok(Watch { epoch: Instant::now(), simulated: event.time().is_some(), deadline })
    }

    /// The longest time that any copy may take.
    pub(super) fn deadline(self) -> Duration {
        self.deadline
    }

    /// Whether the devices are simulated.
    pub(super) fn simulated(self) -> bool {
        self.simulated
    }

    /// The time now, after an event at `seen`. On simulated devices the host's work takes no time.
    pub(super) fn now(self, seen: Duration) -> Duration {
        if self.simulated { seen } else { self.epoch.elapsed() }
    }

    /// The time now, after all earlier work of `stream` is done.
    pub(super) fn begin(self, stream: &dyn Stream) -> Result<Duration> {
        self.see(&stream.record(&[])?)
    }

    /// Waits for an event and returns its time.
    ///
    /// The host polls in a loop, because the library's own waits sleep for up to half a millisecond between checks.
    pub(super) fn see(self, event: &Event) -> Result<Duration> {
        let until = Instant::now() + self.deadline;
        while !self.simulated && !event.is_complete() && Instant::now() < until {
            std::thread::yield_now();
        }
        self.seen(event)
    }

    /// The time of an event. On simulated devices this waits for the event.
    fn seen(self, event: &Event) -> Result<Duration> {
        let now = self.epoch.elapsed();
        event.wait(if self.simulated { self.deadline } else { Duration::ZERO })?;
        Ok(event.time().filter(|_| self.simulated).unwrap_or(now))
    }
}

/// Holds the streams of `lanes` while `copies` are queued on each, releases them, and observes each completion. `None` if
/// the copies were not queued in time, since the times would then measure how fast they were queued, and if the streams
/// cannot be held.
fn held(watch: Watch, lanes: &mut [Lane<'_>], copies: u32, each: Duration, hold: Duration) -> Result<Option<Vec<Run>>> {
    let Some(lead) = lanes.first() else { return Ok(Some(Vec::new())) };
    // The copies begin no earlier than this, whenever the host observes that they began.
    let begin = watch.epoch.elapsed() + hold;
    match lead.stream.occupy(hold) {
        Err(Error::Missing(Missing::Occupy { .. })) => return Ok(None),
        held => held?,
    }
    let released = lead.stream.record(&[])?;
    let mut ends: Vec<Vec<Event>> = Vec::new();
    for (index, lane) in lanes.iter().enumerate() {
        // All lanes start at the same time.
        if index > 0 && lane.stream.wait(&released)? == Joined::HostMustWait {
            return Ok(None);
        }
        ends.push(vec![if index > 0 { lane.stream.record(&[])? } else { released.clone() }]);
    }
    for _ in 0..copies {
        for (lane, ends) in lanes.iter_mut().zip(&mut ends) {
            ends.push(lane.queue(lane.bytes)?);
        }
    }
    let in_time = watch.simulated || !released.is_complete();
    let times = observe(watch, &ends, each)?;
    if !in_time {
        return Ok(None);
    }
    Ok(Some(runs(&times, begin, copies)))
}

/// Evaluates the times at which the host observed the completions of each lane's copies. Each lane has `copies` copies that
/// began at `begin` or later; its first time is the observed start.
fn runs(times: &[Vec<Duration>], begin: Duration, copies: u32) -> Vec<Run> {
    let all_busy = times.iter().filter_map(|lane| lane.last()).min().copied().unwrap_or_default();
    let run = |lane: &Vec<Duration>| {
        let gaps = lane.windows(2).enumerate();
        let shared = gaps.filter(|(index, gap)| *index == 0 || gap[1] <= all_busy);
        let gaps = shared.map(|(_, gap)| gap[1].saturating_sub(gap[0])).collect();
        let whole = lane.last().copied().unwrap_or_default().saturating_sub(begin);
        Run { gaps, mean: whole / copies.max(1) }
    };
    times.iter().map(run).collect()
}

/// The copies of one lane.
struct Run {
    /// The times from one completion to the next, as long as all lanes were busy.
    gaps: Vec<Duration>,
    /// The mean time of a copy, from the time when they could begin until the last completion was observed.
    mean: Duration,
}

impl Run {
    /// Whether the host kept up with the completions. If it observes several at once, most of the gaps are short, and their
    /// median measures the host instead of the link. The mean can only be too long.
    fn plausible(&self) -> bool {
        median(self.gaps.clone()) * 20 >= self.mean * 17
    }

    /// Substitutes for implausible gaps: the mean for every copy.
    fn evened(&self, copies: u32) -> Vec<Duration> {
        vec![self.mean; copies as usize]
    }
}

/// The times at which the host observes the events of each lane, in order.
fn observe(watch: Watch, lanes: &[Vec<Event>], each: Duration) -> Result<Vec<Vec<Duration>>> {
    if watch.simulated {
        return lanes.iter().map(|events| events.iter().map(|event| watch.seen(event)).collect()).collect();
    }
    // Long copies leave the processor to other threads; an error of a fifth of a per cent is acceptable.
    let pause = (each / 500).min(Duration::from_micros(100));
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); lanes.len()];
    let until = Instant::now() + watch.deadline;
    while times.iter().zip(lanes).any(|(times, events)| times.len() < events.len()) {
        for (times, events) in times.iter_mut().zip(lanes) {
            while let Some(event) = events.get(times.len()).filter(|event| event.is_complete()) {
                times.push(watch.seen(event)?);
            }
        }
        if Instant::now() > until {
            return Err(Error::TimedOut { what: "a copy".to_owned(), after: watch.deadline });
        }
        if pause > Duration::from_micros(50) { std::thread::sleep(pause) } else { std::thread::yield_now() }
    }
    Ok(times)
}

/// The median of `times`, the lower of the two middle ones; zero if there are none.
pub(super) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// The speed at which `bytes` take `time`. The time is rounded up to a nanosecond, so several speeds are consistent with
/// it; this is the one with the fewest digits.
pub(super) fn speed(bytes: u64, time: Duration) -> Bandwidth {
    let nanos = time.as_nanos().max(1);
    let scaled = u128::from(bytes) * 1_000_000_000;
    let least = scaled.div_ceil(nanos);
    let most = if nanos > 1 { (scaled - 1) / (nanos - 1) } else { least };
    let mut unit = 1;
    while unit * 10 <= most && least.div_ceil(unit * 10) * (unit * 10) <= most {
        unit *= 10;
    }
    Bandwidth::bytes_per_second(u64::try_from(least.div_ceil(unit) * unit).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::{Backend, Flight, Host, MemoryKind, Rejected, Role};
    use crate::device::DeviceId;
    use proptest::prelude::*;

    #[test]
    fn a_median_is_one_of_the_times() {
        let ms = |n: u64| Duration::from_millis(n);
        assert_eq!(median(vec![ms(5), ms(1), ms(3)]), ms(3));
        assert_eq!(median(vec![ms(5), ms(1), ms(3), ms(2)]), ms(2));
        assert_eq!(median(Vec::new()), Duration::ZERO);
    }

    #[test]
    fn slow_links_get_fewer_copies() {
        let timing = LinkTiming::thorough();
        assert_eq!(timing.fitting(Duration::from_millis(20)), 16);
        assert_eq!(timing.fitting(Duration::from_millis(500)), 4);
        assert_eq!(timing.fitting(Duration::from_secs(60)), 3);
        assert_eq!(timing.copies(1).fitting(Duration::from_secs(60)), 1);
    }

    #[test]
    fn ends_that_were_seen_at_once_are_not_believed() {
        let ms = |n: u64| Duration::from_millis(n);
        assert!(Run { gaps: vec![ms(10), ms(9), ms(11)], mean: ms(11) }.plausible());
        assert!(!Run { gaps: vec![ms(28), ms(1), ms(1)], mean: ms(10) }.plausible());
    }

    /// The measured time of copies that take `each`, back to back from `BEGIN` on, if the host observes the start and each
    /// completion late by these delays.
    fn measured(each: Duration, late: &[Duration]) -> Duration {
        let (mut seen, copies) = (Duration::ZERO, late.len() as u32 - 1);
        let times = late.iter().zip(0u32..).map(|(late, nth)| {
            seen = seen.max(BEGIN + each * nth + *late);
            seen
        });
        let run = runs(&[times.collect()], BEGIN, copies).remove(0);
        median(if run.plausible() { run.gaps } else { run.evened(copies) })
    }

    const BEGIN: Duration = Duration::from_millis(3);

    #[test]
    fn two_lanes_are_timed_while_both_are_busy() {
        let ms = |times: &[u64]| times.iter().map(|n| Duration::from_millis(*n)).collect::<Vec<_>>();
        // The first takes 10 ms a copy, and 4 once it has the link to itself.
        let [long, short] = &runs(&[ms(&[3, 13, 23, 27, 31]), ms(&[3, 9, 15, 21, 27])], BEGIN, 4)[..] else { panic!() };
        assert_eq!((&long.gaps, long.mean), (&ms(&[10, 10, 4]), Duration::from_millis(7)));
        assert_eq!((&short.gaps, short.mean), (&ms(&[6, 6, 6, 6]), Duration::from_millis(6)));
        assert!(long.plausible() && short.plausible());
        assert_eq!(median(long.gaps.clone()), Duration::from_millis(10));
    }

    /// A stream on which no copy is queued before the last one has ended.
    #[derive(Debug)]
    struct Slow(Arc<dyn Stream>);

    impl Stream for Slow {
        fn device(&self) -> DeviceId {
            self.0.device()
        }

        fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
            self.0.record(&[]).unwrap().wait(WAIT).unwrap();
            self.0.copy(transfer)
        }

        fn wait(&self, event: &Event) -> Result<Joined> {
            self.0.wait(event)
        }

        fn record(&self, uses: &[Buf]) -> Result<Event> {
            self.0.record(uses)
        }

        fn occupy(&self, time: Duration) -> Result<()> {
            self.0.occupy(time)
        }
    }

    const WAIT: Duration = Duration::from_secs(60);

    /// Copies that began before all of them were queued would measure how fast they were queued.
    #[test]
    fn copies_count_only_if_all_were_queued_while_the_stream_was_held() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let stream = host.stream(Role::Upload).unwrap();
        let watch = Watch::of(&*stream, WAIT).unwrap();
        let run = |stream: &dyn Stream, hold| {
            let memory = || host.alloc(4096, MemoryKind::Arena).unwrap();
            let mut lanes = [Lane::new(stream, memory().freeze(), memory(), 4096)];
            held(watch, &mut lanes, 3, Duration::ZERO, hold).unwrap()
        };
        // A busy host may be too late for one, and for a longer one only if it stands still.
        let holds = [100, 1000, 20_000].map(Duration::from_millis);
        let queued = holds.into_iter().find_map(|hold| run(&*stream, hold)).expect("queued while the stream was held");
        assert!(queued.len() == 1 && queued[0].gaps.len() == 3);
        assert!(run(&Slow(Arc::clone(&stream)), Duration::from_millis(1)).is_none());
    }

    proptest! {
        /// However late the host observes completions, a link is measured as at most 20/17 of its speed, and exactly if the
        /// host is equally late each time.
        #[test]
        fn a_busy_host_makes_no_link_faster(
            each in 1_000u64..50_000,
            late in prop::collection::vec(0u64..60_000, 4..34),
        ) {
            let each = Duration::from_micros(each);
            let late: Vec<Duration> = late.into_iter().map(Duration::from_micros).collect();
            prop_assert!(measured(each, &late) * 20 >= each * 17);
            prop_assert_eq!(measured(each, &vec![late[0].min(each / 20); late.len()]), each);
        }

        /// A host that keeps up measures within a few per cent.
        #[test]
        fn a_host_that_keeps_up_is_believed(
            each in 1_000u64..50_000,
            late in prop::collection::vec(0u64..=40, 4..34),
        ) {
            let each = Duration::from_micros(each);
            let late: Vec<Duration> = late.into_iter().map(|per_mille| each * per_mille as u32 / 1000).collect();
            let time = measured(each, &late);
            prop_assert!(time * 100 >= each * 96 && time * 100 <= each * 104, "{time:?} of {each:?}");
        }

        /// Speeds of five digits are recovered from times, for any size of at least a mebibyte.
        #[test]
        fn a_speed_is_read_back_from_its_time(tens in 1u64..99_999, bytes in (1u64 << 20)..(1 << 30)) {
            let described = Bandwidth::bytes_per_second(tens * 1_000_000);
            let time = described.time(bytes);
            let read = speed(bytes, time);
            prop_assert_eq!(read.time(bytes), time);
            // Slow and large enough that a nanosecond is under half of the last digit.
            if time > Duration::from_millis(1) {
                prop_assert_eq!(read, described);
            }
        }
    }
}
