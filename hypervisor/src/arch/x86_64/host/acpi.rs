//! Reads ACPI's static tables. Does not interpret AML.

#![expect(unsafe_code, reason = "firmware's tables are read where firmware has put them")]

use alloc::vec::Vec;
use core::ptr::NonNull;

use ::acpi::address::{AddressSpace, GenericAddress};
use ::acpi::fadt::Fadt;
use ::acpi::madt::{Madt, MadtEntry};
use ::acpi::mcfg::Mcfg;
use ::acpi::sdt::{SdtHeader, Signature};
use ::acpi::{AcpiHandler, AcpiTable, AcpiTables, PhysicalMapping};
use addr::{Hpa, PAGE_BYTES};
use spin::Once;
use x86_boot::own_acpi;

use super::{paging, port, power};
use crate::arch::mappings::MMIO_END;
use crate::boot::handover::RootTable;
use crate::boot::madt;
use crate::boot::mcfg::{Unusable, Window};
use crate::boot::soft_off::{self, SleepTypes};
use crate::boot::spcr::{self, Spcr};
use crate::io::config_space::ADDRESS_PORT;
use crate::memory_map::MemoryMap;

/// The facts that bring-up needs.
#[derive(Debug, Default)]
pub(crate) struct Machine {
    /// Local APIC ids of the enabled pCPUs, each once, in the order of the table.
    pub(crate) apic_ids: Vec<u32>,
    /// The ACPI PM timer (ACPI 4.8.3.3).
    pub(crate) pm_timer: Option<PmTimer>,
    /// Writing the value to the port resets the machine (ACPI 4.8.3.6).
    pub(crate) reset: Option<(u16, u8)>,
    /// How the machine is turned off (ACPI 4.8.3.2.1).
    pub(crate) soft_off: Option<SoftOff>,
    /// Index of the century in the CMOS RTC, 0 if it has none.
    pub(crate) rtc_century: u8,
    /// Memory windows into the configuration space of PCI segment 0, as far as they can be believed.
    pub(crate) ecam: Vec<Window>,
    /// There is a controller for a keyboard and a mouse (8042).
    pub(crate) has_keyboard_controller: bool,
    /// The firmware's own serial console, if it reports one.
    pub(crate) spcr: Option<Spcr>,
    /// The I/O APICs: the number of the first interrupt of each, and its registers.
    pub(crate) io_apics: Vec<(u32, Hpa)>,
    /// Signature and address of each table.
    pub(crate) tables: Vec<([u8; 4], u64)>,
    /// The table of interrupt controllers (MADT), whole.
    pub(crate) madt: &'static [u8],
    /// AMD's table of IOMMUs, if there is one.
    pub(crate) ivrs: Option<&'static [u8]>,
    /// Intel's.
    pub(crate) dmar: Option<&'static [u8]>,
}

/// The ACPI PM timer: counts up at 3.579545 MHz.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PmTimer {
    /// Its I/O port.
    pub(crate) port: u16,
    /// All bits that it counts with: 24 or 32 of them.
    pub(crate) mask: u32,
}

/// The registers that power the machine off, and their values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftOff {
    /// Ports of the PM1 control registers.
    pub(crate) control_a: u16,
    pub(crate) control_b: Option<u16>,
    pub(crate) types: SleepTypes,
    /// The port and value that make the firmware hand the registers over, if needed.
    pub(crate) enable: Option<(u16, u8)>,
}

/// Local APIC flags in the MADT: the pCPU can be used (ACPI 5.2.12.2).
const ENABLED: u32 = 1;

static MACHINE: Once<Machine> = Once::new();

/// Content of the tables; `None` before they were read.
pub(in crate::arch::x86_64) fn machine() -> Option<&'static Machine> {
    MACHINE.get()
}

/// Reads the tables; `None` if there are none, or none with the pCPUs. `memory` is the loader's map.
pub(super) fn read(root: Option<RootTable>, memory: &MemoryMap) -> Option<&'static Machine> {
    MACHINE.try_call_once(|| parse(root, memory).ok_or(())).ok()
}

fn parse(root: Option<RootTable>, memory: &MemoryMap) -> Option<Machine> {
    let address = |hpa: Hpa| usize::try_from(hpa.0).ok();
    let root = root?;
    let tables = match root {
        // SAFETY: the loader reports this address. The crate checks signature and checksum of everything that it reads.
        RootTable::Rsdp(rsdp) => unsafe { AcpiTables::from_rsdp(Firmware, address(rsdp)?) },
        // SAFETY: the same.
        RootTable::Sdt { revision, address: sdt } => unsafe {
            AcpiTables::from_rsdt(Firmware, revision, address(sdt)?)
        },
    };
    let tables = tables.inspect_err(|error| log::error!("ACPI: {error:?}")).ok()?;
    let mut machine = Machine::default();

    let madt = tables.find_table::<Madt>().inspect_err(|error| log::error!("ACPI: {error:?}")).ok()?;
    let entries =
        bytes(madt.physical_start(), madt.get().header.length).and_then(|table| table.get(size_of::<Madt>()..));
    if !entries.is_some_and(madt::is_well_formed) {
        log::error!("ACPI: the MADT's entries do not fill it");
        return None;
    }
    machine.madt = bytes(madt.physical_start(), madt.get().header.length).unwrap_or_default();
    machine.tables = root_table(root).map(named_tables).unwrap_or_default();
    for entry in madt.get().entries() {
        let (id, flags) = match entry {
            MadtEntry::LocalApic(cpu) => (u32::from(cpu.apic_id), cpu.flags),
            MadtEntry::LocalX2Apic(cpu) => (cpu.x2apic_id, cpu.flags),
            MadtEntry::IoApic(io_apic) => {
                let first = io_apic.global_system_interrupt_base;
                machine.io_apics.push((first, Hpa(io_apic.io_apic_address.into())));
                continue;
            }
            _ => continue,
        };
        if flags & ENABLED != 0 && !machine.apic_ids.contains(&id) {
            machine.apic_ids.push(id);
        }
    }

    if let Ok(fadt) = tables.find_table::<Fadt>() {
        let flags = fadt.flags;
        let timer = fadt.pm_timer_block().ok().flatten();
        let mask = if flags.pm_timer_is_32_bit() { u32::MAX } else { 0x00ff_ffff };
        machine.pm_timer = timer.as_ref().and_then(port).map(|port| PmTimer { port, mask });
        if flags.supports_system_reset_via_fadt() {
            let register = fadt.reset_register().ok();
            machine.reset = register.as_ref().and_then(port).map(|port| (port, fadt.reset_value));
        }
        machine.rtc_century = fadt.century;
        let boot_architecture = fadt.iapc_boot_arch;
        machine.has_keyboard_controller = boot_architecture.motherboard_implements_8042();
        machine.soft_off = tables.dsdt().ok().and_then(|dsdt| soft_off(&fadt, bytes(dsdt.address, dsdt.length)?));
    }
    if let Ok(mcfg) = tables.find_table::<Mcfg>() {
        machine.ecam = windows(&mcfg.get(), memory);
    }
    if let Ok(table) = tables.find_table::<SpcrHeader>() {
        machine.spcr = bytes(table.physical_start(), table.header().length).map(spcr::read);
    }
    if let Ok(table) = tables.find_table::<IvrsHeader>() {
        machine.ivrs = bytes(table.physical_start(), table.header().length);
    }
    if let Ok(table) = tables.find_table::<DmarHeader>() {
        machine.dmar = bytes(table.physical_start(), table.header().length);
    }
    Some(machine)
}

/// The windows of segment 0: the devices that the hypervisor itself drives are there. Those that cannot be windows are
/// left out.
fn windows(mcfg: &Mcfg, memory: &MemoryMap) -> Vec<Window> {
    let mut windows = Vec::new();
    for entry in mcfg.entries().iter().filter(|entry| entry.pci_segment_group == 0) {
        let (first_bus, last_bus) = (entry.bus_number_start, entry.bus_number_end);
        let window = Window { base: Hpa(entry.base_address), first_bus, last_bus };
        let taken = memory.ram_and_acpi();
        let end = paging::physical_end().min(MMIO_END);
        let checked = window.check(&windows, taken.iter().copied(), end).and_then(|()| show_the_same(&window));
        match checked {
            Ok(()) => windows.push(window),
            Err(why) => log::warn!("ACPI: the table MCFG names PCI configuration space at {window}: left out, {why}"),
        }
    }
    windows
}

/// Whether a window with bus 0 shows the first device that the ports of mechanism #1 show (PCI Local Bus 3.0,
/// 3.2.2.3.2).
fn show_the_same(window: &Window) -> Result<(), Unusable> {
    /// Of function 0 of device 0 on bus 0: vendor and device.
    const FIRST: u32 = 1 << 31;
    if !window.has(0) {
        return Ok(());
    }
    port::write_u32(ADDRESS_PORT, FIRST);
    let by_ports = port::read_u32(ADDRESS_PORT + 4);
    let first = paging::map_mmio(window.base, PAGE_BYTES).0 as *const u32;
    // SAFETY: mapped, and not RAM. Reading the first register of a function has no effect.
    let by_window = unsafe { first.read_volatile() };
    if by_window == by_ports { Ok(()) } else { Err(Unusable::Other { by_window, by_ports }) }
}

/// The RSDT or XSDT, and the bytes of each of its entries. The crate has checked it, but does not show it.
fn root_table(root: RootTable) -> Option<(&'static [u8], usize)> {
    /// Of the RSDP (ACPI 6.5, 5.2.5.3).
    const REVISION: usize = 15;
    const RSDT: usize = 16;
    const XSDT: usize = 24;
    const RSDP_BYTES: u32 = 36;
    const OLD_RSDP_BYTES: u32 = 20;

    let (revision, address) = match root {
        RootTable::Sdt { revision, address } => (revision, address.0),
        RootTable::Rsdp(rsdp) => {
            let at = usize::try_from(rsdp.0).ok()?;
            match bytes(at, OLD_RSDP_BYTES)?[REVISION] {
                0 => (0, u32::from_le_bytes(*bytes(at, OLD_RSDP_BYTES)?[RSDT..].first_chunk()?).into()),
                revision => (revision, u64::from_le_bytes(*bytes(at, RSDP_BYTES)?[XSDT..].first_chunk()?)),
            }
        }
    };
    Some((table(address)?, if revision == 0 { 4 } else { 8 }))
}

/// The tables that a root table names.
fn named_tables((root, entry_bytes): (&[u8], usize)) -> Vec<([u8; 4], u64)> {
    let signature = |address: u64| Some((*table(address)?.first_chunk()?, address));
    own_acpi::entries(root, entry_bytes).filter_map(signature).collect()
}

/// The table at this address, by its own length.
fn table(address: u64) -> Option<&'static [u8]> {
    const HEADER_BYTES: u32 = 36;
    const LENGTH: usize = 4;
    let address = usize::try_from(address).ok().filter(|address| *address != 0)?;
    let length = u32::from_le_bytes(*bytes(address, HEADER_BYTES)?[LENGTH..].first_chunk()?);
    ((HEADER_BYTES as usize..=LONGEST_TABLE).contains(&(length as usize))).then(|| bytes(address, length)).flatten()
}

/// The header of an SPCR, by which the crate finds the table. The crate's own type is longer than tables of older
/// revisions.
#[repr(transparent)]
struct SpcrHeader(SdtHeader);

// SAFETY: each table begins with a header, and no more is read by this type.
unsafe impl AcpiTable for SpcrHeader {
    const SIGNATURE: Signature = Signature::SPCR;

    fn header(&self) -> &SdtHeader {
        &self.0
    }
}

/// The header of an IVRS, by which the crate finds the table.
#[repr(transparent)]
struct IvrsHeader(SdtHeader);

// SAFETY: as above.
unsafe impl AcpiTable for IvrsHeader {
    const SIGNATURE: Signature = Signature::IVRS;

    fn header(&self) -> &SdtHeader {
        &self.0
    }
}

/// The header of a DMAR.
#[repr(transparent)]
struct DmarHeader(SdtHeader);

// SAFETY: as above.
unsafe impl AcpiTable for DmarHeader {
    const SIGNATURE: Signature = Signature::DMAR;

    fn header(&self) -> &SdtHeader {
        &self.0
    }
}

/// How these tables say that the machine is turned off.
fn soft_off(fadt: &Fadt, dsdt: &[u8]) -> Option<SoftOff> {
    let enable = u16::try_from(fadt.smi_cmd_port).ok().filter(|&port| port != 0 && fadt.acpi_enable != 0);
    Some(SoftOff {
        control_a: port(&fadt.pm1a_control_block().ok()?)?,
        control_b: fadt.pm1b_control_block().ok().flatten().as_ref().and_then(port),
        types: soft_off::find(dsdt)?,
        enable: enable.map(|port| (port, fadt.acpi_enable)),
    })
}

/// The bytes of a table.
fn bytes(address: usize, length: u32) -> Option<&'static [u8]> {
    let start = paging::map_firmware(Hpa(address as u64), u64::from(length))?;
    // SAFETY: mapped for that many bytes, for good, and firmware's tables are not written.
    Some(unsafe { core::slice::from_raw_parts(start.0 as *const u8, length as usize) })
}

/// The I/O port that a register is at, if it is at one.
fn port(register: &GenericAddress) -> Option<u16> {
    match register.address_space {
        AddressSpace::SystemIo => u16::try_from(register.address).ok(),
        _ => None,
    }
}

/// Maximum length of a table. The crate reads a table up to its own length field, for the checksum.
const LONGEST_TABLE: usize = 16 << 20;

/// Gives the crate access to physical memory.
#[derive(Clone, Copy)]
struct Firmware;

impl AcpiHandler for Firmware {
    unsafe fn map_physical_region<T>(&self, address: usize, bytes: usize) -> PhysicalMapping<Self, T> {
        let start = (bytes <= LONGEST_TABLE).then(|| paging::map_firmware(Hpa(address as u64), bytes as u64)).flatten();
        let Some(start) = start.and_then(|start| NonNull::new(start.0 as *mut T)) else {
            log::error!("cannot start: no ACPI table can be at {address:#x} with {bytes} bytes");
            power::exit(abi::exit_code::REFUSED)
        };
        // SAFETY: mapped for that many bytes, and mappings stay.
        unsafe { PhysicalMapping::new(address, start, bytes, bytes, *self) }
    }

    fn unmap_physical_region<T>(_: &PhysicalMapping<Self, T>) {}
}
