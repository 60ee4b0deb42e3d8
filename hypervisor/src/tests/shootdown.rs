//! Flushes of other vCPUs' TLBs, while these run, wait, and move between pCPUs.

use interleave::STEPS;
use std::vec::Vec;

use abi::payload::TagScheme;

use super::{Scenario, config, explore, run_guest};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;

const DONE: u64 = 0x1000;
const PAGE: u64 = 3;

/// A vCPU that uses a page again and again, in different places.
fn user(number: u64) -> Vec<Op> {
    let touch = [Op::Touch(PAGE), Op::Yield, Op::Touch(PAGE), Op::Touch(PAGE + 1)];
    let end = [Op::Write(DONE + 8 * number, 1), Op::Interrupt(0), Op::Stop];
    [&touch[..], &touch, &touch, &end].concat()
}

/// A vCPU that changes pages and has all others flush them: one page, everything of all, everything of some.
fn changer(users: u64) -> Vec<Op> {
    let starts = (1..=users).map(|user| Op::Start(u32::try_from(user).expect("few")));
    let all = (2 << users) - 1;
    let changes = [
        Op::Touch(PAGE),
        Op::Map(PAGE, 1),
        Op::Flush(all, Some(PAGE)),
        Op::Touch(PAGE),
        Op::Map(PAGE, 2),
        Op::Map(PAGE + 1, 2),
        Op::Flush(all, None),
        Op::Touch(PAGE),
        Op::Map(PAGE, 3),
        Op::Flush(all - 1, None),
        Op::Map(PAGE, 4),
        Op::Flush(all - 1, Some(PAGE)),
    ];
    let waits = (1..=users).map(|user| Op::Sleep(DONE + 8 * user, 1));
    starts.chain(changes).chain(waits).chain([Op::ShutDown]).collect()
}

fn flushed(simulation: &Simulation, tags: TagScheme, users: u32) {
    let name = format!("{tags:?}");
    let config = abi::payload::VmConfig { tags, ..config(&name, users as usize + 1) };
    let programs = core::iter::once(changer(users.into())).chain((1..=users.into()).map(user)).collect();
    run_guest(simulation, &config, programs);
}

/// As many pCPUs as vCPUs.
pub(super) const SIDE_BY_SIDE: Scenario = Scenario {
    name: "shootdown side by side",
    cpus: 2,
    count: 12_000,
    steps: STEPS,
    script: |simulation| flushed(simulation, TagScheme::Epoch, 1),
};

/// Flushes of everything on all vCPUs, again and again, while the target enters and leaves its guest.
pub(super) const EPOCHS: Scenario = Scenario {
    name: "shootdown by epochs",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation| {
        let change = |value| [Op::Map(PAGE, value), Op::Flush(3, None), Op::Touch(PAGE)];
        let changes = (1..=6).flat_map(change);
        let first = core::iter::once(Op::Start(1)).chain(changes).chain([Op::Sleep(DONE, 1), Op::ShutDown]);
        let touch = [Op::Touch(PAGE), Op::Yield, Op::Touch(PAGE), Op::Touch(PAGE), Op::Touch(PAGE)];
        let second = [&touch.repeat(6)[..], &[Op::Write(DONE, 1), Op::Interrupt(0), Op::Stop]].concat();
        run_guest(simulation, &config("epochs", 2), std::vec![first.collect(), second]);
    },
};

/// More vCPUs than pCPUs: they move, and most targets do not run.
pub(super) const MOVING: Scenario = Scenario {
    name: "shootdown of vCPUs that move",
    cpus: 2,
    count: 6_000,
    steps: STEPS,
    script: |simulation| {
        let change = |value| [Op::Map(PAGE, value), Op::Flush(7, Some(PAGE)), Op::Timer(700), Op::Halt];
        let first = [Op::Start(1), Op::Start(2)].into_iter().chain((1..=6).flat_map(change));
        let first = first.chain([Op::Sleep(DONE, 1), Op::Sleep(DONE + 8, 1), Op::ShutDown]);
        // They sleep, and wake where there is room.
        let touch = |ticks| [Op::Touch(PAGE), Op::Touch(PAGE), Op::Yield, Op::Timer(ticks), Op::Halt];
        let user =
            |ticks, done| [&touch(ticks).repeat(7)[..], &[Op::Write(done, 1), Op::Interrupt(0), Op::Stop]].concat();
        run_guest(simulation, &config("moving", 3), std::vec![first.collect(), user(500, DONE), user(900, DONE + 8)]);
    },
};

/// As above, with tags that are counted per pCPU.
pub(super) const BY_GENERATION: Scenario = Scenario {
    name: "shootdown with generations",
    cpus: 2,
    count: 6_000,
    steps: STEPS,
    script: |simulation| flushed(simulation, TagScheme::Generation, 2),
};

/// A target that was not entered for long, because its pCPU runs the vCPU that flushes.
pub(super) const WAITING_TARGET: Scenario = Scenario {
    name: "shootdown of a target that waits for its pCPU",
    cpus: 1,
    count: 4_000,
    steps: STEPS,
    script: |simulation| flushed(simulation, TagScheme::Epoch, 1),
};

#[test]
fn no_stale_translation_is_used_after_the_flush_was_acknowledged() {
    explore(SIDE_BY_SIDE);
}

#[test]
fn new_epoch_reaches_vcpus_that_enter_meanwhile() {
    explore(EPOCHS);
}

#[test]
fn vcpu_that_moved_to_another_pcpu_uses_no_stale_translation() {
    explore(MOVING);
}

#[test]
fn tags_by_generation_leave_no_stale_translation_either() {
    explore(BY_GENERATION);
}

#[test]
fn flush_does_not_wait_for_a_vcpu_that_does_not_run() {
    explore(WAITING_TARGET);
}
