//! The children of one parent.

use alloc::vec::Vec;

use addr::Gpa;
use hyperv_defs::interrupt::{ConnectPort, CreatePort, Port};
use hyperv_defs::memory::{Deposit, number_of_page};
use hyperv_defs::partition::{CreatePartition, CreationFlags};
use hyperv_defs::property::{
    FeatureBank, ProcessorFeatures, Property, SyntheticFeatures, VmmCapabilities, XsaveFeatures,
};
use hyperv_defs::vp::{StatsObject, StatsPage};
use hyperv_defs::{PartitionId, Status};

use crate::deposits::Store;
use crate::ledger::Ledger;
use crate::limits;
use crate::partition::{Partition, Progress};
use crate::port::Ports;
use crate::stats::OwnStats;

/// This host's features for children.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// Features of the processor that a child can have.
    pub features: ProcessorFeatures,
    /// Forms and components of XSAVE that it can have.
    pub xsave_features: XsaveFeatures,
    /// Components of the XSAVE state: XCR0 and XSS.
    pub xsave_states: u64,
    /// Bytes of the largest XSAVE state.
    pub max_xsave_bytes: u64,
    /// Parts of the interface that it can be offered.
    pub synthetic_features: SyntheticFeatures,
    /// Bits of a physical address.
    pub physical_address_width: u64,
    /// Frequency of the TSC.
    pub tsc_hertz: u64,
    /// Maximum number of VPs of a child.
    pub vps: u32,
    /// Deposited pages that pay for a VP.
    pub pages_per_vp: usize,
}

/// Value of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// 64 bits.
    Word(u64),
    /// A structure, for HvCallGetPartitionPropertyEx.
    Bank(FeatureBank),
    /// The partition's time, in units of 100 ns: the caller knows it.
    ReferenceTime,
}

impl Host {
    /// A property that all children share.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] for a property of a single child.
    pub fn property(&self, property: Property) -> Result<Value, Status> {
        let [bank_0, bank_1] = self.features.banks();
        Ok(Value::Word(match property {
            Property::IntegratedSchedulerEnabled | Property::VirtualizationFeatures => 0,
            Property::ProcessorXsaveFeatures => self.xsave_features.bits(),
            Property::PhysicalAddressWidth => self.physical_address_width,
            Property::XsaveStates => self.xsave_states,
            Property::MaxXsaveDataSize => self.max_xsave_bytes,
            Property::ProcessorClockFrequency => self.tsc_hertz,
            Property::ProcessorFeatures0 => bank_0,
            Property::ProcessorFeatures1 => bank_1,
            Property::VmmCapabilities => {
                return Ok(Value::Bank(FeatureBank::new(VmmCapabilities::CAN_PROVIDE_OVERLAY_GPFN.bits())));
            }
            Property::AssignableSyntheticFeatures => {
                return Ok(Value::Bank(FeatureBank::new(self.synthetic_features.bits())));
            }
            _ => return Err(Status::InvalidParameter),
        }))
    }
}

/// A parent.
#[derive(Debug)]
pub struct Parent {
    /// Whose each of its pages is.
    pub ledger: Ledger,
    /// What its children can have.
    pub host: Host,
    /// Its ports.
    pub ports: Ports,
    /// Its pages of statistics that are about no child.
    pub stats: OwnStats,
    /// In ascending order of their ids.
    children: Vec<Partition>,
}

impl Parent {
    /// A parent without children.
    #[must_use]
    pub fn new(ledger: Ledger, host: Host) -> Self {
        Self { ledger, host, ports: Ports::default(), stats: OwnStats::default(), children: Vec::new() }
    }

    /// HvCallCreatePartition. `id` is above all ids that this parent's children ever had.
    ///
    /// # Errors
    ///
    /// [`Status::ProcessorFeatureNotSupported`] for nested virtualization, [`Status::NoResources`] for one too many.
    pub fn create(&mut self, id: PartitionId, create: &CreatePartition) -> Result<PartitionId, Status> {
        if create.flags.contains(CreationFlags::NESTED_VIRTUALIZATION_CAPABLE) {
            return Err(Status::ProcessorFeatureNotSupported);
        }
        if self.children.len() >= limits::CHILDREN || self.children.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        debug_assert!(self.children.last().is_none_or(|last| last.id < id), "ids are never used again");
        self.children.push(Partition::new(id, *create));
        Ok(id)
    }

    /// A child.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], also for the parent itself.
    pub fn child(&self, id: PartitionId) -> Result<&Partition, Status> {
        self.position(id).map(|at| &self.children[at])
    }

    /// A child, for a change, and the ledger.
    ///
    /// # Errors
    ///
    /// As [`Self::child`].
    pub fn child_mut(&mut self, id: PartitionId) -> Result<(&mut Partition, &Ledger), Status> {
        let at = self.position(id)?;
        Ok((&mut self.children[at], &self.ledger))
    }

    /// All children.
    pub fn children(&self) -> impl ExactSizeIterator<Item = &Partition> {
        self.children.iter()
    }

    fn position(&self, id: PartitionId) -> Result<usize, Status> {
        self.children.binary_search_by_key(&id, |child| child.id).map_err(|_| Status::InvalidPartitionId)
    }

    /// HvCallGetPartitionProperty, of the parent itself or of a child.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], and as [`Partition::property`] and [`Host::property`].
    pub fn property(&self, id: PartitionId, property: Property) -> Result<Value, Status> {
        match id {
            PartitionId::SELF => self.host.property(property),
            id => self.child(id)?.property(property, &self.host),
        }
    }

    /// The first part of HvCallDepositMemory, at most `most` elements: the parent loses the pages. The caller unmaps
    /// them from the parent, flushes its TLBs, and [adds](crate::Deposits::add) them to the child. Returns the number
    /// of finished elements.
    ///
    /// # Errors
    ///
    /// With the number of finished elements: [`Status::InvalidPartitionId`]; [`Status::InvalidParameter`] for a page
    /// that is not the parent's, or in use, or deposited.
    pub fn claim(&self, deposit: &Deposit<'_>, most: u16, mut claimed: impl FnMut(u64)) -> (u16, Result<(), Status>) {
        if let Err(status) = self.child(deposit.partition) {
            return (0, Err(status));
        }
        let mut done = 0;
        for page in deposit.pages.iter().take(most.into()) {
            let result = page.map(number_of_page).and_then(|page| self.ledger.deposit(page).map(|()| page));
            match result {
                Ok(page) => claimed(page),
                Err(status) => return (done, Err(status)),
            }
            done += 1;
        }
        (done, Ok(()))
    }

    /// The end of HvCallFinalizePartition, also at the end of a parent: see [`Partition::finalize`]. The parent's ports
    /// for the child are removed.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], [`Status::InvalidPartitionState`].
    pub fn finalize(&mut self, id: PartitionId) -> Result<bool, Status> {
        let at = self.position(id)?;
        let begins = self.children[at].finalize()?;
        if begins {
            self.ports.forget(id);
        }
        Ok(begins)
    }

    /// HvCallDeletePartition. Pages that were not withdrawn return to the parent; `returned` is called for each. At
    /// most `most` pages per call.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`]; [`Status::InvalidPartitionState`] if it was not finalized.
    pub fn delete(
        &mut self,
        id: PartitionId,
        most: usize,
        store: &mut impl Store,
        mut returned: impl FnMut(u64),
    ) -> Result<Progress, Status> {
        let at = self.position(id)?;
        let child = &mut self.children[at];
        child.check_delete()?;
        for _ in 0..most {
            let Some(page) = child.withdraw(&self.ledger, store) else {
                // Statistics of a partition that was never initialized.
                if child.finalize().is_ok() {
                    while child.empty(&self.ledger, store) == Progress::More {}
                }
                debug_assert_eq!(child.deposits.total(), 0, "{:?}: pages that nobody can withdraw", child.deposits);
                self.ports.forget(id);
                self.children.remove(at);
                return Ok(Progress::Done);
            };
            returned(page);
        }
        Ok(Progress::More)
    }

    /// HvCallMapStatsPage2. Returns the page's number.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], [`Status::InvalidVpIndex`]; [`Status::InvalidParameter`] for a processor that
    /// does not exist, statistics of its own that count for its parent, or a page that is not the caller's;
    /// [`Status::OperationDenied`] if these are mapped already.
    pub fn map_stats_page(&mut self, page: &StatsPage, location: Gpa) -> Result<u64, Status> {
        match child_of(page.object) {
            None => self.stats.map(page, location, &self.ledger),
            Some(id) => self.child_mut(id).and_then(|(child, ledger)| child.map_stats_page(page, location, ledger)),
        }
    }

    /// HvCallUnmapStatsPage. The hypervisor no longer writes to the page.
    ///
    /// # Errors
    ///
    /// As [`Self::map_stats_page`], and [`Status::NotFound`] if it is not mapped.
    pub fn unmap_stats_page(&mut self, page: &StatsPage) -> Result<(), Status> {
        match child_of(page.object) {
            None => self.stats.unmap(page, &self.ledger),
            Some(id) => self.child_mut(id).and_then(|(child, ledger)| child.unmap_stats_page(page, ledger)),
        }
    }

    /// Another kernel takes the parent's place. It does not know of the pages of statistics.
    pub fn forget_stats(&mut self) {
        self.stats.forget(&self.ledger);
    }

    /// HvCallCreatePort: at the parent itself, for a child.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], [`Status::InvalidPortId`] if it exists, [`Status::NoResources`].
    pub fn create_port(&mut self, create: &CreatePort) -> Result<(), Status> {
        if create.port.partition != PartitionId::SELF {
            return Err(Status::InvalidPartitionId);
        }
        self.child(create.sender)?.check_lives()?;
        self.ports.create(*create)
    }

    /// HvCallDeletePort. Connections to it stay, and lead nowhere.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], [`Status::InvalidPortId`].
    pub fn delete_port(&mut self, port: &Port) -> Result<(), Status> {
        if port.partition != PartitionId::SELF {
            return Err(Status::InvalidPartitionId);
        }
        self.ports.delete(port.number)
    }

    /// HvCallConnectPort: a child to a port of the parent that hears it.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidPartitionId`], [`Status::InvalidPortId`], [`Status::InvalidConnectionId`] if it exists,
    /// [`Status::NoResources`].
    pub fn connect_port(&mut self, connect: &ConnectPort) -> Result<(), Status> {
        let at = self.position(connect.connection.partition)?;
        if connect.port.partition != PartitionId::SELF {
            return Err(Status::InvalidPartitionId);
        }
        match self.ports.find(connect.port.number) {
            Some(port) if port.sender == connect.connection.partition => self.children[at].connect(connect),
            _ => Err(Status::InvalidPortId),
        }
    }
}

/// The child that statistics are about, if they are about one.
fn child_of(object: StatsObject) -> Option<PartitionId> {
    let id = match object {
        StatsObject::Hypervisor | StatsObject::Processor(_) => return None,
        StatsObject::Partition(id) => id,
        StatsObject::Vp(vp) => vp.partition,
    };
    (id != PartitionId::SELF).then_some(id)
}
