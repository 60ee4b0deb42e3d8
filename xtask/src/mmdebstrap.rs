//! Installs Debian from its packages, for root file systems and disks, and keeps what was made in the user's cache.
//!
//! The program mmdebstrap does it in a temporary folder: as root, or as a user with a user namespace. So packages are
//! really installed there, with the users and services that they set up. The machine itself does not change.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::artifacts::{run, shown};
use crate::{debian, emulators, parent};

/// What to install.
#[derive(Debug)]
pub(crate) struct System {
    pub(crate) suite: &'static str,
    /// Installed with all that they depend on.
    pub(crate) packages: &'static [&'static str],
    /// Commands of the shell at the end. `$1` is the folder with all files.
    pub(crate) commands: &'static [&'static str],
}

const OPTIONS: &[&str] = &[
    "--variant=essential",
    // A mirror may be behind.
    "--aptopt=Acquire::Check-Valid-Until \"false\"",
    "--aptopt=APT::Install-Recommends \"false\"",
];
/// What nobody reads in a test.
const NOT_NEEDED: &[&str] = &["/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*"];
/// What would be copied from this machine: the addresses of its network, and its name.
const NOT_OURS: &str = "rm -f \"$1/etc/resolv.conf\" \"$1/etc/hostname\"";

impl System {
    /// All that decides about the result, but for new versions of packages.
    pub(crate) fn recipe(&self) -> String {
        [&[self.suite], self.packages, self.commands, OPTIONS, NOT_NEEDED, &[NOT_OURS]].concat().join("\n")
    }

    /// Installs it, and gives it to the standard input of `packer`, as a tar archive. `scratch` is a folder for small
    /// files.
    pub(crate) fn install(&self, scratch: &Path, packer: &mut Command) -> Result<()> {
        let sources = scratch.join("sources.list");
        fs::write(&sources, debian::sources(&[self.suite])?)?;
        let mut install = Command::new("mmdebstrap");
        install.arg("--quiet").args(OPTIONS).arg(format!("--include={}", self.packages.join(",")));
        install.args(NOT_NEEDED.iter().map(|path| format!("--dpkgopt=path-exclude={path}")));
        let commands = [NOT_OURS].into_iter().chain(self.commands.iter().copied());
        install.args(commands.map(|command| format!("--customize-hook={command}")));
        install.args([self.suite, "-"]).arg(&sources).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut installing = install.spawn().context("cannot run mmdebstrap (Debian package mmdebstrap)")?;
        let files = installing.stdout.take().context("mmdebstrap has no output")?;

        let packed = run(packer.stdin(files));
        let installed = installing.wait()?;
        if !installed.success() {
            bail!("{} ({installed}); what went wrong is above", shown(&install));
        }
        packed
    }
}

/// The file `name` in the user's cache. If there is none from the same `recipe`, `make` makes it: it gets a folder for
/// what it needs meanwhile, and the file's path.
pub(crate) fn cached(name: &str, recipe: &str, make: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<PathBuf> {
    let folder = emulators::cache()?.join(format!("{name}-{:08x}", parent::checksum(recipe)));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let file = folder.join(name);

    // Two clones may want it at the same time. The second one waits, and finds it done.
    let lock_file = folder.with_added_extension("lock");
    let lock = File::create(&lock_file).with_context(|| format!("cannot write {}", lock_file.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", lock_file.display()))?;
    if !file.is_file() {
        println!("xtask: making {} from packages of Debian, once: two minutes or more", file.display());
        let [scratch, unfinished] = ["scratch", "unfinished"].map(|part| folder.join(part));
        let _ = fs::remove_dir_all(&scratch);
        fs::create_dir(&scratch)?;
        make(&scratch, &unfinished)?;
        fs::remove_dir_all(&scratch)?;
        // The rename comes last, so that a file that is there is complete.
        fs::rename(&unfinished, &file)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::System;

    #[test]
    fn systems_that_differ_have_other_recipes() {
        let usual = System { suite: "trixie", packages: &["dash"], commands: &["true"] };
        let others = [
            System { suite: "forky", ..usual },
            System { packages: &["bash"], ..usual },
            System { commands: &["false"], ..usual },
        ];
        assert!(others.iter().all(|other| other.recipe() != usual.recipe()));
    }
}
