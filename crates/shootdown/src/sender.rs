//! The sender's half.

use crate::cpu_set::CpuSet;
use crate::presence::{Presence, Seen};
use crate::sync::{Ordering, fence};

/// What a shootdown had to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Targets.
    pub targets: u32,
    /// Targets that used their guests' translations, and were waited for: those that were kicked out of their guests,
    /// and those for which an instruction was being emulated.
    pub kicked: u32,
    /// pCPUs that were interrupted.
    pub pcpus: u32,
}

/// Runs one shootdown. On return, none of `targets` uses a translation from before the call, or will.
///
/// `targets` are the vCPUs other than the caller's own; it is walked twice. `publish` leaves the request where the
/// target finds it before its next entry. `kick` makes pCPUs leave their guests, `meanwhile` is the caller's own
/// flush, and `relax` is called between two looks with the pCPU that is waited for; it may kick it again.
///
/// The caller holds no lock that a target may need to leave its guest, nor has it begun anything that the holder of such a lock
/// waits for, and there is nobody whom it has to let run.
pub fn run<'a, T: 'a>(
    targets: impl Iterator<Item = &'a T> + Clone,
    presence: impl Fn(&'a T) -> &'a Presence,
    publish: impl FnMut(&'a T),
    kick: impl FnOnce(CpuSet),
    meanwhile: impl FnOnce(),
    mut relax: impl FnMut(u32),
) -> Outcome {
    targets.clone().for_each(publish);

    // The requests are visible before we look who is in the guest: one that enters after our look finds its request.
    fence(Ordering::SeqCst);

    // One for each pCPU, the first that is seen there. If another is seen there as well, the first has left
    // meanwhile; so the other has entered after our look at the first, and has met its request. (Either needs no
    // more; the first is kept because there is nothing left to wait for.) This pCPU is never among them: what ran
    // here last left before the caller came.
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
