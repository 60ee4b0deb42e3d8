//! The guest's physical address space.
//!
//! ```text
//! 0x0000_0000  4 KiB      free (real-mode vectors)
//! 0x0000_1000  4 KiB      boot GDT
//! 0x0000_2000  24 KiB     boot page tables: 4 GiB identity, 2 MiB pages Long64 only
//! 0x0000_8000  4 KiB      zero page (bzImage) or hvm_start_info (PVH)
//! 0x0001_0000  64 KiB     command line, NUL-terminated
//! 0x0009_fc00             end of the low RAM that the memory map offers
//! 0x000e_0000  128 KiB-16 ACPI tables, the RSDP first                   reserved in the memory map
//! 0x000f_fff0  16         reset stub                                    reserved in the memory map
//! 0x0010_0000             kernel from its own address on; initrd as high as it fits below the hole
//!             8 KiB a vCPU, at the end of the RAM: pages of SynICs         parents only; reserved in the memory map
//! 0xc000_0000  1 GiB      hole: no RAM
//!   0xc000_0000  512 MiB    for the memory of PCI devices
//!   0xe000_0000  1 MiB      configuration spaces of PCI bus 0 (ECAM)    reserved in the memory map
//!   0xfeb0_0000  4 KiB      port for a parent's programs                 parents only
//!   0xfec0_0000  4 KiB      I/O APIC
//!   0xfee0_0000  4 KiB      local APIC
//! 0x1_0000_0000           the rest of the RAM
//! ```
//!
//! All memory below 1 MiB is RAM: the memory map hides a part of it, and no device is there. The kernel may copy and
//! overwrite the boot structures in low RAM, so the map calls them usable.

use abi::payload::Role;
use addr::{Gpa, GpaRange, PAGE_BYTES};

use crate::checked_range;

/// Boot GDT (see [`crate::long64`] and [`crate::protected32`]). On [another machine](crate::OwnMachine) this and the
/// three places after it are offsets in its boot area.
pub const BOOT_GDT: Gpa = Gpa(0x1000);
/// Root of the boot page tables; five more tables follow it.
pub const BOOT_PAGE_TABLES: Gpa = Gpa(0x2000);
/// Linux' zero page, or PVH's start information with its lists.
pub const BOOT_INFORMATION: Gpa = Gpa(0x8000);
/// The same as a 32-bit register value.
#[expect(clippy::cast_possible_truncation, reason = "asserted below")]
pub(crate) const BOOT_INFORMATION_32: u32 = BOOT_INFORMATION.0 as u32;
const _: () = assert!(BOOT_INFORMATION_32 as u64 == BOOT_INFORMATION.0);
/// The command line.
pub const CMDLINE: Gpa = Gpa(0x1_0000);
/// Maximum length of the command line, with its NUL.
pub const CMDLINE_BYTES: usize = 0x1_0000;
/// Length of the boot area: from address 0 to the end of the command line.
pub const BOOT_AREA_BYTES: u64 = CMDLINE.0 + CMDLINE_BYTES as u64;
/// End of the RAM below 640 KiB in the memory map: PCs have the extended BIOS data area above it.
pub const LOW_RAM_END: Gpa = Gpa(0x9_fc00);
/// ACPI root pointer; the other tables follow.
pub const RSDP: Gpa = Gpa(0xe_0000);
/// Target of a jump to the reset vector in real mode, F000:FFF0.
pub const RESET_STUB: Gpa = Gpa(0xf_fff0);
/// First address that a kernel may be loaded to.
pub const HIGH_RAM: Gpa = Gpa(0x10_0000);
/// End of the RAM below 4 GiB, when the guest has that much.
pub const HOLE: Gpa = Gpa(3 << 30);
/// Address range for PCI devices' memory; it ends at [`PCI_ECAM`].
pub const PCI_MEMORY: Gpa = HOLE;
/// The configuration spaces of the PCI bus, 4 KiB for each of 256 functions.
pub const PCI_ECAM: Gpa = Gpa(0xe000_0000);
/// Size of [`PCI_ECAM`]: one bus. For each further bus a kernel that probes for devices would make two exits per slot.
pub const PCI_ECAM_BYTES: u64 = 1 << 20;
/// The registers of the port by which a parent's programs speak to the hypervisor (virtio over MMIO), where QEMU's
/// microvm has such devices.
pub const TOOL_PORT: Gpa = Gpa(0xfeb0_0000);
/// Size of [`TOOL_PORT`].
pub const TOOL_PORT_BYTES: u32 = 4096;
/// The I/O APIC's pin for it: behind those of the ISA bus.
pub const TOOL_PORT_PIN: u32 = 16;
/// The I/O APIC's registers.
pub const IO_APIC: Gpa = Gpa(0xfec0_0000);
/// The local APIC's registers, in xAPIC mode.
pub const LOCAL_APIC: Gpa = Gpa(0xfee0_0000);
/// Start of the RAM that does not fit below the hole.
pub const RAM_ABOVE_4G: Gpa = Gpa(4 << 30);

/// I/O port of the ACPI sleep control register (8 bits).
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// I/O port of the ACPI sleep status register (8 bits).
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// SLP_TYP that powers the machine off (`\_S5`).
pub const SLEEP_TYPE_OFF: u8 = 5;
/// I/O port of the reset register, as in PC chipsets.
pub const RESET_PORT: u16 = 0xcf9;
/// Value that resets the machine.
pub const RESET_VALUE: u8 = 6;
/// I/O port of PCI configuration mechanism #1: selects the register.
pub const PCI_ADDRESS_PORT: u16 = 0xcf8;
/// The first of four I/O ports of PCI configuration mechanism #1: the register's data.
pub const PCI_DATA_PORT: u16 = 0xcfc;
/// First I/O ports of the serial ports COM1 and COM2, and their I/O APIC pins.
pub const SERIAL_PORTS: [(u16, u32); 2] = [(0x3f8, 4), (0x2f8, 3)];
/// I/O port of the real-time clock's index register; data is the next.
pub const RTC_PORT: u16 = 0x70;

/// The ranges of `memory_bytes` of RAM: one from 0 up to the hole, and the rest from 4 GiB.
pub fn ram_layout(memory_bytes: u64) -> impl Iterator<Item = GpaRange> {
    let below = memory_bytes.min(HOLE.0);
    // Memory beyond the address space does not exist; it is cut off here, and the frame allocator refuses it.
    let above = (memory_bytes - below).min(u64::MAX - RAM_ABOVE_4G.0);
    [GpaRange::new(Gpa(0), below), GpaRange::new(RAM_ABOVE_4G, above)]
        .into_iter()
        .flatten()
        .filter(|range| range.bytes() > 0)
}

/// RAM for the SynIC of one vCPU of a parent: the page of messages, then the page of event flags.
pub const SYNIC_BYTES: u64 = 2 * PAGE_BYTES;

/// The RAM for the SynICs of a parent's vCPUs, at the end of the RAM below the hole. A parent's kernel does not choose
/// these pages, as others do: it finds them where the hypervisor says. Other VMs have none.
#[must_use]
pub fn synic_ram(memory_bytes: u64, vcpus: u32, role: Role) -> Option<GpaRange> {
    let end = memory_bytes.min(HOLE.0);
    let bytes = u64::from(vcpus) * SYNIC_BYTES;
    match role {
        Role::Guest => None,
        Role::Parent => checked_range(end.saturating_sub(bytes), end),
    }
}

/// Maximum number of entries of the kernel's memory map (Linux `struct boot_params`).
pub const MAP_LIMIT: usize = 128;

/// One entry of the kernel's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The addresses.
    pub range: GpaRange,
    /// Their kind.
    pub kind: MapKind,
}

/// Kinds of memory, with their numbers in both e820 and PVH (ACPI 6.5, table 15.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// Free for use.
    Ram = 1,
    /// Must not be used.
    Reserved = 2,
    /// RAM with ACPI tables.
    AcpiTables = 3,
    /// RAM that firmware keeps for ACPI.
    AcpiNvs = 4,
}

/// The memory map of a guest with `memory_bytes` of RAM, in ascending order. `kept` is [`synic_ram`].
pub fn memory_map(memory_bytes: u64, kept: Option<GpaRange>) -> impl Iterator<Item = MapEntry> {
    fn entry(start: u64, end: u64, kind: MapKind) -> Option<MapEntry> {
        checked_range(start, end).map(|range| MapEntry { range, kind })
    }
    let low = [entry(0, LOW_RAM_END.0.min(memory_bytes), MapKind::Ram), entry(RSDP.0, HIGH_RAM.0, MapKind::Reserved)];
    let free_end = kept.map_or(u64::MAX, |kept| kept.start.0);
    let high = |above_4g: bool| {
        let end = if above_4g { u64::MAX } else { free_end };
        ram_layout(memory_bytes)
            .filter(move |range| (range.start >= RAM_ABOVE_4G) == above_4g)
            .map(move |range| entry(range.start.0.max(HIGH_RAM.0), range.end().0.min(end), MapKind::Ram))
    };
    let kept = kept.map(|range| MapEntry { range, kind: MapKind::Reserved });
    let ecam = entry(PCI_ECAM.0, PCI_ECAM.0 + PCI_ECAM_BYTES, MapKind::Reserved);
    let all = low.into_iter().chain(high(false)).chain([kept, ecam]).chain(high(true));
    all.flatten().filter(|entry| entry.range.bytes() > 0)
}
