//! Corner cases, one by one. Random drivers are in [`hostile`].

mod hostile;

use alloc::vec;
use alloc::vec::Vec;
use core::cell::RefCell;

use addr::Gpa;

use crate::console::queue;
use crate::driver::{Driver, MEMORY_BYTES, Registers};
use crate::transport::{register, status};
use crate::{Absent, Console, GuestMemory, QUEUE_SIZE};

/// Guest memory from address 0 on.
struct Memory(RefCell<Vec<u8>>);

impl Memory {
    fn new() -> Self {
        Self(RefCell::new(vec![0; usize::try_from(MEMORY_BYTES).expect("small") + 0x10000]))
    }
}

impl GuestMemory for Memory {
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Absent> {
        let memory = self.0.borrow();
        let start = usize::try_from(gpa.0).map_err(|_| Absent)?;
        let from = memory.get(start..).and_then(|from| from.get(..into.len())).ok_or(Absent)?;
        into.copy_from_slice(from);
        Ok(())
    }

    fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Absent> {
        let mut memory = self.0.borrow_mut();
        let start = usize::try_from(gpa.0).map_err(|_| Absent)?;
        let into = memory.get_mut(start..).and_then(|into| into.get_mut(..from.len())).ok_or(Absent)?;
        into.copy_from_slice(from);
        Ok(())
    }
}

/// A device, and how often the host was told to look.
struct Rig<'a> {
    console: Console,
    memory: &'a Memory,
    told: usize,
}

impl Registers for Rig<'_> {
    fn read(&mut self, offset: u16) -> u32 {
        self.console.read(offset, 4)
    }

    fn write(&mut self, offset: u16, value: u32) {
        self.told += usize::from(self.console.write(offset, 4, value, self.memory));
    }
}

fn rig(memory: &Memory) -> Rig<'_> {
    Rig { console: Console::new(), memory, told: 0 }
}

/// Where the driver has its rings of a queue.
fn rings(number: usize) -> (u64, u64, u64) {
    let base = number as u64 * (MEMORY_BYTES / queue::COUNT as u64);
    (base, base + 0x400, base + 0x800)
}

fn needs_reset(rig: &mut Rig<'_>) -> bool {
    rig.read(register::STATUS) & status::NEEDS_RESET != 0
}

/// A started driver whose process has opened the port.
fn opened(memory: &Memory) -> (Rig<'_>, Driver) {
    let mut rig = rig(memory);
    let mut driver = Driver::start(&mut rig, memory, Gpa(0));
    driver.set_open(&mut rig, memory, true);
    (rig, driver)
}

#[test]
fn bytes_go_both_ways_while_a_process_has_the_port_open() {
    let memory = Memory::new();
    let mut rig = rig(&memory);
    let mut driver = Driver::start(&mut rig, &memory, Gpa(0));
    assert_eq!((rig.console.look(), rig.told), (None, 0));
    driver.set_open(&mut rig, &memory, true);
    assert_eq!(rig.told, 1, "the host is told of the session");
    let session = rig.console.look().expect("a process has opened the port");

    let sent: Vec<u8> = (0..1000).map(|number| (number % 251) as u8).collect();
    assert_eq!(driver.write(&mut rig, &memory, &sent), sent.len());
    assert_eq!(rig.told, 2, "once, however many buffers come before the host looks");
    let mut got: Vec<u8> = Vec::new();
    let mut piece = [0; 7];
    loop {
        let count = rig.console.receive(session, &mut piece, &memory);
        got.extend(&piece[..count]);
        if count < piece.len() {
            break;
        }
    }
    assert_eq!(got, sent);
    assert!(rig.console.interrupt() && driver.interrupt(&mut rig) && !rig.console.interrupt());

    assert_eq!(rig.console.transmit(session, &sent, &memory), sent.len());
    assert!(driver.interrupt(&mut rig));
    assert_eq!(driver.read(&mut rig, &memory), sent);
}

#[test]
fn bytes_without_a_buffer_stay_with_the_host_which_is_told_of_the_next_buffer() {
    let memory = Memory::new();
    let (mut rig, mut driver) = opened(&memory);
    let session = rig.console.look().expect("open");
    let much = vec![7; 10_000];
    let room = usize::from(QUEUE_SIZE) * 256;
    assert_eq!(rig.console.transmit(session, &much, &memory), room);
    assert_eq!(rig.console.transmit(session, &much, &memory), 0);
    let told = rig.told;
    assert_eq!(driver.read(&mut rig, &memory).len(), room);
    assert_eq!(rig.told, told + 1);
}

#[test]
fn what_a_process_leaves_behind_is_not_the_next_ones() {
    let memory = Memory::new();
    let (mut rig, mut driver) = opened(&memory);
    let first = rig.console.look().expect("open");
    driver.write(&mut rig, &memory, &[1; 600]);
    assert_eq!(rig.console.receive(first, &mut [0; 100], &memory), 100);
    driver.set_open(&mut rig, &memory, false);
    assert_eq!(rig.console.look(), None);
    assert_eq!(rig.console.transmit(first, b"late", &memory), 0);
    driver.set_open(&mut rig, &memory, true);
    let second = rig.console.look().expect("open again");
    assert_ne!(first, second);
    assert_eq!(rig.console.receive(second, &mut [0; 100], &memory), 0);
    assert_eq!(rig.console.receive(first, &mut [0; 100], &memory), 0);
    driver.write(&mut rig, &memory, b"new");
    let mut got = [0; 100];
    let count = rig.console.receive(second, &mut got, &memory);
    assert_eq!(&got[..count], b"new");
    assert!(!needs_reset(&mut rig));
}

#[test]
fn reset_ends_the_session_and_the_device_can_be_set_up_again() {
    let memory = Memory::new();
    let (mut rig, _) = opened(&memory);
    let before = rig.console.look();
    rig.write(register::STATUS, 0);
    assert_eq!((rig.console.look(), rig.console.interrupt()), (None, false));
    let mut driver = Driver::start(&mut rig, &memory, Gpa(0));
    driver.set_open(&mut rig, &memory, true);
    assert!(rig.console.look().is_some_and(|session| Some(session) != before));
}

#[test]
fn driver_that_does_not_accept_all_features_is_refused() {
    let memory = Memory::new();
    let mut rig = rig(&memory);
    rig.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER);
    rig.write(register::DRIVER_FEATURES_SELECT, 1);
    rig.write(register::DRIVER_FEATURES, 1);
    rig.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
    assert_eq!(rig.read(register::STATUS), status::ACKNOWLEDGE | status::DRIVER);
}

#[test]
fn notification_before_driver_ok_uses_nothing() {
    let memory = Memory::new();
    let mut rig = rig(&memory);
    rig.write(register::QUEUE_SELECT, 3);
    rig.write(register::QUEUE_SIZE, 8);
    rig.write(register::QUEUE_DRIVER, 0x400);
    rig.write(register::QUEUE_DEVICE, 0x800);
    rig.write(register::QUEUE_READY, 1);
    memory.write(Gpa(0x402), &1_u16.to_le_bytes()).expect("there");
    rig.write(register::QUEUE_NOTIFY, 3);
    assert_eq!(memory.0.borrow()[0x802], 0);
    assert!(!needs_reset(&mut rig));
}

#[test]
fn impossible_queues_need_a_reset() {
    for (size, descriptors, driver, device) in
        [(0, 0, 0, 0), (3, 0, 0, 0), (64, 0, 0, 0), (8, 8, 0, 0), (8, 0, 1, 0), (8, 0, 0, 2), (8, !15, 0, 0)]
    {
        let memory = Memory::new();
        let mut rig = rig(&memory);
        rig.write(register::QUEUE_SELECT, 3);
        let upper = if descriptors > 0x1000 { u32::MAX } else { 0 };
        let writes = [
            (register::QUEUE_SIZE, size),
            (register::QUEUE_DESCRIPTORS, descriptors),
            (register::QUEUE_DESCRIPTORS + 4, upper),
            (register::QUEUE_DRIVER, driver),
            (register::QUEUE_DEVICE, device),
            (register::QUEUE_READY, 1),
        ];
        writes.into_iter().for_each(|(offset, value)| rig.write(offset, value));
        assert!(needs_reset(&mut rig), "{size} {descriptors:#x} {driver} {device}");
        assert_eq!(rig.read(register::QUEUE_READY), 0);
        assert!(!rig.console.interrupt(), "before DRIVER_OK");
    }
}

#[test]
fn queue_that_is_enabled_does_not_move() {
    let memory = Memory::new();
    let (mut rig, mut driver) = opened(&memory);
    let session = rig.console.look().expect("open");
    rig.write(register::QUEUE_SELECT, 5);
    rig.write(register::QUEUE_SIZE, 2);
    rig.write(register::QUEUE_DESCRIPTORS, 0x10);
    driver.write(&mut rig, &memory, b"here");
    assert_eq!(rig.console.receive(session, &mut [0; 8], &memory), 4);
}

/// Makes one chain available in the port's transmit queue, and has the host read. Returns the number of bytes.
fn sent_by_chain(chain: &[(u64, u32, u16, u16)]) -> (usize, bool) {
    let memory = Memory::new();
    let (mut rig, _) = opened(&memory);
    let session = rig.console.look().expect("open");
    let (descriptors, driver, _) = rings(queue::PORT_TRANSMIT);
    for (place, (address, length, flags, next)) in (0..).zip(chain) {
        let word =
            u128::from(*address) | u128::from(*length) << 64 | u128::from(*flags) << 96 | u128::from(*next) << 112;
        memory.write(Gpa(descriptors + place * 16), &word.to_le_bytes()).expect("there");
    }
    memory.write(Gpa(driver), &[0, 0, 1, 0, 0, 0]).expect("there");
    rig.write(register::QUEUE_NOTIFY, 5);
    let count = rig.console.receive(session, &mut [0; 100], &memory);
    let is_broken = needs_reset(&mut rig);
    assert_eq!(rig.console.look().is_none(), is_broken);
    assert_eq!(is_broken, rig.read(register::INTERRUPT_STATUS) & 2 != 0, "the driver is told");
    (count, is_broken)
}

#[test]
fn chains_of_all_shapes() {
    const NEXT: u16 = 1;
    assert_eq!(sent_by_chain(&[(0, 0, 0, 0)]), (0, false), "an empty buffer");
    assert_eq!(sent_by_chain(&[(0, 4, NEXT, 1), (0, 0, NEXT, 2), (0, 3, 0, 0)]), (7, false));
    assert_eq!(sent_by_chain(&[(0, 99, NEXT, 1), (8, 99, 0, 0)]), (100, false), "read in part");
    let mistakes: [&[(u64, u32, u16, u16)]; 8] = [
        // A loop of empty buffers; one descriptor that is its own next.
        &[(0, 0, NEXT, 1), (0, 0, NEXT, 0)],
        &[(0, 0, NEXT, 0)],
        // Outside of the table, and the last number.
        &[(0, 4, NEXT, QUEUE_SIZE)],
        &[(0, 4, NEXT, u16::MAX)],
        // For writing, indirect.
        &[(0, 4, 2, 0)],
        &[(0, 16, 4, 0)],
        // No memory; the end of the address space.
        &[(1 << 40, 4, 0, 0)],
        &[(u64::MAX - 1, u32::MAX, 0, 0)],
    ];
    for chain in mistakes {
        assert_eq!(sent_by_chain(chain), (0, true), "{chain:x?}");
    }
}

#[test]
fn index_that_jumps_and_a_head_outside_of_the_table_need_a_reset() {
    for (index, head) in [(QUEUE_SIZE + 1, 0), (u16::MAX, 0), (1, QUEUE_SIZE), (1, u16::MAX)] {
        let memory = Memory::new();
        let (mut rig, _) = opened(&memory);
        let session = rig.console.look().expect("open");
        let (_, driver, _) = rings(queue::PORT_TRANSMIT);
        let [[a, b], [c, d]] = [index, head].map(u16::to_le_bytes);
        memory.write(Gpa(driver), &[0, 0, a, b, c, d]).expect("there");
        assert_eq!(rig.console.receive(session, &mut [0; 100], &memory), 0);
        assert!(needs_reset(&mut rig), "{index} {head}");
    }
}

#[test]
fn driver_that_wants_no_interrupts_gets_none() {
    let memory = Memory::new();
    let (mut rig, mut driver) = opened(&memory);
    let session = rig.console.look().expect("open");
    driver.interrupt(&mut rig);
    let (_, ring, _) = rings(queue::PORT_RECEIVE);
    memory.write(Gpa(ring), &1_u16.to_le_bytes()).expect("there");
    assert_eq!(rig.console.transmit(session, b"quiet", &memory), 5);
    assert!(!rig.console.interrupt());
    assert_eq!(driver.read(&mut rig, &memory), b"quiet");
}

#[test]
fn queue_that_is_disabled_is_left_alone() {
    let memory = Memory::new();
    let (mut rig, mut driver) = opened(&memory);
    let session = rig.console.look().expect("open");
    driver.write(&mut rig, &memory, &[1; 600]);
    assert_eq!(rig.console.receive(session, &mut [0; 10], &memory), 10);
    rig.write(register::QUEUE_SELECT, 5);
    rig.write(register::QUEUE_READY, 0);
    let before = memory.0.borrow().clone();
    assert_eq!(rig.console.receive(session, &mut [0; 100], &memory), 0);
    rig.write(register::QUEUE_NOTIFY, 5);
    assert_eq!(before, *memory.0.borrow());
    assert!(!needs_reset(&mut rig));
}

#[test]
fn other_widths_find_no_register_but_parts_of_the_configuration() {
    let memory = Memory::new();
    let mut console = Console::new();
    for (offset, bytes) in [(0, 1), (0, 2), (2, 2), (0, 8), (1, 4), (0xffc, 4)] {
        assert_eq!(console.read(offset, bytes), 0, "{offset:#x} {bytes}");
    }
    assert!(!console.write(register::QUEUE_SELECT, 1, 3, &memory) && !console.write(0x104, 4, 3, &memory));
    assert_eq!(console.read(register::QUEUE_SIZE_LIMIT, 4), 32);
    assert_eq!([1, 2, 4].map(|bytes| console.read(0x104, bytes)), [2; 3]);
    assert_eq!(console.read(0x10a, 4), 0);
}
