//! What a store may do to a read.

use std::io::ErrorKind as IoKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensor_offload::backend::Clock;
use tensor_offload::error::FileFault;
use tensor_offload::load::Cancel;
use tensor_offload::store::ObjectStorage;
use tensor_offload::{Adapter, Checkpoint, Error, Loader, Planner, Registry, Weights};
use tracing_subscriber::layer::SubscriberExt;

use crate::contents;
use crate::server::{Fault, SECRET, Server, TOKEN};
use crate::support::*;

const MODEL: &str = "model.safetensors";

/// A server with a model, the storage, and the open model.
fn opened(seed: u64) -> (Server, Vec<u8>, Checkpoint) {
    let (server, file) = (Server::start(), safetensors(&blocks(&[1 << 20, 3 << 20]), seed));
    server.put(MODEL, &file);
    let checkpoint = Checkpoint::open_in(&server.storage(), MODEL).unwrap();
    (server, file, checkpoint)
}

fn first_error(checkpoint: &Checkpoint) -> Error {
    let read = |id| checkpoint.read(id, &mut vec![0; checkpoint.layout().tensor(id).unwrap().bytes as usize]).err();
    checkpoint.layout().tensor_ids().find_map(read).expect("every tensor was read")
}

fn fault(error: Error) -> (FileFault, Option<String>) {
    match error {
        Error::File { fault, tensor, .. } => (*fault, tensor),
        other => panic!("{other}"),
    }
}

fn io_kind(error: &Error) -> IoKind {
    match error {
        Error::Io { source, .. } => source.kind(),
        other => panic!("{other}"),
    }
}

#[test]
fn what_a_store_mends_is_no_error() {
    let (server, file, checkpoint) = opened(1);
    let expected = contents(&Checkpoint::from_bytes("model", file).unwrap());
    for faults in [
        vec![Fault::Status(503); 5],
        vec![Fault::Status(500), Fault::Status(429), Fault::Break],
        vec![Fault::Break; 6],
        vec![Fault::Break, Fault::Status(503), Fault::Break],
    ] {
        server.misbehave(faults.clone());
        assert!(contents(&checkpoint) == expected, "{faults:?}");
    }
    server.misbehave(vec![Fault::Status(503); 3]);
    assert!(contents(&Checkpoint::open_in(&server.storage(), MODEL).unwrap()) == expected);
}

#[test]
fn what_it_does_not_mend_is_one_with_the_status() {
    let (server, _, _) = opened(2);
    let checkpoint = Checkpoint::open_in(&server.storage_with(2), MODEL).unwrap();
    server.misbehave(vec![Fault::Status(503); 100]);
    let error = first_error(&checkpoint);
    assert!(error.to_string().contains("503") && error.to_string().contains("SlowDown"), "{error}");
    server.misbehave(vec![Fault::Break; 100]);
    assert!(matches!(first_error(&checkpoint), Error::Io { .. }));
    server.misbehave(vec![Fault::Status(403); 100]);
    assert_eq!(io_kind(&first_error(&checkpoint)), IoKind::PermissionDenied);
}

#[test]
fn an_object_that_is_replaced_has_changed() {
    for ignores_tags in [false, true] {
        // Of the same length, longer, shorter, and so short that ranges lie beyond its end.
        for sizes in [[1 << 20, 3 << 20], [1 << 20, 4 << 20], [1 << 20, 2 << 20], [64, 64]] {
            let (server, _, checkpoint) = opened(3);
            if ignores_tags {
                server.ignore_tags();
            }
            server.put(MODEL, &safetensors(&blocks(&sizes), 4));
            let (fault, tensor) = fault(first_error(&checkpoint));
            assert_eq!(fault, FileFault::Changed, "{sizes:?}");
            assert!(tensor.is_some());
        }
    }
}

#[test]
fn a_body_of_another_length_is_truncated() {
    let (server, file, checkpoint) = opened(5);
    for wrong in [Fault::Short, Fault::Long] {
        server.misbehave(vec![wrong; 100]);
        let (fault, _) = fault(first_error(&checkpoint));
        let FileFault::Truncated { expected, actual } = fault else { panic!("{fault}") };
        assert!(expected == file.len() as u64 && actual < expected, "{wrong:?}: {actual} of {expected}");
    }
}

#[test]
fn an_object_that_is_deleted_is_not_there() {
    let (server, _, checkpoint) = opened(6);
    server.delete(MODEL);
    let error = first_error(&checkpoint);
    assert_eq!(io_kind(&error), IoKind::NotFound);
    assert!(error.to_string().contains(MODEL), "{error}");
}

#[test]
fn a_store_that_goes_silent_is_given_up() {
    let (server, _, _) = opened(7);
    let storage = server.storage().deadline(Duration::from_millis(300));
    let checkpoint = Checkpoint::open_in(&storage, MODEL).unwrap();
    for silent in [Fault::Stall, Fault::Silence] {
        server.misbehave(vec![silent; 100]);
        let error = first_error(&checkpoint);
        assert!(matches!(&error, Error::TimedOut { after, .. } if *after == Duration::from_millis(300)), "{error}");
    }
    server.misbehave(vec![Fault::Silence; 100]);
    assert!(matches!(Checkpoint::open_in(&storage, MODEL), Err(Error::TimedOut { .. })));
}

/// The server takes longer than the test waits, so only cancelling ends the load.
#[test]
fn a_load_is_cancelled_within_a_range() {
    for silent in [Fault::Stall, Fault::Silence, Fault::Trickle] {
        let (server, _, checkpoint) = opened(8);
        server.misbehave(vec![silent; 100]);
        server.forget();
        let cancel = Cancel::new();
        let of_load = cancel.clone();
        let load = std::thread::spawn(move || {
            let machine = described(&["cpu=64mb,link=20", "cuda:0=24mb,link=10"]);
            let registry = Registry::described(machine, Clock::Wall);
            let weights = Weights::new(checkpoint);
            let planner = Planner::new(weights.layout(), registry.machine());
            let plan = planner.allocation("cuda:0,2mb;cpu,*".parse().unwrap()).plan().unwrap();
            let error = Loader::new(&registry).cancel(&of_load).load(&weights, &plan).unwrap_err();
            comes_back(&registry);
            error
        });
        server.wait_for(1);
        cancel.cancel();
        let error = without_hanging("a cancelled load".to_owned(), move || load.join().unwrap());
        assert!(matches!(error, Error::Cancelled { .. }), "{error}");
    }
}

/// Of several threads of a load, the error of the one that fails is that of the load.
#[test]
fn a_failure_ends_the_other_threads_of_a_load() {
    let (server, _, checkpoint) = opened(9);
    server.misbehave([Fault::Status(403)].into_iter().chain(vec![Fault::Stall; 100]));
    let load = std::thread::spawn(move || {
        let registry = Registry::described(described(&["cpu=64mb,link=20"]), Clock::Virtual);
        let weights = Weights::new(checkpoint);
        let plan = Planner::new(weights.layout(), registry.machine()).compute(CPU).plan().unwrap();
        Loader::new(&registry).workers(4).load(&weights, &plan).unwrap_err()
    });
    let error = without_hanging("a load that failed".to_owned(), move || load.join().unwrap());
    assert_eq!(io_kind(&error), IoKind::PermissionDenied);
}

/// Weak tags match nothing, so they are not sent, and tell a change even so.
#[test]
fn weak_tags_are_compared_and_not_sent() {
    let (server, file, _) = opened(12);
    server.weaken_tags();
    let checkpoint = Checkpoint::open_in(&server.storage(), MODEL).unwrap();
    assert!(contents(&checkpoint) == contents(&Checkpoint::from_bytes("model", file.clone()).unwrap()));
    server.put(MODEL, &file);
    assert_eq!(fault(first_error(&checkpoint)).0, FileFault::Changed);
}

/// Credentials that are good for objects alone: what is not there is refused then.
#[test]
fn a_file_opens_where_nobody_may_list() {
    let (server, file, _) = opened(13);
    server.unlist();
    let checkpoint = Checkpoint::open_in(&server.storage(), MODEL).unwrap();
    assert!(contents(&checkpoint) == contents(&Checkpoint::from_bytes("model", file).unwrap()));
    let other = Checkpoint::open_in(&server.storage(), "other.safetensors").unwrap_err();
    assert_eq!(io_kind(&other), IoKind::PermissionDenied);
}

/// A configuration changes what an adapter does, so it is not left out because the store is busy.
#[test]
fn an_adapter_is_not_opened_without_a_configuration_that_cannot_be_asked_for() {
    let server = Server::start();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora/");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        server.put(&format!("lora/{file}"), &std::fs::read(format!("{folder}{file}")).unwrap());
    }
    let (storage, path) = (server.storage_with(1), "lora/adapter_model.safetensors");
    Adapter::open_in(&storage, path, 1.0).unwrap();
    let busy = |of| {
        server.misbehave_when_asked(of, vec![Fault::Status(503); 20]);
        Adapter::open_in(&storage, path, 1.0).unwrap_err().to_string()
    };
    let error = busy("");
    assert!(error.contains("503"), "{error}");
    // Where nobody may list, it is asked for by itself.
    server.unlist();
    let error = busy("adapter_config.json");
    assert!(error.contains("adapter_config.json") && error.contains("503"), "{error}");
}

#[test]
fn the_web_serves_files_too() {
    let (server, file, _) = opened(10);
    let url = server.url(MODEL);
    let storage = ObjectStorage::from_url(&url).unwrap();
    let checkpoint = Checkpoint::open_in(&storage, &url).unwrap();
    assert_eq!(checkpoint.sources()[0].path().to_str(), Some(url.as_str()));
    assert!(contents(&checkpoint) == contents(&Checkpoint::from_bytes("model", file).unwrap()));
    let other = Checkpoint::open_in(&storage, server.url("other.safetensors")).unwrap_err();
    assert_eq!(io_kind(&other), IoKind::NotFound);
    assert!(other.to_string().contains("other.safetensors"), "{other}");
}

/// A store that never answers is likely called by a wrong name, so its error comes soon, and says why.
#[test]
fn a_store_that_is_not_there_is_not_waited_for() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{nobody}/model.safetensors");
    let error = Checkpoint::open_in(&ObjectStorage::from_url(&url).unwrap(), &url).unwrap_err();
    assert_eq!(io_kind(&error), IoKind::NotConnected);
    assert!(error.to_string().contains("refused"), "{error}");
}

/// One that is given up after a time says what it answered.
#[test]
fn what_a_busy_store_answers_is_in_the_error_of_a_deadline() {
    let (server, _, _) = opened(14);
    let url = server.url(MODEL);
    let storage = ObjectStorage::from_url(&url).unwrap().deadline(Duration::from_millis(400));
    let checkpoint = Checkpoint::open_in(&storage, &url).unwrap();
    server.misbehave(vec![Fault::Status(503); 1000]);
    let error = first_error(&checkpoint);
    assert!(matches!(&error, Error::TimedOut { .. }) && error.to_string().contains("503"), "{error}");
}

/// Everything that is logged, in all spans.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Log {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Fields<'l>(&'l mut String);
        impl tracing::field::Visit for Fields<'_> {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                *self.0 += &format!("{}={value:?} ", field.name());
            }
        }
        event.record(&mut Fields(&mut self.0.lock().unwrap()));
    }
}

#[test]
fn no_credential_is_in_an_error_or_a_log() {
    let log = Log::default();
    // Of the whole process, since the requests are made by threads of the library's own.
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(log.clone())).unwrap();
    let (server, _, _) = opened(11);
    let storage = server.storage_with(1).deadline(Duration::from_millis(500));
    let checkpoint = Checkpoint::open_in(&storage, MODEL).unwrap();
    let mut said = format!("{storage:?} {checkpoint:?} {:?}", checkpoint.sources());
    for status in [400, 401, 403, 404, 409, 412, 416, 429, 500, 503] {
        server.misbehave(vec![Fault::Status(status); 100]);
        for error in [first_error(&checkpoint), Checkpoint::open_in(&storage, MODEL).unwrap_err()] {
            said += &format!("{error} {error:?}\n");
            assert!(error.to_string().contains(MODEL), "{error}");
        }
    }
    for fault in [Fault::Stall, Fault::Silence, Fault::Short] {
        server.misbehave(vec![fault; 100]);
        let error = first_error(&checkpoint);
        said += &format!("{error} {error:?}\n");
    }
    said += &log.0.lock().unwrap();
    assert!(said.contains("503") && log.0.lock().unwrap().contains("backing off"));
    for secret in [SECRET, TOKEN, "Signature="] {
        assert!(!said.contains(secret), "{secret}: {said}");
    }
}
