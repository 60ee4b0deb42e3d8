//! What a vCPU remembers, and what it does not: through the emulator that ships.

use crate::machine::{
    Access, CODE, DEVICE, DEVICE_LINEAR, Mistake, PAGE, RAX, RDI, RIGHTS, ROOTS, SETTINGS, Setting, Vcpu, Vm, set_mode,
};
use decode_cache::{Size, Vouching};
use emulator::Event::{Found, Inserted, Missed, Repeated, Replaced, Walked};
use x86_emulate::{Outcome, Width};

/// mov eax, [rdi]
const LOAD: &[u8] = &[0x8b, 0x07];
/// mov [rdi], eax
const STORE: &[u8] = &[0x89, 0x07];
/// mov eax, [rdi + 0x20]
const LOAD_AT_32: &[u8] = &[0x8b, 0x47, 0x20];

const REMEMBERING: [Setting; 3] = [Setting::Bytes, Setting::Place(Vouching::Walk), Setting::Place(Vouching::Tables)];
const BY_PLACE: [Setting; 2] = [REMEMBERING[1], REMEMBERING[2]];

fn done(length: u8) -> Outcome {
    Outcome::Done { length }
}

/// A VM with `code` at its start of code, and a vCPU of it.
fn machine(setting: Setting, code: &[u8]) -> (Vm, Vcpu) {
    let vm = Vm::new(setting);
    vm.guest_write(CODE, code);
    (vm, Vcpu::new(setting))
}

#[test]
fn nothing_is_remembered_where_that_is_off() {
    let (vm, mut vcpu) = machine(Setting::Off, LOAD);
    for time in 1..4 {
        assert_eq!(vcpu.emulate(&vm, CODE, &[]), (done(2), vec![Missed, Walked, Walked]));
        assert_eq!(vcpu.device.accesses.len(), time);
    }
}

#[test]
fn an_instruction_is_decoded_once() {
    for setting in REMEMBERING {
        let (vm, mut vcpu) = machine(setting, LOAD);
        let (outcome, events) = vcpu.emulate(&vm, CODE, &[]);
        assert_eq!(outcome, done(2));
        assert_eq!(events.iter().filter(|event| **event == Missed).count(), 1, "{setting:?}");
        assert_eq!(events.iter().filter(|event| **event == Inserted).count(), 1, "{setting:?}");
        for _ in 0..9 {
            let (outcome, events) = vcpu.emulate(&vm, CODE, &[]);
            assert_eq!(outcome, done(2));
            assert!(matches!(events[..], [Found | Repeated]), "{setting:?}: {events:?}");
        }
        assert_eq!(vcpu.device.accesses, [Access::Read(DEVICE, Width::Dword); 10]);
    }
}

#[test]
fn a_place_that_comes_again_and_again_is_known_whole() {
    let (vm, mut vcpu) = machine(Setting::Bytes, LOAD);
    let mut events = || vcpu.emulate(&vm, CODE, &[]).1;
    assert_eq!(events(), [Missed, Inserted, Walked, Walked]);
    assert_eq!(events(), [Found]);
    assert_eq!(events(), [Found]);
    assert_eq!(events(), [Repeated]);
    assert_eq!(events(), [Repeated]);
}

#[test]
fn bytes_mean_the_same_at_another_place_and_for_another_address_space() {
    let (vm, mut vcpu) = machine(Setting::Bytes, LOAD);
    vm.guest_write(CODE + 0x80, LOAD);
    vm.guest_write(CODE + PAGE, LOAD);
    vcpu.emulate(&vm, CODE, &[]);
    assert_eq!(vcpu.emulate(&vm, CODE + 0x80, &[]), (done(2), vec![Found]));
    vcpu.cpu.cr3 = ROOTS[1];
    assert_eq!(vcpu.emulate(&vm, CODE, &[]), (done(2), vec![Found, Walked, Walked]));
}

#[test]
fn another_place_is_another_instruction_where_places_are_known() {
    for setting in BY_PLACE {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vm.guest_write(CODE + 0x80, LOAD);
        vcpu.emulate(&vm, CODE, &[]);
        assert_eq!(vcpu.emulate(&vm, CODE + 0x80, &[]), (done(2), vec![Missed, Inserted]));
    }
}

#[test]
fn what_one_vcpu_decoded_is_known_to_all_of_the_vm_where_places_are_known() {
    for setting in SETTINGS {
        let (vm, mut one) = machine(setting, LOAD);
        let mut other = Vcpu::new(setting);
        one.emulate(&vm, CODE, &[]);
        let (outcome, events) = other.emulate(&vm, CODE, &[]);
        assert_eq!(outcome, done(2));
        assert_eq!(events[0] == Found, BY_PLACE.contains(&setting), "{setting:?}");
    }
}

#[test]
fn equal_bytes_in_another_mode_are_another_instruction() {
    // In 64-bit mode mov r8d, [rdi], in 32-bit mode inc esp, which is no access to a device.
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, &[0x44, 0x8b, 0x07]);
        for _ in 0..4 {
            set_mode(&mut vcpu.cpu, true);
            assert_eq!(vcpu.emulate(&vm, CODE, &[]).0, done(3), "{setting:?}");
            set_mode(&mut vcpu.cpu, false);
            assert!(matches!(vcpu.emulate(&vm, CODE, &[]).0, Outcome::Unsupported { .. }), "{setting:?}");
        }
    }
}

#[test]
fn code_that_the_guest_has_changed_is_read_again() {
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, LOAD);
        for time in 0..5 {
            vcpu.emulate(&vm, CODE, &[]);
            assert_eq!(vcpu.device.accesses.len(), time + 1);
        }
        vm.guest_write(CODE, STORE);
        let (outcome, events) = vcpu.emulate(&vm, CODE, &[]);
        assert_eq!(outcome, done(2));
        assert!(matches!(vcpu.device.accesses[5], Access::Write(DEVICE, Width::Dword, _)), "{setting:?}");
        assert_eq!(events[0], Missed, "{setting:?}");
    }
}

#[test]
fn page_tables_that_the_guest_has_changed_are_walked_again() {
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vm.guest_write(CODE + PAGE, STORE);
        for _ in 0..5 {
            vcpu.emulate(&vm, CODE, &[]);
        }
        vm.map(0, CODE, (CODE + PAGE) | RIGHTS);
        assert_eq!(vcpu.emulate(&vm, CODE, &[]).0, done(2));
        assert!(matches!(vcpu.device.accesses[5], Access::Write(..)), "{setting:?}: the new page's instruction");

        // And those that lead to the operand: the access is no longer the one that the hardware has stopped at.
        vm.map(0, DEVICE_LINEAR, 0);
        assert!(matches!(vcpu.emulate(&vm, CODE, &[]).0, Outcome::Fault(_)), "{setting:?}");
        assert_eq!(vcpu.device.accesses.len(), 6);
    }
}

#[test]
fn a_page_is_read_only_as_long_as_an_instruction_in_it_is_remembered() {
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vcpu.emulate(&vm, CODE, &[]);
        let tables = (0..4).map(|table| ROOTS[0] + PAGE * table);
        assert_eq!(vm.is_writable(CODE), !BY_PLACE.contains(&setting), "{setting:?}");
        let closed = tables.filter(|table| !vm.is_writable(*table)).count();
        assert_eq!(closed, if setting == Setting::Place(Vouching::Tables) { 4 } else { 0 }, "{setting:?}");

        // A write beside the instruction opens the page, and the instruction is forgotten with it.
        vm.guest_write(CODE + 0x800, &[0]);
        assert!(vm.is_writable(CODE));
        let (_, events) = vcpu.emulate(&vm, CODE, &[]);
        assert_eq!(events.contains(&Missed), setting != Setting::Bytes, "{setting:?}: {events:?}");
    }
}

#[test]
fn a_page_that_cannot_be_read_only_keeps_its_instructions_from_being_remembered() {
    for setting in BY_PLACE {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vm.protects.set(false);
        vcpu.emulate(&vm, CODE, &[]);
        for _ in 0..3 {
            assert_eq!(vcpu.emulate(&vm, CODE, &[]), (done(2), vec![Missed]), "{setting:?}");
        }
        vm.protects.set(true);
        assert_eq!(vcpu.emulate(&vm, CODE, &[]).1, [Missed, Inserted]);
        assert_eq!(vcpu.emulate(&vm, CODE, &[]).1, [Found]);
    }
}

#[test]
fn an_instruction_that_was_not_carried_out_is_not_remembered_for_the_vm() {
    for setting in BY_PLACE {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vm.map(0, DEVICE_LINEAR, 0);
        let (outcome, events) = vcpu.emulate(&vm, CODE, &[]);
        assert!(matches!(outcome, Outcome::Fault(_)));
        assert_eq!(events[0], Missed);
        assert!(!events.contains(&Inserted), "{setting:?}: {events:?}");
        assert!(vm.is_writable(CODE));
    }
}

#[test]
fn a_hit_looks_at_no_more_memory_than_it_must() {
    // Two walks of four levels; the code is in one word or, fetched, in two.
    for (setting, most) in
        [(Setting::Bytes, 4 + 1 + 4), (Setting::Place(Vouching::Walk), 4 + 4), (Setting::Place(Vouching::Tables), 4)]
    {
        let (vm, mut vcpu) = machine(setting, LOAD);
        for _ in 0..4 {
            vcpu.emulate(&vm, CODE, &[]);
        }
        vm.loads.set(0);
        vcpu.emulate(&vm, CODE, &[]);
        assert_eq!(vm.loads.get(), most, "{setting:?}");
    }
}

#[test]
fn bytes_that_the_hardware_has_saved_are_not_fetched() {
    // There is other code in memory by now. Where it is known is not told by bytes, so only two settings can use them.
    for setting in [Setting::Off, Setting::Bytes] {
        let (vm, mut vcpu) = machine(setting, STORE);
        let mut given = [0x90; 15];
        given[..2].copy_from_slice(LOAD);
        for time in 0..3 {
            assert_eq!(vcpu.emulate(&vm, CODE, &given).0, done(2));
            assert_eq!(vcpu.device.accesses[time], Access::Read(DEVICE, Width::Dword), "{setting:?}");
        }
    }
}

#[test]
fn bytes_that_are_only_a_part_of_the_instruction_are_fetched_after_all() {
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, LOAD_AT_32);
        for _ in 0..4 {
            assert_eq!(vcpu.emulate(&vm, CODE, &LOAD_AT_32[..2]).0, done(3), "{setting:?}");
        }
        assert_eq!(vcpu.device.accesses.len(), 4);
    }
}

#[test]
fn an_instruction_on_two_pages_is_carried_out_and_never_remembered() {
    let rip = CODE + PAGE - 1;
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, &[]);
        vm.guest_write(rip, LOAD);
        for time in 0..4 {
            let (outcome, events) = vcpu.emulate(&vm, rip, &[]);
            assert_eq!(outcome, done(2), "{setting:?}");
            assert!(events.contains(&Missed) && !events.contains(&Inserted), "{setting:?}: {events:?}");
            assert_eq!(vcpu.device.accesses.len(), time + 1);
        }
    }
}

#[test]
fn what_makes_room_for_another_is_counted_and_decoded_again() {
    for setting in REMEMBERING {
        let vm = Vm::with(setting, Size { slots: 8, pages: 16 }, Mistake::None);
        let mut vcpu = Vcpu::new(setting);
        let rip = |number: u64| CODE + 16 * number;
        for number in 0..240 {
            // mov eax, [rdi + displacement], in the page of the device.
            let [low, high] = (number as u16 * 4).to_le_bytes();
            vm.guest_write(rip(number), &[0x8b, 0x87, low, high, 0, 0]);
        }
        let mut count = |number| vcpu.emulate(&vm, rip(number), &[]).1;
        let first: Vec<_> = (0..240).flat_map(&mut count).collect();
        let of = |event| first.iter().filter(|other| **other == event).count();
        assert_eq!((of(Missed), of(Inserted)), (240, 240), "{setting:?}");
        let kept = 240 - of(Replaced);
        assert!((1..=64).contains(&kept), "{setting:?}: {kept} have room");
        let again: Vec<_> = (0..240).rev().flat_map(&mut count).collect();
        assert!(again.contains(&Found) && again.contains(&Missed), "{setting:?}: some have lost their room");
        assert_eq!(vcpu.device.accesses.len(), 480);
        let read = |access: &Access| matches!(access, Access::Read(gpa, Width::Dword) if gpa.0 - DEVICE.0 < 960);
        assert!(vcpu.device.accesses.iter().all(read));
    }
}

#[test]
fn code_that_cannot_be_fetched_is_answered_as_if_nothing_was_remembered() {
    for setting in SETTINGS {
        let (vm, mut vcpu) = machine(setting, LOAD);
        for _ in 0..5 {
            vcpu.emulate(&vm, CODE, &[]);
        }
        vm.map(0, CODE, 0);
        let (outcome, _) = vcpu.emulate(&vm, CODE, &[]);
        let Outcome::Fault(exception) = outcome else { panic!("{setting:?}: {outcome:?}") };
        assert_eq!((exception.vector, exception.cr2), (14, Some(CODE)));
        // Beyond what 48 bits can address.
        assert!(matches!(vcpu.emulate(&vm, 1 << 47, &[]).0, Outcome::Fault(_)));
        assert_eq!(vcpu.device.accesses.len(), 5);
    }
}

#[test]
fn registers_come_out_as_the_device_says_under_every_setting() {
    let results = SETTINGS.map(|setting| {
        let (vm, mut vcpu) = machine(setting, LOAD);
        vm.guest_write(CODE + 0x40, LOAD_AT_32);
        vcpu.cpu.gprs[RDI] += 0x100;
        let mut seen = Vec::new();
        for rip in [CODE, CODE + 0x40].into_iter().cycle().take(12) {
            vcpu.emulate(&vm, rip, &[]);
            seen.push((vcpu.cpu.gprs[RAX], vcpu.cpu.rip));
        }
        (seen, vcpu.device.accesses)
    });
    assert!(results.iter().all(|result| *result == results[0]));
}
