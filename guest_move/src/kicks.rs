//! Kicks for vCPUs that QEMU waits for.
//!
//! QEMU kicks each vCPU once to stop it, and one that handles an exit at that moment loses the kick: then QEMU waits
//! for ever. So the vCPUs are kicked as long as QEMU waits. Not more often: a kicked vCPU cannot go on before it has
//! had QEMU's lock, and QEMU holds that while it reads the log of written pages, which would stop the whole guest for
//! as long.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::system;

/// How often somebody looks whether QEMU waits.
pub(crate) const PERIOD: Duration = Duration::from_millis(10);
/// How often somebody looks for new threads of QEMU. To open their files costs more than to read them.
const SEARCH: Duration = Duration::from_millis(100);
/// After so long without a kick there is one whether QEMU seems to wait or not: another QEMU may wait in another way.
const LONGEST: Duration = Duration::from_secs(5);

/// Whoever kicks the vCPUs of a QEMU.
#[derive(Debug)]
pub(crate) struct Kicks {
    /// QEMU's number.
    pid: u32,
    /// Its threads, by their folders, and of those that may stop vCPUs the file that tells what they do.
    threads: HashMap<PathBuf, Option<File>>,
    /// When they were looked for.
    searched: Option<Instant>,
    /// What QEMU has waited for at the last look.
    waited: Option<String>,
    /// When there was a kick for the last time.
    last: Instant,
}

/// What a thread does, by `/proc/PID/task/TID/syscall`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Doing {
    /// It runs, or is in a call of a device.
    Works,
    /// It waits for another thread without a limit, at this address.
    Waits(String),
    /// It waits for anything else.
    Sleeps,
}

impl Kicks {
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, threads: HashMap::new(), searched: None, waited: None, last: Instant::now() }
    }

    /// Kicks these threads, which run vCPUs, if QEMU waits for one. Call it each [`PERIOD`].
    pub(crate) fn kick(&mut self, vcpus: impl Iterator<Item = u32>) {
        let now = Instant::now();
        if self.searched.is_none_or(|then| now - then >= SEARCH) {
            self.search(Path::new(&format!("/proc/{}/task", self.pid)));
            self.searched = Some(now);
        }
        let doing = self.look();
        if self.is_due(&doing, now) {
            vcpus.for_each(|thread| system::kick(self.pid, thread));
        }
    }

    /// Finds the threads that may stop vCPUs: the first one, at a command, and that of a migration, at its end.
    fn search(&mut self, tasks: &Path) {
        let folders = fs::read_dir(tasks).into_iter().flatten().flatten();
        let mut folders: Vec<PathBuf> = folders.map(|task| task.path()).collect();
        self.threads.retain(|folder, _| folders.contains(folder));
        folders.retain(|folder| !self.threads.contains_key(folder));
        let name = |folder: &Path| fs::read_to_string(folder.join("comm")).unwrap_or_default();
        let first = tasks.join(self.pid.to_string());
        let usual = name(&first);
        for folder in folders {
            let (is_first, name) = (folder == first, name(&folder));
            // One that has just begun gives itself its name.
            if is_first || name != usual {
                let may_stop = is_first || name.starts_with("mig");
                let file = if may_stop { File::open(folder.join("syscall")).ok() } else { None };
                self.threads.insert(folder, file);
            }
        }
    }

    /// What these threads do.
    fn look(&self) -> Vec<Doing> {
        let what = |file: &File| {
            // A number, eight more in hexadecimal, and spaces.
            let mut line = [0; 256];
            let count = file.read_at(&mut line, 0).unwrap_or_default();
            doing(std::str::from_utf8(&line[..count]).unwrap_or_default())
        };
        self.threads.values().flatten().map(what).collect()
    }

    /// QEMU waits if a thread has done so at the last look, too, and none works.
    fn is_due(&mut self, doing: &[Doing], now: Instant) -> bool {
        let works = doing.contains(&Doing::Works);
        let waits = doing.iter().find_map(|doing| match doing {
            Doing::Waits(address) if !works => Some(address.clone()),
            _ => None,
        });
        let is_due = waits.is_some() && waits == self.waited || now - self.last >= LONGEST;
        self.waited = waits;
        if is_due {
            self.last = now;
        }
        is_due
    }
}

/// What a line of the kernel means: the number of a system call and its arguments, or that the thread runs
/// (proc_pid_syscall(5)).
fn doing(line: &str) -> Doing {
    let mut words = line.split_whitespace();
    let call: Option<libc::c_long> = words.next().and_then(|word| word.parse().ok());
    let arguments: Vec<&str> = words.collect();
    match call {
        None if line.starts_with("running") => Doing::Works,
        Some(libc::SYS_ioctl) => Doing::Works,
        // The fourth argument is the limit (futex(2)).
        Some(libc::SYS_futex) if arguments.get(3) == Some(&"0x0") => Doing::Waits(arguments[0].to_string()),
        _ => Doing::Sleeps,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(address: &str) -> Doing {
        Doing::Waits(address.to_string())
    }

    #[test]
    fn qemu_that_waits_at_two_looks_is_kicked_and_any_other_after_a_long_while() {
        let began = Instant::now();
        let mut kicks = Kicks::of(1);
        kicks.last = began;
        let looks: [(&[Doing], bool); 12] = [
            (&[Doing::Sleeps], false),
            (&[Doing::Sleeps, waits("0x1")], false),
            (&[Doing::Sleeps, waits("0x1")], true),
            (&[Doing::Sleeps, waits("0x1")], true),
            (&[Doing::Sleeps, waits("0x2")], false),
            (&[Doing::Works, waits("0x2")], false),
            (&[waits("0x2"), Doing::Sleeps], false),
            (&[waits("0x2"), Doing::Sleeps], true),
            (&[waits("0x2"), Doing::Works], false),
            (&[Doing::Works], false),
            (&[], false),
            (&[waits("0x2")], false),
        ];
        let mut now = began;
        for (doing, is_due) in looks {
            now += PERIOD;
            assert_eq!(kicks.is_due(doing, now), is_due, "{doing:?}");
        }
        let kicked = began + 8 * PERIOD;
        assert!(!kicks.is_due(&[Doing::Works], kicked + LONGEST - PERIOD));
        assert!(kicks.is_due(&[Doing::Works], kicked + LONGEST));
        assert!(!kicks.is_due(&[Doing::Works], kicked + LONGEST + PERIOD));
    }

    #[test]
    fn lines_of_the_kernel_are_understood() {
        for (line, meant) in [
            ("running\n", Doing::Works),
            (&format!("{} 0x10 0xb807 0x0 0x0 0x0 0x0 0x7ff 0x7ff\n", libc::SYS_ioctl), Doing::Works),
            (&format!("{} 0x5581 0x189 0x1 0x0 0x0 0xffffffff 0x7ff 0x7ff\n", libc::SYS_futex), waits("0x5581")),
            (&format!("{} 0x5581 0x189 0x1 0x7ffe 0x0 0xffffffff 0x7ff 0x7ff", libc::SYS_futex), Doing::Sleeps),
            (&format!("{} 0x3 0x7ffe 0x0 0x0 0x8 0x0 0x7ff 0x7ff", libc::SYS_ppoll), Doing::Sleeps),
            ("-1 0x7ffe 0x7fff", Doing::Sleeps),
            ("", Doing::Sleeps),
        ] {
            assert_eq!(doing(line), meant, "{line:?}");
        }
    }

    #[test]
    fn first_thread_and_that_of_a_migration_are_looked_at_as_long_as_they_are_there() {
        let tasks = tempfile::tempdir().expect("can be made");
        let thread = |number: u32, name: &str, call: &str| {
            let folder = tasks.path().join(number.to_string());
            fs::create_dir_all(&folder).expect("can be made");
            fs::write(folder.join("comm"), name).expect("can be written");
            fs::write(folder.join("syscall"), call).expect("can be written");
        };
        let futex = format!("{} 0xa0 0x189 0x1 0x0 0x0 0xffffffff 0x7ff 0x7ff\n", libc::SYS_futex);
        thread(1, "qemu-system-x86\n", "running\n");
        thread(2, "call_rcu\n", &futex);
        thread(5, "qemu-system-x86\n", &futex);
        thread(3, "CPU 0/MSHV\n", "running\n");
        let mut kicks = Kicks::of(1);
        kicks.search(tasks.path());
        assert_eq!(kicks.look(), [Doing::Works]);
        thread(1, "qemu-system-x86\n", "271 0x1");
        assert_eq!(kicks.look(), [Doing::Sleeps], "the file is read anew");
        thread(5, "mig/src/main\n", &futex);
        kicks.search(tasks.path());
        let mut seen = kicks.look();
        seen.sort_by_key(|doing| *doing == Doing::Sleeps);
        assert_eq!(seen, [waits("0xa0"), Doing::Sleeps]);
        fs::remove_dir_all(tasks.path().join("5")).expect("is there");
        kicks.search(tasks.path());
        assert_eq!(kicks.look(), [Doing::Sleeps]);
        kicks.search(Path::new("/nowhere/at/all"));
        assert_eq!(kicks.look(), []);
    }

    #[test]
    fn thread_that_waits_for_another_is_seen_to_wait() {
        let (ended, wait) = std::sync::mpsc::channel::<()>();
        let waiter = std::thread::Builder::new().name("waits".to_string()).spawn(move || wait.recv());
        let is_it = |folder: &PathBuf| fs::read_to_string(folder.join("comm")).is_ok_and(|name| name == "waits\n");
        let call = || {
            let threads = fs::read_dir("/proc/self/task").expect("is there").flatten().map(|task| task.path());
            threads.into_iter().find(is_it).and_then(|folder| fs::read_to_string(folder.join("syscall")).ok())
        };
        let until = Instant::now() + Duration::from_secs(60);
        while !call().is_some_and(|call| matches!(doing(&call), Doing::Waits(_))) {
            assert!(Instant::now() < until, "it waits");
            std::thread::sleep(PERIOD);
        }
        drop(ended);
        let heard = waiter.expect("can be started").join().expect("it ends");
        assert!(heard.is_err(), "nobody has said anything");
    }
}
