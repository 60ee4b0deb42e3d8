//! The largest requests: a partition with as many VPs as there can be, the last one first, and much memory. What the
//! hypervisor does for each should not keep its pCPU from interrupts for long, and it measures that itself
//! (`dunlin bench bounds`).

use std::os::fd::AsFd as _;

use anyhow::{Context, Result};

use super::hyperv::SYNTHETIC_FEATURES;
use super::{Figures, figures, tell};
use crate::balance::Balance;
use crate::device::register::{RAX, RBX, RDX, RIP};
use crate::device::{Device, Partition, StateKind, UNMAP, Vp, call_for_bits, doorbell};
use crate::system::{Mapping, PAGE};

/// The kernel's limit.
const VPS: u32 = 256;
/// 96 MiB of small pages, as the kernel gives them out, and whatever it makes of them.
const PAGES: usize = 24 * 1024;
/// Where the guest has them again, from the middle of a large page on.
const ELSEWHERE: u64 = 1 << 20 | 256;
const DOORBELLS: u32 = 256;
/// As many registers as an input has room for.
const REGISTERS: usize = 120;

const TIME_FREEZE: u64 = 0x3_0003;
const TRACKING: u64 = 0x5_0005;

pub(super) fn run(device: &Device) -> Result<Figures> {
    let balance = Balance::before()?;
    {
        let partition = device.create_partition().context("a partition")?;
        let (property, features) = SYNTHETIC_FEATURES;
        partition.set_property(property, features).context("SET_PROPERTY of its synthetic features")?;
        partition.initialize().context("INITIALIZE")?;
        let mut vps = Vec::new();
        for index in (0..VPS).rev() {
            vps.push(partition.create_vp(index).with_context(|| format!("CREATE_VP of {index}"))?);
            tell("VPs", u64::from(VPS - index), VPS.into());
        }
        let memory = Mapping::anonymous(PAGES)?;
        (0..PAGES).for_each(|page| memory.write(page * PAGE, &[1]));
        change_all(&partition, &vps, &memory)?;
    }
    let cost = balance.settle()?;
    Ok(figures([("vps", VPS.into()), ("pages", PAGES as u64), ("lost_kib", cost.lost_kib)]))
}

fn change_all(partition: &Partition, vps: &[Vp], memory: &Mapping) -> Result<()> {
    partition.set_memory(memory, 0).context("SET_GUEST_MEMORY")?;
    partition.set_memory(memory, ELSEWHERE).context("SET_GUEST_MEMORY of the same pages elsewhere")?;
    for is_on in [1, 0, 1] {
        partition.set_property(TRACKING, is_on).context("tracking of writes")?;
    }
    for change in [0, 1, 2] {
        call_for_bits(partition.as_fd(), 0, PAGES, change).context("GET_GPAP_ACCESS_BITMAP")?;
    }

    for is_frozen in [1, 0] {
        partition.set_property(TIME_FREEZE, is_frozen).context("freeze of its time")?;
    }
    // NMIs are for all VPs, and need none that runs.
    partition.interrupt_all().context("an interrupt for all VPs")?;
    partition.withdraw_interrupts().context("the end of its interrupts")?;

    let page = Mapping::anonymous(1)?;
    for vp in [&vps[0], &vps[vps.len() - 1]] {
        let names: Vec<u32> = [RAX, RBX, RDX, RIP].into_iter().cycle().take(REGISTERS).collect();
        let values = vp.get(&names).context("get of many registers")?;
        let pairs: Vec<(u32, u128)> = names.into_iter().zip(values).collect();
        vp.set(&pairs).context("set of many registers")?;
        for kind in StateKind::ALL {
            vp.get_state(kind, &page).with_context(|| format!("get of {kind:?}"))?;
            vp.set_state(kind, &page).with_context(|| format!("set of {kind:?}"))?;
        }
    }

    let event = crate::system::event()?;
    for number in 0..DOORBELLS {
        doorbell(partition.as_fd(), event.as_fd(), 0xf000_0000 + u64::from(number) * 8).context("IOEVENTFD")?;
    }
    // The other one goes with the partition.
    partition.change_memory([memory.bytes(), 0, memory.address(), UNMAP]).context("SET_GUEST_MEMORY: unmap")
}
