//! The memory layout of the hypervisor's own state, for requests on the control port.

use alloc::string::String;
use alloc::vec::Vec;

use abi::layout::{Content, Layout, Place, Row, Whose};
use addr::Hva;
use vcpu_layout::{Class, LINE, VcpuLayout};

use crate::arch::{Arch, Machine};
use crate::cpu::{self, PerCpu};
use crate::vcpu::Vcpu;
use crate::vm::Vm;

/// The kinds of blocks: one for each vCPU, each pCPU, each VM.
const KINDS: [vcpu_layout::Layout; 3] = [Vcpu::LAYOUT, PerCpu::LAYOUT, Vm::LAYOUT];

/// Pages besides a block that only its owner writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnPages {
    pub(crate) what: &'static str,
    pub(crate) hva: Hva,
    pub(crate) bytes: usize,
}

/// The kind of this number, if there is one.
pub(crate) fn kind(number: u32) -> Option<Layout> {
    let layout = KINDS.get(number as usize)?;
    let mut rows = Vec::new();
    layout.visit(&mut |row| rows.push(row_of(row)));
    Some(Layout {
        name: String::from(layout.name),
        bytes: bytes(layout.size),
        align: bytes(layout.align),
        line: bytes(LINE),
        rows,
    })
}

fn row_of(row: vcpu_layout::Row) -> Row {
    let (content, name, kind) = match row.field {
        None => (Content::Gap, "", ""),
        Some(field) => (content_of(field.content), field.name, field.kind),
    };
    Row {
        depth: u8::try_from(row.depth).unwrap_or(u8::MAX),
        offset: bytes(row.offset),
        bytes: bytes(row.size),
        content,
        name: String::from(name),
        kind: String::from(kind),
    }
}

fn content_of(content: vcpu_layout::Content) -> Content {
    match content {
        vcpu_layout::Content::Class(Class::Owner) => Content::Owner,
        vcpu_layout::Content::Class(Class::Mailbox) => Content::Mailbox,
        vcpu_layout::Content::Class(Class::Frozen) => Content::Frozen,
        vcpu_layout::Content::Class(Class::Cold) => Content::Cold,
        vcpu_layout::Content::Nested(_) => Content::Nested,
        vcpu_layout::Content::Pad => Content::Gap,
    }
}

/// Where the blocks of all pCPUs and of these VMs are.
pub(crate) fn places<'a>(vms: impl Iterator<Item = &'a Vm>) -> Vec<Place> {
    let mut places = Vec::new();
    for cpu in cpu::all() {
        let whose = Whose::Pcpu(cpu.id.0);
        places.push(block::<PerCpu>(whose, cpu.hva()));
        places.extend(cpu.arch.own_pages().map(|pages| own(whose, pages)));
    }
    places.extend(Machine::interrupts_page().map(|page| own(Whose::EachPcpu, page)));
    for vm in vms {
        places.push(block::<Vm>(Whose::Vm(vm.number), Hva(core::ptr::from_ref(vm).addr() as u64)));
        for (index, vcpu) in (0..).zip(vm.vcpus()) {
            let whose = Whose::Vcpu(vm.number, index);
            places.push(block::<Vcpu>(whose, vcpu.hva()));
            places.extend(vcpu.own_pages().iter().map(|&pages| own(whose, pages)));
        }
    }
    places
}

fn block<T: VcpuLayout>(whose: Whose, hva: Hva) -> Place {
    Place { whose, what: String::from(T::LAYOUT.name), hva: hva.0, bytes: bytes(T::LAYOUT.size) }
}

fn own(whose: Whose, pages: OwnPages) -> Place {
    Place { whose, what: String::from(pages.what), hva: pages.hva.0, bytes: bytes(pages.bytes) }
}

fn bytes(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
