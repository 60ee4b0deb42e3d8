//! A disk with Debian, as clouds have it: it starts by itself from a BIOS, and has its console on the serial port.
//!
//! Debian's own images for clouds cannot be packed from packages. This one has the same kernel, systemd and GRUB, and
//! neither cloud-init nor a server for SSH. The user root has no password.
//!
//! ```text
//! sector 0        GRUB's first 440 bytes, and a table with one partition
//! sector 1        the rest of GRUB, with all that it has to do
//! sector 2048     a file system with Debian
//! ```

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::artifacts::run;
use crate::mmdebstrap::{self, System};

const DEBIAN: System = System {
    suite: "trixie",
    packages: &["dbus", "initramfs-tools", "iproute2", "linux-image-cloud-amd64", "login", "systemd-sysv", "udev"],
    commands: &[
        "echo cloud > \"$1/etc/hostname\"",
        "sed -i 's/^root:[^:]*/root:/' \"$1/etc/shadow\"",
        "printf '[Match]\\nName=en* eth*\\n[Network]\\nDHCP=yes\\n' > \"$1/etc/systemd/network/80-dhcp.network\"",
        "chroot \"$1\" systemctl enable systemd-networkd",
        "rm -f \"$1/etc/machine-id\" && touch \"$1/etc/machine-id\"",
    ],
};
/// GRUB's commands. Nobody has to choose anything.
const GRUB: &str = "serial --unit=0 --speed=115200
terminal_output serial
set root=(hd0,msdos1)
linux /vmlinuz root=/dev/vda1 rw console=ttyS0 quiet
initrd /initrd.img
boot
";
const GRUB_MODULES: &[&str] = &["biosdisk", "boot", "ext2", "linux", "part_msdos", "serial", "terminal"];
/// GRUB's first sector, in the Debian package grub-pc-bin.
const BOOT: &str = "/usr/lib/grub/i386-pc/boot.img";

const SECTOR: usize = 512;
/// The partition's first sector: 1 MiB, as all tools have it.
const FIRST: u32 = 2048;
/// The file system's size in blocks of 4 KiB. Three quarters are free.
const BLOCKS: u32 = 163_840;

/// The disk in the user's cache. Makes it if it is not there.
pub(crate) fn cached() -> Result<PathBuf> {
    let recipe = format!("{}\n{GRUB}\n{}\n{BLOCKS}", DEBIAN.recipe(), GRUB_MODULES.join(" "));
    mmdebstrap::cached("parent-cloud.qcow2", &recipe, make)
}

fn make(scratch: &Path, to: &Path) -> Result<()> {
    let [system, commands, core, disk] = ["system", "commands", "core", "disk"].map(|name| scratch.join(name));
    let mut pack = Command::new("genext2fs");
    pack.args(["--block-size", "4096", "--size-in-blocks", &BLOCKS.to_string()]);
    pack.args(["--number-of-inodes", "40000", "--tarball", "-"]).arg(&system);
    DEBIAN.install(scratch, &mut pack).context("no file system (Debian packages mmdebstrap, genext2fs)")?;

    fs::write(&commands, GRUB)?;
    let mut grub = Command::new("grub-mkimage");
    grub.args(["--format", "i386-pc", "--prefix", "/boot/grub", "--config"]).arg(&commands);
    run(grub.arg("--output").arg(&core).args(GRUB_MODULES)).context("no GRUB (Debian package grub-common)")?;
    let boot = fs::read(BOOT).with_context(|| format!("cannot read {BOOT} (Debian package grub-pc-bin)"))?;
    let start = before_the_partition(&boot, &fs::read(&core)?)?;

    let mut file = File::create(&disk)?;
    file.write_all(&start)?;
    file.seek(SeekFrom::Start(u64::from(FIRST) * SECTOR as u64))?;
    std::io::copy(&mut File::open(&system)?, &mut file)?;
    let mut convert = Command::new("qemu-img");
    run(convert.args(["convert", "-c", "-O", "qcow2"]).arg(&disk).arg(to))
        .context("qemu-img cannot compress the disk (Debian package qemu-utils)")
}

/// The sectors before the partition: GRUB, around a table with one partition that may be started from.
fn before_the_partition(boot: &[u8], core: &[u8]) -> Result<Vec<u8>> {
    /// Where the table begins, and the disk's signature before it. GRUB's code ends there.
    const CODE: usize = 440;
    const TABLE: usize = 446;
    const ACTIVE: u8 = 0x80;
    const LINUX: u8 = 0x83;
    /// Cylinder, head and sector of what is not counted in these.
    const NO_CYLINDER: [u8; 3] = [0xfe, 0xff, 0xff];

    let length = FIRST as usize * SECTOR;
    ensure!(boot.len() == SECTOR, "GRUB's first sector has {} bytes", boot.len());
    ensure!(core.len() <= length - SECTOR, "GRUB with its modules is too large: {} bytes", core.len());
    let mut sectors = boot[..CODE].to_vec();
    sectors.resize(TABLE, 0);
    sectors.extend([ACTIVE]);
    sectors.extend(NO_CYLINDER);
    sectors.extend([LINUX]);
    sectors.extend(NO_CYLINDER);
    sectors.extend(FIRST.to_le_bytes());
    sectors.extend((BLOCKS * 8).to_le_bytes());
    sectors.resize(SECTOR - 2, 0);
    sectors.extend([0x55, 0xaa]);
    sectors.extend(core);
    Ok(sectors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_before_the_partition_have_grub_and_a_table() {
        let sectors = before_the_partition(&[7; SECTOR], &[9; 1000]).expect("fits");
        assert_eq!((sectors[439], sectors[440], sectors.len()), (7, 0, SECTOR + 1000));
        assert_eq!(sectors[446..462], [128, 254, 255, 255, 131, 254, 255, 255, 0, 8, 0, 0, 0, 0, 20, 0]);
        assert_eq!(sectors[510..514], [0x55, 0xaa, 9, 9]);
    }

    #[test]
    fn grub_that_would_reach_into_the_partition_is_refused() {
        assert!(before_the_partition(&[0; SECTOR], &vec![0; 2047 * SECTOR]).is_ok());
        assert!(before_the_partition(&[0; SECTOR], &vec![0; 2047 * SECTOR + 1]).is_err());
        assert!(before_the_partition(&[0; 440], &[0; 1000]).is_err());
    }
}
