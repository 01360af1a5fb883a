//! The order in which layers are asked for: at first that of the model, from the second pass on that of the pass before.

use std::collections::HashSet;

use crate::checkpoint::{LayerId, Per};

/// What comes next, and how soon. Only streamed layers count.
#[derive(Clone, Debug)]
pub(super) struct Order {
    model: Cycle,
    /// For each layer how many streamed ones come before it in the model.
    before: Per<LayerId, usize>,
    /// The layers of a pass as they were asked for, once it was whole, for as long as they are asked for in that order.
    learned: Option<Cycle>,
    /// How many turns have to be as learned until another one that is not is borne with.
    strict: usize,
    /// The layers asked for since nothing is known, each once where it was asked for several times in a row.
    seen: Vec<LayerId>,
    /// The place of what comes next in the cycle that is followed.
    next: usize,
    /// The layer that has its turn, if it is streamed.
    current: Option<LayerId>,
}

/// Layers that follow each other, around the end to the beginning.
#[derive(Clone, Debug, Default)]
struct Cycle {
    layers: Vec<LayerId>,
    /// Each layer with each of its places, sorted.
    places: Vec<(LayerId, usize)>,
    /// Whether any layer stands there twice.
    repeats: bool,
}

/// A pass may ask for a layer several times; one that seems longer than so many times the streamed layers is none.
const LONGEST: usize = 4;

impl Order {
    /// The order of a model of which these layers are streamed.
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

    /// `layer` is asked for.
    pub(super) fn turn(&mut self, layer: LayerId) {
        let number = self.number(layer);
        if number.is_some() && self.current == Some(layer) {
            return;
        }
        self.current = number.map(|_| layer);
        if number.is_none() {
            // It says nothing of the streamed ones, but in the model's own order of what comes after it.
            self.next = if self.learned.is_some() { self.next } else { self.before[layer] };
            return;
        }
        match &self.learned {
            Some(cycle) if cycle.layers[self.next % cycle.layers.len()] == layer => {
                (self.next, self.strict) = (self.next % cycle.layers.len() + 1, self.strict.saturating_sub(1));
            }
            // A pass that was not finished, and begins anew; or a layer that was left out.
            Some(cycle) if self.strict == 0 && cycle.place_of(layer).is_some() => {
                (self.next, self.strict) = (cycle.place_of(layer).map_or(0, |place| place + 1), 2 * cycle.layers.len());
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

    /// Follows the model, and takes down what is asked for until the first of it comes again.
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

    /// Which of the streamed layers of the model this one is, from 0.
    pub(super) fn number(&self, layer: LayerId) -> Option<usize> {
        let number = self.before[layer];
        (self.model.layers.get(number) == Some(&layer)).then_some(number)
    }

    /// What the next `count` turns after this one are of, each layer once and without the one that has its turn.
    pub(super) fn ahead(&self, count: usize) -> impl Iterator<Item = LayerId> + use<'_> {
        let (cycle, next) = (self.cycle(), self.next);
        let at = move |ahead| cycle.layers[(next + ahead) % cycle.layers.len()];
        let mut known = HashSet::new();
        let new = move |layer: &LayerId| self.current != Some(*layer) && (!cycle.repeats || known.insert(*layer));
        (0..cycle.layers.len().min(count)).map(at).filter(new)
    }

    /// How many turns of streamed layers it takes until `layer` has its own: 0 for the one that has it, and almost for ever
    /// for one that nobody asks for.
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
        let mut places: Vec<_> = layers.iter().copied().enumerate().map(|(place, layer)| (layer, place)).collect();
        places.sort_unstable();
        let repeats = places.windows(2).any(|pair| pair[0].0 == pair[1].0);
        Cycle { layers, places, repeats }
    }

    /// The first place of `layer`.
    fn place_of(&self, layer: LayerId) -> Option<usize> {
        let first = self.places.get(self.places.partition_point(|&(other, _)| other < layer));
        first.filter(|(other, _)| *other == layer).map(|(_, place)| *place)
    }

    /// How many layers come before `layer` from the place `next` on.
    fn turns_until(&self, layer: LayerId, next: usize) -> Option<usize> {
        let next = if next >= self.layers.len() { 0 } else { next };
        let later = self.places.get(self.places.partition_point(|&place| place < (layer, next)));
        match later.filter(|(other, _)| *other == layer) {
            Some((_, place)) => Some(place - next),
            None => self.place_of(layer).map(|place| place + self.layers.len() - next),
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
