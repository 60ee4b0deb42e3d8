//! Linux' writes that power a machine off or reset it; other writes do neither.

use alloc::vec::Vec;

use super::{PORTS, PowerEvent, read, write};

#[test]
fn sleep_enable_with_the_type_of_s5_powers_off() {
    // Linux' writes for `\_S5` of 5: the type in bits 4:2, then the enable bit with it.
    assert_eq!(write(0x600, 5 << 2), None);
    assert_eq!(write(0x600, 5 << 2 | 0x20), Some(PowerEvent::PowerOff));
    for sleep_type in (0..8).filter(|sleep_type| *sleep_type != 5) {
        assert_eq!(write(0x600, sleep_type << 2 | 0x20), None);
    }
}

#[test]
fn clearing_the_wake_status_does_nothing() {
    assert_eq!(write(0x601, 0x80), None);
}

#[test]
fn reset_register_resets_by_bit_2() {
    assert_eq!(write(0xcf9, 2), None);
    assert_eq!(write(0xcf9, 6), Some(PowerEvent::Reset));
    assert_eq!(write(0xcf9, 0x0e), Some(PowerEvent::Reset));
}

#[test]
fn keyboard_controller_resets_by_one_command_only() {
    let resets: Vec<u8> = (0..=255).filter(|value| write(0x64, *value).is_some()).collect();
    assert_eq!(resets, [0xfe]);
}

#[test]
fn other_ports_do_nothing() {
    let active = (0..=u16::MAX).filter(|port| (0..=255).any(|value| write(*port, value).is_some()));
    assert_eq!(active.collect::<Vec<_>>(), [0x64, 0x600, 0xcf9]);
    assert!([0x64, 0x600, 0xcf9].iter().all(|port| PORTS.contains(port)));
    assert_eq!(read(), 0);
}
