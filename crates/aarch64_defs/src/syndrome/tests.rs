//! Syndromes from real exits, in the manual's format.

use super::{DataAccess, Fault, Limit, Rest, Syndrome, SystemRegister, Wait, class};

#[test]
fn load_of_a_word_is_described() {
    // LDR W0, [X0], translation fault at level 1.
    let syndrome = Syndrome(0x9380_0005);
    assert_eq!(syndrome.class(), class::DATA_ABORT);
    assert_eq!(syndrome.fault(), Fault::Translation);
    let access = DataAccess { bytes: 4, is_signed: false, general: 0, is_64_bit: false, is_write: false };
    assert_eq!(syndrome.data_access(), Some(access));
    assert!(!syndrome.is_table_walk() && syndrome.is_long());
}

#[test]
fn store_of_a_signed_looking_byte_keeps_its_register() {
    let syndrome = Syndrome(0x24 << 26 | 1 << 25 | 1 << 24 | 31 << 16 | 1 << 6 | 0x07);
    let access = DataAccess { bytes: 1, is_signed: false, general: 31, is_64_bit: false, is_write: true };
    assert_eq!(syndrome.data_access(), Some(access));
}

#[test]
fn pair_is_not_described() {
    assert_eq!(Syndrome(0x24 << 26 | 1 << 25 | 0x07).data_access(), None);
}

#[test]
fn faults_are_told_apart_at_every_level() {
    for level in 0..4 {
        assert_eq!(Syndrome(0x04 + level).fault(), Fault::Translation);
        assert_eq!(Syndrome(0x08 + level).fault(), Fault::AccessFlag);
        assert_eq!(Syndrome(0x0c + level).fault(), Fault::Permission);
    }
    assert_eq!(Syndrome(0x30).fault(), Fault::TlbConflict);
    assert_eq!(Syndrome(0x10).fault(), Fault::Other);
}

#[test]
fn system_register_is_named_by_its_five_parts() {
    // MSR ICC_SGI1R_EL1, X3: op0 3, op1 0, CRn 12, CRm 11, op2 5.
    let iss = 3 << 20 | 5 << 17 | 12 << 10 | 3 << 5 | 11 << 1;
    let access = Syndrome(0x18 << 26 | 1 << 25 | iss).system();
    assert_eq!(access.register, SystemRegister::new(3, 0, 12, 11, 5));
    assert_eq!((access.general, access.is_read), (3, false));
}

#[test]
fn parts_of_a_register_come_back_as_they_went_in() {
    for op0 in 0..4 {
        for op1 in 0..8 {
            for crn in 0..16 {
                for crm in 0..16 {
                    for op2 in 0..8 {
                        let register = SystemRegister::new(op0, op1, crn, crm, op2);
                        assert_eq!(register.parts(), (op0, op1, crn, crm, op2));
                    }
                }
            }
        }
    }
}

#[test]
fn four_instructions_that_wait_are_told_apart() {
    // Condition always (COND 14, CV), X3 in RN, RV.
    const WFX: u64 = 0x01 << 26 | 1 << 25 | 1 << 24 | 14 << 20;
    let timed = WFX | 3 << 5 | 1 << 2;
    for (iss, is_event, limit) in [
        (WFX, false, Limit::None),
        (WFX | 1, true, Limit::None),
        (timed | 2, false, Limit::General(3)),
        (timed | 3, true, Limit::General(3)),
        (WFX | 2, false, Limit::Unknown),
        // Without a time, RN has no meaning.
        (timed, false, Limit::None),
    ] {
        let syndrome = Syndrome(iss);
        assert_eq!((syndrome.class(), syndrome.wait()), (class::WFX, Wait { is_event, limit }));
    }
}

#[test]
fn wait_with_a_time_sleeps_until_then_and_not_longer() {
    let wait = Wait { is_event: false, limit: Limit::General(7) };
    let at = |end: u64, now: u64| {
        wait.rest(now, |number| {
            assert_eq!(number, 7);
            end
        })
    };
    assert_eq!(at(100, 99), Rest::Sleep(Some(100)));
    assert_eq!(at(100, 100), Rest::Over);
    assert_eq!(at(100, 101), Rest::Over);
    assert_eq!(at(0, 0), Rest::Over);
    // Unsigned: the largest time is in the far future, not in the past.
    assert_eq!(at(u64::MAX, 5), Rest::Sleep(Some(u64::MAX)));
    let rest = |is_event, limit| Wait { is_event, limit }.rest(5, |_| 0);
    assert_eq!(rest(false, Limit::None), Rest::Sleep(None));
    assert_eq!(rest(false, Limit::Unknown), Rest::Over);
    for limit in [Limit::None, Limit::General(0), Limit::Unknown] {
        assert_eq!(rest(true, limit), Rest::Yield);
    }
}
