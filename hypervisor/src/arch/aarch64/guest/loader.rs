//! Loads a kernel into a VM's memory, by Linux's boot protocol on this architecture
//! (Documentation/arch/arm64/booting.rst), with a device tree that describes the machine.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use aarch64_defs::image::{self, ImageError};
use abi::payload::Devices;
use addr::{Gpa, GpaRange};

use super::guest_tree::{self, Machine};
use super::{layout, own_machine};
use crate::vm::memory::Memory;
use crate::vm::spec::Spec;

/// Where the first vCPU begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelEntry {
    /// The kernel's first byte.
    pub(in crate::arch::aarch64) pc: Gpa,
    /// The device tree: the kernel's argument.
    pub(in crate::arch::aarch64) device_tree: Gpa,
}

/// Why a kernel cannot be booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Error {
    /// The file is not a kernel, or does not fit.
    Image(ImageError),
    /// The device tree cannot express the VM's description.
    DeviceTree,
    /// More vCPUs than there is place for redistributors.
    Vcpus,
    /// The machine's devices cannot be described for the guest.
    Machine(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(error) => error.fmt(f),
            Self::DeviceTree => {
                write!(f, "the VM's description does not fit into a device tree (a NUL in the command line?)")
            }
            Self::Vcpus => write!(f, "a guest of this architecture has at most {} vCPUs", layout::MAX_VCPUS),
            Self::Machine(why) => write!(f, "{why}"),
        }
    }
}

/// The ranges of a VM's memory in its physical address space: one piece, if it is not at the machine's addresses.
pub(crate) fn ram_layout(bytes: u64) -> impl Iterator<Item = GpaRange> {
    GpaRange::new(layout::RAM, bytes).into_iter()
}

/// Loads kernel, initrd and device tree of a VM into its memory, which is all zero.
///
/// # Errors
/// When the files cannot be booted or do not fit.
pub(crate) fn load(spec: &Spec<'_>, memory: &mut Memory) -> Result<KernelEntry, Error> {
    let Spec { config, kernel, initrd } = *spec;
    if config.vcpus > layout::MAX_VCPUS {
        return Err(Error::Vcpus);
    }
    let initrd = initrd.unwrap_or_default();
    let ram: Vec<GpaRange> = memory.backing.regions.clone();
    // All of it goes into one piece, and that is the first unless memory is at the machine's addresses.
    let home = ram.iter().max_by_key(|piece| piece.bytes()).ok_or(Error::DeviceTree)?;
    let placed = image::place(kernel, initrd.len() as u64, home.bytes()).map_err(Error::Image)?;

    let place = |offset: u64| Gpa(home.start.0 + offset);
    let initrd_range = GpaRange::new(place(placed.initrd), initrd.len() as u64).filter(|range| range.bytes() != 0);
    let machine = match config.devices {
        Devices::All => {
            Machine { layout: own_machine::layout(), own: Some(own_machine::devices().map_err(Error::Machine)?) }
        }
        Devices::None | Devices::These(_) => Machine { layout: layout::VIRTUAL, own: None },
    };
    let tree = guest_tree::write(config, &ram, initrd_range, &machine).map_err(|_| Error::DeviceTree)?;
    if tree.len() as u64 > image::GRAIN {
        return Err(Error::DeviceTree);
    }
    for (offset, bytes) in [(placed.kernel, kernel), (placed.device_tree, &tree), (placed.initrd, initrd)] {
        // `place` has seen that all of it fits.
        let written = memory.write_file(place(offset), bytes);
        debug_assert!(written);
    }
    Ok(KernelEntry { pc: place(placed.kernel), device_tree: place(placed.device_tree) })
}
