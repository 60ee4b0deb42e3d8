//! The steps against speculative execution, in the released binary: no test on an emulator can see what they hold, but
//! where they are can be seen.

use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind, Register};
use system_tests::stores::Text;
use system_tests::{Machine, assets};

/// VMRUN and VMSAVE; VMRESUME, and CLI and XOR behind it.
const SWITCHES: [(&str, &[u8]); 2] =
    [("SVM", &[0x0f, 0x01, 0xd8, 0x0f, 0x01, 0xdb]), ("VT-x", &[0x0f, 0x01, 0xc3, 0xfa, 0x31, 0xc0])];
/// VERW of the stack's top.
const VERW: [u8; 4] = [0x0f, 0x00, 0x2c, 0x24];
/// Bytes before an entry in which the steps are.
const BEFORE: u64 = 0xc0;

fn hypervisor() -> Text {
    Text::of(&assets().join("hypervisor"))
}

/// The instructions behind an exit, to the first return.
fn behind(text: &Text, entry: u64) -> Vec<Instruction> {
    let mut found = Vec::new();
    let mut at = entry;
    while let Some(instruction) = text.at(at) {
        found.push(instruction);
        if instruction.flow_control() == FlowControl::Return {
            return found;
        }
        at = instruction.next_ip();
    }
    panic!("no return behind {entry:#x}");
}

/// The world switches with the steps, and those without, of a back end: where each enters.
fn switches(text: &Text, pattern: &[u8]) -> (Vec<u64>, Vec<u64>) {
    let places = text.places_of(pattern);
    places
        .into_iter()
        .partition(|place| text.places_of(&VERW).iter().any(|verw| (place - BEFORE..*place).contains(verw)))
}

#[test]
fn guests_run_between_the_steps_and_nothing_is_predicted_before_the_last_one() {
    let text = hypervisor();
    for (name, pattern) in SWITCHES {
        let (with_steps, plain) = switches(&text, pattern);
        assert_eq!((with_steps.len(), plain.len()), (1, 1), "{name}: one switch with the steps, and one without");
        let instructions = behind(&text, with_steps[0]);

        let fence = instructions.iter().position(|one| one.mnemonic() == Mnemonic::Lfence);
        let fence = fence.unwrap_or_else(|| panic!("{name}: no LFENCE before the return"));
        let (until, after) = instructions.split_at(fence);
        for one in until {
            let goes = one.flow_control();
            assert!(
                !matches!(goes, FlowControl::Return | FlowControl::IndirectBranch | FlowControl::IndirectCall),
                "{name}: {:?} before the LFENCE",
                one.code()
            );
        }
        assert!(after.len() < 12, "{name}: the return comes soon: {} instructions", after.len());
        let count = |mnemonic: Mnemonic| until.iter().filter(|one| one.mnemonic() == mnemonic).count();
        assert_eq!(count(Mnemonic::Wrmsr), 2, "{name}: IBPB and IBRS");
        assert_eq!(count(Mnemonic::Call), 3, "{name}: one call, and two of the loop that fills the return stack");

        // Each general register is cleared, but the stack's.
        for number in 0..16 {
            let register = Register::EAX + number;
            let clears = |one: &Instruction| {
                one.mnemonic() == Mnemonic::Xor
                    && one.op_kinds().all(|kind| kind == OpKind::Register)
                    && one.op0_register() == register
                    && one.op1_register() == register
            };
            assert!(register == Register::ESP || until.iter().any(clears), "{name}: {register:?} is not cleared");
        }
        assert!(instructions.iter().all(|one| one.code() != Code::INVALID), "{name}");
    }
}

#[test]
fn switch_without_steps_has_none() {
    let text = hypervisor();
    for (name, pattern) in SWITCHES {
        let (_, plain) = switches(&text, pattern);
        let instructions = behind(&text, plain[0]);
        for mnemonic in [Mnemonic::Lfence, Mnemonic::Wrmsr, Mnemonic::Call] {
            assert!(instructions.iter().all(|one| one.mnemonic() != mnemonic), "{name}: {mnemonic:?}");
        }
    }
}

#[test]
fn emulated_processor_gets_no_steps_unless_they_are_asked_for() {
    let with = |option: &str| Machine::X86_64.bare_hypervisor(&["-append", option]).stdout;
    let plain = with("log=info");
    assert!(plain.contains("speculation: the processor is emulated, nothing is done"), "{plain}");
    let asked = with("mitigations=auto");
    assert!(asked.contains("speculation: spectre_v2: "), "{asked}");
    let off = with("mitigations=off");
    assert!(off.contains("VULNERABLE, mitigations=off"), "{off}");
}
