//! Tables as firmware writes them, and as it must not.

use std::string::ToString;
use std::vec::Vec;

use super::*;

/// A table with these blocks.
fn table(blocks: &[Vec<u8>]) -> Vec<u8> {
    let mut table = [&SIGNATURE[..], &[0; 44], &blocks.concat()].concat();
    seal(&mut table);
    table
}

/// Writes length and checksum.
fn seal(table: &mut [u8]) {
    let length = u32::try_from(table.len()).expect("tests make small tables");
    table[4..8].copy_from_slice(&length.to_le_bytes());
    table[9] = 0;
    table[9] = table.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte));
}

/// An IVHD of this type for the IOMMU 00:02.0 with registers at 0xfed8_0000.
fn ivhd(block_type: u8, entries: &[&[u8]]) -> Vec<u8> {
    ivhd_at(block_type, 0x10, 0xfed8_0000, entries)
}

fn ivhd_at(block_type: u8, device: u16, base: u64, entries: &[&[u8]]) -> Vec<u8> {
    let entries = entries.concat();
    let head = if block_type == 0x10 { at::ENTRIES } else { at::ENTRIES_NEWER };
    let length = u16::try_from(head + entries.len()).expect("tests make small blocks");
    let mut block = Vec::from([block_type, 0]);
    block.extend(length.to_le_bytes());
    block.extend(device.to_le_bytes());
    block.extend(0x40u16.to_le_bytes());
    block.extend(base.to_le_bytes());
    block.resize(head, 0);
    block.extend(entries);
    block
}

fn ivmd(block_type: u8, flags: u8, devices: [u16; 2], start: u64, length: u64) -> Vec<u8> {
    let mut block = Vec::from([block_type, flags, 32, 0]);
    devices.iter().for_each(|device| block.extend(device.to_le_bytes()));
    block.extend([0; 8]);
    block.extend(start.to_le_bytes());
    block.extend(length.to_le_bytes());
    block
}

fn functions(first: u16, last: u16) -> Scope {
    Scope::Functions { first: DeviceId(first), last: DeviceId(last), alias: None, settings: 0 }
}

const SELECT_20: &[u8] = &[2, 0x20, 0, 0];

#[test]
fn every_kind_of_entry_is_read() {
    let entries: &[&[u8]] = &[
        &[0, 0, 0, 0],
        &[1, 0, 0, 0xd7],
        SELECT_20,
        &[3, 0x00, 1, 0],
        &[4, 0xff, 2, 0],
        &[66, 0x28, 0, 0, 0, 0x30, 0, 0],
        &[67, 0x00, 3, 0, 0, 0x38, 0, 0],
        &[4, 0x0f, 3, 0],
        &[70, 0x40, 0, 0, 0, 0, 0, 0x80],
        &[71, 0x48, 0, 0, 0, 0, 0, 0x80],
        &[4, 0x4f, 0, 0],
        // Types that nobody knows, of 4, 8, 16 and 32 bytes.
        &[5; 4],
        &[77; 8],
        &[129; 16],
        &[200; 32],
        &[72, 0, 0, 0xd7, 0, 0xa0, 0, 1],
        &[72, 0, 0, 0, 3, 0xa1, 0, 2],
        &[240, 0xa5, 0, 0, b'A', b'M', b'D', b'I', 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, b'_', b'S'],
    ];
    let bytes = table(&[ivhd(0x40, entries)]);
    let unit = Ivrs::new(&bytes).expect("well formed").units().next().expect("one unit");
    assert_eq!((unit.device, unit.capability, unit.base), (DeviceId(0x10), 0x40, Hpa(0xfed8_0000)));
    let alias = |first, last, alias| Scope::Functions {
        first: DeviceId(first),
        last: DeviceId(last),
        alias: Some(DeviceId(alias)),
        settings: 0,
    };
    let special = |kind, handle, source, settings| Scope::Special { kind, handle, source: DeviceId(source), settings };
    assert_eq!(
        unit.scopes().collect::<Vec<_>>(),
        [
            Scope::All { settings: 0xd7 },
            functions(0x20, 0x20),
            functions(0x100, 0x2ff),
            alias(0x28, 0x28, 0x30),
            alias(0x300, 0x30f, 0x38),
            functions(0x40, 0x40),
            functions(0x48, 0x4f),
            special(Special::IoApic, 0, 0xa0, 0xd7),
            special(Special::Hpet, 3, 0xa1, 0),
            Scope::Named { source: DeviceId(0xa5), settings: 0 },
        ]
    );
}

#[test]
fn newest_known_block_of_an_iommu_counts() {
    let (old, new, newest) = (ivhd(0x10, &[]), ivhd(0x11, &[SELECT_20]), ivhd(0x40, &[SELECT_20, SELECT_20]));
    let other = ivhd_at(0x10, 0x18, 0xfed9_0000, &[SELECT_20]);
    let unknown = ivhd(0x41, &[&[4, 0, 0, 0]]);
    let found = |blocks: &[&Vec<u8>]| {
        let bytes = table(&blocks.iter().map(|block| (*block).clone()).collect::<Vec<_>>());
        let units = Ivrs::new(&bytes).expect("well formed").units().collect::<Vec<_>>();
        units.iter().map(|unit| (unit.block_type, unit.scopes().count())).collect::<Vec<_>>()
    };
    assert_eq!(found(&[&old]), [(0x10, 0)]);
    assert_eq!(found(&[&new, &old]), [(0x11, 1)]);
    assert_eq!(found(&[&old, &other, &newest, &new, &unknown]), [(0x10, 1), (0x40, 2)]);
}

#[test]
fn memory_for_devices_is_read() {
    let blocks = [
        ivmd(0x20, 0b0111, [0, 0], 0x1000, 0x1000),
        ivmd(0x21, 0b0011, [0x20, 0], 0x2000, 0x5000),
        ivmd(0x22, 0b1000, [0x20, 0x2f], 0x8000, 1),
        ivmd(0x21, 0b0110, [0x20, 0], 0x9000, 0x1000),
    ];
    let bytes = table(&blocks);
    let reserved =
        |devices, start, bytes, readable, writable| Reserved { devices, start: Hpa(start), bytes, readable, writable };
    assert_eq!(
        Ivrs::new(&bytes).expect("well formed").reserved().collect::<Vec<_>>(),
        [
            reserved(0..=u16::MAX, 0x1000, 0x1000, true, true),
            reserved(0x20..=0x20, 0x2000, 0x5000, true, false),
            reserved(0x20..=0x2f, 0x8000, 1, true, true),
            reserved(0x20..=0x20, 0x9000, 0x1000, false, false),
        ]
    );
}

#[test]
fn each_error_is_found_and_told_with_its_place() {
    let block = |entries: &[&[u8]]| Vec::from([ivhd(0x11, entries)]);
    let zero_length = Vec::from([0x10, 0, 0, 0]);
    let cases: [(Vec<Vec<u8>>, usize, &str); 17] = [
        (Vec::from([zero_length]), 48, "a block's length is wrong"),
        (Vec::from([Vec::from([0x10, 0])]), 48, "a block's length is wrong"),
        (Vec::from([Vec::from([0x10, 0, 200, 0, 0])]), 48, "a block's length is wrong"),
        (Vec::from([Vec::from([0x11, 0, 24, 0]), Vec::from([0; 20])]), 48, "an IVHD block is too short"),
        (Vec::from([ivhd_at(0x10, 0x10, 0, &[])]), 48, "an IOMMU's registers cannot be at this address"),
        (Vec::from([ivhd_at(0x10, 0x10, 0x1234, &[])]), 48, "an IOMMU's registers cannot be at this address"),
        (Vec::from([ivhd_at(0x10, 0x10, 1 << 52, &[])]), 48, "an IOMMU's registers cannot be at this address"),
        (
            Vec::from([ivhd(0x10, &[]), ivhd_at(0x11, 0x10, 0xfed9_0000, &[])]),
            48,
            "two blocks disagree on where an IOMMU's registers are",
        ),
        (Vec::from([ivhd(0x10, &[]), ivhd_at(0x10, 0x18, 0xfed8_0000, &[])]), 48, "two IOMMUs have the same registers"),
        (Vec::from([ivhd(0x10, &[]), ivhd(0x10, &[])]), 48, "two blocks describe the same IOMMU"),
        (block(&[SELECT_20, &[3, 0x28, 0, 0]]), 92, "a range of devices has no end"),
        (block(&[&[3, 0x28, 0, 0], SELECT_20]), 88, "a range of devices has no end"),
        (block(&[&[3, 0x28, 0, 0], &[4, 0x27, 0, 0]]), 88, "a range of devices runs backwards"),
        (block(&[&[4, 0x27, 0, 0]]), 88, "a range of devices has no start"),
        (block(&[&[72, 0, 0, 0]]), 88, "an entry leaves its block"),
        (block(&[&[240, 0, 0, 0]]), 88, "an entry leaves its block"),
        (block(&[&[241; 64]]), 88, "an entry has a type of unknown length"),
    ];
    for (blocks, offset, what) in cases {
        assert_eq!(Ivrs::new(&table(&blocks)).map(|_| ()), Err(Malformed { offset, what }));
    }
    for (memory, what) in [
        (ivmd(0x22, 7, [0x20, 0x1f], 0, 1), "a range of devices runs backwards"),
        (ivmd(0x20, 7, [0, 0], 0x1000, 0), "reserved memory is empty, or has no end"),
        (ivmd(0x20, 7, [0, 0], u64::MAX, 2), "reserved memory is empty, or has no end"),
    ] {
        assert_eq!(Ivrs::new(&table(&[memory])).map(|_| ()), Err(Malformed { offset: 48, what }));
    }
    let told = Malformed { offset: 88, what: "an entry leaves its block" }.to_string();
    assert_eq!(told, "IVRS, byte 0x58: an entry leaves its block");
}

#[test]
fn damaged_table_is_refused() {
    let good = table(&[ivhd(0x10, &[SELECT_20])]);
    assert!(Ivrs::new(&good).is_ok());
    assert!(Ivrs::new(&[&good[..], &[1, 2, 3]].concat()).is_ok(), "the length counts");
    for length in 0..good.len() {
        assert!(Ivrs::new(&good[..length]).is_err(), "{length} bytes of it");
    }
    for at in 0..good.len() {
        let mut damaged = good.clone();
        damaged[at] ^= 0x10;
        assert!(Ivrs::new(&damaged).is_err(), "byte {at}");
    }
}

/// Reads all that a table offers. Each iterator must end after few items.
fn read_all(bytes: &[u8]) -> Result<usize, Malformed> {
    let ivrs = Ivrs::new(bytes)?;
    let mut items = ivrs.reserved().inspect(|reserved| assert!(reserved.bytes > 0)).count();
    for unit in ivrs.units() {
        items += 1 + unit.scopes().count();
        for scope in unit.scopes() {
            assert!(!matches!(scope, Scope::Functions { first, last, .. } if last < first));
        }
    }
    assert!(items <= bytes.len() / 4, "no item without bytes of its own");
    Ok(items)
}

#[test]
fn no_table_of_random_changes_is_read_past_its_end_or_for_ever() {
    let entries: &[&[u8]] = &[
        &[3, 0x00, 1, 0],
        &[4, 0xff, 2, 0],
        &[66, 0x28, 0, 0, 0, 0x30, 0, 0],
        &[72, 0, 0, 0xd7, 0, 0xa0, 0, 1],
        &[240, 0xa5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0],
    ];
    let good = table(&[ivhd(0x10, entries), ivmd(0x22, 7, [0, 9], 0x1000, 0x1000), ivhd(0x40, entries)]);
    assert_eq!(read_all(&good), Ok(6));
    let mut random = fastrand::Rng::with_seed(4);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..200_000 {
        let mut table = good.clone();
        for _ in 0..random.usize(1..8) {
            let at = random.usize(..table.len());
            table[at] = if random.bool() { random.u8(..) } else { [0, 1, 4, 0x10, 0x11, 0xff][random.usize(..6)] };
        }
        table.truncate(random.usize(at::BLOCKS..=good.len()).max(random.usize(..=good.len())));
        if table.starts_with(SIGNATURE) && table.len() > 9 {
            seal(&mut table);
        }
        match read_all(&table) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read > 1000 && refused > 1000, "{read} tables were read, {refused} refused");
}
