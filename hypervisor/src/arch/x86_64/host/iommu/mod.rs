//! The machine's IOMMUs: what each PCI function may reach in memory, and which interrupts it may raise.
//!
//! At first no function reaches anything: [`init`] blocks all of them before any device of the machine is used. Then a
//! function gets the tables of who owns it ([`grant`]). Those are the VMs' own nested tables. A function raises an
//! interrupt by a write that no nested table stops, so there are tables for these writes as well: they have an entry
//! for each interrupt that the function was given ([`route`]).
//!
//! AMD's and Intel's are driven ([`amd_vi`], [`vt_d`]). Firmware says which the machine has, and what it says is not
//! believed: a table that is refused, an IOMMU that cannot walk four levels, or one that does not answer from the
//! start, leaves the machine as one without an IOMMU, and says so.

mod amd_vi;
mod vt_d;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Display;

use addr::{Hpa, HpaRange, PAGE_BYTES};
use spin::Once;
use stage2::{Iommu, Stale};

use super::{acpi, tsc};
use crate::frames::Frames;
use crate::io::iommu::{Domain, Functions, Guard, RequesterId};
use crate::memory_map::MemoryMap;

/// Levels of the tables that functions are given: those of nested paging.
const LEVELS: u32 = 4;
/// Time limit for an IOMMU's answer: a second. It needs microseconds.
const PATIENCE_NANOS: u64 = 1_000_000_000;
/// Registers are below this address (16 TiB).
const MOST_BASE: Hpa = Hpa(1 << 44);

/// All IOMMUs of PCI segment 0, of one kind.
trait Iommus: Send + Sync {
    /// For the log: what they are.
    fn describe(&self) -> String;

    /// Whether interrupts go through tables.
    ///
    /// # Errors
    /// They do not, and why.
    fn remaps_interrupts(&self) -> Result<(), String>;

    /// Why a function may raise other interrupts than those that it was given, although there are tables.
    fn interrupts_beside(&self) -> Option<String>;

    /// As [`stops_init`].
    fn stops_init(&self) -> bool;

    /// As [`route`]. Called only if interrupts are remapped.
    fn route(&self, function: RequesterId, number: usize, apic_id: u8, vector: u8) -> Option<Message>;

    /// As [`close_routes`].
    fn close_routes(&self, function: RequesterId);

    /// As [`is_special`].
    fn is_special(&self, function: RequesterId) -> bool;

    /// As [`registers`].
    fn registers(&self) -> Vec<HpaRange>;

    /// As [`functions`].
    fn functions(&self) -> Vec<RequesterId>;

    /// Memory that a function must reach, whoever owns it: of one of these functions.
    fn reserved(&self, functions: &Functions) -> Vec<HpaRange>;

    /// As [`alias_of`].
    fn alias_of(&self, function: RequesterId) -> Option<RequesterId>;

    /// As [`grant`].
    fn grant(&self, functions: &Functions, domain: Domain, root: Hpa);

    /// As [`revoke`].
    fn revoke(&self, functions: &Functions, domain: Domain);

    /// As [`trust`].
    fn trust(&self, function: RequesterId);

    /// As [`flush`], for a flush of something.
    fn flush(&self, domain: Domain, stale: Stale);

    /// As [`take_events`].
    fn take_events(&self, tell: &mut dyn FnMut(RequesterId, &dyn Display));
}

/// The machine's IOMMUs, once they guard.
static GUARDS: Once<Box<dyn Iommus>> = Once::new();
/// Why they do not.
static UNGUARDED: Once<String> = Once::new();

/// What a function writes to raise an interrupt (PCI 6.8; APM vol. 2, 16.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::arch::x86_64) struct Message {
    /// Where. The upper half of the address is 0.
    pub(in crate::arch::x86_64) address: u32,
    /// What. The upper half of the data, where there is one, is 0.
    pub(in crate::arch::x86_64) data: u16,
}

impl Message {
    /// The interrupt `vector` of one pCPU, as its local APIC takes it where nothing remaps.
    pub(super) const fn direct(apic_id: u8, vector: u8) -> Self {
        const DESTINATION_SHIFT: u32 = 12;
        Self { address: MESSAGES | (apic_id as u32) << DESTINATION_SHIFT, data: vector as u16 }
    }
}

/// Where messages go.
const MESSAGES: u32 = 0xfee0_0000;

/// Blocks all functions, if the machine has IOMMUs that can. Runs on the first pCPU, before devices are used.
pub(super) fn init(machine: &acpi::Machine, memory: &MemoryMap) {
    let started: Result<Box<dyn Iommus>, String> = match (machine.ivrs, machine.dmar) {
        (Some(ivrs), None) => amd_vi::Guards::start(ivrs, memory).map(|guards| Box::new(guards) as _),
        (None, Some(dmar)) => vt_d::Guards::start(dmar, memory).map(|guards| Box::new(guards) as _),
        (Some(_), Some(_)) => Err(String::from("firmware reports AMD's and Intel's (ACPI tables IVRS and DMAR)")),
        (None, None) => Err(String::from("firmware reports none (no ACPI table IVRS or DMAR)")),
    };
    match started {
        Ok(guards) => {
            log::debug!("IOMMU: {}", guards.describe());
            let gap = match (guards.remaps_interrupts(), guards.interrupts_beside()) {
                (Ok(()), None) => None,
                (Ok(()), Some(why)) => Some(alloc::format!("interrupts are remapped, but {why}")),
                (Err(why), _) => Some(alloc::format!("interrupts are not remapped: {why}")),
            };
            match gap {
                None => log::info!("IOMMU: interrupts are remapped: a VM's device raises only those that it was given"),
                Some(why) => log::warn!("IOMMU: {why}. A VM's device may interrupt any pCPU, and stop it"),
            }
            GUARDS.call_once(|| guards);
        }
        Err(why) => {
            if machine.ivrs.is_some() || machine.dmar.is_some() {
                log::warn!("no IOMMU guards this machine: {why}");
            }
            UNGUARDED.call_once(|| why);
        }
    }
}

/// For whose IOMMU entries of a VM's tables are written.
pub(in crate::arch::x86_64) fn kind() -> Iommu {
    let is_intels = acpi::machine().is_some_and(|machine| machine.dmar.is_some() && machine.ivrs.is_none());
    if is_intels { Iommu::VtD } else { Iommu::AmdVi }
}

/// Whether functions are kept to what they were granted.
pub(crate) fn guard() -> Guard {
    match GUARDS.get() {
        Some(guards) => Guard::On(guards.describe()),
        None => Guard::Off(UNGUARDED.get().cloned().unwrap_or_default()),
    }
}

/// Gives the functions to the owner of these tables: from now on they reach what it maps, and nothing else. Their
/// domain has the same tables for all of its functions.
pub(crate) fn grant(functions: &Functions, domain: Domain, root: Hpa) {
    let Some(guards) = GUARDS.get() else { return };
    guards.grant(functions, domain, root);
    if matches!(functions, Functions::All) && remaps_interrupts() {
        if guards.stops_init() {
            log::info!("IOMMU: who owns all devices chooses the vectors that they raise; INIT and NMI are stopped");
        } else {
            log::warn!(
                "IOMMU: devices of an owner of all may interrupt any pCPU, and stop it: their messages pass as they are"
            );
        }
    }
}

/// Whether a function is an IOMMU, or names interrupts that are not its own.
pub(in crate::arch::x86_64) fn is_special(function: RequesterId) -> bool {
    GUARDS.get().is_some_and(|guards| guards.is_special(function))
}

/// Memory that firmware uses for some of these functions, in pages: they must reach it, whoever owns them. Empty if
/// they reach everything.
pub(in crate::arch::x86_64) fn reserved(functions: &Functions) -> Vec<HpaRange> {
    let ranges = GUARDS.get().map(|guards| guards.reserved(functions)).unwrap_or_default();
    let pages = |range: HpaRange| {
        let start = range.start.0 & !(PAGE_BYTES - 1);
        HpaRange::new(Hpa(start), range.end().0.next_multiple_of(PAGE_BYTES) - start)
    };
    ranges.into_iter().filter_map(pages).collect()
}

/// The number under which the IOMMU knows a function, if it is that of another one, because a bridge speaks for both.
pub(in crate::arch::x86_64) fn alias_of(function: RequesterId) -> Option<RequesterId> {
    GUARDS.get()?.alias_of(function)
}

/// Whether registers of an IOMMU are in this range.
pub(in crate::arch::x86_64) fn has_registers_in(range: &HpaRange) -> bool {
    registers().iter().any(|registers| registers.overlaps(range))
}

/// Where the IOMMUs have their registers. Nobody but the hypervisor may reach them.
pub(in crate::arch::x86_64) fn registers() -> Vec<HpaRange> {
    GUARDS.get().map(|guards| guards.registers()).unwrap_or_default()
}

/// The IOMMUs that are PCI functions themselves. Nobody but the hypervisor may configure them.
pub(in crate::arch::x86_64) fn functions() -> Vec<RequesterId> {
    GUARDS.get().map(|guards| guards.functions()).unwrap_or_default()
}

/// Lets a function raise the interrupt `vector` of one pCPU, as its interrupt `number`, by the message that is
/// returned. `None`: its owner does not have that function, or the number is too large for the tables.
///
/// If the function is one of all, which one VM owns, it needs no route.
pub(in crate::arch::x86_64) fn route(function: RequesterId, number: usize, apic_id: u8, vector: u8) -> Option<Message> {
    match remapping() {
        Some(guards) => guards.route(function, number, apic_id, vector),
        None => Some(Message::direct(apic_id, vector)),
    }
}

/// Takes all interrupts from a function. On return it raises none, if interrupts are remapped.
pub(in crate::arch::x86_64) fn close_routes(function: RequesterId) {
    if let Some(guards) = remapping() {
        guards.close_routes(function);
    }
}

/// Whether interrupts go through tables.
pub(super) fn remaps_interrupts() -> bool {
    remapping().is_some()
}

/// Whether functions are kept to the interrupts that they were given.
pub(super) fn keeps_interrupts() -> bool {
    remapping().is_some_and(|guards| guards.interrupts_beside().is_none())
}

/// Whether INIT, NMI and external interrupts of devices are stopped also while one VM owns all devices.
pub(super) fn stops_init() -> bool {
    remapping().is_some_and(|guards| guards.stops_init())
}

fn remapping() -> Option<&'static dyn Iommus> {
    GUARDS.get().map(Box::as_ref).filter(|guards| guards.remaps_interrupts().is_ok())
}

/// Takes the functions from their owner: they reach nothing any more. On return no access of theirs is under way, so
/// the memory of `domain` may be used for something else.
pub(crate) fn revoke(functions: &Functions, domain: Domain) {
    if let Some(guards) = GUARDS.get() {
        guards.revoke(functions, domain);
    }
}

/// Lets the one function that the hypervisor itself uses reach all memory, at its own addresses. It is polled: it sends
/// no interrupts.
pub(super) fn trust(function: RequesterId) {
    if let Some(guards) = GUARDS.get() {
        guards.trust(function);
    }
}

/// Flushes what IOMMUs keep of a domain's translations. On return no device uses a stale one.
pub(crate) fn flush(domain: Domain, stale: Stale) {
    if let Some(guards) = GUARDS.get()
        && !stale.is_empty()
    {
        guards.flush(domain, stale);
    }
}

/// Calls `tell` for each event that IOMMUs have reported since the last call.
pub(crate) fn take_events(tell: &mut dyn FnMut(RequesterId, &dyn Display)) {
    if let Some(guards) = GUARDS.get() {
        guards.take_events(tell);
    }
}

/// Refuses a place of registers that cannot be one: RAM, or beyond all memory.
///
/// # Errors
/// What is wrong, after the name of the IOMMU.
fn check_registers(base: Hpa, bytes: u64, ram: &MemoryMap) -> Result<HpaRange, String> {
    let registers = HpaRange::new(base, bytes).filter(|range| range.end() <= MOST_BASE);
    let is_free = |range: &HpaRange| ram.ram_and_acpi().iter().all(|ram| !ram.overlaps(range));
    registers.filter(is_free).ok_or_else(|| alloc::format!("cannot have its registers at {base}"))
}

/// Memory for tables of an IOMMU, cleared.
///
/// # Errors
/// There is none.
fn memory(bytes: u64) -> Result<Frames, String> {
    let frames = Frames::allocate(bytes, bytes).map_err(|_| String::from("there is no memory for its tables"))?;
    frames.zero();
    Ok(frames)
}

/// Waits until something is so, for a limited time.
///
/// # Errors
/// It did not become so.
fn wait_until(name: &str, what: &'static str, is_so: impl Fn() -> bool) -> Result<(), Silent> {
    let deadline = tsc::now() + tsc::nanos_to_ticks(PATIENCE_NANOS);
    while !is_so() {
        if tsc::now() > deadline {
            return Err(Silent { name: String::from(name), what });
        }
        core::hint::spin_loop();
    }
    Ok(())
}

/// An IOMMU has not answered in time.
struct Silent {
    name: String,
    what: &'static str,
}

impl Display for Silent {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} does not answer: waited for {}", self.name, self.what)
    }
}

impl Silent {
    /// # Panics
    /// Always: an IOMMU that has answered before is broken, and with it the protection of memory. No device can cause
    /// it: the wait covers only the IOMMU's own caches, because no device may have one.
    fn stop(self) {
        panic!("the IOMMU {self}");
    }
}
