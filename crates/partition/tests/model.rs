//! Random calls of a parent, compared with a naive model: sets of pages, one entry for each page of 4 KiB.
//!
//! The calls are bytes, parsed as by the hypervisor. Half of their fields have valid values, the others are random.
//! After each call, the pages in it and some others are compared, and each child's deposits are counted. From time to
//! time everything is compared.

use std::collections::{BTreeMap, BTreeSet};

use hyperv_defs::memory::{Mapping, UNMAP_LARGE_PAGE, number_of_page};
use hyperv_defs::partition::CreatePartitionInput;
use hyperv_defs::property::{ProcessorFeatures, SyntheticFeatures, XsaveFeatures};
use hyperv_defs::vp::{StatsObject, Vp as VpName};
use hyperv_defs::wire::{U32, U64};
use hyperv_defs::{Call, Code, Control, Offered, PartitionId, Request, Status, parse};
use partition::{
    CpuidResults, Entry, Host, Ledger, OwnStats, PAGE_LIMIT, PageUse, Parent, Partition, Progress, Released, State,
    Store, Use, Value,
};

const CALLS: usize = 1_000_000;
const SEED: u64 = 0x5eed_0001;
const CHILDREN: usize = 4;
/// Of the parent: small pages, mostly for deposits, and large ones.
const MEMORY: [(u64, u64); 2] = [(0x10, 96), (0x400, 4 * 512)];
const PAGES_PER_VP: usize = 3;

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

/// A child as the model knows it.
#[derive(Default)]
struct Child {
    entries: BTreeMap<u64, Entry>,
    deposited: BTreeSet<u64>,
    vps: BTreeMap<u32, BTreeMap<(u8, u8), u64>>,
    stats: BTreeMap<u8, u64>,
    ports: BTreeMap<u32, u32>,
}

/// Whether statistics are about no child.
fn is_own(object: StatsObject) -> bool {
    match object {
        StatsObject::Hypervisor | StatsObject::Processor(_) => true,
        StatsObject::Partition(id) => id == PartitionId::SELF,
        StatsObject::Vp(vp) => vp.partition == PartitionId::SELF,
    }
}

/// Whether there was any.
fn spend(time: &mut u16) -> bool {
    *time -= 1;
    *time != 0
}

struct World {
    parent: Parent,
    pages: Pages,
    next_id: u64,
    children: BTreeMap<u64, Child>,
    gone: Vec<u64>,
    /// How often each page is in use.
    uses: BTreeMap<u64, u32>,
    ports: BTreeMap<u32, u64>,
    /// Pages of statistics about the host and the parent.
    own_stats: BTreeMap<StatsObject, u64>,
    /// Changes without their flush so far: the child, the value to settle, and the pages in it.
    owed: Vec<(u64, Released, Vec<u64>)>,
    random: fastrand::Rng,
    counts: BTreeMap<(String, u16), u64>,
}

fn host() -> Host {
    Host {
        features: ProcessorFeatures::SSE3 | ProcessorFeatures::AES,
        xsave_features: XsaveFeatures::XSAVE,
        xsave_states: 7,
        max_xsave_bytes: 832,
        synthetic_features: SyntheticFeatures::HV1,
        physical_address_width: 48,
        tsc_hertz: 1_000_000_000,
        vps: 4,
        pages_per_vp: PAGES_PER_VP,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let ledger = Ledger::new(&MEMORY).expect("there is memory");
        let mut parent = Parent::new(ledger, host());
        parent.stats = OwnStats::new(2, 2);
        Self {
            parent,
            own_stats: BTreeMap::new(),
            pages: Pages::default(),
            next_id: 0x100,
            children: BTreeMap::new(),
            gone: Vec::new(),
            uses: BTreeMap::new(),
            ports: BTreeMap::new(),
            owed: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            counts: BTreeMap::new(),
        }
    }

    // Values for fields.

    fn one_of(&mut self, values: &[u64]) -> u64 {
        values[self.random.usize(..values.len())]
    }

    fn garbage(&mut self) -> u64 {
        let word = self.random.u64(..);
        self.one_of(&[0, !0, 1 << 52, word, word & 0xff])
    }

    fn id(&mut self) -> u64 {
        match self.random.u8(..32) {
            0 => self.garbage(),
            1 => !0,
            2 if !self.gone.is_empty() => self.gone[self.random.usize(..self.gone.len())],
            _ if self.children.is_empty() => 0x100,
            _ => {
                let at = self.random.usize(..self.children.len());
                *self.children.keys().nth(at).expect("it is one of them")
            }
        }
    }

    /// A page of a child: few of them, at borders of tables.
    fn gpa(&mut self) -> u64 {
        let border = self.one_of(&[0, 0x200, 0x400, 1 << 18, 1 << 27, PAGE_LIMIT - 0x400]);
        match self.random.u8(..32) {
            0 => self.garbage(),
            1..=7 => border,
            8..=11 => border + 0x200,
            12..=14 => (border + 0x1fc) & !7,
            _ => border + self.random.u64(..24),
        }
    }

    /// A page of the parent.
    fn page(&mut self) -> u64 {
        match self.random.u8(..32) {
            0 => self.garbage(),
            1..=8 => 0x400 + self.random.u64(..4) * 512,
            9..=12 => 0x400 + self.random.u64(..2048),
            _ => 0x10 + self.random.u64(..100),
        }
    }

    fn call(&mut self) -> (Control, Vec<u8>) {
        // Sequences should be long, and most calls should change the state of this crate.
        let code = loop {
            let code = Code::ALL[self.random.usize(7..Code::ALL.len())];
            let one_in = match code {
                Code::FinalizePartition | Code::DeletePartition => 40,
                Code::WithdrawMemory => 12,
                Code::DeleteVp | Code::DeletePort => 6,
                Code::MapGpaPages | Code::UnmapGpaPages | Code::DepositMemory | Code::InitializePartition => 1,
                Code::CreateVp | Code::MapVpStatePage | Code::UnmapVpStatePage | Code::MapStatsPage2 => 1,
                Code::ConnectPort | Code::DisconnectPort | Code::CreatePort => 2,
                _ => 8,
            };
            if self.random.u8(..one_in) == 0 {
                break code;
            }
        };
        let id = self.id();
        let vp = u64::from(self.random.u32(..4) + u32::from(self.random.u8(..16) == 0));
        let count = if self.random.u8(..8) == 0 { self.random.u16(..600) } else { self.random.u16(1..12) };
        let mut control = Control::new(code);
        if code.shape().rep.is_some() {
            control = control.with_rep_count(count);
            if self.random.u8(..8) == 0 {
                control = control.with_rep_start(self.random.u16(..count.max(1)));
            }
        }

        let mut words = match code {
            Code::CreatePartition => {
                let flags = self.one_of(&[0x48_2110, 0x48_2110, 0x48_2110, 0x48_2112, 0]);
                let input = CreatePartitionInput {
                    flags: U64::new(flags),
                    compatibility_version: U32::new(0x609),
                    ..CreatePartitionInput::default()
                };
                return (control, input.bytes().to_vec());
            }
            Code::GetPartitionProperty | Code::GetPartitionPropertyEx | Code::SetPartitionProperty => {
                let property = self.one_of(&[0x1_0001, 0x3_0003, 0x5_0005, 0x6_000a, 0x6_0006, 0x9_0007, 0x5_0017, 1]);
                let value = self.one_of(&[0, 1, 2, 48, !0]);
                vec![id, property, value]
            }
            Code::DepositMemory => vec![id],
            Code::WithdrawMemory => vec![id, 0],
            Code::MapGpaPages => {
                let flags = self.one_of(&[1, 0xf, 0xd, 0x1_0000, 0x1_0000, 0x8000_000f, 0x8001_0000, 0x800f, 2]);
                vec![id, self.gpa(), flags]
            }
            Code::UnmapGpaPages => {
                let flags = self.one_of(&[0, 0, u64::from(UNMAP_LARGE_PAGE), 1]);
                vec![id, self.gpa(), flags]
            }
            Code::MapVpStatePage | Code::UnmapVpStatePage => {
                let kind = self.one_of(&[0, 1, 0, 1, 2]);
                let provided = self.one_of(&[1 << 56, 1 << 56, 1 << 56, 0]);
                vec![id, vp | kind << 32 | provided, self.page()]
            }
            Code::MapStatsPage2 | Code::UnmapStatsPage => {
                let object = self.one_of(&[0x1_0001, 0x1_0002, 0x1_0002, 1, 2]);
                let area = self.one_of(&[0, 1, 2]);
                vec![object, id, vp | area << 56, self.page()]
            }
            Code::RegisterInterceptResult => {
                vec![id, vp | 2 << 32, self.random.u64(..8), 0, 5 | !0 << 32, 0, 0, 0]
            }
            Code::CreatePort => {
                let number = self.random.u64(..6);
                vec![!0, number, id, 4, 5 | 0xffff_ffff << 32, 0, 0]
            }
            Code::ConnectPort => {
                let (connection, port) = (self.random.u64(..6), self.random.u64(..6));
                let flags = self.one_of(&[0x8000_0000, 3, 0x8000_0002, 7]);
                vec![id, connection, !0, port, 4, 0x1000 * self.random.u64(..3), 7, flags, 0]
            }
            Code::DeletePort => vec![!0, self.random.u64(..6)],
            Code::DisconnectPort => vec![id, self.random.u64(..6) | 1 << 32],
            _ => vec![id, vp, 0, 0, 0, 0, 0, 0, 0],
        };
        if self.random.u8(..16) == 0 {
            let at = self.random.usize(..words.len());
            words[at] = self.garbage();
        }
        let header = code.shape().header_bytes(control);
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if matches!(code, Code::DepositMemory | Code::MapGpaPages) {
            let first = self.page();
            let is_run = self.random.bool();
            for index in 0..u64::from(control.rep_count()) {
                let page = if is_run { first.wrapping_add(index) } else { self.page() };
                bytes.extend(page.to_le_bytes());
            }
        }
        bytes.resize(header + bytes.len().saturating_sub(header).max(8 * 600), 0);
        (control, bytes)
    }

    // The model.

    fn release(&mut self, page: u64) {
        let uses = self.uses.get_mut(&page).expect("it is in use");
        *uses -= 1;
        if *uses == 0 {
            self.uses.remove(&page);
        }
    }

    fn settle_one(&mut self, at: usize) {
        let (id, released, sources) = self.owed.swap_remove(at);
        let (child, ledger) = self.parent.child_mut(PartitionId(id)).expect("it lives as long as it is owed");
        child.settle(released, ledger, &mut self.pages);
        sources.into_iter().for_each(|page| self.release(page));
    }

    fn settle_all_of(&mut self, id: u64) {
        while let Some(at) = self.owed.iter().position(|(of, ..)| *of == id) {
            self.settle_one(at);
        }
    }

    /// Puts an entry into the model. Returns the old one.
    fn put(&mut self, id: u64, page: u64, entry: Entry) -> Option<u64> {
        let child = self.children.get_mut(&id).expect("it exists");
        let old = match entry {
            Entry::Absent => child.entries.remove(&page),
            entry => child.entries.insert(page, entry),
        };
        if let Entry::Page { source, .. } = entry {
            *self.uses.entry(source).or_default() += 1;
        }
        match old {
            Some(Entry::Page { source, .. }) => Some(source),
            _ => None,
        }
    }

    fn is_shareable(&self, page: u64) -> bool {
        let is_own = MEMORY.iter().any(|(first, pages)| (*first..first + pages).contains(&page));
        is_own && !self.children.values().any(|child| child.deposited.contains(&page))
    }

    fn step(&mut self) {
        let (control, input) = self.call();
        let request = match parse(control, &input, Offered::all()) {
            Ok(Call::Partition(request)) => request,
            Ok(other) => panic!("not a parent's: {other:?}"),
            Err(_) => return self.count(control, Err(Status::InvalidParameter)),
        };
        let result = self.perform(&request);
        self.count(control, result);
        if !self.owed.is_empty() && (self.owed.len() > 3 || self.random.bool()) {
            let at = self.random.usize(..self.owed.len());
            self.settle_one(at);
        }
    }

    fn count(&mut self, control: Control, result: Result<(), Status>) {
        let name = Code::try_from(control.code()).map_or_else(|_| String::new(), |code| format!("{code:?}"));
        *self.counts.entry((name, result.map_or_else(|status| status as u16, |()| 0))).or_default() += 1;
    }

    fn state(&self, id: PartitionId) -> Result<State, Status> {
        self.parent.child(id).map(Partition::state)
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each call")]
    fn perform(&mut self, request: &Request<'_>) -> Result<(), Status> {
        match request {
            Request::CreatePartition(create) => {
                if self.children.len() == CHILDREN {
                    return Err(Status::NoResources);
                }
                let id = self.parent.create(PartitionId(self.next_id), create)?;
                assert!(!self.gone.contains(&id.0) && !self.children.contains_key(&id.0), "an id is used again");
                self.children.insert(id.0, Child::default());
                self.next_id += 1;
                Ok(())
            }
            Request::InitializePartition(id) => {
                let (child, _) = self.parent.child_mut(*id)?;
                let had = (child.state(), child.deposits.free());
                let result = child.initialize(&mut self.pages);
                assert_eq!(result.is_ok(), had.0 == State::Created && had.1 > 0);
                result
            }
            Request::FinalizePartition(id) => {
                self.parent.finalize(*id)?;
                // All VPs are stopped, all TLBs are flushed.
                self.settle_all_of(id.0);
                let (child, ledger) = self.parent.child_mut(*id)?;
                let mut rounds = 0;
                while child.empty(ledger, &mut self.pages) == Progress::More {
                    rounds += 1;
                    assert!(rounds < 10_000, "it never ends");
                }
                assert_eq!(child.deposits.free(), child.deposits.total(), "all deposits can be withdrawn");
                let model = self.children.get_mut(&id.0).expect("it exists");
                let of_vps = model.vps.values().flat_map(BTreeMap::values);
                let mut sources: Vec<u64> = of_vps.chain(model.stats.values()).copied().collect();
                sources.extend(model.entries.values().filter_map(|entry| match entry {
                    Entry::Page { source, .. } => Some(*source),
                    _ => None,
                }));
                (model.entries, model.vps, model.stats) = Default::default();
                model.ports.clear();
                sources.into_iter().for_each(|page| self.release(page));
                self.ports.retain(|_, sender| *sender != id.0);
                Ok(())
            }
            Request::DeletePartition(id) => {
                let state = self.state(*id)?;
                if state == State::Finalized || state == State::Created {
                    self.settle_all_of(id.0);
                }
                let mut returned = Vec::new();
                while self.parent.delete(*id, 7, &mut self.pages, |page| returned.push(page))? == Progress::More {}
                let model = self.children.remove(&id.0).expect("it exists");
                let returned: BTreeSet<u64> = returned.into_iter().collect();
                assert_eq!(returned, model.deposited, "what it had goes back to the parent");
                model.stats.values().copied().for_each(|page| self.release(page));
                self.ports.retain(|_, sender| *sender != id.0);
                self.gone.push(id.0);
                Ok(())
            }
            Request::GetProperty(get) => {
                let value = self.parent.property(get.partition, get.property)?;
                assert!(!matches!(value, Value::Bank(_)) || get.partition == PartitionId::SELF);
                Ok(())
            }
            Request::SetProperty(set) => {
                let host = self.parent.host;
                let (child, _) = self.parent.child_mut(set.partition)?;
                let _change = child.set_property(set)?;
                assert!(
                    matches!(child.property(set.property, &host)?, Value::ReferenceTime)
                        || child.property(set.property, &host)? == Value::Word(set.value)
                );
                Ok(())
            }
            Request::Deposit(deposit) => {
                let most = self.random.u16(1..300);
                let mut claimed = Vec::new();
                let (done, result) = self.parent.claim(deposit, most, |page| claimed.push(page));
                assert_eq!(usize::from(done), claimed.len());
                for page in claimed {
                    assert!(self.is_shareable(page) && !self.uses.contains_key(&page), "{page:#x} was in use");
                    let model = self.children.get_mut(&deposit.partition.0).expect("it exists");
                    assert!(model.deposited.insert(page));
                    let (child, _) = self.parent.child_mut(deposit.partition)?;
                    child.deposits.add(page, &mut self.pages);
                }
                result
            }
            Request::Withdraw(withdraw) => {
                let (child, ledger) = self.parent.child_mut(withdraw.partition)?;
                let model = self.children.get_mut(&withdraw.partition.0).expect("it exists");
                for _ in 0..withdraw.count {
                    let page = child.withdraw(ledger, &mut self.pages).ok_or(Status::NoResources)?;
                    assert!(model.deposited.remove(&page), "{page:#x} was not deposited");
                    assert!(!self.pages.0.contains_key(&page), "{page:#x} is not cleared");
                }
                Ok(())
            }
            Request::MapPages(map) => {
                let mut time = self.random.u16(1..64);
                let (child, ledger) = self.parent.child_mut(map.partition)?;
                let (released, result) = child.map_pages(map, || spend(&mut time), ledger, &mut self.pages);
                if matches!(child.state(), State::Finalizing | State::Finalized) {
                    let is_gone = child.state() == State::Finalized;
                    let wanted = match map.what {
                        Mapping::NoAccess(count) => (if is_gone { count } else { 0 }, true),
                        Mapping::Pages(..) => (0, false),
                    };
                    assert!(!released.needs_flush());
                    assert_eq!((released.done, result.is_ok()), wanted);
                    return result;
                }
                let step = if map.is_large { 512 } else { 1 };
                let mut entries = Vec::new();
                for element in 0..released.done {
                    let base = number_of_page(map.first) + u64::from(element) * step;
                    for offset in 0..step {
                        entries.push((
                            base + offset,
                            match map.what {
                                Mapping::NoAccess(_) => Entry::NoAccess,
                                Mapping::Pages(pages, access) => {
                                    let page = pages.iter().nth(element.into()).expect("it was done");
                                    let source = number_of_page(page.expect("it was done")) + offset;
                                    assert!(self.is_shareable(source), "{source:#x} is deposited or not the parent's");
                                    Entry::Page { source, access }
                                }
                            },
                        ));
                    }
                }
                self.follow(map.partition.0, released, &entries, step);
                result
            }
            Request::UnmapPages(unmap) => {
                let mut time = self.random.u16(1..64);
                let (child, ledger) = self.parent.child_mut(unmap.partition)?;
                let (released, result) = child.unmap_pages(unmap, || spend(&mut time), ledger, &mut self.pages);
                let step = if unmap.is_large { 512 } else { 1 };
                if child.state() == State::Initialized {
                    let first = number_of_page(unmap.first);
                    let pages = first..first + u64::from(released.done) * step;
                    let entries: Vec<_> = pages.map(|page| (page, Entry::Absent)).collect();
                    self.follow(unmap.partition.0, released, &entries, step);
                } else {
                    assert!(!released.needs_flush());
                }
                result
            }
            Request::CreateVp(vp) => {
                let host = self.parent.host;
                let (child, _) = self.parent.child_mut(vp.partition)?;
                let model = self.children.get_mut(&vp.partition.0).expect("it exists");
                let paid = child.create_vp(vp.index, &host, &mut self.pages)?.paid().to_vec();
                assert_eq!(paid.len(), PAGES_PER_VP);
                assert!(paid.iter().all(|page| model.deposited.contains(page)));
                assert!(model.vps.insert(vp.index, BTreeMap::new()).is_none());
                Ok(())
            }
            Request::DeleteVp(vp) => {
                let (child, ledger) = self.parent.child_mut(vp.partition)?;
                child.delete_vp(vp.index, ledger, &mut self.pages)?;
                let model = self.children.get_mut(&vp.partition.0).expect("it exists");
                let shared = model.vps.remove(&vp.index).expect("it existed");
                shared.into_values().for_each(|page| self.release(page));
                Ok(())
            }
            Request::CpuidResult(result) => {
                let (child, _) = self.parent.child_mut(result.vp.partition)?;
                let _ = child.vp(result.vp.index)?;
                let mut cpuid = CpuidResults::new();
                cpuid.register(result)?;
                let _ = cpuid.answer(result.leaf, 0, [0; 4]);
                Ok(())
            }
            Request::MapStatePage(map) => {
                let (child, ledger) = self.parent.child_mut(map.vp.partition)?;
                let page = child.map_state_page(map, ledger)?;
                self.share(map.vp, (0, map.page as u8), page);
                Ok(())
            }
            Request::UnmapStatePage(unmap) => {
                let (child, ledger) = self.parent.child_mut(unmap.vp.partition)?;
                child.unmap_state_page(unmap, ledger)?;
                self.unshare(unmap.vp, (0, unmap.page as u8));
                Ok(())
            }
            Request::MapStatsPage(stats, location) => {
                let page = self.parent.map_stats_page(stats, *location)?;
                match stats.object {
                    object if is_own(object) => {
                        assert!(self.is_shareable(page));
                        *self.uses.entry(page).or_default() += 1;
                        assert!(self.own_stats.insert(object, page).is_none());
                    }
                    StatsObject::Vp(vp) => self.share(vp, (1, stats.area as u8), page),
                    StatsObject::Partition(id) => {
                        assert!(self.is_shareable(page));
                        *self.uses.entry(page).or_default() += 1;
                        let model = self.children.get_mut(&id.0).expect("it exists");
                        assert!(model.stats.insert(stats.area as u8, page).is_none());
                    }
                    StatsObject::Hypervisor | StatsObject::Processor(_) => {}
                }
                Ok(())
            }
            Request::UnmapStatsPage(stats) => {
                self.parent.unmap_stats_page(stats)?;
                match stats.object {
                    object if is_own(object) => {
                        let page = self.own_stats.remove(&object).expect("it was mapped");
                        self.release(page);
                    }
                    StatsObject::Vp(vp) => self.unshare(vp, (1, stats.area as u8)),
                    StatsObject::Partition(id) => {
                        let model = self.children.get_mut(&id.0).expect("it exists");
                        let page = model.stats.remove(&(stats.area as u8)).expect("it was mapped");
                        self.release(page);
                    }
                    StatsObject::Hypervisor | StatsObject::Processor(_) => {}
                }
                Ok(())
            }
            Request::CreatePort(create) => {
                self.parent.create_port(create)?;
                assert!(self.ports.insert(create.port.number, create.sender.0).is_none());
                Ok(())
            }
            Request::DeletePort(port) => {
                self.parent.delete_port(port)?;
                assert!(self.ports.remove(&port.number).is_some());
                Ok(())
            }
            Request::ConnectPort(connect) => {
                self.parent.connect_port(connect)?;
                let id = connect.connection.partition;
                assert_eq!(self.ports.get(&connect.port.number), Some(&id.0), "the port hears this child");
                let model = self.children.get_mut(&id.0).expect("it exists");
                assert!(model.ports.insert(connect.connection.number, connect.port.number).is_none());
                let doorbell = connect.doorbell;
                let (bytes, value) = (doorbell.bytes.unwrap_or(1), doorbell.value.unwrap_or(9));
                let rung = self.parent.child(id)?.ring(doorbell.gpa, bytes, value);
                assert!(model.ports.values().any(|port| Some(*port) == rung), "it rings a port of this child's");
                Ok(())
            }
            Request::DisconnectPort(port) => {
                let (child, _) = self.parent.child_mut(port.partition)?;
                child.disconnect(port.number)?;
                let model = self.children.get_mut(&port.partition.0).expect("it exists");
                assert!(model.ports.remove(&port.number).is_some());
                Ok(())
            }
            // These are about VPs that run.
            _ => Ok(()),
        }
    }

    /// Follows a change of a map in the model.
    fn follow(&mut self, id: u64, released: Released, entries: &[(u64, Entry)], step: u64) {
        assert_eq!(entries.len() as u64, u64::from(released.done) * step);
        // A small page that is mapped as before stays mapped.
        let changed = entries.iter().filter_map(|(page, entry)| {
            let is_same = step == 1 && self.children[&id].entries.get(page) == Some(entry);
            if is_same { None } else { self.put(id, *page, *entry) }
        });
        let sources: Vec<u64> = changed.collect();
        assert_eq!(released.needs_flush(), !sources.is_empty(), "what was there is flushed, and nothing else");
        if let Some((first, _)) = entries.first() {
            assert_eq!(released.changed, *first..first + entries.len() as u64);
        }
        self.owed.push((id, released, sources));
    }

    fn share(&mut self, vp: VpName, slot: (u8, u8), page: u64) {
        assert!(self.is_shareable(page));
        *self.uses.entry(page).or_default() += 1;
        let model = self.children.get_mut(&vp.partition.0).expect("it exists");
        assert!(model.vps.get_mut(&vp.index).expect("it exists").insert(slot, page).is_none());
    }

    fn unshare(&mut self, vp: VpName, slot: (u8, u8)) {
        let model = self.children.get_mut(&vp.partition.0).expect("it exists");
        let page = model.vps.get_mut(&vp.index).expect("it exists").remove(&slot).expect("it was mapped");
        self.release(page);
    }

    // Comparisons.

    fn check_some(&mut self) {
        assert_eq!(self.parent.children().len(), self.children.len());
        for child in self.parent.children() {
            let model = &self.children[&child.id.0];
            assert_eq!(child.deposits.total(), model.deposited.len() as u64, "each deposited page is somewhere");
            assert_eq!(child.vps().len(), model.vps.len());
            assert_eq!(child.doorbells().len(), model.ports.len());
        }
        assert_eq!(self.parent.ports.len(), self.ports.len());

        for _ in 0..4 {
            let (gpa, page) = (self.gpa(), self.page());
            for child in self.parent.children() {
                let expected = self.children[&child.id.0].entries.get(&gpa).copied().unwrap_or(Entry::Absent);
                assert_eq!(child.page(gpa, &self.pages), expected, "{:?} {gpa:#x}", child.id);
            }
            self.check_page(page);
        }
    }

    fn check_page(&self, page: u64) {
        let deposits = self.children.values().filter(|child| child.deposited.contains(&page)).count();
        let expected = match (self.uses.get(&page), deposits) {
            (None, 1) => Some(PageUse::Deposited),
            (uses, 0) => Some(PageUse::Shared(uses.map_or(0, |uses| u16::try_from(*uses).expect("few")))),
            both => panic!("{page:#x} is deposited and in use: {both:?}"),
        };
        let is_own = MEMORY.iter().any(|(first, pages)| (*first..first + pages).contains(&page));
        assert_eq!(self.parent.ledger.page_use(page), expected.filter(|_| is_own), "{page:#x}");
    }

    fn check_all(&self) {
        MEMORY.iter().flat_map(|(first, pages)| *first..first + pages).for_each(|page| self.check_page(page));
        for child in self.parent.children() {
            let model = &self.children[&child.id.0];
            let (leaves, tables) = child.map().describe(&self.pages);
            let held = self.owed.iter().filter(|(id, ..)| *id == child.id.0).count();
            assert!(child.deposits.used(Use::Map) >= tables);
            assert!(held > 0 || child.deposits.used(Use::Map) == tables, "tables that are nowhere");
            assert_eq!(child.deposits.used(Use::Vp), (model.vps.len() * PAGES_PER_VP) as u64);

            // Large leaves of no access may be larger than the model's memory: their number is compared, and samples.
            let pages: u64 = leaves.iter().map(|(_, pages, _)| *pages).sum();
            assert_eq!(pages, model.entries.len() as u64);
            for (first, count, entry) in leaves {
                for offset in [0, count / 2, count - 1] {
                    let expected = match entry {
                        Entry::Page { source, access } => Entry::Page { source: source + offset, access },
                        same => same,
                    };
                    assert_eq!(model.entries.get(&(first + offset)), Some(&expected));
                }
            }
        }
    }
}

/// Any sequence of calls leaves each page with one owner, and no child notices another's calls.
#[test]
fn a_million_calls_agree_with_the_model() {
    let mut world = World::new(SEED);
    for number in 0..CALLS {
        world.step();
        world.check_some();
        if number % 1000 == 0 {
            world.check_all();
        }
    }
    world.check_all();

    // The calls were not all refused.
    let done = |code: &str| world.counts.get(&(code.to_owned(), 0)).copied().unwrap_or(0);
    for (code, least) in [
        ("CreatePartition", 500),
        ("InitializePartition", 500),
        ("FinalizePartition", 500),
        ("DeletePartition", 500),
        ("SetPartitionProperty", 500),
        ("DepositMemory", 500),
        ("WithdrawMemory", 500),
        ("MapGpaPages", 1000),
        ("UnmapGpaPages", 1000),
        ("CreateVp", 500),
        ("DeleteVp", 500),
        ("MapVpStatePage", 500),
        ("UnmapVpStatePage", 500),
        ("MapStatsPage2", 500),
        ("UnmapStatsPage", 500),
        ("RegisterInterceptResult", 500),
        ("CreatePort", 500),
        ("DeletePort", 500),
        ("ConnectPort", 100),
        ("DisconnectPort", 100),
    ] {
        assert!(done(code) >= least, "{code} succeeded {} times only: {:#?}", done(code), world.counts);
    }
}

/// When the parent dies, everything is its own again.
#[test]
fn nothing_is_left_of_a_parent() {
    for seed in 0..50 {
        let mut world = World::new(seed);
        (0..2000).for_each(|_| world.step());
        let ids: Vec<u64> = world.children.keys().copied().collect();
        for id in ids {
            let partition = PartitionId(id);
            if world.state(partition) != Ok(State::Finalized) {
                world.perform(&Request::FinalizePartition(partition)).expect("it is alive");
            }
            world.perform(&Request::DeletePartition(partition)).expect("it is finalized");
        }
        world.parent.forget_stats();
        assert_eq!(world.parent.ledger.used().count(), 0);
        assert_eq!(world.pages.0.len(), 0, "nothing is left in deposited pages");
        assert!(world.parent.ports.is_empty());
    }
}
