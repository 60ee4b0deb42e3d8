//! Registers of a vCPU by the names of the Hyper-V interface: the few that a vCPU has here.

use addr::{Gpa, Gva};
use hyperv_defs::Status;
use hyperv_defs::register::{Register, RegisterValue, activity};

use hyperv_defs::vp::{CpuidResult, StateKind, TranslateFlags, TranslationCode};

use crate::arch::hypercall::Held;
use crate::sync::Ordering;
use crate::vcpu::activity::Activity;
use crate::vm::Vm;

/// Reads a register. RIP is the position in the program.
/// The parent creates a vCPU anew: nothing is left of what it was.
pub(in crate::arch) fn power_on(held: &mut Held<'_>) {
    held.owner.arch.power_on();
}

pub(in crate::arch) fn read(held: &mut Held<'_>, register: Register) -> Result<RegisterValue, Status> {
    let arch = &mut held.owner.arch;
    Ok(match register {
        Register::Rip => (arch.position() as u64).into(),
        Register::Gpr(number) => arch.gprs[usize::from(number)].into(),
        Register::VpIndex => u64::from(held.index).into(),
        Register::InternalActivityState => match arch.activity_now() {
            Activity::Active | Activity::Traced => 0,
            Activity::Halted => activity::HALT_SUSPEND,
            Activity::Off => activity::STARTUP_SUSPEND,
        }
        .into(),
        _ => return Err(Status::InvalidParameter),
    })
}

/// From now on CPUID answers this to the vCPU.
pub(in crate::arch) fn register_cpuid(held: &mut Held<'_>, result: &CpuidResult) -> Result<(), Status> {
    held.owner.arch.cpuid.register(result)
}

/// A guest has no counter here: RBX shows the offset.
pub(in crate::arch) fn set_tsc_offset(held: &mut Held<'_>, offset: i64) {
    held.owner.arch.gprs[3] = offset.cast_unsigned();
}

/// The VM's time stood still for so many ticks.
pub(in crate::arch) fn move_timers(held: &mut Held<'_>, later: u64) {
    held.owner.arch.move_timer(later);
}

/// The VM's reference time at this tick of the clock: a hundredth of it, and what was set.
pub(in crate::arch) fn reference_time(vm: &Vm, tick: u64) -> u64 {
    (tick / 100).wrapping_add(vm.platform().time_offset.load(Ordering::Relaxed))
}

/// At this tick it is `time`.
pub(in crate::arch) fn set_reference_time(vm: &Vm, tick: u64, time: u64) {
    vm.platform().time_offset.store(time.wrapping_sub(tick / 100), Ordering::Relaxed);
}

/// What CPUID would answer: by itself, the leaf and the subleaf.
pub(in crate::arch) fn cpuid(held: &mut Held<'_>, leaf: u32, subleaf: u32) -> [u32; 4] {
    held.owner.arch.cpuid.answer(leaf, subleaf, [leaf, subleaf, 0, 0])
}

/// Writes a register. No value of RAX is above 32 bits here.
pub(in crate::arch) fn write(held: &mut Held<'_>, register: Register, value: RegisterValue) -> Result<(), Status> {
    let arch = &mut held.owner.arch;
    match register {
        Register::Rip => {
            arch.set_position(usize::try_from(value.as_u64()).map_err(|_| Status::InvalidRegisterValue)?);
        }
        Register::Gpr(0) if value.as_u64() >> 32 != 0 => return Err(Status::InvalidRegisterValue),
        Register::Gpr(number) => arch.gprs[usize::from(number)] = value.as_u64(),
        _ => return Err(Status::InvalidParameter),
    }
    Ok(())
}

/// Translates an address: the identity, but the first page is not there.
pub(in crate::arch) fn translate(_: &mut Held<'_>, _: TranslateFlags, gva: Gva) -> Result<Gpa, TranslationCode> {
    if gva.0 == 0 { Err(TranslationCode::PageNotPresent) } else { Ok(Gpa(gva.0)) }
}

/// Writes a state into `bytes`: the registers from the first on, and behind them whether an interrupt waits.
pub(in crate::arch) fn get(held: &mut Held<'_>, kind: StateKind, _: u64, bytes: &mut [u8]) -> Result<usize, Status> {
    if !matches!(kind, StateKind::SyntheticTimers | StateKind::LocalApic) {
        return Err(Status::InvalidParameter);
    }
    for (to, register) in bytes.as_chunks_mut().0.iter_mut().zip(held.owner.arch.gprs) {
        *to = register.to_le_bytes();
    }
    bytes[128] = u8::from(held.owner.arch.is_interrupted());
    Ok(136)
}

/// Takes over a state.
pub(in crate::arch) fn set(held: &mut Held<'_>, kind: StateKind, _: u64, bytes: &[u8]) -> Result<(), Status> {
    if !matches!(kind, StateKind::SyntheticTimers | StateKind::LocalApic) || bytes.first() == Some(&0xff) {
        return Err(Status::InvalidParameter);
    }
    for (register, from) in held.owner.arch.gprs.iter_mut().zip(bytes.as_chunks().0) {
        *register = u64::from_le_bytes(*from);
    }
    Ok(())
}
