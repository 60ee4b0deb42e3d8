//! Which devices of the machine reach memory by themselves, and what keeps them to some of it.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use addr::HpaRange;
use dtoolkit::fdt::FdtNode;
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};

use super::{COMPATIBLE, NAMES, OwnTree, cell, cells, is_plain_bus, registers};

/// Devices that have registers and read no memory. Of others nobody knows.
const NO_MASTERS: [&str; 6] = ["arm,pl011", "arm,pl031", "arm,pl061", "cfi-flash", "arm,sp804", "arm,sp805"];

/// An SMMU of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smmu {
    phandle: u32,
    /// Its registers.
    pub registers: HpaRange,
}

impl OwnTree<'_> {
    /// The machine's SMMUs of version 3.
    #[must_use]
    pub fn smmus(&self) -> Vec<Smmu> {
        let mut found = Vec::new();
        self.each_device(&mut |node| {
            if node.is_compatible("arm,smmu-v3")
                && let (Some(phandle), Some(registers)) = (cell(node, "phandle"), registers(node).next())
            {
                found.push(Smmu { phandle, registers });
            }
        });
        found
    }

    /// A host bridge of PCI that has functions which none of these SMMUs sees, by its name.
    #[must_use]
    pub fn bridge_beside(&self, smmus: &[Smmu]) -> Option<String> {
        let mut beside = None;
        self.each_device(&mut |node| {
            if is_bridge(node) && !is_behind(node, smmus) {
                beside = Some(node.name().to_string());
            }
        });
        beside
    }

    /// Registers of other devices that may reach memory without an SMMU.
    #[must_use]
    pub fn masters(&self) -> Vec<HpaRange> {
        let mut found = Vec::new();
        self.each_device(&mut |node| {
            let is_harmless = is_bridge(node)
                || node.property("iommus").is_some()
                || NO_MASTERS.iter().chain(&COMPATIBLE).any(|name| node.is_compatible(name));
            if !is_harmless {
                found.extend(registers(node));
            }
        });
        found
    }

    /// Calls `visit` for each node that stands for a device at an address of the machine.
    fn each_device<'a>(&'a self, visit: &mut dyn FnMut(FdtNode<'a>)) {
        fn below<'a>(node: FdtNode<'a>, visit: &mut dyn FnMut(FdtNode<'a>)) {
            for child in node.children() {
                if is_plain_bus(child) {
                    below(child, visit);
                }
                visit(child);
            }
        }
        below(self.root, &mut |node| {
            if !NAMES.contains(&node.name_without_address()) {
                visit(node);
            }
        });
    }
}

fn is_bridge(node: FdtNode<'_>) -> bool {
    node.property("device_type").is_some_and(|kind| kind.value() == b"pci\0")
}

/// Whether all of a bridge's functions go through one of these.
fn is_behind(bridge: FdtNode<'_>, smmus: &[Smmu]) -> bool {
    const FUNCTIONS: u32 = 0x1_0000;
    let map: Vec<u32> = bridge.property("iommu-map").map(|map| cells(map.value()).collect()).unwrap_or_default();
    let mut entries = map.as_chunks::<4>().0.to_vec();
    entries.sort_unstable();
    let end = entries.iter().try_fold(0_u32, |end, &[first, phandle, _, count]| {
        let is_known = smmus.iter().any(|smmu| smmu.phandle == phandle);
        (is_known && first <= end).then(|| end.max(first.saturating_add(count)))
    });
    end.is_some_and(|end| end >= FUNCTIONS)
}
