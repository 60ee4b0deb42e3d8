//! How two threads that share nothing affect each other.
//!
//! Two CPUs of a virtual machine may be two threads of one core, although the hypervisor reports two cores. A core may
//! also run slower while another one works. Both slow down parallel work, for any layout in memory. Arithmetic in
//! registers measures this effect: it accesses no memory, and keeps the core's multiplier busy in each cycle, so a
//! second thread of the core takes half of it.

use std::hint::black_box;

use super::{alone, beside};

/// Chains of multiplications that do not depend on each other: more than a multiplication takes cycles.
const CHAINS: usize = 6;
const OPERATIONS: u32 = 512;

/// How much longer arithmetic in registers takes while the other core does the same than while that one only waits.
pub(in crate::bench) fn control() -> Option<f64> {
    let [one, other] = beside(&mut arithmetic, &mut arithmetic, OPERATIONS)?;
    Some(f64::midpoint(one, other) / alone(&mut arithmetic, OPERATIONS)?)
}

/// Computes in registers.
fn arithmetic(times: u32) {
    let mut values: [u64; CHAINS] = std::array::from_fn(|chain| black_box(chain as u64));
    for _ in 0..times {
        values = values.map(|value| value.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
    }
    black_box(values);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_is_a_ratio_of_two_times() {
        // A busy computer may give no result.
        assert!(control().is_none_or(|ratio| ratio.is_finite() && ratio > 0.0));
    }
}
