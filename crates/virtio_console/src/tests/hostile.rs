//! Random drivers, some almost right, against what must always hold: no panic, no access outside of the driver's
//! memory that was not asked for, a limited amount of work for each call, silence after a mistake until a reset.

use alloc::vec;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};

use addr::Gpa;
use fastrand::Rng;

use crate::driver::{Driver, MEMORY_BYTES, Registers};
use crate::{Absent, Console, GuestMemory, QUEUE_SIZE};

const SEED: u64 = 0x5eed_0021;
const DRIVERS: usize = 3_000;
const STEPS: usize = 400;

const STATUS: u16 = 0x70;
const NEEDS_RESET: u32 = 64;

/// Guest memory with holes, which another vCPU of the guest changes between two accesses.
struct Memory<'a> {
    bytes: RefCell<Vec<u8>>,
    rng: &'a RefCell<Rng>,
    /// Of 256 accesses, after so many a byte changes.
    changes: Cell<u8>,
    accesses: Cell<usize>,
}

impl Memory<'_> {
    fn accessed(&self, gpa: Gpa, bytes: usize) -> Result<usize, Absent> {
        self.accesses.set(self.accesses.get() + 1);
        let rng = &mut *self.rng.borrow_mut();
        let mut memory = self.bytes.borrow_mut();
        if rng.u8(..) < self.changes.get() {
            corrupt(&mut memory, rng);
        }
        let start = usize::try_from(gpa.0).map_err(|_| Absent)?;
        start.checked_add(bytes).filter(|end| *end <= memory.len()).map(|_| start).ok_or(Absent)
    }
}

impl GuestMemory for Memory<'_> {
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Absent> {
        let start = self.accessed(gpa, into.len())?;
        into.copy_from_slice(&self.bytes.borrow()[start..start + into.len()]);
        Ok(())
    }

    fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Absent> {
        let start = self.accessed(gpa, from.len())?;
        self.bytes.borrow_mut()[start..start + from.len()].copy_from_slice(from);
        Ok(())
    }
}

/// Changes something small in the rings of a queue, mostly to a value that means something.
fn corrupt(memory: &mut [u8], rng: &mut Rng) {
    let queue = rng.usize(..6) * (usize::try_from(MEMORY_BYTES).expect("small") / 6);
    let at = queue + [rng.usize(..0x200), 0x400 + rng.usize(..0x48), 0x800 + rng.usize(..8)][rng.usize(..3)];
    memory[at] = [0, 1, 2, 3, 31, 32, 255, rng.u8(..)][rng.usize(..8)];
}

struct Rig<'a> {
    console: &'a mut Console,
    memory: &'a Memory<'a>,
}

impl Registers for Rig<'_> {
    fn read(&mut self, offset: u16) -> u32 {
        self.console.read(offset, 4)
    }

    fn write(&mut self, offset: u16, value: u32) {
        let _ = self.console.write(offset, 4, value, self.memory);
    }
}

/// The most accesses that a call may need: each chain has as many descriptors as the queue, each with its buffer, and
/// some words of the rings. A control message may have the other queues looked at besides.
const MOST_ACCESSES: usize = {
    let size = QUEUE_SIZE as usize;
    size * (2 * size + 8) + size * (size * 4 + 8) + 64
};

#[test]
fn random_drivers_break_nothing_but_themselves() {
    let rng = RefCell::new(Rng::with_seed(SEED));
    let (mut broken, mut sessions, mut moved) = (0, 0, 0);
    for _ in 0..DRIVERS {
        let memory = Memory {
            bytes: RefCell::new(vec![0; usize::try_from(MEMORY_BYTES).expect("small") + 64]),
            rng: &rng,
            changes: Cell::new(0),
            accesses: Cell::new(0),
        };
        let mut console = Console::new();
        let mut driver = Driver::start(&mut Rig { console: &mut console, memory: &memory }, &memory, Gpa(0));
        memory.changes.set(rng.borrow_mut().choice([0, 0, 1, 16]).expect("some"));
        for _ in 0..STEPS {
            let was_broken = console.read(STATUS, 4) & NEEDS_RESET != 0;
            memory.accesses.set(0);
            let mut buffer = vec![0; rng.borrow_mut().usize(..3000)];
            let step = rng.borrow_mut().u8(..16);
            match step {
                0 => corrupt(&mut memory.bytes.borrow_mut(), &mut rng.borrow_mut()),
                1 => {
                    let (offset, value) = random_write(&mut rng.borrow_mut());
                    let _ = console.write(offset, 4, value, &memory);
                }
                2..=6 => {
                    // Notifications, with what is in the rings by now.
                    let queue = rng.borrow_mut().u32(..8);
                    let _ = console.write(0x50, 4, queue, &memory);
                }
                7 | 8 => {
                    let is_open = rng.borrow_mut().u8(..4) != 0;
                    let place = rng.borrow_mut().usize(..32);
                    put_open(&mut memory.bytes.borrow_mut(), place, is_open);
                    let _ = console.write(0x50, 4, 3, &memory);
                }
                9 | 10 => {
                    if let Some(session) = console.look() {
                        moved += console.transmit(session, &buffer, &memory);
                        sessions += 1;
                    }
                }
                11 | 12 => {
                    if let Some(session) = console.look() {
                        let count = console.receive(session, &mut buffer, &memory);
                        assert!(count <= buffer.len());
                        moved += count;
                    }
                }
                13 => {
                    driver.interrupt(&mut Rig { console: &mut console, memory: &memory });
                }
                _ if console.look().is_some() && memory.changes.get() == 0 && !was_broken => {
                    // A driver that goes on as if nothing had been changed; its memory is there.
                    driver.write(&mut Rig { console: &mut console, memory: &memory }, &memory, &buffer);
                    memory.accesses.set(0);
                }
                _ => {}
            }
            assert!(memory.accesses.get() <= MOST_ACCESSES, "{} accesses in step {step}", memory.accesses.get());
            let is_broken = console.read(STATUS, 4) & NEEDS_RESET != 0;
            if is_broken {
                assert_eq!(console.look(), None, "a session of a device that needs a reset");
                broken += usize::from(!was_broken);
            }
            if was_broken && is_broken {
                assert_eq!(memory.accesses.get(), 0, "the memory of a driver that made a mistake, step {step}");
            }
        }
        // Whatever it was, a reset mends it.
        memory.changes.set(0);
        Driver::start(&mut Rig { console: &mut console, memory: &memory }, &memory, Gpa(0));
    }
    assert!(broken > DRIVERS / 10 && sessions > DRIVERS && moved > 1 << 20, "{broken} {sessions} {moved}");
}

/// A write to some register, mostly with a value that means something.
fn random_write(rng: &mut Rng) -> (u16, u32) {
    let offsets = [0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x64, STATUS, 0x80, 0x84, 0x90, 0xa0, 0xc0, 0x100];
    let offset = if rng.bool() { offsets[rng.usize(..offsets.len())] } else { rng.u16(..0x110) };
    let value = [0, 1, 2, 3, 5, 15, 32, 64, u32::MAX, rng.u32(..)][rng.usize(..10)];
    (offset, value)
}

/// Puts the message that the port is open, or closed, into the ring as the driver would, whatever the ring looks like.
fn put_open(bytes: &mut [u8], place: usize, is_open: bool) {
    const CONTROL_TRANSMIT: usize = 3;
    let base = CONTROL_TRANSMIT * (usize::try_from(MEMORY_BYTES).expect("small") / 6);
    let buffer = base + 0x1000 + place * 256;
    bytes[buffer..buffer + 8].copy_from_slice(&[1, 0, 0, 0, 6, 0, u8::from(is_open), 0]);
    let mut descriptor = [0; 16];
    descriptor[..8].copy_from_slice(&(buffer as u64).to_le_bytes());
    descriptor[8] = 8;
    bytes[base + place * 16..][..16].copy_from_slice(&descriptor);
    let index = u16::from_le_bytes([bytes[base + 0x402], bytes[base + 0x403]]);
    let entry = base + 0x404 + usize::from(index % 32) * 2;
    bytes[entry..entry + 2].copy_from_slice(&u16::try_from(place).expect("small").to_le_bytes());
    bytes[base + 0x402..base + 0x404].copy_from_slice(&index.wrapping_add(1).to_le_bytes());
}
