//! Kicks for vCPUs that QEMU is about to stop.
//!
//! QEMU kicks each vCPU once, and one that handles an exit at that moment loses the kick: then QEMU waits for ever. So
//! they are kicked again and again. But a kicked vCPU cannot go on before it has had QEMU's lock, and QEMU holds that
//! while it reads the log of written pages: kicks then stop the whole guest for as long. A QEMU that waits for a vCPU
//! sleeps, so there are no kicks while it works.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::system;

/// How often vCPUs are kicked. More often would cost more than it saves: each kick is an exit to QEMU.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);
/// A QEMU that works for longer gets its kick nevertheless: it may be one that never sleeps.
const LONGEST: Duration = Duration::from_secs(5);

/// Whoever kicks the vCPUs of a QEMU.
#[derive(Debug)]
pub(crate) struct Kicks {
    /// QEMU's number.
    pid: u32,
    /// When there was a kick for the last time, or a reason for none.
    last: Instant,
}

impl Kicks {
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, last: Instant::now() }
    }

    /// Kicks these threads, which run vCPUs, unless QEMU works. Call it each [`PERIOD`].
    pub(crate) fn kick(&mut self, vcpus: &[u32]) {
        if self.is_due(works(Path::new(&format!("/proc/{}/task", self.pid)), vcpus), Instant::now()) {
            vcpus.iter().for_each(|thread| system::kick(self.pid, *thread));
        }
    }

    fn is_due(&mut self, works: bool, now: Instant) -> bool {
        let is_due = !works || now - self.last >= LONGEST;
        if is_due {
            self.last = now;
        }
        is_due
    }
}

/// Whether any thread but these runs, or wants to: `tasks` has a folder for each.
fn works(tasks: &Path, vcpus: &[u32]) -> bool {
    let mut others = fs::read_dir(tasks).into_iter().flatten().flatten().filter(|task| {
        let number = task.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        number.is_none_or(|number| !vcpus.contains(&number))
    });
    // The state comes after the name in brackets, which may have any letter in it (proc_pid_stat(5)).
    others.any(|task| {
        fs::read_to_string(task.path().join("stat"))
            .is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('R')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_that_sleeps_is_kicked_each_time_and_one_that_works_after_a_long_while() {
        let began = Instant::now();
        let mut kicks = Kicks { pid: 0, last: began };
        assert!(kicks.is_due(false, began + PERIOD));
        assert!(kicks.is_due(false, began + 2 * PERIOD));
        let asleep = began + 2 * PERIOD;
        assert!(!kicks.is_due(true, asleep + PERIOD));
        assert!(!kicks.is_due(true, asleep + LONGEST - PERIOD));
        assert!(kicks.is_due(true, asleep + LONGEST));
        assert!(!kicks.is_due(true, asleep + LONGEST + PERIOD));
        assert!(kicks.is_due(false, asleep + LONGEST + 2 * PERIOD));
    }

    #[test]
    fn only_threads_that_run_no_vcpu_count_as_work() {
        let tasks = tempfile::tempdir().expect("can be made");
        for (thread, stat) in [
            (10, "10 (qemu-system-x86) S 1 10"),
            (11, "11 (CPU 0/MSHV) R 1 10"),
            (12, "12 (mig) R (x) S 1 10"),
            (13, "13 (ended) Z"),
        ] {
            let folder = tasks.path().join(thread.to_string());
            fs::create_dir(&folder).expect("is not there");
            fs::write(folder.join("stat"), stat).expect("can be written");
        }
        assert!(!works(tasks.path(), &[11]));
        assert!(works(tasks.path(), &[]));
        assert!(works(tasks.path(), &[10, 12]));
        fs::write(tasks.path().join("10/stat"), "10 (a) b) R 1 10").expect("is there");
        assert!(works(tasks.path(), &[11]));
        assert!(!works(Path::new("/nowhere/at/all"), &[]));
    }

    #[test]
    fn thread_of_this_process_that_computes_is_seen() {
        let tasks = Path::new("/proc/self/task");
        assert!(works(tasks, &[]), "this thread runs");
    }
}
