//! The measured cases: sizes of VMs, and vCPUs per pCPU.

use crate::args::{Targets, TlbArgs};
use crate::bench::circumstances::host_cores;
use crate::failure::Failure;

/// A size of the VM and of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point {
    /// vCPUs of the VM.
    pub(super) vcpus: u32,
    /// vCPUs per pCPU.
    pub(super) overcommit: u32,
}

impl Point {
    /// The sizes that `args` name; none without such options.
    pub(super) fn asked_for(args: &TlbArgs) -> Result<Vec<Self>, Failure> {
        if args.vcpus.is_empty() && args.overcommit.is_empty() {
            return Ok(Vec::new());
        }
        Self::all(&or_all(&args.vcpus, &ALL_VCPUS), &or_all(&args.overcommit, &ALL_OVERCOMMITS))
    }

    fn all(vcpus: &[u32], overcommits: &[u32]) -> Result<Vec<Self>, Failure> {
        let possible = 2..=abi::payload::MAX_VCPUS;
        if let Some(odd) = vcpus.iter().find(|vcpus| !possible.contains(vcpus)) {
            return Err(Failure::bad_input(format!("option '--vcpus': {odd}; a shootdown needs 2 vCPUs or more"))
                .help(format!("at most {}", possible.end())));
        }
        let points: Vec<Self> = vcpus.iter().flat_map(|&vcpus| divided(vcpus, overcommits)).collect();
        if points.is_empty() {
            return Err(Failure::bad_input("option '--overcommit': divides no number of vCPUs")
                .help("vCPUs / overcommit = pCPUs, 1 or more: 4 vCPUs can be overcommitted 1, 2 or 4 times"));
        }
        Ok(points)
    }

    /// pCPUs of the host.
    pub(super) const fn pcpus(self) -> u32 {
        self.vcpus / self.overcommit
    }

    /// Whether the pCPUs outnumber the cores of this computer, which then take turns at being pCPUs.
    pub(super) fn is_cramped(self) -> bool {
        self.pcpus() > host_cores()
    }
}

/// Everything that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Latencies.
    pub(super) latency: Vec<(Point, Targets)>,
    /// Exits per shootdown.
    pub(super) exits: Vec<Point>,
    /// Instructions per shootdown: vCPUs on one pCPU, and whether busy targets are measured too.
    pub(super) instructions: Vec<(u32, Targets)>,
}

const fn at(vcpus: u32, overcommit: u32) -> Point {
    Point { vcpus, overcommit }
}

/// Cases that two cores measure in some minutes.
const USUAL_BUSY: [Point; 8] = [at(2, 1), at(4, 1), at(4, 2), at(8, 1), at(8, 4), at(16, 4), at(16, 8), at(48, 8)];
const USUAL_IDLE: [Point; 3] = [at(2, 1), at(8, 1), at(8, 4)];
/// Counts are right even when cores take turns at being pCPUs.
const USUAL_EXITS: [Point; 7] = [at(2, 1), at(4, 1), at(4, 2), at(8, 1), at(8, 4), at(16, 1), at(48, 1)];

/// The whole.
const ALL_VCPUS: [u32; 6] = [2, 4, 8, 16, 48, 96];
const ALL_OVERCOMMITS: [u32; 4] = [1, 2, 4, 8];
const ALL_TARGETS: [Targets; 2] = [Targets::Busy, Targets::Idle];

/// With more vCPUs on one pCPU, each of which computes for its whole slice, a shootdown by IPI takes too long.
const MOST_BUSY_ON_ONE: u32 = 8;
/// QEMU gives a host no more.
const MOST_PCPUS: u32 = 255;

impl Matrix {
    /// The cases that `args` ask for.
    pub(super) fn of(args: &TlbArgs) -> Result<Self, Failure> {
        if !args.full && args.vcpus.is_empty() && args.overcommit.is_empty() && args.targets.is_empty() {
            return Ok(Self::usual());
        }
        let vcpus = or_all(&args.vcpus, &ALL_VCPUS);
        let points = Point::all(&vcpus, &or_all(&args.overcommit, &ALL_OVERCOMMITS))?;
        let targets = if args.targets.is_empty() { ALL_TARGETS.to_vec() } else { args.targets.clone() };
        let busy = targets.contains(&Targets::Busy);
        Ok(Self {
            latency: points.iter().flat_map(|&point| targets.iter().map(move |&targets| (point, targets))).collect(),
            exits: if busy { points } else { Vec::new() },
            instructions: on_one_pcpu(&vcpus, &targets),
        })
    }

    fn usual() -> Self {
        let busy = USUAL_BUSY.map(|point| (point, Targets::Busy));
        let idle = USUAL_IDLE.map(|point| (point, Targets::Idle));
        Self {
            latency: busy.into_iter().chain(idle).collect(),
            exits: USUAL_EXITS.to_vec(),
            instructions: on_one_pcpu(&[2, 4, 8, 16, 48], &ALL_TARGETS),
        }
    }
}

fn or_all(given: &[u32], all: &[u32]) -> Vec<u32> {
    if given.is_empty() { all.to_vec() } else { given.to_vec() }
}

/// Points for `vcpus` with a whole number of pCPUs.
fn divided(vcpus: u32, overcommits: &[u32]) -> impl Iterator<Item = Point> {
    let fits = move |point: &Point| {
        point.overcommit > 0 && vcpus.is_multiple_of(point.overcommit) && (1..=MOST_PCPUS).contains(&point.pcpus())
    };
    overcommits.iter().map(move |&overcommit| Point { vcpus, overcommit }).filter(fits)
}

fn on_one_pcpu(vcpus: &[u32], targets: &[Targets]) -> Vec<(u32, Targets)> {
    let pairs = targets.iter().flat_map(|&targets| vcpus.iter().map(move |&vcpus| (vcpus, targets)));
    pairs.filter(|&(vcpus, targets)| targets == Targets::Idle || vcpus <= MOST_BUSY_ON_ONE).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TlbArgs,
    }

    fn matrix(options: &[&str]) -> Result<Matrix, Failure> {
        let line = Line::try_parse_from([&["x"], options].concat()).expect("options are known");
        Matrix::of(&line.args)
    }

    #[test]
    fn pcpus_are_whole_and_what_cannot_be_divided_is_left_out() {
        let matrix = matrix(&["--vcpus=2,6", "--overcommit=1,3,4,0", "--targets=idle"]).expect("is good");
        let points: Vec<_> = matrix.latency.iter().map(|(point, _)| (point.vcpus, point.pcpus())).collect();
        assert_eq!(points, [(2, 2), (6, 6), (6, 2)]);
        assert!(matrix.latency.iter().all(|(_, targets)| *targets == Targets::Idle));
        assert!(matrix.exits.is_empty());
        assert_eq!(matrix.instructions, [(2, Targets::Idle), (6, Targets::Idle)]);
    }

    #[test]
    fn whole_matrix_has_every_size_that_exists_busy_and_idle() {
        let matrix = matrix(&["--full"]).expect("is good");
        // 2 vCPUs can be divided by 1 and 2, 4 by 1, 2 and 4, the others by all four.
        assert_eq!(matrix.exits.len(), 2 + 3 + 4 * 4);
        assert_eq!(matrix.latency.len(), 2 * matrix.exits.len());
        assert!(matrix.exits.contains(&at(96, 8)));
    }

    #[test]
    fn usual_sizes_are_divisible() {
        for point in Matrix::usual().latency.iter().map(|(point, _)| *point).chain(USUAL_EXITS) {
            assert_eq!(point.pcpus() * point.overcommit, point.vcpus);
        }
    }

    #[test]
    fn sizes_without_a_target_or_a_pcpu_are_refused() {
        assert!(matrix(&["--vcpus=1"]).expect_err("has no target").to_string().contains("2 vCPUs or more"));
        assert!(matrix(&["--vcpus=2", "--overcommit=4"]).expect_err("has no pCPU").to_string().contains("divides no"));
    }
}
