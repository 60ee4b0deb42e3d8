//! Exceptions and host interrupts.
//!
//! An exception in the hypervisor is a bug: it is reported like a panic and ends the machine. Double faults, NMIs and
//! machine checks have stacks of their own, so even a stack overflow is reported.
//!
//! A device may raise an interrupt with any vector from 16 on, where no IOMMU stops it: by a message that its owner has
//! chosen. With the vector of an exception, with that of a spurious interrupt, or with one that nobody uses, it is
//! counted and ended like one of the host's devices. The local APIC's in-service register tells it from an exception.
//!
//! Host interrupts mean nothing by themselves: each ends a guest's run or a pCPU's sleep, and what there is to do is
//! found in memory. So their handlers only count, and tell the local APIC that they are done. (Those of devices of a VM
//! are recorded: [`device_vectors`].) The hypervisor runs with
//! interrupts off and takes them in two places: [`wait`], and
//! [`irq_mask::take`](crate::arch::x86_64::backend::irq_mask::take) while it runs a vCPU.

#![expect(unsafe_code, reason = "interrupt entry, and the instructions that let interrupts in")]

use core::arch::{asm, naked_asm};
use core::mem::offset_of;

use addr::{Hva, PAGE_BYTES};
use spin::Once;
use vcpu_layout::Proof;
use x86_64::VirtAddr;
use x86_64::registers::control::Cr2;
use x86_64::structures::idt::{Entry, HandlerFunc, InterruptDescriptorTable};

use super::percpu::{ArchPerCpu, IST_DOUBLE_FAULT, IST_MACHINE_CHECK, IST_NMI};
use super::{apic, device_vectors, machine_check, paging, power, quirks};
use crate::cpu::{PerCpu, Taken};
use crate::panic;

/// Vector of a kick: another pCPU has something for this one.
pub(crate) const KICK: u8 = 0xf0;
/// Vector of the local timer.
pub(crate) const TIMER: u8 = 0xf1;
/// Vector of the host's devices.
pub(crate) const DEVICE: u8 = 0xf2;
/// Vector of spurious interrupts.
pub(crate) const SPURIOUS: u8 = 0xff;

/// Sleeps until an interrupt was taken, and returns with interrupts off.
///
/// The caller has checked, with interrupts off, that there is nothing to do. An interrupt after that check ends the
/// sleep, because the CPU takes interrupts only after `hlt` has begun (the shadow of `sti`).
#[inline(always)]
pub(crate) fn wait() {
    // SAFETY: handlers keep all registers and touch counters only.
    unsafe { asm!("sti", "hlt", "cli") };
    device_vectors::forward();
}

/// Takes pending interrupts, where IF alone masks them. In VMX it does: an interrupt that is pending at an entry ends
/// it before the guest's first instruction, whatever the guest's IF.
#[inline]
pub(crate) fn take() {
    // SAFETY: the host's GS, TR and IDT are in place, so handlers can run here. They may change memory.
    unsafe { asm!("sti", "nop", "nop", "cli") }
}

/// Whether RFLAGS.IF is set.
pub(crate) fn are_on() -> bool {
    let flags: u64;
    // SAFETY: reads a register by way of the stack.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags, options(preserves_flags)) };
    flags & 1 << 9 != 0
}

/// Turns interrupts off. They are, unless something is very wrong.
pub(crate) fn mask() {
    // SAFETY: nothing relies on interrupts being on.
    unsafe { asm!("cli", options(nomem, nostack)) };
}

/// The stack pointer of the caller, about.
#[inline(always)]
pub(crate) fn stack_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// Reads through a null pointer, to see that it is caught and reported (`selftest=null`).
pub(crate) fn read_null() -> u64 {
    let value: u64;
    // SAFETY: not a Rust access: the instruction faults, and the handler does not return.
    unsafe { asm!("mov {}, [0]", out(reg) value, options(nostack, preserves_flags)) };
    value
}

/// Whether the bytes before `address` are a call: E8 with a 32-bit distance, or FF /2.
pub(crate) fn follows_call(address: u64) -> bool {
    const LONGEST: u64 = 7;
    if !paging::is_text(address) || !paging::is_text(address - LONGEST) {
        return false;
    }
    let before = |distance: u64| {
        // SAFETY: text of the image, as just checked.
        unsafe { ((address - distance) as *const u8).read() }
    };
    before(5) == 0xe8 || [2, 3, 6, 7].iter().any(|&length| before(length) == 0xff && before(length - 1) & 0x38 == 0x10)
}

static IDT: Once<InterruptDescriptorTable> = Once::new();

/// Loads the interrupt descriptor table on this pCPU. May be called before the pCPU has its block; until it has, the
/// exceptions with stacks of their own end in a triple fault.
pub(super) fn load() {
    IDT.call_once(table).load();
}

fn table() -> InterruptDescriptorTable {
    macro_rules! exceptions {
        ($idt:ident: $($name:ident = $vector:literal,)*) => {
            $(
                let handler = VirtAddr::from_ptr(exception::<$vector> as *const ());
                // SAFETY: the handler is made for this vector's frame, and does not return.
                unsafe { $idt.$name.set_handler_addr(handler) };
            )*
        };
    }
    let mut idt = InterruptDescriptorTable::new();
    exceptions! { idt:
        divide_error = 0, breakpoint = 3, overflow = 4, bound_range_exceeded = 5, invalid_opcode = 6,
        device_not_available = 7, invalid_tss = 10, segment_not_present = 11, stack_segment_fault = 12,
        general_protection_fault = 13, page_fault = 14,
    }

    let handler = VirtAddr::from_ptr(debug as *const ());
    // SAFETY: the handler is made for this vector's frame. It keeps all registers if it returns.
    unsafe { idt.debug.set_handler_addr(handler) };

    macro_rules! own_stack {
        ($($name:ident, $handler:expr, $stack:ident;)*) => {
            $(
                let handler = VirtAddr::from_ptr($handler as *const ());
                // SAFETY: the handler is made for this vector's frame.
                let options = unsafe { idt.$name.set_handler_addr(handler) };
                // SAFETY: the stack is in every pCPU's TSS, and no other vector uses it.
                unsafe { options.set_stack_index($stack) };
            )*
        };
    }
    own_stack! {
        double_fault, exception::<8>, IST_DOUBLE_FAULT;
        machine_check, told_apart(18), IST_MACHINE_CHECK;
        non_maskable_interrupt, nmi, IST_NMI;
    }

    // Vectors that the local APIC takes, and that exceptions have, too. The type of the table gives no access to those
    // that the manual reserves, nor to exceptions by their number.
    for vector in FIRST_TAKEN..FIRST_FREE {
        if vector == 18 {
            continue;
        }
        let mut entry = Entry::<HandlerFunc>::missing();
        // SAFETY: the handler is made for this vector's frame. It returns from an interrupt with all registers kept,
        // and not from an exception.
        unsafe { entry.set_handler_addr(VirtAddr::from_ptr(told_apart(vector) as *const ())) };
        let entries = (&raw mut idt).cast::<Entry<HandlerFunc>>();
        // SAFETY: the table has 256 entries of one format, in the order of the vectors.
        let place = unsafe { entries.add(usize::from(vector)) };
        // SAFETY: within the table, which nothing else refers to.
        unsafe { place.write(entry) };
    }

    let [kick, timer, ticking_timer, device] = match (apic::has_x2apic(), quirks::loses_writes_to_registers()) {
        (true, _) => msr::HANDLERS,
        (false, false) => mmio::HANDLERS,
        (false, true) => mmio::HANDLERS_THAT_LOOK,
    };
    let timer = if apic::has_deadline_timer() { timer } else { ticking_timer };
    let interrupts = [(KICK, kick), (TIMER, timer), (SPURIOUS, told_apart(SPURIOUS))];
    let others = (DEVICE..SPURIOUS).map(|vector| (vector, device));
    for (vector, handler) in interrupts.into_iter().chain(others) {
        // SAFETY: the handler keeps all registers and returns by `iretq`.
        unsafe { idt[vector].set_handler_addr(VirtAddr::from_ptr(handler as *const ())) };
    }
    for (vector, handler) in device_vectors::handlers() {
        // SAFETY: as above.
        unsafe { idt[vector].set_handler_addr(handler) };
    }
    idt
}

/// The first vector that a local APIC takes (APM vol. 2, 16.6.2), and the first one that no exception has.
const FIRST_TAKEN: u8 = 16;
const FIRST_FREE: u8 = 32;

/// The handler of a vector that may be an interrupt of a device, or what it was made for. It reads the local APIC.
/// Before that is ready, such an exception is reported as a second one that this read causes.
fn told_apart(vector: u8) -> Handler {
    macro_rules! handlers {
        ($($vector:literal)*) => {
            match (vector, apic::has_x2apic()) {
                $(
                    ($vector, true) => msr::told_apart::<$vector>,
                    ($vector, false) => mmio::told_apart::<$vector>,
                )*
                (_, true) => msr::told_apart::<SPURIOUS>,
                (_, false) => mmio::told_apart::<SPURIOUS>,
            }
        };
    }
    handlers!(16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
}

/// Where a vector goes that is not in service.
macro_rules! original {
    () => {
        concat!(
            ".if {vector} == 18\n jmp {machine_check}\n",
            ".elseif {vector} == 255\n jmp {spurious}\n",
            ".else\n jmp {exception}\n .endif",
        )
    };
}

/// Offset of a counter of [`Taken`] from GS.
macro_rules! counter {
    ($field:ident) => {
        PerCpu::OFFSET_TAKEN + offset_of!(Taken, $field)
    };
}

/// The timer's deadline, from GS.
const ARMED: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_ARMED;
/// The timer's tick, from GS.
const TICK: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_TICK;

/// Entry of an interrupt. Must not be called: it ends with `iretq`.
type Handler = extern "C" fn();

/// Handlers for a local APIC whose registers are memory (xAPIC): five instructions and the return. Those that look see
/// whether the end of the interrupt has reached the local APIC ([`quirks::loses_writes_to_registers`]).
mod mmio {
    use super::{ARMED, Handler, PerCpu, TICK, Taken, apic, exception, machine_check, naked_asm, offset_of, spurious};

    pub(super) const HANDLERS: [Handler; 4] = handlers::<false>();
    pub(super) const HANDLERS_THAT_LOOK: [Handler; 4] = handlers::<true>();

    const fn handlers<const LOOKS: bool>() -> [Handler; 4] {
        [kick::<LOOKS>, timer::<LOOKS>, ticking_timer::<LOOKS>, device::<LOOKS>]
    }

    /// Vectors above those of devices of a VM, of the last word of the in-service register. Their handlers do not
    /// interrupt one another, so at most one is in service.
    const LAST_VECTORS: u32 = 0xffff_0000;

    /// Ends the interrupt. RAX is the address of the EOI register. The jump is for QEMU: its translated code ends
    /// there, and what comes next sees the machine's memory as it is.
    macro_rules! end {
        () => {
            concat!(
                "2:\n mov dword ptr [rax], 0\n",
                ".if {looks}\n",
                " jmp 3f\n 3:\n test dword ptr [rax + {in_service}], {last_vectors}\n jnz 2b\n",
                ".endif",
            )
        };
    }

    macro_rules! handler {
        ($name:ident) => {
            #[unsafe(naked)]
            extern "C" fn $name<const LOOKS: bool>() {
                naked_asm!(
                    "inc qword ptr gs:[{counter}]",
                    "push rax",
                    "movabs rax, {eoi}",
                    end!(),
                    "pop rax",
                    "iretq",
                    counter = const counter!($name),
                    eoi = const apic::MMIO_EOI,
                    looks = const LOOKS as u8,
                    in_service = const apic::LAST_IN_SERVICE_FROM_EOI,
                    last_vectors = const LAST_VECTORS,
                )
            }
        };
    }
    handler!(kick);
    handler!(device);

    /// See [`told_apart`](super::told_apart).
    #[unsafe(naked)]
    pub(super) extern "C" fn told_apart<const VECTOR: u8>() {
        naked_asm!(
            "push rax",
            "movabs rax, {in_service}",
            "mov eax, [rax]",
            "bt eax, {vector} & 31",
            "pop rax",
            "jc {device}",
            original!(),
            in_service = const apic::mmio_in_service(VECTOR),
            vector = const VECTOR,
            device = sym device::<true>,
            machine_check = sym machine_check::entry,
            spurious = sym spurious,
            exception = sym exception::<VECTOR>,
        )
    }

    /// A timer that is off once it has fired.
    #[unsafe(naked)]
    extern "C" fn timer<const LOOKS: bool>() {
        naked_asm!(
            "mov qword ptr gs:[{armed}], -1",
            "inc qword ptr gs:[{counter}]",
            "push rax",
            "movabs rax, {eoi}",
            end!(),
            "pop rax",
            "iretq",
            armed = const ARMED,
            counter = const counter!(timer),
            eoi = const apic::MMIO_EOI,
            looks = const LOOKS as u8,
            in_service = const apic::LAST_IN_SERVICE_FROM_EOI,
            last_vectors = const LAST_VECTORS,
        )
    }

    /// A timer that falls back to its tick.
    #[unsafe(naked)]
    extern "C" fn ticking_timer<const LOOKS: bool>() {
        naked_asm!(
            "mov qword ptr gs:[{armed}], -1",
            "inc qword ptr gs:[{counter}]",
            "push rax",
            "push rcx",
            "mov ecx, gs:[{tick}]",
            "movabs rax, {eoi}",
            "mov [rax + {initial}], ecx",
            end!(),
            "pop rcx",
            "pop rax",
            "iretq",
            armed = const ARMED,
            counter = const counter!(timer),
            tick = const TICK,
            initial = const apic::TIMER_INITIAL_FROM_EOI,
            eoi = const apic::MMIO_EOI,
            looks = const LOOKS as u8,
            in_service = const apic::LAST_IN_SERVICE_FROM_EOI,
            last_vectors = const LAST_VECTORS,
        )
    }
}

/// Handlers for a local APIC whose registers are MSRs (x2APIC).
mod msr {
    use super::{ARMED, Handler, PerCpu, TICK, Taken, apic, exception, machine_check, naked_asm, offset_of, spurious};

    pub(super) const HANDLERS: [Handler; 4] = [kick, timer, ticking_timer, device];

    macro_rules! handler {
        ($name:ident counts $counter:ident) => {
            #[unsafe(naked)]
            extern "C" fn $name() {
                naked_asm!(
                    "inc qword ptr gs:[{counter}]",
                    "push rax",
                    "push rcx",
                    "push rdx",
                    "xor eax, eax",
                    "xor edx, edx",
                    "mov ecx, {eoi}",
                    "wrmsr",
                    "pop rdx",
                    "pop rcx",
                    "pop rax",
                    "iretq",
                    counter = const counter!($counter),
                    eoi = const apic::MSR_EOI,
                )
            }
        };
    }
    handler!(kick counts kick);
    handler!(device counts device);
    handler!(acknowledge_timer counts timer);

    /// See [`told_apart`](super::told_apart).
    #[unsafe(naked)]
    pub(super) extern "C" fn told_apart<const VECTOR: u8>() {
        naked_asm!(
            "push rax",
            "push rcx",
            "push rdx",
            "mov ecx, {in_service}",
            "rdmsr",
            "bt eax, {vector} & 31",
            "pop rdx",
            "pop rcx",
            "pop rax",
            "jc {device}",
            original!(),
            in_service = const apic::msr_in_service(VECTOR),
            vector = const VECTOR,
            device = sym device,
            machine_check = sym machine_check::entry,
            spurious = sym spurious,
            exception = sym exception::<VECTOR>,
        )
    }

    /// A timer that is off once it has fired.
    #[unsafe(naked)]
    extern "C" fn timer() {
        naked_asm!("mov qword ptr gs:[{armed}], -1", "jmp {rest}", armed = const ARMED, rest = sym acknowledge_timer)
    }

    /// A timer that falls back to its tick.
    #[unsafe(naked)]
    extern "C" fn ticking_timer() {
        naked_asm!(
            "mov qword ptr gs:[{armed}], -1",
            "push rax",
            "push rcx",
            "push rdx",
            "mov eax, gs:[{tick}]",
            "xor edx, edx",
            "mov ecx, {initial}",
            "wrmsr",
            "pop rdx",
            "pop rcx",
            "pop rax",
            "jmp {rest}",
            armed = const ARMED,
            tick = const TICK,
            initial = const apic::MSR_TIMER_INITIAL,
            rest = sym acknowledge_timer,
        )
    }
}

/// A spurious interrupt is counted and not acknowledged (APM vol. 2, 16.4.7).
#[unsafe(naked)]
extern "C" fn spurious() {
    naked_asm!("inc qword ptr gs:[{counter}]", "iretq", counter = const counter!(spurious))
}

/// Entry of a non-maskable interrupt.
#[unsafe(naked)]
extern "C" fn nmi() {
    naked_asm!(
        "push rax", "push rcx", "push rdx", "push rsi", "push rdi", "push r8", "push r9", "push r10", "push r11",
        "cld",
        "call {handle}",
        "pop r11", "pop r10", "pop r9", "pop r8", "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rax",
        "iretq",
        handle = sym handle_nmi,
    )
}

/// While some pCPU panics, an NMI means stop. Otherwise no pCPU sends one, so it is only counted.
extern "sysv64" fn handle_nmi() {
    if panic::in_progress() {
        power::stop_this_cpu();
    }
    crate::cpu::this().taken.nmi.add(Proof::by_place(), 1);
}

/// Entry of a debug exception.
///
/// One that the guest caused may arrive in the hypervisor, on the instruction behind VMRUN. Processors of family 10h do
/// so (AMD's revision guide 41322, erratum 246), and so does Bochs 3.0. The handler returns, as that guide advises. The
/// guest's GS is still in force there, so the handler uses the stack alone. Any other debug exception is reported.
#[unsafe(naked)]
extern "C" fn debug() {
    naked_asm!(
        "push rax",
        "lea rax, [rip + dunlin_behind_vmrun_of_switch]",
        "cmp rax, [rsp + 8]",
        "je 2f",
        "lea rax, [rip + dunlin_behind_vmrun_of_switch_with_steps]",
        "cmp rax, [rsp + 8]",
        "2:",
        "pop rax",
        "jne {report}",
        "iretq",
        report = sym exception::<1>,
    )
}

/// Registers at an exception, in the order in which [`exception`] and the CPU have pushed them.
#[repr(C)]
struct Frame {
    r15: u64,
    r14: u64,
    r13: u64,
    r12: u64,
    r11: u64,
    r10: u64,
    r9: u64,
    r8: u64,
    rbp: u64,
    rdi: u64,
    rsi: u64,
    rdx: u64,
    rcx: u64,
    rbx: u64,
    rax: u64,
    vector: u64,
    error: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

/// Entry of the exception with this vector.
#[unsafe(naked)]
extern "C" fn exception<const VECTOR: u8>() {
    naked_asm!(
        // Vectors without an error code get a zero instead.
        ".ifeq {pushes_error}",
        "push 0",
        ".endif",
        "push {vector}",
        "push rax", "push rbx", "push rcx", "push rdx", "push rsi", "push rdi", "push rbp", "push r8",
        "push r9", "push r10", "push r11", "push r12", "push r13", "push r14", "push r15",
        "cld",
        "mov rdi, rsp",
        "call {report}",
        "ud2",
        vector = const VECTOR,
        pushes_error = const matches!(VECTOR, 8 | 10..=14 | 17 | 21 | 29 | 30) as u8,
        report = sym report_exception,
    )
}

extern "sysv64" fn report_exception(frame: &Frame) -> ! {
    let number = usize::try_from(frame.vector).unwrap_or(usize::MAX);
    let name = EXCEPTIONS.get(number).copied().unwrap_or("unknown exception");
    let Frame { error, rip, cs, rflags, rsp, ss, rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, .. } = *frame;
    let Frame { r11, r12, r13, r14, r15, vector, .. } = *frame;
    let cr2 = Cr2::read_raw();
    let why = match vector {
        8 if paging::is_guard(Hva(rsp.wrapping_sub(1))) => ": stack overflow",
        14 if cr2 < PAGE_BYTES => ": null pointer",
        _ => "",
    };
    panic::report(
        format_args!(
            "{name} (vector {vector}, error code {error:#x}){why}\n\
             \x20   rip {rip:#018x} cs  {cs:#06x} rflags {rflags:#x} cr2 {cr2:#018x}\n\
             \x20   rsp {rsp:#018x} ss  {ss:#06x} rbp {rbp:#018x}\n\
             \x20   rax {rax:#018x} rbx {rbx:#018x} rcx {rcx:#018x} rdx {rdx:#018x}\n\
             \x20   rsi {rsi:#018x} rdi {rdi:#018x} r8  {r8:#018x} r9  {r9:#018x}\n\
             \x20   r10 {r10:#018x} r11 {r11:#018x} r12 {r12:#018x} r13 {r13:#018x}\n\
             \x20   r14 {r14:#018x} r15 {r15:#018x}"
        ),
        rsp,
    )
}

/// Names by vector (APM vol. 2, table 8-1).
const EXCEPTIONS: [&str; 32] = [
    "divide error",
    "debug exception",
    "non-maskable interrupt",
    "breakpoint",
    "overflow",
    "bound range exceeded",
    "invalid opcode",
    "device not available",
    "double fault",
    "coprocessor segment overrun",
    "invalid TSS",
    "segment not present",
    "stack fault",
    "general protection fault",
    "page fault",
    "exception 15",
    "x87 floating-point error",
    "alignment check",
    "machine check",
    "SIMD floating-point error",
    "virtualization exception",
    "control protection",
    "exception 22",
    "exception 23",
    "exception 24",
    "exception 25",
    "exception 26",
    "exception 27",
    "hypervisor injection",
    "VMM communication",
    "security exception",
    "exception 31",
];
