//! A server that speaks what is needed of S3's protocol, and misbehaves on demand: for what a real server cannot be told to do.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::{BackoffConfig, RetryConfig};
use tensor_offload::store::ObjectStorage;

/// What must be in no error and no log.
pub(crate) const SECRET: &str = "hunter2-is-the-secret-key";
pub(crate) const TOKEN: &str = "session-token-that-nobody-sees";

/// How the server answers a request for an object, in place of what it should.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// This status, with a body that repeats what the client sent.
    Status(u16),
    /// Half of the body, and then the connection ends.
    Break,
    /// A body of half the length, which is told to be complete.
    Short,
    /// More bytes than were asked for.
    Long,
    /// Half of the body, and then nothing.
    Stall,
    /// The body, a few bytes at a time, which takes longer than any test waits.
    Trickle,
    /// Nothing at all.
    Silence,
}

/// Has clients of this process encrypt by ring. A program that enables object_store's feature `aws` need not do this.
pub(crate) fn with_tls() {
    drop(rustls::crypto::ring::default_provider().install_default());
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Arc<Vec<u8>>,
    tag: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) method: String,
    /// The key, or the prefix of a listing.
    pub(crate) key: String,
    pub(crate) range: Option<Range<usize>>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Object>,
    faults: VecDeque<Fault>,
    asked: Vec<Asked>,
    /// Of requests for what an object is: the end of its key, and the answers.
    head_faults: (&'static str, VecDeque<Fault>),
    /// Whether `If-Match` is not looked at.
    ignores_tags: bool,
    /// Whether tags are weak ones, which match nothing.
    weak: bool,
    /// Whether nobody may list, so that what is not there is refused.
    unlisted: bool,
    /// Ranges are answered once so many are waited for at a time.
    gate: usize,
    waiting: usize,
    written: u64,
    ended: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The server. It ends when it is dropped.
pub(crate) struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Server {
    pub(crate) fn start() -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                if of_thread.lock().ended {
                    break;
                }
                let shared = Arc::clone(&of_thread);
                std::thread::spawn(move || shared.serve(connection));
            }
        });
        Server { shared, address }
    }

    /// The bucket as a storage, which gives up soon.
    pub(crate) fn storage(&self) -> ObjectStorage {
        self.storage_with(10)
    }

    pub(crate) fn storage_with(&self, retries: usize) -> ObjectStorage {
        let backoff =
            BackoffConfig { init_backoff: Duration::from_millis(1), max_backoff: Duration::from_millis(5), base: 2.0 };
        let retry = RetryConfig { backoff, max_retries: retries, retry_timeout: Duration::from_secs(60) };
        with_tls();
        let store = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_endpoint(format!("http://{}", self.address))
            .with_allow_http(true)
            .with_access_key_id("id")
            .with_secret_access_key(SECRET)
            .with_token(TOKEN)
            .with_retry(retry)
            .build()
            .unwrap();
        ObjectStorage::new(Arc::new(store)).deadline(Duration::from_secs(30))
    }

    /// The URL of an object for clients of plain HTTP.
    pub(crate) fn url(&self, key: &str) -> String {
        format!("http://{}/bucket/{key}", self.address)
    }

    /// Writes an object. Each write has a tag of its own.
    pub(crate) fn put(&self, key: &str, bytes: &[u8]) {
        let mut state = self.shared.lock();
        state.written += 1;
        let object = Object { bytes: Arc::new(bytes.to_owned()), tag: format!("\"tag-{}\"", state.written) };
        state.objects.insert(key.to_owned(), object);
    }

    pub(crate) fn delete(&self, key: &str) {
        self.shared.lock().objects.remove(key);
    }

    /// Answers the next requests for bytes by these faults, one each.
    pub(crate) fn misbehave(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().faults = faults.into_iter().collect();
    }

    /// The same for requests for what an object is whose key ends so.
    pub(crate) fn misbehave_when_asked(&self, of: &'static str, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().head_faults = (of, faults.into_iter().collect());
    }

    /// Has tags be weak.
    pub(crate) fn weaken_tags(&self) {
        self.shared.lock().weak = true;
    }

    /// Lets nobody list.
    pub(crate) fn unlist(&self) {
        self.shared.lock().unlisted = true;
    }

    pub(crate) fn ignore_tags(&self) {
        self.shared.lock().ignores_tags = true;
    }

    /// Has requests for bytes of weights wait until there are so many; a test fails that waits in vain.
    pub(crate) fn gate(&self, requests: usize) {
        self.shared.lock().gate = requests;
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.shared.lock().asked.clone()
    }

    pub(crate) fn forget(&self) {
        self.shared.lock().asked.clear();
    }

    /// Waits until so many requests were made.
    pub(crate) fn wait_for(&self, requests: usize) {
        let wait = self
            .shared
            .changed
            .wait_timeout_while(self.shared.lock(), Duration::from_secs(20), |state| state.asked.len() < requests);
        assert!(!wait.unwrap().1.timed_out(), "fewer than {requests} requests were made");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        // Wakes the thread that listens.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    fn serve(&self, mut connection: TcpStream) {
        let mut bytes = Vec::new();
        loop {
            let Some(length) = bytes.windows(4).position(|end| end == b"\r\n\r\n") else {
                let mut more = [0; 4096];
                match connection.read(&mut more) {
                    Ok(count) if count > 0 => bytes.extend_from_slice(&more[..count]),
                    _ => return,
                }
                continue;
            };
            let head: Vec<u8> = bytes.drain(..length + 4).collect();
            if self.answer(&String::from_utf8_lossy(&head), &mut connection).is_none() {
                return;
            }
        }
    }

    /// Answers a request. `None` ends the connection.
    fn answer(&self, head: &str, to: &mut TcpStream) -> Option<()> {
        let mut words = head.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?);
        let header = |name: &str| {
            let found = head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")));
            found.map(|line| line[name.len() + 1..].trim().to_owned())
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if query.contains("list-type=2") {
            return self.list(query, to);
        }
        let key = path.strip_prefix("/bucket/").unwrap_or(path).to_owned();
        let asked = header("range").and_then(|range| {
            let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(from.parse().ok()?..to.parse::<usize>().ok()? + 1)
        });
        let (object, fault) = {
            let mut state = self.lock();
            state.asked.push(Asked { method: method.clone(), key: key.clone(), range: asked.clone() });
            self.changed.notify_all();
            if method == "GET" && state.gate > 0 && key.ends_with(".safetensors") {
                state.waiting += 1;
                self.changed.notify_all();
                let gate = state.gate;
                let (passed, late) = self
                    .changed
                    .wait_timeout_while(state, Duration::from_secs(20), |state| state.waiting < gate && state.gate > 0)
                    .unwrap();
                assert!(!late.timed_out(), "fewer than {gate} requests at a time");
                state = passed;
            }
            let fault = match &mut *state {
                State { faults, .. } if method == "GET" => faults.pop_front(),
                State { head_faults: (of, faults), .. } if key.ends_with(*of) => faults.pop_front(),
                _ => None,
            };
            let ignores = state.ignores_tags;
            let mut object = state.objects.get(&key).cloned();
            if let Some(object) = object.as_mut().filter(|_| state.weak) {
                object.tag = format!("W/{}", object.tag);
            }
            let fault = fault.or((object.is_none() && state.unlisted).then_some(Fault::Status(403)));
            let wanted = header("if-match").filter(|_| !ignores);
            let other = object
                .as_ref()
                .zip(wanted)
                .is_some_and(|(object, wanted)| object.tag != wanted || wanted.starts_with("W/"));
            (object, if other { Some(Fault::Status(412)) } else { fault })
        };
        if let Some(Fault::Status(status)) = fault {
            let sent = header("authorization").unwrap_or_default();
            let body = format!(
                "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>{sent} {SECRET} {TOKEN}</Message></Error>"
            );
            return respond(to, &format!("{status} Some Reason"), "", body.as_bytes(), &method);
        }
        let Some(Object { bytes, tag }) = object else {
            return respond(to, "404 Not Found", "", b"<Error><Code>NoSuchKey</Code></Error>", &method);
        };
        let total = bytes.len();
        let (status, range) = match asked {
            Some(range) if range.start >= total => return respond(to, "416 Range Not Satisfiable", "", b"", &method),
            Some(range) => ("206 Partial Content", range.start..range.end.min(total)),
            None => ("200 OK", 0..total),
        };
        let more = format!(
            "ETag: {tag}\r\nLast-Modified: Tue, 01 Dec 2026 00:00:00 GMT\r\nContent-Range: bytes {}-{}/{total}\r\n",
            range.start,
            range.end.max(1) - 1
        );
        let body = &bytes[range];
        match fault {
            None | Some(Fault::Status(_)) => respond(to, status, &more, body, &method),
            Some(Fault::Short) => respond(to, status, &more, &body[..body.len() / 2], &method),
            Some(Fault::Long) => respond(to, status, &more, &[body, b"more"].concat(), &method),
            Some(Fault::Silence) => self.hold(),
            Some(Fault::Trickle) => {
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}\r\n", body.len());
                to.write_all(head.as_bytes()).ok()?;
                for few in body.chunks(64) {
                    to.write_all(few).ok()?;
                    std::thread::sleep(Duration::from_millis(10));
                }
                Some(())
            }
            Some(fault) => {
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}\r\n", body.len());
                to.write_all(head.as_bytes()).ok()?;
                to.write_all(&body[..body.len() / 2]).ok()?;
                to.flush().ok()?;
                if fault == Fault::Stall { self.hold() } else { None }
            }
        }
    }

    /// Waits for the end of the server.
    fn hold(&self) -> Option<()> {
        drop(self.changed.wait_while(self.lock(), |state| !state.ended));
        None
    }

    fn list(&self, query: &str, to: &mut TcpStream) -> Option<()> {
        let value = |name: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}=")));
            found.unwrap_or_default().replace("%2F", "/")
        };
        let prefix = value("prefix");
        let mut state = self.lock();
        if state.unlisted {
            return respond(to, "403 Forbidden", "", b"<Error><Code>AccessDenied</Code></Error>", "GET");
        }
        state.asked.push(Asked { method: "LIST".to_owned(), key: prefix.clone(), range: None });
        self.changed.notify_all();
        let (mut contents, mut folders) = (String::new(), std::collections::BTreeSet::new());
        for (key, Object { bytes, tag }) in &state.objects {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            match rest.split_once('/') {
                Some((folder, _)) => drop(folders.insert(format!("{prefix}{folder}/"))),
                None => {
                    contents += &format!(
                        "<Contents><Key>{key}</Key><Size>{}</Size><ETag>{tag}</ETag>\
                     <LastModified>2026-12-01T00:00:00.000Z</LastModified></Contents>",
                        bytes.len()
                    );
                }
            }
        }
        drop(state);
        let folders: String = folders
            .iter()
            .map(|folder| format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"))
            .collect();
        let body = format!("<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{folders}</ListBucketResult>");
        respond(to, "200 OK", "", body.as_bytes(), "GET")
    }
}

fn respond(to: &mut TcpStream, status: &str, more: &str, body: &[u8], method: &str) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}\r\n", body.len());
    to.write_all(head.as_bytes()).ok()?;
    if method != "HEAD" {
        to.write_all(body).ok()?;
    }
    to.flush().ok()
}
