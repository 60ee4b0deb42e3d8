//! The steps against speculative execution in the released binary for AArch64: where they are, and what an exit
//! executes of them by the plans of several processors. What they hold, no emulator can show.

use std::fs;
use std::ops::Range;

use mitigations::arm::{Answer, Firmware, Processor, Steps};
use system_tests::{Machine, measuring_vm};

use Answer::{Needed, NotNeeded, Unknown};

const RET: u32 = 0xd65f_03c0;
const ERET: u32 = 0xd69f_03e0;
const SMC: u32 = 0xd400_0003;
const CLRBHB: u32 = 0xd503_22df;
const DSB_NSH: u32 = 0xd503_379f;
const ISB: u32 = 0xd503_3fdf;
const BARRIER: [u32; 2] = [DSB_NSH, ISB];
/// MRS X9, TPIDR_EL2: the first instruction of the steps.
const BEGINS: u32 = 0xd53c_d049;
/// LDR X1, [SP, #16] and STP X2, X3, [X1, #16]: where an exit goes from the vectors.
const LEFT: [u32; 2] = [0xf940_0be1, 0xa901_0c22];

/// The instructions of the image, which is loaded as it is, at a multiple of 2 MiB.
struct Image(Vec<u32>);

impl Image {
    fn read() -> Self {
        let bytes = fs::read(Machine::Aarch64.hypervisor()).expect("the hypervisor was built");
        Self(bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect())
    }

    fn places_of(&self, words: &[u32]) -> Vec<usize> {
        self.0.windows(words.len()).enumerate().filter(|(_, window)| *window == words).map(|(at, _)| at).collect()
    }

    /// The two ways from the vectors to the return: the plain one, and the one with the steps.
    fn exits(&self) -> [Range<usize>; 2] {
        let to_return = |start: usize| {
            let length = self.0[start..].iter().position(|word| *word == RET).expect("it returns");
            start..start + length + 1
        };
        let has_steps = |exit: &Range<usize>| self.0[exit.clone()].contains(&BEGINS);
        let exits = self.places_of(&LEFT).into_iter().map(to_return);
        let (guarded, plain): (Vec<_>, Vec<_>) = exits.partition(has_steps);
        let one = |mut found: Vec<Range<usize>>| {
            assert_eq!(found.len(), 1, "{found:x?}");
            found.remove(0)
        };
        [one(plain), one(guarded)]
    }
}

/// The target of a direct branch at `at`, in instructions from there.
fn branch(word: u32) -> Option<i64> {
    let field = |low: u32, bits: u32| {
        let value = i64::from(word >> low & ((1 << bits) - 1));
        if value >> (bits - 1) == 0 { value } else { value - (1 << bits) }
    };
    match word >> 24 {
        0x14..=0x17 => Some(field(0, 26)),
        // B.cond, CBZ and CBNZ.
        0x54 | 0x34 | 0x35 | 0xb4 | 0xb5 => Some(field(5, 19)),
        // TBZ and TBNZ.
        0x36 | 0x37 | 0xb6 | 0xb7 => Some(field(5, 14)),
        _ => None,
    }
}

/// BR, BLR, RET and their kin, BL, ERET, or one of the exceptions.
fn goes_elsewhere(word: u32) -> bool {
    word >> 25 == 0b110_1011 || word >> 26 == 0b10_0101 || word >> 24 == 0xd4 && word != SMC
}

/// MOV of XZR to a general register: its number.
fn cleared(word: u32) -> Option<u32> {
    (word & !0x1f == 0xaa1f_03e0).then_some(word & 0x1f)
}

#[test]
fn nothing_is_predicted_between_an_exit_and_the_barrier_behind_the_last_step() {
    let image = Image::read();
    let [_, guarded] = image.exits();
    let code = &image.0[guarded];
    let barrier = code.windows(2).position(|two| two == BARRIER).expect("there is a barrier");
    let (until, after) = code.split_at(barrier);
    for (at, word) in until.iter().enumerate() {
        assert!(!goes_elsewhere(*word), "{word:#x} before the barrier");
        if let Some(offset) = branch(*word) {
            let target = usize::try_from(at as i64 + offset).expect("it stays within");
            assert!(target <= barrier, "{word:#x} leads past the barrier");
        }
    }
    // X19 to X30 come from the stack, and then the way leads back.
    let loads = &after[2..after.len() - 1];
    assert!(loads.iter().all(|word| word & 0xfe40_03e0 == 0xa840_03e0), "LDP from SP: {loads:x?}");
    let mut loaded: Vec<u32> = loads.iter().flat_map(|word| [word & 0x1f, word >> 10 & 0x1f]).collect();
    loaded.sort_unstable();
    assert_eq!(loaded, (19..=30).collect::<Vec<_>>());
    // Firmware may leave anything in X0 to X3, so its call comes before they are cleared.
    let last_call = until.iter().rposition(|word| *word == SMC).expect("there is a call");
    let clears: Vec<u32> = until[last_call..].iter().copied().filter_map(cleared).collect();
    assert_eq!(clears, (0..=18).collect::<Vec<_>>());
}

#[test]
fn plain_exit_has_no_step() {
    let image = Image::read();
    let [plain, guarded] = image.exits();
    let code = &image.0[plain];
    for word in &code[..code.len() - 1] {
        assert!(![SMC, CLRBHB, DSB_NSH, ISB].contains(word) && cleared(*word).is_none(), "{word:#x}");
        assert!(branch(*word).is_none() && !goes_elsewhere(*word), "{word:#x}");
    }
    // It is the other one without the steps.
    let with_steps = &image.0[guarded];
    let begins = with_steps.iter().position(|word| *word == BEGINS).expect("the steps begin");
    let end = with_steps.windows(2).position(|two| two == BARRIER).expect("there is a barrier") + 2;
    assert_eq!(code, [&with_steps[..begins], &with_steps[end..]].concat());
}

#[test]
fn each_vector_of_a_guest_leads_to_one_of_the_two_ways() {
    const ENTRY_WORDS: usize = 32;
    const SAVES: u32 = 0xa9bf_07e0;
    const REPORTS: u32 = 0xd51b_d040;
    let image = Image::read();
    let exits = image.exits().map(|exit| exit.start);
    // Tables are aligned to 2 KiB: 16 entries, of which the first 8 are for exceptions of the hypervisor.
    let is_table = |at: &usize| {
        let entry = |number: usize| image.0.get(at + number * ENTRY_WORDS).copied();
        (0..8).all(|number| entry(number) == Some(REPORTS)) && (8..16).all(|number| entry(number) == Some(SAVES))
    };
    let tables: Vec<usize> = (0..image.0.len()).step_by(16 * ENTRY_WORDS).filter(is_table).collect();
    assert_eq!(tables.len(), 2, "{tables:x?}");
    for (table, exit) in tables.into_iter().zip(exits) {
        for number in 8..16 {
            let at = table + number * ENTRY_WORDS;
            let moves_number = 0xd280_0000 | u32::try_from(number % 4).expect("it is small") << 5;
            assert_eq!(image.0[at + 1], moves_number, "vector {number}");
            let offset = branch(image.0[at + 2]).expect("a direct branch");
            assert_eq!(at as i64 + 2 + offset, exit as i64, "vector {number}");
        }
    }
}

#[test]
fn no_processor_runs_ahead_of_an_exception_return() {
    let image = Image::read();
    let returns = image.places_of(&[ERET]);
    assert!(!returns.is_empty());
    for at in returns {
        assert_eq!(image.0[at + 1..at + 3], BARRIER, "{at:#x}");
    }
}

/// What an exit has executed of the steps.
#[derive(Debug, Default, PartialEq, Eq)]
struct Executed {
    /// Functions of the firmware.
    calls: Vec<u64>,
    /// Times round the loop of branches.
    branches: u32,
    /// CLRBHB.
    clears: u32,
    /// All of them, without those of the firmware.
    instructions: u32,
}

/// Executes the steps of the image with this word in the pCPU's block.
fn execute(steps: Steps) -> Executed {
    let image = Image::read();
    let [_, guarded] = image.exits();
    let code = &image.0[guarded];
    let begins = code.iter().position(|word| *word == BEGINS).expect("the steps begin");
    let end = code.windows(2).position(|two| two == BARRIER).expect("there is a barrier") + 2;
    let code = &code[begins..end];

    let mut x = [0x6e57_6e57_6e57_6e57_u64; 32];
    let mut is_zero = false;
    let mut executed = Executed::default();
    let mut at = 0;
    while at < code.len() {
        let word = code[at];
        let register = word as usize & 0x1f;
        let mut next = at + 1;
        let mut go = |taken: bool| {
            if taken {
                next = usize::try_from(at as i64 + branch(word).expect("a branch")).expect("it stays within");
            }
        };
        match word {
            BEGINS | DSB_NSH | ISB => {}
            SMC => {
                executed.calls.push(x[0]);
                x[..4].fill(0xf1f1_f1f1_f1f1_f1f1);
            }
            CLRBHB => executed.clears += 1,
            // LDR X9, [X9, #...]: the pCPU's word.
            _ if word & 0xffc0_03ff == 0xf940_0129 => x[9] = steps.word(),
            // UBFM: a field of X9, of which LSR is a form.
            _ if word & 0xffc0_0000 == 0xd340_0000 => {
                let (low, high) = (word >> 16 & 0x3f, word >> 10 & 0x3f);
                x[register] = x[9] >> low & (u64::MAX >> (63 - (high - low)));
            }
            // SUBS X0, X0, #1
            0xf100_0400 => {
                x[0] = x[0].wrapping_sub(1);
                is_zero = x[0] == 0;
                executed.branches += 1;
            }
            _ if word >> 26 == 0b00_0101 => go(true),
            _ if word & 0xff00_001f == 0x5400_0001 => go(!is_zero),
            _ if word >> 24 == 0xb4 => go(x[register] == 0),
            _ if word >> 24 == 0x36 => go(x[register] >> (word >> 19 & 0x1f) & 1 == 0),
            _ => x[usize::try_from(cleared(word).unwrap_or_else(|| panic!("{word:#x}"))).expect("it is small")] = 0,
        }
        executed.instructions += 1;
        assert!(executed.instructions < 10_000, "it ends");
        at = next;
    }
    assert_eq!(x[..19], [0; 19], "{steps:?}");
    executed
}

#[test]
fn exits_execute_the_steps_of_their_processor_and_no_others() {
    const WORKAROUND_1: u64 = 0x8000_8000;
    const WORKAROUND_3: u64 = 0x8000_3fff;
    let old = |midr| Processor { midr, pfr0: 0x2222, ..Processor::default() };
    let new = |midr| Processor { midr, pfr0: 0x11 << 56, pfr1: 0x20, ..Processor::default() };
    let with = |found: Processor, answers| found.plan(&Firmware(answers)).steps;
    let modern = [NotNeeded, Unknown, Needed];
    let of_2018 = [Needed, NotNeeded, Unknown];
    let of_2022 = [Needed, NotNeeded, Needed];
    let n2 = Processor { isar2: 1 << 28, ..new(0x410f_d493) };
    let v2 = Processor { mmfr1: 1 << 60, ..new(0x410f_d4f0) };
    let calls = |function: u64| vec![function];
    let none = Vec::new;
    // The name, the steps, and what they execute: calls, rounds of the loop, CLRBHB, instructions.
    let wanted = [
        ("Cortex-A53", with(old(0x410f_d034), [Unknown; 3]), none(), 0, 0, 28),
        ("Cortex-A57", with(old(0x411f_d070), of_2022), calls(WORKAROUND_3), 0, 0, 29),
        ("Cortex-A72, firmware of 2018", with(old(0x410f_d083), of_2018), calls(WORKAROUND_1), 8, 0, 53),
        ("Cortex-A73", with(old(0x410f_d092), of_2022), calls(WORKAROUND_3), 0, 0, 29),
        ("Cortex-A76", with(new(0x414f_d0b1), modern), none(), 24, 0, 100),
        ("Neoverse N1", with(new(0x414f_d0c1), modern), none(), 24, 0, 100),
        ("Neoverse V1", with(new(0x411f_d402), modern), none(), 32, 0, 124),
        ("Neoverse N2", with(new(0x410f_d493), modern), none(), 32, 0, 124),
        ("Neoverse N2 with CLRBHB", with(n2, modern), none(), 0, 1, 29),
        ("Neoverse V2 with ECBHB", with(v2, [Unknown; 3]), none(), 0, 0, 28),
    ];
    for (name, steps, calls, branches, clears, instructions) in wanted {
        let wanted = Executed { calls, branches, clears, instructions };
        assert_eq!(execute(steps), wanted, "{name}");
    }
}

/// The hypervisor's log on this CPU of QEMU, with this option.
fn log_on(cpu: &str, option: &str) -> String {
    let machine = ["-machine", "virt,virtualization=on,gic-version=3", "-smp", "2", "-cpu", cpu];
    Machine::Aarch64.bare_hypervisor_on(&machine, &["-append", option]).stdout
}

#[test]
fn log_tells_what_each_processor_gets() {
    for cpu in ["max,pauth-impdef=on", "neoverse-n1", "cortex-a72"] {
        let log = log_on(cpu, "log=info");
        assert!(log.contains("speculation: the processor is emulated, nothing is done"), "{cpu}: {log}");
    }
    let n1 = log_on("neoverse-n1", "mitigations=auto");
    for line in [
        "speculation: bhi: held by a loop of branches at exits",
        "speculation: spec_store_bypass: held by PSTATE.SSBS is clear at EL2",
        "speculation: all known weaknesses of this processor are held",
    ] {
        assert!(n1.contains(line), "{line}: {n1}");
    }
    assert!(!n1.contains("spectre_v2"), "it has CSV2: {n1}");
    let a72 = log_on("cortex-a72", "mitigations=auto");
    for line in [
        "speculation: spectre_v2: VULNERABLE, the firmware has no SMCCC_ARCH_WORKAROUND_1",
        "speculation: bhi: held by a loop of branches at exits",
        "speculation: some weaknesses are not held",
    ] {
        assert!(a72.contains(line), "{line}: {a72}");
    }
    let off = log_on("neoverse-n1", "mitigations=off");
    assert!(off.contains("speculation: bhi: VULNERABLE, mitigations=off"), "{off}");
    let one = log_on("neoverse-n1", "mitigations=auto bhi=off");
    assert!(one.contains("speculation: bhi: VULNERABLE, turned off"), "{one}");
    assert!(one.contains("speculation: spec_store_bypass: held by"), "{one}");
}

/// The outputs of these VMs on this CPU of QEMU, with this option.
fn outputs_on(cpu: &str, option: &str, vms: &str) -> Vec<String> {
    let cpu = format!("--qemu-arg={cpu}");
    let option = format!("--qemu-arg=log=info {option}");
    let more = ["--json", "--qemu-arg=-cpu", &cpu, "--qemu-arg=-append", &option];
    let json = Machine::Aarch64.run_vms(120, vms, &more).expect_status(0).json();
    let vms = json["vms"].as_array().expect("there are VMs");
    vms.iter().map(|vm| vm["output"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn guests_work_with_the_steps() {
    for cpu in ["neoverse-n1", "cortex-a72"] {
        let vms: String = (1..=3)
            .map(|seed| {
                let cmdline = format!("experiments=own-data,hvc,smc,page-fault seconds=1 seed={seed}");
                measuring_vm(&format!("vm-{seed}"), 2, &cmdline)
            })
            .collect();
        for output in outputs_on(cpu, "mitigations=auto", &vms) {
            let last = output.lines().last().unwrap_or_default();
            assert!(last.starts_with("done experiments=4 ") && last.ends_with("failures=0"), "{cpu}: {output}");
        }
    }
}

#[test]
fn guests_keep_their_state_over_exits_and_hear_what_holds() {
    let vm = measuring_vm("vm", 1, "experiments=speculation");
    // Answers for the firmware's three functions. QEMU's firmware has none of them, but a loop clears the history.
    // `max` has another CSV2 in newer versions.
    let cases: [(&str, &str, &[i32]); 5] = [
        ("neoverse-n1", "mitigations=auto", &[1, -1, 0]),
        ("neoverse-n1", "mitigations=off", &[1, -1, -1]),
        ("cortex-a72", "mitigations=auto", &[-1, -1, 0]),
        ("cortex-a53", "", &[1, 1, 1]),
        ("max,pauth-impdef=on", "", &[1, -1]),
    ];
    for (cpu, option, answers) in cases {
        let outputs = outputs_on(cpu, option, &vm);
        let [output] = outputs.as_slice() else { panic!("one VM: {outputs:?}") };
        assert!(output.contains("done experiments=1 failures=0"), "{cpu} {option}: {output}");
        for (number, answer) in (1..).zip(answers) {
            let line = format!("record experiment=speculation workaround={number} answer={answer}");
            assert!(output.lines().any(|found| found.trim_end() == line), "{cpu} {option}: {line} in {output}");
        }
        // The emulator has no SSBS on its older cores.
        let has_ssbs = cpu.starts_with("neoverse") || cpu.starts_with("max");
        assert_eq!(output.matches("case name=ssbs ").count(), if has_ssbs { 2 } else { 1 }, "{cpu}: {output}");
    }
}
