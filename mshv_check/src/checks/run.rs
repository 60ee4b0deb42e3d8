//! A guest of 13 bytes. Its port accesses come to this program, its halt does not, and a signal ends the wait.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Figures, figures};
use crate::balance::Balance;
use crate::device::register::{RAX, RIP};
use crate::device::{Device, Partition, Vp};
use crate::guest::{CODE, PORT, SUM, start_real};
use crate::message::Kind;
use crate::running::Running;
use crate::system::{Mapping, PAGE};

/// The byte that the guest reads.
const ANSWER: u64 = 0x5a;

pub(super) fn run(device: &Device, rounds: u64) -> Result<Figures> {
    let balance = Balance::before()?;
    for round in 0..rounds {
        once(device).with_context(|| format!("round {round}"))?;
    }
    let cost = balance.settle()?;
    Ok(figures([("rounds", rounds), ("lost_kib", cost.lost_kib)]))
}

/// A partition with one VP in real mode, and 16 pages of memory from address 0 on, with this code.
pub(super) fn small(device: &Device, code: &[u8]) -> Result<(Partition, Vp, Mapping)> {
    let partition = device.partition().context("a partition")?;
    let memory = Mapping::anonymous(16)?;
    memory.write(PAGE, code);
    partition.set_memory(&memory, 0).context("SET_GUEST_MEMORY")?;
    let vp = partition.create_vp(0).context("CREATE_VP")?;
    start_real(&vp, CODE).context("set of the first registers")?;
    Ok((partition, vp, memory))
}

fn once(device: &Device) -> Result<()> {
    let (_partition, vp, _memory) = small(device, &SUM)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = seen.clone();
    let running = Running::start(vp, move |vp, message| {
        let Kind::Port { port, bytes, is_write, rax } = message.kind() else {
            bail!("no access to a port");
        };
        if (port, bytes) != (PORT, 1) {
            bail!("not the access that the guest makes");
        }
        all.lock().expect("nobody panics with it").push((is_write, rax & 0xff));
        // As QEMU does it: the instruction counts as done when RIP is behind it.
        let rip = (RIP, u128::from(message.next_rip()));
        let answer = (RAX, u128::from(rax & !0xff | ANSWER));
        if !is_write {
            vp.set(&[answer])?;
        }
        Ok(vp.set(&[rip])?)
    });

    let started = Instant::now();
    while running.messages() < 3 && !running.has_ended() {
        if started.elapsed() > Duration::from_secs(60) {
            bail!("{} of 3 accesses to a port came within 60 s", running.messages());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // It halts now. Nothing may come of that.
    std::thread::sleep(Duration::from_millis(20));
    let interrupted = running.interrupted();
    let messages = running.messages();
    let vp = running.stop()?;
    ensure!((messages, interrupted) == (3, 0), "the guest's HLT has ended a run: {messages} messages");
    let seen = seen.lock().expect("nobody panics with it").clone();
    ensure!(seen[..2] == [(true, u64::from(b'4')), (true, 0)], "the guest wrote {seen:x?} instead of '4' and 0");
    ensure!(!seen[2].0, "the third access is not the read: {seen:x?}");

    let left = vp.get(&[RAX, RIP]).context("get of registers")?;
    ensure!(left[0] & 0xff == u128::from(ANSWER), "the guest has read {:#x} instead of {ANSWER:#x}", left[0] & 0xff);
    let end = u128::from(CODE) + SUM.len() as u128;
    ensure!(left[1] == end, "after HLT, RIP is {:#x} instead of {end:#x}", left[1]);
    Ok(())
}
