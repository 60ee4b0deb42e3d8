//! From UEFI firmware, or from a boot loader on it, to the entry of the boot protocol (UEFI Specification 2.10).
//!
//! The image is also an EFI program. Firmware loads it at any page and calls `efi_entry` at its own exception level,
//! with caches on and its own translation, which maps all memory at its physical address. This code makes a copy of the
//! image at a multiple of 2 MiB, and writes the facts that only the firmware knows into a variable of that copy. It
//! ends the firmware, and enters the copy like any other loader: with translation and caches off, and the device tree
//! in X0.
//!
//! The image is linked for another address than it runs at here. So it first adds the difference to all addresses in
//! its memory, which the linker has listed; in the copy this is undone. This code changes no variable of the image,
//! only the copy's. It is not used after the start: the pages of the running image become free memory.

#![expect(unsafe_code, reason = "calls of the firmware, and memory that it hands over")]

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::convert::Infallible;
use core::ffi::c_void;
use core::fmt::{self, Write};
use core::ptr::{self, NonNull};

use addr::{Hpa, HpaRange, PAGE_BYTES};
use uefi_raw::protocol::console::SimpleTextOutputProtocol;
use uefi_raw::protocol::device_path::DevicePathProtocol;
use uefi_raw::protocol::loaded_image::LoadedImageProtocol;
use uefi_raw::protocol::media::LoadFile2Protocol;
use uefi_raw::table::boot::{AllocateType, BootServices, MemoryType};
use uefi_raw::table::configuration::ConfigurationTable;
use uefi_raw::table::system::SystemTable;
use uefi_raw::{Boolean, Guid, Handle, Status, guid};

use super::boot::DEVICE_TREE_LIMIT;
use super::device_tree;
use crate::arch::ram::write_back;
use crate::boot::efi::{self, Refused};
use crate::boot::handover::Handover;
use crate::memory_map::MemoryMap;

/// The configuration table that is a device tree (Devicetree in UEFI: EBBR 2.1, 2.2).
const DEVICE_TREE: Guid = guid!("b1b621d5-f19c-41a5-830b-d9152c69aae0");
/// The vendor's device path with the initrd by the protocol LoadFile2 (Linux, Documentation/arch/x86/boot.rst calls it
/// LINUX_EFI_INITRD_MEDIA_GUID; for all architectures).
const INITRD: Guid = guid!("5568e427-68fc-4f3d-ac74-ca555231cc68");

// The header of a UEFI program (Microsoft, PE Format), after that of a Linux Image, whose last word points to it; the
// entry; and the exit.
global_asm!(
    r#"
    .section .boot.pe, "a"
    .global efi_header
    efi_header:
        .ascii "PE\0\0"
        .short 0xaa64                       /* for AArch64 */
        .short 2                            /* sections */
        .long 0, 0, 0                       /* no time, no symbols */
        .short efi_sections - efi_optional
        .short 0x22                         /* executable, anywhere */
    efi_optional:
        .short 0x20b                        /* PE32+ */
        .short 0
        .long pe_text_bytes
        .long pe_data_file_bytes
        .long 0
        .long pe_entry
        .long pe_text_start
        .quad 0                             /* preferred address */
        .long 4096, 4096                    /* alignment in memory and file */
        .short 0, 0, 0, 0, 0, 0
        .long 0
        .long image_bytes
        .long 4096                          /* of it headers */
        .long 0
        .short 10                           /* a program of UEFI, not a driver */
        .short 0x100                        /* its data need not be executable */
        .quad 0, 0, 0, 0                    /* stack and heap are firmware's */
        .long 0
        .long 6                             /* directories, all empty */
        .quad 0, 0, 0, 0, 0, 0
    efi_sections:
        .ascii ".text\0\0\0"
        .long pe_text_bytes, pe_text_start, pe_text_bytes, pe_text_start
        .long 0, 0, 0
        .long 0x60000020                    /* code, read, execute */
        .ascii ".data\0\0\0"
        .long pe_data_bytes, pe_data_start, pe_data_file_bytes, pe_data_start
        .long 0, 0, 0
        .long 0xc0000040                    /* data, read, write */

    .section .boot.text, "ax"
    /* X0: handle of this program; X1: system table. On the firmware's stack. */
    .global efi_entry
    efi_entry:
        stp x29, x30, [sp, #-32]!
        mov x29, sp
        stp x19, x20, [sp, #16]
        mov x19, x0
        mov x20, x1
        adrp x0, image_start
        mov x1, #{linked}
        sub x1, x0, x1
        bl efi_relocate
        mov x0, x19
        mov x1, x20
        adrp x2, image_start
        mrs x3, CurrentEL
        bl {main}
        ldp x19, x20, [sp, #16]
        ldp x29, x30, [sp], #32
        ret

    /* Adds X1 to each address in the data of the image at X0. The list has words of two kinds: an even one is where the next address
       is, as linked; in an odd one, bits 1 to 63 say which of the 63 words behind that one are addresses, and so on. Text is left
       alone: its addresses are for code that runs where it is linked, and firmware may have made it read-only. */
    efi_relocate:
        mov x2, #{linked}
        sub x2, x0, x2
        adrp x3, relr_start
        add x3, x3, :lo12:relr_start
        adrp x4, relr_end
        add x4, x4, :lo12:relr_end
        adrp x5, text_end
        adrp x6, image_start
        sub x5, x5, x6
        add x5, x5, x0
    1:  cmp x3, x4
        b.hs 4f
        ldr x6, [x3], #8
        tbnz x6, #0, 2f
        add x7, x2, x6
        mov x6, #1
        mov x9, #8
        b 3f
    2:  lsr x6, x6, #1
        mov x9, #63 * 8
    3:  add x9, x9, x7
    5:  cbz x6, 6f
        tbz x6, #0, 7f
        cmp x7, x5
        b.lo 7f
        ldr x8, [x7]
        add x8, x8, x1
        str x8, [x7]
    7:  add x7, x7, #8
        lsr x6, x6, #1
        b 5b
    6:  mov x7, x9
        b 1b
    4:  ret

    /* Enters the copy at X1 with the device tree at X0. This code is in memory, not only in caches. */
    efi_leave:
        msr daifset, #0xf
        ic ialluis
        dsb sy
        isb
        mrs x2, sctlr_el2
        mov x3, #{on}
        bic x2, x2, x3
        msr sctlr_el2, x2
        isb
        mov x4, x1
        mov x1, xzr
        mov x2, xzr
        mov x3, xzr
        br x4
    "#,
    linked = const super::paging::IMAGE,
    main = sym main,
    on = const aarch64_defs::registers::sctlr::M | aarch64_defs::registers::sctlr::C | aarch64_defs::registers::sctlr::I,
);

/// The boot protocol wants the image at a multiple of this.
const IMAGE_ALIGNMENT: u64 = 2 << 20;

unsafe extern "C" {
    static image_start: u8;
    static text_end: u8;
    static bss_start: u8;
    static image_end: u8;
    fn efi_relocate(image: u64, difference: u64);
}

/// The firmware's data, in the copy that is entered. Not in the part of the image that is zeroed there.
#[unsafe(link_section = ".data.efi")]
static HANDED: Handed = Handed(UnsafeCell::new(None));

struct Handed(UnsafeCell<Option<Handover>>);

// SAFETY: written before its copy is entered; from then on nothing writes it.
unsafe impl Sync for Handed {}

/// The firmware's data, if firmware has started this image. Call it once.
pub(super) fn handed_over() -> Option<Handover> {
    // SAFETY: as above. Volatile, because nothing in this program writes its own variable.
    unsafe { HANDED.0.get().read_volatile() }
}

/// Called by `efi_entry`, with the program's handle, the system table, the image's address, and CurrentEL. Returns only
/// if the hypervisor cannot start; the firmware then continues.
extern "C" fn main(program: Handle, table: &SystemTable, image: u64, level: u64) -> Status {
    const EL2: u64 = 2 << 2;

    let started = if level == EL2 { start(program, table, image) } else { Err(Refused::NotAtEl2) };
    let Err(why) = started;
    // Without a console there is no one to inform.
    if let Some(console) = NonNull::new(table.stdout) {
        let _ = write!(Console(console), "\r\nDunlin cannot start: {why}\r\n");
    }
    Status::LOAD_ERROR
}

/// Starts the hypervisor.
///
/// # Errors
/// It cannot be started. Everything taken from the firmware was given back.
fn start(program: Handle, table: &SystemTable, image: u64) -> Result<Infallible, Refused> {
    let firmware = Firmware::of(program, table)?;
    let tree = firmware.device_tree()?;
    let outline = device_tree::outline(tree.as_slice()).map_err(|_| Refused::DamagedDeviceTree)?;
    // A boot loader adds a tree of its own, with the initrd in it, if the firmware has none.
    if !outline.has_cpus {
        return Err(Refused::NoDeviceTree);
    }
    let initrd = firmware.initrd()?;
    let payload = initrd.as_ref().map(|pages| pages.range).or(outline.payload).ok_or(Refused::NoPayload)?;
    let mut handover = Handover::new();
    handover.payload = Some(payload);
    handover.command_line.set(efi::options(firmware.options()));
    let copy = firmware.copy_of(image)?;
    firmware.end(handover, &payload, &copy)?;

    let text = (&raw const text_end).addr() - (&raw const image_start).addr();
    let own = HpaRange::new(Hpa(image), text as u64);
    for range in [own, Some(copy.range), Some(tree.range), Some(payload)].into_iter().flatten() {
        // SAFETY: memory that the firmware has mapped at its physical address, and still has.
        unsafe { write_back(pointer(range.start.0), native(range.bytes())) };
    }
    // SAFETY: the firmware is ended. Everything that runs from here on is in memory: the code at `efi_leave`, the copy,
    // and the tree.
    unsafe {
        asm!(
            "b efi_leave",
            in("x0") tree.range.start.0,
            in("x1") copy.range.start.0,
            options(noreturn),
        )
    }
}

/// The firmware's services, as long as it is not ended.
#[derive(Clone, Copy)]
struct Firmware<'a> {
    program: Handle,
    table: &'a SystemTable,
    services: &'a BootServices,
}

impl<'a> Firmware<'a> {
    fn of(program: Handle, table: &'a SystemTable) -> Result<Self, Refused> {
        // SAFETY: the firmware's own table, which does not change while programs run.
        let services = unsafe { table.boot_services.as_ref() };
        Ok(Self { program, table, services: services.ok_or(Refused::NoExit)? })
    }

    /// Pages of our own, for `bytes` at a multiple of `alignment`.
    fn allocate(self, bytes: usize, alignment: u64) -> Result<Pages<'a>, Refused> {
        let count = native((bytes as u64).div_ceil(PAGE_BYTES) + (alignment / PAGE_BYTES - 1));
        let mut first = 0;
        // SAFETY: as the specification has it (7.2.1).
        let status = unsafe {
            (self.services.allocate_pages)(AllocateType::ANY_PAGES, MemoryType::LOADER_DATA, count, &raw mut first)
        };
        checked("AllocatePages", status)?;
        let range = HpaRange::new(Hpa(first.next_multiple_of(alignment)), bytes as u64).ok_or(Refused::NoPages)?;
        Ok(Pages { firmware: self, first, count, range })
    }

    /// A copy of the firmware's device tree.
    fn device_tree(self) -> Result<Pages<'a>, Refused> {
        let table = self.table;
        let count = if table.configuration_table.is_null() { 0 } else { table.number_of_configuration_table_entries };
        for index in 0..count {
            // SAFETY: there are this many entries.
            let entry = unsafe { table.configuration_table.add(index) };
            // SAFETY: as above; they do not change during this loop.
            let entry: ConfigurationTable = unsafe { entry.read() };
            if entry.vendor_guid != DEVICE_TREE || entry.vendor_table.is_null() {
                continue;
            }
            let tree = entry.vendor_table.cast::<u8>().cast_const();
            // SAFETY: a tree has a longer header than that.
            let header = unsafe { tree.cast::<[u8; 8]>().read() };
            let bytes = efi::tree_bytes(header, DEVICE_TREE_LIMIT).ok_or(Refused::DamagedDeviceTree)?;
            let pages = self.allocate(bytes, PAGE_BYTES)?;
            // SAFETY: the tree has this length, and the pages are ours.
            unsafe { ptr::copy_nonoverlapping(tree, pages.pointer(), bytes) };
            return Ok(pages);
        }
        Err(Refused::NoDeviceTree)
    }

    /// The initrd, if the loader offers one by LoadFile2.
    fn initrd(self) -> Result<Option<Pages<'a>>, Refused> {
        let path = InitrdPath::new();
        let mut rest: *const DevicePathProtocol = (&raw const path).cast();
        let mut device: Handle = ptr::null_mut();
        // SAFETY: the path is a whole one, which the firmware only reads.
        let found =
            unsafe { (self.services.locate_device_path)(&LoadFile2Protocol::GUID, &raw mut rest, &raw mut device) };
        if found != Status::SUCCESS {
            return Ok(None);
        }
        let Some(file) = self.protocol::<LoadFile2Protocol>(device, &LoadFile2Protocol::GUID) else { return Ok(None) };
        // SAFETY: a protocol of the firmware, which stays while this code runs.
        let load_file = unsafe { (*file.as_ptr()).load_file };
        let load = |bytes: &mut usize, buffer: *mut c_void| {
            // SAFETY: as above; the buffer has room for this many bytes, or is none.
            unsafe { load_file(file.as_ptr(), rest, Boolean::FALSE, bytes, buffer) }
        };
        let mut bytes = 0;
        if load(&mut bytes, ptr::null_mut()) != Status::BUFFER_TOO_SMALL {
            return Ok(None);
        }
        let pages = self.allocate(bytes, PAGE_BYTES)?;
        checked("LoadFile", load(&mut bytes, pages.pointer().cast()))?;
        Ok(Some(pages))
    }

    /// The options that this program was started with.
    fn options(self) -> &'a [u8] {
        let image = self.protocol::<LoadedImageProtocol>(self.program, &LoadedImageProtocol::GUID);
        // SAFETY: a protocol of the firmware, which does not change while this code runs.
        let Some(image) = image.map(|image| unsafe { image.as_ref() }) else { return &[] };
        if image.load_options.is_null() {
            return &[];
        }
        // SAFETY: the loader has put this many bytes there.
        unsafe { core::slice::from_raw_parts(image.load_options.cast(), image.load_options_size as usize) }
    }

    fn protocol<T>(self, handle: Handle, guid: &Guid) -> Option<NonNull<T>> {
        let mut interface = ptr::null_mut();
        // SAFETY: as the specification has it (7.3.7).
        let status = unsafe { (self.services.handle_protocol)(handle, guid, &raw mut interface) };
        NonNull::new(interface.cast()).filter(|_| status == Status::SUCCESS)
    }

    /// A copy of the image at `image`, in its linked form, at its final place.
    fn copy_of(self, image: u64) -> Result<Pages<'a>, Refused> {
        let bytes_to = |end: *const u8| end.addr() - (&raw const image_start).addr();
        let mut copy = self.allocate(bytes_to(&raw const image_end), IMAGE_ALIGNMENT)?;
        // The loader code zeroes the rest when it enters the copy.
        let in_file = bytes_to(&raw const bss_start);
        copy.range = HpaRange::new(copy.range.start, in_file as u64).ok_or(Refused::NoPages)?;
        // SAFETY: this image, the part from the file, and pages of ours.
        unsafe { ptr::copy_nonoverlapping(pointer(image), copy.pointer(), in_file) };
        // SAFETY: the copy is of an image that was relocated by the opposite.
        unsafe { efi_relocate(copy.range.start.0, super::paging::IMAGE.wrapping_sub(image)) };
        Ok(copy)
    }

    /// Ends the firmware, and stores its data in `copy`.
    fn end(self, mut handover: Handover, payload: &HpaRange, copy: &Pages<'_>) -> Result<(), Refused> {
        const ATTEMPTS: u32 = 8;
        let get = |bytes: &mut usize, map: *mut u8| {
            let (mut key, mut descriptor_bytes, mut version) = (0, 0, 0);
            // SAFETY: there is room for this many bytes.
            let status = unsafe {
                (self.services.get_memory_map)(
                    bytes,
                    map.cast(),
                    &raw mut key,
                    &raw mut descriptor_bytes,
                    &raw mut version,
                )
            };
            (status, key, descriptor_bytes)
        };
        let mut bytes = 0;
        let (_, _, descriptor_bytes) = get(&mut bytes, ptr::null_mut());
        // These pages are one more range, and the firmware may make others while it is ended.
        let map = self.allocate(bytes + 64 * descriptor_bytes, PAGE_BYTES)?;
        for _ in 0..ATTEMPTS {
            let mut bytes = native(map.range.bytes());
            let (status, key, descriptor_bytes) = get(&mut bytes, map.pointer());
            checked("GetMemoryMap", status)?;
            handover.memory = MemoryMap::new();
            efi::set_memory(&mut handover, map.as_slice().get(..bytes).unwrap_or_default(), descriptor_bytes)?;
            if !handover.memory.is_ram(payload) {
                return Err(Refused::PayloadOutside);
            }
            // SAFETY: as specified (7.4.6): if the map has changed since, it is read again, and nothing else is called.
            if unsafe { (self.services.exit_boot_services)(self.program, key) } == Status::SUCCESS {
                let offset = HANDED.0.get().addr() - (&raw const image_start).addr();
                let handed = pointer(copy.range.start.0 + offset as u64).cast::<Option<Handover>>();
                // SAFETY: the same variable, in the copy.
                unsafe { handed.write(Some(handover)) };
                // The firmware that would take pages back has ended.
                core::mem::forget(map);
                return Ok(());
            }
        }
        Err(Refused::NoExit)
    }
}

fn checked(name: &'static str, status: Status) -> Result<(), Refused> {
    if status == Status::SUCCESS { Ok(()) } else { Err(Refused::Service(name, status.0)) }
}

/// Pages that the firmware has given us; they go back when they are dropped.
struct Pages<'a> {
    firmware: Firmware<'a>,
    first: u64,
    count: usize,
    /// The used part of them.
    range: HpaRange,
}

impl Pages<'_> {
    fn pointer(&self) -> *mut u8 {
        pointer(self.range.start.0)
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: only ours, and mapped at their physical addresses. Unwritten bytes may have any value.
        unsafe { core::slice::from_raw_parts(self.pointer(), native(self.range.bytes())) }
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        // SAFETY: they are from there, and nothing uses them any more. After a failure there is nothing left to do.
        let _ = unsafe { (self.firmware.services.free_pages)(self.first, self.count) };
    }
}

/// Memory at this physical address, which is where the firmware maps it.
fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(native(address))
}

#[expect(clippy::cast_possible_truncation, reason = "this architecture has 64 bits")]
const fn native(number: u64) -> usize {
    number as usize
}

/// The device path that has the initrd: a vendor's, and its end (UEFI, 10.3.5.3 and 10.3.1).
#[repr(C, align(8))]
struct InitrdPath {
    media_vendor: [u8; 4],
    vendor: Guid,
    end: [u8; 4],
}

impl InitrdPath {
    const fn new() -> Self {
        Self { media_vendor: [4, 3, 20, 0], vendor: INITRD, end: [0x7f, 0xff, 4, 0] }
    }
}

/// The firmware's console: the screen, a serial line, or both.
struct Console(NonNull<SimpleTextOutputProtocol>);

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: a protocol of the firmware, which stays while this code runs.
        let output = unsafe { (*self.0.as_ptr()).output_string };
        // A piece at a time, with a NUL behind it.
        let mut units = text.encode_utf16();
        loop {
            let mut piece = [0u16; 64];
            let last = piece.len() - 1;
            let count = piece[..last].iter_mut().zip(&mut units).map(|(to, unit)| *to = unit).count();
            if count == 0 {
                return Ok(());
            }
            // SAFETY: the same, and text that ends.
            let _ = unsafe { output(self.0.as_ptr(), piece.as_ptr()) };
        }
    }
}
