//! A guest of another process: its partition and its virtual processors, as the device knows them.
//!
//! QEMU has a descriptor for each. A copy of it makes the same calls, whoever makes them: the kernel looks at the
//! descriptor alone. While QEMU runs a processor, calls about it wait, and a processor may run for ever. So what asks
//! for processors is a type of its own, [`Vps`], which is made when the guest is stopped.

use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result, bail, ensure};
use hyperv_defs::Register;
use hyperv_defs::page::LocalApicState;
use hyperv_defs::property::{ProcessorFeatures, Property};

use crate::system::{PAGE, Page, Process, call};

/// Calls of the device (Linux' `linux/mshv.h`).
mod request {
    pub(super) const HYPERCALL: u32 = 0xc020_b807;
    pub(super) const GET_STATE: u32 = 0xc010_b801;
    pub(super) const SET_STATE: u32 = 0xc010_b802;
}

/// Hypercalls that the kernel passes on.
mod code {
    pub(super) const GET_PROPERTY: u16 = 0x44;
    pub(super) const SET_PROPERTY: u16 = 0x45;
    pub(super) const GET_REGISTERS: u16 = 0x50;
    pub(super) const SET_REGISTERS: u16 = 0x51;
}

const X2APIC: u128 = 1 << 10;

/// A part of a processor's state that is not a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    LocalApic = 0,
    Xsave = 1,
    SyntheticTimers = 4,
}

/// A guest.
#[derive(Debug)]
pub(crate) struct Guest {
    partition: OwnedFd,
    vps: Vec<OwnedFd>,
}

/// The virtual processors of a guest that is stopped, by their numbers.
#[derive(Debug)]
pub(crate) struct Vps<'a>(Vec<BorrowedFd<'a>>);

impl Guest {
    /// The only guest of this process.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let process = Process::open(pid).with_context(|| format!("no process {pid}"))?;
        let (mut partition, mut vps) = (None, Vec::new());
        for number in descriptors(pid)? {
            let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap_or_default();
            let copy = || process.descriptor(number).with_context(|| format!("descriptor {number} of process {pid}"));
            match kind(&link.to_string_lossy()) {
                Some(Kind::Partition) => {
                    ensure!(partition.is_none(), "process {pid} has two guests");
                    partition = Some(copy()?);
                }
                Some(Kind::Vp) => vps.push(copy()?),
                None => {}
            }
        }
        let partition = partition.with_context(|| format!("process {pid} has no guest of /dev/mshv"))?;
        ensure!(!vps.is_empty(), "the guest of process {pid} has no vCPU yet");
        Ok(Self { partition, vps })
    }

    /// Number of its processors.
    pub(crate) fn count(&self) -> usize {
        self.vps.len()
    }

    /// Its processors. The guest must be stopped: otherwise this waits until each of them has an exit to QEMU.
    pub(crate) fn vps(&self) -> Result<Vps<'_>> {
        Vps(self.vps.iter().map(|vp| vp.as_fd()).collect()).in_order()
    }

    /// A property of the partition.
    pub(crate) fn property(&self, property: Property) -> Result<u64> {
        let input = [0, property as u64].map(u64::to_le_bytes).concat();
        let output = hypercall(self.partition.as_fd(), code::GET_PROPERTY, 0, &input, 8)?;
        Ok(u64::from_le_bytes(output[..].try_into()?))
    }

    /// Sets it.
    pub(crate) fn set_property(&self, property: Property, value: u64) -> Result<()> {
        let input = [0, property as u64, value].map(u64::to_le_bytes).concat();
        hypercall(self.partition.as_fd(), code::SET_PROPERTY, 0, &input, 0).map(|_| ())
    }

    /// Features of the processor that the guest may have.
    pub(crate) fn features(&self) -> Result<ProcessorFeatures> {
        let banks = [Property::ProcessorFeatures0, Property::ProcessorFeatures1];
        let [low, high] = banks.map(|bank| self.property(bank));
        Ok(ProcessorFeatures::of_banks([low?, high?]))
    }
}

impl Vps<'_> {
    /// A descriptor does not tell which processor it is. Its local APIC does.
    fn in_order(mut self) -> Result<Self> {
        let mut ids = Vec::new();
        for vp in &self.0 {
            let state = get_part(*vp, Part::LocalApic)?;
            ids.push(LocalApicState::from_bytes(&state).context("a short state")?.id.get());
        }
        let mut ordered = Vec::new();
        for index in 0..self.0.len() {
            // By any of the descriptors: the call names the processor.
            let [id, base]: [u128; 2] =
                self.registers(index, &[Register::InitialApicId, Register::ApicBase])?[..].try_into()?;
            let shown = if base & X2APIC == 0 { id << 24 & 0xffff_ffff } else { id };
            let found = ids.iter().position(|id| u128::from(*id) == shown);
            ordered.push(self.0[found.with_context(|| format!("no vCPU has the local APIC of vCPU {index}"))?]);
        }
        self.0 = ordered;
        Ok(self)
    }

    /// Their number.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    fn vp(&self, index: usize) -> Result<BorrowedFd<'_>> {
        self.0.get(index).copied().with_context(|| format!("the guest has no vCPU {index}"))
    }

    /// Registers of a processor.
    pub(crate) fn registers(&self, index: usize, names: &[Register]) -> Result<Vec<u128>> {
        let mut input = header(index)?;
        input.extend(names.iter().flat_map(|name| name.number().to_le_bytes()));
        let output = hypercall(self.vp(index)?, code::GET_REGISTERS, names.len(), &input, names.len() * 16)?;
        Ok(output.chunks_exact(16).map(|value| u128::from_le_bytes(value.try_into().unwrap_or_default())).collect())
    }

    /// Sets them.
    pub(crate) fn set_registers(&self, index: usize, registers: &[(Register, u128)]) -> Result<()> {
        let mut input = header(index)?;
        for (name, value) in registers {
            input.extend([name.number().to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat());
            input.extend(value.to_le_bytes());
        }
        hypercall(self.vp(index)?, code::SET_REGISTERS, registers.len(), &input, 0).map(|_| ())
    }

    /// The time that each processor has had.
    pub(crate) fn run_times(&self) -> Result<Vec<u128>> {
        let times = (0..self.count()).map(|index| self.registers(index, &[Register::VpRuntime]));
        Ok(times.collect::<Result<Vec<_>>>()?.concat())
    }

    /// A part of a processor's state.
    pub(crate) fn part(&self, index: usize, part: Part) -> Result<Vec<u8>> {
        get_part(self.vp(index)?, part)
    }

    /// Sets it.
    pub(crate) fn set_part(&self, index: usize, part: Part, state: &[u8]) -> Result<()> {
        ensure!(state.len() <= PAGE, "a state of {} bytes", state.len());
        let mut page = Page::new(state);
        call(self.vp(index)?, request::SET_STATE, [&mut page], |[at]| of_part(part, at))
            .with_context(|| format!("setting {part:?}"))
    }

    /// Number of the page of the reference clock, which the hypervisor writes; of no page if it is off.
    pub(crate) fn clock_page(&self) -> Result<u64> {
        let [clock]: [u128; 1] = self.registers(0, &[Register::ReferenceTsc])?[..].try_into()?;
        Ok(if clock & 1 == 0 { u64::MAX } else { u64::try_from(clock >> 12)? })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Partition,
    Vp,
}

/// What a descriptor is, by what its link in `/proc` says.
fn kind(link: &str) -> Option<Kind> {
    match link.strip_prefix("anon_inode:")?.trim_matches(['[', ']']) {
        "mshv_partition" => Some(Kind::Partition),
        "mshv_vp" => Some(Kind::Vp),
        _ => None,
    }
}

/// Numbers of a process' descriptors, in ascending order.
fn descriptors(pid: u32) -> Result<Vec<i32>> {
    let folder = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?;
    let mut numbers: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The argument of the calls for states: kind, length and address.
fn of_part(part: Part, at: u64) -> [u64; 2] {
    [part as u64 | (PAGE as u64) << 32, at]
}

fn get_part(vp: BorrowedFd<'_>, part: Part) -> Result<Vec<u8>> {
    let mut page = Page::new(&[]);
    call(vp, request::GET_STATE, [&mut page], |[at]| of_part(part, at)).with_context(|| format!("reading {part:?}"))?;
    let length = match part {
        Part::LocalApic => size_of::<LocalApicState>(),
        // As much of it as there is, behind which the page is zero.
        Part::Xsave => page.bytes().iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1),
        Part::SyntheticTimers => size_of::<hyperv_defs::page::TimersState>(),
    };
    Ok(page.bytes()[..length].to_vec())
}

/// Partition, which the kernel fills in, and processor.
fn header(index: usize) -> Result<Vec<u8>> {
    Ok([0, u64::from(u32::try_from(index)?)].map(u64::to_le_bytes).concat())
}

/// Makes a hypercall with this input and an output of so many bytes.
fn hypercall(device: BorrowedFd<'_>, code: u16, reps: usize, input: &[u8], output: usize) -> Result<Vec<u8>> {
    if input.len() > PAGE || output > PAGE {
        bail!("hypercall {code:#x} of {} and {output} bytes", input.len());
    }
    let (mut from, mut to) = (Page::new(input), Page::new(&[]));
    let lengths = [usize::from(code), reps, input.len(), output];
    let first = lengths.into_iter().rev().fold(0, |all, part| all << 16 | part as u64);
    call(device, request::HYPERCALL, [&mut from, &mut to], |[from, to]| {
        [first, 0, from, if output == 0 { 0 } else { to }]
    })
    .with_context(|| format!("hypercall {code:#x}"))?;
    Ok(to.bytes()[..output].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_of_guests_are_known_by_their_links() {
        assert_eq!(kind("anon_inode:mshv_vp"), Some(Kind::Vp));
        assert_eq!(kind("anon_inode:[mshv_partition]"), Some(Kind::Partition));
        for other in ["anon_inode:[eventfd]", "/dev/mshv", "socket:[99]", "mshv_vp", ""] {
            assert_eq!(kind(other), None, "{other}");
        }
    }

    #[test]
    fn process_without_a_guest_is_named() {
        let pid = std::process::id();
        let error = Guest::of(pid).expect_err("a test has none");
        assert_eq!(error.to_string(), format!("process {pid} has no guest of /dev/mshv"));
    }
}
