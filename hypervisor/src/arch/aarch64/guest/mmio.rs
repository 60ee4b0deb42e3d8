//! The guest's accesses to addresses without memory: devices.
//!
//! The syndrome describes plain loads and stores completely, so no code decodes an instruction. Accesses that it does
//! not describe (pairs, vectors, write-back) are not for devices; they end in an external abort, like those to an
//! address without a device.

use aarch64_defs::syndrome::{DataAccess, Fault, Syndrome};
use abi::control::Line;
use abi::counters::ExitReason;
use addr::Gpa;
use log::debug;

use super::{layout, own_machine, platform};
use crate::device::gic::{self, Width};
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;

/// The guest accesses a device, or nothing.
// Not inlined, so that faults on memory do not need its stack space.
#[inline(never)]
pub(in crate::arch::aarch64) fn access(run: &mut Running<'_>, gpa: Gpa, syndrome: Syndrome) -> Next {
    run.tally.exit(ExitReason::Mmio);
    if run.vm.platform().own_machine.is_some()
        && let Some(next) = own_machine::access(run, gpa)
    {
        return next;
    }
    let arch = &mut run.owner.arch;
    let is_plain = syndrome.fault() == Fault::Translation && !syndrome.is_table_walk();
    let Some(access) = syndrome.data_access().filter(|_| is_plain) else {
        debug!("{} vCPU {}: external abort at GPA {gpa}, {}", run.vm.name(), run.index, arch.whereabouts());
        arch.external_abort(false);
        return Next::Resume;
    };

    let answered = if access.is_write {
        let value = truncated(arch.general(access.general), access.bytes);
        write(run, gpa, access.bytes, value)
    } else {
        match read(run, gpa, access.bytes) {
            Read::Value(value) => {
                run.owner.arch.set_general(access.general, extended(value, access));
                true
            }
            Read::Retry => return Next::Resume,
            Read::Nobody => false,
        }
    };
    if answered {
        run.owner.arch.skip();
    } else {
        let whereabouts = run.owner.arch.whereabouts();
        debug!("{} vCPU {}: no device at GPA {gpa}, {whereabouts}", run.vm.name(), run.index);
        run.owner.arch.external_abort(false);
    }
    Next::Resume
}

/// The lower `bytes` of a value.
fn truncated(value: u64, bytes: u8) -> u64 {
    if bytes >= 8 { value } else { value & ((1 << (8 * u32::from(bytes))) - 1) }
}

/// The value that a load writes to its register.
fn extended(value: u64, access: DataAccess) -> u64 {
    let value = truncated(value, access.bytes);
    let shift = 64 - 8 * u32::from(access.bytes.min(8));
    let value = if access.is_signed { ((value << shift).cast_signed() >> shift).cast_unsigned() } else { value };
    if access.is_64_bit { value } else { value & 0xffff_ffff }
}

/// The serial port at this address, and which of its registers.
fn serial_at(vm: &Vm, gpa: Gpa) -> Option<(Line, u16)> {
    crate::vm::LINES.into_iter().find_map(|line| {
        let offset =
            gpa.0.checked_sub(vm.platform().layout.serial(line).0.0).filter(|&offset| offset < layout::SERIAL_BYTES)?;
        Some((line, u16::try_from(offset).ok()?))
    })
}

/// Result of a read.
enum Read {
    Value(u64),
    /// None yet: the guest must retry.
    Retry,
    /// There is no device.
    Nobody,
}

fn read(run: &mut Running<'_>, gpa: Gpa, bytes: u8) -> Read {
    if let Some((line, offset)) = serial_at(run.vm, gpa) {
        return Read::Value(platform::read_serial(run.vm, line, offset).into());
    }
    let Some(width) = width(bytes) else { return Read::Nobody };
    if let Some(offset) = offset_in(gpa, run.vm.platform().layout.distributor, layout::DISTRIBUTOR_BYTES) {
        let gic = &mut run.owner.arch.gic;
        let found = gic.read_distributor(&mut run.vm.platform().distributor.lock(), offset, width);
        platform::deliver_news_of(run);
        return match found {
            gic::Read::Value(value) => Read::Value(value),
            gic::Read::Retry => Read::Retry,
        };
    }
    let Some((number, offset)) = redistributor_at(run, gpa) else {
        let found = own_machine::read(run.vm, gpa);
        return found.map_or(Read::Nobody, Read::Value);
    };
    let gic = &mut run.owner.arch.gic;
    let value = gic.read_redistributor(&mut run.vm.platform().distributor.lock(), number, offset, width);
    platform::deliver_news_of(run);
    Read::Value(value)
}

/// Does a store; returns whether there is a device.
fn write(run: &mut Running<'_>, gpa: Gpa, bytes: u8, value: u64) -> bool {
    if let Some((line, offset)) = serial_at(run.vm, gpa) {
        #[expect(clippy::cast_possible_truncation, reason = "registers have at most 32 bits")]
        platform::write_serial(run.vm, line, offset, value as u32);
        return true;
    }
    let Some(width) = width(bytes) else { return false };
    if let Some(offset) = offset_in(gpa, run.vm.platform().layout.distributor, layout::DISTRIBUTOR_BYTES) {
        let gic = &mut run.owner.arch.gic;
        gic.write_distributor(&mut run.vm.platform().distributor.lock(), offset, width, value);
        platform::deliver_news_of(run);
        return true;
    }
    let Some((number, offset)) = redistributor_at(run, gpa) else { return own_machine::write(run, gpa, value) };
    let gic = &mut run.owner.arch.gic;
    gic.write_redistributor(&mut run.vm.platform().distributor.lock(), number, offset, width, value);
    platform::deliver_news_of(run);
    run.owner.arch.check_timer_link();
    true
}

/// The redistributor at this address: its vCPU, and the register.
fn redistributor_at(run: &Running<'_>, gpa: Gpa) -> Option<(u32, u32)> {
    let offset = gpa.0.checked_sub(run.vm.platform().layout.redistributors.0)?;
    let (number, offset) = gic::frame(offset);
    let number = u32::try_from(number).ok().filter(|&number| number < run.vm.config.vcpus)?;
    Some((number, offset))
}

fn offset_in(gpa: Gpa, start: Gpa, bytes: u64) -> Option<u32> {
    gpa.0.checked_sub(start.0).filter(|&offset| offset < bytes).and_then(|offset| u32::try_from(offset).ok())
}

fn width(bytes: u8) -> Option<Width> {
    match bytes {
        1 => Some(Width::Byte),
        2 => Some(Width::Half),
        4 => Some(Width::Word),
        8 => Some(Width::Double),
        _ => None,
    }
}
