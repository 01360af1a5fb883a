//! What the first pass of a streamed network fetches, with the order of its layers from the tables and with the order that
//! sorted names give. Devices have sizes only, and time is virtual: every figure is exact.
//!
//! `cargo test --test first_pass -- --nocapture` prints the table of docs/performance.md.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use support::*;
use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
use tensor_offload::checkpoint::{Layout, OrderSource, TensorInfo};
use tensor_offload::{DType, LayerId, Model, Planner, Registry, Streamer};

const BF16: u64 = 2;

/// A network: its stacks by what stands before their numbers, in order of name, with the number of layers and the parameters of one,
/// and its other modules with their parameters. Small vectors are left out.
struct Network {
    name: &'static str,
    stacks: Vec<(&'static str, u64, u64)>,
    first: Vec<(&'static str, u64)>,
    last: Vec<(&'static str, u64)>,
}

/// The weights of `matrices` products of `width` by `width`.
fn square(width: u64, matrices: u64) -> u64 {
    width * width * matrices
}

fn networks() -> Vec<Network> {
    let (flux, z, wan, t5, llama, clip) = (3_072, 3_840, 5_120, 4_096, 4_096, 1_024);
    vec![
        Network {
            name: "Flux.1, diffusers' file",
            // Single: 3 for q, k, v, 4 + 5 of the MLP and the output, 3 of the modulation. Double: for each of two streams 3 + 1
            // of attention, 8 of the MLP, 6 of the modulation.
            stacks: vec![
                ("single_transformer_blocks", 38, square(flux, 15)),
                ("transformer_blocks", 19, square(flux, 36)),
            ],
            first: vec![("context_embedder", 4_096 * flux), ("x_embedder", 64 * flux)],
            last: vec![("norm_out.linear", square(flux, 2)), ("proj_out", 64 * flux)],
        },
        Network {
            name: "Z-Image, diffusers' file",
            // 4 of attention, three matrices of the MLP of 10,240; where time modulates, 4 of 256.
            stacks: vec![
                ("context_refiner", 2, square(z, 4) + 3 * 10_240 * z),
                ("layers", 30, square(z, 4) + 3 * 10_240 * z + 4 * 256 * z),
                ("noise_refiner", 2, square(z, 4) + 3 * 10_240 * z + 4 * 256 * z),
            ],
            first: vec![("all_x_embedder.2-1", 64 * z), ("cap_embedder.1", 2_560 * z)],
            last: vec![("all_final_layer.2-1.linear", 64 * z)],
        },
        Network {
            name: "Wan 2.1 VACE 14B, ComfyUI",
            // 4 of self-attention, 4 of cross-attention, two matrices of the MLP of 13,824; a control block has a projection more.
            stacks: vec![
                ("blocks", 40, square(wan, 8) + 2 * 13_824 * wan),
                ("vace_blocks", 8, square(wan, 9) + 2 * 13_824 * wan),
            ],
            first: vec![
                ("patch_embedding", 64 * wan),
                ("vace_patch_embedding", 384 * wan),
                ("time_projection.1", square(wan, 6)),
            ],
            last: vec![("head.head", 64 * wan)],
        },
        Network {
            name: "Flan-T5 XXL",
            // 4 of attention, again 4 in the decoder; three matrices of the MLP of 10,240.
            stacks: vec![
                ("decoder.block", 24, square(t5, 8) + 3 * 10_240 * t5),
                ("encoder.block", 24, square(t5, 4) + 3 * 10_240 * t5),
            ],
            first: vec![("shared", 32_128 * t5)],
            last: vec![("lm_head", 32_128 * t5)],
        },
        Network {
            name: "LLaVA 1.5 7B",
            stacks: vec![
                ("language_model.model.layers", 32, square(llama, 4) + 3 * 11_008 * llama),
                ("vision_tower.vision_model.encoder.layers", 24, square(clip, 12)),
            ],
            first: vec![
                ("language_model.model.embed_tokens", 32_064 * llama),
                ("multi_modal_projector.linear_1", clip * llama),
                ("vision_tower.vision_model.embeddings.patch_embedding", 588 * clip),
            ],
            last: vec![("language_model.lm_head", 32_064 * llama)],
        },
    ]
}

impl Network {
    /// The layers in the order that their names give: of one rank, by name.
    fn by_name(&self) -> Vec<(String, u64)> {
        let named = |(name, size): &(&str, u64)| ((*name).to_owned(), *size);
        let stack = |stack: &(&'static str, u64, u64)| {
            let (name, count, size) = *stack;
            (0..count).map(move |n| (format!("{name}.{n}"), size))
        };
        let stacks = self.stacks.iter().flat_map(stack);
        self.first.iter().map(named).chain(stacks).chain(self.last.iter().map(named)).collect()
    }
}

/// What a pass fetches and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pass {
    bytes: u64,
    misses: u64,
    time: Duration,
}

/// The first passes through the layers in the order that the network runs them, where the schedule expects the order of `layout`.
fn passes(layout: &Layout, run: &[String], share: &str) -> Vec<Pass> {
    let bytes = layout.bytes();
    let machine = described(&["cpu=200gb", "cuda:0=200gb,link=25"]);
    let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual).contents(Contents::SizesOnly));
    let registry = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    let allocation = share.parse().unwrap();
    let plan = Planner::new(layout, &machine).allocation(allocation).pinned_cap(None).depth(2).plan().unwrap();
    let model = Arc::new(Model::unfilled(&registry, layout, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    let ids: BTreeMap<&str, LayerId> = layout.layers().iter().map(|layer| (layer.name.as_str(), layer.id)).collect();
    let mut all = Vec::new();
    for _ in 0..3 {
        let (before, begin) = (streamer.report().clone(), simulated.now());
        for name in run {
            let layer = ids[name.as_str()];
            let _guard = streamer.layer(layer).unwrap();
            // As long as what is streamed takes over the link, spread like the bytes.
            let share = layout.layer(layer).unwrap().bytes as f64 / bytes as f64;
            let busy = plan.streamed_bytes() as f64 / 25e9 * share;
            streamer.compute().occupy(Duration::from_secs_f64(busy)).unwrap();
        }
        streamer.compute().record(&[]).unwrap().wait(DEADLINE).unwrap();
        let after = streamer.report();
        let fetched = |report: &tensor_offload::stream::StreamReport| report.bytes.values().sum::<u64>();
        all.push(Pass {
            bytes: fetched(after) - fetched(&before),
            misses: after.misses - before.misses,
            time: simulated.now() - begin,
        });
    }
    all
}

fn layout(layers: &[(String, u64)]) -> Layout {
    let mut offset = 0;
    let tensor = |(name, size): &(String, u64)| {
        let last = name.rsplit('.').next().unwrap();
        let role = if last.bytes().all(|b| b.is_ascii_digit()) { ".w" } else { "" };
        let tensor = TensorInfo::new(format!("{name}{role}.weight"), DType::BF16, &[*size], 0, offset).unwrap();
        offset += size * BF16;
        tensor
    };
    Layout::new(layers.iter().map(tensor).collect())
}

/// A pass in the order of the tables fetches nothing in vain, the first one too. In the order of the names it fetches layers
/// that come later, and those of a turn only when they are asked for.
#[test]
fn the_first_pass_of_a_known_network_fetches_nothing_it_drops() {
    println!(
        "| network | on the card | streamed a pass | first pass, by name | with the table | misses | time, by name / with the table / later |"
    );
    for network in networks() {
        let by_name = network.by_name();
        let known = layout(&by_name);
        assert!(matches!(known.order(), OrderSource::FamilyTable { .. }), "{}", network.name);
        let run: Vec<String> = known.layers().iter().map(|layer| layer.name.clone()).collect();
        let names: Vec<&str> = by_name.iter().map(|(name, _)| name.as_str()).collect();
        let unknown = known.clone().in_order(&names).unwrap();
        for (stays, share) in [("nothing", "cpu,*"), ("half", "cuda:0,50%;cpu,50%")] {
            let (without, with) = (passes(&unknown, &run, share), passes(&known, &run, share));
            // Without compute ahead of it, the first layer of all is missed.
            assert!(
                with[0].misses <= 1 && without[0].misses >= with[0].misses,
                "{} {with:?} {without:?}",
                network.name
            );
            assert!(with[0].bytes < without[0].bytes, "{} {with:?} {without:?}", network.name);
            assert!(with[0].time < without[0].time, "{} {with:?} {without:?}", network.name);
            // The first pass also fetches the layers with which the second begins, and the second those of the third.
            assert_eq!(with[1].bytes, with[2].bytes, "{} {with:?}", network.name);
            let largest = known.layers().iter().map(|layer| layer.bytes).max().unwrap();
            assert!(with[0].bytes <= with[2].bytes + 2 * largest, "{} {with:?}", network.name);
            let gb = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
            let more = (without[0].bytes as f64 / with[0].bytes as f64 - 1.0) * 100.0;
            let seconds = |pass: Pass| format!("{:.3}", pass.time.as_secs_f64());
            println!(
                "| {} | {stays} | {} | {} (+{more:.1} %) | {} | {} / {} | {} / {} / {} s |",
                network.name,
                gb(with[2].bytes),
                gb(without[0].bytes),
                gb(with[0].bytes),
                without[0].misses,
                with[0].misses,
                seconds(without[0]),
                seconds(with[0]),
                seconds(with[2]),
            );
        }
    }
}
