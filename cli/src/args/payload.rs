//! `dunlin payload`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::setting::setting;
use crate::config::Arch;

pub(crate) const HELP: &str = "\
A payload is one file with the VMs that a host starts, and with their files. A boot loader passes it to the
hypervisor; `dunlin run` and `dunlin image` make one by themselves. This command is for a machine whose own
GRUB starts the hypervisor. There, the kernel or the initrd of a VM may stay outside of the payload: with
kernel = \"module\" and initrd = \"module\" the VM gets the files that GRUB's entry names so:

  menuentry \"Dunlin\" {
      multiboot2 /boot/dunlin/hypervisor log=info
      module2 /boot/dunlin/parent.payload payload
      module2 /boot/vmlinuz-7.3 kernel root=/dev/sda1 ro
      module2 --nounzip /boot/initrd.img-7.3 initrd
  }

The first word after the file is the module's name. What follows a kernel's name goes to that kernel, after
the VM's own command line. Without --nounzip GRUB would unpack the first archive of an initrd and lose others.
\"module:NAME\" names a module otherwise, for several VMs with such files.

Each VM with Dunlin's initrd has a shell on its console.

Examples:
  dunlin payload /etc/dunlin/parent.toml -o /boot/dunlin/parent.payload
  dunlin payload vms/two.toml -o two.payload";

/// `dunlin payload`.
#[derive(Debug, ClapArgs)]
pub(crate) struct PayloadArgs {
    /// File that describes the VMs; its table `host` has no effect, but for `arch`
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,
    /// File for the payload
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", value_parser = setting::<Arch>())]
    pub(crate) arch: Option<Arch>,
}
