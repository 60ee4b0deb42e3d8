//! Message-signalled interrupts of the machine's PCI functions, for the guest that has them.
//!
//! A machine with GICv3 has an ITS for them, which a guest does not get. Its commands and tables would have to be
//! translated. What a guest can have is a frame of GICv2m: a device writes the number of a shared interrupt there, and
//! the interrupt is pending. Both take the write at the same place in their pages. So a guest that finds a frame where
//! the machine's ITS has its page for devices programs its devices to write numbers to the ITS, which the hypervisor
//! has told what they mean.

use alloc::vec::Vec;
use core::ops::Range;

use addr::{Hpa, HpaRange, PAGE_BYTES};
use dtoolkit::fdt::FdtNode;
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};
use vm_fdt::{Error, FdtWriter};

use super::{OwnTree, cell, cells, is_plain_bus, registers};

/// The controller's frames for messages, as GICv2m has them.
const FRAME: &str = "arm,gic-v2m-frame";
/// Properties by which a device names the frame to which it writes.
pub(super) const REFERENCES: [&str; 3] = ["msi-map", "msi-map-mask", "msi-parent"];

/// A frame for message-signalled interrupts, as the guest finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsiFrame {
    /// Its number in the tree, which devices name.
    pub phandle: u32,
    /// Its registers.
    pub registers: HpaRange,
    /// Which shared interrupts (INTIDs) can be written to it; otherwise its registers say so.
    pub intids: Option<Range<u32>>,
}

/// An ITS of the machine, and whom it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Its {
    /// Its number in the tree.
    pub phandle: u32,
    /// Its registers.
    pub registers: HpaRange,
    /// The host bridges of which some functions write to it.
    pub bridges: Vec<Bridge>,
}

/// A host bridge whose configuration space is in memory (ECAM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    /// The configuration space: a page for each function.
    pub ecam: HpaRange,
    /// The number of its first bus.
    first_bus: u8,
    /// Bits of a function's number that count.
    mask: u32,
    /// First function, first DeviceID, and for how many of them this holds.
    ids: Vec<[u32; 3]>,
}

impl Bridge {
    /// The DeviceID of the function whose configuration space has this address, if it writes to the ITS.
    #[must_use]
    pub fn device_at(&self, address: Hpa) -> Option<u32> {
        let page = address.0.checked_sub(self.ecam.start.0).filter(|_| address < self.ecam.end())? / PAGE_BYTES;
        let function = u32::try_from(page).ok()? + (u32::from(self.first_bus) << 8);
        let function = u16::try_from(function).ok().map(u32::from)? & self.mask;
        let is_in = |&&[first, _, count]: &&[u32; 3]| function.checked_sub(first).is_some_and(|at| at < count);
        let [first, device, _] = *self.ids.iter().find(is_in)?;
        device.checked_add(function - first)
    }

    /// Behind the largest DeviceID.
    #[must_use]
    pub fn devices_end(&self) -> u64 {
        self.ids.iter().map(|&[_, device, count]| u64::from(device) + u64::from(count)).max().unwrap_or(0)
    }

    fn read(node: FdtNode<'_>, its: u32) -> Option<Self> {
        let ecam = registers(node).next().filter(|range| range.start.0.is_multiple_of(PAGE_BYTES))?;
        let first_bus = node.property("bus-range").map_or(0, |range| cells(range.value()).next().unwrap_or(0));
        let entries: Vec<[u32; 4]> = entries(node);
        let ids: Vec<_> = entries.iter().filter(|entry| entry[1] == its).map(|&[rid, _, id, n]| [rid, id, n]).collect();
        let mask = cell(node, "msi-map-mask").unwrap_or(u32::MAX);
        Some(Self { ecam, first_bus: u8::try_from(first_bus).ok()?, mask, ids }).filter(|bridge| !bridge.ids.is_empty())
    }
}

impl MsiFrame {
    fn write(&self, tree: &mut FdtWriter) -> Result<(), Error> {
        let node = tree.begin_node(&alloc::format!("v2m@{:x}", self.registers.start.0))?;
        tree.property_string("compatible", FRAME)?;
        tree.property_null("msi-controller")?;
        tree.property_array_u64("reg", &[self.registers.start.0, self.registers.bytes()])?;
        if let Some(Range { start, end }) = self.intids {
            tree.property_u32("arm,msi-base-spi", start)?;
            tree.property_u32("arm,msi-num-spis", end - start)?;
        }
        tree.property_u32("phandle", self.phandle)?;
        tree.end_node(node)
    }
}

impl OwnTree<'_> {
    /// The machine's own frame for messages, if it has one.
    #[must_use]
    pub fn frame(&self) -> Option<MsiFrame> {
        let node = self.controller.children().find(|node| is_frame(*node))?;
        let number = |name| cell(node, name);
        let intids = number("arm,msi-base-spi").zip(number("arm,msi-num-spis"));
        Some(MsiFrame {
            phandle: number("phandle")?,
            registers: registers(node).next()?,
            intids: intids.and_then(|(first, count)| Some(first..first.checked_add(count)?)),
        })
    }

    /// The first ITS of the machine, if host bridges name it.
    #[must_use]
    pub fn its(&self) -> Option<Its> {
        let node = self.controller.children().find(|node| node.is_compatible("arm,gic-v3-its"))?;
        let phandle = cell(node, "phandle")?;
        let registers = registers(node).next()?;
        let mut bridges = Vec::new();
        add_bridges(self.root, phandle, &mut bridges);
        (!bridges.is_empty()).then_some(Its { phandle, registers, bridges })
    }

    /// The longest run of shared interrupts below `end` (INTIDs) that no node of the machine names. It begins at a
    /// multiple of 32: a function may ask for a block of that many, aligned to its length.
    #[must_use]
    pub fn free_intids(&self, end: u32) -> Range<u32> {
        const FIRST_SPI: u32 = 32;
        const ALIGN: u32 = 32;
        let mut used = Vec::new();
        add_used(self.root, self.controller_phandle, cell(self.controller, "#address-cells").unwrap_or(0), &mut used);
        let is_used = |intid: u32| used.contains(&(intid - FIRST_SPI));
        let starts = (FIRST_SPI..end).step_by(ALIGN as usize);
        let runs = starts.map(|start| start..(start..end).find(|&intid| is_used(intid)).unwrap_or(end));
        // Of equal ones the first.
        runs.rev().max_by_key(|run| run.end - run.start).unwrap_or(0..0)
    }

    /// Writes the properties of the interrupt controller by which others refer to it, and its frame for messages.
    ///
    /// # Errors
    /// None that the machine's tree can cause.
    pub fn write_controller(&self, tree: &mut FdtWriter, frame: Option<&MsiFrame>) -> Result<(), Error> {
        // The numbers of cells are a part of how others refer to it. Those of the frame's address are two.
        let address_cells = cell(self.controller, "#address-cells");
        let Some(frame) = frame.filter(|_| address_cells.is_none_or(|cells| cells == 2)) else {
            return super::copy_properties(self.controller, tree, |name| super::OF_CONTROLLER.contains(&name));
        };
        tree.property_u32("#address-cells", 2)?;
        tree.property_u32("#size-cells", 2)?;
        tree.property_null("ranges")?;
        frame.write(tree)
    }
}

/// Whether `node` is a frame for messages.
pub(super) fn is_frame(node: FdtNode<'_>) -> bool {
    node.is_compatible(FRAME)
}

/// Whether all references of a node to message-signalled interrupts are to the frame with this phandle.
pub(super) fn refers_to(node: FdtNode<'_>, frame: u32) -> bool {
    let by_map = entries::<4>(node).iter().all(|entry| entry[1] == frame);
    by_map && node.property("msi-parent").is_none_or(|parent| cells(parent.value()).eq([frame]))
}

/// The entries of the property `msi-map`.
fn entries<const CELLS: usize>(node: FdtNode<'_>) -> Vec<[u32; CELLS]> {
    let map: Vec<u32> = node.property("msi-map").map(|map| cells(map.value()).collect()).unwrap_or_default();
    map.as_chunks().0.to_vec()
}

fn add_bridges(node: FdtNode<'_>, its: u32, bridges: &mut Vec<Bridge>) {
    for child in node.children() {
        if child.is_compatible("pci-host-ecam-generic") {
            bridges.extend(Bridge::read(child, its));
        } else if is_plain_bus(child) {
            add_bridges(child, its, bridges);
        }
    }
}

/// Adds the numbers of shared interrupts that a node and those below it name.
fn add_used(node: FdtNode<'_>, controller: u32, address_cells: u32, used: &mut Vec<u32>) {
    const SPI: u32 = 0;
    let of = |name| node.property(name).map(|property| cells(property.value()).collect::<Vec<_>>()).unwrap_or_default();
    // Kind, number, flags. A number that means something else in another place only makes the run shorter.
    used.extend(of("interrupts").as_chunks::<3>().0.iter().filter(|one| one[0] == SPI).map(|one| one[1]));
    for (name, behind) in [("interrupts-extended", 1), ("interrupt-map", 1 + address_cells as usize)] {
        let all = of(name);
        let references = all.iter().enumerate().filter(|&(_, &cell)| cell == controller).map(|(at, _)| at);
        let kinds = references.filter_map(|at| all.get(at + behind..)?.first_chunk::<2>());
        used.extend(kinds.filter(|one| one[0] == SPI).map(|one| one[1]));
    }
    node.children().for_each(|child| add_used(child, controller, address_cells, used));
}
