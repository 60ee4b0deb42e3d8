//! The device tree of a guest: only what a Linux kernel needs, and the machine's devices if the guest has them.

use alloc::format;
use alloc::vec::Vec;

use aarch64_boot::{MsiFrame, OwnTree};
use abi::payload::VmConfig;
use addr::{GpaRange, HpaRange};
use vm_fdt::{Error, FdtWriter};

use super::layout::{self, Layout};
use crate::cpu::preemption::preemption_point;
use crate::device::affinity::affinity;

/// Phandles, in a tree without nodes of the machine's.
const INTERRUPT_CONTROLLER: u32 = 1;
const CLOCK: u32 = 2;

/// Kinds and flags of interrupts, as the controller's binding has them.
const SPI: u32 = 0;
const PPI: u32 = 1;
const LEVEL_HIGH: u32 = 4;

/// Rate of the serial ports' clock. It means nothing, but drivers divide by it.
const CLOCK_HZ: u32 = 24_000_000;

/// What the guest's devices are.
pub(super) struct Machine {
    /// Where the hypervisor's are.
    pub(super) layout: Layout,
    /// The machine's, if the guest has them.
    pub(super) own: Option<OwnDevices>,
}

/// The machine's devices, for the guest that has them.
pub(super) struct OwnDevices {
    /// The machine's tree.
    pub(super) tree: OwnTree<'static>,
    /// What the guest must not reach.
    pub(super) closed: Vec<HpaRange>,
    /// Where devices write messages, if they can.
    pub(super) frame: Option<MsiFrame>,
}

/// Writes the tree.
///
/// # Errors
/// When a string of the description cannot be part of one.
pub(super) fn write(
    config: &VmConfig,
    ram: &[GpaRange],
    initrd: Option<GpaRange>,
    machine: &Machine,
) -> Result<Vec<u8>, Error> {
    let Machine { layout, own } = machine;
    let own_tree = own.as_ref().map(|own| &own.tree);
    let controller = own_tree.map_or(INTERRUPT_CONTROLLER, OwnTree::controller_phandle);
    let clock_phandle = own_tree.map_or(CLOCK, OwnTree::free_phandle);

    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    if let Some(own) = own_tree {
        own.write_root(&mut tree)?;
    } else {
        tree.property_string("compatible", "linux,dummy-virt")?;
        tree.property_string("model", "Dunlin")?;
    }
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 2)?;
    tree.property_u32("interrupt-parent", controller)?;

    let aliases = tree.begin_node("aliases")?;
    for (number, (at, _)) in layout.serial.iter().enumerate() {
        tree.property_string(&format!("serial{number}"), &format!("/pl011@{:x}", at.0))?;
    }
    tree.end_node(aliases)?;

    let chosen = tree.begin_node("chosen")?;
    tree.property_string("bootargs", &config.cmdline)?;
    tree.property_string("stdout-path", &format!("/pl011@{:x}", layout.serial[0].0.0))?;
    if let Some(initrd) = initrd {
        tree.property_u64("linux,initrd-start", initrd.start.0)?;
        tree.property_u64("linux,initrd-end", initrd.end().0)?;
    }
    tree.end_node(chosen)?;

    for piece in ram {
        let memory = tree.begin_node(&format!("memory@{:x}", piece.start.0))?;
        tree.property_string("device_type", "memory")?;
        tree.property_array_u64("reg", &[piece.start.0, piece.bytes()])?;
        tree.end_node(memory)?;
    }

    let psci = tree.begin_node("psci")?;
    tree.property_string_list("compatible", ["arm,psci-1.0", "arm,psci-0.2"].map(Into::into).to_vec())?;
    tree.property_string("method", "hvc")?;
    tree.end_node(psci)?;

    let cpus = tree.begin_node("cpus")?;
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 0)?;
    for index in 0..config.vcpus {
        preemption_point();
        let affinity = affinity(index);
        let cpu = tree.begin_node(&format!("cpu@{affinity:x}"))?;
        tree.property_string("device_type", "cpu")?;
        tree.property_string("compatible", "arm,armv8")?;
        tree.property_u64("reg", affinity)?;
        tree.property_string("enable-method", "psci")?;
        tree.end_node(cpu)?;
    }
    tree.end_node(cpus)?;
    preemption_point();

    let timer = tree.begin_node("timer")?;
    tree.property_string("compatible", "arm,armv8-timer")?;
    let interrupts: Vec<u32> = layout::TIMER_PPIS.iter().flat_map(|&number| [PPI, number, LEVEL_HIGH]).collect();
    tree.property_array_u32("interrupts", &interrupts)?;
    tree.property_null("always-on")?;
    tree.end_node(timer)?;

    let gic = tree.begin_node(&format!("interrupt-controller@{:x}", layout.distributor.0))?;
    tree.property_string("compatible", "arm,gic-v3")?;
    tree.property_u32("#interrupt-cells", 3)?;
    tree.property_null("interrupt-controller")?;
    let redistributors = u64::from(config.vcpus) * layout::REDISTRIBUTOR_BYTES;
    let registers = [layout.distributor.0, layout::DISTRIBUTOR_BYTES, layout.redistributors.0, redistributors];
    tree.property_array_u64("reg", &registers)?;
    tree.property_u32("phandle", controller)?;
    if let Some(own) = own {
        own.tree.write_controller(&mut tree, own.frame.as_ref())?;
    }
    tree.end_node(gic)?;

    let clock = tree.begin_node("serial-clock")?;
    tree.property_string("compatible", "fixed-clock")?;
    tree.property_u32("#clock-cells", 0)?;
    tree.property_u32("clock-frequency", CLOCK_HZ)?;
    tree.property_u32("phandle", clock_phandle)?;
    tree.end_node(clock)?;

    for (at, interrupt) in layout.serial {
        let serial = tree.begin_node(&format!("pl011@{:x}", at.0))?;
        tree.property_string_list("compatible", ["arm,pl011", "arm,primecell"].map(Into::into).to_vec())?;
        tree.property_array_u64("reg", &[at.0, layout::SERIAL_BYTES])?;
        tree.property_array_u32("interrupts", &[SPI, interrupt, LEVEL_HIGH])?;
        tree.property_array_u32("clocks", &[clock_phandle, clock_phandle])?;
        tree.property_string_list("clock-names", ["uartclk", "apb_pclk"].map(Into::into).to_vec())?;
        tree.end_node(serial)?;
    }
    if let Some(own) = own {
        own.tree.write_devices(&mut tree, &own.closed, own.frame.as_ref())?;
    }
    tree.end_node(root)?;
    preemption_point();
    tree.finish()
}
