//! Firmware's table of Intel's IOMMUs.

use fuzz::{Input, target};
use vt_d::dmar::Dmar;

fn read(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let is_sealed = input.byte() & 1 == 0;
    let function = input.u16();
    let mut table = input.rest().to_vec();
    if is_sealed {
        super::seal(&mut table);
    }
    let Ok(dmar) = Dmar::new(&table) else { return };
    let _ = dmar.remaps_interrupts();
    let units: Vec<_> = dmar.units().collect();
    assert!(units.len() <= table.len() / 16, "more IOMMUs than fit");
    for (number, unit) in units.iter().enumerate() {
        assert!(units[..number].iter().all(|other| other.base != unit.base), "an IOMMU is there once: {unit:?}");
    }
    for memory in dmar.reserved() {
        assert!(memory.start <= memory.last, "{memory:?}");
        let _ = memory.may_be_of(function);
    }
    let behind = [&table[..], &[0xff; 40]].concat();
    assert_eq!(Dmar::new(&behind).map(|dmar| dmar.units().count()), Ok(units.len()));
}

#[test]
fn any_dmar_is_read_or_refused() {
    target("dmar", read);
}
