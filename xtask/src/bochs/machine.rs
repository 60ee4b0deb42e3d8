//! A PC in Bochs: its configuration, its process, and its output.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::emulators::Unpacked;

/// Instructions per second of the machine's own time. Its TSC and its timers count them, so its behaviour depends
/// little on the speed of emulation.
const INSTRUCTIONS_PER_SECOND: u32 = 50_000_000;
/// Maximum size of a log. A machine in a reset loop would write without end.
const LARGEST_LOG: u64 = 64 << 20;
/// How often a progress line is printed.
const PROGRESS: Duration = Duration::from_secs(5);

/// The machine.
pub(super) struct Machine<'a> {
    /// The processor, by Bochs' name.
    pub(super) model: &'a str,
    pub(super) bochs: &'a Unpacked,
    pub(super) image: &'a Path,
    pub(super) cpus: u32,
    pub(super) memory_mib: u32,
    pub(super) limit: Duration,
}

/// How a machine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It turned itself off by ACPI.
    Off,
    /// Bochs ended it for another reason, which is in its log.
    Ended,
    /// It was still running at its time limit.
    TimeLimit,
    /// It wrote too much output.
    TooMuchOutput,
}

impl End {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Off => "power off",
            Self::Ended => "ended by Bochs",
            Self::TimeLimit => "time limit",
            Self::TooMuchOutput => "too much output",
        }
    }
}

/// Result of a run.
pub(super) struct Outcome {
    pub(super) end: End,
    /// Output of the first serial port.
    pub(super) serial: String,
    /// Clock ticks of the machine. Each is one instruction of one CPU, or of all that are not halted.
    pub(super) ticks: u64,
    pub(super) wall: Duration,
}

impl Machine<'_> {
    /// Runs the machine to its end in `folder`, which is empty. Calls `tell` with the progress from time to time.
    pub(super) fn run(&self, folder: &Path, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
        let [config, log, serial] = ["config", "bochs.log", "serial.log"].map(|name| folder.join(name));
        fs::write(&config, self.configuration(&log, &serial))?;
        let messages = File::create(folder.join("messages"))?;
        let started = Instant::now();
        let child = Command::new(self.bochs.programs().join("bochs-bin"))
            .args(["-q", "-f"])
            .arg(&config)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(messages.try_clone()?)
            .stderr(messages)
            .spawn()
            .context("Bochs cannot be started")?;
        let mut process = Process(child);
        if let Some(mut input) = process.0.stdin.take() {
            // A Bochs with the debugger waits for this input.
            let _ = input.write_all(b"c\nq\n");
        }

        let mut told = started;
        let cut_off = loop {
            if process.0.try_wait()?.is_some() {
                break None;
            }
            if started.elapsed() > self.limit {
                break Some(End::TimeLimit);
            }
            if [&log, &serial].into_iter().any(|file| fs::metadata(file).is_ok_and(|file| file.len() > LARGEST_LOG)) {
                break Some(End::TooMuchOutput);
            }
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                tell(&format!("{:3} s  {}", started.elapsed().as_secs(), last_line(&text(&serial))));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        drop(process);
        let wall = started.elapsed();
        let log = text(&log);
        let end = cut_off.unwrap_or(if log.contains(SOFT_OFF) { End::Off } else { End::Ended });
        Ok(Outcome { end, serial: text(&serial), ticks: ticks(&log), wall })
    }

    fn configuration(&self, log: &Path, serial: &Path) -> String {
        let Self { model, bochs, image, cpus, memory_mib, .. } = self;
        let file = |path: &str| bochs.file(path).display().to_string();
        let mut text = String::new();
        let mut line = |words: String| {
            let _ = writeln!(text, "{words}");
        };
        line("plugin_ctrl: unmapped=1, biosdev=1, speaker=0, parallel=0, serial=1, iodebug=1".into());
        line("config_interface: textconfig".into());
        // The one display that needs neither a terminal nor a window system.
        line("display_library: rfb, options=\"timeout=0\"".into());
        line(format!("romimage: file={}", file("usr/share/bochs/BIOS-bochs-latest")));
        line(format!("vgaromimage: file={}", file("usr/share/bochs/VGABIOS-lgpl-latest")));
        // That display has no 32-bit pixels, which GRUB would request. Without them GRUB 2.06 uses 8 bits, and crashes.
        line("vga: extension=none".into());
        line(format!("memory: guest={memory_mib}, host={memory_mib}"));
        // With several CPUs an interrupt may come between CPU 0's STI and its HLT (docs/real-machine.md). That of a
        // timer with a deadline would be lost for good; that of one that counts comes again.
        let excluded = if *cpus > 1 { ", exclude_features=\"tsc_deadline\"" } else { "" };
        line(format!(
            "cpu: model={model}, count={cpus}, ips={INSTRUCTIONS_PER_SECOND}, reset_on_triple_fault=0{excluded}"
        ));
        // The same date at each start.
        line("clock: sync=none, time0=1767225600".into());
        line("ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14".into());
        line(format!("ata0-master: type=cdrom, path={}, status=inserted", image.display()));
        line("boot: cdrom".into());
        line(format!("com1: enabled=1, mode=file, dev={}", serial.display()));
        line("pci: enabled=1, chipset=i440fx".into());
        for (kind, action) in [("panic", "fatal"), ("error", "ignore"), ("info", "ignore")] {
            line(format!("{kind}: action={action}"));
        }
        line(format!("log: {}", log.display()));
        text
    }
}

/// The line in Bochs' log when the machine has powered off.
const SOFT_OFF: &str = "ACPI control: soft power off";

/// The time of the log's last line, with which each begins: `02204044659i[CMOS  ] ...`.
fn ticks(log: &str) -> u64 {
    let digits = |line: &str| line.find(|c: char| !c.is_ascii_digit()).and_then(|end| line[..end].parse().ok());
    log.lines().rev().find_map(digits).unwrap_or(0)
}

fn text(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// The last readable line of a serial port's output.
fn last_line(serial: &str) -> String {
    const LONGEST: usize = 90;
    let line = serial.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    // GRUB's menu is made of escape sequences.
    let line = line.rsplit('\x1b').next().unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

/// A process that does not outlive this one, unless that is killed.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Where the runs leave their files.
pub(super) fn folder(results: &Path, run: &str) -> Result<PathBuf> {
    let folder = results.join(run);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::{last_line, ticks};

    #[test]
    fn time_is_that_of_the_last_line_with_one() {
        assert_eq!(ticks("00000000000i[      ] using\n02204044659i[SIM   ] quit_sim\nMore\n"), 2_204_044_659);
        assert_eq!(ticks(""), 0);
    }

    #[test]
    fn progress_is_a_line_that_can_be_read() {
        assert_eq!(last_line("a\n[  0.1] cpu0 info  up\r\n\n"), "[  0.1] cpu0 info  up");
        assert_eq!(last_line("\x1b[22;1H   executed in 2s.\x1b[5;78H"), "[5;78H");
        assert_eq!(last_line(""), "");
    }
}
