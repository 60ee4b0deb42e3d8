//! Differences between AMD's and Intel's processors that matter for emulation.

/// Whose rules a processor follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD's manual (APM), and the behaviour of AMD's processors where it says nothing.
    Amd,
    /// Intel's manual (SDM).
    Intel,
}

impl Vendor {
    /// Whether 64-bit mode raises #GP(0) for an access through FS or GS whose *effective* address is not canonical for
    /// all bytes of the operand, although the linear address (base + effective address) is.
    ///
    /// Intel's processors check the linear address only (SDM vol. 1, 3.3.7.1: the linear-memory reference). AMD's
    /// manual requires canonical virtual-address references through FS and GS (APM vol. 2, 4.5.3) for all their bytes
    /// (5.3.1). It does not say whether before or after the base is added. AMD's processors check both: seen on family
    /// 19h, Zen 3 (model 01h) and Zen 4.
    #[must_use]
    pub const fn checks_effective_address(self) -> bool {
        matches!(self, Self::Amd)
    }
}
