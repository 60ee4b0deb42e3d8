//! [`Scheme::Generation`](crate::Scheme::Generation): tags round robin, and a flush of everything when none is left. It
//! is kept to be measured beside epochs.
//!
//! An entry compares the generation whatever the scheme is, so it does not ask which scheme it is. With other schemes
//! there is only the first generation. (The scheme that flushes always has no code of its own: no entry is current.)

use crate::cpu::CpuTags;
use crate::seen::Seen;
use crate::tag::{Tag, TagRange};
use crate::vcpu::{Flush, GuestEntry, VOID, VcpuTags};

/// For [`Scheme::Generation`](crate::Scheme::Generation); with other schemes there is only the first generation.
#[derive(Debug)]
pub(crate) struct Generations {
    /// The current generation if no flush is due; otherwise [`NONE`], which no vCPU has. One word, so that an entry
    /// compares one.
    pub(crate) valid: u64,
    /// The current generation. 64 bits never overflow.
    current: u64,
    /// Index of the next tag to assign.
    next: u32,
    /// The epoch that last made this pCPU begin a new generation.
    epoch: Seen,
}

/// The first generation of a pCPU.
pub(crate) const FIRST_GENERATION: u64 = 1;
/// No vCPU's tag is of this generation.
const NONE: u64 = u64::MAX;

impl Generations {
    pub(crate) fn new() -> Self {
        Self { valid: FIRST_GENERATION, current: FIRST_GENERATION, next: 0, epoch: Seen::VOID }
    }

    /// The current generation.
    pub(crate) fn current(&self) -> u64 {
        self.current
    }

    /// Whether a new generation has begun, and no entry has flushed since. The debt belongs to the pCPU: the next entry
    /// flushes.
    pub(crate) fn owes_flush(&self) -> bool {
        self.valid == NONE
    }

    /// An entry has flushed everything.
    pub(crate) fn flushed(&mut self) {
        self.valid = self.current;
    }

    /// Assigns the next tag, in a new generation if none is left. Also returns whether one began.
    pub(crate) fn assign(&mut self, range: TagRange) -> (Tag, bool) {
        let begins = self.next >= range.count();
        if begins {
            self.current += 1;
            self.next = 0;
        }
        let index = self.next;
        self.next += 1;
        // In the last generation the first tag had another owner, and so had all that follow. So everything is flushed
        // once, before any of them is used. (Flushing this one tag is not enough: Xen's mistake from 2019 to 2025.)
        if index == 0 {
            self.valid = NONE;
        } else if !self.owes_flush() {
            self.valid = self.current;
        }
        (range.at(index), begins)
    }

    /// All TLB entries of some VM became void. The VM's tags are not known here, so all tags of the pCPU become void,
    /// whatever VM they belong to.
    pub(crate) fn meet_epoch(&mut self, epoch: Seen) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.current += 1;
            if !self.owes_flush() {
                self.valid = self.current;
            }
        }
    }
}

impl VcpuTags {
    #[cold]
    pub(crate) fn enter_generation<'a>(&'a mut self, cpu: &'a mut CpuTags, seen: Seen) -> GuestEntry<'a> {
        if self.seen != seen {
            if self.seen != Seen::VOID {
                cpu.generations.meet_epoch(seen);
            }
            self.seen = seen;
            self.generation = VOID;
        }
        let assigned = self.generation != cpu.generations.current();
        let mut new_generation = false;
        if assigned {
            (self.tag, new_generation) = cpu.generations.assign(cpu.range);
            self.generation = cpu.generations.current();
            cpu.counts.assignments += 1;
            cpu.counts.generations += u64::from(new_generation);
        }
        let flush = if cpu.generations.owes_flush() { Flush::Everything } else { Flush::Nothing };
        GuestEntry { vcpu: self, cpu, seen, flush, assigned, new_generation }
    }
}
