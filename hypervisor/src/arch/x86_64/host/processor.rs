//! The processor's features from CPUID, and its name.

use alloc::format;
use alloc::string::String;
use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};

use x86_defs::cpuid::{leaf_1_ecx, leaf_7_ecx};

use crate::check::Finding;

/// A CPUID leaf of the host; zero beyond the last.
pub(crate) fn leaf(number: u32) -> CpuidResult {
    if number > __cpuid(number & 0xf000_0000).eax {
        return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
    }
    __cpuid(number)
}

/// A subleaf of a CPUID leaf; zero beyond the last leaf.
pub(crate) fn subleaf(number: u32, subleaf: u32) -> CpuidResult {
    if number > __cpuid(number & 0xf000_0000).eax {
        return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
    }
    __cpuid_count(number, subleaf)
}

/// Bits of an APIC id that number the threads of a core: by the leaf of the topology (SDM vol. 3A, 10.9.1), or AMD's.
pub(crate) fn thread_bits() -> u32 {
    let topology = subleaf(0xb, 0);
    let amd = leaf(0x8000_001e);
    match topology.ebx & 0xffff {
        0 => (amd.ebx >> 8 & 0xff).checked_ilog2().map_or(0, |bits| bits + 1),
        _ => topology.eax & 0x1f,
    }
}

/// Whether QEMU's TCG emulates this machine.
pub(crate) fn is_emulated() -> bool {
    const EMULATED: [u8; 12] = *b"TCGTCGTCGTCG";
    let CpuidResult { ebx, ecx, edx, .. } = __cpuid(0x4000_0000);
    let mut signature = [ebx, ecx, edx].into_iter().flat_map(u32::to_le_bytes);
    leaf(1).ecx & leaf_1_ecx::HYPERVISOR != 0 && EMULATED.into_iter().all(|byte| signature.next() == Some(byte))
}

/// Whether the processor has protection keys for pages of user mode.
pub(crate) fn has_protection_keys() -> bool {
    leaf(0).eax >= 7 && leaf(7).ecx & leaf_7_ecx::PKU != 0
}

/// The processor's name for itself.
pub(crate) fn name() -> String {
    let words = (0x8000_0002..=0x8000_0004).map(leaf).flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
    let name: String = characters(words).collect();
    String::from(name.trim())
}

/// The characters in registers of CPUID.
fn characters(words: impl IntoIterator<Item = u32>) -> impl Iterator<Item = char> {
    words.into_iter().flat_map(u32::to_le_bytes).filter(|byte| byte.is_ascii_graphic() || *byte == b' ').map(char::from)
}

/// The result of `check` for the processor.
pub(crate) fn finding() -> Finding {
    let (maker, version) = (leaf(0), leaf(1).eax);
    let maker: String = characters([maker.ebx, maker.edx, maker.ecx]).collect();
    // The extended family counts only with family 15 (APM vol. 3, appendix E.3.2).
    let family = version >> 8 & 0xf;
    let family = if family == 0xf { family + (version >> 20 & 0xff) } else { family };
    let model = (version >> 12 & 0xf0) | version >> 4 & 0xf;
    let named = format!("{} {maker}, family {family:#x}, model {model:#x}, stepping {}", name(), version & 0xf);
    Finding::good("processor", String::from(named.trim()))
}
