//! All that a running host reports at one moment.

use abi::control::{HostInfo, VmInfo};

use super::{Snapshot, host, list, snapshot};
use crate::control::Client;
use crate::failure::Failure;

/// What the host says at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    /// Who it is.
    pub(crate) host: HostInfo,
    /// Its VMs, each with its counters if it has any.
    pub(crate) vms: Vec<(VmInfo, Option<Snapshot>)>,
}

impl Picture {
    /// Asks the host. The next picture is taken later, so others may ask meanwhile.
    pub(crate) fn take(client: &mut Client) -> Result<Self, Failure> {
        let host = host(client)?;
        let mut vms = Vec::new();
        for vm in list(client)? {
            // A VM that could not be created has no counters, and is still worth a line.
            let snapshot = snapshot(client, vm.number, vm.vcpus)?.ok();
            vms.push((vm, snapshot));
        }
        client.rest();
        Ok(Self { host, vms })
    }
}
