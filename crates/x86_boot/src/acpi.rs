//! The ACPI tables: how a guest finds its processors, interrupt controllers, serial ports, clock, and the power-off
//! register.
//!
//! ```text
//! RSDP -> XSDT -> FADT (hardware-reduced) -> DSDT: \_S5, COM1, COM2, RTC, PCI0, MBRD; a parent's has VMBS, TOOL
//!              -> MADT: one local APIC per vCPU, one I/O APIC
//!              -> MCFG: the configuration spaces of PCI bus 0
//! ```
//!
//! Hardware-reduced means: no PIC, no PIT interrupt, no power management timer, no SCI, no FACS. Of the fixed registers
//! only sleep control, sleep status and reset exist. Linux then assumes no ISA interrupts either, so IRQ 0-15 have no
//! defaults (edge, active high, identity mapped).
//!
//! So the serial ports name their I/O APIC pin by an *extended* interrupt descriptor, whose trigger mode and polarity
//! Linux uses directly. For the short ISA descriptor it would need a legacy override first. For the same reason the
//! clock is declared here, without an interrupt: otherwise Linux assumes one with IRQ 8, and then fails to get it.

use alloc::vec::Vec;

use abi::payload::{MAX_VCPUS, Role};
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package,
    ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as RegisterSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use addr::Gpa;

use crate::layout::{
    IO_APIC, LOCAL_APIC, PCI_ADDRESS_PORT, PCI_DATA_PORT, PCI_ECAM, PCI_ECAM_BYTES, PCI_MEMORY, RESET_PORT, RESET_STUB,
    RESET_VALUE, RSDP, RTC_PORT, SERIAL_PORTS, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_OFF, TOOL_PORT,
    TOOL_PORT_BYTES, TOOL_PORT_PIN,
};
use crate::{GuestMemory, OutsideMemory};

pub(crate) const OEM: [u8; 6] = *b"DUNLIN";
pub(crate) const OEM_TABLE: [u8; 8] = *b"DUNLINVM";
pub(crate) const OEM_REVISION: u32 = 1;
pub(crate) const HEADER_BYTES: u32 = 36;

/// First APIC id that needs an x2APIC entry: 255 is the broadcast of the xAPIC.
const FIRST_X2APIC_ID: u32 = 255;
/// Register index of the century byte in the clock's memory.
const RTC_CENTURY: u8 = 0x32;

/// IAPC_BOOT_ARCH bit 2: do not touch VGA. Clear are "legacy devices", "8042", and bit 5, "no CMOS clock".
const NO_VGA: u16 = 1 << 2;

// The largest MADT has an entry of 16 bytes per vCPU; 4 KiB are enough for everything else.
const _: () = assert!(RSDP.0 + 4096 + 16 * MAX_VCPUS as u64 <= RESET_STUB.0);

/// Writes the tables for a guest with `vcpus` vCPUs, at most [`MAX_VCPUS`]. The RSDP is last: it needs the address of
/// the XSDT, which needs all others.
pub(crate) fn write(vcpus: u32, role: Role, memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
    let mut next = Gpa(RSDP.0 + Rsdp::len() as u64);
    let mut place = |table: Vec<u8>, memory: &mut _| {
        let gpa = Gpa(next.0.next_multiple_of(16));
        next = Gpa(gpa.0 + table.len() as u64);
        GuestMemory::write(memory, gpa, &table).map(|()| gpa)
    };

    let dsdt = place(dsdt(role, memory), memory)?;
    let fadt = place(bytes(&fadt(dsdt)), memory)?;
    let madt = place(madt(vcpus), memory)?;
    let mcfg = place(bytes(&mcfg()), memory)?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt.0);
    xsdt.add_entry(madt.0);
    xsdt.add_entry(mcfg.0);
    let xsdt = place(bytes(&xsdt), memory)?;
    memory.write(RSDP, &bytes(&Rsdp::new(OEM, xsdt.0)))
}

/// Fixed ACPI description table (ACPI 6.5, 5.2.9).
fn fadt(dsdt: Gpa) -> FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt.0)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        // There are no fixed power and sleep buttons and no wake-up by the clock; the flags say so.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc);
    fadt.iapc_boot_arch = NO_VGA.into();
    fadt.century = RTC_CENTURY;
    fadt.reset_reg = io_register(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = io_register(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = io_register(SLEEP_STATUS_PORT);
    fadt.finalize()
}

fn io_register(port: u16) -> GAS {
    GAS::new(RegisterSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}

/// Multiple APIC description table (ACPI 6.5, 5.2.12): APIC id and processor uid are the vCPU's index.
fn madt(vcpus: u32) -> Vec<u8> {
    let mut body = Vec::with_capacity(64 + 16 * vcpus as usize);
    body.dword(low(LOCAL_APIC));
    body.dword(0); // flags: no 8259s

    for vcpu in 0..vcpus {
        match u8::try_from(vcpu) {
            Ok(id) if vcpu < FIRST_X2APIC_ID => {
                ProcessorLocalApic::new(id, id, EnabledStatus::Enabled).to_aml_bytes(&mut body);
            }
            _ => local_x2apic(vcpu, &mut body),
        }
    }
    IoApic::new(0, low(IO_APIC), 0).to_aml_bytes(&mut body);

    let mut madt = Sdt::new(*b"APIC", HEADER_BYTES, 5, OEM, OEM_TABLE, OEM_REVISION);
    madt.append_slice(&body);
    Vec::from(madt.as_slice())
}

/// Processor local x2APIC structure (ACPI 6.5, 5.2.12.12).
fn local_x2apic(id: u32, body: &mut Vec<u8>) {
    let id = u128::from(id);
    let fields: u128 = 9 | 16 << 8 // type, length
        | id << 32
        | 1 << 64 // enabled
        | id << 96; // processor uid
    body.extend_from_slice(&fields.to_le_bytes());
}

/// Differentiated system description table: devices that a kernel cannot probe for.
fn dsdt(role: Role, memory: &mut impl GuestMemory) -> Vec<u8> {
    let off = Name::new("\\_S5_".into(), &Package::new([&SLEEP_TYPE_OFF as &dyn Aml, &SLEEP_TYPE_OFF].into()));
    let devices: Vec<Vec<u8>> = SERIAL_PORTS
        .iter()
        .zip(["COM1", "COM2"])
        .zip(1..)
        .map(|((&(port, pin), name), uid)| serial_port(name, uid, port, pin))
        .chain(
            [real_time_clock as fn() -> Vec<u8>, pci_host_bridge, reserved_memory].into_iter().map(|device| device()),
        )
        .chain((role == Role::Parent).then(vmbus))
        .chain((role == Role::Parent).then(|| tool_port(TOOL_PORT, TOOL_PORT_PIN)))
        .inspect(|_| memory.worked())
        .collect();

    let mut dsdt = Sdt::new(*b"DSDT", HEADER_BYTES, 2, OEM, OEM_TABLE, OEM_REVISION);
    dsdt.append_slice(&bytes(&off));
    memory.worked();
    dsdt.append_slice(&Scope::raw("\\_SB_".into(), devices.concat()));
    bytes(&dsdt)
}

/// A 16550A at `port`, edge triggered and active high at pin `pin` of the I/O APIC.
fn serial_port(name: &'static str, uid: u8, port: u16, pin: u32) -> Vec<u8> {
    let ports = IO::new(port, port, 1, 8);
    let interrupt = Interrupt::new(true, true, false, false, pin);
    let resources = ResourceTemplate::new([&ports as &dyn Aml, &interrupt].into());
    bytes(&Device::new(
        name.into(),
        [
            &Name::new("_HID".into(), &EISAName::new("PNP0501")) as &dyn Aml,
            &Name::new("_UID".into(), &uid),
            &Name::new("_DDN".into(), &name),
            &Name::new("_CRS".into(), &resources),
        ]
        .into(),
    ))
}

/// The clock, without an interrupt: it only tells the time.
fn real_time_clock() -> Vec<u8> {
    let ports = IO::new(RTC_PORT, RTC_PORT, 1, 2);
    let resources = ResourceTemplate::new([&ports as &dyn Aml].into());
    bytes(&Device::new(
        "RTC_".into(),
        [&Name::new("_HID".into(), &EISAName::new("PNP0B00")) as &dyn Aml, &Name::new("_CRS".into(), &resources)]
            .into(),
    ))
}

/// Address of the PCI bus's configuration spaces (PCI Firmware Specification 3.2, 4.1.2).
fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(PCI_ECAM.0, 0, 0, LAST_BUS);
    mcfg
}

/// The last bus in the ECAM.
const LAST_BUS: u8 = 0;
const _: () = assert!(PCI_ECAM_BYTES == (LAST_BUS as u64 + 1) << 20);

/// The bridge to the PCI bus: the buses, ports and addresses behind it. Its own ports are the eight of configuration
/// mechanism #1. All other ports, and the memory below the ECAM, are for devices on the bus. No device there has an
/// interrupt pin, so there is no table of them (`_PRT`).
fn pci_host_bridge() -> Vec<u8> {
    let buses = AddressSpace::new_bus_number(0, u16::from(LAST_BUS));
    let own_ports = IO::new(PCI_ADDRESS_PORT, PCI_ADDRESS_PORT, 1, 8);
    let low_ports = AddressSpace::<u16>::new_io(0, PCI_ADDRESS_PORT - 1, None);
    let high_ports = AddressSpace::<u16>::new_io(PCI_DATA_PORT + 4, u16::MAX, None);
    let memory =
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, low(PCI_MEMORY), low(PCI_ECAM) - 1, None);
    let resources = ResourceTemplate::new([&buses as &dyn Aml, &own_ports, &low_ports, &high_ports, &memory].into());
    bytes(&Device::new(
        "PCI0".into(),
        [
            // A PCI Express host bridge, which is also one of conventional PCI.
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")) as &dyn Aml,
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &0_u8),
            &Name::new("_SEG".into(), &0_u8),
            &Name::new("_BBN".into(), &0_u8),
            &Name::new("_CRS".into(), &resources),
        ]
        .into(),
    ))
}

/// A "motherboard resource" that reserves the ECAM: the MCFG alone reserves nothing (PCI Firmware Specification 3.2,
/// 4.1.2, note 2). Linux uses an MCFG only if its memory is reserved here.
fn reserved_memory() -> Vec<u8> {
    #[expect(clippy::cast_possible_truncation, reason = "one megabyte")]
    let ecam = Memory32Fixed::new(true, low(PCI_ECAM), PCI_ECAM_BYTES as u32);
    let resources = ResourceTemplate::new([&ecam as &dyn Aml].into());
    bytes(&Device::new(
        "MBRD".into(),
        [&Name::new("_HID".into(), &EISAName::new("PNP0C02")) as &dyn Aml, &Name::new("_CRS".into(), &resources)]
            .into(),
    ))
}

/// The bus of Hyper-V's devices. Without it, Linux' driver of the bus does not stay loaded as a module, and a driver
/// for parents that is a module needs it. It has no address: guests talk to it by hypercalls.
pub(crate) fn vmbus() -> Vec<u8> {
    let none = ResourceTemplate::new([].into());
    bytes(&Device::new(
        "VMBS".into(),
        [&Name::new("_HID".into(), &"VMBUS") as &dyn Aml, &Name::new("_CRS".into(), &none)].into(),
    ))
}

/// The port by which a parent's programs speak to the hypervisor. Linux' driver of virtio over MMIO knows the name.
pub(crate) fn tool_port(registers: Gpa, pin: u32) -> Vec<u8> {
    let registers = Memory32Fixed::new(true, low(registers), TOOL_PORT_BYTES);
    let interrupt = Interrupt::new(true, false, false, false, pin);
    let resources = ResourceTemplate::new([&registers as &dyn Aml, &interrupt].into());
    bytes(&Device::new(
        "TOOL".into(),
        [
            &Name::new("_HID".into(), &"LNRO0005") as &dyn Aml,
            &Name::new("_UID".into(), &0_u8),
            // Its accesses to memory are coherent with caches.
            &Name::new("_CCA".into(), &1_u8),
            &Name::new("_CRS".into(), &resources),
        ]
        .into(),
    ))
}

pub(crate) fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// A register's address as a 32-bit field.
fn low(gpa: Gpa) -> u32 {
    u32::try_from(gpa.0).expect("device registers lie below 4 GiB")
}
