//! Faults on purpose. `selftest=panic`, `overflow` or `null` on the command line test that each ends in a report.
//! `tsc-skew` tests that clocks with a difference are corrected. `slow-log` tests that a slow UART without a control
//! port delays only the guests that write to it. `iommu` has a device write where it must not. `exhaustion` lets
//! commands choose which allocations fail. `spec-ctrl` has registers of speculation used that CPUID does not report.
//! `all-steps` has an emulated processor take all steps against speculation, to count them.

use core::fmt;
use core::hint::black_box;

use crate::arch::{Arch, Machine};
use crate::boot::Boot;
use crate::exhaustion;

/// Runs the requested self-test, if there is one.
pub(crate) fn run(boot: &Boot) {
    // `tsc-skew` and `iommu` are handled where pCPUs are started, `slow-log` where consoles are written to the log,
    // missing SVM where VMs are started.
    match boot.option("selftest") {
        Some("panic") => panic!("requested by selftest=panic"),
        Some("nested") => panic!("requested by selftest=nested: {}", PanicsWhenShown),
        Some("overflow") => {
            black_box(overflow(black_box(1)));
        }
        Some("exhaustion") => exhaustion::arm(),
        Some("null") => {
            black_box(Machine::read_null());
        }
        _ => {}
    }
}

/// Calls itself until the stack ends.
#[expect(unconditional_recursion, reason = "it is to end at the guard page, not by itself")]
fn overflow(depth: u64) -> u64 {
    let here = black_box([depth; 16]);
    overflow(depth + 1) + here[15]
}

struct PanicsWhenShown;

impl fmt::Display for PanicsWhenShown {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("while the first panic is being reported")
    }
}
