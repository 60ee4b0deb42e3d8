//! `selftest=iommu`: has a device write where it must not, and where it may, and raise interrupts that it was given,
//! and others. The device is QEMU's `edu`, which copies between memory and a buffer of its own, at any address that it
//! is told, and sends a message when it is told.
//!
//! The device gets real stage-2 tables, as a VM's device does, without a VM. Each line of the log says what the device
//! was told, and whether memory has changed, or an interrupt has arrived. Without an IOMMU there is a line for each:
//! memory of the hypervisor has changed, and an interrupt has arrived.
//!
//! An interrupt is raised in two ways: by the message of the function (MSI), which the test programs at will as a
//! function with a back door would, and by a copy to the address of messages. An INIT that arrives resets the pCPU, and
//! the test never ends.

#![expect(unsafe_code, reason = "registers in memory")]

use alloc::vec::Vec;
use core::arch::asm;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES, PageSize};
use stage2::{Access, Shape, Stale, Tree};
use virtio_drivers::transport::pci::bus::{Command, ConfigurationAccess, DeviceFunction, PciRoot};

use super::iommu::{self as guards, Message};
use super::irq::{DEVICE, SPURIOUS};
use super::paging::map_mmio;
use super::virtio::Bus0;
use super::{power, tsc};
use crate::arch::tables::TablePool;
use crate::arch::x86_64::format::{Stage2Format, stage2_format};
use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::frames::Frames;
use crate::io::iommu::{self, Devices, Functions, Guard, RequesterId};
use crate::vm::address_space::NoTlb;

/// Vendor and device number in configuration space.
const EDU: (u16, u16) = (0x1234, 0x11e8);
/// Registers (QEMU's docs/specs/edu.rst): interrupts; where DMA reads and writes, how much, and the command.
const RAISE: u64 = 0x60;
const ACKNOWLEDGE: u64 = 0x64;
const SOURCE: u64 = 0x80;
const TARGET: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
const START: u64 = 1 << 0;
const TO_MEMORY: u64 = 1 << 1;
/// The device's own address of its buffer.
const BUFFER: u64 = 0x4_0000;
/// Bytes of the registers that are used.
const REGISTERS: u64 = 0x1000;

/// Configuration space: the first capability, and MSI with an address of 64 bits.
const CAPABILITIES: u8 = 0x34;
const MSI: u32 = 5;
const MSI_ON: u32 = 1 << 16;
/// Delivery mode INIT, in a message.
const INIT: u16 = 5 << 8;
/// Time for an interrupt to arrive.
const ARRIVAL_NANOS: u64 = 20_000_000;

/// Bytes of one copy, and the time limit for it. The device takes 100 ms.
const BYTES: usize = 64;
const PATIENCE_NANOS: u64 = 5_000_000_000;

/// Where the device's tables map anything: far from all host addresses of small machines, so that no address means
/// something in both.
const BASE: Gpa = Gpa(1 << 40);
const LARGE: Gpa = Gpa(BASE.0 + (2 << 20));
/// An address of the device for which nothing is mapped.
const NOWHERE: Gpa = Gpa(BASE.0 + 0x5000);

/// Runs the test, and ends the machine.
pub(super) fn run() -> ! {
    let Some(edu) = Edu::find() else {
        log::error!("selftest=iommu needs QEMU's device: -device edu,dma_mask=0xffffffffffffffff");
        power::exit(abi::exit_code::REFUSED)
    };
    let is_good = match Machine::guard() {
        Guard::On(by) => {
            log::info!("selftest: {by}; the device is {}", edu.function);
            guarded(&edu)
        }
        Guard::Off(why) => unguarded(&edu, &why),
    };
    power::exit(if is_good { abi::exit_code::CLEAN } else { abi::exit_code::REFUSED })
}

/// Without an IOMMU the device writes wherever it is told.
fn unguarded(edu: &Edu, why: &str) -> bool {
    let own = marked(PAGE_BYTES);
    edu.write(own.hpa().0);
    let has_changed = !is_marked(&own, 0);
    if has_changed {
        log::warn!("selftest: no IOMMU guards this machine ({why}): the device has written to Dunlin's memory");
    }
    let has_arrived = arrives(|| edu.copy_message(&own, direct(DEVICE.into())));
    if has_arrived {
        log::warn!("selftest: an interrupt that the device has raised by a write has arrived");
    }
    let are_ended = has_arrived && strange_vectors_are_ended(|message| edu.copy_message(&own, message));
    has_changed && are_ended
}

/// Whether interrupts with vectors that no device should send are taken and ended: those of exceptions, of nothing, and
/// of spurious interrupts. One that is not ended keeps all others away.
fn strange_vectors_are_ended(send: impl Fn(Message)) -> bool {
    const VECTORS: [u8; 8] = [16, 17, 18, 22, 31, 0xf3, 0xfe, SPURIOUS];
    let lost = VECTORS.into_iter().chain([DEVICE]).find(|vector| !arrives(|| send(direct((*vector).into()))));
    match lost {
        Some(vector) => log::error!("selftest: no interrupt with vector {vector:#x} was taken"),
        None => log::info!("selftest: interrupts with strange vectors are taken and ended"),
    }
    lost.is_none()
}

/// A message for this pCPU where nothing remaps: a vector, or another delivery mode.
fn direct(data: u16) -> Message {
    let apic_id = u8::try_from(cpu::this().arch.apic_id).unwrap_or(0);
    Message { data, ..Message::direct(apic_id, 0) }
}

/// Whether an interrupt with the vector of the host's devices arrives when this is done.
fn arrives(act: impl FnOnce()) -> bool {
    let count = || cpu::this().taken.device.get();
    let before = count();
    act();
    let deadline = tsc::now() + tsc::nanos_to_ticks(ARRIVAL_NANOS);
    while count() == before && tsc::now() < deadline {
        // SAFETY: handlers keep all registers and touch counters only. The second instruction is behind the shadow of
        // the first.
        unsafe { asm!("sti", "nop", "cli") };
    }
    count() != before
}

/// The memory and the tables of the test.
struct Guarded<'a> {
    edu: &'a Edu,
    own: Frames,
    page: Frames,
    large: Frames,
    /// The message for the interrupt that the device was given.
    given: Message,
    is_good: bool,
}

fn guarded(edu: &Edu) -> bool {
    let large = PageSize::Size2M.bytes();
    let mut test = Guarded {
        edu,
        own: marked(PAGE_BYTES),
        page: marked(PAGE_BYTES),
        large: marked(large),
        given: direct(DEVICE.into()),
        is_good: true,
    };
    let region = GpaRange::new(BASE, 2 * large).expect("a fixed range");
    let pool = TablePool::new(&[region], 1, 0).expect("memory for a few tables");
    let (tree, mut shape) = Tree::new(stage2_format(), &pool).expect("memory for a few tables");
    let own = test.own.hpa().0;

    test.expect("a device that nobody owns writes to Dunlin's memory", own, false);

    map(&tree, &pool, &mut shape, BASE, &test.page);
    map(&tree, &pool, &mut shape, LARGE, &test.large);
    let functions = Functions::These(Vec::from([edu.function]));
    test.no_interrupt("a device that nobody owns raises an interrupt", direct(DEVICE.into()));
    let devices = Devices::own(functions, None, tree.root()).expect("nobody owns a device yet");
    test.interrupts();
    test.expect("it writes to a page of its owner", BASE.0, true);
    test.expect("it writes to a large page of its owner", LARGE.0, true);
    test.expect("it writes to Dunlin's memory", own, false);
    test.expect("it writes beyond its owner's memory", NOWHERE.0, false);

    let page = GpaRange::new(BASE, PAGE_BYTES).expect("a fixed range");
    let stale = tree.walk_mut(&pool, &NoTlb, &mut shape).protect(page, Access::READ).expect("no table is needed");
    devices.flush(stale);
    test.expect("it writes to a page that its owner may only read", BASE.0, false);
    test.reads_page();

    let range = GpaRange::new(LARGE, large).expect("a fixed range");
    let stale = tree.walk_mut(&pool, &NoTlb, &mut shape).unmap(range).expect("no table is needed");
    let keeps = test.changes(LARGE.0);
    log::info!("selftest: before the flush, a translation that is gone is {}", if keeps { "used" } else { "not used" });
    devices.flush(stale);
    test.expect("it writes to a page that was taken away", LARGE.0, false);

    map(&tree, &pool, &mut shape, LARGE, &test.large);
    devices.flush(Stale::of(range));
    test.expect("it writes to a page that is back", LARGE.0, true);
    drop(devices);
    test.expect("it writes to a page of its last owner", LARGE.0, false);
    test.no_interrupt("it raises the interrupt of its last owner", test.given);

    let all = Devices::own(Functions::All, None, tree.root()).expect("nobody owns a device");
    test.interrupts_of_owner_of_all();
    drop(all);
    test.no_interrupt("it raises a vector when it has no owner any more", direct(DEVICE.into()));
    test.is_good
}

impl Guarded<'_> {
    /// Has the device write to this address of its own, and compares whether some memory has changed.
    fn expect(&mut self, what: &str, address: u64, expected: bool) {
        let has_changed = self.changes(address);
        self.verdict(what, has_changed, expected);
    }

    /// Has the device send this message while nobody owns it.
    fn no_interrupt(&mut self, what: &str, message: Message) {
        if guards::keeps_interrupts() {
            self.interrupt(what, message, false);
        }
    }

    /// Has the device send this message, and compares whether the interrupt arrives.
    fn interrupt(&mut self, what: &str, message: Message, expected: bool) {
        let arrives = arrives(|| self.edu.send(message));
        self.verdict(what, arrives, expected);
    }

    /// Has the device copy this message to where messages go, and compares whether the interrupt arrives.
    fn interrupt_by_copy(&mut self, what: &str, message: Message, expected: bool) {
        let arrives = arrives(|| self.edu.copy_message(&self.page, message));
        self.verdict(what, arrives, expected);
    }

    /// The device, which one VM of several owns, raises the interrupt that it was given, and others.
    fn interrupts(&mut self) {
        const NUMBER: usize = 3;
        let function = self.edu.function;
        let apic_id = u8::try_from(cpu::this().arch.apic_id).unwrap_or(0);
        let route = |function| guards::route(function, NUMBER, apic_id, DEVICE);
        let Some(given) = route(function) else {
            log::error!("selftest: no interrupt can be given to {function}");
            self.is_good = false;
            return;
        };
        self.given = given;
        self.interrupt("it raises the interrupt that it was given", given, true);
        if !guards::remaps_interrupts() {
            log::warn!("selftest: interrupts are not remapped: no others are tried");
            return;
        }

        // The log has one line in a second for a device.
        let deadline = tsc::now() + tsc::nanos_to_ticks(1_100_000_000);
        while tsc::now() < deadline {
            core::hint::spin_loop();
        }
        // In both kinds of tables, the next entry.
        let next = Message { data: given.data + 1, ..given };
        self.interrupt("it raises one that it was not given", next, false);
        if guards::keeps_interrupts() {
            self.interrupt("it raises a vector of its choice", direct(DEVICE.into()), false);
            self.interrupt("it raises an INIT", direct(INIT), false);
            self.interrupt_by_copy("it writes a vector to the address of messages", direct(DEVICE.into()), false);
            self.interrupt_by_copy("it writes an INIT to the address of messages", direct(INIT), false);
        } else {
            log::warn!("selftest: messages of the old format pass: its INIT would, and is not tried");
        }

        guards::close_routes(function);
        self.interrupt("it raises the interrupt that was taken from it", given, false);
        // Where all functions share a table, it is the same entry.
        let other = RequesterId(function.0 ^ 8);
        if let Some(others) = route(other) {
            self.interrupt("it raises the interrupt of another device", others, false);
            guards::close_routes(other);
        }
        self.given = route(function).unwrap_or(given);
        self.interrupt("it raises the interrupt that is back", self.given, true);
    }

    /// The device, whose owner has all devices, chooses its vectors.
    fn interrupts_of_owner_of_all(&mut self) {
        self.interrupt("whose owner has all devices, it raises a vector", direct(DEVICE.into()), true);
        self.is_good &= strange_vectors_are_ended(|message| self.edu.send(message));
        if guards::stops_init() {
            self.interrupt("whose owner has all devices, it raises an INIT", direct(INIT), false);
        } else {
            log::warn!("selftest: its INIT would pass, and is not tried");
        }
    }

    fn verdict(&mut self, what: &str, happens: bool, expected: bool) {
        let result = if happens { "done" } else { "refused" };
        if happens == expected {
            log::info!("selftest: {what}: {result}");
        } else {
            log::error!("selftest: {what}: {result}, which is wrong");
            self.is_good = false;
        }
        iommu::report();
    }

    fn changes(&self, address: u64) -> bool {
        let all = [&self.own, &self.page, &self.large];
        all.iter().for_each(|frames| mark(frames));
        self.edu.write(address);
        !all.iter().all(|frames| is_marked(frames, 0))
    }

    /// Has the device read the page that it may only read, and write what it has read to the large page.
    fn reads_page(&mut self) {
        let told = *b"read by a device";
        assert!(self.page.write(0, &told), "a page is longer");
        self.edu.read(BASE.0);
        self.edu.write(LARGE.0);
        let mut found = [0; 16];
        assert!(self.large.read(0, &mut found), "a page is longer");
        self.verdict("it reads a page that its owner may only read", found == told, true);
    }
}

fn map(tree: &Tree<Stage2Format>, pool: &TablePool, shape: &mut Shape, gpa: Gpa, frames: &Frames) {
    let range = GpaRange::new(gpa, frames.bytes()).expect("a fixed range");
    tree.walk_mut(pool, &NoTlb, shape).map(range, frames.hpa(), Access::ALL).expect("there are enough tables");
}

/// A run of frames, with a mark that the device does not write.
fn marked(bytes: u64) -> Frames {
    let frames = Frames::allocate(bytes, bytes).expect("memory for a few pages");
    frames.zero();
    mark(&frames);
    frames
}

const MARK: [u8; BYTES] = [0x5a; BYTES];

fn mark(frames: &Frames) {
    assert!(frames.write(0, &MARK), "a page is longer");
}

fn is_marked(frames: &Frames, offset: u64) -> bool {
    let mut found = [0; BYTES];
    frames.read(offset, &mut found) && found == MARK
}

/// The device.
struct Edu {
    function: RequesterId,
    device: DeviceFunction,
    registers: u64,
    /// Where MSI is in its configuration space.
    msi: u8,
}

impl Edu {
    fn find() -> Option<Self> {
        let mut root = PciRoot::new(Bus0::find()?);
        let (device, _) = root.enumerate_bus(0).find(|(_, info)| (info.vendor_id, info.device_id) == EDU)?;
        root.set_command(device, Command::MEMORY_SPACE | Command::BUS_MASTER | Command::INTERRUPT_DISABLE);
        let config = Bus0::find()?;
        let base = config.read_word(device, 0x10) & !0xf;
        let function = RequesterId(u16::from(device.device) << 3 | u16::from(device.function));
        // The list of capabilities ends with 0, and has at most as many as there is room for.
        let place = |byte: u8| Some(byte & 0xfc).filter(|at| *at != 0);
        let first = place(config.read_word(device, CAPABILITIES).to_le_bytes()[0]);
        let next = |at: &u8| place(config.read_word(device, *at).to_le_bytes()[1]);
        let mut capabilities = core::iter::successors(first, next).take(48);
        let msi = capabilities.find(|at| config.read_word(device, *at) & 0xff == MSI)?;
        Some(Self { function, device, registers: map_mmio(Hpa(base.into()), REGISTERS).0, msi })
    }

    /// Sends this message.
    fn send(&self, Message { address, data }: Message) {
        let Some(mut config) = Bus0::find() else { return };
        for (at, value) in [(4, address), (8, 0), (12, data.into()), (0, MSI_ON)] {
            config.write_word(self.device, self.msi + at, value);
        }
        self.set_u32(RAISE, 1);
        self.set_u32(ACKNOWLEDGE, 1);
        config.write_word(self.device, self.msi, 0);
    }

    /// Copies a message by way of this page of memory, which its owner lets it reach at [`BASE`].
    fn copy_message(&self, page: &Frames, Message { address, data }: Message) {
        assert!(page.write(0, &u32::from(data).to_le_bytes()), "a page is longer");
        let from = if matches!(Machine::guard(), Guard::On(_)) { BASE.0 } else { page.hpa().0 };
        self.copy(from, BUFFER, 0);
        self.copy_bytes(BUFFER, address.into(), 4, TO_MEMORY);
    }

    /// Writes its buffer to memory.
    fn write(&self, address: u64) {
        self.copy(BUFFER, address, TO_MEMORY);
    }

    /// Reads memory into its buffer.
    fn read(&self, address: u64) {
        self.copy(address, BUFFER, 0);
    }

    fn copy(&self, from: u64, to: u64, direction: u64) {
        self.copy_bytes(from, to, BYTES as u64, direction);
    }

    fn copy_bytes(&self, from: u64, to: u64, bytes: u64, direction: u64) {
        self.set(SOURCE, from);
        self.set(TARGET, to);
        self.set(COUNT, bytes);
        self.set(COMMAND, START | direction);
        let deadline = tsc::now() + tsc::nanos_to_ticks(PATIENCE_NANOS);
        while self.get(COMMAND) & START != 0 {
            assert!(tsc::now() < deadline, "the device copies for ever");
            core::hint::spin_loop();
        }
    }

    fn set(&self, register: u64, value: u64) {
        // SAFETY: `find` has mapped the registers, and nothing else uses the device.
        unsafe { ((self.registers + register) as *mut u64).write_volatile(value) };
    }

    fn set_u32(&self, register: u64, value: u32) {
        // SAFETY: as above.
        unsafe { ((self.registers + register) as *mut u32).write_volatile(value) };
    }

    fn get(&self, register: u64) -> u64 {
        // SAFETY: as above.
        unsafe { ((self.registers + register) as *const u64).read_volatile() }
    }
}
