//! States as a file of a saved VM may have them, and what guests and devices do then.

use std::vec::Vec;

use fuzz::Input;

use super::machine::{Machine, through_a_file};
use crate::device::gic::{Distributor, DistributorState, VcpuState, Width};

const VCPUS: u32 = 3;

/// The bytes begin with a number of list registers, and with states of the distributor and of each vCPU. Then they say
/// what happens.
fn any_states(bytes: &[u8]) {
    let Some((&lists, rest)) = bytes.split_first() else { return };
    let Ok((shared, mut rest)) = postcard::take_from_bytes::<DistributorState>(rest) else { return };
    let mut vcpus = Vec::new();
    for _ in 0..VCPUS {
        let Ok((state, behind)) = postcard::take_from_bytes::<VcpuState>(rest) else { return };
        vcpus.push(state);
        rest = behind;
    }
    let lists = [2, 3, 4, 16][usize::from(lists) % 4];
    let mut machine = Machine::new(VCPUS, lists);
    if machine.take_over(&shared, &vcpus, lists).is_none() {
        return;
    }
    (0..VCPUS).for_each(|vcpu| machine.enter(vcpu));

    let mut input = Input::new(rest);
    while !input.is_empty() {
        let (what, value) = (input.byte(), input.u32());
        let vcpu = u32::from(what >> 4) % VCPUS;
        let offset = u32::from(input.u16());
        match what & 15 {
            0 => machine.write_d(vcpu, offset, value),
            1 => machine.write_wide(vcpu, 0x6000 + offset % 0x900, Width::Double, value.into()),
            2 => _ = machine.try_read_d(vcpu, offset),
            3 => machine.write_r(vcpu, offset, value),
            4 => machine.write_r(vcpu, 0x1_0000 + offset % 0xd00, value),
            5 => _ = machine.read_r(vcpu, 0x1_0000 + offset % 0xd00),
            6 => machine.send(vcpu, u64::from(value) << 8),
            7 => machine.set_line(offset % 300, value & 1 != 0),
            8 | 9 => _ = machine.cpu(vcpu).acknowledge(),
            10 | 11 => _ = machine.cpu(vcpu).end(),
            12 => machine.cpu(vcpu).timer = value & 1 != 0,
            13 => machine.settle_all(),
            14 => machine.save_and_restore([2, 3, 4, 16][value as usize % 4], value >> 8),
            _ => machine.settle(vcpu),
        }
    }
    machine.settle_all();
    machine.save_and_restore(lists, 0);
}

#[test]
fn any_states_are_refused_or_work_and_can_be_saved_again() {
    fuzz::target("gic_states", any_states);
}

#[test]
fn states_that_no_distributor_has_are_refused() {
    let mut machine = Machine::running(VCPUS, 4);
    machine.set_line(40, true);
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), Some(40));
    machine.save_and_restore(2, 0);
    let good = through_a_file(&machine.distributor.state());
    assert_eq!(machine.distributor.state().active_at, [(40, 0)]);
    assert!(Distributor::with_state(&good, VCPUS).is_some());
    let is_refused = |change: &dyn Fn(&mut DistributorState)| {
        let mut state = good.clone();
        change(&mut state);
        Distributor::with_state(&state, VCPUS).is_none()
    };
    assert!(is_refused(&|state| state.priority.truncate(255)));
    assert!(is_refused(&|state| state.route.push(0)));
    assert!(is_refused(&|state| state.active_at[0].1 = VCPUS), "a vCPU that does not exist");
    assert!(is_refused(&|state| state.active_at[0].0 = 41), "one that is not active");
    assert!(is_refused(&|state| state.active_at[0].0 = u32::MAX));
    assert!(is_refused(&|state| state.active_at.push((40, 1))), "twice");
    assert!(is_refused(&|state| state.active[2] = 1), "active nowhere");
    // Private interrupts are not the distributor's.
    let mut state = good.clone();
    state.enabled[0] = u32::MAX;
    state.active[0] = u32::MAX;
    let distributor = Distributor::with_state(&state, VCPUS).expect("that is ignored");
    assert_eq!((distributor.state().enabled[0], distributor.state().active[0]), (0, 0));
}
