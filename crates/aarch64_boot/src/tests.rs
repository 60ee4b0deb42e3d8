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
    let own = OwnTree::read(machine).expect("fits");
    let mut tree = FdtWriter::new().expect("memory");
    let root = tree.begin_node("").expect("a name");
    own.write_root(&mut tree).expect("properties");
    let controller = tree.begin_node("gic").expect("a name");
    own.write_controller(&mut tree).expect("properties");
    tree.end_node(controller).expect("in order");
    own.write_devices(&mut tree, closed).expect("nodes");
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
                let _ = own.write_devices(&mut tree, &[range(0, 1 << 40)]);
                let _ = tree.end_node(root);
                let _ = own.controller_registers().count();
            }
        }
    }
}
