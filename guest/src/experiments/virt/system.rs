//! System registers and instructions: all encodings.

use super::Seen;
use crate::arch::attempt::Fault;
use crate::arch::{code, controller, cpu_local, lower_level, window};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// The five numbers that encode a system register or instruction.
pub(super) type Encoding = (u32, u32, u32, u32, u32);

/// The instruction with X0 as its register; a read, or a write.
pub(super) const fn instruction((op0, op1, crn, crm, op2): Encoding, is_read: bool) -> u32 {
    0xd500_0000 | (is_read as u32) << 21 | op0 << 19 | op1 << 16 | crn << 12 | crm << 8 | op2 << 5
}

/// All encodings with this `op0`.
pub(super) fn all(op0: u32) -> impl Iterator<Item = Encoding> {
    (0..1 << 14).map(move |bits: u32| (op0, bits >> 11, bits >> 7 & 15, bits >> 3 & 15, bits & 7))
}

/// Reads that do something: they acknowledge interrupts.
pub(super) fn acknowledges(encoding: Encoding) -> bool {
    matches!(encoding, (3, 0, 12, 8 | 12, 0))
}

/// Writes that take the ground from under this kernel, or interrupt others.
pub(super) fn moves_the_ground(encoding: Encoding, judged: bool) -> bool {
    match encoding {
        // SCTLR_EL1 and its second part; TTBR0_EL1, TCR_EL1, its second part.
        (3, 0, 1, 0, 0 | 3) | (3, 0, 2, 0, 0 | 2 | 3) => true,
        // SPSel, DAIF, PAN.
        (3, 0, 4, 2, 0 | 3) | (3, 3, 4, 2, 1) => true,
        // MAIR_EL1, VBAR_EL1, TPIDR_EL1.
        (3, 0, 10, 2, 0) | (3, 0, 12, 0, 0) | (3, 0, 13, 0, 4) => true,
        // The interrupt controller has an experiment of its own.
        (3, 0, 12, 8..=12, _) | (3, 0, 4, 6, 0) => true,
        // Without a hypervisor, breakpoints are real.
        (2, ..) => !judged,
        _ => false,
    }
}

/// Each encoding is read, written, or carried out. Undefined, or a value: nothing else.
pub(super) fn sweep(context: &Context) -> Outcome {
    let cpu = cpu_local::index();
    let mut random = context.random(cpu);
    let scratch = window::frame(cpu, 2);
    let mut failures = 0;
    let (mut values, mut undefined, mut written, mut refused) = (0u32, 0u32, 0u32, 0u32);

    let mut odd = |encoding: Encoding, what: &str, fault: Fault| {
        let (op0, op1, crn, crm, op2) = encoding;
        let of = format_args!("{what}-s{op0}_{op1}_c{crn}_c{crm}_{op2}");
        failures += context.expect("sysreg-sweep", of, "undefined-or-done", format_args!("{fault}"), false);
    };
    for encoding in [2, 3].into_iter().flat_map(all) {
        let mut before = None;
        if !acknowledges(encoding) {
            match code::execute(cpu, instruction(encoding, true), [0; 2]) {
                Ok([value, _]) => {
                    values += 1;
                    before = Some(value);
                }
                Err(fault) if fault.class() == Fault::UNDEFINED => undefined += 1,
                // In the space of ID registers but not one of them: the processor may report it (FEAT_IDST).
                Err(fault) if fault.class() == Fault::SYSTEM && matches!(encoding, (3, _, 0, ..)) => undefined += 1,
                Err(fault) => odd(encoding, "read", fault),
            }
        }
        if moves_the_ground(encoding, context.judged) {
            continue;
        }
        let value = random.bits() >> random.below(64);
        match code::execute(cpu, instruction(encoding, false), [value, 0]) {
            Ok(_) => {
                written += 1;
                if let Some(before) = before {
                    let _ = code::execute(cpu, instruction(encoding, false), [before, 0]);
                }
            }
            Err(fault) if fault.class() == Fault::UNDEFINED => refused += 1,
            Err(fault) => odd(encoding, "write", fault),
        }
    }
    record!(
        "record",
        experiment = "sysreg-sweep",
        of = "registers",
        values = values,
        undefined = undefined,
        written = written,
        refused = refused,
    );

    let (mut done, mut undefined) = (0u32, 0u32);
    for (encoding, is_read) in all(1).flat_map(|encoding| [(encoding, false), (encoding, true)]) {
        match code::execute(cpu, instruction(encoding, is_read), [scratch, 0]) {
            Ok(_) => done += 1,
            Err(fault) if fault.class() == Fault::UNDEFINED => undefined += 1,
            Err(fault) => odd(encoding, "instruction", fault),
        }
    }
    record!("record", experiment = "sysreg-sweep", of = "instructions", done = done, undefined = undefined);
    controller::restore();
    failures += super::interrupts::still_work(context, "sysreg-sweep");
    Outcome::Done { failures }
}

/// Breakpoints on this kernel's own code and single steps, set up as if they were allowed; counters of events.
pub(super) fn debug(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    const MDSCR: Encoding = (2, 0, 0, 2, 2);
    const OSLAR: Encoding = (2, 0, 1, 0, 4);
    let mut cases = Cases::new(context, "debug");
    let cpu = cpu_local::index();
    let write = |encoding, value| code::execute(cpu, instruction(encoding, false), [value, 0]);
    let _ = write(OSLAR, 0);
    for number in 0..16 {
        // Address and control of breakpoints and watchpoints: everything, at EL0 and EL1.
        for (op2, value) in [(4, window::frame(cpu, 0)), (5, 0x1e7), (6, window::frame(cpu, 2)), (7, 0x1ff7)] {
            let _ = write((2, 0, 0, number, op2), value);
        }
    }
    let _ = write(MDSCR, 0xa001);
    let seen = code::execute(cpu, 0xd503_201f, [1, 2]);
    let matches = seen == Ok([1, 2]);
    let seen = Seen(seen.map(|[x0, _]| x0));
    cases.check("breakpoints", "all of them, on code that runs", "nothing", format_args!("{seen}"), matches);
    let _ = write(MDSCR, 0);

    for (name, instruction, class) in [
        ("brk", 0xd420_0020, Fault::BREAKPOINT),
        ("hlt", 0xd440_0060, Fault::UNDEFINED),
        ("dcps1", 0xd4a0_0001, Fault::UNDEFINED),
        ("udf", 0, Fault::UNDEFINED),
        // PMCR_EL0, PMCCNTR_EL0, PMSWINC_EL0: performance monitors, which guests do not have.
        ("pmcr-read", 0xd53b_9c00, Fault::UNDEFINED),
        ("pmccntr-write", 0xd51b_9d00, Fault::UNDEFINED),
        // RDVL, SMSTART, IRG: extensions that guests do not have.
        ("sve", 0x04bf_5020, Fault::UNDEFINED),
        ("sme", 0xd503_477f, Fault::UNDEFINED),
        ("eret-to-el2-registers", 0xd51c_1100, Fault::UNDEFINED),
    ] {
        let seen = code::execute(cpu, instruction, [0; 2]);
        let matches = seen.is_err_and(|fault| fault.class() == class);
        let seen = Seen(seen.map(|[x0, _]| x0));
        cases.check(name, "an instruction", "its exception", format_args!("{seen}"), matches);
    }
    cases.done()
}

/// EL0, in 64 bits and 32: it cannot do what it must not.
pub(super) fn lower(context: &Context) -> Outcome {
    use lower_level::State::{A32, A64, T32};
    const SVC64: u64 = 0x15;
    const SVC32: u64 = 0x11;
    let mut cases = Cases::new(context, "el0");
    let svc = [0xd400_0001; 2];
    for (name, state, code, classes) in [
        ("svc", A64, svc, &[SVC64][..]),
        ("hvc", A64, [0xd400_0002, svc[0]], &[0]),
        ("smc", A64, [0xd400_0003, svc[0]], &[0]),
        ("mrs-midr", A64, [0xd538_0000, svc[0]], &[0, 0x18]),
        ("mrs-midr-el2", A64, [0xd53c_0000, svc[0]], &[0]),
        ("wfi", A64, [0xd503_207f, svc[0]], &[1, SVC64]),
        ("load-kernel", A64, [0xf940_0000, svc[0]], &[0x24]),
        ("eret", A64, [0xd69f_03e0, svc[0]], &[0]),
        ("a32-svc", A32, [0xef00_0000; 2], &[SVC32]),
        ("t32-svc", T32, [0xdf00_df00; 2], &[SVC32]),
        ("a32-hvc", A32, [0xe140_0070, 0xef00_0000], &[0]),
        ("a32-smc", A32, [0xe160_0070, 0xef00_0000], &[0]),
        ("a32-cp15", A32, [0xee10_0f10, 0xef00_0000], &[0, 3]),
        ("a32-cp14", A32, [0xee10_0e15, 0xef00_0000], &[0, 5]),
        ("a32-wfi", A32, [0xe320_f003, 0xef00_0000], &[1, SVC32]),
        ("a32-ldm", A32, [0xe890_0006, 0xef00_0000], &[0x24]),
        ("a32-undefined", A32, [0xe7f0_00f0, 0xef00_0000], &[0]),
    ] {
        if state != A64 && !crate::arch::control::has_aarch32() {
            cases.skip(name, "an instruction at EL0", "no AArch32");
            continue;
        }
        let (syndrome, _) = lower_level::execute(state, code);
        let class = syndrome >> 26 & 0x3f;
        cases.check(
            name,
            "an instruction at EL0",
            "its exception",
            format_args!("class {class:#x}"),
            classes.contains(&class),
        );
    }
    cases.done()
}
