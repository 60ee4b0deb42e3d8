//! No exit has become longer: instructions per exit, counted exactly, against docs/exits.toml and
//! docs/exits-aarch64.toml.
//!
//! The figures do not depend on other work of the computer. If one has grown by more than 2 % on purpose,
//! `dunlin bench exits --write` updates the file.

use system_tests::{dunlin, each_machine};

each_machine! {
    fn instructions_per_exit_are_repeatable_within_their_targets_and_have_not_grown(machine) {
        let golden = machine.document("exits", "toml");
        let run = dunlin(&["bench", "exits", "--arch", machine.name(), "--check", &golden]);
        assert_eq!(run.status, 0, "{run:#?}");
    }
}
