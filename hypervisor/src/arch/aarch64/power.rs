//! Ends of the machine, and of a single pCPU: calls to the firmware (PSCI, Arm DEN0022).

#![expect(unsafe_code, reason = "waiting for an interrupt")]

use core::arch::asm;
use core::sync::atomic::{AtomicU8, Ordering};

use addr::Hpa;
use smccc::psci;
use smccc::{Hvc, Smc};

use super::device_tree::Machine;

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

/// Remembers how this machine is turned off.
pub(super) fn init(machine: &Machine) {
    CONDUIT.store(machine.conduit as u8, Ordering::Relaxed);
}

fn conduit() -> Conduit {
    match CONDUIT.load(Ordering::Relaxed) {
        1 => Conduit::Smc,
        2 => Conduit::Hvc,
        _ => Conduit::None,
    }
}

/// Starts a pCPU at `entry`, with translation off and `context` in X0. Says whether the firmware took it.
pub(super) fn cpu_on(affinity: u64, entry: Hpa, context: u64) -> bool {
    let result = match conduit() {
        Conduit::Smc => psci::cpu_on::<Smc>(affinity, entry.0, context),
        Conduit::Hvc => psci::cpu_on::<Hvc>(affinity, entry.0, context),
        Conduit::None => return false,
    };
    result.is_ok()
}

/// Ends the machine. A machine has no place for the `code`, one of [`abi::exit_code`]: what happened is said on the
/// control port and in the log.
pub(crate) fn exit(_code: u8) -> ! {
    // When the firmware refuses there is nothing else to try.
    let _ = match conduit() {
        Conduit::Smc => psci::system_off::<Smc>(),
        Conduit::Hvc => psci::system_off::<Hvc>(),
        Conduit::None => Ok(()),
    };
    stop_this_cpu()
}

/// Stops this pCPU until the machine is reset.
pub(crate) fn stop_this_cpu() -> ! {
    loop {
        // SAFETY: waits; interrupts stay masked.
        unsafe { asm!("msr daifset, #0xf", "wfi", options(nomem, nostack)) };
    }
}
