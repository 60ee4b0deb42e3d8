//! The table of calls: one row for each, with all facts that are known before its input is read.
//!
//! A row gives the call's number (TLFS; Linux' `HVCALL_*`), the parts of its input and output ([`Shape`]), how its work
//! may be divided ([`Continuation`]), and what a caller must have been offered ([`Offered`]).
//!
//! The calls for parents are those that Linux' driver `/dev/mshv` and the virtual machine monitors above it make, as a
//! level-1 virtualization host. A call that is not here does not exist for any guest.

use crate::call::Offered;
use crate::hypercall::{Control, Status};

/// The facts about a call that are known before its input is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The parts of its input and output.
    pub shape: Shape,
    /// How its work may be divided.
    pub continuation: Continuation,
    /// What its caller must have been offered.
    pub needs: Offered,
}

/// How a call's work may be divided, so that none holds a processor for long (TLFS, "Hypercall Continuation").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// Not divided: its work is short and bounded.
    Never,
    /// After each element: the caller calls again, or its instruction is repeated, from the next element on.
    Elements,
    /// Anywhere: the caller's instruction is repeated with the same words. The hypervisor remembers its progress.
    Whole,
}

/// Bytes in a word: the unit of variable headers.
pub const WORD_BYTES: usize = 8;

/// The parts of a call's input and output, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes in the fixed header.
    pub fixed_header_bytes: usize,
    /// Whether a variable header may follow; the control word gives its number of words.
    pub variable: bool,
    /// The elements of the lists that follow in input and output, if it is a rep call.
    pub rep: Option<Elements>,
    /// Bytes in the output, at most, if it is not a list.
    pub output_bytes: usize,
}

/// Sizes of a rep call's elements, in bytes. Zero: there is no such list, and the call only counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements {
    /// Of an element of the input.
    pub input: usize,
    /// Of an element of the output.
    pub output: usize,
}

impl Shape {
    const fn simple(fixed_header_bytes: usize) -> Self {
        Self { fixed_header_bytes, variable: false, rep: None, output_bytes: 0 }
    }

    const fn rep(fixed_header_bytes: usize, input: usize, output: usize) -> Self {
        Self { fixed_header_bytes, variable: false, rep: Some(Elements { input, output }), output_bytes: 0 }
    }

    const fn with_variable_header(self) -> Self {
        Self { variable: true, ..self }
    }

    const fn with_output(self, output_bytes: usize) -> Self {
        Self { output_bytes, ..self }
    }

    /// Bytes of input before the list.
    #[must_use]
    pub const fn header_bytes(&self, control: Control) -> usize {
        self.fixed_header_bytes + if self.variable { control.variable_words() as usize * WORD_BYTES } else { 0 }
    }

    /// Bytes of input in total: headers, and the whole list from its first element. At most 32 + 1023 words + 4095
    /// elements, so the sum cannot overflow.
    #[must_use]
    pub const fn input_bytes(&self, control: Control) -> usize {
        let list = match self.rep {
            Some(elements) => control.rep_count() as usize * elements.input,
            None => 0,
        };
        self.header_bytes(control) + list
    }

    /// Bytes of output in total, at most: the whole list from its first element, or the output of a simple call.
    #[must_use]
    pub const fn output_bytes(&self, control: Control) -> usize {
        match self.rep {
            Some(elements) => control.rep_count() as usize * elements.output,
            None => self.output_bytes,
        }
    }

    /// Whether the call answers with more than its result word.
    #[must_use]
    pub const fn has_output(&self) -> bool {
        self.output_bytes != 0 || matches!(self.rep, Some(elements) if elements.output != 0)
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $shape:expr, $continuation:ident, $needs:expr;)*) => {
        /// Calls that this crate can parse. No other call exists here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Code {
            $($(#[$doc])* $name = $number,)*
        }

        impl Code {
            /// All of them, in ascending order.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The call's row.
            #[must_use]
            #[inline]
            pub const fn row(self) -> &'static Row {
                match self {
                    $(Self::$name => const {
                        &Row { shape: $shape, continuation: Continuation::$continuation, needs: $needs }
                    })*
                }
            }
        }

        impl TryFrom<u16> for Code {
            type Error = Status;

            #[inline]
            fn try_from(code: u16) -> Result<Self, Status> {
                match code {
                    $($number => Ok(Self::$name),)*
                    _ => Err(Status::InvalidHypercallCode),
                }
            }
        }
    };
}

calls! {
    /// Flush the TLBs of up to 64 VPs.
    FlushVirtualAddressSpace = 0x0002, Shape::simple(24), Never, Offered::FLUSH;
    /// Flush a list of addresses from the TLBs of up to 64 VPs.
    FlushVirtualAddressList = 0x0003, Shape::rep(24, 8, 0), Elements, Offered::FLUSH;
    /// The guest has waited very long for a spin lock.
    NotifyLongSpinWait = 0x0008, Shape::simple(8), Never, Offered::empty();
    /// Send an interrupt to up to 64 VPs.
    SendSyntheticClusterIpi = 0x000b, Shape::simple(16), Never, Offered::CLUSTER_IPI;
    /// Flush the TLBs of a sparse set of VPs.
    FlushVirtualAddressSpaceEx = 0x0013,
        Shape::simple(32).with_variable_header(), Never, Offered::FLUSH.union(Offered::EX);
    /// Flush a list of addresses from the TLBs of a sparse set of VPs.
    FlushVirtualAddressListEx = 0x0014,
        Shape::rep(32, 8, 0).with_variable_header(), Elements, Offered::FLUSH.union(Offered::EX);
    /// Send an interrupt to a sparse set of VPs.
    SendSyntheticClusterIpiEx = 0x0015,
        Shape::simple(24).with_variable_header(), Never, Offered::CLUSTER_IPI.union(Offered::EX);
    /// Create a partition: a VM whose parent is the caller.
    CreatePartition = 0x0040, Shape::simple(56).with_output(8), Never, Offered::PARTITIONS;
    /// Prepare a created partition for memory and VPs.
    InitializePartition = 0x0041, Shape::simple(8), Never, Offered::PARTITIONS;
    /// Stop a partition for ever.
    FinalizePartition = 0x0042, Shape::simple(8), Whole, Offered::PARTITIONS;
    /// Remove a finalized partition.
    DeletePartition = 0x0043, Shape::simple(8), Whole, Offered::PARTITIONS;
    /// Read a property of a partition, of 64 bits.
    GetPartitionProperty = 0x0044, Shape::simple(16).with_output(8), Never, Offered::PARTITIONS;
    /// Change a property of a partition.
    SetPartitionProperty = 0x0045, Shape::simple(24), Never, Offered::PARTITIONS;
    /// Give pages to the hypervisor, for its own structures of a partition.
    DepositMemory = 0x0048, Shape::rep(8, 8, 0), Elements, Offered::MEMORY_POOL;
    /// Take deposited pages back.
    WithdrawMemory = 0x0049, Shape::rep(16, 0, 8), Elements, Offered::MEMORY_POOL;
    /// Map pages of the caller into a partition, or remove access to them.
    MapGpaPages = 0x004b, Shape::rep(24, 8, 0), Elements, Offered::PARTITIONS;
    /// Unmap pages from a partition.
    UnmapGpaPages = 0x004c, Shape::rep(24, 0, 0), Elements, Offered::PARTITIONS;
    /// Request messages about events of a kind.
    InstallIntercept = 0x004d, Shape::simple(24), Never, Offered::PARTITIONS;
    /// Create a VP.
    CreateVp = 0x004e, Shape::simple(40), Never, Offered::PARTITIONS;
    /// Delete a VP.
    DeleteVp = 0x004f, Shape::simple(16), Never, Offered::PARTITIONS;
    /// Read registers of a VP.
    GetVpRegisters = 0x0050, Shape::rep(16, 4, 16), Elements, Offered::PARTITIONS;
    /// Write registers of a VP. Two of them suspend and resume it.
    SetVpRegisters = 0x0051, Shape::rep(16, 32, 0), Elements, Offered::PARTITIONS;
    /// Translate a virtual address as a VP would.
    TranslateVirtualAddress = 0x0052, Shape::simple(32).with_output(16), Never, Offered::PARTITIONS;
    /// Take back an interrupt of the partition's external interrupt controller.
    ClearVirtualInterrupt = 0x0056, Shape::simple(8), Never, Offered::PARTITIONS;
    /// Delete a port.
    DeletePort = 0x0058, Shape::simple(16), Never, Offered::CREATE_PORT;
    /// Remove a connection to a port.
    DisconnectPort = 0x005b, Shape::simple(16), Never, Offered::CONNECT_PORT;
    /// Send a message to a port: here, to the host's side of VMBus.
    PostMessage = 0x005c, Shape::simple(256), Never, Offered::POST_MESSAGES;
    /// Unmap a page of statistics.
    UnmapStatsPage = 0x006d, Shape::simple(24), Never, Offered::STATISTICS;
    /// The caller has emptied an event ring that was full.
    NotifyPortRingEmpty = 0x008b, Shape::simple(8), Never, Offered::CREATE_PORT;
    /// Fix what CPUID answers to a VP.
    RegisterInterceptResult = 0x0091, Shape::simple(60), Never, Offered::PARTITIONS;
    /// Raise an interrupt in a partition.
    AssertVirtualInterrupt = 0x0094, Shape::simple(32), Never, Offered::PARTITIONS;
    /// Create a port, on which a partition receives.
    CreatePort = 0x0095, Shape::simple(56), Never, Offered::CREATE_PORT;
    /// Connect a partition to a port.
    ConnectPort = 0x0096, Shape::simple(72), Never, Offered::CONNECT_PORT;
    /// Read, and clear or set, which pages were accessed and written to.
    GetGpaPagesAccessStates = 0x00c9, Shape::rep(24, 0, 1), Elements, Offered::PARTITIONS;
    /// Map a page that shows the state of a VP.
    MapVpStatePage = 0x00e1, Shape::simple(24).with_output(8), Never, Offered::PARTITIONS;
    /// Unmap a page that shows the state of a VP.
    UnmapVpStatePage = 0x00e2, Shape::simple(16), Never, Offered::PARTITIONS;
    /// Read state of a VP that is not in registers. Its variable header is a list of pages.
    GetVpState = 0x00e3, Shape::simple(40).with_variable_header().with_output(200), Never, Offered::PARTITIONS;
    /// Change state of a VP that is not in registers. Its variable header is a list of pages, or the state.
    SetVpState = 0x00e4, Shape::simple(40).with_variable_header(), Never, Offered::PARTITIONS;
    /// Read what CPUID answers to a VP.
    GetVpCpuidValues = 0x00f4, Shape::rep(24, 8, 16), Elements, Offered::PARTITIONS;
    /// Read a property of a partition, of any size.
    GetPartitionPropertyEx = 0x0101,
        Shape::simple(24).with_output(LARGEST_PROPERTY), Never, Offered::PARTITIONS;
    /// Map a page of statistics, at a place that the caller chooses.
    MapStatsPage2 = 0x0131, Shape::simple(32).with_output(8), Never, Offered::STATISTICS;
}

/// Bytes of the largest property: the capabilities for a virtual machine monitor.
pub const LARGEST_PROPERTY: usize = 16;

impl Code {
    /// The parts of the call's input and output.
    #[must_use]
    #[inline]
    pub const fn shape(self) -> &'static Shape {
        &self.row().shape
    }
}
