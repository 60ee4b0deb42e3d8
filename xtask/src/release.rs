//! `cargo xtask release`: what others get, with sums that somebody has signed.
//!
//! ```text
//! target/release-VERSION/
//!     dunlin_VERSION_amd64.deb
//!     dunlin-VERSION-hypervisor-x86_64    the ELF that boot loaders and `dunlin` start
//!     dunlin-VERSION-hypervisor-aarch64   an Image, for UEFI
//!     dunlin-VERSION.cdx.json             what they consist of
//!     SHA256SUMS                          of the files above
//!     SHA256SUMS.asc, .sig or .minisig    its signature, by GnuPG, OpenSSH or minisign
//! ```
//!
//! An image with a guest's kernel is not among them: the kernel has a licence and a source of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, Arch, BARE_METAL_PROGRAMS, Places, output, run};
use crate::reproducible::{self, sha256};
use crate::{deny, package, sbom};

const HELP: &str = "\
cargo xtask release --sign gpg|gpg:KEY|ssh:FILE|minisign:FILE [--help]

Checks the crates of others, builds hypervisor and Debian package from the commit that is checked out, checks that a
second build gives the same hypervisor, and leaves all in target/release-VERSION, with SHA256SUMS and its signature.

  --sign gpg             sign with GnuPG's default key
  --sign gpg:KEY         with this key: its fingerprint, or an address
  --sign ssh:FILE        with the private key of OpenSSH in FILE
  --sign minisign:FILE   with the secret key of minisign in FILE

There is no release without a signature, and none of files that are not committed.
";

/// What the signature by a key of OpenSSH is for. Whoever verifies it has to name the same.
const NAMESPACE: &str = "dunlin-release";

/// A key, and the program that signs with it.
#[derive(Debug, PartialEq, Eq)]
enum Signer {
    Gpg(Option<String>),
    Ssh(PathBuf),
    Minisign(PathBuf),
}

/// Runs the command.
pub(crate) fn command(places: &Places, arguments: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let signer = match words[..] {
        ["--help" | "-h"] => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        [] => bail!("a release is signed: say with what\n\n{HELP}"),
        ["--sign", how] => Signer::named(how)?,
        [joined] if joined.starts_with("--sign=") => Signer::named(&joined["--sign=".len()..])?,
        _ => bail!("arguments are not understood: {}\n\n{HELP}", words.join(" ")),
    };
    // A key that does not work is noticed now, and not in half an hour.
    signer.try_out(&places.target)?;
    let changed = output(Command::new("git").args(["status", "--porcelain"]).current_dir(&places.root))?;
    if !changed.trim().is_empty() {
        bail!("a release is made of a commit, and these files are not in one:\n{}", changed.trim_end());
    }

    deny::check(places)?;
    let version = env!("CARGO_PKG_VERSION");
    let folder = places.target.join(format!("release-{version}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let package = package::build(places)?;
    reproducible::check(places)?;
    artifacts::build_bare_metal_aarch64(places)?;

    let hypervisor = |arch| places.assets_of(arch).join(BARE_METAL_PROGRAMS[0].1);
    let files = [
        (format!("dunlin-{version}-hypervisor-aarch64"), hypervisor(Arch::Aarch64)),
        (format!("dunlin-{version}-hypervisor-x86_64"), hypervisor(Arch::X86_64)),
        (format!("dunlin-{version}.cdx.json"), sbom::write(places)?),
        (format!("dunlin_{version}_amd64.deb"), package),
    ];
    let mut sums = String::new();
    for (name, built) in files {
        let file = folder.join(&name);
        fs::copy(&built, &file).with_context(|| format!("cannot copy {}", built.display()))?;
        sums += &format!("{}  {name}\n", sha256(&file)?);
    }
    let listed = folder.join("SHA256SUMS");
    fs::write(&listed, &sums).with_context(|| format!("cannot write {}", listed.display()))?;
    let signature = signer.sign(&listed)?;
    print!("{sums}");
    println!("{}: signed, see {}", listed.display(), signature.display());
    Ok(ExitCode::SUCCESS)
}

impl Signer {
    fn named(how: &str) -> Result<Self> {
        Ok(match how.split_once(':').unwrap_or((how, "")) {
            ("gpg", "") => Self::Gpg(None),
            ("gpg", key) => Self::Gpg(Some(key.to_string())),
            ("ssh", file) if !file.is_empty() => Self::Ssh(file.into()),
            ("minisign", file) if !file.is_empty() => Self::Minisign(file.into()),
            _ => bail!("`{how}` is no way to sign: gpg, gpg:KEY, ssh:FILE and minisign:FILE are"),
        })
    }

    /// Signs a file beside it, checks the signature, and returns its path.
    fn sign(&self, file: &Path) -> Result<PathBuf> {
        let (signature, mut sign, mut verify) = match self {
            Self::Gpg(key) => {
                let signature = file.with_extension("asc");
                let mut sign = Command::new("gpg");
                sign.args(["--yes", "--armor", "--detach-sign"]);
                if let Some(key) = key {
                    sign.args(["--local-user", key]);
                }
                sign.arg("--output").arg(&signature).arg(file);
                let mut verify = Command::new("gpg");
                verify.arg("--verify").arg(&signature).arg(file);
                (signature, sign, verify)
            }
            Self::Ssh(key) => {
                let signature = file.with_extension("sig");
                // ssh-keygen asks before it writes over a file.
                let _ = fs::remove_file(&signature);
                let mut sign = Command::new("ssh-keygen");
                sign.args(["-Y", "sign", "-n", NAMESPACE, "-f"]).arg(key).arg(file);
                let mut verify = Command::new("ssh-keygen");
                verify.args(["-Y", "check-novalidate", "-n", NAMESPACE, "-s"]).arg(&signature);
                verify.stdin(fs::File::open(file)?);
                (signature, sign, verify)
            }
            Self::Minisign(key) => {
                let signature = file.with_extension("minisig");
                let mut sign = Command::new("minisign");
                sign.arg("-S").arg("-s").arg(key).arg("-m").arg(file).arg("-x").arg(&signature);
                // Verifying needs the public key, which need not be here.
                (signature, sign, Command::new("true"))
            }
        };
        let program = sign.get_program().display().to_string();
        run(&mut sign).with_context(|| format!("`{program}` has not signed; --sign names another key or program"))?;
        run(verify.stdout(Stdio::null())).context("the signature is wrong")?;
        if !signature.is_file() {
            bail!("`{program}` has left no {}", signature.display());
        }
        Ok(signature)
    }

    /// Signs something without a meaning.
    fn try_out(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        let file = folder.join(format!("key-{}", std::process::id()));
        fs::write(&file, "does this key sign?\n").with_context(|| format!("cannot write {}", file.display()))?;
        let result = self.sign(&file);
        let _ = fs::remove_file(&file);
        fs::remove_file(result?).context("cannot remove a signature")
    }
}

#[cfg(test)]
mod tests {
    use super::Signer;

    #[test]
    fn ways_to_sign_are_understood_and_others_are_told_what_there_is() {
        assert_eq!(Signer::named("gpg").expect("known"), Signer::Gpg(None));
        assert_eq!(Signer::named("gpg:0x12 34").expect("known"), Signer::Gpg(Some("0x12 34".to_string())));
        assert_eq!(Signer::named("ssh:/a/b").expect("known"), Signer::Ssh("/a/b".into()));
        for wrong in ["", "pgp", "ssh", "ssh:", "minisign:"] {
            let why = Signer::named(wrong).expect_err("unknown").to_string();
            assert!(why.starts_with(&format!("`{wrong}` is no way to sign: gpg,")), "{why}");
        }
    }
}
