//! Features that a parent may give to its children: those that it has itself.
//!
//! The interface has its own names for features of the processor ([`ProcessorFeatures`]). This file finds them in the
//! parent's CPUID.

use hyperv_defs::property::{ProcessorFeatures, SyntheticFeatures, XsaveFeatures};
use partition::{Features, Host};
use x86_defs::cpuid::{Registers, leaf_8000_0007_edx};

use super::cpuid::CpuidTable;
use crate::arch::x86_64::host::tsc;

/// A register of a leaf's answer.
#[derive(Clone, Copy)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// Leaf, subleaf 0, register and bit of each feature. Some have a bit on either vendor's processors.
const FEATURES: [(u32, Register, u32, ProcessorFeatures); 52] = [
    (1, Ecx, 0, ProcessorFeatures::SSE3),
    (1, Ecx, 1, ProcessorFeatures::PCLMULQDQ),
    (1, Ecx, 9, ProcessorFeatures::SSSE3),
    (1, Ecx, 13, ProcessorFeatures::CMPXCHG16B),
    (1, Ecx, 17, ProcessorFeatures::PCID),
    (1, Ecx, 19, ProcessorFeatures::SSE4_1),
    (1, Ecx, 20, ProcessorFeatures::SSE4_2),
    (1, Ecx, 22, ProcessorFeatures::MOVBE),
    (1, Ecx, 23, ProcessorFeatures::POPCNT),
    (1, Ecx, 24, ProcessorFeatures::TSC_DEADLINE),
    (1, Ecx, 25, ProcessorFeatures::AES),
    (1, Ecx, 29, ProcessorFeatures::F16C),
    (1, Ecx, 30, ProcessorFeatures::RDRAND),
    (7, Ebx, 0, ProcessorFeatures::FSGSBASE),
    (7, Ebx, 1, ProcessorFeatures::TSC_ADJUST),
    (7, Ebx, 3, ProcessorFeatures::BMI1),
    (7, Ebx, 7, ProcessorFeatures::SMEP),
    (7, Ebx, 8, ProcessorFeatures::BMI2),
    (7, Ebx, 9, ProcessorFeatures::ERMS),
    (7, Ebx, 10, ProcessorFeatures::INVPCID),
    (7, Ebx, 18, ProcessorFeatures::RDSEED),
    (7, Ebx, 19, ProcessorFeatures::ADX),
    (7, Ebx, 20, ProcessorFeatures::SMAP),
    (7, Ebx, 23, ProcessorFeatures::CLFLUSHOPT),
    (7, Ebx, 24, ProcessorFeatures::CLWB),
    (7, Ebx, 29, ProcessorFeatures::SHA),
    (7, Ecx, 2, ProcessorFeatures::UMIP),
    (7, Ecx, 7, ProcessorFeatures::CET_SS),
    (7, Ecx, 16, ProcessorFeatures::LA57),
    (7, Ecx, 22, ProcessorFeatures::RDPID),
    (7, Edx, 4, ProcessorFeatures::FSRM),
    (7, Edx, 10, ProcessorFeatures::MB_CLEAR),
    (7, Edx, 20, ProcessorFeatures::CET_IBT),
    (7, Edx, 26, ProcessorFeatures::IBRS),
    (7, Edx, 27, ProcessorFeatures::STIBP),
    (7, Edx, 31, ProcessorFeatures::MDD),
    (0x8000_0001, Ecx, 0, ProcessorFeatures::LAHF_SAHF),
    (0x8000_0001, Ecx, 4, ProcessorFeatures::ALTMOVCR8),
    (0x8000_0001, Ecx, 5, ProcessorFeatures::LZCNT),
    (0x8000_0001, Ecx, 6, ProcessorFeatures::SSE4A),
    (0x8000_0001, Ecx, 7, ProcessorFeatures::MISALIGNED_SSE),
    (0x8000_0001, Ecx, 8, ProcessorFeatures::PREFETCHW),
    (0x8000_0001, Edx, 22, ProcessorFeatures::MMX_EXT),
    (0x8000_0001, Edx, 26, ProcessorFeatures::PAGE_1G),
    (0x8000_0001, Edx, 27, ProcessorFeatures::RDTSCP),
    (0x8000_0008, Ebx, 0, ProcessorFeatures::CLZERO),
    (0x8000_0008, Ebx, 12, ProcessorFeatures::IBPB),
    (0x8000_0008, Ebx, 14, ProcessorFeatures::IBRS),
    (0x8000_0008, Ebx, 15, ProcessorFeatures::STIBP),
    (0x8000_0008, Ebx, 24, ProcessorFeatures::MDD),
    (0x8000_0008, Ebx, 28, ProcessorFeatures::PSFD),
    (0x8000_0021, Eax, 27, ProcessorFeatures::IBPB),
];

const LEAF_1_ECX_XSAVE: u32 = 1 << 26;
const LEAF_1_ECX_FMA: u32 = 1 << 12;
const LEAF_1_ECX_AVX: u32 = 1 << 28;
const LEAF_1_ECX_F16C: u32 = 1 << 29;
const LEAF_7_EBX_AVX2: u32 = 1 << 5;
/// All parts of AVX-512 that a guest can have, and in ECX vector forms of other instructions.
const LEAF_7_EBX_AVX512: u32 = 1 << 16 | 1 << 17 | 1 << 21 | 1 << 28 | 1 << 30 | 1 << 31;
const LEAF_7_ECX_AVX512: u32 = 1 << 1 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 14;
const LEAF_D_EAX_X87_AND_SSE: u32 = 3;
const LEAF_D_1_EAX_XSAVEOPT: u32 = 1 << 0;

/// What there is of the interface for children.
const SYNTHETIC_FEATURES: SyntheticFeatures = SyntheticFeatures::HYPERVISOR_PRESENT
    .union(SyntheticFeatures::HV1)
    .union(SyntheticFeatures::VP_RUNTIME)
    .union(SyntheticFeatures::REFERENCE_COUNTER)
    .union(SyntheticFeatures::SYNIC)
    .union(SyntheticFeatures::SYNTHETIC_TIMERS)
    .union(SyntheticFeatures::HYPERCALL)
    .union(SyntheticFeatures::VP_INDEX)
    .union(SyntheticFeatures::REFERENCE_TSC)
    .union(SyntheticFeatures::FREQUENCIES)
    .union(SyntheticFeatures::DIRECT_TIMERS)
    .union(SyntheticFeatures::EX_PROCESSOR_MASKS)
    .union(SyntheticFeatures::TB_FLUSH)
    .union(SyntheticFeatures::CLUSTER_IPI)
    .union(SyntheticFeatures::LONG_SPIN_WAIT);

/// Maximum number of VPs of a child: the limit of Linux' driver.
const VPS: u32 = 256;
/// Deposited pages that pay for a VP. Linux deposits 90 for each.
const PAGES_PER_VP: usize = 64;

/// Hides features in a child's CPUID that its VPs do not have.
pub(super) fn limit(table: &mut CpuidTable, has: &Features) {
    let mut hide = |leaf, register, bits| hide_in(table, leaf, register, bits);
    for (leaf, register, bit, feature) in FEATURES {
        if !has.processor.contains(feature) {
            hide(leaf, register, 1 << bit);
        }
    }
    if !has.processor.contains(ProcessorFeatures::TSC_INVARIANT) {
        hide(0x8000_0007, Edx, leaf_8000_0007_edx::TSC_INVARIANT);
    }
    // Intel's later controls of speculation, which the interface has no names for.
    if !has.processor.contains(ProcessorFeatures::IBRS)
        && let Some(controls) = table.place(7, 2)
    {
        *controls = Registers::default();
    }
    let mut hide = |leaf, register, bits| hide_in(table, leaf, register, bits);
    let has_xsave = has.xsave.contains(XsaveFeatures::XSAVE);
    if !has_xsave {
        hide(1, Ecx, LEAF_1_ECX_XSAVE);
    }
    if !has_xsave || !has.xsave.contains(XsaveFeatures::AVX) {
        hide(1, Ecx, LEAF_1_ECX_AVX | LEAF_1_ECX_FMA | LEAF_1_ECX_F16C);
        hide(7, Ebx, LEAF_7_EBX_AVX2 | LEAF_7_EBX_AVX512);
        hide(7, Ecx, LEAF_7_ECX_AVX512);
        hide(0xd, Eax, !LEAF_D_EAX_X87_AND_SSE);
        hide(0xd, Edx, !0);
    }
    if !has.xsave.contains(XsaveFeatures::XSAVEOPT)
        && let Some(subleaf) = table.place(0xd, 1)
    {
        subleaf.eax &= !LEAF_D_1_EAX_XSAVEOPT;
    }
}

fn hide_in(table: &mut CpuidTable, leaf: u32, register: Register, bits: u32) {
    let Some(Registers { eax, ebx, ecx, edx }) = table.place(leaf, 0) else { return };
    *match register {
        Eax => eax,
        Ebx => ebx,
        Ecx => ecx,
        Edx => edx,
    } &= !bits;
}

/// The features that children of a VM with this CPUID can have.
pub(super) fn host(cpuid: &CpuidTable) -> Host {
    let has = |leaf, register, bit| {
        let Registers { eax, ebx, ecx, edx } = cpuid.subleaf(leaf, 0);
        let value = match register {
            Eax => eax,
            Ebx => ebx,
            Ecx => ecx,
            Edx => edx,
        };
        value >> bit & 1 != 0
    };
    let mut features = ProcessorFeatures::empty();
    for (leaf, register, bit, feature) in FEATURES {
        features.set(feature, features.contains(feature) || has(leaf, register, bit));
    }
    features.set(ProcessorFeatures::TSC_INVARIANT, tsc::is_invariant());
    // Real mode runs as it is, without emulation.
    features |= ProcessorFeatures::UNRESTRICTED_GUEST;

    let (leaf_1, state) = (cpuid.subleaf(1, 0), cpuid.subleaf(0xd, 0));
    let mut xsave_features = XsaveFeatures::empty();
    xsave_features.set(XsaveFeatures::XSAVE, leaf_1.ecx & LEAF_1_ECX_XSAVE != 0);
    xsave_features.set(XsaveFeatures::AVX, leaf_1.ecx & LEAF_1_ECX_AVX != 0);
    xsave_features.set(XsaveFeatures::XSAVEOPT, cpuid.subleaf(0xd, 1).eax & LEAF_D_1_EAX_XSAVEOPT != 0);

    Host {
        features,
        xsave_features,
        xsave_states: u64::from(state.edx) << 32 | u64::from(state.eax),
        max_xsave_bytes: state.ecx.into(),
        synthetic_features: SYNTHETIC_FEATURES,
        physical_address_width: (cpuid.subleaf(0x8000_0008, 0).eax & 0xff).into(),
        tsc_hertz: tsc::hz(),
        vps: VPS,
        pages_per_vp: PAGES_PER_VP,
    }
}
