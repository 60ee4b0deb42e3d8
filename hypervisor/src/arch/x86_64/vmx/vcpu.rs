//! The part of a vCPU for VT-x: its VMCS, and what that holds now.

#![expect(unsafe_code, reason = "loads and clears the VMCS, and MSRs of the guest")]

use alloc::boxed::Box;

use addr::{Gpa, Hpa, Hva};
use vmx_image::{Fields, Quiet};
use x86_64::registers::model_specific::Msr;
use x86_defs::msr;
use x86_defs::vmcb::Vmcb;
use x86_defs::vmx::field;

use super::carry;
use super::vmcs::{self, Region, WriteList};
use crate::arch::x86_64::backend::Passed;
use crate::arch::x86_64::svm::place;
use crate::layout::OwnPages;

/// A VMCS, beside the control block that it is written from.
pub(crate) struct Vmx {
    region: Box<Region>,
    /// The pages that the pCPU has written, if it lists them.
    list: Option<Box<WriteList>>,
    /// The pointer to stage 2.
    pub(super) eptp: u64,
    /// The last entry was by VMLAUNCH, so the next one is by VMRESUME.
    pub(super) is_launched: bool,
    /// It has been written once.
    is_filled: bool,
    /// Registers of speculation that do not exit.
    pub(in crate::arch::x86_64) passed: Passed,
    /// What the fields hold.
    pub(super) held: Held,
}

/// Fields that change often, as they were written or read last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) fields: Fields,
    /// RSP, while the control block is whole.
    pub(super) rsp: u64,
    /// The intercepts for which they were written.
    pub(super) quiet: Quiet,
    pub(super) passed: Passed,
    pub(super) vpid: u32,
    pub(super) cr2: u64,
    pub(super) dr6: u64,
    /// CR2, DR6 and DR7 are in the control block, and not only in the processor.
    pub(super) has_debug: bool,
    /// RSP, segments and all else that exits rarely need are in the control block, and not only in the VMCS.
    pub(super) is_image_whole: bool,
}

impl Vmx {
    pub(crate) fn new(stage2_root: Hpa) -> Self {
        let capability = super::capability();
        Self {
            region: Region::new(capability.revision()),
            list: capability.has_pml().then(WriteList::new),
            eptp: capability.ept_pointer(stage2_root.0),
            is_launched: false,
            is_filled: false,
            passed: Passed::Nothing,
            held: Held::default(),
        }
    }

    pub(crate) fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        let hva = Hva(core::ptr::from_ref(&*self.region).addr() as u64);
        let region = OwnPages { what: "VMCS", hva, bytes: size_of::<Region>() };
        let list = self.list.as_ref().map(|list| {
            let hva = Hva(core::ptr::from_ref(&**list).addr() as u64);
            OwnPages { what: "list of written pages", hva, bytes: size_of::<WriteList>() }
        });
        [region].into_iter().chain(list)
    }

    /// Takes what the pCPU has listed since it was taken last, if it has listed anything. The VMCS is the pCPU's
    /// current one.
    #[inline(always)]
    pub(super) fn take_list(&self) -> Option<impl Iterator<Item = Gpa>> {
        let list = self.list.as_ref()?;
        let next = carry::low(vmcs::read(field::GUEST_PML_INDEX));
        (next != WriteList::LAST).then(|| {
            carry::reset_list();
            list.pages(next)
        })
    }

    /// The vCPU comes to this pCPU.
    pub(crate) fn arrive(&mut self, image: &mut Vmcb) {
        let hpa = self.region.hpa();
        if !self.is_filled {
            // SAFETY: the region is this vCPU's, and no pCPU has had it.
            unsafe { vmcs::clear(hpa) };
        }
        // SAFETY: the region is this vCPU's; the last pCPU has cleared it (`leave`).
        unsafe { vmcs::load(hpa) };
        self.is_launched = false;
        if !self.is_filled {
            carry::fill(self.eptp, image);
            if let Some(list) = &self.list {
                carry::fill_list(list.hpa());
            }
            self.is_filled = true;
        }
        carry::host();
        carry::all_in(self, image);
        write_system_calls(image);
    }

    /// The vCPU leaves this pCPU.
    pub(crate) fn leave(&mut self, image: &mut Vmcb) {
        self.complete(image);
        if image.control.host_use[place::CHANGED] & place::CHANGED_CALLS == 0 {
            read_system_calls(image);
        }
        // SAFETY: the region is this vCPU's, and this pCPU has it.
        unsafe { vmcs::clear(self.region.hpa()) };
    }

    /// What few entries need.
    #[cold]
    pub(super) fn carry_changes(&mut self, image: &mut Vmcb) {
        self.complete(image);
        let changed = image.control.host_use[place::CHANGED];
        if changed & place::CHANGED_CALLS != 0 {
            write_system_calls(image);
        }
        if changed & place::CHANGED_ALL != 0 {
            carry::written_in(self, image);
        }
        if self.passed != self.held.passed {
            carry::pass(self);
        }
        carry::rest_in(image);
    }

    /// The image has CR2, DR6 and DR7 after this.
    #[inline]
    pub(crate) fn show_debug(&mut self, image: &mut Vmcb) {
        let is_written = image.control.host_use[place::CHANGED] & place::CHANGED_ALL != 0;
        if !self.held.has_debug && !is_written {
            carry::debug_out(self, image);
        }
    }

    /// The image has all of the guest's registers after this.
    #[inline]
    pub(super) fn complete(&mut self, image: &mut Vmcb) {
        self.show_debug(image);
        let is_written = image.control.host_use[place::CHANGED] & place::CHANGED_ALL != 0;
        if !self.held.is_image_whole && !is_written {
            carry::rest_out(self, image);
        }
    }
}

/// MSRs of system calls that no field of the VMCS has. The hypervisor uses none of them.
fn write_system_calls(image: &Vmcb) {
    let save = &image.save;
    for (number, value) in [
        (msr::STAR, save.star),
        (msr::LSTAR, save.lstar),
        (msr::CSTAR, save.cstar),
        // Intel's processors refuse its upper half, which AMD's ignore: a parent may have set it for a child.
        (msr::SFMASK, save.sfmask & 0xffff_ffff),
        (msr::KERNEL_GS_BASE, save.kernel_gs_base),
    ] {
        // SAFETY: the values are a guest's own: they came from the same MSRs, or were checked as the guest's writes.
        unsafe { Msr::new(number).write(value) };
    }
}

fn read_system_calls(image: &mut Vmcb) {
    // SAFETY: reading these MSRs has no effect.
    let read = |number: u32| unsafe { Msr::new(number).read() };
    let save = &mut image.save;
    (save.star, save.lstar, save.cstar) = (read(msr::STAR), read(msr::LSTAR), read(msr::CSTAR));
    (save.sfmask, save.kernel_gs_base) = (read(msr::SFMASK), read(msr::KERNEL_GS_BASE));
}
