//! vCPUs that another VM suspends, holds and resumes.

use interleave::STEPS;
use std::vec;

use addr::Gpa;

use super::{Scenario, config, explore, start, until_gone};
use crate::arch::fake::delivery;
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;
use crate::vm::child::suspend::{EXPLICIT, INTERCEPT};
use crate::vm::{VcpuRef, Vm};

const A: u64 = 0x1000;
const B: u64 = 0x1008;
const GO: u64 = 0x1010;

fn word(vm: &Vm, at: u64) -> u64 {
    let mut bytes = [0; 8];
    assert!(vm.memory.read(Gpa(at), &mut bytes), "it has memory there");
    u64::from_le_bytes(bytes)
}

fn vcpu(vm: &Vm, index: usize) -> VcpuRef {
    vm.vcpus()[index].handle().expect("it has not left for good")
}

/// A vCPU is held, then suspended for two reasons, and goes on when both are gone. Another one never notices.
pub(super) const SUSPEND: Scenario = Scenario {
    name: "a vCPU is suspended and resumed",
    cpus: 2,
    count: 6_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first = vec![Op::Start(1), Op::Sleep(B, 7), Op::ShutDown];
        let counts = (1..=12).flat_map(|value| [Op::Write(A, value), Op::Work(500)]);
        let rest = [Op::Sleep(GO, 1), Op::Write(B, 7), Op::Interrupt(0), Op::Stop];
        let second = counts.chain(rest).collect();
        let vm = start(simulation, &config("suspended", 2), vec![first, second]);
        let suspended = vcpu(&vm, 1);
        while word(&vm, A) == 0 {
            crate::sync::relax();
        }
        suspended.hold(|_| {
            let before = word(&vm, A);
            crate::sync::relax();
            assert_eq!(word(&vm, A), before, "a held vCPU runs");
        });
        suspended.suspend(EXPLICIT);
        let before = (word(&vm, A), word(&vm, B));
        suspended.suspend(INTERCEPT);
        for _ in 0..6 {
            crate::sync::relax();
            assert_eq!((word(&vm, A), word(&vm, B)), before, "a suspended vCPU runs");
        }
        suspended.resume(INTERCEPT, 0);
        crate::sync::relax();
        assert_eq!((word(&vm, A), word(&vm, B)), before, "there is another reason");
        assert!(vm.memory.write(Gpa(GO), &[1]), "it has memory there");
        delivery::send_fixed(&vm, 0, [1]);
        suspended.resume(EXPLICIT, 0);
        drop(suspended);
        until_gone(simulation, vm);
    },
};

#[test]
fn suspended_vcpu_stands_still_until_the_last_reason_is_gone() {
    explore(SUSPEND);
}
