//! Kernel and programs of a parent VM: Linux with `/dev/mshv`, and QEMU that uses it.
//!
//! Debian builds no kernel with `CONFIG_MSHV_ROOT`. So this builds one from Debian's unmodified source package, with
//! the options in `parent/kernel.config`. It takes a quarter of an hour on two CPUs, once: the kernel is kept in the
//! user's cache, under the version of the package and a checksum of the options.
//!
//! A second kernel has the options that distributions choose where these matter to the hypervisor:
//! `parent/stock.config`. Its driver for `/dev/mshv` is a module.
//!
//! ```text
//! target/dunlin/vmlinuz-parent          the kernel
//! target/dunlin/parent.cpio             QEMU with libraries and firmware, what its guests need, `parent/files`
//!                                       (follows the initrd)
//! target/dunlin/vmlinuz-parent-stock    the second kernel
//! target/dunlin/parent-stock.cpio       its modules (follow `parent.cpio`)
//! target/dunlin/kvm.cpio                modules of KVM for `vmlinuz-newest`, to compare with (follows parent.cpio)
//! ```
//!
//! QEMU is that of Debian's package, unpacked and not installed. Its guests have the parent's own kernel, which has all
//! drivers built in, and an initrd of BusyBox and `parent/guest`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, IsTerminal, Write as _, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::archive::Archive;
use crate::artifacts::{self, Arch, Places, Wanted, output, run};
use crate::debian;
use crate::emulators::{self, QEMU_11};
use crate::{initrd, workloads};

/// The package with the kernel's source. `parent/kernel.config` is for this version.
const SOURCE: &str = "linux-source-7.3";
/// Lines that `make` prints for this kernel, about, to tell how far it has come.
const LINES_OF_MAKE: u32 = 2900;
/// Parts of the source that no kernel for x86-64 with these options needs. All Kconfig files must stay, those of
/// other architectures too: they include each other.
const NOT_NEEDED: &[&str] = &[
    "*/arch/[!x]*/*.[chS]",
    "*/arch/[!x]*/*.dts*",
    "*/arch/xtensa",
    "*/Documentation/*.rst",
    "*/Documentation/*.yaml",
    "*/Documentation/*.svg",
    "*/drivers/accel/*.[chS]",
    "*/drivers/gpu/drm/*.[chS]",
    "*/drivers/iio/*.[chS]",
    "*/drivers/infiniband/*.[chS]",
    "*/drivers/media/*.[chS]",
    "*/drivers/net/wireless/*.[chS]",
    "*/drivers/scsi/*/*.[chS]",
    "*/drivers/staging/*.[chS]",
    "linux-source-*/sound/*.[chS]",
    "*/tools/perf",
    "*/tools/testing",
];
/// Each build of the same source and options gives the same bytes.
const REPRODUCIBLE: [&str; 3] =
    ["KBUILD_BUILD_USER=parent", "KBUILD_BUILD_HOST=dunlin", "KBUILD_BUILD_TIMESTAMP=@1700000000"];

/// A kernel of a parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kernel {
    /// Its name in `target/dunlin`.
    name: &'static str,
    /// Files with its options. Lines of a later one replace those of an earlier one.
    options: &'static [&'static str],
    /// Its modules, in the order of loading.
    modules: &'static [&'static str],
}

const USUAL: Kernel = Kernel { name: "vmlinuz-parent", options: &["parent/kernel.config"], modules: &[] };
const STOCK: Kernel = Kernel {
    name: "vmlinuz-parent-stock",
    options: &["parent/kernel.config", "parent/stock.config"],
    modules: &["drivers/hv/hv_vmbus.ko", "drivers/hv/mshv_root.ko"],
};
/// The loader that Debian's programs ask for, where they look for it.
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";
/// Where Debian's loader looks for libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const QEMU: &str = "usr/bin/qemu-system-x86_64";
/// Firmware for the machines `q35`, `pc` and `microvm`, and for kernels given by `-kernel`.
const FIRMWARE: &[&str] = &[
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/qemu/efi-virtio.rom",
    "usr/share/seabios/bios.bin",
    "usr/share/seabios/bios-256k.bin",
    "usr/share/seabios/bios-microvm.bin",
    "usr/share/seabios/vgabios-stdvga.bin",
];

/// Firmware for guests that start by UEFI, from which package.
const OVMF: &[&str] = &["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"];
const OVMF_PACKAGE: &str = "ovmf";
/// Debian's newest kernel, for guests and for a host with KVM.
const NEWEST: &str = "vmlinuz-newest";
/// A program that measures disks.
const FIO: &str = "fio.cpio.gz";
/// The modules of KVM on AMD's processors, and of a network card, in the order in which they are loaded.
const KVM: &[&str] = &[
    "virt/lib/irqbypass",
    "arch/x86/kvm/kvm",
    "arch/x86/kvm/kvm-amd",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
];

/// Leaves the kernel and the programs in `target/dunlin`. Fast if the cache has both.
pub(crate) fn build(places: &Places) -> Result<()> {
    artifacts::build(places, Wanted::ForDefaultVm)?;
    debian::kernel(places, Arch::X86_64, debian::Suite::Newest, "linux-image-cloud-amd64", NEWEST)?;
    kvm(places)?;
    fio(places)?;
    for file in OVMF {
        let to = places.assets().join(file);
        if !to.is_file() {
            let pattern = format!("./usr/share/OVMF/{file}");
            debian::take(places, Arch::X86_64, debian::Suite::Machines, OVMF_PACKAGE, &pattern, &to)?;
        }
    }
    provide(places, &USUAL)?;
    programs(places)
}

/// The same, and the kernel like those of distributions, with its modules.
pub(crate) fn build_stock(places: &Places) -> Result<()> {
    build(places)?;
    let folder = provide(places, &STOCK)?;
    let mut archive = Archive::default();
    archive.add_directory("dunlin/modules")?;
    for (number, module) in (0..).zip(STOCK.modules) {
        let name = file_name(module);
        let from = folder.join(name);
        let content = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        archive.add_program(&format!("dunlin/modules/{number}-{name}"), &content)?;
    }
    write(&places.assets().join("parent-stock.cpio"), archive)
}

/// Leaves `kvm.cpio` in `target/dunlin`: KVM's modules for the kernel [`NEWEST`].
fn kvm(places: &Places) -> Result<()> {
    let to = places.assets().join("kvm.cpio");
    let kernel = places.assets().join(NEWEST);
    let image = fs::read(&kernel).with_context(|| format!("cannot read {}", kernel.display()))?;
    let release = release(&image).with_context(|| format!("{} names no release", kernel.display()))?;
    let mark = places.assets().join("kvm.release");
    let all = format!("{release}\n{}\n", KVM.join("\n"));
    if to.is_file() && fs::read_to_string(&mark).is_ok_and(|packed| packed == all) {
        return Ok(());
    }
    let mut archive = Archive::default();
    archive.add_directory("kvm")?;
    let packed = places.assets().join("module.ko.xz");
    for module in KVM {
        let pattern = format!("./usr/lib/modules/{release}/kernel/{module}.ko.xz");
        let package = format!("linux-modules-{release}");
        debian::take(places, Arch::X86_64, debian::Suite::Newest, &package, &pattern, &packed).with_context(|| {
            format!("no modules for {}; if Debian has a newer kernel by now, remove this one", kernel.display())
        })?;
        let unpacked = Command::new("xz").args(["--decompress", "--stdout"]).arg(&packed).output();
        let unpacked = unpacked.context("cannot run xz (Debian package xz-utils)")?;
        if !unpacked.status.success() {
            bail!("xz cannot unpack the module {module} ({})", unpacked.status);
        }
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.add_file(&format!("kvm/{name}.ko"), &unpacked.stdout)?;
    }
    fs::remove_file(&packed)?;
    fs::write(&to, archive.finish()?).with_context(|| format!("cannot write {}", to.display()))?;
    // Last, so that an interrupted run leaves nothing that looks complete.
    fs::write(&mark, all).with_context(|| format!("cannot write {}", mark.display()))
}

/// The release of a bzImage: the first word of the text that the header's field `kernel_version` points to.
fn release(image: &[u8]) -> Option<&str> {
    const FIELD: usize = 0x20e;
    const BASE: usize = 0x200;
    let at = BASE + usize::from(u16::from_le_bytes(image.get(FIELD..FIELD + 2)?.try_into().ok()?));
    let text = image.get(at..)?.split(|byte| *byte == b' ' || *byte == 0).next()?;
    std::str::from_utf8(text).ok().filter(|release| !release.is_empty())
}

/// Leaves [`FIO`] in `target/dunlin`: Debian's fio with its libraries, to follow the initrd of a guest.
fn fio(places: &Places) -> Result<()> {
    const PROGRAM: &str = "usr/bin/fio";
    let to = places.assets().join(FIO);
    if to.is_file() {
        return Ok(());
    }
    println!("xtask: fetching fio and libraries (Debian packages, unpacked below target, not installed)");
    let [scratch, root] = ["unpack-fio-download", "unpack-fio"].map(|name| places.assets().join(name));
    let _ = fs::remove_dir_all(&root);
    debian::unpack_from(&["trixie"], &["fio"], &scratch, &root)?;
    let mut archive = Archive::default();
    for (name, from) in [(LOADER, root.join("usr").join(LOADER)), (PROGRAM, root.join(PROGRAM))] {
        if let Some((directory, _)) = name.rsplit_once('/') {
            archive.add_directory(directory)?;
        }
        archive.add_program(name, &fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?)?;
    }
    archive.add_directory(LIBRARIES)?;
    for library in libraries_of(&root, PROGRAM)? {
        let name = library.file_name().and_then(|name| name.to_str()).context("a library has a name")?;
        archive.add_program(&format!("{LIBRARIES}/{name}"), &fs::read(&library)?)?;
    }
    let unfinished = to.with_extension("unfinished");
    // 57 MB become 20. Linux unpacks archives with and without compression, one after the other.
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&archive.finish()?)?;
    fs::write(&unfinished, encoder.finish()?)?;
    fs::rename(&unfinished, &to)?;
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

/// The folder with the usual kernel of a parent, `vmlinuz`, and its configuration, `config`. Builds the kernel if it is
/// not in the cache.
pub(crate) fn kernel(places: &Places) -> Result<PathBuf> {
    cached(places, &USUAL)
}

/// Leaves the kernel in `target/dunlin`, and returns the folder in the user's cache that has all of it.
fn provide(places: &Places, kernel: &Kernel) -> Result<PathBuf> {
    let folder = cached(places, kernel)?;
    let (from, to) = (folder.join("vmlinuz"), places.assets().join(kernel.name));
    fs::copy(&from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(folder)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The kernel's folder in the user's cache. Builds the kernel if it is not there.
fn cached(places: &Places, wanted: &Kernel) -> Result<PathBuf> {
    let mut options = String::new();
    for file in wanted.options {
        let file = places.root.join(file);
        let more = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        options = overridden(&options, &more);
    }
    let version = debian::version(places, Arch::X86_64, debian::Suite::Newest, SOURCE)?;
    let name = format!("parent-kernel-{version}-{:08x}", checksum(&options)).replace(['~', '+', ':'], "-");
    let folder = emulators::cache()?.join(&name);
    let kernel = folder.join("vmlinuz");

    // Two clones may want it at the same time. The second one waits, and finds it done.
    // Not with_extension(): the version has dots, and what stands behind the last one tells the kernels apart.
    let lock_file = folder.with_file_name(format!("{name}.lock"));
    let lock = File::create(&lock_file).with_context(|| format!("cannot write {}", lock_file.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", lock_file.display()))?;
    if kernel.is_file() {
        return Ok(folder);
    }

    println!("xtask: building {} from Debian's {SOURCE} {version}, once: about 15 minutes on two CPUs", wanted.name);
    println!("xtask: it needs 1.2 GB in {} meanwhile, and leaves 11 MB", folder.display());
    let work = folder.join("work");
    let (source, objects) = (work.join("source"), work.join("objects"));
    if !source.join("Makefile").is_file() || !work.join("unpacked").is_file() {
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&source)?;
        unpack(places, &source)?;
        // So that an interrupted run does not take half of the source for all of it.
        fs::write(work.join("unpacked"), "")?;
    }
    configure(&source, &objects, &options)?;
    compile(&source, &objects, wanted)?;

    for module in wanted.modules {
        fs::copy(objects.join(module), folder.join(file_name(module)))?;
    }
    let unfinished = folder.join("vmlinuz.unfinished");
    fs::copy(objects.join("arch/x86/boot/bzImage"), &unfinished)?;
    fs::copy(objects.join(".config"), folder.join("config"))?;
    fs::copy(objects.join("System.map"), folder.join("System.map"))?;
    // The rename comes last, so that a kernel that is there is complete.
    fs::rename(&unfinished, &kernel)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    Ok(folder)
}

/// `options`, with those lines replaced that `more` has another word about.
fn overridden(options: &str, more: &str) -> String {
    let named: BTreeSet<&str> = more.lines().filter_map(option).collect();
    let kept = options.lines().filter(|line| option(line).is_none_or(|name| !named.contains(name)));
    kept.chain(more.lines()).flat_map(|line| [line, "\n"]).collect()
}

/// The option that a line of a configuration sets, or turns off.
fn option(line: &str) -> Option<&str> {
    let named = line.strip_prefix("# ").and_then(|rest| rest.strip_suffix(" is not set"));
    named.or_else(|| line.split_once('=').map(|(name, _)| name)).filter(|name| name.starts_with("CONFIG_"))
}

/// FNV-1a. It tells one list of options from another, in a name.
pub(crate) fn checksum(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Unpacks what is needed of the source into `source`.
fn unpack(places: &Places, source: &Path) -> Result<()> {
    let packed = source.with_extension("tar.xz");
    let pattern = format!("./usr/src/{SOURCE}.tar.xz");
    debian::take(places, Arch::X86_64, debian::Suite::Newest, SOURCE, &pattern, &packed)?;
    println!("xtask: unpacking the kernel's source (640 MB)");
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--strip-components=1", "--no-same-owner", "--wildcards"]);
    tar.args(NOT_NEEDED.iter().map(|pattern| format!("--exclude={pattern}")));
    run(tar.arg("--directory").arg(source).arg("--file").arg(&packed))
        .context("tar cannot unpack the kernel's source (is the program xz missing? Debian package xz-utils)")?;
    Ok(fs::remove_file(&packed)?)
}

/// `make` for this kernel.
fn make(source: &Path, objects: &Path) -> Command {
    let mut make = Command::new("make");
    make.arg("-C").arg(source).arg("ARCH=x86_64").arg(format!("O={}", objects.display())).args(REPRODUCIBLE);
    // A `make` above us would pass its own flags on.
    make.env_remove("MAKEFLAGS").env_remove("MFLAGS").env_remove("MAKELEVEL");
    make
}

/// Writes the configuration, and makes sure that all `options` are in it.
fn configure(source: &Path, objects: &Path, options: &str) -> Result<()> {
    fs::create_dir_all(objects)?;
    output(make(source, objects).args(["--silent", "tinyconfig"]))?;
    let file = objects.join(".config");
    let tiny = fs::read_to_string(&file)?;
    fs::write(&file, format!("{tiny}\n{options}"))?;
    output(make(source, objects).args(["--silent", "olddefconfig"]))?;

    let result = fs::read_to_string(&file)?;
    let lost = lost(options, &result);
    if !lost.is_empty() {
        bail!(
            "{} options of the kernel did not survive; each needs another that is missing: {}",
            lost.len(),
            lost.join(", ")
        );
    }
    Ok(())
}

/// Those of the `options` that are not in the `result`.
fn lost<'a>(options: &'a str, result: &str) -> Vec<&'a str> {
    let lines: BTreeSet<&str> = result.lines().collect();
    let is_off =
        |name: &str| !result.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('=')));
    options
        .lines()
        .filter(|line| match line.strip_prefix("# CONFIG_").and_then(|rest| rest.strip_suffix(" is not set")) {
            Some(name) => !is_off(&format!("CONFIG_{name}")),
            None => line.starts_with("CONFIG_") && !lines.contains(line),
        })
        .collect()
}

/// Compiles, and tells how far it has come.
fn compile(source: &Path, objects: &Path, wanted: &Kernel) -> Result<()> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let started = Instant::now();
    let mut make = make(source, objects);
    make.arg(format!("-j{jobs}")).arg("bzImage");
    if !wanted.modules.is_empty() {
        make.arg("modules");
    }
    let mut running = make.stdout(Stdio::piped()).spawn().context("cannot run make (Debian package make)")?;
    let printed = running.stdout.take().context("make has no output")?;
    let mut progress = Progress::new(started);
    for _ in BufReader::new(printed).lines().map_while(Result::ok) {
        progress.step();
    }
    progress.end();
    let status = running.wait()?;
    if !status.success() {
        bail!("{} ({status}); what went wrong is above", artifacts::shown(&make));
    }
    Ok(())
}

/// How far `make` has come: one line on a terminal, a line per minute elsewhere.
struct Progress {
    started: Instant,
    told: Option<Instant>,
    lines: u32,
    is_terminal: bool,
}

impl Progress {
    fn new(started: Instant) -> Self {
        Self { started, told: None, lines: 0, is_terminal: stderr().is_terminal() }
    }

    fn step(&mut self) {
        self.lines += 1;
        let pause = if self.is_terminal { Duration::from_millis(500) } else { Duration::from_mins(1) };
        if self.told.is_some_and(|told| told.elapsed() < pause) {
            return;
        }
        self.told = Some(Instant::now());
        let percent = (self.lines * 100 / LINES_OF_MAKE).min(99);
        let text = format!("xtask: kernel {percent} %, {} s", self.started.elapsed().as_secs());
        if self.is_terminal { eprint!("\r{text}  ") } else { eprintln!("{text}") }
    }

    fn end(&self) {
        if self.is_terminal {
            eprintln!();
        }
    }
}

/// Leaves `parent.cpio` in `target/dunlin`. It is packed anew each time, because its guests' files may have changed.
fn programs(places: &Places) -> Result<()> {
    let to = places.assets().join("parent.cpio");
    let unpacked = QEMU_11.unpack()?;
    let root = unpacked.root();
    let mut archive = Archive::default();
    let mut add = |name: &str, from: &Path| -> Result<()> {
        if let Some((directory, _)) = name.rsplit_once('/') {
            archive.add_directory(directory)?;
        }
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        archive.add_program(name, &content)
    };

    add(LOADER, &root.join("usr").join(LOADER))?;
    add(QEMU, &root.join(QEMU))?;
    for library in libraries_of(root, QEMU)? {
        let name = library.file_name().and_then(|name| name.to_str()).context("a library has a name")?;
        add(&format!("{LIBRARIES}/{name}"), &library)?;
    }
    for file in FIRMWARE {
        // QEMU looks for all of it in one folder.
        let name = file.rsplit('/').next().unwrap_or(file);
        add(&format!("usr/share/qemu/{name}"), &root.join(file))?;
    }
    for (name, file) in [
        ("vmlinuz-cloud", "vmlinuz-cloud"),
        (NEWEST, NEWEST),
        ("measuring", "guest"),
        (FIO, FIO),
        (OVMF[0], OVMF[0]),
        (OVMF[1], OVMF[1]),
    ] {
        add(&format!("guest/{name}"), &places.assets().join(file))?;
    }
    add_guest(&mut archive, places)?;
    archive.add_directory("bin")?;
    archive.add_tree(&places.root.join("parent/files"), "", |_| true)?;
    archive.add_program("bin/mshv-check", &workloads::static_program(places, "dunlin-mshv-check")?)?;
    for program in ["guest-move", "faulty-wire"] {
        let name = format!("bin/{program}");
        archive.add_program(&name, &workloads::static_program_of(places, "dunlin-guest-move", program)?)?;
    }
    archive.add_program("bin/dunlin", &workloads::static_program_of(places, "dunlin-cli", "dunlin")?)?;
    archive.add_program("bin/mshv-ioctls-tests", &tests_of_mshv_ioctls(places)?)?;
    for machine in ["microvm", "q35"] {
        archive.add_link(&format!("bin/guest-{machine}"), "guest")?;
    }

    write(&to, archive)
}

/// The rename comes last, so that an interrupted run leaves nothing that looks complete.
pub(crate) fn write(to: &Path, archive: Archive) -> Result<()> {
    let unfinished = to.with_extension("unfinished");
    fs::write(&unfinished, archive.finish()?)
        .and_then(|()| fs::rename(&unfinished, to))
        .with_context(|| format!("cannot write {}", to.display()))
}

/// The unit tests of the crate that Cloud Hypervisor uses the device with, unchanged, of the version that
/// `parent/mshv_ioctls/Cargo.lock` names.
fn tests_of_mshv_ioctls(places: &Places) -> Result<Vec<u8>> {
    let target = places.target.join("mshv_ioctls");
    let mut cargo = places.cargo(&["test", "--no-run", "--locked", "--message-format", "json-render-diagnostics"]);
    cargo.args(["--package", "mshv-ioctls", "--lib", "--target", workloads::STATIC_LINUX]);
    cargo.arg("--manifest-path").arg(places.root.join("parent/mshv_ioctls/Cargo.toml"));
    cargo.env("CARGO_TARGET_DIR", &target).env("CARGO_PROFILE_TEST_STRIP", "symbols");
    let messages = output(&mut cargo)?;
    let program = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| message.get("executable")?.as_str().map(PathBuf::from))
        .context("cargo names no program with the tests of mshv-ioctls")?;
    fs::read(&program).with_context(|| format!("cannot read {}", program.display()))
}

/// Adds a kernel and an initrd for the parent's guests.
pub(crate) fn add_guest(archive: &mut Archive, places: &Places) -> Result<()> {
    let kernel = places.assets().join(USUAL.name);
    let kernel = fs::read(&kernel).with_context(|| format!("cannot read {}", kernel.display()))?;
    archive.add_directory("guest")?;
    archive.add_program("guest/vmlinuz", &kernel)?;
    archive.add_program("guest/initrd", &guest_initrd(places)?)
}

/// The initrd of the parent's guests.
fn guest_initrd(places: &Places) -> Result<Vec<u8>> {
    let mut archive = initrd::busybox(places, Arch::X86_64)?;
    archive.add_tree(&places.root.join("parent/guest"), "", |_| true)?;
    workloads::add_program(&mut archive, places)?;
    archive.finish()
}

/// The libraries of a `program` below `root`, as the loader that was unpacked with it finds them.
fn libraries_of(root: &Path, program: &str) -> Result<Vec<PathBuf>> {
    let library_path = [LIBRARIES, "usr/lib/x86_64-linux-gnu/pulseaudio", "usr/lib/x86_64-linux-gnu/ceph"]
        .map(|folder| root.join(folder).display().to_string());
    let mut list = Command::new(root.join("usr").join(LOADER));
    list.arg("--library-path").arg(library_path.join(":")).arg("--list").arg(root.join(program));
    let listed = output(&mut list)?;
    let found = listed.lines().filter_map(|line| line.trim().split_once(" => "));
    let libraries = found.filter(|(name, _)| !LOADER.ends_with(name));
    libraries
        .map(|(name, path)| {
            let path = PathBuf::from(path.split(" (").next().unwrap_or_default());
            if path.starts_with(root) {
                Ok(path)
            } else {
                bail!("the library {name} of {program} is not among the unpacked packages, but at {}", path.display())
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_that_the_configuration_does_not_have_is_lost() {
        let options =
            "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"-x\"\n# a comment\n# CONFIG_D is not set\nCONFIG_E=y\n";
        let result = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"-x\"\nCONFIG_D=y\n# CONFIG_E is not set\n";
        assert_eq!(lost(options, result), ["# CONFIG_D is not set", "CONFIG_E=y"]);
    }

    #[test]
    fn later_file_of_options_replaces_lines_of_an_earlier_one() {
        let first = "# about A\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\nCONFIG_AB=y\n";
        let second = "CONFIG_B=m\n# CONFIG_C is not set\nCONFIG_A=\"-x\"\n";
        let both = "# about A\nCONFIG_AB=y\nCONFIG_B=m\n# CONFIG_C is not set\nCONFIG_A=\"-x\"\n";
        assert_eq!(overridden(first, second), both);
        assert_eq!(overridden("", first), first);
    }

    #[test]
    fn release_of_a_kernel_is_the_first_word_of_its_version() {
        let mut image = vec![0; 0x300];
        image[0x20e..0x210].copy_from_slice(&0x80_u16.to_le_bytes());
        image[0x280..0x280 + 18].copy_from_slice(b"7.3.4-cloud (me) 1");
        assert_eq!(release(&image), Some("7.3.4-cloud"));
        assert_eq!(release(&image[..0x240]), None);
        assert_eq!(release(&[]), None);
    }

    #[test]
    fn options_that_differ_give_another_name() {
        assert_ne!(checksum("CONFIG_A=y"), checksum("CONFIG_A=n"));
    }
}
