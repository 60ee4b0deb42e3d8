//! The instruction of a hypercall: VMMCALL on AMD's processors, VMCALL on Intel's. They differ in their last byte.
//!
//! The code is assembled for AMD's. The section `.hypercalls` lists each such instruction, and on a processor of Intel
//! the first CPU changes all of them before another one runs.

use super::control;

/// VMMCALL for AMD's processors, VMCALL for Intel's: a line of assembly.
macro_rules! hypercall {
    () => {
        "771:\n vmmcall\n .pushsection .hypercalls, \"a\", @progbits\n .quad 771b\n .popsection"
    };
}
pub(super) use hypercall;

/// The other of the two, which raises `#UD`.
macro_rules! foreign_hypercall {
    () => {
        "771:\n vmcall\n .pushsection .hypercalls, \"a\", @progbits\n .quad 771b\n .popsection"
    };
}
pub(super) use foreign_hypercall;

const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];
const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];

unsafe extern "C" {
    #[link_name = "hypercalls_start"]
    static HYPERCALLS_START: u64;
    #[link_name = "hypercalls_end"]
    static HYPERCALLS_END: u64;
}

/// The instruction.
pub(crate) fn bytes() -> [u8; 3] {
    if is_intel() { VMCALL } else { VMMCALL }
}

/// Code that was assembled with VMMCALL, as eight bytes of it.
pub(crate) fn adapted(code: u64) -> u64 {
    let bytes = code.to_le_bytes();
    match bytes.windows(VMMCALL.len()).position(|window| window == VMMCALL) {
        Some(at) if is_intel() => {
            let mut adapted = bytes;
            adapted[at..at + VMCALL.len()].copy_from_slice(&VMCALL);
            u64::from_le_bytes(adapted)
        }
        _ => code,
    }
}

fn is_intel() -> bool {
    control::maker().is(b"GenuineIntel")
}

/// Makes all of the code that of this processor. The first CPU calls it, once, before others start.
pub(super) fn prepare() {
    if !is_intel() {
        return;
    }
    let start = &raw const HYPERCALLS_START;
    let bytes = (&raw const HYPERCALLS_END) as usize - start as usize;
    // SAFETY: the linker script puts both symbols around the list, whose entries are 64-bit addresses.
    for at in unsafe { core::slice::from_raw_parts(start, bytes / 8) } {
        // SAFETY: the instruction is at that address, in memory that the kernel maps writable, and nobody executes it
        // now. The byte changes one of the two instructions into the other.
        unsafe { *((*at + 2) as *mut u8) ^= VMMCALL[2] ^ VMCALL[2] };
    }
    // A processor sees its own changes behind a jump (SDM vol. 3A, 9.1.3), such as the return from here.
}
