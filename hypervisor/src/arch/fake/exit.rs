//! Exits of the fake machine and their handling.

use abi::control::{Line, StopReason};
use abi::counters::ExitReason;
use addr::Gpa;
use hyperv_defs::{MessageType, Targets};
use sched::Pending;
use shootdown::{CutOff, Pages, Plan};
use stage2::Access;

use super::{clock, delivery, platform};
use crate::arch::VcpuState as _;
use crate::cpu::scheduler;
use crate::vcpu::run::{Next, Running};
use crate::vcpu::unsent;
use crate::vm::child::intercept;
use crate::vm::fault::{Needs, Resolved, resolve_fault};

/// Why the guest was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// The host was interrupted.
    Interrupted,
    /// The guest halts.
    Halted,
    /// Stage 2 does not allow an access.
    Fault {
        gpa: u64,
        is_write: bool,
        is_mapped: bool,
    },
    /// These vCPUs shall flush a page, or everything.
    Flush {
        vcpus: u64,
        page: Option<u64>,
    },
    /// This vCPU shall be interrupted.
    Interrupt(u32),
    /// All others shall be interrupted.
    InterruptOthers,
    InterruptByDevice,
    /// This vCPU shall be interrupted, and run here next.
    HandOver(u32),
    /// This vCPU shall start.
    Start(u32),
    /// The guest sets its timer.
    Timer(u64),
    /// The guest spins.
    Yield,
    /// The hypervisor writes to a word for the guest.
    WriteByHost {
        gpa: u64,
        value: u64,
    },
    /// The hypervisor writes to a word before the guest's next instruction.
    Owe {
        gpa: u64,
        value: u64,
    },
    /// The guest writes to its console.
    Print(u8),
    /// The guest creates a vCPU of its child.
    CreateVp {
        answer: u64,
    },
    /// The guest turns itself off.
    ShutDown,
}

/// Handles the last exit.
pub(crate) fn handle(_: bool, run: &mut Running<'_>) -> Next {
    run.tally.exit(ExitReason::Other);
    match run.owner.arch.exit {
        Exit::Interrupted => return Next::Interrupted,
        Exit::Halted => {
            run.owner.arch.halt();
            return Next::Idle;
        }
        Exit::Yield => return Next::Yield,
        Exit::Fault { gpa, is_write, is_mapped } => return resolve(run, Gpa(gpa), is_write, is_mapped),
        Exit::WriteByHost { gpa, value } => return write_by_host(run, Gpa(gpa), value),
        Exit::Owe { gpa, value } => {
            run.owner.arch.owed = Some((gpa, value));
            run.vm.post(run.index, Pending::MESSAGE);
        }
        Exit::Flush { vcpus, page } => flush(run, vcpus, page),
        Exit::HandOver(target) => {
            delivery::hand_over(run.vm, target);
            return Next::Yield;
        }
        Exit::Interrupt(target) if target == run.index => run.owner.arch.interrupt(),
        Exit::Interrupt(target) => delivery::send_from(run, 0, [target]),
        Exit::InterruptByDevice => delivery::send_of_device(run.vm, 0..run.vm.config.vcpus),
        Exit::InterruptOthers => {
            let others = (0..run.vm.config.vcpus).filter(|&id| id != run.index);
            delivery::send_from(run, 0, others);
        }
        Exit::Start(target) => {
            run.vm.vcpus()[target as usize].posted().start();
            run.vm.post(target, Pending::STARTUP);
            unsent::has_sent(run.vcpu);
        }
        Exit::Timer(ticks) => {
            run.owner.arch.set_timer(clock::now() + ticks);
            scheduler::arm(run.cpu, run.vm.share(), run.owner.arch.deadline());
        }
        Exit::Print(byte) => {
            let tell = |asserted| platform::serial_interrupt(run.vm, Line::Console, asserted);
            run.vm.serial(Line::Console).write(0, byte, tell);
        }
        Exit::CreateVp { answer } => {
            let status = platform::create_vp(run.vm);
            let is_told = run.vm.memory.write(Gpa(answer), &(u64::from(status) + 1).to_le_bytes());
            assert!(is_told, "{answer:#x} is there");
        }
        Exit::ShutDown => run.vm.stop_by(run.index, StopReason::PowerOff, format_args!("turned itself off")),
    }
    Next::Resume
}

fn resolve(run: &mut Running<'_>, gpa: Gpa, is_write: bool, is_mapped: bool) -> Next {
    let access = Access { read: true, write: is_write, execute: false };
    let resolved = resolve_fault(run, gpa, is_mapped, || Needs { access, is_table_walk: false });
    let kind = match resolved {
        Resolved::Again(_) => return Next::Resume,
        Resolved::NoAccess => MessageType::GpaIntercept,
        Resolved::DeviceOfChild => MessageType::UnmappedGpa,
        Resolved::Deposited => {
            run.owner.arch.read_ones();
            return Next::Resume;
        }
        _ => {
            run.vm.stop_by(run.index, StopReason::Unsupported, format_args!("{gpa}: {resolved:?}"));
            return Next::Resume;
        }
    };
    intercept(run, kind, &gpa.0.to_le_bytes())
}

/// Writes to a word that was found before if it is still valid. A child's word that is not there now is its parent's
/// business; those of other VMs are always there.
fn write_by_host(run: &mut Running<'_>, gpa: Gpa, value: u64) -> Next {
    let memory = &run.vm.memory;
    let write = |word| memory.compare_exchange(word, memory.load(word, 0), value);
    if let Some((_, word)) = run.owner.arch.found.filter(|(at, _)| *at == gpa.0)
        && write(word)
    {
        return Next::Resume;
    }
    run.owner.arch.found = memory.find_word(gpa).map(|word| (gpa.0, word));
    // And by a copy, with another value.
    let is_written = memory.write(Gpa(gpa.0 + 8), &value.to_le_bytes());
    if run.owner.arch.found.is_some_and(|(_, word)| write(word)) && is_written {
        return Next::Resume;
    }
    assert!(run.vm.as_child().is_some(), "{gpa} of {} is not found", run.vm.name());
    run.owner.arch.again();
    resolve(run, gpa, true, false)
}

fn flush(run: &mut Running<'_>, vcpus: u64, page: Option<u64>) {
    let plan = match page {
        None => Plan::whole(),
        Some(page) => {
            let mut plan = Plan::new(CutOff::default());
            plan.add(Pages::new(page << 12, 1));
            plan
        }
    };
    let vm = run.vm;
    vm.memory.flush(&plan, vm.vcpus(), Targets::Mask(vcpus), Some(run));
}
