//! A driver of the device, as simple as tests allow: it speaks as Linux' driver does.
//!
//! Its queues and buffers are at fixed places in guest memory, [`MEMORY_BYTES`] from an address on.

use alloc::vec::Vec;
use core::array;

use addr::Gpa;

use crate::console::{CONTROL_BYTES, MULTIPORT, NAME, PORT, event, queue};
use crate::memory::GuestMemory;
use crate::queue::QUEUE_SIZE;
use crate::transport::{DEVICE, MAGIC, VERSION, VERSION_1, register, status};

/// Guest memory that the driver uses.
pub const MEMORY_BYTES: u64 = queue::COUNT as u64 * QUEUE_BYTES;
/// Of one queue: the rings, and the buffers behind them.
const QUEUE_BYTES: u64 = 0x1000 + QUEUE_SIZE as u64 * BUFFER_BYTES;
const BUFFER_BYTES: u64 = 256;
const DRIVER_RING: u64 = 0x400;
const DEVICE_RING: u64 = 0x800;

/// The device's registers.
pub trait Registers {
    /// A 32-bit read.
    fn read(&mut self, offset: u16) -> u32;
    /// A 32-bit write.
    fn write(&mut self, offset: u16, value: u32);
}

/// A driver, with the port found.
#[derive(Debug)]
pub struct Driver {
    rings: [Ring; queue::COUNT],
    /// The port's name.
    name: Vec<u8>,
    /// Whether the device's end of the port is open.
    is_host_open: bool,
}

/// The driver's side of a queue: its place, and how much was made available and seen used.
#[derive(Debug)]
struct Ring {
    base: u64,
    available: u16,
    used: u16,
}

impl Driver {
    /// Sets the device up and finds the port.
    ///
    /// # Panics
    /// When this is not our device, or it has no such port.
    pub fn start(registers: &mut impl Registers, memory: &impl GuestMemory, base: Gpa) -> Self {
        for (offset, value) in [(register::MAGIC, MAGIC), (register::VERSION, VERSION), (register::DEVICE, DEVICE)] {
            assert_eq!(registers.read(offset), value);
        }
        let mut done = 0;
        let mut step = |registers: &mut dyn Registers, bit| {
            done |= bit;
            registers.write(register::STATUS, done);
            registers.read(register::STATUS)
        };
        registers.write(register::STATUS, 0);
        step(registers, status::ACKNOWLEDGE);
        step(registers, status::DRIVER);
        for (half, wanted) in [(1, VERSION_1 >> 32), (0, MULTIPORT)] {
            registers.write(register::DEVICE_FEATURES_SELECT, half);
            let wanted = u32::try_from(wanted).expect("a half");
            assert_eq!(registers.read(register::DEVICE_FEATURES), wanted);
            registers.write(register::DRIVER_FEATURES_SELECT, half);
            registers.write(register::DRIVER_FEATURES, wanted);
        }
        assert_ne!(step(registers, status::FEATURES_OK) & status::FEATURES_OK, 0);
        let places: [u64; queue::COUNT] = array::from_fn(|number| base.0 + number as u64 * QUEUE_BYTES);
        let mut driver = Self {
            rings: places.map(|base| Ring { base, available: 0, used: 0 }),
            name: Vec::new(),
            is_host_open: false,
        };
        for (number, ring) in (0..).zip(&driver.rings) {
            set_up(registers, memory, number, ring.base);
        }
        assert_eq!(step(registers, status::DRIVER_OK) & status::NEEDS_RESET, 0);

        for number in [queue::CONTROL_RECEIVE, queue::PORT_RECEIVE] {
            for place in 0..QUEUE_SIZE {
                driver.offer(registers, memory, number, place, 256, true);
            }
        }
        driver.send_control(registers, memory, event::DEVICE_READY, 1);
        assert_eq!((driver.name.as_slice(), driver.is_host_open), (NAME.as_bytes(), true));
        driver
    }

    /// A process opens the port, or closes it.
    pub fn set_open(&mut self, registers: &mut impl Registers, memory: &impl GuestMemory, is_open: bool) {
        self.send_control(registers, memory, event::PORT_OPEN, is_open.into());
        if !is_open {
            let _ = self.read(registers, memory);
        }
    }

    /// The process writes. Returns how many of the bytes there was room for.
    pub fn write(&mut self, registers: &mut impl Registers, memory: &impl GuestMemory, bytes: &[u8]) -> usize {
        let ring = &mut self.rings[queue::PORT_TRANSMIT];
        ring.used = ring.device_index(memory);
        let mut done = 0;
        for chunk in bytes.chunks(usize::try_from(BUFFER_BYTES).expect("small")) {
            let ring = &self.rings[queue::PORT_TRANSMIT];
            if ring.available.wrapping_sub(ring.used) == QUEUE_SIZE {
                break;
            }
            let place = ring.available % QUEUE_SIZE;
            memory.write(ring.buffer(place), chunk).expect("there");
            let length = u32::try_from(chunk.len()).expect("small");
            self.offer(registers, memory, queue::PORT_TRANSMIT, place, length, false);
            done += chunk.len();
        }
        done
    }

    /// What has arrived for the process.
    pub fn read(&mut self, registers: &mut impl Registers, memory: &impl GuestMemory) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(bytes) = self.received(registers, memory, queue::PORT_RECEIVE) {
            all.extend(bytes);
        }
        all
    }

    /// Handles the device's interrupt. Returns whether it had a reason.
    pub fn interrupt(&mut self, registers: &mut impl Registers) -> bool {
        let reasons = registers.read(register::INTERRUPT_STATUS);
        registers.write(register::INTERRUPT_ACKNOWLEDGE, reasons);
        reasons != 0
    }

    fn send_control(&mut self, registers: &mut impl Registers, memory: &impl GuestMemory, event: u16, value: u16) {
        let ring = &self.rings[queue::CONTROL_TRANSMIT];
        let place = ring.available % QUEUE_SIZE;
        let mut message = [0; CONTROL_BYTES];
        message[..4].copy_from_slice(&PORT.to_le_bytes());
        message[4..6].copy_from_slice(&event.to_le_bytes());
        message[6..].copy_from_slice(&value.to_le_bytes());
        memory.write(ring.buffer(place), &message).expect("there");
        self.offer(registers, memory, queue::CONTROL_TRANSMIT, place, 8, false);
        let ring = &self.rings[queue::CONTROL_TRANSMIT];
        assert_eq!(ring.device_index(memory), ring.available, "used at once");

        while let Some(message) = self.received(registers, memory, queue::CONTROL_RECEIVE) {
            assert_eq!(message[..4], PORT.to_le_bytes());
            match u16::from_le_bytes([message[4], message[5]]) {
                event::PORT_ADD => self.send_control(registers, memory, event::PORT_READY, 1),
                event::PORT_NAME => self.name = message[CONTROL_BYTES..].to_vec(),
                event::PORT_OPEN => self.is_host_open = message[6] == 1,
                other => panic!("{other}"),
            }
        }
    }

    /// The bytes of the next buffer that was used, which is then offered again.
    fn received(
        &mut self,
        registers: &mut impl Registers,
        memory: &impl GuestMemory,
        number: usize,
    ) -> Option<Vec<u8>> {
        let ring = &mut self.rings[number];
        if ring.device_index(memory) == ring.used {
            return None;
        }
        let place = ring.used % QUEUE_SIZE;
        let mut entry = [0; 8];
        let at = ring.base + DEVICE_RING + 4 + u64::from(place) * 8;
        memory.read(Gpa(at), &mut entry).expect("there");
        ring.used = ring.used.wrapping_add(1);
        let [a, _, _, _, length @ ..] = entry;
        let length = u32::from_le_bytes(length);
        let mut bytes = alloc::vec![0; length as usize];
        memory.read(ring.buffer(a.into()), &mut bytes).expect("there");
        self.offer(registers, memory, number, a.into(), 256, true);
        Some(bytes)
    }

    /// Makes a buffer available.
    fn offer(
        &mut self,
        registers: &mut impl Registers,
        memory: &impl GuestMemory,
        number: usize,
        place: u16,
        length: u32,
        is_for_device: bool,
    ) {
        let ring = &mut self.rings[number];
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&ring.buffer(place).0.to_le_bytes());
        descriptor[8..12].copy_from_slice(&length.to_le_bytes());
        descriptor[12] = if is_for_device { 2 } else { 0 };
        memory.write(Gpa(ring.base + u64::from(place) * 16), &descriptor).expect("there");
        let entry = ring.base + DRIVER_RING + 4 + u64::from(ring.available % QUEUE_SIZE) * 2;
        memory.write(Gpa(entry), &place.to_le_bytes()).expect("there");
        ring.available = ring.available.wrapping_add(1);
        memory.write(Gpa(ring.base + DRIVER_RING + 2), &ring.available.to_le_bytes()).expect("there");
        registers.write(register::QUEUE_NOTIFY, u32::try_from(number).expect("small"));
    }
}

impl Ring {
    fn buffer(&self, place: u16) -> Gpa {
        Gpa(self.base + 0x1000 + u64::from(place) * BUFFER_BYTES)
    }

    fn device_index(&self, memory: &impl GuestMemory) -> u16 {
        let mut index = [0; 2];
        memory.read(Gpa(self.base + DEVICE_RING + 2), &mut index).expect("there");
        u16::from_le_bytes(index)
    }
}

fn set_up(registers: &mut impl Registers, memory: &impl GuestMemory, number: u32, base: u64) {
    memory.write(Gpa(base), &[0; 0x1000]).expect("there");
    registers.write(register::QUEUE_SELECT, number);
    assert_eq!(registers.read(register::QUEUE_SIZE_LIMIT), QUEUE_SIZE.into());
    assert_eq!(registers.read(register::QUEUE_READY), 0);
    registers.write(register::QUEUE_SIZE, QUEUE_SIZE.into());
    let places = [
        (register::QUEUE_DESCRIPTORS, base),
        (register::QUEUE_DRIVER, base + DRIVER_RING),
        (register::QUEUE_DEVICE, base + DEVICE_RING),
    ];
    for (offset, address) in places {
        #[expect(clippy::cast_possible_truncation, reason = "the halves of an address")]
        let halves = (address as u32, (address >> 32) as u32);
        registers.write(offset, halves.0);
        registers.write(offset + 4, halves.1);
    }
    registers.write(register::QUEUE_READY, 1);
    assert_eq!(registers.read(register::QUEUE_READY), 1);
}
