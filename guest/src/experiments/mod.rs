//! The experiments: what there is, by name.

mod cases;
mod decode;
mod flush_cost;
mod fuzz;
mod hyperv;
mod misbehave;
pub(crate) mod mixed;
mod round_trip;
mod shootdown;
mod stale;

use core::fmt;

use guest_model::command_line::Settings;

use crate::record::record;

/// What an experiment may know about the run.
pub(crate) struct Context<'a> {
    /// The command line.
    pub(crate) settings: &'a Settings<'a>,
    /// Whether a hypervisor is below, so that what is not as the architecture has it is a failure.
    pub(crate) judged: bool,
}

/// How an experiment ended.
pub(crate) enum Outcome {
    /// It ran.
    Done {
        /// How many times something was not as it must be.
        failures: u64,
    },
    /// The machine lacks something, named here.
    Unsupported(&'static str),
}

/// One experiment.
pub(crate) struct Experiment {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// One line for a person.
    pub(crate) about: &'static str,
    /// Whether it runs when the command line names none.
    pub(crate) by_default: bool,
    /// Runs it, on CPU 0 with interrupts off.
    pub(crate) run: fn(&Context) -> Outcome,
}

impl Context<'_> {
    /// Random numbers for CPU `cpu`.
    pub(crate) fn random(&self, cpu: usize) -> guest_model::random::Random {
        guest_model::random::Random::new(self.settings.seed.unwrap_or(1), cpu as u64)
    }

    /// Compares what was seen with what the architecture has. Answers 1 for a failure, 0 otherwise.
    pub(crate) fn expect(
        &self,
        experiment: &str,
        of: fmt::Arguments<'_>,
        expected: impl fmt::Display,
        seen: fmt::Arguments<'_>,
        matches: bool,
    ) -> u64 {
        if matches {
            return 0;
        }
        record!("violation", experiment = experiment, of = of, expected = expected, seen = seen, judged = self.judged);
        u64::from(self.judged)
    }
}

const fn by_default(name: &'static str, about: &'static str, run: fn(&Context) -> Outcome) -> Experiment {
    Experiment { name, about, by_default: true, run }
}

const fn on_request(name: &'static str, about: &'static str, run: fn(&Context) -> Outcome) -> Experiment {
    Experiment { name, about, by_default: false, run }
}

/// All experiments, in the order in which they run by default.
pub(crate) const EXPERIMENTS: [Experiment; 55] = [
    by_default("empty", "one pass of an empty loop: what all others are compared with", round_trip::empty),
    by_default("cpuid", "CPUID leaf 0", round_trip::cpuid_0),
    by_default("cpuid-1", "CPUID leaf 1", round_trip::cpuid_1),
    by_default("rdmsr", "RDMSR of APIC_BASE", round_trip::rdmsr),
    by_default("wrmsr", "WRMSR of a register that is handled: TSC_DEADLINE, or the x2APIC's TPR", round_trip::wrmsr),
    by_default("x2apic-read", "read of the x2APIC version register", round_trip::x2apic_read),
    by_default("x2apic-eoi", "x2APIC end of interrupt with none in service", round_trip::x2apic_eoi),
    by_default("port-in", "byte from COM1's line status", round_trip::port_in),
    by_default("port-out", "byte to COM1's scratch register", round_trip::port_out),
    by_default("self-ipi", "send to oneself by the self-IPI register, deliver, end of interrupt", round_trip::self_ipi),
    by_default("self-ipi-icr", "the same by the interrupt command register", round_trip::self_ipi_icr),
    by_default("xapic-read", "read of the xAPIC version register (boot with apic=xapic)", round_trip::xapic_read),
    by_default("xapic-tpr-read", "read of the xAPIC task priority (apic=xapic)", round_trip::xapic_tpr_read),
    by_default("xapic-eoi", "xAPIC end of interrupt with none in service (apic=xapic)", round_trip::xapic_eoi),
    by_default("hlt-wake", "arm the timer, halt, wake: the time beyond the delay", round_trip::hlt_wake),
    by_default("vmmcall", "a hypercall that means nothing", round_trip::vmmcall),
    by_default("page-fault", "a page fault of the guest's own, which should cost no exit", round_trip::page_fault),
    by_default("reserved-msr", "RDMSR and WRMSR of numbers that do not exist must raise #GP", misbehave::reserved_msr),
    by_default(
        "svm-instructions",
        "VMRUN and its kin must raise #UD while EFER.SVME is clear",
        misbehave::svm_instructions,
    ),
    by_default("xsetbv-bad", "values that XCR0 cannot take must raise #GP", misbehave::xsetbv_bad),
    by_default(
        "nested-event",
        "page fault while an interrupt is delivered: its stack is missing",
        misbehave::nested_event,
    ),
    by_default(
        "mixed",
        "all CPUs at once: IPIs, timers, halts, page faults, exits, registers, all checked",
        mixed::run,
    ),
    on_request("cr-fuzz", "values that control registers cannot take must raise #GP", fuzz::control_registers),
    on_request("msr-fuzz", "reads all MSRs of four ranges, then writes random values to those that answer", fuzz::msrs),
    on_request("port-fuzz", "reads all ports, writes random values to all that do not end the VM", fuzz::ports),
    on_request("mmio-fuzz", "APIC and I/O APIC pages: all offsets, odd widths, many instruction forms", fuzz::mmio),
    on_request("hypercall-fuzz", "hypercalls with random numbers and arguments", fuzz::hypercalls),
    on_request("write-nowhere", "loads and stores where there is no memory", misbehave::write_nowhere),
    on_request(
        "lapic-timer-storm",
        "the timer as fast as it goes, for a second; work must go on",
        misbehave::timer_storm,
    ),
    on_request("init-self-other", "INIT to CPU 1 while it works, then SIPI: it must come back", misbehave::init_other),
    on_request("halt-cli", "CPU 1 halts for ever with interrupts off; the others go on", misbehave::halt_cli),
    on_request("spin-cli", "all CPUs spin with interrupts off, for seconds=N (2; 0 is for ever)", misbehave::spin_cli),
    on_request("shootdown", "how long a remote TLB flush takes, by each approach in turn", shootdown::run),
    on_request("flush-storm", "all CPUs flush all CPUs as fast as they can, for seconds=N (5)", shootdown::storm),
    on_request("stale", "all CPUs move and flush pages: none is ever read through an old translation", stale::run),
    on_request("stale-selftest", "the same without a flush: can a stale translation be seen here?", stale::selftest),
    on_request("hypercall-flush", "what a flush hypercall costs, of this CPU and of halted others", flush_cost::run),
    on_request("hv-discovery", "Hyper-V interface, cases A: CPUID leaves and MSRs", hyperv::discovery::run),
    on_request("hv-abi", "Hyper-V interface, cases B: control words, input, registers", hyperv::abi::run),
    on_request("hv-flush", "Hyper-V interface, cases C: flushes do what they say", hyperv::flush::run),
    on_request("hv-ipi", "Hyper-V interface, cases D: interrupts by hypercall", hyperv::ipi::run),
    on_request("decode-loop", "accesses to a device from rips=N addresses of code", decode::measure::steady),
    on_request("decode-smc", "the same while the code's page is written", decode::measure::rewriting),
    on_request("decode-churn", "the same while other CPUs change page tables", decode::measure::churn),
    on_request(
        "decode-coherence",
        "the instruction at an address changes its meaning, in many ways",
        decode::coherence::run,
    ),
    on_request(
        "decode-variant",
        "for seconds=N (5): at a fixed address an instruction that differs by variant",
        decode::variant::run,
    ),
    on_request("emulate-forms", "each instruction form on a device and on memory: the same result", decode::forms::run),
    on_request(
        "emulator-torture",
        "code and operands made to confuse an emulator, for seconds=N (10)",
        decode::torture::run,
    ),
    on_request("unexpected-exception", "an invalid opcode: a record, and the end", misbehave::unexpected_exception),
    on_request("panic", "the guest's own panic: a record, and the end", misbehave::panic),
    on_request("power-off", "powers off at once", misbehave::power_off),
    on_request("reset", "asks for a reset by port 0xcf9", misbehave::reset),
    on_request("triple-fault", "an exception that cannot be delivered", misbehave::triple_fault),
    on_request("ap-triple-fault", "the same on CPU 1, while CPU 0 waits", misbehave::ap_triple_fault),
    on_request("init-self", "CPU 0 sends INIT to itself and is gone", misbehave::init_self),
];
