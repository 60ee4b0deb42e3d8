//! The dirty log of a VM of the played host. Time passes by the second with each round, in which the guest writes as
//! many pages as the round has number times a thousand.

use abi::control::{Answer, Command, Refusal};
use abi::dirty::{Comparison, DirtyInfo, Round};
use abi::payload::DirtyLogging;

use crate::rig::SECOND;

/// How the log of one VM stands.
#[derive(Clone, Debug)]
pub(crate) struct PlayedLog {
    own: DirtyLogging,
    memory_pages: u64,
    running: Option<DirtyLogging>,
    mirror: bool,
    paused: bool,
    rounds: u64,
    pages: u64,
    /// Pages that a lost round left wrong in the mirror.
    lost: u64,
}

impl PlayedLog {
    /// Of a VM whose own settings these are.
    pub(crate) fn new(own: DirtyLogging, memory_bytes: u64) -> Self {
        let memory_pages = memory_bytes / 4096;
        Self { own, memory_pages, running: None, mirror: false, paused: false, rounds: 0, pages: 0, lost: 0 }
    }

    /// The answer to a command about it.
    pub(crate) fn answer(&mut self, command: &Command) -> Result<Answer, Refusal> {
        match *command {
            Command::Pause { .. } => self.paused = true,
            Command::Resume { .. } => self.paused = false,
            Command::DirtyStart { .. } if self.running.is_some() => return Err(Refusal::Logging),
            Command::DirtyStart { how, mirror, .. } => {
                *self = Self { paused: self.paused, ..Self::new(self.own, self.memory_pages * 4096) };
                (self.running, self.mirror) = (Some(how.unwrap_or(self.own)), mirror);
            }
            Command::DirtyInfo { .. } => return Ok(Answer::Dirty(self.info())),
            _ if self.running.is_none() => return Err(Refusal::NotLogging),
            Command::DirtyRound { lose, .. } => return Ok(Answer::Round(self.round(lose))),
            Command::DirtyCompare { .. } if !self.mirror => return Err(Refusal::NoMirror),
            Command::DirtyCompare { .. } if !self.paused => return Err(Refusal::NotPaused),
            Command::DirtyCompare { .. } => {
                let first = (self.lost > 0).then_some(0x20_1000);
                return Ok(Answer::Compared(Comparison { pages: self.memory_pages, different: self.lost, first }));
            }
            _ => self.running = None,
        }
        Ok(Answer::Done)
    }

    fn round(&mut self, lose: bool) -> Round {
        let written = if self.rounds == 0 { self.memory_pages } else { self.rounds * 1000 };
        let pages = written.max(self.lost);
        self.rounds += 1;
        self.pages += pages;
        self.lost = if lose { pages } else { 0 };
        let (number, at_ns) = (self.rounds, (10 + self.rounds) * SECOND);
        Round { number, at_ns, pages, nanos: 2_500_000, harvest_nanos: 1_500_000, flushes: 1 }
    }

    fn info(&self) -> DirtyInfo {
        DirtyInfo {
            at_ns: (10 + self.rounds) * SECOND,
            running: self.running,
            mirror: self.mirror,
            paused: self.paused,
            rounds: self.rounds,
            pages: self.pages,
            splits_ahead: 12,
            is_splitting: false,
            flushes: self.rounds,
            collapses: 3,
            is_collapsing: self.running.is_none() && self.rounds > 0,
            table_bytes: 64 << 10,
        }
    }
}
