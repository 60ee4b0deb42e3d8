//! What the device tree describes (Devicetree Specification 0.4, and the bindings of Linux).

use core::slice;

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};

use super::boot::MAX_CPUS;

/// By which instruction the firmware is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conduit {
    Hvc,
    Smc,
}

/// The machine.
pub(super) struct Machine {
    /// The kernel's command line.
    pub(super) command_line: &'static str,
    /// The machine's model, if the tree has one.
    pub(super) model: Option<&'static str>,
    pub(super) conduit: Conduit,
    /// Registers of the first PL011.
    pub(super) serial: Option<u64>,
    /// Registers of the interrupt controller's distributor.
    pub(super) distributor: Option<u64>,
    /// Registers of its redistributors: first address, bytes.
    pub(super) redistributors: (u64, u64),
    /// RAM: first address, bytes.
    pub(super) memory: (u64, u64),
    /// The tree itself: address, bytes.
    pub(super) tree: (u64, u64),
    cpus: [u32; MAX_CPUS],
    cpu_count: usize,
}

impl Machine {
    /// Affinities of the CPUs, in the tree's order.
    pub(super) fn cpus(&self) -> &[u32] {
        &self.cpus[..self.cpu_count]
    }
}

/// Reads the tree at this address. It ignores missing or invalid parts.
pub(super) fn read(at: u64) -> Machine {
    let mut machine = Machine {
        command_line: "",
        model: None,
        conduit: Conduit::Hvc,
        serial: None,
        distributor: None,
        redistributors: (0, 0),
        memory: (0, 0),
        tree: (at, 0),
        cpus: [0; MAX_CPUS],
        cpu_count: 0,
    };
    let Some(tree) = bytes(at).and_then(|bytes| Fdt::new(bytes).ok()) else { return machine };
    machine.tree.1 = bytes(at).map_or(0, |bytes| bytes.len() as u64);
    let root = tree.root();
    machine.model = text(root, "model");
    for node in root.children() {
        match node.name_without_address() {
            "memory" => machine.memory = registers(node).next().unwrap_or_default(),
            "chosen" => machine.command_line = text(node, "bootargs").unwrap_or_default(),
            "psci" => {
                let is_smc = text(node, "method") == Some("smc");
                machine.conduit = if is_smc { Conduit::Smc } else { Conduit::Hvc };
            }
            "cpus" => node.children().for_each(|cpu| machine.add_cpu(cpu)),
            _ if node.is_compatible("arm,pl011") => {
                machine.serial = machine.serial.or_else(|| registers(node).next().map(|(at, _)| at));
            }
            _ if node.is_compatible("arm,gic-v3") => {
                let mut regions = registers(node);
                machine.distributor = regions.next().map(|(at, _)| at);
                machine.redistributors = regions.next().unwrap_or_default();
            }
            _ => {}
        }
    }
    machine
}

impl Machine {
    fn add_cpu(&mut self, node: FdtNode<'static>) {
        let Some(slot) = self.cpus.get_mut(self.cpu_count) else { return };
        let affinity = node.property("reg").and_then(|reg| match *reg.value() {
            [a, b, c, d] | [_, _, _, _, a, b, c, d] => Some(u32::from_be_bytes([a, b, c, d])),
            _ => None,
        });
        if let (Some("cpu"), Some(affinity)) = (text(node, "device_type"), affinity) {
            *slot = affinity;
            self.cpu_count += 1;
        }
    }
}

fn text(node: FdtNode<'static>, name: &str) -> Option<&'static str> {
    node.property(name)?.value_as::<&'static str>().ok()
}

fn registers(node: FdtNode<'static>) -> impl Iterator<Item = (u64, u64)> {
    let all = node.reg().ok().flatten().into_iter().flatten();
    all.filter_map(|reg| Some((reg.address::<u64>().ok()?, reg.size::<u64>().ok()?)))
}

/// The bytes of the tree: magic and length are big-endian.
fn bytes(at: u64) -> Option<&'static [u8]> {
    const MAGIC: u32 = 0xd00d_feed;
    /// The boot protocol's limit.
    const LIMIT: u32 = 2 << 20;
    if at == 0 || !at.is_multiple_of(8) {
        return None;
    }
    // SAFETY: the boot protocol promises a tree here, in memory that is mapped one to one.
    let header = unsafe { slice::from_raw_parts(at as *const [u8; 4], 2) };
    let [magic, length] = [header[0], header[1]].map(u32::from_be_bytes);
    // SAFETY: as above, for the length in the tree; no one writes it any more.
    (magic == MAGIC && length <= LIMIT).then(|| unsafe { slice::from_raw_parts(at as *const u8, length as usize) })
}
