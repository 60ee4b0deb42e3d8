//! The small races, in every interleaving with few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-stage2 --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use stage2::{Epochs, MarkWord, Quiescence, Walker};

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

const PAGE: u64 = 1;
const OLD: u64 = 1;
const NEW: u64 = 2;

/// A device writes to a page and marks it, while a sender takes the mark and copies, and then once more.
fn device_and_sender(write: impl Fn(&MarkWord, &AtomicU64) + Copy + Sync + Send + 'static) {
    explore(move || {
        let shared = Arc::new((MarkWord::new(), AtomicU64::new(OLD)));
        // Marked from before, so that the device finds a mark that is being taken.
        shared.0.write(PAGE, || {});
        let device = {
            let shared = shared.clone();
            thread::spawn(move || write(&shared.0, &shared.1))
        };
        let send = || (shared.0.take(PAGE) != 0).then(|| shared.1.load(Ordering::Relaxed));
        let first = send();
        device.join().expect("no panic");
        let copy = send().or(first).expect("marked from before");
        assert_eq!(copy, NEW, "the write is lost");
    });
}

#[test]
fn write_that_is_marked_is_in_this_copy_or_the_next() {
    device_and_sender(|marks, page| marks.write(PAGE, || page.store(NEW, Ordering::Relaxed)));
}

#[test]
fn mark_before_the_write_loses_it() {
    let marked_first = |marks: &MarkWord, page: &AtomicU64| {
        marks.write(PAGE, || {});
        page.store(NEW, Ordering::Relaxed);
    };
    assert!(catch_unwind(|| device_and_sender(marked_first)).is_err());
}

/// A pointer to a table, and whether the table was freed.
struct Tables {
    pointer: AtomicU64,
    freed: AtomicU64,
    epochs: Epochs<[Walker; 1]>,
}

/// One walks while another cuts the table off, ends the epoch, and frees the table when `may_free` says so.
fn walker_and_freer(may_free: impl Fn(&Tables, u64) -> bool + Copy + Sync + Send + 'static) {
    explore(move || {
        let tables = Arc::new(Tables {
            pointer: AtomicU64::new(1),
            freed: AtomicU64::new(0),
            epochs: Epochs::new([Walker::new()]),
        });
        let walker = {
            let tables = tables.clone();
            thread::spawn(move || {
                let walking = tables.epochs.enter(0).expect("is away");
                if tables.pointer.load(Ordering::Relaxed) == 1 {
                    assert_eq!(tables.freed.load(Ordering::Relaxed), 0, "the table is used after it was freed");
                }
                drop(walking);
            })
        };
        tables.pointer.store(0, Ordering::Relaxed);
        let epoch = tables.epochs.end_epoch();
        if may_free(&tables, epoch) {
            tables.freed.store(1, Ordering::Relaxed);
        }
        walker.join().expect("no panic");
        fence(Ordering::SeqCst);
        assert!(tables.epochs.have_left(epoch), "nobody walks any more");
    });
}

#[test]
fn table_is_not_freed_while_somebody_may_be_in_it() {
    walker_and_freer(|tables, epoch| tables.epochs.have_left(epoch));
}

#[test]
fn table_that_is_freed_without_asking_is_used_afterwards() {
    assert!(catch_unwind(|| walker_and_freer(|_, _| true)).is_err());
}
