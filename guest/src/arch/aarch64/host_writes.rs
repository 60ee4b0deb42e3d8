//! Instructions by which the hypervisor writes to memory: there are none. Emulated instructions here move data between
//! a device and registers.

/// Has some of the eight bytes at an address written. Answers whether there is a way.
pub(in crate::arch) fn write(_: u64, _: u64) -> bool {
    false
}
