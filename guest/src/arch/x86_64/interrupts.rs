//! Interrupts and exceptions: the 256 entries, the one dispatcher, and the switch that masks interrupts.

use core::arch::{asm, global_asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt::Fault;
use super::boot::MAX_CPUS;
use super::{apic, attempt, cpu_local, event_log, hyperv, modes, vectors};
use crate::arch::window;
use crate::interrupt;

/// Vector of an interrupt that is delivered on a stack in the window.
pub(crate) const WINDOW_STACK: u8 = 0x70;
static WINDOW_STACK_TAKEN: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Number of interrupts that CPU `cpu` has taken on the stack in the window.
pub(crate) fn window_stack_taken(cpu: usize) -> &'static AtomicU64 {
    &WINDOW_STACK_TAKEN[cpu]
}

/// Vectors with the shortest possible handlers, for measuring: end of interrupt by x2APIC, and by xAPIC.
pub(crate) const SELF_X2APIC: u8 = 0x60;
pub(crate) const SELF_XAPIC: u8 = 0x61;
/// Vector whose handler ends it by the assist page.
pub(crate) const ASSISTED: u8 = 0x62;

/// The handler of [`ASSISTED`], of one CPU at a time.
pub(crate) mod assisted {
    use super::{AtomicU64, Ordering};

    /// Address of the assist page's first word.
    pub(super) static PAGE: AtomicU64 = AtomicU64::new(0);
    pub(super) static TAKEN: AtomicU64 = AtomicU64::new(0);
    pub(super) static SPARED: AtomicU64 = AtomicU64::new(0);

    /// The handler uses the assist page at `address`.
    pub(crate) fn use_page(address: u64) {
        PAGE.store(address, Ordering::SeqCst);
    }

    /// Interrupts taken so far.
    pub(crate) fn taken() -> u64 {
        TAKEN.load(Ordering::SeqCst)
    }

    /// Those that needed no EOI.
    pub(crate) fn spared() -> u64 {
        SPARED.load(Ordering::SeqCst)
    }
}

/// What the entry code pushes on the stack: registers, after what the CPU pushed (APM vol. 2, 8.9.3).
#[repr(C)]
pub(crate) struct Frame {
    registers: [u64; 15],
    vector: u64,
    error: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

/// R11 among [`Frame::registers`], which begin with R15.
const R11: usize = 4;

impl Frame {
    /// Where the CPU was.
    pub(crate) fn rip(&self) -> u64 {
        self.rip
    }

    /// Sets where the CPU continues.
    pub(super) fn set_rip(&mut self, rip: u64) {
        self.rip = rip;
    }

    /// The flags that were saved.
    pub(super) fn rflags(&self) -> u64 {
        self.rflags
    }

    /// The code segment that the CPU was in; its lowest two bits are the privilege level.
    pub(super) fn cs(&self) -> u64 {
        self.cs
    }

    /// Lets the CPU continue elsewhere, with interrupts off and `r11` in R11.
    pub(super) fn go_to(&mut self, rip: u64, cs: u64, rsp: u64, ss: u64, r11: u64) {
        (self.rip, self.cs, self.rsp, self.ss, self.rflags) = (rip, cs, rsp, ss, 2);
        self.registers[R11] = r11;
    }
}

global_asm!(
    ".balign 16",
    ".globl interrupt_entries",
    "interrupt_entries:",
    ".set entry_vector, 0",
    ".rept 256",
    ".balign 16",
    // Exceptions 8, 10 to 14, 17, 21, 29 and 30 push an error code. For other vectors the stub pushes zero.
    ".if !(entry_vector == 8 || (entry_vector >= 10 && entry_vector <= 14) || entry_vector == 17 || entry_vector == 21 || entry_vector == 29 || entry_vector == 30)",
    "push 0",
    ".endif",
    "push entry_vector",
    "jmp interrupt_common",
    ".set entry_vector, entry_vector + 1",
    ".endr",
    "interrupt_common:",
    "push rax",
    "push rcx",
    "push rdx",
    "push rbx",
    "push rbp",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov rdi, rsp",
    "cld",
    "call dispatch_interrupt",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rbp",
    "pop rbx",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
);

unsafe extern "C" {
    #[link_name = "interrupt_entries"]
    static ENTRIES: [[u8; 16]; 256];
}

/// Address of the code that `vector` enters.
pub(super) fn entry(vector: u8) -> u64 {
    match vector {
        SELF_X2APIC => self_by_x2apic as *const () as u64,
        SELF_XAPIC => self_by_xapic as *const () as u64,
        ASSISTED => by_assist as *const () as u64,
        _ => &raw const ENTRIES as u64 + u64::from(vector) * 16,
    }
}

/// Counts, ends the interrupt by MSR, returns.
#[unsafe(naked)]
extern "C" fn self_by_x2apic() {
    naked_asm!(
        "push rax", "push rcx", "push rdx",
        "inc qword ptr gs:[{count}]",
        "mov ecx, 0x80b",
        "xor eax, eax",
        "xor edx, edx",
        "wrmsr",
        "pop rdx", "pop rcx", "pop rax",
        "iretq",
        count = const cpu_local::SELF_IPIS,
    )
}

/// Ends the interrupt by the assist page, or else by the interface's MSR, counts, returns.
#[unsafe(naked)]
extern "C" fn by_assist() {
    naked_asm!(
        "push rax", "push rcx", "push rdx",
        "mov rax, [rip + {page}]",
        "xor ecx, ecx",
        "xchg ecx, [rax]",
        "test ecx, 1",
        "jz 2f",
        "lock inc qword ptr [rip + {spared}]",
        "jmp 3f",
        "2: mov ecx, {eoi}",
        "xor eax, eax",
        "xor edx, edx",
        "wrmsr",
        "3: lock inc qword ptr [rip + {taken}]",
        "pop rdx", "pop rcx", "pop rax",
        "iretq",
        page = sym assisted::PAGE,
        spared = sym assisted::SPARED,
        taken = sym assisted::TAKEN,
        eoi = const hyperv::msr::EOI,
    )
}

/// Counts, ends the interrupt by a store, returns.
#[unsafe(naked)]
extern "C" fn self_by_xapic() {
    naked_asm!(
        "push rax",
        "inc qword ptr gs:[{count}]",
        "mov eax, {eoi}",
        "mov dword ptr [rax], 0",
        "pop rax",
        "iretq",
        count = const cpu_local::SELF_IPIS,
        eoi = const apic::XAPIC_PAGE + apic::EOI,
    )
}

/// Called by the entry code, on the interrupted stack or on an interrupt stack.
#[unsafe(no_mangle)]
extern "C" fn dispatch_interrupt(frame: &mut Frame) {
    match u8::try_from(frame.vector) {
        Ok(vector @ 0..=31) => exception(vector, frame),
        Ok(WINDOW_STACK) => {
            WINDOW_STACK_TAKEN[cpu_local::index()].fetch_add(1, Ordering::Release);
            // Reached by a software interrupt too, which leaves nothing in service.
            if apic::is_in_service(WINDOW_STACK) {
                apic::end_of_interrupt(WINDOW_STACK);
            }
        }
        // The APIC delivers it without an in-service bit (APM vol. 2, 16.4.7).
        Ok(vectors::SPURIOUS) => {}
        Ok(vector) if event_log::is_active() => event_log::note(vector, frame),
        Ok(vector) => interrupt::handle(vector),
        Err(_) => {}
    }
}

fn exception(vector: u8, frame: &mut Frame) {
    let cr2 = attempt::read_cr2();
    if vector == Fault::PF && window::resolve(cpu_local::index(), cr2) {
        return;
    }
    if event_log::is_active() {
        return event_log::note(vector, frame);
    }
    if let Some(resume) = attempt::resume_after(frame.rip) {
        frame.registers[R11] = Fault::encode(vector, frame.error);
        frame.rip = resume;
        return;
    }
    if modes::end_user_trip(vector, frame.error, frame) {
        return;
    }
    // The APIC accepts vectors from 16 on. So this is an interrupt that was sent with an exception's number.
    if vector >= 16 && apic::is_in_service(vector) {
        interrupt::handle(vector);
        return;
    }
    interrupt::unexpected_exception(format_args!(
        "vector={vector} error={:#x} rip={:#x} cr2={cr2:#x}",
        frame.error, frame.rip
    ));
}

/// Lets interrupts in.
pub(crate) fn enable() {
    // SAFETY: the IDT is complete before any caller runs.
    unsafe { asm!("sti", options(nostack)) };
}

/// Holds interrupts off.
pub(crate) fn disable() {
    // SAFETY: delays interrupts, no more.
    unsafe { asm!("cli", options(nostack)) };
}

/// Takes pending interrupts, then masks interrupts again.
pub(crate) fn drain() {
    enable();
    core::hint::spin_loop();
    disable();
}

/// Sleeps until an interrupt; interrupts must be off, and are off again on return. STI takes effect after HLT has
/// begun, so an interrupt that arrived after the caller's last check still wakes it.
pub(crate) fn sleep() {
    // SAFETY: the handlers that run in between save what they change.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}

/// Runs `work` with interrupts off, and restores the former state.
pub(crate) fn held_off<T>(work: impl FnOnce() -> T) -> T {
    let flags: u64;
    // SAFETY: reads the flags through the stack, which this kernel's code model leaves free below RSP.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags) };
    disable();
    let result = work();
    if flags >> 9 & 1 != 0 {
        enable();
    }
    result
}

/// Raises the software interrupt [`WINDOW_STACK`].
pub(crate) fn raise_on_window_stack() {
    // SAFETY: the vector's handler returns here; its stack is the window's.
    unsafe { asm!("int {}", const WINDOW_STACK) };
}
