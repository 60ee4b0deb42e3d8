//! The pages that are read-only for the guest because remembered instructions depend on them.
//!
//! A page has one slot that it may be in. The slot's *generation* is what makes forgetting cheap: a remembered instruction
//! keeps the generation that it was registered under ([`Ticket`]) and is worth something only while it is the slot's. So
//! one store forgets all that depends on a page, however much that is, and nobody needs to know what.
//!
//! A slot has a small lock, for whoever registers a page or forgets it. Lookups read the generation without it. Who holds it
//! waits for nobody: a vCPU whose instruction is being carried out may come for the lock, and whoever changes stage 2 may wait
//! for that vCPU ([`Protect`]). A page that cannot become writable at the moment stays registered, with a new generation, until
//! the next one asks.
//!
//! The order that all depends on, in [`evict`](Registry::evict): the generation first, then the right to write.

use alloc::boxed::Box;

use addr::{Gpa, PAGE_BYTES};

use crate::bytes::MULTIPLIER;
use crate::sync::{AtomicU16, AtomicU64, Mutex, Ordering, fence};
use crate::{Cause, Lost, Protect, Protection, Refusal, Unprotection};

/// How often walks may evict a page before it is not protected any more. A walk needs all its tables writable at once: were
/// they protected again and again, two vCPUs that remember instructions could keep a third one from ever getting through.
pub const WALK_LIMIT: u16 = 64;

/// Most slots there can be: what a ticket has bits for.
pub(crate) const MAX_PAGES: usize = 1 << (64 - GENERATION_BITS);

/// Of 52 bits, one eviction per microsecond uses up the last after 142 years.
const GENERATION_BITS: u32 = 52;

/// In place of a page's number.
const NOBODY: u64 = u64::MAX;

pub(crate) struct Registry {
    slots: Box<[Slot]>,
    /// How often walks have evicted a page, by a hash of its number. Never forgotten, so that pages which take turns in a
    /// slot do not escape [`WALK_LIMIT`]; pages that share a count are given up a little early.
    walks: Box<[AtomicU16]>,
    /// How many pages are registered: most VMs never have one.
    count: AtomicU64,
}

/// On a cache line of its own.
#[repr(align(64))]
struct Slot {
    generation: AtomicU64,
    /// Number of the page that is registered here; written under the lock only.
    page: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What depends on the page, for the count of what is lost.
    entries: Lost,
    /// It is read-only, but nobody has flushed since. Also for the one who finds it registered by another.
    owed: bool,
}

/// A slot and the generation that a page was registered there under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(pub(crate) u64);

/// How a remembered instruction depends on a page.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Code,
    Table,
}

impl Ticket {
    /// One that is never current.
    pub(crate) const VOID: Self = Self(u64::MAX);

    fn new(slot: usize, generation: u64) -> Self {
        Self((slot as u64) << GENERATION_BITS | generation)
    }

    fn slot(self) -> usize {
        (self.0 >> GENERATION_BITS) as usize
    }

    fn generation(self) -> u64 {
        self.0 & ((1 << GENERATION_BITS) - 1)
    }
}

impl Registry {
    pub(crate) fn new(pages: usize) -> Self {
        let slot = |_| Slot {
            generation: AtomicU64::new(0),
            page: AtomicU64::new(NOBODY),
            state: Mutex::new(State::default()),
        };
        Self {
            slots: (0..pages).map(slot).collect(),
            walks: (0..pages * 8).map(|_| AtomicU16::new(0)).collect(),
            count: AtomicU64::new(0),
        }
    }

    /// Whether the two pages cannot be registered at once.
    pub(crate) fn collide(&self, one: Gpa, other: Gpa) -> bool {
        number(one) != number(other) && self.index(one) == self.index(other)
    }

    /// Registers a page and makes it read-only. Says also whether a flush is owed, and adds what another page took with it
    /// that had to leave to `lost`.
    pub(crate) fn register(
        &self,
        page: Gpa,
        protect: &impl Protect,
        lost: &mut Lost,
    ) -> Result<(Ticket, bool), Refusal> {
        if self.walks[self.walks_index(page)].load(Ordering::Relaxed) > WALK_LIMIT {
            return Err(Refusal::Walked);
        }
        let index = self.index(page);
        let slot = &self.slots[index];
        let mut state = slot.state.lock();

        let held = slot.page.load(Ordering::Relaxed);
        if held != number(page) {
            if held != NOBODY {
                let (more, unprotection) = self.evict(slot, &mut state, protect);
                lost.code += more.code;
                lost.tables += more.tables;
                if unprotection == Unprotection::Busy {
                    return Err(Refusal::Busy);
                }
            }
            // Told before it is read-only, so that whoever faults finds it here.
            slot.page.store(number(page), Ordering::Release);
            self.count.fetch_add(1, Ordering::Release);
            match protect.protect(page.page(addr::PageSize::Size4K)) {
                Protection::Owed => state.owed = true,
                Protection::Already => state.owed = false,
                failure @ (Protection::Refused | Protection::Busy) => {
                    slot.page.store(NOBODY, Ordering::Release);
                    self.count.fetch_sub(1, Ordering::Release);
                    let is_busy = failure == Protection::Busy;
                    return Err(if is_busy { Refusal::Busy } else { Refusal::Unprotected });
                }
            }
        }
        Ok((Ticket::new(index, slot.generation.load(Ordering::Relaxed)), state.owed))
    }

    /// After a flush that began after all these tickets were given out.
    pub(crate) fn settle(&self, ticket: Ticket) {
        self.while_current(ticket, |state| state.owed = false);
    }

    /// Whether the page is still registered as it was.
    #[inline]
    pub(crate) fn is_current(&self, ticket: Ticket) -> bool {
        self.slots.get(ticket.slot()).is_some_and(|slot| slot.generation.load(Ordering::Acquire) == ticket.generation())
    }

    /// Counts an entry that depends on the page; false if it no longer can.
    pub(crate) fn count(&self, ticket: Ticket, role: Role) -> bool {
        self.while_current(ticket, |state| *part(&mut state.entries, role) += 1)
    }

    /// Takes it back.
    pub(crate) fn uncount(&self, ticket: Ticket, role: Role) {
        self.while_current(ticket, |state| {
            let part = part(&mut state.entries, role);
            *part = part.saturating_sub(1);
        });
    }

    /// Whether the page is registered. One load where none ever was.
    #[inline]
    pub(crate) fn covers(&self, gpa: Gpa) -> bool {
        self.count.load(Ordering::Acquire) != 0
            && self.slots[self.index(gpa)].page.load(Ordering::Acquire) == number(gpa)
    }

    /// Forgets all that depends on the page, then makes it writable if that can be done without waiting. `None` if it is not
    /// registered.
    pub(crate) fn forget(&self, gpa: Gpa, cause: Cause, protect: &impl Protect) -> Option<Lost> {
        // Under the lock also the question whether it is registered: a fault may be here before the one who caused it by
        // registering the page has let go of it.
        let slot = &self.slots[self.index(gpa)];
        let mut state = slot.state.lock();
        if slot.page.load(Ordering::Relaxed) != number(gpa) {
            return None;
        }
        let (lost, unprotection) = self.evict(slot, &mut state, protect);
        // The walk that finds the page read-only still is counted when it comes back.
        if cause == Cause::Walk && unprotection == Unprotection::Done {
            let walks = &self.walks[self.walks_index(gpa)];
            // Not beyond the limit, whatever happens: the count must not come round.
            if walks.load(Ordering::Relaxed) <= WALK_LIMIT {
                walks.fetch_add(1, Ordering::Relaxed);
            }
        }
        Some(lost)
    }

    /// The lock is held. What is registered here becomes void before the first write can happen.
    fn evict(&self, slot: &Slot, state: &mut State, protect: &impl Protect) -> (Lost, Unprotection) {
        let page = slot.page.load(Ordering::Relaxed);
        slot.generation.store(slot.generation.load(Ordering::Relaxed) + 1, Ordering::Release);
        // Not only what came before the store, also what comes after it must keep its side.
        fence(Ordering::SeqCst);
        let entries = core::mem::take(&mut state.entries);
        let unprotection = protect.unprotect(Gpa(page * PAGE_BYTES));

        if unprotection == Unprotection::Done {
            state.owed = false;
            // Last, so that who does not find the page here finds it writable.
            slot.page.store(NOBODY, Ordering::Release);
            self.count.fetch_sub(1, Ordering::Release);
        }
        (entries, unprotection)
    }

    fn while_current(&self, ticket: Ticket, then: impl FnOnce(&mut State)) -> bool {
        let Some(slot) = self.slots.get(ticket.slot()) else { return false };
        let mut state = slot.state.lock();
        let current = slot.generation.load(Ordering::Relaxed) == ticket.generation();
        if current {
            then(&mut state);
        }
        current
    }

    /// By the low bits of the number, so that neighbours do not collide: code and page tables both come in runs.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
    fn index(&self, gpa: Gpa) -> usize {
        number(gpa) as usize & (self.slots.len() - 1)
    }

    fn walks_index(&self, gpa: Gpa) -> usize {
        (number(gpa).wrapping_mul(MULTIPLIER) >> 32) as usize & (self.walks.len() - 1)
    }
}

fn number(gpa: Gpa) -> u64 {
    gpa.0 / PAGE_BYTES
}

fn part(lost: &mut Lost, role: Role) -> &mut u32 {
    match role {
        Role::Code => &mut lost.code,
        Role::Table => &mut lost.tables,
    }
}
