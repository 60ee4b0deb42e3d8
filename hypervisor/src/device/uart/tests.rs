//! The accesses of Linux' 8250 driver, step by step, and random accesses against a simple model.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use fastrand::Rng;

use super::{FIFO_BYTES, RECEIVE_BYTES, State, Uart};

const DATA: u16 = 0;
const IER: u16 = 1;
const IIR: u16 = 2;
const FCR: u16 = 2;
const LCR: u16 = 3;
const MCR: u16 = 4;
const LSR: u16 = 5;
const MSR: u16 = 6;
const SCRATCH: u16 = 7;

const MCR_OUT2: u8 = 0x08;
const MCR_LOOP: u8 = 0x10;

/// A UART as a driver leaves it: FIFOs on with trigger 8, interrupts `ier` let through.
fn running(ier: u8) -> Uart {
    let mut uart = Uart::new();
    set(&mut uart, LCR, 3);
    set(&mut uart, FCR, 0x87);
    set(&mut uart, MCR, 0x0b);
    set(&mut uart, IER, ier);
    uart
}

/// A write that sends nothing.
fn set(uart: &mut Uart, offset: u16, value: u8) {
    assert_eq!(uart.write(offset, value), None);
}

#[test]
fn probe_of_linux_finds_a_16550a_and_nothing_fancier() {
    let mut uart = Uart::new();

    // The interrupt enable register has four bits, all of which can be set and cleared.
    set(&mut uart, IER, 0);
    assert_eq!(uart.read(IER), 0);
    set(&mut uart, IER, 0xff);
    assert_eq!(uart.read(IER), 0x0f);
    set(&mut uart, IER, 0);

    // Loopback: OUT2 and RTS return as DCD and CTS.
    set(&mut uart, MCR, MCR_LOOP | 0x0a);
    assert_eq!(uart.read(MSR) & 0xf0, 0x90);
    set(&mut uart, MCR, 0);

    // FIFOs: IIR shows them, and no extended register set behind LCR = 0xbf or DLAB.
    set(&mut uart, LCR, 0xbf);
    set(&mut uart, FCR, 0);
    set(&mut uart, LCR, 0);
    set(&mut uart, FCR, 1);
    assert_eq!(uart.read(IIR) >> 6, 3);
    set(&mut uart, LCR, 0x80);
    assert_ne!(uart.read(IIR), 0);
    set(&mut uart, LCR, 0xbf);
    assert_ne!(uart.read(IIR), 0);

    // No 64-byte FIFO, with or without DLAB.
    for lcr in [0, 0x80] {
        set(&mut uart, LCR, lcr);
        set(&mut uart, FCR, 0x21);
        assert_eq!(uart.read(IIR) >> 5, 6);
    }

    // Not National's SuperIO: bit 4 of offset 2 does not follow LOOP.
    set(&mut uart, LCR, 0);
    for mcr in [0, MCR_LOOP] {
        set(&mut uart, MCR, mcr);
        set(&mut uart, LCR, 0xe0);
        assert_eq!(uart.read(2) & MCR_LOOP, 0);
        set(&mut uart, LCR, 0);
    }
    set(&mut uart, MCR, 0);

    // Not an XScale: the unit enable bit of IER does not stick.
    set(&mut uart, IER, 0x40);
    assert_eq!(uart.read(IER), 0);
    assert_ne!(uart.read(LSR), 0xff);
}

#[test]
fn startup_of_linux_sees_a_transmitter_without_bugs() {
    let mut uart = running(0);

    // Enabling the interrupt raises it each time, whether it was read before or not.
    for _ in 0..2 {
        set(&mut uart, IER, 2);
        assert!(uart.interrupt());
        assert_eq!(uart.read(IIR), 0xc2);
        assert!(!uart.interrupt());
        assert_eq!(uart.read(IIR), 0xc1);
        set(&mut uart, IER, 0);
    }
    set(&mut uart, IER, 2);
    assert_eq!((uart.read(LSR), uart.read(IIR)), (0x60, 0xc2));
}

#[test]
fn scratch_register_and_divisor_keep_what_is_written() {
    let mut uart = Uart::new();
    assert_eq!(uart.write(SCRATCH, 0x5a), None);
    set(&mut uart, LCR, 0x83);
    assert_eq!((uart.read(0), uart.read(1)), (1, 0), "early consoles divide by it");
    set(&mut uart, 0, 0x34);
    set(&mut uart, 1, 0x12);
    assert_eq!((uart.read(0), uart.read(1)), (0x34, 0x12));
    set(&mut uart, LCR, 0x03);
    assert_eq!((uart.read(0), uart.read(1), uart.read(SCRATCH)), (0, 0, 0x5a));
    assert_eq!(uart.write(0, b'x'), Some(b'x'));
}

#[test]
fn polled_output_sends_every_byte_and_never_waits() {
    let mut uart = Uart::new();
    for byte in *b"Hello" {
        assert_eq!(uart.read(LSR), 0x60);
        assert_eq!(uart.write(DATA, byte), Some(byte));
    }
}

#[test]
fn transmitter_interrupt_comes_after_every_burst() {
    let mut uart = running(2);
    assert_eq!(uart.read(IIR), 0xc2);
    assert!(!uart.interrupt());
    for byte in 0..16 {
        assert_eq!(uart.write(DATA, byte), Some(byte));
    }
    assert!(uart.interrupt());
    assert_eq!(uart.read(IIR), 0xc2);
    assert!(!uart.interrupt(), "once told, it stays quiet until the next byte");
    assert!(!uart.interrupt());
}

#[test]
fn writing_interrupt_enable_again_does_not_raise_what_was_told() {
    let mut uart = running(2);
    assert_eq!(uart.read(IIR), 0xc2);
    set(&mut uart, IER, 3);
    assert!(!uart.interrupt());
}

#[test]
fn full_consumer_makes_the_transmitter_look_busy() {
    let mut uart = running(2);
    uart.set_transmit_room(false);
    assert_eq!(uart.read(LSR), 0);
    assert!(!uart.interrupt());
    assert_eq!(uart.read(IIR), 0xc1);

    // A driver that was about to write its FIFO full may do so; enabling the interrupt does not raise it.
    assert_eq!(uart.write(DATA, b'x'), Some(b'x'));
    set(&mut uart, IER, 0);
    set(&mut uart, IER, 2);
    assert!(!uart.interrupt());

    uart.set_transmit_room(true);
    assert_eq!(uart.read(LSR), 0x60);
    assert!(uart.interrupt());
    assert_eq!(uart.read(IIR), 0xc2);
    uart.set_transmit_room(true);
    assert!(!uart.interrupt(), "no news");
}

#[test]
fn received_bytes_interrupt_by_trigger_level_or_timeout() {
    let mut uart = running(1);
    assert_eq!(uart.receive(b"1234567"), 7);
    assert!(uart.interrupt());
    assert_eq!(uart.read(IIR), 0xcc, "fewer than the trigger level");
    assert_eq!(uart.receive(b"8"), 1);
    assert_eq!(uart.read(IIR), 0xc4);
    for byte in *b"12345678" {
        assert_eq!(uart.read(LSR), 0x61);
        assert!(uart.interrupt());
        assert_eq!(uart.read(DATA), byte);
    }
    assert!(!uart.interrupt());
    assert_eq!((uart.read(LSR), uart.read(DATA), uart.read(IIR)), (0x60, 0, 0xc1));
}

#[test]
fn long_input_waits_behind_the_fifo_in_order_and_without_loss() {
    let mut uart = running(1);
    let input: Vec<u8> = (0..5000_u32).map(|n| n.to_le_bytes()[0]).collect();
    assert_eq!(uart.receive(&input), RECEIVE_BYTES);
    assert_eq!(uart.receive(&input), 0);
    let mut seen = Vec::new();
    while uart.read(LSR) & 1 != 0 {
        seen.push(uart.read(DATA));
    }
    assert_eq!(seen, input[..RECEIVE_BYTES]);
    assert_eq!(uart.receive(b"more"), 4);
}

#[test]
fn clearing_the_receiver_drops_the_fifo_and_not_what_comes_after_it() {
    let mut uart = running(1);
    assert_eq!(uart.receive(b"0123456789abcdefXY"), 18);
    set(&mut uart, FCR, 0x83);
    assert_eq!(uart.read(DATA), b'X');
    set(&mut uart, FCR, 0x81);
    assert_eq!(uart.read(DATA), b'Y');
}

#[test]
fn fifo_settings_count_only_with_the_enable_bit() {
    let mut uart = running(1);
    assert_eq!(uart.receive(b"ab"), 2);
    set(&mut uart, FCR, 0xc6);
    assert_eq!(uart.read(IIR), 0x01, "switching off emptied the FIFO");
    assert_eq!(uart.receive(b"c"), 1);
    assert_eq!(uart.read(IIR), 0x04, "one byte is all that the register holds");
    set(&mut uart, FCR, 0x06);
    assert_eq!(uart.read(DATA), b'c');
}

#[test]
fn interrupts_pass_only_with_out2_and_outside_of_loopback() {
    let mut uart = running(1);
    assert_eq!(uart.receive(b"a"), 1);
    for (mcr, line) in [(0, false), (MCR_OUT2, true), (MCR_OUT2 | MCR_LOOP, false), (0x0b, true)] {
        set(&mut uart, MCR, mcr);
        assert_eq!(uart.interrupt(), line, "{mcr:#x}");
    }
}

#[test]
fn loopback_returns_what_is_sent_and_sends_nothing() {
    let mut uart = running(0);
    set(&mut uart, MCR, MCR_LOOP);
    assert_eq!(uart.receive(b"line"), 0, "cut off from the line");
    for byte in 0..16 {
        set(&mut uart, DATA, byte);
    }
    assert_eq!(uart.read(LSR), 0x61);
    set(&mut uart, DATA, 16);
    assert_eq!(uart.read(LSR), 0x63, "one too many");
    assert_eq!(uart.read(LSR), 0x61, "told once");
    for byte in 0..16 {
        assert_eq!(uart.read(DATA), byte);
    }
    assert_eq!(uart.read(LSR), 0x60);
}

#[test]
fn overrun_is_the_most_urgent_interrupt_and_cleared_by_reading_the_status() {
    let mut uart = running(0x0f);
    set(&mut uart, FCR, 0);
    set(&mut uart, MCR, MCR_LOOP);
    set(&mut uart, DATA, 1);
    set(&mut uart, DATA, 2);
    set(&mut uart, MCR, 0x0b);
    assert!(uart.interrupt());
    assert_eq!(uart.read(IIR), 0x06);
    assert_eq!(uart.read(LSR), 0x63);
    assert_eq!(uart.read(IIR), 0x04);
    assert_eq!(uart.read(DATA), 1);
    assert_eq!(uart.read(IIR), 0x02);
    assert_eq!(uart.read(IIR), 0x00, "the modem lines changed at the loopback");
    assert_ne!(uart.read(MSR) & 0x0f, 0);
    assert_eq!(uart.read(IIR), 0x01);
    assert!(!uart.interrupt());
}

#[test]
fn modem_lines_show_changes_once() {
    let mut uart = Uart::new();
    assert_eq!(uart.read(MSR), 0xb0, "connected, no news");
    set(&mut uart, MCR, MCR_LOOP);
    assert_eq!(uart.read(MSR), 0x0b);
    assert_eq!(uart.read(MSR), 0x00);
    set(&mut uart, MCR, MCR_LOOP | 4);
    assert_eq!(uart.read(MSR), 0x40, "a ring is news when it ends");
    set(&mut uart, MCR, MCR_LOOP);
    assert_eq!(uart.read(MSR), 0x04);
    set(&mut uart, MCR, 0);
    assert_eq!(uart.read(MSR), 0xbb);
}

#[test]
fn read_only_and_absent_registers_ignore_writes() {
    let mut uart = running(0);
    for offset in [LSR, MSR, 8, 100, u16::MAX] {
        assert_eq!(uart.write(offset, 0xff), None);
    }
    assert_eq!((uart.read(LSR), uart.read(MSR) & 0xf0, uart.read(8)), (0x60, 0xb0, 0xff));
}

/// Linux' interrupt-driven driver in a few lines: it runs when the line is raised, as an edge, and loops until IIR
/// shows no source.
fn service(uart: &mut Uart, output: &mut VecDeque<u8>, sent: &mut Vec<u8>, input: &mut Vec<u8>) {
    loop {
        if uart.read(IIR) & 1 != 0 {
            return;
        }
        let mut status = uart.read(LSR);
        while status & 1 != 0 {
            input.push(uart.read(DATA));
            status = uart.read(LSR);
        }
        let _ = uart.read(MSR);
        if status & 0x20 != 0 {
            for byte in output.drain(..output.len().min(FIFO_BYTES)) {
                sent.extend(uart.write(DATA, byte));
            }
            if output.is_empty() {
                assert_eq!(uart.write(IER, 0x05), None);
            }
        }
    }
}

#[test]
fn driver_woken_by_edges_loses_and_forgets_nothing() {
    let mut random = Rng::with_seed(1);
    let mut uart = running(0x05);
    let (mut output, mut sent, mut input) = (VecDeque::new(), Vec::new(), Vec::new());
    let (mut all_output, mut all_input) = (Vec::new(), Vec::new());
    let mut line = false;

    for step in 0..20_000_u32 {
        match random.u64(..4) {
            0 => {
                let bytes: Vec<u8> = (0..random.u64(..40)).map(|_| random.u8(..)).collect();
                let taken = uart.receive(&bytes);
                all_input.extend(&bytes[..taken]);
            }
            1 => {
                let bytes: Vec<u8> = (0..random.u64(..60)).map(|_| random.u8(..)).collect();
                all_output.extend(&bytes);
                output.extend(&bytes);
                if !output.is_empty() {
                    assert_eq!(uart.write(IER, 0x07), None);
                }
            }
            2 => uart.set_transmit_room(false),
            _ => uart.set_transmit_room(true),
        }
        // The interrupt controller sees only edges, and checks once after each access from outside.
        let raised = uart.interrupt() && !line;
        line = uart.interrupt();
        if raised {
            service(&mut uart, &mut output, &mut sent, &mut input);
            line = uart.interrupt();
            assert!(!line, "step {step}: the driver leaves with the line low, or the next edge never comes");
        }
    }

    uart.set_transmit_room(false);
    uart.set_transmit_room(true);
    if uart.interrupt() {
        service(&mut uart, &mut output, &mut sent, &mut input);
    }
    assert_eq!(sent, all_output);
    assert_eq!(input, all_input);
    assert!(sent.len() > 100_000, "the test did something");
}

fn accesses_keep_the_promises_of_the_registers(mut random: fuzz::Decisions, steps: usize) {
    let mut uart = Uart::new();
    for _ in 0..steps {
        if random.are_over() {
            return;
        }
        let offset = random.u16(..8);
        match random.u64(..8) {
            0 => uart.set_transmit_room(random.u64(..2) == 0),
            1 => {
                let bytes: Vec<u8> = (0..random.u64(..20)).map(|_| random.u8(..)).collect();
                assert!(uart.receive(&bytes) <= bytes.len().min(RECEIVE_BYTES));
            }
            2..5 => {
                let _ = uart.read(offset);
            }
            _ => {
                let _ = uart.write(offset, random.u8(..));
            }
        }

        // The line is high exactly if IIR shows a source and the gate is open.
        let line = uart.interrupt();
        let gate = uart.read(MCR) & (MCR_OUT2 | MCR_LOOP) == MCR_OUT2;
        let nothing = uart.read(IIR) & 1 != 0;
        assert_eq!(line, gate && !nothing);
    }
}

#[test]
fn random_accesses_keep_the_promises_of_the_registers() {
    accesses_keep_the_promises_of_the_registers(fuzz::Decisions::of_seed(7), 200_000);
}

#[test]
fn any_accesses_keep_the_promises_of_the_registers() {
    fuzz::target("uart", |bytes| {
        accesses_keep_the_promises_of_the_registers(fuzz::Decisions::of_bytes(bytes), bytes.len());
    });
}

/// One use of the UART by its guest or the other end, in a random order of everything.
fn use_at_random(uart: &mut Uart, rng: &mut Rng) -> (Option<u8>, usize, bool) {
    let offset = rng.u16(..8);
    let (byte, taken) = match rng.u32(..8) {
        0..3 => (Some(uart.read(offset)), 0),
        3..6 => (uart.write(offset, rng.u8(..)), 0),
        6 => (None, uart.receive(&[rng.u8(..); 40][..rng.usize(..40)])),
        _ => {
            uart.set_transmit_room(rng.bool());
            (None, 0)
        }
    };
    (byte, taken, uart.interrupt())
}

#[test]
fn restored_uart_behaves_as_the_saved_one() {
    let mut rng = Rng::with_seed(8);
    for round in 0..2_000 {
        let mut saved = running(rng.u8(..));
        for _ in 0..rng.u32(..100) {
            let _ = use_at_random(&mut saved, &mut rng);
        }
        let mut restored = Uart::new();
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
    let mut uart = running(0);
    let state = State { received: alloc::vec![1; RECEIVE_BYTES + 1], ..uart.state() };
    let before = uart.state();
    assert_eq!(uart.set_state(&state), None);
    assert_eq!(uart.state(), before);
}
