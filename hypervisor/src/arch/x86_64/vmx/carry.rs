//! Carries registers between the control block, which is the image that all code reads and writes, and the VMCS.
//!
//! Before an entry only what differs from what the VMCS [holds](super::vcpu::Held) is written; [`vmx_image`] has the
//! rules. After an exit the image gets RIP, RSP, RFLAGS, the interrupt shadow, and an event whose delivery was
//! interrupted. All else follows when an exit needs it ([`rest_out`]): few do. What only an exit changes, as CR4 and
//! EFER, is never read back.

#![expect(unsafe_code, reason = "writes the VMCS")]

use core::arch::asm;

use addr::Hpa;
use vmx_image::{Delivery, Entry, Fields, Left, Quiet};
use x86_64::registers::control::{Cr0, Cr3, Cr4};
use x86_64::registers::model_specific::Msr;
use x86_64::registers::segmentation::{CS, DS, ES, FS, GS, SS, Segment as _};
use x86_defs::msr;
use x86_defs::registers::{Segment, cr0, efer, rflags};
use x86_defs::vmcb::Vmcb;
use x86_defs::vmx::controls::ENTRY_LONG_MODE;
use x86_defs::vmx::event::Information;
use x86_defs::vmx::field;
use x86_defs::vmx::segment::{attributes, rights};

use super::vcpu::{Held, Vmx};
use super::vmcs::{WriteList, read};
use super::{capability, entry};
use crate::arch::x86_64::svm::{place, write_cr2};

/// Bits of CR0 that the guest changes without an exit.
const CR0_OF_GUEST: u64 = cr0::TS | cr0::MP;

/// The order of the VMCS' fields for segments.
const FIELDS: u32 = 8;

/// Writes a field.
fn write(number: u32, value: u64) {
    // SAFETY: the values come from this module, which confines the guest by the controls, and leads exits to the host.
    unsafe { super::vmcs::write(number, value) }
}

/// Fields that never change, of a new VMCS.
pub(super) fn fill(eptp: u64, image: &Vmcb) {
    let controls = &capability().controls;
    // AMD's map of ports has Intel's two as its first pages (SDM vol. 3C, 25.6.4).
    let ports = image.control.iopm_base;
    for (number, value) in [
        (field::PIN_CONTROLS, controls.pin.into()),
        (field::PRIMARY_CONTROLS, controls.primary.into()),
        (field::SECONDARY_CONTROLS, controls.secondary.into()),
        (field::EXIT_CONTROLS, controls.exit.into()),
        (field::ENTRY_CONTROLS, controls.entry.into()),
        (field::EPT_POINTER, eptp),
        (field::VMCS_LINK, u64::MAX),
        (field::IO_BITMAP_A, ports),
        (field::IO_BITMAP_B, ports + 0x1000),
        (field::PAGE_FAULT_MASK, 0),
        (field::PAGE_FAULT_MATCH, 0),
        (field::CR3_TARGET_COUNT, 0),
        (field::EXIT_MSR_STORE_COUNT, 0),
        (field::EXIT_MSR_LOAD_COUNT, 0),
        (field::ENTRY_MSR_LOAD_COUNT, 0),
        (field::ENTRY_EVENT, 0),
        (field::GUEST_DEBUGCTL, 0),
        (field::GUEST_ACTIVITY, 0),
        (field::GUEST_PENDING_DEBUG, 0),
        (field::CR0_MASK, !CR0_OF_GUEST),
        (field::CR4_MASK, u64::MAX),
    ] {
        write(number, value);
    }
}

/// Where a new VMCS lists the pages that the pCPU writes.
pub(super) fn fill_list(hpa: Hpa) {
    write(field::PML_ADDRESS, hpa.0);
    reset_list();
}

/// The list is empty.
pub(super) fn reset_list() {
    write(field::GUEST_PML_INDEX, WriteList::LAST.into());
}

/// This pCPU's own state, as an exit leaves it.
pub(super) fn host() {
    // SAFETY: reading MSRs has no effect; these exist on every machine of 64 bits.
    let msr = |number: u32| unsafe { Msr::new(number).read() };
    let (root, flags) = Cr3::read_raw();
    let gdt = x86_64::instructions::tables::sgdt();
    let idt = x86_64::instructions::tables::sidt();
    for (number, value) in [
        (field::HOST_CR0, Cr0::read_raw()),
        (field::HOST_CR3, root.start_address().as_u64() | u64::from(flags)),
        (field::HOST_CR4, Cr4::read_raw()),
        (field::HOST_EFER, msr(msr::EFER)),
        (field::HOST_PAT, msr(msr::PAT)),
        (field::HOST_CS_SELECTOR, CS::get_reg().0.into()),
        (field::HOST_SS_SELECTOR, SS::get_reg().0.into()),
        (field::HOST_DS_SELECTOR, (DS::get_reg().0 & !7).into()),
        (field::HOST_ES_SELECTOR, (ES::get_reg().0 & !7).into()),
        (field::HOST_FS_SELECTOR, (FS::get_reg().0 & !7).into()),
        (field::HOST_GS_SELECTOR, (GS::get_reg().0 & !7).into()),
        (field::HOST_TR_SELECTOR, task_register().into()),
        (field::HOST_FS_BASE, msr(msr::FS_BASE)),
        (field::HOST_GS_BASE, msr(msr::GS_BASE)),
        (field::HOST_TR_BASE, task_base(gdt.base.as_u64())),
        (field::HOST_GDTR_BASE, gdt.base.as_u64()),
        (field::HOST_IDTR_BASE, idt.base.as_u64()),
        (field::HOST_SYSENTER_CS, 0),
        (field::HOST_SYSENTER_ESP, 0),
        (field::HOST_SYSENTER_EIP, 0),
        (field::HOST_RIP, entry::behind_exit()),
    ] {
        write(number, value);
    }
}

fn task_register() -> u16 {
    let selector: u16;
    // SAFETY: reading it has no effect.
    unsafe { asm!("str {:x}", out(reg) selector, options(nomem, nostack, preserves_flags)) };
    selector
}

/// The base of the task-state segment, from its descriptor (SDM vol. 3A, figure 8-4).
fn task_base(gdt: u64) -> u64 {
    let place = gdt + u64::from(task_register() & !7);
    // SAFETY: this pCPU's table has the descriptor that TR was loaded from.
    let [low, high] = unsafe { (place as *const [u64; 2]).read_unaligned() };
    (low >> 16 & 0xff_ffff) | (low >> 56 & 0xff) << 24 | high << 32
}

/// Everything, when the vCPU has come to this pCPU.
pub(super) fn all_in(vmx: &mut Vmx, image: &mut Vmcb) {
    let held = &mut vmx.held;
    let controls = &capability().controls;
    let (rip, rflags) = (image.save.rip, image.save.rflags);
    held.fields = Fields { rip, rflags, primary: controls.primary, exceptions: 0, interruptibility: 0 };
    (held.quiet, held.vpid) = (Quiet::NEVER, 0);
    for (number, value) in [
        (field::PRIMARY_CONTROLS, controls.primary.into()),
        (field::EXCEPTION_BITMAP, 0),
        (field::GUEST_INTERRUPTIBILITY, 0),
        (field::TSC_OFFSET, image.control.tsc_offset),
        (field::GUEST_RIP, rip),
        (field::GUEST_RFLAGS, rflags),
    ] {
        write(number, value);
    }
    pass(vmx);
    written_in(vmx, image);
    rest_in(image);
}

/// Which MSRs leave the guest.
pub(super) fn pass(vmx: &mut Vmx) {
    vmx.held.passed = vmx.passed;
    write(field::MSR_BITMAP, super::exit::msr_map(vmx.passed).0);
}

/// What entries otherwise write only if it differs from what was read last: somebody has written all registers.
pub(super) fn written_in(vmx: &mut Vmx, image: &Vmcb) {
    let (held, save) = (&mut vmx.held, &image.save);
    (held.rsp, held.cr2, held.dr6) = (save.rsp, save.cr2, save.dr6);
    write(field::GUEST_RSP, held.rsp);
    write_cr2(held.cr2);
    write_dr6(held.dr6);
    (held.is_image_whole, held.has_debug) = (true, true);
}

/// Registers that few exits need.
#[cold]
#[inline(never)]
pub(super) fn rest_in(image: &mut Vmcb) {
    let capability = capability();
    let save = &image.save;
    let segments = [save.es, save.cs, save.ss, save.ds, save.fs, save.gs, save.ldtr, save.tr];
    for (number, segment) in (0..FIELDS).zip(segments) {
        write(field::GUEST_ES_SELECTOR + 2 * number, segment.selector.into());
        write(field::GUEST_ES_LIMIT + 2 * number, segment.limit.into());
        write(field::GUEST_ES_BASE + 2 * number, segment.base);
        write(field::GUEST_ES_RIGHTS + 2 * number, rights(segment.attributes).into());
    }
    let is_long = save.efer & efer::LMA != 0;
    let long_mode = if is_long { ENTRY_LONG_MODE } else { 0 };
    for (number, value) in [
        (field::GUEST_GDTR_BASE, save.gdtr.base),
        (field::GUEST_GDTR_LIMIT, (save.gdtr.limit & 0xffff).into()),
        (field::GUEST_IDTR_BASE, save.idtr.base),
        (field::GUEST_IDTR_LIMIT, (save.idtr.limit & 0xffff).into()),
        (field::GUEST_CR0, save.cr0 | capability.cr0_set),
        (field::CR0_SHADOW, save.cr0),
        (field::GUEST_CR4, save.cr4 | capability.cr4_set),
        (field::CR4_SHADOW, save.cr4),
        (field::GUEST_CR3, save.cr3),
        (field::GUEST_EFER, save.efer & !efer::SVME),
        (field::GUEST_PAT, save.g_pat),
        (field::GUEST_DR7, save.dr7),
        (field::GUEST_SYSENTER_CS, save.sysenter_cs & 0xffff_ffff),
        (field::GUEST_SYSENTER_ESP, save.sysenter_esp),
        (field::GUEST_SYSENTER_EIP, save.sysenter_eip),
        (field::ENTRY_CONTROLS, (capability.controls.entry | long_mode).into()),
    ] {
        write(number, value);
    }
    image.control.host_use[place::CHANGED] = 0;
}

/// Reads what [`out`] leaves in the VMCS.
#[cold]
#[inline(never)]
pub(super) fn rest_out(vmx: &mut Vmx, image: &mut Vmcb) {
    let save = &mut image.save;
    vmx.held.rsp = read(field::GUEST_RSP);
    save.rsp = vmx.held.rsp;
    let segment = |number: u32| Segment {
        selector: low(read(field::GUEST_ES_SELECTOR + 2 * number)),
        limit: word(read(field::GUEST_ES_LIMIT + 2 * number)),
        base: read(field::GUEST_ES_BASE + 2 * number),
        attributes: attributes(word(read(field::GUEST_ES_RIGHTS + 2 * number))),
    };
    let [es, cs, ss, ds, fs, gs, ldtr, tr] = [0, 1, 2, 3, 4, 5, 6, 7].map(segment);
    (save.es, save.cs, save.ss, save.ds, save.fs, save.gs) = (es, cs, ss, ds, fs, gs);
    (save.ldtr, save.tr) = (ldtr, tr);
    let [privilege, ..] = (read(field::GUEST_SS_RIGHTS) >> 5 & 3).to_le_bytes();
    save.cpl = privilege;
    (save.gdtr.base, save.gdtr.limit) = (read(field::GUEST_GDTR_BASE), word(read(field::GUEST_GDTR_LIMIT)));
    (save.idtr.base, save.idtr.limit) = (read(field::GUEST_IDTR_BASE), word(read(field::GUEST_IDTR_LIMIT)));
    save.cr0 = save.cr0 & !CR0_OF_GUEST | read(field::GUEST_CR0) & CR0_OF_GUEST;
    save.cr3 = read(field::GUEST_CR3);
    if image.control.host_use[place::CHANGED] & place::CHANGED_CALLS == 0 {
        save.sysenter_cs = read(field::GUEST_SYSENTER_CS);
        save.sysenter_esp = read(field::GUEST_SYSENTER_ESP);
        save.sysenter_eip = read(field::GUEST_SYSENTER_EIP);
    }
    vmx.held.is_image_whole = true;
}

/// Reads what tells of the guest's code: its privilege level and CS's attributes. Returns whether it is 64-bit code.
pub(super) fn code_out(vmx: &Vmx, image: &mut Vmcb) -> bool {
    let save = &mut image.save;
    if !vmx.held.is_image_whole {
        save.cs.attributes = attributes(word(read(field::GUEST_CS_RIGHTS)));
        let [privilege, ..] = (read(field::GUEST_SS_RIGHTS) >> 5 & 3).to_le_bytes();
        save.cpl = privilege;
    }
    const LONG: u16 = 1 << 9;
    save.efer & efer::LMA != 0 && save.cs.attributes & LONG != 0
}

/// Before an entry.
#[inline(always)]
pub(super) fn carry_in(vmx: &mut Vmx, image: &mut Vmcb) {
    if image.control.host_use[place::CHANGED] != 0 {
        vmx.carry_changes(image);
    }
    let held = &mut vmx.held;
    if held.quiet.is_as_before(image, &held.fields) {
        let (save, fields) = (&image.save, &mut held.fields);
        // It nearly always differs, and the next exit reads it afresh.
        write(field::GUEST_RIP, save.rip);
        if save.rflags != fields.rflags {
            fields.rflags = save.rflags;
            write(field::GUEST_RFLAGS, save.rflags);
        }
    } else {
        rules_in(held, image);
    }
    if held.is_image_whole {
        held.is_image_whole = false;
        if image.save.rsp != held.rsp {
            write(field::GUEST_RSP, image.save.rsp);
        }
    }
    if held.has_debug {
        debug_in(held, image);
    }
}

/// The same where something is different from a plain entry.
#[inline(never)]
fn rules_in(held: &mut Held, image: &mut Vmcb) {
    let base = capability().controls.primary;
    let Entry { fields, delivery, pending_debug } = vmx_image::entry(image, &held.fields, base, is_64_bit);
    held.quiet = Quiet::after(image, &fields, base);
    let old = core::mem::replace(&mut held.fields, fields);
    let Fields { rip, rflags, primary, exceptions, interruptibility } = fields;
    for (number, is_new, value) in [
        (field::PRIMARY_CONTROLS, primary != old.primary, primary.into()),
        (field::EXCEPTION_BITMAP, exceptions != old.exceptions, exceptions.into()),
        (field::GUEST_INTERRUPTIBILITY, interruptibility != old.interruptibility, interruptibility.into()),
        (field::GUEST_RIP, rip != old.rip, rip),
        (field::GUEST_RFLAGS, rflags != old.rflags, rflags),
    ] {
        if is_new {
            write(number, value);
        }
    }
    if let Some(pending) = pending_debug {
        write(field::GUEST_PENDING_DEBUG, pending);
    }
    if let Some(Delivery { information, code, length }) = delivery {
        write(field::ENTRY_EVENT, information.0.into());
        if let Some(code) = code {
            write(field::ENTRY_EVENT_CODE, code.into());
        }
        if length != 0 {
            write(field::ENTRY_INSTRUCTION_LENGTH, length.into());
        }
    }
}

/// CR2 and DR6, which no field of the VMCS has.
#[inline(never)]
fn debug_in(held: &mut Held, image: &Vmcb) {
    let save = &image.save;
    if save.cr2 != held.cr2 {
        write_cr2(save.cr2);
    }
    if save.dr6 != held.dr6 {
        write_dr6(save.dr6);
    }
    held.has_debug = false;
}

/// Back into the control block, with DR7.
#[inline(never)]
pub(super) fn debug_out(vmx: &mut Vmx, image: &mut Vmcb) {
    let (held, save) = (&mut vmx.held, &mut image.save);
    (held.cr2, held.dr6) = (read_cr2(), read_dr6());
    (save.cr2, save.dr6, save.dr7) = (held.cr2, held.dr6, read(field::GUEST_DR7));
    held.has_debug = true;
}

/// Whether the guest is in 64-bit code.
#[cold]
fn is_64_bit() -> bool {
    const LONG: u64 = 1 << 13;
    read(field::GUEST_CS_RIGHTS) & LONG != 0
}

/// After an exit.
#[inline(always)]
pub(super) fn out(vmx: &mut Vmx, image: &mut Vmcb) {
    let held = &mut vmx.held;
    image.control.exit_code = word(read(field::EXIT_REASON)).into();
    let left = Left {
        rip: read(field::GUEST_RIP),
        rflags: read(field::GUEST_RFLAGS),
        interruptibility: word(read(field::GUEST_INTERRUPTIBILITY)),
        length: read(field::EXIT_INSTRUCTION_LENGTH),
        interrupted: Information(word(read(field::IDT_VECTORING))),
    };
    vmx_image::exit(image, &mut held.fields, &left, || word(read(field::IDT_VECTORING_CODE)));
    if left.rflags & rflags::TF != 0 {
        // What follows may end a step.
        debug_out(vmx, image);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "fields of 16 bits")]
pub(super) const fn low(value: u64) -> u16 {
    value as u16
}

#[expect(clippy::cast_possible_truncation, reason = "fields of 32 bits")]
pub(super) const fn word(value: u64) -> u32 {
    value as u32
}

#[inline(always)]
fn read_cr2() -> u64 {
    let value;
    // SAFETY: reading it has no effect.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[inline(always)]
fn write_dr6(value: u64) {
    // SAFETY: DR6 reports, and the host's DR7 enables nothing.
    unsafe { asm!("mov dr6, {}", in(reg) value & 0xffff_ffff, options(nomem, nostack, preserves_flags)) };
}

#[inline(always)]
fn read_dr6() -> u64 {
    let value;
    // SAFETY: reading it has no effect; DR7.GD is clear in the host.
    unsafe { asm!("mov {}, dr6", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}
