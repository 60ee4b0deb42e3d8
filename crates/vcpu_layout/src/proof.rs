//! What [`macro@crate::lay_out`] makes the compiler compute about a struct. Not to be used otherwise.

use core::marker::PhantomData;

use crate::{LINE, MailboxField, OwnerField, VcpuLayout};

/// Begins and ends with a line, wherever it is.
pub const fn is_whole<T>() -> bool {
    align_of::<T>().is_multiple_of(LINE) && size_of::<T>().is_multiple_of(LINE)
}

/// Begins and ends with a line if it is at `offset` of something that begins with one.
pub const fn is_nested_whole<T: VcpuLayout>(offset: usize) -> bool {
    offset.is_multiple_of(LINE) && is_whole::<T>()
}

/// Whether two fields, each an offset and a size in bytes, have no line in common. What has no size is on no line.
pub const fn are_apart(one: (usize, usize), other: (usize, usize)) -> bool {
    let (low, high) = if one.0 <= other.0 { (one, other) } else { (other, one) };
    low.1 == 0 || high.1 == 0 || (low.0 + low.1 - 1) / LINE < high.0 / LINE
}

/// Compiles for what may be of class `owner`.
pub const fn owner<T: OwnerField>() {}

/// Compiles for what may be of class `mailbox`.
pub const fn mailbox<T: MailboxField>() {}

/// What is known about a type: a constant of its own if it implements the trait, or else that of [`Otherwise`].
pub struct Of<T>(PhantomData<T>);

impl<T: OwnerField> Of<T> {
    /// See [`OwnerField`].
    pub const IS_OWNER: bool = true;
}

impl<T: MailboxField> Of<T> {
    /// See [`MailboxField`].
    pub const IS_MAILBOX: bool = true;
}

impl<T: VcpuLayout> Of<T> {
    /// See [`VcpuLayout`].
    pub const IS_LAID_OUT: bool = true;
}

/// What is known about types of which nothing is said.
pub trait Otherwise {
    /// See [`OwnerField`].
    const IS_OWNER: bool = false;
    /// See [`MailboxField`].
    const IS_MAILBOX: bool = false;
    /// See [`VcpuLayout`].
    const IS_LAID_OUT: bool = false;
}

impl<T> Otherwise for Of<T> {}
