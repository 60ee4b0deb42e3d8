//! Corner cases: each rule of the manuals once.

use x86_defs::registers::{dr6, rflags, vector};

use crate::{Boundary, Combined, Debug, Event, Events, Exception, Flags, Plan, Step, Until, combine};

const OPEN: Boundary = Boundary { interrupts_enabled: true, shadow: false };
const CLOSED: Boundary = Boundary { interrupts_enabled: false, shadow: false };
const SHADOW: Boundary = Boundary { interrupts_enabled: true, shadow: true };

const DEBUG: Exception = Exception::new(vector::DEBUG);
const ALIGNMENT: Exception = Exception::with_code(vector::ALIGNMENT_CHECK, 0);
const PAGE: Exception = Exception::with_code(vector::PAGE_FAULT, 2);
const PROTECTION: Exception = Exception::with_code(vector::GENERAL_PROTECTION, 0);
const DOUBLE: Exception = Exception::with_code(vector::DOUBLE_FAULT, 0);

fn inject(event: Event, until: Until) -> Plan {
    Plan { inject: Some(event), until, retract: None }
}

fn wait(until: Until) -> Plan {
    Plan { inject: None, until, retract: None }
}

#[test]
fn debug_trap_goes_before_nmi_and_nmi_before_interrupt() {
    let mut events = Events::new();
    events.raise(DEBUG);
    events.request_nmis(1);
    assert_eq!(events.next(OPEN, Some(0x40), None), inject(Event::Exception(DEBUG), Until::Delivered));
    assert_eq!(events.next(CLOSED, Some(0x40), None), inject(Event::Nmi, Until::Window));
    assert_eq!(events.next(CLOSED, Some(0x40), None), wait(Until::Window));
    assert_eq!(events.next(OPEN, Some(0x40), None), inject(Event::Interrupt(0x40), Until::Exit));
}

#[test]
fn interrupt_waits_for_a_window_while_if_is_clear_or_a_shadow_lasts() {
    let mut events = Events::new();
    assert_eq!(events.next(CLOSED, Some(0x40), None), wait(Until::Window));
    assert_eq!(events.next(SHADOW, Some(0x40), None), wait(Until::Window));
    assert_eq!(events.next(CLOSED, None, None), wait(Until::Exit));
}

#[test]
fn external_interrupt_goes_before_that_of_the_local_apic_and_is_not_the_apics() {
    let mut events = Events::new();
    events.request_external(0x20);
    assert!(!events.is_quiet() && events.has_external());
    assert_eq!(events.next(CLOSED, Some(0x40), None), wait(Until::Window));
    assert_eq!(events.next(OPEN, Some(0x40), None), inject(Event::Interrupt(0x20), Until::Window));
    assert!(events.injects_external() && !events.has_external());
    assert_eq!(events.next(OPEN, Some(0x40), None), inject(Event::Interrupt(0x40), Until::Exit));
    assert!(!events.injects_external() && events.is_quiet());
}

#[test]
fn external_interrupt_whose_delivery_fails_comes_again() {
    let mut events = Events::new();
    let again = Some(Event::Interrupt(0x20));
    events.request_external(0x20);
    assert_eq!(events.next(OPEN, None, None), inject(Event::Interrupt(0x20), Until::Exit));
    assert_eq!(events.next(OPEN, None, again), inject(Event::Interrupt(0x20), Until::Exit));
    assert!(events.injects_external(), "it is the same one");
    events.raise(PAGE);
    assert_eq!(events.next(OPEN, None, again), inject(Event::Exception(PAGE), Until::Window));
    assert!(events.has_external());
    assert_eq!(events.next(OPEN, None, None), inject(Event::Interrupt(0x20), Until::Exit));
    assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
}

#[test]
fn external_interrupt_that_is_withdrawn_does_not_come() {
    let mut events = Events::new();
    events.request_external(0x20);
    events.withdraw_external();
    assert!(events.is_quiet());
    assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
}

#[test]
fn nmi_waits_for_the_instruction_behind_sti() {
    let mut events = Events::new();
    events.request_nmis(1);
    assert_eq!(events.next(SHADOW, None, None), wait(Until::Step));
    events.stepped();
    assert_eq!(events.next(OPEN, None, None), inject(Event::Nmi, Until::Exit));
}

#[test]
fn second_nmi_waits_until_iret_has_completed_and_a_third_is_lost() {
    let mut events = Events::new();
    events.request_nmis(1);
    assert_eq!(events.next(OPEN, None, None), inject(Event::Nmi, Until::Exit));
    events.request_nmis(5);
    assert!(events.is_quiet() && !events.wakes(), "masked NMIs are nothing to look at");
    assert_eq!(events.next(CLOSED, None, None), wait(Until::Exit));
    events.at_iret();
    assert_eq!(events.next(CLOSED, None, None), wait(Until::Step));
    assert!(events.masks_nmis(), "the IRET is only about to be executed");
    events.stepped();
    assert_eq!(events.next(OPEN, None, None), inject(Event::Nmi, Until::Exit));
    events.at_iret();
    events.stepped();
    assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
}

#[test]
fn two_nmis_for_a_vcpu_that_did_not_run_are_two() {
    let mut events = Events::new();
    events.request_nmis(1);
    events.request_nmis(1);
    events.request_nmis(1);
    for _ in 0..2 {
        assert_eq!(events.next(OPEN, None, None).inject, Some(Event::Nmi));
        events.at_iret();
        events.stepped();
    }
    assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
}

#[test]
fn iret_that_faults_leaves_nmis_masked() {
    let mut events = Events::new();
    events.request_nmis(2);
    assert_eq!(events.next(OPEN, None, None).inject, Some(Event::Nmi));
    events.at_iret();
    events.abandon_step();
    events.raise(PROTECTION);
    assert_eq!(events.next(OPEN, None, None), inject(Event::Exception(PROTECTION), Until::Exit));
    assert!(events.masks_nmis());
}

#[test]
fn interrupt_before_an_iret_goes_first_and_the_mask_stays() {
    let mut events = Events::new();
    events.request_nmis(1);
    assert_eq!(events.next(OPEN, None, None).inject, Some(Event::Nmi));
    events.at_iret();
    assert_eq!(events.next(OPEN, Some(0x40), None).inject, Some(Event::Interrupt(0x40)));
    assert!(events.masks_nmis() && !events.is_returning(), "another IRET comes first");
}

/// CVE-2015-5307 and CVE-2015-8104: a delivery may raise the same exception again without end. The processor alone
/// would never come back. So each round is an exit, and the guest gets the exception of that round.
#[test]
fn exception_that_its_own_delivery_raises_is_delivered_once_for_each_exit() {
    for exception in [ALIGNMENT, DEBUG] {
        let mut events = Events::new();
        events.raise(exception);
        for _ in 0..100 {
            let plan = events.next(OPEN, None, None);
            assert_eq!(plan, inject(Event::Exception(exception), Until::Exit));
            assert!(events.is_quiet(), "one exit, one event");
            // An exit for the same exception interrupts the delivery.
            events.raise(exception);
            assert_eq!(
                events.next(OPEN, None, Some(Event::Exception(exception))),
                inject(Event::Exception(exception), Until::Exit)
            );
            events.raise(exception);
        }
    }
}

#[test]
fn interrupt_whose_delivery_raises_an_exception_is_not_lost() {
    let mut events = Events::new();
    events.raise(ALIGNMENT);
    let plan = events.next(OPEN, None, Some(Event::Interrupt(0x40)));
    let wanted = Plan { inject: Some(Event::Exception(ALIGNMENT)), until: Until::Window, retract: Some(0x40) };
    assert_eq!(plan, wanted);
}

#[test]
fn nmi_whose_delivery_raises_an_exception_is_not_lost() {
    let mut events = Events::new();
    events.request_nmis(1);
    assert_eq!(events.next(OPEN, None, None).inject, Some(Event::Nmi));
    events.raise(ALIGNMENT);
    assert_eq!(events.next(OPEN, None, Some(Event::Nmi)), inject(Event::Exception(ALIGNMENT), Until::Delivered));
    assert_eq!(events.next(OPEN, None, None).inject, Some(Event::Nmi));
}

#[test]
fn delivery_that_was_cut_short_is_repeated_before_anything_else() {
    for event in [Event::Interrupt(0x40), Event::Exception(PAGE), Event::Nmi] {
        let mut events = Events::new();
        assert_eq!(events.next(CLOSED, None, Some(event)), inject(event, Until::Exit));
    }
}

#[test]
fn software_interrupt_of_the_guest_is_repeated_by_its_instruction_and_an_injected_one_is_injected_again() {
    let breakpoint = Event::Exception(Exception::new(vector::BREAKPOINT));
    for (reported, again) in [(Event::SoftwareInterrupt(0x33), 0x33), (breakpoint, vector::BREAKPOINT)] {
        let mut events = Events::new();
        assert_eq!(events.next(OPEN, None, Some(reported)), wait(Until::Exit));

        events.raise_software_interrupt(again);
        assert_eq!(events.next(OPEN, None, None), inject(Event::SoftwareInterrupt(again), Until::Delivered));
        assert_eq!(events.next(OPEN, None, Some(reported)), inject(Event::SoftwareInterrupt(again), Until::Delivered));
        // Delivered at last; the next one is the guest's own.
        assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
        assert_eq!(events.next(OPEN, None, Some(reported)), wait(Until::Exit));
    }
}

#[test]
fn exceptions_combine_as_the_table_of_the_manual_says() {
    assert_eq!(combine(DEBUG, PAGE), Combined::Second);
    assert_eq!(combine(PAGE, DEBUG), Combined::Second);
    assert_eq!(combine(PROTECTION, PAGE), Combined::Second);
    assert_eq!(combine(PROTECTION, PROTECTION), Combined::DoubleFault);
    assert_eq!(combine(PAGE, PAGE), Combined::DoubleFault);
    assert_eq!(combine(PAGE, PROTECTION), Combined::DoubleFault);
    assert_eq!(combine(DOUBLE, PAGE), Combined::Shutdown);
    assert_eq!(combine(DOUBLE, PROTECTION), Combined::Shutdown);
    assert_eq!(combine(DOUBLE, ALIGNMENT), Combined::Second);
    assert_eq!(combine(ALIGNMENT, ALIGNMENT), Combined::Second);
}

#[test]
fn init_forgets_what_waits_and_unmasks_nmis() {
    let mut events = Events::new();
    events.request_nmis(2);
    let _ = events.next(OPEN, None, None);
    events.raise(PAGE);
    events.reset();
    assert!(events.is_quiet() && !events.masks_nmis() && !events.wakes());
    assert_eq!(events.next(OPEN, None, None), wait(Until::Exit));
}

const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;

#[test]
fn step_leaves_no_trace_in_the_guests_registers() {
    let before = Debug { rflags: 0x202, dr6: DR6 | 1, dr7: DR7 };
    let mut guest = before;
    let step = Step::begin(0x1000, &mut guest, Flags::Kept);
    assert!(guest.rflags & rflags::TF != 0);
    // The processor: the instruction completes, and clears IF.
    guest.rflags &= !rflags::IF;
    guest.dr6 |= dr6::SINGLE_STEP;
    assert_eq!(step.end_by_debug(&mut guest), (true, false));
    assert_eq!(guest, Debug { rflags: 2, ..before });
}

#[test]
fn guest_that_steps_itself_gets_its_own_trap() {
    let mut guest = Debug { rflags: 0x302, dr6: DR6, dr7: DR7 };
    let step = Step::begin(0x1000, &mut guest, Flags::Kept);
    guest.dr6 |= dr6::SINGLE_STEP;
    assert_eq!(step.end_by_debug(&mut guest), (true, true));
    assert_eq!(guest, Debug { rflags: 0x302, dr6: DR6 | dr6::SINGLE_STEP, dr7: DR7 });
}

#[test]
fn flags_that_the_instruction_loads_are_the_guests() {
    for loaded in [0x202, 0x302] {
        let mut guest = Debug { rflags: 0x2, dr6: DR6, dr7: DR7 };
        let step = Step::begin(0x1000, &mut guest, Flags::Loaded);
        guest.rflags = loaded;
        guest.dr6 |= dr6::SINGLE_STEP;
        assert_eq!(step.end_by_debug(&mut guest), (true, false));
        assert_eq!(guest.rflags, loaded);
    }
}

#[test]
fn flags_that_the_instruction_saves_are_to_be_put_right_unless_the_guest_has_set_tf() {
    for (rflags, flags, wrong) in
        [(0x202, Flags::Saved, true), (0x302, Flags::Saved, false), (0x202, Flags::Kept, false)]
    {
        let mut guest = Debug { rflags, dr6: DR6, dr7: DR7 };
        let step = Step::begin(0x1000, &mut guest, flags);
        assert_eq!(step.has_saved_trap_flag(), wrong);
        guest.dr6 |= dr6::SINGLE_STEP;
        let _ = step.end_by_debug(&mut guest);
        assert_eq!(guest.rflags, rflags);
    }
}

#[test]
fn breakpoint_that_the_stepped_instruction_hits_is_the_guests_and_one_that_is_off_is_nobodys() {
    let mut guest = Debug { rflags: 0x2, dr6: DR6, dr7: DR7 | 0b10 };
    let step = Step::begin(0x1000, &mut guest, Flags::Kept);
    guest.dr6 |= dr6::SINGLE_STEP | 0b11;
    assert_eq!(step.end_by_debug(&mut guest), (true, true));
    assert_eq!(guest.dr6, DR6 | 1);
}

#[test]
fn instruction_breakpoint_is_hit_before_the_instruction_which_has_not_completed() {
    let mut guest = Debug { rflags: 0x2, dr6: DR6, dr7: DR7 | 1 };
    let step = Step::begin(0x1000, &mut guest, Flags::Loaded);
    guest.dr6 |= 1;
    assert_eq!(step.end_by_debug(&mut guest), (false, true));
    assert_eq!(guest, Debug { rflags: 0x2, dr6: DR6 | 1, dr7: DR7 | 1 });
}

#[test]
fn exit_before_the_instruction_gives_the_flags_back() {
    let before = Debug { rflags: 0x202, dr6: DR6, dr7: DR7 };
    let mut guest = before;
    Step::begin(0x1000, &mut guest, Flags::Loaded).end(&mut guest);
    assert_eq!(guest, before);
}

#[test]
fn event_that_is_owed_can_be_looked_at_and_taken_back() {
    let mut events = Events::new();
    assert_eq!(events.owed(), None);
    let exception = Exception::with_code(vector::PAGE_FAULT, 2);
    events.raise(exception);
    assert_eq!(events.owed(), Some(Event::Exception(exception)));
    events.forget_owed();
    assert_eq!(events.owed(), None);
    assert!(events.is_quiet());
    events.raise_software_interrupt(3);
    assert_eq!(events.owed(), Some(Event::SoftwareInterrupt(3)));
}

#[test]
fn mask_of_nmis_that_is_set_from_outside_holds_until_an_iret() {
    let mut events = Events::new();
    events.request_nmis(2);
    events.set_nmi_mask(true);
    assert!(events.masks_nmis() && events.is_quiet(), "one of the two is latched");
    events.at_iret();
    assert_eq!(events.next(OPEN, None, None), wait(Until::Step));
    events.stepped();
    assert_eq!(events.next(OPEN, None, None), inject(Event::Nmi, Until::Exit));
    events.set_nmi_mask(false);
    events.request_nmis(1);
    assert_eq!(events.next(OPEN, None, None), inject(Event::Nmi, Until::Exit));
}

/// What an exit does to the events: a new exception, an INT, NMIs, the end of an NMI's handler.
fn exit_at_random(events: &mut Events, rng: &mut fastrand::Rng) {
    match rng.u32(..6) {
        0 => events.raise([PAGE, DEBUG, PROTECTION][rng.usize(..3)]),
        1 => events.raise_software_interrupt(0x80),
        2 => events.request_nmis(rng.u8(..3)),
        3 => {
            events.at_iret();
            events.stepped();
        }
        _ => {}
    }
}

/// The next entry. The exit interrupts the delivery of the last event, or nothing, or an INT of the guest's own.
fn enter_at_random(events: &mut Events, last: Option<Event>, rng: &mut fastrand::Rng) -> Plan {
    let at = [OPEN, CLOSED][rng.usize(..2)];
    let interrupt = rng.bool().then_some(0x40);
    let interrupted = [None, last, Some(Event::SoftwareInterrupt(0x81))][rng.usize(..3)];
    events.next(at, interrupt, interrupted)
}

#[test]
fn restored_events_come_as_those_that_were_saved() {
    let mut rng = fastrand::Rng::with_seed(5);
    for round in 0..20_000 {
        let (mut saved, mut last) = (Events::new(), None);
        for _ in 0..rng.u32(..12) {
            last = enter_at_random(&mut saved, last, &mut rng).inject;
            exit_at_random(&mut saved, &mut rng);
        }
        // The last exit may have interrupted the delivery of the last event, or of an INT that the guest executed.
        let interrupted = [None, last, Some(Event::SoftwareInterrupt(0x81))][rng.usize(..3)];
        let state = saved.state(interrupted);
        let mut restored = Events::with_state(&state);
        assert_eq!(restored.state(state.interrupted), state);

        let at = [OPEN, CLOSED][rng.usize(..2)];
        let interrupt = rng.bool().then_some(0x40);
        let plan = saved.next(at, interrupt, interrupted);
        assert_eq!(restored.next(at, interrupt, state.interrupted), plan, "round {round}: {state:?}");
        last = plan.inject;
        let mut same = rng.clone();
        for _ in 0..20 {
            exit_at_random(&mut saved, &mut rng);
            exit_at_random(&mut restored, &mut same);
            let plan = enter_at_random(&mut saved, last, &mut rng);
            assert_eq!(enter_at_random(&mut restored, last, &mut same), plan, "round {round}: {state:?}");
            last = plan.inject;
        }
    }
}
