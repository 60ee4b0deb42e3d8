//! `dunlin check` on a directory: its statuses, and its two forms of output.

use serde_json::Value;

use crate::rig::Rig;

#[test]
fn machine_that_tells_nothing_is_not_good() {
    let rig = Rig::new();
    let output = rig.dunlin(&["check", "--root", "."]).output().expect("runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("Whether Dunlin can run on this machine is not known. Unknown: architecture, "), "{text}");
    assert!(text.contains("\nnested paging     unknown  "), "{text}");

    let output = rig.dunlin(&["check", "--root", ".", "--json"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).expect("is one object");
    let items = json["items"].as_array().expect("is a list");
    assert!(items.iter().all(|item| item["name"].is_string() && item["state"] == "unknown"), "{json}");
}

#[test]
fn root_that_is_missing_is_bad_input() {
    let output = Rig::new().dunlin(&["check", "--root", "nowhere"]).output().expect("runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("option '--root': nowhere: No such file") && text.contains("\nhelp: "), "{text}");
    assert!(output.stdout.is_empty());
}
