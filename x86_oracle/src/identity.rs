//! Identifies the processor.

use std::fmt;
use x86_emulate::Vendor;

/// The processor's identity from CPUID (APM vol. 3, E.3.1 and E.3.2; SDM vol. 2A, CPUID).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    vendor: [u8; 12],
    family: u32,
    model: u32,
    stepping: u32,
}

impl Identity {
    /// From EBX, EDX and ECX of leaf 0, and EAX of leaf 1.
    pub(crate) fn from_leaves(vendor: [u32; 3], version: u32) -> Self {
        let field = |from: u32, bits: u32| version >> from & ((1 << bits) - 1);
        let (base_family, base_model) = (field(8, 4), field(4, 4));
        // The extended fields count only with some families: AMD's and Intel's rules agree where either has processors.
        let family = if base_family == 0xf { base_family + field(20, 8) } else { base_family };
        let model = if matches!(base_family, 0x6 | 0xf) { field(16, 4) << 4 | base_model } else { base_model };
        let mut name = [0; 12];
        for (bytes, register) in name.chunks_exact_mut(4).zip(vendor) {
            bytes.copy_from_slice(&register.to_le_bytes());
        }
        Self { vendor: name, family, model, stepping: field(0, 4) }
    }

    /// Its vendor's rules. Any processor that is not AMD's or from AMD's designs counts as Intel's.
    #[must_use]
    pub fn vendor(&self) -> Vendor {
        match &self.vendor {
            b"AuthenticAMD" | b"HygonGenuine" => Vendor::Amd,
            _ => Vendor::Intel,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vendor, family, model, stepping } = self;
        let name = vendor.escape_ascii();
        write!(f, "{name}, family {family:02x}h, model {model:02x}h, stepping {stepping:x}h")?;
        write!(f, "; compared by the rules of {:?}", self.vendor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As leaf 0 has it.
    fn leaf(name: &[u8; 12]) -> [u32; 3] {
        [0, 4, 8].map(|at| u32::from_le_bytes([name[at], name[at + 1], name[at + 2], name[at + 3]]))
    }

    #[test]
    fn processors_are_told_apart() {
        for (name, version, vendor, text) in [
            (b"AuthenticAMD", 0x00a0_0f11, Vendor::Amd, "AuthenticAMD, family 19h, model 01h, stepping 1h"),
            (b"AuthenticAMD", 0x00a1_0f12, Vendor::Amd, "AuthenticAMD, family 19h, model 11h, stepping 2h"),
            (b"GenuineIntel", 0x0008_06f8, Vendor::Intel, "GenuineIntel, family 06h, model 8fh, stepping 8h"),
            (b"HygonGenuine", 0x0090_0f02, Vendor::Amd, "HygonGenuine, family 18h, model 00h, stepping 2h"),
            (b"CentaurHauls", 0x0000_06fa, Vendor::Intel, "CentaurHauls, family 06h, model 0fh, stepping ah"),
        ] {
            let identity = Identity::from_leaves(leaf(name), version);
            assert_eq!(identity.vendor(), vendor);
            assert_eq!(identity.to_string(), format!("{text}; compared by the rules of {vendor:?}"));
        }
    }
}
