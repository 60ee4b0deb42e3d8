//! Firmware's table of AMD's IOMMUs.

use amd_vi::ivrs::Ivrs;
use fuzz::{Input, target};

fn read(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let is_sealed = input.byte() & 1 == 0;
    let mut table = input.rest().to_vec();
    if is_sealed {
        super::seal(&mut table);
    }
    let Ok(ivrs) = Ivrs::new(&table) else { return };
    assert!(ivrs.units().count() <= table.len() / 24, "more IOMMUs than fit");
    for unit in ivrs.units() {
        assert!(unit.scopes().count() <= table.len() / 4, "more devices than fit");
        let same = ivrs.units().filter(|other| (other.segment, other.base) == (unit.segment, unit.base)).count();
        assert_eq!(same, 1, "an IOMMU is there once: {unit:?}");
    }
    for memory in ivrs.reserved() {
        assert!(!memory.devices.is_empty() && memory.bytes > 0, "{memory:?}");
        assert!(memory.start.0.checked_add(memory.bytes).is_some_and(|end| end <= 1 << 52), "{memory:?}");
    }
    // What is behind the table changes nothing.
    let behind = [&table[..], &[0xff; 40]].concat();
    assert_eq!(Ivrs::new(&behind).map(|ivrs| ivrs.units().count()), Ok(ivrs.units().count()));
}

#[test]
fn any_ivrs_is_read_or_refused() {
    target("ivrs", read);
}
