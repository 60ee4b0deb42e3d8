//! Which event an x86 vCPU takes next: exceptions, NMIs and interrupts, in the order of the manuals.
//!
//! A processor looks for events between two instructions. What it finds there it takes by priority (APM vol. 2, 8.5):
//! first the debug trap of the instruction before, then an NMI, then an interrupt. An NMI masks further NMIs until the
//! next IRET has *completed*. STI and MOV SS hold events back for one more instruction: the interrupt shadow.
//!
//! A hypervisor injects one event per entry, and sees the guest only at exits. So it has two questions, and [`Events`]
//! answers both: which event does this entry inject, and how does the hypervisor get control again at the boundary where
//! the next one is due ([`Until`])?
//!
//! * An interrupt that waits for IF: the interrupt window of the hardware ([`Until::Window`]).
//! * An NMI that waits for the end of a shadow or of an IRET: one instruction runs with TF set ([`Until::Step`]). [`Step`]
//!   sees to it that the guest never notices.
//! * An NMI behind another event: the entry ends as soon as that event is delivered ([`Until::Delivered`]).
//!
//! Nothing here knows a VMCB. The crate forbids unsafe and is tested against a naive processor (`tests/model.rs`).
//!
//! ```
//! use x86_events::{Boundary, Event, Events, Plan, Until};
//!
//! let mut events = Events::new();
//! let at = Boundary { interrupts_enabled: true, shadow: false };
//! events.request_nmis(1);
//! // The NMI goes first. The interrupt waits until the handler lets interrupts in.
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
pub use events::{Boundary, Event, Events, Exception, Plan, Until};
pub use step::{Debug, Flags, Step};
