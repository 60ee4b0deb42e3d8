//! Machine code that is made at run time: single instructions by name, and loops of accesses to a device register.

use core::arch::naked_asm;

use super::{code_pages, tsc};

/// `INT3`: the planned end of a piece of code.
pub(crate) const END: u8 = 0xcc;
/// `NOP`.
pub(crate) const NOP: u8 = 0x90;

/// `mov eax, [rdi]` and similar, named by what differs.
pub(crate) const LOAD_RDI: &[u8] = &[0x8b, 0x07];
pub(crate) const LOAD_RSI: &[u8] = &[0x8b, 0x06];
/// `mov al, [rdi]`.
pub(crate) const LOAD_BYTE_RDI: &[u8] = &[0x8a, 0x07];
/// `add eax, [rdi]`.
pub(crate) const ADD_RDI: &[u8] = &[0x03, 0x07];
/// `or eax, [rdi]`.
pub(crate) const OR_RDI: &[u8] = &[0x0b, 0x07];
/// `mov [rdi], eax`.
pub(crate) const STORE_RDI: &[u8] = &[0x89, 0x07];
/// `mov eax, [address]`, the address following in as many bytes as addresses have.
pub(crate) const LOAD_ABSOLUTE: u8 = 0xa1;
/// In 64-bit code `mov eax, [r15]`, in 32-bit code `inc ecx` and `mov eax, [edi]`.
pub(crate) const TWO_MODES: &[u8] = &[0x41, 0x8b, 0x07];

/// `mov eax, [rdi + displacement]` by its 8-bit form.
pub(crate) const fn load_near(displacement: u8) -> [u8; 3] {
    [0x8b, 0x47, displacement]
}

/// `mov eax, [rdi + displacement]` by its 32-bit form.
pub(crate) const fn load_far(displacement: u32) -> [u8; 6] {
    let [a, b, c, d] = displacement.to_le_bytes();
    [0x8b, 0x87, a, b, c, d]
}

/// `mov dword ptr [rdi], immediate`.
pub(crate) const fn store_immediate(immediate: u32) -> [u8; 6] {
    let [a, b, c, d] = immediate.to_le_bytes();
    [0xc7, 0x07, a, b, c, d]
}

/// The accesses of a loop.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Load 32 bits.
    Load,
    /// Store 32 bits.
    Store,
}

/// What the loop rewrites, each time after a number of accesses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rewrite {
    /// The register number in the instruction itself.
    Instruction,
    /// A word on its page.
    Beside,
}

/// Accesses through registers that [`run`] loads. A form with an absolute address ends with this number of address
/// bytes.
type Form = (&'static [u8], usize);

const LOADS: [Form; 18] = [
    (&[0x8b, 0x06], 0),                         // mov eax, [rsi]
    (&[0x8b, 0x0f], 0),                         // mov ecx, [rdi]
    (&[0x41, 0x8b, 0x11], 0),                   // mov edx, [r9]
    (&[0x45, 0x8b, 0x14, 0x24], 0),             // mov r10d, [r12]
    (&[0x45, 0x8b, 0x5d, 0x00], 0),             // mov r11d, [r13 + 0]
    (&[0x8b, 0x44, 0x9e, 0x00], 0),             // mov eax, [rsi + rbx*4 + 0]
    (&[0x8b, 0x8f, 0x00, 0x00, 0x00, 0x00], 0), // mov ecx, [rdi + 0], 32-bit displacement
    (&[0x8b, 0x55, 0x40], 0),                   // mov edx, [rbp + 0x40]
    (&[0x44, 0x8b, 0x16], 0),                   // mov r10d, [rsi]
    (&[0x42, 0x8b, 0x04, 0x36], 0),             // mov eax, [rsi + r14]
    (&[0xa1], 8),                               // mov eax, moffs
    (&[0x67, 0x8b, 0x14, 0x25], 4),             // mov edx, [disp32], 32-bit address
    (&[0x64, 0x8b, 0x06], 0),                   // mov eax, fs:[rsi]
    (&[0x3e, 0x8b, 0x0f], 0),                   // mov ecx, ds:[rdi]
    (&[0x67, 0x8b, 0x06], 0),                   // mov eax, [esi]
    (&[0x3b, 0x16], 0),                         // cmp edx, [rsi]
    (&[0x23, 0x0f], 0),                         // and ecx, [rdi]
    (&[0x41, 0x03, 0x01], 0),                   // add eax, [r9]
];

const STORES: [Form; 12] = [
    (&[0x89, 0x06], 0),                         // mov [rsi], eax
    (&[0x89, 0x0f], 0),                         // mov [rdi], ecx
    (&[0x41, 0x89, 0x11], 0),                   // mov [r9], edx
    (&[0x45, 0x89, 0x14, 0x24], 0),             // mov [r12], r10d
    (&[0x45, 0x89, 0x5d, 0x00], 0),             // mov [r13 + 0], r11d
    (&[0x89, 0x44, 0x9e, 0x00], 0),             // mov [rsi + rbx*4 + 0], eax
    (&[0xc7, 0x07, 0x00, 0x00, 0x00, 0x00], 0), // mov dword ptr [rdi], 0
    (&[0x89, 0x55, 0x40], 0),                   // mov [rbp + 0x40], edx
    (&[0x42, 0x89, 0x04, 0x36], 0),             // mov [rsi + r14], eax
    (&[0xa3], 8),                               // mov moffs, eax
    (&[0x64, 0x89, 0x06], 0),                   // mov fs:[rsi], eax
    (&[0x67, 0x89, 0x06], 0),                   // mov [esi], eax
];

/// Pages of code that a loop may fill.
pub(crate) const LOOP_PAGES: usize = 3;
/// Offset on the first page of the word that [`Rewrite::Beside`] writes.
const BESIDE: u64 = 0xf80;

/// Code for the pages of one CPU, written one after the other.
struct Writer {
    cpu: usize,
    at: u64,
}

impl Writer {
    fn put(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let page = usize::try_from(self.at / code_pages::PAGE).unwrap_or(0) % LOOP_PAGES;
            code_pages::write(code_pages::frame(self.cpu, page), self.at % code_pages::PAGE, &[*byte]);
            self.at += 1;
        }
    }

    fn access(&mut self, access: Access, nth: usize, device: u64) {
        let (code, absolute) = match access {
            Access::Load => LOADS[nth % LOADS.len()],
            Access::Store => STORES[nth % STORES.len()],
        };
        self.put(code);
        self.put(&device.to_le_bytes()[..absolute]);
    }

    /// Jumps back to `target` unless the last decrement made zero: `jnz rel32`.
    fn repeat(&mut self, target: u64) {
        let after = self.at + 6;
        let [a, b, c, d, ..] = target.wrapping_sub(after).to_le_bytes();
        self.put(&[0x0f, 0x85, a, b, c, d]);
    }

    fn finish(&mut self) {
        self.put(&[0x49, 0xff, 0xc8]); // dec r8
        self.repeat(0);
        self.put(&[0xc3]); // ret
    }
}

/// Writes a loop of accesses to the code pages of CPU `cpu`: `count` accesses per pass, each instruction at its own
/// address. They are all alike, or of `many` forms. A loop with no accesses measures the loop itself.
pub(crate) fn write_loop(cpu: usize, access: Access, count: usize, many: bool, device: u64) {
    let mut writer = Writer { cpu, at: 0 };
    for nth in 0..count {
        writer.access(access, if many { nth } else { 0 }, device);
    }
    writer.finish();
}

/// Writes a loop that rewrites its page: per pass `every` loads by one instruction, if `with_access`, and one write.
/// Answers the address that RBX must hold.
pub(crate) fn write_rewriting_loop(cpu: usize, rewrite: Rewrite, every: u32, with_access: bool) -> u64 {
    let mut writer = Writer { cpu, at: 0 };
    writer.put(&[0x41, 0xba]); // mov r10d, every
    writer.put(&every.to_le_bytes());
    let inner = writer.at;
    if with_access {
        writer.put(LOAD_RSI);
    }
    writer.put(&[0x49, 0xff, 0xca]); // dec r10
    writer.repeat(inner);
    match rewrite {
        // xor byte ptr [rbx], 8: the ModRM byte's register, EAX or ECX.
        Rewrite::Instruction => writer.put(&[0x80, 0x33, 0x08]),
        // mov [rbx], r8d
        Rewrite::Beside => writer.put(&[0x44, 0x89, 0x03]),
    }
    writer.finish();

    let page = code_pages::address(cpu, 0);
    match rewrite {
        Rewrite::Instruction if with_access => page + inner + 1,
        _ => page + BESIDE,
    }
}

/// Runs the loop at `code` for `passes`, against the register at `device`, with `rbx` in RBX. Answers ticks.
pub(crate) fn run(code: u64, passes: u64, device: u64, rbx: u64) -> u64 {
    let start = tsc::now();
    // SAFETY: the code is one of the loops above, complete when it is called; it changes only registers that are
    // saved, a device register, and its own page.
    unsafe { call(code, passes.max(1), device, rbx) };
    tsc::now() - start
}

#[unsafe(naked)]
unsafe extern "C" fn call(code: u64, passes: u64, device: u64, rbx: u64) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "mov rax, rdi",
        "mov r8, rsi",
        "mov rbx, rcx",
        "mov rsi, rdx",
        "mov rdi, rdx",
        "mov r9, rdx",
        "mov r12, rdx",
        "mov r13, rdx",
        "lea rbp, [rdx - 0x40]",
        "xor r14d, r14d",
        "call rax",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}
