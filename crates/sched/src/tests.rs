use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::{any, prop, prop_assert, proptest};

use crate::{CpuId, Mailbox, Notify, Pending, RunQueue, WAKE_CREDIT};

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

#[test]
fn least_served_runs_next_and_ties_go_by_arrival() {
    let mut queue = RunQueue::default();
    queue.push(30, 'c');
    queue.push(10, 'a');
    queue.push(10, 'b');
    let order: Vec<char> = core::iter::from_fn(|| queue.pop()).map(|(_, vcpu)| vcpu).collect();
    assert_eq!(order, vec!['a', 'b', 'c']);
}

#[test]
fn queue_with_room_for_all_never_takes_memory() {
    let mut queue = RunQueue::default();
    queue.reserve(64).expect("is little");
    let room = queue.room();
    for round in 0..100 {
        (0..64).for_each(|vcpu| queue.push((vcpu * 7919 + round) % 61, vcpu));
        for _ in 0..32 {
            queue.pop();
            queue.pop_last();
        }
        assert_eq!((queue.len(), queue.room()), (0, room));
    }
    queue.push(1, 1);
    queue.shrink(0);
    assert!(queue.room() < room, "what nobody needs any more is given back");
    assert_eq!(queue.pop(), Some((1, 1)));
}

#[test]
fn long_sleeper_gets_a_bounded_credit() {
    let mut queue: RunQueue<u8> = RunQueue::default();
    queue.advance(1_000_000_000);
    assert_eq!(queue.wake_time(0), 1_000_000_000 - WAKE_CREDIT);
    assert_eq!(queue.wake_time(1_000_000_007), 1_000_000_007, "who just slept for a moment keeps its place");
}

#[test]
fn migrant_keeps_its_distance_to_the_floor() {
    let mut queue: RunQueue<u8> = RunQueue::default();
    queue.advance(1_000_000_000);
    assert_eq!(queue.translate(5_500, 5_000), 1_000_000_500);
    assert_eq!(queue.translate(4_900, 5_000), 999_999_900);
}

/// Two vCPUs that wake each other without end, and one that only computes: the classic way to starve a neighbour.
#[test]
fn ping_pong_pair_cannot_starve_a_spinner() {
    let mut queue = RunQueue::default();
    let mut time = [queue.floor(); 3];
    let mut served = [0u64; 3];
    queue.push(time[0], 0);
    queue.push(time[2], 2);

    for _ in 0..10_000 {
        let (at, vcpu) = queue.pop().expect("somebody always waits");
        let ran = if vcpu == 2 { 1_000_000 } else { 100_000 };
        time[vcpu] = at + ran;
        served[vcpu] += ran;
        queue.advance(time[vcpu]);
        match vcpu {
            2 => queue.push(time[2], 2),
            _ => {
                // Wakes the other vCPU of the pair and sleeps.
                let other = 1 - vcpu;
                let wake = queue.wake_time(time[other]);
                queue.push(wake, other);
            }
        }
    }
    let pair = served[0] + served[1];
    assert!(served[2] * 3 > pair, "spinner got {}, pair {pair}", served[2]);
}

proptest! {
    /// Random sleeps, wakes and time slices: no vCPU that wants to run waits longer than the sum of all credits and
    /// slices.
    #[test]
    fn nobody_starves(choices in prop::collection::vec((any::<bool>(), 1u64..3_000_000), 500..1500)) {
        const VCPUS: usize = 6;
        let mut queue = RunQueue::default();
        let mut time = [queue.floor(); VCPUS];
        let mut waiting_since = [Some(0u64); VCPUS];
        let mut asleep = Vec::new();
        for (vcpu, &at) in time.iter().enumerate() {
            queue.push(at, vcpu);
        }

        let mut clock = 0u64;
        for (sleeps, ran) in choices {
            let Some((at, vcpu)) = queue.pop() else { break };
            if let Some(since) = waiting_since[vcpu].take() {
                let bound = VCPUS as u64 * (2 * WAKE_CREDIT + 2 * 3_000_000);
                prop_assert!(clock - since <= bound, "vCPU {vcpu} waited {}", clock - since);
            }
            clock += ran;
            time[vcpu] = at + ran;
            queue.advance(time[vcpu]);

            // vCPUs that slept in this slice wake; the one that ran sleeps or waits again.
            for sleeper in core::mem::take(&mut asleep) {
                let wake = queue.wake_time(time[sleeper]);
                waiting_since[sleeper] = Some(clock);
                queue.push(wake, sleeper);
            }
            if sleeps {
                asleep.push(vcpu);
            } else {
                waiting_since[vcpu] = Some(clock);
                queue.push(time[vcpu], vcpu);
            }
        }
    }
}
