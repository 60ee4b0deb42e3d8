//! Caches whole accesses by their address.
//!
//! A driver accesses a device register by one instruction at one address, thousands of times. A [`Site`] holds the
//! result of the last time: the addresses of code and operand, the bytes, and their meaning. It also holds every input
//! of that result: vCPU state, every page-table entry of both walks, and the bytes. If all inputs are unchanged, so is
//! the result. Otherwise the instruction takes the slow path, and the site is filled again. Nothing is invalidated, and
//! nothing can be stale.
//!
//! A site can hold a move of 64-bit code between memory and a general register or an immediate. The operand must be on
//! one page, at an address with at most a base register, and must not depend on a segment. Nearly all drivers access
//! their devices like this.

use crate::cpu::Regime;
use crate::fetch::Window;
use crate::instruction::{Base, Form, Instruction, Operation};
use crate::operand::Emulation;
use crate::walk::Access;
use crate::walks::{Steps, Walks};
use crate::{Cpu, Device, Memory, Mode, Outcome, Segment, Width};
use addr::{Gpa, PAGE_BYTES, PageSize};

/// Number of sites.
const SITES: usize = 16;

/// Maximum number of aligned words of an instruction: up to seven bytes before it, then fifteen.
const CODE_WORDS: usize = 3;

/// 64-bit words in a page.
const WORDS_PER_PAGE: usize = 512;
const _: () = assert!(WORDS_PER_PAGE as u64 * 8 == PAGE_BYTES);

/// A vCPU's cache of device accesses.
pub struct Sites<M: Memory> {
    sites: [Site<M>; SITES],
    /// For each site, the address that last wanted it: an address that comes twice in a row may evict the old one.
    candidates: [u64; SITES],
}

/// One address, and all cached results for it.
struct Site<M: Memory> {
    /// Its RIP, address space, and vCPU state.
    rip: u64,
    root: u64,
    regime: u64,

    /// The walk to the code, and the words of the instruction: the first word, their values, and masks of the
    /// instruction's bytes.
    code_walk: Steps<M>,
    code: M::Word,
    words: [u64; CODE_WORDS],
    masks: [u64; CODE_WORDS],
    instruction: Instruction,

    /// The operand's page, and the walk to it.
    linear_page: u64,
    data_walk: Steps<M>,
    page: Gpa,
}

impl<M: Memory> Sites<M> {
    /// Nothing is cached yet.
    #[must_use]
    pub fn new() -> Self {
        Self { sites: core::array::from_fn(|_| Site::none()), candidates: [0; SITES] }
    }

    #[inline(always)]
    fn index(rip: u64) -> usize {
        const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
        #[expect(clippy::cast_possible_truncation, reason = "as many bits as an index has")]
        let index = (rip.wrapping_mul(MULTIPLIER) >> (64 - SITES.trailing_zeros())) as usize;
        index
    }
}

impl<M: Memory> Default for Sites<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Memory> Site<M> {
    /// An empty site: its mode does not exist, so no regime matches.
    fn none() -> Self {
        Self {
            rip: 0,
            root: 0,
            regime: u64::MAX,
            code_walk: Steps::none(),
            code: M::Word::default(),
            words: [0; CODE_WORDS],
            masks: [0; CODE_WORDS],
            instruction: Instruction::NONE,
            linear_page: 0,
            data_walk: Steps::none(),
            page: Gpa(0),
        }
    }

    /// Whether the code, and the walk to it, are unchanged.
    #[inline(always)]
    fn is_current(&self, memory: &M) -> bool {
        if !self.code_walk.are_current(memory) || !memory.is_current(Some(self.code)) {
            return false;
        }
        let mut differ = (memory.load(self.code, 0) ^ self.words[0]) & self.masks[0];
        for ahead in 1..CODE_WORDS {
            if self.masks[ahead] == 0 {
                break;
            }
            differ |= (memory.load(self.code, ahead) ^ self.words[ahead]) & self.masks[ahead];
        }
        differ == 0
    }
}

/// The address of a site's operand, without a base register.
#[inline(always)]
fn linear(cpu: &impl Cpu, instruction: &Instruction) -> u64 {
    let base = match instruction.address.base {
        Some(Base::Register(number)) => cpu.gprs()[usize::from(number & 15)],
        Some(Base::NextInstruction) => cpu.rip().wrapping_add(instruction.length.into()),
        None => 0,
    };
    base.wrapping_add(instruction.displacement)
}

/// Whether a site can hold this instruction.
fn is_fit(regime: &Regime, instruction: &Instruction) -> bool {
    let Instruction { operation, address, .. } = instruction;
    regime.mode == Mode::Bits64
        && *operation == Operation::Move
        && address.width == Width::Qword
        && address.index.is_none()
        && !matches!(address.segment, Segment::Fs | Segment::Gs)
}

impl<C: Cpu, M: Memory, D: Device> Emulation<'_, C, M, D> {
    /// Executes the instruction at RIP if it and its operand are cached and unchanged. Otherwise does nothing and
    /// returns `None`.
    #[inline(always)]
    pub fn repeat(&mut self, sites: &Sites<M>) -> Option<Outcome> {
        let rip = self.cpu.rip();
        let site = &sites.sites[Sites::<M>::index(rip)];
        let is_here = site.rip == rip && site.root == self.cpu.cr3() && site.regime == self.regime.walks;
        if !is_here || !site.is_current(self.memory) {
            return None;
        }

        let Instruction { form, width, register, length, .. } = site.instruction;
        let linear = linear(self.cpu, &site.instruction);
        let offset = linear % PAGE_BYTES;
        let is_there = linear / PAGE_BYTES == site.linear_page && offset + width.bytes() <= PAGE_BYTES;
        if !is_there || site.page != self.fault_page || !site.data_walk.are_current(self.memory) {
            return None;
        }

        let gpa = Gpa(site.page.0 | offset);
        if form == Form::FromMemory {
            let value = self.device.read(gpa, width);
            self.set_register(register, value);
        } else {
            self.device.write(gpa, width, width.truncate(self.source(&site.instruction)));
        }
        self.step_over(length);
        Some(Outcome::Done { length })
    }

    /// Offers the instruction at RIP to the cache. It was decoded from `window` and is about to be executed on the slow
    /// path. The cache stores it when it comes twice before another one that wants the same site. The caller may offer
    /// any instruction; the cache stores those that [`repeat`](Self::repeat) can execute.
    #[inline]
    pub fn cache_site(&mut self, sites: &mut Sites<M>, window: &Window, instruction: &Instruction) {
        let rip = self.cpu.rip();
        let candidate = &mut sites.candidates[Sites::<M>::index(rip)];
        if *candidate == rip {
            self.learn_now(sites, window, instruction);
        } else {
            *candidate = rip;
        }
    }

    #[inline(never)]
    fn learn_now(&mut self, sites: &mut Sites<M>, window: &Window, instruction: &Instruction) {
        if is_fit(&self.regime, instruction)
            && let Some(site) = self.site(window, instruction)
        {
            let index = Sites::<M>::index(site.rip);
            sites.sites[index] = site;
        }
    }

    /// The site's content, if all of it can be found.
    fn site(&mut self, window: &Window, instruction: &Instruction) -> Option<Site<M>> {
        let (rip, root, regime) = (self.cpu.rip(), self.cpu.cr3(), self.regime.walks);
        let Self { cpu, memory, walks, .. } = self;

        let (code_walk, at, page) = walks.way(*cpu, &self.regime, memory, rip, Access::Execute)?;
        let offset = at.offset_in(PageSize::Size4K);
        let end = offset + u64::from(instruction.length);
        if end > PAGE_BYTES {
            return None;
        }
        let first = usize::try_from(offset / 8).ok()?;
        let code = memory.find(Gpa(at.0 & !7)).filter(|_| page.is_some())?;
        let (mut words, mut masks) = ([0; CODE_WORDS], [0; CODE_WORDS]);
        for ahead in 0..CODE_WORDS.min(WORDS_PER_PAGE - first) {
            masks[ahead] = bytes_between(offset % 8, end - offset / 8 * 8, ahead);
            words[ahead] = memory.load(code, ahead);
        }
        // Another vCPU may have changed the code since it was decoded; then these words hold another instruction.
        let mut bytes = [0; CODE_WORDS * 8];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let length = usize::from(instruction.length);
        let found = bytes.get(usize::try_from(offset % 8).ok()?..)?.get(..length)?;
        if window.to_bytes().get(..length)? != found {
            return None;
        }

        let linear = linear(*cpu, instruction);
        let access = if instruction.form == Form::FromMemory { Access::Read } else { Access::Write };
        let (data_walk, gpa, _) = walks.way(*cpu, &self.regime, memory, linear, access)?;
        Some(Site {
            rip,
            root,
            regime,
            code_walk,
            code,
            words,
            masks,
            instruction: *instruction,
            linear_page: linear / PAGE_BYTES,
            data_walk,
            page: gpa.page(PageSize::Size4K),
        })
    }
}

/// A mask of the bytes of word number `word` that are from byte `start` on and before byte `end`, both counted from the
/// first word.
fn bytes_between(start: u64, end: u64, word: usize) -> u64 {
    let from = (word as u64) * 8;
    (0..8).filter(|byte| (start..end).contains(&(from + byte))).map(|byte| 0xff << (8 * byte)).sum()
}

impl<M: Memory> Walks<M> {
    /// The cached walk to `linear`, its result, and the first word of that page. `None` if there is no walk, or an
    /// entry has changed.
    fn way(
        &self,
        cpu: &impl Cpu,
        regime: &Regime,
        memory: &M,
        linear: u64,
        access: Access,
    ) -> Option<(Steps<M>, Gpa, Option<M::Word>)> {
        let walk = self.remembered(cpu, regime, memory, linear, access)?;
        Some((walk.steps.clone(), Gpa(walk.gpa.0 + linear % PAGE_BYTES), walk.page))
    }
}
