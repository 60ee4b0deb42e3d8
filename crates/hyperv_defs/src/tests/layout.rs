use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::hypercall::Status;
use crate::message::{
    InterceptAccess, InterceptHeader, InvalidRegister, MESSAGE_BYTES, MemoryIntercept, MessageType, OpaqueIntercept,
    PortIntercept, SintDeliverable, execution, memory_access, page_of,
};
use crate::page::{EventRing, LocalApicState, RegisterPage, TimersState, VpAssist};
use crate::property::{FeatureBank, ProcessorFeatures, Property, SyntheticFeatures, VmmCapabilities, Write};
use crate::register::{
    FpControlStatus, PendingInterruption, Register, RegisterAssociation, RegisterValue, SegmentRegister, TableRegister,
    XmmControlStatus,
};
use crate::wire::{U16, U32, U64};

/// The 8, 4, 2 or 1 bytes at `offset`.
fn at<const BYTES: usize>(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word[..BYTES].copy_from_slice(&bytes[offset..offset + BYTES]);
    u64::from_le_bytes(word)
}

/// Bytes that are all different for a while.
fn pattern(length: usize) -> Vec<u8> {
    (1..=251).cycle().take(length).collect()
}

#[test]
fn every_structure_is_read_as_it_was_written() {
    macro_rules! same {
        ($($name:ty),* $(,)?) => {$({
            let bytes = pattern(size_of::<$name>() + 1);
            let read = <$name>::from_bytes(&bytes).expect("enough bytes");
            assert_eq!(read.bytes(), &bytes[..size_of::<$name>()], stringify!($name));
            assert_eq!(<$name>::from_bytes(read.bytes()), Some(read));
            assert_eq!(<$name>::from_bytes(&bytes[2..]), None, "one byte is missing");
            assert!(<$name>::default().bytes().iter().all(|byte| *byte == 0));
        })*};
    }
    same!(
        crate::partition::CreatePartitionInput,
        crate::partition::GetPropertyInput,
        crate::partition::SetPropertyInput,
        crate::memory::WithdrawInput,
        crate::memory::MapInput,
        crate::memory::AccessStatesInput,
        crate::vp::VpHeader,
        crate::vp::CreateVpInput,
        crate::vp::StatePageInput,
        crate::vp::StatsPageInput,
        crate::vp::TranslateInput,
        crate::vp::Translation,
        crate::vp::CpuidResultInput,
        crate::vp::InstallInterceptInput,
        crate::vp::StateInput,
        crate::vp::CpuidValuesInput,
        crate::vp::CpuidValues,
        crate::interrupt::AssertInput,
        crate::interrupt::CreatePortInput,
        crate::interrupt::ConnectPortInput,
        crate::message::MsrIntercept,
        crate::message::CpuidIntercept,
        crate::message::ExceptionIntercept,
        crate::message::ApicEoi,
        crate::message::UnsupportedFeature,
        crate::message::InterruptionDeliverable,
        crate::message::SintIntercept,
        InvalidRegister,
        MemoryIntercept,
        PortIntercept,
        SintDeliverable,
        OpaqueIntercept,
        RegisterPage,
        EventRing,
        VpAssist,
        TimersState,
        LocalApicState,
        FeatureBank,
        RegisterValue,
        RegisterAssociation,
        FpControlStatus,
        XmmControlStatus,
    );
}

/// An MMIO write of 4 bytes, as a monitor reads it.
#[test]
fn memory_message_is_where_the_monitor_looks() {
    let cs = SegmentRegister {
        base: U64::new(0x1000),
        limit: U32::new(0xffff_ffff),
        selector: U16::new(0x10),
        attributes: U16::new(0xa09b),
    };
    let header = InterceptHeader {
        vp_index: U32::new(3),
        length_and_cr8: InterceptHeader::length_and_cr8(6, 0xf),
        access: InterceptAccess::Write as u8,
        execution_state: U16::new(execution::CR0_PE | execution::EFER_LMA | 3),
        cs,
        rip: U64::new(0xffff_8000_0000_1234),
        rflags: U64::new(0x202),
    };
    let message = MemoryIntercept {
        header,
        instruction_length: 6,
        access_info: memory_access::GVA_VALID | memory_access::GVA_GPA_VALID,
        gva: U64::new(0xffff_c900_0000_0fb0),
        gpa: U64::new(0xfebf_bfb0),
        instruction: *b"\xc7\x80\xb0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ..MemoryIntercept::default()
    };

    let page = page_of(MessageType::UnmappedGpa, 0x100, message.bytes());
    assert_eq!((at::<4>(&page, 0), page[4], page[5], at::<8>(&page, 8)), (0x8000_0000, 80, 0, 0x100));
    let payload = &page[16..];
    assert_eq!((at::<4>(payload, 0), payload[4], payload[5], at::<2>(payload, 6)), (3, 0xf6, 1, 0x17));
    assert_eq!((at::<8>(payload, 8), at::<4>(payload, 16)), (0x1000, 0xffff_ffff));
    assert_eq!((at::<2>(payload, 20), at::<2>(payload, 22)), (0x10, 0xa09b));
    assert_eq!((at::<8>(payload, 24), at::<8>(payload, 32)), (0xffff_8000_0000_1234, 0x202));
    assert_eq!((at::<4>(payload, 40), payload[44], payload[45]), (0, 6, 3));
    assert_eq!((at::<8>(payload, 48), at::<8>(payload, 56)), (0xffff_c900_0000_0fb0, 0xfebf_bfb0));
    assert_eq!(&payload[64..67], b"\xc7\x80\xb0");
    assert!(page[16 + 80..].iter().all(|byte| *byte == 0));
}

/// `out dx, al` to the serial port.
#[test]
fn port_message_is_where_the_monitor_looks() {
    let message = PortIntercept {
        port: U16::new(0x3f8),
        access_info: PortIntercept::info(1, false, false),
        instruction_length: 1,
        rax: U64::new(0x41),
        rcx: U64::new(1),
        rsi: U64::new(2),
        rdi: U64::new(3),
        ..PortIntercept::default()
    };
    let payload = message.bytes();
    assert_eq!((at::<2>(payload, 40), payload[42], payload[43], at::<8>(payload, 48)), (0x3f8, 1, 1, 0x41));
    assert_eq!((at::<8>(payload, 104), at::<8>(payload, 112), at::<8>(payload, 120)), (1, 2, 3));
    assert_eq!(PortIntercept::info(4, true, true), 0x1c);
}

#[test]
fn lengths_that_do_not_fit_are_not_told() {
    assert_eq!(InterceptHeader::length_and_cr8(15, 0), 15);
    assert_eq!(InterceptHeader::length_and_cr8(16, 0x1f), 0xf0);
    let page = page_of(MessageType::X64Halt, !0, &[0xff; 300]);
    assert_eq!((page.len(), page[4], page[255]), (MESSAGE_BYTES, 240, 0xff));
}

/// Any other would stay in the slot, and no later message would come.
#[test]
fn only_two_messages_go_to_slot_0() {
    let numbers: BTreeSet<u32> = MessageType::ALL.iter().map(|kind| *kind as u32).collect();
    assert_eq!(numbers.len(), MessageType::ALL.len());
    let for_slot: Vec<u32> =
        MessageType::ALL.into_iter().filter(|kind| kind.is_for_slot_0()).map(|kind| kind as u32).collect();
    assert_eq!(for_slot, [0x8000_003f, 0x8000_0061]);
}

#[test]
fn register_page_is_where_the_monitor_looks() {
    let mut page = RegisterPage { version: U16::new(RegisterPage::VERSION), is_valid: 1, ..RegisterPage::default() };
    page.gprs[15] = U64::new(15);
    page.rip = U64::new(16);
    page.rflags = U64::new(17);
    page.xmm[5] = [18; 16];
    page.segments[1].base = U64::new(19);
    (page.cr0, page.dr7) = (U64::new(20), U64::new(21));
    page.pending_interruption = U64::new(22);
    (page.xfem, page.interrupt_vectors) = (U64::new(23), [24; 8]);
    let bytes = page.bytes();
    assert_eq!((at::<2>(bytes, 0), bytes[2], at::<4>(bytes, 4)), (1, 1, 0));
    assert_eq!((at::<8>(bytes, 0x80), at::<8>(bytes, 0x88), at::<8>(bytes, 0x90)), (15, 16, 17));
    assert_eq!((bytes[0xf0], at::<8>(bytes, 0x110)), (18, 19));
    assert_eq!((at::<8>(bytes, 0x160), at::<8>(bytes, 0x188), at::<8>(bytes, 0x190)), (20, 21, 22));
    assert_eq!((at::<8>(bytes, 0x1a8), bytes[0x2b0]), (23, 24));
}

#[test]
fn ring_and_states_have_their_places() {
    let mut ring = EventRing { signal_masked: 1, is_full: 2, ..EventRing::default() };
    ring.ports[62] = U32::new(3);
    assert_eq!((ring.bytes()[0], ring.bytes()[1], at::<4>(ring.bytes(), 252)), (1, 2, 3));

    let mut apic = LocalApicState { spurious: U32::new(1), divide: U32::new(2), ..LocalApicState::default() };
    apic.irr[7] = U32::new(3);
    assert_eq!((at::<4>(apic.bytes(), 16), at::<4>(apic.bytes(), 168), at::<4>(apic.bytes(), 112)), (1, 2, 3));

    let mut timers = TimersState::default();
    timers.timers[3].config = U64::new(4);
    assert_eq!(at::<8>(timers.bytes(), 128), 4);
}

#[test]
fn registers_are_named_by_the_manuals_numbers() {
    let some = [
        (0x0, Register::ExplicitSuspend),
        (0x1, Register::InterceptSuspend),
        (0x1_0002, Register::PendingInterruption),
        (0x2_0000, Register::Gpr(0)),
        (0x2_000f, Register::Gpr(15)),
        (0x2_0010, Register::Rip),
        (0x3_0017, Register::FpMmx(7)),
        (0x3_0018, Register::FpControlStatus),
        (0x4_0005, Register::Xfem),
        (0x5_0003, Register::Dr(3)),
        (0x6_0007, Register::Segment(7)),
        (0x7_0001, Register::Gdtr),
        (0x8_000e, Register::MtrrDefType),
        (0x8_001f, Register::MtrrPhysBase(15)),
        (0x8_007a, Register::MtrrFixed(10)),
        (0x8_007b, Register::TscAux),
        (0x8_0092, Register::PlSsp(3)),
        (0x8_0093, Register::InterruptSspTable),
        (0xa_000f, Register::Sint(15)),
        (0xa_0010, Register::Scontrol),
    ];
    for (number, register) in some {
        assert_eq!(Register::try_from(number), Ok(register));
    }
    for unknown in [0x5, 0x2_0012, 0x3_001a, 0x4_0006, 0x6_0008, 0x8_0020, 0xa_1000, 0xf_ffff, u32::MAX] {
        assert_eq!(Register::try_from(unknown), Err(Status::InvalidParameter), "{unknown:#x}");
    }
}

/// Two names for one number would make one of them unreachable.
#[test]
fn each_number_names_one_register() {
    let all: Vec<Register> = Register::all().collect();
    assert!(all.len() > 180);
    assert_eq!(all.iter().map(|register| register.number()).collect::<BTreeSet<_>>().len(), all.len());
    for register in all {
        assert_eq!(Register::try_from(register.number()), Ok(register));
    }
    let known = (0..0x10_0000).filter(|number| Register::try_from(*number).is_ok()).count();
    assert_eq!(known, Register::all().count());
}

/// The lists that QEMU 11.1 writes before a VP's first run.
#[test]
fn every_register_of_the_monitors_is_known() {
    let msrs = (0x8_0000..=0x8_000e).chain(0x8_0010..=0x8_001f).chain(0x8_0040..=0x8_004f).chain(0x8_0070..=0x8_007b);
    let more = [0x8_007d, 0x8_0084, 0x8_0095, 0x8_0096, 0x9_0001, 0x9_0002, 0x9_0013, 0x9_0017, 0x9_001c];
    let all = (0x2_0000..=0x2_0011)
        .chain(0x3_0000..=0x3_0019)
        .chain(0x4_0000..=0x4_0005)
        .chain([0x4_1000, 0x4_1002, 0x4_1003])
        .chain(0x5_0000..=0x5_0005)
        .chain(0x6_0000..=0x6_0007)
        .chain(0x7_0000..=0x7_0001)
        .chain(msrs)
        .chain(0x8_008b..=0x8_0093)
        .chain(more)
        .chain(0x9_0000..=0x9_0004)
        .chain(0xa_0000..=0xa_0015)
        .chain(0xb_0000..=0xb_0007)
        .chain(0x1_0002..=0x1_0006)
        .chain([0, 1, 3, 4]);
    for number in all {
        assert!(Register::try_from(number).is_ok(), "{number:#x}");
    }
}

#[test]
fn values_keep_their_parts() {
    let value = RegisterValue::from(0x1122_3344_5566_7788_99aa_bbcc_ddee_ff00_u128);
    assert_eq!((value.as_u64(), value.as_u128() >> 64), (0x99aa_bbcc_ddee_ff00, 0x1122_3344_5566_7788));
    let table = TableRegister::from(value);
    assert_eq!((table.limit.get(), table.base.get()), (0x99aa, 0x1122_3344_5566_7788));
    assert_eq!(RegisterValue::from(table), value);
    let segment = SegmentRegister::from(value);
    assert_eq!((segment.limit.get(), segment.selector.get(), segment.attributes.get()), (0x5566_7788, 0x3344, 0x1122));

    let pending = PendingInterruption(0x0000_00ff_000e_0000 | 1 | 3 << 1 | 1 << 4 | 9 << 5);
    assert!(pending.is_pending());
    assert_eq!((pending.kind(), pending.error_code(), pending.vector()), (3, Some(0xff), 14));
    assert_eq!(pending.instruction_length(), 9);
    assert_eq!(PendingInterruption(!(1 << 4)).error_code(), None);
    assert!(!PendingInterruption::default().is_pending());
}

#[test]
fn properties_are_named_by_the_manuals_numbers() {
    let numbers = [
        0x1_0000, 0x1_0001, 0x2_0005, 0x3_0003, 0x3_0005, 0x5_0003, 0x5_0005, 0x5_0017, 0x6_0002, 0x6_0006, 0x6_0007,
        0x6_0008, 0x6_0009, 0x6_000a, 0x6_000b, 0x8_0000, 0x9_0007, 0x9_0009,
    ];
    assert_eq!(Property::ALL.iter().map(|property| *property as u32).collect::<Vec<_>>(), numbers);
    for number in (0..0xa_0000).chain([u32::MAX]) {
        let found = Property::try_from(number).map(|property| property as u32);
        assert_eq!(found, if numbers.contains(&number) { Ok(number) } else { Err(Status::UnknownProperty) });
    }
}

#[test]
fn values_that_a_property_cannot_have_are_out_of_range() {
    for property in [Property::TimeFreeze, Property::GpaPageAccessTracking, Property::UnimplementedMsrAction] {
        assert_eq!((property.check_value(0), property.check_value(1)), (Ok(()), Ok(())));
        for value in [2, 1 << 32, u64::MAX] {
            assert_eq!(property.check_value(value), Err(Status::PropertyValueOutOfRange));
        }
    }
    for property in Property::ALL.iter().filter(|property| property.write() == Write::Never) {
        assert_eq!(property.check_value(0), Err(Status::OperationDenied), "{property:?}");
    }
    let width = Property::PhysicalAddressWidth;
    assert_eq!((width.check_value(48), width.check_value(53)), (Ok(()), Err(Status::PropertyValueOutOfRange)));
    // The words that QEMU 11.1 and the crate mshv-ioctls 0.7 write.
    for value in [0x640_0ffb, 0x40_0640_0ffb] {
        assert_eq!(Property::SyntheticProcessorFeatures.check_value(value), Ok(()));
    }
    assert_eq!(Property::SyntheticProcessorFeatures.check_value(1 << 40), Err(Status::PropertyValueOutOfRange));
}

#[test]
fn features_are_at_the_manuals_bits() {
    let banks = (ProcessorFeatures::IBRS | ProcessorFeatures::UMIP | ProcessorFeatures::LA57).banks();
    assert_eq!(banks, [1 << 44 | 1 << 58, 1 << 4]);
    assert_eq!(ProcessorFeatures::TSC_ADJUST.banks(), [0, 1 << 18]);
    assert_eq!(ProcessorFeatures::of_banks([!0, 5]).banks(), [!0, 5], "unknown ones are kept");
    let promised = SyntheticFeatures::from_bits(0x640_0ffb).expect("known bits");
    assert!(promised.contains(SyntheticFeatures::SYNIC | SyntheticFeatures::CLUSTER_IPI));
    assert!(!promised.contains(SyntheticFeatures::VP_RUNTIME));

    let capabilities = FeatureBank::new(VmmCapabilities::CAN_PROVIDE_OVERLAY_GPFN.bits());
    assert_eq!(capabilities.bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
}
