//! Instruction forms that write CR0 or CR4, or read CR0's low half.

use super::attempt::{Fault, attempt};

/// A form of write to a register: its name, and a function that writes a value.
pub(crate) type Form = (&'static str, fn(u64) -> Result<(), Fault>);

/// The value is in RAX, and its low half in memory at RSI.
macro_rules! form {
    ($name:literal: $instruction:expr) => {
        form!($name: $instruction, between "", "")
    };
    ($name:literal: $instruction:expr, between $before:expr, $after:expr) => {
        ($name, |value| {
            let in_memory = value;
            attempt!(
                between $before, $instruction, $after,
                inout("rax") value => _, in("rsi") &raw const in_memory, out("rcx") _, out("rdx") _, out("r8") _,
                out("r9") _, out("r15") _
            )
        })
    };
}

/// MOV to CR0 in all the ways that mean the same.
pub(crate) const MOVES_TO_CR0: [Form; 9] = [
    form!("mov": "mov cr0, rax"),
    form!("mov-from-rdx": "mov cr0, rdx", between "mov rdx, rax", ""),
    form!("mov-from-r15": "mov cr0, r15", between "mov r15, rax", ""),
    form!("mov-from-rsp": "mov cr0, rsp", between "mov r8, rsp\n mov rsp, rax", "mov rsp, r8"),
    // 0F 22 C0 is MOV CR0, RAX.
    form!("mov-operand-size": ".byte 0x66, 0x0f, 0x22, 0xc0"),
    form!("mov-address-size": ".byte 0x67, 0x0f, 0x22, 0xc0"),
    form!("mov-rex-w": ".byte 0x48, 0x0f, 0x22, 0xc0"),
    form!("mov-many-prefixes": ".byte 0x2e, 0x66, 0x67, 0xf3, 0x40, 0x0f, 0x22, 0xc0"),
    // ModRM.mod does not count: the operand is a register.
    form!("mov-memory-form": ".byte 0x0f, 0x22, 0x00"),
];

/// MOV to CR4.
pub(crate) const MOVES_TO_CR4: [Form; 5] = [
    form!("mov": "mov cr4, rax"),
    form!("mov-from-r9": "mov cr4, r9", between "mov r9, rax", ""),
    form!("mov-from-rsp": "mov cr4, rsp", between "mov r8, rsp\n mov rsp, rax", "mov rsp, r8"),
    // 0F 22 E0 is MOV CR4, RAX.
    form!("mov-operand-size": ".byte 0x66, 0x0f, 0x22, 0xe0"),
    form!("mov-rex-w": ".byte 0x48, 0x0f, 0x22, 0xe0"),
];

/// LMSW.
pub(crate) const LMSW: [Form; 7] = [
    form!("lmsw": "lmsw ax"),
    form!("lmsw-from-cx": "lmsw cx", between "mov rcx, rax", ""),
    form!("lmsw-from-r9": "lmsw r9w", between "mov r9, rax", ""),
    form!("lmsw-operand-size": ".byte 0x66, 0x0f, 0x01, 0xf0"),
    form!("lmsw-rex-w": ".byte 0x48, 0x0f, 0x01, 0xf0"),
    form!("lmsw-memory": "lmsw word ptr [rsi]"),
    form!("lmsw-memory-indexed": "lmsw word ptr [rsi + rcx*2 - 16]", between "mov ecx, 8", ""),
];

/// LMSW of the word at an address.
pub(crate) fn lmsw_at(address: u64) -> Result<(), Fault> {
    attempt!("lmsw word ptr [rsi]", in("rsi") address)
}

/// CLTS.
pub(crate) fn clts() -> Result<(), Fault> {
    attempt!("clts")
}

/// What SMSW stores in registers of 16, 32 and 64 bits, with all their bits set before, and in memory.
pub(crate) fn smsw() -> [u64; 4] {
    let (word, double, quad): (u64, u64, u64);
    let mut memory = u64::MAX;
    // SAFETY: SMSW reads CR0 and writes the operand only; the store is of two bytes of `memory`.
    unsafe {
        core::arch::asm!(
            "mov rax, -1", "mov rcx, -1", "mov rdx, -1",
            "smsw ax", "smsw ecx", "smsw rdx",
            "smsw word ptr [rsi]",
            out("rax") word, out("rcx") double, out("rdx") quad, in("rsi") &raw mut memory, options(nostack)
        );
    }
    [word, double, quad, memory]
}
