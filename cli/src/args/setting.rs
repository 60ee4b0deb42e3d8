//! Options that take a setting's value by its name.

use abi::setting::Setting;
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Reads a setting's value. `--help` lists the names, and an error names the nearest.
pub(super) fn setting<S: Setting + Send + Sync>() -> impl TypedValueParser<Value = S> {
    PossibleValuesParser::new(S::NAMES).try_map(|text| S::named(&text).ok_or("has no such name"))
}
