//! Exits of one boot with two vCPUs to user space, compared with a budget.
//!
//! The budget of x86-64 is the number of exits of a small test hypervisor without I/O APIC, UART interrupts and RTC.
//! That of AArch64 is a tenth of KVM's exits. Only the sum must stay within the budget; the lines show its parts.
//!
//! Timer ticks depend on the duration of the boot, and so do a guest's halts and the timer interrupts of guest and
//! host. So that they do not depend on the computer, QEMU's clocks count instructions. Only the exits of the idle guest
//! until its counters are read still vary.

use serde_json::{Value, json};

use super::circumstances::Watch;
use super::guest::exact_arguments;
use super::target::Target;
use super::{dunlin_run, only_vm, progress};
use crate::args::BudgetArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};

/// A line: counters that belong together, and their budget.
type Line = (&'static str, &'static [&'static str], u64);

const X86_64: [Line; 7] = [
    ("CPUID", &["cpuid_exits"], 880),
    ("MSR", &["msr_read_exits", "msr_write_exits"], 2900),
    ("HLT", &["halt_exits"], 550),
    ("interrupts of the host", &["irq_exits"], 710),
    ("interrupt windows", &["irq_window_exits"], 400),
    ("ports", &["io_exits"], 120),
    ("stage-2 faults and MMIO", &["stage2_fault_exits", "mmio_exits"], 0),
];

/// KVM has 91 700 exits, of which 90 098 are reads of one register. Dunlin's budget is a tenth of that. The lines are
/// KVM's other exits.
const AARCH64: [Line; 5] = [
    ("system registers", &["msr_read_exits", "msr_write_exits"], 573),
    ("WFI", &["halt_exits"], 241),
    ("interrupts of the host", &["irq_exits"], 620),
    ("calls of the firmware", &["hypercalls"], 25),
    ("stage-2 faults and MMIO", &["stage2_fault_exits", "mmio_exits"], 396),
];

/// The lines, and the budget of their sum.
const fn budget(arch: Arch) -> (&'static [Line], u64) {
    match arch {
        Arch::X86_64 => (&X86_64, 6000),
        Arch::Aarch64 => (&AARCH64, 9170),
    }
}

pub(crate) fn run(args: &BudgetArgs, log: &Log) -> Result<u8, Failure> {
    let (lines, in_all) = budget(args.arch);
    progress("booting two vCPUs on two pCPUs");
    let watch = Watch::start();
    // After its greeting the guest sleeps, so that little is added before the counters are read.
    let what = ["--vcpus=2", "--pcpus=2", "--exec=sleep 1", "--accel=tcg", "--time-limit=240s"].map(str::to_string);
    let clock = exact_arguments().into_iter().map(|argument| format!("--qemu-arg={argument}"));
    let arguments: Vec<_> = [format!("--arch={}", args.arch.name())].into_iter().chain(what).chain(clock).collect();
    let run = dunlin_run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let vm = only_vm(&run);
    let (at_hello, at_end) = (&vm["counters_at_hello"], &vm["counters"]);
    let of = |counters: &Value| {
        let total = counters["exits_total"].as_u64();
        total.ok_or_else(|| Failure::failed(format!("the counters of the run could not be read: {run}")))
    };
    let (total, total_at_end) = (of(at_hello)?, of(at_end)?);
    let status = u8::from(total > in_all);
    record(log, &run, total, watch.others());
    Target::new("exits of a boot, at most as many as budgeted", format!("{total} of {in_all}"), status == 0)
        .record(log);
    if args.json {
        println!("{:#}", json!({ "exits": at_hello["exits"], "exits_total": total, "budget_total": in_all }));
        return Ok(status);
    }

    println!("{:26} {:>8} {:>8}", "exits up to user space", "Dunlin", "budget");
    let known = |name: &str| at_hello["exits"][name].as_u64().unwrap_or(0);
    let mut shown = 0;
    for &(what, names, budget) in lines {
        let count: u64 = names.iter().map(|name| known(name)).sum();
        shown += count;
        println!("{what:26} {count:>8} {budget:>8}");
    }
    println!("{:26} {:>8} {:>8}", "others", total.saturating_sub(shown), "-");
    println!("{:26} {total:>8} {in_all:>8}", "in all");
    println!(
        "Kernel command line as in vms/default.toml (quiet). At power-off, after a script `sleep 1`: {total_at_end}.\n\
         Emulated by QEMU, whose clocks count instructions, one per nanosecond: by these the boot took {:.2} s, on any computer.",
        vm["boot_seconds"].as_f64().unwrap_or_default()
    );
    Ok(status)
}

fn record(log: &Log, run: &Value, total: u64, others: Option<f64>) {
    let figure = |quantity: &str, count: u64| {
        Figure::new(quantity, Class::Count, "exits", [count as f64])
            .at("vcpus", 2)
            .at("pcpus", 2)
            .at("clock", "instructions")
            .others(others)
    };
    log.emulated(run, figure("exits of a boot", total));
    for (reason, count) in only_vm(run)["counters_at_hello"]["exits"].as_object().into_iter().flatten() {
        let count = count.as_u64().unwrap_or(0);
        log.emulated(run, figure("exits of a boot, by reason", count).at("reason", reason.as_str()));
    }
}
