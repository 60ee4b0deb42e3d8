//! The SynIC's pages in a guest's memory.

use core::mem::offset_of;
use core::sync::atomic::{Ordering, fence};

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

impl SynicPage<'_> {
    /// Changes the word at this offset.
    fn change(&self, offset: usize, change: impl Fn(u64) -> u64) -> Result<(), Absent> {
        for _ in 0..ATTEMPTS {
            // Anew each time: a parent's memory may lose a page meanwhile, and then no word that was found is valid.
            let word = self.memory.find_word(self.at(offset)?).ok_or(Absent)?;
            let old = self.memory.load(word, 0);
            if self.memory.compare_exchange(word, old, change(old)) {
                return Ok(());
            }
        }
        Err(Absent)
    }

    /// Reads the word at this offset, after what was written before: for all processors. ([`Self::change`] exchanges,
    /// which is a barrier on its other side.)
    fn load(&self, offset: usize) -> Result<u64, Absent> {
        for _ in 0..ATTEMPTS {
            let word = self.memory.find_word(self.at(offset)?).ok_or(Absent)?;
            fence(Ordering::SeqCst);
            let value = self.memory.load(word, 0);
            // A word that is not valid any more reads as zero, and a slot with zero would be free.
            if value != 0 || self.memory.compare_exchange(word, 0, 0) {
                return Ok(value);
            }
        }
        Err(Absent)
    }

    fn at(&self, offset: usize) -> Result<Gpa, Absent> {
        self.gpa.checked_add(offset as u64).ok_or(Absent)
    }
}

const WORD: usize = size_of::<u64>();

impl MessagePage for SynicPage<'_> {
    fn kind(&self, slot: usize) -> Result<u32, Absent> {
        #[expect(clippy::cast_possible_truncation, reason = "the type is the low half of the slot's first word")]
        let kind = self.load(slot * MESSAGE_BYTES)? as u32;
        Ok(kind)
    }

    fn set_pending(&self, slot: usize) -> Result<(), Absent> {
        self.change(slot * MESSAGE_BYTES, |word| word | PENDING)
    }

    fn write(&self, slot: usize, head: u64, tail: &[u8]) -> Result<(), Absent> {
        if !self.memory.write(self.at(slot * MESSAGE_BYTES + WORD)?, tail) {
            return Err(Absent);
        }
        // The exchange comes after the rest for all who see it.
        self.change(slot * MESSAGE_BYTES, |_| head)
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
        self.change(word, |word| word & !(u64::from(u32::MAX) << shift) | u64::from(port) << shift)
    }

    fn set_full(&self, sint: usize) -> Result<(), Absent> {
        self.change(sint * size_of::<EventRing>(), |word| word | FULL)
    }

    fn is_masked(&self, sint: usize) -> Result<bool, Absent> {
        Ok(self.load(sint * size_of::<EventRing>())? & MASKED != 0)
    }
}
