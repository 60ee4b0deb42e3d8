//! Cached sites against emulations without caches: they must never differ.

use fastrand::Rng;

use super::random::Source;
use super::{CODE, DATA, DEVICE, Guest, RAX, RBP, RBX, RCX, Ram, Register, Seen, Vec, long};
use crate::{CpuState, Emulation, Outcome, Sites, Walks, Width, emulate};

/// A vCPU with all caches.
struct Vcpu {
    walks: Walks<Ram>,
    sites: Sites<Ram>,
    repeated: u64,
}

impl Vcpu {
    fn new() -> Self {
        Self { walks: Walks::new(), sites: Sites::new(), repeated: 0 }
    }

    fn run(&mut self, guest: &mut Guest) -> Outcome {
        self.run_while(guest, |_| {})
    }

    /// Runs it, and calls `meanwhile` after it was decoded.
    fn run_while(&mut self, guest: &mut Guest, meanwhile: impl FnOnce(&Ram)) -> Outcome {
        let Guest { ram, state, device, cause } = guest;
        let mut emulation = Emulation::new(state, ram, device, &mut self.walks, *cause);
        if let Some(outcome) = emulation.repeat(&self.sites) {
            self.repeated += 1;
            return outcome;
        }
        match emulation.fetch().and_then(|fetched| Ok((fetched, emulation.decode(&fetched)?))) {
            Ok((fetched, instruction)) => {
                meanwhile(ram);
                emulation.cache_site(&mut self.sites, &fetched.window, &instruction);
                emulation.execute(&instruction)
            }
            Err(outcome) => outcome,
        }
    }
}

/// Instructions that a site can hold, and some that it cannot.
const INSTRUCTIONS: [&[u8]; 16] = [
    &[0x8b, 0x03],                                                 // mov eax, [rbx]
    &[0x89, 0x03],                                                 // mov [rbx], eax
    &[0x48, 0x8b, 0x43, 0x20],                                     // mov rax, [rbx + 0x20]
    &[0x66, 0x89, 0x4b, 0x10],                                     // mov [rbx + 0x10], cx
    &[0x88, 0x23],                                                 // mov [rbx], ah
    &[0x8a, 0x6b, 4],                                              // mov ch, [rbx + 4]
    &[0xc7, 0x83, 0xb0, 0, 0, 0, 0, 0, 0, 0x80],                   // mov dword [rbx + 0xb0], 0x80000000
    &[0x48, 0xc7, 0x45, 0, 0xff, 0xff, 0xff, 0xff],                // mov qword [rbp], -1
    &[0x0f, 0xb6, 0x03],                                           // movzx eax, byte [rbx]
    &[0x87, 0x03],                                                 // xchg [rbx], eax
    &[0x8b, 0x04, 0x8b],                                           // mov eax, [rbx + rcx*4]
    &[0x65, 0x8b, 0x03],                                           // mov eax, gs:[rbx]
    &[0x67, 0x8b, 0x03],                                           // mov eax, [ebx]
    &[0xa1, 0x20, 0, 0xe0, 0xfe, 0, 0, 0, 0],                      // mov eax, [0xfee00020]
    &[0xff, 0x03],                                                 // inc dword [rbx]
    &[0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x89, 0x03], // mov [rbx], eax
];

/// The last access is to the next page, and there are pages of both kinds.
const TARGETS: [u64; 8] = [DEVICE, DEVICE, DEVICE, DEVICE + 0x20, DEVICE + 0xfff, DEVICE + 0x1000, DATA, 1 << 47];

#[test]
fn place_is_repeated_once_its_walks_are_known_and_until_anything_changes() {
    let mut vcpu = Vcpu::new();
    let mut guest = Guest::long(&[0x8b, 0x43, 0x20]); // mov eax, [rbx + 0x20]
    let mut run = |guest: &mut Guest| {
        guest.state.rip = CODE;
        guest.device = Register { value: 0x77, ..Register::default() };
        let before = vcpu.repeated;
        assert_eq!(vcpu.run(guest), Outcome::Done { length: 3 });
        assert_eq!((guest.device.seen.len(), guest.state.gprs[RAX], guest.state.rip), (1, 0x77, CODE + 3));
        vcpu.repeated > before
    };
    // The walk to the operand is cached from the second time on.
    assert_eq!([run(&mut guest), run(&mut guest), run(&mut guest), run(&mut guest)], [false, false, true, true]);

    guest.ram.put_u64(0x2018, 0x4067);
    assert!(!run(&mut guest), "an entry on the way to the operand");
    assert!(!run(&mut guest));
    assert!(run(&mut guest));
    guest.ram.put_u64(0x2000, 0x3027 | 1 << 9);
    assert!(!run(&mut guest), "an entry on the way to the code");
    run(&mut guest);
    run(&mut guest);
    guest.ram.put(CODE + 2, &[0x24]);
    assert!(!run(&mut guest), "its last byte");
    assert!(run(&mut guest));
    guest.ram.put(CODE + 3, &[0x24]);
    assert!(run(&mut guest), "the byte behind it does not matter");
    guest.state.cr4 |= 1 << 22;
    assert!(!run(&mut guest), "a feature");
}

#[test]
fn code_that_changes_before_it_is_learnt_is_not_taken_for_what_it_was() {
    let mut vcpu = Vcpu::new();
    let mut guest = Guest::long(&[0x8b, 0x43, 0x20]); // mov eax, [rbx + 0x20]
    vcpu.run(&mut guest);
    guest.state.rip = CODE;
    // Another vCPU changes it to [rbx + 0x30] after the fetch. The old one may run this time, never again.
    vcpu.run_while(&mut guest, |ram| ram.put(CODE + 2, &[0x30]));
    for _ in 0..3 {
        guest.state.rip = CODE;
        guest.device.seen.clear();
        vcpu.run(&mut guest);
        assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0x30, Width::Dword)]);
    }
}

#[test]
fn random_places_edits_and_states_give_what_a_fresh_emulation_gives() {
    let mut source = Rng::with_seed(17);
    let mut repeated = 0;
    for _ in 0..60 {
        let (mut guest, mut vcpu) = (Guest::long(&[]), Vcpu::new());
        guest.ram.put(DATA, &[0; 8]);
        let base = guest.state.clone();
        // A copy of the tables elsewhere, so that after a change of CR3 the same RIP leads to other code.
        let copy: [u8; 4096] = guest.ram.get(0x1000);
        guest.ram.put(0x5000, &copy);
        // An instruction at each of a few places, the last of them at the end of its page.
        let places: Vec<u64> =
            (0..6).map(|place| CODE - 0x100 + place * 32 + source.word() % 9).chain([CODE + 14]).collect();
        for &place in &places {
            guest.ram.put(place, source.pick(&INSTRUCTIONS));
        }
        guest.ram.put(CODE + 16, &[0x90; 16]);

        for _ in 0..400 {
            match source.below(40) {
                0 => guest.ram.put(source.pick(&places), source.pick(&INSTRUCTIONS)),
                1 => {
                    let at = source.pick(&places) + source.word() % 15;
                    let [byte] = guest.ram.get(at);
                    guest.ram.put(at, &[byte ^ 1 << source.below(8)]);
                }
                2 => {
                    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
                    let entry = source.pick(&[0x1000, 0x2000, 0x2018, 0x3000, leaf, 0x5000]);
                    guest.ram.put_u64(entry, guest.ram.get_u64(entry) ^ 1 << source.pick(&[0, 1, 2, 5, 6, 9, 63]));
                }
                3 => {
                    long(&guest.ram);
                    guest.ram.put(0x5000, &copy);
                }
                4 => guest.state.cr3 ^= 0x4000,
                5 => change(&mut guest.state, &mut source),
                6 => guest.state = base.clone(),
                7 => guest.state.gprs[RCX] = source.word() % 8,
                8 => guest.state.gprs[RBP] = source.pick(&TARGETS),
                9..12 => guest.state.gprs[RBX] = source.pick(&TARGETS),
                _ => {}
            }
            guest.state.rip = source.pick(&places);
            one_step_is_the_same(&mut vcpu, &mut guest);
        }
        repeated += vcpu.repeated;
    }
    assert!(repeated > 1000, "only {repeated} places were repeated");
}

fn change(state: &mut CpuState, source: &mut impl Source) {
    match source.below(6) {
        0 => state.cpl ^= 3,
        1 => state.cr0 ^= 1 << 16,
        2 => state.cr4 ^= 1 << source.pick(&[20, 21, 22]),
        3 => state.rflags ^= 1 << source.pick(&[16, 18]),
        4 => state.segments[1].attributes ^= 3 << 9,
        _ => state.efer ^= 1 << 11,
    }
}

/// Runs one instruction with and without caches.
fn one_step_is_the_same(vcpu: &mut Vcpu, guest: &mut Guest) {
    let fresh_ram = Ram::default();
    *fresh_ram.pages.borrow_mut() = guest.ram.pages.borrow().clone();
    let (mut fresh, mut device) =
        (guest.state.clone(), Register { value: 0x1122_3344_5566_7788, ..Register::default() });
    let expected = emulate(&mut fresh, &fresh_ram, &mut device, guest.cause);

    guest.device = Register { value: 0x1122_3344_5566_7788, ..Register::default() };
    assert_eq!(vcpu.run(guest), expected);
    assert_eq!((&guest.state, &guest.device.seen), (&fresh, &device.seen));
    assert!(guest.ram.pages == fresh_ram.pages, "memory differs");
}
