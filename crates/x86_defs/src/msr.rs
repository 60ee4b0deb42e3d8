//! Numbers of model-specific registers.

/// Time stamp counter.
pub const TSC: u32 = 0x10;
/// Intel's: which of the processors that a microcode update is for (SDM vol. 4, IA32_PLATFORM_ID).
pub const PLATFORM_ID: u32 = 0x17;
/// Base address and mode of the local APIC.
pub const APIC_BASE: u32 = 0x1b;
/// Intel's: options at power-on (SDM vol. 4, MSR_EBL_CR_POWERON).
pub const EBL_CR_POWERON: u32 = 0x2a;
/// Offset that software added to the TSC.
pub const TSC_ADJUST: u32 = 0x3b;
/// Microcode revision.
pub const PATCH_LEVEL: u32 = 0x8b;
/// Capabilities of the memory-type range registers.
pub const MTRR_CAP: u32 = 0xfe;
/// SYSENTER code segment.
pub const SYSENTER_CS: u32 = 0x174;
/// SYSENTER stack pointer.
pub const SYSENTER_ESP: u32 = 0x175;
/// SYSENTER instruction pointer.
pub const SYSENTER_EIP: u32 = 0x176;
/// Capabilities of the machine-check architecture: bits 7:0 are the number of banks.
pub const MCG_CAP: u32 = 0x179;
/// Whether a machine check is being handled, and whether the interrupted code can continue.
pub const MCG_STATUS: u32 = 0x17a;
/// Enables the banks' reports, if MCG_CAP says that it exists.
pub const MCG_CTL: u32 = 0x17b;
/// Control of bank 0. Status, address and details follow, then the next bank.
pub const MC0_CTL: u32 = 0x400;
/// Control of bank 0 for scalable banks, which have 16 registers each.
pub const MCA_CTL_0: u32 = 0xc000_2000;
/// Intel's features that can be disabled.
pub const MISC_ENABLE: u32 = 0x1a0;
/// Debug control.
pub const DEBUG_CTL: u32 = 0x1d9;
/// First variable memory-type range: base and mask alternate from here.
pub const MTRR_PHYS_BASE_0: u32 = 0x200;
/// Last register of the eighth variable range.
pub const MTRR_PHYS_MASK_7: u32 = 0x20f;
/// Fixed range 64K.
pub const MTRR_FIX_64K: u32 = 0x250;
/// First of two fixed ranges 16K.
pub const MTRR_FIX_16K_0: u32 = 0x258;
/// Second of two fixed ranges 16K.
pub const MTRR_FIX_16K_1: u32 = 0x259;
/// First of eight fixed ranges 4K.
pub const MTRR_FIX_4K_0: u32 = 0x268;
/// Last of eight fixed ranges 4K.
pub const MTRR_FIX_4K_7: u32 = 0x26f;
/// Page attribute table.
pub const PAT: u32 = 0x277;
/// Default memory type.
pub const MTRR_DEF_TYPE: u32 = 0x2ff;
/// TSC deadline of the local APIC's timer.
pub const TSC_DEADLINE: u32 = 0x6e0;
/// First register of the x2APIC.
pub const X2APIC_FIRST: u32 = 0x800;
/// End of interrupt.
pub const X2APIC_EOI: u32 = 0x80b;
/// Interrupt command.
pub const X2APIC_ICR: u32 = 0x830;
/// Last register number of the x2APIC's range.
pub const X2APIC_LAST: u32 = 0x8ff;
/// Extended features.
pub const EFER: u32 = 0xc000_0080;
/// SYSCALL targets.
pub const STAR: u32 = 0xc000_0081;
/// SYSCALL target, 64-bit.
pub const LSTAR: u32 = 0xc000_0082;
/// SYSCALL target, compatibility mode.
pub const CSTAR: u32 = 0xc000_0083;
/// SYSCALL flag mask.
pub const SFMASK: u32 = 0xc000_0084;
/// FS base.
pub const FS_BASE: u32 = 0xc000_0100;
/// GS base.
pub const GS_BASE: u32 = 0xc000_0101;
/// GS base that SWAPGS loads.
pub const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// The second value of RDTSCP, and the value of RDPID.
pub const TSC_AUX: u32 = 0xc000_0103;
/// First performance event select register of the K7.
pub const K7_EVNTSEL0: u32 = 0xc001_0000;
/// Last performance counter of the K7.
pub const K7_PERFCTR3: u32 = 0xc001_0007;
/// System configuration.
pub const SYSCFG: u32 = 0xc001_0010;
/// Hardware configuration.
pub const HWCR: u32 = 0xc001_0015;
/// Top of memory below 4 GiB.
pub const TOP_MEM: u32 = 0xc001_001a;
/// Top of memory above 4 GiB.
pub const TOP_MEM2: u32 = 0xc001_001d;
/// Northbridge configuration.
pub const NB_CFG: u32 = 0xc001_001f;
/// Interrupt pending and C1E.
pub const INT_PENDING: u32 = 0xc001_0055;
/// SVM control: bit 4 (SVMDIS) locks SVM off.
pub const VM_CR: u32 = 0xc001_0114;
/// Physical address of the host save area.
pub const VM_HSAVE_PA: u32 = 0xc001_0117;
/// Data cache configuration.
pub const DC_CFG: u32 = 0xc001_1022;
/// Decode configuration.
pub const DE_CFG: u32 = 0xc001_1029;
/// DE_CFG: LFENCE waits for all earlier instructions.
pub const DE_CFG_LFENCE_SERIALIZES: u64 = 1 << 1;
/// Control of speculation.
pub const SPEC_CTRL: u32 = 0x48;
/// SPEC_CTRL: predictions of less privileged code do not steer indirect branches (IBRS).
pub const SPEC_CTRL_IBRS: u64 = 1 << 0;
/// SPEC_CTRL: predictions of one thread do not steer indirect branches of the core's other threads (STIBP).
pub const SPEC_CTRL_STIBP: u64 = 1 << 1;
/// SPEC_CTRL: loads do not run ahead of older stores whose address is not known (SSBD).
pub const SPEC_CTRL_SSBD: u64 = 1 << 2;
/// SPEC_CTRL, Intel's: indirect branches wait for their target, at CPL 3 and at CPL 0 to 2 (IPRED_DIS).
pub const SPEC_CTRL_IPRED_DIS: u64 = 3 << 3;
/// SPEC_CTRL, Intel's: returns take no prediction from elsewhere than the return stack (RRSBA_DIS).
pub const SPEC_CTRL_RRSBA_DIS: u64 = 3 << 5;
/// SPEC_CTRL: no store is forwarded to a load by prediction (PSFD).
pub const SPEC_CTRL_PSFD: u64 = 1 << 7;
/// SPEC_CTRL, Intel's: no prefetch by the data that loads find, at CPL 3 (DDPD_U).
pub const SPEC_CTRL_DDPD_U: u64 = 1 << 8;
/// SPEC_CTRL, Intel's: nor does the history of branches at CPL 3 and in guests steer those at CPL 0.
pub const SPEC_CTRL_BHI_DIS_S: u64 = 1 << 10;
/// Commands to the predictors.
pub const PRED_CMD: u32 = 0x49;
/// PRED_CMD: forget predictions of indirect branches (IBPB).
pub const PRED_CMD_IBPB: u64 = 1 << 0;
/// PRED_CMD, AMD's: forget those of branches only, not their kinds (SBPB).
pub const PRED_CMD_SBPB: u64 = 1 << 7;
/// Intel's: which weaknesses the processor does not have.
pub const ARCH_CAPABILITIES: u32 = 0x10a;
/// Intel's: commands to the caches. Bit 0 flushes the L1 data cache.
pub const FLUSH_CMD: u32 = 0x10b;

/// IA32_FEATURE_CONTROL: whether firmware has locked VT-x off (SDM vol. 3C, 24.7).
pub const FEATURE_CONTROL: u32 = 0x3a;
/// What VT-x can (SDM vol. 3D, appendix A): IA32_VMX_BASIC.
pub const VMX_BASIC: u32 = 0x480;
/// Bits that CR0 must have.
pub const VMX_CR0_FIXED0: u32 = 0x486;
/// Bits that CR4 must have.
pub const VMX_CR4_FIXED0: u32 = 0x488;
/// Secondary processor-based controls.
pub const VMX_SECONDARY: u32 = 0x48b;
/// EPT, INVEPT and INVVPID.
pub const VMX_EPT_VPID_CAP: u32 = 0x48c;
/// Pin-based controls.
pub const VMX_TRUE_PIN: u32 = 0x48d;
/// Primary processor-based controls.
pub const VMX_TRUE_PRIMARY: u32 = 0x48e;
/// Exit controls.
pub const VMX_TRUE_EXIT: u32 = 0x48f;
/// Entry controls.
pub const VMX_TRUE_ENTRY: u32 = 0x490;
