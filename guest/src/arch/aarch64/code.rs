//! Code that is made at run time: a test of one instruction.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt::Fault;
use super::{cpu_local, tlb};
use crate::arch::window;

const RET: u64 = 0xd65f_03c0;

/// Registers before and after: X0 and X1.
pub(crate) type Pair = [u64; 2];

/// Executes `instruction` on CPU `cpu` with these values in X0 and X1, and returns their values afterwards. The
/// instruction may change flags and these registers, and must not branch. The code lies in a demand page's frame of
/// this CPU.
pub(crate) fn execute(cpu: usize, instruction: u32, registers: Pair) -> Result<Pair, Fault> {
    let at = window::frame(cpu, 0);
    // SAFETY: a frame of the window, static and only ever accessed by atomic operations.
    let word = unsafe { &*(at as *const AtomicU64) };
    word.store(u64::from(instruction) | RET << 32, Ordering::SeqCst);
    tlb::synchronise_code(at);
    go_to(at, registers)
}

/// Calls this address, which is expected to fault.
pub(crate) fn fetch(at: u64) -> Result<(), Fault> {
    go_to(at, [0; 2]).map(|_| ())
}

fn go_to(at: u64, [mut x0, mut x1]: Pair) -> Result<Pair, Fault> {
    let fault: u64;
    let landing = cpu_local::own().landing.as_ptr();
    // SAFETY: after an exception the handler continues at the label. The code changes no other registers, as its maker
    // promises.
    unsafe {
        asm!(
            "adr x16, 3f",
            "str x16, [{landing}]",
            "mov x17, xzr",
            "blr {at}",
            "3:",
            "str xzr, [{landing}]",
            at = in(reg) at, landing = in(reg) landing,
            inout("x0") x0, inout("x1") x1, out("x16") _, out("x17") fault, out("x30") _,
        );
    }
    Fault::decode(fault).map(|()| [x0, x1])
}
