//! Scenarios: two vCPUs write, and further processors follow with a copy, take memory away, or collapse small pages.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

use addr::{Gpa, GpaRange, Hpa};
use hw_model::walks::{Barrier as Wait, Geometry, Rules};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Arc;
use shuttle::{Config, Runner};
use stage2::{
    Access, Collapse, DirtyLog, Epochs, EptOf, Format, Iommu, Limbo, MarkWord, NptOf, Policy, Quiescence, Shape,
    Source, Spare, Stale, Start, Tree, VmsaOf, Walk, Walker,
};

use crate::machine::{Cpu, Machine, Mutant};
use crate::sender::{become_quiet, follow, follow_closely};
use crate::vcpu::run_vcpu;

/// A scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) rules: Rules,
    pub(crate) kind: Kind,
    pub(crate) source: Source,
    pub(crate) policy: Policy,
    pub(crate) mutant: Mutant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A copy follows the writes of guest and hypervisor. Some rounds are lost, and the log may end and begin again.
    Follow,
    /// Pages are unmapped, protected, and given back.
    TakeAway,
    /// Two processors protect single pages of the same large leaves, and give them back.
    TakePages,
    /// Tables are collapsed while the guest makes new ones.
    Collapse,
    /// Nothing is mapped before the guest touches it.
    FirstTouch,
    /// A copy follows a guest that begins to write late, to pages of a table that has become quiet.
    Awake,
    /// Two VMs on the same processors: a copy follows one, pages of the other are taken away.
    SideBySide,
}

/// Pages of the guest; with four entries in a table, two leaves of four pages each.
pub(crate) const PAGES: u64 = 8;
/// Those of the first leaf.
pub(crate) const FEW: u64 = PAGES / 2;
/// Host address of the first VM's pages, aligned to what four levels translate. The others' follow.
const HOST: u64 = 0x10_0000;
const VCPUS: usize = 2;
const OTHER: usize = VCPUS;
const DEVICE: usize = VCPUS + 1;

pub(crate) type Log = DirtyLog<Vec<MarkWord>>;

/// Tries `schedules` schedules.
///
/// Half of them are random, which mixes steps finely. Half have few preemptions, which delays a thread for long. Every
/// run uses the same ones, unless `DUNLIN_SEED` is set.
pub(crate) fn run(setting: Setting, schedules: usize) {
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

/// The first error in `schedules` schedules, if there is one.
pub(crate) fn caught(setting: Setting, schedules: usize) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(|| run(setting, schedules))).err()?;
    let text = payload.downcast_ref::<String>().cloned();
    Some(text.or_else(|| Some((*payload.downcast_ref::<&str>()?).to_string())).unwrap_or_default())
}

/// One VM.
pub(crate) struct Guest<F> {
    pub(crate) tree: Tree<F>,
    pub(crate) log: Option<Log>,
    pub(crate) epochs: Epochs<Vec<Walker>>,
    pub(crate) kind: Kind,
    /// The hardware lists its writes.
    pub(crate) is_listed: bool,
    /// Host address of its memory.
    pub(crate) host: u64,
    /// How many pages it writes to, from the first on.
    pub(crate) writable: AtomicU64,
}

impl<F: Format> Guest<F> {
    /// The processor announces itself and walks.
    pub(crate) fn walk<R>(&self, cpu: &Cpu, does: impl FnOnce(Walk<'_, F, Cpu, Cpu>) -> R) -> R {
        let walking = self.epochs.enter(cpu.number).expect("not walking yet");
        does(self.tree.walk(cpu, cpu, &walking))
    }
}

fn once(setting: Setting) {
    match setting.rules {
        Rules::Extended => {
            once_on(setting, EptOf::<2> { one_gib_pages: true, accessed_dirty: true, small_code: false });
        }
        Rules::Nested => once_on(setting, NptOf::<2> { one_gib_pages: true, iommu: Iommu::AmdVi }),
        Rules::Arm { bbm, hafdbs } => {
            let format = VmsaOf::<2>::new(21, 40, false).expect("possible").with_bbm(bbm);
            once_on(setting, if hafdbs { format.with_recorded_writes() } else { format });
        }
    }
}

fn once_on<F: Format + Copy + Send + Sync + 'static>(setting: Setting, format: F) {
    count(|seen| seen.schedules += 1);
    let geometry = Geometry { index_bits: F::INDEX_BITS, levels: format.levels() };
    let machine = Machine::new(setting.rules, geometry, VCPUS + 2, PAGES, setting.mutant);
    let other = Cpu { machine: machine.clone(), number: OTHER, vm: 0 };
    let kinds = match setting.kind {
        Kind::SideBySide => vec![Kind::Follow, Kind::TakeAway],
        kind => vec![kind],
    };
    let (guests, mut shapes): (Vec<_>, Vec<_>) =
        (0..).zip(kinds).map(|(vm, kind)| guest(&setting, format, &other.of(vm), kind)).unzip();
    if guests.len() == 1 {
        // Its other VM never runs.
        machine.step().add_vm(guests[0].tree.root().0, setting.mutant);
    }
    let guests = Arc::new(guests);
    let quiet = (setting.kind == Kind::Awake).then(|| become_quiet(&guests[0], &other));

    let vcpus: Vec<_> = (0..VCPUS)
        .map(|number| {
            let (guests, cpu) = (guests.clone(), Cpu { number, ..other.clone() });
            shuttle::thread::spawn(move || run_vcpu(&guests, &cpu))
        })
        .collect();
    let device = {
        let (guests, cpu) = (guests.clone(), Cpu { number: DEVICE, ..other.clone() });
        let mut second = if guests.len() > 1 { shapes.pop() } else { None };
        shuttle::thread::spawn(move || match (guests[0].kind, &mut second) {
            (Kind::TakePages, _) => take_pages(&guests[0], &cpu),
            (_, Some(shape)) => {
                run_device(&guests[0], &cpu);
                take_away(&guests[1], &cpu.of(1), shape);
            }
            (_, None) => run_device(&guests[0], &cpu),
        })
    };
    let join = move || {
        vcpus.into_iter().for_each(|vcpu| vcpu.join().expect("a vCPU found nothing wrong"));
        device.join().expect("a device found nothing wrong");
    };

    let (first, shape) = (&guests[0], &mut shapes[0]);
    match first.kind {
        Kind::Follow | Kind::SideBySide => follow(first, &other, shape, join),
        Kind::Awake => follow_closely(first, &other, quiet.expect("the log has begun"), join),
        Kind::TakeAway => {
            take_away(first, &other, shape);
            join();
        }
        Kind::Collapse => {
            collapse(first, &other, shape);
            join();
        }
        Kind::TakePages => {
            take_pages(first, &other);
            join();
        }
        Kind::FirstTouch => join(),
    }
    let world = machine.step();
    let events = world.walks.events();
    count(|seen| {
        seen.hushed += world.hushed;
        seen.awakened += world.awakened;
        seen.recorded += events.recorded;
        seen.broadcasts += events.broadcasts;
        seen.locals += events.locals;
        seen.stops += events.stops;
    });
}

/// A VM with memory, and with a log if `kind` needs one.
fn guest<F: Format>(setting: &Setting, format: F, cpu: &Cpu, kind: Kind) -> (Guest<F>, Shape) {
    let (tree, mut shape) = Tree::new(format, cpu).expect("tables");
    cpu.machine.step().add_vm(tree.root().0, setting.mutant);
    let host = HOST + ((cpu.vm as u64) << 24);
    let all = range(0, PAGES);
    if kind != Kind::FirstTouch {
        tree.walk_mut(cpu, cpu, &mut shape).map(all, Hpa(host), Access::ALL).expect("maps");
    }
    // All processors that enter it see its tables.
    cpu.machine.step().walks.barrier(cpu.number, Wait::Stores);

    let log = DirtyLog::new(all, setting.source, setting.policy, vec![MarkWord::new()]).expect("enough marks");
    let log = matches!(kind, Kind::Follow | Kind::Collapse | Kind::Awake).then_some(log);
    let walkers = (0..VCPUS + 2).map(|_| Walker::new()).collect();
    let writable = AtomicU64::new(if matches!(kind, Kind::TakePages | Kind::Awake) { FEW } else { PAGES });
    let is_listed = log.is_some() && setting.source == Source::Listed;
    (Guest { tree, log, epochs: Epochs::new(walkers), kind, is_listed, host, writable }, shape)
}

thread_local! {
    static SEEN: Cell<Seen> = const { Cell::new(Seen::NOTHING) };
}

/// Counts of events in all schedules of this test: a model without events finds no error.
pub(crate) fn seen() -> Seen {
    SEEN.get()
}

pub(crate) fn count(happens: impl FnOnce(&mut Seen)) {
    let mut seen = SEEN.get();
    happens(&mut seen);
    SEEN.set(seen);
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) schedules: u64,
    /// Writes that the hardware recorded.
    pub(crate) recorded: u64,
    pub(crate) broadcasts: u64,
    pub(crate) locals: u64,
    /// Faults.
    pub(crate) stops: u64,
    /// Tables that became leaves.
    pub(crate) collapsed: u64,
    /// Faults on an entry that another processor was replacing.
    pub(crate) disturbed: u64,
    /// Conflicts that the hardware reported.
    pub(crate) conflicts: u64,
    /// Tables that became quiet, and that were woken.
    pub(crate) hushed: u64,
    pub(crate) awakened: u64,
    /// Writes that were listed and reported.
    pub(crate) reported: u64,
    /// Rounds that were lost.
    pub(crate) cancelled: u64,
    /// Logs that ended and began again.
    pub(crate) restarted: u64,
}

impl Seen {
    const NOTHING: Self = Self {
        schedules: 0,
        recorded: 0,
        broadcasts: 0,
        locals: 0,
        stops: 0,
        collapsed: 0,
        disturbed: 0,
        conflicts: 0,
        hushed: 0,
        awakened: 0,
        reported: 0,
        cancelled: 0,
        restarted: 0,
    };
}

/// The hypervisor itself writes to the guest's memory, like its devices. It finds each page, whatever happens to its
/// tables.
fn run_device<F: Format>(guest: &Guest<F>, cpu: &Cpu) {
    let Some(log) = guest.log.as_ref().filter(|_| guest.kind != Kind::Awake) else { return };
    for _ in 0..2 {
        let page = cpu.pick(PAGES);
        let gpa = Gpa(page << 12);
        let leaf = guest.walk(cpu, |walk| walk.lookup(gpa)).unwrap_or_else(|| panic!("page {page} is not found"));
        assert_eq!(leaf.translate(gpa), Hpa(guest.host + gpa.0), "page {page} is found elsewhere");
        let write = || cpu.machine.step().write(guest.host + (page << 12));
        let walks = cpu.pick(2) == 0;
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

/// Pages are unmapped, write-protected, and mapped again.
fn take_away<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut Shape) {
    let (mut walk, flushes) = (guest.tree.walk_mut(cpu, cpu, shape), cpu.machine.mutant != Mutant::NoFlushOfRange);
    let first = cpu.pick(PAGES);
    let count = 1 + cpu.pick(PAGES - first);
    let part = range(first, count);
    let pages = || (first..first + count).map(|page| page << 12);

    let stale = walk.protect(part, Access::READ_EXECUTE).expect("tables");
    if flushes {
        cpu.pay(stale);
    }
    pages().for_each(|gpa| cpu.machine.step().declare_read_only(cpu.vm, gpa));
    shuttle::thread::yield_now();

    pages().for_each(|gpa| cpu.machine.step().declare_usable(cpu.vm, gpa));
    let grown = walk.protect(part, Access::ALL).expect("tables");
    cpu.pay(grown);
    shuttle::thread::yield_now();

    let stale = walk.unmap(part).expect("tables");
    if flushes {
        cpu.pay(stale);
    }
    pages().for_each(|gpa| cpu.machine.step().declare_unmapped(cpu.vm, gpa));
    shuttle::thread::yield_now();

    pages().for_each(|gpa| cpu.machine.step().declare_usable(cpu.vm, gpa));
    walk.map(part, Hpa(guest.host + part.start.0), Access::ALL).expect("maps");
}

/// Single pages become read-only and writable again. Each processor has its own pages, in the same large leaf. A flush
/// may be delayed and merged with the next.
fn take_pages<F: Format>(guest: &Guest<F>, cpu: &Cpu) {
    let mut owed = Stale::EMPTY;
    let mut taken = Vec::new();
    for _ in 0..2 {
        let page = cpu.pick(FEW / 2) * 2 + cpu.number as u64 % 2;
        let stale = guest.walk(cpu, |walk| walk.protect_page(Gpa(page << 12), Access::READ_EXECUTE)).expect("tables");
        owed = owed.merge(stale);
        taken.push(page << 12);
        shuttle::thread::yield_now();
        if cpu.pick(2) == 0 {
            cpu.pay(core::mem::replace(&mut owed, Stale::EMPTY));
            taken.iter().for_each(|gpa| cpu.machine.step().declare_read_only(cpu.vm, *gpa));
            shuttle::thread::yield_now();
        }
    }
    cpu.pay(owed);
    for gpa in taken {
        cpu.machine.step().declare_usable(cpu.vm, gpa);
        cpu.pay(guest.walk(cpu, |walk| walk.protect_page(Gpa(gpa), Access::ALL)).expect("no table needed"));
    }
}

/// Small pages become large while vCPUs use them, and faults split them again.
fn collapse<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut Shape) {
    let log = guest.log.as_ref().expect("there is one");
    let mut limbo = Limbo::new();
    let mut spare = Spare::new();
    for _ in 0..2 {
        let stale = guest.walk(cpu, |walk| log.start(walk, Start::Clean, &mut spare)).expect("nothing to split");
        cpu.pay(stale);
        shuttle::thread::yield_now();
        guest.walk(cpu, |walk| log.stop(walk));
        enlarge(guest, cpu, shape, &mut limbo);
    }
    spare.give_back(cpu);
}

/// Both leaves become large again, if their pages allow it.
pub(crate) fn enlarge<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut Shape, limbo: &mut Limbo<4>) {
    let places = [Gpa(0), Gpa((PAGES / 2) << 12)];
    let mut walk = guest.tree.walk_mut(cpu, cpu, shape);
    let results = if cpu.machine.mutant == Mutant::FreedEarly {
        let results = walk.collapse_together(limbo, &Careless, places, 1);
        limbo.reclaim(cpu, &Careless);
        results
    } else {
        let results = walk.collapse_together(limbo, &guest.epochs, places, 1);
        limbo.reclaim(cpu, &guest.epochs);
        results
    };
    for result in results {
        assert_ne!(result, Collapse::Full);
        count(|seen| seen.collapsed += u64::from(result == Collapse::Done));
    }
}

/// Claims that no processor ever walks.
struct Careless;

impl Quiescence for Careless {
    fn end_epoch(&self) -> u64 {
        0
    }
    fn have_left(&self, _: u64) -> bool {
        true
    }
}

pub(crate) fn range(first: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(first << 12), pages << 12).expect("a range")
}
