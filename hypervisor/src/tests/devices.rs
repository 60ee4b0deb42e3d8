//! A device that writes to its owner's memory all the time, while pages of it come and go.
//!
//! The script is the device: pCPU 0 runs no vCPU. The IOMMU of the machine forgets nothing by itself.

use std::vec;

use addr::{Gpa, PAGE_BYTES};
use interleave::STEPS;
use stage2::Access;

use super::{Scenario, config, create, explore, prepare, until_gone};
use crate::arch::fake::iommu::device_writes;
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;
use crate::frames::Frames;
use crate::io::iommu::{Devices, Functions, RequesterId};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;

const DEVICE: RequesterId = RequesterId(0x20);
const OTHER: RequesterId = RequesterId(0x28);
/// A page of the VM, and how a device calls its first word.
const PAGE: u64 = 5;
const AT: Gpa = Gpa(PAGE * PAGE_BYTES);

fn functions() -> Functions {
    Functions::These(vec![DEVICE])
}

/// The first word of the page, as the host sees it.
fn word(vm: &Vm) -> u64 {
    let mut word = [0; 8];
    assert!(vm.memory.read(AT, &mut word));
    u64::from_le_bytes(word)
}

fn range() -> addr::GpaRange {
    addr::GpaRange::new(AT, PAGE_BYTES).expect("a page")
}

/// A page is taken from a VM whose vCPU and whose device write to it, and is used for something else.
pub(super) const TAKEN: Scenario = Scenario {
    name: "a page is taken from a VM whose device writes to it",
    cpus: 1,
    count: 300,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let config = config("owner", 1);
        prepare(core::slice::from_ref(&config));
        let vm = create(simulation, 0, &config, vec![vec![Op::Yield, Op::Yield, Op::Stop]]);
        vm.memory.own(functions(), None).expect("a domain is free");
        vm.start();
        assert!(device_writes(DEVICE, AT, 1), "it is its owner's page");
        assert_eq!(word(&vm), 1);
        assert!(!device_writes(OTHER, AT, 2), "nobody owns it");

        let tlbs = AllTlbs::of(&vm);
        let stale = vm.memory.walk_mut(&tlbs, &mut vm.memory.shape()).unmap(range()).expect("there are tables");
        stale.pay(&tlbs);
        assert!(!device_writes(DEVICE, AT, 3), "the page was taken away");
        assert_eq!(word(&vm), 1);

        let hpa = vm.memory.backing.pages(PAGE, 1).expect("it has frames");
        let back = vm.memory.walk_mut(&tlbs, &mut vm.memory.shape()).map(range(), hpa, Access::ALL);
        back.expect("there are tables");
        assert!(device_writes(DEVICE, AT, 4), "it is back");
        assert_eq!(word(&vm), 4);
        simulation.wait_until("the vCPU has stopped", || vm.is_over());
    },
};

/// A VM ends while its device writes, and its memory returns to the pool.
pub(super) const OWNER_ENDS: Scenario = Scenario {
    name: "a VM ends whose device writes to its memory",
    cpus: 1,
    count: 300,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let config = config("owner", 1);
        prepare(core::slice::from_ref(&config));
        let vm = create(simulation, 0, &config, vec![vec![Op::Stop]]);
        vm.memory.own(functions(), None).expect("a domain is free");
        vm.start();
        assert!(device_writes(DEVICE, AT, 1));
        until_gone(simulation, vm);
        // The last reference has gone; on threads of the operating system the VM may be on its way out still.
        let is_blocked = || !device_writes(DEVICE, AT, 2);
        simulation.wait_until("the device does not reach memory that may be anybody's", is_blocked);
        // The domain is free for another owner.
        let next = Frames::allocate(PAGE_BYTES, PAGE_BYTES).expect("there is memory");
        next.zero();
        let devices = Devices::own(Functions::These(vec![OTHER]), None, next.hpa()).expect("a domain is free");
        assert!(!device_writes(OTHER, AT, 3), "nothing is mapped for it");
        drop(devices);
    },
};

#[test]
fn device_does_not_reach_a_page_that_was_taken_from_its_owner() {
    explore(TAKEN);
}

#[test]
fn device_reaches_nothing_after_the_end_of_its_owner() {
    explore(OWNER_ENDS);
}
