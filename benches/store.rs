//! Reads from an object store: how they gain from requests that are under way at the same time, and what the client costs.
//!
//! The first part reads an object of a store that gives every answer after 30 ms, as one in the same region does. The floor of each number
//! of requests is to wait 30 ms as often as that number of requests at a time makes necessary, and nothing else.
//!
//! The second part reads a file from an HTTP server of this machine, beside reading it from the page cache. `scripts/store-bench` starts
//! nginx and says where it is (`TENSOR_OFFLOAD_BENCH_SERVER`, the URL, and `TENSOR_OFFLOAD_BENCH_FILE`, the same file). Its floor is as
//! many connections as there are cores, over which ranges are asked for and the answers dropped as they come.
//!
//! With `--bench` the object has 256 MiB and the file what it has, otherwise 16 MiB.

#![allow(unsafe_code, reason = "calls of the system that no crate has")]

#[path = "support/files.rs"]
mod files;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use files::{TURNS, Turns, timed};
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{ObjectStore, ObjectStoreExt};
use tensor_offload::store::ObjectStorage;
use tensor_offload::transfer::{FileSource, ReadPart, Source, Storage};

/// How long the slow store takes for each answer.
const LATENCY: Duration = Duration::from_millis(30);

/// What a range of a large read has.
const RANGE: u64 = 8 << 20;

/// Reads all of a source, by as many threads as a load would have.
fn read(source: &dyn Source, memory: &mut [u8]) {
    let each = memory.len().div_ceil(source.concurrency().max(2)).next_multiple_of(1 << 20);
    std::thread::scope(|scope| {
        for (number, part) in memory.chunks_mut(each).enumerate() {
            let at = (number * each) as u64;
            scope.spawn(move || source.read_parts(&mut [ReadPart::new(at, part)]).expect("bytes"));
        }
    });
}

fn latency(bytes: usize) {
    let store = InMemory::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(store.put(&"object".into(), vec![7; bytes].into())).expect("memory");
    let slow = ThrottleConfig { wait_get_per_call: LATENCY, ..ThrottleConfig::default() };
    let store: Arc<dyn ObjectStore> = Arc::new(ThrottledStore::new(store, slow));
    let memory = Mutex::new(vec![0; bytes]);
    println!("every answer after {} ms:", LATENCY.as_millis());
    for requests in [1, 4, 8, 16, 32] {
        let storage = ObjectStorage::new(Arc::clone(&store)).in_flight(requests);
        let source = storage.open(Path::new("object")).expect("the object that was put");
        let before = storage.traffic().requests;
        let once = || read(&*source, &mut memory.lock().expect("no thread panics"));
        once();
        let ranges = storage.traffic().requests - before;
        let waits = u32::try_from(ranges.div_ceil(requests as u64)).unwrap_or(u32::MAX);
        let mut turns = Turns::new("an object", bytes as u64);
        turns.take(
            &mut || {},
            &[
                ("floor: only the waits", &|| timed(|| std::thread::sleep(LATENCY * waits))),
                ("a read", &|| timed(once)),
            ],
        );
        print!("{requests} of {ranges} requests at a time: ");
        turns.print();
    }
}

/// Asks a server for ranges over as many connections as there are threads, and drops what comes.
fn dropped(host: &str, target: &str, bytes: u64, threads: usize) {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut connection = TcpStream::connect(host).expect("the server");
                let mut buffer = vec![0; 256 << 10];
                loop {
                    let from = next.fetch_add(RANGE, Ordering::Relaxed);
                    if from >= bytes {
                        return;
                    }
                    let to = bytes.min(from + RANGE);
                    let request =
                        format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={from}-{}\r\n\r\n", to - 1);
                    connection.write_all(request.as_bytes()).expect("the server");
                    let (mut head, mut begun) = (Vec::new(), None);
                    let mut left = to - from;
                    while left > 0 {
                        let count = connection.read(&mut buffer).expect("the server");
                        assert!(count > 0, "the server ends the connection");
                        if begun.is_some() {
                            left -= count as u64;
                            continue;
                        }
                        head.extend_from_slice(&buffer[..count]);
                        if let Some(end) = head.windows(4).position(|end| end == b"\r\n\r\n") {
                            assert!(head.starts_with(b"HTTP/1.1 206"), "the server serves no ranges");
                            begun = Some(());
                            left -= (head.len() - end - 4) as u64;
                        }
                    }
                }
            });
        }
    });
}

fn server(url: &str, file: &str) {
    let local = FileSource::open(file).expect("the file that is served").through_page_cache();
    let bytes = local.stamp().len();
    let (host, target) = url.trim_start_matches("http://").split_once('/').expect("http://HOST/PATH");
    let target = format!("/{target}");
    let storage = ObjectStorage::from_url(url).expect("a URL");
    let source = storage.open(Path::new(url)).expect("the server");
    assert_eq!(source.stamp().len(), bytes, "the file and the object are one");
    let memory = Mutex::new(vec![1; bytes as usize]);
    let whole = |source: &dyn Source| read(source, &mut memory.lock().expect("no thread panics"));
    whole(&local);
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get());
    let mut turns = Turns::new("a file from a server of this machine", bytes);
    turns.take(
        &mut || {},
        &[
            ("floor: ranges that are dropped", &|| timed(|| dropped(host, &target, bytes, threads))),
            ("reads of the object", &|| timed(|| whole(&*source))),
            ("reads of the file, from the page cache", &|| timed(|| whole(&local))),
        ],
    );
    turns.print();
    let requests = storage.traffic().requests / (TURNS as u64);
    println!("  {requests} requests each");
}

fn main() {
    let in_earnest = std::env::args().any(|arg| arg == "--bench");
    latency(if in_earnest { 256 << 20 } else { 16 << 20 });
    if let (Ok(url), Ok(file)) =
        (std::env::var("TENSOR_OFFLOAD_BENCH_SERVER"), std::env::var("TENSOR_OFFLOAD_BENCH_FILE"))
    {
        server(&url, &file);
    }
}
