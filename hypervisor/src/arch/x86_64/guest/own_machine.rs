//! The machine, for the VM that has its devices ([`io`](crate::io)).
//!
//! | the guest uses | it gets |
//! |---|---|
//! | an address that is no RAM | the machine's, mapped at the first access |
//! | a port | the machine's, without an exit, but for those below |
//! | COM1, COM2 | the VM's consoles |
//! | PCI's configuration | the machine's, without the functions that the hypervisor uses |
//! | its I/O APICs | [`Pins`], which programs the machine's |
//! | ACPI's control of power, reset | the end of the VM, and then of the machine's run |
//! | its local APIC, timer, CPUID, MSRs | those of any VM |

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::control::StopReason;
use abi::payload::{PciFunction, VmConfig};
use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};
use log::warn;
use spin::Mutex;
use stage2::{Access, MapError};
use x86_boot::layout::{
    BOOT_AREA_BYTES, IO_APIC, LOCAL_APIC, MAP_LIMIT, MapEntry, MapKind, RESET_PORT, SERIAL_PORTS, SYNIC_BYTES,
    TOOL_PORT_BYTES,
};
use x86_boot::own_acpi::{self, MachineTables, PlacedTables};
use x86_boot::{Efi, Error, OwnMachine, Screen};

use super::vcpu::stop;
use super::{delivery, functions};
use crate::arch::x86_64::host::{acpi, boot, framebuffer, io_apic, iommu, keyboard, low_memory, paging, port, virtio};
use crate::boot::handover::Framebuffer;
use crate::boot::madt;
use crate::boot::runtime_services::{self, RuntimeServices};
use crate::cpu::{self, CpuId, PerCpu};
use crate::device::interrupt::{Message, Target};
use crate::device::uart;
use crate::frames::Frames;
use crate::io;
use crate::io::config_space::{ADDRESS_PORT, ConfigPorts, Meaning, WINDOW_PORT};
use crate::io::iommu::Functions;
use crate::io::pins::{MachineEntry, Pins};
use crate::io::reach::Reach;
use crate::memory_map::Kind;
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;
use crate::vm::memory::Memory;

/// What stands between the VM and the machine.
pub(in crate::arch::x86_64) struct MachineOfVm {
    reach: Reach,
    pins: Mutex<Pins>,
    /// [`Pins::level_vectors`], for interrupts: most vectors are not among them, and need no lock.
    level_vectors: [AtomicU64; 4],
    config_ports: Mutex<ConfigPorts>,
}

/// The pin of the port of a parent's programs: of the ISA bus, because the others may be PCI's. No usual device has it.
pub(super) const TOOL_PORT_PIN: u32 = 5;

/// Whether some VM was given the devices. They are given once: what their state is after a VM, only a reset clears.
static ARE_TAKEN: AtomicBool = AtomicBool::new(false);

/// Where the pages of the VM's SynICs begin.
static SYNICS: AtomicU64 = AtomicU64::new(0);

/// The number of vCPUs of a VM with the devices that has so many of the machine's CPUs, those with the lowest APIC ids.
///
/// A device names the CPU that it interrupts by its APIC id, so a vCPU must have that of a pCPU, and it has its number.
/// If the machine's ids have gaps, some vCPUs are no CPU of the machine: the guest's tables do not name them, and they
/// never start.
pub(crate) fn vcpus_with_devices(cpus: u32) -> u32 {
    let mut ids: Vec<u32> = cpu::all().iter().map(|cpu| cpu.arch.apic_id).collect();
    ids.sort_unstable();
    madt::vcpus_of(&ids, cpus)
}

/// Gives the devices to a VM that is about to be created, with this number of vCPUs. Returns the memory below 1 MiB.
///
/// # Errors
/// Why no VM, or not this one, can have them.
pub(crate) fn take_devices(vcpus: u32) -> Result<Vec<Frames>, String> {
    let count = u32::try_from(cpu::count()).unwrap_or(u32::MAX);
    let most = vcpus_with_devices(count);
    if vcpus > most {
        return Err(format!(
            "{} vCPUs: with the machine's devices a VM has at most as many as the machine has CPUs, {count}",
            vcpus - most + count
        ));
    }
    // A start begins at vCPU 0.
    let first = cpu::by_id(CpuId(0)).arch.apic_id;
    if first != 0 {
        return Err(format!("the CPU that the machine starts with has the APIC id {first}; it must be 0"));
    }
    if io_apic::init().is_none() {
        return Err(format!("ACPI names no I/O APIC at {IO_APIC} with the first pins"));
    }
    if functions::are_given() {
        return Err(String::from("other VMs have some of the machine's PCI functions"));
    }
    if ARE_TAKEN.swap(true, Ordering::AcqRel) {
        return Err(String::from("another VM has had the machine's devices; they are given once"));
    }
    Ok(low_memory::take())
}

/// Whether a VM was given the devices.
pub(super) fn are_devices_taken() -> bool {
    ARE_TAKEN.load(Ordering::Acquire)
}

/// The VM's SynICs' pages: where those of vCPU `index` begin.
pub(super) fn synic_page(index: u32) -> Gpa {
    Gpa(SYNICS.load(Ordering::Relaxed) + u64::from(index) * SYNIC_BYTES)
}

/// The page of the port for a parent's programs. The hypervisor's image is there, so the VM has no memory at it.
pub(super) fn tool_port() -> Gpa {
    Gpa(paging::image().start.0 & !(PAGE_BYTES - 1))
}

/// Ports that leave the guest.
pub(super) fn closed_ports() -> impl Iterator<Item = u16> {
    let serial = SERIAL_PORTS.iter().flat_map(|&(first, _)| first..first + uart::PORTS);
    serial.chain(ADDRESS_PORT..WINDOW_PORT).chain(power_ports().flat_map(|first| [first, first + 1]))
}

/// ACPI's ports for power, of two bytes each.
fn power_ports() -> impl Iterator<Item = u16> {
    let off = acpi::machine().and_then(|machine| machine.soft_off.as_ref());
    off.into_iter().flat_map(|off| [Some(off.control_a), off.control_b]).flatten().filter(|port| *port < u16::MAX)
}

/// The VM's memory besides its own choice, and the machine as its kernel finds it.
pub(super) struct Prepared {
    memory_map: Vec<MapEntry>,
    boot_area: Gpa,
    tables: PlacedTables,
    /// Where the map of UEFI's memory is, if UEFI has runtime services.
    efi: Option<Efi>,
    screen: Option<Screen>,
}

impl Prepared {
    /// Finds places in this memory, and leaves the screen and the keyboard to the kernel if it is told to use them.
    ///
    /// # Errors
    /// There is none below 4 GiB.
    pub(super) fn new(config: &VmConfig, memory: &Memory) -> Result<Self, Error> {
        const BELOW_4G: u64 = 1 << 32;
        const NEEDED: u64 = 1 << 20;
        let regions = &memory.backing.regions;
        let is_usable = |region: &&GpaRange| region.end().0 <= BELOW_4G && region.bytes() >= 2 * NEEDED;
        // As high as possible: the kernel itself goes as low as possible.
        let home = regions.iter().filter(is_usable).max_by_key(|region| region.start);
        let home = home.ok_or(Error::NoRoom { needs: NEEDED, has: 0 })?;

        let synics = home.end().0 - u64::from(config.vcpus) * SYNIC_BYTES;
        SYNICS.store(synics, Ordering::Relaxed);
        let place = |at: u64| {
            let named = acpi::machine().map_or(&[][..], |machine| &machine.tables);
            let madt = acpi::machine().map_or(&[][..], |machine| machine.madt);
            let tool_port = (tool_port(), TOOL_PORT_PIN);
            let io_apics: Vec<u32> = io_apic::found().iter().map(|io_apic| io_apic.first).collect();
            let (vcpus, role) = (config.vcpus, config.role);
            own_acpi::place(&MachineTables { named, madt, io_apics: &io_apics, vcpus, role, tool_port }, Gpa(at))
        };
        let tables_at = synics - (place(0).bytes.len() as u64).next_multiple_of(PAGE_BYTES);
        let tables = place(tables_at);
        let efi = services().and_then(|services| efi(services, tables_at));
        let efi_at = efi.map_or(tables_at, |efi| efi.memory_map.start.0 & !(PAGE_BYTES - 1));
        let boot_area = Gpa(efi_at - BOOT_AREA_BYTES);

        let kept = [
            (efi_at, tables_at, MapKind::Reserved),
            (tables_at, synics, MapKind::AcpiTables),
            (synics, home.end().0, MapKind::Reserved),
        ];
        let mut memory_map = firmwares_map(regions);
        for (start, end, kind) in kept {
            memory_map.extend(entry(start, end, kind));
        }
        memory_map.extend(regions.iter().filter_map(|region| {
            let end = if region == home { efi_at } else { region.end().0 };
            entry(region.start.0, end, MapKind::Ram)
        }));
        memory_map.sort_unstable_by_key(|entry| entry.range.start);
        if memory_map.len() > MAP_LIMIT {
            warn!("{}: the memory map has {} ranges; the kernel sees {MAP_LIMIT}", config.name, memory_map.len());
        }
        let screen = x86_boot::has_console_on_screen(&config.cmdline).then(|| take_screen(&config.name));
        if efi.is_some() {
            log::info!("{}: it has UEFI's runtime services", config.name);
        }
        Ok(Self { memory_map, boot_area, tables, efi, screen })
    }

    /// The machine for the loader of the kernel.
    pub(super) fn machine(&self) -> OwnMachine<'_> {
        OwnMachine {
            memory_map: &self.memory_map,
            boot_area: self.boot_area,
            rsdp: self.tables.rsdp,
            screen: self.screen,
            efi: self.efi,
        }
    }

    /// Writes the firmware's tables.
    pub(super) fn write_tables(&self, memory: &Memory) -> bool {
        let write_map =
            |efi: Efi| services().is_some_and(|services| memory.write(efi.memory_map.start, services.map()));
        memory.write(self.tables.rsdp, &self.tables.bytes) && self.efi.is_none_or(write_map)
    }
}

fn services() -> Option<&'static RuntimeServices> {
    boot::handover().map(|handover| &handover.runtime_services)
}

/// What leads a kernel to UEFI's runtime services, with a map that ends at or below `end`, a multiple of 4 KiB.
fn efi(services: &RuntimeServices, end: u64) -> Option<Efi> {
    let bytes = services.map().len() as u64;
    let memory_map = GpaRange::new(Gpa(end - bytes.next_multiple_of(PAGE_BYTES)), bytes)?;
    let descriptor_bytes = runtime_services::DESCRIPTOR_BYTES;
    Some(Efi { system_table: services.system_table()?, memory_map, descriptor_bytes })
}

/// Takes the screen and the keyboard from the hypervisor, whose consoles are the serial lines from then on.
fn take_screen(name: &str) -> Screen {
    log::info!("{name}: it has the screen and the keyboard from now on");
    keyboard::give_up();
    let pixels = |framebuffer: Framebuffer| {
        let row_bytes = u16::try_from(framebuffer.row_pixels.checked_mul(4)?).ok()?;
        let Framebuffer { start, width, height, shifts, .. } = framebuffer;
        Some(Screen::Pixels { start: Gpa(start.0), width, height, row_bytes, shifts })
    };
    // Without a framebuffer a PC has a VGA in text mode, or none. Linux looks for it.
    framebuffer::give_up().and_then(pixels).unwrap_or(Screen::Text)
}

fn entry(start: u64, end: u64, kind: MapKind) -> Option<MapEntry> {
    let range = GpaRange::new(Gpa(start), end.checked_sub(start)?).filter(|range| range.bytes() > 0)?;
    Some(MapEntry { range, kind })
}

/// What the loader's map says besides free RAM, and RAM that is not the VM's.
fn firmwares_map(regions: &[GpaRange]) -> Vec<MapEntry> {
    let Some(handover) = boot::handover() else { return Vec::new() };
    let mut map = Vec::new();
    for (range, kind) in handover.memory.entries() {
        let kind = match kind {
            Kind::Ram => continue,
            Kind::Acpi => MapKind::AcpiNvs,
            Kind::Reserved => MapKind::Reserved,
        };
        map.extend(entry(range.start.0, range.end().0, kind));
    }
    let mut others = handover.memory.ram();
    for region in regions {
        if let Some(own) = HpaRange::new(Hpa(region.start.0), region.bytes()) {
            others.remove(&own);
        }
    }
    // Linux lets no driver have an address that the map calls reserved.
    if let Some(port) = HpaRange::new(Hpa(tool_port().0), PAGE_BYTES) {
        others.remove(&port);
    }
    map.extend(others.iter().filter_map(|range| entry(range.start.0, range.end().0, MapKind::Reserved)));
    let used = virtio::used().map_or(&[][..], |used| &used.registers);
    map.extend(used.iter().filter_map(|range| entry(range.start.0, range.end().0, MapKind::Reserved)));
    map
}

impl MachineOfVm {
    /// With everything within reach that is not the hypervisor's or another VM's.
    pub(super) fn new() -> Self {
        let mut config_ports = ConfigPorts::new(hidden_functions());
        // Firmware, or the hypervisor, has left it at any function.
        open_window(&mut config_ports);
        let emulated = SERIAL_PORTS.iter().map(|&(_, pin)| pin).chain([TOOL_PORT_PIN]);
        Self {
            reach: reach(),
            pins: Mutex::new(Pins::new(io_apic::found().iter().map(|io_apic| io_apic.pins), emulated)),
            level_vectors: Default::default(),
            config_ports: Mutex::new(config_ports),
        }
    }

    /// The number of the I/O APIC that has this page.
    pub(super) fn io_apic_at(&self, page: Gpa) -> Option<usize> {
        io_apic::found().iter().position(|io_apic| io_apic.registers.0 == page.0)
    }

    /// A read at an I/O APIC.
    pub(super) fn read_io_apic(&self, number: usize, offset: u16) -> u32 {
        self.pins.lock().read(number, offset)
    }

    /// A write there.
    pub(super) fn write_io_apic(&self, vm: &Vm, number: usize, offset: u16, value: u32) {
        let mut pins = self.pins.lock();
        let (message, entry) = pins.write(number, offset, value, |target| cpu_of(vm, target));
        if let Some(entry) = entry {
            // Before the machine can send: an interrupt of a level-triggered pin must find its vector here.
            for (word, vectors) in self.level_vectors.iter().zip(pins.level_vectors()) {
                word.store(vectors, Ordering::SeqCst);
            }
            io_apic::write(entry);
        }
        drop(pins);
        if let Some(message) = message {
            delivery::send(vm, None, &message);
        }
    }

    /// An emulated device asserts its line, or ceases to.
    pub(super) fn set_line(&self, vm: &Vm, pin: u32, asserted: bool) {
        let message = self.pins.lock().set_line(pin as usize, asserted);
        if let Some(message) = message {
            delivery::send(vm, None, &message);
        }
    }

    /// A vCPU ended a level-triggered interrupt.
    pub(super) fn end_of_interrupt(&self, vm: &Vm, vector: u8) {
        let mut pins = self.pins.lock();
        pins.end_of_interrupt(vector, |target| cpu_of(vm, target), |entry, message| change(vm, entry, message));
    }

    /// The machine delivered `vector` to the pCPU with the APIC id `cpu`, which is the number of its vCPU.
    fn interrupt(&self, vm: &Vm, vector: u8, cpu: u32) {
        let is_level = self.level_vectors[usize::from(vector >> 6)].load(Ordering::SeqCst) >> (vector & 63) & 1 != 0;
        let mut was_pin = false;
        if is_level && let Ok(id) = u8::try_from(cpu) {
            let target = |target| cpu_of(vm, target);
            self.pins.lock().arrived(vector, id, target, |entry, message| {
                was_pin |= entry.is_some();
                change(vm, entry, message);
            });
        }
        if !was_pin {
            delivery::send_fixed(vm, vector, [cpu]);
        }
    }

    /// A read at a port that leaves the guest.
    pub(super) fn read_port(&self, at: u16, bytes: u8) -> u32 {
        match at {
            ADDRESS_PORT..WINDOW_PORT => match self.config_ports.lock().access(at, bytes, None) {
                Meaning::Address(address) => address,
                _ => read(at, bytes),
            },
            _ => read(at, bytes),
        }
    }

    /// A write there, by vCPU `index`.
    pub(super) fn write_port(&self, vm: &Vm, index: u32, at: u16, bytes: u8, value: u32) {
        if let Some((reason, verb)) = ends(at, bytes, value) {
            vm.stop_by(index, reason, format_args!("vCPU {index} {verb}, port {at:#x} value {value:#x}"));
            return;
        }
        match at {
            ADDRESS_PORT..WINDOW_PORT => {
                let mut config = self.config_ports.lock();
                match config.access(at, bytes, Some(value)) {
                    Meaning::Address(_) => open_window(&mut config),
                    _ => write(at, bytes, value),
                }
            }
            _ if is_sleep(at, value) => {
                warn!("{}: the machine does not sleep: port {at:#x} value {value:#x} is dropped", vm.name());
            }
            _ => write(at, bytes, value),
        }
    }
}

/// Makes a change, at the machine's I/O APIC first.
fn change(vm: &Vm, entry: Option<MachineEntry>, message: Option<Message>) {
    if let Some(entry) = entry {
        io_apic::write(entry);
    }
    if let Some(message) = message {
        delivery::send(vm, None, &message);
    }
}

/// The PCI functions that the hypervisor uses: the console of the control port, and AMD's IOMMUs, whose capability says
/// where their registers are.
fn hidden_functions() -> Vec<PciFunction> {
    let console = virtio::used().map(|used| used.function);
    console.into_iter().chain(iommu::functions().into_iter().map(|id| PciFunction::at(id.0))).collect()
}

/// Everything that is not the hypervisor's or another VM's.
fn reach() -> Reach {
    let page = |gpa: Gpa| HpaRange::new(Hpa(gpa.0), PAGE_BYTES);
    let ram: Vec<HpaRange> =
        boot::handover().map(|handover| handover.memory.ram().iter().copied().collect()).unwrap_or_default();
    let used = virtio::used();
    let registers = used.map_or(&[][..], |used| &used.registers).iter().copied();
    // The memory windows into configuration space: one page for each function.
    let windows = acpi::machine().map_or(&[][..], |machine| &machine.ecam).iter();
    let config_pages = hidden_functions().into_iter().flat_map(move |function| {
        windows.clone().filter_map(move |window| page(Gpa(window.base.0 + u64::from(function.index()) * PAGE_BYTES)))
    });
    let pages = page(LOCAL_APIC).into_iter().chain(io_apic::pages());
    let closed = ram.into_iter().chain(pages).chain(registers).chain(config_pages).chain(iommu::registers());
    Reach::new(closed, paging::physical_end())
}

/// Maximum of memory that firmware uses for devices, in each range: a screen's is the largest.
const MOST_RESERVED: u64 = 4 << 30;

/// Maps the memory that firmware uses for devices. Other memory of the machine is mapped at the first access, but a
/// device's access is none: it would be refused.
pub(super) fn map_reserved(config: &VmConfig, memory: &Memory) {
    let reach = reach();
    for range in iommu::reserved(&Functions::All) {
        let (name, start, end) = (&config.name, range.start, range.end());
        if range.bytes() > MOST_RESERVED {
            warn!("{name}: firmware uses memory at {start} to {end} for a device, which is too much: it is blocked");
            continue;
        }
        let mapped = reach.pages_of(&range).try_for_each(|page| {
            let page = page.map_err(|at| format!("{at} is RAM, or the hypervisor's"))?;
            match memory.map_at_its_address(page) {
                Ok(()) | Err(MapError::Overlaps(_)) => Ok(()),
                Err(why) => Err(format!("{why}")),
            }
        });
        match mapped {
            Ok(()) => log::info!("{name}: devices reach {start} to {end}, too: firmware uses it for one"),
            Err(why) => warn!("{name}: firmware uses memory at {start} to {end} for a device: it is blocked: {why}"),
        }
    }
}

/// Lets the window to PCI's configuration show what the guest has addressed. The window itself needs no exit: it is
/// closed while a hidden function would be in it, and the machine then answers with ones.
fn open_window(config: &mut ConfigPorts) {
    let address = match config.access(WINDOW_PORT, 4, None) {
        Meaning::Window(address) => address,
        _ => 0,
    };
    port::write_u32(ADDRESS_PORT, address);
}

/// PM1 control (ACPI 6.5, 4.8.3.2.1): begin the sleep of this type.
const SLEEP_ENABLE: u32 = 1 << 13;
const SLEEP_TYPE_SHIFT: u32 = 10;

/// Whether a write to this port begins a sleep.
fn is_sleep(at: u16, value: u32) -> bool {
    power_ports().any(|port| port == at) && value & SLEEP_ENABLE != 0
}

/// Whether a write to a port turns the machine off, or resets it.
fn ends(at: u16, bytes: u8, value: u32) -> Option<(StopReason, &'static str)> {
    let machine = acpi::machine()?;
    let off = machine.soft_off.as_ref().filter(|_| is_sleep(at, value));
    if off.is_some_and(|off| value >> SLEEP_TYPE_SHIFT & 7 == u32::from(off.types.a)) {
        return Some((StopReason::PowerOff, "turned the machine off"));
    }
    const RESET_CPU: u32 = 1 << 2;
    let by_chipset = at == RESET_PORT && bytes == 1 && value & RESET_CPU != 0;
    let by_acpi = machine.reset.is_some_and(|(port, command)| port == at && value & 0xff == u32::from(command));
    (by_chipset || by_acpi).then_some((StopReason::Reset, "reset the machine"))
}

fn read(at: u16, bytes: u8) -> u32 {
    match bytes {
        1 => port::read_u8(at).into(),
        2 => port::read_u16(at).into(),
        _ => port::read_u32(at),
    }
}

fn write(at: u16, bytes: u8, value: u32) {
    let [low, high, ..] = value.to_le_bytes();
    match bytes {
        1 => port::write_u8(at, low),
        2 => port::write_u16(at, u16::from_le_bytes([low, high])),
        _ => port::write_u32(at, value),
    }
}

/// The pCPU for an interrupt of the machine with this target: that of the first vCPU there. A device's pin has one.
fn cpu_of(vm: &Vm, target: Target) -> Option<u8> {
    delivery::first_of(vm, target).and_then(|index| u8::try_from(index).ok())
}

/// A device of the machine has raised `vector` on this pCPU.
pub(in crate::arch::x86_64) fn interrupt(cpu: &PerCpu, vector: u8) {
    let Some(vm) = io::owner() else { return functions::interrupt(cpu, vector) };
    if let Some(machine) = &vm.platform().own_machine {
        machine.interrupt(&vm, vector, cpu.arch.apic_id);
    }
}

/// The guest accessed `gpa`, where it has no memory. Maps what the machine has there, if the guest may reach it.
#[cold]
#[inline(never)]
pub(super) fn access(run: &mut Running<'_>, gpa: Gpa) -> Option<Next> {
    let page = run.vm.platform().own_machine.as_ref()?.reach.page_at(gpa)?;
    let memory = &run.vm.memory;
    let tlbs = AllTlbs::of(run.vm);
    let mapped = memory.walk_mut(&tlbs, &mut memory.shape()).map(page, Hpa(page.start.0), Access::ALL);
    match mapped {
        // Another vCPU may have mapped it since.
        Ok(()) | Err(MapError::Overlaps(_)) => {
            run.owner.arch.before_instruction();
            Some(Next::Resume)
        }
        Err(_) => {
            Some(stop(run, StopReason::Unsupported, "accesses a device for which there is no stage-2 table left"))
        }
    }
}

const _: () = assert!(TOOL_PORT_BYTES as u64 == PAGE_BYTES);
