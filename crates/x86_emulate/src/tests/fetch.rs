//! The source of an instruction's bytes, and the outcome if they cannot be read.

use core::cell::Cell;

use super::{CODE, DEVICE, GENERAL_PROTECTION, Guest, RBX, Ram, Register, Seen, flat, long};
use crate::{
    Cause, Exception, Fetched, MAX_LENGTH, Memory, Mode, Outcome, Segment, Walks, Width, Window, decode_fetched,
    execute, fetch, fetch_whole,
};
use addr::Gpa;

/// mov dword [rbx + 0xb0], 0x11223344
const STORE: [u8; 10] = [0xc7, 0x83, 0xb0, 0, 0, 0, 0x44, 0x33, 0x22, 0x11];

/// 64-bit code, of which memory at `rip` holds only the given part.
fn guest_at(rip: u64, code: &[u8]) -> Guest {
    let mut guest = Guest::long(&[]);
    guest.ram.put(rip, code);
    guest.state.rip = rip;
    guest
}

/// Memory whose pages are taken away and come back: a word that was found before is not there any more.
struct Moving {
    ram: Ram,
    moves: Cell<u64>,
}

impl Memory for Moving {
    type Word = (u64, u64);

    fn find(&self, gpa: Gpa) -> Option<(u64, u64)> {
        self.ram.find(gpa).map(|word| (word, self.moves.get()))
    }
    fn load(&self, (word, found_at): (u64, u64), ahead: usize) -> u64 {
        if found_at == self.moves.get() { self.ram.load(word, ahead) } else { 0 }
    }
    fn is_current(&self, found: Option<(u64, u64)>) -> bool {
        found.is_some_and(|(_, found_at)| found_at == self.moves.get())
    }
    fn compare_exchange(&self, (word, found_at): (u64, u64), current: u64, new: u64) -> bool {
        found_at == self.moves.get() && self.ram.compare_exchange(word, current, new)
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        self.ram.read(gpa, bytes)
    }
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        self.ram.write(gpa, bytes)
    }
}

#[test]
fn code_is_read_from_where_its_page_is_now() {
    for is_paged in [false, true] {
        let ram = Ram::with_code(&STORE);
        let state = if is_paged { long(&ram) } else { flat() };
        let memory = Moving { ram, moves: Cell::new(0) };
        let mut walks = Walks::new();
        let first = |walks: &mut Walks<Moving>| fetch(&state, &memory, walks).map(|found| found.window.to_bytes()[0]);
        assert_eq!(first(&mut walks), Ok(STORE[0]));
        memory.ram.put(CODE, &[0x90]);
        memory.moves.set(1);
        assert_eq!(first(&mut walks), Ok(0x90), "paged: {is_paged}");

        memory.ram.pages.borrow_mut().remove(&(CODE >> 12));
        memory.moves.set(2);
        assert_eq!(first(&mut walks), Err(Outcome::Unbacked(Gpa(CODE))));
        memory.ram.put(CODE, &[0xcc]);
        assert_eq!(first(&mut walks), Ok(0xcc), "what was not there can come back");
    }
}

/// The same, with a page that is taken away after a number of further accesses.
struct MovingSoon {
    memory: Moving,
    after: Cell<usize>,
}

impl MovingSoon {
    fn count(&self) {
        match self.after.get() {
            0 => {}
            1 => {
                self.after.set(0);
                self.memory.moves.set(self.memory.moves.get() + 1);
            }
            more => self.after.set(more - 1),
        }
    }
}

impl Memory for MovingSoon {
    type Word = (u64, u64);

    fn find(&self, gpa: Gpa) -> Option<(u64, u64)> {
        let found = self.memory.find(gpa);
        self.count();
        found
    }
    fn load(&self, word: (u64, u64), ahead: usize) -> u64 {
        let value = self.memory.load(word, ahead);
        self.count();
        value
    }
    fn is_current(&self, found: Option<(u64, u64)>) -> bool {
        self.memory.is_current(found)
    }
    fn compare_exchange(&self, word: (u64, u64), current: u64, new: u64) -> bool {
        self.memory.compare_exchange(word, current, new)
    }
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        self.memory.read(gpa, bytes)
    }
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        self.memory.write(gpa, bytes)
    }
}

#[test]
fn words_that_go_away_while_they_are_used_are_no_fault_and_no_other_code() {
    let mut whole = 0;
    for after in 1..40 {
        let ram = Ram::with_code(&STORE);
        let state = long(&ram);
        let memory = MovingSoon { memory: Moving { ram, moves: Cell::new(0) }, after: Cell::new(after) };
        match fetch(&state, &memory, &mut Walks::new()) {
            Ok(found) => {
                assert_eq!(found.window.to_bytes()[..STORE.len()], STORE, "taken away after {after} accesses");
                whole += 1;
            }
            Err(outcome) => assert_eq!(outcome, Outcome::Retry, "taken away after {after} accesses"),
        }
    }
    assert!(whole > 20, "most walks start again");
}

#[test]
fn instruction_across_a_page_end_is_fetched_from_both_pages() {
    for in_first in 1..STORE.len() {
        let mut guest = guest_at(0x1_1000 - in_first as u64, &STORE[..in_first]);

        // The second page does not exist yet.
        assert_eq!(guest.refused(), Outcome::Unbacked(Gpa(0x1_1000)));
        guest.ram.put(0x1_1000, &STORE[in_first..]);
        assert_eq!(guest.run(), Outcome::Done { length: 10 });
        assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 0xb0, Width::Dword, 0x1122_3344)]);
    }
}

#[test]
fn code_on_two_pages_that_are_no_neighbours_is_read_where_they_are() {
    for in_first in 1..STORE.len() {
        // The last bytes of the first 2 MiB, mapped one to one; the next page maps to a lower address.
        let mut guest = guest_at(0x20_0000 - in_first as u64, &STORE[..in_first]);
        guest.ram.put_u64(0x3008, 0x5007);
        guest.ram.put_u64(0x5000, 0x6007);
        guest.ram.put(0x6000, &STORE[in_first..]);
        assert_eq!(guest.run(), Outcome::Done { length: 10 }, "{in_first} bytes on the first");
    }
}

#[test]
fn second_page_is_touched_only_when_it_is_needed_and_faults_with_its_own_address() {
    // The last bytes of the first 2 MiB; the next page is not present.
    let mut guest = guest_at(0x1f_fffe, &[0x89, 0x03]); // mov [rbx], eax: ends with the page
    assert_eq!(guest.run(), Outcome::Done { length: 2 });

    let mut guest = guest_at(0x1f_fffe, &[0x89, 0x43]); // mov [rbx + ?], eax
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 0x10, cr2: Some(0x20_0000) }));
}

#[test]
fn fault_of_the_second_page_comes_before_that_of_the_operand() {
    let mut guest = guest_at(0x1f_fffe, &[0x89, 0x43]).set(RBX, 0x40_0000);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 0x10, cr2: Some(0x20_0000) }));
}

#[test]
fn code_that_is_gone_is_a_fault_or_unbacked() {
    let mut guest = guest_at(0x20_0000, &[]);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 0x10, cr2: Some(0x20_0000) }));
    let mut guest = guest_at(0x1f_0000, &[]);
    assert_eq!(guest.refused(), Outcome::Unbacked(Gpa(0x1f_0000)), "mapped to where nothing is");
    let mut guest = Guest::long(&[]);
    guest.state.rip = 1 << 47;
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION), "not canonical");
    let mut guest = Guest::flat(Mode::Bits32, &[0x89, 0x03]);
    guest.state.segments[Segment::Cs as usize].limit = 0xffff;
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION), "behind the end of the segment");
}

#[test]
fn more_than_15_bytes_are_a_protection_fault() {
    for prefix in [0x66, 0x48, 0xf3] {
        let mut guest = Guest::long(&[prefix; 15]);
        assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
    }
    // 14 of them before the end of a page, the others behind it.
    let mut guest = guest_at(CODE + 2, &[0x66; 20]);
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
}

#[test]
fn window_holds_what_is_there_at_every_distance_from_the_page_end() {
    let ram = Ram::default();
    let mut state = long(&ram);
    let bytes: [u8; 64] = core::array::from_fn(|at| u8::try_from(at).expect("small") | 0x80);
    ram.put(0x1_0fe0, &bytes);
    for distance in 1..=32 {
        state.rip = 0x1_1000 - distance;
        let start = usize::try_from(32 - distance).expect("small");
        let length = usize::try_from(distance.min(15)).expect("small");

        let fetched = fetch(&state, &ram, &mut Walks::forgetful()).expect("memory");
        assert_eq!((fetched.gpa, fetched.window), (Gpa(state.rip), Window::of(&bytes[start..][..length])));
        assert_eq!(usize::from(fetched.window.length()), length);
        assert_eq!(fetched.window.to_bytes()[..length], bytes[start..][..length]);
        let words = fetched.window.words();
        assert_eq!(u128::from(words[1]) << 64 | u128::from(words[0]), u128::from_le_bytes(fetched.window.to_bytes()));
        // The 64-bit loads end with the page: they show no byte behind it, nor one behind the 15th.
        assert!(length == 15 || fetched.window.to_bytes()[length..].iter().all(|&byte| byte == 0));

        assert_eq!(fetch_whole(&state, &ram, &mut Walks::forgetful()), Ok(Window::of(&bytes[start..][..15])));
    }
}

#[test]
fn window_of_bytes_is_these_bytes_and_no_more_than_15() {
    let bytes: [u8; 20] = core::array::from_fn(|at| u8::try_from(at).expect("small") + 1);
    for length in 0..=20 {
        let window = Window::of(&bytes[..length]);
        let known = length.min(MAX_LENGTH);
        assert_eq!(usize::from(window.length()), known);
        assert_eq!(window.to_bytes()[..known], bytes[..known]);
        assert!(window.to_bytes()[known..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn whole_fetch_is_content_with_one_page_where_the_second_is_missing() {
    let guest = guest_at(0x1f_fffe, &[0x89, 0x03]);
    let window = fetch_whole(&guest.state, &guest.ram, &mut Walks::forgetful());
    assert_eq!(window, Ok(Window::of(&[0x89, 0x03])));
}

#[test]
fn steps_one_by_one_use_the_bytes_that_they_are_given_and_fetch_what_is_missing() {
    let mut guest = Guest::long(&[0x8b, 0x43, 0x20]); // mov eax, [rbx + 0x20]
    let mut walks = Walks::new();
    let fetched = fetch(&guest.state, &guest.ram, &mut walks).expect("memory");
    let mut run = |guest: &mut Guest, bytes: &[u8]| {
        let mut device = Register::default();
        let fetched = Fetched { window: Window::of(bytes), ..fetched };
        let instruction = decode_fetched(&guest.state, &guest.ram, &mut walks, &fetched).expect("an instruction");
        let cause = Cause::Access(Gpa(DEVICE));
        let outcome = execute(&mut guest.state, &guest.ram, &mut device, &mut walks, cause, &instruction);
        assert_eq!(outcome, Outcome::Done { length: 3 });
        guest.state.rip = CODE;
        device.seen[0]
    };
    // mov ecx, [rbx + 0x30] instead of the code in memory
    assert_eq!(run(&mut guest, &[0x8b, 0x4b, 0x30, 0x90]), Seen::Read(DEVICE + 0x30, Width::Dword));
    for bytes in [&[][..], &[0x8b], &[0x8b, 0x43], &[0x8b, 0x43, 0x20]] {
        assert_eq!(run(&mut guest, bytes), Seen::Read(DEVICE + 0x20, Width::Dword), "{bytes:02x?}");
    }
}
