//! CPUID as a guest sees it, by allow-list.
//!
//! The values are the host's, without every feature that is not named here, plus what the hypervisor itself provides
//! (x2APIC, TSC deadline, an invariant TSC, topology, its own leaves). They are computed once per VM. An exit only
//! looks one up and fills in the few bits that differ between vCPUs or follow a control register.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::arch::x86_64::{__cpuid, __cpuid_count};

use abi::payload::{ApicMode, VmConfig};
use addr::Gpa;
use mitigations::Reports;
use partition::Features;
use spin::Once;
use x86_defs::control::{Leaves, Offered};
use x86_defs::cpuid::{Registers, leaf_1_ecx, leaf_7_ecx, leaf_8000_0007_edx};
use x86_defs::registers::cr4;

use super::children;
use super::fpu;
use super::hyperv::{self, Profile};
use super::state::{State as _, gpr};
use super::vcpu::ArchVcpu;
use crate::arch::x86_64::host::tsc;
use crate::arch::x86_64::speculation;
use crate::device::local_apic::{Mode, TSC_TICKS_PER_TIMER_TICK};

/// Leaves 1 and 8000_0001, EDX: there is a local APIC. Shown while IA32_APIC_BASE leaves it on (APM vol. 2, 16.3.1).
const EDX_APIC: u32 = 1 << 9;
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
/// Leaf 7, EDX: FSRM. What concerns speculation comes beside it, here and below.
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

const BASIC_MAX: u32 = 0xd;
const HYPERVISOR_FIRST: u32 = 0x4000_0000;
const VMWARE_MAX: u32 = 0x4000_0010;
const EXTENDED_FIRST: u32 = 0x8000_0000;
const EXTENDED_MAX: u32 = 0x8000_0008;
/// The same if leaf 8000_0021 says something.
const EXTENDED_MAX_ON_ZEN: u32 = 0x8000_0021;

const fn bits(numbers: &[u32]) -> u32 {
    let mut mask = 0;
    let mut at = 0;
    while at < numbers.len() {
        mask |= 1 << numbers[at];
        at += 1;
    }
    mask
}

/// All answers of one VM.
pub(crate) struct CpuidTable {
    basic: Vec<Leaf>,
    hypervisor: Vec<Leaf>,
    extended: Vec<Leaf>,
    /// Bits of control registers that go with the features that are shown.
    offered: Offered,
    /// What the leaves say of speculation.
    reports: Reports,
    /// Of a child: all answers. The lists above are empty then, so that the answers of other VMs are found as fast as
    /// if there were no children.
    of_child: Option<Box<Self>>,
}

/// Answers to one leaf, by subleaf; beyond the last subleaf everything is zero.
struct Leaf {
    subleaves: Vec<Registers>,
    /// The leaf has no subleaves: ECX means nothing.
    ignores_ecx: bool,
    fill: Fill,
}

/// Bits that an exit fills in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    Nothing,
    /// Leaf 1: APIC id, whether the APIC is on, and CR4.OSXSAVE.
    Features,
    /// Leaf 8000_0001: whether the APIC is on.
    ExtendedFeatures,
    /// Leaf 7: CR4.PKE.
    MoreFeatures,
    /// Leaf B: x2APIC id.
    Topology,
    /// Leaf D: size of the state that XCR0 enables.
    ExtendedState,
}

impl Leaf {
    fn plain(registers: Registers) -> Self {
        Self { subleaves: Vec::from([registers]), ignores_ecx: true, fill: Fill::Nothing }
    }
}

impl CpuidTable {
    /// The answers for a VM, or those for a child for which its parent has registered nothing.
    pub(crate) fn new(config: &VmConfig, child: Option<&Features>) -> Self {
        let Some(features) = child else { return Self::of_vm(config, None, |_| {}) };
        let table = Self::of_vm(config, child, |table| children::limit(table, features));
        let (basic, hypervisor, extended) = (Vec::new(), Vec::new(), Vec::new());
        let (offered, reports) = (table.offered, table.reports);
        Self { basic, hypervisor, extended, offered, reports, of_child: Some(Box::new(table)) }
    }

    fn of_vm(config: &VmConfig, child: Option<&Features>, change: impl FnOnce(&mut Self)) -> Self {
        let (vcpus, apic) = (config.vcpus, config.apic);
        let hypervisor = match Profile::of(config, child) {
            Some(profile) => (HYPERVISOR_FIRST..=hyperv::MAX_LEAF).map(|number| profile.leaf(number)).collect(),
            None => (HYPERVISOR_FIRST..=VMWARE_MAX).map(vmware_leaf).collect::<Vec<_>>(),
        };
        let mut table = Self {
            basic: (0..=BASIC_MAX).map(|number| basic_leaf(number, vcpus, apic)).collect(),
            hypervisor: hypervisor.into_iter().map(Leaf::plain).collect(),
            extended: (EXTENDED_FIRST..=extended_max()).map(|number| extended_leaf(number, vcpus)).collect(),
            offered: Offered::default(),
            reports: Reports::default(),
            of_child: None,
        };
        change(&mut table);
        let first = |number| table.subleaf(number, 0);
        let offered = Offered::by(&Leaves {
            leaf_1: first(1),
            leaf_7: first(7),
            leaf_8000_0001: first(0x8000_0001),
            leaf_8000_0008: first(0x8000_0008),
            leaf_8000_0021: first(0x8000_0021),
        });
        let reports = Reports {
            leaf_7_edx: first(7).edx,
            leaf_7_2_edx: table.subleaf(7, 2).edx,
            extended_8_ebx: first(0x8000_0008).ebx,
            extended_21_eax: first(0x8000_0021).eax,
            extended_21_ecx: first(0x8000_0021).ecx,
            capabilities: speculation::told().capabilities,
        };
        Self { offered, reports, ..table }
    }

    /// Bits of control registers that go with the features that the guest sees.
    pub(super) fn offered(&self) -> &Offered {
        &self.offered
    }

    /// What the guest is told of speculation.
    pub(super) fn reports(&self) -> &Reports {
        &self.reports
    }

    /// The answer to a subleaf, for a change.
    pub(super) fn place(&mut self, number: u32, subleaf: usize) -> Option<&mut Registers> {
        let leaves = match number >> 28 {
            0 => &mut self.basic,
            8 => &mut self.extended,
            _ => return None,
        };
        leaves.get_mut((number & 0x0fff_ffff) as usize)?.subleaves.get_mut(subleaf)
    }

    /// The answer for a child's vCPU whose XCR0 is `xcr0`. Results that the parent has registered come first. A few
    /// bits always follow the vCPU's state.
    pub(super) fn answer_to_child(&self, vcpu: &ArchVcpu, number: u32, subleaf: u32, xcr0: u64) -> Registers {
        let table = self.of_child.as_deref().unwrap_or(self);
        let leaf = table.find(number);
        let index = if leaf.is_some_and(|leaf| leaf.ignores_ecx) { 0 } else { subleaf as usize };
        let default = table.subleaf(number, index);
        let [eax, ebx, ecx, edx] =
            vcpu.cpuid.answer(number, subleaf, [default.eax, default.ebx, default.ecx, default.edx]);
        let mut registers = Registers { eax, ebx, ecx, edx };
        match (number, subleaf) {
            (1, _) => {
                registers.ebx &= 0x00ff_ffff;
                registers.ecx &= !leaf_1_ecx::OSXSAVE;
                fill(&mut registers, Fill::Features, 0, vcpu);
            }
            (7, 0) => {
                registers.ecx &= !leaf_7_ecx::OSPKE;
                fill(&mut registers, Fill::MoreFeatures, 0, vcpu);
            }
            (0xb | 0x1f, _) => registers.edx = vcpu.apic.id(),
            (0xd, 0 | 1) => registers.ebx = table.state_bytes(xcr0),
            (0x8000_0001, _) => fill(&mut registers, Fill::ExtendedFeatures, 0, vcpu),
            _ => {}
        }
        registers
    }

    /// Bytes of the state that XCR0 enables, in the standard format.
    fn state_bytes(&self, xcr0: u64) -> u32 {
        let components = (2..63).filter(|component| xcr0 >> component & 1 != 0);
        let ends = components.map(|component| self.subleaf(0xd, component)).map(|found| found.ebx + found.eax);
        ends.max().unwrap_or(0).max(576)
    }

    /// A leaf that is not in the lists: a child has its own list, and for other VMs the leaf does not exist.
    #[cold]
    fn answer_rarely(&self, vcpu: &ArchVcpu, number: u32, subleaf: u32) -> Registers {
        if self.of_child.is_none() {
            return Registers::default();
        }
        self.answer_to_child(vcpu, number, subleaf, fpu::read_xcr0())
    }

    /// The answer to a leaf, without the bits that an exit fills in.
    pub(super) fn subleaf(&self, number: u32, subleaf: usize) -> Registers {
        self.find(number).and_then(|leaf| leaf.subleaves.get(subleaf)).copied().unwrap_or_default()
    }

    fn find(&self, number: u32) -> Option<&Leaf> {
        let leaves = match number >> 28 {
            0 => &self.basic,
            4 => &self.hypervisor,
            8 => &self.extended,
            _ => return None,
        };
        leaves.get((number & 0x0fff_ffff) as usize)
    }

    /// Answers the CPUID that `vcpu` executes.
    #[inline(always)]
    pub(in crate::arch::x86_64) fn answer(&self, vcpu: &mut ArchVcpu) {
        #[expect(clippy::cast_possible_truncation, reason = "CPUID reads EAX and ECX")]
        let (number, subleaf) = (vcpu.hardware.rax() as u32, vcpu.gprs[gpr::RCX] as u32);

        let registers = if let Some(leaf) = self.find(number) {
            let subleaf = if leaf.ignores_ecx { 0 } else { subleaf };
            let mut registers = leaf.subleaves.get(subleaf as usize).copied().unwrap_or_default();
            if leaf.fill != Fill::Nothing {
                fill(&mut registers, leaf.fill, subleaf, vcpu);
            }
            registers
        } else {
            self.answer_rarely(vcpu, number, subleaf)
        };

        vcpu.hardware.set_rax(registers.eax.into());
        vcpu.gprs[gpr::RBX] = registers.ebx.into();
        vcpu.gprs[gpr::RCX] = registers.ecx.into();
        vcpu.gprs[gpr::RDX] = registers.edx.into();
    }
}

fn fill(registers: &mut Registers, fill: Fill, subleaf: u32, vcpu: &ArchVcpu) {
    let guest_cr4 = vcpu.hardware.control().cr4;
    let id = vcpu.apic.id();
    match fill {
        Fill::Nothing => {}
        Fill::Features => {
            registers.ebx |= (id & 0xff) << 24;
            if guest_cr4 & cr4::OSXSAVE != 0 {
                registers.ecx |= leaf_1_ecx::OSXSAVE;
            }
            hide_apic_that_is_off(registers, vcpu);
        }
        Fill::ExtendedFeatures => hide_apic_that_is_off(registers, vcpu),
        Fill::MoreFeatures if subleaf == 0 && guest_cr4 & cr4::PKE != 0 => registers.ecx |= leaf_7_ecx::OSPKE,
        Fill::MoreFeatures => {}
        Fill::Topology => {
            // Beyond the levels there are, ECX still names the subleaf and EDX the vCPU.
            registers.ecx = registers.ecx & !0xff | subleaf & 0xff;
            registers.edx = id;
        }
        // The guest's XCR0 is in the register while the guest is handled, so the CPU works the size out.
        Fill::ExtendedState if subleaf == 0 => registers.ebx = __cpuid_count(0xd, 0).ebx,
        Fill::ExtendedState => {}
    }
}

fn hide_apic_that_is_off(registers: &mut Registers, vcpu: &ArchVcpu) {
    if vcpu.apic.mode() == Mode::Disabled {
        registers.edx &= !EDX_APIC;
    }
}

fn host(number: u32) -> Registers {
    host_subleaf(number, 0)
}

fn host_subleaf(number: u32, subleaf: u32) -> Registers {
    // Beyond its last leaf a CPU answers with that leaf's data. Here the answer is zero.
    if number > __cpuid(number & 0xf000_0000).eax {
        return Registers::default();
    }
    let found = __cpuid_count(number, subleaf);
    Registers { eax: found.eax, ebx: found.ebx, ecx: found.ecx, edx: found.edx }
}

fn basic_leaf(number: u32, vcpus: u32, apic: ApicMode) -> Leaf {
    let zero = Registers::default();
    match number {
        0 => Leaf::plain(Registers { eax: BASIC_MAX, ..host(0) }),
        1 => {
            let found = host(1);
            let provided = leaf_1_ecx::HYPERVISOR
                | leaf_1_ecx::TSC_DEADLINE
                | if apic == ApicMode::X2Apic { leaf_1_ecx::X2APIC } else { 0 };
            let registers = Registers {
                // CLFLUSH size is the host's; the APIC id is filled in.
                ebx: found.ebx & 0x0000_ff00 | vcpus.min(0xff) << 16,
                ecx: found.ecx & LEAF_1_ECX | provided,
                edx: found.edx & LEAF_1_EDX | if vcpus > 1 { LEAF_1_EDX_HTT } else { 0 },
                ..found
            };
            Leaf { fill: Fill::Features, ..Leaf::plain(registers) }
        }
        6 => Leaf::plain(Registers { eax: LEAF_6_EAX_ARAT, ..zero }),
        7 => Leaf { subleaves: more_features(), ignores_ecx: false, fill: Fill::MoreFeatures },
        0xb => Leaf { subleaves: topology(vcpus), ignores_ecx: false, fill: Fill::Topology },
        0xd => Leaf { subleaves: extended_state(), ignores_ecx: false, fill: Fill::ExtendedState },
        // 2, 3, 4: other vendors'. 5: MONITOR. 9, A: performance counters. 8, C: reserved.
        _ => Leaf::plain(zero),
    }
}

/// Leaf 7.
fn more_features() -> Vec<Registers> {
    let (found, told) = (host(7), speculation::told());
    let mut first = Registers {
        eax: 0,
        ebx: found.ebx & LEAF_7_EBX,
        ecx: found.ecx & LEAF_7_ECX,
        edx: found.edx & LEAF_7_EDX | told.leaf_7_edx,
    };
    if told.leaf_7_2_edx == 0 {
        return Vec::from([first]);
    }
    first.eax = 2;
    Vec::from([first, Registers::default(), Registers { edx: told.leaf_7_2_edx, ..Registers::default() }])
}

/// Every vCPU is a core of one package: a level of one thread per core, a level of all cores.
fn topology(vcpus: u32) -> Vec<Registers> {
    const THREADS: u32 = 1 << 8;
    const CORES: u32 = 2 << 8;
    let threads = Registers { eax: 0, ebx: 1, ecx: THREADS, edx: 0 };
    let cores = Registers { eax: id_bits(vcpus), ebx: vcpus, ecx: CORES, edx: 0 };
    Vec::from([threads, cores])
}

/// Bits that APIC ids of `vcpus` vCPUs need.
fn id_bits(vcpus: u32) -> u32 {
    vcpus.next_power_of_two().ilog2()
}

/// Sizes and offsets are the machine's, for the components that are offered.
fn extended_state() -> Vec<Registers> {
    let offered = fpu::host_xcr0();
    let [low, high] = halves(offered);
    let largest = (2..64)
        .filter(|component| offered >> component & 1 != 0)
        .map(|component| host_subleaf(0xd, component))
        .map(|component| component.ebx + component.eax)
        .max()
        .unwrap_or(0)
        .max(576);
    let first = Registers { eax: low, ebx: largest, ecx: largest, edx: high };
    let second = Registers { eax: host_subleaf(0xd, 1).eax & LEAF_D_1_EAX, ..Registers::default() };
    let components = (2..64).map(|component| match offered >> component & 1 {
        0 => Registers::default(),
        _ => host_subleaf(0xd, component),
    });
    [first, second].into_iter().chain(components).collect()
}

fn extended_leaf(number: u32, vcpus: u32) -> Leaf {
    let fill = if number == 0x8000_0001 { Fill::ExtendedFeatures } else { Fill::Nothing };
    Leaf { fill, ..Leaf::plain(extended_registers(number, vcpus)) }
}

fn extended_registers(number: u32, vcpus: u32) -> Registers {
    let found = host(number);
    match number {
        0x8000_0000 => Registers { eax: extended_max(), ..found },
        0x8000_0001 => Registers {
            eax: found.eax,
            ebx: 0,
            ecx: found.ecx & LEAF_8000_0001_ECX | amd_cores(number, vcpus),
            edx: found.edx & LEAF_8000_0001_EDX,
        },
        // The processor's name, and the caches.
        0x8000_0002..=0x8000_0006 => found,
        0x8000_0007 if tsc::is_invariant() => {
            Registers { edx: leaf_8000_0007_edx::TSC_INVARIANT, ..Registers::default() }
        }
        0x8000_0008 => Registers {
            // Physical addresses are as wide as the host's. Linear ones have four levels of tables, because LA57 is not
            // offered.
            eax: found.eax & 0xff | LINEAR_ADDRESS_BITS << 8,
            ebx: found.ebx & LEAF_8000_0008_EBX | speculation::told().extended_8_ebx,
            ecx: amd_cores(number, vcpus),
            edx: 0,
        },
        0x8000_0021 => {
            let told = speculation::told();
            Registers { eax: told.extended_21_eax, ebx: 0, ecx: told.extended_21_ecx, edx: 0 }
        }
        _ => Registers::default(),
    }
}

/// The last extended leaf.
fn extended_max() -> u32 {
    let told = speculation::told();
    if told.extended_21_eax | told.extended_21_ecx == 0 { EXTENDED_MAX } else { EXTENDED_MAX_ON_ZEN }
}

/// Numbers of cores in ECX of extended leaves, on AMD's processors only (APM vol. 3, E.4.2 and E.4.7). Intel's
/// processors have these bits reserved, and report cores in leaf B only (SDM vol. 2, CPUID).
fn amd_cores(number: u32, vcpus: u32) -> u32 {
    match number {
        0x8000_0001 if vcpus > 1 => LEAF_8000_0001_ECX_CMP_LEGACY,
        // Number of cores minus one, and the number of bits of an APIC id that count them.
        0x8000_0008 => id_bits(vcpus) << 12 | (vcpus - 1).min(0xff),
        _ => 0,
    }
}

/// The hypervisor's own leaves, for a VM that is offered no Hyper-V interface.
///
/// A kernel first needs two things from a hypervisor: the frequency of the TSC, and permission to use the x2APIC
/// without interrupt remapping. VMware's interface is the smallest that gives both to unmodified kernels: one leaf with
/// the frequencies, and two calls (`docs/decisions/0004-guest-clock.md`).
fn vmware_leaf(number: u32) -> Registers {
    /// The calls are made by VMMCALL.
    const CALLS_BY_VMMCALL: u32 = 1 << 0;
    match number {
        HYPERVISOR_FIRST => Registers {
            eax: VMWARE_MAX,
            ebx: u32::from_le_bytes(*b"VMwa"),
            ecx: u32::from_le_bytes(*b"reVM"),
            edx: u32::from_le_bytes(*b"ware"),
        },
        VMWARE_MAX => {
            Registers { eax: kilohertz(tsc::hz()), ebx: kilohertz(timer_hertz()), ecx: CALLS_BY_VMMCALL, edx: 0 }
        }
        _ => Registers::default(),
    }
}

/// Frequency of the guests' APIC timers, before their dividers.
pub(in crate::arch::x86_64) fn timer_hertz() -> u64 {
    tsc::hz() / TSC_TICKS_PER_TIMER_TICK
}

/// Width of the guests' physical addresses: the host's, from leaf 8000_0008.
pub(super) fn physical_address_bits() -> u8 {
    static BITS: Once<u8> = Once::new();
    *BITS.call_once(|| host(0x8000_0008).eax.to_le_bytes()[0])
}

/// The end of the guests' physical addresses.
pub(crate) fn physical_addresses_end() -> Gpa {
    Gpa(1 << physical_address_bits())
}

fn kilohertz(hertz: u64) -> u32 {
    u32::try_from(hertz / 1000).unwrap_or(u32::MAX)
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}
