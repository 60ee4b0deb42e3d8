//! What the build leaves for the tool: the hypervisor, our initrd, Debian's kernels, the measuring guest.

use std::path::{Path, PathBuf};

use crate::config::{Initrd, Kernel, Place};
use crate::failure::Failure;

/// The directory with the files that `make build` leaves.
#[derive(Clone, Debug)]
pub(crate) struct Assets {
    directory: PathBuf,
}

impl Assets {
    /// The directory that `DUNLIN_ASSETS` names, else `../dunlin` from the directory of this program.
    pub(crate) fn locate() -> Self {
        let directory = match std::env::var_os("DUNLIN_ASSETS") {
            Some(directory) => PathBuf::from(directory),
            None => {
                let program = std::env::current_exe().unwrap_or_default();
                let target = program.parent().and_then(Path::parent).unwrap_or(Path::new("."));
                target.join("dunlin")
            }
        };
        Self { directory }
    }

    /// The hypervisor's ELF.
    pub(crate) fn hypervisor(&self) -> Result<PathBuf, Failure> {
        self.existing("hypervisor")
            .map_err(|path| missing(Failure::bad_input(format!("no hypervisor at {}", path.display()))))
    }

    /// The file of a kernel.
    pub(crate) fn kernel(&self, kernel: &Kernel, place: &Place) -> Result<PathBuf, Failure> {
        let name = match kernel {
            Kernel::DebianCloud => "vmlinuz-cloud",
            Kernel::Debian => "vmlinuz-full",
            Kernel::MeasuringGuest => "guest",
            Kernel::File(path) => return Ok(path.clone()),
        };
        self.existing(name).map_err(|path| missing(place.bad(format!("no kernel at {}", path.display()))))
    }

    /// The file of an initrd, if it has one.
    pub(crate) fn initrd(&self, initrd: &Initrd, place: &Place) -> Result<Option<PathBuf>, Failure> {
        match initrd {
            Initrd::None => Ok(None),
            Initrd::File(path) => Ok(Some(path.clone())),
            Initrd::Dunlin => self
                .existing("initrd.cpio.gz")
                .map(Some)
                .map_err(|path| missing(place.bad(format!("no initrd at {}", path.display())))),
        }
    }

    fn existing(&self, name: &str) -> Result<PathBuf, PathBuf> {
        let path = self.directory.join(name);
        if path.is_file() { Ok(path) } else { Err(path) }
    }
}

fn missing(failure: Failure) -> Failure {
    failure.help("run 'make build' first, or set DUNLIN_ASSETS to the directory with the built files")
}
