//! The SynIC's pages in a guest's memory.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use addr::Gpa;
use hyperv_defs::page::EventRing;
use synic::{Absent, MESSAGE_BYTES, MessagePage, RingPage};

use crate::vm::memory::Memory;

/// A page of messages or of event rings in a guest's memory, or at an address where it has none.
pub(in crate::arch) struct SynicPage<'a> {
    pub(in crate::arch) memory: &'a Memory,
    pub(in crate::arch) gpa: Gpa,
}

/// In the first word of a slot: another message waits.
const PENDING: u64 = 1 << 40;
/// How often a word is tried to be changed that the guest changes meanwhile. For a guest that does so without end, the
/// page is not there.
const ATTEMPTS: u32 = 64;
const WORD: usize = size_of::<u64>();

impl SynicPage<'_> {
    /// Reads the word at this offset, after what was written before: for all processors.
    fn load(&self, offset: usize) -> Result<u64, Absent> {
        let read = |page: &[AtomicU64]| {
            fence(Ordering::SeqCst);
            page.get(offset / WORD).map(|word| word.load(Ordering::Relaxed))
        };
        self.memory.with_page(self.gpa, read).flatten().ok_or(Absent)
    }

    /// Writes to `bytes` bytes from this offset on.
    fn write<R>(
        &self,
        offset: usize,
        bytes: usize,
        write: impl FnOnce(&[AtomicU64]) -> Option<R>,
    ) -> Result<R, Absent> {
        let at = self.gpa.checked_add(offset as u64).ok_or(Absent)?;
        let write = |page: &[AtomicU64]| page.get(offset / WORD..).and_then(write);
        let written = self.memory.as_host(at, bytes, || self.memory.with_page(self.gpa, write));
        written.flatten().ok_or(Absent)
    }

    /// Sets bits of the word at this offset.
    fn set(&self, offset: usize, bits: u64) -> Result<(), Absent> {
        self.write(offset, WORD, |words| words.first().map(|word| word.fetch_or(bits, Ordering::SeqCst))).map(|_| ())
    }
}

impl MessagePage for SynicPage<'_> {
    fn kind(&self, slot: usize) -> Result<u32, Absent> {
        #[expect(clippy::cast_possible_truncation, reason = "the type is the low half of the slot's first word")]
        let kind = self.load(slot * MESSAGE_BYTES)? as u32;
        Ok(kind)
    }

    fn set_pending(&self, slot: usize) -> Result<(), Absent> {
        self.set(slot * MESSAGE_BYTES, PENDING)
    }

    fn write(&self, slot: usize, head: u64, tail: &[u8]) -> Result<(), Absent> {
        self.write(slot * MESSAGE_BYTES, WORD + tail.len(), |words| {
            let (first, rest) = words.split_first()?;
            let (whole, end) = tail.as_chunks::<WORD>();
            let mut last = [0; WORD];
            last[..end.len()].copy_from_slice(end);
            let last = (!end.is_empty()).then_some(&last);
            for (word, bytes) in rest.iter().zip(whole.iter().chain(last)) {
                word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
            }
            // The exchange comes after the rest for all who see it.
            first.swap(head, Ordering::SeqCst);
            Some(())
        })
    }
}

/// In the first word of an event ring: byte 0 says that the guest looks anyway, byte 1 that there was no room.
const MASKED: u64 = 0xff;
const FULL: u64 = 1 << 8;

/// Where a place of a ring is: the word, and the place's first bit in it.
fn place_of(sint: usize, place: usize) -> (usize, usize) {
    let offset = sint * size_of::<EventRing>() + offset_of!(EventRing, ports) + place * size_of::<u32>();
    (offset / WORD * WORD, offset % WORD * 8)
}

impl RingPage for SynicPage<'_> {
    fn port(&self, sint: usize, place: usize) -> Result<u32, Absent> {
        let (word, shift) = place_of(sint, place);
        #[expect(clippy::cast_possible_truncation, reason = "one of two halves of the word")]
        let port = (self.load(word)? >> shift) as u32;
        Ok(port)
    }

    fn set_port(&self, sint: usize, place: usize, port: u32) -> Result<(), Absent> {
        let (word, shift) = place_of(sint, place);
        let change = |word: u64| word & !(u64::from(u32::MAX) << shift) | u64::from(port) << shift;
        self.write(word, WORD, |words| {
            let word = words.first()?;
            (0..ATTEMPTS).find_map(|_| {
                let old = word.load(Ordering::Relaxed);
                word.compare_exchange(old, change(old), Ordering::SeqCst, Ordering::Relaxed).ok()
            })
        })
        .map(|_| ())
    }

    fn set_full(&self, sint: usize) -> Result<(), Absent> {
        self.set(sint * size_of::<EventRing>(), FULL)
    }

    fn is_masked(&self, sint: usize) -> Result<bool, Absent> {
        Ok(self.load(sint * size_of::<EventRing>())? & MASKED != 0)
    }
}
