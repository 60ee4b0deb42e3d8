//! Tests of the guest's functions that need no machine.

extern crate std;

use std::string::String;
use std::vec;
use std::vec::Vec;

use crate::acpi::{self, Physical};
use crate::batches::{Batches, per_iteration};
use crate::command_line::{Approach, Choice, Extent, KEYS, Mistake, Register, Settings, nearest};
use crate::cpu_set::{self, CpuSet};
use crate::hypercall::{self, Control};
use crate::percentiles::{Summary, nanoseconds, net_of_absence, scaled};
use crate::random::Random;
use crate::sequence::{FRAMES, frame_of, is_stale};

#[test]
fn settings_are_read_in_any_order() {
    let settings =
        Settings::parse("seconds=0 experiments=cpuid,rdmsr  seed=0x10 cpus=2 apic=xapic", |m| panic!("{m:?}"));
    assert_eq!(settings.experiments, Some("cpuid,rdmsr"));
    assert_eq!(settings.seconds, Some(0));
    assert_eq!(settings.seed, Some(16));
    assert_eq!(settings.cpus, Some(2));
    assert!(settings.force_xapic);
    assert_eq!(settings.iterations, None);
}

#[test]
fn a_misspelt_key_is_named_with_the_nearest_one() {
    let mut mistakes = Vec::new();
    Settings::parse("iteration=5 cpu", |m| mistakes.push(m));
    assert_eq!(
        mistakes,
        [
            Mistake::UnknownKey { key: "iteration", nearest: "iterations" },
            Mistake::UnknownKey { key: "cpu", nearest: "cpus" }
        ]
    );
}

#[test]
fn a_bad_value_is_named_and_leaves_the_earlier_one() {
    let mut mistakes = Vec::new();
    let settings = Settings::parse("cpus=3 cpus=many cpus=0 iterations= apic=no", |m| mistakes.push(m));
    assert_eq!(settings.cpus, Some(3));
    assert_eq!(mistakes.len(), 4);
    assert_eq!(mistakes[0], Mistake::BadValue { key: "cpus", value: "many" });
}

#[test]
fn words_about_emulated_accesses_are_read_and_bad_ones_refused() {
    let settings = Settings::parse("rips=512 forms=many device=ioapic vcpus=all write=beside every=8 variant=b", |m| {
        panic!("{m:?}")
    });
    assert_eq!((settings.rips, settings.device, settings.every), (Some(512), Some(Register::IoApic), Some(8)));
    assert!(settings.many_forms && settings.all_cpus && settings.write_beside && settings.second_variant);
    for register in Register::ALL {
        let text = ["device=", register.name()].concat();
        assert_eq!(Settings::parse(&text, |m| panic!("{m:?}")).device, Some(register));
    }

    let mut mistakes = 0;
    let words = "rips=0 rips=1025 forms=some device=hpet vcpus=2 write=both every=0 variant=c";
    assert_eq!(Settings::parse(words, |_| mistakes += 1), Settings::default());
    assert_eq!(mistakes, 8);
}

#[test]
fn hostile_words_never_panic() {
    let mut random = Random::new(1, 0);
    for _ in 0..2000 {
        let text: String = (0..random.index(60)).map(|_| char::from((random.bits() % 0x60) as u8 + 0x20)).collect();
        Settings::parse(&text, |_| {});
        assert!(nearest(&text, KEYS).is_some());
    }
}

#[test]
fn streams_of_one_seed_differ() {
    let firsts: std::collections::BTreeSet<u64> = (0..256).map(|cpu| Random::new(7, cpu).bits()).collect();
    assert_eq!(firsts.len(), 256);
    assert_eq!(Random::new(7, 3).bits(), Random::new(7, 3).bits());
}

#[test]
fn numbers_stay_below_their_bound() {
    let mut random = Random::new(0, 0);
    assert_eq!(random.below(0), 0);
    assert!((0..1000).all(|_| random.below(10) < 10));
}

#[test]
fn median_and_min_ignore_the_warm_up() {
    let mut values = [100, 9, 1, 8, 2, 7, 3, 6, 4, 5].into_iter();
    let batches = Batches::measure(|| values.next().expect("ten values"));
    assert_eq!((batches.min(), batches.median(), batches.max()), (1, 5, 9));
}

#[test]
fn per_iteration_rounds_and_never_divides_by_zero() {
    assert_eq!(per_iteration(1000, 0, 3), 333);
    assert_eq!(per_iteration(1001, 0, 2), 501);
    assert_eq!(per_iteration(5, 10, 4), 0);
    assert_eq!(per_iteration(5, 0, 0), 5);
    assert_eq!(per_iteration(u64::MAX, 0, 2), u64::MAX / 2);
}

/// Physical memory of a made-up machine: one block at 0.
struct Memory(Vec<u8>);

impl Physical for Memory {
    fn bytes(&self, at: u64, length: usize) -> Option<&[u8]> {
        let at = usize::try_from(at).ok()?;
        self.0.get(at..at.checked_add(length)?)
    }
}

impl Memory {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn fix_checksum(&mut self, at: usize, length: usize, field: usize) {
        self.0[at + field] = 0;
        let sum = self.0[at..at + length].iter().fold(0u8, |s, b| s.wrapping_add(*b));
        self.0[at + field] = sum.wrapping_neg();
    }

    fn table(&mut self, at: usize, signature: &[u8; 4], body: &[u8]) {
        let length = 36 + body.len();
        self.put(at, signature);
        self.put(at + 4, &u32::try_from(length).expect("small").to_le_bytes());
        self.put(at + 36, body);
        self.fix_checksum(at, length, 9);
    }

    /// RSDP at 0x100, root table at 0x200, MADT at 0x400, MCFG at 0x500.
    fn machine(revision: u8) -> Self {
        let mut memory = Self(vec![0; 0x1000]);
        memory.put(0x100, b"RSD PTR ");
        memory.0[0x100 + 15] = revision;
        memory.put(0x110, &0x200u32.to_le_bytes());
        memory.fix_checksum(0x100, 20, 8);
        if revision >= 2 {
            memory.put(0x118, &0x200u64.to_le_bytes());
            memory.fix_checksum(0x100, 36, 32);
            memory.table(0x200, b"XSDT", &[0x500u64.to_le_bytes(), 0x400u64.to_le_bytes()].concat());
        } else {
            memory.table(0x200, b"RSDT", &[0x500u32.to_le_bytes(), 0x400u32.to_le_bytes()].concat());
        }
        let mut body = vec![0; 8];
        body.extend([0, 8, 0, 0, 1, 0, 0, 0]); // APIC id 0, enabled
        body.extend([0, 8, 1, 5, 0, 0, 0, 0]); // APIC id 5, not enabled
        body.extend([1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]); // I/O APIC
        body.extend([9, 16, 0, 0, 0x2c, 1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]); // x2APIC id 300
        memory.table(0x400, b"APIC", &body);
        // Reserved bytes, then where the configuration spaces are, a segment, and which buses.
        let mcfg = [&[0; 8][..], &0xe000_0000u64.to_le_bytes(), &[0, 0, 0, 0, 0, 0, 0, 0]].concat();
        memory.table(0x500, b"MCFG", &mcfg);
        memory
    }
}

#[test]
fn cpus_are_found_through_both_kinds_of_root_table() {
    for revision in [0, 2] {
        let memory = Memory::machine(revision);
        let madt = acpi::madt(&memory, 0x100).expect("the tables are good");
        assert_eq!(madt.cpus().collect::<Vec<_>>(), [0, 300]);
        assert_eq!(madt.io_apic(), Some(0xfec0_0000));
        assert_eq!(acpi::ecam(&memory, 0x100), Some(0xe000_0000));
    }
}

#[test]
fn a_table_with_a_wrong_checksum_is_absent() {
    for at in [0x100, 0x204, 0x430] {
        let mut memory = Memory::machine(2);
        memory.0[at] ^= 0x40;
        assert!(acpi::madt(&memory, 0x100).is_none(), "changed byte {at:#x}");
    }
}

#[test]
fn random_damage_never_panics() {
    let mut random = Random::new(3, 0);
    for _ in 0..5000 {
        let mut memory = Memory::machine(2);
        for _ in 0..4 {
            let at = 0x400 + random.index(0x80);
            memory.0[at] = (random.bits() & 0xff) as u8;
        }
        // Make the checksum right again, so that the damage gets past it.
        let length = usize::from(memory.0[0x404]).max(36);
        memory.fix_checksum(0x400, length, 9);
        if let Some(madt) = acpi::madt(&memory, 0x100) {
            let _ = (madt.cpus().count(), madt.io_apic());
        }
    }
}

#[test]
fn lists_of_words_are_read_in_their_order() {
    let settings = Settings::parse("approach=hypercall,ipi pages=whole,33 targets=idle form=mask", |m| panic!("{m:?}"));
    let approaches: Vec<_> = settings.approach.iter().flat_map(Choice::iter).collect();
    assert_eq!(approaches, [Approach::Hypercall, Approach::Ipi]);
    let pages: Vec<_> = settings.pages.iter().flat_map(Choice::iter).collect();
    assert_eq!(pages, [Extent::Whole, Extent::Pages(33)]);
    assert!(settings.idle_targets && settings.by_mask);
}

#[test]
fn shares_are_of_a_hundred_and_nothing_of_the_memory_is_no_experiment() {
    let settings = Settings::parse("memory=64 writes=0 regions=10", |m| panic!("{m:?}"));
    assert_eq!((settings.memory, settings.writes, settings.regions), (Some(64), Some(0), Some(10)));
    for text in ["memory=0", "writes=101", "regions=0", "regions=101"] {
        let mut mistakes = 0;
        assert_eq!(Settings::parse(text, |_| mistakes += 1), Settings::default());
        assert_eq!(mistakes, 1, "{text}");
    }
}

#[test]
fn a_list_with_a_bad_word_is_refused_whole() {
    for text in ["pages=1,65", "pages=0", "pages=1,,2", "pages=", "pages=1,2,3,4,5", "approach=ipi,smoke", "targets=x"]
    {
        let mut mistakes = 0;
        let settings = Settings::parse(text, |_| mistakes += 1);
        assert_eq!((mistakes, settings.pages, settings.approach), (1, None, None), "{text}");
    }
}

#[test]
fn a_set_holds_what_was_put_in_and_nothing_else() {
    let mut random = Random::new(5, 0);
    for _ in 0..500 {
        let wanted: std::collections::BTreeSet<usize> =
            (0..random.index(40)).map(|_| random.index(cpu_set::ROOM)).collect();
        let mut set: CpuSet = wanted.iter().copied().collect();
        assert!(set.iter().eq(wanted.iter().copied()));
        assert_eq!((set.len(), set.is_empty()), (wanted.len(), wanted.is_empty()));
        assert_eq!(set.banks().len(), wanted.last().map_or(0, |last| last / 64 + 1));
        if let Some(&one) = wanted.first() {
            assert!(set.contains(one));
            set = set.without(one);
            assert!(!set.contains(one));
            assert_eq!(set.len() + 1, wanted.len());
        }
    }
    let mut empty = CpuSet::EMPTY;
    assert!(!empty.insert(cpu_set::ROOM));
    assert_eq!(CpuSet::first(1000).len(), cpu_set::ROOM);
}

#[test]
fn sparse_sets_list_their_banks_without_gaps() {
    let set: CpuSet = [0, 5, 130].into_iter().collect();
    assert_eq!(hypercall::sparse(&set), (0x7, &[0x21, 0, 0x4][..]));
    assert_eq!(hypercall::sparse(&CpuSet::EMPTY), (0, &[][..]));
}

#[test]
fn lists_name_each_page_once() {
    for (start, pages) in [(0x1000, 1), (0x20_0fff, 33), (0, 4096), (0x7000, 4097), (0x40_0000, 16_896), (0, 0)] {
        let mut next = start & !0xfff;
        for entry in hypercall::ranges(start, pages) {
            assert_eq!(entry & !0xfff, next);
            next += ((entry & 0xfff) + 1) * 4096;
        }
        assert_eq!(next, (start & !0xfff) + pages * 4096, "{start:#x} {pages}");
    }
    assert_eq!(hypercall::ranges(0, 16_896).count(), 5);
}

#[test]
fn control_words_put_each_field_in_its_place() {
    assert_eq!(Control::simple(hypercall::SEND_IPI).fast().0, 0x1_000b);
    assert_eq!(Control::rep(hypercall::FLUSH_LIST, 3).start(1).0, 1 << 48 | 3 << 32 | 3);
    assert_eq!(Control::rep(hypercall::FLUSH_LIST_EX, 6).variable(5).0, 6 << 32 | 5 << 17 | 0x14);
    assert_eq!((hypercall::status(0x2_0000_0005), hypercall::reps(0x2_0000_0005)), (5, 2));
}

#[test]
fn percentiles_are_those_of_the_nearest_rank() {
    let mut values: Vec<u64> = (1..=1000).rev().collect();
    let summary = Summary::of(&mut values);
    assert_eq!((summary.count, summary.mean), (1000, 500));
    assert_eq!((summary.p50, summary.p99, summary.p999, summary.max), (500, 990, 999, 1000));

    assert_eq!(Summary::of(&mut []), Summary::default());
    let one = Summary::of(&mut [7]);
    assert_eq!((one.mean, one.p50, one.p999, one.max), (7, 7, 7, 7));
    assert_eq!(Summary::of(&mut [u64::MAX, u64::MAX]).mean, u64::MAX);
    assert_eq!(one.map(|value| value * 2).max, 14);
}

#[test]
fn time_away_is_what_the_clock_has_and_the_run_time_lacks() {
    // The vCPU ran all the time: the run time has the elapsed time and the cost of reading it.
    assert_eq!(net_of_absence(1000, 1050, 50), 1000);
    // Away for 700.
    assert_eq!(net_of_absence(1000, 350, 50), 300);
    // The run time is coarse: more than there can have been is all of it.
    assert_eq!(net_of_absence(1000, 1200, 50), 1000);
    assert_eq!(net_of_absence(1000, 0, 50), 0);
    assert_eq!(net_of_absence(u64::MAX, 0, u64::MAX), 0);
}

#[test]
fn ticks_convert_without_overflow() {
    assert_eq!(nanoseconds(3_000, 1_000_000), 3_000);
    assert_eq!(nanoseconds(u64::MAX, 1), u64::MAX);
    assert_eq!(scaled(7, 1, 0), 7);
}

/// One page, its writer and readers, in every order that the rules allow, with TLBs that keep all that they may.
#[test]
fn good_translations_never_look_stale_and_stale_ones_do() {
    let mut random = Random::new(9, 0);
    let mut alarms = 0;
    for omit_flush in [false, true] {
        let mut frames = [0u64; FRAMES];
        let (mut mapped, mut tlb, mut published) = (0, None, 0);
        for number in 1..5000u64 {
            let mut read = |frames: &[u64; FRAMES], mapped: usize, published: u64| {
                // The reader may be anywhere between taking the promise and reading, or keep an old entry.
                let frame = *tlb.get_or_insert(mapped);
                if random.below(3) == 0 {
                    tlb = None;
                }
                is_stale(published, frames[frame])
            };
            frames[frame_of(number)] = number;
            let early = read(&frames, mapped, published);
            mapped = frame_of(number);
            let between = read(&frames, mapped, published);
            if !omit_flush {
                tlb = None;
            }
            published = number;
            let mut read_late = || is_stale(published, frames[*tlb.get_or_insert(mapped)]);
            let late = read_late();
            assert!(omit_flush || !(early || between || late), "false alarm at {number}");
            alarms += u32::from(early || between || late);
        }
    }
    assert!(alarms > 100, "only {alarms} of the omitted flushes were noticed");
}
