//! One child.

use alloc::vec::Vec;
use core::ops::Range;

use addr::Gpa;
use hyperv_defs::interrupt::{ConnectPort, Doorbell};
use hyperv_defs::memory::{GpaAccess, MapPages, Mapping, UnmapPages, number_of_page};
use hyperv_defs::partition::{CreatePartition, SetProperty};
use hyperv_defs::property::{ProcessorFeatures, Property, SyntheticFeatures, Write, XsaveFeatures};
use hyperv_defs::vp::{MapStatePage, StatsObject, StatsPage, UnmapStatePage};
use hyperv_defs::{PartitionId, Status};

use crate::deposits::{Deposits, Store, Use};
use crate::gpa_map::{Entry, GpaMap, Leaf, Old, PAGE_LIMIT};
use crate::ledger::Ledger;
use crate::limits;
use crate::parent::{Host, Value};
use crate::vp::Vp;
use crate::written::Written;

/// Where a child is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has properties and deposits only.
    Created,
    /// It has memory and VPs.
    Initialized,
    /// It will never run again, and is being emptied.
    Finalizing,
    /// It is empty except for its deposits.
    Finalized,
}

/// Whether work that is done in parts has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// It has.
    Done,
    /// The caller must call again.
    More,
}

/// The effect of a property's change outside of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Change {
    /// Nothing.
    Nothing,
    /// The child's time stops or continues.
    TimeFreeze(bool),
    /// The child's time is set, in units of 100 ns.
    ReferenceTime(u64),
    /// Accesses to its pages are tracked, or not any more.
    Tracking(bool),
    /// MSRs that do not exist read as zero, or raise #GP.
    IgnoreUnknownMsrs(bool),
}

/// What a child's VPs have.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    /// Of the processor.
    pub processor: ProcessorFeatures,
    /// Forms and components of XSAVE.
    pub xsave: XsaveFeatures,
    /// Of the interface.
    pub synthetic: SyntheticFeatures,
}

/// Pages that are changed before it is looked whether there is time for more.
const RUN: usize = 16;

/// Pages that a change of the map has removed. Pass it to [`Partition::settle`] after the flush.
#[derive(Debug, Default)]
#[must_use = "pages that nobody releases are never the parent's again"]
pub struct Released {
    old: Vec<Old>,
    /// Elements that were changed.
    pub done: u16,
    /// Pages of the child whose mapping has changed: stage 2 must drop them.
    pub changed: Range<u64>,
}

impl Released {
    /// Whether a page that was mapped is not any more, so that stage 2 must change and TLBs must be flushed.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        !self.old.is_empty()
    }
}

/// A child.
#[derive(Debug)]
pub struct Partition {
    /// Its id, which no other partition of this host ever has.
    pub id: PartitionId,
    /// As it was created.
    pub created: CreatePartition,
    /// The pages that its parent has given for it.
    pub deposits: Deposits,
    state: State,
    map: GpaMap,
    written: Written,
    properties: Properties,
    /// Ascending.
    vps: Vec<(u32, Vp)>,
    /// In ascending order of their addresses.
    doorbells: Vec<ConnectPort>,
    stats: [Option<u64>; 2],
}

#[derive(Debug, Default)]
struct Properties {
    privileges: u64,
    synthetic_features: u64,
    is_frozen: bool,
    processors_per_socket: u64,
    is_tracking: bool,
    unimplemented_msr_action: u64,
    physical_address_width: Option<u64>,
}

impl Partition {
    pub(crate) fn new(id: PartitionId, created: CreatePartition) -> Self {
        Self {
            id,
            created,
            deposits: Deposits::default(),
            state: State::Created,
            map: GpaMap::default(),
            written: Written::default(),
            properties: Properties::default(),
            vps: Vec::new(),
            doorbells: Vec::new(),
            stats: [None; 2],
        }
    }

    /// Where it is in its life.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// HvCallInitializePartition.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionState`] if it is not new, [`Status::InsufficientMemory`].
    pub fn initialize(&mut self, store: &mut impl Store) -> Result<(), Status> {
        self.must_be(State::Created)?;
        self.map.prepare(&mut self.deposits, store)?;
        self.state = State::Initialized;
        Ok(())
    }

    /// The first part of HvCallFinalizePartition: from here on, no VP may run. The caller stops them, and flushes all
    /// TLBs, before it [empties](Self::empty) the partition. Returns whether this has begun now.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionState`] if that was done already.
    pub fn finalize(&mut self) -> Result<bool, Status> {
        match self.state {
            State::Created | State::Initialized => {
                self.state = State::Finalizing;
                self.doorbells = Vec::new();
                Ok(true)
            }
            State::Finalizing => Ok(false),
            State::Finalized => Err(Status::InvalidPartitionState),
        }
    }

    /// The second part, as often as needed: releases all that the partition has but its deposits, a part at a time.
    pub fn empty(&mut self, ledger: &Ledger, store: &mut impl Store) -> Progress {
        if self.state != State::Finalizing {
            return Progress::Done;
        }
        if let Some((_, vp)) = self.vps.pop() {
            self.free_vp(vp, ledger, store);
            return Progress::More;
        }
        if !self.map.take_down(ledger, &mut self.deposits, store) {
            return Progress::More;
        }
        if !self.written.take_down(&mut self.deposits, store) {
            return Progress::More;
        }
        for page in self.stats.iter_mut().filter_map(Option::take) {
            ledger.release(page);
        }
        self.state = State::Finalized;
        Progress::Done
    }

    /// Whether HvCallDeletePartition may remove it now.
    pub(crate) fn check_delete(&self) -> Result<(), Status> {
        match self.state {
            State::Created | State::Finalized => Ok(()),
            State::Initialized | State::Finalizing => Err(Status::InvalidPartitionState),
        }
    }

    /// HvCallWithdrawMemory, one page. `None`: there is no free one any more.
    pub fn withdraw(&mut self, ledger: &Ledger, store: &mut impl Store) -> Option<u64> {
        let page = self.deposits.withdraw(store)?;
        ledger.withdraw(page);
        Some(page)
    }

    /// HvCallSetPartitionProperty.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionState`] if it is too late for this property.
    pub fn set_property(&mut self, write: &SetProperty) -> Result<Change, Status> {
        let SetProperty { property, value, .. } = *write;
        match (property.write(), self.state) {
            (Write::Never, _) => return Err(Status::OperationDenied),
            (Write::Early | Write::Always, State::Created) | (Write::Always, State::Initialized) => {}
            _ => return Err(Status::InvalidPartitionState),
        }
        let properties = &mut self.properties;
        let is_set = value != 0;
        match property {
            Property::PrivilegeFlags => properties.privileges = value,
            Property::SyntheticProcessorFeatures => properties.synthetic_features = value,
            Property::ProcessorsPerSocket => properties.processors_per_socket = value,
            Property::PhysicalAddressWidth => properties.physical_address_width = Some(value),
            Property::TimeFreeze => {
                properties.is_frozen = is_set;
                return Ok(Change::TimeFreeze(is_set));
            }
            Property::ReferenceTime => return Ok(Change::ReferenceTime(value)),
            Property::GpaPageAccessTracking => {
                properties.is_tracking = is_set;
                return Ok(Change::Tracking(is_set));
            }
            Property::UnimplementedMsrAction => {
                properties.unimplemented_msr_action = value;
                return Ok(Change::IgnoreUnknownMsrs(is_set));
            }
            // None of these is ever written.
            _ => return Err(Status::OperationDenied),
        }
        Ok(Change::Nothing)
    }

    /// HvCallGetPartitionProperty of a child.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] for a property that only the caller itself has.
    pub fn property(&self, property: Property, host: &Host) -> Result<Value, Status> {
        let own = &self.properties;
        let features = host.features.difference(self.created.disabled_features).banks();
        Ok(Value::Word(match property {
            Property::PrivilegeFlags => own.privileges,
            Property::SyntheticProcessorFeatures => own.synthetic_features,
            Property::TimeFreeze => own.is_frozen.into(),
            Property::ReferenceTime => return Ok(Value::ReferenceTime),
            Property::ProcessorsPerSocket => own.processors_per_socket,
            Property::GpaPageAccessTracking => own.is_tracking.into(),
            Property::UnimplementedMsrAction => own.unimplemented_msr_action,
            Property::ProcessorXsaveFeatures => {
                host.xsave_features.difference(self.created.disabled_xsave_features).bits()
            }
            Property::PhysicalAddressWidth => own.physical_address_width.unwrap_or(host.physical_address_width),
            Property::ProcessorFeatures0 => features[0],
            Property::ProcessorFeatures1 => features[1],
            Property::VmmCapabilities | Property::AssignableSyntheticFeatures => return Err(Status::InvalidParameter),
            other => return host.property(other),
        }))
    }

    /// Its synthetic features, limited to those of this host.
    #[must_use]
    pub fn synthetic_features(&self, host: &Host) -> SyntheticFeatures {
        SyntheticFeatures::from_bits_truncate(self.properties.synthetic_features) & host.synthetic_features
    }

    /// The features that its VPs have.
    #[must_use]
    pub fn features(&self, host: &Host) -> Features {
        Features {
            processor: host.features.difference(self.created.disabled_features),
            xsave: host.xsave_features.difference(self.created.disabled_xsave_features),
            synthetic: self.synthetic_features(host),
        }
    }

    /// HvCallMapGpaPages: the first element, and each next one if there is time for `more`. With an error, the elements
    /// before it are changed. An element that changes nothing needs no flush. Nobody has access to the memory of a
    /// partition that is being finalized, so to forbid it is no error.
    ///
    /// # Errors
    ///
    /// With the number of finished elements: [`Status::InvalidPartitionState`]; [`Status::InvalidParameter`] for a page
    /// that is not the parent's, or deposited; [`Status::InsufficientMemory`].
    pub fn map_pages(
        &mut self,
        map: &MapPages<'_>,
        more: impl FnMut() -> bool,
        ledger: &Ledger,
        store: &mut impl Store,
    ) -> (Released, Result<(), Status>) {
        // Linux asks for it until it has given up the guest's memory, which is after it has finalized the partition.
        if let Mapping::NoAccess(count) = &map.what
            && let Some(released) = self.gone(*count)
        {
            return (released, Ok(()));
        }
        if let Err(status) = self.must_be(State::Initialized) {
            return (Released::default(), Err(status));
        }
        let leaf = if map.is_large { Leaf::Large } else { Leaf::Small };
        match map.what {
            Mapping::NoAccess(count) => {
                let entries = (0..count).map(|_| Ok(Entry::NoAccess));
                self.change(map.first, leaf, entries, more, ledger, store)
            }
            Mapping::Pages(pages, access) => {
                let entries = pages.iter().map(|page| {
                    let source = number_of_page(page?);
                    share_leaf(source, leaf, access, ledger)
                });
                self.change(map.first, leaf, entries, more, ledger, store)
            }
        }
    }

    /// HvCallUnmapGpaPages: the first element, and each next one if there is time for `more`. An unmapped page is no
    /// error.
    ///
    /// # Errors
    ///
    /// As [`Self::map_pages`].
    pub fn unmap_pages(
        &mut self,
        unmap: &UnmapPages,
        more: impl FnMut() -> bool,
        ledger: &Ledger,
        store: &mut impl Store,
    ) -> (Released, Result<(), Status>) {
        if let Some(released) = self.gone(unmap.count) {
            return (released, Ok(()));
        }
        if let Err(status) = self.must_be(State::Initialized) {
            return (Released::default(), Err(status));
        }
        let leaf = if unmap.is_large { Leaf::Large } else { Leaf::Small };
        let entries = (0..unmap.count).map(|_| Ok(Entry::Absent));
        self.change(unmap.first, leaf, entries, more, ledger, store)
    }

    /// What there is to do to take pages away from a partition that is finalized: nothing. While it is being finalized
    /// its VPs may still run, so no element is done, and the parent calls again.
    fn gone(&self, elements: u16) -> Option<Released> {
        let done = match self.state {
            State::Created | State::Initialized => return None,
            State::Finalizing => 0,
            State::Finalized => elements,
        };
        Some(Released { done, ..Released::default() })
    }

    fn change(
        &mut self,
        first: Gpa,
        leaf: Leaf,
        mut entries: impl ExactSizeIterator<Item = Result<Entry, Status>>,
        mut more: impl FnMut() -> bool,
        ledger: &Ledger,
        store: &mut impl Store,
    ) -> (Released, Result<(), Status>) {
        let first = number_of_page(first);
        let mut released = Released { changed: first..first, ..Released::default() };
        // Before the first change: no page may get lost.
        if released.old.try_reserve_exact(entries.len()).is_err() {
            return (released, Err(Status::NoResources));
        }

        if leaf == Leaf::Small {
            let result = self.change_small(&mut released, &mut entries, &mut more, ledger, store);
            return (released, result);
        }
        while released.done == 0 || more() {
            let Some(entry) = entries.next() else { break };
            let page = released.changed.end;
            let entry = match entry {
                Ok(entry) => entry,
                Err(status) => return (released, Err(status)),
            };
            match self.map.set(page, leaf, entry, &mut self.deposits, store) {
                Ok(Old::Nothing) => {}
                Ok(old) => released.old.push(old),
                Err(status) => {
                    unshare(entry, leaf, ledger);
                    return (released, Err(status));
                }
            }
            released.done += 1;
            released.changed.end += leaf.pages();
        }
        (released, Ok(()))
    }

    /// [`Self::change`] for pages of 4 KiB, a run of them at a time.
    fn change_small(
        &mut self,
        released: &mut Released,
        entries: &mut impl Iterator<Item = Result<Entry, Status>>,
        more: &mut impl FnMut() -> bool,
        ledger: &Ledger,
        store: &mut impl Store,
    ) -> Result<(), Status> {
        while released.done == 0 || more() {
            let mut run = entries.by_ref().take(RUN);
            let (done, result) = self.map.set_run(
                released.changed.end,
                &mut || run.next(),
                &mut |entry| unshare(entry, Leaf::Small, ledger),
                &mut released.old,
                &mut self.deposits,
                store,
            );
            released.done += u16::try_from(done).unwrap_or(u16::MAX);
            released.changed.end += done;
            result?;
            if done == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Releases the pages that a change has taken away, after no TLB has them any more.
    pub fn settle(&mut self, released: Released, ledger: &Ledger, store: &mut impl Store) {
        for old in released.old {
            GpaMap::settle(old, ledger, &mut self.deposits, store);
        }
    }

    /// The state of a page of the child.
    pub fn page(&self, page: u64, store: &impl Store) -> Entry {
        self.map.get(page, store)
    }

    /// Whether its time stands still.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.properties.is_frozen
    }

    /// Whether accesses to its pages are tracked.
    #[must_use]
    pub fn is_tracking(&self) -> bool {
        self.properties.is_tracking
    }

    /// The pages that were written, as far as they are known here.
    #[must_use]
    pub fn written(&self) -> &Written {
        &self.written
    }

    /// Makes room to remember writes to these pages, before they are mapped.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionState`], and as [`Written::prepare`].
    pub fn prepare_written(&mut self, pages: Range<u64>, store: &mut impl Store) -> Result<(), Status> {
        self.must_be(State::Initialized)?;
        self.written.prepare(pages, &mut self.deposits, store)
    }

    /// The map, for checks.
    #[must_use]
    pub fn map(&self) -> &GpaMap {
        &self.map
    }

    /// Whether [`Self::create_vp`] can succeed, and where among the VPs the new one will be.
    ///
    /// # Errors
    ///
    /// Those that depend on the partition only.
    pub fn check_new_vp(&self, index: u32, host: &Host) -> Result<usize, Status> {
        self.must_be(State::Initialized)?;
        let Err(at) = self.vp_position(index) else { return Err(Status::InvalidVpIndex) };
        if index >= host.vps {
            return Err(Status::InvalidVpIndex);
        }
        if self.deposits.free() < host.pages_per_vp as u64 {
            return Err(Status::InsufficientMemory);
        }
        Ok(at)
    }

    /// HvCallCreateVp. Its `price` is a number of deposited pages.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionState`], [`Status::InvalidVpIndex`] if it cannot be or is there,
    /// [`Status::InsufficientMemory`].
    pub fn create_vp(&mut self, index: u32, host: &Host, store: &mut impl Store) -> Result<&Vp, Status> {
        let at = self.check_new_vp(index, host)?;
        let mut vp = Vp::default();
        if vp.paid.try_reserve_exact(host.pages_per_vp).is_err() || self.vps.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        for _ in 0..host.pages_per_vp {
            vp.paid.extend(self.deposits.take(Use::Vp, store));
        }
        self.vps.insert(at, (index, vp));
        Ok(&self.vps[at].1)
    }

    /// HvCallDeleteVp. It does not run any more.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidVpIndex`].
    pub fn delete_vp(&mut self, index: u32, ledger: &Ledger, store: &mut impl Store) -> Result<(), Status> {
        let at = self.vp_position(index).map_err(|_| Status::InvalidVpIndex)?;
        let (_, vp) = self.vps.remove(at);
        self.free_vp(vp, ledger, store);
        Ok(())
    }

    fn free_vp(&mut self, mut vp: Vp, ledger: &Ledger, store: &mut impl Store) {
        vp.release_shared(ledger);
        for page in vp.paid {
            self.deposits.put(page, Use::Vp, store);
        }
    }

    /// A VP.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidVpIndex`].
    pub fn vp(&self, index: u32) -> Result<&Vp, Status> {
        self.vp_position(index).map(|at| &self.vps[at].1).map_err(|_| Status::InvalidVpIndex)
    }

    /// All VPs.
    pub fn vps(&self) -> impl ExactSizeIterator<Item = (u32, &Vp)> {
        self.vps.iter().map(|(index, vp)| (*index, vp))
    }

    fn vp_mut(&mut self, index: u32) -> Result<&mut Vp, Status> {
        self.vp_position(index).map(|at| &mut self.vps[at].1).map_err(|_| Status::InvalidVpIndex)
    }

    fn vp_position(&self, index: u32) -> Result<usize, usize> {
        self.vps.binary_search_by_key(&index, |(index, _)| *index)
    }

    /// HvCallMapVpStatePage. Returns the page's number. An L1VH parent always names the page.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidVpIndex`]; [`Status::InvalidParameter`] without a page, or with a page that is not the
    /// parent's; [`Status::OperationDenied`] if it is mapped already.
    pub fn map_state_page(&mut self, map: &MapStatePage, ledger: &Ledger) -> Result<u64, Status> {
        self.must_be(State::Initialized)?;
        let location = map.location.ok_or(Status::InvalidParameter)?;
        share_into(self.vp_mut(map.vp.index)?.state_slot(map.page), location, ledger)
    }

    /// HvCallUnmapVpStatePage. The hypervisor no longer writes to the page.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidVpIndex`], or [`Status::NotFound`] if it is not mapped.
    pub fn unmap_state_page(&mut self, unmap: &UnmapStatePage, ledger: &Ledger) -> Result<(), Status> {
        unshare_from(self.vp_mut(unmap.vp.index)?.state_slot(unmap.page), ledger)
    }

    /// HvCallMapStatsPage2, of this child or one of its VPs. Returns the page's number.
    ///
    /// # Errors
    ///
    /// As [`Self::map_state_page`].
    pub fn map_stats_page(&mut self, page: &StatsPage, location: Gpa, ledger: &Ledger) -> Result<u64, Status> {
        self.check_lives()?;
        share_into(self.stats_slot(page)?, location, ledger)
    }

    /// HvCallUnmapStatsPage. The hypervisor no longer writes to the page.
    ///
    /// # Errors
    ///
    /// As [`Self::unmap_state_page`].
    pub fn unmap_stats_page(&mut self, page: &StatsPage, ledger: &Ledger) -> Result<(), Status> {
        unshare_from(self.stats_slot(page)?, ledger)
    }

    fn stats_slot(&mut self, page: &StatsPage) -> Result<&mut Option<u64>, Status> {
        match page.object {
            StatsObject::Partition(_) => Ok(&mut self.stats[page.area as usize]),
            StatsObject::Vp(vp) => Ok(self.vp_mut(vp.index)?.stats_slot(page.area)),
            // These are the parent's.
            StatsObject::Hypervisor | StatsObject::Processor(_) => Err(Status::InvalidParameter),
        }
    }

    /// HvCallConnectPort. The port exists, and hears this child.
    pub(crate) fn connect(&mut self, connection: &ConnectPort) -> Result<(), Status> {
        self.must_be(State::Initialized)?;
        let number = connection.connection.number;
        if self.doorbells.iter().any(|other| other.connection.number == number) {
            return Err(Status::InvalidConnectionId);
        }
        if self.doorbells.len() >= limits::DOORBELLS || self.doorbells.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        // Behind those at the same address: the first that was connected rings.
        let at = self.doorbells.partition_point(|other| other.doorbell.gpa <= connection.doorbell.gpa);
        self.doorbells.insert(at, *connection);
        Ok(())
    }

    /// HvCallDisconnectPort.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidConnectionId`].
    pub fn disconnect(&mut self, number: u32) -> Result<(), Status> {
        let at = self.doorbells.iter().position(|other| other.connection.number == number);
        self.doorbells.remove(at.ok_or(Status::InvalidConnectionId)?);
        Ok(())
    }

    /// The number of the port that this write rings. `value` is zero above its `bytes`.
    #[must_use]
    pub fn ring(&self, gpa: Gpa, bytes: u8, value: u64) -> Option<u32> {
        let at = self.doorbells.partition_point(|other| other.doorbell.gpa < gpa);
        let here = self.doorbells[at..].iter().take_while(|other| other.doorbell.gpa == gpa);
        let mut ringing = here.filter(|other| other.doorbell.rings(gpa, bytes, value));
        ringing.next().map(|connection| connection.port.number)
    }

    /// Its doorbells, for checks.
    pub fn doorbells(&self) -> impl ExactSizeIterator<Item = &Doorbell> {
        self.doorbells.iter().map(|connection| &connection.doorbell)
    }

    /// All pages that the parent shares besides its memory.
    pub fn shared(&self) -> impl Iterator<Item = u64> + '_ {
        let of_vps = self.vps.iter().flat_map(|(_, vp)| vp.shared());
        self.stats.iter().copied().flatten().chain(of_vps)
    }

    /// Whether it is not finalized.
    pub(crate) fn check_lives(&self) -> Result<(), Status> {
        match self.state {
            State::Created | State::Initialized => Ok(()),
            State::Finalizing | State::Finalized => Err(Status::InvalidPartitionState),
        }
    }

    fn must_be(&self, state: State) -> Result<(), Status> {
        if self.state == state { Ok(()) } else { Err(Status::InvalidPartitionState) }
    }
}

/// Uses all pages of a leaf once more, or none of them.
fn share_leaf(source: u64, leaf: Leaf, access: GpaAccess, ledger: &Ledger) -> Result<Entry, Status> {
    if !source.is_multiple_of(leaf.pages()) || source >= PAGE_LIMIT {
        return Err(Status::InvalidParameter);
    }
    for page in source..source + leaf.pages() {
        if let Err(status) = ledger.share(page) {
            (source..page).for_each(|page| ledger.release(page));
            return Err(status);
        }
    }
    Ok(Entry::Page { source, access })
}

/// The contrary, for pages that were not mapped in the end.
fn unshare(entry: Entry, leaf: Leaf, ledger: &Ledger) {
    if let Entry::Page { source, .. } = entry {
        (source..source + leaf.pages()).for_each(|page| ledger.release(page));
    }
}

pub(crate) fn share_into(slot: &mut Option<u64>, location: Gpa, ledger: &Ledger) -> Result<u64, Status> {
    if slot.is_some() {
        return Err(Status::OperationDenied);
    }
    let page = number_of_page(location);
    ledger.share(page)?;
    *slot = Some(page);
    Ok(page)
}

pub(crate) fn unshare_from(slot: &mut Option<u64>, ledger: &Ledger) -> Result<(), Status> {
    ledger.release(slot.take().ok_or(Status::NotFound)?);
    Ok(())
}
