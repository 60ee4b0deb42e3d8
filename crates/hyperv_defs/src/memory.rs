//! Calls about memory: deposits, and the guest physical address space of a partition.
//!
//! The words of a list are page numbers. A number with more than 52 bits names no page, and ends the call at its
//! element. The call's flags are checked once, before any element.
//!
//! Reserved fields of these inputs are not checked, because Linux does not clear its input page.

use addr::{Gpa, PAGE_BYTES};
use bitflags::bitflags;

use crate::call::Checked;
use crate::hypercall::Status;
use crate::input::Words;
use crate::partition::{PartitionId, word_at};
use crate::wire::{U32, U64, wire};

/// Pages in a large page.
pub const LARGE_PAGES: u64 = 512;
const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();
/// Page numbers have this many bits at most, so that they have an address.
const NUMBER_BITS: u32 = u64::BITS - PAGE_SHIFT;

/// The address of a page.
///
/// # Errors
///
/// [`Status::InvalidParameter`] for a number that no page has.
pub const fn page_of_number(number: u64) -> Result<Gpa, Status> {
    if number >> NUMBER_BITS == 0 { Ok(Gpa(number << PAGE_SHIFT)) } else { Err(Status::InvalidParameter) }
}

/// The number of the page that holds an address.
#[must_use]
pub const fn number_of_page(page: Gpa) -> u64 {
    page.0 >> PAGE_SHIFT
}

/// A list of pages of the caller, from the call's first element on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageList<'a>(Words<'a>);

impl<'a> PageList<'a> {
    fn new(checked: &Checked, input: &'a [u8], header_bytes: usize) -> Self {
        Self(Words::of(input.get(header_bytes..).unwrap_or_default()).skip(checked.control().rep_start().into()))
    }

    /// The list in the variable header of a call.
    pub(crate) fn of_words(words: Words<'a>) -> Self {
        Self(words)
    }

    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pages. An invalid page number is an error of its element.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<Gpa, Status>> + use<'a> {
        self.0.0.iter().map(|word| page_of_number(u64::from_le_bytes(*word)))
    }
}

wire! {
    /// Input of HvCallWithdrawMemory (Linux' `hv_input_withdraw_memory`).
    pub struct WithdrawInput: 16 {
        /// The partition.
        pub partition: U64,
        /// From where. Not looked at.
        pub proximity: U64,
    }

    /// Input of HvCallMapGpaPages and HvCallUnmapGpaPages, before the list (Linux' `hv_input_map_gpa_pages`).
    pub struct MapInput: 24 {
        /// The partition.
        pub partition: U64,
        /// Number of the first page in it.
        pub base: U64,
        /// [`MapFlags`] or [`UNMAP_LARGE_PAGE`].
        pub flags: U32,
        /// Not looked at.
        pub padding: U32,
    }

    /// Input of HvCallGetGpaPagesAccessStates (Linux' `hv_input_get_gpa_pages_access_state`).
    pub struct AccessStatesInput: 24 {
        /// The partition.
        pub partition: U64,
        /// [`AccessStateFlags`].
        pub flags: U64,
        /// Number of the first page.
        pub base: U64,
    }
}

/// HvCallDepositMemory: the hypervisor owns the pages until they are withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deposit<'a> {
    /// Whom they pay for.
    pub partition: PartitionId,
    /// Them.
    pub pages: PageList<'a>,
}

/// HvCallWithdrawMemory. Answers with numbers of pages; with [`Status::NoResources`] when there are no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdraw {
    /// From whom.
    pub partition: PartitionId,
    /// How many pages at most.
    pub count: u16,
}

bitflags! {
    /// Flags of a map (Linux' `HV_MAP_GPA_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MapFlags: u32 {
        /// It can be read.
        const READABLE = 1 << 0;
        /// It can be written to.
        const WRITABLE = 1 << 1;
        /// The guest's kernel can execute it.
        const KERNEL_EXECUTABLE = 1 << 2;
        /// The guest's users can execute it.
        const USER_EXECUTABLE = 1 << 3;
        /// The hypervisor may change its access for its own purposes.
        const ADJUSTABLE = 1 << 15;
        /// Memory without a page now. An access sends [`crate::MessageType::GpaIntercept`] to the parent.
        const NO_ACCESS = 1 << 16;
        /// A device's registers: not cached.
        const NOT_CACHED = 1 << 21;
        /// Each element is a large page.
        const LARGE_PAGE = 1 << 31;
    }
}

impl MapFlags {
    const EXECUTABLE: Self = Self::KERNEL_EXECUTABLE.union(Self::USER_EXECUTABLE);
    const ACCESS: Self = Self::EXECUTABLE.union(Self::READABLE).union(Self::WRITABLE);
}

/// What a guest may do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpaAccess {
    /// Write to it. Reading is always allowed.
    pub write: bool,
    /// Execute it.
    pub execute: bool,
    /// It is memory, and cached.
    pub cached: bool,
}

/// HvCallMapGpaPages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapPages<'a> {
    /// Into whom.
    pub partition: PartitionId,
    /// Where the call's first element goes.
    pub first: Gpa,
    /// Each element is a large page.
    pub is_large: bool,
    /// How.
    pub what: Mapping<'a>,
}

/// What the pages become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping<'a> {
    /// This number of elements of memory without pages.
    NoAccess(u16),
    /// These pages of the caller, each the first of a large one if the elements are large.
    Pages(PageList<'a>, GpaAccess),
}

impl Mapping<'_> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> u16 {
        match self {
            Self::NoAccess(count) => *count,
            // A list has at most 4095 elements.
            Self::Pages(pages, _) => u16::try_from(pages.len()).unwrap_or(u16::MAX),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Flag of HvCallUnmapGpaPages: each element is a large page (Linux' `HV_UNMAP_GPA_LARGE_PAGE`).
pub const UNMAP_LARGE_PAGE: u32 = 1 << 1;

/// HvCallUnmapGpaPages. What is not mapped is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapPages {
    /// From whom.
    pub partition: PartitionId,
    /// Where the call's first element is.
    pub first: Gpa,
    /// Each element is a large page.
    pub is_large: bool,
    /// Number of elements.
    pub count: u16,
}

bitflags! {
    /// Flags of HvCallGetGpaPagesAccessStates (Linux' `hv_gpa_page_access_state_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct AccessStateFlags: u64 {
        /// Clear the accessed states after they were read.
        const CLEAR_ACCESSED = 1 << 0;
        /// Say that each page was.
        const SET_ACCESSED = 1 << 1;
        /// Say that no page was written to.
        const CLEAR_DIRTY = 1 << 2;
        /// Say that each page was.
        const SET_DIRTY = 1 << 3;
    }
}

bitflags! {
    /// Answer for a page (Linux' `hv_gpa_page_access_state`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct AccessState: u8 {
        /// It was accessed.
        const ACCESSED = 1 << 0;
        /// It was written to.
        const DIRTY = 1 << 1;
    }
}

/// HvCallGetGpaPagesAccessStates. Answers with an [`AccessState`] for each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetAccessStates {
    /// Of whom.
    pub partition: PartitionId,
    /// What to do with them.
    pub flags: AccessStateFlags,
    /// The call's first element.
    pub first: Gpa,
    /// Number of pages.
    pub count: u16,
}

impl<'a> Deposit<'a> {
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Result<Self, Status> {
        Ok(Self { partition: PartitionId(word_at(input, 0)?), pages: PageList::new(checked, input, 8) })
    }
}

impl Withdraw {
    pub(crate) fn parse(checked: &Checked, input: &[u8]) -> Result<Self, Status> {
        let input = WithdrawInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        Ok(Self { partition: PartitionId(input.partition.get()), count: checked.elements_left() })
    }
}

impl<'a> MapPages<'a> {
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Result<Self, Status> {
        let header = MapInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let flags = MapFlags::from_bits(header.flags.get()).ok_or(Status::InvalidParameter)?;
        let is_large = flags.contains(MapFlags::LARGE_PAGE);
        let first = first_element(checked, header.base.get(), is_large)?;

        let what = if flags.contains(MapFlags::NO_ACCESS) {
            if flags.intersects(MapFlags::ACCESS) {
                return Err(Status::InvalidParameter);
            }
            Mapping::NoAccess(checked.elements_left())
        } else {
            // Nested paging has one bit for execution, and no pages that are writable but not readable.
            let execute = match flags & MapFlags::EXECUTABLE {
                none if none.is_empty() => false,
                MapFlags::EXECUTABLE => true,
                _ => return Err(Status::InvalidParameter),
            };
            if !flags.contains(MapFlags::READABLE) {
                return Err(Status::InvalidParameter);
            }
            let write = flags.contains(MapFlags::WRITABLE);
            let cached = !flags.contains(MapFlags::NOT_CACHED);
            Mapping::Pages(PageList::new(checked, input, 24), GpaAccess { write, execute, cached })
        };
        Ok(Self { partition: PartitionId(header.partition.get()), first, is_large, what })
    }
}

impl UnmapPages {
    pub(crate) fn parse(checked: &Checked, input: &[u8]) -> Result<Self, Status> {
        let header = MapInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let flags = header.flags.get();
        if flags & !UNMAP_LARGE_PAGE != 0 {
            return Err(Status::InvalidParameter);
        }
        let is_large = flags & UNMAP_LARGE_PAGE != 0;
        let first = first_element(checked, header.base.get(), is_large)?;
        let partition = PartitionId(header.partition.get());
        Ok(Self { partition, first, is_large, count: checked.elements_left() })
    }
}

impl GetAccessStates {
    pub(crate) fn parse(checked: &Checked, input: &[u8]) -> Result<Self, Status> {
        let input = AccessStatesInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let flags = AccessStateFlags::from_bits(input.flags.get()).ok_or(Status::InvalidParameter)?;
        let accessed = AccessStateFlags::CLEAR_ACCESSED | AccessStateFlags::SET_ACCESSED;
        let dirty = AccessStateFlags::CLEAR_DIRTY | AccessStateFlags::SET_DIRTY;
        if flags.contains(accessed) || flags.contains(dirty) {
            return Err(Status::InvalidParameter);
        }
        let first = first_element(checked, input.base.get(), false)?;
        let partition = PartitionId(input.partition.get());
        Ok(Self { partition, flags, first, count: checked.elements_left() })
    }
}

/// The page of the call's first element, where its list begins at page number `base`. All of the list has addresses.
fn first_element(checked: &Checked, base: u64, is_large: bool) -> Result<Gpa, Status> {
    let step = if is_large { LARGE_PAGES } else { 1 };
    let control = checked.control();
    let number = |element: u16| base.checked_add(u64::from(element) * step).ok_or(Status::InvalidParameter);

    if !base.is_multiple_of(step) || number(control.rep_count())? > 1 << NUMBER_BITS {
        return Err(Status::InvalidParameter);
    }
    page_of_number(number(control.rep_start())?)
}
