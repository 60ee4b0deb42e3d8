//! The cost of an exit to the VMM. The guest reads a port in an endless loop, and the VMM only answers.
//!
//! The time is the parent's own. If its clock counts instructions (`-icount shift=0`), the figures are instructions of
//! the guest, Dunlin, the parent's kernel and this program together.

use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::run::small;
use super::{Figures, figures};
use crate::device::register::{RAX, RIP};
use crate::device::{Buffers, Device};
use crate::guest::READER;
use crate::message::Kind;

/// Exits in a row that are timed together.
const BATCH: u64 = 100;

pub(super) fn run(device: &Device, exits: u64) -> Result<Figures> {
    let (_partition, vp, _memory) = small(device, &READER)?;
    let buffers = Buffers::new(&[])?;
    let mut times = Vec::new();
    for _ in 0..exits.div_ceil(BATCH) {
        let started = Instant::now();
        for _ in 0..BATCH {
            let message = vp.run().context("RUN_VP")?;
            let Kind::Port { is_write: false, rax, .. } = message.kind() else {
                bail!("not the read of a port that the guest makes: {message:?}");
            };
            vp.set_by(&buffers, &[(RIP, u128::from(message.next_rip())), (RAX, u128::from(rax))])?;
        }
        times.push(u64::try_from(started.elapsed().as_nanos())? / BATCH);
    }
    times.sort_unstable();
    let (least, most) = (times[0], times[times.len() - 1]);
    let median = times[times.len() / 2];
    Ok(figures([("exits", exits), ("ns_median", median), ("ns_min", least), ("ns_max", most)]))
}
