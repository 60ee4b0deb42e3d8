//! The caches of one vCPU: sites that access devices, and the meaning of bytes. No entry can be stale.

use decode_cache::{ByBytes, Bytes, Outcome as Inserted};
use x86_emulate::{Cpu, Device, Emulation, Memory, Outcome, Sites, Window};

use crate::{Count, Decoded, Event, anew, mode};

/// A vCPU's caches of its instructions. The CPU that runs the vCPU writes them often, so keep them apart from other
/// vCPUs' data.
pub struct Known<M: Memory> {
    /// Places that access devices.
    sites: Sites<M>,
    /// The meaning of bytes, at any address.
    bytes: ByBytes<Decoded>,
}

impl<M: Memory> Known<M> {
    /// Empty caches.
    #[must_use]
    pub fn new() -> Self {
        Self { sites: Sites::new(), bytes: ByBytes::new() }
    }
}

impl<M: Memory> Default for Known<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// Executes the instruction at RIP: by its site, else by its bytes, else by decoding.
#[inline(always)]
pub(crate) fn carry_out<C: Cpu, M: Memory, D: Device>(
    this: &mut Emulation<'_, C, M, D>,
    known: &mut Known<M>,
    given: &[u8],
    count: impl Count,
) -> Outcome {
    match this.repeat(&known.sites) {
        Some(outcome) => {
            count.add(Event::Repeated, 1);
            outcome
        }
        None => elsewhere(this, known, given, count),
    }
}

/// The same from a site that is not cached.
#[inline(never)]
fn elsewhere<C: Cpu, M: Memory, D: Device>(
    this: &mut Emulation<'_, C, M, D>,
    known: &mut Known<M>,
    given: &[u8],
    count: impl Count,
) -> Outcome {
    let window = match given {
        [] => match this.fetch() {
            Ok(fetched) => fetched.window,
            Err(outcome) => return outcome,
        },
        given => Window::of(given),
    };
    let bytes = Bytes::from_zero_padded(window.words(), window.length());
    let mode = mode(this);
    let Known { sites, bytes: cache } = known;
    if let Some(Decoded(instruction)) = cache.find(mode, &bytes) {
        count.add(Event::Found, 1);
        // If this is not the first time, the walk to the operand is cached by now, and the site can be cached.
        this.learn(sites, &window, instruction);
        return this.execute(instruction);
    }

    count.add(Event::Missed, 1);
    // Decode the cached key's own bytes: memory may hold other bytes by now.
    let Ok(instruction) = x86_emulate::decode(this.mode(), &window.to_bytes()[..usize::from(window.length())]) else {
        return anew(this, &[]);
    };
    match cache.insert(mode, &bytes, Decoded(instruction)) {
        Inserted::Stored => count.add(Event::Inserted, 1),
        Inserted::Replaced => {
            count.add(Event::Inserted, 1);
            count.add(Event::Replaced, 1);
        }
        Inserted::Refused(_) => {}
    }
    this.execute(&instruction)
}
