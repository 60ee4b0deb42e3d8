//! Instructions that have the hypervisor write to memory: there are none. What is emulated here moves between a device
//! and registers.

/// Has some of the eight bytes at an address written. Answers whether there is a way.
pub(in crate::arch) fn write(_: u64, _: u64) -> bool {
    false
}
