//! Reads the machine's device tree (Devicetree Specification 0.4, and the bindings of Linux).
//!
//! It is read once, before there is a heap and before anything else is known. Missing or invalid parts are left out;
//! code that needs them then rejects the machine.

use aarch64_defs::registers::mpidr;
use addr::{Hpa, HpaRange};
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};

use super::power::Conduit;
use crate::boot::handover::Handover;
use crate::cpu::MAX_CPUS;
use crate::memory_map::{Full, Kind, MemoryMap};

/// Regions of redistributors that are kept.
pub(super) const MAX_REDISTRIBUTOR_REGIONS: usize = 8;
/// Transports of virtio devices that are kept.
const MAX_VIRTIO: usize = 64;

/// The machine.
pub(in crate::arch::aarch64) struct Machine {
    /// The tree itself.
    pub(in crate::arch::aarch64) tree: &'static [u8],
    /// RAM, and its reserved parts.
    pub(in crate::arch::aarch64) memory: MemoryMap,
    /// The initrd.
    pub(super) payload: Option<HpaRange>,
    /// The hypervisor's command line.
    pub(super) command_line: &'static str,
    /// How PSCI is called.
    pub(super) conduit: Conduit,
    /// Affinities of the pCPUs, the first `cpu_count` of them, in the tree's order.
    cpus: [u64; MAX_CPUS],
    cpu_count: usize,
    /// pCPUs that there are, kept or not.
    pub(super) cpus_found: usize,
    /// Registers of the first PL011.
    pub(in crate::arch::aarch64) uart: Option<HpaRange>,
    /// Registers of the GICv3's distributor.
    pub(in crate::arch::aarch64) distributor: Option<HpaRange>,
    /// Registers of its redistributors.
    pub(in crate::arch::aarch64) redistributors: [Option<HpaRange>; MAX_REDISTRIBUTOR_REGIONS],
    /// Registers of virtio transports.
    pub(super) virtio: [Option<HpaRange>; MAX_VIRTIO],
    /// QEMU has made the machine: the tree has its configuration device.
    pub(in crate::arch::aarch64) is_qemus: bool,
}

/// There is no device tree, or it is damaged, or it reserves more ranges than the memory map holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unreadable;

impl Machine {
    /// Affinities of the pCPUs.
    pub(in crate::arch::aarch64) fn cpus(&self) -> &[u64] {
        &self.cpus[..self.cpu_count]
    }
}

/// Facts of the firmware's tree that the start needs first.
pub(super) struct Outline {
    /// Whether it describes a machine.
    pub(super) has_cpus: bool,
    /// The initrd.
    pub(super) payload: Option<HpaRange>,
}

/// Looks at the tree.
///
/// # Errors
/// When it is damaged.
pub(super) fn outline(bytes: &[u8]) -> Result<Outline, Unreadable> {
    let root = Fdt::new(bytes).map_err(|_| Unreadable)?.root();
    let child = |name| root.children().find(|node| node.name_without_address() == name);
    Ok(Outline { has_cpus: child("cpus").is_some(), payload: child("chosen").and_then(initrd) })
}

/// Reads the tree. RAM, payload and command line come from the firmware, if it passes them.
///
/// # Errors
/// The tree is damaged, or reserves too many ranges.
pub(super) fn read(bytes: &'static [u8], firmware: Option<&'static Handover>) -> Result<Machine, Unreadable> {
    let tree = Fdt::new(bytes).map_err(|_| Unreadable)?;
    let root = tree.root();
    let mut machine = Machine {
        tree: bytes,
        memory: MemoryMap::new(),
        payload: None,
        command_line: "",
        conduit: Conduit::None,
        cpus: [0; MAX_CPUS],
        cpu_count: 0,
        cpus_found: 0,
        uart: None,
        distributor: None,
        redistributors: [None; MAX_REDISTRIBUTOR_REGIONS],
        virtio: [None; MAX_VIRTIO],
        is_qemus: false,
    };

    for reserved in tree.memory_reservations() {
        HpaRange::new(Hpa(reserved.address()), reserved.size())
            .map_or(Ok(()), |range| machine.memory.add(range, Kind::Reserved))?;
    }
    machine.read_below(root);
    for node in root.children() {
        match node.name_without_address() {
            "reserved-memory" => {
                let mut ranges = node.children().flat_map(registers);
                ranges.try_for_each(|range| machine.memory.add(range, Kind::Reserved))?;
            }
            "chosen" if firmware.is_none() => machine.read_chosen(node),
            "cpus" => node.children().for_each(|cpu| machine.read_cpu(cpu)),
            "psci" => {
                let method = node.property("method").and_then(|method| method.value_as::<&str>().ok());
                machine.conduit = Conduit::named(method.unwrap_or_default());
            }
            // Buses without an address translation of their own.
            "soc" | "platform-bus" => machine.read_below(node),
            _ => {}
        }
    }
    // The map already has the tree's reservations. RAM comes last, because missing RAM does no harm.
    if let Some(firmware) = firmware {
        machine.payload = firmware.payload;
        machine.command_line = firmware.command_line.text();
        machine.memory.add_all(&firmware.memory)?;
    } else {
        let memory = root.children().filter(|node| node.name_without_address() == "memory");
        memory.flat_map(registers).try_for_each(|range| machine.memory.add(range, Kind::Ram))?;
    }
    Ok(machine)
}

impl From<Full> for Unreadable {
    fn from(_: Full) -> Self {
        Self
    }
}

impl Machine {
    /// Devices among the children of `bus`.
    fn read_below(&mut self, bus: FdtNode<'static>) {
        for node in bus.children() {
            if node.is_compatible("arm,pl011") {
                self.uart = self.uart.or_else(|| registers(node).next());
            } else if node.is_compatible("arm,gic-v3") && self.distributor.is_none() {
                let mut regions = registers(node);
                let count = node.property("#redistributor-regions").and_then(|count| count.value_as::<u32>().ok());
                self.distributor = regions.next();
                let redistributors = regions.take(count.unwrap_or(1) as usize);
                for (slot, region) in self.redistributors.iter_mut().zip(redistributors) {
                    *slot = Some(region);
                }
            } else if node.is_compatible("virtio,mmio")
                && let Some(slot) = self.virtio.iter_mut().find(|slot| slot.is_none())
            {
                *slot = registers(node).next();
            } else if node.is_compatible("qemu,fw-cfg-mmio") {
                self.is_qemus = true;
            }
        }
    }

    fn read_chosen(&mut self, chosen: FdtNode<'static>) {
        if let Some(line) = chosen.property("bootargs").and_then(|line| line.value_as::<&'static str>().ok()) {
            self.command_line = line;
        }
        self.payload = initrd(chosen);
    }

    fn read_cpu(&mut self, node: FdtNode<'static>) {
        let device_type = node.property("device_type").and_then(|kind| kind.value_as::<&str>().ok());
        let Some(affinity) = node.property("reg").and_then(|reg| number(reg.value())) else { return };
        if device_type != Some("cpu") {
            return;
        }
        self.cpus_found += 1;
        if let Some(slot) = self.cpus.get_mut(self.cpu_count) {
            *slot = affinity & mpidr::AFFINITY;
            self.cpu_count += 1;
        }
    }
}

/// Address of the initrd in the node `chosen`.
fn initrd(chosen: FdtNode<'_>) -> Option<HpaRange> {
    let address = |name| chosen.property(name).and_then(|property| number(property.value()));
    let start = address("linux,initrd-start")?;
    HpaRange::new(Hpa(start), address("linux,initrd-end")?.checked_sub(start)?)
}

/// The register ranges of a node that are within the address space.
fn registers(node: FdtNode<'static>) -> impl Iterator<Item = HpaRange> {
    node.reg().ok().flatten().into_iter().flatten().filter_map(|reg| {
        let start = reg.address::<u64>().ok()?;
        HpaRange::new(Hpa(start), reg.size::<u64>().ok()?)
    })
}

/// A number of one or two cells.
fn number(bytes: &[u8]) -> Option<u64> {
    match *bytes {
        [a, b, c, d] => Some(u32::from_be_bytes([a, b, c, d]).into()),
        [a, b, c, d, e, f, g, h] => Some(u64::from_be_bytes([a, b, c, d, e, f, g, h])),
        _ => None,
    }
}
