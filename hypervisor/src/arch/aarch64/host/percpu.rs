//! The architecture's part of a pCPU's block. A pCPU finds its block by TPIDR_EL2, which no guest can access.

#![expect(unsafe_code, reason = "the register that leads to the block")]

use core::arch::asm;
use core::ptr;

use aarch64_defs::registers::mpidr;
use addr::Hva;
use arm_gic::gicv3::registers::GicrSgi;
use vcpu_layout::{OwnerWord, lay_out};

use super::device_tree::Machine;
use super::{boot, paging};
use crate::arch::aarch64::register::{isb, read_register, write_register};
use crate::cpu::{self, CpuId, MAX_CPUS, PerCpu};
use crate::layout::OwnPages;

/// Bytes of the stack for reports, which must not rely on the interrupted one.
const REPORT_STACK_BYTES: u64 = 16 << 10;

/// Data of one AArch64 pCPU.
#[lay_out]
pub(crate) struct ArchPerCpu {
    /// Top of the stack for reports; the vectors read it here.
    #[layout(frozen)]
    report_stack: Hva,
    /// Affinity: the pCPU's identity for firmware and interrupt controller.
    #[layout(frozen)]
    pub(in crate::arch::aarch64) affinity: u64,
    /// Top of the main stack.
    #[layout(frozen)]
    pub(super) stack: Hva,
    /// Where its redistributor is mapped; 0 before that is known.
    #[layout(owner)]
    pub(super) redistributor: OwnerWord,
    /// Not zero: the guest's timer interrupt was acknowledged, and is the guest's to deactivate.
    #[layout(owner)]
    pub(super) guest_timer_fired: OwnerWord,
    /// Steps against speculative execution at each exit ([`mitigations::arm::Steps::word`]).
    #[layout(owner)]
    pub(in crate::arch::aarch64) steps: OwnerWord,
}

/// Where TPIDR_EL2 leads to: the top of the stack for reports.
pub(super) const REPORT_STACK: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_REPORT_STACK;
/// The same, of the main stack.
pub(super) const STACK: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_STACK;
/// The same, of the steps at an exit.
pub(in crate::arch::aarch64) const STEPS: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_STEPS;

impl ArchPerCpu {
    /// The stacks, and the redistributor's two frames.
    pub(crate) fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        let below = |what, top: Hva, bytes: u64| {
            let length = usize::try_from(bytes).unwrap_or(usize::MAX);
            OwnPages { what, hva: Hva(top.0 - bytes), bytes: length }
        };
        let main = below("stack", self.stack, boot::STACK_BYTES);
        let report = below("report stack", self.report_stack, REPORT_STACK_BYTES);
        let redistributor =
            OwnPages { what: "redistributor", hva: Hva(self.redistributor.get()), bytes: size_of::<GicrSgi>() };
        [main, report, redistributor].into_iter()
    }
}

/// The block of the pCPU that runs this.
#[inline(always)]
pub(crate) fn this() -> &'static PerCpu {
    let block: *const PerCpu;
    // SAFETY: since `install`, TPIDR_EL2 points to the pCPU's block. The answer does not change while a function runs,
    // because the hypervisor never moves a stack to another pCPU: the compiler may ask once and keep it.
    unsafe { asm!("mrs {}, tpidr_el2", out(reg) block, options(pure, nomem, nostack, preserves_flags)) };
    // SAFETY: blocks are never freed, and shared references are all that is ever made.
    unsafe { &*block }
}

/// As [`this`], for code that may run before [`install`].
pub(crate) fn try_this() -> Option<&'static PerCpu> {
    if read_register!("tpidr_el2") == 0 { None } else { Some(this()) }
}

/// The core that a pCPU is a thread of: the first level of affinity numbers threads if MPIDR_EL1.MT says so.
pub(crate) fn core_of(cpu: &PerCpu) -> u64 {
    let numbers_threads = read_register!("mpidr_el1") & mpidr::MT != 0;
    if numbers_threads { cpu.arch.affinity >> 8 } else { cpu.arch.affinity }
}

/// Affinity of the pCPU that runs this.
pub(in crate::arch::aarch64) fn own_affinity() -> u64 {
    read_register!("mpidr_el1") & mpidr::AFFINITY
}

/// Makes the blocks of all pCPUs of the machine. The boot pCPU is number 0, the others follow in the tree's order.
///
/// `boot_stack` is the top of the stack that the boot pCPU is on.
pub(super) fn make(machine: &Machine, boot_stack: Hva) {
    let boot_affinity = own_affinity();
    let others = machine.cpus().iter().copied().filter(|&affinity| affinity != boot_affinity);
    if machine.cpus_found > MAX_CPUS {
        log::warn!(
            "the machine has {} pCPUs, only {MAX_CPUS} are supported; the others stay asleep",
            machine.cpus_found
        );
    }
    let blocks = core::iter::once(boot_affinity).chain(others).take(MAX_CPUS).zip(0..).map(|(affinity, number)| {
        let arch = ArchPerCpu::lay_out(ArchPerCpuFields {
            report_stack: paging::map_stack(REPORT_STACK_BYTES),
            affinity,
            stack: if number == 0 { boot_stack } else { paging::map_stack(boot::STACK_BYTES) },
            redistributor: OwnerWord::new(0),
            guest_timer_fired: OwnerWord::new(0),
            steps: OwnerWord::new(0),
        });
        PerCpu::new(CpuId(number), arch)
    });
    cpu::init(blocks);
}

/// Makes `cpu` the block of the pCPU that runs this.
pub(super) fn install(cpu: &'static PerCpu) {
    // SAFETY: the register is for the hypervisor's own use.
    unsafe { write_register!("tpidr_el2", ptr::from_ref(cpu)) };
    isb();
}
