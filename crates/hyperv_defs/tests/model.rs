//! Random input, compared with simpler code: sets of VPs with a set of numbers, time with wide arithmetic. For any
//! bytes of a guest, the result is a call or a refusal.

use std::collections::BTreeSet;

use hyperv_defs::memory::Mapping;
use hyperv_defs::reference_tsc::{offset_for, scale_for, time};
use hyperv_defs::vp::StatePlace;
use hyperv_defs::{
    Call, Code, Control, GvaRange, Offered, Refusal, Request, Scope, SparseSet, Status, Targets, check, fast_input,
    parse,
};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

/// A bank: empty, full, sparse, anything.
fn bank() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(!0), (0..64_u32).prop_map(|bit| 1 << bit), any::<u64>()]
}

/// A mask of banks, and a bank for each of them.
fn set() -> impl Strategy<Value = (u64, Vec<u64>)> {
    bank().prop_flat_map(|valid| (Just(valid), prop::collection::vec(bank(), valid.count_ones() as usize)))
}

/// The set's VPs, found bit by bit.
fn naive(valid: u64, banks: &[u64]) -> BTreeSet<u32> {
    let mut given = banks.iter();
    let mut found = BTreeSet::new();
    for bank in (0..64).filter(|bank| valid >> bank & 1 != 0) {
        let bits = given.next().expect("one for each");
        found.extend((0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| bank * 64 + bit));
    }
    found
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A control word that is often valid: a known code, small fields, sometimes a stray bit.
fn control() -> impl Strategy<Value = Control> {
    let code = prop::sample::select(Code::ALL.to_vec());
    let words = prop_oneof![Just(0), 0..4_u16, any::<u16>()];
    let count = prop_oneof![Just(0), 0..8_u16, any::<u16>()];
    let start = prop_oneof![Just(0), Just(0), 0..8_u16, any::<u16>()];
    let stray = prop_oneof![9 => Just(0), 1 => (0..64_u32).prop_map(|bit| 1_u64 << bit)];
    (code, words, count, start, any::<bool>(), stray).prop_map(|(code, words, count, start, fast, stray)| {
        let control = Control::new(code).with_variable_words(words).with_rep_count(count).with_rep_start(start);
        Control(if fast { control.with_fast() } else { control }.0 ^ stray)
    })
}

/// Many small words, so that flags, formats and masks are often valid.
fn input() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![0..4_u64, Just(0), Just(!0), any::<u64>()], 0..520)
}

/// Walks everything in a call, like the hypervisor, and checks that the input contains it.
fn walk(control: Control, call: &Call<'_>, count: u32) -> Result<(), proptest::test_runner::TestCaseError> {
    let targets = match call {
        Call::Flush(flush) => {
            if let Scope::List(ranges) = &flush.scope {
                prop_assert_eq!(ranges.len(), usize::from(control.rep_count() - control.rep_start()));
                for range in ranges.clone() {
                    prop_assert!((1..=4096).contains(&range.count()));
                    let span = (range.count() - 1) << range.size().shift();
                    prop_assert!(range.first().0.checked_add(span).is_some());
                    prop_assert_eq!(range.addresses().last().map(|last| last.0), Some(range.first().0 + span));
                }
            }
            flush.targets
        }
        Call::Ipi(ipi) => {
            prop_assert!(ipi.vector >= 0x10);
            ipi.targets
        }
        Call::SpinWait(_) => return Ok(()),
        Call::Partition(request) => return walk_request(control, request),
    };
    let found: Vec<u32> = targets.indices(count).collect();
    prop_assert!(found.is_sorted_by(|a, b| a < b));
    prop_assert!(found.iter().all(|vp| *vp < count && targets.contains(*vp)));
    Ok(())
}

/// The same for a parent's call: a list has as many elements as the control word says, and no page is beyond 2^64.
fn walk_request(control: Control, request: &Request<'_>) -> Result<(), proptest::test_runner::TestCaseError> {
    let left = usize::from(control.rep_count() - control.rep_start().min(control.rep_count()));
    let is_page = |page: Result<addr::Gpa, Status>| page.map_or_else(|it| it == Status::InvalidParameter, is_aligned);
    match request {
        Request::Deposit(deposit) => {
            prop_assert_eq!(deposit.pages.len(), left);
            prop_assert!(deposit.pages.iter().all(is_page));
        }
        Request::MapPages(map) => {
            prop_assert_eq!(usize::from(map.what.len()), left);
            prop_assert!(is_aligned(map.first) && (!map.is_large || map.first.0.is_multiple_of(1 << 21)));
            if let Mapping::Pages(pages, _) = map.what {
                prop_assert!(pages.iter().all(is_page));
            }
        }
        Request::UnmapPages(unmap) => prop_assert_eq!(usize::from(unmap.count), left),
        Request::GetAccessStates(get) => prop_assert_eq!(usize::from(get.count), left),
        Request::Withdraw(withdraw) => prop_assert_eq!(usize::from(withdraw.count), left),
        Request::GetRegisters(get) => prop_assert_eq!(get.names().map(|_| 1).sum::<usize>(), left),
        Request::SetRegisters(set) => prop_assert_eq!(set.elements().map(|_| 1).sum::<usize>(), left),
        Request::GetCpuidValues(get) => prop_assert_eq!(get.leaves().map(|_| 1).sum::<usize>(), left),
        Request::GetState(state) | Request::SetState(state) => {
            let found = match state.place {
                StatePlace::Pages(pages) => pages.len(),
                StatePlace::Call(bytes) => bytes.len() / 8,
            };
            prop_assert_eq!(found, usize::from(control.variable_words()));
        }
        _ => prop_assert_eq!(left, 0),
    }
    Ok(())
}

fn is_aligned(page: addr::Gpa) -> bool {
    page.0.is_multiple_of(4096)
}

proptest! {
    #[test]
    fn sparse_set_is_the_set_of_its_bits((valid, banks) in set(), count in 1..=4096_u32) {
        let expected = naive(valid, &banks);
        let input = bytes(&banks);
        let targets = Targets::Sparse(SparseSet::new(valid, &input).expect("as many banks as bits"));

        let existing: Vec<u32> = expected.range(..count).copied().collect();
        prop_assert_eq!(targets.indices(count).collect::<Vec<_>>(), existing.clone());
        prop_assert!((0..4200).all(|vp| targets.contains(vp) == expected.contains(&vp)));

        let by_bank: Vec<u32> = targets
            .banks(count)
            .flat_map(|(bank, bits)| (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| bank * 64 + bit))
            .collect();
        prop_assert_eq!(by_bank, existing);
        prop_assert!(targets.banks(count).all(|(_, bits)| bits != 0));
    }

    #[test]
    fn mask_is_the_set_of_its_bits(mask in bank(), count in 1..=4096_u32) {
        let expected: Vec<u32> = naive(1, &[mask]).range(..count).copied().collect();
        prop_assert_eq!(Targets::Mask(mask).indices(count).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn set_survives_the_way_through_a_call((valid, banks) in set(), count in 1..=4096_u32, list in input()) {
        let list = &list[..list.len().min(0xfff)];
        let words = [&[0, 0, 0, valid], banks.as_slice(), list].concat();
        let input = bytes(&words);
        let variable = u16::try_from(banks.len()).expect("at most 64");
        let (code, reps) = match u16::try_from(list.len()).expect("at most 4095") {
            0 => (Code::FlushVirtualAddressSpaceEx, 0),
            reps => (Code::FlushVirtualAddressListEx, reps),
        };
        let control = Control::new(code).with_variable_words(variable).with_rep_count(reps);

        let Ok(Call::Flush(flush)) = parse(control, &input, Offered::all()) else { panic!("it is well-formed") };
        let expected: Vec<u32> = naive(valid, &banks).range(..count).copied().collect();
        prop_assert_eq!(flush.targets.indices(count).collect::<Vec<_>>(), expected);
        let found = match flush.scope {
            Scope::List(ranges) => ranges.collect(),
            Scope::Everything => Vec::new(),
        };
        prop_assert_eq!(found, list.iter().map(|word| GvaRange(*word).simple()).collect::<Vec<_>>());
    }

    #[test]
    fn whatever_is_sent_is_answered(
        control in control(), words in input(), offered in any::<u16>(), cut in 0..16_usize, count in 1..=4096_u32,
    ) {
        let mut input = bytes(&words);
        input.truncate(input.len().saturating_sub(cut));
        if let Ok(call) = parse(control, &input, Offered::from_bits_truncate(offered)) {
            walk(control, &call, count)?;
        }
    }

    #[test]
    fn any_word_at_all_is_answered(control in any::<u64>(), words in any::<[u64; 14]>(), offered in any::<u16>()) {
        let control = Control(control);
        if let Ok(call) = parse(control, &fast_input(&words), Offered::from_bits_truncate(offered)) {
            walk(control, &call, 4096)?;
        }
    }

    /// A checked call fits into its place, and is not longer than a reader allows.
    #[test]
    fn checked_call_keeps_its_limits(control in control(), offered in any::<u16>(), at in any::<u64>()) {
        let offered = Offered::from_bits_truncate(offered);
        match check(control, offered) {
            Ok(checked) => {
                prop_assert_eq!(control.0 & Control::RESERVED, 0);
                let limit = if offered.contains(Offered::XMM_INPUT) { 112 } else { 16 };
                prop_assert!(!checked.is_fast() || checked.input_bytes() <= limit);
                if !checked.is_fast() && checked.check_placement(addr::Gpa(at), addr::Gpa(1 << 48)).is_ok() {
                    prop_assert!(checked.input_bytes() as u64 + at % 4096 <= 4096 && at < 1 << 48 && at % 8 == 0);
                }
                prop_assert_eq!(checked.success().0, u64::from(control.rep_count()) << 32);
            }
            Err(Refusal::InvalidOpcode) => {
                prop_assert!(control.is_fast() && !offered.contains(Offered::XMM_INPUT));
            }
            Err(Refusal::Status(status)) => prop_assert!(status != Status::Success),
        }
    }

    #[test]
    fn time_is_that_of_wide_arithmetic(hertz in 10_000_001..=u64::MAX, tsc in any::<u64>(), offset in any::<i64>()) {
        let scale = scale_for(hertz).expect("faster than 10 MHz");
        // The largest fraction of 2^64 that is not above 10^7 / hertz.
        let (whole, hertz) = (10_000_000_u128 << 64, u128::from(hertz));
        prop_assert!(u128::from(scale) * hertz <= whole && (u128::from(scale) + 1) * hertz > whole);

        let ticks = u128::from(tsc) * u128::from(scale) / (1 << 64);
        let expected = (i128::try_from(ticks).expect("64 bits") + i128::from(offset)).rem_euclid(1 << 64);
        prop_assert_eq!(i128::from(time(tsc, scale, offset)), expected);
    }

    #[test]
    fn time_never_goes_back(hertz in 10_000_001..10_000_000_000_u64, tsc in 0..1_u64 << 62, step in 0..1_u64 << 40) {
        let scale = scale_for(hertz).expect("faster than 10 MHz");
        let offset = offset_for(tsc, scale, 0);
        prop_assert_eq!(time(tsc, scale, offset), 0);
        prop_assert!(time(tsc + step, scale, offset) < 1 << 62);
        prop_assert!(time(tsc + step + 1, scale, offset) >= time(tsc + step, scale, offset));
    }
}
