//! The races of a shootdown, in every interleaving and with every value that a load may return.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-shootdown --test loom --release`
//!
//! A guest has one page. A sender removes it from the page table, flushes all TLBs, and then frees the frame. After
//! that no vCPU may use the frame through the old translation. The TLB here keeps everything that the manual allows:
//! only a flush removes a translation.

#![cfg(loom)]

mod mutants;

use std::iter;

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;
use shootdown::{CpuSet, Flush, Pages, Presence, Requests};

/// The message when a translation is used after its flush.
const STALE: &str = "used a translation after its flush";

/// The page's entry in the guest's table, and whether the frame has a new owner.
#[derive(Default)]
struct Page {
    is_gone: AtomicBool,
    is_reused: AtomicBool,
}

/// A vCPU's TLB entry of the page: none yet, or whether the page was gone when the table was read.
#[derive(Default)]
struct Tlb(Option<bool>);

impl Tlb {
    /// The guest accesses the page.
    fn access(&mut self, page: &Page) {
        let is_gone = *self.0.get_or_insert_with(|| page.is_gone.load(Ordering::Relaxed));
        assert!(is_gone || !page.is_reused.load(Ordering::Relaxed), "{STALE}");
    }

    fn flush(&mut self) {
        self.0 = None;
    }
}

/// The part of a vCPU that others see.
struct Vcpu {
    presence: Presence,
    /// The mailbox, which has one bit here.
    has_work: AtomicBool,
    requests: Requests,
    /// A host interrupt waits on the pCPU that runs it.
    is_kicked: AtomicBool,
}

impl Vcpu {
    fn new() -> Self {
        Self {
            presence: Presence::new(),
            has_work: AtomicBool::new(false),
            requests: Requests::new(),
            is_kicked: AtomicBool::new(false),
        }
    }

    fn publish(&self) {
        self.requests.ask(Flush::Pages(Pages::new(0x1000, 1)));
        self.has_work.swap(true, Ordering::AcqRel);
    }

    /// Enters, accesses the page once or twice, and leaves: the target's half of the protocol.
    fn stay_in_guest(&self, cpu: u32, tlb: &mut Tlb, page: &Page) {
        self.presence.enter(cpu);
        while self.has_work.load(Ordering::Relaxed) {
            self.presence.leave();
            self.settle(tlb);
            self.presence.enter(cpu);
        }
        tlb.access(page);
        if !self.is_kicked.load(Ordering::Relaxed) {
            tlb.access(page);
        }
        self.presence.leave();
    }

    fn settle(&self, tlb: &mut Tlb) {
        if self.has_work.swap(false, Ordering::AcqRel) {
            let mut taken = self.requests.take();
            if taken.whole() || taken.next().is_some() {
                tlb.flush();
            }
        }
    }
}

/// Flushes the page from the TLBs of `targets`.
fn flush(targets: &[&Vcpu]) {
    let kick = |cpus: CpuSet| {
        assert!(!cpus.is_empty());
        targets.iter().for_each(|target| target.is_kicked.store(true, Ordering::Relaxed));
    };
    shootdown::run(
        targets.iter().copied(),
        |target| &target.presence,
        Vcpu::publish,
        kick,
        || {},
        |_| thread::yield_now(),
    );
}

/// Removes the page and frees its frame.
fn take_away(page: &Page, targets: &[&Vcpu]) {
    page.is_gone.store(true, Ordering::Relaxed);
    flush(targets);
    page.is_reused.store(true, Ordering::Relaxed);
}

/// With at most this many preemptions per execution. The planted mistakes need two; without a limit the slowest models
/// take minutes.
fn model_with(preemptions: usize, check: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(check);
}

#[test]
fn target_that_enters_twice_never_uses_what_was_flushed() {
    loom::model(|| {
        let (page, vcpu) = (Arc::new(Page::default()), Arc::new(Vcpu::new()));
        let target = {
            let (page, vcpu) = (page.clone(), vcpu.clone());
            thread::spawn(move || {
                let mut tlb = Tlb::default();
                vcpu.stay_in_guest(0, &mut tlb, &page);
                vcpu.stay_in_guest(0, &mut tlb, &page);
            })
        };
        take_away(&page, &[&vcpu]);
        target.join().expect("no panic");
    });
}

#[test]
fn target_that_moves_to_another_pcpu_never_uses_what_was_flushed() {
    model_with(4, || {
        let (page, vcpu) = (Arc::new(Page::default()), Arc::new(Vcpu::new()));
        let from = {
            let (page, vcpu) = (page.clone(), vcpu.clone());
            thread::spawn(move || {
                vcpu.stay_in_guest(0, &mut Tlb::default(), &page);
                // The scheduler moves it. Entries of the vCPU from before on the other pCPU do not count: its tag is
                // void there.
                thread::spawn(move || vcpu.stay_in_guest(1, &mut Tlb::default(), &page))
            })
        };
        take_away(&page, &[&vcpu]);
        from.join().expect("no panic").join().expect("no panic");
    });
}

/// Two targets, one after the other on one pCPU: the sender waits for one of them, but both are done when it returns.
fn take_away_from_two_on_one_pcpu(sender_looks_in_order: bool) {
    model_with(4, move || {
        let page = Arc::new(Page::default());
        let vcpus = Arc::new([Vcpu::new(), Vcpu::new()]);
        let targets = {
            let (page, vcpus) = (page.clone(), vcpus.clone());
            thread::spawn(move || {
                vcpus[0].stay_in_guest(0, &mut Tlb::default(), &page);
                vcpus[1].stay_in_guest(0, &mut Tlb::default(), &page);
            })
        };
        let [first, second] = &*vcpus;
        take_away(&page, &if sender_looks_in_order { [first, second] } else { [second, first] });
        targets.join().expect("no panic");
    });
}

#[test]
fn two_targets_on_one_pcpu_are_both_done_whichever_is_looked_at_first() {
    take_away_from_two_on_one_pcpu(true);
    take_away_from_two_on_one_pcpu(false);
}

#[test]
fn two_that_flush_each_other_both_finish() {
    model_with(4, || {
        let pages = Arc::new([Page::default(), Page::default()]);
        let vcpus = Arc::new([Vcpu::new(), Vcpu::new()]);
        let side = |me: usize| {
            let (pages, vcpus) = (pages.clone(), vcpus.clone());
            move || {
                // Its TLB has the page that the other removes. It flushes the other with interrupts off, settles the
                // other's requests meanwhile, and continues.
                let (own, other) = (&vcpus[me], &vcpus[1 - me]);
                let mut tlb = Tlb::default();
                own.stay_in_guest(u32::try_from(me).expect("0 or 1"), &mut tlb, &pages[1 - me]);
                take_away(&pages[me], &[other]);
                own.stay_in_guest(u32::try_from(me).expect("0 or 1"), &mut tlb, &pages[1 - me]);
            }
        };
        let other = thread::spawn(side(1));
        side(0)();
        other.join().expect("no panic");
    });
}

#[test]
fn emulated_instruction_is_waited_for_without_a_kick() {
    loom::model(|| {
        let (page, vcpu) = (Arc::new(Page::default()), Arc::new(Vcpu::new()));
        let target = {
            let (page, vcpu) = (page.clone(), vcpu.clone());
            thread::spawn(move || {
                // The hypervisor walks the guest's tables, and then uses the result.
                vcpu.presence.emulate(0);
                let mut walked = Tlb::default();
                walked.access(&page);
                walked.access(&page);
                vcpu.presence.leave();
            })
        };
        page.is_gone.store(true, Ordering::Relaxed);
        let nobody = |_| panic!("an emulation needs no kick");
        let target_of = iter::once(&*vcpu);
        shootdown::run(target_of, |vcpu| &vcpu.presence, Vcpu::publish, nobody, || {}, |_| thread::yield_now());
        page.is_reused.store(true, Ordering::Relaxed);
        target.join().expect("no panic");
    });
}

/// Two senders each change a table and then send a request, after `before` requests of others. The vCPU takes once
/// during this and once afterwards.
fn nothing_is_lost(before: u64, wanted: [Flush; 2]) {
    model_with(4, move || {
        let requests = Arc::new(Requests::new());
        (0..before).for_each(|at| requests.ask(Flush::Pages(Pages::new(at << 20, 1))));
        let changes = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let askers: Vec<_> = (0..2)
            .map(|index| {
                let (requests, changes) = (requests.clone(), changes.clone());
                thread::spawn(move || {
                    changes[index].store(1, Ordering::Relaxed);
                    requests.ask(wanted[index]);
                })
            })
            .collect();

        // What a vCPU that flushes now and then walks the tables finds in them.
        let mut found = [0; 2];
        let mut flush = || {
            let taken = requests.take();
            let is_whole = taken.whole();
            let pages: Vec<_> = taken.map(Flush::Pages).collect();
            for (index, flush) in wanted.iter().enumerate() {
                if is_whole || pages.contains(flush) {
                    found[index] = changes[index].load(Ordering::Relaxed);
                }
            }
        };
        flush();
        for asker in askers {
            asker.join().expect("no panic");
        }
        flush();
        assert_eq!(found, [1; 2], "a change was never flushed for");
    });
}

#[test]
fn requests_of_two_senders_are_both_taken() {
    nothing_is_lost(0, [Flush::Pages(Pages::new(0x1000, 1)), Flush::Pages(Pages::new(0x5000, 2))]);
}

/// The second of two equal requests adds no word, but must still be ordered before the flush for both.
#[test]
fn equal_requests_of_two_senders_are_flushed_after_both_changes() {
    nothing_is_lost(0, [Flush::Pages(Pages::new(0x1000, 1)); 2]);
}

#[test]
fn whole_and_pages_are_both_taken() {
    nothing_is_lost(0, [Flush::Whole, Flush::Pages(Pages::new(0x1000, 1))]);
}

/// One word is free when the two send their requests.
#[test]
fn request_for_which_there_is_no_word_is_not_lost() {
    nothing_is_lost(5, [Flush::Pages(Pages::new(0x1000, 1)), Flush::Pages(Pages::new(0x5000, 2))]);
}
