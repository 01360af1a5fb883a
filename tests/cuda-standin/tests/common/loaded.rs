//! Calls of a vendor's library, found by name in the stand-in as a program finds them in the vendor's.
#![allow(unused_macros, unused_imports, reason = "only the test files of the vendors use it")]

/// Declares a table of calls: each a method that returns the vendor's result.
macro_rules! loaded {
    ($table:ident { $(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)* }) => {
        #[allow(non_snake_case, reason = "the names are the vendor's")]
        pub(crate) struct $table { $($name: unsafe extern "C" fn($($type),*) -> i32,)* }

        #[allow(non_snake_case, reason = "the names are the vendor's")]
        impl $table {
            pub(crate) fn find(standin: &cuda_standin::Driver) -> $table {
                let find = |name: &str| standin.call(name).unwrap_or_else(|| panic!("{name} is not exported"));
                // SAFETY: the types are those that the vendor documents.
                unsafe {
                    $table { $($name: std::mem::transmute::<
                        *const std::ffi::c_void,
                        unsafe extern "C" fn($($type),*) -> i32,
                    >(find(stringify!($name))),)* }
                }
            }

            $(#[allow(clippy::too_many_arguments, reason = "as many as the vendor's call has")]
            pub(crate) fn $name(&self, $($arg: $type),*) -> i32 {
                // SAFETY: the stand-in checks what it is given; places that it writes to are the tests' own.
                unsafe { (self.$name)($($arg),*) }
            })*
        }
    };
}
pub(crate) use loaded;

/// A place for what a call writes: its value once the call has succeeded.
#[track_caller]
pub(crate) fn made<T>(start: T, call: impl FnOnce(*mut T) -> i32) -> T {
    let mut place = start;
    assert_eq!(call(&mut place), 0);
    place
}
