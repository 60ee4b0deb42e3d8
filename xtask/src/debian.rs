//! Fetches foreign programs from Debian packages: guest kernels, memtest86+, firmware, GRUB, BusyBox, a C compiler with
//! C sources.
//!
//! `apt-get download` fetches a package from the machine's mirrors and checks it against their signed lists. The wanted
//! files are extracted below `target/`. Nothing is installed, and nothing of it (most is GPL) is ever part of this
//! repository.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::artifacts::{Arch, Places, output, run, shown};

/// Where a package is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    /// From the suites that this machine is set up for.
    Machines,
    /// From where Debian offers its newest kernels to a stable system.
    Newest,
}

/// The suite meant by [`Suite::Newest`].
const NEWEST: &str = "trixie-backports";
/// The mirror for a machine whose own mirrors are not Debian archives.
const ANY_MIRROR: &str = "http://deb.debian.org/debian";
/// Debian's keys, which are on each of its systems.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Puts the kernel that the package `meta` depends on at `name` among the assets, if there is none yet.
pub(crate) fn kernel(places: &Places, arch: Arch, suite: Suite, meta: &str, name: &str) -> Result<()> {
    let wanted = places.assets_of(arch).join(name);
    if wanted.is_file() {
        return Ok(());
    }

    let apt = Apt::of(places, arch, suite)?;
    apt.with_fresh_lists(|| {
        let depends = |package: &str| output(apt.command("apt-cache").args(["depends", package]));
        let image = named("linux-image-", &depends(meta)?)
            .with_context(|| format!("the package {meta} depends on no kernel"))?;
        // Newer kernels are in a package of their own, which the image's package depends on.
        let (package, file) = match named("linux-binary-", &depends(&image)?) {
            Some(binary) => (binary, "./usr/lib/modules/*/vmlinuz"),
            None => (image, "./boot/vmlinuz-*"),
        };
        println!("xtask: fetching the guest kernel {package} (Debian package, unpacked below target, not installed)");
        take_file(places, &apt, &package, file, &wanted)
    })
    .with_context(|| format!("no guest kernel {name}; `dunlin run --kernel FILE` takes any other"))
}

/// The version of `package`.
pub(crate) fn version(places: &Places, arch: Arch, suite: Suite, package: &str) -> Result<String> {
    let apt = Apt::of(places, arch, suite)?;
    let mut version = None;
    apt.with_fresh_lists(|| {
        let shown = output(apt.command("apt-cache").args(["--no-all-versions", "show", package]))?;
        version = shown.lines().find_map(|line| line.strip_prefix("Version: ")).map(str::to_owned);
        version.as_ref().map(drop).with_context(|| format!("there is no package {package}"))
    })?;
    version.with_context(|| format!("the package {package} has no version"))
}

/// Puts the one file of `package` that matches `pattern` at `to`.
pub(crate) fn take(places: &Places, arch: Arch, suite: Suite, package: &str, pattern: &str, to: &Path) -> Result<()> {
    println!("xtask: fetching {package} (Debian package, unpacked, not installed)");
    let apt = Apt::of(places, arch, suite)?;
    apt.with_fresh_lists(|| take_file(places, &apt, package, pattern, to))
}

/// Leaves the two images of memtest86+ among the assets, if they are not there yet.
pub(crate) fn memtest(places: &Places) -> Result<()> {
    const PACKAGE: &str = "memtest86+";
    let apt = Apt::of(places, Arch::X86_64, Suite::Machines)?;
    for name in ["memtest86+x64.bin", "memtest86+ia32.bin"] {
        let wanted = places.assets().join(name);
        if !wanted.is_file() {
            println!("xtask: fetching {name} (Debian package, unpacked below target, not installed)");
            apt.with_fresh_lists(|| take_file(places, &apt, PACKAGE, &format!("./boot/{name}"), &wanted))?;
        }
    }
    Ok(())
}

/// Leaves UEFI for QEMU's `virt` among the assets, if it is not there yet.
pub(crate) fn firmware(places: &Places) -> Result<()> {
    let wanted = places.assets_of(Arch::Aarch64).join("uefi.fd");
    if wanted.is_file() {
        return Ok(());
    }
    println!("xtask: fetching qemu-efi-aarch64 (Debian package, unpacked below target, not installed)");
    let apt = Apt::of(places, Arch::Aarch64, Suite::Machines)?;
    let file = "./usr/share/qemu-efi-aarch64/QEMU_EFI.fd";
    apt.with_fresh_lists(|| take_file(places, &apt, "qemu-efi-aarch64", file, &wanted))
}

/// Puts GRUB's modules for UEFI on AArch64 among the assets, if they are missing. Their package is for machines of that
/// architecture, so it cannot be installed here; images are made from its files.
pub(crate) fn grub(places: &Places) -> Result<()> {
    const PACKAGE: &str = "grub-efi-arm64-bin";
    let wanted = places.assets_of(Arch::Aarch64).join("grub");
    if wanted.is_dir() {
        return Ok(());
    }
    println!("xtask: fetching {PACKAGE} (Debian package, unpacked below target, not installed)");
    let apt = Apt::of(places, Arch::Aarch64, Suite::Machines)?;
    apt.with_fresh_lists(|| {
        let scratch = Scratch::new(places, PACKAGE)?;
        let files = scratch.directory.join("files");
        let archive = scratch.download(&apt, PACKAGE)?;
        run(Command::new("dpkg-deb").arg("--extract").arg(archive).arg(&files))?;
        // Last, so that an interrupted run leaves nothing that looks complete.
        Ok(fs::rename(files.join("usr/lib/grub/arm64-efi"), &wanted)?)
    })
}

/// A statically linked BusyBox: the installed one of the package busybox-static, or one taken from that package.
pub(crate) fn busybox(places: &Places, arch: Arch) -> Result<PathBuf> {
    let apt = Apt::of(places, arch, Suite::Machines)?;
    // The path alone proves nothing: the package `busybox` has a dynamically linked program there.
    let installed = Path::new("/bin/busybox");
    let state = Command::new("dpkg-query").args(["-W", "-f", "${Status}", "busybox-static"]).output();
    let is_installed = state.is_ok_and(|state| state.stdout == b"install ok installed") && installed.is_file();
    if is_installed && arch == Arch::X86_64 {
        return Ok(installed.to_path_buf());
    }

    let fetched = places.assets_of(arch).join("busybox");
    if !fetched.is_file() {
        println!("xtask: fetching busybox-static (Debian package, unpacked below target, not installed)");
        apt.with_fresh_lists(|| take_file(places, &apt, "busybox-static", "*/bin/busybox", &fetched))?;
    }
    Ok(fetched)
}

/// The first package whose name begins with `prefix` among the dependencies that `apt-cache depends` lists.
fn named(prefix: &str, depends: &str) -> Option<String> {
    dependencies_in(depends).find(|package| package.starts_with(prefix)).map(str::to_owned)
}

/// The direct dependencies that `apt-cache depends` lists.
fn dependencies_in(depends: &str) -> impl Iterator<Item = &str> {
    depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "))
}

/// APT, for packages of one architecture and suite.
///
/// For the machine's own it is used unchanged. For others it gets lists and a cache of its own below `target/`, so the
/// machine's configuration does not change. Mirrors and keys are the machine's.
struct Apt {
    /// The configuration file with the differences.
    config: Option<PathBuf>,
}

impl Apt {
    fn of(places: &Places, arch: Arch, suite: Suite) -> Result<Self> {
        let (folder, sources) = match (arch, suite) {
            (Arch::X86_64, Suite::Machines) => return Ok(Self { config: None }),
            (_, Suite::Machines) => ("apt", None),
            (_, Suite::Newest) => ("apt-newest", Some(sources(&[NEWEST])?)),
        };
        Self::apart(&places.assets_of(arch).join(folder), arch, sources)
    }

    /// With lists and a cache below `directory`, for packages from `sources`, by default the machine's own. No package
    /// counts as installed.
    fn apart(directory: &Path, arch: Arch, sources: Option<String>) -> Result<Self> {
        fs::create_dir_all(directory.join("lists/partial"))?;
        fs::create_dir_all(directory.join("cache/archives/partial"))?;
        fs::write(directory.join("status"), "")?;
        let shown = directory.display();
        let architecture = match arch {
            Arch::X86_64 => "amd64",
            Arch::Aarch64 => "arm64",
        };
        let mut text = format!(
            "APT::Architecture \"{architecture}\";\nAPT::Architectures {{ \"{architecture}\"; }};\n\
             Dir::State::lists \"{shown}/lists\";\nDir::State::status \"{shown}/status\";\n\
             Dir::Cache \"{shown}/cache\";\n"
        );
        if let Some(sources) = sources {
            fs::create_dir_all(directory.join("no-more-sources"))?;
            fs::write(directory.join("sources.list"), sources)?;
            text += &format!(
                "Dir::Etc::sourcelist \"{shown}/sources.list\";\nDir::Etc::sourceparts \"{shown}/no-more-sources\";\n"
            );
        }
        let config = directory.join("apt.conf");
        fs::write(&config, text)?;
        Ok(Self { config: Some(config) })
    }

    /// One of APT's programs.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        if let Some(config) = &self.config {
            command.env("APT_CONFIG", config);
        }
        command
    }

    /// Tries once, and again after `apt-get update`: the lists may be empty (a fresh container) or name a package that
    /// the mirror has replaced since.
    fn with_fresh_lists(&self, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
        let Err(first) = attempt() else { return Ok(()) };
        println!("xtask: {first:#}");

        self.update()?;
        attempt()
    }

    fn update(&self) -> Result<()> {
        // Lists of our own need no rights but ours.
        let mut update = if is_root()? || self.config.is_some() {
            self.command("apt-get")
        } else {
            let mut sudo = Command::new("sudo");
            sudo.arg("apt-get");
            sudo
        };
        update.arg("update");
        if self.config.is_some() {
            update.args(["--quiet=2", "-o", "Acquire::Languages=none"]);
            if is_root()? {
                update.args(["-o", "APT::Sandbox::User=root"]);
            }
        }
        println!("xtask: refreshing apt's lists: {}", shown(&update));
        run(&mut update).context("apt's lists could not be refreshed; run `apt-get update` as root and try again")
    }
}

/// Unpacks `packages` with all their dependencies below `root`, which need not exist. They are programs for this
/// machine from `suites` of Debian; if several have a package, from the last. `scratch` holds the downloads, and is
/// removed at the end.
pub(crate) fn unpack_from(suites: &[&str], packages: &[&str], scratch: &Path, root: &Path) -> Result<()> {
    let scratch = Scratch::at(scratch.to_path_buf())?;
    let apt = Apt::apart(&scratch.directory, Arch::X86_64, Some(sources(suites)?))?;
    apt.update()?;
    let mut download = apt.command("apt-get");
    download.args(["--quiet=2", "--yes", "--no-install-recommends", "--download-only", "install"]);
    if is_root()? {
        download.args(["-o", "APT::Sandbox::User=root"]);
    }
    // Backports are never taken unless they are asked for.
    if let Some(last) = suites.last() {
        download.args(["--target-release", last]);
    }
    run(download.args(packages))?;

    for entry in fs::read_dir(scratch.directory.join("cache/archives"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(root))?;
        }
    }
    Ok(())
}

/// The lines of a `sources.list` for these suites, at the mirror that this machine uses.
pub(crate) fn sources(suites: &[&str]) -> Result<String> {
    let mut indexes = Command::new("apt-get");
    indexes.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]);
    let listed = output(&mut indexes)?;
    let mirror = archive_in(&listed).unwrap_or(ANY_MIRROR);
    Ok(suites.iter().map(|suite| format!("deb [signed-by={DEBIAN_KEYS}] {mirror} {suite} main\n")).collect())
}

/// The first of these addresses that is an archive of Debian.
fn archive_in(listed: &str) -> Option<&str> {
    listed.lines().map(|line| line.trim_end_matches('/')).find(|address| address.ends_with("/debian"))
}

/// As [`Apt::with_fresh_lists`], for packages of this machine's architecture.
fn with_fresh_lists(attempt: impl FnMut() -> Result<()>) -> Result<()> {
    OWN.with_fresh_lists(attempt)
}

/// APT as it is set up.
const OWN: Apt = Apt { config: None };

/// Unpacks `packages` and all that they depend on below `root`, which need not exist.
pub(crate) fn unpack_with_dependencies(places: &Places, packages: &[&str], root: &Path) -> Result<()> {
    with_fresh_lists(|| {
        let depends = output(Command::new("apt-cache").args(["depends", "--recurse", "--important"]).args(packages))?;
        let all = packages_in(&depends);
        if let Some(missing) = packages.iter().find(|package| !all.contains(package)) {
            bail!("there is no package {missing}");
        }
        all.iter().try_for_each(|package| extract(places, package, root))
    })
}

/// Unpacks `package` below `root`, which need not exist.
pub(crate) fn unpack(places: &Places, package: &str, root: &Path) -> Result<()> {
    with_fresh_lists(|| extract(places, package, root))
}

fn extract(places: &Places, package: &str, root: &Path) -> Result<()> {
    println!("xtask: fetching {package} (Debian package, unpacked below target, not installed)");
    let scratch = Scratch::new(places, package)?;
    fs::create_dir_all(root)?;
    run(Command::new("dpkg-deb").arg("--extract").arg(scratch.download(&OWN, package)?).arg(root))
}

/// The packages that the package `meta` depends on directly.
pub(crate) fn dependencies(meta: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    with_fresh_lists(|| {
        let depends = output(Command::new("apt-cache").args(["depends", "--important", meta]))?;
        found = dependencies_in(&depends).map(str::to_owned).collect();
        Ok(())
    })?;
    Ok(found)
}

/// The packages that `apt-cache depends --recurse` lists: each begins a line; virtual ones are in angle brackets.
fn packages_in(depends: &str) -> Vec<&str> {
    depends.lines().filter(|line| !line.starts_with([' ', '|', '<']) && !line.is_empty()).collect()
}

/// A directory for one package, empty at first and gone in the end. Whoever else wants it waits until then.
struct Scratch {
    directory: PathBuf,
    _lock: File,
}

impl Scratch {
    fn new(places: &Places, package: &str) -> Result<Self> {
        Self::at(places.assets().join(format!("unpack-{package}")))
    }

    fn at(directory: PathBuf) -> Result<Self> {
        let lock_file = directory.with_added_extension("lock");
        if let Some(parent) = directory.parent() {
            fs::create_dir_all(parent)?;
        }
        let lock = File::create(&lock_file).with_context(|| format!("cannot write {}", lock_file.display()))?;
        lock.lock().with_context(|| format!("cannot lock {}", lock_file.display()))?;
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory)?;
        Ok(Self { directory, _lock: lock })
    }

    /// Downloads `package` and returns its path.
    fn download(&self, apt: &Apt, package: &str) -> Result<PathBuf> {
        let mut download = apt.command("apt-get");
        download.current_dir(&self.directory).args(["--quiet=2", "download"]);
        if is_root()? {
            // As root, apt would give the download to its own user, which may not write here.
            download.args(["-o", "APT::Sandbox::User=root"]);
        }
        run(download.arg(package))?;
        only_file_below(&self.directory)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Downloads `package` and takes out the one file that matches `pattern`.
fn take_file(places: &Places, apt: &Apt, package: &str, pattern: &str, to: &Path) -> Result<()> {
    let scratch = Scratch::new(places, package)?;
    let archive = scratch.download(apt, package)?;

    // A kernel package holds thousands of modules; only one file is unpacked.
    let mut unpacked = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(&archive).stdout(Stdio::piped()).spawn()?;
    let stream = unpacked.stdout.take().context("dpkg-deb has no output")?;
    let files = scratch.directory.join("files");
    fs::create_dir(&files)?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--wildcards", "--no-same-owner"]).arg("--directory").arg(&files).arg(pattern);
    run(tar.stdin(stream))?;
    let status = unpacked.wait()?;
    if !status.success() {
        bail!("dpkg-deb --fsys-tarfile {} ({status})", archive.display());
    }

    // The rename comes last, so that an interrupted run leaves nothing that looks complete.
    let file = only_file_below(&files)?;
    if fs::rename(&file, to).is_ok() {
        return Ok(());
    }
    // The cache may be on another file system than the target folder.
    let unfinished = to.with_extension("unfinished");
    fs::copy(&file, &unfinished)
        .and_then(|_| fs::rename(&unfinished, to))
        .with_context(|| format!("cannot write {}", to.display()))
}

/// The single regular file in a directory tree.
fn only_file_below(directory: &Path) -> Result<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![directory.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    match <[PathBuf; 1]>::try_from(files) {
        Ok([file]) => Ok(file),
        Err(files) => bail!("expected one file below {}, found {}", directory.display(), files.len()),
    }
}

fn is_root() -> Result<bool> {
    Ok(output(Command::new("id").arg("-u"))?.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::{archive_in, named, packages_in};

    #[test]
    fn packages_begin_a_line_and_virtual_ones_are_none() {
        let listed = "cpp-12\n  Depends: libc6\n |Depends: <a>\n    b\nlibc6\n<a>\nb\n";
        assert_eq!(packages_in(listed), ["cpp-12", "libc6", "b"]);
    }

    #[test]
    fn the_kernel_is_found_among_the_dependencies() {
        let listed = "linux-image-cloud-amd64\n  Depends: linux-base\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        assert_eq!(named("linux-image-", listed).as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(named("linux-binary-", listed), None);
    }

    #[test]
    fn a_package_without_a_kernel_gives_none() {
        assert_eq!(named("linux-image-", "linux-image-amd64\n  Suggests: linux-image-6.1.0-1-amd64\n"), None);
    }
    #[test]
    fn the_mirror_of_debian_is_found_among_others() {
        let listed =
            "https://example.org/node/\nhttp://mirror.example/debian-security/\nhttp://mirror.example/debian/\n";
        assert_eq!(archive_in(listed), Some("http://mirror.example/debian"));
        assert_eq!(archive_in("https://example.org/ubuntu/\n"), None);
    }
}
