//! What waits for the vCPUs of a parent: messages about its children, and their doorbells.
//!
//! Any pCPU posts a message, by the number of its sender ([`Mail::post`]). The pCPU that runs the parent's vCPU
//! delivers it before the next entry. No message is stored: a sender's number says what its message is
//! ([`Mail::message_of`]). A vCPU of a child has at most one message under way, because it is suspended until the
//! parent resumes it.
//!
//! A doorbell is posted in the same way, by the place of its port in a table. The pCPU that runs the parent's vCPU
//! writes the port's number into an event ring. While the ring is full, the doorbell waits.
//!
//! A vCPU that has disabled its message page, because the parent takes it offline, hands on what waits for it to one
//! that has not ([`Mail::close`]). While none has one, all waits.

use alloc::vec::Vec;
use core::num::NonZeroU32;

use addr::Gpa;
use hyperv_defs::PartitionId;
use hyperv_defs::interrupt::CreatePort;
use hyperv_defs::page::EVENTS;
use hyperv_defs::vp::{VP_INDEX_ANY, Vp};
use sched::Pending;
use spin::Mutex;
use synic::{Absent, EventRings, Message, Notice, Rung, SINTS, Senders, Synic};

use super::synic_page::SynicPage;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::vm::Vm;
use crate::vm::doorbells::Port;

/// The mail of one parent.
pub(in crate::arch) struct Mail {
    /// One for each of its vCPUs.
    inboxes: Vec<Inbox>,
    /// By number: a [`sender`], or zero for a number that nobody has.
    senders: Vec<AtomicU64>,
    /// Where the search for a free number begins: a number is not used again soon after its end.
    next: AtomicU32,
    /// The parent's ports.
    ports: Vec<PortPlace>,
    /// Where the search for a free place begins.
    next_port: AtomicU32,
}

/// Place of a port. Only the holder of the lock of the children's descriptions writes.
struct PortPlace {
    /// Its number, and its SINT from bit 32 on. Zero: no port.
    word: AtomicU64,
    /// The vCPU that hears, or [`VP_INDEX_ANY`].
    vcpu: AtomicU32,
    /// The child that it hears.
    sender: AtomicU64,
}

/// What waits for one vCPU.
#[repr(align(64))]
pub(in crate::arch) struct Inbox {
    /// Its message page is enabled, or was when it last looked. Only the pCPU that runs it writes.
    is_open: AtomicBool,
    /// Those that have a message for it.
    pub(in crate::arch) senders: Senders,
    /// Places of ports that were rung.
    doorbells: Senders,
    /// Heads of its event rings. Only the pCPU that runs it takes the lock.
    rings: Mutex<EventRings>,
}

/// Numbers below are of the vCPU's own SINTs: their event rings have new entries. They have a word of [`Senders`] of
/// their own, and words take turns, so no child can keep the messages of others back by its doorbells.
const FIRST_VP: usize = 64;
const _: () = assert!(SINTS <= FIRST_VP);

/// Places that are looked at before the pCPU takes its interrupts.
const PLACES_AT_ONCE: u32 = 1024;

const VP_BITS: u32 = 16;

/// A vCPU of a child, in a word. No partition has the id 0.
fn word_of(vp: Vp) -> u64 {
    vp.partition.0 << VP_BITS | u64::from(vp.index)
}

fn partition_of(word: u64) -> PartitionId {
    PartitionId(word >> VP_BITS)
}

impl Mail {
    /// None yet. `None` without memory.
    pub(super) fn new(vcpus: u32) -> Option<Self> {
        let (mut inboxes, mut senders) = (Vec::new(), Vec::new());
        inboxes.try_reserve_exact(vcpus as usize).ok()?;
        inboxes.extend((0..vcpus).map(|_| Inbox {
            is_open: AtomicBool::new(false),
            senders: Senders::new(),
            doorbells: Senders::new(),
            rings: Mutex::new(EventRings::new()),
        }));
        senders.try_reserve_exact(Senders::LIMIT).ok()?;
        senders.extend((0..Senders::LIMIT).map(|_| AtomicU64::new(0)));
        let mut ports = Vec::new();
        ports.try_reserve_exact(Senders::LIMIT).ok()?;
        ports.extend((0..Senders::LIMIT).map(|_| PortPlace {
            word: AtomicU64::new(0),
            vcpu: AtomicU32::new(VP_INDEX_ANY),
            sender: AtomicU64::new(0),
        }));
        Some(Self { inboxes, senders, next: AtomicU32::new(0), ports, next_port: AtomicU32::new(0) })
    }

    /// What waits for a vCPU.
    pub(in crate::arch) fn inbox(&self, vcpu: u32) -> Option<&Inbox> {
        self.inboxes.get(vcpu as usize)
    }

    /// Gives a child's vCPU a number. `None`: all are used.
    pub(super) fn add_sender(&self, vp: Vp) -> Option<u32> {
        let all = Senders::LIMIT - FIRST_VP;
        let first = self.next.load(Ordering::Relaxed) as usize;
        let mut free = (0..all).map(|ahead| (first + ahead) % all);
        let found = free.find(|at| {
            let place = &self.senders[FIRST_VP + at];
            place.compare_exchange(0, word_of(vp), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        self.next.store(u32::try_from(found + 1).ok()?, Ordering::Relaxed);
        u32::try_from(FIRST_VP + found).ok()
    }

    /// A number is free again, and its messages are lost. Its vCPU posts no more.
    pub(super) fn remove_sender(&self, number: u32) {
        for inbox in &self.inboxes {
            inbox.senders.withdraw(number as usize);
        }
        if let Some(place) = self.senders.get(number as usize) {
            place.store(0, Ordering::Release);
        }
    }

    /// All numbers of a child's vCPUs are free again. Calls `pause` now and then.
    pub(super) fn remove_senders_of(&self, id: PartitionId, mut pause: impl FnMut()) {
        for (number, place) in (0..).zip(&self.senders) {
            let word = place.load(Ordering::Relaxed);
            let is_one = word != 0 && partition_of(word) == id;
            if is_one {
                self.remove_sender(number);
            }
            if is_one || number % PLACES_AT_ONCE == 0 {
                pause();
            }
        }
    }

    /// The message of a sender. `None`: it has ended.
    pub(in crate::arch) fn message_of(&self, sender: usize) -> Option<Message> {
        if sender < SINTS {
            return Some(Message::sint_intercept(u32::try_from(sender).ok()?));
        }
        match self.senders.get(sender)?.load(Ordering::Acquire) {
            0 => None,
            word => {
                let [low, high, ..] = word.to_le_bytes();
                Some(Message::opaque_intercept(partition_of(word), u16::from_le_bytes([low, high]).into()))
            }
        }
    }

    /// Leaves the message of a sender with the parent's vCPU `vcpu`, which delivers it as soon as it can. The sender
    /// is about to leave its pCPU.
    pub(in crate::arch) fn post(&self, parent: &Vm, vcpu: u32, sender: u32) {
        let vcpu = self.listener(vcpu);
        if let Some(inbox) = self.inbox(vcpu) {
            inbox.senders.post(sender as usize);
            parent.post_from_leaving(vcpu, Pending::MESSAGE);
        }
    }

    /// This vCPU if it listens, or another that does, or the first.
    fn listener(&self, vcpu: u32) -> u32 {
        let is_open = |inbox: &Inbox| inbox.is_open.load(Ordering::Relaxed);
        if self.inbox(vcpu).is_some_and(is_open) {
            return vcpu;
        }
        (0..).zip(&self.inboxes).find(|(_, inbox)| is_open(inbox)).map_or(0, |(index, _)| index)
    }

    /// The vCPU `index` has a message page from now on, and can hear what waits for those that have none.
    pub(in crate::arch) fn open(&self, parent: &Vm, index: u32) {
        let Some(inbox) = self.inbox(index) else { return };
        if inbox.is_open.load(Ordering::Relaxed) {
            return;
        }
        inbox.is_open.store(true, Ordering::SeqCst);
        // First it is open, then it looks. The others post first, then look who is open.
        fence(Ordering::SeqCst);
        for (other, inbox) in (0..).zip(&self.inboxes) {
            if other != index && (inbox.senders.has_some() || inbox.doorbells.has_some()) {
                parent.post(other, Pending::MESSAGE);
            }
        }
    }

    /// The vCPU `index` has no message page. It hands on what waits for it, except about its own event rings.
    pub(in crate::arch) fn close(&self, parent: &Vm, index: u32) {
        let Some(inbox) = self.inbox(index) else { return };
        inbox.is_open.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let to = self.listener(index);
        let Some(other) = self.inbox(to).filter(|other| other.is_open.load(Ordering::Relaxed)) else { return };
        while let Some(sender) = inbox.senders.take() {
            if sender >= FIRST_VP {
                other.senders.post(sender);
            }
        }
        while let Some(port) = inbox.doorbells.take() {
            other.doorbells.post(port);
        }
        parent.post(to, Pending::MESSAGE);
    }
}

/// Doorbells.
impl Mail {
    /// Gives a port a place. `None`: all are used.
    pub(super) fn add_port(&self, port: &CreatePort) -> Option<()> {
        let first = self.next_port.load(Ordering::Relaxed) as usize;
        let mut places = (0..self.ports.len()).map(|ahead| (first + ahead) % self.ports.len());
        let at = places.find(|at| self.ports[*at].word.load(Ordering::Relaxed) == 0)?;
        let place = &self.ports[at];
        place.vcpu.store(port.vp.unwrap_or(VP_INDEX_ANY), Ordering::Relaxed);
        place.sender.store(port.sender.0, Ordering::Relaxed);
        place.word.store(u64::from(port.sint) << 32 | u64::from(port.port.number), Ordering::Release);
        self.next_port.store(u32::try_from(at + 1).ok()?, Ordering::Relaxed);
        Some(())
    }

    /// The port with this number.
    pub(super) fn port(&self, number: u32) -> Option<Port> {
        let at = self.ports.iter().position(|place| number_of(place.word.load(Ordering::Relaxed)) == number)?;
        Some(Port { place: u32::try_from(at).ok()?, number })
    }

    /// Nobody rings at this port any more.
    pub(super) fn remove_port(&self, number: u32) {
        if let Some(port) = self.port(number) {
            self.clear_port(port.place as usize);
        }
    }

    /// The same for all ports that heard a child. Calls `pause` now and then.
    pub(super) fn remove_ports_of(&self, id: PartitionId, mut pause: impl FnMut()) {
        for (at, place) in (0..).zip(&self.ports) {
            let is_one = place.sender.load(Ordering::Relaxed) == id.0 && place.word.load(Ordering::Relaxed) != 0;
            if is_one {
                self.clear_port(at as usize);
            }
            if is_one || at % PLACES_AT_ONCE == 0 {
                pause();
            }
        }
    }

    fn clear_port(&self, at: usize) {
        self.ports[at].word.store(0, Ordering::Release);
        self.inboxes.iter().for_each(|inbox| inbox.doorbells.withdraw(at));
    }

    /// A child has written where it rings at this port. `resumer` hears it, unless the port is for another vCPU of the
    /// parent. Returns whether the port is still there.
    pub(in crate::arch) fn ring(&self, parent: &Vm, resumer: u32, port: Port) -> bool {
        let Some(place) = self.ports.get(port.place as usize) else { return false };
        if number_of(place.word.load(Ordering::Acquire)) != port.number {
            return false;
        }
        let vcpu = match place.vcpu.load(Ordering::Relaxed) {
            VP_INDEX_ANY => self.listener(resumer),
            vcpu => vcpu,
        };
        let Some(inbox) = self.inbox(vcpu) else { return false };
        inbox.doorbells.post(port.place as usize);
        parent.post(vcpu, Pending::MESSAGE);
        true
    }

    /// The parent's vCPU `index` writes the doorbells that were posted for it into its event rings, and posts itself
    /// the messages about that. Those that find no room wait. Calls `interrupt` for each interrupt that tells the
    /// guest.
    pub(in crate::arch) fn fill_rings(&self, parent: &Vm, index: u32, synic: &Synic, mut interrupt: impl FnMut(u8)) {
        let Some(inbox) = self.inbox(index).filter(|inbox| inbox.doorbells.has_some()) else { return };
        let Some(page) = synic.ring_page() else { return };
        let page = SynicPage { memory: &parent.memory, gpa: Gpa(page) };
        let mut rings = inbox.rings.lock();
        for _ in 0..=EVENTS {
            let Some(at) = inbox.doorbells.take() else { return };
            let word = self.ports.get(at).map_or(0, |place| place.word.load(Ordering::Acquire));
            let Some(number) = NonZeroU32::new(number_of(word)) else { continue };
            let sint = (word >> 32) as usize % SINTS;
            match rings.ring(&page, sint, number) {
                Ok(Rung::Signal) => match synic.notice(sint) {
                    Some(Notice::Message) => inbox.senders.post(sint),
                    Some(Notice::Interrupt(tells)) => interrupt(tells.vector),
                    None => {}
                },
                Ok(Rung::Masked) => {}
                Ok(Rung::Full) | Err(Absent) => return inbox.doorbells.post(at),
            }
        }
        // A child that rings without end does not keep the parent from running.
        parent.post(index, Pending::MESSAGE);
    }

    /// The parent's vCPU has enabled its page of event rings.
    pub(in crate::arch) fn restart_rings(&self, index: u32) {
        if let Some(inbox) = self.inbox(index) {
            *inbox.rings.lock() = EventRings::new();
        }
    }
}

/// The number of the port that has this word.
const fn number_of(word: u64) -> u32 {
    let [number @ .., _, _, _, _] = word.to_le_bytes();
    u32::from_le_bytes(number)
}
