//! The machine, for the VM that has its devices ([`io`](crate::io)).
//!
//! | the guest uses | it gets |
//! |---|---|
//! | an address that is no RAM | the machine's, mapped at the first access |
//! | the interrupt controller, its serial ports | the hypervisor's, at the addresses of the machine's |
//! | a shared interrupt | the machine's, by way of the hypervisor's controller ([`Order`](crate::device::gic::Order)) |
//! | PSCI's power off and reset | the end of the VM, and then of the machine's run |
//! | its timers, private interrupts and system registers | those of any VM |
//!
//! The guest finds the devices in a tree that is a copy of the machine's ([`OwnTree`]).

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use aarch64_boot::OwnTree;
use aarch64_defs::features::GUEST_PHYSICAL_BITS;
use abi::control::StopReason;
use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};
use stage2::{Access, MapError};

use super::guest_tree::OwnDevices;
use super::layout::{self, Layout, REDISTRIBUTOR_BYTES, SERIAL_BYTES};
use super::messages::{self, Function};
use crate::arch::aarch64::el2;
use crate::arch::aarch64::el2::vcpu::stop;
use crate::arch::aarch64::host::{boot, gic, iommu, its, paging, virtio};
use crate::cpu;
use crate::cpu::scheduler;
use crate::device::gic::{Distributor, FIRST_SPI, INTIDS, Order};
use crate::frames::Frames;
use crate::io;
use crate::io::iommu::Guard;
use crate::io::reach::Reach;
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;
use crate::vm::memory::Memory;

/// What stands between the VM and the machine.
pub(super) struct MachineOfVm {
    reach: Reach,
}

/// Whether some VM was given the devices. They are given once: what their state is after a VM, only a reset clears.
static ARE_TAKEN: AtomicBool = AtomicBool::new(false);

/// The number of vCPUs of a VM with the devices that has so many of the machine's CPUs. Their numbers have no gaps.
pub(crate) fn vcpus_with_devices(cpus: u32) -> u32 {
    cpus
}

/// Gives the devices to a VM that is about to be created, with this number of vCPUs. It has no memory of its own kind.
///
/// # Errors
/// Why no VM, or not this one, can have them.
pub(crate) fn take_devices(vcpus: u32) -> Result<Vec<Frames>, String> {
    let count = u32::try_from(cpu::count()).unwrap_or(u32::MAX);
    if vcpus > count {
        return Err(format!(
            "{vcpus} vCPUs: with the machine's devices a VM has at most as many as the machine has CPUs, {count}"
        ));
    }
    let tree = tree()?;
    // The guest finds its redistributors where the machine has its own, in one piece.
    let room = redistributors().map_or(0, |range| range.bytes() / REDISTRIBUTOR_BYTES);
    if room < vcpus.into() {
        return Err(format!(
            "{vcpus} vCPUs: with the machine's devices a VM has at most {room}, as the machine's first region of \
             redistributors has no room for more"
        ));
    }
    if ARE_TAKEN.swap(true, Ordering::AcqRel) {
        return Err(String::from("another VM has had the machine's devices; they are given once"));
    }
    if tree.frame().is_none() {
        let [_, end] = last_interrupts();
        messages::start(&tree, FIRST_SPI + end);
    }
    Ok(Vec::new())
}

/// The machine's devices, as the guest is to see them.
///
/// # Errors
/// The guest's own devices do not fit into the machine's tree.
pub(super) fn devices() -> Result<OwnDevices, String> {
    let tree = tree()?;
    Ok(OwnDevices { closed: closed(), frame: tree.frame().or_else(|| messages::frame().cloned()), tree })
}

/// The machine's tree.
///
/// # Errors
/// As above.
fn tree() -> Result<OwnTree<'static>, String> {
    let machine = boot::machine().ok_or("there is no device tree")?;
    OwnTree::read(machine.tree).map_err(|why| why.to_string())
}

fn redistributors() -> Option<HpaRange> {
    boot::machine()?.redistributors[0]
}

/// The guest's devices: where the machine has those that they stand for. A serial port that has none there is in a page
/// where the hypervisor's image is, so the VM has no memory at it.
pub(super) fn layout() -> Layout {
    let [own, other] = last_interrupts();
    let machine = boot::machine();
    let image = paging::whole_image().start.0;
    let at = |range: Option<HpaRange>, otherwise: Gpa| range.map_or(otherwise, |range| Gpa(range.start.0));
    Layout {
        distributor: at(machine.and_then(|machine| machine.distributor), layout::VIRTUAL.distributor),
        redistributors: at(redistributors(), layout::VIRTUAL.redistributors),
        serial: [(at(machine.and_then(|machine| machine.uart), Gpa(image)), own), (Gpa(image + PAGE_BYTES), other)],
    }
}

/// Numbers of shared interrupts for the serial ports: the last ones, which machines use last.
const fn last_interrupts() -> [u32; 2] {
    [INTIDS - FIRST_SPI - 1, INTIDS - FIRST_SPI - 2]
}

const _: () = assert!(SERIAL_BYTES == PAGE_BYTES);

/// What the guest must not reach.
fn closed() -> Vec<HpaRange> {
    let Some(machine) = boot::machine() else { return Vec::new() };
    let mut closed: Vec<HpaRange> = machine.memory.ram().iter().copied().collect();
    if let Ok(tree) = tree() {
        closed.extend(tree.controller_registers().chain(tree.smmu_registers()).chain(iommu::masters(&tree)));
    }
    closed.extend([Some(paging::whole_image()), machine.uart, virtio::used().copied()].into_iter().flatten());
    closed
}

impl MachineOfVm {
    /// With everything within reach that is not the hypervisor's or another VM's, and all interrupts forwarded but
    /// those of the serial ports and of messages.
    pub(super) fn new(layout: &Layout, distributor: &mut Distributor) -> Self {
        let emulated = layout.serial.map(|(_, interrupt)| FIRST_SPI + interrupt);
        let messages = messages::intids();
        for intid in (FIRST_SPI..INTIDS).filter(|intid| !emulated.contains(intid)) {
            if messages.contains(&intid) {
                distributor.expect_message(intid);
            } else {
                distributor.forward(intid);
            }
        }
        let bits = GUEST_PHYSICAL_BITS.min(el2::features().physical_bits);
        let closed = closed().into_iter().chain(messages::configuration_spaces());
        Self { reach: Reach::new(closed, Hpa(1 << bits)) }
    }
}

/// Lets devices write to the frame for messages, where an SMMU keeps them to what is mapped. Other addresses of the
/// machine are mapped at a vCPU's first access, and this one has none.
pub(super) fn map_frame(memory: &Memory) {
    let Ok(OwnDevices { frame: Some(frame), .. }) = devices() else { return };
    let page = GpaRange::new(Gpa(frame.registers.start.0 & !(PAGE_BYTES - 1)), PAGE_BYTES);
    if !matches!(iommu::guard(), Guard::On(_)) {
        return;
    }
    if let Some(Err(why)) = page.map(|page| memory.map_at_its_address(page)) {
        log::warn!("devices raise no messages: their frame cannot be mapped: {why}");
    }
}

/// The machine does what the guest's interrupt controller has ordered.
// Not inlined, so that exits of other VMs save no registers for it.
#[cold]
#[inline(never)]
pub(super) fn carry_out(vm: &Vm) {
    let mut distributor = vm.platform().distributor.lock();
    let affinity_of = |vcpu: u32| {
        let pcpus = scheduler::runners().count().max(1);
        let pcpu = scheduler::runners().nth(vcpu as usize % pcpus);
        pcpu.map_or(0, |pcpu| pcpu.arch.affinity)
    };
    while let Some(order) = distributor.next_order() {
        match order {
            Order::Route { intid, vcpu } => its::route(intid, vcpu.unwrap_or(0)),
            of_controller => gic::carry_out(of_controller, affinity_of),
        }
    }
}

/// A device of the machine has raised the shared interrupt `intid`, which is active. Returns whether a guest ends it.
#[cold]
pub(in crate::arch::aarch64) fn interrupt(intid: u32) -> bool {
    let Some(vm) = io::owner() else { return false };
    let is_forwarded = vm.platform().own_machine.is_some() && vm.platform().distributor.lock().arrived(intid);
    super::platform::deliver_news(&vm);
    is_forwarded
}

/// A device of the machine has sent a message, which is this LPI.
#[cold]
pub(in crate::arch::aarch64) fn message(lpi: u32) {
    let Some((vm, intid)) = io::owner().zip(messages::intid_of(lpi)) else { return };
    vm.platform().distributor.lock().message(intid);
    super::platform::deliver_news(&vm);
}

/// The guest accessed `gpa`, where it has no memory. Maps what the machine has there, if the guest may reach it. Its
/// own tables decide about the kind of memory (Arm ARM, D8.6.5). It executes nothing there.
#[cold]
#[inline(never)]
pub(super) fn access(run: &mut Running<'_>, gpa: Gpa) -> Option<Next> {
    let machine = run.vm.platform().own_machine.as_ref()?;
    let page = match messages::function_at(gpa) {
        Some(Function::Here(page)) => page,
        Some(Function::Missing) => return None,
        None => machine.reach.page_at(gpa)?,
    };
    let memory = &run.vm.memory;
    let tlbs = AllTlbs::of(run.vm);
    let mapped = memory.walk_mut(&tlbs, &mut memory.shape()).map(page, Hpa(page.start.0), Access::READ_WRITE);
    match mapped {
        // Another vCPU may have mapped it since.
        Ok(()) | Err(MapError::Overlaps(_)) => Some(Next::Resume),
        Err(_) => {
            Some(stop(run, StopReason::Unsupported, "accesses a device for which there is no stage-2 table left"))
        }
    }
}

/// The guest reads at an address of the machine that is not mapped.
#[cold]
pub(super) fn read(vm: &Vm, gpa: Gpa) -> Option<u64> {
    vm.platform().own_machine.as_ref()?;
    messages::read(gpa)
}

/// The guest writes at such an address. Returns whether there is something.
#[cold]
pub(super) fn write(run: &Running<'_>, gpa: Gpa, value: u64) -> bool {
    let platform = run.vm.platform();
    let is_there = platform.own_machine.is_some() && messages::write(&mut platform.distributor.lock(), gpa, value);
    super::platform::deliver_news_of(run);
    is_there
}
