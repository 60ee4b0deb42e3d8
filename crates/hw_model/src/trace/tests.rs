//! Lines and events convert into each other, and a replay finds what a real TLB would hide.

use super::{Event, Outcome, Trace};
use crate::walks::{Barrier, Invalidate, Violation};

/// Traces of two hosts, QEMU's `max` of either architecture with 2 pCPUs, as the hypervisor printed them. A VM with 2
/// vCPUs and its memory (18 and 20 MiB) runs the guest `scribble` while a log is started, harvested and stopped. The
/// second trace is only the beginning.
const RECORDED: [&str; 2] = [include_str!("recorded-arm.trace"), include_str!("recorded-nested.trace")];

/// A large page is mapped, write-protected, and split; a page of it becomes writable; all of it becomes large again.
/// The table is freed and reused. There are two pCPUs; the second is in its guest all the time.
const LIFE: &str = "\
machine cpus=2 rules=arm bbm=2 hafdbs=0 levels=2
cpu=0 allocate table=0x100000 count=1
cpu=0 exchange table=0x100000 index=1 old=0x0 new=0x4c2007fd
cpu=0 exchange table=0x100000 index=2 old=0x0 new=0x4c4007fd
cpu=0 barrier ishst
cpu=1 load vmid=1 root=0x100000
cpu=1 enter vmid=1 root=0x100000
cpu=0 load vmid=1 root=0x100000
cpu=0 exchange table=0x100000 index=1 old=0x4c2007fd new=0x4c20077d
cpu=0 flush root=0x100000
cpu=0 barrier ishst
cpu=0 tlbi ipas2le1is start=0x200000 bytes=0x1000
cpu=0 barrier ish
cpu=0 tlbi vmalle1is
cpu=0 barrier ish
cpu=0 flushed root=0x100000 start=0x200000 end=0x400000
cpu=0 allocate table=0x101000 count=1
cpu=0 store table=0x101000 index=0 bits=0x4c20077f
cpu=0 store table=0x101000 index=1 bits=0x4c20177f
cpu=0 exchange table=0x100000 index=1 old=0x4c20077d new=0x101003
cpu=0 exchange table=0x101000 index=1 old=0x4c20177f new=0x4c2017ff
cpu=0 exchange table=0x100000 index=1 old=0x101003 new=0x200000000000000
cpu=0 flush root=0x100000
cpu=0 barrier ishst
cpu=0 tlbi ripas2e1is start=0x200000 bytes=0x200000
cpu=0 barrier ish
cpu=0 tlbi vmalle1is
cpu=0 barrier ish
cpu=0 flushed root=0x100000 start=0x200000 end=0x400000
cpu=0 exchange table=0x100000 index=1 old=0x200000000000000 new=0x4c2007fd
cpu=0 barrier ishst
cpu=0 free table=0x101000
cpu=0 allocate table=0x101000 count=1
cpu=0 store table=0x101000 index=0 bits=0x7777077f
cpu=1 leave
";

/// The same on the other kind of machine, where entries flush TLBs.
const NESTED_LIFE: &str = "\
machine cpus=2 rules=nested levels=2
cpu=0 allocate table=0x100000 count=1
cpu=0 exchange table=0x100000 index=1 old=0x0 new=0x4c2000e7
cpu=1 entry-flushes tag
cpu=1 enter vmid=1 root=0x100000
cpu=0 exchange table=0x100000 index=1 old=0x4c2000e7 new=0x4c2000a5
cpu=0 flush root=0x100000
cpu=1 leave
cpu=0 flushed root=0x100000 start=0x200000 end=0x400000
cpu=1 entry-flushes tag
cpu=1 enter vmid=1 root=0x100000
cpu=1 leave
";

fn trace(text: &str) -> Trace {
    text.parse().unwrap_or_else(|mistake| panic!("{mistake}"))
}

/// Violations in some runs of the machine.
fn violations(trace: &Trace) -> Vec<(usize, Violation)> {
    let replay = |seed: u64| trace.replay(seed * 0x9e37_79b9).unwrap_or_else(|mistake| panic!("{mistake}"));
    (1..200).flat_map(|seed| replay(seed).violations).collect()
}

/// The trace without the line that begins like this: the only one, or the first.
fn spoiled(text: &str, line: &str) -> Trace {
    let at = text.find(line).unwrap_or_else(|| panic!("no {line}"));
    let end = at + text[at..].find('\n').unwrap_or(0);
    trace(&format!("{}#{}", &text[..at], &text[end..]))
}

#[test]
fn each_event_is_read_as_it_is_written() {
    let page = Invalidate::Guest { start: 0x1000, end: 0x2000, level: Some(1), leaves: true };
    let range = Invalidate::Guest { start: 0x1000, end: 0x9000, level: None, leaves: false };
    let mut events = vec![
        Event::Exchange { table: 0x1000, index: 511, old: 0, new: u64::MAX },
        Event::Store { table: 0x1000, index: 0, bits: 3 },
        Event::Allocate { table: 0x1000, count: 16 },
        Event::Free { table: 0x1000 },
        Event::EntryFlushes { all: true },
        Event::EntryFlushes { all: false },
        Event::Load { vmid: 0xffff, root: 0x1000 },
        Event::Enter { vmid: 1, root: 0x1000 },
        Event::Leave,
        Event::Flush { root: 0x1000 },
        Event::Flushed { root: 0x1000, start: 0, end: u64::MAX },
    ];
    let barriers = [Barrier::LocalStores, Barrier::Stores, Barrier::Local, Barrier::Full];
    events.extend(barriers.map(Event::Barrier));
    for invalidate in [page, range, Invalidate::Combined, Invalidate::All, Invalidate::Everything] {
        events.extend([true, false].map(|everywhere| Event::Tlbi { invalidate, everywhere }));
    }
    for event in events {
        assert_eq!(event.to_string().parse(), Ok(event), "{event}");
    }
}

#[test]
fn whole_traces_are_read_as_they_are_written() {
    for text in [LIFE, NESTED_LIFE].into_iter().chain(RECORDED) {
        let read = trace(text);
        let again = trace(&read.to_string());
        let events = |trace: &Trace| trace.steps.iter().map(|step| (step.cpu, step.event)).collect::<Vec<_>>();
        assert_eq!(events(&read), events(&again));
        assert_eq!((read.cpus, read.rules, read.levels), (again.cpus, again.rules, again.levels));
    }
}

#[test]
fn lines_of_a_log_are_picked_out() {
    let log = "[    0.1] cpu0 info  hello\n[    0.2] cpu0 trace stage2: machine cpus=1 rules=nested levels=4\n\
               [    0.3] cpu0 trace stage2: cpu=0 leave\n[    0.3] cpu0 trace stage2: full\n[ 0.4] cpu0 trace stage2: cpu=0 leave\n";
    assert_eq!(trace(log).steps.len(), 1);
}

#[test]
fn mistakes_are_told_with_their_line() {
    let machine = "machine cpus=2 rules=nested levels=4";
    for (text, line, why) in [
        ("", 1, "no trace"),
        ("cpu=0 leave", 1, "begins with `machine`"),
        ("machine cpus=0 rules=nested levels=4", 1, "one of 1 to 256"),
        ("machine cpus=1 rules=none levels=4", 1, "no rules"),
        ("machine cpus=1 rules=nested levels=9", 1, "2 to 4"),
        (&format!("{machine}\ncpu=2 leave"), 2, "one of 0 to 1"),
        (&format!("{machine}\n\ncpu=0 go"), 3, "`go` is no event"),
        (&format!("{machine}\ncpu=0 leave now"), 2, "`now` is too much"),
        (&format!("{machine}\ncpu=0 free"), 2, "too short"),
        (&format!("{machine}\ncpu=0 free table=zero"), 2, "a number"),
        (&format!("{machine}\ncpu=0 store table=0 index=512 bits=0"), 2, "one of 0 to 511"),
        (&format!("{machine}\ncpu=0 tlbi ipas2e1 start=0xffffffffffffffff bytes=0x1000"), 2, "too long"),
        (&format!("{machine}\ncpu=0 barrier sy"), 2, "no barrier"),
    ] {
        let mistake = text.parse::<Trace>().expect_err(text);
        assert!(mistake.line == line && mistake.why.contains(why), "{text}: {mistake}");
    }
}

#[test]
fn trace_that_contradicts_itself_is_refused() {
    for line in
        ["exchange table=0x100000 index=0 old=0x1 new=0x0", "free table=0x5000", "allocate table=0x1000 count=3"]
    {
        let text =
            format!("machine cpus=1 rules=nested levels=2\ncpu=0 allocate table=0x100000 count=1\ncpu=0 {line}\n");
        assert_eq!(trace(&text).replay(1).expect_err(line).line, 3);
    }
}

#[test]
fn trace_of_a_large_pages_life_is_clean() {
    for text in [LIFE, NESTED_LIFE] {
        assert_eq!(violations(&trace(text)), []);
        assert!(trace(text).replay(1).is_ok_and(|outcome| outcome.checked > 0));
    }
}

#[test]
fn missing_tlbi_is_found() {
    let without = violations(&spoiled(LIFE, "cpu=0 tlbi ipas2le1is"));
    assert!(without.contains(&(16, Violation::StaleUse(0x20_0000))), "{without:?}");
    let combined = violations(&spoiled(LIFE, "cpu=0 tlbi vmalle1is"));
    assert!(combined.iter().any(|(line, what)| *line == 16 && matches!(what, Violation::StaleUse(_))), "{combined:?}");
    let table = violations(&spoiled(LIFE, "cpu=0 tlbi ripas2e1is"));
    assert!(table.contains(&(32, Violation::FreedEarly(0x10_1000))), "{table:?}");
}

#[test]
fn missing_or_weak_barrier_is_found() {
    // After the last TLBI there is only the claim that it is done.
    let text = LIFE.replacen("cpu=0 barrier ish\ncpu=0 flushed", "#\ncpu=0 flushed", 1);
    assert!(!violations(&trace(&text)).is_empty());
    // The invalidated entry comes back from the old value.
    let text = LIFE.replacen("cpu=0 barrier ishst\ncpu=0 tlbi", "#\ncpu=0 tlbi", 1);
    assert!(!violations(&trace(&text)).is_empty());
    let text = LIFE.replacen("cpu=0 barrier ish\n", "cpu=0 barrier nsh\n", 2);
    assert!(!violations(&trace(&text)).is_empty());
}

#[test]
fn tlbi_of_another_vm_is_found() {
    let text = LIFE.replace("cpu=0 load vmid=1", "cpu=0 load vmid=2");
    assert!(!violations(&trace(&text)).is_empty());
}

#[test]
fn table_that_is_freed_and_used_again_too_early_is_found() {
    let free = "cpu=0 free table=0x101000\ncpu=0 allocate table=0x101000 count=1\ncpu=0 store table=0x101000 index=0 bits=0x7777077f\n";
    let early = LIFE.replace(free, "#\n").replacen("cpu=0 flush root", &format!("{free}cpu=0 flush root"), 2);
    // The second flush is that of the table.
    let early = early.replacen(free, "", 1);
    let found = violations(&trace(&early));
    assert!(found.iter().any(|(_, what)| *what == Violation::FreedEarly(0x10_1000)), "{found:?}");
}

#[test]
fn who_stays_in_its_guest_or_enters_without_a_flush_is_found() {
    let stays = NESTED_LIFE.replacen("cpu=1 leave\ncpu=0 flushed", "#\ncpu=0 flushed", 1);
    assert!(violations(&trace(&stays)).contains(&(9, Violation::NotCompleted)));
    let enters = NESTED_LIFE.replace(
        "flushed root=0x100000 start=0x200000 end=0x400000\ncpu=1 entry-flushes tag",
        "flushed root=0x100000 start=0x200000 end=0x400000\n#",
    );
    assert!(violations(&trace(&enters)).contains(&(11, Violation::NotCompleted)));
}

#[test]
fn what_a_host_did_is_clean_and_without_its_invalidations_it_is_not() {
    let replay = |trace: &Trace| -> Outcome { trace.replay(0x9e37_79b9).unwrap_or_else(|mistake| panic!("{mistake}")) };
    for recorded in RECORDED.map(trace) {
        let outcome = replay(&recorded);
        assert_eq!(outcome.violations, []);
        assert!(outcome.walks > 1000 && outcome.checked > 100, "{} walks, {}", outcome.walks, outcome.checked);
        assert!(!replay(&recorded.without(Event::invalidates)).violations.is_empty());
    }
}

#[test]
fn each_broadcast_that_a_host_made_is_needed() {
    let recorded = trace(RECORDED[0]);
    let is_broadcast = |event: &Event| matches!(event, Event::Tlbi { everywhere: true, .. });
    let count = recorded.steps.iter().filter(|step| is_broadcast(&step.event)).count();
    assert!(count > 5, "{count}");
    for left_out in 0..count {
        let mut number = 0..;
        let spoiled = recorded.without(|event| is_broadcast(event) && number.next() == Some(left_out));
        let is_found = |seed: u64| spoiled.replay(seed * 0x9e37_79b9).is_ok_and(|found| !found.violations.is_empty());
        assert!((1..20).any(is_found), "broadcast {left_out}");
    }
}
