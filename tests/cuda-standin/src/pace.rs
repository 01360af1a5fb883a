//! How long copies take: every direction of a link is an engine that runs one copy after the other.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::config::{Config, Link};
use crate::sync::lock;

/// The way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    ToDevice(usize),
    ToHost(usize),
    Within,
    Between(usize, usize),
}

/// What copies of one direction take turns on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Engine {
    Up(usize),
    Down(usize),
    Peer(usize, usize),
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Engine::Up(device) => write!(f, "to device {device}"),
            Engine::Down(device) => write!(f, "from device {device}"),
            Engine::Peer(from, to) => write!(f, "device {from} to device {to}"),
        }
    }
}

/// When each engine is free again.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    free_at: Mutex<HashMap<Engine, Instant>>,
    slowed: Mutex<Option<Link>>,
}

impl Engines {
    /// Sets the pace of all links between host and devices, against the configuration.
    pub(crate) fn slow(&self, link: Option<Link>) {
        *lock(&self.slowed) = link;
    }

    /// The time a copy takes its engine for, when it could start at `ready`; none when it is not paced.
    pub(crate) fn reserve(
        &self,
        config: &Config,
        route: Route,
        bytes: usize,
        ready: Instant,
    ) -> Option<(Instant, Instant)> {
        let (engine, link) = self.engine(config, route)?;
        if !link.is_paced() {
            return None;
        }
        let mut free_at = lock(&self.free_at);
        let start = free_at.get(&engine).map_or(ready, |&free| free.max(ready));
        let end = start + Duration::from_nanos(link.nanos(bytes));
        free_at.insert(engine, end);
        Some((start, end))
    }

    /// What a copy takes its turn on, and its pace there; none within a device.
    pub(crate) fn engine(&self, config: &Config, route: Route) -> Option<(Engine, Link)> {
        let slowed = *lock(&self.slowed);
        match route {
            Route::Within => None,
            Route::Between(from, to) => Some((Engine::Peer(from, to), config.peer(from, to).unwrap_or_default())),
            Route::ToDevice(index) => Some((Engine::Up(index), slowed.unwrap_or(config.devices[index].to_device))),
            Route::ToHost(index) => {
                let device = &config.devices[index];
                let engine = if device.copy_engines < 2 { Engine::Up(index) } else { Engine::Down(index) };
                Some((engine, slowed.unwrap_or(device.to_host)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_engine_serves_one_copy_at_a_time() {
        let mut config = Config::default().links(Link::new(1_000_000, 1000));
        let (engines, now) = (Engines::default(), Instant::now());
        let micros = |n| Duration::from_micros(n);
        let first = engines.reserve(&config, Route::ToDevice(0), 1000, now).unwrap();
        assert_eq!(first, (now, now + micros(1001)));
        let second = engines.reserve(&config, Route::ToDevice(0), 1000, now).unwrap();
        assert_eq!(second, (now + micros(1001), now + micros(2002)));
        assert_eq!(engines.reserve(&config, Route::ToHost(0), 1000, now).unwrap().0, now);
        config.devices[0].copy_engines = 1;
        assert_eq!(engines.reserve(&config, Route::ToHost(0), 1000, now).unwrap().0, now + micros(2002));
    }
}
