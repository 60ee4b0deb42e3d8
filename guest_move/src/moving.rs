//! Moves: to another host, or to a file and from it.

use std::fs;
use std::io::{ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::peer::{Peer, VERSION, Word};
use crate::qmp::Qmp;
use crate::state::{SUM, State};
use crate::system::PAGE;

/// A guest of a QEMU.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) pid: u32,
    pub(crate) qmp: Qmp,
}

/// How a guest is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sending {
    pub(crate) to: String,
    /// Bytes a second, at most.
    pub(crate) bandwidth: Option<u64>,
    /// Milliseconds for which the guest may be stopped, as QEMU reckons.
    pub(crate) downtime: Option<u64>,
    /// After this time, the guest stays.
    pub(crate) limit: Option<Duration>,
    /// Compares the memory before the guest goes on. This takes longer than all the rest.
    pub(crate) compares: bool,
}

/// The source ends its QEMU once the target runs the guest.
pub(crate) fn send(vm: &mut Vm, how: &Sending) -> Result<Value> {
    let to = how.to.as_str();
    let started = Instant::now();
    let guest = Guest::of(vm.pid)?;
    let address = to.to_socket_addrs().with_context(|| format!("{to} is no address"))?.next();
    let address = address.with_context(|| format!("{to} is no address"))?;
    let mut peer = Peer::new(connect(address).with_context(|| format!("nobody receives at {to}"))?)?;
    let sent = match send_until_loaded(vm, &guest, &mut peer, address.ip(), how) {
        Ok(sent) => sent,
        Err(error) => {
            peer.give_up(&error);
            // QEMU lets the guest go on by itself, if it has stopped it for a migration that failed.
            let _ = vm.qmp.call("migrate_cancel", json!({}));
            let is_running = vm.qmp.go_on().is_ok();
            let here = if is_running { "the guest goes on here" } else { "QEMU does not let the guest go on here" };
            return Err(error.context(here));
        }
    };

    peer.say(&Word::Go).and_then(|()| peer.expect(&Word::Running)).context(
        "the target was told to run the guest, and does not say that it does. The guest stays stopped here: if it does \
         not run there, let it go on by `cont`",
    )?;
    let stopped = vm.qmp.stopped_at().map(|stop| stop.elapsed());
    vm.qmp.quit().context("the guest runs on the target, and QEMU does not end here")?;
    Ok(json!({
        "seconds": started.elapsed().as_secs_f64(),
        "stopped_ms": stopped.map(|time| time.as_secs_f64() * 1e3),
        "rounds": sent["ram"]["dirty-sync-count"],
        "bytes": sent["ram"]["transferred"],
        "qemu_downtime_ms": sent["downtime"],
    }))
}

/// Waits a little for a receiver that was started at the same time.
fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let until = Instant::now() + WAIT_FOR_RECEIVER;
    loop {
        match TcpStream::connect(address) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(100));
            }
            result => return result,
        }
    }
}

const WAIT_FOR_RECEIVER: Duration = Duration::from_secs(5);

/// Until here, the guest is the source's.
fn send_until_loaded(
    vm: &mut Vm,
    guest: &Guest,
    peer: &mut Peer<TcpStream>,
    ip: IpAddr,
    how: &Sending,
) -> Result<Value> {
    peer.say(&Word::Hello(VERSION))?;
    let port = peer.hear_ready()?;
    let mut parameters = json!({});
    for (name, value) in [("max-bandwidth", how.bandwidth), ("downtime-limit", how.downtime)] {
        if let Some(value) = value {
            parameters[name] = value.into();
        }
    }
    vm.qmp.begin_to_send(&format!("tcp:{}", SocketAddr::new(ip, port)), parameters)?;
    vm.qmp.wait_for("pre-switchover", how.limit)?;
    peer.say(&Word::State(State::save(guest)?.encode()?))?;
    vm.qmp.switch_over()?;
    let sent = vm.qmp.wait_for("completed", None)?;
    peer.expect(&Word::Loaded)?;
    if how.compares {
        peer.say(&Word::Pages(sums_of_pages(&mut vm.qmp)?))?;
        peer.expect(&Word::Same)?;
    }
    Ok(sent)
}

/// A sum of each page of a guest that is stopped, and has its memory from address zero on.
fn sums_of_pages(qmp: &mut Qmp) -> Result<Vec<u32>> {
    let size = qmp.call("query-memory-size-summary", json!({}))?;
    let size = size["base-memory"].as_u64().context("QEMU does not tell how much memory the guest has")?;
    let file = std::env::temp_dir().join(format!("guest-move.{}", std::process::id()));
    qmp.call("pmemsave", json!({ "val": 0, "size": size, "filename": file.to_string_lossy() }))?;
    let sums = || -> Result<Vec<u32>> {
        let mut memory = std::io::BufReader::new(fs::File::open(&file)?);
        let (mut sums, mut page) = (Vec::new(), [0; PAGE]);
        for _ in 0..size / PAGE as u64 {
            memory.read_exact(&mut page)?;
            sums.push(SUM.checksum(&page));
        }
        Ok(sums)
    };
    let result = sums().context("the guest's memory cannot be compared");
    let _ = fs::remove_file(&file);
    result
}

/// The pages whose sums differ, but for the page of the clock: the target's hypervisor has written that anew.
fn different(there: &[u32], here: &[u32], clock: u64) -> Result<Vec<u64>> {
    ensure!(there.len() == here.len(), "the guest has {} pages there, and {} here", there.len(), here.len());
    let pairs = (0..).zip(there.iter().zip(here));
    Ok(pairs.filter(|(page, (there, here))| there != here && *page != clock).map(|(page, _)| page).collect())
}

/// Receives one guest.
pub(crate) fn receive(vm: &mut Vm, at: &str, port: u16, compares: bool) -> Result<Value> {
    let listener = TcpListener::bind(at).with_context(|| format!("cannot listen at {at}"))?;
    let guest = Guest::of(vm.pid)?;
    let (stream, _) = listener.accept()?;
    let mut peer = Peer::new(stream)?;
    let loaded = receive_until_loaded(vm, &guest, &mut peer, port, compares);
    if let Err(error) = loaded.and_then(|()| peer.expect(&Word::Go)) {
        peer.give_up(&error);
        // Its guest is the source's.
        let _ = vm.qmp.quit();
        return Err(error.context("the guest does not run here"));
    }
    vm.qmp.go_on()?;
    // The guest is here, whether the source hears of it or not.
    let is_heard = peer.say(&Word::Running).is_ok();
    Ok(json!({ "source_knows": is_heard }))
}

fn receive_until_loaded(
    vm: &mut Vm,
    guest: &Guest,
    peer: &mut Peer<TcpStream>,
    port: u16,
    compares: bool,
) -> Result<()> {
    match peer.hear()? {
        Word::Hello(VERSION) => {}
        Word::Hello(other) => bail!("the source is version {other} of this program, the target version {VERSION}"),
        word => bail!("the source says {word:?} at first"),
    }
    vm.qmp.begin_to_receive(&format!("tcp:0.0.0.0:{port}"))?;
    peer.say(&Word::Ready(port))?;
    let state = peer.hear_state()?;
    // Before QEMU has sent all: then the guest goes on there the sooner.
    state.check(guest)?;
    vm.qmp.wait_until_loaded()?;
    let here = if compares { sums_of_pages(&mut vm.qmp)? } else { Vec::new() };
    state.load(guest)?;
    peer.say(&Word::Loaded)?;
    if compares {
        let there = match peer.hear()? {
            Word::Pages(there) => there,
            word => bail!("the source says {word:?} instead of the sums of its pages"),
        };
        let other = different(&there, &here, guest.clock_page()?)?;
        ensure!(other.is_empty(), "{} pages differ: {:x?}", other.len(), &other[..other.len().min(8)]);
        peer.say(&Word::Same)?;
    }
    Ok(())
}

/// Beside a file of QEMU's.
fn of_vcpus(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".vcpus");
    name.into()
}

/// Saves a guest to a file, and its vCPUs' state beside it. It stays stopped, or goes on.
pub(crate) fn save(vm: &mut Vm, file: &Path, goes_on: bool) -> Result<Value> {
    let started = Instant::now();
    let guest = Guest::of(vm.pid)?;
    let mut save = || -> Result<Value> {
        vm.qmp.begin_to_send(&format!("file:{}", file.display()), json!({ "max-bandwidth": 0 }))?;
        vm.qmp.wait_for("pre-switchover", None)?;
        let state = State::save(&guest)?.encode()?;
        let beside = of_vcpus(file);
        fs::write(&beside, state).with_context(|| format!("cannot write {}", beside.display()))?;
        vm.qmp.switch_over()?;
        vm.qmp.wait_for("completed", None)
    };
    let saved = save();
    if saved.is_err() {
        let _ = vm.qmp.call("migrate_cancel", json!({}));
    }
    let stopped = vm.qmp.stopped_at();
    if goes_on || saved.is_err() {
        vm.qmp.go_on()?;
    }
    let saved = saved.context("the guest goes on")?;
    Ok(json!({
        "seconds": started.elapsed().as_secs_f64(),
        "stopped_ms": stopped.filter(|_| goes_on).map(|stop| stop.elapsed().as_secs_f64() * 1e3),
        "rounds": saved["ram"]["dirty-sync-count"],
        "bytes": saved["ram"]["transferred"],
    }))
}

/// Loads a guest from such files, any number of times. It runs then.
pub(crate) fn load(vm: &mut Vm, file: &Path) -> Result<Value> {
    let started = Instant::now();
    let guest = Guest::of(vm.pid)?;
    let beside = of_vcpus(file);
    let state = fs::read(&beside).with_context(|| format!("cannot read {}", beside.display()))?;
    let state = State::decode(&state)?;
    state.check(&guest)?;
    vm.qmp.begin_to_receive(&format!("file:{}", file.display()))?;
    vm.qmp.wait_until_loaded()?;
    state.load(&guest)?;
    vm.qmp.go_on()?;
    Ok(json!({ "seconds": started.elapsed().as_secs_f64() }))
}

/// Saves only what QEMU leaves out, of a guest that somebody else has stopped and saves.
pub(crate) fn save_vcpus(pid: u32, file: &Path) -> Result<Value> {
    let state = State::save(&Guest::of(pid)?)?.encode()?;
    fs::write(file, &state).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(json!({ "bytes": state.len() }))
}

/// Loads only that, into a guest that somebody else has loaded and will let run.
pub(crate) fn load_vcpus(pid: u32, file: &Path) -> Result<Value> {
    let state = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    State::decode(&state)?.load(&Guest::of(pid)?)?;
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_differ_are_found_but_for_that_of_the_clock() {
        assert_eq!(different(&[1, 2, 3, 4], &[1, 9, 3, 9], 3).expect("as many"), [1]);
        assert_eq!(different(&[1, 2], &[1, 2], 0).expect("as many"), [0; 0]);
        assert!(different(&[1, 2], &[1], 0).is_err());
    }

    #[test]
    fn state_of_vcpus_is_beside_the_file_of_memory() {
        assert_eq!(of_vcpus(Path::new("/tmp/debian.ram")), Path::new("/tmp/debian.ram.vcpus"));
    }
}
