use fastrand::Rng;

use super::*;

/// CPUID of a Dunlin guest on a current processor: no PCID, LA57, CET, SVM.
fn shown() -> Leaves {
    Leaves {
        leaf_1: Registers { ecx: 1 << 26, edx: 0x0783_fbff, ..Registers::default() },
        leaf_7: Registers { ebx: 1 << 0 | 1 << 7 | 1 << 20, ecx: 1 << 2 | 1 << 3, ..Registers::default() },
        leaf_8000_0001: Registers { edx: 1 << 11 | 1 << 20 | 1 << 25 | 1 << 29, ..Registers::default() },
        ..Leaves::default()
    }
}

const LONG: State = State {
    cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::PG,
    cr4: cr4::PAE | cr4::PGE,
    efer: efer::SCE | efer::LME | efer::LMA | efer::NXE | efer::SVME,
};
const REAL: State = State { cr0: cr0::ET | cr0::CD | cr0::NW, cr4: 0, efer: efer::SVME };

/// What VMRUN rejects in these registers (APM vol. 2, 15.5.1), written independently of the rules.
fn vmrun_refuses(state: State) -> bool {
    let State { cr0, cr4, efer } = state;
    let is_set = |register: u64, bit: u32| register >> bit & 1 == 1;
    let long_with_paging = is_set(efer, 8) && is_set(cr0, 31);
    !is_set(efer, 12)
        || (!is_set(cr0, 30) && is_set(cr0, 29))
        || cr0 >> 32 != 0
        || cr4 & !0x00f7_1fff != 0
        || efer & !0x0037_fd01 != 0
        || (long_with_paging && (!is_set(cr4, 5) || !is_set(cr0, 0)))
        || is_set(efer, 10) != long_with_paging
}

#[test]
fn contradictions_in_cr0_are_refused() {
    let set = |bits: u64| LONG.write_cr0(LONG.cr0 | bits, true);
    assert_eq!(set(1 << 32), Err(Refused));
    assert_eq!(set(1 << 63), Err(Refused));
    assert_eq!(set(cr0::NW), Err(Refused));
    assert_eq!(LONG.write_cr0(LONG.cr0 & !cr0::PE, true), Err(Refused));
    assert_eq!(REAL.write_cr0(REAL.cr0 | cr0::PG, false), Err(Refused));
    assert_eq!(set(cr0::NW | cr0::CD).map(|state| state.cr0), Ok(LONG.cr0 | cr0::NW | cr0::CD));
}

#[test]
fn reserved_bits_of_cr0_stay_clear_and_et_stays_set() {
    assert_eq!(
        REAL.write_cr0(0xffff_ffff & !cr0::PG & !cr0::NW & !cr0::ET, false).map(|state| state.cr0),
        Ok(0x4005_003f)
    );
}

#[test]
fn long_mode_becomes_active_with_paging_and_ends_with_it() {
    let enabled = State { cr0: cr0::PE | cr0::ET, cr4: cr4::PAE, efer: efer::LME | efer::SVME };
    let active = enabled.write_cr0(enabled.cr0 | cr0::PG, false).expect("PAE is on");
    assert_eq!(active.efer, efer::LME | efer::LMA | efer::SVME);
    assert_eq!(active.write_cr0(enabled.cr0, false), Ok(enabled));

    // Not without PAE, and not with CS.L set, in either direction.
    let without_pae = State { cr4: 0, ..enabled };
    assert_eq!(without_pae.write_cr0(enabled.cr0 | cr0::PG, false), Err(Refused));
    assert_eq!(enabled.write_cr0(enabled.cr0 | cr0::PG, true), Err(Refused));
    assert_eq!(active.write_cr0(enabled.cr0, true), Err(Refused));
    // Legacy paging ignores CS.L.
    let legacy = State { efer: efer::SVME, ..enabled };
    assert!(legacy.write_cr0(enabled.cr0 | cr0::PG, true).is_ok_and(|state| state.efer == efer::SVME));
}

#[test]
fn each_bit_of_cr4_is_allowed_exactly_when_cpuid_shows_its_feature() {
    let offered = Offered::by(&shown());
    let allowed: u64 =
        (0..64).filter(|bit| LONG.write_cr4(LONG.cr4 | 1 << bit, &offered).is_ok()).map(|bit| 1 << bit).sum();
    // VME to UMIP, FSGSBASE, OSXSAVE, SMEP, SMAP, PKE; not LA57, PCIDE, CET, PKS, nor Intel's bits.
    assert_eq!(allowed, 0x0075_0fff);

    let hide = |change: fn(&mut Leaves), bits: u64| {
        let mut leaves = shown();
        change(&mut leaves);
        let hidden = Offered::by(&leaves);
        assert_eq!(REAL.write_cr4(bits, &offered).map(|state| state.cr4), Ok(bits));
        for bit in (0..64).map(|bit| 1 << bit).filter(|bit| bits & bit != 0) {
            assert_eq!(REAL.write_cr4(bit, &hidden), Err(Refused), "{bit:#x}");
        }
    };
    hide(|leaves| leaves.leaf_1.edx &= !(1 << 1), cr4::VME | cr4::PVI);
    hide(|leaves| leaves.leaf_1.edx &= !(1 << 13), cr4::PGE);
    hide(|leaves| leaves.leaf_1.ecx = 0, cr4::OSXSAVE);
    hide(|leaves| leaves.leaf_7.ecx = 0, cr4::UMIP | cr4::PKE);
    hide(|leaves| leaves.leaf_7.ebx = 0, cr4::FSGSBASE | cr4::SMEP | cr4::SMAP);
}

#[test]
fn hidden_features_are_offered_when_they_are_shown() {
    let everything = Registers { eax: u32::MAX, ebx: u32::MAX, ecx: u32::MAX, edx: u32::MAX };
    let offered = Offered::by(&Leaves {
        leaf_1: everything,
        leaf_7: everything,
        leaf_8000_0001: everything,
        leaf_8000_0008: everything,
        leaf_8000_0021: everything,
    });
    assert_eq!(offered, Offered { cr4: 0x00f7_1fff, efer: 0x0036_c901 });
}

#[test]
fn pae_stays_in_long_mode() {
    let offered = Offered::by(&shown());
    assert_eq!(LONG.write_cr4(LONG.cr4 & !cr4::PAE, &offered), Err(Refused));
    let legacy = State { efer: efer::SVME, ..LONG };
    assert_eq!(legacy.write_cr4(0, &offered).map(|state| state.cr4), Ok(0));
}

#[test]
fn efer_keeps_svme_and_lma_and_refuses_what_is_not_offered() {
    let offered = Offered::by(&shown());
    let written = LONG.write_efer(efer::LME | efer::LMA | efer::FFXSR, &offered).map(|state| state.efer);
    assert_eq!(written, Ok(efer::LME | efer::LMA | efer::FFXSR | efer::SVME));
    // Software does not write LMA: it follows.
    assert_eq!(LONG.write_efer(efer::LME, &offered).map(|state| state.efer), Ok(efer::LME | efer::LMA | efer::SVME));
    assert_eq!(REAL.write_efer(efer::LMA, &offered), Ok(REAL));
    // Bits 7:1 read as zero.
    assert_eq!(REAL.write_efer(0xfe, &offered), Ok(REAL));

    let allowed: u64 = (8..64).filter(|bit| REAL.write_efer(1 << bit, &offered).is_ok()).map(|bit| 1 << bit).sum();
    assert_eq!(allowed, efer::LME | efer::LMA | efer::NXE | efer::FFXSR);
    assert_eq!(LONG.write_efer(efer::LMA, &offered), Err(Refused), "LME cleared under paging");
    let legacy = State { efer: efer::SVME, ..LONG };
    assert_eq!(legacy.write_efer(efer::LME, &offered), Err(Refused), "LME set under paging");
}

#[test]
fn no_sequence_of_writes_leads_to_a_state_that_vmrun_refuses() {
    let offered = Offered::by(&shown());
    let mut random = Rng::with_seed(1);
    let mut next = || random.u64(..);
    let mut states = 0;
    for start in [REAL, LONG] {
        let (mut state, mut in_long_code) = (start, start == LONG);
        for _ in 0..200_000 {
            // One or a few bits of one register, mostly existing ones.
            let bits = (0..=next() % 3).fold(0, |bits, _| bits | 1 << (next() % if next() % 8 == 0 { 64 } else { 32 }));
            let after = match next() % 4 {
                0 => state.write_cr0(state.cr0 ^ bits, in_long_code),
                1 => state.write_cr4(state.cr4 ^ bits, &offered),
                2 => state.write_efer((state.efer & !efer::SVME) ^ bits, &offered),
                // A far jump: L may be set in any mode, but has a meaning only in long mode.
                _ => {
                    in_long_code = next() % 2 == 0;
                    Ok(state)
                }
            };
            if let Ok(after) = after {
                states += u32::from(after != state);
                state = after;
            }
            assert!(!vmrun_refuses(state), "{state:x?}");
        }
    }
    assert!(states > 10_000, "{states} changes");
}

#[test]
fn changes_that_concern_translations_make_them_stale_and_others_do_not() {
    let stale = |change: fn(&mut State)| {
        let mut next = LONG;
        change(&mut next);
        LONG.makes_stale(next)
    };
    for change in [
        |next: &mut State| next.cr0 ^= cr0::PG,
        |next: &mut State| next.cr0 ^= cr0::WP,
        |next: &mut State| next.cr4 ^= cr4::PGE,
        |next: &mut State| next.cr4 ^= cr4::PAE,
        |next: &mut State| next.cr4 ^= cr4::PSE,
        |next: &mut State| next.cr4 ^= cr4::SMEP,
        |next: &mut State| next.efer ^= efer::NXE,
    ] {
        assert!(stale(change));
    }
    for change in [
        |_: &mut State| (),
        |next: &mut State| next.cr0 ^= cr0::TS | cr0::MP | cr0::EM | cr0::NE,
        |next: &mut State| next.cr4 ^= cr4::OSXSAVE | cr4::TSD | cr4::OSFXSR | cr4::DE,
        |next: &mut State| next.efer ^= efer::SCE,
    ] {
        assert!(!stale(change));
    }
}

#[test]
fn status_word_sets_pe_and_never_clears_it() {
    assert_eq!(with_status_word(cr0::ET, 0xffff), 0x1f);
    assert_eq!(with_status_word(LONG.cr0, 0), LONG.cr0 & !cr0::MP);
    assert_eq!(with_status_word(cr0::PE | cr0::TS | cr0::ET, 0xfff0), cr0::PE | cr0::ET);
}

#[test]
fn instructions_are_read_with_all_their_prefixes() {
    let cases: [(&[u8], bool, Option<Write>); 19] = [
        // mov cr0, rax; mov cr4, rbx; mov cr4, r15.
        (&[0x0f, 0x22, 0xc0], true, Some(Write::Move { control: 0, from: 0, length: 3 })),
        (&[0x0f, 0x22, 0xe3], true, Some(Write::Move { control: 4, from: 3, length: 3 })),
        (&[0x41, 0x0f, 0x22, 0xe7], true, Some(Write::Move { control: 4, from: 15, length: 4 })),
        // mov cr8, rax, by REX.R and by LOCK.
        (&[0x44, 0x0f, 0x22, 0xc0], true, Some(Write::Move { control: 8, from: 0, length: 4 })),
        (&[0xf0, 0x0f, 0x22, 0xc1], false, Some(Write::Move { control: 8, from: 1, length: 4 })),
        // Prefixes without a meaning here; ModRM.mod has none either.
        (&[0x66, 0x67, 0xf3, 0x48, 0x0f, 0x22, 0x04], true, Some(Write::Move { control: 0, from: 4, length: 7 })),
        (&[0x2e, 0x0f, 0x22, 0xc5], false, Some(Write::Move { control: 0, from: 5, length: 4 })),
        // Of two REX prefixes the last counts; one before another prefix does not.
        (&[0x41, 0x48, 0x0f, 0x22, 0xc0], true, Some(Write::Move { control: 0, from: 0, length: 5 })),
        (&[0x41, 0x66, 0x0f, 0x22, 0xc0], true, Some(Write::Move { control: 0, from: 0, length: 5 })),
        // 41 is INC ECX outside of 64-bit mode.
        (&[0x41, 0x0f, 0x22, 0xc0], false, None),
        // lmsw ax; lmsw r9w; lmsw [rbx]; with a prefix.
        (&[0x0f, 0x01, 0xf0], false, Some(Write::StatusWord { from: 0, length: 3 })),
        (&[0x41, 0x0f, 0x01, 0xf1], true, Some(Write::StatusWord { from: 9, length: 4 })),
        (&[0x0f, 0x01, 0x33], true, Some(Write::StatusWordInMemory { opcode: 0 })),
        (&[0x65, 0x42, 0x0f, 0x01, 0x34, 0x08], true, Some(Write::StatusWordInMemory { opcode: 2 })),
        // smsw ax; clts; mov rax, cr0; no bytes; an incomplete instruction.
        (&[0x0f, 0x01, 0xe0], true, None),
        (&[0x0f, 0x06, 0x90], true, None),
        (&[0x0f, 0x20, 0xc0], true, None),
        (&[], true, None),
        (&[0x66, 0x0f, 0x22], true, None),
    ];
    for (bytes, is_64_bit, expected) in cases {
        assert_eq!(decode(bytes, is_64_bit), expected, "{bytes:02x?}");
    }
    assert_eq!(decode(&[0x66; 15], true), None);
}

#[test]
fn decode_assists_name_the_register_of_a_move_only() {
    assert_eq!(assisted(1 << 63 | 13), Some(13));
    assert_eq!(assisted(0), None);
    assert_eq!(assisted(5), None);
}

#[test]
fn registers_set_from_outside_may_come_in_any_order() {
    let offered = Offered::by(&shown());
    let (cr0, cr4, efer) = (cr0::PE | cr0::PG | cr0::ET, cr4::PAE, efer::LME | efer::LMA | efer::NXE);
    let reset = State { cr0: cr0::ET, cr4: 0, efer: 0 };
    let set = |state: State, which: u8| match which {
        0 => state.set_cr0(cr0),
        1 => state.set_cr4(cr4, &offered),
        _ => state.set_efer(efer, &offered),
    };
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let end = order.into_iter().try_fold(reset, set);
        assert_eq!(end, Ok(State { cr0, cr4, efer }), "{order:?}");
        let back = end.and_then(|state| state.set_efer(0, &offered));
        assert_eq!(back, Ok(State { cr0, cr4, efer: 0 }), "LMA goes with LME");
    }
    assert_eq!(reset.set_cr0(1 << 32), Err(Refused));
    assert_eq!(reset.set_cr4(1 << 13, &offered), Err(Refused));
    assert_eq!(reset.set_efer(efer::SVME, &offered), Err(Refused));
    assert_eq!(reset.set_cr0(1 << 6 | cr0::PE), Ok(State { cr0: cr0::ET | cr0::PE, ..reset }), "not a bit of CR0");
}

#[test]
fn directory_is_found_with_pae_paging_alone() {
    let pae = State { efer: LONG.efer & !(efer::LME | efer::LMA), ..LONG };
    assert_eq!(pae.directory(0xffff_ffff_1234_56ff), Some(0x1234_56e0));
    assert_eq!(State { efer: pae.efer | efer::LME, ..pae }.directory(0x1000), Some(0x1000), "not active");
    for other in [LONG, REAL, State { cr0: pae.cr0 & !cr0::PG, ..pae }, State { cr4: pae.cr4 & !cr4::PAE, ..pae }] {
        assert_eq!(other.directory(0x1000), None, "{other:x?}");
    }
}
