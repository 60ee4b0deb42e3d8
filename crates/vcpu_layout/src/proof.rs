//! Constants that [`macro@crate::lay_out`] makes the compiler compute about a struct. For its output only.

use core::marker::PhantomData;

use crate::{LINE, MailboxField, OwnerField, VcpuLayout};

/// Whether the type begins and ends with a line at any place.
pub const fn is_whole<T>() -> bool {
    align_of::<T>().is_multiple_of(LINE) && size_of::<T>().is_multiple_of(LINE)
}

/// Whether the type begins and ends with a line if it is at `offset` of a struct that begins with one.
pub const fn is_nested_whole<T: VcpuLayout>(offset: usize) -> bool {
    offset.is_multiple_of(LINE) && is_whole::<T>()
}

/// Whether two fields, each an offset and a size in bytes, share no line. A field without size is on no line.
pub const fn are_apart(one: (usize, usize), other: (usize, usize)) -> bool {
    let (low, high) = if one.0 <= other.0 { (one, other) } else { (other, one) };
    low.1 == 0 || high.1 == 0 || (low.0 + low.1 - 1) / LINE < high.0 / LINE
}

/// Compiles only for types that may be of class `owner`.
pub const fn owner<T: OwnerField>() {}

/// Compiles only for types that may be of class `mailbox`.
pub const fn mailbox<T: MailboxField>() {}

/// Facts about a type: a constant of its own if it implements the trait, or else that of [`Otherwise`].
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

/// Facts about all other types.
pub trait Otherwise {
    /// See [`OwnerField`].
    const IS_OWNER: bool = false;
    /// See [`MailboxField`].
    const IS_MAILBOX: bool = false;
    /// See [`VcpuLayout`].
    const IS_LAID_OUT: bool = false;
}

impl<T> Otherwise for Of<T> {}
