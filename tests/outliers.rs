//! Models of which one table is larger than all else, on cards that hold less than it: kept resident, used in place, or
//! streamed through a slot of its own size; and refusals that say what would fit.

mod support;

use support::outliers::{layout, many_tokens, mini_lm};
use support::*;
use tensor_offload::checkpoint::Layout;
use tensor_offload::error::{Remedy, Term};
use tensor_offload::{Error, Order, Plan, Planner, Result, Shortfall, Unit, Use};

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
        let plan = planner.in_place(WORDS).plan().unwrap();
        assert_eq!(usage(&plan, WORDS), Use::InPlace);
        let line = "embeddings.word_embeddings (44.71 MiB, layers up to 6.77 MiB) is used in place";
        assert!(plan.to_string().contains(line), "{plan}");
    }
}
