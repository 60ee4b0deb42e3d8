//! A value in pages of its own, with an offset in the first page.
//!
//! A value that one CPU writes all the time must not share a cache line with another CPU's data; in pages of its own it
//! cannot. But if each such value began at a page's start, all their first lines would be in the same few sets of a
//! cache. So each begins one line later than the one before ([`vcpu_layout::stagger`]).

#![expect(unsafe_code, reason = "puts a value at a place of its choice within memory of its own")]

use alloc::alloc::{alloc, dealloc, handle_alloc_error};
use core::alloc::Layout;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

use addr::Hva;
use vcpu_layout::{LINE, PAGE, pages, stagger};

/// A `T` in pages of its own.
pub(crate) struct Block<T>(NonNull<T>);

// SAFETY: a block owns its value as a `Box` does; nothing else points to it.
unsafe impl<T: Send> Send for Block<T> {}
// SAFETY: a shared block gives out shared references only.
unsafe impl<T: Sync> Sync for Block<T> {}

impl<T> Block<T> {
    /// Of the pages; the value ends within them wherever it begins.
    const PAGES: Layout = {
        assert!(align_of::<T>() <= LINE, "a value begins with any line");
        match Layout::from_size_align(pages(size_of::<T>()) * PAGE, PAGE) {
            Ok(layout) => layout,
            Err(_) => panic!("a value has some pages, not all there are"),
        }
    };

    /// Puts `value`, number `index` of its kind, into pages of its own.
    #[inline(never)]
    pub(crate) fn new(index: usize, value: T) -> Self {
        // SAFETY: the layout is not empty: `pages` is at least one for any size.
        let start = unsafe { alloc(Self::PAGES) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(Self::PAGES) };
        // SAFETY: `stagger` is less than a page, and `pages` has room for it besides the value.
        let place = unsafe { start.byte_add(stagger(index)) }.cast::<T>();
        // SAFETY: within the pages just taken, by a whole number of lines from their start, so aligned.
        unsafe { place.write(value) };
        Self(place)
    }

    /// Where the value is.
    pub(crate) fn hva(&self) -> Hva {
        Hva(self.0.as_ptr().addr() as u64)
    }

    /// Takes the value out.
    pub(crate) fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: the value is there, and with `this` never dropped it is taken once.
        let value = unsafe { this.0.read() };
        this.free();
        value
    }

    fn free(&self) {
        let start = self.0.as_ptr().cast::<u8>().map_addr(|place| place & !(PAGE - 1));
        // SAFETY: the value began less than a page behind the start of the pages that `new` took, with the same layout.
        unsafe { dealloc(start, Self::PAGES) };
    }
}

impl<T> Deref for Block<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the value exists until the block is dropped or taken apart, and there are only shared references.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Block<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and there is no other reference while this one lives.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Block<T> {
    fn drop(&mut self) {
        // SAFETY: the value is there, and this is the last that is done with it.
        unsafe { self.0.drop_in_place() };
        self.free();
    }
}
