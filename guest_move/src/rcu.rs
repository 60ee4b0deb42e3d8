//! Short waits of Linux for its readers.
//!
//! QEMU closes the ioeventfds of a guest's devices when it stops the guest, and the `mshv` driver waits for an RCU
//! grace period for each of them. A virtio device has up to some hundred. Each wait is 20 ms by default, and a fraction
//! of a millisecond if the kernel is told to hurry, which costs the other CPUs an interrupt each time.

use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's file: whether it hurries.
const FILE: &str = "/sys/kernel/rcu_expedited";

/// Linux hurries as long as this value is there.
#[derive(Debug)]
pub(crate) struct Hurry(Option<PathBuf>);

impl Hurry {
    /// From now on, if the kernel lets us. A stop of the guest takes longer otherwise, and nothing else is different.
    pub(crate) fn begin() -> Self {
        Self::by(Path::new(FILE))
    }

    fn by(file: &Path) -> Self {
        let is_ours = fs::read_to_string(file).is_ok_and(|now| now.trim() == "0") && fs::write(file, "1").is_ok();
        Self(is_ours.then(|| file.to_path_buf()))
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let _ = fs::write(file, "0");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_hurries_meanwhile_and_a_kernel_that_always_does_is_left_so() {
        let file = tempfile::NamedTempFile::new().expect("can be made");
        let now = || fs::read_to_string(file.path()).expect("is there");
        for (before, meanwhile) in [("0\n", "1"), ("1\n", "1\n")] {
            fs::write(file.path(), before).expect("can be written");
            let hurry = Hurry::by(file.path());
            assert_eq!(now(), meanwhile);
            drop(hurry);
            assert_eq!(now().trim(), before.trim());
        }
        drop(Hurry::by(Path::new("/nowhere/at/all")));
    }
}
