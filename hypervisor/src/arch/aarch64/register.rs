//! System registers, by the manual's names.

#![expect(unsafe_code, reason = "system registers are reached by instructions that the compiler does not know")]

/// Reads a system register. Reading those that the hypervisor names has no effect.
macro_rules! read_register {
    ($name:expr) => {{
        let value: u64;
        #[allow(unsafe_code, reason = "see the SAFETY comment; the macro is used in modules that need no other")]
        // SAFETY: reads a register that exists at EL2 on every processor that `hwvirt::check` accepts.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nomem, nostack, preserves_flags))
        };
        value
    }};
}

/// Writes a system register. The caller is responsible for the effect, so it is used in an unsafe block. The write
/// takes effect at the next context synchronization (ISB, ERET).
macro_rules! write_register {
    ($name:expr, $value:expr) => {
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) $value, options(nostack, preserves_flags))
    };
}

pub(super) use {read_register, write_register};

/// Makes writes of system registers take effect.
#[inline(always)]
pub(super) fn isb() {
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("isb", options(nostack, preserves_flags)) };
}
