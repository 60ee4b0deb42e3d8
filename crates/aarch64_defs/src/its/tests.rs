use super::{Baser, Command, FIRST_LPI, Hpa, Table, Target, Typer, cbaser, pendbaser, propbaser, reaches};

#[test]
fn commands_have_their_fields_where_the_manual_has_them() {
    // IHI 0069, 5.3.10 (MAPD), 5.3.9 (MAPC), 5.3.12 (MAPTI), 5.3.15 (MOVI), 5.3.17 (SYNC).
    let device = Command::MapDevice { device: 0x1234, table: Hpa(0x1_4567_8900), event_bits: 8 };
    assert_eq!(device.words(), [0x1234_0000_0008, 7, 0x8000_0001_4567_8900, 0]);
    let number = Target::Number(5);
    let collection = Command::MapCollection { collection: 3, target: number };
    assert_eq!(collection.words(), [9, 0, 0x8000_0000_0005_0003, 0]);
    let address = Target::Address(Hpa(0x80c_0000));
    assert_eq!(Command::Sync { target: address }.words(), [5, 0, 0x80c_0000, 0]);
    let event = Command::MapEvent { device: 8, event: 96, lpi: FIRST_LPI + 96, collection: 1 };
    assert_eq!(event.words(), [0x8_0000_000a, 0x2060_0000_0060, 1, 0]);
    let moved = Command::MoveEvent { device: 8, event: 96, collection: 2 };
    assert_eq!(moved.words(), [0x8_0000_0001, 0x60, 2, 0]);
    assert_eq!(event.bytes()[..12], [0x0a, 0, 0, 0, 8, 0, 0, 0, 0x60, 0, 0, 0]);
}

#[test]
fn no_field_of_a_command_spills_into_another() {
    let all = u32::MAX;
    let table = Hpa(u64::MAX);
    assert_eq!(
        Command::MapDevice { device: all, table, event_bits: 32 }.words(),
        [0xffff_ffff_0000_0008, 0x1f, 0x800f_ffff_ffff_ff00, 0]
    );
    let target = Target::Address(Hpa(u64::MAX));
    assert_eq!(Command::MapCollection { collection: u16::MAX, target }.words(), [9, 0, 0x800f_ffff_ffff_ffff, 0]);
}

#[test]
fn tables_are_described_with_what_hardware_says_of_them() {
    // QEMU's: devices, 8 bytes each; collections, 8 bytes each.
    let [devices, collections] = [Baser(1 << 56 | 7 << 48), Baser(4 << 56 | 7 << 48)];
    assert_eq!((devices.table(), devices.entry_bytes()), (Table::Devices, 8));
    assert_eq!(
        (collections.table(), Baser(0).table(), Baser(2 << 56).table()),
        (Table::Collections, Table::Other, Table::Other)
    );
    for page_bytes in [0x1000, 0x4000, 0x1_0000] {
        let given = devices.with(Hpa(0x4_1234_0000), 8, page_bytes);
        assert_eq!(given.page_bytes(), page_bytes);
        assert_eq!(given.0 & 0xff, 7, "pages, less one");
        assert_eq!(given.0 & 0xffff_ffff_f000, 0x4_1234_0000);
        assert_eq!((given.table(), given.entry_bytes(), given.0 >> 63), (Table::Devices, 8, 1));
        assert_eq!(given.0 >> 10 & 3, 1, "inner shareable");
    }
}

#[test]
fn what_an_its_can_do_is_read_from_its_register() {
    // QEMU 7.2: 16 bits of devices, 16 of events, 12 bytes for each.
    let typer = Typer(1 | 0xb << 4 | 15 << 8 | 15 << 13 | 1 << 19);
    assert_eq!((typer.event_bits(), typer.device_bits(), typer.entry_bytes()), (16, 16, 12));
    assert!(typer.names_by_address() && !Typer(0).names_by_address());
}

#[test]
fn registers_of_queue_and_redistributor_have_the_address_and_the_size() {
    assert_eq!(cbaser(Hpa(0x4123_0000), 0x1_0000), 1 << 63 | 7 << 59 | 7 << 53 | 0x4123_0000 | 1 << 10 | 0xf);
    assert_eq!(propbaser(Hpa(0x4123_0000), 14), 7 << 56 | 0x4123_0000 | 1 << 10 | 7 << 7 | 13);
    assert_eq!(pendbaser(Hpa(0x4123_0000)), 1 << 62 | 7 << 56 | 0x4123_0000 | 1 << 10 | 7 << 7);
    assert!(reaches(Hpa(1 << 48)) && !reaches(Hpa(1 << 48 | 1)));
}
