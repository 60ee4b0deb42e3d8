//! Which pCPUs run vCPUs.

use crate::{CpuId, CpuSet};

/// The pCPUs that run vCPUs, on a machine whose pCPUs belong to these cores.
///
/// `spares_first`: the first pCPU does not, if there is another. `one_per_core`: of the threads of a core only the
/// first does, so that no two vCPUs ever share the buffers and predictions of a core.
#[must_use]
pub fn runners(cores: impl Iterator<Item = u64> + Clone, spares_first: bool, one_per_core: bool) -> CpuSet {
    let skipped = usize::from(spares_first && cores.clone().nth(1).is_some());
    let used = (0..u64::BITS).zip(cores.clone()).skip(skipped).filter(|(number, core)| {
        let earlier = cores.clone().skip(skipped).take((*number as usize).saturating_sub(skipped));
        !one_per_core || !earlier.clone().any(|other| other == *core)
    });
    CpuSet(used.fold(0, |set, (number, _)| set | 1 << CpuId(number).0))
}

#[cfg(test)]
mod tests {
    use super::runners;
    use crate::CpuSet;

    fn of(cores: &[u64], spares_first: bool, one_per_core: bool) -> CpuSet {
        runners(cores.iter().copied(), spares_first, one_per_core)
    }

    #[test]
    fn all_pcpus_run_vcpus_but_the_first_if_it_is_spared_and_not_the_only_one() {
        assert_eq!(of(&[0, 0, 1, 1], false, false), CpuSet(0b1111));
        assert_eq!(of(&[0, 0, 1, 1], true, false), CpuSet(0b1110));
        assert_eq!(of(&[7], true, false), CpuSet(1));
        assert_eq!(of(&[], true, true), CpuSet(0));
    }

    #[test]
    fn one_thread_of_each_core_runs_vcpus_in_whatever_order_they_come() {
        assert_eq!(of(&[0, 0, 1, 1], false, true), CpuSet(0b0101));
        assert_eq!(of(&[0, 1, 0, 1], false, true), CpuSet(0b0011));
        assert_eq!(of(&[3, 3, 3, 3, 9], false, true), CpuSet(0b1_0001));
        assert_eq!(of(&[0, 1, 2, 3], false, true), CpuSet(0b1111), "no core has a second thread");
    }

    #[test]
    fn sibling_of_a_spared_pcpu_takes_its_place() {
        assert_eq!(of(&[0, 0], true, true), CpuSet(0b10));
        assert_eq!(of(&[0, 0, 1, 1], true, true), CpuSet(0b0110));
        assert_eq!(of(&[0], true, true), CpuSet(1));
    }
}
