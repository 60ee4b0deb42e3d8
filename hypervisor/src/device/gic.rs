//! A virtual interrupt controller: the GICv3 (IHI 0069), without security states and without LPIs.
//!
//! Interrupts have numbers (*INTIDs*): 0 to 15 are inter-processor interrupts (SGIs), 16 to 31 are of devices of one
//! vCPU such as its timer (PPIs), from 32 on they are of devices that all vCPUs share (SPIs). An interrupt is *inactive*,
//! *pending*, *active* (the guest has acknowledged it and not ended it yet), or *active and pending*.
//!
//! The processor delivers interrupts to a guest by itself, as long as they are in its few *list registers*: it picks the
//! most urgent, acknowledges, ends. So the work here is to keep the right interrupts in them, and the guest comes out
//! only for what is rare: to configure, to send an SGI, or when more is pending than fits.
//!
//! Who owns what:
//!
//! | state | file | owner |
//! |---|---|---|
//! | SGIs and PPIs of a vCPU, its list registers | [`VcpuGic`] | the pCPU that runs the vCPU; nothing there is atomic |
//! | what others raise at a vCPU | [`Posted`] | everybody, one atomic word per vCPU |
//! | SPIs, routes, enables | [`Distributor`] | the VM; the caller holds a lock |
//!
//! An SGI touches the word of its target and the target's own state: nothing of the VM. An SPI that is in some vCPU's
//! list register is *held* by that vCPU: its state is there, and the distributor learns of it when the vCPU takes the lock
//! next ([`VcpuGic::needs_distributor`]). Who changes a held SPI makes *news* for its holder; the caller delivers
//! news ([`Distributor::next_news`]) by [`Posted::announce_spis`] and a post.
//!
//! The order on the way through the hypervisor:
//!
//! ```text
//!   guest exits
//!   fold            what the guest did to the list registers
//!   ...             whatever the exit asks for; accesses to registers
//!   accept          what was posted meanwhile
//!   prepare         with the distributor's lock if `needs_distributor`, else without
//!   lists, control  into the processor, and enter
//! ```
//!
//! All interrupts are in group 1, as kernels want them. Group 0 does not exist: its enables are zero and cannot be set.

mod distributor;
mod list_register;
mod order;
mod posted;
mod private;
mod registers;
mod sgi;
#[cfg(test)]
mod tests;
mod vcpu;

pub(crate) use distributor::Distributor;
pub(crate) use posted::Posted;
pub(crate) use registers::{Width, frame};
pub(crate) use sgi::Sgi;
pub(crate) use vcpu::{Config, VcpuGic};

/// Bytes that the distributor's registers occupy.
pub(crate) const DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// Bytes that the registers of each vCPU's redistributor occupy, one vCPU after the other.
pub(crate) const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// First INTID that is shared by all vCPUs.
pub(crate) const FIRST_SPI: u32 = 32;
/// INTIDs that there are, the private ones included.
pub(crate) const INTIDS: u32 = 256;
/// Most list registers that a processor can have.
pub(crate) const MAX_LISTS: usize = 16;

/// 32 INTIDs to a word: words of all INTIDs, of which the first is each vCPU's own.
const WORDS: usize = INTIDS as usize / 32;

/// The five bits of priority that the processor's interface has. Lower is more urgent.
const PRIORITY_BITS: u8 = 0xf8;

/// What the guest gets from a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Read {
    /// This.
    Value(u64),
    /// Nothing yet: the answer is in the list registers of other vCPUs, for which there is news. Deliver it, settle what
    /// waits for the reader itself, and let the guest repeat the instruction.
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
