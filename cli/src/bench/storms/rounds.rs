//! A VM that storms is logged: dirty logs one after the other, of some rounds each, until it has ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use abi::control::{Answer, Command, Refusal, VmInfo, VmState};
use abi::dirty::DirtyInfo;

use crate::control::{Client, refusal};
use crate::failure::Failure;
use crate::{share, stats};

/// Rounds of a log, without a pause between them. The log's end joins the large pages, so the next log splits them
/// again.
pub(super) const ROUNDS: u64 = 8;
/// Time limit for the start of a host, and for its end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Logs what the VM `name` writes, on the host of process `pid`, until the VM or the host has ended. Returns the number
/// of rounds.
pub(super) fn log(pid: u32, has_ended: &AtomicBool, name: &str) -> Result<u64, Failure> {
    let Some(mut client) = attach(pid, has_ended)? else { return Ok(0) };
    let mut rounds = 0;
    match log_all(&mut client, name, &mut rounds) {
        Ok(()) => Ok(rounds),
        // The host may be gone a moment before its process.
        Err(failure) => {
            let deadline = Instant::now() + PATIENCE;
            while !has_ended.load(Ordering::Relaxed) {
                if Instant::now() > deadline {
                    return Err(failure);
                }
                thread::sleep(PAUSE);
            }
            Ok(rounds)
        }
    }
}

fn attach(pid: u32, has_ended: &AtomicBool) -> Result<Option<Client>, Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match share::attach(Some(pid)) {
            Ok(client) => return Ok(Some(client)),
            Err(_) if has_ended.load(Ordering::Relaxed) => return Ok(None),
            Err(failure) if Instant::now() > deadline => return Err(failure),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn log_all(client: &mut Client, name: &str, rounds: &mut u64) -> Result<(), Failure> {
    let vm = loop {
        let runs = |vm: &&VmInfo| vm.name == name && vm.state == VmState::Running;
        match stats::list(client)?.iter().find(runs) {
            Some(vm) => break vm.number,
            None => thread::sleep(PAUSE),
        }
    };
    loop {
        let begun = client.ask(Command::DirtyStart { vm, how: None, mirror: false })?;
        let Some(Answer::Done) = unless_over(begun)? else { return Ok(()) };
        for _ in 0..ROUNDS {
            let Some(Answer::Round(_)) = unless_over(client.ask(Command::DirtyRound { vm, lose: false })?)? else {
                return Ok(());
            };
            *rounds += 1;
        }
        let Some(Answer::Done) = unless_over(client.ask(Command::DirtyStop { vm })?)? else { return Ok(()) };
        while let Some(Answer::Dirty(DirtyInfo { is_collapsing: true, .. })) =
            unless_over(client.ask(Command::DirtyInfo { vm })?)?
        {
            thread::sleep(PAUSE);
        }
    }
}

/// `None` if the VM has ended.
fn unless_over(answer: Result<Answer, Refusal>) -> Result<Option<Answer>, Failure> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Refusal::NotRunning | Refusal::NoSuchVm) => Ok(None),
        Err(other) => Err(stats::unexpected(Err(refusal(other)))),
    }
}
