//! A worker that streams models, and an HTTP server through which clients ask for memory to be freed.
//!
//! `cargo run --release --example free_server -- --port 8190`, then
//! `curl -X POST http://127.0.0.1:8190/free -d '{"unload_models":true,"free_memory":true}'`. The request only sets
//! flags; the worker serves them between two jobs.

mod support;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use support::options::{DeviceOptions, PlanOptions};
use support::places::Places;
use tensor_offload::backend::Clock;
use tensor_offload::cache::{FreeRequest, Identity};
use tensor_offload::{Error, Loader, ModelCache, Plan, Planner, Registry, Result, Retention, Streamer, Weights};

/// The model that comes with the crate.
const TINY_LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");

/// The longest body of a request.
const MOST_BODY: usize = 64 << 10;

/// The longest head of a request.
const MOST_HEAD: usize = 8 << 10;

/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many connections are served at a time.
const MOST_CONNECTIONS: usize = 32;

/// Streams two models in turn, one kept and one flagged to go, and frees memory between two jobs when a client asks for
/// it with `POST /free`. Prints `listening on 127.0.0.1:PORT`, then what each clean-up did.
#[derive(Parser)]
#[command(name = "free_server")]
struct Args {
    /// The checkpoint [default: a small Llama that comes with the crate]
    model: Option<PathBuf>,
    /// The port of 127.0.0.1 to listen on; 0 for any that is free
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Ends after this many clean-ups [default: never]
    #[arg(long, value_name = "N")]
    cleanups: Option<usize>,
    /// Ends after this many seconds [default: never]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Milliseconds between two jobs
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pause_ms: u64,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    plan: PlanOptions,
    /// Print one JSON value at the end; the port is then printed on standard error
    #[arg(long)]
    json: bool,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).map_err(|source| self.io("bind", source))?;
        let address = listener.local_addr().map_err(|source| self.io("ask for the address of", source))?;
        let cache = Arc::new(ModelCache::new());
        let devices = self.devices.registry(Clock::Wall)?;
        let weights = Weights::new(Places::default().checkpoint(self.model.as_deref().unwrap_or(TINY_LLAMA.as_ref()))?);
        let plan = self.plan.apply(Planner::new(weights.layout(), devices.machine()))?.plan()?;
        let open = Arc::new(());
        let served = (Arc::clone(&cache), Arc::clone(&open));
        std::thread::spawn(move || serve(&listener, &served.0, &served.1));
        let line = format!("listening on {address}");
        if self.json {
            eprintln!("{line}");
        } else {
            support::print_line(&line);
        }
        let done = self.work(&cache, &devices, &Job { weights, plan })?;
        // The client that asked for the last clean-up may not have its answer yet.
        let until = Instant::now() + PATIENCE;
        while connections(&open) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(done)
    }
}

/// What a job needs.
struct Job {
    weights: Weights,
    plan: Plan,
}

impl Args {
    fn io(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { path: format!("127.0.0.1:{}", self.port).into(), action, source }
    }

    /// One job after the other; what was asked for is freed between two.
    fn work(&self, cache: &ModelCache, devices: &Registry, job: &Job) -> Result<Value> {
        let (begin, mut jobs, mut reports) = (Instant::now(), 0u64, Vec::new());
        loop {
            for (key, retention) in [("kept", Retention::Keep), ("flagged", Retention::Unload)] {
                job.run(cache, devices, key, retention)?;
                jobs += 1;
                if let Some(report) = cache.service_requests(devices)? {
                    if !self.json {
                        support::print_line(&report.to_string());
                    }
                    reports.push(report);
                }
                let enough = self.cleanups.is_some_and(|cleanups| reports.len() >= cleanups);
                if enough || self.seconds.is_some_and(|seconds| begin.elapsed() >= Duration::from_secs(seconds)) {
                    return Ok(json!({ "jobs": jobs, "cleanups": reports }));
                }
                std::thread::sleep(Duration::from_millis(self.pause_ms));
            }
        }
    }
}

impl Job {
    /// Goes through the model once, loading it if the cache does not have it.
    fn run(&self, cache: &ModelCache, devices: &Registry, key: &str, retention: Retention) -> Result<()> {
        let Job { weights, plan } = self;
        let identity = Identity::of(weights, plan);
        let load = |base: Option<&_>| Loader::new(devices).derive(base, weights, plan);
        let model = cache.get_or_load(key, &identity, retention, load)?;
        let mut streamer = Streamer::new(&model)?;
        model.layout().layer_ids().try_for_each(|layer| streamer.layer(layer).map(drop))
    }
}

/// The number of open connections: each has a handle, beside those of the program and of the thread that accepts them.
fn connections(open: &Arc<()>) -> usize {
    Arc::strong_count(open).saturating_sub(2)
}

/// Answers clients, each on a thread of its own.
fn serve(listener: &TcpListener, cache: &Arc<ModelCache>, open: &Arc<()>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        if connections(open) >= MOST_CONNECTIONS {
            continue;
        }
        let (cache, open) = (Arc::clone(cache), Arc::clone(open));
        std::thread::spawn(move || {
            // A client that has gone away needs no answer.
            drop(answer(stream, &cache));
            drop(open);
        });
    }
}

/// Status and reason.
type Status = (u16, &'static str);

fn answer(mut stream: TcpStream, cache: &ModelCache) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (status, reason) = match request(&mut stream) {
        Ok(request) => {
            cache.request_free(request);
            (200, "OK")
        }
        Err(status) => status,
    };
    let body = json!({ "status": status, "reason": reason }).to_string();
    let allow = if status == 405 { "Allow: POST\r\n" } else { "" };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n{body}"
    )?;
    stream.shutdown(std::net::Shutdown::Write)?;
    // Closing with bytes unread could cut the answer off on its way.
    io::copy(&mut stream.take(4 * MOST_BODY as u64), &mut io::sink()).map(drop)
}

/// Reads a request and checks all of it.
fn request(stream: &mut TcpStream) -> Result<FreeRequest, Status> {
    const BAD: Status = (400, "Bad Request");
    let (until, mut bytes) = (Instant::now() + PATIENCE, Vec::new());
    let (head, length) = loop {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        if let httparse::Status::Complete(head) = parsed.parse(&bytes).map_err(|_| BAD)? {
            break (head, body_length(&parsed)?);
        }
        if bytes.len() > MOST_HEAD {
            return Err((431, "Request Header Fields Too Large"));
        }
        receive(stream, &mut bytes, until)?;
    };
    while bytes.len() < head + length {
        receive(stream, &mut bytes, until)?;
    }
    let value: Value = serde_json::from_slice(&bytes[head..head + length]).map_err(|_| BAD)?;
    if !value.is_object() {
        return Err(BAD);
    }
    serde_json::from_value(value).map_err(|_| BAD)
}

/// The length of the body of `POST /free`; the status that anything else gets.
fn body_length(request: &httparse::Request<'_, '_>) -> Result<usize, Status> {
    if request.path.and_then(|path| path.split('?').next()) != Some("/free") {
        return Err((404, "Not Found"));
    }
    if request.method != Some("POST") {
        return Err((405, "Method Not Allowed"));
    }
    let named =
        |name: &'static str| request.headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
    let mut lengths = named("content-length");
    let (Some(length), None, None) = (lengths.next(), lengths.next(), named("transfer-encoding").next()) else {
        return Err((411, "Length Required"));
    };
    let digits = std::str::from_utf8(length.value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits.filter(|text| !text.is_empty()).map(str::parse::<usize>) {
        Some(Ok(length)) if length <= MOST_BODY => Ok(length),
        Some(_) => Err((413, "Content Too Large")),
        None => Err((400, "Bad Request")),
    }
}

fn receive(stream: &mut TcpStream, bytes: &mut Vec<u8>, until: Instant) -> Result<(), Status> {
    let mut part = [0; 4096];
    match stream.read(&mut part) {
        Ok(0) => Err((400, "Bad Request")),
        Ok(read) if Instant::now() < until => {
            bytes.extend_from_slice(&part[..read]);
            Ok(())
        }
        _ => Err((408, "Request Timeout")),
    }
}

fn main() {
    support::main::<Args>()
}
