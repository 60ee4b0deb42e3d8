//! Ends of interrupts without an exit (TLFS, "EOI Assist").
//!
//! A vCPU's assist page has a bit that says: the next interrupt needs no EOI. A guest ends an interrupt by clearing the
//! bit, and writes to the EOI register only if it was clear before. The bit is set for an edge-triggered interrupt that
//! is all its local APIC has: nothing else is in service, and nothing waits for its end. If the bit is clear after an
//! exit, the guest has ended the interrupt. It may not have taken it yet: a bit that is clear then was cleared for no
//! reason, and ends nothing.
//!
//! The local APIC learns of such an end at the next exit only. So before an entry with anything else requested, the bit
//! is taken back. The guest's EOI then exits, and what waits for it goes in.
//!
//! The bit changes here only while the vCPU is not in its guest. Nobody else writes to the page, but for the guest.

use addr::Gpa;
use hyperv_defs::msr::VpAssistMsr;

use super::apic::{Origin, apply};
use super::events::Armed;
use crate::arch::guest_ram::words::Word;
use crate::vcpu::run::Running;
use crate::vm::memory::Memory;

/// Bit 0 of the page's first word.
const NO_EOI_REQUIRED: u64 = 1;

/// The assist page of a vCPU, as far as ends of interrupts go.
#[derive(Debug, Default)]
pub(in crate::arch::x86_64) struct Assist {
    page: Option<Page>,
    /// The bit was set, and it was not seen clear since.
    is_told: bool,
}

/// A page with a clear bit, or with a set one while that is told.
#[derive(Debug)]
struct Page {
    gpa: Gpa,
    /// Its first word, where it was found last.
    word: Option<Word>,
}

impl Assist {
    /// By the value that the guest has written to the MSR. The first word of its page is zero.
    pub(super) fn at(register: VpAssistMsr) -> Self {
        let page = register.is_enabled().then(|| Page { gpa: register.page(), word: None });
        Self { page, is_told: false }
    }

    /// By the MSR's value in a guest that is restored with its page.
    pub(super) fn restored(register: VpAssistMsr, is_told: bool) -> Self {
        let assist = Self::at(register);
        Self { is_told: is_told && assist.is_on(), ..assist }
    }

    /// Whether there is such a page.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.page.is_some()
    }

    /// Whether the guest may end its next interrupt without an exit.
    #[inline]
    pub(super) fn is_told(&self) -> bool {
        self.is_told
    }
}

impl Page {
    /// Whether the bit is set. `None` if the guest has no memory there, or not now.
    fn read(&mut self, memory: &Memory) -> Option<bool> {
        memory.load_found(self.gpa, &mut self.word).map(|value| value & NO_EOI_REQUIRED != 0)
    }

    /// Writes the bit. Returns whether that succeeded.
    fn write(&mut self, memory: &Memory, is_set: bool) -> bool {
        let bit = if is_set { NO_EOI_REQUIRED } else { 0 };
        memory.change_found(self.gpa, &mut self.word, |value| value & !NO_EOI_REQUIRED | bit)
    }
}

/// An interrupt is requested: sets the bit for it, or takes it back. Called before each entry, as long as one is.
#[inline(never)]
pub(super) fn renew(run: &mut Running<'_>) {
    let arch = &mut run.owner.arch;
    let is_wanted = arch.apic.has_only_an_edge();
    if is_wanted == arch.assist.is_told {
        return;
    }
    let Some(page) = &mut arch.assist.page else { return };
    let is_written = page.write(&run.vm.memory, is_wanted);
    // Without its page the guest ends interrupts by the register.
    arch.assist = Assist { page: arch.assist.page.take().filter(|_| is_written), is_told: is_wanted && is_written };
}

/// The guest was left: looks whether it has ended the interrupt.
pub(in crate::arch::x86_64) fn settle(run: &mut Running<'_>) {
    let arch = &mut run.owner.arch;
    let Some(page) = arch.assist.page.as_mut().filter(|_| arch.assist.is_told) else { return };
    match page.read(&run.vm.memory) {
        Some(true) => arch.armed = Armed::Assist,
        Some(false) => {
            arch.assist.is_told = false;
            let effect = arch.apic.end_of_interrupt();
            apply(Origin::of(run), &mut run.owner.arch.apic, effect);
        }
        None => arch.assist = Assist::default(),
    }
}

/// The guest names another page, or none: the old one says nothing from now on.
pub(super) fn withdraw(run: &mut Running<'_>) {
    let assist = &mut run.owner.arch.assist;
    if let Some(page) = assist.page.as_mut().filter(|_| assist.is_told) {
        // If the page is not there, nobody reads it.
        let _is_written = page.write(&run.vm.memory, false);
    }
    *assist = Assist::default();
}
