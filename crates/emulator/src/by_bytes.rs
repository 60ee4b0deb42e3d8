//! The caches of one vCPU: sites that access devices, and the meaning of bytes. No entry can be stale.

use decode_cache::{ByBytes, Bytes, InsertOutcome};
use x86_emulate::{Cpu, Device, Emulation, Memory, Outcome, Sites, Window};

use crate::{Count, Decoded, Event, mode, uncached};

/// A vCPU's caches of its instructions. The CPU that runs the vCPU writes them often, so keep them apart from other
/// vCPUs' data.
pub struct InstructionCaches<M: Memory> {
    /// Places that access devices.
    sites: Sites<M>,
    /// The meaning of bytes, at any address.
    bytes: ByBytes<Decoded>,
}

impl<M: Memory> InstructionCaches<M> {
    /// Empty caches.
    #[must_use]
    pub fn new() -> Self {
        Self { sites: Sites::new(), bytes: ByBytes::new() }
    }
}

impl<M: Memory> Default for InstructionCaches<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// Executes the instruction at RIP: by its site, else by its bytes, else by decoding.
#[inline(always)]
pub(crate) fn emulate<C: Cpu, M: Memory, D: Device>(
    emulation: &mut Emulation<'_, C, M, D>,
    caches: &mut InstructionCaches<M>,
    given: &[u8],
    count: impl Count,
) -> Outcome {
    match emulation.repeat(&caches.sites) {
        Some(outcome) => {
            count.add(Event::Repeated, 1);
            outcome
        }
        None => by_bytes_or_decode(emulation, caches, given, count),
    }
}

/// The same from a site that is not cached.
#[inline(never)]
fn by_bytes_or_decode<C: Cpu, M: Memory, D: Device>(
    emulation: &mut Emulation<'_, C, M, D>,
    caches: &mut InstructionCaches<M>,
    given: &[u8],
    count: impl Count,
) -> Outcome {
    let window = match given {
        [] => match emulation.fetch() {
            Ok(fetched) => fetched.window,
            Err(outcome) => return outcome,
        },
        given => Window::of(given),
    };
    let bytes = Bytes::from_zero_padded(window.words(), window.length());
    let mode = mode(emulation);
    let InstructionCaches { sites, bytes: cache } = caches;
    if let Some(Decoded(instruction)) = cache.find(mode, &bytes) {
        count.add(Event::Found, 1);
        // If this is not the first time, the walk to the operand is cached by now, and the site can be cached.
        emulation.cache_site(sites, &window, instruction);
        return emulation.execute(instruction);
    }

    count.add(Event::Missed, 1);
    // Decode the cached key's own bytes: memory may hold other bytes by now.
    let Ok(instruction) = x86_emulate::decode(emulation.mode(), &window.to_bytes()[..usize::from(window.length())])
    else {
        return uncached(emulation, &[]);
    };
    match cache.insert(mode, &bytes, Decoded(instruction)) {
        InsertOutcome::Stored => count.add(Event::Inserted, 1),
        InsertOutcome::Replaced => {
            count.add(Event::Inserted, 1);
            count.add(Event::Replaced, 1);
        }
        InsertOutcome::Refused(_) => {}
    }
    emulation.execute(&instruction)
}
