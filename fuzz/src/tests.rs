use std::fs;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Decisions, Input, MUTATIONS, replay};

#[test]
fn input_is_taken_in_order_and_zero_behind_its_end() {
    let mut input = Input::new(&[1, 2, 3, 4, 5]);
    assert_eq!((input.byte(), input.u16()), (1, 0x0302));
    assert_eq!(input.bytes(1), [4]);
    assert_eq!(input.u64(), 5);
    assert!(input.is_empty());
    assert_eq!((input.u32(), input.below(7), input.bytes(3)), (0, 0, &[][..]));
}

/// A folder with one input.
fn corpus(name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("dunlin-fuzz-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder can be made");
    fs::write(folder.join("one"), bytes).expect("a file can be written");
    folder
}

#[test]
fn replay_calls_the_target_with_the_corpus_and_all_mutations() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    static EXACT: AtomicUsize = AtomicUsize::new(0);
    let folder = corpus("calls", b"the input");
    replay(&folder, MUTATIONS, |bytes| {
        CALLS.fetch_add(1, Ordering::Relaxed);
        EXACT.fetch_add(usize::from(bytes == b"the input"), Ordering::Relaxed);
    });
    fs::remove_dir_all(folder).expect("it is there");
    assert_eq!(CALLS.load(Ordering::Relaxed) as u64, 1 + MUTATIONS);
    let exact = EXACT.load(Ordering::Relaxed);
    assert!((1..200).contains(&exact), "nearly all mutations change something: {exact}");
}

#[test]
fn mistake_one_byte_away_from_the_corpus_is_found() {
    let folder = corpus("found", b"the input");
    let result = catch_unwind(|| replay(&folder, MUTATIONS, |bytes| assert!(!bytes.starts_with(b"thd"), "found")));
    fs::remove_dir_all(folder).expect("it is there");
    assert!(result.is_err());
}

#[test]
fn corpus_without_files_is_a_mistake() {
    assert!(catch_unwind(|| replay(std::path::Path::new("no such folder"), MUTATIONS, |_| {})).is_err());
}

#[test]
fn decisions_take_few_bytes_and_stay_in_their_range() {
    let mut decisions = Decisions::of_bytes(&[5, 1, 0x12, 0x34, 9]);
    assert_eq!((decisions.u32(..4), decisions.bool(), decisions.u64(..0x1_0000)), (1, true, 0x1234));
    assert!(!decisions.are_over());
    assert_eq!((decisions.u8(10..12), decisions.are_over()), (11, true));
    assert_eq!((decisions.u64(7..), decisions.u64(..), decisions.choice(&[3, 4])), (7, 0, Some(&3)));
    assert_eq!(decisions.choice::<u8>(&[]), None);
    let mut decisions = Decisions::of_seed(1);
    assert!((0..1000).all(|_| (5..9).contains(&decisions.usize(5..9))));
}
