//! Detects stale translations in user space.
//!
//! All threads read the same page of address space through a [`Window`]. Sometimes one of them replaces its frame:
//!
//! ```text
//! replace:  write n+1 into a frame that is not shown
//!           show that frame                               the kernel must flush every TLB before this returns
//!           announce n+1
//!           write 0 into the frame that was shown before
//!
//! read:     a = announced number
//!           v = number read                               v < a: this CPU used a translation that was taken away
//! ```
//!
//! There are no false alarms: an announced frame is shown already, so a correct machine reads `a` or a newer number.
//! The 0 is written when no translation to that frame is left. No stale use is missed: a stale translation reads an old
//! number or the 0, and both are below the announced one. (The frames are used in turn. A translation that has outlived
//! [`FRAMES`] replacements may read a number that is new again; in all of the time before it was visible.)

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};

use rustix::io::Result;

use crate::memory::Window;

const FRAMES: usize = 16;

/// The page, its number, and the results.
#[derive(Debug)]
pub(crate) struct Detector {
    window: Window,
    /// The newest number that every reader must see.
    announced: AtomicU64,
    /// Held by the thread that replaces the frame.
    replacing: Mutex<()>,
}

impl Detector {
    pub(crate) fn new() -> Result<Self> {
        let window = Window::new(FRAMES)?;
        Ok(Self { window, announced: AtomicU64::new(0), replacing: Mutex::new(()) })
    }

    /// Reads once. `false`: the number is older than the one announced before.
    pub(crate) fn read(&self) -> bool {
        // Acquire: the read through the window comes after this.
        let announced = self.announced.load(Ordering::Acquire);
        self.window.read() >= announced
    }

    /// Replaces the frame, unless another thread is doing so. `show` gets the step that must flush, to time it. Returns
    /// whether the frame was replaced.
    pub(crate) fn replace(&self, show: impl FnOnce(&dyn Fn() -> Result<()>) -> Result<()>) -> Result<bool> {
        let _replacing = match self.replacing.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::WouldBlock) => return Ok(false),
            // A thread that panicked here left all as it was or replaced as a whole.
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
        };
        // Numbers are written under the lock only.
        let old = self.announced.load(Ordering::Relaxed);
        let new = old + 1;

        self.window.write(frame_of(new), new);
        show(&|| self.window.show(frame_of(new)))?;
        // Release: a thread that reads this number sees the new window.
        self.announced.store(new, Ordering::Release);
        self.window.write(frame_of(old), 0);
        Ok(true)
    }
}

fn frame_of(number: u64) -> usize {
    usize::try_from(number % FRAMES as u64).expect("a remainder is below its divisor")
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn readers_beside_a_replacing_thread_see_nothing_stale() {
        let detector = Detector::new().expect("memory is there");
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..20_000).for_each(|_| assert!(detector.read())));
            }
            for _ in 0..2_000 {
                detector.replace(|show| show()).expect("is ours");
                assert!(detector.read());
            }
        });
    }

    #[test]
    fn an_announcement_without_a_new_frame_is_seen() {
        let detector = Detector::new().expect("memory is there");
        for _ in 0..3 {
            detector.replace(|show| show()).expect("is ours");
        }
        assert!(detector.read());
        // The step that should replace the translation is left out: reads show the same as with a stale translation.
        for _ in 0..2 * FRAMES {
            detector.replace(|_| Ok(())).expect("nothing was done");
            let frame_is_shown_again = detector.announced.load(Ordering::Relaxed) % FRAMES as u64 == 3;
            assert_eq!(detector.read(), frame_is_shown_again);
        }
    }
}
