//! Emulators of a newer Debian than this machine's: Bochs, and newer versions of QEMU.
//!
//! Their packages, with all dependencies, are unpacked below the user's cache (`$XDG_CACHE_HOME/dunlin`), which all
//! clones of the repository share. Nothing is installed. They need newer libraries than this machine may have. So a
//! script of three lines replaces each program, and starts it with the loader that was unpacked with it.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::debian;

/// A set of packages that belong together.
#[derive(Debug)]
pub(crate) struct Emulator {
    /// The folder below the cache.
    folder: &'static str,
    /// Suites of Debian; a package comes from the last suite that has it.
    suites: &'static [&'static str],
    packages: &'static [&'static str],
    /// The programs with scripts, each with its first arguments.
    programs: &'static [(&'static str, &'static [&'static str])],
    /// Environment variables of the programs. `{root}` is the folder with the unpacked packages.
    environment: &'static [(&'static str, &'static str)],
    /// How large the download is, in MB.
    megabytes: u32,
}

/// Bochs 3.0. Version 3.1 stops Debian's kernel 6.1 at its start by a division error; 2.7 has no posted interrupts.
pub(crate) const BOCHS: Emulator = Emulator {
    folder: "bochs-trixie",
    suites: &["trixie"],
    // It wants one of the displays that need more libraries; that for a terminal needs the fewest.
    packages: &["bochs", "bochs-term", "bochsbios", "vgabios"],
    programs: &[("bochs-bin", &[])],
    environment: &[
        ("LTDL_LIBRARY_PATH", "{root}/usr/lib/x86_64-linux-gnu/bochs/plugins"),
        ("BXSHARE", "{root}/usr/share/bochs"),
    ],
    megabytes: 55,
};

const QEMU_PROGRAMS: &[(&str, &[&str])] = &[
    ("qemu-system-x86_64", &["-L", "{root}/usr/share/qemu", "-L", "{root}/usr/share/seabios"]),
    ("qemu-system-aarch64", &["-L", "{root}/usr/share/qemu"]),
];
const QEMU_ENVIRONMENT: &[(&str, &str)] = &[("QEMU_MODULE_DIR", "{root}/usr/lib/x86_64-linux-gnu/qemu")];

/// QEMU 10.0.
pub(crate) const QEMU_10: Emulator = Emulator {
    folder: "qemu-trixie",
    suites: &["trixie"],
    packages: &["qemu-system-x86", "qemu-system-arm"],
    programs: QEMU_PROGRAMS,
    environment: QEMU_ENVIRONMENT,
    megabytes: 48,
};

/// QEMU 11.1, or the version in Debian's backports.
pub(crate) const QEMU_11: Emulator = Emulator {
    folder: "qemu-trixie-backports",
    suites: &["trixie", "trixie-backports"],
    packages: &["qemu-system-x86", "qemu-system-arm"],
    programs: QEMU_PROGRAMS,
    environment: QEMU_ENVIRONMENT,
    megabytes: 48,
};

/// Unpacks all of them, and prints the folders that hold their programs.
pub(crate) fn unpack_all() -> Result<()> {
    for emulator in [&BOCHS, &QEMU_10, &QEMU_11] {
        println!("{}", emulator.unpack()?.programs().display());
    }
    Ok(())
}

/// An emulator that has been unpacked.
#[derive(Debug)]
pub(crate) struct Unpacked {
    root: PathBuf,
}

impl Emulator {
    /// Unpacks it, unless that has been done. The scripts are written in any case: they may be another version's.
    pub(crate) fn unpack(&self) -> Result<Unpacked> {
        let cache = cache()?;
        let done = Unpacked { root: cache.join(self.folder) };
        if done.root.is_dir() {
            self.write_scripts(&done.root, &done.root)?;
            return Ok(done);
        }
        println!(
            "xtask: fetching {} and libraries from Debian {} ({} MB; unpacked in {}, not installed)",
            self.packages.join(", "),
            self.suites.join(" and "),
            self.megabytes,
            done.root.display()
        );
        let mine = |what: &str| cache.join(format!("{}-{what}-{}", self.folder, std::process::id()));
        let unfinished = mine("unfinished");
        let result = debian::unpack_from(self.suites, self.packages, &mine("download"), &unfinished)
            .and_then(|()| self.write_scripts(&unfinished, &done.root));
        // The rename comes last, so that a folder that looks complete is complete. It fails if another clone was
        // faster.
        let _ = result.is_ok().then(|| fs::rename(&unfinished, &done.root));
        let _ = fs::remove_dir_all(&unfinished);
        result.with_context(|| format!("{} could not be fetched", self.packages.join(", ")))?;
        Ok(done)
    }

    /// Writes a script for each program into `folder`, for programs that will be in `root`.
    fn write_scripts(&self, folder: &Path, root: &Path) -> Result<()> {
        let root = root.to_str().context("the cache's path is not UTF-8")?;
        let scripts = folder.join(SCRIPTS);
        fs::create_dir_all(&scripts)?;
        for (program, arguments) in self.programs {
            let path = scripts.join(program);
            fs::write(&path, self.script(program, arguments, root))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    fn script(&self, program: &str, arguments: &[&str], root: &str) -> String {
        let mut text = String::from("#!/bin/sh\n");
        for (name, value) in self.environment {
            text += &format!("export {name}='{}'\n", value.replace("{root}", root));
        }
        let libraries = format!("{root}/usr/lib/x86_64-linux-gnu");
        text += &format!(
            "exec '{libraries}/ld-linux-x86-64.so.2' --library-path '{libraries}:{libraries}/pulseaudio' '{root}/usr/bin/{program}'"
        );
        for argument in arguments {
            text += &format!(" '{}'", argument.replace("{root}", root));
        }
        text + " \"$@\"\n"
    }
}

/// The folder of scripts below that of an emulator.
const SCRIPTS: &str = "dunlin";

impl Unpacked {
    /// The folder with a script for each of the emulator's programs, to put first in PATH.
    pub(crate) fn programs(&self) -> PathBuf {
        self.root.join(SCRIPTS)
    }

    /// The folder that its packages were unpacked into.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A file of its packages.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

/// The folder of this project in the user's cache.
pub(crate) fn cache() -> Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(set("HOME")?.join(".cache")));
    let folder = cache.context("neither XDG_CACHE_HOME nor HOME says where the user's cache is")?.join("dunlin");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::{BOCHS, QEMU_10, QEMU_11};

    #[test]
    fn script_starts_the_program_by_the_loader_that_it_came_with() {
        let script = QEMU_11.script("qemu-system-x86_64", &["-L", "{root}/usr/share/qemu"], "/c");
        assert_eq!(
            script,
            "#!/bin/sh\nexport QEMU_MODULE_DIR='/c/usr/lib/x86_64-linux-gnu/qemu'\n\
             exec '/c/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2' --library-path \
             '/c/usr/lib/x86_64-linux-gnu:/c/usr/lib/x86_64-linux-gnu/pulseaudio' '/c/usr/bin/qemu-system-x86_64' \
             '-L' '/c/usr/share/qemu' \"$@\"\n"
        );
    }

    #[test]
    fn each_emulator_has_a_folder_of_its_own() {
        let mut folders = [&BOCHS, &QEMU_10, &QEMU_11].map(|emulator| emulator.folder);
        folders.sort_unstable();
        assert!(folders.windows(2).all(|two| two[0] != two[1]));
    }
}
