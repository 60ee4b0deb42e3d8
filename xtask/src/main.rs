//! `cargo xtask`: builds and checks Dunlin. The Makefile's targets call these commands.
//!
//! * [`artifacts`] builds all files and knows their places.
//! * [`debian`] fetches guest kernels and BusyBox from Debian packages.
//! * [`emulators`] fetches other emulators than this machine's, and [`bochs`] runs the hypervisor on one.
//! * [`initrd`] packs the guest's first RAM disk, [`workloads`] the guests' workloads, both as an [`archive`].
//! * [`parent`] builds the kernel of a parent VM, and packs its programs. [`parent_tests`] tries them.
//! * [`userland`] makes a disk for its guests, with a small Debian. [`libvirt`] makes a Debian with libvirt for the
//!   parent itself, and [`cloud_disk`] a disk for guests of that one. Both let [`mmdebstrap`] install packages.
//! * [`image_matrix`] starts the image on many PCs.
//! * [`package`] makes a Debian package, and [`package_test`] installs and removes it.
//! * [`vms_soak`] lets VMs come and go for long.
//! * [`fuzz_targets`] lets libFuzzer try the doors.
//! * [`miri`] runs tests that reach unsafe code under Miri.
//! * [`fuzz`] lets a parent VM do millions of things on the fake machine.
//! * [`ci`] runs the named steps of continuous integration.
//! * [`sbom`] tells what the programs consist of, and [`release`] makes what others get.
//! * [`reproducible`] builds the hypervisor twice.
//! * [`house`] checks the house rules, and [`deny`] the crates of third parties.

mod archive;
mod artifacts;
mod bochs;
mod ci;
mod cloud_disk;
mod debian;
mod deny;
mod emulators;
mod fuzz;
mod fuzz_targets;
mod house;
mod image_matrix;
mod initrd;
mod libvirt;
mod miri;
mod mmdebstrap;
mod other_qemu;
mod package;
mod package_test;
mod parent;
mod parent_tests;
mod release;
mod reproducible;
mod sbom;
mod userland;
mod vms_soak;
mod workloads;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use artifacts::{Arch, Places, Wanted};

const HELP: &str = "\
cargo xtask COMMAND

  build          hypervisor, measuring guest, tool, initrd and guest kernels
  assets         only initrd and guest kernels
  workloads      what guests may be given to do, with a C compiler and sources from Debian packages
  parent         kernel and programs of a parent VM; the kernel takes a quarter of an hour, once, and is kept in the user's cache
  parent-stock   the same, with a second kernel whose options are like those of Fedora's (parent/stock.config)
  parent-debian  as `parent`, and a disk for its guests: a small Debian with gcc, to put load on them
  parent-libvirt as `parent`, and a root file system for the parent: Debian with libvirt and virt-install
  parent-tests   the same as `parent`, then try in the VM what a parent can do; takes long (`parent-tests --help`)
  run [ARGS]     build, then `dunlin run ARGS` (also `--arch aarch64`)
  image [ARGS]   build, then `dunlin image ARGS`; the image is target/dunlin.iso unless ARGS say otherwise
                 (`--arch aarch64`: target/dunlin-aarch64.iso)
  package        build, then make a Debian package: target/dunlin_VERSION_amd64.deb
  deny           check licences, sources and known weaknesses of the crates of others (builds cargo-deny, once)
  sbom           write what hypervisor and tool consist of: target/dunlin/dunlin.cdx.json (CycloneDX)
  release        build all that others get, with sums and their signature (`release --help`)
  package-test   as `package`, then install, start and remove it on a Debian 12 in QEMU (`package-test --help`)
  emulators      fetch Bochs and QEMU 10 and 11 into the user's cache, for later, and say where they are
  image-matrix   build, then start the image on 72 PCs of QEMU (`image-matrix --help`)
  vms-soak       build, then create, start and destroy VMs 1000 times beside two at work (`vms-soak --help`)
  fuzz [TARGET..] let libFuzzer try the doors, a minute each, and tell coverage (`fuzz --help`)
  fuzz-calls     make ten million calls of a parent VM on the fake machine (`fuzz-calls --help`)
  fuzz-invalidations
                 take pages away from a running child ten million times there (`fuzz-invalidations --help`)
  miri [PACKAGE..]
                 run tests that reach unsafe code under Miri (`miri --help`)
  test [STEP..]  what CI runs; with names, only these steps (`test --list` shows them)
  test system --qemu 10|11|FOLDER [TEST..]
                 system tests with another QEMU: version 10 or 11 of Debian, unpacked in the user's cache, or the one in FOLDER;
                 a short list of some minutes, or the files TEST.., or `all`
  bochs [ARGS]   build, then run hypervisor and guests on Bochs, a second emulator of AMD SVM (`bochs --help`)
  bench [ARGS]   build, then `dunlin bench ARGS`; without ARGS `dunlin bench all`, results in target/bench
                 (`--qemu 10|11|FOLDER`: with another QEMU, as for `test system`)
  house          only the house checks
  figures        renew the instructions per exit in documents, from docs/exits*.toml
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.split_first() {
        Some((command, rest)) => dispatch(command, rest),
        None => Err(anyhow::anyhow!("which command?\n\n{HELP}")),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: &str, rest: &[String]) -> Result<ExitCode> {
    let places = Places::find()?;
    match command {
        "build" => artifacts::build(&places, Wanted::Everything)?,
        "assets" => artifacts::assets(&places, Wanted::Everything)?,
        "workloads" => workloads::build_all(&places)?,
        "parent" => parent::build(&places)?,
        "parent-stock" => parent::build_stock(&places)?,
        "parent-debian" => userland::build(&places)?,
        "parent-libvirt" => libvirt::build(&places)?,
        "parent-tests" => return parent_tests::command(&places, rest),
        "run" => run_default(&places, rest)?,
        "image" => image(&places, rest)?,
        "bench" => bench(&places, rest)?,
        "bochs" => return bochs::command(&places, rest),
        "package" => println!("{}", package::build(&places)?.display()),
        "deny" => deny::check(&places)?,
        "sbom" => println!("{}", sbom::write(&places)?.display()),
        "release" => return release::command(&places, rest),
        "package-test" => return package_test::command(&places, rest),
        "emulators" => emulators::unpack_all()?,
        "image-matrix" => return image_matrix::command(&places, rest),
        "vms-soak" => return vms_soak::command(&places, rest),
        "fuzz" => return fuzz_targets::command(&places, rest),
        "fuzz-calls" => return fuzz::command(&places, &fuzz::CALLS, rest),
        "fuzz-invalidations" => return fuzz::command(&places, &fuzz::INVALIDATIONS, rest),
        "miri" => return miri::command(&places, rest),
        "test" => return ci::run(&places, rest),
        "figures" => house::renew_figures(&places.root)?,
        "house" => return house::report(&places.root),
        "help" | "--help" | "-h" => print!("{HELP}"),
        other => bail!("no command `{other}`\n\n{HELP}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Which architecture `--arch` names among the arguments of `dunlin run` and `dunlin image`.
fn arch_of(rest: &[String]) -> Result<Arch> {
    let named = rest.iter().enumerate().find_map(|(at, word)| match word.strip_prefix("--arch") {
        Some("") => rest.get(at + 1).map(String::as_str),
        Some(joined) => joined.strip_prefix('='),
        None => None,
    });
    named.map_or(Ok(Arch::X86_64), Arch::named)
}

/// Builds the needs of `dunlin run` and replaces this process with it, so that terminal and exit status are its own.
fn run_default(places: &Places, rest: &[String]) -> Result<()> {
    match arch_of(rest)? {
        Arch::X86_64 => artifacts::build(places, Wanted::ForDefaultVm)?,
        Arch::Aarch64 => artifacts::build_aarch64(places, Wanted::ForDefaultVm)?,
    }
    let error = Command::new(places.tool()).arg("run").args(rest).exec();
    Err(error).with_context(|| format!("cannot run {}", places.tool().display()))
}

/// Builds the needs of an image and replaces this process with `dunlin image`.
fn image(places: &Places, rest: &[String]) -> Result<()> {
    let usual = match arch_of(rest)? {
        Arch::X86_64 => {
            artifacts::build(places, Wanted::ForDefaultVm)?;
            "dunlin.iso"
        }
        Arch::Aarch64 => {
            artifacts::build_aarch64(places, Wanted::ForDefaultVm)?;
            debian::grub(places)?;
            "dunlin-aarch64.iso"
        }
    };
    let mut command = Command::new(places.tool());
    command.arg("image");
    if !rest.iter().any(|word| word.starts_with("-o") || word.starts_with("--output")) {
        command.arg("--output").arg(places.target.join(usual));
    }
    let error = command.args(rest).exec();
    Err(error).with_context(|| format!("cannot run {}", places.tool().display()))
}

/// Whether these words of `dunlin bench` measure with a parent, whose kernel takes a quarter of an hour to build.
fn needs_parent(words: &[String]) -> bool {
    let measures = words.first().is_some_and(|word| ["machine", "move", "parent"].contains(&word.as_str()));
    measures && !words.iter().any(|word| word == "--help" || word == "-h")
}

/// Builds the needs of `dunlin bench` and replaces this process with it. Without arguments it measures everything.
fn bench(places: &Places, words: &[String]) -> Result<()> {
    let (qemu, rest) = other_qemu::named(words);
    let path = qemu.map(other_qemu::path).transpose()?;
    let rest: Vec<String> = rest.into_iter().cloned().collect();
    let is_all = rest.first().is_none_or(|word| word == "all");
    let arch = arch_of(&rest)?;
    if needs_parent(&rest) {
        parent::build(places)?;
    }
    if is_all || arch == Arch::X86_64 {
        artifacts::build(places, Wanted::ForDefaultVm)?;
    }
    if is_all || arch == Arch::Aarch64 {
        artifacts::build_aarch64(places, Wanted::ForDefaultVm)?;
    }
    // A compiler for guests, about 40 MB, is fetched only for measurements that use it.
    if rest.iter().any(|word| word == "--full" || word == "--macro") {
        workloads::build_all(places)?;
    } else {
        workloads::build(places)?;
    }
    let mut command = Command::new(places.tool());
    command.arg("bench").envs(path.map(|path| ("PATH", path)));
    if rest.is_empty() {
        let results = places.target.join("bench");
        std::fs::create_dir_all(&results).with_context(|| format!("cannot make {}", results.display()))?;
        command.args(["all", "--output"]).arg(results);
    }
    let error = command.args(rest).exec();
    Err(error).with_context(|| format!("cannot run {}", places.tool().display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_is_built_for_measurements_that_have_one_but_not_for_their_help() {
        let needs = |line: &str| needs_parent(&line.split(' ').map(str::to_string).collect::<Vec<_>>());
        assert!(["move --pairs 3", "machine", "parent boot"].iter().all(|line| needs(line)));
        assert!(!["move --help", "boot", "tlb --vcpus 2", "parent -h"].iter().any(|line| needs(line)));
        assert!(!needs_parent(&[]));
    }
}
