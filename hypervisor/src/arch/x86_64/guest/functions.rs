//! PCI functions that a VM was given ([`io::function`](crate::io::function)): the real ones behind what the guest sees.
//!
//! A function is silent when it is given: it neither accesses memory nor interrupts, and it was reset if it can be. The
//! guest's writes then turn bus mastering and messages on and off. What it may access, the IOMMU says. Which vectors it
//! sends, the hypervisor writes into its table, and the IOMMU stops all others. When the VM ends, the function is
//! silent again before it is blocked.

#![expect(unsafe_code, reason = "registers in memory")]

use alloc::format;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use abi::payload::PciFunction;
use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};
use spin::{Mutex, Once};
use x86_boot::layout::{IO_APIC, LOCAL_APIC, PCI_ECAM, PCI_MEMORY};

use super::{delivery, own_machine};
use crate::arch::GivenFunctions;
use crate::arch::x86_64::host::iommu::Message;
use crate::arch::x86_64::host::paging::map_mmio;
use crate::arch::x86_64::host::pci::{self, Space};
use crate::arch::x86_64::host::{acpi, boot, iommu, tsc, virtio};
use crate::cpu::{self, PerCpu, scheduler};
use crate::device::pci::config_space::{ConfigSpace, register};
use crate::io::function::messages::{ENTRY_BYTES, Table};
use crate::io::function::vectors::{Vector, Vectors};
use crate::io::function::view::{BUS_MASTER, MEMORY_SPACE, MSI_ON, MSI_X_MASKED, MSI_X_ON, NO_LINE, Wanted, msi_data};
use crate::io::function::window::{Piece, Placed, Reached, homes};
use crate::io::function::{BARS, Description, Messages, Part, Reset};
use crate::io::iommu::{Functions, Guard};
use crate::vm::Vm;

/// The functions of one VM, in the order of their slots.
#[derive(Debug)]
pub(crate) struct Given {
    functions: Vec<Arc<Function>>,
    /// When those that are being reset answer again, in ticks.
    ready_at: Option<u64>,
}

/// A function of a VM.
#[derive(Debug)]
struct Function {
    at: PciFunction,
    space: Space,
    description: Description,
    memory: Vec<Placed>,
    /// Pages of its memory that the guest does not reach by itself, and where they are mapped here.
    closed: Vec<(Piece, u64)>,
    state: Mutex<State>,
    owner: Once<Weak<Vm>>,
}

#[derive(Debug)]
struct State {
    /// What the guest has written.
    table: Table,
    /// What the function does.
    now: Wanted,
    /// The vector that it sends for each message, once the guest has let the message through.
    vectors: Vec<Option<Vector>>,
    /// There was no vector for a message.
    is_told: bool,
}

/// Message `entry` of a function.
type Source = (Arc<Function>, usize);

/// Which functions send which vectors.
static VECTORS: Mutex<Vectors<Source>> = Mutex::new(Vectors::new());

/// Who has functions.
static CLAIMS: Mutex<Claims> = Mutex::new(Claims { taken: Vec::new(), used: Vec::new() });

struct Claims {
    /// They belong to a VM.
    taken: Vec<PciFunction>,
    /// They have belonged to one.
    used: Vec<PciFunction>,
}

/// Time for a function to come back after a reset (PCI Express 6.6.2).
const RESET_NANOS: u64 = 100_000_000;
/// Time limit for it to answer then, and for its accesses to end before.
const PATIENCE_NANOS: u64 = 1_000_000_000;

/// Whether a VM has functions now.
pub(super) fn are_given() -> bool {
    !CLAIMS.lock().taken.is_empty()
}

impl GivenFunctions for Given {
    fn take(functions: &[PciFunction]) -> Result<Self, String> {
        if let Guard::Off(why) = iommu::guard() {
            return Err(format!(
                "no IOMMU guards this machine: {why}. A device uses the machine's addresses, and the VM's memory is not \
                 there. Turn the IOMMU on in the firmware's settings (\"IOMMU\", \"AMD-Vi\" or \"VT-d\"), or \
                 leave 'devices' out"
            ));
        }
        if own_machine::are_devices_taken() {
            return Err(String::from("a VM has had all of the machine's devices"));
        }
        let mut claims = CLAIMS.lock();
        let found = functions.iter().map(|function| {
            claims.check(*function).and_then(|()| find(*function)).map_err(|why| format!("{function}: {why}"))
        });
        let found = found.collect::<Result<Vec<_>, String>>()?;
        apart(&found)?;
        let functions = place(found)?;

        claims.taken.extend(functions.iter().map(|function| function.at));
        drop(claims);
        let mut given = Self { functions, ready_at: None };
        given.begin();
        Ok(given)
    }

    fn is_ready(&mut self) -> Result<bool, String> {
        let Some(ready_at) = self.ready_at else { return Ok(true) };
        let now = tsc::now();
        if now < ready_at {
            return Ok(false);
        }
        let mut all = true;
        for function in self.functions.iter().filter(|function| function.description.reset.is_some()) {
            if !function.space.is_there() {
                if now > ready_at + tsc::nanos_to_ticks(PATIENCE_NANOS) {
                    return Err(format!("{}: it does not answer after its reset", function.at));
                }
                all = false;
            }
        }
        if all {
            self.functions.iter().for_each(|function| function.restore());
            self.ready_at = None;
        }
        Ok(all)
    }

    fn registers(&self) -> impl Iterator<Item = (GpaRange, Hpa)> {
        let mapped = |function: &Arc<Function>| {
            let messages = function.description.messages;
            let pieces = function.memory.iter().flat_map(move |placed| placed.pieces(&messages));
            pieces.filter(|piece| piece.is_mapped).map(|piece| (piece.gpa, piece.hpa)).collect::<Vec<_>>()
        };
        self.functions.iter().flat_map(mapped)
    }

    fn start(&self, vm: &Arc<Vm>) {
        for function in &self.functions {
            function.owner.call_once(|| Arc::downgrade(vm));
        }
    }
}

impl Claims {
    fn check(&self, function: PciFunction) -> Result<(), String> {
        if self.taken.contains(&function) {
            return Err(String::from("another VM has it"));
        }
        let has_reset = |found: Found| found.description.reset.is_some();
        if self.used.contains(&function) && !find(function).is_ok_and(has_reset) {
            return Err(String::from(
                "another VM has had it, and it cannot be reset by itself (no function-level reset). It may still know \
                 that VM's addresses and data; restart the machine first",
            ));
        }
        Ok(())
    }
}

/// A function that can be given.
struct Found {
    at: PciFunction,
    space: Space,
    description: Description,
}

/// Looks at a function.
fn find(function: PciFunction) -> Result<Found, String> {
    let used = virtio::used();
    if used.is_some_and(|used| used.function == function) {
        return Err(String::from("the hypervisor uses it for its control port"));
    }
    if iommu::is_special(function.into()) {
        return Err(String::from("it is an IOMMU or an interrupt controller, which the hypervisor uses"));
    }
    if let Some(alias) = iommu::alias_of(function.into()) {
        return Err(format!("the IOMMU takes it for {alias}, as it may take others (an alias in ACPI's table IVRS)"));
    }
    if let Some(range) = iommu::reserved(&Functions::These(Vec::from([function.into()]))).first() {
        return Err(format!(
            "firmware uses memory at {} for it, which it must always reach (IVMD in ACPI's table IVRS, RMRR in DMAR). \
             Give it to the VM with all devices",
            range.start
        ));
    }
    if acpi::machine().is_none_or(|machine| machine.ecam.is_empty()) {
        return Err(String::from("the machine has no window to PCI configuration in memory (ACPI's table MCFG)"));
    }
    let missing = || String::from("the machine has no such PCI function; `lspci -D` in its Linux lists them");
    let listed = pci::find(function).ok_or_else(missing)?;
    let space = Space::of(function).filter(Space::is_there).ok_or_else(missing)?;
    let description = Description::new(listed.read(&space)).map_err(|unfit| format!("{unfit}"))?;
    for pages in description.pages() {
        if let Some(what) = owner_of(&pages) {
            return Err(format!("its memory at {} overlaps {what}", pages.start));
        }
        if let Some(other) = pci::all().find(|other| other.function != function && other.may_be_in(&pages)) {
            return Err(format!("its memory at {} shares a page with {}", pages.start, other.function));
        }
    }
    Ok(Found { at: function, space, description })
}

/// What of the hypervisor's, or which memory, is in this range.
fn owner_of(range: &HpaRange) -> Option<&'static str> {
    let overlaps = |start: u64, bytes: u64| HpaRange::new(Hpa(start), bytes).is_none_or(|own| own.overlaps(range));
    if boot::handover().is_none_or(|handover| handover.memory.touches_ram(range)) {
        return Some("RAM");
    }
    if overlaps(LOCAL_APIC.0, PAGE_BYTES) || overlaps(IO_APIC.0, PAGE_BYTES) {
        return Some("an APIC");
    }
    let windows = acpi::machine().map_or(&[][..], |machine| &machine.ecam);
    const BUS_BYTES: u64 = 1 << 20;
    if windows.iter().any(|window| {
        let (first, last) = (u64::from(window.first_bus), u64::from(window.last_bus));
        overlaps(window.base.0.saturating_add(first * BUS_BYTES), (last.saturating_sub(first) + 1) * BUS_BYTES)
    }) {
        return Some("PCI's configuration");
    }
    if virtio::used().is_some_and(|used| used.registers.iter().any(|own| own.overlaps(range))) {
        return Some("registers of the hypervisor's control port");
    }
    iommu::has_registers_in(range).then_some("registers of an IOMMU")
}

/// Checks that no two of these functions share a page.
fn apart(found: &[Found]) -> Result<(), String> {
    let pages = || found.iter().flat_map(|found| found.description.pages().map(move |pages| (found.at, pages)));
    for (index, (at, one)) in pages().enumerate() {
        if let Some((other, _)) = pages().take(index).find(|(_, other)| other.overlaps(&one)) {
            return Err(format!("{at}: its memory at {} overlaps that of {other}", one.start));
        }
    }
    Ok(())
}

/// Gives the functions homes in the guest's window.
fn place(found: Vec<Found>) -> Result<Vec<Arc<Function>>, String> {
    let ranges: Vec<HpaRange> = found.iter().flat_map(|found| &found.description.bars).map(|bar| bar.range).collect();
    let window = GpaRange::new(PCI_MEMORY, PCI_ECAM.0 - PCI_MEMORY.0);
    let Some(homes) = window.and_then(|window| homes(window, &ranges)) else {
        let mib = ranges.iter().map(HpaRange::bytes).fold(0, u64::saturating_add) >> 20;
        let most = (PCI_ECAM.0 - PCI_MEMORY.0) >> 20;
        return Err(format!("the functions have {mib} MiB of registers; a VM has room for {most} MiB of them"));
    };
    let mut homes = homes.into_iter();
    let place = |found: Found| {
        let Found { at, space, description } = found;
        let memory: Vec<Placed> =
            description.bars.iter().zip(&mut homes).map(|(bar, home)| Placed { bar: *bar, home }).collect();
        let pieces = memory.iter().flat_map(|placed| placed.pieces(&description.messages));
        let closed = pieces.filter(|piece| !piece.is_mapped);
        let closed = closed.map(|piece| (piece, map_mmio(piece.hpa, piece.gpa.bytes()).0)).collect();
        let count = description.message_count();
        let state = State {
            table: Table::new(count),
            now: Wanted::default(),
            vectors: Vec::from_iter((0..count).map(|_| None)),
            is_told: false,
        };
        Arc::new(Function { at, space, description, memory, closed, state: Mutex::new(state), owner: Once::new() })
    };
    Ok(found.into_iter().map(place).collect())
}

impl Given {
    /// The configuration spaces for the guest.
    pub(super) fn spaces(&self) -> impl Iterator<Item = ConfigSpace> {
        self.functions.iter().map(|function| {
            function
                .description
                .view(|index| function.memory.iter().find(|placed| placed.bar.index == index).map(|placed| placed.home))
        })
    }

    /// Silences all functions, and resets those that can be.
    fn begin(&mut self) {
        for function in &self.functions {
            function.silence();
            function.wake();
            match function.description.reset {
                Some(reset) => {
                    function.reset(reset);
                    self.ready_at = Some(tsc::now() + tsc::nanos_to_ticks(RESET_NANOS));
                }
                None => log::warn!(
                    "{}: it cannot be reset by itself (no function-level reset): one VM can have it until the machine \
                     restarts",
                    function.at
                ),
            }
        }
    }

    /// The guest has written to the configuration space of its function `index`.
    pub(super) fn follow(&self, index: usize, space: &ConfigSpace) {
        if let Some(function) = self.functions.get(index) {
            function.follow(space);
        }
    }

    /// The guest's read at an address in pages that are not mapped. `None`: no function has it.
    pub(super) fn read(&self, gpa: Gpa, bytes: u64) -> Option<u64> {
        let (function, placed) = self.at(gpa)?;
        Some(match placed.reached(&function.description.messages, gpa, bytes) {
            Reached::Table(offset) => function.state.lock().table.read(offset, bytes),
            Reached::Register(part) | Reached::Pending(part) => function.register(&part).map_or(u64::MAX, read),
            Reached::Nothing => u64::MAX,
        })
    }

    /// The guest's write there. Returns whether a function has it.
    pub(super) fn write(&self, gpa: Gpa, bytes: u64, value: u64) -> bool {
        let Some((function, placed)) = self.at(gpa) else { return false };
        match placed.reached(&function.description.messages, gpa, bytes) {
            Reached::Table(offset) => {
                let mut state = function.state.lock();
                for entry in state.table.write(offset, bytes, value) {
                    function.renew(&mut state, entry);
                }
            }
            Reached::Register(part) => {
                if let Some(register) = function.register(&part) {
                    write(register, value);
                }
            }
            Reached::Pending(_) | Reached::Nothing => {}
        }
        true
    }

    /// The function that has pages around this address that are not mapped, and the BAR.
    fn at(&self, gpa: Gpa) -> Option<(&Arc<Function>, &Placed)> {
        self.functions.iter().find_map(|function| {
            let (piece, _) = function.closed.iter().find(|(piece, _)| piece.gpa.contains(gpa))?;
            let is_home = |placed: &&Placed| placed.pieces(&function.description.messages).any(|other| other == *piece);
            Some((function, function.memory.iter().find(is_home)?))
        })
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        for function in &self.functions {
            function.silence();
            // The vectors are another function's next.
            iommu::close_routes(function.at.into());
            let mut state = function.state.lock();
            for vector in state.vectors.iter_mut().filter_map(Option::take) {
                VECTORS.lock().release(vector);
            }
        }
        let mut claims = CLAIMS.lock();
        let Claims { taken, used } = &mut *claims;
        for function in &self.functions {
            taken.retain(|taken| *taken != function.at);
            if !used.contains(&function.at) {
                used.push(function.at);
            }
        }
    }
}

/// A register in a closed page: where it is mapped here, and its length.
#[derive(Clone, Copy)]
struct Mapped {
    at: u64,
    bytes: u64,
}

fn read(Mapped { at, bytes }: Mapped) -> u64 {
    match bytes {
        // SAFETY: the register is in a page of the function that is mapped for good, and `reached` has checked that it
        // is aligned. Its effects are the function's, which belongs to the VM of the caller.
        1 => unsafe { (at as *const u8).read_volatile() }.into(),
        // SAFETY: as above.
        2 => unsafe { (at as *const u16).read_volatile() }.into(),
        // SAFETY: as above.
        4 => unsafe { (at as *const u32).read_volatile() }.into(),
        // SAFETY: as above.
        _ => unsafe { (at as *const u64).read_volatile() },
    }
}

fn write(Mapped { at, bytes }: Mapped, value: u64) {
    let [a, b, c, d, ..] = value.to_le_bytes();
    match bytes {
        // SAFETY: as for `read`. It is not the table of messages: `reached` has told them apart.
        1 => unsafe { (at as *mut u8).write_volatile(a) },
        // SAFETY: as above.
        2 => unsafe { (at as *mut u16).write_volatile(u16::from_le_bytes([a, b])) },
        // SAFETY: as above.
        4 => unsafe { (at as *mut u32).write_volatile(u32::from_le_bytes([a, b, c, d])) },
        // SAFETY: as above.
        _ => unsafe { (at as *mut u64).write_volatile(value) },
    }
}

impl Function {
    /// Where a part of its memory is mapped here, if it is in a closed page.
    fn register(&self, part: &Part) -> Option<Mapped> {
        let placed = self.memory.iter().find(|placed| placed.bar.index == part.bar)?;
        let hpa = placed.bar.range.start.0 + part.offset;
        self.closed.iter().find_map(|(piece, hva)| {
            let offset = hpa.checked_sub(piece.hpa.0).filter(|offset| offset + part.bytes <= piece.gpa.bytes())?;
            Some(Mapped { at: hva + offset, bytes: part.bytes })
        })
    }

    /// No access to memory, and no messages. Its own memory answers.
    fn silence(&self) {
        match self.description.messages {
            Messages::MsiX { at, .. } => self.set_word(at + 2, MSI_X_MASKED),
            Messages::Msi { at, .. } => self.set_word(at + 2, 0),
        }
        self.set_command(false);
    }

    fn set_word(&self, at: usize, value: u16) {
        self.space.set_word(at, value);
    }

    fn set_command(&self, is_master: bool) {
        let master = if is_master { BUS_MASTER } else { 0 };
        self.set_word(register::COMMAND, MEMORY_SPACE | NO_LINE | master);
    }

    /// Full power.
    fn wake(&self) {
        const STATE: u16 = 3;
        if let Some(at) = self.description.power {
            self.set_word(at, self.space.word(at) & !STATE);
        }
    }

    /// Begins a reset. It may not answer for a while, and has forgotten where its memory is.
    fn reset(&self, reset: Reset) {
        const EXPRESS: u16 = 1 << 15;
        const EXPRESS_PENDING: u16 = 1 << 5;
        const ADVANCED: u16 = 1;
        const ADVANCED_PENDING: u16 = 1 << 8;
        let (at, start, status, pending) = match reset {
            Reset::Express(control) => (control, EXPRESS, control + 2, EXPRESS_PENDING),
            Reset::Advanced(control) => (control, ADVANCED, control, ADVANCED_PENDING),
        };
        // It has no bus mastering any more: what is under way ends.
        let deadline = tsc::now() + tsc::nanos_to_ticks(RESET_NANOS);
        while self.space.word(status) & pending != 0 && tsc::now() < deadline {
            core::hint::spin_loop();
        }
        self.set_word(at, self.space.word(at) | start);
    }

    /// After a reset: its memory is where it was.
    fn restore(&self) {
        if self.description.reset.is_none() {
            return;
        }
        for index in 0..BARS {
            self.space.set_dword(register::BARS + 4 * index, self.description.bar_register(index));
        }
        if let Some((at, control)) = self.description.express_control() {
            self.set_word(at, control);
        }
        self.silence();
    }

    /// Does what the guest's configuration space says.
    fn follow(self: &Arc<Self>, space: &ConfigSpace) {
        let mut state = self.state.lock();
        let wanted = self.description.wanted(space);
        let before = core::mem::replace(&mut state.now, wanted);
        if before == wanted {
            return;
        }
        match self.description.messages {
            Messages::MsiX { at, .. } => {
                let on = if wanted.sends { MSI_X_ON } else { 0 };
                let masked = if wanted.is_masked || !wanted.sends { MSI_X_MASKED } else { 0 };
                self.set_word(at + 2, on | masked);
            }
            Messages::Msi { at, .. } => {
                let (address, data) = wanted.message.unwrap_or_default();
                state.table.set(0, address, data, !wanted.sends);
                if before.sends != wanted.sends {
                    self.set_word(at + 2, 0);
                    self.renew(&mut state, 0);
                }
            }
        }
        if before.is_master != wanted.is_master {
            self.set_command(wanted.is_master);
        }
    }

    /// The guest has changed a message: the function masks it as the guest does. It is given a vector when it is let
    /// through for the first time, and keeps it.
    fn renew(self: &Arc<Self>, state: &mut State, entry: usize) {
        let is_masked = state.table.is_masked(entry);
        let Some(slot) = state.vectors.get_mut(entry) else { return };
        if slot.is_none() && !is_masked {
            *slot = self.take_vector(entry);
            if slot.is_none() && !state.is_told {
                state.is_told = true;
                log::warn!("{}: no vector is left for its message {entry}, which is lost", self.at);
            }
        }
        let is_masked = is_masked || slot.is_none();
        match self.description.messages {
            Messages::MsiX { .. } => self.set_entry(entry, 3, u32::from(is_masked)),
            Messages::Msi { at, .. } => self.set_word(at + 2, if is_masked { 0 } else { MSI_ON }),
        }
    }

    /// Gives message `entry` a vector of a pCPU. `None`: none is left, or the IOMMU has no room for the message.
    fn take_vector(self: &Arc<Self>, entry: usize) -> Option<Vector> {
        let vector = VECTORS.lock().take(targets(), (self.clone(), entry))?;
        let apic_id = u8::try_from(cpu::by_id(cpu::CpuId(vector.cpu)).arch.apic_id);
        let message = apic_id.ok().and_then(|id| iommu::route(self.at.into(), entry, id, vector.vector));
        match message {
            Some(message) => self.program(entry, message),
            None => VECTORS.lock().release(vector),
        }
        message.map(|_| vector)
    }

    /// Writes a message into the function. There it is masked, or off.
    fn program(&self, entry: usize, Message { address, data }: Message) {
        match self.description.messages {
            Messages::MsiX { .. } => {
                for (word, value) in [address, 0, data.into()].into_iter().enumerate() {
                    self.set_entry(entry, word, value);
                }
            }
            Messages::Msi { at, is_wide, has_mask } => {
                self.space.set_dword(at + 4, address);
                if is_wide {
                    self.space.set_dword(at + 8, 0);
                }
                self.set_word(at + msi_data(is_wide), data);
                if has_mask {
                    self.space.set_dword(at + msi_data(is_wide) + 4, 0);
                }
            }
        }
    }

    /// Writes a word of its own table of messages.
    fn set_entry(&self, entry: usize, word: usize, value: u32) {
        let Messages::MsiX { table, .. } = self.description.messages else { return };
        let offset = table.offset + (entry * ENTRY_BYTES + word * 4) as u64;
        if let Some(mapped) = self.register(&Part { bar: table.bar, offset, bytes: 4 }) {
            write(mapped, value.into());
        }
    }
}

/// pCPUs that take interrupts of functions: those that run vCPUs, as far as a message can name them.
fn targets() -> impl Iterator<Item = u32> {
    const LONGEST_ID: u32 = 254;
    scheduler::runners().filter(|cpu| cpu.arch.apic_id <= LONGEST_ID).map(|cpu| cpu.id.0)
}

/// A function has sent `vector` to this pCPU: its guest gets the message that it has chosen.
pub(in crate::arch::x86_64) fn interrupt(cpu: &PerCpu, vector: u8) {
    let source = VECTORS.lock().of(Vector { cpu: cpu.id.0, vector }).cloned();
    let Some((function, entry)) = source else { return };
    let Some(vm) = function.owner.get().and_then(Weak::upgrade) else { return };
    let message = function.state.lock().table.message(entry);
    if let Some(message) = message {
        delivery::send(&vm, None, &message);
    }
}
