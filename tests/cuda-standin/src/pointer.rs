//! What the driver says of an address.

use crate::code::{Code, Outcome};
use crate::world::Call;

/// A value of one of the two sizes that `cuPointerGetAttribute` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Narrow(u32),
    Wide(u64),
}

/// What an address belongs to.
struct Belongs {
    base: u64,
    len: u64,
    device: usize,
    host: bool,
}

impl Call<'_> {
    /// The attributes by the driver's numbers. Asking about memory that the driver does not know is no mistake.
    pub(crate) fn pointer_attribute(&self, attribute: u32, address: u64) -> Outcome<Value> {
        let state = self.state();
        self.device(&state)?;
        let device = state.memory.holding(address).map(|(base, of)| Belongs {
            base,
            len: of.len,
            device: of.device,
            host: false,
        });
        let pinned = || {
            state.pinned.holding(address).map(|(base, of)| Belongs { base, len: of.len, device: of.device, host: true })
        };
        let of = device.or_else(pinned).ok_or(Code::INVALID_VALUE)?;
        Ok(match attribute {
            1 => Value::Wide(state.devices[of.device].context.unwrap_or_default()),
            2 => Value::Narrow(if of.host { 1 } else { 2 }),
            3 => Value::Wide(address),
            4 if of.host => Value::Wide(address),
            7 | 11 => Value::Wide(of.base),
            8 => Value::Narrow(0),
            9 => Value::Narrow(of.device as u32),
            12 => Value::Wide(of.len),
            13 => Value::Narrow(1),
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}
