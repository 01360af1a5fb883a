//! Models of which one table is larger than all else, on cards that hold less than it: kept resident, used in place, or
//! streamed through a slot of its own size; and refusals that say what would fit.

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::machines::clocked;
use support::outliers::{bert, layout, many_tokens, mini_lm};
use support::watched::Watched;
use support::*;
use tensor_offload::backend::{Backend, Clock, Host, MemoryKind, Role, Transfer};
use tensor_offload::checkpoint::Layout;
use tensor_offload::error::Shortfall;
use tensor_offload::error::{Measured, Missing, NoRows, Remedy, Term};
use tensor_offload::plan::{ComputeTime, Unit};
use tensor_offload::{
    ByteSize, DType, Error, ErrorKind, LayerGuard, LayerId, Loader, Model, Order, Plan, Planner, Registry, Result,
    Streamer, Use,
};

const MIB: u64 = 1 << 20;
const WORDS: &str = "embeddings.word_embeddings";

fn usage(plan: &Plan, module: &str) -> Use {
    plan.assignments().iter().find(|a| &*a.module == module).expect("a module of this name").usage
}

fn refused(result: Result<Plan>) -> Shortfall {
    match result {
        Err(Error::DoesNotFit(short)) => *short,
        other => panic!("{other:?}"),
    }
}

fn usual(layout: &Layout, in_stack: &str) -> u64 {
    let layer = layout.layers().iter().find(|layer| layer.name.starts_with(in_stack)).unwrap();
    layout.slot_of(layer.id).unwrap()
}

#[test]
fn an_outlier_is_kept_resident_before_anything_makes_slots_for_it() {
    let (minilm, machine) = (layout(&mini_lm()), described(&["cuda:0=66mib", "cpu=1gib"]));
    let layer = usual(&minilm, "encoder.layer");
    assert_eq!((minilm.bytes() / MIB, layer), (86, 7_097_856));
    for unit in [Unit::Module, Unit::Uniform] {
        let planner = Planner::new(&minilm, &machine).allocation("cuda:0,45mib;cpu,*".parse().unwrap()).unit(unit);
        let plan = planner.plan().unwrap();
        assert_eq!(usage(&plan, WORDS), Use::Resident);
        assert!(plan.slots().bytes_each <= layer && plan.slots().count == 3, "{plan}");
        let [outlier] = &plan.outliers()[..] else { panic!("{plan}") };
        assert_eq!((&*outlier.module, outlier.bytes, outlier.usual), (WORDS, 46_881_792, layer));
        let line = "embeddings.word_embeddings (44.71 MiB, layers up to 6.77 MiB) stays resident, so that slots need not hold it";
        assert_eq!(outlier.to_string(), line);
        assert!(plan.to_string().contains(line), "{plan}");
        plan.verify(&minilm).unwrap();
    }
    // Both ends of a Llama, the head too.
    let llama = layout(&many_tokens(128_256, 512, 8));
    let machine = described(&["cuda:0=300mib", "cpu=1gib"]);
    let plan = Planner::new(&llama, &machine).allocation("cuda:0,260mib;cpu,*".parse().unwrap()).plan().unwrap();
    assert_eq!([usage(&plan, "model.embed_tokens"), usage(&plan, "lm_head")], [Use::Resident; 2]);
    assert!(plan.slots().bytes_each <= usual(&llama, "model.layers"), "{plan}");
}

/// In sequence modules go where the string says; and a model without a stack, or layers of a stack that differ, have none.
#[test]
fn nothing_else_is_kept_for_its_size() {
    let (llama, machine) = (layout(&many_tokens(32_000, 512, 8)), described(&["cuda:0=1gib", "cpu=1gib"]));
    let planner = Planner::new(&llama, &machine).allocation("cuda:0,40mib;cpu,*".parse().unwrap());
    let plan = planner.clone().order(Order::Sequential).plan().unwrap();
    assert_eq!((usage(&plan, "model.embed_tokens"), usage(&plan, "lm_head")), (Use::Resident, Use::Streamed));
    assert!(plan.to_string().contains("\nlm_head (31.25 MiB, layers up to 5.00 MiB) is streamed"), "{plan}");
    let blocks = Layout::blocks([MIB, 50 * MIB, MIB, MIB]);
    let plan = Planner::new(&blocks, &machine).allocation("cuda:0,51mib;cpu,*".parse().unwrap()).plan().unwrap();
    assert_eq!(plan.outliers(), []);
    // What is resident with all else is nothing to speak of.
    let plan = Planner::new(&llama, &machine).plan().unwrap();
    assert_eq!((plan.outliers().len(), plan.to_string().contains("layers up to")), (2, false));
}

/// A refusal's remedies are what it takes: each fits, and what is not named does not.
#[test]
fn a_refusal_says_what_would_fit() {
    let (minilm, llama) = (layout(&mini_lm()), layout(&many_tokens(32_000, 512, 8)));
    let mut seen = [0; 3];
    for model in [&minilm, &llama] {
        for card in [12, 20, 40, 44, 60, 66, 72, 80, 90] {
            let machine = described(&[&format!("cuda:0={card}mib"), "cpu=1gib"]);
            let quotas = [card / 2, card * 3 / 4, card].map(|quota| format!("cuda:0,{quota}mib"));
            for allocation in quotas.into_iter().chain(["auto".to_owned()]) {
                for order in [Order::Sequential, Order::Interleaved] {
                    let planner = Planner::new(model, &machine).order(order);
                    let asked = planner.clone().allocation(allocation.parse().unwrap());
                    let Err(Error::DoesNotFit(short)) = asked.plan() else { continue };
                    let text = short.to_string();
                    let find = |is: fn(&Remedy) -> bool| short.remedies.iter().find(|remedy| is(remedy));
                    let keep = find(|r| matches!(r, Remedy::KeepResident { .. }));
                    let in_place = find(|r| matches!(r, Remedy::InPlace { .. }));
                    let auto = find(|r| matches!(r, Remedy::Auto));
                    if let Some(Remedy::KeepResident { modules }) = keep {
                        let plan =
                            modules.iter().fold(asked.clone(), |planner, module| planner.keep_resident(module)).plan();
                        modules
                            .iter()
                            .for_each(|module| assert_eq!(usage(plan.as_ref().unwrap(), module), Use::Resident));
                        assert!(text.contains(&format!("keep_resident(\"{}\")", modules[0])), "{text}");
                    }
                    if let Some(Remedy::InPlace { modules }) = in_place {
                        modules.iter().fold(asked.clone(), |planner, module| planner.in_place(module)).plan().unwrap();
                        assert!(text.contains(&format!("in_place(\"{}\")", modules[0])), "{text}");
                    }
                    let by_auto = allocation != "auto" && planner.allocation("auto".parse().unwrap()).plan().is_ok();
                    assert_eq!((auto.is_some(), text.contains("the allocation `auto`")), (by_auto, by_auto), "{text}");
                    for (seen, remedy) in seen.iter_mut().zip([keep, in_place, auto]) {
                        *seen += usize::from(remedy.is_some());
                    }
                }
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

#[test]
fn a_card_that_holds_less_than_the_embedding_is_refused_with_the_way_out() {
    let (minilm, machine) = (layout(&mini_lm()), described(&["cuda:0=40mib", "cpu=1gib"]));
    let planner = Planner::new(&minilm, &machine).allocation("cuda:0,20mib;cpu,*".parse().unwrap());
    let short = refused(planner.plan());
    assert_eq!((short.device, short.term, short.module.as_deref()), (GPU0, Term::Slots, Some(WORDS)));
    assert_eq!(short.remedies, [Remedy::InPlace { modules: vec![WORDS.to_owned()] }]);
    let text = short.to_string();
    assert!(text.ends_with("bytes short; it fits with in_place(\"embeddings.word_embeddings\")"), "{text}");
    let auto = Planner::new(&minilm, &machine).allocation("auto".parse().unwrap());
    assert_eq!(refused(auto.plan()).remedies, short.remedies);
    for planner in [planner, auto] {
        let (plan, gathered) = (planner.clone().in_place(WORDS).plan(), planner.gather_embeddings(true).plan());
        let (plan, gathered) = (plan.unwrap(), gathered.unwrap());
        assert_eq!(
            (usage(&gathered, WORDS), gathered.device(GPU0).unwrap().needed() <= 40 * MIB),
            (Use::InPlace, true)
        );
        assert_eq!(usage(&plan, WORDS), Use::InPlace);
        let line = "embeddings.word_embeddings (44.71 MiB, layers up to 6.77 MiB) is used in place";
        assert!(plan.to_string().contains(line), "{plan}");
    }
}

/// A model of which one table is 2 MB and a layer 0.2, with its bytes.
fn small_bert() -> Subject {
    Subject::plain(&bert(DType::F32, 8_000, 64, 6, 256), 70)
}

/// The same of a Llama: two of 0.5 MB, and 0.1.
fn small_llama() -> Subject {
    Subject::plain(&many_tokens(4_000, 64, 6), 71)
}

fn load(registry: &Registry, subject: &Subject, plan: &Plan) -> Arc<Model> {
    Arc::new(Loader::new(registry).load(&subject.weights, plan).unwrap())
}

fn check_layer(guard: &LayerGuard, subject: &Subject) {
    for view in guard.tensors() {
        let mut bytes = vec![0; view.info().bytes as usize];
        guard.read(&view.info().name, &mut bytes).unwrap();
        assert!(bytes == subject.bytes_of(&view.info().name), "wrong bytes of {}", view.info().name);
    }
}

fn check_pass(streamer: &mut Streamer, subject: &Subject) {
    for layer in streamer.model().layout().layer_ids() {
        check_layer(&streamer.layer(layer).unwrap(), subject);
    }
}

/// These rows of a table, as the checkpoint has them.
fn rows_of(subject: &Subject, table: &str, rows: &[u64]) -> Vec<u8> {
    let id = subject.layout().find(table).unwrap();
    let info = subject.layout().tensor(id).unwrap();
    let each = (info.bytes / info.shape[0]) as usize;
    rows.iter().flat_map(|&row| &subject.bytes_of(table)[row as usize * each..][..each]).copied().collect()
}

/// Rows that were sent are on the card for what its compute stream does next.
fn check_rows(streamer: &mut Streamer, subject: &Subject, table: &str, rows: &[u64]) {
    let (sent, want) = (streamer.send_rows(table, rows).unwrap(), rows_of(subject, table, rows));
    assert_eq!((sent.device(), sent.bytes()), (GPU0, want.len()));
    let host = Host::new().open(CPU).unwrap();
    let (compute, bytes) = (streamer.compute(), host.alloc(want.len(), MemoryKind::Pinned).unwrap());
    let landed = compute.copy(Transfer::whole(&sent, bytes).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
    assert!(landed.host(DEADLINE).unwrap().unwrap() == want, "wrong rows of {table}");
    let mut read = vec![0; want.len()];
    streamer.model().read_rows(table, rows, &mut read).unwrap();
    assert!(read == want, "wrong rows of {table}");
}

/// On a card that is smaller than the table its rows are sent, and all else is streamed, whatever the mode.
#[test]
fn a_table_larger_than_the_card_is_looked_up_where_it_lives() {
    let subject = small_bert();
    let machine = described(&["cpu=64mb,link=20", "disk=64mb", "cuda:0=1500kb,link=10", "cuda:1=64mb,link=10"]);
    let table = format!("{WORDS}.weight");
    for clock in [Clock::Virtual, Clock::Wall] {
        for allocation in
            ["cuda:0,500kb;cpu,*", "cuda:0,100kb;disk,400kb;cpu,*", "auto,reserve=64kb", "cuda:0,50kb;cuda:1,*"]
        {
            let registry = Registry::described(machine.clone(), clock);
            let plan = subject
                .planner(&machine, allocation)
                .gather_embeddings(true)
                .reserve(ByteSize(64 << 10))
                .plan()
                .unwrap();
            assert_eq!(usage(&plan, WORDS), Use::InPlace, "{plan}");
            assert!(plan.device(GPU0).unwrap().needed() < 2_048_000, "{plan}");
            let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
            for rows in [&[0, 7_999, 17, 18, 19, 17][..], &[], &(0..200).map(|n| n * 39).collect::<Vec<_>>()] {
                check_rows(&mut streamer, &subject, &table, rows);
                check_pass(&mut streamer, &subject);
            }
            drop(streamer);
            comes_back(&registry);
        }
    }
}

/// Rows of what is resident, streamed or on another card are the same rows.
#[test]
fn rows_come_from_wherever_a_tensor_lives() {
    let subject = small_bert();
    let machine = described(&["cpu=64mb", "disk=64mb", "cuda:0=24mb", "cuda:1=24mb", "xpu:0=24mb"]);
    for allocation in ["cuda:0,*", "cuda:1,*", "xpu:0,*", "disk,*", "cpu,*"] {
        let registry = Registry::described(machine.clone(), Clock::Virtual);
        let plan = subject.planner(&machine, allocation).plan().unwrap();
        let model = load(&registry, &subject, &plan);
        let mut streamer = Streamer::new(&model).unwrap();
        for table in ["embeddings.word_embeddings.weight", "encoder.layer.3.output.dense.bias"] {
            check_rows(&mut streamer, &subject, table, &[9, 8, 63, 8]);
        }
        // More than a staging buffer holds.
        let many: Vec<u64> = (0..70_000).map(|n| n * 7 % 8_000).collect();
        check_rows(&mut streamer, &subject, "embeddings.word_embeddings.weight", &many);
    }
}

/// The buffers for rows are kept for as many rows or fewer, and replaced for more.
#[test]
fn buffers_for_rows_grow_and_do_not_shrink() {
    let (subject, machine) = (small_bert(), described(&["cpu=64mb", "cuda:0=1500kb"]));
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let registry = &watched.registry;
    let plan = subject.planner(&machine, "cuda:0,300kb;cpu,*").gather_embeddings(true).plan().unwrap();
    let mut streamer = Streamer::new(&load(registry, &subject, &plan)).unwrap();
    let host = registry.device(CPU).unwrap();
    let before = host.ledger().charged();
    // The bytes of buffers after rows of 256 bytes were sent so often. A buffer has 64 KiB or more; at most four are made.
    for (rows, times, buffers) in [(1, 1, 64), (250, 2, 3 * 64), (256, 5, 4 * 64), (1_000, 3, 3 * 256), (9, 9, 4 * 256)]
    {
        for _ in 0..times {
            check_rows(&mut streamer, &subject, &format!("{WORDS}.weight"), &(0..rows).collect::<Vec<_>>());
        }
        assert_eq!(host.ledger().charged() - before, buffers << 10, "{rows} rows");
    }
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let tensors = [
        support::spec("wte.weight", DType::F32, &[10, 4]),
        support::spec("scale", DType::F32, &[]),
        support::spec("packed.weight", DType::F4, &[4, 3]),
    ];
    let (subject, machine) = (Subject::plain(&tensors, 72), described(&["cpu=1mb", "cuda:0=1mb"]));
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").gather_embeddings(true).plan().unwrap();
    assert_eq!(usage(&plan, "wte"), Use::InPlace);
    let model = load(&registry, &subject, &plan);
    let mut streamer = Streamer::new(&model).unwrap();
    let missing = |result: Result<()>| match result {
        Err(Error::Missing(missing)) => missing,
        other => panic!("{other:?}"),
    };
    for (name, rows) in [("wte.weight", &[3, 10][..]), ("scale", &[0]), ("packed.weight", &[0]), ("none", &[0])] {
        let sent = missing(streamer.send_rows(name, rows).map(drop));
        assert_eq!(missing(model.read_rows(name, rows, &mut [0; 16])), sent);
        match (name, &sent) {
            ("wte.weight", Missing::Row { row: 10, count: 10, .. })
            | ("scale", Missing::Rows { why: NoRows::Scalar, .. })
            | ("packed.weight", Missing::Rows { why: NoRows::PartOfAByte, .. })
            | ("none", Missing::Tensor { .. }) => (),
            _ => panic!("{name}: {sent:?}"),
        }
    }
    let short = model.read_rows("wte.weight", &[1, 2], &mut [0; 31]).unwrap_err();
    assert_eq!(short.to_string(), "2 rows of tensor `wte.weight` have 32 bytes, the buffer for them 31");
    // More than the card holds: nothing stays taken.
    let (device, many) = (registry.device(GPU0).unwrap(), vec![1; 70_000]);
    let before = device.ledger().charged();
    assert_eq!(streamer.send_rows("wte.weight", &many).unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert_eq!(device.ledger().charged(), before);
    check_rows(&mut streamer, &subject, "wte.weight", &[9, 0]);
}

/// What is streamed through slots of two sizes arrives whole in any order, with guards kept for a while.
#[test]
fn layers_of_two_sizes_arrive_in_slots_of_two_sizes() {
    for (subject, card, slots) in [(small_bert(), "3mb", (3, 1)), (small_llama(), "1400kb", (3, 2))] {
        let machine =
            described(&["cpu=64mb,link=20", &format!("cuda:0={card},link=10"), "xpu:0=64mb,link=5", "disk=64mb"]);
        for (clock, allocation) in
            [(Clock::Virtual, "cpu,*"), (Clock::Wall, "cpu,*"), (Clock::Wall, "cpu,1mb;xpu:0,1mb;disk,*")]
        {
            let registry = Registry::described(machine.clone(), clock);
            let planner = subject.planner(&machine, allocation);
            let plan = planner.clone().plan().unwrap();
            assert_eq!((plan.slots().count, plan.slots().large), slots, "{plan}");
            refused(planner.fixed_slots(true).plan());
            let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
            check_pass(&mut streamer, &subject);
            check_pass(&mut streamer, &subject);
            // All but the first layer were there before they were asked for.
            assert_eq!(streamer.report().misses, 1, "{}", streamer.report());
            let count = subject.layout().layers().len();
            let (mut random, mut held) = (Random::new(3), Vec::new());
            for _ in 0..120 {
                let layer = LayerId::new(random.next() as usize % count);
                match streamer.layer(layer) {
                    Ok(guard) => {
                        check_layer(&guard, &subject);
                        held.push(guard);
                    }
                    // Guards keep the slots that are large enough.
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
                        held.clear();
                        check_layer(&streamer.layer(layer).unwrap(), &subject);
                    }
                }
                held.truncate(2);
                held.iter().for_each(|guard| check_layer(guard, &subject));
            }
            drop((held, streamer));
            comes_back(&registry);
        }
    }
}

/// The caller gives the sizes that the plan asks for, or larger ones.
#[test]
fn own_slots_are_of_the_sizes_that_the_plan_asks_for() {
    let (subject, machine) = (small_bert(), described(&["cpu=64mb", "cuda:0=24mb"]));
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").external_slots(true).plan().unwrap();
    let shape = plan.slots();
    assert_eq!((shape.count, shape.large, shape.bytes(), shape.large_bytes), (0, 0, 0, 2_048_000));
    let model = load(&registry, &subject, &plan);
    let device = model.residency().device();
    let with = |sizes: &[u64]| {
        let slots = sizes.iter().map(|&bytes| device.alloc(bytes as usize, MemoryKind::Whole).unwrap()).collect();
        Streamer::with_slots(&model, device.stream(Role::Compute)?, slots)
    };
    let (each, large) = (shape.bytes_each, shape.large_bytes);
    for sizes in
        [vec![each, each, each, large], vec![large, each], vec![large, large + 5], vec![each + 300, large, each]]
    {
        let mut streamer = with(&sizes).unwrap();
        check_pass(&mut streamer, &subject);
        check_pass(&mut streamer, &subject);
        let back: Vec<u64> = streamer.into_slots().unwrap().iter().map(|slot| slot.bytes() as u64).collect();
        assert_eq!(back, sizes);
    }
    for (sizes, number, needed) in
        [(vec![each, each + 9], 1, large), (vec![each - 1, large], 0, each), (vec![1], 0, large)]
    {
        match with(&sizes).unwrap_err() {
            Error::WrongSize { what, needed: wanted, given } => {
                assert_eq!((what, wanted, given), (Measured::Slot { number }, needed, sizes[number]));
            }
            other => panic!("{other}"),
        }
    }
}

/// Slots of two sizes cost no time: the pass is as long as with slots that all hold the largest layer.
#[test]
fn two_sizes_take_less_memory_and_no_more_time() {
    let layouts = [layout(&mini_lm()), layout(&many_tokens(128_256, 512, 12))];
    let machine = described(&["cuda:0=1gib,link=10", "cpu=4gib"]);
    for (model, ms) in layouts.iter().flat_map(|layout| [(layout, 0), (layout, 10), (layout, 100)]) {
        for depth in 0..5 {
            let planner = Planner::new(model, &machine).allocation("cpu,*".parse().unwrap()).depth(depth);
            let (plan, fixed) = (planner.clone().plan().unwrap(), planner.clone().fixed_slots(true).plan().unwrap());
            let compute = ComputeTime::Pass(Duration::from_millis(ms));
            let times = compute.of_layers(model).unwrap();
            let time = clocked(&machine, model, &plan, &times).unwrap();
            assert_eq!(time, plan.forecast(model, machine.topology(), &compute).unwrap());
            let alike = clocked(&machine, model, &fixed, &times).unwrap();
            assert!(plan.slots().bytes() <= fixed.slots().bytes() && time <= alike, "{plan}\n{time:?} {alike:?}");
            assert!(plan.slots().bytes() < fixed.slots().bytes() || depth < 2, "{plan}");
        }
    }
}
