//! Moves: to another host, or to a file and from it.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use serde_bytes::ByteBuf;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use tempfile::TempDir;
use twox_hash::XxHash3_64;

use crate::guest::Guest;
use crate::kicks::{self, Kicks};
use crate::peer::{self, CANCELLED, HEADER, Listener, Speaker, VERSION, Word};
use crate::qmp::{Pace, Qmp};
use crate::rcu::Hurry;
use crate::state::{Needs, State};
use crate::system::{PAGE, Process};

/// A guest of a QEMU.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) pid: u32,
    pub(crate) qmp: Qmp,
}

/// How a guest is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sending {
    pub(crate) to: String,
    pub(crate) pace: Pace,
    /// After this time, the guest stays.
    pub(crate) limit: Option<Duration>,
    /// Compares the memory before the guest goes on.
    pub(crate) compares: bool,
}

/// Set by a signal that asks this program to end.
type Cancelled = Arc<AtomicBool>;

fn cancelled_by_signals() -> Result<Cancelled> {
    let cancelled = Cancelled::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&cancelled))?;
    }
    Ok(cancelled)
}

/// The source ends its QEMU once the target runs the guest.
pub(crate) fn send(vm: &mut Vm, how: &Sending) -> Result<Value> {
    let to = how.to.as_str();
    let (started, cancelled, _hurry) = (Instant::now(), cancelled_by_signals()?, Hurry::begin());
    let guest = Guest::of(vm.pid)?;
    vm.qmp.must_not_migrate()?;
    let runs = vm.qmp.runs()?;
    let address = to.to_socket_addrs().with_context(|| format!("{to} is no address"))?.next();
    let address = address.with_context(|| format!("{to} is no address"))?;
    let stream = connect(address).with_context(|| format!("nobody receives at {to}"))?;
    let (mut listener, speaker) = peer::over(stream)?;
    let sent = match send_until_loaded(vm, &guest, &mut listener, &speaker, how, &cancelled) {
        Ok(sent) => sent,
        Err(error) => {
            let error = reason(error, &mut listener);
            speaker.give_up(&error);
            return Err(stays(vm, error, runs));
        }
    };
    // By the target, which has compared it as well if that was wanted.
    let loaded = Instant::now();

    let answer = speaker.say(&Word::Go { runs }).and_then(|()| listener.hear()).and_then(|word| match word {
        Word::Running => Ok(None),
        Word::Back(why) => Ok(Some(why)),
        word => bail!("the other host says {word:?} instead of whether the guest runs there"),
    });
    let answer = answer.context(
        "the target was told to run the guest, and does not say that it does. The guest stays stopped here: if it is \
         not there, let it go on by `guest-move stay`",
    )?;
    if let Some(why) = answer {
        return Err(stays(vm, anyhow!("the other host has not run the guest: {why}"), runs));
    }
    let runs_there = Instant::now();
    let told = vm.qmp.migration().and_then(|told| vm.qmp.quit().map(|()| told));
    let told = told.context("the guest runs on the target, and QEMU does not end here")?;
    let stopped = sent.stopped(&told).filter(|_| runs);
    let after = |moment: Instant| stopped.map(|stop| milliseconds(stop, moment));
    Ok(json!({
        "seconds": started.elapsed().as_secs_f64(),
        "stopped_ms": after(runs_there),
        "after_stop_ms": {
            "state_said": after(sent.state_said),
            "all_sent": after(sent.all_sent),
            "loaded": after(loaded),
        },
        "rounds": told["ram"]["dirty-sync-count"],
        "bytes": told["ram"]["transferred"],
        "qemu_downtime_ms": told["downtime"],
    }))
}

/// When a guest was sent.
struct Sent {
    /// When the target was told what QEMU leaves out.
    state_said: Instant,
    /// When QEMU had sent all.
    all_sent: Instant,
}

impl Sent {
    /// When QEMU began to stop the guest, by what it tells about the migration. Its event `STOP` comes when the devices
    /// are stopped, too: more than a second later, if Linux does not [hurry](Hurry).
    fn stopped(&self, told: &Value) -> Option<Instant> {
        let downtime = told["downtime"].as_u64().map(Duration::from_millis);
        downtime.and_then(|downtime| self.all_sent.checked_sub(downtime))
    }
}

fn milliseconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

/// Waits a little for a receiver that was started at the same time.
fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let until = Instant::now() + WAIT_FOR_RECEIVER;
    loop {
        match TcpStream::connect_timeout(&address, WAIT_FOR_RECEIVER) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < until => {
                thread::sleep(Duration::from_millis(100));
            }
            result => return result,
        }
    }
}

const WAIT_FOR_RECEIVER: Duration = Duration::from_secs(5);

/// What the other host has said last, if that is why a move has failed.
fn reason(error: Error, listener: &mut Listener<TcpStream>) -> Error {
    const SOON: Duration = Duration::from_secs(2);
    if error.to_string() == CANCELLED {
        return error;
    }
    listener.set_patience(SOON);
    match listener.hear() {
        Err(why) if why.to_string().starts_with("the other host has given up") => why,
        _ => error,
    }
}

/// Ends what was begun, after this error. A guest that ran goes on where it was.
fn stays(vm: &mut Vm, error: Error, runs: bool) -> Error {
    let cancelled = if vm.qmp.sends() { vm.qmp.cancel() } else { Ok(()) };
    match cancelled.and_then(|()| if runs { vm.qmp.go_on_here() } else { Ok(()) }) {
        Ok(()) if runs => error.context("the guest goes on here"),
        Ok(()) => error.context("the guest stays here, paused as before"),
        Err(why) => error.context(format!("QEMU does not let the guest go on here ({why:#})")),
    }
}

/// Until here, the guest is the source's.
fn send_until_loaded(
    vm: &mut Vm,
    guest: &Guest,
    listener: &mut Listener<TcpStream>,
    speaker: &Speaker<TcpStream>,
    how: &Sending,
    cancelled: &Cancelled,
) -> Result<Sent> {
    introduce(guest, speaker)?;
    listener.expect_unless(&Word::Ready, cancelled)?;
    let outlet = Outlet::open(speaker.clone())?;
    vm.qmp.begin_to_send(&outlet.place(), how.pace)?;
    let sent = send_rest(vm, guest, outlet, speaker, how.limit, cancelled)?;
    listener.expect_unless(&Word::Loaded, cancelled)?;
    if how.compares {
        speaker.say(&Word::Pages(sums_of_pages(vm)?))?;
        listener.expect_unless(&Word::Same, cancelled)?;
    }
    Ok(sent)
}

/// All after QEMU has begun to send.
fn send_rest<S: Write + Send + 'static>(
    vm: &mut Vm,
    guest: &Guest,
    outlet: Outlet,
    speaker: &Speaker<S>,
    limit: Option<Duration>,
    cancelled: &AtomicBool,
) -> Result<Sent> {
    let mut send = || -> Result<Sent> {
        vm.qmp.wait_for("pre-switchover", limit, cancelled)?;
        speaker.say(&Word::State(ByteBuf::from(State::save(guest)?.encode()?)))?;
        let state_said = Instant::now();
        vm.qmp.switch_over()?;
        vm.qmp.wait_for("completed", None, cancelled)?;
        Ok(Sent { state_said, all_sent: Instant::now() })
    };
    match send() {
        Ok(sent) => outlet.end().map(|()| sent),
        Err(error) => Err(outlet.reason(error)),
    }
}

/// Passes on what a QEMU sends, as words.
struct Outlet {
    folder: TempDir,
    thread: JoinHandle<Result<()>>,
}

/// Bytes of data that are passed on at once, at most.
const CHUNK: usize = 128 << 10;

impl Outlet {
    fn open<S: Write + Send + 'static>(speaker: Speaker<S>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let listener = UnixListener::bind(socket_in(&folder))?;
        // If it ends early, QEMU has nobody to send to, and its migration fails.
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let mut bytes = vec![0; HEADER + CHUNK];
            loop {
                match stream.read(&mut bytes[HEADER..])? {
                    0 => return speaker.say(&Word::End),
                    count => speaker.pass_on(&mut bytes[..HEADER + count])?,
                }
            }
        });
        Ok(Self { folder, thread })
    }

    /// Where QEMU sends to.
    fn place(&self) -> String {
        place(&self.folder)
    }

    /// Why a migration has failed: what QEMU says, or why this has ended.
    fn reason(self, error: Error) -> Error {
        if !self.thread.is_finished() {
            return error;
        }
        self.end().err().unwrap_or(error)
    }

    /// Waits until all is passed on that a QEMU has sent which is done.
    fn end(self) -> Result<()> {
        self.thread.join().unwrap_or_else(|_| bail!("the thread that passes data on has failed"))
    }
}

fn socket_in(folder: &TempDir) -> PathBuf {
    folder.path().join("data")
}

/// That socket in QEMU's words.
fn place(folder: &TempDir) -> String {
    format!("unix:{}", socket_in(folder).display())
}

/// A sum of each page of a guest that is stopped, and has its memory from address zero on in one piece.
fn sums_of_pages(vm: &mut Vm) -> Result<Vec<u64>> {
    let size = vm.qmp.call("query-memory-size-summary", json!({}))?;
    let size = size["base-memory"].as_u64().context("QEMU does not tell how much memory the guest has")?;
    let start = vm.qmp.address_of_memory()?;
    let sums = || -> Result<Vec<u64>> {
        let memory = File::open(format!("/proc/{}/mem", vm.pid))?;
        let (mut sums, mut chunk) = (Vec::new(), vec![0; CHUNK]);
        for at in (0..size).step_by(CHUNK) {
            memory.read_exact_at(&mut chunk, start + at)?;
            sums.extend(chunk.chunks(PAGE).map(XxHash3_64::oneshot));
        }
        Ok(sums)
    };
    sums().context("the guest's memory cannot be compared")
}

/// The pages whose sums differ, but for the page of the clock: the target's hypervisor has written that anew.
fn different(there: &[u64], here: &[u64], clock: u64) -> Result<Vec<u64>> {
    ensure!(there.len() == here.len(), "the guest has {} pages there, and {} here", there.len(), here.len());
    let pairs = (0..).zip(there.iter().zip(here));
    Ok(pairs.filter(|(page, (there, here))| there != here && *page != clock).map(|(page, _)| page).collect())
}

/// Receives one guest.
pub(crate) fn receive(vm: &mut Vm, at: &str, compares: bool) -> Result<Value> {
    let cancelled = cancelled_by_signals()?;
    let listener = TcpListener::bind(at).with_context(|| format!("cannot listen at {at}"))?;
    let guest = Guest::of(vm.pid)?;
    let (mut listener, speaker) = peer::over(accept(&listener, &cancelled)?)?;
    let process = Process::open(vm.pid)?;
    let loaded = receive_until_loaded(vm, &guest, &mut listener, &speaker, compares, &cancelled);
    let told = loaded.and_then(|()| {
        let before = guest.vps()?.run_times()?;
        match listener.hear_unless(&cancelled)? {
            Word::Go { runs } => Ok((runs, before)),
            word => bail!("the source says {word:?} instead of whether the guest goes on"),
        }
    });
    match told {
        Ok((true, before)) => {
            if let Err(error) = vm.qmp.go_on() {
                return Err(give_back(&process, &guest, &before, &speaker, error));
            }
        }
        Ok((false, _)) => {}
        Err(error) => {
            speaker.give_up(&error);
            // Its guest is the source's.
            let _ = vm.qmp.quit();
            return Err(error.context("the guest does not run here"));
        }
    }
    // The guest is here, whether the source hears of it or not.
    let is_heard = speaker.say(&Word::Running).is_ok();
    Ok(json!({ "source_knows": is_heard }))
}

/// QEMU does not let the guest go on. If it has ended, and the vCPUs have had no more time than `before`, the source
/// gets its guest back.
fn give_back(process: &Process, guest: &Guest, before: &[u128], speaker: &Speaker<TcpStream>, error: Error) -> Error {
    const UNTIL_IT_HAS_ENDED: Duration = Duration::from_secs(10);
    let has_ended = process.ends_within(UNTIL_IT_HAS_ENDED).unwrap_or(false);
    let has_run_nothing = || guest.vps().and_then(|vps| vps.run_times()).is_ok_and(|now| now == before);
    if has_ended && has_run_nothing() && speaker.say(&Word::Back(format!("{error:#}"))).is_ok() {
        return error.context("the guest has not run here, and is the source's again");
    }
    error.context("the guest does not run here, and may have")
}

fn accept(listener: &TcpListener, cancelled: &AtomicBool) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(error.into()),
        }
        ensure!(!cancelled.load(Ordering::Relaxed), CANCELLED);
    }
}

fn receive_until_loaded(
    vm: &mut Vm,
    guest: &Guest,
    listener: &mut Listener<TcpStream>,
    speaker: &Speaker<TcpStream>,
    compares: bool,
    cancelled: &Cancelled,
) -> Result<()> {
    must_fit(guest, listener, cancelled)?;
    let inlet = Inlet::open(vm)?;
    speaker.say(&Word::Ready)?;
    let state = inlet.fill(vm, guest, listener, cancelled)?;
    // Before it is loaded: the hypervisor writes to pages of the guest then.
    let here = if compares { sums_of_pages(vm)? } else { Vec::new() };
    state.load(guest)?;
    speaker.say(&Word::Loaded)?;
    if compares {
        let there = match listener.hear_unless(cancelled)? {
            Word::Pages(there) => there,
            word => bail!("the source says {word:?} instead of the sums of its pages"),
        };
        let other = different(&there, &here, guest.vps()?.clock_page()?)?;
        ensure!(other.is_empty(), "{} pages differ: {:x?}", other.len(), &other[..other.len().min(8)]);
        speaker.say(&Word::Same)?;
    }
    Ok(())
}

/// The first words of a source, or of a file.
fn introduce<S: Write>(guest: &Guest, speaker: &Speaker<S>) -> Result<()> {
    speaker.say(&Word::Hello(VERSION))?;
    speaker.say(&Word::Needs(Needs::of(guest)?))
}

/// Hears them, and refuses what could not go on here.
fn must_fit<S: Read>(guest: &Guest, listener: &mut Listener<S>, cancelled: &AtomicBool) -> Result<()> {
    must_be_of_this_version(listener, cancelled)?;
    match listener.hear_unless(cancelled)? {
        Word::Needs(needs) => needs.check(guest),
        word => bail!("the source says {word:?} instead of what the guest needs"),
    }
}

fn must_be_of_this_version<S: Read>(listener: &mut Listener<S>, cancelled: &AtomicBool) -> Result<()> {
    match listener.hear_unless(cancelled)? {
        Word::Hello(VERSION) => Ok(()),
        Word::Hello(other) => bail!("the source is version {other} of this program, the target version {VERSION}"),
        word => bail!("the source says {word:?} at first"),
    }
}

/// Gives a QEMU what another one has sent.
struct Inlet {
    _folder: TempDir,
    stream: UnixStream,
}

impl Inlet {
    fn open(vm: &mut Vm) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        vm.qmp.begin_to_receive(&place(&folder))?;
        let stream = UnixStream::connect(socket_in(&folder)).context("QEMU does not listen")?;
        Ok(Self { _folder: folder, stream })
    }

    /// Reads words until QEMU has loaded the guest. It does not run. What QEMU leaves out is not loaded yet.
    fn fill<S: Read>(
        mut self,
        vm: &mut Vm,
        guest: &Guest,
        listener: &mut Listener<S>,
        cancelled: &AtomicBool,
    ) -> Result<State> {
        let mut state = None;
        loop {
            let Some(word) = listener.hear_word_or_data(cancelled)? else {
                self.stream.write_all(listener.data()).context("QEMU has not loaded all of the guest")?;
                continue;
            };
            match word {
                Word::State(bytes) => {
                    // Before QEMU has got all: then the guest goes on at the source the sooner.
                    let decoded = State::decode(&bytes)?;
                    decoded.prepare(guest)?;
                    state = Some(decoded);
                }
                Word::End => break,
                word => bail!("the source says {word:?} instead of the guest's data"),
            }
        }
        self.stream.shutdown(Shutdown::Write)?;
        let state = state.context("the source has sent no state of the vCPUs")?;
        vm.qmp.wait_until_loaded()?;
        Ok(state)
    }
}

/// Saves a guest to a file. It stays stopped, or goes on: then it is stopped for so many milliseconds at most, as QEMU
/// reckons.
pub(crate) fn save(vm: &mut Vm, file: &Path, goes_on: bool, downtime: u64) -> Result<Value> {
    let (started, cancelled, _hurry) = (Instant::now(), cancelled_by_signals()?, Hurry::begin());
    let guest = Guest::of(vm.pid)?;
    vm.qmp.must_not_migrate()?;
    let runs = vm.qmp.runs()?;
    if !goes_on {
        // Whatever a guest writes that still runs would be in the file twice.
        vm.qmp.stop()?;
    }
    let saved = match save_to(vm, &guest, file, downtime, &cancelled) {
        Ok(saved) => saved,
        Err(error) => return Err(stays(vm, error, runs)),
    };
    if goes_on && runs {
        vm.qmp.go_on()?;
    }
    let went_on = Instant::now();
    let told = vm.qmp.migration()?;
    let stopped = saved.stopped(&told).filter(|_| goes_on && runs);
    Ok(json!({
        "seconds": started.elapsed().as_secs_f64(),
        "stopped_ms": stopped.map(|stop| milliseconds(stop, went_on)),
        "rounds": told["ram"]["dirty-sync-count"],
        "bytes": told["ram"]["transferred"],
    }))
}

/// The file gets its name when all of it is on the disk.
fn save_to(vm: &mut Vm, guest: &Guest, file: &Path, downtime: u64, cancelled: &AtomicBool) -> Result<Sent> {
    let cannot = || format!("cannot write {}", file.display());
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unfinished = tempfile::Builder::new().prefix(".guest-move.").tempfile_in(folder).with_context(cannot)?;
    let speaker = Speaker::new(BufWriter::new(unfinished.reopen()?));
    introduce(guest, &speaker)?;
    let outlet = Outlet::open(speaker.clone())?;
    vm.qmp.begin_to_send(&outlet.place(), Pace { bandwidth: Some(0), downtime, slows_down: false })?;
    let saved = send_rest(vm, guest, outlet, &speaker, None, cancelled).with_context(cannot)?;
    speaker.flush().with_context(cannot)?;
    unfinished.as_file().sync_all().with_context(cannot)?;
    unfinished.persist(file).with_context(cannot)?;
    Ok(saved)
}

/// Loads a guest from such a file, any number of times. It runs then.
pub(crate) fn load(vm: &mut Vm, file: &Path) -> Result<Value> {
    let (started, cancelled) = (Instant::now(), cancelled_by_signals()?);
    let guest = Guest::of(vm.pid)?;
    let opened = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut words = Listener::new(BufReader::new(opened));
    let mut load = || -> Result<()> {
        must_fit(&guest, &mut words, &cancelled)?;
        let state = Inlet::open(vm)?.fill(vm, &guest, &mut words, &cancelled)?;
        state.load(&guest)
    };
    if let Err(error) = load() {
        let _ = vm.qmp.quit();
        return Err(error.context(format!("{} is not loaded", file.display())));
    }
    vm.qmp.go_on()?;
    Ok(json!({ "seconds": started.elapsed().as_secs_f64() }))
}

/// Saves only what QEMU leaves out, of a guest that somebody else has stopped and saves. With `waits` the guest still
/// runs: somebody else stops it, saves or moves the rest, and ends QEMU. The state is read after that. The partition
/// exists until then because this program has copies of its descriptors.
///
/// Only QEMU's end tells from outside that the guest is stopped: QEMU 11.1 does not set `TimeFreeze`. It is also the
/// right moment. Until then a device that finishes a request may interrupt the stopped guest.
pub(crate) fn save_vcpus(pid: u32, file: &Path, waits: bool) -> Result<Value> {
    let guest = Guest::of(pid)?;
    if waits {
        eprintln!("guest-move: waits until process {pid} ends");
        let (cancelled, _hurry) = (cancelled_by_signals()?, Hurry::begin());
        wait_for_end(pid, &cancelled)?;
    }
    let state = State::save(&guest)?.encode()?;
    fs::write(file, &state).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(json!({ "bytes": state.len() }))
}

/// Waits until a QEMU has ended. Meanwhile its vCPUs are kicked, because somebody is about to stop them.
fn wait_for_end(pid: u32, cancelled: &AtomicBool) -> Result<()> {
    let process = Process::open(pid).with_context(|| format!("no process {pid}"))?;
    let mut kicks = Kicks::of(pid);
    while !process.ends_within(kicks::PERIOD)? {
        ensure!(!cancelled.load(Ordering::Relaxed), CANCELLED);
        kicks.kick(vcpu_threads(pid));
    }
    Ok(())
}

/// Numbers of a QEMU's threads that run vCPUs, by their names, such as `CPU 0/MSHV`. A QEMU of libvirt names them.
fn vcpu_threads(pid: u32) -> impl Iterator<Item = u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let runs_vcpu = |path: PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("CPU "));
    threads
        .filter(move |thread| runs_vcpu(thread.path()))
        .filter_map(|thread| thread.file_name().to_str()?.parse().ok())
}

/// Loads only that, into a guest that somebody else has loaded and will let run.
pub(crate) fn load_vcpus(pid: u32, file: &Path) -> Result<Value> {
    let state = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    State::decode(&state)?.load(&Guest::of(pid)?)?;
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use std::io::Seek as _;

    use super::*;

    #[test]
    fn stop_begins_as_long_before_the_end_as_qemu_tells() {
        let now = Instant::now();
        let sent = Sent { state_said: now, all_sent: now };
        let stopped = sent.stopped(&json!({ "downtime": 250 })).expect("is told");
        assert!((milliseconds(stopped, now) - 250.0).abs() < 1e-6);
        assert_eq!(sent.stopped(&json!({})), None);
    }

    #[test]
    fn source_of_another_version_is_refused_before_anything_is_copied() {
        let heard = |first: &Word| {
            let file = tempfile::tempfile().expect("can be made");
            Speaker::new(file.try_clone().expect("can be copied")).say(first).expect("has room");
            (&file).rewind().expect("is a file");
            must_be_of_this_version(&mut Listener::new(file), &AtomicBool::new(false))
                .map_err(|error| error.to_string())
        };
        assert_eq!(heard(&Word::Hello(VERSION)), Ok(()));
        let other = VERSION + 1;
        let refused = format!("the source is version {other} of this program, the target version {VERSION}");
        assert_eq!(heard(&Word::Hello(other)), Err(refused));
        assert!(heard(&Word::Ready).is_err());
    }

    #[test]
    fn pages_that_differ_are_found_but_for_that_of_the_clock() {
        assert_eq!(different(&[1, 2, 3, 4], &[1, 9, 3, 9], 3).expect("as many"), [1]);
        assert_eq!(different(&[1, 2], &[1, 2], 0).expect("as many"), [0; 0]);
        assert!(different(&[1, 2], &[1], 0).is_err());
    }
}
