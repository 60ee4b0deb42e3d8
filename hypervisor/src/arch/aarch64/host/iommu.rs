//! IOMMUs of this architecture (SMMU): the hypervisor drives none, and no VM owns devices.

use alloc::string::String;
use core::fmt::Display;

use addr::Hpa;
use stage2::Stale;

use crate::io::iommu::{Domain, Functions, Guard, RequesterId};

/// None does.
pub(crate) fn guard() -> Guard {
    Guard::Off(String::from("Dunlin drives no IOMMU of this architecture"))
}

/// Nothing keeps a function from memory.
pub(crate) fn grant(_: &Functions, _: Domain, _: Hpa) {}

/// Nothing keeps a function from memory.
pub(crate) fn revoke(_: &Functions, _: Domain) {}

/// No translation is kept.
pub(crate) fn flush(_: Domain, _: Stale) {}

/// There are none.
pub(crate) fn take_events(_: &mut dyn FnMut(RequesterId, &dyn Display)) {}
