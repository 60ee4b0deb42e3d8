//! `dunlin check`: its options.

use std::path::PathBuf;

use clap::Args as ClapArgs;

pub(super) const HELP: &str = "\
Run it in the Linux of a machine on which you want to start Dunlin. It only reads files, and
changes nothing. It works for every user; root sees more. The first line is the result. Then comes
a line for each item, with one of these states:

  ok       it is there
  missing  it is needed and not there; the line ends with what to do
  unknown  Linux does not tell; the line says who might
  note     it is not needed, but you may want to know it

Needed to start Dunlin: a processor of AMD with SVM that the firmware has not locked, nested paging,
XSAVE, memory, ACPI's list of processors, a clock with a known rate, and Secure Boot off. AArch64:
EL2, a GICv3 and a device tree. A parent VM also needs a kernel with CONFIG_MSHV_ROOT, of this
machine or of `make parent` (docs/parent.md).

The image of `dunlin image` has a menu entry that checks the machine once more, from the hypervisor.

Exit statuses:
  0    everything needed is there
  1    something needed is missing, or it is not known whether it is there
  2    invalid input

Examples:
  dunlin check
  sudo modprobe msr && sudo dunlin check        also whether the firmware has locked SVM off
  dunlin check --json | jq -r '.items[] | select(.state == \"missing\") | .remedy'
  dunlin check --root /mnt                      the kernels and GRUB of a mounted image
  dunlin check --kernels                        only the kernels that can run in a parent VM, for scripts";

/// `dunlin check`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct CheckArgs {
    /// Directory with the files of the machine: `/proc`, `/sys`, `/boot`, `/dev`, `/etc`
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    /// Print JSON: one object with the verdict and a list of items
    #[arg(long)]
    pub(crate) json: bool,
    /// Print only the installed kernels that can run in a parent VM: a release a line
    #[arg(long, conflicts_with = "json")]
    pub(crate) kernels: bool,
}
