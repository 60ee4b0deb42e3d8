//! The calls of the VMware interface, for VMs without the Hyper-V interface.

use super::cpuid;
use super::state::{State as _, gpr};
use crate::arch::x86_64::host::tsc;
use crate::vcpu::run::{Next, Running};

/// VMMCALL: the two calls that a kernel makes (see [`cpuid`]); all others answer "no".
#[inline(always)]
pub(in crate::arch::x86_64) fn call(run: &mut Running<'_>) -> Next {
    const MAGIC: u32 = 0x564d_5868;
    const GET_HERTZ: u32 = 45;
    const GET_VCPU_INFO: u32 = 68;
    /// The vCPU may use x2APIC mode without interrupt remapping.
    const X2APIC_WITHOUT_REMAPPING: u64 = 1 << 3;
    const NO: u64 = u32::MAX as u64;

    let arch = &mut run.owner.arch;
    arch.skip(3);
    #[expect(clippy::cast_possible_truncation, reason = "the call reads EAX and ECX")]
    let (magic, call) = (arch.hardware.rax() as u32, arch.gprs[gpr::RCX] as u32);
    match call {
        GET_HERTZ if magic == MAGIC => {
            let hertz = tsc::hz();
            arch.hardware.set_rax(hertz & 0xffff_ffff);
            arch.gprs[gpr::RBX] = hertz >> 32;
            arch.gprs[gpr::RCX] = cpuid::timer_hertz();
        }
        GET_VCPU_INFO if magic == MAGIC => {
            arch.hardware.set_rax(X2APIC_WITHOUT_REMAPPING);
        }
        _ => arch.hardware.set_rax(NO),
    }
    Next::Resume
}
