//! Doors that are public functions of crates: what reads bytes of a guest, a tool, firmware or a file.
//!
//! Each module has one target. A target says with its first bytes what is around the input, sets the checksums right
//! that would keep the fuzzer out, and holds what was read against something simpler.

mod arm_images;
mod control_registers;
mod cpuid;
mod dmar;
mod frames;
mod hypercalls;
mod ivrs;
mod kernels;
mod own_acpi;
mod payloads;
mod synic;
mod system_registers;

/// Makes the bytes of an ACPI table add up to zero, and its length that of `table`.
fn seal(table: &mut [u8]) {
    let length = u32::try_from(table.len()).expect("inputs are short");
    if let Some(field) = table.get_mut(4..8) {
        field.copy_from_slice(&length.to_le_bytes());
    }
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = table.get_mut(9) {
        *checksum = checksum.wrapping_sub(sum);
    }
}
