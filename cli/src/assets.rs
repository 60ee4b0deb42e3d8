//! The files that the build provides: the hypervisor, our initrds, Debian's kernels, the measuring guest.

use std::path::{Path, PathBuf};

use crate::config::{Arch, Initrd, Kernel, Place};
use crate::failure::Failure;

/// The directory with the files that `make build` leaves.
#[derive(Clone, Debug)]
pub(crate) struct Assets {
    directory: PathBuf,
}

impl Assets {
    /// The directory that `DUNLIN_ASSETS` names, else of what is beside this program: `../dunlin`, as the build leaves
    /// it, or `../lib/dunlin`, as a package installs it.
    pub(crate) fn locate() -> Self {
        let directory = match std::env::var_os("DUNLIN_ASSETS") {
            Some(directory) => PathBuf::from(directory),
            None => {
                let program = std::env::current_exe().unwrap_or_default();
                let above = program.parent().and_then(Path::parent).unwrap_or(Path::new("."));
                let [built, installed] = ["dunlin", "lib/dunlin"].map(|folder| above.join(folder));
                if !built.is_dir() && installed.is_dir() { installed } else { built }
            }
        };
        Self { directory }
    }

    /// Those of an architecture.
    pub(crate) fn of(self, arch: Arch) -> Self {
        Self { directory: self.directory.join(arch.folder()) }
    }

    /// The hypervisor: an ELF or an Image, as QEMU takes it.
    pub(crate) fn hypervisor(&self) -> Result<PathBuf, Failure> {
        self.existing("hypervisor")
            .map_err(|path| missing(Failure::bad_input(format!("no hypervisor at {}", path.display()))))
    }

    /// GRUB's modules for machines of this architecture: those that the build has fetched, else those that are
    /// installed.
    pub(crate) fn grub(&self) -> Result<PathBuf, Failure> {
        let fetched = self.directory.join("grub");
        [fetched, PathBuf::from("/usr/lib/grub/arm64-efi")].into_iter().find(|path| path.join("modinfo.sh").is_file()).ok_or_else(|| {
            Failure::bad_input("GRUB for arm64 is missing")
                .help("'make image ARCH=aarch64' fetches it; or install it: 'apt install grub-efi-arm64-bin' (Debian, Ubuntu)")
        })
    }

    /// The file of a kernel.
    pub(crate) fn kernel(&self, kernel: &Kernel, place: &Place) -> Result<PathBuf, Failure> {
        let name = match kernel {
            Kernel::DebianCloud => "vmlinuz-cloud",
            Kernel::Debian => "vmlinuz-full",
            Kernel::MeasuringGuest => "guest",
            Kernel::Parent => PARENT_KERNEL,
            Kernel::ParentStock => STOCK_KERNEL,
            Kernel::Module(name) => return Err(no_modules(name, place)),
            Kernel::File(path) => return Ok(path.clone()),
        };
        self.existing(name).map_err(|path| {
            let failure = place.bad(format!("no kernel at {}", path.display()));
            Self::help_for(name, failure)
        })
    }

    /// The files of an initrd, in the order in which the kernel unpacks them; none if the VM has no initrd.
    pub(crate) fn initrd(&self, initrd: &Initrd, place: &Place) -> Result<Vec<PathBuf>, Failure> {
        match initrd {
            Initrd::File(path) => return Ok(vec![path.clone()]),
            Initrd::Module(name) => return Err(no_modules(name, place)),
            _ => {}
        }
        let archive = |name: &&str| {
            self.existing(name).map_err(|path| {
                let failure = place.bad(format!("no initrd at {}", path.display()));
                Self::help_for(name, failure)
            })
        };
        initrd.archives().iter().map(archive).collect()
    }

    /// `failure` with the command that leaves the file `name`.
    fn help_for(name: &str, failure: Failure) -> Failure {
        match name {
            // No ordinary build makes these.
            "compile.cpio" => failure.help(NO_COMPILER),
            PARENT_KERNEL | "parent.cpio" => failure.help(NO_PARENT),
            "parent-debian.cpio" => failure.help(NO_DEBIAN),
            "parent-libvirt.cpio" => failure.help(NO_LIBVIRT),
            STOCK_KERNEL | "parent-stock.cpio" => failure.help(NO_STOCK),
            _ => missing(failure),
        }
    }

    /// A file of a host with KVM, for comparison.
    pub(crate) fn for_kvm(&self, name: &str) -> Result<PathBuf, Failure> {
        self.existing(name).map_err(|path| Failure::bad_input(format!("no file {}", path.display())).help(NO_PARENT))
    }

    /// Names of the kernels for a parent VM that were built.
    pub(crate) fn parent_kernels(&self) -> Vec<String> {
        let built = [(PARENT_KERNEL, "make parent"), (STOCK_KERNEL, "make parent-stock")];
        let built = built.into_iter().filter(|(name, _)| self.existing(name).is_ok());
        built.map(|(name, command)| format!("{name} of `{command}`")).collect()
    }

    fn existing(&self, name: &str) -> Result<PathBuf, PathBuf> {
        let path = self.directory.join(name);
        if path.is_file() { Ok(path) } else { Err(path) }
    }
}

const PARENT_KERNEL: &str = "vmlinuz-parent";
const STOCK_KERNEL: &str = "vmlinuz-parent-stock";
const NO_PARENT: &str = "run 'make parent' first: for x86_64 it builds a Linux with /dev/mshv from Debian's source \
     (a quarter of an hour, once), and packs QEMU";
const NO_STOCK: &str = "run 'make parent-stock' first: for x86_64 it builds a Linux with /dev/mshv as a module from Debian's \
     source (half an hour, once)";
const NO_DEBIAN: &str = "run 'make parent-debian' first: it makes a disk from Debian's packages";
const NO_LIBVIRT: &str = "run 'make parent-libvirt' first: it makes a root file system from Debian's packages";
const NO_COMPILER: &str =
    "run 'cargo xtask workloads' first: it fetches a C compiler and C sources from Debian's packages";

/// A boot module is not there when this tool needs the file itself.
fn no_modules(name: &str, place: &Place) -> Failure {
    place
        .bad(format!("there is no boot module '{name}' here: only GRUB of an installed machine loads modules"))
        .help("name a file instead; or make the payload for such a machine with 'dunlin payload' (see its --help)")
}

fn missing(failure: Failure) -> Failure {
    failure.help("run 'make build' first, or set DUNLIN_ASSETS to the directory with the built files")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place::Option("--initrd");

    fn assets(names: &[&str]) -> (tempfile::TempDir, Assets) {
        let directory = tempfile::tempdir().expect("a directory");
        for name in names {
            std::fs::write(directory.path().join(name), name).expect("is written");
        }
        let assets = Assets { directory: directory.path().to_path_buf() };
        (directory, assets)
    }

    #[test]
    fn initrd_is_its_archives_in_the_order_of_unpacking() {
        let (directory, assets) = assets(&["initrd.cpio.gz", "workloads.cpio", "compile.cpio"]);
        let files = |initrd| assets.initrd(&initrd, &PLACE).expect("all are there");
        let paths = |names: &[&str]| names.iter().map(|name| directory.path().join(name)).collect::<Vec<_>>();
        assert_eq!(files(Initrd::Dunlin), paths(&["initrd.cpio.gz"]));
        assert_eq!(files(Initrd::Workloads), paths(&["initrd.cpio.gz", "workloads.cpio"]));
        assert_eq!(files(Initrd::Compile), paths(&["initrd.cpio.gz", "workloads.cpio", "compile.cpio"]));
        assert_eq!(files(Initrd::None), paths(&[]));
        assert_eq!(files(Initrd::File("/a".into())), [PathBuf::from("/a")]);
    }

    #[test]
    fn missing_archive_names_the_command_that_makes_it() {
        let (_directory, assets) = assets(&["initrd.cpio.gz"]);
        let error = |initrd| assets.initrd(&initrd, &PLACE).expect_err("something is missing").to_string();
        let text = error(Initrd::Workloads);
        assert!(text.contains("workloads.cpio") && text.contains("help: run 'make build' first"), "{text}");

        std::fs::write(assets.directory.join("workloads.cpio"), "").expect("is written");
        let text = error(Initrd::Compile);
        assert!(text.starts_with("option '--initrd': no initrd at ") && text.contains("compile.cpio"), "{text}");
        assert!(text.contains("help: run 'cargo xtask workloads' first"), "{text}");
        let text = error(Initrd::ParentStock);
        assert!(text.contains("parent.cpio") && text.contains("help: run 'make parent' first"), "{text}");
        std::fs::write(assets.directory.join("parent.cpio"), "").expect("is written");
        let text = error(Initrd::ParentStock);
        assert!(text.contains("parent-stock.cpio") && text.contains("help: run 'make parent-stock' first"), "{text}");
        let text = error(Initrd::ParentDebian);
        assert!(text.contains("parent-debian.cpio") && text.contains("help: run 'make parent-debian' first"), "{text}");
        let text = error(Initrd::ParentLibvirt);
        assert!(
            text.contains("parent-libvirt.cpio") && text.contains("help: run 'make parent-libvirt' first"),
            "{text}"
        );
        std::fs::remove_file(assets.directory.join("parent.cpio")).expect("is there");
        let text = error(Initrd::Parent);
        assert!(text.contains("parent.cpio") && text.contains("help: run 'make parent' first"), "{text}");
    }
}
