//! What is shown of a played host, as text, as JSON, and on screens of all sizes.

use abi::control::{HostInfo, VmState};
use abi::counters::ExitReason;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn picture(at_ns: u64, halts: u64, guest_ticks: u64) -> Picture {
    let mut counters = VcpuCounters { guest_ticks, ..VcpuCounters::default() };
    counters.exits[ExitReason::Halt as usize] = halts;
    let host = HostInfo {
        version: "0.1.0".to_string(),
        arch: "x86_64".to_string(),
        pcpus: 2,
        memory_bytes: 1 << 30,
        clock_hz: 1_000_000_000,
        processor: "Test\u{1b}[2J".to_string(),
    };
    let info = |number, name: &str, state| {
        let name = name.to_string();
        VmInfo { number, name, vcpus: 2, memory_bytes: 512 << 20, state }
    };
    let ended = info(1, "gone", VmState::Stopped(abi::control::StopReason::PowerOff));
    let snapshot = Snapshot { at_ns, vcpus: vec![counters, counters] };
    Picture { host, vms: vec![(info(0, "default", VmState::Running), Some(snapshot)), (ended, None)] }
}

#[test]
fn numbers_are_of_the_last_interval() {
    let (old, new) = (picture(1_000_000_000, 100, 500_000_000), picture(3_000_000_000, 300, 1_500_000_000));
    let (all, vcpus) = activity(Some(&old), &new, 0).expect("has counters");
    assert_eq!((all.exits, all.time[0]), (200.0, 100.0));
    assert_eq!((vcpus[0].exits, vcpus[1].time[0]), (100.0, 50.0));
    assert_eq!(activity(Some(&old), &new, 1), None);
    assert_eq!(activity(Some(&old), &new, 9), None);
}

#[test]
fn emulation_of_the_last_interval_is_told_if_there_was_any() {
    let emulating = |at_ns, accesses| {
        let mut picture = picture(at_ns, 0, 0);
        for vcpu in picture.vms[0].1.iter_mut().flat_map(|snapshot| &mut snapshot.vcpus) {
            vcpu.exits[ExitReason::Mmio as usize] = accesses;
            vcpu.decode_hits = accesses;
        }
        picture
    };
    let (old, new) = (emulating(1_000_000_000, 100), emulating(2_000_000_000, 350));
    let text_of = |old, new| text(Some(old), new);
    assert!(text_of(&old, &new).contains("emulation: 500 accesses, hits 100.0 %\n"), "{}", text_of(&old, &new));
    assert!(!text_of(&new, &emulating(3_000_000_000, 350)).contains("emulation"));

    let mut terminal = Terminal::new(TestBackend::new(110, 20)).expect("is made of memory");
    let mut view = View::new(DELAYS[0]);
    terminal.draw(|frame| draw(frame, Some(&old), &new, &mut view)).expect("is made of memory");
    assert!(terminal.backend().to_string().contains("emulation: 500 accesses, hits 100.0 %"));
}

#[test]
fn faults_on_memory_are_told_in_numbers_and_on_every_screen() {
    let logging = |at_ns, faults| {
        let mut picture = picture(at_ns, 0, at_ns / 2);
        for vcpu in picture.vms[0].1.iter_mut().flat_map(|snapshot| &mut snapshot.vcpus) {
            (vcpu.dirty_faults, vcpu.dirty_splits, vcpu.stage2_stall_ticks) = (faults, faults / 100, 1000 * faults);
            vcpu.flush_calls = faults;
        }
        picture
    };
    let (old, new) = (logging(1_000_000_000, 1000), logging(2_000_000_000, 3000));
    let json = json_of(Some(&old), &new);
    let total = &json["vms"][0]["total"];
    assert_eq!((&total["dirty_faults_per_second"], &total["dirty_splits_per_second"]), (&json!(4000.0), &json!(40.0)));
    assert_eq!(total["stage2_stall_percent"], 0.4);
    // However narrow: words go to the next line, and none is cut off.
    for (width, height) in [(110, 20), (60, 30), (40, 60)] {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("is made of memory");
        let mut view = View::new(DELAYS[0]);
        terminal.draw(|frame| draw(frame, Some(&old), &new, &mut view)).expect("is made of memory");
        let screen = terminal.backend().to_string();
        for word in ["deferred", "recorded", "0.40", "time"] {
            assert!(screen.contains(word), "{word} at {width}:\n{screen}");
        }
    }
}

#[test]
fn shootdowns_are_told_as_sent_kicked_and_deferred() {
    let flushing = |at_ns, calls| {
        let mut picture = picture(at_ns, 0, 0);
        for vcpu in picture.vms[0].1.iter_mut().flat_map(|snapshot| &mut snapshot.vcpus) {
            (vcpu.flush_calls, vcpu.flush_targets, vcpu.flush_kicks) = (calls, 3 * calls, calls / 2);
            vcpu.tlb_flushes = calls;
        }
        picture
    };
    let (old, new) = (flushing(1_000_000_000, 100), flushing(2_000_000_000, 300));
    let text = text(Some(&old), &new);
    assert!(text.contains("shootdowns 400 sent, 200 kicked, 1000 deferred"), "{text}");
    let json = json_of(Some(&old), &new);
    assert_eq!(json["vms"][0]["total"]["deferred_per_second"], 1000.0);
    assert_eq!(json["vms"][0]["vcpus"][1]["shootdowns_per_second"], 200.0);
    assert_eq!((&json["vms"][1]["name"], &json["vms"][1]["total"]), (&json!("gone"), &Value::Null));
}

#[test]
fn vms_are_sorted_as_the_keys_say() {
    let (mut old, mut new) = (picture(1_000_000_000, 100, 0), picture(2_000_000_000, 200, 0));
    let (busier_before, busier) = (picture(1_000_000_000, 100, 0), picture(2_000_000_000, 900, 500_000_000));
    old.vms.push(busier_before.vms[0].clone());
    new.vms.push(busier.vms[0].clone());
    let mut view = View::new(DELAYS[0]);
    assert_eq!(view.order(Some(&old), &new), [0, 1, 2]);
    for order in [Order::Time, Order::Exits] {
        view.order = order;
        assert_eq!(view.order(Some(&old), &new), [2, 0, 1], "one that has ended comes last");
    }
    view.reversed = true;
    assert_eq!(view.order(Some(&old), &new), [1, 0, 2]);
}

#[test]
fn counters_that_run_backwards_show_as_nothing() {
    let (old, new) = (picture(3, 300, 3), picture(3, 100, 1));
    let (all, _) = activity(Some(&old), &new, 0).expect("has counters");
    assert_eq!(all, Activity::default());
    assert!(text(Some(&old), &new).contains("default"));
}

#[test]
fn text_and_screen_show_the_same_vms() {
    let (old, new) = (picture(1_000_000_000, 100, 0), picture(2_000_000_000, 300, 0));
    let text = text(Some(&old), &new);
    assert!(text.contains("halt_exits 100 %") && text.contains("ended: power off"), "{text}");
    assert!(!text.contains('\u{1b}'));

    let mut terminal = Terminal::new(TestBackend::new(110, 20)).expect("is made of memory");
    let mut view = View::new(DELAYS[0]);
    for vcpus in [false, true] {
        view.vcpus = vcpus;
        terminal.draw(|frame| draw(frame, Some(&old), &new, &mut view)).expect("is made of memory");
        let screen = terminal.backend().to_string();
        assert!(screen.contains("default") && screen.contains("halt_exits") && screen.contains("400"), "{screen}");
    }
    // A terminal of no size must not upset anything.
    let mut terminal = Terminal::new(TestBackend::new(1, 1)).expect("is made of memory");
    terminal.draw(|frame| draw(frame, None, &new, &mut view)).expect("is made of memory");
}
