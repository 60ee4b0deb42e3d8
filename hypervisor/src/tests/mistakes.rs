//! One of the scenarios finds each planted mistake, within the number of interleavings that the tests run.

use core::cell::Cell;
use std::string::String;
use std::time::Instant;

use super::{
    Scenario, alone, control, cores, devices, dirty, end, find, lent, life, saved, schedule, shootdown, suspend,
};
use crate::mutants::{ALL, Mutant};

std::thread_local! {
    static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Whether this mistake is active on the simulated pCPUs of this thread.
pub(crate) fn is(mutant: Mutant) -> bool {
    PLANTED.get() == Some(mutant)
}

/// The scenario that finds the mistake.
fn found_by(mutant: Mutant) -> Scenario {
    match mutant {
        Mutant::WakeWithoutKick | Mutant::BlockWithoutTest => schedule::PING_PONG,
        Mutant::WokenNotMinded => schedule::WOKEN_BY_SPINNER,
        Mutant::IdleWithoutLook => schedule::BESIDE_SPINNER,
        Mutant::LookBeforePost | Mutant::TestBeforeEnter | Mutant::PresenceLeftEarly => life::STOP_SPINNING,
        Mutant::EpochAfterLook | Mutant::EpochNotBumped => shootdown::EPOCHS,
        Mutant::FlushNotAnnounced | Mutant::FlushNotCarriedOut => shootdown::SIDE_BY_SIDE,
        Mutant::TagKeptOnMove => shootdown::MOVING,
        Mutant::TimerLost | Mutant::TimerNotPosted | Mutant::StolenLeft => schedule::TIMERS,
        Mutant::PutBackTwice => schedule::CROWD,
        Mutant::QueueForEachThread => cores::STRANGERS,
        Mutant::CoreNotPassedOn => cores::PINNED,
        Mutant::RestNotSent => schedule::TO_ALL,
        Mutant::NobodyTells => schedule::DEVICE_TO_ALL,
        Mutant::RestNotTold => life::STOP,
        Mutant::HandoverForEver => schedule::HAND_OVER,
        Mutant::DormantNotUncounted => schedule::ALL_STOP,
        Mutant::HandleKept => life::STOP,
        Mutant::BuriedWhileHeld => end::WHILE_WOKEN,
        Mutant::QueueEntryLeft => life::STOP_SPINNING,
        Mutant::TagsInheritedUnsaid => end::INHERITED_FROM_VMS,
        Mutant::PauseNotPosted => life::PAUSE,
        Mutant::PauseNotLookedAtAgain | Mutant::ResumeNotPosted | Mutant::HeldForEver => suspend::SUSPEND,
        Mutant::Stage2NotFlushed | Mutant::CopyBeforeClear => dirty::BY_FAULTS,
        Mutant::BrokenEntriesEmptied => dirty::MADE_WHOLE,
        Mutant::DevicesNotFlushed => devices::TAKEN,
        Mutant::DevicesKept => devices::OWNER_ENDS,
        Mutant::HostWriteNotMarked => dirty::BY_HARDWARE,
        Mutant::WritesNotReported => dirty::BY_LIST,
        Mutant::ReportsNotCollected => dirty::WHILE_IT_RUNS,
        Mutant::FlushNotWaitedFor | Mutant::FlushedBeforeCleared => lent::TAKEN_FROM_CHILD,
        Mutant::TakenNotFlushed => lent::DEPOSITED_IN_USE,
        Mutant::BegunTwice => lent::CREATED_TWICE,
        Mutant::PostedNotRead => lent::SAVED,
        Mutant::TimerWhileHeld | Mutant::TimerNotMoved => lent::FROZEN,
        Mutant::WaitNotSeen | Mutant::WaitedForNothing => lent::OWED,
        Mutant::PauseAnsweredEarly | Mutant::EndAnsweredEarly => control::COMMANDED,
        Mutant::SavedTimeGoesOn => saved::STANDS_STILL,
        Mutant::AwaitingForgotten => control::ENDS_MEANWHILE,
        Mutant::WordKept | Mutant::VisitorsNotWaitedFor => lent::VISITED,
        Mutant::DevicesVisited => lent::DEVICE_AS_MEMORY,
        Mutant::WrittenForgotten | Mutant::TrackedNotFlushed => lent::tracked::HARVESTED,
        Mutant::JoinedTablesKept => lent::tracked::COMES_BACK,
    }
}

/// Runs a scenario with this mistake, until that is found.
pub(super) fn plant(mutant: Mutant, scenario: Scenario, count: usize) -> Result<(), String> {
    let _nobody_else = alone();
    PLANTED.set(Some(mutant));
    let found = find(scenario, count);
    PLANTED.set(None);
    found
}

#[test]
fn each_planted_mistake_is_found() {
    let mut missed = String::new();
    for &mutant in ALL {
        let scenario = found_by(mutant);
        let since = Instant::now();
        match plant(mutant, scenario, scenario.count) {
            Ok(_) => missed += &format!("{mutant:?} is not found by \"{}\"\n", scenario.name),
            Err(what) => println!("{mutant:?}: {:?}: {what}", since.elapsed()),
        }
    }
    assert!(missed.is_empty(), "{missed}");
}
