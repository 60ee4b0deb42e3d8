//! Works around emulated processors that execute code which is no longer in memory.

use x86_defs::registers::vector;
use x86_emulate::Fetched;

use crate::arch::x86_64::guest::mmio;
use crate::arch::x86_64::guest::state::State as _;
use crate::vcpu::run::Running;

/// The guest is about to execute an INT. It executes it when it is entered again, unless the INT is in an interrupt
/// shadow, or there is none: see [`may_keep_old_code`](crate::arch::x86_64::host::quirks::may_keep_old_code).
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
