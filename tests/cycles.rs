//! Many cycles of load, stream and unload: no memory stays, whoever counts it. Alone in its process, whose memory it
//! measures.

mod support;

use std::sync::Arc;

use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::{Loader, ModelCache, Registry, Retention, Streamer};

/// Bytes of this process in memory, as the system counts them; none where it does not tell.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

#[test]
fn cycles_leave_nothing_behind() {
    const WARM_UP: usize = 100;
    let registry = Registry::described(machine(), Clock::Wall);
    let subject = Subject::patched(&llama(3, 48), 50);
    let plan = subject.planner(&machine(), "cuda:0,20kb;xpu:0,40kb;disk,20kb;cpu,*").depth(1).plan().unwrap();
    let cache = ModelCache::new();
    let mut warm = None;
    for cycle in 0..WARM_UP + 300 {
        let loader = Loader::new(&registry).workers(2);
        let model = Arc::new(loader.load(&subject.weights, &plan).unwrap());
        let retention = if cycle % 3 == 0 { Retention::Keep } else { Retention::Unload };
        cache.insert(format!("model {}", cycle % 2), Arc::clone(&model), retention);
        let mut streamer = Streamer::new(&model).unwrap();
        for layer in model.layout().layer_ids() {
            drop(streamer.layer(layer).unwrap());
        }
        drop((streamer, model));
        match cycle % 7 {
            6 => drop(cache.unload_everything()),
            _ => drop(cache.full_cleanup(&registry).unwrap()),
        }
        if cycle == WARM_UP {
            cache.unload_everything();
            warm = resident_bytes();
        }
    }
    cache.unload_everything();
    comes_back(&registry);
    if let (Some(warm), Some(now)) = (warm, resident_bytes()) {
        let grown = now.saturating_sub(warm);
        assert!(grown <= 2 << 20, "{grown} bytes more than after {WARM_UP} cycles");
    }
}
