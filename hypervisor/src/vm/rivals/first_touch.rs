//! Memory that is mapped when the guest touches it: shows what such faults cost.

use addr::Gpa;
use stage2::{Access, Denial, Format, MapError, Tree};

use crate::arch::tables::with_known_format;
use crate::vcpu::run::Running;
use crate::vm::address_space::AllTlbs;
use crate::vm::fault::{Problem, Resolved, count_stall};

/// Tables that mapping one page can take: all below the root.
const TABLES_FOR_A_PAGE: u64 = 3;

/// Maps the page that holds `gpa`, in this region, where memory is mapped when it is touched.
#[inline(always)]
pub(in crate::vm) fn populate(run: &mut Running<'_>, region: u32, gpa: Gpa, level: u32) -> Resolved {
    let vm = run.vm;
    with_known_format!(vm.memory.tree(), |tree| populate_in(run, tree, region, gpa, level))
}

// Not inlined, so that other exits do not need its stack space, and neither format that of the other.
#[inline(never)]
fn populate_in<F: Format>(run: &mut Running<'_>, tree: &Tree<F>, region: u32, gpa: Gpa, level: u32) -> Resolved {
    let memory = &run.vm.memory;
    let Some(hpa) = memory.host_page(region, gpa, level) else { return Resolved::End(Problem::NotMapped) };
    let (tables, spare) = (memory.tables(), &mut run.owner.fault_state.spare);
    let (tlbs, walking) = (AllTlbs::of(run.vm), memory.announce(run.cpu.id));
    let populated = tree.walk(tables, &tlbs, &walking).populate(spare, gpa, hpa, level, Access::ALL);
    drop(walking);
    let resolved = match populated {
        Ok(()) => {
            run.tally.add(|count| &count.pages_populated, 1);
            Resolved::Again(Denial::NONE)
        }
        // The guest retries, and finds a table.
        Err(MapError::OutOfTables) if spare.fill(tables, TABLES_FOR_A_PAGE).is_ok() => Resolved::Again(Denial::NONE),
        Err(MapError::OutOfTables) => Resolved::End(Problem::OutOfTables),
        Err(_) => Resolved::End(Problem::NotMapped),
    };
    count_stall(run);
    resolved
}
