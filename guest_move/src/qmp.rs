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
    /// What it has said last of how a migration is.
    reached: Option<String>,
    /// The last round of a migration that it has told, and that of which we have asked what is left.
    round: u64,
    asked: u64,
    /// Of the migration that was begun here.
    limit: Option<Limit>,
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
}

/// For how long QEMU may stop the guest, by what the rounds leave.
///
/// QEMU stops a guest as soon as the limit lets it, even if one short round more would leave next to nothing. So it has
/// an eighth of the limit as long as each round leaves a quarter less than the one before, and twice as much after each
/// other one. A guest that writes too much for that has the whole limit three rounds later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    /// Milliseconds.
    now: u64,
    most: u64,
    /// Bytes that the last round has left.
    left: Option<u64>,
}

impl Limit {
    fn new(most: u64) -> Self {
        // With no time at all a guest would never move.
        Self { now: (most / 8).max(1), most: most.max(1), left: None }
    }

    /// After a round that has left so many bytes. Whether the limit is another one now.
    fn follow(&mut self, left: u64) -> bool {
        let before = self.left.replace(left);
        let is_enough = before.is_none_or(|before| left <= before - before / 4);
        let next = if is_enough { self.now } else { (self.now * 2).min(self.most) };
        std::mem::replace(&mut self.now, next) != next
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
            reached: None,
            round: 0,
            asked: 0,
            limit: None,
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
            Some("MIGRATION") => {
                self.reached = line["data"]["status"].as_str().map(str::to_owned);
                self.has_news = true;
            }
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
        let limit = Limit::new(pace.downtime);
        self.call("migrate-set-parameters", json!({ "downtime-limit": limit.now }))?;
        self.call("migrate", json!({ "uri": to }))?;
        self.limit = Some(limit);
        Ok(())
    }

    /// Lets QEMU stop the guest for longer if a round has not left much less than the one before, by its answer.
    fn follow_round(&mut self, now: &Value) -> Result<()> {
        let (Some(limit), Some(left)) = (&mut self.limit, now["ram"]["remaining"].as_u64()) else { return Ok(()) };
        let is_new = std::mem::replace(&mut self.asked, self.round) != self.round;
        if is_new && limit.follow(left) {
            let limit = limit.now;
            self.call("migrate-set-parameters", json!({ "downtime-limit": limit }))?;
        }
        Ok(())
    }

    /// Waits until the migration has this status, but not longer than `limit`, nor after somebody has set `cancelled`.
    /// A stopped guest waits for each answer of QEMU, so it is asked then only if it says nothing for a while.
    pub(crate) fn wait_for(&mut self, status: &str, limit: Option<Duration>, cancelled: &AtomicBool) -> Result<()> {
        let (began, mut told) = (Instant::now(), Instant::now());
        loop {
            let has_news = self.wait_for_news()?;
            match self.reached.as_deref() {
                Some(reached) if reached == status => return Ok(()),
                Some("pre-switchover" | "device") if has_news => continue,
                _ => {}
            }
            let now = self.migration()?;
            self.follow_round(&now)?;
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                eprintln!("guest-move: {} s, {}", began.elapsed().as_secs(), progress(&now["ram"]));
            }
            match now["status"].as_str() {
                Some(reached) if reached == status => return Ok(()),
                Some(end @ ("failed" | "cancelled" | "completed")) => {
                    let why = now["error-desc"].as_str().unwrap_or("QEMU does not say why");
                    bail!("the migration has {end}: {why}");
                }
                _ if cancelled.load(Ordering::Relaxed) => bail!(CANCELLED),
                _ if limit.is_some_and(|limit| began.elapsed() > limit) => {
                    bail!("given up after {} s: {}", began.elapsed().as_secs(), progress(&now["ram"]));
                }
                _ => {}
            }
        }
    }

    /// Waits until QEMU tells that the migration is a step further, or for a while. Whether it has.
    fn wait_for_news(&mut self) -> Result<bool> {
        let began = Instant::now();
        while !self.has_news && began.elapsed() < LOOK {
            if let Some(line) = self.line_within(LOOK)? {
                self.notice(&line);
            }
        }
        Ok(std::mem::take(&mut self.has_news))
    }

    /// What QEMU tells about the migration.
    pub(crate) fn migration(&mut self) -> Result<Value> {
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
        self.limit.is_some()
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
    fn guest_may_be_stopped_for_longer_only_if_rounds_do_not_leave_much_less() {
        let mut limit = Limit::new(300);
        let rounds = [1000, 300, 225, 170, 169, 100, 90, 80, 85].map(|left| (limit.follow(left), limit.now));
        let same = |now| (false, now);
        let expected = [same(37), same(37), same(37), (true, 74), (true, 148), same(148), (true, 296), (true, 300)];
        assert_eq!(rounds[..8], expected);
        assert_eq!(rounds[8], same(300));
        assert_eq!((Limit::new(0).now, Limit::new(0).most), (1, 1), "with no time at all it would never move");

        let pass = |pass: u64| format!(r#"{{"event": "MIGRATION_PASS", "data": {{"pass": {pass}}}}}"#);
        let active = r#"{"return": {"status": "active", "ram": {"remaining": 5}}}"#;
        let lines = [1, 2].map(|round| &*[&pass(round)[..], active].join("\n").leak());
        let refused = r#"{"error": {"desc": "downtime-limit"}}"#;
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, lines[0], active, lines[1], refused]).expect("says hello");
        qmp.limit = Some(Limit::new(300));
        for _ in 0..2 {
            let now = qmp.migration().expect("is answered");
            assert!(qmp.follow_round(&now).is_ok(), "QEMU is not told before a round has left as much as another one");
        }
        let now = qmp.migration().expect("is answered");
        assert!(qmp.follow_round(&now).is_err(), "it is told now");
    }

    #[test]
    fn status_that_qemu_tells_by_itself_is_not_asked_for() {
        let event = |status: &str| format!(r#"{{"event": "MIGRATION", "data": {{"status": "{status}"}}}}"#);
        let (stopped, device, completed) = (event("pre-switchover"), event("device"), event("completed"));
        let pass = r#"{"event": "MIGRATION_PASS", "data": {"pass": 9}}"#;
        let answer = r#"{"return": {"status": "active"}}"#;
        let lines = [answer, &stopped, &device, pass, &completed].join("\n").leak();
        let mut qmp = qemu(&[HELLO, r#"{"return": {}}"#, lines]).expect("says hello");
        assert!(qmp.runs().is_ok_and(|runs| !runs));
        // The fake one has no more answers.
        for status in ["pre-switchover", "completed"] {
            qmp.wait_for(status, None, &AtomicBool::new(false)).expect("is told");
        }
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
