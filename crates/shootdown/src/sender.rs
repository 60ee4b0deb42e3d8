//! The sender's half.

use crate::cpu_set::CpuSet;
use crate::presence::{Presence, Seen};
use crate::sync::{Ordering, fence};

/// Statistics of a shootdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Number of targets.
    pub targets: u32,
    /// Targets that used their guests' translations, so that the sender waited: those kicked out of their guests, and
    /// those whose instruction was being emulated.
    pub kicked: u32,
    /// Number of kicked pCPUs.
    pub pcpus: u32,
}

/// Runs one shootdown. On return, none of `targets` uses a translation from before the call.
///
/// `targets` are the vCPUs other than the caller's own; the function walks it twice. `publish` leaves the request where
/// the target finds it before its next entry. `kick` makes pCPUs leave their guests. `meanwhile` is the caller's own
/// flush. `relax` is called between two reads, with the pCPU that is waited for; it may kick it again.
///
/// The caller holds no lock that a target may need to leave its guest. It has begun nothing that the holder of such a
/// lock waits for, and no other vCPU waits for its pCPU.
pub fn run<'a, T: 'a>(
    targets: impl Iterator<Item = &'a T> + Clone,
    presence: impl Fn(&'a T) -> &'a Presence,
    publish: impl FnMut(&'a T),
    kick: impl FnOnce(CpuSet),
    meanwhile: impl FnOnce(),
    mut relax: impl FnMut(u32),
) -> Outcome {
    targets.clone().for_each(publish);

    // The requests are visible before this code reads who is in the guest: a target that enters after the read finds
    // its request.
    fence(Ordering::SeqCst);

    // One entry for each pCPU: the first target seen there. If a second one is seen there, the first has left
    // meanwhile, and the second entered after the first was read, so it has met its request. Neither needs a wait; the
    // first stays in the list because its wait ends at once. This pCPU is never in the list: the vCPU that ran here
    // left before the call.
    let mut seen: [Option<(&Presence, Seen)>; CpuSet::CAPACITY as usize] = [None; CpuSet::CAPACITY as usize];
    let mut inside = CpuSet::new();
    let mut to_kick = CpuSet::new();
    let mut outcome = Outcome::default();
    for target in targets {
        outcome.targets += 1;
        let presence = presence(target);
        let now = presence.look();
        if now.is_inside()
            && let Some(slot @ None) = seen.get_mut(now.cpu() as usize)
        {
            *slot = Some((presence, now));
            inside.insert(now.cpu());
            if now.needs_kick() {
                to_kick.insert(now.cpu());
            }
        }
    }

    outcome.kicked = inside.len();
    outcome.pcpus = to_kick.len();
    if !to_kick.is_empty() {
        kick(to_kick);
    }

    meanwhile();

    for (presence, then) in inside.iter().filter_map(|cpu| seen[cpu as usize]) {
        while presence.look() == then {
            relax(then.cpu());
        }
    }
    outcome
}
