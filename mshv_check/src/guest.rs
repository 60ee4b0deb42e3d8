//! Guests of a few bytes.

use std::io::Result;

use crate::device::register::{CR0, CS, DS, ES, RAX, RBP, RBX, RDX, RFLAGS, RIP, RSI, SS};
use crate::device::{Vp, segment};

/// Where the code of a real-mode guest is.
pub(crate) const CODE: u64 = 0x1000;
/// The port that guests write to.
pub(crate) const PORT: u16 = 0x3f8;

/// Adds 2 and 2, writes the digit and a zero, reads a byte, and halts.
pub(crate) const SUM: [u8; 13] = [
    0xba, 0xf8, 0x03, // mov dx, 3f8
    0x00, 0xd8, // add al, bl
    0x04, b'0', // add al, '0'
    0xee, // out dx, al
    0xb0, 0x00, // mov al, 0
    0xee, // out dx, al
    0xec, // in al, dx
    0xf4, // hlt
];
/// Writes to the port in an endless loop; each value is one higher.
pub(crate) const COUNTER: [u8; 4] = [
    0xee, // out dx, al
    0x40, // inc ax
    0xeb, 0xfc, // jmp to the start
];
/// Reads the port without end.
pub(crate) const READER: [u8; 3] = [0xec, 0xeb, 0xfd];
/// Halts again and again.
pub(crate) const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];
/// Loops.
pub(crate) const LOOP: [u8; 2] = [0xeb, 0xfe];

/// Reads the port, and then takes interrupts while it halts.
pub(crate) const WAITER: [u8; 5] = [
    0xec, // in al, dx
    0xfb, // sti
    0xf4, // again: hlt
    0xeb, 0xfd, // jmp again
];
/// A handler that writes this number to the port.
pub(crate) const fn handler(number: u8) -> [u8; 4] {
    // mov al, number; out dx, al; iret
    [0xb0, number, 0xee, 0xcf]
}

/// Reads the first word of each shared page, and keeps pages of its own in step. In protected mode, without paging:
///
/// ```text
/// EBX, EDX   first shared page, and how many there are
/// ESI        its own part: +0 passes, +4 words that were not as it has left them, +1000 the words that it has seen in
///            the shared pages, +2000 pages of its own
/// EBP        how many pages of its own
/// ```
pub(crate) const WATCHER: [u8; 61] = [
    0x8b, 0x3e, // mov edi, [esi]
    0x31, 0xc9, // xor ecx, ecx
    0x89, 0xc8, // 1: mov eax, ecx
    0xc1, 0xe0, 0x0c, // shl eax, 12
    0x8b, 0x04, 0x03, // mov eax, [ebx+eax]
    0x89, 0x84, 0x8e, 0x00, 0x10, 0x00, 0x00, // mov [esi+ecx*4+1000], eax
    0x41, // inc ecx
    0x39, 0xd1, // cmp ecx, edx
    0x72, 0xec, // jb 1
    0x31, 0xc9, // xor ecx, ecx
    0x89, 0xc8, // 2: mov eax, ecx
    0xc1, 0xe0, 0x0c, // shl eax, 12
    0x39, 0xbc, 0x06, 0x00, 0x20, 0x00, 0x00, // cmp [esi+eax+2000], edi
    0x74, 0x03, // je 3
    0xff, 0x46, 0x04, // inc dword [esi+4]
    0x47, // 3: inc edi
    0x89, 0xbc, 0x06, 0x00, 0x20, 0x00, 0x00, // mov [esi+eax+2000], edi
    0x4f, // dec edi
    0x41, // inc ecx
    0x39, 0xe9, // cmp ecx, ebp
    0x72, 0xe1, // jb 2
    0xff, 0x06, // inc dword [esi]
    0xeb, 0xc3, // jmp to the start
];

/// Uses the Hyper-V interface, again and again. In protected mode, without paging. EBP is its own part: +0 passes, +4
/// what was not as it has to be, +8 the address of the hypercall page, +1000 the input of calls, +2000 the VP assist
/// page, +3000 messages. The hypercall page is at 100000, the clock's at 101000.
pub(crate) const ENLIGHTENED: [u8; 213] = [
    0xb9, 0x00, 0x00, 0x00, 0x40, // mov ecx, 40000000
    0x31, 0xc0, // xor eax, eax
    0xba, 0x00, 0x00, 0x00, 0x81, // mov edx, 81000000
    0x0f, 0x30, // wrmsr
    0x8d, 0xa5, 0x00, 0x10, 0x00, 0x00, // lea esp, [ebp+1000]
    0xb9, 0x01, 0x00, 0x00, 0x40, // again: mov ecx, 40000001
    0x31, 0xd2, // xor edx, edx
    0xb8, 0x01, 0x00, 0x10, 0x00, // mov eax, 100001
    0x0f, 0x30, // wrmsr
    0x8d, 0x9d, 0x00, 0x10, 0x00, 0x00, // lea ebx, [ebp+1000]
    0xc7, 0x43, 0x08, 0x03, 0x00, 0x00, 0x00, // mov [ebx+8], 3
    0x89, 0xd9, // mov ecx, ebx
    0x31, 0xdb, // xor ebx, ebx
    0x31, 0xff, // xor edi, edi
    0x31, 0xf6, // xor esi, esi
    0xb8, 0x02, 0x00, 0x00, 0x00, // mov eax, 2
    0xff, 0x55, 0x08, // call [ebp+8]
    0x09, 0xd0, // or eax, edx
    0x74, 0x03, // je 1
    0xff, 0x45, 0x04, // inc [ebp+4]
    0xb9, 0x21, 0x00, 0x00, 0x40, // 1: mov ecx, 40000021
    0x31, 0xd2, // xor edx, edx
    0xb8, 0x01, 0x10, 0x10, 0x00, // mov eax, 101001
    0x0f, 0x30, // wrmsr
    0x83, 0x78, 0xff, 0x00, // 2: cmp [eax-1], 0
    0x74, 0xfa, // je 2
    0x83, 0x78, 0x0b, 0x00, // cmp [eax+b], 0
    0x74, 0xf4, // je 2
    0x8d, 0x9d, 0x00, 0x20, 0x00, 0x00, // lea ebx, [ebp+2000]
    0x83, 0x0b, 0xff, // or [ebx], ffffffff
    0xb1, 0x73, // mov cl, 73
    0x8d, 0x43, 0x01, // lea eax, [ebx+1]
    0x0f, 0x30, // wrmsr
    0x83, 0x3b, 0x00, // cmp [ebx], 0
    0x74, 0x03, // je 3
    0xff, 0x45, 0x04, // inc [ebp+4]
    0xb1, 0x80, // 3: mov cl, 80
    0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
    0x0f, 0x30, // wrmsr
    0xb1, 0x83, // mov cl, 83
    0x8d, 0x85, 0x01, 0x30, 0x00, 0x00, // lea eax, [ebp+3001]
    0x0f, 0x30, // wrmsr
    0xb1, 0x92, // mov cl, 92
    0xb8, 0x40, 0x00, 0x04, 0x00, // mov eax, 40040
    0x0f, 0x30, // wrmsr
    0xb1, 0xb0, // mov cl, b0
    0xb8, 0x08, 0x00, 0x02, 0x00, // mov eax, 20008
    0x0f, 0x30, // wrmsr
    0xb1, 0x20, // mov cl, 20
    0x0f, 0x32, // rdmsr
    0x05, 0xf4, 0x01, 0x00, 0x00, // add eax, 1f4
    0x83, 0xd2, 0x00, // adc edx, 0
    0xb1, 0xb1, // mov cl, b1
    0x0f, 0x30, // wrmsr
    0x8d, 0x9d, 0x00, 0x32, 0x00, 0x00, // lea ebx, [ebp+3200]
    0x8b, 0x03, // 4: mov eax, [ebx]
    0x85, 0xc0, // test eax, eax
    0x74, 0xfa, // je 4
    0x3d, 0x10, 0x00, 0x00, 0x80, // cmp eax, 80000010
    0x74, 0x03, // je 5
    0xff, 0x45, 0x04, // inc [ebp+4]
    0x31, 0xc0, // 5: xor eax, eax
    0x31, 0xd2, // xor edx, edx
    0x89, 0x03, // mov [ebx], eax
    0xb1, 0x84, // mov cl, 84
    0x0f, 0x30, // wrmsr
    0xff, 0x45, 0x00, // inc [ebp+0]
    0xe9, 0x3f, 0xff, 0xff, 0xff, // jmp again
];

/// Sets a VP to real mode at this address, with 2 in RAX and RBX.
pub(crate) fn start_real(vp: &Vp, at: u64) -> Result<()> {
    vp.set(&[
        (CS, segment(0, 0xffff, 0, 0x9b)),
        (RIP, u128::from(at)),
        (RFLAGS, 2),
        (RAX, 2),
        (RBX, 2),
        (RDX, u128::from(PORT)),
    ])
}

/// What a [`WATCHER`] works with, in guest addresses and numbers of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Watch {
    pub(crate) shared: u32,
    pub(crate) shared_pages: u32,
    pub(crate) own: u32,
    pub(crate) own_pages: u32,
}

/// Sets a VP to a [`WATCHER`] at this address.
pub(crate) fn start_watcher(vp: &Vp, at: u64, watch: Watch) -> Result<()> {
    start_flat(vp, at)?;
    vp.set(&[
        (RBX, watch.shared.into()),
        (RDX, watch.shared_pages.into()),
        (RSI, watch.own.into()),
        (RBP, watch.own_pages.into()),
    ])
}

/// Sets a VP to [`ENLIGHTENED`] at this address, whose own part is at `own`.
pub(crate) fn start_enlightened(vp: &Vp, at: u64, own: u32) -> Result<()> {
    start_flat(vp, at)?;
    vp.set(&[(RBP, own.into())])
}

/// Sets a VP to flat protected mode at this address.
fn start_flat(vp: &Vp, at: u64) -> Result<()> {
    let data = segment(0, u32::MAX, 0x10, 0xc093);
    vp.set(&[
        (CR0, 0x11),
        (CS, segment(0, u32::MAX, 8, 0xc09b)),
        (DS, data),
        (ES, data),
        (SS, data),
        (RIP, u128::from(at)),
        (RFLAGS, 2),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a short jump at the end of `code[..=at]` leads.
    fn target(code: &[u8], at: usize) -> usize {
        (at + 1).wrapping_add_signed(isize::from(i8::from_le_bytes([code[at]])))
    }

    #[test]
    fn jumps_lead_to_beginnings_of_instructions() {
        assert_eq!(target(&COUNTER, 3), 0);
        assert_eq!(target(&HALT, 2), 0);
        assert_eq!(target(&LOOP, 1), 0);
        assert_eq!(target(&WAITER, 4), 2);
        assert_eq!([0x17, 0x27, 0x38, 0x3c].map(|at| target(&WATCHER, at)), [4, 0x2b, 0x1a, 0]);
        let ends = [0x42, 0x59, 0x5f, 0x74, 0xb8, 0xbf].map(|at| target(&ENLIGHTENED, at));
        assert_eq!(ends, [0x46, 0x54, 0x54, 0x78, 0xb3, 0xc3]);
    }
}
