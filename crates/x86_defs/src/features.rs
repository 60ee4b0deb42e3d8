//! The features that guests get: CPUID as a guest sees it, by allow-list.
//!
//! The values are the processor's, without every feature that is not named here, plus what the hypervisor itself
//! provides: x2APIC, TSC deadline, topology. A feature that is newer than these lists is not offered. What differs
//! between vCPUs, or follows a control register, is missing here.

use crate::cpuid::{Registers, leaf_1_ecx, leaf_8000_0007_edx};

/// Leaf 1, ECX: SSE3 to RDRAND, without MONITOR, VMX, PCID, and without features that need a device.
const LEAF_1_ECX: u32 = bits(&[0, 1, 9, 12, 13, 19, 20, 22, 23, 25, 26, 28, 29, 30]);
/// Leaf 1, EDX: all features of an AMD CPU except machine checks, thermal and similar; VME, APIC, MTRR, PAT, FXSR,
/// SSE2, HTT.
const LEAF_1_EDX: u32 = bits(&[0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 15, 16, 17, 19, 23, 24, 25, 26]);
/// Leaf 6, EAX: the APIC timer does not stop in deep sleep.
const LEAF_6_EAX_ARAT: u32 = 1 << 2;
/// Leaf 7, EBX: FSGSBASE, BMI, AVX2, SMEP, ERMS, INVPCID (hidden if PCID is hidden), AVX-512, SMAP, CLFLUSHOPT, CLWB,
/// SHA, ADX, RDSEED.
const LEAF_7_EBX: u32 = bits(&[0, 3, 5, 7, 8, 9, 16, 17, 18, 19, 20, 21, 23, 24, 28, 29, 30, 31]);
/// Leaf 7, ECX: AVX-512 VBMI, UMIP, PKU, VBMI2, GFNI, VAES, VPCLMULQDQ, VNNI, BITALG, VPOPCNTDQ, RDPID. Not LA57.
const LEAF_7_ECX: u32 = bits(&[1, 2, 3, 6, 8, 9, 10, 11, 12, 14, 22]);
/// Leaf 7, EDX: FSRM.
const LEAF_7_EDX: u32 = bits(&[4]);
/// Leaf D subleaf 1, EAX: XSAVEOPT, XGETBV with ECX=1. Not XSAVES, whose state would need an MSR.
const LEAF_D_1_EAX: u32 = bits(&[0, 2]);
/// Leaf 8000_0001, ECX: LAHF, CR8, ABM, SSE4A, misaligned SSE, prefetch. Not SVM.
const LEAF_8000_0001_ECX: u32 = bits(&[0, 4, 5, 6, 7, 8, 11, 16, 21]);
/// Leaf 8000_0001, EDX: as leaf 1, and SYSCALL, NX, FXSR optimizations, 1 GiB pages, RDTSCP, long mode.
const LEAF_8000_0001_EDX: u32 = LEAF_1_EDX & 0x0183_f3ff | bits(&[11, 20, 22, 25, 26, 27, 29]);
/// Leaf 8000_0008, EBX: CLZERO, XSAVEERPTR, WBNOINVD.
const LEAF_8000_0008_EBX: u32 = bits(&[0, 2, 9]);

/// Leaf 8000_0008, EAX: width of a linear address without LA57.
const LINEAR_ADDRESS_BITS: u32 = 48;

const LEAF_1_EDX_HTT: u32 = 1 << 28;
const LEAF_8000_0001_ECX_CMP_LEGACY: u32 = 1 << 1;

/// The last of the leaves from 0 on.
pub const BASIC_MAX: u32 = 0xd;
/// The first of the extended leaves.
pub const EXTENDED_FIRST: u32 = 0x8000_0000;
/// The last of them.
pub const EXTENDED_MAX: u32 = 0x8000_0008;

/// Size of an XSAVE area without other components than x87 and SSE.
const LEAST_XSAVE_BYTES: u32 = 576;

const fn bits(numbers: &[u32]) -> u32 {
    let mut mask = 0;
    let mut at = 0;
    while at < numbers.len() {
        mask |= 1 << numbers[at];
        at += 1;
    }
    mask
}

/// Number of subleaves of a leaf. `None`: it has no subleaves, and ECX means nothing.
#[must_use]
pub const fn subleaves(leaf: u32) -> Option<u32> {
    match leaf {
        7 => Some(1),
        0xb => Some(2),
        0xd => Some(64),
        _ => None,
    }
}

/// What decides about a guest's CPUID, besides its processor.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Its local APICs can be x2APICs.
    pub has_x2apic: bool,
    /// The counters of all processors run at one rate.
    pub has_invariant_tsc: bool,
    /// Components of the extended state that the hypervisor switches.
    pub xcr0: u64,
}

impl Guest {
    /// The answer to a subleaf; zero if there is none. `host` answers for the processor: leaf and subleaf.
    #[must_use]
    pub fn answer(&self, leaf: u32, subleaf: u32, host: impl Fn(u32, u32) -> Registers) -> Registers {
        let zero = Registers::default();
        if subleaf >= subleaves(leaf).unwrap_or(1) {
            return zero;
        }
        let found = |leaf| host(leaf, 0);
        match leaf {
            0 => Registers { eax: BASIC_MAX, ..found(0) },
            1 => self.leaf_1(found(1)),
            6 => Registers { eax: LEAF_6_EAX_ARAT, ..zero },
            7 => {
                let found = found(7);
                Registers {
                    eax: 0,
                    ebx: found.ebx & LEAF_7_EBX,
                    ecx: found.ecx & LEAF_7_ECX,
                    edx: found.edx & LEAF_7_EDX,
                }
            }
            0xb => self.topology(subleaf),
            0xd => self.extended_state(subleaf, host),
            0x8000_0000 => Registers { eax: EXTENDED_MAX, ..found(leaf) },
            0x8000_0001 => {
                let found = found(leaf);
                Registers {
                    eax: found.eax,
                    ebx: 0,
                    ecx: found.ecx & LEAF_8000_0001_ECX | self.amd_cores(leaf),
                    edx: found.edx & LEAF_8000_0001_EDX,
                }
            }
            // The processor's name, and the caches.
            0x8000_0002..=0x8000_0006 => found(leaf),
            0x8000_0007 if self.has_invariant_tsc => Registers { edx: leaf_8000_0007_edx::TSC_INVARIANT, ..zero },
            0x8000_0008 => {
                let found = found(leaf);
                Registers {
                    // Physical addresses are as wide as the host's. Linear ones have four levels of tables, because
                    // LA57 is not offered.
                    eax: found.eax & 0xff | LINEAR_ADDRESS_BITS << 8,
                    ebx: found.ebx & LEAF_8000_0008_EBX,
                    ecx: self.amd_cores(leaf),
                    edx: 0,
                }
            }
            // 2, 3, 4: other vendors'. 5: MONITOR. 9, A: performance counters. 8, C: reserved.
            _ => zero,
        }
    }

    fn leaf_1(&self, found: Registers) -> Registers {
        let x2apic = if self.has_x2apic { leaf_1_ecx::X2APIC } else { 0 };
        let provided = leaf_1_ecx::HYPERVISOR | leaf_1_ecx::TSC_DEADLINE | x2apic;
        Registers {
            // CLFLUSH size is the host's; the APIC id is filled in.
            ebx: found.ebx & 0x0000_ff00 | self.vcpus.min(0xff) << 16,
            ecx: found.ecx & LEAF_1_ECX | provided,
            edx: found.edx & LEAF_1_EDX | if self.vcpus > 1 { LEAF_1_EDX_HTT } else { 0 },
            ..found
        }
    }

    /// Every vCPU is a core of one package: a level of one thread per core, a level of all cores.
    fn topology(&self, level: u32) -> Registers {
        const THREADS: u32 = 1 << 8;
        const CORES: u32 = 2 << 8;
        match level {
            0 => Registers { eax: 0, ebx: 1, ecx: THREADS, edx: 0 },
            _ => Registers { eax: self.id_bits(), ebx: self.vcpus, ecx: CORES, edx: 0 },
        }
    }

    /// Bits that APIC ids of all vCPUs need.
    fn id_bits(&self) -> u32 {
        self.vcpus.next_power_of_two().ilog2()
    }

    /// Sizes and offsets are the machine's, for the components that are offered.
    fn extended_state(&self, subleaf: u32, host: impl Fn(u32, u32) -> Registers) -> Registers {
        let is_offered = |component: u32| self.xcr0 >> component & 1 != 0;
        match subleaf {
            0 => {
                let components = (2..64).filter(|component| is_offered(*component));
                let ends = components.map(|component| host(0xd, component)).map(|found| found.ebx + found.eax);
                let largest = ends.max().unwrap_or(0).max(LEAST_XSAVE_BYTES);
                let [a, b, c, d, e, f, g, h] = self.xcr0.to_le_bytes();
                let [low, high] = [[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes);
                Registers { eax: low, ebx: largest, ecx: largest, edx: high }
            }
            1 => Registers { eax: host(0xd, 1).eax & LEAF_D_1_EAX, ..Registers::default() },
            component if is_offered(component) => host(0xd, component),
            _ => Registers::default(),
        }
    }

    /// Numbers of cores in ECX of extended leaves, on AMD's processors only (APM vol. 3, E.4.2 and E.4.7). Intel's
    /// processors have these bits reserved, and report cores in leaf B only (SDM vol. 2, CPUID).
    fn amd_cores(&self, leaf: u32) -> u32 {
        match leaf {
            0x8000_0001 if self.vcpus > 1 => LEAF_8000_0001_ECX_CMP_LEGACY,
            // Number of cores minus one, and the number of bits of an APIC id that count them.
            0x8000_0008 => self.id_bits() << 12 | (self.vcpus - 1).min(0xff),
            _ => 0,
        }
    }
}
