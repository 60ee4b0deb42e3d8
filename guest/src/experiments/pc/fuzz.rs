//! Random and exhaustive accesses to every interface that can cause an exit. The guest must get an answer, and
//! continue.
//!
//! The experiment omits what harms the guest itself: the ports that end the VM, MSRs that this kernel relies on,
//! interrupt commands. On QEMU's own machine it omits more, because that machine's devices are real.

use crate::arch::attempt::{self, Fault};
use crate::arch::forms::{Form, PLAIN_STORE, READS, WRITES};
use crate::arch::{apic, boot, cpu_local, interrupts, port, window};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::record::record;

const DONE: Outcome = Outcome::Done { failures: 0 };

pub(super) fn ports(context: &Context) -> Outcome {
    let mut random = context.random(0);
    let (mut ones, mut zeros) = (0u32, 0u32);
    for number in 0..=u16::MAX {
        match port::read(number, 1) {
            0xff => ones += 1,
            0 => zeros += 1,
            _ => {}
        }
    }
    record!("record", experiment = "port-fuzz", about = "reads", width = 1, all_ones = ones, zero = zeros);
    for width in [2, 4] {
        for _ in 0..4096 {
            // The last port of all is in: a wide access there reaches over the end.
            let number = if random.below(64) == 0 { 0xffff } else { (random.bits() & 0xffff) as u16 };
            port::read(number, width);
        }
    }

    let mut writes = 0u32;
    for number in 0..=u16::MAX {
        let width = [1, 2, 4][random.index(3)];
        if (0..u16::from(width)).any(|offset| ends_the_vm(number.wrapping_add(offset), context.judged)) {
            continue;
        }
        port::write(number, width, random.bits_u32());
        writes += 1;
    }
    // Masks a PIC that random writes have set up.
    port::write(0x21, 1, 0xff);
    port::write(0xa1, 1, 0xff);
    record!("record", experiment = "port-fuzz", about = "writes", written = writes);
    DONE
}

/// Ports that a random value ends the VM by, or silences this guest.
fn ends_the_vm(port: u16, judged: bool) -> bool {
    match port {
        // COM1; ACPI sleep control and QEMU's power management; both ways to reset; exit device.
        0x3f8..=0x3ff | 0x600..=0x6ff | 0x64 | 0xcf9 | 0xf4..=0xf7 => true,
        // Port 92h can reset, b2h raises an SMI, and PCI configuration moves devices.
        0x60 | 0x92 | 0xb2 | 0xb3 | 0xcf8..=0xcff | 0x510..=0x51b => !judged,
        // PCI devices of QEMU's machine may have been placed up here.
        0xc000.. => !judged,
        _ => false,
    }
}

pub(super) fn msrs(context: &Context) -> Outcome {
    let mut random = context.random(0);
    let rounds = context.settings.iterations.unwrap_or(4);
    let ranges = [(0u32, 0x1fff), (0x4000_0000, 0x4000_01ff), (0xc000_0000, 0xc000_1fff), (0xc001_0000, 0xc001_1fff)];
    for (first, last) in ranges {
        let (mut readable, mut accepted, mut refused) = (0u32, 0u32, 0u32);
        for msr in first..=last {
            let Ok(value) = attempt::rdmsr(msr) else { continue };
            readable += 1;
            if moves_the_ground(msr, context.judged) {
                continue;
            }
            for _ in 0..rounds {
                let mask = msr_mask(msr);
                let written = match random.below(3) {
                    0 => random.bits(),
                    1 => value ^ 1 << random.below(64),
                    _ => u64::MAX,
                };
                match attempt::wrmsr(msr, written | mask) {
                    Ok(()) => accepted += 1,
                    Err(_) => refused += 1,
                }
            }
            // Its former value; a register that takes only values that were written to it may refuse this one too.
            let _ = attempt::wrmsr(msr, value | msr_mask(msr));
        }
        record!(
            "record",
            experiment = "msr-fuzz",
            first = format_args!("{first:#x}"),
            last = format_args!("{last:#x}"),
            readable = readable,
            writes_accepted = accepted,
            writes_refused = refused,
        );
    }
    settle();
    DONE
}

/// Bits that must stay set, so that no unexpected local interrupt fires: the mask bit of the LVT registers.
fn msr_mask(msr: u32) -> u64 {
    match msr {
        0x82f | 0x832..=0x837 => 1 << 16,
        _ => 0,
    }
}

/// MSRs that this kernel relies on, or that let other code write memory.
fn moves_the_ground(msr: u32, judged: bool) -> bool {
    match msr {
        // TSC, APIC_BASE, TSC_ADJUST, KVM's old clock (writes to memory), DEBUGCTL, MTRRs and PAT.
        0x10 | 0x1b | 0x3b | 0x11 | 0x12 | 0x1d9 | 0x200..=0x2ff => true,
        // Interrupt command, self-IPI, and the interrupt command of Hyper-V's interface.
        0x830 | 0x83f | 0x4000_0071 => true,
        // Hyper-V's introduction and the pages that it writes to: hypercalls, reference TSC, VP assist.
        0x4000_0000 | 0x4000_0001 | 0x4000_0021 | 0x4000_0073 => true,
        // EFER; FS, GS and KERNEL_GS base; TSC_AUX is read as the CPU's index by `mixed`, and is put back.
        0xc000_0080 | 0xc000_0100..=0xc000_0102 => true,
        // Without a hypervisor, SYSCFG, TOP_MEM, SMM base, the host save area and others control the real machine.
        0xc001_0000..=0xc001_1fff => !judged,
        _ => false,
    }
}

/// Resets the local APIC and takes all pending interrupts.
fn settle() {
    apic::restore_id(cpu::hardware_id(cpu_local::index()));
    apic::enable_this_cpu();
    apic::disarm();
    for _ in 0..256 {
        apic::end_of_interrupt(0);
    }
    interrupts::drain();
}

pub(super) fn mmio(context: &Context) -> Outcome {
    let mut random = context.random(0);
    let cpu = cpu_local::index();

    let io_apic = boot::io_apic();
    if io_apic.is_none() {
        record!("record", experiment = "mmio-fuzz", page = "io-apic", about = "absent");
    }
    for (page, at) in [("local-apic", Some(apic::XAPIC_PAGE)), ("io-apic", io_apic)] {
        let Some(at) = at else { continue };
        let mapped = window::map_physical(cpu, at);
        let (mut reads, mut writes, mut faults) = (0u32, 0u32, 0u32);
        let mut first: Option<(&str, u64, Fault)> = None;
        // The last bytes of the page are left to accesses that end inside of it.
        for offset in 0..0xff8 {
            for _ in 0..2 {
                let (name, touch) = READS[random.index(READS.len())];
                reads += 1;
                if let Err(fault) = touch(mapped + offset, random.bits()) {
                    faults += 1;
                    first.get_or_insert((name, offset, fault));
                }
            }
            let writes_here = harmless_writes(page == "io-apic", offset);
            if !writes_here.is_empty() {
                let (name, touch) = writes_here[random.index(writes_here.len())];
                writes += 1;
                if let Err(fault) = touch(mapped + offset, random.bits() | 0x0001_0000_0001_0000) {
                    faults += 1;
                    first.get_or_insert((name, offset, fault));
                }
            }
        }
        record!("record", experiment = "mmio-fuzz", page = page, reads = reads, writes = writes, faults = faults,);
        if let Some((name, offset, fault)) = first {
            record!(
                "record",
                experiment = "mmio-fuzz",
                page = page,
                first_fault = fault,
                error = format_args!("{:#x}", fault.error),
                offset = format_args!("{offset:#x}"),
                form = crate::record::Text(name),
            );
        }
    }

    // Every kernel uses the plain 32-bit access at a register's own offset: it must not fault.
    let mut failures = 0;
    if !apic::is_x2apic() {
        let mapped = window::map_physical(cpu, apic::XAPIC_PAGE);
        let seen = attempt::load_u32(mapped + apic::VERSION);
        failures +=
            context.expect("mmio-fuzz", format_args!("version-register"), "read", format_args!("fault"), seen.is_ok());
    }
    settle();
    Outcome::Done { failures }
}

/// The forms that may write at an offset without sending an interrupt. Where a register has a vector, only the plain
/// store is possible, with a value that has the mask bit set.
fn harmless_writes(io_apic: bool, offset: u64) -> &'static [Form] {
    let aligned_store: &[Form] = if offset.is_multiple_of(4) { &WRITES[PLAIN_STORE..=PLAIN_STORE] } else { &[] };
    match offset {
        0..0x20 if io_apic => aligned_store,
        _ if io_apic => &WRITES,
        // Interrupt command, and accesses that overlap it.
        0x2f8..0x314 => &[],
        // Local vector table.
        0x2e8..0x2f8 | 0x314..0x380 => aligned_store,
        _ => &WRITES,
    }
}

pub(super) fn hypercalls(context: &Context) -> Outcome {
    let mut random = context.random(0);
    let rounds = context.settings.iterations.unwrap_or(10_000);
    let mut faults = 0u64;
    for round in 0..rounds {
        // Small numbers are where hypercalls are; the first round is all zeros.
        let mut number = |shift: u64| if round == 0 { 0 } else { random.bits() >> random.below(shift) };
        let (rax, rcx, rdx) = (number(64), number(64), number(64));
        let others = core::array::from_fn(|_| number(64));
        if attempt::hypercall(rax, rcx, rdx, others).is_err() {
            faults += 1;
        }
    }
    record!("record", experiment = "hypercall-fuzz", calls = rounds, faults = faults);
    DONE
}
