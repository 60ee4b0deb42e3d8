//! Rules of every emulation, checked on arbitrary machines: states, tables, code, and causes of the exit.
//!
//! Used with pseudorandom numbers, and with the bytes of a fuzzer (`fuzzed.rs`).

use super::random::Source;
use super::std::vec::Vec;
use super::x86_emulate::{
    BATCH, Base, Cause, Cpu, CpuState, Device, Exception, Instruction, Memory, Mode, Operation, Outcome,
    SegmentRegister, Walks, Width, decode, emulate, execute, fetch, fetch_whole,
};
use addr::Gpa;
use core::cell::{Cell, RefCell};

/// Pages of RAM at guest physical 0. Everything else is devices.
const PAGES: u64 = 16;
/// Page of code; code may continue on the next page.
const CODE: u64 = 0xc;
/// Last page of RAM, which is read-only.
const ROM: u64 = PAGES - 1;
/// Data.
const DATA: u64 = 0xe;
/// The device's page number.
const DEVICE: u64 = 0x1_2345;

/// RAM that counts accesses and knows which are allowed.
pub(crate) struct Bench {
    words: RefCell<Vec<u64>>,
    writes: Cell<u32>,
    /// Number of entries that another processor changes during the walk.
    contention: Cell<usize>,
}

impl Bench {
    fn read_byte(&self, gpa: u64) -> u8 {
        let word = self.words.borrow()[index(gpa)];
        word.to_le_bytes()[index(gpa % 8 * 8)]
    }

    fn set_word(&self, gpa: u64, value: u64) {
        self.words.borrow_mut()[index(gpa)] = value;
    }

    fn put(&self, gpa: u64, bytes: &[u8]) {
        for (gpa, &byte) in (gpa..).zip(bytes) {
            let mut word = self.words.borrow()[index(gpa)].to_le_bytes();
            word[index(gpa % 8 * 8)] = byte;
            self.set_word(gpa, u64::from_le_bytes(word));
        }
    }

    fn is_ram(gpa: Gpa) -> bool {
        gpa.0 >> 12 < PAGES
    }
}

/// Index of the word at an address.
fn index(gpa: u64) -> usize {
    usize::try_from(gpa / 8).expect("small")
}

impl Memory for Bench {
    type Word = u64;

    fn find(&self, gpa: Gpa) -> Option<u64> {
        Self::is_ram(gpa).then_some(gpa.0 & !7)
    }
    fn load(&self, word: u64, ahead: usize) -> u64 {
        assert!(word % 4096 / 8 + (ahead as u64) < 512, "a word beyond the page");
        self.words.borrow()[index(word) + ahead]
    }
    fn compare_exchange(&self, word: u64, current: u64, new: u64) -> bool {
        if self.contention.get() > 0 {
            self.contention.set(self.contention.get() - 1);
            return false;
        }
        assert_eq!(self.words.borrow()[index(word)], current);
        let added = current ^ new;
        assert_eq!((new & !current, added & !0x60_0000_0060), (added, 0), "more than Accessed and Dirty is set");
        self.set_word(word, new);
        true
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        assert!(gpa.0 % 4096 + bytes.len() as u64 <= 4096, "a read crosses a page");
        Self::is_ram(gpa).then(|| {
            for (gpa, byte) in (gpa.0..).zip(bytes) {
                *byte = self.read_byte(gpa);
            }
        })
    }
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        assert!(gpa.0 % 4096 + bytes.len() as u64 <= 4096, "a write crosses a page");
        (Self::is_ram(gpa) && gpa.0 >> 12 != ROM).then(|| {
            self.writes.set(self.writes.get() + 1);
            self.put(gpa.0, bytes);
        })
    }
}

/// One access to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    place: u64,
    width: Width,
    is_port: bool,
    written: Option<u64>,
}

/// Devices whose answers depend on address and time of the access.
#[derive(Default)]
pub(crate) struct Log {
    seen: Vec<Seen>,
}

impl Log {
    fn note(&mut self, place: u64, width: Width, is_port: bool, written: Option<u64>) -> u64 {
        self.seen.push(Seen { place, width, is_port, written });
        (place + self.seen.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl Device for Log {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        self.note(gpa.0, width, false, None)
    }
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        assert_eq!(width.truncate(value), value, "more than the width was written");
        self.note(gpa.0, width, false, Some(value));
    }
    fn read_port(&mut self, port: u16, width: Width) -> u64 {
        assert!(width <= Width::Dword);
        self.note(port.into(), width, true, None)
    }
    fn write_port(&mut self, port: u16, width: Width, value: u64) {
        assert!(width <= Width::Dword);
        assert_eq!(width.truncate(value), value, "more than the width was written");
        self.note(port.into(), width, true, Some(value));
    }
}

/// A machine about to emulate.
pub(crate) struct Arbitrary {
    pub(crate) memory: Bench,
    pub(crate) state: CpuState,
    pub(crate) cause: Cause,
}

/// Linear addresses that often matter: of device, data, code, ROM, unmapped memory, and their ends.
fn address(source: &mut impl Source) -> u64 {
    let page = source.pick(&[DEVICE, DEVICE, DEVICE + 1, DATA, DATA + 1, CODE, ROM, 0x1_2344, 0x1_0000, 0, 0xf_ffff]);
    let random = source.word() % 4096;
    let offset = source.pick(&[0, 0, 8, 0x100, 0xffc, 0xfff, random]);
    match source.below(24) {
        0 => source.word(),
        1 => (1 << 47) - source.word() % 16,
        _ => page << 12 | offset,
    }
}

impl Bench {
    fn empty() -> Self {
        let words = core::iter::repeat_n(0, index(PAGES << 12)).collect();
        Self { words: RefCell::new(words), writes: Cell::new(0), contention: Cell::new(0) }
    }

    /// Tables with this many levels, none for zero. Page 4 maps the lowest pages and page 5 those around the device,
    /// all one to one. There are large pages too.
    fn map(&self, state: &mut CpuState, levels: u32) {
        const USER: u64 = 7;
        const LARGE: u64 = 0x87;
        if levels == 0 {
            return;
        }
        state.cr0 |= 1 << 31;
        if levels == 2 {
            state.cr3 = 0x1000;
            let set = |table: u64, index: u64, entry: u64| {
                self.put((table << 12) + index * 4, &entry.to_le_bytes()[..4]);
            };
            for (index, entry) in
                [(0, 0x4000 | USER), (0x48, 0x5000 | USER), (0x40, 0x1000_0000 | LARGE), (0x3ff, 0xffc0_0000 | LARGE)]
            {
                set(1, index, entry);
            }
            for page in 0..PAGES {
                set(4, page, page << 12 | USER);
                let near = DEVICE - PAGES / 2 + page;
                set(5, near % 1024, near << 12 | USER);
            }
            return;
        }
        state.cr4 |= 1 << 5;
        let set = |table: u64, index: u64, entry: u64| self.set_word((table << 12) + index * 8, entry);
        let pointer = if levels == 3 { 1 } else { USER };
        if levels == 4 {
            state.efer |= 1 << 10;
            set(1, 0, 0x2000 | USER);
        }
        state.cr3 = if levels == 4 { 0x1000 } else { 0x2000 };
        set(2, 0, 0x3000 | pointer);
        set(2, 3, 0x6000 | pointer);
        set(3, 0, 0x4000 | USER);
        set(3, DEVICE >> 9, 0x5000 | USER);
        set(3, 0x80, 0x1000_0000 | LARGE);
        set(6, 511, 0xffe0_0000 | LARGE);
        for page in 0..PAGES {
            set(4, page, page << 12 | USER);
            let near = DEVICE - PAGES / 2 + page;
            set(5, near % 512, near << 12 | USER);
        }
    }

    /// Moves some of the pages, and changes a few bits of entries.
    fn spoil(&self, source: &mut impl Source) {
        let flip = |gpa: u64, bits: u64| {
            let word = self.load(gpa & !7, 0);
            self.set_word(gpa, word ^ bits);
        };
        let of_page =
            |page: u64| if page >> 9 == DEVICE >> 9 { 0x5000 + page % 512 * 8 } else { 0x4000 + page % 512 * 8 };
        if source.rarely(2) {
            let to = source.pick(&[DEVICE, DEVICE + 8, DATA, DATA - 1, ROM, 0x500]);
            let from = source.pick(&[DEVICE + 1, DATA + 1, DATA, DEVICE]);
            flip(of_page(from), (from ^ to) << 12);
        }
        if source.rarely(3) {
            let tables = [0x1000, 0x2000, 0x2018, 0x3000, 0x3000 + (DEVICE >> 9) * 8, 0x3400, 0x6ff8];
            let leaves = [DEVICE, DEVICE + 1, DATA, DATA + 1, CODE + 1, ROM].map(of_page);
            let entry = if source.rarely(2) { source.pick(&tables) } else { source.pick(&leaves) };
            flip(entry, 1 << source.pick(&[0, 1, 1, 2, 2, 5, 6, 7, 12, 13, 20, 31, 40, 51, 52, 59, 60, 62, 63]));
        }
    }
}

/// Changes everything about a vCPU that keeps it usable.
fn make_arbitrary(state: &mut CpuState, source: &mut impl Source) {
    for bit in [16, 18].into_iter().filter(|_| source.rarely(3)) {
        state.cr0 ^= 1 << bit;
    }
    for (bit, one_in) in [(4, 4), (20, 16), (21, 8), (22, 4)] {
        if source.rarely(one_in) {
            state.cr4 ^= 1 << bit;
        }
    }
    state.efer |= (source.word() & 1) << 11;
    state.cpl = source.pick(&[0, 0, 3, 3, 1]);
    state.rflags = 2 | source.word() & 0x1_0cd5 | if source.rarely(4) { 1 << 18 } else { 0 };
    state.pkru = if source.rarely(4) { source.half() } else { 0 };
    if state.mode() == Mode::Bits16 && state.cr0 >> 31 == 0 && source.rarely(2) {
        state.cr0 &= !1;
    }
    for at in 0..6 {
        if source.rarely(6) {
            let attributes = source.pick(&[0x93, 0x91, 0x97, 0x9b, 0x99, 0x13, 0x493, 0x497]);
            let limit = source.pick(&[0xffff, u32::MAX, 0xfff, 0, 0x1234_5104]);
            let base = source.pick(&[0, 0x10, 0xffff_fff0, DEVICE << 12, DATA << 12]);
            // Code stays mapped, or nothing would be executed at all.
            if at != 1 {
                state.segments[at] = SegmentRegister { base, limit, attributes };
            }
        }
    }
    if state.mode() == Mode::Bits16 {
        for (at, base) in [0xe << 12, 0, 0xe << 12, DEVICE << 12, 0xe << 12, DEVICE << 12].into_iter().enumerate() {
            state.segments[at].base = base;
        }
    }
}

/// Sets the registers so that the instruction's operands are at existing memory or devices.
fn aim(state: &mut CpuState, code: &[u8], source: &mut impl Source) {
    for register in [4, 6, 7] {
        state.gprs[register] = address(source);
    }
    let Ok(instruction) = decode(state.mode(), code) else { return };
    let Instruction { address: place, displacement, register, .. } = instruction;
    // A bit number, if the instruction has one.
    state.gprs[usize::from(register.number)] = source.word() % 4096;
    if let Some(index) = place.index {
        state.gprs[usize::from(index.register)] = source.word() % 8;
    }
    if let Some(Base::Register(base)) = place.base {
        let scaled = place.index.map_or(0, |index| state.gprs[usize::from(index.register)] * u64::from(index.scale));
        let segment = state.segments[place.segment as usize].base;
        let target = if source.rarely(3) { address(source) } else { (DEVICE << 12) + source.word() % 4096 };
        state.gprs[usize::from(base)] = target.wrapping_sub(displacement.wrapping_add(scaled).wrapping_add(segment));
    }
}

impl Arbitrary {
    /// A machine in one of the paging modes. Its tables map low pages one to one, except for random changes.
    pub(crate) fn new(code: &[u8], source: &mut impl Source) -> Self {
        let mode = source.pick(&[Mode::Bits64, Mode::Bits64, Mode::Bits32, Mode::Bits16]);
        let mut state = CpuState::flat(mode, CODE << 12 | 0x800);
        let memory = Bench::empty();
        state.efer = 0;
        let levels = if mode == Mode::Bits64 { 4 } else { source.pick(&[0, 2, 3, 4]) };
        memory.map(&mut state, levels);
        memory.spoil(source);
        make_arbitrary(&mut state, source);
        memory.put(DATA << 12, &source.bytes());
        for register in &mut state.gprs {
            *register = match source.below(6) {
                0 => source.word(),
                1 => source.word() % 70,
                _ => address(source),
            };
        }
        if !source.rarely(4) {
            aim(&mut state, code, source);
        }
        if source.rarely(4) {
            state.rip = ((CODE + 1) << 12) - source.below(16) as u64;
        }
        memory.put(state.rip, code);
        let cause = match source.below(8) {
            0 => Cause::Port,
            1 => Cause::Access(Gpa(address(source))),
            2 => Cause::Access(Gpa(DATA << 12)),
            _ => Cause::Access(Gpa((DEVICE << 12) + source.word() % 4096)),
        };
        Self { memory, state, cause }
    }

    /// Runs one emulation and checks the rules.
    pub(crate) fn check(self, source: &mut impl Source) -> Outcome {
        let Self { memory, state: before, cause } = self;
        let (words, mut state, mut log) = (memory.words.borrow().clone(), before.clone(), Log::default());
        let is_contended = source.rarely(16);
        memory.contention.set(if is_contended { source.below(12) } else { 0 });
        let outcome = emulate(&mut state, &memory, &mut log, cause);
        memory.contention.set(0);

        // The same once more, with walks cached earlier: the same outcome, the same accesses.
        if memory.writes.get() == 0 && !is_contended {
            let mut walks = Walks::new();
            for _ in 0..2 {
                let (mut again, mut second) = (before.clone(), Log::default());
                assert_eq!(in_steps(&mut again, &memory, &mut second, &mut walks, cause), outcome);
                assert_eq!((&again, &second.seen), (&state, &log.seen));
            }
        }

        match outcome {
            Outcome::Done { .. } | Outcome::Again => {
                let instruction = instruction_at(&before, &memory, &words);
                keeps_to_its_operands(cause, outcome, instruction, &before, &log);
            }
            Outcome::Fault(Exception { vector, cr2, .. }) => {
                assert!(matches!((vector, cr2), (12 | 13, None) | (14, Some(_))));
                assert_eq!((&state, &log.seen[..], memory.writes.get()), (&before, &[][..], 0));
            }
            Outcome::Retry | Outcome::Unsupported { .. } | Outcome::Unbacked(_) => {
                assert_eq!((&state, &log.seen[..], memory.writes.get()), (&before, &[][..], 0), "{outcome:?}");
            }
        }
        outcome
    }
}

/// Like `emulate`, with cached walks.
fn in_steps(cpu: &mut CpuState, memory: &Bench, log: &mut Log, walks: &mut Walks<Bench>, cause: Cause) -> Outcome {
    let decoded =
        fetch(cpu, memory, walks).and_then(|fetched| super::x86_emulate::decode_fetched(cpu, memory, walks, &fetched));
    match decoded {
        Ok(instruction) => execute(cpu, memory, log, walks, cause, &instruction),
        Err(outcome) => outcome,
    }
}

/// The executed instruction, as far as the old memory shows it.
fn instruction_at(before: &CpuState, memory: &Bench, words: &[u64]) -> Option<Instruction> {
    let now = memory.words.replace(words.to_vec());
    let window = fetch_whole(before, memory, &mut Walks::forgetful()).expect("it was fetched before");
    memory.words.replace(now);
    match decode(before.mode(), &window.to_bytes()[..usize::from(window.length())]) {
        Ok(instruction) => Some(instruction),
        Err(refusal) => panic!("{refusal:?}, but it was done"),
    }
}

/// The device sees only what the instruction does, and this includes the place where the hardware stopped.
fn keeps_to_its_operands(
    cause: Cause,
    outcome: Outcome,
    instruction: Option<Instruction>,
    before: &CpuState,
    log: &Log,
) {
    let Some(instruction) = instruction else { return };
    let is_string = instruction.operation.is_string();
    let is_port = matches!(instruction.operation, Operation::InString | Operation::OutString);
    assert_eq!(is_port, cause == Cause::Port, "{instruction:?}");
    assert!(outcome != Outcome::Again || is_string, "{instruction:?} is left half done");

    // An operand on two pages has seven pieces at most. It is read and written, or there are two operands.
    let elements = if is_string { BATCH as usize } else { 1 };
    assert!(log.seen.len() <= elements * 4 * 7, "{instruction:?}: {} accesses", log.seen.len());
    let reported = match cause {
        Cause::Access(gpa) => gpa.0 >> 12,
        Cause::Port => u64::MAX,
    };
    for seen in &log.seen {
        let is_outside = seen.place >> 12 >= PAGES || seen.place >> 12 == reported;
        let is_rom_write = seen.place >> 12 == ROM && seen.written.is_some();
        assert!(seen.is_port || is_outside || is_rom_write, "{instruction:?}: RAM is no device: {seen:x?}");
        assert!(!seen.is_port || is_port && seen.place == before.gprs[2] & 0xffff);
        assert!(
            seen.is_port || seen.place % 4096 + seen.width.bytes() <= 4096,
            "{instruction:?}: over a page's end: {seen:x?}"
        );
    }
    let count = instruction.address.width.truncate(before.gprs[1]);
    let is_idle = is_string && instruction.repeat != super::x86_emulate::Repeat::Never && count == 0;
    let was_met = log.seen.iter().any(|seen| seen.is_port == is_port && (is_port || seen.place >> 12 == reported));
    assert!(is_idle || was_met, "{instruction:?} did not do what it was stopped for: {:x?}", log.seen);
}
