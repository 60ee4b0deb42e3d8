//! The races of the mailbox, in every interleaving, and those of pCPUs that become idle and of vCPUs that halt for
//! good, in every one with few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-sched --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use sched::{CpuId, CpuSet, Dormant, IdleSet, Mailbox, Notify, Pending};

/// A vCPU that is about to block, and a poster with an interrupt for it.
#[test]
fn interrupt_and_block_never_miss_each_other() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::blocked());
        assert_eq!(mailbox.post(Pending::STARTUP), Notify::Enqueue);
        mailbox.run_on(CpuId(1));
        let _ = mailbox.take();

        let poster = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.post(Pending::INTERRUPT))
        };
        let blocked = mailbox.block();
        let told = poster.join().expect("no panic");

        match (blocked, told) {
            // Blocked first: the poster must enqueue.
            (true, Notify::Enqueue) => {}
            // Posted first: the vCPU does not block and sees it.
            (false, Notify::Kick(CpuId(1))) => assert_eq!(mailbox.take(), Pending::INTERRUPT),
            other => panic!("lost wake-up: {other:?}"),
        }
    });
}

/// Two posters, one blocked vCPU: it enters one run queue, not two and not none.
#[test]
fn exactly_one_of_two_posters_enqueues() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::blocked());
        let enqueued = Arc::new(AtomicUsize::new(0));
        let posters: Vec<_> = [Pending::INTERRUPT, Pending::TIMER]
            .into_iter()
            .map(|work| {
                let (mailbox, enqueued) = (mailbox.clone(), enqueued.clone());
                thread::spawn(move || {
                    if mailbox.post(work) == Notify::Enqueue {
                        enqueued.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for poster in posters {
            poster.join().expect("no panic");
        }
        assert_eq!(enqueued.load(Ordering::Relaxed), 1);
        assert_eq!(mailbox.take(), Pending::INTERRUPT | Pending::TIMER);
    });
}

/// The poster's earlier writes are visible after the take, also if the bit was set already.
#[test]
fn posted_data_is_seen_after_the_take() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::blocked());
        let posted = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let posters: Vec<_> = (0..2)
            .map(|index| {
                let (mailbox, posted) = (mailbox.clone(), posted.clone());
                thread::spawn(move || {
                    posted[index].store(1, Ordering::Relaxed);
                    let _ = mailbox.post(Pending::INTERRUPT);
                })
            })
            .collect();

        // Takes until both were seen. A take that finds nothing is repeated only if a poster is left.
        let mut seen = 0;
        for _ in 0..2 {
            if !mailbox.take().is_empty() {
                seen = posted.iter().map(|word| word.load(Ordering::Relaxed)).sum();
            }
        }
        for poster in posters {
            poster.join().expect("no panic");
        }
        let left = !mailbox.take().is_empty();
        let total: u64 = posted.iter().map(|word| word.load(Ordering::Relaxed)).sum();
        assert_eq!(total, 2);
        assert!(left || seen == 2, "work was taken without its data");
    });
}

/// A poster meets a vCPU that is being preempted: the pCPU that runs it next sees the work.
#[test]
fn work_posted_during_preemption_is_not_lost() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::blocked());
        let _ = mailbox.post(Pending::STARTUP);
        mailbox.run_on(CpuId(0));
        let _ = mailbox.take();

        let poster = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.post(Pending::INTERRUPT))
        };
        mailbox.requeue();
        mailbox.run_on(CpuId(1));
        let told = poster.join().expect("no panic");

        assert_ne!(told, Notify::Enqueue, "it is in a queue already");
        assert_eq!(mailbox.take(), Pending::INTERRUPT);
    });
}

/// pCPUs, of which the first is busy, with a queue each. The model runs until each one sleeps or has a vCPU.
struct Host {
    idle: IdleSet,
    /// vCPUs in each queue.
    waiting: [AtomicU64; 3],
    asleep: [AtomicBool; 3],
    kicked: [AtomicBool; 3],
}

const BUSY: CpuId = CpuId(0);

impl Host {
    fn new() -> Self {
        Self {
            idle: IdleSet::new(),
            waiting: Default::default(),
            asleep: Default::default(),
            kicked: Default::default(),
        }
    }

    fn somebody_waits(&self) -> bool {
        self.waiting.iter().any(|queue| queue.load(Ordering::Acquire) != 0)
    }

    fn take(&self) -> bool {
        self.waiting.iter().any(|queue| {
            let less = |count: u64| count.checked_sub(1);
            queue.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
        })
    }

    fn push(&self, queue: CpuId) {
        self.waiting[queue.index()].fetch_add(1, Ordering::AcqRel);
    }

    fn kick(&self, cpu: Option<CpuId>) {
        if let Some(cpu) = cpu {
            self.kicked[cpu.index()].store(true, Ordering::Relaxed);
        }
    }

    /// A pCPU that has nothing to run.
    fn idles(&self, cpu: CpuId) {
        while !self.take() {
            self.idle.announce(cpu);
            if !self.somebody_waits() {
                self.asleep[cpu.index()].store(true, Ordering::Relaxed);
                return;
            }
            self.idle.withdraw(cpu);
        }
    }

    /// A planted mistake: it looks before it announces.
    fn looks_early(&self, cpu: CpuId) {
        while !self.take() {
            let is_work = self.somebody_waits();
            self.idle.announce(cpu);
            if !is_work {
                self.asleep[cpu.index()].store(true, Ordering::Relaxed);
                return;
            }
            self.idle.withdraw(cpu);
        }
    }

    /// A vCPU wakes whose home is the busy pCPU.
    fn wakes(&self) {
        let target = self.idle.find(BUSY, CpuSet::ALL).unwrap_or(BUSY);
        self.push(target);
        self.kick(self.idle.claim(target, CpuSet::ALL));
    }

    /// A planted mistake: after the push it claims only the pCPU of that queue.
    fn wakes_one(&self) {
        let target = self.idle.find(BUSY, CpuSet::ALL).unwrap_or(BUSY);
        self.push(target);
        loom::sync::atomic::fence(Ordering::SeqCst);
        self.kick(self.idle.find(target, CpuSet::ALL).filter(|found| *found == target));
    }

    /// A planted mistake: an idle pCPU is kicked, but not claimed.
    fn wakes_unclaimed(&self) {
        let target = self.idle.find(BUSY, CpuSet::ALL).unwrap_or(BUSY);
        self.push(target);
        loom::sync::atomic::fence(Ordering::SeqCst);
        self.kick(self.idle.find(target, CpuSet::ALL));
    }
}

/// This many vCPUs wake while pCPUs become idle. In the end no vCPU waits while a pCPU sleeps that was not kicked.
fn wake_and_idle(
    vcpus: usize,
    idlers: u32,
    wake: impl Fn(&Host) + Copy + Sync + Send + 'static,
    idle: impl Fn(&Host, CpuId) + Copy + Sync + Send + 'static,
) {
    let mut builder = loom::model::Builder::new();
    // Four active threads take minutes with three.
    builder.preemption_bound = Some(if vcpus > 1 { 2 } else { 3 });
    builder.check(move || {
        let host = Arc::new(Host::new());
        let mut threads = Vec::new();
        for cpu in (1..=idlers).map(CpuId) {
            let host = host.clone();
            threads.push(thread::spawn(move || idle(&host, cpu)));
        }
        for _ in 1..vcpus {
            let host = host.clone();
            threads.push(thread::spawn(move || wake(&host)));
        }
        wake(&host);
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));

        let is = |flags: &[AtomicBool; 3], cpu: usize| flags[cpu].load(Ordering::Relaxed);
        let sleeping = |kicked: bool| {
            (1..3).filter(|cpu| is(&host.asleep, *cpu) && is(&host.kicked, *cpu) == kicked).count() as u64
        };
        let waiting: u64 = host.waiting.iter().map(|queue| queue.load(Ordering::Relaxed)).sum();
        assert!(waiting <= sleeping(true) || sleeping(false) == 0, "a vCPU waits beside an idle pCPU");
    });
}

#[test]
fn vcpu_that_wakes_while_a_pcpu_goes_idle_does_not_wait() {
    wake_and_idle(1, 1, Host::wakes, Host::idles);
}

#[test]
fn vcpu_that_wakes_while_two_pcpus_go_idle_does_not_wait() {
    wake_and_idle(1, 2, Host::wakes, Host::idles);
}

#[test]
fn two_vcpus_that_wake_get_a_pcpu_each() {
    wake_and_idle(2, 2, Host::wakes, Host::idles);
}

#[test]
fn looking_only_at_the_pcpu_that_was_chosen_before_leaves_the_vcpu_waiting() {
    assert!(catch_unwind(|| wake_and_idle(1, 1, Host::wakes_one, Host::idles)).is_err());
}

#[test]
fn kick_without_a_claim_leaves_one_of_two_vcpus_waiting() {
    assert!(catch_unwind(|| wake_and_idle(2, 2, Host::wakes_unclaimed, Host::idles)).is_err());
}

#[test]
fn pcpu_that_looks_before_it_is_idle_leaves_the_vcpu_waiting() {
    assert!(catch_unwind(|| wake_and_idle(1, 1, Host::wakes, Host::looks_early)).is_err());
}

/// How a VM counts its dormant vCPUs.
trait Count: Send + Sync + 'static {
    fn all(vcpus: u32) -> Self;
    fn add(&self);
    fn remove(&self);
    fn are_all(&self, vcpus: u32, are_blocked: impl FnOnce() -> bool) -> bool;
}

impl Count for Dormant {
    fn all(vcpus: u32) -> Self {
        Self::all(vcpus)
    }
    fn add(&self) {
        self.add();
    }
    fn remove(&self) {
        self.remove();
    }
    fn are_all(&self, vcpus: u32, are_blocked: impl FnOnce() -> bool) -> bool {
        self.are_all(vcpus, are_blocked)
    }
}

/// Planted mistakes: nobody looks whether one has run meanwhile, and perhaps not at the mailboxes either.
struct Plain<const LOOKS_AT_MAILBOXES: bool>(AtomicU64);

impl<const LOOKS_AT_MAILBOXES: bool> Count for Plain<LOOKS_AT_MAILBOXES> {
    fn all(vcpus: u32) -> Self {
        Self(AtomicU64::new(vcpus.into()))
    }
    fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
    fn are_all(&self, vcpus: u32, are_blocked: impl FnOnce() -> bool) -> bool {
        loom::sync::atomic::fence(Ordering::SeqCst);
        self.0.load(Ordering::SeqCst) == u64::from(vcpus) && (!LOOKS_AT_MAILBOXES || are_blocked())
    }
}

/// What a vCPU of [`Barrier`] does next.
#[derive(Clone, Copy)]
enum Step {
    /// Sends an NMI to another.
    Wake(usize),
    /// Halts with interrupts off.
    Halt,
}

/// Two vCPUs wake each other by NMIs, as memtest86+ does at its barriers.
const PROGRAMS: [[Step; 3]; 2] = [[Step::Halt, Step::Wake(1), Step::Halt], [Step::Wake(0), Step::Halt, Step::Halt]];

struct Barrier<C> {
    dormant: C,
    mailboxes: [Mailbox; 2],
    /// Steps of each that are done.
    done: [AtomicUsize; 2],
    is_over: AtomicBool,
}

impl<C: Count> Barrier<C> {
    /// Both vCPUs are about to start.
    fn new() -> Self {
        let this = Self {
            dormant: C::all(2),
            mailboxes: [Mailbox::blocked(), Mailbox::blocked()],
            done: Default::default(),
            is_over: AtomicBool::new(false),
        };
        for mailbox in &this.mailboxes {
            let _ = mailbox.post(Pending::STARTUP);
        }
        this
    }

    /// A pCPU takes the vCPU from a queue and runs it until it blocks.
    fn run(this: &Arc<Self>, index: usize) {
        let mailbox = &this.mailboxes[index];
        mailbox.run_on(CpuId(index as u32));
        this.wakes(index);
        let mut woken = Vec::new();
        loop {
            let done = this.done[index].fetch_add(1, Ordering::Relaxed);
            match PROGRAMS[index].get(done) {
                Some(Step::Wake(other)) => {
                    if this.mailboxes[*other].post(Pending::NMI) == Notify::Enqueue {
                        let (this, other) = (this.clone(), *other);
                        woken.push(thread::spawn(move || Self::run(&this, other)));
                    }
                }
                Some(Step::Halt) => {
                    this.dormant.add();
                    if mailbox.block() {
                        let are_blocked = || this.mailboxes.iter().all(Mailbox::is_blocked);
                        if this.dormant.are_all(2, are_blocked) {
                            this.is_over.store(true, Ordering::SeqCst);
                        }
                        break;
                    }
                    this.wakes(index);
                }
                None => panic!("woken once too often"),
            }
        }
        woken.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }

    fn wakes(&self, index: usize) {
        self.dormant.remove();
        assert!(!self.is_over.load(Ordering::SeqCst), "the VM was ended, and a vCPU wakes");
        let _ = self.mailboxes[index].take();
    }
}

fn two_wake_each_other<C: Count>() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let barrier = Arc::new(Barrier::<C>::new());
        let first = {
            let barrier = barrier.clone();
            thread::spawn(move || Barrier::run(&barrier, 0))
        };
        Barrier::run(&barrier, 1);
        first.join().expect("no panic");
        assert!(barrier.is_over.load(Ordering::SeqCst), "both are halted for good, and nobody has noticed");
    });
}

#[test]
fn vm_ends_when_all_its_vcpus_are_halted_for_good_and_not_before() {
    two_wake_each_other::<Dormant>();
}

#[test]
fn one_look_ends_a_vm_whose_vcpus_wake_each_other() {
    assert!(catch_unwind(two_wake_each_other::<Plain<true>>).is_err());
}

#[test]
fn counting_without_a_look_at_the_mailboxes_ends_a_vm_that_has_a_message() {
    assert!(catch_unwind(two_wake_each_other::<Plain<false>>).is_err());
}

/// When a pCPU that ran a vCPU of VT-x writes the VMCS back (VMCLEAR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cleared {
    /// While it owns the vCPU, as the hypervisor does.
    WhileOwned,
    /// After another pCPU may own it.
    AfterRelease,
    /// When the vCPU comes back.
    Never,
}

/// A vCPU with its VMCS. A pCPU keeps parts of a VMCS to itself until VMCLEAR, so the VMCS must not be loaded elsewhere
/// before (SDM vol. 3C, 25.11.1).
///
/// This copies the hypervisor's order: only the mailbox is its code. There the VMCS is in what the lock guards, so
/// code that clears it after the release does not compile.
struct WithVmcs {
    mailbox: Mailbox,
    /// Who holds it runs the vCPU.
    owner: Mutex<()>,
    /// The pCPU that has loaded the VMCS; none at first.
    loaded_on: AtomicU64,
    /// The content in memory: how often the guest has run.
    region: AtomicU64,
}

const NOWHERE: u64 = u64::MAX;

impl WithVmcs {
    /// A pCPU takes the vCPU from a queue, and runs it until it blocks. If it has work then, it is preempted, and the
    /// next pCPU takes it.
    fn run(&self, cpu: u32, cleared: Cleared) {
        let owned = self.owner.lock().expect("no panic");
        self.mailbox.run_on(CpuId(cpu));
        let other = self.loaded_on.swap(cpu.into(), Ordering::Relaxed);
        assert!([NOWHERE, cpu.into()].contains(&other), "cpu{cpu} loads a VMCS that cpu{other} has");
        let runs = self.region.load(Ordering::Relaxed) + 1;

        let _ = self.mailbox.take();
        let is_blocked = self.mailbox.block();
        let clear = || {
            self.region.store(runs, Ordering::Relaxed);
            self.loaded_on.store(NOWHERE, Ordering::Relaxed);
        };
        if cleared == Cleared::WhileOwned {
            clear();
        }
        if !is_blocked {
            self.mailbox.requeue();
        }
        drop(owned);
        if cleared == Cleared::AfterRelease {
            clear();
        }
        if !is_blocked {
            self.run(cpu + 2, cleared);
        }
    }
}

/// A vCPU blocks on one pCPU, and its interrupt has another one run it at once.
fn vmcs_moves(cleared: Cleared) {
    loom::model(move || {
        let vcpu = Arc::new(WithVmcs {
            mailbox: Mailbox::blocked(),
            owner: Mutex::new(()),
            loaded_on: AtomicU64::new(NOWHERE),
            region: AtomicU64::new(0),
        });
        assert_eq!(vcpu.mailbox.post(Pending::STARTUP), Notify::Enqueue);
        let first = {
            let vcpu = vcpu.clone();
            thread::spawn(move || vcpu.run(0, cleared))
        };
        let is_woken = vcpu.mailbox.post(Pending::INTERRUPT) == Notify::Enqueue;
        if is_woken {
            vcpu.run(1, cleared);
        }
        first.join().expect("no panic");
        assert!(vcpu.mailbox.take().is_empty(), "work is left");
        let runs = vcpu.region.load(Ordering::Relaxed);
        assert!(runs > u64::from(is_woken), "a run is lost: {runs}");
    });
}

#[test]
fn vmcs_is_written_back_before_another_pcpu_loads_it() {
    vmcs_moves(Cleared::WhileOwned);
}

#[test]
fn vmcs_that_is_written_back_after_the_vcpu_was_released_is_loaded_twice() {
    assert!(catch_unwind(|| vmcs_moves(Cleared::AfterRelease)).is_err());
}

#[test]
fn vmcs_that_is_not_written_back_is_loaded_twice() {
    assert!(catch_unwind(|| vmcs_moves(Cleared::Never)).is_err());
}
