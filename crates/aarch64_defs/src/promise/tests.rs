//! Promises that are kept, and each way to break one.

extern crate std;

use std::string::ToString as _;

use super::{Broken, Promise};
use crate::features::IdRegisters;
use crate::registers::spsr;

/// A Cortex-A57 of QEMU's, about.
fn told() -> Promise {
    Promise {
        hz: 62_500_000,
        midr: 0x411f_d070,
        // Without signed pointers (ID_AA64ISAR1_EL1).
        id_registers: IdRegisters::offered(|crm, op2| match (crm, op2) {
            (6, 1) => 0x1111_1111_0011_1001,
            _ => 0x1111_1111_1111_1111,
        }),
        ctr: 0x8444_c004,
        dczid: 4,
        vtr: 0x90b8_0003,
        workarounds: [-1, 0, 1],
    }
}

fn why(here: &Promise) -> Broken {
    told().check(here).expect_err("it is broken")
}

#[test]
fn promise_is_kept_by_the_same_processor_and_by_another_model_that_has_more() {
    assert_eq!(told().check(&told()), Ok(()));
    let more = Promise {
        midr: 0x411f_d400,
        // Longer lines, no maintenance at all; another number of list registers; nothing needs to be called.
        ctr: 0xb445_c005,
        vtr: 0x90b8_000f,
        workarounds: [1; 3],
        ..told()
    };
    assert_eq!(told().check(&more), Ok(()));
    // A guest that does not use DC ZVA does not care.
    let without = Promise { dczid: 0x14, ..told() };
    assert_eq!(without.check(&told()), Ok(()));
}

#[test]
fn whatever_the_guest_relies_on_is_missed_by_its_name() {
    assert_eq!(why(&Promise { hz: 62_500_001, ..told() }), Broken::Rate(62_500_000, 62_500_001));
    assert_eq!(why(&Promise { midr: 0x511f_d070, ..told() }), Broken::Maker(0x41, 0x51));
    for (ctr, name) in [(0x8444_c003, "IminLine"), (0x8443_c004, "DminLine"), (0x8444_8004, "L1Ip")] {
        assert!(why(&Promise { ctr, ..told() }).to_string().contains(name), "{name}");
    }
    for (bit, name) in [(28, "IDC"), (29, "DIC")] {
        let guest = Promise { ctr: told().ctr | 1 << bit, ..told() };
        assert!(guest.check(&told()).expect_err("missing").to_string().contains(name));
        assert_eq!(told().check(&guest), Ok(()));
    }
    for dczid in [3, 5, 0x14] {
        assert_eq!(why(&Promise { dczid, ..told() }), Broken::Caches("BS (DCZID_EL0)"));
    }
    for bit in 21..32 {
        assert_eq!(why(&Promise { vtr: told().vtr ^ 1 << bit, ..told() }), Broken::Interface);
    }
    assert_eq!(why(&Promise { workarounds: [0, 0, 1], ..told() }), Broken::Workaround(1));
    assert_eq!(why(&Promise { workarounds: [-1, -1, 1], ..told() }), Broken::Workaround(2));
    assert_eq!(why(&Promise { workarounds: [-1, 0, 0], ..told() }), Broken::Workaround(3));
    let poorer = Promise { id_registers: IdRegisters::offered(|_, _| 0), ..told() };
    assert_eq!(why(&poorer).to_string(), "this processor lacks EL0 (ID_AA64PFR0_EL1), which its guest was told of");
}

#[test]
fn signed_pointers_stay_on_their_model_if_the_codes_are_its_own() {
    // ID_AA64ISAR1_EL1: API (bits 11:8) is the model's, APA (bits 7:4) is the architecture's.
    let signs = |field: u64| Promise {
        id_registers: IdRegisters::offered(|crm, op2| if (crm, op2) == (6, 1) { field } else { 0 }),
        ..told()
    };
    let other_model = |promise: Promise| Promise { midr: 0x411f_d400, ..promise };
    let (own, common) = (signs(1 << 8), signs(1 << 4));
    assert_eq!(own.check(&own), Ok(()));
    assert_eq!(own.check(&other_model(own)), Err(Broken::PointerCodes));
    assert_eq!(common.check(&other_model(common)), Ok(()));
    // Of the same model another revision.
    assert_eq!(own.check(&Promise { midr: own.midr + 1, ..own }), Ok(()));
}

#[test]
fn guests_state_never_leads_to_the_hypervisors_level() {
    for state in 0..0x1000_u64 {
        let is_guests = |aarch32| spsr::is_guests(state, aarch32);
        match state & spsr::MODE {
            // EL0, EL1 with EL0's stack pointer, EL1 with its own.
            0b0_0000 | 0b0_0100 | 0b0_0101 => assert!(is_guests(false) && is_guests(true)),
            // User mode of AArch32.
            0b1_0000 => assert!(!is_guests(false) && is_guests(true)),
            _ => assert!(!is_guests(false) && !is_guests(true), "{state:#x}"),
        }
    }
}
