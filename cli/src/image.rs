//! `dunlin image`: the hypervisor, its VMs and GRUB in one file that a PC starts from, as a CD or from a stick.
//!
//! GRUB's own tool makes the file, for BIOS and UEFI at once. Here is what it is made of: the hypervisor, the payload as a module,
//! and GRUB's menu.

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

/// GRUB's tool, and how to come by it.
const TOOL: &str = "grub-mkrescue";
const INSTALL: &str = "install it: 'apt install grub-common grub-pc-bin grub-efi-amd64-bin xorriso mtools' (Debian, Ubuntu); 'make image' does";

/// The kernel's command line says where our agent writes: to the console, for nobody reads its own line.
const AGENT_ON_CONSOLE: &str = " dunlin.agent=ttyS0";

/// Makes the image that `args` ask for.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    // All that can be wrong is found before anything is written.
    let config = Config::load(&RunArgs {
        file: args.file.clone(),
        vcpus: args.vcpus,
        memory: args.memory.clone(),
        ..RunArgs::default()
    })?;
    let config = tell_agents(config);
    let arch = &config.host.arch;
    if arch.value != Arch::X86_64 {
        return Err(arch.place.bad("images are made for x86_64 only, so far"));
    }
    let assets = Assets::locate().of(arch.value);
    let hypervisor = assets.hypervisor()?;
    // Without a script there is a shell.
    let script = (!args.shell).then(|| args.exec.as_deref().unwrap_or(FIXED_SCRIPT));
    let payload = payload::pack(&config, &assets, script, Start::Elsewhere)?;

    let progress = Progress::new();
    let failed = |what: &Path, error: io::Error| Failure::failed(format!("{}: {error}", what.display()));
    let directory = tempfile::Builder::new()
        .prefix("dunlin-image-")
        .tempdir()
        .map_err(|error| failed(Path::new("no directory for the image"), error))?;
    let boot = directory.path().join("boot");
    let grub = boot.join("grub");
    std::fs::create_dir_all(&grub).map_err(|error| failed(&grub, error))?;
    std::fs::copy(&hypervisor, boot.join("dunlin")).map_err(|error| failed(&hypervisor, error))?;
    let names: Vec<&str> = config.vms.iter().map(|vm| vm.name.value.as_str()).collect();
    for (path, bytes) in [(boot.join("payload"), payload.bytes), (grub.join("grub.cfg"), menu(&names).into_bytes())] {
        std::fs::write(&path, bytes).map_err(|error| failed(&path, error))?;
    }
    progress.say(&format!("{TOOL}: GRUB for BIOS and UEFI, the hypervisor, and {} of VMs", {
        let bytes = std::fs::metadata(boot.join("payload")).map_or(0, |file| file.len());
        show_size(bytes)
    }));

    // The tool leaves half a file when it fails, so it gets a name of its own until all is well.
    let unfinished = directory.path().join("image");
    let made =
        Command::new(TOOL).arg("-o").arg(&unfinished).arg(boot.parent().unwrap_or(&boot)).stdin(Stdio::null()).output();
    let made = made.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::bad_input(format!("{TOOL} is not there")).help(INSTALL),
        _ => failed(Path::new(TOOL), error),
    })?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr);
        let reason = said.lines().rev().find(|line| line.contains("error")).unwrap_or("it does not say why");
        return Err(Failure::failed(format!("{TOOL} ({}): {reason}", made.status)).help(INSTALL));
    }
    std::fs::copy(&unfinished, &args.output).map_err(|error| failed(&args.output, error))?;
    progress.say(&format!("{}: start a PC from it (`dunlin image --help` says how)", args.output.display()));
    Ok(())
}

/// Has our agents write to the console. Kernels without one, such as the measuring guest, may not know the word.
fn tell_agents(mut config: Config) -> Config {
    for vm in config.vms.iter_mut().filter(|vm| payload::has_agent(vm)) {
        vm.cmdline.value += AGENT_ON_CONSOLE;
    }
    config
}

/// GRUB's menu. Names of VMs are words without quotes, as the file of VMs has them.
fn menu(names: &[&str]) -> String {
    let vms = names.join(", ");
    let mut text = String::from(
        "insmod all_video\n\
         if serial --unit=0 --speed=115200; then\n    terminal_input console serial\n    terminal_output console serial\nfi\n\
         set timeout=3\nset default=0\n",
    );
    for (title, options) in [
        (format!("Dunlin: {vms}"), "log=info"),
        (format!("Dunlin: {vms}, with all messages"), "log=debug"),
        (format!("Dunlin: {vms}, reset on failure"), "log=info panic=reset"),
        (String::from("Dunlin: check what this machine has for VMs, start none"), "log=info check"),
    ] {
        text += &format!(
            "menuentry \"{title}\" {{\n    multiboot2 /boot/dunlin {options}\n    module2 /boot/payload payload\n}}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{AGENT_ON_CONSOLE, menu, tell_agents};
    use crate::args::RunArgs;
    use crate::config::Config;

    #[test]
    fn only_vms_with_our_agent_are_told_where_it_writes() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        let text = "[[vm]]\nname = \"a\"\ncmdline = \"quiet\"\n\
                    [[vm]]\nname = \"b\"\nkernel = \"measuring-guest\"\ncmdline = \"cpus=1\"\n\
                    [[vm]]\nname = \"c\"\ninitrd = \"none\"\ncmdline = \"quiet\"\n";
        file.write_all(text.as_bytes()).expect("it can be written");
        let args = RunArgs { file: Some(file.path().to_path_buf()), ..RunArgs::default() };
        let config = tell_agents(Config::load(&args).expect("the file is right"));
        let cmdlines: Vec<&str> = config.vms.iter().map(|vm| vm.cmdline.value.as_str()).collect();
        assert_eq!(cmdlines, [&format!("quiet{AGENT_ON_CONSOLE}"), "cpus=1", "quiet"]);
    }

    #[test]
    fn each_entry_of_the_menu_starts_the_hypervisor_with_the_payload() {
        let text = menu(&["one", "two"]);
        let entries: Vec<&str> = text.split("menuentry").skip(1).collect();
        assert_eq!(entries.len(), 4);
        assert!(entries[..3].iter().all(|entry| entry.starts_with(" \"Dunlin: one, two")), "{text}");
        for entry in entries {
            assert!(entry.contains("multiboot2 /boot/dunlin log="), "{entry}");
            assert!(entry.contains("module2 /boot/payload payload\n"), "{entry}");
        }
    }
}
