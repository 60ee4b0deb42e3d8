//! A fuzz target is a function of bytes that panics when something is wrong, and a unit test that passes it to
//! [`target`].
//!
//! In `cargo test` the test replays the target's corpus (`fuzz/corpus/NAME`), then some thousand mutations of it, from
//! a fixed seed. `cargo xtask fuzz NAME` compiles the same test with counters of coverage, and lets libFuzzer call the
//! function. So a target is where the code under test is, uses the tests' models, and cannot rot.
//!
//! What libFuzzer finds is a file. Put into the corpus, it is a test from then on.

mod decisions;
mod input;
#[cfg(fuzzing)]
mod libfuzzer;
mod mutate;

use std::path::{Path, PathBuf};
use std::{env, fs, panic};

pub use decisions::Decisions;
pub use input::Input;

/// Mutations in `cargo test`; the variable `FUZZ_MUTATIONS` sets another number.
const MUTATIONS: u64 = 2_000;
/// Those of a target that takes a hundred times longer.
const MUTATIONS_OF_SLOW: u64 = 20;

/// Runs the target `name`: by the fuzzer if `cargo xtask fuzz` says so, otherwise a replay.
///
/// # Panics
///
/// Where `body` does, after the input was printed. A corpus that is missing is a panic, too.
pub fn target(name: &str, body: fn(&[u8])) {
    run(name, MUTATIONS, body);
}

/// The same for a target that takes milliseconds.
///
/// # Panics
///
/// As [`target`].
pub fn slow_target(name: &str, body: fn(&[u8])) {
    run(name, MUTATIONS_OF_SLOW, body);
}

fn run(name: &str, mutations: u64, body: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    #[cfg(fuzzing)]
    if libfuzzer::run(body) {
        return;
    }
    replay(&corpus, mutations, body);
}

/// Calls `body` with each file of the corpus, and with mutations of them.
fn replay(corpus: &Path, mutations: u64, body: fn(&[u8])) {
    let inputs = files(corpus);
    assert!(!inputs.is_empty(), "{} has no files", corpus.display());
    for (path, bytes) in &inputs {
        call(&path.display().to_string(), bytes, body);
    }

    let count = env::var("FUZZ_MUTATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(mutations);
    let mut random = fastrand::Rng::with_seed(0x5eed);
    for number in 0..count {
        let bytes = mutate::mutated(&inputs, &mut random);
        call(&format!("mutation {number}"), &bytes, body);
    }
}

/// The files of a folder, in the order of their names.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort_unstable();
    paths.into_iter().filter_map(|path| Some((path.clone(), fs::read(path).ok()?))).collect()
}

/// Calls `body`, and prints the input if it panics.
fn call(name: &str, bytes: &[u8], body: fn(&[u8])) {
    if let Err(cause) = panic::catch_unwind(|| body(bytes)) {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        eprintln!("{name} fails, {} bytes (`echo HEX | xxd -r -p >FILE` makes a file of them): {hex}", bytes.len());
        panic::resume_unwind(cause);
    }
}

#[cfg(test)]
mod tests;
