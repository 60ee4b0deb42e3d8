//! The pages that are read-only for the guest because cached instructions depend on them.
//!
//! Each page has one possible slot. The slot's *generation* makes dropping cheap: a cached instruction keeps the
//! generation of its registration ([`Ticket`]), and is valid only while the slot has the same one. So one store drops
//! all entries of a page, without a list of them.
//!
//! A slot has a small lock, for registering a page and for dropping it. Lookups read the generation without the lock. A
//! holder of the lock never waits: a vCPU whose instruction is being emulated may need the lock, and a processor that
//! changes stage 2 may wait for that vCPU ([`Protect`]). A page that cannot become writable now stays registered, with
//! a new generation, until the next request.
//!
//! Everything depends on the order in [`evict`](Registry::evict): first the generation, then the right to write.

use alloc::boxed::Box;

use addr::{Gpa, PAGE_BYTES};

use crate::bytes::MULTIPLIER;
use crate::rivals::sync::{AtomicU16, AtomicU64, Mutex, Ordering, fence};
use crate::{DropCause, Lost, Protect, Protection, Refusal, Unprotection};

/// Walks may evict a page this often; then it is not protected any more. A walk needs all its tables writable at once.
/// Otherwise two vCPUs that insert instructions could protect them again and again, and block a third one for ever.
pub const WALK_LIMIT: u16 = 64;

/// Maximum number of slots: a ticket has bits for this many.
pub(crate) const MAX_PAGES: usize = 1 << (64 - GENERATION_BITS);

/// With 52 bits and one eviction per microsecond, the numbers last 142 years.
const GENERATION_BITS: u32 = 52;

/// Instead of a page's number: the slot is empty.
const NOBODY: u64 = u64::MAX;

pub(crate) struct Registry {
    slots: Box<[Slot]>,
    /// How often walks have evicted a page, by a hash of its number. Never reset, so that pages that take turns in a
    /// slot do not escape [`WALK_LIMIT`]. Pages that share a counter reach the limit a little early.
    walks: Box<[AtomicU16]>,
    /// Number of registered pages: zero for ever in most VMs.
    count: AtomicU64,
}

/// On a cache line of its own.
#[repr(align(64))]
struct Slot {
    generation: AtomicU64,
    /// Number of the registered page; written under the lock only.
    page: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of entries that depend on the page, to count what is dropped.
    entries: Lost,
    /// The page is read-only, but there was no flush yet. Another vCPU that finds it registered must know.
    owed: bool,
}

/// A slot and the generation in which a page was registered there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(pub(crate) u64);

/// How a cached instruction depends on a page.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Code,
    Table,
}

impl Ticket {
    /// A ticket that is never current.
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

    /// Whether the two pages cannot be registered at the same time.
    pub(crate) fn collide(&self, one: Gpa, other: Gpa) -> bool {
        number(one) != number(other) && self.index(one) == self.index(other)
    }

    /// Registers a page and makes it read-only. Also returns whether a flush is needed. Adds to `lost` the entries of a
    /// page that had to leave.
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
            // Published before it is read-only, so that a fault finds it here.
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

    /// Records a flush that began after all these tickets were given out.
    pub(crate) fn settle(&self, ticket: Ticket) {
        self.while_current(ticket, |state| state.owed = false);
    }

    /// Whether the page's registration is unchanged.
    #[inline]
    pub(crate) fn is_current(&self, ticket: Ticket) -> bool {
        self.slots.get(ticket.slot()).is_some_and(|slot| slot.generation.load(Ordering::Acquire) == ticket.generation())
    }

    /// Counts an entry that depends on the page; false if the ticket is not current any more.
    pub(crate) fn count(&self, ticket: Ticket, role: Role) -> bool {
        self.while_current(ticket, |state| *part(&mut state.entries, role) += 1)
    }

    /// Reverses `count`.
    pub(crate) fn uncount(&self, ticket: Ticket, role: Role) {
        self.while_current(ticket, |state| {
            let part = part(&mut state.entries, role);
            *part = part.saturating_sub(1);
        });
    }

    /// Whether the page is registered. One load if none ever was.
    #[inline]
    pub(crate) fn covers(&self, gpa: Gpa) -> bool {
        self.count.load(Ordering::Acquire) != 0
            && self.slots[self.index(gpa)].page.load(Ordering::Acquire) == number(gpa)
    }

    /// Drops all entries that depend on the page, then makes it writable if that needs no wait. `None` if it is not
    /// registered.
    pub(crate) fn forget(&self, gpa: Gpa, cause: DropCause, protect: &impl Protect) -> Option<Lost> {
        // Also this question needs the lock: a fault may come here before the vCPU that registered the page has
        // released it.
        let slot = &self.slots[self.index(gpa)];
        let mut state = slot.state.lock();
        if slot.page.load(Ordering::Relaxed) != number(gpa) {
            return None;
        }
        let (lost, unprotection) = self.evict(slot, &mut state, protect);
        // A walk that still finds the page read-only is counted when it comes back.
        if cause == DropCause::Walk && unprotection == Unprotection::Done {
            let walks = &self.walks[self.walks_index(gpa)];
            // Never above the limit: the counter must not overflow.
            if walks.load(Ordering::Relaxed) <= WALK_LIMIT {
                walks.fetch_add(1, Ordering::Relaxed);
            }
        }
        Some(lost)
    }

    /// The caller holds the lock. All entries of the slot become void before the first write can happen.
    fn evict(&self, slot: &Slot, state: &mut State, protect: &impl Protect) -> (Lost, Unprotection) {
        let page = slot.page.load(Ordering::Relaxed);
        slot.generation.store(slot.generation.load(Ordering::Relaxed) + 1, Ordering::Release);
        // Both earlier and later accesses must keep their side of the store.
        fence(Ordering::SeqCst);
        let entries = core::mem::take(&mut state.entries);
        let unprotection = protect.unprotect(Gpa(page * PAGE_BYTES));

        if unprotection == Unprotection::Done {
            state.owed = false;
            // Last: a processor that does not find the page here finds it writable.
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

    /// By the low bits of the number, so that adjacent pages do not collide: code and page tables both come in runs.
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
