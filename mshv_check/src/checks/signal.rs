//! Signals end the runs of a VP, whatever its guest does. No access of the guest is lost or repeated.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::run::small;
use super::{Figures, figures};
use crate::balance::Balance;
use crate::device::Device;
use crate::device::register::RIP;
use crate::guest::{COUNTER, HALT, LOOP};
use crate::message::Kind;
use crate::running::Running;

/// How long a run may go on after a signal.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn run(device: &Device, rounds: u64, seed: u64) -> Result<Figures> {
    let balance = Balance::before()?;
    let mut random = fastrand::Rng::with_seed(seed);
    waits(device, &HALT, rounds, &mut random).context("a guest that halts")?;
    waits(device, &LOOP, rounds, &mut random).context("a guest that loops")?;
    let exits = counts(device, rounds, &mut random).context("a guest that exits all the time")?;
    let cost = balance.settle()?;
    Ok(figures([("signals", rounds * 3), ("exits", exits), ("lost_kib", cost.lost_kib)]))
}

/// Each of `rounds` signals ends a run of a guest that does nothing.
fn waits(device: &Device, code: &[u8], rounds: u64, random: &mut fastrand::Rng) -> Result<()> {
    let (_partition, vp, _memory) = small(device, code)?;
    let running = Running::start(vp, |_, _| bail!("a message from a guest that does nothing"));
    for round in 0..rounds {
        let before = running.interrupted();
        let started = Instant::now();
        let mut sent = 0u64;
        while running.interrupted() == before {
            if running.has_ended() {
                running.stop()?;
                bail!("the guest has ended in round {round}");
            }
            if started.elapsed() > PATIENCE {
                bail!("round {round}: the run goes on {} s after {sent} signals", PATIENCE.as_secs());
            }
            // Again, because the first may come between two runs.
            running.interrupt();
            sent += 1;
            std::thread::sleep(Duration::from_micros(random.u64(50..2000)));
        }
    }
    running.stop().map(|_| ())
}

/// While signals arrive, the guest's numbers come in order and without gaps.
fn counts(device: &Device, rounds: u64, random: &mut fastrand::Rng) -> Result<u64> {
    let (_partition, vp, _memory) = small(device, &COUNTER)?;
    let mut next: u8 = 2;
    let running = Running::start(vp, move |vp, message| {
        let Kind::Port { rax, .. } = message.kind() else {
            bail!("no access to a port");
        };
        if rax & 0xff != u64::from(next) {
            bail!("{} instead of {next}", rax & 0xff);
        }
        next = next.wrapping_add(1);
        Ok(vp.set(&[(RIP, u128::from(message.next_rip()))])?)
    });
    for _ in 0..rounds {
        if running.has_ended() {
            break;
        }
        running.interrupt();
        std::thread::sleep(Duration::from_micros(random.u64(100..2000)));
    }
    let messages = running.messages();
    running.stop()?;
    if messages == 0 {
        bail!("no message has come at all");
    }
    Ok(messages)
}
