//! What a kernel does to a guest's pages when memory is short: it swaps them out, merges equal ones, and makes huge
//! pages of them and small ones again. All of it changes frames under running VPs.
//!
//! The kernel needs KSM, zram and huge pages. Swap is a zram disk of this check's own.

use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

use super::Figures;
use super::memory::{self, Watched};
use crate::device::Device;
use crate::system::{Advice, Mapping, PAGE, Swap};

const DISK: &str = "/dev/zram0";
const DISK_PAGES: u32 = 0x4000;
const KSM: &str = "/sys/kernel/mm/ksm";
/// Counters of the kernel, each with whether it must have risen.
const COUNTERS: [(&str, bool); 6] = [
    ("pswpout", true),
    ("pswpin", true),
    ("cow_ksm", true),
    ("thp_collapse_alloc", true),
    ("thp_split_pmd", true),
    ("pgmigrate_success", false),
];

pub(super) fn run(device: &Device, invalidations: u64, vps: u32, seed: u64) -> Result<Figures> {
    let before = COUNTERS.map(|(name, _)| counter(name));
    let swap = swap_on_zram()?;
    let merging = Merging::start()?;
    let memory = memory::torture(device, invalidations, vps, seed, memory::Means::Reclaim);
    let merged = merging.stop();
    drop(swap);
    let mut figures = memory?;
    for ((name, must_rise), before) in COUNTERS.into_iter().zip(before) {
        let count = counter(name)? - before?;
        ensure!(count > 0 || !must_rise, "the kernel's counter {name} has not risen, so nothing was tried");
        figures.insert(name.to_owned(), count.into());
    }
    figures.insert("full_scans".to_owned(), merged?.into());
    Ok(figures)
}

/// One of the kernel's counters.
fn counter(name: &str) -> Result<u64> {
    let all = fs::read_to_string("/proc/vmstat").context("no /proc/vmstat")?;
    let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|count| count.parse().ok()).with_context(|| format!("the kernel does not count {name}"))
}

/// Lets the kernel swap to a compressed disk in memory.
fn swap_on_zram() -> Result<Swap> {
    const SETTING: &str = "/sys/block/zram0/disksize";
    fs::write(SETTING, (DISK_PAGES as usize * PAGE).to_string()).with_context(|| format!("cannot write {SETTING}"))?;
    // What `mkswap` writes: version and last page at 1024, and a mark at the end of the first page.
    let mut header = [0; PAGE];
    header[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    header[1028..1032].copy_from_slice(&(DISK_PAGES - 1).to_le_bytes());
    header[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
    let disk = fs::File::options().write(true).open(DISK).with_context(|| format!("no {DISK}"))?;
    disk.write_all_at(&header, 0).with_context(|| format!("cannot write {DISK}"))?;
    drop(disk);
    Swap::on(DISK).context("swapon")
}

/// The kernel merges equal pages, without a pause.
struct Merging;

impl Merging {
    fn start() -> Result<Self> {
        for (name, value) in [("pages_to_scan", "1000"), ("sleep_millisecs", "0"), ("run", "1")] {
            fs::write(format!("{KSM}/{name}"), value).with_context(|| format!("cannot write {KSM}/{name}"))?;
        }
        Ok(Self)
    }

    /// Returns how often it has looked at all pages.
    fn stop(self) -> Result<u64> {
        let scans = fs::read_to_string(format!("{KSM}/full_scans"))?.trim().parse()?;
        // Parts the merged pages again.
        fs::write(format!("{KSM}/run"), "2")?;
        Ok(scans)
    }
}

/// Permits merging and huge pages.
pub(super) fn permit(memory: &Mapping) -> Result<()> {
    let pages = memory.pages();
    memory.advise(0, pages, Advice::Huge).context("MADV_HUGEPAGE")?;
    memory.advise(0, pages, Advice::Mergeable).context("MADV_MERGEABLE")
}

/// Swaps some pages out, or makes a huge page of all VPs' own.
pub(super) fn one(watched: &Watched, random: &mut fastrand::Rng) -> Result<()> {
    let memory = watched.memory();
    match random.u32(0..16) {
        // Often it cannot: pages are shared, or locked at the moment.
        0 => {
            let _ = memory.advise(memory::OWN, memory.pages() - memory::OWN, Advice::Collapse);
            Ok(())
        }
        1 => memory.advise(0, memory.pages(), Advice::PageOut).context("MADV_PAGEOUT of all"),
        _ => {
            let count = random.usize(1..=16);
            let page = random.usize(0..memory.pages() - count);
            memory.advise(page, count, Advice::PageOut).context("MADV_PAGEOUT")
        }
    }
}
