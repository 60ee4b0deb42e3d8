use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use addr::Gpa;
use hyperv_defs::interrupt::{ConnectPort, CreatePort, Doorbell, Port};
use hyperv_defs::memory::{GpaAccess, MapPages, Mapping, UnmapPages, number_of_page, page_of_number};
use hyperv_defs::partition::{CreatePartition, CreationFlags, SetProperty};
use hyperv_defs::property::{FeatureBank, ProcessorFeatures, Property, SyntheticFeatures, XsaveFeatures};
use hyperv_defs::vp::{CpuidResult, MapStatePage, StatePage, StatsArea, StatsObject, StatsPage, UnmapStatePage, Vp};
use hyperv_defs::wire::U64;
use hyperv_defs::{Call, Code, Control, Offered, PartitionId, Request, Status, parse};

use crate::{
    Change, CpuidResults, Entry, Host, Ledger, OwnStats, PageUse, Parent, Partition, Progress, Released, State, Store,
    Use, Value, limits,
};

/// The contents of deposited pages.
#[derive(Default)]
struct Pages(BTreeMap<u64, Box<[u64; 512]>>);

impl Store for Pages {
    fn read(&self, page: u64, index: usize) -> u64 {
        self.0.get(&page).map_or(0, |words| words[index])
    }

    fn write(&mut self, page: u64, index: usize, value: u64) {
        self.0.entry(page).or_insert_with(|| Box::new([0; 512]))[index] = value;
    }

    fn clear(&mut self, page: u64) {
        self.0.remove(&page);
    }
}

const ID: PartitionId = PartitionId(0x100);
/// Pages of the parent: some to deposit, then large ones.
const FIRST: u64 = 0x10;
const LARGE: u64 = 0x1000;
const PAGES_PER_VP: usize = 2;
const ALL: GpaAccess = GpaAccess { write: true, execute: true, cached: true };

fn host() -> Host {
    Host {
        features: ProcessorFeatures::SSE3 | ProcessorFeatures::AES | ProcessorFeatures::LA57,
        xsave_features: XsaveFeatures::XSAVE | XsaveFeatures::AVX,
        xsave_states: 7,
        max_xsave_bytes: 832,
        synthetic_features: SyntheticFeatures::HV1 | SyntheticFeatures::TB_FLUSH,
        physical_address_width: 48,
        tsc_hertz: 2_000_000_000,
        vps: 4,
        pages_per_vp: PAGES_PER_VP,
    }
}

fn created() -> CreatePartition {
    CreatePartition {
        flags: CreationFlags::EXO_PARTITION | CreationFlags::INTERCEPT_MESSAGE_PAGE | CreationFlags::LAPIC,
        disabled_features: ProcessorFeatures::LA57,
        disabled_xsave_features: XsaveFeatures::AVX,
    }
}

/// A parent, its deposited pages, and one child with `deposits` pages.
struct Rig {
    parent: Parent,
    pages: Pages,
    deposited: u64,
}

impl Rig {
    fn new() -> Self {
        let ledger = Ledger::new(&[(FIRST, 512), (LARGE, 16 * 512)]).expect("there is memory");
        let mut parent = Parent::new(ledger, host());
        parent.create(ID, &created()).expect("the first");
        Self { parent, pages: Pages::default(), deposited: 0 }
    }

    fn initialized() -> Self {
        let mut rig = Self::new();
        rig.deposit(64);
        rig.with(|child, _, pages| child.initialize(pages)).expect("it is new and paid for");
        rig
    }

    fn with<T>(&mut self, what: impl FnOnce(&mut Partition, &Ledger, &mut Pages) -> T) -> T {
        let (child, ledger) = self.parent.child_mut(ID).expect("it exists");
        what(child, ledger, &mut self.pages)
    }

    fn deposit(&mut self, count: u64) {
        let pages: Vec<u64> = (0..count).map(|index| FIRST + self.deposited + index).collect();
        assert_eq!(self.try_deposit(&pages), Ok(()));
        self.deposited += count;
    }

    /// HvCallDepositMemory, as bytes.
    fn try_deposit(&mut self, list: &[u64]) -> Result<(), Status> {
        let input: Vec<u8> = [&[ID.0], list].concat().iter().flat_map(|word| word.to_le_bytes()).collect();
        let count = u16::try_from(list.len()).expect("few");
        let control = Control::new(Code::DepositMemory).with_rep_count(count);
        let Ok(Call::Partition(Request::Deposit(deposit))) = parse(control, &input, Offered::all()) else {
            panic!("well-formed")
        };
        let mut claimed = Vec::new();
        let (done, result) = self.parent.claim(&deposit, u16::MAX, |page| claimed.push(page));
        assert_eq!(usize::from(done), claimed.len());
        self.with(|child, _, pages| claimed.into_iter().for_each(|page| child.deposits.add(page, pages)));
        result
    }

    /// HvCallMapGpaPages of pages, as bytes.
    fn try_map(&mut self, first: u64, flags: u64, list: &[u64]) -> (Released, Result<(), Status>) {
        let input: Vec<u8> =
            [&[ID.0, first, flags], list].concat().iter().flat_map(|word| word.to_le_bytes()).collect();
        let count = u16::try_from(list.len()).expect("few");
        let control = Control::new(Code::MapGpaPages).with_rep_count(count);
        let Ok(Call::Partition(Request::MapPages(map))) = parse(control, &input, Offered::all()) else {
            panic!("well-formed")
        };
        self.with(|child, ledger, pages| child.map_pages(&map, || true, ledger, pages))
    }

    fn map(&mut self, first: u64, flags: u64, list: &[u64]) -> Released {
        let (released, result) = self.try_map(first, flags, list);
        assert_eq!((result, usize::from(released.done)), (Ok(()), list.len()));
        released
    }

    fn no_access(&mut self, first: u64, count: u16, is_large: bool) -> Released {
        let first = page_of_number(first).expect("a page");
        let map = MapPages { partition: ID, first, is_large, what: Mapping::NoAccess(count) };
        let (released, result) = self.with(|child, ledger, pages| child.map_pages(&map, || true, ledger, pages));
        assert_eq!((result, released.done), (Ok(()), count));
        released
    }

    fn unmap(&mut self, first: u64, count: u16, is_large: bool) -> Released {
        let first = page_of_number(first).expect("a page");
        let unmap = UnmapPages { partition: ID, first, is_large, count };
        let (released, result) = self.with(|child, ledger, pages| child.unmap_pages(&unmap, || true, ledger, pages));
        assert_eq!((result, released.done), (Ok(()), count));
        released
    }

    fn settle(&mut self, released: Released) {
        self.with(|child, ledger, pages| child.settle(released, ledger, pages));
    }

    fn page(&mut self, page: u64) -> Entry {
        self.with(|child, _, pages| child.page(page, pages))
    }

    fn tables(&mut self) -> u64 {
        self.with(|child, _, _| child.deposits.used(Use::Map))
    }

    fn finalize(&mut self) {
        self.parent.finalize(ID).expect("it is alive");
        self.with(|child, ledger, pages| while child.empty(ledger, pages) == Progress::More {});
    }
}

fn small(source: u64) -> Entry {
    Entry::Page { source, access: ALL }
}

const MAP: u64 = 0xf;
const MAP_LARGE: u64 = 0x8000_000f;

#[test]
fn child_lives_once() {
    let mut rig = Rig::new();
    let no = Err(Status::InvalidPartitionState);
    let initialize = |rig: &mut Rig| rig.with(|child, _, pages| child.initialize(pages));
    let vp = |rig: &mut Rig| rig.with(|child, _, pages| child.create_vp(0, &host(), pages).map(|_| ()));

    assert_eq!(vp(&mut rig), no, "it has no VPs yet");
    assert_eq!(rig.try_map(0, MAP, &[LARGE]).1, no, "it has no memory yet");
    assert_eq!(initialize(&mut rig), Err(Status::InsufficientMemory), "nothing is deposited");
    rig.deposit(8);
    assert_eq!((initialize(&mut rig), initialize(&mut rig)), (Ok(()), no));
    assert_eq!(vp(&mut rig), Ok(()));
    let delete = |rig: &mut Rig| rig.parent.delete(ID, 100, &mut rig.pages, |_| {}).map(|_| ());
    assert_eq!(delete(&mut rig), no, "it is alive");

    rig.finalize();
    assert_eq!(rig.with(|child, _, _| child.state()), State::Finalized);
    assert_eq!((rig.parent.finalize(ID).map(drop), initialize(&mut rig), vp(&mut rig)), (no, no, no));
    assert_eq!(rig.try_map(0, MAP, &[LARGE]).1, no);
    assert!(!rig.unmap(0, 5, false).needs_flush(), "what is gone is unmapped");
    assert!(!rig.no_access(0, 5, false).needs_flush(), "and nobody has access to it");
    assert_eq!(delete(&mut rig), Ok(()));
    assert_eq!(delete(&mut rig), Err(Status::InvalidPartitionId));
    assert_eq!(rig.parent.ledger.used().count(), 0);
}

/// The kernel that fails after CREATE deletes at once.
#[test]
fn child_that_never_lived_can_be_deleted() {
    let mut rig = Rig::new();
    rig.deposit(3);
    let stats = StatsPage { object: StatsObject::Partition(ID), area: StatsArea::Own };
    let location = page_of_number(LARGE).expect("a page");
    rig.with(|child, ledger, _| child.map_stats_page(&stats, location, ledger)).expect("a page of its parent");
    let mut returned = Vec::new();
    assert_eq!(rig.parent.delete(ID, 2, &mut rig.pages, |page| returned.push(page)), Ok(Progress::More));
    assert_eq!(rig.parent.delete(ID, 2, &mut rig.pages, |page| returned.push(page)), Ok(Progress::Done));
    assert_eq!((returned.len(), rig.parent.ledger.used().count()), (3, 0));
}

/// Linux withdraws between FINALIZE and DELETE, and loses pages that it does not get then.
#[test]
fn finalized_child_gives_every_page_back() {
    let mut rig = Rig::initialized();
    let released = rig.map(0x200, MAP_LARGE, &[LARGE]);
    assert!(!released.needs_flush());
    rig.settle(released);
    let released = rig.no_access(0x1000, 500, false);
    rig.settle(released);
    rig.with(|child, _, pages| child.create_vp(3, &host(), pages).map(|_| ())).expect("it is paid for");
    rig.finalize();

    let mut back = Vec::new();
    while let Some(page) = rig.with(|child, ledger, pages| child.withdraw(ledger, pages)) {
        back.push(page);
    }
    back.sort_unstable();
    assert_eq!(back, (FIRST..FIRST + 64).collect::<Vec<_>>());
    assert!(rig.pages.0.is_empty(), "and cleared");
    assert_eq!(rig.parent.ledger.used().count(), 0);
}

#[test]
fn page_has_one_use_at_a_time() {
    let mut rig = Rig::initialized();
    let bad = Err(Status::InvalidParameter);
    assert_eq!(rig.try_deposit(&[FIRST]), bad, "twice");
    assert_eq!(rig.try_deposit(&[0]), bad, "not the parent's");
    assert_eq!(rig.try_deposit(&[1 << 52]), bad, "no page");
    assert_eq!(rig.try_map(0, MAP, &[FIRST]).1, bad, "deposited");
    assert_eq!(rig.try_map(0, MAP, &[0]).1, bad);
    assert_eq!(rig.try_map(0x200, MAP_LARGE, &[LARGE + 1]).1, bad, "no large page");
    assert_eq!(rig.try_map(0x200, MAP_LARGE, &[LARGE + 16 * 512]).1, bad);

    let _ = rig.map(7, MAP, &[LARGE]);
    assert_eq!(rig.try_deposit(&[LARGE]), bad, "the child has it");
    let released = rig.unmap(7, 1, false);
    assert!(released.needs_flush());
    assert_eq!(rig.try_deposit(&[LARGE]), bad, "a TLB may still have it");
    rig.settle(released);
    assert_eq!(rig.try_deposit(&[LARGE]), Ok(()));
    // The rest of a large page that has one deposited page is not touched.
    assert_eq!(rig.try_map(0x200, MAP_LARGE, &[LARGE]).1, bad);
    assert_eq!(rig.parent.ledger.page_use(LARGE + 1), Some(PageUse::Shared(0)));
}

#[test]
fn list_is_done_until_its_first_bad_page() {
    let mut rig = Rig::initialized();
    let (released, result) = rig.try_map(0x30, MAP, &[LARGE, LARGE + 1, 0, LARGE + 3]);
    assert_eq!((released.done, result, released.changed.clone()), (2, Err(Status::InvalidParameter), 0x30..0x32));
    rig.settle(released);
    assert_eq!((rig.page(0x31), rig.page(0x32)), (small(LARGE + 1), Entry::Absent));

    let (_, result) = rig.try_map(1 << 36, MAP, &[LARGE]);
    assert_eq!(result, Err(Status::InvalidParameter), "beyond 48 bits");
    assert_eq!(rig.parent.ledger.page_use(LARGE), Some(PageUse::Shared(1)), "it was not used in vain");
}

/// Linux describes all memory so at first: 4 GiB, 509 pages a call.
#[test]
fn memory_that_is_not_there_needs_hardly_any_pages() {
    let mut rig = Rig::initialized();
    let mut page = 0;
    while page < 1 << 20 {
        let count = (1 << 20_u64).min(page + 509) - page;
        let released = rig.no_access(page, u16::try_from(count).expect("few"), false);
        assert!(!released.needs_flush());
        rig.settle(released);
        page += count;
        assert!(rig.tables() <= 4);
    }
    assert_eq!(rig.tables(), 2, "the root, and one of four words");
    assert_eq!(
        (rig.page(0), rig.page((1 << 20) - 1), rig.page(1 << 20)),
        (Entry::NoAccess, Entry::NoAccess, Entry::Absent)
    );

    // As a child with pages of 2 MiB, one of which is split and joined again.
    let released = rig.map(0x400, MAP_LARGE, &[LARGE, LARGE + 512]);
    rig.settle(released);
    assert_eq!(rig.tables(), 3);
    let released = rig.no_access(0x401, 1, false);
    assert!(released.needs_flush());
    rig.settle(released);
    assert_eq!(rig.tables(), 4);
    assert_eq!((rig.page(0x400), rig.page(0x401), rig.page(0x402)), (small(LARGE), Entry::NoAccess, small(LARGE + 2)));
    let released = rig.no_access(0x400, 2, true);
    rig.settle(released);
    assert_eq!((rig.tables(), rig.page(0x7ff)), (2, Entry::NoAccess));
    let released = rig.unmap(0, 2048, true);
    rig.settle(released);
    assert_eq!(rig.tables(), 1, "nothing but the root");
    assert_eq!(rig.parent.ledger.used().count(), 64, "only deposits");
}

#[test]
fn large_page_takes_the_place_of_small_ones() {
    let mut rig = Rig::initialized();
    let sources: Vec<u64> = (0..512).map(|index| LARGE + index).rev().collect();
    let released = rig.map(0x200, MAP, &sources);
    rig.settle(released);
    assert_eq!(rig.page(0x200), small(LARGE + 511));
    let released = rig.map(0x200, MAP_LARGE, &[LARGE]);
    assert!(released.needs_flush());
    assert_eq!(rig.parent.ledger.page_use(LARGE + 5), Some(PageUse::Shared(2)), "the small page is still in use");
    let held = rig.tables();
    rig.settle(released);
    assert_eq!(rig.tables(), held - 1);
    assert_eq!(rig.parent.ledger.page_use(LARGE + 5), Some(PageUse::Shared(1)));
    assert_eq!(rig.page(0x205), small(LARGE + 5));
}

/// Linux deposits more then, and calls again.
#[test]
fn map_that_cannot_be_paid_changes_nothing() {
    let mut rig = Rig::new();
    rig.deposit(3);
    rig.with(|child, _, pages| child.initialize(pages)).expect("one page");
    // Three tables are needed, two pages are left.
    let (released, result) = rig.try_map(0x30, MAP, &[LARGE]);
    assert_eq!((released.done, result), (0, Err(Status::InsufficientMemory)));
    assert_eq!((rig.tables(), rig.page(0x30)), (1, Entry::Absent));
    assert_eq!(rig.parent.ledger.page_use(LARGE), Some(PageUse::Shared(0)));
    rig.deposit(1);
    assert_eq!(rig.try_map(0x30, MAP, &[LARGE]).1, Ok(()));
    assert_eq!(rig.with(|child, _, _| child.deposits.free()), 0);

    let vp = rig.with(|child, _, pages| child.create_vp(0, &host(), pages).map(|_| ()));
    assert_eq!(vp, Err(Status::InsufficientMemory));
}

#[test]
fn same_page_may_be_in_many_places() {
    let mut rig = Rig::initialized();
    for place in 0..3 {
        let released = rig.map(place, MAP, &[LARGE]);
        rig.settle(released);
    }
    assert_eq!(rig.parent.ledger.page_use(LARGE), Some(PageUse::Shared(3)));
    // The same page once more at the same place.
    let released = rig.map(0, 1, &[LARGE]);
    assert!(released.needs_flush(), "it cannot be written to any more");
    rig.settle(released);
    assert_eq!(rig.parent.ledger.page_use(LARGE), Some(PageUse::Shared(3)));
    let access = GpaAccess { write: false, execute: false, cached: true };
    assert_eq!(rig.page(0), Entry::Page { source: LARGE, access });
}

#[test]
fn ledger_knows_only_the_parents_pages() {
    let ledger = Ledger::new(&[(10, 5), (20, 1)]).expect("there is memory");
    for page in [0, 9, 15, 19, 21, u64::MAX] {
        assert_eq!((ledger.page_use(page), ledger.share(page)), (None, Err(Status::InvalidParameter)));
        assert_eq!(ledger.deposit(page), Err(Status::InvalidParameter));
    }
    for _ in 0..u16::MAX - 1 {
        assert_eq!(ledger.share(20), Ok(()));
    }
    assert_eq!(ledger.share(20), Err(Status::NoResources), "used too often");
    assert_eq!(ledger.used().collect::<Vec<_>>(), [(20, PageUse::Shared(u16::MAX - 1))]);
    assert!(Ledger::new(&[(0, u64::MAX), (0, u64::MAX)]).is_none());
}

#[test]
fn vps_share_pages_and_pay() {
    let mut rig = Rig::initialized();
    let vp = |index| Vp { partition: ID, index };
    let free = rig.with(|child, _, _| child.deposits.free());
    let create = |rig: &mut Rig, index| rig.with(|child, _, pages| child.create_vp(index, &host(), pages).map(|_| ()));
    assert_eq!((create(&mut rig, 2), create(&mut rig, 2)), (Ok(()), Err(Status::InvalidVpIndex)));
    for index in [4, u32::MAX, u32::MAX - 1] {
        assert_eq!(create(&mut rig, index), Err(Status::InvalidVpIndex));
    }
    assert_eq!(rig.with(|child, _, _| child.deposits.free()), free - PAGES_PER_VP as u64);

    let location = page_of_number(LARGE + 9).ok();
    let map = MapStatePage { vp: vp(2), page: StatePage::Registers, location };
    let map_it = |rig: &mut Rig, map: MapStatePage| rig.with(|child, ledger, _| child.map_state_page(&map, ledger));
    assert_eq!(map_it(&mut rig, map), Ok(LARGE + 9));
    assert_eq!(map_it(&mut rig, map), Err(Status::OperationDenied), "it is mapped");
    assert_eq!(map_it(&mut rig, MapStatePage { vp: vp(1), ..map }), Err(Status::InvalidVpIndex));
    let other = MapStatePage { page: StatePage::InterceptMessage, ..map };
    assert_eq!(map_it(&mut rig, MapStatePage { location: None, ..other }), Err(Status::InvalidParameter));
    let deposited = MapStatePage { location: page_of_number(FIRST).ok(), ..other };
    assert_eq!(map_it(&mut rig, deposited), Err(Status::InvalidParameter));
    assert_eq!(rig.with(|child, _, _| child.vp(2).map(|vp| vp.state_page(StatePage::Registers))), Ok(Some(LARGE + 9)));
    assert_eq!(rig.try_deposit(&[LARGE + 9]), Err(Status::InvalidParameter), "it is shared");

    let unmap = UnmapStatePage { vp: vp(2), page: StatePage::Registers };
    let unmap_it = |rig: &mut Rig| rig.with(|child, ledger, _| child.unmap_state_page(&unmap, ledger));
    assert_eq!((unmap_it(&mut rig), unmap_it(&mut rig)), (Ok(()), Err(Status::NotFound)));

    let stats = StatsPage { object: StatsObject::Vp(vp(2)), area: StatsArea::Parent };
    let at = page_of_number(LARGE + 9).expect("a page");
    assert_eq!(rig.with(|child, ledger, _| child.map_stats_page(&stats, at, ledger)), Ok(LARGE + 9));
    assert_eq!(rig.with(|child, ledger, pages| child.delete_vp(2, ledger, pages)), Ok(()));
    assert_eq!(rig.parent.ledger.page_use(LARGE + 9), Some(PageUse::Shared(0)), "nobody forgets it");
    assert_eq!(rig.with(|child, _, _| child.deposits.free()), free);
}

#[test]
fn cpuid_is_what_the_parent_registered() {
    let mut cpuid = CpuidResults::new();
    let whole = |value| [(value, !0); 4];
    let register = |cpuid: &mut CpuidResults, leaf, subleaf, results| {
        cpuid.register(&CpuidResult { vp: Vp { partition: ID, index: 0 }, leaf, subleaf, results })
    };
    assert_eq!(register(&mut cpuid, 1, None, whole(5)), Ok(()));
    assert_eq!(register(&mut cpuid, 7, Some(0), whole(6)), Ok(()));
    assert_eq!(register(&mut cpuid, 7, None, whole(7)), Ok(()));
    assert_eq!(register(&mut cpuid, 13, Some(1), [(1, !0), (2, 0), (4, 4), (0, 8)]), Ok(()));
    let answer = |cpuid: &CpuidResults, leaf, subleaf| cpuid.answer(leaf, subleaf, [9; 4]);
    assert_eq!(answer(&cpuid, 1, 77), [5; 4]);
    assert_eq!((answer(&cpuid, 7, 0), answer(&cpuid, 7, 1)), ([6; 4], [7; 4]));
    assert_eq!(answer(&cpuid, 13, 1), [1, 9, 13, 1], "only the masked bits");
    assert_eq!(answer(&cpuid, 13, 0), [9; 4]);
    assert_eq!(register(&mut cpuid, 1, None, whole(8)), Ok(()));
    assert_eq!(answer(&cpuid, 1, 0), [8; 4], "the last one counts");

    let mut other = CpuidResults::new();
    let many = (0..1000).map(|leaf| register(&mut other, leaf, None, whole(0))).filter(Result::is_ok).count();
    assert_eq!(many, limits::CPUID_RESULTS);
    assert_eq!(register(&mut other, 2000, None, whole(0)), Err(Status::NoResources));
}

fn port(partition: PartitionId, number: u32) -> Port {
    Port { partition, number }
}

#[test]
fn doorbells_ring_at_the_parents_port() {
    let mut rig = Rig::initialized();
    let create = CreatePort { port: port(PartitionId::SELF, 1), sender: ID, sint: 5, vp: None };
    assert_eq!(rig.parent.create_port(&create), Ok(()));
    assert_eq!(rig.parent.create_port(&create), Err(Status::InvalidPortId));
    let stranger = CreatePort { port: port(ID, 2), ..create };
    assert_eq!(rig.parent.create_port(&stranger), Err(Status::InvalidPartitionId));
    let of_nobody = CreatePort { port: port(PartitionId::SELF, 2), sender: PartitionId(7), ..create };
    assert_eq!(rig.parent.create_port(&of_nobody), Err(Status::InvalidPartitionId));
    assert_eq!(rig.parent.create_port(&CreatePort { port: port(PartitionId::SELF, 2), ..create }), Ok(()));

    let bell = |gpa, bytes, value| Doorbell { gpa: Gpa(gpa), bytes, value };
    let connect = |number, to, doorbell| ConnectPort {
        connection: port(ID, number),
        port: port(PartitionId::SELF, to),
        doorbell,
    };
    let exact = connect(1, 1, bell(0xfebf_b000, Some(2), Some(0)));
    assert_eq!(rig.parent.connect_port(&exact), Ok(()));
    assert_eq!(rig.parent.connect_port(&exact), Err(Status::InvalidConnectionId));
    assert_eq!(rig.parent.connect_port(&connect(2, 9, bell(0, None, None))), Err(Status::InvalidPortId));
    assert_eq!(rig.parent.connect_port(&connect(2, 2, bell(0xfebf_b000, Some(2), Some(1)))), Ok(()));
    assert_eq!(rig.parent.connect_port(&connect(3, 1, bell(0xfebf_c000, None, None))), Ok(()));

    let ring = |rig: &mut Rig, gpa, bytes, value| rig.with(|child, _, _| child.ring(Gpa(gpa), bytes, value));
    assert_eq!(ring(&mut rig, 0xfebf_b000, 2, 0), Some(1));
    assert_eq!(ring(&mut rig, 0xfebf_b000, 2, 1), Some(2));
    assert_eq!(ring(&mut rig, 0xfebf_b000, 2, 2), None);
    assert_eq!(ring(&mut rig, 0xfebf_b000, 4, 0), None);
    assert_eq!(ring(&mut rig, 0xfebf_c000, 8, 77), Some(1));
    assert_eq!(ring(&mut rig, 0xfebf_c001, 1, 77), None);

    let disconnect = |rig: &mut Rig, number| rig.with(|child, _, _| child.disconnect(number));
    assert_eq!((disconnect(&mut rig, 1), disconnect(&mut rig, 1)), (Ok(()), Err(Status::InvalidConnectionId)));
    assert_eq!(ring(&mut rig, 0xfebf_b000, 2, 0), None);
    assert_eq!(rig.parent.delete_port(&port(PartitionId::SELF, 1)), Ok(()));
    assert_eq!(rig.parent.delete_port(&port(PartitionId::SELF, 1)), Err(Status::InvalidPortId));

    rig.finalize();
    assert!(rig.parent.ports.is_empty(), "what it could ring is gone");
    assert_eq!(ring(&mut rig, 0xfebf_b000, 2, 1), None);
    assert_eq!(rig.parent.create_port(&create), Err(Status::InvalidPartitionState));
}

#[test]
fn properties_are_the_hosts_or_the_childs() {
    let mut rig = Rig::new();
    let get = |rig: &Rig, id, property| rig.parent.property(id, property);
    let own = PartitionId::SELF;
    let word = |value| Ok(Value::Word(value));
    assert_eq!(get(&rig, own, Property::ProcessorFeatures0), word(1 << 16 | 1));
    assert_eq!(get(&rig, own, Property::ProcessorFeatures1), word(1 << 4));
    assert_eq!(get(&rig, ID, Property::ProcessorFeatures1), word(0), "disabled when it was created");
    assert_eq!(get(&rig, ID, Property::ProcessorXsaveFeatures), word(1));
    assert_eq!(get(&rig, ID, Property::MaxXsaveDataSize), word(832));
    let Ok(Value::Bank(FeatureBank { features, .. })) = get(&rig, own, Property::VmmCapabilities) else { panic!() };
    assert_eq!(features, U64::new(2), "the parent provides pages");
    assert_eq!(get(&rig, ID, Property::VmmCapabilities), Err(Status::InvalidParameter));
    assert_eq!(get(&rig, own, Property::TimeFreeze), Err(Status::InvalidParameter));
    assert_eq!(get(&rig, own, Property::IntegratedSchedulerEnabled), word(0));
    assert_eq!(get(&rig, PartitionId(1), Property::TimeFreeze), Err(Status::InvalidPartitionId));
    assert_eq!(get(&rig, ID, Property::ReferenceTime), Ok(Value::ReferenceTime));

    let set = |rig: &mut Rig, property, value| {
        rig.with(|child, _, _| child.set_property(&SetProperty { partition: ID, property, value }))
    };
    assert_eq!(set(&mut rig, Property::SyntheticProcessorFeatures, 0x640_0ffb), Ok(Change::Nothing));
    assert_eq!(get(&rig, ID, Property::SyntheticProcessorFeatures), word(0x640_0ffb));
    let offered = rig.with(|child, _, _| child.synthetic_features(&host()));
    assert_eq!(offered, SyntheticFeatures::HV1 | SyntheticFeatures::TB_FLUSH, "only what the host has");
    rig.deposit(1);
    rig.with(|child, _, pages| child.initialize(pages)).expect("one page");

    let late = Err(Status::InvalidPartitionState);
    assert_eq!(set(&mut rig, Property::SyntheticProcessorFeatures, 0), late);
    assert_eq!(set(&mut rig, Property::PrivilegeFlags, 0), late, "as mshv-ioctls tests it");
    assert_eq!(set(&mut rig, Property::TimeFreeze, 1), Ok(Change::TimeFreeze(true)));
    assert_eq!(set(&mut rig, Property::GpaPageAccessTracking, 1), Ok(Change::Tracking(true)));
    assert_eq!(set(&mut rig, Property::UnimplementedMsrAction, 1), Ok(Change::IgnoreUnknownMsrs(true)));
    assert_eq!(set(&mut rig, Property::ReferenceTime, 9), Ok(Change::ReferenceTime(9)));
    assert_eq!(get(&rig, ID, Property::TimeFreeze), word(1));
    assert_eq!(set(&mut rig, Property::ProcessorFeatures0, 0), Err(Status::OperationDenied));
    rig.finalize();
    assert_eq!(set(&mut rig, Property::TimeFreeze, 0), late);
}

#[test]
fn children_are_limited() {
    let mut rig = Rig::new();
    let nested = CreatePartition { flags: created().flags | CreationFlags::NESTED_VIRTUALIZATION_CAPABLE, ..created() };
    assert_eq!(rig.parent.create(PartitionId(0x101), &nested), Err(Status::ProcessorFeatureNotSupported));
    let made = (1..2000).map(|id| rig.parent.create(PartitionId(ID.0 + id), &created())).filter(Result::is_ok).count();
    assert_eq!(made, limits::CHILDREN - 1);
    assert_eq!(rig.parent.children().len(), limits::CHILDREN);
    assert_eq!(rig.parent.child(PartitionId::SELF).map(|_| ()), Err(Status::InvalidPartitionId));
    assert_eq!(number_of_page(page_of_number(5).expect("a page")), 5);
}

#[test]
fn parent_sees_statistics_of_itself_and_of_the_host() {
    let mut rig = Rig::new();
    rig.parent.stats = OwnStats::new(2, 1);
    let own = |object| StatsPage { object, area: StatsArea::Own };
    let of_vp = |index| own(StatsObject::Vp(Vp { partition: PartitionId::SELF, index }));
    let pages = [
        own(StatsObject::Partition(PartitionId::SELF)),
        own(StatsObject::Hypervisor),
        own(StatsObject::Processor(0)),
        of_vp(0),
        of_vp(1),
    ];
    let location = page_of_number(LARGE + 9).expect("a page");
    for page in &pages {
        assert_eq!(rig.parent.map_stats_page(page, location), Ok(LARGE + 9));
        assert_eq!(rig.parent.map_stats_page(page, location), Err(Status::OperationDenied), "{page:?} is mapped");
    }
    assert_eq!(rig.try_deposit(&[LARGE + 9]), Err(Status::InvalidParameter), "it is shared");
    assert_eq!(rig.parent.ledger.page_use(LARGE + 9), Some(PageUse::Shared(5)));

    let no = Err(Status::InvalidParameter);
    assert_eq!(rig.parent.map_stats_page(&of_vp(2), location), Err(Status::InvalidVpIndex));
    assert_eq!(rig.parent.map_stats_page(&own(StatsObject::Processor(1)), location), no);
    assert_eq!(rig.parent.map_stats_page(&StatsPage { area: StatsArea::Parent, ..pages[3] }, location), no);
    let unknown = own(StatsObject::Partition(PartitionId(0x1234)));
    assert_eq!(rig.parent.map_stats_page(&unknown, location), Err(Status::InvalidPartitionId));

    assert_eq!(rig.parent.unmap_stats_page(&pages[1]), Ok(()));
    assert_eq!(rig.parent.unmap_stats_page(&pages[1]), Err(Status::NotFound));
    let deposited = page_of_number(FIRST).expect("a page");
    rig.deposit(1);
    assert_eq!(rig.parent.map_stats_page(&pages[1], deposited), no, "it is the hypervisor's");
    assert_eq!(rig.parent.stats.count(), 4);
    rig.parent.forget_stats();
    assert_eq!(rig.parent.ledger.page_use(LARGE + 9), Some(PageUse::Shared(0)));
    assert_eq!(rig.parent.unmap_stats_page(&pages[0]), Err(Status::NotFound));
}
