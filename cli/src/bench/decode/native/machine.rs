//! A small machine for the emulator: memory with page tables and code in it, one device register, vCPUs.

use std::sync::atomic::{AtomicU64, Ordering};

use addr::Gpa;
use x86_emulate::{CpuState, Device, Memory, Mode, Width};

/// Pages of memory: nothing, four levels of page tables, code.
const PAGES: usize = 6;
const WORDS: usize = 512;
/// The root of the page tables, and the tables below it, one page each.
pub(super) const ROOT: u64 = 0x1000;
/// Pages of a walk.
pub(super) const TABLES: [Gpa; 4] = [Gpa(ROOT), Gpa(ROOT + 0x1000), Gpa(ROOT + 0x2000), Gpa(ROOT + 0x3000)];
/// The page of the code, which is mapped one to one.
const CODE: u64 = 0x5000;
/// The filler between the instructions: NOP.
pub(super) const BETWEEN: u8 = 0x90;
/// Linear and physical address of the device's page.
const DEVICE_LINEAR: u64 = 0x10_0000;
const DEVICE_PAGE: Gpa = Gpa(0xfee0_0000);
/// The register.
pub(super) const DEVICE: Gpa = Gpa(DEVICE_PAGE.0 + 0xb0);
/// The value of its register.
pub(super) const VALUE: u64 = 0x0005_0014;

/// Present, writable, accessed, dirty.
const RIGHTS: u64 = 0x63;

/// An instruction that accesses the device, and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) name: &'static str,
    pub(super) code: &'static [u8],
    /// Its number, which is also its place on the page of the code.
    at: u64,
}

impl Form {
    const fn new(at: u64, name: &'static str, code: &'static [u8]) -> Self {
        Self { name, code, at }
    }

    /// Its address, virtual and physical.
    pub(super) const fn rip(self) -> u64 {
        CODE + 64 * self.at
    }
}

/// The forms that drivers use, in the order of their addresses. RDI and RSI hold the register's address.
pub(super) const FORMS: [Form; 8] = [
    Form::new(0, "mov eax, [rdi]", &[0x8b, 0x07]),
    Form::new(1, "mov [rdi], eax", &[0x89, 0x07]),
    Form::new(2, "mov dword [0x1000b0], 0 (EOI)", &[0xc7, 0x04, 0x25, 0xb0, 0x00, 0x10, 0x00, 0, 0, 0, 0]),
    Form::new(3, "mov eax, [rsi + 0]", &[0x8b, 0x46, 0x00]),
    Form::new(4, "mov r9d, [rdi + r8 * 4 + 0]", &[0x46, 0x8b, 0x8c, 0x87, 0, 0, 0, 0]),
    Form::new(5, "movzx eax, word [rdi]", &[0x0f, 0xb7, 0x07]),
    Form::new(6, "or dword [rdi], 0x10000", &[0x81, 0x0f, 0x00, 0x00, 0x01, 0x00]),
    Form::new(7, "xchg [rdi], eax", &[0x87, 0x07]),
];

/// Two places of the first form. A vCPU has room for the site of one of them only. So with both in turns, no access
/// finds its site.
pub(super) const NEW_PLACES: [u64; 2] = [CODE + 0x400, CODE + 0x640];

/// The memory of a VM.
pub(super) struct Ram(Box<[AtomicU64]>);

impl Ram {
    pub(super) fn new() -> Self {
        let ram = Self((0..PAGES * WORDS).map(|_| AtomicU64::new(0)).collect());
        // Root, and the two levels below it: everything is in the first entry.
        for table in 0..3 {
            let table = ROOT + 0x1000 * table;
            ram.set(table, (table + 0x1000) | RIGHTS);
        }
        let leaves = ROOT + 0x3000;
        ram.set(leaves + 8 * (CODE >> 12), CODE | RIGHTS);
        ram.set(leaves + 8 * (DEVICE_LINEAR >> 12), DEVICE_PAGE.0 | RIGHTS);
        for byte in 0..0x1000 {
            ram.write(Gpa(CODE + byte), &[BETWEEN]).expect("the page of the code is memory");
        }
        let elsewhere = NEW_PLACES.map(|rip| (rip, FORMS[0]));
        for (rip, form) in FORMS.map(|form| (form.rip(), form)).into_iter().chain(elsewhere) {
            ram.write(Gpa(rip), form.code).expect("the page of the code is memory");
        }
        ram
    }

    fn set(&self, gpa: u64, value: u64) {
        self.write(Gpa(gpa), &value.to_le_bytes()).expect("page tables are memory");
    }

    fn word(&self, gpa: Gpa) -> Option<&AtomicU64> {
        self.0.get(usize::try_from(gpa.0 / 8).ok()?)
    }
}

impl Memory for Ram {
    /// Its number.
    type Word = usize;

    #[inline]
    fn find(&self, gpa: Gpa) -> Option<usize> {
        usize::try_from(gpa.0 / 8).ok().filter(|&word| word < PAGES * WORDS)
    }

    #[inline]
    fn load(&self, word: usize, ahead: usize) -> u64 {
        self.0[word + ahead].load(Ordering::Relaxed)
    }

    #[inline]
    fn compare_exchange(&self, word: usize, current: u64, new: u64) -> bool {
        self.0[word].compare_exchange(current, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        for (gpa, byte) in (gpa.0..).zip(bytes) {
            let word = self.word(Gpa(gpa))?.load(Ordering::Relaxed);
            *byte = word.to_le_bytes()[usize::try_from(gpa % 8).ok()?];
        }
        Some(())
    }

    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        for (gpa, &byte) in (gpa.0..).zip(bytes) {
            let word = self.word(Gpa(gpa))?;
            let mut all = word.load(Ordering::Relaxed).to_le_bytes();
            all[usize::try_from(gpa % 8).ok()?] = byte;
            word.store(u64::from_le_bytes(all), Ordering::Relaxed);
        }
        Some(())
    }
}

/// The simplest possible device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Register {
    pub(super) reads: u64,
    pub(super) written: Option<u64>,
}

impl Device for Register {
    #[inline]
    fn read(&mut self, _: Gpa, width: Width) -> u64 {
        self.reads += 1;
        width.truncate(VALUE)
    }

    #[inline]
    fn write(&mut self, _: Gpa, _: Width, value: u64) {
        self.written = Some(value);
    }

    fn read_port(&mut self, _: u16, width: Width) -> u64 {
        width.truncate(u64::MAX)
    }

    fn write_port(&mut self, _: u16, _: Width, _: u64) {}
}

/// A vCPU in 64-bit mode, and its device.
pub(super) struct Vcpu {
    pub(super) cpu: CpuState,

    pub(super) device: Register,
}

impl Vcpu {
    pub(super) fn new() -> Self {
        const PAGING: u64 = 1 << 31;
        const PAE: u64 = 1 << 5;
        let mut cpu = CpuState::flat(Mode::Bits64, CODE);
        cpu.cr0 |= PAGING;
        cpu.cr4 |= PAE;
        cpu.cr3 = ROOT;
        let register = DEVICE_LINEAR + (DEVICE.0 - DEVICE_PAGE.0);
        // RSI and RDI hold the address; R8, the index of one form, stays zero.
        cpu.gprs[6] = register;
        cpu.gprs[7] = register;
        Self { cpu, device: Register::default() }
    }
}
