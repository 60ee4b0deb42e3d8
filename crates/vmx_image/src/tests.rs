//! The rules by name, and random control blocks against what the manual demands of an entry.

use fuzz::Decisions;
use x86_defs::registers::{dr6, rflags};
use x86_defs::vmcb::{IntCtl, Intercept1, Vmcb, VmcbEvent};
use x86_defs::vmx::controls::primary;
use x86_defs::vmx::event::Information;
use x86_defs::vmx::reason;

use crate::{
    BY_MOV_SS, BY_NMI, BY_STI, DURING_STEP, Entry, Fields, Left, Quiet, SHADOWS, end_step, entry, exit, masks_nmis,
    take_debug, unmasks_nmis,
};

const OPEN: u64 = 0x202;
const CLOSED: u64 = 0x002;
const CONTROLS: u32 = 0x8401_e1f2;

fn image(flags: u64) -> Vmcb {
    let mut image = Vmcb::zeroed();
    (image.save.rip, image.save.rflags) = (0x1000, flags);
    image.control.intercept_exceptions = DURING_STEP;
    image
}

fn entered(image: &mut Vmcb) -> Entry {
    entry(image, &Fields::default(), CONTROLS, || true)
}

fn left(rip: u64, length: u64, interrupted: u32) -> Left {
    Left { rip, rflags: OPEN, interruptibility: 0, length, interrupted: Information(interrupted) }
}

#[test]
fn plain_entry_has_the_registers_and_the_first_controls() {
    let fields = Fields { rip: 0x1000, rflags: OPEN, primary: CONTROLS, exceptions: DURING_STEP, interruptibility: 0 };
    assert_eq!(entered(&mut image(OPEN)), Entry { fields, delivery: None, pending_debug: None });
}

#[test]
fn interrupt_that_waits_becomes_a_window() {
    let mut image = image(CLOSED);
    image.control.int_ctl = IntCtl(0).with_interrupt(0x41);
    assert_eq!(entered(&mut image).fields.primary, CONTROLS | primary::INTERRUPT_WINDOW);
    assert_ne!(image.control.int_ctl.0 & IntCtl::V_IRQ, 0, "the guest cannot take it by itself");
}

#[test]
fn pause_exits_only_while_somebody_waits() {
    let mut image = image(OPEN);
    image.control.intercept_1 = Intercept1::PAUSE;
    assert_eq!(entered(&mut image).fields.primary, CONTROLS | primary::PAUSE);
}

#[test]
fn shadow_is_spelled_by_the_flag_that_the_manual_allows() {
    for (flags, held, wanted) in [
        (OPEN, 0, BY_STI),
        (CLOSED, 0, BY_MOV_SS),
        (OPEN, BY_MOV_SS, BY_MOV_SS),
        (OPEN, BY_STI, BY_STI),
        (CLOSED, BY_MOV_SS, BY_MOV_SS),
        (CLOSED, BY_STI, BY_MOV_SS),
    ] {
        let mut image = image(flags);
        image.control.interrupt_shadow = 1;
        let held = Fields { interruptibility: held, ..Fields::default() };
        assert_eq!(entry(&mut image, &held, CONTROLS, || true).fields.interruptibility, wanted, "{flags:#x} {held:?}");
    }
    let held = Fields { interruptibility: BY_STI, ..Fields::default() };
    assert_eq!(entry(&mut image(OPEN), &held, CONTROLS, || true).fields.interruptibility, 0, "it was ended");
}

#[test]
fn step_of_the_guest_waits_for_the_end_of_a_shadow() {
    let mut stepping = image(OPEN | rflags::TF);
    stepping.control.interrupt_shadow = 1;
    let held = Fields { rflags: OPEN | rflags::TF, ..Fields::default() };
    assert_eq!(entry(&mut stepping, &held, CONTROLS, || true).pending_debug, Some(1 << 14));
    let mut quiet = image(OPEN);
    quiet.control.interrupt_shadow = 1;
    assert_eq!(entered(&mut quiet).pending_debug, Some(0));
    assert_eq!(entered(&mut image(OPEN | rflags::TF)).pending_debug, None, "no shadow");
}

#[test]
fn mask_of_nmis_is_the_processors_and_its_end_exits() {
    let mut masked = image(OPEN);
    masked.control.intercept_1 = Intercept1::IRET;
    let entry = entered(&mut masked);
    assert_eq!(entry.fields.interruptibility, BY_NMI);
    assert_eq!(entry.fields.primary, CONTROLS | primary::NMI_WINDOW);
    // The NMI itself must find no mask, and makes one.
    masked.control.event_inj = VmcbEvent::nmi();
    let entry = entered(&mut masked);
    assert_eq!((entry.fields.interruptibility, entry.fields.primary), (0, CONTROLS | primary::NMI_WINDOW));
    // Another event leaves it.
    masked.control.event_inj = VmcbEvent::exception(6);
    assert_eq!(entered(&mut masked).fields.interruptibility, BY_NMI);
}

#[test]
fn step_of_the_hypervisor_is_the_monitor_trap_flag_and_hides_nothing() {
    let mut image = image(OPEN | rflags::TF);
    image.control.intercept_exceptions = !(1 << 2);
    image.control.intercept_1 = Intercept1::IRET | Intercept1::POPF | Intercept1::PUSHF | Intercept1::INTN;
    let entry = entered(&mut image);
    assert_eq!(entry.fields.rflags, OPEN);
    assert_eq!(entry.fields.primary, CONTROLS | primary::MONITOR_TRAP, "and no window for NMIs");
    assert_eq!(entry.fields.exceptions, DURING_STEP);
    assert!(!masks_nmis(&image.control));
    // As SVM ends a step, which the rest of the hypervisor expects.
    exit(&mut image, &mut Fields::default(), &left(0x1003, 0, 0), || 0);
    end_step(&mut image);
    assert_eq!(image.save.rflags, OPEN | rflags::TF);
    assert_eq!(image.save.dr6 & dr6::SINGLE_STEP, dr6::SINGLE_STEP);
}

#[test]
fn step_of_the_guests_own_stays_its_own() {
    let mut image = image(OPEN | rflags::TF);
    image.control.intercept_exceptions = !(1 << 2);
    let held = Fields { rflags: OPEN | rflags::TF, ..Fields::default() };
    let entry = entry(&mut image, &held, CONTROLS, || true);
    assert_eq!((entry.fields.rflags, entry.fields.primary), (OPEN | rflags::TF, CONTROLS));
}

/// An event, its information (SDM vol. 3C, table 25-17), error code, length, and how far RIP goes back.
type Spelled = (VmcbEvent, u32, Option<u32>, u32, u64);

#[test]
fn each_kind_of_event_goes_in_as_the_manual_wants_it() {
    let events: [Spelled; 8] = [
        (VmcbEvent::interrupt(0x41), 0x8000_0041, None, 0, 0),
        (VmcbEvent::nmi(), 0x8000_0202, None, 0, 0),
        (VmcbEvent::exception(1), 0x8000_0301, None, 0, 0),
        (VmcbEvent::exception_with_code(14, 6), 0x8000_0b0e, Some(6), 0, 0),
        (VmcbEvent::software_interrupt(0x80), 0x8000_0480, None, 1, 1),
        (VmcbEvent::software_interrupt(3), 0x8000_0603, None, 1, 1),
        (VmcbEvent::software_interrupt(4), 0x8000_0604, None, 1, 1),
        (VmcbEvent::exception(3), 0x8000_0603, None, 1, 1),
    ];
    for (event, information, code, length, back) in events {
        let mut image = image(OPEN);
        image.control.event_inj = event;
        let entry = entered(&mut image);
        let delivery = entry.delivery.expect("there is an event");
        assert_eq!((delivery.information.0, delivery.code, delivery.length), (information, code, length));
        assert_eq!(entry.fields.rip, 0x1000 - back);
        assert!(!image.control.event_inj.is_valid(), "it goes in once");
    }
}

#[test]
fn software_interrupt_at_address_zero_returns_to_zero() {
    for (is_64_bit, before) in [(true, u64::MAX), (false, 0xffff_ffff)] {
        let mut image = image(OPEN);
        image.save.rip = 0;
        image.control.event_inj = VmcbEvent::software_interrupt(0x21);
        assert_eq!(entry(&mut image, &Fields::default(), CONTROLS, || is_64_bit).fields.rip, before);
    }
}

#[test]
fn interrupted_delivery_is_given_back_and_goes_in_the_same_way() {
    for (information, code, back) in [
        (0x8000_0041_u32, None, 0),
        (0x8000_0202, None, 0),
        (0x8000_0306, None, 0),
        (0x8000_0b0d, Some(0x18), 0),
        (0x8000_0480, None, 2),
        (0x8000_0603, None, 1),
    ] {
        let mut block = image(OPEN);
        let mut held = Fields::default();
        exit(&mut block, &mut held, &left(0x1000, back, information), || code.unwrap_or(0));
        assert_eq!(block.save.rip, 0x1000 + back, "{information:#x}: its return address");
        block.control.event_inj = block.control.exit_int_info;
        let entry = entry(&mut block, &held, CONTROLS, || true);
        let delivery = entry.delivery.expect("it is delivered again");
        assert_eq!((delivery.information.0, delivery.code), (information, code));
        assert_eq!(entry.fields.rip + u64::from(delivery.length), 0x1000 + back);
    }
}

#[test]
fn exit_without_an_event_leaves_none_and_asks_for_no_code() {
    let mut image = image(CLOSED);
    let mut held = Fields::default();
    let left = Left { interruptibility: BY_STI | BY_NMI, ..left(0x2000, 3, 0x0000_0b0e) };
    exit(&mut image, &mut held, &left, || panic!("there is no event"));
    assert!(!image.control.exit_int_info.is_valid());
    assert_eq!((image.save.rip, image.control.next_rip), (0x2000, 0x2003));
    assert_eq!((image.save.rflags, image.control.interrupt_shadow), (OPEN, 1));
    assert_eq!((held.rip, held.rflags, held.interruptibility), (0x2000, OPEN, BY_STI | BY_NMI));
}

#[test]
fn iret_ends_the_mask_unless_it_comes_again() {
    const AGAIN: u32 = 1 << 12;
    let plain = image(OPEN);
    assert!(unmasks_nmis(&plain, 0, reason::NMI_WINDOW, 0));
    assert!(unmasks_nmis(&plain, BY_STI, reason::CPUID, AGAIN), "of CPUID the bit says nothing");
    assert!(!unmasks_nmis(&plain, BY_NMI, reason::CPUID, 0));
    assert!(!unmasks_nmis(&plain, 0, reason::EPT_VIOLATION, AGAIN));
    assert!(!unmasks_nmis(&plain, 0, reason::PML_FULL, AGAIN));
    assert!(!unmasks_nmis(&plain, 0, reason::EXCEPTION_OR_NMI, AGAIN));
    assert!(unmasks_nmis(&plain, 0, reason::EPT_VIOLATION, 0));
    // The NMI's own delivery has met a fault: the mask belongs to what goes in next.
    let mut delivering = image(OPEN);
    delivering.control.exit_int_info = VmcbEvent::nmi();
    assert!(!unmasks_nmis(&delivering, 0, reason::EPT_VIOLATION, 0));
}

#[test]
fn debug_exception_that_exits_leaves_the_registers_as_its_handler_expects() {
    let mut image = image(OPEN);
    (image.save.dr6, image.save.dr7) = (0xffff_0ff1, 0x2401);
    take_debug(&mut image, 0x4004);
    assert_eq!(image.save.dr6, 0xffff_4ff4, "breakpoint 2 and a step; breakpoint 0 was old");
    assert_eq!(image.save.dr7, 0x0401, "general detection is off for the handler");
}

/// What the processor checks of these fields at an entry (SDM vol. 3C, 27.2.1.3 and 27.3.1.5).
fn check(entry: &Entry) {
    let Fields { rflags, interruptibility, primary, .. } = entry.fields;
    let shadows = interruptibility & SHADOWS;
    assert_ne!(shadows, SHADOWS, "one shadow at most");
    assert!(rflags & rflags::IF != 0 || shadows & BY_STI == 0, "blocking by STI needs IF");
    if let Some(delivery) = entry.delivery {
        let kind = delivery.information.0 >> 8 & 7;
        assert_eq!(shadows, 0, "an event ends the shadow before");
        assert!(kind != 0 || rflags & rflags::IF != 0, "an interrupt needs IF");
        assert!(kind != 2 || interruptibility & BY_NMI == 0, "an NMI that is blocked");
        assert_eq!((1..=15).contains(&delivery.length), kind >= 4, "a length for instructions only");
        assert_eq!(delivery.information.0 >> 11 & 1 != 0, delivery.code.is_some());
    }
    if shadows != 0 {
        let pending = entry.pending_debug.expect("the field is written");
        assert_eq!(pending >> 14 & 1 != 0, rflags & rflags::TF != 0, "a step that waits");
    }
    assert!(primary & primary::MONITOR_TRAP == 0 || rflags & rflags::TF == 0, "two steps at once");
}

/// Control blocks of any kind, each entered and left. Returns how many entries had nothing to write.
fn any_control_blocks(mut random: Decisions, steps: usize) -> usize {
    const FLAGS: [u64; 4] = [CLOSED, OPEN, CLOSED | rflags::TF, OPEN | rflags::TF];
    let mut held = Fields::default();
    let (mut quiet, mut plain) = (Quiet::NEVER, 0);
    for _ in 0..steps {
        let flags = FLAGS[random.usize(..4)];
        let mut block = image(flags);
        block.save.rip = [0, 1, 0x1000, u64::MAX][random.usize(..4)];
        block.control.interrupt_shadow = random.u64(..2);
        block.control.intercept_1.set(Intercept1::IRET, random.bool());
        block.control.intercept_1.set(Intercept1::PAUSE, random.bool());
        if random.u8(..4) == 3 {
            block.control.intercept_exceptions = !(1 << 2);
        }
        if random.bool() {
            block.control.int_ctl = block.control.int_ctl.with_interrupt(random.u8(32..));
        }
        if random.bool() {
            // As the rest of the hypervisor does: an event goes in outside of a shadow, and an interrupt needs IF.
            block.control.interrupt_shadow = 0;
            block.control.event_inj = match random.u8(..5) {
                0 if flags & rflags::IF != 0 => VmcbEvent::interrupt(random.u8(32..)),
                1 => VmcbEvent::nmi(),
                2 => VmcbEvent::exception_with_code(13, random.u32(..)),
                3 => VmcbEvent::exception(6),
                _ => VmcbEvent::software_interrupt(random.u8(..)),
            };
        }
        let is_as_before = quiet.is_as_before(&block, &held);
        let entry = entry(&mut block, &held, CONTROLS, || random.bool());
        check(&entry);
        if is_as_before {
            plain += 1;
            assert_eq!((entry.delivery, entry.pending_debug), (None, None));
            let Fields { rip, rflags, .. } = entry.fields;
            assert_eq!(entry.fields, Fields { rip, rflags, ..held }, "nothing else is to be written");
            assert_eq!((rip, rflags), (block.save.rip, block.save.rflags));
        }
        quiet = Quiet::after(&block, &entry.fields, CONTROLS);
        held = entry.fields;
        leave(&mut block, &mut held, &mut random);
    }
    plain
}

/// The processor leaves the guest for any reason, with any event that it was about to deliver.
fn leave(block: &mut Vmcb, held: &mut Fields, random: &mut Decisions) {
    let left = Left {
        rip: random.u64(..),
        rflags: [CLOSED, OPEN, CLOSED | rflags::TF, OPEN | rflags::TF][random.usize(..4)],
        interruptibility: [0, BY_MOV_SS, BY_STI, BY_NMI | BY_MOV_SS][random.usize(..4)],
        length: random.u64(1..16),
        interrupted: Information(match random.u8(..16) {
            8 => 0x8000_0000 | random.u32(32..256),
            9 => 0x8000_0202,
            10 => 0x8000_0306,
            11 => 0x8000_0b0e,
            12 => 0x8000_0400 | random.u32(5..256),
            13 => 0x8000_0603,
            // The rest of the field means nothing.
            14 => random.u32(..1 << 31),
            _ => 0,
        }),
    };
    let code = random.u32(..);
    exit(block, held, &left, || code);
    assert_eq!((held.rflags, held.interruptibility), (left.rflags, left.interruptibility));
    let interrupted = block.control.exit_int_info;
    assert_eq!(interrupted.is_valid(), left.interrupted.is_valid(), "{:#x}", left.interrupted.0);
    if interrupted.is_valid() {
        let again = Information::to_deliver(interrupted);
        assert_eq!(again, left.interrupted, "it is delivered again as what it was");
        assert_eq!(interrupted.error_code(), (again.0 >> 11 & 1 != 0).then_some(code));
        let behind = if again.is_by_instruction() { left.length } else { 0 };
        assert_eq!(block.save.rip, left.rip.wrapping_add(behind), "its return address");
    }
    let is_masked = left.interruptibility & BY_NMI != 0;
    for reason in [reason::EXCEPTION_OR_NMI, reason::CPUID, reason::EPT_VIOLATION, reason::NMI_WINDOW] {
        let ends = unmasks_nmis(block, left.interruptibility, reason, random.u32(..) & 1 << 12);
        assert!(!(ends && is_masked), "NMIs are masked, and the mask ends");
    }
}

#[test]
fn random_control_blocks_become_entries_that_the_processor_accepts() {
    let plain = any_control_blocks(Decisions::of_seed(21), 100_000);
    assert!(plain > 50, "{plain} entries were plain");
}

#[test]
fn any_control_blocks_become_entries_that_the_processor_accepts() {
    fuzz::target("vmcs", |bytes| {
        any_control_blocks(Decisions::of_bytes(bytes), bytes.len() / 16 + 1);
    });
}
