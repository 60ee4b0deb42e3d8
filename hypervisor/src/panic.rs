//! The end of a hypervisor that has found a bug in itself.
//!
//! The first pCPU that panics stops the others by NMI, prints what, where and on which pCPU, and ends the machine. A
//! second panic, on the same pCPU while it reports the first, ends the machine at once.

use core::fmt;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::arch::{Arch, Machine};
use crate::{cpu, log};

/// Index of the pCPU that panics, plus one; 0 while all is well.
static PANICKING: AtomicU32 = AtomicU32::new(0);

/// Whether a pCPU panics. The NMI handler asks this, and then does not return.
pub(crate) fn in_progress() -> bool {
    PANICKING.load(Ordering::Acquire) != 0
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    report(format_args!("{}", Facts(info)), Machine::stack_pointer())
}

/// Reports `facts` and ends the machine; `stack` is where the search for return addresses begins.
pub(crate) fn report(facts: fmt::Arguments<'_>, stack: u64) -> ! {
    end(facts, stack, abi::exit_code::PANIC)
}

/// The same, when not the hypervisor but the machine below it has failed.
pub fn hardware_error(facts: fmt::Arguments<'_>, stack: u64) -> ! {
    end(facts, stack, abi::exit_code::HARDWARE_ERROR)
}

fn end(facts: fmt::Arguments<'_>, stack: u64, code: u8) -> ! {
    Machine::mask_interrupts();
    let me = cpu::try_this().map_or(1, |cpu| u32::from(u8::try_from(cpu.id.index()).unwrap_or(u8::MAX)) + 1);
    match PANICKING.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {}
        Err(other) if other == me => {
            log::emergency(|out| {
                let _ = out.write_str("a second panic while the first was being reported");
            });
            Machine::exit(abi::exit_code::PANIC)
        }
        // Another pCPU is reporting, and its NMI would stop this one anyway.
        Err(_) => Machine::stop_this_cpu(),
    }
    Machine::stop_others();

    log::emergency(|out| {
        let _ = out.write_fmt(facts);
        let _ = out.write_str("\n    return addresses on the stack:");
        Machine::for_each_return_address(stack, &mut |address| {
            let _ = write!(out, " {address:#x}");
        });
    });
    Machine::exit(code)
}

struct Facts<'a>(&'a PanicInfo<'a>);

impl fmt::Display for Facts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.location() {
            Some(location) => write!(f, "{location}: {}", self.0.message()),
            None => write!(f, "{}", self.0.message()),
        }
    }
}
