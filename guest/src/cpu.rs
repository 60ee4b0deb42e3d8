//! The CPUs of the guest, and how they get work.
//!
//! CPU 0 runs the experiments. The others sleep with interrupts on until they get a job: a function that is called with
//! the CPU's index. A CPU is busy from the moment when it gets a job until it has returned from it.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use guest_model::cpu_set::CpuSet;
use spin::Mutex;

use crate::arch::boot::{self, BootInfo, MAX_CPUS};
use crate::arch::{control, controller, interrupts, remote, tsc};
use crate::interrupt::WAKE;
use crate::record::record;

/// Work for one CPU.
pub(crate) type Job = fn(usize);

#[repr(align(128))]
struct Cpu {
    hardware_id: AtomicU32,
    up: AtomicBool,
    busy: AtomicBool,
    job: Mutex<Option<Job>>,
}

static CPUS: [Cpu; MAX_CPUS] = [const {
    Cpu {
        hardware_id: AtomicU32::new(0),
        up: AtomicBool::new(false),
        busy: AtomicBool::new(false),
        job: Mutex::new(None),
    }
}; MAX_CPUS];

/// Whether there are CPUs that the guest was told not to start.
static STRANGERS: AtomicBool = AtomicBool::new(false);

/// CPUs that were found and started.
static COUNT: AtomicUsize = AtomicUsize::new(1);

/// Finds the CPUs in the firmware tables and starts up to `limit` of them. Returns how many did not come up.
pub(crate) fn start_all(info: &BootInfo, limit: usize) -> usize {
    let own = control::hardware_id();
    CPUS[0].hardware_id.store(own, Ordering::SeqCst);
    CPUS[0].up.store(true, Ordering::SeqCst);

    let Some(others) = boot::find_others(info, own) else {
        record!("note", about = "no-firmware-tables", cpus = 1);
        return 0;
    };
    STRANGERS.store(others.iter().flatten().count() >= limit.min(MAX_CPUS), Ordering::SeqCst);

    let mut missing = 0;
    for hardware_id in others.into_iter().flatten() {
        let index = count();
        if index >= limit.min(MAX_CPUS) {
            break;
        }
        CPUS[index].hardware_id.store(hardware_id, Ordering::SeqCst);
        if start(index) {
            COUNT.store(index + 1, Ordering::SeqCst);
        } else {
            missing += 1;
            record!("error", about = "cpu-did-not-start", hardware_id = hardware_id);
        }
    }
    missing
}

/// Starts CPU `index`, which is off (on x86-64: in any state). Returns whether it came up.
pub(crate) fn start(index: usize) -> bool {
    let cpu = &CPUS[index];
    cpu.up.store(false, Ordering::SeqCst);
    let up = boot::start_cpu(index, hardware_id(index), || cpu.up.load(Ordering::SeqCst));
    if up {
        // A former job ended with the restart.
        cpu.busy.store(false, Ordering::SeqCst);
    }
    up
}

/// Whether all CPUs of the machine belong to the guest, except those that failed to come up. Then an interrupt to all
/// others reaches no foreign CPU.
pub(crate) fn all_are_ours() -> bool {
    !STRANGERS.load(Ordering::Relaxed)
}

/// Number of CPUs, including CPU 0.
pub(crate) fn count() -> usize {
    COUNT.load(Ordering::Relaxed)
}

/// How the machine names CPU `index`: its APIC id, or its affinity.
pub(crate) fn hardware_id(index: usize) -> u32 {
    CPUS[index].hardware_id.load(Ordering::Relaxed)
}

/// Gives CPU `index` (not 0) a job. Answers whether it was free to take it.
pub(crate) fn give(index: usize, job: Job) -> bool {
    let cpu = &CPUS[index];
    if !cpu.up.load(Ordering::SeqCst) || cpu.busy.swap(true, Ordering::SeqCst) {
        return false;
    }
    interrupts::held_off(|| *cpu.job.lock() = Some(job));
    controller::send(hardware_id(index), WAKE);
    true
}

/// Whether CPU `index` has no job.
pub(crate) fn is_free(index: usize) -> bool {
    !CPUS[index].busy.load(Ordering::SeqCst)
}

/// Counts CPU `index` as gone: it gets no more jobs.
pub(crate) fn retire(index: usize) {
    CPUS[index].up.store(false, Ordering::SeqCst);
}

/// Whether CPU `index` can be given jobs.
pub(crate) fn is_up(index: usize) -> bool {
    CPUS[index].up.load(Ordering::SeqCst)
}

/// The CPUs that can be given jobs.
pub(crate) fn up() -> CpuSet {
    (0..count()).filter(|index| is_up(*index)).collect()
}

/// Waits, with interrupts on, until `done` or for `patience` ticks. Answers whether it is done.
pub(crate) fn wait_until(patience: u64, done: impl Fn() -> bool) -> bool {
    let last = tsc::now().saturating_add(patience);
    interrupts::enable();
    let result = loop {
        if done() {
            break true;
        }
        if tsc::now() > last {
            break done();
        }
        core::hint::spin_loop();
    };
    interrupts::disable();
    result
}

/// Waits until all CPUs but 0 are free. Answers the first that is not, after `patience` ticks.
pub(crate) fn wait_for_all(patience: u64) -> Option<usize> {
    let all_free = || (1..count()).all(|index| !is_up(index) || is_free(index));
    if wait_until(patience, all_free) { None } else { (1..count()).find(|index| is_up(*index) && !is_free(*index)) }
}

/// The loop of all CPUs except 0.
pub(crate) fn serve(index: usize) -> ! {
    let cpu = &CPUS[index];
    remote::prepare_cpu(index);
    cpu.up.store(true, Ordering::SeqCst);
    loop {
        let job = cpu.job.lock().take();
        match job {
            Some(job) => {
                job(index);
                interrupts::disable();
                cpu.busy.store(false, Ordering::SeqCst);
            }
            // Interrupts are off, so a job given after the check above wakes this CPU at once.
            None => interrupts::sleep(),
        }
    }
}
