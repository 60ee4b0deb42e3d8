//! The machine's ITS (Arm IHI 0069, chapter 5), for the messages of the devices that a VM has.
//!
//! It is told little: event `n` of each device is LPI [`FIRST_LPI`]` + n`, always. Which pCPU takes an event is the
//! same for all devices. Software and the ITS share tables in memory; the hypervisor writes them before they are handed
//! over, and no more after that.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use aarch64_defs::its::{self, Baser, Command, FIRST_LPI, LPI_ENABLED, Table, Target, Typer, redistributor, register};
use addr::{HpaRange, PAGE_BYTES};
use spin::Mutex;

use super::gic;
use super::mmio::Registers;
use crate::cpu::preemption::preemption_point;
use crate::cpu::scheduler;
use crate::frames::{Exhausted, Frames};

/// Bits of LPIs' numbers: as few as there can be.
const LPI_BITS: u32 = 14;
/// Bytes of the queue of commands.
const QUEUE_BYTES: u64 = 0x1_0000;
/// The alignment of queues, and of tables of pending interrupts.
const ALIGN: u64 = 0x1_0000;
/// The most pages in a table.
const MAX_PAGES: u64 = 256;
/// The most devices: each needs a command where an event goes to another pCPU.
const MAX_DEVICES: usize = 256;

/// The ITS, once it is set up.
static ITS: Mutex<Option<Its>> = Mutex::new(None);

/// Why there are no messages, or not those of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::arch::aarch64) enum Unusable {
    /// A redistributor has no LPIs.
    NoLpis,
    /// Somebody has used LPIs before, and the tables cannot be changed.
    InUse,
    /// It does not stop, or does not execute a command.
    Silent,
    /// A command was wrong.
    Stalled,
    /// It has fewer DeviceIDs or EventIDs than are needed, or its table of devices would be too long.
    TooSmall,
    /// There is no memory for its tables, or none where it reaches.
    NoMemory,
    /// There are too many devices.
    TooMany,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoLpis => "a redistributor has no LPIs",
            Self::InUse => "LPIs have been in use before Dunlin started",
            Self::Silent => "the ITS does not answer",
            Self::Stalled => "the ITS has refused a command",
            Self::TooSmall => "the ITS has too few numbers for devices or events",
            Self::NoMemory => "there is no memory for the ITS's tables",
            Self::TooMany => "there are too many devices",
        })
    }
}

impl From<Exhausted> for Unusable {
    fn from(_: Exhausted) -> Self {
        Self::NoMemory
    }
}

struct Its {
    registers: Registers,
    typer: Typer,
    /// What the ITS reads.
    queue: Frames,
    /// Where in it the next command goes.
    next: u64,
    events: Range<u32>,
    /// The collection of each event.
    routes: Vec<u16>,
    targets: Vec<Target>,
    /// The tables that the ITS has, besides those of devices.
    tables: Vec<Frames>,
    /// Each known device's table of events.
    devices: BTreeMap<u32, Frames>,
}

/// Waits for an answer, for a limited time.
fn wait_until(registers: Registers, is_so: impl Fn(Registers) -> bool) -> Result<(), Unusable> {
    const PATIENCE_NANOS: u64 = 100_000_000;
    if registers.wait_until(PATIENCE_NANOS, is_so) { Ok(()) } else { Err(Unusable::Silent) }
}

/// Sets the ITS with these registers up, for devices below `devices_end` and these events of each.
///
/// # Errors
/// Why there are no messages. Nothing has changed then, but that the ITS is off.
pub(in crate::arch::aarch64) fn start(
    registers: &HpaRange,
    devices_end: u64,
    events: Range<u32>,
) -> Result<(), Unusable> {
    let found = redistributors()?;
    let registers = Registers::map(registers);
    let typer = Typer(registers.read64(register::TYPER));
    if devices_end > 1 << typer.device_bits() || events.end > 1 << typer.event_bits().min(31) {
        return Err(Unusable::TooSmall);
    }
    registers.write32(register::CTLR, 0);
    wait_until(registers, |registers| registers.read32(register::CTLR) & register::CTLR_QUIESCENT != 0)?;

    let targets: Vec<Target> = found
        .iter()
        .map(|(range, of_one)| match typer.names_by_address() {
            true => Target::Address(range.start),
            false => Target::Number(redistributor::processor_number(of_one.read64(redistributor::TYPER))),
        })
        .collect();
    let queue = memory(QUEUE_BYTES, ALIGN)?;
    registers.write64(register::CBASER, its::cbaser(queue.hpa(), QUEUE_BYTES));
    registers.write64(register::CWRITER, 0);
    let routes = events.clone().map(|_| 0).collect();
    let (tables, devices) = (Vec::new(), BTreeMap::new());
    let mut its = Its { registers, typer, queue, next: 0, events, routes, targets, tables, devices };
    its.give_tables(devices_end)?;

    let lpis = memory(PAGE_BYTES << (LPI_BITS - 13), PAGE_BYTES)?;
    let enabled: Vec<u8> = its.events.clone().map(|_| LPI_ENABLED).collect();
    if !lpis.write(its.events.start.into(), &enabled) {
        return Err(Unusable::TooSmall);
    }
    let pending = found.iter().map(|_| memory(PAGE_BYTES, ALIGN)).collect::<Result<Vec<_>, _>>()?;
    registers.write32(register::CTLR, register::CTLR_ENABLED);
    // From here on the memory is not given back.
    for ((_, of_one), pending) in found.iter().zip(&pending) {
        of_one.write64(redistributor::PROPBASER, its::propbaser(lpis.hpa(), LPI_BITS));
        of_one.write64(redistributor::PENDBASER, its::pendbaser(pending.hpa()));
        let control = of_one.read32(redistributor::CTLR);
        of_one.write32(redistributor::CTLR, control | redistributor::CTLR_ENABLE_LPIS);
    }
    its.tables.extend(pending.into_iter().chain([lpis]));

    let collections = (0..).zip(its.targets.clone());
    let commands = collections.map(|(collection, target)| Command::MapCollection { collection, target });
    let done = its.execute(commands);
    *ITS.lock() = Some(its);
    done
}

/// The device's messages are interrupts from now on.
///
/// # Errors
/// Why they are not.
pub(in crate::arch::aarch64) fn map_device(device: u32) -> Result<(), Unusable> {
    match &mut *ITS.lock() {
        Some(its) if !its.devices.contains_key(&device) => its.map_device(device),
        _ => Ok(()),
    }
}

/// Has the pCPU with the number of this vCPU take an event of all devices.
pub(in crate::arch::aarch64) fn route(event: u32, vcpu: u32) {
    if let Some(its) = &mut *ITS.lock()
        && let Err(why) = its.route(event, vcpu)
    {
        log::warn!("message {event} does not follow its vCPU: {why}");
    }
}

/// The redistributors of all pCPUs that run vCPUs.
fn redistributors() -> Result<Vec<(HpaRange, Registers)>, Unusable> {
    scheduler::runners()
        .map(|pcpu| {
            let range = gic::find_redistributor(pcpu.arch.affinity).ok_or(Unusable::NoLpis)?;
            let registers = Registers::map(&range);
            if registers.read64(redistributor::TYPER) & redistributor::TYPER_PLPIS == 0 {
                return Err(Unusable::NoLpis);
            }
            match registers.read32(redistributor::CTLR) & redistributor::CTLR_ENABLE_LPIS {
                0 => Ok((range, registers)),
                _ => Err(Unusable::InUse),
            }
        })
        .collect()
}

/// Memory of zeros that the ITS reaches.
fn memory(bytes: u64, align: u64) -> Result<Frames, Unusable> {
    let frames = Frames::allocate(bytes, align)?;
    let range = HpaRange::new(frames.hpa(), frames.bytes()).filter(|range| its::reaches(range.end()));
    range.ok_or(Unusable::NoMemory)?;
    for offset in (0..frames.bytes().div_ceil(ALIGN)).map(|part| part * ALIGN) {
        frames.zero_part(offset, ALIGN);
        preemption_point();
    }
    Ok(frames)
}

impl Its {
    /// Gives it the tables that it asks for.
    fn give_tables(&mut self, devices_end: u64) -> Result<(), Unusable> {
        for offset in (0..register::BASERS).map(|number| register::BASER + 8 * number) {
            let asked = Baser(self.registers.read64(offset));
            let entries = match asked.table() {
                Table::Devices => devices_end,
                Table::Collections => self.targets.len() as u64,
                Table::Other => continue,
            };
            // It may have pages of one size only, and says so in what is read back.
            self.registers.write64(offset, asked.with(addr::Hpa(0), 1, 0x1_0000).0 & !(1 << 63));
            let page_bytes = Baser(self.registers.read64(offset)).page_bytes();
            let pages = (entries * asked.entry_bytes()).div_ceil(page_bytes).max(1);
            if pages > MAX_PAGES {
                return Err(Unusable::TooSmall);
            }
            let table = memory(pages * page_bytes, page_bytes)?;
            self.registers.write64(offset, asked.with(table.hpa(), pages, page_bytes).0);
            self.tables.push(table);
        }
        Ok(())
    }

    fn map_device(&mut self, device: u32) -> Result<(), Unusable> {
        if self.devices.len() >= MAX_DEVICES {
            return Err(Unusable::TooMany);
        }
        let event_bits = self.events.end.next_power_of_two().ilog2().max(1);
        let table = memory(self.typer.entry_bytes() << event_bits, PAGE_BYTES)?;
        let known = Command::MapDevice { device, table: table.hpa(), event_bits };
        let routes = self.events.clone().zip(self.routes.clone());
        let events =
            routes.map(|(event, collection)| Command::MapEvent { device, event, lpi: FIRST_LPI + event, collection });
        // The ITS has the table from here on, whatever it says.
        self.devices.insert(device, table);
        self.execute([known].into_iter().chain(events))
    }

    fn route(&mut self, event: u32, vcpu: u32) -> Result<(), Unusable> {
        let pcpus = u32::try_from(self.targets.len()).unwrap_or(u32::MAX).max(1);
        // There are fewer than 65536 pCPUs.
        let collection = u16::try_from(vcpu % pcpus).unwrap_or(0);
        let index = event.checked_sub(self.events.start).and_then(|index| usize::try_from(index).ok());
        let Some(route) = index.and_then(|index| self.routes.get_mut(index)).filter(|route| **route != collection)
        else {
            return Ok(());
        };
        *route = collection;
        let devices: Vec<u32> = self.devices.keys().copied().collect();
        self.execute(devices.into_iter().map(|device| Command::MoveEvent { device, event, collection }))
    }

    /// Has commands executed, fewer than there is room for in the queue.
    fn execute(&mut self, commands: impl Iterator<Item = Command>) -> Result<(), Unusable> {
        let end = self.targets.clone().into_iter().map(|target| Command::Sync { target });
        for command in commands.chain(end) {
            let is_written = self.queue.write(self.next, &command.bytes());
            debug_assert!(is_written);
            self.next = (self.next + Command::BYTES as u64) % QUEUE_BYTES;
        }
        let next = self.next;
        self.registers.write64(register::CWRITER, next);
        wait_until(self.registers, |registers| {
            let at = registers.read64(register::CREADR);
            at == next || at & register::CREADR_STALLED != 0
        })?;
        match self.registers.read64(register::CREADR) & register::CREADR_STALLED {
            0 => Ok(()),
            _ => Err(Unusable::Stalled),
        }
    }
}
