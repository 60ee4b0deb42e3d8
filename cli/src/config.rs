//! The configuration of a run: a TOML file, and options that override it.
//!
//! Every value has its [`Place`]: the file, line and key, or the option. So any later check can name the place to fix,
//! such as a file that is not a kernel, or more memory than the computer has. For the same reason the tool reads the
//! file key by key, without a derived deserializer. A key that no code reads is unknown.

mod arch;
mod devices;
mod reader;
mod share;
pub(crate) mod stage2;
mod translation;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use abi::payload::{
    ApicMode, CpuShare, DecodeCache, Devices, HyperV, MAX_MEMORY_BYTES, MAX_VCPUS, Populate, Role, VmConfig as PackedVm,
};
use abi::setting::Setting as _;
use toml::de::DeTable;

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::quantity::{MIB, parse_size, parse_time, show_size};
use crate::stats::printable;
pub(crate) use arch::Arch;
use reader::{Source, Table};
use stage2::Stage2;
use translation::Translation;

/// The file for a run without one.
const DEFAULT: &str = include_str!("../../vms/default.toml");
/// The name of that file in messages.
const DEFAULT_NAME: &str = "vms/default.toml (built in)";
/// Maximum number of pCPUs: QEMU's q35 has no more without interrupt remapping.
const MAX_PCPUS: u32 = 255;
/// Memory of a VM is given out in pieces of this size.
const MEMORY_GRAIN: u64 = 2 * MIB;

/// A whole file, overridden.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The host.
    pub(crate) host: HostConfig,
    /// The VMs: at least one, with different names.
    pub(crate) vms: Vec<VmConfig>,
}

/// `[host]`.
#[derive(Clone, Debug)]
pub(crate) struct HostConfig {
    /// Its architecture.
    pub(crate) arch: Placed<Arch>,
    /// Number of physical CPUs.
    pub(crate) pcpus: Placed<u32>,
    /// Memory in bytes; if absent, the sum of the VMs' needs.
    pub(crate) memory: Option<Placed<u64>>,
    /// How QEMU runs the host.
    pub(crate) accel: Placed<Accel>,
    /// When to end the run.
    pub(crate) time_limit: Option<Duration>,
    /// The QEMU to use.
    pub(crate) qemu: Option<Placed<PathBuf>>,
    /// Start no VM if no IOMMU guards the machine.
    pub(crate) require_iommu: bool,
}

/// `[[vm]]`.
#[derive(Clone, Debug)]
pub(crate) struct VmConfig {
    /// Its name.
    pub(crate) name: Placed<String>,
    /// Number of vCPUs, or [`PackedVm::ALL_CPUS`].
    pub(crate) vcpus: Placed<u32>,
    /// Memory in bytes, or [`PackedVm::REST`].
    pub(crate) memory: Placed<u64>,
    /// The kernel.
    pub(crate) kernel: Placed<Kernel>,
    /// The initial RAM disk.
    pub(crate) initrd: Placed<Initrd>,
    /// The kernel's command line.
    pub(crate) cmdline: Placed<String>,
    /// What it is to other VMs.
    pub(crate) role: Placed<Role>,
    /// The machine's devices that it has for itself.
    pub(crate) devices: Placed<Devices>,
    /// How the local APIC is presented.
    pub(crate) apic: Placed<ApicMode>,
    /// The cache of emulated instructions.
    pub(crate) decode_cache: DecodeCache,
    /// How TLBs are flushed, and tagged.
    pub(crate) translation: Translation,
    /// How memory is mapped, and writes to it logged.
    pub(crate) stage2: Stage2,
    /// Its share of the pCPUs.
    pub(crate) share: Placed<CpuShare>,
    /// Keys of the file that mean nothing where a VM is no PC.
    for_pcs: Vec<Place>,
}

/// How QEMU runs the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accel {
    /// KVM if it can nest SVM, otherwise emulation.
    Auto,
    /// Emulation, with a thread for each CPU.
    Tcg,
    /// Emulation of all CPUs in turn by one thread.
    TcgSingle,
    /// KVM with nested SVM.
    Kvm,
}

abi::settings! {
    Accel, "accelerator": Auto = "auto", Tcg = "tcg", TcgSingle = "tcg-single", Kvm = "kvm";
}

/// The source of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Debian's `linux-image-cloud-amd64`.
    DebianCloud,
    /// Debian's `linux-image-amd64`.
    Debian,
    /// The guest that measures exits.
    MeasuringGuest,
    /// Linux with `/dev/mshv`, as `make parent` leaves it.
    Parent,
    /// The same with options like those of distributions, as `make parent-stock` leaves it.
    ParentStock,
    /// A boot module of this name.
    Module(String),
    /// A file.
    File(PathBuf),
}

impl Kernel {
    const NAMES: &'static [&'static str] =
        &["debian-cloud", "debian", "measuring-guest", "parent", "parent-stock", "module", "module:NAME"];
}

/// The source of an initial RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Initrd {
    /// Ours: busybox, and the agent that speaks to this tool.
    Dunlin,
    /// Ours, and programs that change mappings with many threads.
    Workloads,
    /// Ours, these programs, a C compiler and C sources.
    Compile,
    /// Ours, QEMU, and a kernel and an initrd for its guests.
    Parent,
    /// The same, and modules of the kernel like those of distributions.
    ParentStock,
    /// As `Parent`, and a disk for its guests: a small Debian.
    ParentDebian,
    /// Ours first, then Debian with libvirt.
    ParentLibvirt,
    /// No initrd.
    None,
    /// A boot module of this name.
    Module(String),
    /// A file.
    File(PathBuf),
}

impl Initrd {
    const NAMES: &'static [&'static str] = &[
        "dunlin",
        "workloads",
        "compile",
        "parent",
        "parent-stock",
        "parent-debian",
        "parent-libvirt",
        "none",
        "module",
        "module:NAME",
    ];

    /// The archives of the build for it, in the order in which the kernel unpacks them; none for a file of the user.
    pub(crate) fn archives(&self) -> &'static [&'static str] {
        match self {
            Self::Dunlin => &["initrd.cpio.gz"],
            Self::Workloads => &["initrd.cpio.gz", "workloads.cpio"],
            Self::Compile => &["initrd.cpio.gz", "workloads.cpio", "compile.cpio"],
            Self::Parent => &["initrd.cpio.gz", "parent.cpio"],
            Self::ParentStock => &["initrd.cpio.gz", "parent.cpio", "parent-stock.cpio"],
            Self::ParentDebian => &["initrd.cpio.gz", "parent.cpio", "parent-debian.cpio"],
            Self::ParentLibvirt => &["initrd.cpio.gz", "parent-libvirt.cpio"],
            Self::None | Self::Module(_) | Self::File(_) => &[],
        }
    }

    /// Whether it is ours, with the agent that speaks to this tool.
    pub(crate) fn has_agent(&self) -> bool {
        !self.archives().is_empty()
    }
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A key of a file.
    Key {
        /// The file as it was named.
        file: String,
        /// Line, counted from 1.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// A key that the file leaves to its default.
    Absent {
        /// The file as it was named.
        file: String,
        /// Line of the table that could have it, counted from 1.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// An option.
    Option(&'static str),
}

impl Place {
    /// Bad input at this place. What was written there is shown without a meaning for the terminal.
    pub(crate) fn bad(&self, what: impl fmt::Display) -> Failure {
        Failure::bad_input(format!("{self}: {}", printable(&what.to_string())))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key { file, line, key } => write!(f, "{file}:{line}: key '{key}'"),
            Self::Absent { file, line, key } => write!(f, "{file}:{line}: key '{key}' (default)"),
            Self::Option(option) => write!(f, "option '{option}'"),
        }
    }
}

/// A value and the place where it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed<T> {
    /// The value.
    pub(crate) value: T,
    /// The place where it was written.
    pub(crate) place: Place,
}

impl Config {
    /// Reads the file that the command line names, or the default, and applies the command line's overrides.
    pub(crate) fn load(args: &RunArgs) -> Result<Self, Failure> {
        let mut config = match &args.file {
            None => Self::parse(DEFAULT, DEFAULT_NAME, Path::new(""))?,
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path).map_err(|error| {
                    Failure::bad_input(format!("{name}: cannot be read: {error}"))
                        .help("name a TOML file such as vms/default.toml, which explains the keys")
                })?;
                Self::parse(&text, &name, path.parent().unwrap_or(Path::new("")))?
            }
        };
        config.apply(args)?;
        Ok(config)
    }

    /// Reads VMs for a running host with this architecture. The settings of `[host]` do not apply to it, but `arch`
    /// must match.
    pub(crate) fn for_host(path: &Path, arch: Arch) -> Result<Self, Failure> {
        let mut config = Self::load(&RunArgs { file: Some(path.to_path_buf()), ..RunArgs::default() })?;
        let named = &config.host.arch;
        if named.value != arch {
            if matches!(named.place, Place::Key { .. }) {
                let what = format!("'{}', but the running host is {}", named.value.name(), arch.name());
                return Err(named.place.bad(what).help("name another host with --host, or omit the key"));
            }
            config = Self::load(&RunArgs { file: Some(path.to_path_buf()), arch: Some(arch), ..RunArgs::default() })?;
        }
        Ok(config)
    }

    /// Reads `text`, the contents of the file called `name`; paths in it start at `directory`.
    fn parse(text: &str, name: &str, directory: &Path) -> Result<Self, Failure> {
        let source = Source { text, name, directory };
        let root = DeTable::parse(text).map_err(|error| {
            let (line, column) = source.position(error.span().map_or(0, |span| span.start));
            let why = error.message().replace('\n', ", ");
            Failure::bad_input(format!("{name}:{line}:{column}: not TOML: {}", printable(&why)))
                .help("vms/default.toml shows how a file looks and explains the keys")
        })?;

        let mut root = Table::new(&source, root.get_ref(), 0, "file");
        let host = HostConfig::read(root.table("host")?)?;
        let mut vms = Vec::new();
        for table in root.tables("vm")? {
            vms.push(VmConfig::read(table)?);
        }
        root.finish()?;

        if vms.is_empty() {
            return Err(Failure::bad_input(format!("{name}: no [[vm]]: there is nothing to run"))
                .help("add a table [[vm]] with at least name = \"...\"; vms/default.toml explains the keys"));
        }
        for (at, vm) in vms.iter().enumerate() {
            if let Some(first) = vms[..at].iter().find(|first| first.name.value == vm.name.value) {
                let place = &first.name.place;
                return Err(vm
                    .name
                    .place
                    .bad(format!("a second VM called '{}'", vm.name.value))
                    .help(format!("the first is at {place}; give each VM a different name")));
            }
        }
        let mut parents = vms.iter().filter(|vm| vm.role.value == Role::Parent);
        if let (Some(first), Some(second)) = (parents.next(), parents.next()) {
            let help = format!("the first is at {}; a host has one", first.role.place);
            return Err(second.role.place.bad("a second parent").help(help));
        }
        devices::check(&vms)?;
        Ok(Self { host, vms })
    }

    fn apply(&mut self, args: &RunArgs) -> Result<(), Failure> {
        // Paths on the command line start at the current directory, as everywhere.
        let here = Path::new("");
        for vm in &mut self.vms {
            if let Some(text) = &args.kernel {
                let place = Place::Option("--kernel");
                vm.kernel = kernel(text, here, place.clone())?;
                if vm.kernel.value == Kernel::MeasuringGuest {
                    vm.cmdline = Placed { value: String::new(), place };
                }
            }
            if let Some(text) = &args.initrd {
                vm.initrd = initrd(text, here, Place::Option("--initrd"))?;
            }
            if let Some(count) = args.vcpus {
                vm.vcpus = vcpus(count, Place::Option("--vcpus"))?;
            }
            if let Some(text) = &args.memory {
                vm.memory = vm_memory(text, Place::Option("--memory"))?;
            }
            if let Some(text) = &args.cmdline {
                vm.cmdline = cmdline(text, Place::Option("--cmdline"))?;
            }
            if let Some(text) = &args.append {
                let all = format!("{} {text}", vm.cmdline.value);
                vm.cmdline = cmdline(all.trim(), Place::Option("--append"))?;
            }
        }

        let host = &mut self.host;
        if let Some(value) = args.arch {
            host.arch = Placed { value, place: Place::Option("--arch") };
        }
        for vm in &mut self.vms {
            vm.cmdline.value = host.arch.value.cmdline(&vm.cmdline.value);
            if let (Arch::Aarch64, Some(place)) = (host.arch.value, vm.for_pcs.first()) {
                let help = format!("leave it out; of use on x86_64 only: {}", VmConfig::FOR_PCS.join(", "));
                return Err(place.bad("has no meaning on aarch64").help(help));
            }
            if host.arch.value == Arch::Aarch64 {
                if let Devices::These(_) = vm.devices.value {
                    let help =
                        "write devices = \"all\"; single functions need an IOMMU, and Dunlin drives none of aarch64";
                    return Err(vm.devices.place.bad("PCI functions exist on x86_64 only").help(help));
                }
                let modules = [
                    matches!(vm.kernel.value, Kernel::Module(_)).then_some(&vm.kernel.place),
                    matches!(vm.initrd.value, Initrd::Module(_)).then_some(&vm.initrd.place),
                ];
                if let Some(place) = modules.into_iter().flatten().next() {
                    return Err(place.bad("boot modules exist on x86_64 only").help("name a file"));
                }
            }
        }
        if let Some(count) = args.pcpus {
            host.pcpus = pcpus(count, Place::Option("--pcpus"))?;
        }
        if let Some(value) = args.accel {
            host.accel = Placed { value, place: Place::Option("--accel") };
        }
        if let Some(text) = &args.time_limit {
            host.time_limit = Some(time_limit(text, &Place::Option("--time-limit"))?);
        }
        if let Some(path) = &args.qemu {
            host.qemu = Some(Placed { value: path.clone(), place: Place::Option("--qemu") });
        }
        Ok(())
    }
}

impl HostConfig {
    fn read(table: Option<Table<'_>>) -> Result<Self, Failure> {
        let absent = Place::Absent { file: DEFAULT_NAME.to_string(), line: 1, key: "pcpus" };
        let Some(mut table) = table else {
            let pcpus = Placed { value: 2, place: absent.clone() };
            let arch = Placed { value: Arch::DEFAULT, place: absent.clone() };
            let accel = Placed { value: Accel::DEFAULT, place: absent };
            return Ok(Self { arch, pcpus, memory: None, accel, time_limit: None, qemu: None, require_iommu: false });
        };

        let directory = table.source.directory;
        let arch = table.setting("arch")?;
        let (count, place) = table.integer("pcpus", 2)?;
        let pcpus = pcpus(count, place)?;
        let memory = match table.text("memory")? {
            Some((text, place)) => Some(Placed { value: parse_size(&text).map_err(|what| place.bad(what))?, place }),
            None => None,
        };
        let accel = table.setting("accel")?;
        let time_limit = match table.text("time_limit")? {
            Some((text, place)) => Some(time_limit(&text, &place)?),
            None => None,
        };
        let qemu = table.text("qemu")?.map(|(text, place)| {
            // A name without a slash is searched in PATH, as in a shell.
            let value = if text.contains('/') { directory.join(text) } else { PathBuf::from(text) };
            Placed { value, place }
        });
        let require_iommu = table.boolean_or("require_iommu", false)?;
        table.finish()?;
        Ok(Self { arch, pcpus, memory, accel, time_limit, qemu, require_iommu })
    }
}

impl VmConfig {
    /// Keys that choose what only a PC has.
    const FOR_PCS: [&str; 5] = ["role", "apic", "hyperv", "flush", "decode_cache"];

    fn read(mut table: Table<'_>) -> Result<Self, Failure> {
        let directory = table.source.directory;
        let Some((text, place)) = table.text("name")? else {
            let what = format!("{}: [[vm]] has no key 'name'", table.at());
            return Err(Failure::bad_input(what).help("add name = \"...\"; logs and commands call the VM by it"));
        };
        let name = vm_name(text, place)?;
        let vcpus = match table.integer_or("vcpus", 1, "all")? {
            (Some(count), place) => vcpus(count, place)?,
            (None, place) => Placed { value: PackedVm::ALL_CPUS, place },
        };
        let (text, place) = table.text_or("memory", "512M")?;
        let memory = if text == "rest" { Placed { value: PackedVm::REST, place } } else { vm_memory(&text, place)? };
        let (text, place) = table.text_or("kernel", "debian-cloud")?;
        let kernel = kernel(&text, directory, place)?;
        let (text, place) = table.text_or("initrd", "dunlin")?;
        let initrd = initrd(&text, directory, place)?;
        // The measuring guest has words of its own, and would complain of Linux's.
        let default = if kernel.value == Kernel::MeasuringGuest { "" } else { "console=ttyS0 quiet" };
        let (text, place) = table.text_or("cmdline", default)?;
        let cmdline = cmdline(&text, place)?;
        let role: Placed<Role> = table.setting("role")?;
        let devices = devices::read(&mut table)?;
        let apic = table.setting("apic")?;
        let translation = Translation::read(&mut table)?;
        if role.value == Role::Parent && translation.hyperv == HyperV::Off {
            return Err(role
                .place
                .bad("a parent creates VMs by hypercalls, and is offered none, since 'hyperv' is \"off\"")
                .help("leave 'hyperv' out"));
        }
        let decode_cache = table.setting("decode_cache")?.value;
        let stage2 = Stage2::read(&mut table)?;
        if devices.value != Devices::None && stage2.populate != Populate::AtStart {
            return Err(devices
                .place
                .bad("devices write to memory at any time, so all of it is mapped at the start")
                .help("leave 'populate' out"));
        }
        if devices.value != Devices::None
            && matches!(decode_cache, DecodeCache::WriteProtect | DecodeCache::WriteProtectTables)
        {
            return Err(devices
                .place
                .bad("devices write to all memory, and 'decode_cache' write-protects a part of it")
                .help("leave 'decode_cache' out"));
        }
        let share = share::read(&mut table)?;
        let for_pcs = table.places(&Self::FOR_PCS);
        table.finish()?;
        let open = Self::open(&vcpus, &memory);
        if let Some((place, word)) = open.filter(|_| devices.value != Devices::All) {
            return Err(place
                .bad(format!("\"{word}\" is for the VM that has the machine's devices"))
                .help("write a number; or give the VM devices = \"all\""));
        }
        Ok(Self {
            name,
            vcpus,
            memory,
            kernel,
            initrd,
            cmdline,
            role,
            devices,
            apic,
            translation,
            decode_cache,
            stage2,
            share,
            for_pcs,
        })
    }
}

impl VmConfig {
    /// What only the machine knows that the VM will be on: the place, and the word there.
    fn open<'a>(vcpus: &'a Placed<u32>, memory: &'a Placed<u64>) -> Option<(&'a Place, &'static str)> {
        let vcpus = (vcpus.value == PackedVm::ALL_CPUS).then_some((&vcpus.place, "all"));
        vcpus.or((memory.value == PackedVm::REST).then_some((&memory.place, "rest")))
    }

    /// Checks that the VM's numbers are known here.
    ///
    /// # Errors
    /// The machine decides one of them when it starts.
    pub(crate) fn is_closed(&self) -> Result<(), Failure> {
        match Self::open(&self.vcpus, &self.memory) {
            None => Ok(()),
            Some((place, word)) => Err(place
                .bad(format!("\"{word}\" is known only where a boot loader starts the machine"))
                .help("write a number here; `dunlin payload` and `dunlin image` take the word")),
        }
    }
}

fn vm_name(text: String, place: Place) -> Result<Placed<String>, Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > 64 || !text.chars().all(plain) {
        return Err(place
            .bad(format!("{text:?} is not a valid name"))
            .help("a name has 1 to 64 of the characters a-z A-Z 0-9 - _ ."));
    }
    Ok(Placed { value: text, place })
}

fn vcpus(count: i64, place: Place) -> Result<Placed<u32>, Failure> {
    match u32::try_from(count) {
        Ok(value @ 1..=MAX_VCPUS) => Ok(Placed { value, place }),
        _ => Err(place
            .bad(format!("{count} vCPUs; a VM needs 1 to {MAX_VCPUS}"))
            .help("vCPUs may outnumber the pCPUs; 4 on 2 is the default")),
    }
}

fn pcpus(count: i64, place: Place) -> Result<Placed<u32>, Failure> {
    match u32::try_from(count) {
        Ok(value @ 1..=MAX_PCPUS) => Ok(Placed { value, place }),
        _ => Err(place
            .bad(format!("{count} pCPUs; QEMU gives a host 1 to {MAX_PCPUS}"))
            .help("more pCPUs than this VM has CPUs only make the run slower")),
    }
}

fn vm_memory(text: &str, place: Place) -> Result<Placed<u64>, Failure> {
    let value = parse_size(text).map_err(|what| place.bad(what))?;
    if value == 0 {
        return Err(place.bad("a VM needs memory").help("write a size such as \"512M\""));
    }
    if value > MAX_MEMORY_BYTES {
        let what = format!("{text} is more than a VM can have");
        return Err(place.bad(what).help(format!("\"{}T\" is the maximum", MAX_MEMORY_BYTES >> 40)));
    }
    if !value.is_multiple_of(MEMORY_GRAIN) {
        let near = value.next_multiple_of(MEMORY_GRAIN);
        return Err(place
            .bad(format!("{text} is not a multiple of {}", show_size(MEMORY_GRAIN)))
            .help(format!("the next that is: \"{}M\"", near / MIB)));
    }
    Ok(Placed { value, place })
}

fn cmdline(text: &str, place: Place) -> Result<Placed<String>, Failure> {
    match text.chars().find(|c| c.is_control()) {
        Some(odd) => Err(place
            .bad(format!("{odd:?} is not allowed in a kernel command line"))
            .help("write everything on one line")),
        None => Ok(Placed { value: text.to_string(), place }),
    }
}

fn kernel(text: &str, directory: &Path, place: Place) -> Result<Placed<Kernel>, Failure> {
    let value = match text {
        "debian-cloud" => Kernel::DebianCloud,
        "debian" => Kernel::Debian,
        "measuring-guest" => Kernel::MeasuringGuest,
        "parent" => Kernel::Parent,
        "parent-stock" => Kernel::ParentStock,
        _ => match module(text, "kernel", &place)? {
            Some(name) => Kernel::Module(name),
            None => Kernel::File(file(text, directory, Kernel::NAMES, &place)?),
        },
    };
    Ok(Placed { value, place })
}

fn initrd(text: &str, directory: &Path, place: Place) -> Result<Placed<Initrd>, Failure> {
    let value = match text {
        "dunlin" => Initrd::Dunlin,
        "workloads" => Initrd::Workloads,
        "compile" => Initrd::Compile,
        "parent" => Initrd::Parent,
        "parent-stock" => Initrd::ParentStock,
        "parent-debian" => Initrd::ParentDebian,
        "parent-libvirt" => Initrd::ParentLibvirt,
        "none" => Initrd::None,
        _ => match module(text, "initrd", &place)? {
            Some(name) => Initrd::Module(name),
            None => Initrd::File(file(text, directory, Initrd::NAMES, &place)?),
        },
    };
    Ok(Placed { value, place })
}

/// The name of the boot module that `text` means: `usual` if it is only "module".
fn module(text: &str, usual: &str, place: &Place) -> Result<Option<String>, Failure> {
    let name = match text.split_once(':') {
        None if text == "module" => usual,
        Some(("module", name)) => name,
        _ => return Ok(None),
    };
    // GRUB gives some characters a meaning of their own, and the hypervisor takes the module `payload` for the payload.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name == "payload" || !name.chars().all(is_plain) {
        return Err(place.bad(format!("{name:?} is not a valid name of a boot module")).help(format!(
            "write \"module:{usual}\"; a name has characters a-z A-Z 0-9 - _ . and is not \"payload\""
        )));
    }
    Ok(Some(name.to_string()))
}

/// The file `text`, relative to `directory`. If there is none, the error also lists the words `names`.
fn file(text: &str, directory: &Path, names: &[&str], place: &Place) -> Result<PathBuf, Failure> {
    let path = directory.join(text);
    if path.is_file() {
        return Ok(path);
    }
    let what = if path.exists() { "is not a file" } else { "does not exist" };
    let names = names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    Err(place
        .bad(format!("'{}' {what}", path.display()))
        .help(format!("name a file (from the directory of the TOML file), or one of {names}")))
}

fn time_limit(text: &str, place: &Place) -> Result<Duration, Failure> {
    parse_time(text).map_err(|what| place.bad(what).help("write a duration such as \"60s\" or \"5m\""))
}

#[cfg(test)]
mod tests;
