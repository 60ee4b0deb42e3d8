extern crate std;

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::string::String;
use std::vec::Vec;

use super::proof::{Of, Otherwise as _, are_apart, is_nested_whole, is_whole};
use super::*;

/// Like a vCPU: classes mixed as a programmer would write them.
#[lay_out]
#[derive(Debug)]
struct Vcpu {
    /// Documented.
    #[layout(mailbox)]
    pending: AtomicU64,
    #[layout(frozen)]
    id: u32,
    #[layout(owner)]
    registers: Owned<[u64; 20]>,
    #[layout(cold)]
    name: [u8; 5],
    #[layout(mailbox)]
    posted: [AtomicU64; 3],
    #[layout(owner)]
    exits: OwnerWord,
    #[layout(frozen)]
    vm: &'static str,
}

/// Like a pCPU: one part is itself laid out.
#[lay_out]
struct PerCpu {
    #[layout(frozen)]
    id: u32,
    #[layout(nested)]
    arch: Arch,
    #[layout(mailbox)]
    online: AtomicBool,
}

#[lay_out]
#[derive(Default)]
struct Arch {
    #[layout(owner)]
    armed: OwnerWord,
    #[layout(frozen)]
    stack: u64,
}

/// A fixed order.
#[lay_out(pinned)]
struct Pinned {
    #[layout(frozen)]
    block: u64,
    #[layout(pad)]
    pad: [u8; LINE - 8],
    #[layout(owner)]
    armed: OwnerWord,
    #[layout(owner)]
    tick: OwnerWord,
}

fn vcpu(id: u32) -> Vcpu {
    Vcpu::lay_out(VcpuFields {
        pending: AtomicU64::new(1),
        id,
        registers: Owned::new([2; 20]),
        name: *b"vcpu0",
        posted: [const { AtomicU64::new(3) }; 3],
        exits: OwnerWord::new(4),
        vm: "vm",
    })
}

/// All rows: offset, size, and the field's name.
fn rows(layout: &Layout) -> Vec<(usize, usize, &'static str)> {
    let mut rows = Vec::new();
    layout.visit(&mut |row| rows.push((row.offset, row.size, row.field.map_or("", |field| field.name))));
    rows
}

/// Class and owner of each line of `layout`, from each byte.
fn classes_of_lines(layout: &Layout) -> Vec<Vec<&'static str>> {
    let mut lines = std::vec![Vec::new(); layout.size.div_ceil(LINE)];
    layout.visit(&mut |row| {
        let Some(Content::Class(class)) = row.field.map(|field| field.content) else { return };
        for byte in row.offset..row.offset + row.size {
            let line: &mut Vec<_> = &mut lines[byte / LINE];
            if !line.contains(&class.name()) {
                line.push(class.name());
            }
        }
    });
    lines
}

#[test]
fn classes_follow_each_other_in_the_order_of_their_first_fields() {
    assert_eq!(offset_of!(Vcpu, pending), 0);
    assert_eq!(offset_of!(Vcpu, posted), 8);
    assert_eq!(offset_of!(Vcpu, id), LINE);
    assert_eq!(offset_of!(Vcpu, vm), LINE + 8);
    assert_eq!(offset_of!(Vcpu, registers), 2 * LINE);
    let owned = (size_of::<Owned<[u64; 20]>>() + 8).div_ceil(LINE);
    assert_eq!(offset_of!(Vcpu, exits), 2 * LINE + size_of::<Owned<[u64; 20]>>());
    assert_eq!(offset_of!(Vcpu, name), (2 + owned) * LINE);
    assert_eq!(size_of::<Vcpu>(), (3 + owned) * LINE);
    assert_eq!(align_of::<Vcpu>(), LINE);
}

#[test]
fn constants_are_the_offsets() {
    assert_eq!(Vcpu::OFFSET_PENDING, offset_of!(Vcpu, pending));
    assert_eq!(Vcpu::OFFSET_ID, offset_of!(Vcpu, id));
    assert_eq!(Vcpu::OFFSET_REGISTERS, offset_of!(Vcpu, registers));
    assert_eq!(Vcpu::OFFSET_NAME, offset_of!(Vcpu, name));
    assert_eq!(Vcpu::OFFSET_POSTED, offset_of!(Vcpu, posted));
    assert_eq!(Vcpu::OFFSET_EXITS, offset_of!(Vcpu, exits));
    assert_eq!(Vcpu::OFFSET_VM, offset_of!(Vcpu, vm));
    assert_eq!(Pinned::OFFSET_TICK, LINE + 8);
}

#[test]
fn each_line_has_one_class() {
    for layout in [Vcpu::LAYOUT, PerCpu::LAYOUT, Arch::LAYOUT, Pinned::LAYOUT] {
        for (number, classes) in classes_of_lines(&layout).iter().enumerate() {
            assert!(classes.len() <= 1, "line {number} of {} has {classes:?}", layout.name);
        }
    }
}

#[test]
fn structs_in_an_array_share_no_line() {
    let all: Vec<_> = (0..5).map(vcpu).collect();
    let address = |at: *const Vcpu| at.addr();
    for pair in all.windows(2) {
        let last_of_first = address(&raw const pair[0]) + size_of::<Vcpu>() - 1;
        let first_of_second = address(&raw const pair[1]);
        assert!(last_of_first / LINE < first_of_second / LINE);
        assert_eq!(first_of_second % LINE, 0);
    }
}

#[test]
fn a_field_gets_the_value_that_was_given_for_it() {
    let vcpu = vcpu(9);
    assert_eq!(vcpu.pending.load(Ordering::Relaxed), 1);
    assert_eq!(vcpu.id, 9);
    assert_eq!(*vcpu.registers.run(), [2; 20]);
    assert_eq!(vcpu.name, *b"vcpu0");
    assert_eq!(vcpu.posted[2].load(Ordering::Relaxed), 3);
    assert_eq!(vcpu.exits.get(), 4);
    assert_eq!(vcpu.vm, "vm");
    assert_eq!(vcpu.registers.into_inner(), [2; 20], "a struct can be taken apart");
}

#[test]
fn a_pinned_order_stays() {
    let names: Vec<_> = Pinned::LAYOUT.fields.iter().map(|field| field.name).collect();
    assert_eq!(names, ["block", "pad", "armed", "tick"]);
    assert_eq!(offset_of!(Pinned, block), 0);
    assert_eq!(offset_of!(Pinned, armed), LINE);
    assert_eq!((size_of::<Pinned>(), align_of::<Pinned>()), (2 * LINE, LINE));
    let pinned =
        Pinned::lay_out(PinnedFields { block: 1, pad: [0; _], armed: OwnerWord::new(2), tick: OwnerWord::new(3) });
    assert_eq!((pinned.block, pinned.armed.get(), pinned.tick.get()), (1, 2, 3));
    assert_eq!(pinned.pad.len(), LINE - 8);
}

#[test]
fn what_is_nested_has_lines_of_its_own() {
    assert_eq!(offset_of!(PerCpu, id), 0);
    assert_eq!(offset_of!(PerCpu, arch), LINE);
    assert_eq!(offset_of!(PerCpu, online), 3 * LINE);
    let found = rows(&PerCpu::LAYOUT);
    let wanted = [
        (0, 4, "id"),
        (4, LINE - 4, ""),
        (LINE, 2 * LINE, "arch"),
        (LINE, 8, "armed"),
        (LINE + 8, LINE - 8, ""),
        (2 * LINE, 8, "stack"),
        (2 * LINE + 8, LINE - 8, ""),
        (3 * LINE, 1, "online"),
        (3 * LINE + 1, LINE - 1, ""),
    ];
    assert_eq!(found, wanted);
    let block = PerCpu::lay_out(PerCpuFields { id: 1, arch: Arch::default(), online: AtomicBool::new(true) });
    assert_eq!((block.id, block.arch.armed.get(), block.arch.stack), (1, 0, 0));
    assert!(block.online.load(Ordering::Relaxed));
}

#[test]
fn rows_account_for_every_byte_once() {
    for layout in [Vcpu::LAYOUT, PerCpu::LAYOUT, Pinned::LAYOUT] {
        let mut next = 0;
        layout.visit(&mut |row| {
            if matches!(row.field.map(|field| field.content), Some(Content::Nested(_))) {
                return;
            }
            assert_eq!(row.offset, next, "{}", layout.name);
            next += row.size;
        });
        assert_eq!(next, layout.size, "{}", layout.name);
    }
}

#[test]
fn types_are_named_as_they_were_written() {
    let kinds: Vec<_> = Vcpu::LAYOUT.fields.iter().map(|field| field.kind).collect();
    assert_eq!(
        kinds,
        ["AtomicU64", "[AtomicU64; 3]", "u32", "&'static str", "Owned<[u64; 20]>", "OwnerWord", "[u8; 5]"]
    );
}

#[test]
fn two_fields_are_apart_if_no_line_has_bytes_of_both() {
    for (one, other, apart) in [
        ((0, 8), (8, 8), false),
        ((0, LINE), (LINE, 1), true),
        ((0, LINE + 1), (LINE + 8, 1), false),
        ((0, 1), (LINE - 1, 1), false),
        ((LINE - 1, 1), (LINE, 1), true),
        ((LINE - 1, 2), (LINE + 1, 1), false),
        ((0, 4 * LINE), (2 * LINE, 8), false),
        // Nothing is nowhere.
        ((0, 0), (0, 8), true),
        ((8, 8), (8, 0), true),
        ((0, 0), (0, 0), true),
    ] {
        assert_eq!(are_apart(one, other), apart, "{one:?} {other:?}");
        assert_eq!(are_apart(other, one), apart, "{other:?} {one:?}");
    }
}

#[test]
fn whole_is_what_begins_and_ends_with_a_line() {
    #[repr(C, align(64))]
    struct HalfALine([u8; 64]);
    impl VcpuLayout for HalfALine {
        const LAYOUT: Layout = Layout { name: "HalfALine", size: 64, align: 64, fields: &[] };
    }
    assert!(is_whole::<CachePadded<u8>>());
    assert!(!is_whole::<[u8; LINE]>(), "of the right size, but anywhere");
    assert!(!is_whole::<HalfALine>());
    assert!(is_nested_whole::<Arch>(LINE) && !is_nested_whole::<Arch>(8));
    assert!(!is_nested_whole::<HalfALine>(LINE));
}

#[test]
fn it_is_known_what_a_type_may_be() {
    const { assert!(Of::<AtomicU32>::IS_MAILBOX && !Of::<AtomicU32>::IS_OWNER && !Of::<AtomicU32>::IS_LAID_OUT) };
    const { assert!(Of::<[AtomicBool; 2]>::IS_MAILBOX && !Of::<[u8; 2]>::IS_MAILBOX) };
    const { assert!(Of::<spin::Mutex<u8>>::IS_MAILBOX && !Of::<Frozen<AtomicBool>>::IS_MAILBOX) };
    const { assert!(Of::<Owned<u8>>::IS_OWNER && !Of::<Owned<u8>>::IS_MAILBOX) };
    const { assert!(Of::<spin::Once<OwnerWord>>::IS_OWNER && !Of::<spin::Once<u8>>::IS_OWNER) };
    const { assert!(Of::<Arch>::IS_LAID_OUT && !Of::<Arch>::IS_OWNER) };
    const { assert!(!Of::<String>::IS_OWNER && !Of::<String>::IS_MAILBOX && !Of::<String>::IS_LAID_OUT) };
}

#[test]
fn one_at_a_time_runs_it() {
    let owned = Owned::new(1_u64);
    let word = OwnerWord::default();
    {
        let mut running = owned.run();
        assert!(owned.try_run().is_none());
        let (value, proof) = running.split();
        word.add(proof, 5);
        *value += word.get();
        word.set(proof, u64::MAX);
        word.add(proof, 2);
    }
    assert_eq!(word.get(), 1, "a counter wraps");
    assert_eq!(owned.try_run().as_deref(), Some(&6));
    word.set(Proof::by_place(), 8);
    assert_eq!(word.get(), 8);
}

#[test]
fn blocks_of_many_vcpus_use_all_lines_of_a_page_evenly() {
    let mut uses = [0; PAGE / LINE];
    for index in 0..512 {
        let start = stagger(index);
        assert_eq!(start % LINE, 0);
        uses[start / LINE] += 1;
    }
    assert!(uses.iter().all(|&number| number == 512 / uses.len()), "{uses:?}");
}

#[test]
fn neighbours_in_an_array_use_all_lines_of_a_page_if_they_have_an_odd_number_of_lines() {
    for lines in 1..200 {
        let layout = Layout { name: "", size: lines * LINE, align: LINE, fields: &[] };
        let mut uses = [0; PAGE / LINE];
        (0..uses.len()).for_each(|index| uses[index * lines % (PAGE / LINE)] += 1);
        assert_eq!(layout.is_staggered(), uses.iter().all(|&number| number == 1), "{lines} lines: {uses:?}");
    }
}

#[test]
fn a_block_fits_into_its_pages_wherever_it_begins() {
    for size in (LINE..3 * PAGE).step_by(LINE) {
        let end = |index| stagger(index) + size;
        let furthest = (0..2 * PAGE / LINE).map(end).max().unwrap_or_default();
        assert!(furthest <= pages(size) * PAGE, "{size}");
        assert!(furthest > (pages(size) - 1) * PAGE, "{size}: a page too many");
    }
}
