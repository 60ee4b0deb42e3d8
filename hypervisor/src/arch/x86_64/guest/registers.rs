//! Registers of a child's vCPU by the names of the Hyper-V interface, for its parent.
//!
//! A virtual machine monitor writes a vCPU's registers in lists: when it makes the vCPU, when it has emulated an
//! instruction, when it restores a guest. Each value is checked alone. The next entry checks combinations, because CR0,
//! CR4 and EFER come in any order: VMRUN refuses an invalid one (APM vol. 2, 15.5.1), and then the parent gets a
//! message, as for a triple fault.
//!
//! Registers of features that no guest has here exist and are zero, because monitors write zero to them.

use hyperv_defs::Status;
use hyperv_defs::msr as synthetic;
use hyperv_defs::register::{
    FpControlStatus, PendingInterruption, Register, RegisterValue, SegmentRegister, TableRegister, activity,
};
use hyperv_defs::vp::CpuidResult;
use hyperv_defs::wire::{U16, U32, U64};
use sched::Pending;
use x86_defs::registers::{Segment, cr0, rflags, vector};
use x86_defs::{cpuid, msr};
use x86_events::{Event, Exception};

use super::cpuid as guest_cpuid;
use super::delivery;
use super::hyperv::HyperV;
use super::spec_ctrl;
use super::state::{Registers, State as _, SystemCalls, gpr};
use super::vcpu::ArchVcpu;
use crate::arch::VcpuState as _;
use crate::arch::hypercall::Held;
use crate::arch::x86_64::backend::{Injection as _, WorldSwitch as _};
use crate::arch::x86_64::host::tsc;
use crate::device::memory_types;
use crate::vcpu::activity::Activity;
use crate::vm::Vm;

/// The parent creates a vCPU again: its old state and all messages to it are gone.
pub(in crate::arch) fn power_on(held: &mut Held<'_>) {
    let arch = &mut held.owner.arch;
    delivery::take_posted(arch, held.vcpu.posted(), Pending::all());
    arch.power_on(held.index, &held.vm.config);
    held.vcpu.posted().publish_logical_id(arch.apic.logical_id());
}

/// Reads a register.
///
/// # Errors
/// [`Status::InvalidParameter`] if the vCPU has no such register.
pub(in crate::arch) fn read(held: &mut Held<'_>, register: Register) -> Result<RegisterValue, Status> {
    let arch = &mut held.owner.arch;
    Ok(match register {
        Register::Segment(number) => segment_of(arch, number),
        Register::Gdtr => table(&arch.hardware.registers().gdtr).into(),
        Register::Idtr => table(&arch.hardware.registers().idtr).into(),
        Register::Xmm(_) | Register::FpMmx(_) | Register::FpControlStatus | Register::XmmControlStatus => {
            u128::from_le_bytes(*arch.fpu.register(place_in_fpu(register))).into()
        }
        Register::PendingEvent0 => pending_exception(arch).into(),
        register => read_word(held, register)?.into(),
    })
}

/// Writes a register.
///
/// # Errors
/// [`Status::InvalidParameter`] if the vCPU has no such register, or it cannot be written;
/// [`Status::InvalidRegisterValue`] if it cannot have this value. Then nothing has changed.
pub(in crate::arch) fn write(held: &mut Held<'_>, register: Register, value: RegisterValue) -> Result<(), Status> {
    let arch = &mut held.owner.arch;
    match register {
        Register::Segment(number) => set_segment(arch, number, value.into()),
        Register::Gdtr => change(arch, |registers| registers.gdtr = from_table(value.into())),
        Register::Idtr => change(arch, |registers| registers.idtr = from_table(value.into())),
        Register::Xmm(_) | Register::FpMmx(_) | Register::XmmControlStatus => {
            let value = value.as_u128().to_le_bytes();
            return arch.fpu.set_register(place_in_fpu(register), value).ok_or(Status::InvalidRegisterValue);
        }
        Register::FpControlStatus => {
            let value = RegisterValue::from(FpControlStatus { reserved: 0, ..value.into() });
            let value = value.as_u128().to_le_bytes();
            return arch.fpu.set_register(place_in_fpu(register), value).ok_or(Status::InvalidRegisterValue);
        }
        Register::PendingEvent0 => return set_pending_exception(arch, value.as_u128()),
        register => return write_word(held, register, value.as_u64()),
    }
    Ok(())
}

/// Sets an answer of CPUID for the vCPU.
///
/// # Errors [`Status::NoResources`] if there are too many.
pub(in crate::arch) fn register_cpuid(held: &mut Held<'_>, result: &CpuidResult) -> Result<(), Status> {
    held.owner.arch.cpuid.register(result)
}

/// The counter of the VM's vCPUs is the host's with this offset.
pub(in crate::arch) fn set_tsc_offset(held: &mut Held<'_>, offset: i64) {
    let arch = &mut held.owner.arch;
    arch.set_tsc_offset(offset);
    if let Some(hyperv) = &held.vm.platform().hyperv {
        hyperv.owe_clock();
        arch.synic.set_clock(hyperv.clock());
        held.vm.post(held.index, Pending::MESSAGE);
    }
}

/// The VM's time stood still for so many ticks: timers of the local APIC that count come by so much later. The others
/// follow the VM's clocks.
pub(in crate::arch) fn move_timers(held: &mut Held<'_>, later: u64) {
    held.owner.arch.apic.move_count(later);
}

/// The VM's reference time at this tick of the host's clock; zero if it has none.
pub(in crate::arch) fn reference_time(vm: &Vm, tick: u64) -> u64 {
    vm.platform().hyperv.as_ref().map_or(0, |hyperv| hyperv.clock().time(tick))
}

/// At this tick it is `time`.
pub(in crate::arch) fn set_reference_time(vm: &Vm, tick: u64, time: u64) {
    if let Some(hyperv) = &vm.platform().hyperv {
        hyperv.set_time(tick, time);
    }
}

/// The tick of the host's clock that corresponds to a child's time.
pub(super) fn tick_of(vm: &Vm) -> u64 {
    let now = tsc::now();
    vm.as_child().map_or(now, |child| child.tsc.lock().tick(now))
}

/// What CPUID answers to the vCPU now.
pub(in crate::arch) fn cpuid(held: &mut Held<'_>, leaf: u32, subleaf: u32) -> [u32; 4] {
    let arch = &held.owner.arch;
    let table = &held.vm.platform().cpuid;
    let cpuid::Registers { eax, ebx, ecx, edx } = table.answer_to_child(arch, leaf, subleaf, arch.fpu.xcr0());
    [eax, ebx, ecx, edx]
}

/// A register of 64 bits.
fn read_word(held: &mut Held<'_>, register: Register) -> Result<u64, Status> {
    let arch = &mut held.owner.arch;
    let registers = arch.hardware.registers();
    let calls = arch.hardware.system_calls();
    Ok(match register {
        Register::Gpr(0) => registers.rax,
        Register::Gpr(number) if usize::from(number) == gpr::RSP => registers.rsp,
        Register::Gpr(number) => *arch.gprs.get(usize::from(number)).ok_or(Status::InvalidParameter)?,
        Register::Rip => registers.rip,
        Register::Rflags => registers.rflags,

        Register::Cr0 | Register::IntermediateCr0 => registers.control.cr0,
        Register::Cr2 => registers.cr2,
        Register::Cr3 | Register::IntermediateCr3 => registers.cr3,
        Register::Cr4 | Register::IntermediateCr4 => registers.control.cr4,
        Register::Cr8 | Register::IntermediateCr8 => arch.apic.cr8().into(),
        Register::Efer => registers.control.efer,
        Register::Xfem => arch.fpu.xcr0(),
        Register::Dr(number) => *arch.debug_addresses().get(usize::from(number)).ok_or(Status::InvalidParameter)?,
        Register::Dr6 => registers.dr6,
        Register::Dr7 => registers.dr7,

        Register::KernelGsBase => calls.kernel_gs_base,
        Register::SysenterCs => calls.sysenter_cs,
        Register::SysenterEip => calls.sysenter_eip,
        Register::SysenterEsp => calls.sysenter_esp,
        Register::Star => calls.star,
        Register::Lstar => calls.lstar,
        Register::Cstar => calls.cstar,
        Register::Sfmask => calls.sfmask,
        Register::Pat => registers.pat,
        Register::Tsc => arch.guest_tsc_at(tick_of(held.vm)),
        Register::TscAux => arch.tsc_aux(),
        Register::SpecCtrl => arch.hardware.spec_ctrl(),
        Register::TscDeadline => arch.tsc_deadline(),
        Register::ApicBase => arch.apic.base_msr(),
        Register::InitialApicId => arch.apic.id().into(),
        Register::MtrrCap
        | Register::MtrrDefType
        | Register::MtrrPhysBase(_)
        | Register::MtrrPhysMask(_)
        | Register::MtrrFixed(_) => {
            memory_type(register).and_then(|number| arch.kept.memory_types.read(number)).unwrap_or(0)
        }

        Register::PendingInterruption => pending_interruption(arch),
        Register::InterruptState => u64::from(arch.hardware.is_in_shadow()) | u64::from(arch.events.masks_nmis()) << 1,
        Register::InternalActivityState => match arch.activity {
            Activity::Active | Activity::Traced => 0,
            Activity::Halted => activity::HALT_SUSPEND,
            Activity::Off => activity::STARTUP_SUSPEND,
        },

        Register::VpIndex => held.index.into(),
        Register::VpRuntime => {
            let counters = held.vcpu.counters();
            tsc::ticks_to_nanos(counters.guest_ticks.get() + counters.host_ticks.get()) / NANOS_PER_UNIT
        }
        Register::VpAssistPage => arch.vp_assist.0,
        Register::TimeRefCount => reference_time(held.vm, tick_of(held.vm)),
        Register::GuestOsId | Register::Hypercall | Register::ReferenceTsc => {
            let number = synthetic_msr(register).ok_or(Status::InvalidParameter)?;
            held.vm.platform().hyperv.as_ref().map_or(0, |hyperv| hyperv.shared(number))
        }
        Register::Sint(_)
        | Register::Scontrol
        | Register::Sversion
        | Register::Siefp
        | Register::Simp
        | Register::Eom
        | Register::Sirbp
        | Register::Stimer(_) => {
            let number = synthetic_msr(register).ok_or(Status::InvalidParameter)?;
            arch.synic.read(number).ok_or(Status::InvalidParameter)?
        }
        register if is_always_zero(register) => 0,
        _ => return Err(Status::InvalidParameter),
    })
}

/// A register of 64 bits.
fn write_word(held: &mut Held<'_>, register: Register, value: u64) -> Result<(), Status> {
    let refused = Status::InvalidRegisterValue;
    let arch = &mut held.owner.arch;
    let before = arch.hardware.registers();
    match register {
        Register::Gpr(0) => arch.hardware.set_rax(value),
        Register::Gpr(number) if usize::from(number) == gpr::RSP => arch.hardware.set_rsp(value),
        Register::Gpr(number) => {
            *arch.gprs.get_mut(usize::from(number)).ok_or(Status::InvalidParameter)? = value;
        }
        Register::Rip => {
            if value != before.rip {
                // The interrupt shadow belonged to another instruction, which is not the next one now.
                arch.hardware.set_shadow(false);
                arch.events.abandon_step();
            }
            arch.hardware.set_rip(value);
        }
        Register::Rflags => arch.hardware.set_rflags(value & RFLAGS_DEFINED | rflags::RESERVED_ONE),

        Register::Cr0 | Register::IntermediateCr0 => {
            let next = before.control.set_cr0(value).map_err(|_| refused)?;
            arch.hardware.set_control(next);
            if value & cr0::PE != 0 && arch.activity == Activity::Off {
                // A vCPU that waits for a start-up message is never in protected mode. So this is a guest that is
                // restored.
                arch.activity = Activity::Active;
            }
            paging_written(held);
        }
        Register::Cr2 => arch.hardware.set_cr2(value),
        Register::Cr3 | Register::IntermediateCr3 => {
            if value >> guest_cpuid::physical_address_bits() != 0 {
                return Err(refused);
            }
            change(arch, |registers| registers.cr3 = value);
            paging_written(held);
        }
        Register::Cr4 | Register::IntermediateCr4 => {
            let offered = held.vm.platform().cpuid.offered();
            arch.hardware.set_control(before.control.set_cr4(value, offered).map_err(|_| refused)?);
            paging_written(held);
        }
        Register::Cr8 | Register::IntermediateCr8 => match u8::try_from(value) {
            Ok(class) if class < 16 => arch.write_cr8(class),
            _ => return Err(refused),
        },
        Register::Efer => {
            let offered = held.vm.platform().cpuid.offered();
            arch.hardware.set_control(before.control.set_efer(value, offered).map_err(|_| refused)?);
            paging_written(held);
        }
        Register::Xfem => arch.fpu.set_xcr0(value).ok_or(refused)?,
        Register::Dr(number) => {
            *arch.debug_addresses().get_mut(usize::from(number)).ok_or(Status::InvalidParameter)? = value;
        }
        Register::Dr6 if value >> 32 == 0 => arch.hardware.set_dr6(value),
        Register::Dr7 if value >> 32 == 0 => change(arch, |registers| registers.dr7 = value),
        Register::Dr6 | Register::Dr7 => return Err(refused),

        Register::KernelGsBase
        | Register::SysenterCs
        | Register::SysenterEip
        | Register::SysenterEsp
        | Register::Star
        | Register::Lstar
        | Register::Cstar
        | Register::Sfmask => set_system_call(arch, register, value)?,
        Register::Pat => {
            if !memory_types::is_valid_pat(value) {
                return Err(refused);
            }
            arch.hardware.set_pat(value);
            arch.flush_whole();
        }
        Register::TscAux => {
            // RDTSCP reads 32 bits, and WRMSR refuses more (APM vol. 3, RDTSCP).
            if value >> 32 != 0 {
                return Err(refused);
            }
            arch.set_tsc_aux(value);
        }
        Register::SpecCtrl => {
            if value & !held.vm.platform().cpuid.reports().spec_ctrl() != 0 {
                return Err(refused);
            }
            spec_ctrl::place(arch, value);
        }
        Register::TscDeadline => arch.apic.place_tsc_deadline(arch.host_tick(value), tsc::now()),
        // As a guest's own write.
        Register::TscAdjust => {}
        Register::ApicBase => {
            if value >> guest_cpuid::physical_address_bits() != 0 {
                return Err(refused);
            }
            arch.apic.place_base_msr(value).map_err(|_| refused)?;
            held.vcpu.posted().publish_logical_id(arch.apic.logical_id());
        }
        Register::MtrrDefType | Register::MtrrPhysBase(_) | Register::MtrrPhysMask(_) | Register::MtrrFixed(_) => {
            let bits = guest_cpuid::physical_address_bits();
            match memory_type(register) {
                Some(number) => arch.kept.memory_types.write(number, value, bits).ok_or(refused)?,
                None if value == 0 => {}
                None => return Err(refused),
            }
        }

        Register::PendingInterruption => set_pending_interruption(arch, PendingInterruption(value))?,
        Register::InterruptState => {
            if value >> 2 != 0 {
                return Err(refused);
            }
            arch.hardware.set_shadow(value & 1 != 0);
            arch.events.abandon_step();
            arch.set_nmi_mask(value & 2 != 0);
            arch.before_instruction();
        }
        Register::InternalActivityState => {
            arch.activity = match value {
                0 => Activity::Active,
                activity
                    if activity & !(activity::STARTUP_SUSPEND | activity::HALT_SUSPEND | activity::IDLE_SUSPEND)
                        != 0 =>
                {
                    return Err(refused);
                }
                activity if activity & activity::STARTUP_SUSPEND != 0 => Activity::Off,
                _ => Activity::Halted,
            };
        }

        Register::VpAssistPage => arch.vp_assist = synthetic::VpAssistMsr(value),
        Register::GuestOsId | Register::Hypercall | Register::ReferenceTsc => {
            let number = synthetic_msr(register).ok_or(Status::InvalidParameter)?;
            match &held.vm.platform().hyperv {
                Some(hyperv) => hyperv.set_shared(number, value, held.vm).ok_or(refused)?,
                None if value == 0 => {}
                None => return Err(refused),
            }
        }
        Register::Sint(_)
        | Register::Scontrol
        | Register::Siefp
        | Register::Simp
        | Register::Eom
        | Register::Sirbp
        | Register::Stimer(_) => {
            let number = synthetic_msr(register).ok_or(Status::InvalidParameter)?;
            let clock = held.vm.platform().hyperv.as_ref().map(HyperV::clock);
            arch.synic.place(&mut arch.apic, number, value, clock).ok_or(refused)?;
            // It may have blocked until the old deadline of a timer.
            held.vm.post(held.index, Pending::MESSAGE);
        }
        register if is_always_zero(register) => {
            if value != 0 {
                // The mshv-ioctls crate expects this of deliverability notifications.
                return Err(Status::InvalidParameter);
            }
        }
        // Registers that only the hypervisor changes. A parent may write their current value.
        _ => {
            if read_word(held, register)? != value {
                return Err(Status::InvalidParameter);
            }
        }
    }
    Ok(())
}

/// A register of paging was written. What follows from it follows before the vCPU's next entry, also if the vCPU is not
/// held until then.
fn paging_written(held: &mut Held<'_>) {
    let arch = &mut held.owner.arch;
    arch.flush_whole();
    arch.hardware.note_written_paging();
    held.vm.post(held.index, Pending::MESSAGE);
}

/// The flags that exist (APM vol. 2, 3.1.6).
const RFLAGS_DEFINED: u64 = 0x003f_7fd5;

/// The interface counts time in units of 100 ns.
const NANOS_PER_UNIT: u64 = 100;

/// Registers of features that no guest has here, and messages that no parent gets.
fn is_always_zero(register: Register) -> bool {
    matches!(
        register,
        Register::InstructionEmulationHints
            | Register::DispatchSuspend
            | Register::GuestCrashControl
            | Register::GuestCrashParameter(_)
            | Register::PendingEvent1
            | Register::DeliverabilityNotifications
            | Register::TscAdjust
            | Register::Bndcfgs
            | Register::DebugCtl
            | Register::PredCmd
            | Register::VirtSpecCtrl
            | Register::TsxCtrl
            | Register::Xss
            | Register::UCet
            | Register::SCet
            | Register::Ssp
            | Register::PlSsp(_)
            | Register::InterruptSspTable
            | Register::UmwaitControl
            | Register::Xfd
            | Register::XfdErr
            | Register::VpRootSignalCount
    )
}

/// The guest's MSR of a register of memory types, of which there are fewer than names.
fn memory_type(register: Register) -> Option<u32> {
    let variable = |number: u8| u32::from(number) * 2;
    let number = match register {
        Register::MtrrCap => msr::MTRR_CAP,
        Register::MtrrDefType => msr::MTRR_DEF_TYPE,
        Register::MtrrPhysBase(number) => msr::MTRR_PHYS_BASE_0 + variable(number),
        Register::MtrrPhysMask(number) => msr::MTRR_PHYS_BASE_0 + 1 + variable(number),
        Register::MtrrFixed(0) => msr::MTRR_FIX_64K,
        Register::MtrrFixed(1) => msr::MTRR_FIX_16K_0,
        Register::MtrrFixed(2) => msr::MTRR_FIX_16K_1,
        Register::MtrrFixed(number) => msr::MTRR_FIX_4K_0 + u32::from(number) - 3,
        _ => return None,
    };
    let is_variable = matches!(register, Register::MtrrPhysBase(_) | Register::MtrrPhysMask(_));
    (!is_variable || number <= msr::MTRR_PHYS_MASK_7).then_some(number)
}

/// The guest's MSR of a register of the interface.
fn synthetic_msr(register: Register) -> Option<u32> {
    Some(match register {
        Register::GuestOsId => synthetic::GUEST_OS_ID,
        Register::Hypercall => synthetic::HYPERCALL,
        Register::ReferenceTsc => synthetic::REFERENCE_TSC,
        Register::Scontrol => synthetic::SCONTROL,
        Register::Sversion => synthetic::SVERSION,
        Register::Siefp => synthetic::SIEFP,
        Register::Simp => synthetic::SIMP,
        Register::Eom => synthetic::EOM,
        Register::Sirbp => synthetic::SIRBP,
        Register::Sint(number) => synthetic::SINT0 + u32::from(number),
        Register::Stimer(number) => synthetic::STIMER0_CONFIG + u32::from(number),
        _ => return None,
    })
}

/// Where a vector register is in the area of FXSAVE.
fn place_in_fpu(register: Register) -> usize {
    let at = |first: usize, number: u8| first + usize::from(number) * 16;
    match register {
        Register::FpMmx(number) => at(32, number),
        Register::Xmm(number) => at(160, number),
        Register::XmmControlStatus => 16,
        _ => 0,
    }
}

fn change(arch: &mut ArchVcpu, how: impl FnOnce(&mut Registers)) {
    let mut registers = arch.hardware.registers();
    how(&mut registers);
    arch.hardware.set_registers(&registers);
}

/// SS in the order of the interface.
const SS: u8 = 2;

fn segment_in(registers: &mut Registers, number: u8) -> &mut Segment {
    match number {
        0 => &mut registers.es,
        1 => &mut registers.cs,
        SS => &mut registers.ss,
        3 => &mut registers.ds,
        4 => &mut registers.fs,
        5 => &mut registers.gs,
        6 => &mut registers.ldtr,
        _ => &mut registers.tr,
    }
}

fn segment_of(arch: &ArchVcpu, number: u8) -> RegisterValue {
    let mut registers = arch.hardware.registers();
    let cpl = u16::from(registers.cpl & 3);
    let found = *segment_in(&mut registers, number);
    // The privilege level is that of SS, except that SVM does not keep it there (APM vol. 2, 15.5.1).
    let packed = if number == SS { found.attributes & !(3 << 5) | cpl << 5 } else { found.attributes };
    SegmentRegister {
        base: U64::new(found.base),
        limit: U32::new(found.limit),
        selector: U16::new(found.selector),
        attributes: U16::new(SegmentRegister::unpack(packed)),
    }
    .into()
}

fn set_segment(arch: &mut ArchVcpu, number: u8, value: SegmentRegister) {
    let attributes = SegmentRegister::pack(value.attributes.get());
    change(arch, |registers| {
        *segment_in(registers, number) =
            Segment { selector: value.selector.get(), attributes, limit: value.limit.get(), base: value.base.get() };
        if number == SS {
            registers.cpl = (attributes >> 5 & 3).to_le_bytes()[0];
        }
    });
}

fn table(segment: &Segment) -> TableRegister {
    let [low, high, ..] = segment.limit.to_le_bytes();
    TableRegister { padding: [0; 6], limit: U16::new(u16::from_le_bytes([low, high])), base: U64::new(segment.base) }
}

fn from_table(value: TableRegister) -> Segment {
    Segment { limit: value.limit.get().into(), base: value.base.get(), ..Segment::default() }
}

/// The values that WRMSR takes: addresses are canonical.
fn set_system_call(arch: &mut ArchVcpu, register: Register, value: u64) -> Result<(), Status> {
    let mut calls = arch.hardware.system_calls();
    let is_canonical = (value.cast_signed() << 16 >> 16).cast_unsigned() == value;
    let SystemCalls { star, lstar, cstar, sfmask, kernel_gs_base, sysenter_cs, sysenter_esp, sysenter_eip } =
        &mut calls;
    let (place, is_address) = match register {
        Register::KernelGsBase => (kernel_gs_base, true),
        Register::SysenterEip => (sysenter_eip, true),
        Register::SysenterEsp => (sysenter_esp, true),
        Register::Lstar => (lstar, true),
        Register::Cstar => (cstar, true),
        Register::SysenterCs => (sysenter_cs, false),
        Register::Star => (star, false),
        _ => (sfmask, false),
    };
    if is_address && !is_canonical {
        return Err(Status::InvalidRegisterValue);
    }
    *place = value;
    arch.hardware.set_system_calls(&calls);
    Ok(())
}

/// Kinds of [`PendingInterruption`].
mod pending {
    pub(super) const INTERRUPT: u8 = 0;
    pub(super) const NMI: u8 = 2;
    pub(super) const EXCEPTION: u8 = 3;
    pub(super) const SOFTWARE_INTERRUPT: u8 = 4;
}

/// The event whose delivery the last exit interrupted, or a software interrupt that the hypervisor carries out.
fn pending_interruption(arch: &ArchVcpu) -> u64 {
    let owed = arch.events.owed().filter(|event| matches!(event, Event::SoftwareInterrupt(_)));
    let (kind, vector, code) = match arch.hardware.interrupted().or(owed) {
        None => return 0,
        Some(Event::Interrupt(vector)) => (pending::INTERRUPT, vector, None),
        Some(Event::Nmi) => (pending::NMI, vector::NMI, None),
        Some(Event::Exception(Exception { vector, code })) => (pending::EXCEPTION, vector, code),
        Some(Event::SoftwareInterrupt(vector)) => (pending::SOFTWARE_INTERRUPT, vector, None),
    };
    PendingInterruption::new(kind, vector, code).0
}

fn set_pending_interruption(arch: &mut ArchVcpu, value: PendingInterruption) -> Result<(), Status> {
    let refused = Status::InvalidRegisterValue;
    if !value.is_pending() {
        arch.hardware.set_interrupted(None);
        if let Some(Event::SoftwareInterrupt(_)) = arch.events.owed() {
            arch.events.forget_owed();
        }
        return Ok(());
    }
    let vector = u8::try_from(value.vector()).map_err(|_| refused)?;
    let event = match value.kind() {
        pending::INTERRUPT => Event::Interrupt(vector),
        pending::NMI => Event::Nmi,
        pending::EXCEPTION if is_exception(vector) => Event::Exception(Exception { vector, code: value.error_code() }),
        // RIP is at the instruction, and the guest executes it again. Or RIP is behind it (length 0), and only this
        // code raises the interrupt.
        pending::SOFTWARE_INTERRUPT..=6 => {
            arch.hardware.set_interrupted(None);
            if value.instruction_length() == 0 {
                arch.events.raise_software_interrupt(vector);
            }
            return Ok(());
        }
        _ => return Err(refused),
    };
    arch.hardware.set_interrupted(Some(event));
    Ok(())
}

/// Vectors that VMRUN injects as exceptions (APM vol. 2, 15.20).
fn is_exception(vector: u8) -> bool {
    vector < 31 && vector != vector::NMI
}

/// The layout of an exception in [`Register::PendingEvent0`] (TLFS, HV_X64_PENDING_EXCEPTION_EVENT).
mod exception_event {
    pub(super) const PENDING: u128 = 1 << 0;
    pub(super) const KIND: u128 = 7 << 1;
    pub(super) const HAS_CODE: u128 = 1 << 8;
    pub(super) const VECTOR_SHIFT: u32 = 16;
    pub(super) const CODE_SHIFT: u32 = 32;
    /// For a page fault: CR2.
    pub(super) const PARAMETER_SHIFT: u32 = 64;
}

/// The exception that the last exit requires.
fn pending_exception(arch: &ArchVcpu) -> u128 {
    use exception_event::{CODE_SHIFT, HAS_CODE, PARAMETER_SHIFT, PENDING, VECTOR_SHIFT};
    let Some(Event::Exception(Exception { vector, code })) = arch.events.owed() else { return 0 };
    let code = code.map_or(0, |code| HAS_CODE | u128::from(code) << CODE_SHIFT);
    let parameter = if vector == vector::PAGE_FAULT { arch.hardware.registers().cr2 } else { 0 };
    PENDING | code | u128::from(vector) << VECTOR_SHIFT | u128::from(parameter) << PARAMETER_SHIFT
}

#[expect(clippy::cast_possible_truncation, reason = "each part is cut out on purpose")]
fn set_pending_exception(arch: &mut ArchVcpu, value: u128) -> Result<(), Status> {
    use exception_event::{CODE_SHIFT, HAS_CODE, KIND, PARAMETER_SHIFT, PENDING, VECTOR_SHIFT};
    if value & PENDING == 0 {
        if let Some(Event::Exception(_)) = arch.events.owed() {
            arch.events.forget_owed();
        }
        return Ok(());
    }
    let vector = (value >> VECTOR_SHIFT) as u16;
    let (Ok(vector), true) = (u8::try_from(vector), value & KIND == 0) else {
        return Err(Status::InvalidRegisterValue);
    };
    if !is_exception(vector) {
        return Err(Status::InvalidRegisterValue);
    }
    if vector == vector::PAGE_FAULT {
        arch.hardware.set_cr2((value >> PARAMETER_SHIFT) as u64);
    }
    let code = (value & HAS_CODE != 0).then_some((value >> CODE_SHIFT) as u32);
    arch.events.raise(Exception { vector, code });
    Ok(())
}
