//! Functions for tables of another program: those of a host whose trace is replayed.

use super::rules::Descriptor;
use super::tlb::TlbEntry;
use super::{Violation, Walks};

impl Walks {
    /// `thread` has zeroed the page at `table` to make it a table. It may have been a table before.
    pub fn adopt(&mut self, thread: usize, table: u64) {
        let entries = 1 << self.geometry.index_bits;
        self.memory.add_table_again(thread, table, entries, self.rules.earlier_life(super::EARLIER_LIFE));
        self.tables.insert(table);
        self.stored(thread);
    }

    /// A thread has exchanged an entry. The old value may include what the hardware had recorded meanwhile.
    ///
    /// # Errors
    /// The entry's value, if `old` differs from it in other bits.
    pub fn exchange_seen(&mut self, thread: usize, place: (u64, usize), old: u64, new: u64) -> Result<(), u64> {
        let now = self.load(thread, place);
        if (now ^ old) & !self.rules.recorded_bits() != 0 {
            return Err(now);
        }
        if now != old {
            self.memory.hardware_store(place, old);
        }
        self.store(thread, place, new, true);
        Ok(())
    }

    /// Whether an entry has this value, ignoring what the hardware has recorded.
    #[must_use]
    pub fn still_says(&self, place: (u64, usize), bits: u64) -> bool {
        (self.memory.newest(place) ^ bits) & !self.rules.recorded_bits() == 0
    }

    /// The hardware walks to `gpa`, if `cpu` is in its guest.
    pub fn walk_ahead(&mut self, cpu: usize, gpa: u64) {
        if self.cpus[cpu].in_guest {
            let _ = self.walk(cpu, gpa);
        }
    }

    /// No TLB may allow more in this VM than an entry `bits`, at `level`, for the addresses from `gpa` on.
    pub fn expect_no_more(&mut self, root: u64, gpa: u64, level: u32, bits: u64) {
        let leaf = match self.rules.decode(level, bits) {
            Descriptor::Leaf(leaf) => Some(leaf),
            Descriptor::Invalid => None,
            Descriptor::Table(_) => return,
        };
        let bytes = 1 << (12 + self.geometry.index_bits * level);
        let is_more = |entry: &&TlbEntry| {
            let overlaps = entry.start < gpa + bytes && gpa < entry.start + entry.bytes;
            let Some(rights) = entry.rights().filter(|_| overlaps && entry.vm.root == root) else { return false };
            leaf.is_none_or(|leaf| {
                let leads_elsewhere = rights.distance != leaf.output.wrapping_sub(gpa);
                leads_elsewhere || (rights.read && !leaf.read) || (rights.write && !leaf.write)
            })
        };
        if let Some(entry) = self.cpus.iter().flat_map(|cpu| &cpu.entries).find(is_more) {
            self.violations.push(Violation::StaleUse(entry.start));
        }
    }

    /// `cpu` has left all guests of this VM except that with the VMID `inside`, and will flush before it enters another
    /// one. So its other cached entries are never used. Returns their VMIDs.
    pub fn forget_outside(&mut self, cpu: usize, root: u64, inside: Option<u32>) -> Vec<u32> {
        let is_gone = |entry: &TlbEntry| entry.vm.root == root && Some(entry.vm.vmid) != inside;
        let entries = &mut self.cpus[cpu].entries;
        let mut numbers: Vec<u32> = entries.iter().filter(|entry| is_gone(entry)).map(|entry| entry.vm.vmid).collect();
        entries.retain(|entry| !is_gone(entry));
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// The violations since the last call.
    pub fn take_violations(&mut self) -> Vec<Violation> {
        std::mem::take(&mut self.violations)
    }
}
