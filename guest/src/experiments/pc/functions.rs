//! PCI functions of the machine that this VM was given: QEMU's device `edu`, which copies between memory and a buffer
//! of its own as it is told, and any function with a table of messages (MSI-X).
//!
//! The device writes to memory of this guest, and to addresses where this guest has none. There the hypervisor may be,
//! or another VM: that nothing is written, those must tell, and the log of the IOMMU. A write to 0xfeex_xxxx is an
//! interrupt for the processors of the machine: that none takes it, the machine shows by going on.

use core::sync::atomic::Ordering;

use super::pci::{by_ports, write_by_ports};
use crate::arch::attempt::{load_u32, store_u32, store_u64};
use crate::arch::{apic, cpu_local, hyperv, interrupts, tsc, window};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::interrupt::{COUNTED, taken};
use crate::record::record;

/// Configuration space: command, BARs, the first capability.
const COMMAND: u32 = 0x04;
const BARS: u32 = 0x10;
const CAPABILITIES: u32 = 0x34;
const MEMORY: u32 = 1 << 1;
const MASTER: u32 = 1 << 2;
const MSI: u32 = 5;
const MSI_X: u32 = 0x11;

/// The device, and its registers (QEMU's docs/specs/edu.rst).
const EDU: u32 = 0x11e8_1234;
const IDENTITY: u64 = 0x00;
const RAISE: u64 = 0x60;
const ACKNOWLEDGE: u64 = 0x64;
const SOURCE: u64 = 0x80;
const TARGET: u64 = 0x88;
const COUNT: u64 = 0x90;
const CONTROL: u64 = 0x98;
const START: u32 = 1;
const TO_MEMORY: u32 = 2;
/// The device's own address of its buffer, and the bytes of a copy.
const BUFFER: u64 = 0x4_0000;
const BYTES: u64 = 64;
/// Bytes of its registers.
const REGISTERS: u32 = 1 << 20;

/// Addresses where this guest has no memory: behind its RAM, and far behind.
const NOWHERE: [u64; 5] = [0x400_0000, 0x1000_0000, 0x1800_0000, 0x8000_0000, 1 << 32];

/// Where messages go: to the first processors of the machine, to all of them, and to the first entries of a table (in
/// VT-d's format).
const MESSAGES: [u64; 5] = [0xfee0_0000, 0xfee0_1000, 0xfeef_f000, 0xfee0_0018, 0xfee0_0038];
/// What stops a processor that takes it, or disturbs it: INIT, NMI, SMI, external, start-up; then vectors: that of an
/// exception, a guest's, and those of the hypervisor's timer and of nothing.
const INTERRUPTS: [u64; 9] = [0x4500, 0x4400, 0x4200, 0x4700, 0x4608, 0x4011, 0x4040, 0x40f1, 0x40f4];
const MARK: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// The function in this slot, if there is one.
fn id(slot: u32) -> Option<u32> {
    Some(by_ports(slot << 3, 0, 4)).filter(|id| *id != u32::MAX)
}

/// Where a function has this capability.
fn capability(slot: u32, kind: u32) -> Option<u32> {
    let mut at = by_ports(slot << 3, CAPABILITIES, 1) & 0xfc;
    for _ in 0..48 {
        if at == 0 {
            break;
        }
        let head = by_ports(slot << 3, at, 4);
        if head & 0xff == kind {
            return Some(at);
        }
        at = head >> 8 & 0xfc;
    }
    None
}

/// Tries the device `edu`.
pub(super) fn edu(context: &Context) -> Outcome {
    let Some(slot) = (1..32).find(|slot| id(*slot) == Some(EDU)) else { return Outcome::Unsupported("no edu") };
    let mut test = Edu { context, slot, base: u64::from(by_ports(slot << 3, BARS, 4) & !0xf), failures: 0 };

    write_by_ports(slot << 3, BARS, 4, u32::MAX);
    test.expect("size", by_ports(slot << 3, BARS, 4), !(REGISTERS - 1));
    for elsewhere in [0, 0x10_0000, 0xfee0_0000] {
        write_by_ports(slot << 3, BARS, 4, elsewhere);
        test.expect("address", u64::from(by_ports(slot << 3, BARS, 4)), test.base);
    }
    test.expect("identity", test.read(IDENTITY) & 0xff, 0xed);

    test.expect("write without bus master", test.writes_own_memory(), false);
    write_by_ports(slot << 3, COMMAND, 2, MEMORY | MASTER);
    test.expect("write to own memory", test.writes_own_memory(), true);
    for address in NOWHERE {
        test.copy(BUFFER, address, TO_MEMORY);
    }
    test.expect("write to own memory again", test.writes_own_memory(), true);
    test.messages();
    write_by_ports(slot << 3, COMMAND, 2, MEMORY);
    test.expect("write after bus master", test.writes_own_memory(), false);

    record!("record", experiment = "edu", nowhere = NOWHERE.len(), failures = test.failures);
    Outcome::Done { failures: test.failures }
}

/// Has the device `edu` write messages of all kinds, by copies. A function's own message has no such back door.
pub(super) fn interrupts(context: &Context) -> Outcome {
    let Some(slot) = (1..32).find(|slot| id(*slot) == Some(EDU)) else { return Outcome::Unsupported("no edu") };
    let mut test = Edu { context, slot, base: u64::from(by_ports(slot << 3, BARS, 4) & !0xf), failures: 0 };
    write_by_ports(slot << 3, COMMAND, 2, MEMORY | MASTER);
    let page = hyperv::spare_page();
    for message in INTERRUPTS {
        page.words()[0].store(message, Ordering::SeqCst);
        test.copy(page.address(), BUFFER, 0);
        MESSAGES.iter().for_each(|address| test.copy_bytes(BUFFER, *address, 4, TO_MEMORY));
    }
    // What the device reads has replaced its zeros.
    page.words().iter().for_each(|word| word.store(0, Ordering::SeqCst));
    test.copy(page.address(), BUFFER, 0);
    test.expect("write to own memory", test.writes_own_memory(), true);
    test.messages();
    write_by_ports(slot << 3, COMMAND, 2, MEMORY);
    let tried = INTERRUPTS.len() * MESSAGES.len();
    record!("record", experiment = "edu-interrupts", tried = tried, failures = test.failures);
    Outcome::Done { failures: test.failures }
}

struct Edu<'a> {
    context: &'a Context<'a>,
    slot: u32,
    /// Physical address of its registers.
    base: u64,
    failures: u64,
}

impl Edu<'_> {
    fn expect<T: PartialEq + core::fmt::Debug>(&mut self, of: &str, seen: T, expected: T) {
        let matches = seen == expected;
        let (of, seen) = (format_args!("{of}"), format_args!("{seen:x?}"));
        self.failures += self.context.expect("edu", of, format_args!("{expected:x?}"), seen, matches);
    }

    fn register(&self, at: u64) -> u64 {
        window::map_physical(cpu_local::index(), self.base) + at
    }

    fn read(&self, at: u64) -> u32 {
        load_u32(self.register(at)).unwrap_or(u32::MAX)
    }

    fn write(&self, at: u64, value: u32) {
        // The page is mapped: a fault would be shown by what does not happen.
        let _ = store_u32(self.register(at), value);
    }

    fn copy(&self, from: u64, to: u64, direction: u32) {
        self.copy_bytes(from, to, BYTES, direction);
    }

    fn copy_bytes(&self, from: u64, to: u64, bytes: u64, direction: u32) {
        for (at, value) in [(SOURCE, from), (TARGET, to), (COUNT, bytes)] {
            let _ = store_u64(self.register(at), value);
        }
        self.write(CONTROL, START | direction);
        cpu::wait_until(tsc::seconds(10), || self.read(CONTROL) & START == 0);
    }

    /// Has the device write its buffer, which is zeros, to a page with a mark.
    fn writes_own_memory(&self) -> bool {
        let page = hyperv::spare_page();
        page.words().iter().for_each(|word| word.store(MARK, Ordering::SeqCst));
        self.copy(BUFFER, page.address(), TO_MEMORY);
        let count = page.words().iter().filter(|word| word.load(Ordering::SeqCst) == 0).count() as u64;
        count * 8 == BYTES
    }

    /// Its message arrives with the vector that is written, and one that a local APIC does not take arrives nowhere.
    fn messages(&mut self) {
        let Some(at) = capability(self.slot, MSI) else { return self.expect("MSI", false, true) };
        let function = self.slot << 3;
        let is_wide = by_ports(function, at + 2, 2) & 1 << 7 != 0;
        let data = at + if is_wide { 12 } else { 8 };
        let counted = &taken(cpu_local::index()).counted;
        for (vector, arrives) in [(COUNTED, 1), (5, 0), (COUNTED, 1)] {
            write_by_ports(function, at + 4, 4, 0xfee0_0000 | apic::id() << 12);
            write_by_ports(function, data, 2, vector.into());
            write_by_ports(function, at + 2, 2, 1);
            let before = counted.load(Ordering::SeqCst);
            interrupts::enable();
            self.write(RAISE, 1);
            let has_arrived = || counted.load(Ordering::SeqCst) != before;
            cpu::wait_until(tsc::ticks(if arrives == 0 { 50_000 } else { 5_000_000 }), has_arrived);
            interrupts::disable();
            self.write(ACKNOWLEDGE, 1);
            self.expect("messages", counted.load(Ordering::SeqCst) - before, arrives);
            write_by_ports(function, at + 2, 2, 0);
        }
    }
}

/// Writes to the tables of messages of all functions, and reads what a table would have then.
pub(super) fn tables(context: &Context) -> Outcome {
    let (mut failures, mut found) = (0, 0u32);
    for slot in (1..32).filter(|slot| id(*slot).is_some()) {
        let Some(at) = capability(slot, MSI_X) else { continue };
        found += 1;
        let place = by_ports(slot << 3, at + 4, 4);
        let base = by_ports(slot << 3, BARS + 4 * (place & 7), 4) & !0xf;
        let table = u64::from(base) + u64::from(place & !7);
        let mut word = |of: &str, index: u64, value: Option<u32>, expected: u32| {
            let register = window::map_physical(cpu_local::index(), table) + 4 * index;
            if let Some(value) = value {
                let _ = store_u32(register, value);
            }
            let seen = load_u32(register).unwrap_or(u32::MAX);
            let (of, told) = (format_args!("slot {slot} {of}"), format_args!("{expected:x}"));
            failures += context.expect("msi-x-tables", of, told, format_args!("{seen:x}"), seen == expected);
        };
        word("masked at first", 3, None, 1);
        word("address", 0, Some(0xffff_ffff), 0xffff_ffff);
        word("address above", 1, Some(0x1234_5678), 0x1234_5678);
        word("data", 2, Some(0xffff_ff05), 0xffff_ff05);
        word("mask is off", 3, Some(0xffff_fffe), 0);
        word("mask is on", 3, Some(0xffff_ffff), 1);
    }
    record!("record", experiment = "msi-x-tables", tables = found, failures = failures);
    if found == 0 { Outcome::Unsupported("no MSI-X") } else { Outcome::Done { failures } }
}
