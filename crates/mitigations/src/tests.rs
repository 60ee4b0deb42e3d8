//! Processors by what they report, and what is done on each.

extern crate std;
use std::string::String;
use std::vec::Vec;

use crate::{Ignored, LastVm, Plan, Processor, Reports, State, Steps, Vendor, Weakness};

const SPEC_CTRL_AND_IBPB: u32 = 1 << 26;
const ARCH_CAPABILITIES: u32 = 1 << 29;
const L1D_FLUSH: u32 = 1 << 28;
const MD_CLEAR: u32 = 1 << 10;
const BHI_CTRL: u32 = 1 << 4;
const TSX: u32 = 1 << 11;
const OLD_INTEL: u32 = SPEC_CTRL_AND_IBPB | L1D_FLUSH | MD_CLEAR;

fn intel(model: u32, stepping: u32) -> Processor {
    Processor { leaf_7_edx: OLD_INTEL, ..Processor::new(Vendor::Intel, 6, model, stepping) }
}

/// IBPB, and on all but the first Zen IBRS.
fn amd(family: u32, model: u32, extended_8_ebx: u32, extended_21_eax: u32) -> Processor {
    Processor { extended_8_ebx, extended_21_eax, ..Processor::new(Vendor::Amd, family, model, 1) }
}

/// SVM gives guests a SPEC_CTRL of their own: since Zen 3.
fn virtual_controls(family: u32, model: u32, extended_8_ebx: u32, extended_21_eax: u32) -> Processor {
    let controls = extended_8_ebx | 1 << 15 | 1 << 24 | 1 << 28;
    Processor { switches_spec_ctrl: true, ..amd(family, model, controls, extended_21_eax) }
}

/// Twelve processors with the microcode of 2025, and the steps for each.
fn processors() -> [(&'static str, Processor, Steps); 12] {
    const EVERY: Steps = Steps::CLEAR_REGISTERS.union(Steps::GUEST_CONTROLS);
    const SWITCHED: Steps = EVERY.union(Steps::SWITCH_SPEC_CTRL);
    let old =
        SWITCHED | Steps::IBRS_AT_EXIT | Steps::FILL_RETURN_STACK | Steps::IBPB_BETWEEN_VMS | Steps::CLEAR_HISTORY;
    let enhanced = SWITCHED | Steps::IBRS_ALWAYS | Steps::IBPB_BETWEEN_VMS;
    let forgets = EVERY | Steps::IBPB_AT_EXIT;
    let capable = |model, stepping, capabilities, leaf_7_2_edx| Processor {
        leaf_7_edx: OLD_INTEL | ARCH_CAPABILITIES,
        leaf_7_2_edx,
        capabilities,
        ..intel(model, stepping)
    };
    [
        ("Haswell-EP", intel(0x3f, 2), old | Steps::FLUSH_L1D | Steps::CLEAR_BUFFERS | Steps::SMALL_CODE),
        (
            "Skylake-SP",
            Processor { leaf_7_ebx: TSX, ..intel(0x55, 4) },
            old | Steps::FLUSH_L1D | Steps::CLEAR_BUFFERS | Steps::SMALL_CODE,
        ),
        // RDCL_NO, IBRS_ALL, MDS_NO, TSX_CTRL, FB_CLEAR, GDS_CTRL.
        (
            "Cascade Lake",
            capable(0x55, 7, 0x2a | 1 << 6 | 1 << 7 | 1 << 17 | 1 << 25 | 1, 0),
            enhanced | Steps::ONE_CALL | Steps::CLEAR_HISTORY | Steps::CLEAR_BUFFERS | Steps::IBPB_AT_EXIT,
        ),
        // The same, TAA_NO, and BHI_CTRL.
        (
            "Ice Lake-SP",
            capable(0x6a, 6, 0x2b | 1 << 6 | 1 << 8 | 1 << 17 | 1 << 25, BHI_CTRL),
            enhanced | Steps::ONE_CALL | Steps::HISTORY_DISABLED | Steps::CLEAR_BUFFERS,
        ),
        // All of that that has a bit: also MMIO, PBRSB_NO, GDS_NO, RFDS_NO, ITS_NO.
        (
            "Sapphire Rapids",
            capable(0x8f, 8, 0x2b | 1 << 6 | 1 << 8 | 7 << 13 | 1 << 24 | 1 << 26 | 1 << 27 | 1 << 62, BHI_CTRL),
            enhanced | Steps::HISTORY_DISABLED,
        ),
        (
            "Alder Lake",
            capable(0x97, 2, 0x2b | 1 << 6 | 1 << 8 | 7 << 13 | 1 << 24 | 1 << 26 | 1 << 28 | 1 << 62, BHI_CTRL),
            enhanced | Steps::HISTORY_DISABLED | Steps::CLEAR_BUFFERS,
        ),
        ("Goldmont", intel(0x5c, 9), old),
        ("Zen 1 (Naples)", amd(0x17, 0x01, 1 << 12, 0), forgets | Steps::SERIALIZING_LFENCE),
        (
            "Zen 2 (Rome)",
            amd(0x17, 0x31, 1 << 12 | 1 << 14, 0),
            forgets | Steps::SWITCH_SPEC_CTRL | Steps::SERIALIZING_LFENCE,
        ),
        (
            "Zen 3 (Milan)",
            virtual_controls(0x19, 0x01, 1 << 12 | 1 << 14, 1 << 2 | 1 << 5 | 1 << 28),
            forgets | Steps::CLEAR_BUFFERS,
        ),
        (
            "Zen 4 (Genoa)",
            virtual_controls(0x19, 0x11, 1 << 12 | 1 << 14, 1 << 2 | 1 << 5 | 1 << 8 | 1 << 28),
            forgets | Steps::CLEAR_BUFFERS,
        ),
        (
            "Zen 5 (Turin)",
            virtual_controls(0x1a, 0x02, 1 << 12 | 1 << 14, 1 << 2 | 1 << 8 | 1 << 28 | 1 << 29),
            EVERY | Steps::AUTOMATIC_IBRS | Steps::IBPB_BETWEEN_VMS,
        ),
    ]
}

fn open(plan: &Plan) -> Vec<Weakness> {
    plan.open().map(|(weakness, _)| weakness).collect()
}

#[test]
fn each_processor_gets_its_steps() {
    for (name, processor, steps) in processors() {
        assert_eq!(Plan::of(&processor).steps, steps, "{name}");
    }
}

#[test]
fn start_of_a_pcpu_writes_what_the_steps_say_and_nothing_else() {
    const SPEC_CTRL: u32 = 0x48;
    const EFER: u32 = 0xc000_0080;
    const DE_CFG: u32 = 0xc001_1029;
    for (name, processor, _) in processors() {
        let wanted: &[(u32, u64)] = match name {
            "Cascade Lake" => &[(SPEC_CTRL, 1)],
            "Ice Lake-SP" | "Sapphire Rapids" | "Alder Lake" => &[(SPEC_CTRL, 1 | 1 << 10)],
            "Zen 1 (Naples)" | "Zen 2 (Rome)" => &[(DE_CFG, 1 << 1)],
            "Zen 5 (Turin)" => &[(EFER, 1 << 21)],
            _ => &[],
        };
        let plan = Plan::of(&processor);
        assert_eq!(plan.steps.at_start().collect::<Vec<_>>(), wanted, "{name}");
        assert_eq!(plan.off().steps.at_start().count(), 0, "{name}");
    }
}

#[test]
fn predictions_go_when_another_vm_comes_also_with_the_tables_of_one_that_has_ended() {
    let last = LastVm::new();
    assert!(last.is_another(0x5000, 2), "the first");
    assert!(!last.is_another(0x5000, 2), "it comes back");
    assert!(last.is_another(0x9000, 2), "another");
    assert!(last.is_another(0x5000, 2), "the first comes back");
    assert!(last.is_another(0x5000, 3), "a new one, perhaps with the same tables");
    assert!(!last.is_another(0x5000, 3));
}

#[test]
fn what_stays_open_is_what_no_step_can_hold() {
    for (name, processor, _) in processors() {
        let found = open(&Plan::of(&processor));
        let wanted: &[Weakness] = match name {
            // The registers that gathers leave: its microcode says nothing of them here.
            "Skylake-SP" => &[Weakness::GatherDataSampling],
            "Goldmont" => &[Weakness::RegFileDataSampling],
            _ => &[],
        };
        assert_eq!(found, wanted, "{name}");
    }
}

#[test]
fn indirect_branches_are_guarded_at_exits_where_a_guest_reaches_the_hypervisors_and_elsewhere_between_vms() {
    const IBRS_ALL: u64 = 1 << 1;
    const ITS_NO: u64 = 1 << 62;
    let with = |model, stepping, capabilities| {
        let leaf_7_edx = OLD_INTEL | ARCH_CAPABILITIES;
        Plan::of(&Processor { leaf_7_edx, capabilities, ..intel(model, stepping) })
    };
    let held_at_exits = |plan: &Plan| match plan.state(Weakness::IndirectTargetSelection) {
        State::Held(by) => Some(by.starts_with("IBPB at exits") && plan.steps.contains(Steps::IBPB_AT_EXIT)),
        State::NotAffected => None,
        State::Vulnerable(why) => panic!("{why}"),
    };
    // Intel's list: Cascade Lake, Cooper Lake, Whiskey Lake, Coffee Lake, Comet Lake.
    for (model, stepping) in [(0x55, 6), (0x55, 11), (0x8e, 12), (0x9e, 13), (0xa5, 2), (0xa6, 0)] {
        assert_eq!(held_at_exits(&with(model, stepping, IBRS_ALL)), Some(true), "{model:#x} {stepping}");
        assert_eq!(held_at_exits(&with(model, stepping, IBRS_ALL | ITS_NO)), None, "{model:#x} with ITS_NO");
    }
    // Ice Lake, Tiger Lake, Rocket Lake.
    for model in [0x6a, 0x6c, 0x7e, 0x8c, 0x8d, 0xa7] {
        let plan = with(model, 1, IBRS_ALL);
        assert_eq!(held_at_exits(&plan), Some(false), "{model:#x}");
        assert!(plan.steps.contains(Steps::IBPB_BETWEEN_VMS), "{model:#x}");
    }
    // Earlier steppings have no enhanced IBRS, and IBRS at exits holds them.
    for (model, stepping) in [(0x55, 4), (0x8e, 11), (0x9e, 12)] {
        assert_eq!(held_at_exits(&with(model, stepping, 0)), None, "{model:#x} {stepping}");
    }
}

#[test]
fn predictions_of_a_guest_are_gone_before_its_vmm_runs_where_that_follows_them() {
    for (name, processor, _) in processors() {
        let plan = Plan::of(&processor);
        match (name, plan.state(Weakness::Vmscape)) {
            ("Ice Lake-SP" | "Goldmont", state) => assert_eq!(state, State::NotAffected, "{name}"),
            (_, State::Held(_)) => {
                assert!(plan.steps.intersects(Steps::IBPB_AT_EXIT | Steps::IBPB_BETWEEN_VMS), "{name}");
            }
            (_, state) => panic!("{name}: {state:?}"),
        }
    }
}

#[test]
fn microcode_from_before_2018_holds_nothing_and_is_named_as_the_reason() {
    for (old, weaknesses) in [
        (Processor::new(Vendor::Intel, 6, 0x55, 4), 7),
        (Processor::new(Vendor::Amd, 0x17, 1, 2), 4),
        (Processor::new(Vendor::Amd, 0x19, 1, 1), 4),
    ] {
        let plan = Plan::of(&old);
        let by_microcode: Vec<_> = plan.open().filter(|(_, why)| why.contains("microcode")).collect();
        assert_eq!(by_microcode.len(), weaknesses, "{by_microcode:?}");
        let writes = Steps::IBRS_ALWAYS | Steps::IBRS_AT_EXIT | Steps::IBPB_AT_EXIT | Steps::IBPB_BETWEEN_VMS;
        let writes = writes | Steps::FLUSH_L1D | Steps::AUTOMATIC_IBRS | Steps::HISTORY_DISABLED;
        assert!(!plan.steps.intersects(writes), "no register is written that does not exist");
    }
}

#[test]
fn no_step_writes_a_register_that_the_processor_does_not_report() {
    // Random reports. What #GP would end the host for must have its bit.
    let mut state = 22_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 20
    };
    for _ in 0..200_000 {
        let vendor = if random() & 1 == 0 { Vendor::Intel } else { Vendor::Amd };
        let family = if vendor == Vendor::Intel {
            6
        } else {
            [0x15, 0x17, 0x19, 0x1a][usize::from(random().to_le_bytes()[0] & 3)]
        };
        let mut word = || (random() & 0xffff_ffff) as u32;
        let processor = Processor {
            leaf_7_ebx: word(),
            leaf_7_edx: word(),
            leaf_7_2_edx: word(),
            extended_8_ebx: word(),
            extended_21_eax: word(),
            extended_21_ecx: word(),
            ..Processor::new(vendor, family, word() & 0xff, word() & 0xf)
        };
        let processor = Processor { capabilities: u64::from(word()) << 32 | u64::from(word()), ..processor };
        let steps = Plan::of(&processor).steps;
        let has_control = match vendor {
            Vendor::Intel => processor.leaf_7_edx & SPEC_CTRL_AND_IBPB != 0,
            Vendor::Amd => processor.extended_8_ebx & 1 << 14 != 0,
        };
        let has_ibpb = match vendor {
            Vendor::Intel => has_control,
            Vendor::Amd => processor.extended_8_ebx & 1 << 12 != 0,
        };
        let control = Steps::IBRS_ALWAYS | Steps::IBRS_AT_EXIT | Steps::HISTORY_DISABLED;
        assert!(has_control || !steps.intersects(control), "{processor:x?} {steps:?}");
        assert!(has_ibpb || !steps.intersects(Steps::IBPB_AT_EXIT | Steps::IBPB_BETWEEN_VMS), "{processor:x?}");
        let flushes = vendor == Vendor::Intel && processor.leaf_7_edx & L1D_FLUSH != 0;
        assert!(flushes || !steps.contains(Steps::FLUSH_L1D), "{processor:x?}");
        let automatic = vendor == Vendor::Amd && processor.extended_21_eax & 1 << 8 != 0;
        assert!(automatic || !steps.contains(Steps::AUTOMATIC_IBRS), "{processor:x?}");
        assert!(vendor == Vendor::Amd || !steps.contains(Steps::SERIALIZING_LFENCE), "{processor:x?}");
        let reports = processor.reports();
        assert!(reports.spec_ctrl() != 0 || !steps.contains(Steps::SWITCH_SPEC_CTRL), "{processor:x?}");
        assert!(!steps.contains(Steps::IBRS_AT_EXIT) || steps.contains(Steps::SWITCH_SPEC_CTRL), "{processor:x?}");
        let told = reports.for_guests(&Plan::of(&processor));
        assert_eq!(told.spec_ctrl() & !reports.spec_ctrl(), 0, "a guest is told of no bit that does not exist");
        assert_eq!(told.pred_cmd() & !reports.pred_cmd(), 0, "{processor:x?}");
        assert_eq!(told.arch_capabilities().is_some(), reports.arch_capabilities().is_some(), "{processor:x?}");
    }
}

#[test]
fn guests_have_the_controls_of_the_processor_and_none_where_mitigations_are_off() {
    for (name, processor, steps) in processors() {
        let plan = Plan::of(&processor);
        let (reports, told) = (processor.reports(), processor.reports().for_guests(&plan));
        assert_eq!(told.spec_ctrl(), reports.spec_ctrl(), "{name}");
        assert_eq!(told.pred_cmd(), reports.pred_cmd(), "{name}");
        assert_eq!(told.spec_ctrl() == 0, name == "Zen 1 (Naples)", "{name}: {:#x}", told.spec_ctrl());
        assert_ne!(told.pred_cmd(), 0, "{name}");

        let off = reports.for_guests(&plan.off());
        assert_eq!((off.spec_ctrl(), off.pred_cmd()), (0, 0), "{name}");
        let promised = off.arch_capabilities().unwrap_or(0);
        assert_eq!(promised & 1 << 1, 0, "{name}: no enhanced IBRS without SPEC_CTRL");
        assert!(steps.contains(Steps::GUEST_CONTROLS), "{name}");
    }
}

#[test]
fn guests_are_told_what_the_processor_does_not_have_and_what_the_host_holds_for_them() {
    const SKIP_L1D_FLUSH: u64 = 1 << 3;
    const PSCHANGE_MC_NO: u64 = 1 << 6;
    const TSX_CTRL: u64 = 1 << 7;
    const GDS_CTRL: u64 = 1 << 25;
    for (name, processor, _) in processors() {
        let (reports, plan) = (processor.reports(), Plan::of(&processor));
        let told = reports.for_guests(&plan);
        if let Some(capabilities) = told.arch_capabilities() {
            assert_ne!(capabilities & PSCHANGE_MC_NO, 0, "{name}: small pages for code hold it, or it is not affected");
            assert_ne!(capabilities & SKIP_L1D_FLUSH, 0, "{name}");
            assert_eq!(capabilities & (TSX_CTRL | GDS_CTRL), 0, "{name}: controls that only the host has");
            let host = reports.capabilities & !(TSX_CTRL | GDS_CTRL);
            assert_eq!(capabilities & host, host, "{name}");
        }
        if name.starts_with("Zen") {
            assert_ne!(told.extended_21_eax & 1 << 2, 0, "{name}: LFENCE waits, the host has seen to it");
            assert_eq!(told.extended_21_eax & 1 << 29, reports.extended_21_eax & 1 << 29, "{name}: SRSO_NO");
        }
    }
}

#[test]
fn each_report_has_its_bits_of_the_registers() {
    let of = |leaf_7_edx, leaf_7_2_edx, extended_8_ebx| Reports {
        leaf_7_edx,
        leaf_7_2_edx,
        extended_8_ebx,
        ..Reports::default()
    };
    for (reports, spec_ctrl, pred_cmd) in [
        (of(0, 0, 0), 0, 0),
        (of(1 << 26, 0, 0), 1 << 0, 1),
        (of(1 << 27, 0, 0), 1 << 1, 0),
        (of(1 << 31, 0, 0), 1 << 2, 0),
        (of(0, 1 << 0, 0), 1 << 7, 0),
        (of(0, 1 << 1, 0), 3 << 3, 0),
        (of(0, 1 << 2, 0), 3 << 5, 0),
        (of(0, 1 << 3, 0), 1 << 8, 0),
        (of(0, 1 << 4, 0), 1 << 10, 0),
        (of(0, 1 << 5, 0), 0, 0),
        (of(0, 0, 1 << 12), 0, 1),
        (of(0, 0, 1 << 14), 1 << 0, 0),
        (of(0, 0, 1 << 15), 1 << 1, 0),
        (of(0, 0, 1 << 24), 1 << 2, 0),
        (of(0, 0, 1 << 28), 1 << 7, 0),
        (Reports { extended_21_eax: 1 << 27, ..Reports::default() }, 0, 1 << 7),
    ] {
        assert_eq!((reports.spec_ctrl(), reports.pred_cmd()), (spec_ctrl, pred_cmd), "{reports:x?}");
    }
    assert_eq!(Reports { capabilities: 5, ..Reports::default() }.arch_capabilities(), None);
    assert_eq!(
        Reports { capabilities: 7, ..of(1 << 29, 0, 0) }.arch_capabilities(),
        Some(5),
        "no IBRS, so not all of it"
    );
    assert_eq!(Reports { capabilities: 7, ..of(1 << 29 | 1 << 26, 0, 0) }.arch_capabilities(), Some(7));
}

#[test]
fn large_pages_of_code_are_split_where_two_page_sizes_stop_the_machine() {
    const PSCHANGE_MC_NO: u64 = 1 << 6;
    let plan = |model, capabilities| {
        let has = if capabilities == 0 { 0 } else { ARCH_CAPABILITIES };
        let found = intel(model, 1);
        Plan::of(&Processor { leaf_7_edx: found.leaf_7_edx | has, capabilities, ..found })
    };
    // Nehalem to Cascade Lake, Tremont but for one, and cores that nobody knows.
    for model in [0x1a, 0x2a, 0x3a, 0x3c, 0x3f, 0x4f, 0x55, 0x5e, 0x8e, 0x9e, 0x96, 0x9c, 0xff] {
        let affected = plan(model, 1);
        assert!(affected.steps.contains(Steps::SMALL_CODE), "{model:#x}");
        assert!(matches!(affected.state(Weakness::ItlbMultihit), State::Held(_)), "{model:#x}");
        let newer = plan(model, 1 | PSCHANGE_MC_NO);
        assert!(!newer.steps.contains(Steps::SMALL_CODE), "{model:#x}");
        assert_eq!(newer.state(Weakness::ItlbMultihit), State::NotAffected, "{model:#x}");
    }
    for model in [0x37, 0x4c, 0x5c, 0x7a, 0x86, 0x57, 0x85] {
        assert!(!plan(model, 0).steps.contains(Steps::SMALL_CODE), "{model:#x}");
    }
    for family in [0x15, 0x17, 0x19, 0x1a] {
        assert!(!Plan::of(&amd(family, 1, 0, 0)).steps.contains(Steps::SMALL_CODE), "AMD's family {family:#x}");
    }
}

#[test]
fn mitigations_that_are_off_leave_all_open_and_do_nothing() {
    for (name, processor, _) in processors() {
        let on = Plan::of(&processor);
        let off = on.off();
        assert_eq!(off.steps, Steps::empty(), "{name}");
        for weakness in Weakness::ALL {
            let is_affected = on.state(weakness) != State::NotAffected;
            assert_eq!(matches!(off.state(weakness), State::Vulnerable("mitigations=off")), is_affected, "{name}");
        }
    }
}

#[test]
fn weakness_that_is_ignored_takes_its_own_steps_away_and_leaves_those_that_others_need() {
    for (name, processor, _) in processors() {
        let all = Plan::of(&processor);
        let ignored = |weakness| Plan::of_but(&processor, Ignored::by(|other| other == weakness));
        for weakness in Weakness::ALL {
            let plan = ignored(weakness);
            for other in Weakness::ALL {
                let is_meant = other == weakness && all.state(other) != State::NotAffected;
                match plan.state(other) {
                    State::Vulnerable("turned off") => assert!(is_meant, "{name}: {other:?} without {weakness:?}"),
                    // Where automatic IBRS takes the place of IBPB at exits, it says so.
                    State::Held(_) => assert!(matches!(all.state(other), State::Held(_)), "{name}: {other:?}"),
                    state => assert_eq!(state, all.state(other), "{name}: {other:?} without {weakness:?}"),
                }
            }
        }
        let none = Plan::of_but(&processor, Ignored::by(|_| true));
        let of_nobody = Steps::CLEAR_REGISTERS | Steps::GUEST_CONTROLS | Steps::SWITCH_SPEC_CTRL;
        assert_eq!(none.steps.difference(of_nobody | Steps::SERIALIZING_LFENCE), Steps::empty(), "{name}");
        assert!(none.open().all(|(_, why)| why == "turned off"), "{name}");
    }
    let steps_without = |at: usize, names: &[&str]| {
        let (_, processor, steps) = processors()[at];
        let plan = Plan::of_but(&processor, Ignored::by(|weakness| names.contains(&weakness.name())));
        (steps.difference(plan.steps), plan.steps.difference(steps))
    };
    let nothing = Steps::empty();
    assert_eq!(steps_without(1, &["spectre_v2"]), (nothing, nothing), "Skylake: retbleed needs the same");
    let (gone, new) = steps_without(1, &["spectre_v2", "retbleed", "vmscape"]);
    assert_eq!(gone, Steps::IBRS_AT_EXIT | Steps::FILL_RETURN_STACK | Steps::IBPB_BETWEEN_VMS, "Skylake");
    assert_eq!(new, nothing);
    assert_eq!(steps_without(2, &["indirect_target_selection"]), (Steps::IBPB_AT_EXIT, nothing), "Cascade Lake");
    let (gone, new) = steps_without(10, &["spec_rstack_overflow"]);
    assert_eq!(gone, Steps::IBPB_AT_EXIT, "Zen 4");
    assert_eq!(new, Steps::AUTOMATIC_IBRS | Steps::IBPB_BETWEEN_VMS, "Zen 4");
}

#[test]
fn siblings_are_told_where_threads_share_a_core() {
    let (_, skylake, _) = processors()[1];
    assert!(!Plan::of(&skylake).siblings_must_not_be_strangers(), "one thread");
    let plan = Plan::of(&Processor { threads_per_core: 2, ..skylake });
    assert!(plan.siblings_must_not_be_strangers());
    // Without what is open on this processor, whatever its threads do.
    let held = Plan {
        states: plan
            .states
            .map(|state| if matches!(state, State::Vulnerable(_)) { State::Held("a step") } else { state }),
        ..plan
    };
    assert!(held.verdict().starts_with("two threads of a core may run different VMs"), "{}", held.verdict());
    let apart = held.with_vms_apart(true);
    assert!(apart.verdict().starts_with("the threads of a core run one VM at a time"), "{}", apart.verdict());
    assert_eq!(plan.with_vms_apart(true).verdict(), plan.verdict(), "what is open stays open");
}

#[test]
fn processor_is_read_from_its_leaves() {
    let milan = |leaf: u32, _: u32| match leaf {
        0 => [0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
        1 => [0x00a0_0f11, 0, 0, 0],
        0xb => [0, 2, 0, 0],
        0x8000_0008 => [0, 1 << 12, 0, 0],
        0x8000_0021 => [4, 0, 6, 0],
        _ => [0; 4],
    };
    let found = Processor::read(milan, |_| panic!("AMD's have no such register")).expect("it is AMD's");
    assert_eq!((found.vendor, found.family, found.model, found.stepping), (Vendor::Amd, 0x19, 0x01, 1));
    assert_eq!((found.extended_8_ebx, found.extended_21_eax, found.extended_21_ecx), (1 << 12, 4, 6));
    assert_eq!(found.threads_per_core, 2);

    let skylake = |leaf: u32, subleaf: u32| match (leaf, subleaf) {
        (0, _) => [0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69],
        (1, _) => [0x0005_0654, 0, 0, 0],
        (7, 0) => [2, 0x800, 0, 0x2400_0000],
        (7, 2) => [0, 0, 0, 0x10],
        _ => [0; 4],
    };
    let found = Processor::read(skylake, u64::from).expect("it is Intel's");
    assert_eq!((found.vendor, found.family, found.model, found.stepping), (Vendor::Intel, 6, 0x55, 4));
    assert_eq!((found.capabilities, found.leaf_7_2_edx, found.threads_per_core), (0x10a, 0x10, 1));
    assert_eq!(Processor::read(|_, _| [0; 4], |_| 0), None, "another vendor");
}

#[test]
fn names_are_those_of_linux_and_differ() {
    let names: Vec<String> = Weakness::ALL.iter().map(|weakness| weakness.name().into()).collect();
    let mut sorted = names.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), names.len());
    for (at, weakness) in Weakness::ALL.into_iter().enumerate() {
        assert_eq!(weakness as usize, at, "its place in the list");
    }
}
