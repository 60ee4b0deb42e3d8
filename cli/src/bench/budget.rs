//! Exits of one boot with two vCPUs up to user space, beside a budget.
//!
//! The budget is what a small test hypervisor needed that had no I/O APIC, no interrupts from its UART and no RTC. So
//! what must not be exceeded is the sum; the lines tell where it goes.

use serde_json::{Value, json};

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
    // After its greeting the guest sleeps, so that little is added before the counters are read.
    let run = dunlin_run(&["--vcpus", "2", "--pcpus", "2", "--exec", "sleep 1", "--time-limit", "120s"])?;
    let vm = only_vm(&run);
    let (at_hello, at_end) = (&vm["counters_at_hello"], &vm["counters"]);
    let in_all = |counters: &Value| {
        let total = counters["exits_total"].as_u64();
        total.ok_or_else(|| Failure::failed(format!("the counters of the run could not be read: {run}")))
    };
    let (total, total_at_end) = (in_all(at_hello)?, in_all(at_end)?);
    let status = u8::from(total > IN_ALL);
    if args.json {
        println!("{:#}", json!({ "exits": at_hello["exits"], "exits_total": total, "budget_total": IN_ALL }));
        return Ok(status);
    }

    println!("{:26} {:>8} {:>8}", "exits up to user space", "Dunlin", "budget");
    let known = |name: &str| at_hello["exits"][name].as_u64().unwrap_or(0);
    let mut shown = 0;
    for (what, names, budget) in BUDGET {
        let count: u64 = names.iter().map(|name| known(name)).sum();
        shown += count;
        println!("{what:26} {count:>8} {budget:>8}");
    }
    println!("{:26} {:>8} {:>8}", "others", total.saturating_sub(shown), "-");
    println!("{:26} {total:>8} {IN_ALL:>8}", "in all");
    println!(
        "Kernel command line as in vms/default.toml (quiet). At power-off, after a script `sleep 1`: {total_at_end}."
    );
    Ok(status)
}
