//! The port of a parent's programs: its driver is in the parent's memory, and the parent's vCPUs run meanwhile.

use alloc::sync::Arc;
use std::vec;
use std::vec::Vec;

use abi::payload::{Role, VmConfig};
use addr::{Gpa, PAGE_BYTES};
use interleave::STEPS;
use virtio_console::driver::{Driver, Registers};

use super::{Scenario, config, create, explore, prepare, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;
use crate::arch::{Arch, Machine};
use crate::vm::Vm;

/// Where the driver has its queues, in the parent's memory.
const DRIVER_MEMORY: Gpa = Gpa(0x10_0000);

/// The parent's kernel and a program in it, as far as the port knows them.
pub(super) struct Program {
    vm: Arc<Vm>,
    driver: Driver,
}

struct Page<'a>(&'a Vm);

impl Registers for Page<'_> {
    fn read(&mut self, offset: u16) -> u32 {
        Machine::tool_port(self.0).expect("a parent has it").read(self.0, offset, 4)
    }

    fn write(&mut self, offset: u16, value: u32) {
        Machine::tool_port(self.0).expect("a parent has it").write(self.0, offset, 4, value);
    }
}

impl Program {
    /// The kernel's driver finds the device. No process has opened the port yet.
    pub(super) fn start(vm: &Arc<Vm>) -> Self {
        Self { vm: vm.clone(), driver: Driver::start(&mut Page(vm), &vm.memory, DRIVER_MEMORY) }
    }

    pub(super) fn set_open(&mut self, is_open: bool) {
        self.driver.set_open(&mut Page(&self.vm), &self.vm.memory, is_open);
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        self.driver.write(&mut Page(&self.vm), &self.vm.memory, bytes)
    }

    pub(super) fn read(&mut self) -> Vec<u8> {
        self.driver.read(&mut Page(&self.vm), &self.vm.memory)
    }
}

/// A parent's vCPU that writes to its memory until it is told to stop.
fn parent() -> VmConfig {
    VmConfig { role: Role::Parent, ..config("parent", 1) }
}

pub(super) const CARRIES_BYTES: Scenario = Scenario {
    name: "the port of a parent carries bytes",
    cpus: 1,
    count: 40,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let config = parent();
        prepare(core::slice::from_ref(&config));
        let write = |page: u64| Op::Write(page * PAGE_BYTES, page);
        let vm = create(simulation, 0, &config, vec![vec![write(1), write(2), Op::Yield, Op::ShutDown]]);
        vm.start();
        let port = Machine::tool_port(&vm).expect("a parent has it");
        let mut program = Program::start(&vm);
        assert_eq!(port.look(&vm), None);
        program.set_open(true);
        let session = port.look(&vm).expect("a program has opened it");
        assert_eq!(program.write(b"question"), 8);
        let mut got = [0; 16];
        let count = port.receive(&vm, session, &mut got);
        assert_eq!(&got[..count], b"question");
        assert_eq!(port.transmit(&vm, session, b"answer"), 6);
        assert_eq!(program.read(), b"answer");
        program.set_open(false);
        assert_eq!(port.look(&vm), None);
        drop(program);
        until_gone(simulation, vm);
    },
};

#[test]
fn port_carries_bytes_between_a_program_and_the_hypervisor() {
    explore(CARRIES_BYTES);
}

#[test]
fn only_a_parent_has_the_port() {
    crate::arch::fake::machine::run(1, |simulation| {
        let configs = [parent(), config("guest", 1)];
        prepare(&configs);
        for (config, has) in configs.iter().zip([true, false]) {
            let vm = create(simulation, 0, config, vec![vec![Op::ShutDown]]);
            assert_eq!(Machine::tool_port(&vm).is_some(), has);
            vm.start();
            until_gone(simulation, vm);
        }
    });
}
