use addr::Gpa;

use crate::cpuid::{self, Features, HardwareFeatures, Privileges, Recommendations};
use crate::msr::{self, GuestOsId, HypercallMsr, ReferenceTscMsr, VpAssistMsr};
use crate::reference_tsc::{self, ReferenceTsc, offset_for, scale_for, time, tsc_at};

#[test]
fn vendor_and_signature_spell_out() {
    let mut vendor = [0; 12];
    for (to, register) in vendor.as_chunks_mut().0.iter_mut().zip(cpuid::VENDOR) {
        *to = register.to_le_bytes();
    }
    assert_eq!(&vendor, b"Microsoft Hv");
    assert_eq!(&cpuid::SIGNATURE.to_le_bytes(), b"Hv#1");
    // Linux uses the interface only with at least this many leaves.
    assert_eq!(cpuid::MAX_LEAF.clamp(0x4000_0005, 0x4000_ffff), cpuid::MAX_LEAF);
}

/// The bits with which a Linux guest worked.
#[test]
fn usual_profile_has_the_usual_numbers() {
    let privileges = Privileges::REFERENCE_COUNTER
        | Privileges::HYPERCALL
        | Privileges::VP_INDEX
        | Privileges::REFERENCE_TSC
        | Privileges::FREQUENCIES
        | Privileges::TSC_INVARIANT;
    assert_eq!(privileges.bits(), 0x8a62);
    assert_eq!((Features::XMM_INPUT | Features::FREQUENCIES).bits(), 0x110);
    let recommendations = Recommendations::REMOTE_FLUSH
        | Recommendations::RELAXED_TIMING
        | Recommendations::DEPRECATE_AUTO_EOI
        | Recommendations::EX_PROCESSOR_MASKS;
    assert_eq!(recommendations.bits(), 0xa24);
    assert_eq!((recommendations | Recommendations::CLUSTER_IPI).bits(), 0xe24);
    assert_eq!((HardwareFeatures::MSR_BITMAPS | HardwareFeatures::SECOND_LEVEL_TRANSLATION).bits(), 0xa);
}

#[test]
fn registers_of_pages_have_a_page_and_an_enable_bit() {
    let register = HypercallMsr(0x1_2345_6abd);
    assert!(register.is_enabled() && !register.is_locked());
    assert_eq!(register.page(), Gpa(0x1_2345_6000));
    assert_eq!(register.with_enable(false), HypercallMsr(0x1_2345_6abc), "the rest is kept");
    assert_eq!(register.with_enable(false).with_enable(true), register);
    assert!(HypercallMsr(0b10).is_locked() && !HypercallMsr(0b10).is_enabled());

    assert!(ReferenceTscMsr(0x5001).is_enabled() && !ReferenceTscMsr(0x5002).is_enabled());
    assert_eq!(VpAssistMsr(!0).page(), Gpa(0xffff_ffff_ffff_f000));
}

#[test]
fn synthetic_registers_lie_in_their_range() {
    for number in [msr::GUEST_OS_ID, msr::VP_ASSIST_PAGE, msr::STIMER3_COUNT, msr::TSC_INVARIANT_CONTROL] {
        assert!(msr::RANGE.contains(&number));
    }
    assert_eq!((msr::SINT15 - msr::SINT0, msr::STIMER3_COUNT - msr::STIMER0_CONFIG), (15, 7));
}

#[test]
fn guests_say_who_they_are() {
    let linux_6_1 = GuestOsId(0x8100_u64 << 48 | 0x0006_01c0 << 16);
    assert!(linux_6_1.is_set());
    assert_eq!(linux_6_1.open_source_type(), Some(1));
    assert_eq!(GuestOsId(0x8200_u64 << 48).open_source_type(), Some(2));
    assert_eq!(GuestOsId(0x0001_040a_0000_4a61).open_source_type(), None);
    assert!(!GuestOsId(0).is_set());
}

#[test]
fn page_is_laid_out_as_the_manual_says() {
    let page = ReferenceTsc { sequence: 0x0403_0201, scale: 0x1817_1615_1413_1211, offset: -2 };
    let bytes = page.encode();
    assert_eq!(bytes[..8], [1, 2, 3, 4, 0, 0, 0, 0]);
    assert_eq!(bytes[8..16], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
    assert_eq!(bytes[16..], (-2_i64).to_le_bytes());
    assert_eq!(ReferenceTsc::INVALID.encode(), [0; reference_tsc::ENCODED_BYTES]);
}

#[test]
fn sequence_is_never_one_that_means_something() {
    let after = |sequence| ReferenceTsc { sequence, ..ReferenceTsc::INVALID }.next_sequence();
    assert_eq!((after(0), after(1), after(u32::MAX - 2)), (1, 2, u32::MAX - 1));
    assert_eq!((after(u32::MAX - 1), after(u32::MAX)), (1, 1));
}

#[test]
fn scale_exists_for_every_tsc_that_is_faster_than_the_clock() {
    for hertz in [0, 1, 10_000_000] {
        assert_eq!(scale_for(hertz), None);
    }
    assert_eq!(scale_for(20_000_000), Some(1 << 63));
    assert_eq!(scale_for(10_000_001), Some(18_446_742_229_035_328_712));
    assert_eq!(scale_for(u64::MAX), Some(10_000_000));
}

#[test]
fn a_second_of_ticks_is_a_second_of_time() {
    for hertz in [1_000_000_000, 2_600_000_000, 3_693_060_000_u64] {
        let scale = scale_for(hertz).expect("faster than 10 MHz");
        let second = time(hertz, scale, 0);
        assert!((9_999_999..=10_000_000).contains(&second), "{second}");
        let day = time(86_400 * hertz, scale, 0);
        assert!(864_000_000_000 - day <= 86_400, "{day}");
    }
}

#[test]
fn tsc_of_a_time_is_the_first_at_which_it_is_that_time() {
    for hertz in [10_000_001, 1_000_000_000, 2_600_000_000, 3_693_060_000_u64] {
        let scale = scale_for(hertz).expect("faster than 10 MHz");
        for offset in [0, -1_000_000_007, 12_345] {
            for at in [12_346, 9_999_999, 864_000_000_001, 1 << 50] {
                let tsc = tsc_at(at, scale, offset);
                assert!(time(tsc, scale, offset) >= at, "{hertz} {offset} {at}: not yet at {tsc}");
                assert!(time(tsc - 1, scale, offset) < at, "{hertz} {offset} {at}: before {tsc}");
            }
        }
    }
}

#[test]
fn time_that_is_over_or_out_of_reach_has_the_first_or_the_last_tsc() {
    let scale = scale_for(2_600_000_000).expect("faster than 10 MHz");
    assert_eq!((tsc_at(5, scale, 5), tsc_at(5, scale, 6), tsc_at(u64::MAX, scale, 0)), (0, 0, u64::MAX));
    assert_eq!(tsc_at(u64::MAX, u64::MAX, i64::MIN), u64::MAX);
}

#[test]
fn clock_can_be_set_to_any_time() {
    let scale = scale_for(2_600_000_000).expect("faster than 10 MHz");
    for (tsc, now) in [(0, 0), (1 << 50, 0), (7, u64::MAX), (u64::MAX, 12_345), (u64::MAX, u64::MAX)] {
        let page = ReferenceTsc { sequence: 1, scale, offset: offset_for(tsc, scale, now) };
        assert_eq!(page.time(tsc), now);
    }
}
