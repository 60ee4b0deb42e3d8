//! Two VMs whose code has the same address and the same root, but different meanings.
//!
//! The kernel is the same in both, so the address and the root are; only `variant=` differs. In one VM the instruction
//! reads the version of the local APIC, in the other its task priority. The guest checks each result.

use super::{NEEDS_XAPIC, PRIORITY, Shown, TASK_PRIORITY, local_apic};
use crate::arch::code_pages::{self, ALL};
use crate::arch::encode::{END, LOAD_RDI, LOAD_RSI};
use crate::arch::probe::{self, Level, RAX, RDI, RSI, Registers};
use crate::arch::{apic, tlb, tsc};
use crate::experiments::{Context, Outcome};
use crate::record::record;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let second = context.settings.second_variant;
    code_pages::clear(0);
    code_pages::point(0, 0, code_pages::frame(0, 0) | ALL);
    tlb::flush_all();
    code_pages::write(code_pages::frame(0, 0), 0, if second { LOAD_RSI } else { LOAD_RDI });
    code_pages::write(code_pages::frame(0, 0), 2, &[END]);

    apic::write(TASK_PRIORITY, PRIORITY);
    let expected = u64::from(if second { PRIORITY } else { apic::read(apic::VERSION) });
    let start = Registers::at(code_pages::address(0, 0))
        .with(RDI, local_apic(apic::VERSION))
        .with(RSI, local_apic(TASK_PRIORITY));

    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(5));
    let (mut reads, mut wrong) = (0u64, 0u64);
    let mut first = None;
    while tsc::now() < end {
        for _ in 0..64 {
            let seen = probe::run(&start, Level::Kernel).value(RAX);
            reads += 1;
            if seen != Ok(expected) {
                wrong += 1;
                first.get_or_insert(seen);
            }
        }
    }
    apic::write(TASK_PRIORITY, 0);

    record!(
        "record",
        experiment = "decode-variant",
        variant = if second { "b" } else { "a" },
        rip = format_args!("{:#x}", start.rip),
        root = format_args!("{:#x}", tlb::root()),
        reads = reads,
        wrong = wrong,
    );
    let failures = match first {
        None => 0,
        Some(seen) => context.expect(
            "decode-variant",
            format_args!("result"),
            format_args!("{expected:#x}"),
            format_args!("\"{}\"", Shown(seen)),
            false,
        ),
    };
    Outcome::Done { failures }
}
