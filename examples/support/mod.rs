//! What the examples share: one way to report, one line for an error, exit status 2.

#![allow(dead_code, reason = "each example uses its part")]

pub(crate) mod adapters;
pub(crate) mod casts;
pub(crate) mod deferred;
pub(crate) mod devices;
pub(crate) mod model;
pub(crate) mod options;
pub(crate) mod part;
pub(crate) mod places;
pub(crate) mod replay;
#[cfg(feature = "wgpu")]
pub(crate) mod shader;
pub(crate) mod table;
pub(crate) mod trace;
pub(crate) mod values;

use clap::Parser;
use clap::error::ErrorKind;

/// What an example does with its arguments: the report, as text or as one JSON value.
pub(crate) trait Example: Parser {
    /// Whether the user asked for JSON.
    fn json(&self) -> bool;
    /// Does the work; text goes to standard output as it comes, the value is what `--json` prints.
    fn run(self) -> tensor_offload::Result<serde_json::Value>;
}

/// Parses the arguments, runs the example, reports, and exits: 0 when it worked, 2 with the error otherwise.
pub(crate) fn main<E: Example>() -> ! {
    let json_asked = std::env::args_os().any(|arg| arg == "--json");
    let example = match E::try_parse() {
        Ok(example) => example,
        Err(help) if matches!(help.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => help.exit(),
        Err(usage) => {
            let text = usage.render().to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            fail("Usage", &line, json_asked)
        }
    };
    let json = example.json();
    match example.run() {
        Ok(value) => {
            if json {
                print_line(&value.to_string());
            }
            std::process::exit(0)
        }
        Err(error) => fail(&error.kind().to_string(), &error.to_string(), json),
    }
}

fn fail(kind: &str, message: &str, json: bool) -> ! {
    if json {
        print_line(&serde_json::json!({ "error": { "kind": kind, "message": message } }).to_string());
    } else {
        eprintln!("error: {}", message.replace('\n', " "));
    }
    std::process::exit(2)
}

/// Prints a line; a reader that has gone away, as `head` does, is no error.
pub(crate) fn print_line(line: &str) {
    use std::io::Write;
    if let Err(error) = writeln!(std::io::stdout(), "{line}") {
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            eprintln!("error: cannot write to standard output: {error}");
        }
        std::process::exit(2)
    }
}
