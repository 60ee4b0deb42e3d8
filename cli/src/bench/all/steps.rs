//! The steps: what each measures, their order, and their durations.

use abi::setting::Setting as _;

use crate::assets::Assets;
use crate::config::Arch;
use crate::failure::Failure;
use crate::qemu::Qemu;

/// A step: some commands of `dunlin bench`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// Its name.
    pub(crate) name: &'static str,
    /// The measured quantity, as text.
    pub(crate) what: &'static str,
    /// In which form it is part of.
    form: Option<Form>,
    /// Words after `dunlin bench`, in the short form and in the full one.
    commands: [&'static [&'static str]; 2],
    /// How often, in turn.
    times: [u32; 2],
    /// Seconds that the step took in the short form, on two cores of which other processes used about half; on free
    /// cores it takes less. Durations of the full form are estimates from its sizes.
    seconds: [u32; 2],
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Steps for 15 minutes in total.
    Short,
    /// The full measurement of each experiment.
    Full,
}

impl Form {
    /// As records have it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Full => "full",
        }
    }
}

/// The experiments that a complete file has figures of.
pub(crate) const EXPERIMENTS: [&str; 8] = ["exits", "budget", "boot", "tlb", "tags", "decode", "layout", "dirty"];

/// All steps. Short ones, and those that find errors early, come first.
pub(super) const STEPS: [Step; 15] = [
    Step {
        name: "exits",
        what: "instructions per exit",
        form: None,
        commands: [&["exits"], &["exits"]],
        times: [1, 1],
        seconds: [14, 14],
    },
    Step {
        name: "budget",
        what: "exits of a boot",
        form: None,
        commands: [&["budget"], &["budget"]],
        times: [1, 2],
        seconds: [10, 20],
    },
    Step {
        name: "boot",
        what: "boot, in turn with QEMU alone",
        form: None,
        commands: [&["boot", "--pairs", "5"], &["boot", "--pairs", "7"]],
        times: [1, 1],
        seconds: [37, 63],
    },
    Step {
        name: "exits-aarch64",
        what: "instructions per exit, on AArch64",
        form: None,
        commands: [&["exits", "--arch", "aarch64"], &["exits", "--arch", "aarch64"]],
        times: [1, 1],
        seconds: [4, 4],
    },
    Step {
        name: "budget-aarch64",
        what: "exits of a boot, on AArch64",
        form: None,
        commands: [&["budget", "--arch", "aarch64"], &["budget", "--arch", "aarch64"]],
        times: [1, 2],
        seconds: [15, 30],
    },
    Step {
        name: "layout",
        what: "vCPU state packed and laid out",
        form: None,
        commands: [&["layout"], &["layout"]],
        times: [1, 1],
        seconds: [64, 64],
    },
    Step {
        name: "tlb-latency",
        what: "latency of a shootdown",
        form: None,
        commands: [
            &[
                "tlb",
                "--part",
                "latency",
                "--pages",
                "1",
                "--targets",
                "busy",
                "--vcpus",
                "2,4,8",
                "--overcommit",
                "1,2,4",
                "--seconds",
                "2",
            ],
            &["tlb", "--part", "latency"],
        ],
        times: [3, 3],
        seconds: [92, 1200],
    },
    Step {
        name: "tlb-exits",
        what: "exits of a shootdown",
        form: None,
        commands: [
            &["tlb", "--part", "exits", "--vcpus", "2,4,8", "--overcommit", "1,4", "--targets", "busy"],
            &["tlb", "--part", "exits"],
        ],
        times: [1, 3],
        seconds: [49, 500],
    },
    Step {
        name: "tlb-instructions",
        what: "instructions of a shootdown",
        form: None,
        commands: [
            &["tlb", "--part", "instructions", "--vcpus", "2,4,8,16", "--targets", "idle"],
            &["tlb", "--part", "instructions"],
        ],
        times: [1, 1],
        seconds: [24, 150],
    },
    Step {
        name: "tags",
        what: "flushes by scheme and number of tags",
        form: None,
        commands: [&["tags", "--quick"], &["tags"]],
        times: [1, 1],
        seconds: [30, 240],
    },
    Step {
        name: "decode",
        what: "emulated accesses by decode cache",
        form: None,
        commands: [&["decode", "--quick"], &["decode"]],
        times: [1, 1],
        seconds: [156, 200],
    },
    Step {
        name: "dirty",
        what: "a guest that writes while its writes are logged",
        form: None,
        commands: [
            &["dirty", "--vcpus", "2", "--memory", "128M", "--rounds", "3", "--part", "curve,instructions"],
            &["dirty"],
        ],
        times: [1, 1],
        seconds: [137, 420],
    },
    Step {
        name: "dirty-aarch64",
        what: "the same on AArch64, with and without FEAT_BBM level 2",
        form: None,
        commands: [
            &[
                "dirty",
                "--arch",
                "aarch64",
                "--cpu",
                "max,neoverse-n1",
                "--vcpus",
                "2",
                "--memory",
                "128M",
                "--split",
                "adaptive,lazy",
                "--rounds",
                "3",
                "--part",
                "curve,instructions",
            ],
            &["dirty", "--arch", "aarch64", "--cpu", "max,neoverse-n1"],
        ],
        times: [1, 1],
        seconds: [130, 600],
    },
    Step {
        name: "tlb-debian",
        what: "Debian's kernel under load that needs flushes",
        form: Some(Form::Full),
        commands: [&[], &["tlb", "--macro"]],
        times: [0, 1],
        seconds: [0, 900],
    },
    Step {
        name: "decode-debian",
        what: "Debian's kernel with its local APIC in memory",
        form: Some(Form::Full),
        commands: [&[], &["decode", "--macro"]],
        times: [0, 1],
        seconds: [0, 600],
    },
];

impl Step {
    /// Words after `dunlin bench`.
    pub(super) const fn command(&self, form: Form) -> &'static [&'static str] {
        self.commands[form as usize]
    }

    /// How often.
    pub(super) const fn times(&self, form: Form) -> u32 {
        self.times[form as usize]
    }

    /// The reason why this computer cannot run the step, if there is one. For example, an architecture was not built.
    pub(super) fn lacks(&self, form: Form) -> Option<String> {
        let words = self.command(form);
        let at = words.iter().position(|&word| word == "--arch")?;
        let arch = Arch::named(words.get(at + 1)?)?;
        let hypervisor = Assets::locate().of(arch).hypervisor().map(drop);
        hypervisor.and_then(|()| Qemu::find(arch, None).map(drop)).err().map(|failure| failure.to_string())
    }

    /// Expected duration in seconds, on a computer like that of the measured durations.
    pub(super) fn seconds(&self, form: Form) -> f64 {
        f64::from(self.seconds[form as usize])
    }
}

/// The steps of this form; if names are given, only those.
pub(crate) fn steps(form: Form, only: &[String]) -> Result<Vec<Step>, Failure> {
    let all = || STEPS.iter().filter(|step| step.form.is_none_or(|of| of == form));
    if let Some(unknown) = only.iter().find(|name| !all().any(|step| step.name == name.as_str())) {
        let names = all().map(|step| step.name).collect::<Vec<_>>().join(", ");
        return Err(Failure::bad_input(format!("option '--only': no step '{unknown}'"))
            .help(format!("in the {} form there are: {names}", form.name())));
    }
    Ok(all().filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)).copied().collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Args;

    #[test]
    fn short_form_fits_into_a_quarter_of_an_hour() {
        let seconds: f64 = steps(Form::Short, &[]).expect("is good").iter().map(|step| step.seconds(Form::Short)).sum();
        assert!((60.0..900.0).contains(&seconds), "{seconds}");
    }

    #[test]
    fn every_command_is_one_that_the_tool_takes() {
        for form in [Form::Short, Form::Full] {
            for step in steps(form, &[]).expect("is good") {
                let words = ["dunlin", "bench"].iter().chain(step.command(form));
                assert!(Args::try_parse_from(words).is_ok(), "{}, {}", step.name, form.name());
                assert!(step.times(form) > 0 && step.seconds(form) > 0.0, "{}", step.name);
                assert!(EXPERIMENTS.contains(&step.command(form)[0]), "{}", step.name);
            }
        }
    }

    #[test]
    fn every_experiment_has_a_step_in_both_forms() {
        for form in [Form::Short, Form::Full] {
            let steps = steps(form, &[]).expect("is good");
            for experiment in EXPERIMENTS {
                assert!(steps.iter().any(|step| step.command(form)[0] == experiment), "{experiment}");
            }
        }
    }

    #[test]
    fn steps_are_chosen_by_name_and_unknown_ones_are_told() {
        let only = |names: &[&str]| steps(Form::Short, &names.iter().map(ToString::to_string).collect::<Vec<_>>());
        let names: Vec<_> = only(&["tags", "exits"]).expect("is good").iter().map(|step| step.name).collect();
        assert_eq!(names, ["exits", "tags"]);
        let failure = only(&["tag"]).expect_err("there is no such step").to_string();
        assert!(failure.contains("no step 'tag'") && failure.contains("tlb-latency"), "{failure}");
        assert!(only(&["tlb-debian"]).is_err(), "it takes too long for the short form");
    }
}
