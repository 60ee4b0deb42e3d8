//! A device and its interrupt line.
//!
//! Several pCPUs may use one device at the same time, and each use may change its interrupt line. The interrupt
//! controller gets a change before another pCPU uses the device. Otherwise two changes could arrive in the wrong order,
//! and the controller would wait for ever for an edge that is over.

#[cfg(test)]
mod tests;

use crate::sync::Mutex;

/// A device that may ask for service.
pub trait Interrupts {
    /// Whether its interrupt line is asserted now.
    fn interrupt(&self) -> bool;
}

/// A device that is used by several pCPUs, one at a time.
pub struct Wired<D>(Mutex<State<D>>);

struct State<D> {
    device: D,
    /// The line as the interrupt controller last heard of it.
    asserted: bool,
}

impl<D: Interrupts> Wired<D> {
    /// A device whose line is not asserted.
    pub fn new(device: D) -> Self {
        Self(Mutex::new(State { device, asserted: false }))
    }

    /// The device, and the line as the interrupt controller last heard of it.
    pub fn look<R>(&self, look: impl FnOnce(&D, bool) -> R) -> R {
        let state = self.0.lock();
        look(&state.device, state.asserted)
    }

    /// From now on the interrupt controller has last heard this of the line, because its state was replaced.
    pub fn set_heard(&self, asserted: bool) {
        self.0.lock().asserted = asserted;
    }

    /// Uses the device. If this changes its line, calls `tell` with the new level; changes are reported one at a time,
    /// in order.
    #[inline]
    pub fn with<R>(&self, access: impl FnOnce(&mut D) -> R, tell: impl FnOnce(bool)) -> R {
        let state = &mut *self.0.lock();
        let result = access(&mut state.device);
        let asserted = state.device.interrupt();
        if core::mem::replace(&mut state.asserted, asserted) != asserted {
            tell(asserted);
        }
        result
    }
}
