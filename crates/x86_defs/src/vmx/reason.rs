//! Basic exit reasons (SDM vol. 3D, appendix C).

/// An exception, or an NMI.
pub const EXCEPTION_OR_NMI: u32 = 0;
/// A physical interrupt.
pub const EXTERNAL_INTERRUPT: u32 = 1;
/// Triple fault.
pub const TRIPLE_FAULT: u32 = 2;
/// INIT.
pub const INIT: u32 = 3;
/// A start-up message.
pub const SIPI: u32 = 4;
/// The guest can take an interrupt.
pub const INTERRUPT_WINDOW: u32 = 7;
/// The guest can take an NMI.
pub const NMI_WINDOW: u32 = 8;
/// A task switch by hardware.
pub const TASK_SWITCH: u32 = 9;
/// CPUID.
pub const CPUID: u32 = 10;
/// HLT.
pub const HLT: u32 = 12;
/// INVD.
pub const INVD: u32 = 13;
/// RDPMC.
pub const RDPMC: u32 = 15;
/// VMCALL.
pub const VMCALL: u32 = 18;
/// VMCLEAR, the first of VMX's instructions.
pub const VMCLEAR: u32 = 19;
/// VMXON, the last of those that have numbers in a row.
pub const VMXON: u32 = 27;
/// An access to a control register.
pub const CONTROL_REGISTER: u32 = 28;
/// A port.
pub const PORT: u32 = 30;
/// RDMSR.
pub const RDMSR: u32 = 31;
/// WRMSR.
pub const WRMSR: u32 = 32;
/// MWAIT.
pub const MWAIT: u32 = 36;
/// An instruction has completed, with the monitor trap flag.
pub const MONITOR_TRAP: u32 = 37;
/// MONITOR.
pub const MONITOR: u32 = 39;
/// PAUSE.
pub const PAUSE: u32 = 40;
/// The entry has failed by a machine check.
pub const ENTRY_MACHINE_CHECK: u32 = 41;
/// Stage 2 does not allow the access.
pub const EPT_VIOLATION: u32 = 48;
/// An entry of stage 2 does not exist in this form.
pub const EPT_MISCONFIGURATION: u32 = 49;
/// INVEPT.
pub const INVEPT: u32 = 50;
/// INVVPID.
pub const INVVPID: u32 = 53;
/// WBINVD.
pub const WBINVD: u32 = 54;
/// XSETBV.
pub const XSETBV: u32 = 55;
/// The list of written pages is full.
pub const PML_FULL: u32 = 62;
/// Set beside the reason if the entry has failed.
pub const FAILED_ENTRY: u32 = 1 << 31;
