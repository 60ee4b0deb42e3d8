//! What a vCPU is, besides memory.
//!
//! QEMU 11.1 migrates a vCPU's registers, MSRs and vector state, but some come out wrong: of the flags, the arithmetic
//! ones are those of a new vCPU, and vector registers can be zero. It migrates neither the local APIC nor the synthetic
//! interrupt controller and its timers, and of the partition not the reference time: a guest without them never gets
//! its next timer's interrupt. QEMU writes none of a vCPU's state when it lets the guest go on. So all of it is set
//! before, from the one hypervisor to the other, but for the memory types, which QEMU gets right.
//!
//! Of a local APIC two things come together: what was saved, and what QEMU's devices ask for while they are loaded, as
//! a VM generation ID does that is new. An APIC as it is after a reset would not take that. So it gets its state before
//! them, and once more afterwards, with what they have asked for.
//!
//! The guest must be stopped. What its timers ask for meanwhile is part of the state: reading a local APIC comes after
//! reading the timers, because a timer that expires in between is then in both, not in none of them.

use anyhow::{Context as _, Result, ensure};
use crc::{CRC_32_ISCSI, Crc};
use hyperv_defs::Register;
use hyperv_defs::page::LocalApicState;
use hyperv_defs::property::{ProcessorFeatures, Property};
use hyperv_defs::wire::U32;
use serde::{Deserialize, Serialize};

use crate::guest::{Guest, Part};

/// All registers that are carried, in the order in which they are set.
const REGISTERS: [(&str, &[Register]); 12] = [
    // It decides whom an interrupt reaches.
    ("mode of the local APIC", &[Register::ApicBase]),
    (
        "control registers",
        &[Register::Xfem, Register::Cr0, Register::Cr2, Register::Cr3, Register::Cr4, Register::Cr8, Register::Efer],
    ),
    (
        "segments",
        &[
            Register::Segment(0),
            Register::Segment(1),
            Register::Segment(2),
            Register::Segment(3),
            Register::Segment(4),
            Register::Segment(5),
            Register::Segment(6),
            Register::Segment(7),
            Register::Gdtr,
            Register::Idtr,
        ],
    ),
    (
        "model-specific registers",
        &[
            Register::KernelGsBase,
            Register::SysenterCs,
            Register::SysenterEip,
            Register::SysenterEsp,
            Register::Star,
            Register::Lstar,
            Register::Cstar,
            Register::Sfmask,
            Register::Pat,
            Register::TscAux,
            Register::SpecCtrl,
        ],
    ),
    (
        "synthetic interrupt controller",
        &[
            Register::Scontrol,
            Register::Siefp,
            Register::Simp,
            Register::Sirbp,
            Register::Sint(0),
            Register::Sint(1),
            Register::Sint(2),
            Register::Sint(3),
            Register::Sint(4),
            Register::Sint(5),
            Register::Sint(6),
            Register::Sint(7),
            Register::Sint(8),
            Register::Sint(9),
            Register::Sint(10),
            Register::Sint(11),
            Register::Sint(12),
            Register::Sint(13),
            Register::Sint(14),
            Register::Sint(15),
        ],
    ),
    ("page of the interface", &[Register::VpAssistPage]),
    (
        "debug registers",
        &[Register::Dr(0), Register::Dr(1), Register::Dr(2), Register::Dr(3), Register::Dr6, Register::Dr7],
    ),
    (
        "general registers",
        &[
            Register::Gpr(0),
            Register::Gpr(1),
            Register::Gpr(2),
            Register::Gpr(3),
            Register::Gpr(4),
            Register::Gpr(5),
            Register::Gpr(6),
            Register::Gpr(7),
            Register::Gpr(8),
            Register::Gpr(9),
            Register::Gpr(10),
            Register::Gpr(11),
            Register::Gpr(12),
            Register::Gpr(13),
            Register::Gpr(14),
            Register::Gpr(15),
            Register::Rip,
            Register::Rflags,
        ],
    ),
    ("deadline", &[Register::TscDeadline]),
    // After the instruction pointer, whose change ends an interrupt shadow.
    ("interrupted event", &[Register::InterruptState, Register::PendingInterruption]),
    ("pending exception", &[Register::PendingEvent0]),
    // Whether it waits for its start, or for an interrupt.
    ("activity", &[Register::InternalActivityState]),
];

/// Of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Features of the processor that the guest may use: the lower half first.
    features: [u64; 2],
    /// In units of 100 ns.
    reference_time: u64,
    /// The counter of all vCPUs at that time.
    tsc: u64,
    vps: Vec<VpState>,
}

/// What a guest needs of the host to which it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Needs {
    /// Features of the processor, as in [`State`].
    features: [u64; 2],
    vps: u32,
}

impl Needs {
    /// Those of a guest, which may run.
    pub(crate) fn of(guest: &Guest) -> Result<Self> {
        Ok(Self { features: guest.features()?.banks(), vps: u32::try_from(guest.count())? })
    }

    /// Whether this guest of another host can take its place: as many vCPUs, and no feature less.
    pub(crate) fn check(&self, guest: &Guest) -> Result<()> {
        self.check_against(&Self::of(guest)?)
    }

    fn check_against(&self, here: &Self) -> Result<()> {
        ensure!(self.vps == here.vps, "the guest that moves has {} vCPUs, this one {}", self.vps, here.vps);
        let [wanted, present] = [self, here].map(|needs| ProcessorFeatures::of_banks(needs.features));
        let mut missing = wanted.difference(present);
        let mut named: Vec<String> = Vec::new();
        for (name, feature) in missing.iter_names() {
            named.push(name.to_owned());
            missing.remove(feature);
        }
        if !missing.is_empty() {
            named.push(format!("feature {:#x}", missing.bits()));
        }
        ensure!(named.is_empty(), "this host's processor has no {}", named.join(", "));
        Ok(())
    }
}

/// Of a vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct VpState {
    local_apic: Vec<u8>,
    timers: Vec<u8>,
    /// The image of XSAVE: x87 and vector registers.
    vector: Vec<u8>,
    /// As many as names in [`REGISTERS`].
    registers: Vec<u128>,
}

/// First bytes of a file, with a number that changes with the format.
const MAGIC: [u8; 8] = *b"DunVPs\0\x03";
/// Sum of a state.
const SUM: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

fn names() -> impl Iterator<Item = Register> {
    REGISTERS.iter().flat_map(|(_, names)| names.iter().copied())
}

impl State {
    /// Reads that of a guest that is stopped.
    pub(crate) fn save(guest: &Guest) -> Result<Self> {
        let (names, vps): (Vec<_>, _) = (names().collect(), guest.vps()?);
        // One after the other: both are read at the same time, as far as a guest can tell.
        let reference_time = guest.property(Property::ReferenceTime)?;
        let [tsc]: [u128; 1] = vps.registers(0, &[Register::Tsc])?[..].try_into()?;
        let tsc = u64::try_from(tsc)?;
        let states = (0..vps.count()).map(|index| {
            let one = || -> Result<VpState> {
                let timers = vps.part(index, Part::SyntheticTimers)?;
                let registers = vps.registers(index, &names)?;
                let vector = vps.part(index, Part::Xsave)?;
                Ok(VpState { timers, registers, vector, local_apic: vps.part(index, Part::LocalApic)? })
            };
            one().with_context(|| format!("vCPU {index}"))
        });
        let vps = states.collect::<Result<_>>()?;
        Ok(Self { features: guest.features()?.banks(), reference_time, tsc, vps })
    }

    /// Whether a guest can go on with this state.
    pub(crate) fn check(&self, guest: &Guest) -> Result<()> {
        self.needs()?.check(guest)
    }

    fn needs(&self) -> Result<Needs> {
        Ok(Needs { features: self.features, vps: u32::try_from(self.vps.len())? })
    }

    /// Makes local APICs ready for what devices ask for while QEMU loads them.
    pub(crate) fn prepare(&self, guest: &Guest) -> Result<()> {
        self.check(guest)?;
        let vps = guest.vps()?;
        for (index, vp) in self.vps.iter().enumerate() {
            let mode = vp.registers.first().context("no mode of the local APIC")?;
            vps.set_registers(index, &[(Register::ApicBase, *mode)])
                .and_then(|()| vps.set_part(index, Part::LocalApic, &vp.local_apic))
                .with_context(|| format!("vCPU {index}"))?;
        }
        Ok(())
    }

    /// Gives a guest that is stopped this state. QEMU has loaded the rest before. Without [`prepare`](Self::prepare)
    /// before that, what devices have asked for meanwhile is lost.
    pub(crate) fn load(&self, guest: &Guest) -> Result<()> {
        self.check(guest)?;
        // First, because deadlines are times of these clocks. QEMU has set the counter when it had loaded the guest.
        // Since then it has gone on, and for the guest no time has passed.
        let vps = guest.vps()?;
        guest.set_property(Property::ReferenceTime, self.reference_time)?;
        for index in 0..vps.count() {
            vps.set_registers(index, &[(Register::Tsc, self.tsc.into())]).context("TSC")?;
        }
        for (index, vp) in self.vps.iter().enumerate() {
            let one = || -> Result<()> {
                // A timer that is due sets a bit in the local APIC, which must not be overwritten then.
                let local_apic = with_requests(&vp.local_apic, &vps.part(index, Part::LocalApic)?)?;
                vps.set_part(index, Part::LocalApic, &local_apic)?;
                let mut values = vp.registers.iter().copied();
                for (what, names) in REGISTERS {
                    let registers: Vec<_> = names.iter().copied().zip(values.by_ref()).collect();
                    vps.set_registers(index, &registers).context(what)?;
                }
                // Its components are those of XCR0 (`Xfem`).
                vps.set_part(index, Part::Xsave, &vp.vector)?;
                vps.set_part(index, Part::SyntheticTimers, &vp.timers)
            };
            one().with_context(|| format!("vCPU {index}"))?;
        }
        Ok(())
    }

    /// As bytes, with a sum.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(postcard::to_allocvec(self)?);
        bytes.extend(SUM.checksum(&bytes).to_le_bytes());
        Ok(bytes)
    }

    /// From such bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let is_ours = bytes.starts_with(&MAGIC[..MAGIC.len() - 1]);
        ensure!(is_ours, "this is no state of vCPUs");
        ensure!(bytes.starts_with(&MAGIC), "the state of vCPUs is of another version of this program");
        let (content, sum) = bytes.split_last_chunk().context("the state of vCPUs is cut off")?;
        ensure!(u32::from_le_bytes(*sum) == SUM.checksum(content), "the state of vCPUs is damaged");
        let content = content.get(MAGIC.len()..).context("the state of vCPUs is cut off")?;
        let state: Self = postcard::from_bytes(content).context("the state of vCPUs is damaged")?;
        let is_whole = state.vps.iter().all(|vp| vp.registers.len() == names().count());
        ensure!(is_whole, "the state of vCPUs lacks registers");
        Ok(state)
    }
}

/// A local APIC's state as it was saved, and with the interrupts that it was asked for since it was prepared. Its own
/// timer is none of those: it will have as long to go as when it was saved.
fn with_requests(saved: &[u8], now: &[u8]) -> Result<Vec<u8>> {
    let parse = |bytes| LocalApicState::from_bytes(bytes).context("a short state of a local APIC");
    let (mut state, now) = (parse(saved)?, parse(now)?);
    let [timer, ..] = state.lvt_timer.get().to_le_bytes();
    let mut of_timer = [0_u32; 8];
    of_timer[usize::from(timer / 32)] = 1 << (timer % 32);
    for (word, of_timer) in of_timer.into_iter().enumerate() {
        let new = now.irr[word].get() & !state.irr[word].get() & !of_timer;
        let level = state.tmr[word].get() & !new | now.tmr[word].get() & new;
        state.irr[word] = U32::new(state.irr[word].get() | new);
        state.tmr[word] = U32::new(level);
    }
    Ok(state.bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_that_came_while_devices_were_loaded_are_kept_but_for_the_timers() {
        let mut saved =
            LocalApicState { lvt_timer: U32::new(0x2_00ec), spurious: U32::new(0x1ff), ..Default::default() };
        saved.irr[1] = U32::new(1 << 3);
        saved.tmr[1] = U32::new(1 << 3);
        let mut now = saved;
        // 0x29, which is level-triggered, 0x35, and the timer's 0xec.
        now.irr[1] = U32::new(1 << 9 | 1 << 21);
        now.irr[7] = U32::new(1 << 12);
        now.tmr[1] = U32::new(1 << 9);
        let both = with_requests(saved.bytes(), now.bytes()).expect("is long enough");
        let mut wanted = saved;
        wanted.irr[1] = U32::new(1 << 3 | 1 << 9 | 1 << 21);
        wanted.tmr[1] = U32::new(1 << 3 | 1 << 9);
        assert_eq!(both, wanted.bytes());
        assert!(with_requests(&saved.bytes()[1..], now.bytes()).is_err());
    }

    fn state() -> State {
        let vp = |seed: u8| VpState {
            local_apic: vec![seed; 176],
            timers: vec![seed + 1; 200],
            vector: vec![seed + 2; 832],
            registers: (0..names().count() as u128).collect(),
        };
        let features = ProcessorFeatures::SSE3 | ProcessorFeatures::SSSE3;
        State { features: features.banks(), reference_time: 77, tsc: 99, vps: vec![vp(1), vp(9)] }
    }

    #[test]
    fn state_comes_back_from_its_bytes() {
        let bytes = state().encode().expect("has room");
        assert_eq!(State::decode(&bytes).expect("is whole"), state());
    }

    #[test]
    fn bytes_that_are_cut_off_or_flipped_are_refused() {
        let bytes = state().encode().expect("has room");
        for length in 0..bytes.len() {
            assert!(State::decode(&bytes[..length]).is_err(), "the first {length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(State::decode(&other).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn guest_that_lacks_a_feature_or_a_vcpu_is_refused_by_name() {
        let here = |vps, features: ProcessorFeatures| Needs { features: features.banks(), vps };
        let needs = state().needs().expect("has two vCPUs");
        let why = |vps, features| needs.check_against(&here(vps, features)).map_err(|error| error.to_string());
        let all = ProcessorFeatures::of_banks(state().features) | ProcessorFeatures::SSE4A;
        assert_eq!(why(2, all), Ok(()));
        assert_eq!(why(2, all - ProcessorFeatures::SSSE3), Err("this host's processor has no SSSE3".into()));
        assert_eq!(why(3, all), Err("the guest that moves has 2 vCPUs, this one 3".into()));
        let future = Needs { features: [0, 1 << 63], ..needs };
        let refused = future.check_against(&here(2, all)).expect_err("nobody has it").to_string();
        assert_eq!(refused, format!("this host's processor has no feature {:#x}", 1_u128 << 127));
    }

    /// Why a register is not carried, if it is not.
    fn why_not(register: Register) -> Option<&'static str> {
        use Register as R;
        Some(match register {
            R::Xmm(_) | R::FpMmx(_) | R::FpControlStatus | R::XmmControlStatus => "in the image of XSAVE",
            R::Stimer(_) => "in the state of the timers",
            R::Tsc => "the same for all vCPUs: of the guest",
            R::MtrrDefType | R::MtrrPhysBase(_) | R::MtrrPhysMask(_) | R::MtrrFixed(_) => "QEMU's, and right",
            R::Hypercall | R::GuestOsId | R::ReferenceTsc => "of the partition: QEMU's, and right",
            R::TimeRefCount => "of the partition",
            R::ExplicitSuspend | R::InterceptSuspend | R::DispatchSuspend | R::RegisterPage => "the parent's own",
            R::InitialApicId | R::MtrrCap | R::VpIndex | R::VpRuntime | R::Sversion => "cannot be set",
            R::IntermediateCr0 | R::IntermediateCr3 | R::IntermediateCr4 | R::IntermediateCr8 => "other names",
            R::Eom | R::TscAdjust => "has no value",
            R::Bndcfgs | R::DebugCtl | R::PredCmd | R::VirtSpecCtrl | R::TsxCtrl | R::Xss | R::UCet | R::SCet => ZERO,
            R::Ssp | R::PlSsp(_) | R::InterruptSspTable | R::UmwaitControl | R::Xfd | R::XfdErr => ZERO,
            R::PendingEvent1 | R::DeliverabilityNotifications | R::VpRootSignalCount => ZERO,
            R::InstructionEmulationHints | R::GuestCrashControl | R::GuestCrashParameter(_) => ZERO,
            _ => return None,
        })
    }

    const ZERO: &str = "always zero: of a feature that no guest has";

    #[test]
    fn every_register_is_carried_or_there_is_a_reason() {
        let carried: Vec<_> = names().collect();
        for register in Register::all() {
            let why_not = why_not(register);
            assert_eq!(carried.contains(&register), why_not.is_none(), "{register:?}: {why_not:?}");
        }
    }

    #[test]
    fn no_register_is_set_twice() {
        let mut all: Vec<_> = names().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), names().count());
    }
}
