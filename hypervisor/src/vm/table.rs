//! The table of all VMs of the host: those of the payload, and those that commands have created.
//!
//! A VM's number is unique for the life of the host; its position in the table has no meaning. VMs are added, started,
//! ended and removed at any time. After the last vCPU has left for good and only the table still refers to the VM, the
//! first pCPU's housekeeping frees its memory. The end of a VM is reported only after that, so a VM that is reported as
//! ended holds no resources.

use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::{Refusal, StopReason, VmInfo, VmState};
use abi::counters::VcpuCounters;
use abi::payload::{Devices, VmConfig};
use crossbeam_utils::CachePadded;
use log::info;

use super::{Ending, Vm};
use crate::arch::GivenFunctions;
use crate::io::{self, iommu};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, per_host};

/// Maximum number of VMs at a time, including those that have ended. The table reserves room for all of them at boot.
const MAX_VMS: usize = 512;

per_host! {
    static TABLE: CachePadded<Mutex<Table>> = CachePadded::new(Mutex::new(Table { entries: Vec::new() }));
    /// The number of the next VM.
    static NEXT: AtomicU32 = AtomicU32::new(0);
}

/// The VMs, in ascending order of their numbers.
pub(crate) struct Table {
    entries: Vec<Entry>,
}

struct Entry {
    number: u32,
    state: State,
}

enum State {
    /// Complete, and never started.
    Created(Arc<Vm>),
    /// Its vCPUs run, or are about to end.
    Running(Arc<Vm>),
    Ended {
        config: VmConfig,
        reason: StopReason,
        counters: Vec<VcpuCounters>,
    },
    /// It could not be created.
    Failed(VmConfig),
}

/// Makes room for all VMs that there will be at a time. Called once, before the first.
pub(crate) fn init() {
    table().entries.reserve_exact(MAX_VMS);
}

/// Locks the table. Hold the lock only for short work.
pub(crate) fn table() -> MutexGuard<'static, Table> {
    TABLE.lock()
}

/// Allocates a number for a VM that is about to be created.
pub(crate) fn new_number() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Table {
    /// Whether a VM called `name` may be created.
    ///
    /// # Errors
    /// When there is no room, or another VM has that name.
    pub(crate) fn admit(&self, name: &str) -> Result<(), Refusal> {
        if self.entries.len() >= MAX_VMS {
            return Err(Refusal::TooManyVms);
        }
        if self.entries.iter().any(|entry| entry.config().name == name) {
            return Err(Refusal::NameTaken);
        }
        Ok(())
    }

    /// Adds a VM that was created and does not run yet.
    pub(crate) fn add(&mut self, vm: Arc<Vm>) {
        self.insert(Entry { number: vm.number, state: State::Created(vm) });
    }

    /// Adds a child, which its parent starts and ends. Without room it is in no list.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn add_child(&mut self, vm: Arc<Vm>) {
        if self.entries.len() < MAX_VMS {
            self.insert(Entry { number: vm.number, state: State::Running(vm) });
        }
    }

    /// Forgets a child that is about to be taken apart.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn remove_child(&mut self, number: u32) {
        self.entries.retain(|entry| entry.number != number);
    }

    /// Adds a VM of the payload that could not be created.
    pub(crate) fn add_failed(&mut self, number: u32, config: VmConfig) {
        self.insert(Entry { number, state: State::Failed(config) });
    }

    fn insert(&mut self, entry: Entry) {
        let at = self.entries.partition_point(|other| other.number < entry.number);
        self.entries.insert(at, entry);
    }

    /// Lets a VM run that was created.
    ///
    /// # Errors
    /// When there is no such VM, or it does not wait for that.
    pub(crate) fn start(&mut self, number: u32) -> Result<(), Refusal> {
        let entry = self.entry(number)?;
        let State::Created(vm) = &entry.state else { return Err(Refusal::AlreadyStarted) };
        let vm = vm.clone();
        entry.state = State::Running(vm.clone());
        if vm.config.devices == Devices::All {
            io::set_owner(&vm);
        }
        if let Some(given) = vm.memory.devices().and_then(iommu::Devices::given) {
            given.start(&vm);
        }
        vm.start();
        Ok(())
    }

    /// A VM that runs.
    ///
    /// # Errors
    /// When there is no such VM, or it does not run.
    pub(crate) fn running(&self, number: u32) -> Result<&Arc<Vm>, Refusal> {
        match &self.find(number)?.state {
            State::Running(vm) => Ok(vm),
            State::Created(_) => Err(Refusal::NotStarted),
            State::Ended { .. } | State::Failed(_) => Err(Refusal::NotRunning),
        }
    }

    /// A VM that has memory, whether it runs or not.
    ///
    /// # Errors
    /// When there is no such VM, or it has ended.
    pub(crate) fn alive(&self, number: u32) -> Result<&Arc<Vm>, Refusal> {
        self.find(number)?.state.alive().ok_or(Refusal::NotRunning)
    }

    /// All VMs that have memory.
    pub(crate) fn all_alive(&self) -> impl Iterator<Item = &Arc<Vm>> {
        self.entries.iter().filter_map(|entry| entry.state.alive())
    }

    /// Number of VMs in the table, in any state.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Describes the VMs whose numbers are `first` or above.
    pub(crate) fn infos(&self, first: u32) -> impl Iterator<Item = VmInfo> {
        self.entries.iter().filter(move |entry| entry.number >= first).map(Entry::info)
    }

    /// Counters of a VM's vCPUs: from `first` on, at most `most` of them.
    ///
    /// # Errors
    /// There is no such VM or vCPU, or its counters were not kept.
    pub(crate) fn counters(&self, number: u32, first: u32, most: usize) -> Result<Vec<VcpuCounters>, Refusal> {
        let entry = self.find(number)?;
        let vcpus = entry.vcpus();
        let first = first as usize;
        if first >= vcpus {
            return Err(Refusal::NoSuchVcpu);
        }
        let wanted = first..vcpus.min(first + most);
        match &entry.state {
            State::Created(vm) | State::Running(vm) => {
                Ok(vm.vcpus()[wanted].iter().map(|vcpu| vcpu.counters().snapshot()).collect())
            }
            State::Ended { counters, .. } => counters.get(wanted).map(Vec::from).ok_or(Refusal::NotRunning),
            State::Failed(_) => Err(Refusal::NotRunning),
        }
    }

    /// A VM whose last vCPU has left for good, and to which only the table refers: it can be [buried](Self::bury).
    pub(crate) fn over(&self) -> Option<&Arc<Vm>> {
        self.all_alive().find(|vm| vm.is_over() && (Arc::strong_count(vm) == 1 || mutants::is(Mutant::BuriedWhileHeld)))
    }

    /// Of an ended VM only its name and its counters stay. Returns how it ended, and the last reference to it.
    pub(crate) fn bury(&mut self, number: u32, counters: Vec<VcpuCounters>) -> Option<(Ending, Arc<Vm>)> {
        let entry = self.entries.iter_mut().find(|entry| entry.number == number)?;
        let vm = entry.state.alive()?.clone();
        let ending = vm.ending()?.clone();
        info!("{}: {}: {}", vm.name(), ending.reason.name(), ending.detail);
        entry.state = State::Ended { config: vm.config.clone(), reason: ending.reason, counters };
        Some((ending, vm))
    }

    /// Forgets a VM that has ended, or could not be created.
    ///
    /// # Errors
    /// When there is no such VM, or it has not ended.
    pub(crate) fn remove(&mut self, number: u32) -> Result<(), Refusal> {
        if self.find(number)?.state.alive().is_some() {
            return Err(Refusal::Busy);
        }
        self.entries.retain(|entry| entry.number != number);
        Ok(())
    }

    fn find(&self, number: u32) -> Result<&Entry, Refusal> {
        self.entries.iter().find(|entry| entry.number == number).ok_or(Refusal::NoSuchVm)
    }

    fn entry(&mut self, number: u32) -> Result<&mut Entry, Refusal> {
        self.entries.iter_mut().find(|entry| entry.number == number).ok_or(Refusal::NoSuchVm)
    }
}

impl State {
    fn alive(&self) -> Option<&Arc<Vm>> {
        match self {
            Self::Created(vm) | Self::Running(vm) => Some(vm),
            Self::Ended { .. } | Self::Failed(_) => None,
        }
    }
}

impl Entry {
    fn config(&self) -> &VmConfig {
        match &self.state {
            State::Created(vm) | State::Running(vm) => &vm.config,
            State::Ended { config, .. } | State::Failed(config) => config,
        }
    }

    /// A child has as many as its parent has created.
    fn vcpus(&self) -> usize {
        match &self.state {
            State::Created(vm) | State::Running(vm) => vm.vcpus().len(),
            State::Ended { config, .. } | State::Failed(config) => config.vcpus as usize,
        }
    }

    fn info(&self) -> VmInfo {
        let config = self.config();
        VmInfo {
            number: self.number,
            name: config.name.clone(),
            vcpus: u32::try_from(self.vcpus()).unwrap_or(u32::MAX),
            memory_bytes: config.memory_bytes,
            state: match &self.state {
                State::Created(_) => VmState::Created,
                State::Running(_) => VmState::Running,
                State::Ended { reason, .. } => VmState::Stopped(*reason),
                State::Failed(_) => VmState::Failed,
            },
        }
    }
}
