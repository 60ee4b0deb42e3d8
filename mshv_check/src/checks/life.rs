//! Partitions come and go, and nothing is lost.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::hyperv::SYNTHETIC_FEATURES;
use super::{Figures, figures, tell};
use crate::balance::Balance;
use crate::device::register::EXPLICIT_SUSPEND;
use crate::device::{Device, StateKind, VpPage};
use crate::system::{Mapping, PAGE};

/// How much each round makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Created, not initialized.
    Created,
    Initialized,
    /// With a VP, both of its pages, and memory.
    WithVp,
}

pub(super) fn run(device: &Device, rounds: u64) -> Result<Figures> {
    // The first ones fill the kernel's own caches.
    for _ in 0..3 {
        once(device, Extent::WithVp).context("the first partition")?;
    }
    let balance = Balance::before()?;
    for round in 0..rounds {
        let extent = match round {
            _ if round >= rounds * 3 / 4 => Extent::WithVp,
            _ if round % 10 == 9 => Extent::Created,
            _ => Extent::Initialized,
        };
        once(device, extent).with_context(|| format!("round {round}"))?;
        tell("rounds", round + 1, rounds);
    }
    let cost = balance.settle()?;
    Ok(figures([("rounds", rounds), ("lost_kib", cost.lost_kib)]))
}

fn once(device: &Device, extent: Extent) -> Result<()> {
    let partition = device.create_partition().context("CREATE_PARTITION")?;
    if extent == Extent::Created {
        return Ok(());
    }
    partition.initialize().context("INITIALIZE_PARTITION")?;
    if extent == Extent::Initialized {
        return Ok(());
    }
    let vp = partition.create_vp(0).context("CREATE_VP")?;
    for page in [VpPage::Registers, VpPage::Message] {
        vp.page(page).with_context(|| format!("mmap of the VP's page {page:?}"))?;
    }
    let memory = Mapping::anonymous(512)?;
    partition.set_memory(&memory, 0).context("SET_GUEST_MEMORY")
}

/// The pages of a VP that has just been created, and its suspension.
pub(super) fn pages(device: &Device) -> Result<Figures> {
    let partition = device.partition().context("a partition")?;
    let mut vps = Vec::new();
    for index in [0, 1, 5] {
        let vp = partition.create_vp(index).with_context(|| format!("CREATE_VP of {index}"))?;
        let registers = vp.page(VpPage::Registers).context("mmap of the register page")?;
        let first = registers.word(0);
        ensure!(first & 0xffff == 1, "the register page has version {} instead of 1", first & 0xffff);
        ensure!(first >> 16 & 0xff == 1, "the register page of VP {index} is not valid ({first:#x})");
        ensure!(registers.word(4) == 0, "the register page is dirty from the start ({:#x})", registers.word(4));
        vp.page(VpPage::Message).context("mmap of the message page")?;

        let suspended = vp.get(&[EXPLICIT_SUSPEND]).context("get of EXPLICIT_SUSPEND")?;
        ensure!(suspended == [1], "VP {index} is not suspended at first: EXPLICIT_SUSPEND is {suspended:?}");
        vps.push(vp);
    }
    for _ in 0..STATES_ROUNDS {
        states_stay_what_they_are(device)?;
    }
    Ok(figures([("vps", vps.len() as u64), ("states_rounds", STATES_ROUNDS)]))
}

/// How often the states of a VP are compared.
const STATES_ROUNDS: u64 = 200;

/// What is read of a VP that has not run, and set again, is read once more. Setting the timers wakes the VP, so a pCPU
/// may have had its registers in between.
fn states_stay_what_they_are(device: &Device) -> Result<()> {
    let partition = device.create_partition().context("a partition")?;
    let (property, features) = SYNTHETIC_FEATURES;
    partition.set_property(property, features).context("SET_PROPERTY of its synthetic features")?;
    partition.initialize().context("INITIALIZE")?;
    let vp = partition.create_vp(0).context("CREATE_VP")?;
    let pages = || StateKind::ALL.iter().map(|_| Mapping::anonymous(1)).collect::<std::io::Result<Vec<_>>>();
    let [before, after] = [pages()?, pages()?];
    for (kind, page) in StateKind::ALL.into_iter().zip(&before) {
        vp.get_state(kind, page).with_context(|| format!("get of {kind:?}"))?;
    }
    for (kind, page) in StateKind::ALL.into_iter().zip(&before) {
        vp.set_state(kind, page).with_context(|| format!("set of {kind:?}"))?;
    }
    // Time for a pCPU to look at the VP.
    thread::sleep(Duration::from_millis(5));
    for ((kind, before), after) in StateKind::ALL.into_iter().zip(&before).zip(&after) {
        vp.get_state(kind, after).with_context(|| format!("second get of {kind:?}"))?;
        if let Some(at) = (0..PAGE).step_by(4).find(|at| before.word(*at) != after.word(*at)) {
            bail!("{kind:?}, byte {at:#x}: {:#x} was set, and {:#x} is there", before.word(at), after.word(at));
        }
    }
    Ok(())
}
