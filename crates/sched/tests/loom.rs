//! The races of the mailbox, in every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-sched --test loom --release`

#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::thread;
use sched::{CpuId, Mailbox, Notify, Pending};

/// A vCPU that is about to block, and somebody who has an interrupt for it.
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
            // Posted first: the vCPU stays and sees it.
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

/// What was written before a post is seen after the take that returns it, also when the bit was set already.
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

        // Take until both were seen; each take that finds nothing is followed by another only if a poster is left.
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

/// A poster meets a vCPU that is being preempted: whoever runs it next sees the work.
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
