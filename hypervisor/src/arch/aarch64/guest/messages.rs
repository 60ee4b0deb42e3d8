//! Messages of the machine's devices, by its ITS, for the VM that has the devices.
//!
//! The guest finds a frame of GICv2m in the place of the ITS's page for devices ([`MsiFrame`]): its kernel has devices
//! write the number of a shared interrupt there. The ITS takes that number as an EventID, and has been told that it is
//! the LPI of the same number ([`its`]). The hypervisor takes the LPI, and makes the guest's interrupt pending.
//!
//! The ITS must know each device before its first message. The guest finds a device by its configuration space, of
//! which each function has a page. So these pages are mapped one by one, at the first access, and before that the ITS
//! is told. A page without a function is never mapped, and reads as all ones: one may appear there when the guest has
//! numbered its buses.
//!
//! A bridge to conventional PCI sends messages with another number than that of the function behind it. Such functions
//! have none.

use alloc::vec::Vec;
use core::fmt::Display;
use core::ops::Range;

use aarch64_boot::{Bridge, Its, MsiFrame, OwnTree};
use aarch64_defs::its::{BYTES, FIRST_LPI, TRANSLATER, TRANSLATION_FRAME};
use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};
use spin::Once;

use crate::arch::aarch64::host::ecam::Ecam;
use crate::arch::aarch64::host::its::{self, Unusable};
use crate::device::gic::Distributor;

/// The most interrupts for messages.
const MOST: u32 = 128;

/// Registers of the frame (Arm SBSA, appendix on GICv2m).
mod register {
    /// MSI_TYPER: the first interrupt, and how many there are.
    pub(super) const TYPER: u64 = 0x8;
}

static MESSAGES: Once<Messages> = Once::new();

struct Messages {
    frame: MsiFrame,
    intids: Range<u32>,
    bridges: Vec<(Bridge, Ecam)>,
}

/// Sets messages up for the VM that will have the devices of `tree`. `end`: the first interrupt that is not free.
pub(super) fn start(tree: &OwnTree<'_>, end: u32) {
    let Some(its) = tree.its().filter(|its| its.registers.bytes() >= BYTES) else { return };
    let free = tree.free_intids(end);
    let intids = free.start..free.end.min(free.start + MOST);
    if intids.is_empty() {
        return log::warn!("devices raise no messages, but use their lines: they use all interrupts");
    }
    match Messages::new(its, intids) {
        Ok(messages) => {
            MESSAGES.call_once(|| messages);
        }
        Err(why) => log::warn!("devices raise no messages, but use their lines: {why}"),
    }
}

/// The frame that the guest finds.
pub(super) fn frame() -> Option<&'static MsiFrame> {
    MESSAGES.get().map(|messages| &messages.frame)
}

/// The interrupts that are messages.
pub(super) fn intids() -> Range<u32> {
    MESSAGES.get().map_or(0..0, |messages| messages.intids.clone())
}

/// The configuration spaces, which are mapped one function at a time.
pub(super) fn configuration_spaces() -> impl Iterator<Item = HpaRange> {
    MESSAGES.get().into_iter().flat_map(|messages| messages.bridges.iter().map(|(bridge, _)| bridge.ecam))
}

/// An address in a configuration space.
pub(super) enum Function {
    /// That of a function, whose page is this one.
    Here(GpaRange),
    /// There is none.
    Missing,
}

/// What is at this address of a configuration space. If it is a function, it can send messages from now on.
pub(super) fn function_at(gpa: Gpa) -> Option<Function> {
    let page = Hpa(gpa.0 & !(PAGE_BYTES - 1));
    let (bridge, ecam) = MESSAGES.get()?.bridges.iter().find(|(bridge, _)| bridge.ecam.contains(page))?;
    if !ecam.has_function(page.0 - bridge.ecam.start.0) {
        return Some(Function::Missing);
    }
    if let Some(device) = bridge.device_at(page)
        && let Err(why) = its::map_device(device)
    {
        say_no_messages(device, &why);
    }
    GpaRange::new(Gpa(page.0), PAGE_BYTES).map(Function::Here)
}

#[cold]
fn say_no_messages(device: u32, why: &dyn Display) {
    log::warn!("device {device:#x} raises no messages: {why}");
}

/// The guest reads where it has nothing mapped: registers of the frame, or the configuration of no function.
pub(super) fn read(gpa: Gpa) -> Option<u64> {
    let messages = MESSAGES.get()?;
    if messages.bridges.iter().any(|(bridge, _)| bridge.ecam.contains(Hpa(gpa.0))) {
        return Some(u64::MAX);
    }
    let count = messages.intids.end - messages.intids.start;
    match offset_in_frame(messages, gpa)? {
        register::TYPER => Some((messages.intids.start << 16 | count).into()),
        _ => Some(0),
    }
}

/// The guest writes there. Returns whether there is something; it may have made an interrupt pending.
pub(super) fn write(distributor: &mut Distributor, gpa: Gpa, value: u64) -> bool {
    let Some(messages) = MESSAGES.get() else { return false };
    let offset = offset_in_frame(messages, gpa);
    if offset == Some(TRANSLATER)
        && let Some(intid) = u32::try_from(value).ok().filter(|intid| messages.intids.contains(intid))
    {
        distributor.message(intid);
    }
    offset.is_some() || messages.bridges.iter().any(|(bridge, _)| bridge.ecam.contains(Hpa(gpa.0)))
}

/// The interrupt that this LPI is.
pub(super) fn intid_of(lpi: u32) -> Option<u32> {
    lpi.checked_sub(FIRST_LPI).filter(|intid| intids().contains(intid))
}

fn offset_in_frame(messages: &Messages, gpa: Gpa) -> Option<u64> {
    let frame = messages.frame.registers;
    frame.contains(Hpa(gpa.0)).then(|| gpa.0 - frame.start.0)
}

impl Messages {
    fn new(its: Its, intids: Range<u32>) -> Result<Self, Unusable> {
        let Its { phandle, registers, bridges } = its;
        let devices_end = bridges.iter().map(Bridge::devices_end).max().unwrap_or(0);
        its::start(&registers, devices_end, intids.clone())?;
        let page = Hpa(registers.start.0 + TRANSLATION_FRAME);
        let registers = HpaRange::new(page, PAGE_BYTES).ok_or(Unusable::TooSmall)?;
        let bridges = bridges.into_iter().map(|bridge| {
            let ecam = Ecam::map(&bridge.ecam);
            (bridge, ecam)
        });
        let frame = MsiFrame { phandle, registers, intids: Some(intids.clone()) };
        Ok(Self { frame, intids, bridges: bridges.collect() })
    }
}
