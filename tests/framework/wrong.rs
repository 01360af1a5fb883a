//! Frameworks that fail, panic, or give what was not asked for, and devices that fail: an error that says what is wrong, and
//! nothing stays allocated.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tensor_offload::backend::{Clock, Storage};
use tensor_offload::error::{Measured, Mismatch};
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{DType, DeviceId, Error, ErrorKind, Model, Plan, Registry, Result, Streamer};

use super::support::framework::{Framework, Memory, Wrong};
use super::support::watched::Watched;
use super::support::*;
use super::{DIVIDED, assert_gone, check_tensors, framework_bytes, loader, planner, small_mixed};

/// Where models of these tests are: resident ones and streamed ones, on the host and on a card.
const PLACES: [(DeviceId, &str); 2] = [(CPU, "cpu,30%;disk,70%"), (GPU0, "cuda:0,30%;cpu,30%;xpu:0,40%")];

fn plan_for(subject: &Subject, (compute, allocation): (DeviceId, &str), grouping: TensorGrouping) -> Plan {
    planner(subject, &machine(), compute, allocation).grouping(grouping).depth(1).plan().unwrap()
}

fn assert_nothing_is_left(registry: &Registry, framework: &Framework) {
    comes_back(registry);
    assert_gone(framework);
}

/// Whatever request goes wrong, in whatever way.
#[test]
fn a_framework_that_goes_wrong_leaves_nothing_behind() {
    let subject = Subject::patched(&llama(2, 16), 71);
    for ((place, grouping), memory) in PLACES.into_iter().zip(DIVIDED).zip([Memory::Locked, Memory::Lent]) {
        let (plan, registry) = (plan_for(&subject, place, grouping), Registry::described(machine(), Clock::Virtual));
        let framework = Framework::new(place.0, grouping, memory);
        drop(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        let requests = framework.requests();
        assert!(requests > 5, "{requests}");
        for (wrong, nth) in
            [Wrong::Error, Wrong::Panic, Wrong::Small].into_iter().flat_map(|w| (1..=requests).map(move |n| (w, n)))
        {
            framework.go_wrong(wrong, nth);
            let load = || loader(&registry, &[&framework]).load(&subject.weights, &plan);
            match (wrong, catch_unwind(AssertUnwindSafe(load))) {
                (Wrong::Error, Ok(Err(Error::OutOfMemory { .. }))) | (Wrong::Panic, Err(_)) => {}
                (Wrong::Small, Ok(Err(Error::WrongSize { what: Measured::Allocation { .. }, needed, given }))) => {
                    assert!(given < needed);
                }
                (_, Err(_)) => panic!("{wrong:?} at {nth} became a panic"),
                (_, Ok(outcome)) => panic!("{wrong:?} at {nth}: {:?}", outcome.map(|_| ())),
            }
            assert_nothing_is_left(&registry, &framework);
        }
        let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        check_tensors(&framework, &subject, &model);
        check_streamed(&model, &subject);
    }
}

/// Memory that nobody can reach, from an allocator of any device.
struct Unreached(DeviceId);

struct Nowhere(usize);

#[expect(unsafe_code, reason = "storage vouches for its memory")]
// SAFETY: it names no memory.
unsafe impl Storage for Nowhere {
    fn bytes(&self) -> usize {
        self.0
    }
}

impl TensorAllocator for Unreached {
    fn device(&self) -> DeviceId {
        self.0
    }

    fn grouping(&self) -> TensorGrouping {
        TensorGrouping::PerTensor
    }

    fn supports(&self, _: DType) -> bool {
        true
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> Result<Box<dyn Storage>> {
        Ok(Box::new(Nowhere(request.bytes)))
    }
}

#[test]
fn memory_of_another_kind_of_device_is_refused() {
    let subject = Subject::plain(&llama(2, 16), 72);
    for (place, clock) in PLACES.into_iter().flat_map(|place| [(place, Clock::Wall), (place, Clock::Virtual)]) {
        let (plan, registry) =
            (plan_for(&subject, place, TensorGrouping::PerTensor), Registry::described(machine(), clock));
        let loader = tensor_offload::Loader::new(&registry).allocator(Arc::new(Unreached(place.0)));
        let error = loader.load(&subject.weights, &plan).unwrap_err();
        let wanted = if place.0 == CPU { ErrorKind::Mismatch } else { ErrorKind::Unreachable };
        assert_eq!(error.kind(), wanted, "{error}");
        comes_back(&registry);
    }
}

#[test]
fn tensors_of_types_that_a_framework_lacks_are_in_the_librarys_memory() {
    let subject = Subject::patched(&small_mixed(2), 73);
    let registry = Registry::described(machine(), Clock::Wall);
    for place in [(CPU, "cpu,*"), (CPU, "disk,*"), (GPU0, "cpu,*"), (GPU0, "cuda:0,50%;cpu,*")] {
        let framework = Framework::without(place.0, DIVIDED[1], Memory::Locked, &[DType::I64]);
        let plan = plan_for(&subject, place, DIVIDED[1]);
        let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        assert!(framework.requests() > 0);
        subject.check(&model);
        check_streamed(&model, &subject);
        assert!(framework.live_bytes() < framework_bytes(&plan, place.0), "{place:?}");
        drop(model);
        comes_back(&registry);
    }
}

#[test]
fn a_plan_that_divides_tensors_otherwise_is_refused() {
    let subject = Subject::plain(&llama(2, 16), 74);
    let registry = Registry::described(machine(), Clock::Virtual);
    let all = [TensorGrouping::Joined, DIVIDED[0], DIVIDED[1]];
    for (planned, needed) in all.into_iter().flat_map(|planned| all.map(|needed| (planned, needed))) {
        for (id, place) in [(CPU, PLACES[0]), (GPU0, PLACES[1]), (CPU, PLACES[1])] {
            let framework = Framework::new(id, needed, Memory::Locked);
            let outcome = loader(&registry, &[&framework]).load(&subject.weights, &plan_for(&subject, place, planned));
            let joined = [planned, needed].contains(&TensorGrouping::Joined);
            // Where there are no slots, tensors are apart in either way.
            let fits = !joined && (planned == needed || id != place.0);
            match outcome {
                Ok(model) => assert!(fits, "{planned} for {needed} on {id}: {}", model.plan()),
                Err(Error::Invalid { .. }) => assert_eq!(needed, TensorGrouping::Joined),
                Err(Error::Mismatch(why)) => {
                    assert!(!fits && matches!(*why, Mismatch::Grouping { device, .. } if device == id), "{why}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}

fn load_and_stream(registry: &Registry, framework: &Arc<Framework>, subject: &Subject, plan: &Plan) -> Result<()> {
    let model = Arc::new(loader(registry, &[framework]).workers(1).load(&subject.weights, plan)?);
    let mut streamer = Streamer::new(&model)?;
    check_pass(&mut streamer, subject)?;
    streamer.overwrite_slots(0xff)?;
    check_pass(&mut streamer, subject)
}

/// Whatever operation of a device fails while a model is loaded into a framework's memory and streamed.
#[test]
fn nothing_is_kept_whatever_operation_fails() {
    let subject = Subject::patched(&llama(2, 16), 75);
    for (place, grouping) in PLACES.into_iter().zip(DIVIDED) {
        let plan = plan_for(&subject, place, grouping);
        let (mut failures, mut nth) = (0, 1);
        loop {
            let watched = Watched::new(machine(), Clock::Virtual);
            let framework = Framework::new(place.0, grouping, Memory::Locked);
            watched.countdown.fail_nth(nth);
            let outcome = load_and_stream(&watched.registry, &framework, &subject, &plan);
            assert_nothing_is_left(&watched.registry, &framework);
            match outcome {
                Err(_) => failures += 1,
                Ok(()) if watched.countdown.calls() < nth => break,
                Ok(()) => {}
            }
            nth += 1 + nth / 40;
        }
        assert!(failures > 20, "{failures} of {nth}");
    }
}

/// A framework whose memory is gone under the library: an error for whoever needs it, and no more.
#[test]
fn memory_that_is_gone_is_an_error() {
    let subject = Subject::plain(&llama(3, 16), 76);
    for (place, clock) in PLACES.into_iter().flat_map(|place| [(place, Clock::Wall), (place, Clock::Virtual)]) {
        let (plan, registry) = (plan_for(&subject, place, DIVIDED[1]), Registry::described(machine(), clock));
        let framework = Framework::new(place.0, DIVIDED[1], Memory::Locked);
        let model: Arc<Model> = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
        let (slots, homes): (Vec<_>, Vec<_>) = framework.live().into_iter().partition(|tensor| tensor.name.is_none());
        homes[0].lose();
        assert!(read(&model, homes[0].name.as_ref().unwrap()).is_err());
        drop(homes);
        let mut streamer = Streamer::new(&model).unwrap();
        let mut errors = 0;
        slots.iter().for_each(|slot| slot.lose());
        for layer in layers(&streamer) {
            errors += usize::from(streamer.layer(layer).and_then(|guard| check_layer(&guard, &subject)).is_err());
        }
        assert!(errors >= plan.streamed_layers(), "{errors}");
        drop((slots, streamer, model));
        assert_nothing_is_left(&registry, &framework);
    }
}

/// A copy into one allocation of a slot that is refused, or fails once it is queued, is an error where the layer is asked for
/// or read. The other allocations of the slot are none the worse, and the next pass is right.
#[test]
fn after_a_copy_into_a_divided_slot_failed_the_next_pass_is_right() {
    let subject = Subject::plain(&small_mixed(3), 77);
    for (grouping, clock) in DIVIDED.into_iter().flat_map(|s| [(s, Clock::Virtual), (s, Clock::Wall)]) {
        let plan = plan_for(&subject, (GPU0, "cuda:1,30%;cpu,30%;xpu:0,40%"), grouping);
        for nth in (1..40).step_by(if clock == Clock::Wall { 4 } else { 1 }) {
            for spoilt in [false, true] {
                let (watched, framework) =
                    (Watched::new(machine(), clock), Framework::new(GPU0, grouping, Memory::Locked));
                let model = Arc::new(loader(&watched.registry, &[&framework]).load(&subject.weights, &plan).unwrap());
                let mut streamer = Streamer::new(&model).unwrap();
                match spoilt {
                    true => watched.copies.spoil_nth(nth as usize),
                    false => watched.countdown.fail_nth(nth),
                }
                // What fails after it was fetched ahead is an error of the second pass.
                for layer in layers(&streamer).chain(layers(&streamer).filter(|_| spoilt)) {
                    if let Err(error) = streamer.layer(layer).and_then(|guard| check_layer(&guard, &subject)) {
                        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
                    }
                }
                watched.countdown.fail_nth(u64::MAX / 2);
                watched.copies.spoil_nth(usize::MAX / 2);
                let next = check_pass(&mut streamer, &subject);
                next.unwrap_or_else(|error| panic!("{grouping}, operation {nth}, spoilt {spoilt}: {error}"));
                drop((streamer, model));
                assert_nothing_is_left(&watched.registry, &framework);
            }
        }
    }
}
