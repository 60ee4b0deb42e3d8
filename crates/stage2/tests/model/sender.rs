//! Senders, which follow the writes of a guest and its hypervisor with a copy, and check in the end that no write was
//! lost.

use std::sync::atomic::Ordering;

use addr::Gpa;
use stage2::{Access, Format, Granularity, Limbo, Rounds, Shape, Spare, Stale, Start};

use crate::machine::{Cpu, Mutant, Payer};
use crate::scenario::{FEW, Guest, PAGES, count, enlarge};
use crate::vcpu::write;

/// A sender. It does rounds, of which some are lost, and a last one when the guest is stopped. Between two rounds the
/// log may end, large pages come back, and the log begins again.
pub(crate) fn follow<F: Format>(guest: &Guest<F>, cpu: &Cpu, shape: &mut Shape, join: impl FnOnce()) {
    let log = guest.log.as_ref().expect("there is one");
    let mut copy: Vec<u64> = (0..PAGES).map(|_| 0).collect();
    let mut spare = Spare::new();
    spare.fill(cpu, 4).expect("tables");

    let mut rounds = begin(guest, cpu, &mut spare, &mut copy);
    let mut ahead = Gpa(0);
    // More rounds give more time for tables to become quiet and to wake.
    for _ in 0..2 + cpu.pick(5) {
        if log.granularity() == Granularity::Recorded && ahead < log.slot().end() {
            let (stale, next) = guest.walk(cpu, |walk| log.split_ahead(walk, ahead, &mut spare));
            cpu.pay(stale);
            ahead = next;
        }
        if cpu.pick(2) == 0 {
            guest.walk(cpu, |walk| walk.age(log.slot(), |_| {}));
        }

        let mut dirty = [0];
        guest.walk(cpu, |walk| log.get(walk, 0, &mut dirty));
        let before = copy.clone();
        send(guest, cpu, &mut rounds, &mut copy, &dirty);
        if cpu.pick(4) == 0 {
            // The receiver has seen nothing of it.
            copy = before;
            count(|seen| seen.cancelled += 1);
            if cpu.machine.mutant == Mutant::ForgottenOnCancel {
                rounds.acknowledge(|| {})
            } else {
                rounds.cancel(log, || {})
            }
        } else {
            rounds.acknowledge(|| {});
        }

        if cpu.pick(8) == 0 {
            count(|seen| seen.restarted += 1);
            guest.walk(cpu, |walk| log.stop(walk));
            if cpu.pick(2) == 0 {
                enlarge(guest, cpu, shape, &mut Limbo::new());
            }
            spare.fill(cpu, 4).expect("tables");
            rounds = begin(guest, cpu, &mut spare, &mut copy);
            ahead = Gpa(0);
        }
    }

    join();
    last_round(guest, cpu, &mut rounds, &mut copy);
    spare.give_back(cpu);
}

/// No writes for some rounds, so that a table is about to become quiet, or is quiet. A write made it a table, or all of
/// its pages but one were protected, which leaves that one write-protected and alone.
pub(crate) fn become_quiet<F: Format>(guest: &Guest<F>, cpu: &Cpu) -> (Rounds<Vec<u64>>, Vec<u64>) {
    let mut copy: Vec<u64> = (0..PAGES).map(|_| 0).collect();
    let mut spare = Spare::new();
    spare.fill(cpu, 2).expect("tables");
    let mut rounds = begin(guest, cpu, &mut spare, &mut copy);
    if cpu.pick(2) == 0 {
        let vcpu = Cpu { number: 0, ..cpu.clone() };
        let mut owed = Stale::EMPTY;
        write(guest, &vcpu, &mut spare, &mut owed, 0);
        vcpu.pay(owed);
    } else {
        let protect = |page| {
            let protected = guest.walk(cpu, |walk| walk.protect_page(Gpa(page << 12), Access::READ_EXECUTE));
            protected.expect("tables")
        };
        (1..FEW).for_each(|page| cpu.pay(protect(page)));
        guest.writable.store(1, Ordering::Relaxed);
    }
    spare.give_back(cpu);
    (0..cpu.pick(4)).for_each(|_| round(guest, cpu, &mut rounds, &mut copy));
    (rounds, copy)
}

/// Round after round, as fast as possible.
pub(crate) fn follow_closely<F: Format>(
    guest: &Guest<F>,
    cpu: &Cpu,
    (mut rounds, mut copy): (Rounds<Vec<u64>>, Vec<u64>),
    join: impl FnOnce(),
) {
    (0..4).for_each(|_| round(guest, cpu, &mut rounds, &mut copy));
    join();
    last_round(guest, cpu, &mut rounds, &mut copy);
}

fn round<F: Format>(guest: &Guest<F>, cpu: &Cpu, rounds: &mut Rounds<Vec<u64>>, copy: &mut [u64]) {
    let log = guest.log.as_ref().expect("there is one");
    let mut dirty = [0];
    guest.walk(cpu, |walk| log.get(walk, 0, &mut dirty));
    send(guest, cpu, rounds, copy, &dirty);
    rounds.acknowledge(|| {});
}

/// The guest is stopped: now the copy must equal its memory.
fn last_round<F: Format>(guest: &Guest<F>, cpu: &Cpu, rounds: &mut Rounds<Vec<u64>>, copy: &mut [u64]) {
    round(guest, cpu, rounds, copy);
    let world = cpu.machine.step();
    for (page, copied) in (0..).zip(copy) {
        assert_eq!(*copied, world.read(guest.host + (page << 12)), "a write to page {page} is lost");
    }
}

/// A log begins: with everything dirty, or with a copy of everything.
fn begin<F: Format>(guest: &Guest<F>, cpu: &Cpu, spare: &mut Spare, copy: &mut [u64]) -> Rounds<Vec<u64>> {
    let log = guest.log.as_ref().expect("there is one");
    let mut rounds = Rounds::new(log, vec![0; 1], || {}).expect("enough bits");
    let from = if cpu.pick(2) == 0 { Start::AllDirty } else { Start::Clean };
    let stale = guest.walk(cpu, |walk| log.start(walk, from, spare)).expect("tables");
    cpu.pay(stale);
    if from == Start::Clean {
        send(guest, cpu, &mut rounds, copy, &[(1 << PAGES) - 1]);
        rounds.acknowledge(|| {});
    }
    rounds
}

fn send<F: Format>(guest: &Guest<F>, cpu: &Cpu, rounds: &mut Rounds<Vec<u64>>, copy: &mut [u64], wanted: &[u64; 1]) {
    let log = guest.log.as_ref().expect("there is one");
    let mut copy_pages = |wanted: u64| {
        for (page, copied) in (0..).zip(copy.iter_mut()).filter(|(page, _)| wanted >> page & 1 != 0) {
            *copied = cpu.machine.step().read(guest.host + (page << 12));
        }
    };
    if cpu.machine.mutant == Mutant::CopiedFirst {
        copy_pages(wanted[0]);
    }
    let me = guest.epochs.enter(cpu.number).expect("not walking yet");
    let cleared = rounds.clear(log, guest.tree.walk(cpu, cpu, &me), 0, wanted);
    match cpu.machine.mutant {
        Mutant::NoFlush => copy_pages(wanted[0]),
        Mutant::CopiedFirst => drop(cleared.flush(&Payer(cpu), me, &guest.epochs)),
        _ => copy_pages(cleared.flush(&Payer(cpu), me, &guest.epochs).pages().map(|page| 1 << page).sum()),
    }
}
