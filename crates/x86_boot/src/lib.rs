//! Replaces the firmware of a Dunlin guest: prepares guest memory before the first instruction.
//!
//! A guest starts in the state that a boot loader leaves. [`load`] puts four things into its (zeroed) memory: the
//! kernel, the initial RAM disk, the boot information in the kernel's format, and the ACPI tables for the few devices.
//! It returns a [`KernelEntry`]: the register values of the first vCPU. All other vCPUs wait for INIT and SIPI, as on
//! any machine.
//!
//! | kernel | recognised by | loaded to | entry |
//! |---|---|---|---|
//! | bzImage, 64-bit boot protocol | `HdrS` at 0x202, protocol 2.12 or later | its `pref_address` | long mode, load address + 0x200 |
//! | bzImage, 32-bit boot protocol | the same, without `XLF_KERNEL_64` | its `pref_address` | 32-bit protected mode, load address |
//! | ELF with a PVH note | ELF magic, note 18 of `Xen` | its `p_paddr` | 32-bit protected mode, the note's address |
//!
//! [`layout`] has a table of all places.
//!
//! [`probe`] and [`check`] need no guest. The command line tool calls them on the developer's machine, so that it
//! rejects a wrong file before anything boots, with the same message. Kernel files are not trusted: all their figures
//! are checked before use.
//!
//! ```
//! use addr::{Gpa, GpaRange};
//! use x86_boot::{Boot, Error, GuestMemory, OutsideMemory};
//!
//! struct Ram(Vec<u8>);
//!
//! impl GuestMemory for Ram {
//!     fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
//!         let outside = OutsideMemory { gpa, bytes: bytes.len() };
//!         let start = usize::try_from(gpa.0).map_err(|_| outside)?;
//!         let end = start.checked_add(bytes.len()).ok_or(outside)?;
//!         self.0.get_mut(start..end).ok_or(outside)?.copy_from_slice(bytes);
//!         Ok(())
//!     }
//! }
//!
//! let mut ram = Ram(vec![0; 64 << 20]);
//! let boot = Boot {
//!     kernel: b"#!/bin/sh",
//!     initrd: None,
//!     cmdline: "console=ttyS0",
//!     memory_bytes: 64 << 20,
//!     vcpus: 4,
//!     role: abi::payload::Role::Guest,
//!     apic: abi::payload::ApicMode::X2Apic,
//!     machine: None,
//! };
//! assert!(matches!(x86_boot::load(&boot, &mut ram), Err(Error::NotAKernel { .. })));
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod acpi;
mod bytes;
mod bzimage;
mod descriptors;
mod entry;
mod error;
pub mod layout;
mod long_mode;
pub mod own_acpi;
mod placement;
mod pvh;
mod reset_stub;

use alloc::string::String;

use abi::payload::{ApicMode, Role};
use addr::{Gpa, GpaRange};

pub use entry::{DescriptorTable, KernelEntry, Mode, long64, protected32};
pub use error::{Error, OutsideMemory};
use layout::MapEntry;
use placement::Placement;

/// Maximum number of vCPUs of a guest with [`ApicMode::XApic`]: its APIC ids have 8 bits, and 255 means all.
pub const MAX_XAPIC_VCPUS: u32 = 255;

/// Guest memory for this crate: zeroed, written in runs of bytes.
pub trait GuestMemory {
    /// Copies `bytes` to `gpa`; a run may cross pages.
    ///
    /// # Errors
    /// Part of the run is not RAM of the guest. What was written before it stays.
    fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory>;

    /// Called now and then. A caller that takes no interrupts meanwhile may let some in here.
    fn worked(&mut self) {}
}

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct Boot<'a> {
    /// The whole kernel file.
    pub kernel: &'a [u8],
    /// The initial RAM disk; an empty one is none.
    pub initrd: Option<&'a [u8]>,
    /// The kernel command line, without a terminating NUL.
    pub cmdline: &'a str,
    /// Guest memory in bytes; [`layout::ram_layout`] has its ranges.
    pub memory_bytes: u64,
    /// Number of vCPUs; vCPU `n` has APIC id `n`.
    pub vcpus: u32,
    /// What the VM is to others: a parent has less RAM for its kernel.
    pub role: Role,
    /// The kind of local APICs: limits the number of vCPUs.
    pub apic: ApicMode,
    /// The machine, if it is not the PC of [`layout`].
    pub machine: Option<OwnMachine<'a>>,
}

/// A machine that has its own memory map and ACPI tables: the one that the hypervisor runs on.
#[derive(Clone, Copy, Debug)]
pub struct OwnMachine<'a> {
    /// The memory map. The kernel gets the first [`layout::MAP_LIMIT`] entries.
    pub memory_map: &'a [MapEntry],
    /// [`layout::BOOT_AREA_BYTES`] of RAM below 4 GiB for boot information, at a multiple of 4 KiB. The map calls it
    /// RAM.
    pub boot_area: Gpa,
    /// Where the ACPI tables begin.
    pub rsdp: Gpa,
    /// What the kernel's console is shown on, if it has a screen.
    pub screen: Option<Screen>,
    /// UEFI's runtime services, if there are some.
    pub efi: Option<Efi>,
}

/// Where a kernel finds UEFI's runtime services, in the format for 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Efi {
    /// The system table.
    pub system_table: Gpa,
    /// The memory map.
    pub memory_map: GpaRange,
    /// Bytes of each of its descriptors, which are of version 1.
    pub descriptor_bytes: u32,
}

/// A screen, as firmware or the boot loader has left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    /// A VGA in its text mode of 80 columns and 25 lines.
    Text,
    /// A framebuffer with 32 bits for each pixel, 8 of them for each colour.
    Pixels {
        /// The first pixel.
        start: Gpa,
        /// In pixels.
        width: u16,
        /// In pixels.
        height: u16,
        /// From one row to the next.
        row_bytes: u16,
        /// Where in a pixel red, green and blue begin, in bits.
        shifts: [u8; 3],
    },
}

/// Whether Linux has a console on the screen with this command line: if it is told so, or told of no console.
#[must_use]
pub fn has_console_on_screen(cmdline: &str) -> bool {
    let mut consoles = cmdline.split_ascii_whitespace().filter_map(|word| word.strip_prefix("console=")).peekable();
    let is_terminal =
        |name: &str| name.strip_prefix("tty").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    consoles.peek().is_none() || consoles.any(is_terminal)
}

impl Boot<'_> {
    fn synic_ram(&self) -> Option<GpaRange> {
        layout::synic_ram(self.memory_bytes, self.vcpus, self.role)
    }

    /// Where a part of the boot area is that the PC has at this address.
    fn place(&self, on_pc: Gpa) -> Gpa {
        Gpa(self.machine.map_or(0, |machine| machine.boot_area.0) + on_pc.0)
    }

    fn rsdp(&self) -> Gpa {
        self.machine.map_or(layout::RSDP, |machine| machine.rsdp)
    }

    fn memory_map(&self) -> impl Iterator<Item = MapEntry> {
        let own = self.machine.map_or(&[][..], |machine| machine.memory_map).iter().copied();
        let ours = self.machine.is_none().then(|| layout::memory_map(self.memory_bytes, self.synic_ram()));
        own.chain(ours.into_iter().flatten())
    }
}

/// Kind of kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Linux bzImage, or another program with its boot protocol.
    BzImage,
    /// ELF with a PVH entry note.
    PvhElf,
}

/// Facts about a kernel file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Kind of file.
    pub format: Format,
    /// Version string of a bzImage, such as `6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) ...`.
    pub version: Option<String>,
    /// Minimum guest memory, in bytes, to load and unpack the kernel, without an initrd.
    pub memory_bytes: u64,
    /// Maximum length of the command line, in bytes without the NUL.
    pub cmdline_limit: usize,
}

/// The kind of `kernel` and its needs.
///
/// # Errors
/// The file is not a kernel that any guest can boot.
pub fn probe(kernel: &[u8]) -> Result<KernelInfo, Error> {
    Ok(placement::Image::parse(kernel)?.info())
}

/// Whether [`load`] will succeed in a guest of that size.
///
/// # Errors
/// As for [`load`], except [`Error::Memory`].
pub fn check(boot: &Boot<'_>) -> Result<KernelInfo, Error> {
    Ok(Placement::of(boot)?.image.info())
}

/// Writes kernel, initrd, boot information, ACPI tables and the reset stub to `memory`, which must be all zero. On
/// another [machine](OwnMachine) tables and stub are not written.
///
/// # Errors
/// The file is not a bootable kernel, something does not fit, or `memory` is smaller than `boot` says. Only the last
/// can be found after the first write.
pub fn load(boot: &Boot<'_>, memory: &mut impl GuestMemory) -> Result<KernelEntry, Error> {
    let placement = Placement::of(boot)?;

    memory.write(boot.place(layout::CMDLINE), boot.cmdline.as_bytes())?;
    if boot.machine.is_none() {
        acpi::write(boot.vcpus, boot.role, memory)?;
        reset_stub::write(memory)?;
    }

    if let Some((range, initrd)) = placement.initrd {
        memory.write(range.start, initrd)?;
    }

    let initrd = placement.initrd.map(|(range, _)| range);
    let mode = match &placement.image {
        placement::Image::BzImage(image) => {
            image.load(memory)?;
            image.write_zero_page(boot, initrd, memory)?;
            image.entry(boot)
        }
        placement::Image::Pvh(image) => {
            image.load(memory)?;
            pvh::write_start_info(boot, initrd, memory)?;
            image.entry()
        }
    };

    match mode {
        Mode::Long64 { .. } => {
            descriptors::write(boot.place(layout::BOOT_GDT), descriptors::CODE_64, memory)?;
            long_mode::write_tables(boot.place(layout::BOOT_PAGE_TABLES), memory)?;
        }
        Mode::Protected32 { .. } => {
            descriptors::write(boot.place(layout::BOOT_GDT), descriptors::CODE_32, memory)?;
        }
    }

    Ok(KernelEntry { mode, kernel: placement.image.range(), initrd })
}

/// A range with a valid end: both figures were checked against the RAM.
fn checked_range(start: u64, end: u64) -> Option<GpaRange> {
    GpaRange::new(Gpa(start), end.checked_sub(start)?)
}

#[cfg(test)]
mod tests;
