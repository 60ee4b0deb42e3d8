//! The distributor: all SPIs of a VM, and their holders.
//!
//! The caller has one lock around it. It takes the lock for SPIs and for the registers here, never for SGIs and PPIs.
//!
//! An SPI is here, or *held* in a list register of its target vCPU. The holder then has the pending and active state,
//! and the state here is as old as the holder's last visit. So a change of a held SPI leaves an order (`clear_pending`,
//! `clear_active`, `set_active`) and news for the holder. A read of a held SPI asks the holder, and repeats until the
//! holder has visited after the question. An edge that comes meanwhile stays in the latch here, and the holder fetches
//! it. So a held interrupt can be pending on both sides. The two become one if the guest had not acknowledged it before
//! the edge, and stay two if it had.

use alloc::vec;
use alloc::vec::Vec;

use super::forwarded::{Forwarded, Order};
use super::list_register::{End, ListRegister, State};
use super::private::{assign, gather, read_bytes, spread, write_bytes};
use super::registers::{self, Register, Width, ctlr, gicd};
use super::{FIRST_SPI, INTIDS, Read, WORDS, bits, join, split};
use crate::device::affinity::vcpu_at;

/// The part of the interrupt controller that all vCPUs share.
#[derive(Debug)]
pub struct Distributor {
    vcpus: u32,
    /// GICD_CTLR.EnableGrp1. Each vCPU has a copy, renewed at its visits.
    pub(super) forwards: bool,

    // One bit per INTID. The first word, for private interrupts, stays zero.
    pub(super) enabled: [u32; WORDS],
    pub(super) latch: [u32; WORDS],
    pub(super) line: [u32; WORDS],
    pub(super) edge: [u32; WORDS],
    /// Active and in no list register.
    pub(super) active: [u32; WORDS],
    pub(super) held: [u32; WORDS],
    /// Of held ones: the state at the holder's last visit.
    pub(super) held_pending: [u32; WORDS],
    pub(super) held_active: [u32; WORDS],
    /// Of held ones: disabled since the holder's last visit.
    recall: [u32; WORDS],
    /// Of held ones: orders to the holder.
    clear_pending: [u32; WORDS],
    clear_active: [u32; WORDS],
    set_active: [u32; WORDS],

    pub(super) priority: [u8; INTIDS as usize],
    /// IROUTER, and the vCPU that it names if there is one.
    pub(super) route: [u32; INTIDS as usize],
    target: [Option<u32>; INTIDS as usize],
    /// The vCPU that holds it, or has it active.
    pub(super) holder: [u32; INTIDS as usize],

    /// Number of questions so far, and how many of them each vCPU's last visit has answered.
    asked: u64,
    answered: Vec<u64>,
    /// vCPUs with undelivered news, one bit each.
    news: Vec<u64>,

    /// The SPIs of the machine's devices. They are pending by the latch only.
    forwarded: Forwarded,
}

/// A question that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    offset: u32,
    number: u64,
}

/// Affinity levels 0 to 2; there is no fourth, and no choice of "any CPU".
const ROUTE_FIELDS: u32 = 0x00ff_ffff;

/// For devices.
impl Distributor {
    /// After reset, for `vcpus`: nothing enabled, everything routed to the first vCPU.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        let none = [0; WORDS];
        Self {
            vcpus,
            forwards: false,
            enabled: none,
            latch: none,
            line: none,
            edge: none,
            active: none,
            held: none,
            held_pending: none,
            held_active: none,
            recall: none,
            clear_pending: none,
            clear_active: none,
            set_active: none,
            priority: [0; INTIDS as usize],
            route: [0; INTIDS as usize],
            target: [vcpu_at(0, vcpus); INTIDS as usize],
            holder: [0; INTIDS as usize],
            asked: 0,
            answered: vec![0; vcpus as usize],
            news: vec![0; vcpus.div_ceil(64) as usize],
            forwarded: Forwarded::none(),
        }
    }

    /// Forwards the machine's SPI `intid`, which has the same number for the guest. Called before the guest runs.
    pub fn forward(&mut self, intid: u32) {
        if (FIRST_SPI..INTIDS).contains(&intid) {
            let (word, bit) = split(intid);
            self.forwarded.add(word, bit);
        }
    }

    /// The machine's SPI `intid` has come, and is active there. Returns whether it is forwarded; the caller ends it
    /// otherwise. May make news and orders.
    pub fn arrived(&mut self, intid: u32) -> bool {
        let (word, bit) = split(intid);
        if word >= WORDS || self.forwarded.of(word) & bit == 0 {
            return false;
        }
        self.latch[word] |= bit;
        // Disabled in the meantime.
        if self.held[word] & bit == 0 {
            self.drop_levels(word, bit & !self.enabled[word]);
        }
        self.update(intid);
        true
    }

    /// The SPI `intid` is a message of the machine's devices: where the guest wants it is an order. Called before the
    /// guest runs.
    pub fn expect_message(&mut self, intid: u32) {
        if (FIRST_SPI..INTIDS).contains(&intid) {
            let (word, bit) = split(intid);
            self.forwarded.add_messages(word, bit);
        }
    }

    /// A message makes the SPI `intid` pending. Other INTIDs are ignored, also those that are forwarded. May make news.
    pub fn message(&mut self, intid: u32) {
        let (word, bit) = split(intid);
        if (FIRST_SPI..INTIDS).contains(&intid) && self.forwarded.of(word) & bit == 0 {
            self.latch[word] |= bit;
            self.update(intid);
        }
    }

    /// Takes the next order for the machine's interrupt controller. The caller carries it out before it gives up the
    /// lock, so that the orders of two vCPUs do not change places.
    pub fn next_order(&mut self) -> Option<Order> {
        if let Some(intid) = self.forwarded.next_configured() {
            let (word, bit) = split(intid);
            if self.forwarded.is_message(word, bit) {
                return Some(Order::Route { intid, vcpu: self.target[intid as usize] });
            }
            let [enabled, edge] = [self.enabled[word], self.edge[word]].map(|set| set & bit != 0);
            return Some(Order::Configure { intid, enabled, edge, vcpu: self.target[intid as usize] });
        }
        self.forwarded.next_ended().map(|intid| Order::Deactivate { intid })
    }

    /// The device at the SPI `intid` asserts its line, or ceases to. Other INTIDs are ignored, also those that are
    /// forwarded. May make news.
    pub fn set_line(&mut self, intid: u32, asserted: bool) {
        let (word, bit) = split(intid);
        if !(FIRST_SPI..INTIDS).contains(&intid) || self.forwarded.of(word) & bit != 0 {
            return;
        }
        let rises = asserted && self.line[word] & bit == 0;
        let falls = !asserted && self.line[word] & bit != 0;
        assign(&mut self.line[word], bit, asserted);

        if self.edge[word] & bit != 0 {
            if rises {
                self.latch[word] |= bit;
                self.update(intid);
            }
        } else if falls || (rises && self.held[word] & bit == 0) {
            // A level that rises while it is held is found at the end of the interrupt.
            self.update(intid);
        }
    }

    /// Takes one vCPU out of those for which there is news: announce it by [`Posted`](super::Posted) and post.
    pub fn next_news(&mut self) -> Option<u32> {
        let (index, word) = self.news.iter_mut().enumerate().find(|(_, word)| **word != 0)?;
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        u32::try_from(index).ok().map(|index| index * 64 + bit)
    }
}

/// For vCPUs, at their visits.
impl Distributor {
    pub(super) const fn forwards(&self) -> bool {
        self.forwards
    }

    /// Whether any SPI is enabled.
    pub(super) fn has_enabled(&self) -> bool {
        self.enabled.iter().any(|word| *word != 0)
    }

    /// All interrupts that could be in a list register of `vcpu` and have no holder: INTID, priority, and whether
    /// active.
    pub(super) fn candidates(&self, vcpu: u32) -> impl Iterator<Item = (u32, u8, bool)> {
        self.all(|word| !self.held[word] & (self.active[word] | self.ready(word))).filter_map(move |intid| {
            let active = self.is_active(intid);
            let mine =
                if active { self.holder[intid as usize] == vcpu } else { self.target[intid as usize] == Some(vcpu) };
            mine.then_some((intid, self.priority[intid as usize], active))
        })
    }

    /// `vcpu` puts one of its candidates into a list register. The second result tells whether the pending state came
    /// from the latch.
    pub(super) fn take(&mut self, intid: u32, vcpu: u32) -> (ListRegister, bool) {
        let (word, bit) = split(intid);
        let edge = self.edge[word] & bit != 0;
        let active = self.is_active(intid);
        let mine = self.target[intid as usize] == Some(vcpu);
        // A level becomes pending again only after its end, because the line may have changed by then. An interrupt
        // that is active here but routed elsewhere becomes pending there after its end.
        let forwarded = self.forwarded.of(word) & bit != 0;
        // With a physical interrupt a list register must not be both (IHI 0069 12.4.6).
        let pending = self.ready(word) & bit != 0 && (!active || edge && mine && !forwarded);
        let latched = pending && self.latch[word] & bit != 0;

        self.active[word] &= !bit;
        if latched {
            self.latch[word] &= !bit;
        }
        self.held[word] |= bit;
        assign(&mut self.held_pending[word], bit, pending);
        assign(&mut self.held_active[word], bit, active);
        self.holder[intid as usize] = vcpu;

        // Pending again after its end, which must not pass unseen then.
        let waits = active && self.ready(word) & bit != 0;
        self.forwarded.set_linked(word, bit, !waits);
        let end = match (forwarded, edge && mine) {
            (true, _) if !waits => End::Physical,
            (false, true) => End::Silent,
            (true | false, _) => End::Exit,
        };
        (ListRegister::new(intid, self.priority[intid as usize], end, State { pending, active }), latched)
    }

    /// `vcpu` gives back an interrupt that it holds, after it has done all orders.
    pub(super) fn give_back(&mut self, intid: u32, mut state: State, latched: bool) {
        let (word, bit) = split(intid);
        let had_ended = state.is_none();
        let take = |set: &mut u32| {
            let had = *set & bit != 0;
            *set &= !bit;
            had
        };
        if take(&mut self.clear_pending[word]) {
            state.pending = false;
        }
        if take(&mut self.clear_active[word]) {
            state.active = false;
        }
        if take(&mut self.set_active[word]) {
            state.active = true;
        }
        take(&mut self.recall[word]);
        take(&mut self.held[word]);

        assign(&mut self.active[word], bit, state.active);
        // A level is pending by its line, here as there.
        if state.pending && latched {
            self.latch[word] |= bit;
        }
        // What the guest ended has ended in the machine, too, if they were linked.
        if state.is_none() && !(had_ended && self.forwarded.is_linked(word, bit)) {
            self.forwarded.ended(word, bit);
        }
        self.drop_levels(word, bit & !self.enabled[word]);
    }

    /// Forwarded levels that are disabled, and not held, are not pending.
    fn drop_levels(&mut self, word: usize, disabled: u32) {
        let dropped = disabled & self.forwarded.of(word) & !self.edge[word] & self.latch[word];
        self.latch[word] &= !dropped;
        self.forwarded.ended(word, dropped & !self.active[word]);
    }

    /// `vcpu` has chosen, and `intid`, which it gave back before, may be for another vCPU.
    pub(super) fn offer(&mut self, intid: u32, vcpu: u32) {
        if self.target[intid as usize] != Some(vcpu) && !self.is_held(intid) {
            self.update(intid);
        }
    }

    /// The visit of `vcpu` ends: it has answered all earlier questions.
    pub(super) fn answer(&mut self, vcpu: u32) {
        if let Some(answered) = self.answered.get_mut(vcpu as usize) {
            *answered = self.asked;
        }
    }

    /// Active SPIs of `vcpu` that are in no list register: INTID and priority.
    pub(super) fn active_of(&self, vcpu: u32) -> impl Iterator<Item = (u32, u8)> {
        self.all(|word| self.active[word])
            .filter(move |&intid| self.holder[intid as usize] == vcpu)
            .map(|intid| (intid, self.priority[intid as usize]))
    }

    /// An interrupt ends, wherever it is.
    pub(super) fn deactivate(&mut self, intid: u32) {
        let (word, bit) = split(intid);
        if word != 0 && word < WORDS {
            self.write_active(word, bit, false, 0);
        }
    }

    pub(super) fn all(&self, set: impl Fn(usize) -> u32) -> impl Iterator<Item = u32> {
        (1..WORDS).flat_map(move |word| bits(set(word)).map(move |bit| join(word, bit)))
    }

    const fn is_active(&self, intid: u32) -> bool {
        let (word, bit) = split(intid);
        self.active[word] & bit != 0
    }

    const fn is_held(&self, intid: u32) -> bool {
        let (word, bit) = split(intid);
        self.held[word] & bit != 0
    }

    const fn pending(&self, word: usize) -> u32 {
        self.latch[word] | self.line[word] & !self.edge[word]
    }

    /// Pending and let through.
    const fn ready(&self, word: usize) -> u32 {
        if self.forwards { self.pending(word) & self.enabled[word] } else { 0 }
    }

    /// The state of `intid` has changed: creates news for the affected vCPU.
    fn update(&mut self, intid: u32) {
        let (word, bit) = split(intid);
        if self.held[word] & bit != 0 {
            self.tell(self.holder[intid as usize]);
        } else if self.active[word] & bit != 0 {
            // Nothing can be done before its end, and then it is checked again.
        } else if self.ready(word) & bit != 0
            && let Some(target) = self.target[intid as usize]
        {
            self.tell(target);
        }
    }

    fn update_all(&mut self, word: usize, set: u32) {
        for bit in bits(set) {
            self.update(join(word, bit));
        }
    }

    /// Whether any device can end a wait is something that all must know when it changes.
    fn tell_of_devices(&mut self, before: bool) {
        if before != self.has_enabled() {
            self.tell_all();
        }
    }

    fn tell_all(&mut self) {
        (0..self.vcpus).for_each(|vcpu| self.tell(vcpu));
    }

    fn tell(&mut self, vcpu: u32) {
        if vcpu < self.vcpus {
            self.news[vcpu as usize / 64] |= 1 << (vcpu % 64);
        }
    }
}

/// For guests: the registers.
impl Distributor {
    /// Reads at `offset` for `vcpu`, whose visit has just ended. `question` is its last question.
    pub(super) fn read(&mut self, offset: u32, width: Width, vcpu: u32, question: &mut Option<Question>) -> Read {
        let value = match Register::at(offset, width) {
            Some(Register::Pending { word: word @ 1..WORDS, .. }) => {
                if self.must_ask(word, offset, vcpu, question) {
                    return Read::Retry;
                }
                self.pending(word) | self.held_pending[word] & self.held[word]
            }
            Some(Register::Active { word: word @ 1..WORDS, .. }) => {
                if self.must_ask(word, offset, vcpu, question) {
                    return Read::Retry;
                }
                self.active[word] | self.held_active[word] & self.held[word]
            }
            Some(Register::Group { word: 1..WORDS }) => u32::MAX,
            Some(Register::Enable { word: word @ 1..WORDS, .. }) => self.enabled[word],
            Some(Register::Priority { first: first @ 32.. }) => read_bytes(&self.priority, first, width),
            Some(Register::Config { half }) => {
                self.edge.get(half / 2).map_or(0, |edge| spread(edge >> (half % 2 * 16)))
            }
            Some(_) => 0,
            None => match (offset, width) {
                (gicd::CTLR, Width::Word) => self.control(),
                (gicd::TYPER, Width::Word) => registers::TYPER,
                (gicd::IIDR, Width::Word) => registers::IIDR,
                (gicd::PIDR2, Width::Word) => registers::PIDR2,
                // The upper half, of the fourth level of affinity, is zero.
                _ => routed(offset, width).map_or(0, |intid| self.route[intid]),
            },
        };
        Read::Value(value.into())
    }

    /// Writes at `offset` for `vcpu`. May make news, for `vcpu` too.
    pub(super) fn write(&mut self, offset: u32, width: Width, value: u64, vcpu: u32) {
        let value = lower_half(value);
        match Register::at(offset, width) {
            Some(Register::Enable { word: word @ 1..WORDS, set: true }) => {
                let enabled = value & !self.enabled[word];
                let had = self.has_enabled();
                self.enabled[word] |= value;
                self.forwarded.configured(word, enabled);
                self.update_all(word, enabled);
                self.tell_of_devices(had);
            }
            Some(Register::Enable { word: word @ 1..WORDS, set: false }) => {
                let disabled = value & self.enabled[word];
                let had = self.has_enabled();
                self.enabled[word] &= !value;
                self.forwarded.configured(word, disabled);
                self.drop_levels(word, disabled & !self.held[word]);
                self.tell_of_devices(had);
                self.recall[word] |= disabled & self.held[word];
                self.update_all(word, disabled & self.held[word]);
            }
            Some(Register::Pending { word: word @ 1..WORDS, set: true }) => {
                self.latch[word] |= value;
                self.update_all(word, value);
            }
            Some(Register::Pending { word: word @ 1..WORDS, set: false }) => {
                self.forwarded.ended(word, value & self.latch[word] & !self.active[word]);
                self.latch[word] &= !value;
                self.clear_pending[word] |= value & self.held[word];
                self.update_all(word, value & self.held[word]);
            }
            Some(Register::Active { word: word @ 1..WORDS, set }) => self.write_active(word, value, set, vcpu),
            Some(Register::Priority { first: first @ 32.. }) => {
                write_bytes(&mut self.priority, first, width, value);
                let last = (first + width.bytes() as usize).min(INTIDS as usize);
                (first..last).for_each(|intid| self.update_all(intid / 32, 1 << (intid % 32)));
            }
            Some(Register::Config { half }) if (2..WORDS * 2).contains(&half) => {
                let (word, shift) = (half / 2, half % 2 * 16);
                let edges = self.edge[word] & !(0xffff << shift) | gather(value) << shift;
                let changed = edges ^ self.edge[word];
                self.edge[word] = edges;
                self.forwarded.configured(word, changed);
                self.update_all(word, changed);
            }
            Some(_) => {}
            None => match (offset, width) {
                (gicd::CTLR, Width::Word) => self.set_control(value),
                _ => {
                    if let Some(intid) = routed(offset, width) {
                        self.set_route(intid, value);
                        self.forwarded.configured(intid / 32, 1 << (intid % 32));
                        self.update_all(intid / 32, 1 << (intid % 32));
                    }
                }
            },
        }
    }

    fn control(&self) -> u32 {
        // If the interrupt is in another vCPU's list register, the guest that disabled it sees here that it may still
        // be taken.
        let recalled = self.recall.iter().zip(&self.held).any(|(recall, held)| recall & held != 0);
        let enable = if self.forwards { ctlr::ENABLE_GROUP_1 } else { 0 };
        let waits = if recalled { ctlr::RWP } else { 0 };
        ctlr::ARE | ctlr::DS | enable | waits
    }

    fn set_control(&mut self, value: u32) {
        let forwards = value & ctlr::ENABLE_GROUP_1 != 0;
        if forwards != self.forwards {
            self.forwards = forwards;
            self.tell_all();
        }
    }

    pub(super) fn set_route(&mut self, intid: usize, value: u32) {
        self.route[intid] = value & ROUTE_FIELDS;
        self.target[intid] = vcpu_at((value & ROUTE_FIELDS).into(), self.vcpus);
    }

    fn write_active(&mut self, word: usize, ones: u32, set: bool, vcpu: u32) {
        let held = ones & self.held[word];
        assign(&mut self.set_active[word], held, set);
        assign(&mut self.clear_active[word], held, !set);

        let here = ones & !self.held[word];
        for bit in bits(here & !self.active[word]).filter(|_| set) {
            let intid = word * 32 + bit as usize;
            // The vCPU that would have got it will end it.
            self.holder[intid] = self.target[intid].unwrap_or(vcpu);
            self.tell(self.holder[intid]);
        }
        if !set {
            self.forwarded.ended(word, here & self.active[word]);
        }
        assign(&mut self.active[word], here, set);
        self.update_all(word, ones);
    }

    /// Whether another vCPU than the reader must be asked for the state of this word, and `question` has not asked or
    /// it has not answered. If so, asks.
    fn must_ask(&mut self, word: usize, offset: u32, reader: u32, question: &mut Option<Question>) -> bool {
        let number = match *question {
            Some(question) if question.offset == offset => question.number,
            _ => self.asked + 1,
        };
        let mut waits = false;
        for bit in bits(self.held[word]) {
            let holder = self.holder[word * 32 + bit as usize];
            let answered = self.answered.get(holder as usize).copied().unwrap_or(u64::MAX);
            if holder != reader && answered < number {
                waits = true;
                self.tell(holder);
            }
        }
        self.asked = self.asked.max(number);
        *question = waits.then_some(Question { offset, number });
        waits
    }
}

/// The SPI whose IROUTER is at `offset`: the whole register, or its lower half.
fn routed(offset: u32, width: Width) -> Option<usize> {
    let at = offset.checked_sub(gicd::IROUTER)?;
    let intid = at / 8;
    let fits = matches!(width, Width::Double | Width::Word) && at.is_multiple_of(8);
    (fits && (FIRST_SPI..INTIDS).contains(&intid)).then_some(intid as usize)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn lower_half(value: u64) -> u32 {
    value as u32
}
