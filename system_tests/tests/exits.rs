//! No exit has become longer: instructions per exit against docs/exits.toml, counted exactly.
//!
//! The figures do not depend on what else the computer does. When one has grown by more than 2 % and is meant to,
//! `dunlin bench exits --write docs/exits.toml` renews the file.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn instructions_per_exit_are_repeatable_within_their_targets_and_have_not_grown() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is in a workspace");
    let golden = workspace.join("docs/exits.toml");
    let output = Command::new(tool(workspace))
        .args(["bench", "exits", "--check"])
        .arg(golden)
        .output()
        .expect("the tool can be started: run `make build` first");
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The tool: `$DUNLIN`, else where `make build` leaves it.
fn tool(workspace: &Path) -> PathBuf {
    let target = || std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
    std::env::var_os("DUNLIN").map_or_else(|| target().join("release/dunlin"), PathBuf::from)
}
