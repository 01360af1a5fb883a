//! The example `free_server` as a client sees it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The example beside the folder of this test, built if it is not there.
fn example() -> PathBuf {
    let profile = std::env::current_exe().unwrap().parent().and_then(Path::parent).unwrap().to_owned();
    let path = profile.join("examples").join(format!("free_server{}", std::env::consts::EXE_SUFFIX));
    if !path.is_file() {
        let release = if profile.ends_with("release") { &["--release"][..] } else { &[] };
        let cargo =
            Command::new(env!("CARGO")).args(["build", "-q", "--example", "free_server"]).args(release).status();
        assert!(cargo.unwrap().success(), "the example does not build");
    }
    path
}

struct Server {
    child: Child,
    address: String,
    output: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start(args: &[&str]) -> Server {
        let devices = ["--device", "cuda:0=1mb", "--device", "cpu=64mb", "--port", "0", "--seconds", "60"];
        let mut child = Command::new(example()).args(devices).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect("the address").to_owned();
        assert!(address.starts_with("127.0.0.1:"), "{line}");
        Server { child, address, output }
    }

    /// Sends these bytes; the answer's status.
    fn send(&self, request: &[u8]) -> u16 {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server may answer, and stop reading, before all of it is sent.
        drop(stream.write_all(request));
        drop(stream.shutdown(std::net::Shutdown::Write));
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
        assert_eq!(length.parse(), Ok(body.len()));
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn request(&self, method: &str, path: &str, body: &str) -> u16 {
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n", self.address, body.len());
        self.send(&[head.as_bytes(), body.as_bytes()].concat())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn a_client_frees_memory_between_two_jobs() {
    let mut server = Server::start(&["--cleanups", "2"]);
    assert_eq!(server.request("POST", "/free", "{}"), 200, "asks for nothing");
    for body in [r#"{"unload_models":true}"#, r#"{"unload_models":true,"free_memory":true}"#] {
        assert_eq!(server.request("POST", "/free", body), 200);
        let mut line = String::new();
        server.output.read_line(&mut line).unwrap();
        assert_eq!(line.contains("allocator caches"), body.contains("free_memory"), "{line}");
        assert!(!line.contains("unloaded kept"), "{line}");
    }
    assert!(server.child.wait().unwrap().success(), "it ends after two clean-ups");
}

#[test]
fn what_is_no_request_is_refused() {
    let server = Server::start(&[]);
    for (method, path, body, status) in [
        ("POST", "/free", "", 400),
        ("POST", "/free", "{", 400),
        ("POST", "/free", "[true,true]", 400),
        ("POST", "/free", "true", 400),
        ("POST", "/free", r#"{"unload_models":1}"#, 400),
        ("POST", "/free", r#"{"free_memory":"true"}"#, 400),
        ("POST", "/free", r#"{"free_memory":null}"#, 400),
        ("POST", "/free", r#"{"unload":true}"#, 400),
        ("GET", "/free", "", 405),
        ("PUT", "/free", "{}", 405),
        ("POST", "/", "{}", 404),
        ("POST", "/free/all", "{}", 404),
        ("GET", "/favicon.ico", "", 404),
    ] {
        assert_eq!(server.request(method, path, body), status, "{method} {path} {body}");
    }
    let padded = |bytes: usize| format!("{{}}{}", " ".repeat(bytes - 2));
    assert_eq!(server.request("POST", "/free", &padded(64 << 10)), 200, "64 KiB are allowed");
    assert_eq!(server.request("POST", "/free", &padded((64 << 10) + 1)), 413);
    for (head, status) in [
        ("POST /free HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
        ("POST /free HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        ("POST /free HTTP/1.1\r\nContent-Length: 10\r\n\r\n{}", 400),
        ("POST /free HTTP/1.1\r\n\r\n{}", 411),
        ("POST /free HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 411),
        ("POST /free HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        ("no request at all\r\n\r\n", 400),
        ("", 400),
    ] {
        assert_eq!(server.send(head.as_bytes()), status, "{head:?}");
    }
    let long = format!("POST /free HTTP/1.1\r\nX: {}", "x".repeat(20 << 10));
    assert_eq!(server.send(long.as_bytes()), 431);
    assert_eq!(server.request("POST", "/free", "{}"), 200, "it still answers");
}

#[test]
fn a_port_that_is_taken_is_an_error() {
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    let output = Command::new(example()).args(["--port", port, "--device", "cpu=64mb"]).output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.starts_with("error: cannot bind 127.0.0.1:") && line.trim_end().lines().count() == 1, "{line}");
}
