//! Converts a configuration to the hypervisor's payload, and checks every file.
//!
//! It finds all faults that can be found before the boot: files that are not kernels, initrds that do not fit, too
//! little memory. It uses the hypervisor's crate that loads kernels, so both agree.

use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use aarch64_defs::image::{ImageError, place as place_image};
use abi::payload::{Blob, Builder, File, VmConfig as PackedVm};
use x86_boot::{Boot, Error as BootError};

use crate::args::{PayloadArgs, RunArgs};
use crate::assets::Assets;
use crate::config::{Arch, Config, Initrd, Kernel, Place, VmConfig};
use crate::exec;
use crate::failure::Failure;
use crate::image;
use crate::quantity::{MIB, show_size};

/// Memory that the hypervisor needs for itself, for any size of VM: image, heap, stacks, metadata of the frames.
const HOST_OVERHEAD: u64 = 128 * MIB;
/// Memory that it needs for each vCPU: control block, saved state, stack.
const VCPU_OVERHEAD: u64 = MIB / 4;
/// Of each VM's memory, the part that stage-2 tables may take if every page is mapped alone (1/512, doubled).
const TABLES_PART: u64 = 256;

/// The payload and other data for the start of the hypervisor.
#[derive(Debug)]
pub(crate) struct Payload {
    /// The archive, as [`abi::payload`] defines it.
    pub(crate) bytes: Vec<u8>,
    /// Memory in bytes that the host needs.
    pub(crate) host_memory: u64,
}

/// How the hypervisor gets its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// This tool, on this computer. It ends the host itself once it has read the last counters: a host that ends on its
    /// own would take them along.
    Here,
    /// A boot loader, on any computer. The host ends with its VMs.
    Elsewhere,
    /// As `Elsewhere`, by a menu that can name further files: a VM's kernel or initrd may be a boot module.
    WithModules,
}

/// A file of a VM, and how the hypervisor gets it.
enum Source {
    Packed(Vec<u8>),
    Module(String),
}

/// Writes the payload that `args` ask for.
pub(crate) fn run(args: &PayloadArgs) -> Result<(), Failure> {
    let config = Config::load(&RunArgs { file: Some(args.file.clone()), arch: args.arch, ..RunArgs::default() })?;
    let config = image::tell_agents(config);
    let assets = Assets::locate().of(config.host.arch.value);
    let payload = pack(&config, &assets, None, Start::WithModules)?;
    // A machine that starts meanwhile finds the old file or the new one, and never a part.
    let failed = |error: io::Error| Failure::failed(format!("{}: {error}", args.output.display()));
    let folder = args.output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut unfinished = tempfile::Builder::new().prefix(".dunlin-").tempfile_in(folder).map_err(failed)?;
    unfinished.write_all(&payload.bytes).map_err(failed)?;
    // Everybody may read it, as other files of /boot; temporary files are their maker's alone.
    unfinished.as_file().set_permissions(Permissions::from_mode(0o644)).map_err(failed)?;
    unfinished.as_file().sync_all().map_err(failed)?;
    unfinished.persist(&args.output).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Reads and checks the files of all VMs and packs them; `script` goes into our initrd.
pub(crate) fn pack(config: &Config, assets: &Assets, script: Option<&str>, start: Start) -> Result<Payload, Failure> {
    let mut files = Files { builder: Builder::new(start != Start::Here), packed: Vec::new() };
    files.builder.require_iommu(config.host.require_iommu);
    for vm in &config.vms {
        if start == Start::Here {
            vm.is_closed()?;
        }
        let (kernel, initrd) = sources(config.host.arch.value, vm, assets, script, start)?;
        let (kernel, initrd) = (files.add(kernel), initrd.map(|initrd| files.add(initrd)));
        files.builder.add_vm(describe(vm, kernel, initrd));
    }
    let bytes = files
        .builder
        .finish()
        .map_err(|error| Failure::bad_input(format!("cannot pack the VMs for the hypervisor: {error}")))?;

    let available = (start == Start::Here).then(available_memory).flatten();
    let host_memory = host_memory(config, bytes.len() as u64, available)?;
    Ok(Payload { bytes, host_memory })
}

/// A VM that was checked, and the bytes of its files.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// Its description; of its files, the lengths.
    pub(crate) config: PackedVm,
    /// The kernel.
    pub(crate) kernel: Vec<u8>,
    /// The initial RAM disk.
    pub(crate) initrd: Option<Vec<u8>>,
}

/// Reads and checks the files of a VM for a running host; `script` goes into our initrd.
pub(crate) fn prepare(arch: Arch, vm: &VmConfig, assets: &Assets, script: Option<&str>) -> Result<Prepared, Failure> {
    vm.is_closed()?;
    let (kernel, initrd) = read_files(arch, vm, assets, script)?;
    let blob = |bytes: &Vec<u8>| File::Blob(Blob { offset: 0, bytes: bytes.len() as u64 });
    let config = describe(vm, blob(&kernel), initrd.as_ref().map(blob));
    Ok(Prepared { config, kernel, initrd })
}

/// Where the hypervisor gets the VM's files from. Files that are here are read and checked.
fn sources(
    arch: Arch,
    vm: &VmConfig,
    assets: &Assets,
    script: Option<&str>,
    start: Start,
) -> Result<(Source, Option<Source>), Failure> {
    let kernel = match &vm.kernel.value {
        Kernel::Module(name) if start == Start::WithModules => Some(name),
        _ => None,
    };
    let initrd = match initrd_of(vm) {
        Initrd::Module(name) if start == Start::WithModules => Some(name),
        _ => None,
    };
    let module = |name: &String| Source::Module(name.clone());
    Ok(match (kernel, initrd) {
        (None, None) => {
            let (kernel, initrd) = read_files(arch, vm, assets, script)?;
            (Source::Packed(kernel), initrd.map(Source::Packed))
        }
        (Some(kernel), Some(initrd)) => (module(kernel), Some(module(initrd))),
        // The hypervisor checks whether kernel and initrd fit together: here, one of them is not known.
        (Some(kernel), None) => (module(kernel), read_initrd(vm, assets, script)?.map(Source::Packed)),
        (None, Some(initrd)) => {
            let mut alone = vm.clone();
            alone.initrd.value = Initrd::None;
            let (kernel, _) = read_files(arch, &alone, assets, script)?;
            (Source::Packed(kernel), Some(module(initrd)))
        }
    })
}

/// Kernel and initrd of a VM.
type VmFiles = (Vec<u8>, Option<Vec<u8>>);

/// Reads and checks the files of a VM.
fn read_files(arch: Arch, vm: &VmConfig, assets: &Assets, script: Option<&str>) -> Result<VmFiles, Failure> {
    let path = assets.kernel(&vm.kernel.value, &vm.kernel.place)?;
    let kernel = read(&path, &vm.kernel.place)?;
    let initrd = read_initrd(vm, assets, script)?;
    match arch {
        Arch::X86_64 => check_on_x86(vm, &path, &kernel, initrd.as_deref())?,
        Arch::Aarch64 => {
            let initrd_bytes = initrd.as_ref().map_or(0, Vec::len) as u64;
            place_image(&kernel, initrd_bytes, vm.memory.value).map_err(|error| blame_image(vm, &path, error))?;
        }
    }
    Ok((kernel, initrd))
}

fn read_initrd(vm: &VmConfig, assets: &Assets, script: Option<&str>) -> Result<Option<Vec<u8>>, Failure> {
    let mut initrd: Option<Vec<u8>> = None;
    for path in assets.initrd(initrd_of(vm), &vm.initrd.place)? {
        exec::append(initrd.get_or_insert_default(), &read(&path, &vm.initrd.place)?);
    }
    if let (Some(initrd), Some(script), true) = (&mut initrd, script, has_agent(vm)) {
        exec::add_script(initrd, script)
            .map_err(|error| Failure::bad_input(format!("cannot pack the command for the guest: {error}")))?;
    }
    Ok(initrd)
}

/// The VM as the hypervisor knows it.
pub(crate) fn describe(vm: &VmConfig, kernel: File, initrd: Option<File>) -> PackedVm {
    PackedVm {
        name: vm.name.value.clone(),
        vcpus: vm.vcpus.value,
        memory_bytes: vm.memory.value,
        kernel,
        initrd,
        cmdline: vm.cmdline.value.clone(),
        role: vm.role.value,
        devices: vm.devices.value.clone(),
        apic: vm.apic.value,
        hyperv: vm.translation.hyperv,
        flush: vm.translation.flush,
        tags: vm.translation.tags,
        tag_limit: vm.translation.tag_limit,
        decode_cache: vm.decode_cache,
        populate: vm.stage2.populate,
        dirty: vm.stage2.dirty,
        share: vm.share.value,
    }
}

fn check_on_x86(vm: &VmConfig, path: &Path, kernel: &[u8], initrd: Option<&[u8]>) -> Result<(), Failure> {
    let boot = Boot {
        kernel,
        initrd,
        cmdline: &vm.cmdline.value,
        // What only the machine knows is enough.
        memory_bytes: if vm.memory.value == PackedVm::REST { u64::MAX } else { vm.memory.value },
        vcpus: vm.vcpus.value.max(1),
        role: vm.role.value,
        apic: vm.apic.value,
        machine: None,
    };
    x86_boot::check(&boot).map(|_| ()).map_err(|error| blame(vm, path, error))
}

/// The measuring guest ignores an initrd; all other kernels get the configured one.
fn initrd_of(vm: &VmConfig) -> &Initrd {
    match vm.kernel.value {
        Kernel::MeasuringGuest => &Initrd::None,
        _ => &vm.initrd.value,
    }
}

/// Whether the VM runs one of our initrds, whose agent reports to this tool.
pub(crate) fn has_agent(vm: &VmConfig) -> bool {
    initrd_of(vm).has_agent()
}

fn read(path: &Path, place: &Place) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| place.bad(format!("'{}' cannot be read: {error}", path.display())))
}

/// The failure for a boot error: the key of the VM to change, and the remedy.
fn blame(vm: &VmConfig, kernel: &Path, error: BootError) -> Failure {
    match error {
        BootError::MemoryTooSmall { needs, .. } => vm.memory.place.bad(error).help(format!(
            "\"{}M\" is the minimum for {}",
            needs.next_multiple_of(2 * MIB) / MIB,
            kernel.display()
        )),
        BootError::InitrdTooLarge { .. } => vm.initrd.place.bad(error).help(format!("{} has little", vm.memory.place)),
        BootError::CmdlineTooLong { .. } | BootError::CmdlineHasNul { .. } => {
            vm.cmdline.place.bad(error).help("shorten it; the kernel would cut it without a message")
        }
        BootError::Vcpus { .. } => {
            vm.vcpus.place.bad(error).help(format!("fewer vCPUs, or \"x2apic\" ({})", vm.apic.place))
        }
        _ => vm
            .kernel
            .place
            .bad(format!("{}: {error}", kernel.display()))
            .help("name an x86-64 bzImage (Debian: /boot/vmlinuz-*) or an ELF with a PVH note"),
    }
}

/// As [`blame`], for kernels of arm64.
fn blame_image(vm: &VmConfig, kernel: &Path, error: ImageError) -> Failure {
    match error {
        ImageError::MemoryTooSmall { needs, .. } => vm.memory.place.bad(error).help(format!(
            "\"{}M\" is the minimum for {}",
            needs.next_multiple_of(2 * MIB) / MIB,
            kernel.display()
        )),
        _ => vm
            .kernel
            .place
            .bad(format!("{}: {error}", kernel.display()))
            .help("name an uncompressed Image for arm64 (Debian: /boot/vmlinuz-*)"),
    }
}

/// The memory of the host: the configured amount if that is enough, else the sum of its VMs' needs.
fn host_memory(config: &Config, payload: u64, available: Option<u64>) -> Result<u64, Failure> {
    let vm_memory: u64 = config.vms.iter().map(|vm| vm.memory.value).fold(0, u64::saturating_add);
    let vcpus: u64 = config.vms.iter().map(|vm| u64::from(vm.vcpus.value)).sum();
    let overhead = HOST_OVERHEAD + payload + vcpus * VCPU_OVERHEAD + vm_memory / TABLES_PART;
    let needed = vm_memory.saturating_add(overhead).checked_next_multiple_of(2 * MIB).unwrap_or(u64::MAX);

    let (bytes, place) = match (&config.host.memory, config.vms.iter().max_by_key(|vm| vm.memory.value)) {
        (Some(given), _) if given.value < needed => {
            return Err(given
                .place
                .bad(format!(
                    "{} for the host; its VMs have {} and the hypervisor needs another {}",
                    show_size(given.value),
                    show_size(vm_memory),
                    show_size(needed - vm_memory)
                ))
                .help(format!("\"{}M\" is the minimum, and the default", needed / MIB)));
        }
        (Some(given), _) => (given.value, Some(&given.place)),
        (None, largest) => (needed, largest.map(|vm| &vm.memory.place)),
    };
    match (available, place) {
        (Some(available), Some(place)) if bytes > available => Err(place
            .bad(format!(
                "the host needs {}, but this computer has only {} free",
                show_size(bytes),
                show_size(available / MIB * MIB)
            ))
            .help("give the VMs less memory, or run fewer of them")),
        _ => Ok(bytes),
    }
}

/// Bytes of memory that are free without swapping, if the kernel reports it (`/proc/meminfo`).
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The files in a payload; equal ones are packed once.
struct Files {
    builder: Builder,
    packed: Vec<(Vec<u8>, Blob)>,
}

impl Files {
    fn add(&mut self, source: Source) -> File {
        let bytes = match source {
            Source::Packed(bytes) => bytes,
            Source::Module(name) => return File::Module(name),
        };
        if let Some((_, blob)) = self.packed.iter().find(|(packed, _)| *packed == bytes) {
            return File::Blob(*blob);
        }
        let blob = self.builder.add_blob(&bytes);
        self.packed.push((bytes, blob));
        File::Blob(blob)
    }
}
