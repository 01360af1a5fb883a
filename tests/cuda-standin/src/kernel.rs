//! The seam for kernels: whatever would run PTX goes behind these four. For now every image is refused.

use crate::code::{Code, Outcome};
use crate::report::Rule;
use crate::world::Call;

impl Call<'_> {
    /// Loads an image.
    pub(crate) fn load_module(&self) -> Outcome<u64> {
        self.device(&self.state())?;
        Err(Code::INVALID_PTX)
    }

    pub(crate) fn unload_module(&self, module: u64) -> Outcome<()> {
        self.device(&self.state())?;
        self.violation(Rule::UnknownHandle, || format!("there is no module {module:#x}"));
        Err(Code::INVALID_HANDLE)
    }

    /// Finds a function of a module.
    pub(crate) fn function(&self, _module: u64) -> Outcome<u64> {
        self.device(&self.state())?;
        Err(Code::NOT_FOUND)
    }

    /// Enqueues a function.
    pub(crate) fn launch(&self, _function: u64, stream: u64) -> Outcome<()> {
        self.lane(&mut self.state(), stream)?;
        Err(Code::NOT_FOUND)
    }
}
