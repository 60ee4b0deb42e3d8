//! The machine's device tree, for the guest that has the machine's devices (Devicetree Specification 0.4, and the
//! bindings of Linux).
//!
//! Such a guest has processors, memory, an interrupt controller and serial ports of the hypervisor's, and all other
//! devices of the machine. So its tree is a new one, with copies of the machine's nodes for devices ([`OwnTree`]).
//! References between nodes are numbers (*phandles*) and are copied with them. Those to the interrupt controller mean
//! the new one, which has the number of the machine's.
//!
//! Left out are
//!
//! * what the hypervisor describes itself,
//! * devices with a register in the same page as registers that the guest must not reach,
//! * the SMMU, which is the hypervisor's, with all references to it. If it keeps devices to the guest's memory, those
//!   that it does not see are closed ([`OwnTree::masters`]),
//! * the controller's ITS. References to it mean a frame for messages, if the guest has one ([`MsiFrame`]). Otherwise
//!   they are left out, too, and devices use their lines.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod masters;
mod msi;

use core::fmt;

use addr::{Hpa, HpaRange, PAGE_BYTES};
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};
use vm_fdt::{Error, FdtWriter};

pub use masters::Smmu;
pub use msi::{Bridge, Its, MsiFrame};

/// Nodes below the root that the hypervisor makes itself, or that describe what a guest does not have.
const NAMES: [&str; 6] = ["aliases", "chosen", "cpus", "memory", "psci", "timer"];
/// The same, by what they are compatible with.
const COMPATIBLE: [&str; 7] =
    ["arm,gic-v3", "arm,armv8-timer", "arm,armv8-pmuv3", "arm,smmu-v3", "arm,mmu-500", "arm,psci-0.2", "arm,psci-1.0"];
/// References to the SMMU.
const REFERENCES: [&str; 3] = ["iommus", "iommu-map", "iommu-map-mask"];
/// Properties of the root that belong to what the hypervisor makes.
const OF_ROOT: [&str; 3] = ["#address-cells", "#size-cells", "interrupt-parent"];
/// Properties of the interrupt controller that say how others refer to it.
const OF_CONTROLLER: [&str; 2] = ["#address-cells", "#size-cells"];

/// The largest phandle that a node may have.
const LAST_PHANDLE: u32 = 0xffff_fffe;

/// The part of the machine's tree that the guest gets.
#[derive(Clone, Copy, Debug)]
pub struct OwnTree<'a> {
    root: FdtNode<'a>,
    controller: FdtNode<'a>,
    controller_phandle: u32,
    free_phandle: u32,
}

/// Why the machine's devices cannot be described for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The tree is damaged.
    Damaged,
    /// Addresses or sizes have another width than in the guest's own nodes: two cells.
    Cells,
    /// There is no GICv3 that others refer to.
    NoController,
    /// No phandle is left for a node of the hypervisor's.
    NoPhandle,
}

impl core::error::Error for Unfit {}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Damaged => "the machine's device tree is damaged",
            Self::Cells => "addresses and sizes in the machine's device tree must have two cells each",
            Self::NoController => "the machine's device tree has no GICv3 that devices refer to",
            Self::NoPhandle => "the machine's device tree uses the last phandle",
        })
    }
}

impl<'a> OwnTree<'a> {
    /// Reads the machine's tree.
    ///
    /// # Errors
    /// The guest's nodes and those of the machine do not fit together.
    pub fn read(tree: &'a [u8]) -> Result<Self, Unfit> {
        let root = Fdt::new(tree).map_err(|_| Unfit::Damaged)?.root();
        if [cell(root, "#address-cells"), cell(root, "#size-cells")] != [Some(2), Some(2)] {
            return Err(Unfit::Cells);
        }
        let controller = find(root, &|node| node.is_compatible("arm,gic-v3")).ok_or(Unfit::NoController)?;
        let controller_phandle = cell(controller, "phandle").ok_or(Unfit::NoController)?;
        let last = last_phandle(root);
        let free_phandle = if last < LAST_PHANDLE { last + 1 } else { return Err(Unfit::NoPhandle) };
        Ok(Self { root, controller, controller_phandle, free_phandle })
    }

    /// The phandle of the interrupt controller.
    #[must_use]
    pub const fn controller_phandle(&self) -> u32 {
        self.controller_phandle
    }

    /// A phandle that no node has.
    #[must_use]
    pub const fn free_phandle(&self) -> u32 {
        self.free_phandle
    }

    /// Registers of the interrupt controller: its own, and those of its ITS. Frames for messages are not among them.
    pub fn controller_registers(&self) -> impl Iterator<Item = HpaRange> {
        let below = self.controller.children().filter(|node| !msi::is_frame(*node));
        registers(self.controller).chain(below.flat_map(registers))
    }

    /// Registers of the SMMUs.
    pub fn smmu_registers(&self) -> impl Iterator<Item = HpaRange> {
        let smmus =
            self.root.children().filter(|node| ["arm,smmu-v3", "arm,mmu-500"].iter().any(|of| node.is_compatible(of)));
        smmus.flat_map(registers)
    }

    /// Writes what the machine says of itself: properties of the root that the hypervisor has not written.
    ///
    /// # Errors
    /// A name that cannot be one.
    pub fn write_root(&self, tree: &mut FdtWriter) -> Result<(), Error> {
        copy_properties(self.root, tree, |name| !OF_ROOT.contains(&name))
    }

    /// Writes the nodes of the devices that have no register in a page of `closed`. References to message-signalled
    /// interrupts are kept if they are to `frame`.
    ///
    /// # Errors
    /// A name that cannot be one.
    pub fn write_devices(
        &self,
        tree: &mut FdtWriter,
        closed: &[HpaRange],
        frame: Option<&MsiFrame>,
    ) -> Result<(), Error> {
        let devices = self.root.children().filter(|node| !NAMES.contains(&node.name_without_address()));
        copy_below(devices, tree, Some(closed), frame.map(|frame| frame.phandle))
    }
}

/// Copies nodes, without those that are left out. Without `closed` their registers have no addresses of the machine.
fn copy_below<'a>(
    nodes: impl Iterator<Item = FdtNode<'a>>,
    tree: &mut FdtWriter,
    closed: Option<&[HpaRange]>,
    frame: Option<u32>,
) -> Result<(), Error> {
    let is_hidden = |node: FdtNode<'a>| COMPATIBLE.iter().any(|name| node.is_compatible(name));
    let is_closed = |node| closed.is_some_and(|closed| registers(node).any(|range| touches(&range, closed)));
    for node in nodes.filter(|node| !is_hidden(*node) && !is_closed(*node)) {
        let copy = tree.begin_node(node.name())?;
        let has_frame = frame.is_some_and(|frame| msi::refers_to(node, frame));
        copy_properties(node, tree, |name| {
            !REFERENCES.contains(&name) && (has_frame || !msi::REFERENCES.contains(&name))
        })?;
        copy_below(node.children(), tree, closed.filter(|_| is_plain_bus(node)), frame)?;
        tree.end_node(copy)?;
    }
    Ok(())
}

/// Whether what is below `node` has the addresses of its parent: `ranges` is there, and empty.
fn is_plain_bus(node: FdtNode<'_>) -> bool {
    node.property("ranges").is_some_and(|ranges| ranges.value().is_empty())
}

fn copy_properties(node: FdtNode<'_>, tree: &mut FdtWriter, is_wanted: impl Fn(&str) -> bool) -> Result<(), Error> {
    let wanted = node.properties().filter(|property| is_wanted(property.name()));
    wanted.into_iter().try_for_each(|property| tree.property(property.name(), property.value()))
}

/// Whether a page of `range` is also one of `closed`.
fn touches(range: &HpaRange, closed: &[HpaRange]) -> bool {
    let start = range.start.0 & !(PAGE_BYTES - 1);
    let end = range.end().0.checked_next_multiple_of(PAGE_BYTES).unwrap_or(range.end().0);
    let pages = HpaRange::new(Hpa(start), end - start);
    pages.is_some_and(|pages| closed.iter().any(|closed| closed.overlaps(&pages)))
}

/// The first node below `node` of which this is true.
fn find<'a>(node: FdtNode<'a>, is_it: &dyn Fn(FdtNode<'a>) -> bool) -> Option<FdtNode<'a>> {
    node.children().find_map(|child| if is_it(child) { Some(child) } else { find(child, is_it) })
}

fn last_phandle(node: FdtNode<'_>) -> u32 {
    let own = ["phandle", "linux,phandle"].into_iter().filter_map(|name| cell(node, name));
    own.chain(node.children().map(last_phandle)).max().unwrap_or(0)
}

/// A property of one cell.
fn cell(node: FdtNode<'_>, name: &str) -> Option<u32> {
    node.property(name)?.value().try_into().ok().map(u32::from_be_bytes)
}

/// The cells of a property.
fn cells(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|&cell| u32::from_be_bytes(cell))
}

/// The register ranges of a node that are within the address space.
fn registers(node: FdtNode<'_>) -> impl Iterator<Item = HpaRange> {
    node.reg().ok().flatten().into_iter().flatten().filter_map(|reg| {
        let start = reg.address::<u64>().ok()?;
        HpaRange::new(Hpa(start), reg.size::<u64>().ok()?).filter(|range| range.bytes() > 0)
    })
}

#[cfg(test)]
mod tests;
