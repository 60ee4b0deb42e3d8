//! A made-up layout, as it must look.

use super::*;

fn row(depth: u8, offset: u32, bytes: u32, content: Content, name: &str, kind: &str) -> Row {
    Row { depth, offset, bytes, content, name: name.to_string(), kind: kind.to_string() }
}

fn layout(bytes: u32, rows: Vec<Row>) -> Layout {
    Layout { name: "Thing".to_string(), bytes, align: 128, line: 128, rows }
}

fn made_up() -> Layout {
    layout(
        768,
        vec![
            row(0, 0, 64, Content::Mailbox, "reach", "Reach"),
            row(0, 64, 64, Content::Gap, "", ""),
            row(0, 128, 256, Content::Nested, "inner", "Inner"),
            row(1, 128, 8, Content::Frozen, "id", "u64"),
            row(1, 136, 120, Content::Gap, "", ""),
            row(1, 256, 4, Content::Cold, "online", "AtomicBool"),
            row(1, 260, 124, Content::Gap, "", ""),
            row(0, 384, 0, Content::Owner, "nothing", "()"),
            row(0, 384, 200, Content::Owner, "registers", "Owned<[u64; 25]>"),
            row(0, 584, 184, Content::Gap, "", ""),
        ],
    )
}

const GOLDEN: &str = "\
The hypervisor's data by writer, in cache lines of 128 bytes.
'dunlin layout --help' explains the classes.

block                   bytes  lines  owner  mailbox  frozen  cold  empty  gap bytes
Thing                     768      6      2        1       1     1      1        492

Thing: 768 bytes, 6 lines, aligned to 128

  offset   bytes     line  class    written by       field: type
-------------------------  mailbox from line 0
       0      64        0  mailbox  any pCPU         reach: Reach
      64      64        0                            (gap)
     128     256      1-2  nested                    inner: Inner
-------------------------  frozen from line 1
     128       8        1  frozen   none                 id: u64
     136     120        1                                (gap)
-------------------------  cold from line 2
     256       4        2  cold     any pCPU, rarely     online: AtomicBool
     260     124        2                                (gap)
     384       0        -  owner    its pCPU         nothing: ()
-------------------------  owner from line 3
     384     200      3-4  owner    its pCPU         registers: Owned<[u64; 25]>
     584     184      4-5                            (gap)

Thing: 768 bytes; lines: owner 2, mailbox 1, frozen 1, cold 1, empty 1; gaps: 492 bytes
";

#[test]
fn block_is_shown_field_by_field_after_a_summary() {
    assert_eq!(blocks(&[made_up()]).plain(), GOLDEN);
}

#[test]
fn colours_change_nothing_but_the_colour() {
    // What a style adds is between an escape and an `m`.
    crossterm::style::force_color_output(true);
    let coloured = blocks(&[made_up()]).coloured();
    assert!(coloured.contains('\u{1b}'));
    let mut plain = String::new();
    let mut is_escape = false;
    for c in coloured.chars() {
        match c {
            '\u{1b}' => is_escape = true,
            'm' if is_escape => is_escape = false,
            c if !is_escape => plain.push(c),
            _ => {}
        }
    }
    assert_eq!(plain, GOLDEN);
}

#[test]
fn line_of_two_classes_is_counted_once_and_told() {
    let fields = vec![
        row(0, 0, 8, Content::Mailbox, "pending", "AtomicU64"),
        row(0, 8, 8, Content::Owner, "exits", "OwnerWord"),
        row(0, 16, 240, Content::Mailbox, "more", "[AtomicU64; 30]"),
    ];
    let layout = layout(256, fields);
    assert_eq!(Shares::of(&layout).shared, [0]);
    let text = blocks(std::slice::from_ref(&layout)).plain();
    assert!(text.contains("WRONG: line 0 holds fields of two classes\n"), "{text}");
    assert_eq!(json(&layout)["lines_of_two_classes"], json!([0]));
}

#[test]
fn nonsense_from_a_host_is_shown_and_does_no_harm() {
    let far = row(255, u32::MAX, u32::MAX, Content::Owner, "a\u{1b}[2J", "b");
    let layout = Layout { line: 0, ..layout(u32::MAX, vec![far, row(0, 9, 0, Content::Gap, "", "")]) };
    let text = blocks(&[layout]).plain();
    assert!(text.contains("a?[2J: b") && !text.contains('\u{1b}'), "{text}");
    assert!(blocks(&[]).plain().starts_with("The hypervisor's data"));
}
