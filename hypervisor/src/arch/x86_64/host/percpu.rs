//! The architecture's part of a pCPU's block. A pCPU finds its block by the base of GS.
//!
//! `#VMEXIT` leaves the guest's GS base in place. So no code may use the block between it and the `VMLOAD` of the
//! host's state.

#![expect(unsafe_code, reason = "segment bases, descriptor tables and the pointer that they lead to")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::arch::asm;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use addr::Hva;
use vcpu_layout::{Frozen, OwnerField, OwnerWord, lay_out};
use x86_64::VirtAddr;
use x86_64::instructions::segmentation::{CS, SS, Segment};
use x86_64::instructions::tables::load_tss;
use x86_64::registers::model_specific::GsBase;
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable};
use x86_64::structures::tss::TaskStateSegment;

use super::acpi::Machine;
use super::{boot, paging, processor};
use crate::cpu::{self, CpuId, MAX_CPUS, PerCpu};
use crate::layout::OwnPages;

/// Bytes of each stack for an exception that must not rely on the interrupted one.
const EXCEPTION_STACK_BYTES: u64 = 16 << 10;

/// Position in the TSS of the stack for double faults.
pub(super) const IST_DOUBLE_FAULT: u16 = 0;
/// Position in the TSS of the stack for non-maskable interrupts.
pub(super) const IST_NMI: u16 = 1;
/// Position in the TSS of the stack for machine checks.
pub(super) const IST_MACHINE_CHECK: u16 = 2;
const ISTS: usize = 3;

/// Vectors that have arrived and were not ended: bit n of word w is vector `w * 64 + n`.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Arrived(pub(super) [OwnerWord; 4]);

impl OwnerField for Arrived {}

/// Data of one x86-64 pCPU. GS points here.
#[lay_out]
pub(crate) struct ArchPerCpu {
    /// The block around this part: set before its first use.
    #[layout(frozen)]
    block: Frozen<AtomicPtr<PerCpu>>,
    /// Deadline that the local timer is armed for, in TSC ticks; `u64::MAX` when it is not.
    #[layout(owner)]
    pub(super) armed: OwnerWord,
    /// Counts of the local timer's tick, when it has one.
    #[layout(owner)]
    pub(super) tick: OwnerWord,
    /// Added to this pCPU's TSC, so that all pCPUs agree: see [`super::tsc::meet`].
    #[layout(owner)]
    pub(super) clock_offset: OwnerWord,
    /// Vectors that devices have raised here.
    #[layout(owner)]
    pub(super) arrived: Arrived,
    /// SPEC_CTRL of the vCPU that is here, while the hypervisor runs.
    #[layout(owner)]
    pub(in crate::arch::x86_64) spec_ctrl: OwnerWord,
    /// Not zero if that vCPU writes its SPEC_CTRL without an exit.
    #[layout(owner)]
    pub(in crate::arch::x86_64) owns_spec_ctrl: OwnerWord,
    /// Id of the local APIC: where interrupts for this pCPU are sent.
    #[layout(frozen)]
    pub(crate) apic_id: u32,
    /// Top of the main stack.
    #[layout(frozen)]
    pub(super) stack: Hva,
    /// Tops of the stacks for exceptions.
    #[layout(frozen)]
    exception_stacks: [Hva; ISTS],
}

impl ArchPerCpu {
    /// The stacks.
    pub(crate) fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        let below = |what, top: Hva, bytes: u64| {
            let bytes_ = usize::try_from(bytes).unwrap_or(usize::MAX);
            OwnPages { what, hva: Hva(top.0 - bytes), bytes: bytes_ }
        };
        let main = below("stack", self.stack, boot::STACK_BYTES);
        let exceptions = self.exception_stacks.map(|top| below("exception stack", top, EXCEPTION_STACK_BYTES));
        core::iter::once(main).chain(exceptions)
    }
}

/// The block of the pCPU that runs this.
#[inline(always)]
pub(crate) fn this() -> &'static PerCpu {
    let block: *const PerCpu;
    // SAFETY: since `install`, GS points to the pCPU's `ArchPerCpu`. The answer does not change while a function runs,
    // because the hypervisor never moves a stack to another pCPU: the compiler may ask once and keep it.
    unsafe {
        asm!(
            "mov {}, gs:[{}]",
            out(reg) block,
            const ArchPerCpu::OFFSET_BLOCK,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    // SAFETY: blocks are never freed, and shared references are all that is ever made.
    unsafe { &*block }
}

/// The core that a pCPU is a thread of.
pub(crate) fn core_of(cpu: &PerCpu) -> u64 {
    (cpu.arch.apic_id >> processor::thread_bits()).into()
}

/// As [`this`], for code that may run before [`install`].
pub(crate) fn try_this() -> Option<&'static PerCpu> {
    if GsBase::read().is_null() { None } else { Some(this()) }
}

/// Makes the blocks of all pCPUs of the machine. The boot pCPU is number 0, the others follow in the table's order.
///
/// `boot_stack` is the top of the stack that the boot pCPU is on.
pub(super) fn make(machine: &Machine, boot_apic_id: u32, boot_stack: Hva) {
    let others = machine.apic_ids.iter().copied().filter(|&id| id != boot_apic_id);
    let ids: Vec<u32> = core::iter::once(boot_apic_id).chain(others).collect();
    if ids.len() > MAX_CPUS {
        log::warn!("the machine has {} pCPUs, only {MAX_CPUS} are supported; the others stay asleep", ids.len());
    }
    let blocks = ids.iter().take(MAX_CPUS).zip(0..).map(|(&apic_id, number)| {
        let arch = ArchPerCpu::lay_out(ArchPerCpuFields {
            block: Frozen::new(AtomicPtr::new(ptr::null_mut())),
            armed: OwnerWord::new(u64::MAX),
            tick: OwnerWord::new(0),
            clock_offset: OwnerWord::new(0),
            arrived: Arrived::default(),
            spec_ctrl: OwnerWord::new(0),
            owns_spec_ctrl: OwnerWord::new(0),
            apic_id,
            stack: if number == 0 { boot_stack } else { paging::map_stack(boot::STACK_BYTES) },
            exception_stacks: core::array::from_fn(|_| paging::map_stack(EXCEPTION_STACK_BYTES)),
        });
        PerCpu::new(CpuId(number), arch)
    });
    cpu::init(blocks);
    for cpu in cpu::all() {
        cpu.arch.block.store(ptr::from_ref(&**cpu).cast_mut(), Ordering::Relaxed);
    }
}

/// Makes `cpu` the block of the pCPU that runs this: from here on [`this`] can be asked, and the time.
pub(super) fn find_by_gs(cpu: &'static PerCpu) {
    GsBase::write(VirtAddr::from_ptr(&raw const cpu.arch));
}

/// Makes `cpu` the block of the pCPU that runs this, with descriptor tables of its own.
pub(super) fn install(cpu: &'static PerCpu) {
    let mut tss = TaskStateSegment::new();
    // The structure is packed: its array is built aside.
    let mut stacks = tss.interrupt_stack_table;
    for (entry, top) in stacks.iter_mut().zip(cpu.arch.exception_stacks) {
        *entry = VirtAddr::new(top.0);
    }
    tss.interrupt_stack_table = stacks;
    let tss: &'static TaskStateSegment = Box::leak(Box::new(tss));

    let gdt = Box::leak(Box::new(GlobalDescriptorTable::<8>::empty()));
    let code = gdt.append(Descriptor::kernel_code_segment());
    let data = gdt.append(Descriptor::kernel_data_segment());
    let task = gdt.append(Descriptor::tss_segment(tss));
    gdt.load();

    // SAFETY: a 64-bit code segment of the table just loaded.
    unsafe { CS::set_reg(code) };
    // SAFETY: a data segment of it.
    unsafe { SS::set_reg(data) };
    // SAFETY: the descriptor of a TSS that is never freed, loaded by this pCPU only.
    unsafe { load_tss(task) };
    find_by_gs(cpu);
}
