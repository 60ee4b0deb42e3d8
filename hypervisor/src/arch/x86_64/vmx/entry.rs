//! The world switch: into the guest and back (SDM vol. 3C, chapters 27 and 28).
//!
//! An entry and an exit switch RIP, RSP, RFLAGS, control registers, segments and some MSRs, as the VMCS says. This code
//! switches the other general registers. Interrupts are masked by IF: one that is pending ends the entry before the
//! guest's first instruction, because interrupts exit, and stays pending then.

#![expect(unsafe_code, reason = "switches register state, which no type can express")]

use core::arch::naked_asm;

use tlb_tag::CpuTags;
use vmx_image::Scope;
use x86_defs::exit_code;
use x86_defs::vmcb::TlbControl;
use x86_defs::vmx::field;

use super::vmcs;
use super::{carry, flush};
use crate::arch::trace::{self, TraceEvent};
use crate::arch::x86_64::backend::WorldSwitch as _;
use crate::arch::x86_64::guest::state::{Gprs, gpr};
use crate::arch::x86_64::guest::vcpu::{ArchVcpu, complete, prepare_tag};
use crate::arch::x86_64::host::tsc;
use crate::arch::x86_64::speculation::{guarded, is_guarded};
use crate::vcpu::Tally;
use addr::Hpa;

/// Runs the guest until its next exit. `epoch` is the VM's: entries of the TLB from before it are not used.
#[inline(always)]
pub(in crate::arch::x86_64) fn enter(vcpu: &mut ArchVcpu, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
    vcpu.prepare_event(tally);
    vcpu.hardware.set_task_priority(vcpu.apic.cr8());

    let tags_entry = match vcpu.tags.is_current(tags, epoch) {
        true => None,
        false => Some(prepare_tag(vcpu.tags.enter(tags, epoch), &mut vcpu.hardware, tally)),
    };
    let entered_at = tsc::raw();
    tally.add(|count| &count.host_ticks, entered_at.wrapping_sub(vcpu.left_at));
    tally.add(|count| &count.entries, 1);

    let ArchVcpu { hardware, gprs, .. } = vcpu;
    let (image, Some(vmx)) = hardware.parts() else { return };
    let control = &mut image.control;
    let (tag, root) = (control.guest_asid, Hpa(control.n_cr3));
    if tag != vmx.held.vpid {
        vmx.held.vpid = tag;
        // SAFETY: the tag is this vCPU's (`tlb_tag`).
        unsafe { vmcs::write(field::VPID, tag.into()) };
    }
    match control.tlb_control {
        TlbControl::DoNothing => {}
        TlbControl::FlushAll => flush(Scope::All),
        TlbControl::FlushThisAsid => flush(Scope::Vcpu { vpid: tag, eptp: vmx.eptp }),
    }
    trace::note(|| TraceEvent::Enter { tag, root });
    carry::carry_in(vmx, image);
    gprs[gpr::RAX] = image.save.rax;
    let has_run = if is_guarded() {
        // SAFETY: as below.
        unsafe { switch_with_steps(gprs, vmx.is_launched) }
    } else {
        // SAFETY: the vCPU loop masks interrupts. The VMCS is the vCPU's alone, and this pCPU's current one. Its
        // controls confine the guest, its stage 2 maps nothing but the VM's own memory, and its host's state is this
        // pCPU's.
        unsafe { switch(gprs, vmx.is_launched) }
    };
    image.save.rax = gprs[gpr::RAX];
    if has_run {
        vmx.is_launched = true;
        carry::out(vmx, image);
    } else {
        image.control.exit_code = exit_code::INVALID.into();
        refused();
    }
    trace::note(|| TraceEvent::Leave { tag, root });

    vcpu.left_at = tsc::raw();
    tally.add(|count| &count.guest_ticks, vcpu.left_at.wrapping_sub(entered_at));
    if let Some(entry) = tags_entry {
        complete(entry, &mut vcpu.hardware);
    }
}

/// VMLAUNCH or VMRESUME has failed, which says that a control or the host's state is wrong.
#[cold]
fn refused() {
    let error = vmcs::read(field::INSTRUCTION_ERROR);
    log::error!("the processor has refused an entry: VM-instruction error {error} (SDM vol. 3C, 31.4)");
}

unsafe extern "C" {
    static dunlin_behind_exit_of_switch: u8;
    static dunlin_behind_exit_of_switch_with_steps: u8;
}

/// Where an exit leads.
pub(super) fn behind_exit() -> u64 {
    let place = if is_guarded() {
        &raw const dunlin_behind_exit_of_switch_with_steps
    } else {
        &raw const dunlin_behind_exit_of_switch
    };
    place.addr() as u64
}

/// Makes a world switch, with more to do before an entry and behind an exit.
macro_rules! world_switch {
    ($name:ident, $before:expr, $behind:expr, $($operands:tt)*) => {
        /// Runs the guest of the current VMCS until its next exit. Returns whether it was entered.
        ///
        /// # Safety
        /// IF is clear. The VMCS confines the guest, and its host's state is this pCPU's.
        #[unsafe(naked)]
        unsafe extern "C" fn $name(gprs: *mut Gprs, is_launched: bool) -> bool {
            naked_asm!(
                "push rbp",
                "push rbx",
                "push r12",
                "push r13",
                "push r14",
                "push r15",
                "push rdi",
                $before,
                "mov eax, {host_rsp}",
                "vmwrite rax, rsp",
                "test sil, sil",
                // None of these changes a flag.
                "mov rax, [rdi]",
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
                "jnz 2f",
                // In the shadow of STI nothing is let in: an interrupt that is pending ends the entry. Without STI,
                // Bochs 3.0 would keep interrupts pending for as long as a guest keeps its own IF clear.
                "sti",
                "vmlaunch",
                "jmp 3f",
                "2:",
                "sti",
                "vmresume",
                // It has failed. Nothing of the guest's is of use.
                "3:",
                "cli",
                "xor eax, eax",
                "jmp 4f",
                concat!(".globl dunlin_behind_exit_of_", stringify!($name)),
                concat!("dunlin_behind_exit_of_", stringify!($name), ":"),
                "push rax",
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
                "pop rcx",
                "mov [rax], rcx",
                $behind,
                "mov eax, 1",
                "4:",
                "add rsp, 8",
                "pop r15",
                "pop r14",
                "pop r13",
                "pop r12",
                "pop rbx",
                "pop rbp",
                "ret",
                host_rsp = const field::HOST_RSP,
                $($operands)*
            )
        }
    };
}

world_switch! { switch, "", "", }
guarded! { world_switch, switch_with_steps }
