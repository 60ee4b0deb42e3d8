//! A VM's share of the pCPUs: its weight, its cap, and the pCPUs that it may use.
//!
//! Where pCPUs are short, VMs get time in proportion to their weights, however many vCPUs they have. For this each VM
//! has a [`VirtualTime`] of its own: the ticks that all of its vCPUs have run, divided by its weight. The VM with the
//! least goes first.
//!
//! A cap is a number of ticks in each period. A VM that has used them up waits for the next period, even if pCPUs are
//! idle. What it takes beyond, because several of its vCPUs run at once, is a debt that the next periods pay. What it
//! leaves is lost.
//!
//! A parent and its children are a *group* with one share, so a parent gets no more by creating more children. Within
//! the group each member has the same weight.
//!
//! Whoever runs a vCPU charges what it ran, from time to time, not at each exit: all pCPUs write these words.

use alloc::sync::Arc;

use crate::sync::{AtomicU64, Ordering};
use crate::{CpuId, VirtualTime, WAKE_CREDIT};

/// A set of pCPUs with numbers below 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSet(pub u64);

impl CpuSet {
    /// All of them.
    pub const ALL: Self = Self(u64::MAX);
    /// None of them.
    pub const NONE: Self = Self(0);

    /// Whether it contains `cpu`.
    #[must_use]
    pub const fn contains(self, cpu: CpuId) -> bool {
        cpu.0 < u64::BITS && self.0 & 1 << cpu.0 != 0
    }

    /// With this one, which has a number below 64.
    #[must_use]
    pub const fn with(self, cpu: CpuId) -> Self {
        Self(self.0 | 1 << (cpu.0 % u64::BITS))
    }

    /// Without this one.
    #[must_use]
    pub const fn without(self, cpu: CpuId) -> Self {
        Self(self.0 & !(1 << (cpu.0 % u64::BITS)))
    }

    /// Those that the other has too.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The one with the lowest number.
    #[must_use]
    pub fn first(self) -> Option<CpuId> {
        (!self.is_empty()).then(|| CpuId(self.0.trailing_zeros()))
    }

    /// All, by number.
    pub fn iter(self) -> impl Iterator<Item = CpuId> {
        let mut left = self;
        core::iter::from_fn(move || {
            let first = left.first()?;
            left = left.without(first);
            Some(first)
        })
    }
}

/// Ticks that a VM may run in each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap {
    /// How many, of all vCPUs together: as many as the period has are one whole pCPU.
    pub ticks: u64,
    /// Length of a period in ticks.
    pub period: u64,
    /// When the first period began, in ticks.
    pub since: u64,
}

impl Cap {
    /// The number of the period of `now`, from 0 on.
    fn number(&self, now: u64) -> u64 {
        now.saturating_sub(self.since) / self.period
    }
}

/// The share of a VM. It has its cache lines to itself: processors fetch two of 64 bytes at once.
#[derive(Debug)]
#[repr(align(128))]
pub struct Share {
    weight: u32,
    cap: Option<Cap>,
    cpus: CpuSet,
    time: AtomicU64,
    /// The highest virtual time of its members, if it is a group.
    lead: AtomicU64,
    group: Option<Arc<Share>>,
    /// If there is a cap: the period in the upper half, what is left of it in [`UNIT`]s in the lower half, signed.
    budget: AtomicU64,
}

/// How far a member may lag behind others of its group without losing what it did not use, in virtual ticks.
const MEMBER_LAG: VirtualTime = 10 * WAKE_CREDIT;
/// Ticks in a unit of a cap's account. A debt fits into 31 bits of them: some minutes.
const UNIT: u64 = 256;

impl Share {
    /// The weight of a VM that names none, as in Linux' control groups.
    pub const DEFAULT_WEIGHT: u32 = 100;
    /// The greatest weight. The least is 1.
    pub const MAX_WEIGHT: u32 = 10_000;

    /// A share that has used nothing yet.
    #[must_use]
    pub fn new(weight: u32, cap: Option<Cap>, cpus: CpuSet) -> Self {
        Self {
            weight: weight.clamp(1, Self::MAX_WEIGHT),
            cap: cap.map(|cap| Cap { ticks: cap.ticks.max(UNIT), period: cap.period.max(UNIT), ..cap }),
            cpus,
            time: AtomicU64::new(0),
            lead: AtomicU64::new(0),
            group: None,
            // Nothing of the period before the first: the first gives all.
            budget: AtomicU64::new(pack(u32::MAX, 0)),
        }
    }

    /// The share of one more member of `group`.
    #[must_use]
    pub fn member_of(group: Arc<Self>) -> Self {
        let time = AtomicU64::new(group.lead.load(Ordering::Relaxed));
        Self { time, cpus: group.cpus, group: Some(group), ..Self::default() }
    }

    /// The group that it is a member of.
    #[must_use]
    pub fn group(&self) -> Option<&Arc<Self>> {
        self.group.as_ref()
    }

    /// The share that competes with those of others: the group's, if it is a member of one.
    #[must_use]
    #[inline]
    pub fn whole(&self) -> &Self {
        self.group.as_deref().unwrap_or(self)
    }

    /// The virtual time of the VM, or of the group.
    #[must_use]
    #[inline]
    pub fn time(&self) -> VirtualTime {
        self.time.load(Ordering::Relaxed)
    }

    /// The pCPUs that its vCPUs may run on.
    #[must_use]
    #[inline]
    pub fn cpus(&self) -> CpuSet {
        self.cpus
    }

    /// Whether it has a cap.
    #[must_use]
    #[inline]
    pub fn is_capped(&self) -> bool {
        self.whole().cap.is_some()
    }

    /// `ticks` of running, as its own virtual time.
    fn weighed(&self, ticks: u64) -> VirtualTime {
        ticks.saturating_mul(u64::from(Self::DEFAULT_WEIGHT)) / u64::from(self.weight)
    }

    /// Virtual time `time` of the whole in ticks of running.
    #[must_use]
    pub fn ticks(&self, time: VirtualTime) -> u64 {
        time.saturating_mul(u64::from(self.whole().weight)) / u64::from(Self::DEFAULT_WEIGHT)
    }

    /// vCPUs of the VM have run for `ticks` by `now`.
    pub fn charge(&self, ticks: u64, now: u64) {
        if let Some(group) = &self.group {
            group.charge(ticks, now);
        }
        self.time.fetch_add(self.weighed(ticks), Ordering::Relaxed);
        if self.cap.is_some() {
            let units = i32::try_from((ticks + UNIT / 2) / UNIT).unwrap_or(i32::MAX);
            self.change_budget(now, |left| left.saturating_sub(units));
        }
    }

    /// The host has worked for the VM for `ticks`: as [`Self::charge`], but a cap is for what vCPUs run.
    pub fn charge_for_work(&self, ticks: u64) {
        if let Some(group) = &self.group {
            group.charge_for_work(ticks);
        }
        self.time.fetch_add(self.weighed(ticks), Ordering::Relaxed);
    }

    /// Raises the virtual time of the whole to `least`, if it is below: what was not used before is lost.
    pub fn lift(&self, least: VirtualTime) {
        raise(&self.whole().time, least);
        self.lift_in_group();
    }

    /// The same for a member that lags behind others of its group.
    fn lift_in_group(&self) {
        if let Some(group) = &self.group {
            let lead = group.lead.load(Ordering::Relaxed);
            raise(&self.time, lead.saturating_sub(MEMBER_LAG));
            raise(&group.lead, self.time());
        }
    }

    /// How many ticks the VM may run in the period of `now`: 0 if it has to wait for another one.
    #[must_use]
    #[inline]
    pub fn left(&self, now: u64) -> u64 {
        let whole = self.whole();
        if whole.cap.is_none() { u64::MAX } else { whole.change_budget(now, |left| left) }
    }

    /// When the period after that of `now` begins.
    #[must_use]
    pub fn next_period(&self, now: u64) -> u64 {
        self.whole().cap.map_or(now, |cap| {
            let next = cap.number(now).saturating_add(1);
            cap.since.saturating_add(next.saturating_mul(cap.period))
        })
    }

    /// Gives the budget of the periods that have begun, then changes what is left. Returns the new number of ticks.
    fn change_budget(&self, now: u64, change: impl Fn(i32) -> i32) -> u64 {
        let Some(cap) = self.cap else { return u64::MAX };
        let whole = i32::try_from(cap.ticks / UNIT).unwrap_or(i32::MAX);
        let current = low_half(cap.number(now));
        let mut old = self.budget.load(Ordering::Relaxed);
        loop {
            let (last, left) = unpack(old);
            // A clock of another pCPU that is a little behind gives nothing.
            let begun = current.wrapping_sub(last).cast_signed().max(0);
            let given = left.saturating_add(whole.saturating_mul(begun));
            let left = change(if begun == 0 { left } else { given.min(whole) });
            let new = pack(if begun == 0 { last } else { current }, left);
            match self.budget.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return u64::try_from(left).unwrap_or(0) * UNIT,
                Err(now) => old = now,
            }
        }
    }
}

impl Default for Share {
    fn default() -> Self {
        Self::new(Self::DEFAULT_WEIGHT, None, CpuSet::ALL)
    }
}

fn raise(time: &AtomicU64, least: VirtualTime) {
    if time.load(Ordering::Relaxed) < least {
        time.fetch_max(least, Ordering::Relaxed);
    }
}

fn pack(period: u32, left: i32) -> u64 {
    u64::from(period) << 32 | u64::from(left.cast_unsigned())
}

fn unpack(budget: u64) -> (u32, i32) {
    (low_half(budget >> 32), low_half(budget).cast_signed())
}

fn low_half(value: u64) -> u32 {
    (value & 0xffff_ffff) as u32
}
