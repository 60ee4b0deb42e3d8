//! The table of messages that a guest has written (MSI-X; PCI Express 7.7.2).
//!
//! The function never sees it. Its own table has, at the same place, messages of the hypervisor's, and the same masks.
//! So the guest may write anything: what it writes is looked at when the function has sent its message.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::device::interrupt::Message;

/// Length of an entry: address, data, control.
pub const ENTRY_BYTES: usize = 16;
const ENTRY_WORDS: usize = ENTRY_BYTES / WORD_BYTES;
const WORD_BYTES: usize = 4;
const DATA: usize = 2;
const CONTROL: usize = 3;
/// Control: the message is masked. The other bits are reserved.
const MASKED: u32 = 1;

/// The table.
#[derive(Debug)]
pub struct Table(Vec<u32>);

impl Table {
    /// As after reset: all masked.
    #[must_use]
    pub fn new(count: usize) -> Self {
        let mut words = vec![0; count * ENTRY_WORDS];
        words.chunks_mut(ENTRY_WORDS).for_each(|entry| entry[CONTROL] = MASKED);
        Self(words)
    }

    /// A read of `bytes` at `offset`. Bytes beyond the table are ones.
    #[must_use]
    pub fn read(&self, offset: u64, bytes: u64) -> u64 {
        let mut value = [u8::MAX; 8];
        for (byte, at) in value.iter_mut().zip(0..bytes) {
            let at = usize::try_from(offset.wrapping_add(at)).unwrap_or(usize::MAX);
            if let Some(word) = self.0.get(at / WORD_BYTES) {
                *byte = word.to_le_bytes()[at % WORD_BYTES];
            }
        }
        u64::from_le_bytes(value)
    }

    /// A write of `bytes` at `offset`. Returns the entries that it has touched. Only words are written, or two of them
    /// that belong together: all else is undefined (7.7.2), and dropped.
    pub fn write(&mut self, offset: u64, bytes: u64, value: u64) -> Range<usize> {
        const NONE: Range<usize> = 0..0;
        if !matches!(bytes, 4 | 8) || !offset.is_multiple_of(bytes) {
            return NONE;
        }
        let Ok(first) = usize::try_from(offset / WORD_BYTES as u64) else { return NONE };
        for (index, part) in (first..).zip(value.to_le_bytes().chunks(WORD_BYTES).take(if bytes == 8 { 2 } else { 1 }))
        {
            let (Some(word), Ok(part)) = (self.0.get_mut(index), part.try_into()) else { continue };
            let kept = if index % ENTRY_WORDS == CONTROL { MASKED } else { u32::MAX };
            *word = u32::from_le_bytes(part) & kept;
        }
        let entry = first / ENTRY_WORDS;
        if entry < self.count() { entry..entry + 1 } else { NONE }
    }

    /// Sets an entry that the guest writes elsewhere.
    pub fn set(&mut self, entry: usize, address: u64, data: u32, is_masked: bool) {
        let [low, high] = [address & u64::from(u32::MAX), address >> 32].map(|half| u32::try_from(half).unwrap_or(0));
        if let Some(words) = self.0.chunks_mut(ENTRY_WORDS).nth(entry) {
            words.copy_from_slice(&[low, high, data, u32::from(is_masked)]);
        }
    }

    /// Number of entries.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.0.len() / ENTRY_WORDS
    }

    /// Whether an entry is masked. One that does not exist is.
    #[must_use]
    pub fn is_masked(&self, entry: usize) -> bool {
        self.entry(entry).is_none_or(|words| words[CONTROL] & MASKED != 0)
    }

    /// The message for the guest's local APICs that an entry stands for, if it is one.
    #[must_use]
    pub fn message(&self, entry: usize) -> Option<Message> {
        let words = self.entry(entry)?;
        Message::from_device(u64::from(words[1]) << 32 | u64::from(words[0]), words[DATA])
    }

    fn entry(&self, entry: usize) -> Option<&[u32]> {
        self.0.chunks(ENTRY_WORDS).nth(entry)
    }
}
