//! Files and folders as people have them: pipelines, caches of hubs, links, text in place of weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[cfg(unix)]
use tensor_offload::ErrorKind;
use tensor_offload::checkpoint::{Checkpoint, TensorSpec, write_safetensors};
use tensor_offload::error::FileFault;
#[cfg(unix)]
use tensor_offload::transfer::MappedSource;
use tensor_offload::transfer::{FileSource, Source};
use tensor_offload::{Adapter, DType, Error};

/// Writes a safetensors file of one tensor, with the folders above it.
fn weights(path: impl AsRef<Path>, tensor: &str) {
    fs::create_dir_all(path.as_ref().parent().unwrap()).unwrap();
    let specs = [TensorSpec::new(tensor, DType::U8, [4])];
    write_safetensors(path, &specs, &BTreeMap::new(), |_, out| out.put(b"1234")).unwrap();
}

fn put(path: impl AsRef<Path>, text: impl AsRef<[u8]>) {
    fs::create_dir_all(path.as_ref().parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// The file that is refused and its fault.
fn refused(path: impl AsRef<Path>) -> (String, FileFault) {
    let error = Checkpoint::open(path).unwrap_err();
    let Error::File { file, fault, .. } = error else { panic!("{error}") };
    (file.display().to_string(), *fault)
}

fn tensor(model: &Checkpoint) -> &str {
    &model.layout().tensors()[0].name
}

#[test]
fn a_pipeline_is_refused_with_its_models_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    put(at("model_index.json"), "{}");
    put(at("scheduler/scheduler_config.json"), "{}");
    let several = |models: &[&str]| {
        let what = "the folder of a pipeline of several models";
        let wanted = models.iter().map(ToString::to_string).collect();
        assert_eq!(refused(folder.path()).1, FileFault::SeveralModels { what, models: wanted });
    };
    assert_eq!(refused(folder.path()).1, FileFault::NoWeights);
    weights(at("transformer/diffusion_pytorch_model.safetensors"), "a");
    several(&["transformer"]);
    put(at("vae/diffusion_pytorch_model.bin"), "PK\x03\x04");
    put(at("text_encoder/model.safetensors.index.json"), "{}");
    several(&["text_encoder", "transformer", "vae"]);
    // Whole models in single files beside the folders.
    weights(at("ae.safetensors"), "a");
    weights(at("flux.safetensors"), "a");
    several(&["ae.safetensors", "flux.safetensors", "text_encoder", "transformer", "vae"]);
    assert_eq!(tensor(&Checkpoint::open(at("transformer")).unwrap()), "a");
}

#[test]
fn weights_in_sub_folders_only_are_named() {
    let folder = tempfile::tempdir().unwrap();
    weights(folder.path().join("split_files/diffusion_models/m.safetensors"), "a");
    weights(folder.path().join("original/M.SAFETENSORS"), "a");
    weights(folder.path().join(".hidden/m.safetensors"), "a");
    fs::create_dir(folder.path().join("empty.safetensors")).unwrap();
    let (file, fault) = refused(folder.path());
    assert_eq!(file, folder.path().display().to_string());
    let FileFault::SeveralModels { models, .. } = &fault else { panic!("{fault:?}") };
    assert_eq!(models, &["original", "split_files/diffusion_models"]);
    assert!(fault.to_string().contains("original, split_files/diffusion_models"), "{fault}");
    assert_eq!(tensor(&Checkpoint::open(folder.path().join("original")).unwrap()), "a");
}

#[test]
fn a_cache_of_the_hub_stands_for_the_snapshot_of_main() {
    let hub = tempfile::tempdir().unwrap();
    let model = hub.path().join("models--org--name");
    let snapshot = |name: &str| weights(model.join("snapshots").join(name).join("model.safetensors"), name);
    fs::create_dir_all(model.join("blobs")).unwrap();
    snapshot("0a");
    let open = || Checkpoint::open(&model).map(|opened| tensor(&opened).to_owned());
    assert_eq!(open().unwrap(), "0a", "there is no other");
    snapshot("1b");
    let several = |part: &str| {
        let (file, fault) = refused(&model);
        let FileFault::SeveralModels { what, models } = &fault else { panic!("{fault:?}") };
        assert_eq!((file, models.join(" ")), (model.display().to_string(), "snapshots/0a snapshots/1b".to_owned()));
        assert!(what.contains(part), "{what}");
    };
    several("has no refs/main");
    put(model.join("refs/main"), "1b");
    assert_eq!(open().unwrap(), "1b");
    put(model.join("refs/main"), "0a\n");
    assert_eq!(open().unwrap(), "0a");
    for elsewhere in ["2c", "../snapshots/0a", "", "."] {
        put(model.join("refs/main"), elsewhere);
        several("names no snapshot");
    }
    put(model.join("refs/main"), "0a");
    // The folder above, and the one above that.
    fs::create_dir_all(hub.path().join("datasets--org--data/snapshots/0a")).unwrap();
    assert_eq!(tensor(&Checkpoint::open(hub.path()).unwrap()), "0a");
    weights(hub.path().join("models--org--other/snapshots/9f/model.safetensors"), "other");
    let (_, fault) = refused(hub.path());
    assert!(fault.to_string().contains("models--org--name, models--org--other"), "{fault}");
    let home = tempfile::tempdir().unwrap();
    fs::rename(hub.path().join("models--org--other"), home.path().join("models--org--other")).unwrap();
    let cache = tempfile::tempdir().unwrap();
    fs::rename(home.path(), cache.path().join("hub")).unwrap();
    assert_eq!(tensor(&Checkpoint::open(cache.path()).unwrap()), "other");
    // A model of its own with a cache beside it.
    weights(cache.path().join("model.safetensors"), "own");
    assert_eq!(tensor(&Checkpoint::open(cache.path()).unwrap()), "own");
}

#[test]
fn an_adapter_in_a_cache_of_the_hub_is_found() {
    let hub = tempfile::tempdir().unwrap();
    let snapshot = hub.path().join("models--org--lora/snapshots/0a");
    put(hub.path().join("models--org--lora/refs/main"), "0a");
    weights(snapshot.join("adapter_model.safetensors"), "base_model.model.a.lora_A.weight");
    put(snapshot.join("adapter_config.json"), "\u{feff}{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8}");
    let adapter = Adapter::open(hub.path().join("models--org--lora"), 1.0).unwrap();
    assert_eq!(adapter.path(), snapshot);
}

#[test]
fn downloads_that_have_not_finished_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let unfinished = |path: &Path, names: &[&str]| {
        let files = names.iter().map(ToString::to_string).collect();
        assert_eq!(refused(path).1, FileFault::Unfinished { files });
    };
    put(folder.path().join("model.safetensors.part"), "");
    unfinished(folder.path(), &["model.safetensors.part"]);
    let local = folder.path().join("local");
    put(local.join(".cache/huggingface/download/x.incomplete"), "");
    unfinished(&local, &[".cache/huggingface/download/x.incomplete"]);
    let cached = folder.path().join("models--org--name");
    put(cached.join("blobs/0a.incomplete"), "");
    fs::create_dir_all(cached.join("snapshots")).unwrap();
    unfinished(&cached, &["blobs/0a.incomplete"]);
    put(cached.join("snapshots/0a/config.json"), "{}");
    unfinished(&cached, &["blobs/0a.incomplete"]);
}

/// aria2 makes a file of the full length before it downloads it, and keeps notes beside it until it is done.
#[test]
fn a_download_of_the_full_length_is_told_by_its_notes() {
    let folder = tempfile::tempdir().unwrap();
    let (path, notes) = (folder.path().join("m.safetensors"), folder.path().join("m.safetensors.aria2"));
    weights(&path, "a");
    put(&notes, "");
    for opened in [&path, &folder.path().to_owned()] {
        assert_eq!(refused(opened).1, FileFault::Unfinished { files: vec![notes.display().to_string()] });
    }
    fs::remove_file(notes).unwrap();
    assert_eq!(tensor(&Checkpoint::open(&path).unwrap()), "a");
}

#[test]
fn an_adapter_folder_without_its_configuration_or_weights_tells_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    let message = || Adapter::open(folder.path(), 1.0).unwrap_err().to_string();
    assert!(message().ends_with("adapter_config.json: the folder does not hold it"), "{}", message());
    weights(at("checkpoint-100/adapter_model.safetensors"), "base_model.model.a.lora_A.weight");
    weights(at("pytorch_lora_weights.safetensors"), "a.lora_A.weight");
    assert!(message().ends_with("pytorch_lora_weights.safetensors, checkpoint-100"), "{}", message());
    fs::remove_file(at("pytorch_lora_weights.safetensors")).unwrap();
    put(at("adapter_config.json"), "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8}");
    assert!(message().contains("open one of what is in it: checkpoint-100"), "{}", message());
    put(at("adapter_model.bin"), "PK\x03\x04 and so on");
    assert!(message().contains("adapter_model.bin: this is a zip archive"), "{}", message());
    put(at("adapter_config.json"), "<!doctype html><p>Sign in");
    put(at("adapter_model.safetensors"), "");
    assert!(message().contains("adapter_config.json: this is an HTML page"), "{}", message());
}

#[test]
fn text_in_place_of_weights_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for (text, kind, start) in [
        ("<!DOCTYPE html><title>Access denied</title>", "an HTML page", "<!DOCTYPE html><title>Access denied</title>"),
        ("\n  <HTML lang=de>", "an HTML page", "<HTML lang=de>"),
        ("<!-- sorry -->\n<html>", "an HTML page", "<!-- sorry --> <html>"),
        (
            "<?xml version='1.0'?><Error><Code>AccessDenied",
            "XML text",
            "<?xml version='1.0'?><Error><Code>AccessDenied",
        ),
        ("\u{feff}{\"error\":\"Repository\n  not found\"}", "JSON text", "{\"error\":\"Repository not found\"}"),
        ("[1, 2, 3, 4, 5]", "JSON text", "[1, 2, 3, 4, 5]"),
        ("Entry not found", "text", "Entry not found"),
        ("404: Seite nicht verfügbar", "text", "404: Seite nicht verfügbar"),
    ] {
        put(&path, text);
        for opened in [&path, &folder.path().to_owned()] {
            let (file, fault) = refused(opened);
            assert_eq!(file, path.display().to_string());
            assert_eq!(fault, FileFault::Text { kind, start: start.to_owned() }, "{text}");
            assert!(fault.to_string().contains(start), "{fault}");
        }
    }
    // A character that is cut by the end of what is looked at, and a page in another encoding.
    put(&path, format!("{}ü", "x".repeat(511)));
    assert!(matches!(refused(&path).1, FileFault::Text { kind: "text", .. }));
    put(&path, b"<html>\xfcber");
    assert!(matches!(refused(&path).1, FileFault::Text { kind: "an HTML page", .. }));
    let wide = "\u{feff}<html>".encode_utf16();
    for bytes in
        [wide.clone().flat_map(u16::to_le_bytes).collect::<Vec<_>>(), wide.flat_map(u16::to_be_bytes).collect()]
    {
        put(&path, bytes);
        assert_eq!(refused(&path).1, FileFault::Text { kind: "an HTML page", start: "<html>".to_owned() });
    }
    // No text: what the header's parser finds is more to the point.
    for bytes in [&b""[..], b"abc\0", b"12345678\x01", b"caf\xe9 cr\xe8me"] {
        put(&path, bytes);
        assert!(!matches!(refused(&path).1, FileFault::Text { .. }), "{bytes:?}");
    }
    put(&path, "");
    assert!(refused(&path).1.to_string().contains("is empty"));
}

#[test]
fn archives_and_files_of_zeros_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let zip = |name: &[u8]| {
        let mut file = b"PK\x03\x04".to_vec();
        file.resize(26, 0);
        file.extend([name.len() as u8, 0, 0, 0]);
        [&file, name, b"\0\0\x01"].concat()
    };
    let mut tar = vec![b'm'; 257];
    tar[5..100].fill(0);
    tar.extend(b"ustar\x0000");
    for (bytes, word, advised) in [
        (&b"\x1f\x8b\x08\0\0\0\0\0\0\x03"[..], "gzip", "unpack"),
        (b"BZh91AY&SY", "bzip2", "unpack"),
        (b"\xfd7zXZ\0\0\x04", "xz", "unpack"),
        (b"\x28\xb5\x2f\xfd\x04\0\0\0", "Zstandard", "unpack"),
        (b"7z\xbc\xaf\x27\x1c\0\x04", "7z", "unpack"),
        (b"Rar!\x1a\x07\x01\0", "RAR", "unpack"),
        (&tar, "tar", "unpack"),
        (&zip(b"weight.npy"), "NumPy", "convert"),
        (&zip(b"archive/data.pkl"), "torch.save", "convert"),
        (&zip(b"m.safetensors"), "zip", "unpack"),
        (b"(dp0\nVa\np1\n", "pickle", "convert"),
        (b"tjgg\x03\0\0\0", "GGML", "convert"),
        (b"lmgg\x03\0\0\0", "GGML", "convert"),
        (&[0; 64], "zeros", "download it again"),
    ] {
        put(&path, bytes);
        let (_, fault) = refused(&path);
        let FileFault::OtherFormat { format, advice } = fault else { panic!("{word}: {fault:?}") };
        assert!(format.contains(word) && advice.contains(advised), "{format}: {advice}");
    }
}

#[test]
fn byte_order_marks_are_skipped_and_other_encodings_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    weights(at("1.safetensors"), "model.embed_tokens.weight");
    let (index, config) = (at("model.safetensors.index.json"), at("config.json"));
    put(&index, "\u{feff}{\"weight_map\":{\"model.embed_tokens.weight\":\"1.safetensors\"}}");
    put(&config, "\u{feff}{\"tie_word_embeddings\":true}");
    assert!(Checkpoint::open(folder.path()).unwrap().layout().modules()[0].tied);
    let wide: Vec<u8> = "\u{feff}{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    put(&config, &wide);
    let (file, fault) = refused(folder.path());
    assert!(file.ends_with("config.json") && fault.to_string().contains("UTF-16; save it as UTF-8"), "{fault}");
    put(&config, b"{\"a\":\"\xff\"}");
    assert!(matches!(refused(folder.path()).1, FileFault::BadConfig { reason } if reason.contains("not UTF-8")));
    put(&config, "<html>Sign in</html>");
    assert!(matches!(refused(folder.path()).1, FileFault::Text { kind: "an HTML page", .. }));
    put(&index, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n");
    let (file, fault) = refused(folder.path());
    assert!(file.ends_with("index.json") && fault.to_string().contains("git lfs pull"), "{fault}");
    put(&index, "{\"error\":\"Repository not found\"}");
    assert!(matches!(refused(folder.path()).1, FileFault::BadIndex { .. }));
}

#[test]
fn a_pointer_among_shards_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    weights(at("1.safetensors"), "a");
    put(at("2.safetensors"), "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 4\n");
    put(at("m.safetensors.index.json"), r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#);
    let (file, fault) = refused(folder.path());
    assert!(file.ends_with("2.safetensors") && fault.to_string().contains("git lfs pull"), "{fault}");
}

#[cfg(unix)]
#[test]
fn a_link_that_leads_nowhere_is_named_with_its_target() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let broken = |path: &Path, link: &str, target: &str| {
        let (file, fault) = refused(path);
        assert_eq!(fault, FileFault::BrokenLink { link: at(link), target: target.into() }, "{file}");
        let message = fault.to_string();
        assert!(message.contains("link") && message.contains(link) && message.contains(target), "{message}");
    };
    fs::create_dir(at("snapshot")).unwrap();
    symlink("../../blobs/0123", at("snapshot/model.safetensors")).unwrap();
    broken(&at("snapshot/model.safetensors"), "snapshot/model.safetensors", "../../blobs/0123");
    broken(&at("snapshot"), "snapshot/model.safetensors", "../../blobs/0123");
    // A link to a link, and a folder that is one.
    symlink("snapshot/model.safetensors", at("second")).unwrap();
    let (_, fault) = refused(at("second"));
    assert!(matches!(&fault, FileFault::BrokenLink { target, .. } if target.ends_with("0123")), "{fault:?}");
    symlink("../gone", at("folder")).unwrap();
    broken(&at("folder"), "folder", "../gone");
    broken(&at("folder/sub/model.safetensors"), "folder", "../gone");
    // A shard, an index, a configuration, an adapter.
    fs::create_dir(at("set")).unwrap();
    weights(at("set/1.safetensors"), "a");
    put(at("set/m.safetensors.index.json"), r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#);
    symlink("../../blobs/4567", at("set/2.safetensors")).unwrap();
    broken(&at("set"), "set/2.safetensors", "../../blobs/4567");
    fs::create_dir(at("one")).unwrap();
    weights(at("one/m.safetensors"), "a");
    symlink("nowhere", at("one/config.json")).unwrap();
    broken(&at("one"), "one/config.json", "nowhere");
    fs::rename(at("one/config.json"), at("one/adapter_config.json")).unwrap();
    let error = Adapter::open(at("one"), 1.0).unwrap_err();
    assert!(error.to_string().contains("points to nowhere"), "{error}");
    // SAFETY: the file is not opened.
    #[expect(unsafe_code, reason = "opening by mapping")]
    let mapped = unsafe { MappedSource::assume_immutable(at("second")) }.unwrap_err();
    assert_eq!(mapped.kind(), ErrorKind::File);
}

#[cfg(unix)]
#[test]
fn links_in_a_circle_and_pipes_are_errors_and_nothing_hangs() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.safetensors"), folder.path().join("b"));
    symlink(&a, &b).unwrap();
    symlink(&b, &a).unwrap();
    for path in [a.as_path(), folder.path()] {
        assert_eq!(Checkpoint::open(path).unwrap_err().kind(), ErrorKind::Io);
    }
    // A cache that holds itself.
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--a--b");
    fs::create_dir_all(model.join("snapshots")).unwrap();
    symlink("..", model.join("snapshots/0a")).unwrap();
    assert_eq!(Checkpoint::open(&model).unwrap_err().kind(), ErrorKind::File);

    let pipe = folder.path().join("pipe.safetensors");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    for path in [pipe.as_path(), Path::new("/dev/zero")] {
        let error = Checkpoint::open(path).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
        // SAFETY: the file is not opened.
        #[expect(unsafe_code, reason = "opening by mapping")]
        let mapped = unsafe { MappedSource::assume_immutable(path) }.unwrap_err();
        assert_eq!(mapped.kind(), ErrorKind::Io);
        assert_eq!(Adapter::open(path, 1.0).unwrap_err().kind(), ErrorKind::Io);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn names_need_not_be_unicode() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join(std::ffi::OsStr::from_bytes(b"mod\xe8le"));
    weights(inner.join(std::ffi::OsStr::from_bytes(b"poids-\xe9.safetensors")), "a");
    assert_eq!(tensor(&Checkpoint::open(&inner).unwrap()), "a");
    let (_, fault) = refused(folder.path());
    assert!(matches!(&fault, FileFault::SeveralModels { models, .. } if models == &["mod\u{fffd}le"]), "{fault:?}");
}

/// More sources than files that are kept open.
#[test]
fn files_are_opened_again_when_they_are_read_and_must_be_the_same() {
    const FILES: usize = 200;
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(number.to_string());
    (0..FILES).for_each(|number| put(path(number), [number as u8; 16]));
    let sources: Vec<FileSource> = (0..FILES).map(|number| FileSource::open(path(number)).unwrap()).collect();
    let mut part = [0; 8];
    for _ in 0..2 {
        for (number, source) in sources.iter().enumerate() {
            source.read_at(4, &mut part).unwrap();
            assert_eq!(part, [number as u8; 8]);
        }
    }
    // From many threads at once.
    std::thread::scope(|scope| {
        for first in 0..8 {
            let sources = &sources;
            scope.spawn(move || {
                for number in (0..FILES).cycle().skip(first * 25).take(3 * FILES) {
                    let mut part = [0; 8];
                    sources[number].read_at(8, &mut part).unwrap();
                    assert_eq!(part, [number as u8; 8]);
                }
            });
        }
    });
    // The first has been closed: another file in its place, or none, is not read.
    sources[FILES - 1].read_at(0, &mut part).unwrap();
    for source in &sources[100..] {
        source.read_at(0, &mut part).unwrap();
    }
    fs::remove_file(path(0)).unwrap();
    put(path(0), [9; 16]);
    fs::remove_file(path(1)).unwrap();
    fs::remove_file(path(2)).unwrap();
    fs::create_dir(path(2)).unwrap();
    for number in [0, 1, 2] {
        let error = sources[number].read_at(0, &mut part).unwrap_err();
        let Error::File { file, fault, .. } = &error else { panic!("{error}") };
        assert_eq!((file, &**fault), (&path(number), &FileFault::Changed));
    }
    sources[3].read_at(0, &mut part).unwrap();
}
