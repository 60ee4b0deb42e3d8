//! Random hypercalls, as far as the kernel passes them on. The only expectation: the machine keeps running.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result};

use super::run::{run as run_guest, small};
use super::{Figures, figures, tell};
use crate::balance::Balance;
use crate::device::{Buffers, Device, Partition, Vp, code};
use crate::guest::COUNTER;
use crate::system::Mapping;

/// Numbers that have a meaning in some call, and neighbours of limits.
const SPECIAL: [u64; 26] = [
    0,
    1,
    2,
    0xff,
    0xfff,
    0x1000,
    0xffff,
    0x1_0000,
    0x10001,
    0x10002,
    0x30003,
    0x50005,
    0x60007,
    0x6000a,
    0x20000,
    0x20010,
    0x40000,
    0x40003,
    0x80001,
    0x80003,
    0x8000_0000,
    0x8000_0001,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
    u64::MAX >> 12,
];
/// First register of each group.
const GROUPS: [u64; 12] =
    [0, 0x10002, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000, 0x70000, 0x80000, 0x90000, 0xa0000, 0xb0000];
/// Calls with one partition; then another one begins.
const PER_PARTITION: u64 = 2000;

pub(super) fn run(device: &Device, calls: u64, seed: u64, trace: u64) -> Result<Figures> {
    let balance = Balance::before()?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut counts = Counts::default();
    let started = Instant::now();
    let mut done = 0;
    while done < calls {
        let rest = PER_PARTITION.min(calls - done);
        let target = Target::new(device).with_context(|| format!("after {done} calls"))?;
        for _ in 0..rest {
            done += 1;
            target.call(&mut random, &mut counts, (done >= trace).then_some(done))?;
            tell("calls", done, calls);
        }
        drop(target);
        if done % (PER_PARTITION * 20) < PER_PARTITION {
            run_guest(device, 1).with_context(|| format!("a guest after {done} calls"))?;
        }
    }
    let per_second = done * 1000 / u64::try_from(started.elapsed().as_millis())?.max(1);
    run_guest(device, 1).context("a guest after all of these")?;
    let cost = balance.settle()?;
    Ok(figures([
        ("calls", done),
        ("succeeded", counts.succeeded),
        ("refused", counts.refused),
        ("calls_per_second", per_second),
        ("lost_kib", cost.lost_kib),
        ("seed", seed),
    ]))
}

#[derive(Default)]
struct Counts {
    succeeded: u64,
    refused: u64,
}

/// A partition with a VP and memory.
struct Target {
    partition: Partition,
    vp: Vp,
    _memory: Mapping,
    buffers: Buffers,
}

impl Target {
    fn new(device: &Device) -> Result<Self> {
        let (partition, vp, memory) = small(device, &COUNTER)?;
        Ok(Self { partition, vp, _memory: memory, buffers: Buffers::new(&[])? })
    }

    fn call(&self, random: &mut fastrand::Rng, counts: &mut Counts, shown: Option<u64>) -> Result<()> {
        let code = match random.u32(0..20) {
            0 => random.u16(0..0x200),
            1..=8 => [code::GET_REGISTERS, code::SET_REGISTERS][random.usize(0..2)],
            _ => code::PASSED_ON[random.usize(0..code::PASSED_ON.len())],
        };
        let mut input = [0; 64];
        let words = random.usize(2..input.len());
        for word in &mut input[1..words] {
            *word = number(random);
        }
        // Mostly a VP that exists, in the usual level of trust.
        if random.u32(0..8) != 0 {
            input[1] = 0;
        }
        let is_list = [code::GET_REGISTERS, code::SET_REGISTERS].contains(&code);
        let reps = if is_list { random.u16(1..16) } else { random.u16(0..4) };
        if is_list {
            names(random, code, &mut input);
        }
        self.buffers.set_input(if is_list { &input } else { &input[..words] });
        let in_bytes = match code {
            code::GET_REGISTERS => 16 + reps * 4,
            code::SET_REGISTERS => 16 + reps * 32,
            _ if random.bool() => random.u16(0..80) * 8,
            _ => random.u16(..),
        };
        let out_bytes = match code {
            code::GET_REGISTERS => reps * 16,
            code::SET_REGISTERS => 0,
            _ => [0, 8, 16, 64, 4096][random.usize(0..5)],
        };
        let fd: BorrowedFd<'_> = if is_list || random.bool() { self.vp.as_fd() } else { self.partition.as_fd() };
        if let Some(number) = shown {
            let words = (usize::from(in_bytes) / 8).clamp(1, 64);
            let input: Vec<u64> = (1..words).map(|at| self.buffers.input(at)).collect();
            eprintln!("{number}: {code:#x} reps {reps} input {in_bytes} output {out_bytes}: {input:x?}");
            // A serial line needs this time to send the text before the call is made.
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
        match self.buffers.call(fd, [code, reps, in_bytes, out_bytes]) {
            Ok(()) => counts.succeeded += 1,
            Err(_) => counts.refused += 1,
        }
        Ok(())
    }
}

/// Names of registers, where a list has them.
fn names(random: &mut fastrand::Rng, code: u16, input: &mut [u64]) {
    let step = if code == code::SET_REGISTERS { 4 } else { 1 };
    for word in input.iter_mut().skip(2).step_by(step) {
        let mut name = || GROUPS[random.usize(0..GROUPS.len())] + random.u64(0..0x20);
        *word = if step == 4 { name() } else { name() | name() << 32 };
    }
}

fn number(random: &mut fastrand::Rng) -> u64 {
    match random.u32(0..4) {
        0 => 0,
        1 => SPECIAL[random.usize(0..SPECIAL.len())],
        2 => u64::from(random.u8(..)),
        _ => random.u64(..) >> random.u32(0..64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers() {
        let numbers = |seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            (0..50).map(|_| number(&mut random)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
    }

    #[test]
    fn names_are_where_each_call_has_them() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut input = [u64::MAX; 10];
        names(&mut random, code::SET_REGISTERS, &mut input);
        assert!(input[2] < 0xc0000 && input[6] < 0xc0000);
        assert_eq!([input[3], input[4], input[5], input[7]], [u64::MAX; 4]);
        names(&mut random, code::GET_REGISTERS, &mut input);
        assert!(input[2..].iter().all(|word| word & 0xffff_ffff < 0xc0000 && word >> 32 < 0xc0000));
    }
}
