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
    pub(super) phandle: u32,
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

    /// What makes these SMMUs useless, by its name: a host bridge of PCI with functions that none of them sees; or a
    /// bus that gives its devices other addresses, with some that may reach memory. Where those are is not known here,
    /// so they cannot be closed.
    #[must_use]
    pub fn bus_beside(&self, smmus: &[Smmu]) -> Option<String> {
        let mut beside = None;
        self.each_device(&mut |node| {
            let is_beside = if is_bridge(node) {
                !is_behind(node, smmus)
            } else {
                node.property("ranges").is_some() && !is_plain_bus(node) && has_masters(node, smmus)
            };
            if is_beside {
                beside = Some(node.name().to_string());
            }
        });
        beside
    }

    /// Registers of other devices that may reach memory without an SMMU.
    #[must_use]
    pub fn masters(&self) -> Vec<HpaRange> {
        let (mut found, smmus) = (Vec::new(), self.smmus());
        self.each_device(&mut |node| {
            if !is_bridge(node) && !is_harmless(node, &smmus) {
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

/// Whether a device reads no memory, or through one of these.
fn is_harmless(node: FdtNode<'_>, smmus: &[Smmu]) -> bool {
    let behind = node.property("iommus").and_then(|iommus| cells(iommus.value()).next());
    behind.is_some_and(|behind| smmus.iter().any(|smmu| smmu.phandle == behind))
        || NO_MASTERS.iter().chain(&COMPATIBLE).any(|name| node.is_compatible(name))
}

/// Whether a device below this node may reach memory beside these.
fn has_masters(node: FdtNode<'_>, smmus: &[Smmu]) -> bool {
    node.children()
        .any(|child| child.property("reg").is_some() && !is_harmless(child, smmus) || has_masters(child, smmus))
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
