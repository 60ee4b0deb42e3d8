//! The terminal: its output, and the targets of keys.

use super::{KEPT, Key, LONGEST_LINE, PREFIX, Terminal, WAITING};

fn terminal(names: &[&str]) -> Terminal {
    Terminal::new((0..).zip(names.iter().copied()))
}

/// All that waits.
fn sent(terminal: &mut Terminal) -> String {
    let mut all = Vec::new();
    while !terminal.next().is_empty() {
        let piece = terminal.next().to_vec();
        terminal.sent(piece.len());
        all.extend(piece);
    }
    String::from_utf8(all).expect("is text")
}

/// Types keys, and returns what guests got.
fn typed(terminal: &mut Terminal, keys: &[u8]) -> Vec<(u32, u8)> {
    keys.iter()
        .filter_map(|&key| match terminal.typed(key) {
            Key::Guest(guest, byte) => Some((guest, byte)),
            Key::Taken => None,
            Key::PowerOff => panic!("nobody asked for it"),
        })
        .collect()
}

#[test]
fn single_vm_has_the_console_to_itself() {
    let mut terminal = terminal(&["only"]);
    terminal.wrote(0, b"login: ");
    assert_eq!(sent(&mut terminal), "login: ");
    assert_eq!(typed(&mut terminal, b"a\r\x03\x1d\x1d\x1b"), [(0, b'a'), (0, b'\r'), (0, 3), (0, PREFIX), (0, 0x1b)]);
    assert_eq!(sent(&mut terminal), "");
}

#[test]
fn of_several_vms_the_log_shows_whole_lines_with_their_names() {
    let mut terminal = terminal(&["left", "right"]);
    for (guest, text) in [(0, "one"), (1, "two\r\n"), (0, " and\r\nthr"), (1, "\n"), (0, "ee\n")] {
        terminal.wrote(guest, text.as_bytes());
    }
    assert_eq!(sent(&mut terminal), "right| two\r\nleft| one and\r\nright| \r\nleft| three\r\n");
}

#[test]
fn line_of_the_log_ends_with_its_vm_and_is_broken_where_it_is_too_long() {
    let mut terminal = terminal(&["left", "right"]);
    terminal.wrote(0, b"no end");
    terminal.wrote(1, &[b'x'; LONGEST_LINE + 3]);
    terminal.ended(0);
    terminal.ended(1);
    terminal.ended(7);
    let long = "x".repeat(LONGEST_LINE);
    assert_eq!(sent(&mut terminal), format!("right| {long}\r\nleft| no end\r\nright| xxx\r\n"));
}

#[test]
fn keys_change_what_is_shown_and_it_says_whose_console_it_is() {
    let mut terminal = terminal(&["left", "right"]);
    for (keys, title, guest) in [
        (&b"n"[..], "the console of left (VM 0)", Some(0)),
        (b"n", "the console of right (VM 1)", Some(1)),
        (b"n", "the log of all VMs", None),
        (b"1", "the console of right (VM 1)", Some(1)),
        (b"0", "the console of left (VM 0)", Some(0)),
        (b"l", "the log of all VMs", None),
    ] {
        assert_eq!(typed(&mut terminal, &[&[PREFIX], keys].concat()), []);
        assert_eq!(sent(&mut terminal), format!("\r\n--- {title} ---\r\n"));
        assert_eq!(typed(&mut terminal, b"x"), guest.map(|guest| (guest, b'x')).into_iter().collect::<Vec<_>>());
        let _warning = sent(&mut terminal);
    }
}

#[test]
fn console_that_was_not_shown_is_shown_when_it_is_chosen() {
    let mut terminal = terminal(&["left", "right"]);
    typed(&mut terminal, b"\x1d0");
    sent(&mut terminal);
    terminal.wrote(1, b"hidden\r\nguest:/# ");
    assert_eq!(sent(&mut terminal), "");
    typed(&mut terminal, b"\x1dn");
    assert_eq!(sent(&mut terminal), "\r\n--- the console of right (VM 1) ---\r\nhidden\r\nguest:/# ");
    // Earlier output is shown again, because it has left the screen.
    terminal.wrote(1, b"ls\r\n");
    typed(&mut terminal, b"\x1dl\x1d1");
    assert_eq!(sent(&mut terminal), "\r\n--- the console of right (VM 1) ---\r\nhidden\r\nguest:/# ls\r\n");
}

#[test]
fn no_more_is_kept_than_there_is_room_for_and_it_begins_with_a_line() {
    let mut terminal = terminal(&["left", "right"]);
    for line in 0..2000 {
        terminal.wrote(1, format!("line {line}\n").as_bytes());
    }
    sent(&mut terminal);
    typed(&mut terminal, b"\x1d1");
    let shown = sent(&mut terminal);
    let lines: Vec<&str> = shown.lines().skip(2).collect();
    assert_eq!(lines.last(), Some(&"line 1999"));
    assert_eq!(lines.first(), Some(&&*format!("line {}", 2000 - lines.len())));
    assert!(lines.len() > KEPT / 10 - 2 && shown.len() < KEPT + 100, "{} bytes", shown.len());
    // The kept part of one line without an end is shown.
    terminal.wrote(0, &[b'y'; 2 * KEPT]);
    typed(&mut terminal, b"\x1d0");
    assert_eq!(sent(&mut terminal).matches('y').count(), KEPT);
}

#[test]
fn guests_that_are_shown_wait_for_the_console_and_others_do_not() {
    let mut terminal = terminal(&["left", "right"]);
    assert_eq!((terminal.room(0), terminal.room(1)), (WAITING, WAITING));
    typed(&mut terminal, b"\x1d0");
    sent(&mut terminal);
    terminal.wrote(0, &[b'x'; WAITING]);
    assert_eq!((terminal.room(0), terminal.room(1)), (0, KEPT));
    terminal.sent(1000);
    assert_eq!(terminal.room(0), 1000);
}

#[test]
fn any_keys_do_no_harm_and_let_nothing_grow() {
    let mut terminal = terminal(&["left", "right"]);
    terminal.wrote(0, &[b'x'; KEPT]);
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..200_000 {
        let key = if rng.bool() { PREFIX } else { rng.u8(..) };
        terminal.typed(key);
        assert!(terminal.waiting.len() <= WAITING + KEPT + 200, "{} bytes wait", terminal.waiting.len());
    }
}

#[test]
fn input_for_nobody_is_told_once() {
    let mut terminal = terminal(&["left", "right"]);
    assert_eq!(typed(&mut terminal, b"abc"), []);
    assert_eq!(sent(&mut terminal).matches("takes no input").count(), 1);
    typed(&mut terminal, b"\x1d1");
    sent(&mut terminal);
    terminal.ended(1);
    assert_eq!(typed(&mut terminal, b"abc"), []);
    assert_eq!(sent(&mut terminal).matches("right (VM 1), which has ended takes no input").count(), 1);
}

#[test]
fn keys_are_told_on_request() {
    for key in [b'?', b'h', b'7', b'\r'] {
        let mut terminal = terminal(&["left", "right"]);
        assert_eq!(typed(&mut terminal, &[PREFIX, key]), []);
        assert!(sent(&mut terminal).contains("Ctrl-] and then: n the next"));
        // The next key is a key again.
        typed(&mut terminal, b"\x1d1");
        assert_eq!(typed(&mut terminal, b"?"), [(1, b'?')]);
    }
    // No VM at all.
    assert_eq!(typed(&mut terminal(&[]), b"a\x1dn\x1d0\x1d?"), []);
}

#[test]
fn machine_is_turned_off_by_a_key_when_all_vms_have_ended() {
    let off = |terminal: &mut Terminal| {
        assert_eq!(terminal.typed(PREFIX), Key::Taken);
        terminal.typed(b'o')
    };
    let mut terminal = terminal(&["left", "right"]);
    terminal.ended(1);
    assert_eq!(off(&mut terminal), Key::Taken);
    assert!(sent(&mut terminal).contains("VMs run"));
    terminal.ended(0);
    assert_eq!(off(&mut terminal), Key::PowerOff);
    assert_eq!(terminal.typed(b'o'), Key::Taken, "alone it is a key like others");
}

#[test]
fn vms_come_and_go_and_keep_their_numbers() {
    let mut terminal = terminal(&["left", "right"]);
    terminal.added(7, "late");
    terminal.removed(0);
    terminal.wrote(0, b"nobody\n");
    terminal.wrote(7, b"here\n");
    assert_eq!(sent(&mut terminal), "late| here\r\n");
    for (keys, title) in [
        (b"n", "the console of right (VM 1)"),
        (b"n", "the console of late (VM 7)"),
        (b"n", "the log of all VMs"),
        (b"7", "the console of late (VM 7)"),
    ] {
        assert_eq!(typed(&mut terminal, &[&[PREFIX], &keys[..]].concat()), []);
        assert!(sent(&mut terminal).starts_with(&format!("\r\n--- {title} ---\r\n")));
    }
    assert_eq!(typed(&mut terminal, b"x"), [(7, b'x')]);

    terminal.removed(7);
    assert_eq!(sent(&mut terminal), "\r\n--- the log of all VMs ---\r\n");
    assert_eq!(typed(&mut terminal, b"x"), []);
}
