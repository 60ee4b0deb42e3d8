//! What is timed does what its name says.

use std::sync::Arc;

use abi::payload::DecodeCache;
use decode_cache::{Bytes, Vouching};
use x86_emulate::{Mode, Outcome, Walks, decode, fetch};

use super::emulator::{Emulator, Vm};
use super::machine::{FORMS, NEW_PLACES, VALUE, Vcpu};
use super::subjects::{BITS_64, by_bytes, by_place, fetched, known, place};
use super::threads::Scaling;
use super::{Figure, Kind, Operation, targets, undisturbed};
use crate::args::SETTINGS;
use crate::bench::Spread;

#[test]
fn forms_are_whole_instructions_for_both_decoders() {
    for form in FORMS {
        let instruction = decode(Mode::Bits64, form.code).expect("is known");
        assert_eq!(usize::from(instruction.length), form.code.len(), "{}", form.name);
        let mut decoder = iced_x86::Decoder::new(64, form.code, iced_x86::DecoderOptions::NONE);
        assert_eq!(decoder.decode().len(), form.code.len(), "{}", form.name);
    }
}

#[test]
fn every_form_reaches_the_device_under_every_setting_the_first_time_and_later() {
    for setting in SETTINGS {
        let mut emulator = Emulator::new(setting, Arc::new(Vm::new(setting)));
        for (form, pass) in FORMS.into_iter().flat_map(|form| (0..3).map(move |pass| (form, pass))) {
            let (reads, length) = (emulator.vcpu().device.reads, form.code.len());
            let known = |emulator: &Emulator| emulator.counters().repeated.get() + emulator.counters().found.get();
            let known_before = known(&emulator);
            let outcome = emulator.emulate(form.rip());
            let was_known = known(&emulator) > known_before;
            assert!(
                matches!(outcome, Outcome::Done { length: it } if usize::from(it) == length),
                "{}, {}, pass {pass}: {outcome:?}",
                setting.name(),
                form.name
            );
            // Decoded the first time, and known from then on.
            assert_eq!(was_known, setting != DecodeCache::Off && pass > 0, "{}, {}", setting.name(), form.name);
            let vcpu = emulator.vcpu();
            let writes_only = form.name.starts_with("mov [") || form.name.contains("EOI");
            assert_eq!(vcpu.device.reads - reads, u64::from(!writes_only), "{}", form.name);
            assert_eq!(vcpu.cpu.rip, form.rip() + length as u64);
        }
        assert_eq!(emulator.vcpu().cpu.gprs[0], VALUE);
        assert!(emulator.vcpu().device.written.is_some());
    }
}

#[test]
fn what_is_timed_as_a_hit_is_one_and_none_of_the_forms_takes_the_room_of_another() {
    let by_bytes = by_bytes();
    for form in FORMS {
        assert_eq!(by_bytes.find(BITS_64, &fetched(form)), Some(&known(form)), "{}", form.name);
    }
    for vouching in [Vouching::Walk, Vouching::Tables] {
        let by_place = by_place(vouching);
        for form in FORMS {
            assert_eq!(by_place.find(&place(form)), Some(known(form)), "{}, {vouching:?}", form.name);
        }
    }
}

#[test]
fn bytes_that_are_looked_for_are_those_that_would_be_fetched() {
    let vm = Vm::new(DecodeCache::Off);
    let mut vcpu = Vcpu::new();
    for form in FORMS {
        vcpu.cpu.rip = form.rip();
        let found = fetch(&vcpu.cpu, &vm.ram, &mut Walks::new()).expect("is mapped");
        let bytes = Bytes::from_zero_padded(found.window.words(), found.window.length());
        assert_eq!(bytes, fetched(form), "{}", form.name);
        assert_eq!(Some(found.gpa), place(form).gpa);
    }
}

#[test]
fn new_places_are_new_each_time_and_their_bytes_are_known() {
    let mut emulator = Emulator::new(DecodeCache::Bytes, Arc::new(Vm::new(DecodeCache::Bytes)));
    for rip in NEW_PLACES.into_iter().cycle().take(100) {
        assert_eq!(emulator.emulate(rip), Outcome::Done { length: 2 });
    }
    assert_eq!([emulator.counters().repeated.get(), emulator.counters().found.get()], [0, 99]);
}

fn figure(kind: Kind, cycles: f64) -> Figure {
    let cycles = Spread::of(&[cycles]).expect("has a value");
    Figure { name: "x".to_string(), kind, cycles, rounds: vec![1.0] }
}

#[test]
fn promises_are_judged_by_the_longest() {
    let met = |figures: &[Figure]| targets(figures, &[]).iter().map(|target| target.met).collect::<Vec<_>>();
    let (hit, emulation) = (|cycles| figure(Kind::Hit, cycles), |cycles| figure(Kind::Emulation, cycles));
    let [kept, broken] = [Some(true), Some(false)];
    assert_eq!(met(&[hit(9.0), hit(10.0), emulation(300.0), figure(Kind::Other, 999.0)]), [kept, kept, None]);
    assert_eq!(met(&[hit(9.0), hit(10.1), emulation(299.0), emulation(301.0)]), [broken, broken, None]);
    assert_eq!(met(&[]), [None]);
}

fn scaling(ratio: f64, is_promised: bool, is_judged: bool) -> Scaling {
    let [alone, together, ratio] =
        [100.0, 100.0 * ratio, ratio].map(|value| Spread::of(&[value]).expect("has a value"));
    Scaling { name: "x".to_string(), is_promised, is_judged, alone, together, ratio, turns: Vec::new() }
}

#[test]
fn threads_are_judged_by_the_slowest_and_only_if_all_had_their_cores() {
    let met = |scalings: &[Scaling]| undisturbed(scalings).and_then(|target| target.met);
    assert_eq!(met(&[scaling(1.05, true, true), scaling(1.1, true, true), scaling(9.0, false, true)]), Some(true));
    assert_eq!(met(&[scaling(1.05, true, true), scaling(1.11, true, true)]), Some(false));
    assert_eq!(met(&[scaling(3.37, true, true), scaling(3.37, false, false)]), None);
    assert_eq!(met(&[scaling(1.0, false, true)]), None, "nothing of which anything was promised");
}

#[test]
fn operations_can_be_timed_many_times() {
    for mut subject in super::subjects::all() {
        let run = |operation: &mut Operation| (0..1000).for_each(|_| operation());
        run(&mut subject.operation);
        run(&mut subject.empty);
        assert!(!subject.name.is_empty());
    }
}
