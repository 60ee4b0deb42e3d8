//! The machines of the tests, and one source of tests for all of them.

use std::path::{Path, PathBuf};

use abi::exit_code::qemu_status;

use crate::{Run, assets, dunlin_run, finished, qemu, run_vms};

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// QEMU's q35 with AMD SVM.
    X86_64,
    /// QEMU's virt with EL2.
    Aarch64,
}

/// Makes one test for each machine of functions that take one: `name::on_x86_64` and `name::on_aarch64`.
///
/// ```text
/// system_tests::each_machine! {
///     fn every_machine_has_a_name(machine) {
///         assert!(!machine.name().is_empty());
///     }
/// }
/// ```
#[macro_export]
macro_rules! each_machine {
    ($($(#[$attribute:meta])* fn $name:ident($machine:ident) $body:block)*) => {$(
        $(#[$attribute])*
        fn $name($machine: $crate::Machine) $body

        mod $name {
            #[test]
            fn on_x86_64() {
                super::$name($crate::Machine::X86_64);
            }

            #[test]
            fn on_aarch64() {
                super::$name($crate::Machine::Aarch64);
            }
        }
    )*};
}

impl Machine {
    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The quickest exit of a guest: the experiment that repeats it, and the counter of such exits.
    #[must_use]
    pub const fn quickest_exit(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("cpuid", "cpuid_exits"),
            Self::Aarch64 => ("hvc", "hypercalls"),
        }
    }

    /// The name of this machine's version of a document, without and with its suffix.
    #[must_use]
    pub fn document(self, name: &str, ending: &str) -> String {
        match self {
            Self::X86_64 => format!("docs/{name}.{ending}"),
            Self::Aarch64 => format!("docs/{name}-aarch64.{ending}"),
        }
    }

    /// Runs `dunlin run` with these arguments, for at most `seconds`.
    #[must_use]
    pub fn run(self, seconds: u32, arguments: &[&str]) -> Run {
        let mut all = vec!["--arch", self.name()];
        all.extend(arguments);
        dunlin_run(seconds, &all)
    }

    /// Runs `dunlin run` on a host of 2 pCPUs with the VMs that `toml` describes, and `more` arguments.
    #[must_use]
    pub fn run_vms(self, seconds: u32, toml: &str, more: &[&str]) -> Run {
        run_vms(self.name(), seconds, toml, more)
    }

    /// Its hypervisor, as QEMU's `-kernel` takes it.
    #[must_use]
    pub fn hypervisor(self) -> PathBuf {
        self.assets().join("hypervisor")
    }

    /// The machine without virtualization, and the hypervisor's message about that. Without EL2 it powers the machine
    /// off before it has found a console.
    #[must_use]
    pub const fn unable(self) -> (&'static [&'static str], &'static str) {
        match self {
            Self::X86_64 => (&["-machine", "q35", "-cpu", "max,-svm"], "no AMD SVM"),
            Self::Aarch64 => (&["-machine", "virt,gic-version=3", "-cpu", "max"], ""),
        }
    }

    /// QEMU's arguments for a machine with what a hypervisor needs.
    #[must_use]
    pub const fn able(self) -> [&'static str; 4] {
        match self {
            Self::X86_64 => ["-machine", "q35", "-cpu", "max"],
            Self::Aarch64 => ["-machine", "virt,virtualization=on,gic-version=3", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// Starts the hypervisor in QEMU without the tool, with these arguments besides the machine.
    ///
    /// Returns QEMU's status and the hypervisor's log.
    #[must_use]
    pub fn bare_hypervisor(self, arguments: &[&str]) -> Run {
        self.bare_hypervisor_on(&self.able(), arguments)
    }

    /// As [`Self::bare_hypervisor`], on a machine described by further arguments.
    ///
    /// # Panics
    /// When there is no hypervisor.
    #[must_use]
    pub fn bare_hypervisor_on(self, machine: &[&str], arguments: &[&str]) -> Run {
        self.start_kernel(&self.hypervisor(), "stdio", machine, arguments)
    }

    /// Starts this file by QEMU's `-kernel`, with 256 MiB, on a machine described by further arguments, which come
    /// last. `serial` is where the serial line leads, by QEMU's word for it.
    ///
    /// # Panics
    /// When there is no such file.
    #[must_use]
    pub fn start_kernel(self, file: &Path, serial: &str, machine: &[&str], arguments: &[&str]) -> Run {
        assert!(file.is_file(), "{} is missing: run `make build` first", file.display());
        let mut command = qemu::of(self, 120);
        if self == Self::X86_64 {
            command.args(qemu::DEBUG_EXIT);
        }
        command.args(["-m", "256M", "-serial", serial]).args(machine);
        command.arg("-kernel").arg(file).args(arguments);
        finished(&mut command)
    }

    /// Runs the measuring guest on QEMU's own machine, without the hypervisor.
    ///
    /// # Panics
    /// There is no guest for this machine.
    #[must_use]
    pub fn plain_guest(self, cmdline: &str) -> Run {
        assert!(self == Self::X86_64, "the guest is an image for Dunlin's own loader there");
        self.start_kernel(&self.assets().join("guest"), "stdio", &self.able(), &["-append", cmdline])
    }

    /// Where hypervisor, guest, kernels and initrds of this machine are.
    #[must_use]
    pub fn assets(self) -> PathBuf {
        match self {
            Self::X86_64 => assets(),
            Self::Aarch64 => assets().join("aarch64"),
        }
    }

    /// QEMU's status when the hypervisor ends the machine with this code of [`abi::exit_code`]. Not every machine has a
    /// place for it.
    #[must_use]
    pub fn status_of(self, code: u8) -> i32 {
        match self {
            Self::X86_64 => qemu_status(code),
            Self::Aarch64 => 0,
        }
    }
}
