//! Faults on purpose: `selftest=panic`, `overflow` or `null` on the command line, to see that each ends in a report, and
//! `tsc-skew`, to see that clocks which are apart are set right; `slow-log`, to see that a slow UART without a control port
//! delays nobody but who writes to it.

use core::fmt;
use core::hint::black_box;

use crate::arch;
use crate::boot::Boot;

/// Does what the command line asks for, if it asks for anything.
pub(crate) fn run(boot: &Boot) {
    // The clocks of pCPUs are set apart before they are compared, where pCPUs are started. The pace of the log matters where
    // consoles are written to it. SVM is looked for where VMs are started.
    match boot.option("selftest") {
        Some("panic") => panic!("asked for by selftest=panic"),
        Some("nested") => panic!("asked for by selftest=nested: {}", PanicsWhenShown),
        Some("overflow") => {
            black_box(overflow(black_box(1)));
        }
        Some("null") => {
            black_box(arch::irq::read_null());
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
