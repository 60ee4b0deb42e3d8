//! The steps against speculative execution, in the released binary: no test on an emulator can see what they hold, but
//! where they are can be seen.

use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind, Register};
use mitigations::Steps;
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

/// How a world switch begins: it saves RBP, RBX and R12 to R15.
const SAVES: [u8; 10] = [0x55, 0x53, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57];

/// The instructions of a world switch before its entry.
fn before(text: &Text, entry: u64) -> Vec<Instruction> {
    let start = text.places_of(&SAVES).into_iter().filter(|place| *place < entry).max().expect("it has a beginning");
    assert!(entry - start < 2 * BEFORE, "another function begins at {start:#x}");
    let mut found = Vec::new();
    let mut at = start;
    while at < entry {
        let instruction = text.at(at).expect("code");
        at = instruction.next_ip();
        found.push(instruction);
    }
    found
}

/// What WRMSR writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// Its lower half.
    Constant(u32),
    /// What the pCPU's block has, which GS leads to.
    OfGuest,
    /// What a static has.
    OfHost,
}

/// The MSRs that these instructions write, if all jumps over them are not taken, and each value.
fn written(instructions: &[Instruction]) -> Vec<(u32, Value)> {
    let (mut eax, mut ecx, mut found) = (None, None, Vec::new());
    for one in instructions {
        let value = match (one.mnemonic(), one.op1_kind()) {
            (Mnemonic::Wrmsr, _) => {
                found.push((ecx.expect("a register was named"), eax.expect("a value was named")));
                continue;
            }
            (Mnemonic::Mov, OpKind::Immediate32) => Value::Constant(one.immediate32()),
            (Mnemonic::Mov, OpKind::Memory) if one.segment_prefix() == Register::GS => Value::OfGuest,
            (Mnemonic::Mov, OpKind::Memory) if one.is_ip_rel_memory_operand() => Value::OfHost,
            (Mnemonic::Xor, OpKind::Register) if one.op0_register() == one.op1_register() => Value::Constant(0),
            _ => continue,
        };
        match (one.op0_register(), value) {
            (Register::EAX | Register::RAX, value) => eax = Some(value),
            (Register::ECX, Value::Constant(number)) => ecx = Some(number),
            _ => {}
        }
    }
    found
}

const SPEC_CTRL: u32 = 0x48;
const PRED_CMD: u32 = 0x49;
const FLUSH_CMD: u32 = 0x10b;

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
        let ibpb = (PRED_CMD, Value::Constant(1));
        assert_eq!(written(until), [ibpb, (SPEC_CTRL, Value::OfHost)], "{name}: IBPB, then the host's SPEC_CTRL");
        assert_eq!(count(Mnemonic::Rdmsr), 1, "{name}: the guest's SPEC_CTRL is read");
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
fn caches_and_buffers_are_cleared_before_an_entry_and_the_buffers_last() {
    let text = hypervisor();
    for (name, pattern) in SWITCHES {
        let (with_steps, plain) = switches(&text, pattern);
        let instructions = before(&text, with_steps[0]);
        assert_eq!(
            written(&instructions),
            [(SPEC_CTRL, Value::OfGuest), (FLUSH_CMD, Value::Constant(1))],
            "{name}: the guest's SPEC_CTRL, L1D flush"
        );
        let is = |mnemonic: Mnemonic| move |one: &Instruction| one.mnemonic() == mnemonic;
        let verw = instructions.iter().position(is(Mnemonic::Verw)).expect("VERW");
        let last = instructions.iter().rposition(is(Mnemonic::Wrmsr)).expect("WRMSR");
        assert!(last < verw, "{name}: what a write of an MSR leaves in the buffers is cleared, too");
        assert!(written(&before(&text, plain[0])).is_empty(), "{name}");
    }
}

#[test]
fn predictions_are_forgotten_in_one_place_besides_the_exits() {
    const NAMES_PRED_CMD: [u8; 5] = [0xb9, 0x49, 0, 0, 0];
    let text = hypervisor();
    // MOV to ECX, and a WRMSR soon behind it: the compiler orders the other registers as it likes.
    let writes = |place: &u64| {
        let mut at = *place;
        (0..6).any(|_| {
            let instruction = text.at(at).expect("code");
            at = instruction.next_ip();
            instruction.mnemonic() == Mnemonic::Wrmsr
        })
    };
    let places: Vec<u64> = text.places_of(&NAMES_PRED_CMD).into_iter().filter(writes).collect();
    let ends = |entry: u64| entry..behind(&text, entry).last().map_or(entry, Instruction::ip);
    let exits: Vec<_> = SWITCHES.iter().map(|(_, pattern)| ends(switches(&text, pattern).0[0])).collect();
    let others = places.iter().filter(|place| !exits.iter().any(|exit| exit.contains(place)));
    let about = "IBPB where a pCPU changes to another VM, and at a guest's own command";
    assert_eq!(others.count(), 1, "{about}: {places:x?}");
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
    let one = with("mitigations=auto spectre_v2=off");
    assert!(one.contains("speculation: spectre_v2: VULNERABLE, turned off"), "{one}");
}

#[test]
fn one_thread_of_each_core_runs_vcpus_if_the_others_must_not() {
    let with = |options: &str| Machine::X86_64.bare_hypervisor(&["-smp", "4,threads=2", "-append", options]).stdout;
    // QEMU's first pCPU runs none in any case, so its sibling does.
    let off = with("smt=off");
    assert!(off.contains("smt=off: 2 of 4 pCPUs run vCPUs"), "{off}");
    let wrong = with("smt=no");
    assert!(wrong.contains("smt") && wrong.contains("on") && wrong.contains("off"), "{wrong}");
}

/// What a world switch with the steps finds in memory.
#[derive(Clone, Copy)]
struct Finds {
    steps: Steps,
    /// The guest writes SPEC_CTRL without an exit.
    owns_spec_ctrl: bool,
    /// The guest's SPEC_CTRL is the host's.
    is_alike: bool,
}

/// Executes code without a guest from `at` until `ends`, and counts the instructions and the registers written.
fn execute(text: &Text, at: u64, finds: Finds, ends: impl Fn(&Instruction) -> bool) -> (u32, Vec<u32>) {
    let (mut at, mut is_zero, mut ecx, mut count, mut written) = (at, false, 0, 0, Vec::new());
    let mut returns = Vec::new();
    loop {
        let one = text.at(at).unwrap_or_else(|| panic!("no code at {at:#x}"));
        if ends(&one) && returns.is_empty() {
            return (count, written);
        }
        count += 1;
        assert!(count < 10_000, "it does not end");
        let mut next = one.next_ip();
        match one.mnemonic() {
            Mnemonic::Test if one.op0_kind() == OpKind::Memory => {
                is_zero = !finds.steps.intersects(Steps::from_bits_retain(one.immediate32()));
            }
            // Whether the VMCS has been launched.
            Mnemonic::Test => is_zero = false,
            Mnemonic::Cmp if one.op0_kind() == OpKind::Memory => is_zero = !finds.owns_spec_ctrl,
            Mnemonic::Cmp => is_zero = finds.is_alike,
            Mnemonic::Dec if one.op0_register() == Register::ECX => {
                ecx -= 1;
                is_zero = ecx == 0;
            }
            Mnemonic::Mov if one.op0_register() == Register::ECX => ecx = one.immediate32(),
            Mnemonic::Wrmsr => written.push(ecx),
            Mnemonic::Je if is_zero => next = one.near_branch_target(),
            Mnemonic::Jne if !is_zero => next = one.near_branch_target(),
            Mnemonic::Jmp => next = one.near_branch_target(),
            Mnemonic::Call => {
                returns.push(next);
                next = one.near_branch_target();
            }
            // The only way in which the code leaves a call: it takes the address from the stack.
            Mnemonic::Add if one.op0_register() == Register::RSP && !returns.is_empty() => {
                let bytes = usize::try_from(one.immediate(1)).expect("it drops a few addresses");
                returns.truncate(returns.len() - bytes / 8);
            }
            Mnemonic::Int3 => panic!("nothing returns from a call at {at:#x}"),
            _ => {}
        }
        at = next;
    }
}

/// Where an exit leads: behind VMRUN, or, with VT-x, behind what handles an entry that fails.
fn exit_of(text: &Text, pattern: &[u8], entry: u64) -> u64 {
    if pattern == SWITCHES[0].1 {
        return text.at(entry).expect("VMRUN").next_ip();
    }
    let fails = behind(text, entry).into_iter().find(|one| one.mnemonic() == Mnemonic::Jmp);
    fails.expect("a failed entry goes elsewhere").next_ip()
}

/// Instructions of an entry and an exit, and the registers that they write.
fn whole_switch(text: &Text, pattern: &[u8], finds: Finds) -> (u32, Vec<u32>) {
    let entry = switches(text, pattern).0[0];
    let begin = before(text, entry)[0].ip();
    let (into, mut written) = execute(text, begin, finds, |one| one.ip() == entry);
    let (out, more) = execute(text, exit_of(text, pattern, entry), finds, |one| one.mnemonic() == Mnemonic::Ret);
    written.extend(more);
    (into + out, written)
}

/// Each step, how the document calls it, and what it writes.
const COSTS: [(Steps, &str, &[u32]); 8] = [
    (Steps::IBPB_AT_EXIT, "IBPB | each exit", &[PRED_CMD]),
    (Steps::IBRS_AT_EXIT, "IBRS, written", &[SPEC_CTRL]),
    (Steps::FILL_RETURN_STACK, "calls that fill the return stack", &[]),
    (Steps::ONE_CALL, "one call", &[]),
    (Steps::CLEAR_HISTORY, "branches that replace the history", &[]),
    (Steps::CLEAR_BUFFERS, "VERW", &[]),
    (Steps::FLUSH_L1D, "flush of the L1 data cache", &[FLUSH_CMD]),
    (Steps::SWITCH_SPEC_CTRL, "SPEC_CTRL is the guest's", &[]),
];

#[test]
fn each_step_executes_what_the_document_says() {
    let text = hypervisor();
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md")).expect("there");
    let told = |words: &str| -> u32 {
        let row = document.lines().find(|line| line.starts_with(&format!("| {words}")));
        let row = row.unwrap_or_else(|| panic!("no row \"{words}\""));
        let figure = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        let figure = figure.split_whitespace().next().unwrap_or_default();
        figure.parse().unwrap_or_else(|_| panic!("no figure in {row}"))
    };
    for (name, pattern) in SWITCHES {
        let finds = |steps| Finds { steps, owns_spec_ctrl: false, is_alike: true };
        let (none, nothing) = whole_switch(&text, pattern, finds(Steps::CLEAR_REGISTERS));
        assert!(nothing.is_empty(), "{name}: {nothing:x?}");
        for (step, words, registers) in COSTS {
            let (count, written) = whole_switch(&text, pattern, finds(step));
            assert_eq!(written, registers, "{name}: {words}");
            assert_eq!(count - none, told(words), "{name}: {words}");
        }
        // Of SPEC_CTRL: a guest with another value, and one that writes it without exits.
        let own = |owns_spec_ctrl| Finds { steps: Steps::SWITCH_SPEC_CTRL, owns_spec_ctrl, is_alike: false };
        let (differs, written) = whole_switch(&text, pattern, own(false));
        assert_eq!(written, [SPEC_CTRL, SPEC_CTRL], "{name}: the guest's, then the host's");
        let (reads, _) = whole_switch(&text, pattern, own(true));
        assert_eq!(
            (differs - none, reads - differs),
            (told("… with another value"), told("… and its own writes")),
            "{name}"
        );

        // The guarded switch without further steps, beside the plain one.
        let plain = switches(&text, pattern).1[0];
        let begin = before(&text, plain)[0].ip();
        let ends = |one: &Instruction| one.mnemonic() == Mnemonic::Ret;
        let (into, _) = execute(&text, begin, finds(Steps::empty()), |one| one.ip() == plain);
        let (out, _) = execute(&text, exit_of(&text, pattern, plain), finds(Steps::empty()), ends);
        assert_eq!(none - into - out, told("general registers are cleared"), "{name}");
    }
}
