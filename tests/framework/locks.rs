//! Memory behind the framework's locks: what can be read of it and how, copies and other users that wait for each other, and
//! compute on the host, which finds its layers there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_offload::backend::{Backend, Buf, BufMut, Clock, Device, Host, MemoryKind, Piece, Role, Stream, Transfer};
use tensor_offload::error::Mismatch;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::stream::{StallCause, Stalls};
use tensor_offload::{Error, ErrorKind, LayerId, Model, Registry, Streamer};

use super::support::framework::{Framework, Memory, Tensor, tensor_of};
use super::support::watched::Watched;
use super::support::*;
use super::{DIVIDED, loader, planner, small_mixed};

const EMBEDDING: &str = "model.embed_tokens.weight";

fn on_host(registry: &Registry, subject: &Subject, memory: Memory, allocation: &str) -> (Arc<Framework>, Arc<Model>) {
    let plan = planner(subject, registry.machine(), CPU, allocation).grouping(DIVIDED[1]).depth(1).plan().unwrap();
    let framework = Framework::new(CPU, DIVIDED[1], memory);
    let model = Arc::new(loader(registry, &[&framework]).load(&subject.weights, &plan).unwrap());
    (framework, model)
}

/// Nobody gets a slice of memory that others may write, and everybody a copy.
#[test]
fn what_is_behind_a_lock_is_copied_and_not_lent_out() {
    let subject = Subject::plain(&llama(2, 16), 81);
    let registry = Registry::described(machine(), Clock::Wall);
    let bits = subject.bytes_of(EMBEDDING).chunks_exact(2).map(|two| half::bf16::from_le_bytes([two[0], two[1]]));
    let want: Vec<half::bf16> = bits.collect();
    for (memory, allocation) in [(Memory::Locked, "cpu,*"), (Memory::Lent, "cpu,*"), (Memory::Locked, "disk,*")] {
        let (_framework, model) = on_host(&registry, &subject, memory, allocation);
        let mut streamer = Streamer::new(&model).unwrap();
        let guard = streamer.layer(LayerId::new(0)).unwrap();
        let view = guard.tensor(EMBEDDING).unwrap();
        assert!(guard.to_vec::<half::bf16>(EMBEDDING).unwrap() == want);
        assert_eq!(guard.to_vec::<f32>(EMBEDDING).unwrap_err().kind(), ErrorKind::Mismatch);
        match memory {
            Memory::Lent => assert!(view.as_slice::<half::bf16>().unwrap() == want),
            Memory::Locked => {
                assert!(view.bytes().unwrap().is_none() && view.buf().host(DEADLINE).unwrap().is_none());
                let error = view.as_slice::<half::bf16>().unwrap_err();
                assert!(
                    matches!(&error, Error::Mismatch(why) if matches!(&**why, Mismatch::Shared { tensor } if tensor == EMBEDDING))
                );
                assert!(error.to_string().contains("to_vec"), "{error}");
            }
        }
        let whole = view.buf().read_with(DEADLINE, |bytes| bytes[view.byte_range()].to_vec()).unwrap().unwrap();
        assert!(whole == subject.bytes_of(EMBEDDING));
        let mut rows = vec![0; 3 * 32];
        model.read_rows(EMBEDDING, &[63, 0, 7], &mut rows).unwrap();
        let row = |row: usize| &subject.bytes_of(EMBEDDING)[row * 32..][..32];
        assert!(rows == [row(63), row(0), row(7)].concat());
        let sent = streamer.send_rows(EMBEDDING, &[5, 5]).unwrap();
        assert!(sent.host(DEADLINE).unwrap().unwrap() == [row(5), row(5)].concat());
    }
}

/// A table on the host in the framework's memory, of which a card is sent rows.
#[test]
fn rows_of_a_frameworks_table_are_sent_to_a_card() {
    let subject = Subject::plain(&llama(2, 16), 82);
    let machine = machine();
    for clock in [Clock::Wall, Clock::Virtual] {
        let registry = Registry::described(machine.clone(), clock);
        let plan =
            planner(&subject, &machine, GPU0, "cpu,*").grouping(DIVIDED[0]).gather_embeddings(true).plan().unwrap();
        let framework = Framework::new(CPU, DIVIDED[0], Memory::Locked);
        let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        assert_eq!(framework.live().len(), 1);
        let mut streamer = Streamer::new(&model).unwrap();
        let sent = streamer.send_rows(EMBEDDING, &[9, 63]).unwrap();
        let host = registry.device(CPU).unwrap();
        let dst = host.alloc(64, MemoryKind::Pinned).unwrap();
        let piece = Piece { src: sent, from: 0..64, at: 0 };
        let landed = streamer.compute().copy(Transfer::new(vec![piece], dst).unwrap()).unwrap();
        let landed = landed.wait(DEADLINE).unwrap().freeze();
        let row = |row: usize| &subject.bytes_of(EMBEDDING)[row * 32..][..32];
        assert!(landed.host(DEADLINE).unwrap().unwrap() == [row(9), row(63)].concat());
    }
}

/// Code that kept a copy of weights would not see this.
#[test]
fn overwritten_slots_are_fetched_anew() {
    let subject = Subject::patched(&small_mixed(3), 83);
    let machine = machine();
    let settings = [(CPU, "disk,*"), (GPU0, "cpu,30%;xpu:0,40%;disk,30%")];
    for ((compute, allocation), clock) in settings.into_iter().flat_map(|s| [(s, Clock::Wall), (s, Clock::Virtual)]) {
        for grouping in [TensorGrouping::Joined, DIVIDED[0], DIVIDED[1]] {
            let registry = Registry::described(machine.clone(), clock);
            let plan = planner(&subject, &machine, compute, allocation).grouping(grouping).depth(2).plan().unwrap();
            let framework = Framework::new(compute, grouping, Memory::Locked);
            let frameworks = if grouping == TensorGrouping::Joined { vec![] } else { vec![&framework] };
            let model = Arc::new(loader(&registry, &frameworks).load(&subject.weights, &plan).unwrap());
            let mut streamer = Streamer::new(&model).unwrap();
            check_pass(&mut streamer, &subject).unwrap();
            let guard = streamer.layer(LayerId::new(2)).unwrap();
            assert_eq!(streamer.overwrite_slots(0xff).unwrap_err().kind(), ErrorKind::InUse);
            check_layer(&guard, &subject).unwrap();
            drop(guard);
            check_pass(&mut streamer, &subject).unwrap();
            for _ in 0..2 {
                streamer.overwrite_slots(0xff).unwrap();
                let settled = streamer.compute().record(&[]).unwrap();
                settled.wait(DEADLINE).unwrap();
                let overwritten =
                    |t: &Arc<Tensor>| t.name.is_some() || t.read().bytes().iter().all(|&byte| byte == 0xff);
                assert!(framework.live().iter().all(overwritten), "a slot keeps its bytes");
                check_pass(&mut streamer, &subject).unwrap();
            }
        }
    }
}

/// Slots of the caller's own are whole, so a plan that divides the library's must leave them to the caller.
#[test]
fn slots_of_the_callers_own_are_not_divided() {
    let subject = Subject::patched(&small_mixed(3), 85);
    let machine = machine();
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let planner = planner(&subject, &machine, CPU, "cpu,20kb;disk,*").grouping(DIVIDED[1]).depth(1);
    for external in [false, true] {
        let framework = Framework::new(CPU, DIVIDED[1], Memory::Locked);
        let plan = planner.clone().external_slots(external).plan().unwrap();
        let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        let has_slots = framework.live().iter().any(|tensor| tensor.name.is_none());
        assert_eq!(has_slots, !external, "the model's own slots");
        let host = registry.device(CPU).unwrap();
        let bytes = planner.clone().grouping(TensorGrouping::Joined).plan().unwrap().slots().largest();
        let slot = |_| buffer(&framework, &host, bytes.next_multiple_of(4) as usize).1;
        let compute = host.stream(Role::Compute).unwrap();
        match Streamer::with_slots(&model, compute, (0..3).map(slot).collect()) {
            Err(error) => assert!(!external && error.to_string().contains("external_slots"), "{error}"),
            Ok(mut streamer) => {
                assert!(external);
                check_pass(&mut streamer, &subject).unwrap();
                streamer.overwrite_slots(0xff).unwrap();
                check_pass(&mut streamer, &subject).unwrap();
                assert_eq!(streamer.into_slots().unwrap().len(), 3);
            }
        }
    }
}

/// Vectors that are neighbours where they are streamed from are one piece in a block, too.
#[test]
fn neighbours_are_copied_together_into_a_block() {
    let (subject, machine) = (Subject::plain(&norms(3), 86), machine());
    let pieces = |grouping| {
        let watched = Watched::new(machine.clone(), Clock::Virtual);
        let plan = planner(&subject, &machine, GPU0, "cpu,*").grouping(grouping).depth(0).plan().unwrap();
        let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
        watched.copies.take();
        layers(&streamer).for_each(|layer| drop(streamer.layer(layer).unwrap()));
        watched.copies.take().len()
    };
    assert_eq!((pieces(TensorGrouping::Joined), pieces(TensorGrouping::PerType)), (9, 9));
}

#[test]
fn slots_that_hold_nothing_are_overwritten_too() {
    let subject = Subject::plain(&[spec("layers.0.marker", tensor_offload::DType::U8, &[0])], 84);
    let machine = machine();
    for grouping in [TensorGrouping::Joined, DIVIDED[0], DIVIDED[1]] {
        let registry = Registry::described(machine.clone(), Clock::Wall);
        let plan = planner(&subject, &machine, GPU0, "cpu,*").grouping(grouping).plan().unwrap();
        let model = load(&registry, &subject, &plan);
        let mut streamer = Streamer::new(&model).unwrap();
        check_pass(&mut streamer, &subject).unwrap();
        streamer.overwrite_slots(1).unwrap();
        check_pass(&mut streamer, &subject).unwrap();
    }
}

/// A tensor of the framework on the host, as a buffer.
fn buffer(framework: &Framework, host: &Arc<dyn Device>, bytes: usize) -> (Arc<Tensor>, BufMut) {
    let storage = framework.tensor(tensor_offload::DType::F32, bytes, None).unwrap();
    let buffer = BufMut::new(storage, host.ledger().charge(bytes as u64).unwrap()).unwrap();
    let buffer = buffer.freeze();
    let tensor = tensor_of(buffer.block()).unwrap();
    (tensor, buffer.try_reclaim().unwrap())
}

/// Copies from one tensor to another and back, on two streams, while the framework reads and writes both.
#[test]
fn copies_crosswise_do_not_wait_for_each_other() {
    const HALF: usize = 3 << 20;
    let crosswise = || {
        let host = Host::new().open(CPU).unwrap();
        let framework = Framework::new(CPU, DIVIDED[1], Memory::Locked);
        let ((a, mut a_source), (b, mut b_source)) =
            (buffer(&framework, &host, 2 * HALF), buffer(&framework, &host, 2 * HALF));
        let (a_target, b_target) = (a_source.split_off(HALF).unwrap(), b_source.split_off(HALF).unwrap());
        for (source, byte) in [(&mut a_source, 3), (&mut b_source, 5)] {
            source.write_with(|bytes| bytes.fill(byte)).unwrap().unwrap();
        }
        let back_and_forth = |src: Buf, mut dst: BufMut| {
            let stream: Arc<dyn Stream> = host.stream(Role::Upload).unwrap();
            for _ in 0..60 {
                let piece = Piece { src: src.clone(), from: 0..HALF, at: 0 };
                dst = stream.copy(Transfer::new(vec![piece], dst).unwrap()).unwrap().chain();
            }
            stream.record(&[]).unwrap().wait(DEADLINE).unwrap();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| back_and_forth(a_source.freeze(), b_target));
            scope.spawn(|| back_and_forth(b_source.freeze(), a_target));
            scope.spawn(|| (0..100).for_each(|_| drop((a.read(), b.read()))));
        });
        assert!(
            a.read().bytes()[..HALF].iter().all(|&byte| byte == 3) && a.read().bytes()[HALF..].iter().all(|&b| b == 5)
        );
        assert!(
            b.read().bytes()[..HALF].iter().all(|&byte| byte == 5) && b.read().bytes()[HALF..].iter().all(|&b| b == 3)
        );
    };
    without_hanging("copying crosswise".to_owned(), crosswise);
}

thread_local! {
    /// What is done when the host begins to wait for a layer in this thread.
    static ON_STALL: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

/// Does it.
struct OnStall;

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for OnStall {
    fn on_new_span(
        &self,
        attrs: &tracing::span::Attributes<'_>,
        _: &tracing::Id,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        if attrs.metadata().name() == "stall" {
            ON_STALL.with_borrow(|act| act.iter().for_each(|act| act()));
        }
    }
}

/// Runs `work`, and `act` whenever the host begins to wait for a layer in this thread.
fn on_stall<T>(act: impl Fn() + 'static, work: impl FnOnce() -> T) -> T {
    use tracing_subscriber::layer::SubscriberExt;
    // One subscriber for all threads: of those that come and go, a span that is first met meanwhile may be taken to have none.
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(OnStall)).expect("no other is set");
    });
    ON_STALL.set(Some(Box::new(act)));
    let done = work();
    ON_STALL.take();
    done
}

/// Code of the framework that reads a slot for a while makes the next fill wait, and not fail.
#[test]
fn a_slow_reader_is_waited_for() {
    let subject = Subject::plain(&llama(4, 16), 86);
    let registry = Registry::described(machine(), Clock::Wall);
    let plan = planner(&subject, registry.machine(), CPU, "disk,*").grouping(DIVIDED[1]).depth(0).plan().unwrap();
    let framework = Framework::new(CPU, DIVIDED[1], Memory::Locked);
    let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    drop(streamer.layer(LayerId::new(1)).unwrap());
    let slots: Vec<Arc<Tensor>> = framework.live().into_iter().filter(|tensor| tensor.name.is_none()).collect();
    let patience = Duration::from_millis(150);
    let ((locked, is_locked), (stalled, is_stalled)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let before = streamer.report().stalls.get(&StallCause::Copy).copied().unwrap_or_default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let guards: Vec<_> = slots.iter().map(|slot| slot.read()).collect();
            locked.send(()).unwrap();
            is_stalled.recv_timeout(DEADLINE).expect("whoever fills the slot waits");
            std::thread::sleep(patience);
            drop(guards);
        });
        is_locked.recv().unwrap();
        let begin = Instant::now();
        let guard = on_stall(move || _ = stalled.send(()), || streamer.layer(LayerId::new(2)).unwrap());
        assert!(begin.elapsed() >= patience, "filled while it was read");
        check_layer(&guard, &subject).unwrap();
    });
    let stalls = streamer.report().stalls[&StallCause::Copy];
    assert!(stalls.time - before.time >= patience, "{stalls:?} after {before:?}");
}

/// Compute on the host begins when `layer` returns, so the layer is there by then, however slow its source is.
#[test]
fn on_the_host_a_layer_has_arrived_when_it_is_handed_out() {
    let subject = Subject::patched(&llama(5, 48), 87);
    let machine = described(&["cpu=64mb", "disk=64mb,link=0.01", "cuda:1=24mb,link=0.01"]);
    let framed = [None, Some(DIVIDED[0]), Some(DIVIDED[1])];
    for (grouping, depth) in framed.into_iter().flat_map(|grouping| [0, 1, 9].map(|depth| (grouping, depth))) {
        let watched = Watched::new(machine.clone(), Clock::Wall);
        let planner = planner(&subject, &machine, CPU, "disk,50%;cuda:1,50%").depth(depth);
        let plan = planner.grouping(grouping.unwrap_or_default()).plan().unwrap();
        let framework = grouping.map(|grouping| Framework::new(CPU, grouping, Memory::Locked));
        let frameworks: Vec<_> = framework.iter().collect();
        let model = Arc::new(loader(&watched.registry, &frameworks).load(&subject.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        let stalls =
            |streamer: &Streamer| streamer.report().stalls.get(&StallCause::Copy).map_or(0, |s: &Stalls| s.count);
        let pass = |streamer: &mut Streamer| {
            for layer in layers(streamer) {
                let guard = streamer.layer(layer).unwrap();
                assert!(guard.arriving().next().is_none(), "handed out before it was there");
                check_layer(&guard, &subject).unwrap();
            }
        };
        // Nothing comes before it is waited for, however late that is.
        let late = |streamer: &mut Streamer| {
            watched.copies.hold();
            let copies = watched.copies.clone();
            on_stall(move || copies.let_go(), || pass(streamer));
            watched.copies.let_go();
        };
        late(&mut streamer);
        let first = stalls(&streamer);
        assert!(first > 0, "the host waited: {}", streamer.report());
        pass(&mut streamer);
        let before = stalls(&streamer);
        late(&mut streamer);
        assert_eq!(stalls(&streamer) > before, depth < 9, "what is there is not waited for: {}", streamer.report());
    }
}

/// A copy that fails is the error of `layer` itself, and the next pass is right.
#[test]
fn on_the_host_a_failed_copy_is_the_error_of_its_layer() {
    let subject = Subject::plain(&llama(3, 16), 88);
    for (nth, depth) in (1..12).flat_map(|nth| [0, 1].map(|depth| (nth, depth))) {
        let watched = Watched::new(machine(), Clock::Wall);
        let plan =
            planner(&subject, watched.machine(), CPU, "disk,*").grouping(DIVIDED[1]).depth(depth).plan().unwrap();
        let framework = Framework::new(CPU, DIVIDED[1], Memory::Locked);
        let model = Arc::new(loader(&watched.registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        // A copy that fails before its layer is asked for is made again, so this one fails when it is waited for.
        watched.copies.spoil_nth_when_let_go(nth);
        let mut errors = 0;
        for layer in layers(&streamer) {
            let copies = watched.copies.clone();
            match on_stall(move || copies.let_go(), || streamer.layer(layer)) {
                Ok(guard) => check_layer(&guard, &subject).unwrap(),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
                    errors += 1;
                }
            }
        }
        assert!(errors >= 1, "copy {nth}, depth {depth}");
        check_pass(&mut streamer, &subject).unwrap();
    }
}
