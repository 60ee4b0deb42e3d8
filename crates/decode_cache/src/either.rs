//! One interface for both designs.
//!
//! The designs have different owners (a vCPU, a VM) and need different inputs for a lookup. So the interface is a view
//! for one access, and says what it [needs](Needs). The caller finds out that much and asks; it finds out the rest only
//! after a miss.

use addr::Gpa;

use crate::{
    ByBytes, Bytes, Decoded, DropCause, InsertOutcome, Insertion, Lost, Place, Protect, Refusal, Vouching, WriteProtect,
};

/// The cache that a vCPU uses for decoded instructions.
pub enum DecodeCache<'a, D, P> {
    /// No cache.
    Off,
    /// The vCPU's own.
    Bytes(&'a mut ByBytes<D>),
    /// The VM's, with the VM's memory.
    WriteProtect(&'a WriteProtect<D>, &'a P),
}

/// What a caller must find out before a lookup. Each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// Nothing: there is no cache.
    Nothing,
    /// RIP, address space and mode, all of them registers.
    Registers,
    /// The result of the page walk: [`Place::gpa`].
    Walk,
    /// The bytes there.
    Bytes,
}

/// The key: as much as the cache [`Needs`]; for an insertion, all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Place of the instruction.
    pub place: Place,
    /// Its bytes and the following ones in the page, or [`Bytes::NONE`].
    pub bytes: Bytes,
}

impl<D: Decoded, P: Protect> DecodeCache<'_, D, P> {
    /// What a [`Lookup`] must contain for a hit.
    #[inline]
    #[must_use]
    pub fn needs(&self) -> Needs {
        match self {
            Self::Off => Needs::Nothing,
            Self::Bytes(_) => Needs::Bytes,
            Self::WriteProtect(cache, _) => match cache.vouching() {
                Vouching::Walk => Needs::Walk,
                Vouching::Tables => Needs::Registers,
            },
        }
    }

    /// The decoded instruction, if it is cached.
    #[inline]
    #[must_use]
    pub fn find(&self, lookup: &Lookup) -> Option<D> {
        match self {
            Self::Off => None,
            Self::Bytes(cache) => cache.find(lookup.place.mode, &lookup.bytes).copied(),
            Self::WriteProtect(cache, _) => cache.find(&lookup.place),
        }
    }

    /// Caches an instruction that was executed. `tables` and `rewalk` are those of [`WriteProtect::insert`].
    pub fn insert(&mut self, lookup: &Lookup, decoded: D, tables: &[Gpa], rewalk: impl FnOnce() -> bool) -> Insertion {
        let alone = |outcome| Insertion { outcome, lost: Lost::default(), flushed: false };
        match self {
            Self::Off => alone(InsertOutcome::Refused(Refusal::Off)),
            Self::Bytes(cache) => alone(cache.insert(lookup.place.mode, &lookup.bytes, decoded)),
            Self::WriteProtect(cache, protect) => {
                cache.insert(&lookup.place, &lookup.bytes, decoded, tables, *protect, rewalk)
            }
        }
    }

    /// Drops entries that depend on a page before it is written, like [`WriteProtect::written`]. `None` if there were
    /// none.
    pub fn written(&self, gpa: Gpa, cause: DropCause) -> Option<Lost> {
        match self {
            Self::Off | Self::Bytes(_) => None,
            Self::WriteProtect(cache, protect) => cache.written(gpa, cause, *protect),
        }
    }
}
