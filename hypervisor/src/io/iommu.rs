//! VMs that own PCI functions, and what IOMMUs report about functions.
//!
//! An IOMMU keeps translations, like a processor's TLB, but it never asks again: it has no vCPU that enters and could
//! flush first. So a change of stage 2 that takes a right away flushes the IOMMUs too, before it returns
//! ([`AllTlbs`](crate::vm::address_space::AllTlbs)). Only then may a page get another owner.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::{self, Display};

use abi::payload::PciFunction;
use addr::Hpa;
use stage2::Stale;

use crate::arch::{Arch, Machine};
use crate::mutants::{self, Mutant};
use crate::sync::{Mutex, per_host};

per_host! {
    /// Domains in use: a bit for each, from [`Domain::FIRST`] on.
    static DOMAINS: Mutex<u128> = Mutex::new(0);
    static REPORTS: Mutex<Reports> = Mutex::new(Reports::new());
}

/// A PCI function of segment 0, as it names itself in a request (PCI Express 2.2.6.2): bus (bits 15:8), device (7:3)
/// and function (2:0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequesterId(pub(crate) u16);

impl From<PciFunction> for RequesterId {
    fn from(from: PciFunction) -> Self {
        Self(from.index())
    }
}

impl Display for RequesterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{:02x}.{}", self.0 >> 8, self.0 >> 3 & 31, self.0 & 7)
    }
}

/// Functions with one owner.
#[derive(Clone, Debug)]
pub(crate) enum Functions {
    /// These.
    These(Vec<RequesterId>),
    /// All that the hypervisor does not use itself.
    All,
}

impl Functions {
    /// Whether `function` is one of them, unless the hypervisor uses it.
    #[allow(dead_code, reason = "not every machine has an IOMMU")]
    pub(crate) fn contains(&self, function: RequesterId) -> bool {
        match self {
            Self::These(functions) => functions.contains(&function),
            Self::All => true,
        }
    }
}

/// The number under which an IOMMU keeps the translations of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Domain(pub(crate) u16);

impl Domain {
    /// That of the hypervisor's own functions. Those that nobody owns have 0.
    #[allow(dead_code, reason = "not every machine has an IOMMU")]
    pub(crate) const OWN: Self = Self(1);
    /// The first one for VMs.
    pub(crate) const FIRST: Self = Self(2);
}

/// Whether functions are kept to what their owners may reach.
#[derive(Clone, Debug)]
pub(crate) enum Guard {
    /// They are: by these IOMMUs.
    #[allow(dead_code, reason = "not every architecture has an IOMMU")]
    On(String),
    /// They are not, for this reason.
    Off(String),
}

/// The functions that a VM owns. Dropping it takes them back: afterwards they reach nothing.
#[derive(Debug)]
pub(crate) struct Devices {
    functions: Functions,
    domain: Domain,
    /// What else belongs to single functions.
    given: Option<<Machine as Arch>::Given>,
}

/// Why a VM does not own functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotOwned {
    /// 128 VMs own some already.
    NoDomain,
}

impl Display for NotOwned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDomain => f.write_str("128 VMs own devices already, which is the most"),
        }
    }
}

impl Devices {
    /// From now on the functions reach what the stage-2 tables at `root` map, if an IOMMU guards the machine. All
    /// memory is mapped already, because a device does not fault and try again.
    ///
    /// # Errors
    /// Too many VMs own functions.
    pub(crate) fn own(
        functions: Functions,
        given: Option<<Machine as Arch>::Given>,
        root: Hpa,
    ) -> Result<Self, NotOwned> {
        let domain = {
            let mut used = DOMAINS.lock();
            let free = used.trailing_ones();
            *used |= 1u128.checked_shl(free).ok_or(NotOwned::NoDomain)?;
            Domain(Domain::FIRST.0 + u16::try_from(free).unwrap_or(0))
        };
        Machine::grant(&functions, domain, root);
        Ok(Self { functions, domain, given })
    }

    /// What else belongs to single functions.
    #[allow(dead_code, reason = "not on every architecture has a VM functions")]
    pub(crate) fn given(&self) -> Option<&<Machine as Arch>::Given> {
        self.given.as_ref()
    }

    /// Flushes what IOMMUs keep of the owner's translations. On return no device uses a stale one.
    pub(crate) fn flush(&self, stale: Stale) {
        Machine::flush_devices(self.domain, stale);
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        // They are silent before they are blocked: what is blocked would be reported.
        self.given = None;
        if !mutants::is(Mutant::DevicesKept) {
            Machine::revoke(&self.functions, self.domain);
        }
        *DOMAINS.lock() &= !(1 << (self.domain.0 - Domain::FIRST.0));
    }
}

/// Checks whether devices are guarded, if they must be.
///
/// # Errors
/// They are not: why, and what would help.
pub(crate) fn check(is_required: bool) -> Result<(), String> {
    match Machine::guard() {
        Guard::On(by) => log::info!("devices reach only memory of their owners: {by}"),
        Guard::Off(why) if is_required => {
            return Err(format!(
                "require_iommu is set, and no IOMMU guards this machine: {why}. Turn it on in the firmware's settings \
                 (\"IOMMU\", \"AMD-Vi\" or \"VT-d\"), or leave require_iommu out"
            ));
        }
        Guard::Off(_) => {}
    }
    Ok(())
}

/// Warns of a VM that owns devices, if no IOMMU guards them.
pub(crate) fn warn_of_owner(name: &str) {
    if let Guard::Off(why) = Machine::guard() {
        log::warn!("{name} owns devices, and they can write to Dunlin's memory: no IOMMU guards this machine: {why}");
    }
}

/// Logs what IOMMUs have reported. The pCPU that keeps house calls this again and again.
pub(crate) fn report() {
    let now = Machine::nanos();
    let mut reports = REPORTS.lock();
    if !reports.is_due(now) {
        return;
    }
    Machine::take_events(&mut |function, what| reports.add(function, what));
}

/// Reports are taken at most this often: every 10 ms.
const INTERVAL_NANOS: u64 = 10_000_000;
/// Lines in the log in each second, and one for each function. A device can cause events as fast as it can write.
const LINES: usize = 4;
const SECOND_NANOS: u64 = 1_000_000_000;

/// Limits the log's lines about events.
struct Reports {
    /// When to look for events again.
    next: u64,
    /// When the second ends that runs, the functions that have a line in it, and the number of events without one.
    ends: u64,
    told: [Option<RequesterId>; LINES],
    silent: u64,
}

impl Reports {
    const fn new() -> Self {
        Self { next: 0, ends: 0, told: [None; LINES], silent: 0 }
    }

    /// Whether it is time to look for events.
    fn is_due(&mut self, now: u64) -> bool {
        if now < self.next {
            return false;
        }
        self.next = now + INTERVAL_NANOS;
        if now >= self.ends {
            if self.silent != 0 {
                log::warn!("IOMMU: {} more events", self.silent);
            }
            *self = Self { ends: now + SECOND_NANOS, next: self.next, ..Self::new() };
        }
        true
    }

    /// Logs the event, or counts it.
    fn add(&mut self, function: RequesterId, what: &dyn Display) {
        if self.has_room_for(function) {
            log::warn!("IOMMU: {what}");
        } else {
            self.silent += 1;
        }
    }

    /// Whether an event of the function gets a line in this second.
    fn has_room_for(&mut self, function: RequesterId) -> bool {
        let is_told = self.told.contains(&Some(function));
        let free = self.told.iter_mut().find(|told| told.is_none());
        !is_told && free.map(|told| *told = Some(function)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::{Reports, RequesterId, SECOND_NANOS};

    #[test]
    fn function_gets_one_line_in_a_second_and_few_functions_do() {
        let mut reports = Reports::new();
        assert!(reports.is_due(1));
        assert!(!reports.is_due(2), "the log is looked at a hundred times in a second");
        let lines =
            |reports: &mut Reports| (0..100).filter(|number| reports.has_room_for(RequesterId(number % 10))).count();
        assert_eq!(lines(&mut reports), 4);
        assert!(reports.is_due(SECOND_NANOS / 2));
        assert_eq!(lines(&mut reports), 0);
        assert!(reports.is_due(SECOND_NANOS + 1));
        assert_eq!(lines(&mut reports), 4);
    }
}
