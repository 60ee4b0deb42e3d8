//! The same protocol, implemented again in a few lines, with planted mistakes. The model finds each step that is left
//! out or done too early, and finds nothing without a mistake.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;

use super::{Page, Tlb, model_with};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    /// After publishing, the sender reads who is in the guest without a barrier.
    NoFenceOfSender,
    /// After announcing its entry, the target tests for work without a barrier.
    NoFenceOfTarget,
    /// The target tests for work before it announces its entry.
    TestBeforeEntry,
    /// Targets in the guest are kicked, and find no work before they enter again.
    KickWithoutPublish,
    LookBeforePublish,
    NoWait,
    /// The work bit is cleared, and the work is not done.
    DropWork,
}

/// Half of a presence: 0 is outside, other numbers are entries.
#[derive(Default)]
struct Vcpu {
    presence: AtomicU64,
    has_work: AtomicBool,
}

impl Vcpu {
    fn stay_in_guest(&self, stay: u64, page: &Page, tlb: &mut Tlb, mutant: Mutant) {
        loop {
            let had_work = self.has_work.load(Ordering::Relaxed);
            self.presence.store(stay, Ordering::Release);
            if mutant != Mutant::NoFenceOfTarget {
                fence(Ordering::SeqCst);
            }
            let has_work =
                if mutant == Mutant::TestBeforeEntry { had_work } else { self.has_work.load(Ordering::Relaxed) };
            if !has_work {
                break;
            }
            self.presence.store(0, Ordering::Release);
            if self.has_work.swap(false, Ordering::AcqRel) && mutant != Mutant::DropWork {
                tlb.flush();
            }
        }
        tlb.access(page);
        tlb.access(page);
        self.presence.store(0, Ordering::Release);
    }
}

fn flush(targets: &[Vcpu], mutant: Mutant) {
    let look = || {
        // There is one pCPU, so one target to wait for.
        let mut seen = targets.iter().map(|target| (target, target.presence.load(Ordering::Acquire)));
        seen.find(|&(_, stay)| stay != 0)
    };

    let too_early = (mutant == Mutant::LookBeforePublish).then(look);
    if mutant != Mutant::KickWithoutPublish {
        targets.iter().for_each(|target| {
            target.has_work.swap(true, Ordering::AcqRel);
        });
    }
    if mutant != Mutant::NoFenceOfSender {
        fence(Ordering::SeqCst);
    }
    let Some((target, stay)) = too_early.unwrap_or_else(look) else { return };
    while mutant != Mutant::NoWait && target.presence.load(Ordering::Acquire) == stay {
        thread::yield_now();
    }
}

/// Targets that take turns on one pCPU, and a sender. The first target enters twice.
fn take_away_with(mutant: Mutant, vcpus: usize) {
    model_with(3, move || {
        let page = Arc::new(Page::default());
        let vcpus: Arc<Vec<_>> = Arc::new((0..vcpus).map(|_| Vcpu::default()).collect());
        let pcpu = {
            let (page, vcpus) = (page.clone(), vcpus.clone());
            thread::spawn(move || {
                let mut tlb = Tlb::default();
                vcpus[0].stay_in_guest(1, &page, &mut tlb, mutant);
                match vcpus.get(1) {
                    Some(second) => second.stay_in_guest(1, &page, &mut Tlb::default(), mutant),
                    None => vcpus[0].stay_in_guest(2, &page, &mut tlb, mutant),
                }
            })
        };
        page.is_gone.store(true, Ordering::Relaxed);
        flush(&vcpus, mutant);
        page.is_reused.store(true, Ordering::Relaxed);
        pcpu.join().expect("no panic");
    });
}

#[test]
fn nothing_wrong_is_found_when_nothing_is_wrong() {
    take_away_with(Mutant::None, 1);
    take_away_with(Mutant::None, 2);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn missing_fence_of_the_sender_is_found() {
    take_away_with(Mutant::NoFenceOfSender, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn missing_fence_of_the_target_is_found() {
    take_away_with(Mutant::NoFenceOfTarget, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn test_for_work_before_the_entry_is_found() {
    take_away_with(Mutant::TestBeforeEntry, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn kick_without_publish_is_found() {
    take_away_with(Mutant::KickWithoutPublish, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn look_before_publish_is_found() {
    take_away_with(Mutant::LookBeforePublish, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn missing_wait_is_found() {
    take_away_with(Mutant::NoWait, 1);
}

#[test]
#[should_panic(expected = "used a translation after its flush")]
fn work_that_is_taken_and_dropped_is_found() {
    take_away_with(Mutant::DropWork, 1);
}
