extern crate std;

use std::string::ToString;

use super::Interrupted::{Guest, Host};
use super::*;

const RESTARTABLE: GlobalStatus = GlobalStatus(GlobalStatus::MCIP | GlobalStatus::RIPV);
const LOST: GlobalStatus = GlobalStatus(GlobalStatus::MCIP);

const CORRECTED: Status = Status(Status::VAL | Status::EN);
const DEFERRED: Status = Status(Status::VAL | Status::EN | Status::DEFERRED);
const CONTAINED: Status = Status(Status::VAL | Status::EN | Status::UC);
const CORRUPT: Status = Status(CONTAINED.0 | Status::PCC);
const STALE: Status = Status(Status::UC | Status::PCC);

fn is_host(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::EndsHost(_))
}

#[test]
fn contained_error_of_a_guest_ends_its_vm_only() {
    assert_eq!(verdict(RESTARTABLE, [CONTAINED], Guest, false), Verdict::EndsVm);
    assert_eq!(verdict(RESTARTABLE, [CORRECTED, CONTAINED, DEFERRED, STALE], Guest, false), Verdict::EndsVm);
    let with_program_corrupt = Status(CONTAINED.0 | Status::TCC | Status::POISON);
    assert_eq!(verdict(RESTARTABLE, [with_program_corrupt], Guest, false), Verdict::EndsVm);
}

#[test]
fn error_of_the_hypervisor_ends_the_host_even_if_it_could_go_on() {
    assert_eq!(verdict(RESTARTABLE, [CONTAINED], Host, true), Verdict::EndsHost("the hypervisor was interrupted"));
}

#[test]
fn corrupt_processor_ends_the_host_whoever_was_interrupted() {
    for interrupted in [Guest, Host] {
        assert!(is_host(verdict(RESTARTABLE, [CORRUPT], interrupted, true)));
        assert!(is_host(verdict(RESTARTABLE, [CONTAINED, CORRUPT], interrupted, true)));
    }
}

#[test]
fn unknown_place_ends_the_host() {
    assert!(is_host(verdict(LOST, [CONTAINED], Guest, true)));
}

#[test]
fn lost_error_ends_the_host_unless_the_processor_promises_that_it_was_no_worse() {
    let overflown = Status(CONTAINED.0 | Status::OVER);
    assert!(is_host(verdict(RESTARTABLE, [overflown], Guest, false)));
    assert_eq!(verdict(RESTARTABLE, [overflown], Guest, true), Verdict::EndsVm);
    // An overwritten corrected error loses nothing.
    let corrected = Status(CORRECTED.0 | Status::OVER);
    assert_eq!(verdict(RESTARTABLE, [corrected, CONTAINED], Guest, false), Verdict::EndsVm);
}

#[test]
fn exception_without_a_reason_ends_the_host() {
    for banks in [&[][..], &[CORRECTED, DEFERRED], &[STALE]] {
        assert!(is_host(verdict(RESTARTABLE, banks.iter().copied(), Guest, true)), "{banks:?}");
    }
}

#[test]
fn every_combination_that_ends_less_than_the_host_is_contained() {
    let bits = [Status::VAL, Status::UC, Status::PCC, Status::OVER, Status::TCC, Status::DEFERRED, Status::EN];
    for choice in 0u32..1 << bits.len() {
        let status =
            Status(bits.iter().enumerate().map(|(at, bit)| if choice >> at & 1 == 1 { *bit } else { 0 }).sum());
        for (global, interrupted) in [(RESTARTABLE, Guest), (RESTARTABLE, Host), (LOST, Guest), (LOST, Host)] {
            let is_contained = status.is_uncorrected()
                && !status.has(Status::PCC)
                && !status.has(Status::OVER)
                && global == RESTARTABLE
                && interrupted == Guest;
            assert_eq!(is_host(verdict(global, [status], interrupted, false)), !is_contained, "{status:x?}");
        }
    }
}

#[test]
fn shutdown_is_explained_by_an_uncorrected_error_alone() {
    assert!(explains_shutdown([CORRECTED, CONTAINED]));
    assert!(!explains_shutdown([CORRECTED, DEFERRED, STALE]));
    assert!(!explains_shutdown([]));
}

#[test]
fn banks_are_told_in_words() {
    let report = Report {
        bank: 4,
        status: Status(CORRUPT.0 | Status::ADDRV | Status::MISCV | Status::OVER | 0x0135),
        address: 0x1234_5000,
        misc: 0x77,
        scalable: Some((0x96, 0x5)),
    };
    assert_eq!(
        report.to_string(),
        "bank 4: uncorrected error, cache error (data read, data, level 1), at 0x12345000, processor state corrupt, \
         others lost (status 0xfe00000000000135, misc 0x77, ipid 0x96, syndrome 0x5)"
    );
    let report = Report { bank: 1, status: Status(CORRECTED.0 | 0x0015), ..Report::default() };
    assert_eq!(report.to_string(), "bank 1: corrected error, TLB error (data, level 1) (status 0x9000000000000015)");
    let words = |code| Code(code).to_string();
    assert_eq!(words(0x0813), "bus error (generic read, memory, generic)");
    assert_eq!(words(0x0d5e), "bus error (instruction fetch, generic, level 2, timed out)");
    assert_eq!(words(0x0400), "internal error");
    assert_eq!(words(0x01f0), "cache error (reserved, instruction, core)");
    assert_eq!(words(0x0001), "error code 0x1");
}
