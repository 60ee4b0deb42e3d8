//! Cached walks against fresh ones: they must never differ.

use fastrand::Rng;

use super::random::Source;
use super::std;
use super::tables::check_walks;
use super::{DEVICE, Guest, RCX, RDI, Ram, flat, long, page_fault};
use crate::{Access, CpuState, Outcome, Stop, Walks, translate};
use addr::Gpa;

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

/// Translates with and without a cache, each with tables of its own, which must stay equal.
struct Both {
    tables: Ram,
    fresh_tables: Ram,
    walks: Walks<Ram>,
    asked: u64,
}

impl Both {
    fn new(ram: Ram) -> Self {
        let fresh_tables = Ram::default();
        for (&page, bytes) in ram.pages.borrow().iter() {
            fresh_tables.put(page << 12, bytes);
        }
        Self { tables: ram, fresh_tables, walks: Walks::new(), asked: 0 }
    }

    fn set(&self, gpa: u64, value: u64) {
        self.tables.put_u64(gpa, value);
        self.fresh_tables.put_u64(gpa, value);
    }

    fn find(&mut self, state: &CpuState, linear: u64, access: Access) -> Result<Gpa, Stop> {
        self.asked += 1;
        let fresh = translate(state, &self.fresh_tables, &mut Walks::forgetful(), linear, access);
        let remembered = translate(state, &self.tables, &mut self.walks, linear, access);
        assert_eq!(remembered, fresh, "{linear:x} {access:?} {state:x?}");
        assert_eq!(self.tables.pages, self.fresh_tables.pages, "tables differ after {linear:x} {access:?}");
        fresh
    }
}

/// Tables of each shape, with a vCPU state that uses them, and the entries on the walk to the device.
fn shapes() -> [(Ram, CpuState, &'static [u64]); 4] {
    let of_long = |change: fn(&Ram, &mut CpuState)| {
        let ram = Ram::default();
        let mut state = long(&ram);
        ram.put_u64(0x4000 + 8 * 0x1f7, 0);
        ram.put_u64(0x2018, 0x4007);
        ram.put_u64(0x4000 + 8 * 0x1f7, 0x5007);
        // The device's page, by 4 KiB, with protection key 5.
        ram.put_u64(0x5000, DEVICE | 7 | 5 << 59);
        change(&ram, &mut state);
        (ram, state)
    };
    let (four, four_state) = of_long(|_, _| {});
    let (five, five_state) = of_long(|ram, state| {
        ram.put_u64(0x6000, 0x1007);
        state.cr3 = 0x6000;
        state.cr4 |= 1 << 12;
    });
    let (three, three_state) = of_long(|ram, state| {
        ram.put_u64(0x2018, 0x4001);
        ram.put_u64(0x5000, DEVICE | 7);
        *state = CpuState { cr3: 0x2000, efer: 0x800, ..state.clone() };
        state.segments = flat().segments;
    });
    let two = Ram::default();
    two.put_u64(0x1000 + 4 * 0x3fa, 0x0000_3007_0000_2007);
    two.put(0x1000 + 4 * 0x3fb, &0x2007_u32.to_le_bytes());
    two.put_u64(0x2000 + 4 * 0x200, 0x0000_1007_fee0_0007);
    let two_state = CpuState { cr0: 0x8001_0001, cr3: 0x1000, cr4: 0x10, ..flat() };
    [
        (four, four_state, &[0x1000, 0x2018, 0x4000 + 8 * 0x1f7, 0x5000]),
        (five, five_state, &[0x6000, 0x1000, 0x2018, 0x4000 + 8 * 0x1f7, 0x5000]),
        (three, three_state, &[0x2018, 0x4000 + 8 * 0x1f7, 0x5000]),
        (two, two_state, &[0x1000 + 4 * 0x3fa, 0x2000 + 4 * 0x200]),
    ]
}

type Change = fn(&mut CpuState);

/// All inputs of a walk besides the tables.
const CHANGES: [(&str, Change); 16] = [
    ("CR0.PG", |state| state.cr0 ^= 1 << 31),
    ("CR0.WP", |state| state.cr0 ^= 1 << 16),
    ("CR4.PSE", |state| state.cr4 ^= 1 << 4),
    ("CR4.PAE", |state| state.cr4 ^= 1 << 5),
    ("CR4.LA57", |state| state.cr4 ^= 1 << 12),
    ("CR4.SMEP", |state| state.cr4 ^= 1 << 20),
    ("CR4.SMAP", |state| state.cr4 ^= 1 << 21),
    ("CR4.PKE", |state| state.cr4 ^= 1 << 22),
    ("EFER.LMA", |state| state.efer ^= 1 << 10),
    ("EFER.NXE", |state| state.efer ^= 1 << 11),
    ("RFLAGS.AC", |state| state.rflags ^= 1 << 18),
    ("CPL", |state| state.cpl ^= 3),
    ("another CPL", |state| state.cpl ^= 1),
    ("PKRU access", |state| state.pkru ^= 1 << 10),
    ("PKRU write", |state| state.pkru ^= 1 << 11),
    ("CR3", |state| state.cr3 ^= 0x3000),
];

#[test]
fn second_emulation_confirms_its_walks_instead_of_doing_them() {
    let mut guest = Guest::long(&[0x8b, 0x03]); // mov eax, [rbx]
    let mut walks = Walks::new();
    let mut run = |guest: &mut Guest| {
        guest.state.rip = super::CODE;
        let fetched = crate::fetch(&guest.state, &guest.ram, &mut walks).expect("code");
        let instruction = crate::decode_fetched(&guest.state, &guest.ram, &mut walks, &fetched).expect("known");
        let (state, device) = (&mut guest.state, &mut guest.device);
        let outcome = crate::execute(state, &guest.ram, device, &mut walks, guest.cause, &instruction);
        assert_eq!(outcome, Outcome::Done { length: 2 });
        walks.done()
    };
    assert_eq!(run(&mut guest), 2, "one for the code, one for the operand");
    assert_eq!(run(&mut guest), 2);
    assert_eq!(run(&mut guest), 2);
    // A change of any entry causes a new walk, once.
    guest.ram.put_u64(0x2018, 0x4067);
    assert_eq!(run(&mut guest), 3);
    assert_eq!(run(&mut guest), 3);
    // So does the first write after reads only. Then both are cached.
    guest.ram.put(super::CODE, &[0x89]);
    assert_eq!(run(&mut guest), 4);
    // It has set Dirty, which changes the entry for the reads.
    for kind in [0x8b, 0x89, 0x8b] {
        guest.ram.put(super::CODE, &[kind]);
        assert_eq!(run(&mut guest), 5);
    }
}

#[test]
fn repeated_instruction_walks_once_for_each_page() {
    let mut guest = Guest::long(&[0xf3, 0xaa]).set(RCX, 64).set(RDI, DEVICE + 0xfe0); // rep stosb
    let mut walks = Walks::new();
    let fetched = crate::fetch(&guest.state, &guest.ram, &mut walks).expect("code");
    let instruction = crate::decode_fetched(&guest.state, &guest.ram, &mut walks, &fetched).expect("known");
    crate::execute(&mut guest.state, &guest.ram, &mut guest.device, &mut walks, guest.cause, &instruction);
    // The walk itself sets Dirty, so it is current at once.
    assert_eq!((guest.device.seen.len(), walks.done()), (64, 3));
}

#[test]
fn nothing_is_remembered_by_the_forgetful() {
    let ram = Ram::default();
    let state = long(&ram);
    let mut walks = Walks::forgetful();
    for _ in 0..3 {
        assert_eq!(translate(&state, &ram, &mut walks, DEVICE, Access::Read), Ok(Gpa(DEVICE)));
    }
    assert_eq!(walks.done(), 3);
}

#[test]
fn walk_that_failed_is_not_remembered() {
    let ram = Ram::default();
    let state = long(&ram);
    let mut walks = Walks::new();
    for _ in 0..2 {
        // Both want the same slot of the cache.
        assert_eq!(translate(&state, &ram, &mut walks, 0x4000_0000, Access::Read), page_fault(0, 0x4000_0000));
        assert_eq!(translate(&state, &ram, &mut walks, 0, Access::Read), Ok(Gpa(0)));
        assert_eq!(translate(&state, &ram, &mut walks, 0, Access::Read), Ok(Gpa(0)));
    }
    assert!((3..=4).contains(&walks.done()));
    ram.put_u64(0x2008, 0x87);
    assert_eq!(translate(&state, &ram, &mut walks, 0x4000_0000, Access::Read), Ok(Gpa(0)));
}

#[test]
fn change_of_any_bit_of_any_entry_on_the_way_is_seen() {
    for (ram, state, entries) in shapes() {
        let mut both = Both::new(ram);
        for access in ACCESSES {
            for &entry in entries {
                for bit in 0..64 {
                    assert_eq!(both.find(&state, DEVICE, access), Ok(Gpa(DEVICE)));
                    let before = both.tables.get_u64(entry);
                    both.set(entry, before ^ 1 << bit);
                    let _ = both.find(&state, DEVICE, access);
                    both.set(entry, before);
                }
            }
        }
        assert!(both.walks.done() < both.asked);
    }
}

#[test]
fn change_of_anything_else_that_matters_is_seen() {
    for (ram, base, _) in shapes() {
        let mut both = Both::new(ram);
        // From each of many states, each single change.
        let mut source = Rng::with_seed(7);
        for _ in 0..40 {
            let mut state = base.clone();
            for (_, change) in CHANGES.into_iter().filter(|_| source.rarely(4)) {
                change(&mut state);
            }
            for access in ACCESSES {
                for (_, change) in CHANGES {
                    let _ = both.find(&state, DEVICE, access);
                    let mut changed = state.clone();
                    change(&mut changed);
                    let _ = both.find(&changed, DEVICE, access);
                    let _ = both.find(&state, DEVICE, access);
                }
                // Another kind of access to the same page is another walk.
                for other in ACCESSES {
                    let _ = both.find(&state, DEVICE, other);
                    let _ = both.find(&state, DEVICE, access);
                }
            }
        }
    }
}

#[test]
fn random_edits_and_states_give_what_a_fresh_walk_gives() {
    let mut hits = 0;
    for seed in 0..8 {
        for (ram, base, entries) in shapes() {
            let originals: super::Vec<(u64, u64)> = entries.iter().map(|&at| (at, ram.get_u64(at))).collect();
            let mut both = Both::new(ram);
            let mut source = Rng::with_seed(seed);
            let mut state = base.clone();
            for _ in 0..1500 {
                match source.below(10) {
                    0 => {
                        let entry = source.pick(entries);
                        both.set(entry, both.tables.get_u64(entry) ^ 1 << source.below(64));
                    }
                    1 => originals.iter().for_each(|&(entry, value)| both.set(entry, value)),
                    2 => source.pick(&CHANGES).1(&mut state),
                    3 => state = base.clone(),
                    _ => {
                        let near = source.pick(&[0, 0, 0, 0x1000, 0x8000, 0x10_0000_0000]);
                        let _ = both.find(&state, DEVICE + near + source.word() % 4096, source.pick(&ACCESSES));
                    }
                }
            }
            hits += both.asked - both.walks.done();
        }
    }
    assert!(hits > 1000, "only {hits} walks were confirmed");
}

#[test]
fn arbitrary_tables_that_change_all_the_time_are_walked_as_if_for_the_first_time() {
    let cases = std::env::var("WALK_CASES").map_or(300, |text| text.parse().expect("WALK_CASES is a number"));
    let mut source = Rng::with_seed(13);
    let (mut asked, mut done) = (0, 0);
    for _ in 0..cases {
        let counts = check_walks(&mut source);
        asked += counts.0;
        done += counts.1;
    }
    std::eprintln!("{asked} walks were asked for, {done} were done");
    assert!(done < asked - asked / 20, "{done} of {asked}: hardly any was confirmed");
}
