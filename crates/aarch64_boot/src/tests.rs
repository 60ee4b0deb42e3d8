use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::*;

const GIC: u32 = 0x8002;
const CLOCK: u32 = 0x8000;
const ITS: u32 = 0x8003;

fn range(start: u64, bytes: u64) -> HpaRange {
    HpaRange::new(Hpa(start), bytes).expect("a range")
}

/// A node of a tree for tests: its properties, and what is below it.
fn node(
    tree: &mut FdtWriter,
    name: &str,
    properties: &[(&str, &[u32])],
    compatible: &str,
    below: impl FnOnce(&mut FdtWriter),
) {
    let node = tree.begin_node(name).expect("a name");
    if !compatible.is_empty() {
        tree.property_string("compatible", compatible).expect("text");
    }
    for (name, cells) in properties {
        tree.property_array_u32(name, cells).expect("cells");
    }
    below(tree);
    tree.end_node(node).expect("in order");
}

/// A machine like QEMU's `virt`, with cells of this width in its root.
fn machine(cells: u32) -> Vec<u8> {
    let mut tree = FdtWriter::new().expect("memory");
    let root: &[(&str, &[u32])] =
        &[("#address-cells", &[cells]), ("#size-cells", &[2]), ("interrupt-parent", &[GIC]), ("dma-coherent", &[])];
    node(&mut tree, "", root, "linux,dummy-virt", |tree| {
        for name in ["chosen", "aliases", "memory@40000000", "cpus"] {
            node(tree, name, &[], "", |_| {});
        }
        node(tree, "psci", &[], "arm,psci-1.0", |_| {});
        node(tree, "pmu", &[], "arm,armv8-pmuv3", |_| {});
        node(tree, "apb-pclk", &[("phandle", &[CLOCK])], "fixed-clock", |_| {});
        let registers: &[u32] = &[0, 0x800_0000, 0, 0x1_0000, 0, 0x80a_0000, 0, 0xf6_0000];
        let controller: &[(&str, &[u32])] =
            &[("phandle", &[GIC]), ("reg", registers), ("#address-cells", &[2]), ("#size-cells", &[2])];
        node(tree, "intc@8000000", controller, "arm,gic-v3", |tree| {
            let its: &[(&str, &[u32])] = &[("phandle", &[ITS]), ("reg", &[0, 0x808_0000, 0, 0x2_0000])];
            node(tree, "its@8080000", its, "arm,gic-v3-its", |_| {});
        });
        for (name, at) in [("pl011@9000000", 0x900_0000), ("pl031@9010000", 0x901_0000)] {
            node(tree, name, &[("reg", &[0, at, 0, 0x1000])], "arm,pl", |_| {});
        }
        for at in [0xa00_0000, 0xa00_0200, 0xa00_1000] {
            node(tree, &alloc::format!("virtio_mmio@{at:x}"), &[("reg", &[0, at, 0, 0x200])], "virtio,mmio", |_| {});
        }
        let pcie: &[(&str, &[u32])] = &[
            ("reg", &[0x40, 0x1000_0000, 0, 0x1000_0000]),
            ("interrupt-map", &[0, 0, 0, 1, GIC, 0, 0, 0, 3, 4]),
            ("msi-map", &[0, ITS, 0, 0x1_0000]),
            ("iommu-map", &[0, 9, 0, 0x1_0000]),
        ];
        node(tree, "pcie@10000000", pcie, "pci-host-ecam-generic", |_| {});
        node(tree, "smmuv3@9050000", &[("reg", &[0, 0x905_0000, 0, 0x2_0000])], "arm,smmu-v3", |_| {});
        let bus: &[(&str, &[u32])] = &[("#address-cells", &[1]), ("#size-cells", &[1])];
        // Its children have addresses of its own.
        let ranges: &[(&str, &[u32])] = &[bus[0], bus[1], ("ranges", &[0, 0, 0xc00_0000, 0x200_0000])];
        node(tree, "bus@c000000", ranges, "simple-bus", |tree| {
            node(tree, "a@9000000", &[("reg", &[0x900_0000, 0x1000])], "a", |_| {});
        });
        let plain: &[(&str, &[u32])] = &[bus[0], bus[1], ("ranges", &[])];
        node(tree, "soc", plain, "simple-bus", |tree| {
            node(tree, "b@9000800", &[("reg", &[0x900_0800, 0x100])], "b", |_| {});
            node(tree, "c@d000000", &[("reg", &[0xd00_0000, 0x1000])], "c", |_| {});
        });
    });
    tree.finish().expect("a tree")
}

/// The tree that a guest gets, with the hypervisor's nodes reduced to one.
fn guests(machine: &[u8], closed: &[HpaRange]) -> Vec<u8> {
    guests_with(machine, closed, None)
}

/// The same, with a frame for messages.
fn guests_with(machine: &[u8], closed: &[HpaRange], frame: Option<&MsiFrame>) -> Vec<u8> {
    let own = OwnTree::read(machine).expect("fits");
    let mut tree = FdtWriter::new().expect("memory");
    let root = tree.begin_node("").expect("a name");
    own.write_root(&mut tree).expect("properties");
    let controller = tree.begin_node("gic").expect("a name");
    own.write_controller(&mut tree, frame).expect("properties");
    tree.end_node(controller).expect("in order");
    own.write_devices(&mut tree, closed, frame).expect("nodes");
    tree.end_node(root).expect("in order");
    tree.finish().expect("a tree")
}

fn names(tree: &[u8]) -> Vec<String> {
    fn below(node: FdtNode<'_>, names: &mut Vec<String>) {
        for child in node.children() {
            names.push(child.name().to_string());
            below(child, names);
        }
    }
    let mut all = Vec::new();
    below(Fdt::new(tree).expect("a tree").root(), &mut all);
    all
}

#[test]
fn guest_gets_the_devices_and_nothing_that_the_hypervisor_describes_or_uses() {
    let closed = [range(0x900_0000, 0x1000), range(0xa00_0000, 0x200)];
    assert_eq!(
        names(&guests(&machine(2), &closed)),
        [
            "gic",
            "apb-pclk",
            "pl031@9010000",
            // The others share a page with the closed one.
            "virtio_mmio@a001000",
            "pcie@10000000",
            "bus@c000000",
            "a@9000000",
            "soc",
            "c@d000000",
        ]
    );
    assert!(names(&guests(&machine(2), &[])).contains(&"pl011@9000000".to_string()));
}

#[test]
fn properties_are_the_machines_without_references_to_what_is_missing() {
    let tree = guests(&machine(2), &[]);
    let root = Fdt::new(&tree).expect("a tree").root();
    let of = |name: &str| -> Vec<String> {
        let node = if name.is_empty() { root } else { root.child(name).expect("is there") };
        node.properties().map(|property| property.name().to_string()).collect()
    };
    assert_eq!(of(""), ["compatible", "dma-coherent"]);
    assert_eq!(of("gic"), ["#address-cells", "#size-cells"]);
    assert_eq!(of("pcie"), ["compatible", "reg", "interrupt-map"]);
    let map = root.child("pcie").expect("is there").property("interrupt-map").expect("is there");
    assert_eq!(map.value()[16..20], GIC.to_be_bytes());
}

#[test]
fn registers_and_phandles_of_what_is_left_out_are_known() {
    let machine = machine(2);
    let own = OwnTree::read(&machine).expect("fits");
    assert_eq!((own.controller_phandle(), own.free_phandle()), (GIC, ITS + 1));
    let registers: Vec<_> = own.controller_registers().collect();
    assert_eq!(registers, [range(0x800_0000, 0x1_0000), range(0x80a_0000, 0xf6_0000), range(0x808_0000, 0x2_0000)]);
    assert_eq!(own.smmu_registers().collect::<Vec<_>>(), [range(0x905_0000, 0x2_0000)]);
}

/// The frame that stands for the ITS of [`machine`].
fn frame_for_its(own: &OwnTree<'_>) -> MsiFrame {
    let its = own.its().expect("a bridge names it");
    let registers = range(its.registers.start.0 + 0x1_0000, 0x1_0000);
    MsiFrame { phandle: its.phandle, registers, intids: Some(96..160) }
}

#[test]
fn frame_takes_the_place_of_the_its_for_those_that_name_it_alone() {
    let machine = machine(2);
    let frame = frame_for_its(&OwnTree::read(&machine).expect("fits"));
    let tree = guests_with(&machine, &[], Some(&frame));
    let root = Fdt::new(&tree).expect("a tree").root();
    let gic = root.child("gic").expect("is there");
    let node = gic.children().next().expect("a frame");
    assert_eq!((node.name(), node.is_compatible("arm,gic-v2m-frame")), ("v2m@8090000", true));
    let numbers = ["arm,msi-base-spi", "arm,msi-num-spis", "phandle"].map(|name| cell(node, name));
    assert_eq!(numbers, [Some(96), Some(64), Some(ITS)]);
    assert_eq!(registers(node).collect::<Vec<_>>(), [range(0x809_0000, 0x1_0000)]);
    assert!(node.property("msi-controller").is_some() && is_plain_bus(gic), "Linux looks for both");
    let map = root.child("pcie").expect("is there").property("msi-map").expect("is kept");
    assert_eq!(map.value()[4..8], ITS.to_be_bytes());
    // A guest reads the frame as it reads a machine's.
    let gic = guests_controller(&tree);
    assert_eq!(gic.frame(), Some(frame.clone()));
    assert!(!gic.controller_registers().any(|registers| registers.overlaps(&frame.registers)), "devices write to it");
    // Devices that name another one have no messages.
    let other = MsiFrame { phandle: ITS + 7, ..frame };
    let tree = guests_with(&machine, &[], Some(&other));
    let root = Fdt::new(&tree).expect("a tree").root();
    assert!(root.child("pcie").expect("is there").property("msi-map").is_none());
}

/// The tree of a guest, read as that of a machine.
fn guests_controller(tree: &[u8]) -> OwnTree<'_> {
    let root = Fdt::new(tree).expect("a tree").root();
    let controller = root.child("gic").expect("is there");
    OwnTree { root, controller, controller_phandle: GIC, free_phandle: 1 }
}

#[test]
fn functions_have_the_ids_that_their_bridge_says() {
    let machine = machine(2);
    let its = OwnTree::read(&machine).expect("fits").its().expect("a bridge names it");
    assert_eq!((its.phandle, its.registers), (ITS, range(0x808_0000, 0x2_0000)));
    let [bridge] = &its.bridges[..] else { panic!("one bridge: {its:?}") };
    assert_eq!(bridge.ecam, range(0x40_1000_0000, 0x1000_0000));
    let id = |bridge: &Bridge, offset: u64| bridge.device_at(Hpa(bridge.ecam.start.0 + offset));
    assert_eq!([0, 0xfff, 0x1000, 0x10_8000].map(|at| id(bridge, at)), [Some(0), Some(0), Some(1), Some(0x108)]);
    assert_eq!((id(bridge, 0x1000_0000), bridge.device_at(Hpa(0)), bridge.devices_end()), (None, None, 0x1_0000));

    let mut tree = FdtWriter::new().expect("memory");
    let root: &[(&str, &[u32])] = &[("#address-cells", &[2]), ("#size-cells", &[2])];
    node(&mut tree, "", root, "", |tree| {
        node(tree, "intc", &[("phandle", &[1]), root[0], root[1]], "arm,gic-v3", |tree| {
            node(tree, "its", &[("phandle", &[2]), ("reg", &[0, 0x1000, 0, 0x2_0000])], "arm,gic-v3-its", |_| {});
        });
        let bus: &[(&str, &[u32])] = &[
            ("reg", &[0, 0x4000_0000, 0, 0x20_0000]),
            ("bus-range", &[0x10, 0x11]),
            // The first four devices of bus 11h, by their first functions; another ITS for bus 10h.
            ("msi-map", &[0x1000, 9, 0, 0x100, 0x1100, 2, 0x500, 0x20]),
            ("msi-map-mask", &[0xfff8]),
        ];
        let soc: &[(&str, &[u32])] = &[root[0], root[1], ("ranges", &[])];
        node(tree, "soc", soc, "simple-bus", |tree| node(tree, "pcie", bus, "pci-host-ecam-generic", |_| {}));
        node(tree, "pcie", &[("msi-map", &[0, 9, 0, 0x100])], "pci-host-ecam-generic", |_| {});
    });
    let tree = tree.finish().expect("a tree");
    let its = OwnTree::read(&tree).expect("fits").its().expect("a bridge names it");
    let [bridge] = &its.bridges[..] else { panic!("one bridge: {its:?}") };
    let ids = [0, 0x10_0000, 0x10_3000, 0x10_9000, 0x12_0000].map(|at| id(bridge, at));
    assert_eq!(ids, [None, Some(0x500), Some(0x500), Some(0x508), None]);
    assert_eq!(bridge.devices_end(), 0x520);
}

#[test]
fn devices_that_reach_memory_beside_the_smmu_are_known() {
    let machine = |map: &[u32], more: &[(&str, &str)]| {
        let mut tree = FdtWriter::new().expect("memory");
        let root: &[(&str, &[u32])] = &[("#address-cells", &[2]), ("#size-cells", &[2])];
        node(&mut tree, "", root, "", |tree| {
            node(tree, "intc", &[("phandle", &[GIC])], "arm,gic-v3", |_| {});
            let smmu: &[(&str, &[u32])] = &[("phandle", &[9]), ("reg", &[0, 0x905_0000, 0, 0x2_0000])];
            let soc: &[(&str, &[u32])] = &[root[0], root[1], ("ranges", &[])];
            node(tree, "soc", soc, "simple-bus", |tree| node(tree, "smmuv3@9050000", smmu, "arm,smmu-v3", |_| {}));
            // "pci\0" in one cell.
            let pcie: &[(&str, &[u32])] = &[("device_type", &[0x7063_6900]), ("iommu-map", map)];
            node(tree, "pcie@10000000", pcie, "pci-host-ecam-generic", |_| {});
            for (number, (compatible, property)) in (1..).zip(more) {
                let at: &[(&str, &[u32])] = &[("reg", &[0, number << 16, 0, 0x1000]), (property, &[9, 1])];
                node(tree, &alloc::format!("device@{number}0000"), at, compatible, |_| {});
            }
        });
        tree.finish().expect("a tree")
    };
    let beside = |map: &[u32]| {
        let tree = machine(map, &[]);
        let own = OwnTree::read(&tree).expect("fits");
        assert_eq!(own.smmus().iter().map(|smmu| smmu.registers).collect::<Vec<_>>(), [range(0x905_0000, 0x2_0000)]);
        own.bus_beside(&own.smmus())
    };
    assert_eq!(beside(&[0, 9, 0, 0x1_0000]), None);
    assert_eq!(beside(&[0x8000, 9, 0, 0x8000, 0, 9, 0x100, 0x8000]), None, "in two pieces");
    for gap in
        [&[][..], &[0, 9, 0, 0xff00], &[8, 9, 0, 0x1_0000], &[0, 7, 0, 0x1_0000], &[0, 9, 0, 0x80, 0x81, 9, 0, 0xffff]]
    {
        assert_eq!(beside(gap).as_deref(), Some("pcie@10000000"), "{gap:x?}");
    }
    let others = [
        ("arm,pl011", "clocks"),
        ("virtio,mmio", "interrupts"),
        ("qemu,fw-cfg-mmio", "dma-coherent"),
        ("some,master", "iommus"),
        ("other,master", "iommu-map"),
        ("cfi-flash", "bank-width"),
        ("arm,smmu-v3", "dma-coherent"),
    ];
    let tree = machine(&[], &others);
    let masters = OwnTree::read(&tree).expect("fits").masters();
    let wanted = [2, 3, 5].map(|number| range(number << 16, 0x1000));
    assert_eq!(masters, wanted, "without those that read no memory, or through the SMMU");
    // Another IOMMU is none of ours.
    let own = OwnTree::read(&tree).expect("fits");
    assert!(!own.masters().contains(&range(4 << 16, 0x1000)) && own.bus_beside(&[]).is_some());
}

#[test]
fn bus_with_addresses_of_its_own_is_beside_the_smmu_if_a_device_of_it_may_read_memory() {
    let beside = |compatible: &str| {
        let mut tree = FdtWriter::new().expect("memory");
        let root: &[(&str, &[u32])] = &[("#address-cells", &[2]), ("#size-cells", &[2])];
        node(&mut tree, "", root, "", |tree| {
            node(tree, "intc", &[("phandle", &[GIC])], "arm,gic-v3", |_| {});
            let moved: &[(&str, &[u32])] = &[root[0], root[1], ("ranges", &[0, 0, 0, 0x1000_0000, 0, 0x1000_0000])];
            node(tree, "soc", moved, "simple-bus", |tree| {
                node(tree, "a@0", &[("reg", &[0, 0, 0, 0x1000]), ("iommus", &[7, 1])], compatible, |_| {});
            });
        });
        let tree = tree.finish().expect("a tree");
        OwnTree::read(&tree).expect("fits").bus_beside(&[Smmu { phandle: 9, registers: range(0, 0x1000) }])
    };
    assert_eq!(beside("arm,pl011"), None);
    assert_eq!(beside("some,master").as_deref(), Some("soc"), "also if an IOMMU sees it that is not driven");
}

#[test]
fn interrupts_that_nobody_names_are_free() {
    // The SPIs that a machine names are this one, and 3 by the interrupt map of the bridge.
    let named = |properties: &[(&str, &[u32])]| {
        let mut tree = FdtWriter::new().expect("memory");
        node(&mut tree, "", &[("#address-cells", &[2]), ("#size-cells", &[2])], "", |tree| {
            node(tree, "intc", &[("phandle", &[GIC]), ("#address-cells", &[2])], "arm,gic-v3", |_| {});
            node(tree, "device", properties, "a", |_| {});
        });
        tree.finish().expect("a tree")
    };
    let free = |tree: &[u8]| OwnTree::read(tree).expect("fits").free_intids(254);
    assert_eq!(free(&machine(2)), 64..254, "3 is used, by the interrupt map of the bridge");
    assert_eq!(free(&named(&[])), 32..254);
    assert_eq!(free(&named(&[("interrupts", &[0, 80, 4, 1, 150, 4])])), 128..254, "a private one does not count");
    assert_eq!(free(&named(&[("interrupts-extended", &[GIC, 0, 130, 4, 7, 1])])), 32..162);
    assert_eq!(free(&named(&[("interrupt-map", &[0, 0, 0, 1, GIC, 5, 5, 0, 200, 4])])), 32..232);
    let all: Vec<u32> = (0..224).flat_map(|spi| [0, spi, 4]).collect();
    assert!(free(&named(&[("interrupts", &all)])).is_empty());
}

#[test]
fn tree_that_does_not_fit_is_refused() {
    assert_eq!(OwnTree::read(&[]).err(), Some(Unfit::Damaged));
    assert_eq!(OwnTree::read(&machine(1)).err(), Some(Unfit::Cells));
    let with = |controller: &[(&str, &[u32])], compatible: &str| {
        let mut tree = FdtWriter::new().expect("memory");
        node(&mut tree, "", &[("#address-cells", &[2]), ("#size-cells", &[2])], "", |tree| {
            node(tree, "intc", controller, compatible, |_| {});
        });
        OwnTree::read(&tree.finish().expect("a tree")).err()
    };
    assert_eq!(with(&[("phandle", &[1])], "arm,gic-400"), Some(Unfit::NoController));
    assert_eq!(with(&[], "arm,gic-v3"), Some(Unfit::NoController));
    assert_eq!(with(&[("phandle", &[LAST_PHANDLE])], "arm,gic-v3"), Some(Unfit::NoPhandle));
    assert_eq!(with(&[("phandle", &[1])], "arm,gic-v3"), None);
}

#[test]
fn damaged_tree_of_the_machine_never_panics() {
    let whole = machine(2);
    for at in 0..whole.len() {
        for value in [0xff, whole[at] ^ 1] {
            let mut damaged = whole.clone();
            damaged[at] = value;
            if let Ok(own) = OwnTree::read(&damaged) {
                let mut tree = FdtWriter::new().expect("memory");
                let root = tree.begin_node("").expect("a name");
                // What cannot be written is an error.
                let _ = own.write_root(&mut tree);
                let frame = own.frame().or_else(|| {
                    let its = own.its()?;
                    let intids = Some(own.free_intids(256)).filter(|intids| !intids.is_empty());
                    Some(MsiFrame { phandle: its.phandle, registers: its.registers, intids })
                });
                let _ = own.write_controller(&mut tree, frame.as_ref());
                let _ = own.write_devices(&mut tree, &[range(0, 1 << 40)], frame.as_ref());
                let _ = tree.end_node(root);
                let _ = own.controller_registers().count();
                let _ = (own.masters(), own.bus_beside(&own.smmus()));
                for bridge in own.its().map(|its| its.bridges).unwrap_or_default() {
                    let _ = (bridge.device_at(bridge.ecam.start), bridge.devices_end());
                }
            }
        }
    }
}
