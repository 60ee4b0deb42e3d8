//! Machine checks: decodes the banks, and decides who may continue (APM vol. 2, chapter 9).
//!
//! A processor has banks of registers in which its parts record errors. Corrected errors are only recorded. An
//! uncorrected error raises #MC, and software decides what is lost: nothing, the interrupted program, or the machine.
//! [`verdict`] makes this decision from the banks alone.

use core::fmt;

/// MCi_STATUS of one bank (APM vol. 2, 9.3.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status(pub u64);

impl Status {
    /// The bank holds an error.
    pub const VAL: u64 = 1 << 63;
    /// Another error came while the bank was in use.
    pub const OVER: u64 = 1 << 62;
    /// The error was not corrected.
    pub const UC: u64 = 1 << 61;
    /// The bank is enabled to report such errors.
    pub const EN: u64 = 1 << 60;
    /// MCi_MISC is valid.
    pub const MISCV: u64 = 1 << 59;
    /// MCi_ADDR is valid.
    pub const ADDRV: u64 = 1 << 58;
    /// The processor's state is corrupt.
    pub const PCC: u64 = 1 << 57;
    /// The running program's state is corrupt.
    pub const TCC: u64 = 1 << 55;
    /// Bad data was found and marked; nothing has used it yet.
    pub const DEFERRED: u64 = 1 << 44;
    /// Data that was marked as bad before was used.
    pub const POISON: u64 = 1 << 43;

    /// Whether these bits are set.
    #[must_use]
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Whether the bank holds an error at all.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.has(Self::VAL)
    }

    /// Whether software must handle the error now.
    #[must_use]
    pub const fn is_uncorrected(self) -> bool {
        self.has(Self::VAL | Self::UC) && !self.has(Self::DEFERRED)
    }

    /// The kind of error (APM vol. 2, 9.3.2.3, MCA error codes).
    #[must_use]
    pub const fn code(self) -> Code {
        Code((self.0 & 0xffff) as u16)
    }
}

/// MCG_STATUS (APM vol. 2, 9.3.1.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalStatus(pub u64);

impl GlobalStatus {
    /// The interrupted code can continue at the saved address.
    pub const RIPV: u64 = 1 << 0;
    /// The saved address is related to the error.
    pub const EIPV: u64 = 1 << 1;
    /// A machine check is being handled. Another one now is a shutdown.
    pub const MCIP: u64 = 1 << 2;

    /// Whether these bits are set.
    #[must_use]
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }
}

/// What ran at the machine check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupted {
    /// A guest.
    Guest,
    /// The hypervisor.
    Host,
}

/// Who may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Guest and host continue. The error is logged.
    GoesOn,
    /// Everything continues except the VM whose guest was interrupted.
    EndsVm,
    /// Nothing continues, for this reason.
    EndsHost(&'static str),
}

/// Decides what the errors in these banks mean for the code that #MC `interrupted` (APM vol. 2, 9.3.1.2 and 9.3.2.3).
///
/// `overflow_recovers` is CPUID 8000_0007 EBX\[0\]: an error that was lost because its bank was in use was no worse
/// than the error in the bank.
///
/// Ending a VM removes only the effects of its guest. An error in the hypervisor's own accesses has hit data of an
/// unknown owner. So it ends the host even if the interrupted code could continue.
#[must_use]
pub fn verdict(
    global: GlobalStatus,
    banks: impl IntoIterator<Item = Status>,
    interrupted: Interrupted,
    overflow_recovers: bool,
) -> Verdict {
    let mut is_any = false;
    for status in banks.into_iter().filter(|status| status.is_uncorrected()) {
        is_any = true;
        if status.has(Status::PCC) {
            return Verdict::EndsHost("the state of the processor is corrupt");
        }
        if status.has(Status::OVER) && !overflow_recovers {
            return Verdict::EndsHost("another error was lost");
        }
    }
    if !is_any {
        return Verdict::EndsHost("no bank says what was wrong");
    }
    if interrupted == Interrupted::Host {
        return Verdict::EndsHost("the hypervisor was interrupted");
    }
    if !global.has(GlobalStatus::RIPV) {
        return Verdict::EndsHost("where it was interrupted is not known");
    }
    Verdict::EndsVm
}

/// Whether a guest's shutdown was a machine check without CR4.MCE: the processor then shuts down instead of raising
/// #MC, and leaves the error in its bank (APM vol. 2, 8.2.17).
#[must_use]
pub fn explains_shutdown(banks: impl IntoIterator<Item = Status>) -> bool {
    banks.into_iter().any(Status::is_uncorrected)
}

/// Content of one bank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The bank's number.
    pub bank: u8,
    /// MCi_STATUS.
    pub status: Status,
    /// MCi_ADDR.
    pub address: u64,
    /// MCi_MISC.
    pub misc: u64,
    /// For scalable banks: the part of the machine that the bank belongs to, and the error's syndrome.
    pub scalable: Option<(u64, u64)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bank, status, address, misc, scalable } = *self;
        let severity = if status.has(Status::DEFERRED) {
            "deferred error"
        } else if status.has(Status::UC) {
            "uncorrected error"
        } else {
            "corrected error"
        };
        write!(f, "bank {bank}: {severity}, {}", status.code())?;
        if status.has(Status::ADDRV) {
            write!(f, ", at {address:#x}")?;
        }
        for (bit, words) in [
            (Status::PCC, "processor state corrupt"),
            (Status::TCC, "program state corrupt"),
            (Status::POISON, "bad data used"),
            (Status::OVER, "others lost"),
        ] {
            if status.has(bit) {
                write!(f, ", {words}")?;
            }
        }
        write!(f, " (status {:#x}", status.0)?;
        if status.has(Status::MISCV) {
            write!(f, ", misc {misc:#x}")?;
        }
        if let Some((identity, syndrome)) = scalable {
            write!(f, ", ipid {identity:#x}, syndrome {syndrome:#x}")?;
        }
        f.write_str(")")
    }
}

/// An MCA error code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Code(pub u16);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LEVELS: [&str; 4] = ["core", "level 1", "level 2", "generic"];
        const TRANSACTIONS: [&str; 4] = ["instruction", "data", "generic", "reserved"];
        const ACCESSES: [&str; 9] = [
            "generic",
            "generic read",
            "generic write",
            "data read",
            "data write",
            "instruction fetch",
            "prefetch",
            "evict",
            "snoop",
        ];
        let Self(code) = *self;
        let field = |shift: u32, bits: u32| usize::from(code >> shift & ((1 << bits) - 1));
        let (level, transaction) = (LEVELS[field(0, 2)], TRANSACTIONS[field(2, 2)]);
        let access = ACCESSES.get(field(4, 4)).copied().unwrap_or("reserved");
        match code {
            0x0010..=0x001f => write!(f, "TLB error ({transaction}, {level})"),
            0x0100..=0x01ff => write!(f, "cache error ({access}, {transaction}, {level})"),
            0x0400..=0x07ff => f.write_str("internal error"),
            0x0800..=0x0fff => {
                let about = ["memory", "reserved", "I/O", "generic"][field(2, 2)];
                let time_out = if field(8, 1) != 0 { ", timed out" } else { "" };
                write!(f, "bus error ({access}, {about}, {level}{time_out})")
            }
            _ => write!(f, "error code {code:#x}"),
        }
    }
}

#[cfg(test)]
mod tests;
