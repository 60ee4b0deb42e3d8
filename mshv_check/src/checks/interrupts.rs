//! Interrupts that no local APIC knows: of a PC's old interrupt controller, its pins, NMIs. A guest in real mode writes
//! the number of each that it takes to a port, and this program asserts the next ones while it handles that exit.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::run::small;
use super::{Figures, figures};
use crate::device::register::RIP;
use crate::device::{Device, Partition};
use crate::guest::{PORT, WAITER, handler};
use crate::message::Kind;
use crate::running::Running;

/// Kinds of interrupts, as the hypercall names them.
const SMI: u64 = 2;
const NMI: u64 = 4;
const EXTERNAL: u64 = 7;
const LINT0: u64 = 8;
const LINT1: u64 = 9;

const NMI_VECTOR: u8 = 2;
const FIRST: u8 = 0x20;
const SECOND: u8 = 0x21;
/// Where the handlers are; each has 16 bytes.
const HANDLERS: u16 = 0x2000;

/// What the guest must take, in this order.
const EXPECTED: [u8; 6] = [SECOND, NMI_VECTOR, FIRST, SECOND, SECOND, NMI_VECTOR];

pub(super) fn run(device: &Device, rounds: u64) -> Result<Figures> {
    for round in 0..rounds {
        once(device).with_context(|| format!("round {round}"))?;
    }
    Ok(figures([("rounds", rounds), ("interrupts", rounds * EXPECTED.len() as u64)]))
}

/// After the guest has taken this many.
fn assert_next(partition: &Partition, taken: usize) -> std::io::Result<()> {
    match taken {
        0 => {
            // The guest does not take interrupts yet. The last one counts.
            partition.interrupt(EXTERNAL, FIRST.into())?;
            partition.withdraw_interrupts()?;
            partition.interrupt(EXTERNAL, FIRST.into())?;
            partition.interrupt(EXTERNAL, SECOND.into())
        }
        // In a handler: it goes into the handler of the NMI, and the interrupt waits for the end of both.
        1 => {
            partition.interrupt(EXTERNAL, FIRST.into())?;
            partition.interrupt(NMI, 0)
        }
        2 => Ok(()),
        3 | 4 => partition.interrupt(EXTERNAL, SECOND.into()),
        // The pins are masked, as after power-on, nothing happens at an SMI, and nothing is left of the withdrawn one.
        5 => {
            partition.interrupt(LINT0, FIRST.into())?;
            partition.interrupt(LINT1, FIRST.into())?;
            partition.interrupt(SMI, 0)?;
            partition.interrupt(EXTERNAL, FIRST.into())?;
            partition.interrupt(EXTERNAL, 0)?;
            partition.interrupt(NMI, 0)
        }
        _ => Ok(()),
    }
}

fn once(device: &Device) -> Result<()> {
    let (partition, vp, memory) = small(device, &WAITER)?;
    for number in [NMI_VECTOR, FIRST, SECOND] {
        let at = HANDLERS + u16::from(number) * 16;
        memory.write(usize::from(at), &handler(number));
        // Its entry in the interrupt vector table: offset, and segment 0.
        memory.write(usize::from(number) * 4, &u32::from(at).to_le_bytes());
    }
    let partition = Arc::new(partition);
    let taken = Arc::new(Mutex::new(Vec::new()));
    let (shared, all) = (partition.clone(), taken.clone());
    let running = Running::start(vp, move |vp, message| {
        let Kind::Port { port: PORT, bytes: 1, is_write, rax } = message.kind() else {
            bail!("not the access that the guest makes");
        };
        let count = {
            let mut all = all.lock().expect("nobody panics with it");
            if is_write {
                all.push(rax.to_le_bytes()[0]);
            }
            all.len()
        };
        assert_next(&shared, count).context("ASSERT_VIRTUAL_INTERRUPT")?;
        Ok(vp.set(&[(RIP, u128::from(message.next_rip()))])?)
    });

    let started = Instant::now();
    while running.messages() <= EXPECTED.len() as u64 && !running.has_ended() {
        if started.elapsed() > Duration::from_secs(60) {
            let taken = taken.lock().expect("nobody panics with it");
            bail!("the guest has taken only {taken:x?} of {EXPECTED:x?} within 60 s");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Nothing more may come.
    std::thread::sleep(Duration::from_millis(20));
    running.stop()?;
    let taken = taken.lock().expect("nobody panics with it").clone();
    ensure!(taken == EXPECTED, "the guest has taken {taken:x?} instead of {EXPECTED:x?}");
    Ok(())
}
