//! On which CPUs threads run.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that this program may use, in order. One, if the kernel does not say.
pub(crate) fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return vec![0] };
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Keeps this thread on these CPUs. If the kernel refuses, it works elsewhere too: the results are only less steady.
pub(crate) fn stay_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    let _ = sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn thread_stays_on_the_cpu_that_it_is_given() {
        let all = cpus();
        let last = all[all.len() - 1];
        let seen = thread::spawn(move || {
            stay_on(&[last]);
            cpus()
        });
        assert_eq!(seen.join().expect("no panic"), [last]);
        assert_eq!(cpus(), all, "other threads stay where they were");
    }
}
