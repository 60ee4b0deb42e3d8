//! Exits of a child that its parent's virtual machine monitor handles: accesses to ports and to devices' registers,
//! accesses to memory that is not there now, and mistakes that end any other VM.
//!
//! Everything else is handled as for any VM: the local APIC, CPUID, MSRs, HLT, hypercalls, exceptions.

use addr::{Gpa, PAGE_BYTES, PageSize};
use hyperv_defs::message::{
    INSTRUCTION_BYTES, InterceptAccess, InterceptHeader, MemoryIntercept, MessageType, PortIntercept, execution,
};
use hyperv_defs::register::SegmentRegister;
use hyperv_defs::wire::{U16, U32, U64};
use log::debug;
use stage2::Access;
use x86_defs::registers::{Segment, cr0, efer};
use x86_emulate::Outcome;

use super::mmio;
use super::state::{Registers, State as _, gpr};
use super::vcpu::ArchVcpu;
use crate::arch::x86_64::backend::{Injection as _, PortAccess};
use crate::arch::{Arch as _, Machine};
use crate::vcpu::run::{Next, Running};
use crate::vm::child::{intercept, wait_between_instructions};
use crate::vm::fault::{Needs, Resolved};

/// A child's IN, OUT, INS or OUTS, with a REP prefix or without.
#[inline(never)]
pub(in crate::arch::x86_64) fn port(run: &mut Running<'_>, port: PortAccess, is_repeated: bool) -> Next {
    let arch = &run.owner.arch;
    let registers = arch.hardware.registers();
    let [length, ..] = port.next_rip.wrapping_sub(registers.rip).to_le_bytes();
    let access = if port.is_in { InterceptAccess::Read } else { InterceptAccess::Write };
    let payload = PortIntercept {
        header: header(arch, run.index, &registers, length, access),
        port: U16::new(port.port),
        access_info: PortIntercept::info(port.bytes, port.is_string, is_repeated),
        rax: U64::new(registers.rax),
        ds: segment(&registers.ds),
        es: segment(&registers.es),
        rcx: U64::new(arch.gprs[gpr::RCX]),
        rsi: U64::new(arch.gprs[gpr::RSI]),
        rdi: U64::new(arch.gprs[gpr::RDI]),
        ..PortIntercept::default()
    };
    intercept(run, MessageType::X64IoPortIntercept, payload.bytes())
}

/// Whether the parent handles a child's access at `gpa`, where the child has no memory: unless it is to the vCPU's own
/// local APIC.
#[inline]
pub(in crate::arch::x86_64) fn handles(run: &Running<'_>, gpa: Gpa) -> bool {
    run.vm.as_child().is_some() && gpa.page(PageSize::Size4K) != Gpa(run.owner.arch.apic.mmio_base())
}

/// A child accesses `gpa`, where it has no memory.
#[inline(never)]
pub(in crate::arch::x86_64) fn device(run: &mut Running<'_>, gpa: Gpa, needs: Needs) -> Next {
    if needs.access.execute || needs.is_table_walk || run.owner.arch.hardware.has_interrupted_delivery() {
        // No monitor can emulate this access. On a PC it would read ones from an empty bus, and soon cause a triple
        // fault.
        return unrecoverable(run, "has code, page tables or a stack where there is no memory");
    }
    if needs.access.write && rings(run, gpa) {
        return Next::Resume;
    }
    memory(run, MessageType::UnmappedGpa, gpa, needs)
}

/// Whether a child's write at `gpa` is a doorbell. Then the parent is notified, and the instruction is done.
fn rings(run: &mut Running<'_>, gpa: Gpa) -> bool {
    let vm = run.vm;
    let Some(child) = vm.as_child().filter(|child| child.doorbells.is_at(gpa)) else { return false };
    let Some(store) = mmio::store(run) else { return false };
    let [bytes, ..] = store.width.bytes().to_le_bytes();
    let is_on_page = gpa.offset_in(PageSize::Size4K) + u64::from(bytes) <= PAGE_BYTES;
    let Some(port) = child.doorbells.find(gpa, bytes, store.value).filter(|_| is_on_page) else { return false };
    let Some(children) = child.parent.platform().children() else { return false };
    let is_rung = children.mail.ring(&child.parent, child.resumer(run.index), port);
    if is_rung {
        run.owner.arch.skip_to(store.next_rip);
    }
    is_rung
}

/// A child accesses memory that its parent has taken away for now. It tries again once the parent has served the fault.
#[inline(never)]
pub(in crate::arch::x86_64) fn not_here_now(run: &mut Running<'_>, gpa: Gpa, needs: Needs) -> Next {
    run.owner.arch.before_instruction();
    memory(run, MessageType::GpaIntercept, gpa, needs)
}

/// The hypervisor needs code or a page table of a child at `gpa`, and did not find it. The instruction is tried again
/// when the parent has brought it back.
#[cold]
pub(in crate::arch::x86_64) fn unbacked(run: &mut Running<'_>, gpa: Gpa) -> Next {
    again_with(run, gpa).unwrap_or_else(|| unrecoverable(run, "has code or page tables where there is no memory"))
}

/// The hypervisor must read a child's memory at `gpa`, and has not found it. The instruction is tried again, when the
/// parent has brought it back. `None` if the child has no memory there.
#[cold]
pub(super) fn again_with(run: &mut Running<'_>, gpa: Gpa) -> Option<Next> {
    match missing(run, gpa, Access::READ) {
        Missing::Nowhere => None,
        Missing::Away => Some(not_here_now(run, gpa, Needs { access: Access::READ, is_table_walk: true })),
        Missing::Back => {
            run.owner.arch.before_instruction();
            Some(Next::Resume)
        }
    }
}

/// Why the hypervisor did not find a child's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// The parent has taken it away for now.
    Away,
    /// It is there now.
    Back,
    /// The child has no memory there, or not with these rights.
    Nowhere,
}

/// Why the hypervisor did not find a child's memory at `gpa`, with these rights.
pub(super) fn missing(run: &mut Running<'_>, gpa: Gpa, needs: Access) -> Missing {
    match Machine::fault_of_child(run, gpa, needs) {
        Resolved::NoAccess => Missing::Away,
        Resolved::Again(_) => Missing::Back,
        Resolved::Device | Resolved::DeviceOfChild | Resolved::Deposited | Resolved::End(_) => Missing::Nowhere,
    }
}

/// Between two instructions: the hypervisor must write to a child's page at `gpa` before the next one, and its parent
/// has taken it away for now. The vCPU stays out of its guest until the parent has served the fault.
#[cold]
pub(super) fn wait_for(run: &mut Running<'_>, gpa: Gpa) {
    let needs = Needs { access: Access::READ_WRITE, is_table_walk: false };
    wait_between_instructions(run, |run| memory(run, MessageType::GpaIntercept, gpa, needs));
}

fn memory(run: &mut Running<'_>, kind: MessageType, gpa: Gpa, needs: Needs) -> Next {
    const WRITE_BACK: u32 = 6;
    // The parent's kernel handles the fault without decoding the instruction.
    let mut instruction = [0; INSTRUCTION_BYTES];
    let mut instruction_length = 0;
    if kind == MessageType::UnmappedGpa {
        match mmio::code_at_rip(run) {
            Ok(window) => (instruction, instruction_length) = (window.to_bytes(), window.length()),
            Err(Outcome::Unbacked(at)) => return unbacked(run, at),
            Err(_) => {}
        }
    }
    let access = match needs.access {
        access if access.execute => InterceptAccess::Execute,
        access if access.write => InterceptAccess::Write,
        _ => InterceptAccess::Read,
    };
    let arch = &run.owner.arch;
    let payload = MemoryIntercept {
        header: header(arch, run.index, &arch.hardware.registers(), 0, access),
        cache_type: U32::new(WRITE_BACK),
        instruction_length,
        tpr_priority: arch.apic.cr8() << 4,
        gpa: U64::new(gpa.0),
        instruction,
        ..MemoryIntercept::default()
    };
    intercept(run, kind, payload.bytes())
}

/// A child makes a mistake that would end any other VM. Its parent decides.
#[cold]
pub(in crate::arch::x86_64) fn unrecoverable(run: &mut Running<'_>, what: &str) -> Next {
    debug!("{} vCPU {}: {what}, {}", run.vm.name(), run.index, run.owner.arch.whereabouts());
    let arch = &run.owner.arch;
    let payload = header(arch, run.index, &arch.hardware.registers(), 0, InterceptAccess::Read);
    intercept(run, MessageType::UnrecoverableException, payload.bytes())
}

fn header(arch: &ArchVcpu, index: u32, registers: &Registers, length: u8, access: InterceptAccess) -> InterceptHeader {
    let control = registers.control;
    let when = |is_set, bit| if is_set { bit } else { 0 };
    let state = u16::from(registers.cpl & 3)
        | when(control.cr0 & cr0::PE != 0, execution::CR0_PE)
        | when(control.cr0 & cr0::AM != 0, execution::CR0_AM)
        | when(control.efer & efer::LMA != 0, execution::EFER_LMA)
        | when(arch.hardware.is_in_shadow(), execution::INTERRUPT_SHADOW);
    InterceptHeader {
        vp_index: U32::new(index),
        length_and_cr8: InterceptHeader::length_and_cr8(length, arch.apic.cr8()),
        access: access as u8,
        execution_state: U16::new(state),
        cs: segment(&registers.cs),
        rip: U64::new(registers.rip),
        rflags: U64::new(registers.rflags),
    }
}

/// A segment register as in messages: its attributes are those of a descriptor, with a gap where the limit is.
fn segment(segment: &Segment) -> SegmentRegister {
    let packed = segment.attributes;
    SegmentRegister {
        base: U64::new(segment.base),
        limit: U32::new(segment.limit),
        selector: U16::new(segment.selector),
        attributes: U16::new(packed & 0xff | (packed & 0xf00) << 4),
    }
}
