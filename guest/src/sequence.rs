//! The numbers by which a stale translation gives itself away.
//!
//! A page belongs to one writer, who moves it from frame to frame. The move number `n`:
//!
//! 1. writes `n` into the frame `n % FRAMES`, which the page has not pointed to since move `n - FRAMES`,
//! 2. points the page at that frame,
//! 3. flushes the page on a set of CPUs,
//! 4. publishes `n` to each CPU of the set: what this CPU reads from now on is `n` at least.
//!
//! A reader takes its published number first and reads the page second.
//!
//! **No false alarm.** With a good translation the reader reaches the frame of a move `m`, `m >= n` where `n` is what
//! it took, because the page already pointed there when `n` was published. That frame held `m` before the page pointed
//! to it, and the numbers in a frame only rise. So less than `n` cannot be read, even if the frame is written again
//! meanwhile.
//!
//! **What is missed.** A stale translation to the frame of move `m < n` is noticed until that frame is written anew by
//! move `m + FRAMES`: for the next `FRAMES - 1` moves. Afterwards the old frame holds a number that looks good.

/// Frames that a page takes turns among.
pub const FRAMES: usize = 8;

/// Index of the frame that move `number` uses.
#[must_use]
pub fn frame_of(number: u64) -> usize {
    // The remainder is below FRAMES.
    usize::try_from(number % FRAMES as u64).unwrap_or(0)
}

/// Whether a reader to whom `published` was promised must not read `content`.
#[must_use]
pub fn is_stale(published: u64, content: u64) -> bool {
    content < published
}
