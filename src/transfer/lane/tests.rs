use super::*;
use crate::backend::{Backend, Clock, Fence, FenceState, Host, MemoryKind};
use crate::device::Machine;
use crate::registry::Registry;
use crate::transfer::Engine;
use proptest::prelude::*;

/// More than one thread copies at a time.
const PART: usize = 1 << 20;

/// What the test completes: all its fences at once, between two rounds of a lane's looking at them. The first one that a round
/// looks at takes note.
#[derive(Default)]
struct Gate {
    open: AtomicBool,
    noted: AtomicBool,
}

/// A fence of the gate, and whether it is the one that takes note.
struct Gated(Arc<Gate>, bool);

#[expect(unsafe_code, reason = "a fence's word is trusted")]
// SAFETY: no work stands behind it.
unsafe impl Fence for Gated {
    fn state(&self) -> FenceState {
        let Gated(gate, first) = self;
        if *first && gate.open.load(Ordering::Acquire) {
            gate.noted.store(true, Ordering::Release);
        }
        if gate.noted.load(Ordering::Acquire) { FenceState::Done } else { FenceState::Pending }
    }

    fn wait(&self, _: Duration) -> FenceState {
        self.state()
    }
}

/// A client with one order does not wait for all earlier orders of another client.
#[test]
fn clients_of_a_lane_take_turns() {
    let devices = ["cuda:0=256mb,link=1", "cpu=256mb"].map(|text| text.parse().unwrap());
    let registry = Registry::described(Machine::described(&devices), Clock::Virtual);
    let (card, host) = (registry.device(DeviceId::cuda(0)).unwrap(), registry.device(DeviceId::CPU).unwrap());
    let engine = Engine::of(&card, &host).unwrap();
    let (lane, bytes) = (engine.lane(&host).unwrap(), QUANTUM as usize);
    let src = host.alloc(bytes, MemoryKind::Arena).unwrap().freeze();
    // No order can begin before all are submitted.
    let gate = Arc::<Gate>::default();
    let order = |client, first| {
        let dst = card.alloc(bytes, MemoryKind::Arena).unwrap().freeze();
        dst.used_until(Event::new(Arc::new(Gated(Arc::clone(&gate), first))));
        let pieces = vec![Piece { src: src.clone(), from: 0..bytes, at: 0 }];
        let ordered = Ordered { pieces, ..Ordered::default() };
        let dst = dst.try_reclaim().unwrap();
        lane.submit(Order { client, dst, bytes: ordered, urgent: false, deadline: Duration::from_secs(20) })
    };
    let (many, one) = (engine.client(), engine.client());
    let many: Vec<PendingOrder> = (0..5).map(|nth| order(many, nth == 0)).collect();
    let one = order(one, false);
    gate.open.store(true, Ordering::Release);
    let arrival = |order: &PendingOrder| {
        let finished = order.wait(Duration::from_secs(20)).unwrap();
        finished.outcome.unwrap();
        finished.memory.unwrap().filled_by().iter().filter_map(Event::time).max().unwrap()
    };
    let (many, one): (Vec<Duration>, Duration) = (many.iter().map(arrival).collect(), arrival(&one));
    assert!(many.is_sorted() && one < many[2], "{one:?} among {many:?}");
}

proptest! {
    /// Small and large pieces of several buffers, with gaps between them, are copied to their offsets and nowhere else.
    #[test]
    fn pieces_are_gathered_where_they_belong(
        pieces in prop::collection::vec((0usize..3, 0usize..2000, 1usize..5000, 0usize..3), 0..40),
        large in 0usize..2,
        load in prop_oneof![500usize..3000, Just(1_500_000), Just(usize::MAX / 2)],
    ) {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let source = |seed: usize| {
            let mut memory = host.alloc(3 * PART, MemoryKind::Arena).unwrap();
            let bytes = memory.host_mut().unwrap();
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + at / 251 + seed) as u8 | 1);
            memory.freeze()
        };
        let sources = [0, 1, 2].map(source);
        let (mut all, mut end) = (Vec::new(), 0);
        for (index, (source, from, bytes, gap)) in pieces.into_iter().enumerate() {
            let bytes = if index < large { bytes + 2 * PART } else { bytes };
            all.push(Piece { src: sources[source].clone(), from: from..from + bytes, at: end + gap });
            end += gap + bytes;
        }
        let (mut got, mut want) = (vec![0; end + 1], vec![0; end + 1]);
        // In loads of a size that splits pieces.
        for begin in (0..end).step_by(load) {
            let range = begin..end.min(begin + load);
            let pieces: Vec<Piece> = within(&all, &range).collect();
            staging::copy(Some(&threads), gathered(&pieces, &mut got[range]).unwrap()).unwrap();
        }
        for Piece { src, from, at } in &all {
            want[*at..at + from.len()].copy_from_slice(&src.host(Duration::ZERO).unwrap().unwrap()[from.clone()]);
        }
        prop_assert!(got == want);
    }
}
