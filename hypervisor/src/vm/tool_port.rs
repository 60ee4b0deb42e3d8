//! The port of a parent by which a program in it speaks to the hypervisor: a virtio console.
//!
//! The guest's side is memory-mapped registers; the device does what they ask for at once. The host's side is a byte
//! stream for the first pCPU ([`control`](crate::control)). The bytes stay in the guest's memory until they are moved,
//! so the port needs no buffers.

use addr::Gpa;
pub(crate) use virtio_console::Session;
use virtio_console::{Absent, Console, GuestMemory};

use super::Vm;
use super::memory::Memory;
use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::device::wired::{Interrupts, Wired};

/// The port of one VM.
pub(crate) struct ToolPort(Wired<Console>);

impl Interrupts for Console {
    fn interrupt(&self) -> bool {
        self.interrupt()
    }
}

impl GuestMemory for Memory {
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Absent> {
        self.read(gpa, into).then_some(()).ok_or(Absent)
    }

    fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Absent> {
        self.write(gpa, from).then_some(()).ok_or(Absent)
    }
}

impl ToolPort {
    /// A port without a driver.
    pub(crate) fn new() -> Self {
        Self(Wired::new(Console::new()))
    }

    /// The guest reads a register.
    pub(crate) fn read(&self, vm: &Vm, offset: u16, bytes: u8) -> u32 {
        self.with(vm, |console| console.read(offset, bytes))
    }

    /// The guest writes a register.
    pub(crate) fn write(&self, vm: &Vm, offset: u16, bytes: u8, value: u32) {
        if self.with(vm, |console| console.write(offset, bytes, value, &vm.memory)) {
            cpu::call_housekeeper();
        }
    }

    /// The session, if a process of the guest has the port open now.
    pub(crate) fn look(&self, vm: &Vm) -> Option<Session> {
        self.with(vm, Console::look)
    }

    /// Copies bytes that the process of this session has written to `into`. Returns their number.
    pub(crate) fn receive(&self, vm: &Vm, session: Session, into: &mut [u8]) -> usize {
        self.with(vm, |console| console.receive(session, into, &vm.memory))
    }

    /// Copies bytes for the process of this session to its buffers. Returns how many of them there was room for.
    pub(crate) fn transmit(&self, vm: &Vm, session: Session, bytes: &[u8]) -> usize {
        self.with(vm, |console| console.transmit(session, bytes, &vm.memory))
    }

    fn with<R>(&self, vm: &Vm, act: impl FnOnce(&mut Console) -> R) -> R {
        self.0.with(act, |asserted| Machine::tool_port_interrupt(vm, asserted))
    }
}
