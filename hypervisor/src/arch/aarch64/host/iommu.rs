//! The machine's SMMUs: what devices reach in memory (Arm IHI 0070).
//!
//! At first no device behind an SMMU reaches anything: [`init`] blocks all of them before the hypervisor uses a device.
//! The VM that gets the machine's devices has all of them, so the stream table has one content for all: entries that
//! name nothing, or the VM's stage-2 tables. So one table of the second level serves for all buses.
//!
//! An SMMU that cannot walk these tables leaves the machine as one without an SMMU. So does a bus that no SMMU sees.
//! Other devices beside it are closed to the VM ([`masters`]).

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Display;

use aarch64_boot::{OwnTree, Smmu};
use aarch64_defs::features::GUEST_PHYSICAL_BITS;
use aarch64_defs::smmu::{self, Abilities, BYTES, Command, Entry, Event, Place, Stage2, register};
use addr::{Hpa, HpaRange, PAGE_BYTES};
use spin::{Mutex, Once};
use stage2::Stale;

use super::device_tree::Machine;
use super::mmio::Registers;
use crate::arch::aarch64::el2::format::stage2_format;
use crate::frames::Frames;
use crate::io::iommu::{Domain, Functions, Guard, RequesterId};

/// Log2 of the entries in a queue, at most.
const QUEUE_BITS: u32 = 7;
/// Time limit for an answer: a second. It needs microseconds.
const PATIENCE_NANOS: u64 = 1_000_000_000;

/// The SMMUs, once they guard.
static GUARDS: Once<Mutex<Vec<Guarding>>> = Once::new();
/// Why they do not.
static UNGUARDED: Once<String> = Once::new();

/// An SMMU that guards.
struct Guarding {
    registers: Registers,
    base: Hpa,
    output_bits: u32,
    /// The stream table: its first level, and the one table of the second.
    first: Frames,
    second: Frames,
    commands: Frames,
    next_command: Place,
    events: Frames,
    next_event: Place,
}

/// An SMMU has not answered in time, or refused a command.
struct Silent(&'static str);

/// Blocks all devices behind SMMUs, if they can. Runs on the first pCPU, before devices are used.
pub(super) fn init(machine: &'static Machine) {
    match start(machine) {
        Ok(guards) => {
            for guard in &guards {
                log::debug!("SMMUv3 at {}: {}-bit addresses", guard.base, guard.output_bits);
            }
            GUARDS.call_once(|| Mutex::new(guards));
        }
        Err(why) => {
            UNGUARDED.call_once(|| why);
        }
    }
}

fn start(machine: &'static Machine) -> Result<Vec<Guarding>, String> {
    let tree = OwnTree::read(machine.tree).map_err(|why| why.to_string())?;
    let found = tree.smmus();
    if found.is_empty() {
        return Err(String::from("the device tree has no SMMUv3"));
    }
    if let Some(bus) = tree.bus_beside(&found) {
        return Err(format!("devices of {bus} reach memory beside the SMMU"));
    }
    found.iter().map(Guarding::start).collect()
}

/// Whether devices are kept to what they were granted.
pub(crate) fn guard() -> Guard {
    match GUARDS.get() {
        Some(guards) => {
            let places: Vec<String> = guards.lock().iter().map(|guard| guard.base.to_string()).collect();
            Guard::On(format!("SMMUv3 at {}", places.join(", ")))
        }
        None => Guard::Off(UNGUARDED.get().cloned().unwrap_or_default()),
    }
}

/// Registers of devices that reach memory beside the SMMUs: their owner must not reach them. None where no SMMU guards,
/// because it would change nothing.
pub(in crate::arch::aarch64) fn masters(tree: &OwnTree<'_>) -> Vec<HpaRange> {
    if GUARDS.is_completed() { tree.masters() } else { Vec::new() }
}

/// Gives all devices to the owner of these tables. VMs with single functions do not exist here.
pub(crate) fn grant(_: &Functions, domain: Domain, root: Hpa) {
    with_all("a grant of devices", |guard| {
        let format = stage2_format();
        let (t0sz, sl0, output_bits) = (format.t0sz(), format.sl0(), guard.output_bits);
        guard.set_entries(&Entry::stage2(Stage2 { vmid: domain.0, root, t0sz, sl0, output_bits }));
        guard.execute(&[Command::AllEntries, Command::ForgetVm(domain.0), Command::Sync])
    });
}

/// Takes all devices from their owner: they reach nothing any more. On return no access of theirs is under way.
pub(crate) fn revoke(_: &Functions, domain: Domain) {
    with_all("a revocation of devices", |guard| {
        guard.set_entries(&Entry::NOTHING);
        guard.execute(&[Command::AllEntries, Command::ForgetVm(domain.0), Command::Sync])
    });
}

/// Flushes what SMMUs keep of a domain's translations. On return no device uses a stale one.
pub(crate) fn flush(domain: Domain, stale: Stale) {
    if !stale.is_empty() {
        with_all("a flush", |guard| guard.execute(&[Command::ForgetVm(domain.0), Command::Sync]));
    }
}

/// Calls `tell` for each event that SMMUs have reported since the last call.
pub(crate) fn take_events(tell: &mut dyn FnMut(RequesterId, &dyn Display)) {
    if let Some(guards) = GUARDS.get() {
        guards.lock().iter_mut().for_each(|guard| guard.take_events(tell));
    }
}

/// Has all SMMUs do something.
///
/// # Panics
/// One does not answer: going on would mean that memory may have two owners. No guest and no device can cause it.
fn with_all(what: &str, mut action: impl FnMut(&mut Guarding) -> Result<(), Silent>) {
    let Some(guards) = GUARDS.get() else { return };
    for guard in guards.lock().iter_mut() {
        if let Err(Silent(answer)) = action(guard) {
            panic!("the SMMU at {} does not answer: {what} waited for {answer}", guard.base);
        }
    }
}

/// Memory of an SMMU, cleared, at a multiple of its length.
fn memory(bytes: u64) -> Result<Frames, String> {
    let frames = Frames::allocate(bytes, bytes.next_power_of_two());
    let frames = frames.map_err(|_| String::from("there is no memory for the SMMU's tables"))?;
    frames.zero();
    Ok(frames)
}

impl Guarding {
    /// Takes an SMMU over: no device behind it reaches anything.
    fn start(found: &Smmu) -> Result<Self, String> {
        let base = found.registers.start;
        let name = |why: &dyn Display| format!("the SMMUv3 at {base} {why}");
        if found.registers.bytes() < BYTES {
            return Err(name(&"has too few registers in the device tree"));
        }
        let registers = Registers::map(&found.registers);
        let [idr0, idr1, idr5] = [register::IDR0, register::IDR1, register::IDR5].map(|at| registers.read32(at));
        let abilities = Abilities { idr0, idr1, idr5 };
        abilities.check().map_err(|why| name(&why))?;
        if abilities.output_bits() < GUEST_PHYSICAL_BITS {
            return Err(name(&"puts out too few bits of addresses for the tables of guests"));
        }
        let stream_bits = abilities.stream_bits();
        let (command_bits, event_bits) = (abilities.command_bits(QUEUE_BITS), abilities.event_bits(QUEUE_BITS));
        let mut guard = Self {
            registers,
            base,
            output_bits: abilities.output_bits(),
            first: memory(PAGE_BYTES.max(8 << (stream_bits - smmu::SPLIT)))?,
            second: memory((Entry::BYTES as u64) << smmu::SPLIT)?,
            commands: memory(PAGE_BYTES.max((Command::BYTES as u64) << command_bits))?,
            next_command: Place { value: 0, bits: command_bits },
            events: memory(PAGE_BYTES.max((Event::BYTES as u64) << event_bits))?,
            next_event: Place { value: 0, bits: event_bits },
        };
        guard.take_over(stream_bits).map_err(|Silent(what)| name(&format!("does not answer: waited for {what}")))?;
        Ok(guard)
    }

    fn take_over(&mut self, stream_bits: u32) -> Result<(), Silent> {
        let registers = self.registers;
        // Nothing passes while it is off.
        let is_written = |registers: Registers| registers.read32(register::GBPA) & register::GBPA_UPDATE == 0;
        self.wait_until("what passes", is_written)?;
        registers.write32(register::GBPA, register::GBPA_UPDATE | register::GBPA_ABORT);
        self.wait_until("what passes", is_written)?;
        self.enable(0)?;
        registers.write32(register::IRQ_CTRL, 0);

        let entry = smmu::first_level(self.second.hpa()).to_le_bytes();
        for number in 0..1_u64 << (stream_bits - smmu::SPLIT) {
            let is_written = self.first.write(8 * number, &entry);
            debug_assert!(is_written);
        }
        registers.write32(register::CR1, register::CR1_CACHED);
        registers.write32(register::CR2, register::CR2_PRIVATE | register::CR2_RECORD_INVALID);
        registers.write64(register::STRTAB_BASE, smmu::base(self.first.hpa(), 0));
        registers.write32(register::STRTAB_BASE_CFG, smmu::stream_table(stream_bits));
        registers.write64(register::CMDQ_BASE, smmu::base(self.commands.hpa(), self.next_command.bits));
        registers.write32(register::CMDQ_PROD, 0);
        registers.write32(register::CMDQ_CONS, 0);
        registers.write64(register::EVENTQ_BASE, smmu::base(self.events.hpa(), self.next_event.bits));
        registers.write32(register::EVENTQ_PROD, 0);
        registers.write32(register::EVENTQ_CONS, 0);

        self.enable(register::CR0_CMDQEN)?;
        self.execute(&[Command::AllEntries, Command::ForgetAll, Command::Sync])?;
        self.enable(register::CR0_CMDQEN | register::CR0_EVENTQEN)?;
        self.enable(register::CR0_CMDQEN | register::CR0_EVENTQEN | register::CR0_SMMUEN)
    }

    /// Enables this, and nothing else.
    fn enable(&self, what: u32) -> Result<(), Silent> {
        self.registers.write32(register::CR0, what);
        self.wait_until("what is enabled", |registers| registers.read32(register::CR0ACK) == what)
    }

    fn wait_until(&self, what: &'static str, is_so: impl Fn(Registers) -> bool) -> Result<(), Silent> {
        if self.registers.wait_until(PATIENCE_NANOS, is_so) { Ok(()) } else { Err(Silent(what)) }
    }

    /// Gives all entries this content. The word that makes one valid is written last to give, and first to take.
    fn set_entries(&self, entry: &Entry) {
        let Entry(words) = entry;
        let [valid, ..] = *words;
        for number in 0..1_u64 << smmu::SPLIT {
            let at = number * Entry::BYTES as u64;
            let write = |index: usize, word: u64| {
                let is_written = self.second.write(at + 8 * index as u64, &word.to_le_bytes());
                debug_assert!(is_written);
            };
            if valid == 0 {
                write(0, 0);
            }
            (1..words.len()).for_each(|index| write(index, words[index]));
            write(0, valid);
        }
    }

    /// Has commands executed, fewer than there is room for in the queue. On return they are complete.
    fn execute(&mut self, commands: &[Command]) -> Result<(), Silent> {
        for command in commands {
            let at = u64::from(self.next_command.index()) * Command::BYTES as u64;
            let is_written = self.commands.write(at, &command.bytes());
            debug_assert!(is_written);
            self.next_command = self.next_command.next();
        }
        let next = self.next_command;
        self.registers.write32(register::CMDQ_PROD, next.value);
        self.wait_until("a command's completion", |registers| {
            let at = registers.read32(register::CMDQ_CONS);
            next.is(at) && at & register::CMDQ_ERROR == 0
        })
    }

    fn take_events(&mut self, tell: &mut dyn FnMut(RequesterId, &dyn Display)) {
        let written = self.registers.read32(register::EVENTQ_PROD);
        while !self.next_event.is(written) {
            let mut bytes = [0; Event::BYTES];
            let is_read = self.events.read(u64::from(self.next_event.index()) * Event::BYTES as u64, &mut bytes);
            debug_assert!(is_read);
            let words = bytes.as_chunks::<8>().0;
            let mut event = Event([0; 4]);
            event.0.iter_mut().zip(words).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
            #[expect(clippy::cast_possible_truncation, reason = "functions of PCI have 16 bits")]
            let function = RequesterId(event.stream() as u16);
            tell(function, &format_args!("{function}: {event}"));
            self.next_event = self.next_event.next();
        }
        // That some were lost is known from now on.
        let overflow = written & register::EVENTQ_OVERFLOW;
        if self.registers.read32(register::EVENTQ_CONS) != self.next_event.value | overflow {
            self.registers.write32(register::EVENTQ_CONS, self.next_event.value | overflow);
        }
    }
}
