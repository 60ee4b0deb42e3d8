//! The world switch: into the guest and back (APM vol. 2, 15.5 and 15.6).
//!
//! VMRUN and #VMEXIT switch the VMCB's registers: RIP, RSP, RAX, RFLAGS, control registers, code and data segments.
//! VMLOAD and VMSAVE switch FS, GS, TR, LDTR and the system-call MSRs. This code switches the other general registers.
//! Vector registers do not change, because the hypervisor uses none.
//!
//! The whole switch runs with GIF clear (see [`super::gif`]). An interrupt on the way in ends the new entry before its
//! first instruction. One on the way out waits until the host's GS and TR are restored.

#![expect(unsafe_code, reason = "switches register state, which no type can express")]

use core::arch::naked_asm;

use addr::Hpa;
use tlb_tag::CpuTags;
use x86_defs::vmcb::{ControlArea, TlbControl};

use super::Host;
use crate::arch::trace::{self, TraceEvent};
use crate::arch::x86_64::backend::WorldSwitch as _;
use crate::arch::x86_64::guest::state::Gprs;
use crate::arch::x86_64::guest::vcpu::{ArchVcpu, complete, prepare_tag};
use crate::arch::x86_64::host::tsc;
use crate::arch::x86_64::speculation::{guarded, is_guarded};
use crate::vcpu::Tally;

/// Runs the guest until its next exit. `epoch` is the VM's: entries of the TLB from before it are not used.
#[inline(always)]
pub(super) fn enter(vcpu: &mut ArchVcpu, host: &Host, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
    vcpu.prepare_event(tally);
    // CR8 is a view of the task priority. The guest may change either side: a write of the APIC's register exits, one
    // of CR8 does not.
    vcpu.hardware.set_task_priority(vcpu.apic.cr8());

    let tags_entry = match vcpu.tags.is_current(tags, epoch) {
        true => None,
        false => Some(prepare_tag(vcpu.tags.enter(tags, epoch), &mut vcpu.hardware, tally)),
    };
    let entered_at = tsc::raw();
    tally.add(|count| &count.host_ticks, entered_at.wrapping_sub(vcpu.left_at));
    tally.add(|count| &count.entries, 1);

    note_entry(&vcpu.hardware.vmcb.control);
    if is_guarded() {
        // SAFETY: as below.
        unsafe { switch_with_steps(&raw mut vcpu.gprs, vcpu.hardware.vmcb_hpa.0, host.state().0) };
    } else {
        // SAFETY: the vCPU loop defers interrupts (`irq_mask::defer`). The VMCB is the vCPU's alone. Its intercepts
        // were set when it was made and are only ever added to or returned to that set. Its nested table maps nothing
        // but the VM's own memory. `host` was saved on this pCPU, whose FS, GS, TR and LDTR do not change any more.
        unsafe { switch(&raw mut vcpu.gprs, vcpu.hardware.vmcb_hpa.0, host.state().0) };
    }
    note_exit(&vcpu.hardware.vmcb.control);

    vcpu.left_at = tsc::raw();
    tally.add(|count| &count.guest_ticks, vcpu.left_at.wrapping_sub(entered_at));
    if let Some(entry) = tags_entry {
        complete(entry, &mut vcpu.hardware);
    }
    if vcpu.hardware.task_priority() != vcpu.apic.cr8() {
        vcpu.apic.set_cr8(vcpu.hardware.task_priority());
    }
}

/// Records the entry in the trace.
#[inline(always)]
fn note_entry(control: &ControlArea) {
    let (tag, root) = (control.guest_asid, Hpa(control.n_cr3));
    trace::step(
        || (),
        |()| {
            let what = match control.tlb_control {
                TlbControl::DoNothing => return None,
                TlbControl::FlushAll => "all",
                _ => "tag",
            };
            Some(TraceEvent::EntryFlushes { what })
        },
    );
    trace::note(|| TraceEvent::Enter { tag, root });
}

/// The same for the exit.
#[inline(always)]
fn note_exit(control: &ControlArea) {
    trace::note(|| TraceEvent::Leave { tag: control.guest_asid, root: Hpa(control.n_cr3) });
}

/// Makes a world switch, with more to do before an entry and behind an exit.
macro_rules! world_switch {
    ($name:ident, $before:expr, $behind:expr, $($operands:tt)*) => {
        /// Runs the guest of the VMCB at `guest` until its next exit.
        ///
        /// # Safety
        /// GIF is clear and RFLAGS.IF set. `guest` is the address of a VMCB that no other pCPU uses at the same time.
        /// Its intercepts and its nested page table confine the guest. `host` is the page into which this pCPU saved
        /// its own state by VMSAVE, and nothing that VMSAVE covers has changed since.
        #[unsafe(naked)]
        unsafe extern "C" fn $name(gprs: *mut Gprs, guest: u64, host: u64) {
            naked_asm!(
                "push rbp",
                "push rbx",
                "push r12",
                "push r13",
                "push r14",
                "push r15",
                "push rdi",
                "push rdx",
                //
                $before,
                "mov rax, rsi",
                "vmload rax",
                "mov rcx, [rdi + 8]",
                "mov rdx, [rdi + 16]",
                "mov rbx, [rdi + 24]",
                "mov rbp, [rdi + 40]",
                "mov rsi, [rdi + 48]",
                "mov r8, [rdi + 64]",
                "mov r9, [rdi + 72]",
                "mov r10, [rdi + 80]",
                "mov r11, [rdi + 88]",
                "mov r12, [rdi + 96]",
                "mov r13, [rdi + 104]",
                "mov r14, [rdi + 112]",
                "mov r15, [rdi + 120]",
                "mov rdi, [rdi + 56]",
                //
                "vmrun rax",
                // The handler of #DB knows this place by its name.
                concat!(".globl dunlin_behind_vmrun_of_", stringify!($name)),
                concat!("dunlin_behind_vmrun_of_", stringify!($name), ":"),
                // RAX holds the VMCB again, RSP our stack; everything else is still the guest's.
                "vmsave rax",
                "mov rax, [rsp]",
                "vmload rax",
                "mov rax, [rsp + 8]",
                "mov [rax + 8], rcx",
                "mov [rax + 16], rdx",
                "mov [rax + 24], rbx",
                "mov [rax + 40], rbp",
                "mov [rax + 48], rsi",
                "mov [rax + 56], rdi",
                "mov [rax + 64], r8",
                "mov [rax + 72], r9",
                "mov [rax + 80], r10",
                "mov [rax + 88], r11",
                "mov [rax + 96], r12",
                "mov [rax + 104], r13",
                "mov [rax + 112], r14",
                "mov [rax + 120], r15",
                //
                $behind,
                "add rsp, 16",
                "pop r15",
                "pop r14",
                "pop r13",
                "pop r12",
                "pop rbx",
                "pop rbp",
                "ret",
                $($operands)*
            )
        }
    };
}

world_switch! { switch, "", "", }
guarded! { world_switch, switch_with_steps }
