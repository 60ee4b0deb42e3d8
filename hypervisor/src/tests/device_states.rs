//! States of devices as a file of a saved VM may have them, and what their guests do then.

use fuzz::Input;
use serde::de::DeserializeOwned;

use crate::device::io_apic::{self, IoApic};
use crate::device::pci::{self, Pci};
use crate::device::pit::{self, Pit};
use crate::device::pl011::Pl011;
use crate::device::rtc::{self, Rtc};
use crate::device::uart::Uart;

/// A state of the next bytes, if they are one.
fn next<T: DeserializeOwned>(input: &mut Input<'_>) -> Option<T> {
    let length = usize::from(input.u16()) % 512;
    postcard::from_bytes(input.bytes(length)).ok()
}

fn any_states(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 6 {
        0 => timer(&mut input),
        1 => clock(&mut input),
        2 => bus(&mut input),
        3 => io_apic(&mut input),
        4 => uart(&mut input),
        _ => pl011(&mut input),
    }
}

fn timer(input: &mut Input<'_>) {
    let mut now = input.u64() >> (input.byte() & 63);
    let mut timer = match next(input) {
        Some(state) => {
            let Some(timer) = Pit::with_state(&state, now) else { return };
            timer
        }
        None => Pit::new(),
    };
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.byte());
        let port = [pit::FIRST_PORT, pit::FIRST_PORT + 1, 0x42, 0x43, pit::GATE_PORT][usize::from(what >> 3) % 5];
        match what & 3 {
            0 => _ = timer.read(port, now),
            1 => timer.write(port, value, now),
            2 => now = now.saturating_add(1 << (value & 63)),
            _ => {
                // A file keeps all that the guest can see.
                let mut other = Pit::with_state(&timer.state(now), now).expect("a timer has it");
                assert_eq!(other.state(now), timer.state(now));
                let later = now.saturating_add(u64::from(value));
                other.stood_still(later - now);
                assert_eq!(other.state(later), timer.state(now), "no time has passed for it");
                let [old, new] = [timer.read(pit::GATE_PORT, now), other.read(pit::GATE_PORT, later)];
                assert_eq!((old ^ new) & !0x10, 0, "only the refresh of memory goes on");
            }
        }
        let gate = timer.read(pit::GATE_PORT, now);
        assert_eq!(gate & 0xc0, 0, "bits that a PC has for errors of its bus");
    }
}

fn clock(input: &mut Input<'_>) {
    let mut clock = next::<rtc::State>(input).map_or_else(Rtc::new, |state| Rtc::with_state(&state));
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.byte());
        let now = u64::from(input.u32()) << (what >> 3 & 7);
        match what & 1 {
            0 => clock.write(u16::from(what >> 1 & 1), value),
            _ => _ = clock.read(u16::from(what >> 1 & 3), now),
        }
        let state = clock.state();
        assert_eq!(Rtc::with_state(&state).state(), state);
        // The time that it shows is a time: minutes in either format.
        let mut shown = Rtc::with_state(&state);
        shown.write(0, 0x02);
        let minutes = shown.read(1, now);
        let is_bcd = minutes & 0xf < 10 && minutes >> 4 < 6;
        assert!(is_bcd || minutes < 60, "{minutes:#x} minutes");
    }
}

fn bus(input: &mut Input<'_>) {
    let mut bus = next::<pci::State>(input).map_or_else(Pci::new, |state| Pci::with_state(&state));
    let bridge = Pci::new();
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.u32());
        let port = 0xcf8 + u16::from(what >> 4 & 7);
        let width = [1, 2, 4, 4][usize::from(what >> 2 & 3)];
        match what & 3 {
            0 => _ = bus.write_port(port, width, value),
            1 => _ = bus.read_port(port, width),
            2 => _ = bus.write_memory(value.into(), u64::from(width), !u64::from(value)),
            _ => _ = bus.read_memory(u64::from(value) << (what >> 4), 8),
        }
        // Vendor, device, class and type never change, and what a file keeps makes the same bus.
        for offset in [0, 8] {
            assert_eq!(bus.read_memory(offset, 4), bridge.read_memory(offset, 4), "at {offset}");
        }
        assert_eq!(Pci::with_state(&bus.state()).state(), bus.state());
    }
}

fn io_apic(input: &mut Input<'_>) {
    let Some(state) = next::<io_apic::State>(input) else { return };
    let mut io_apic = IoApic::with_state(&state);
    assert_eq!(IoApic::with_state(&io_apic.state()).state(), io_apic.state());
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.byte());
        match what & 3 {
            0 => _ = io_apic.set_line(usize::from(what >> 2), value & 1 != 0),
            1 => assert!(io_apic.end_of_interrupt(value).count() <= io_apic::PINS),
            2 => {
                let _ = io_apic.write(0, u32::from(what >> 2));
                let _ = io_apic.write(0x10, u32::from(value) << (what >> 2 & 24));
            }
            _ => assert_eq!(io_apic.read(u16::from(value)), io_apic.read(u16::from(value)), "a read changes nothing"),
        }
        assert_eq!(IoApic::with_state(&io_apic.state()).state(), io_apic.state());
    }
}

fn uart(input: &mut Input<'_>) {
    let mut uart = Uart::new();
    if let Some(state) = next(input) {
        let _ = uart.set_state(&state);
    }
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.byte());
        match what & 3 {
            0 => _ = uart.read(u16::from(what >> 2 & 7)),
            1 => _ = uart.write(u16::from(what >> 2 & 7), value),
            2 => {
                let bytes = [value; 64];
                let count = usize::from(what >> 2);
                assert!(uart.receive(&bytes[..count]) <= count);
            }
            _ => {
                let mut other = Uart::new();
                assert!(other.set_state(&uart.state()).is_some(), "a UART has it");
                assert_eq!((other.state(), other.interrupt()), (uart.state(), uart.interrupt()));
            }
        }
    }
}

fn pl011(input: &mut Input<'_>) {
    let mut uart = Pl011::new();
    if let Some(state) = next(input) {
        let _ = uart.set_state(&state);
    }
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.u16());
        match what & 3 {
            0 => _ = uart.read(value & 0xfff),
            1 => _ = uart.write(u16::from(what >> 2) << 2, value.into()),
            2 => {
                let bytes = [what; 64];
                let count = usize::from(what >> 2);
                assert!(uart.receive(&bytes[..count]) <= count);
            }
            _ => {
                let mut other = Pl011::new();
                assert!(other.set_state(&uart.state()).is_some(), "a UART has it");
                assert_eq!((other.state(), other.interrupt()), (uart.state(), uart.interrupt()));
            }
        }
    }
}

#[test]
fn any_states_of_devices_are_refused_or_work_and_can_be_saved_again() {
    fuzz::target("device_states", any_states);
}
