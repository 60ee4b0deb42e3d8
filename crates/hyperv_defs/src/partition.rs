//! Calls about partitions: their life and their properties.
//!
//! A partition is a VM. The VM that created it is its *parent*. It is created, given memory for the hypervisor's own
//! use, initialized, filled with pages and VPs, finalized, emptied, and deleted.

use bitflags::bitflags;

use crate::hypercall::Status;
use crate::property::{ProcessorFeatures, Property, XsaveFeatures};
use crate::wire::{U32, U64, wire};

/// Names a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionId(pub u64);

impl PartitionId {
    /// The caller's own (HV_PARTITION_ID_SELF).
    pub const SELF: Self = Self(!0);
    /// No partition's.
    pub const INVALID: Self = Self(0);
}

bitflags! {
    /// Flags of a new partition (Linux' `HV_PARTITION_CREATION_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CreationFlags: u64 {
        /// Its VPs may be threads of one core.
        const SMT_ENABLED_GUEST = 1 << 0;
        /// It may run guests of its own.
        const NESTED_VIRTUALIZATION_CAPABLE = 1 << 1;
        /// Its memory may be in large pages.
        const GPA_SUPER_PAGES = 1 << 4;
        /// A monitor in the parent emulates its devices. Linux always sets it.
        const EXO_PARTITION = 1 << 8;
        /// Each VP has a local APIC of the hypervisor.
        const LAPIC = 1 << 13;
        /// Messages about its VPs go to their intercept pages. Linux always sets it.
        const INTERCEPT_MESSAGE_PAGE = 1 << 19;
        /// Its local APICs have the mode x2APIC.
        const X2APIC_CAPABLE = 1 << 22;
    }
}

wire! {
    /// Input of HvCallCreatePartition (Linux' `hv_input_create_partition`).
    pub struct CreatePartitionInput: 56 {
        /// [`CreationFlags`].
        pub flags: U64,
        /// Where its memory is best. Not looked at.
        pub proximity: U64,
        /// [`CreatePartition::COMPATIBILITY_VERSION`].
        pub compatibility_version: U32,
        /// Not looked at.
        pub padding: U32,
        /// [`ProcessorFeatures`] that it is not to have.
        pub disabled_features: [U64; 2],
        /// [`XsaveFeatures`] that it is not to have.
        pub disabled_xsave_features: U64,
        /// Isolation from the parent. Zero: there is none.
        pub isolation: U64,
    }

    /// Input of HvCallGetPartitionProperty and, with an argument, of HvCallGetPartitionPropertyEx (Linux'
    /// `hv_input_get_partition_property_ex`).
    pub struct GetPropertyInput: 16 {
        /// The partition.
        pub partition: U64,
        /// [`Property`].
        pub code: U32,
        /// Not looked at.
        pub padding: U32,
    }

    /// Input of HvCallSetPartitionProperty (Linux' `hv_input_set_partition_property`).
    pub struct SetPropertyInput: 24 {
        /// The partition.
        pub partition: U64,
        /// [`Property`].
        pub code: U32,
        /// Not looked at.
        pub padding: U32,
        /// Its value.
        pub value: U64,
    }
}

/// HvCallCreatePartition. Answers with a [`PartitionId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatePartition {
    /// Its flags.
    pub flags: CreationFlags,
    /// Features that it is not to have.
    pub disabled_features: ProcessorFeatures,
    /// And these.
    pub disabled_xsave_features: XsaveFeatures,
}

impl CreatePartition {
    /// The only version of the interface: that of Windows 21H2 (Linux' `HV_COMPATIBILITY_21_H2`).
    pub const COMPATIBILITY_VERSION: u32 = 0x609;

    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = CreatePartitionInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let flags = CreationFlags::from_bits(input.flags.get()).ok_or(Status::InvalidParameter)?;
        // A partition without its own pages for messages, or with devices of the hypervisor, is another kind of VM.
        let is_known = flags.contains(CreationFlags::EXO_PARTITION | CreationFlags::INTERCEPT_MESSAGE_PAGE)
            && input.compatibility_version.get() == Self::COMPATIBILITY_VERSION
            && input.isolation.get() == 0;
        if !is_known {
            return Err(Status::InvalidParameter);
        }
        Ok(Self {
            flags,
            disabled_features: ProcessorFeatures::of_banks(input.disabled_features.map(U64::get)),
            disabled_xsave_features: XsaveFeatures::from_bits_retain(input.disabled_xsave_features.get()),
        })
    }
}

/// HvCallGetPartitionProperty and HvCallGetPartitionPropertyEx. Answer with 64 bits or a larger structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetProperty {
    /// Whose.
    pub partition: PartitionId,
    /// Which.
    pub property: Property,
    /// The property's argument, mostly an index. Zero without the Ex form.
    pub argument: u64,
}

impl GetProperty {
    pub(crate) fn parse(input: &[u8], is_ex: bool) -> Result<Self, Status> {
        let read = GetPropertyInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let argument = if is_ex { word_at(input, 16)? } else { 0 };
        let property = Property::try_from(read.code.get())?;
        if property.is_large() && !is_ex {
            return Err(Status::UnknownProperty);
        }
        Ok(Self { partition: PartitionId(read.partition.get()), property, argument })
    }
}

/// HvCallSetPartitionProperty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetProperty {
    /// Whose.
    pub partition: PartitionId,
    /// Which. It can be written at some time.
    pub property: Property,
    /// To what. The property can have this value.
    pub value: u64,
}

impl SetProperty {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = SetPropertyInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let property = Property::try_from(input.code.get())?;
        property.check_value(input.value.get())?;
        Ok(Self { partition: PartitionId(input.partition.get()), property, value: input.value.get() })
    }
}

/// The whole input of some calls: a partition.
pub(crate) fn parse_id(input: &[u8]) -> Result<PartitionId, Status> {
    word_at(input, 0).map(PartitionId)
}

/// The 64 bits at `offset`.
pub(crate) fn word_at(input: &[u8], offset: usize) -> Result<u64, Status> {
    let word = input.get(offset..).and_then(<[u8]>::first_chunk);
    Ok(u64::from_le_bytes(*word.ok_or(Status::InvalidHypercallInput)?))
}
