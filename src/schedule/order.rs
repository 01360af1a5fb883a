//! The predicted order of layers: in the first pass the model's order, from the second pass on the order of the previous pass.
//!
//! One layer out of order in two passes is tolerated (a pass that was not finished, a layer that was left out). At a second
//! one the order is forgotten and learned again.

use std::collections::HashSet;

use crate::checkpoint::{LayerId, Per};

/// Predicts which layers come next, and how soon. Only streamed layers count.
#[derive(Clone, Debug)]
pub(super) struct Order {
    model: Cycle,
    /// For each layer, the number of streamed layers before it in the model.
    before: Per<LayerId, usize>,
    /// The order of a complete pass, for as long as layers are asked for in that order.
    learned: Option<Cycle>,
    /// The number of turns that must follow the learned order before another deviation is tolerated.
    strict: usize,
    /// The layers asked for since learning began. A layer asked for several times in a row appears once.
    seen: Vec<LayerId>,
    /// The index of the next layer in the current cycle.
    next: usize,
    /// The current layer, if it is streamed.
    current: Option<LayerId>,
}

/// A cyclic sequence of layers.
#[derive(Clone, Debug, Default)]
struct Cycle {
    layers: Vec<LayerId>,
    /// Each layer with each of its indices, sorted.
    indices: Vec<(LayerId, usize)>,
    /// Whether any layer appears twice.
    repeats: bool,
}

/// A pass may ask for a layer several times. A sequence longer than this many times the number of streamed layers is not taken
/// for a pass.
const LONGEST: usize = 4;

impl Order {
    /// The order for a model with these streamed layers.
    pub(super) fn new(streamed: &Per<LayerId, bool>) -> Order {
        let mut layers = Vec::new();
        let passed = |(layer, &streamed): (LayerId, &bool)| {
            let before = layers.len();
            layers.extend(streamed.then_some(layer));
            before
        };
        let before = streamed.iter().map(passed).collect();
        Order { model: Cycle::new(layers), before, learned: None, strict: 0, seen: Vec::new(), next: 0, current: None }
    }

    /// Records that `layer` is asked for.
    pub(super) fn turn(&mut self, layer: LayerId) {
        let number = self.number(layer);
        if number.is_some() && self.current == Some(layer) {
            return;
        }
        self.current = number.map(|_| layer);
        if number.is_none() {
            // A resident layer gives no hint, except in the model's order about the layers after it.
            self.next = if self.learned.is_some() { self.next } else { self.before[layer] };
            return;
        }
        match &self.learned {
            Some(cycle) if cycle.layers[self.next % cycle.layers.len()] == layer => {
                (self.next, self.strict) = (self.next % cycle.layers.len() + 1, self.strict.saturating_sub(1));
            }
            // An unfinished pass that starts again, or a skipped layer.
            Some(cycle) if self.strict == 0 && cycle.index_of(layer).is_some() => {
                (self.next, self.strict) = (cycle.index_of(layer).map_or(0, |index| index + 1), 2 * cycle.layers.len());
            }
            Some(_) => {
                tracing::debug!(
                    layer = layer.index(),
                    "layers are asked for in another order than before, which is forgotten"
                );
                self.start_over(layer);
            }
            None => self.learn(layer),
        }
    }

    /// Follows the model's order, and records the layers asked for until the first one is asked for again.
    fn learn(&mut self, layer: LayerId) {
        if self.seen.first() == Some(&layer) {
            self.learned = Some(Cycle::new(std::mem::take(&mut self.seen)));
            self.next = 1;
        } else if self.seen.len() >= LONGEST * self.model.layers.len() {
            self.start_over(layer);
        } else {
            self.seen.push(layer);
            self.next = self.before[layer] + 1;
        }
    }

    fn start_over(&mut self, layer: LayerId) {
        (self.learned, self.strict) = (None, 0);
        self.seen.clear();
        self.learn(layer);
    }

    /// The number of a layer among the streamed layers of the model, from 0. `None` if it is not streamed.
    pub(super) fn number(&self, layer: LayerId) -> Option<usize> {
        let number = self.before[layer];
        (self.model.layers.get(number) == Some(&layer)).then_some(number)
    }

    /// The layers of the next `count` turns, each once and without the current layer.
    pub(super) fn ahead(&self, count: usize) -> impl Iterator<Item = LayerId> + use<'_> {
        let (cycle, next) = (self.cycle(), self.next);
        let at = move |ahead| cycle.layers[(next + ahead) % cycle.layers.len()];
        let mut known = HashSet::new();
        let new = move |layer: &LayerId| self.current != Some(*layer) && (!cycle.repeats || known.insert(*layer));
        (0..cycle.layers.len().min(count)).map(at).filter(new)
    }

    /// The number of turns of streamed layers until `layer` is asked for: 0 for the current layer, and almost the largest
    /// number for a layer that is never asked for.
    pub(super) fn distance(&self, layer: LayerId) -> usize {
        match self.current == Some(layer) {
            true => 0,
            false => self.cycle().turns_until(layer, self.next).map_or(usize::MAX - 1, |turns| turns + 1),
        }
    }

    fn cycle(&self) -> &Cycle {
        self.learned.as_ref().unwrap_or(&self.model)
    }
}

impl Cycle {
    fn new(layers: Vec<LayerId>) -> Cycle {
        let mut indices: Vec<_> = layers.iter().copied().enumerate().map(|(index, layer)| (layer, index)).collect();
        indices.sort_unstable();
        let repeats = indices.windows(2).any(|pair| pair[0].0 == pair[1].0);
        Cycle { layers, indices, repeats }
    }

    /// The first index of `layer`.
    fn index_of(&self, layer: LayerId) -> Option<usize> {
        let first = self.indices.get(self.indices.partition_point(|&(other, _)| other < layer));
        first.filter(|(other, _)| *other == layer).map(|(_, index)| *index)
    }

    /// The number of layers before `layer`, counted from the index `next`.
    fn turns_until(&self, layer: LayerId, next: usize) -> Option<usize> {
        let next = if next >= self.layers.len() { 0 } else { next };
        let later = self.indices.get(self.indices.partition_point(|&entry| entry < (layer, next)));
        match later.filter(|(other, _)| *other == layer) {
            Some((_, index)) => Some(index - next),
            None => self.index_of(layer).map(|index| index + self.layers.len() - next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An order of a model of five streamed layers once these were asked for in two passes and the first of a third.
    fn learned(pass: &[usize]) -> Order {
        let mut order = Order::new(&(0..5).map(|_| true).collect());
        let turns = pass.repeat(2);
        turns.iter().chain(pass.first()).for_each(|&at| order.turn(LayerId::new(at)));
        order
    }

    #[test]
    fn distances_are_counted_around_the_end() {
        for pass in [&[0, 1, 2, 3, 4][..], &[3, 0, 4, 1, 2], &[0, 1, 2, 1, 3], &[4, 2, 4, 0]] {
            let mut order = learned(pass);
            // Wherever in the pass it stands.
            for at in 0..pass.len() {
                let follow: Vec<usize> = (1..=pass.len()).map(|turns| pass[(at + turns) % pass.len()]).collect();
                for layer in 0..5 {
                    let turns = follow.iter().position(|&next| next == layer).map(|turns| turns + 1);
                    let wanted = if layer == pass[at] { 0 } else { turns.unwrap_or(usize::MAX - 1) };
                    assert_eq!(order.distance(LayerId::new(layer)), wanted, "{pass:?}: {layer} after the turn at {at}");
                }
                order.turn(LayerId::new(follow[0]));
            }
        }
    }

    #[test]
    fn a_layer_that_comes_twice_is_ahead_once() {
        let order = learned(&[0, 1, 2, 1, 0, 3]);
        let ahead = |count: usize| order.ahead(count).map(LayerId::index).collect::<Vec<_>>();
        assert_eq!([1, 2, 3, 5, 9].map(ahead), [vec![1], vec![1, 2], vec![1, 2], vec![1, 2, 3], vec![1, 2, 3]]);
    }
}
