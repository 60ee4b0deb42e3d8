//! A split virtqueue (2.7), from the device's side.
//!
//! ```text
//!   descriptor table   16 bytes each: address, length, flags, next          read here, written by the driver
//!   driver area        flags, index, ring of heads ("available")            the same
//!   device area        flags, index, ring of (head, length) ("used")        written here
//! ```
//!
//! Chains are used in the order in which they were made available, one at a time. A chain is walked again for each part
//! of it that is used, so no copy of a descriptor is kept, and each walk checks what it reads.

use core::sync::atomic::{Ordering, fence};

use addr::Gpa;

use crate::memory::{Absent, GuestMemory};

/// Maximum number of descriptors of a queue.
pub const QUEUE_SIZE: u16 = 32;

const DESCRIPTOR_BYTES: u64 = 16;
const HEAD_BYTES: u64 = 2;
const USED_BYTES: u64 = 8;
/// Both rings begin with their flags and their index. Behind the ring is a field for notifications by index.
const INDEX: u64 = 2;
const RING: u64 = 4;
const EVENT_BYTES: u64 = 2;

/// Flags of descriptors (2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Flag of the driver area: no notifications, please (2.7.7).
const NO_INTERRUPT: u16 = 1;

/// The driver has violated the protocol, or its rings or buffers are not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl From<Absent> for Broken {
    fn from(_: Absent) -> Self {
        Self
    }
}

/// Where the driver has put a queue (4.2.2), as it said.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) size: u32,
    pub(crate) descriptors: u64,
    pub(crate) driver: u64,
    pub(crate) device: u64,
}

impl Place {
    /// The number of descriptors, if the sizes and addresses are possible (2.7).
    fn checked_size(&self) -> Option<u16> {
        let size = u16::try_from(self.size).ok().filter(|size| *size <= QUEUE_SIZE && size.is_power_of_two())?;
        let entries = u64::from(size);
        let fits =
            |start: u64, align: u64, bytes: u64| start.is_multiple_of(align) && start.checked_add(bytes).is_some();
        let all = fits(self.descriptors, 16, entries * DESCRIPTOR_BYTES)
            && fits(self.driver, 2, RING + entries * HEAD_BYTES + EVENT_BYTES)
            && fits(self.device, 4, RING + entries * USED_BYTES + EVENT_BYTES);
        all.then_some(size)
    }
}

/// A queue. While it is not enabled, its size is 0 and nothing of it is accessed.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) place: Place,
    size: u16,
    next_available: u16,
    next_used: u16,
    /// The chain that was read in part: its head, and how many of its bytes were read.
    reading: Option<(u16, u64)>,
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    gpa: Gpa,
    bytes: u32,
    is_for_writing: bool,
}

/// What was done with the buffers of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Number of bytes.
    pub(crate) bytes: usize,
    /// Whether the driver has got a chain back.
    pub(crate) used: bool,
}

impl Queue {
    /// Whether it is enabled.
    pub(crate) fn is_ready(&self) -> bool {
        self.size != 0
    }

    /// Enables the queue, from its first entries on.
    pub(crate) fn enable(&mut self) -> Result<(), Broken> {
        let size = self.place.checked_size().ok_or(Broken)?;
        *self = Self { place: self.place, size, ..Self::default() };
        Ok(())
    }

    /// Disables the queue.
    pub(crate) fn disable(&mut self) {
        *self = Self { place: self.place, ..Self::default() };
    }

    /// Copies bytes that the driver sends to `into`. Chains that were read to their end are used.
    pub(crate) fn take(&mut self, memory: &impl GuestMemory, into: &mut [u8]) -> Result<Done, Broken> {
        let mut done = Done::default();
        for _ in 0..self.size {
            if done.bytes == into.len() {
                break;
            }
            let (head, skip) = match self.reading.take() {
                Some(reading) => reading,
                None => match self.next(memory)? {
                    Some(head) => (head, 0),
                    None => break,
                },
            };
            let (bytes, is_end) = self.read_chain(memory, head, skip, &mut into[done.bytes..])?;
            done.bytes += bytes;
            if is_end {
                self.give_back(memory, head, 0)?;
                done.used = true;
            } else {
                self.reading = Some((head, skip + bytes as u64));
            }
        }
        Ok(done)
    }

    /// Copies the beginning of the next chain to `into`, and uses the whole chain. `None` if there is no chain.
    pub(crate) fn take_one(&mut self, memory: &impl GuestMemory, into: &mut [u8]) -> Result<Option<usize>, Broken> {
        let Some(head) = self.next(memory)? else { return Ok(None) };
        let (bytes, _) = self.read_chain(memory, head, 0, into)?;
        self.give_back(memory, head, 0)?;
        Ok(Some(bytes))
    }

    /// Uses all chains that are available now, and reads none of them. Returns whether there was one.
    pub(crate) fn discard(&mut self, memory: &impl GuestMemory) -> Result<bool, Broken> {
        let mut used = false;
        for _ in 0..self.size {
            let reading = self.reading.take().map(|(head, _)| head);
            let head = match reading {
                Some(head) => Some(head),
                None => self.next(memory)?,
            };
            let Some(head) = head else { break };
            self.give_back(memory, head, 0)?;
            used = true;
        }
        Ok(used)
    }

    /// Copies bytes for the driver to its buffers, as many as there is room for.
    pub(crate) fn give(&mut self, memory: &impl GuestMemory, bytes: &[u8]) -> Result<Done, Broken> {
        let mut done = Done::default();
        for _ in 0..self.size {
            if done.bytes == bytes.len() {
                break;
            }
            let Some(head) = self.next(memory)? else { break };
            let written = self.write_chain(memory, head, &bytes[done.bytes..])?;
            self.give_back(memory, head, written)?;
            done.bytes += written;
            done.used = true;
        }
        Ok(done)
    }

    /// Copies a message to the next chain. Returns whether there was one. A chain that is too short is the driver's
    /// mistake.
    pub(crate) fn give_one(&mut self, memory: &impl GuestMemory, message: &[u8]) -> Result<bool, Broken> {
        let Some(head) = self.next(memory)? else { return Ok(false) };
        let written = self.write_chain(memory, head, message)?;
        if written < message.len() {
            return Err(Broken);
        }
        self.give_back(memory, head, written)?;
        Ok(true)
    }

    /// Whether the driver wants to be notified of used chains (2.7.7.2). Called after they were given back.
    pub(crate) fn wants_interrupt(&self, memory: &impl GuestMemory) -> Result<bool, Broken> {
        // Otherwise the flag could be read before the driver sees the index, and the driver could look at the index
        // before it clears the flag.
        fence(Ordering::SeqCst);
        Ok(read_u16(memory, self.place.driver)? & NO_INTERRUPT == 0)
    }

    /// The head of the next chain that is available (2.7.13).
    fn next(&mut self, memory: &impl GuestMemory) -> Result<Option<u16>, Broken> {
        if self.size == 0 {
            return Ok(None);
        }
        let waiting = read_u16(memory, self.place.driver + INDEX)?.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        // The driver never has more chains under way than descriptors.
        if waiting > self.size {
            return Err(Broken);
        }
        // The entry is read after the index that announces it.
        fence(Ordering::Acquire);
        let place = u64::from(self.next_available % self.size);
        let head = read_u16(memory, self.place.driver + RING + place * HEAD_BYTES)?;
        if head >= self.size {
            return Err(Broken);
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Gives a chain back to the driver, with this number of bytes written to it (2.7.8).
    fn give_back(&mut self, memory: &impl GuestMemory, head: u16, written: usize) -> Result<(), Broken> {
        let place = u64::from(self.next_used % self.size);
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&u32::try_from(written).map_err(|_| Broken)?.to_le_bytes());
        memory.write(Gpa(self.place.device + RING + place * USED_BYTES), &entry)?;
        self.next_used = self.next_used.wrapping_add(1);
        // The entry and the bytes are there before the index that announces them.
        fence(Ordering::Release);
        memory.write(Gpa(self.place.device + INDEX), &self.next_used.to_le_bytes())?;
        Ok(())
    }

    /// Copies from a chain, without its first `skip` bytes. Returns the number of bytes, and whether these were the
    /// last ones.
    fn read_chain(
        &self,
        memory: &impl GuestMemory,
        head: u16,
        mut skip: u64,
        into: &mut [u8],
    ) -> Result<(usize, bool), Broken> {
        let mut done = 0;
        for buffer in self.chain(memory, head) {
            let Buffer { gpa, bytes, is_for_writing } = buffer?;
            if is_for_writing {
                return Err(Broken);
            }
            if skip >= u64::from(bytes) {
                skip -= u64::from(bytes);
                continue;
            }
            let left = u64::from(bytes) - skip;
            let from = gpa.checked_add(skip).ok_or(Broken)?;
            skip = 0;
            let room = into.len() - done;
            let count = usize::try_from(left).map_or(room, |left| left.min(room));
            memory.read(from, &mut into[done..done + count])?;
            done += count;
            if (count as u64) < left {
                return Ok((done, false));
            }
        }
        Ok((done, true))
    }

    /// Copies to a chain. Returns the number of bytes that it has room for.
    fn write_chain(&self, memory: &impl GuestMemory, head: u16, bytes: &[u8]) -> Result<usize, Broken> {
        let mut done = 0;
        for buffer in self.chain(memory, head) {
            let buffer = buffer?;
            if !buffer.is_for_writing {
                return Err(Broken);
            }
            let left = bytes.len() - done;
            let count = usize::try_from(buffer.bytes).map_or(left, |room| room.min(left));
            if count == 0 && left == 0 {
                break;
            }
            memory.write(buffer.gpa, &bytes[done..done + count])?;
            done += count;
        }
        Ok(done)
    }

    /// The buffers of a chain. It ends after an error, and after as many descriptors as the table has: a longer chain
    /// has a loop (2.7.5.3.1).
    fn chain<M: GuestMemory>(&self, memory: &M, head: u16) -> impl Iterator<Item = Result<Buffer, Broken>> {
        let mut next = Some(head);
        let mut left = self.size;
        core::iter::from_fn(move || {
            let index = next.take()?;
            if left == 0 {
                return Some(Err(Broken));
            }
            left -= 1;
            match self.descriptor(memory, index) {
                Ok((buffer, following)) => {
                    next = following;
                    Some(Ok(buffer))
                }
                Err(broken) => Some(Err(broken)),
            }
        })
    }

    fn descriptor(&self, memory: &impl GuestMemory, index: u16) -> Result<(Buffer, Option<u16>), Broken> {
        if index >= self.size {
            return Err(Broken);
        }
        let mut bytes = [0; 16];
        memory.read(Gpa(self.place.descriptors + u64::from(index) * DESCRIPTOR_BYTES), &mut bytes)?;
        let word = u128::from_le_bytes(bytes);
        let [address, length, flags, next] = [0, 64, 96, 112].map(|shift| word >> shift);
        #[expect(clippy::cast_possible_truncation, reason = "the fields of a descriptor")]
        let (gpa, length, flags, next) = (Gpa(address as u64), length as u32, flags as u16, next as u16);
        // Not offered, so never used (2.7.5.3.1).
        if flags & INDIRECT != 0 {
            return Err(Broken);
        }
        let buffer = Buffer { gpa, bytes: length, is_for_writing: flags & WRITE != 0 };
        Ok((buffer, (flags & NEXT != 0).then_some(next)))
    }
}

fn read_u16(memory: &impl GuestMemory, at: u64) -> Result<u16, Broken> {
    let mut bytes = [0; 2];
    memory.read(Gpa(at), &mut bytes)?;
    Ok(u16::from_le_bytes(bytes))
}
