//! `cargo xtask image-matrix`: starts the default VM's image on many PCs of QEMU, and prints on which of them it
//! started.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, Places, Wanted};
use crate::emulators::{QEMU_10, QEMU_11};

const HELP: &str = "\
cargo xtask image-matrix [--parent] [--json] [--list] [--limit SECONDS] [--image FILE] [--help] [WORD..]

Starts the image that `dunlin image` makes on each PC of 1, 2 and 8 CPUs, with 1 and 6 GiB, from BIOS (SeaBIOS) and UEFI (OVMF), as a CD
and as a USB disk, with this machine's QEMU and with QEMU 10 and 11 of newer Debians, which are unpacked in the user's cache. Each
has five minutes to boot Debian in the default VM and to turn itself off. PCs that have the most in common with none before come first.

  WORD..           only PCs with these. Words of one line are alternatives, and a line without a word given does not matter:
                     qemu, qemu-10, qemu-11
                     cpus-1, cpus-2, cpus-8
                     1G, 6G (with --parent 2G, 6G)
                     bios, uefi
                     cd, usb
  --parent         an image with a second entry for `vms/parent.toml`, which is chosen in the menu. In the parent's shell a guest is
                   started by QEMU, and then the parent is turned off. `make parent` must have been run
  --json           one line of JSON for each PC on standard output
  --list           the PCs, in the order in which they are started
  --limit SECONDS  for each PC; 300 unless it says otherwise
  --image FILE     this image, made before by `dunlin image --vcpus 2` (with --parent: and `--also vms/parent.toml`); nothing is built

The status is 0 if the image started on all of them. Serial logs are in target/image-matrix.
";

/// Debian's UEFI for QEMU: its code, and the variables that it changes.
const UEFI: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];

/// How long a PC may run unless `--limit` says otherwise.
const LIMIT: Duration = Duration::from_secs(300);

/// The variants of a PC: each word stands for arguments of QEMU.
const QEMUS: [&str; 3] = ["qemu", "qemu-10", "qemu-11"];
const CPUS: [(&str, &[&str]); 3] = [("cpus-2", &["-smp", "2"]), ("cpus-1", &["-smp", "1"]), ("cpus-8", &["-smp", "8"])];
const MEMORY: [(&str, &[&str]); 2] = [("1G", &["-m", "1G"]), ("6G", &["-m", "6G"])];
/// For a parent, who has 1 GiB.
const PARENTS_MEMORY: [(&str, &[&str]); 2] = [("2G", &["-m", "2G"]), ("6G", &["-m", "6G"])];
const FIRMWARE: [&str; 2] = ["bios", "uefi"];
const MEDIA: [&str; 2] = ["cd", "usb"];

/// A PC, by its words, and the arguments for its CPUs and memory.
struct Pc {
    words: [&'static str; 5],
    arguments: Vec<&'static str>,
}

struct Started {
    complaints: Vec<String>,
    wall: Duration,
}

/// The options of the command line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wishes<'a> {
    words: Vec<&'a str>,
    limit: Option<Duration>,
    image: Option<PathBuf>,
    is_parent: bool,
    is_json: bool,
    is_list: bool,
    is_help: bool,
}

impl<'a> Wishes<'a> {
    fn read(arguments: &'a [String]) -> Result<Self> {
        let mut wishes = Wishes::default();
        let mut arguments = arguments.iter().map(String::as_str);
        while let Some(argument) = arguments.next() {
            match argument {
                "--help" | "-h" => wishes.is_help = true,
                "--parent" => wishes.is_parent = true,
                "--json" => wishes.is_json = true,
                "--list" => wishes.is_list = true,
                "--limit" => {
                    let seconds = arguments.next().and_then(|word| word.parse().ok()).filter(|&seconds| seconds > 0);
                    wishes.limit = Some(Duration::from_secs(seconds.context("--limit takes a number of seconds")?));
                }
                "--image" => {
                    wishes.image = Some(PathBuf::from(arguments.next().context("--image takes a file")?));
                }
                word => wishes.words.push(word),
            }
        }
        Ok(wishes)
    }
}

/// All of them, those with two CPUs first.
fn all(is_parent: bool) -> Vec<Pc> {
    let mut pcs = Vec::new();
    for (cpus, smp) in CPUS {
        for qemu in QEMUS {
            for (memory, bytes) in if is_parent { PARENTS_MEMORY } else { MEMORY } {
                for firmware in FIRMWARE {
                    for medium in MEDIA {
                        let words = [qemu, cpus, memory, firmware, medium];
                        pcs.push(Pc { words, arguments: [smp, bytes].concat() });
                    }
                }
            }
        }
    }
    pcs
}

/// Those with these words: of each kind of word one of those given, if any is.
fn chosen(words: &[&str], is_parent: bool) -> Result<Vec<Pc>> {
    let mut pcs = all(is_parent);
    if let Some(unknown) = words.iter().find(|word| !pcs.iter().any(|pc| pc.words.contains(word))) {
        bail!("no PC has `{unknown}`; `cargo xtask image-matrix --help` tells the words");
    }
    for kind in 0..5 {
        let of_kind: Vec<&str> = pcs.iter().map(|pc| pc.words[kind]).filter(|word| words.contains(word)).collect();
        pcs.retain(|pc| of_kind.is_empty() || of_kind.contains(&pc.words[kind]));
    }
    Ok(pcs)
}

/// The same PCs, in an order that covers most early: each next PC has the most pairs of words that no earlier one has.
fn most_different_first(mut pcs: Vec<Pc>) -> Vec<Pc> {
    let mut seen = HashSet::new();
    let mut ordered = Vec::new();
    while !pcs.is_empty() {
        let news = |pc: &Pc| pc.pairs().filter(|pair| !seen.contains(pair)).count();
        let most = pcs.iter().map(news).max();
        // Of several the first.
        let next = pcs.iter().position(|pc| Some(news(pc)) == most).unwrap_or_default();
        let next = pcs.remove(next);
        seen.extend(next.pairs());
        ordered.push(next);
    }
    ordered
}

pub(crate) fn command(places: &Places, rest: &[String]) -> Result<ExitCode> {
    let Wishes { words, limit, image, is_parent, is_json, is_list, is_help } = Wishes::read(rest)?;
    if is_help {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let pcs = most_different_first(chosen(&words, is_parent)?);
    if is_list {
        pcs.iter().for_each(|pc| println!("{}", pc.words.join(" ")));
        return Ok(ExitCode::SUCCESS);
    }

    artifacts::run(Command::new(places.root.join("xtask/setup.sh")).args(["image", "uefi"]))?;
    let folder = places.target.join("image-matrix");
    fs::create_dir_all(&folder)?;
    let image = image.map_or_else(|| make_image(places, &folder, is_parent), Ok)?;

    let mut all_well = true;
    let mut table = format!("{:32} {:8} {:>8}\n", "PC", "status", "wall");
    for (at, pc) in (1..).zip(&pcs) {
        let name = pc.words.join(" ");
        let talk = if is_parent { TALK_WITH_A_PARENT } else { &[] };
        let Started { complaints, wall } = pc.start(&folder, &image, limit.unwrap_or(LIMIT), talk)?;
        let status = if complaints.is_empty() { "passed" } else { "FAILED" };
        eprintln!(
            "{at:2} of {}: {name:32} {status} {:6.1} s  {}",
            pcs.len(),
            wall.as_secs_f64(),
            complaints.join("; ")
        );
        if is_json {
            println!(
                "{}",
                serde_json::json!({
                    "pc": pc.words, "status": status.to_lowercase(), "wall_seconds": wall.as_secs_f64(), "complaints": complaints,
                })
            );
        }
        table += &format!("{name:32} {status:8} {:>6.1} s  {}\n", wall.as_secs_f64(), complaints.join("; "));
        all_well &= complaints.is_empty();
    }
    eprint!("\n{table}");
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the contents of the image, and creates the image in this folder.
fn make_image(places: &Places, folder: &Path, is_parent: bool) -> Result<PathBuf> {
    artifacts::build(places, Wanted::ForDefaultVm)?;
    let image = folder.join(if is_parent { "parent.iso" } else { "dunlin.iso" });
    let mut make = Command::new(places.tool());
    make.args(["image", "--vcpus", "2", "--output"]).arg(&image).env("CARGO_TARGET_DIR", &places.target);
    if is_parent {
        make.args(["--also", "vms/parent.toml"]);
    }
    artifacts::output(make.current_dir(&places.root)).context("no image")?;
    Ok(image)
}

impl Pc {
    /// The pairs of its words.
    fn pairs(&self) -> impl Iterator<Item = [&'static str; 2]> {
        let words = self.words;
        (0..words.len()).flat_map(move |first| (0..first).map(move |second| [words[second], words[first]]))
    }

    /// Starts the PC, has the talk with it on its serial line, waits until it turns itself off, and returns what was
    /// wrong.
    fn start(&self, folder: &Path, image: &Path, limit: Duration, talk: &[Turn]) -> Result<Started> {
        let [qemu, _, _, firmware, medium] = self.words;
        let program = match qemu {
            "qemu-10" => QEMU_10.unpack()?.programs().join(PROGRAM),
            "qemu-11" => QEMU_11.unpack()?.programs().join(PROGRAM),
            _ => PathBuf::from(PROGRAM),
        };
        let serial = folder.join(format!("{}.log", self.words.join("-")));
        let _ = fs::remove_file(&serial);
        let mut command = Command::new("timeout");
        command
            .arg(limit.as_secs().to_string())
            .arg(program)
            .args([
                "-accel",
                "tcg,thread=multi",
                "-machine",
                "q35",
                "-cpu",
                "max",
                "-display",
                "none",
                "-nodefaults",
                "-no-reboot",
            ])
            .args(["-serial", "stdio"])
            .args(&self.arguments);
        if medium == "cd" {
            command.arg("-cdrom").arg(image);
        } else {
            command
                .args(["-drive", &format!("if=none,id=stick,format=raw,readonly=on,file={}", image.display())])
                .args(["-device", "qemu-xhci", "-device", "usb-storage,drive=stick"]);
        }
        if firmware == "uefi" {
            // The firmware stores how it started the last time, so each start gets a fresh copy.
            let variables = folder.join("variables.fd");
            fs::copy(UEFI[1], &variables).with_context(|| format!("no {}", UEFI[1]))?;
            command
                .args(["-drive", &format!("if=pflash,format=raw,readonly=on,file={}", UEFI[0])])
                .args(["-drive", &format!("if=pflash,format=raw,file={}", variables.display())]);
        }
        let started = Instant::now();
        let mut pc = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot run `timeout`")?;
        let (line, answers) = pc.stdout.take().zip(pc.stdin.take()).context("no serial line")?;
        let log = converse(line, answers, talk)?;
        fs::write(&serial, &log)?;
        let status = pc.wait()?;
        Ok(Started { complaints: complaints(status.code(), &log, talk), wall: started.elapsed() })
    }
}

/// Words on the serial line, and what is answered to them.
type Turn = (&'static str, &'static str);

/// The second entry of GRUB's menu, and then the parent's shell.
const TALK_WITH_A_PARENT: &[Turn] = &[
    // The last line below the menu. The next entry is one byte here: with UEFI two programs read the line, firmware and
    // GRUB, and a longer sequence may come in pieces.
    ("executed automatically in", "\x0e"),
    ("*Dunlin: parent", "\r"),
    (
        ":/root# ",
        "dmesg | grep 'running as'; ls -l /dev/mshv; guest-microvm; echo the guest has ended with $?; poweroff -f\n",
    ),
];

/// Reads the line to its end, and answers. Each turn is taken once, in order. Returns all that was read.
fn converse(mut line: impl Read, mut answers: impl Write, talk: &[Turn]) -> Result<String> {
    let (mut log, mut heard, mut bytes) = (Vec::new(), 0, [0; 4096]);
    let mut turns = talk.iter();
    let mut turn = turns.next();
    loop {
        let count = line.read(&mut bytes).context("the serial line")?;
        if count == 0 {
            return Ok(String::from_utf8_lossy(&log).into_owned());
        }
        log.extend(&bytes[..count]);
        while let Some((words, answer)) = turn {
            let new = String::from_utf8_lossy(&log[heard..]);
            if !new.contains(words) {
                break;
            }
            heard = log.len();
            // A PC that has ended does not listen. What is missing in its log tells.
            let _ = answers.write_all(answer.as_bytes()).and_then(|()| answers.flush());
            turn = turns.next();
        }
    }
}

const PROGRAM: &str = "qemu-system-x86_64";

/// The errors for this status of `timeout` and this log.
fn complaints(status: Option<i32>, log: &str, talk: &[Turn]) -> Vec<String> {
    /// `timeout` had to end the program.
    const TIME_LIMIT: i32 = 124;
    let wanted = if talk.is_empty() {
        ["CPUs online: 2", "Parallel job: 2 of 2 workers finished", "all VMs have ended"]
    } else {
        ["running as L1VH partition", "the guest has ended with 0", "all VMs have ended"]
    };
    let missing = wanted.into_iter().filter(|words| !log.contains(words)).map(|words| format!("no \"{words}\""));
    let end = match status {
        Some(0) => None,
        Some(TIME_LIMIT) => Some("still running at the time limit".to_string()),
        Some(status) => Some(format!("ended with status {status}")),
        None => Some("ended by a signal".to_string()),
    };
    end.into_iter().chain(missing).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::{TALK_WITH_A_PARENT, Wishes, all, chosen, complaints, converse, most_different_first};

    #[test]
    fn each_pc_is_there_once_and_words_choose_among_them() {
        let mut names: Vec<_> = all(false).iter().map(|pc| pc.words.join(" ")).collect();
        assert_eq!(names.len(), 72);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 72);
        assert_eq!(chosen(&["qemu-11", "uefi", "usb", "cpus-8"], false).expect("known").len(), 2);
        assert!(chosen(&["floppy"], false).is_err());
    }

    #[test]
    fn words_of_one_kind_are_alternatives() {
        let names: Vec<_> =
            chosen(&["qemu", "qemu-11", "1G"], false).expect("known").iter().map(|pc| pc.words).collect();
        assert_eq!(names.len(), 24);
        assert!(names.iter().all(|words| words[0] != "qemu-10" && words[2] == "1G"));
    }

    #[test]
    fn first_pcs_have_each_pair_of_words() {
        let of_two = chosen(&["qemu", "qemu-11"], false).expect("known");
        let all_pairs: HashSet<_> = of_two.iter().flat_map(super::Pc::pairs).collect();
        let ordered = most_different_first(of_two);
        assert_eq!(ordered.len(), 48);
        let early: HashSet<_> = ordered.iter().take(8).flat_map(super::Pc::pairs).collect();
        assert_eq!(early, all_pairs);
    }

    #[test]
    fn limit_is_a_number_of_seconds_and_an_image_is_named() {
        let read = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|&word| word.to_string()).collect();
            Wishes::read(&words).map(|wishes| (wishes.limit, wishes.words.len())).ok()
        };
        assert_eq!(read(&["--limit", "900", "usb"]), Some((Some(Duration::from_secs(900)), 1)));
        assert_eq!(read(&["usb"]), Some((None, 1)));
        assert_eq!(read(&["--limit"]), None);
        assert_eq!(read(&["--limit", "0"]), None);
        assert_eq!(read(&["--limit", "usb"]), None);
        assert_eq!(read(&["--image", "x.iso", "usb"]), Some((None, 1)));
        assert_eq!(read(&["usb", "--image"]), None);
    }

    #[test]
    fn pcs_for_a_parent_have_memory_for_it() {
        assert_eq!(chosen(&["2G"], true).expect("known").len(), 36);
        assert!(chosen(&["1G"], true).is_err());
    }

    #[test]
    fn each_turn_is_answered_once_in_order() {
        let line = "the second one first: b ... a ... b again, b";
        let mut answers = Vec::new();
        let log = converse(line.as_bytes(), &mut answers, &[("a", "1"), ("b", "2"), ("b", "3")]).expect("can be read");
        assert_eq!(log, line);
        // All came with one read, so what is behind the first answer was said before it.
        assert_eq!(answers, b"1");
    }

    #[test]
    fn parent_is_as_wanted_when_its_guest_was() {
        let log = "Hyper-V: running as L1VH partition\nthe guest has ended with 0\nall VMs have ended\n";
        assert_eq!(complaints(Some(0), log, TALK_WITH_A_PARENT), [""; 0]);
        assert_eq!(complaints(Some(0), &log.replace("with 0", "with 1"), TALK_WITH_A_PARENT).len(), 1);
    }

    #[test]
    fn pc_that_did_its_work_and_went_off_is_as_wanted() {
        let log = "CPUs online: 2\nParallel job: 2 of 2 workers finished\nall VMs have ended\n";
        assert_eq!(complaints(Some(0), log, &[]), [""; 0]);
        assert_eq!(complaints(Some(124), log, &[]), ["still running at the time limit"]);
        assert_eq!(complaints(Some(0), "", &[]).len(), 3);
    }
}
