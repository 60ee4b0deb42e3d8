//! `cargo xtask package`: a Debian package of the hypervisor, the tool, and entries for GRUB's menu.
//!
//! ```text
//! /boot/dunlin/hypervisor             what GRUB loads; `update-grub` adds parent.payload (packaging/21_dunlin)
//! /usr/bin/dunlin                     the tool, linked statically
//! /usr/bin/guest-move                 for the parent: moves QEMU's guests (docs/moving.md)
//! /usr/lib/dunlin/hypervisor          a link to the first, for `dunlin image`
//! /etc/dunlin/parent.toml             the parent VM        (packaging/parent.toml)
//! /etc/grub.d/21_dunlin               writes the entries   (packaging/21_dunlin)
//! /etc/default/grub.d/dunlin.cfg      their options        (packaging/dunlin.cfg)
//! /usr/lib/udev/rules.d/60-dunlin.rules  who may use /dev/mshv in the parent (packaging/60-dunlin.rules)
//! /usr/share/doc/dunlin/dunlin.cdx.json  what hypervisor and tool consist of
//! /usr/share/man, /usr/share/doc, completions for bash, zsh and fish
//! ```
//!
//! `dpkg-deb` packs the tree. The package's own files are in `packaging/debian`. With the same commit and compiler the
//! same package comes out: all times in it are that of the commit.

use std::fs::{self, File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use flate2::{Compression, GzBuilder};

use crate::artifacts::{self, Places, output, run};
use crate::sbom;
use crate::workloads::STATIC_LINUX;

/// Builds the package, and returns its path.
pub(crate) fn build(places: &Places) -> Result<PathBuf> {
    run(Command::new(places.root.join("xtask/setup.sh")).arg("package"))?;
    artifacts::build_bare_metal(places)?;
    let programs =
        ["--package", "dunlin-cli", "--bin", "dunlin", "--package", "dunlin-guest-move", "--bin", "guest-move"];
    let mut build = places.cargo(&["build", "--release", "--target", STATIC_LINUX]);
    run(build.args(programs).args(artifacts::without_folders(places, STATIC_LINUX)?))?;

    let folder = places.target.join("package");
    let tree = Tree { root: folder.join("root") };
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&tree.root).with_context(|| format!("cannot make {}", tree.root.display()))?;

    let built = places.target.join(STATIC_LINUX).join("release");
    let (tool, mover) = (built.join("dunlin"), built.join("guest-move"));
    tree.program(&places.assets().join("hypervisor"), "boot/dunlin/hypervisor")?;
    tree.program(&tool, "usr/bin/dunlin")?;
    tree.program(&mover, "usr/bin/guest-move")?;
    // GRUB reads it, and nobody executes it.
    tree.allow("boot/dunlin/hypervisor", 0o644)?;
    // Debian Policy 10.5: links between top-level directories are absolute.
    tree.link("/boot/dunlin/hypervisor", "usr/lib/dunlin/hypervisor")?;

    let packaging = places.root.join("packaging");
    tree.file("etc/dunlin/parent.toml", &read(&packaging.join("parent.toml"))?)?;
    tree.file("etc/grub.d/21_dunlin", &read(&packaging.join("21_dunlin"))?)?;
    tree.allow("etc/grub.d/21_dunlin", 0o755)?;
    tree.file("etc/default/grub.d/dunlin.cfg", &read(&packaging.join("dunlin.cfg"))?)?;
    tree.file("usr/lib/udev/rules.d/60-dunlin.rules", &read(&packaging.join("60-dunlin.rules"))?)?;

    pages(&tree, &tool, &folder.join("pages"))?;
    let help = output(Command::new(&mover).arg("--help"))?;
    tree.compressed("usr/share/man/man1/guest-move.1", manual_page(&help).as_bytes())?;
    let version = env!("CARGO_PKG_VERSION");
    documents(places, &tree, version)?;
    control(&tree, &packaging.join("debian"), version)?;

    let package = places.target.join(format!("dunlin_{version}_amd64.deb"));
    let mut pack = Command::new("dpkg-deb");
    pack.env("SOURCE_DATE_EPOCH", commit(places, "%ct")?);
    pack.args(["--root-owner-group", "--build"]).arg(&tree.root).arg(&package);
    run(&mut pack).context("a package is made by dpkg-deb (Debian package dpkg)")?;
    Ok(package)
}

/// Manual pages, and completions where the shells of Debian look for them.
fn pages(tree: &Tree, tool: &Path, made: &Path) -> Result<()> {
    run(Command::new(tool).arg("pages").arg(made))?;
    let completions = [
        ("dunlin.bash", "usr/share/bash-completion/completions/dunlin"),
        ("_dunlin", "usr/share/zsh/vendor-completions/_dunlin"),
        ("dunlin.fish", "usr/share/fish/vendor_completions.d/dunlin.fish"),
    ];
    for (name, place) in completions {
        tree.file(place, &read(&made.join(name))?)?;
    }
    for entry in fs::read_dir(made)? {
        let path = entry?.path();
        if let (Some("1"), Some(name)) = (path.extension().and_then(|end| end.to_str()), path.file_name()) {
            tree.compressed(&format!("usr/share/man/man1/{}", name.display()), &read(&path)?)?;
        }
    }
    Ok(())
}

/// The manual page of guest-move, which is its help.
fn manual_page(help: &str) -> String {
    let mut page = ".TH guest-move 1\n.SH NAME\nguest-move \\- move a guest of QEMU with /dev/mshv\n".to_string();
    page.push_str(".SH DESCRIPTION\n.nf\n");
    for line in help.lines() {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // A line that begins with one of these would be a command.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        page.extend([guard, &line, "\n"]);
    }
    page.push_str(".fi\n");
    page
}

/// `/usr/share/doc/dunlin` and lintian's overrides.
fn documents(places: &Places, tree: &Tree, version: &str) -> Result<()> {
    let text = |path: &str| read(&places.root.join(path));
    let licence = String::from_utf8(text("LICENSE-MIT")?)?;
    // A field's further lines begin with a space, and empty ones have a dot.
    let indented: Vec<String> = licence
        .trim_end()
        .lines()
        .map(|line| if line.trim().is_empty() { " .".to_string() } else { format!(" {line}") })
        .collect();
    let copyright = String::from_utf8(text("packaging/debian/copyright")?)?.replace("@MIT@", &indented.join("\n"));
    tree.file("usr/share/doc/dunlin/copyright", copyright.as_bytes())?;
    let changes = format!(
        "dunlin ({version}) unstable; urgency=medium\n\n  * Built from commit {}; CHANGELOG.md.gz tells what is new.\n\n \
         -- The Dunlin developers <dunlin@example.invalid>  {}\n",
        commit(places, "%h")?,
        commit(places, "%cD")?
    );
    tree.compressed("usr/share/doc/dunlin/changelog", changes.as_bytes())?;
    for name in ["CHANGELOG.md", "docs/install.md", "docs/real-machine.md", "docs/parent.md", "docs/moving.md"] {
        let file = name.rsplit('/').next().unwrap_or(name);
        tree.compressed(&format!("usr/share/doc/dunlin/{file}"), &text(name)?)?;
    }
    // As it is, because scanners look for the end of its name.
    tree.file("usr/share/doc/dunlin/dunlin.cdx.json", &read(&sbom::write(places)?)?)?;
    tree.file("usr/share/lintian/overrides/dunlin", &text("packaging/debian/lintian-overrides")?)
}

/// The package's own files: its description, its scripts, checksums.
fn control(tree: &Tree, from: &Path, version: &str) -> Result<()> {
    let sums = output(
        Command::new("sh")
            .args(["-c", "find . -type f ! -path './DEBIAN/*' -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 md5sum"])
            .current_dir(&tree.root),
    )?;
    let kib = output(Command::new("du").args(["-k", "-s", "--apparent-size"]).arg(&tree.root))?;
    let kib = kib.split_whitespace().next().context("du prints no size")?.to_string();
    let description = String::from_utf8(read(&from.join("control"))?)?;
    tree.file("DEBIAN/control", description.replace("@VERSION@", version).replace("@SIZE@", &kib).as_bytes())?;
    tree.file("DEBIAN/md5sums", sums.as_bytes())?;
    for (name, mode) in [("conffiles", 0o644), ("postinst", 0o755), ("postrm", 0o755)] {
        let place = format!("DEBIAN/{name}");
        tree.file(&place, &read(&from.join(name))?)?;
        tree.allow(&place, mode)?;
    }
    Ok(())
}

/// The files of the package, as they will be installed.
struct Tree {
    root: PathBuf,
}

impl Tree {
    /// A path in the tree, whose folders are there.
    fn place(&self, path: &str) -> Result<PathBuf> {
        let place = self.root.join(path);
        for folder in place.ancestors().skip(1).take_while(|folder| folder.starts_with(&self.root)) {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        }
        Ok(place)
    }

    fn file(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let place = self.place(path)?;
        fs::write(&place, bytes).with_context(|| format!("cannot write {}", place.display()))?;
        self.allow(path, 0o644)
    }

    /// A file that is installed as `path` with `.gz` behind it, without a name and a time inside.
    fn compressed(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let path = format!("{path}.gz");
        let place = self.place(&path)?;
        let file = File::create(&place).with_context(|| format!("cannot write {}", place.display()))?;
        let mut packed = GzBuilder::new().mtime(0).write(file, Compression::best());
        packed.write_all(bytes)?;
        packed.finish()?;
        self.allow(&path, 0o644)
    }

    /// A program without the data for debuggers.
    fn program(&self, from: &Path, path: &str) -> Result<()> {
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(self.place(path)?).arg(from);
        run(&mut strip).context("programs lose their debugging data by strip (Debian package binutils)")?;
        self.allow(path, 0o755)
    }

    fn link(&self, target: &str, path: &str) -> Result<()> {
        let place = self.place(path)?;
        symlink(target, &place).with_context(|| format!("cannot make the link {}", place.display()))
    }

    fn allow(&self, path: &str, mode: u32) -> Result<()> {
        fs::set_permissions(self.root.join(path), Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the mode of {path}"))
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Something about the commit that is checked out, in git's notation.
fn commit(places: &Places, what: &str) -> Result<String> {
    let text = output(Command::new("git").args(["log", "-1", &format!("--format={what}")]).current_dir(&places.root))?;
    match text.trim() {
        "" => bail!("git knows no commit of this tree"),
        text => Ok(text.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_help_is_taken_for_a_command_of_the_manual_page() {
        let page = manual_page("a --b\n.c \\d\n'e\n");
        assert!(page.ends_with(".nf\na \\-\\-b\n\\&.c \\ed\n\\&'e\n.fi\n"), "{page}");
    }
}
