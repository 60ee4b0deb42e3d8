//! Races about tags, in every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-tlb-tag --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;
use tlb_tag::{Flush, Pool, Scheme, TagRange, by_vm};

/// Two vCPUs are made while one is removed: no tag is the home of two.
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
        // The three have two tags, so a vCPU without a home tag is right; two with the same home tag are wrong.
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

/// The hypervisor takes something from a VM's stage 2 while a vCPU enters. It increments the epoch and then reads who
/// is in the guest. The vCPU announces its entry and then reads the epoch. `fences`: whether both order their accesses.
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

/// By pCPU: the VM, in the upper bits, and its tag, while it is in its guest; 0 otherwise.
type Inside = [AtomicU64; 2];

/// A pCPU and its TLB: by tag, the VM whose entries it holds.
struct Cpu {
    tags: by_vm::CpuTags,
    number: usize,
    tlb: [u64; 3],
    inside: Arc<Inside>,
}

impl Cpu {
    /// Arrives, enters once, departs. A vCPU in its guest at the same time must have another tag if it is of another
    /// VM, and the same tag if it is of the same VM. The entries under the tag must be the VM's own. `keeps`: the vCPU
    /// departs after it has left the guest.
    fn visit(&mut self, vm: u64, vcpu: &mut by_vm::VcpuTags, keeps: bool) {
        vcpu.arrive(&mut self.tags, false);
        if !keeps {
            vcpu.depart(&mut self.tags);
        }
        let entry = vcpu.enter(&mut self.tags, 0);
        let tag = entry.tag().get();
        let found = &mut self.tlb[tag as usize];
        match entry.flush() {
            by_vm::Flush::Everything => self.tlb = [0; 3],
            by_vm::Flush::Tag => *found = 0,
            by_vm::Flush::OwnTables | by_vm::Flush::Nothing => {}
        }
        entry.completed();

        self.inside[self.number].store(vm << 32 | u64::from(tag), Ordering::SeqCst);
        let other = self.inside[1 - self.number].load(Ordering::SeqCst);
        let same_tag = other & 0xffff_ffff == u64::from(tag);
        assert!(other == 0 || same_tag == (other >> 32 == vm), "two VMs with one tag, or one with two");
        let found = core::mem::replace(&mut self.tlb[tag as usize], vm);
        assert!(found == 0 || found == vm, "entries of another VM");
        self.inside[self.number].store(0, Ordering::SeqCst);
        if keeps {
            vcpu.depart(&mut self.tags);
        }
    }
}

/// One pCPU enters a VM, another VM and the first again; the other pCPU enters the first and two more. There are two
/// tags, so generations begin on both.
fn rollover_against_entry(keeps: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let pool = by_vm::Pool::new(Scheme::Generation, TagRange::new(1, 2), 2);
        let vms = [pool.vm(), pool.vm(), pool.vm()];
        let inside = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let cpu = |number| Cpu { tags: pool.cpu(number), number, tlb: [0; 3], inside: inside.clone() };
        let vcpus = || vms.each_ref().map(by_vm::VmTags::vcpu);

        let (mut there, mut guests) = (cpu(1), vcpus());
        let other = thread::spawn(move || {
            for vm in [0, 1, 0] {
                there.visit(vm as u64 + 1, &mut guests[vm], keeps);
            }
        });
        let (mut here, mut guests) = (cpu(0), vcpus());
        for vm in [0, 2, 1] {
            here.visit(vm as u64 + 1, &mut guests[vm], keeps);
        }
        other.join().expect("no panic");
    });
}

#[test]
fn vm_that_enters_while_another_pcpu_rolls_over_has_one_tag_and_has_it_alone() {
    rollover_against_entry(true);
}

#[test]
fn without_a_slot_that_says_what_runs_it_has_not() {
    assert!(catch_unwind(|| rollover_against_entry(false)).is_err());
}
