//! The format of the stage-2 tables of this back end: VMSAv8-64 (Arm ARM, chapter D8).

use aarch64_defs::features::GUEST_PHYSICAL_BITS as GUEST_BITS;
use stage2::Vmsa;

use super::{Features, features};

/// The kind of stage-2 tables of this architecture.
pub(crate) type Stage2Format = Vmsa;

/// Does the work with the tree. There is one format.
macro_rules! with_known_format {
    ($tree:expr, |$known:ident| $work:expr) => {{
        let $known = $tree;
        $work
    }};
}
pub(crate) use with_known_format;

/// The format of the stage-2 tables of guests.
///
/// # Panics
/// Before [`super::check`] has succeeded.
pub(crate) fn stage2_format() -> Stage2Format {
    let Features { physical_bits: bits, bbm, records_writes, .. } = features();
    let format = Vmsa::new(GUEST_BITS.min(bits), bits, false).expect("checked before any VM is made").with_bbm(bbm);
    if records_writes { format.with_recorded_writes() } else { format }
}
