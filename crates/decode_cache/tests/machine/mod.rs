//! Two VMs with three vCPUs each, and their events.

#![expect(clippy::cast_possible_truncation, reason = "the numbers of a machine of nine pages are small")]

mod hosting;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use addr::Gpa;
use decode_cache::{ByBytes, Bytes, Decoded, DropCause, ModeNumber, Place, Size, Vouching, WriteProtect};

use crate::Mutant;
use fastrand::Rng;
use hosting::Hosting;

/// The cache that the vCPUs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Design {
    Bytes,
    WriteProtect(Vouching),
}

/// An instruction: some bits of its first byte are its length; the other mode uses other bits. Its meaning is its bytes
/// and its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    bytes: [u8; 4],
    mode: u8,
    true_length: u8,
    /// The length that it claims.
    claimed: u8,
}

impl Decoded for Instruction {
    fn length(&self) -> u8 {
        self.claimed
    }
    fn pack(&self) -> [u64; 4] {
        let bytes = u64::from(u32::from_le_bytes(self.bytes));
        [bytes, u64::from(self.mode), u64::from(self.true_length), u64::from(self.claimed)]
    }
    fn unpack([bytes, mode, length, claimed]: [u64; 4]) -> Option<Self> {
        Some(Self {
            bytes: u32::try_from(bytes).ok()?.to_le_bytes(),
            mode: u8::try_from(mode).ok()?,
            true_length: u8::try_from(length).ok()?,
            claimed: u8::try_from(claimed).ok()?,
        })
    }
}

const PAGE: u64 = 4096;
const VMS: usize = 2;
const VCPUS: usize = 3;

// Pages of a VM, by number: roots of address spaces, leaf tables, code. An entry is one byte.
const ROOTS: u64 = 2;
const LEAVES: u64 = 3;
const CODES: u64 = 4;
const PAGES: u64 = ROOTS + LEAVES + CODES;

/// Offsets of instructions in a page: at its start, one byte apart, and across its end.
const OFFSETS: [u64; 6] = [0, 1, 2, 4093, 4094, 4095];

pub(crate) struct Vm {
    memory: RefCell<Vec<u8>>,
    /// Stage 2: which pages are writable for the guest.
    writable: RefCell<Vec<bool>>,
    /// By vCPU: the pages that its TLB allows it to write, whatever stage 2 says now.
    rights: RefCell<Vec<Vec<bool>>>,
    vcpus: RefCell<Vec<Vcpu>>,
    shared: WriteProtect<Instruction>,
}

struct Vcpu {
    space: u64,
    mode: u8,
    own: ByBytes<Instruction, 16>,
}

/// The walk to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    tables: [Gpa; 2],
    gpa: Gpa,
}

/// Everything that a vCPU can know of an instruction without a cache.
struct Cold {
    place: Place,
    bytes: Bytes,
    walk: Walk,
    /// `None` if it does not end in its page.
    decoded: Option<Instruction>,
}

pub(crate) struct World {
    vms: Vec<Vm>,
    design: Design,
    mutant: Mutant,
    by_rip_and_space: RefCell<HashMap<(u64, u64), Instruction>>,
    random: RefCell<Rng>,
    /// Current nesting of events inside other events.
    depth: Cell<u32>,
    hits: Cell<u64>,
    wrong: RefCell<Option<String>>,
}

impl World {
    pub(crate) fn new(design: Design, pages: usize, mutant: Mutant, seed: u64) -> Self {
        let vouching = match design {
            // Without protected tables the GPA is not part of the key, and nothing proves the walk.
            _ if mutant == Mutant::KeyWithoutGpa => Vouching::Tables,
            Design::WriteProtect(vouching) => vouching,
            Design::Bytes => Vouching::Walk,
        };
        let vm = |_| Vm {
            memory: RefCell::new(vec![0; usize::try_from(PAGES * PAGE).expect("small")]),
            writable: RefCell::new(vec![true; PAGES as usize]),
            rights: RefCell::new(vec![vec![false; PAGES as usize]; VCPUS]),
            vcpus: RefCell::new((0..VCPUS).map(|_| Vcpu { space: 0, mode: 0, own: ByBytes::new() }).collect()),
            shared: WriteProtect::new(Size { slots: 64, pages }, vouching),
        };
        let world = Self {
            vms: (0..VMS).map(vm).collect(),
            design,
            mutant,
            by_rip_and_space: RefCell::default(),
            random: RefCell::new(Rng::with_seed(seed)),
            depth: Cell::new(0),
            hits: Cell::new(0),
            wrong: RefCell::new(None),
        };
        for vm in &world.vms {
            for page in 0..PAGES {
                for offset in OFFSETS.into_iter().chain([8, 3, 4]) {
                    vm.poke(Gpa(page * PAGE + offset), world.byte());
                }
            }
        }
        world
    }

    pub(crate) fn wrong(&self) -> Option<String> {
        self.wrong.borrow().clone()
    }

    pub(crate) fn hits(&self) -> u64 {
        self.hits.get()
    }

    /// One event. Then every vCPU executes, and compares all cache hits.
    pub(crate) fn step(&self) {
        let vm = self.below(VMS as u64) as usize;
        match self.below(8) {
            0..=4 => self.something(vm),
            5 => self.vms[vm].vcpus.borrow_mut()[self.vcpu()].space = self.below(ROOTS) * PAGE,
            6 => self.vms[vm].vcpus.borrow_mut()[self.vcpu()].mode ^= 1,
            _ => {}
        }
        self.look_at_all(vm);
        for vcpu in 0..VCPUS {
            self.execute(vm, vcpu, self.rip());
        }
        self.look_at_all(vm);
    }

    /// An event that can happen at any time, also during another vCPU's insertion.
    fn something(&self, vm: usize) {
        match self.below(12) {
            0..=2 => self.guest_writes(vm, self.vcpu(), self.code(), self.byte()),
            3 => self.guest_writes(vm, self.vcpu(), self.entry(ROOTS, LEAVES), self.byte()),
            4 => self.guest_writes(vm, self.vcpu(), self.entry(0, ROOTS), self.byte()),
            5..=7 => self.host_writes(vm, self.code(), self.byte()),
            8 => self.host_writes(vm, self.entry(0, ROOTS + LEAVES), self.byte()),
            9 => self.processor_walks(vm, self.vcpu(), self.rip()),
            _ => self.execute(vm, self.vcpu(), self.rip()),
        }
    }

    /// Sometimes other vCPUs continue in the middle of an operation. None holds a lock of the cache.
    fn interfere(&self, vm: usize) {
        if self.depth.get() < 3 && self.below(3) != 0 {
            self.depth.set(self.depth.get() + 1);
            self.something(vm);
            self.depth.set(self.depth.get() - 1);
            self.look(vm, self.vcpu(), self.rip());
        }
    }

    /// Other vCPUs continue while a lock of the cache is held. They do only what needs no lock: permitted writes, and
    /// lookups.
    fn interfere_without_locks(&self, vm: usize, page: u64) {
        if self.below(2) == 0 {
            let gpa = Gpa(page * PAGE + OFFSETS[self.below(2) as usize]);
            let _ = self.vms[vm].try_write(self.vcpu(), gpa, self.byte());
            self.look_at_all(vm);
        }
    }

    /// A vCPU executes an instruction.
    fn execute(&self, vm: usize, vcpu: usize, rip: u64) {
        if self.look(vm, vcpu, rip) {
            return;
        }
        let cold = self.cold(vm, vcpu, rip);
        let Some(decoded) = cold.decoded else { return };
        if self.mutant == Mutant::KeyOfRipAndSpace {
            self.by_rip_and_space.borrow_mut().insert((rip, cold.place.space), decoded);
            return;
        }
        match self.design {
            Design::Bytes => {
                let own = &mut self.vms[vm].vcpus.borrow_mut()[vcpu].own;
                let _ = own.insert(cold.place.mode, &cold.bytes, decoded);
            }
            Design::WriteProtect(_) => {
                // It is executed first, which takes time.
                self.interfere(vm);
                self.insert(vm, &cold, decoded);
            }
        }
    }

    fn insert(&self, vm: usize, cold: &Cold, decoded: Instruction) {
        let hosting = Hosting::new(self, vm, cold.bytes);
        let tables: &[Gpa] = if self.mutant == Mutant::KeyWithoutGpa { &[] } else { &cold.walk.tables };
        if self.mutant == Mutant::RegistersLate && !hosting.protect_early(cold.walk.gpa, tables) {
            return;
        }
        let rewalk = || {
            self.interfere(vm);
            let now = self.vms[vm].walk(cold.place.space, cold.place.rip);
            self.interfere(vm);
            now == cold.walk || matches!(self.mutant, Mutant::NoRewalk | Mutant::KeyWithoutGpa)
        };
        let _ = self.vms[vm].shared.insert(&cold.place, &cold.bytes, decoded, tables, &hosting, rewalk);
    }

    /// Whether the vCPU has a hit there. The hit must be correct.
    fn look(&self, vm: usize, vcpu: usize, rip: u64) -> bool {
        let cold = self.cold(vm, vcpu, rip);
        let found = if self.mutant == Mutant::KeyOfRipAndSpace {
            self.by_rip_and_space.borrow().get(&(rip, cold.place.space)).copied()
        } else {
            match self.design {
                Design::Bytes => self.vms[vm].vcpus.borrow()[vcpu].own.find(cold.place.mode, &cold.bytes).copied(),
                Design::WriteProtect(Vouching::Tables) => self.vms[vm].shared.find(&Place { gpa: None, ..cold.place }),
                Design::WriteProtect(Vouching::Walk) => self.vms[vm].shared.find(&cold.place),
            }
        };
        if found.is_some() {
            self.hits.set(self.hits.get() + 1);
            if found != cold.decoded {
                let wrong = format!("VM {vm}, vCPU {vcpu}, {:x?}: {found:x?} for {:x?}", cold.place, cold.decoded);
                self.wrong.borrow_mut().get_or_insert(wrong);
            }
        }
        found.is_some()
    }

    fn look_at_all(&self, vm: usize) {
        for vcpu in 0..VCPUS {
            for page in 0..4 {
                for offset in OFFSETS {
                    self.look(vm, vcpu, page * PAGE + offset);
                }
            }
        }
    }

    fn cold(&self, vm: usize, vcpu: usize, rip: u64) -> Cold {
        let (space, mode) = {
            let vcpu = &self.vms[vm].vcpus.borrow()[vcpu];
            (vcpu.space, vcpu.mode)
        };
        let walk = self.vms[vm].walk(space, rip);
        let mut bytes = [0; 15];
        let bytes = &mut bytes[..15.min(PAGE - walk.gpa.0 % PAGE) as usize];
        self.vms[vm].peek(walk.gpa, bytes);
        let decoded = self.decode(mode, bytes);
        let key = if self.mutant == Mutant::KeyWithoutMode { 0 } else { mode };
        let place = Place { rip, space, mode: ModeNumber(key), gpa: Some(walk.gpa) };
        Cold { place, bytes: Bytes::new(bytes), walk, decoded }
    }

    fn decode(&self, mode: u8, bytes: &[u8]) -> Option<Instruction> {
        let length = 1 + (bytes.first()? >> (2 * mode) & 3);
        let own = bytes.get(..usize::from(length))?;
        let mut all = [0; 4];
        all[..own.len()].copy_from_slice(own);
        let claimed = if self.mutant == Mutant::MaskTooShort { 1.max(length - 1) } else { length };
        Some(Instruction { bytes: all, mode, true_length: length, claimed })
    }

    fn guest_writes(&self, vm: usize, vcpu: usize, gpa: Gpa, byte: u8) {
        while !self.vms[vm].try_write(vcpu, gpa, byte) {
            let page = (gpa.0 / PAGE) as usize;
            let tells = match self.mutant {
                Mutant::NoBump => false,
                Mutant::NoBumpForTables => gpa.0 / PAGE >= ROOTS + LEAVES,
                _ => true,
            };
            if self.mutant == Mutant::UnprotectBeforeBump {
                self.vms[vm].writable.borrow_mut()[page] = true;
                assert!(self.vms[vm].try_write(vcpu, gpa, byte), "it is writable");
                self.look_at_all(vm);
            }
            if tells && self.vms[vm].shared.written(gpa, DropCause::Write, &Hosting::of(self, vm)).is_some() {
                continue;
            }
            let spurious = self.vms[vm].writable.borrow()[page];
            assert!(spurious || self.mutant != Mutant::None, "read-only for nobody");
            self.vms[vm].writable.borrow_mut()[page] = true;
        }
    }

    fn host_writes(&self, vm: usize, gpa: Gpa, byte: u8) {
        let machine = &self.vms[vm];
        let hosting = Hosting::of(self, vm);
        let write = || {
            // It takes as long as a device access or an emulated string instruction.
            for _ in 0..4 {
                self.interfere(vm);
            }
            machine.poke(gpa, byte);
        };
        if self.mutant == Mutant::HostAsksOnce {
            if machine.shared.covers(gpa) {
                let _ = machine.shared.written(gpa, DropCause::Host, &hosting);
            }
            write();
        } else {
            let _ = machine.shared.write_as_host(gpa, &hosting, write);
        }
    }

    /// The vCPU's TLB misses, and its pCPU walks: each table counts as written.
    fn processor_walks(&self, vm: usize, vcpu: usize, rip: u64) {
        let space = self.vms[vm].vcpus.borrow()[vcpu].space;
        for table in self.vms[vm].walk(space, rip).tables {
            let _ = self.vms[vm].shared.written(table, DropCause::Walk, &Hosting::of(self, vm));
        }
    }

    // Random choices

    fn below(&self, limit: u64) -> u64 {
        self.random.borrow_mut().u64(..limit)
    }

    /// Whether another processor is about to replace a stage-2 entry.
    fn is_busy(&self) -> bool {
        self.below(5) == 0
    }

    fn byte(&self) -> u8 {
        self.below(16) as u8
    }

    fn vcpu(&self) -> usize {
        self.below(VCPUS as u64) as usize
    }

    fn rip(&self) -> u64 {
        self.below(4) * PAGE + OFFSETS[self.below(OFFSETS.len() as u64) as usize]
    }

    /// An address with code, or with bytes after it.
    fn code(&self) -> Gpa {
        let page = ROOTS + LEAVES + self.below(CODES);
        Gpa(page * PAGE + [0, 1, 2, 3, 4, 4093, 4094, 4095][self.below(8) as usize])
    }

    /// An entry of one of `count` tables.
    fn entry(&self, first: u64, count: u64) -> Gpa {
        Gpa((first + self.below(count)) * PAGE + self.below(2))
    }
}

impl Vm {
    fn walk(&self, space: u64, rip: u64) -> Walk {
        let entry = |table: Gpa, index: u64| u64::from(self.memory.borrow()[(table.0 + index) as usize]);
        let root = Gpa(space);
        let leaf = Gpa((ROOTS + entry(root, rip / PAGE / 2 % 2) % LEAVES) * PAGE);
        let code = (ROOTS + LEAVES + entry(leaf, rip / PAGE % 2) % CODES) * PAGE;
        Walk { tables: [root, leaf], gpa: Gpa(code + rip % PAGE) }
    }

    /// A vCPU writes with a right from its TLB, or takes one from stage 2. False: it faults.
    fn try_write(&self, vcpu: usize, gpa: Gpa, byte: u8) -> bool {
        let page = (gpa.0 / PAGE) as usize;
        let mut rights = self.rights.borrow_mut();
        rights[vcpu][page] |= self.writable.borrow()[page];
        if rights[vcpu][page] {
            self.poke(gpa, byte);
        }
        rights[vcpu][page]
    }

    fn poke(&self, gpa: Gpa, byte: u8) {
        self.memory.borrow_mut()[gpa.0 as usize] = byte;
    }

    fn peek(&self, gpa: Gpa, bytes: &mut [u8]) {
        let start = gpa.0 as usize;
        bytes.copy_from_slice(&self.memory.borrow()[start..start + bytes.len()]);
    }
}
