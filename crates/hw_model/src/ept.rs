//! A machine with Intel's rules for cached translations (SDM vol. 3C, 29.4).
//!
//! With EPT a processor caches two kinds of them. *Guest-physical* mappings, from GPA to HPA, belong to a pCPU and a
//! root of stage 2. *Combined* mappings, from GVA to HPA, belong to a pCPU, a VPID and a root. The trap is that a new
//! combined mapping may be made from an old guest-physical one: to drop the first kind after a change of stage 2 is not
//! enough, although all translations that the guest has used are gone.
//!
//! As [`Machine`](crate::Machine), this one drops nothing by itself.
//!
//! ```
//! use hw_model::ept::{Eptp, Machine, Tables, Vpid};
//!
//! let mut machine = Machine::new(1);
//! let (vpid, root) = (Vpid(1), Eptp(0x5000));
//! let before = Tables { guest: |gva| Some(gva), stage2: |_| Some(1) };
//! assert_eq!(machine.access(0, vpid, root, 7, &before), [Some(1)]);
//!
//! // Stage 2 changes.
//! let after = Tables { guest: |gva| Some(gva), stage2: |_| Some(2) };
//! machine.invvpid(0, vpid);
//! assert!(machine.access(0, vpid, root, 7, &after).contains(&Some(1)), "made from an old one");
//! machine.invept(0, root);
//! assert_eq!(machine.access(0, vpid, root, 7, &after), [Some(2)]);
//! ```

use std::collections::BTreeSet;

/// The number that separates the entries of vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vpid(pub u32);

/// A root of stage 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Eptp(pub u64);

/// The tables as they are in memory now, by page number. `None`: nothing is mapped.
#[derive(Clone, Copy, Debug)]
pub struct Tables<G, S> {
    /// The guest's, from GVA to GPA.
    pub guest: G,
    /// Stage 2, from GPA to HPA.
    pub stage2: S,
}

/// pCPUs and what they have cached.
#[derive(Clone, Debug)]
pub struct Machine {
    cpus: Vec<Cached>,
}

#[derive(Clone, Debug, Default)]
struct Cached {
    /// Root, GPA, HPA.
    guest_physical: BTreeSet<(Eptp, u64, u64)>,
    /// VPID, root, GVA, HPA.
    combined: BTreeSet<(Vpid, Eptp, u64, u64)>,
}

impl Machine {
    /// A machine that has nothing cached.
    #[must_use]
    pub fn new(cpus: usize) -> Self {
        Self { cpus: vec![Cached::default(); cpus] }
    }

    /// A vCPU accesses `gva`, or the processor walks for it by itself. Returns all pages that the manual lets it see,
    /// in order; `None` is a page fault or an EPT violation.
    pub fn access<G, S>(
        &mut self,
        cpu: usize,
        vpid: Vpid,
        root: Eptp,
        gva: u64,
        tables: &Tables<G, S>,
    ) -> Vec<Option<u64>>
    where
        G: Fn(u64) -> Option<u64>,
        S: Fn(u64) -> Option<u64>,
    {
        let cached = &mut self.cpus[cpu];
        let mut seen = BTreeSet::new();
        match (tables.guest)(gva) {
            None => {
                seen.insert(None);
            }
            Some(gpa) => {
                let walked = (tables.stage2)(gpa);
                if let Some(hpa) = walked {
                    cached.guest_physical.insert((root, gpa, hpa));
                }
                let from = (root, gpa, 0)..=(root, gpa, u64::MAX);
                let pages: Vec<_> = cached.guest_physical.range(from).map(|&(.., hpa)| hpa).collect();
                cached.combined.extend(pages.into_iter().map(|hpa| (vpid, root, gva, hpa)));
                if walked.is_none() {
                    seen.insert(None);
                }
            }
        }
        let from = (vpid, root, gva, 0)..=(vpid, root, gva, u64::MAX);
        seen.extend(cached.combined.range(from).map(|&(.., hpa)| Some(hpa)));
        seen.into_iter().collect()
    }

    /// INVVPID of one VPID, or what a guest's own MOV to CR3 does without PCIDs.
    pub fn invvpid(&mut self, cpu: usize, vpid: Vpid) {
        self.cpus[cpu].combined.retain(|(owner, ..)| *owner != vpid);
    }

    /// INVVPID of one address of a VPID, or the guest's own INVLPG.
    pub fn invvpid_address(&mut self, cpu: usize, vpid: Vpid, gva: u64) {
        self.cpus[cpu].combined.retain(|(owner, _, page, _)| *owner != vpid || *page != gva);
    }

    /// INVVPID of all VPIDs.
    pub fn invvpid_all(&mut self, cpu: usize) {
        self.cpus[cpu].combined.clear();
    }

    /// INVEPT of one root: also the combined mappings that were made with it, of any VPID.
    pub fn invept(&mut self, cpu: usize, root: Eptp) {
        let cached = &mut self.cpus[cpu];
        cached.guest_physical.retain(|(owner, ..)| *owner != root);
        cached.combined.retain(|(_, owner, ..)| *owner != root);
    }

    /// INVEPT of all roots.
    pub fn invept_all(&mut self, cpu: usize) {
        self.cpus[cpu] = Cached::default();
    }

    /// An EPT violation at `gpa`, by an access to `gva`: it drops the guest-physical mappings of that page, and the
    /// combined ones of that address (29.4.3.1).
    pub fn violation(&mut self, cpu: usize, vpid: Vpid, root: Eptp, gva: u64, gpa: u64) {
        let cached = &mut self.cpus[cpu];
        cached.guest_physical.retain(|(owner, page, _)| (*owner, *page) != (root, gpa));
        cached.combined.retain(|(owner, with, page, _)| (*owner, *with, *page) != (vpid, root, gva));
    }
}
