//! Loads a PVH ELF into the guest, and tries all refusals.

use alloc::vec;

use addr::{Gpa, GpaRange};

use super::{MIB, Ram, boot, pvh_elf};
use crate::bytes::put;
use crate::{Boot, DescriptorTable, Error, Format, Mode, check, load, probe};

/// Offsets in `pvh_elf`.
const SEGMENT_0: usize = 64;
const SEGMENT_1: usize = 64 + 56;
const NOTE: usize = 0x150;
const P_OFFSET: usize = 8;
const P_PADDR: usize = 24;
const P_FILESZ: usize = 32;
const P_MEMSZ: usize = 40;

fn with(offset: usize, bytes: &[u8]) -> Result<(), Error> {
    let mut kernel = pvh_elf();
    put(&mut kernel, offset, bytes);
    probe(&kernel).map(|_| ())
}

#[test]
fn segments_go_to_their_physical_addresses_and_the_note_names_the_entry() {
    let kernel = pvh_elf();
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&boot(&kernel), &mut ram).expect("it fits");

    let gdt = DescriptorTable { base: Gpa(0x1000), limit: 47 };
    assert_eq!(entry.mode, Mode::Protected32 { eip: 0x10_0004, ebx: 0x8000, esi: 0, gdt });
    assert_eq!(Some(entry.kernel), GpaRange::new(Gpa(MIB), MIB + 16));
    assert_eq!(ram.at(Gpa(MIB), 16), b"first segment...");
    assert_eq!(ram.at(Gpa(2 * MIB), 16), b"second segment..");
}

#[test]
fn start_information_tells_command_line_memory_tables_and_initrd() {
    let kernel = pvh_elf();
    let initrd = vec![7; 5000];
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&Boot { initrd: Some(&initrd), ..boot(&kernel) }, &mut ram).expect("it fits");

    assert_eq!([ram.u32(0x8000), ram.u32(0x8004), ram.u32(0x8008)], [0x336e_c578, 1, 0]);
    assert_eq!(ram.u64(0x8018), 0x1_0000);
    assert_eq!(ram.u64(0x8020), 0xe_0000);

    assert_eq!((ram.u32(0x800c), ram.u64(0x8010)), (1, 0x8040));
    let start = 64 * MIB - 2 * 4096;
    assert_eq!(entry.initrd, GpaRange::new(Gpa(start), 5000));
    assert_eq!((ram.u64(0x8040), ram.u64(0x8048)), (start, 5000));
    assert_eq!(ram.at(Gpa(start), 5000), initrd);

    let map = ram.u64(0x8028);
    assert_eq!(ram.u32(0x8030), 4);
    let entry = |n: u64| (ram.u64(map + 24 * n), ram.u64(map + 24 * n + 8), ram.u32(map + 24 * n + 16));
    assert_eq!([entry(0), entry(1), entry(2)], [(0, 0x9_fc00, 1), (0xe_0000, 0x2_0000, 2), (MIB, 63 * MIB, 1)]);
    assert_eq!(entry(3), (0xe000_0000, 0x10_0000, 2), "PCI's configuration spaces");
}

#[test]
fn probe_reads_what_an_elf_needs() {
    let info = probe(&pvh_elf()).expect("a good kernel");
    assert_eq!((info.format, info.version), (Format::PvhElf, None));
    assert_eq!((info.memory_bytes, info.cmdline_limit), (2 * MIB + 16, 2047));
    assert_eq!(
        check(&Boot { memory_bytes: 2 * MIB, ..boot(&pvh_elf()) }),
        Err(Error::MemoryTooSmall { needs: 2 * MIB + 16, has: 2 * MIB })
    );
}

#[test]
fn initrd_does_not_overlap_the_zeroed_tail_of_a_segment() {
    let mut kernel = pvh_elf();
    put(&mut kernel, SEGMENT_1 + P_MEMSZ, &(60 * MIB).to_le_bytes());
    let initrd = vec![0; 3 << 20];
    assert_eq!(
        check(&Boot { initrd: Some(&initrd), ..boot(&kernel) }),
        Err(Error::InitrdTooLarge { bytes: 3 * MIB, room: 2 * MIB })
    );
}

#[test]
fn elf_without_the_note_is_refused() {
    assert_eq!(with(NOTE + 8, &17_u32.to_le_bytes()), Err(Error::NoPvhNote), "another type");
    assert_eq!(with(NOTE + 12, b"Xem\0"), Err(Error::NoPvhNote), "another owner");
    assert_eq!(with(NOTE + 4, &2_u32.to_le_bytes()), Err(Error::NoPvhNote), "too short for an address");
    assert_eq!(with(NOTE, &u32::MAX.to_le_bytes()), Err(Error::NoPvhNote), "longer than the file");
}

#[test]
fn entry_must_lie_in_a_segment() {
    let entry = 0x30_0000;
    assert_eq!(with(NOTE + 16, &0x30_0000_u32.to_le_bytes()), Err(Error::EntryOutside { entry }));
}

#[test]
fn segments_must_lie_between_the_tables_and_the_hole() {
    let segment_at = |start: u64| with(SEGMENT_1 + P_PADDR, &start.to_le_bytes());
    let low = |start| Err(Error::SegmentTooLow { start, bytes: 16 });
    let outside = |start| Err(Error::SegmentOutside { start, bytes: 16 });
    assert_eq!(segment_at(0), low(0));
    assert_eq!(segment_at(MIB - 1), low(MIB - 1));
    assert_eq!(segment_at((3 << 30) - 16), Ok(()));
    assert_eq!(segment_at((3 << 30) - 15), outside((3 << 30) - 15));
    assert_eq!(segment_at(u64::MAX), outside(u64::MAX));
}

#[test]
fn truncated_segments_are_refused_with_figures() {
    let needs = 0x1_0000_0010;
    assert_eq!(
        with(SEGMENT_0 + P_OFFSET, &0x1_0000_0000_u64.to_le_bytes()),
        Err(Error::Truncated { needs, has: 0x200 })
    );
    let needs = u64::MAX;
    assert_eq!(with(SEGMENT_0 + P_OFFSET, &u64::MAX.to_le_bytes()), Err(Error::Truncated { needs, has: 0x200 }));
    assert_eq!(with(SEGMENT_0 + P_FILESZ, &0x81_u64.to_le_bytes()), Err(Error::Truncated { needs: 0x201, has: 0x200 }));
    assert_eq!(probe(&pvh_elf()[..100]), Err(Error::Truncated { needs: 64 + 3 * 56, has: 100 }));
}

#[test]
fn elf_files_for_other_machines_are_refused() {
    assert!(matches!(with(18, &183_u16.to_le_bytes()), Err(Error::BadElf(_))), "AArch64");
    assert!(matches!(with(5, &[2]), Err(Error::BadElf(_))), "big-endian");
    assert!(matches!(with(4, &[9]), Err(Error::BadElf(_))), "no such class");
    assert!(matches!(with(32, &[0]), Err(Error::BadElf(_))), "no program headers");
    assert!(matches!(with(SEGMENT_0 + P_MEMSZ, &8_u64.to_le_bytes()), Err(Error::BadElf(_))), "cut in memory");
}
