//! Arm's processors by what they report, and what is done on each.

extern crate std;
use std::vec::Vec;

use super::{Answer, Firmware, Kinds, Plan, Processor, Steps, core_name, shares_core};
use crate::{Ignored, State, Weakness};

use Answer::{Needed, NotNeeded, Unknown};

/// MIDR_EL1, ID_AA64PFR0_EL1, ID_AA64PFR1_EL1 and ID_AA64MMFR1_EL1.
fn processor(midr: u64, pfr0: u64, pfr1: u64, mmfr1: u64) -> Processor {
    Processor { midr, pfr0, pfr1, mmfr1, ..Processor::default() }
}

/// Firmware as TF-A has been since 2022: each processor's answers.
const MODERN: Firmware = Firmware([NotNeeded, Unknown, Needed]);

/// Registers of sixteen processors, their firmware, and the steps for each, in addition to what is always done.
fn processors() -> [(&'static str, Processor, Firmware, Steps); 16] {
    const SSBS: Kinds = Kinds::NO_STORE_BYPASS;
    let steps = |kinds: Kinds, branches: u8| Steps { kinds: kinds | Kinds::CLEAR_REGISTERS, branches };
    let of_2018 = Firmware([Needed, NotNeeded, Unknown]);
    let of_2022 = Firmware([Needed, NotNeeded, Needed]);
    [
        ("Cortex-A53", processor(0x410f_d034, 0x2222, 0, 0), Firmware::NONE, steps(Kinds::empty(), 0)),
        (
            "Cortex-A55",
            processor(0x412f_d050, 0x1011_2222, 0x10, 0x1021_2122),
            Firmware::NONE,
            steps(Kinds::empty(), 0),
        ),
        ("Cortex-A57", processor(0x411f_d070, 0x2222, 0, 0), of_2022, steps(Kinds::FIRMWARE_3, 0)),
        ("Cortex-A72", processor(0x410f_d083, 0x2222, 0, 0), of_2018, steps(Kinds::FIRMWARE_1, 8)),
        ("Cortex-A73", processor(0x410f_d092, 0x2222, 0, 0), of_2022, steps(Kinds::FIRMWARE_3, 0)),
        (
            "Cortex-A75",
            processor(0x413f_d0a1, 0x1011_2222, 0, 0x1021_2122),
            Firmware([Needed, Needed, Needed]),
            steps(Kinds::FIRMWARE_3 | Kinds::FIRMWARE_2, 0),
        ),
        ("Cortex-A76", processor(0x414f_d0b1, 0x1100_0000_1011_1112, 0x10, 0x1021_2122), MODERN, steps(SSBS, 24)),
        ("Neoverse N1", processor(0x414f_d0c1, 0x1100_0000_1011_1112, 0x20, 0x1021_2122), MODERN, steps(SSBS, 24)),
        ("Cortex-A78AE", processor(0x410f_d423, 0x1100_0000_1011_1112, 0x10, 0x1021_2122), MODERN, steps(SSBS, 32)),
        ("Neoverse V1", processor(0x411f_d402, 0x1101_1101_2011_1112, 0x20, 0x1021_2122), MODERN, steps(SSBS, 32)),
        ("Cortex-A710", processor(0x412f_d471, 0x1201_1111_2011_1112, 0x221, 0x1021_2122), MODERN, steps(SSBS, 32)),
        ("Neoverse N2", processor(0x410f_d493, 0x1201_1111_2011_1112, 0x221, 0x1021_2122), MODERN, steps(SSBS, 32)),
        // What later cores report.
        (
            "Neoverse N2 with CLRBHB",
            Processor { isar2: 1 << 28, ..processor(0x410f_d493, 0x1201_1111_2011_1112, 0x221, 0x1021_2122) },
            MODERN,
            steps(SSBS | Kinds::CLEAR_HISTORY, 0),
        ),
        (
            "a core with ECBHB that the table does not know",
            processor(0x410f_d840, 0x1201_1111_2011_1112, 0x221, 0x1000_0000_1021_2122),
            Firmware::NONE,
            steps(SSBS, 0),
        ),
        (
            "a core with CSV2 of 3 that the table does not know",
            processor(0x410f_d8e0, 0x1301_1111_2011_1112, 0x221, 0x1021_2122),
            Firmware::NONE,
            steps(SSBS, 0),
        ),
        (
            "Ampere1",
            processor(0xc00f_ac30, 0x1201_1111_0011_1112, 0x20, 0x1021_2122),
            Firmware([NotNeeded, Unknown, Unknown]),
            steps(SSBS, 11),
        ),
    ]
}

fn open(plan: &Plan) -> Vec<Weakness> {
    plan.open().map(|(weakness, _)| weakness).collect()
}

#[test]
fn each_processor_gets_its_steps_and_stands_well_with_them() {
    for (name, processor, firmware, steps) in processors() {
        let plan = processor.plan(&firmware);
        assert_eq!(plan.steps, steps, "{name}");
        assert_eq!(open(&plan), [], "{name}");
        assert!(core_name(processor.midr).is_none_or(|known| name.starts_with(known)), "{name}");
    }
}

#[test]
fn states_are_those_that_the_registers_and_the_table_say() {
    let state = |name: &str, weakness| {
        let (_, processor, firmware, _) = processors().into_iter().find(|found| found.0 == name).expect("it is there");
        processor.plan(&firmware).state(weakness)
    };
    for weakness in Weakness::ALL {
        assert_eq!(state("Cortex-A53", weakness), State::NotAffected, "it executes in order");
    }
    assert_eq!(state("Cortex-A57", Weakness::SpectreV2), State::Held("SMCCC_ARCH_WORKAROUND_3 at exits"));
    assert_eq!(state("Cortex-A72", Weakness::SpectreV2), State::Held("SMCCC_ARCH_WORKAROUND_1 at exits"));
    assert_eq!(state("Cortex-A72", Weakness::BranchHistory), State::Held("a loop of branches at exits"));
    assert_eq!(state("Cortex-A75", Weakness::Meltdown), State::Held("EL2 has tables of its own"));
    assert_eq!(state("Cortex-A72", Weakness::Meltdown), State::NotAffected);
    assert_eq!(state("Cortex-A75", Weakness::SpecStoreBypass), State::Held("SMCCC_ARCH_WORKAROUND_2, for good"));
    for name in ["Neoverse N1", "Neoverse V1", "Neoverse N2"] {
        assert_eq!(state(name, Weakness::SpectreV2), State::NotAffected, "{name}");
        assert_eq!(state(name, Weakness::Meltdown), State::NotAffected, "{name}");
        assert_eq!(state(name, Weakness::BranchHistory), State::Held("a loop of branches at exits"), "{name}");
        assert_eq!(state(name, Weakness::SpecStoreBypass), State::Held("PSTATE.SSBS is clear at EL2"), "{name}");
    }
    assert_eq!(
        state("a core with CSV2 of 3 that the table does not know", Weakness::BranchHistory),
        State::NotAffected
    );
}

#[test]
fn firmware_that_knows_nothing_is_named_as_the_reason() {
    let plan = processor(0x410f_d083, 0x2222, 0, 0).plan(&Firmware::NONE);
    assert_eq!(open(&plan), [Weakness::SpectreV2, Weakness::SpecStoreBypass]);
    assert!(plan.open().all(|(_, why)| why.contains("firmware")));
    assert_eq!(plan.steps, Steps { kinds: Kinds::CLEAR_REGISTERS, branches: 8 }, "no call that there is not");
    let plan = processor(0x410f_d092, 0x2222, 0, 0).plan(&Firmware([Needed, NotNeeded, Unknown]));
    assert_eq!(open(&plan), [Weakness::BranchHistory]);
    let unknown = processor(0x000f_0510, 0x1201_1111_2011_1112, 0x21, 0).plan(&Firmware::NONE);
    assert_eq!(open(&unknown), [Weakness::BranchHistory]);
}

#[test]
fn firmware_is_called_only_where_it_has_answered() {
    // All answers, on all processors, with all combinations of the registers that matter.
    const ANSWERS: [Answer; 3] = [Unknown, Needed, NotNeeded];
    for (name, known, _, _) in processors() {
        for code in 0..27 {
            let [one, two, three] = [code % 3, code / 3 % 3, code / 9].map(|index| ANSWERS[index]);
            for bits in 0..64_u64 {
                let pfr0 = (bits & 3) << 56 | (bits >> 2 & 1) << 60;
                let found = Processor {
                    pfr0,
                    pfr1: (bits >> 3 & 1) << 4,
                    mmfr1: (bits >> 4 & 1) << 60,
                    isar2: (bits >> 5 & 1) << 28,
                    ..known
                };
                let plan = found.plan(&Firmware([one, two, three]));
                let kinds = plan.steps.kinds;
                assert!(!kinds.contains(Kinds::FIRMWARE_1) || one == Needed, "{name}");
                assert!(!kinds.contains(Kinds::FIRMWARE_2) || two == Needed, "{name}");
                assert!(!kinds.contains(Kinds::FIRMWARE_3) || three == Needed, "{name}");
                assert!(!kinds.contains(Kinds::FIRMWARE_1 | Kinds::FIRMWARE_3), "{name}: one call is enough");
                assert!(!kinds.contains(Kinds::NO_STORE_BYPASS) || found.pfr1 != 0, "{name}");
                assert!(!kinds.contains(Kinds::CLEAR_HISTORY) || found.isar2 != 0, "{name}");
                let ways =
                    [plan.steps.branches != 0, kinds.contains(Kinds::CLEAR_HISTORY), kinds.contains(Kinds::FIRMWARE_3)];
                assert!(ways.into_iter().filter(|way| *way).count() <= 1, "{name}: history is cleared once");
            }
        }
    }
}

#[test]
fn word_for_assembly_has_the_kinds_the_branches_and_the_function() {
    assert_eq!(Steps::default().word(), 0);
    let n1 = Steps { kinds: Kinds::CLEAR_REGISTERS | Kinds::NO_STORE_BYPASS, branches: 24 };
    assert_eq!(n1.word(), 0x1818);
    assert_eq!(Steps { kinds: Kinds::FIRMWARE_1, branches: 8 }.word(), 0x8000_8000_0000_0801);
    assert_eq!(Steps { kinds: Kinds::FIRMWARE_3, branches: 0 }.word(), 0x8000_3fff_0000_0002);
}

#[test]
fn guests_hear_what_holds_on_all_pcpus() {
    let told = |pcpus: &[(Processor, Firmware)], is_off: bool| {
        let mut plans = pcpus.iter().map(|(found, firmware)| found.plan(firmware));
        let first = plans.next().expect("there is one");
        let plan = plans.fold(first, |plan, other| plan.with_states_of(&other));
        let firmware = pcpus.iter().map(|pcpu| pcpu.1).reduce(Firmware::common).expect("there is one");
        firmware.for_guests(&if is_off { plan.off() } else { plan }).0
    };
    let find = |name: &str| {
        let (_, processor, firmware, _) = processors().into_iter().find(|found| found.0 == name).expect("it is there");
        (processor, firmware)
    };
    let [a53, a57, a72, n1] = ["Cortex-A53", "Cortex-A57", "Cortex-A72", "Neoverse N1"].map(find);
    let a75 = find("Cortex-A75");

    assert_eq!(told(&[a53], false), [NotNeeded; 3]);
    assert_eq!(told(&[a57], false), [Needed, NotNeeded, Needed]);
    // Its history is cleared by the hypervisor's loop, at the exit that the call makes.
    assert_eq!(told(&[a72], false), [Needed, NotNeeded, Needed]);
    // CSV2, and SSBS in the guest's own registers.
    assert_eq!(told(&[n1], false), [NotNeeded, Unknown, Needed]);
    // The switch stays on.
    assert_eq!(told(&[a75], false), [Needed, NotNeeded, Needed]);
    // A little core needs nothing, and the big one decides.
    let a53 = (a53.0, a57.1);
    assert_eq!(told(&[a53, a57], false), [Needed, NotNeeded, Needed]);
    assert_eq!(told(&[a57, a53], false), [Needed, NotNeeded, Needed]);

    // With the steps off, calls go to the firmware, where it has any, and nobody has turned the switch on.
    assert_eq!(told(&[a57], true), [Needed, NotNeeded, Needed]);
    assert_eq!(told(&[a72], true), [Needed, NotNeeded, Unknown]);
    assert_eq!(told(&[a75], true), [Needed, Unknown, Needed]);
    assert_eq!(told(&[(n1.0, Firmware::NONE)], true), [NotNeeded, Unknown, Unknown]);
}

#[test]
fn machine_stands_as_badly_as_its_worst_pcpu_and_each_keeps_its_steps() {
    let little = processor(0x410f_d034, 0x2222, 0, 0).plan(&Firmware::NONE);
    let big = processor(0x410f_d083, 0x2222, 0, 0).plan(&Firmware::NONE);
    for (one, other) in [(little, big), (big, little)] {
        let both = one.with_states_of(&other);
        assert_eq!(both.steps, one.steps);
        assert_eq!(open(&both), open(&big));
        assert!(matches!(both.state(Weakness::BranchHistory), State::Held(_)));
    }
    assert!(little.verdict().contains("are held"), "{}", little.verdict());
    assert!(little.with_states_of(&big).verdict().contains("are not held"));
}

#[test]
fn threads_are_found_by_their_affinities_not_by_their_flag_alone() {
    const MT: u64 = 1 << 24;
    let one_each = [0x0000, 0x0100, 0x0200];
    assert!(!shares_core(MT | 0x100, one_each), "as a Neoverse N1");
    assert!(!shares_core(0, [0, 1, 2, 3]), "four cores of a cluster, without MT");
    assert!(shares_core(MT | 0x101, [0x0100, 0x0101, 0x0200]));
    assert!(!shares_core(MT | 1 << 32, [0, 1 << 32]), "Aff3 differs");
    let mut found = processor(0x410f_d083, 0x2222, 0, 0);
    let firmware = Firmware([Needed, NotNeeded, Needed]);
    assert!(!found.plan(&firmware).siblings_must_not_be_strangers());
    found.shares_core = true;
    assert!(found.plan(&firmware).siblings_must_not_be_strangers(), "branch targets");
}

#[test]
fn steps_that_are_off_leave_all_open_and_do_nothing() {
    for (name, processor, firmware, _) in processors() {
        let on = processor.plan(&firmware);
        let off = on.off();
        assert_eq!(off.steps, Steps::default(), "{name}");
        for weakness in Weakness::ALL {
            let is_affected = on.state(weakness) != State::NotAffected;
            assert_eq!(matches!(off.state(weakness), State::Vulnerable("mitigations=off")), is_affected, "{name}");
        }
    }
}

#[test]
fn weakness_that_is_ignored_takes_its_own_steps_away() {
    for (name, processor, firmware, _) in processors() {
        let on = processor.plan(&firmware);
        for weakness in Weakness::ALL {
            let plan = processor.plan_but(&firmware, Ignored::by(|other| other == weakness));
            let has_step = weakness != Weakness::Meltdown && on.state(weakness) != State::NotAffected;
            let is_off = plan.state(weakness) == State::Vulnerable("turned off");
            assert_eq!(is_off, has_step, "{name}: {weakness:?}");
            let others = Weakness::ALL.into_iter().filter(|&other| other != weakness);
            for other in others {
                let (without, with) = (plan.state(other), on.state(other));
                assert_eq!(matches!(without, State::Vulnerable(_)), matches!(with, State::Vulnerable(_)), "{name}");
            }
        }
        let none = processor.plan_but(&firmware, Ignored::by(|_| true));
        assert_eq!(none.steps, Steps { kinds: Kinds::CLEAR_REGISTERS, branches: 0 }, "{name}");
    }
}

#[test]
fn answers_of_firmware_are_those_of_the_convention() {
    assert_eq!([0, 1, -1, -2, 2, -3].map(Answer::of), [Needed, NotNeeded, Unknown, NotNeeded, Unknown, Unknown]);
    for answer in [Unknown, Needed, NotNeeded] {
        assert_eq!(Answer::of(answer.code()), answer);
    }
}
