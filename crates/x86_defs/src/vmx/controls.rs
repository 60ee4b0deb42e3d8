//! What a processor's VT-x can, and the controls that the hypervisor chooses (SDM vol. 3D, appendix A).

use core::fmt;

use crate::msr;

/// The controls that every VMCS begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// Pin-based controls.
    pub pin: u32,
    /// Primary processor-based controls.
    pub primary: u32,
    /// Secondary processor-based controls.
    pub secondary: u32,
    /// Exit controls.
    pub exit: u32,
    /// Entry controls.
    pub entry: u32,
}

/// Bits of the primary controls that change at run time.
pub mod primary {
    /// Exit when the guest can take an interrupt.
    pub const INTERRUPT_WINDOW: u32 = 1 << 2;
    /// Exit when the guest can take an NMI.
    pub const NMI_WINDOW: u32 = 1 << 22;
    /// Exit behind the next instruction.
    pub const MONITOR_TRAP: u32 = 1 << 27;
    /// PAUSE exits.
    pub const PAUSE: u32 = 1 << 30;
}

/// The entry control that changes: the guest is in long mode.
pub const ENTRY_LONG_MODE: u32 = 1 << 9;

/// A control, or a bit of a capability, by the SDM's name.
type Named = (u32, &'static str);

const PIN: &[Named] = &[(0, "external-interrupt exiting"), (3, "NMI exiting"), (5, "virtual NMIs")];
const PRIMARY: &[Named] = &[
    (3, "use TSC offsetting"),
    (7, "HLT exiting"),
    (10, "MWAIT exiting"),
    (11, "RDPMC exiting"),
    (19, "CR8-load exiting"),
    (20, "CR8-store exiting"),
    (25, "use I/O bitmaps"),
    (28, "use MSR bitmaps"),
    (29, "MONITOR exiting"),
    (31, "activate secondary controls"),
];
/// Primary controls that are set at times.
const PRIMARY_AT_TIMES: &[Named] =
    &[(2, "interrupt-window exiting"), (22, "NMI-window exiting"), (27, "monitor trap flag"), (30, "PAUSE exiting")];
const SECONDARY: &[Named] = &[(1, "enable EPT"), (5, "enable VPID"), (6, "WBINVD exiting"), (7, "unrestricted guest")];
/// The secondary control without which RDTSCP and RDPID do not exist.
const RDTSCP: u32 = 1 << 3;
/// The secondary control by which the processor lists the pages that it writes, for which it must record that.
const PML: u32 = 1 << 17;
const EXIT: &[Named] =
    &[(2, "save debug controls"), (9, "host address-space size"), (19, "load IA32_PAT"), (21, "load IA32_EFER")];
const ENTRY: &[Named] = &[(2, "load debug controls"), (14, "load IA32_PAT"), (15, "load IA32_EFER")];
/// The entry control that is set at times.
const ENTRY_AT_TIMES: &[Named] = &[(9, "IA-32e mode guest")];
/// What EPT and its instructions must have (IA32_VMX_EPT_VPID_CAP).
const EPT_VPID: &[Named] = &[
    (6, "EPT page-walk length of 4"),
    (14, "EPT memory type write-back"),
    (16, "EPT pages of 2 MiB"),
    (20, "INVEPT"),
    (25, "single-context INVEPT"),
    (26, "all-context INVEPT"),
    (32, "INVVPID"),
    (40, "individual-address INVVPID"),
    (41, "single-context INVVPID"),
    (42, "all-context INVVPID"),
];
const EPT_1G: u64 = 1 << 17;
const EPT_ACCESSED_DIRTY: u64 = 1 << 21;

/// IA32_FEATURE_CONTROL: no more writes.
pub const FEATURE_CONTROL_LOCKED: u64 = 1 << 0;
/// IA32_FEATURE_CONTROL: VMXON is allowed.
pub const FEATURE_CONTROL_VMXON: u64 = 1 << 2;

/// A missing feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// VT-x is there, but the firmware has locked it off.
    LockedByFirmware,
    /// The controls are those of the first processors.
    TrueControls,
    /// A control, or a capability, by the SDM's name.
    Control(&'static str),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LockedByFirmware => f.write_str("the firmware has locked VT-x off (IA32_FEATURE_CONTROL)"),
            Self::TrueControls => f.write_str("this machine's VT-x has no true controls (IA32_VMX_BASIC bit 55)"),
            Self::Control(name) => write!(f, "this machine's VT-x lacks \"{name}\""),
        }
    }
}

impl Missing {
    /// What a user can do.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::LockedByFirmware => {
                "allow it in the firmware's set-up, where it is called VT-x, VMX or Virtualization Technology"
            }
            Self::TrueControls | Self::Control(_) => "this needs another processor",
        }
    }
}

/// A processor's VT-x, with all that is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capability {
    basic: u64,
    ept_vpid: u64,
    /// The controls that the hypervisor chooses.
    pub controls: Controls,
    /// Bits that the guest's real CR0 must have.
    pub cr0_set: u64,
    /// Bits that its real CR4 must have.
    pub cr4_set: u64,
}

impl Capability {
    /// Before the check: nothing.
    pub const NONE: Self = Self {
        basic: 0,
        ept_vpid: 0,
        controls: Controls { pin: 0, primary: 0, secondary: 0, exit: 0, entry: 0 },
        cr0_set: 0,
        cr4_set: 0,
    };

    /// Looks at the capability MSRs of a processor whose CPUID reports VT-x. One that others must allow first is read
    /// after them.
    ///
    /// # Errors
    /// The first that is missing.
    pub fn read(msr: impl Fn(u32) -> u64) -> Result<Self, Missing> {
        const TRUE_CONTROLS: u64 = 1 << 55;
        // An unrestricted guest may clear PE and PG.
        const PE_AND_PG: u64 = 1 << 31 | 1 << 0;
        let feature_control = msr(msr::FEATURE_CONTROL);
        if feature_control & (FEATURE_CONTROL_LOCKED | FEATURE_CONTROL_VMXON) == FEATURE_CONTROL_LOCKED {
            return Err(Missing::LockedByFirmware);
        }
        let basic = msr(msr::VMX_BASIC);
        if basic & TRUE_CONTROLS == 0 {
            return Err(Missing::TrueControls);
        }
        let pin = choose(msr(msr::VMX_TRUE_PIN), PIN)?;
        let allowed = msr(msr::VMX_TRUE_PRIMARY);
        choose(allowed, PRIMARY_AT_TIMES)?;
        let primary = choose(allowed, PRIMARY)?;
        let allowed = msr(msr::VMX_SECONDARY);
        let mut secondary = choose(allowed, SECONDARY)? | high(allowed) & RDTSCP;
        let may_list = high(allowed) & PML;
        let exit = choose(msr(msr::VMX_TRUE_EXIT), EXIT)?;
        let allowed = msr(msr::VMX_TRUE_ENTRY);
        choose(allowed, ENTRY_AT_TIMES)?;
        let entry = choose(allowed, ENTRY)?;
        let ept_vpid = msr(msr::VMX_EPT_VPID_CAP);
        if ept_vpid & EPT_ACCESSED_DIRTY != 0 {
            secondary |= may_list;
        }
        if let Some((_, name)) = EPT_VPID.iter().find(|(bit, _)| ept_vpid >> bit & 1 == 0) {
            return Err(Missing::Control(name));
        }
        Ok(Self {
            basic,
            ept_vpid,
            controls: Controls { pin, primary, secondary, exit, entry },
            cr0_set: msr(msr::VMX_CR0_FIXED0) & !PE_AND_PG,
            cr4_set: msr(msr::VMX_CR4_FIXED0),
        })
    }

    /// The first word of a VMCS.
    #[must_use]
    pub const fn revision(&self) -> u32 {
        (self.basic & 0x7fff_ffff) as u32
    }

    /// Whether stage 2 has pages of 1 GiB.
    #[must_use]
    pub const fn has_gib_pages(&self) -> bool {
        self.ept_vpid & EPT_1G != 0
    }

    /// Whether the processor records accesses and writes in stage 2.
    #[must_use]
    pub const fn has_accessed_dirty(&self) -> bool {
        self.ept_vpid & EPT_ACCESSED_DIRTY != 0
    }

    /// Whether it also lists the pages that it writes (page-modification logging; SDM vol. 3C, 29.3.6).
    #[must_use]
    pub const fn has_pml(&self) -> bool {
        self.controls.secondary & PML != 0
    }

    /// The pointer to stage 2, an HPA, with the way to walk it (SDM vol. 3C, 25.6.11).
    #[must_use]
    pub const fn ept_pointer(&self, root: u64) -> u64 {
        const WRITE_BACK: u64 = 6;
        const LEVELS: u64 = 4;
        let records = if self.has_accessed_dirty() { 1 << 6 } else { 0 };
        root | WRITE_BACK | (LEVELS - 1) << 3 | records
    }
}

/// The value of controls that has these bits, and else only those that must be set. The MSR `allowed` has the bits that
/// must be set, and above them those that may be.
fn choose(allowed: u64, needed: &[Named]) -> Result<u32, Missing> {
    let must = (allowed & 0xffff_ffff) as u32;
    match needed.iter().find(|(bit, _)| high(allowed) >> bit & 1 == 0) {
        Some((_, name)) => Err(Missing::Control(name)),
        None => Ok(needed.iter().fold(must, |value, (bit, _)| value | 1 << bit)),
    }
}

const fn high(allowed: u64) -> u32 {
    (allowed >> 32) as u32
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::format;

    use super::{
        Capability, ENTRY, ENTRY_AT_TIMES, EPT_VPID, EXIT, Missing, Named, PIN, PRIMARY, PRIMARY_AT_TIMES, SECONDARY,
    };
    use crate::msr;

    /// Bochs' corei7_skylake_x as far as it was read, and otherwise everything allowed.
    fn skylake(number: u32) -> u64 {
        match number {
            msr::FEATURE_CONTROL => 5,
            msr::VMX_BASIC => 0x00d8_1000_0000_002b,
            msr::VMX_TRUE_PIN => 0xff_0000_0016,
            msr::VMX_TRUE_PRIMARY => 0xfff9_fffe_0400_6172,
            msr::VMX_SECONDARY => 0x0257_7fff_0000_0000,
            msr::VMX_EPT_VPID_CAP => 0xf01_0673_4141,
            msr::VMX_CR0_FIXED0 => 0x8000_0021,
            msr::VMX_CR4_FIXED0 => 0x2000,
            _ => 0xffff_ffff_0000_0000,
        }
    }

    #[test]
    fn processor_with_all_is_taken_and_its_controls_are_allowed() {
        let found = Capability::read(skylake).expect("all is there");
        assert_eq!(found.revision(), 0x2b);
        assert_eq!(found.cr0_set, 0x20, "NE; PE and PG are the guest's");
        assert_eq!(found.cr4_set, 0x2000, "VMXE");
        assert!(found.has_gib_pages() && found.has_accessed_dirty() && found.has_pml());
        assert_eq!(found.ept_pointer(0x1234_5000), 0x1234_505e);
        for (controls, number) in [
            (found.controls.pin, msr::VMX_TRUE_PIN),
            (found.controls.primary, msr::VMX_TRUE_PRIMARY),
            (found.controls.secondary, msr::VMX_SECONDARY),
            (found.controls.exit, msr::VMX_TRUE_EXIT),
            (found.controls.entry, msr::VMX_TRUE_ENTRY),
        ] {
            let allowed = skylake(number);
            assert_eq!(u64::from(controls) & !(allowed >> 32), 0, "none that must be clear: MSR {number:#x}");
            assert_eq!(!u64::from(controls) & allowed & 0xffff_ffff, 0, "all that must be set: MSR {number:#x}");
        }
    }

    #[test]
    fn each_control_that_is_needed_is_named_when_it_is_missing() {
        let groups: [(u32, u32, &[Named]); 8] = [
            (msr::VMX_TRUE_PIN, 32, PIN),
            (msr::VMX_TRUE_PRIMARY, 32, PRIMARY),
            (msr::VMX_TRUE_PRIMARY, 32, PRIMARY_AT_TIMES),
            (msr::VMX_SECONDARY, 32, SECONDARY),
            (msr::VMX_TRUE_EXIT, 32, EXIT),
            (msr::VMX_TRUE_ENTRY, 32, ENTRY),
            (msr::VMX_TRUE_ENTRY, 32, ENTRY_AT_TIMES),
            (msr::VMX_EPT_VPID_CAP, 0, EPT_VPID),
        ];
        for (number, shift, needed) in groups {
            for (bit, name) in needed {
                let without = |asked: u32| {
                    let value = skylake(asked);
                    if asked == number { value & !(1 << (shift + bit)) } else { value }
                };
                let missing = Capability::read(without).expect_err(name);
                assert_eq!(missing, Missing::Control(name));
                assert!(format!("{missing}").contains(name));
            }
        }
    }

    #[test]
    fn writes_are_listed_only_by_a_processor_that_records_them() {
        for (number, bit) in [(msr::VMX_SECONDARY, 32 + 17), (msr::VMX_EPT_VPID_CAP, 21)] {
            let without = |asked: u32| if asked == number { skylake(asked) & !(1 << bit) } else { skylake(asked) };
            let found = Capability::read(without).expect("it is no need");
            assert!(!found.has_pml(), "MSR {number:#x}");
        }
    }

    #[test]
    fn lock_of_the_firmware_is_told_from_a_decision_that_is_left_to_the_system() {
        let with = |control: u64| move |number| if number == msr::FEATURE_CONTROL { control } else { skylake(number) };
        assert_eq!(Capability::read(with(1)), Err(Missing::LockedByFirmware));
        for control in [0, 4, 5] {
            assert!(Capability::read(with(control)).is_ok(), "{control}");
        }
        assert!(Missing::LockedByFirmware.remedy().contains("firmware"));
    }

    #[test]
    fn first_processors_with_vt_x_are_refused_before_newer_msrs_are_read() {
        let old = |number| match number {
            msr::FEATURE_CONTROL => 5,
            msr::VMX_BASIC => 0x5a_0800_0000_000d_u64 & !(1 << 55),
            _ => panic!("MSR {number:#x} does not exist there"),
        };
        assert_eq!(Capability::read(old), Err(Missing::TrueControls));
        // Without secondary controls their MSR does not exist either.
        let plain = |number| match number {
            msr::VMX_TRUE_PRIMARY => skylake(number) & !(1 << 63),
            msr::VMX_SECONDARY | msr::VMX_EPT_VPID_CAP => panic!("MSR {number:#x} does not exist there"),
            _ => skylake(number),
        };
        assert_eq!(Capability::read(plain), Err(Missing::Control("activate secondary controls")));
    }
}
