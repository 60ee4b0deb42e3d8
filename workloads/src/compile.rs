//! A parallel compile of real C files with GCC's compiler proper and the assembler, as many at a time as requested.
//!
//! `cargo xtask workloads` packs compiler and sources (`xtask/src/workloads.rs`) into `/opt/cc`:
//!
//! ```text
//! bin/cc1, bin/as     the programs that `gcc -c` would start, one after the other
//! lib                 their shared libraries
//! include             the compiler's own headers
//! src                 newlib: a C library with all headers that it needs
//! ```
//!
//! Each file costs two new address spaces, dynamic linking, page faults and exits. The kernel flushes TLBs if such an
//! address space was on several CPUs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::Verdict;
use crate::interrupts::{Change, Interrupts};
use crate::options::Options;

pub(crate) const OPTIONS: [&str; 3] = ["--jobs", "--rounds", "--files"];

const COMPILER: &str = "/opt/cc";
/// The folder of newlib with the files to compile.
const SOURCES: &str = "libc/string";
/// Folders of newlib with the headers of these files.
const HEADERS: [&str; 4] = ["libc/include", "libc/stdlib", "libc/locale", "libm/common"];

/// Compiles and prints the line.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let jobs = options.number_or_cpus("--jobs");
    let rounds = options.number("--rounds", 1) as usize;
    let compiler = Compiler::at(Path::new(COMPILER));
    let mut files = compiler.sources()?;
    files.truncate(options.number("--files", u32::MAX) as usize);
    let count = files.len() * rounds;
    fs::create_dir_all(&compiler.objects).with_context(|| format!("cannot make {}", compiler.objects.display()))?;

    let before = Interrupts::show("before")?;
    let started = Instant::now();
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for job in 0..jobs {
            let (compiler, files, next, failed) = (&compiler, &files, &next, &failed);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    // Like `make`: no new work after a failure, but other threads finish theirs.
                    if number >= count || failed.load(Ordering::Relaxed) > 0 {
                        break;
                    }
                    if number > 0 && number.is_multiple_of(50) {
                        eprintln!("compile {:.0} s: {number} of {count} files", started.elapsed().as_secs_f64());
                    }
                    if let Err(error) = compiler.compile(&files[number % files.len()], job) {
                        eprintln!("compile: {error:#}");
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let took = started.elapsed().as_secs_f64();
    let failed = failed.into_inner();

    let after = Interrupts::show("after")?;
    println!("compile files={count} jobs={jobs} seconds={took:.1} failed={failed} {}", Change { before, after });
    Ok(if failed == 0 { Verdict::Right } else { Verdict::Wrong })
}

/// A compiler and its sources.
struct Compiler {
    root: PathBuf,
    newlib: PathBuf,
    objects: PathBuf,
}

impl Compiler {
    fn at(root: &Path) -> Self {
        Self { root: root.to_path_buf(), newlib: root.join("src"), objects: std::env::temp_dir().join("compile") }
    }

    /// All files, in the same order each time.
    fn sources(&self) -> Result<Vec<PathBuf>> {
        let folder = self.newlib.join(SOURCES);
        let entries = fs::read_dir(&folder)
            .with_context(|| format!("cannot read {} (is this a VM with the initrd \"compile\"?)", folder.display()))?;
        let mut files = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "c") {
                files.push(path);
            }
        }
        if files.is_empty() {
            bail!("there are no C files in {}", folder.display());
        }
        files.sort();
        Ok(files)
    }

    /// C to assembly to object, as `gcc -O2 -c` does it.
    fn compile(&self, source: &Path, job: u32) -> Result<()> {
        let assembly = self.objects.join(format!("{job}.s"));
        let object = self.objects.join(format!("{job}.o"));

        let mut to_assembly = self.tool("cc1");
        to_assembly.args(["-quiet", "-O2", "-w", "-nostdinc", "-isystem"]).arg(self.root.join("include"));
        HEADERS.iter().for_each(|folder| {
            to_assembly.arg("-I").arg(self.newlib.join(folder));
        });
        finish(to_assembly.arg(source).arg("-o").arg(&assembly))?;
        finish(self.tool("as").arg("--64").arg("-o").arg(&object).arg(&assembly))?;

        // Gone before the next file, so that nothing old can pass for a result.
        fs::remove_file(&assembly).with_context(|| format!("{} left no assembly", source.display()))?;
        fs::remove_file(&object).with_context(|| format!("{} left no object", source.display()))
    }

    fn tool(&self, name: &str) -> Command {
        let mut command = Command::new(self.root.join("bin").join(name));
        command.env("LD_LIBRARY_PATH", self.root.join("lib"));
        command
    }
}

/// Runs `command` to its end. The output of a failed command becomes part of the error.
fn finish(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", name.display()))?;
    if !output.status.success() {
        bail!("{} ({}): {}", name.display(), output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
