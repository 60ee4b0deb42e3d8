//! An exception during the delivery of another event (APM vol. 2, 8.2.9, table 8-5).

use x86_defs::registers::vector;

use crate::events::Exception;

/// Result of two exceptions, the second raised while the first was delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combined {
    /// Deliver the second. The first is raised again when its instruction is executed again.
    Second,
    /// Deliver a double fault instead of both.
    DoubleFault,
    /// The processor shuts down: a triple fault.
    Shutdown,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Benign,
    Contributory,
    PageFault,
    DoubleFault,
}

/// The processor's result for `second`, raised while `first` was delivered.
#[must_use]
pub fn combine(first: Exception, second: Exception) -> Combined {
    match (class(first), class(second)) {
        (Class::DoubleFault, Class::Contributory | Class::PageFault) => Combined::Shutdown,
        (Class::Contributory, Class::Contributory) | (Class::PageFault, Class::Contributory | Class::PageFault) => {
            Combined::DoubleFault
        }
        _ => Combined::Second,
    }
}

fn class(exception: Exception) -> Class {
    match exception.vector {
        vector::DIVIDE_ERROR | vector::INVALID_TSS..=vector::GENERAL_PROTECTION => Class::Contributory,
        vector::PAGE_FAULT => Class::PageFault,
        vector::DOUBLE_FAULT => Class::DoubleFault,
        _ => Class::Benign,
    }
}
