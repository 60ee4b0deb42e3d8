//! Errors of QEMU's emulation (TCG), and how the hypervisor works around them.
//!
//! Each quirk names the version in which it was seen, the symptom, the decision, and the condition for its removal. The
//! code that needs a decision asks here. On a real processor every answer is the processor's own.
//!
//! These quirks have no function here, because their decision holds for every machine and costs nothing:
//!
//! - While a PCI device's registers are sized, QEMU 7.2 may send another CPU's access, for example to its local APIC,
//!   to the wrong device, and then fails an assertion. So [`find_console`](super::virtio::find_console) runs before the
//!   other pCPUs start.
//! - QEMU 7.2 may fail to report an interrupt that arrives during an entry, until the next one arrives. So a sender
//!   that waits for a kicked vCPU kicks it again after 100 µs (`vm/address_space.rs`).
//! - QEMU 11.1 reports each IO_PAGE_FAULT of its AMD IOMMU with address 0, with the flag I, and with the access in the
//!   flags GN (a read) and NX (a write). QEMU 7.2 and 10.0 report none. The log shows what was reported.
//! - QEMU reports no interrupt that its AMD IOMMU has stopped. It takes a device's copy to the address of messages for
//!   a message of the I/O APIC with AMD's IOMMU, and for one of an unknown device, whose number is not compared, with
//!   Intel's. Seen in 7.2 and 11.1. Messages that a device sends as such (MSI, MSI-X) have its number.
//! - QEMU's IOMMU of Intel lets messages of the old format pass, whatever GCMD.CFI says, and GSTS.CFIS stays clear.
//!   Seen in 7.2 and 11.1. So the driver tries it, and the log says so (`iommu/vt_d.rs`).
//! - Bochs 3.0, and processors of family 10h, raise a guest's debug exception in the hypervisor, behind VMRUN. So the
//!   handler of #DB returns from there (`irq.rs`).
//! - Bochs 3.0's VMRUN does not load the guest's CR2. A guest whose page fault is interrupted before its handler has
//!   read CR2 finds that of whoever ran in between, and programs are ended by SIGSEGV (docs/real-machine.md). So
//!   CR2 is written when a vCPU comes to a pCPU (`svm/vcpu.rs`).

use super::processor::is_emulated;

/// Whether the first pCPU must not run guests.
///
/// - Seen in: 7.2.
/// - Symptom: TCG keeps GIF, nested paging and other flags as bits of one word per CPU. An XRSTOR on *any* CPU clears
///   another bit in the *first* CPU's word, by a read and a write without a lock (`cpu_clear_ignne`). If this meets a
///   #VMEXIT of the first CPU, its nested paging stays on in the host, and the host's state is saved as the guest's
///   state. It was seen in three boots of nine with 32 vCPUs.
/// - Decision: a CPU that never runs a guest has no such bits to lose (docs/decisions/0005-first-cpu.md).
/// - Goes: when no supported version clears that bit without a lock.
pub(crate) fn spares_first_cpu() -> bool {
    is_emulated()
}

/// Whether a write to the local APIC's registers in memory may be lost.
///
/// - Seen in: 7.2.
/// - Symptom: while the machine's memory map changes, as it does when a PCI device's registers are sized, TCG looks up
///   the accesses of other CPUs by their old numbers in the new map, until those CPUs come to the end of their
///   translated code. So an EOI went elsewhere. The CPU took no interrupt any more: two boots of 35 of a VM with the
///   machine's devices, three at a time on two processors.
/// - Decision: whoever ends an interrupt looks in further code whether it has ended, and repeats the end if not.
/// - Goes: with the support of versions whose TCG has no x2APIC.
pub(crate) fn loses_writes_to_registers() -> bool {
    is_emulated()
}

/// Whether a CPU may execute an instruction again and again that another CPU has overwritten.
///
/// - Seen in: versions before 8.1.
/// - Symptom: TCG takes no lock while it translates code. It may keep what one CPU translates while another one writes
///   there, although memory has changed. A kernel that patches its code puts an INT3 there for a moment. A CPU that
///   keeps the INT3 never passes it, because its handler finds no INT3 and retries. It was seen in two boots of 520
///   with 4 vCPUs.
/// - Decision: INT instructions exit (docs/decisions/0013-old-code.md).
/// - Goes: with the support of versions before 8.1.
pub(crate) fn may_keep_old_code() -> bool {
    is_emulated()
}

/// Whether VMRUN drops the guest's interrupt shadow (APM vol. 2, 15.21.5, requires that it is loaded).
///
/// - Seen in: 7.2.
/// - Symptom: an event comes between STI and the HLT that waits for it.
/// - Decision: the event waits until the instruction in the shadow is done (`before_instruction`).
/// - Goes: when every supported version loads the shadow.
pub(crate) fn loses_interrupt_shadow() -> bool {
    is_emulated()
}

/// Whether a CPU may deliver an injected interrupt again before the guest's next exit, also with interrupts off.
///
/// - Seen in: 7.2. The source of 10 is the same there.
/// - Symptom: VMRUN delivers an interrupt at once, but leaves its vector where the main loop looks for an exception
///   (`helper_vmrun`). If that loop is entered before the next exit, it delivers the vector again. With `-icount` it is
///   entered whenever a timer expires; without, once in 30 000 interrupts.
/// - Decision: an interrupt goes in as a software interrupt, where that makes no difference
///   (docs/decisions/0018-repeated-interrupts.md).
/// - Goes: when every supported version forgets the vector.
pub(crate) fn repeats_interrupts() -> bool {
    is_emulated()
}

/// Whether a #VMEXIT leaves the host without paging if its guest has EFER.LME set, and CR0.PG and CR4.PAE clear.
///
/// - Seen in: 7.2.
/// - Symptom: TCG restores the host's CR0 before CR4 and EFER (`cpu_vmexit`). With the guest's LME it takes this for an
///   entry into long mode without PAE, and ignores it. The pCPU goes on in the hypervisor without paging.
/// - Decision: VMRUN gets no LME as long as the guest has neither paging nor PAE.
/// - Goes: when every supported version restores EFER first.
pub(crate) fn loses_paging_at_exit() -> bool {
    is_emulated()
}

/// Whether AMD's IOMMU loses the interrupts that a device table entry forwards as they are (IntCtl 1).
///
/// - Seen in: 7.2 and 11.1.
/// - Symptom: it overwrites the forwarded message with one for vector 0 (`amdvi_int_remap_msi`).
/// - Decision: the entry leaves all interrupts alone (IV 0), INIT and NMI too.
/// - Goes: when every supported version forwards them.
pub(crate) fn loses_forwarded_interrupts() -> bool {
    is_emulated()
}

/// Number of ASIDs to manage, of which the processor reports `reported`.
///
/// - Seen in: 7.2.
/// - Symptom: TCG reports 16, but accepts any number: its TLB has no tags and is empty after each entry and exit.
/// - Decision: the number of current CPUs (Milan, Genoa, Turin), so that the counters are meaningful.
/// - Goes: when TCG reports as many.
pub(crate) fn asids(reported: u32) -> u32 {
    const OF_CURRENT_CPUS: u32 = 0x8000;
    if is_emulated() { OF_CURRENT_CPUS } else { reported }
}

/// Whether the entries of one ASID can be flushed separately. `reported` is the processor's report.
///
/// - Seen in: 7.2.
/// - Symptom: TCG does not report it, but accepts the request.
/// - Decision: requested, so that the counters are meaningful.
/// - Goes: when TCG reports it.
pub(crate) fn flushes_one_asid(reported: bool) -> bool {
    reported || is_emulated()
}

/// Whether the TSC runs at one rate in all states of the processor. `reported` is the processor's report.
///
/// - Seen in: 7.2.
/// - Symptom: TCG does not report it, although its counter is the host's clock, the same for all its CPUs.
/// - Decision: guests see an invariant TSC.
/// - Goes: when TCG reports it.
pub(crate) fn has_invariant_tsc(reported: bool) -> bool {
    reported || is_emulated()
}

/// Whether a guest that waits with an interrupt window open exits when it writes CR8.
///
/// - Seen in: 7.2.
/// - Symptom: a guest that lowers CR8 while V_IRQ is set brings QEMU down by an assertion.
/// - Decision: the write exits, on every machine. It is rare, and the window is short.
/// - Goes: when no supported version fails the assertion.
pub(crate) const EXITS_AT_CR8_IN_A_WINDOW: bool = true;

/// Whether EXITINTINFO may call a virtual interrupt whose delivery was interrupted an exception.
///
/// - Seen in: 7.2. The source of 10 is the same there.
/// - Symptom: `handle_even_inj` knows software interrupts and exceptions only. V_IRQ may still be set then.
/// - Decision: an exception with the vector that V_IRQ has is that interrupt, on every machine. No exception has such a
///   vector.
/// - Goes: when every supported version calls it an interrupt.
pub(crate) const REPORTS_INTERRUPTS_AS_EXCEPTIONS: bool = true;

/// Minimum rate of the timer of a local APIC without TSC deadlines.
///
/// - Seen in: 7.2.
/// - Symptom: TCG may fail to report a pending interrupt to a CPU until the next one arrives, when a `VMRUN` with an
///   interrupt window pending races with the timer's thread.
/// - Decision: a tick every 10 ms keeps the pCPU alive.
/// - Goes: when TCG's local APIC has TSC deadlines, or reports every interrupt.
pub(crate) const TICKS_PER_SECOND: u64 = 100;
