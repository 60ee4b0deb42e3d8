//! The numbers that reveal a stale translation.
//!
//! A page belongs to one writer, which moves it from frame to frame. The move number `n`:
//!
//! 1. writes `n` into the frame `n % FRAMES`, which the page has not pointed to since move `n - FRAMES`,
//! 2. points the page at that frame,
//! 3. flushes the page on a set of CPUs,
//! 4. publishes `n` to each CPU of the set: from now on this CPU reads at least `n`.
//!
//! A reader takes its published number first and reads the page second.
//!
//! **No false alarm.** Let `n` be the number that the reader took. With a valid translation the reader reaches the
//! frame of a move `m`, `m >= n`, because the page already pointed there when `n` was published. That frame held `m`
//! before the page pointed to it, and the numbers in a frame only rise. So the reader cannot read less than `n`, even
//! if the writer writes to the frame again meanwhile.
//!
//! **What it misses.** A stale translation to the frame of move `m < n` is visible for the next `FRAMES - 1` moves,
//! until move `m + FRAMES` writes that frame again. Afterwards the old frame holds a valid number.

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
