//! Shared parts of the tests: a small guest memory, and a device that records its accesses.

mod agree;
mod arithmetic;
mod atomic;
mod bits;
mod decode;
mod differential;
mod execute;
mod fetch;
mod fuzzed;
mod hostile;
mod operands;
mod ports;
mod random;
mod rights;
mod segments;
mod sites;
mod sound;
mod stack;
mod strings;
mod tables;
mod walk;
mod walks;

use crate as x86_emulate;
use std::vec::Vec;

use crate::{Cause, CpuState, Device, Exception, Memory, Mode, Outcome, Walks, Width, emulate};
use addr::Gpa;
use core::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

extern crate std;

/// Where the tests put the instruction, 16 bytes before the end of a page.
const CODE: u64 = 0x1_0ff0;
/// The device's page.
const DEVICE: u64 = 0xfee0_0000;
/// A page of RAM for data.
const DATA: u64 = 0x8000;

/// Numbers of general registers.
const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
const RSP: usize = 4;
const RBP: usize = 5;
const RSI: usize = 6;
const RDI: usize = 7;

const GENERAL_PROTECTION: Exception = Exception { vector: 13, error_code: 0, cr2: None };
const STACK_FAULT: Exception = Exception { vector: 12, error_code: 0, cr2: None };

/// Sparse memory: a page exists only if something was put there.
#[derive(Default)]
struct Ram {
    pages: RefCell<BTreeMap<u64, [u8; 4096]>>,
    read_only: BTreeSet<u64>,
}

impl Ram {
    fn put(&self, gpa: u64, bytes: &[u8]) {
        let mut pages = self.pages.borrow_mut();
        for (gpa, &byte) in (gpa..).zip(bytes) {
            pages.entry(gpa >> 12).or_insert([0; 4096])[offset(gpa)] = byte;
        }
    }

    fn get<const N: usize>(&self, gpa: u64) -> [u8; N] {
        core::array::from_fn(|at| {
            let gpa = gpa + at as u64;
            self.pages.borrow().get(&(gpa >> 12)).map_or(0, |page| page[offset(gpa)])
        })
    }

    fn get_u64(&self, gpa: u64) -> u64 {
        u64::from_le_bytes(self.get(gpa))
    }

    fn put_u64(&self, gpa: u64, value: u64) {
        self.put(gpa, &value.to_le_bytes());
    }

    /// Code at [`CODE`], followed by no-operations to the end of the page.
    fn with_code(code: &[u8]) -> Self {
        let ram = Self::default();
        ram.put(CODE, &[0x90; 16]);
        ram.put(CODE, code);
        ram
    }
}

fn offset(gpa: u64) -> usize {
    usize::try_from(gpa % 4096).expect("below a page")
}

impl Memory for Ram {
    /// The word's address.
    type Word = u64;

    fn find(&self, gpa: Gpa) -> Option<u64> {
        self.pages.borrow().contains_key(&(gpa.0 >> 12)).then_some(gpa.0 & !7)
    }
    fn load(&self, word: u64, ahead: usize) -> u64 {
        assert!(word % 4096 / 8 + (ahead as u64) < 512, "a word beyond the page");
        self.get_u64(word + ahead as u64 * 8)
    }
    fn compare_exchange(&self, word: u64, current: u64, new: u64) -> bool {
        let matches = self.get_u64(word) == current;
        if matches {
            self.put_u64(word, new);
        }
        matches
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        assert!(gpa.0 % 4096 + bytes.len() as u64 <= 4096, "a read crosses a page");
        let page = *self.pages.borrow().get(&(gpa.0 >> 12))?;
        bytes.copy_from_slice(&page[offset(gpa.0)..][..bytes.len()]);
        Some(())
    }
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        assert!(gpa.0 % 4096 + bytes.len() as u64 <= 4096, "a write crosses a page");
        self.find(gpa).filter(|word| !self.read_only.contains(&(word >> 12)))?;
        self.put(gpa.0, bytes);
        Some(())
    }
}

/// One access that a device saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Read(u64, Width),
    Write(u64, Width, u64),
    ReadPort(u16, Width),
    WritePort(u16, Width, u64),
}

/// A device whose registers and ports all read as `value`, which grows by `step` with each read.
#[derive(Default)]
struct Register {
    value: u64,
    step: u64,
    seen: Vec<Seen>,
}

impl Register {
    fn next(&mut self) -> u64 {
        let value = self.value;
        self.value = value.wrapping_add(self.step);
        value
    }
}

impl Device for Register {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        self.seen.push(Seen::Read(gpa.0, width));
        self.next()
    }
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        assert_eq!(width.truncate(value), value, "more than the width was written");
        self.seen.push(Seen::Write(gpa.0, width, value));
    }
    fn read_port(&mut self, port: u16, width: Width) -> u64 {
        assert!(width <= Width::Dword);
        self.seen.push(Seen::ReadPort(port, width));
        self.next()
    }
    fn write_port(&mut self, port: u16, width: Width, value: u64) {
        assert!(width <= Width::Dword);
        assert_eq!(width.truncate(value), value, "more than the width was written");
        self.seen.push(Seen::WritePort(port, width, value));
    }
}

/// 32-bit code without paging, at [`CODE`].
fn flat() -> CpuState {
    CpuState::flat(Mode::Bits32, CODE)
}

/// 64-bit code at [`CODE`]. Tables from 0x1000 on map the first 2 MiB and the device's 2 MiB one to one.
fn long(ram: &Ram) -> CpuState {
    for (table, index, entry) in [
        (0x1000, 0, 0x2007_u64),
        (0x2000, 0, 0x3007),
        (0x2000, 3, 0x4007),
        (0x3000, 0, 0x87),
        (0x4000, DEVICE >> 21 & 0x1ff, DEVICE | 0x87),
    ] {
        ram.put_u64(table + index * 8, entry);
    }
    let (cr0, cr4, efer) = (0x8001_0001, 0x20, 0xd00);
    CpuState { cr0, cr3: 0x1000, cr4, efer, ..CpuState::flat(Mode::Bits64, CODE) }
}

/// A guest that is about to execute one instruction.
struct Guest {
    ram: Ram,
    state: CpuState,
    device: Register,
    cause: Cause,
}

impl Guest {
    /// 64-bit code. The hardware reports the device's page, and RBX points to it.
    fn long(code: &[u8]) -> Self {
        let ram = Ram::with_code(code);
        let state = long(&ram);
        Self::of(ram, state)
    }

    /// Code without paging, outside 64-bit mode.
    fn flat(mode: Mode, code: &[u8]) -> Self {
        Self::of(Ram::with_code(code), CpuState::flat(mode, CODE))
    }

    fn of(ram: Ram, mut state: CpuState) -> Self {
        state.gprs[RBX] = DEVICE;
        Self { ram, state, device: Register::default(), cause: Cause::Access(Gpa(DEVICE)) }
    }

    fn set(mut self, register: usize, value: u64) -> Self {
        self.state.gprs[register] = value;
        self
    }

    fn run(&mut self) -> Outcome {
        emulate(&mut self.state, &self.ram, &mut self.device, self.cause)
    }

    /// Runs it to its end.
    fn done(mut self) -> Self {
        let outcome = self.run();
        assert!(matches!(outcome, Outcome::Done { .. }), "{outcome:?}");
        self
    }

    /// Runs it and checks that nothing changes.
    fn refused(&mut self) -> Outcome {
        let before = self.state.clone();
        let outcome = self.run();
        assert!(!matches!(outcome, Outcome::Done { .. } | Outcome::Again), "{outcome:?}");
        assert_eq!((&self.state, &self.device.seen[..]), (&before, &[][..]), "{outcome:?} with side effects");
        outcome
    }
}

/// Runs one 64-bit instruction. The hardware reports the device's page, RBX points to it, and `prepare` sets the rest.
fn run_long(code: &[u8], prepare: impl FnOnce(&mut CpuState), value: u64) -> (CpuState, Vec<Seen>, Outcome) {
    let mut guest = Guest::long(code);
    prepare(&mut guest.state);
    guest.device.value = value;
    let outcome = guest.run();
    (guest.state, guest.device.seen, outcome)
}

/// The result of a translation with a page fault.
fn page_fault(error_code: u32, address: u64) -> Result<Gpa, crate::Stop> {
    Err(crate::Stop::Fault(Exception { vector: 14, error_code, cr2: Some(address) }))
}

/// Translates without cached walks.
fn translate<M: Memory>(state: &CpuState, memory: &M, linear: u64, access: crate::Access) -> Result<Gpa, crate::Stop> {
    crate::translate(state, memory, &mut Walks::forgetful(), linear, access)
}
