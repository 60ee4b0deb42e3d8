//! `cargo xtask fuzz`: each door by libFuzzer, which follows the coverage.
//!
//! A target is a unit test ([`dunlin-fuzz`](../../fuzz/src/lib.rs) runs its function). Compiled with the counters that
//! libFuzzer reads, the same test is the fuzzer. The compiler is the usual one: LLVM's pass is in it, and the flags for
//! it are stable. Only AddressSanitizer would need a nightly one; the doors are Rust without unsafe code, so it would
//! find nothing that a panic does not tell.
//!
//! Coverage is told by source: of the lines in the files of the door at which the program may go two ways, how many the
//! corpus and the findings of this and earlier runs reach. `addr2line` knows which place of the program is which line.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::artifacts::{Places, output, run};
use crate::ci;

const HELP: &str = "\
cargo xtask fuzz [TARGET..] [--time TIME] [--jobs N] [--keep] [--list] [--help]

Lets libFuzzer look for inputs that make a check of a target fail; all targets, or those named.

  --time TIME   time of a processor for each target: 30s, 10m, 2h (1m). A busy computer takes longer
  --jobs N      so many targets side by side (1)
  --keep        add inputs that reach something new to the corpus, fuzz/corpus/TARGET
  --list        show the targets

Shows progress every ten seconds, and ends with a table: executions, seconds of a processor, inputs that reached
something new, findings, and how much of the door's source the corpus and what was found reach. A finding is a file in target/fuzz/findings/TARGET.
To try it again and mend it, copy it to fuzz/corpus/TARGET, and run the test that --list names: it reads that folder.
";

/// A target.
struct Target {
    name: &'static str,
    what: &'static str,
    package: &'static str,
    /// The name of the test program.
    program: &'static str,
    test: &'static str,
    /// Beginnings of paths: the source of the door.
    door: &'static [&'static str],
}

const fn target(
    name: &'static str,
    what: &'static str,
    [package, program, test]: [&'static str; 3],
    door: &'static [&'static str],
) -> Target {
    Target { name, what, package, program, test, door }
}

const EMULATE: &str = "dunlin-x86-emulate";
const HYPERVISOR: &str = "dunlin-hypervisor";
const DOORS: &str = "dunlin-fuzz";

const TARGETS: [Target; 30] = [
    target(
        "decode",
        "instructions of guests, against another decoder",
        [EMULATE, "x86_emulate", "tests::fuzzed::any_bytes_are_the_instruction_that_another_decoder_sees"],
        &["crates/x86_emulate/src/decode.rs", "crates/x86_emulate/src/instruction.rs"],
    ),
    target(
        "emulate",
        "emulated instructions of any machine",
        [EMULATE, "x86_emulate", "tests::fuzzed::any_machine_is_changed_by_finished_instructions_only"],
        &["crates/x86_emulate/src/"],
    ),
    target(
        "walk",
        "page tables of guests, with and without a cache",
        [EMULATE, "x86_emulate", "tests::fuzzed::any_walk_with_a_cache_finds_what_one_without_finds"],
        &["crates/x86_emulate/src/walk"],
    ),
    target(
        "local_apic",
        "registers and MSRs of the local APIC, against what they show",
        [HYPERVISOR, "hypervisor", "device::local_apic::tests::after_any_accesses_pending_is_what_the_registers_say"],
        &["hypervisor/src/device/local_apic"],
    ),
    target(
        "io_apic",
        "registers and pins of the I/O APIC",
        [HYPERVISOR, "hypervisor", "device::io_apic::tests::asserted_level_is_never_forgotten_after_any_accesses"],
        &["hypervisor/src/device/io_apic"],
    ),
    target(
        "gic",
        "the GIC, against the manual's state machine",
        [HYPERVISOR, "hypervisor", "device::gic::tests::model::whatever_happens_vcpus_see_what_the_manual_says"],
        &["hypervisor/src/device/gic"],
    ),
    target(
        "control_registers",
        "writes of CR0, CR4 and EFER, against the manual and another decoder",
        [DOORS, "doors", "control_registers::any_write_of_a_control_register_is_as_the_manual_says"],
        &["crates/x86_defs/src/control"],
    ),
    target(
        "msrs",
        "MSRs that keep their values, against the manuals' tables",
        [HYPERVISOR, "hypervisor", "device::msr::tests::any_write_is_kept_ignored_or_refused_as_the_manuals_say"],
        &["hypervisor/src/device/msr", "hypervisor/src/device/memory_types"],
    ),
    target(
        "cpuid",
        "CPUID of guests, of any processor",
        [DOORS, "doors", "cpuid::no_guest_sees_a_feature_that_is_not_there_or_not_held"],
        &["crates/x86_defs/src/features.rs", "crates/x86_defs/src/control.rs"],
    ),
    target(
        "system_registers",
        "syndromes and ID registers of Arm, against the manual",
        [
            DOORS,
            "doors",
            "system_registers::any_syndrome_is_read_as_the_manual_writes_it_and_no_feature_is_offered_that_is_not_there",
        ],
        &["crates/aarch64_defs/src/features", "crates/aarch64_defs/src/syndrome"],
    ),
    target(
        "vmcs",
        "control blocks of vCPUs as VT-x enters and leaves them",
        ["dunlin-vmx-image", "vmx_image", "tests::any_control_blocks_become_entries_that_the_processor_accepts"],
        &["crates/vmx_image/src/", "crates/x86_defs/src/vmx/event"],
    ),
    target(
        "uart",
        "the PC's UART",
        [HYPERVISOR, "hypervisor", "device::uart::tests::any_accesses_keep_the_promises_of_the_registers"],
        &["hypervisor/src/device/uart"],
    ),
    target(
        "pl011",
        "Arm's UART",
        [HYPERVISOR, "hypervisor", "device::pl011::tests::any_accesses_keep_the_promises_of_the_registers"],
        &["hypervisor/src/device/pl011"],
    ),
    target(
        "gic_states",
        "states of an Arm interrupt controller from a file of a saved VM, and its guests' accesses then",
        [HYPERVISOR, "hypervisor", "device::gic::tests::states::any_states_are_refused_or_work_and_can_be_saved_again"],
        &["hypervisor/src/device/gic"],
    ),
    target(
        "device_states",
        "states of devices from a file of a saved VM, and the PC's timer, clock and bus",
        [
            HYPERVISOR,
            "hypervisor",
            "tests::device_states::any_states_of_devices_are_refused_or_work_and_can_be_saved_again",
        ],
        &[
            "hypervisor/src/device/pit",
            "hypervisor/src/device/rtc",
            "hypervisor/src/device/pci",
            "hypervisor/src/device/uart",
        ],
    ),
    target(
        "psci",
        "calls of an Arm guest to firmware",
        [HYPERVISOR, "hypervisor", "device::psci::tests::any_call_is_decoded_or_unknown"],
        &["hypervisor/src/device/psci", "hypervisor/src/device/affinity"],
    ),
    target(
        "synic",
        "MSRs of the synthetic interrupt controller and its timers",
        [DOORS, "doors", "synic::any_msrs_keep_what_they_were_given"],
        &["crates/synic/src/"],
    ),
    target(
        "hypercalls",
        "hypercalls, parsed",
        [DOORS, "doors", "hypercalls::any_hypercall_is_a_call_or_a_refusal_by_exactly_its_input"],
        &["crates/hyperv_defs/src/"],
    ),
    target(
        "parent_calls",
        "a parent's calls about its children, on the fake machine",
        [
            HYPERVISOR,
            "hypervisor",
            "tests::lent::calls::calls_that_a_fuzzer_makes_are_answered_and_all_pages_come_back",
        ],
        &["hypervisor/src/arch/hypercall", "crates/partition/src/", "hypervisor/src/vm/child"],
    ),
    target(
        "frames",
        "frames of the control port",
        [
            DOORS,
            "doors",
            "frames::any_stream_is_answered_frame_by_frame_and_any_message_reads_the_same_after_it_was_sent",
        ],
        &["crates/abi/src/control.rs"],
    ),
    target(
        "commands",
        "commands on the control port, on the fake machine",
        [
            HYPERVISOR,
            "hypervisor",
            "tests::commands::commands_that_a_fuzzer_sends_are_answered_once_each_and_leave_nothing_behind",
        ],
        &["hypervisor/src/control/", "hypervisor/src/vm/saved"],
    ),
    target(
        "vm_files",
        "TOML files of VMs",
        [
            "dunlin-cli",
            "dunlin",
            "config::tests::any_file::any_file_is_refused_at_a_place_that_it_names_or_makes_a_payload",
        ],
        &["cli/src/config", "cli/src/quantity"],
    ),
    target(
        "saved_files",
        "files of saved VMs",
        ["dunlin-cli", "dunlin", "saved::tests::any_file::any_file_is_read_to_its_end_or_refused_in_words"],
        &["crates/abi/src/saved.rs", "cli/src/saved.rs"],
    ),
    target(
        "payloads",
        "the boot payload",
        [DOORS, "doors", "payloads::any_payload_is_read_or_refused_and_reads_the_same_after_it_was_written"],
        &["crates/abi/src/payload.rs"],
    ),
    target(
        "kernels",
        "kernels of x86-64: bzImage and PVH",
        [DOORS, "doors", "kernels::any_kernel_is_loaded_into_its_memory_or_refused"],
        &["crates/x86_boot/src/"],
    ),
    target(
        "arm_images",
        "kernels of AArch64",
        [DOORS, "doors", "arm_images::any_image_is_placed_in_its_memory_or_refused"],
        &["crates/aarch64_defs/src/image"],
    ),
    target(
        "own_acpi",
        "ACPI tables of a machine, for the VM that owns it",
        [DOORS, "doors", "own_acpi::any_tables_of_a_machine_make_tables_that_can_be_walked"],
        &["crates/x86_boot/src/own_acpi.rs"],
    ),
    target(
        "ivrs",
        "firmware's table of AMD's IOMMUs",
        [DOORS, "doors", "ivrs::any_ivrs_is_read_or_refused"],
        &["crates/amd_vi/src/ivrs"],
    ),
    target(
        "dmar",
        "firmware's table of Intel's IOMMUs",
        [DOORS, "doors", "dmar::any_dmar_is_read_or_refused"],
        &["crates/vt_d/src/dmar"],
    ),
    target(
        "firmware_tables",
        "other tables of firmware, boot modules, memory map",
        [HYPERVISOR, "hypervisor", "tests::firmware::whatever_firmware_hands_over_is_used_as_it_is_or_refused"],
        &[
            "hypervisor/src/boot/handover.rs",
            "hypervisor/src/boot/madt.rs",
            "hypervisor/src/boot/mcfg.rs",
            "hypervisor/src/boot/soft_off.rs",
            "hypervisor/src/boot/spcr.rs",
        ],
    ),
];

/// An input is kept if it reaches so many new places. One for each place would be thousands of files.
const WORTH_KEEPING: usize = 2;
/// The corpus grows by so many inputs at a time.
const MOST_KEPT: usize = 40;

/// What a run has found out.
struct Report {
    name: &'static str,
    executions: u64,
    /// Time of processors.
    worked: Duration,
    added: usize,
    findings: usize,
    reached: usize,
    places: usize,
}

/// Runs the command.
pub(crate) fn command(places: &Places, arguments: &[String]) -> Result<ExitCode> {
    let (mut names, mut time, mut jobs, mut keeps) = (Vec::new(), Duration::from_secs(60), 1_usize, false);
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word.split_once('=').unwrap_or((word, "")) {
            ("--help" | "-h", _) => {
                print!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            ("--list", _) => {
                for target in &TARGETS {
                    println!(
                        "{:17} {}\n{:17} cargo test -p {} {}",
                        target.name, target.what, "", target.package, target.test
                    );
                }
                return Ok(ExitCode::SUCCESS);
            }
            ("--keep", _) => keeps = true,
            ("--time", joined) => {
                let text = if joined.is_empty() { words.next().unwrap_or_default() } else { joined };
                time = duration(text).with_context(|| format!("--time is 30s, 10m or 2h, and not `{text}`"))?;
            }
            ("--jobs", joined) => {
                let text = if joined.is_empty() { words.next().unwrap_or_default() } else { joined };
                let wanted = text.parse().ok().filter(|jobs| *jobs > 0);
                jobs = wanted.with_context(|| format!("--jobs is a number from 1 on, and not `{text}`"))?;
            }
            _ => match TARGETS.iter().find(|target| target.name == word) {
                Some(target) => names.push(target.name),
                None => bail!("no target `{word}`; `cargo xtask fuzz --list` shows them\n\n{HELP}"),
            },
        }
    }
    let chosen: Vec<&Target> =
        TARGETS.iter().filter(|target| names.is_empty() || names.contains(&target.name)).collect();
    ci::set_up(places, &["fuzz"])?;
    let programs = build(places, &chosen)?;

    let reports = side_by_side(jobs, &chosen, |target| {
        fuzz(places, target, &programs[&(target.package, target.program)], time, keeps)
    })?;
    println!(
        "\n{:17} {:>12} {:>6} {:>6} {:>9}  {:>14}",
        "target", "executions", "CPU s", "new", "findings", "of the door"
    );
    for report in &reports {
        let Report { name, executions, worked, added, findings, reached, places } = report;
        let percent = if *places == 0 { 0.0 } else { 100.0 * *reached as f64 / *places as f64 };
        let worked = worked.as_secs();
        println!("{name:17} {executions:12} {worked:6} {added:6} {findings:9}  {percent:5.1} % of {places} lines");
    }
    let found: usize = reports.iter().map(|report| report.findings).sum();
    Ok(if found == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Does `act` for each target, for `jobs` of them at a time. The results are in the targets' order.
fn side_by_side<R: Send>(
    jobs: usize,
    targets: &[&Target],
    act: impl Fn(&Target) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(target) = targets.get(number) else { return done };
            done.push((number, act(target)));
        }
    };
    let mut done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a panic, see above")).collect()
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

/// `90s`, `10m` or `2h`.
fn duration(text: &str) -> Option<Duration> {
    let (number, seconds) = match text.as_bytes().last()? {
        b's' => (&text[..text.len() - 1], 1),
        b'm' => (&text[..text.len() - 1], 60),
        b'h' => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    let seconds = number.parse::<u64>().ok()?.checked_mul(seconds)?;
    (seconds != 0).then(|| Duration::from_secs(seconds))
}

const HOST: &str = "x86_64-unknown-linux-gnu";

/// Compiles the test programs, and returns their paths by package and name.
fn build<'a>(places: &Places, chosen: &[&'a Target]) -> Result<BTreeMap<(&'a str, &'a str), PathBuf>> {
    const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                         -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                         -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
                         -Cllvm-args=-simplifycfg-branch-fold-threshold=0";
    println!("xtask: compiling the targets, with counters of coverage");
    let mut programs = BTreeMap::new();
    for target in chosen {
        programs.entry((target.package, target.program)).or_insert_with(PathBuf::new);
    }
    for ((package, name), path) in &mut programs {
        // With a target named, macros and build scripts are compiled without the flags.
        let mut cargo = places.cargo(&["test", "--release", "--no-run", "--target", HOST, "--package", package]);
        cargo.args(["--message-format", "json-render-diagnostics"]);
        match *name {
            "doors" => cargo.args(["--test", name]),
            "dunlin" => cargo.args(["--bin", name]),
            _ => cargo.arg("--lib"),
        };
        cargo.env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", folder(places));
        cargo.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        cargo.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
        cargo.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
        let told = output(cargo.stderr(Stdio::inherit()))?;
        let artifacts = told.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let is_it = |artifact: &Value| artifact["target"]["name"] == **name && artifact["profile"]["test"] == true;
        let found = artifacts.filter(is_it).find_map(|artifact| artifact["executable"].as_str().map(PathBuf::from));
        *path = found.with_context(|| format!("{package} has left no test program {name}"))?;
    }
    Ok(programs)
}

/// All that this command leaves.
fn folder(places: &Places) -> PathBuf {
    places.target.join("fuzz")
}

/// The files of a folder.
fn count(folder: &Path) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn fuzz(places: &Places, target: &Target, program: &Path, time: Duration, keeps: bool) -> Result<Report> {
    let Target { name, .. } = target;
    let corpus = places.root.join("fuzz/corpus").join(name);
    let (found, findings) = (folder(places).join("found").join(name), folder(places).join("findings").join(name));
    let log = folder(places).join(format!("{name}.log"));
    for made in [&found, &findings] {
        fs::create_dir_all(made).with_context(|| format!("cannot make {}", made.display()))?;
    }
    let (found_before, findings_before) = (count(&found), count(&findings));

    let arguments = [
        format!("-artifact_prefix={}/", findings.display()),
        "-timeout=30".to_string(),
        "-use_value_profile=1".to_string(),
        "-print_final_stats=1".to_string(),
        found.display().to_string(),
        corpus.display().to_string(),
    ];
    println!("{name}: begins ({})", target.what);
    let mut child = test(program, target, File::create(&log)?)?
        .env("DUNLIN_FUZZ", arguments.join("\n"))
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let worked = watch(&mut child, time, name, &log)?;
    let is_good = child.wait()?.success();

    let text = fs::read_to_string(&log).unwrap_or_default();
    let executions =
        number_behind(&text, "stat::number_of_executed_units:").or_else(|| last_number(&text)).unwrap_or(0);
    let findings_now = count(&findings) - findings_before;
    if !is_good || executions == 0 {
        let end: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        end[end.len().saturating_sub(25)..].iter().for_each(|line| println!("{name}: {line}"));
        if findings_now == 0 {
            bail!("{name} has not run: {}", log.display());
        }
        println!("{name}: FINDING in {}", findings.display());
    }
    let added = count(&found).saturating_sub(found_before);
    let (reached, all) = coverage(places, target, program, &[&corpus, &found], keeps)?;
    Ok(Report { name, executions, worked, added, findings: findings_now, reached, places: all })
}

/// A command that runs the target's test, and writes all to `log`.
fn test(program: &Path, target: &Target, log: File) -> Result<Command> {
    let mut command = Command::new(program);
    command.args(["--exact", target.test, "--nocapture", "--test-threads=1"]);
    command.stdout(log.try_clone()?).stderr(log).stdin(Stdio::null());
    Ok(command)
}

/// Shows the fuzzer's last line every ten seconds until it ends. Returns the time of processors that it had; it is told
/// to end when that is `time`.
fn watch(child: &mut Child, time: Duration, name: &str, log: &Path) -> Result<Duration> {
    let (mut told, mut worked, mut is_told_to_end) = (Instant::now(), Duration::ZERO, false);
    while child.try_wait()?.is_none() {
        worked = time_of(child.id()).unwrap_or(worked);
        if worked >= time && !is_told_to_end {
            is_told_to_end = true;
            // With this signal libFuzzer ends after the input that it is at, and tells its figures.
            let _ = Command::new("kill").args(["-USR1", &child.id().to_string()]).status();
        }
        thread::sleep(Duration::from_millis(200));
        if told.elapsed() >= Duration::from_secs(10) {
            told = Instant::now();
            let text = fs::read_to_string(log).unwrap_or_default();
            if let Some(line) = text.lines().rfind(|line| line.starts_with('#')) {
                println!("{name}: {line}");
            }
        }
    }
    Ok(worked)
}

/// The time of processors that a process has had, with all of its threads.
fn time_of(process: u32) -> Option<Duration> {
    worked(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// The same, from the text of that file (proc(5)): the fields 14 and 15 are ticks of 10 ms. The name of the program, in
/// parentheses, may contain spaces.
fn worked(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11);
    let ticks = ticks.next()?.parse::<u64>().ok()? + ticks.next()?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 10))
}

fn number_behind(text: &str, name: &str) -> Option<u64> {
    text.lines().rev().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// The number of executions in the fuzzer's last line, `#123  NEW ...`.
fn last_number(text: &str) -> Option<u64> {
    let line = text.lines().rfind(|line| line.starts_with('#'))?;
    line[1..].split_whitespace().next()?.parse().ok()
}

/// How many lines of the door the inputs of these folders reach, and how many there are.
fn coverage(places: &Places, target: &Target, program: &Path, inputs: &[&Path], keeps: bool) -> Result<(usize, usize)> {
    let covered = folder(places).join(format!("{}.covered", target.name));
    let _ = fs::remove_file(&covered);
    let folders: Vec<String> = inputs.iter().map(|folder| folder.display().to_string()).collect();
    let log = File::create(folder(places).join(format!("{}.coverage.log", target.name)))?;
    let mut command = test(program, target, log)?;
    command.env("DUNLIN_FUZZ_INPUTS", folders.join("\n")).env("DUNLIN_FUZZ_CORPUS", &folders[0]);
    run(command.env("DUNLIN_FUZZ_COVERED", &covered))?;
    let text = fs::read_to_string(&covered).with_context(|| format!("no {}", covered.display()))?;
    let of = |kind: &'static str| text.lines().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '));

    if keeps {
        let new = |line: &str| {
            let (places, path) = line.split_once(' ')?;
            let places = places.parse::<usize>().ok().filter(|places| *places >= WORTH_KEEPING)?;
            Some((places, PathBuf::from(path))).filter(|(_, path)| !path.starts_with(inputs[0]))
        };
        let mut new: Vec<(usize, PathBuf)> = of("adds").filter_map(new).collect();
        new.sort_by_key(|(places, _)| std::cmp::Reverse(*places));
        for (_, path) in new.iter().take(MOST_KEPT) {
            let name = path.file_name().context("an input has a name")?;
            fs::copy(path, inputs[0].join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }

    // The program was loaded somewhere; its file counts from the start.
    let address = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).context("not an address");
    let elf = fs::read(program)?;
    let file = elf::ElfBytes::<elf::endian::LittleEndian>::minimal_parse(&elf)?;
    let section = file.section_header_by_name("__sancov_pcs")?.context("the program has no counters")?;
    let start = address(of("start").next().context("the target has not said where it was")?)?;
    let base = start.wrapping_sub(section.sh_addr);
    let mut all = Vec::new();
    for (kind, is_reached) in [("reached", true), ("missed", false)] {
        for place in of(kind) {
            all.push((address(place)?.wrapping_sub(base), is_reached));
        }
    }
    let lines = sources(program, all.iter().map(|(place, _)| *place))?;
    let is_of_door = |line: &str| {
        target.door.iter().any(|door| line.contains(&format!("/{door}")))
            && !line.contains("/tests/")
            && !line.contains("/tests.rs")
    };
    // A line counts once, however often it was compiled: generic code is, for types of other tests, too.
    let mut door: BTreeMap<&str, bool> = BTreeMap::new();
    for ((_, is_reached), line) in all.iter().zip(&lines).filter(|(_, line)| is_of_door(line)) {
        *door.entry(line.split(' ').next().unwrap_or(line)).or_default() |= is_reached;
    }
    Ok((door.values().filter(|is_reached| **is_reached).count(), door.len()))
}

/// File and line of each address.
fn sources(program: &Path, addresses: impl Iterator<Item = u64>) -> Result<Vec<String>> {
    let asked: Vec<String> = addresses.map(|address| format!("{address:#x}\n")).collect();
    let mut child = Command::new("addr2line")
        .arg("-e")
        .arg(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("coverage is told by addr2line (Debian package binutils)")?;
    let mut to = child.stdin.take().context("it has an input")?;
    let from = BufReader::new(child.stdout.take().context("it has an output")?);
    let asking = thread::spawn(move || asked.iter().try_for_each(|line| to.write_all(line.as_bytes())));
    let lines = from.lines().collect::<std::io::Result<Vec<String>>>()?;
    asking.join().map_err(|_| anyhow::anyhow!("a panic, see above"))??;
    child.wait()?;
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::time::Duration;

    use super::{TARGETS, count, duration, last_number, number_behind, side_by_side, worked};

    #[test]
    fn times_have_a_unit() {
        let seconds = |text| duration(text).map(|time: Duration| time.as_secs());
        assert_eq!(["90s", "10m", "2h", "7"].map(seconds), [90, 600, 7200, 7].map(Some));
        assert_eq!(["", "m", "0m", "1d", "-1s", "99999999999999999999h"].map(seconds), [None; 6]);
    }

    #[test]
    fn each_target_has_a_corpus_and_a_test_and_each_corpus_a_target() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for target in &TARGETS {
            let corpus = root.join("fuzz/corpus").join(target.name);
            assert!(count(&corpus) > 0, "{} has no corpus", target.name);
            for door in target.door {
                let (folder, start) = door.rsplit_once('/').expect("a path");
                let mut files = std::fs::read_dir(root.join(folder)).expect("the folder is there");
                let is_there =
                    files.any(|file| file.expect("readable").file_name().to_string_lossy().starts_with(start));
                assert!(is_there, "{}: no {door}", target.name);
            }
        }
        let names: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_string()).collect();
        let folders = std::fs::read_dir(root.join("fuzz/corpus")).expect("the folder is there");
        let corpora: BTreeSet<String> =
            folders.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect();
        assert_eq!(corpora, names);
    }

    #[test]
    fn targets_are_done_once_each_and_told_in_their_order_however_many_at_a_time() {
        let targets: Vec<_> = TARGETS.iter().collect();
        for jobs in [1, 2, 100] {
            let names = side_by_side(jobs, &targets, |target| Ok(target.name)).expect("nothing fails");
            assert_eq!(names, targets.iter().map(|target| target.name).collect::<Vec<_>>());
        }
        let fails = |target: &super::Target| if target.name == "uart" { anyhow::bail!("no") } else { Ok(()) };
        assert!(side_by_side(2, &targets, fails).is_err());
    }

    #[test]
    fn time_of_processors_is_that_of_user_and_kernel() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 5 0 0 0 250 50 9 9 20 0 1 0 3 4 5\n";
        assert_eq!(worked(stat), Some(Duration::from_secs(3)));
        assert_eq!((worked(""), worked("7 (x) S 1")), (None, None));
    }

    #[test]
    fn figures_are_read_from_the_fuzzers_words() {
        let text = "#2\tINITED cov: 5\n#1234\tNEW    cov: 9 ft: 10\nDone\nstat::number_of_executed_units: 5678\n";
        assert_eq!(number_behind(text, "stat::number_of_executed_units:"), Some(5678));
        assert_eq!(last_number(text), Some(1234));
        assert_eq!((number_behind("", "x"), last_number("nothing")), (None, None));
    }
}
