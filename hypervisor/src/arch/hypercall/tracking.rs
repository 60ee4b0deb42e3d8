//! Which pages of a child were written or accessed.
//!
//! While a child's memory is tracked, a page is dirty if its leaf in stage 2 says so, or its bit in
//! [`Written`](partition::Written). Leaves record the writes of the guest and of the hypervisor. When a leaf goes, what
//! it has recorded goes into the bits ([`memory`](super::memory)), and a new leaf begins clean. So the state belongs to
//! the address in the child, wherever the parent's kernel moves the page to.
//!
//! The harvest is that of other VMs' logs ([`DirtyLog`]): get, tell, clear, flush. It works on the large pages that a
//! call touches, with a copy of their bits. The lock of the descriptions keeps others from changing either.

use core::ops::Range;

use hyperv_defs::Status;
use hyperv_defs::memory::{AccessState, AccessStateFlags, GetAccessStates, LARGE_PAGES, number_of_page};
use partition::{PAGES_OF_A_WORD, Partition};
use stage2::{DirtyLog, MarkWord, Policy, Source};

use super::Ended;
use super::budget::Budget;
use super::memory::{pages_from, pages_of};
use super::parent::{Caller, Deposited};
use crate::arch::{Arch as _, Machine};
use crate::cpu;
use crate::mutants::{self, Mutant};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;

/// An output has room for the states of so many pages.
const MOST: u64 = 4096;
/// Words for these pages, and for the rest of the large pages at both ends.
const WORDS: usize = ((MOST + 2 * LARGE_PAGES) / PAGES_OF_A_WORD) as usize;
/// Pages of a word.
const OF_A_WORD: usize = u64::BITS as usize;
/// States that are told in one piece: those of a large page.
const PIECE: usize = 512;
const _: () = assert!(PIECE as u64 == LARGE_PAGES && OF_A_WORD as u64 == PAGES_OF_A_WORD);

type Bits = [u64; WORDS];

/// Property GpaPageAccessTracking: from now on the pages of a child are tracked, or not any more. What was written
/// before is unknown: a page may count as written.
pub(super) fn track(child: &Partition, vm: &Vm, is_on: bool, store: &mut Deposited<'_>) {
    match (is_on, vm.memory.is_tracked()) {
        (true, false) => {
            child.written().clear(store);
            vm.memory.begin_tracking();
        }
        (false, true) => vm.memory.end_tracking(),
        _ => {}
    }
}

/// HvCallGetGpaPagesAccessStates: returns the states, and then changes them, for as many large pages as the time of a
/// call allows.
pub(super) fn access_states(caller: &Caller<'_>, get: &GetAccessStates) -> Result<Ended, Status> {
    let budget = Budget::start();
    let store = &mut caller.store();
    let mut parent = caller.lock();
    let (child, _) = parent.child_mut(get.partition)?;
    if !child.is_tracking() {
        return Err(Status::InvalidPartitionState);
    }
    let vm = caller.children.vm(get.partition)?;
    if get.count == 0 {
        return caller.done();
    }

    let first = number_of_page(get.first);
    let wanted = first..first + u64::from(get.count).min(MOST);
    let start = first & !(LARGE_PAGES - 1);
    let most = wanted.end.next_multiple_of(LARGE_PAGES) - start;
    pages_from(start, most).ok_or(Status::InvalidParameter)?;
    let mut before: Bits = [0; WORDS];
    let mut marks: [MarkWord; WORDS] = core::array::from_fn(|_| MarkWord::new());

    let memory = &vm.memory;
    memory.collect_reports(vm.vcpus());
    let (tlbs, walking) = (AllTlbs::of(&vm), memory.announce(cpu::this().id));
    let walk = memory.walk(&tlbs, &walking);
    let (mut dirty, mut accessed): (Bits, Bits) = ([0; WORDS], [0; WORDS]);
    // One large page at a time: a child of small pages has 512 leaves there.
    let mut end = first;
    while end < wanted.end && (end == first || !budget.is_third_spent()) {
        let slot = end & !(LARGE_PAGES - 1);
        let pages = end..wanted.end.min(slot + LARGE_PAGES);
        let words = numbers_of_words(slot - start, LARGE_PAGES);
        child.written().words(slot / PAGES_OF_A_WORD, &mut before[words.clone()], store);
        for (marks, bits) in marks[words.clone()].iter_mut().zip(&before[words.clone()]) {
            *marks = MarkWord::of(*bits);
        }
        let log = log_of(slot, LARGE_PAGES, &marks[words.clone()])?;
        log.get(walk, 0, &mut dirty[words]);
        walk.accessed(pages_from(pages.start, pages.end - pages.start).ok_or(Status::InvalidParameter)?, |found| {
            let found = pages_of(found);
            add(&mut accessed, found.start - start..found.end - start);
        });
        end = pages.end;
    }
    let pages = first..end;
    let count = end - first;
    // The words of all large pages that were looked at, of which the first and the last may be asked for in part.
    let words = numbers_of_words(0, end.next_multiple_of(LARGE_PAGES) - start);
    let mut told: Bits = [0; WORDS];
    add(&mut told, pages.start - start..pages.end - start);
    dirty[words.clone()].iter_mut().zip(&told).for_each(|(dirty, told)| *dirty &= told);
    let range = pages_from(first, count).ok_or(Status::InvalidParameter)?;

    tell(caller, first - start, count, &dirty, &accessed)?;

    if get.flags.contains(AccessStateFlags::CLEAR_ACCESSED) {
        walk.age(range, |_| ());
    }
    if get.flags.contains(AccessStateFlags::SET_ACCESSED) {
        walk.touch(range);
    }
    if get.flags.contains(AccessStateFlags::CLEAR_DIRTY) && dirty[words.clone()].iter().any(|word| *word != 0) {
        let log = log_of(start, end.next_multiple_of(LARGE_PAGES) - start, &marks[words.clone()])?;
        let cleared = log.clear(walk, 0, &dirty[words.clone()]);
        if !mutants::is(Mutant::TrackedNotFlushed) {
            let _told = cleared.flush(&tlbs, walking, memory.dirty_state().walkers());
            // Words that emulators have found count as written once, when they are found: see `Visit::find_word`.
            memory.wait_for_visitors();
        }
    }
    if get.flags.contains(AccessStateFlags::SET_DIRTY) {
        child.map().described(pages, store, |found| {
            for (word, pages) in stage2::words_of(found.start - start..found.end - start) {
                if let Some(marks) = marks.get(word) {
                    marks.write(pages, || ());
                }
            }
        });
    }
    for ((number, before), marks) in (start / PAGES_OF_A_WORD..).zip(&before[words.clone()]).zip(&marks[words]) {
        if *before != marks.get() {
            child.written().set_word(number, marks.get(), store);
        }
    }
    caller.ended_after(u16::try_from(count).unwrap_or(u16::MAX), Ok(()))
}

/// The log of the `count` pages from `first` on, whose bits are `marks`.
fn log_of(first: u64, count: u64, marks: &[MarkWord]) -> Result<DirtyLog<&[MarkWord]>, Status> {
    let slot = pages_from(first, count).ok_or(Status::InvalidParameter)?;
    let source = if Machine::lists_writes() { Source::Listed } else { Source::Hardware };
    DirtyLog::new(slot, source, Policy::Adaptive, marks).ok_or(Status::InvalidParameter)
}

/// The numbers of the words of `count` pages from bit `first` on.
fn numbers_of_words(first: u64, count: u64) -> Range<usize> {
    let word = |page: u64| usize::try_from(page / PAGES_OF_A_WORD).unwrap_or(WORDS).min(WORDS);
    word(first)..word(first + count)
}

/// Writes the states of `count` pages from bit `first` on to the call's output.
fn tell(caller: &Caller<'_>, first: u64, count: u64, dirty: &Bits, accessed: &Bits) -> Result<(), Status> {
    let begun = u64::from(caller.checked.control().rep_start());
    let (mut from, end) = (first, first + count);
    while from < end {
        // Up to the end of a large page.
        let base = from & !(LARGE_PAGES - 1);
        let next = end.min(base + LARGE_PAGES);
        let mut told = [0; PIECE];
        for (told, word) in told.chunks_exact_mut(OF_A_WORD).zip(numbers_of_words(base, LARGE_PAGES)) {
            told.copy_from_slice(&states(dirty[word], accessed[word]));
        }
        let [begin, end] = [from - base, next - base].map(|page| usize::try_from(page).unwrap_or(0));
        caller.output.write_at(begun + from - first, &told[begin..end])?;
        from = next;
    }
    Ok(())
}

/// The states of the pages of a word. Most often all are the same.
fn states(dirty: u64, accessed: u64) -> [u8; OF_A_WORD] {
    let (as_dirty, as_accessed) = (AccessState::DIRTY.bits(), AccessState::ACCESSED.bits());
    let (dirty, accessed) = (dirty.to_le_bytes(), accessed.to_le_bytes());
    if [dirty, accessed].iter().all(|bytes| matches!(u64::from_le_bytes(*bytes), 0 | u64::MAX)) {
        return [(dirty[0] & as_dirty) | (accessed[0] & as_accessed); _];
    }
    let mut states = [0; _];
    for (states, (dirty, accessed)) in states.chunks_exact_mut(8).zip(dirty.into_iter().zip(accessed)) {
        let eight = (spread(dirty) * u64::from(as_dirty)) | (spread(accessed) * u64::from(as_accessed));
        states.copy_from_slice(&eight.to_le_bytes());
    }
    states
}

/// A byte for each bit, that of bit 0 the lowest: 1 if it is set.
fn spread(bits: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // Bit n alone in byte n, and then a carry into that byte's bit 7.
    let own = (u64::from(bits) * ONES) & 0x8040_2010_0804_0201;
    ((own + 0x7f * ONES) >> 7) & ONES
}

/// Sets the bits of these pages.
fn add(bits: &mut Bits, pages: Range<u64>) {
    for (word, pages) in stage2::words_of(pages) {
        if let Some(word) = bits.get_mut(word) {
            *word |= pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_of_a_word_has_the_state_of_its_bits() {
        let words = [0, 1, 1 << 63, u64::MAX, 0x8000_0000_0000_0001, 0x0123_4567_89ab_cdef, u64::MAX << 1];
        let all_bytes = (0..=u8::MAX).map(|byte| u64::from(byte) << 24);
        let words: Vec<u64> = words.into_iter().chain(all_bytes).collect();
        for dirty in &words {
            for accessed in &words {
                for (page, state) in states(*dirty, *accessed).into_iter().enumerate() {
                    let state = AccessState::from_bits_retain(state);
                    assert_eq!(state.contains(AccessState::DIRTY), dirty >> page & 1 == 1);
                    assert_eq!(state.contains(AccessState::ACCESSED), accessed >> page & 1 == 1);
                    assert_eq!(state.bits() & !AccessState::all().bits(), 0);
                }
            }
        }
    }
}
