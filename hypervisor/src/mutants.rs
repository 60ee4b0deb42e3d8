//! Planted mistakes: each leaves out or swaps a step of what joins the algorithms. The tests show that each is noticed.
//!
//! Outside of tests [`is`] is a constant, and nothing of this is in the code.

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
    /// A woken vCPU is put into a run queue, and no idle pCPU is kicked.
    WakeWithoutKick,
    /// A pCPU says that it is idle, and sleeps without a last look at the run queues.
    IdleWithoutLook,
    /// Who posts looks whether the vCPU is in its guest first, and posts then.
    LookBeforePost,
    /// A vCPU tests for work first, and says then that it is in its guest.
    TestBeforeEnter,
    /// A vCPU says that it is outside, and enters its guest then.
    PresenceLeftEarly,
    /// A new epoch begins after it was looked who is in the guest.
    EpochAfterLook,
    /// A flush of everything begins no epoch.
    EpochNotBumped,
    /// A flush is left in the requests, and the mailbox does not say so.
    FlushNotAnnounced,
    /// A flush that was asked for is taken, and not done.
    FlushNotCarriedOut,
    /// A vCPU that comes to another pCPU keeps the tag of the last one.
    TagKeptOnMove,
    /// A vCPU blocks over work that has just come.
    BlockWithoutTest,
    /// A vCPU blocks, and leaves its timer to nobody.
    TimerLost,
    /// A timer is over, and its vCPU is not told.
    TimerNotPosted,
    /// A vCPU that runs again still counts as one that only others can wake.
    DormantNotUncounted,
    /// A preempted vCPU goes into run queues twice.
    PutBackTwice,
    /// A vCPU that has left its guest for good still holds its VM.
    HandleKept,
    /// A VM is paused, and its vCPUs are not told.
    PauseNotPosted,
    /// Stage 2 has changed, and what TLBs hold of it stays.
    Stage2NotFlushed,
    /// Pages are copied before they are made clean.
    CopyBeforeClear,
    /// The host writes to a guest's memory, and the log does not hear of it.
    HostWriteNotMarked,
}

/// Whether this mistake is to be made.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn is(_: Mutant) -> bool {
    false
}

#[cfg(test)]
pub(crate) use crate::tests::mistakes::is;
