//! The door to libFuzzer, and to the counters that the compiler adds for it.
//!
//! Only `cargo xtask fuzz` compiles this. It says by environment variables what to do: `DUNLIN_FUZZ` has arguments for
//! libFuzzer, one a line; or `DUNLIN_FUZZ_INPUTS` names folders, one a line, and `DUNLIN_FUZZ_COVERED` a file for what
//! their inputs reach.

#![expect(unsafe_code, reason = "libFuzzer is C++, and the counters are sections of the program")]

use std::ffi::{CString, c_char, c_int};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::OnceLock;
use std::{env, fs, ptr, slice};

// Brings the library, whose functions are declared below.
use libfuzzer_sys as _;

type Body = fn(&[u8]);
static BODY: OnceLock<Body> = OnceLock::new();

/// Lets libFuzzer call `body`, or notes what inputs cover. Returns false if neither is wanted.
pub(crate) fn run(body: Body) -> bool {
    if let Some(file) = env::var_os("DUNLIN_FUZZ_COVERED") {
        let folders = env::var("DUNLIN_FUZZ_INPUTS").unwrap_or_default();
        let mut inputs: Vec<_> = folders.lines().flat_map(|folder| crate::files(Path::new(folder))).collect();
        // Those of the corpus come first, then the short ones.
        let corpus = env::var("DUNLIN_FUZZ_CORPUS").unwrap_or_default();
        inputs.sort_by_key(|(path, bytes)| (!path.starts_with(&corpus), bytes.len()));
        let mut text = String::new();
        let mut before = 0;
        for (path, bytes) in inputs {
            body(&bytes);
            let reached = places().filter(|(_, is_reached)| *is_reached).count();
            if reached > before {
                let _ = writeln!(text, "adds {} {}", reached - before, path.display());
                before = reached;
            }
        }
        let start = (&raw const __start___sancov_pcs).addr();
        let _ = writeln!(text, "start {start:#x}");
        for (place, is_reached) in places() {
            let _ = writeln!(text, "{} {place:#x}", if is_reached { "reached" } else { "missed" });
        }
        fs::write(file, text).expect("the file can be written");
        return true;
    }
    let Ok(arguments) = env::var("DUNLIN_FUZZ") else { return false };
    BODY.set(body).expect("one target is run in a process");
    let arguments = std::iter::once("target").chain(arguments.lines());
    let words: Vec<CString> = arguments.map(|word| CString::new(word).expect("no zero in it")).collect();
    let mut pointers: Vec<*mut c_char> = words.iter().map(|word| word.as_ptr().cast_mut()).collect();
    pointers.push(ptr::null_mut());
    let mut count = c_int::try_from(words.len()).expect("few arguments");
    let mut start = pointers.as_mut_ptr();
    // SAFETY: the count and the pointers are those of `words`, which live longer than the call; a null ends the list.
    let status = unsafe { LLVMFuzzerRunDriver(&raw mut count, &raw mut start, call) };
    assert_eq!(status, 0, "libFuzzer has failed");
    true
}

/// What libFuzzer calls. A panic does not leave it, but ends the process, which libFuzzer notes as a finding.
extern "C" fn call(bytes: *const u8, count: usize) -> c_int {
    let bytes = if count == 0 {
        &[][..]
    } else {
        // SAFETY: libFuzzer passes an array of this length, which nobody changes during the call.
        unsafe { slice::from_raw_parts(bytes, count) }
    };
    BODY.get().expect("set before")(bytes);
    0
}

/// All places of the program that have a counter: the address, and whether it is not zero.
fn places() -> impl Iterator<Item = (usize, bool)> {
    let (counters, places) = (&raw const __start___sancov_cntrs, &raw const __start___sancov_pcs);
    let count = (&raw const __stop___sancov_cntrs).addr() - counters.addr();
    (0..count).map(move |number| {
        // SAFETY: the section has `count` counters of a byte.
        let counter = unsafe { counters.add(number).read_volatile() };
        // SAFETY: the compiler makes an entry, an address and flags, for each counter, in the same order.
        let place = unsafe { places.add(number).read() };
        (place[0], counter != 0)
    })
}

// SAFETY: as FuzzerInterface.h declares it; the sections are as LLVM's documentation of SanitizerCoverage says.
unsafe extern "C" {
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        arguments: *mut *mut *mut c_char,
        call: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
    static __start___sancov_cntrs: u8;
    static __stop___sancov_cntrs: u8;
    static __start___sancov_pcs: [usize; 2];
}
