//! Entry from the boot loader into Rust.
//!
//! Two kinds of loaders use the same entry, in 32-bit protected mode without paging:
//!
//! | | finds the entry by | passes |
//! |---|---|---|
//! | PVH (QEMU, Xen) | an ELF note | in EBX the address of `hvm_start_info` |
//! | multiboot2 (GRUB, on BIOS and UEFI) | the ELF's entry point, once it has seen the header | in EBX the address of the boot information, in EAX a magic number |
//!
//! The code assumes nothing else. It writes whole control registers, because UEFI leaves bits in CR4 and some BIOS
//! leaves caches off. It enables long mode with page tables that map the first 4 GiB twice (at their physical
//! addresses, and the first one where the image is linked). It copies the loader's data, makes the final page tables,
//! and continues on a guarded stack.
//!
//! The other pCPUs enter through [`smp`] and use the same boot page tables for a few instructions.

#![expect(unsafe_code, reason = "entry from the loader, and what it left in memory")]

use core::arch::{asm, global_asm};
use core::fmt::Display;

use addr::{Hpa, HpaRange, Hva};
use spin::Once;
use x86_64::structures::gdt::GlobalDescriptorTable;

use super::{
    acpi, apic, edu, framebuffer, iommu, irq, keyboard, loader_data, machine_check, paging, pci, percpu, power, serial,
    smp, tsc, wall_clock,
};
use crate::arch::ram::LoadedFile;
use crate::arch::x86_64::backend::{Backend as _, Chosen};
use crate::arch::x86_64::speculation;
use crate::arch::{control_port, weaknesses};
use crate::boot::Boot;
use crate::boot::console::{Place, Uart};
use crate::boot::handover::Handover;
use crate::boot::modules::Modules;
use crate::boot::spcr::Spcr;
use crate::cpu::{self, CpuId, scheduler};
use crate::log as uart_log;

/// Bytes of each pCPU's main stack.
pub(super) const STACK_BYTES: u64 = 128 << 10;

/// By which a multiboot2 loader knows the header.
const MULTIBOOT2_HEADER_MAGIC: u32 = 0xe852_50d6;

// The note, the entry, the boot page tables and descriptors. Everything here is linked at its physical address; the
// last jump leaves for where the rest of the image is linked.
global_asm!(
    r#"
    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 8, 18                      /* name and descriptor length; XEN_ELFNOTE_PHYS32_ENTRY */
    .asciz "Xen"
    .quad boot_entry

    /* Multiboot2 Specification 2.0, 3.1: in the first 32 KiB of the file, at a multiple of 8. */
    .section .boot.multiboot2, "a"
    .balign 8
    multiboot2_header:
        .long {header_magic}, 0, multiboot2_header_end - multiboot2_header
        .long -({header_magic} + multiboot2_header_end - multiboot2_header)
        /* Modules begin at page boundaries. */
        .balign 8
        .word 6, 0
        .long 8
        /* A framebuffer, if there can be one: of this size, with 32 bits a pixel. */
        .balign 8
        .word 5, 1
        .long 20, 1024, 768, 32
        .balign 8
        .word 0, 0
        .long 8
    multiboot2_header_end:

    .section .boot.text, "ax"
    .code32
    .global boot_entry
    boot_entry:
        cli
        cld
        lea esp, [boot_stack_low]
        mov ebp, ebx
        mov esi, eax

        /* Long mode (CPUID 8000_0001 EDX 29)? */
        mov eax, 0x80000000
        cpuid
        cmp eax, 0x80000001
        jb 9f
        mov eax, 0x80000001
        cpuid
        bt edx, 29
        jnc 9f

        /* 2048 leaves of 2 MiB: present, writable, large. */
        lea edi, [boot_pd]
        mov eax, 0x83
        xor edx, edx
        mov ecx, 2048
    2:  mov [edi], eax
        mov [edi + 4], edx
        add eax, 0x200000
        adc edx, 0
        add edi, 8
        dec ecx
        jnz 2b
        lea eax, [boot_pd + 0x003]
        lea edi, [boot_pdpt_low]
        mov [boot_pdpt_high + 510 * 8], eax
        mov ecx, 4
    3:  mov [edi], eax
        add eax, 0x1000
        add edi, 8
        dec ecx
        jnz 3b
        lea eax, [boot_pdpt_low + 0x003]
        mov [boot_pml4], eax
        lea eax, [boot_pdpt_high + 0x003]
        mov [boot_pml4 + 511 * 8], eax

        lgdt [boot_gdt_pointer]
        call boot_long_mode
        push 0x08
        lea eax, [4f]
        push eax
        retf

        /* No long mode: nothing else of this can run. Say so on the text screen and on COM1 (115200 8N1), and end QEMU. */
    9:  mov dx, 0x3fb
        mov al, 0x83
        out dx, al
        mov dx, 0x3f8
        mov al, 1
        out dx, al
        inc edx
        xor eax, eax
        out dx, al
        mov dx, 0x3fb
        mov al, 3
        out dx, al
        lea esi, [boot_no_long_mode]
        mov edi, 0xb8000
    7:  lodsb
        test al, al
        jz 5f
        mov ah, 0x07
        stosw
        mov bl, al
        mov dx, 0x3fd
        mov ecx, 100000                 /* nobody may be there */
    6:  in al, dx
        test al, 0x20
        jnz 6f
        dec ecx
        jnz 6b
    6:  mov dx, 0x3f8
        mov al, bl
        out dx, al
        jmp 7b
    5:  mov dx, {exit_port}
        mov al, {exit_refused}
        out dx, al
    8:  hlt
        jmp 8b

    /* Turns on long mode with the boot page tables. Also called by the other pCPUs. */
    .global boot_long_mode
    boot_long_mode:
        mov eax, 0x20                   /* PAE, and nothing that firmware has left */
        mov cr4, eax
        lea eax, [boot_pml4]
        mov cr3, eax
        mov ecx, 0xc0000080             /* EFER: LME, NXE */
        mov eax, 0x900
        xor edx, edx
        wrmsr
        mov eax, 0x80000031             /* PG, NE, ET, PE; caches on */
        mov cr0, eax
        ret

    .code64
    4:  xor eax, eax
        mov ds, eax
        mov es, eax
        mov ss, eax
        mov fs, eax
        mov gs, eax
        mov edi, esi
        mov esi, ebp
        movabs rsp, offset {stack} + {stack_bytes}
        xor ebp, ebp
        movabs rax, offset {main}
        call rax
        ud2

    .section .boot.data, "aw"
    boot_no_long_mode:
        .asciz "Dunlin cannot start: this processor has no 64-bit mode\r\n"
    .balign 8
    .global boot_gdt
    boot_gdt:
        .quad 0
        .quad 0x00af9a000000ffff        /* 0x08: 64-bit code */
        .quad 0x00cf92000000ffff        /* 0x10: data */
        .quad 0x00cf9a000000ffff        /* 0x18: 32-bit code, for the other pCPUs */
    .global boot_gdt_pointer
    boot_gdt_pointer:
        .word 31
        .long boot_gdt

    .section .boot.bss, "aw", @nobits
    .balign 4096
    boot_pml4: .skip 4096
    boot_pdpt_low: .skip 4096
    boot_pdpt_high: .skip 4096
    boot_pd: .skip 4 * 4096
    .skip 256
    .global boot_stack_low
    boot_stack_low:
    "#,
    header_magic = const MULTIBOOT2_HEADER_MAGIC,
    exit_port = const abi::exit_code::PORT,
    exit_refused = const abi::exit_code::REFUSED,
    stack = sym BOOT_STACK,
    stack_bytes = const BOOT_STACK_BYTES,
    main = sym boot_main,
);

/// Bytes of the stack that is used until a guarded one exists. Memory maps are worked on there, at 12 KiB each.
pub(super) const BOOT_STACK_BYTES: usize = 128 << 10;

/// The stack until a guarded one exists; afterwards the first stack of the other pCPUs, one at a time.
#[repr(C, align(16))]
pub(super) struct BootStack(core::cell::UnsafeCell<[u8; BOOT_STACK_BYTES]>);

// SAFETY: nothing in Rust touches it; it is memory for stack pointers, used by one pCPU at a time.
unsafe impl Sync for BootStack {}

pub(super) static BOOT_STACK: BootStack = BootStack(core::cell::UnsafeCell::new([0; BOOT_STACK_BYTES]));

/// The loader's data, copied before its memory can be reused.
static HANDOVER: Once<Handover> = Once::new();

/// Where the memory ends that the boot page tables map.
pub(super) const REACH: u64 = 4 << 30;

/// The descriptors of `boot_gdt`, at an address that stays mapped when the boot page tables go. Without them an
/// exception could not be reported. They are marked as accessed, because they are read-only.
static GDT: GlobalDescriptorTable<3> =
    GlobalDescriptorTable::from_raw_entries(&[0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);

/// The first function in Rust: on the boot stack and the boot page tables, with interrupts off. Loaders pass `magic` in
/// EAX and `information` in EBX.
extern "sysv64" fn boot_main(magic: u32, information: u32) -> ! {
    tsc::start();
    GDT.load();
    uart_log::init();
    irq::load();
    let mut handover = Handover::new();
    let read = loader_data::read(magic, information, &mut handover);
    let handover = HANDOVER.call_once(|| handover);
    if let Err(why) = read {
        refuse(handover, why);
    }
    if let Some(loss) = handover.memory.loss() {
        log::warn!("{loss}");
    }
    // SAFETY: once, on the boot page tables; the loader's memory map is the only source.
    if let Err(why) = unsafe { paging::init(&handover.memory, handover.modules()) } {
        refuse(handover, why);
    }
    let top = paging::map_stack(STACK_BYTES);
    // SAFETY: a fresh stack, and nothing on the old one is needed by `on_guarded_stack`.
    unsafe {
        asm!(
            "mov rsp, rdi",
            "xor ebp, ebp",
            "call {main}",
            "ud2",
            in("rdi") top.0,
            main = sym on_guarded_stack,
            options(noreturn),
        )
    }
}

/// The loader's data. There is some as soon as Rust code runs on the final page tables.
pub(in crate::arch::x86_64) fn handover() -> Option<&'static Handover> {
    HANDOVER.get()
}

/// Prints on each console why the machine is not started, while the boot page tables are in use.
fn refuse(handover: &'static Handover, why: impl Display) -> ! {
    framebuffer::open_at_boot(handover);
    let boot = Boot { payload: None, command_line: handover.command_line.text() };
    log::error!("cannot start: {why}");
    if let Some(how) = boot.option("panic") {
        power::set_panic(how);
    }
    power::exit(abi::exit_code::REFUSED)
}

/// The rest of the boot pCPU's way, on its final stack.
extern "sysv64" fn on_guarded_stack(stack: u64) -> ! {
    let handover = HANDOVER.get().expect("set before the stack was switched");
    framebuffer::open(handover);
    let boot = Boot { payload: payload(handover), command_line: handover.command_line.text() };
    if let Some(level) = boot.option("log") {
        uart_log::set_level(level);
    }
    if let Some(how) = boot.option("panic") {
        power::set_panic(how);
    }

    let machine = acpi::read(handover.root_table, &handover.memory);
    serial::choose(boot.option("console"), machine.and_then(|machine| firmwares_uart(machine.spcr?, handover)));
    uart_log::open();
    let Some(machine) = machine else {
        log::error!("no usable ACPI tables: cannot find the pCPUs and a clock");
        power::exit(abi::exit_code::REFUSED)
    };
    let apic_id = apic::id_by_cpuid();
    percpu::make(machine, apic_id, Hva(stack));
    percpu::install(cpu::by_id(CpuId(0)));
    machine_check::enable();
    power::init(machine);
    keyboard::init(machine);
    apic::init_boot();
    apic::take_logical_id(CpuId(0));
    tsc::calibrate(machine);
    wall_clock::init(machine);
    apic::start_timer();
    pci::init(machine, &handover.memory);
    iommu::init(machine, &handover.memory);
    control_port::open();
    let selftest = boot.option("selftest");
    scheduler::threads::choose(boot.option("smt"));
    speculation::choose(boot.option("mitigations"), weaknesses::ignored(&boot), selftest);
    if selftest == Some("tsc-skew") {
        tsc::plant_skew();
    }
    if selftest == Some("svm-locked") {
        Chosen::plant_lock();
    }
    if selftest == Some("iommu") {
        edu::run();
    }
    smp::start_others(handover.memory.start_page(handover.modules()));
    log::info!(
        "{} pCPUs, {} MiB free, TSC {} kHz, {}, timer {}",
        cpu::count(),
        crate::frames::free_bytes() >> 20,
        tsc::hz() / 1000,
        tsc::describe(),
        apic::timer_name(),
    );

    crate::start(&boot, modules(handover))
}

/// The UART that the firmware reports as its console, if its data is plausible.
fn firmwares_uart(spcr: Spcr, handover: &Handover) -> Option<Uart> {
    let uart = match spcr {
        Spcr::Uart(uart) => uart,
        Spcr::None => return None,
        Spcr::Other(kind) => {
            log::debug!("unknown interface type {kind:#x} of the firmware's console (SPCR)");
            return None;
        }
        Spcr::Damaged => {
            log::warn!("ACPI: the table SPCR, which names firmware's console, is damaged");
            return None;
        }
    };
    let is_ram = |start: Hpa| HpaRange::new(start, 1).is_none_or(|range| handover.memory.is_ram(&range));
    match uart.place {
        Place::Memory { start, .. } if is_ram(start) => {
            log::warn!("ACPI: the table SPCR places the firmware's console at {}, which is RAM", uart.place);
            None
        }
        _ => Some(uart),
    }
}

/// The payload's bytes, if they are in RAM.
///
/// Its end may be in memory that firmware has reserved. QEMU keeps a fixed part of the highest memory below 4 GiB for
/// firmware and puts the module before it. SeaBIOS needs more with some devices, such as NVMe.
fn payload(handover: &Handover) -> Option<&'static [u8]> {
    let range = handover.payload?;
    let begins_in_ram = HpaRange::new(range.start, 1).is_some_and(|first| handover.memory.is_ram(&first));
    let start = paging::map_firmware(range.start, range.bytes()).filter(|_| begins_in_ram);
    let Some(start) = start else {
        log::warn!("the boot module at {} is not in RAM, ignored", range.start);
        return None;
    };
    // SAFETY: in the direct map, and kept out of the pool, so no code ever writes it. Firmware does not run any more.
    Some(unsafe { core::slice::from_raw_parts(start.0 as *const u8, usize::try_from(range.bytes()).ok()?) })
}

/// The boot modules besides the payload, as far as they are in RAM. Call it once.
fn modules(handover: &'static Handover) -> Modules {
    let loaded = |(range, command_line): (&HpaRange, &'static str)| {
        if !handover.memory.is_ram(range) {
            log::warn!("the boot module '{command_line}' at {} is not in RAM, ignored", range.start);
            return None;
        }
        // SAFETY: RAM in the direct map that was kept out of the pool. `handover` has checked that no other module and
        // no part of the image has one of its pages; the pages below 1 MiB are nobody's.
        Some((command_line, unsafe { LoadedFile::new(*range) }))
    };
    handover.others().filter_map(loaded).collect()
}
