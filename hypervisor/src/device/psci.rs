//! Firmware calls of guests: PSCI 1.1 (DEN0022, power) by the SMC calling convention 1.1 (DEN0028).
//!
//! A call is a number in W0 with arguments. Most calls have an answer at once. The others are returned as requests to
//! the hypervisor, with their arguments checked as far as possible without a vCPU. Numbers and error codes come from
//! the `smccc` crate.
//!
//! Functions have a 32-bit and a 64-bit form; bit 30 of the number selects one. The arguments of a 32-bit form are the
//! lower halves of the registers; the upper halves are ignored. Errors are sign-extended to 64 bits for both: a caller
//! of a 32-bit form reads only W0.

use smccc::arch::{
    SMCCC_ARCH_FEATURES, SMCCC_ARCH_WORKAROUND_1, SMCCC_ARCH_WORKAROUND_2, SMCCC_ARCH_WORKAROUND_3, SMCCC_VERSION,
};
use smccc::psci::error::{INVALID_ADDRESS, INVALID_PARAMETERS, NOT_SUPPORTED};
use smccc::psci::{
    PSCI_AFFINITY_INFO_32, PSCI_AFFINITY_INFO_64, PSCI_CPU_OFF, PSCI_CPU_ON_32, PSCI_CPU_ON_64, PSCI_CPU_SUSPEND_32,
    PSCI_CPU_SUSPEND_64, PSCI_FEATURES, PSCI_MIGRATE_INFO_TYPE, PSCI_SYSTEM_OFF, PSCI_SYSTEM_RESET,
    PSCI_SYSTEM_RESET2_32, PSCI_SYSTEM_RESET2_64, PSCI_VERSION,
};

use super::affinity::vcpu_at;

/// A decoded call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Nothing that the caller would not know by this answer.
    Answer(Answer),
    /// Start a vCPU. The answer is [`Answer::SUCCESS`], or why it cannot be started.
    CpuOn {
        /// Number of a vCPU that exists, possibly the caller.
        vcpu: u32,
        /// Start address: a GPA, multiple of four.
        entry: u64,
        /// Its X0 at the start.
        context: u64,
    },
    /// The caller stops until it is started again. There is an answer only on failure.
    CpuOff,
    /// Whether a vCPU runs: the answer is made by [`Answer::affinity_info`].
    AffinityInfo {
        /// Number of a vCPU that exists.
        vcpu: u32,
    },
    /// Wait for an interrupt, as WFI does, and then answer [`Answer::SUCCESS`]. A request to power down may be met by
    /// less, and as nothing is lost the caller's entry address is not needed.
    Suspend,
    /// End the VM. No answer.
    SystemOff,
    /// Restart the VM. No answer.
    SystemReset,
    /// This pCPU's branch predictions must be cleared, as this function of the host's firmware does it. The answer is
    /// [`Answer::SUCCESS`].
    Mitigate(u32),
    /// No function that there is. The answer is [`Answer::NOT_SUPPORTED`].
    Unknown,
}

/// The functions against speculation attacks that a guest has: the answers to SMCCC_ARCH_FEATURES for the
/// [functions](Mitigations::FUNCTIONS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mitigations(pub(crate) [i32; 3]);

impl Mitigations {
    /// SMCCC_ARCH_WORKAROUND_1 to 3.
    pub const FUNCTIONS: [u32; 3] = [SMCCC_ARCH_WORKAROUND_1, SMCCC_ARCH_WORKAROUND_2, SMCCC_ARCH_WORKAROUND_3];
    /// None.
    pub const NONE: Self = Self([NOT_SUPPORTED; 3]);

    /// The answers about the [functions](Self::FUNCTIONS): negative if there is no such function.
    #[must_use]
    pub const fn answers(self) -> [i32; 3] {
        self.0
    }

    /// The guest's answer for a function: 0 if it does something, 1 if it need not be called.
    fn features(self, number: u32) -> Answer {
        match Self::FUNCTIONS.iter().position(|function| *function == number).map(|at| self.0[at]) {
            // This one is a switch of the pCPU. It is on, and stays on for every vCPU that runs there.
            Some(0 | 1) if number == SMCCC_ARCH_WORKAROUND_2 => Answer(1),
            Some(answer @ (0 | 1)) => Answer::error(answer),
            _ => Answer::NOT_SUPPORTED,
        }
    }
}

/// The caller's X0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer(pub(crate) u64);

/// State of a vCPU in AFFINITY_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    /// Runs, or waits for an interrupt.
    On,
    /// Never started, or turned itself off.
    Off,
    /// Start was asked for and has not happened yet.
    OnPending,
}

impl Answer {
    /// The call was carried out.
    pub const SUCCESS: Self = Self(0);
    /// There is no such call.
    pub const NOT_SUPPORTED: Self = Self::error(NOT_SUPPORTED);
    /// An argument means nothing.
    pub const INVALID_PARAMETERS: Self = Self::error(INVALID_PARAMETERS);
    /// [`Call::CpuOn`] with an entry address where the VM has no memory.
    pub const INVALID_ADDRESS: Self = Self::error(INVALID_ADDRESS);
    /// [`Call::CpuOn`] for a vCPU that runs.
    pub const ALREADY_ON: Self = Self::error(smccc::psci::error::ALREADY_ON);
    /// [`Call::CpuOn`] for a vCPU that is about to run.
    pub const ON_PENDING: Self = Self::error(smccc::psci::error::ON_PENDING);

    const fn error(code: i32) -> Self {
        Self((code as i64).cast_unsigned())
    }

    /// Of [`Call::AffinityInfo`].
    pub const fn affinity_info(state: PowerState) -> Self {
        Self(match state {
            PowerState::On => 0,
            PowerState::Off => 1,
            PowerState::OnPending => 2,
        })
    }
}

/// Decodes a call by SMC or HVC with this `immediate` and X0 to X3 in `x`, in a VM with `vcpus`, on a host with these
/// `mitigations`.
#[must_use]
pub fn decode(immediate: u16, x: &[u64; 4], vcpus: u32, mitigations: Mitigations) -> Call {
    let number = lower_half(x[0]);
    // The convention is for immediate zero; others are free to mean something else, and mean nothing here.
    if immediate != 0 {
        return Call::Unknown;
    }
    let [first, second, third] = if number & SMC64 == 0 {
        [x[1], x[2], x[3]].map(|argument| lower_half(argument).into())
    } else {
        [x[1], x[2], x[3]]
    };

    match number {
        SMCCC_VERSION => answer(SMCCC_1_1),
        SMCCC_ARCH_FEATURES => match lower_half(first) {
            SMCCC_VERSION | SMCCC_ARCH_FEATURES => Call::Answer(Answer::SUCCESS),
            other => Call::Answer(mitigations.features(other)),
        },
        SMCCC_ARCH_WORKAROUND_1 | SMCCC_ARCH_WORKAROUND_3 if mitigations.features(number) == Answer::SUCCESS => {
            Call::Mitigate(number)
        }
        // There is nothing to do, and the caller expects no answer.
        SMCCC_ARCH_WORKAROUND_1 | SMCCC_ARCH_WORKAROUND_2 | SMCCC_ARCH_WORKAROUND_3
            if mitigations.features(number) != Answer::NOT_SUPPORTED =>
        {
            Call::Answer(Answer::SUCCESS)
        }
        PSCI_VERSION => answer(PSCI_1_1),
        PSCI_FEATURES => Call::Answer(features(lower_half(first))),
        PSCI_MIGRATE_INFO_TYPE => answer(NO_MIGRATION_NEEDED),
        PSCI_CPU_ON_32 | PSCI_CPU_ON_64 => match vcpu_at(first, vcpus) {
            None => Call::Answer(Answer::INVALID_PARAMETERS),
            Some(_) if second % 4 != 0 => Call::Answer(Answer::INVALID_ADDRESS),
            Some(vcpu) => Call::CpuOn { vcpu, entry: second, context: third },
        },
        PSCI_CPU_OFF => Call::CpuOff,
        PSCI_CPU_SUSPEND_32 | PSCI_CPU_SUSPEND_64 if lower_half(first) & !POWER_STATE_FIELDS != 0 => {
            Call::Answer(Answer::INVALID_PARAMETERS)
        }
        PSCI_CPU_SUSPEND_32 | PSCI_CPU_SUSPEND_64 => Call::Suspend,
        // Levels above the single CPU need not be supported since PSCI 1.0.
        PSCI_AFFINITY_INFO_32 | PSCI_AFFINITY_INFO_64 => match vcpu_at(first, vcpus) {
            Some(vcpu) if second == 0 => Call::AffinityInfo { vcpu },
            _ => Call::Answer(Answer::INVALID_PARAMETERS),
        },
        PSCI_SYSTEM_OFF => Call::SystemOff,
        PSCI_SYSTEM_RESET => Call::SystemReset,
        PSCI_SYSTEM_RESET2_32 | PSCI_SYSTEM_RESET2_64 if lower_half(first) == WARM_RESET => Call::SystemReset,
        PSCI_SYSTEM_RESET2_32 | PSCI_SYSTEM_RESET2_64 => Call::Answer(Answer::INVALID_PARAMETERS),
        _ => Call::Unknown,
    }
}

/// PSCI_FEATURES: no flags for existing functions. For CPU_SUSPEND this means the original format of its argument and
/// no OS-initiated mode.
fn features(number: u32) -> Answer {
    match number {
        SMCCC_VERSION
        | PSCI_VERSION
        | PSCI_FEATURES
        | PSCI_MIGRATE_INFO_TYPE
        | PSCI_CPU_ON_32
        | PSCI_CPU_ON_64
        | PSCI_CPU_OFF
        | PSCI_CPU_SUSPEND_32
        | PSCI_CPU_SUSPEND_64
        | PSCI_AFFINITY_INFO_32
        | PSCI_AFFINITY_INFO_64
        | PSCI_SYSTEM_OFF
        | PSCI_SYSTEM_RESET
        | PSCI_SYSTEM_RESET2_32
        | PSCI_SYSTEM_RESET2_64 => Answer::SUCCESS,
        _ => Answer::NOT_SUPPORTED,
    }
}

const fn answer(value: u64) -> Call {
    Call::Answer(Answer(value))
}

/// Bit of a function number: arguments are 64 bits wide.
const SMC64: u32 = 1 << 30;
const SMCCC_1_1: u64 = 1 << 16 | 1;
const PSCI_1_1: u64 = 1 << 16 | 1;
/// MIGRATE_INFO_TYPE: no trusted OS must be moved before a CPU powers off.
const NO_MIGRATION_NEEDED: u64 = 2;
/// CPU_SUSPEND: state id, type and level in the original format (DEN0022, 5.4.2).
const POWER_STATE_FIELDS: u32 = 0xffff | 1 << 16 | 0b11 << 24;
/// SYSTEM_RESET2: the one type that is not the vendor's.
const WARM_RESET: u32 = 0;

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn lower_half(value: u64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests;
