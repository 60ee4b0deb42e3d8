//! The cost of the hypervisor's own code for tags on this computer, natively.
//!
//! Each round measures all figures in turn, so that other work on the computer affects all of them alike. The results
//! are medians over many rounds, minus the empty loop. Cycles are derived from a chain of multiplications and
//! additions, whose latency is the same on all current x86-64 and AArch64 cores (3 and 1 cycles). It is measured in the
//! same round, so no performance counter is needed, and a change of the core's clock affects both.

use std::hint::black_box;
use std::time::Instant;

use tlb_tag::{CpuTags, Pool, Scheme, TagRange, VcpuTags};

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    /// The operation.
    pub(super) name: &'static str,
    /// Cycles per operation beyond the empty loop: the median of all rounds.
    pub(super) cycles: f64,
    /// The smallest of the rounds.
    pub(super) min: f64,
    /// The largest of the rounds.
    pub(super) max: f64,
    /// All of them, the smallest first.
    pub(super) rounds: Vec<f64>,
}

const ROUNDS: usize = 31;
const OPERATIONS: u32 = 20_000;
/// Cycles of one step of the chain.
const CHAIN_CYCLES: f64 = 4.0;

/// Measures everything; takes about a second.
pub(super) fn all() -> Vec<Figure> {
    let mut subjects = subjects();
    let mut rounds: Vec<Vec<f64>> = (0..subjects.len()).map(|_| Vec::new()).collect();
    for round in 0..=ROUNDS {
        let cycle = chain() / CHAIN_CYCLES;
        let empty = nanos(&mut || {
            black_box(0_u64);
        });
        for (subject, results) in subjects.iter_mut().zip(&mut rounds) {
            let result = (nanos(&mut subject.operation) - empty) / cycle;
            // The first round warms up.
            if round > 0 {
                results.push(result);
            }
        }
    }
    let figures = subjects.iter().zip(rounds).map(|(subject, mut results)| {
        results.sort_unstable_by(f64::total_cmp);
        let (cycles, min, max) = (results[ROUNDS / 2], results[0], results[ROUNDS - 1]);
        Figure { name: subject.name, cycles, min, max, rounds: results }
    });
    figures.collect()
}

struct Subject {
    name: &'static str,
    operation: Box<dyn FnMut()>,
}

fn subjects() -> Vec<Subject> {
    let mut epoch = rig(Scheme::Epoch, 63);
    let check = rig(Scheme::Epoch, 63);
    let mut generation = rig(Scheme::Generation, 63);
    let mut assignment = rig(Scheme::Generation, u32::MAX);
    let mut rollover = rig(Scheme::Generation, 1);
    let mut flush = rig(Scheme::Epoch, 63);
    let mut arrival = rig(Scheme::Epoch, 63);
    vec![
        Subject::new("epoch: check alone", move || {
            black_box(check.vcpu.is_current(&check.cpu, black_box(0)));
        }),
        Subject::new("epoch: check and entry", move || enter(&mut epoch, 0)),
        Subject::new("generation: check and entry", move || enter(&mut generation, 0)),
        Subject::new("generation: assignment", move || {
            assignment.vcpu.void();
            enter(&mut assignment, 0);
        }),
        Subject::new("generation: new generation", move || {
            rollover.vcpu.void();
            enter(&mut rollover, 0);
        }),
        Subject::new("epoch: flush of own tag", move || {
            flush.vcpu.void();
            enter(&mut flush, 0);
        }),
        Subject::new("epoch: arrival from another pCPU", move || {
            arrival.vcpu.arrive(&mut arrival.cpu, false);
            enter(&mut arrival, 0);
        }),
    ]
}

impl Subject {
    fn new(name: &'static str, operation: impl FnMut() + 'static) -> Self {
        Self { name, operation: Box::new(operation) }
    }
}

struct Rig {
    cpu: CpuTags,
    vcpu: VcpuTags,
}

fn rig(scheme: Scheme, tags: u32) -> Rig {
    let pool = Pool::new(scheme, TagRange::new(1, tags), true);
    let (mut cpu, mut vcpu) = (pool.cpu(), pool.vcpu());
    vcpu.arrive(&mut cpu, false);
    vcpu.enter(&mut cpu, 0).completed();
    Rig { cpu, vcpu }
}

#[inline]
fn enter(rig: &mut Rig, epoch: u64) {
    let entry = rig.vcpu.enter(&mut rig.cpu, black_box(epoch));
    let _ = black_box((entry.tag(), entry.flush()));
    entry.completed();
}

/// Nanoseconds per operation.
fn nanos(operation: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..OPERATIONS {
        operation();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS)
}

/// Nanoseconds per step of the chain.
fn chain() -> f64 {
    let mut value = black_box(1_u64);
    let factor = black_box(0x5851_f42d_4c95_7f2d_u64);
    let start = Instant::now();
    for _ in 0..OPERATIONS {
        value = value.wrapping_mul(factor).wrapping_add(1);
    }
    let elapsed = start.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS);
    black_box(value);
    elapsed
}

#[cfg(test)]
mod tests {
    use tlb_tag::Flush;

    use super::{Scheme, all, rig};

    #[test]
    fn every_operation_does_what_its_name_says() {
        let mut epoch = rig(Scheme::Epoch, 63);
        assert!(epoch.vcpu.is_current(&epoch.cpu, 0));
        epoch.vcpu.void();
        assert_eq!(epoch.vcpu.enter(&mut epoch.cpu, 0).flush(), Flush::Tag);
        epoch.vcpu.enter(&mut epoch.cpu, 0).completed();
        epoch.vcpu.arrive(&mut epoch.cpu, false);
        assert_eq!(epoch.vcpu.enter(&mut epoch.cpu, 0).flush(), Flush::Tag);

        let mut assignment = rig(Scheme::Generation, u32::MAX);
        assignment.vcpu.void();
        let entry = assignment.vcpu.enter(&mut assignment.cpu, 0);
        assert_eq!((entry.assigned(), entry.new_generation(), entry.flush()), (true, false, Flush::Nothing));

        let mut rollover = rig(Scheme::Generation, 1);
        rollover.vcpu.void();
        let entry = rollover.vcpu.enter(&mut rollover.cpu, 0);
        assert_eq!((entry.assigned(), entry.new_generation(), entry.flush()), (true, true, Flush::Everything));
    }

    #[test]
    fn least_median_and_greatest_are_in_order() {
        for figure in all() {
            assert!(figure.min <= figure.cycles && figure.cycles <= figure.max, "{figure:?}");
        }
    }
}
