//! Passes the commit of the build to the tool, for the figures that it reports.

use std::path::Path;
use std::process::Command;

fn main() {
    // Git writes down here whenever the commit that is checked out becomes another one.
    let log = Path::new("../.git/logs/HEAD");
    if log.exists() {
        println!("cargo::rerun-if-changed={}", log.display());
    } else {
        println!("cargo::rerun-if-changed=build.rs");
    }
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let commit = commit.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    let commit = commit.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_string());
    println!("cargo::rustc-env=DUNLIN_COMMIT={}", commit.unwrap_or_else(|| "unknown".to_string()));
}
