//! What firmware and boot loader hand over, byte by byte: any tables, any modules, any memory map.

use std::vec::Vec;

use addr::{Hpa, HpaRange};
use fuzz::{Input, target};

use crate::boot::handover::{Framebuffer, Handover, Module};
use crate::boot::mcfg::{BUS_BYTES, Window};
use crate::boot::{madt, soft_off, spcr};

fn handed_over(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 7 {
        0 => console(&mut input),
        1 => controllers(input.rest()),
        2 => windows(&mut input),
        3 => {
            let found = soft_off::find(input.rest());
            assert!(found.is_none_or(|types| types.a <= 7 && types.b <= 7), "{found:?}");
        }
        4 => modules(&mut input),
        5 => io_apics(&mut input),
        _ => memory(&mut input),
    }
}

fn console(input: &mut Input<'_>) {
    let is_sealed = input.byte() & 1 == 0;
    let mut table = input.rest().to_vec();
    if is_sealed && table.len() > 9 {
        table[..4].copy_from_slice(b"SPCR");
        let length = u32::try_from(table.len()).expect("inputs are short");
        table[4..8].copy_from_slice(&length.to_le_bytes());
        table[9] = 0;
        table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    }
    let read = spcr::read(&table);
    let behind = [&table[..], &[0xff; 80]].concat();
    if read != spcr::Spcr::Damaged {
        assert_eq!(read, spcr::read(&behind), "what is behind the table changes nothing");
    }
}

/// Entries that are called well formed can be walked.
fn controllers(table: &[u8]) {
    if !madt::is_well_formed(table) {
        return;
    }
    let mut rest = table;
    while let &[kind, length, ..] = rest {
        assert!(length >= [2, 8, 16][usize::from(kind == 0) + 2 * usize::from(kind == 9)]);
        rest = &rest[usize::from(length)..];
    }
    assert!(rest.is_empty());
}

/// Those that are used are apart from RAM, and have interrupts of their own.
fn io_apics(input: &mut Input<'_>) {
    let ram = [HpaRange::new(Hpa(0), 1 << 30).expect("a range")];
    let versions: Vec<u32> = (0..4).map(|_| input.u32()).collect();
    let mut named: Vec<(u32, Hpa)> = Vec::new();
    while !input.is_empty() && named.len() < 64 {
        let first = if input.byte() & 1 == 0 { input.byte().into() } else { input.u32() };
        let near = 0xfec0_0000 + (u64::from(input.byte() % 32) << 12);
        named.push((first, Hpa(if input.byte() & 1 == 0 { near } else { input.u64() })));
    }
    // Half of them answer as one that has as many pins as fits.
    let version = |at: Hpa| match at.0 >> 12 & 7 {
        number @ 0..4 => versions[usize::try_from(number).expect("it is small")],
        number => 0x20 | u32::try_from(number).expect("it is small") << 20,
    };
    let mut left_out = 0;
    let found = madt::io_apics(&named, &ram, version, |_, _| left_out += 1);
    assert_eq!(found.len() + left_out, named.len());
    assert!(found.iter().map(|one| one.pins).sum::<usize>() <= 512);
    for (number, one) in found.iter().enumerate() {
        assert!((1..=120).contains(&one.pins) && named.contains(&(one.first, one.registers)), "{one:?}");
        assert!(one.registers.0.is_multiple_of(4096) && one.registers.0 >= 1 << 30, "{one:?}");
        for other in &found[..number] {
            assert!(other.registers != one.registers, "{one:?}, {other:?}");
            assert!(u64::from(other.first) + other.pins as u64 <= one.first.into(), "{one:?}, {other:?}");
        }
    }
}

/// A window that is used is apart from RAM and from the others.
fn windows(input: &mut Input<'_>) {
    let end = Hpa(1 << 40);
    let mut used: Vec<Window> = Vec::new();
    while !input.is_empty() {
        let base = if input.byte() & 1 == 0 { u64::from(input.u16()) * BUS_BYTES } else { input.u64() };
        let window = Window { base: Hpa(base), first_bus: input.byte(), last_bus: input.byte() };
        let ram = HpaRange::new(Hpa(0), 2 << 30).expect("a range");
        if window.check(&used, [ram].into_iter(), end).is_ok() {
            assert!(window.first_bus <= window.last_bus);
            assert!(base + (u64::from(window.last_bus) + 1) * BUS_BYTES <= end.0, "{window}");
            assert!(base + u64::from(window.first_bus) * BUS_BYTES >= ram.end().0, "{window}");
            assert!(used.iter().all(|other| (0..=255).all(|bus| !(other.has(bus) && window.has(bus)))), "{window}");
            used.push(window);
        }
    }
}

/// Modules that are taken are apart from the image and from each other.
fn modules(input: &mut Input<'_>) {
    let image = HpaRange::new(Hpa(0x20_0000), 0x10_0000).expect("a range");
    let place = |input: &mut Input<'_>| match input.byte() % 3 {
        0 => u64::from(input.byte()) << 12,
        1 => u64::from(input.u32()),
        _ => input.u64(),
    };
    let given: Vec<Module<'_>> = (0..input.below(20))
        .map(|_| {
            let command_line = input.pick(&["", "payload", "payload x", "kernel", "a b c"]);
            let start = place(input);
            let end = if input.byte() & 1 == 0 { start.wrapping_add(u64::from(input.u16())) } else { place(input) };
            Module { start: Hpa(start), end: Hpa(end), command_line }
        })
        .collect();
    let mut handover = Handover::new();
    if handover.set_modules(given.iter().copied(), &image).is_err() {
        return;
    }
    let taken: Vec<&HpaRange> = handover.modules().collect();
    assert_eq!(taken.len(), given.len());
    for (number, module) in taken.iter().enumerate() {
        assert!(!module.overlaps(&image), "{module:?}");
        assert!(taken[..number].iter().all(|other| !other.overlaps(module)), "{taken:?}");
    }
    for (range, command_line) in handover.others() {
        assert!(given.iter().any(|one| one.start == range.start && one.command_line == command_line));
    }
}

fn memory(input: &mut Input<'_>) {
    let pitch = input.u32();
    let colours = [(); 3].map(|()| (input.byte(), input.byte()));
    if let Some(screen) = Framebuffer::new(input.u64(), pitch, (input.u32(), input.u32()), input.byte(), colours) {
        assert!(screen.start.0.checked_add(screen.bytes()).is_some(), "it ends somewhere");
        assert!(screen.row_pixels >= u32::from(screen.width));
        assert!(screen.shifts.iter().all(|shift| *shift <= 24));
    }
    let mut ranges = Vec::new();
    while !input.is_empty() {
        ranges.push((input.u64(), input.u64(), u32::from(input.byte()) % 8));
    }
    let mut handover = Handover::new();
    if handover.set_memory(|| ranges.iter().copied()).is_ok() {
        let mut line = Handover::new().command_line;
        line.set(ranges.iter().map(|(start, ..)| start.to_le_bytes()[0]));
        assert!(line.text().len() <= ranges.len());
    }
}

#[test]
fn whatever_firmware_hands_over_is_used_as_it_is_or_refused() {
    target("firmware_tables", handed_over);
}
