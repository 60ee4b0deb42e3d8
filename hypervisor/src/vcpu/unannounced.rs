//! An interrupt that a device sends to many vCPUs of a VM.
//!
//! To announce it to one that sleeps is to wake it, and whoever does so takes no interrupts meanwhile: it may be a
//! handler of the host's interrupts. So it leaves the interrupt to all, announces it to some, in one
//! [step](crate::cpu::step), and notes the others here. The next vCPU is told to tell them: [`Pending::SEND`] in its
//! mailbox keeps it out of its guest until it has told all, in steps. What a vCPU sends itself is in
//! [`unsent`](super::unsent).

#![allow(dead_code, reason = "Arm's distributor has a list of its own")]

use abi::payload::MAX_VCPUS;
use sched::Pending;

use crate::cpu::step::Step;
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Ordering};
use crate::vm::Vm;

const WORDS: usize = MAX_VCPUS.div_ceil(u64::BITS) as usize;
/// What a device may announce.
const KINDS: [Pending; 3] = [Pending::INTERRUPT, Pending::NMI, Pending::INIT];

/// vCPUs to which a device has left something that nobody has announced to them yet.
#[derive(Debug, Default)]
pub(crate) struct Unannounced {
    /// For each kind: bit n of word w is vCPU `w * 64 + n`.
    vcpus: [[AtomicU64; WORDS]; KINDS.len()],
}

impl Unannounced {
    /// Adds vCPUs of one word.
    fn add(&self, number: usize, vcpus: u64, work: Pending) {
        for (kind, words) in KINDS.iter().zip(&self.vcpus) {
            if let Some(word) = words.get(number).filter(|_| vcpus != 0 && work.contains(*kind)) {
                word.fetch_or(vcpus, Ordering::AcqRel);
            }
        }
    }

    /// Takes one of them, which nobody else gets.
    fn take(&self) -> Option<(u32, Pending)> {
        for (kind, words) in KINDS.iter().zip(&self.vcpus) {
            for (number, word) in (0..).zip(words) {
                loop {
                    let vcpus = word.load(Ordering::Acquire);
                    let bit = vcpus & vcpus.wrapping_neg();
                    if bit == 0 {
                        break;
                    }
                    if word.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                        return Some((number * u64::BITS + bit.trailing_zeros(), *kind));
                    }
                }
            }
        }
        None
    }
}

/// A device has an interrupt for the vCPUs `ids` of `vm`, in ascending order. `leave` leaves it to one, and returns how
/// it is announced, which is the same for all, if the vCPU exists.
pub(crate) fn send(
    vm: &Vm,
    unannounced: &Unannounced,
    ids: impl IntoIterator<Item = u32>,
    leave: impl Fn(u32) -> Option<Pending>,
) {
    let step = Step::begin();
    let mut ids = ids.into_iter().filter_map(|id| Some((id, leave(id)?)));
    let Some((first, work)) = ids.next() else { return };
    vm.post(first, work);
    let mut teller = None;
    let (mut at, mut vcpus) = (0, 0);
    for (id, work) in ids {
        let number = (id / u64::BITS) as usize;
        match teller {
            None if step.is_over() => teller = Some((id, work)),
            None => vm.post(id, work),
            Some((_, work)) => {
                if number != at {
                    unannounced.add(at, vcpus, work);
                    (at, vcpus) = (number, 0);
                }
                vcpus |= 1 << (id % u64::BITS);
            }
        }
    }
    if let Some((id, work)) = teller {
        unannounced.add(at, vcpus, work);
        let tells = if mutants::is(Mutant::NobodyTells) { Pending::empty() } else { Pending::SEND };
        vm.post(id, work | tells);
    }
}

/// One more step of what devices have left. Returns whether there may be more.
pub(crate) fn announce_more(vm: &Vm, unannounced: &Unannounced) -> bool {
    let step = Step::begin();
    while let Some((id, work)) = unannounced.take() {
        vm.post(id, work);
        if step.is_over() {
            return true;
        }
    }
    false
}
