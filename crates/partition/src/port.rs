//! The ports of a parent: numbers under which it is notified of its children's writes.

use alloc::vec::Vec;

use hyperv_defs::interrupt::CreatePort;
use hyperv_defs::{PartitionId, Status};

use crate::limits;

/// The ports of one parent, in ascending order of their numbers.
#[derive(Debug, Default)]
pub struct Ports(Vec<CreatePort>);

impl Ports {
    /// The port with this number.
    #[must_use]
    pub fn find(&self, number: u32) -> Option<&CreatePort> {
        self.position(number).ok().map(|at| &self.0[at])
    }

    /// Number of ports.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn create(&mut self, port: CreatePort) -> Result<(), Status> {
        let Err(at) = self.position(port.port.number) else { return Err(Status::InvalidPortId) };
        if self.0.len() >= limits::PORTS || self.0.try_reserve(1).is_err() {
            return Err(Status::NoResources);
        }
        self.0.insert(at, port);
        Ok(())
    }

    pub(crate) fn delete(&mut self, number: u32) -> Result<(), Status> {
        let at = self.position(number).map_err(|_| Status::InvalidPortId)?;
        self.0.remove(at);
        Ok(())
    }

    /// Removes those at which `sender` was heard.
    pub(crate) fn forget(&mut self, sender: PartitionId) {
        self.0.retain(|port| port.sender != sender);
    }

    fn position(&self, number: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&number, |port| port.port.number)
    }
}
