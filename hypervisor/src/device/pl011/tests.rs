//! The accesses of Linux' amba-pl011 driver and early consoles, and random accesses against a simple model.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use fastrand::Rng;

use super::{FIFO_BYTES, Pl011, RECEIVE_BYTES, State};

const DR: u16 = 0x00;
const RSR: u16 = 0x04;
const FR: u16 = 0x18;
const IBRD: u16 = 0x24;
const FBRD: u16 = 0x28;
const LCR_H: u16 = 0x2c;
const CR: u16 = 0x30;
const IFLS: u16 = 0x34;
const IMSC: u16 = 0x38;
const RIS: u16 = 0x3c;
const MIS: u16 = 0x40;
const ICR: u16 = 0x44;

const RX: u32 = 1 << 4;
const TX: u32 = 1 << 5;
const RT: u32 = 1 << 6;
const OE: u32 = 1 << 10;

const RXFE: u32 = 1 << 4;
const TXFF: u32 = 1 << 5;
const RXFF: u32 = 1 << 6;
const TXFE: u32 = 1 << 7;

const ENABLED: u32 = 0x301;
const LOOPBACK: u32 = 0x381;

/// A write that sends nothing.
fn set(uart: &mut Pl011, offset: u16, value: u32) {
    assert_eq!(uart.write(offset, value), None);
}

/// A UART as the driver leaves it: FIFOs on, trigger at 16 bytes, interrupts `imsc` let through.
fn running(imsc: u32) -> Pl011 {
    let mut uart = Pl011::new();
    set(&mut uart, IFLS, 0x12);
    set(&mut uart, LCR_H, 0x70);
    set(&mut uart, CR, ENABLED);
    set(&mut uart, ICR, 0x7ff);
    set(&mut uart, IMSC, imsc);
    uart
}

fn service(uart: &mut Pl011, output: &mut VecDeque<u8>, sent: &mut Vec<u8>, input: &mut Vec<u8>) {
    // The driver's interrupt handler: serves raised and unmasked interrupts until there are none; it never clears TX,
    // RX and RT.
    for _ in 0..256 {
        let status = uart.read(RIS) & uart.read(IMSC);
        if status == 0 {
            return;
        }
        set(uart, ICR, status & !(TX | RX | RT));
        if status & (RX | RT) != 0 {
            while uart.read(FR) & RXFE == 0 {
                input.push(uart.read(DR).to_le_bytes()[0]);
            }
        }
        if status & TX != 0 {
            // Half a FIFO without a check, as the trigger level allows.
            for byte in output.drain(..output.len().min(FIFO_BYTES / 2)) {
                sent.extend(uart.write(DR, byte.into()));
            }
            if output.is_empty() {
                set(uart, IMSC, RX | RT);
            }
        }
    }
    panic!("the interrupt does not end");
}

#[test]
fn identification_is_that_of_a_primecell_uart_with_fifos_of_32() {
    let mut uart = Pl011::new();
    let mut id = |from: u16| (0..4).fold(0, |id, n| id | uart.read(from + n * 4) << (n * 8));
    assert_eq!(id(0xfe0) & 0x000f_ffff, 0x0004_1011);
    assert!(id(0xfe0) >> 20 & 0xf >= 3, "32 bytes since revision 3");
    assert_eq!(id(0xff0), 0xb105_f00d);
    assert_eq!([0xfe1, 0xfdc, 0x1000].map(|offset| uart.read(offset)), [0; 3]);
}

#[test]
fn early_console_sends_without_setting_anything_up() {
    let mut uart = Pl011::new();
    for byte in *b"Booting" {
        assert_eq!(uart.read(FR) & (TXFF | 1 << 3), 0, "neither full nor busy");
        assert_eq!(uart.write(DR, byte.into()), Some(byte));
    }
    assert!(!uart.interrupt());
}

#[test]
fn registers_keep_the_bits_that_they_have() {
    let mut uart = Pl011::new();
    let bits = [
        (IBRD, 0xffff),
        (FBRD, 0x3f),
        (LCR_H, 0xff),
        (CR, 0xff87),
        (IFLS, 0x3f),
        (IMSC, 0x7ff),
        (0x48, 7),
        (0x20, 0xff),
    ];
    for (offset, mask) in bits {
        for value in [u32::MAX, 0x5555_5555, 0] {
            set(&mut uart, offset, value);
            assert_eq!(uart.read(offset), value & mask, "{offset:#x}");
        }
    }
    for offset in [FR, RIS, MIS, 0xfe0, 0x4c, 0x80, 0x02, u16::MAX] {
        let before = uart.read(offset);
        set(&mut uart, offset, u32::MAX);
        assert_eq!(uart.read(offset), before, "{offset:#x}");
    }
}

#[test]
fn reset_values_are_those_of_the_manual() {
    let mut uart = Pl011::new();
    assert_eq!([CR, IFLS, LCR_H, IMSC, RSR, MIS].map(|offset| uart.read(offset)), [0x300, 0x12, 0, 0, 0, 0]);
    assert_eq!(uart.read(FR) & (RXFE | TXFF | RXFF | TXFE), RXFE | TXFE);
}

#[test]
fn unmasking_the_transmit_interrupt_raises_the_line_after_each_burst() {
    let mut uart = running(0);
    for burst in 0..3 {
        for byte in 0..32 {
            assert_eq!(uart.write(DR, byte), Some(byte.to_le_bytes()[0]), "burst {burst}");
        }
        assert!(!uart.interrupt());
        set(&mut uart, IMSC, TX);
        assert!(uart.interrupt());
        assert_eq!(uart.read(MIS), TX);
        set(&mut uart, IMSC, 0);
    }
    assert!(Pl011::new().raw & 1 << 5 != 0, "also before the first byte");
}

#[test]
fn cleared_transmit_interrupt_comes_with_the_next_byte() {
    let mut uart = running(TX);
    assert!(!uart.interrupt());
    assert_eq!(uart.write(DR, 1), Some(1));
    assert!(uart.interrupt());
    set(&mut uart, ICR, TX);
    assert!(!uart.interrupt());
}

#[test]
fn full_consumer_stops_the_transmitter() {
    let mut uart = running(TX);
    uart.set_transmit_room(false);
    assert_eq!(uart.read(FR) & (TXFF | TXFE), TXFF);
    assert_eq!(uart.write(DR, 7), Some(7), "a driver that looked before may go on");
    assert!(!uart.interrupt());
    uart.set_transmit_room(true);
    assert!(uart.interrupt());
    set(&mut uart, ICR, TX);
    uart.set_transmit_room(true);
    assert!(!uart.interrupt(), "no news");
}

#[test]
fn received_bytes_interrupt_by_trigger_level_or_timeout() {
    let mut uart = running(RX | RT);
    assert_eq!(uart.receive(&[1; 15]), 15);
    assert_eq!(uart.read(MIS), RT);
    assert_eq!(uart.receive(&[2]), 1);
    assert_eq!(uart.read(MIS), RX);
    assert_eq!(uart.read(DR), 1);
    assert_eq!(uart.read(MIS), RT);
    for _ in 0..15 {
        assert!(uart.interrupt());
        uart.read(DR);
    }
    assert!(!uart.interrupt());
    assert_eq!((uart.read(DR), uart.read(FR) & RXFE), (0, RXFE));
}

#[test]
fn clearing_does_not_hide_bytes_that_wait() {
    let mut uart = running(RX | RT);
    assert_eq!(uart.receive(b"a"), 1);
    set(&mut uart, ICR, 0x7ff);
    assert!(uart.interrupt());
}

#[test]
fn trigger_follows_the_level_register() {
    for (select, level) in [4, 8, 16, 24, 28].into_iter().enumerate() {
        let mut uart = running(0);
        set(&mut uart, IFLS, u32::try_from(select).expect("small") << 3);
        assert_eq!(uart.receive(&vec![0; level - 1]), level - 1);
        assert_eq!(uart.read(RIS) & RX, 0);
        assert_eq!(uart.receive(&[0]), 1);
        assert_eq!(uart.read(RIS) & RX, RX, "level {level}");
    }
}

#[test]
fn receiver_that_is_off_takes_nothing() {
    for control in [0, 1, 0x200, LOOPBACK] {
        let mut uart = running(RX | RT);
        set(&mut uart, CR, control);
        assert_eq!(uart.receive(b"lost?"), 0, "{control:#x}");
        set(&mut uart, CR, ENABLED);
        assert_eq!(uart.receive(b"kept"), 4);
    }
}

#[test]
fn interrupt_of_what_waits_comes_when_the_receiver_is_on_again() {
    let mut uart = running(RX | RT);
    assert_eq!(uart.receive(b"a"), 1);
    set(&mut uart, CR, 0x101);
    assert!(!uart.interrupt());
    set(&mut uart, CR, ENABLED);
    assert!(uart.interrupt());
}

#[test]
fn long_input_waits_behind_the_fifo_in_order_and_without_loss() {
    let mut uart = running(0);
    let input: Vec<u8> = (0..5000_u32).map(|n| n.to_le_bytes()[0]).collect();
    assert_eq!(uart.receive(&input), RECEIVE_BYTES);
    assert_eq!(uart.receive(&input), 0);
    assert_eq!(uart.read(FR) & RXFF, RXFF);
    let mut seen = Vec::new();
    while uart.read(FR) & RXFE == 0 {
        seen.push(uart.read(DR).to_le_bytes()[0]);
    }
    assert_eq!(seen, input[..RECEIVE_BYTES]);
}

#[test]
fn without_fifos_the_holding_register_has_one_byte() {
    let mut uart = running(RX | RT);
    assert_eq!(uart.receive(&[9; 40]), 40);
    set(&mut uart, LCR_H, 0x60);
    assert_eq!(uart.read(FR) & RXFF, RXFF, "eight of 40 are left behind the flushed FIFO");
    assert_eq!(uart.read(MIS), RX);
    for _ in 0..8 {
        assert_eq!(uart.read(DR), 9);
    }
    assert!(!uart.interrupt());
}

#[test]
fn loopback_returns_what_is_sent_and_tells_an_overrun_once() {
    let mut uart = running(OE);
    set(&mut uart, CR, LOOPBACK);
    for byte in 0..32 {
        set(&mut uart, DR, byte);
    }
    assert!(!uart.interrupt());
    set(&mut uart, DR, 32);
    assert!(uart.interrupt());
    assert_eq!(uart.read(RSR), 1 << 3);
    assert_eq!(uart.read(DR), 1 << 11);
    for byte in 1..32 {
        assert_eq!(uart.read(DR), byte);
    }
    assert_eq!(uart.read(RSR), 1 << 3);
    set(&mut uart, RSR, 0);
    set(&mut uart, ICR, OE);
    assert_eq!((uart.read(RSR), uart.interrupt()), (0, false));
}

#[test]
fn driver_loses_and_forgets_nothing() {
    let mut random = Rng::with_seed(1);
    let mut uart = running(RX | RT);
    let (mut output, mut sent, mut input) = (VecDeque::new(), Vec::new(), Vec::new());
    let (mut all_output, mut all_input) = (Vec::new(), Vec::new());

    for _ in 0..20_000 {
        match random.u64(..4) {
            0 => {
                let bytes: Vec<u8> = (0..random.u64(..60)).map(|_| random.u8(..)).collect();
                let taken = uart.receive(&bytes);
                all_input.extend(&bytes[..taken]);
            }
            1 => {
                let bytes: Vec<u8> = (0..random.u64(..60)).map(|_| random.u8(..)).collect();
                all_output.extend(&bytes);
                output.extend(&bytes);
                set(&mut uart, IMSC, RX | RT | TX);
            }
            2 => uart.set_transmit_room(false),
            _ => uart.set_transmit_room(true),
        }
        if uart.interrupt() {
            service(&mut uart, &mut output, &mut sent, &mut input);
        }
        assert_eq!(input.len(), all_input.len(), "all that came was read at once");
    }

    uart.set_transmit_room(true);
    set(&mut uart, IMSC, RX | RT | TX);
    service(&mut uart, &mut output, &mut sent, &mut input);
    assert_eq!(sent, all_output);
    assert_eq!(input, all_input);
    assert!(sent.len() > 100_000, "the test did something");
}

#[test]
fn random_accesses_keep_the_promises_of_the_registers() {
    accesses_keep_the_promises_of_the_registers(fuzz::Decisions::of_seed(7), 100_000);
}

#[test]
fn any_accesses_keep_the_promises_of_the_registers() {
    fuzz::target("pl011", |bytes| {
        accesses_keep_the_promises_of_the_registers(fuzz::Decisions::of_bytes(bytes), bytes.len());
    });
}

fn accesses_keep_the_promises_of_the_registers(mut random: fuzz::Decisions, steps: usize) {
    let mut uart = Pl011::new();
    for step in 0..steps {
        if random.are_over() {
            return;
        }
        let offset = if random.u64(..8) == 0 { 0xfe0 } else { 0 } + u16::from(random.u8(..) % 0x50);
        match random.u64(..8) {
            0..4 => {
                let _sent = uart.write(offset, random.u32(..));
            }
            4..7 => assert_eq!(uart.read(offset) >> 16, 0),
            _ => {
                let taken = uart.receive(&[0; 50]);
                assert!(taken <= 50);
            }
        }
        let (ris, imsc, flags) = (uart.read(RIS), uart.read(IMSC), uart.read(FR));
        assert_eq!(uart.read(MIS), ris & imsc, "step {step}");
        assert_eq!(uart.interrupt(), ris & imsc != 0, "step {step}");
        assert_ne!(flags & (RXFE | RXFF), RXFE | RXFF, "step {step}: empty and full");
        assert_ne!(ris & (RX | RT), RX | RT, "step {step}: level or timeout");
        let listens = uart.read(CR) & 0x201 == 0x201;
        assert_eq!(ris & (RX | RT) != 0, flags & RXFE == 0 && listens, "step {step}: bytes wait, and it is said");
    }
}

/// One use of the UART by its guest or the other end, in a random order of everything.
fn use_at_random(uart: &mut Pl011, rng: &mut Rng) -> (u32, Option<u8>, usize, bool) {
    let offset = [0x00, 0x04, 0x18, 0x20, 0x24, 0x28, 0x2c, 0x30, 0x34, 0x38, 0x3c, 0x40, 0x44, 0x48][rng.usize(..14)];
    let (mut read, mut sent, mut taken) = (0, None, 0);
    match rng.u32(..8) {
        0..3 => read = uart.read(offset),
        3..6 => sent = uart.write(offset, rng.u32(..)),
        6 => taken = uart.receive(&[rng.u8(..); 40][..rng.usize(..40)]),
        _ => uart.set_transmit_room(rng.bool()),
    }
    (read, sent, taken, uart.interrupt())
}

#[test]
fn restored_uart_behaves_as_the_saved_one() {
    let mut rng = Rng::with_seed(9);
    for round in 0..2_000 {
        let mut saved = Pl011::new();
        for _ in 0..rng.u32(..100) {
            let _ = use_at_random(&mut saved, &mut rng);
        }
        let mut restored = Pl011::new();
        restored.set_state(&saved.state()).expect("it is a state");
        assert_eq!(restored.state(), saved.state());
        let mut same = rng.clone();
        for _ in 0..100 {
            assert_eq!(use_at_random(&mut restored, &mut same), use_at_random(&mut saved, &mut rng), "round {round}");
        }
    }
}

#[test]
fn more_input_than_a_uart_holds_is_not_restored() {
    let mut uart = Pl011::new();
    let before = uart.state();
    let state = State { received: alloc::vec![1; RECEIVE_BYTES + 1], ..uart.state() };
    assert_eq!(uart.set_state(&state), None);
    assert_eq!(uart.state(), before);
}
