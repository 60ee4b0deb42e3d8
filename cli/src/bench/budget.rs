//! Exits of one boot with two vCPUs, beside a budget.
//!
//! The budget is what a small test hypervisor needed that had no I/O APIC, no interrupts from its UART and no RTC.

use super::{dunlin_run, only_vm, progress};
use crate::args::BudgetArgs;
use crate::failure::Failure;

/// Counters that belong together, and what they may come to.
const BUDGET: [(&str, &[&str], u64); 7] = [
    ("CPUID", &["cpuid_exits"], 880),
    ("MSR", &["msr_read_exits", "msr_write_exits"], 2900),
    ("HLT", &["halt_exits"], 550),
    ("interrupts of the host", &["irq_exits"], 710),
    ("interrupt windows", &["irq_window_exits"], 400),
    ("ports", &["io_exits"], 120),
    ("stage-2 faults and MMIO", &["stage2_fault_exits", "mmio_exits"], 0),
];
/// All of it.
const IN_ALL: u64 = 6000;

pub(crate) fn run(args: &BudgetArgs) -> Result<u8, Failure> {
    progress("booting two vCPUs on two pCPUs");
    let run = dunlin_run(&["--vcpus", "2", "--exec", "true", "--time-limit", "120s"])?;
    let counters = &only_vm(&run)["counters"];
    if args.json {
        println!("{counters:#}");
        return Ok(0);
    }
    println!("{:26} {:>8} {:>8}", "exits", "Dunlin", "budget");
    for (what, names, budget) in BUDGET {
        let count: u64 = names.iter().filter_map(|name| counters["exits"][name].as_u64()).sum();
        println!("{what:26} {count:>8} {budget:>8}");
    }
    let total = counters["exits_total"].as_u64().unwrap_or(0);
    println!("{:26} {total:>8} {IN_ALL:>8}", "in all");
    println!("From the first instruction to the end of the script `true`; no console output but two lines.");
    Ok(u8::from(total > IN_ALL))
}
