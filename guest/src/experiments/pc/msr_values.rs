//! Each MSR whose feature CPUID shows, with valid and invalid values.
//!
//! The table has registers and rules. The experiment derives test values from a register's current value in the same
//! way for all: it flips each of the 64 bits, and adds a few special values. The rule says which values the register
//! must take and return unchanged, and which must raise `#GP` and change nothing.
//!
//! Some registers are the processor's own even under a hypervisor, which does not intercept writes to them. The
//! experiment counts deviations there (`differs`), but they are no failure of the hypervisor. The same experiment
//! without a hypervisor shows whether the processor is the cause.

use super::spec_ctrl;
use crate::arch::attempt::{self, Fault};
use crate::arch::control::{self, cpuid};
use crate::arch::{apic, tsc};
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// The values that a register takes.
#[derive(Clone, Copy)]
enum Rule {
    /// Values with no other bits set.
    Bits(u64),
    /// Like [`Self::Bits`], but writes do not change what reads return.
    Swallows(u64),
    /// Nothing: it is read, and cannot be written.
    ReadOnly,
    /// Canonical addresses.
    Canonical,
    /// A memory type in each byte, for ranges (`false`) or for pages (`true`), which have one more.
    Types(bool),
    /// A physical address, and a memory type in the lowest byte.
    RangeBase,
    /// A physical address, and bit 11.
    RangeMask,
    /// A memory type in the lowest byte, bits 10 and 11.
    DefaultType,
    /// A physical address, with the current lowest twelve bits.
    ApicBase,
}

/// Who handles a register under a hypervisor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Hypervisor,
    Processor,
}
use Whose::{Hypervisor, Processor};

struct Register {
    name: &'static str,
    number: u32,
    rule: Rule,
    whose: Whose,
    /// Bits that are left as they are: turning them over would take the ground from under this kernel, or do something.
    keep: u64,
}

const fn register(name: &'static str, number: u32, rule: Rule, whose: Whose) -> Register {
    Register { name, number, rule, whose, keep: 0 }
}

impl Register {
    const fn keeping(mut self, bits: u64) -> Self {
        self.keep = bits;
        self
    }
}

const LOW_HALF: u64 = 0xffff_ffff;

/// EFER: CPUID shows SYSCALL. The experiment keeps long mode and NX, on which this kernel relies. It also keeps bits of
/// optional features, and those that take any write and read zero (APM vol. 2, figure 3-9).
const EFER_KEPT: u64 = 0xfe | 0b0111_1101 << 8 | 1 << 15 | 1 << 17 | 1 << 18 | 1 << 20 | 1 << 21;

const REGISTERS: [Register; 16] = [
    register("apic-base", 0x1b, Rule::ApicBase, Hypervisor).keeping(3 << 10 | 1 << 8),
    // A selector; further bits differ between processors.
    register("sysenter-cs", 0x174, Rule::Bits(0xffff), Processor).keeping(!0xffff),
    // AMD's CPUs have no SYSENTER in 64-bit code and need not check these: only canonical values are tried.
    register("sysenter-esp", 0x175, Rule::Bits(0x7fff_ffff_ffff), Processor).keeping(!0x7fff_ffff_ffff),
    register("sysenter-eip", 0x176, Rule::Bits(0x7fff_ffff_ffff), Processor).keeping(!0x7fff_ffff_ffff),
    register("mtrr-cap", 0xfe, Rule::ReadOnly, Hypervisor),
    register("pat", 0x277, Rule::Types(true), Hypervisor),
    register("mtrr-default", 0x2ff, Rule::DefaultType, Hypervisor),
    register("efer", 0xc000_0080, Rule::Bits(EFER_KEPT | 1), Hypervisor).keeping(EFER_KEPT),
    register("star", 0xc000_0081, Rule::Bits(u64::MAX), Processor),
    register("lstar", 0xc000_0082, Rule::Canonical, Processor),
    register("cstar", 0xc000_0083, Rule::Canonical, Processor),
    register("sfmask", 0xc000_0084, Rule::Bits(LOW_HALF), Processor).keeping(!LOW_HALF),
    register("fs-base", 0xc000_0100, Rule::Canonical, Processor),
    register("gs-base", 0xc000_0101, Rule::Canonical, Processor),
    register("kernel-gs-base", 0xc000_0102, Rule::Canonical, Processor),
    register("tsc-aux", 0xc000_0103, Rule::Bits(LOW_HALF), Processor).keeping(!LOW_HALF),
];

const VARIABLE_RANGES: u32 = 8;
const RANGE_BASE_0: u32 = 0x200;
const FIXED_RANGES: [u32; 11] = [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];

/// Registers of the x2APIC. Interrupt command and self-IPI would send an interrupt: only their reserved bits are tried.
const X2APIC: [Register; 13] = [
    register("x2apic-id", 0x802, Rule::ReadOnly, Hypervisor),
    register("x2apic-version", 0x803, Rule::ReadOnly, Hypervisor),
    register("x2apic-tpr", 0x808, Rule::Bits(0xff), Hypervisor),
    register("x2apic-ppr", 0x80a, Rule::ReadOnly, Hypervisor),
    register("x2apic-ldr", 0x80d, Rule::ReadOnly, Hypervisor),
    register("x2apic-spurious", 0x80f, Rule::Bits(0x3ff), Hypervisor).keeping(1 << 8),
    register("x2apic-isr", 0x810, Rule::ReadOnly, Hypervisor),
    register("x2apic-irr", 0x820, Rule::ReadOnly, Hypervisor),
    register("x2apic-esr", 0x828, Rule::Swallows(0), Hypervisor),
    register("x2apic-lvt-timer", 0x832, Rule::Bits(MASKED | 3 << 17 | 0xff), Hypervisor).keeping(MASKED | 1 << 12),
    register("x2apic-lvt-error", 0x837, Rule::Bits(MASKED | 0x7ff), Hypervisor).keeping(MASKED | 1 << 12),
    register("x2apic-initial-count", 0x838, Rule::Bits(LOW_HALF), Hypervisor),
    register("x2apic-divide", 0x83e, Rule::Bits(0b1011), Hypervisor),
];
const MASKED: u64 = 1 << 16;

/// A bit of CPUID: leaf, sub-leaf, register (EAX 0 to EDX 3), number.
type Bit = (u32, u32, usize, u32);

/// Registers of features that a guest may find hidden, and the bit that would show each.
const HIDDEN: [(&str, u32, Bit); 8] = [
    ("arch-capabilities", 0x10a, (7, 0, 3, 29)),
    ("pkrs", 0x6e1, (7, 0, 2, 31)),
    ("u-cet", 0x6a0, (7, 0, 2, 7)),
    ("s-cet", 0x6a2, (7, 0, 2, 7)),
    ("xss", 0xda0, (0xd, 1, 0, 3)),
    ("vm-cr", 0xc001_0114, (0x8000_0001, 0, 2, 2)),
    ("vm-hsave-pa", 0xc001_0117, (0x8000_0001, 0, 2, 2)),
    ("virt-spec-ctrl", 0xc001_011f, (0x8000_0008, 0, 1, 25)),
];

pub(super) fn run(context: &Context) -> Outcome {
    let mut tally = Tally { context, taken: 0, refused: 0, differs: 0, differs_here: 0, first: (0, ""), failures: 0 };
    let ranges = (0..VARIABLE_RANGES).flat_map(|range| {
        let number = RANGE_BASE_0 + range * 2;
        [
            register("mtrr-base", number, Rule::RangeBase, Hypervisor),
            register("mtrr-mask", number + 1, Rule::RangeMask, Hypervisor),
        ]
    });
    let fixed = FIXED_RANGES.map(|number| register("mtrr-fixed", number, Rule::Types(false), Hypervisor));
    let mut registers = 0u32;
    for it in REGISTERS.into_iter().chain(ranges).chain(fixed) {
        // TSC_AUX has its own CPUID bit. QEMU's own CPU silently drops EFER's reserved bits, so the value then differs.
        if (it.name == "tsc-aux" && !control::has_rdtscp()) || (it.name == "efer" && !context.judged) {
            continue;
        }
        registers += 1;
        tally.try_register(&it);
    }
    if apic::is_x2apic() {
        for it in X2APIC {
            registers += 1;
            tally.try_register(&it);
        }
        tally.refuse("x2apic-command", 0x830, (20..32).chain([13, 16, 17]).map(|bit| 1 << bit));
        tally.refuse("x2apic-self-ipi", 0x83f, (8..64).map(|bit| 1 << bit));
        tally.refuse("x2apic-eoi", 0x80b, (0..64).map(|bit| 1 << bit));
        apic::enable_this_cpu();
    } else if context.judged {
        for number in 0x800..0x840 {
            tally.absent("x2apic", number);
        }
    }
    for (name, number, (leaf, sub, which, bit)) in HIDDEN {
        let shown = cpuid(leaf, sub);
        if [shown.eax, shown.ebx, shown.ecx, shown.edx][which] >> bit & 1 == 0 && context.judged {
            tally.absent(name, number);
        }
    }
    let controls = spec_ctrl::bits();
    if controls != 0 {
        // Once a guest has written it, the processor decides about bits that CPUID does not show.
        registers += 1;
        tally.try_register(&register("spec-ctrl", 0x48, Rule::Bits(controls), Processor));
        let _ = attempt::wrmsr(0x48, 0);
    } else if context.judged {
        tally.absent("spec-ctrl", 0x48);
    }
    if spec_ctrl::has_commands() {
        registers += 1;
        tally.taken += 1;
        let forgets = attempt::wrmsr(0x49, 1).is_ok();
        tally.judge("pred-cmd", 1, Hypervisor, "taken", forgets);
        let is_hidden = attempt::rdmsr(0x49).is_err_and(|fault| fault.vector == Fault::GP);
        tally.judge("pred-cmd", 0, Hypervisor, "gp", is_hidden);
    } else if context.judged {
        tally.absent("pred-cmd", 0x49);
    }
    if cpuid(7, 0).edx >> 29 & 1 != 0 {
        registers += 1;
        tally.try_register(&register("arch-capabilities", 0x10a, Rule::ReadOnly, Hypervisor));
    }
    // The deadline is read as it was written only while the timer works by it.
    for value in [0, u64::MAX, tsc::now().wrapping_add(1 << 40)] {
        if control::has_tsc_deadline() {
            tally.taken += 1;
            let seen = attempt::wrmsr(apic::TSC_DEADLINE, value);
            tally.judge("tsc-deadline", value, Hypervisor, "taken", seen.is_ok());
        }
    }
    if control::has_tsc_deadline() {
        let _ = attempt::wrmsr(apic::TSC_DEADLINE, 0);
    }
    let Tally { taken, refused, differs, failures, .. } = tally;
    record!(
        "record",
        experiment = "msr-values",
        registers = registers,
        taken = taken,
        refused = refused,
        differs = differs
    );
    Outcome::Done { failures }
}

struct Tally<'a, 'b> {
    context: &'a Context<'b>,
    taken: u32,
    refused: u32,
    /// Of the processor's own registers: all differences, and those of the current one, with the first of them.
    differs: u32,
    differs_here: u32,
    first: (u64, &'static str),
    failures: u64,
}

impl Tally<'_, '_> {
    fn try_register(&mut self, it: &Register) {
        let Ok(before) = attempt::rdmsr(it.number) else {
            return self.judge(it.name, 0, it.whose, "readable", false);
        };
        // All zeros and all ones, both ends of the canonical addresses, a byte of each memory type that does not exist.
        let special = [
            0,
            u64::MAX,
            0x7fff_ffff_ffff,
            0x8000_0000_0000,
            0xffff_7fff_ffff_ffff,
            0xffff_8000_0000_0000,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
            0x0705_0604_0100_0706,
        ];
        let flips = (0..64).map(|bit| before ^ 1 << bit);
        for value in flips.chain(special.map(|value| value & !it.keep | before & it.keep)) {
            if (value ^ before) & it.keep != 0 {
                continue;
            }
            let written = attempt::wrmsr(it.number, value);
            let read = attempt::rdmsr(it.number);
            // Before anything else is done: some of these this kernel lives on.
            let restored = attempt::wrmsr(it.number, before);
            self.look(it, before, value, written, read);
            if restored.is_err() && !matches!(it.rule, Rule::ReadOnly) {
                self.judge(it.name, before, it.whose, "restored", false);
            }
        }
        let count = core::mem::take(&mut self.differs_here);
        self.differs += count;
        if count > 0 {
            let (value, expected) = self.first;
            record!(
                "differs",
                register = it.name,
                values = count,
                expected = expected,
                first = format_args!("{value:#x}")
            );
        }
    }

    fn look(&mut self, it: &Register, before: u64, value: u64, written: Result<(), Fault>, read: Result<u64, Fault>) {
        let is_legal = takes(it.rule, before, value);
        let kept = if is_legal && !matches!(it.rule, Rule::Swallows(_)) { value } else { before };
        let right = if is_legal { written.is_ok() } else { is_gp(written) };
        let expected = if is_legal { "taken" } else { "gp" };
        if is_legal {
            self.taken += 1;
        } else {
            self.refused += 1;
        }
        self.judge(it.name, value, it.whose, expected, right && read == Ok(kept));
    }

    /// The register must refuse all these values.
    fn refuse(&mut self, name: &str, number: u32, values: impl Iterator<Item = u64>) {
        for value in values {
            self.refused += 1;
            self.judge(name, value, Hypervisor, "gp", is_gp(attempt::wrmsr(number, value)));
        }
    }

    /// There must be no such register.
    fn absent(&mut self, name: &str, number: u32) {
        self.refused += 1;
        let absent =
            attempt::rdmsr(number).is_err_and(|fault| fault.vector == Fault::GP) && is_gp(attempt::wrmsr(number, 0));
        self.judge(name, number.into(), Hypervisor, "absent", absent);
    }

    fn judge(&mut self, name: &str, value: u64, whose: Whose, expected: &'static str, right: bool) {
        if right {
            return;
        }
        let seen = if expected == "gp" { "taken" } else { "refused-or-lost" };
        if whose == Processor {
            if self.differs_here == 0 {
                self.first = (value, expected);
            }
            self.differs_here += 1;
        } else {
            self.failures += self.context.expect(
                "msr-values",
                format_args!("{name}={value:#x}"),
                expected,
                format_args!("{seen}"),
                false,
            );
        }
    }
}

fn is_gp(written: Result<(), Fault>) -> bool {
    written.is_err_and(|fault| fault.vector == Fault::GP)
}

/// Whether a register with this rule, and `before` in it, takes `value`.
fn takes(rule: Rule, before: u64, value: u64) -> bool {
    let addresses = (1u64 << control::physical_bits()) - (1 << 12);
    let [low, ..] = value.to_le_bytes();
    match rule {
        Rule::Bits(bits) | Rule::Swallows(bits) => value & !bits == 0,
        Rule::ReadOnly => false,
        // Five levels of tables are nowhere in use here.
        Rule::Canonical => matches!(value >> 47, 0 | 0x1_ffff),
        Rule::Types(of_pages) => value.to_le_bytes().into_iter().all(|kind| is_type(kind) || (of_pages && kind == 7)),
        Rule::RangeBase => is_type(low) && value & !(addresses | 0xff) == 0,
        Rule::RangeMask => value & !(addresses | 1 << 11) == 0,
        Rule::DefaultType => is_type(low) && value & !0xcff == 0,
        Rule::ApicBase => value & 0xfff == before & 0xfff && value & !(addresses | 0xfff) == 0,
    }
}

fn is_type(number: u8) -> bool {
    matches!(number, 0 | 1 | 4 | 5 | 6)
}
