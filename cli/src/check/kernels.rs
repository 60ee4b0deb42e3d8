//! Kernels that can run in a parent VM: those with `/dev/mshv` for a level-1 virtualization host (docs/parent.md).
//!
//! A kernel's configuration is in `/boot/config-RELEASE`, or in `RELEASE/config` where its modules are (Fedora).

use std::collections::BTreeMap;

use super::tree::Tree;
use super::{Item, Need, Subject};
use crate::config::Arch;

const SUBJECT: Subject = Subject { name: "parent's kernel", need: Need::Parent };

/// The device serves a level-1 virtualization host since this version.
const FIRST_FOR_PARENTS: (u32, u32) = (6, 19);
/// Maximum number of kernels that are looked at, and of those that are named.
const MOST_KERNELS: usize = 64;
const MOST_NAMED: usize = 3;

const REMEDY: &str =
    "`make parent` builds one (docs/parent.md). Fedora's kernels since 6.19 are able, Debian's are not";

/// A kernel's configuration.
struct Kernel {
    release: String,
    config: String,
}

/// The architecture of an installed kernel.
pub(super) fn arch(tree: &Tree) -> Option<Arch> {
    kernels(tree)?.find_map(|kernel| match () {
        () if kernel.has("CONFIG_X86_64", &["y"]) => Some(Arch::X86_64),
        () if kernel.has("CONFIG_ARM64", &["y"]) => Some(Arch::Aarch64),
        () => None,
    })
}

pub(super) fn item(tree: &Tree, arch: Option<Arch>, built: &[String]) -> Item {
    if arch == Some(Arch::Aarch64) {
        return Subject::useful(SUBJECT.name).note("VMs on AArch64 cannot be parents yet");
    }
    let mut able = built.to_vec();
    let mut others = Vec::new();
    let kernels = kernels(tree);
    let is_known = kernels.is_some();
    for kernel in kernels.into_iter().flatten() {
        match kernel.lacks() {
            None if kernel.has("CONFIG_MSHV_ROOT", &["m"]) => {
                able.push(format!("{} (`modprobe mshv_root` makes the device)", kernel.release));
            }
            None => able.push(kernel.release),
            Some(what) => others.push(format!("{} {what}", kernel.release)),
        }
    }
    if !able.is_empty() {
        return SUBJECT.ok(named(&able));
    }
    if !is_known {
        return SUBJECT.unknown("no configuration of a kernel can be read").remedy(REMEDY);
    }
    let found = if others.is_empty() { "no kernel is installed".to_string() } else { named(&others) };
    SUBJECT.missing(found, REMEDY)
}

/// The releases of the installed kernels that can run in a parent VM, the newest last.
pub(super) fn able(tree: &Tree) -> Vec<String> {
    let able = kernels(tree).into_iter().flatten().filter(|kernel| kernel.lacks().is_none());
    let mut releases: Vec<String> = able.map(|kernel| kernel.release).collect();
    releases.sort_by_cached_key(|release| (version(release), release.clone()));
    releases
}

fn named(texts: &[String]) -> String {
    let first = texts.iter().take(MOST_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match texts.len().saturating_sub(MOST_NAMED) {
        0 => first,
        more => format!("{first}, and {more} more"),
    }
}

/// Where modules are. The first is usually a link to the second.
const MODULES: [&str; 2] = ["lib/modules", "usr/lib/modules"];

/// The installed kernels; `None` if none of the directories can be read.
fn kernels(tree: &Tree) -> Option<impl Iterator<Item = Kernel> + '_> {
    let in_boot = tree.names("boot").found();
    let with_modules = MODULES.into_iter().find_map(|folder| Some((folder, tree.names(folder).found()?)));
    if in_boot.is_none() && with_modules.is_none() {
        return None;
    }
    // By release: a kernel may have its configuration at both places.
    let mut paths: BTreeMap<String, String> = BTreeMap::new();
    if let Some((folder, releases)) = with_modules {
        paths.extend(releases.into_iter().map(|release| (release.clone(), format!("{folder}/{release}/config"))));
    }
    for name in in_boot.into_iter().flatten() {
        if let Some(release) = name.strip_prefix("config-") {
            paths.insert(release.to_string(), format!("boot/{name}"));
        }
    }
    let kernels = paths.into_iter().filter_map(|(release, path)| {
        let config = tree.text(&path).found()?;
        Some(Kernel { release, config })
    });
    Some(kernels.take(MOST_KERNELS))
}

impl Kernel {
    fn has(&self, option: &str, values: &[&str]) -> bool {
        let value = self.config.lines().find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
        value.is_some_and(|value| values.contains(&value.trim()))
    }

    /// What keeps it from being a parent.
    fn lacks(&self) -> Option<String> {
        // Mainline: MSHV_ROOT in drivers/hv/Kconfig depends on the other two.
        if !self.has("CONFIG_MSHV_ROOT", &["y", "m"]) {
            return Some("has no CONFIG_MSHV_ROOT".to_string());
        }
        if !self.has("CONFIG_HYPERV", &["y"]) {
            return Some("has no CONFIG_HYPERV=y".to_string());
        }
        if self.has("CONFIG_HYPERV_VTL_MODE", &["y"]) {
            return Some("has CONFIG_HYPERV_VTL_MODE".to_string());
        }
        let version = version(&self.release).or_else(|| self.config.lines().take(5).find_map(header));
        match version {
            Some(version) if version >= FIRST_FOR_PARENTS => None,
            Some(_) => Some(format!("is older than {}.{}", FIRST_FOR_PARENTS.0, FIRST_FOR_PARENTS.1)),
            None => Some("has no known version".to_string()),
        }
    }
}

/// The version in the first lines of a configuration: `# Linux/x86 6.1.158 Kernel Configuration`.
fn header(line: &str) -> Option<(u32, u32)> {
    version(line.strip_prefix("# Linux/")?.split(' ').nth(1)?)
}

/// The first two numbers of a release such as `6.1.0-40-amd64`.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    Some((major.parse().ok()?, rest.get(..end)?.parse().ok()?))
}
