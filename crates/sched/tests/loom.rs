//! The races of the mailbox, in every interleaving, and those of pCPUs that become idle, in every one with few
//! preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-sched --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use loom::thread;
use sched::{CpuId, IdleSet, Mailbox, Notify, Pending};

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
        let target = self.idle.find(BUSY).unwrap_or(BUSY);
        self.push(target);
        self.kick(self.idle.claim(target));
    }

    /// A planted mistake: after the push it claims only the pCPU of that queue.
    fn wakes_one(&self) {
        let target = self.idle.find(BUSY).unwrap_or(BUSY);
        self.push(target);
        loom::sync::atomic::fence(Ordering::SeqCst);
        self.kick(self.idle.find(target).filter(|found| *found == target));
    }

    /// A planted mistake: an idle pCPU is kicked, but not claimed.
    fn wakes_unclaimed(&self) {
        let target = self.idle.find(BUSY).unwrap_or(BUSY);
        self.push(target);
        loom::sync::atomic::fence(Ordering::SeqCst);
        self.kick(self.idle.find(target));
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
