//! No exit has become longer: instructions per exit against docs/exits.toml and docs/exits-aarch64.toml, counted exactly.
//!
//! The figures do not depend on what else the computer does. When one has grown by more than 2 % and is meant to,
//! `dunlin bench exits --write` renews the file.

use system_tests::{dunlin, each_machine};

each_machine! {
    fn instructions_per_exit_are_repeatable_within_their_targets_and_have_not_grown(machine) {
        let golden = machine.document("exits", "toml");
        let run = dunlin(&["bench", "exits", "--arch", machine.name(), "--check", &golden]);
        assert_eq!(run.status, 0, "{run:#?}");
    }
}
