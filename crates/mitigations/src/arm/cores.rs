//! Cores that are known by their number (MIDR_EL1).
//!
//! Sources: Arm's page "Spectre-BHB" with its table of branches, "Vulnerability of Speculative Processors to Cache
//! Timing Side-Channel Mechanism" with its table of cores, and the lists of Linux 6.14 (`arch/arm64/kernel`), where
//! other makers' cores are, too.

/// A core.
#[derive(Clone, Copy, Debug)]
pub(super) struct Core {
    implementer: u64,
    part: u64,
    /// Its name.
    pub(super) name: &'static str,
    /// Branch targets do not reach across contexts, although CSV2 may be zero.
    pub(super) trains_nobody: bool,
    /// No history of branches to mislead.
    pub(super) keeps_no_history: bool,
    /// A load does not overtake a store to the same address.
    pub(super) bypasses_nothing: bool,
    /// A program can read what its own tables have for the kernel.
    pub(super) reads_ahead: bool,
    /// Branches that replace the whole history.
    pub(super) branches: Option<u8>,
}

const ARM: u64 = 0x41;
const BROADCOM: u64 = 0x42;
const HISILICON: u64 = 0x48;
const QUALCOMM: u64 = 0x51;
const AMPERE: u64 = 0xc0;

impl Core {
    /// The core with this MIDR_EL1, of any revision.
    pub(super) fn of(midr: u64) -> Option<&'static Self> {
        let (implementer, part) = (midr >> 24 & 0xff, midr >> 4 & 0xfff);
        CORES.iter().find(|core| (core.implementer, core.part) == (implementer, part))
    }

    /// A core that speculates, with what it reports.
    const fn new(implementer: u64, part: u64, name: &'static str) -> Self {
        Self {
            implementer,
            part,
            name,
            trains_nobody: false,
            keeps_no_history: false,
            bypasses_nothing: false,
            reads_ahead: false,
            branches: None,
        }
    }

    /// One that replaces its history by so many branches.
    const fn with_branches(part: u64, name: &'static str, branches: u8) -> Self {
        Self { branches: Some(branches), ..Self::new(ARM, part, name) }
    }

    /// One that executes in order, and has none of the weaknesses.
    const fn in_order(implementer: u64, part: u64, name: &'static str) -> Self {
        let core = Self::new(implementer, part, name);
        Self { trains_nobody: true, keeps_no_history: true, bypasses_nothing: true, ..core }
    }
}

/// The table.
const CORES: &[Core] = &[
    Core::in_order(ARM, 0xd04, "Cortex-A35"),
    Core::in_order(ARM, 0xd03, "Cortex-A53"),
    Core::in_order(ARM, 0xd05, "Cortex-A55"),
    Core { keeps_no_history: true, ..Core::new(ARM, 0xd46, "Cortex-A510") },
    Core { keeps_no_history: true, ..Core::new(ARM, 0xd80, "Cortex-A520") },
    Core::with_branches(0xd07, "Cortex-A57", 8),
    Core::with_branches(0xd08, "Cortex-A72", 8),
    Core::new(ARM, 0xd09, "Cortex-A73"),
    Core { reads_ahead: true, ..Core::new(ARM, 0xd0a, "Cortex-A75") },
    Core::with_branches(0xd0b, "Cortex-A76", 24),
    Core::with_branches(0xd0e, "Cortex-A76AE", 24),
    Core::with_branches(0xd0d, "Cortex-A77", 24),
    Core::with_branches(0xd41, "Cortex-A78", 32),
    Core::with_branches(0xd42, "Cortex-A78AE", 32),
    Core::with_branches(0xd4b, "Cortex-A78C", 32),
    Core::with_branches(0xd47, "Cortex-A710", 32),
    Core::with_branches(0xd4d, "Cortex-A715", 38),
    Core::with_branches(0xd81, "Cortex-A720", 38),
    Core::with_branches(0xd44, "Cortex-X1", 32),
    Core::with_branches(0xd48, "Cortex-X2", 32),
    Core::with_branches(0xd4e, "Cortex-X3", 132),
    Core::with_branches(0xd0c, "Neoverse N1", 24),
    Core::with_branches(0xd49, "Neoverse N2", 32),
    Core::with_branches(0xd40, "Neoverse V1", 32),
    Core::with_branches(0xd4f, "Neoverse V2", 132),
    Core::in_order(BROADCOM, 0x100, "Brahma-B53"),
    Core { trains_nobody: true, ..Core::new(HISILICON, 0xd01, "TaiShan v110") },
    Core { bypasses_nothing: false, ..Core::in_order(QUALCOMM, 0x801, "Kryo 2xx Silver") },
    Core::in_order(QUALCOMM, 0x803, "Kryo 3xx Silver"),
    Core::in_order(QUALCOMM, 0x805, "Kryo 4xx Silver"),
    Core { branches: Some(24), ..Core::new(QUALCOMM, 0x804, "Kryo 4xx Gold") },
    Core { branches: Some(11), ..Core::new(AMPERE, 0xac3, "Ampere1") },
];
