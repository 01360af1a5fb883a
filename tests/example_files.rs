//! The examples with files as people have them, under the limits that systems set, and with options for adapters.

#[path = "support/examples.rs"]
mod run;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
#[cfg(unix)]
use std::process::{Command, Output};

use run::{fails, json_of, works};
#[cfg(unix)]
use run::{folder, text};
use serde_json::Value;
use tempfile::TempDir;
use tensor_offload::checkpoint::{Checkpoint, TensorSpec, write_safetensors};
use tensor_offload::{DType, TensorId};

/// A model and a LoRA for it, by their paths.
struct Model {
    home: TempDir,
    model: PathBuf,
    lora: PathBuf,
}

impl Model {
    fn new(options: &[&str]) -> Model {
        let home = tempfile::tempdir().unwrap();
        let (model, lora) = (home.path().join("model"), home.path().join("lora.safetensors"));
        let paths = [model.as_os_str(), "--rank".as_ref(), "2".as_ref(), "--lora".as_ref(), lora.as_os_str()];
        works("generate", &paths.into_iter().chain(options.iter().map(AsRef::as_ref)).collect::<Vec<_>>());
        Model { home, model, lora }
    }

    fn small() -> Model {
        Model::new(&["--size", "1mb", "--layers", "2", "--hidden", "64"])
    }

    fn path(&self, name: &str) -> String {
        self.home.path().join(name).display().to_string()
    }
}

fn data(path: &str) -> String {
    format!("{}/tests/data/{path}", env!("CARGO_MANIFEST_DIR"))
}

/// Arguments of any kind of text.
fn args<const N: usize>(args: [&dyn AsRef<std::ffi::OsStr>; N]) -> Vec<OsString> {
    args.iter().map(|arg| arg.as_ref().to_owned()).collect()
}

/// Runs an example under a limit that `ulimit` sets.
#[cfg(unix)]
fn limited(limit: &str, example: &str, args: &[OsString]) -> Output {
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    Command::new("sh").args(["-c", &script]).arg(folder().join(example)).args(args).output().unwrap()
}

#[cfg(unix)]
fn works_limited(limit: &str, example: &str, args: &[OsString]) -> Value {
    let output = limited(limit, example, &[args, &["--json".into()]].concat());
    assert!(output.status.success(), "{example}: {}{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON value")
}

/// Three hundred files, and a disk tier for nearly as many tensors, where a process may open few files.
#[cfg(unix)]
#[test]
fn hundreds_of_shards_need_few_open_files() {
    let model = Model::new(&["--layers", "34", "--hidden", "64", "--shards", "300"]);
    let files = fs::read_dir(&model.model).unwrap().count();
    assert!(files > 300, "{files}");
    let (model, lora) = (&model.model, &model.lora);
    let hashes = |report: &Value| -> Vec<Value> {
        report["tensors"].as_array().unwrap().iter().map(|tensor| tensor["sha256"].clone()).collect()
    };
    let whole = json_of("inspect", &args([model, &"--hash"]));
    let devices = args([&"--device", &"cuda:0=4mb", &"--device", &"cpu=64mb", &"--device", &"disk=64mb"]);
    let offload =
        args([model, &"--adapter", lora, &"--steps", &"1", &"--compute-ms", &"1", &"--alloc", &"cuda:0,99kb;disk,*"]);
    let offload = [offload, devices].concat();
    let plain = json_of("offload", &offload);
    assert!(
        plain["plan"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .any(|d| d["id"] == "disk" && d["modules"].as_u64() > Some(200))
    );
    for limit in ["-n 128", "-n 32"] {
        assert_eq!(hashes(&works_limited(limit, "inspect", &args([model, &"--hash"]))), hashes(&whole));
        assert_eq!(works_limited(limit, "offload", &offload)["sha256"], plain["sha256"], "{limit}");
        let out = model.with_extension("merged.safetensors");
        works_limited(limit, "merge", &args([model, &"--adapter", lora, &"--out", &out]));
        assert!(fs::metadata(out).unwrap().len() > 1 << 20);
    }
}

/// `ulimit -f` ends a process that writes more with a signal, if nobody looks ahead.
#[cfg(unix)]
#[test]
fn a_file_beyond_the_limit_of_the_process_is_an_error() {
    let model = Model::new(&["--layers", "24", "--hidden", "64"]);
    let results = tempfile::tempdir().unwrap();
    let out = results.path().join("out.safetensors");
    fs::write(&out, "what was there").unwrap();
    let output = limited("-f 1000", "merge", &args([&model.model, &"--adapter", &model.lora, &"--out", &out]));
    let line = text(&output.stderr);
    assert_eq!((output.status.code(), line.lines().count()), (Some(2), 1), "{line}");
    assert!(line.contains("cannot write") && line.contains("too large"), "{line}");
    assert_eq!(fs::read(&out).unwrap(), b"what was there");
    assert_eq!(fs::read_dir(&results).unwrap().count(), 1);
    // The disk tier takes several files instead.
    let devices = args([&"--device", &"cpu=64mb", &"--device", &"disk=64mb", &"--compute", &"cpu"]);
    let offload = args([&model.model, &"--steps", &"1", &"--compute-ms", &"1", &"--alloc", &"disk,*"]);
    let offload = [offload, devices].concat();
    assert_eq!(works_limited("-f 2000", "offload", &offload)["sha256"], json_of("offload", &offload)["sha256"]);
}

#[test]
fn what_a_killed_merge_left_is_removed_by_the_next() {
    let model = Model::small();
    let results = tempfile::tempdir().unwrap();
    fs::write(results.path().join(".tensor-offload-4194305-0.tmp"), "half of a model").unwrap();
    let out = results.path().join("out.safetensors");
    works("merge", &args([&model.model, &"--out", &out]));
    let names: Vec<_> = fs::read_dir(&results).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["out.safetensors"]);
}

#[cfg(target_os = "linux")]
#[test]
fn paths_need_not_be_unicode() {
    use std::os::unix::ffi::OsStrExt;
    let odd = |bytes: &[u8]| std::ffi::OsStr::from_bytes(bytes).to_owned();
    let small = Model::small();
    let home = small.home.path().join(odd(b"mod\xe8les"));
    fs::create_dir(&home).unwrap();
    let (model, lora, out) = (home.join("m"), home.join(odd(b"\xff.safetensors")), home.join(odd(b"out\xfe")));
    fs::rename(&small.model, &model).unwrap();
    fs::rename(&small.lora, &lora).unwrap();
    let mut strength = lora.clone().into_os_string();
    strength.push(":0.5");
    assert_eq!(json_of("inspect", &args([&model]))["layers"].as_array().unwrap().len(), 5);
    works("inspect", &args([&model, &"--tensors"]));
    let merged = json_of("merge", &args([&model, &"--adapter", &strength, &"--out", &out]));
    let named = merged["applied"][0]["adapter"].as_str().unwrap();
    assert!(named.ends_with("mod\u{fffd}les/\u{fffd}.safetensors"), "{named}");
    assert_eq!(merged["applied"][0]["strength"], 0.5);
    assert!(Checkpoint::open(&out).is_ok());
    works("merge", &args([&model, &"--adapter", &lora, &"--out", &out]));
    let device = ["--device", "cuda:0=8mb", "--device", "cpu=64mb"].map(OsString::from);
    json_of("plan", &[args([&model, &"--alloc", &"cuda:0,40kb;cpu,*"]), device.to_vec()].concat());
    let offload = args([&model, &"--adapter", &strength, &"--steps", &"1", &"--compute-ms", &"1"]);
    json_of("offload", &[offload, device.to_vec()].concat());
    let (fresh, own) = (home.join(odd(b"n\xefw")), home.join(odd(b"own\xfe")));
    let generated = json_of("generate", &args([&fresh, &"--size", &"1mb", &"--lora", &own]));
    assert!(generated["model"].as_str().unwrap().ends_with("n\u{fffd}w"), "{generated}");
    works("merge", &args([&fresh, &"--adapter", &own, &"--out", &out]));
    let missing = home.join("none");
    for (example, more) in
        [("inspect", args([])), ("merge", args([&"--out", &out])), ("plan", args([&"--alloc", &"cpu,*"]))]
    {
        assert_eq!(fails(example, &[args([&missing]), more].concat()).0, "Io", "{example}");
    }
    // An option that takes text: a line, and no panic.
    assert_eq!(fails("plan", &args([&model, &"--alloc", &odd(b"cpu\xff,*")])).0, "Usage");
}

#[test]
fn what_exists_is_a_path_before_it_is_a_path_with_a_strength() {
    let model = Model::small();
    let merge = |adapter: &str| {
        json_of("merge", &args([&model.model, &"--adapter", &model.path(adapter), &"--out", &model.path("out")]))
    };
    let used = |report: &Value| {
        (report["applied"][0]["adapter"].as_str().unwrap().to_owned(), report["applied"][0]["strength"].clone())
    };
    fs::copy(&model.lora, model.path("my")).unwrap();
    assert_eq!(used(&merge("my:0.5")), (model.path("my"), 0.5.into()));
    #[cfg(unix)]
    {
        fs::copy(&model.lora, model.path("my:0.5")).unwrap();
        assert_eq!(used(&merge("my:0.5")), (model.path("my:0.5"), 1.0.into()));
        assert_eq!(used(&merge("my:0.5:0.25")), (model.path("my:0.5"), 0.25.into()));
    }
    let wrong = |text: &str| fails("merge", &args([&model.model, &"--adapter", &model.path(text), &"--out", &"x"])).1;
    assert!(wrong("my:much").contains("`much` is no strength"));
    assert!(wrong("my:nan").contains("a strength of NaN"));
}

/// A safetensors file of f32 tensors, all of them 1 times their number.
fn tensors(path: &Path, tensors: &[(&str, &[u64], f32)]) {
    let specs: Vec<_> = tensors.iter().map(|(name, shape, _)| TensorSpec::new(*name, DType::F32, *shape)).collect();
    let none = Default::default();
    write_safetensors(path, &specs, &none, |tensor, out| {
        while out.left() > 0 {
            out.put(&tensors[tensor].2.to_le_bytes())?;
        }
        Ok(())
    })
    .unwrap();
}

fn values(path: &Path, name: &str) -> Vec<f32> {
    let model = Checkpoint::open(path).unwrap();
    let tensor: TensorId = model.find(name).unwrap();
    let mut bytes = vec![0; model.layout().tensor(tensor).unwrap().bytes as usize];
    model.read(tensor, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
}

/// A part of one module fits and another does not: nothing of that module is applied, and the rest is.
#[test]
fn a_misfit_is_listed_where_parts_may_be_left_out() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    let base: &[(&str, &[u64], f32)] =
        &[("blocks.0.a.weight", &[2, 2], 1.0), ("blocks.0.b.weight", &[4, 2], 1.0), ("blocks.0.b.bias", &[4], 1.0)];
    tensors(&at("base"), base);
    let adapter: &[(&str, &[u64], f32)] =
        &[("blocks.0.a.diff", &[2, 2], 0.5), ("blocks.0.b.diff", &[4, 3], 0.5), ("blocks.0.b.diff_b", &[4], 0.5)];
    tensors(&at("adapter"), adapter);
    let merge = args([&at("base"), &"--adapter", &at("adapter"), &"--out", &at("out")]);
    let (kind, message) = fails("merge", &merge);
    assert!(kind == "Adapter" && message.contains("[4, 3]"), "{message}");
    let partial = [merge, args([&"--allow-partial"])].concat();
    let report = json_of("merge", &partial);
    assert_eq!(
        (report["applied"].as_array().unwrap().len(), &report["unmatched"][0]["module"]),
        (1, &"blocks.0.b".into())
    );
    let why = report["unmatched"][0]["why"].as_str().unwrap();
    assert!(why.contains("[4, 3]") && why.contains("[4, 2]"), "{why}");
    assert_eq!(report["unmatched"][0]["keys"].as_array().unwrap().len(), 2);
    assert_eq!(values(&at("out"), "blocks.0.a.weight"), [1.5; 4]);
    assert_eq!(values(&at("out"), "blocks.0.b.weight"), [1.0; 8]);
    assert_eq!(values(&at("out"), "blocks.0.b.bias"), [1.0; 4]);
    assert!(works("merge", &partial).contains("unmatched: blocks.0.b in"));
    // An adapter of which nothing fits is none for this model.
    tensors(&at("adapter"), &adapter[1..]);
    assert_eq!(fails("merge", &partial).0, "Adapter");
}

#[test]
fn names_components_and_rows_of_an_adapter_can_be_told() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    tensors(&at("base"), &[("blocks.0.a.weight", &[2, 2], 1.0), ("blocks.1.a.weight", &[2, 2], 1.0)]);
    let adapter: &[(&str, &[u64], f32)] =
        &[("enc_0_x.diff", &[2, 2], 0.5), ("enc_1_x.diff", &[2, 2], 1.0), ("lora_te1_z.diff", &[2, 2], 9.0)];
    tensors(&at("adapter"), adapter);
    let merge = args([&at("base"), &"--adapter", &at("adapter"), &"--out", &at("out")]);
    let with = |more: &[&str]| [merge.clone(), more.iter().map(OsString::from).collect()].concat();
    assert_eq!(fails("merge", &with(&[])).0, "Adapter");
    assert_eq!(fails("merge", &with(&["--rename", "enc_{}_x=blocks.{}.a"])).0, "Adapter", "one is left");
    let report = json_of("merge", &with(&["--rename", "enc_{}_x=blocks.{}.a", "--only", "enc_"]));
    assert_eq!((report["applied"].as_array().unwrap().len(), report["skipped"].as_array().unwrap().len()), (2, 1));
    assert_eq!(values(&at("out"), "blocks.1.a.weight"), [2.0; 4]);
    for wrong in [["--rename", "enc"], ["--rename", "a_{}=b"], ["--rotary-rows", "many"], ["--rotary-rows", "0/1"]] {
        assert_eq!(fails("merge", &with(&wrong)).0, "Invalid", "{wrong:?}");
    }

    // Heads of four rows: GGUF has the partners of a pair side by side.
    tensors(&at("base"), &[("blk.0.attn_q.weight", &[4, 1], 0.0), ("blk.0.attn_k.weight", &[4, 1], 0.0)]);
    let spec = [TensorSpec::new("model.layers.0.self_attn.q_proj.diff", DType::F32, [4, 1])];
    let numbers: Vec<u8> = [0f32, 1., 2., 3.].iter().flat_map(|value| value.to_le_bytes()).collect();
    write_safetensors(at("adapter"), &spec, &Default::default(), |_, out| out.put(&numbers)).unwrap();
    assert!(fails("merge", &with(&[])).1.contains("rotary_rows"));
    for (rows, wanted) in [("same", [0., 1., 2., 3.]), ("1/1", [0., 2., 1., 3.]), ("1", [0., 2., 1., 3.])] {
        works("merge", &with(&["--rotary-rows", rows]));
        assert_eq!(values(&at("out"), "blk.0.attn_q.weight"), wanted, "{rows}");
    }
}

#[test]
fn merge_tells_how_many_values_saturated_and_recomputes_scales() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("out.safetensors");
    let (base, adapter) =
        (data("fp8/e4m3_scale_weight.base.safetensors"), data("fp8/e4m3_scale_weight.adapter.safetensors"));
    let merge = |strength: &str, more: &[&str]| {
        let adapter = format!("{adapter}:{strength}");
        let more: Vec<OsString> = more.iter().map(OsString::from).collect();
        [args([&base, &"--adapter", &adapter, &"--out", &out]), more].concat()
    };
    let saturated = |args: &[OsString]| json_of("merge", args)["saturated"].as_u64().unwrap();
    assert_eq!(saturated(&merge("0", &[])), 0);
    let many = saturated(&merge("1000", &[]));
    assert!(many > 10, "{many}");
    assert!(works("merge", &merge("1000", &[])).contains(&format!("{many} values saturated")));
    let placed = ["--alloc", "cpu,*", "--device", "cpu=64mb"];
    assert_eq!(saturated(&merge("1000", &placed)), many, "wherever it is placed");
    let kept = fs::read(&out).unwrap();
    assert_eq!(saturated(&merge("1000", &["--scales", "recompute"])), 0);
    let recomputed = fs::read(&out).unwrap();
    assert_ne!(kept, recomputed);
    assert!(!works("merge", &merge("1000", &["--scales", "recompute"])).contains("saturated"));
    assert_eq!(saturated(&merge("1000", &[&["--scales", "recompute"], &placed[..]].concat())), 0);
    assert_eq!(fs::read(&out).unwrap(), recomputed);
    assert_eq!(fails("merge", &merge("1", &["--scales", "new"])).0, "Usage");
}

/// Experts on the host, used there, and everything else on the card: what a mixture of experts is run with.
#[test]
fn experts_stay_on_the_host_by_their_name() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("moe.safetensors");
    let mut names = vec!["model.embed_tokens.weight".to_owned()];
    for layer in 0..4 {
        let of = |part: &str| format!("model.layers.{layer}.{part}.weight");
        names.extend(["self_attn.q_proj", "mlp.gate", "mlp.shared_experts.up_proj"].map(of));
        names.extend((0..4).map(|expert| of(&format!("mlp.experts.{expert}.up_proj"))));
    }
    // 128 KiB each: 13 tensors of the others, and 16 of experts.
    tensors(&model, &names.iter().map(|name| (name.as_str(), &[128u64, 256][..], 1.0)).collect::<Vec<_>>());
    let plan = |quota: &str, more: &[&str]| {
        let alloc = format!("cuda:0,{quota};cpu,*");
        let devices = args([&"--device", &"cuda:0=8mb", &"--device", &"cpu=64mb", &"--depth", &"0"]);
        let more: Vec<OsString> = more.iter().map(OsString::from).collect();
        let report = json_of("plan", &[args([&model, &"--alloc", &alloc]), devices, more].concat());
        let uses = |name: &str, usage: &str| {
            let assignments = report["assignments"].as_array().unwrap().iter();
            assignments.filter(|a| a["module"].as_str().unwrap().contains(name) && a["use"] == usage).count()
        };
        let all = |usage: &str| (uses(".experts.", usage), uses("", usage) - uses(".experts.", usage));
        assert_eq!(report["warnings"].as_array().unwrap().len(), 0, "{}", report["warnings"]);
        [all("resident"), all("streamed"), all("in_place")]
    };
    // (experts, others) that are resident, streamed and in place.
    assert_eq!(plan("1664kb", &["--in-place", "experts"]), [(0, 13), (0, 0), (16, 0)]);
    assert_eq!(plan("2mb", &["--in-place", "experts"]), [(3, 13), (0, 0), (13, 0)], "the rest of the quota is theirs");
    assert_eq!(plan("1mb", &["--in-place", "experts"]), [(0, 8), (0, 5), (16, 0)], "the others are streamed");
    assert_eq!(plan("1mb", &["--in-place", "*.mlp.experts.*", "--order", "uniform"])[2], (16, 0));
    assert_eq!(plan("512kb", &["--keep", "mlp.shared_experts", "--in-place", "experts"])[0], (0, 4));
    assert_eq!(plan("1mb", &[])[2], (0, 0));
}

/// `/dev/shm` is in memory wherever there is one.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_tier_in_memory_is_told() {
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let warnings = |of: &Path| {
        let output = Command::new(folder().join("plan"))
            .args(["--blocks", "4x1mb", "--alloc", "disk,2mb;cpu,*", "--json"])
            .env("TMPDIR", of)
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
        report["warnings"].to_string()
    };
    let in_memory = warnings(Path::new("/dev/shm"));
    assert!(
        in_memory.contains("the folder of disk is in the memory of cpu, which its 2097152 bytes take"),
        "{in_memory}"
    );
    // The folder of the build is on a disk.
    let on_disk = warnings(Path::new(env!("CARGO_MANIFEST_DIR")));
    assert!(!on_disk.contains("the folder of disk"), "{on_disk}");
}
