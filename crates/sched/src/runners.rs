//! Which pCPUs run vCPUs.

use crate::{CpuId, CpuSet};

/// How vCPUs use the threads of a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Smt {
    /// Each thread runs whatever waits.
    On,
    /// Only one thread of each core runs vCPUs, so that no two ever share the buffers and predictions of a core.
    Off,
    /// All threads of a core run vCPUs of one VM at a time.
    Core,
}

/// The pCPUs that run vCPUs, on a machine whose pCPUs belong to these cores.
///
/// `spares_first`: the first pCPU does not, if there is another.
#[must_use]
pub fn runners(cores: impl Iterator<Item = u64> + Clone, spares_first: bool, smt: Smt) -> CpuSet {
    let skipped = usize::from(spares_first && cores.clone().nth(1).is_some());
    let used = (0..u64::BITS).zip(cores.clone()).skip(skipped).filter(|(number, core)| {
        let earlier = cores.clone().skip(skipped).take((*number as usize).saturating_sub(skipped));
        smt != Smt::Off || !earlier.clone().any(|other| other == *core)
    });
    used.fold(CpuSet::NONE, |set, (number, _)| set.with(CpuId(number)))
}

/// The pCPUs that run vCPUs of one VM at a time together with `cpu`, which is one of them: of its core, with
/// [`Smt::Core`].
#[must_use]
pub fn mates(cpu: CpuId, cores: impl Iterator<Item = u64> + Clone, runners: CpuSet, smt: Smt) -> CpuSet {
    let alone = CpuSet::NONE.with(cpu);
    let Some(core) = cores.clone().nth(cpu.index()) else { return alone };
    if smt != Smt::Core || !runners.contains(cpu) {
        return alone;
    }
    let same = (0..u64::BITS).zip(cores).filter(|(_, other)| *other == core);
    same.fold(CpuSet::NONE, |set, (number, _)| set.with(CpuId(number))).and(runners)
}

#[cfg(test)]
mod tests {
    use super::{Smt, mates, runners};
    use crate::{CpuId, CpuSet};

    fn of(cores: &[u64], spares_first: bool, smt: Smt) -> CpuSet {
        runners(cores.iter().copied(), spares_first, smt)
    }

    #[test]
    fn all_pcpus_run_vcpus_but_the_first_if_it_is_spared_and_not_the_only_one() {
        assert_eq!(of(&[0, 0, 1, 1], false, Smt::On), CpuSet(0b1111));
        assert_eq!(of(&[0, 0, 1, 1], true, Smt::On), CpuSet(0b1110));
        assert_eq!(of(&[7], true, Smt::On), CpuSet(1));
        assert_eq!(of(&[], true, Smt::Off), CpuSet(0));
    }

    #[test]
    fn one_thread_of_each_core_runs_vcpus_in_whatever_order_they_come() {
        assert_eq!(of(&[0, 0, 1, 1], false, Smt::Off), CpuSet(0b0101));
        assert_eq!(of(&[0, 1, 0, 1], false, Smt::Off), CpuSet(0b0011));
        assert_eq!(of(&[3, 3, 3, 3, 9], false, Smt::Off), CpuSet(0b1_0001));
        assert_eq!(of(&[0, 1, 2, 3], false, Smt::Off), CpuSet(0b1111), "no core has a second thread");
    }

    #[test]
    fn sibling_of_a_spared_pcpu_takes_its_place() {
        assert_eq!(of(&[0, 0], true, Smt::Off), CpuSet(0b10));
        assert_eq!(of(&[0, 0, 1, 1], true, Smt::Off), CpuSet(0b0110));
        assert_eq!(of(&[0], true, Smt::Off), CpuSet(1));
    }

    #[test]
    fn threads_of_a_core_are_mates_only_if_cores_are_scheduled() {
        let cores = [0, 0, 1, 0, 1, 2];
        let of = |cpu, smt| mates(CpuId(cpu), cores.into_iter(), runners(cores.into_iter(), true, smt), smt);
        assert_eq!(of(1, Smt::Core), CpuSet(0b1010), "the first pCPU runs no vCPUs");
        assert_eq!([of(2, Smt::Core), of(4, Smt::Core)], [CpuSet(0b1_0100); 2]);
        assert_eq!(of(5, Smt::Core), CpuSet(1 << 5));
        assert_eq!([of(0, Smt::Core), of(9, Smt::Core)], [CpuSet(1), CpuSet(1 << 9)], "one that runs none, or is none");
        assert_eq!([of(2, Smt::On), of(2, Smt::Off)], [CpuSet(0b100); 2]);
    }
}
