//! Registers and flags that must stay what they are, whatever happens to the CPU meanwhile.
//!
//! Each thread has patterns in its registers and in the arithmetic flags, and counts without touching them. An
//! interrupt of the kernel gives back what it found. So does a hypervisor, and so must whoever moves the guest to
//! another host: a flag that is lost there is lost between a comparison and its branch, in one program of many, once in
//! a long time.

#![expect(unsafe_code, reason = "keeps values in registers by hand")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::Verdict;
use crate::options::Options;

pub(crate) const OPTIONS: [&str; 2] = ["--threads", "--seconds"];

/// Rounds of counting with the same values.
const COUNT: u64 = 1 << 16;

/// What is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    flags: u64,
    general: [u64; 6],
    vector: [u64; 4],
}

impl Kept {
    /// The values of a round: each set of flags comes at least once in 64 of them.
    fn of_round(round: u64) -> Self {
        let word = |number: u64| (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7) ^ number << 56;
        Self { flags: arch::flags(round), general: [1, 2, 3, 4, 5, 6].map(word), vector: [7, 8, 9, 10].map(word) }
    }
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let seconds = options.number("--seconds", 10);
    let threads = options.number_or_cpus("--threads");
    let end = Instant::now() + Duration::from_secs(seconds.into());
    let (rounds, lost) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..threads {
            let (rounds, lost) = (&rounds, &lost);
            scope.spawn(move || {
                let mut round = u64::from(thread) * 7;
                while Instant::now() < end && lost.load(Ordering::Relaxed) == 0 {
                    let wanted = Kept::of_round(round);
                    let found = arch::keep(wanted, COUNT);
                    if found != wanted {
                        eprintln!("registers: {wanted:x?} became {found:x?}");
                        lost.fetch_add(1, Ordering::Relaxed);
                    }
                    round += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (rounds, lost) = (rounds.into_inner(), lost.into_inner());
    println!("registers threads={threads} rounds={rounds} lost={lost}");
    Ok(if lost == 0 { Verdict::Right } else { Verdict::Wrong })
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;

    use super::Kept;

    /// CF, PF, AF, ZF, SF, OF (APM vol. 1, 3.1.4).
    const FLAGS: [u32; 6] = [0, 2, 4, 6, 7, 11];

    /// The arithmetic flags of this round.
    pub(super) fn flags(round: u64) -> u64 {
        FLAGS.iter().zip(0..).fold(0, |flags, (bit, number)| flags | (round >> number & 1) << bit)
    }

    /// Counts with these values in registers, and returns what is there then. LEA, JRCXZ and JMP do not touch flags.
    pub(super) fn keep(kept: Kept, count: u64) -> Kept {
        /// What is set besides: a bit that is always set, and interrupts enabled, which a program cannot change.
        const OTHER_FLAGS: u64 = 1 << 1 | 1 << 9;
        let Kept { flags, mut general, vector } = kept;
        let mut vector = vector.map(f64::from_bits);
        let after: u64;
        // SAFETY: changes the named registers and the arithmetic flags, and as much of the stack as it gives back.
        unsafe {
            asm!(
                "push {flags}",
                "popfq",
                "2:",
                "lea rcx, [rcx - 1]",
                "jrcxz 3f",
                "jmp 2b",
                "3:",
                "pushfq",
                "pop {flags}",
                flags = inout(reg) flags | OTHER_FLAGS => after,
                inout("rcx") count => _,
                inout("r8") general[0],
                inout("r9") general[1],
                inout("r10") general[2],
                inout("r11") general[3],
                inout("rsi") general[4],
                inout("rdi") general[5],
                inout("xmm0") vector[0],
                inout("xmm5") vector[1],
                inout("xmm10") vector[2],
                inout("xmm15") vector[3],
            );
        }
        let mask = FLAGS.iter().fold(0, |mask, bit| mask | 1 << bit);
        Kept { flags: after & mask, general, vector: vector.map(f64::to_bits) }
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use std::arch::asm;

    use super::Kept;

    /// N, Z, C and V (Arm ARM, C5.2.10).
    const FIRST_FLAG: u32 = 28;

    /// The flags of this round.
    pub(super) const fn flags(round: u64) -> u64 {
        (round & 0xf) << FIRST_FLAG
    }

    /// Counts with these values in registers, and returns what is there then. SUB and CBNZ do not touch flags.
    pub(super) fn keep(kept: Kept, count: u64) -> Kept {
        let Kept { flags, mut general, vector } = kept;
        let mut vector = vector.map(f64::from_bits);
        let after: u64;
        // SAFETY: changes the named registers and the flags.
        unsafe {
            asm!(
                "msr nzcv, {flags}",
                "2:",
                "sub {count}, {count}, #1",
                "cbnz {count}, 2b",
                "mrs {flags}, nzcv",
                flags = inout(reg) flags => after,
                count = inout(reg) count => _,
                inout("x9") general[0],
                inout("x10") general[1],
                inout("x11") general[2],
                inout("x12") general[3],
                inout("x13") general[4],
                inout("x14") general[5],
                inout("v0") vector[0],
                inout("v5") vector[1],
                inout("v16") vector[2],
                inout("v31") vector[3],
                options(nomem, nostack),
            );
        }
        Kept { flags: after, general, vector: vector.map(f64::to_bits) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_have_all_sets_of_flags_and_values_of_their_own() {
        let mut all: Vec<_> = (0..64).map(Kept::of_round).collect();
        let flags: std::collections::BTreeSet<u64> = all.iter().map(|kept| kept.flags).collect();
        assert_eq!(flags.len(), if cfg!(target_arch = "x86_64") { 64 } else { 16 });
        all.dedup_by_key(|kept| kept.general[0]);
        assert_eq!(all.len(), 64);
    }

    #[test]
    fn values_stay_while_nothing_takes_them() {
        for round in 0..64 {
            let kept = Kept::of_round(round);
            assert_eq!(arch::keep(kept, 100), kept);
        }
    }
}
