//! The circumstances of a measurement: the computer, the build, and the load by other processes.
//!
//! Times on an emulated machine need free cores. The tool measures the load: the CPU time of all processes, minus that
//! of itself and its children.

use std::fs;
use std::thread::available_parallelism;

use serde_json::{Value, json};

/// Cores of this computer that we may use.
pub(super) fn host_cores() -> u32 {
    available_parallelism().ok().and_then(|cores| u32::try_from(cores.get()).ok()).unwrap_or(1)
}

/// The computer, its QEMU and this build, for JSON; `run` is the JSON of any run.
pub(super) fn machine(run: &Value) -> Value {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    json!({
        "cores": host_cores(),
        "processor": processor(&text),
        "qemu": run["qemu"],
        "accel": run["accel"],
        "dunlin": run["host"]["version"],
        "commit": env!("DUNLIN_COMMIT"),
    })
}

/// The circumstances of a run for its records, without the guests' output.
pub(super) fn emulator(run: &Value) -> Value {
    json!({ "qemu": run["qemu"], "accel": run["accel"], "cpu_model": run["cpu_model"], "arch": run["arch"] })
}

fn processor(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name)
}

/// Use of the computer from some moment on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    start: Option<Use>,
}

/// Ticks of CPU time (the kernel's USER_HZ) since the computer, or we, started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    /// Of all processes, and stolen by a hypervisor below.
    busy: u64,
    /// Of all cores, idle or not.
    all: u64,
    /// Our own time: this process, and those of its children that have ended.
    ours: u64,
}

impl Watch {
    /// Starts to watch.
    pub(super) fn start() -> Self {
        Self { start: Use::now() }
    }

    /// The share of the computer that other processes have used since, from 0 to 1; `None` if the kernel does not
    /// report it.
    pub(super) fn others(self) -> Option<f64> {
        self.start?.others_until(Use::now()?)
    }
}

impl Use {
    fn now() -> Option<Self> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let own = fs::read_to_string("/proc/self/stat").ok()?;
        let (busy, all) = whole(&stat)?;
        Some(Self { busy, all, ours: ours(&own)? })
    }

    fn others_until(self, end: Self) -> Option<f64> {
        let all = end.all.checked_sub(self.all).filter(|&all| all > 0)?;
        let busy = end.busy.saturating_sub(self.busy);
        let ours = end.ours.saturating_sub(self.ours);
        Some(busy.saturating_sub(ours) as f64 / all as f64)
    }
}

/// Busy ticks and all ticks, from the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq,
/// steal.
fn whole(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_ascii_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    let all: u64 = ticks.iter().sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((all.saturating_sub(idle), all))
}

/// User and system ticks of a process and of its children that have ended: fields 14 to 17 of `/proc/PID/stat`.
fn ours(stat: &str) -> Option<u64> {
    // The second field is a name in parentheses, which may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: Vec<u64> = rest.split_ascii_whitespace().skip(11).take(4).map_while(|word| word.parse().ok()).collect();
    (ticks.len() == 4).then(|| ticks.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_read_from_what_the_kernel_writes() {
        assert_eq!(whole("cpu  10 1 5 100 4 2 3 7 50 50\ncpu0 1 2\n"), Some((28, 132)));
        assert_eq!(whole("cpu  10 1\n"), None);
        let stat = "123 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3000 400 20 0 1";
        assert_eq!(ours(stat), Some(3520));
        assert_eq!(ours("123 (a) S 1"), None);
    }

    #[test]
    fn others_are_what_is_left_of_the_busy_time() {
        let start = Use { busy: 100, all: 1000, ours: 50 };
        assert_eq!(start.others_until(Use { busy: 300, all: 1400, ours: 150 }), Some(0.25));
        assert_eq!(start.others_until(Use { busy: 110, all: 1400, ours: 150 }), Some(0.0));
        assert_eq!(start.others_until(start), None);
    }

    #[test]
    fn name_of_the_processor_is_what_follows_the_colon() {
        assert_eq!(processor("vendor_id\t: X\nmodel name\t: Some CPU @ 2 GHz\n"), Some("Some CPU @ 2 GHz"));
        assert_eq!(processor(""), None);
    }
}
