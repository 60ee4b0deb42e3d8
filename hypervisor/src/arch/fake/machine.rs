//! The hardware: pCPUs that sleep and can be kicked, one clock, and TLBs that drop no entry by themselves.
//!
//! Each pCPU is a thread. A thread-local number ([`Context`]) tells it its machine and its own number. pCPU 0 runs the
//! test's script and no vCPUs.
//!
//! Time advances when pCPUs read the clock and when guests execute instructions. When all pCPUs sleep, the clock jumps
//! to the next deadline of a pCPU's timer, but never as far as the periodic tick of the scheduler. Otherwise that tick
//! would hide a lost wake-up.

use core::any::Any;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::boxed::Box;
use std::collections::{BTreeMap, VecDeque};
use std::string::String;
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::vec::Vec;

use addr::{Hpa, HpaRange, Hva};
use hw_model::Tag;
use interleave::{Context, Parking, Thread, point};
use sched::CpuId;
use vcpu_layout::Proof;

use super::percpu::ArchPerCpu;
use super::program::Op;
use crate::arch::ram;
use crate::cpu::scheduler::{self, threads};
use crate::cpu::{self, PerCpu};

/// Ticks in a second.
pub(super) const HZ: u64 = 1_000_000_000;
/// The clock never jumps this far: 100 times per second each pCPU checks its run queue anyway.
const LONGEST_JUMP: u64 = HZ / 200;
/// RAM that all simulated machines of a process share.
const RAM_BYTES: usize = if cfg!(miri) { 32 << 20 } else { 1 << 30 };
/// Numbers of pCPUs are below.
const MOST_CPUS: usize = 64;

/// One machine.
#[repr(align(64))]
pub(crate) struct Machine {
    clock: AtomicU64,
    is_over: AtomicBool,
    hardware: Mutex<Hardware>,
    /// The statics of this host.
    globals: Mutex<Vec<(usize, Box<dyn Any + Send + Sync>)>>,
}

const _: () = assert!(align_of::<Machine>() >= MOST_CPUS);

/// The state of pCPUs, TLBs and wires at one moment.
pub(super) struct Hardware {
    pub(super) cpus: Vec<Cpu>,
    /// Translations of guests' own addresses: the VM, and the target.
    pub(super) virtual_tlbs: hw_model::Machine<(u64, u64)>,
    /// Translations of guest physical pages.
    pub(super) physical_tlbs: hw_model::Machine<Leaf>,
    /// What the IOMMU keeps for devices: the domain is the tag, and all of it is of one "processor".
    pub(super) io_tlb: hw_model::Machine<Leaf>,
    /// The device table: a function's domain, and the root of its tables.
    pub(super) granted: BTreeMap<u16, (u16, u64)>,
    /// The oldest target that a page of a vCPU may still lead to: older ones were flushed, and the flush was
    /// acknowledged.
    pub(super) flushed: BTreeMap<(u64, u32, u64), u64>,
    /// Pools that are made from now on give a tag to each VM, not to each vCPU.
    pub(super) tags_of_vms: bool,
    /// pCPUs list the writes that they record.
    pub(super) lists_writes: bool,
    /// The programs of the VMs' vCPUs.
    pub(super) programs: BTreeMap<String, Vec<Arc<[Op]>>>,
    /// Bytes on the control port's wire: to the host, and from it.
    pub(super) to_host: VecDeque<u8>,
    pub(super) from_host: Vec<u8>,
    /// How often a pCPU was woken.
    wakes: u64,
    /// How often a pCPU entered a guest to leave it at once, because it had kicked itself.
    entries_in_vain: u64,
}

/// A pCPU.
#[derive(Default)]
pub(super) struct Cpu {
    is_kicked: bool,
    /// By itself, among others.
    has_kicked_itself: bool,
    is_asleep: bool,
    deadline: Option<u64>,
    parking: Arc<Parking>,
    /// The VM whose guest runs, by its tables.
    guest: Option<u64>,
}

/// A page of stage 2, as a TLB holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Leaf {
    pub(super) hpa: u64,
    pub(super) is_writable: bool,
    /// A write need not be recorded any more.
    pub(super) is_dirty: bool,
}

/// Where this thread is: which machine's which pCPU.
fn place() -> Option<(&'static Machine, usize)> {
    let context = Context::get();
    let (machine, number) = (context & !(MOST_CPUS - 1), context % MOST_CPUS);
    // SAFETY: only `become_cpu` sets a context: to a machine that is freed after its threads have ended, or never.
    let machine = unsafe { (machine as *const Machine).as_ref() };
    machine.map(|machine| (machine, number))
}

/// The machine that this thread is a pCPU of.
pub(crate) fn machine() -> &'static Machine {
    place().expect("only pCPUs of a simulated machine come here").0
}

/// The number of this pCPU.
pub(super) fn number() -> usize {
    place().expect("only pCPUs of a simulated machine come here").1
}

/// The block of this pCPU, if the thread is one.
pub(super) fn try_this() -> Option<&'static PerCpu> {
    let (_, number) = place()?;
    cpu::all().get(number).map(|cpu| &**cpu)
}

fn become_cpu(machine: &Machine, number: usize) {
    Context::set(core::ptr::from_ref(machine) as usize | number);
}

/// A static that exists once per host. It is used only inside a simulated machine.
pub(crate) struct PerHost<T>(fn() -> T);

impl<T> PerHost<T> {
    /// Made when a host asks first.
    pub(crate) const fn new(make: fn() -> T) -> Self {
        Self(make)
    }
}

impl<T: Any + Send + Sync> Deref for PerHost<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let key = core::ptr::from_ref(self) as usize;
        let mut globals = locked(&machine().globals);
        let at = globals.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            globals.push((key, Box::new((self.0)())));
            globals.len() - 1
        });
        let value: *const T = globals[at].1.downcast_ref::<T>().expect("each key has one type");
        // SAFETY: boxes do not move until the machine is dropped, and then none of its threads uses them any more.
        unsafe { &*value }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panics ends the test. The others may still report what they saw.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Machine {
    fn new(cpus: usize) -> Self {
        assert!(cpus < MOST_CPUS, "a context has room for fewer pCPUs");
        Self {
            clock: AtomicU64::new(1),
            is_over: AtomicBool::new(false),
            hardware: Mutex::new(Hardware {
                cpus: (0..cpus).map(|_| Cpu::default()).collect(),
                virtual_tlbs: hw_model::Machine::new(cpus),
                physical_tlbs: hw_model::Machine::new(cpus),
                io_tlb: hw_model::Machine::new(1),
                granted: BTreeMap::new(),
                flushed: BTreeMap::new(),
                tags_of_vms: false,
                lists_writes: false,
                programs: BTreeMap::new(),
                to_host: VecDeque::new(),
                from_host: Vec::new(),
                wakes: 0,
                entries_in_vain: 0,
            }),
            globals: Mutex::new(Vec::new()),
        }
    }

    /// Locks the hardware. The holder reaches no scheduling point.
    pub(super) fn hardware(&self) -> MutexGuard<'_, Hardware> {
        locked(&self.hardware)
    }

    /// The clock; it has moved on by `ticks`.
    pub(crate) fn pass(&self, ticks: u64) -> u64 {
        self.clock.fetch_add(ticks, Ordering::Relaxed) + ticks
    }

    /// Whether something interrupts this pCPU at this moment.
    pub(super) fn is_interrupted(&self) -> bool {
        self.hardware().cpus[number()].is_interrupted(self.clock.load(Ordering::Relaxed))
    }

    /// Takes the interrupts that wait for this pCPU.
    pub(super) fn take_interrupts(&self) {
        let cpu = &mut self.hardware().cpus[number()];
        (cpu.is_kicked, cpu.has_kicked_itself) = (false, false);
        cpu.deadline.take_if(|deadline| *deadline <= self.clock.load(Ordering::Relaxed));
    }

    /// The same in the middle of work, with the count that a handler keeps.
    pub(super) fn take_interrupts_in_between(&self) {
        let (is_kicked, deadline) = {
            let cpu = &self.hardware().cpus[number()];
            (cpu.is_kicked, cpu.deadline)
        };
        if is_kicked {
            cpu::this().taken.kick.add(Proof::by_place(), 1);
        }
        if deadline.is_some_and(|deadline| deadline <= self.clock.load(Ordering::Relaxed)) {
            cpu::this().taken.timer.add(Proof::by_place(), 1);
        }
        self.take_interrupts();
    }

    /// Sets this pCPU's timer.
    pub(super) fn arm(&self, deadline: u64) {
        self.hardware().cpus[number()].deadline = Some(deadline);
    }

    /// Interrupts a pCPU.
    pub(super) fn kick(&self, cpu: CpuId) {
        point();
        {
            let kicked = &mut self.hardware().cpus[cpu.index()];
            kicked.is_kicked = true;
            kicked.has_kicked_itself |= cpu.index() == number();
        }
        self.wake(cpu.index());
    }

    fn wake(&self, cpu: usize) {
        let mut hardware = self.hardware();
        let cpu = &mut hardware.cpus[cpu];
        let parking = core::mem::take(&mut cpu.is_asleep).then(|| cpu.parking.clone());
        hardware.wakes += u64::from(parking.is_some());
        drop(hardware);
        if let Some(parking) = parking {
            parking.wake();
        }
    }

    /// This pCPU sleeps until it is interrupted.
    pub(super) fn sleep(&self) {
        point();
        while self.falls_asleep() {
            self.run_clock();
            self.wake(0);
            self.park();
        }
        self.take_interrupts();
    }

    /// Waits until another pCPU wakes this one, unless that has happened.
    fn park(&self) {
        let hardware = self.hardware();
        let cpu = &hardware.cpus[number()];
        let parking = cpu.is_asleep.then(|| cpu.parking.clone());
        drop(hardware);
        if let Some(parking) = parking {
            parking.park();
        }
    }

    /// Puts this pCPU to sleep, unless something interrupts it or the machine is off.
    fn falls_asleep(&self) -> bool {
        let cpu = &mut self.hardware().cpus[number()];
        let goes_on = self.is_over.load(Ordering::Relaxed) || cpu.is_interrupted(self.clock.load(Ordering::Relaxed));
        cpu.is_asleep = !goes_on;
        !goes_on
    }

    /// Wakes pCPUs whose timers have expired.
    pub(super) fn wake_due(&self) {
        let now = self.clock.load(Ordering::Relaxed);
        let is_due = |cpu: &Cpu| cpu.is_asleep && cpu.deadline.is_some_and(|deadline| deadline <= now);
        let cpus = 1..self.hardware().cpus.len();
        for cpu in cpus {
            if is_due(&self.hardware().cpus[cpu]) {
                self.wake(cpu);
            }
        }
    }

    /// When all pCPUs that run vCPUs sleep, time passes until a timer wakes one of them.
    fn run_clock(&self) {
        if !self.all_sleep() {
            return;
        }
        let Some((deadline, cpu)) = self.next_timer() else { return };
        self.clock.fetch_max(deadline, Ordering::Relaxed);
        self.wake(cpu);
    }

    /// Whether all pCPUs that run vCPUs sleep.
    fn all_sleep(&self) -> bool {
        self.hardware().cpus[1..].iter().all(|cpu| cpu.is_asleep)
    }

    /// The timer that the clock may jump to: its deadline and its pCPU.
    fn next_timer(&self) -> Option<(u64, usize)> {
        let limit = self.clock.load(Ordering::Relaxed) + LONGEST_JUMP;
        let hardware = self.hardware();
        let timers = (1..).zip(&hardware.cpus[1..]).filter_map(|(number, cpu)| Some((cpu.deadline?, number)));
        timers.min().filter(|(deadline, _)| *deadline < limit)
    }

    /// Whether nothing will ever happen unless the script does it. The last pCPU that fell asleep may be about to wake
    /// the one with the next timer.
    fn is_quiet(&self) -> bool {
        self.all_sleep() && self.next_timer().is_none()
    }
}

impl Hardware {
    /// This pCPU enters the guest of the VM with these tables.
    ///
    /// # Panics
    /// When another thread of its core is in the guest of another VM, and that must not be.
    pub(super) fn enter_guest(&mut self, number: usize, root: u64) {
        let core = super::core_of_number(number);
        for (other, cpu) in self.cpus.iter().enumerate().filter(|(other, _)| super::core_of_number(*other) == core) {
            let is_stranger = cpu.guest.is_some_and(|guest| guest != root);
            assert!(!(is_stranger && threads::by_core()), "cpu{number} and cpu{other} are in guests of two VMs");
        }
        self.cpus[number].guest = Some(root);
        self.entries_in_vain += u64::from(self.cpus[number].has_kicked_itself);
    }

    /// It has left it.
    pub(super) fn leave_guest(&mut self, number: usize) {
        self.cpus[number].guest = None;
    }
}

impl Cpu {
    fn is_interrupted(&self, now: u64) -> bool {
        self.is_kicked || self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// A running machine, controlled by the test's script.
pub(crate) struct Simulation {
    machine: &'static Machine,
    threads: Vec<Thread>,
}

/// Runs `script` on pCPU 0 of a machine with `cpus` more pCPUs, which run vCPUs. Returns after the machine is off.
pub(crate) fn run(cpus: usize, script: impl FnOnce(&Simulation)) {
    fill_pool();
    // Stays for good if the script panics: threads may still be in it.
    let machine = Box::into_raw(Box::new(Machine::new(cpus + 1)));
    // SAFETY: it was just made, and is freed below, after its threads have ended.
    let shared = unsafe { &*machine };
    become_cpu(shared, 0);
    cpu::init((0..).take(cpus + 1).map(|number| PerCpu::new(CpuId(number), ArchPerCpu::new())));
    let threads = (1..=cpus).map(|number| {
        interleave::spawn(move || {
            become_cpu(shared, number);
            let this = cpu::this();
            while !shared.is_over.load(Ordering::Relaxed) {
                scheduler::turn(this);
                shared.wake(0);
            }
        })
    });
    let simulation = Simulation { machine: shared, threads: threads.collect() };
    script(&simulation);
    simulation.turn_off();
    Context::set(0);
    // SAFETY: it was made by `Box::into_raw`; its threads have ended, and this one is no pCPU any more.
    drop(unsafe { Box::from_raw(machine) });
}

impl Simulation {
    /// Sets the programs of the vCPUs of the VM with this name.
    pub(crate) fn load(&self, vm: &str, programs: impl IntoIterator<Item = Vec<Op>>) {
        let programs = programs.into_iter().map(Arc::from).collect();
        self.machine.hardware().programs.insert(vm.into(), programs);
    }

    /// From now on pools give one tag to all vCPUs of a VM, as AArch64 does.
    pub(crate) fn tag_vms(&self) {
        self.machine.hardware().tags_of_vms = true;
    }

    /// The two threads of a core run vCPUs of one VM at a time. There are no VMs yet.
    pub(crate) fn schedule_by_core(&self) {
        threads::choose(Some("core"));
    }

    /// From now on pCPUs list the writes that they record, as Intel's do. There are no VMs yet.
    pub(crate) fn list_writes(&self) {
        self.machine.hardware().lists_writes = true;
    }

    /// Waits until `is_so`.
    ///
    /// # Panics
    /// When all pCPUs sleep, no timer is going to wake one, and it is still not so.
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        loop {
            // `is_so` may wake a pCPU, which may work and sleep again before `is_so` returns.
            let quiet = |machine: &Machine| machine.is_quiet().then(|| machine.hardware().wakes);
            let was_quiet = quiet(self.machine);
            if is_so() {
                return;
            }
            let is_quiet = was_quiet.is_some() && quiet(self.machine) == was_quiet;
            assert!(!is_quiet, "all pCPUs sleep for ever, but not: {what}");
            if self.machine.falls_asleep() && !self.machine.is_quiet() {
                self.machine.park();
            }
            self.machine.take_interrupts();
        }
    }

    /// Sends bytes to the host's control port.
    pub(crate) fn send(&self, bytes: &[u8]) {
        self.machine.hardware().to_host.extend(bytes);
    }

    /// The bytes that the host has sent on its control port.
    pub(crate) fn received(&self) -> Vec<u8> {
        core::mem::take(&mut self.machine.hardware().from_host)
    }

    /// How often a pCPU has entered a guest to leave it at once, because it had kicked itself.
    pub(crate) fn entries_in_vain(&self) -> u64 {
        self.machine.hardware().entries_in_vain
    }

    fn turn_off(self) {
        self.machine.is_over.store(true, Ordering::Relaxed);
        (1..=self.threads.len()).for_each(|cpu| self.machine.wake(cpu));
        self.threads.into_iter().for_each(Thread::join);
    }
}

/// Gives the pool of frames some RAM, once in a process.
fn fill_pool() {
    static FILLED: Once = Once::new();
    FILLED.call_once(|| {
        let layout = core::alloc::Layout::from_size_align(RAM_BYTES, 2 << 20).expect("a fixed size");
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!start.is_null(), "the test's process gets no memory");
        let range = HpaRange::new(Hpa(start as u64), RAM_BYTES as u64).expect("it lies in the address space");
        // SAFETY: it was just taken, for good, and the direct map is the identity.
        unsafe { ram::donate(range) };
    });
}

/// A file with these bytes as a boot loader leaves it, in pages that nothing else uses.
pub(crate) fn loaded_file(bytes: &[u8]) -> ram::LoadedFile {
    let layout = core::alloc::Layout::from_size_align(bytes.len().max(1).next_multiple_of(PAGE), PAGE);
    // SAFETY: the layout is not empty.
    let start = unsafe { std::alloc::alloc_zeroed(layout.expect("small")) };
    assert!(!start.is_null(), "the test's process gets no memory");
    // SAFETY: the pages are as long as `bytes`, and new.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    let range = HpaRange::new(Hpa(start as u64), bytes.len() as u64).expect("it lies in the address space");
    // SAFETY: they were just taken, for good, and the direct map is the identity.
    unsafe { ram::LoadedFile::new(range) }
}

const PAGE: usize = 4096;

/// The hypervisor's address of host memory: the same.
pub(super) const fn direct_map(hpa: Hpa) -> Hva {
    Hva(hpa.0)
}

/// A word of host memory.
pub(super) fn word(hpa: u64) -> &'static AtomicU64 {
    // SAFETY: walks lead here: from the root of a VM's tables through entries that name tables or frames of that VM.
    // These exist as long as one of its vCPUs runs. All accesses to them are atomic or volatile.
    unsafe { &*(hpa as *const AtomicU64) }
}

/// The tag as the TLBs' model has it.
pub(super) fn model_tag(tag: tlb_tag::Tag) -> Tag {
    Tag(tag.get())
}

/// Each look wakes a pCPU, and ends when that sleeps again.
#[test]
fn script_looks_again_if_a_pcpu_worked_while_it_looked() {
    let _no_mistakes = crate::tests::beside_others();
    run(1, |simulation| {
        let looks = AtomicU64::new(0);
        simulation.wait_until("the pCPU sleeps", || machine().all_sleep());
        simulation.wait_until("it was looked at twice", || {
            machine().kick(CpuId(1));
            while !machine().all_sleep() {
                point();
                std::thread::yield_now();
            }
            looks.fetch_add(1, Ordering::Relaxed) == 1
        });
    });
}
