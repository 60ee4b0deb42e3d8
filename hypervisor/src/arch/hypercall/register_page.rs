//! The register page of a child's vCPU: a page of the parent that shows the registers of a suspended vCPU.
//!
//! It is true from its mapping until the vCPU first runs. From then on it says that it is not, and the parent asks by
//! hypercall: to fill it at each exit would cost more than the calls that it saves. What the parent writes there, and
//! declares as changed, counts at any time.

use addr::Gpa;
use hyperv_defs::Status;
use hyperv_defs::page::{RegisterPage, register_class};
use hyperv_defs::register::{Register, RegisterValue};
use hyperv_defs::wire::{U16, U64};

use super::held::Held;
use crate::arch::machine::registers::{read, write};
use crate::vm::VcpuRef;
use crate::vm::memory::Memory;

/// Fills the page at `gpa` of the parent, whose memory this is.
pub(super) fn fill(vcpu: &VcpuRef, parent: &Memory, gpa: Gpa) -> Result<(), Status> {
    let page = Held::with(vcpu, shown)?;
    if parent.write(gpa, page.bytes()) { Ok(()) } else { Err(Status::InvalidParameter) }
}

/// The vCPU is about to run: takes over what the parent has changed on the page. From now on the page is not true.
pub(super) fn take_over(vcpu: &VcpuRef, parent: &Memory, gpa: Gpa) {
    let mut head = [0; VOID.len()];
    if !parent.read(gpa, &mut head) || head == VOID {
        return;
    }
    take_changes_over(vcpu, parent, gpa);
}

/// The start of a page that is not true and where nothing was changed: the version, whether the page is true, and what
/// was changed.
const VOID: [u8; size_of::<u64>()] = (RegisterPage::VERSION as u64).to_le_bytes();

#[cold]
fn take_changes_over(vcpu: &VcpuRef, parent: &Memory, gpa: Gpa) {
    let mut bytes = [0; size_of::<RegisterPage>()];
    if !parent.read(gpa, &mut bytes) || !parent.write(gpa, &VOID) {
        return;
    }
    // Values that do not exist are the parent's mistake, and are left out.
    if let Some(page) = RegisterPage::from_bytes(&bytes) {
        Held::with(vcpu, |held| {
            for (name, value) in changed(&page) {
                let _ = write(held, name, value);
            }
        });
    }
}

fn shown(held: &mut Held<'_>) -> Result<RegisterPage, Status> {
    let mut word = |name| read(held, name).map(|value| U64::new(value.as_u64()));
    let mut page = RegisterPage {
        version: U16::new(RegisterPage::VERSION),
        is_valid: 1,
        rip: word(Register::Rip)?,
        rflags: word(Register::Rflags)?,
        cr0: word(Register::Cr0)?,
        cr3: word(Register::Cr3)?,
        cr4: word(Register::Cr4)?,
        cr8: word(Register::Cr8)?,
        efer: word(Register::Efer)?,
        dr7: word(Register::Dr7)?,
        pending_interruption: word(Register::PendingInterruption)?,
        interrupt_state: word(Register::InterruptState)?,
        xfem: word(Register::Xfem)?,
        ..RegisterPage::default()
    };
    for (number, gpr) in (0..).zip(&mut page.gprs) {
        *gpr = word(Register::Gpr(number))?;
    }
    for (number, xmm) in (0..).zip(&mut page.xmm) {
        xmm.copy_from_slice(read(held, Register::Xmm(number))?.bytes());
    }
    for (number, segment) in (0..).zip(&mut page.segments) {
        *segment = read(held, Register::Segment(number))?.into();
    }
    Ok(page)
}

/// The registers that the parent has changed.
fn changed(page: &RegisterPage) -> impl Iterator<Item = (Register, RegisterValue)> + '_ {
    let has = |class| page.dirty.get() & class != 0;
    let word = |value: U64| RegisterValue::from(value.get());
    let gprs = (0..).zip(page.gprs).map(move |(number, value)| (Register::Gpr(number), word(value)));
    let segments = (0..).zip(page.segments).map(|(number, value)| (Register::Segment(number), value.into()));
    let xmm = (0..)
        .zip(page.xmm)
        .filter_map(|(number, value)| RegisterValue::from_bytes(&value).map(|value| (Register::Xmm(number), value)));
    gprs.filter(move |_| has(register_class::GENERAL))
        .chain(has(register_class::IP).then(|| (Register::Rip, word(page.rip))))
        .chain(has(register_class::FLAGS).then(|| (Register::Rflags, word(page.rflags))))
        .chain(segments.filter(move |_| has(register_class::SEGMENT)))
        .chain(xmm.filter(move |_| has(register_class::XMM)))
}
