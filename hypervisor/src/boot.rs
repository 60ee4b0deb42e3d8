//! The boot loader's data, in a form that does not depend on the loader.

pub mod console;
pub mod efi;
pub mod handover;
pub mod madt;
pub mod mcfg;
pub(crate) mod modules;
mod options;
pub mod runtime_services;
pub mod soft_off;
pub mod spcr;

/// The start state of the hypervisor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Boot {
    /// The first boot module: the payload with the VMs to run (`abi::payload`).
    pub(crate) payload: Option<&'static [u8]>,
    /// The hypervisor's own command line.
    pub(crate) command_line: &'static str,
}

impl Boot {
    /// The value of `key=value` on the command line; of several, the last.
    pub(crate) fn option(&self, key: &str) -> Option<&'static str> {
        self.command_line
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter_map(|(name, value)| (name == key).then_some(value))
            .next_back()
    }

    /// Whether the command line has this word.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.command_line.split_ascii_whitespace().any(|other| other == word)
    }

    /// The words of the command line that mean nothing. Needs the heap.
    pub(crate) fn mistakes(&self) -> impl Iterator<Item = options::Mistake<'static>> {
        options::mistakes(self.command_line)
    }
}

#[cfg(test)]
mod tests {
    use super::Boot;

    #[test]
    fn last_of_several_equal_options_counts() {
        let boot = Boot { payload: None, command_line: "dunlin log=info  quiet log=debug" };
        assert_eq!(boot.option("log"), Some("debug"));
    }

    #[test]
    fn word_without_value_and_longer_name_are_not_the_option() {
        let boot = Boot { payload: Some(b"log=info"), command_line: "log catalog=info" };
        assert_eq!(boot.option("log"), None);
        assert_eq!(boot.payload.map(<[u8]>::len), Some(8), "the payload is not looked at");
    }
}
