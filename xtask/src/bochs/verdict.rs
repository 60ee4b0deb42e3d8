//! Checks a run's serial output: expected words, and forbidden ones.

/// The expected output.
pub(super) struct Wants {
    /// Words that must appear.
    words: Vec<String>,
    /// Words that must not be.
    never: &'static [&'static str],
    /// How many guests must say that they found no error.
    times: usize,
}

/// What a guest says that found no error.
const CLEAN: &str = " failures=0";

/// A processor, by Bochs' name, and what the hypervisor says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processor {
    pub(super) model: &'static str,
    says: &'static str,
}

/// AMD's: SVM with next RIP and flush by ASID, which QEMU's emulation lacks. Intel's: VT-x, which it lacks at all.
pub(super) const PROCESSORS: [Processor; 2] = [
    Processor { model: "ryzen", says: "next RIP, flush by ASID" },
    Processor { model: "corei7_skylake_x", says: "VT-x with EPT" },
];

/// The hypervisor's last line.
const LAST: &str = "all VMs have ended";

/// A guest's output when it found an error, or could not continue.
const COMPLAINTS: &[&str] = &["violation ", "outcome=fail", "exception ", "panic", "error about=", "unsupported"];

impl Wants {
    /// Debian with this many vCPUs on this many CPUs.
    pub(super) fn debian(processor: Processor, cpus: u32, vcpus: u32) -> Self {
        let mut wants = Self::of_all(processor, cpus);
        wants.words.extend([
            format!("CPUs online: {vcpus}"),
            format!("Parallel job: {vcpus} of {vcpus} workers finished"),
            "exit=0".to_string(),
        ]);
        wants.never = &["panic", "BUG:", "Oops", "rcu: INFO"];
        wants
    }

    /// Debian's kernel, and how it protects its processes: by registers of the processor, which guests have where the
    /// hypervisor takes its steps.
    pub(super) fn weaknesses(processor: Processor, cpus: u32, has_steps: bool) -> Self {
        let mut wants = Self::of_all(processor, cpus);
        let says: &[&str] = match (processor == PROCESSORS[0], has_steps) {
            (true, true) => &["v2:Mitigation: Retpolines; IBPB", "store_bypass:Mitigation: Speculative Store Bypass"],
            (true, false) => &["v2:Mitigation: Retpolines; STIBP: disabled", "store_bypass:Vulnerable"],
            (false, true) => &["v2:Mitigation: Enhanced / Automatic IBRS; IBPB", "retbleed:Mitigation: Enhanced IBRS"],
            (false, false) => &["v2:Mitigation: Retpolines; STIBP: disabled", "retbleed:Vulnerable"],
        };
        wants.words.extend(says.iter().copied().chain(["exit=0"]).map(String::from));
        wants.never = &["panic", "BUG:", "Oops", "rcu: INFO"];
        wants
    }

    /// A parent that runs a guest.
    pub(super) fn parent(processor: Processor, cpus: u32) -> Self {
        let mut wants = Self::of_all(processor, cpus);
        let words = ["running as L1VH partition", "the guest has ended with 0", "exit=0"];
        wants.words.extend(words.map(String::from));
        wants.never = &["panic", "BUG:", "Oops", "rcu: INFO"];
        wants
    }

    /// A parent that logs another VM's writes. Only Intel's processor lists them.
    pub(super) fn logged(processor: Processor, cpus: u32) -> Self {
        let mut wants = Self::of_all(processor, cpus);
        let ways = ["pml", "hardware", "write-protect"].into_iter().skip(usize::from(processor == PROCESSORS[0]));
        wants.words.extend(ways.map(|way| format!("the copy by {way} is right")));
        wants.never = &["panic", "BUG:", "Oops", "rcu: INFO"];
        wants
    }

    /// Experiments of this many measuring guests; none may find an error.
    pub(super) fn experiments(processor: Processor, cpus: u32, guests: usize) -> Self {
        let mut wants = Self::of_all(processor, cpus);
        match guests {
            1 => {
                wants.times = 1;
                wants.words.push("done experiments=".to_string());
            }
            // One guest's last line may come in parts, with the hypervisor's between them; those before it do not.
            guests => wants.times = 2 * guests,
        }
        wants.never = COMPLAINTS;
        wants
    }

    fn of_all(processor: Processor, cpus: u32) -> Self {
        let words = vec![processor.says.to_string(), LAST.to_string(), format!("{cpus} pCPUs")];
        Self { words, never: &[], times: 0 }
    }

    /// The errors in this output, in words.
    pub(super) fn missing_in(&self, serial: &str) -> Vec<String> {
        let missing = self.words.iter().filter(|words| !serial.contains(words.as_str()));
        let missing = missing.map(|words| format!("it did not say \"{}\"", words.trim()));
        let clean = serial.matches(CLEAN).count();
        let missing = missing.chain(
            (clean < self.times).then(|| format!("it said \"{}\" {clean} times, not {}", CLEAN.trim(), self.times)),
        );
        let unwanted = serial.lines().filter(|line| self.never.iter().any(|words| line.contains(words)));
        missing.chain(unwanted.map(|line| format!("it said \"{}\"", line.trim_end()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{PROCESSORS, Wants};

    const BOOTED: &str = "[ 0.0] 2 pCPUs, 1 MiB free\n[ 0.0] Ryzen; next RIP, flush by ASID\nCPUs online: 4\r\n\
                          Parallel job: 4 of 4 workers finished\r\n exit=0\r\n[ 9.0] all VMs have ended\r\n";

    #[test]
    fn boot_that_says_all_is_as_wanted() {
        assert_eq!(Wants::debian(PROCESSORS[0], 2, 4).missing_in(BOOTED), [""; 0]);
    }

    #[test]
    fn what_is_missing_and_what_should_not_be_there_is_named() {
        let text = BOOTED.replace("exit=0", "exit=1") + "Kernel panic - not syncing\r\n";
        let complaints = Wants::debian(PROCESSORS[0], 2, 4).missing_in(&text);
        assert_eq!(complaints, ["it did not say \"exit=0\"", "it said \"Kernel panic - not syncing\""]);
        assert_eq!(Wants::debian(PROCESSORS[0], 1, 4).missing_in(BOOTED), ["it did not say \"1 pCPUs\""]);
    }

    #[test]
    fn experiment_that_finds_something_wrong_fails() {
        let text = "2 pCPUs; next RIP, flush by ASID\ndone experiments=1 failures=0\nall VMs have ended\n";
        assert_eq!(Wants::experiments(PROCESSORS[0], 2, 1).missing_in(text), [""; 0]);
        assert_eq!(Wants::experiments(PROCESSORS[0], 2, 2).missing_in(text).len(), 1, "the other guest said nothing");
        assert_eq!(Wants::experiments(PROCESSORS[0], 2, 2).missing_in(&text.repeat(4)), [""; 0]);
        let wrong = format!("{text}violation experiment=x of=y expected=gp seen=none judged=true\n");
        assert_eq!(Wants::experiments(PROCESSORS[0], 2, 1).missing_in(&wrong).len(), 1);
        assert_eq!(Wants::experiments(PROCESSORS[0], 2, 1).missing_in("").len(), 5);
    }
}
