//! The measured loops.
//!
//! Each comes twice: with the instruction, and without it but otherwise the same. The difference per iteration is the
//! cost of the instruction with its exit, handling and entry.

use core::arch::asm;

use super::hypercall::hypercall;
use super::interrupts::{SELF_X2APIC, SELF_XAPIC};
use super::{apic, attempt, cpu_local, interrupts, serial, tsc};

/// A loop with the instruction, and the same loop without it. Both take a number of iterations and return ticks.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) full: fn(u64) -> u64,
    pub(crate) empty: fn(u64) -> u64,
}

/// One loop. Per iteration: `$setup`, `$body`, and the counting of R8. EAX, ECX, EDX and RSI are loaded before.
macro_rules! run {
    ($setup:literal, $body:expr, $n:expr, $eax:expr, $ecx:expr, $edx:expr, $rsi:expr) => {{
        let start = tsc::now();
        // SAFETY: the body is one of those named in this file: it reads, or writes a device register to no effect on
        // memory; RBX, which CPUID changes, is kept in R9.
        unsafe {
            asm!(
                "mov r9, rbx",
                ".p2align 5",
                "2:",
                $setup,
                $body,
                "dec r8",
                "jnz 2b",
                "mov rbx, r9",
                inout("r8") $n => _, out("r9") _,
                inout("eax") $eax => _, inout("ecx") $ecx => _, inout("edx") $edx => _, in("rsi") $rsi,
            );
        }
        tsc::now() - start
    }};
}

macro_rules! pair {
    ($setup:literal, $body:expr, eax = $eax:expr, ecx = $ecx:expr, edx = $edx:expr, rsi = $rsi:expr) => {
        Pair {
            full: |n| run!($setup, $body, n, $eax as u32, $ecx as u32, u32::from($edx), $rsi as u64),
            empty: |n| run!($setup, "", n, $eax as u32, $ecx as u32, u32::from($edx), $rsi as u64),
        }
    };
}

/// No instruction: the cost of the loop itself.
pub(crate) const EMPTY: Pair =
    Pair { full: |n| run!("", "", n, 0u32, 0u32, 0u32, 0u64), empty: |n| run!("", "", n, 0u32, 0u32, 0u32, 0u64) };
/// CPUID leaf 0.
pub(crate) const CPUID_0: Pair = pair!("xor eax, eax\n xor ecx, ecx", "cpuid", eax = 0, ecx = 0, edx = 0u16, rsi = 0);
/// CPUID leaf 1.
pub(crate) const CPUID_1: Pair = pair!("mov eax, 1\n xor ecx, ecx", "cpuid", eax = 0, ecx = 0, edx = 0u16, rsi = 0);
/// RDMSR of APIC_BASE.
pub(crate) const RDMSR: Pair = pair!("", "rdmsr", eax = 0, ecx = apic::APIC_BASE, edx = 0u16, rsi = 0);
/// WRMSR of TSC_DEADLINE with 0: disarms a timer that is not armed.
pub(crate) const WRMSR: Pair = pair!("", "wrmsr", eax = 0, ecx = apic::TSC_DEADLINE, edx = 0u16, rsi = 0);
/// A write of CR4 that toggles PGE, as a kernel without INVPCID flushes global pages.
pub(crate) const CR4_WRITE: Pair =
    pair!("xor eax, 0x80", "mov cr4, rax", eax = attempt::halves(attempt::read_cr4()).0, ecx = 0, edx = 0u16, rsi = 0);
/// x2APIC: the version register.
pub(crate) const X2APIC_READ: Pair = pair!("", "rdmsr", eax = 0, ecx = 0x803, edx = 0u16, rsi = 0);
/// x2APIC: the task priority, written with 0.
pub(crate) const X2APIC_TPR: Pair = pair!("", "wrmsr", eax = 0, ecx = 0x808, edx = 0u16, rsi = 0);
/// x2APIC: end of interrupt while none is in service.
pub(crate) const X2APIC_EOI: Pair = pair!("", "wrmsr", eax = 0, ecx = 0x80b, edx = 0u16, rsi = 0);
/// A byte from the UART's line status.
pub(crate) const PORT_IN: Pair = pair!("", "in al, dx", eax = 0, ecx = 0, edx = serial::LINE_STATUS, rsi = 0);
/// A byte to the UART's scratch register.
pub(crate) const PORT_OUT: Pair = pair!("", "out dx, al", eax = 0x5a, ecx = 0, edx = serial::SCRATCH, rsi = 0);
/// IN from a port that no device has. A hypervisor with a VMM hands it to the VMM.
pub(crate) const PORT_VACANT: Pair = pair!("", "in al, dx", eax = 0, ecx = 0, edx = VACANT_PORT, rsi = 0);
/// A port that neither PC nor QEMU has a device at.
const VACANT_PORT: u16 = 0x1234;
/// xAPIC: the version register.
pub(crate) const XAPIC_READ: Pair =
    pair!("", "mov eax, [rsi]", eax = 0, ecx = 0, edx = 0u16, rsi = apic::XAPIC_PAGE + apic::VERSION);
/// xAPIC: the task priority register, at 0x80 (APM vol. 2, table 16-2).
pub(crate) const XAPIC_TPR_READ: Pair =
    pair!("", "mov eax, [rsi]", eax = 0, ecx = 0, edx = 0u16, rsi = apic::XAPIC_PAGE + 0x80);
/// xAPIC: end of interrupt while none is in service.
pub(crate) const XAPIC_EOI: Pair =
    pair!("", "mov [rsi], eax", eax = 0, ecx = 0, edx = 0u16, rsi = apic::XAPIC_PAGE + apic::EOI);

/// The result of an empty hypercall; `Err` if there are no hypercalls.
pub(crate) fn has_hypercalls() -> bool {
    attempt::hypercall(u64::MAX, 0, 0, [0; 5]).is_ok()
}

/// A hypercall with a number that means nothing. Only where [`has_hypercalls`].
pub(crate) const HYPERCALL: Pair = pair!("mov eax, -1", hypercall!(), eax = 0, ecx = 0, edx = 0u16, rsi = 0);

/// A page fault that is handled inside of the guest: a load from a page that is missing, and its handler.
pub(crate) const PAGE_FAULT: Pair = Pair {
    full: |n| {
        let missing = crate::arch::window::demand_page(cpu_local::index(), 0);
        time(n, || attempt::load_u8(missing).is_err())
    },
    empty: |n| {
        let present = &raw const PRESENT_BYTE as u64;
        time(n, || attempt::load_u8(present).is_ok())
    },
};

static PRESENT_BYTE: u8 = 0;

fn time(n: u64, mut step: impl FnMut() -> bool) -> u64 {
    let start = tsc::now();
    for _ in 0..n {
        core::hint::black_box(step());
    }
    tsc::now() - start
}

/// How a self-IPI is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SelfIpi {
    /// The x2APIC's self-IPI register.
    Register,
    /// The interrupt command register, with the self shorthand, in the shape that is in use.
    Command,
}

/// Passes that wait for one self-IPI before it counts as lost.
const PATIENCE: u32 = 1 << 28;

/// Ticks of `n` interrupts that this CPU sends to itself and takes, or `None` if one did not arrive.
///
/// Per iteration the CPU sends the interrupt and waits for the handler's count. The handler increments the count and
/// ends the interrupt.
pub(crate) fn self_ipi(kind: SelfIpi, n: u64) -> Option<u64> {
    interrupts::enable();
    let start = tsc::now();
    let lost: u32;
    if apic::is_x2apic() {
        let (msr, low) = match kind {
            SelfIpi::Register => (0x83fu32, u32::from(SELF_X2APIC)),
            SelfIpi::Command => (0x830u32, 0x4_4000 | u32::from(SELF_X2APIC)),
        };
        // SAFETY: sends an interrupt whose handler preserves all registers.
        unsafe {
            asm!(
                "mov r10, gs:[{count}]",
                "2:",
                "inc r10",
                "mov edi, {patience}",
                "wrmsr",
                "3:",
                "cmp gs:[{count}], r10",
                "jae 4f",
                "dec edi",
                "jnz 3b",
                "jmp 5f",
                "4:",
                "dec r8",
                "jnz 2b",
                "5:",
                count = const cpu_local::SELF_IPIS, patience = const PATIENCE,
                inout("r8") n => _, out("r10") _, out("edi") lost,
                in("ecx") msr, in("eax") low, in("edx") 0u32,
            );
        }
    } else {
        // SAFETY: as above; the store goes to the local APIC's command register.
        unsafe {
            asm!(
                "mov r10, gs:[{count}]",
                "2:",
                "inc r10",
                "mov edi, {patience}",
                "mov dword ptr [rsi], eax",
                "3:",
                "cmp gs:[{count}], r10",
                "jae 4f",
                "dec edi",
                "jnz 3b",
                "jmp 5f",
                "4:",
                "dec r8",
                "jnz 2b",
                "5:",
                count = const cpu_local::SELF_IPIS, patience = const PATIENCE,
                inout("r8") n => _, out("r10") _, out("edi") lost,
                in("rsi") apic::XAPIC_PAGE + apic::COMMAND, in("eax") 0x4_4000 | u32::from(SELF_XAPIC),
            );
        }
    }
    let ticks = tsc::now() - start;
    interrupts::disable();
    (lost != 0).then_some(ticks)
}
