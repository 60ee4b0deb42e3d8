//! Planted mistakes (mutants): each omits or swaps a step of the code that joins the algorithms. The tests prove that
//! each is found.
//!
//! Outside of tests [`is`] is a constant, and none of this is in the code.

/// Defines the mistakes and a list of all.
macro_rules! define {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A mistake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Mutant {
            $($(#[$doc])* $name,)*
        }

        /// All of them.
        #[cfg(test)]
        pub(crate) const ALL: &[Mutant] = &[$(Mutant::$name),*];
    };
}

define! {
    /// A stolen vCPU is left in the thief's queue for a moment, where others may steal it: two thieves may do that for
    /// ever.
    StolenLeft,
    /// A woken vCPU is put into a run queue, and no idle pCPU is kicked.
    WakeWithoutKick,
    /// A vCPU that wakes another for its own pCPU enters its guest as if it were alone.
    WokenNotMinded,
    /// A pCPU announces that it is idle, and sleeps without a last look at the run queues.
    IdleWithoutLook,
    /// A sender looks whether the vCPU is in its guest, and posts only then.
    LookBeforePost,
    /// A vCPU tests for pending work, and announces only then that it is in its guest.
    TestBeforeEnter,
    /// A vCPU announces that it is outside, and then enters its guest.
    PresenceLeftEarly,
    /// A new epoch begins after the sender looked which vCPUs are in the guest.
    EpochAfterLook,
    /// A flush of everything begins no epoch.
    EpochNotBumped,
    /// A vCPU of a child is reset before it is known that no other call has created it.
    #[allow(dead_code, reason = "not every architecture has parents")]
    BegunTwice,
    /// A flush is left in the requests, and the mailbox does not say so.
    FlushNotAnnounced,
    /// A requested flush is taken from the mailbox and not done.
    FlushNotCarriedOut,
    /// A vCPU that moves to another pCPU keeps the tag of its last pCPU.
    TagKeptOnMove,
    /// A vCPU blocks although work was just posted.
    BlockWithoutTest,
    /// A vCPU blocks and leaves no timer behind.
    TimerLost,
    /// Of an interrupt to many, those beyond the second step never get it.
    RestNotSent,
    /// Of an interrupt that a device sends to many, those beyond the first step are not told.
    NobodyTells,
    /// A vCPU that is told of a pause or of the end does not tell those behind it.
    RestNotTold,
    /// A timer expires and its vCPU is not notified.
    TimerNotPosted,
    /// A vCPU that runs again still counts as dormant.
    DormantNotUncounted,
    /// With `smt=core` the threads of a core have a queue each, as without.
    QueueForEachThread,
    /// A pCPU leaves its core to others, and does not kick them.
    CoreNotPassedOn,
    /// A preempted vCPU goes into run queues twice.
    PutBackTwice,
    /// A vCPU that has left its guest for good still holds its VM.
    HandleKept,
    /// A vCPU that has left its guest for good goes back into a run queue.
    QueueEntryLeft,
    /// The end of a VM is reported, and the VM removed from the table, while a pCPU still refers to it.
    BuriedWhileHeld,
    /// A pool gets the tags of an earlier pool, and the first entries do not flush them.
    TagsInheritedUnsaid,
    /// A vCPU that handed its pCPU over waits there for as long as the other one wants.
    HandoverForEver,
    /// A VM is paused and its vCPUs are not notified.
    PauseNotPosted,
    /// A paused vCPU takes the post that ends the pause, and blocks.
    PauseNotLookedAtAgain,
    /// The last reason that suspends a vCPU is gone, and the vCPU is not notified.
    ResumeNotPosted,
    /// A vCPU has to wait for its parent between two instructions, and enters its guest.
    #[allow(dead_code, reason = "not every architecture has parents")]
    WaitNotSeen,
    /// A vCPU has waited for its parent between two instructions, and does not do what it has waited for.
    WaitedForNothing,
    /// A parent reads the state of a vCPU that has not taken its interrupts yet, and they are not in it.
    #[allow(dead_code, reason = "not every architecture has parents")]
    PostedNotRead,
    /// A timer of a vCPU that is held expires, although its parent has stopped its time.
    TimerWhileHeld,
    /// A child's time goes on, and its timers come by as much too early as it stood still.
    #[allow(dead_code, reason = "not every architecture has parents")]
    TimerNotMoved,
    /// A vCPU that was held for its registers stays held.
    HeldForEver,
    /// Stage 2 changes and the TLBs are not flushed.
    Stage2NotFlushed,
    /// An entry of stage 2 that is broken, because small pages become a large one, says nothing any more.
    BrokenEntriesEmptied,
    /// Stage 2 changes, and the IOMMUs are not flushed.
    DevicesNotFlushed,
    /// A VM ends, and the functions that it owned still reach its memory.
    DevicesKept,
    /// Pages are copied before they are made clean.
    CopyBeforeClear,
    /// The host writes to a guest's memory, and the log does not hear of it.
    HostWriteNotMarked,
    /// What a pCPU has listed of its guest's writes is dropped.
    WritesNotReported,
    /// A round does not wait until guests that run have left, and so have reported.
    ReportsNotCollected,
    /// A flush of everything on all vCPUs is asked for, and not waited for.
    FlushNotWaitedFor,
    /// Pages are taken away, and the TLBs are not flushed.
    #[allow(dead_code, reason = "not every architecture has parents")]
    TakenNotFlushed,
    /// Pages are taken away, and the TLBs are flushed before stage 2 is cleared.
    #[allow(dead_code, reason = "not every architecture has parents")]
    FlushedBeforeCleared,
    /// Pages are taken away, and what their leaves have recorded is forgotten.
    #[allow(dead_code, reason = "not every architecture has parents")]
    WrittenForgotten,
    /// A parent has cleared the states of pages, and the TLBs are not flushed.
    #[allow(dead_code, reason = "not every architecture has parents")]
    TrackedNotFlushed,
    /// Tables whose pages were joined wait for walkers to leave, and the child ends.
    #[allow(dead_code, reason = "not every architecture has parents")]
    JoinedTablesKept,
    /// Pages are taken away, and words in them that were found before are still valid.
    WordKept,
    /// Pages are taken away and used again while the hypervisor may be accessing them.
    VisitorsNotWaitedFor,
    /// The hypervisor accesses what a parent has mapped, and does not look whether that is memory.
    DevicesVisited,
    /// A pause is answered before all vCPUs have stopped.
    PauseAnsweredEarly,
    /// The time of a VM goes on while it is saved, and while it is in its file.
    SavedTimeGoesOn,
    /// The end of a VM is answered before the VM is over.
    EndAnsweredEarly,
    /// A VM ends, and a command that waits for something else about it gets no answer.
    AwaitingForgotten,
}

/// Whether this mistake is active.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn is(_: Mutant) -> bool {
    false
}

#[cfg(test)]
pub(crate) use crate::tests::mistakes::is;
