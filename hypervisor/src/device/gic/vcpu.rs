//! The interrupts of one vCPU, for the pCPU that runs it: the content of its list registers.
//!
//! Usually every pending or active interrupt fits, and the order in the list registers does not matter: a new interrupt
//! goes into a free one ([`insert`](VcpuGic::insert)). If there are more, they are sorted in the order in which the
//! guest will need them ([`order`](super::order)), and the first ones get a place ([`rebuild`](VcpuGic::rebuild)).
//!
//! For interrupts without a place, the processor must exit at two events: when no list register is pending any more
//! (or, if none was, when at most one is in use), and when the guest ends an interrupt that the processor cannot find.
//! The processor only counts the latter, so their number is *owed*. Interrupts end in the order of their priority, so
//! each was the one of highest priority without a place.

use super::distributor::{Distributor, Question};
use super::list_register::{ListRegister, State, control};
use super::order::{Candidate, First, Unlisted};
use super::posted::Taken;
use super::private::Private;
use super::registers::{SGI_FRAME, Width, gicr, read_identity, waker};
use super::{FIRST_SPI, MAX_LISTS, Read, bits};

/// Interrupt state of a vCPU: its redistributor and its list registers.
#[derive(Debug)]
pub struct VcpuGic {
    lists: [ListRegister; MAX_LISTS],
    /// List registers that the processor has.
    count: usize,
    /// List registers in use, one bit each. A register whose SPI has ended stays in use until the distributor knows.
    used: u32,
    /// Those whose pending state came from a latch, not from a line.
    latched: u32,
    /// Private INTIDs that are in list registers.
    in_lists: u32,
    pub(super) private: Private,
    /// GICR_WAKER.ProcessorSleep: nothing is delivered.
    asleep: bool,
    /// The distributor lets interrupts through.
    forwards: bool,
    /// Some SPI is enabled.
    has_spis: bool,
    /// The list registers must be updated.
    dirty: bool,
    /// The distributor must be visited.
    spi_news: bool,
    /// Which kinds of interrupts do not fit into the list registers.
    unlisted: Unlisted,
    /// Ends of interrupts that the processor did not find.
    owed: u32,
    /// EOImode of the guest.
    splits_end: bool,
    question: Option<Question>,
    number: u32,
    vcpus: u32,
}

/// Constants of a vCPU's interrupt state.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The vCPU's number.
    pub number: u32,
    /// The VM's number of vCPUs.
    pub vcpus: u32,
    /// Number of the processor's list registers, at least two (ICH_VTR_EL2.ListRegs + 1).
    pub lists: usize,
    /// PPIs linked to physical interrupts of the same number, one bit each: the virtual timer's.
    pub linked: u32,
}

/// The way from one exit to the next entry.
impl VcpuGic {
    /// After reset: asleep, all disabled.
    ///
    /// # Panics
    ///
    /// With fewer than two list registers, or more than the architecture has.
    #[must_use]
    pub fn new(config: Config) -> Self {
        assert!((2..=MAX_LISTS).contains(&config.lists), "{} list registers", config.lists);
        Self {
            lists: [ListRegister::default(); MAX_LISTS],
            count: config.lists,
            used: 0,
            latched: 0,
            in_lists: 0,
            private: Private::new(config.linked),
            asleep: true,
            forwards: false,
            has_spis: false,
            dirty: false,
            spi_news: true,
            unlisted: Unlisted::default(),
            owed: 0,
            splits_end: false,
            question: None,
            number: config.number,
            vcpus: config.vcpus,
        }
    }

    /// Call this after an exit. `read` reads a list register, `control` is ICH_HCR_EL2, and `splits_end` is
    /// ICH_VMCR_EL2.VEOIM. Returns how many interrupts the guest has acknowledged since its entry.
    pub fn fold(&mut self, mut read: impl FnMut(usize) -> u64, control: u64, splits_end: bool) -> u64 {
        let mut acknowledged = 0;
        for index in bits(self.used) {
            let state = ListRegister(read(index as usize)).state();
            let before = self.lists[index as usize].state();
            if state != before {
                acknowledged += u64::from(before.pending && !state.pending);
                self.change(index, state);
            }
        }
        if splits_end != self.splits_end {
            self.splits_end = splits_end;
            self.dirty = true;
        }
        // With a split end, it is the second half that ends an interrupt, and that exits.
        let ends = control::eoi_count(control);
        if ends != 0 && !splits_end {
            self.owed += ends;
            self.dirty = true;
        }
        acknowledged
    }

    /// Takes what others have posted.
    pub fn accept(&mut self, posted: Taken) {
        self.private.latch |= posted.raised();
        self.dirty |= posted.raised() != 0;
        self.spi_news |= posted.has_spis();
    }

    /// The line of the vCPU's own PPI `intid` is asserted, or not. For a linked one: the physical interrupt came, or it
    /// turned out that its cause is gone. Other INTIDs are ignored.
    pub fn set_line(&mut self, intid: u32, asserted: bool) {
        if (16..FIRST_SPI).contains(&intid) {
            self.private.set_line(1 << intid, asserted);
            self.dirty = true;
        }
    }

    /// The vCPU sends the SGI `intid` to itself.
    pub fn raise(&mut self, intid: u32) {
        if intid < 16 {
            self.private.latch |= 1 << intid;
            self.dirty = true;
        }
    }

    /// Whether [`VcpuGic::prepare`] has anything to do.
    #[must_use]
    #[inline]
    pub const fn has_changed(&self) -> bool {
        self.dirty || self.spi_news
    }

    /// Whether [`VcpuGic::prepare`] wants the distributor.
    #[must_use]
    pub fn needs_distributor(&self) -> bool {
        let has_spis = || bits(self.used).any(|index| self.lists[index as usize].intid() >= FIRST_SPI);
        let overflows = || self.outside().count_ones() as usize > self.count - self.used.count_ones() as usize;
        self.spi_news
            || self.dirty && (self.unlisted.spi_pending || self.unlisted.spi_active || overflows() && has_spis())
    }

    /// Updates the list registers. Without the distributor, SPIs do not change; with it, there may be news to deliver.
    pub fn prepare(&mut self, distributor: Option<&mut Distributor>) {
        match distributor {
            Some(distributor) => self.rebuild(Some(distributor)),
            None if !self.dirty => return,
            None => {
                self.pay(None);
                if !self.insert() {
                    self.rebuild(None);
                }
            }
        }
        self.dirty = false;
    }

    /// The list registers to load, only as many as the processor has.
    pub fn lists(&self) -> impl ExactSizeIterator<Item = u64> {
        // An empty one may still ask for an exit at its end, which has been seen.
        self.lists[..self.count].iter().map(|list| if list.state().is_none() { 0 } else { list.0 })
    }

    /// Whether all list registers are empty.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.used == 0
    }

    /// The value of ICH_HCR_EL2.
    #[must_use]
    pub fn control(&self) -> u64 {
        let mut bits = control::EN;
        if self.unlisted.private_pending || self.unlisted.spi_pending {
            // Where nothing is pending that could be taken, the second would be met at once and for ever.
            bits |= if self.deliverable() == 0 { control::UIE } else { control::NPIE };
        }
        if self.unlisted.private_active || self.unlisted.spi_active {
            bits |= control::LRENPIE;
            if self.splits_end {
                bits |= control::TDIR;
            }
        }
        bits
    }

    /// Whether a pending interrupt would interrupt a CPU with this priority mask (ICH_VMCR_EL2.VPMR), at least after it
    /// has ended its active one. For a vCPU that waits; call it after [`VcpuGic::prepare`]. If its group is disabled
    /// (ICH_VMCR_EL2.VENG1), nothing interrupts it: pass a mask of zero.
    #[must_use]
    pub fn interrupts(&self, mask: u8) -> bool {
        bits(self.deliverable()).any(|index| self.lists[index as usize].priority() < mask)
    }

    /// Whether a CPU with this priority mask, which waits, can ever be interrupted by anything but another vCPU: by a
    /// device, or by one of its own `sources`, a bit for each PPI.
    #[must_use]
    pub fn hears(&self, mask: u8, sources: u32) -> bool {
        let own = bits(sources).any(|intid| self.private.is_enabled(1 << intid) && self.private.priority(intid) < mask);
        self.delivers() && (own || self.has_spis && mask != 0)
    }

    /// The guest wrote ICC_DIR_EL1: the second half of an interrupt's end. This exits only if [`VcpuGic::control`]
    /// requested it.
    pub fn deactivate(&mut self, intid: u32, distributor: &mut Distributor) {
        let list = bits(self.used).find(|&index| self.lists[index as usize].intid() == intid);
        if let Some(index) = list {
            let state = self.lists[index as usize].state();
            self.change(index, State { active: false, ..state });
        } else if intid < FIRST_SPI {
            self.private.deactivate(1 << intid);
        } else {
            distributor.deactivate(intid);
        }
        self.dirty = true;
    }

    /// Whether the physical interrupt linked to the PPI `intid` must be active on this pCPU, because the guest has not
    /// ended its interrupt yet. If not, and the guest did not end it by itself, the caller must deactivate it.
    #[must_use]
    pub const fn holds_linked(&self, intid: u32) -> bool {
        let bit = 1_u32.wrapping_shl(intid);
        let held = self.private.latch | self.private.line | self.private.active | self.in_lists;
        intid < 32 && held & bit & self.private.linked() != 0
    }

    /// The vCPU powers off: it gives back its SPIs, and the rest stays in the redistributor until it is on again. Until
    /// then it ignores news. May create news.
    pub fn power_off(&mut self, distributor: &mut Distributor) {
        self.empty_lists(distributor);
    }

    /// Empties the list registers, so that the state of all interrupts is where their registers are. They are filled
    /// again before the next entry. May create news.
    pub fn empty_lists(&mut self, distributor: &mut Distributor) {
        self.pay(Some(distributor));
        let given_back = self.unload(Some(distributor));
        self.offer(given_back, distributor);
        self.dirty = true;
        self.spi_news = true;
    }
}

/// The registers.
impl VcpuGic {
    /// The guest reads the distributor at `offset`.
    pub fn read_distributor(&mut self, distributor: &mut Distributor, offset: u32, width: Width) -> Read {
        // So that the distributor knows all that is known here.
        self.rebuild(Some(distributor));
        distributor.read(offset, width, self.number, &mut self.question)
    }

    /// The guest writes the distributor at `offset`. May make news, for this vCPU too.
    pub fn write_distributor(&mut self, distributor: &mut Distributor, offset: u32, width: Width, value: u64) {
        self.rebuild(Some(distributor));
        distributor.write(offset, width, value, self.number);
        // For any register, this vCPU sees the result before it continues.
        self.spi_news = true;
    }

    /// The guest reads at `offset` in the redistributor of vCPU `number`, its own or another.
    ///
    /// Of others only the identity can be read: enough to find one's own among them. The rest reads zero.
    pub fn read_redistributor(&mut self, distributor: &mut Distributor, number: u32, offset: u32, width: Width) -> u64 {
        if number != self.number {
            return if number < self.vcpus { read_identity(number, self.vcpus, offset, width) } else { 0 };
        }
        if let Some(offset) = offset.checked_sub(SGI_FRAME) {
            self.unload_private(distributor);
            return self.private.read(offset, width);
        }
        if (offset, width) == (gicr::WAKER, Width::Word) {
            let sleep = waker::PROCESSOR_SLEEP | waker::CHILDREN_ASLEEP;
            return if self.asleep { sleep.into() } else { 0 };
        }
        read_identity(number, self.vcpus, offset, width)
    }

    /// The guest writes at `offset` in the redistributor of vCPU `number`. Writes to others than its own are ignored.
    pub fn write_redistributor(
        &mut self,
        distributor: &mut Distributor,
        number: u32,
        offset: u32,
        width: Width,
        value: u64,
    ) {
        if number != self.number {
            return;
        }
        self.unload_private(distributor);
        let [b0, b1, b2, b3, ..] = value.to_le_bytes();
        let value = u32::from_le_bytes([b0, b1, b2, b3]);
        if let Some(offset) = offset.checked_sub(SGI_FRAME) {
            self.private.write(offset, width, value);
        } else if (offset, width) == (gicr::WAKER, Width::Word) {
            self.asleep = value & waker::PROCESSOR_SLEEP != 0;
            // SPIs go back to where they wait, or come here.
            self.spi_news = true;
        }
    }
}

/// Keeping the list registers.
impl VcpuGic {
    /// The interrupt in list register `index` is in another state now.
    fn change(&mut self, index: u32, state: State) {
        let list = &mut self.lists[index as usize];
        list.set_state(state);
        if !state.pending {
            self.latched &= !(1 << index);
        }
        // There may be a place now, or the processor needs a new exit condition.
        self.dirty |= state.is_none() || self.unlisted.private_pending || self.unlisted.spi_pending;
        if !state.is_none() {
            return;
        }

        let intid = list.intid();
        if intid < FIRST_SPI {
            self.used &= !(1 << index);
            self.in_lists &= !(1 << intid);
            self.private.forget_linked(1 << intid);
        } else {
            // The distributor still believes that it is held.
            self.spi_news = true;
        }
    }

    /// Private interrupts that should be in list registers and are not.
    fn outside(&self) -> u32 {
        let pending = if self.delivers() { self.private.ready() } else { 0 };
        (self.private.active | pending) & !self.in_lists
    }

    const fn delivers(&self) -> bool {
        self.forwards && !self.asleep
    }

    /// Puts private interrupts into free list registers, while there are any. Returns whether all have a place.
    fn insert(&mut self) -> bool {
        for index in bits(self.used) {
            if self.lists[index as usize].intid() < FIRST_SPI {
                self.refresh(index);
            }
        }
        for intid in bits(self.outside()) {
            let Some(index) = self.free() else { return false };
            self.load_private(index, intid);
        }
        self.unlisted.private_pending = false;
        self.unlisted.private_active = false;
        true
    }

    /// A private interrupt in a list register: news of its line and its latch.
    fn refresh(&mut self, index: u32) {
        let list = self.lists[index as usize];
        let bit = 1 << list.intid();
        let mut state = list.state();

        let risen = self.private.latch & bit != 0;
        let joins = if self.private.is_edge(bit) {
            // Pending again while active, or still pending.
            state.pending || self.delivers() && self.private.is_enabled(bit)
        } else {
            state.pending
        };
        if risen && joins {
            self.private.latch &= !bit;
            self.latched |= 1 << index;
            state.pending = true;
        }
        if state.pending && self.latched & 1 << index == 0 && self.private.line & bit == 0 {
            state.pending = false;
        }
        if state != list.state() {
            self.change(index, state);
        }
    }

    /// Orders all that is pending or active and gives places to the first.
    fn rebuild(&mut self, mut distributor: Option<&mut Distributor>) {
        self.pay(distributor.as_deref_mut());
        let given_back = self.unload(distributor.as_deref_mut());
        if let Some(distributor) = &distributor {
            self.forwards = distributor.forwards();
            self.has_spis = distributor.has_enabled();
            self.unlisted = Unlisted::default();
        } else {
            self.unlisted.private_pending = false;
            self.unlisted.private_active = false;
        }

        let mut first = First::new(self.count - self.used.count_ones() as usize);
        for intid in bits(self.outside()) {
            let active = self.private.active & 1 << intid != 0;
            first.add(Candidate::new(intid, self.private.priority(intid), active, self.splits_end), &mut self.unlisted);
        }
        if let Some(distributor) = &distributor {
            let delivers = self.delivers();
            for (intid, priority, active) in distributor.candidates(self.number).filter(|spi| delivers || spi.2) {
                first.add(Candidate::new(intid, priority, active, self.splits_end), &mut self.unlisted);
            }
        }

        for candidate in first.chosen() {
            let Some(index) = self.free() else { break };
            match &mut distributor {
                Some(distributor) if candidate.intid() >= FIRST_SPI => {
                    let loaded = distributor.take(candidate.intid(), self.number);
                    self.place(index, loaded);
                }
                _ => self.load_private(index, candidate.intid()),
            }
        }

        if let Some(distributor) = distributor {
            self.offer(given_back, distributor);
            distributor.answer(self.number);
            self.spi_news = false;
        }
        self.dirty = false;
    }

    /// Takes interrupts out of the list registers: private ones, and SPIs if there is the distributor to give them to.
    /// Returns INTIDs of the latter.
    fn unload(&mut self, mut distributor: Option<&mut Distributor>) -> [Option<u32>; MAX_LISTS] {
        let mut given_back = [None; MAX_LISTS];
        for index in bits(self.used) {
            let list = self.lists[index as usize];
            let latched = self.latched & 1 << index != 0;
            if list.intid() < FIRST_SPI {
                self.private.unload(list.intid(), list.state(), latched);
                self.in_lists &= !(1 << list.intid());
            } else if let Some(distributor) = &mut distributor {
                distributor.give_back(list.intid(), list.state(), latched);
                given_back[index as usize] = Some(list.intid());
            } else {
                continue;
            }
            self.lists[index as usize] = ListRegister::default();
            self.used &= !(1 << index);
            self.latched &= !(1 << index);
        }
        given_back
    }

    /// Before an access to the private interrupts' registers: all state is where those are.
    fn unload_private(&mut self, distributor: &mut Distributor) {
        // The owed ends happened before this access, and may belong to a private interrupt or an SPI.
        self.pay(Some(distributor));
        self.unload(None);
        self.dirty = true;
    }

    /// SPIs that were given back and not taken again may be for another vCPU now.
    fn offer(&self, given_back: [Option<u32>; MAX_LISTS], distributor: &mut Distributor) {
        for intid in given_back.into_iter().flatten() {
            distributor.offer(intid, self.number);
        }
    }

    /// Ends interrupts that the guest ended and the processor did not find.
    fn pay(&mut self, mut distributor: Option<&mut Distributor>) {
        if distributor.is_none() && self.unlisted.spi_active {
            // It may be one of those; `needs_distributor` reports it.
            return;
        }
        for _ in 0..core::mem::take(&mut self.owed) {
            let private = bits(self.private.active & !self.in_lists).map(|intid| (self.private.priority(intid), intid));
            let shared = distributor.as_deref().map(|distributor| distributor.active_of(self.number));
            let shared = shared.into_iter().flatten().map(|(intid, priority)| (priority, intid));
            let Some((_, intid)) = private.chain(shared).min() else { return };
            match &mut distributor {
                Some(distributor) if intid >= FIRST_SPI => distributor.deactivate(intid),
                _ => self.private.deactivate(1 << intid),
            }
        }
    }

    fn load_private(&mut self, index: u32, intid: u32) {
        self.in_lists |= 1 << intid;
        let loaded = self.private.load(intid, self.delivers());
        self.place(index, loaded);
    }

    fn place(&mut self, index: u32, (list, latched): (ListRegister, bool)) {
        self.lists[index as usize] = list;
        self.used |= 1 << index;
        if latched {
            self.latched |= 1 << index;
        }
    }

    /// Private interrupts in list registers: INTID, state, and whether the pending state came from the latch.
    pub(super) fn private_in_lists(&self) -> impl Iterator<Item = (u32, State, bool)> {
        bits(self.used).filter_map(|index| {
            let list = self.lists[index as usize];
            (list.intid() < FIRST_SPI).then_some((list.intid(), list.state(), self.latched & 1 << index != 0))
        })
    }

    pub(super) const fn is_asleep(&self) -> bool {
        self.asleep
    }

    pub(super) const fn splits_end(&self) -> bool {
        self.splits_end
    }

    pub(super) const fn set_modes(&mut self, asleep: bool, splits_end: bool) {
        self.asleep = asleep;
        self.splits_end = splits_end;
        // Everything is placed anew, with what the distributor has.
        self.dirty = true;
        self.spi_news = true;
    }

    fn free(&self) -> Option<u32> {
        let index = (!self.used).trailing_zeros();
        ((index as usize) < self.count).then_some(index)
    }

    /// List registers whose interrupt the processor may deliver: pending, and not also active.
    fn deliverable(&self) -> u32 {
        bits(self.used)
            .filter(|&index| self.lists[index as usize].state() == State { pending: true, active: false })
            .fold(0, |set, index| set | 1 << index)
    }
}
