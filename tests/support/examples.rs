//! Runs the examples as a user does.

#![allow(dead_code, reason = "each test uses its part")]

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

/// Where the examples lie: beside the folder of this test. `cargo test` builds them, `cargo test --test examples` does
/// not.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let profile = std::env::current_exe().unwrap().parent().and_then(Path::parent).unwrap().to_owned();
        let folder = profile.join("examples");
        let built = |name: &str| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX)).is_file();
        if !["generate", "inspect", "merge", "offload", "plan", "replay", "whatif"].iter().all(|name| built(name)) {
            let release = if profile.ends_with("release") { &["--release"][..] } else { &[] };
            let cargo = Command::new(env!("CARGO")).args(["build", "-q", "--examples"]).args(release).status();
            assert!(cargo.unwrap().success(), "the examples do not build");
        }
        folder
    })
}

pub(crate) fn run(example: &str, args: &[impl AsRef<OsStr> + std::fmt::Debug]) -> Output {
    let work = tempfile::tempdir().unwrap();
    Command::new(folder().join(example)).args(args).current_dir(&work).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs an example that has to work; what it prints.
pub(crate) fn works(example: &str, args: &[impl AsRef<OsStr> + std::fmt::Debug]) -> String {
    let output = run(example, args);
    assert!(output.status.success(), "{example} {args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn json_of(example: &str, args: &[impl AsRef<OsStr> + std::fmt::Debug]) -> Value {
    serde_json::from_str(&works(example, &with_json(args))).expect("one JSON value")
}

/// Runs an example that has to fail, as text and as JSON; the kind of its error and its message.
pub(crate) fn fails(example: &str, args: &[impl AsRef<OsStr> + std::fmt::Debug]) -> (String, String) {
    let output = run(example, args);
    let line = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{example} {args:?}: {line}");
    assert!(line.starts_with("error: ") && line.trim_end().lines().count() == 1, "one line: {line}");
    let output = run(example, &with_json(args));
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), ""), "{example} {args:?}");
    let value: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    let error = value["error"].as_object().expect("an error");
    assert_eq!(error.keys().collect::<Vec<_>>(), ["kind", "message"]);
    let (kind, message) = (error["kind"].as_str().unwrap(), error["message"].as_str().unwrap());
    assert_eq!(line.trim_end(), format!("error: {}", message.replace('\n', " ")));
    (kind.to_owned(), message.to_owned())
}

fn with_json(args: &[impl AsRef<OsStr>]) -> Vec<OsString> {
    args.iter().map(|arg| arg.as_ref().to_owned()).chain(["--json".into()]).collect()
}
