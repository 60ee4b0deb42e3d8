//! Ends the machine, or stops a single pCPU: calls to the firmware (PSCI, Arm DEN0022).

#![expect(unsafe_code, reason = "waiting for an interrupt")]

use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use addr::Hpa;
use mitigations::arm::{self, Firmware};
use smccc::arch::{SMCCC_ARCH_FEATURES, SMCCC_ARCH_WORKAROUND_2, SMCCC_VERSION};
use smccc::psci::{self, PSCI_FEATURES};
use smccc::{Call, Hvc, Smc};

use super::device_tree::Machine;
use crate::device::psci::Mitigations as Functions;

/// By which instruction the firmware is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Conduit {
    /// There is no firmware.
    None,
    /// SMC.
    Smc,
    /// HVC, which at EL2 only makes sense below another hypervisor.
    Hvc,
}

impl Conduit {
    /// From the property `method` of the device tree.
    pub(super) fn named(name: &str) -> Self {
        match name {
            "smc" => Self::Smc,
            "hvc" => Self::Hvc,
            _ => Self::None,
        }
    }

    /// For people.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Smc => "SMC",
            Self::Hvc => "HVC",
        }
    }
}

static CONDUIT: AtomicU8 = AtomicU8::new(0);

/// The firmware knows version 1.1 of the calling convention.
static KNOWS_CONVENTION: AtomicBool = AtomicBool::new(false);

/// Stores how this machine's firmware is called, and whether it can be asked for more than PSCI.
pub(super) fn init(machine: &Machine) {
    CONDUIT.store(machine.conduit as u8, Ordering::Relaxed);
    // Firmware without PSCI_FEATURES gives no answer with a meaning.
    let knows_convention = ask(PSCI_FEATURES, SMCCC_VERSION) == 0 && ask(SMCCC_VERSION, 0) >= 0x1_0001;
    KNOWS_CONVENTION.store(knows_convention, Ordering::Relaxed);
}

/// Whether the firmware knows version 1.1 of the calling convention, which has functions against speculation.
pub(in crate::arch::aarch64) fn knows_convention() -> bool {
    KNOWS_CONVENTION.load(Ordering::Relaxed)
}

/// The firmware's answers about its functions against speculation, on this pCPU.
pub(in crate::arch::aarch64) fn functions_against_speculation() -> Firmware {
    // The world switch calls by SMC, and so does the rest.
    if !knows_convention() || conduit() != Conduit::Smc {
        return Firmware::NONE;
    }
    Firmware(Functions::FUNCTIONS.map(|function| arm::Answer::of(ask(SMCCC_ARCH_FEATURES, function))))
}

/// Calls one of these functions that the firmware has.
pub(in crate::arch::aarch64) fn mitigate(function: u32) {
    ask(function, 0);
}

/// This pCPU's loads overtake no stores to the same address, for good.
pub(in crate::arch::aarch64) fn end_store_bypass() {
    const ON: u32 = 1;
    ask(SMCCC_ARCH_WORKAROUND_2, ON);
}

/// Calls the firmware with one argument. Its answer, which is -1 when there is no firmware.
fn ask(function: u32, argument: u32) -> i32 {
    let arguments = [argument, 0, 0, 0, 0, 0, 0];
    let [answer, ..] = match conduit() {
        Conduit::Smc => Smc::call32(function, arguments),
        Conduit::Hvc => Hvc::call32(function, arguments),
        Conduit::None => return -1,
    };
    answer.cast_signed()
}

fn conduit() -> Conduit {
    match CONDUIT.load(Ordering::Relaxed) {
        1 => Conduit::Smc,
        2 => Conduit::Hvc,
        _ => Conduit::None,
    }
}

/// Starts a pCPU at `entry`, with translation off and `context` in X0. Returns whether the firmware accepted the call.
pub(super) fn cpu_on(affinity: u64, entry: Hpa, context: u64) -> bool {
    let result = match conduit() {
        Conduit::Smc => psci::cpu_on::<Smc>(affinity, entry.0, context),
        Conduit::Hvc => psci::cpu_on::<Hvc>(affinity, entry.0, context),
        Conduit::None => return false,
    };
    result.is_ok()
}

/// Ends the machine. The firmware takes no exit code; the last line of the log gives the `code`, one of
/// [`abi::exit_code`].
pub(crate) fn exit(code: u8) -> ! {
    crate::log::last_words(abi::exit_code::last_words(code));
    // If the firmware refuses there is nothing else to try.
    let _ = match conduit() {
        Conduit::Smc => psci::system_off::<Smc>(),
        Conduit::Hvc => psci::system_off::<Hvc>(),
        Conduit::None => Ok(()),
    };
    stop_this_cpu()
}

/// Restarts the machine.
pub(crate) fn restart() -> ! {
    crate::log::flush();
    let _ = match conduit() {
        Conduit::Smc => psci::system_reset::<Smc>(),
        Conduit::Hvc => psci::system_reset::<Hvc>(),
        Conduit::None => Ok(()),
    };
    stop_this_cpu()
}

/// Stops with one of [`abi::exit_code`]. This machine has no screen to keep.
pub(crate) fn end_check(code: u8) -> ! {
    exit(code)
}

/// Stops this pCPU until the machine is reset.
pub(crate) fn stop_this_cpu() -> ! {
    loop {
        // SAFETY: waits; interrupts stay masked.
        unsafe { asm!("msr daifset, #0xf", "wfi", options(nomem, nostack)) };
    }
}
