//! An interrupt that a vCPU sends to many others.
//!
//! To post to one that sleeps is to wake it. So one write of a guest to its interrupt controller could keep its pCPU
//! busy for as long as 512 wake-ups take, while the host's own interrupts wait. The sender posts to some of them, in
//! one [step](crate::cpu::step), and notes the rest here. [`Pending::SEND`] in its own mailbox keeps it out of its
//! guest until it has posted to all, in steps. In between the pCPU takes its interrupts, and another vCPU may have its
//! turn.

use abi::payload::MAX_VCPUS;
use sched::Pending;
use vcpu_layout::{OwnerField, OwnerWord, Proof};

use super::Vcpu;
use crate::arch::{Arch, Machine};
use crate::cpu::step::Step;
use crate::cpu::{self, scheduler};
use crate::mutants::{self, Mutant};
use crate::vm::Vm;

const WORDS: usize = MAX_VCPUS.div_ceil(u64::BITS) as usize;

/// What a vCPU still has to send. Only the pCPU that runs the vCPU uses it.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    /// What is sent, as [`Arch::post_interrupt`] takes it.
    what: OwnerWord,
    /// Bit n of word w: vCPU `w * 64 + n` has not got it yet.
    rest: [OwnerWord; WORDS],
}

impl OwnerField for Unsent {}

impl Unsent {
    fn add(&self, id: u32) {
        if let Some(word) = self.rest.get((id / u64::BITS) as usize) {
            word.set(Proof::by_place(), word.get() | 1 << (id % u64::BITS));
        }
    }

    /// Takes the first one.
    fn take(&self) -> Option<u32> {
        let (number, word) = (0..).zip(&self.rest).find(|(_, word)| word.get() != 0)?;
        let rest = word.get();
        word.set(Proof::by_place(), rest & (rest - 1));
        Some(number * u64::BITS + rest.trailing_zeros())
    }

    fn is_empty(&self) -> bool {
        self.rest.iter().all(|word| word.get() == 0)
    }
}

/// The vCPU `sender`, which this pCPU runs, sends `what` to the vCPUs `ids`, in ascending order. Those that do not
/// exist get nothing.
pub(crate) fn send(vm: &Vm, sender: &Vcpu, what: u64, ids: impl IntoIterator<Item = u32>) {
    let mut ids = ids.into_iter();
    // Most interrupts are for one.
    let Some(first) = ids.next() else { return };
    Machine::post_interrupt(vm, first, what);
    let Some(mut next) = ids.next() else { return };
    let step = Step::begin();
    while !step.is_over() {
        Machine::post_interrupt(vm, next, what);
        match ids.next() {
            Some(id) => next = id,
            None => return,
        }
    }
    keep(vm, sender, what, next, ids);
}

/// The vCPU `sender`, which this pCPU runs, has sent something. It may have woken one that waits for this pCPU now, and
/// may spin until that one has answered. So the pCPU takes a look before the next entry: from then on the guest leaves
/// when it spins, and the timer is set for the end of its slice. An interrupt to itself would do the same for one more
/// entry and exit.
#[inline]
pub(crate) fn has_sent(sender: &Vcpu) {
    if scheduler::has_new_others(cpu::this()) && !mutants::is(Mutant::WokenNotMinded) {
        keep_out(sender);
    }
}

#[cold]
fn keep(vm: &Vm, sender: &Vcpu, what: u64, next: u32, others: impl Iterator<Item = u32>) {
    let unsent = sender.unsent();
    // The guest's instruction has sent before. That interrupt goes first, to all who have not got it.
    while let Some(id) = unsent.take() {
        Machine::post_interrupt(vm, id, unsent.what.get());
    }
    unsent.what.set(Proof::by_place(), what);
    core::iter::once(next).chain(others).for_each(|id| unsent.add(id));
    keep_out(sender);
}

/// Keeps the vCPU `sender`, which this pCPU runs, out of its guest until it has told others all that it has to.
pub(crate) fn keep_out(sender: &Vcpu) {
    sender.mailbox().leave(Pending::SEND);
}

/// One more step of what the vCPU `sender`, which this pCPU runs, has to send.
#[cold]
pub(crate) fn go_on(vm: &Vm, sender: &Vcpu) {
    if Machine::tell_more(vm) {
        return keep_out(sender);
    }
    let unsent = sender.unsent();
    let step = Step::begin();
    loop {
        let Some(id) = unsent.take() else { return };
        Machine::post_interrupt(vm, id, unsent.what.get());
        if step.is_over() {
            break;
        }
    }
    if !unsent.is_empty() && !mutants::is(Mutant::RestNotSent) {
        keep_out(sender);
    }
}
