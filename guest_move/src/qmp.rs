//! QEMU's machine protocol: a command for each line, and its answer. Events come in between.

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::kicks::{self, Kicks};
use crate::peer::CANCELLED;

/// A QEMU.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
    /// A line that has not come to its end.
    begun: Vec<u8>,
    /// Whether it has said that a migration is a step further.
    has_news: bool,
    /// The round of a migration by which it reckons how long the guest may be stopped, and the last one that it has
    /// told.
    reckoned: u64,
    round: u64,
    /// The migration that was begun here.
    pace: Option<Pace>,
    pid: u32,
    /// Of the vCPUs.
    threads: Vec<u32>,
    /// Kicks them as long as it is there.
    kicks: Option<Sender<()>>,
}

/// How fast a guest is sent, and for how long it may be stopped in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Bytes a second, at most; 0 for any number, `None` for QEMU's own.
    pub(crate) bandwidth: Option<u64>,
    /// Milliseconds for which the guest may be stopped in the end, as QEMU reckons.
    pub(crate) downtime: u64,
    /// Whether QEMU keeps the vCPUs from their work for more and more of the time, if they write faster than it sends.
    pub(crate) slows_down: bool,
}

impl Pace {
    /// QEMU's own.
    pub(crate) const DOWNTIME: u64 = 300;

    /// Milliseconds for which the guest may be stopped at the end of this round: an eighth of the limit at first, and
    /// twice as long after each round.
    ///
    /// QEMU stops a guest as soon as the limit lets it, even if one short round more would leave next to nothing. A
    /// guest that writes too much for that has the whole limit from the fourth round on.
    fn downtime_in(&self, round: u64) -> u64 {
        const WHOLE: u64 = 4;
        (self.downtime >> WHOLE.saturating_sub(round.max(1))).max(1)
    }
}

/// Seconds until a QEMU that does not answer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often somebody who waits is told how far it is.
const PROGRESS: Duration = Duration::from_secs(2);
/// How often QEMU is asked how far a migration is, if it says nothing.
const LOOK: Duration = Duration::from_millis(500);
/// How often QEMU is asked whether it is done with something short.
const PERIOD: Duration = Duration::from_millis(5);

impl Qmp {
    /// The QEMU that listens there, and has this number.
    pub(crate) fn connect(socket: &Path, pid: u32) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| format!("no QEMU at {}", socket.display()))?;
        let mut qmp = Self::over(stream)?;
        let vcpus = qmp.call("query-cpus-fast", json!({}))?;
        let threads = vcpus.as_array().into_iter().flatten().filter_map(|vcpu| vcpu["thread-id"].as_u64());
        (qmp.pid, qmp.threads) = (pid, threads.filter_map(|thread| u32::try_from(thread).ok()).collect());
        Ok(qmp)
    }

    fn over(stream: UnixStream) -> Result<Self> {
        let mut qmp = Self {
            stream: BufReader::new(stream),
            begun: Vec::new(),
            has_news: false,
            reckoned: 0,
            round: 0,
            pace: None,
            pid: 0,
            threads: Vec::new(),
            kicks: None,
        };
        let greeting = qmp.line()?;
        greeting.get("QMP").context("this is no monitor of QEMU")?;
        qmp.call("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Gives a command, and returns the answer.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{line}").with_context(|| format!("QEMU is gone, at {command}"))?;
        loop {
            let mut line = self.line().with_context(|| format!("no answer to {command}"))?;
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = line.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("refused"));
            }
            self.notice(&line);
        }
    }

    fn line(&mut self) -> Result<Value> {
        self.line_within(PATIENCE)?.context("QEMU says nothing")
    }

    /// The next line, if one comes in this time.
    fn line_within(&mut self, time: Duration) -> Result<Option<Value>> {
        self.stream.get_mut().set_read_timeout(Some(time))?;
        match self.stream.read_until(b'\n', &mut self.begun) {
            Ok(_) if self.begun.ends_with(b"\n") => {
                let line = std::mem::take(&mut self.begun);
                serde_json::from_slice(&line).map(Some).context("QEMU says something else than JSON")
            }
            Ok(_) => bail!("QEMU has closed its monitor"),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(error) => Err(error).context("QEMU says nothing"),
        }
    }

    /// Takes note of an event.
    fn notice(&mut self, line: &Value) {
        match line["event"].as_str() {
            Some("MIGRATION") => self.has_news = true,
            Some("MIGRATION_PASS") => {
                self.round = line["data"]["pass"].as_u64().unwrap_or_default();
                self.has_news = true;
            }
            _ => {}
        }
    }

    /// Whether the guest runs.
    pub(crate) fn runs(&mut self) -> Result<bool> {
        Ok(self.status()? == "running")
    }

    /// Whether the guest runs, is `paused`, waits for its state (`inmigrate`).
    pub(crate) fn status(&mut self) -> Result<String> {
        let answer = self.call("query-status", json!({}))?;
        Ok(answer["status"].as_str().unwrap_or("unknown").to_owned())
    }

    /// How the guest and its migration are.
    pub(crate) fn report(&mut self) -> Result<Value> {
        Ok(json!({ "guest": self.status()?, "migration": self.migration()?["status"] }))
    }

    /// Refuses if somebody migrates the guest already. Another migration would be ended by what ends a second one.
    pub(crate) fn must_not_migrate(&mut self) -> Result<()> {
        let now = self.call("query-migrate", json!({}))?;
        ensure!(!is_migrating(&now), "the guest moves already, by another command");
        Ok(())
    }

    /// Begins a migration to this place. It will wait when the guest is stopped and only the rest is left.
    pub(crate) fn begin_to_send(&mut self, to: &str, pace: Pace) -> Result<()> {
        self.kick();
        let capabilities = json!([
            { "capability": "pause-before-switchover", "state": true },
            { "capability": "auto-converge", "state": pace.slows_down },
            { "capability": "events", "state": true },
        ]);
        self.call("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        if let Some(bandwidth) = pace.bandwidth {
            self.call("migrate-set-parameters", json!({ "max-bandwidth": bandwidth }))?;
        }
        self.call("migrate-set-parameters", json!({ "downtime-limit": pace.downtime_in(0) }))?;
        self.call("migrate", json!({ "uri": to }))?;
        self.pace = Some(pace);
        Ok(())
    }

    /// Lets QEMU stop the guest for longer, if a round has not left little enough.
    fn follow_round(&mut self) -> Result<()> {
        let (Some(pace), round) = (self.pace, self.round) else { return Ok(()) };
        let before = std::mem::replace(&mut self.reckoned, round);
        if pace.downtime_in(round) != pace.downtime_in(before) {
            self.call("migrate-set-parameters", json!({ "downtime-limit": pace.downtime_in(round) }))?;
        }
        Ok(())
    }

    /// Waits until the migration has this status, but not longer than `limit`, nor after somebody has set `cancelled`.
    /// Returns all that QEMU tells about it then.
    pub(crate) fn wait_for(&mut self, status: &str, limit: Option<Duration>, cancelled: &AtomicBool) -> Result<Value> {
        let (began, mut told) = (Instant::now(), Instant::now());
        loop {
            self.follow_round()?;
            let now = self.migration()?;
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                eprintln!("guest-move: {} s, {}", began.elapsed().as_secs(), progress(&now["ram"]));
            }
            match now["status"].as_str() {
                Some(reached) if reached == status => return Ok(now),
                Some(end @ ("failed" | "cancelled" | "completed")) => {
                    let why = now["error-desc"].as_str().unwrap_or("QEMU does not say why");
                    bail!("the migration has {end}: {why}");
                }
                _ if cancelled.load(Ordering::Relaxed) => bail!(CANCELLED),
                _ if limit.is_some_and(|limit| began.elapsed() > limit) => {
                    bail!("given up after {} s: {}", began.elapsed().as_secs(), progress(&now["ram"]));
                }
                _ => self.wait_for_news()?,
            }
        }
    }

    /// Waits until QEMU tells that the migration is a step further, or for a while. Each question would cost it time.
    fn wait_for_news(&mut self) -> Result<()> {
        let began = Instant::now();
        while !std::mem::take(&mut self.has_news) && began.elapsed() < LOOK {
            if let Some(line) = self.line_within(LOOK)? {
                self.notice(&line);
            }
        }
        Ok(())
    }

    /// What QEMU tells about the migration.
    fn migration(&mut self) -> Result<Value> {
        self.call("query-migrate", json!({}))
    }

    /// Kicks the vCPUs again and again from now on, because QEMU is about to stop them.
    fn kick(&mut self) {
        let (pid, threads) = (self.pid, self.threads.clone());
        self.kicks.get_or_insert_with(|| {
            let (until, ended) = channel::<()>();
            std::thread::spawn(move || {
                let mut kicks = Kicks::of(pid);
                while ended.recv_timeout(kicks::PERIOD) == Err(RecvTimeoutError::Timeout) {
                    kicks.kick(threads.iter().copied());
                }
            });
            until
        });
    }

    /// Stops the guest.
    pub(crate) fn stop(&mut self) -> Result<()> {
        self.kick();
        self.call("stop", json!({})).map(|_| ())
    }

    /// Whether a migration was begun here. Another one is not ours to end.
    pub(crate) fn sends(&self) -> bool {
        self.pace.is_some()
    }

    /// Ends a migration that has not succeeded. QEMU may still wait for a vCPU that has lost its kick, if whoever began
    /// the migration no longer kicks.
    pub(crate) fn cancel(&mut self) -> Result<()> {
        self.kick();
        let until = Instant::now() + PATIENCE;
        self.call("migrate_cancel", json!({}))?;
        while is_migrating(&self.migration()?) {
            ensure!(Instant::now() < until, "its migration does not end");
            std::thread::sleep(PERIOD);
        }
        Ok(())
    }

    /// Lets the guest go on if QEMU does not do so by itself after a migration that was cancelled.
    pub(crate) fn go_on_here(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.runs()? {
            let refused = self.go_on();
            if Instant::now() >= until {
                return refused.context("it stays stopped");
            }
            std::thread::sleep(PERIOD);
        }
        Ok(())
    }

    /// Lets the migration go on after the guest was stopped.
    pub(crate) fn switch_over(&mut self) -> Result<()> {
        self.call("migrate-continue", json!({ "state": "pre-switchover" })).map(|_| ())
    }

    /// Begins to load a guest from this place. QEMU was started with `-incoming defer` and `-S`.
    pub(crate) fn begin_to_receive(&mut self, from: &str) -> Result<()> {
        self.call("migrate-incoming", json!({ "uri": from })).map(|_| ())
    }

    /// Waits until the guest is loaded. It does not run then.
    pub(crate) fn wait_until_loaded(&mut self) -> Result<()> {
        loop {
            match self.status()?.as_str() {
                "inmigrate" => std::thread::sleep(PERIOD),
                "paused" | "prelaunch" => return Ok(()),
                other => bail!("the guest is {other} as soon as it is loaded: start its QEMU with -S"),
            }
        }
    }

    /// Where a guest's memory from address zero on is in QEMU's address space.
    pub(crate) fn address_of_memory(&mut self) -> Result<u64> {
        let answer = self.call("human-monitor-command", json!({ "command-line": "gpa2hva 0" }))?;
        let text = answer.as_str().unwrap_or_default();
        let address = text.trim().rsplit_once(" is 0x").and_then(|(_, digits)| u64::from_str_radix(digits, 16).ok());
        address.with_context(|| format!("QEMU does not tell where the guest's memory is: {text}"))
    }

    /// Lets the guest run.
    pub(crate) fn go_on(&mut self) -> Result<()> {
        self.call("cont", json!({})).map(|_| ())
    }

    /// Ends QEMU.
    pub(crate) fn quit(&mut self) -> Result<()> {
        self.call("quit", json!({})).map(|_| ())
    }
}

/// How far a migration is, by QEMU's answer about memory.
fn progress(ram: &Value) -> String {
    let mib = |key: &str| ram[key].as_u64().unwrap_or_default() >> 20;
    format!(
        "round {}, {} MiB sent, {} MiB left; the guest writes {} pages a second",
        ram["dirty-sync-count"],
        mib("transferred"),
        mib("remaining"),
        ram["dirty-pages-rate"]
    )
}

/// Whether a migration has begun and not ended, by QEMU's answer.
fn is_migrating(answer: &Value) -> bool {
    !matches!(answer["status"].as_str(), None | Some("none" | "failed" | "cancelled" | "completed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A QEMU that says these lines: the first one at once, each further one after a command.
    fn qemu(lines: &[&'static str]) -> Result<Qmp> {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let lines = lines.to_vec();
        std::thread::spawn(move || {
            let mut stream = BufReader::new(theirs);
            for line in lines {
                writeln!(stream.get_mut(), "{line}").expect("somebody listens");
                let mut command = String::new();
                if stream.read_line(&mut command).expect("is text") == 0 {
                    return;
                }
            }
        });
        Qmp::over(ours)
    }

    const HELLO: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

    #[test]
    fn events_before_an_answer_are_noticed() {
        let done = r#"{"return": {}}"#;
        let paused = "{\"event\": \"MIGRATION\"}\n{\"return\": {\"status\": \"paused\"}}";
        let mut qmp = qemu(&[HELLO, done, paused]).expect("says hello");
        assert!(!qmp.has_news);
        assert_eq!(qmp.status().expect("is answered"), "paused");
        assert!(qmp.has_news);
    }

    #[test]
    fn refusal_of_a_command_says_why() {
        let refused = r#"{"error": {"class": "GenericError", "desc": "There's a migration process in progress"}}"#;
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, refused]).expect("says hello");
        let error = qmp.go_on().expect_err("is refused").to_string();
        assert_eq!(error, "cont: There's a migration process in progress");
        assert!(qemu(&[r#"{"hello": 1}"#]).is_err());
    }

    #[test]
    fn migration_that_fails_says_why() {
        let active = r#"{"return": {"status": "active"}}"#;
        let failed = r#"{"return": {"status": "failed", "error-desc": "no route"}}"#;
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, active, failed]).expect("says hello");
        let error = qmp.wait_for("pre-switchover", None, &AtomicBool::new(false)).expect_err("has failed").to_string();
        assert_eq!(error, "the migration has failed: no route");
    }

    #[test]
    fn second_migration_is_refused_while_one_runs() {
        let answers = ["{\"return\": {}}", "{\"return\": {\"status\": \"active\"}}", "{\"return\": {}}"];
        let mut qmp = qemu(&[HELLO, answers[0], answers[1], answers[2]]).expect("says hello");
        assert!(qmp.must_not_migrate().is_err());
        assert!(qmp.must_not_migrate().is_ok(), "there was none");
    }

    #[test]
    fn guest_stays_once_its_migration_has_ended_and_it_runs() {
        let done = "{\"return\": {}}";
        let mut qmp = qemu(&[
            HELLO,
            done,
            done, // migrate_cancel
            "{\"return\": {\"status\": \"cancelling\"}}",
            "{\"return\": {\"status\": \"cancelled\"}}",
            "{\"return\": {\"status\": \"finish-migrate\"}}",
            "{\"error\": {\"desc\": \"not yet\"}}", // cont
            "{\"return\": {\"status\": \"postmigrate\"}}",
            done,
            "{\"return\": {\"status\": \"running\"}}",
        ])
        .expect("says hello");
        qmp.cancel().expect("ends");
        qmp.go_on_here().expect("goes on in the end");
    }

    #[test]
    fn event_of_a_migration_ends_a_wait() {
        let migration = r#"{"event": "MIGRATION", "data": {}}"#;
        let pass = r#"{"event": "MIGRATION_PASS", "data": {"pass": 2}}"#;
        let lines = [migration, r#"{"return": {"status": "running"}}"#, pass].join("\n").leak();
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, lines]).expect("says hello");
        assert!(qmp.runs().expect("is answered"));
        qmp.wait_for_news().expect("QEMU is there");
        assert_eq!(qmp.round, 0, "the event came before the answer, and nothing was waited for");
        qmp.wait_for_news().expect("QEMU is there");
        assert_eq!(qmp.round, 2, "what comes during a wait is noticed");
    }

    #[test]
    fn guest_may_be_stopped_for_longer_only_if_rounds_leave_too_much() {
        let pace = Pace { bandwidth: None, downtime: 300, slows_down: false };
        assert_eq!([0, 1, 2, 3, 4, 99].map(|round| pace.downtime_in(round)), [37, 37, 75, 150, 300, 300]);
        assert_eq!(Pace { downtime: 0, ..pace }.downtime_in(9), 1, "with no time at all it would never move");

        let pass = r#"{"event": "MIGRATION_PASS", "data": {"pass": 4}}"#;
        let active = [pass, r#"{"return": {"status": "active"}}"#].join("\n").leak();
        let refused = r#"{"error": {"desc": "downtime-limit"}}"#;
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, active, refused]).expect("says hello");
        qmp.pace = Some(pace);
        assert!(qmp.follow_round().is_ok(), "QEMU is not asked before a round has ended");
        qmp.migration().expect("is answered");
        assert!(qmp.follow_round().is_err(), "it is asked now");
    }

    #[test]
    fn address_of_memory_is_read_out_of_qemus_sentence() {
        let said = r#"{"return": "Host virtual address for 0x0 (pc.ram) is 0x7f00a0000000\r\n"}"#;
        let done = "{\"return\": {}}";
        let mut qmp = qemu(&[HELLO, done, said, done]).expect("says hello");
        assert_eq!(qmp.address_of_memory().expect("is said"), 0x7f00_a000_0000);
        assert!(qmp.address_of_memory().is_err());
    }
}
