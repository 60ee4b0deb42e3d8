//! Intel's processors.

use crate::{Plan, Processor, State, Steps, Weakness};

/// CPUID leaf 7, EBX.
const TSX: u32 = 1 << 11;
/// CPUID leaf 7, EDX.
const MD_CLEAR: u32 = 1 << 10;
const SPEC_CTRL_AND_IBPB: u32 = 1 << 26;
const L1D_FLUSH: u32 = 1 << 28;
/// CPUID leaf 7, subleaf 2, EDX.
const BHI_CTRL: u32 = 1 << 4;

/// Bits of IA32_ARCH_CAPABILITIES.
mod has {
    pub(super) const RDCL_NO: u64 = 1 << 0;
    pub(super) const IBRS_ALL: u64 = 1 << 1;
    pub(super) const SKIP_L1D_FLUSH: u64 = 1 << 3;
    pub(super) const MDS_NO: u64 = 1 << 5;
    pub(super) const PSCHANGE_MC_NO: u64 = 1 << 6;
    pub(super) const TSX_CTRL: u64 = 1 << 7;
    pub(super) const TAA_NO: u64 = 1 << 8;
    pub(super) const MMIO_NO: u64 = 1 << 13 | 1 << 14 | 1 << 15;
    pub(super) const FB_CLEAR: u64 = 1 << 17;
    pub(super) const BHI_NO: u64 = 1 << 20;
    pub(super) const PBRSB_NO: u64 = 1 << 24;
    pub(super) const GDS_CTRL: u64 = 1 << 25;
    pub(super) const GDS_NO: u64 = 1 << 26;
    pub(super) const RFDS_NO: u64 = 1 << 27;
    pub(super) const RFDS_CLEAR: u64 = 1 << 28;
    pub(super) const ITS_NO: u64 = 1 << 62;
}

/// Models of family 6, by the names of their cores.
mod model {
    pub(super) const HASWELL_X: u32 = 0x3f;
    pub(super) const BROADWELL_D: u32 = 0x56;
    pub(super) const BROADWELL_X: u32 = 0x4f;
    pub(super) const SKYLAKE_L: u32 = 0x4e;
    pub(super) const SKYLAKE: u32 = 0x5e;
    /// And Cascade Lake (stepping 5 to 7) and Cooper Lake (10, 11).
    pub(super) const SKYLAKE_X: u32 = 0x55;
    /// And Amber, Whiskey, Comet and Coffee Lake.
    pub(super) const KABYLAKE_L: u32 = 0x8e;
    pub(super) const KABYLAKE: u32 = 0x9e;
    pub(super) const COMETLAKE: u32 = 0xa5;
    pub(super) const COMETLAKE_L: u32 = 0xa6;
    pub(super) const ICELAKE_L: u32 = 0x7e;
    pub(super) const ICELAKE_X: u32 = 0x6a;
    pub(super) const ICELAKE_D: u32 = 0x6c;
    pub(super) const LAKEFIELD: u32 = 0x8a;
    pub(super) const TIGERLAKE_L: u32 = 0x8c;
    pub(super) const TIGERLAKE: u32 = 0x8d;
    pub(super) const ROCKETLAKE: u32 = 0xa7;
    pub(super) const ALDERLAKE: u32 = 0x97;
    pub(super) const ALDERLAKE_L: u32 = 0x9a;
    pub(super) const RAPTORLAKE: u32 = 0xb7;
    pub(super) const RAPTORLAKE_P: u32 = 0xba;
    pub(super) const RAPTORLAKE_S: u32 = 0xbf;
    pub(super) const SILVERMONT: [u32; 3] = [0x37, 0x4a, 0x4d];
    pub(super) const AIRMONT: [u32; 3] = [0x4c, 0x5a, 0x75];
    pub(super) const GOLDMONT: [u32; 3] = [0x5c, 0x5f, 0x7a];
    pub(super) const TREMONT: [u32; 3] = [0x86, 0x96, 0x9c];
    pub(super) const GRACEMONT: u32 = 0xbe;
    pub(super) const KNIGHTS: [u32; 2] = [0x57, 0x85];
}

const MMIO: [u32; 17] = [
    model::HASWELL_X,
    model::BROADWELL_D,
    model::BROADWELL_X,
    model::SKYLAKE_L,
    model::SKYLAKE,
    model::SKYLAKE_X,
    model::KABYLAKE_L,
    model::KABYLAKE,
    model::COMETLAKE,
    model::COMETLAKE_L,
    model::ICELAKE_L,
    model::ICELAKE_X,
    model::ICELAKE_D,
    model::LAKEFIELD,
    model::ROCKETLAKE,
    model::TREMONT[0],
    model::TREMONT[1],
];
const GATHERS: [u32; 13] = [
    model::SKYLAKE_L,
    model::SKYLAKE,
    model::SKYLAKE_X,
    model::KABYLAKE_L,
    model::KABYLAKE,
    model::COMETLAKE,
    model::COMETLAKE_L,
    model::ICELAKE_L,
    model::ICELAKE_X,
    model::ICELAKE_D,
    model::TIGERLAKE_L,
    model::TIGERLAKE,
    model::ROCKETLAKE,
];
/// Indirect branches of a guest's processes may go astray, by other processes. The hypervisor's do not.
const INDIRECT_TARGETS_OF_GUESTS: [u32; 6] =
    [model::ICELAKE_L, model::ICELAKE_X, model::ICELAKE_D, model::TIGERLAKE_L, model::TIGERLAKE, model::ROCKETLAKE];
/// Predictions of a guest do not serve programs outside of it.
const GUESTS_REACH_NO_PROGRAM: [u32; 7] = [
    model::ICELAKE_L,
    model::ICELAKE_X,
    model::ICELAKE_D,
    model::LAKEFIELD,
    model::TIGERLAKE_L,
    model::TIGERLAKE,
    model::ROCKETLAKE,
];
const REGISTER_FILE: [u32; 6] = [
    model::ALDERLAKE,
    model::ALDERLAKE_L,
    model::RAPTORLAKE,
    model::RAPTORLAKE_P,
    model::RAPTORLAKE_S,
    model::GRACEMONT,
];

/// Alder Lake and later: their history of branches is longer.
const LONG_HISTORY: [u32; 14] = [
    model::ALDERLAKE,
    model::ALDERLAKE_L,
    model::RAPTORLAKE,
    model::RAPTORLAKE_P,
    model::RAPTORLAKE_S,
    model::GRACEMONT,
    // Sapphire and Emerald Rapids, Granite Rapids, Meteor Lake, Arrow Lake, Lunar Lake.
    0x8f,
    0xcf,
    0xad,
    0xae,
    0xaa,
    0xac,
    0xc6,
    0xbd,
];

/// Cores without that weakness, by Intel's list. Later ones say so in IA32_ARCH_CAPABILITIES.
const ONE_PAGE_SIZE: [&[u32]; 5] =
    [&model::SILVERMONT, &model::AIRMONT, &model::GOLDMONT, &[model::TREMONT[0]], &model::KNIGHTS];

const NO_MICROCODE: &str = "the microcode is too old";

pub(crate) fn plan(processor: &Processor, plan: &mut Plan) {
    let &Processor { model, stepping, leaf_7_ebx, leaf_7_edx, leaf_7_2_edx, capabilities, .. } = processor;
    let has = |bit: u64| capabilities & bit != 0;
    let is_of = |models: &[u32]| processor.family == 6 && models.contains(&model);
    let has_controls = leaf_7_edx & SPEC_CTRL_AND_IBPB != 0;
    let is_enhanced = has_controls && has(has::IBRS_ALL);

    let by = if is_enhanced { "enhanced IBRS, IBPB between VMs" } else { "IBRS at exits, IBPB between VMs" };
    let steps = match is_enhanced {
        true if has(has::PBRSB_NO) => Steps::IBRS_ALWAYS,
        true => Steps::IBRS_ALWAYS | Steps::ONE_CALL,
        false => Steps::IBRS_AT_EXIT | Steps::FILL_RETURN_STACK,
    };
    plan.hold(Weakness::SpectreV2, steps | Steps::IBPB_BETWEEN_VMS, has_controls, by, NO_MICROCODE);

    if !has(has::BHI_NO) {
        let (steps, can, by) = match has_controls && leaf_7_2_edx & BHI_CTRL != 0 {
            true => (Steps::HISTORY_DISABLED, true, "BHI_DIS_S"),
            // Ninety branches are enough for histories up to Ice Lake's, which is 66 long. Later ones have 194.
            false => (Steps::CLEAR_HISTORY, !is_of(&LONG_HISTORY), "branches at exits"),
        };
        plan.hold(Weakness::BranchHistory, steps, can, by, NO_MICROCODE);
    }
    // Returns may take predictions of indirect branches where the return stack is empty: IBRS holds that.
    let by_returns = [
        model::SKYLAKE_L,
        model::SKYLAKE,
        model::SKYLAKE_X,
        model::KABYLAKE_L,
        model::KABYLAKE,
        model::COMETLAKE,
        model::COMETLAKE_L,
        model::ICELAKE_L,
        model::LAKEFIELD,
        model::ROCKETLAKE,
    ];
    if is_of(&by_returns) {
        plan.hold(Weakness::Retbleed, steps, has_controls, by, NO_MICROCODE);
    }

    let atoms = [&model::SILVERMONT[..], &model::AIRMONT, &model::GOLDMONT, &model::TREMONT];
    let is_atom = atoms.iter().any(|models| is_of(models)) || is_of(&[model::GRACEMONT]);
    if !has(has::RDCL_NO) && !is_atom {
        if has(has::SKIP_L1D_FLUSH) {
            plan.states[Weakness::L1tf as usize] = State::Held("the hypervisor below");
        } else {
            let can = leaf_7_edx & L1D_FLUSH != 0;
            plan.hold(Weakness::L1tf, Steps::FLUSH_L1D, can, "flush of the L1 cache at entries", NO_MICROCODE);
        }
    }

    // VERW clears what the microcode says: the buffers of MDS, or the fill buffers, or the register file.
    const BY_VERW: &str = "VERW at entries";
    let clears = leaf_7_edx & MD_CLEAR != 0;
    let is_old_atom = is_of(&model::GOLDMONT) || is_of(&model::TREMONT) || is_of(&[model::GRACEMONT]);
    let has_mds = !has(has::MDS_NO) && !is_old_atom;
    if has_mds {
        plan.hold(Weakness::Mds, Steps::CLEAR_BUFFERS, clears, BY_VERW, NO_MICROCODE);
    }
    let has_tsx = leaf_7_ebx & TSX != 0 || has(has::TSX_CTRL);
    if has_tsx && !has(has::TAA_NO) {
        plan.hold(Weakness::TsxAsyncAbort, Steps::CLEAR_BUFFERS, clears, BY_VERW, NO_MICROCODE);
    }
    if is_of(&MMIO) && capabilities & has::MMIO_NO != has::MMIO_NO {
        let clears_fill_buffers = has(has::FB_CLEAR) || clears && has_mds;
        plan.hold(Weakness::MmioStaleData, Steps::CLEAR_BUFFERS, clears_fill_buffers, BY_VERW, NO_MICROCODE);
    }
    let has_register_file = is_of(&REGISTER_FILE) || is_of(&model::GOLDMONT) || is_of(&model::TREMONT);
    if has(has::RFDS_CLEAR) || has_register_file && !has(has::RFDS_NO) {
        let clears = has(has::RFDS_CLEAR);
        plan.hold(Weakness::RegFileDataSampling, Steps::CLEAR_BUFFERS, clears, BY_VERW, NO_MICROCODE);
    }

    // A VMM in the parent runs behind a change of the VM.
    if !is_of(&GUESTS_REACH_NO_PROGRAM) && (!is_atom || is_of(&[model::GRACEMONT])) {
        let by = "IBPB between VMs";
        plan.hold(Weakness::Vmscape, Steps::IBPB_BETWEEN_VMS, has_controls, by, NO_MICROCODE);
    }

    if is_of(&GATHERS) && !has(has::GDS_NO) {
        let can = has(has::GDS_CTRL);
        plan.hold(Weakness::GatherDataSampling, Steps::empty(), can, "microcode", NO_MICROCODE);
    }
    // Branches in the lower half of a cache line may go where another branch of a guest went, enhanced IBRS or not.
    // Other kernels move their branches, by code that a compiler makes of each; here all predictions are forgotten at
    // an exit. No register tells whether the microcode is new enough for IBPB to forget these, too.
    let later_skylake = is_of(&[model::SKYLAKE_X]) && stepping > 5
        || is_of(&[model::KABYLAKE_L]) && stepping > 0xb
        || is_of(&[model::KABYLAKE]) && stepping > 0xc
        || is_of(&[model::COMETLAKE, model::COMETLAKE_L]);
    if (later_skylake || is_of(&INDIRECT_TARGETS_OF_GUESTS)) && !has(has::ITS_NO) {
        let (steps, by) = match later_skylake {
            true => (Steps::IBPB_AT_EXIT, "IBPB at exits, if the microcode is of May 2025 or newer"),
            false => (Steps::IBPB_BETWEEN_VMS, "IBPB between VMs, if the microcode is of May 2025 or newer"),
        };
        plan.hold(Weakness::IndirectTargetSelection, steps, has_controls, by, NO_MICROCODE);
    }
    if !has(has::PSCHANGE_MC_NO) && !ONE_PAGE_SIZE.iter().any(|models| is_of(models)) {
        let by = "small pages for code of guests";
        plan.hold(Weakness::ItlbMultihit, Steps::SMALL_CODE, true, by, "");
    }
}
