//! The PC that a guest sees: which device answers at which port, and how interrupts reach the vCPUs.
//!
//! There are only the devices that kernels need: two serial ports, a clock, the counter for calibrating clocks, the
//! power-off and reset registers, an I/O APIC, a PCI bus with its bridge and the functions that the VM was given.
//! Everything else is an empty bus: reads give ones, writes are dropped.

use alloc::boxed::Box;
use core::sync::atomic::AtomicI64;

use abi::control::{Line, StopReason};
use abi::payload::{self, Role, VmConfig};
use addr::Gpa;
use partition::Features;
use serde::{Deserialize, Serialize};
use spin::Mutex;
use x86_boot::layout::{PCI_ADDRESS_PORT, RTC_PORT, SERIAL_PORTS, TOOL_PORT, TOOL_PORT_PIN};

use super::cpuid::CpuidTable;
pub(crate) use super::functions::Given;
use super::hyperv::HyperV;
pub(crate) use super::hyperv::fault_of_child;
use super::own_machine::{self, MachineOfVm};
pub(crate) use super::own_machine::{take_devices, vcpus_with_devices};
use super::state::State as _;
use super::{delivery, mmio};
use crate::arch::hypercall::Children;
use crate::arch::x86_64::backend::PortAccess;
use crate::arch::x86_64::host::{tsc, wall_clock};
use crate::device::io_apic::{self, IoApic};
use crate::device::pci::{self, Pci, Written};
use crate::device::pit::{self, Pit};
use crate::device::power::{self, PowerEvent};
use crate::device::rtc::{self, Rtc};
use crate::device::uart;
pub(crate) use crate::device::uart::Uart;
use crate::io::iommu::Devices;
use crate::vcpu::run::{Next, Running};
use crate::vcpu::unannounced::Unannounced;
use crate::vm::Vm;
use crate::vm::memory::Memory;
use crate::vm::tool_port::ToolPort;

/// Devices and tables of one VM.
pub(crate) struct Platform {
    pub(in crate::arch::x86_64) cpuid: CpuidTable,
    /// The Hyper-V interface, if it is offered.
    pub(in crate::arch::x86_64) hyperv: Option<HyperV>,
    pub(super) io_apic: Mutex<IoApic>,
    /// What its devices have sent to many vCPUs.
    pub(super) unannounced: Unannounced,
    pub(super) pci: Mutex<Pci>,
    pit: Mutex<Pit>,
    rtc: Mutex<Rtc>,
    /// What the guest's vCPUs add to the host's counter, if the VM is no child.
    pub(super) tsc_offset: AtomicI64,
    /// For programs in a parent.
    tool_port: Option<Box<ToolPort>>,
    /// If it has the machine's devices.
    pub(super) own_machine: Option<Box<MachineOfVm>>,
}

const COM1: u16 = SERIAL_PORTS[0].0;
const COM1_LAST: u16 = COM1 + uart::PORTS - 1;
const COM2: u16 = SERIAL_PORTS[1].0;
const COM2_LAST: u16 = COM2 + uart::PORTS - 1;
const RTC_LAST: u16 = RTC_PORT + 1;

impl Platform {
    /// Of a VM with memory at these addresses. A child has none of its own.
    pub(crate) fn new(config: &VmConfig, child: Option<&Features>, memory: &Memory) -> Self {
        let cpuid = CpuidTable::new(config, child);
        Self {
            hyperv: HyperV::new(config, &cpuid, child, &memory.backing.regions),
            cpuid,
            io_apic: Mutex::new(IoApic::new(0)),
            unannounced: Unannounced::default(),
            pci: Mutex::new(Pci::with_functions(given_in(memory).into_iter().flat_map(Given::spaces))),
            pit: Mutex::new(Pit::new()),
            rtc: Mutex::new(Rtc::new()),
            tsc_offset: AtomicI64::new(0),
            tool_port: (config.role == Role::Parent).then(|| Box::new(ToolPort::new())),
            own_machine: (config.devices == payload::Devices::All).then(|| Box::new(MachineOfVm::new())),
        }
    }
}

/// What a file keeps of the devices that all vCPUs share. The power switch has no state.
#[derive(Serialize, Deserialize)]
pub(super) struct DevicesState {
    io_apic: io_apic::State,
    pci: pci::State,
    pit: pit::State,
    rtc: rtc::State,
}

/// For a file, while the VM is paused.
impl Platform {
    /// State of the devices, when it was `nanos` on the host's clock.
    pub(super) fn devices(&self, nanos: u64) -> DevicesState {
        DevicesState {
            io_apic: self.io_apic.lock().state(),
            pci: self.pci.lock().state(),
            pit: self.pit.lock().state(nanos),
            rtc: self.rtc.lock().state(),
        }
    }

    /// Takes over their state. `None` if they cannot have it.
    pub(super) fn set_devices(&self, state: &DevicesState, nanos: u64) -> Option<()> {
        *self.pit.lock() = Pit::with_state(&state.pit, nanos)?;
        *self.io_apic.lock() = IoApic::with_state(&state.io_apic);
        *self.pci.lock() = Pci::with_state(&state.pci);
        *self.rtc.lock() = Rtc::with_state(&state.rtc);
        Some(())
    }

    /// The VM's time stood still for so long.
    pub(super) fn devices_stood_still(&self, nanos: u64) {
        self.pit.lock().stood_still(nanos);
    }
}

/// Whether a VM has children that it will not end itself.
pub(crate) fn has_orphans(vm: &Vm) -> bool {
    children(vm).is_some_and(|children| children.are_orphans(vm.is_over()))
}

/// Does a part of the end of such children.
pub(crate) fn end_orphans(vm: &Vm) {
    if let Some(children) = children(vm) {
        children.end_all(vm);
    }
}

/// Writes counters into pages of a parent that shall show them, if it is time.
pub(crate) fn renew_statistics(vm: &Vm) {
    if let Some(children) = children(vm) {
        children.renew_statistics(vm);
    }
}

fn children(vm: &Vm) -> Option<&Children> {
    vm.platform().hyperv.as_ref()?.children()
}

/// IN and OUT.
#[inline(always)]
pub(in crate::arch::x86_64) fn port_access(run: &mut Running<'_>, access: PortAccess) -> Next {
    let PortAccess { port, bytes, is_in, is_string, next_rip } = access;
    if is_string {
        return mmio::port_string(run);
    }
    let mask = match bytes {
        1 => 0xff,
        2 => 0xffff,
        _ => 0xffff_ffff,
    };

    let arch = &mut run.owner.arch;
    if is_in {
        let value = u64::from(read(run.vm, port, bytes)) & mask;
        // A 32-bit result clears the upper half of the register, a smaller one keeps the rest.
        let kept = if mask == 0xffff_ffff { 0 } else { arch.hardware.rax() & !mask };
        arch.hardware.set_rax(kept | value);
    } else {
        #[expect(clippy::cast_possible_truncation, reason = "EAX is the low half of RAX")]
        let value = arch.hardware.rax() as u32;
        write(run.vm, run.index, port, bytes, value);
    }

    let arch = &mut run.owner.arch;
    arch.skip_to(next_rip);
    Next::Resume
}

/// A read of `bytes` at a port. All devices except PCI's bridge have byte registers; the upper bytes of a wider access
/// find an empty bus.
pub(super) fn read(vm: &Vm, port: u16, bytes: u8) -> u32 {
    let byte = match port {
        COM1..=COM1_LAST => read_serial(vm, Line::Console, port - COM1),
        COM2..=COM2_LAST => read_serial(vm, Line::Agent, port - COM2),
        RTC_PORT..=RTC_LAST => vm.platform().rtc.lock().read(port - RTC_PORT, wall_clock_seconds()),
        port if power::PORTS.contains(&port) && vm.platform().own_machine.is_none() => power::read(),
        _ => return read_wide(vm, port, bytes),
    };
    EMPTY << 8 | u32::from(byte)
}

/// The value of an empty bus.
const EMPTY: u32 = u32::MAX;

/// A read of a register that is rare or wider than a byte, or of an empty bus.
#[cold]
fn read_wide(vm: &Vm, port: u16, bytes: u8) -> u32 {
    if let Some(machine) = &vm.platform().own_machine {
        return machine.read_port(port, bytes);
    }
    match port {
        pit::FIRST_PORT..=pit::LAST_PORT | pit::GATE_PORT => {
            EMPTY << 8 | u32::from(vm.platform().pit.lock().read(port, tsc::nanos()))
        }
        PCI_ADDRESS_PORT..=pci::LAST_PORT => vm.platform().pci.lock().read_port(port, bytes),
        _ => EMPTY,
    }
}

/// A write of the low `bytes` of `wide` to a port by vCPU `index`.
pub(super) fn write(vm: &Vm, index: u32, port: u16, bytes: u8, wide: u32) {
    let [value, ..] = wide.to_le_bytes();
    match port {
        COM1..=COM1_LAST => write_serial(vm, Line::Console, port - COM1, value),
        COM2..=COM2_LAST => write_serial(vm, Line::Agent, port - COM2, value),
        RTC_PORT..=RTC_LAST => vm.platform().rtc.lock().write(port - RTC_PORT, value),
        port if power::PORTS.contains(&port) && vm.platform().own_machine.is_none() => {
            let (reason, verb) = match power::write(port, value) {
                Some(PowerEvent::PowerOff) => (StopReason::PowerOff, "turned the machine off"),
                Some(PowerEvent::Reset) => (StopReason::Reset, "reset the machine"),
                None => return,
            };
            vm.stop_by(index, reason, format_args!("vCPU {index} {verb}, port {port:#x} value {value:#x}"));
        }
        _ => write_wide(vm, index, port, bytes, wide),
    }
}

/// A write to a register that is rare or wider than a byte, or to an empty bus.
#[cold]
fn write_wide(vm: &Vm, index: u32, port: u16, bytes: u8, wide: u32) {
    if let Some(machine) = &vm.platform().own_machine {
        return machine.write_port(vm, index, port, bytes, wide);
    }
    let [value, ..] = wide.to_le_bytes();
    match port {
        pit::FIRST_PORT..=pit::LAST_PORT | pit::GATE_PORT => vm.platform().pit.lock().write(port, value, tsc::nanos()),
        PCI_ADDRESS_PORT..=pci::LAST_PORT => write_pci(vm, |pci| pci.write_port(port, bytes, wide)),
        _ => {}
    }
}

/// A write to PCI's configuration. Functions that the VM was given do what it means.
pub(super) fn write_pci(vm: &Vm, write: impl FnOnce(&mut Pci) -> Written) {
    let mut pci = vm.platform().pci.lock();
    let written = write(&mut pci);
    let Some(given) = given(vm) else { return };
    for index in written.behind_bridge() {
        if let Some(space) = pci.space(index) {
            given.follow(index, space);
        }
    }
}

/// The PCI functions that the VM was given.
pub(super) fn given(vm: &Vm) -> Option<&Given> {
    given_in(&vm.memory)
}

fn given_in(memory: &Memory) -> Option<&Given> {
    memory.devices().and_then(Devices::given)
}

#[inline]
fn read_serial(vm: &Vm, line: Line, offset: u16) -> u8 {
    vm.serial(line).read(offset, |asserted| serial_interrupt(vm, line, asserted))
}

#[inline]
fn write_serial(vm: &Vm, line: Line, offset: u16, value: u8) {
    vm.serial(line).write(offset, value, |asserted| serial_interrupt(vm, line, asserted));
}

/// Tells the I/O APIC about the interrupt line of a serial port.
#[cold]
pub(crate) fn serial_interrupt(vm: &Vm, line: Line, asserted: bool) {
    let (_, pin) = SERIAL_PORTS[crate::vm::line_index(line)];
    set_line(vm, pin, asserted);
}

/// The port by which programs in a VM speak to the hypervisor, if it is a parent.
pub(crate) fn tool_port(vm: &Vm) -> Option<&ToolPort> {
    vm.platform().tool_port.as_deref()
}

/// Tells the I/O APIC about the interrupt line of that port.
#[cold]
pub(crate) fn tool_port_interrupt(vm: &Vm, asserted: bool) {
    let is_machine = vm.platform().own_machine.is_some();
    set_line(vm, if is_machine { own_machine::TOOL_PORT_PIN } else { TOOL_PORT_PIN }, asserted);
}

/// Where the registers of that port are.
pub(super) fn tool_port_at(vm: &Vm) -> Gpa {
    if vm.platform().own_machine.is_some() { own_machine::tool_port() } else { TOOL_PORT }
}

fn set_line(vm: &Vm, pin: u32, asserted: bool) {
    if let Some(machine) = &vm.platform().own_machine {
        return machine.set_line(vm, pin, asserted);
    }
    let message = vm.platform().io_apic.lock().set_line(pin as usize, asserted);
    if let Some(message) = message {
        delivery::send(vm, None, &message);
    }
}

/// A vCPU ended a level-triggered interrupt.
pub(in crate::arch::x86_64) fn end_of_interrupt(vm: &Vm, vector: u8) {
    if let Some(machine) = &vm.platform().own_machine {
        return machine.end_of_interrupt(vm, vector);
    }
    // The messages are gathered first: sending may take other locks.
    let mut messages = [None; io_apic::PINS];
    let mut io_apic = vm.platform().io_apic.lock();
    for (slot, message) in messages.iter_mut().zip(io_apic.end_of_interrupt(vector)) {
        *slot = Some(message);
    }
    drop(io_apic);
    for (at, message) in messages.iter().enumerate() {
        // Pins with one vector and one target are one request to a local APIC.
        if let Some(message) = message.filter(|_| !messages[..at].contains(message)) {
            delivery::send(vm, None, &message);
        }
    }
}

/// Seconds since 1970.
fn wall_clock_seconds() -> u64 {
    wall_clock::boot_seconds() + tsc::nanos() / 1_000_000_000
}
