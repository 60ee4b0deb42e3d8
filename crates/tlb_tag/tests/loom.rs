//! Races about tags, in every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-tlb-tag --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;
use tlb_tag::{Flush, Pool, Scheme, TagRange};

/// Two vCPUs are made while one is given back: no tag is the home of two.
#[test]
fn home_is_given_to_one_vcpu_only() {
    loom::model(|| {
        let pool = Arc::new(Pool::new(Scheme::Epoch, TagRange::new(1, 2), true));
        let old = pool.vcpu();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let pool = pool.clone();
                thread::spawn(move || {
                    let mut cpu = pool.cpu();
                    let mut vcpu = pool.vcpu();
                    vcpu.arrive(&mut cpu, false);
                    (vcpu.tag(), vcpu)
                })
            })
            .collect();
        pool.release(old);
        let made: Vec<_> = others.into_iter().map(|other| other.join().expect("no panic")).collect();
        // The three have two tags between them, so a vCPU without a home is right; two with the same home are not.
        let third = pool.vcpu();
        let mut cpu = pool.cpu();
        let mut third = third;
        third.arrive(&mut cpu, false);
        let same = made[0].0 == made[1].0;
        assert!(!same || third.tag() != made[0].0, "a home was given twice while another was free");
    });
}

const OUTSIDE: u64 = 0;
const IN_GUEST: u64 = 1;
const OLD: u64 = 1;
const NEW: u64 = 2;

/// The VM's stage 2 loses something while a vCPU enters: the one that takes it away bumps the epoch and then looks who is in
/// the guest; the one that enters says so and then reads the epoch. `fences`: whether both see to the order.
fn remap_against_entry(fences: bool) {
    loom::model(move || {
        let epoch = Arc::new(AtomicU64::new(0));
        let presence = Arc::new(AtomicU64::new(OUTSIDE));
        let mapping = Arc::new(AtomicU64::new(OLD));
        let returned = Arc::new(AtomicBool::new(false));

        let guest = {
            let (epoch, presence, mapping, returned) =
                (epoch.clone(), presence.clone(), mapping.clone(), returned.clone());
            thread::spawn(move || {
                let pool = Pool::new(Scheme::Epoch, TagRange::new(1, 4), true);
                let (mut cpu, mut vcpu) = (pool.cpu(), pool.vcpu());
                vcpu.arrive(&mut cpu, false);
                vcpu.enter(&mut cpu, 0).completed();
                let mut cached = OLD;
                for _ in 0..2 {
                    presence.store(IN_GUEST, Ordering::Release);
                    if fences {
                        fence(Ordering::SeqCst);
                    }
                    let entry = vcpu.enter(&mut cpu, epoch.load(Ordering::Acquire));
                    if entry.flush() != Flush::Nothing {
                        cached = mapping.load(Ordering::Acquire);
                    }
                    entry.completed();
                    if returned.load(Ordering::Acquire) {
                        assert_eq!(cached, NEW, "used after it was taken away");
                    }
                    presence.store(OUTSIDE, Ordering::Release);
                }
            })
        };

        mapping.store(NEW, Ordering::Release);
        epoch.fetch_add(1, Ordering::AcqRel);
        if fences {
            fence(Ordering::SeqCst);
        }
        while presence.load(Ordering::Acquire) == IN_GUEST {
            thread::yield_now();
        }
        returned.store(true, Ordering::Release);
        guest.join().expect("no panic");
    });
}

#[test]
fn nothing_is_used_after_the_epoch_was_bumped_and_all_guests_were_left() {
    remap_against_entry(true);
}

#[test]
fn without_the_fences_something_is() {
    assert!(catch_unwind(|| remap_against_entry(false)).is_err());
}
