//! Caches walks of the guest's page tables.
//!
//! A walk is a function of the entries that it reads and of a few bits of the vCPU's state. It can be skipped while all
//! of these are unchanged. So a lookup only compares up to five entries at known places, instead of finding the places
//! and evaluating the entries. Nothing is invalidated and nothing can be stale: if any bit of an entry has changed, the
//! walk is done again.

use crate::cpu::{ACCESS_SHIFT, Regime};
use crate::walk::{Access, Stop, walk};
use crate::{Cpu, Memory};
use addr::{Gpa, PageSize};

/// Maximum number of entries of one walk.
pub(crate) const LEVELS: usize = 5;

/// Number of cached walks.
const SLOTS: usize = 8;

/// A vCPU's cache of walks.
pub struct Walks<M: Memory> {
    slots: [Walk<M>; SLOTS],
    remembers: bool,
    /// Number of walks done.
    done: u64,
}

/// A translated address.
pub(crate) struct Found<M: Memory> {
    /// The guest physical address.
    pub(crate) gpa: Gpa,
    /// The first word of its page, if that is memory.
    pub(crate) page: Option<M::Word>,
}

/// A walk, and all of its inputs.
pub(crate) struct Walk<M: Memory> {
    key: Key,
    /// The entries, with their values, from the root on.
    pub(crate) steps: Steps<M>,
    /// First byte of the 4 KiB page.
    pub(crate) gpa: Gpa,
    /// The first word of the page, if that is memory.
    pub(crate) page: Option<M::Word>,
}

/// The entries that a walk has read.
pub(crate) struct Steps<M: Memory> {
    steps: [Step<M>; LEVELS],
    count: usize,
}

/// A 64-bit word with one page-table entry, or two.
pub(crate) struct Step<M: Memory> {
    pub(crate) word: M::Word,
    pub(crate) value: u64,
}

impl<M: Memory> Clone for Steps<M> {
    fn clone(&self) -> Self {
        let mut steps = Self::none();
        for step in self.steps.iter().take(self.count) {
            steps.push(Step { word: step.word, value: step.value });
        }
        steps
    }
}

impl<M: Memory> Steps<M> {
    pub(crate) fn none() -> Self {
        Self { steps: core::array::from_fn(|_| Step { word: M::Word::default(), value: 0 }), count: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// Adds a step; there are never more than [`LEVELS`].
    pub(crate) fn push(&mut self, step: Step<M>) {
        if let Some(slot) = self.steps.get_mut(self.count) {
            *slot = step;
            self.count += 1;
        }
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Step<M>> {
        self.steps.iter_mut().take(self.count)
    }

    /// Whether every entry is unchanged.
    #[inline(always)]
    pub(crate) fn are_current(&self, memory: &M) -> bool {
        memory.have_values(self.steps[..self.count.min(LEVELS)].iter().map(|step| (step.word, step.value)))
    }
}

/// The inputs of a walk besides page-table entries.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    linear_page: u64,
    root: u64,
    regime: u64,
}

impl Key {
    /// Matches no walk: no page has this number.
    const NONE: Self = Self { linear_page: u64::MAX, root: 0, regime: 0 };

    #[inline(always)]
    fn of(cpu: &impl Cpu, regime: &Regime, linear: u64, access: Access) -> Self {
        let regime = regime.walks | (access as u64) << ACCESS_SHIFT;
        Self { linear_page: linear >> 12, root: cpu.cr3(), regime }
    }
}

impl<M: Memory> Walks<M> {
    /// Nothing is cached yet.
    #[must_use]
    pub fn new() -> Self {
        let none = || Walk { key: Key::NONE, steps: Steps::none(), gpa: Gpa(0), page: None };
        Self { slots: core::array::from_fn(|_| none()), remembers: true, done: 0 }
    }

    /// Never caches anything.
    #[must_use]
    pub fn forgetful() -> Self {
        Self { remembers: false, ..Self::new() }
    }

    /// Number of walks done since the last [`take_done`](Self::take_done), without those that the cache replaced.
    #[inline]
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done
    }

    /// The same number, which begins anew.
    pub fn take_done(&mut self) -> u64 {
        core::mem::take(&mut self.done)
    }

    /// Translates `linear`, a canonical guest virtual address, for an access at the vCPU's privilege.
    #[inline(always)]
    pub(crate) fn find(
        &mut self,
        cpu: &impl Cpu,
        regime: &Regime,
        memory: &M,
        linear: u64,
        access: Access,
    ) -> Result<Found<M>, Stop> {
        let key = Key::of(cpu, regime, linear, access);
        let slot = slot_of(key.linear_page, access);
        let walk = &self.slots[slot];
        if walk.key != key || !walk.steps.are_current(memory) || !memory.is_current(walk.page) {
            self.walk(cpu, memory, linear, access, (slot, key))?;
        }
        let Walk { gpa, page, .. } = self.slots[slot];
        Ok(Found { gpa: Gpa(gpa.0 | linear & 0xfff), page })
    }

    /// The cached walk for an access, if its entries are unchanged.
    pub(crate) fn remembered(
        &self,
        cpu: &impl Cpu,
        regime: &Regime,
        memory: &M,
        linear: u64,
        access: Access,
    ) -> Option<&Walk<M>> {
        let key = Key::of(cpu, regime, linear, access);
        let walk = &self.slots[slot_of(key.linear_page, access)];
        (walk.key == key && walk.steps.are_current(memory)).then_some(walk)
    }

    /// Walks, and caches the walk.
    #[cold]
    #[inline(never)]
    fn walk(
        &mut self,
        cpu: &impl Cpu,
        memory: &M,
        linear: u64,
        access: Access,
        (slot, key): (usize, Key),
    ) -> Result<(), Stop> {
        self.done += 1;
        let slot = &mut self.slots[slot];
        slot.key = Key::NONE;
        slot.gpa = walk(cpu, memory, linear, access, &mut slot.steps)?;
        slot.page = memory.find(slot.gpa);
        if self.remembers {
            slot.key = key;
        }
        Ok(())
    }
}

/// Code has half of the slots. In the other half, reads and writes of one page are different walks.
#[inline]
fn slot_of(linear_page: u64, access: Access) -> usize {
    const HALF: usize = SLOTS / 2;
    #[expect(clippy::cast_possible_truncation, reason = "takes the lowest bits")]
    let page = linear_page as usize;
    match access {
        Access::Execute => page % HALF,
        Access::Read => HALF + page % HALF,
        Access::Write => HALF + (page + 1) % HALF,
    }
}

impl<M: Memory> Default for Walks<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// Translates `linear`, a canonical guest virtual address, for an access at the vCPU's privilege.
///
/// # Errors
/// Why the address has no translation.
pub fn translate<M: Memory>(
    cpu: &impl Cpu,
    memory: &M,
    walks: &mut Walks<M>,
    linear: u64,
    access: Access,
) -> Result<Gpa, Stop> {
    walks.find(cpu, &Regime::of(cpu), memory, linear, access).map(|found| found.gpa)
}

/// A GPA's 4 KiB page.
pub(crate) fn page_of(gpa: Gpa) -> Gpa {
    gpa.page(PageSize::Size4K)
}
