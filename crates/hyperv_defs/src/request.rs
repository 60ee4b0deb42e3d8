//! A parent's requests: all calls about partitions, parsed.

use addr::Gpa;

use crate::call::Checked;
use crate::hypercall::Status;
use crate::interrupt::{self, AssertInterrupt, ConnectPort, CreatePort, Port};
use crate::memory::{Deposit, GetAccessStates, MapPages, UnmapPages, Withdraw};
use crate::partition::{self, CreatePartition, GetProperty, PartitionId, SetProperty};
use crate::table::Code;
use crate::vmbus::Posted;
use crate::vp::{
    self, CpuidResult, GetCpuidValues, GetRegisters, InstallIntercept, MapStatePage, SetRegisters, State, StatsPage,
    Translate, UnmapStatePage, Vp,
};

/// A parent's request. The fields of each variant are valid by themselves. The hypervisor still has to check that the
/// named partition, VP or page exists and belongs to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Create a partition.
    CreatePartition(CreatePartition),
    /// Initialize it.
    InitializePartition(PartitionId),
    /// Stop it for ever.
    FinalizePartition(PartitionId),
    /// Forget it.
    DeletePartition(PartitionId),
    /// Read a property.
    GetProperty(GetProperty),
    /// Change a property.
    SetProperty(SetProperty),
    /// Deposit pages.
    Deposit(Deposit<'a>),
    /// Withdraw pages.
    Withdraw(Withdraw),
    /// Map pages.
    MapPages(MapPages<'a>),
    /// Unmap pages.
    UnmapPages(UnmapPages),
    /// Read which pages were accessed.
    GetAccessStates(GetAccessStates),
    /// Ask for messages.
    InstallIntercept(InstallIntercept),
    /// Create a VP.
    CreateVp(Vp),
    /// Delete a VP.
    DeleteVp(Vp),
    /// Read registers.
    GetRegisters(GetRegisters<'a>),
    /// Change registers.
    SetRegisters(SetRegisters<'a>),
    /// Translate an address.
    Translate(Translate),
    /// Fix what CPUID answers.
    CpuidResult(CpuidResult),
    /// Read what CPUID answers.
    GetCpuidValues(GetCpuidValues<'a>),
    /// Map a page that shows a VP's state.
    MapStatePage(MapStatePage),
    /// Unmap it.
    UnmapStatePage(UnmapStatePage),
    /// Map a page of statistics, at a page of the caller.
    MapStatsPage(StatsPage, Gpa),
    /// Unmap it.
    UnmapStatsPage(StatsPage),
    /// Read state of a VP.
    GetState(State<'a>),
    /// Change state of a VP.
    SetState(State<'a>),
    /// Raise an interrupt.
    AssertInterrupt(AssertInterrupt),
    /// Take back an external interrupt.
    ClearInterrupt(PartitionId),
    /// Create a port.
    CreatePort(CreatePort),
    /// Delete a port.
    DeletePort(Port),
    /// Connect to a port.
    ConnectPort(ConnectPort),
    /// Remove a connection.
    DisconnectPort(Port),
    /// The event ring of this SINT is empty.
    RingEmpty(u8),
    /// Tell the host's side of VMBus something.
    PostMessage(Posted),
}

impl<'a> Request<'a> {
    /// What it asks for, in a few words.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::CreatePartition(..) => "parent: create partition",
            Self::InitializePartition(..) => "parent: initialize partition",
            Self::FinalizePartition(..) => "parent: finalize partition",
            Self::DeletePartition(..) => "parent: delete partition",
            Self::GetProperty(..) => "parent: get property",
            Self::SetProperty(..) => "parent: set property",
            Self::Deposit(..) => "parent: deposit",
            Self::Withdraw(..) => "parent: withdraw",
            Self::MapPages(..) => "parent: map pages",
            Self::UnmapPages(..) => "parent: unmap pages",
            Self::GetAccessStates(..) => "parent: get access states",
            Self::InstallIntercept(..) => "parent: install intercept",
            Self::CreateVp(..) => "parent: create VP",
            Self::DeleteVp(..) => "parent: delete VP",
            Self::GetRegisters(..) => "parent: get registers",
            Self::SetRegisters(..) => "parent: set registers",
            Self::Translate(..) => "parent: translate",
            Self::CpuidResult(..) => "parent: CPUID result",
            Self::GetCpuidValues(..) => "parent: get CPUID values",
            Self::MapStatePage(..) => "parent: map state page",
            Self::UnmapStatePage(..) => "parent: unmap state page",
            Self::MapStatsPage(..) => "parent: map stats page",
            Self::UnmapStatsPage(..) => "parent: unmap stats page",
            Self::GetState(..) => "parent: get state",
            Self::SetState(..) => "parent: set state",
            Self::AssertInterrupt(..) => "parent: assert interrupt",
            Self::ClearInterrupt(..) => "parent: clear interrupt",
            Self::CreatePort(..) => "parent: create port",
            Self::DeletePort(..) => "parent: delete port",
            Self::ConnectPort(..) => "parent: connect port",
            Self::DisconnectPort(..) => "parent: disconnect port",
            Self::RingEmpty(..) => "parent: ring empty",
            Self::PostMessage(..) => "parent: post message",
        }
    }

    /// `input` has the length of the call's shape. `None`: not a call about partitions.
    #[cold]
    #[inline(never)]
    pub(crate) fn parse(checked: &Checked, input: &'a [u8]) -> Option<Result<Self, Status>> {
        Some(match checked.code() {
            Code::FlushVirtualAddressSpace
            | Code::FlushVirtualAddressList
            | Code::NotifyLongSpinWait
            | Code::SendSyntheticClusterIpi
            | Code::FlushVirtualAddressSpaceEx
            | Code::FlushVirtualAddressListEx
            | Code::SendSyntheticClusterIpiEx => return None,
            Code::CreatePartition => CreatePartition::parse(input).map(Self::CreatePartition),
            Code::InitializePartition => partition::parse_id(input).map(Self::InitializePartition),
            Code::FinalizePartition => partition::parse_id(input).map(Self::FinalizePartition),
            Code::DeletePartition => partition::parse_id(input).map(Self::DeletePartition),
            Code::GetPartitionProperty => GetProperty::parse(input, false).map(Self::GetProperty),
            Code::GetPartitionPropertyEx => GetProperty::parse(input, true).map(Self::GetProperty),
            Code::SetPartitionProperty => SetProperty::parse(input).map(Self::SetProperty),
            Code::DepositMemory => Deposit::parse(checked, input).map(Self::Deposit),
            Code::WithdrawMemory => Withdraw::parse(checked, input).map(Self::Withdraw),
            Code::MapGpaPages => MapPages::parse(checked, input).map(Self::MapPages),
            Code::UnmapGpaPages => UnmapPages::parse(checked, input).map(Self::UnmapPages),
            Code::GetGpaPagesAccessStates => GetAccessStates::parse(checked, input).map(Self::GetAccessStates),
            Code::InstallIntercept => InstallIntercept::parse(input).map(Self::InstallIntercept),
            Code::CreateVp => vp::parse_vp(input).map(Self::CreateVp),
            Code::DeleteVp => vp::parse_vp(input).map(Self::DeleteVp),
            Code::GetVpRegisters => GetRegisters::parse(checked, input).map(Self::GetRegisters),
            Code::SetVpRegisters => SetRegisters::parse(checked, input).map(Self::SetRegisters),
            Code::TranslateVirtualAddress => Translate::parse(input).map(Self::Translate),
            Code::RegisterInterceptResult => CpuidResult::parse(input).map(Self::CpuidResult),
            Code::GetVpCpuidValues => GetCpuidValues::parse(checked, input).map(Self::GetCpuidValues),
            Code::MapVpStatePage => MapStatePage::parse(input).map(Self::MapStatePage),
            Code::UnmapVpStatePage => UnmapStatePage::parse(input).map(Self::UnmapStatePage),
            Code::MapStatsPage2 => {
                StatsPage::parse_map(input).map(|(page, location)| Self::MapStatsPage(page, location))
            }
            Code::UnmapStatsPage => StatsPage::parse_unmap(input).map(Self::UnmapStatsPage),
            Code::GetVpState => State::parse(checked, input, false).map(Self::GetState),
            Code::SetVpState => State::parse(checked, input, true).map(Self::SetState),
            Code::AssertVirtualInterrupt => AssertInterrupt::parse(input).map(Self::AssertInterrupt),
            Code::ClearVirtualInterrupt => partition::parse_id(input).map(Self::ClearInterrupt),
            Code::CreatePort => CreatePort::parse(input).map(Self::CreatePort),
            Code::DeletePort => Port::parse_delete(input).map(Self::DeletePort),
            Code::ConnectPort => ConnectPort::parse(input).map(Self::ConnectPort),
            Code::DisconnectPort => Port::parse_disconnect(input).map(Self::DisconnectPort),
            Code::NotifyPortRingEmpty => interrupt::parse_ring(input).map(Self::RingEmpty),
            Code::PostMessage => Posted::parse(input).map(Self::PostMessage),
        })
    }
}
