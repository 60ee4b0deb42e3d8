//! Calls about interrupts of a child, and about ports: a child's doorbells that the parent hears.

use hyperv_defs::interrupt::{AssertInterrupt, ConnectPort, CreatePort, Port};
use hyperv_defs::{PartitionId, Status};

use super::Ended;
use super::parent::Caller;

/// HvCallAssertVirtualInterrupt.
pub(super) fn assert(caller: &Caller<'_>, assert: &AssertInterrupt) -> Result<Ended, Status> {
    caller.check_child(assert.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallClearVirtualInterrupt.
pub(super) fn clear(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    caller.check_child(id)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallCreatePort.
pub(super) fn create_port(caller: &Caller<'_>, create: &CreatePort) -> Result<Ended, Status> {
    caller.check_child(create.sender)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallDeletePort.
pub(super) fn delete_port(_: &Caller<'_>, _: &Port) -> Result<Ended, Status> {
    Err(Status::InvalidPortId)
}

/// HvCallConnectPort.
pub(super) fn connect_port(caller: &Caller<'_>, connect: &ConnectPort) -> Result<Ended, Status> {
    caller.check_child(connect.connection.partition)?;
    Err(Status::FeatureUnavailable)
}

/// HvCallDisconnectPort.
pub(super) fn disconnect_port(caller: &Caller<'_>, port: &Port) -> Result<Ended, Status> {
    caller.check_child(port.partition)?;
    Err(Status::InvalidConnectionId)
}

/// HvCallNotifyPortRingEmpty.
pub(super) fn ring_empty(_: &Caller<'_>, _: u8) -> Result<Ended, Status> {
    Err(Status::FeatureUnavailable)
}
