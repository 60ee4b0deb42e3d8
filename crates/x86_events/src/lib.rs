//! Chooses the next event of an x86 vCPU: exceptions, NMIs and interrupts, in the order of the manuals.
//!
//! A processor checks for events between two instructions, and takes them by priority (APM vol. 2, 8.5): first the
//! debug trap of the last instruction, then an NMI, then an interrupt. An NMI masks further NMIs until the next IRET
//! has *completed*. STI and MOV SS delay events for one more instruction: the interrupt shadow.
//!
//! A hypervisor injects one event per entry, and sees the guest only at exits. So it has two questions, and [`Events`]
//! answers both. Which event does this entry inject? How does the hypervisor get control again at the boundary where
//! the next event is due ([`Until`])?
//!
//! * An interrupt that waits for IF: the hardware's interrupt window ([`Until::Window`]).
//! * An NMI that waits for the end of a shadow or of an IRET: one instruction runs with TF set ([`Until::Step`]).
//!   [`Step`] hides this from the guest.
//! * An NMI after another event: the entry ends as soon as that event is delivered ([`Until::Delivered`]).
//!
//! This crate knows no VMCB. It forbids unsafe and is tested against a naive processor (`tests/model.rs`).
//!
//! ```
//! use x86_events::{Boundary, Event, Events, Plan, Until};
//!
//! let mut events = Events::new();
//! let at = Boundary { interrupts_enabled: true, shadow: false };
//! events.request_nmis(1);
//! // The NMI goes first. The interrupt waits until the handler enables interrupts.
//! let plan = events.next(at, Some(0x40), None);
//! assert_eq!(plan, Plan { inject: Some(Event::Nmi), until: Until::Window, retract: None });
//! assert!(events.masks_nmis());
//! ```

#![no_std]
#![forbid(unsafe_code)]

mod combine;
mod events;
mod step;
#[cfg(test)]
mod tests;

pub use combine::{Combined, combine};
pub use events::{Boundary, Event, Events, Exception, Plan, State, Until};
pub use step::{Debug, Flags, Step};
