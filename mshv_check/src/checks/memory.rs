//! The kernel takes pages away from running VPs. It discards, replaces, protects and moves them.
//!
//! In each pass, each VP reads the first word of all shared pages, and stores the words in its own part. The parent
//! changes a page's frame, and writes the next number to it. Once each VP has made two more passes, it must have seen
//! that number: a VP that still has the old frame in its TLB sees another one. Pages of the VP's own only move, and
//! must keep what the VP has written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Figures, figures, reclaim, tell};
use crate::balance::Balance;
use crate::device::{Device, Partition};
use crate::guest::{CODE, WATCHER, Watch, start_watcher};
use crate::message::Kind;
use crate::running::Running;
use crate::system::{Mapping, PAGE};

/// Pages that the parent changes under the guest: half a megabyte from address 1 MiB on.
const SHARED: usize = 0x100;
const SHARED_PAGES: usize = 128;
/// The VPs' own parts, from 2 MiB on: two pages for words, and these.
pub(super) const OWN: usize = 0x200;
const OWN_PAGES: usize = 64;
const PART: usize = OWN_PAGES + 2;
/// The memory's size is a multiple of this, so that a huge page fits behind `OWN`.
const HUGE: usize = 0x200;
/// Changes between two looks at what the VPs have seen.
const BATCH: u64 = 32;
/// How long two passes may take. Much more than they take on a busy emulator.
const PATIENCE: Duration = Duration::from_secs(120);

/// VPs that watch memory.
pub(super) struct Watched {
    _partition: Partition,
    memory: Arc<Mapping>,
    running: Vec<Running>,
}

impl Watched {
    pub(super) fn start(device: &Device, vps: u32) -> Result<Self> {
        let partition = device.partition().context("a partition")?;
        let memory = Arc::new(Mapping::anonymous((OWN + PART * vps as usize).next_multiple_of(HUGE))?);
        partition.set_memory(&memory, 0).context("SET_GUEST_MEMORY")?;
        memory.write(PAGE, &WATCHER);
        let mut running = Vec::new();
        for index in 0..vps {
            let vp = partition.create_vp(index).context("CREATE_VP")?;
            let address = |page: usize| u32::try_from(page * PAGE);
            let watch = Watch {
                shared: address(SHARED)?,
                shared_pages: u32::try_from(SHARED_PAGES)?,
                own: address(part(index as usize))?,
                own_pages: u32::try_from(OWN_PAGES)?,
            };
            start_watcher(&vp, CODE, watch).context("set of the first registers")?;
            let end = memory.bytes();
            running.push(Running::start(vp, move |_, message| match message.kind() {
                // The kernel could not provide the page: it is protected or unmapped at the moment.
                Kind::Memory { guest_address, .. } if guest_address < end => Ok(()),
                _ => bail!("not what this guest does"),
            }));
        }
        Ok(Self { _partition: partition, memory, running })
    }

    pub(super) fn memory(&self) -> &Mapping {
        &self.memory
    }

    fn passes(&self, vp: usize) -> u32 {
        self.memory.word(part(vp) * PAGE)
    }

    /// Waits until each VP has made two more passes: the second one began after this.
    fn two_passes(&self) -> Result<()> {
        let before: Vec<u32> = (0..self.running.len()).map(|vp| self.passes(vp)).collect();
        let started = Instant::now();
        for (vp, before) in before.iter().enumerate() {
            while self.passes(vp).wrapping_sub(*before) < 2 {
                if self.running[vp].has_ended() {
                    bail!("VP {vp} has stopped");
                }
                if started.elapsed() > PATIENCE {
                    bail!("VP {vp} makes no progress: pass {} for {} s", self.passes(vp), PATIENCE.as_secs());
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    fn check(&self, expected: &[u32]) -> Result<()> {
        for vp in 0..self.running.len() {
            let part = part(vp) * PAGE;
            let lost = self.memory.word(part + 4);
            ensure!(lost == 0, "VP {vp} has {lost} times not found what it had written to a page of its own");
            for (page, expected) in expected.iter().enumerate() {
                let seen = self.memory.word(part + PAGE + page * 4);
                ensure!(seen == *expected, "VP {vp} sees {seen} in page {page}, two passes after it became {expected}");
            }
        }
        Ok(())
    }

    pub(super) fn stop(self) -> Result<u64> {
        let messages = self.running.iter().map(Running::messages).sum();
        self.running.into_iter().try_for_each(|running| running.stop().map(|_| ()))?;
        Ok(messages)
    }
}

fn part(vp: usize) -> usize {
    OWN + PART * vp
}

/// By what the kernel takes pages away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Means {
    /// What every kernel can.
    Usual,
    /// Also swap, merging and huge pages.
    Reclaim,
}

pub(super) fn run(device: &Device, invalidations: u64, vps: u32, seed: u64) -> Result<Figures> {
    torture(device, invalidations, vps, seed, Means::Usual)
}

pub(super) fn torture(device: &Device, invalidations: u64, vps: u32, seed: u64, means: Means) -> Result<Figures> {
    let balance = Balance::before()?;
    let mut random = fastrand::Rng::with_seed(seed);
    let watched = Watched::start(device, vps)?;
    let compaction = Compaction::start();
    let permitted = if means == Means::Reclaim { reclaim::permit(&watched.memory) } else { Ok(()) };
    let result = permitted.and_then(|()| change(&watched, invalidations, &mut random, means));
    let compactions = compaction.stop();
    let passes = (0..watched.running.len()).map(|vp| u64::from(watched.passes(vp))).sum();
    let stopped = watched.stop();
    // Mistakes that the VPs have found come first: they explain the rest.
    let messages = match (stopped, result) {
        (Err(why), _) | (Ok(_), Err(why)) => return Err(why),
        (Ok(messages), Ok(())) => messages,
    };
    let cost = balance.settle()?;
    Ok(figures([
        ("invalidations", invalidations),
        ("compactions", compactions),
        ("passes", passes),
        ("messages", messages),
        ("lost_kib", cost.lost_kib),
    ]))
}

fn change(watched: &Watched, invalidations: u64, random: &mut fastrand::Rng, means: Means) -> Result<()> {
    let memory = &watched.memory;
    let mut expected = vec![0u32; SHARED_PAGES];
    watched.two_passes().context("at the start")?;
    for done in 1..=invalidations {
        let at = random.usize(0..SHARED_PAGES);
        let count = random.usize(1..=4).min(SHARED_PAGES - at);
        let page = SHARED + at;
        match random.u32(0..8) {
            0..=3 if means == Means::Reclaim && random.bool() => reclaim::one(watched, random)?,
            0..=3 => {
                memory.discard(page, count)?;
                renew(memory, &mut expected, at, count);
            }
            4 => {
                memory.replace(page, count, || {
                    if random.bool() {
                        std::thread::sleep(Duration::from_micros(random.u64(0..500)));
                    }
                })?;
                renew(memory, &mut expected, at, count);
            }
            5 => {
                memory.protect(page, count, false)?;
                std::thread::sleep(Duration::from_micros(random.u64(0..200)));
                memory.protect(page, count, true)?;
            }
            // A page of a VP's own: its content stays, and the VP writes to it.
            _ => {
                let own = part(random.usize(0..watched.running.len())) + 2 + random.usize(0..OWN_PAGES);
                memory.protect(own, 1, false)?;
                memory.protect(own, 1, true)?;
            }
        }
        if done.is_multiple_of(BATCH) || done == invalidations {
            watched.two_passes().with_context(|| format!("after {done} invalidations"))?;
            watched.check(&expected).with_context(|| format!("after {done} invalidations"))?;
        }
        tell("invalidations", done, invalidations);
    }
    Ok(())
}

/// The next number for each of these pages.
fn renew(memory: &Mapping, expected: &mut [u32], at: usize, count: usize) {
    for (page, number) in expected.iter_mut().enumerate().skip(at).take(count) {
        *number += 1;
        memory.set_word((SHARED + page) * PAGE, *number);
    }
}

/// The kernel moves pages, five times a second.
pub(super) struct Compaction {
    stop: Arc<AtomicBool>,
    join: std::thread::JoinHandle<u64>,
}

impl Compaction {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mine = stop.clone();
        let join = std::thread::spawn(move || {
            let mut count = 0;
            while !mine.load(Ordering::SeqCst) {
                count += u64::from(std::fs::write("/proc/sys/vm/compact_memory", "1").is_ok());
                std::thread::sleep(Duration::from_millis(200));
            }
            count
        });
        Self { stop, join }
    }

    /// Returns how often.
    pub(super) fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.join.join().unwrap_or_default()
    }
}
