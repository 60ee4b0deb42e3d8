//! How a VM's memory answers calls of its cache, and what other vCPUs do meanwhile.

use addr::Gpa;
use decode_cache::{Bytes, Protect, Protection, Unprotection};

use super::{PAGE, Vm, World};
use crate::Mutant;

pub(super) struct Hosting<'a> {
    world: &'a World,
    vm: usize,
    /// The bytes being inserted.
    bytes: Bytes,
}

impl<'a> Hosting<'a> {
    pub(super) fn new(world: &'a World, vm: usize, bytes: Bytes) -> Self {
        Self { world, vm, bytes }
    }

    /// For a vCPU that inserts nothing.
    pub(super) fn of(world: &'a World, vm: usize) -> Self {
        Self::new(world, vm, Bytes::NONE)
    }

    /// A planted mistake: the steps of an insertion up to the read of memory, before the pages are registered.
    pub(super) fn protect_early(&self, code: Gpa, tables: &[Gpa]) -> bool {
        for page in tables.iter().chain([&code]) {
            self.machine().writable.borrow_mut()[(page.0 / PAGE) as usize] = false;
        }
        self.machine().flush();
        let mut now = [0; 15];
        let now = &mut now[..usize::from(self.bytes.length())];
        self.machine().peek(code, now);
        let same = Bytes::new(now) == self.bytes;
        self.world.interfere(self.vm);
        same
    }

    fn machine(&self) -> &'a Vm {
        &self.world.vms[self.vm]
    }
}

impl Protect for Hosting<'_> {
    fn protect(&self, page: Gpa) -> Protection {
        let number = page.0 / PAGE;
        if self.world.mutant == Mutant::RegistersLate {
            return Protection::Already;
        }
        self.world.interfere_without_locks(self.vm, number);
        if self.world.is_busy() {
            return Protection::Busy;
        }
        let had = std::mem::replace(&mut self.machine().writable.borrow_mut()[number as usize], false);
        self.world.interfere_without_locks(self.vm, number);
        if had { Protection::Owed } else { Protection::Already }
    }

    fn flush(&self) {
        self.world.interfere(self.vm);
        if self.world.mutant != Mutant::NoFlush {
            self.machine().flush();
        }
        self.world.interfere(self.vm);
    }

    fn unprotect(&self, page: Gpa) -> Unprotection {
        let number = page.0 / PAGE;
        if self.world.is_busy() {
            return Unprotection::Busy;
        }
        self.machine().writable.borrow_mut()[number as usize] = true;
        self.world.interfere_without_locks(self.vm, number);
        Unprotection::Done
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        self.world.interfere(self.vm);
        if matches!(self.world.mutant, Mutant::NoReread | Mutant::RegistersLate) {
            let [first, second] = self.bytes.words();
            let all: Vec<_> = first.to_le_bytes().into_iter().chain(second.to_le_bytes()).collect();
            bytes.copy_from_slice(&all[..bytes.len()]);
        } else {
            self.machine().peek(gpa, bytes);
        }
        self.world.interfere(self.vm);
        true
    }
}

impl Vm {
    fn flush(&self) {
        for rights in self.rights.borrow_mut().iter_mut() {
            rights.fill(false);
        }
    }
}
