//! Which pCPUs run vCPUs.

use sched::CpuSet;
use spin::Once;

use crate::arch::{Arch, Machine};
use crate::cpu::{PerCpu, all};
use crate::sync::{AtomicBool, Ordering, per_host};

per_host! {
    static RUNNERS: Once<CpuSet> = Once::new();
    static ONE_THREAD_PER_CORE: AtomicBool = AtomicBool::new(false);
}

/// With `smt=off`, only one of the threads of a core runs vCPUs. Must be called before other pCPUs start.
pub(crate) fn choose(smt: Option<&str>) {
    ONE_THREAD_PER_CORE.store(smt == Some("off"), Ordering::Relaxed);
}

/// Whether a pCPU runs vCPUs: all do, except the first if the machine requires that, and threads that are not used.
pub(super) fn runs_vcpus(cpu: &PerCpu) -> bool {
    RUNNERS.get().copied().unwrap_or_else(find_runners).contains(cpu.id)
}

/// Whoever asks first finds out for all. Nobody waits for another here.
#[cold]
fn find_runners() -> CpuSet {
    let cores = all().iter().map(|cpu| Machine::core_of(cpu));
    let found = sched::runners(cores, Machine::spares_first_cpu(), ONE_THREAD_PER_CORE.load(Ordering::Relaxed));
    *RUNNERS.call_once(|| found)
}

/// The pCPUs that run vCPUs.
pub(crate) fn runners() -> impl DoubleEndedIterator<Item = &'static PerCpu> + Clone {
    all().iter().map(|cpu| &**cpu).filter(|cpu| runs_vcpus(cpu))
}
