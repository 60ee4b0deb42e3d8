//! Instruction forms that reach a device page: widths, directions, and read-modify-write.

use super::attempt::{Fault, attempt};

/// A form of access to memory: its name, and a function that performs it at an address with a value.
pub(crate) type Form = (&'static str, fn(u64, u64) -> Result<(), Fault>);

/// RSI holds the address. RDI holds it in a form that writes; in one that reads, RDI holds the address of a scratch
/// word.
macro_rules! form {
    (read $instruction:literal) => {
        form!($instruction, |_at| &raw mut LANDING as u64)
    };
    (write $instruction:literal) => {
        form!($instruction, |at| at)
    };
    ($instruction:literal, $rdi:expr) => {
        ($instruction, |at, value| {
            let rdi: fn(u64) -> u64 = $rdi;
            attempt!(
                $instruction,
                inout("rsi") at => _, inout("rdi") rdi(at) => _, inout("rax") value => _, inout("rcx") 1u64 => _,
                inout("rdx") value => _, out("r8") _
            )
        })
    };
}

/// Where string instructions store what they read. No code reads it.
static mut LANDING: u64 = 0;

/// Forms that only read.
pub(crate) const READS: [Form; 17] = [
    form!(read "mov al, byte ptr [rsi]"),
    form!(read "mov ax, word ptr [rsi]"),
    form!(read "mov eax, dword ptr [rsi]"),
    form!(read "mov rax, qword ptr [rsi]"),
    form!(read "movzx eax, byte ptr [rsi]"),
    form!(read "movzx eax, word ptr [rsi]"),
    form!(read "movsx rax, byte ptr [rsi]"),
    form!(read "movsxd rax, dword ptr [rsi]"),
    form!(read "add eax, dword ptr [rsi]"),
    form!(read "cmp dword ptr [rsi], eax"),
    form!(read "test dword ptr [rsi], 0x55"),
    form!(read "cmp byte ptr [rsi], 7"),
    form!(read "bt dword ptr [rsi], 3"),
    form!(read "mov r8d, dword ptr [rsi + rcx*4 - 4]"),
    form!(read "push qword ptr [rsi]\n lea rsp, [rsp + 8]"),
    form!(read "movs dword ptr [rdi], dword ptr [rsi]"),
    form!(read "rep movs byte ptr [rdi], byte ptr [rsi]"),
];

/// Index in [`WRITES`] of the plain 32-bit store.
pub(crate) const PLAIN_STORE: usize = 2;

/// Forms that write, with or without a read first.
pub(crate) const WRITES: [Form; 16] = [
    form!(write "mov byte ptr [rsi], al"),
    form!(write "mov word ptr [rsi], ax"),
    form!(write "mov dword ptr [rsi], eax"),
    form!(write "mov qword ptr [rsi], rax"),
    form!(write "mov dword ptr [rsi], 0x10203"),
    form!(write "or dword ptr [rsi], eax"),
    form!(write "and dword ptr [rsi], eax"),
    form!(write "xor dword ptr [rsi], eax"),
    form!(write "add dword ptr [rsi], eax"),
    form!(write "inc dword ptr [rsi]"),
    form!(write "xchg dword ptr [rsi], eax"),
    form!(write "lock bts dword ptr [rsi], 16"),
    form!(write "lock cmpxchg dword ptr [rsi], edx"),
    form!(write "xadd dword ptr [rsi], eax"),
    form!(write "stos dword ptr [rdi], eax"),
    form!(write "rep stos byte ptr [rdi], al"),
];
