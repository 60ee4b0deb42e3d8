//! Delivers interrupt messages to vCPUs: IPIs, the I/O APIC, INIT and start-up IPIs.
//!
//! A local APIC belongs to the pCPU that runs its vCPU. Other pCPUs leave vectors in [`Posted`], next to the vCPU's
//! mailbox, and post. The owner takes them before its next entry ([`take_posted`]). A vCPU that sends to itself does
//! not need this.

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use sched::Pending;

use super::vcpu::ArchVcpu;
use super::{assist, synic};
use crate::arch::x86_64::backend;
use crate::device::interrupt::{Kind, LogicalId, Message, Pin, Target, cluster_members};
use crate::vcpu::run::Running;
use crate::vcpu::{unannounced, unsent};
use crate::vm::Vm;

/// Interrupts that others leave for a vCPU's local APIC.
#[derive(Debug)]
pub(crate) struct Posted {
    /// Vectors requested: bit n of word w is vector `w * 64 + n`.
    vectors: [AtomicU64; 4],
    /// Which of them are level-triggered.
    levels: [AtomicU64; 4],
    /// What comes rarely ([`rare`]).
    rare: AtomicU16,
    /// Page of a start-up IPI, with [`STARTUP_VALID`]; zero if there is none.
    startup: AtomicU32,
    /// The APIC's [`LogicalId`], published by the owner for senders that resolve logical destinations.
    logical_id: AtomicU16,
}

const STARTUP_VALID: u32 = 0x100;

/// What is announced by [`Pending::NMI`], because it comes rarely: NMIs, and events that only a parent sends.
mod rare {
    /// The first NMI, and any further.
    pub(super) const NMI: u16 = 1 << 0;
    pub(super) const NMIS: u16 = 3;
    /// Pins that were asserted.
    pub(super) const LINT0: u16 = 1 << 2;
    pub(super) const LINT1: u16 = 1 << 3;
    /// An external interrupt, with the vector in the upper byte.
    pub(super) const EXTERNAL: u16 = 1 << 4;
    /// An external interrupt that waits is withdrawn.
    pub(super) const NO_EXTERNAL: u16 = 1 << 5;
    pub(super) const VECTOR_SHIFT: u32 = 8;
    /// What a change of the external interrupt leaves.
    pub(super) const OTHERS: u16 = NMIS | LINT0 | LINT1;
}

impl Posted {
    pub(crate) fn new() -> Self {
        Self {
            vectors: Default::default(),
            levels: Default::default(),
            rare: AtomicU16::new(0),
            startup: AtomicU32::new(0),
            logical_id: AtomicU16::new(LogicalId::NONE.to_bits()),
        }
    }

    /// Leaves an event of an interrupt controller beside the local APIC.
    #[cold]
    fn leave_rare(&self, message: &Message) {
        let vector = u16::from(message.vector) << rare::VECTOR_SHIFT;
        let changed = |before: u16| match message.kind {
            Kind::External => before & rare::OTHERS | rare::EXTERNAL | vector,
            Kind::NoExternal => before & rare::OTHERS | rare::NO_EXTERNAL,
            Kind::Pin(Pin::Lint1) => before | rare::LINT1,
            // Of two vectors the external one counts: it was sent as what the controller has.
            Kind::Pin(Pin::Lint0) if before & rare::EXTERNAL != 0 => before,
            Kind::Pin(Pin::Lint0) => before & (rare::OTHERS | rare::NO_EXTERNAL) | rare::LINT0 | vector,
            _ => before,
        };
        let _before = self.rare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| Some(changed(before)));
    }

    /// Publishes how the APIC answers to logical destinations.
    pub(in crate::arch::x86_64) fn publish_logical_id(&self, id: LogicalId) {
        self.logical_id.store(id.to_bits(), Ordering::Release);
    }
}

/// Sends `message` from the vCPU `sender`, or from a device, to all its targets. Targets that do not exist are ignored,
/// as on hardware.
pub(in crate::arch) fn send(vm: &Vm, sender: Option<u32>, message: &Message) {
    let everybody = || (0..vm.config.vcpus).take(vm.vcpus().len());
    match message.target {
        Target::SelfOnly => post_to(vm, sender, message),
        Target::Physical(id) => post_to(vm, Some(id), message),
        Target::AllIncludingSelf => send_to_many(vm, sender, everybody(), message),
        Target::AllButSelf => send_to_many(vm, sender, everybody().filter(|&id| Some(id) != sender), message),
        Target::Cluster { cluster, members } => post_to(vm, cluster_members(cluster, members), message),
        Target::Logical(destination) => {
            send_to_many(vm, sender, everybody().filter(|&id| answers(vm, id, destination)), message);
        }
    }
}

/// A call of a parent sends to a child. Calls `pause` before each vCPU.
pub(in crate::arch) fn send_to_child(vm: &Vm, message: &Message, pause: impl Fn()) {
    let paused = |ids: &mut dyn Iterator<Item = u32>| post_to(vm, ids.inspect(|_| pause()), message);
    let mut everybody = (0..vm.config.vcpus).take(vm.vcpus().len());
    match message.target {
        Target::AllIncludingSelf => paused(&mut everybody),
        Target::Logical(destination) => paused(&mut everybody.filter(|&id| answers(vm, id, destination))),
        _ => send(vm, None, message),
    }
}

/// A vCPU sends in steps, and so does a device, whose interrupts the first of many announces to the others.
fn send_to_many(vm: &Vm, sender: Option<u32>, ids: impl IntoIterator<Item = u32>, message: &Message) {
    match sender.and_then(|sender| vm.vcpus().get(sender as usize)) {
        // One gets it.
        _ if message.kind == Kind::LowestPriority => post_to(vm, ids, message),
        Some(sender) => unsent::send(vm, sender, packed(message), ids),
        None => unannounced::send(vm, &vm.platform().unannounced, ids, |id| leave(vm, id, message)),
    }
}

/// The vCPU that this pCPU runs sends an edge-triggered interrupt to vCPUs by index.
pub(in crate::arch) fn send_from(run: &Running<'_>, vector: u8, ids: impl IntoIterator<Item = u32>) {
    unsent::send(run.vm, run.vcpu, packed(&fixed(vector)), ids);
    unsent::has_sent(run.vcpu);
}

/// Sends what [`packed`] has packed.
pub(crate) fn post_interrupt(vm: &Vm, id: u32, what: u64) {
    let [kind, vector, level, ..] = what.to_le_bytes();
    let kind = match kind {
        1 => Kind::Nmi,
        2 => Kind::Init,
        3 => Kind::Startup,
        _ => Kind::Fixed,
    };
    post_to(vm, [id], &Message { kind, vector, level: level != 0, target: Target::Physical(id) });
}

/// What a vCPU's local APIC sends, without the target.
fn packed(message: &Message) -> u64 {
    let kind = match message.kind {
        Kind::Nmi => 1,
        Kind::Init => 2,
        Kind::Startup => 3,
        // The others come from devices.
        _ => 0,
    };
    u64::from_le_bytes([kind, message.vector, message.level.into(), 0, 0, 0, 0, 0])
}

fn fixed(vector: u8) -> Message {
    Message { kind: Kind::Fixed, vector, level: false, target: Target::AllIncludingSelf }
}

/// The first vCPU that a message with this target reaches.
pub(super) fn first_of(vm: &Vm, target: Target) -> Option<u32> {
    let exists = |id: &u32| (*id as usize) < vm.vcpus().len();
    match target {
        Target::Physical(id) => Some(id),
        Target::Logical(destination) => (0..vm.config.vcpus).find(|&id| answers(vm, id, destination)),
        Target::AllIncludingSelf => Some(0),
        // Only other local APICs send to these.
        Target::SelfOnly | Target::AllButSelf | Target::Cluster { .. } => None,
    }
    .filter(exists)
}

/// Whether the vCPU is meant by this eight-bit logical destination.
fn answers(vm: &Vm, id: u32, destination: u8) -> bool {
    vm.vcpus()
        .get(id as usize)
        .is_some_and(|vcpu| LogicalId::from_bits(vcpu.posted().logical_id.load(Ordering::Acquire)).matches(destination))
}

/// Sends an edge-triggered interrupt to vCPUs by index.
pub(crate) fn send_fixed(vm: &Vm, vector: u8, ids: impl IntoIterator<Item = u32>) {
    post_to(vm, ids, &fixed(vector));
}

/// Leaves what `message` says to one vCPU. Returns how it is announced, if the vCPU exists.
fn leave(vm: &Vm, id: u32, message: &Message) -> Option<Pending> {
    let posted = vm.vcpus().get(id as usize)?.posted();
    let work = match message.kind {
        Kind::Fixed | Kind::LowestPriority => {
            let (word, bit) = (usize::from(message.vector >> 6), 1 << (message.vector & 63));
            if message.level {
                posted.levels[word].fetch_or(bit, Ordering::Relaxed);
            }
            posted.vectors[word].fetch_or(bit, Ordering::Relaxed);
            Pending::INTERRUPT
        }
        Kind::Nmi => {
            // A processor handles one NMI and latches one more. A vCPU that does not run must not merge the two.
            if posted.rare.fetch_or(rare::NMI, Ordering::Relaxed) & rare::NMIS != 0 {
                posted.rare.fetch_or(rare::NMIS, Ordering::Relaxed);
            }
            Pending::NMI
        }
        Kind::External | Kind::NoExternal | Kind::Pin(_) => {
            posted.leave_rare(message);
            Pending::NMI
        }
        Kind::Init => {
            // A start-up message from before the reset has lost its meaning.
            posted.startup.store(0, Ordering::Relaxed);
            Pending::INIT
        }
        Kind::Startup => {
            posted.startup.store(STARTUP_VALID | u32::from(message.vector), Ordering::Relaxed);
            Pending::STARTUP
        }
    };
    Some(work)
}

fn post_to(vm: &Vm, ids: impl IntoIterator<Item = u32>, message: &Message) {
    for id in ids {
        let Some(work) = leave(vm, id, message) else { continue };
        // Publishes what was left; `Mailbox::take` on the other side sees it.
        vm.post(id, work);

        if message.kind == Kind::LowestPriority {
            // Any one of the targets is right (APM vol. 2, 16.6.2). The first one gets it.
            return;
        }
    }
}

/// Called before an entry, and before the check whether something ends a wait. Events are chosen at the entry, but
/// memory is within reach here.
#[inline(always)]
pub(crate) fn prepare(run: &mut Running<'_>) {
    let arch = &run.owner.arch;
    if arch.assist.is_on() && arch.apic.has_any_request() {
        assist::renew(run);
    }
}

/// Lets due timers of the vCPU expire, and delivers the messages of the synthetic ones.
#[inline]
pub(crate) fn expire_timers(run: &mut Running<'_>, now: u64) {
    run.owner.arch.expire_timer(now);
    synic::deliver(run);
}

/// One more step of what devices have to tell.
pub(crate) fn tell_more(vm: &Vm) -> bool {
    unannounced::announce_more(vm, &vm.platform().unannounced)
}

/// The owner takes what `work` announced.
pub(crate) fn take_posted(vcpu: &mut ArchVcpu, posted: &Posted, work: Pending) {
    if work.contains(Pending::INIT) {
        vcpu.init();
        posted.publish_logical_id(vcpu.apic.logical_id());
    }
    if work.contains(Pending::STARTUP) {
        let startup = posted.startup.swap(0, Ordering::Relaxed);
        if startup & STARTUP_VALID != 0 {
            vcpu.start_up(startup.to_le_bytes()[0]);
        }
    }
    if work.contains(Pending::NMI) {
        take_rare(vcpu, posted.rare.swap(0, Ordering::Relaxed));
    }
    if work.contains(Pending::INTERRUPT) {
        // Mostly all but one are empty, and a read is cheaper than a swap.
        let vectors = [0, 1, 2, 3].map(|word: usize| match posted.vectors[word].load(Ordering::Relaxed) {
            0 => 0,
            _ => posted.vectors[word].swap(0, Ordering::Relaxed),
        });
        vcpu.apic.accept_words(&vectors);
        // A level bit is set before its vector's bit, so that it is there when the vector is. A level bit whose vector
        // has not arrived stays. If it were taken alone, it would be lost, and the vector would count as an edge.
        let levels =
            [0, 1, 2, 3].map(|word: usize| match posted.levels[word].load(Ordering::Relaxed) & vectors[word] {
                0 => 0,
                with_vector => posted.levels[word].fetch_and(!with_vector, Ordering::Relaxed) & with_vector,
            });
        if levels.iter().fold(0, |all, word| all | word) != 0 {
            for vector in 0..=u8::MAX {
                if levels[usize::from(vector >> 6)] >> (vector & 63) & 1 != 0 {
                    vcpu.apic.accept(vector, true);
                }
            }
        }
    }
}

/// The owner takes the [`rare`] events.
#[cold]
fn take_rare(vcpu: &mut ArchVcpu, events: u16) {
    let [count, ..] = (events & rare::NMIS).count_ones().to_le_bytes();
    vcpu.request_nmis(count);
    let [_, vector] = events.to_le_bytes();
    if events & rare::NO_EXTERNAL != 0 {
        vcpu.withdraw_external();
    }
    if events & rare::EXTERNAL != 0 {
        vcpu.request_external(vector);
    }
    for (bit, pin) in [(rare::LINT0, Pin::Lint0), (rare::LINT1, Pin::Lint1)] {
        if events & bit != 0 {
            vcpu.assert_pin(pin, vector);
        }
    }
}

/// Delivers what waits for a vCPU that was kept out of its guest. Its parent may have written its registers.
#[inline]
pub(crate) fn held_no_more(run: &mut Running<'_>) {
    backend::settle_paging(run);
    synic::deliver(run);
}

/// Delivers what a parent's children have left for its vCPU, and what the hypervisor owes a child's.
#[cold]
pub(crate) fn deliver_messages(run: &mut Running<'_>) {
    // Of one that is held, the parent may write more, and the memory too.
    if !run.is_held() {
        backend::settle_paging(run);
    }
    synic::deliver_posted(run);
}

/// One of a parent's children, a `sender` by its number, has a message for the parent's vCPU `vcpu`.
pub(crate) fn post_message(parent: &Vm, vcpu: u32, sender: u32) {
    if let Some(children) = parent.platform().children() {
        children.mail.post(parent, vcpu, sender);
    }
}
