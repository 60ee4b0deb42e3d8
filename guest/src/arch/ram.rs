//! Unused memory: from the end of the image to the end of the RAM that contains the image, in whole 2 MiB.
//!
//! The guest maps it one to one, by 2 MiB pages.

use core::sync::atomic::{AtomicU64, Ordering};

use super::host_writes;

/// Size of the pages by which this kernel maps it.
pub(crate) const LARGE_BYTES: u64 = 2 << 20;

static START: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

#[cfg(machine = "pc")]
unsafe extern "C" {
    #[link_name = "image_end"]
    static IMAGE_END: u8;
}

/// It is here: both are multiples of [`LARGE_BYTES`], and all of it is mapped as RAM.
pub(super) fn set(start: u64, bytes: u64) {
    START.store(start, Ordering::Relaxed);
    BYTES.store(bytes, Ordering::Relaxed);
}

/// Finds it among the ranges of RAM, from address to address, that are mapped as such.
#[cfg(machine = "pc")]
pub(super) fn find(ranges: impl Iterator<Item = (u64, u64)>) {
    let image_end = &raw const IMAGE_END as u64;
    let start = image_end.next_multiple_of(LARGE_BYTES);
    for (_, end) in ranges.filter(|(first, end)| (*first..*end).contains(&image_end)) {
        let end = end & !(LARGE_BYTES - 1);
        set(start, end.saturating_sub(start));
    }
}

/// All of it, or nothing.
#[derive(Clone, Copy)]
pub(crate) struct Ram {
    start: u64,
    bytes: u64,
}

impl Ram {
    /// All of it; empty if the machine does not describe its memory.
    pub(crate) fn all() -> Self {
        Self { start: START.load(Ordering::Relaxed), bytes: BYTES.load(Ordering::Relaxed) }
    }

    /// Its size, a multiple of [`LARGE_BYTES`].
    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// The part of `bytes` from `offset` on; shorter if there is less.
    pub(crate) fn part(self, offset: u64, bytes: u64) -> Self {
        let offset = offset.min(self.bytes) & !(LARGE_BYTES - 1);
        Self { start: self.start + offset, bytes: bytes.min(self.bytes - offset) & !(LARGE_BYTES - 1) }
    }

    /// The aligned word that contains `offset`, which must lie within.
    #[inline]
    pub(crate) fn word(self, offset: u64) -> &'static AtomicU64 {
        assert!(offset < self.bytes);
        // SAFETY: the word lies in mapped memory, is aligned, and is outside of the image. Only atomic operations of
        // this kernel access it, and the machine below through `written_by_host`.
        unsafe { &*((self.start + (offset & !7)) as *const AtomicU64) }
    }

    /// Has the hypervisor, if there is one below, write to the eight bytes around `offset`, in a way that `choice`
    /// chooses: by an instruction that is emulated, with memory as its destination. Answers whether this machine knows
    /// such a way.
    pub(crate) fn written_by_host(self, offset: u64, choice: u64) -> bool {
        host_writes::write((&raw const *self.word(offset)) as u64, choice)
    }

    /// As [`written_by_host`](Self::written_by_host), all of the `bytes` from `offset` on, which begins a word, by one
    /// instruction.
    #[cfg(machine = "pc")]
    pub(crate) fn filled_by_host(self, offset: u64, bytes: u64) {
        assert!(offset < self.bytes && bytes <= self.bytes - offset);
        host_writes::fill((&raw const *self.word(offset)) as u64, bytes);
    }
}
