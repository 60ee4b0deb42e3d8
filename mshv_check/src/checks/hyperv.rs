//! The Hyper-V interface of guests, while the kernel takes away the pages that the hypervisor reads and writes.
//!
//! Each VP goes through the same steps again and again: it enables its hypercall page and flushes all TLBs by a call,
//! enables the clock's page and the VP assist page, and waits for a message of a synthetic timer. After each step it
//! checks the pages. A page that the hypervisor has forgotten stops the VP, or counts as a mistake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::memory::Compaction;
use super::{Figures, figures, tell};
use crate::balance::Balance;
use crate::device::Device;
use crate::guest::{CODE, ENLIGHTENED, start_enlightened};
use crate::message::Kind;
use crate::running::Running;
use crate::system::{Mapping, PAGE};

/// The pages of the hypercalls and of the clock, which the VPs share. The guest's code names them.
const SHARED: usize = 0x100;
const SHARED_PAGES: usize = 2;
/// The VPs' own parts: a page that stays, and those of the input, of the VP assist page and of messages.
const OWN: usize = 0x110;
const PART: usize = 4;
/// Changes between two looks at the VPs.
const BATCH: u64 = 16;
/// How long two passes may take. Much more than they take on a busy emulator.
const PATIENCE: Duration = Duration::from_secs(60);

/// What QEMU 11.1 offers to its guests.
pub(super) const SYNTHETIC_FEATURES: (u64, u64) = (0x1_0001, 0x0640_0ffb);

pub(super) fn run(device: &Device, invalidations: u64, vps: u32, seed: u64) -> Result<Figures> {
    let balance = Balance::before()?;
    let mut random = fastrand::Rng::with_seed(seed);
    let partition = device.create_partition().context("a partition")?;
    let (property, features) = SYNTHETIC_FEATURES;
    partition.set_property(property, features).context("SET_PROPERTY of its synthetic features")?;
    partition.initialize().context("INITIALIZE")?;
    let memory = Arc::new(Mapping::anonymous(OWN + PART * vps as usize)?);
    partition.set_memory(&memory, 0).context("SET_GUEST_MEMORY")?;
    memory.write(PAGE, &ENLIGHTENED);
    let mut running = Vec::new();
    for index in 0..vps {
        let vp = partition.create_vp(index).context("CREATE_VP")?;
        let own = part(index as usize) * PAGE;
        memory.set_word(own + 8, u32::try_from(SHARED * PAGE)?);
        start_enlightened(&vp, CODE, u32::try_from(own)?).context("set of the first registers")?;
        let end = memory.bytes();
        running.push(Running::start(vp, move |_, message| match message.kind() {
            // The kernel could not provide the page: it is protected at the moment.
            Kind::Memory { guest_address, is_known: true } if guest_address < end => Ok(()),
            _ => bail!("not what this guest does"),
        }));
    }

    let compaction = Compaction::start();
    let result = change(&memory, &running, invalidations, &mut random);
    let compactions = compaction.stop();
    let passes = (0..running.len()).map(|vp| u64::from(memory.word(part(vp) * PAGE))).sum();
    let messages = running.iter().map(Running::messages).sum();
    // Mistakes that the VPs have found come first: they explain the rest.
    running.into_iter().try_for_each(|running| running.stop().map(|_| ()))?;
    result?;
    drop((partition, memory));
    let cost = balance.settle()?;
    Ok(figures([
        ("invalidations", invalidations),
        ("compactions", compactions),
        ("passes", passes),
        ("messages", messages),
        ("lost_kib", cost.lost_kib),
    ]))
}

fn part(vp: usize) -> usize {
    OWN + PART * vp
}

fn change(memory: &Mapping, running: &[Running], invalidations: u64, random: &mut fastrand::Rng) -> Result<()> {
    two_passes(memory, running).context("at the start")?;
    for done in 1..=invalidations {
        let page = match random.usize(..SHARED_PAGES + running.len() * (PART - 1)) {
            shared @ ..SHARED_PAGES => SHARED + shared,
            own => {
                let (vp, page) = ((own - SHARED_PAGES) / (PART - 1), (own - SHARED_PAGES) % (PART - 1));
                part(vp) + 1 + page
            }
        };
        memory.protect(page, 1, false)?;
        std::thread::sleep(Duration::from_micros(random.u64(0..200)));
        memory.protect(page, 1, true)?;
        if done.is_multiple_of(BATCH) || done == invalidations {
            two_passes(memory, running).with_context(|| format!("after {done} invalidations"))?;
        }
        tell("invalidations", done, invalidations);
    }
    Ok(())
}

/// Waits until each VP has made two more passes, without a mistake.
fn two_passes(memory: &Mapping, running: &[Running]) -> Result<()> {
    let passes = |vp: usize| memory.word(part(vp) * PAGE);
    let before: Vec<u32> = (0..running.len()).map(passes).collect();
    let started = Instant::now();
    for (vp, before) in before.iter().enumerate() {
        while passes(vp).wrapping_sub(*before) < 2 {
            if running[vp].has_ended() {
                bail!("VP {vp} has stopped");
            }
            if started.elapsed() > PATIENCE {
                bail!("VP {vp} makes no progress: pass {} for {} s", passes(vp), PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let mistakes = memory.word(part(vp) * PAGE + 4);
        ensure!(mistakes == 0, "VP {vp} has {mistakes} times not found what the hypervisor has to do");
    }
    Ok(())
}
