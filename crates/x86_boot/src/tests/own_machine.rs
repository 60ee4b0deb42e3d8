//! Kernels for the machine that the hypervisor runs on: its memory map has holes where the PC of a guest has RAM.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange};

use super::{MIB, PAYLOAD, Ram, boot, bzimage, pvh_elf};
use crate::bytes::put;
use crate::layout::{BOOT_AREA_BYTES, BOOT_GDT, BOOT_INFORMATION, BOOT_PAGE_TABLES, CMDLINE, MapEntry, MapKind};
use crate::{Boot, Efi, Error, KernelEntry, Mode, OwnMachine, Screen, check, has_console_on_screen, load};

/// RAM from the first to the second of these MiB.
fn ram(start: u64, end: u64) -> MapEntry {
    let range = GpaRange::new(Gpa(start * MIB), (end - start) * MIB).expect("start is before end");
    MapEntry { range, kind: MapKind::Ram }
}

const RSDP: Gpa = Gpa(0x1234_5670);

fn machine(memory_map: &[MapEntry], boot_area: u64) -> OwnMachine<'_> {
    OwnMachine { memory_map, boot_area: Gpa(boot_area * MIB), rsdp: RSDP, screen: None, efi: None }
}

/// A kernel that runs at any multiple of 2 MiB.
fn relocatable() -> Vec<u8> {
    let mut kernel = bzimage();
    put(&mut kernel, 0x230, &0x20_0000_u32.to_le_bytes());
    kernel[0x234] = 1;
    kernel
}

#[test]
fn kernel_moves_to_where_there_is_ram_and_boot_information_with_it() {
    // The preferred address, 16 MiB, is not RAM. The boot area is at 24 MiB.
    let map = [ram(0, 15), MapEntry { kind: MapKind::AcpiNvs, ..ram(15, 16) }, ram(19, 25), ram(30, 40)];
    let kernel = relocatable();
    let mut memory = Ram::new(64 * MIB);
    let boot = Boot { initrd: Some(&[7; 5000]), machine: Some(machine(&map, 24)), ..boot(&kernel) };
    let KernelEntry { mode, kernel: range, initrd } = load(&boot, &mut memory).expect("there is room");

    assert_eq!((range.start.0, range.bytes()), (20 * MIB, 2 * MIB));
    assert_eq!(memory.at(Gpa(20 * MIB), 7), PAYLOAD);
    let at = |on_pc: Gpa| Gpa(24 * MIB + on_pc.0);
    let Mode::Long64 { rip, rsi, cr3, gdt } = mode else { panic!("{mode:?}") };
    assert_eq!((rip.0, rsi, cr3), (20 * MIB + 0x200, at(BOOT_INFORMATION), at(BOOT_PAGE_TABLES)));
    assert_eq!(gdt.base, at(BOOT_GDT));
    assert_eq!(memory.u64(cr3.0), (cr3.0 + 4096) | 3);
    assert_eq!(memory.u64(cr3.0 + 4096), (cr3.0 + 2 * 4096) | 3);

    let initrd = initrd.expect("there is one");
    assert_eq!(initrd.end().0.next_multiple_of(4096), 40 * MIB, "as high as possible");
    assert_eq!(u64::from(memory.u32(rsi.0 + 0x218)), initrd.start.0);
    assert_eq!(u64::from(memory.u32(rsi.0 + 0x228)), at(CMDLINE).0);
    assert_eq!(memory.at(at(CMDLINE), 7), b"console");
    assert_eq!(memory.u64(rsi.0 + 0x70), RSDP.0);
    assert_eq!(memory.at(Gpa(rsi.0 + 0x1e8), 1), [4]);
    let second = rsi.0 + 0x2d0 + 20;
    assert_eq!((memory.u64(second), memory.u64(second + 8), memory.u32(second + 16)), (15 * MIB, MIB, 4));

    let low = memory.at(Gpa(0), usize::try_from(BOOT_AREA_BYTES).expect("is small"));
    assert!(low.iter().all(|byte| *byte == 0), "nothing is written where the PC has it");
    assert!(memory.at(Gpa(0xe_0000), 0x2_0000).iter().all(|byte| *byte == 0), "neither tables nor a stub");
}

#[test]
fn kernel_and_initrd_keep_out_of_the_boot_area_and_of_each_other() {
    let kernel = relocatable();
    for (map, area) in [([ram(0, 24)], 16), ([ram(0, 24)], 18), ([ram(0, 24)], 22), ([ram(8, 23)], 20)] {
        let boot = Boot { initrd: Some(&[7; 1 << 20]), machine: Some(machine(&map, area)), ..boot(&kernel) };
        let entry = load(&boot, &mut Ram::new(64 * MIB)).expect("there is room");
        let area = GpaRange::new(Gpa(area * MIB), BOOT_AREA_BYTES).expect("is a range");
        let initrd = entry.initrd.expect("there is one");
        assert!(!entry.kernel.overlaps(&area) && !initrd.overlaps(&area) && !initrd.overlaps(&entry.kernel));
        assert!(entry.kernel.start.0 >= 16 * MIB && entry.kernel.start.0.is_multiple_of(2 * MIB));
    }
}

#[test]
fn what_finds_no_room_is_refused_with_the_figures() {
    let checked = |kernel: &[u8], map: &[MapEntry], initrd: &'static [u8]| {
        check(&Boot { initrd: Some(initrd), machine: Some(machine(map, 1)), ..boot(kernel) }).map(|_| ())
    };
    assert_eq!(
        checked(&relocatable(), &[ram(0, 17)], &[]),
        Err(Error::NoRoom { needs: 2 * MIB, has: 17 * MIB - MIB - BOOT_AREA_BYTES })
    );
    // Without the right to move it, its own address must be RAM.
    assert_eq!(checked(&bzimage(), &[ram(18, 30)], &[]), Err(Error::NoRoom { needs: 2 * MIB, has: 12 * MIB }));
    assert_eq!(checked(&bzimage(), &[ram(10, 18)], &[]), Ok(()));
    assert_eq!(checked(&pvh_elf(), &[ram(0, 64)], &[]), Err(Error::NotRelocatable));
    assert_eq!(
        checked(&relocatable(), &[ram(16, 18)], &[1; 4096]),
        Err(Error::InitrdTooLarge { bytes: 4096, room: 2 * MIB })
    );
    assert!(checked(&relocatable(), &[], &[]).is_err());
}

#[test]
fn damaged_alignments_neither_panic_nor_move_a_kernel() {
    for alignment in [0_u32, 3, 0x30_0000, u32::MAX, 1 << 31] {
        let mut kernel = relocatable();
        put(&mut kernel, 0x230, &alignment.to_le_bytes());
        let map = [ram(17, 60)];
        let boot = Boot { machine: Some(machine(&map, 40)), ..boot(&kernel) };
        assert!(check(&boot).is_err(), "{alignment:#x}");
    }
}

/// The first bytes of the zero page of a kernel that gets this screen.
fn screen_info(screen: Option<Screen>) -> Vec<u8> {
    let (kernel, map) = (relocatable(), [ram(0, 24)]);
    let machine = OwnMachine { screen, ..machine(&map, 16) };
    let mut memory = Ram::new(64 * MIB);
    load(&Boot { machine: Some(machine), ..boot(&kernel) }, &mut memory).expect("there is room");
    memory.at(Gpa(16 * MIB + BOOT_INFORMATION.0), 0x40).to_vec()
}

#[test]
fn kernel_learns_of_its_screen() {
    assert_eq!(screen_info(None), [0; 0x40]);
    let text = screen_info(Some(Screen::Text));
    assert_eq!((text[0x06], text[0x07], text[0x0e], text[0x0f], text[0x10]), (3, 80, 25, 1, 16));

    let start = Gpa(0x38_fd00_0000);
    let pixels = Screen::Pixels { start, width: 1024, height: 769, row_bytes: 4160, shifts: [16, 8, 0] };
    let info = screen_info(Some(pixels));
    let word = |at: usize| u16::from_le_bytes([info[at], info[at + 1]]);
    let long = |at: usize| u32::from(word(at + 2)) << 16 | u32::from(word(at));
    assert_eq!(info[0x0f], 0x23);
    assert_eq!([word(0x12), word(0x14), word(0x16), word(0x24)], [1024, 769, 32, 4160]);
    assert_eq!([long(0x18), long(0x3a)], [0xfd00_0000, 0x38]);
    assert_eq!(long(0x1c), 49, "units of 64 KiB, the last one in part");
    assert_eq!(info[0x26..0x2e], [8, 16, 8, 8, 8, 0, 8, 24]);
    assert_eq!(long(0x36), 2, "the address has 64 bits");
}

#[test]
fn kernel_learns_of_the_firmwares_services() {
    let (kernel, map) = (relocatable(), [ram(0, 24)]);
    let info = |efi: Option<Efi>| {
        let machine = OwnMachine { efi, ..machine(&map, 16) };
        let mut memory = Ram::new(64 * MIB);
        load(&Boot { machine: Some(machine), ..boot(&kernel) }, &mut memory).expect("there is room");
        [0, 1, 2, 3, 4, 5, 6, 7].map(|word| memory.u32(16 * MIB + BOOT_INFORMATION.0 + 0x1c0 + 4 * word))
    };
    assert_eq!(info(None), [0; 8]);
    let memory_map = GpaRange::new(Gpa(0x2_0000_3000), 80).expect("is a range");
    let efi = Efi { system_table: Gpa(0x7f00_1000), memory_map, descriptor_bytes: 40 };
    assert_eq!(info(Some(efi)), [0x3436_4c45, 0x7f00_1000, 40, 1, 0x3000, 80, 0, 2]);
}

#[test]
fn console_is_on_the_screen_if_the_kernel_is_told_so_or_nothing() {
    for cmdline in ["", "quiet", "console=tty0", "console=tty1 quiet", "console=tty0 console=ttyS0", "noconsole=ttyS0"]
    {
        assert!(has_console_on_screen(cmdline), "{cmdline}");
    }
    for cmdline in ["console=ttyS0", "quiet console=ttyS0,115200n8 x=console=tty0", "console=hvc0 console=tty"] {
        assert!(!has_console_on_screen(cmdline), "{cmdline}");
    }
}
