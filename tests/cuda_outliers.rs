//! Models of which one table is larger than all else, on CUDA devices over the stand-in driver: streamed through slots of
//! two sizes, and looked up where it lives on a card that is smaller than it.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::sync::Arc;

use card::driver;
use cuda_standin::{Config, MemoryMode};
use support::outliers::{bert, many_tokens};
use support::{CPU, DEADLINE, Subject, comes_back};
use tensor_offload::backend::{Backend, Cuda, Host, MemoryKind, Transfer};
use tensor_offload::{ByteSize, DType, Loader, Plan, Planner, Registry, Streamer, Use};

fn registry() -> Registry {
    let cuda = Cuda::new().context_size(ByteSize(0));
    Registry::new([Arc::new(cuda) as Arc<dyn Backend>, Arc::new(Host::new())])
}

fn check_pass(streamer: &mut Streamer, subject: &Subject) {
    for layer in streamer.model().layout().layer_ids() {
        let guard = streamer.layer(layer).unwrap();
        for view in guard.tensors() {
            let mut bytes = vec![0; view.info().bytes as usize];
            guard.read(&view.info().name, &mut bytes).unwrap();
            assert!(bytes == subject.bytes_of(&view.info().name), "wrong bytes of {}", view.info().name);
        }
    }
}

fn check_rows(devices: &Registry, streamer: &mut Streamer, subject: &Subject, table: &str, rows: &[u64]) {
    let sent = streamer.send_rows(table, rows).unwrap();
    let each = sent.bytes() / rows.len();
    let host = devices.device(CPU).unwrap().alloc(sent.bytes(), MemoryKind::Pinned).unwrap();
    let flight = streamer.compute().copy(Transfer::whole(&sent, host).unwrap()).unwrap();
    let landed = flight.wait(DEADLINE).unwrap().freeze();
    let bytes = landed.host(DEADLINE).unwrap().unwrap();
    for (bytes, &row) in bytes.chunks_exact(each).zip(rows) {
        assert!(*bytes == subject.bytes_of(table)[row as usize * each..][..each], "row {row} of {table}");
    }
}

#[derive(Clone, Copy)]
struct Options {
    allocation: &'static str,
    /// The most that is pinned; the rest needs staging.
    pinned: u64,
    /// Whether tables are looked up where they are, and heads used there.
    in_place: bool,
}

impl Options {
    fn apply(self, planner: Planner<'_>) -> Planner<'_> {
        let planner = planner.pinned_cap(Some(ByteSize(self.pinned)));
        match self.in_place {
            true => planner.gather_embeddings(true).in_place("lm_head").reserve(ByteSize(1 << 20)),
            false => planner,
        }
    }
}

fn streams(config: &Config, subject: &Subject, tables: &[&str], options: Options, check: fn(&Plan)) {
    let cuda = driver(config);
    let devices = registry();
    let plan = options.apply(subject.planner(devices.machine(), options.allocation)).plan().unwrap();
    check(&plan);
    let loader = Loader::new(&devices).workers(2).deadline(DEADLINE);
    let model = Arc::new(loader.load(&subject.weights, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    for turn in 0..3 {
        for table in tables {
            check_rows(&devices, &mut streamer, subject, table, &[7, 3_999, turn, turn + 1, 7]);
        }
        check_pass(&mut streamer, subject);
    }
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    cuda.assert_clean();
}

fn configs(card: u64) -> [Config; 2] {
    let config = || Config::with_devices(&[card]);
    [config().memory(MemoryMode::Quarantine).late_micros(10_000_000), config().memory(MemoryMode::Reuse).seed(7)]
}

#[test]
fn cuda_tables_larger_than_the_card_are_looked_up_where_they_live() {
    // 10 MB, on a card of 8; and a Llama's embedding, whose head of 9 MB is used in place, too.
    let bert = Subject::plain(&bert(DType::F32, 40_000, 64, 6, 256), 80);
    let llama = Subject::plain(&many_tokens(70_000, 64, 6), 81);
    for config in configs(8 << 20) {
        for pinned in [u64::MAX, 0] {
            let in_place = |plan: &Plan| {
                let largest = plan.assignments().iter().max_by_key(|a| a.bytes).unwrap();
                assert!(largest.usage == Use::InPlace && largest.bytes > 8 << 20, "{plan}");
            };
            // A card that is named may hold all of it.
            let allocations = if card::named() { &["cuda:0,400kb;cpu,*"][..] } else { &["cuda:0,400kb;cpu,*", "auto"] };
            for &allocation in allocations {
                let options = Options { allocation, pinned, in_place: true };
                streams(&config, &bert, &["embeddings.word_embeddings.weight"], options, in_place);
                let tables = ["model.embed_tokens.weight", "lm_head.weight"];
                streams(&config, &llama, &tables, options, in_place);
            }
        }
    }
}

#[test]
fn cuda_layers_of_two_sizes_arrive_in_slots_of_two_sizes() {
    let subject = Subject::plain(&bert(DType::F32, 40_000, 64, 6, 256), 82);
    for config in configs(20 << 20) {
        for pinned in [u64::MAX, 0] {
            let options = Options { allocation: "cpu,*", pinned, in_place: false };
            let two = |plan: &Plan| assert_eq!((plan.slots().count, plan.slots().large), (3, 1), "{plan}");
            streams(&config, &subject, &["embeddings.word_embeddings.weight"], options, two);
        }
    }
}
