//! The specification of a VM: its description and the contents of its files, from any source.

use abi::control::About;
use abi::payload::{
    DecodeCache, Devices, MAX_FUNCTIONS, MAX_MEMORY_BYTES, MAX_VCPUS, PciFunction, Populate, Role, VmConfig,
};
use addr::PageSize;
use alloc::format;
use alloc::string::String;

use super::creation::NotCreated;

/// A VM that is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Spec<'a> {
    /// The VM's description. Its file positions are unused: the fields below hold the contents.
    pub(crate) config: &'a VmConfig,
    /// The kernel file, whole.
    pub(crate) kernel: &'a [u8],
    /// The initial RAM disk.
    pub(crate) initrd: Option<&'a [u8]>,
}

impl Spec<'_> {
    /// Checks that the numbers of the description are possible. The tool checks them too, but a description may come
    /// from elsewhere.
    ///
    /// # Errors
    /// The first number that is not possible.
    pub(crate) fn check(config: &VmConfig) -> Result<(), NotCreated> {
        let VmConfig { vcpus, memory_bytes, .. } = *config;
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(NotCreated::new(About::Vcpus, format!("{vcpus} vCPUs: a VM has 1 to {MAX_VCPUS}")));
        }
        if memory_bytes == 0 {
            return Err(NotCreated::new(
                About::Memory,
                "memory of 0 bytes: a VM needs some, and the host may have none left",
            ));
        }
        if !memory_bytes.is_multiple_of(PageSize::Size2M.bytes()) || memory_bytes > MAX_MEMORY_BYTES {
            let why = format!(
                "memory of {memory_bytes} bytes: it is a multiple of 2 MiB, up to {} TiB",
                MAX_MEMORY_BYTES >> 40
            );
            return Err(NotCreated::new(About::Memory, why));
        }
        if config.role == Role::Parent && config.populate != Populate::AtStart {
            return Err(NotCreated::new(About::Memory, "a parent's memory is mapped at its start"));
        }
        if config.devices != Devices::None && config.populate != Populate::AtStart {
            return Err(NotCreated::new(About::Memory, "memory that devices write to is mapped at the start"));
        }
        if config.devices != Devices::None
            && matches!(config.decode_cache, DecodeCache::WriteProtect | DecodeCache::WriteProtectTables)
        {
            let why = "devices write to all memory, and this cache of instructions write-protects a part of it";
            return Err(NotCreated::new(About::Devices, why));
        }
        if let Devices::These(functions) = &config.devices {
            check_functions(functions).map_err(|why| NotCreated::new(About::Devices, why))?;
        }
        Ok(())
    }
}

fn check_functions(functions: &[PciFunction]) -> Result<(), String> {
    let count = functions.len();
    if !(1..=MAX_FUNCTIONS).contains(&count) {
        return Err(format!("{count} PCI functions: a VM has 1 to {MAX_FUNCTIONS}, or none"));
    }
    for (index, function) in functions.iter().enumerate() {
        if PciFunction::at(function.index()) != *function {
            return Err(format!("{function} is no address of a PCI function"));
        }
        if functions[..index].contains(function) {
            return Err(format!("{function} is named twice"));
        }
    }
    Ok(())
}
