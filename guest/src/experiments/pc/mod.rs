//! Experiments that only x86-64 can run.

mod apic_modes;
mod control;
mod decode;
mod events;
mod flush_cost;
mod functions;
mod fuzz;
mod hidden_state;
mod hyperv;
mod line;
mod misbehave;
mod msr_values;
mod patched;
mod pci;
mod pins;
mod round_trip;
mod spec_ctrl;

use super::{Experiment, by_default, on_request};

/// All of them, in the order in which they run by default.
pub(super) const EXPERIMENTS: [Experiment; 62] = [
    by_default("cpuid", "CPUID leaf 0", round_trip::cpuid_0),
    by_default("cpuid-1", "CPUID leaf 1", round_trip::cpuid_1),
    by_default("rdmsr", "RDMSR of APIC_BASE", round_trip::rdmsr),
    by_default("wrmsr", "WRMSR of a register that is handled: TSC_DEADLINE, or the x2APIC's TPR", round_trip::wrmsr),
    by_default("cr4-write", "write of CR4 that changes PGE, to flush global pages", round_trip::cr4_write),
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
    on_request("port-vacant", "byte from a port without a device, which a VMM answers", round_trip::port_vacant),
    on_request("control-registers", "each bit of CR0, CR4 and EFER, by each instruction that writes it", control::run),
    on_request(
        "hidden-state",
        "extended state that CPUID hides, for seconds=N (3): run VMs with different seed=N",
        hidden_state::run,
    ),
    on_request("msr-fuzz", "reads all MSRs of four ranges, then writes random values to those that answer", fuzz::msrs),
    on_request("msr-values", "each MSR that CPUID shows, with legal and illegal values", msr_values::run),
    on_request("spec-ctrl", "SPEC_CTRL of each CPU is its own, for seconds=N (3), seed=N", spec_ctrl::run),
    on_request("apic-modes", "the local APIC off, as xAPIC, as x2APIC, elsewhere; CPUID follows", apic_modes::run),
    on_request("port-fuzz", "reads all ports, writes random values to all that do not end the VM", fuzz::ports),
    on_request("mmio-fuzz", "APIC and I/O APIC pages: all offsets, odd widths, many instruction forms", fuzz::mmio),
    on_request("pci-doors", "PCI's configuration spaces by ports and by memory: the same bytes", pci::doors),
    on_request("pci-fuzz", "the same after random accesses of all forms", pci::fuzz),
    on_request("edu", "a PCI function of the VM: QEMU's device edu copies where it may and where not", functions::edu),
    on_request(
        "edu-interrupts",
        "interrupts that a PCI function raises by its writes to memory",
        functions::interrupts,
    ),
    on_request("msi-x-tables", "tables of messages of the VM's PCI functions", functions::tables),
    on_request("hypercall-fuzz", "hypercalls with random numbers and arguments", fuzz::hypercalls),
    on_request(
        "long-handler",
        "a handler of 30 ms with interrupts off: its interrupt must not come again meanwhile",
        misbehave::long_handler,
    ),
    on_request("pin-to-all", "a device's interrupt to all CPUs at once, by the I/O APIC", pins::to_all),
    on_request("init-self-other", "INIT to CPU 1 while it works, then SIPI: it must come back", misbehave::init_other),
    on_request("hypercall-flush", "what a flush hypercall costs, of this CPU and of halted others", flush_cost::run),
    on_request("hv-discovery", "Hyper-V interface, cases A: CPUID leaves and MSRs", hyperv::discovery::run),
    on_request("hv-abi", "Hyper-V interface, cases B: control words, input, registers", hyperv::abi::run),
    on_request("hv-flush", "Hyper-V interface, cases C: flushes do what they say", hyperv::flush::run),
    on_request("hv-ipi", "Hyper-V interface, cases D: interrupts by hypercall", hyperv::ipi::run),
    on_request("hv-assist", "Hyper-V interface, cases J: ends of interrupts without an EOI", hyperv::assist::run),
    on_request("hv-timers", "Hyper-V interface, cases E: synthetic timers and their messages", hyperv::timers::run),
    on_request("hv-parent", "Hyper-V interface, cases F: what a parent may call, and nobody else", hyperv::parent::run),
    on_request("hv-child", "Hyper-V interface, cases G and H: state and signals of a child's vCPU", hyperv::child::run),
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
    on_request(
        "decode-spread",
        "code on pages all over the memory that are written to as well, until q is typed or for seconds=N",
        decode::spread::run,
    ),
    on_request("emulate-forms", "each instruction form on a device and on memory: the same result", decode::forms::run),
    on_request(
        "emulator-torture",
        "code and operands made to confuse an emulator, for seconds=N (10)",
        decode::torture::run,
    ),
    on_request("events", "interrupts, NMIs, debug traps, shadows and IRETs in all combinations", events::run),
    on_request("step-exits", "single steps over instructions that a hypervisor intercepts", events::step_exits),
    on_request("patched-code", "one CPU patches code that the others execute, for seconds=N (5)", patched::run),
    on_request("cr3-beyond-width", "a bit of CR3 that no physical address has", misbehave::cr3_beyond_width),
    on_request("triple-fault", "an exception that cannot be delivered", misbehave::triple_fault),
    on_request("ap-triple-fault", "the same on CPU 1, while CPU 0 waits", misbehave::ap_triple_fault),
    on_request("init-self", "CPU 0 sends INIT to itself and is gone", misbehave::init_self),
];
