//! Short waits of Linux for its readers.
//!
//! QEMU closes the ioeventfds of a guest's devices when it stops the guest, and the `mshv` driver waits for an RCU
//! grace period for each of them. A virtio device has up to some hundred. Each wait is 20 ms by default, and a fraction
//! of a millisecond if the kernel is told to hurry, which costs the other CPUs an interrupt each time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Result;

/// The kernel's file: whether it hurries.
const FILE: &str = "/sys/kernel/rcu_expedited";

/// Linux hurries as long as this value is there.
///
/// The kernel's variable is a number, and it hurries unless that is 0. So each process of this program adds one, and
/// takes it away at the end: one that ends does not stop the hurry of another, and a kernel that hurried before still
/// does.
#[derive(Debug)]
pub(crate) struct Hurry(Option<PathBuf>);

impl Hurry {
    /// From now on, if the kernel lets us. A stop of the guest takes longer otherwise, and nothing else is different.
    pub(crate) fn begin() -> Self {
        Self::by(Path::new(FILE))
    }

    fn by(file: &Path) -> Self {
        Self(change(file, |count| count.saturating_add(1)).is_ok().then(|| file.to_path_buf()))
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            // Somebody may have set it to 0 meanwhile.
            let _ = change(file, |count| count.saturating_sub(1).max(0));
        }
    }
}

/// Changes the number in a file, while no other process of this program does.
fn change(path: &Path, to: impl FnOnce(i32) -> i32) -> Result<()> {
    let held = File::open(path)?;
    held.lock()?;
    let count = fs::read_to_string(path)?.trim().parse()?;
    fs::write(path, to(count).to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_hurries_until_the_last_has_ended_and_one_that_always_does_is_left_so() {
        let file = tempfile::NamedTempFile::new().expect("can be made");
        let now = || fs::read_to_string(file.path()).expect("is there").trim().to_string();
        for (before, [one, two]) in [("0\n", ["1", "2"]), ("1\n", ["2", "3"])] {
            fs::write(file.path(), before).expect("can be written");
            let first = Hurry::by(file.path());
            assert_eq!(now(), one);
            let second = Hurry::by(file.path());
            assert_eq!(now(), two);
            drop(first);
            assert_eq!(now(), one);
            drop(second);
            assert_eq!(now(), before.trim());
        }
        let hurry = Hurry::by(file.path());
        fs::write(file.path(), "0\n").expect("can be written");
        drop(hurry);
        assert_eq!(now(), "0", "somebody has set it");
        drop(Hurry::by(Path::new("/nowhere/at/all")));
    }

    #[test]
    fn numbers_that_change_at_the_same_time_are_not_lost() {
        let file = tempfile::NamedTempFile::new().expect("can be made");
        fs::write(file.path(), "0\n").expect("can be written");
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| (0..100).for_each(|_| drop(Hurry::by(file.path()))));
            }
        });
        assert_eq!(fs::read_to_string(file.path()).expect("is there").trim(), "0");
    }
}
