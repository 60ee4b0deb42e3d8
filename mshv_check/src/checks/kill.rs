//! Processes with running guests are killed at random moments. The kernel ends their partitions.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::memory::Watched;
use super::{Figures, figures, tell};
use crate::balance::Balance;
use crate::device::Device;
use crate::options::VICTIM;

/// How long the kernel may take to end a partition. Much more than it takes on a busy emulator.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(device: &Device, rounds: u64, seed: u64) -> Result<Figures> {
    // The first one shows that there is something to kill.
    let watched = Watched::start(device, 2).context("the guest that is to be killed")?;
    watched.stop()?;
    let balance = Balance::before()?;
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..rounds {
        once(&mut random).with_context(|| format!("round {round}"))?;
        tell("killed", round + 1, rounds);
    }
    let watched = Watched::start(device, 2).context("a guest after all of these")?;
    watched.stop()?;
    let cost = balance.settle()?;
    Ok(figures([("killed", rounds), ("lost_kib", cost.lost_kib)]))
}

fn once(random: &mut fastrand::Rng) -> Result<()> {
    let program = std::env::current_exe()?;
    let mut victim = Command::new(program).arg(VICTIM).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    // Short times hit its start, long ones its guest at work.
    let most = if random.bool() { 30_000 } else { 300_000 };
    std::thread::sleep(Duration::from_micros(random.u64(0..most)));
    victim.kill()?;
    let started = Instant::now();
    while victim.try_wait()?.is_none() {
        if started.elapsed() > PATIENCE {
            bail!("the process is still there {} s after SIGKILL", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Runs guests until it is killed.
pub(super) fn victim(device: &Device, vps: u32) -> Result<Figures> {
    loop {
        let watched = Watched::start(device, vps)?;
        std::thread::sleep(Duration::from_millis(50));
        watched.stop()?;
    }
}
