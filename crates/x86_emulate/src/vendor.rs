//! Where AMD's and Intel's processors differ in what this crate emulates.

/// Whose rules a processor follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD's manual (APM), and what its processors do where that says nothing.
    Amd,
    /// Intel's manual (SDM).
    Intel,
}

impl Vendor {
    /// Whether #GP(0) is raised in 64-bit mode for an access through FS or GS whose *effective* address is not canonical
    /// for all bytes of the operand, although base + effective address, the linear address, is.
    ///
    /// Intel's processors check the linear address only (SDM vol. 1, 3.3.7.1: the linear-memory reference). AMD's manual
    /// wants virtual-address references through FS and GS canonical (APM vol. 2, 4.5.3) with all their bytes (5.3.1), and
    /// does not say whether before or after the base is added. AMD's processors check both: seen on family 19h, Zen 3
    /// (model 01h) and Zen 4.
    #[must_use]
    pub const fn checks_effective_address(self) -> bool {
        matches!(self, Self::Amd)
    }
}
