//! Short runs in other modes of the CPU, each to execute a hypercall there: CPL 3, 32-bit code, real mode.
//!
//! * **CPL 3**: IRETQ to a page with a hypercall and UD2. Each of the two can raise the exception that ends the run;
//!   its address tells which.
//! * **32-bit code** (compatibility mode): a far return into a 32-bit segment, and a far jump back. The code lies below
//!   4 GiB, like all of the guest.
//! * **Real mode**: another CPU starts in a page of real-mode code, stores the result in that page, and then starts
//!   again as usual.

use core::arch::{global_asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt::Fault;
use super::hypercall::hypercall;
use super::interrupts::Frame;
use super::{apic, attempt, hypercall, remap, tlb, tsc};

/// Selectors of the GDT in `descriptors.rs`.
pub(super) const CODE: u64 = 0x08;
pub(super) const DATA: u64 = 0x10;
pub(super) const CODE_32: u64 = 0x18;
pub(super) const USER_DATA: u64 = 0x33;
pub(super) const USER_CODE: u64 = 0x3b;

/// Where the stack was when the trip to CPL 3 began.
static USER_TRIP_STACK: AtomicU64 = AtomicU64::new(0);
/// Where the exception was that ended it.
static USER_TRIP_END: AtomicU64 = AtomicU64::new(0);

/// How a hypercall ended at CPL 3.
pub(crate) struct UserCall {
    /// The exception, at the call or at the UD2 behind it.
    pub(crate) fault: Option<Fault>,
    /// Whether it was raised by the call.
    pub(crate) at_call: bool,
}

/// Executes a hypercall at CPL 3, with `frame` as the page that holds the code. For CPU 0, interrupts off.
pub(crate) fn hypercall_at_cpl3(frame: u64) -> UserCall {
    // The call, UD2, and no more.
    let [first, second, third] = hypercall::bytes();
    remap::fill_code(frame, &[first, second, third, 0x0f, 0x0b, 0xcc, 0xcc, 0xcc]);
    remap::point(remap::USER, frame, remap::Kind::User);
    let entry = remap::address(remap::USER);
    tlb::flush_page(entry);
    // SAFETY: runs the code just written, which can only raise an exception. It returns with all registers that the
    // calling convention preserves.
    let r11 = unsafe { user_trip(entry) };
    remap::clear(remap::USER);
    tlb::flush_page(entry);
    UserCall { fault: Fault::decode(r11).err(), at_call: USER_TRIP_END.load(Ordering::SeqCst) == entry }
}

/// The exception handler's part: an exception at CPL 3 ends the trip. Answers whether it was one.
pub(super) fn end_user_trip(vector: u8, error: u64, frame: &mut Frame) -> bool {
    if frame.cs() & 3 != 3 {
        return false;
    }
    USER_TRIP_END.store(frame.rip(), Ordering::SeqCst);
    let back = end_of_user_trip as *const () as u64;
    frame.go_to(back, CODE, USER_TRIP_STACK.load(Ordering::SeqCst), DATA, Fault::encode(vector, error));
    true
}

#[unsafe(naked)]
unsafe extern "C" fn user_trip(entry: u64) -> u64 {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rip + {stack}], rsp",
        "push {data}",
        "push 0",
        "push 2",
        "push {code}",
        "push rdi",
        "xor r11d, r11d",
        "iretq",
        stack = sym USER_TRIP_STACK, data = const USER_DATA, code = const USER_CODE,
    )
}

/// Entered with the stack as [`user_trip`] left it and the fault in R11.
#[unsafe(naked)]
extern "C" fn end_of_user_trip() {
    naked_asm!(
        // The return to CPL 3 set DS and ES to null, because their level is 0.
        "mov eax, {data}",
        "mov ds, eax",
        "mov es, eax",
        "mov rax, r11",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
        data = const DATA,
    )
}

/// Registers of a 32-bit call: EAX, EDX, EBX, ECX, ESI, EDI; then R11, which receives a fault.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Registers32 {
    general: [u32; 6],
    fault: u64,
}

/// A hypercall from 32-bit code: control in EDX:EAX, input in EBX:ECX, output in EDI:ESI. Returns the result in
/// EDX:EAX, and whether the other registers are unchanged. EBX:ECX may change in a call that continues.
pub(crate) fn hypercall_from_32_bit(control: u64, input: u64, output: u64) -> Result<(u64, bool), Fault> {
    let [(eax, edx), (ecx, ebx), (esi, edi)] = [control, input, output].map(attempt::halves);
    let before = [eax, edx, ebx, ecx, esi, edi];
    let mut registers = Registers32 { general: before, fault: 0 };
    // SAFETY: the far return names a 32-bit code segment and code below 4 GiB; the stack is there too. The code returns
    // to 64-bit mode with all registers that the calling convention preserves.
    unsafe { trip_to_32_bit(&mut registers) };
    Fault::decode(registers.fault)?;
    let [eax, edx, ..] = registers.general;
    Ok((u64::from(edx) << 32 | u64::from(eax), registers.general[2..] == before[2..]))
}

#[unsafe(naked)]
unsafe extern "C" fn trip_to_32_bit(registers: &mut Registers32) {
    naked_asm!(
        "pushfq",
        "cli",
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdi",
        "mov eax, [rdi]",
        "mov edx, [rdi + 4]",
        "mov ebx, [rdi + 8]",
        "mov ecx, [rdi + 12]",
        "mov esi, [rdi + 16]",
        "mov edi, [rdi + 20]",
        "xor r11d, r11d",
        "push {code_32}",
        "lea r10, [rip + 4f]",
        "push r10",
        "retfq",
        ".code32",
        "4:",
        "2:",
        hypercall!(),
        "3:",
        ".pushsection .fixup, \"a\", @progbits",
        ".quad 2b",
        ".quad 3b",
        ".popsection",
        // A far jump to 64-bit code.
        ".byte 0xea",
        ".long 5f",
        ".word {code}",
        ".code64",
        "5:",
        // RDI against the address of the block: EDI is left on the stack.
        "xchg rdi, [rsp]",
        "mov [rdi], eax",
        "mov [rdi + 4], edx",
        "mov [rdi + 8], ebx",
        "mov [rdi + 12], ecx",
        "mov [rdi + 16], esi",
        "pop rax",
        "mov [rdi + 20], eax",
        "mov [rdi + 24], r11",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "popfq",
        "ret",
        code_32 = const CODE_32, code = const CODE,
    )
}

/// Where the real-mode code is copied to: the page behind the trampoline's.
const REAL_MODE: u64 = 0x9000;
/// Where it stores the result.
const WORD: u64 = REAL_MODE + 0xf00;
const STARTED: u32 = 1;
const CARRIED_OUT: u32 = 2;
const REFUSED: u32 = 3;

global_asm!(
    ".globl real_mode_start, real_mode_call, real_mode_handler, real_mode_end",
    ".code16",
    "real_mode_start:",
    "cli",
    "xor ax, ax",
    "mov ds, ax",
    "mov word ptr ds:[0x9f00], 1",
    "real_mode_call:",
    hypercall!(),
    "mov word ptr ds:[0x9f00], 2",
    "2:",
    "hlt",
    "jmp 2b",
    // Invalid opcode: the offset at which it was is on the stack.
    "real_mode_handler:",
    "pop ax",
    "mov word ptr ds:[0x9f02], ax",
    "mov word ptr ds:[0x9f00], 3",
    "3:",
    "hlt",
    "jmp 3b",
    "real_mode_end:",
    ".code64",
);

unsafe extern "C" {
    #[link_name = "real_mode_start"]
    static REAL_MODE_START: u8;
    #[link_name = "real_mode_call"]
    static REAL_MODE_CALL: u8;
    #[link_name = "real_mode_handler"]
    static REAL_MODE_HANDLER: u8;
    #[link_name = "real_mode_end"]
    static REAL_MODE_END: u8;
}

/// How a hypercall ended in real mode.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RealModeCall {
    /// It raised `#UD`, at its own address.
    InvalidOpcode,
    /// It raised `#UD`, but the address left behind is another.
    ElsewhereInvalidOpcode,
    /// It was carried out, or skipped.
    CarriedOut,
    /// The CPU did not get that far.
    NoAnswer,
}

/// Lets the CPU with `apic_id` execute a hypercall in real mode. The CPU then halts there; the caller must start it
/// again.
pub(crate) fn hypercall_in_real_mode(apic_id: u32, patience: u64) -> RealModeCall {
    let start = &raw const REAL_MODE_START as u64;
    let handler = &raw const REAL_MODE_HANDLER as u64 - start;
    let call = &raw const REAL_MODE_CALL as u64 - start;
    let length = &raw const REAL_MODE_END as u64 - start;
    // SAFETY: copies the code between two labels to unused conventional memory.
    unsafe {
        core::ptr::copy_nonoverlapping(start as *const u8, REAL_MODE as *mut u8, usize::try_from(length).unwrap_or(0));
    }
    // Vector 6 of the real-mode table: offset, then segment.
    let vector = u32::try_from(REAL_MODE << 12 | handler).unwrap_or(0);
    let prepared = attempt::store_u32(6 * 4, vector).and_then(|()| attempt::store_u32(WORD, 0));
    if prepared.is_err() {
        return RealModeCall::NoAnswer;
    }

    apic::send_init(apic_id);
    tsc::pause_until(tsc::now() + tsc::ticks(200));
    apic::send_startup(apic_id, REAL_MODE);
    let last = tsc::now() + patience;
    loop {
        let word = attempt::load_u32(WORD).unwrap_or(0);
        match word & 0xffff {
            REFUSED if u64::from(word >> 16) == call => return RealModeCall::InvalidOpcode,
            REFUSED => return RealModeCall::ElsewhereInvalidOpcode,
            CARRIED_OUT => return RealModeCall::CarriedOut,
            0 | STARTED if tsc::now() < last => core::hint::spin_loop(),
            _ => return RealModeCall::NoAnswer,
        }
    }
}
