//! `cargo xtask package-test`: installs the Debian package on a Debian 12 in QEMU, starts Dunlin there, and removes it.
//!
//! The machine is a disk with Debian's kernel for clouds, GRUB, and a kernel for a parent VM. Its firmware is a BIOS or
//! UEFI. It starts three times, each time with the Debian of that disk:
//!
//! 1. Plain Linux lists all files, installs the package, and chooses Dunlin's entry for the next start.
//! 2. GRUB starts Dunlin, and Dunlin the parent's kernel, which has all of the machine. It reads and writes the disk,
//!    uses the network, sets a variable of UEFI, and restarts the machine.
//! 3. Plain Linux, by the usual entry, finds what was written, purges the package and lists all files.
//!
//! The two lists must be equal. In plain Linux the first process is `packaging/test/init`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::artifacts::{Places, run};
use crate::{package, parent};

const HELP: &str = "\
cargo xtask package-test [--firmware bios|uefi] [--keep]

Builds the Debian package and tries it on a Debian 12 of its own, in QEMU: lists all files, installs the package, starts Dunlin from
GRUB's menu with the same Debian as parent VM, restarts the machine from there with plain Linux, purges the package, and compares the
lists of files. The Debian is made once, from packages of its mirror, and kept in target/package-test. Needs root, or user namespaces.
`--firmware` is that of the machine, a BIOS without it. `--keep` keeps the disk, too.
";

/// Seconds that each run of QEMU may take.
const LIMIT: u32 = 900;

/// What the machine is made of, besides Debian's essential packages. `grub-pc-bin` and `grub-efi-amd64-bin` bring GRUB
/// without installing it.
const PACKAGES: &str =
    "linux-image-cloud-amd64,initramfs-tools,grub2-common,grub-pc-bin,grub-efi-amd64-bin,udev,kmod,iproute2";

/// The machine's firmware.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Firmware {
    Bios,
    Uefi,
}

impl Firmware {
    /// GRUB's name of the platform.
    const fn platform(self) -> &'static str {
        match self {
            Self::Bios => "i386-pc",
            Self::Uefi => "x86_64-efi",
        }
    }
}

/// UEFI, and its variables.
const UEFI: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];

/// CPUs of the machine. Under emulation the first one runs no vCPUs, so the parent has one less.
const CPUS: u32 = 3;
/// Its memory in MiB, and what the parent has at least of it.
const MEMORY: u32 = 2048;
const LEAST_MEMORY: u32 = 1600;

/// The file system's name, by which GRUB and the kernel find it.
const UUID: &str = "d0000000-4444-4e4c-8000-000000000001";

/// `/etc/default/grub`. The first process and the consoles are part of the usual command line.
const GRUB_DEFAULTS: &str = "GRUB_DEFAULT=saved\nGRUB_TIMEOUT=0\nGRUB_DISABLE_SUBMENU=y\nGRUB_DISTRIBUTOR=Debian\n\
    GRUB_CMDLINE_LINUX_DEFAULT=\"\"\n\
    GRUB_CMDLINE_LINUX=\"console=ttyS0 init=/sbin/package-test dunlin.agent=ttyS0\"\n";

pub(crate) fn command(places: &Places, rest: &[String]) -> Result<ExitCode> {
    let (mut keeps, mut firmware) = (false, Firmware::Bios);
    let mut words = rest.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "--keep" => keeps = true,
            "--firmware" => {
                firmware = match words.next() {
                    Some("bios") => Firmware::Bios,
                    Some("uefi") => Firmware::Uefi,
                    _ => bail!("--firmware wants `bios` or `uefi`\n\n{HELP}"),
                }
            }
            "--help" => {
                print!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            _ => bail!("unknown word `{word}`\n\n{HELP}"),
        }
    }
    let started = Instant::now();
    run(Command::new(places.root.join("xtask/setup.sh")).args(["image", "package", "parent", "uefi"]))?;
    let deb = package::build(places)?;
    let folder = places.target.join("package-test");
    fs::create_dir_all(&folder)?;
    let disk = folder.join("disk");
    make_disk(places, &folder, &deb, firmware, &disk)?;

    let variables = folder.join("variables.fd");
    fs::copy(UEFI[1], &variables).with_context(|| format!("cannot copy {}", UEFI[1]))?;
    let machine =
        Pc { folder: &folder, disk: &disk, deb: &deb, variables: (firmware == Firmware::Uefi).then_some(&variables) };
    let installed = machine.start("1-install", "plain Linux: install", Restarts::Never)?;
    ensure_word(&installed, "== installed")?;

    let name = "2-dunlin-purge";
    let purged = machine.start(name, "Dunlin with Debian as parent, then plain Linux: purge", Restarts::ByItself)?;
    let release = parent_release(&parent::kernel(places)?)?;
    let parents_cpus = format!("package-test: {} CPUs, ", CPUS - 1);
    for line in [
        format!(
            "package-test: {release}, console=ttyS0 console=tty0 root=UUID={UUID} ro console=ttyS0 \
             init=/sbin/package-test dunlin.agent=ttyS0"
        ),
        parents_cpus.clone(),
        "package-test: /dev/mshv: root:kvm 660".to_string(),
        "package-test: network right, by virtio_net".to_string(),
        "package-test: on Dunlin: ok".to_string(),
        "the machine restarts".to_string(),
    ]
    .into_iter()
    .chain((firmware == Firmware::Uefi).then(|| "package-test: a variable of UEFI is set".to_string()))
    {
        ensure!(purged.console.contains(&line), "no '{line}' in {}", machine.log(name).display());
    }
    let memory =
        purged.console.split_once(&parents_cpus).and_then(|(_, rest)| rest.split(' ').next()?.parse::<u32>().ok());
    ensure!(memory.is_some_and(|mib| mib > LEAST_MEMORY), "the parent has {memory:?} MiB of {MEMORY}");
    ensure_word(&purged, "== purged")?;
    let (before, after) = (list(&installed.list, "before")?, list(&purged.list, "after")?);
    let lost: Vec<_> = before.difference(&after).collect();
    let left: Vec<_> = after.difference(&before).collect();
    lost.iter().for_each(|line| println!("before only: {line}"));
    left.iter().for_each(|line| println!("after only:  {line}"));
    ensure!(lost.is_empty() && left.is_empty(), "the package left traces");
    if !keeps {
        fs::remove_file(&disk)?;
    }
    println!(
        "package-test: {} files, directories and checksums are as before; {:.0} s in all",
        before.len(),
        started.elapsed().as_secs_f64()
    );
    Ok(ExitCode::SUCCESS)
}

fn ensure_word(start: &Start, word: &str) -> Result<()> {
    let last = start.list.lines().rev().find(|line| line.starts_with("== ")).unwrap_or("nothing");
    ensure!(last.trim_end() == word, "the machine ended with '{last}', not '{word}'");
    Ok(())
}

/// The lines of a list of files.
fn list(text: &str, name: &str) -> Result<BTreeSet<String>> {
    let begin = format!("== list {name}");
    // UEFI and GRUB write to both serial lines, before Linux does.
    let lines = text.lines().map(str::trim_end).skip_while(|line| !line.ends_with(&begin)).skip(1);
    let lines: BTreeSet<_> = lines.take_while(|line| *line != "== end").map(str::to_string).collect();
    ensure!(lines.len() > 1000, "the list '{name}' has {} lines only", lines.len());
    Ok(lines)
}

/// What a start of the machine has printed.
struct Start {
    console: String,
    list: String,
}

struct Pc<'a> {
    folder: &'a Path,
    disk: &'a Path,
    /// What a server in its network sends.
    deb: &'a Path,
    /// The memory of UEFI, if it has that.
    variables: Option<&'a PathBuf>,
}

/// Whether a restart of the machine's is one of QEMU's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Restarts {
    Never,
    ByItself,
}

impl Pc<'_> {
    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Starts the machine from its disk, and waits until it is off.
    fn start(&self, name: &str, what: &str, restarts: Restarts) -> Result<Start> {
        println!("package-test: {what}");
        let begun = Instant::now();
        let [console, list] = [self.log(name), self.folder.join(format!("{name}.list"))];
        let mut qemu = Command::new("timeout");
        qemu.args([&LIMIT.to_string(), "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35"])
            .args(["-cpu", "max", "-smp", &CPUS.to_string(), "-m", &format!("{MEMORY}M"), "-display", "none"])
            .args(["-nodefaults", "-device", "virtio-net-pci,netdev=net"])
            .args(["-netdev", &format!("user,id=net,guestfwd=tcp:10.0.2.100:80-cmd:cat {}", self.deb.display())])
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-serial", &format!("file:{}", list.display())])
            .args(["-drive", &format!("if=virtio,format=raw,cache=unsafe,file={}", self.disk.display())]);
        if let Some(variables) = self.variables {
            qemu.args(["-drive", &format!("if=pflash,format=raw,readonly=on,file={}", UEFI[0])])
                .args(["-drive", &format!("if=pflash,format=raw,file={}", variables.display())]);
        }
        if restarts == Restarts::Never {
            qemu.arg("-no-reboot");
        }
        let status = qemu.stdin(Stdio::null()).status().context("cannot run `timeout`")?;
        ensure!(status.success(), "QEMU ended with {status}: see {}", console.display());
        println!("package-test: {what}: {:.0} s", begun.elapsed().as_secs_f64());
        let read = |path: &Path| -> Result<String> { Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned()) };
        Ok(Start { console: read(&console)?, list: read(&list)? })
    }
}

/// The release of the parent's kernel, from its configuration and its name there.
fn parent_release(kernel: &Path) -> Result<String> {
    let config = fs::read_to_string(kernel.join("config"))?;
    let version = config.lines().find_map(|line| line.strip_prefix("# Linux/")?.split(' ').nth(1));
    let local = config.lines().find_map(|line| line.strip_prefix("CONFIG_LOCALVERSION="));
    let (version, local) = version.zip(local).context("the kernel's configuration has no version")?;
    Ok(format!("{version}{}", local.trim_matches('"')))
}

/// Makes the disk of the machine: Debian, the package in `/root`, the parent's kernel, and GRUB.
fn make_disk(places: &Places, folder: &Path, deb: &Path, firmware: Firmware, disk: &Path) -> Result<()> {
    let archive = folder.join("debian-for-both.tar");
    if !archive.is_file() {
        println!("package-test: making a Debian 12 from packages of its mirror (a minute or two, once)");
        let unfinished = folder.join("unfinished.tar");
        run(Command::new("mmdebstrap")
            .args(["--quiet", "--variant=minbase", &format!("--include={PACKAGES}"), "bookworm"])
            .arg(&unfinished))?;
        fs::rename(&unfinished, &archive)?;
    }
    let root = folder.join("root");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root)?;
    run(Command::new("tar").arg("-xpf").arg(&archive).args(["--numeric-owner", "--exclude=./dev/*", "-C"]).arg(&root))?;

    let put = |path: &str, bytes: &[u8], mode: u32| -> Result<()> {
        let place = root.join(path);
        fs::create_dir_all(place.parent().unwrap_or(&root))?;
        fs::write(&place, bytes).with_context(|| format!("cannot write {}", place.display()))?;
        Ok(fs::set_permissions(&place, fs::Permissions::from_mode(mode))?)
    };
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    put("root/dunlin.deb", &read(deb)?, 0o644)?;
    put("sbin/package-test", &read(&places.root.join("packaging/test/init"))?, 0o755)?;
    put("etc/fstab", format!("UUID={UUID} / ext4 rw 0 1\n").as_bytes(), 0o644)?;
    put("etc/default/grub", GRUB_DEFAULTS.as_bytes(), 0o644)?;

    let parent = parent::kernel(places)?;
    let release = parent_release(&parent)?;
    put(&format!("boot/vmlinuz-{release}"), &read(&parent.join("vmlinuz"))?, 0o644)?;
    put(&format!("boot/config-{release}"), &read(&parent.join("config"))?, 0o644)?;

    // GRUB's files, and a first menu. The machine itself writes the real one.
    let grub = root.join("boot/grub").join(firmware.platform());
    fs::create_dir_all(&grub)?;
    let modules = root.join("usr/lib/grub").join(firmware.platform());
    for entry in fs::read_dir(&modules).context("the Debian has no GRUB")? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "mod" || end == "lst") {
            fs::copy(&path, grub.join(path.file_name().unwrap_or_default()))?;
        }
    }
    let kernel = fs::read_dir(root.join("boot"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.strip_prefix("vmlinuz-").map(str::to_string))
        .find(|name| *name != release)
        .context("the Debian has no kernel")?;
    let first = format!(
        "linux /boot/vmlinuz-{kernel} root=/dev/vda1 ro console=ttyS0 init=/sbin/package-test\n\
         initrd /boot/initrd.img-{kernel}\nboot\n"
    );
    put("boot/grub/grub.cfg", first.as_bytes(), 0o600)?;
    let environment = root.join("boot/grub/grubenv");
    run(Command::new("grub-editenv").arg(&environment).arg("create"))?;
    let usual = format!("saved_entry=gnulinux-{kernel}-advanced-{UUID}");
    run(Command::new("grub-editenv").arg(&environment).args(["set", &usual]))?;

    write_disk(folder, &root, &modules, firmware, disk)
}

/// Bytes of a sector, and the first sector of the only partition.
const SECTOR: u64 = 512;
const FIRST: u32 = 2048;
/// MiB of the partition, and of the one behind it for UEFI.
const SIZE: u32 = 2048;
const EFI_SIZE: u32 = 16;

/// A disk with one partition and GRUB in front of it or in a partition behind it, without a loop device: the file
/// system is made from a folder, and GRUB's first part is put where `grub-bios-setup` or `grub-install` would put it.
fn write_disk(folder: &Path, root: &Path, modules: &Path, firmware: Firmware, disk: &Path) -> Result<()> {
    let [core, partition] = ["core.img", "partition"].map(|name| folder.join(name));
    let access = if firmware == Firmware::Bios { &["biosdisk"][..] } else { &[] };
    run(Command::new("grub-mkimage")
        .arg(format!("--format={}", firmware.platform()))
        .args(["--prefix=(hd0,msdos1)/boot/grub", "--directory"])
        .arg(modules)
        .arg("--output")
        .arg(&core)
        .args(access)
        .args(["part_msdos", "ext2"]))?;
    let _ = fs::remove_file(&partition);
    let mut make = Command::new("mke2fs");
    // Its usual place is not in every user's PATH.
    make.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    make.args(["-q", "-t", "ext4", "-U", UUID, "-d"]).arg(root).arg(&partition).arg(format!("{SIZE}M"));
    run(&mut make)?;

    let sectors = SIZE * 2048;
    let behind = FIRST + sectors;
    let mut boot = match firmware {
        Firmware::Bios => fs::read(modules.join("boot.img"))?,
        Firmware::Uefi => vec![0; 512],
    };
    // A partition table of a PC: state, type, first sector and number of sectors. 0x83 is Linux', 0xef is UEFI's.
    boot[446..510].fill(0);
    let mut entry = |at: usize, state: u8, kind: u8, first: u32, count: u32| {
        (boot[at], boot[at + 4]) = (state, kind);
        boot[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
        boot[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
    };
    entry(446, 0x80, 0x83, FIRST, sectors);
    if firmware == Firmware::Uefi {
        entry(462, 0, 0xef, behind, EFI_SIZE * 2048);
    }
    boot[510..512].copy_from_slice(&[0x55, 0xaa]);
    let mut file = File::create(disk).with_context(|| format!("cannot write {}", disk.display()))?;
    file.write_all(&boot)?;
    let efi = match firmware {
        Firmware::Bios => {
            // GRUB 2.06: boot.img loads the sector after itself, and the first sector of core.img the rest from there
            // on.
            let core = fs::read(&core)?;
            ensure!(core.len() as u64 <= (u64::from(FIRST) - 1) * SECTOR, "GRUB does not fit before the partition");
            file.write_all(&core)?;
            Vec::new()
        }
        Firmware::Uefi => efi_partition(folder, &core)?,
    };
    file.seek(SeekFrom::Start(u64::from(FIRST) * SECTOR))?;
    // Zeros stay holes.
    let mut from = File::open(&partition)?;
    let mut block = vec![0; 1 << 20];
    for _ in 0..SIZE {
        from.read_exact(&mut block)?;
        if block.iter().any(|byte| *byte != 0) {
            file.write_all(&block)?;
        } else {
            file.seek(SeekFrom::Current(1 << 20))?;
        }
    }
    file.seek(SeekFrom::Start(u64::from(behind) * SECTOR))?;
    file.write_all(&efi)?;
    file.set_len(u64::from(behind) * SECTOR + efi.len() as u64)?;
    fs::remove_file(&partition)?;
    Ok(())
}

/// A file system with GRUB where UEFI looks for it on a disk that it does not know.
fn efi_partition(folder: &Path, grub: &Path) -> Result<Vec<u8>> {
    let image = folder.join("efi");
    let _ = fs::remove_file(&image);
    File::create(&image)?.set_len(u64::from(EFI_SIZE) << 20)?;
    let mtool = |name: &str, words: &[&str]| run(Command::new(name).arg("-i").arg(&image).args(words));
    mtool("mformat", &["::"])?;
    mtool("mmd", &["::/EFI", "::/EFI/BOOT"])?;
    mtool("mcopy", &[&grub.to_string_lossy(), "::/EFI/BOOT/BOOTX64.EFI"])?;
    fs::read(&image).context("cannot read the file system for UEFI")
}
