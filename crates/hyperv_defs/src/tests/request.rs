use alloc::vec::Vec;

use addr::{Gpa, Gva};

use super::bytes;
use crate::interrupt::{
    AssertInput, AssertInterrupt, ConnectPort, ConnectPortInput, CreatePort, CreatePortInput, Doorbell, InterruptKind,
    Port,
};
use crate::memory::{AccessStateFlags, GpaAccess, Mapping};
use crate::partition::{CreatePartitionInput, CreationFlags};
use crate::property::ProcessorFeatures;
use crate::vp::{
    CpuidResult, CpuidResultInput, InstallInterceptInput, InterceptKind, StateKind, StatePage, StatePlace, StatsArea,
    StatsObject, Translation, TranslationCode, Vp,
};
use crate::wire::{U32, U64};
use crate::{
    Call, Code, Continuation, Control, Offered, PartitionId, Property, Refusal, Register, Request, Status, check, parse,
};

const CHILD: u64 = 0x101;

fn request<'a>(control: Control, input: &'a [u8]) -> Result<Request<'a>, Status> {
    match parse(control, input, Offered::all()) {
        Ok(Call::Partition(request)) => Ok(request),
        Ok(other) => panic!("not a parent's call: {other:?}"),
        Err(Refusal::Status(status)) => Err(status),
        Err(Refusal::InvalidOpcode) => panic!("everything is offered"),
    }
}

/// The status of a refused input.
fn refused(control: Control, input: &[u8]) -> Status {
    request(control, input).expect_err("it is to be refused")
}

fn vp(index: u32) -> Vp {
    Vp { partition: PartitionId(CHILD), index }
}

/// The rows, as Linux sends the calls: code, bytes of input and output, for two elements and three words.
#[test]
fn sizes_are_those_that_linux_sends() {
    let simple = [
        (0x40, 56, 8),
        (0x41, 8, 0),
        (0x42, 8, 0),
        (0x43, 8, 0),
        (0x44, 16, 8),
        (0x45, 24, 0),
        (0x4d, 24, 0),
        (0x4e, 40, 0),
        (0x4f, 16, 0),
        (0x52, 32, 16),
        (0x56, 8, 0),
        (0x58, 16, 0),
        (0x5b, 16, 0),
        (0x5c, 256, 0),
        (0x6d, 24, 0),
        (0x8b, 8, 0),
        (0x91, 60, 0),
        (0x94, 32, 0),
        (0x95, 56, 0),
        (0x96, 72, 0),
        (0xe1, 24, 8),
        (0xe2, 16, 0),
        (0xe3, 40, 200),
        (0xe4, 40, 0),
        (0x101, 24, 16),
        (0x131, 32, 8),
    ];
    let lists = [
        (0x48, 8 + 16, 0),
        (0x49, 16, 16),
        (0x4b, 24 + 16, 0),
        (0x4c, 24, 0),
        (0x50, 16 + 8, 32),
        (0x51, 16 + 64, 0),
        (0xc9, 24, 2),
        (0xf4, 24 + 16, 32),
    ];
    for (control, input, output, continuation) in simple
        .map(|(code, input, output)| (Control(code), input, output, Continuation::Never))
        .into_iter()
        .chain(lists.map(|(code, input, output)| (Control(code | 2 << 32), input, output, Continuation::Elements)))
    {
        let checked = check(control, Offered::all()).expect("a well-formed control word");
        assert_eq!((checked.input_bytes(), checked.output_bytes()), (input, output), "{control:x?}");
        match checked.row().continuation {
            Continuation::Whole => assert!([0x42, 0x43].contains(&control.code())),
            found => assert_eq!(found, continuation),
        }
    }
    assert_eq!(simple.len() + lists.len() + 7, Code::ALL.len(), "all but those of guests");

    for code in [0xe3, 0xe4] {
        let control = Control(code).with_variable_words(3);
        assert_eq!(check(control, Offered::all()).map(|checked| checked.input_bytes()), Ok(64));
    }
}

/// Each with the privilege that CPUID tells; none of them is for a guest that is no parent.
#[test]
fn guest_that_is_no_parent_is_denied_every_call_of_one() {
    let guest = Offered::FLUSH | Offered::CLUSTER_IPI | Offered::EX | Offered::XMM_INPUT | Offered::EXTENDED_RANGES;
    for code in Code::ALL.iter().filter(|code| **code as u16 >= 0x40) {
        let control = Control::new(*code).with_rep_count(1);
        assert_eq!(check(control, guest), Err(Status::AccessDenied.into()), "{code:?}");
        assert_eq!(check(control, Offered::all().difference(code.row().needs)), Err(Status::AccessDenied.into()));
        assert!(!code.row().needs.is_empty() && !guest.intersects(code.row().needs));
    }
    for code in Code::ALL.iter().filter(|code| (**code as u16) < 0x40) {
        assert!(guest.contains(code.row().needs));
    }
}

/// INITIALIZE and others with one or two words in registers; output in registers exists for nobody.
#[test]
fn fast_calls_are_those_without_output() {
    for (code, bytes) in [(0x41, 8), (0x42, 8), (0x43, 8), (0x4f, 16), (0x56, 8), (0x58, 16), (0x5b, 16), (0x8b, 8)] {
        let plain = Offered::all().difference(Offered::XMM_INPUT);
        let checked = check(Control(code).with_fast(), plain).expect("it fits RDX and R8");
        assert_eq!(checked.input_bytes(), bytes);
    }
    for code in [0x40, 0x44, 0x52, 0xe1, 0xe3, 0x101, 0x131] {
        let refused = check(Control(code).with_fast(), Offered::all());
        assert_eq!(refused, Err(Status::InvalidHypercallInput.into()), "{code:#x}");
    }
    let list = Control::new(Code::GetVpRegisters).with_rep_count(1).with_fast();
    assert_eq!(check(list, Offered::all()), Err(Status::InvalidHypercallInput.into()));
    assert!(matches!(request(Control(0x10041), &bytes(&[CHILD])), Ok(Request::InitializePartition(_))));
}

#[test]
fn output_is_placed_like_input() {
    const LIMIT: Gpa = Gpa(1 << 40);
    let placed = |control: Control, at: u64| {
        check(control, Offered::all()).expect("well-formed").check_output_placement(Gpa(at), LIMIT)
    };
    let withdraw = Control::new(Code::WithdrawMemory);
    assert_eq!(placed(withdraw.with_rep_count(512), 0x5000), Ok(()), "a page of numbers, as Linux asks");
    assert_eq!(placed(withdraw.with_rep_count(513), 0x5000), Err(Status::InvalidAlignment));
    assert_eq!(placed(withdraw.with_rep_count(1), 0x5004), Err(Status::InvalidAlignment));
    assert_eq!(placed(withdraw.with_rep_count(2), 0x5ff8), Err(Status::InvalidAlignment));
    for beyond in [LIMIT.0, !7] {
        assert_eq!(placed(withdraw.with_rep_count(1), beyond), Err(Status::InvalidAlignment));
    }
    assert_eq!(placed(Control::new(Code::UnmapGpaPages).with_rep_count(9), !0), Ok(()), "there is no output");
    let states = Control::new(Code::GetGpaPagesAccessStates);
    assert_eq!(placed(states.with_rep_count(0xfff), 0x5000), Ok(()));
}

#[test]
fn partition_is_created_as_linux_asks() {
    let control = Control::new(Code::CreatePartition);
    // What QEMU 11.1 makes Linux send.
    let input = CreatePartitionInput {
        flags: U64::new(0x48_2110),
        compatibility_version: U32::new(0x609),
        disabled_features: [U64::new(!0 << 59), U64::new(1 << 4)],
        ..CreatePartitionInput::default()
    };
    let Ok(Request::CreatePartition(create)) = request(control, input.bytes()) else { panic!("refused") };
    let flags = CreationFlags::EXO_PARTITION
        | CreationFlags::INTERCEPT_MESSAGE_PAGE
        | CreationFlags::LAPIC
        | CreationFlags::X2APIC_CAPABLE
        | CreationFlags::GPA_SUPER_PAGES;
    assert_eq!(create.flags, flags);
    assert!(create.disabled_features.contains(ProcessorFeatures::LA57));

    let bad = [
        CreatePartitionInput { flags: U64::new(0), ..input },
        CreatePartitionInput { flags: U64::new(0x48_2010), ..input },
        CreatePartitionInput { flags: U64::new(0x40_2110), ..input },
        CreatePartitionInput { flags: U64::new(0x48_2114), ..input },
        CreatePartitionInput { flags: U64::new(!0), ..input },
        CreatePartitionInput { compatibility_version: U32::new(0x60a), ..input },
        CreatePartitionInput { compatibility_version: U32::new(0), ..input },
        CreatePartitionInput { isolation: U64::new(2), ..input },
        CreatePartitionInput { isolation: U64::new(1 << 12), ..input },
    ];
    for input in bad {
        assert_eq!(refused(control, input.bytes()), Status::InvalidParameter, "{input:x?}");
    }
}

#[test]
fn properties_are_read_and_written() {
    let get = Control::new(Code::GetPartitionProperty);
    let Ok(Request::GetProperty(read)) = request(get, &bytes(&[!0, 0xdead_beef_0006_000a])) else { panic!("refused") };
    assert_eq!((read.partition, read.property), (PartitionId::SELF, Property::ProcessorFeatures0));
    assert_eq!(refused(get, &bytes(&[!0, 0x5_000c])), Status::UnknownProperty);
    assert_eq!(refused(get, &bytes(&[!0, 0x9_0007])), Status::UnknownProperty, "too large for this call");

    let ex = Control::new(Code::GetPartitionPropertyEx);
    let Ok(Request::GetProperty(read)) = request(ex, &bytes(&[!0, 0x9_0007, 7])) else { panic!("refused") };
    assert_eq!((read.property, read.argument), (Property::VmmCapabilities, 7));
    let Ok(Request::GetProperty(read)) = request(ex, &bytes(&[!0, 0x2_0005, 0])) else { panic!("refused") };
    assert_eq!(read.property, Property::IntegratedSchedulerEnabled, "Linux reads this one by the Ex form");

    let set = Control::new(Code::SetPartitionProperty);
    let Ok(Request::SetProperty(write)) = request(set, &bytes(&[CHILD, 0x1_0001, 0x640_0ffb])) else {
        panic!("refused")
    };
    assert_eq!((write.property, write.value), (Property::SyntheticProcessorFeatures, 0x640_0ffb));
    assert_eq!(refused(set, &bytes(&[CHILD, 0x5_0017, 2])), Status::PropertyValueOutOfRange);
    assert_eq!(refused(set, &bytes(&[CHILD, 0x6_000a, 0])), Status::OperationDenied);
    assert_eq!(refused(set, &bytes(&[CHILD, 0, 0])), Status::UnknownProperty);
}

fn pages_of(mapping: Mapping<'_>) -> Vec<Result<Gpa, Status>> {
    match mapping {
        Mapping::NoAccess(_) => Vec::new(),
        Mapping::Pages(pages, _) => pages.iter().collect(),
    }
}

#[test]
fn deposit_lists_pages_from_its_start() {
    let control = Control::new(Code::DepositMemory).with_rep_count(3);
    let input = bytes(&[CHILD, 0x10, 1 << 52, 0x12]);
    let Ok(Request::Deposit(deposit)) = request(control, &input) else { panic!("refused") };
    let bad = Err(Status::InvalidParameter);
    assert_eq!(deposit.pages.iter().collect::<Vec<_>>(), [Ok(Gpa(0x1_0000)), bad, Ok(Gpa(0x1_2000))]);

    let Ok(Request::Deposit(rest)) = request(control.with_rep_start(2), &input) else { panic!("refused") };
    assert_eq!(rest.pages.iter().collect::<Vec<_>>(), [Ok(Gpa(0x1_2000))]);
    assert_eq!(refused(control.with_rep_start(3), &input), Status::InvalidHypercallInput);
    assert_eq!(refused(control, &input[..31]), Status::InvalidHypercallInput);
}

#[test]
fn withdrawal_asks_for_a_number_of_pages() {
    let control = Control::new(Code::WithdrawMemory).with_rep_count(512).with_rep_start(12);
    let Ok(Request::Withdraw(withdraw)) = request(control, &bytes(&[CHILD, !0])) else { panic!("refused") };
    assert_eq!((withdraw.partition, withdraw.count), (PartitionId(CHILD), 500));
}

/// Linux' input page is not cleared: 0x0100_0000 stood beside the flags.
#[test]
fn old_bytes_in_reserved_fields_do_no_harm() {
    let garbage = 0x0100_0000_0000_0000;
    let map = Control::new(Code::MapGpaPages).with_rep_count(1);
    assert!(request(map, &bytes(&[CHILD, 0x10, garbage | 0x800f, 0x77])).is_ok());
    let unmap = Control::new(Code::UnmapGpaPages).with_rep_count(1);
    assert!(request(unmap, &bytes(&[CHILD, 0x10, garbage])).is_ok());
    let create = Control::new(Code::CreateVp);
    let Ok(Request::CreateVp(found)) = request(create, &bytes(&[CHILD, !0 << 32 | 3, !0, !0, !0])) else {
        panic!("refused")
    };
    assert_eq!(found, vp(3));
}

#[test]
fn pages_are_mapped_with_what_they_allow() {
    let control = Control::new(Code::MapGpaPages).with_rep_count(2);
    let map = |flags: u64| {
        let input = bytes(&[CHILD, 0x200, flags, 0x400, 0x600]);
        match request(control, &input) {
            Ok(Request::MapPages(map)) => Ok((
                map.first,
                map.is_large,
                match map.what {
                    Mapping::NoAccess(count) => Err(count),
                    Mapping::Pages(_, access) => Ok(access),
                },
                pages_of(map.what),
            )),
            Ok(other) => panic!("{other:?}"),
            Err(status) => Err(status),
        }
    };
    let access = |write, execute, cached| Ok(GpaAccess { write, execute, cached });
    let pages = [Ok(Gpa(0x40_0000)), Ok(Gpa(0x60_0000))];
    let expect = |large, access| Ok((Gpa(0x20_0000), large, access, pages.to_vec()));

    // RAM, ROM, a large page of RAM, a device.
    assert_eq!(map(0x800f), expect(false, access(true, true, true)));
    assert_eq!(map(0x800d), expect(false, access(false, true, true)));
    assert_eq!(map(0x8000_800f), expect(true, access(true, true, true)));
    assert_eq!(map(0x20_0003), expect(false, access(true, false, false)));
    // Memory that is not there.
    assert_eq!(map(0x1_0000), Ok((Gpa(0x20_0000), false, Err(2), Vec::new())));
    assert_eq!(map(0x8001_0000), Ok((Gpa(0x20_0000), true, Err(2), Vec::new())));

    // Unknown bits, nothing, only written to, executable for one mode, no access but some.
    for flags in [0x10, 0x4000, 1 << 30, 0, 0x8000, 2, 0xc, 0x5, 0x9, 0xb, 0x1_0001, 0x1_000f] {
        assert_eq!(map(flags), Err(Status::InvalidParameter), "{flags:#x}");
    }
}

#[test]
fn mapped_pages_have_addresses() {
    let control = Control::new(Code::MapGpaPages);
    let map = |control, base, flags| {
        request(control, &bytes(&[CHILD, base, flags, 0, 0, 0])).map(|request| {
            let Request::MapPages(map) = request else { panic!("{request:?}") };
            (map.first, map.what.len())
        })
    };
    let (three, rest) = (control.with_rep_count(3), control.with_rep_count(3).with_rep_start(2));
    assert_eq!(map(three, 0x10, 1), Ok((Gpa(0x1_0000), 3)));
    assert_eq!(map(rest, 0x10, 1), Ok((Gpa(0x1_2000), 1)));
    assert_eq!(map(rest, 0x200, 0x8000_0001), Ok((Gpa(0x60_0000), 1)));

    let last = (1 << 52) - 3;
    assert_eq!(map(three, last, 1), Ok((Gpa(last << 12), 3)));
    for base in [last + 1, 1 << 52, !0, !1] {
        for control in [three, rest] {
            assert_eq!(map(control, base, 1), Err(Status::InvalidParameter), "{base:#x}");
            assert_eq!(map(control, base, 0x1_0000), Err(Status::InvalidParameter), "{base:#x}");
        }
    }
    // A large page begins where one can.
    for base in [1, 0x1ff, 0x201] {
        assert_eq!(map(three, base, 0x8000_0001), Err(Status::InvalidParameter));
    }
    assert_eq!(map(three, (1 << 52) - 1024, 0x8000_0001), Err(Status::InvalidParameter));
}

#[test]
fn pages_are_unmapped_without_a_list() {
    let control = Control::new(Code::UnmapGpaPages).with_rep_count(192);
    let Ok(Request::UnmapPages(unmap)) = request(control, &bytes(&[CHILD, 0xc0, 0])) else { panic!("refused") };
    assert_eq!((unmap.first, unmap.is_large, unmap.count), (Gpa(0xc_0000), false, 192));
    let Ok(Request::UnmapPages(unmap)) = request(control.with_rep_start(191), &bytes(&[CHILD, 0x200, 2])) else {
        panic!("refused")
    };
    assert_eq!((unmap.first, unmap.is_large, unmap.count), (Gpa(192 << 21), true, 1));
    for flags in [1, 3, 4, 0x8000_0000] {
        assert_eq!(refused(control, &bytes(&[CHILD, 0x200, flags])), Status::InvalidParameter);
    }
    assert_eq!(refused(control, &bytes(&[CHILD, (1 << 52) - 191, 0])), Status::InvalidParameter);
    let most = control.with_rep_count(0xfff);
    assert!(request(most, &bytes(&[CHILD, 0, 0])).is_ok());
}

#[test]
fn access_states_are_read_and_cleared_or_set() {
    let control = Control::new(Code::GetGpaPagesAccessStates).with_rep_count(0xfff);
    let Ok(Request::GetAccessStates(get)) = request(control, &bytes(&[CHILD, 4, 0x100])) else { panic!("refused") };
    assert_eq!((get.flags, get.first, get.count), (AccessStateFlags::CLEAR_DIRTY, Gpa(0x10_0000), 0xfff));
    assert!(request(control, &bytes(&[CHILD, 0xa, 0x100])).is_ok());
    // Both clear and set, and bits that are none.
    for flags in [3, 0xc, 0xf, 0x10, !0] {
        assert_eq!(refused(control, &bytes(&[CHILD, flags, 0])), Status::InvalidParameter, "{flags:#x}");
    }
    assert_eq!(refused(control, &bytes(&[CHILD, 0, !0])), Status::InvalidParameter);
}

#[test]
fn registers_are_a_list_with_a_start() {
    let names = [0x2_0000_u32, 0x2_0010, 0xdead_beef];
    let mut input = bytes(&[CHILD, 2]);
    names.iter().for_each(|name| input.extend(name.to_le_bytes()));
    let get = Control::new(Code::GetVpRegisters).with_rep_count(3);
    let Ok(Request::GetRegisters(read)) = request(get, &input) else { panic!("refused") };
    assert_eq!(read.vp, vp(2));
    let bad = Err(Status::InvalidParameter);
    assert_eq!(read.names().collect::<Vec<_>>(), [Ok(Register::Gpr(0)), Ok(Register::Rip), bad]);
    let Ok(Request::GetRegisters(read)) = request(get.with_rep_start(1), &input) else { panic!("refused") };
    assert_eq!(read.names().len(), 2);

    // RUN_VP: both suspensions end, in this order.
    let set = Control::new(Code::SetVpRegisters).with_rep_count(2);
    let input = bytes(&[CHILD, 2, 1, !0, 0, 0, 0, 0, 5, !0]);
    let Ok(Request::SetRegisters(write)) = request(set, &input) else { panic!("refused") };
    let written: Vec<_> =
        write.elements().map(|element| element.map(|(name, value)| (name, value.as_u128()))).collect();
    let expected = [Ok((Register::InterceptSuspend, 0)), Ok((Register::ExplicitSuspend, u128::from(!0_u64) << 64 | 5))];
    assert_eq!(written, expected);

    // A virtual trust level: none but 0, which may be given.
    for vtl in [1_u64, 0xf, 0x11, 0x20, 0xff] {
        let mut input = input.clone();
        input[12] = vtl.to_le_bytes()[0];
        assert_eq!(refused(set, &input), Status::InvalidParameter);
        input[12] = 0x10;
        assert!(request(set, &input).is_ok());
    }
}

#[test]
fn state_pages_are_placed_by_the_parent() {
    let map = Control::new(Code::MapVpStatePage);
    // vp, type, vtl, flags
    let input = |kind: u64, vtl: u64, flags: u64, page| bytes(&[CHILD, kind << 32 | vtl << 48 | flags << 56, page]);
    let Ok(Request::MapStatePage(found)) = request(map, &input(1, 0, 1, 0x77)) else { panic!("refused") };
    let expected = (vp(0), StatePage::InterceptMessage, Some(Gpa(0x7_7000)));
    assert_eq!((found.vp, found.page, found.location), expected);
    let Ok(Request::MapStatePage(found)) = request(map, &input(0, 0, 0, !0)) else { panic!("refused") };
    assert_eq!((found.page, found.location), (StatePage::Registers, None), "the place is not given");
    for (kind, vtl, flags, page) in [(2, 0, 1, 1), (0xffff, 0, 1, 1), (0, 1, 1, 1), (0, 0, 2, 1), (0, 0, 1, 1 << 52)] {
        assert_eq!(refused(map, &input(kind, vtl, flags, page)), Status::InvalidParameter);
    }

    let unmap = Control::new(Code::UnmapVpStatePage);
    let Ok(Request::UnmapStatePage(found)) = request(unmap, &input(1, 0, 0xff, 0)) else { panic!("refused") };
    assert_eq!(found.page, StatePage::InterceptMessage);
    assert_eq!(refused(unmap, &input(2, 0, 0, 0)), Status::InvalidParameter);
}

#[test]
fn statistics_are_of_the_host_or_a_partition_or_a_vp() {
    let map = Control::new(Code::MapStatsPage2);
    let input = |object, area: u64, page| bytes(&[object, CHILD, 3 | area << 56, page]);
    let Ok(Request::MapStatsPage(page, location)) = request(map, &input(0x1_0002, 1, 0x12)) else { panic!("refused") };
    assert_eq!((page.object, page.area, location), (StatsObject::Vp(vp(3)), StatsArea::Parent, Gpa(0x1_2000)));
    let unmap = Control::new(Code::UnmapStatsPage);
    let Ok(Request::UnmapStatsPage(page)) = request(unmap, &input(!0 << 32 | 0x1_0001, 0, 0)[..24]) else {
        panic!("refused")
    };
    assert_eq!((page.object, page.area), (StatsObject::Partition(PartitionId(CHILD)), StatsArea::Own));
    for (object, number) in [(StatsObject::Hypervisor, 1), (StatsObject::Processor(0x101), 2)] {
        let Ok(Request::MapStatsPage(page, _)) = request(map, &input(number, 0, 1)) else { panic!("refused") };
        assert_eq!(page.object, object);
    }
    for (object, area, page) in [(0, 0, 1), (3, 0, 1), (0x1_0002, 2, 1), (0x1_0002, 0, !0), (1, 0, !0)] {
        assert_eq!(refused(map, &input(object, area, page)), Status::InvalidParameter);
    }
}

#[test]
fn translations_are_asked_and_answered() {
    let control = Control::new(Code::TranslateVirtualAddress);
    let input = bytes(&[CHILD, 1, 2, 0xf_ffff_8880_0080]);
    let Ok(Request::Translate(translate)) = request(control, &input) else { panic!("refused") };
    assert_eq!((translate.vp, translate.gva), (vp(1), Gva(0xffff_f888_0008_0000)));
    for (flags, page) in [(1 << 10, 0), (1 << 56, 0), (!0, 0), (1, 1 << 52)] {
        assert_eq!(refused(control, &bytes(&[CHILD, 1, flags, page])), Status::InvalidParameter);
    }
    assert_eq!(Translation::new(Ok(Gpa(0x5123))).bytes(), [0, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Translation::new(Err(TranslationCode::PageNotPresent)).bytes()[..4], [1, 0, 0, 0]);
}

#[test]
fn cpuid_results_are_registered() {
    let control = Control::new(Code::RegisterInterceptResult);
    let word = |value, mask| [U32::new(value), U32::new(mask)];
    let input = CpuidResultInput {
        partition: U64::new(CHILD),
        kind: U32::new(2),
        leaf: U32::new(7),
        is_subleaf_specific: 1,
        results: [word(1, !0), word(2, !0), word(3, 0), word(4, 4)],
        ..CpuidResultInput::default()
    };
    let expected = CpuidResult { vp: vp(0), leaf: 7, subleaf: Some(0), results: [(1, !0), (2, !0), (3, 0), (4, 4)] };
    assert_eq!(request(control, input.bytes()), Ok(Request::CpuidResult(expected)));
    let any = CpuidResultInput { is_subleaf_specific: 0, subleaf: U32::new(9), always_override: 1, ..input };
    let Ok(Request::CpuidResult(found)) = request(control, any.bytes()) else { panic!("refused") };
    assert_eq!(found.subleaf, None);
    for bad in [
        CpuidResultInput { kind: U32::new(1), ..input },
        CpuidResultInput { is_subleaf_specific: 2, ..input },
        CpuidResultInput { always_override: 0xff, ..input },
    ] {
        assert_eq!(refused(control, bad.bytes()), Status::InvalidParameter);
    }

    let control = Control::new(Code::GetVpCpuidValues).with_rep_count(2).with_rep_start(1);
    let input = bytes(&[CHILD, 0, 0, 1, 7 | 2 << 32]);
    let Ok(Request::GetCpuidValues(get)) = request(control, &input) else { panic!("refused") };
    assert_eq!(get.leaves().collect::<Vec<_>>(), [(7, 2)]);
}

#[test]
fn intercepts_are_of_known_kinds() {
    let control = Control::new(Code::InstallIntercept);
    let install = |kind: u32, access: u32, parameter: u64| {
        let input = InstallInterceptInput {
            partition: U64::new(CHILD),
            access: U32::new(access),
            kind: U32::new(kind),
            parameter: U64::new(parameter),
        };
        request(control, input.bytes()).map(|request| {
            let Request::InstallIntercept(intercept) = request else { panic!("{request:?}") };
            (intercept.kind, intercept.read, intercept.write, intercept.execute)
        })
    };
    assert_eq!(install(2, 4, 1), Ok((InterceptKind::Cpuid(1), false, false, true)), "as mshv-ioctls tests it");
    assert_eq!(install(0, 3, 0x3f8), Ok((InterceptKind::IoPort(0x3f8), true, true, false)));
    assert_eq!(install(3, 4, 31), Ok((InterceptKind::Exception(31), false, false, true)));
    for (kind, access, parameter) in [(3, 4, 32), (4, 1, 0), (5, 1, 0), (0xd, 1, 0), (!0, 1, 0), (1, 8, 0), (1, !0, 0)]
    {
        assert_eq!(install(kind, access, parameter), Err(Status::InvalidParameter));
    }
}

#[test]
fn state_is_in_pages_or_in_the_call() {
    let get = Control::new(Code::GetVpState);
    let set = Control::new(Code::SetVpState);
    let input = |kind, rest: &[u64]| bytes(&[&[CHILD, 1, kind, 0, 7], rest].concat());

    let apic = input(0x8000_0000, &[0x55]);
    let Ok(Request::GetState(state)) = request(get.with_variable_words(1), &apic) else { panic!("refused") };
    let StatePlace::Pages(pages) = state.place else { panic!("{state:?}") };
    assert_eq!((state.kind, pages.iter().collect::<Vec<_>>()), (StateKind::LocalApic, [Ok(Gpa(0x5_5000))].to_vec()));
    let xsave = input(0x8000_0001, &[0x55, 1 << 52]);
    let Ok(Request::SetState(state)) = request(set.with_variable_words(2), &xsave) else { panic!("refused") };
    let StatePlace::Pages(pages) = state.place else { panic!("{state:?}") };
    assert_eq!((state.xsave_states, pages.len()), (7, 2));
    assert_eq!(pages.iter().last(), Some(Err(Status::InvalidParameter)));

    assert!(matches!(
        request(get, &input(4, &[])),
        Ok(Request::GetState(state)) if state.place == StatePlace::Call(&[])
    ));
    let timers = input(4, &[1; 25]);
    let Ok(Request::SetState(state)) = request(set.with_variable_words(25), &timers) else { panic!("refused") };
    let StatePlace::Call(bytes) = state.place else { panic!("{state:?}") };
    assert_eq!((state.kind, bytes.len()), (StateKind::SyntheticTimers, 200));

    // Pages that are not given, state that is not given, input for a call that has none, states that do not exist.
    assert_eq!(refused(get, &input(0x8000_0000, &[])), Status::InvalidParameter);
    assert_eq!(refused(set, &input(4, &[])), Status::InvalidParameter);
    assert_eq!(refused(get.with_variable_words(1), &input(4, &[0])), Status::InvalidParameter);
    for kind in [0, 1, 5, 0x8000_0004, 0xffff_ffff] {
        assert_eq!(refused(get.with_variable_words(1), &input(kind, &[0])), Status::InvalidParameter);
    }
}

#[test]
fn interrupts_are_asserted() {
    let control = Control::new(Code::AssertVirtualInterrupt);
    let input = AssertInput {
        partition: U64::new(CHILD),
        flags: U32::new(1),
        destination: U64::new(0xff),
        vector: U32::new(0x30),
        ..AssertInput::default()
    };
    let expected = AssertInterrupt {
        partition: PartitionId(CHILD),
        kind: InterruptKind::Fixed,
        is_level: true,
        is_logical: false,
        destination: 0xff,
        vector: 0x30,
    };
    assert_eq!(request(control, input.bytes()), Ok(Request::AssertInterrupt(expected)));
    // mshv-ioctls: an external interrupt with vector 0 is fine.
    let external = AssertInput { kind: U32::new(7), vector: U32::new(0), ..input };
    let Ok(Request::AssertInterrupt(found)) = request(control, external.bytes()) else { panic!("refused") };
    assert_eq!((found.kind, found.vector), (InterruptKind::ExtInt, 0));
    for bad in [
        AssertInput { kind: U32::new(10), ..input },
        AssertInput { kind: U32::new(!0), ..input },
        AssertInput { flags: U32::new(4), ..input },
        AssertInput { flags: U32::new(!0), ..input },
        AssertInput { vector: U32::new(0x100), ..input },
        AssertInput { destination: U64::new(1 << 32), ..input },
        AssertInput { vtl: 1, ..input },
    ] {
        assert_eq!(refused(control, bad.bytes()), Status::InvalidParameter, "{bad:x?}");
    }
}

#[test]
fn doorbells_are_set_up_and_removed() {
    let create = Control::new(Code::CreatePort);
    // As Linux sends it.
    let input = CreatePortInput {
        port_partition: U64::new(!0),
        port: U32::new(1),
        connection_partition: U64::new(CHILD),
        kind: U32::new(4),
        sint: U32::new(5),
        vp: U32::new(!0),
        ..CreatePortInput::default()
    };
    let port = Port { partition: PartitionId::SELF, number: 1 };
    let expected = CreatePort { port, sender: PartitionId(CHILD), sint: 5, vp: None };
    assert_eq!(request(create, input.bytes()), Ok(Request::CreatePort(expected)));
    for bad in [
        CreatePortInput { kind: U32::new(1), ..input },
        CreatePortInput { kind: U32::new(0), ..input },
        CreatePortInput { sint: U32::new(16), ..input },
        CreatePortInput { sint: U32::new(!0), ..input },
        CreatePortInput { port_vtl: 1, ..input },
        CreatePortInput { min_connection_vtl: 1, ..input },
    ] {
        assert_eq!(refused(create, bad.bytes()), Status::InvalidParameter);
    }
    for number in [0, 1 << 24, !0] {
        let bad = CreatePortInput { port: U32::new(number), ..input };
        assert_eq!(refused(create, bad.bytes()), Status::InvalidPortId);
    }

    let connect = Control::new(Code::ConnectPort);
    let input = ConnectPortInput {
        connection_partition: U64::new(CHILD),
        connection: U32::new(1),
        port_partition: U64::new(!0),
        port: U32::new(1),
        kind: U32::new(4),
        gpa: U64::new(0xfebf_b004),
        flags: U64::new(0x8000_0000),
        ..ConnectPortInput::default()
    };
    let connection = Port { partition: PartitionId(CHILD), number: 1 };
    let doorbell = Doorbell { gpa: Gpa(0xfebf_b004), bytes: None, value: None };
    let expected = ConnectPort { connection, port, doorbell };
    assert_eq!(request(connect, input.bytes()), Ok(Request::ConnectPort(expected)));
    let no_connection = ConnectPortInput { connection: U32::new(0), ..input };
    assert_eq!(refused(connect, no_connection.bytes()), Status::InvalidConnectionId);
    let no_port = ConnectPortInput { port: U32::new(1 << 24), ..input };
    assert_eq!(refused(connect, no_port.bytes()), Status::InvalidPortId);
    for flags in [5, 7, 8, 1 << 30, 1 << 32, !0] {
        let bad = ConnectPortInput { flags: U64::new(flags), ..input };
        assert_eq!(refused(connect, bad.bytes()), Status::InvalidParameter);
    }

    let disconnect = Control::new(Code::DisconnectPort).with_fast();
    assert_eq!(request(disconnect, &bytes(&[CHILD, 1 | 1 << 32])), Ok(Request::DisconnectPort(connection)));
    assert_eq!(refused(disconnect, &bytes(&[CHILD, 1])), Status::InvalidParameter);
    assert_eq!(refused(disconnect, &bytes(&[CHILD, 1 << 32])), Status::InvalidConnectionId);
    let delete = Control::new(Code::DeletePort).with_fast();
    assert_eq!(request(delete, &bytes(&[!0, !0 << 32 | 1])), Ok(Request::DeletePort(port)));
    assert_eq!(refused(delete, &bytes(&[!0, 0])), Status::InvalidPortId);

    let empty = Control::new(Code::NotifyPortRingEmpty).with_fast();
    assert_eq!(request(empty, &bytes(&[5])), Ok(Request::RingEmpty(5)));
    assert_eq!(refused(empty, &bytes(&[16])), Status::InvalidParameter);
}

#[test]
fn doorbell_rings_for_what_it_is_set_to() {
    let (gpa, other) = (Gpa(0x1000), Gpa(0x1001));
    let any = Doorbell { gpa, bytes: None, value: None };
    assert!(any.rings(gpa, 1, 7) && any.rings(gpa, 8, 0) && !any.rings(other, 1, 7));
    let exact = Doorbell { gpa, bytes: Some(2), value: Some(7) };
    assert!(exact.rings(gpa, 2, 7) && !exact.rings(gpa, 4, 7) && !exact.rings(gpa, 2, 6) && !exact.rings(other, 2, 7));
}

/// Each call without its last byte.
#[test]
fn input_that_is_too_short_is_refused() {
    for code in Code::ALL {
        let reps = u16::from(code.shape().rep.is_some());
        let control = Control::new(*code).with_rep_count(reps);
        let checked = check(control, Offered::all()).expect("well-formed");
        let input = [0; 256];
        let short = &input[..checked.input_bytes() - 1];
        assert_eq!(checked.parse(short).expect_err("short"), Status::InvalidHypercallInput, "{code:?}");
    }
}

#[test]
fn elements_are_counted_where_a_call_ends() {
    let control = Control::new(Code::WithdrawMemory).with_rep_count(512).with_rep_start(10);
    let checked = check(control, Offered::all()).expect("well-formed");
    assert_eq!(checked.elements_left(), 502);
    assert_eq!(checked.failure_after(288, Status::NoResources).0, 298 << 32 | 0x1d);
    assert_eq!(checked.success().reps(), 512);
}
