//! The instruction emulator of a vCPU: its view of registers and memory, and its caches.
//!
//! Without a cache, each instruction is fetched and decoded. With `decode_cache = "bytes"` a vCPU fetches, and caches
//! the meaning of the bytes. With `"write-protect"` it walks to the instruction, and the VM caches the instruction
//! there.

#![expect(unsafe_code, reason = "reads the guest's protection-key rights, which stay in the register")]

use core::arch::asm;

use abi::payload::DecodeCache;
use addr::Gpa;
use decode_cache::{ByBytes, Bytes, Insertion, Lookup, Mode, Outcome as Inserted, Place, Vouching, WriteProtect};
use x86_defs::registers::{cr0, cr4, efer};
use x86_defs::vmcb::{SaveArea, Segment as SavedSegment};
use x86_emulate::{
    Cause, Cpu, Device, Emulation, Instruction, Outcome, Path, Segment, SegmentRegister, Sites, Vendor, Walks, Window,
    path,
};

use super::cpuid;
use crate::arch::bank::Word;
use crate::arch::block::Block;
use crate::arch::x86_64::svm;
use crate::arch::x86_64::svm::entry::{Gprs, gpr};
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::run::Running;
use crate::vm::memory::{Memory, Protected};

/// The registers of a vCPU outside its guest.
///
/// The hardware keeps RAX and RSP in the VMCB. They are copied to their places among the others until
/// [`Registers::put_back`].
pub(super) struct Registers<'a> {
    gprs: &'a mut Gprs,
    save: &'a mut SaveArea,
}

impl<'a> Registers<'a> {
    #[inline]
    pub(super) fn of(gprs: &'a mut Gprs, save: &'a mut SaveArea) -> Self {
        gprs[gpr::RAX] = save.rax;
        gprs[gpr::RSP] = save.rsp;
        Self { gprs, save }
    }

    /// RAX and RSP go back to where the hardware has them.
    #[inline]
    pub(super) fn put_back(self) {
        self.save.rax = self.gprs[gpr::RAX];
        self.save.rsp = self.gprs[gpr::RSP];
    }
}

impl Cpu for Registers<'_> {
    #[inline]
    fn gprs(&self) -> &[u64; 16] {
        self.gprs
    }
    #[inline]
    fn gprs_mut(&mut self) -> &mut [u64; 16] {
        self.gprs
    }
    #[inline]
    fn rip(&self) -> u64 {
        self.save.rip
    }
    #[inline]
    fn set_rip(&mut self, rip: u64) {
        self.save.rip = rip;
    }
    #[inline]
    fn rflags(&self) -> u64 {
        self.save.rflags
    }
    #[inline]
    fn set_rflags(&mut self, rflags: u64) {
        self.save.rflags = rflags;
    }
    #[inline]
    fn segment(&self, segment: Segment) -> SegmentRegister {
        let SavedSegment { base, limit, attributes, .. } = match segment {
            Segment::Es => self.save.es,
            Segment::Cs => self.save.cs,
            Segment::Ss => self.save.ss,
            Segment::Ds => self.save.ds,
            Segment::Fs => self.save.fs,
            Segment::Gs => self.save.gs,
        };
        SegmentRegister { base, limit, attributes }
    }
    #[inline]
    fn cpl(&self) -> u8 {
        self.save.cpl & 3
    }
    #[inline]
    fn cr0(&self) -> u64 {
        self.save.cr0
    }
    #[inline]
    fn cr3(&self) -> u64 {
        self.save.cr3
    }
    #[inline]
    fn cr4(&self) -> u64 {
        self.save.cr4
    }
    #[inline]
    fn efer(&self) -> u64 {
        self.save.efer
    }
    #[cold]
    fn pkru(&self) -> u32 {
        if !svm::has_protection_keys() {
            return 0;
        }
        let value: u32;
        // SAFETY: RDPKRU reads a register and needs ECX = 0 and CR4.PKE set, which `svm::enable` has done (APM vol. 3,
        // RDPKRU).
        unsafe {
            asm!("rdpkru", in("ecx") 0, out("eax") value, out("edx") _, options(nomem, nostack, preserves_flags))
        };
        value
    }
    fn physical_bits(&self) -> u8 {
        cpuid::physical_address_bits()
    }
    /// SVM is AMD's.
    #[inline]
    fn vendor(&self) -> Vendor {
        Vendor::Amd
    }
}

impl x86_emulate::Memory for Memory {
    type Word = Word;

    fn find(&self, gpa: Gpa) -> Option<Word> {
        self.find_word(gpa)
    }

    #[inline]
    fn load(&self, word: Word, ahead: usize) -> u64 {
        Self::load(self, word, ahead)
    }

    fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        Self::compare_exchange(self, word, current, new)
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        Self::read(self, gpa, bytes).then_some(())
    }

    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        Self::write(self, gpa, bytes).then_some(())
    }
}

/// A decoded instruction as the caches keep it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Decoded(Instruction);

impl decode_cache::Decoded for Decoded {
    #[inline]
    fn length(&self) -> u8 {
        self.0.length
    }
    #[inline]
    fn pack(&self) -> [u64; 4] {
        self.0.pack()
    }
    #[inline]
    fn unpack(words: [u64; 4]) -> Option<Self> {
        Instruction::unpack(words).map(Self)
    }
}

/// A vCPU's data for the emulation of instructions.
pub(in crate::arch::x86_64) struct Emulator {
    walks: Walks<Memory>,
    /// How many of these walks the counters include.
    walks_done: u64,
    /// The vCPU's own caches, if it has any.
    known: Option<Block<Known>>,
    /// The last executed instruction, to insert into the VM's cache.
    learnt: Option<Learnt>,
}

/// A vCPU's caches of its instructions. The pCPU that runs the vCPU writes them, so they have pages of their own.
struct Known {
    /// Places that access devices.
    sites: Sites<Memory>,
    /// The meaning of bytes, at any address.
    bytes: ByBytes<Decoded>,
}

/// A decoded instruction, to be cached for the whole VM after it was executed.
struct Learnt {
    lookup: Lookup,
    decoded: Decoded,
    linear: u64,
}

impl Emulator {
    /// That of vCPU `index`.
    pub(in crate::arch::x86_64) fn new(index: u32, cache: DecodeCache) -> Self {
        Self {
            walks: if cache == DecodeCache::Off { Walks::forgetful() } else { Walks::new() },
            walks_done: 0,
            known: (cache == DecodeCache::Bytes)
                .then(|| Block::new(index as usize, Known { sites: Sites::new(), bytes: ByBytes::new() })),
            learnt: None,
        }
    }

    /// Executes the instruction at RIP. `given` are the bytes that the CPU has saved, perhaps none.
    #[inline]
    pub(super) fn carry_out(
        &mut self,
        cpu: &mut Registers<'_>,
        memory: &Memory,
        device: &mut impl Device,
        cause: Cause,
        given: &[u8],
        tally: Tally<'_>,
    ) -> Outcome {
        let Self { walks, walks_done, known, learnt } = self;
        let mut emulation = Emulation::new(cpu, memory, device, walks, cause);
        let outcome = match (known, memory.decoded()) {
            (Some(known), _) => by_bytes(&mut emulation, known, given, tally),
            (None, Some(shared)) => by_place(&mut emulation, shared, learnt, tally),
            (None, None) => {
                tally.add(|count| &count.decode_misses, 1);
                anew(&mut emulation, given)
            }
        };
        if *walks_done != walks.done() {
            tally.add(|count| &count.emulator_walks, walks.done() - *walks_done);
            *walks_done = walks.done();
        }
        outcome
    }

    /// The cached walks, for other code that reads the guest's instructions.
    pub(super) fn walks(&mut self) -> &mut Walks<Memory> {
        &mut self.walks
    }

    /// The pages of the vCPU's own caches.
    pub(in crate::arch::x86_64) fn own_pages(&self) -> Option<OwnPages> {
        let known = self.known.as_ref()?;
        Some(OwnPages { what: "decoded instructions", hva: known.hva(), bytes: size_of::<Known>() })
    }

    /// Whether the last instruction was decoded for the whole VM.
    #[inline]
    pub(super) fn has_learnt(&self) -> bool {
        self.learnt.is_some()
    }
}

/// An instruction of a vCPU that is being emulated.
type This<'a, 'r, D> = Emulation<'a, Registers<'r>, Memory, D>;

/// Fetches, decodes, and carries out.
#[cold]
fn anew<D: Device>(this: &mut This<'_, '_, D>, given: &[u8]) -> Outcome {
    let decoded = match x86_emulate::decode(this.mode(), given) {
        Ok(instruction) => Ok(instruction),
        Err(_) => this.fetch().and_then(|fetched| this.decode(&fetched)),
    };
    match decoded {
        Ok(instruction) => this.execute(&instruction),
        Err(outcome) => outcome,
    }
}

/// Carries out the instruction at RIP, which is known from the last time, or by its bytes, or not yet.
#[inline(always)]
fn by_bytes<D: Device>(this: &mut This<'_, '_, D>, known: &mut Known, given: &[u8], tally: Tally<'_>) -> Outcome {
    match this.repeat(&known.sites) {
        Some(outcome) => {
            tally.add(|count| &count.decode_hits, 1);
            outcome
        }
        None => by_bytes_elsewhere(this, known, given, tally),
    }
}

#[inline(never)]
fn by_bytes_elsewhere<D: Device>(
    this: &mut This<'_, '_, D>,
    known: &mut Known,
    given: &[u8],
    tally: Tally<'_>,
) -> Outcome {
    let window = match given {
        [] => match this.fetch() {
            Ok(fetched) => fetched.window,
            Err(outcome) => return outcome,
        },
        given => Window::of(given),
    };
    let bytes = Bytes::from_zero_padded(window.words(), window.length());
    let mode = Mode(this.mode() as u8);
    let Known { sites, bytes: cache } = known;
    if let Some(Decoded(instruction)) = cache.find(mode, &bytes) {
        tally.add(|count| &count.decode_hits, 1);
        // If this is not the first time, the walk to the operand is cached by now, and the site can be cached.
        this.learn(sites, &window, instruction);
        return this.execute(instruction);
    }

    tally.add(|count| &count.decode_misses, 1);
    // Decode the cached key's own bytes: memory may hold other bytes by now.
    let Ok(instruction) = x86_emulate::decode(this.mode(), &window.to_bytes()[..usize::from(window.length())]) else {
        return anew(this, &[]);
    };
    match cache.insert(mode, &bytes, Decoded(instruction)) {
        Inserted::Stored => tally.add(|count| &count.decode_insertions, 1),
        Inserted::Replaced => {
            tally.add(|count| &count.decode_insertions, 1);
            tally.add(|count| &count.decode_replaced, 1);
        }
        Inserted::Refused(_) => {}
    }
    this.execute(&instruction)
}

/// Carries out the instruction that is where RIP leads.
#[inline(never)]
fn by_place<D: Device>(
    this: &mut This<'_, '_, D>,
    shared: &WriteProtect<Decoded>,
    learnt: &mut Option<Learnt>,
    tally: Tally<'_>,
) -> Outcome {
    // Walk the guest's page tables, unless they are protected as well.
    let at = match shared.vouching() {
        Vouching::Walk => this.locate().map(|(linear, gpa)| (linear, Some(gpa))),
        Vouching::Tables => this.linear_rip().map(|linear| (linear, None)),
    };
    let (rip, gpa) = match at {
        Ok(found) => found,
        Err(outcome) => return outcome,
    };
    let place = Place { rip, space: space(this.cpu()), mode: Mode(this.mode() as u8), gpa };
    if let Some(Decoded(instruction)) = shared.find(&place) {
        tally.add(|count| &count.decode_hits, 1);
        return this.execute(&instruction);
    }

    tally.add(|count| &count.decode_misses, 1);
    match this.fetch().and_then(|fetched| Ok((fetched, this.decode(&fetched)?))) {
        Ok((fetched, instruction)) => {
            let bytes = Bytes::from_words(fetched.window.words(), fetched.window.length());
            let place = Place { gpa: Some(fetched.gpa), ..place };
            *learnt = Some(Learnt { lookup: Lookup { place, bytes }, decoded: Decoded(instruction), linear: rip });
            this.execute(&instruction)
        }
        Err(outcome) => outcome,
    }
}

/// CR3, with the other inputs of a walk in its unused bits.
fn space(cpu: &impl Cpu) -> u64 {
    let bit = |condition: bool, place: u32| u64::from(condition) << place;
    cpu.cr3()
        ^ bit(cpu.cr0() & cr0::PG != 0, 58)
        ^ bit(cpu.cr4() & cr4::PSE != 0, 59)
        ^ bit(cpu.cr4() & cr4::PAE != 0, 60)
        ^ bit(cpu.cr4() & cr4::LA57 != 0, 61)
        ^ bit(cpu.efer() & efer::LMA != 0, 62)
}

/// Caches the last executed instruction for the whole VM, if it is finished (`is_done`). Not during the emulation,
/// because this may wait for other vCPUs.
#[cold]
pub(super) fn remember(run: &mut Running<'_>, is_done: bool) {
    let Some(learnt) = run.owner.arch.emulator.learnt.take().filter(|_| is_done) else { return };
    let Learnt { lookup, decoded, linear } = learnt;
    let Some(shared) = run.vm.memory.decoded() else { return };
    let protected = Protected { memory: &run.vm.memory, vcpus: run.vm.vcpus() };
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.vmcb.save);

    let way = path(&registers, &run.vm.memory, linear);
    let tables = way.as_ref().map_or(&[][..], Path::tables);
    let rewalk = || way.is_some() && path(&registers, &run.vm.memory, linear) == way;
    let Insertion { outcome, lost, .. } =
        shared.insert(&lookup.place, &lookup.bytes, decoded, tables, &protected, rewalk);

    let tally = run.tally;
    if let Inserted::Stored | Inserted::Replaced = outcome {
        tally.add(|count| &count.decode_insertions, 1);
    }
    let replaced = u64::from(outcome == Inserted::Replaced) + u64::from(lost.entries());
    tally.add(|count| &count.decode_replaced, replaced);
}
