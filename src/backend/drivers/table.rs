//! Tables of a driver's calls, looked up in its library.

/// Whose names the calls of a library have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Those that are given first.
    Own,
    /// HIP's names of CUDA's calls.
    #[cfg_attr(not(feature = "hip"), expect(dead_code, reason = "that backend is not built"))]
    Hip,
}

impl Spelling {
    /// The name of a call. Empty if HIP has none.
    pub(super) fn pick(self, own: &'static str, hip: &[&'static str]) -> &'static str {
        match self {
            Spelling::Own => own,
            Spelling::Hip => hip.first().copied().unwrap_or_default(),
        }
    }
}

/// Declares a table of calls, each with its name in the driver's library, and in HIP's if that has the same. `meaning` is the function
/// that says what a result code means.
macro_rules! table {
    ($meaning:path; $(#[$doc:meta])* $name:ident {
        $($verb:ident = $symbol:literal $(/ $hip:literal)? ($($arg:ident: $type:ty),* $(,)?);)*
    }) => {
        $(#[$doc])*
        pub(in crate::backend::drivers) struct $name {
            spelling: crate::backend::drivers::table::Spelling,
            $($verb: unsafe extern "system" fn($($type),*) -> std::ffi::c_int,)*
        }

        impl $name {
            /// Finds all calls of the table.
            ///
            /// # Errors
            /// The name of the first call that the library does not have.
            pub(in crate::backend::drivers) fn find(
                library: &libloading::Library,
                spelling: crate::backend::drivers::table::Spelling,
            ) -> Result<$name, &'static str> {
                $(
                    let symbol = spelling.pick($symbol, &[$($hip)?]);
                    // SAFETY: the types are those of the documented calls. The library is never closed.
                    let $verb = *unsafe { library.get(symbol) }.map_err(|_| symbol)?;
                )*
                Ok($name { spelling, $($verb,)* })
            }

            /// The address of the first call that has one, by which libraries are told apart.
            #[allow(dead_code, reason = "one table of each driver is asked")]
            pub(in crate::backend::drivers) fn address(&self) -> usize {
                [$(self.$verb as usize),*].first().copied().unwrap_or_default()
            }

            $(
                /// # Safety
                /// The arguments are as the documentation of the call requires.
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's call has")]
                pub(in crate::backend::drivers) unsafe fn $verb(
                    &self,
                    $($arg: $type),*
                ) -> crate::backend::drivers::verbs::Outcome {
                    use crate::backend::drivers::verbs::{Code, Failure};
                    // SAFETY: the caller's promise.
                    match unsafe { (self.$verb)($($arg),*) } {
                        0 => Ok(()),
                        code => {
                            let (call, code) = (self.spelling.pick($symbol, &[$($hip)?]), Code(code));
                            Err(Failure { call, code, meaning: $meaning(code) })
                        }
                    }
                }
            )*
        }
    };
}
