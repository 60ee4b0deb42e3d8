//! The driver, with the guests' UART and with devices that are no UARTs.

use super::{LINE_STATUS, PATIENCE, Registers, SCRATCH, SerialPort, lcr, lsr};
use crate::device::uart::Uart;

/// A UART, its output, and the number of reads of its line status.
struct Model {
    uart: Uart,
    sent: Vec<u8>,
    looks: u32,
    /// At this read the other end accepts bytes again.
    ready_at: u32,
}

impl Model {
    fn new() -> Self {
        Self { uart: Uart::new(), sent: Vec::new(), looks: 0, ready_at: 0 }
    }

    fn stuck_until(look: u32) -> Self {
        let mut model = Self { ready_at: look, ..Self::new() };
        model.uart.set_transmit_room(false);
        model
    }

    fn speed(&mut self) -> [u8; 2] {
        self.write(super::LINE_CONTROL, lcr::DIVISOR);
        let divisor = [self.read(0), self.read(1)];
        self.write(super::LINE_CONTROL, lcr::EIGHT_BITS);
        divisor
    }
}

impl Registers for &mut Model {
    fn read(&mut self, offset: u8) -> u8 {
        (**self).read(offset)
    }

    fn write(&mut self, offset: u8, value: u8) {
        (**self).write(offset, value);
    }
}

impl Registers for Model {
    fn read(&mut self, offset: u8) -> u8 {
        if offset == LINE_STATUS {
            self.looks += 1;
            self.uart.set_transmit_room(self.looks > self.ready_at);
        }
        self.uart.read(offset.into())
    }

    fn write(&mut self, offset: u8, value: u8) {
        self.sent.extend(self.uart.write(offset.into(), value));
    }
}

/// A place where all registers read as this.
struct Constant(u8);

impl Registers for Constant {
    fn read(&mut self, _: u8) -> u8 {
        self.0
    }

    fn write(&mut self, _: u8, _: u8) {}
}

#[test]
fn uart_answers_keeps_its_scratch_register_and_sends_nothing() {
    let mut model = Model::new();
    model.write(SCRATCH, 0x77);
    assert!(SerialPort::answers(&mut model));
    assert_eq!((model.read(SCRATCH), model.sent.len()), (0x77, 0));
}

#[test]
fn what_is_no_uart_does_not_answer() {
    for value in 0..=0xff {
        assert!(!SerialPort::answers(&mut Constant(value)), "{value:#x}");
    }
    // Memory keeps all that is written.
    struct Memory([u8; 8]);
    impl Registers for Memory {
        fn read(&mut self, offset: u8) -> u8 {
            self.0[usize::from(offset)]
        }
        fn write(&mut self, offset: u8, value: u8) {
            self.0[usize::from(offset)] = value;
        }
    }
    let mut memory = Memory([1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(!SerialPort::answers(&mut memory));
    assert_eq!(memory.0, [1, 2, 3, 4, 5, 6, 7, 8], "and is as it was");
}

#[test]
fn speed_is_set_unless_it_is_firmwares() {
    for (divisor, keeps, expected) in
        [([12, 0], false, [1, 0]), ([12, 0], true, [12, 0]), ([0, 1], true, [0, 1]), ([0, 0], true, [1, 0])]
    {
        let mut model = Model::new();
        model.write(super::LINE_CONTROL, lcr::DIVISOR);
        model.write(0, divisor[0]);
        model.write(1, divisor[1]);
        let _port = SerialPort::open(&mut model, keeps);
        assert_eq!(model.speed(), expected, "{divisor:?}");
        assert_eq!(model.sent, [], "{divisor:?}");
    }
}

#[test]
fn all_bytes_arrive_and_a_fifo_is_filled_at_once() {
    let mut model = Model::new();
    let text: Vec<u8> = (0..1000u32).map(|at| at.to_le_bytes()[0]).collect();
    let mut port = SerialPort::open(&mut model, false);
    assert_eq!(port.send(&text), text.len());
    assert_eq!(port.send(b"end"), 3);
    assert_eq!(model.sent, [&text[..], b"end"].concat());
    assert!(model.looks < 1003 / 16 + 3, "{} looks at the line's status", model.looks);
}

#[test]
fn uart_that_takes_nothing_costs_one_wait_and_no_more() {
    let mut model = Model::stuck_until(u32::MAX);
    let mut port = SerialPort::open(&mut model, false);
    assert_eq!((0..100).map(|_| port.send(b"a line")).sum::<usize>(), 0);
    assert!(model.looks <= PATIENCE + 100, "{} looks at the line's status", model.looks);
}

#[test]
fn one_wait_is_as_long_for_many_bytes_as_for_one() {
    for bytes in [1, 10_000] {
        let mut port = SerialPort { registers: Constant(0), room: 16, free: 0, is_stuck: false };
        assert_eq!(port.send(&vec![b'x'; bytes]), 0);
        assert!(port.is_stuck);
    }
    // A transmitter that becomes ready just before the limit of polls.
    struct Slow(u32);
    impl Registers for Slow {
        fn read(&mut self, _: u8) -> u8 {
            self.0 += 1;
            if self.0.is_multiple_of(PATIENCE / 4) { lsr::TRANSMITTER_READY } else { 0 }
        }
        fn write(&mut self, _: u8, _: u8) {}
    }
    let mut port = SerialPort { registers: Slow(0), room: 16, free: 0, is_stuck: false };
    assert_eq!(port.send(&[b'x'; 10_000]), 4 * 16);
    assert_eq!(port.registers.0, PATIENCE);
}

#[test]
fn uart_that_was_stuck_is_used_again_when_it_takes_something() {
    let mut model = Model::stuck_until(2 * PATIENCE);
    let mut port = SerialPort::open(&mut model, false);
    let sent: usize = (0..2 * PATIENCE).map(|_| port.send(b"x")).sum();
    assert!(sent > 0 && !port.is_stuck);
    assert_eq!(port.send(&[b'y'; 100]), 100);
}

#[test]
fn flush_waits_until_all_has_left_but_not_for_ever() {
    // The transmitter accepts bytes at once, and has sent them some polls later.
    struct Sending(u32);
    impl Registers for Sending {
        fn read(&mut self, offset: u8) -> u8 {
            if offset != LINE_STATUS {
                return 0;
            }
            self.0 = self.0.saturating_sub(1);
            lsr::TRANSMITTER_READY | if self.0 == 0 { lsr::ALL_SENT } else { 0 }
        }
        fn write(&mut self, _: u8, _: u8) {
            self.0 = 40;
        }
    }
    let mut port = SerialPort { registers: Sending(0), room: 16, free: 0, is_stuck: false };
    assert_eq!(port.send(b"the last words"), 14);
    assert_ne!(port.registers.0, 0);
    port.flush();
    assert_eq!(port.registers.0, 0);

    let mut model = Model::stuck_until(u32::MAX);
    let mut port = SerialPort { registers: &mut model, room: 16, free: 0, is_stuck: false };
    port.flush();
    assert_eq!(model.looks, PATIENCE);
}

#[test]
fn bytes_that_arrived_are_taken_as_far_as_there_is_room() {
    let mut model = Model::new();
    let mut port = SerialPort::open(&mut model, false);
    let mut bytes = [0; 4];
    assert_eq!(port.receive(&mut bytes), 0);
    assert_eq!(port.registers.uart.receive(b"typed"), 5);
    assert_eq!((port.receive(&mut bytes), &bytes), (4, b"type"));
    assert_eq!((port.receive(&mut bytes), bytes[0]), (1, b'd'));
    assert_eq!(port.receive(&mut bytes), 0);
}

#[test]
fn damaged_bytes_and_a_uart_that_is_gone_are_no_input() {
    for status in [lsr::DATA_READY | 1 << 4, lsr::DATA_READY | 1 << 3, lsr::DATA_READY | 1 << 2, lsr::NOTHING_THERE, 0]
    {
        let mut port = SerialPort { registers: Constant(status), room: 16, free: 0, is_stuck: false };
        assert_eq!(port.receive(&mut [0; 100]), 0, "{status:#x}");
    }
}
