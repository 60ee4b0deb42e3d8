//! The emulator's side: the same instruction, from the same state.
//!
//! The window is a device, the code is RAM, and page tables map both at the process's addresses.

use crate::machine::{AROUND, CODE, CODE_BYTES, Case, Ended, PAGE, READ_ONLY, WINDOW, WINDOW_BYTES, WINDOW_END, index};
use crate::operands::{Confined, Operand, decode, operands};
use addr::Gpa;
use std::cell::Cell;
use x86_emulate::{
    Cause, CpuState, Device, Emulation, Exception, Memory, Mode, Outcome, Segment, SegmentRegister, Sites, Vendor,
    Walks, Width,
};

/// Where the page tables are: one of each level.
const TABLES: u64 = 0x1000;
const LEVELS: u64 = 4;

/// The emulator and all that it works on.
pub(crate) struct Emulator {
    ram: Ram,
    window: Window,
    walks: Walks<Ram>,
    sites: Sites<Ram>,
    vendor: Vendor,
}

/// How the emulator gets its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Fetch, decode, execute.
    Long,
    /// From its cache, if the instruction can be cached.
    Learnt,
}

/// An action of the emulator that no processor does.
pub(crate) type Misdeed = String;

impl Emulator {
    /// One that follows this vendor's rules.
    pub(crate) fn new(vendor: Vendor) -> Self {
        Self { ram: Ram::new(), window: Window::new(), walks: Walks::new(), sites: Sites::new(), vendor }
    }

    /// The window's bytes.
    pub(crate) fn window(&mut self) -> &mut [u8] {
        &mut self.window.bytes
    }

    /// Executes the case's instruction. `choose` gives the number of the operand at which the hardware stopped.
    ///
    /// # Errors
    /// An outcome that cannot be compared, or accesses that no processor makes.
    pub(crate) fn run(
        &mut self,
        case: &Confined,
        way: Way,
        mut choose: impl FnMut() -> usize,
    ) -> Result<(Ended, bool), Misdeed> {
        let case = case.case();
        let place = usize::from(case.place);
        self.ram.put_code(place, case.instruction());
        let mut state = CpuState { vendor: self.vendor, ..state(case) };
        let instruction = decode(case).ok_or("unknown")?;
        let mut was_learnt = false;

        let result = loop {
            let found = operands(case, &instruction, &state.gprs);
            let page = stopped_at(&found, choose()).unwrap_or(WINDOW);
            self.window.seen.clear();
            let mut emulation =
                Emulation::new(&mut state, &self.ram, &mut self.window, &mut self.walks, Cause::Access(Gpa(page)));
            let decoded = emulation.fetch().and_then(|fetched| Ok((fetched, emulation.decode(&fetched)?)));
            let outcome = match decoded {
                Err(outcome) => outcome,
                Ok((fetched, decoded)) => {
                    let repeated = if way == Way::Learnt {
                        // An instruction that comes only once is not cached.
                        emulation.cache_site(&mut self.sites, &fetched.window, &decoded);
                        emulation.cache_site(&mut self.sites, &fetched.window, &decoded);
                        emulation.repeat(&self.sites)
                    } else {
                        None
                    };
                    was_learnt |= repeated.is_some();
                    repeated.unwrap_or_else(|| emulation.execute(&decoded))
                }
            };
            self.window.check(&found, outcome == Outcome::Again || instruction.is_string_instruction())?;
            match outcome {
                Outcome::Again => {}
                Outcome::Done { length } if length == case.length => break None,
                Outcome::Fault(exception) if self.window.seen.is_empty() => break Some(exception),
                other => return Err(format!("{other:?} after {} accesses", self.window.seen.len())),
            }
        };
        self.ram.clear_code(place, case.instruction().len());
        Ok((Ended { gprs: state.gprs, rip: state.rip, flags: state.rflags, exception: result }, was_learnt))
    }
}

impl Emulator {
    /// The exception that the destination of a CMPS would cause with these registers, were there no source.
    pub(crate) fn exception_of_destination(&mut self, case: &Case, gprs: &[u64; 16]) -> Option<Exception> {
        const FROM_CMPS_TO_SCAS: u8 = 0xae - 0xa6;
        let mut scan = case.clone();
        scan.gprs = *gprs;
        scan.bytes[usize::from(case.length) - 1] += FROM_CMPS_TO_SCAS;
        let scan = Confined::new(scan)?;
        let (ended, _) = self.run(&scan, Way::Long, || 0).ok()?;
        ended.exception
    }
}

/// The page of the window at which an access can have stopped: one of the operands' pages.
fn stopped_at(operands: &[Option<Operand>; 2], choice: usize) -> Option<u64> {
    let ends = operands.iter().flatten().flat_map(|operand| {
        [operand.linear, operand.linear.wrapping_add(operand.bytes - 1)].map(|byte| byte / PAGE * PAGE)
    });
    let pages: Vec<u64> = ends.filter(|page| (WINDOW..WINDOW_END).contains(page)).collect();
    (!pages.is_empty()).then(|| pages[choice % pages.len()])
}

fn state(case: &Case) -> CpuState {
    const PROTECTED_PAGED: u64 = 0x8001_0001;
    const PHYSICAL_ADDRESS_EXTENSION: u64 = 0x20;
    const LONG_MODE_NO_EXECUTE: u64 = 0xd00;
    const ALWAYS: u64 = 0x202;
    let mut state = CpuState {
        gprs: case.gprs,
        rflags: case.flags | ALWAYS,
        cpl: 3,
        cr0: PROTECTED_PAGED,
        cr3: TABLES,
        cr4: PHYSICAL_ADDRESS_EXTENSION,
        efer: LONG_MODE_NO_EXECUTE,
        ..CpuState::flat(case.mode, case.rip())
    };
    for &segment in Segment::ALL {
        if case.mode != Mode::Bits64 {
            state.segments[segment as usize] = case.descriptor(segment).register();
        } else if matches!(segment, Segment::Fs | Segment::Gs) {
            state.segments[segment as usize] =
                SegmentRegister { base: case.base(segment), ..SegmentRegister::default() };
        }
    }
    state
}

/// RAM: tables and code.
struct Ram {
    tables: Vec<Cell<u64>>,
    code: Vec<Cell<u64>>,
}

impl Ram {
    fn new() -> Self {
        const PRESENT: u64 = 1 << 0;
        const WRITE: u64 = 1 << 1;
        const USER: u64 = 1 << 2;
        const ACCESSED: u64 = 1 << 5;
        const DIRTY: u64 = 1 << 6;
        const NO_EXECUTE: u64 = 1 << 63;
        let words = |bytes: u64| (0..bytes / 8).map(|_| Cell::new(0)).collect();
        let ram = Self { tables: words(LEVELS * PAGE), code: words(CODE_BYTES as u64) };
        let table = |level: u64| TABLES + (LEVELS - 1 - level) * PAGE;
        let set = |level: u64, linear: u64, entry: u64| {
            let index = linear >> (12 + 9 * level) & 0x1ff;
            ram.word(table(level) + index * 8).expect("a table").set(entry);
        };
        for level in 1..LEVELS {
            set(level, WINDOW, table(level - 1) | PRESENT | WRITE | USER | ACCESSED);
        }
        for linear in (WINDOW..WINDOW_END).step_by(0x1000) {
            let right = if linear < READ_ONLY { WRITE | DIRTY } else { 0 };
            set(0, linear, linear | PRESENT | USER | ACCESSED | NO_EXECUTE | right);
        }
        for linear in (CODE..CODE + CODE_BYTES as u64).step_by(0x1000) {
            set(0, linear, linear | PRESENT | USER | ACCESSED);
        }
        ram.clear_code(0, CODE_BYTES);
        ram
    }

    fn word(&self, gpa: u64) -> Option<&Cell<u64>> {
        let (words, start) = if gpa >= CODE { (&self.code, CODE) } else { (&self.tables, TABLES) };
        let index = usize::try_from(gpa.checked_sub(start)? / 8).ok()?;
        words.get(index)
    }

    fn byte(&self, gpa: u64) -> Option<u8> {
        Some(self.word(gpa)?.get().to_le_bytes()[index(gpa % 8)])
    }

    fn put_code(&self, place: usize, bytes: &[u8]) {
        for (gpa, &byte) in (CODE + place as u64..).zip(bytes) {
            let word = self.word(gpa).expect("code");
            let mut bytes = word.get().to_le_bytes();
            bytes[index(gpa % 8)] = byte;
            word.set(u64::from_le_bytes(bytes));
        }
    }

    fn clear_code(&self, place: usize, length: usize) {
        self.put_code(place, &vec![AROUND; length]);
    }
}

impl Memory for Ram {
    /// The word's address.
    type Word = u64;

    fn find(&self, gpa: Gpa) -> Option<u64> {
        self.word(gpa.0).map(|_| gpa.0 & !7)
    }
    fn load(&self, word: u64, ahead: usize) -> u64 {
        self.word(word + ahead as u64 * 8).expect("found before").get()
    }
    fn compare_exchange(&self, word: u64, current: u64, new: u64) -> bool {
        let word = self.word(word).expect("found before");
        let matches = word.get() == current;
        if matches {
            word.set(new);
        }
        matches
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        for (gpa, byte) in (gpa.0..).zip(bytes) {
            *byte = self.byte(gpa)?;
        }
        Some(())
    }
    /// Nothing here is written but by walks.
    fn write(&self, _: Gpa, _: &[u8]) -> Option<()> {
        None
    }
}

/// An access to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    gpa: u64,
    width: Width,
    writes: bool,
}

/// The window as a device.
struct Window {
    bytes: Vec<u8>,
    seen: Vec<Seen>,
}

impl Window {
    fn new() -> Self {
        Self { bytes: vec![0; WINDOW_BYTES], seen: Vec::new() }
    }

    /// The bytes of an access; none if it is not within a page of the window.
    fn access(&mut self, gpa: Gpa, width: Width, writes: bool) -> &mut [u8] {
        self.seen.push(Seen { gpa: gpa.0, width, writes });
        let bytes = index(width.bytes());
        let is_here = (WINDOW..WINDOW_END).contains(&gpa.0) && gpa.0 % PAGE + width.bytes() <= PAGE;
        if is_here { &mut self.bytes[index(gpa.0 - WINDOW)..][..bytes] } else { &mut [] }
    }

    /// Whether all accesses were to `operands`, and of one kind once to each byte. A repeated instruction goes further.
    fn check(&self, operands: &[Option<Operand>; 2], goes_further: bool) -> Result<(), Misdeed> {
        for (number, seen) in self.seen.iter().enumerate() {
            let (start, end) = (seen.gpa, seen.gpa + seen.width.bytes());
            let is_in_window = start >= WINDOW && end <= WINDOW_END && start / PAGE == (end - 1) / PAGE;
            if !is_in_window {
                return Err(format!("{seen:?}: beyond the window, or over the end of a page"));
            }
            if goes_further {
                continue;
            }
            let is_of = |operand: &Operand| operand.linear <= start && end <= operand.linear + operand.bytes;
            if !operands.iter().flatten().any(is_of) {
                return Err(format!("{seen:?}: not to an operand"));
            }
            let overlaps = |other: &Seen| {
                other.writes == seen.writes && other.gpa < end && start < other.gpa + other.width.bytes()
            };
            if self.seen[..number].iter().any(overlaps) {
                return Err(format!("{seen:?}: the same byte twice"));
            }
        }
        Ok(())
    }
}

impl Device for Window {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        let mut value = [0; 8];
        let bytes = self.access(gpa, width, false);
        value[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(value)
    }
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        let bytes = self.access(gpa, width, true);
        let length = bytes.len();
        bytes.copy_from_slice(&value.to_le_bytes()[..length]);
    }
    /// Ports are not asked for.
    fn read_port(&mut self, _: u16, _: Width) -> u64 {
        0
    }
    fn write_port(&mut self, _: u16, _: Width, _: u64) {}
}
