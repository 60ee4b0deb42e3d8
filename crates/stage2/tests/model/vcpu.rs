//! Guests that write, and a hypervisor that handles their faults.

use std::sync::atomic::Ordering;

use addr::{Gpa, Hpa};
use hw_model::walks::{EARLIER_LIFE, Stop};
use stage2::{Access, Fault, Format, Granularity, Spare, Stale};

use crate::machine::{Cpu, Mutant};
use crate::scenario::{Guest, Kind, Log, count};

/// After this many faults in one access, a guest faults for ever.
const PATIENCE: u32 = 400;

/// Guests that write, and a hypervisor that handles their faults.
pub(crate) fn run_vcpu<F: Format>(guests: &[Guest<F>], cpu: &Cpu) {
    // Broadcasts that can wait do so until the end.
    let mut owed: Vec<_> = guests.iter().map(|_| Stale::EMPTY).collect();
    let writes = match (guests[0].kind, cpu.number) {
        (Kind::Awake, 0) => 2,
        (Kind::Awake, _) => 0,
        (Kind::TakePages, _) => 6,
        _ => guests.len() + 2,
    };
    for _ in 0..writes {
        let vm = if guests.len() == 1 { 0 } else { usize::from(cpu.pick(2) == 0) };
        let page = cpu.pick(guests[vm].writable.load(Ordering::Relaxed));
        // Without spare tables, a large leaf becomes writable as a whole.
        let mut spare = Spare::new();
        spare.fill(cpu, if cpu.pick(3) == 0 { 0 } else { 2 }).expect("tables");
        write(&guests[vm], &cpu.of(vm), &mut spare, &mut owed[vm], page << 12);
        spare.give_back(cpu);
    }
    report(&guests[0], cpu);
    (0..).zip(owed).for_each(|(vm, owed)| cpu.of(vm).pay(owed));
}

pub(crate) fn write<F: Format>(guest: &Guest<F>, cpu: &Cpu, spare: &mut Spare, owed: &mut Stale, gpa: u64) {
    for _ in 0..PATIENCE {
        enter(cpu);
        let stop = {
            let mut world = cpu.machine.step();
            let before = world.walks.events().recorded;
            let result = world.walks.access(cpu.number, gpa, true);
            if guest.is_listed && world.walks.events().recorded != before {
                world.listed.entry(cpu.number).or_default().push(gpa);
            }
            if let Ok(hpa) = result {
                // The first vCPU to touch a page has chosen its frame.
                let is_choice = guest.kind == Kind::FirstTouch && hpa & !0xfff != EARLIER_LIFE;
                let frame = world.frames.entry((cpu.vm, gpa)).or_insert(if is_choice { hpa } else { guest.host + gpa });
                assert_eq!(hpa, *frame, "the guest writes elsewhere");
                world.write(hpa);
            }
            result
        };
        cpu.machine.step().walks.leave(cpu.number);
        // Some writes are of one stay in the guest.
        if stop.is_err() || cpu.pick(2) == 0 {
            report(guest, cpu);
        }
        if stop.is_ok() {
            return;
        }
        let nothing_there = stop == Err(Stop::Translation) && guest.kind != Kind::TakeAway;
        count(|seen| seen.disturbed += u64::from(nothing_there));

        if stop == Err(Stop::Conflict) {
            count(|seen| seen.conflicts += 1);
            if cpu.machine.mutant != Mutant::ConflictStays {
                cpu.resolve_conflict();
            }
            continue;
        }
        let wanted = if stop == Err(Stop::AccessFlag) { Access::READ } else { Access::READ_WRITE };
        let mut granularity = guest.log.as_ref().map_or(Granularity::Whole, Log::granularity);
        let walking = guest.epochs.enter(cpu.number).expect("not walking yet");
        let walk = guest.tree.walk(cpu, cpu, &walking);
        let fault = loop {
            match walk.fault(Gpa(gpa), wanted, granularity) {
                // Every other page simulates a guest that walks on to the next leaf.
                Fault::Large => match walk.split_at_fault(Gpa(gpa), granularity, gpa >> 12 & 1, spare) {
                    Ok((later, _)) => *owed = owed.merge(later),
                    Err(_) => granularity = Granularity::Whole,
                },
                fault => break fault,
            }
        };
        drop(walking);
        match fault {
            Fault::Retry(denial) => {
                if denial.is_cached() && cpu.machine.mutant != Mutant::NoLocal {
                    cpu.forget(denial, Gpa(gpa));
                }
                shuttle::thread::yield_now();
            }
            Fault::Unmapped if guest.kind == Kind::FirstTouch => touch(guest, cpu, spare, gpa),
            Fault::Large => unreachable!("was split"),
            Fault::Unmapped | Fault::Denied(_) => {
                let is_meant = matches!(guest.kind, Kind::TakeAway | Kind::TakePages);
                assert!(is_meant, "{fault:?} where there is memory");
                return;
            }
        }
    }
    panic!("a guest faults for ever at {gpa:#x}");
}

/// The guest has exited: the hypervisor reports what the processor has listed.
fn report<F: Format>(guest: &Guest<F>, cpu: &Cpu) {
    if !guest.is_listed {
        return;
    }
    let listed = cpu.machine.step().listed.remove(&cpu.number).unwrap_or_default();
    if cpu.machine.mutant == Mutant::NotReported {
        return;
    }
    count(|seen| seen.reported += listed.len() as u64);
    listed.into_iter().for_each(|gpa| guest.walk(cpu, |walk| walk.report(Gpa(gpa))));
}

fn enter(cpu: &Cpu) {
    let mut world = cpu.machine.step();
    world.load_vm(cpu.number, cpu.vm);
    world.walks.enter(cpu.number);
}

/// Memory for a page at its first touch. Each vCPU has frames of its own, for small pages and for large ones.
fn touch<F: Format>(guest: &Guest<F>, cpu: &Cpu, spare: &mut Spare, gpa: u64) {
    let level = u32::try_from(cpu.pick(2)).expect("small");
    let page = gpa & !((1_u64 << (12 + F::INDEX_BITS * level)) - 1);
    let frame = Hpa(guest.host + ((cpu.number as u64) << 19) + page);
    spare.fill(cpu, 3).expect("tables");
    guest.walk(cpu, |walk| walk.populate(spare, Gpa(gpa), frame, level, Access::ALL)).expect("tables");
}
