//! Calls about interrupts of a child, and about ports: a child's doorbells that the parent hears.

use hyperv_defs::interrupt::{AssertInterrupt, ConnectPort, CreatePort, InterruptKind, Port};
use hyperv_defs::{PartitionId, Status};
use sched::Pending;

use super::Ended;
use super::parent::Caller;
use crate::arch::machine::delivery;
use crate::device::interrupt::{Kind, Message, Pin, Target};

/// Vectors below are exceptions, and illegal for an interrupt (APM vol. 2, 16.4).
const FIRST_VECTOR: u8 = 16;

/// HvCallAssertVirtualInterrupt. The parent's kernel calls it with interrupts off, for each interrupt of a device. So
/// it takes no lock that is held for long.
pub(super) fn assert(caller: &Caller<'_>, assert: &AssertInterrupt) -> Result<Ended, Status> {
    let vm = match caller.children.vm(assert.partition) {
        Ok(vm) => vm,
        Err(status) => {
            caller.check_child(assert.partition)?;
            return Err(status);
        }
    };
    let target = Target::asserted(assert.destination, assert.is_logical);
    let kind = match assert.kind {
        InterruptKind::Fixed | InterruptKind::LowestPriority if assert.vector < FIRST_VECTOR => {
            return Err(Status::InvalidParameter);
        }
        InterruptKind::Fixed => Kind::Fixed,
        InterruptKind::LowestPriority => Kind::LowestPriority,
        InterruptKind::Nmi => Kind::Nmi,
        InterruptKind::Init => Kind::Init,
        InterruptKind::Sipi => Kind::Startup,
        InterruptKind::ExtInt if assert.vector == 0 => Kind::NoExternal,
        InterruptKind::ExtInt => Kind::External,
        InterruptKind::Lint0 => Kind::Pin(Pin::Lint0),
        InterruptKind::Lint1 => Kind::Pin(Pin::Lint1),
        // No VM has system-management mode: nothing happens.
        InterruptKind::Smi => return caller.done(),
        InterruptKind::RemoteRead => return Err(Status::InvalidParameter),
    };
    // A level-triggered interrupt counts as an edge. VMMs are not told of its end, and so would not assert it again.
    // Its vector has a clear TMR bit: from this, guests conclude that they must write to the I/O APIC's EOI register,
    // which is the VMM's.
    let message = Message { kind, vector: assert.vector, target, level: false };
    delivery::send_to_child(&vm, &message, || caller.preemption_point());
    caller.done()
}

/// HvCallClearVirtualInterrupt: no vCPU has an external interrupt that waits.
pub(super) fn clear(caller: &Caller<'_>, id: PartitionId) -> Result<Ended, Status> {
    caller.check_child(id)?;
    // Before it is initialized, none can have one.
    if let Ok(vm) = caller.children.vm(id) {
        let target = Target::AllIncludingSelf;
        let message = Message { kind: Kind::NoExternal, vector: 0, target, level: false };
        delivery::send_to_child(&vm, &message, || caller.preemption_point());
    }
    caller.done()
}

/// HvCallCreatePort.
pub(super) fn create_port(caller: &Caller<'_>, create: &CreatePort) -> Result<Ended, Status> {
    if create.vp.is_some_and(|vp| vp >= caller.vm.config.vcpus) {
        return Err(Status::InvalidVpIndex);
    }
    let mut parent = caller.lock();
    parent.create_port(create)?;
    if caller.children.mail.add_port(create).is_none() {
        parent.delete_port(&create.port)?;
        return Err(Status::NoResources);
    }
    caller.done()
}

/// HvCallDeletePort.
pub(super) fn delete_port(caller: &Caller<'_>, port: &Port) -> Result<Ended, Status> {
    let mut parent = caller.lock();
    parent.delete_port(port)?;
    caller.children.mail.remove_port(port.number);
    caller.done()
}

/// HvCallConnectPort.
pub(super) fn connect_port(caller: &Caller<'_>, connect: &ConnectPort) -> Result<Ended, Status> {
    let id = connect.connection.partition;
    let mut parent = caller.lock();
    parent.connect_port(connect)?;
    let number = connect.connection.number;
    let connected = caller.children.vm(id).and_then(|vm| {
        let child = vm.as_child().ok_or(Status::InvalidPartitionState)?;
        let port = caller.children.mail.port(connect.port.number).ok_or(Status::InvalidPortId)?;
        child.doorbells.connect(number, connect.doorbell, port).map_err(|_| Status::NoResources)
    });
    if let Err(status) = connected {
        parent.child_mut(id)?.0.disconnect(number)?;
        return Err(status);
    }
    caller.done()
}

/// HvCallDisconnectPort.
pub(super) fn disconnect_port(caller: &Caller<'_>, port: &Port) -> Result<Ended, Status> {
    let mut parent = caller.lock();
    parent.child_mut(port.partition)?.0.disconnect(port.number)?;
    if let Ok(vm) = caller.children.vm(port.partition)
        && let Some(child) = vm.as_child()
    {
        child.doorbells.disconnect(port.number);
    }
    caller.done()
}

/// HvCallNotifyPortRingEmpty: of the vCPU that calls. It looks again for doorbells that had no room.
pub(super) fn ring_empty(caller: &Caller<'_>, _: u8) -> Result<Ended, Status> {
    caller.vm.post(caller.index, Pending::MESSAGE);
    caller.done()
}
