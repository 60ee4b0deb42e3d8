//! A virtual interrupt controller: the GICv3 (IHI 0069), without security states and without LPIs.
//!
//! Interrupts have numbers (*INTIDs*). 0 to 15 are inter-processor interrupts (SGIs). 16 to 31 belong to devices of one
//! vCPU, such as its timer (PPIs). Numbers from 32 on belong to devices that all vCPUs share (SPIs). An interrupt is
//! *inactive*, *pending*, *active* (the guest has acknowledged it and not ended it yet), or *active and pending*.
//!
//! The processor delivers interrupts to a guest without an exit, as long as they are in its few *list registers*: it
//! picks the one of highest priority, acknowledges it, and ends it. So this code keeps the right interrupts in them.
//! The guest exits only for rare events: to configure the controller, to send an SGI, or when more interrupts are
//! pending than fit.
//!
//! The state and its owners:
//!
//! | state | file | owner |
//! |---|---|---|
//! | SGIs and PPIs of a vCPU, its list registers | [`VcpuGic`] | the pCPU that runs the vCPU; nothing there is atomic |
//! | interrupts that others raise at a vCPU | [`Posted`] | any pCPU, one atomic word per vCPU |
//! | SPIs, routes, enables | [`Distributor`] | the VM; the caller holds a lock |
//!
//! An SGI touches its target's word and state, and nothing of the VM. An SPI in a vCPU's list register is *held* by
//! that vCPU, which has its state. The distributor learns the state when the vCPU next takes the lock
//! ([`VcpuGic::needs_distributor`]). A change of a held SPI creates *news* for its holder. The caller delivers news
//! ([`Distributor::next_news`]) by [`Posted::announce_spis`] and a post.
//!
//! The order on an exit:
//!
//! ```text
//!   guest exits
//!   fold            reads what the guest did to the list registers
//!   ...             the exit's handler; accesses to registers
//!   accept          takes what was posted meanwhile
//!   prepare         with the distributor's lock if `needs_distributor`, else without
//!   lists, control  into the processor, and enter
//! ```
//!
//! All interrupts are in group 1, which kernels use. Group 0 does not exist: its enables are zero and cannot be set.

mod distributor;
mod forwarded;
mod list_register;
mod order;
mod posted;
mod private;
mod registers;
mod sgi;
mod state;
#[cfg(test)]
mod tests;
mod vcpu;

pub use distributor::Distributor;
pub use forwarded::Order;
pub use posted::Posted;
pub use registers::{Width, frame};
pub use sgi::Sgi;
pub use state::{DistributorState, VcpuState};
pub use vcpu::{Config, VcpuGic};

/// Bytes that the distributor's registers occupy.
pub const DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// Bytes that the registers of each vCPU's redistributor occupy, one vCPU after the other.
pub const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// First INTID that is shared by all vCPUs.
pub const FIRST_SPI: u32 = 32;
/// INTIDs that there are, the private ones included.
pub const INTIDS: u32 = 256;
/// Maximum number of list registers of a processor.
pub const MAX_LISTS: usize = 16;

/// 32 INTIDs to a word. The first word holds each vCPU's own INTIDs.
const WORDS: usize = INTIDS as usize / 32;

/// The five bits of priority that the processor's interface has. Lower is more urgent.
const PRIORITY_BITS: u8 = 0xf8;

/// Result of a guest's read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Read {
    /// This.
    Value(u64),
    /// No value yet: other vCPUs have it in their list registers, and there is news for them. Deliver the news, settle
    /// the reader's own pending work, and let the guest repeat the instruction.
    Retry,
}

/// The bits of `set`, lowest first.
fn bits(mut set: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let lowest = set.trailing_zeros();
        set &= set.wrapping_sub(1);
        (lowest < 32).then_some(lowest)
    })
}

/// INTID of a bit in a word.
#[expect(clippy::cast_possible_truncation, reason = "there are few words")]
const fn join(word: usize, bit: u32) -> u32 {
    word as u32 * 32 + bit
}

/// Word of an INTID and its bit there.
const fn split(intid: u32) -> (usize, u32) {
    (intid as usize / 32, 1 << (intid % 32))
}
