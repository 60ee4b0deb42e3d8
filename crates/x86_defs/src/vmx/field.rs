//! Fields of a VMCS, by their encodings (SDM vol. 3D, appendix B).
//!
//! An encoding says what it names: bits 14:13 the width (16, 64, 32 bits, natural), bits 11:10 the part (controls, what
//! an exit reports, the guest's state, the host's).

/// Virtual-processor identifier.
pub const VPID: u32 = 0x0000;
/// Selector of ES; those of CS, SS, DS, FS, GS, LDTR and TR follow.
pub const GUEST_ES_SELECTOR: u32 = 0x0800;
/// The entry of the list of written pages that is written next; entries are written from the last one on.
pub const GUEST_PML_INDEX: u32 = 0x0812;
/// The host's ES.
pub const HOST_ES_SELECTOR: u32 = 0x0c00;
/// The host's CS.
pub const HOST_CS_SELECTOR: u32 = 0x0c02;
/// The host's SS.
pub const HOST_SS_SELECTOR: u32 = 0x0c04;
/// The host's DS.
pub const HOST_DS_SELECTOR: u32 = 0x0c06;
/// The host's FS.
pub const HOST_FS_SELECTOR: u32 = 0x0c08;
/// The host's GS.
pub const HOST_GS_SELECTOR: u32 = 0x0c0a;
/// The host's TR.
pub const HOST_TR_SELECTOR: u32 = 0x0c0c;
/// HPA of the map of ports below 8000h.
pub const IO_BITMAP_A: u32 = 0x2000;
/// HPA of that of the others.
pub const IO_BITMAP_B: u32 = 0x2002;
/// HPA of the map of MSRs.
pub const MSR_BITMAP: u32 = 0x2004;
/// HPA of the list of written pages.
pub const PML_ADDRESS: u32 = 0x200e;
/// Added to the TSC that the guest reads.
pub const TSC_OFFSET: u32 = 0x2010;
/// HPA of stage 2, and how to walk it.
pub const EPT_POINTER: u32 = 0x201a;
/// GPA of an EPT violation.
pub const GUEST_PHYSICAL_ADDRESS: u32 = 0x2400;
/// All ones: there is no other VMCS.
pub const VMCS_LINK: u32 = 0x2800;
/// IA32_DEBUGCTL.
pub const GUEST_DEBUGCTL: u32 = 0x2802;
/// IA32_PAT.
pub const GUEST_PAT: u32 = 0x2804;
/// IA32_EFER.
pub const GUEST_EFER: u32 = 0x2806;
/// The first of four entries of PAE paging's first table.
pub const GUEST_PDPTE0: u32 = 0x280a;
/// The host's IA32_PAT.
pub const HOST_PAT: u32 = 0x2c00;
/// The host's IA32_EFER.
pub const HOST_EFER: u32 = 0x2c02;
/// Pin-based controls.
pub const PIN_CONTROLS: u32 = 0x4000;
/// Primary processor-based controls.
pub const PRIMARY_CONTROLS: u32 = 0x4002;
/// Exceptions that exit, one bit per vector.
pub const EXCEPTION_BITMAP: u32 = 0x4004;
/// Which page faults exit, by their error code.
pub const PAGE_FAULT_MASK: u32 = 0x4006;
/// The same.
pub const PAGE_FAULT_MATCH: u32 = 0x4008;
/// Values of CR3 that do not exit.
pub const CR3_TARGET_COUNT: u32 = 0x400a;
/// Exit controls.
pub const EXIT_CONTROLS: u32 = 0x400c;
/// MSRs that an exit stores.
pub const EXIT_MSR_STORE_COUNT: u32 = 0x400e;
/// MSRs that an exit loads.
pub const EXIT_MSR_LOAD_COUNT: u32 = 0x4010;
/// Entry controls.
pub const ENTRY_CONTROLS: u32 = 0x4012;
/// MSRs that an entry loads.
pub const ENTRY_MSR_LOAD_COUNT: u32 = 0x4014;
/// The event that an entry delivers.
pub const ENTRY_EVENT: u32 = 0x4016;
/// Its error code.
pub const ENTRY_EVENT_CODE: u32 = 0x4018;
/// The length of the instruction that raised it.
pub const ENTRY_INSTRUCTION_LENGTH: u32 = 0x401a;
/// Secondary processor-based controls.
pub const SECONDARY_CONTROLS: u32 = 0x401e;
/// Why an instruction of VMX has failed.
pub const INSTRUCTION_ERROR: u32 = 0x4400;
/// The exit's reason.
pub const EXIT_REASON: u32 = 0x4402;
/// The event that has exited.
pub const EXIT_EVENT: u32 = 0x4404;
/// Its error code.
pub const EXIT_EVENT_CODE: u32 = 0x4406;
/// The event whose delivery the exit has interrupted.
pub const IDT_VECTORING: u32 = 0x4408;
/// Its error code.
pub const IDT_VECTORING_CODE: u32 = 0x440a;
/// The length of the instruction that has exited.
pub const EXIT_INSTRUCTION_LENGTH: u32 = 0x440c;
/// Limit of ES; those of the others follow.
pub const GUEST_ES_LIMIT: u32 = 0x4800;
/// Limit of GDTR.
pub const GUEST_GDTR_LIMIT: u32 = 0x4810;
/// Limit of IDTR.
pub const GUEST_IDTR_LIMIT: u32 = 0x4812;
/// Access rights of ES; those of the others follow.
pub const GUEST_ES_RIGHTS: u32 = 0x4814;
/// Access rights of CS.
pub const GUEST_CS_RIGHTS: u32 = 0x4816;
/// Access rights of SS, which have the privilege level.
pub const GUEST_SS_RIGHTS: u32 = 0x4818;
/// What holds events back.
pub const GUEST_INTERRUPTIBILITY: u32 = 0x4824;
/// Active, halted, or waiting.
pub const GUEST_ACTIVITY: u32 = 0x4826;
/// IA32_SYSENTER_CS.
pub const GUEST_SYSENTER_CS: u32 = 0x482a;
/// The host's.
pub const HOST_SYSENTER_CS: u32 = 0x4c00;
/// Bits of CR0 whose writes exit.
pub const CR0_MASK: u32 = 0x6000;
/// Bits of CR4 whose writes exit.
pub const CR4_MASK: u32 = 0x6002;
/// What the guest reads of them in CR0.
pub const CR0_SHADOW: u32 = 0x6004;
/// What it reads in CR4.
pub const CR4_SHADOW: u32 = 0x6006;
/// Details of the exit.
pub const EXIT_QUALIFICATION: u32 = 0x6400;
/// CR0.
pub const GUEST_CR0: u32 = 0x6800;
/// CR3.
pub const GUEST_CR3: u32 = 0x6802;
/// CR4.
pub const GUEST_CR4: u32 = 0x6804;
/// Base of ES; those of the others follow.
pub const GUEST_ES_BASE: u32 = 0x6806;
/// Base of GDTR.
pub const GUEST_GDTR_BASE: u32 = 0x6816;
/// Base of IDTR.
pub const GUEST_IDTR_BASE: u32 = 0x6818;
/// DR7.
pub const GUEST_DR7: u32 = 0x681a;
/// RSP.
pub const GUEST_RSP: u32 = 0x681c;
/// RIP.
pub const GUEST_RIP: u32 = 0x681e;
/// RFLAGS.
pub const GUEST_RFLAGS: u32 = 0x6820;
/// Debug exceptions that wait.
pub const GUEST_PENDING_DEBUG: u32 = 0x6822;
/// IA32_SYSENTER_ESP.
pub const GUEST_SYSENTER_ESP: u32 = 0x6824;
/// IA32_SYSENTER_EIP.
pub const GUEST_SYSENTER_EIP: u32 = 0x6826;
/// The host's CR0.
pub const HOST_CR0: u32 = 0x6c00;
/// The host's CR3.
pub const HOST_CR3: u32 = 0x6c02;
/// The host's CR4.
pub const HOST_CR4: u32 = 0x6c04;
/// The host's base of FS.
pub const HOST_FS_BASE: u32 = 0x6c06;
/// The host's base of GS.
pub const HOST_GS_BASE: u32 = 0x6c08;
/// The host's base of TR.
pub const HOST_TR_BASE: u32 = 0x6c0a;
/// The host's base of GDTR.
pub const HOST_GDTR_BASE: u32 = 0x6c0c;
/// The host's base of IDTR.
pub const HOST_IDTR_BASE: u32 = 0x6c0e;
/// The host's IA32_SYSENTER_ESP.
pub const HOST_SYSENTER_ESP: u32 = 0x6c10;
/// The host's IA32_SYSENTER_EIP.
pub const HOST_SYSENTER_EIP: u32 = 0x6c12;
/// The host's RSP after an exit.
pub const HOST_RSP: u32 = 0x6c14;
/// Where an exit leads.
pub const HOST_RIP: u32 = 0x6c16;

#[cfg(test)]
mod tests {
    use super::*;

    const BITS_16: u32 = 0;
    const BITS_64: u32 = 1;
    const BITS_32: u32 = 2;
    const NATURAL: u32 = 3;

    fn width(field: u32) -> u32 {
        field >> 13 & 3
    }

    fn part(field: u32) -> u32 {
        field >> 10 & 3
    }

    #[test]
    fn encodings_say_the_width_and_the_part_that_names_say() {
        for field in [VPID, GUEST_ES_SELECTOR, GUEST_PML_INDEX, HOST_ES_SELECTOR, HOST_TR_SELECTOR] {
            assert_eq!(width(field), BITS_16, "{field:#x}");
        }
        for field in [IO_BITMAP_A, PML_ADDRESS, TSC_OFFSET, EPT_POINTER, GUEST_PHYSICAL_ADDRESS, GUEST_PAT, HOST_EFER] {
            assert_eq!(width(field), BITS_64, "{field:#x}");
        }
        for field in [PIN_CONTROLS, SECONDARY_CONTROLS, EXIT_REASON, GUEST_SS_RIGHTS, GUEST_INTERRUPTIBILITY] {
            assert_eq!(width(field), BITS_32, "{field:#x}");
        }
        for field in [CR0_MASK, EXIT_QUALIFICATION, GUEST_CR0, GUEST_RFLAGS, HOST_RSP, HOST_RIP] {
            assert_eq!(width(field), NATURAL, "{field:#x}");
        }
        for (fields, number) in [
            ([VPID, ENTRY_EVENT, TSC_OFFSET, CR4_SHADOW], 0),
            ([GUEST_PHYSICAL_ADDRESS, EXIT_REASON, IDT_VECTORING, EXIT_QUALIFICATION], 1),
            ([GUEST_PML_INDEX, GUEST_EFER, GUEST_ACTIVITY, GUEST_RIP], 2),
            ([HOST_GS_SELECTOR, HOST_PAT, HOST_SYSENTER_CS, HOST_GS_BASE], 3),
        ] {
            for field in fields {
                assert_eq!(part(field), number, "{field:#x}");
            }
        }
    }

    #[test]
    fn no_encoding_asks_for_the_upper_half_of_a_field() {
        for field in [
            IO_BITMAP_A,
            IO_BITMAP_B,
            MSR_BITMAP,
            PML_ADDRESS,
            TSC_OFFSET,
            EPT_POINTER,
            VMCS_LINK,
            GUEST_PDPTE0,
            HOST_PAT,
        ] {
            assert_eq!(field & 1, 0, "{field:#x}");
        }
    }
}
