//! Whether a vCPU executes instructions, and whether the loop takes its slow path before each entry.

/// A vCPU's activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Executes instructions.
    Active,
    /// The same, but traced: the loop's slow path runs before each entry.
    Traced,
    /// Waits for an interrupt, after HLT or WFI.
    Halted,
    /// Is off until another vCPU starts it.
    Off,
}

impl Activity {
    /// Whether the vCPU executes instructions and is not traced: the loop may skip its slow path before an entry.
    #[inline]
    pub(crate) fn is_active(self) -> bool {
        self == Self::Active
    }

    /// Whether the vCPU executes instructions.
    #[inline]
    pub(crate) fn is_awake(self) -> bool {
        matches!(self, Self::Active | Self::Traced)
    }

    /// Turns the slow path before each entry on or off, for a trace.
    #[inline]
    pub(crate) fn set_traced(&mut self, is_traced: bool) {
        if self.is_awake() {
            *self = if is_traced { Self::Traced } else { Self::Active };
        }
    }
}
