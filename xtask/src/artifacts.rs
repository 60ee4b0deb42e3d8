//! The built files and their places.
//!
//! ```text
//! target/release/dunlin             the tool
//! target/dunlin/hypervisor          ELF with a PVH note
//! target/dunlin/guest               the measuring guest
//! target/dunlin/initrd.cpio.gz      BusyBox and initrd/
//! target/dunlin/workloads.cpio      workloads/, to follow the initrd
//! target/dunlin/compile.cpio        a C compiler and C sources, to follow that (`cargo xtask workloads` only)
//! target/dunlin/vmlinuz-cloud       Debian's kernel for virtual machines
//! target/dunlin/vmlinuz-full        Debian's kernel for all machines
//! target/dunlin/vmlinuz-newest      Debian's newest kernel for virtual machines, for the tests
//! target/dunlin/memtest86+*.bin     Debian's memtest86+, for 64-bit and 32-bit processors, for the tests
//! target/dunlin/aarch64/            hypervisor and guest (Images), initrd.cpio.gz, vmlinuz-cloud and vmlinuz-newest of that architecture;
//!                                   uefi.fd, firmware for the tests, and grub/, GRUB's modules for images
//! ```
//!
//! `CARGO_TARGET_DIR` moves all of it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::debian::{self, Suite};
use crate::{initrd, workloads};

/// Where things are.
#[derive(Debug)]
pub(crate) struct Places {
    /// The repository.
    pub(crate) root: PathBuf,
    /// Cargo's target directory, absolute.
    pub(crate) target: PathBuf,
}

/// How much to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The needs of `dunlin run` without arguments: neither the other kernels nor the workloads.
    ForDefaultVm,
    /// The needs of the tests.
    Everything,
}

/// The architectures of hosts and guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arch {
    /// x86-64: all that there is.
    X86_64,
    /// AArch64: the hypervisor, and the needs of the default VM.
    Aarch64,
}

impl Arch {
    /// The one with this name.
    pub(crate) fn named(name: &str) -> Result<Self> {
        match name {
            "x86_64" => Ok(Self::X86_64),
            "aarch64" => Ok(Self::Aarch64),
            _ => bail!("no architecture `{name}`: x86_64 and aarch64 are known"),
        }
    }
}

/// The target of the same on AArch64. The one with floating point would let the compiler use guests' registers.
pub(crate) const AARCH64_BARE_METAL: &str = "aarch64-unknown-none-softfloat";

/// The target of the hypervisor and of the measuring guest.
pub(crate) const BARE_METAL: &str = "x86_64-unknown-none";
/// The profile of both, see Cargo.toml.
pub(crate) const IMAGE_PROFILE: &str = "image";
/// The packages built for these two, with the name under which the program is left in `target/dunlin`.
pub(crate) const BARE_METAL_PROGRAMS: [(&str, &str); 2] =
    [("dunlin-hypervisor", "hypervisor"), ("dunlin-guest", "guest")];

impl Places {
    pub(crate) fn find() -> Result<Self> {
        // As `cargo run` sets it, not as it was when this program was built: clones may share a target directory.
        let manifest = env::var_os("CARGO_MANIFEST_DIR").context("start this as `cargo xtask`")?;
        let root = Path::new(&manifest).parent().context("xtask is not in a repository")?.to_path_buf();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(directory) => env::current_dir()?.join(directory),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    pub(crate) fn tool(&self) -> PathBuf {
        self.target.join("release/dunlin")
    }

    /// The directory of files for `dunlin`.
    pub(crate) fn assets(&self) -> PathBuf {
        self.target.join("dunlin")
    }

    /// The same, of an architecture.
    pub(crate) fn assets_of(&self, arch: Arch) -> PathBuf {
        match arch {
            Arch::X86_64 => self.assets(),
            Arch::Aarch64 => self.assets().join("aarch64"),
        }
    }

    /// A `cargo` command in the repository with our target directory.
    pub(crate) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target).args(arguments);
        command
    }
}

/// Builds and fetches the wanted files. Fast if all exist.
pub(crate) fn build(places: &Places, wanted: Wanted) -> Result<()> {
    run(&mut places.cargo(&["build", "--release", "--package", "dunlin-cli"]))?;
    build_bare_metal(places)?;
    if wanted == Wanted::Everything {
        workloads::build(places)?;
    }
    assets(places, wanted)
}

/// Builds and fetches the wanted files for AArch64. Fast if all exist.
pub(crate) fn build_aarch64(places: &Places, wanted: Wanted) -> Result<()> {
    run(&mut places.cargo(&["build", "--release", "--package", "dunlin-cli"]))?;
    build_bare_metal_aarch64(places)?;
    debian::kernel(places, Arch::Aarch64, Suite::Machines, "linux-image-cloud-arm64", "vmlinuz-cloud")?;
    if wanted == Wanted::Everything {
        debian::kernel(places, Arch::Aarch64, Suite::Newest, "linux-image-cloud-arm64", "vmlinuz-newest")?;
        debian::firmware(places)?;
        debian::grub(places)?;
    }
    initrd::build(places, Arch::Aarch64)
}

/// Builds the hypervisor and the measuring guest for AArch64.
pub(crate) fn build_bare_metal_aarch64(places: &Places) -> Result<()> {
    run(&mut image_build(places, AARCH64_BARE_METAL, &BARE_METAL_PROGRAMS.map(|(package, _)| package))?)?;
    let assets = places.assets_of(Arch::Aarch64);
    std::fs::create_dir_all(&assets)?;
    for (package, name) in BARE_METAL_PROGRAMS {
        let built = places.target.join(AARCH64_BARE_METAL).join(IMAGE_PROFILE).join(package);
        let elf = std::fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
        let image =
            flat_image(&elf).with_context(|| format!("{} is not as the linker script says", built.display()))?;
        std::fs::write(assets.join(name), image)?;
    }
    Ok(())
}

/// The loaded bytes of an ELF in one run: the format of an Image for boot loaders.
fn flat_image(elf: &[u8]) -> Result<Vec<u8>> {
    let file = elf::ElfBytes::<elf::endian::LittleEndian>::minimal_parse(elf)?;
    let segments = file.segments().context("it has no segments")?;
    let mut image: Vec<u8> = Vec::new();
    let mut start = None;
    for segment in segments.iter().filter(|segment| segment.p_type == elf::abi::PT_LOAD && segment.p_filesz != 0) {
        let start = *start.get_or_insert(segment.p_paddr);
        let at = segment.p_paddr.checked_sub(start).context("its segments are not in order")?;
        let at = usize::try_from(at)?;
        if at < image.len() {
            bail!("its segments overlap");
        }
        image.resize(at, 0);
        image.extend_from_slice(file.segment_data(&segment)?);
    }
    if image.get(56..60) != Some(b"ARM\x64") {
        bail!("it does not begin with the header of an Image");
    }
    // A section of an EFI program has whole pages in the file.
    image.resize(image.len().next_multiple_of(4096), 0);
    Ok(image)
}

/// The part of [`build`] that needs no compiler: guest kernels and the initrd.
pub(crate) fn assets(places: &Places, wanted: Wanted) -> Result<()> {
    std::fs::create_dir_all(places.assets())?;
    debian::kernel(places, Arch::X86_64, Suite::Machines, "linux-image-cloud-amd64", "vmlinuz-cloud")?;
    if wanted == Wanted::Everything {
        debian::kernel(places, Arch::X86_64, Suite::Machines, "linux-image-amd64", "vmlinuz-full")?;
        debian::kernel(places, Arch::X86_64, Suite::Newest, "linux-image-cloud-amd64", "vmlinuz-newest")?;
        debian::memtest(places)?;
    }
    initrd::build(places, Arch::X86_64)
}

/// Builds the hypervisor and the measuring guest.
pub(crate) fn build_bare_metal(places: &Places) -> Result<()> {
    run(&mut image_build(places, BARE_METAL, &BARE_METAL_PROGRAMS.map(|(package, _)| package))?)?;
    std::fs::create_dir_all(places.assets())?;
    for (package, name) in BARE_METAL_PROGRAMS {
        place_program(places, package, name)?;
    }
    Ok(())
}

/// The command that builds programs as they are released: the same bytes, wherever repository and crates are.
pub(crate) fn image_build(places: &Places, target: &str, packages: &[&str]) -> Result<Command> {
    let mut command = places.cargo(&["build", "--profile", IMAGE_PROFILE, "--target", target]);
    command.args(without_folders(places, target)?);
    for package in packages {
        command.args(["--package", package]);
    }
    Ok(command)
}

/// Arguments of cargo by which a program for `target` contains no folder of this machine. Panics and data for debuggers
/// name source files: those of the repository as `/dunlin/..`, and those of crates as `/cargo/registry/..`.
/// (Cargo's `trim-paths` will do the same, and is not stable yet.)
pub(crate) fn without_folders(places: &Places, target: &str) -> Result<[String; 2]> {
    without_these(target, &places.root, &cargo_home()?)
}

/// Where cargo keeps crates.
pub(crate) fn cargo_home() -> Result<PathBuf> {
    match env::var_os("CARGO_HOME") {
        Some(home) => Ok(PathBuf::from(home)),
        None => {
            Ok(env::home_dir().context("neither CARGO_HOME nor HOME says where cargo keeps crates")?.join(".cargo"))
        }
    }
}

/// The same, for a cargo that keeps its crates in `home`.
pub(crate) fn without_these(target: &str, root: &Path, home: &Path) -> Result<[String; 2]> {
    let mut flags = Vec::new();
    for (from, to) in [(root, "/dunlin"), (home, "/cargo")] {
        let from = from.to_str().with_context(|| format!("{} is not UTF-8", from.display()))?;
        flags.push(toml::Value::String(format!("--remap-path-prefix={from}={to}")));
    }
    // Cargo joins them to those of .cargo/config.toml. The environment's would replace those.
    Ok(["--config".to_string(), format!("target.{target}.rustflags={}", toml::Value::Array(flags))])
}

/// Copies the program of `package` to `target/dunlin/name`.
fn place_program(places: &Places, package: &str, name: &str) -> Result<()> {
    let built = places.target.join(BARE_METAL).join(IMAGE_PROFILE);
    let program = [package, name].map(|file| built.join(file)).into_iter().find(|path| path.is_file());
    let Some(program) = program else {
        bail!("{package} left no program `{package}` or `{name}` in {}", built.display())
    };
    std::fs::copy(&program, places.assets().join(name))
        .with_context(|| format!("cannot copy {}", program.display()))?;
    Ok(())
}

/// Runs `command` with our own standard streams; its failure is an error that shows the command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !status.success() {
        bail!("{} ({status})", shown(command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{} ({}): {}", shown(command), output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote no UTF-8", shown(command)))
}

/// The command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
