//! Emulated processors that execute code which is no longer in memory.

use x86_defs::registers::vector;
use x86_emulate::Fetched;

use crate::arch::x86_64::guest::mmio;
use crate::arch::x86_64::guest::state::State as _;
use crate::arch::x86_64::host::processor::is_emulated;
use crate::vcpu::run::Running;

/// Whether a CPU may execute an instruction again and again that another CPU has overwritten.
///
/// QEMU before 8.1 takes no lock while it translates code. It may keep what one CPU translates while another one writes
/// there, although memory has changed. A kernel that patches its code puts an INT3 there for a moment. A CPU that keeps
/// the INT3 never passes it, because its handler finds no INT3 and retries. It was seen in two boots of 520 with 4
/// vCPUs (docs/decisions/0013-old-code.md).
pub(super) fn may_be_kept() -> bool {
    is_emulated()
}

/// The guest is about to execute an INT. It executes it when it is entered again, unless the INT is in an interrupt
/// shadow, or there is none: see [`may_be_kept`].
///
/// In a shadow the INT goes before any pending interrupt. It is injected, so that a pending interrupt comes at the
/// first instruction of its handler.
#[cold]
pub(super) fn software_interrupt(run: &mut Running<'_>) {
    const INT3: u8 = 0xcc;
    const INT: u8 = 0xcd;
    run.owner.arch.hardware.let_interrupt_itself();
    if run.owner.arch.hardware.is_in_shadow()
        && let Some(window) = mmio::bytes_at_rip(run)
    {
        match window.to_bytes() {
            [INT3, ..] => return run.owner.arch.interrupt_itself(vector::BREAKPOINT, 1),
            [INT, vector, ..] if window.length() >= 2 => return run.owner.arch.interrupt_itself(vector, 2),
            _ => {}
        }
    }
    run.owner.arch.before_instruction();

    let Some(Fetched { window, gpa }) = mmio::fetch(run) else { return };
    if matches!(window.to_bytes()[0], INT3 | INT) {
        return;
    }
    // A write makes the emulator read the code again. It changes nothing, and another vCPU's write is not undone.
    let memory = &run.vm.memory;
    if let Some(word) = memory.find_word(gpa) {
        let now = memory.load(word, 0);
        memory.compare_exchange(word, now, now);
    }
}
