//! Calls with wrong numbers, and in the wrong order. They must end with an error, and leave the device usable.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, ensure};

use super::{Figures, figures};
use crate::balance::Balance;
use crate::device::{Device, EXECUTABLE, UNMAP, WRITABLE, code, hypercall, request};
use crate::system::{Mapping, PAGE, call, call_at};

/// Largest argument of a call.
const LARGEST: usize = 256;

pub(super) fn run(device: &Device) -> Result<Figures> {
    let balance = Balance::before()?;
    let mut calls = 0;
    calls += numbers(device)?;
    calls += order(device)?;
    calls += memory(device)?;
    calls += hypercalls(device)?;
    // The device still works.
    super::run::run(device, 1).context("a guest after all of these")?;
    let cost = balance.settle()?;
    Ok(figures([("calls", calls), ("lost_kib", cost.lost_kib)]))
}

/// Every call of every descriptor, with zeros, ones, and invalid addresses. Some calls may succeed.
fn numbers(device: &Device) -> Result<u64> {
    let partition = device.partition()?;
    let created = device.create_partition()?;
    let vp = partition.create_vp(0)?;
    let all = [
        request::CREATE_PARTITION,
        request::HYPERCALL,
        request::CREATE_VP,
        request::SET_MEMORY,
        request::IRQFD,
        request::IOEVENTFD,
        request::SET_ROUTES,
        request::GET_ACCESS_BITS,
        request::GET_STATE,
        request::SET_STATE,
    ];
    let mut calls = 0;
    for fd in [device.as_fd(), partition.as_fd(), created.as_fd(), vp.as_fd()] {
        for request in all {
            for pattern in [0u8, 0xff, 0x80, 1] {
                // A descriptor that is made by accident stays open until the end.
                let _ = call(fd, request, &mut [pattern; LARGEST]);
                calls += 1;
            }
            for address in [0, 1, PAGE, usize::MAX, 1 << 63, 0xffff_8880_0000_0000] {
                ensure!(
                    call_at(fd, request, address).is_err(),
                    "call {request:#x} with an argument at {address:#x} is no error"
                );
                calls += 1;
            }
        }
    }
    Ok(calls)
}

/// Calls before and after their time.
fn order(device: &Device) -> Result<u64> {
    let partition = device.create_partition()?;
    ensure!(partition.create_vp(0).is_err(), "a partition that is not initialized gets a VP");
    partition.initialize()?;
    // The kernel may answer that this was done already, or that it is an error.
    let _ = partition.initialize();
    let vp = partition.create_vp(0)?;
    ensure!(partition.create_vp(0).is_err(), "a partition has VP 0 twice");
    for index in [256, 0x7fff_ffff, u32::MAX] {
        ensure!(partition.create_vp(index).is_err(), "a partition has a VP {index}");
    }
    drop(partition);
    // The VP keeps its partition.
    vp.get(&[0]).context("get of a register of a VP whose partition's descriptor is closed")?;
    Ok(7)
}

fn memory(device: &Device) -> Result<u64> {
    let partition = device.partition()?;
    let mapping = Mapping::anonymous(4)?;
    let (bytes, address) = (mapping.bytes(), mapping.address());
    let flags = WRITABLE | EXECUTABLE;
    let wrong = [
        [0, 0, address, flags],
        [bytes - 1, 0, address, flags],
        [bytes, 0, address + 1, flags],
        [bytes, 0, 0xffff_8880_0000_0000, flags],
        [!0xfff, 0, address, flags],
        [bytes, u64::MAX, address, flags],
        [bytes, u64::MAX >> 12, address, flags],
        [bytes, 0, address, 0xf8],
        [bytes, 0, 0, UNMAP],
    ];
    for region in wrong {
        ensure!(partition.change_memory(region).is_err(), "memory {region:x?} is no error");
    }
    partition.change_memory([bytes, 16, address, flags]).context("memory")?;
    ensure!(partition.change_memory([bytes, 17, address, flags]).is_err(), "memory overlaps memory");
    partition.change_memory([bytes, 16, address, UNMAP]).context("memory is taken away")?;
    partition.change_memory([bytes, 16, address, flags]).context("memory where memory has been")?;
    Ok(12)
}

/// Hypercalls that the kernel passes on although they are wrong.
fn hypercalls(device: &Device) -> Result<u64> {
    let partition = device.partition()?;
    let vp = partition.create_vp(0)?;
    let mut calls = 0;
    let mut wrong = |what: &str, fd: BorrowedFd<'_>, code, reps, input: &[u64], output| -> Result<()> {
        calls += 1;
        ensure!(hypercall(fd, code, reps, input, output).is_err(), "hypercall {code:#x} with {what} is no error");
        Ok(())
    };
    let set = |name: u64, low: u64, high: u64| [0, 0, name, 0, low, high];
    wrong("a register that does not exist", vp.as_fd(), code::SET_REGISTERS, 1, &set(0xdead_beef, 0, 0), 0)?;
    wrong("a register that does not exist", vp.as_fd(), code::GET_REGISTERS, 1, &[0, 0, 0xdead_beef], 2)?;
    wrong("a VP that does not exist", vp.as_fd(), code::GET_REGISTERS, 1, &[0, 9, 0x20000], 2)?;
    wrong("a VP that does not exist", vp.as_fd(), code::SET_REGISTERS, 1, &[0, 77, 0x20000, 0, 0, 0], 0)?;
    wrong("another VTL", vp.as_fd(), code::GET_REGISTERS, 1, &[0, 1 << 32, 0x20000], 2)?;
    wrong("a property that does not exist", partition.as_fd(), 0x44, 0, &[0, 0xdead_beef], 1)?;
    wrong("a property that is read only", partition.as_fd(), 0x45, 0, &[0, 0x6000a, 1], 0)?;
    wrong("an interrupt for a vector below 16", partition.as_fd(), 0x94, 0, &[0, 0, 0, 3], 0)?;
    Ok(calls)
}
