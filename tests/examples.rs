//! The examples as a user runs them: exit status, one line for an error, JSON, and files that are whole or not there.

#[path = "support/examples.rs"]
mod run;

use std::fs;
use std::path::Path;
#[cfg(unix)]
use std::process::Command;

use run::{fails, json_of, works};
#[cfg(unix)]
use run::{folder, text};
use serde_json::Value;
use tempfile::TempDir;
use tensor_offload::{Checkpoint, DType, Error, Registry};

/// A model of about 5 MiB in three shards, and a LoRA for it.
struct Model {
    folder: TempDir,
}

impl Model {
    fn new() -> Model {
        let model = Model { folder: tempfile::tempdir().unwrap() };
        let (path, lora) = (model.path("model"), model.path("lora.safetensors"));
        let layers = ["--layers", "12", "--hidden", "128", "--shards", "3"];
        works("generate", &[&[path.as_str(), "--lora", &lora, "--rank", "4"], &layers[..]].concat());
        model
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}

#[test]
fn errors_are_one_line_and_status_2() {
    let model = Model::new();
    let path = model.path("model");
    let missing = model.path("nothing");
    let device = ["--device", "cuda:0=64mb", "--device", "cpu=64mb"];
    for (example, args, kind) in [
        ("offload", vec![missing.as_str()], "Io"),
        ("merge", vec![&missing, "--out", &missing], "Io"),
        ("inspect", vec![&missing], "Io"),
        ("plan", vec![&missing, "--alloc", "cpu,*"], "Io"),
        (
            "offload",
            [&[path.as_str(), "--alloc", "cuda:0,1mb;cpu,*;"], &device[..], &["--depth", "x"]].concat(),
            "Usage",
        ),
        ("offload", [&[path.as_str(), "--alloc", "cuda:0,2,5gb;cpu,*"], &device[..]].concat(), "Syntax"),
        ("offload", [&[path.as_str(), "--alloc", "cuda:7,1mb;cpu,*"], &device[..]].concat(), "UnknownDevice"),
        ("plan", [&[path.as_str(), "--alloc", "cuda:0,1mb;cpu,50%"], &device[..]].concat(), "MixedModes"),
        ("plan", vec![&path, "--alloc", "cuda:0,*", "--device", "cuda:0=1mb", "--device", "cpu=64mb"], "DoesNotFit"),
        // A kind of its own in the library, which prints as it did before it was one.
        ("plan", vec!["--blocks", "2x8000000tb", "--alloc", "cpu,*", "--device", "cpu=16000000tb"], "Invalid"),
        ("offload", vec!["--no-such-option"], "Usage"),
        ("merge", vec![], "Usage"),
        ("plan", vec!["--blocks", "3x1mb"], "Usage"),
        ("generate", vec![], "Usage"),
        ("inspect", vec![], "Usage"),
    ] {
        let (found, message) = fails(example, &args);
        assert_eq!(found, kind, "{example} {args:?}: {message}");
    }
    assert!(fails("offload", &[&missing]).1.contains(&missing));
}

/// `offload --alloc "mps,..."` said that there is a cuda:0: the card that the example describes where there is none.
#[test]
fn errors_name_the_devices_of_this_machine_and_no_card_that_was_made_up() {
    let here =
        Error::UnknownDevice { device: "mps".parse().unwrap(), known: Registry::system().machine().ids().collect() };
    for args in [["--alloc", "mps,60kb;cpu,*"], ["--compute", "mps"]] {
        assert_eq!(fails("offload", &args), ("UnknownDevice".to_owned(), here.to_string()), "{args:?}");
    }
}

#[test]
fn offload_without_arguments_verifies_itself() {
    let report = json_of("offload", &["--steps", "1", "--compute-ms", "1"]);
    assert_eq!(report["unload"]["unloaded"][0]["key"], "model");
    assert_eq!(report["unload"]["deferred"].as_array().unwrap().len(), 0);
    assert!(report["stream"]["layers"].as_u64() > Some(4));
    let shown = works("offload", &["--steps", "1", "--compute-ms", "1"]);
    let hash = report["sha256"].as_str().unwrap();
    assert!(shown.contains(&format!("every tensor matches a merge on the host: sha256 {hash}")));
}

/// A model several times larger than its compute device, with and without an adapter, at several depths and placements:
/// the same bytes, and no device beyond its memory.
#[test]
fn offload_of_a_model_larger_than_its_device() {
    let model = Model::new();
    let (path, lora) = (model.path("model"), model.path("lora.safetensors:0.5"));
    let mut hashes = Vec::new();
    for (allocation, depth) in [("cuda:0,300kb;cpu,*", "1"), ("cuda:0,5%;xpu:0,40%;disk,20%;cpu,35%", "0")] {
        let options = [&path, "--adapter", &lora, "--alloc", allocation, "--depth", depth, "--steps", "1"];
        let devices = ["cuda:0=1200kb,link=5", "xpu:0=8mb,link=5", "disk=64mb", "cpu=64mb"];
        let devices = devices.iter().flat_map(|device| ["--device", device]);
        let args: Vec<&str> = options.into_iter().chain(devices).chain(["--compute-ms", "1"]).collect();
        let report = json_of("offload", &args);
        let total = report["load"]["bytes"].as_u64().unwrap();
        assert!(total > 3 * (1200 << 10), "{total}");
        for device in report["devices"].as_array().unwrap() {
            assert!(device["peak"].as_u64() <= device["limit"].as_u64(), "{device}");
        }
        let card = report["devices"].as_array().unwrap().iter().find(|device| device["id"] == "cuda:0").unwrap();
        assert_eq!(card["limit"], 1200 << 10);
        assert!(card["peak"].as_u64() > Some(100_000), "{card}");
        hashes.push(report["sha256"].clone());
    }
    assert_eq!(hashes[0], hashes[1]);
}

/// A span of a trace: its name, the thread that began it, when it began and ended, in microseconds.
type Span = (String, u64, f64, f64);

/// Every begin of a span with its end.
fn spans(trace: &Value) -> Vec<Span> {
    let (mut open, mut spans): (Vec<(u64, Span)>, Vec<Span>) = (Vec::new(), Vec::new());
    for event in trace.as_array().expect("a list of events") {
        let (name, thread) = (event["name"].as_str().unwrap_or(""), event["tid"].as_u64().unwrap_or(0));
        let (id, time) = (event["id"].as_u64().unwrap_or(0), event["ts"].as_f64().unwrap_or(0.0));
        match event["ph"].as_str() {
            Some("b") => open.push((id, (name.to_owned(), thread, time, time))),
            Some("e") => {
                let begun = open.iter().rposition(|(of, span)| *of == id && span.0 == name).expect("a begin");
                let (_, (name, thread, begin, _)) = open.remove(begun);
                spans.push((name, thread, begin, time));
            }
            _ => {}
        }
    }
    assert_eq!(open.len(), 0, "spans that do not end");
    spans
}

#[test]
fn a_trace_shows_copies_beside_the_compute() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json").display().to_string();
    json_of("offload", &["--trace", &file, "--steps", "2", "--compute-ms", "60"]);
    let spans = spans(&serde_json::from_slice(&fs::read(&file).unwrap()).expect("a trace in JSON"));
    let named = |name: &'static str| spans.iter().filter(move |span| span.0 == name);
    assert!(named("compute").count() >= 10, "two steps of five layers");
    assert!(named("wait").count() > 0);
    let beside = |copy: &&Span| named("compute").any(|c| c.1 != copy.1 && c.2 < copy.3 && copy.2 < c.3);
    assert!(named("copy").filter(beside).count() >= 2, "{spans:?}");
    let nowhere = folder.path().join("no/trace.json").display().to_string();
    assert_eq!(fails("offload", &["--trace", &nowhere]).0, "Io");
}

#[test]
fn whatif_tells_what_a_change_brings() {
    let model = ["--blocks", "40x500mb", "--alloc", "cuda:0,8gb;cpu,*", "--compute-ms", "500"];
    let devices = ["--device", "cuda:0=12gb,link=12", "--device", "cpu=64gb"];
    let report = json_of("whatif", &[&model[..], &devices].concat());
    let case = |begins: &str| {
        let cases = report["cases"].as_array().unwrap();
        let case = cases.iter().find(|case| case["case"].as_str().unwrap().starts_with(begins));
        case.unwrap_or_else(|| panic!("no case {begins}: {report}"))["replayed"].as_f64().unwrap()
    };
    let (now, compute) = (case("as it is"), 0.5);
    assert!((1.02..1.1).contains(&now), "12 GB over 12 GB/s: {now}");
    assert!((case("a slot twice as fast") / now - 0.5).abs() < 0.02);
    assert!((case("a second card") / now - 1.0).abs() < 0.02, "it shares the slot's link");
    assert!(case("the same, linked") < compute * 1.01, "nearly all streams over the link between the cards");
    assert!((case("no limit") / now - 1.0).abs() < 0.02);
    assert!((case("compressed to 0.675") / now - 0.675).abs() < 0.02);
    let beside = case("depth 0") - now;
    assert!((beside - compute * 24.0 / 40.0).abs() < 0.02, "24 of 40 layers wait, one after the other: {beside}");
    assert!(works("whatif", &[&model[..], &devices].concat()).contains("cuda:0 in"));
    assert_eq!(fails("whatif", &["--blocks", "2x1gb"]).0, "Usage");
}

/// 20 blocks of 1 GB, 2 of them on the card. Of the host's 20 GiB 16 may be pinned, which hold 17 blocks; the 18th passes
/// the host's memory at 10 GB/s once more on its way to a staging buffer.
#[test]
fn whatif_by_hand() {
    let case = |alloc: &str, begins: &str| {
        let model = ["--blocks", "20x1000000000b", "--alloc", alloc, "--compute-ms", "500", "--nvlink", "50"];
        let devices = ["--device", "cuda:0=8gib,link=20", "--device", "cpu=20gib,link=10"];
        let report = json_of("whatif", &[&model[..], &devices].concat());
        let cases = report["cases"].as_array().unwrap();
        let case = cases.iter().find(|case| case["case"].as_str().unwrap().starts_with(begins));
        let case = case.unwrap_or_else(|| panic!("no case {begins}: {report}")).clone();
        let pass = &case["estimate"]["pass"];
        let seconds = pass["secs"].as_u64().unwrap() as f64 + pass["nanos"].as_u64().unwrap() as f64 / 1e9;
        (seconds, case)
    };
    let seconds = |begins: &str| case("cuda:0,2000000000b;cpu,*", begins).0;
    assert_eq!(seconds("as it is"), 1.9, "17 + 2 GB out of the host's memory");
    assert_eq!(seconds("no limit to pinned memory"), 1.8, "18 GB once");
    assert_eq!(seconds("a slot twice as fast"), 1.9, "the slot did not bound it");
    // The second card holds 8 blocks in its 8 GiB; both directions of the host's memory and its link are free for them.
    assert_eq!(seconds("a second card"), 1.0, "10 GB at 10 GB/s, all pinned");
    assert_eq!(seconds("the same, linked"), 1.0);
    // 8 GiB less 3 slots of 1 GB hold 5 blocks: 15 GB come, all pinned.
    let (auto, found) = case("cuda:0,2000000000b;cpu,*", "auto");
    assert_eq!((auto, found["streamed"].as_u64()), (1.5, Some(15_000_000_000)));
    assert_eq!(
        case("auto", "as it is"),
        (
            1.5,
            Value::Object({
                let mut same = found.as_object().unwrap().clone();
                same["case"] = "as it is".into();
                same
            })
        )
    );
    let (with_a_second, found) = case("auto", "a second card");
    assert!(with_a_second <= 1.0, "{found}");
    assert_eq!(found["devices"].as_array().unwrap().len(), 3, "{found}");
}

#[test]
fn plan_and_offload_take_patterns() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model").into_os_string().into_string().unwrap();
    works("generate", &[&path, "--size", "1mb", "--layers", "3", "--hidden", "64"]);
    let path = path.as_str();
    let device = ["--device", "cuda:0=8mb", "--device", "cpu=64mb", "--alloc", "cuda:0,40kb;cpu,*", "--depth", "1"];
    let options = ["--keep", "model.layers.1.mlp.down_proj", "--in-place", "*.0.mlp.*", "--gather-embeddings"];
    let args = [&[path], &device[..], &options].concat();
    let uses = |plan: &Value| -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        plan["assignments"].as_array().unwrap().iter().map(|a| (text(&a["module"]), text(&a["use"]))).collect()
    };
    let planned = uses(&json_of("plan", &args));
    for (module, usage) in [
        ("model.embed_tokens", "in_place"),
        ("model.layers.0.mlp.up_proj", "in_place"),
        ("model.layers.1.mlp.down_proj", "resident"),
        ("model.layers.2.mlp.down_proj", "streamed"),
    ] {
        assert!(planned.contains(&(module.to_owned(), usage.to_owned())), "{module}: {planned:?}");
    }
    let offloaded = json_of("offload", &[&args[..], &["--steps", "1", "--compute-ms", "1"]].concat());
    assert_eq!(uses(&offloaded["plan"]), planned);
}

#[test]
fn plan_and_offload_take_auto() {
    let devices = ["--device", "cuda:0=8gib,link=20", "--device", "cpu=64gib", "--device", "disk=1tib,link=2"];
    let model = ["--blocks", "20x1gib", "--alloc", "AUTO, reserve=1gib", "--compute-ms", "900"];
    let plan = json_of("plan", &[&model[..], &devices].concat());
    assert_eq!(
        (plan["mode"].as_str(), plan["explanation"]["allocation"].as_str()),
        (Some("auto"), Some("cuda:0,4gb;cpu,*"))
    );
    assert_eq!(plan["explanation"]["devices"][0]["bytes"], 4u64 << 30);
    let shown = works("plan", &[&model[..], &devices].concat());
    assert!(shown.contains("auto: cuda:0,4gb;cpu,*; a pass takes 0.9"), "{shown}");
    assert!(shown.contains("beside 3 slots of 1.00 GiB and 1.00 GiB in reserve"), "{shown}");
    // The quotas that were found give the same placement.
    let same = ["--blocks", "20x1gib", "--alloc", "cuda:0,4gb;cpu,*", "--order", "uniform"];
    let same = json_of("plan", &[&same[..], &devices].concat());
    assert_eq!(same["assignments"], plan["assignments"]);
    assert_eq!(fails("plan", &["--blocks", "1x1gb", "--alloc", "auto", "--compute-ms", "-1"]).0, "Usage");

    let (model, steps) = (Model::new(), ["--steps", "1", "--compute-ms", "1"]);
    let path = model.path("model");
    let small = ["--device", "cuda:0=1200kb,link=5", "--device", "cuda:1=1mb,link=5", "--device", "cpu=64mb"];
    let report = json_of("offload", &[&[path.as_str(), "--alloc", "auto"], &steps[..], &small].concat());
    assert_eq!(report["plan"]["mode"], "auto");
    let hash =
        json_of("offload", &[&[path.as_str(), "--alloc", "cpu,*"], &steps[..], &small].concat())["sha256"].clone();
    assert_eq!(report["sha256"], hash);
}

const TABLE: &str = "# A comment.
model,model_gb,offloaded_gb,compute_s,passes,slow_cpu@2,fast_card@50.8

small,1.2,0.3,0.2,1,0.35,
small,1,1.007,0.2,2, 1.2 ,0.3
none,3,0,0.5,1,,
";

#[test]
fn replay_is_at_the_floor_of_every_cell() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table.csv").display().to_string();
    fs::write(&file, TABLE).unwrap();
    let report = json_of("replay", &["--csv", &file, "--layers", "31"]);
    let cells = report["cells"].as_array().unwrap();
    let floors = [0.2, 0.2, 1.007, 0.2, 0.5, 0.5];
    assert_eq!(cells.len(), floors.len());
    for (cell, floor) in cells.iter().zip(floors) {
        assert!((cell["floor"].as_f64().unwrap() - floor).abs() < 1e-9, "{cell}");
        let ratio = cell["seconds"].as_f64().unwrap() / floor;
        assert!((0.999..1.005).contains(&ratio), "{cell}");
    }
    assert_eq!((&cells[0]["link"], &cells[0]["published"]), (&Value::from("slow_cpu@2"), &Value::from(0.35)));
    assert_eq!((&cells[1]["published"], &cells[2]["offloaded_gb"]), (&Value::Null, &Value::from(1.007)));
    assert!(works("replay", &["--csv", &file]).contains("6 cells, at most 1.00"));
    // Nothing ahead: compute and transfers one after the other.
    let report = json_of("replay", &["--csv", &file, "--depth", "0", "--order", "sequential"]);
    let seconds = report["cells"][2]["seconds"].as_f64().unwrap();
    assert!((seconds - 1.207).abs() < 0.001, "{seconds}");
}

#[test]
fn replay_names_the_place_of_what_it_cannot_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table.csv").display().to_string();
    for (wrong, right, place) in [
        ("model,size", "model,model_gb", "line 2, column 2: `size` in place of `model_gb`"),
        ("slow_cpu@fast", "slow_cpu@2", "line 2, column 6: `slow_cpu@fast` is not LINK@GB/s"),
        ("small,1.2,many", "small,1.2,0.3", "line 4, column offloaded_gb: `many` is not"),
        ("0.2,1.5,", "0.2,2,", "line 5, column passes: `1.5` is not"),
        ("-1.2", " 1.2", "line 5, column slow_cpu@2: `-1.2` is not"),
        ("none,3,0,0.5,1,\n", "none,3,0,0.5,1,,\n", "line 6, column fast_card@50.8: the line has 6 cells, not 7"),
        ("nan", "0.35", "line 4, column slow_cpu@2: `nan` is not"),
    ] {
        fs::write(&file, TABLE.replacen(right, wrong, 1)).unwrap();
        let (kind, message) = fails("replay", &["--csv", &file]);
        assert!(kind == "Invalid" && message.contains(place), "{message}");
    }
    fs::write(&file, "# nothing").unwrap();
    fails("replay", &["--csv", &file]);
    assert_eq!(fails("replay", &["--csv", &format!("{file}.none")]).0, "Io");
}

#[test]
fn merge_is_the_same_wherever_the_model_is_placed() {
    let model = Model::new();
    let (path, lora) = (model.path("model"), model.path("lora.safetensors"));
    let merge = |name: &str, more: &[&str]| {
        let out = model.path(name);
        works("merge", &[&[path.as_str(), "--adapter", &lora, "--out", &out], more].concat());
        fs::read(out).unwrap()
    };
    let devices = ["--device", "cuda:0=4mb", "--device", "cuda:1=4mb", "--device", "cpu=64mb", "--device", "disk=64mb"];
    let plain = merge("plain.safetensors", &[]);
    let placed = ["--alloc", "cuda:0,10%;cuda:1,30%;disk,20%;cpu,40%", "--order", "sequential"];
    assert!(plain == merge("placed.safetensors", &[&placed[..], &devices].concat()), "the placement changes bytes");
    assert!(plain == merge("host.safetensors", &["--alloc", "cpu,*"]), "the host's own memory changes bytes");
    let unmerged = model.path("copy.safetensors");
    works("merge", &[&path, "--out", &unmerged]);
    assert!(plain != fs::read(unmerged).unwrap(), "the adapter changes something");
}

#[test]
fn merge_compresses_and_everything_reads_the_same_tensors() {
    let model = Model::new();
    let (path, lora) = (model.path("model"), model.path("lora.safetensors"));
    let [plain, compressed, again] =
        ["plain", "compressed", "again"].map(|name| model.path(&format!("{name}.safetensors")));
    works("merge", &[&path, "--adapter", &lora, "--out", &plain]);
    let report = json_of("merge", &[&path, "--adapter", &lora, "--compress", "--out", &compressed]);
    let bytes = |key: &str| report["compressed"][key].as_u64().unwrap();
    assert!(bytes("compressed") > 0 && bytes("to") * 10 < bytes("from") * 8, "{report}");
    let size = |path: &str| fs::metadata(path).unwrap().len();
    assert!(size(&compressed) < size(&plain) - (bytes("from") - bytes("to")) + (64 << 10));
    let tensors = |path: &str| json_of("inspect", &[path, "--hash"])["tensors"].as_array().unwrap().clone();
    let (of_plain, mut of_compressed) = (tensors(&plain), tensors(&compressed));
    let stored: u64 = of_compressed.iter().filter_map(|tensor| tensor["compressed"].as_u64()).sum();
    assert_eq!(stored, bytes("to"));
    of_compressed.iter_mut().for_each(|tensor| tensor["compressed"] = serde_json::Value::Null);
    assert_eq!(of_compressed, of_plain);
    let devices =
        ["--alloc", "cuda:0,300kb;cpu,*", "--device", "cuda:0=4mb", "--device", "cpu=64mb", "--compute-ms", "0"];
    let steps = |path: &str, more: &[&str]| {
        let report = json_of("offload", &[&[path], &devices[..], more].concat());
        let steps = report["steps"].as_array().unwrap().iter().map(|step| step["bytes"].as_u64().unwrap());
        (report["sha256"].clone(), steps.collect::<Vec<_>>())
    };
    assert_eq!(steps(&compressed, &[]), steps(&plain, &[]));
    let ((hash, whole), (same, less)) = (steps(&compressed, &[]), steps(&compressed, &["--compress"]));
    assert!(hash == same && whole.len() == less.len());
    assert!(whole.iter().zip(&less).all(|(whole, less)| less * 10 < whole * 8), "{less:?} of {whole:?}");
    let told = works("offload", &[&[compressed.as_str(), "--compress"], &devices[..]].concat());
    assert!(told.contains("kept compressed in") && told.contains("saved by compression"), "{told}");
    // What the file has plain, or an adapter changes, is compressed by the load.
    for (path, adapter) in [(&plain, &[][..]), (&path, &["--adapter", &lora])] {
        let (same, made) = steps(path, &[&["--compress"], adapter].concat());
        assert_eq!((same, &made), (hash.clone(), &less));
    }
    // What lives on the card may be kept so, too: all of the model where there is not enough room for it as it is.
    let all = ["--alloc", "cuda:0,*", "--device", "cuda:0=4800kb", "--device", "cpu=64mb", "--compute-ms", "0"];
    fails("offload", &[&[compressed.as_str(), "--compress"], &all[..]].concat());
    for path in [&compressed, &plain] {
        let report = json_of("offload", &[&[path.as_str(), "--compress-resident"], &all[..]].concat());
        assert_eq!(report["sha256"], hash);
        let steps = report["steps"].as_array().unwrap();
        assert!(steps.iter().all(|step| step["bytes"] == 0), "{report}");
        assert!(report["load"]["saved"].as_u64().unwrap() > 0);
    }
    let told = works("plan", &[&[plain.as_str(), "--compress"], &devices[..6]].concat());
    assert!(told.contains("kept compressed"), "{told}");
    works("merge", &[&compressed, "--out", &again]);
    assert!(fs::read(&again).unwrap() == fs::read(&plain).unwrap());
    let (_, message) = fails("merge", &[&compressed, "--compress", "--out", &model.path("model.gguf")]);
    assert!(message.contains("safetensors"), "{message}");
}

#[test]
fn merge_and_plan_cast() {
    let model = Model::new();
    let (base, out) = (model.path("model"), model.path("cast.safetensors"));
    let own = Checkpoint::open(&base).unwrap();
    let lora = format!("{}:0.8", model.path("lora.safetensors"));
    let casts = ["--cast", "f32", "--cast", "*.mlp.*=F16"];
    let merge = |more: &[&str]| {
        works("merge", &[&[base.as_str(), "--adapter", &lora, "--out", &out], &casts[..], more].concat());
        let merged = Checkpoint::open(&out).unwrap();
        for (tensor, before) in merged.layout().tensors().iter().zip(own.layout().tensors()) {
            let wanted = if tensor.name.contains(".mlp.") { DType::F16 } else { DType::F32 };
            assert_eq!((&tensor.name, tensor.dtype, &tensor.shape), (&before.name, wanted, &before.shape));
        }
        (merged.layout().bytes(), fs::read(&out).unwrap())
    };
    let (bytes, alone) = merge(&[]);
    let placed = ["--alloc", "cuda:0,1mb;cpu,*", "--device", "cuda:0=64mb", "--device", "cpu=64mb"];
    assert!(merge(&placed) == (bytes, alone), "wherever the model is placed");
    let plan = json_of("plan", &[&[base.as_str()], &casts[..], &placed].concat());
    let planned: u64 = plan["assignments"].as_array().unwrap().iter().map(|a| a["bytes"].as_u64().unwrap()).sum();
    assert_eq!(planned, bytes);
    let device = ["--alloc", "cpu,*", "--device", "cpu=64mb"];
    for (cast, part) in [("mlp=F99", "no type"), ("nothing=F16", "`nothing`"), ("I8", "cast to F32")] {
        let (_, message) = fails("plan", &[&[base.as_str(), "--cast", cast], &device[..]].concat());
        assert!(message.contains(part), "{message}");
    }
    let (_, message) = fails("plan", &[&["--blocks", "2x1mb", "--cast", "F16"], &device[..]].concat());
    assert!(message.contains("--blocks"), "{message}");
}

#[test]
fn merge_replaces_a_file_when_the_new_one_is_whole() {
    let model = Model::new();
    let (path, lora) = (model.path("model"), model.path("lora.safetensors"));
    let results = TempDir::new().unwrap();
    let out = results.path().join("merged.safetensors");
    let target = out.display().to_string();
    fs::write(&out, "what was there").unwrap();
    // A shard that is cut short, an adapter of another model, a placement without room.
    let shard = Path::new(&path).join("model-00003-of-00003.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 100]).unwrap();
    fails("merge", &[&path, "--adapter", &lora, "--out", &target]);
    fs::write(&shard, &whole).unwrap();
    let other = model.path("other.safetensors");
    let adapter = model.path("other-lora.safetensors");
    works("generate", &[&other, "--size", "1mb", "--layers", "1", "--hidden", "64", "--lora", &adapter]);
    fails("merge", &[&path, "--adapter", &adapter, "--out", &target]);
    let tight = ["--alloc", "cuda:0,*", "--device", "cuda:0=1mb", "--device", "cpu=64mb"];
    fails("merge", &[&[path.as_str(), "--adapter", &lora, "--out", &target], &tight[..]].concat());
    #[cfg(unix)]
    fails_half_way(&[&path, "--adapter", &lora, "--out", &target]);
    assert_eq!(fs::read(&out).unwrap(), b"what was there");
    works("merge", &[&path, "--adapter", &lora, "--out", &target]);
    assert!(fs::read(&out).unwrap().len() > 1 << 20);
    let names: Vec<_> = fs::read_dir(&results).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["merged.safetensors"], "nothing else is left");
}

/// Runs merge where no file may grow beyond half of what it writes.
#[cfg(unix)]
fn fails_half_way(args: &[&str]) {
    // `ulimit -f` counts blocks of 512 bytes in POSIX and of 1,024 in some shells.
    let script = "ulimit -f 2000; exec \"$0\" \"$@\"";
    let output = Command::new("sh").args(["-c", script]).arg(folder().join("merge")).args(args).output().unwrap();
    let line = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.starts_with("error: cannot write") && line.trim_end().lines().count() == 1, "{line}");
}
