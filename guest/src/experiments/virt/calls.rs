//! Invalid firmware calls, and CPUs that go off and on. Each call gets PSCI's answer (Arm DEN0022, 5.2), and the CPUs
//! continue.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::power::{self, AFFINITY_INFO, CPU_ON, PSCI_VERSION};
use crate::arch::{attempt, boot, code, controller, cpu_local, interrupts, tsc};
use crate::cpu;
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::interrupt::{TIMER, taken};
use crate::record::record;

const INVALID_PARAMETERS: i64 = -2;
const ALREADY_ON: i64 = -4;
const INVALID_ADDRESS: i64 = -9;
const NOT_SUPPORTED: i64 = -1;

/// Answers of AFFINITY_INFO.
const IS_OFF: i64 = 1;

/// An affinity that no CPU here has, and an address where there is no memory.
const NOBODY: u64 = 0x7f_ff0f;
const NOWHERE: u64 = 0xdead_beef_0000;

/// The firmware's answer to a call.
pub(super) fn answer(function: u64, arguments: [u64; 3]) -> i64 {
    // The convention has answers of 32 bits for functions of 32 bits.
    let answer = power::call(function, arguments);
    if function >> 30 & 1 == 0 { i64::from((answer & 0xffff_ffff) as u32 as i32) } else { answer.cast_signed() }
}

pub(super) fn run(context: &Context) -> Outcome {
    let mut cases = Cases::new(context, "call-fuzz");
    let own = u64::from(cpu::hardware_id(cpu_local::index()));
    let entry = boot::entry_of_further();
    for (name, about, function, arguments, expected) in [
        ("on-absent", "CPU_ON of a CPU that is not there", CPU_ON, [NOBODY, entry, 0], INVALID_PARAMETERS),
        ("on-oneself", "CPU_ON of the caller", CPU_ON, [own, entry, 0], ALREADY_ON),
        ("on-nonsense", "CPU_ON with all bits set", CPU_ON, [u64::MAX; 3], INVALID_PARAMETERS),
        ("info-absent", "AFFINITY_INFO of a CPU that is not there", AFFINITY_INFO, [NOBODY, 0, 0], INVALID_PARAMETERS),
        ("info-level", "AFFINITY_INFO of a level that is not there", AFFINITY_INFO, [own, 99, 0], INVALID_PARAMETERS),
        ("info-self", "AFFINITY_INFO of the caller", AFFINITY_INFO, [own, 0, 0], 0),
        ("no-function", "a function that does not exist", 0xc400_7777, [0; 3], NOT_SUPPORTED),
        ("no-owner", "a service that nobody owns", 0xbf00_0000, [0; 3], NOT_SUPPORTED),
        ("yielding", "a yielding call", 0x0000_1234, [0; 3], NOT_SUPPORTED),
    ] {
        let seen = answer(function, arguments);
        cases.check(name, about, "the answer", format_args!("{seen}, wanted {expected}"), seen == expected);
    }
    if cpu::is_up(1) {
        let other = u64::from(cpu::hardware_id(1));
        let seen = answer(CPU_ON, [other, entry, 0]);
        cases.check("on-running", "CPU_ON of a running CPU", "-4", format_args!("{seen}"), seen == ALREADY_ON);
        let went = turn_off(1, cases.patience());
        let seen = answer(CPU_ON, [other, NOWHERE, 0]);
        let matches = went && seen == INVALID_ADDRESS;
        cases.check("on-nowhere", "CPU_ON with an entry outside of memory", "-9", format_args!("{seen}"), matches);
        let came = cpu::start(1);
        cases.check("on-after", "the CPU comes when it is asked properly", "up", format_args!("{came}"), came);
    }
    random_calls(&mut cases);
    immediates(&mut cases);
    cases.done()
}

/// Random functions and arguments, except functions that end something, start something, or sleep.
fn random_calls(cases: &mut Cases) {
    /// CPU_SUSPEND, CPU_OFF, CPU_ON, SYSTEM_OFF, SYSTEM_RESET, the other suspends, freeze, SYSTEM_RESET2.
    const AVOIDED: [u64; 10] = [1, 2, 3, 8, 9, 0xb, 0xc, 0xd, 0xe, 0x12];
    let mut random = cases.context.random(0);
    let rounds = cases.context.settings.iterations.unwrap_or(20_000);
    let by_smc = cases.context.judged || power::is_by_smc();
    let by_hvc = cases.context.judged || !power::is_by_smc();
    let mut faults = 0u64;
    for _ in 0..rounds {
        let near = [0x8400_0000, 0xc400_0000][random.index(2)] | random.below(0x20);
        let function = if random.below(4) == 0 { random.bits() } else { near };
        if AVOIDED.contains(&(function & 0xffff)) {
            continue;
        }
        let arguments = core::array::from_fn(|_| random.bits() >> random.below(64));
        let called = if by_smc && (!by_hvc || random.below(2) == 0) {
            attempt::smc(function, arguments)
        } else {
            attempt::hvc(function, arguments)
        };
        faults += u64::from(called.is_err());
    }
    let version = answer(PSCI_VERSION, [0; 3]) >> 16;
    let seen = format_args!("{rounds} calls, {faults} faults, version {version}");
    cases.check("random", "random functions and arguments", "no fault", seen, faults == 0 && version == 1);
}

/// HVC and SMC with immediates that mean nothing, asking for a version in X0 nevertheless.
fn immediates(cases: &mut Cases) {
    const HVC: u32 = 0xd400_0002;
    const SMC: u32 = 0xd400_0003;
    if !cases.context.judged {
        return;
    }
    for (name, instruction) in [("hvc-immediate", HVC), ("smc-immediate", SMC)] {
        for immediate in [1, 77, 0x8000, 0xffff] {
            let seen = code::execute(cpu_local::index(), instruction | immediate << 5, [PSCI_VERSION, 0]);
            // To know nothing of it, by whichever way, is right; to carry it out is not.
            let matches = seen.is_err_and(|fault| fault.class() == attempt::Fault::UNDEFINED)
                || seen.is_ok_and(|[x0, _]| (x0 & 0xffff_ffff) as u32 == u32::MAX);
            let shown = super::Seen(seen.map(|[x0, _]| x0));
            cases.check(name, "a call with an immediate", "unknown", format_args!("{immediate:#x}: {shown}"), matches);
        }
    }
}

/// Lets CPU `index` turn itself off; returns whether it did.
fn turn_off(index: usize, patience: u64) -> bool {
    let affinity = u64::from(cpu::hardware_id(index));
    let went = cpu::give(index, |_| power::cpu_off())
        && cpu::wait_until(patience, || answer(AFFINITY_INFO, [affinity, 0, 0]) == IS_OFF);
    cpu::retire(index);
    went
}

static DONE_BY_OTHER: AtomicU64 = AtomicU64::new(0);

/// CPU 1 turns itself off and is turned on, over and over, while its timer is armed.
pub(super) fn off_and_on(context: &Context) -> Outcome {
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    let patience = tsc::seconds(context.settings.stall.unwrap_or(30));
    let mut failures = 0;
    let rounds = context.settings.iterations.unwrap_or(50);
    for round in 0..rounds {
        let went = turn_off(1, patience);
        // Interrupts sent to it in that time are lost, or wait.
        controller::send(cpu::hardware_id(1), crate::interrupt::COUNTED);
        let came = cpu::start(1);
        DONE_BY_OTHER.store(0, Ordering::SeqCst);
        let works =
            came && cpu::give(1, |cpu| {
                interrupts::enable();
                let before = taken(cpu).timer.load(Ordering::Acquire);
                controller::arm_once(TIMER, tsc::ticks(20));
                DONE_BY_OTHER.store(1, Ordering::SeqCst);
                while taken(cpu).timer.load(Ordering::Acquire) == before {
                    core::hint::spin_loop();
                }
                // Armed when it goes: that must not wake it.
                controller::arm_once(TIMER, tsc::ticks(20));
                DONE_BY_OTHER.store(2, Ordering::SeqCst);
            }) && cpu::wait_until(patience, || DONE_BY_OTHER.load(Ordering::SeqCst) == 2 && cpu::is_free(1));
        if !(went && came && works) {
            failures += 1;
            record!("violation", experiment = "off-and-on", round = round, went = went, came = came, works = works);
            break;
        }
    }
    record!("record", experiment = "off-and-on", rounds = rounds, failures = failures);
    Outcome::Done { failures }
}
