//! The x86-64 part of the Hyper-V interface: CPUID leaves, synthetic MSRs, the hypercall instruction.
//!
//! The VM's keys `hyperv` and `flush` choose the offered part ([`Profile`]). Pages that the guest places (the hypercall
//! page, the reference TSC page) are written into the guest's own memory, not mapped over it; kernels provide pages for
//! them.

use core::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use abi::payload::{ApicMode, HyperV as Offer, RemoteFlush, Role, VmConfig};
use addr::{Gpa, GpaRange};
use hyperv_defs::call::{FAST_BYTES, FAST_WORDS};
use hyperv_defs::cpuid::{self as leaf, Features, HardwareFeatures, Privileges, PrivilegesHigh, Recommendations};
use hyperv_defs::hypercall::CallInstruction;
use hyperv_defs::msr::{self, HypercallMsr, ReferenceTscMsr, VpAssistMsr};
use hyperv_defs::property::{ProcessorFeatures, SyntheticFeatures};
use hyperv_defs::reference_tsc::{self, ReferenceTsc, UNITS_PER_SECOND};
use hyperv_defs::{Answer, Checked, Control, Offered, Status, fast_input};
use partition::Features as ChildFeatures;
use sched::Pending;
use serde::{Deserialize, Serialize};
use spin::Mutex;
use stage2::Access;
use x86_defs::cpuid::Registers;
use x86_defs::registers::{cr0, efer};
use x86_emulate::{Segment, SegmentRegister, Vendor};

use super::apic::{Origin, apply};
use super::assist::{self, Assist};
use super::cpuid::CpuidTable;
use super::intercept::Missing;
use super::platform::Platform;
use super::state::{State as _, gpr};
use super::synic::owed;
use super::vcpu::ArchVcpu;
use super::{children, cpuid, fpu, intercept, synic};
use crate::arch::hypercall::{self, Children, Ended, Input, Rights};
use crate::arch::x86_64::backend;
use crate::arch::x86_64::host::tsc;
use crate::device::local_apic::GeneralProtection;
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;
use crate::vm::fault::Resolved;

/// The synthetic MSRs.
pub(super) const FIRST_MSR: u32 = *msr::RANGE.start();
/// The last of them.
pub(super) const LAST_MSR: u32 = *msr::RANGE.end();
/// The last of the hypervisor's CPUID leaves.
pub(super) const MAX_LEAF: u32 = leaf::MAX_LEAF;

/// The part offered to a VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Profile {
    privileges: Privileges,
    privileges_high: PrivilegesHigh,
    features: Features,
    recommendations: Recommendations,
    vcpus: u32,
}

const PRIVILEGES: Privileges = Privileges::VP_RUNTIME
    .union(Privileges::REFERENCE_COUNTER)
    .union(Privileges::SYNIC)
    .union(Privileges::SYNTHETIC_TIMERS)
    .union(Privileges::APIC)
    .union(Privileges::HYPERCALL)
    .union(Privileges::VP_INDEX)
    .union(Privileges::REFERENCE_TSC)
    .union(Privileges::FREQUENCIES)
    .union(Privileges::TSC_INVARIANT);
const FEATURES: Features = Features::XMM_INPUT.union(Features::FREQUENCIES).union(Features::DIRECT_TIMERS);
const HARDWARE: HardwareFeatures = HardwareFeatures::MSR_BITMAPS.union(HardwareFeatures::SECOND_LEVEL_TRANSLATION);

/// The privileges that a child gets with its features.
const PRIVILEGES_OF_A_CHILD: [(SyntheticFeatures, Privileges); 8] = [
    (SyntheticFeatures::VP_RUNTIME, Privileges::VP_RUNTIME),
    (SyntheticFeatures::REFERENCE_COUNTER, Privileges::REFERENCE_COUNTER),
    (SyntheticFeatures::SYNIC, Privileges::SYNIC),
    (SyntheticFeatures::SYNTHETIC_TIMERS, Privileges::SYNTHETIC_TIMERS),
    (SyntheticFeatures::HYPERCALL, Privileges::HYPERCALL),
    (SyntheticFeatures::VP_INDEX, Privileges::VP_INDEX),
    (SyntheticFeatures::REFERENCE_TSC, Privileges::REFERENCE_TSC),
    (SyntheticFeatures::FREQUENCIES, Privileges::FREQUENCIES),
];

/// Further privileges of a parent. Not CPU_MANAGEMENT, which would make it the root of the machine.
const OF_A_PARENT: PrivilegesHigh = PrivilegesHigh::CREATE_PARTITIONS
    .union(PrivilegesHigh::ACCESS_MEMORY_POOL)
    .union(PrivilegesHigh::POST_MESSAGES)
    .union(PrivilegesHigh::CREATE_PORT)
    .union(PrivilegesHigh::CONNECT_PORT)
    .union(PrivilegesHigh::STATISTICS)
    .union(PrivilegesHigh::VP_REGISTERS);

/// Build number of version 10.0, the same as in other implementations of the interface.
const BUILD: u32 = 0x3839;
/// Linux' driver for parents knows the builds from 27 744 to 27 751, and complains of any other.
const PARENT_BUILD: u32 = 27_744;

impl Profile {
    /// From the VM's description, and from a child's features. `None` without the interface.
    pub(super) fn of(config: &VmConfig, child: Option<&ChildFeatures>) -> Option<Self> {
        let flush = config.flush == RemoteFlush::Hypercall;
        let ipi = match config.hyperv {
            Offer::Off => return None,
            Offer::Flush => false,
            Offer::FlushIpi => true,
        };
        let mut recommendations = Recommendations::RELAXED_TIMING;
        // With it, a parent takes each message about a child without an exit for the interrupt's end.
        recommendations.set(Recommendations::DEPRECATE_AUTO_EOI, config.role == Role::Guest);
        recommendations.set(Recommendations::REMOTE_FLUSH, flush);
        recommendations.set(Recommendations::CLUSTER_IPI, ipi);
        recommendations.set(Recommendations::EX_PROCESSOR_MASKS, flush || ipi);
        let privileges_high = match config.role {
            Role::Guest => PrivilegesHigh::empty(),
            Role::Parent => OF_A_PARENT,
        };
        // The registers of an xAPIC are in memory, and some guests are there to access them. Linux uses the one for EOI
        // beside those of an x2APIC.
        recommendations.set(Recommendations::APIC_MSRS, child.is_none() && config.apic == ApicMode::X2Apic);
        let (mut privileges, mut features) = (PRIVILEGES, FEATURES);
        if let Some(child) = child {
            privileges.remove(Privileges::APIC);
            let has = |feature| child.synthetic.contains(feature);
            for (feature, privilege) in PRIVILEGES_OF_A_CHILD {
                privileges.set(privilege, has(feature));
            }
            privileges.set(Privileges::TSC_INVARIANT, child.processor.contains(ProcessorFeatures::TSC_INVARIANT));
            features.set(Features::FREQUENCIES, has(SyntheticFeatures::FREQUENCIES));
            features.set(Features::DIRECT_TIMERS, has(SyntheticFeatures::DIRECT_TIMERS));
            recommendations
                .set(Recommendations::EX_PROCESSOR_MASKS, (flush || ipi) && has(SyntheticFeatures::EX_PROCESSOR_MASKS));
        }
        Some(Self { privileges, privileges_high, features, recommendations, vcpus: config.vcpus })
    }

    /// The calls that it may make.
    fn offered(self) -> Offered {
        Offered::by_cpuid(self.recommendations, self.features, self.privileges_high)
    }

    /// The answer of CPUID leaf `number`.
    pub(super) fn leaf(self, number: u32) -> Registers {
        let zero = Registers::default();
        match number {
            leaf::VENDOR_AND_MAX => {
                let [ebx, ecx, edx] = leaf::VENDOR;
                Registers { eax: MAX_LEAF, ebx, ecx, edx }
            }
            leaf::INTERFACE => Registers { eax: leaf::SIGNATURE, ..zero },
            leaf::VERSION => {
                let is_parent = self.privileges_high.contains(PrivilegesHigh::CREATE_PARTITIONS);
                Registers { eax: if is_parent { PARENT_BUILD } else { BUILD }, ebx: 0x000a_0000, ..zero }
            }
            leaf::FEATURES => {
                let hidden = if tsc::is_invariant() { Privileges::empty() } else { Privileges::TSC_INVARIANT };
                let (eax, ebx) = (self.privileges.difference(hidden).bits(), self.privileges_high.bits());
                Registers { eax, ebx, edx: self.features.bits(), ..zero }
            }
            leaf::RECOMMENDATIONS => {
                Registers { eax: self.recommendations.bits(), ebx: leaf::SPIN_NEVER_NOTIFY, ..zero }
            }
            leaf::LIMITS => Registers { eax: self.vcpus, ebx: self.vcpus, ..zero },
            leaf::HARDWARE => Registers { eax: HARDWARE.bits(), ..zero },
            _ => zero,
        }
    }
}

/// State of a VM.
pub(in crate::arch::x86_64) struct HyperV {
    offered: Offered,
    /// The MSRs that a child has. Other VMs have all of them.
    privileges: Privileges,
    /// Turn the host's TSC into the VM's time.
    scale: u64,
    offset: AtomicI64,
    /// The VMs that it has created, if it may.
    children: Option<Children>,
    /// Zero: the guest has not identified itself, and has no hypercalls.
    guest_os_id: AtomicU64,
    /// The guest's settings for the whole VM. The holder of the lock writes to the pages that they name.
    registers: Mutex<VmRegisters>,
}

struct VmRegisters {
    hypercall: HypercallMsr,
    reference_tsc: ReferenceTscMsr,
    /// The last version of the clock that the guest was shown.
    sequence: u32,
    /// A child's page shows an old clock, because the page was away.
    owes_clock: bool,
    relies_on_tsc: bool,
}

impl HyperV {
    /// The interface for a VM whose time begins now, if it is offered.
    pub(super) fn new(
        config: &VmConfig,
        cpuid: &CpuidTable,
        child: Option<&ChildFeatures>,
        ram: &[GpaRange],
    ) -> Option<Self> {
        let profile = Profile::of(config, child)?;
        let children = match config.role {
            Role::Guest => None,
            Role::Parent => Children::new(children::host(cpuid), config.vcpus, ram.iter().copied()),
        };
        let scale = reference_tsc::scale_for(tsc::hz()).unwrap_or(u64::MAX);
        let registers = VmRegisters {
            hypercall: HypercallMsr::default(),
            reference_tsc: ReferenceTscMsr::default(),
            sequence: 0,
            owes_clock: false,
            relies_on_tsc: false,
        };
        Some(Self {
            offered: profile.offered(),
            privileges: if child.is_some() { profile.privileges } else { Privileges::all() },
            scale,
            offset: AtomicI64::new(reference_tsc::offset_for(tsc::now(), scale, 0)),
            children,
            guest_os_id: AtomicU64::new(0),
            registers: Mutex::new(registers),
        })
    }
}

impl Platform {
    /// The VM's children, if it may have some.
    pub(in crate::arch::x86_64) fn children(&self) -> Option<&Children> {
        self.hyperv.as_ref()?.children.as_ref()
    }
}

/// Registers of the whole VM, for its parent.
impl HyperV {
    /// Turns the host's TSC into the VM's time.
    pub(super) fn clock(&self) -> ReferenceTsc {
        ReferenceTsc { sequence: 0, scale: self.scale, offset: self.offset.load(Ordering::Relaxed) }
    }

    /// Sets the VM's time to `time` at the host's TSC `tick`.
    pub(super) fn set_time(&self, tick: u64, time: u64) {
        self.offset.store(reference_tsc::offset_for(tick, self.scale, time), Ordering::Relaxed);
    }

    /// GUEST_OS_ID, HYPERCALL or REFERENCE_TSC.
    pub(super) fn shared(&self, number: u32) -> u64 {
        match number {
            msr::GUEST_OS_ID => self.guest_os_id.load(Ordering::Relaxed),
            msr::HYPERCALL => self.registers.lock().hypercall.0,
            _ => self.registers.lock().reference_tsc.0,
        }
    }

    /// Writes GUEST_OS_ID, HYPERCALL or REFERENCE_TSC as they were in a guest that is restored. The hypercall page is
    /// in its memory already; the clock's page is written, because this host's clock is another. `None` if there is no
    /// memory for the hypercall page.
    pub(super) fn set_shared(&self, number: u32, value: u64, vm: &Vm) -> Option<()> {
        let mut registers = self.registers.lock();
        match number {
            msr::GUEST_OS_ID => {
                self.guest_os_id.store(value, Ordering::Relaxed);
                if value == 0 {
                    // A guest that is reset.
                    registers.hypercall = HypercallMsr::default();
                    self.place_clock(&mut registers, ReferenceTscMsr::default(), vm);
                    registers.relies_on_tsc = false;
                }
            }
            msr::HYPERCALL if HypercallMsr(value).page() < cpuid::physical_addresses_end() => {
                registers.hypercall = HypercallMsr(value);
            }
            msr::HYPERCALL => return None,
            _ => {
                self.place_clock(&mut registers, ReferenceTscMsr(value), vm);
                if registers.owes_clock {
                    drop(registers);
                    // Each vCPU does this before it runs.
                    (0..).take(vm.vcpus().len()).for_each(|index| vm.post(index, Pending::MESSAGE));
                }
            }
        }
        Some(())
    }

    /// The clock or the guest's TSC has changed, so the page of REFERENCE_TSC must change too.
    pub(super) fn owe_clock(&self) {
        let mut registers = self.registers.lock();
        registers.owes_clock = registers.reference_tsc.is_enabled();
    }

    /// A write of REFERENCE_TSC.
    fn place_clock(&self, registers: &mut VmRegisters, wanted: ReferenceTscMsr, vm: &Vm) {
        registers.reference_tsc = wanted;
        registers.owes_clock = wanted.is_enabled() && !self.write_clock(registers, vm) && vm.as_child().is_some();
    }

    /// Writes the page of REFERENCE_TSC. Returns whether it is there: without it the guest has no such clock.
    fn write_clock(&self, registers: &mut VmRegisters, vm: &Vm) -> bool {
        let memory = &vm.memory;
        let mut clock = self.clock();
        let offset = match vm.as_child() {
            Some(child) => child.tsc.lock().offset(),
            None => vm.platform().tsc_offset.load(Ordering::Relaxed),
        };
        if offset != 0 {
            // Its guest's TSC is another.
            let now = tsc::now();
            clock.offset = reference_tsc::offset_for(now.wrapping_add_signed(offset), clock.scale, clock.time(now));
        }
        let shown = ReferenceTsc { sequence: registers.sequence, ..clock };
        let clock = ReferenceTsc { sequence: shown.next_sequence(), ..shown };
        registers.sequence = clock.sequence;
        let at = registers.reference_tsc.page();
        let page = clock.encode();
        let (sequence, rest) = page.split_at(reference_tsc::SCALE_OFFSET);
        // The guest sees an invalid page until all of it is written.
        let void = ReferenceTsc::INVALID.encode();
        memory.write(at, &void) && memory.write(Gpa(at.0 + sequence.len() as u64), rest) && memory.write(at, sequence)
    }
}

/// What a file keeps of the interface: registers of the whole VM, and its time. Pages are in its memory.
#[derive(Serialize, Deserialize)]
pub(super) struct SharedState {
    time: u64,
    guest_os_id: u64,
    hypercall: u64,
    reference_tsc: u64,
    sequence: u32,
    relies_on_tsc: bool,
}

/// For a file, while the VM is paused. It is no child.
impl HyperV {
    /// The state when the host's TSC was `tick`.
    pub(super) fn state(&self, tick: u64) -> SharedState {
        let registers = self.registers.lock();
        SharedState {
            time: self.clock().time(tick),
            guest_os_id: self.guest_os_id.load(Ordering::Relaxed),
            hypercall: registers.hypercall.0,
            reference_tsc: registers.reference_tsc.0,
            sequence: registers.sequence,
            relies_on_tsc: registers.relies_on_tsc,
        }
    }

    /// Takes over a state at `tick`. `None` if no guest could have it. The page of REFERENCE_TSC is written when the
    /// VM's time goes on.
    pub(super) fn set_state(&self, state: &SharedState, tick: u64) -> Option<()> {
        let hypercall = HypercallMsr(state.hypercall);
        if hypercall.page() >= cpuid::physical_addresses_end() {
            return None;
        }
        self.set_time(tick, state.time);
        self.guest_os_id.store(state.guest_os_id, Ordering::Relaxed);
        let mut registers = self.registers.lock();
        registers.hypercall = hypercall;
        registers.reference_tsc = ReferenceTscMsr(state.reference_tsc);
        registers.sequence = state.sequence;
        registers.relies_on_tsc = state.relies_on_tsc;
        Some(())
    }

    /// The VM's clocks have moved: writes the page of REFERENCE_TSC again.
    pub(super) fn renew_clock(&self, vm: &Vm) {
        let mut registers = self.registers.lock();
        if registers.reference_tsc.is_enabled() {
            // A guest that has named an address without memory has no such clock.
            let _is_there = self.write_clock(&mut registers, vm);
        }
    }
}

/// Writes a page that is [`owed`] to a child. Returns its address if it is not there.
pub(super) fn write_owed(run: &mut Running<'_>, page: u32) -> Option<Gpa> {
    let hyperv = run.vm.platform().hyperv.as_ref()?;
    let memory = &run.vm.memory;
    let mut registers = hyperv.registers.lock();
    let (at, is_written) = match page {
        owed::CLOCK if registers.owes_clock => {
            registers.owes_clock = !hyperv.write_clock(&mut registers, run.vm);
            (registers.reference_tsc.page(), !registers.owes_clock)
        }
        owed::HYPERCALL if registers.hypercall.is_enabled() => {
            let at = registers.hypercall.page();
            (at, memory.write(at, &call_instruction().page()))
        }
        owed::ASSIST if run.owner.arch.vp_assist.is_enabled() => {
            let at = run.owner.arch.vp_assist.page();
            (at, memory.write(at, &NO_EOI_ASSIST))
        }
        _ => return None,
    };
    (!is_written).then_some(at)
}

/// The first word of a VP assist page: each interrupt has to be ended.
const NO_EOI_ASSIST: [u8; 4] = [0; 4];

impl HyperV {
    /// Its children, if it is a parent.
    pub(super) fn children(&self) -> Option<&Children> {
        self.children.as_ref()
    }
}

/// The fault of a child's vCPU at `gpa`: its parent has said what is there.
pub(crate) fn fault_of_child(run: &mut Running<'_>, gpa: Gpa, needs: Access) -> Resolved {
    let vm = run.vm;
    let parent = vm.as_child().and_then(|child| child.parent.platform().hyperv.as_ref());
    match parent.and_then(|parent| parent.children.as_ref()) {
        Some(children) => hypercall::fault(run, children, gpa, needs),
        None => Resolved::Device,
    }
}

/// Reads a synthetic MSR for the guest.
///
/// # Errors
/// When it does not exist, or is not offered: the guest gets #GP.
#[cold]
#[inline(never)]
pub(super) fn read_msr(run: &mut Running<'_>, number: u32) -> Result<u64, GeneralProtection> {
    let hyperv = run.vm.platform().hyperv.as_ref().ok_or(GeneralProtection)?;
    hyperv.check_privilege(number)?;
    Ok(match number {
        msr::GUEST_OS_ID => hyperv.guest_os_id.load(Ordering::Relaxed),
        msr::HYPERCALL => hyperv.registers.lock().hypercall.0,
        msr::VP_INDEX => run.index.into(),
        msr::VP_RUNTIME => tsc::ticks_to_nanos(run.owner.arch.runtime(run.tally)) / NANOS_PER_UNIT,
        msr::TIME_REF_COUNT => hyperv.clock().time(tsc::now()),
        msr::REFERENCE_TSC => hyperv.registers.lock().reference_tsc.0,
        msr::TSC_FREQUENCY => tsc::hz(),
        msr::APIC_FREQUENCY => cpuid::timer_hertz(),
        msr::VP_ASSIST_PAGE => run.owner.arch.vp_assist.0,
        msr::ICR => run.owner.arch.apic.xapic_command()?,
        msr::TPR => run.owner.arch.apic.task_priority()?.into(),
        msr::TSC_INVARIANT_CONTROL => hyperv.registers.lock().relies_on_tsc.into(),
        number if synic::has(number) => return synic::read_msr(run, number),
        _ => return Err(GeneralProtection),
    })
}

/// The interface counts time in units of 100 ns.
const NANOS_PER_UNIT: u64 = 1_000_000_000 / UNITS_PER_SECOND;

/// Writes a synthetic MSR for the guest.
///
/// # Errors
/// As for [`read_msr`], and when it cannot be written, or not with this value.
#[cold]
#[inline(never)]
pub(super) fn write_msr(run: &mut Running<'_>, number: u32, value: u64) -> Result<(), GeneralProtection> {
    let hyperv = run.vm.platform().hyperv.as_ref().ok_or(GeneralProtection)?;
    hyperv.check_privilege(number)?;
    if synic::has(number) {
        return synic::write_msr(run, number, value, hyperv.clock());
    }
    if let msr::EOI | msr::ICR | msr::TPR = number {
        let apic = &mut run.owner.arch.apic;
        let effect = match number {
            msr::EOI => apic.end_of_interrupt(),
            msr::ICR => apic.set_xapic_command(value)?,
            _ => apic.write_task_priority(value)?,
        };
        apply(Origin::of(run), &mut run.owner.arch.apic, effect);
        return Ok(());
    }
    let memory = &run.vm.memory;
    let mut registers = hyperv.registers.lock();
    match number {
        msr::GUEST_OS_ID => {
            if value == 0 {
                registers.hypercall = registers.hypercall.with_enable(false);
                // Linux does this before it starts another kernel, even if its children still run.
                if let Some(children) = &hyperv.children {
                    children.abandon();
                }
            }
            hyperv.guest_os_id.store(value, Ordering::Relaxed);
        }
        msr::HYPERCALL if registers.hypercall.is_locked() => {}
        msr::HYPERCALL => {
            let mut wanted = HypercallMsr(value);
            if wanted.page() >= cpuid::physical_addresses_end() {
                return Err(GeneralProtection);
            }
            if hyperv.guest_os_id.load(Ordering::Relaxed) == 0 {
                wanted = wanted.with_enable(false);
            }
            if !wanted.is_enabled() || memory.write(wanted.page(), &call_instruction().page()) {
                registers.hypercall = wanted;
                return Ok(());
            }
            drop(registers);
            if !may_come_back(run, wanted.page()) {
                return Err(GeneralProtection);
            }
            hyperv.registers.lock().hypercall = wanted;
            synic::owe(run, owed::HYPERCALL);
        }
        msr::REFERENCE_TSC => {
            hyperv.place_clock(&mut registers, ReferenceTscMsr(value), run.vm);
            if registers.owes_clock {
                synic::owe(run, owed::CLOCK);
            }
        }
        msr::VP_ASSIST_PAGE => {
            let wanted = VpAssistMsr(value);
            assist::withdraw(run);
            run.owner.arch.vp_assist = wanted;
            if wanted.is_enabled() {
                // If the page does not exist, the guest gets none.
                let is_written = memory.write(wanted.page(), &NO_EOI_ASSIST);
                match run.vm.as_child() {
                    None if is_written => run.owner.arch.assist = Assist::at(wanted),
                    Some(_) if !is_written => synic::owe(run, owed::ASSIST),
                    _ => {}
                }
            }
        }
        msr::TSC_INVARIANT_CONTROL => match value {
            msr::TSC_INVARIANT_EXPOSE => registers.relies_on_tsc = true,
            0 if !registers.relies_on_tsc => {}
            _ => return Err(GeneralProtection),
        },
        _ => return Err(GeneralProtection),
    }
    Ok(())
}

/// Whether the parent can bring this page of a child back.
fn may_come_back(run: &mut Running<'_>, gpa: Gpa) -> bool {
    run.vm.as_child().is_some() && intercept::missing(run, gpa, Access::READ_WRITE) != Missing::Nowhere
}

impl HyperV {
    /// Refuses an MSR that a child does not have.
    fn check_privilege(&self, number: u32) -> Result<(), GeneralProtection> {
        let needed = match number {
            msr::GUEST_OS_ID | msr::HYPERCALL => Privileges::HYPERCALL,
            msr::VP_INDEX => Privileges::VP_INDEX,
            msr::VP_RUNTIME => Privileges::VP_RUNTIME,
            msr::TIME_REF_COUNT => Privileges::REFERENCE_COUNTER,
            msr::TSC_FREQUENCY | msr::APIC_FREQUENCY => Privileges::FREQUENCIES,
            msr::EOI | msr::ICR | msr::TPR => Privileges::APIC,
            msr::SCONTROL..=msr::SIRBP | msr::SINT0..=msr::SINT15 => Privileges::SYNIC,
            msr::STIMER0_CONFIG..=msr::STIMER3_COUNT => Privileges::SYNTHETIC_TIMERS,
            msr::TSC_INVARIANT_CONTROL => Privileges::TSC_INVARIANT,
            // Linux uses REFERENCE_TSC and VP_ASSIST_PAGE without asking.
            _ => Privileges::empty(),
        };
        if self.privileges.contains(needed) { Ok(()) } else { Err(GeneralProtection) }
    }
}

/// The instruction by which guests call.
fn call_instruction() -> CallInstruction {
    match backend::vendor() {
        Vendor::Amd => CallInstruction::Vmmcall,
        Vendor::Intel => CallInstruction::Vmcall,
    }
}

/// VMMCALL or VMCALL, in a VM that is offered the interface.
#[inline(always)]
pub(in crate::arch::x86_64) fn hypercall(run: &mut Running<'_>) -> Next {
    let arch = &mut run.owner.arch;
    let Some(hyperv) = run.vm.platform().hyperv.as_ref() else {
        arch.undefined();
        return Next::Resume;
    };
    let state = arch.hardware.control();
    if arch.hardware.cpl() != 0 || state.cr0 & cr0::PE == 0 || hyperv.guest_os_id.load(Ordering::Relaxed) == 0 {
        arch.undefined();
        return Next::Resume;
    }

    let is_long =
        state.efer & efer::LMA != 0 && arch.hardware.segment(Segment::Cs).attributes & SegmentRegister::LONG != 0;
    let arguments = Arguments::of(arch, is_long);
    let mut offered = hyperv.offered;
    if !is_long {
        // There is no such form for 32-bit callers.
        offered -= Offered::XMM_INPUT;
    }
    let rights = Rights { offered, children: hyperv.children.as_ref() };
    match hypercall::call(run, arguments.control, rights, Gpa(arguments.output), |checked| arguments.input(checked)) {
        Ended::With(result) => {
            finish(&mut run.owner.arch, is_long, result);
            Next::Resume
        }
        Ended::Yielding(result) => {
            finish(&mut run.owner.arch, is_long, result);
            Next::Yield
        }
        Ended::InvalidOpcode => {
            run.owner.arch.undefined();
            Next::Resume
        }
        Ended::Absent(at) => call_again_with(run, is_long, arguments.control, at),
        Ended::NotYet(control) => {
            let arch = &mut run.owner.arch;
            if is_long {
                arch.gprs[gpr::RCX] = control.0;
            } else {
                arch.set_edx_eax(control.0);
            }
            Next::Resume
        }
    }
}

/// A child's call whose input at `gpa` had no page.
#[cold]
#[inline(never)]
fn call_again_with(run: &mut Running<'_>, is_long: bool, control: Control, gpa: Gpa) -> Next {
    intercept::again_with(run, gpa).unwrap_or_else(|| {
        let answer = Answer::new(Status::InvalidHypercallInput, control.rep_start());
        finish(&mut run.owner.arch, is_long, answer);
        Next::Resume
    })
}

/// The registers of a call.
struct Arguments {
    control: Control,
    /// Address of the input, or its first word.
    input: u64,
    /// Address of the output, or the second word of the input.
    output: u64,
}

impl Arguments {
    /// RCX, RDX, R8 in 64-bit mode; EDX:EAX, EBX:ECX, EDI:ESI otherwise.
    fn of(arch: &ArchVcpu, is_long: bool) -> Self {
        let pair = |high: usize, low: usize| arch.gprs[high] << 32 | arch.gprs[low] & 0xffff_ffff;
        if is_long {
            let control = Control(arch.gprs[gpr::RCX]);
            Self { control, input: arch.gprs[gpr::RDX], output: arch.gprs[gpr::R8] }
        } else {
            let control = Control(arch.edx_eax());
            Self { control, input: pair(gpr::RBX, gpr::RCX), output: pair(gpr::RDI, gpr::RSI) }
        }
    }

    fn input(&self, checked: &Checked) -> Input {
        if !checked.is_fast() {
            return Input::Memory(Gpa(self.input));
        }
        let mut words = [0; FAST_WORDS];
        (words[0], words[1]) = (self.input, self.output);
        if checked.input_bytes() > FAST_BYTES {
            words[2..].copy_from_slice(&fpu::first_vector_registers());
        }
        Input::Registers(fast_input(&words))
    }
}

/// Writes the result to RAX, or EDX:EAX, and moves RIP behind the call.
fn finish(arch: &mut ArchVcpu, is_long: bool, Answer(result): Answer) {
    if is_long {
        arch.hardware.set_rax(result);
    } else {
        arch.set_edx_eax(result);
    }
    arch.skip(3);
}
