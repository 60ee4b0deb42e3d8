//! Wrong layouts do not compile, and the message names the mistake.
//!
//! Each case changes a source that compiles, and gives it to the compiler with the crate.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compiles, and has one of everything.
const SOURCE: &str = "
    use std::sync::atomic::AtomicU64;
    use vcpu_layout::{LINE, Layout, Owned, OwnerWord, VcpuLayout, lay_out};

    #[lay_out]
    pub struct Vcpu {
        #[layout(mailbox)]
        pub pending: AtomicU64,
        #[layout(owner)]
        pub exits: OwnerWord,
        #[layout(frozen)]
        pub id: u32,
        #[layout(cold)]
        pub name: u64,
        #[layout(owner)]
        pub registers: Owned<[u64; 16]>,
        #[layout(nested)]
        pub timer: Timer,
    }

    /// Known to assembly code, in this order.
    #[lay_out(pinned)]
    pub struct Entry {
        #[layout(frozen)]
        pub stack: u64,
        #[layout(pad)]
        pub pad: [u8; LINE - 8],
        #[layout(owner)]
        pub left_at: OwnerWord,
        #[layout(nested)]
        pub timer: Timer,
    }

    /// Laid out by hand.
    #[repr(C, align(128))]
    pub struct Timer {
        pub deadline: AtomicU64,
    }

    impl VcpuLayout for Timer {
        const LAYOUT: Layout = Layout { name: \"Timer\", size: LINE, align: LINE, fields: &[] };
    }
";

/// The folder with cargo's output for this test.
fn built() -> Option<PathBuf> {
    Some(env::current_exe().ok()?.parent()?.to_path_buf())
}

/// The crate as built for this test: the newest, if there are several.
fn library(directory: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let named = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libvcpu_layout-") && name.ends_with(".rlib")
    });
    named.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok()).map(|entry| entry.path())
}

/// The compiler's messages about `source`; empty if it compiles.
fn complaints(source: &str) -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let directory = built().expect("a test is in a directory");
    let library = library(&directory).expect("the crate was built before its tests");
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("mutant_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let file = scratch.join(format!("{name}.rs"));
    fs::write(&file, source).expect("cargo made the directory");
    let output = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--color", "never"])
        .arg("--out-dir")
        .arg(scratch)
        .arg("-L")
        .arg(format!("dependency={}", directory.display()))
        .arg("--extern")
        .arg(format!("vcpu_layout={}", library.display()))
        .arg(&file)
        .output()
        .expect("what was built can be built again");
    let _ = fs::remove_file(&file);
    let _ = fs::remove_file(scratch.join(format!("lib{name}.rmeta")));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), !text.contains("error"), "{text}");
    text
}

/// The change from `from` to `to` makes the compiler print `message`; without it, it prints nothing.
#[track_caller]
fn caught(from: &str, to: &str, message: &str) {
    static UNCHANGED: OnceLock<String> = OnceLock::new();
    let unchanged = UNCHANGED.get_or_init(|| complaints(SOURCE));
    assert_eq!(unchanged, "", "the source that is changed must compile");
    assert_eq!(SOURCE.matches(from).count(), 1, "one change, at one place");
    let text = complaints(&SOURCE.replacen(from, to, 1));
    assert!(text.contains(message), "not `{message}` but:\n{text}");
}

#[test]
fn mailbox_field_moved_to_the_owner() {
    caught(
        "#[layout(mailbox)]\n        pub pending",
        "#[layout(owner)]\n        pub pending",
        "cannot be of class `owner`: others than the owner can write it",
    );
}

#[test]
fn owner_field_moved_to_the_mailbox() {
    caught(
        "#[layout(owner)]\n        pub registers",
        "#[layout(mailbox)]\n        pub registers",
        "Owned<[u64; 16]>` cannot be of class `mailbox`: it is not made of atomics or locks",
    );
}

#[test]
fn owner_field_moved_to_the_frozen() {
    caught(
        "#[layout(owner)]\n        pub exits",
        "#[layout(frozen)]\n        pub exits",
        "`exits` of `Vcpu` is frozen, but its type is one that its owner writes",
    );
}

#[test]
fn mailbox_field_moved_to_the_frozen() {
    caught(
        "#[layout(mailbox)]\n        pub pending",
        "#[layout(frozen)]\n        pub pending",
        "`pending` of `Vcpu` is frozen, but its type is one that others write",
    );
}

#[test]
fn frozen_field_moved_to_the_owner() {
    caught(
        "#[layout(frozen)]\n        pub id",
        "#[layout(owner)]\n        pub id",
        "`u32` cannot be of class `owner`: others than the owner can write it, or it cannot be written at all",
    );
}

#[test]
fn shrunk_pad() {
    caught("[u8; LINE - 8]", "[u8; LINE - 16]", "`stack` (frozen) and `left_at` (owner) of `Entry` share a cache line");
}

#[test]
fn field_added_without_shrinking_the_pad_before_another_class() {
    caught(
        "#[layout(pad)]\n",
        "#[layout(mailbox)]\n        pub late: AtomicU64,\n        #[layout(pad)]\n",
        "`stack` (frozen) and `late` (mailbox) of `Entry` share a cache line",
    );
}

#[test]
fn order_pinned_that_mixes_classes() {
    caught("#[lay_out]", "#[lay_out(pinned)]", "`pending` (mailbox) and `exits` (owner) of `Vcpu` share a cache line");
}

#[test]
fn alignment_dropped_from_what_is_nested() {
    for message in [
        "`left_at` (owner) and `timer` (nested) of `Entry` share a cache line",
        "`timer` of `Entry` is laid out itself, but does not begin and end with a cache line here",
        "`timer` of `Vcpu` is laid out itself, but does not begin and end with a cache line here",
    ] {
        caught("#[repr(C, align(128))]", "#[repr(C)]", message);
    }
}

#[test]
fn alignment_to_half_a_line() {
    caught("align(128)", "align(64)", "`left_at` (owner) and `timer` (nested) of `Entry` share a cache line");
}

#[test]
fn packed_struct() {
    caught("#[lay_out(pinned)]", "#[lay_out(pinned)]\n    #[repr(packed)]", "packed");
}

#[test]
fn laid_out_struct_called_something_else() {
    let from = "#[layout(nested)]\n        pub timer: Timer,\n    }\n\n    /// Known";
    let with = |class: &str| from.replacen("nested", class, 1);
    let to_nested = "`timer` of `Vcpu` is a struct that is laid out itself: is it `nested`?";
    caught(from, &with("cold"), to_nested);
    caught(from, &with("frozen"), to_nested);
    caught(from, &with("owner"), "`Timer` cannot be of class `owner`");
}

#[test]
fn something_else_called_a_laid_out_struct() {
    caught("#[layout(cold)]\n", "#[layout(nested)]\n", "the trait bound `u64: VcpuLayout` is not satisfied");
}

#[test]
fn field_without_a_class() {
    caught("#[layout(cold)]\n", "\n", "`name` needs one class: who writes it?");
}

#[test]
fn field_written_by_who_does_not_own_it() {
    caught("/// Laid", "pub fn f(v: &Vcpu) { v.exits.add(1) }\n/// Laid", "argument #1 of type `Proof<'_>` is missing");
    caught("/// Laid", "pub fn f(v: &Vcpu) { v.registers[0] = 1 }\n/// Laid", "cannot index into a value of type");
    caught("/// Laid", "pub fn f(v: &Vcpu) { v.id = 1 }\n/// Laid", "cannot assign to `v.id`");
}

#[test]
fn proof_kept_longer_than_the_vcpu_is_run() {
    let keep = "pub fn f(v: &Vcpu) {
        let mut running = v.registers.run();
        let (_, proof) = running.split();
        drop(running);
        v.exits.add(proof, 1);
    }
    /// Laid";
    caught("/// Laid", keep, "cannot move out of `running` because it is borrowed");
}
