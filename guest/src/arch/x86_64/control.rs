//! CPU identification, and the control registers that the kernel sets.

use core::arch::x86_64::{__cpuid_count, CpuidResult};
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use super::attempt;
use super::cpu_local::TSC_AUX;

/// CR4 bits (APM vol. 2, 3.1.3).
pub(crate) const CR4_OSXSAVE: u64 = 1 << 18;

/// CPUID `leaf`, sub-leaf `sub`; zeros beyond the last leaf, where the answer would be another leaf's.
pub(crate) fn cpuid(leaf: u32, sub: u32) -> CpuidResult {
    let last = __cpuid_count(leaf & 0xf000_0000, 0).eax;
    if leaf > last || last < leaf & 0xf000_0000 {
        return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
    }
    __cpuid_count(leaf, sub)
}

/// x2APIC (leaf 1, ECX bit 21).
pub(crate) fn has_x2apic() -> bool {
    cpuid(1, 0).ecx >> 21 & 1 != 0
}

/// A local APIC timer with an absolute TSC deadline (leaf 1, ECX bit 24).
pub(crate) fn has_tsc_deadline() -> bool {
    cpuid(1, 0).ecx >> 24 & 1 != 0
}

/// XSAVE and with it XCR0 (leaf 1, ECX bit 26).
pub(crate) fn has_xsave() -> bool {
    cpuid(1, 0).ecx >> 26 & 1 != 0
}

/// AVX (leaf 1, ECX bit 28).
pub(crate) fn has_avx() -> bool {
    cpuid(1, 0).ecx >> 28 & 1 != 0
}

/// RDTSCP and TSC_AUX (leaf 8000_0001, EDX bit 27).
pub(crate) fn has_rdtscp() -> bool {
    cpuid(0x8000_0001, 0).edx >> 27 & 1 != 0
}

/// Whether the SVM instructions are offered (leaf 8000_0001, ECX bit 2).
pub(crate) fn has_svm() -> bool {
    cpuid(0x8000_0001, 0).ecx >> 2 & 1 != 0
}

/// PCID (leaf 1, ECX bit 17).
pub(crate) fn has_pcid() -> bool {
    cpuid(1, 0).ecx >> 17 & 1 != 0
}

/// Width of a physical address in bits (leaf 8000_0008, EAX).
pub(crate) fn physical_bits() -> u32 {
    match cpuid(0x8000_0008, 0).eax & 0xff {
        0 => 36,
        bits => bits.min(52),
    }
}

/// This CPU's APIC id as CPUID gives it: leaf 0xb if there is one, otherwise the eight bits of leaf 1.
pub(crate) fn hardware_id() -> u32 {
    let extended = cpuid(0xb, 0);
    if extended.ebx != 0 { extended.edx } else { cpuid(1, 0).ebx >> 24 }
}

/// The twelve characters of a CPU vendor's or a hypervisor's name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature([u8; 12]);

impl Signature {
    fn new(parts: [u32; 3]) -> Self {
        let mut text = [0; 12];
        for (bytes, part) in text.chunks_exact_mut(4).zip(parts) {
            bytes.copy_from_slice(&part.to_le_bytes());
        }
        Self(text)
    }

    /// Whether it reads `text`.
    pub(crate) fn is(&self, text: &[u8]) -> bool {
        self.0.starts_with(text) && self.0[text.len().min(12)..].iter().all(|byte| *byte == 0)
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .take_while(|byte| **byte != 0)
            .try_for_each(|byte| write!(f, "{}", if byte.is_ascii_graphic() { char::from(*byte) } else { '.' }))
    }
}

/// The CPU maker (leaf 0).
pub(crate) fn maker() -> Signature {
    let leaf = __cpuid_count(0, 0);
    Signature::new([leaf.ebx, leaf.edx, leaf.ecx])
}

/// The hypervisor below, if it shows itself (leaf 1, ECX bit 31, and leaf 4000_0000).
pub(crate) fn hypervisor() -> Option<Signature> {
    if __cpuid_count(1, 0).ecx >> 31 == 0 {
        return None;
    }
    let leaf = __cpuid_count(0x4000_0000, 0);
    Some(Signature::new([leaf.ebx, leaf.ecx, leaf.edx]))
}

/// Enables state that the boot code does not: XSAVE with x87, SSE and, if offered, AVX.
pub(super) fn enable_vector_state() {
    if has_xsave() && attempt::write_cr4(attempt::read_cr4() | CR4_OSXSAVE).is_ok() {
        let avx = if has_avx() { 4 } else { 0 };
        // On a machine that refuses AVX state, use SSE only.
        let on = attempt::xsetbv(0, 3 | avx).is_ok();
        if !on {
            let _ = attempt::xsetbv(0, 3);
        }
        AVX_IS_ON.store(on && avx != 0, Ordering::Relaxed);
    }
    if has_rdtscp() {
        attempt::write_msr(TSC_AUX, super::cpu_local::index() as u64);
    }
}

/// Makes an exit that changes nothing, if there is a hypervisor.
pub(crate) fn leave() {
    maker();
}

/// Whether a hypervisor is below, which then is responsible for deviations from the architecture.
pub(crate) fn is_judged() -> bool {
    hypervisor().is_some_and(|it| !it.is(b"TCGTCGTCGTCG"))
}

static AVX_IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether AVX registers are usable. Loops that must not exit read it, so the guest determines it once.
pub(crate) fn avx_is_on() -> bool {
    AVX_IS_ON.load(Ordering::Relaxed)
}
