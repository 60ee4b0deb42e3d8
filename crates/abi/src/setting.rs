//! The names of a setting's values: written once, for files, options, errors and reports.

use crate::payload::{ApicMode, DecodeCache, DirtySource, HyperV, Populate, RemoteFlush, Role, Split, TagScheme};

/// A setting with a few values, each with a name.
pub trait Setting: Copy + Eq + 'static {
    /// What the setting chooses, for messages.
    const WHAT: &'static str;
    /// All values, in the order in which messages list them.
    const ALL: &'static [Self];
    /// Their names, in the same order.
    const NAMES: &'static [&'static str];
    /// The first of them, which a file has that does not name one.
    const DEFAULT: Self;

    /// The value's name.
    fn name(self) -> &'static str;

    /// The value with this name.
    #[must_use]
    fn named(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|value| value.name() == text)
    }
}

/// Names the values of enums: `settings! { Colour, "colour of the sky": Blue = "blue", Grey = "grey"; }`. The first is
/// the default. A value without a name does not compile.
#[macro_export]
macro_rules! settings {
    ($($setting:ident, $what:literal: $first:ident = $first_name:literal $(, $value:ident = $name:literal)*;)+) => {$(
        impl $crate::setting::Setting for $setting {
            const WHAT: &'static str = $what;
            const ALL: &'static [Self] = &[Self::$first $(, Self::$value)*];
            const NAMES: &'static [&'static str] = &[$first_name $(, $name)*];
            const DEFAULT: Self = Self::$first;

            fn name(self) -> &'static str {
                Self::name(self)
            }
        }

        impl $setting {
            /// The name of the value.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$value => $name,)*
                }
            }
        }

        impl ::core::fmt::Display for $setting {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(self.name())
            }
        }
    )+};
}

settings! {
    ApicMode, "kind of local APIC": X2Apic = "x2apic", XApic = "xapic";
    DecodeCache, "way to cache decoded instructions":
        Bytes = "bytes", WriteProtect = "write-protect", WriteProtectTables = "write-protect-tables", Off = "off";
    DirtySource, "recorder of writes": Pml = "pml", Hardware = "hardware", WriteProtect = "write-protect";
    HyperV, "part of the Hyper-V interface": FlushIpi = "flush+ipi", Flush = "flush", Off = "off";
    Populate, "time to map memory": AtStart = "at-start", Touch2M = "touch-2M", Touch4K = "touch-4K";
    RemoteFlush, "way to flush TLBs": Hypercall = "hypercall", Ipi = "ipi";
    Role, "role of a VM": Guest = "guest", Parent = "parent";
    Split, "time to split large pages": Adaptive = "adaptive", Eager = "eager", Lazy = "lazy";
    TagScheme, "way to manage tags": Epoch = "epoch", Generation = "generation", FlushAlways = "flush-always";
}
