//! The part of the guest's machine that its vCPUs share, and the interrupts of its devices.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::Line;
use abi::payload::{PciFunction, VmConfig};
use addr::{Gpa, GpaRange, Hpa};
use partition::Features;
use sched::Pending;
use spin::Mutex;
use stage2::Access;

use super::layout;
use crate::arch::GivenFunctions;
use crate::device::gic::{Distributor, FIRST_SPI};
pub(crate) use crate::device::pl011::Pl011 as Uart;
use crate::frames::Frames;
use crate::vcpu::run::Running;
use crate::vm::Vm;
use crate::vm::fault::Resolved;
use crate::vm::memory::Memory;
use crate::vm::tool_port::ToolPort;

/// Devices of one VM.
pub(crate) struct Platform {
    /// The part of the interrupt controller that all vCPUs share.
    pub(super) distributor: Mutex<Distributor>,
}

impl Platform {
    /// No VM is a child here.
    pub(crate) fn new(config: &VmConfig, _: Option<&Features>, _: &Memory) -> Self {
        Self { distributor: Mutex::new(Distributor::new(config.vcpus)) }
    }
}

/// No VM has the machine's devices here.
pub(crate) fn vcpus_with_devices(cpus: u32) -> u32 {
    cpus
}

/// Says so.
pub(crate) fn take_devices(_: u32) -> Result<Vec<Frames>, String> {
    Err(String::from("a VM has the machine's devices on x86_64 only"))
}

/// No VM has PCI functions here.
#[derive(Debug)]
pub(crate) enum Given {}

impl GivenFunctions for Given {
    fn take(_: &[PciFunction]) -> Result<Self, String> {
        Err(String::from("a VM has PCI functions on x86_64 only"))
    }

    fn is_ready(&mut self) -> Result<bool, String> {
        match *self {}
    }

    fn registers(&self) -> impl Iterator<Item = (GpaRange, Hpa)> {
        core::iter::empty()
    }

    fn start(&self, _: &Arc<Vm>) {
        match *self {}
    }
}

/// Delivers the interrupts that a change of the distributor has made pending.
pub(super) fn deliver_news(vm: &Vm) {
    loop {
        let next = vm.platform().distributor.lock().next_news();
        let Some(index) = next else { return };
        if let Some(vcpu) = vm.vcpus().get(index as usize) {
            vcpu.posted().interrupts.announce_spis();
            vm.post(index, Pending::INTERRUPT);
        }
    }
}

#[inline]
pub(super) fn read_serial(vm: &Vm, line: Line, offset: u16) -> u32 {
    vm.serial(line).read(offset, |asserted| serial_interrupt(vm, line, asserted))
}

#[inline]
pub(super) fn write_serial(vm: &Vm, line: Line, offset: u16, value: u32) {
    vm.serial(line).write(offset, value, |asserted| serial_interrupt(vm, line, asserted));
}

/// No VM has children here.
pub(crate) fn fault_of_child(_: &mut Running<'_>, _: Gpa, _: Access) -> Resolved {
    Resolved::Device
}

/// Passes the level of a serial port's line to the interrupt controller.
#[cold]
pub(crate) fn serial_interrupt(vm: &Vm, line: Line, asserted: bool) {
    let (_, interrupt) = layout::serial(line);
    vm.platform().distributor.lock().set_line(FIRST_SPI + interrupt, asserted);
    deliver_news(vm);
}

/// No VM is a parent on this architecture.
pub(crate) fn tool_port(_: &Vm) -> Option<&ToolPort> {
    None
}

/// There is no such port.
pub(crate) fn tool_port_interrupt(_: &Vm, _: bool) {}

/// No VM has children on this architecture.
pub(crate) fn has_orphans(_: &Vm) -> bool {
    false
}

/// There are none.
pub(crate) fn end_orphans(_: &Vm) {}

/// There is no parent.
pub(crate) fn renew_statistics(_: &Vm) {}
