//! Exit codes of #VMEXIT (APM vol. 2, appendix C), as 32-bit numbers.
//!
//! The field has 64 bits, but some implementations store `INVALID` as 0xffff_ffff instead of -1. So compare only the
//! low half.

/// Write of CR0 to CR15: this plus the register's number.
pub const CR_WRITE_BASE: u32 = 0x10;
/// Write of CR4.
pub const CR4_WRITE: u32 = CR_WRITE_BASE + 4;
/// Write of CR8.
pub const CR8_WRITE: u32 = CR_WRITE_BASE + 8;
/// Exception: this plus the vector.
pub const EXCEPTION_BASE: u32 = 0x40;
/// The last exception vector's exit code.
pub const EXCEPTION_LAST: u32 = EXCEPTION_BASE + 31;
/// Physical interrupt.
pub const INTR: u32 = 0x60;
/// Physical NMI.
pub const NMI: u32 = 0x61;
/// System management interrupt.
pub const SMI: u32 = 0x62;
/// Physical INIT.
pub const INIT: u32 = 0x63;
/// The guest can take a virtual interrupt: the interrupt window is open.
pub const VINTR: u32 = 0x64;
/// Write of CR0 that changes more than TS and MP, or LMSW.
pub const CR0_SEL_WRITE: u32 = 0x65;
/// RDPMC.
pub const RDPMC: u32 = 0x6f;
/// CPUID.
pub const CPUID: u32 = 0x72;
/// PUSHF.
pub const PUSHF: u32 = 0x70;
/// POPF.
pub const POPF: u32 = 0x71;
/// IRET.
pub const IRET: u32 = 0x74;
/// INT n or INT3.
pub const SWINT: u32 = 0x75;
/// INVD.
pub const INVD: u32 = 0x76;
/// PAUSE.
pub const PAUSE: u32 = 0x77;
/// HLT.
pub const HLT: u32 = 0x78;
/// INVLPGA.
pub const INVLPGA: u32 = 0x7a;
/// IN, OUT, INS, OUTS.
pub const IOIO: u32 = 0x7b;
/// RDMSR, WRMSR.
pub const MSR: u32 = 0x7c;
/// Task switch.
pub const TASK_SWITCH: u32 = 0x7d;
/// Triple fault.
pub const SHUTDOWN: u32 = 0x7f;
/// VMRUN.
pub const VMRUN: u32 = 0x80;
/// VMMCALL.
pub const VMMCALL: u32 = 0x81;
/// VMLOAD.
pub const VMLOAD: u32 = 0x82;
/// VMSAVE.
pub const VMSAVE: u32 = 0x83;
/// STGI.
pub const STGI: u32 = 0x84;
/// CLGI.
pub const CLGI: u32 = 0x85;
/// SKINIT.
pub const SKINIT: u32 = 0x86;
/// WBINVD, WBNOINVD.
pub const WBINVD: u32 = 0x89;
/// MONITOR, MONITORX.
pub const MONITOR: u32 = 0x8a;
/// MWAIT, MWAITX.
pub const MWAIT: u32 = 0x8b;
/// MWAIT, MWAITX with an armed monitor.
pub const MWAIT_ARMED: u32 = 0x8c;
/// XSETBV.
pub const XSETBV: u32 = 0x8d;
/// RDPRU.
pub const RDPRU: u32 = 0x8e;
/// INVLPGB.
pub const INVLPGB: u32 = 0xa0;
/// INVLPGB with an illegal operand.
pub const INVLPGB_ILLEGAL: u32 = 0xa1;
/// INVPCID.
pub const INVPCID: u32 = 0xa2;
/// MCOMMIT.
pub const MCOMMIT: u32 = 0xa3;
/// TLBSYNC.
pub const TLBSYNC: u32 = 0xa4;
/// Nested page fault: EXITINFO1 is the error code, EXITINFO2 the GPA.
pub const NPF: u32 = 0x400;
/// The VMCB is invalid; the guest did not run.
pub const INVALID: u32 = 0xffff_ffff;
