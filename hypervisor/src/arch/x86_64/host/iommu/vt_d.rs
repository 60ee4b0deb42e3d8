//! The IOMMU of Intel (VT-d).
//!
//! A root table and 256 context tables have an entry for each function of the segment, and all IOMMUs of the machine
//! read them. Format and descriptors are those of the crate `vt_d`; second-stage tables are the VMs' nested tables.
//!
//! The IOMMU keeps what it has read: context entries, and translations. So each change ends with invalidations, and a
//! wait until they are complete. If an IOMMU does not snoop the processors' caches, all that it reads is written back
//! to memory before that.
//!
//! One interrupt remapping table serves all functions. It has an entry for each vector of each pCPU, and an entry names
//! the function that may use it. Messages of the old format, which have the vector in them, are off. Who owns all
//! functions programs such messages without an exit; so while there is such an owner, remapping is off.

#![expect(unsafe_code, reason = "registers in memory, and caches")]

use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::arch::x86_64::{_mm_clflush, _mm_mfence};
use core::fmt::Display;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Hpa, HpaRange, PAGE_BYTES};
use spin::{Mutex, Once};
use stage2::{Stale, What};
use vt_d::dmar::{Dmar, Reserved, Unit};
use vt_d::registers::{self, Capabilities, Extended, fault_status, global};
use vt_d::{ContextEntry, Descriptor, Fault, InterruptEntry, Pages, interrupt_table, root_entry};

use super::{Iommus, LEVELS, Message, Silent, check_registers, memory, wait_until};
use crate::arch::x86_64::host::paging::{direct_map, is_mapped, map_mmio};
use crate::arch::x86_64::host::tsc;
use crate::frames::Frames;
use crate::io::iommu::{Domain, Functions, RequesterId};
use crate::memory_map::MemoryMap;

/// Buses of a segment, and bytes of the context table of one.
const BUSES: u64 = 256;
const BUS_BYTES: u64 = ContextEntry::TABLES_BYTES / BUSES;
/// The least number of bits of a domain's number: enough for those in use.
const DOMAIN_BITS: u32 = 8;
/// Bytes of a line of the caches.
const LINE_BYTES: usize = 64;

/// All IOMMUs of PCI segment 0, and the tables that they share.
pub(super) struct Guards {
    /// What firmware says about them and their devices.
    dmar: Dmar<'static>,
    units: Vec<Mutex<Hardware>>,
    roots: Frames,
    /// The context tables of all buses.
    contexts: Frames,
    /// The interrupt remapping table, or why there is none.
    interrupts: Result<Frames, String>,
    /// An IOMMU that does not stop messages of the old format.
    leak: Option<String>,
    /// All IOMMUs snoop the processors' caches.
    is_coherent: bool,
    /// The function that the hypervisor itself uses.
    trusted: Once<RequesterId>,
}

impl Iommus for Guards {
    fn describe(&self) -> String {
        let names: Vec<String> = self.units.iter().map(|unit| unit.lock().name.clone()).collect();
        format!("VT-d, {}", names.join(", "))
    }

    fn is_special(&self, _: RequesterId) -> bool {
        // An IOMMU of this kind is no PCI function.
        false
    }

    fn registers(&self) -> Vec<HpaRange> {
        self.units.iter().map(|unit| unit.lock().place).collect()
    }

    fn functions(&self) -> Vec<RequesterId> {
        Vec::new()
    }

    fn remaps_interrupts(&self) -> Result<(), String> {
        self.interrupts.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    fn interrupts_beside(&self) -> Option<String> {
        self.leak
            .as_ref()
            .map(|name| format!("the one at {name} lets messages of the old format pass (as QEMU's does)"))
    }

    fn stops_init(&self) -> bool {
        false
    }

    fn reserved(&self, functions: &Functions) -> Vec<HpaRange> {
        let is_of = |reserved: &Reserved<'_>| match functions {
            Functions::All => true,
            Functions::These(these) => these.iter().any(|function| reserved.may_be_of(function.0)),
        };
        let reserved = self.dmar.reserved().filter(is_of);
        reserved.filter_map(|reserved| HpaRange::new(reserved.start, reserved.last.0 - reserved.start.0 + 1)).collect()
    }

    fn alias_of(&self, _: RequesterId) -> Option<RequesterId> {
        // Firmware's table has none. What a bridge speaks for is blocked, because nobody owns the bridge.
        None
    }

    fn grant(&self, functions: &Functions, domain: Domain, root: Hpa) {
        self.write_back_tables(root, LEVELS - 1);
        self.write_entries(functions, ContextEntry::translated(root, domain.0));
        self.forget_contexts(domain);
        if matches!(functions, Functions::All) {
            self.remap(false);
        }
    }

    fn revoke(&self, functions: &Functions, domain: Domain) {
        if matches!(functions, Functions::All) {
            self.remap(true);
        }
        self.write_entries(functions, ContextEntry::BLOCKED);
        self.forget_contexts(domain);
    }

    fn route(&self, function: RequesterId, _: usize, apic_id: u8, vector: u8) -> Option<Message> {
        let index = InterruptEntry::index(apic_id, vector);
        let InterruptEntry([first, second]) = InterruptEntry::fixed(apic_id, vector, function.0);
        let words = self.interrupt(index)?;
        // Not in use while it is half written.
        words[0].store(0, Ordering::SeqCst);
        words[1].store(second, Ordering::SeqCst);
        words[0].store(first, Ordering::SeqCst);
        self.write_back(words);
        self.tell_all(Descriptor::forget_interrupt(index));
        let (address, data) = InterruptEntry::message(index);
        Some(Message { address, data })
    }

    fn close_routes(&self, function: RequesterId) {
        let own = |words: &&[AtomicU64]| {
            let entry = [words[0].load(Ordering::SeqCst), words[1].load(Ordering::SeqCst)];
            InterruptEntry(entry).is_of(function.0)
        };
        let Ok(table) = &self.interrupts else { return };
        for words in table.words().chunks_exact(2).filter(own) {
            words[0].store(0, Ordering::SeqCst);
            self.write_back(words);
        }
        self.tell_all(Descriptor::ALL_INTERRUPTS);
    }

    fn trust(&self, function: RequesterId) {
        let function = *self.trusted.call_once(|| function);
        self.write_entry(function, ContextEntry::untranslated(Domain::OWN.0));
        self.forget_contexts(Domain::OWN);
    }

    fn flush(&self, domain: Domain, stale: Stale) {
        if let Some(root) = self.root_of(domain) {
            self.write_back_tables(root, LEVELS - 1);
        }
        let range = stale.range();
        self.for_each(|unit| {
            let pages = match (stale.what(), unit.capabilities.most_pages()) {
                (What::Pages(_) | What::Range(_), Some(most)) => Pages::covering(range.start.0, range.end().0, most),
                _ => Pages::All,
            };
            unit.send(Descriptor::forget_pages(domain.0, pages, stale.tables()))?;
            unit.complete()
        });
    }

    fn take_events(&self, tell: &mut dyn FnMut(RequesterId, &dyn Display)) {
        for unit in &self.units {
            unit.lock().take_faults(|fault| {
                let function = RequesterId(fault.source);
                tell(function, &format_args!("{function}: {fault}"));
            });
        }
    }
}

impl Guards {
    /// Blocks everything, and turns the IOMMUs on that firmware's table names.
    ///
    /// # Errors
    /// Why they do not guard. Then they are off.
    pub(super) fn start(dmar: &'static [u8], ram: &MemoryMap) -> Result<Self, String> {
        let guards = Self::new(dmar, ram)?;
        let interrupts = guards.interrupts.as_ref().ok();
        let started = guards.units.iter().try_for_each(|unit| unit.lock().start(&guards.roots, interrupts));
        if started.is_err() {
            for what in [global::INTERRUPTS, global::TRANSLATION] {
                guards.units.iter().for_each(|unit| unit.lock().registers.command(0, what));
            }
        }
        started.map_err(|silent| silent.to_string())?;
        Ok(guards)
    }

    /// Reads firmware's table and takes memory. Changes nothing on the machine for good.
    fn new(bytes: &'static [u8], ram: &MemoryMap) -> Result<Self, String> {
        let dmar = Dmar::new(bytes).map_err(|malformed| format!("firmware's table is wrong: {malformed}"))?;
        if let Some(unit) = dmar.units().find(|unit| unit.segment != 0) {
            return Err(format!(
                "the one at {} is of PCI segment {}; only segment 0 is supported",
                unit.base, unit.segment
            ));
        }
        let mut units = Vec::new();
        for unit in dmar.units() {
            let hardware = Hardware::new(&unit, ram).map_err(|why| format!("the one at {} {why}", unit.base))?;
            units.push(Mutex::new(hardware));
        }
        if units.is_empty() {
            return Err(String::from("firmware's table (DMAR) names none"));
        }

        let (roots, contexts) = (memory(PAGE_BYTES)?, memory(ContextEntry::TABLES_BYTES)?);
        for (bus, words) in (0..BUSES).zip(roots.words().chunks_exact(2)) {
            words[0].store(root_entry(Hpa(contexts.hpa().0 + bus * BUS_BYTES)), Ordering::SeqCst);
        }
        let is_coherent = units.iter().all(|unit| unit.lock().extended.is_coherent());
        let unable = if dmar.remaps_interrupts() {
            let cannot = |unit: &Hardware| {
                let extended = unit.extended.0;
                (!unit.extended.remaps_interrupts())
                    .then(|| format!("the one at {} cannot (extended capabilities {extended:#x})", unit.name))
            };
            units.iter().find_map(|unit| cannot(&unit.lock()))
        } else {
            Some(String::from("firmware says that the machine cannot (ACPI table DMAR, flag INTR_REMAP)"))
        };
        let interrupts = unable.map_or_else(|| memory(InterruptEntry::TABLE_BYTES), Err);
        let leak = units.iter().find_map(|unit| {
            let unit = unit.lock();
            unit.passes_old_interrupts().then(|| unit.name.clone())
        });
        let guards = Self { dmar, units, roots, contexts, interrupts, leak, is_coherent, trusted: Once::new() };
        guards.write_back(guards.roots.words());
        guards.write_back(guards.contexts.words());
        if let Ok(table) = &guards.interrupts {
            guards.write_back(table.words());
        }
        Ok(guards)
    }

    /// Turns the remapping of interrupts on or off. While it is off, all pass as they are.
    fn remap(&self, on: bool) {
        if self.interrupts.is_ok() {
            let what = if on { "interrupts' remapping to begin" } else { "interrupts' remapping to end" };
            self.for_each(|unit| unit.set(global::INTERRUPTS, on, what));
        }
    }

    /// An entry of the interrupt remapping table.
    fn interrupt(&self, index: u16) -> Option<&[AtomicU64]> {
        let first = usize::from(index) * 2;
        self.interrupts.as_ref().ok()?.words().get(first..first + 2)
    }

    /// Has IOMMUs execute a descriptor, and waits until they have.
    fn tell_all(&self, descriptor: Descriptor) {
        self.for_each(|unit| {
            unit.send(descriptor)?;
            unit.complete()
        });
    }

    /// Writes the entries of these functions, but for the hypervisor's own.
    fn write_entries(&self, functions: &Functions, entry: ContextEntry) {
        let all = (0..=u16::MAX).map(RequesterId).filter(|function| functions.contains(*function));
        all.filter(|function| self.trusted.get() != Some(function))
            .for_each(|function| self.write_entry(function, entry));
    }

    /// Writes an entry while IOMMUs may read it. The first word decides about accesses: it is the last one to give
    /// rights, and the first to take them.
    fn write_entry(&self, function: RequesterId, entry: ContextEntry) {
        let words = self.entry(function);
        if !entry.allows_access() {
            words[0].store(entry.0[0], Ordering::SeqCst);
        }
        words[1].store(entry.0[1], Ordering::SeqCst);
        words[0].store(entry.0[0], Ordering::SeqCst);
        self.write_back(words);
    }

    fn entry(&self, function: RequesterId) -> &[AtomicU64] {
        let first = usize::from(function.0) * 2;
        &self.contexts.words()[first..first + 2]
    }

    /// The tables of a domain, as one of its functions has them.
    fn root_of(&self, domain: Domain) -> Option<Hpa> {
        if self.is_coherent {
            return None;
        }
        let entries = self.contexts.words().chunks_exact(2);
        let root = |words: &[AtomicU64]| Hpa(words[0].load(Ordering::SeqCst) & !(PAGE_BYTES - 1));
        let of_domain = ContextEntry::translated(Hpa(0), domain.0).0[1];
        let mut own = entries.filter(|words| words[1].load(Ordering::SeqCst) == of_domain);
        own.find(|words| words[0].load(Ordering::SeqCst) & 1 != 0).map(root)
    }

    /// Has IOMMUs forget all context entries, and what they know by those of `domain`.
    fn forget_contexts(&self, domain: Domain) {
        self.for_each(|unit| {
            unit.send(Descriptor::ALL_CONTEXTS)?;
            unit.complete()?;
            unit.send(Descriptor::forget_pages(domain.0, Pages::All, true))?;
            unit.complete()
        });
    }

    fn for_each(&self, mut tell: impl FnMut(&mut Hardware) -> Result<(), Silent>) {
        for unit in &self.units {
            tell(&mut unit.lock()).unwrap_or_else(|silent| silent.stop());
        }
    }

    /// Writes tables back to memory, if an IOMMU reads only that. `level` is that of the table, counted from 0.
    fn write_back_tables(&self, table: Hpa, level: u32) {
        const PRESENT: u64 = 1 << 0;
        const LARGE: u64 = 1 << 7;
        const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
        // Tables may change meanwhile: what is read may be an old address of one.
        if self.is_coherent || !is_mapped(direct_map(table)) {
            return;
        }
        let start = direct_map(table).0 as *const AtomicU64;
        // SAFETY: a page of the direct map, aligned; whoever writes to page tables does it by atomic stores.
        let entries = unsafe { core::slice::from_raw_parts(start, stage2::ENTRIES) };
        self.write_back(entries);
        if level > 0 {
            let bits = entries.iter().map(|entry| entry.load(Ordering::SeqCst));
            bits.filter(|bits| bits & PRESENT != 0 && bits & LARGE == 0)
                .for_each(|bits| self.write_back_tables(Hpa(bits & ADDRESS), level - 1));
        }
    }

    /// Writes memory back, if an IOMMU does not see the processors' caches.
    fn write_back(&self, words: &[AtomicU64]) {
        if self.is_coherent {
            return;
        }
        for word in words.iter().step_by(LINE_BYTES / size_of::<AtomicU64>()) {
            // SAFETY: the instruction needs a mapped address, and changes no content. Each processor has it that has
            // long mode.
            unsafe { _mm_clflush(core::ptr::from_ref(word).cast()) };
        }
        // SAFETY: orders the write-backs before what tells the IOMMU. Each processor has it that has long mode.
        unsafe { _mm_mfence() };
    }
}

/// One IOMMU: its registers, and its queue.
struct Hardware {
    name: String,
    place: HpaRange,
    registers: Registers,
    capabilities: Capabilities,
    extended: Extended,
    queue: Frames,
    /// The next descriptor's number in the queue, and how many may not be complete.
    next: u64,
    open: u64,
    /// Where waits are answered, and the last answer that was asked for.
    answer: Frames,
    asked: u32,
}

impl Hardware {
    fn new(unit: &Unit, ram: &MemoryMap) -> Result<Self, String> {
        check_registers(unit.base, registers::BYTES, ram)?;
        let first = Registers::new(unit.base, registers::BYTES);
        let version = first.read_u32(registers::VERSION);
        let capabilities = Capabilities(first.read(registers::CAPABILITIES));
        let extended = Extended(first.read(registers::EXTENDED));
        let lacks = [
            (version == 0 || version == u32::MAX, "does not answer"),
            (!capabilities.walks_four_levels(), "cannot walk four levels (QEMU: -device intel-iommu,aw-bits=48)"),
            (capabilities.domain_bits() < DOMAIN_BITS, "has too few domains"),
            (capabilities.large_pages().contains(&false), "does not know pages of 2 MiB and 1 GiB"),
            (!extended.has_queue(), "has no invalidation queue"),
            (!extended.passes_through(), "cannot let a device pass"),
        ];
        if let Some((_, what)) = lacks.iter().find(|(lacks, _)| *lacks) {
            return Err(format!("{what} (capabilities {:#x}, {:#x})", capabilities.0, extended.0));
        }
        let (faults, count) = capabilities.faults();
        let bytes = (faults + count * Fault::BYTES).max(registers::BYTES).next_multiple_of(PAGE_BYTES);
        let place = check_registers(unit.base, bytes, ram)?;
        Ok(Self {
            name: unit.base.to_string(),
            place,
            registers: Registers::new(unit.base, bytes),
            capabilities,
            extended,
            queue: memory(PAGE_BYTES)?,
            next: 0,
            open: 0,
            answer: memory(PAGE_BYTES)?,
            asked: 0,
        })
    }

    /// Whether messages of the old format pass always: it is told to let them pass, and does not say that it does
    /// ([`quirks`](crate::arch::x86_64::host::quirks)).
    fn passes_old_interrupts(&self) -> bool {
        const PATIENCE_NANOS: u64 = 1_000_000;
        let is_on = |registers: &Registers| registers.read_u32(registers::STATUS) & global::OLD_INTERRUPTS != 0;
        self.registers.command(global::OLD_INTERRUPTS, 0);
        let deadline = tsc::now() + tsc::nanos_to_ticks(PATIENCE_NANOS);
        while !is_on(&self.registers) && tsc::now() < deadline {
            core::hint::spin_loop();
        }
        let obeys = is_on(&self.registers);
        self.registers.command(0, global::OLD_INTERRUPTS);
        !obeys
    }

    /// Turns translation on, with these tables, and the remapping of interrupts, if there is a table for it. Forgets
    /// what firmware has left in caches. If translation was on before, it stays on meanwhile.
    fn start(&mut self, roots: &Frames, interrupts: Option<&Frames>) -> Result<(), Silent> {
        self.registers.write_u32(registers::FAULT_CONTROL, registers::FAULTS_MASKED);
        self.set(global::INTERRUPTS, false, "interrupts' remapping to end")?;
        self.set(global::OLD_INTERRUPTS, false, "messages of the old format to end")?;
        self.set(global::QUEUE, false, "its queue to stop")?;
        self.registers.write(registers::QUEUE_TAIL, 0);
        self.registers.write(registers::QUEUE_ADDRESS, self.queue.hpa().0);
        self.registers.write_u32(registers::FAULT_STATUS, fault_status::OVERFLOW | fault_status::QUEUE_ERRORS);
        self.set(global::QUEUE, true, "its queue to start")?;

        self.registers.write(registers::ROOT_TABLE, registers::root_table(roots.hpa()));
        self.set(global::ROOT_TABLE, true, "its tables")?;
        self.send(Descriptor::ALL_CONTEXTS)?;
        self.complete()?;
        self.send(Descriptor::ALL_TRANSLATIONS)?;
        self.complete()?;
        self.set(global::TRANSLATION, true, "translation to begin")?;

        if let Some(table) = interrupts {
            self.registers.write(registers::INTERRUPT_TABLE, interrupt_table(table.hpa()));
            self.set(global::INTERRUPT_TABLE, true, "its table of interrupts")?;
            self.send(Descriptor::ALL_INTERRUPTS)?;
            self.complete()?;
            self.set(global::INTERRUPTS, true, "interrupts' remapping to begin")?;
        }

        // What firmware has protected so long is protected by the tables now.
        if self.capabilities.protects_memory() {
            self.registers.write_u32(registers::PROTECTED_MEMORY, 0);
            self.wait_until("protected memory to open", |registers| {
                registers.read_u32(registers::PROTECTED_MEMORY) & registers::IS_PROTECTED == 0
            })?;
        }
        Ok(())
    }

    /// Turns something on or off.
    fn set(&self, what: u32, on: bool, name: &'static str) -> Result<(), Silent> {
        let is_so = |registers: &Registers| (registers.read_u32(registers::STATUS) & what != 0) == on;
        // A new table is told by the same bit as the one before it.
        if matches!(what, global::ROOT_TABLE | global::INTERRUPT_TABLE) || !is_so(&self.registers) {
            self.registers.command(if on { what } else { 0 }, if on { 0 } else { what });
        }
        self.wait_until(name, is_so)
    }

    /// Writes a descriptor. The IOMMU sees it at the next [`complete`](Self::complete).
    fn send(&mut self, descriptor: Descriptor) -> Result<(), Silent> {
        // One place stays free, and one is for the wait.
        if self.open == registers::QUEUE_LENGTH - 2 {
            self.complete()?;
        }
        self.put(descriptor);
        Ok(())
    }

    fn put(&mut self, descriptor: Descriptor) {
        let first = usize::try_from(self.next * 2).unwrap_or(0);
        let words = &self.queue.words()[first..first + 2];
        words[0].store(descriptor.0[0], Ordering::SeqCst);
        words[1].store(descriptor.0[1], Ordering::SeqCst);
        self.next = (self.next + 1) % registers::QUEUE_LENGTH;
        self.open += 1;
    }

    /// Waits until all descriptors so far are complete.
    fn complete(&mut self) -> Result<(), Silent> {
        if self.capabilities.has_write_buffer() {
            self.registers.command(global::WRITE_BUFFER, 0);
            self.wait_until("its write buffer", |registers| {
                registers.read_u32(registers::STATUS) & global::WRITE_BUFFER == 0
            })?;
        }
        self.asked = self.asked.wrapping_add(1);
        self.put(Descriptor::wait(self.answer.hpa(), self.asked));
        self.registers.write(registers::QUEUE_TAIL, self.next * Descriptor::BYTES);
        let (answer, asked) = (&self.answer.words()[0], u64::from(self.asked));
        self.wait_until("a descriptor's completion", |_| answer.load(Ordering::SeqCst) == asked)?;
        self.open = 0;
        Ok(())
    }

    fn wait_until(&self, what: &'static str, is_so: impl Fn(&Registers) -> bool) -> Result<(), Silent> {
        wait_until(&self.name, what, || is_so(&self.registers))
    }

    /// Takes the faults that are recorded. Those that found no record are lost.
    fn take_faults(&mut self, mut tell: impl FnMut(Fault)) {
        let status = self.registers.read_u32(registers::FAULT_STATUS);
        if status & (fault_status::OVERFLOW | fault_status::PENDING) == 0 {
            return;
        }
        let (first, count) = self.capabilities.faults();
        for record in (0..count).map(|record| first + record * Fault::BYTES) {
            let words = [self.registers.read(record), self.registers.read(record + 8)];
            if let Some(fault) = Fault::decode(words) {
                tell(fault);
                self.registers.write(record + 8, Fault::RELEASE);
            }
        }
        self.registers.write_u32(registers::FAULT_STATUS, fault_status::OVERFLOW);
    }
}

/// The registers of an IOMMU.
struct Registers {
    start: u64,
    bytes: u64,
}

impl Registers {
    /// Those at `base`, which firmware reports.
    fn new(base: Hpa, bytes: u64) -> Self {
        Self { start: map_mmio(base, bytes).0, bytes }
    }

    fn read(&self, offset: u64) -> u64 {
        debug_assert!(offset + 8 <= self.bytes, "mapped");
        // SAFETY: `new` has mapped the registers, for good. Reading them has no effect.
        unsafe { ((self.start + offset) as *const u64).read_volatile() }
    }

    fn write(&self, offset: u64, value: u64) {
        debug_assert!(offset + 8 <= self.bytes, "mapped");
        // SAFETY: as above. Memory that the registers name is this driver's, and is never freed.
        unsafe { ((self.start + offset) as *mut u64).write_volatile(value) };
    }

    fn read_u32(&self, offset: u64) -> u32 {
        debug_assert!(offset + 4 <= self.bytes, "mapped");
        // SAFETY: as above.
        unsafe { ((self.start + offset) as *const u32).read_volatile() }
    }

    fn write_u32(&self, offset: u64, value: u32) {
        debug_assert!(offset + 4 <= self.bytes, "mapped");
        // SAFETY: as above.
        unsafe { ((self.start + offset) as *mut u32).write_volatile(value) };
    }

    /// Writes the command register, which has the bits of all that is on, and then these.
    fn command(&self, set: u32, clear: u32) {
        let on = self.read_u32(registers::STATUS) & global::LASTING;
        self.write_u32(registers::COMMAND, (on | set) & !clear);
    }
}
