//! Boot modules besides the payload: kernels and initrds that the boot loader reads from the machine's own disk.
//!
//! A VM of the payload names such a module ([`File::Module`]). The name is the first word of the module's command line,
//! and what follows a kernel's name goes to that kernel. A module's memory goes to the pool when no VM needs it any
//! more.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use abi::control::About;
use abi::payload::{File, Payload, VmConfig};

use crate::arch::ram::LoadedFile;
use crate::vm::creation::NotCreated;
use crate::vm::spec::Spec;

/// The modules that VMs still need.
#[derive(Debug)]
pub(crate) struct Modules(Vec<Module>);

#[derive(Debug)]
struct Module {
    name: &'static str,
    /// What follows the name on the command line.
    arguments: &'static str,
    file: LoadedFile,
}

/// The contents of a VM's files.
pub(crate) struct Files<'a> {
    /// The VM, with the command line as the kernel gets it.
    config: VmConfig,
    kernel: &'a [u8],
    initrd: Option<&'a [u8]>,
}

impl Files<'_> {
    /// What the VM is made from.
    pub(crate) const fn spec(&self) -> Spec<'_> {
        Spec { config: &self.config, kernel: self.kernel, initrd: self.initrd }
    }
}

/// Each with its command line.
impl FromIterator<(&'static str, LoadedFile)> for Modules {
    fn from_iter<I: IntoIterator<Item = (&'static str, LoadedFile)>>(files: I) -> Self {
        let module = |(command_line, file): (&'static str, LoadedFile)| {
            let line = command_line.trim_ascii();
            let (name, arguments) = line.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((line, ""));
            Module { name, arguments: arguments.trim_ascii_start(), file }
        };
        Self(files.into_iter().map(module).collect())
    }
}

impl Modules {
    /// Gives the memory of all modules that none of these VMs names to the pool, and returns their names.
    pub(crate) fn keep_for(&mut self, vms: &[VmConfig]) -> Vec<&'static str> {
        let names = |vm: &VmConfig, module: &Module| {
            core::iter::once(&vm.kernel)
                .chain(&vm.initrd)
                .any(|file| matches!(file, File::Module(name) if name == module.name))
        };
        self.0.extract_if(.., |module| !vms.iter().any(|vm| names(vm, module))).map(|module| module.name).collect()
    }

    /// The files of a VM of the payload.
    ///
    /// # Errors
    /// There is no module of a name that the VM has, or several.
    pub(crate) fn files_of<'a>(&'a self, vm: &VmConfig, payload: &Payload<'a>) -> Result<Files<'a>, NotCreated> {
        let mut config = vm.clone();
        let kernel = match &vm.kernel {
            File::Blob(blob) => payload.blob(blob),
            File::Module(name) => {
                let module = self.find("kernel", name)?;
                if !config.cmdline.is_empty() && !module.arguments.is_empty() {
                    config.cmdline.push(' ');
                }
                config.cmdline += module.arguments;
                module.file.bytes()
            }
        };
        let initrd = match &vm.initrd {
            None => None,
            Some(File::Blob(blob)) => Some(payload.blob(blob)),
            Some(File::Module(name)) => {
                let module = self.find("initrd", name)?;
                if !module.arguments.is_empty() {
                    log::warn!("{}: '{}' after the initrd's name is not used", vm.name, module.arguments);
                }
                Some(module.file.bytes())
            }
        };
        Ok(Files { config, kernel, initrd })
    }

    /// The one module of this name.
    fn find(&self, what: &str, name: &str) -> Result<&Module, NotCreated> {
        let mut found = self.0.iter().filter(|module| module.name == name);
        let why = match (found.next(), found.next()) {
            (Some(module), None) => return Ok(module),
            (Some(_), Some(_)) => {
                format!("{what}: several boot modules are called '{name}'; give each a name of its own")
            }
            (None, _) => format!(
                "{what}: no boot module is called '{name}'; loaded are {}. Add `module2 --nounzip FILE {name}` to GRUB's entry",
                self.names()
            ),
        };
        Err(NotCreated::new(About::Kernel, why))
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|module| module.name).collect();
        if names.is_empty() { String::from("none") } else { names.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use abi::payload::{Blob, Builder, File, Payload, VmConfig};

    use super::Modules;
    use crate::arch::fake::machine::loaded_file;
    use crate::tests::config;

    fn module(name: &str) -> File {
        File::Module(String::from(name))
    }

    /// A VM with a kernel and an initrd from these modules.
    fn vm(kernel: &str, initrd: Option<&str>, cmdline: &str) -> VmConfig {
        let cmdline = String::from(cmdline);
        VmConfig { kernel: module(kernel), initrd: initrd.map(module), cmdline, ..config("vm", 1) }
    }

    /// Modules with these command lines. Each contains its own command line.
    fn modules(command_lines: &[&'static str]) -> Modules {
        command_lines.iter().map(|line| (*line, loaded_file(line.as_bytes()))).collect()
    }

    /// Kernel, initrd and command line of a VM with these modules, or why there is none.
    fn files(modules: &Modules, vm: &VmConfig) -> Result<(String, Option<String>, String), String> {
        let bytes = Builder::new(true).finish().expect("encodes");
        let payload = Payload::read(&bytes).expect("reads");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let files = modules.files_of(vm, &payload).map_err(|error| error.why)?;
        let spec = files.spec();
        Ok((text(spec.kernel), spec.initrd.map(text), spec.config.cmdline.clone()))
    }

    #[test]
    fn kernel_gets_its_own_command_line_and_then_what_the_module_has() {
        let modules = modules(&["kernel  root=/dev/sda1 ro", "initrd"]);
        for (cmdline, expected) in [("", "root=/dev/sda1 ro"), ("quiet", "quiet root=/dev/sda1 ro")] {
            let (kernel, initrd, cmdline) = files(&modules, &vm("kernel", Some("initrd"), cmdline)).expect("are there");
            assert_eq!((kernel.as_str(), initrd.as_deref()), ("kernel  root=/dev/sda1 ro", Some("initrd")));
            assert_eq!(cmdline, expected);
        }
        let bare = self::modules(&[" kernel "]);
        assert_eq!(files(&bare, &vm("kernel", None, "quiet")).map(|files| files.2), Ok(String::from("quiet")));
    }

    #[test]
    fn module_that_is_missing_or_there_twice_is_named() {
        let modules = modules(&["kernel", "initrd a", "initrd b", ""]);
        let why = |vm: VmConfig| files(&modules, &vm).expect_err("something is wrong");
        let text = why(vm("vmlinuz", None, ""));
        assert!(text.contains("kernel: no boot module is called 'vmlinuz'"), "{text}");
        assert!(text.contains("loaded are kernel, initrd, initrd, "), "{text}");
        let text = why(vm("kernel", Some("initrd"), ""));
        assert!(text.contains("initrd: several boot modules are called 'initrd'"), "{text}");
        let text = files(&self::modules(&[]), &vm("kernel", None, "")).expect_err("no module is there");
        assert!(text.contains("loaded are none. Add `module2 --nounzip FILE kernel`"), "{text}");
    }

    #[test]
    fn modules_stay_until_the_last_vm_that_names_them() {
        let mut modules = modules(&["kernel", "initrd-a", "microcode", "initrd-b"]);
        let vms = [
            vm("kernel", Some("initrd-a"), ""),
            VmConfig { kernel: File::Blob(Blob { offset: 0, bytes: 0 }), ..vm("", Some("initrd-b"), "") },
            vm("kernel", None, ""),
        ];
        assert_eq!(modules.keep_for(&vms), ["microcode"]);
        assert_eq!(modules.keep_for(&vms[1..]), ["initrd-a"]);
        assert_eq!(modules.keep_for(&vms[2..]), ["initrd-b"]);
        assert!(files(&modules, &vms[2]).is_ok());
        assert_eq!(modules.keep_for(&[]), ["kernel"]);
    }
}
