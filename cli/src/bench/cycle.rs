//! The length of a cycle of this computer's processor, measured without a performance counter.
//!
//! A chain of multiplications and additions takes 3 cycles and 1 on all current x86-64 and AArch64 cores. It runs in
//! the same round as the code whose time is converted to cycles, so it follows the core's clock.

use std::hint::black_box;
use std::time::Instant;

/// Steps of the chain, and the cycles of one.
const STEPS: u32 = 20_000;
const STEP_CYCLES: f64 = 4.0;
const TRIES: usize = 4;

/// Nanoseconds per cycle: the minimum of some attempts, because interruptions can only make them longer.
pub(super) fn nanos_per_cycle() -> f64 {
    (0..TRIES).map(|_| chain() / STEP_CYCLES).fold(f64::INFINITY, f64::min)
}

/// Nanoseconds per step of the chain.
fn chain() -> f64 {
    let mut value = black_box(1_u64);
    let factor = black_box(0x5851_f42d_4c95_7f2d_u64);
    let start = Instant::now();
    for _ in 0..STEPS {
        value = value.wrapping_mul(factor).wrapping_add(1);
    }
    let elapsed = start.elapsed().as_secs_f64() * 1e9 / f64::from(STEPS);
    black_box(value);
    elapsed
}
