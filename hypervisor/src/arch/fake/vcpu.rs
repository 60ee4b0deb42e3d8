//! A vCPU: its position in its program, its interrupts, its timer, and the execution of an instruction.

use core::cell::RefCell;
use core::sync::atomic::Ordering;
use std::sync::Arc;
use std::vec::Vec;

use abi::payload::VmConfig;
use addr::Hpa;
use interleave::{point, relax};
use partition::CpuidResults;
use shootdown::Pages;

use super::clock;
use super::exit::Exit;
use super::hwvirt::HostContext;
use super::loader::KernelEntry;
use super::machine::{Hardware, Leaf, machine, model_tag, number, word};
use super::program::{Op, PAGE_TABLE};
use super::saved::SavedVcpu;
use super::tags::{CpuTags, Needed, VcpuTags};
use crate::arch::guest_ram::words::Word;
use crate::arch::{Machine, VcpuState};
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::activity::Activity;

/// One vCPU.
pub(crate) struct ArchVcpu {
    root: Hpa,
    index: u32,
    program: Arc<[Op]>,
    at: usize,
    activity: Activity,
    /// Halted for good, with interrupts off.
    is_stopped: bool,
    /// An interrupt waits for the guest.
    is_interrupted: bool,
    deadline: Option<u64>,
    /// The guest has taken an interrupt since it set its timer: it does not halt to wait for that.
    has_rung: bool,
    /// Why the guest was left.
    pub(super) exit: Exit,
    /// General registers, for a parent. No instruction uses them.
    pub(super) gprs: [u64; 16],
    /// What its parent has registered.
    pub(super) cpuid: CpuidResults,
    /// An unfinished flush: the oldest target that the named pages of vCPUs may lead to once the guest runs again.
    acknowledges: Vec<(u32, u64, u64)>,
    left_at: u64,
    /// A word that the hypervisor has found for the guest.
    pub(super) found: Option<(u64, Word)>,
    /// A word that the hypervisor writes before the next instruction: its address and the value.
    pub(super) owed: Option<(u64, u64)>,
    /// Pages in whose leaves the pCPU has recorded a write since the last exit.
    listed: RefCell<Vec<u64>>,
    /// Whether PAUSE leaves the guest.
    leaves_to_spin: bool,
    tags: VcpuTags,
}

/// Ticks that an instruction takes.
const INSTRUCTION: u64 = 100;
/// Ticks for one look at a word that another vCPU will change. With this value the host's next tick comes soon.
const SPIN: u64 = 100_000;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

impl VcpuState<Machine> for ArchVcpu {
    fn new(index: u32, config: &VmConfig, root: Hpa, tags: VcpuTags) -> Self {
        let hardware = machine().hardware();
        // Without a program it stops at once.
        let program = hardware.programs.get(&config.name).and_then(|programs| programs.get(index as usize)).cloned();
        let program = program.unwrap_or_else(|| Arc::new([]));
        drop(hardware);
        Self {
            root,
            index,
            program,
            at: 0,
            activity: Activity::Off,
            is_stopped: false,
            is_interrupted: false,
            deadline: None,
            has_rung: false,
            exit: Exit::Interrupted,
            gprs: [0; 16],
            cpuid: CpuidResults::new(),
            acknowledges: Vec::new(),
            left_at: 0,
            found: None,
            owed: None,
            listed: RefCell::default(),
            leaves_to_spin: false,
            tags,
        }
    }

    fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        core::iter::empty()
    }

    fn start_at(&mut self, _: &KernelEntry) {
        self.start();
    }

    fn load(&mut self, _: &HostContext, tags: &mut CpuTags, came_back: bool) {
        self.tags.arrive(tags, came_back);
        self.left_at = clock::now();
    }

    fn unload(&mut self, tags: &mut CpuTags) {
        self.tags.depart(tags);
    }

    fn renew_intercepts(&mut self, others_wait: bool) {
        self.leaves_to_spin = others_wait;
    }

    fn flush_whole(&mut self) {
        self.tags.void();
    }

    fn flush_pages(&mut self, pages: Pages) -> u64 {
        if self.tags.is_void() {
            return 0;
        }
        let mut hardware = machine().hardware();
        for page in 0..pages.count() {
            let tag = model_tag(self.tags.tag());
            hardware.virtual_tlbs.flush_page(number(), tag, (pages.first() >> 12) + page);
        }
        pages.count()
    }

    fn left_at(&self) -> u64 {
        self.left_at
    }

    fn try_wake(&mut self) -> bool {
        let wakes = self.activity == Activity::Halted && self.is_interrupted && !self.is_stopped;
        if wakes {
            self.activity = Activity::Active;
        }
        wakes
    }

    #[inline]
    fn activity(&mut self) -> &mut Activity {
        &mut self.activity
    }

    fn is_dormant(&self) -> bool {
        self.is_stopped || self.activity == Activity::Off
    }

    fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    fn into_tags(self) -> VcpuTags {
        self.tags
    }
}

impl ArchVcpu {
    /// Runs the guest until its next exit.
    pub(super) fn enter(&mut self, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
        tally.add(|count| &count.entries, 1);
        self.tags.enter(tags, epoch, |tag, needed| {
            let mut hardware = machine().hardware();
            match needed {
                Needed::Nothing => {}
                Needed::OwnTables => hardware.virtual_tlbs.flush_tag(number(), model_tag(tag)),
                Needed::Tag => hardware.flush_tag(model_tag(tag)),
                Needed::Everything => hardware.flush_everything(),
            }
        });
        for (vcpu, page, value) in self.acknowledges.drain(..) {
            let mut hardware = machine().hardware();
            let least = hardware.flushed.entry((self.root.0, vcpu, page)).or_default();
            *least = value.max(*least);
        }
        machine().hardware().enter_guest(number(), self.root.0);
        // The guest takes its interrupt; its handler does nothing.
        self.has_rung |= core::mem::take(&mut self.is_interrupted);
        self.exit = loop {
            point();
            if machine().is_interrupted() {
                break Exit::Interrupted;
            }
            machine().pass(INSTRUCTION);
            machine().wake_due();
            match self.step() {
                Ok(()) => self.at = self.at.wrapping_add(1),
                Err(exit) => break exit,
            }
        };
        machine().hardware().leave_guest(number());
        self.left_at = clock::now();
    }

    pub(super) fn start(&mut self) {
        if self.activity == Activity::Off {
            self.activity = Activity::Active;
        }
    }

    /// As after power-on again.
    pub(super) fn power_on(&mut self) {
        (self.at, self.gprs, self.cpuid) = (0, [0; 16], CpuidResults::new());
        (self.is_stopped, self.is_interrupted, self.has_rung, self.deadline) = (false, false, false, None);
        self.activity = Activity::Off;
    }

    /// The instruction that is next.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Goes on there.
    pub(super) fn set_position(&mut self, at: usize) {
        self.at = at;
    }

    pub(super) fn activity_now(&self) -> Activity {
        self.activity
    }

    pub(super) fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// Whether it has an interrupt that it has not noticed.
    pub(super) fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    pub(super) fn halt(&mut self) {
        self.is_stopped = self.program.get(self.at) == Some(&Op::Stop);
        self.activity = Activity::Halted;
    }

    pub(super) fn set_timer(&mut self, deadline: u64) {
        self.deadline = Some(deadline);
    }

    /// What a file keeps of it.
    pub(super) fn state(&self, tick: u64) -> SavedVcpu {
        SavedVcpu {
            at: self.at as u64,
            is_off: self.activity == Activity::Off,
            is_halted: self.activity == Activity::Halted,
            is_stopped: self.is_stopped,
            is_interrupted: self.is_interrupted,
            has_rung: self.has_rung,
            rings_in: self.deadline.map(|deadline| deadline.saturating_sub(tick)),
            gprs: self.gprs,
        }
    }

    /// Takes it over.
    pub(super) fn set_state(&mut self, state: SavedVcpu, tick: u64) {
        self.at = usize::try_from(state.at).unwrap_or(usize::MAX);
        self.activity = match (state.is_off, state.is_halted) {
            (true, _) => Activity::Off,
            (false, true) => Activity::Halted,
            (false, false) => Activity::Active,
        };
        self.is_stopped = state.is_stopped;
        self.is_interrupted = state.is_interrupted;
        self.has_rung = state.has_rung;
        self.deadline = state.rings_in.map(|ticks| tick.saturating_add(ticks));
        self.gprs = state.gprs;
    }

    /// The timer comes by so many ticks later.
    pub(super) fn move_timer(&mut self, later: u64) {
        self.deadline = self.deadline.map(|deadline| deadline.saturating_add(later));
    }

    /// Executes an instruction. After an exit that does not repeat the instruction, the program counter is behind it.
    fn step(&mut self) -> Result<(), Exit> {
        let op = self.program.get(self.at).copied().unwrap_or(Op::Stop);
        match op {
            Op::WriteByHost(gpa, value) => return Err(self.leave_for(Exit::WriteByHost { gpa, value })),
            Op::Owe(gpa, value) => return Err(self.leave_for(Exit::Owe { gpa, value })),
            Op::Write(gpa, value) => self.access(gpa, true)?.store(value, Ordering::SeqCst),
            Op::Await(gpa, value) if self.access(gpa, false)?.load(Ordering::SeqCst) != value => {
                machine().pass(SPIN);
                relax();
                self.at = self.at.wrapping_sub(1);
            }
            Op::Poll(gpa, value) if self.access(gpa, false)?.load(Ordering::SeqCst) != value => {
                relax();
                self.at = self.at.wrapping_sub(1);
            }
            Op::Pause(gpa, value) if self.access(gpa, false)?.load(Ordering::SeqCst) != value => {
                if self.leaves_to_spin {
                    return Err(Exit::Yield);
                }
                relax();
                self.at = self.at.wrapping_sub(1);
            }
            Op::Sleep(gpa, value) if self.access(gpa, false)?.load(Ordering::SeqCst) != value => {
                return Err(Exit::Halted);
            }
            Op::Await(..) | Op::Poll(..) | Op::Pause(..) | Op::Sleep(..) => {}
            Op::Expect(gpa, value) => {
                let found = self.access(gpa, false)?.load(Ordering::SeqCst);
                assert_eq!(found, value, "vCPU {} reads {gpa:#x}", self.index);
            }
            Op::Map(page, to) => self.access(PAGE_TABLE + 8 * page, true)?.store(to, Ordering::SeqCst),
            Op::Touch(page) => self.touch(page)?,
            Op::Flush(vcpus, page) => {
                let pages = page.map_or(0..16, |page| page..page + 1);
                for page in pages {
                    let value = self.access(PAGE_TABLE + 8 * page, false)?.load(Ordering::SeqCst);
                    let targets = (0..64).filter(|vcpu| vcpus >> vcpu & 1 != 0);
                    self.acknowledges.extend(targets.map(|vcpu| (vcpu, page, value)));
                }
                return Err(self.leave_for(Exit::Flush { vcpus, page }));
            }
            Op::InterruptByDevice => return Err(self.leave_for(Exit::InterruptByDevice)),
            Op::InterruptOthers => return Err(self.leave_for(Exit::InterruptOthers)),
            Op::Interrupt(target) => return Err(self.leave_for(Exit::Interrupt(target))),
            Op::HandOver(target) => return Err(self.leave_for(Exit::HandOver(target))),
            Op::Start(target) => return Err(self.leave_for(Exit::Start(target))),
            Op::Halt if core::mem::take(&mut self.has_rung) => {}
            Op::Halt => return Err(self.leave_for(Exit::Halted)),
            Op::Timer(ticks) => {
                self.has_rung = false;
                return Err(self.leave_for(Exit::Timer(ticks)));
            }
            Op::Work(ticks) => {
                machine().pass(ticks);
            }
            Op::Yield => return Err(self.leave_for(Exit::Yield)),
            Op::Print(byte) => return Err(self.leave_for(Exit::Print(byte))),
            Op::Jump(to) => {
                relax();
                self.at = to.wrapping_sub(1);
            }
            Op::Stop => return Err(Exit::Halted),
            Op::CreateVp(answer) => return Err(self.leave_for(Exit::CreateVp { answer })),
            Op::ShutDown => return Err(self.leave_for(Exit::ShutDown)),
        }
        Ok(())
    }

    /// The hypervisor executes the read at which the guest was left: it finds ones.
    pub(super) fn read_ones(&mut self) {
        assert!(matches!(self.program.get(self.at), Some(Op::Expect(_, u64::MAX))), "vCPU {}", self.index);
        self.at += 1;
    }

    /// The last instruction is tried again.
    pub(super) fn again(&mut self) {
        self.at -= 1;
    }

    fn leave_for(&mut self, exit: Exit) -> Exit {
        self.at += 1;
        exit
    }

    /// Translates a page by the guest's own tables. Asserts that no TLB entry leads to a flushed target.
    fn touch(&self, page: u64) -> Result<(), Exit> {
        let now = self.access(PAGE_TABLE + 8 * page, false)?.load(Ordering::SeqCst);
        let mut hardware = machine().hardware();
        let (cpu, tag) = (number(), model_tag(self.tags.tag()));
        let least = hardware.flushed.get(&(self.root.0, self.index, page)).copied().unwrap_or(0);
        for (root, to) in hardware.virtual_tlbs.answers(cpu, tag, page) {
            assert_eq!(root, self.root.0, "vCPU {} finds another VM's page {page}", self.index);
            assert!(
                to >= least,
                "vCPU {} on cpu{cpu} uses page {page} as {to}, which was flushed: {least}",
                self.index
            );
        }
        hardware.virtual_tlbs.walk(cpu, tag, page, (self.root.0, now));
        Ok(())
    }

    /// Accesses a word of guest memory. A write uses any TLB entry that would let it go unnoticed.
    fn access(&self, gpa: u64, is_write: bool) -> Result<&'static core::sync::atomic::AtomicU64, Exit> {
        let mut hardware = machine().hardware();
        let (cpu, tag, page) = (number(), model_tag(self.tags.tag()), gpa >> 12);
        let allows = |leaf: &Leaf| !is_write || (leaf.is_writable && leaf.is_dirty);
        let cached = hardware.physical_tlbs.answers(cpu, tag, page).into_iter().find(allows);
        let leaf = match cached {
            Some(leaf) => leaf,
            None => self.walk(gpa, is_write)?,
        };
        hardware.physical_tlbs.walk(cpu, tag, page, leaf);
        Ok(word(leaf.hpa + gpa % 4096))
    }

    /// Takes what the pCPU has listed.
    pub(super) fn take_list(&mut self) -> Vec<u64> {
        self.listed.take()
    }

    /// Walks the nested tables, and sets the access bits in the leaf.
    fn walk(&self, gpa: u64, is_write: bool) -> Result<Leaf, Exit> {
        let mut table = self.root.0;
        for level in (0..4).rev() {
            let entry = word(table + (gpa >> (12 + 9 * level) & 511) * 8);
            loop {
                let bits = entry.load(Ordering::SeqCst);
                let fault = |is_mapped| Exit::Fault { gpa, is_write, is_mapped };
                if bits & PRESENT == 0 {
                    return Err(fault(false));
                }
                let is_leaf = level == 0 || bits & LARGE != 0;
                let records = if is_leaf && is_write { ACCESSED | DIRTY } else { ACCESSED };
                if is_write && bits & WRITABLE == 0 {
                    return Err(fault(true));
                }
                let new = bits | records;
                if entry.compare_exchange(bits, new, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                    continue;
                }
                table = bits & ADDRESS;
                if new & !bits & DIRTY != 0 {
                    self.listed.borrow_mut().push(gpa & !4095);
                }
                if is_leaf {
                    let within = gpa & ((1 << (12 + 9 * level)) - 1) & !4095;
                    return Ok(Leaf {
                        hpa: (table & !((1 << (12 + 9 * level)) - 1)) + within,
                        is_writable: new & WRITABLE != 0,
                        is_dirty: new & DIRTY != 0,
                    });
                }
                break;
            }
        }
        unreachable!("the last level has leaves only")
    }

    pub(crate) fn expire_timer(&mut self, now: u64) {
        if self.deadline.take_if(|deadline| *deadline <= now).is_some() {
            self.is_interrupted = true;
        }
    }
}

impl Hardware {
    fn flush_tag(&mut self, tag: hw_model::Tag) {
        self.virtual_tlbs.flush_tag(number(), tag);
        self.physical_tlbs.flush_tag(number(), tag);
    }

    fn flush_everything(&mut self) {
        self.virtual_tlbs.flush_everything(number());
        self.physical_tlbs.flush_everything(number());
    }
}
