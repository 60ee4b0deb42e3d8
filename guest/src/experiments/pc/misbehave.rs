//! Answers of x86 to forbidden actions of a guest.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::arch::attempt::{self, Fault};
use crate::arch::{apic, control, cpu_local, interrupts, power, tsc, window};
use crate::cpu;
use crate::experiments::misbehave::name;
use crate::experiments::{Context, Outcome};
use crate::interrupt;
use crate::record::record;

fn raised<T>(seen: &Result<T, Fault>, vector: u8) -> bool {
    seen.as_ref().err().is_some_and(|fault| fault.vector == vector)
}

pub(super) fn reserved_msr(context: &Context) -> Outcome {
    let mut failures = 0;
    for msr in [0x12345u32, 0xc001_ffff, 0x4fff_fff0] {
        let read = attempt::rdmsr(msr);
        let written = attempt::wrmsr(msr, 0);
        record!(
            "record",
            experiment = "reserved-msr",
            msr = format_args!("{msr:#x}"),
            expected = "gp",
            rdmsr = name(&read),
            wrmsr = name(&written),
        );
        let of = format_args!("msr-{msr:#x}");
        failures += context.expect("reserved-msr", of, "gp", format_args!("{}", name(&read)), raised(&read, Fault::GP));
        failures +=
            context.expect("reserved-msr", of, "gp", format_args!("{}", name(&written)), raised(&written, Fault::GP));
    }
    Outcome::Done { failures }
}

pub(super) fn svm_instructions(context: &Context) -> Outcome {
    const EFER: u32 = 0xc000_0080;
    if attempt::rdmsr(EFER).is_ok_and(|efer| efer >> 12 & 1 != 0) {
        return Outcome::Unsupported("EFER.SVME is set");
    }
    let mut failures = 0;
    for (instruction, seen) in attempt::svm_instructions() {
        record!("record", experiment = "svm-instructions", of = instruction, expected = "ud", seen = name(&seen));
        failures += context.expect(
            "svm-instructions",
            format_args!("{instruction}"),
            "ud",
            format_args!("{}", name(&seen)),
            raised(&seen, Fault::UD),
        );
    }
    record!("record", experiment = "svm-instructions", svm_offered = control::has_svm());
    Outcome::Done { failures }
}

pub(super) fn xsetbv_bad(context: &Context) -> Outcome {
    if attempt::read_cr4() & control::CR4_OSXSAVE == 0 {
        return Outcome::Unsupported("no XSAVE");
    }
    let good = attempt::xgetbv();
    let mut failures = 0;
    // x87 clear; AVX without SSE; a reserved bit; bit 63; an XCR that does not exist.
    for (register, value) in [(0, 0), (0, 5), (0, good | 1 << 62), (0, good | 1 << 63), (7, good)] {
        let seen = attempt::xsetbv(register, value);
        if seen.is_ok() && attempt::xsetbv(0, good).is_err() {
            record!("error", about = "xcr0-not-restored");
        }
        record!(
            "record",
            experiment = "xsetbv-bad",
            xcr = register,
            value = format_args!("{value:#x}"),
            expected = "gp",
            seen = name(&seen),
        );
        failures += context.expect(
            "xsetbv-bad",
            format_args!("xcr{register}={value:#x}"),
            "gp",
            format_args!("{}", name(&seen)),
            raised(&seen, Fault::GP),
        );
    }
    Outcome::Done { failures }
}

/// A processor refuses this with #GP. QEMU's takes it, but cannot enter a guest with it: the VM ends.
pub(super) fn cr3_beyond_width(context: &Context) -> Outcome {
    let good = attempt::read_cr3();
    let seen = attempt::write_cr3(good | 1 << control::physical_bits());
    if seen.is_ok() {
        // An exit, and with it the entry that the processor refuses.
        control::leave();
        let _ = attempt::write_cr3(good);
    }
    let of = format_args!("cr3");
    let failures =
        context.expect("cr3-beyond-width", of, "gp", format_args!("{}", name(&seen)), raised(&seen, Fault::GP));
    Outcome::Done { failures }
}

/// An event whose delivery faults. A software interrupt executes again after the page fault, so its handler must run
/// exactly once. An external interrupt is already acknowledged when its delivery faults; the experiment reports that
/// case.
pub(super) fn nested_event(context: &Context) -> Outcome {
    let cpu = cpu_local::index();
    let handled = interrupts::window_stack_taken(cpu);
    let mut failures = 0;

    window::serve_demand(cpu, true);
    for _ in 0..context.settings.iterations.unwrap_or(100) {
        let (before, mapped) = (handled.load(Ordering::Acquire), window::mapped_on_demand(cpu));
        window::unmap_stack(cpu);
        interrupts::raise_on_window_stack();
        let runs = handled.load(Ordering::Acquire) - before;
        let faults = window::mapped_on_demand(cpu) - mapped;
        failures += context.expect(
            "nested-event",
            format_args!("software-interrupt"),
            "one-fault-one-run",
            format_args!("{faults}-faults-{runs}-runs"),
            (faults, runs) == (1, 1),
        );
        if failures > 5 {
            break;
        }
    }

    let (before, mapped) = (handled.load(Ordering::Acquire), window::mapped_on_demand(cpu));
    window::unmap_stack(cpu);
    apic::send_self(interrupts::WINDOW_STACK);
    cpu::wait_until(tsc::ticks(20_000), || handled.load(Ordering::Acquire) != before);
    let in_service = apic::is_in_service(interrupts::WINDOW_STACK);
    record!(
        "record",
        experiment = "nested-event",
        of = "external-interrupt",
        faults = window::mapped_on_demand(cpu) - mapped,
        runs = handled.load(Ordering::Acquire) - before,
        left_in_service = in_service,
        left_requested = apic::is_requested(interrupts::WINDOW_STACK),
    );
    if in_service {
        apic::end_of_interrupt(interrupts::WINDOW_STACK);
    }
    window::serve_demand(cpu, false);
    Outcome::Done { failures }
}

pub(super) fn long_handler(context: &Context) -> Outcome {
    let counted = || interrupt::taken(cpu_local::index()).counted.load(Ordering::Acquire);
    let mut failures = 0;
    // Longer than the period of any timer of the machine underneath.
    interrupt::let_counted_linger(tsc::ticks(30_000));
    for _ in 0..context.settings.iterations.unwrap_or(10) {
        let before = counted();
        apic::send_self(interrupt::COUNTED);
        cpu::wait_until(tsc::ticks(1_000_000), || counted() != before);
        let times = counted() - before;
        let seen = format_args!("{times}-interrupts");
        failures += context.expect("long-handler", format_args!("self-ipi"), "one-interrupt", seen, times == 1);
    }
    interrupt::let_counted_linger(0);
    record!("record", experiment = "long-handler", failures = failures);
    Outcome::Done { failures }
}

/// Passes of the loop that CPU 1 is interrupted in.
static PASSES: AtomicU64 = AtomicU64::new(0);
static REACHED: AtomicBool = AtomicBool::new(false);

pub(super) fn init_other(context: &Context) -> Outcome {
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    let mut failures = 0;
    for round in 0..context.settings.iterations.unwrap_or(5) {
        PASSES.store(0, Ordering::SeqCst);
        let given = cpu::give(1, |_| {
            loop {
                PASSES.fetch_add(1, Ordering::SeqCst);
            }
        });
        let worked = given && cpu::wait_until(tsc::seconds(5), || PASSES.load(Ordering::SeqCst) > 1000);
        let came_back = cpu::start(1);

        // It must have stopped its work, and must accept new work.
        let stopped = {
            let passes = PASSES.load(Ordering::SeqCst);
            tsc::pause_until(tsc::now() + tsc::ticks(1000));
            passes == PASSES.load(Ordering::SeqCst)
        };
        REACHED.store(false, Ordering::SeqCst);
        let works = came_back
            && cpu::give(1, |_| REACHED.store(true, Ordering::SeqCst))
            && cpu::wait_until(tsc::seconds(5), || REACHED.load(Ordering::SeqCst) && cpu::is_free(1));
        if !(worked && came_back && stopped && works) {
            record!(
                "violation",
                experiment = "init-self-other",
                round = round,
                worked = worked,
                came_back = came_back,
                stopped = stopped,
                works = works,
            );
            failures += 1;
        }
    }
    Outcome::Done { failures }
}

pub(super) fn triple_fault(_: &Context) -> Outcome {
    record!("record", experiment = "triple-fault", cpu = 0, about = "now");
    power::triple_fault()
}

pub(super) fn ap_triple_fault(_: &Context) -> Outcome {
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    record!("record", experiment = "ap-triple-fault", cpu = 1, about = "now");
    cpu::give(1, |_| power::triple_fault());
    cpu::wait_until(tsc::seconds(10), || false);
    record!("violation", experiment = "ap-triple-fault", expected = "vm-stops", seen = "nothing");
    Outcome::Done { failures: 1 }
}

pub(super) fn init_self(_: &Context) -> Outcome {
    record!("record", experiment = "init-self", about = "now");
    apic::send_init(cpu::hardware_id(0));
    tsc::pause_until(tsc::now() + tsc::seconds(1));
    record!("violation", experiment = "init-self", expected = "gone", seen = "nothing");
    Outcome::Done { failures: 1 }
}
