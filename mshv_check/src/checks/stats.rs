//! Counters that the kernel reads from pages of the hypervisor, and shows in debugfs: they are there, they count what
//! guests do, and they end with the guest. Only for kernels with `CONFIG_DEBUG_FS`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::run::small;
use super::{Figures, figures};
use crate::device::Device;
use crate::device::register::RIP;
use crate::guest::COUNTER;
use crate::running::Running;

const FOLDER: &str = "/sys/kernel/debug/mshv/partition";
/// Exits of the guest.
const EXITS: u64 = 2000;
/// A page may be 110 ms old. Much more, for a busy emulator.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(device: &Device) -> Result<Figures> {
    let folder = Path::new(FOLDER);
    let own = folder.join("self");
    ensure!(own.is_dir(), "no {}: is debugfs mounted, and has the kernel CONFIG_DEBUG_FS?", own.display());
    let before = Counters::read(&own)?;
    let cpus = std::thread::available_parallelism()?.get() as u64;
    before.must_be("PtVirtualProcessors", cpus)?;
    before.must_be("PtNumberofActiveChildPartitions", 0)?;
    let calls = Counters::read(&own.join("vp/0"))?.get("VpHypercallsCount")?;
    let known = partitions(folder)?;

    let (partition, vp, memory) = small(device, &COUNTER)?;
    let new: Vec<PathBuf> = partitions(folder)?.into_iter().filter(|path| !known.contains(path)).collect();
    let [child] = new.as_slice() else { bail!("{} new folders in {FOLDER} instead of one", new.len()) };
    let running = Running::start(vp, |vp, message| Ok(vp.set(&[(RIP, u128::from(message.next_rip()))])?));
    let started = Instant::now();
    while running.messages() < EXITS {
        ensure!(!running.has_ended(), "the guest has ended: {:?}", running.stop().map(|_| ()));
        ensure!(started.elapsed() < Duration::from_secs(120), "only {} exits", running.messages());
        std::thread::sleep(Duration::from_millis(5));
    }
    let vp = running.stop()?;

    let child_vp = child.join("vp/0");
    let of_vp = wait_until(&child_vp, "its port accesses", |now| Ok(now.get("VpIoInstructionsCount")? >= EXITS))?;
    let run_time = of_vp.get("VpTotalRunTime")?;
    // 100 ns each: it cannot have run for longer than it has existed.
    let most = started.elapsed().as_nanos() / 100;
    ensure!(run_time > 0 && u128::from(run_time) <= most, "a run time of {run_time}, where {most} have passed");
    ensure!(of_vp.get("VpRootDispatchThreadBlocked")? == 0, "the root's scheduler does not run it");
    let of_child = Counters::read(child)?;
    of_child.must_be("PtVirtualProcessors", 1)?;
    let deposited = of_child.get("PtDepositedPages")?;
    ensure!(deposited > 0, "no page is deposited for it");
    let now = wait_until(&own, "the child", |now| Ok(now.get("PtNumberofActiveChildPartitions")? == 1))?;
    ensure!(now.get("PtDepositedPages")? >= deposited, "fewer pages deposited in all than for the child");
    wait_until(&own.join("vp/0"), "hypercalls of this CPU", |now| Ok(now.get("VpHypercallsCount")? > calls))?;

    drop((vp, partition, memory));
    wait_until(&own, "the child's end", |now| {
        Ok(now.get("PtNumberofActiveChildPartitions")? == 0 && now.get("PtDepositedPages")? == 0)
    })?;
    ensure!(!child.exists(), "{} is still there", child.display());
    Ok(figures([("exits", EXITS), ("counted", of_vp.get("VpIoInstructionsCount")?), ("deposited", deposited)]))
}

fn partitions(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    Ok(entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<_>>()?)
}

/// Reads the counters in `folder` again and again, until they show something.
fn wait_until(folder: &Path, what: &str, is_shown: impl Fn(&Counters) -> Result<bool>) -> Result<Counters> {
    let started = Instant::now();
    loop {
        let now = Counters::read(folder)?;
        if is_shown(&now)? {
            return Ok(now);
        }
        ensure!(started.elapsed() < PATIENCE, "{} does not show {what}: {:?}", folder.display(), now.0);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Counters by name.
struct Counters(BTreeMap<String, u64>);

impl Counters {
    fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("stats");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::parse(&text)
    }

    /// A line for each: name, spaces, a colon, number.
    fn parse(text: &str) -> Result<Self> {
        let counter = |line: &str| {
            let (name, number) = line.split_once(':').with_context(|| format!("not a counter: {line}"))?;
            Ok((name.trim().to_owned(), number.trim().parse().with_context(|| format!("not a number: {line}"))?))
        };
        text.lines().map(counter).collect::<Result<_>>().map(Self)
    }

    fn get(&self, name: &str) -> Result<u64> {
        self.0.get(name).copied().with_context(|| format!("no counter {name}"))
    }

    fn must_be(&self, name: &str, expected: u64) -> Result<()> {
        let found = self.get(name)?;
        ensure!(found == expected, "{name} is {found} instead of {expected}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_as_the_kernel_prints_them() {
        let text = "VpTotalRunTime                             : 12\nVpHypercallsCount                          : 3\n";
        let counters = Counters::parse(text).expect("is right");
        assert_eq!(counters.get("VpHypercallsCount").expect("is there"), 3);
        assert!(counters.get("VpIdealCpu").is_err());
        assert!(counters.must_be("VpTotalRunTime", 11).is_err());
        assert!(Counters::parse("VpIdealCpu\n").is_err());
    }
}
