//! Requests to flush TLBs: HvCallFlushVirtualAddressSpace, HvCallFlushVirtualAddressList and their Ex forms.
//!
//! | byte | plain | Ex |
//! |---|---|---|
//! | 0 | address space (a CR3) | address space |
//! | 8 | flags | flags |
//! | 16 | mask of VPs 0 to 63 | format of the set |
//! | 24 | list | mask of banks |
//! | 32 | | banks, then list |
//!
//! The promise to the caller: when the call returns, no target uses an old translation. A flush of more than requested
//! is always correct. Two fields should not be trusted: the address space, in which guests store any value, and
//! [`FlushFlags::NON_GLOBAL_MAPPINGS_ONLY`], which FreeBSD sets even for pages of its kernel.

use bitflags::bitflags;

use crate::call::{Checked, Offered};
use crate::gva_range::GvaRanges;
use crate::hypercall::Status;
use crate::input::Words;
use crate::table::{Code, WORD_BYTES};
use crate::targets::Targets;

bitflags! {
    /// Flags of a flush. Others, such as those for virtual trust levels, are reserved here.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct FlushFlags: u64 {
        /// All VPs; the mask or set is ignored.
        const ALL_PROCESSORS = 1 << 0;
        /// All address spaces; the address space given is ignored.
        const ALL_VIRTUAL_ADDRESS_SPACES = 1 << 1;
        /// Global translations may stay. Only without a list.
        const NON_GLOBAL_MAPPINGS_ONLY = 1 << 2;
        /// The list is in the extended format. Only with a list.
        const USE_EXTENDED_RANGE_FORMAT = 1 << 3;
    }
}

/// A request to flush.
#[derive(Clone, Debug)]
pub struct FlushCall<'a> {
    /// The address space that changed: a CR3 as the guest wrote it, with any content.
    pub address_space: u64,
    /// Flags, valid for the call.
    pub flags: FlushFlags,
    /// The targets.
    pub targets: Targets<'a>,
    /// The translations.
    pub scope: Scope<'a>,
}

/// Which translations to flush.
#[derive(Clone, Debug)]
pub enum Scope<'a> {
    /// All of them.
    Everything,
    /// Those of the pages in a list, from the call's first element on.
    List(GvaRanges<'a>),
}

impl<'a> FlushCall<'a> {
    /// `input` has the length of the call's shape.
    pub(crate) fn parse(checked: &Checked, input: Words<'a>) -> Result<Self, Status> {
        let control = checked.control();
        let (is_list, is_ex) = match checked.code() {
            Code::FlushVirtualAddressSpace => (false, false),
            Code::FlushVirtualAddressList => (true, false),
            Code::FlushVirtualAddressSpaceEx => (false, true),
            Code::FlushVirtualAddressListEx => (true, true),
            // `Checked::parse` never passes these here.
            _ => return Err(Status::InvalidHypercallCode),
        };

        // An invalid set is refused even if the flags ignore it.
        let set = input.skip(2);
        let targets = if is_ex { Targets::parse(set, control.variable_words())? } else { Targets::Mask(set.get(0)) };

        let flags = Self::flags(input.get(1), is_list, checked.offered())?;
        let targets = match targets {
            _ if flags.contains(FlushFlags::ALL_PROCESSORS) => Targets::All,
            // The TLFS requires this for masks. A set may be empty; Linux sends such sets.
            Targets::Mask(0) => return Err(Status::InvalidParameter),
            targets => targets,
        };

        let scope = if is_list {
            let list = input.skip(checked.header_bytes() / WORD_BYTES + usize::from(control.rep_start()));
            Scope::List(GvaRanges::new(list, flags.contains(FlushFlags::USE_EXTENDED_RANGE_FORMAT)))
        } else {
            Scope::Everything
        };
        Ok(Self { address_space: input.get(0), flags, targets, scope })
    }

    fn flags(bits: u64, is_list: bool, offered: Offered) -> Result<FlushFlags, Status> {
        let mut allowed = FlushFlags::ALL_PROCESSORS | FlushFlags::ALL_VIRTUAL_ADDRESS_SPACES;
        allowed.set(FlushFlags::NON_GLOBAL_MAPPINGS_ONLY, !is_list);
        allowed.set(FlushFlags::USE_EXTENDED_RANGE_FORMAT, is_list && offered.contains(Offered::EXTENDED_RANGES));

        let flags = FlushFlags::from_bits(bits).filter(|flags| allowed.contains(*flags));
        flags.ok_or(Status::InvalidParameter)
    }
}
