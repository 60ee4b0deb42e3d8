//! What the programs consist of, as a software bill of materials: CycloneDX 1.5 in JSON.
//!
//! `cargo tree` knows the crates of each program, `cargo metadata` all about them, and Cargo.lock their sums. Four
//! programs are released: the hypervisor for two architectures, the tool, and guest-move. A crate that only a build
//! runs (a macro, a build script) is marked `excluded`, as the format has it. The compiler's own library is in each
//! program, too.
//!
//! `cargo-cyclonedx` writes one file for each of our 40 packages into its folder, and knows neither the compiler's
//! library nor programs for several targets. These are 150 lines instead.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::artifacts::{AARCH64_BARE_METAL, BARE_METAL, Places, output};
use crate::workloads::STATIC_LINUX;

/// The released programs: what they are called, their packages, and what they are compiled for.
const PROGRAMS: [(&str, &str, &str); 4] = [
    ("hypervisor-x86_64", "dunlin-hypervisor", BARE_METAL),
    ("hypervisor-aarch64", "dunlin-hypervisor", AARCH64_BARE_METAL),
    ("dunlin", "dunlin-cli", STATIC_LINUX),
    ("guest-move", "dunlin-guest-move", STATIC_LINUX),
];

/// A package of the resolved graph.
struct Package {
    name: String,
    version: String,
    licence: String,
    repository: Option<String>,
    is_ours: bool,
}

/// All packages that cargo may need for a target, by their identities in cargo's words. A program has some of them.
#[derive(Default)]
struct Graph {
    packages: BTreeMap<String, Package>,
    /// Dependencies, but for tests.
    edges: BTreeMap<String, Vec<String>>,
}

/// Leaves the document at `target/dunlin/dunlin.cdx.json`, and returns its path.
pub(crate) fn write(places: &Places) -> Result<PathBuf> {
    fs::create_dir_all(places.assets())?;
    let path = places.assets().join("dunlin.cdx.json");
    fs::write(&path, document(places)?).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// The document, at the time of the commit.
fn document(places: &Places) -> Result<Vec<u8>> {
    let sums = sums(&fs::read_to_string(places.root.join("Cargo.lock")).context("cannot read Cargo.lock")?)?;
    let mut components: BTreeMap<String, (Value, bool)> = BTreeMap::new();
    let mut dependencies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (program, package, target) in PROGRAMS {
        let graph = Graph::of(places, target)?;
        let root = graph.packages.iter().find(|(_, found)| found.name == package).map(|(id, _)| id.clone());
        let root = root.with_context(|| format!("cargo knows no package {package}"))?;
        let library = library(places)?;
        let inside = graph.identities(&tree(places, package, target, "normal,no-proc-macro")?)?;
        let all = graph.identities(&tree(places, package, target, "normal,build")?)?;
        for id in &all {
            let (reference, component) = graph.component(id, &sums);
            let is_inside = inside.contains(id);
            let known = components.entry(reference.clone()).or_insert((component, false));
            known.1 |= is_inside;
            let used = graph.edges.get(id).into_iter().flatten().filter(|used| all.contains(*used));
            dependencies.entry(reference).or_default().extend(used.map(|used| graph.component(used, &sums).0));
        }
        let version = graph.packages[&root].version.clone();
        let own = json!({ "type": "application", "bom-ref": program, "name": program, "version": version,
            "properties": [{ "name": "dunlin:target", "value": target }] });
        components.insert(program.to_string(), (own, true));
        let parts = [graph.component(&root, &sums).0, library.0.clone()];
        dependencies.entry(program.to_string()).or_default().extend(parts);
        components.insert(library.0, (library.1, true));
    }

    let components: Vec<Value> = components
        .into_values()
        .map(|(mut component, is_inside)| {
            component["scope"] = if is_inside { "required" } else { "excluded" }.into();
            component
        })
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let programs: Vec<&str> = PROGRAMS.iter().map(|(program, ..)| *program).collect();
    let mut edges: Vec<Value> =
        dependencies.into_iter().map(|(reference, on)| json!({ "ref": reference, "dependsOn": on })).collect();
    edges.push(json!({ "ref": "dunlin-release", "dependsOn": programs }));
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time(places)?,
            "component": { "type": "application", "bom-ref": "dunlin-release", "name": "dunlin", "version": version,
                "licenses": [{ "expression": "MIT OR Apache-2.0" }] },
        },
        "components": components,
        "dependencies": edges,
    });
    let mut text = serde_json::to_vec_pretty(&document)?;
    text.push(b'\n');
    Ok(text)
}

impl Graph {
    fn of(places: &Places, target: &str) -> Result<Self> {
        let mut command = places.cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", target]);
        let read: Value = serde_json::from_str(&output(&mut command)?)?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut graph = Self::default();
        for package in list(&read["packages"]) {
            let id = text(&package["id"]).context("a package without an identity")?;
            let found = Package {
                name: text(&package["name"]).context("a package without a name")?,
                version: text(&package["version"]).context("a package without a version")?,
                licence: text(&package["license"]).with_context(|| format!("{id} has no licence"))?,
                repository: text(&package["repository"]).filter(|_| !package["source"].is_null()),
                is_ours: package["source"].is_null(),
            };
            graph.packages.insert(id, found);
        }
        for node in list(&read["resolve"]["nodes"]) {
            let mut edges = Vec::new();
            for used in list(&node["deps"]) {
                let kinds: Vec<Value> = list(&used["dep_kinds"]).iter().map(|one| one["kind"].clone()).collect();
                if kinds.iter().all(|kind| kind == "dev") {
                    continue;
                }
                edges.push(text(&used["pkg"]).context("a dependency without an identity")?);
            }
            graph.edges.insert(text(&node["id"]).context("a node without an identity")?, edges);
        }
        Ok(graph)
    }

    /// The packages with these names and versions.
    fn identities(&self, named: &BTreeSet<(String, String)>) -> Result<BTreeSet<String>> {
        let identity = |(name, version): &(String, String)| {
            let mut packages = self.packages.iter();
            let found = packages.find(|(_, package)| &package.name == name && &package.version == version);
            found.map(|(id, _)| id.clone()).with_context(|| format!("cargo knows no {name} {version}"))
        };
        named.iter().map(identity).collect()
    }

    /// A reference to the package, and its description.
    fn component(&self, id: &str, sums: &BTreeMap<(String, String), String>) -> (String, Value) {
        let Package { name, version, licence, repository, is_ours, .. } = &self.packages[id];
        // Older crates write a slash for "or".
        let licence =
            if licence.contains(" OR ") { licence.clone() } else { licence.replace(" / ", "/").replace('/', " OR ") };
        let mut component =
            json!({ "type": "library", "name": name, "version": version, "licenses": [{ "expression": licence }] });
        let reference = if *is_ours { format!("{name}@{version}") } else { format!("pkg:cargo/{name}@{version}") };
        component["bom-ref"] = reference.clone().into();
        if !is_ours {
            component["purl"] = reference.clone().into();
        }
        if let Some(sum) = sums.get(&(name.clone(), version.clone())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
        }
        if let Some(repository) = repository {
            component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
        }
        (reference, component)
    }
}

/// Name and version of all that a package depends on by edges of these kinds, with the features that it is built with.
fn tree(places: &Places, package: &str, target: &str, kinds: &str) -> Result<BTreeSet<(String, String)>> {
    let arguments = ["tree", "--locked", "--package", package, "--target", target, "--edges", kinds];
    let mut command = places.cargo(&arguments);
    Ok(named(&output(command.args(["--prefix", "none", "--format", "{p}"]))?))
}

/// Name and version in lines such as `syn v3.0.9 (proc-macro) (*)`.
fn named(lines: &str) -> BTreeSet<(String, String)> {
    let of = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_string(), words.next()?.strip_prefix('v')?.to_string()))
    };
    lines.lines().filter_map(of).collect()
}

/// The library that comes with the compiler.
fn library(places: &Places) -> Result<(String, Value)> {
    let told = output(Command::new("rustc").arg("-vV").current_dir(&places.root))?;
    let line = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let version = line("release: ").context("rustc tells no release")?;
    let commit = line("commit-hash: ").unwrap_or_default();
    let reference = format!("rust-library@{version}");
    let component = json!({ "type": "library", "bom-ref": reference, "name": "rust-library", "version": version,
        "description": "core, alloc and std, compiled by the Rust project",
        "licenses": [{ "expression": "MIT OR Apache-2.0" }],
        "properties": [{ "name": "dunlin:commit", "value": commit }] });
    Ok((reference, component))
}

/// The SHA-256 of each crate's package, by name and version.
fn sums(lock: &str) -> Result<BTreeMap<(String, String), String>> {
    let lock: toml::Table = lock.parse().context("Cargo.lock is not TOML")?;
    let packages = lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock has no packages")?;
    let text = |package: &toml::Value, name: &str| package.get(name).and_then(toml::Value::as_str).map(str::to_owned);
    let sum =
        |package: &toml::Value| Some(((text(package, "name")?, text(package, "version")?), text(package, "checksum")?));
    Ok(packages.iter().filter_map(sum).collect())
}

/// When the commit was made.
fn time(places: &Places) -> Result<String> {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"]);
    Ok(output(git.env("TZ", "UTC").current_dir(&places.root))?.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::{Graph, Package, named, sums};

    #[test]
    fn names_and_versions_are_read_from_a_tree() {
        let lines = "a v0.1.0 (/somewhere/a)\nb v2.0.1 (proc-macro) (*)\n\na v0.1.0 (/somewhere/a) (*)\n";
        let expected = [("a", "0.1.0"), ("b", "2.0.1")].map(|(name, version)| (name.to_string(), version.to_string()));
        assert_eq!(named(lines).into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn component_has_the_sum_of_the_lock_file_and_a_licence_in_todays_notation() {
        let lock = "[[package]]\nname = \"b\"\nversion = \"1.0.0\"\nchecksum = \"12ab\"\n[[package]]\nname = \"ours\"\nversion = \"0.1.0\"\n";
        let sums = sums(lock).expect("is TOML");
        assert_eq!(sums.len(), 1);
        let package = |name: &str, is_ours| Package {
            name: name.to_string(),
            version: "1.0.0".to_string(),
            licence: "MIT/Apache-2.0".to_string(),
            repository: None,
            is_ours,
        };
        let packages = [("b", false), ("ours", true)].map(|(name, ours)| (name.to_string(), package(name, ours)));
        let graph = Graph { packages: packages.into(), ..Graph::default() };
        let (reference, component) = graph.component("b", &sums);
        assert_eq!(reference, "pkg:cargo/b@1.0.0");
        assert_eq!(component["hashes"][0]["content"], "12ab");
        assert_eq!(component["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let (reference, component) = graph.component("ours", &sums);
        assert_eq!((reference.as_str(), component.get("purl")), ("ours@1.0.0", None), "it is in no registry");
    }
}
