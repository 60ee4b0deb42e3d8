mod cores;

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::{any, prop, prop_assert, proptest};

use crate::{
    Cap, CpuId, CpuSet, MAX_LAG, Mailbox, Member, Notify, Pending, RunQueue, Share, Taker, Times, Turn, WAKE_CREDIT,
};

#[test]
fn post_to_a_blocked_vcpu_enqueues_it_once() {
    let mailbox = Mailbox::blocked();
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Enqueue);
    assert_eq!(mailbox.post(Pending::NMI), Notify::Nothing);
    mailbox.run_on(CpuId(3));
    assert_eq!(mailbox.take(), Pending::INTERRUPT | Pending::NMI);
    assert!(mailbox.block());
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Enqueue);
}

#[test]
fn running_vcpu_is_kicked_by_the_first_of_several_posters() {
    let mailbox = Mailbox::blocked();
    let _ = mailbox.post(Pending::STARTUP);
    mailbox.run_on(CpuId(7));
    let _ = mailbox.take();
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Kick(CpuId(7)));
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Nothing);
    assert_eq!(mailbox.post(Pending::STOP), Notify::Nothing);
    assert_eq!(mailbox.take(), Pending::INTERRUPT | Pending::STOP);
    assert_eq!(mailbox.post(Pending::STOP), Notify::Kick(CpuId(7)));
}

#[test]
fn quiet_work_neither_wakes_a_blocked_vcpu_nor_gets_lost() {
    let mailbox = Mailbox::blocked();
    assert!(mailbox.leave(Pending::FLUSH));
    assert!(!mailbox.leave(Pending::FLUSH), "the first has left it already");
    assert!(mailbox.is_blocked());
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Enqueue, "it can still be woken");
    mailbox.run_on(CpuId(1));
    assert_eq!(mailbox.take(), Pending::FLUSH | Pending::INTERRUPT);
}

#[test]
fn vcpu_does_not_block_before_it_has_flushed() {
    let mailbox = Mailbox::blocked();
    let _ = mailbox.post(Pending::STARTUP);
    mailbox.run_on(CpuId(0));
    let _ = mailbox.take();
    assert!(mailbox.leave(Pending::FLUSH));
    assert!(!mailbox.block());
    assert_eq!(mailbox.take(), Pending::FLUSH);
    assert!(mailbox.block());
}

#[test]
fn vcpu_does_not_block_over_waiting_work() {
    let mailbox = Mailbox::blocked();
    let _ = mailbox.post(Pending::INTERRUPT);
    mailbox.run_on(CpuId(0));
    assert!(!mailbox.block());
    assert_eq!(mailbox.running_on(), Some(CpuId(0)));
}

#[test]
fn work_survives_being_preempted_and_moved() {
    let mailbox = Mailbox::blocked();
    let _ = mailbox.post(Pending::STARTUP);
    mailbox.run_on(CpuId(0));
    let _ = mailbox.take();
    mailbox.requeue();
    assert_eq!(mailbox.running_on(), None);
    assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Nothing, "it will be seen before the next entry");
    mailbox.run_on(CpuId(1));
    assert_eq!(mailbox.take(), Pending::INTERRUPT);
}

/// A vCPU: its number, and its VM's share.
#[derive(Clone, Debug)]
struct Vcpu(usize, Arc<Share>);

impl Member for Vcpu {
    fn share(&self) -> &Share {
        &self.1
    }
}

fn vm(weight: u32) -> Arc<Share> {
    Arc::new(Share::new(weight, None, CpuSet::ALL))
}

/// The pCPU that a queue belongs to.
const CPU: CpuId = CpuId(0);

/// The next vCPU runs, and is gone.
fn pop(queue: &mut RunQueue<Vcpu>) -> Option<usize> {
    let (_, vcpu) = queue.pop(CPU)?;
    queue.stop_running(CPU, 0);
    Some(vcpu.0)
}

#[test]
fn least_served_runs_next_and_ties_go_by_arrival() {
    let mut queue = RunQueue::default();
    let vm = vm(100);
    for (time, number) in [(30, 3), (10, 1), (10, 2)] {
        queue.push(time, Turn::Fair, Vcpu(number, vm.clone()));
    }
    let order: Vec<usize> = core::iter::from_fn(|| pop(&mut queue)).collect();
    assert_eq!(order, vec![1, 2, 3]);
}

#[test]
fn vm_that_has_used_less_goes_first_whatever_its_vcpus_have_run() {
    let mut queue = RunQueue::default();
    let (busy, calm) = (vm(100), vm(100));
    busy.charge(2_000, 0);
    calm.charge(1_000, 0);
    queue.push(0, Turn::Fair, Vcpu(0, busy.clone()));
    queue.push(900, Turn::Fair, Vcpu(1, calm.clone()));
    let (first, running) = (queue.first().expect("two wait"), queue.pop(CPU).expect("two wait"));
    assert_eq!(running.1.0, 1);
    let other = queue.first().expect("one waits");
    assert!(first.is_before(&other, 999) && !first.is_before(&other, 1_000) && !other.is_before(&first, 0));
    // The same use, with twice the weight.
    let heavy = vm(200);
    heavy.charge(2_000, 0);
    assert_eq!(heavy.time(), calm.time());
}

#[test]
fn queue_with_room_for_all_never_takes_memory() {
    let mut queue = RunQueue::default();
    let vm = vm(100);
    queue.reserve(64).expect("is little");
    let room = queue.room();
    for round in 0..100 {
        (0..64).for_each(|vcpu| queue.push((vcpu * 7919 + round) % 61, Turn::Fair, Vcpu(0, vm.clone())));
        for _ in 0..32 {
            pop(&mut queue);
            queue.take_last(Taker::any(CPU));
        }
        assert_eq!((queue.len(), queue.room()), (0, room));
    }
    queue.push(1, Turn::Fair, Vcpu(1, vm.clone()));
    queue.shrink(0);
    assert!(queue.room() < room, "what nobody needs any more is given back");
    assert_eq!(pop(&mut queue), Some(1));
}

#[test]
fn vm_that_slept_for_long_gets_a_bounded_credit() {
    let mut queue = RunQueue::default();
    queue.advance(Some(1_000_000_000));
    let (sleeper, dozer) = (vm(100), vm(100));
    dozer.charge(1_000_000_007, 0);
    queue.push_woken(0, Turn::Fair, Vcpu(0, sleeper.clone()));
    queue.push_woken(0, Turn::Fair, Vcpu(1, dozer.clone()));
    assert_eq!(sleeper.time(), 1_000_000_000 - WAKE_CREDIT);
    assert_eq!(dozer.time(), 1_000_000_007, "who just slept for a moment keeps its place");
}

#[test]
fn vcpu_that_wakes_goes_first_unless_its_vm_has_used_most() {
    let mut queue = RunQueue::default();
    let [least, middle, most] = [100_000_000, 110_000_000, 120_000_000].map(|used| {
        let vm = vm(100);
        vm.charge(used, 0);
        vm
    });
    queue.push(0, Turn::Fair, Vcpu(0, least.clone()));
    queue.push(0, Turn::Fair, Vcpu(1, most.clone()));
    queue.push_woken(0, Turn::Fair, Vcpu(2, middle.clone()));
    queue.push_woken(0, Turn::Fair, Vcpu(3, most.clone()));
    let (_, first) = queue.pop(CPU).expect("four wait");
    assert_eq!(first.0, 2, "before one whose VM has used less, but not for long");
    let woken = queue.push_woken(0, Turn::Fair, Vcpu(4, least));
    let running = queue.running(Times::of(&middle, 0)).expect("one runs");
    assert!(woken.is_before(&running, MAX_LAG), "nor does a margin count then");
    queue.stop_running(CPU, middle.time());
    assert_eq!([pop(&mut queue), pop(&mut queue)], [Some(4), Some(0)]);
}

#[test]
fn vcpu_from_elsewhere_is_placed_between_those_of_its_vm() {
    let (vm, other) = (vm(100), vm(100));
    let place = |time| {
        let mut queue = RunQueue::default();
        queue.push(3, Turn::Fair, Vcpu(9, other.clone()));
        queue.push(100_000_000, Turn::Fair, Vcpu(1, vm.clone()));
        queue.push(100_000_500, Turn::Fair, Vcpu(2, vm.clone()));
        queue.push_moved(time, Vcpu(0, vm.clone()));
        core::iter::from_fn(|| queue.take_first(Taker::any(CPU))).find(|(_, vcpu)| vcpu.0 == 0).map(|(time, _)| time)
    };
    assert_eq!(place(0), Some(100_000_000 - WAKE_CREDIT), "at most a credit before the first");
    assert_eq!(place(100_000_100), Some(100_000_100));
    assert_eq!(place(u64::MAX), Some(100_000_500), "not after the last");

    // Nor may one that slept for an hour keep the pCPU from the one that runs, until it has caught up.
    let mut queue = RunQueue::default();
    queue.push(100_000_000, Turn::Fair, Vcpu(1, vm.clone()));
    queue.pop(CPU);
    assert_eq!(queue.push_woken(0, Turn::Fair, Vcpu(0, vm.clone())).times().vcpu, 100_000_000 - WAKE_CREDIT);
}

#[test]
fn who_yields_waits_for_one_other_and_who_was_handed_the_pcpu_for_none() {
    let mut queue = RunQueue::default();
    let (ahead, behind) = (vm(100), vm(100));
    ahead.charge(1_000_000, 0);
    queue.push(0, Turn::AfterOthers, Vcpu(0, behind.clone()));
    queue.push(0, Turn::Fair, Vcpu(1, ahead.clone()));
    queue.push(0, Turn::Fair, Vcpu(2, ahead.clone()));
    assert_eq!(pop(&mut queue), Some(1), "not the one that yields, although it has used less");
    assert_eq!(pop(&mut queue), Some(0), "but only once");
    queue.push_woken(0, Turn::Next, Vcpu(3, ahead.clone()));
    queue.push(0, Turn::Fair, Vcpu(4, behind.clone()));
    assert_eq!([pop(&mut queue), pop(&mut queue), pop(&mut queue)], [Some(3), Some(4), Some(2)]);
}

#[test]
fn pcpus_take_only_what_may_run_there() {
    let mut queue = RunQueue::default();
    let pinned = |cpus| Arc::new(Share::new(100, None, CpuSet(cpus)));
    queue.push(1, Turn::Fair, Vcpu(0, pinned(0b0001)));
    queue.push(2, Turn::Fair, Vcpu(1, pinned(0b0110)));
    queue.push(3, Turn::Fair, Vcpu(2, pinned(0b0100)));
    assert_eq!(queue.outlook().1, CpuSet(0b0111));
    assert!(queue.take_last(Taker::any(CpuId(3))).is_none() && queue.first_for(Taker::any(CpuId(3))).is_none());
    assert_eq!(queue.first_for(Taker::any(CpuId(2))).map(|claim| claim.times().vcpu), Some(2));
    assert_eq!(queue.take_last(Taker::any(CpuId(2))).map(|(_, vcpu)| vcpu.0), Some(2));
    assert_eq!(queue.take_first(Taker::any(CpuId(2))).map(|(_, vcpu)| vcpu.0), Some(1));
    assert_eq!((queue.len(), queue.outlook().1), (1, CpuSet(0b0001)));
}

const PERIOD: u64 = 100_000_000;

#[test]
fn cap_is_a_number_of_ticks_in_each_period() {
    let vm = Share::new(100, Some(Cap { ticks: PERIOD / 4, period: PERIOD, since: 0 }), CpuSet::ALL);
    let quarter = PERIOD / 4 / 256 * 256;
    let mut now = 7 * PERIOD + 5;
    assert_eq!(vm.left(now), quarter);
    vm.charge(PERIOD / 8, now);
    assert!(vm.left(now).abs_diff(PERIOD / 8) <= 512);
    vm.charge(PERIOD / 8, now);
    assert_eq!((vm.left(now), vm.next_period(now)), (0, 8 * PERIOD));
    // What was taken beyond is paid back: half a period's ticks are two periods' worth.
    vm.charge(PERIOD / 2, now);
    for _ in 0..2 {
        now = vm.next_period(now);
        assert_eq!(vm.left(now), 0);
    }
    now = vm.next_period(now);
    assert!(vm.left(now).abs_diff(quarter) <= 1024, "{}", vm.left(now));
    // What was left is lost.
    assert_eq!(vm.left(now + 50 * PERIOD), quarter);
    // A pCPU whose clock is a little behind gives nothing, and takes nothing away.
    assert_eq!(vm.left(now + 49 * PERIOD), quarter);
    assert_eq!(Share::default().left(now), u64::MAX);
}

#[test]
fn work_of_the_host_counts_for_the_share_and_its_group_but_not_for_the_cap() {
    let vm = Share::new(200, Some(Cap { ticks: PERIOD / 4, period: PERIOD, since: 0 }), CpuSet::ALL);
    let left = vm.left(0);
    vm.charge_for_work(PERIOD);
    assert_eq!((vm.time(), vm.left(0)), (PERIOD / 2, left));
    let member = Share::member_of(Arc::new(Share::new(200, None, CpuSet::ALL)));
    member.charge_for_work(1_000);
    assert_eq!((member.time(), member.whole().time()), (1_000, 500));
}

/// Periods are counted with 32 bits: on a host that runs for years, a VM must not seem to come from the future.
#[test]
fn cap_holds_on_a_host_that_has_run_for_years() {
    let since = (PERIOD << 31) + (PERIOD << 30) + 5;
    let vm = Share::new(100, Some(Cap { ticks: PERIOD / 4, period: PERIOD, since }), CpuSet::ALL);
    assert_eq!(vm.left(since), PERIOD / 4 / 256 * 256);
    vm.charge(PERIOD, since);
    assert_eq!((vm.left(since), vm.next_period(since)), (0, since + PERIOD));
    assert_eq!(vm.left(since - 1), 0, "nor does a clock that is a little behind");
    assert!(vm.left(since + 4 * PERIOD) > 0);
}

#[test]
fn children_have_their_parents_share_together() {
    let group = vm(300);
    let members = [(); 3].map(|()| Arc::new(Share::member_of(group.clone())));
    let other = vm(100);
    members.iter().for_each(|member| member.charge(900_000, 0));
    assert_eq!((group.time(), members[0].time()), (900_000, 900_000));
    other.charge(900_001, 0);
    members[1].charge(2, 0);

    let mut queue = RunQueue::default();
    queue.push(0, Turn::Fair, Vcpu(9, other));
    members.iter().enumerate().for_each(|(number, vm)| queue.push(0, Turn::Fair, Vcpu(number, vm.clone())));
    let order: Vec<usize> = core::iter::from_fn(|| pop(&mut queue)).collect();
    assert_eq!(order, vec![0, 2, 1, 9], "the group first, and of it the member that has used the least");
    assert_eq!(Share::member_of(group).time(), 0, "nobody has led yet");
}

#[test]
fn member_that_comes_late_does_not_catch_up() {
    let group = vm(100);
    let old = Share::member_of(group.clone());
    old.charge(100 * MAX_LAG, 0);
    old.lift(0);
    let young = Arc::new(Share::member_of(group.clone()));
    assert_eq!(young.time(), old.time());
    let idle = Share::member_of(vm(100));
    idle.lift(5);
    assert_eq!((idle.time(), idle.whole().time()), (0, 5), "a member alone is compared with nobody");
}

/// VMs whose vCPUs always want to run, on one pCPU. Returns what each has got.
fn compete(vms: &[(u32, usize)], slices: usize) -> Vec<u64> {
    let mut queue = RunQueue::default();
    let shares: Vec<Arc<Share>> = vms.iter().map(|(weight, _)| vm(*weight)).collect();
    let mut owner = Vec::new();
    for (number, (_, vcpus)) in vms.iter().enumerate() {
        for _ in 0..*vcpus {
            queue.push_woken(0, Turn::Fair, Vcpu(owner.len(), shares[number].clone()));
            owner.push(number);
        }
    }
    let mut served = vec![0; vms.len()];
    for slice in 0..slices {
        let (time, vcpu) = queue.pop(CPU).expect("all always wait");
        let ran = 9_000_000 + slice as u64 * 7919 % 2_000_000;
        vcpu.1.charge(ran, 0);
        served[owner[vcpu.0]] += ran;
        queue.stop_running(CPU, vcpu.1.time());
        queue.push(time + ran, Turn::Fair, vcpu);
    }
    served
}

#[test]
fn vm_of_many_vcpus_takes_no_more_than_one_of_one() {
    let [one, many] = compete(&[(100, 1), (100, 64)], 10_000)[..] else { panic!("two VMs") };
    assert!(one.abs_diff(many) < (one + many) / 200, "{one} and {many}");
}

#[test]
fn vms_get_time_by_their_weights() {
    let [one, three, ten] = compete(&[(100, 2), (300, 7), (1000, 1)], 14_000)[..] else { panic!("three VMs") };
    let sum = one + three + ten;
    for (got, part) in [(one, 100), (three, 300), (ten, 1000)] {
        assert!(got.abs_diff(sum * part / 1400) < sum / 500, "{one}, {three}, {ten}");
    }
}

/// Two vCPUs that wake each other without end, and one that only computes: the classic way to starve a neighbour.
#[test]
fn ping_pong_pair_cannot_starve_a_spinner() {
    for spinner_vm in [None, Some(vm(100))] {
        let pair_vm = vm(100);
        let spinner_vm = spinner_vm.unwrap_or_else(|| pair_vm.clone());
        let vcpus = [&pair_vm, &pair_vm, &spinner_vm].map(Arc::clone);
        let mut queue = RunQueue::default();
        let mut time = [0; 3];
        let mut served = [0u64; 3];
        let wake = |queue: &mut RunQueue<Vcpu>, time, vcpu: usize| {
            queue.push_woken(time, Turn::Fair, Vcpu(vcpu, vcpus[vcpu].clone()));
        };
        wake(&mut queue, 0, 0);
        wake(&mut queue, 0, 2);
        for _ in 0..10_000 {
            let (at, vcpu) = queue.pop(CPU).expect("somebody always waits");
            let number = vcpu.0;
            let ran = if number == 2 { 1_000_000 } else { 100_000 };
            time[number] = at + ran;
            served[number] += ran;
            vcpu.1.charge(ran, 0);
            queue.stop_running(CPU, vcpu.1.time());
            match number {
                2 => queue.push(time[2], Turn::Fair, vcpu),
                // Wakes the other vCPU of the pair and sleeps.
                _ => wake(&mut queue, time[1 - number], 1 - number),
            }
        }
        let pair = served[0] + served[1];
        assert!(served[2] * 3 > pair, "spinner got {}, pair {pair}", served[2]);
    }
}

proptest! {
    /// Random sleeps, wakes, time slices and VMs: no vCPU that wants to run waits longer than the sum of all credits
    /// and slices, of all VMs with the same weight.
    #[test]
    fn nobody_starves(
        owner in prop::collection::vec(0usize..4, 6),
        choices in prop::collection::vec((any::<bool>(), 1u64..3_000_000), 500..1500),
    ) {
        let vcpus = owner.len();
        let shares = [(); 4].map(|()| vm(100));
        let mut queue = RunQueue::default();
        let mut time = vec![0; vcpus];
        let mut waiting_since = vec![Some(0u64); vcpus];
        let mut asleep = Vec::new();
        for vcpu in 0..vcpus {
            queue.push_woken(0, Turn::Fair, Vcpu(vcpu, shares[owner[vcpu]].clone()));
        }

        let mut clock = 0u64;
        for (sleeps, ran) in choices {
            let Some((at, vcpu)) = queue.pop(CPU) else { break };
            let number = vcpu.0;
            if let Some(since) = waiting_since[number].take() {
                // Its VM waits for the others, and it for the others of its VM.
                let bound = (vcpus * vcpus) as u64 * (2 * WAKE_CREDIT + 2 * 3_000_000);
                prop_assert!(clock - since <= bound, "vCPU {number} waited {}", clock - since);
            }
            clock += ran;
            time[number] = at + ran;
            vcpu.1.charge(ran, clock);
            queue.stop_running(CPU, vcpu.1.time());

            // vCPUs that slept in this slice wake; the one that ran sleeps or waits again.
            for sleeper in core::mem::take(&mut asleep) {
                waiting_since[sleeper] = Some(clock);
                queue.push_woken(time[sleeper], Turn::Fair, Vcpu(sleeper, shares[owner[sleeper]].clone()));
            }
            if sleeps {
                asleep.push(number);
            } else {
                waiting_since[number] = Some(clock);
                queue.push(time[number], Turn::Fair, vcpu);
            }
        }
    }

    /// A cap holds over any number of periods, however the VM's vCPUs take its time.
    #[test]
    fn cap_holds_whatever_is_charged(
        percent in 1u64..400,
        runs in prop::collection::vec((1u64..20_000_000, 0u64..30_000_000), 100..400),
    ) {
        let vm = Share::new(100, Some(Cap { ticks: PERIOD * percent / 100, period: PERIOD, since: 0 }), CpuSet::ALL);
        let (mut now, mut used) = (0, 0);
        for (ran, slept) in runs {
            now += slept;
            if vm.left(now) == 0 {
                now = vm.next_period(now);
                continue;
            }
            now += ran;
            used += ran;
            vm.charge(ran, now);
            // Four others, at the same time.
            vm.charge(4 * ran, now);
            used += 4 * ran;
            let most = (now / PERIOD + 1) * (PERIOD * percent / 100) + 5 * 20_000_000;
            prop_assert!(used <= most + used / 1_000, "{used} of {most}");
        }
    }
}
