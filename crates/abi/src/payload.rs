//! The boot payload: one archive with everything that the hypervisor runs.
//!
//! ```text
//! 0      Header   32 bytes: magic, version, length and CRC-32 of the manifest
//! 32     Manifest postcard: the VMs, each naming its blobs by offset and length
//! 4096k  blobs    kernels and initrds, each at a multiple of 4096, unchanged
//! ```
//!
//! `dunlin` writes it ([`Builder`]). The boot loader passes it on as its initrd or module. The hypervisor reads it in
//! place ([`Payload::read`]) and trusts nothing: it checks every offset before its use.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

/// First eight bytes of a payload.
pub const MAGIC: [u8; 8] = *b"DUNLINPL";
/// Version of the layout and of [`Manifest`]; readers accept only their own.
pub const VERSION: u32 = 9;
/// Blobs start at multiples of this many bytes.
pub const BLOB_ALIGN: usize = 4096;

const HEADER_BYTES: usize = 32;
const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);

/// Maximum number of vCPUs of one VM.
pub const MAX_VCPUS: u32 = 512;
/// Maximum memory of one VM: guest physical addresses are not much longer.
pub const MAX_MEMORY_BYTES: u64 = 1 << 44;

/// The VMs to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The VMs, started in this order; a VM's index here is its number on the control port.
    pub vms: Vec<VmConfig>,
    /// End the machine when the last VM has ended.
    pub exit_when_idle: bool,
    /// Start no VM on a machine without an IOMMU that guards it.
    pub require_iommu: bool,
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmConfig {
    /// Name in logs and commands; unique.
    pub name: String,
    /// Number of vCPUs, 1 to [`MAX_VCPUS`], or [`ALL_CPUS`](Self::ALL_CPUS).
    pub vcpus: u32,
    /// Guest memory in bytes, a multiple of 2 MiB, or [`REST`](Self::REST).
    pub memory_bytes: u64,
    /// Kernel: a bzImage, or an ELF with a PVH note.
    pub kernel: File,
    /// Initial RAM disk.
    pub initrd: Option<File>,
    /// Kernel command line, without a terminating NUL. The arguments of a kernel that is a module follow it.
    pub cmdline: String,
    /// What the VM is to other VMs.
    pub role: Role,
    /// The machine's devices that it has for itself.
    pub devices: Devices,
    /// How the guest finds its local APIC.
    pub apic: ApicMode,
    /// The part of the Hyper-V interface that the guest gets.
    pub hyperv: HyperV,
    /// How the guest flushes TLBs of other vCPUs, if it has the Hyper-V interface.
    pub flush: RemoteFlush,
    /// How the TLB tags of the VM's vCPUs are managed.
    pub tags: TagScheme,
    /// Maximum number of tags, shared with VMs of the same scheme and limit; `None`: all tags of the machine.
    pub tag_limit: Option<u32>,
    /// What the emulator caches of instructions.
    pub decode_cache: DecodeCache,
    /// When memory is mapped in stage 2.
    pub populate: Populate,
    /// How writes are logged, unless the command that starts the log sets it.
    pub dirty: DirtyLogging,
    /// Its share of the pCPUs.
    pub share: CpuShare,
}

impl VmConfig {
    /// Stands for as many vCPUs as the machine has CPUs, in a VM of a payload with the machine's devices.
    pub const ALL_CPUS: u32 = 0;
    /// Stands for all memory that the hypervisor and other VMs leave, in such a VM.
    pub const REST: u64 = 0;
}

/// A VM's share of the pCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuShare {
    /// Where pCPUs are short, VMs get time in proportion to this, however many vCPUs they have: 1 to 10000.
    pub weight: u32,
    /// The most that all vCPUs of the VM get together, in percent of one pCPU.
    pub cap_percent: Option<u32>,
    /// The pCPUs that its vCPUs may run on, a bit for each, counted from the first that runs vCPUs; `None`: all.
    pub pcpus: Option<u64>,
}

impl CpuShare {
    /// That of a VM whose description names none.
    pub const DEFAULT: Self = Self { weight: 100, cap_percent: None, pcpus: None };
}

/// What a VM is to other VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Nothing: it knows of no other.
    Guest,
    /// It may create VMs, by the Hyper-V interface.
    Parent,
}

/// The machine's devices that a VM has for itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// None: it sees a PC of the hypervisor's.
    None,
    /// All that the hypervisor does not use: it sees the machine itself, and its memory is at the machine's addresses.
    All,
    /// These PCI functions, at most [`MAX_FUNCTIONS`]: it sees them on the bus of the hypervisor's PC.
    These(Vec<PciFunction>),
}

/// Maximum number of PCI functions of one VM: its bus has 32 slots, and a bridge in the first one.
pub const MAX_FUNCTIONS: usize = 31;

/// A PCI function of segment 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PciFunction {
    /// Its bus.
    pub bus: u8,
    /// Its slot, below 32.
    pub device: u8,
    /// Its number in the slot, below 8.
    pub function: u8,
}

impl PciFunction {
    /// The function with this [index](Self::index).
    #[must_use]
    pub const fn at(index: u16) -> Self {
        let [low, bus] = index.to_le_bytes();
        Self { bus, device: low >> 3, function: low & 7 }
    }

    /// Its number in the segment: bus (bits 15:8), device (7:3) and function (2:0), as it names itself in requests (PCI
    /// Express 2.2.6.2) and as its configuration space lies in memory, a page each (7.2.2).
    #[must_use]
    pub const fn index(self) -> u16 {
        u16::from_le_bytes([(self.device & 31) << 3 | self.function & 7, self.bus])
    }
}

impl fmt::Display for PciFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0000:{:02x}:{:02x}.{:x}", self.bus, self.device, self.function)
    }
}

/// When a VM's memory is mapped in stage 2. It is always allocated and zeroed when the VM is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Populate {
    /// When the VM is created, with the largest pages that fit: no vCPU ever faults on memory.
    AtStart,
    /// 2 MiB at a time, at the first touch by a vCPU.
    Touch2M,
    /// 4 KiB at a time, at the first touch by a vCPU.
    Touch4K,
}

/// How the hypervisor finds the pages that a guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyLogging {
    /// When to split large pages.
    pub split: Split,
    /// What records the writes; `None`: the hardware, if it can.
    pub source: Option<DirtySource>,
    /// Maximum number of large pages that are split per second; `None`: no limit.
    pub splits_per_second: Option<u32>,
}

/// When to split large stage-2 pages for a dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Split {
    /// At the first write. Each of its small pages then faults at its own first write.
    Lazy,
    /// All when the log starts, by the host's own CPU.
    Eager,
    /// At the first write, only those that are written. If the hardware records writes, this is the only fault.
    Adaptive,
}

/// What records that a page was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DirtySource {
    /// The hypervisor: pages are read-only until their first write, which faults.
    WriteProtect,
    /// The hardware, in the page's stage-2 entry (NPT and EPT: the D bit; Arm: FEAT_HAFDBS).
    Hardware,
    /// The same, and each pCPU lists the pages (PML of VT-x).
    Pml,
}

/// The part of the Hyper-V interface that a guest gets (TLFS, feature discovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HyperV {
    /// Nothing: the guest finds no Hyper-V.
    Off,
    /// The interface, with remote TLB flush by hypercall recommended.
    Flush,
    /// The same, with IPIs by hypercall recommended as well.
    FlushIpi,
}

/// How a guest with the Hyper-V interface flushes TLBs of other vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteFlush {
    /// By its own interrupts: flush by hypercall is not recommended, the rest of the interface stays.
    Ipi,
    /// By hypercall.
    Hypercall,
}

/// How a VM manages the TLB tags (ASIDs, VMIDs) of its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TagScheme {
    /// One tag for all, and a flush at each entry: usual before hypervisors managed tags.
    FlushAlways,
    /// Each pCPU assigns tags round robin, with a generation: Xen on AMD-V, 2007.
    Generation,
    /// A tag for life per vCPU while there are enough, and an epoch per VM.
    Epoch,
}

/// What the emulator caches of the guest's instructions, so that it need not decode them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DecodeCache {
    /// Nothing: each instruction is fetched and decoded again.
    Off,
    /// The decoded instruction at an address, for the whole VM, until a write to the page of its code (bhyve, 2015).
    /// Page tables are walked each time, because nested paging of SVM cannot protect them.
    WriteProtect,
    /// The same, as published: page tables are protected as well.
    WriteProtectTables,
    /// The meaning of certain bytes, per vCPU.
    Bytes,
}

/// How the guest sees its local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ApicMode {
    /// x2APIC is offered: registers are MSRs, no emulated memory accesses.
    X2Apic,
    /// Only the xAPIC is offered: registers are memory at 0xfee0_0000.
    XApic,
}

/// A file of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum File {
    /// In the payload.
    Blob(Blob),
    /// A boot module of its own, with this word as the first of its command line: `module2 /boot/vmlinuz NAME root=..`.
    Module(String),
}

impl File {
    /// The file's place in the payload, if it is there.
    #[must_use]
    pub const fn blob(&self) -> Option<&Blob> {
        match self {
            Self::Blob(blob) => Some(blob),
            Self::Module(_) => None,
        }
    }
}

/// A run of bytes in the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Bytes from the start of the payload.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A checked payload.
#[derive(Debug)]
pub struct Payload<'a> {
    bytes: &'a [u8],
    /// The VMs to run.
    pub manifest: Manifest,
}

/// Why a payload cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadError {
    /// Shorter than its header or than its manifest claims.
    Truncated,
    /// Does not start with [`MAGIC`].
    NotAPayload,
    /// Written for another version, given here.
    Version(u32),
    /// The manifest's checksum is wrong.
    Damaged,
    /// The manifest's checksum is right, but it does not decode.
    Undecodable,
    /// A blob of the VM with this index is outside the payload.
    BlobOutside(usize),
}

impl fmt::Display for PayloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => write!(f, "the payload is shorter than its header claims"),
            Self::NotAPayload => {
                write!(f, "the boot module is not a Dunlin payload (start the hypervisor with `dunlin run`)")
            }
            Self::Version(found) => {
                write!(f, "the payload has version {found}, this hypervisor reads version {VERSION}")
            }
            Self::Damaged => write!(f, "the payload's manifest is damaged (checksum)"),
            Self::Undecodable => write!(f, "the payload's manifest cannot be decoded"),
            Self::BlobOutside(vm) => write!(f, "a file of VM {vm} lies outside the payload"),
        }
    }
}

impl<'a> Payload<'a> {
    /// Checks `bytes` and decodes the manifest.
    ///
    /// # Errors
    /// A [`PayloadError`] with the reason; never reads past the end of `bytes`.
    pub fn read(bytes: &'a [u8]) -> Result<Self, PayloadError> {
        let header = bytes.get(..HEADER_BYTES).ok_or(PayloadError::Truncated)?;
        if header[..8] != MAGIC {
            return Err(PayloadError::NotAPayload);
        }
        let version = word(header, 8);
        if version != VERSION {
            return Err(PayloadError::Version(version));
        }

        let manifest_bytes = word(header, 12) as usize;
        let encoded = bytes[HEADER_BYTES..].get(..manifest_bytes).ok_or(PayloadError::Truncated)?;
        if CRC.checksum(encoded) != word(header, 16) {
            return Err(PayloadError::Damaged);
        }
        let manifest: Manifest = postcard::from_bytes(encoded).map_err(|_| PayloadError::Undecodable)?;

        let payload = Self { bytes, manifest };
        for (index, vm) in payload.manifest.vms.iter().enumerate() {
            for blob in core::iter::once(&vm.kernel).chain(vm.initrd.as_ref()).filter_map(File::blob) {
                if payload.find(blob).is_none() {
                    return Err(PayloadError::BlobOutside(index));
                }
            }
        }
        Ok(payload)
    }

    /// The bytes of a blob that the manifest names.
    #[must_use]
    pub fn blob(&self, blob: &Blob) -> &'a [u8] {
        // `read` has checked the manifest's blobs; another blob is empty instead of a panic.
        self.find(blob).unwrap_or(&[])
    }

    fn find(&self, blob: &Blob) -> Option<&'a [u8]> {
        let start = usize::try_from(blob.offset).ok()?;
        let bytes = usize::try_from(blob.bytes).ok()?;
        self.bytes.get(start..start.checked_add(bytes)?)
    }
}

fn word(header: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

/// Builds a payload.
#[derive(Debug, Default)]
pub struct Builder {
    vms: Vec<VmConfig>,
    exit_when_idle: bool,
    require_iommu: bool,
    /// Blobs, whose offsets count from the end of the manifest, because its length is unknown before
    /// [`Builder::finish`].
    blobs: Vec<u8>,
}

impl Builder {
    /// An empty payload; `exit_when_idle` as in [`Manifest`].
    #[must_use]
    pub fn new(exit_when_idle: bool) -> Self {
        Self { vms: Vec::new(), exit_when_idle, require_iommu: false, blobs: Vec::new() }
    }

    /// Sets [`Manifest::require_iommu`].
    pub fn require_iommu(&mut self, is_required: bool) {
        self.require_iommu = is_required;
    }

    /// Adds the bytes of a file. Several VMs may share one blob.
    pub fn add_blob(&mut self, bytes: &[u8]) -> Blob {
        let offset = self.blobs.len();
        self.blobs.extend_from_slice(bytes);
        self.blobs.resize(self.blobs.len().next_multiple_of(BLOB_ALIGN), 0);
        Blob { offset: offset as u64, bytes: bytes.len() as u64 }
    }

    /// Adds a VM whose blobs came from [`Builder::add_blob`].
    pub fn add_vm(&mut self, vm: VmConfig) {
        self.vms.push(vm);
    }

    /// The finished payload.
    ///
    /// # Errors
    /// The manifest cannot be encoded or would exceed 4 GiB.
    pub fn finish(self) -> Result<Vec<u8>, postcard::Error> {
        // Offsets are varints, so the manifest's length depends on them: leave room for the longest and put the blobs
        // behind that.
        let Self { vms, exit_when_idle, require_iommu, .. } = self;
        let unplaced = Manifest { vms, exit_when_idle, require_iommu };
        let longest = postcard::to_allocvec(&moved(&unplaced, u64::MAX >> 1))?.len();
        let base = (HEADER_BYTES + longest).next_multiple_of(BLOB_ALIGN);
        let encoded = postcard::to_allocvec(&moved(&unplaced, base as u64))?;
        let manifest_bytes = u32::try_from(encoded.len()).map_err(|_| postcard::Error::SerializeBufferFull)?;

        let mut out = Vec::with_capacity(base + self.blobs.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&manifest_bytes.to_le_bytes());
        out.extend_from_slice(&CRC.checksum(&encoded).to_le_bytes());
        out.resize(HEADER_BYTES, 0);
        out.extend_from_slice(&encoded);
        out.resize(base, 0);
        out.extend_from_slice(&self.blobs);
        Ok(out)
    }
}

/// The manifest with every blob moved up by `by` bytes.
fn moved(manifest: &Manifest, by: u64) -> Manifest {
    let mut moved = manifest.clone();
    for vm in &mut moved.vms {
        for file in core::iter::once(&mut vm.kernel).chain(vm.initrd.as_mut()) {
            if let File::Blob(blob) = file {
                blob.offset += by;
            }
        }
    }
    moved
}
