//! What a processor may cache of its walks, and what removes it.

use super::Rules;

/// TLB maintenance (Arm ARM, D8.17; SDM vol. 3C, 29.4.3). Addresses are guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidate {
    /// By range: entries of stage 2 alone (IPAS2E1, RIPAS2E1).
    Guest {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// The level (0: pages) of the entries; others need not go. `None`: any level.
        level: Option<u32>,
        /// Leaves only, no pointers to tables.
        leaves: bool,
    },
    /// Combined entries of both stages, of this VM (VMALLE1, INVVPID).
    Combined,
    /// Everything of this VM (VMALLS12E1, INVEPT).
    All,
    /// Everything of all VMs (ALLE1).
    Everything,
}

/// One cached entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TlbEntry {
    pub(super) kind: Kind,
    /// The VM that was loaded. Only its VMID separates entries.
    pub(super) vm: Vm,
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// The level of the entry that it was read from.
    pub(super) level: u32,
}

/// A VM as a pCPU knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Vm {
    pub(super) vmid: u32,
    pub(super) root: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A pointer to the next table.
    Table(u64),
    /// A leaf, found by the guest physical address.
    Leaf(Rights),
    /// A combined entry, found by the guest virtual address: it does not know its guest physical address.
    Combined(Rights),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rights {
    /// Distance from guest to host addresses.
    pub(super) distance: u64,
    pub(super) read: bool,
    pub(super) write: bool,
    /// The hardware records a write in the tables first.
    pub(super) recorded: bool,
}

impl TlbEntry {
    /// Whether a pCPU may use it for this VM.
    pub(super) fn is_of(&self, vm: Vm, rules: Rules) -> bool {
        match (rules, self.kind) {
            (Rules::Extended, Kind::Combined(_)) => self.vm == vm,
            (Rules::Extended, Kind::Table(_) | Kind::Leaf(_)) => self.vm.root == vm.root,
            (Rules::Nested | Rules::Arm { .. }, _) => self.vm.vmid == vm.vmid,
        }
    }

    /// Whether an invalidation for this VM concerns it: INVEPT names a root, all others a number.
    pub(super) fn is_meant(&self, vm: Vm, invalidate: Invalidate, rules: Rules) -> bool {
        match (rules, invalidate) {
            (_, Invalidate::Everything) => true,
            (Rules::Extended, Invalidate::All) => self.vm.root == vm.root,
            _ => self.vm.vmid == vm.vmid,
        }
    }

    pub(super) fn covers(&self, address: u64) -> bool {
        self.start <= address && address - self.start < self.bytes
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.bytes && other.start < self.start + self.bytes
    }

    /// Rights, if it is a translation.
    pub(super) fn rights(&self) -> Option<Rights> {
        match self.kind {
            Kind::Table(_) => None,
            Kind::Leaf(rights) | Kind::Combined(rights) => Some(rights),
        }
    }

    /// Whether the invalidation must remove it. What it may remove as well stays.
    pub(super) fn goes(&self, invalidate: Invalidate, index_bits: u32) -> bool {
        match (invalidate, self.kind) {
            (Invalidate::All | Invalidate::Everything, _) | (Invalidate::Combined, Kind::Combined(_)) => true,
            (Invalidate::Combined, _) | (Invalidate::Guest { .. }, Kind::Combined(_)) => false,
            (Invalidate::Guest { leaves: true, .. }, Kind::Table(_)) => false,
            (Invalidate::Guest { start, end, level, .. }, kind) => {
                // A part of a large leaf goes if any address of the leaf is named.
                let whole = match kind {
                    Kind::Table(_) => self.bytes,
                    Kind::Leaf(_) | Kind::Combined(_) => 1 << (12 + index_bits * self.level),
                };
                let first = self.start & !(whole - 1);
                let is_meant = level.is_none_or(|level| level == self.level);
                is_meant && first < end && start < first + whole
            }
        }
    }
}
