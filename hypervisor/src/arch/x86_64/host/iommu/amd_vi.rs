//! The IOMMU of AMD (AMD-Vi).
//!
//! All functions are in one device table, which all IOMMUs of the machine read. Format and commands are those of the
//! crate `amd_vi`; I/O page tables are the VMs' nested tables.
//!
//! Each function of a list has an interrupt remapping table of its own, with an entry for each message that it was
//! given. Who owns all functions programs messages without an exit, for any vCPU, which a table of that kind cannot
//! tell apart: it looks up the vector, and ignores the processor. So there messages of vectors pass as they are, and
//! others do not (but in QEMU: [`quirks`]). I/O APICs and HPETs belong to that owner, and raise nothing while there is
//! none.
//!
//! The IOMMU keeps what it has read: entries of both kinds of tables, and translations. So each change ends with
//! invalidations, and a wait until they are complete.

#![expect(unsafe_code, reason = "registers in memory")]

use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::fmt::Display;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Hpa, HpaRange, PAGE_BYTES};
use amd_vi::ivrs::{Ivrs, Reserved, Scope, Special, Unit};
use amd_vi::registers::{self, ExtendedFeatures, control, status};
use amd_vi::{Command, DeviceId, DeviceTableEntry, Event, InterruptEntry, Interrupts, Pages, Ring};
use spin::{Mutex, Once};
use stage2::{Stale, What};

use super::{Iommus, LEVELS, Message, Silent, check_registers, memory, wait_until};
use crate::arch::x86_64::host::paging::map_mmio;
use crate::arch::x86_64::host::quirks;
use crate::frames::Frames;
use crate::io::iommu::{Domain, Functions, RequesterId};
use crate::memory_map::MemoryMap;

/// log2 of the entries of command buffers and event logs: one page.
const RING_ORDER: u32 = 8;

/// All IOMMUs of PCI segment 0, and the one table that they share.
pub(super) struct Guards {
    units: Vec<Mutex<Hardware>>,
    /// An entry for each function, four words long.
    table: Frames,
    /// An empty I/O page table, for entries that allow nothing.
    empty: Frames,
    /// What firmware says about devices.
    ivrs: Ivrs<'static>,
    /// Interrupts can be remapped. If not, firmware does not name the I/O APIC (QEMU with `intremap=off`).
    can_remap: bool,
    /// The function that the hypervisor itself uses.
    trusted: Once<DeviceId>,
    /// Interrupt remapping tables of functions that VMs own, a page each.
    tables: Mutex<Vec<(DeviceId, Frames)>>,
}

impl Iommus for Guards {
    fn describe(&self) -> String {
        let names: Vec<String> = self.units.iter().map(|unit| unit.lock().name.clone()).collect();
        format!("AMD-Vi, {}", names.join(", "))
    }

    fn is_special(&self, function: RequesterId) -> bool {
        self.is_special_device(DeviceId(function.0))
    }

    fn registers(&self) -> Vec<HpaRange> {
        self.ivrs.units().filter_map(|unit| HpaRange::new(unit.base, registers::BYTES)).collect()
    }

    fn functions(&self) -> Vec<RequesterId> {
        self.ivrs.units().map(|unit| RequesterId(unit.device.0)).collect()
    }

    fn remaps_interrupts(&self) -> Result<(), String> {
        let reason = "firmware does not say which number the I/O APIC has for the IOMMU (ACPI table IVRS)";
        if self.can_remap { Ok(()) } else { Err(String::from(reason)) }
    }

    fn reserved(&self, functions: &Functions) -> Vec<HpaRange> {
        let is_of = |reserved: &Reserved| match functions {
            Functions::All => true,
            Functions::These(these) => these.iter().any(|function| reserved.devices.contains(&function.0)),
        };
        let reserved = self.ivrs.reserved().filter(is_of);
        reserved.filter_map(|reserved| HpaRange::new(reserved.start, reserved.bytes)).collect()
    }

    fn alias_of(&self, function: RequesterId) -> Option<RequesterId> {
        let aliases = self.scopes().filter_map(|scope| match scope {
            Scope::Functions { first, last, alias: Some(alias), .. } => {
                (first..=last).contains(&DeviceId(function.0)).then_some(RequesterId(alias.0))
            }
            _ => None,
        });
        aliases.last().filter(|alias| *alias != function)
    }

    fn grant(&self, functions: &Functions, domain: Domain, root: Hpa) {
        for device in self.devices(functions) {
            let entry = DeviceTableEntry::translated(root, LEVELS, domain.0, self.interrupts_of(device, functions));
            self.write_entry(device, entry.with_system_management(self.settings(device)));
        }
        self.forget_devices(self.devices(functions));
        self.forget(domain, Pages::All, true);
        if matches!(functions, Functions::All) && self.can_remap {
            self.set_controllers(true);
        }
    }

    fn revoke(&self, functions: &Functions, domain: Domain) {
        for device in self.devices(functions) {
            self.write_entry(device, self.blocked());
        }
        self.forget_devices(self.devices(functions));
        self.forget(domain, Pages::All, true);
        if matches!(functions, Functions::All) {
            self.set_controllers(false);
        }
        // No IOMMU reads the tables any more.
        self.tables.lock().retain(|(device, _)| !functions.contains(RequesterId(device.0)));
    }

    fn interrupts_beside(&self) -> Option<String> {
        None
    }

    fn stops_init(&self) -> bool {
        self.can_remap && !quirks::loses_forwarded_interrupts()
    }

    fn route(&self, function: RequesterId, number: usize, apic_id: u8, vector: u8) -> Option<Message> {
        let device = DeviceId(function.0);
        let (address, data) = InterruptEntry::message(number)?;
        {
            let tables = self.tables.lock();
            let (_, table) = tables.iter().find(|(owned, _)| *owned == device)?;
            write_interrupt(table, number, InterruptEntry::fixed(apic_id, vector));
        }
        self.forget_interrupts(device);
        Some(Message { address, data })
    }

    fn close_routes(&self, function: RequesterId) {
        let device = DeviceId(function.0);
        if let Some((_, table)) = self.tables.lock().iter().find(|(owned, _)| *owned == device) {
            table.words().iter().for_each(|word| word.store(0, Ordering::SeqCst));
        }
        self.forget_interrupts(device);
    }

    fn trust(&self, function: RequesterId) {
        let device = self.trusted.call_once(|| DeviceId(function.0));
        self.write_entry(*device, DeviceTableEntry::untranslated(Domain::OWN.0, Interrupts::Blocked));
        self.forget_devices(core::iter::once(*device));
    }

    fn flush(&self, domain: Domain, stale: Stale) {
        match stale.what() {
            What::Nothing => {}
            What::Whole => self.forget(domain, Pages::All, true),
            What::Pages(_) | What::Range(_) => {
                let range = stale.range();
                self.forget(domain, Pages::covering(range.start.0, range.end().0), stale.tables());
            }
        }
    }

    fn take_events(&self, tell: &mut dyn FnMut(RequesterId, &dyn Display)) {
        for unit in &self.units {
            unit.lock().take_events(|event| tell(RequesterId(event.device.0), &event));
        }
    }
}

impl Guards {
    /// Blocks everything, and turns the IOMMUs on that firmware's table names.
    ///
    /// # Errors
    /// Why they do not guard. Then they are off.
    pub(super) fn start(ivrs: &'static [u8], ram: &MemoryMap) -> Result<Self, String> {
        let guards = Self::new(ivrs, ram)?;
        guards.turn_on()?;
        Ok(guards)
    }

    /// Reads firmware's table and takes memory. Changes nothing on the machine.
    fn new(bytes: &'static [u8], ram: &MemoryMap) -> Result<Self, String> {
        let ivrs = Ivrs::new(bytes).map_err(|malformed| format!("firmware's table is wrong: {malformed}"))?;
        if let Some(unit) = ivrs.units().find(|unit| unit.segment != 0) {
            return Err(format!("{} is of PCI segment {}; only segment 0 is supported", unit.device, unit.segment));
        }
        for unit in ivrs.units() {
            check_registers(unit.base, registers::BYTES, ram).map_err(|why| format!("{} {why}", unit.device))?;
        }
        let (table, empty) = (memory(DeviceTableEntry::TABLE_BYTES)?, memory(PAGE_BYTES)?);
        let mut units = Vec::new();
        for unit in ivrs.units() {
            units.push(Mutex::new(Hardware::new(
                &unit,
                memory(PAGE_BYTES)?,
                memory(PAGE_BYTES)?,
                memory(PAGE_BYTES)?,
            )?));
        }
        if units.is_empty() {
            return Err(String::from("firmware's table (IVRS) names none"));
        }
        let is_controller = |scope| matches!(scope, Scope::Special { kind: Special::IoApic, .. });
        let can_remap = ivrs.units().flat_map(|unit| unit.scopes()).any(is_controller);
        Ok(Self { units, table, empty, ivrs, can_remap, trusted: Once::new(), tables: Mutex::new(Vec::new()) })
    }

    /// Blocks everything, and turns the IOMMUs on. If one of them does not answer, turns them off again.
    fn turn_on(&self) -> Result<(), String> {
        for number in 0..=u16::MAX {
            self.write_entry(DeviceId(number), self.blocked());
        }
        let started = self.units.iter().try_for_each(|unit| unit.lock().start(&self.table));
        if started.is_err() {
            self.units.iter().for_each(|unit| unit.lock().registers.write(registers::CONTROL, 0));
        }
        started.map_err(|silent| silent.to_string())
    }

    /// The entry of a device that nobody owns.
    fn blocked(&self) -> DeviceTableEntry {
        DeviceTableEntry::blocked(self.empty.hpa(), LEVELS, Interrupts::Blocked)
    }

    /// Lets I/O APICs and HPETs raise interrupts, or not. The hypervisor or the owner of all devices programs them.
    /// They do not access memory.
    fn set_controllers(&self, are_used: bool) {
        let controllers: Vec<(DeviceId, u8)> = self
            .scopes()
            .filter_map(|scope| match scope {
                Scope::Special { kind: Special::IoApic | Special::Hpet, source, settings, .. } => {
                    Some((source, settings))
                }
                _ => None,
            })
            .collect();
        for (device, settings) in &controllers {
            let used = DeviceTableEntry::blocked(self.empty.hpa(), LEVELS, self.of_owner_of_all());
            let used = used.with_system_management(*settings).with_special_interrupts(*settings);
            self.write_entry(*device, if are_used { used } else { self.blocked() });
        }
        self.forget_devices(controllers.iter().map(|(device, _)| *device));
    }

    /// Which interrupts a device may raise whose owner programs messages without an exit.
    fn of_owner_of_all(&self) -> Interrupts {
        if self.stops_init() { Interrupts::Forwarded } else { Interrupts::Unmapped }
    }

    /// Which interrupts a device may raise that is about to be owned.
    fn interrupts_of(&self, device: DeviceId, functions: &Functions) -> Interrupts {
        if !self.can_remap || matches!(functions, Functions::All) {
            return self.of_owner_of_all();
        }
        match memory(PAGE_BYTES) {
            Ok(frames) => {
                let table = frames.hpa();
                self.tables.lock().push((device, frames));
                Interrupts::Remapped { table, order: InterruptEntry::ORDER }
            }
            Err(why) => {
                log::warn!("IOMMU: {device} raises no interrupts: {why}");
                Interrupts::Blocked
            }
        }
    }

    /// What firmware says of an owned function.
    fn settings(&self, device: DeviceId) -> u8 {
        let settings = self.scopes().filter_map(|scope| match scope {
            Scope::All { settings } => Some(settings),
            Scope::Functions { first, last, settings, .. } => (first..=last).contains(&device).then_some(settings),
            Scope::Special { source, settings, .. } | Scope::Named { source, settings } => {
                (source == device).then_some(settings)
            }
        });
        settings.last().unwrap_or(0)
    }

    fn scopes(&self) -> impl Iterator<Item = Scope> {
        self.ivrs.units().flat_map(|unit| unit.scopes())
    }

    /// Writes an entry while IOMMUs may read it. The word that decides about accesses is the last one to give rights,
    /// and the first to take them.
    fn write_entry(&self, device: DeviceId, entry: DeviceTableEntry) {
        let first = usize::from(device.0) * 4;
        let words = &self.table.words()[first..first + 4];
        if !entry.allows_access() {
            words[0].store(entry.access_word(), Ordering::SeqCst);
        }
        for (word, value) in words.iter().zip(entry.0).skip(1) {
            word.store(value, Ordering::SeqCst);
        }
        words[0].store(entry.access_word(), Ordering::SeqCst);
    }

    /// The devices that these functions are, without those that no VM can own: the hypervisor's own, the IOMMUs, and
    /// special ones, whose interrupts are not the function's.
    fn devices<'a>(&'a self, functions: &'a Functions) -> impl Iterator<Item = DeviceId> + Clone + 'a {
        let kept = move |device| self.trusted.get() == Some(&device) || self.is_special_device(device);
        let all = (0..=u16::MAX).filter(|number| functions.contains(RequesterId(*number))).map(DeviceId);
        all.filter(move |device| !kept(*device))
    }

    /// Whether it is an IOMMU, or names interrupts that are not its own.
    fn is_special_device(&self, device: DeviceId) -> bool {
        let names = |scope| matches!(scope, Scope::Special { source, .. } if source == device);
        self.ivrs.units().any(|unit| unit.device == device) || self.scopes().any(names)
    }

    fn forget_devices(&self, devices: impl Iterator<Item = DeviceId> + Clone) {
        for unit in &self.units {
            let mut unit = unit.lock();
            for device in devices.clone() {
                unit.forget_device(device).unwrap_or_else(|silent| silent.stop());
            }
            unit.complete().unwrap_or_else(|silent| silent.stop());
        }
    }

    fn forget_interrupts(&self, device: DeviceId) {
        for unit in &self.units {
            let mut unit = unit.lock();
            let sent = unit.send(Command::invalidate_interrupts(device));
            sent.and_then(|()| unit.complete()).unwrap_or_else(|silent| silent.stop());
        }
    }

    fn forget(&self, domain: Domain, pages: Pages, tables: bool) {
        for unit in &self.units {
            let mut unit = unit.lock();
            let sent = unit.send(Command::invalidate_pages(domain.0, pages, tables));
            sent.and_then(|()| unit.complete()).unwrap_or_else(|silent| silent.stop());
        }
    }
}

/// One IOMMU: its registers, and its buffers.
struct Hardware {
    name: String,
    registers: Registers,
    features: ExtendedFeatures,
    commands: Frames,
    command_ring: Ring,
    events: Frames,
    event_ring: Ring,
    /// The next event was announced, and was not there yet.
    awaits_event: bool,
    /// Where completion waits are answered, and the last answer that was asked for.
    answer: Frames,
    asked: u64,
}

impl Hardware {
    fn new(unit: &Unit<'_>, commands: Frames, events: Frames, answer: Frames) -> Result<Self, String> {
        let registers = Registers::new(unit.base);
        let features = ExtendedFeatures(registers.read(registers::EXTENDED_FEATURES));
        match features.levels() {
            Some(levels) if levels >= LEVELS => {}
            _ => return Err(format!("{} cannot walk {LEVELS} levels (features {:#x})", unit.device, features.0)),
        }
        Ok(Self {
            name: unit.device.to_string(),
            registers,
            features,
            commands,
            command_ring: Ring::new(RING_ORDER),
            events,
            event_ring: Ring::new(RING_ORDER),
            awaits_event: false,
            answer,
            asked: 0,
        })
    }

    /// Turns translation on, with this device table, and forgets what firmware has left in caches. If translation was
    /// on before, it stays on meanwhile.
    fn start(&mut self, table: &Frames) -> Result<(), Silent> {
        let was_on = self.registers.read(registers::CONTROL) & control::ENABLE;
        self.registers.write(registers::CONTROL, was_on);
        let stopped = |registers: &Registers| {
            registers.read(registers::STATUS) & (status::COMMAND_BUFFER_RUNS | status::EVENT_LOG_RUNS) == 0
        };
        self.wait_until("its buffers to stop", stopped)?;

        let registers = &self.registers;
        registers.write(registers::DEVICE_TABLE_BASE, registers::device_table_base(table.hpa(), table.bytes()));
        registers.write(registers::COMMAND_BUFFER_BASE, self.command_ring.base_register(self.commands.hpa()));
        registers.write(registers::EVENT_LOG_BASE, self.event_ring.base_register(self.events.hpa()));
        for place in [registers::COMMAND_HEAD, registers::COMMAND_TAIL, registers::EVENT_HEAD, registers::EVENT_TAIL] {
            registers.write(place, 0);
        }
        registers.write(registers::EXCLUSION_BASE, 0);
        registers.write(registers::EXCLUSION_LIMIT, 0);
        registers.write(registers::STATUS, status::EVENT_OVERFLOW);
        let on = control::ENABLE | control::EVENT_LOG | control::COMMAND_BUFFER | control::COHERENT;
        registers.write(registers::CONTROL, on);

        // The first answer comes before thousands of commands, in case that there is no IOMMU at all.
        self.complete()?;
        (0..=u16::MAX).try_for_each(|number| self.forget_device(DeviceId(number)))?;
        if self.features.invalidates_all() {
            self.send(Command::invalidate_all())?;
        } else {
            (0..=u16::MAX).try_for_each(|domain| self.send(Command::invalidate_pages(domain, Pages::All, true)))?;
        }
        self.complete()
    }

    /// Forgets what it has read about a device.
    fn forget_device(&mut self, device: DeviceId) -> Result<(), Silent> {
        self.send(Command::invalidate_device(device))?;
        self.send(Command::invalidate_interrupts(device))
    }

    /// Writes a command, once there is room for it. The IOMMU sees it at the next [`complete`](Self::complete), or when
    /// the buffer is full.
    fn send(&mut self, command: Command) -> Result<(), Silent> {
        if !self.command_ring.has_room(self.registers.read(registers::COMMAND_HEAD)) {
            self.registers.write(registers::COMMAND_TAIL, self.command_ring.at());
            let ring = self.command_ring;
            self.wait_until("room for a command", |registers| ring.has_room(registers.read(registers::COMMAND_HEAD)))?;
        }
        let words = entry(&self.commands, &self.command_ring);
        words[0].store(command.0[0], Ordering::SeqCst);
        words[1].store(command.0[1], Ordering::SeqCst);
        self.command_ring.advance();
        Ok(())
    }

    /// Waits until all commands so far are complete.
    fn complete(&mut self) -> Result<(), Silent> {
        self.asked += 1;
        self.send(Command::completion_wait(self.answer.hpa(), self.asked))?;
        self.registers.write(registers::COMMAND_TAIL, self.command_ring.at());
        let (answer, asked) = (&self.answer.words()[0], self.asked);
        self.wait_until("a command's completion", |_| answer.load(Ordering::SeqCst) == asked)
    }

    fn wait_until(&self, what: &'static str, is_so: impl Fn(&Registers) -> bool) -> Result<(), Silent> {
        wait_until(&self.name, what, || is_so(&self.registers))
    }

    /// Takes the events that are in the log, a round of it at most.
    fn take_events(&mut self, mut tell: impl FnMut(Event)) {
        let tail = self.registers.read(registers::EVENT_TAIL);
        while self.event_ring.has_more(tail) {
            let words = entry(&self.events, &self.event_ring);
            let event = Event::decode([words[0].load(Ordering::SeqCst), words[1].load(Ordering::SeqCst)]);
            // An IOMMU may move its tail a little before the event is visible in memory.
            if event.is_none() && !self.awaits_event {
                self.awaits_event = true;
                break;
            }
            self.awaits_event = false;
            words[0].store(0, Ordering::SeqCst);
            self.event_ring.advance();
            if let Some(event) = event {
                tell(event);
            }
        }
        self.registers.write(registers::EVENT_HEAD, self.event_ring.at());
        if self.registers.read(registers::STATUS) & status::EVENT_OVERFLOW != 0 {
            self.restart_log();
        }
    }

    /// The log was full, and the IOMMU writes no more events until it is turned on again.
    fn restart_log(&mut self) {
        log::warn!("the log of the IOMMU {} was full: some events were lost", self.name);
        let on = self.registers.read(registers::CONTROL);
        self.registers.write(registers::CONTROL, on & !control::EVENT_LOG);
        let has_stopped = |registers: &Registers| registers.read(registers::STATUS) & status::EVENT_LOG_RUNS == 0;
        self.wait_until("its log to stop", has_stopped).unwrap_or_else(|silent| silent.stop());
        self.registers.write(registers::STATUS, status::EVENT_OVERFLOW);
        self.event_ring = Ring::new(RING_ORDER);
        self.registers.write(registers::EVENT_LOG_BASE, self.event_ring.base_register(self.events.hpa()));
        self.registers.write(registers::EVENT_HEAD, 0);
        self.registers.write(registers::EVENT_TAIL, 0);
        self.registers.write(registers::CONTROL, on);
    }
}

/// Writes an entry of an interrupt remapping table. The caller holds the lock of the tables: two entries share a word.
fn write_interrupt(table: &Frames, number: usize, entry: InterruptEntry) {
    let Some(word) = table.words().get(number / 2) else { return };
    let shift = if number.is_multiple_of(2) { 0 } else { u32::BITS };
    let others = word.load(Ordering::SeqCst) & !(u64::from(u32::MAX) << shift);
    word.store(others | u64::from(entry.0) << shift, Ordering::SeqCst);
}

/// The words of a ring's next entry.
fn entry<'a>(buffer: &'a Frames, ring: &Ring) -> &'a [AtomicU64] {
    let first = usize::try_from(ring.at() / 8).unwrap_or(0);
    &buffer.words()[first..first + 2]
}

/// The registers of an IOMMU.
struct Registers(u64);

impl Registers {
    /// Those at `base`, which firmware reports.
    fn new(base: Hpa) -> Self {
        Self(map_mmio(base, registers::BYTES).0)
    }

    fn read(&self, offset: u64) -> u64 {
        debug_assert!(offset < registers::BYTES, "mapped");
        // SAFETY: `new` has mapped the registers, for good. Reading them has no effect.
        unsafe { ((self.0 + offset) as *const u64).read_volatile() }
    }

    fn write(&self, offset: u64, value: u64) {
        debug_assert!(offset < registers::BYTES, "mapped");
        // SAFETY: as above. Memory that the registers name is this driver's, and is never freed.
        unsafe { ((self.0 + offset) as *mut u64).write_volatile(value) };
    }
}
