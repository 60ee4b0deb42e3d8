//! The RAM of one VM: runs of frames, which a `GuestRam` owns until it is dropped.

#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) mod words;

mod visited;

use alloc::vec::Vec;

use super::ram::Frames;

/// Runs of frames that stay at their addresses as long as this value lives.
pub(crate) struct GuestRam {
    #[cfg(any(test, target_arch = "x86_64"))]
    identity: words::Identity,
    runs: Vec<Frames>,
}

impl GuestRam {
    /// Takes the runs over, for good.
    pub(crate) fn new(runs: Vec<Frames>) -> Self {
        Self {
            #[cfg(any(test, target_arch = "x86_64"))]
            identity: words::Identity::new(),
            runs,
        }
    }

    /// A run, by its index.
    #[inline]
    pub(crate) fn run(&self, run: usize) -> Option<&Frames> {
        self.runs.get(run)
    }
}
