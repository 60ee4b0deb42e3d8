//! The compared data: structs without a plan, in an array, and the same fields laid out by writer.
//!
//! The packed structs have the sizes and access patterns of those where bhyve found the problem: a vCPU that begins
//! with its lock and state and ends with its last exit, so that every exit writes the end of one vCPU and the beginning
//! of the next; records of an exit with 136 bytes; records with 24 bytes; one word for each vCPU; and the back end for
//! VT-x, with an array for each field.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use vcpu_layout::{OwnerWord, Proof, lay_out};

/// The work of one vCPU, repeated this number of times.
pub(super) type Side = Box<dyn FnMut(u32) + Send>;

/// The work of two vCPUs, each on its own core.
pub(super) struct Work(pub(super) [Side; 2]);

/// A comparison.
pub(super) struct Case {
    /// The operation.
    pub(super) kernel: &'static str,
    /// The data.
    pub(super) structure: &'static str,
    /// Operations of a batch.
    pub(super) operations: u32,
    /// Whether the two vCPUs do not communicate, so that each should run as fast as alone.
    pub(super) is_quiet: bool,
    pub(super) packed: Work,
    pub(super) laid_out: Work,
}

impl Work {
    /// Both do the same, `operation`, on a `T` that they share, each by its number and with a state of its own.
    fn shared<T: Default + Send + Sync + 'static, S: Default + Send + 'static>(
        operation: impl Fn(&T, usize, &mut S) + Copy + Send + 'static,
    ) -> Self {
        let both: Arc<CachePadded<T>> = Arc::default();
        Self([0, 1].map(|who| {
            // Other data must not share lines either: the memory of each side is on its own lines.
            let (both, mut state) = (Arc::clone(&both), CachePadded::new(S::default()));
            let side: Side = Box::new(move |times| (0..times).for_each(|_| operation(&both, who, &mut state)));
            side
        }))
    }
}

/// Fields without a plan.
#[derive(Default)]
#[repr(C)]
struct NaiveVcpu {
    state: AtomicU64,
    pending: AtomicU64,
    host_cpu: OwnerWord,
    apic: u64,
    fpu: u64,
    xcr0: u64,
    registers: [OwnerWord; 15],
    statistics: [OwnerWord; 8],
    exit: [OwnerWord; 17],
    next_instruction: OwnerWord,
}

/// Fields by writer.
#[lay_out]
#[derive(Default)]
struct LaidOutVcpu {
    #[layout(mailbox)]
    state: AtomicU64,
    #[layout(mailbox)]
    pending: AtomicU64,
    #[layout(owner)]
    host_cpu: OwnerWord,
    #[layout(frozen)]
    apic: u64,
    #[layout(frozen)]
    fpu: u64,
    #[layout(frozen)]
    xcr0: u64,
    #[layout(owner)]
    registers: [OwnerWord; 15],
    #[layout(owner)]
    statistics: [OwnerWord; 8],
    #[layout(owner)]
    exit: [OwnerWord; 17],
    #[layout(owner)]
    next_instruction: OwnerWord,
}

macro_rules! run_loop_of {
    ($name:ty) => {
        impl RunLoop for $name {
            /// Into the guest and out again: all that is written on the way of an exit that is handled at once.
            #[inline(always)]
            fn pass(&self, number: u64) {
                let proof = Proof::by_place();
                // The one locked store of an entry: the vCPU's state, before the test for pending work.
                self.state.swap(number, Ordering::SeqCst);
                black_box(self.pending.load(Ordering::Acquire));
                black_box(self.apic ^ self.fpu ^ self.xcr0);
                self.host_cpu.set(proof, number);
                self.registers[0].set(proof, number);
                self.registers[2].set(proof, number);
                self.exit[..5].iter().for_each(|word| word.set(proof, number));
                self.next_instruction.set(proof, number);
                self.statistics[..3].iter().for_each(|count| count.add(proof, 1));
                self.state.store(0, Ordering::Release);
            }

            #[inline(always)]
            fn post(&self) {
                self.pending.fetch_or(1, Ordering::SeqCst);
            }

            #[inline(always)]
            fn settle(&self) {
                if self.pending.load(Ordering::Relaxed) != 0 {
                    self.pending.swap(0, Ordering::SeqCst);
                }
            }

            #[inline(always)]
            fn count(&self) -> u64 {
                self.statistics.iter().map(OwnerWord::get).sum()
            }
        }
    };
}

trait RunLoop {
    fn pass(&self, number: u64);
    /// By the other vCPU.
    fn post(&self);
    fn settle(&self);
    /// Called by readers.
    fn count(&self) -> u64;
}

run_loop_of!(NaiveVcpu);
run_loop_of!(LaidOutVcpu);

/// Passes of a vCPU between two posts to the other one, or between two reads of its statistics.
const BETWEEN: u64 = 64;

fn passes<V: RunLoop + Default + Send + Sync + 'static>() -> Work {
    Work::shared(|vcpus: &[V; 2], who, number: &mut u64| {
        *number += 1;
        vcpus[who].pass(*number);
    })
}

fn posts<V: RunLoop + Default + Send + Sync + 'static>() -> Work {
    Work::shared(|vcpus: &[V; 2], who, number: &mut u64| {
        *number += 1;
        vcpus[who].settle();
        vcpus[who].pass(*number);
        if number.is_multiple_of(BETWEEN) {
            vcpus[1 - who].post();
        }
    })
}

fn watched<V: RunLoop + Default + Send + Sync + 'static>() -> Work {
    Work::shared(|vcpus: &[V; 2], who, number: &mut u64| {
        *number += 1;
        vcpus[who].pass(*number);
        if number.is_multiple_of(BETWEEN) {
            black_box(vcpus[1 - who].count());
        }
    })
}

/// The data of bhyve's back end for VT-x as it was: an array for each field, so that the words of neighbours are beside
/// each other. These are the arrays that an entry and an exit use.
#[derive(Default)]
#[repr(C)]
struct VmxArrays {
    vmcs: [AtomicU64; 2],
    has_tsc_offset: [AtomicU64; 2],
    capabilities: [[AtomicU64; 2]; 2],
    /// The next RIP, and the last CPU with the VPID: both are written at each exit.
    states: [[OwnerWord; 2]; 2],
}

/// The same fields, a struct for each vCPU.
#[lay_out]
#[derive(Default)]
struct VmxVcpu {
    #[layout(frozen)]
    vmcs: u64,
    #[layout(owner)]
    has_tsc_offset: OwnerWord,
    #[layout(frozen)]
    capabilities: [u64; 2],
    #[layout(owner)]
    state: [OwnerWord; 2],
}

/// An entry and an exit of VT-x. `number` is the vCPU's own, in memory, as its registers are.
fn vmx_pass(number: &mut u64, reads: u64, state: &[OwnerWord; 2]) {
    let proof = Proof::by_place();
    black_box(reads);
    state[1].set(proof, *number);
    *black_box(&mut *number) += 1;
    state[0].set(proof, *number);
}

fn vmx_arrays() -> Work {
    Work::shared(|all: &VmxArrays, who, number: &mut u64| {
        let [low, high] = &all.capabilities[who];
        let words = [&all.vmcs[who], &all.has_tsc_offset[who], low, high];
        let reads = words.into_iter().fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed));
        vmx_pass(number, reads, &all.states[who]);
    })
}

fn vmx_vcpus() -> Work {
    Work::shared(|all: &[VmxVcpu; 2], who, number: &mut u64| {
        let vcpu = &all[who];
        let [low, high] = vcpu.capabilities;
        vmx_pass(number, vcpu.vmcs ^ vcpu.has_tsc_offset.get() ^ low ^ high, &vcpu.state);
    })
}

/// The other records, laid out.
#[lay_out]
#[derive(Default)]
struct Word {
    #[layout(mailbox)]
    words: [AtomicU64; 1],
}

#[lay_out]
#[derive(Default)]
struct Info {
    #[layout(mailbox)]
    words: [AtomicU64; 3],
}

#[lay_out]
#[derive(Default)]
struct Exit {
    #[layout(mailbox)]
    words: [AtomicU64; 17],
}

/// Reads, adds, writes back, and writes a word elsewhere, as real code does between two such additions.
///
/// The other word matters: while a processor waits for a line, it combines consecutive writes to it. Without another
/// write in between it hardly waits at all ([`combined`]).
fn plain(word: &AtomicU64, elsewhere: &AtomicU64) {
    let sum = word.load(Ordering::Relaxed).wrapping_add(1);
    word.store(sum, Ordering::Relaxed);
    elsewhere.store(sum, Ordering::Relaxed);
}

/// Reads, adds, writes back, and nothing else.
fn combined(word: &AtomicU64, _: &AtomicU64) {
    word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// The same in one step.
fn locked(word: &AtomicU64, _: &AtomicU64) {
    word.fetch_add(1, Ordering::Relaxed);
}

/// Applies `operation` to the word that `choose` finds in the data of two vCPUs, and to a word of the vCPU's own.
fn each<T: Default + Send + Sync + 'static>(
    choose: fn(&T, usize) -> &AtomicU64,
    operation: impl Fn(&AtomicU64, &AtomicU64) + Copy + Send + Sync + 'static,
) -> Work {
    let both: Arc<CachePadded<T>> = Arc::default();
    Work([0, 1].map(|who| {
        let (both, elsewhere) = (Arc::clone(&both), CachePadded::<AtomicU64>::default());
        let side: Side = Box::new(move |times| {
            let word = choose(&both, who);
            (0..times).for_each(|_| operation(word, &elsewhere));
        });
        side
    }))
}

/// The words of two neighbours that are next to each other: the first one's last, the second one's first.
const fn nearest(who: usize, words: usize) -> usize {
    if who == 0 { words - 1 } else { 0 }
}

fn on_words(
    kernel: &'static str,
    operations: u32,
    operation: impl Fn(&AtomicU64, &AtomicU64) + Copy + Send + Sync + 'static,
) -> [Case; 3] {
    let case = |structure, packed, laid_out| Case { kernel, structure, operations, is_quiet: true, packed, laid_out };
    [
        case(
            "8 bytes",
            each(|all: &[[AtomicU64; 1]; 2], who| &all[who][0], operation),
            each(|all: &[Word; 2], who| &all[who].words[0], operation),
        ),
        case(
            "24 bytes",
            each(|all: &[[AtomicU64; 3]; 2], who| &all[who][nearest(who, 3)], operation),
            each(|all: &[Info; 2], who| &all[who].words[nearest(who, 3)], operation),
        ),
        case(
            "136 bytes",
            each(|all: &[[AtomicU64; 17]; 2], who| &all[who][nearest(who, 17)], operation),
            each(|all: &[Exit; 2], who| &all[who].words[nearest(who, 17)], operation),
        ),
    ]
}

/// A count that all vCPUs of a VM share, and one of each vCPU that the reader adds up.
fn counting() -> Case {
    Case {
        kernel: "statistics",
        structure: "one count for the VM",
        operations: 512,
        is_quiet: true,
        packed: each(|all: &AtomicU64, _| all, locked),
        laid_out: Work::shared(|vcpus: &[LaidOutVcpu; 2], who, (): &mut ()| {
            vcpus[who].statistics[0].add(Proof::by_place(), 1);
        }),
    }
}

/// All comparisons.
pub(super) fn cases() -> Vec<Case> {
    let vcpu = |kernel, is_quiet, packed, laid_out| Case {
        kernel,
        structure: "vCPU, 376 bytes",
        operations: 256,
        is_quiet,
        packed,
        laid_out,
    };
    let mut all = vec![
        vcpu("run loop", true, passes::<NaiveVcpu>(), passes::<LaidOutVcpu>()),
        vcpu("run loop, posting", false, posts::<NaiveVcpu>(), posts::<LaidOutVcpu>()),
        vcpu("run loop, statistics read", false, watched::<NaiveVcpu>(), watched::<LaidOutVcpu>()),
        counting(),
        Case {
            kernel: "VT-x",
            structure: "an array for each field",
            operations: 2048,
            is_quiet: true,
            packed: vmx_arrays(),
            laid_out: vmx_vcpus(),
        },
    ];
    all.extend(on_words("plain", 4096, plain));
    all.extend(on_words("plain, nothing else", 4096, combined));
    all.extend(on_words("locked", 512, locked));
    all
}

const _: () = assert!(size_of::<NaiveVcpu>() == 376, "as it is called in the results");
const _: () = assert!(size_of::<VmxArrays>() == 96, "all of it is on one line");

#[cfg(test)]
mod tests {
    use std::ptr::from_ref;

    use vcpu_layout::LINE;

    use super::*;

    fn run(Work(sides): &mut Work, times: u32) {
        sides.iter_mut().for_each(|side| side(times));
    }

    #[test]
    fn both_layouts_do_the_same() {
        fn check<V: RunLoop + Default>() -> u64 {
            let vcpu = V::default();
            vcpu.post();
            vcpu.settle();
            (0..10).for_each(|number| vcpu.pass(number));
            vcpu.count()
        }
        assert_eq!((check::<NaiveVcpu>(), check::<LaidOutVcpu>()), (30, 30));
        for mut case in cases() {
            run(&mut case.packed, 1000);
            run(&mut case.laid_out, 1000);
        }
    }

    #[test]
    fn neighbours_share_a_line_when_packed_and_none_when_laid_out() {
        let line = |word: &AtomicU64| from_ref(word).addr() / LINE;
        let packed: CachePadded<[[AtomicU64; 17]; 2]> = CachePadded::default();
        assert_eq!(line(&packed[0][nearest(0, 17)]), line(&packed[1][nearest(1, 17)]));
        let apart: CachePadded<[Exit; 2]> = CachePadded::default();
        assert_ne!(line(&apart[0].words[nearest(0, 17)]), line(&apart[1].words[nearest(1, 17)]));
        let naive: CachePadded<[NaiveVcpu; 2]> = CachePadded::default();
        let arrays: CachePadded<VmxArrays> = CachePadded::default();
        let [one, other] = [0, 1].map(|who: usize| from_ref(&arrays.states[who]).addr() / LINE);
        assert_eq!(one, other);
        let end = from_ref(&naive[0].next_instruction).addr() / LINE;
        assert_eq!(end, line(&naive[1].state), "what one writes at each exit is beside what the other writes");
    }

    #[test]
    fn every_promise_has_something_to_be_judged_by() {
        let names: Vec<_> = cases().iter().map(|case| case.kernel).collect();
        for (kernel, count) in [("run loop", 1), ("statistics", 1), ("VT-x", 1), ("plain", 3), ("locked", 3)] {
            assert_eq!(names.iter().filter(|name| **name == kernel).count(), count, "{kernel}");
        }
    }
}
