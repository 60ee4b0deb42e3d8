//! What a file keeps of a VM: its devices, its clocks, what CPUID answers, and its vCPUs.
//!
//! A vCPU's registers have the names of the Hyper-V interface here too ([`registers`]), and are checked as those that a
//! parent writes. The other parts have states of their own. A saved VM runs where the processor has all that its guest
//! was told: [`Promise`].
//!
//! All vCPUs have one counter: the host's and an offset. A file has the guest's counter and its reference time at the
//! tick at which its time was stopped. Deadlines are in the guest's counter, timers that count have what is left.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use hyperv_defs::page::{LocalApicState, TimersState};
use hyperv_defs::register::{Register, RegisterValue};
use serde::{Deserialize, Serialize};
use x86_defs::cpuid::Registers;
use x86_events::Events;

use super::assist::Assist;
use super::cpuid::CpuidTable;
use super::events::{self, Armed};
use super::hyperv::{HyperV, SharedState};
use super::platform::DevicesState;
use super::registers;
use super::vcpu::ArchVcpu;
use crate::arch::hypercall::Held;
use crate::arch::x86_64::backend::Injection as _;
use crate::arch::x86_64::host::tsc;
use crate::cpu::preemption::preemption_point;
use crate::device::msr::is_valid_misc_enable;
use crate::vcpu::Owner;
use crate::vm::Vm;
use crate::vm::saved::{decode, encode, senseless};

/// A host's counter may differ by one part in so many from the saved one's: guests have measured it. Time servers
/// correct clocks by up to 500 parts per million.
const RATE_PARTS: u64 = 2_000;

/// What the vCPUs share.
#[derive(Serialize, Deserialize)]
struct Shared {
    promise: Promise,
    /// The guest's counter.
    tsc: u64,
    devices: DevicesState,
    hyperv: Option<SharedState>,
}

/// What the guest was told of its processor.
#[derive(Serialize, Deserialize)]
struct Promise {
    /// Ticks of the counter per second.
    hz: u64,
    /// Answers of CPUID: leaf, subleaf, EAX to EDX.
    cpuid: Vec<(u32, u32, [u32; 4])>,
    /// What the processor does not have, by IA32_ARCH_CAPABILITIES.
    capabilities: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct VcpuState {
    /// By their numbers, in the order in which they are written.
    registers: Vec<(u32, u128)>,
    events: x86_events::State,
    misc_enable: u64,
    /// The guest's assist page says that the interrupt in service needs no end.
    needs_no_end: bool,
    local_apic: Vec<u8>,
    /// By the guest's counter; zero if there is none.
    tsc_deadline: u64,
    timers: Vec<u8>,
    #[serde(with = "serde_bytes")]
    xsave: Vec<u8>,
}

/// It is possible.
pub(crate) fn can_save() -> Result<(), &'static str> {
    Ok(())
}

/// What the vCPUs share.
pub(crate) fn save_shared(vm: &Vm, tick: u64) -> Vec<u8> {
    let platform = vm.platform();
    let hyperv = platform.hyperv.as_ref();
    encode(&Shared {
        promise: Promise::of(&platform.cpuid),
        tsc: tick.wrapping_add_signed(platform.tsc_offset.load(Ordering::Relaxed)),
        devices: platform.devices(nanos_at(tick)),
        hyperv: hyperv.map(|hyperv| hyperv.state(tick)),
    })
}

/// A new VM takes it over.
pub(crate) fn restore_shared(vm: &Vm, state: &[u8], tick: u64) -> Result<(), String> {
    let Shared { promise, tsc, devices, hyperv } = decode(state)?;
    let platform = vm.platform();
    promise.check(&platform.cpuid)?;
    platform.tsc_offset.store(tsc.wrapping_sub(tick).cast_signed(), Ordering::Relaxed);
    platform.set_devices(&devices, nanos_at(tick)).ok_or_else(senseless)?;
    match (&platform.hyperv, hyperv) {
        (Some(interface), Some(state)) => interface.set_state(&state, tick).ok_or_else(senseless),
        (None, None) => Ok(()),
        _ => Err(senseless()),
    }
}

/// A vCPU that is on no pCPU.
pub(crate) fn save_vcpu(vm: &Vm, index: u32, owner: &mut Owner, tick: u64) -> Vec<u8> {
    let mut held = Held { vm, index, vcpu: &vm.vcpus()[index as usize], owner };
    let named = names().filter_map(|name| Some((name.number(), registers::read(&mut held, name).ok()?.as_u128())));
    let named = named.collect();
    preemption_point();
    let arch = &mut held.owner.arch;
    let mut xsave = alloc::vec![0; MOST_XSAVE_BYTES];
    let length = arch.fpu.image(0, &mut xsave).unwrap_or(0);
    xsave.truncate(length);
    encode(&VcpuState {
        registers: named,
        events: arch.events.state(arch.hardware.interrupted()),
        misc_enable: arch.kept.misc_enable,
        needs_no_end: arch.assist.is_told(),
        local_apic: Vec::from(arch.apic.state(tick).bytes()),
        tsc_deadline: match arch.apic.tsc_deadline(tick) {
            0 => 0,
            deadline => arch.guest_tsc_at(deadline),
        },
        timers: Vec::from(arch.synic.timers().bytes()),
        xsave,
    })
}

/// The compacted image of all components that guests have is smaller.
const MOST_XSAVE_BYTES: usize = 4096;

/// A vCPU of a new VM takes it over.
pub(crate) fn restore_vcpu(vm: &Vm, index: u32, owner: &mut Owner, state: &[u8], tick: u64) -> Result<(), String> {
    let state: VcpuState = decode(state)?;
    let local_apic = LocalApicState::from_bytes(&state.local_apic).ok_or_else(senseless)?;
    let timers = TimersState::from_bytes(&state.timers).ok_or_else(senseless)?;
    if !events::are_possible(&state.events) || !is_valid_misc_enable(state.misc_enable) {
        return Err(senseless());
    }
    preemption_point();
    let mut held = Held { vm, index, vcpu: &vm.vcpus()[index as usize], owner };
    held.owner.arch.set_tsc_offset(vm.platform().tsc_offset.load(Ordering::Relaxed));
    held.owner.arch.events = Events::with_state(&state.events);
    for (number, value) in state.registers {
        let name = Register::try_from(number).map_err(|_| senseless())?;
        let written = registers::write(&mut held, name, RegisterValue::from(value));
        written.map_err(|_| format!("vCPU {index}: {name:?} cannot be {value:#x} on this processor"))?;
        if name == Register::ApicBase {
            // Its mode decides what the other registers mean.
            held.owner.arch.apic.set_state(&local_apic, tick);
        }
    }
    preemption_point();
    let arch = &mut held.owner.arch;
    arch.apic.place_tsc_deadline(arch.host_tick(state.tsc_deadline), tick);
    match vm.platform().hyperv.as_ref().map(HyperV::clock) {
        Some(clock) => arch.synic.set_timers(&timers, clock, tick).ok_or_else(senseless)?,
        None if timers == TimersState::default() => {}
        None => return Err(senseless()),
    }
    let image = arch.fpu.set_image(0, &state.xsave);
    image.ok_or_else(|| format!("vCPU {index}: this processor lacks components of its vector registers"))?;
    arch.kept.misc_enable = state.misc_enable;
    arch.hardware.set_interrupted(state.events.interrupted);
    arch.assist = Assist::restored(arch.vp_assist, state.needs_no_end);
    if arch.assist.is_told() {
        arch.armed = Armed::Assist;
    }
    held.vcpu.posted().publish_logical_id(held.owner.arch.apic.logical_id());
    Ok(())
}

/// The VM's time goes on at `to`, where it was at `from`.
pub(crate) fn time_stood_still(vm: &Vm, from: u64, to: u64) {
    let later = to.saturating_sub(from);
    let platform = vm.platform();
    let offset = platform.tsc_offset.load(Ordering::Relaxed).wrapping_sub(later.cast_signed());
    platform.tsc_offset.store(offset, Ordering::Relaxed);
    platform.devices_stood_still(tsc::ticks_to_nanos(later));
    if let Some(hyperv) = &platform.hyperv {
        hyperv.set_time(to, hyperv.clock().time(from));
        hyperv.renew_clock(vm);
    }
    for vcpu in vm.vcpus() {
        preemption_point();
        let mut guard = vcpu.own();
        let arch: &mut ArchVcpu = &mut guard.split().0.arch;
        arch.set_tsc_offset(offset);
        arch.apic.move_count(later);
        if let Some(hyperv) = &platform.hyperv {
            arch.synic.set_clock(hyperv.clock());
        }
    }
}

/// Nanoseconds of the host's clock at this tick.
fn nanos_at(tick: u64) -> u64 {
    tsc::nanos().saturating_sub(tsc::ticks_to_nanos(tsc::now().saturating_sub(tick)))
}

/// The registers, in an order in which they can be written: the local APIC's mode before its state, what a write of
/// RIP changes behind it, and last whether the vCPU runs, which a write of CR0 changes.
fn names() -> impl Iterator<Item = Register> {
    use Register as R;
    let first = [R::ApicBase, R::Cr4, R::Efer, R::Cr0, R::Cr2, R::Cr3, R::Cr8, R::Xfem, R::Gdtr, R::Idtr];
    let then = [
        R::Dr6,
        R::Dr7,
        R::Pat,
        R::TscAux,
        R::SpecCtrl,
        R::KernelGsBase,
        R::SysenterCs,
        R::SysenterEip,
        R::SysenterEsp,
    ];
    let more = [R::Star, R::Lstar, R::Cstar, R::Sfmask, R::MtrrDefType, R::VpAssistPage];
    let synic = [R::Scontrol, R::Siefp, R::Simp];
    let last = [R::Rflags, R::Rip, R::InterruptState, R::InternalActivityState];
    first
        .into_iter()
        .chain((0..16).map(R::Gpr))
        .chain((0..8).map(R::Segment))
        .chain((0..4).map(R::Dr))
        .chain(then)
        .chain(more)
        .chain((0..8).flat_map(|number| [R::MtrrPhysBase(number), R::MtrrPhysMask(number)]))
        .chain((0..11).map(R::MtrrFixed))
        .chain(synic)
        .chain((0..16).map(R::Sint))
        .chain(last)
}

/// Leaves with features, and which of EAX to EDX has them.
const FEATURES: [(u32, u32, [bool; 4]); 10] = [
    (1, 0, [false, false, true, true]),
    (6, 0, [true, false, false, false]),
    (7, 0, [false, true, true, true]),
    (7, 2, [false, false, false, true]),
    (0xd, 0, [true, false, false, true]),
    (0xd, 1, [true, false, false, false]),
    (0x8000_0001, 0, [false, false, true, true]),
    (0x8000_0007, 0, [false, false, false, true]),
    (0x8000_0008, 0, [false, true, false, false]),
    (0x8000_0021, 0, [true, false, true, false]),
];
/// Leaves that must be the same: the vendor, whose instructions for calls differ, and where XSAVE puts components.
const VENDOR: u32 = 0;
const XSAVE: u32 = 0xd;
const XSAVE_COMPONENTS: core::ops::Range<u32> = 2..32;
/// The leaf whose EAX has the width of physical addresses in its lowest byte.
const ADDRESSES: u32 = 0x8000_0008;
/// The Hyper-V interface's features.
const INTERFACE: u32 = 0x4000_0003;

impl Promise {
    fn of(table: &CpuidTable) -> Self {
        let told = FEATURES.iter().map(|&(leaf, subleaf, _)| (leaf, subleaf));
        let told =
            told.chain([(VENDOR, 0), (INTERFACE, 0)]).chain(XSAVE_COMPONENTS.map(|component| (XSAVE, component)));
        let answer = |(leaf, subleaf)| (leaf, subleaf, answer(table, leaf, subleaf));
        let mut cpuid: Vec<_> = told.map(answer).collect();
        cpuid.retain(|(.., registers)| *registers != [0; 4]);
        Self { hz: tsc::hz(), cpuid, capabilities: table.reports().arch_capabilities() }
    }

    /// Whether it holds for a guest to which `table` answers.
    fn check(&self, table: &CpuidTable) -> Result<(), String> {
        let (saved, here) = (self.hz, tsc::hz());
        if saved.abs_diff(here) > here / RATE_PARTS {
            return Err(format!(
                "its time-stamp counter runs at {} MHz, and this processor's at {} MHz",
                saved / 1_000_000,
                here / 1_000_000
            ));
        }
        let capabilities = table.reports().arch_capabilities().unwrap_or(0);
        let missing = self.capabilities.unwrap_or(0) & !capabilities;
        if missing != 0 {
            return Err(format!(
                "this processor has a weakness that its guest was told it does not have: IA32_ARCH_CAPABILITIES lacks bit {}",
                missing.trailing_zeros()
            ));
        }
        for &(leaf, subleaf, told) in &self.cpuid {
            let here = answer(table, leaf, subleaf);
            let vendor = |[_, b, c, d]: [u32; 4]| {
                let bytes: Vec<u8> = [b, d, c].into_iter().flat_map(u32::to_le_bytes).collect();
                String::from_utf8_lossy(&bytes).escape_debug().collect::<String>()
            };
            match (leaf, subleaf) {
                (VENDOR, _) if told[1..] != here[1..] => {
                    return Err(format!(
                        "it ran on a processor of {}, and this is one of {}",
                        vendor(told),
                        vendor(here)
                    ));
                }
                (XSAVE, 2..) if told[..2] != here[..2] => {
                    return Err(format!("this processor's XSAVE puts component {subleaf} elsewhere, or lacks it"));
                }
                (INTERFACE, _) if told[0] & !here[0] != 0 || told[3] & !here[3] != 0 => {
                    return Err(String::from(
                        "this host's Hyper-V interface lacks features that its guest was offered",
                    ));
                }
                (ADDRESSES, _) if told[0] & 0xff > here[0] & 0xff => {
                    return Err(format!(
                        "this processor's physical addresses have {} bits, its had {}",
                        here[0] & 0xff,
                        told[0] & 0xff
                    ));
                }
                _ => {}
            }
            let Some((.., which)) = FEATURES.iter().find(|&&(of, sub, _)| (of, sub) == (leaf, subleaf)) else {
                continue;
            };
            for (register, is_feature) in which.iter().enumerate() {
                let missing = if *is_feature { told[register] & !here[register] } else { 0 };
                if missing != 0 {
                    return Err(lacks(leaf, subleaf, register, missing.trailing_zeros()));
                }
            }
        }
        Ok(())
    }
}

fn answer(table: &CpuidTable, leaf: u32, subleaf: u32) -> [u32; 4] {
    let Registers { eax, ebx, ecx, edx } = table.subleaf(leaf, subleaf as usize);
    [eax, ebx, ecx, edx]
}

/// The text for a feature that is missing here.
fn lacks(leaf: u32, subleaf: u32, register: usize, bit: u32) -> String {
    let name = match (leaf, register, bit) {
        (1, 2, 0) => "SSE3",
        (1, 2, 9) => "SSSE3",
        (1, 2, 12) => "FMA",
        (1, 2, 19) => "SSE4.1",
        (1, 2, 20) => "SSE4.2",
        (1, 2, 21) => "x2APIC",
        (1, 2, 22) => "MOVBE",
        (1, 2, 23) => "POPCNT",
        (1, 2, 25) => "AES",
        (1, 2, 26) => "XSAVE",
        (1, 2, 28) => "AVX",
        (1, 2, 29) => "F16C",
        (1, 2, 30) => "RDRAND",
        (7, 1, 0) => "FSGSBASE",
        (7, 1, 3) => "BMI1",
        (7, 1, 5) => "AVX2",
        (7, 1, 7) => "SMEP",
        (7, 1, 8) => "BMI2",
        (7, 1, 9) => "ERMS",
        (7, 1, 16) => "AVX-512F",
        (7, 1, 18) => "RDSEED",
        (7, 1, 19) => "ADX",
        (7, 1, 20) => "SMAP",
        (7, 1, 29) => "SHA",
        (7, 2, 2) => "UMIP",
        (7, 2, 3) => "PKU",
        (7, 2, 22) => "RDPID",
        (0x8000_0001, 3, 26) => "1 GiB pages",
        (0x8000_0001, 3, 27) => "RDTSCP",
        (0x8000_0007, 3, 8) => "an invariant time-stamp counter",
        _ => "a feature",
    };
    let register = ["EAX", "EBX", "ECX", "EDX"][register & 3];
    format!("this processor lacks {name} (CPUID {leaf:#x}.{subleaf} {register} bit {bit}), which its guest was told of")
}
