//! The rig that the tests share: a small guest memory and a device that writes down what it sees.

mod decode;
mod execute;
mod walk;

use crate::{CpuState, Device, Memory, Outcome, Width, emulate};
use addr::Gpa;
use core::cell::RefCell;

extern crate std;
use std::collections::BTreeMap;
use std::vec::Vec;

/// Where the tests put the instruction, 16 bytes before the end of a page.
const CODE: u64 = 0x1_0ff0;
/// The device's page.
const DEVICE: u64 = 0xfee0_0000;

/// Sparse memory in bytes; what was never written does not exist.
#[derive(Default)]
struct Ram(RefCell<BTreeMap<u64, u8>>);

impl Ram {
    fn put(&self, gpa: u64, bytes: &[u8]) {
        self.0.borrow_mut().extend((gpa..).zip(bytes.iter().copied()));
    }

    fn get<const N: usize>(&self, gpa: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(Gpa(gpa), &mut bytes).map(|()| bytes)
    }

    /// Code at [`CODE`], followed by no-operations to the end of the page.
    fn with_code(code: &[u8]) -> Self {
        let ram = Self::default();
        ram.put(CODE, &[0x90; 16]);
        ram.put(CODE, code);
        ram
    }
}

impl Memory for Ram {
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        assert!(gpa.0 % 4096 + bytes.len() as u64 <= 4096, "a read crosses a page");
        for (gpa, byte) in (gpa.0..).zip(bytes) {
            *byte = *self.0.borrow().get(&gpa)?;
        }
        Some(())
    }
    fn read_u32(&self, gpa: Gpa) -> Option<u32> {
        assert_eq!(gpa.0 % 4, 0);
        self.get(gpa.0).map(u32::from_le_bytes)
    }
    fn read_u64(&self, gpa: Gpa) -> Option<u64> {
        assert_eq!(gpa.0 % 8, 0);
        self.get(gpa.0).map(u64::from_le_bytes)
    }
    fn compare_exchange_u32(&self, gpa: Gpa, current: u32, new: u32) -> Option<bool> {
        let matches = self.read_u32(gpa)? == current;
        if matches {
            self.put(gpa.0, &new.to_le_bytes());
        }
        Some(matches)
    }
    fn compare_exchange_u64(&self, gpa: Gpa, current: u64, new: u64) -> Option<bool> {
        let matches = self.read_u64(gpa)? == current;
        if matches {
            self.put(gpa.0, &new.to_le_bytes());
        }
        Some(matches)
    }
}

/// One access that a device saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Read(u64, Width),
    Write(u64, Width, u64),
}

/// A device whose registers all read as `value`.
#[derive(Default)]
struct Register {
    value: u64,
    seen: Vec<Seen>,
}

impl Device for Register {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        self.seen.push(Seen::Read(gpa.0, width));
        self.value
    }
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        assert_eq!(width.truncate(value), value, "more than the width was written");
        self.seen.push(Seen::Write(gpa.0, width, value));
    }
}

/// 32-bit code without paging, at [`CODE`].
fn flat() -> CpuState {
    CpuState {
        gprs: [0; 16],
        rip: CODE,
        rflags: 2,
        segment_bases: [0; 6],
        cs_long: false,
        cs_default_32: true,
        cpl: 0,
        cr0: 1,
        cr3: 0,
        cr4: 0,
        efer: 0,
        physical_bits: 40,
    }
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
        if ram.get::<1>(table).is_none() {
            ram.put(table, &[0; 4096]);
        }
        ram.put(table + index * 8, &entry.to_le_bytes());
    }
    let (cr0, cr4, efer) = (0x8001_0001, 0x20, 0xd00);
    CpuState { cr0, cr3: 0x1000, cr4, efer, cs_long: true, cs_default_32: false, ..flat() }
}

/// Runs one 64-bit instruction with the device's page reported, RBX pointing to it and the other registers as given.
fn run_long(code: &[u8], prepare: impl FnOnce(&mut CpuState), value: u64) -> (CpuState, Vec<Seen>, Outcome) {
    let ram = Ram::with_code(code);
    let mut state = long(&ram);
    state.gprs[3] = DEVICE;
    prepare(&mut state);
    let mut device = Register { value, ..Register::default() };
    let outcome = emulate(&mut state, &ram, &mut device, Gpa(DEVICE));
    (state, device.seen, outcome)
}
