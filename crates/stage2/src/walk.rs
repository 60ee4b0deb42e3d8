//! The right to walk a tree's tables, and what each walk needs. The steps of a walk are in `fault.rs`.
//!
//! [Collapsing](WalkMut::collapse) frees tables while other processors may use them. So a caller walks only with a
//! proof that no table which it can find is freed:
//!
//! - a [`Walking`]: the caller has announced itself, and a table is freed only after it has left;
//! - the [`Shape`]: only its holder collapses.
//!
//! A [`Walk`] borrows the proof for its whole life. It also names once what every operation needs: the tree, the pool
//! of its tables, and the TLBs. This is how a processor walks that handles a fault:
//!
//! ```
//! # use {addr::Gpa, stage2::*};
//! # fn handle<F: Format>(tree: &Tree<F>, pool: &impl Pages, tlbs: &impl Tlb, epochs: &Epochs<[Walker; 1]>) -> Option<()> {
//! let walking = epochs.enter(0)?;
//! let walk = tree.walk(pool, tlbs, &walking);
//! let found = walk.lookup(Gpa(0x1000));
//! drop(walking);
//! # Some(drop(found)) }
//! ```
//!
//! A walk cannot outlive the announcement:
//!
//! ```compile_fail,E0505
//! # use {addr::Gpa, stage2::*};
//! # fn handle<F: Format>(tree: &Tree<F>, pool: &impl Pages, tlbs: &impl Tlb, epochs: &Epochs<[Walker; 1]>) -> Option<()> {
//! let walking = epochs.enter(0)?;
//! let walk = tree.walk(pool, tlbs, &walking);
//! drop(walking);
//! let found = walk.lookup(Gpa(0x1000));
//! # Some(drop(found)) }
//! ```
//!
//! A caller without an announcement has no walk, and a tree alone finds nothing:
//!
//! ```compile_fail,E0061
//! # use {addr::Gpa, stage2::*};
//! # fn handle<F: Format>(tree: &Tree<F>, pool: &impl Pages, tlbs: &impl Tlb, epochs: &Epochs<[Walker; 1]>) -> Option<()> {
//! let walk = tree.walk(pool, tlbs);
//! let found = walk.lookup(Gpa(0x1000));
//! # Some(drop(found)) }
//! ```
//!
//! ```compile_fail,E0599
//! # use {addr::Gpa, stage2::*};
//! # fn handle<F: Format>(tree: &Tree<F>, pool: &impl Pages, tlbs: &impl Tlb, epochs: &Epochs<[Walker; 1]>) -> Option<()> {
//! let found = tree.lookup(Gpa(0x1000));
//! # Some(drop(found)) }
//! ```

use crate::{Format, Leaf, PageTableEntry, Pages, Shape, Tlb, Tree, Walking};
use addr::Gpa;
use core::marker::PhantomData;

/// Proves, while it is borrowed, that no table which a walk can find is freed.
///
/// A [`Walking`] must belong to the walkers that [`WalkMut::collapse`] and [`Limbo::reclaim`](crate::Limbo::reclaim)
/// get for this tree, and a [`Shape`] to this tree.
pub trait WalkProof: sealed::Sealed {}

impl WalkProof for Walking<'_> {}
impl WalkProof for Shape {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::Walking<'_> {}
    impl Sealed for crate::Shape {}
}

/// A way through the tables of one tree, in one pool, of a guest that these TLBs may remember.
///
/// Copies of it, and other walks, may work at the same time. Walks handle [faults](Self::fault), change single pages,
/// and keep dirty logs. To map and unmap takes a [`WalkMut`].
#[derive(Debug)]
pub struct Walk<'a, F, P, T> {
    pub(crate) tree: &'a Tree<F>,
    pub(crate) pages: &'a P,
    pub(crate) tlb: &'a T,
}

/// A walk by the holder of the [`Shape`], which maps, unmaps and collapses.
#[derive(Debug)]
pub struct WalkMut<'a, F, P, T> {
    tree: &'a Tree<F>,
    pages: &'a P,
    tlb: &'a T,
    shape: PhantomData<&'a mut Shape>,
}

impl<F: Format> Tree<F> {
    /// Walks the tree while `proof` is borrowed.
    #[inline(always)]
    #[must_use]
    pub fn walk<'a, P: Pages, T: Tlb>(
        &'a self,
        pages: &'a P,
        tlb: &'a T,
        proof: &'a impl WalkProof,
    ) -> Walk<'a, F, P, T> {
        let _ = proof;
        Walk { tree: self, pages, tlb }
    }

    /// Walks the tree, with the right to change its shape.
    #[inline(always)]
    #[must_use]
    pub fn walk_mut<'a, P: Pages, T: Tlb>(
        &'a self,
        pages: &'a P,
        tlb: &'a T,
        shape: &'a mut Shape,
    ) -> WalkMut<'a, F, P, T> {
        let _ = shape;
        WalkMut { tree: self, pages, tlb, shape: PhantomData }
    }
}

impl<F, P, T> Clone for Walk<'_, F, P, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F, P, T> Copy for Walk<'_, F, P, T> {}

impl<'a, F: Format, P: Pages, T: Tlb> WalkMut<'a, F, P, T> {
    pub(crate) fn format(&self) -> &'a F {
        &self.tree.format
    }

    /// A walk that does not change the shape. Its proof is that only this caller could.
    #[inline(always)]
    #[must_use]
    pub fn walk(&self) -> Walk<'_, F, P, T> {
        Walk { tree: self.tree, pages: self.pages, tlb: self.tlb }
    }
}

impl<'a, F, P, T> Walk<'a, F, P, T> {
    #[inline(always)]
    pub(crate) fn format(self) -> &'a F {
        &self.tree.format
    }

    /// Does rare work in a call of its own, so that the common path keeps the parts of the walk in registers. To pass a
    /// walk as a whole would store it first, on each path.
    #[inline(always)]
    pub(crate) fn apart<R>(self, does: impl FnOnce(Self) -> R) -> R {
        #[inline(never)]
        fn call<'a, F, P, T, R>(
            tree: &'a Tree<F>,
            pages: &'a P,
            tlb: &'a T,
            does: impl FnOnce(Walk<'a, F, P, T>) -> R,
        ) -> R {
            does(Walk { tree, pages, tlb })
        }
        call(self.tree, self.pages, self.tlb, does)
    }

    /// The same walk without its TLBs, for a call that does not need them: so they need not be in memory either.
    #[inline(always)]
    pub(crate) fn without_tlb(self) -> Walk<'a, F, P, ()> {
        Walk { tree: self.tree, pages: self.pages, tlb: &() }
    }
}

impl<'a, F: Format, P: Pages, T: Tlb> Walk<'a, F, P, T> {
    /// The leaf that maps `gpa`. While another processor replaces it, the leaf as it was before: either maps `gpa` to
    /// the same place with the same rights. Never waits.
    #[must_use]
    pub fn lookup(self, gpa: Gpa) -> Option<Leaf> {
        if gpa >= self.tree.limit() {
            return None;
        }
        let slot = self.descend(gpa);
        if slot.entry == PageTableEntry::Busy {
            return self.without_tlb().apart(move |walk| walk.behind(slot, gpa).leaf());
        }
        slot.leaf()
    }
}
