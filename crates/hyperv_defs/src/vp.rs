//! Calls about virtual processors: their life, registers, and state.

use addr::{Gpa, Gva};
use bitflags::bitflags;

use crate::call::Checked;
use crate::hypercall::{Control, Status};
use crate::input::Words;
use crate::memory::{PageList, page_of_number};
use crate::partition::{PartitionId, word_at};
use crate::register::{Register, RegisterAssociation, RegisterValue};
use crate::wire::{U16, U32, U64, wire};

/// Index of a VP that means the caller itself (HV_VP_INDEX_SELF).
pub const VP_INDEX_SELF: u32 = 0xffff_fffe;
/// Index that means any VP (HV_ANY_VP).
pub const VP_INDEX_ANY: u32 = 0xffff_ffff;

/// Names a VP. It may not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vp {
    /// Its partition.
    pub partition: PartitionId,
    /// Its index there, or [`VP_INDEX_SELF`].
    pub index: u32,
}

wire! {
    /// A VP, at the start of most inputs (Linux' `hv_input_get_vp_registers` and others).
    pub struct VpHeader: 16 {
        /// The partition.
        pub partition: U64,
        /// The index.
        pub index: U32,
        /// The virtual trust level, where a call has one.
        pub vtl: u8,
        /// Ignored.
        pub reserved: [u8; 3],
    }

    /// Input of HvCallCreateVp (Linux' `hv_create_vp`). Linux leaves old bytes in all but the first two fields.
    pub struct CreateVpInput: 40 {
        /// The partition.
        pub partition: U64,
        /// The index.
        pub index: U32,
        /// Ignored.
        pub padding: [u8; 3],
        /// Where it is best. Ignored.
        pub subnode_type: u8,
        /// Ignored.
        pub subnode: U64,
        /// Ignored.
        pub proximity: U64,
        /// Ignored.
        pub flags: U64,
    }

    /// Input of HvCallMapVpStatePage (Linux' `hv_input_map_vp_state_page`). HvCallUnmapVpStatePage has its first 16
    /// bytes.
    pub struct StatePageInput: 24 {
        /// The partition.
        pub partition: U64,
        /// The VP.
        pub index: U32,
        /// [`StatePage`].
        pub kind: U16,
        /// The virtual trust level.
        pub vtl: u8,
        /// Bit 0: `location` is given.
        pub flags: u8,
        /// Number of the page, the caller's.
        pub location: U64,
    }

    /// Input of HvCallMapStatsPage2 (Linux' `hv_input_map_stats_page2`). HvCallUnmapStatsPage has its first 24 bytes.
    pub struct StatsPageInput: 32 {
        /// What is counted: a `HV_STATS_OBJECT_*`.
        pub object: U32,
        /// Ignored.
        pub padding: U32,
        /// The partition.
        pub partition: U64,
        /// The VP.
        pub index: U32,
        /// Ignored.
        pub reserved: [u8; 3],
        /// [`StatsArea`].
        pub area: u8,
        /// Number of the page, the caller's.
        pub location: U64,
    }

    /// Input of HvCallTranslateVirtualAddress (TLFS).
    pub struct TranslateInput: 32 {
        /// The VP.
        pub vp: VpHeader,
        /// [`TranslateFlags`], and a virtual trust level in bits 63:56.
        pub flags: U64,
        /// Number of the virtual page.
        pub page: U64,
    }

    /// Output of HvCallTranslateVirtualAddress (TLFS, HV_TRANSLATE_GVA_RESULT).
    pub struct Translation: 16 {
        /// [`TranslationCode`].
        pub code: U32,
        /// As [`crate::message::MemoryIntercept::cache_type`].
        pub cache_type: u8,
        /// Bit 0: an overlay page.
        pub overlay: u8,
        /// Zero.
        pub reserved: U16,
        /// Number of the physical page.
        pub page: U64,
    }

    /// Input of HvCallRegisterInterceptResult for CPUID (TLFS, HV_REGISTER_X64_CPUID_RESULT_PARAMETERS).
    pub struct CpuidResultInput: 60 {
        /// The partition.
        pub partition: U64,
        /// The VP.
        pub index: U32,
        /// What is registered: 2 is CPUID.
        pub kind: U32,
        /// The leaf.
        pub leaf: U32,
        /// The subleaf.
        pub subleaf: U32,
        /// 1: only for this subleaf.
        pub is_subleaf_specific: u8,
        /// 1: the result also replaces answers of the hypervisor's own.
        pub always_override: u8,
        /// Ignored.
        pub padding: U16,
        /// EAX, EBX, ECX, EDX: a value, and a mask of the bits that it decides.
        pub results: [[U32; 2]; 4],
    }

    /// Input of HvCallInstallIntercept (TLFS).
    pub struct InstallInterceptInput: 24 {
        /// The partition.
        pub partition: U64,
        /// Which accesses: bit 0 read, 1 write, 2 execute.
        pub access: U32,
        /// [`InterceptKind`].
        pub kind: U32,
        /// Which port, leaf, vector, or MSR.
        pub parameter: U64,
    }

    /// Input of HvCallGetVpState and HvCallSetVpState, before the variable header (Linux' `hv_input_get_vp_state`).
    pub struct StateInput: 40 {
        /// The VP.
        pub vp: VpHeader,
        /// [`StateKind`].
        pub kind: U32,
        /// Ignored.
        pub reserved: U32,
        /// For XSAVE: flags.
        pub xsave_flags: U64,
        /// For XSAVE: the components.
        pub xsave_states: U64,
    }

    /// Input of HvCallGetVpCpuidValues, before the list.
    pub struct CpuidValuesInput: 24 {
        /// The VP.
        pub vp: VpHeader,
        /// Ignored.
        pub reserved: U64,
    }

    /// Output element of HvCallGetVpCpuidValues.
    pub struct CpuidValues: 16 {
        /// EAX, EBX, ECX, EDX.
        pub registers: [U32; 4],
    }
}

/// A page that shows a VP's state (Linux' `hv_vp_state_page_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatePage {
    /// [`crate::page::RegisterPage`].
    Registers = 0,
    /// The last message about the VP.
    InterceptMessage = 1,
}

/// HvCallMapVpStatePage. Answers with the page's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapStatePage {
    /// Whose.
    pub vp: Vp,
    /// Which.
    pub page: StatePage,
    /// The page of the caller to use. `None`: the hypervisor chooses.
    pub location: Option<Gpa>,
}

/// HvCallUnmapVpStatePage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapStatePage {
    /// Whose.
    pub vp: Vp,
    /// Which.
    pub page: StatePage,
}

/// What a page of statistics counts (Linux' `hv_stats_object_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatsObject {
    /// The hypervisor.
    Hypervisor,
    /// A logical processor.
    Processor(u32),
    /// A partition.
    Partition(PartitionId),
    /// A VP.
    Vp(Vp),
}

/// For whom it counts (Linux' `hv_stats_area_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatsArea {
    /// The object itself.
    Own = 0,
    /// Its parent.
    Parent = 1,
}

/// HvCallMapStatsPage2 (answers with the page's number) and HvCallUnmapStatsPage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatsPage {
    /// What is counted.
    pub object: StatsObject,
    /// For whom.
    pub area: StatsArea,
}

/// HvCallGetVpRegisters. Answers with a [`RegisterValue`] for each name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetRegisters<'a> {
    /// Whose.
    pub vp: Vp,
    names: &'a [[u8; 4]],
}

/// HvCallSetVpRegisters. The order matters: a VP is resumed by two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetRegisters<'a> {
    /// Whose.
    pub vp: Vp,
    elements: &'a [[u8; 32]],
}

bitflags! {
    /// Flags of a translation (TLFS, HV_TRANSLATE_GVA_CONTROL_FLAGS).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TranslateFlags: u64 {
        /// For a read.
        const VALIDATE_READ = 1 << 0;
        /// For a write.
        const VALIDATE_WRITE = 1 << 1;
        /// For an execution.
        const VALIDATE_EXECUTE = 1 << 2;
        /// As the guest's kernel, whatever the privilege level.
        const PRIVILEGE_EXEMPT = 1 << 3;
        /// Set the accessed and dirty bits of the guest's tables.
        const SET_PAGE_TABLE_BITS = 1 << 4;
        /// Empty the VP's TLB first.
        const TLB_FLUSH_INHIBIT = 1 << 5;
        /// As a supervisor's access.
        const SUPERVISOR_ACCESS = 1 << 6;
        /// As a user's access.
        const USER_ACCESS = 1 << 7;
        /// Obey SMAP.
        const ENFORCE_SMAP = 1 << 8;
        /// Ignore SMAP.
        const OVERRIDE_SMAP = 1 << 9;
    }
}

/// HvCallTranslateVirtualAddress. Answers with a [`Translation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translate {
    /// Who.
    pub vp: Vp,
    /// How.
    pub flags: TranslateFlags,
    /// What: the start of a page.
    pub gva: Gva,
}

/// How a translation ended (TLFS, HV_TRANSLATE_GVA_RESULT_CODE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum TranslationCode {
    /// There is a page.
    Success = 0,
    /// The guest's tables have none.
    PageNotPresent = 1,
    /// The guest's tables forbid it.
    PrivilegeViolation = 2,
    /// The guest's tables have reserved bits set.
    InvalidPageTableFlags = 3,
    /// The partition has no memory for the page, or for one of the tables.
    GpaUnmapped = 4,
    /// It cannot be read.
    GpaNoReadAccess = 5,
    /// It cannot be written to.
    GpaNoWriteAccess = 6,
}

/// HvCallRegisterInterceptResult for CPUID: `(what the hypervisor would answer & !mask) | (value & mask)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidResult {
    /// For whom.
    pub vp: Vp,
    /// EAX at the instruction.
    pub leaf: u32,
    /// ECX at the instruction, if it matters.
    pub subleaf: Option<u32>,
    /// EAX, EBX, ECX, EDX: value and mask.
    pub results: [(u32, u32); 4],
}

/// The events for which a parent can request messages (Linux' `hv_intercept_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InterceptKind {
    /// A port.
    IoPort(u16),
    /// MSRs.
    Msr,
    /// A leaf of CPUID.
    Cpuid(u32),
    /// An exception.
    Exception(u8),
    /// One MSR.
    MsrIndex(u32),
}

/// HvCallInstallIntercept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallIntercept {
    /// In whom.
    pub partition: PartitionId,
    /// For reads.
    pub read: bool,
    /// For writes.
    pub write: bool,
    /// For executions.
    pub execute: bool,
    /// Of what.
    pub kind: InterceptKind,
}

/// State of a VP that is not in registers (Linux' `hv_get_set_vp_state_type`). Bit 31: it is in pages of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StateKind {
    /// [`crate::page::LocalApicState`].
    LocalApic = 0x8000_0000,
    /// The image of XSAVEC.
    Xsave = 0x8000_0001,
    /// The message page.
    Simp = 0x8000_0002,
    /// The event flags page.
    Siefp = 0x8000_0003,
    /// [`crate::page::TimersState`], in the call's input or output itself.
    SyntheticTimers = 4,
}

/// HvCallGetVpState and HvCallSetVpState.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<'a> {
    /// Whose.
    pub vp: Vp,
    /// Which.
    pub kind: StateKind,
    /// For XSAVE: the components.
    pub xsave_states: u64,
    /// Where it is, or is to go.
    pub place: StatePlace<'a>,
}

/// Where the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace<'a> {
    /// In these pages of the caller.
    Pages(PageList<'a>),
    /// In the call's input, here, or in its output.
    Call(&'a [u8]),
}

/// HvCallGetVpCpuidValues. Answers with [`CpuidValues`] for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetCpuidValues<'a> {
    /// Whose.
    pub vp: Vp,
    leaves: &'a [[u8; 8]],
}

impl VpHeader {
    fn read(input: &[u8]) -> Result<Self, Status> {
        Self::from_bytes(input).ok_or(Status::InvalidHypercallInput)
    }

    /// The VP, by a call that has a virtual trust level.
    fn vp(self) -> Result<Vp, Status> {
        check_vtl(self.vtl)?;
        Ok(self.vp_of_any_level())
    }

    fn vp_of_any_level(self) -> Vp {
        Vp { partition: PartitionId(self.partition.get()), index: self.index.get() }
    }
}

/// Only level 0 exists. Bit 4 marks the field as valid, and may be set.
fn check_vtl(vtl: u8) -> Result<(), Status> {
    const USE: u8 = 1 << 4;
    if vtl & !USE == 0 { Ok(()) } else { Err(Status::InvalidParameter) }
}

/// Input of HvCallCreateVp and HvCallDeleteVp. Linux leaves old bytes behind the index, so they are not checked.
pub(crate) fn parse_vp(input: &[u8]) -> Result<Vp, Status> {
    Ok(VpHeader::read(input)?.vp_of_any_level())
}

impl StatePage {
    fn parse(number: u16) -> Result<Self, Status> {
        match number {
            0 => Ok(Self::Registers),
            1 => Ok(Self::InterceptMessage),
            _ => Err(Status::InvalidParameter),
        }
    }
}

impl MapStatePage {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = StatePageInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        check_vtl(input.vtl)?;
        let location = match input.flags {
            0 => None,
            1 => Some(page_of_number(input.location.get())?),
            _ => return Err(Status::InvalidParameter),
        };
        let vp = Vp { partition: PartitionId(input.partition.get()), index: input.index.get() };
        Ok(Self { vp, page: StatePage::parse(input.kind.get())?, location })
    }
}

impl UnmapStatePage {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let [low, high, vtl, _] =
            *input.get(12..).and_then(<[u8]>::first_chunk).ok_or(Status::InvalidHypercallInput)?;
        check_vtl(vtl)?;
        let vp = VpHeader::read(input)?.vp_of_any_level();
        Ok(Self { vp, page: StatePage::parse(u16::from_le_bytes([low, high]))? })
    }
}

impl StatsPage {
    const HYPERVISOR: u32 = 1;
    const PROCESSOR: u32 = 2;
    const PARTITION: u32 = 0x0001_0001;
    const VP: u32 = 0x0001_0002;

    /// Both inputs; that of HvCallUnmapStatsPage has no place.
    fn parse_object(input: &[u8]) -> Result<Self, Status> {
        let (object, area) = (word_at(input, 0)?, *input.get(23).ok_or(Status::InvalidHypercallInput)?);
        let vp = VpHeader::read(input.get(8..).unwrap_or_default())?.vp_of_any_level();
        #[expect(clippy::cast_possible_truncation, reason = "the upper halves are padding")]
        let object = match object as u32 {
            Self::HYPERVISOR => StatsObject::Hypervisor,
            Self::PROCESSOR => StatsObject::Processor(word_at(input, 8)? as u32),
            Self::PARTITION => StatsObject::Partition(vp.partition),
            Self::VP => StatsObject::Vp(vp),
            _ => return Err(Status::InvalidParameter),
        };
        let area = match area {
            0 => StatsArea::Own,
            1 => StatsArea::Parent,
            _ => return Err(Status::InvalidParameter),
        };
        Ok(Self { object, area })
    }

    pub(crate) fn parse_unmap(input: &[u8]) -> Result<Self, Status> {
        Self::parse_object(input)
    }

    pub(crate) fn parse_map(input: &[u8]) -> Result<(Self, Gpa), Status> {
        Ok((Self::parse_object(input)?, page_of_number(word_at(input, 24)?)?))
    }
}

impl<'a> GetRegisters<'a> {
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Result<Self, Status> {
        let vp = VpHeader::read(input)?.vp()?;
        Ok(Self { vp, names: list(input, 16, checked.control()) })
    }

    /// The registers, from the call's first element on. An invalid name is an error of its element.
    pub fn names(&self) -> impl ExactSizeIterator<Item = Result<Register, Status>> + use<'a> {
        self.names.iter().map(|name| Register::try_from(u32::from_le_bytes(*name)))
    }
}

impl<'a> SetRegisters<'a> {
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Result<Self, Status> {
        let vp = VpHeader::read(input)?.vp()?;
        Ok(Self { vp, elements: list(input, 16, checked.control()) })
    }

    /// The registers and their values, from the call's first element on. As [`GetRegisters::names`].
    pub fn elements(&self) -> impl ExactSizeIterator<Item = Result<(Register, RegisterValue), Status>> + use<'a> {
        self.elements.iter().map(|element| {
            let element = RegisterAssociation::from_bytes(element).ok_or(Status::InvalidHypercallInput)?;
            Ok((Register::try_from(element.name.get())?, element.value))
        })
    }
}

impl Translate {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = TranslateInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let flags = TranslateFlags::from_bits(input.flags.get()).ok_or(Status::InvalidParameter)?;
        // Numbers of virtual pages have as many bits as those of physical ones. Linux' callers shift without a sign.
        let Gpa(gva) = page_of_number(input.page.get())?;
        Ok(Self { vp: input.vp.vp_of_any_level(), flags, gva: Gva(gva) })
    }
}

impl Translation {
    /// The answer: a page of ordinary memory, or why there is none.
    #[must_use]
    pub fn new(found: Result<Gpa, TranslationCode>) -> Self {
        const WRITE_BACK: u8 = 6;
        let (code, page) = match found {
            Ok(page) => (TranslationCode::Success, crate::memory::number_of_page(page)),
            Err(code) => (code, 0),
        };
        Self { code: U32::new(code as u32), cache_type: WRITE_BACK, page: U64::new(page), ..Self::default() }
    }
}

impl CpuidResult {
    const CPUID: u32 = 2;

    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = CpuidResultInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        if input.kind.get() != Self::CPUID || input.is_subleaf_specific > 1 || input.always_override > 1 {
            return Err(Status::InvalidParameter);
        }
        let subleaf = (input.is_subleaf_specific == 1).then_some(input.subleaf.get());
        let results = input.results.map(|[value, mask]| (value.get(), mask.get()));
        let vp = Vp { partition: PartitionId(input.partition.get()), index: input.index.get() };
        Ok(Self { vp, leaf: input.leaf.get(), subleaf, results })
    }
}

impl InstallIntercept {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = InstallInterceptInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let (access, parameter) = (input.access.get(), input.parameter.get());
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the parameter is a union; its upper part is not looked at"
        )]
        let kind = match input.kind.get() {
            0x0 => InterceptKind::IoPort(parameter as u16),
            0x1 => InterceptKind::Msr,
            0x2 => InterceptKind::Cpuid(parameter as u32),
            0x3 if parameter < 32 => InterceptKind::Exception(parameter as u8),
            0xc => InterceptKind::MsrIndex(parameter as u32),
            _ => return Err(Status::InvalidParameter),
        };
        if access & !0x7 != 0 {
            return Err(Status::InvalidParameter);
        }
        Ok(Self {
            partition: PartitionId(input.partition.get()),
            read: access & 1 != 0,
            write: access & 2 != 0,
            execute: access & 4 != 0,
            kind,
        })
    }
}

impl StateKind {
    const IN_PAGES: u32 = 1 << 31;

    fn parse(number: u32) -> Result<Self, Status> {
        [Self::LocalApic, Self::Xsave, Self::Simp, Self::Siefp, Self::SyntheticTimers]
            .into_iter()
            .find(|kind| *kind as u32 == number)
            .ok_or(Status::InvalidParameter)
    }

    /// Whether it is in pages of the caller, not in the call's input or output.
    #[must_use]
    pub const fn is_in_pages(self) -> bool {
        self as u32 & Self::IN_PAGES != 0
    }
}

impl<'a> State<'a> {
    /// `is_set`: HvCallSetVpState.
    pub(crate) fn parse(checked: &Checked, input: &'a [u8], is_set: bool) -> Result<Self, Status> {
        let header = StateInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let kind = StateKind::parse(header.kind.get())?;
        let variable = input.get(size_of::<StateInput>()..checked.header_bytes()).unwrap_or_default();
        let place = match kind.is_in_pages() {
            true if variable.is_empty() => return Err(Status::InvalidParameter),
            true => StatePlace::Pages(PageList::of_words(Words::of(variable))),
            // Input only where there is some.
            false if variable.is_empty() == is_set => return Err(Status::InvalidParameter),
            false => StatePlace::Call(variable),
        };
        Ok(Self { vp: header.vp.vp()?, kind, xsave_states: header.xsave_states.get(), place })
    }
}

impl<'a> GetCpuidValues<'a> {
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Result<Self, Status> {
        let vp = VpHeader::read(input)?.vp_of_any_level();
        Ok(Self { vp, leaves: list(input, 24, checked.control()) })
    }

    /// Leaf and subleaf of each element, from the call's first on.
    pub fn leaves(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + use<'a> {
        self.leaves.iter().map(|[a, b, c, d, e, f, g, h]| {
            (u32::from_le_bytes([*a, *b, *c, *d]), u32::from_le_bytes([*e, *f, *g, *h]))
        })
    }
}

/// The elements behind a header, from the call's first on.
fn list<const BYTES: usize>(input: &[u8], header_bytes: usize, control: Control) -> &[[u8; BYTES]] {
    let elements = input.get(header_bytes..).unwrap_or_default().as_chunks().0;
    elements.get(usize::from(control.rep_start())..).unwrap_or_default()
}
