//! Reads the boot loader's data from memory: PVH (Xen, `arch-x86/hvm/start_info.h`) or multiboot2 (Multiboot2
//! Specification 2.0, 3.6).

#![expect(unsafe_code, reason = "accesses what a loader says is there")]

use addr::{Hpa, HpaRange, PAGE_BYTES};
use multiboot2::{BootInformation, BootInformationHeader, FramebufferType, MaybeDynSized as _};

use super::boot::REACH;
use super::paging;
use crate::boot::handover::{Framebuffer, Handover, Module, Refused, RootTable};
use crate::boot::runtime_services::FirmwareMemory;

/// Copies the loader's data to `handover`. The loader has left `magic` in EAX and `information` in EBX.
///
/// # Errors
/// The data is not enough for a start. `handover` holds what could be read.
pub(super) fn read(magic: u32, information: u32, handover: &mut Handover) -> Result<(), Refused> {
    let address = u64::from(information);
    // PVH defines nothing in EAX, so its own magic number is checked first.
    let start_info: StartInfo = peek(address)?;
    if start_info.magic == START_INFO_MAGIC && start_info.version >= 1 {
        return by_pvh(&start_info, handover);
    }
    if magic != multiboot2::MAGIC {
        return Err(Refused::NoLoader);
    }
    // The information begins with its length.
    let bytes: u32 = peek(address)?;
    if address + u64::from(bytes) > LAST {
        return Err(Refused::Damaged);
    }
    // SAFETY: the loader has left it in the first 4 GiB, which are mapped; nothing writes it before all is copied. The
    // crate checks its alignment, and that its tags end where it ends.
    let information = unsafe { BootInformation::load(address as *const BootInformationHeader) };
    by_multiboot2(&information.map_err(|_| Refused::Damaged)?, handover)
}

/// `hvm_start_info`, version 1.
#[derive(Clone, Copy)]
#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    module_count: u32,
    modules: u64,
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_map_entries: u32,
    reserved: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PvhModule {
    start: u64,
    bytes: u64,
    command_line: u64,
    reserved: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MemoryEntry {
    start: u64,
    bytes: u64,
    kind: u32,
    reserved: u32,
}

const START_INFO_MAGIC: u32 = 0x336e_c578;

/// The first module is the payload.
fn by_pvh(info: &StartInfo, handover: &mut Handover) -> Result<(), Refused> {
    if info.command_line != 0 {
        handover.command_line.set((info.command_line..).map_while(|address| peek(address).ok()));
    }
    let entry = |index| peek::<MemoryEntry>(info.memory_map + u64::from(index) * size_of::<MemoryEntry>() as u64);
    if info.memory_map_entries == 0 {
        return Err(Refused::NoMemoryMap);
    }
    entry(info.memory_map_entries - 1)?;
    let entries = || (0..info.memory_map_entries).map_while(|index| entry(index).ok());
    handover.set_memory(|| entries().map(|entry| (entry.start, entry.bytes, entry.kind)))?;

    if info.module_count != 0 {
        let module: PvhModule = peek(info.modules)?;
        let (start, end) = (Hpa(module.start), Hpa(module.start.checked_add(module.bytes).ok_or(Refused::Damaged)?));
        handover.set_modules([Module { start, end, command_line: "" }].into_iter(), &paging::image())?;
    }
    handover.root_table = (info.rsdp != 0).then_some(RootTable::Rsdp(Hpa(info.rsdp)));
    Ok(())
}

/// Bytes of an entry of multiboot2's memory map, in the one version that there is.
const ENTRY_BYTES: u32 = 24;

fn by_multiboot2(info: &BootInformation<'_>, handover: &mut Handover) -> Result<(), Refused> {
    // First the data that the report of an error needs.
    if let Some(Ok(tag)) = info.framebuffer_tag()
        && let Ok(FramebufferType::RGB { red, green, blue }) = tag.buffer_type()
    {
        let colours = [red, green, blue].map(|colour| (colour.position, colour.size));
        let size = (tag.width(), tag.height());
        handover.framebuffer = Framebuffer::new(tag.address(), tag.pitch(), size, tag.bpp(), colours);
    }
    if let Some(Ok(text)) = info.command_line_tag().map(|tag| tag.cmdline()) {
        handover.command_line.set(text.bytes());
    }

    let map = info.memory_map_tag().filter(|map| map.entry_size() == ENTRY_BYTES).ok_or(Refused::NoMemoryMap)?;
    let kind = |area: &multiboot2::MemoryArea| area.typ().val();
    let areas = || map.memory_areas().iter();
    handover.set_memory(|| areas().map(|area| (area.start_address(), area.size(), kind(area))))?;

    let modules = info.module_tags().map(|module| Module {
        start: Hpa(module.start_address().into()),
        end: Hpa(module.end_address().into()),
        command_line: module.cmdline().unwrap_or_default(),
    });
    handover.set_modules(modules, &paging::image())?;
    // The tags hold a copy of ACPI's root pointer. Without an XSDT it is read as one of ACPI 1.0, whatever its
    // revision.
    let new = info.rsdp_v2_tag().filter(|tag| tag.checksum_is_valid()).map(|tag| (tag.revision(), tag.xsdt_address()));
    let old = || info.rsdp_v1_tag().filter(|tag| tag.checksum_is_valid()).map(|tag| (0, tag.rsdt_address()));
    let named = new.filter(|&(revision, address)| revision != 0 && address != 0).or_else(old);
    handover.root_table = named.map(|(revision, address)| RootTable::Sdt { revision, address: Hpa(address as u64) });

    // The map's tag has the size of a descriptor and the version of all, and then the descriptors.
    if let (Some(table), Some(map)) = (info.efi_sdt64_tag(), info.efi_memory_map_tag())
        && let Some((&[a, b, c, d, 1, 0, 0, 0], map)) = map.payload().split_first_chunk()
    {
        let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
        let Handover { runtime_services, memory, .. } = handover;
        // What is RAM from now on is kept by nobody.
        let ram = memory.ram();
        let is_lost = |range: &HpaRange| ram.iter().any(|ram| ram.overlaps(range));
        let set = runtime_services.set(table.sdt_address() as u64, map, bytes, is_lost, &mut First4Gib);
        if let Err(why) = set {
            log::warn!("no VM gets UEFI's runtime services: {why}");
        }
    }
    Ok(())
}

/// The memory in which loader and firmware have left what is read here.
struct First4Gib;

impl FirmwareMemory for First4Gib {
    fn read(&self, at: u64, into: &mut [u8]) -> bool {
        (at..).zip(into).all(|(at, byte)| peek(at).map(|read| *byte = read).is_ok())
    }

    fn clear(&mut self, at: u64, bytes: usize) {
        // SAFETY: mapped, as reads have shown. The bytes are an entry of firmware's list of tables, which only who asks
        // for the list reads.
        unsafe { core::ptr::write_bytes(at as *mut u8, 0, bytes) };
    }
}

/// Where no more of a value fits that begins below.
const LAST: u64 = REACH - PAGE_BYTES;

/// Copies a value that the loader left in the first 4 GiB.
fn peek<T: Copy>(address: u64) -> Result<T, Refused> {
    if address == 0 || address >= LAST {
        return Err(Refused::OutOfReach(address));
    }
    // SAFETY: the boot page tables map the first 4 GiB; the types read are plain numbers, at any alignment.
    Ok(unsafe { (address as *const T).read_unaligned() })
}
