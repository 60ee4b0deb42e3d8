//! The architecture of the host and of its guests.
//!
//! A file describes VMs for all architectures. Three things differ: some keys choose what only a PC has, the first
//! serial port has another name, and so have the files of the build.

/// An architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arch {
    /// x86-64 with AMD SVM, on QEMU's q35.
    #[default]
    X86_64,
    /// AArch64 at EL2, on QEMU's virt.
    Aarch64,
}

abi::settings! {
    Arch, "architecture": X86_64 = "x86_64", Aarch64 = "aarch64";
}

impl Arch {
    /// The folder of this architecture's files, below the directory of built files.
    pub(crate) const fn folder(self) -> &'static str {
        match self {
            Self::X86_64 => "",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The first serial port's name in kernels.
    pub(crate) const fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Aarch64 => "ttyAMA0",
        }
    }

    /// The kernel's command line for this architecture. Files always call the first serial port `ttyS0`; this replaces
    /// it by the kernel's name.
    pub(super) fn cmdline(self, text: &str) -> String {
        match self {
            Self::X86_64 => text.to_string(),
            Self::Aarch64 => {
                let words = text.split(' ').map(|word| if word == "console=ttyS0" { "console=ttyAMA0" } else { word });
                words.collect::<Vec<_>>().join(" ")
            }
        }
    }
}
