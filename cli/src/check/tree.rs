//! The files of a machine: of this one, or of another below a directory.
//!
//! They are input. A file may be missing, unreadable, endless or garbage, and a link may lead out of the tree. Only
//! regular files are opened, because a pipe would block.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Maximum length of a text. `/proc/cpuinfo` of 1024 CPUs has 2 MB.
const LONGEST: u64 = 8 << 20;
/// Maximum number of names in a directory.
const MOST_NAMES: usize = 4096;

/// The files below a directory.
pub(super) struct Tree {
    root: PathBuf,
}

/// What was found at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Look<T> {
    Found(T),
    /// There is no such file.
    Absent,
    /// It cannot be read, or is not to be read.
    Hidden,
}

impl<T> Look<T> {
    pub(super) fn found(self) -> Option<T> {
        match self {
            Self::Found(value) => Some(value),
            Self::Absent | Self::Hidden => None,
        }
    }

    fn of(result: io::Result<T>) -> Self {
        match result {
            Ok(value) => Self::Found(value),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Self::Absent
            }
            Err(_) => Self::Hidden,
        }
    }

    fn and_then<U>(self, then: impl FnOnce(T) -> Look<U>) -> Look<U> {
        match self {
            Self::Found(value) => then(value),
            Self::Absent => Look::Absent,
            Self::Hidden => Look::Hidden,
        }
    }
}

impl Tree {
    pub(super) fn open(root: &Path) -> Result<Self, Failure> {
        let bad = |why: String| {
            Failure::bad_input(format!("option '--root': {}: {why}", root.display()))
                .help("name the directory that would be '/' on that machine")
        };
        let root = root.canonicalize().map_err(|error| bad(error.to_string()))?;
        if !root.is_dir() {
            return Err(bad("is not a directory".to_string()));
        }
        Ok(Self { root })
    }

    /// Whether there is a file or directory.
    pub(super) fn has(&self, path: &str) -> bool {
        self.look(path) == Look::Found(())
    }

    /// Whether there is a file or directory, without reading it.
    pub(super) fn look(&self, path: &str) -> Look<()> {
        self.resolve(path).and_then(|_| Look::Found(()))
    }

    /// The text of a file. Bytes that are not UTF-8 are replaced.
    pub(super) fn text(&self, path: &str) -> Look<String> {
        self.bytes(path, 0, LONGEST).and_then(|bytes| Look::Found(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The text of a file of one value, if there is any.
    pub(super) fn value(&self, path: &str) -> Option<String> {
        let text = self.text(path).found()?;
        let value = text.trim_matches(|letter: char| letter.is_whitespace() || letter == '\0');
        (!value.is_empty()).then(|| value.to_string())
    }

    /// At most `most` bytes of a file from `offset` on.
    pub(super) fn bytes(&self, path: &str, offset: u64, most: u64) -> Look<Vec<u8>> {
        self.resolve(path).and_then(|path| {
            let Ok(metadata) = path.metadata() else { return Look::Hidden };
            // A device of another tree would be one of this machine.
            let is_own_device = metadata.file_type().is_char_device() && self.root == Path::new("/");
            if !metadata.is_file() && !is_own_device {
                return Look::Hidden;
            }
            Look::of(read(&path, offset, most))
        })
    }

    /// The names in a directory, in order.
    pub(super) fn names(&self, path: &str) -> Look<Vec<String>> {
        self.resolve(path).and_then(|path| {
            Look::of(fs::read_dir(path)).and_then(|entries| {
                let names = entries.take(MOST_NAMES).flatten().filter_map(|entry| entry.file_name().into_string().ok());
                let mut names: Vec<String> = names.collect();
                names.sort();
                Look::Found(names)
            })
        })
    }

    /// Where a path of the machine is here. A link that leads out of the tree names another machine's file.
    fn resolve(&self, path: &str) -> Look<PathBuf> {
        Look::of(self.root.join(path).canonicalize())
            .and_then(|path| if path.starts_with(&self.root) { Look::Found(path) } else { Look::Hidden })
    }
}

fn read(path: &Path, offset: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    if offset != 0 {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
