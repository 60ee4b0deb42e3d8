use alloc::vec::Vec;

use addr::Gpa;

use super::{bytes, status};
use crate::call::{FAST_BYTES, FAST_XMM_BYTES};
use crate::cpuid::{Features, PrivilegesHigh, Recommendations};
use crate::hypercall::{CallInstruction, PAGE_BYTES};
use crate::{Answer, Call, Checked, Code, Control, Offered, Refusal, Status, check, fast_input, parse};

const SPACE: Control = Control::new(Code::FlushVirtualAddressSpace);
const LIST: Control = Control::new(Code::FlushVirtualAddressList);
const SPACE_EX: Control = Control::new(Code::FlushVirtualAddressSpaceEx);
const LIST_EX: Control = Control::new(Code::FlushVirtualAddressListEx);
const IPI: Control = Control::new(Code::SendSyntheticClusterIpi);
const IPI_EX: Control = Control::new(Code::SendSyntheticClusterIpiEx);
const SPIN: Control = Control::new(Code::NotifyLongSpinWait);

/// End of a guest's physical address space of 40 bits.
const LIMIT: Gpa = Gpa(1 << 40);

fn checked(control: Control) -> Checked {
    check(control, Offered::all()).expect("a well-formed control word")
}

fn refused(control: Control, offered: Offered) -> Refusal {
    check(control, offered).expect_err("it is to be refused")
}

fn shape_is_refused(control: Control) {
    assert_eq!(refused(control, Offered::all()), Status::InvalidHypercallInput.into(), "{control:x?}");
}

/// (B4)
#[test]
fn unknown_code_is_not_a_call() {
    for code in [0xbeef, 0x0000, 0x0001, 0x0046, 0x8001, 0xffff] {
        assert_eq!(refused(Control(code), Offered::all()), Status::InvalidHypercallCode.into());
    }
}

/// (B5, B6)
#[test]
fn call_that_is_not_offered_is_denied() {
    let without = |missing| Offered::all().difference(missing);
    for control in [SPACE, LIST.with_rep_count(1), SPACE_EX, LIST_EX.with_rep_count(1)] {
        assert_eq!(refused(control, without(Offered::FLUSH)), Status::AccessDenied.into());
    }
    for control in [IPI, IPI_EX] {
        assert_eq!(refused(control, without(Offered::CLUSTER_IPI)), Status::AccessDenied.into());
    }
    for control in [SPACE_EX, LIST_EX.with_rep_count(1), IPI_EX] {
        assert_eq!(refused(control, without(Offered::EX)), Status::AccessDenied.into());
    }
    for control in [SPACE, LIST.with_rep_count(1), IPI] {
        assert!(check(control, without(Offered::EX)).is_ok());
    }
    assert!(check(SPIN, Offered::empty()).is_ok());
}

#[test]
fn what_is_offered_is_what_cpuid_tells() {
    const NONE: PrivilegesHigh = PrivilegesHigh::empty();
    assert_eq!(Offered::by_cpuid(Recommendations::all(), Features::all(), PrivilegesHigh::all()), Offered::all());
    assert_eq!(Offered::by_cpuid(Recommendations::empty(), Features::empty(), NONE), Offered::empty());
    let flush = Recommendations::REMOTE_FLUSH | Recommendations::EX_PROCESSOR_MASKS;
    assert_eq!(Offered::by_cpuid(flush, Features::XMM_INPUT, NONE), Offered::FLUSH | Offered::EX | Offered::XMM_INPUT);
    let ipi = Recommendations::CLUSTER_IPI | Recommendations::RELAXED_TIMING;
    let offered = Offered::by_cpuid(ipi, Features::EXTENDED_GVA_RANGES | Features::FREQUENCIES, NONE);
    assert_eq!(offered, Offered::CLUSTER_IPI | Offered::EXTENDED_RANGES);
    let ports = PrivilegesHigh::CREATE_PORT | PrivilegesHigh::CPU_MANAGEMENT;
    let offered = Offered::by_cpuid(Recommendations::empty(), Features::empty(), ports);
    assert_eq!(offered, Offered::CREATE_PORT);
}

/// Denial comes before the shape: a guest that may not call learns nothing about the format.
#[test]
fn denied_call_is_denied_whatever_its_shape() {
    assert_eq!(refused(Control(SPACE.0 | 1 << 60), Offered::empty()), Status::AccessDenied.into());
    assert_eq!(refused(Control(0xbeef | 1 << 60), Offered::empty()), Status::InvalidHypercallCode.into());
}

/// (B7, B8)
#[test]
fn each_reserved_bit_of_the_control_word_is_refused() {
    let reserved = [27, 28, 29, 30, 31, 44, 45, 46, 47, 60, 61, 62, 63];
    assert_eq!(Control::RESERVED, reserved.iter().fold(0, |bits, bit| bits | 1 << bit));
    for bit in reserved {
        for control in [SPACE, LIST.with_rep_count(1), SPACE_EX, LIST_EX.with_rep_count(1), IPI, IPI_EX, SPIN] {
            assert!(check(control, Offered::all()).is_ok());
            shape_is_refused(Control(control.0 | 1 << bit));
        }
    }
    assert!(Control(1 << 31).is_nested());
}

/// (B9, B10, D13)
#[test]
fn simple_call_has_no_list() {
    for control in [SPACE, SPACE_EX, IPI, IPI_EX, SPIN] {
        shape_is_refused(control.with_rep_count(1));
        shape_is_refused(control.with_rep_start(1));
        shape_is_refused(control.with_rep_count(2).with_rep_start(1));
    }
}

/// (B11)
#[test]
fn only_ex_calls_have_a_variable_header() {
    for control in [SPACE, LIST.with_rep_count(1), IPI, SPIN] {
        shape_is_refused(control.with_variable_words(1));
        shape_is_refused(control.with_variable_words(0x3ff));
    }
    for control in [SPACE_EX, LIST_EX.with_rep_count(1), IPI_EX] {
        assert!(check(control.with_variable_words(1), Offered::all()).is_ok());
    }
}

/// (B12, B13)
#[test]
fn list_has_something_left_to_do() {
    for control in [LIST, LIST_EX] {
        shape_is_refused(control);
        shape_is_refused(control.with_rep_start(1));
        shape_is_refused(control.with_rep_count(2).with_rep_start(2));
        shape_is_refused(control.with_rep_count(2).with_rep_start(3));
        assert!(check(control.with_rep_count(2).with_rep_start(1), Offered::all()).is_ok());
        assert!(check(control.with_rep_count(0xfff).with_rep_start(0xffe), Offered::all()).is_ok());
    }
    assert_eq!(Answer::from(Status::InvalidHypercallInput).0, 3, "no element is done");
}

/// (B15)
#[test]
fn input_is_a_multiple_of_eight() {
    for offset in 1..8 {
        let at = Gpa(0x5000 + offset);
        assert_eq!(checked(SPACE).check_placement(at, LIMIT), Err(Status::InvalidAlignment));
    }
    assert_eq!(checked(SPACE).check_placement(Gpa(0x5008), LIMIT), Ok(()));
}

/// (B16)
#[test]
fn input_lies_in_one_page() {
    assert_eq!(checked(SPACE).check_placement(Gpa(0x5ff0), LIMIT), Err(Status::InvalidAlignment));
    assert_eq!(checked(SPACE).check_placement(Gpa(0x5fe8), LIMIT), Ok(()), "it ends with the page");
    assert_eq!(checked(SPIN).check_placement(Gpa(0x5ff8), LIMIT), Ok(()));
}

/// (B17, C17, C33)
#[test]
fn longest_list_fills_the_page_and_one_more_does_not_fit() {
    let placed = |control: Control| checked(control).check_placement(Gpa(0x5000), LIMIT);
    assert_eq!(placed(LIST.with_rep_count(509)), Ok(()));
    assert_eq!(placed(LIST.with_rep_count(510)), Err(Status::InvalidAlignment));
    assert_eq!(placed(LIST_EX.with_variable_words(64).with_rep_count(444)), Ok(()));
    assert_eq!(placed(LIST_EX.with_variable_words(64).with_rep_count(445)), Err(Status::InvalidAlignment));
    assert_eq!(placed(SPACE_EX.with_variable_words(0x3ff)), Err(Status::InvalidAlignment));
    assert_eq!(placed(LIST_EX.with_variable_words(0x3ff).with_rep_count(0xfff)), Err(Status::InvalidAlignment));
}

/// The whole list counts, not only its rest: finished elements are in the page too.
#[test]
fn length_of_the_input_does_not_depend_on_where_the_list_begins() {
    let control = LIST.with_rep_count(510);
    assert_eq!(checked(control.with_rep_start(509)).input_bytes(), checked(control).input_bytes());
}

/// (B18)
#[test]
fn input_lies_in_the_guests_address_space() {
    let beyond =
        [LIMIT.0, LIMIT.0 + 0x1000, 1 << 63, 0xffff_ffff_ffff_f000, 0xffff_ffff_ffff_ffe8, 0xffff_ffff_ffff_fff8];
    for at in beyond {
        assert_eq!(checked(SPACE).check_placement(Gpa(at), LIMIT), Err(Status::InvalidAlignment), "{at:#x}");
    }
    assert_eq!(checked(SPACE).check_placement(Gpa(LIMIT.0 - 24), LIMIT), Ok(()));
}

/// RDX is the input itself then, not an address.
#[test]
fn fast_call_is_placed_nowhere() {
    assert_eq!(checked(IPI.with_fast()).check_placement(Gpa(!0), LIMIT), Ok(()));
}

/// (B21)
#[test]
fn registers_that_were_not_offered_are_an_invalid_opcode() {
    let plain = Offered::all().difference(Offered::XMM_INPUT);
    let larger = [
        SPACE,
        LIST.with_rep_count(1),
        LIST.with_rep_count(0xfff),
        SPACE_EX,
        LIST_EX.with_rep_count(1),
        IPI_EX,
        IPI_EX.with_variable_words(12),
    ];
    for control in larger {
        assert_eq!(refused(control.with_fast(), plain), Refusal::InvalidOpcode);
        assert!(check(control, plain).is_ok(), "in memory it is as good as ever");
    }
    for control in [IPI, SPIN] {
        assert!(check(control.with_fast(), plain).expect("it fits RDX and R8").input_bytes() <= FAST_BYTES);
    }
}

/// (B22 to B24)
#[test]
fn registers_hold_112_bytes() {
    let fits = |control: Control| match check(control.with_fast(), Offered::all()) {
        Ok(checked) => {
            assert!(checked.input_bytes() <= FAST_XMM_BYTES);
            true
        }
        Err(why) => {
            assert_eq!(why, Status::InvalidHypercallInput.into());
            false
        }
    };
    assert!(fits(SPACE));
    assert!(fits(LIST.with_rep_count(11)) && !fits(LIST.with_rep_count(12)));
    assert!(fits(SPACE_EX.with_variable_words(10)) && !fits(SPACE_EX.with_variable_words(11)));
    assert!(fits(IPI_EX.with_variable_words(11)) && !fits(IPI_EX.with_variable_words(12)));
    let five_banks = LIST_EX.with_variable_words(5);
    assert!(fits(five_banks.with_rep_count(5)) && !fits(five_banks.with_rep_count(6)));
}

#[test]
fn words_of_registers_become_the_bytes_of_memory() {
    let mut words = [0; 14];
    for (word, value) in words.iter_mut().zip(0x0102_0304_0506_0708_u64..) {
        *word = value;
    }
    assert_eq!(fast_input(&words).as_slice(), bytes(&words));
}

#[test]
fn length_of_the_input_is_the_sum_of_its_parts() {
    let lengths = [
        (SPACE, 24),
        (LIST.with_rep_count(3), 48),
        (SPIN, 8),
        (IPI, 16),
        (SPACE_EX.with_variable_words(2), 48),
        (LIST_EX.with_variable_words(2).with_rep_count(3), 72),
        (IPI_EX.with_variable_words(2), 40),
        (LIST_EX.with_variable_words(0x3ff).with_rep_count(0xfff), 32 + 8 * (0x3ff + 0xfff)),
    ];
    for (control, length) in lengths {
        assert_eq!(checked(control).input_bytes(), length);
    }
}

/// A missing word is a mistake of the reader, and must not become a call with zeros.
#[test]
fn input_that_is_shorter_than_the_call_is_refused() {
    let controls = [
        SPACE,
        LIST.with_rep_count(2),
        SPACE_EX.with_variable_words(1),
        LIST_EX.with_variable_words(1).with_rep_count(1),
        IPI,
        IPI_EX.with_variable_words(1),
        SPIN,
    ];
    for control in controls {
        let whole = [0xff; 64];
        let short = &whole[..checked(control).input_bytes() - 1];
        assert_eq!(checked(control).parse(short).expect_err("it is short"), Status::InvalidHypercallInput);
        assert_eq!(checked(control).parse(&[]).expect_err("it is short"), Status::InvalidHypercallInput);
    }
}

#[test]
fn what_follows_the_input_is_ignored() {
    let input = bytes(&[0x40, 0b1, !0, !0, !0]);
    assert!(matches!(parse(IPI, &input, Offered::all()), Ok(Call::Ipi(_))));
}

/// (D13)
#[test]
fn long_spin_is_always_welcome() {
    for (word, count) in [(0, 0), (1, 1), (0xffff_ffff, 0xffff_ffff), (0xdead_beef_0000_0007, 7)] {
        for control in [SPIN, SPIN.with_fast()] {
            let input = bytes(&[word]);
            let Ok(Call::SpinWait(told)) = parse(control, &input, Offered::empty()) else { panic!("refused") };
            assert_eq!(told, count);
        }
    }
}

/// (B26, B27)
#[test]
fn result_of_success_is_nothing_but_the_elements_done() {
    assert_eq!(checked(SPACE).success().0, 0);
    assert_eq!(checked(SPACE_EX.with_variable_words(3)).success().0, 0);
    assert_eq!(checked(IPI.with_fast()).success().0, 0);
    for count in [1, 2, 509, 0xfff] {
        assert_eq!(checked(LIST.with_rep_count(count)).success().0, u64::from(count) << 32);
    }
}

/// (B14, C14)
#[test]
fn elements_are_counted_from_the_lists_first() {
    let control = LIST.with_rep_count(3);
    assert_eq!(checked(control.with_rep_start(1)).success().0, 3 << 32);
    assert_eq!(checked(control).failure(Status::InvalidParameter).0, 5);
    assert_eq!(checked(control.with_rep_start(2)).failure(Status::InvalidParameter).0, 2 << 32 | 5);
}

#[test]
fn result_keeps_its_fields_apart() {
    let answer = Answer::new(Status::InvalidAlignment, 0xffff);
    assert_eq!(answer.0, 0xfff << 32 | 4);
    assert_eq!((answer.status(), answer.reps()), (4, 0xfff));
}

#[test]
fn fields_of_the_control_word_are_where_the_manual_has_them() {
    let control = Control(0x0123_0abc_0555_0014 & !Control::RESERVED);
    assert_eq!(control.code(), 0x0014);
    assert!(control.is_fast());
    assert_eq!(control.variable_words(), 0x2aa);
    assert_eq!(control.rep_count(), 0xabc);
    assert_eq!(control.rep_start(), 0x123);
    let built = LIST_EX.with_fast().with_variable_words(0x2aa).with_rep_count(0xabc).with_rep_start(0x123);
    assert_eq!(built, control);
    assert_eq!(built.with_rep_start(0xabb).rep_start(), 0xabb, "the old start is gone");
    assert_eq!(IPI.with_fast().0, 0x1000b, "as Linux sends it");
}

#[test]
fn codes_are_the_manuals() {
    let numbers = [
        0x0002, 0x0003, 0x0008, 0x000b, 0x0013, 0x0014, 0x0015, 0x0040, 0x0041, 0x0042, 0x0043, 0x0044, 0x0045, 0x0048,
        0x0049, 0x004b, 0x004c, 0x004d, 0x004e, 0x004f, 0x0050, 0x0051, 0x0052, 0x0056, 0x0058, 0x005b, 0x005c, 0x006d,
        0x008b, 0x0091, 0x0094, 0x0095, 0x0096, 0x00c9, 0x00e1, 0x00e2, 0x00e3, 0x00e4, 0x00f4, 0x0101, 0x0131,
    ];
    assert_eq!(Code::ALL.iter().map(|code| *code as u16).collect::<Vec<_>>(), numbers);
    for number in 0..=u16::MAX {
        let code = Code::try_from(number).map(|code| code as u16);
        assert_eq!(code, if numbers.contains(&number) { Ok(number) } else { Err(Status::InvalidHypercallCode) });
    }
}

#[test]
fn hypercall_page_returns_or_traps() {
    for (instruction, code) in
        [(CallInstruction::Vmmcall, [0x0f, 0x01, 0xd9, 0xc3]), (CallInstruction::Vmcall, [0x0f, 0x01, 0xc1, 0xc3])]
    {
        let page = instruction.page();
        assert_eq!(page.len(), PAGE_BYTES);
        assert_eq!(page[..4], code);
        assert!(page[4..].iter().all(|byte| *byte == 0xcc));
    }
}

#[test]
fn well_formed_call_with_a_bad_field_is_another_status_than_a_bad_shape() {
    assert_eq!(status(IPI, &[0x0f, 1]), Status::InvalidParameter);
    assert_eq!(status(IPI.with_rep_count(1), &[0x0f, 1]), Status::InvalidHypercallInput);
}
