//! `split = "eager"`: large pages are split before the guest writes to them. The product splits at the first write.

use stage2::{BATCH, Policy};

use super::{Phase, Session, walk};
use crate::arch::{Arch, Machine};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;

impl Session {
    /// Splits large pages before the guest writes to them, as many as the pace allows.
    pub(super) fn split_ahead(&mut self, vm: &Vm, tlbs: &AllTlbs<'_>) {
        let Phase::Splitting { slot, from, pace, splits } = &mut self.phase else { return };
        let slots = vm.memory.dirty_state().slots();
        let Some(place) = slots.get(*slot) else {
            self.phase = Phase::Logging { splits: *splits };
            return;
        };
        let allowed = pace.as_mut().map_or(BATCH as u64, |pace| pace.allowed(Machine::now()).min(BATCH as u64));
        if allowed == 0 {
            return;
        }
        let tables = vm.memory.tables();
        if allowed > self.spare.count() && self.spare.fill(tables, allowed).is_err() {
            // The rest is split when it is written, or not at all.
            self.phase = Phase::Logging { splits: *splits };
            return;
        }
        let before = self.spare.count();
        let log = place.log(Policy::Eager, self.source);
        let (stale, next) = log.split_ahead(vm.memory.walk(tlbs, &walk(vm)), *from, &mut self.spare);
        stale.pay(tlbs);
        let used = before - self.spare.count();
        *splits += used;
        if let Some(pace) = pace {
            pace.spend(used);
        }
        *from = next;
        if next >= place.range.end() {
            *slot += 1;
            *from = slots.get(*slot).map_or(next, |slot| slot.range.start);
        }
    }
}
