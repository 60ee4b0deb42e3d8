//! `dunlin image`: a bootable file (CD or USB stick) with GRUB, the hypervisor and its VMs.
//!
//! GRUB's own tool makes the file, on a PC for BIOS and UEFI at once. This module provides its contents: the
//! hypervisor, the payload, and GRUB's menu. A PC gets the payload as a module, an Arm machine as the initrd.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::args::{ImageArgs, RunArgs};
use crate::assets::Assets;
use crate::config::{Arch, Config};
use crate::exec::FIXED_SCRIPT;
use crate::failure::Failure;
use crate::payload::{self, Start};
use crate::progress::Progress;
use crate::quantity::show_size;

/// GRUB's tool.
const TOOL: &str = "grub-mkrescue";
const INSTALL: &str = "install it: 'apt install grub-common grub-pc-bin grub-efi-amd64-bin xorriso mtools' (Debian, Ubuntu); 'make image' installs it";
const INSTALL_FOR_ARM: &str =
    "install it: 'apt install grub-common xorriso mtools' (Debian, Ubuntu); 'make image ARCH=aarch64' installs it";

/// Makes the image that `args` ask for.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    // All that can be wrong is found before anything is written.
    let config = Config::load(&RunArgs {
        file: args.file.clone(),
        vcpus: args.vcpus,
        memory: args.memory.clone(),
        arch: args.arch,
        ..RunArgs::default()
    })?;
    let config = tell_agents(config);
    let arch = config.host.arch.value;
    let assets = Assets::locate().of(arch);
    let hypervisor = assets.hypervisor()?;
    // Without a script, the guest starts a shell.
    let script = (!args.shell).then(|| args.exec.as_deref().unwrap_or(FIXED_SCRIPT));
    let payload = payload::pack(&config, &assets, script, Start::Elsewhere)?;
    let mut payloads = vec![payload.bytes];
    let mut further = Vec::new();
    for file in &args.also {
        let options = RunArgs { file: Some(file.clone()), arch: args.arch, ..RunArgs::default() };
        let config = tell_agents(Config::load(&options)?);
        if config.host.arch.value != arch {
            let what = format!("'{}', but the image is for {}", config.host.arch.value.name(), arch.name());
            return Err(config.host.arch.place.bad(what).help("make an image for each architecture"));
        }
        payloads.push(payload::pack(&config, &assets, None, Start::Elsewhere)?.bytes);
        further.push(names(&config));
    }

    let progress = Progress::new();
    let contents = Contents { hypervisor: &hypervisor, payloads, menu: menu(arch, &names(&config), &further) };
    write(arch, &assets, &contents, &args.output, &progress)?;
    let machine = match arch {
        Arch::X86_64 => "a PC",
        Arch::Aarch64 => "a machine with UEFI and a device tree",
    };
    progress.say(&format!("{}: boot {machine} from it (see `dunlin image --help`)", args.output.display()));
    Ok(())
}

/// The names of the VMs, for people.
fn names(config: &Config) -> String {
    config.vms.iter().map(|vm| vm.name.value.as_str()).collect::<Vec<_>>().join(", ")
}

/// The contents of an image besides GRUB.
pub(crate) struct Contents<'a> {
    pub(crate) hypervisor: &'a Path,
    /// The file `payload`, then `payload-2` and so on.
    pub(crate) payloads: Vec<Vec<u8>>,
    /// GRUB's configuration.
    pub(crate) menu: String,
}

/// Writes an image.
pub(crate) fn write(
    arch: Arch,
    assets: &Assets,
    contents: &Contents<'_>,
    output: &Path,
    progress: &Progress,
) -> Result<(), Failure> {
    let failed = |what: &Path, error: io::Error| Failure::failed(format!("{}: {error}", what.display()));
    let directory = tempfile::Builder::new()
        .prefix("dunlin-image-")
        .tempdir()
        .map_err(|error| failed(Path::new("no directory for the image"), error))?;
    let boot = directory.path().join("boot");
    let grub = boot.join("grub");
    std::fs::create_dir_all(&grub).map_err(|error| failed(&grub, error))?;
    std::fs::copy(contents.hypervisor, boot.join("dunlin")).map_err(|error| failed(contents.hypervisor, error))?;
    let payloads =
        contents.payloads.iter().zip(1..).map(|(bytes, number)| (boot.join(payload_name(number)), &bytes[..]));
    for (path, bytes) in payloads.chain([(grub.join("grub.cfg"), contents.menu.as_bytes())]) {
        std::fs::write(&path, bytes).map_err(|error| failed(&path, error))?;
    }
    // Without a directory, the tool takes all installed platforms of GRUB.
    let (platforms, named, install) = match arch {
        Arch::X86_64 => ("BIOS and UEFI", None, INSTALL),
        Arch::Aarch64 => ("UEFI", Some(assets.grub()?), INSTALL_FOR_ARM),
    };
    let bytes = contents.payloads.iter().map(Vec::len).sum::<usize>() as u64;
    progress.say(&format!("{TOOL}: GRUB for {platforms}, the hypervisor, and {} of VMs", show_size(bytes)));

    // The tool leaves half a file when it fails, so it gets a name of its own until all is well.
    let unfinished = directory.path().join("image");
    let mut tool = Command::new(TOOL);
    if let Some(platform) = named {
        tool.arg("-d").arg(platform);
    }
    let made = tool.arg("-o").arg(&unfinished).arg(boot.parent().unwrap_or(&boot)).stdin(Stdio::null()).output();
    let made = made.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::bad_input(format!("{TOOL} is missing")).help(install),
        _ => failed(Path::new(TOOL), error),
    })?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr);
        let reason = said.lines().rev().find(|line| line.contains("error")).unwrap_or("it gives no reason");
        return Err(Failure::failed(format!("{TOOL} ({}): {reason}", made.status)).help(install));
    }
    std::fs::copy(&unfinished, output).map_err(|error| failed(output, error))?;
    Ok(())
}

/// The name of a payload's file.
fn payload_name(number: usize) -> String {
    if number == 1 { "payload".to_string() } else { format!("payload-{number}") }
}

/// GRUB's configuration for an image that boots at once and prints nothing on the serial line.
pub(crate) const MENU_AT_ONCE: &str = "set timeout=0\n\
    menuentry Dunlin {\n    multiboot2 /boot/dunlin log=info\n    module2 /boot/payload payload\n}\n";

/// Lets our agents write to the console, because nothing reads the agent line of a host that a boot loader starts.
/// Kernels without an agent, such as the measuring guest, may not know the word.
pub(crate) fn tell_agents(mut config: Config) -> Config {
    let console = config.host.arch.value.console();
    for vm in config.vms.iter_mut().filter(|vm| payload::has_agent(vm)) {
        vm.cmdline.value += &format!(" dunlin.agent={console}");
    }
    config
}

/// GRUB's menu for these VMs, and with an entry for each of the `further` hosts. VM names contain no quotes; the
/// configuration checks this.
fn menu(arch: Arch, vms: &str, further: &[String]) -> String {
    // The consoles of a PC are GRUB's to set up, an Arm machine's are the firmware's.
    let (consoles, [load, pass]) = match arch {
        Arch::X86_64 => (
            "insmod all_video\n\
             if serial --unit=0 --speed=115200; then\n    terminal_input console serial\n    terminal_output console serial\nfi\n",
            ["multiboot2 /boot/dunlin", "module2 /boot/"],
        ),
        Arch::Aarch64 => ("", ["linux /boot/dunlin", "initrd /boot/"]),
    };
    let entry = |title: &str, options: &str, payload: usize| {
        let (file, name) = (payload_name(payload), if arch == Arch::X86_64 { " payload" } else { "" });
        format!("menuentry \"{title}\" {{\n    {load} {options}\n    {pass}{file}{name}\n}}\n")
    };
    let mut text = format!("{consoles}set timeout=3\nset default=0\n");
    text += &entry(&format!("Dunlin: {vms}"), "log=info", 1);
    for (names, number) in further.iter().zip(2..) {
        text += &entry(&format!("Dunlin: {names}"), "log=info", number);
    }
    for (on, title, options) in [
        (true, format!("Dunlin: {vms}, with all messages"), "log=debug"),
        // Only a PC shows its report on a screen, which a reset would clear.
        (arch == Arch::X86_64, format!("Dunlin: {vms}, reset on failure"), "log=info panic=reset"),
        // For machines with a slow screen, or without one.
        (arch == Arch::X86_64, format!("Dunlin: {vms}, on the serial port only"), "log=info console=serial"),
        (true, String::from("Dunlin: check what this machine has for VMs, start none"), "log=info check"),
    ] {
        if on {
            text += &entry(&title, options, 1);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{Arch, menu, tell_agents};
    use crate::args::RunArgs;
    use crate::config::Config;

    #[test]
    fn only_vms_with_our_agent_are_told_where_it_writes() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        let text = "[[vm]]\nname = \"a\"\ncmdline = \"quiet\"\n\
                    [[vm]]\nname = \"b\"\nkernel = \"measuring-guest\"\ncmdline = \"cpus=1\"\n\
                    [[vm]]\nname = \"c\"\ninitrd = \"none\"\ncmdline = \"quiet\"\n";
        file.write_all(text.as_bytes()).expect("it can be written");
        for (arch, agent) in [(Arch::X86_64, "quiet dunlin.agent=ttyS0"), (Arch::Aarch64, "quiet dunlin.agent=ttyAMA0")]
        {
            let args = RunArgs { file: Some(file.path().to_path_buf()), arch: Some(arch), ..RunArgs::default() };
            let config = tell_agents(Config::load(&args).expect("the file is right"));
            let cmdlines: Vec<&str> = config.vms.iter().map(|vm| vm.cmdline.value.as_str()).collect();
            assert_eq!(cmdlines, [agent, "cpus=1", "quiet"]);
        }
    }

    #[test]
    fn each_entry_of_the_menu_starts_the_hypervisor_with_the_payload() {
        for (arch, count, load, pass) in [
            (Arch::X86_64, 5, "multiboot2 /boot/dunlin log=", "module2 /boot/payload payload\n"),
            (Arch::Aarch64, 3, "linux /boot/dunlin log=", "initrd /boot/payload\n"),
        ] {
            let text = menu(arch, "one, two", &[]);
            let entries: Vec<&str> = text.split("menuentry").skip(1).collect();
            assert_eq!(entries.len(), count);
            assert!(entries[..count - 1].iter().all(|entry| entry.starts_with(" \"Dunlin: one, two")), "{text}");
            for entry in entries {
                assert!(entry.contains(load), "{entry}");
                assert!(entry.contains(pass), "{entry}");
            }
        }
    }

    #[test]
    fn further_hosts_follow_the_first_entry_with_payloads_of_their_own() {
        for (arch, pass) in
            [(Arch::X86_64, "module2 /boot/payload-2 payload\n"), (Arch::Aarch64, "initrd /boot/payload-2\n")]
        {
            let text = menu(arch, "one", &["parent".to_string(), "a, b".to_string()]);
            let entries: Vec<&str> = text.split("menuentry").skip(1).collect();
            assert!(entries[1].starts_with(" \"Dunlin: parent\"") && entries[1].contains(pass), "{text}");
            assert!(entries[2].starts_with(" \"Dunlin: a, b\"") && entries[2].contains("/boot/payload-3"), "{text}");
            assert!(entries[3].starts_with(" \"Dunlin: one, with all"), "{text}");
        }
    }
}
