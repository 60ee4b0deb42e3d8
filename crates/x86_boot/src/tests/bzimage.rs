//! Loads a bzImage into the guest, and tries all refusals.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use abi::payload::{ApicMode, MAX_VCPUS};
use addr::{Gpa, GpaRange};

use super::{MIB, PAYLOAD, Ram, boot, bzimage};
use crate::bytes::put;
use crate::{Boot, DescriptorTable, Error, Format, Mode, check, load, probe};

/// The same kernel, built for 32-bit processors.
fn bzimage_of_32_bits() -> Vec<u8> {
    let mut kernel = bzimage();
    put(&mut kernel, 0x236, &0x7e_u16.to_le_bytes());
    kernel
}

#[test]
fn probe_reads_version_and_needs() {
    let info = probe(&bzimage()).expect("a good kernel");
    assert_eq!(info.format, Format::BzImage);
    assert_eq!(info.version.as_deref(), Some("6.1.0-test (somebody@somewhere) #1 SMP"));
    assert_eq!(info.memory_bytes, 18 * MIB);
    assert_eq!(info.cmdline_limit, 2047);
}

#[test]
fn version_outside_the_setup_code_is_none() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x20e, &0x900_u16.to_le_bytes());
    assert_eq!(probe(&kernel).map(|info| info.version), Ok(None));
}

#[test]
fn kernel_is_loaded_at_its_preferred_address_and_entered_in_long_mode() {
    let kernel = bzimage();
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&boot(&kernel), &mut ram).expect("it fits");

    assert_eq!(
        entry.mode,
        Mode::Long64 {
            rip: Gpa(0x100_0200),
            rsi: Gpa(0x8000),
            cr3: Gpa(0x2000),
            gdt: DescriptorTable { base: Gpa(0x1000), limit: 47 }
        }
    );
    assert_eq!(Some(entry.kernel), GpaRange::new(Gpa(16 * MIB), 2 * MIB));
    assert_eq!(ram.at(Gpa(16 * MIB), 1024), &kernel[1024..]);
    assert!(ram.at(Gpa(16 * MIB), 7) == PAYLOAD);
}

#[test]
fn zero_page_tells_command_line_memory_and_tables() {
    let kernel = bzimage();
    let mut ram = Ram::new(64 * MIB);
    load(&boot(&kernel), &mut ram).expect("it fits");

    assert_eq!(ram.at(Gpa(0x8202), 4), b"HdrS");
    assert_eq!(ram.at(Gpa(0x8210), 2), [0xff, 1]);
    assert_eq!(ram.u32(0x8228), 0x1_0000);
    assert_eq!(ram.at(Gpa(0x1_0000), 20), b"console=ttyS0 quiet\0");
    assert_eq!(ram.u64(0x8070), 0xe_0000);
    assert_eq!(ram.at(Gpa(0xe_0000), 8), b"RSD PTR ");
    assert_eq!((ram.u32(0x8218), ram.u32(0x821c)), (0, 0), "no initrd");

    assert_eq!(ram.at(Gpa(0x81e8), 1), [4]);
    let e820 = |n: u64| (ram.u64(0x82d0 + 20 * n), ram.u64(0x82d8 + 20 * n), ram.u32(0x82e0 + 20 * n));
    assert_eq!([e820(0), e820(1), e820(2)], [(0, 0x9_fc00, 1), (0xe_0000, 0x2_0000, 2), (MIB, 63 * MIB, 1)]);
    assert_eq!(e820(3), (0xe000_0000, 0x10_0000, 2), "PCI's configuration spaces");

    // The header does not reach into the fields after it, and only intended fields before it are set.
    assert!(ram.at(Gpa(0x826c), 0x64).iter().all(|byte| *byte == 0));
    assert!(ram.at(Gpa(0x8000), 0x70).iter().all(|byte| *byte == 0));
}

#[test]
fn header_that_claims_to_be_longer_does_not_overwrite_its_neighbours() {
    let mut kernel = bzimage();
    kernel[0x201] = 0xff;
    kernel[0x290..0x301].fill(0xee);
    let mut ram = Ram::new(64 * MIB);
    load(&boot(&kernel), &mut ram).expect("it fits");
    assert!(ram.at(Gpa(0x8290), 0x40).iter().all(|byte| *byte == 0));
}

#[test]
fn boot_page_tables_map_4_gib_to_themselves() {
    let kernel = bzimage();
    let mut ram = Ram::new(64 * MIB);
    load(&boot(&kernel), &mut ram).expect("it fits");

    for address in [0, 0x8000, 16 * MIB + 0x200, 0x7fff_ffff, 0xfec0_0010, 0xfee0_0030, 0xffff_ffff_u64] {
        let mut table = 0x2000;
        for shift in [39, 30] {
            let entry = ram.u64(table + (address >> shift & 511) * 8);
            assert_eq!(entry & 0xfff, 0b11);
            table = entry & !0xfff;
        }
        let leaf = ram.u64(table + (address >> 21 & 511) * 8);
        assert_eq!(leaf, (address & !0x1f_ffff) | 0x83);
    }
    assert_eq!(ram.u64(0x2000 + 8), 0, "nothing beyond");
    assert_eq!(ram.u64(0x1010), 0x00af_9b00_0000_ffff);
    assert_eq!(ram.u64(0x1018), 0x00cf_9300_0000_ffff);
}

#[test]
fn reset_vector_writes_the_reset_register() {
    let kernel = bzimage();
    let mut ram = Ram::new(64 * MIB);
    load(&boot(&kernel), &mut ram).expect("it fits");
    assert_eq!(ram.at(Gpa(0xf_fff0), 9), [0xba, 0xf9, 0x0c, 0xb0, 6, 0xee, 0xf4, 0xeb, 0xfd]);
}

#[test]
fn initrd_goes_as_high_as_it_fits_on_a_page_of_its_own() {
    let kernel = bzimage();
    let initrd = vec![0xa5; 10_000];
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&Boot { initrd: Some(&initrd), ..boot(&kernel) }, &mut ram).expect("it fits");

    let start = 64 * MIB - 3 * 4096;
    assert_eq!(entry.initrd, GpaRange::new(Gpa(start), 10_000));
    assert_eq!(ram.at(Gpa(start), 10_000), initrd);
    assert_eq!((u64::from(ram.u32(0x8218)), ram.u32(0x821c)), (start, 10_000));
}

#[test]
fn initrd_respects_the_limit_of_the_kernel() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x22c, &0x1ff_ffff_u32.to_le_bytes());
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&Boot { initrd: Some(&[1; 4096]), ..boot(&kernel) }, &mut ram).expect("it fits");
    assert_eq!(entry.initrd.map(|range| range.end().0), Some(32 * MIB));
}

#[test]
fn initrd_in_a_large_guest_stays_below_the_hole() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x22c, &u32::MAX.to_le_bytes());
    let boot = Boot { initrd: Some(&[1; 4096]), memory_bytes: 8 << 30, ..boot(&kernel) };
    let placement =
        crate::placement::Placement::of(&boot).map(|placement| placement.initrd.map(|(range, _)| range.end()));
    assert_eq!(placement, Ok(Some(Gpa(3 << 30))));
}

#[test]
fn initrd_may_fill_all_that_the_kernel_leaves_and_no_byte_more() {
    let kernel = bzimage();
    let room = 2 * 1024 * 1024;
    let initrd = vec![0; room + 1];
    let guest = Boot { memory_bytes: 20 * MIB, ..boot(&kernel) };
    assert!(check(&Boot { initrd: Some(&initrd[..room]), ..guest }).is_ok());
    assert_eq!(
        check(&Boot { initrd: Some(&initrd), ..guest }),
        Err(Error::InitrdTooLarge { bytes: room as u64 + 1, room: room as u64 })
    );
}

#[test]
fn empty_initrd_is_none() {
    let kernel = bzimage();
    let entry = load(&Boot { initrd: Some(&[]), ..boot(&kernel) }, &mut Ram::new(64 * MIB)).expect("it fits");
    assert_eq!(entry.initrd, None);
}

#[test]
fn guest_with_less_memory_than_the_kernel_unpacks_to_is_refused() {
    let kernel = bzimage();
    assert!(check(&Boot { memory_bytes: 18 * MIB, ..boot(&kernel) }).is_ok());
    for has in [0, MIB, 18 * MIB - 1] {
        let error = Error::MemoryTooSmall { needs: 18 * MIB, has };
        assert_eq!(check(&Boot { memory_bytes: has, ..boot(&kernel) }), Err(error));
    }
    assert_eq!(
        Error::MemoryTooSmall { needs: 18 * MIB, has: 16 * MIB }.to_string(),
        "this kernel needs at least 18 MiB of guest memory, the guest has 16 MiB"
    );
}

#[test]
fn command_line_is_limited_by_the_kernel() {
    let kernel = bzimage();
    let cmdline = "x".repeat(2048);
    assert!(check(&Boot { cmdline: &cmdline[..2047], ..boot(&kernel) }).is_ok());
    assert_eq!(
        check(&Boot { cmdline: &cmdline, ..boot(&kernel) }),
        Err(Error::CmdlineTooLong { bytes: 2048, limit: 2047 })
    );
    assert_eq!(check(&Boot { cmdline: "a\0b", ..boot(&kernel) }), Err(Error::CmdlineHasNul { at: 1 }));
}

#[test]
fn kernel_with_an_endless_command_line_is_held_to_our_room() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x238, &u32::MAX.to_le_bytes());
    assert_eq!(probe(&kernel).map(|info| info.cmdline_limit), Ok(0xffff));
}

#[test]
fn number_of_vcpus_is_limited_by_the_apic() {
    let kernel = bzimage();
    let with = |vcpus, apic| check(&Boot { vcpus, apic, ..boot(&kernel) }).map(|_| ());
    assert_eq!(with(0, ApicMode::X2Apic), Err(Error::Vcpus { vcpus: 0, limit: MAX_VCPUS }));
    assert_eq!(with(MAX_VCPUS, ApicMode::X2Apic), Ok(()));
    assert_eq!(with(MAX_VCPUS + 1, ApicMode::X2Apic), Err(Error::Vcpus { vcpus: MAX_VCPUS + 1, limit: MAX_VCPUS }));
    assert_eq!(with(255, ApicMode::XApic), Ok(()));
    assert_eq!(with(256, ApicMode::XApic), Err(Error::Vcpus { vcpus: 256, limit: 255 }));
}

#[test]
fn files_that_are_not_kernels_are_named_by_their_first_bytes() {
    assert_eq!(probe(b""), Err(Error::NotAKernel { first: [0; 4], bytes: 0 }));
    assert_eq!(probe(&[0x1f, 0x8b]), Err(Error::NotAKernel { first: [0x1f, 0x8b, 0, 0], bytes: 2 }));
    let message: String = probe(b"#!/bin/sh\n").expect_err("a script").to_string();
    assert_eq!(
        message,
        "not a kernel: 10 bytes that start with 23 21 2f 62; expected a Linux bzImage or an ELF with a PVH note"
    );
}

#[test]
fn truncated_kernels_are_refused_at_every_length() {
    for kernel in [bzimage(), bzimage_of_32_bits()] {
        for length in 0x206..=kernel.len() - 16 {
            match probe(&kernel[..length]) {
                Err(Error::Truncated { needs, has }) => assert!(has == length as u64 && needs > has),
                other => panic!("{length}: {other:?}"),
            }
        }
    }
    assert_eq!(
        probe(&bzimage()[..2032]).expect_err("a paragraph is missing").to_string(),
        "the kernel is truncated: its headers speak of 2048 bytes, the file has 2032"
    );
}

#[test]
fn kernels_that_end_within_their_last_paragraph_are_loaded_as_far_as_they_go() {
    for kernel in [bzimage(), bzimage_of_32_bits()] {
        for missing in 1..16 {
            let short = &kernel[..kernel.len() - missing];
            let mut ram = Ram::new(64 * MIB);
            let entry = load(&boot(short), &mut ram).expect("the last paragraph is there, in part");
            let start = entry.kernel.start;
            assert_eq!(ram.at(start, 1024 - missing), &short[1024..], "{missing}");
            assert!(ram.at(Gpa(start.0 + 1024 - missing as u64), missing).iter().all(|byte| *byte == 0), "{missing}");
        }
    }
}

#[test]
fn kernels_that_end_before_their_entry_are_refused_whatever_syssize_says() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x1f4, &0_u32.to_le_bytes());
    assert_eq!(probe(&kernel[..1024 + 0x200]), Err(Error::Truncated { needs: 1024 + 0x201, has: 1024 + 0x200 }));
    assert!(probe(&kernel[..1024 + 0x201]).is_ok());

    let mut kernel = bzimage_of_32_bits();
    put(&mut kernel, 0x1f4, &0_u32.to_le_bytes());
    assert_eq!(probe(&kernel[..1024]), Err(Error::Truncated { needs: 1025, has: 1024 }));
    assert!(probe(&kernel[..1025]).is_ok());
}

#[test]
fn kernel_without_a_64_bit_entry_is_entered_in_protected_mode_at_its_first_byte() {
    let kernel = bzimage_of_32_bits();
    let mut ram = Ram::new(64 * MIB);
    let entry = load(&boot(&kernel), &mut ram).expect("it fits");

    let gdt = DescriptorTable { base: Gpa(0x1000), limit: 47 };
    assert_eq!(entry.mode, Mode::Protected32 { eip: 0x100_0000, ebx: 0, esi: 0x8000, gdt });
    // Selectors 0x10 and 0x18: code and data of 32 bits over all addresses.
    assert_eq!([ram.u64(0x1010), ram.u64(0x1018)], [0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);
    // It gets the same information as a 64-bit kernel.
    assert_eq!((ram.u32(0x8228), ram.u64(0x8070)), (0x1_0000, 0xe_0000));
    assert_eq!(ram.at(Gpa(0x1_0000), 20), b"console=ttyS0 quiet\0");
}

#[test]
fn kernels_that_cannot_be_entered_as_the_protocol_says_are_refused() {
    let with = |offset: usize, bytes: &[u8]| {
        let mut kernel = bzimage();
        put(&mut kernel, offset, bytes);
        probe(&kernel).map(|_| ())
    };
    assert_eq!(with(0x206, &[0x0b, 2]), Err(Error::ProtocolTooOld { version: 0x020b }));
    assert_eq!(with(0x211, &[0]), Err(Error::LoadedLow));
    assert_eq!(
        Error::ProtocolTooOld { version: 0x0209 }.to_string(),
        "the kernel speaks boot protocol 2.09, at least 2.12 (Linux 3.8) is needed"
    );
}

#[test]
fn kernels_that_want_impossible_addresses_are_refused() {
    for start in [0, MIB - 4096, 3 << 30, (3 << 30) - 4096, u64::MAX, u64::MAX - 0x20_0000] {
        let mut kernel = bzimage();
        put(&mut kernel, 0x258, &start.to_le_bytes());
        let error = probe(&kernel).expect_err("no RAM there");
        assert_eq!(error, Error::LoadAddress { start, bytes: 2 * MIB });
        assert!(format!("{error}").contains(&format!("{start:#x}")));
    }
}

#[test]
fn kernel_with_more_payload_than_init_size_gets_room_for_the_payload() {
    let mut kernel = bzimage();
    put(&mut kernel, 0x260, &0_u32.to_le_bytes());
    assert_eq!(probe(&kernel).map(|info| info.memory_bytes), Ok(16 * MIB + 1024));
}

#[test]
fn memory_smaller_than_promised_is_an_error_and_no_more() {
    let kernel = bzimage();
    let error = load(&boot(&kernel), &mut Ram::new(8 * MIB)).expect_err("the kernel lies outside");
    assert!(matches!(error, Error::Memory(outside) if outside.gpa == Gpa(16 * MIB)));
}
