//! Random lives of small machines. Each hit of a vCPU's cache must equal what a walk, a fetch and a decode give at that
//! moment. Planted mistakes check that such a life finds them.
//!
//! The machines are invented: page tables of two levels and code in a few pages, stage-2 rights, and vCPUs whose TLBs
//! keep a right to write until they are flushed. Events in the middle of an insertion happen where the cache calls
//! back.

mod machine;

use decode_cache::Vouching;
use machine::{Design, World};

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// The cache's key is RIP and address space only.
    KeyOfRipAndSpace,
    /// The key has no mode.
    KeyWithoutMode,
    /// The key has no GPA.
    KeyWithoutGpa,
    /// The last byte of an instruction is not compared.
    MaskTooShort,
    /// A write makes its page writable and reports nothing.
    NoBump,
    /// The same for page tables only.
    NoBumpForTables,
    /// The page is writable for a moment before its entries are dropped.
    UnprotectBeforeBump,
    /// Rights in vCPUs' TLBs are not flushed.
    NoFlush,
    /// The decoded bytes are not read again.
    NoReread,
    /// The page tables are not walked again.
    NoRewalk,
    /// The page is made read-only, flushed, and read, and only then registered.
    RegistersLate,
    /// The hypervisor checks before it writes, and not again.
    HostAsksOnce,
}

const WALK: Design = Design::WriteProtect(Vouching::Walk);
const TABLES: Design = Design::WriteProtect(Vouching::Tables);

const STEPS: usize = 200;
const LIVES: u64 = 60;

/// The error in a life, if there is one; and the number of hits.
fn life(design: Design, pages: usize, mutant: Mutant, seed: u64) -> (Option<String>, u64) {
    let world = World::new(design, pages, mutant, seed);
    for _ in 0..STEPS {
        world.step();
        if world.wrong().is_some() {
            break;
        }
    }
    (world.wrong(), world.hits())
}

/// Number of the `lives` that find a mistake.
fn caught(design: Design, mutant: Mutant, lives: u64) -> u64 {
    (0..lives).map(|seed| u64::from(life(design, 16, mutant, seed).0.is_some())).sum()
}

fn lives_of(design: Design, pages: usize) {
    let mut hits = 0;
    for seed in 0..LIVES {
        let (wrong, found) = life(design, pages, Mutant::None, seed);
        assert_eq!(wrong, None, "{design:?}, {pages} pages, seed {seed}");
        hits += found;
    }
    println!("{design:?}, {pages} pages: found {hits} times");
    assert!(hits > LIVES * 100, "found {hits} times: next to nothing was tested");
}

#[test]
fn by_bytes_what_is_found_is_what_is_there() {
    lives_of(Design::Bytes, 16);
}

#[test]
fn by_place_what_is_found_is_what_is_there() {
    lives_of(WALK, 16);
}

#[test]
fn by_place_where_pages_evict_each_other() {
    lives_of(WALK, 2);
}

#[test]
fn by_place_without_walks_what_is_found_is_what_is_there() {
    lives_of(TABLES, 16);
}

#[test]
fn by_place_without_walks_where_pages_evict_each_other() {
    lives_of(TABLES, 8);
}

#[test]
fn mistakes_are_found_in_nearly_every_life() {
    let mistakes = [
        (WALK, Mutant::KeyOfRipAndSpace),
        (Design::Bytes, Mutant::KeyWithoutMode),
        (WALK, Mutant::KeyWithoutMode),
        (TABLES, Mutant::KeyWithoutMode),
        (WALK, Mutant::KeyWithoutGpa),
        (Design::Bytes, Mutant::MaskTooShort),
        (WALK, Mutant::NoBump),
        (TABLES, Mutant::NoBump),
        (TABLES, Mutant::NoBumpForTables),
        (WALK, Mutant::UnprotectBeforeBump),
        (TABLES, Mutant::UnprotectBeforeBump),
        (WALK, Mutant::NoFlush),
        (TABLES, Mutant::NoFlush),
        (WALK, Mutant::NoReread),
        (TABLES, Mutant::NoReread),
        (TABLES, Mutant::NoRewalk),
        (WALK, Mutant::RegistersLate),
        (TABLES, Mutant::RegistersLate),
        (WALK, Mutant::HostAsksOnce),
        (TABLES, Mutant::HostAsksOnce),
    ];
    let lives = 40;
    let found = mistakes.map(|(design, mutant)| (caught(design, mutant, lives), design, mutant));
    let missed: Vec<_> = found.iter().filter(|(caught, ..)| *caught < lives * 9 / 10).collect();
    assert!(missed.is_empty(), "found too rarely, of {lives}: {missed:?}");
}
