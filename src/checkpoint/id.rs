//! Ids of tensors, modules and layers: indices in a layout, each kind with a separate type.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// It serialises as that number. An id of another layout may refer to something else in this one, or to nothing: then
        /// functions that take an id report that there is no such thing.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(usize);

        impl $name {
            /// The id with this index, from 0.
            pub const fn new(index: usize) -> $name {
                $name(index)
            }

            /// The index, from 0.
            pub const fn index(self) -> usize {
                self.0
            }
        }

        impl Id for $name {
            fn new(index: usize) -> $name {
                $name(index)
            }

            fn place(self) -> usize {
                self.0
            }
        }
    };
}

id! {
    /// A tensor of a layout, by its index in [`Layout::tensors`](super::Layout::tensors).
    TensorId
}

id! {
    /// A module of a layout, by its index in [`Layout::modules`](super::Layout::modules).
    ModuleId
}

id! {
    /// A layer of a layout, by its index in [`Layout::layers`](super::Layout::layers).
    LayerId
}

/// An id of any of these.
pub(crate) trait Id: Copy {
    /// The id with this index.
    fn new(index: usize) -> Self;

    /// The index.
    fn place(self) -> usize;
}

/// The ids of so many things, in order.
pub(super) fn ids<I: Id>(count: usize) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I> {
    (0..count).map(I::new)
}

/// A value for each tensor, module or layer of a layout, found by the ids of that layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Per<I, T>(Vec<T>, PhantomData<I>);

impl<I: Id, T> Per<I, T> {
    /// The same value for each of `count`.
    pub(crate) fn all(count: usize, value: T) -> Per<I, T>
    where
        T: Clone,
    {
        std::iter::repeat_n(value, count).collect()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The ids, in order.
    pub(crate) fn ids(&self) -> impl DoubleEndedIterator<Item = I> + ExactSizeIterator + Clone + use<I, T> {
        ids(self.len())
    }

    /// The values, in order.
    pub(crate) fn values(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    /// The values with their ids, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        self.ids().zip(self.values())
    }

    /// The value of one id; `None` if the id is out of range.
    pub(crate) fn get(&self, id: I) -> Option<&T> {
        self.0.get(id.place())
    }
}

impl<I, T> Default for Per<I, T> {
    fn default() -> Per<I, T> {
        Per(Vec::new(), PhantomData)
    }
}

impl<I, T> FromIterator<T> for Per<I, T> {
    fn from_iter<V: IntoIterator<Item = T>>(values: V) -> Per<I, T> {
        Per(values.into_iter().collect(), PhantomData)
    }
}

impl<I: Id, T> Index<I> for Per<I, T> {
    type Output = T;

    fn index(&self, id: I) -> &T {
        &self.0[id.place()]
    }
}

impl<I: Id, T> IndexMut<I> for Per<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.0[id.place()]
    }
}
