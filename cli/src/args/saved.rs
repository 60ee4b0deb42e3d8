//! `dunlin save` and `dunlin restore`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::HostArgs;

pub(super) const SAVE_HELP: &str = "\
The VM stands still while it is saved, and its time does too: a guest notices nothing but its real-time
clock. Afterwards the VM ends, and its memory is free; with --stay it goes on. If the save fails or is
interrupted, the VM goes on, and no file is left.

The file has the VM's memory without pages of zeros, its registers and its devices. It has whatever
secrets the guest has, so only you can read it. A VM with devices of the machine (key `devices`), and a
parent, cannot be saved. docs/saving.md explains the rest.

Examples:
  dunlin save guest guest.vm          before a restart of the host; then `dunlin restore guest.vm`
  dunlin save guest monday.vm --stay  a copy, while the VM goes on afterwards
  dunlin save guest guest.vm --json   sizes and time, for scripts";

pub(super) const RESTORE_HELP: &str = "\
The VM goes on where it was, as if no time had passed. The host needs memory for it, and a processor
with all features that the guest was told of. A file that is damaged, cut short, of another version of
Dunlin or of another architecture is refused before anything is created. The file stays as it is: it
can be restored again, also several times at once, with other names. Such VMs are the same machine, with
the same addresses and secrets.

Examples:
  dunlin restore guest.vm
  dunlin restore guest.vm --name second";

/// `dunlin save`.
#[derive(Debug, ClapArgs)]
pub(crate) struct SaveArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// The VM (name or number)
    #[arg(value_name = "VM")]
    pub(crate) vm: String,
    /// File for it
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Let the VM go on afterwards
    #[arg(long)]
    pub(crate) stay: bool,
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) replace: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `dunlin restore`.
#[derive(Debug, ClapArgs)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// File of a saved VM
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Another name for the VM [default: that of the saved one]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
