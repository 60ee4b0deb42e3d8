//! The threads of a core run vCPUs of one VM at a time.

use alloc::sync::Arc;
use alloc::vec::Vec;

use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::{Vcpu, vm};
use crate::{CpuId, CpuSet, RunQueue, Share, Taker, Turn, VmKey};

const FIRST: CpuId = CpuId(4);
const SECOND: CpuId = CpuId(5);

fn pinned(cpus: CpuSet) -> Arc<Share> {
    Arc::new(Share::new(100, None, cpus))
}

fn pop(queue: &mut RunQueue<Vcpu>, cpu: CpuId) -> Option<usize> {
    queue.pop(cpu).map(|(_, vcpu)| vcpu.0)
}

/// A queue with vCPUs of these VMs, in the order of their numbers.
fn queue_of(vms: &[&Arc<Share>]) -> RunQueue<Vcpu> {
    let mut queue = RunQueue::default();
    (0..).zip(vms).for_each(|(number, vm)| queue.push(0, Turn::Fair, Vcpu(number, Arc::clone(vm))));
    queue
}

#[test]
fn second_thread_takes_the_vm_of_the_first_and_no_stranger() {
    let (one, other) = (vm(100), vm(100));
    one.charge(1_000, 0);
    let mut queue = queue_of(&[&one, &other, &one]);
    assert_eq!(pop(&mut queue, FIRST), Some(1), "it has used less");
    assert!(!queue.has_for(SECOND));
    assert_eq!(pop(&mut queue, SECOND), None, "both that wait are strangers");
    queue.stop_running(FIRST, 0);
    assert_eq!([pop(&mut queue, SECOND), pop(&mut queue, FIRST)], [Some(0), Some(2)]);
    assert_eq!(queue.changes(), 2);
}

#[test]
fn vm_with_a_better_claim_gets_the_core_after_all_others_have_left() {
    let (one, other) = (vm(100), vm(100));
    let mut queue = queue_of(&[&one, &one, &one]);
    assert_eq!([pop(&mut queue, FIRST), pop(&mut queue, SECOND)], [Some(0), Some(1)]);
    assert!(!queue.promise(), "no other VM waits");
    one.charge(1_000, 0);
    queue.push(0, Turn::Fair, Vcpu(9, other.clone()));
    assert!(queue.promise() && queue.is_promised());
    assert!(queue.taker(FIRST).is_none(), "nothing comes from elsewhere");
    assert!(
        queue.take_last(Taker::any(CpuId(0))).is_some_and(|(_, vcpu)| vcpu.0 == 2),
        "nor goes what it is promised to"
    );
    assert!(queue.take_last(Taker::any(CpuId(0))).is_none());

    queue.stop_running(FIRST, one.time());
    assert_eq!(pop(&mut queue, FIRST), None, "the other thread is still inside");
    queue.stop_running(SECOND, one.time());
    assert_eq!(pop(&mut queue, FIRST), Some(9));
    assert_eq!(queue.occupant(), Some(VmKey::of(&other)));
    assert!(!queue.is_promised());
}

#[test]
fn vm_that_may_use_one_thread_only_is_not_forgotten_when_the_other_one_leaves_last() {
    let (anywhere, first_only) = (vm(100), pinned(CpuSet::NONE.with(FIRST)));
    let mut queue = queue_of(&[&anywhere, &anywhere]);
    assert_eq!(pop(&mut queue, SECOND), Some(0));
    anywhere.charge(1_000, 0);
    queue.push(0, Turn::Fair, Vcpu(9, first_only));
    assert!(queue.promise());
    queue.stop_running(SECOND, anywhere.time());
    assert_eq!(pop(&mut queue, SECOND), None, "it could go on at once, and would for ever");
    assert!(queue.has_for(FIRST));
    assert_eq!(pop(&mut queue, FIRST), Some(9));
}

#[test]
fn thread_brings_only_its_occupant_from_elsewhere() {
    let (one, other) = (vm(100), vm(100));
    let mut here = queue_of(&[&one]);
    let mut there = queue_of(&[&other, &one]);
    assert_eq!(pop(&mut here, FIRST), Some(0));
    let taker = here.taker(SECOND).expect("the core is promised to nobody");
    assert!(there.take_last(taker).is_some_and(|(_, vcpu)| vcpu.0 == 1));
    assert!(there.first_for(taker).is_none() && there.take_first(taker).is_none());
    here.stop_running(FIRST, 0);
    let taker = here.taker(SECOND).expect("the core is promised to nobody");
    assert!(there.take_first(taker).is_some_and(|(_, vcpu)| vcpu.0 == 0), "nobody is inside");
}

/// What two threads do with their queue: come for a vCPU, leave, and ask for a change.
#[derive(Clone, Copy, Debug)]
enum Act {
    Come(CpuId),
    Leave(CpuId),
    Promise,
    Wake(usize),
    StolenBy(u32),
}

fn act((kind, thread, which): (u8, bool, usize)) -> Act {
    let cpu = if thread { FIRST } else { SECOND };
    match kind % 6 {
        0 | 1 => Act::Come(cpu),
        2 => Act::Leave(cpu),
        3 => Act::Promise,
        4 => Act::StolenBy(if thread { 7 } else { FIRST.0 }),
        _ => Act::Wake(which),
    }
}

proptest! {
    /// Whatever the threads do: they run vCPUs of one VM, none of a VM that may not run there, no vCPU is lost or runs
    /// twice, a promise is kept, and a thread that finds nothing could not have run any.
    #[test]
    fn threads_of_a_core_never_run_two_vms(
        acts in prop::collection::vec((any::<u8>(), any::<bool>(), 0usize..9), 1..400),
    ) {
        let both = CpuSet::NONE.with(FIRST).with(SECOND);
        let vms = [vm(100), pinned(both.without(SECOND)), pinned(both.without(FIRST)), pinned(both)];
        let owner = |vcpu: usize| &vms[vcpu % vms.len()];
        let mut queue = RunQueue::default();
        let mut waiting: Vec<usize> = Vec::new();
        let mut asleep: Vec<usize> = (0..9).collect();
        let mut running: [Option<Vcpu>; 2] = [None, None];
        let mut promised: Option<VmKey> = None;
        let place = |cpu: CpuId| usize::from(cpu == SECOND);
        for act in acts.into_iter().map(act) {
            match act {
                Act::Wake(which) => {
                    if let Some(at) = asleep.iter().position(|vcpu| *vcpu == which) {
                        asleep.swap_remove(at);
                        queue.push_woken(0, Turn::Fair, Vcpu(which, owner(which).clone()));
                        waiting.push(which);
                    }
                }
                Act::Come(cpu) if running[place(cpu)].is_none() => {
                    let inside = running.iter().flatten().next().map(|vcpu| VmKey::of(&vcpu.1));
                    let may = |vcpu: &usize| {
                        let vm = VmKey::of(owner(*vcpu));
                        owner(*vcpu).cpus().contains(cpu)
                            && promised.is_none_or(|promised| inside.is_none() && promised == vm)
                            && inside.is_none_or(|inside| inside == vm)
                    };
                    let could = waiting.iter().any(may);
                    prop_assert_eq!(queue.has_for(cpu), could);
                    let popped = queue.pop(cpu);
                    prop_assert_eq!(popped.is_some(), could);
                    if let Some((_, vcpu)) = popped {
                        prop_assert!(may(&vcpu.0), "{cpu} got {}", vcpu.0);
                        waiting.retain(|other| *other != vcpu.0);
                        running[place(cpu)] = Some(vcpu);
                        promised = None;
                    }
                }
                Act::Leave(cpu) => {
                    if let Some(vcpu) = running[place(cpu)].take() {
                        vcpu.1.charge(1_000, 0);
                        queue.stop_running(cpu, vcpu.1.time());
                        asleep.push(vcpu.0);
                    }
                }
                Act::Promise => {
                    let first = queue.first();
                    let was = queue.is_promised();
                    if queue.promise() && !was {
                        let occupant = running.iter().flatten().next().map(|vcpu| vcpu.0);
                        prop_assert!(occupant.is_some() && first.is_some());
                        promised = vms.iter().map(|vm| VmKey::of(vm)).find(|vm| queue.promised_to == Some(*vm));
                        prop_assert!(promised.is_some_and(|vm| Some(vm) != occupant.map(|vcpu| VmKey::of(owner(vcpu)))));
                    }
                }
                Act::StolenBy(cpu) => {
                    if let Some((_, vcpu)) = queue.take_last(Taker::any(CpuId(cpu))) {
                        prop_assert!(vcpu.1.cpus().contains(CpuId(cpu)));
                        prop_assert!(promised != Some(VmKey::of(&vcpu.1)), "it is promised the core");
                        waiting.retain(|other| *other != vcpu.0);
                        asleep.push(vcpu.0);
                    }
                }
                Act::Come(_) => {}
            }
            prop_assert_eq!(queue.len(), waiting.len());
            let inside = running.iter().flatten().count();
            prop_assert_eq!(queue.inside().len() as usize, inside);
            if let [Some(one), Some(other)] = &running {
                prop_assert_eq!(VmKey::of(&one.1), VmKey::of(&other.1));
            }
        }
    }
}
