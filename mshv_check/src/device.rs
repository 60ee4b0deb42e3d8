//! The device's calls: partitions, their VPs and memory, and hypercalls that the kernel passes on.
//!
//! Arguments are arrays of numbers, in the layout of `linux/mshv.h`.

use std::fs::File;
use std::io::Result;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use crate::message::{LENGTH, Message};
use crate::system::{Mapping, call, own};

/// Numbers of calls. Those of one kind of descriptor start at 0 again.
pub(crate) mod request {
    pub(crate) const CREATE_PARTITION: u32 = 0x4010_b800;
    pub(crate) const HYPERCALL: u32 = 0xc020_b807;
    pub(crate) const INITIALIZE: u32 = 0xb800;
    pub(crate) const CREATE_VP: u32 = 0x4004_b801;
    pub(crate) const SET_MEMORY: u32 = 0x4020_b802;
    pub(crate) const IRQFD: u32 = 0x4010_b803;
    pub(crate) const IOEVENTFD: u32 = 0x4020_b804;
    pub(crate) const SET_ROUTES: u32 = 0x4008_b805;
    pub(crate) const GET_ACCESS_BITS: u32 = 0xc020_b806;
    pub(crate) const RUN: u32 = 0x8100_b800;
    pub(crate) const GET_STATE: u32 = 0xc010_b801;
    pub(crate) const SET_STATE: u32 = 0xc010_b802;
}

/// The hypercalls that this program makes.
pub(crate) mod code {
    pub(crate) const SET_PROPERTY: u16 = 0x45;
    pub(crate) const GET_REGISTERS: u16 = 0x50;
    pub(crate) const SET_REGISTERS: u16 = 0x51;
    pub(crate) const CLEAR_INTERRUPT: u16 = 0x56;
    pub(crate) const ASSERT_INTERRUPT: u16 = 0x94;
    /// All that the kernel passes on.
    pub(crate) const PASSED_ON: [u16; 14] =
        [0x44, 0x101, 0x45, 0x4d, 0x50, 0x51, 0x52, 0x56, 0x91, 0x94, 0xc9, 0xc0, 0xc1, 0xf4];
}

/// Names of registers.
pub(crate) mod register {
    pub(crate) const EXPLICIT_SUSPEND: u32 = 0;
    pub(crate) const RAX: u32 = 0x20000;
    pub(crate) const RDX: u32 = 0x20002;
    pub(crate) const RBX: u32 = 0x20003;
    pub(crate) const RBP: u32 = 0x20005;
    pub(crate) const RSI: u32 = 0x20006;
    pub(crate) const RIP: u32 = 0x20010;
    pub(crate) const RFLAGS: u32 = 0x20011;
    pub(crate) const CR0: u32 = 0x40000;
    pub(crate) const ES: u32 = 0x60000;
    pub(crate) const CS: u32 = 0x60001;
    pub(crate) const SS: u32 = 0x60002;
    pub(crate) const DS: u32 = 0x60003;
}

/// Flags of a partition: it has local APICs, with x2APIC mode.
const APICS: u64 = 3;
/// Flags of memory.
pub(crate) const WRITABLE: u64 = 1;
pub(crate) const EXECUTABLE: u64 = 2;
pub(crate) const UNMAP: u64 = 4;

/// `/dev/mshv`.
#[derive(Debug)]
pub(crate) struct Device(File);

impl Device {
    pub(crate) fn open() -> Result<Self> {
        Ok(Self(File::options().read(true).write(true).open("/dev/mshv")?))
    }

    pub(crate) fn create_partition(&self) -> Result<Partition> {
        let partition = call(self.0.as_fd(), request::CREATE_PARTITION, &mut [APICS, 0])?;
        Ok(Partition(own(partition)))
    }

    /// One that has been initialized, too.
    pub(crate) fn partition(&self) -> Result<Partition> {
        let partition = self.create_partition()?;
        partition.initialize()?;
        Ok(partition)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A partition. It ends when it and its VPs are dropped.
#[derive(Debug)]
pub(crate) struct Partition(OwnedFd);

impl Partition {
    pub(crate) fn initialize(&self) -> Result<()> {
        crate::system::call_at(self.0.as_fd(), request::INITIALIZE, 0).map(|_| ())
    }

    /// Sets a property to this value.
    pub(crate) fn set_property(&self, property: u64, value: u64) -> Result<()> {
        // The kernel fills in the partition.
        hypercall(self.as_fd(), code::SET_PROPERTY, 0, &[0, property, value], 0).map(|_| ())
    }

    /// Asserts an interrupt of this kind and vector, to the VP whose local APIC has the id 0.
    pub(crate) fn interrupt(&self, kind: u64, vector: u64) -> Result<()> {
        hypercall(self.as_fd(), code::ASSERT_INTERRUPT, 0, &[0, kind, 0, vector], 0).map(|_| ())
    }

    /// An NMI for all VPs.
    pub(crate) fn interrupt_all(&self) -> Result<()> {
        const NMI: u64 = 4;
        const EVERYBODY: u64 = 0xffff_ffff;
        hypercall(self.as_fd(), code::ASSERT_INTERRUPT, 0, &[0, NMI, EVERYBODY, 2], 0).map(|_| ())
    }

    /// No external interrupt waits any more.
    pub(crate) fn withdraw_interrupts(&self) -> Result<()> {
        hypercall(self.as_fd(), code::CLEAR_INTERRUPT, 0, &[0], 0).map(|_| ())
    }

    pub(crate) fn create_vp(&self, index: u32) -> Result<Vp> {
        let fd = call(self.0.as_fd(), request::CREATE_VP, &mut { index })?;
        Ok(Vp { fd: own(fd), index })
    }

    /// Gives the guest all of this memory, from this page on.
    pub(crate) fn set_memory(&self, mapping: &Mapping, guest_page: u64) -> Result<()> {
        self.change_memory([mapping.bytes(), guest_page, mapping.address(), WRITABLE | EXECUTABLE])
    }

    /// The raw call: bytes, guest page, address, flags.
    pub(crate) fn change_memory(&self, mut region: [u64; 4]) -> Result<()> {
        call(self.0.as_fd(), request::SET_MEMORY, &mut region).map(|_| ())
    }
}

impl AsFd for Partition {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A virtual processor.
#[derive(Debug)]
pub(crate) struct Vp {
    fd: OwnedFd,
    index: u32,
}

/// The kind of a VP's page, as an offset for mmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VpPage {
    Registers = 0,
    Message = 1,
}

/// A part of a VP's state besides its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateKind {
    LocalApic,
    Xsave,
    MessagePage,
    EventFlagsPage,
    SyntheticTimers,
}

impl StateKind {
    pub(crate) const ALL: [Self; 5] =
        [Self::LocalApic, Self::Xsave, Self::MessagePage, Self::EventFlagsPage, Self::SyntheticTimers];
}

/// The argument of the calls for states: kind, length and address.
fn state(kind: StateKind, page: &Mapping) -> [u64; 2] {
    [kind as u64 | page.bytes() << 32, page.address()]
}

impl Vp {
    pub(crate) fn page(&self, page: VpPage) -> Result<Mapping> {
        Mapping::of_device(self.fd.as_fd(), page as usize)
    }

    /// Runs the guest until an exit that the kernel leaves to the VMM.
    pub(crate) fn run(&self) -> Result<Message> {
        let mut bytes = [0u8; LENGTH];
        call(self.fd.as_fd(), request::RUN, &mut bytes)?;
        Ok(Message::new(bytes))
    }

    pub(crate) fn set(&self, registers: &[(u32, u128)]) -> Result<()> {
        self.set_by(&Buffers::new(&[])?, registers)
    }

    /// The same with buffers that the caller keeps.
    pub(crate) fn set_by(&self, buffers: &Buffers, registers: &[(u32, u128)]) -> Result<()> {
        let mut input = self.header();
        for (name, value) in registers {
            input.extend([u64::from(*name), 0]);
            input.extend(halves(*value));
        }
        buffers.set_input(&input);
        let small = |number: usize| u16::try_from(number).map_err(std::io::Error::other);
        buffers.call(self.fd.as_fd(), [code::SET_REGISTERS, small(registers.len())?, small(input.len() * 8)?, 0])
    }

    pub(crate) fn get(&self, names: &[u32]) -> Result<Vec<u128>> {
        let mut input = self.header();
        for pair in names.chunks(2) {
            let second = pair.get(1).copied().unwrap_or_default();
            input.push(u64::from(pair[0]) | u64::from(second) << 32);
        }
        let output = hypercall(self.fd.as_fd(), code::GET_REGISTERS, names.len(), &input, names.len() * 2)?;
        Ok(output.chunks_exact(2).map(|pair| u128::from(pair[0]) | u128::from(pair[1]) << 64).collect())
    }

    /// Reads a state into this page.
    pub(crate) fn get_state(&self, kind: StateKind, page: &Mapping) -> Result<()> {
        call(self.fd.as_fd(), request::GET_STATE, &mut state(kind, page)).map(|_| ())
    }

    /// Sets a state from this page.
    pub(crate) fn set_state(&self, kind: StateKind, page: &Mapping) -> Result<()> {
        call(self.fd.as_fd(), request::SET_STATE, &mut state(kind, page)).map(|_| ())
    }

    /// Partition, which the kernel fills in, and VP.
    fn header(&self) -> Vec<u64> {
        vec![0, u64::from(self.index)]
    }
}

impl AsFd for Vp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The lower half comes first.
fn halves(value: u128) -> [u64; 2] {
    let bytes = value.to_le_bytes();
    let half = |at: usize| std::array::from_fn(|byte| bytes[at + byte]);
    [u64::from_le_bytes(half(0)), u64::from_le_bytes(half(8))]
}

/// A segment register: base, limit, selector and attributes.
pub(crate) fn segment(base: u64, limit: u32, selector: u16, attributes: u16) -> u128 {
    u128::from(base) | u128::from(limit) << 64 | u128::from(selector) << 96 | u128::from(attributes) << 112
}

/// Reads which of so many pages from the first one on were written, and changes that: clear is 1, set is 2.
pub(crate) fn call_for_bits(partition: BorrowedFd<'_>, first: u64, pages: usize, change: u64) -> Result<()> {
    const WRITTEN: u64 = 1;
    let bits = Mapping::anonymous(pages.div_ceil(8 * crate::system::PAGE))?;
    let mut argument = [WRITTEN | change << 8, pages as u64, first, bits.address()];
    call(partition, request::GET_ACCESS_BITS, &mut argument).map(|_| ())
}

/// A write of eight bytes to this address rings there.
pub(crate) fn doorbell(partition: BorrowedFd<'_>, event: BorrowedFd<'_>, address: u64) -> Result<()> {
    const BYTES: u64 = 8;
    let event = u64::from(event.as_raw_fd().cast_unsigned());
    call(partition, request::IOEVENTFD, &mut [0, address, BYTES | event << 32, 0]).map(|_| ())
}

/// A hypercall that the kernel passes on, with an output of `output_words`.
pub(crate) fn hypercall(
    device: BorrowedFd<'_>,
    code: u16,
    reps: usize,
    input: &[u64],
    output_words: usize,
) -> Result<Vec<u64>> {
    let buffers = Buffers::new(input)?;
    let bytes = |words: usize| u16::try_from(words * 8).map_err(std::io::Error::other);
    // The list of an odd number of names ends in the middle of a word.
    let input_bytes = match code {
        code::GET_REGISTERS => u16::try_from(16 + reps * 4).map_err(std::io::Error::other)?,
        _ => bytes(input.len())?,
    };
    let reps = u16::try_from(reps).map_err(std::io::Error::other)?;
    buffers.call(device, [code, reps, input_bytes, bytes(output_words)?])?;
    Ok((0..output_words).map(|at| buffers.output(at)).collect())
}

/// Input and output of a hypercall.
#[derive(Debug)]
pub(crate) struct Buffers(Mapping);

impl Buffers {
    const OUTPUT: usize = crate::system::PAGE;

    /// With this input, of at most a page.
    pub(crate) fn new(input: &[u64]) -> Result<Self> {
        let buffers = Self(Mapping::anonymous(2)?);
        buffers.set_input(input);
        Ok(buffers)
    }

    pub(crate) fn set_input(&self, input: &[u64]) {
        for (at, word) in input.iter().enumerate() {
            self.0.write(at * 8, &word.to_le_bytes());
        }
    }

    /// Makes the call with these numbers: code, repetitions, bytes of input, bytes of output.
    pub(crate) fn call(&self, device: BorrowedFd<'_>, [code, reps, input, output]: [u16; 4]) -> Result<()> {
        let first = [code, reps, input, output].into_iter().rev().fold(0, |all, part| all << 16 | u64::from(part));
        let to = if output == 0 { 0 } else { self.0.address() + Self::OUTPUT as u64 };
        call(device, request::HYPERCALL, &mut [first, 0, self.0.address(), to]).map(|_| ())
    }

    /// A word of the input.
    pub(crate) fn input(&self, at: usize) -> u64 {
        self.word(at * 8)
    }

    fn output(&self, at: usize) -> u64 {
        self.word(Self::OUTPUT + at * 8)
    }

    fn word(&self, at: usize) -> u64 {
        u64::from(self.0.word(at)) | u64::from(self.0.word(at + 4)) << 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_register_is_as_the_interface_has_it() {
        let bytes = segment(0x1122_3344, 0xffff, 0x18, 0x9b).to_le_bytes();
        assert_eq!(bytes[..8], 0x1122_3344u64.to_le_bytes());
        assert_eq!(bytes[8..], [0xff, 0xff, 0, 0, 0x18, 0, 0x9b, 0]);
        assert_eq!(halves(1 << 64 | 2), [2, 1]);
    }

    #[test]
    fn numbers_of_calls_name_the_size_of_their_argument() {
        let size = |request: u32| request >> 16 & 0x3fff;
        assert_eq!(size(request::RUN) as usize, LENGTH);
        assert_eq!(size(request::CREATE_VP), 4);
        assert_eq!([request::SET_MEMORY, request::HYPERCALL, request::GET_ACCESS_BITS].map(size), [32; 3]);
        assert_eq!([request::CREATE_PARTITION, request::GET_STATE, request::IRQFD].map(size), [16; 3]);
    }

    #[test]
    fn without_the_device_the_error_says_so() {
        if !std::path::Path::new("/dev/mshv").exists() {
            assert_eq!(Device::open().expect_err("is not there").kind(), std::io::ErrorKind::NotFound);
        }
    }
}
