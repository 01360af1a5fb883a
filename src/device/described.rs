//! Devices as users describe them, for plans and simulations.

use std::fmt;
use std::str::FromStr;

use super::{Bandwidth, DeviceId};
use crate::bytes::ByteSize;
use crate::error::{Error, Result};

/// A description of a device: `ID=TOTAL[,free=F][,link=GBPS][,decode=GBPS][,domain=ID][,pinned=MOST][,largest=L]`. The link is
/// in decimal GB/s in each direction, `decode` is the speed at which it decodes compressed weights (1600 on an H200), in GB/s of
/// weights, the domain is the device whose memory this one shares, `pinned` is the most memory of the host that may be pinned,
/// and `largest` is the largest allocation that the device's driver makes.
///
/// ```
/// use tensor_offload::ByteSize;
/// use tensor_offload::device::Described;
/// let device: Described = "cuda:0=24gib,free=20gib,link=27.2".parse()?;
/// assert_eq!(device.free, Some(ByteSize(20 << 30)));
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Described {
    /// The name in allocation strings.
    pub id: DeviceId,
    /// The total memory.
    pub total: ByteSize,
    /// The free memory. `None` means all of it.
    pub free: Option<ByteSize>,
    /// The speed of the link to the host, in each direction.
    pub link: Option<Bandwidth>,
    /// The speed at which it decodes compressed weights, in bytes of the weights.
    pub decode: Option<Bandwidth>,
    /// The device whose memory this one shares. `None` if it has its own.
    pub domain: Option<DeviceId>,
    /// The most memory that may be pinned, for the host.
    pub pinned: Option<ByteSize>,
    /// The largest allocation that the device's driver makes. `None` if that is no less than its memory.
    pub largest: Option<ByteSize>,
}

impl FromStr for Described {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let syntax = |part: &str, expected: &str| {
            let start = part.as_ptr() as usize - text.as_ptr() as usize;
            Error::syntax(text, start..start + part.len(), expected)
        };
        const FORM: &str = "ID=TOTAL[,free=F][,link=GBPS][,decode=GBPS][,domain=ID][,pinned=MOST][,largest=L], as in cuda:0=24gib,free=20gib,link=27.2";
        let (id, rest) = text.split_once('=').ok_or_else(|| syntax(text, FORM))?;
        let id: DeviceId = id.parse().map_err(|_| syntax(id, "a device such as cuda:0"))?;
        let mut parts = rest.split(',');
        let size = |part: &str| part.parse::<ByteSize>().map_err(|_| syntax(part, "a size such as 24gib"));
        let total = size(parts.next().unwrap_or(""))?;
        let speed = |part: &str| part.parse().map_err(|_| syntax(part, "a bandwidth in GB/s over 0, such as 27.2"));
        let (free, link, decode, domain, pinned, largest) = (None, None, None, None, None, None);
        let mut device = Described { id, total, free, link, decode, domain, pinned, largest };
        for part in parts {
            match part.split_once('=').map(|(key, value)| (key.trim().to_ascii_lowercase(), value)) {
                Some((key, value)) if key == "free" && device.free.is_none() => {
                    let free = size(value)?;
                    if free > total {
                        return Err(syntax(value, "no more bytes free than there are in all"));
                    }
                    device.free = Some(free);
                }
                Some((key, value)) if key == "link" && device.link.is_none() => device.link = Some(speed(value)?),
                Some((key, value)) if key == "decode" && device.decode.is_none() => device.decode = Some(speed(value)?),
                Some((key, value)) if key == "domain" && device.domain.is_none() => {
                    let domain = value.trim().parse().map_err(|_| syntax(value, "a device such as cpu"))?;
                    device.domain = Some(domain);
                }
                Some((key, value)) if key == "pinned" && device.pinned.is_none() => device.pinned = Some(size(value)?),
                Some((key, value)) if key == "largest" && device.largest.is_none() => {
                    let largest = size(value)?;
                    if largest == ByteSize(0) {
                        return Err(syntax(value, "an allocation of more than 0 bytes"));
                    }
                    device.largest = Some(largest);
                }
                _ => return Err(syntax(part, FORM)),
            }
        }
        Ok(device)
    }
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.id, self.total)?;
        if let Some(free) = self.free {
            write!(f, ",free={free}")?;
        }
        if let Some(link) = self.link {
            write!(f, ",link={link}")?;
        }
        if let Some(decode) = self.decode {
            write!(f, ",decode={decode}")?;
        }
        if let Some(domain) = self.domain {
            write!(f, ",domain={domain}")?;
        }
        if let Some(pinned) = self.pinned {
            write!(f, ",pinned={pinned}")?;
        }
        if let Some(largest) = self.largest {
            write!(f, ",largest={largest}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_parse_and_print() {
        for text in [
            "cuda:0=24gb",
            "cuda:0=24gb,free=20gb",
            "cpu=64gb,free=0b,link=27.2",
            "cuda:0=24gb,link=27.2,decode=1600",
            "npu:3=1.5gb,link=0.5",
            "cuda:0=64gb,domain=cpu",
            "cpu=64gb,free=60gb,pinned=20gb",
            "vulkan:0=24gb,largest=2gb",
        ] {
            assert_eq!(text.parse::<Described>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "cuda:0",
            "cuda:0=",
            "cuda:0=24",
            "=24gb",
            "cuda:0=1gb,free=2gb",
            "cuda:0=1gb,link=0",
            "cuda:0=1gb,link=nan",
            "cuda:0=1gb,decode=0",
            "cuda:0=1gb,decode=1,decode=1",
            "cuda:0=1gb,speed=3",
            "cuda:0=1gb,free=1gb,free=1gb",
            "cuda:0=1gb,",
            "cuda:0=1gb,domain=",
            "cuda:0=1gb,domain=cpu,domain=cpu",
            "cpu=1gb,pinned=much",
            "cpu=1gb,pinned=0b,pinned=0b",
            "vulkan:0=1gb,largest=0b",
            "vulkan:0=1gb,largest=1mb,largest=1mb",
        ] {
            assert!(text.parse::<Described>().is_err(), "{text}");
        }
    }
}
