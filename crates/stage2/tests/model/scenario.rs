//! What the threads do: two vCPUs that write, and a third processor that follows with a copy, takes memory away, or
//! makes large pages of small ones.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, GpaRange, Hpa};
use hw_model::walks::{Geometry, Rules, Stop};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Arc;
use shuttle::{Config, Runner};
use stage2::tlbi::resolve_conflict;
use stage2::{
    Access, Collapse, DirtyLog, Epochs, Fault, Format, Granularity, Limbo, MarkWord, Policy, Quiescence, Rounds,
    Source, Spare, Stale, Start, Tree, Walker,
};

use crate::machine::{Cpu, Machine, Mutant, Payer};

/// What is tried.
#[derive(Clone, Copy)]
pub(crate) struct Setting<F> {
    pub(crate) format: F,
    pub(crate) rules: Rules,
    pub(crate) kind: Kind,
    pub(crate) source: Source,
    pub(crate) policy: Policy,
    pub(crate) mutant: Mutant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A copy follows what the guest and the hypervisor write.
    Follow,
    /// Pages are unmapped, protected, and given back.
    TakeAway,
    /// Two processors protect single pages of the same large leaves, and give them back.
    TakePages,
    /// Tables are collapsed while the guest makes new ones.
    Collapse,
    /// Nothing is mapped before the guest touches it.
    FirstTouch,
}

/// Pages of the guest; with four entries in a table, two leaves of four pages each.
const PAGES: u64 = 8;
/// Those of the first leaf.
const FEW: u64 = PAGES / 2;
/// Where they are in host memory, at a multiple of what four levels translate.
const HOST: u64 = 0x10_0000;
const VCPUS: usize = 2;
const OTHER: usize = VCPUS;
const DEVICE: usize = VCPUS + 1;
/// A guest that faults so often in one access will do so for ever.
const PATIENCE: u32 = 400;

type Log = DirtyLog<Vec<MarkWord>>;

/// Tries `schedules` schedules.
///
/// Half of them at random, which mixes steps finely; half with few preemptions, which leaves a thread behind for long.
/// They are the same in every run, until `DUNLIN_SEED` says otherwise.
pub(crate) fn run<F: Format + Copy + Send + Sync + 'static>(setting: Setting<F>, schedules: usize) {
    const CHUNK: usize = 100;
    let seed: u64 = std::env::var("DUNLIN_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for (chunk, seed) in (0..schedules.div_ceil(2 * CHUNK)).zip(seed << 32..) {
        let count = CHUNK.min(schedules.div_ceil(2) - chunk * CHUNK);
        let fine = RandomScheduler::new_from_seed(seed, count);
        Runner::new(fine, Config::default()).run(move || once(setting));
        let coarse = PctScheduler::new_from_seed(seed, 3, count);
        Runner::new(coarse, Config::default()).run(move || once(setting));
    }
}

/// What is found to be wrong in one of `schedules` schedules, if anything is.
pub(crate) fn caught<F: Format + Copy + Send + Sync + 'static>(
    setting: Setting<F>,
    schedules: usize,
) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(|| run(setting, schedules))).err()?;
    let text = payload.downcast_ref::<String>().cloned();
    Some(text.or_else(|| Some((*payload.downcast_ref::<&str>()?).to_string())).unwrap_or_default())
}

struct Guest<F> {
    tree: Tree<F>,
    log: Option<Log>,
    epochs: Epochs<Vec<Walker>>,
    kind: Kind,
}

fn once<F: Format + Copy + Send + Sync + 'static>(setting: Setting<F>) {
    let geometry = Geometry { index_bits: F::INDEX_BITS, levels: setting.format.levels() };
    let machine = Machine::new(setting.rules, geometry, VCPUS + 2, PAGES, setting.mutant);
    let other = Cpu { machine: machine.clone(), number: OTHER };
    let (tree, mut shape) = Tree::new(setting.format, &other).expect("tables");
    machine.step().walks.set_root(tree.root().0);
    let all = range(0, PAGES);
    if setting.kind != Kind::FirstTouch {
        tree.map(&mut shape, &other, &other, all, Hpa(HOST), Access::ALL).expect("maps");
    }

    let marks = vec![MarkWord::new()];
    let log = DirtyLog::new(all, setting.source, setting.policy, marks).expect("enough marks");
    let walkers = (0..VCPUS + 2).map(|_| Walker::new()).collect();
    let log = matches!(setting.kind, Kind::Follow | Kind::Collapse).then_some(log);
    let guest = Arc::new(Guest { tree, log, epochs: Epochs::new(walkers), kind: setting.kind });

    let vcpus: Vec<_> = (0..VCPUS)
        .map(|number| {
            let (guest, cpu) = (guest.clone(), Cpu { machine: machine.clone(), number });
            shuttle::thread::spawn(move || run_vcpu(&guest, &cpu))
        })
        .collect();
    let device = {
        let (guest, cpu) = (guest.clone(), Cpu { machine: machine.clone(), number: DEVICE });
        shuttle::thread::spawn(move || match guest.kind {
            Kind::TakePages => take_pages(&guest, &cpu),
            _ => run_device(&guest, &cpu),
        })
    };
    let join = move || {
        vcpus.into_iter().for_each(|vcpu| vcpu.join().expect("a vCPU found nothing wrong"));
        device.join().expect("a device found nothing wrong");
    };

    match setting.kind {
        Kind::Follow => follow(&guest, &other, join),
        Kind::TakeAway => {
            take_away(&guest, &other, &mut shape);
            join();
        }
        Kind::Collapse => {
            collapse(&guest, &other, &mut shape);
            join();
        }
        Kind::TakePages => {
            take_pages(&guest, &other);
            join();
        }
        Kind::FirstTouch => join(),
    }
    let world = machine.step();
    SEEN.hushed.fetch_add(world.hushed, Ordering::Relaxed);
    SEEN.awakened.fetch_add(world.awakened, Ordering::Relaxed);
    let events = world.walks.events();
    SEEN.recorded.fetch_add(events.recorded, Ordering::Relaxed);
    SEEN.broadcasts.fetch_add(events.broadcasts, Ordering::Relaxed);
    SEEN.locals.fetch_add(events.locals, Ordering::Relaxed);
    SEEN.stops.fetch_add(events.stops, Ordering::Relaxed);
}

/// What has happened in all schedules together: a model in which nothing happens finds nothing.
pub(crate) static SEEN: Seen = Seen {
    recorded: AtomicU64::new(0),
    broadcasts: AtomicU64::new(0),
    locals: AtomicU64::new(0),
    stops: AtomicU64::new(0),
    collapsed: AtomicU64::new(0),
    disturbed: AtomicU64::new(0),
    conflicts: AtomicU64::new(0),
    hushed: AtomicU64::new(0),
    awakened: AtomicU64::new(0),
};

#[derive(Debug)]
pub(crate) struct Seen {
    /// Writes that the hardware recorded.
    pub(crate) recorded: AtomicU64,
    pub(crate) broadcasts: AtomicU64,
    pub(crate) locals: AtomicU64,
    /// Faults.
    pub(crate) stops: AtomicU64,
    /// Tables that became leaves.
    pub(crate) collapsed: AtomicU64,
    /// Faults that met an entry that somebody was replacing.
    pub(crate) disturbed: AtomicU64,
    /// Conflicts that the hardware reported.
    pub(crate) conflicts: AtomicU64,
    /// Tables that became quiet, and that were woken.
    pub(crate) hushed: AtomicU64,
    pub(crate) awakened: AtomicU64,
}

/// A guest that writes, and a hypervisor that handles its faults.
fn run_vcpu<F: Format>(guest: &Guest<F>, cpu: &Cpu) {
    let mut spare = Spare::new();
    // Broadcasts that can wait do so until the end.
    let mut owed = Stale::EMPTY;
    for _ in 0..3 {
        let page = cpu.machine.step().walks.pick(if guest.kind == Kind::TakePages { FEW } else { PAGES });
        spare.fill(cpu, 2).expect("tables");
        write(guest, cpu, &mut spare, &mut owed, page << 12);
    }
    cpu.pay(owed);
    spare.give_back(cpu);
}

fn write<F: Format>(guest: &Guest<F>, cpu: &Cpu, spare: &mut Spare, owed: &mut Stale, gpa: u64) {
    for _ in 0..PATIENCE {
        cpu.machine.step().walks.enter(cpu.number);
        let stop = {
            let mut world = cpu.machine.step();
            let result = world.walks.access(cpu.number, gpa, true);
            if let Ok(hpa) = result {
                // Who touches a page first has chosen its frame.
                let is_choice = guest.kind == Kind::FirstTouch && !world.frames.contains_key(&gpa);
                let frame = world.frames.entry(gpa).or_insert(if is_choice { hpa } else { HOST + gpa });
                assert_eq!(hpa, *frame, "the guest writes elsewhere");
                world.write(hpa);
            }
            result
        };
        cpu.machine.step().walks.leave(cpu.number);
        if stop.is_ok() {
            return;
        }
        let nothing_there = stop == Err(Stop::Translation) && guest.kind != Kind::TakeAway;
        SEEN.disturbed.fetch_add(nothing_there.into(), Ordering::Relaxed);

        if stop == Err(Stop::Conflict) {
            SEEN.conflicts.fetch_add(1, Ordering::Relaxed);
            if cpu.machine.mutant != Mutant::ConflictStays {
                resolve_conflict(cpu);
            }
            continue;
        }
        let wanted = if stop == Err(Stop::AccessFlag) { Access::READ } else { Access::READ_WRITE };
        let mut granularity = guest.log.as_ref().map_or(Granularity::Whole, Log::granularity);
        let walking = guest.epochs.enter(cpu.number).expect("not walking yet");
        let fault = loop {
            match guest.tree.fault(cpu, cpu, Gpa(gpa), wanted, granularity) {
                Fault::Large => match guest.tree.split_at_fault(cpu, cpu, Gpa(gpa), granularity, spare) {
                    Ok(later) => *owed = owed.merge(later),
                    Err(_) => granularity = Granularity::Whole,
                },
                fault => break fault,
            }
        };
        drop(walking);
        match fault {
            Fault::Retry(denial) => {
                if let Some(gpa) = denial.gpa().filter(|_| cpu.machine.mutant != Mutant::NoLocal) {
                    cpu.forget(gpa);
                }
                shuttle::thread::yield_now();
            }
            Fault::Unmapped if guest.kind == Kind::FirstTouch => {
                // Each vCPU has frames of its own at hand, for small pages and for large ones.
                let level = u32::try_from(cpu.machine.step().walks.pick(2)).expect("small");
                let page = gpa & !((1_u64 << (12 + F::INDEX_BITS * level)) - 1);
                let frame = Hpa(HOST + ((cpu.number as u64) << 19) + page);
                spare.fill(cpu, 3).expect("tables");
                guest.tree.populate(cpu, cpu, spare, Gpa(gpa), frame, level, Access::ALL).expect("tables");
                let found = guest.tree.lookup(cpu, Gpa(gpa)).expect("is mapped");
                cpu.machine.step().frames.entry(gpa).or_insert(found.translate(Gpa(gpa)).0);
            }
            Fault::Large => unreachable!("was split"),
            Fault::Unmapped | Fault::Denied(_) => {
                let is_meant = matches!(guest.kind, Kind::TakeAway | Kind::TakePages);
                assert!(is_meant, "{fault:?} where there is memory");
                return;
            }
        }
    }
    panic!("a guest faults for ever at {gpa:#x}");
}

/// A sender: rounds of what is dirty, one of them lost, and a last one when the guest stands.
fn follow<F: Format>(guest: &Guest<F>, cpu: &Cpu, join: impl FnOnce()) {
    let log = guest.log.as_ref().expect("there is one");
    let mut copy: Vec<u64> = (0..PAGES).map(|_| 0).collect();
    let mut rounds = Rounds::new(log, vec![0; 1]).expect("enough bits");
    let mut spare = Spare::new();
    spare.fill(cpu, 4).expect("tables");

    let from = if cpu.machine.step().walks.pick(2) == 0 { Start::AllDirty } else { Start::Clean };
    let stale = log.start(&guest.tree, cpu, cpu, from, &mut spare).expect("tables");
    cpu.pay(stale);
    if from == Start::Clean {
        send(guest, cpu, &mut rounds, &mut copy, &[(1 << PAGES) - 1]);
    }
    let mut ahead = Gpa(0);
    // The more, the more time for tables to become quiet and to be woken.
    let count = 2 + cpu.machine.step().walks.pick(4);
    for round in 0..count {
        if log.granularity() == Granularity::Watched && ahead < log.slot().end() {
            let (stale, next) = log.split_ahead(&guest.tree, cpu, cpu, ahead, &mut spare);
            cpu.pay(stale);
            ahead = next;
        }

        if cpu.machine.step().walks.pick(2) == 0 {
            guest.tree.age(cpu, cpu, log.slot(), |_| {});
        }

        let mut dirty = [0];
        log.get(&guest.tree, cpu, cpu, 0, &mut dirty);
        let before = copy.clone();
        send(guest, cpu, &mut rounds, &mut copy, &dirty);
        if round == 0 && cpu.machine.step().walks.pick(2) == 0 {
            // The receiver has seen nothing of it.
            copy = before;
            if cpu.machine.mutant == Mutant::ForgottenOnCancel { rounds.acknowledge() } else { rounds.cancel(log) }
        } else {
            rounds.acknowledge();
        }
    }

    join();
    let mut dirty = [0];
    log.get(&guest.tree, cpu, cpu, 0, &mut dirty);
    send(guest, cpu, &mut rounds, &mut copy, &dirty);
    let world = cpu.machine.step();
    for (page, copied) in (0..).zip(&copy) {
        assert_eq!(*copied, world.read(HOST + (page << 12)), "a write to page {page} is lost");
    }
    drop(world);
    spare.give_back(cpu);
}

fn send<F: Format>(guest: &Guest<F>, cpu: &Cpu, rounds: &mut Rounds<Vec<u64>>, copy: &mut [u64], wanted: &[u64; 1]) {
    let log = guest.log.as_ref().expect("there is one");
    let mut copy_pages = |wanted: u64| {
        for (page, copied) in (0..).zip(copy.iter_mut()).filter(|(page, _)| wanted >> page & 1 != 0) {
            *copied = cpu.machine.step().read(HOST + (page << 12));
        }
    };
    if cpu.machine.mutant == Mutant::CopiedFirst {
        copy_pages(wanted[0]);
    }
    let cleared = rounds.clear(log, &guest.tree, cpu, cpu, 0, wanted);
    match cpu.machine.mutant {
        Mutant::NoFlush => copy_pages(wanted[0]),
        Mutant::CopiedFirst => drop(cleared.flush(&Payer(cpu), &guest.epochs)),
        _ => copy_pages(cleared.flush(&Payer(cpu), &guest.epochs).pages().map(|page| 1 << page).sum()),
    }
}

/// The hypervisor itself writes to the guest's memory, as its devices do.
fn run_device<F>(guest: &Guest<F>, cpu: &Cpu) {
    let Some(log) = &guest.log else { return };
    for _ in 0..2 {
        let page = cpu.machine.step().walks.pick(PAGES);
        let write = || cpu.machine.step().write(HOST + (page << 12));
        let walks = cpu.machine.step().walks.pick(2) == 0;
        if cpu.machine.mutant == Mutant::MarkedFirst {
            log.mark(range(page, 1));
            write();
        } else if walks {
            let walking = guest.epochs.enter(cpu.number).expect("not walking yet");
            log.write_as_walker(&walking, range(page, 1), write);
        } else {
            log.write_as_host(range(page, 1), write);
        }
    }
}

/// Pages go, are write-protected, and come back.
fn take_away<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut stage2::Shape) {
    let (tree, flushes) = (&guest.tree, cpu.machine.mutant != Mutant::NoFlushOfRange);
    let first = cpu.machine.step().walks.pick(PAGES);
    let count = 1 + cpu.machine.step().walks.pick(PAGES - first);
    let part = range(first, count);
    let pages = || (first..first + count).map(|page| page << 12);

    let stale = tree.protect(shape, cpu, cpu, part, Access::READ_EXECUTE).expect("tables");
    if flushes {
        cpu.pay(stale);
    }
    pages().for_each(|gpa| cpu.machine.step().walks.declare_read_only(gpa));
    shuttle::thread::yield_now();

    pages().for_each(|gpa| cpu.machine.step().walks.declare_usable(gpa));
    let grown = tree.protect(shape, cpu, cpu, part, Access::ALL).expect("tables");
    cpu.pay(grown);
    shuttle::thread::yield_now();

    let stale = tree.unmap(shape, cpu, cpu, part).expect("tables");
    if flushes {
        cpu.pay(stale);
    }
    pages().for_each(|gpa| cpu.machine.step().walks.declare_unmapped(gpa));
    shuttle::thread::yield_now();

    pages().for_each(|gpa| cpu.machine.step().walks.declare_usable(gpa));
    tree.map(shape, cpu, cpu, part, Hpa(HOST + part.start.0), Access::ALL).expect("maps");
}

/// Single pages become read-only and writable again; each processor has its own, in the same large leaf. What is owed for
/// one may be paid with the next.
fn take_pages<F: Format>(guest: &Guest<F>, cpu: &Cpu) {
    let mut owed = Stale::EMPTY;
    let mut taken = Vec::new();
    for _ in 0..2 {
        let page = cpu.machine.step().walks.pick(FEW / 2) * 2 + cpu.number as u64 % 2;
        let stale = guest.tree.protect_page(cpu, cpu, Gpa(page << 12), Access::READ_EXECUTE).expect("tables");
        owed = owed.merge(stale);
        taken.push(page << 12);
        shuttle::thread::yield_now();
        if cpu.machine.step().walks.pick(2) == 0 {
            cpu.pay(core::mem::replace(&mut owed, Stale::EMPTY));
            taken.iter().for_each(|gpa| cpu.machine.step().walks.declare_read_only(*gpa));
            shuttle::thread::yield_now();
        }
    }
    cpu.pay(owed);
    for gpa in taken {
        cpu.machine.step().walks.declare_usable(gpa);
        cpu.pay(guest.tree.protect_page(cpu, cpu, Gpa(gpa), Access::ALL).expect("no table needed"));
    }
}

/// Small pages become large while vCPUs use them, and are split again by their faults.
fn collapse<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut stage2::Shape) {
    let log = guest.log.as_ref().expect("there is one");
    let mut limbo = Limbo::<4>::new();
    let mut spare = Spare::new();
    for _ in 0..2 {
        let stale = log.start(&guest.tree, cpu, cpu, Start::Clean, &mut spare).expect("nothing to split");
        cpu.pay(stale);
        shuttle::thread::yield_now();
        log.stop(&guest.tree, cpu, cpu);
        for gpa in [Gpa(0), Gpa((PAGES / 2) << 12)] {
            let careless = Careless;
            let result = if cpu.machine.mutant == Mutant::FreedEarly {
                let result = guest.tree.collapse(shape, cpu, cpu, &mut limbo, &careless, gpa, 1);
                limbo.reclaim(cpu, &careless);
                result
            } else {
                let result = guest.tree.collapse(shape, cpu, cpu, &mut limbo, &guest.epochs, gpa, 1);
                limbo.reclaim(cpu, &guest.epochs);
                result
            };
            assert_ne!(result, Collapse::Full);
            SEEN.collapsed.fetch_add((result == Collapse::Done).into(), Ordering::Relaxed);
        }
    }
    spare.give_back(cpu);
}

/// Believes that nobody ever walks.
struct Careless;

impl Quiescence for Careless {
    fn end_epoch(&self) -> u64 {
        0
    }
    fn have_left(&self, _: u64) -> bool {
        true
    }
}

fn range(first: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(first << 12), pages << 12).expect("a range")
}
