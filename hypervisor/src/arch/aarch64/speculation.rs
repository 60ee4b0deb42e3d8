//! Steps against speculative execution: which ones each pCPU needs (`crates/mitigations`), and their code.
//!
//! There are two tables of vectors: plain, and with the steps. VBAR_EL2 of a pCPU names the one that it uses, so the
//! choice costs nothing at an exit. In the second one, a step that this pCPU does not need is jumped over. A wrong
//! guess there ends at the barrier behind the last step, before any return or indirect branch.
//!
//! Nothing is done before an entry. ERET has a barrier behind it, and PSTATE.SSBS comes from the guest's own state.

#![expect(unsafe_code, reason = "writes a register that decides about speculation")]

use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use aarch64_defs::registers::sctlr;
use log::info;
use mitigations::Ignored;
use mitigations::arm::{self, Firmware, Kinds, Plan, Processor, Steps};
use sched::Smt;
use spin::{Mutex, Once};
use vcpu_layout::Proof;

use super::host::device_tree::Machine;
use super::host::{boot, irq, percpu, power};
use super::register::{isb, read_register, write_register};
use crate::arch::weaknesses;
use crate::cpu::scheduler::threads;
use crate::device::psci::Mitigations;

/// What the machine's operator wants, or what is done without a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Choice {
    /// By the plan.
    Auto,
    /// Nothing: the option says so.
    Off,
    /// Nothing: the processor is emulated.
    Emulated,
    /// Everything: the processor is emulated, and steps are counted.
    All,
}

/// Weaknesses that nothing is done against.
static IGNORED: Once<Ignored> = Once::new();
static CHOICE: AtomicU8 = AtomicU8::new(Choice::Auto as u8);
/// How the pCPUs that have started so far stand, with the steps of the first one, and what their firmware says.
static COMMON: Mutex<Option<(Plan, Firmware)>> = Mutex::new(None);
/// Two pCPUs take different steps.
static DIFFER: AtomicBool = AtomicBool::new(false);
/// Functions that guests have, once all pCPUs are known.
static FOR_GUESTS: Once<Mitigations> = Once::new();

/// Decides whether the pCPUs take steps: `auto`, or as the option `mitigations=` says, and none for weaknesses that are
/// `ignored`. Before the first of them asks.
///
/// An emulated processor speculates nothing. There the steps are off, so that counts of instructions are comparable,
/// unless the option asks for them.
///
/// `all_steps`: an emulated processor takes the most that any does, so that it can be counted.
pub(super) fn choose(option: Option<&str>, ignored: Ignored, all_steps: bool, machine: &Machine) {
    IGNORED.call_once(|| ignored);
    let choice = match option {
        _ if all_steps && is_emulated(machine) => Choice::All,
        Some("off") => Choice::Off,
        None if is_emulated(machine) => Choice::Emulated,
        _ => Choice::Auto,
    };
    CHOICE.store(choice as u8, Ordering::Relaxed);
}

/// Whether QEMU's TCG emulates this machine.
///
/// No register says so. Implementer 0 of MIDR_EL1 is reserved for software. With another one, it is a machine of QEMU's
/// whose firmware does not know the calling convention: QEMU's own PSCI under TCG. Under KVM, and on hardware since
/// 2018, it does. An emulator that is not recognized counts as real.
fn is_emulated(machine: &Machine) -> bool {
    const IMPLEMENTER: u64 = 0xff << 24;
    read_register!("midr_el1") & IMPLEMENTER == 0 || machine.is_qemus && !power::knows_convention()
}

fn choice() -> Choice {
    match CHOICE.load(Ordering::Relaxed) {
        0 => Choice::Auto,
        1 => Choice::Off,
        3 => Choice::All,
        _ => Choice::Emulated,
    }
}

/// This pCPU, with registers that older assemblers do not know by their encodings.
fn processor() -> Processor {
    let affinities = boot::machine().map(Machine::cpus).unwrap_or_default();
    Processor {
        midr: read_register!("midr_el1"),
        shares_core: threads::chosen() != Smt::Off
            && arm::shares_core(read_register!("mpidr_el1"), affinities.iter().copied()),
        pfr0: read_register!("id_aa64pfr0_el1"),
        pfr1: read_register!("id_aa64pfr1_el1"),
        isar2: read_register!("s3_0_c0_c6_2"),
        mmfr1: read_register!("id_aa64mmfr1_el1"),
    }
}

/// Starts this pCPU's steps, and adds how it stands. Each does so once, before it is online.
pub(super) fn add_this_cpu() {
    let found = processor();
    let firmware = power::functions_against_speculation();
    let ignored = IGNORED.get().copied().unwrap_or_default();
    let plan = found.plan_but(&firmware, ignored).with_vms_apart(threads::chosen() == Smt::Core);
    let plan = match choice() {
        Choice::Auto => plan,
        Choice::All => plan.with_steps(Steps::MOST),
        Choice::Off | Choice::Emulated => plan.off(),
    };
    start(&found, &plan);

    let mut common = COMMON.lock();
    *common = Some(match common.take() {
        None => (plan, firmware),
        Some((others, of_others)) => {
            if others.steps != plan.steps {
                DIFFER.store(true, Ordering::Relaxed);
            }
            (others.with_states_of(&plan), of_others.common(firmware))
        }
    });
}

/// What is done for good, and the vectors.
fn start(found: &Processor, plan: &Plan) {
    let steps = plan.steps;
    let has_ssbs = found.pfr1 >> 4 & 0xf != 0;
    if has_ssbs && !steps.kinds.contains(Kinds::NO_STORE_BYPASS) {
        let control = read_register!("sctlr_el2") | sctlr::DSSBS;
        // The boot has left DSSBS clear. SAFETY: SSBS exists, and the bit only decides how loads may be speculated.
        unsafe { write_register!("sctlr_el2", control) };
        isb();
    }
    if steps.kinds.contains(Kinds::FIRMWARE_2) {
        power::end_store_bypass();
    }
    percpu::this().arch.steps.set(Proof::by_place(), steps.word());
    if steps.word() != 0 {
        irq::load_guarded();
    }
}

/// Tells what is done, and settles what guests are told. Called when all pCPUs are online.
pub(super) fn report() {
    let Some((plan, firmware)) = *COMMON.lock() else { return };
    let Firmware(for_guests) = firmware.for_guests(&plan);
    FOR_GUESTS.call_once(|| Mitigations(for_guests.map(arm::Answer::code)));
    if choice() == Choice::Emulated {
        return weaknesses::tell_nothing(weaknesses::EMULATED);
    }
    if DIFFER.load(Ordering::Relaxed) {
        info!("speculation: the pCPUs are not alike: each takes its own steps");
    }
    weaknesses::tell(&plan);
}

/// The functions that guests have.
pub(super) fn for_guests() -> Mitigations {
    FOR_GUESTS.get().copied().unwrap_or(Mitigations::NONE)
}

/// A guest calls this function, which the firmware has, or which the steps at exits replace.
pub(super) fn mitigate(function: u32) {
    // Otherwise the exit of the call has done it already.
    if percpu::this().arch.steps.get() == 0 {
        power::mitigate(function);
    }
}

/// Behind an exit, once the guest's registers are stored: takes the steps, and clears X0 to X18. The others are loaded
/// next. Needs the operand `steps`, where the pCPU's block has its steps.
///
/// Firmware that has the functions keeps all registers but X0 to X3 in a call (SMCCC 1.1). The table of branches counts
/// iterations of this loop, each with a branch forwards and one back. `hint #22` is CLRBHB.
macro_rules! behind_exit {
    () => {
        "mrs x9, tpidr_el2
         ldr x9, [x9, #{steps}]
         lsr x0, x9, #32
         cbz x0, 1f
         smc #0
         1:
         ubfx x0, x9, #8, #8
         cbz x0, 3f
         2:
         b 21f
         21:
         subs x0, x0, #1
         b.ne 2b
         3:
         tbz x9, #2, 4f
         hint #22
         4:
         mov x0, xzr
         mov x1, xzr
         mov x2, xzr
         mov x3, xzr
         mov x4, xzr
         mov x5, xzr
         mov x6, xzr
         mov x7, xzr
         mov x8, xzr
         mov x9, xzr
         mov x10, xzr
         mov x11, xzr
         mov x12, xzr
         mov x13, xzr
         mov x14, xzr
         mov x15, xzr
         mov x16, xzr
         mov x17, xzr
         mov x18, xzr
         dsb nsh
         isb"
    };
}
pub(super) use behind_exit;

const _: () = assert!(Kinds::CLEAR_HISTORY.bits() == 1 << 2);
