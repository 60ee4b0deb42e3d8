//! One interface over both designs.
//!
//! The designs belong to different owners (one to a vCPU, one to a VM) and want to know different things before they can
//! answer. So the interface is a view, made for one access out of what is there, and it says what it [needs](Needs): the
//! caller finds out that much, asks, and only if the answer is no does the rest.

use addr::Gpa;

use crate::{
    ByBytes, Bytes, Cause, Decoded, Insertion, Lost, Outcome, Place, Protect, Refusal, Vouching, WriteProtect,
};

/// What remembers decoded instructions for a vCPU.
pub enum DecodeCache<'a, D, P> {
    /// Nothing does.
    Off,
    /// The vCPU's own.
    Bytes(&'a mut ByBytes<D>),
    /// The VM's, and the VM's memory.
    WriteProtect(&'a WriteProtect<D>, &'a P),
}

/// What a caller has to find out before it can ask. Each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// Nothing: the answer is no.
    Nothing,
    /// RIP, address space and mode, all of them registers.
    Registers,
    /// Where the page tables lead: [`Place::gpa`].
    Walk,
    /// The bytes there.
    Bytes,
}

/// What is asked for: as much as the cache [`Needs`]; for an insertion, all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Where the instruction is.
    pub place: Place,
    /// Its bytes and what follows them in the page, or [`Bytes::NONE`].
    pub bytes: Bytes,
}

impl<D: Decoded, P: Protect> DecodeCache<'_, D, P> {
    /// What must be in a [`Lookup`] so that something can be found.
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

    /// The decoded instruction, if it is remembered.
    #[inline]
    #[must_use]
    pub fn find(&self, lookup: &Lookup) -> Option<D> {
        match self {
            Self::Off => None,
            Self::Bytes(cache) => cache.find(lookup.place.mode, &lookup.bytes).copied(),
            Self::WriteProtect(cache, _) => cache.find(&lookup.place),
        }
    }

    /// Remembers an instruction that was carried out. `tables` and `rewalk` are as in [`WriteProtect::insert`].
    pub fn insert(&mut self, lookup: &Lookup, decoded: D, tables: &[Gpa], rewalk: impl FnOnce() -> bool) -> Insertion {
        let alone = |outcome| Insertion { outcome, lost: Lost::default(), flushed: false };
        match self {
            Self::Off => alone(Outcome::Refused(Refusal::Off)),
            Self::Bytes(cache) => alone(cache.insert(lookup.place.mode, &lookup.bytes, decoded)),
            Self::WriteProtect(cache, protect) => {
                cache.insert(&lookup.place, &lookup.bytes, decoded, tables, *protect, rewalk)
            }
        }
    }

    /// Forgets what depends on a page before it is written, as [`WriteProtect::written`] does. `None` where nothing did.
    pub fn written(&self, gpa: Gpa, cause: Cause) -> Option<Lost> {
        match self {
            Self::Off | Self::Bytes(_) => None,
            Self::WriteProtect(cache, protect) => cache.written(gpa, cause, *protect),
        }
    }
}
