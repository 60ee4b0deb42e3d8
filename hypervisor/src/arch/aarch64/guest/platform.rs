//! The part of the guest's machine that its vCPUs share, and the interrupts of its devices.

use alloc::string::String;
use alloc::sync::Arc;

use abi::control::Line;
use abi::payload::{Devices, PciFunction, VmConfig};
use addr::{Gpa, GpaRange, Hpa};
use partition::Features;
use sched::Pending;
use spin::Mutex;
use stage2::Access;

use super::layout::{self, Layout};
use super::own_machine::{self, MachineOfVm};
pub(crate) use super::own_machine::{take_devices, vcpus_with_devices};
use crate::arch::GivenFunctions;
use crate::cpu::step::Step;
use crate::device::gic::{Distributor, FIRST_SPI};
pub(crate) use crate::device::pl011::Pl011 as Uart;
use crate::vcpu::run::Running;
use crate::vcpu::unsent;
use crate::vm::Vm;
use crate::vm::fault::Resolved;
use crate::vm::memory::Memory;
use crate::vm::tool_port::ToolPort;

/// Devices of one VM.
pub(crate) struct Platform {
    /// The part of the interrupt controller that all vCPUs share.
    pub(super) distributor: Mutex<Distributor>,
    /// Where the devices are.
    pub(super) layout: Layout,
    /// The machine, if the VM has its devices.
    pub(super) own_machine: Option<MachineOfVm>,
}

impl Platform {
    /// No VM is a child here.
    pub(crate) fn new(config: &VmConfig, _: Option<&Features>, memory: &Memory) -> Self {
        let mut distributor = Distributor::new(config.vcpus);
        let mut layout = layout::VIRTUAL;
        let own_machine = (config.devices == Devices::All).then(|| {
            layout = own_machine::layout();
            own_machine::map_frame(memory);
            MachineOfVm::new(&layout, &mut distributor)
        });
        Self { distributor: Mutex::new(distributor), layout, own_machine }
    }
}

/// No VM has PCI functions here.
#[derive(Debug)]
pub(crate) enum Given {}

impl GivenFunctions for Given {
    fn take(_: &[PciFunction]) -> Result<Self, String> {
        Err(String::from(
            "single PCI functions need an IOMMU, and Dunlin drives none of this architecture; \
             devices = \"all\" gives a VM all of them",
        ))
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
    while deliver_some_news(vm) {}
}

/// The same for a change by a vCPU that this pCPU runs. It may concern all others, so it is done in steps
/// ([`unsent`]).
pub(super) fn deliver_news_of(run: &Running<'_>) {
    // Whoever has more to send goes on with both.
    if !run.vcpu.mailbox().has(Pending::SEND) && deliver_some_news(run.vm) {
        unsent::keep_out(run.vcpu);
    }
}

/// Does one step of that. Returns whether there may be more.
pub(super) fn deliver_some_news(vm: &Vm) -> bool {
    if vm.platform().own_machine.is_some() {
        own_machine::carry_out(vm);
    }
    let next = vm.platform().distributor.lock().next_news();
    next.is_some_and(|first| tell_some(vm, first))
}

/// Tells the vCPU `first` and others, as far as a step goes. Returns whether there may be more.
#[cold]
fn tell_some(vm: &Vm, first: u32) -> bool {
    let step = Step::begin();
    let mut next = Some(first);
    while let Some(index) = next {
        if let Some(vcpu) = vm.vcpus().get(index as usize) {
            vcpu.posted().interrupts.announce_spis();
            vm.post(index, Pending::INTERRUPT);
        }
        if step.is_over() {
            return true;
        }
        next = vm.platform().distributor.lock().next_news();
    }
    false
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
    let (_, interrupt) = vm.platform().layout.serial(line);
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
