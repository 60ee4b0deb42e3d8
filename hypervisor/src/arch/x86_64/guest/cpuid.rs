//! CPUID as a guest sees it: what [`x86_defs::features`] offers, and the hypervisor's own leaves.
//!
//! The answers are computed once per VM. An exit only looks one up and fills in the few bits that differ between vCPUs
//! or follow a control register.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::arch::x86_64::{__cpuid, __cpuid_count};

use abi::payload::{ApicMode, VmConfig};
use addr::Gpa;
use mitigations::Reports;
use partition::Features;
use spin::Once;
use x86_defs::control::{Leaves, Offered};
use x86_defs::cpuid::{Registers, leaf_1_ecx, leaf_7_ecx};
use x86_defs::features::{self, BASIC_MAX, EXTENDED_FIRST, EXTENDED_MAX, Guest};
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
const HYPERVISOR_FIRST: u32 = 0x4000_0000;
const VMWARE_MAX: u32 = 0x4000_0010;
/// The last extended leaf, if it says something of speculation.
const EXTENDED_21: u32 = 0x8000_0021;

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
    fn of(guest: &Guest, number: u32) -> Self {
        let fill = match number {
            1 => Fill::Features,
            7 => Fill::MoreFeatures,
            0xb => Fill::Topology,
            0xd => Fill::ExtendedState,
            0x8000_0001 => Fill::ExtendedFeatures,
            _ => Fill::Nothing,
        };
        let count = features::subleaves(number);
        let subleaves = (0..count.unwrap_or(1)).map(|subleaf| guest.answer(number, subleaf, host_subleaf));
        Self { subleaves: subleaves.collect(), ignores_ecx: count.is_none(), fill }
    }

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
        let guest = Guest {
            vcpus: config.vcpus,
            has_x2apic: config.apic == ApicMode::X2Apic,
            has_invariant_tsc: tsc::is_invariant(),
            xcr0: fpu::host_xcr0(),
        };
        let hypervisor = match Profile::of(config, child) {
            Some(profile) => (HYPERVISOR_FIRST..=hyperv::MAX_LEAF).map(|number| profile.leaf(number)).collect(),
            None => (HYPERVISOR_FIRST..=VMWARE_MAX).map(vmware_leaf).collect::<Vec<_>>(),
        };
        let mut table = Self {
            basic: (0..=BASIC_MAX).map(|number| Leaf::of(&guest, number)).collect(),
            hypervisor: hypervisor.into_iter().map(Leaf::plain).collect(),
            extended: (EXTENDED_FIRST..=EXTENDED_MAX).map(|number| Leaf::of(&guest, number)).collect(),
            offered: Offered::default(),
            reports: Reports::default(),
            of_child: None,
        };
        table.tell(&speculation::told());
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

    /// Adds what a guest is told of speculation.
    fn tell(&mut self, told: &Reports) {
        let zero = Registers::default();
        if let Some(first) = self.place(7, 0) {
            first.edx |= told.leaf_7_edx;
        }
        if told.leaf_7_2_edx != 0
            && let Some(leaf) = self.basic.get_mut(7)
            && let Some(first) = leaf.subleaves.first_mut()
        {
            first.eax = 2;
            leaf.subleaves.extend([zero, Registers { edx: told.leaf_7_2_edx, ..zero }]);
        }
        if let Some(eighth) = self.place(0x8000_0008, 0) {
            eighth.ebx |= told.extended_8_ebx;
        }
        let last = Registers { eax: told.extended_21_eax, ecx: told.extended_21_ecx, ..zero };
        if last != zero {
            self.extended.extend((EXTENDED_MAX + 1..EXTENDED_21).map(|_| Leaf::plain(zero)));
            self.extended.push(Leaf::plain(last));
            if let Some(first) = self.place(EXTENDED_FIRST, 0) {
                first.eax = EXTENDED_21;
            }
        }
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
