//! `dunlin save` and `dunlin restore`: a VM goes into a file, and comes back in this host or in another.
//!
//! A save writes to a temporary file beside its target, and gives it the target's name only when all of it is on the
//! disk. The VM ends after that. If anything fails before, the VM goes on as if nothing had been, and the temporary
//! file is removed. A restore reads the whole file first, and asks the host for something only if all sums are right.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use abi::control::{About, Answer, Command, MEMORY_CHUNK, Refusal, Saving, UPLOAD_CHUNK, USED_BYTES};
use abi::saved::{self, Header, Part, PartHead, SavedError};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::{RestoreArgs, SaveArgs};
use crate::control::{Client, refusal};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::quantity::show_size;
use crate::share;
use crate::stats::{self, printable, unexpected};

const PAGE: u64 = 4096;
/// Bytes between two waits for the disk, so that the last one is short.
const SYNC_BYTES: u64 = 64 << 20;

/// `dunlin save`.
pub(crate) fn run_save(args: &SaveArgs) -> Result<(), Failure> {
    if args.file.exists() && !args.replace {
        return Err(Failure::bad_input(format!("{} exists", args.file.display()))
            .help("choose another file, or replace this one with --replace"));
    }
    let stopped = catch_signals()?;
    let mut client = share::attach(args.host.host)?;
    let info = stats::host(&mut client)?;
    let found = stats::list(&mut client)?;
    let vm = stats::find(&found, &args.vm)?;
    let (number, name) = (vm.number, printable(&vm.name));
    let mut target = Target::create(&args.file)?;

    let progress = Progress::new();
    let saving = match client.ask_patiently(Command::Save { vm: number })? {
        Ok(Answer::Saving(saving)) => saving,
        Ok(Answer::NotSaved { why }) => {
            return Err(Failure::failed(format!("vm \"{name}\" cannot be saved: {}", printable(&why))));
        }
        Err(Refusal::Busy) => {
            return Err(Failure::failed(format!("vm \"{name}\": the host is saving a VM, or busy with this one"))
                .help("try again later"));
        }
        Err(why) => return Err(Failure::failed(format!("vm \"{name}\": {}", refusal(why)))),
        other => return Err(unexpected(other.map_err(refusal))),
    };
    let save = saving.save;
    let header = Header {
        hypervisor: info.version.clone(),
        arch: info.arch.clone(),
        processor: info.processor.clone(),
        config: saving.config.clone(),
        state_bytes: saving.state_bytes,
    };
    let written = write(&mut client, &saving, &header, &mut target, &progress, &stopped);
    let ended = written.and_then(|counts| match client.ask_patiently(Command::SaveEnd { save, stay: args.stay })? {
        Ok(Answer::Done) => Ok(counts),
        Err(why) => Err(Failure::failed(refusal(why))),
        other => Err(unexpected(other.map_err(refusal))),
    });
    let counts = match ended {
        Ok(counts) => counts,
        Err(failure) => {
            // The host may be gone, or has let the VM go on already.
            let _ = client.ask(Command::SaveEnd { save, stay: true });
            return Err(failure.context(&format!("vm \"{name}\" is not saved, and goes on")));
        }
    };
    target.finish()?;
    if !args.stay {
        // It has ended, and its name is free for its return.
        let _ = client.ask_patiently(Command::Destroy { vm: number });
    }

    let seconds = progress.elapsed().as_secs_f64();
    if args.json {
        println!(
            "{}",
            json!({ "vm": name, "file": args.file, "stays": args.stay, "memory_bytes": counts.memory,
                "state_bytes": saving.state_bytes, "file_bytes": counts.file, "seconds": seconds })
        );
    } else {
        let rest = if args.stay { "goes on" } else { "has ended" };
        println!(
            "vm \"{name}\": saved to {} in {seconds:.1} s, {} of {} used; it {rest}",
            args.file.display(),
            show_size(counts.memory),
            show_size(saving.config.memory_bytes)
        );
    }
    Ok(())
}

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    memory: u64,
    file: u64,
}

/// Reads everything from the host, and writes it.
fn write(
    client: &mut Client,
    saving: &Saving,
    header: &Header,
    target: &mut Target,
    progress: &Progress,
    stopped: &AtomicBool,
) -> Result<Counts, Failure> {
    let save = saving.save;
    let name = printable(&saving.config.name);
    target.raw(&saved::begin(header).map_err(|error| Failure::failed(format!("{error}")))?)?;

    let mut offset = 0;
    while offset < saving.state_bytes {
        match client.ask(Command::SaveState { save, offset })? {
            Ok(Answer::Bytes(bytes)) if !bytes.is_empty() => {
                target.part(Part::State, &bytes)?;
                offset += bytes.len() as u64;
            }
            other => return Err(unexpected(other.map_err(refusal))),
        }
    }

    let windows: Vec<u64> = saving.regions.iter().flat_map(|&(start, bytes)| windows(start, bytes)).collect();
    let total: u64 = saving.regions.iter().map(|(_, bytes)| bytes).sum();
    progress.say(&format!("vm \"{name}\": stands still; reading {}", show_size(total)));
    let mut counts = Counts::default();
    let mut told = 0;
    for (number, &gpa) in windows.iter().enumerate() {
        if stopped.load(Ordering::Relaxed) {
            return Err(Failure::failed("interrupted").with_status(130));
        }
        let used = match client.ask(Command::SaveUsed { save, gpa })? {
            Ok(Answer::Used(used)) => used,
            other => return Err(unexpected(other.map_err(refusal))),
        };
        let runs = runs(gpa, &used);
        let commands = runs.iter().map(|&(gpa, bytes)| Command::SaveMemory { save, gpa, bytes });
        let mut failure = None;
        let mut at = runs.iter();
        let read = client.ask_all_for(commands, |answer| {
            if let (Answer::Bytes(bytes), Some(&(gpa, length)), None) = (answer, at.next(), &failure) {
                let is_whole = bytes.len() == usize::try_from(length).unwrap_or(0);
                let written = if is_whole {
                    target.part(Part::Memory { gpa }, &bytes)
                } else {
                    Err(Failure::failed("the host sent another number of bytes than was asked for"))
                };
                counts.memory += u64::from(length);
                failure = written.err();
            }
        })?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        read.map_err(|why| Failure::failed(refusal(why)))?;
        let part = (number + 1) * 4 / windows.len().max(1);
        if part > told && part < 4 {
            told = part;
            progress.say(&format!("vm \"{name}\": {} %, {}", part * 25, show_size(counts.memory)));
        }
    }
    let parts = target.parts;
    target.part(Part::End { parts }, &[])?;
    target.sync()?;
    counts.file = target.bytes;
    Ok(counts)
}

/// Where each [`USED_BYTES`] of a region begin.
fn windows(start: u64, bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes.div_ceil(USED_BYTES)).map(move |window| start + window * USED_BYTES)
}

/// Runs of used pages, in pieces that fit into an answer: GPA and length.
fn runs(gpa: u64, used: &[u8]) -> Vec<(u64, u32)> {
    let mut runs: Vec<(u64, u32)> = Vec::new();
    let is_used = |page: usize| used[page / 8] >> (page % 8) & 1 != 0;
    for page in (0..used.len() * 8).filter(|&page| is_used(page)) {
        let mut at = gpa + page as u64 * PAGE;
        let end = at + PAGE;
        // The rest of the last piece's room first.
        while at < end {
            let room = match runs.last_mut() {
                Some((start, length)) if *start + u64::from(*length) == at => {
                    let room = (MEMORY_CHUNK as u64).saturating_sub(u64::from(*length)).min(end - at);
                    *length += u32::try_from(room).unwrap_or(0);
                    room
                }
                _ => 0,
            };
            at += room;
            if at < end && room == 0 {
                let length = (MEMORY_CHUNK as u64).min(end - at);
                runs.push((at, u32::try_from(length).unwrap_or(0)));
                at += length;
            }
        }
    }
    runs
}

/// A file that is being written. Without [`Self::finish`] nothing remains of it.
struct Target {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    parts: u64,
    bytes: u64,
    synced: u64,
    is_finished: bool,
}

impl Target {
    fn create(path: &Path) -> Result<Self, Failure> {
        let cannot = |error: io::Error| Failure::bad_input(format!("{}: {error}", path.display()));
        let name = path.file_name().ok_or_else(|| Failure::bad_input(format!("{}: no file", path.display())))?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}", std::process::id()));
        let temporary = path.with_file_name(temporary);
        // A guest's memory has its secrets.
        let file = {
            use std::os::unix::fs::OpenOptionsExt as _;
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).map_err(cannot)?
        };
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { path: path.to_path_buf(), temporary, file, parts: 0, bytes: 0, synced: 0, is_finished: false })
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| self.failed(&error))?;
        if self.bytes - self.synced >= SYNC_BYTES {
            self.sync()?;
        }
        Ok(())
    }

    fn part(&mut self, part: Part, content: &[u8]) -> Result<(), Failure> {
        let head = saved::part(self.parts, part, content);
        self.parts += 1;
        self.raw(&head)?;
        self.raw(content)
    }

    /// On return all of it is on the disk.
    fn sync(&mut self) -> Result<(), Failure> {
        self.synced = self.bytes;
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        synced.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::failed(format!("{}: {error}", self.path.display()))
    }

    /// Gives it its name.
    fn finish(mut self) -> Result<(), Failure> {
        self.is_finished = true;
        std::fs::rename(&self.temporary, &self.path).map_err(|error| {
            Failure::failed(format!("{}: {error}", self.path.display()))
                .help(format!("the saved VM is complete, in {}", self.temporary.display()))
        })?;
        // So that the name is there after a power cut, too. Not all file systems can do that.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let _ = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// `dunlin restore`.
pub(crate) fn run_restore(args: &RestoreArgs) -> Result<(), Failure> {
    let stopped = catch_signals()?;
    let progress = Progress::new();
    let mut source = Source::open(&args.file)?;
    let header = source.header.clone();
    let memory = source.check()?;

    let mut client = share::attach(args.host.host)?;
    let info = stats::host(&mut client)?;
    if info.arch != header.arch {
        return Err(Failure::bad_input(format!(
            "{}: its VM is for {}, and the host is {}",
            args.file.display(),
            printable(&header.arch),
            printable(&info.arch)
        )));
    }
    let mut config = header.config.clone();
    if let Some(name) = &args.name {
        config.name.clone_from(name);
    }
    let name = printable(&config.name);
    progress.say(&format!("vm \"{name}\": {} of memory in the file", show_size(memory)));

    let memory_bytes = config.memory_bytes;
    let begin = Command::RestoreBegin { config, state_bytes: header.state_bytes };
    let upload = match client.ask_patiently(begin)? {
        Ok(Answer::Upload(upload)) => upload,
        Ok(Answer::NotCreated { about, why }) => return Err(not_restored(&name, about, &why)),
        Err(Refusal::NameTaken) => {
            return Err(Failure::bad_input(format!("this host already has a VM '{name}'"))
                .help(format!("give it another name with --name, or 'dunlin destroy {name}' first")));
        }
        Err(Refusal::OutOfMemory) => {
            return Err(Failure::failed(format!("the host has no memory for a VM of {}", show_size(memory_bytes)))
                .help("end or destroy other VMs; `dunlin host` shows the free resources"));
        }
        Err(Refusal::Busy) => {
            return Err(Failure::failed("the host is restoring another VM").help("try again later"));
        }
        Err(why) => return Err(Failure::failed(format!("vm \"{name}\": {}", refusal(why)))),
        other => return Err(unexpected(other.map_err(refusal))),
    };
    let sent = send(&mut client, upload, &mut source, &name, memory, &progress, &stopped);
    let number = match sent {
        Ok(number) => number,
        Err(failure) => {
            // It may be gone already.
            let _ = client.ask(Command::RestoreAbort { upload });
            return Err(failure);
        }
    };

    let seconds = progress.elapsed().as_secs_f64();
    if args.json {
        println!("{}", json!({ "vm": number, "name": name, "memory_bytes": memory, "seconds": seconds }));
    } else {
        println!("vm \"{name}\": goes on, number {number}, after {seconds:.1} s");
    }
    Ok(())
}

/// Sends state and memory. Gives the VM's number.
fn send(
    client: &mut Client,
    upload: u32,
    source: &mut Source,
    name: &str,
    memory: u64,
    progress: &Progress,
    stopped: &AtomicBool,
) -> Result<u32, Failure> {
    source.rewind()?;
    let mut offset = 0;
    let (mut sent, mut told) = (0_u64, 0);
    let mut batch = Vec::new();
    loop {
        let next = source.next()?;
        let is_end = matches!(next, (Part::End { .. }, _));
        match next {
            (Part::State, bytes) => {
                for bytes in bytes.chunks(UPLOAD_CHUNK) {
                    let command = Command::RestoreState { upload, offset, bytes: bytes.to_vec() };
                    offset += bytes.len() as u64;
                    match client.ask_patiently(command)? {
                        Ok(Answer::Done) => {}
                        Ok(Answer::NotCreated { about, why }) => return Err(not_restored(name, about, &why)),
                        other => return Err(unexpected(other.map_err(refusal))),
                    }
                }
            }
            (Part::Memory { gpa }, bytes) => {
                sent += bytes.len() as u64;
                let pieces = (gpa..).step_by(MEMORY_CHUNK).zip(bytes.chunks(MEMORY_CHUNK));
                let piece = |(gpa, bytes): (u64, &[u8])| Command::RestoreMemory { upload, gpa, bytes: bytes.to_vec() };
                batch.extend(pieces.map(piece));
            }
            (Part::End { .. }, _) => {}
        }
        if is_end || batch.len() >= BATCH {
            if stopped.load(Ordering::Relaxed) {
                return Err(Failure::failed("interrupted").with_status(130));
            }
            let sent = client.ask_all(batch.drain(..), |_| {})?;
            sent.map_err(|why| Failure::failed(format!("vm \"{name}\": {}", refusal(why))))?;
        }
        let part = sent.saturating_mul(4) / memory.max(1);
        if part > told && part < 4 {
            told = part;
            progress.say(&format!("vm \"{name}\": {} % sent", part * 25));
        }
        if is_end {
            break;
        }
    }
    match client.ask_patiently(Command::RestoreFinish { upload })? {
        Ok(Answer::Created { vm }) => Ok(vm),
        Err(why) => Err(Failure::failed(format!("vm \"{name}\": {}", refusal(why)))),
        other => Err(unexpected(other.map_err(refusal))),
    }
}

/// Pieces of memory that are sent together.
const BATCH: usize = 256;

fn not_restored(name: &str, about: About, why: &str) -> Failure {
    let failure = Failure::failed(format!("vm \"{name}\" cannot run on this host: {}", printable(why)));
    match about {
        About::State => failure.help("restore it on a host like the one that has saved it"),
        About::Memory | About::Vcpus => {
            failure.help("end or destroy other VMs; `dunlin host` shows the free resources")
        }
        _ => failure,
    }
}

/// A file that is being read.
struct Source {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    /// Where its parts begin.
    parts_at: u64,
    /// Number of the next part.
    number: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = File::open(path).map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut prefix = Vec::new();
        let mut read = |length: u64, into: &mut Vec<u8>| {
            let read = file.by_ref().take(length).read_to_end(into);
            read.map_err(|error| Failure::failed(format!("{}: {error}", path.display())))
        };
        read(saved::PREFIX_BYTES as u64, &mut prefix)?;
        let (length, sum) = saved::prefix(&prefix).map_err(|error| bad(path, error))?;
        let mut header = Vec::new();
        if read(length.into(), &mut header)? < usize::try_from(length).unwrap_or(usize::MAX) {
            return Err(bad(path, SavedError::Truncated));
        }
        let header = saved::header(&header, sum).map_err(|error| bad(path, error))?;
        let parts_at = saved::PREFIX_BYTES as u64 + u64::from(length);
        Ok(Self { path: path.to_path_buf(), file, header, parts_at, number: 0 })
    }

    /// Reads all parts. Gives the number of bytes of memory in them.
    fn check(&mut self) -> Result<u64, Failure> {
        let (mut state, mut memory) = (0, 0);
        loop {
            match self.next()? {
                (Part::State, bytes) => state += bytes.len() as u64,
                (Part::Memory { .. }, bytes) => memory += bytes.len() as u64,
                (Part::End { .. }, _) => break,
            }
        }
        if state != self.header.state_bytes {
            return Err(bad(&self.path, SavedError::Undecodable));
        }
        Ok(memory)
    }

    fn rewind(&mut self) -> Result<(), Failure> {
        self.number = 0;
        let moved = self.file.seek(SeekFrom::Start(self.parts_at));
        moved.map(|_| ()).map_err(|error| Failure::failed(format!("{}: {error}", self.path.display())))
    }

    /// The next part and its content.
    fn next(&mut self) -> Result<(Part, Vec<u8>), Failure> {
        let path = self.path.clone();
        let mut read = |into: &mut [u8]| match self.file.read_exact(into) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(bad(&path, SavedError::Truncated)),
            Err(error) => Err(Failure::failed(format!("{}: {error}", path.display()))),
        };
        let mut head = [0; saved::PART_BYTES];
        read(&mut head)?;
        let head = PartHead::read(head, self.number).map_err(|error| bad(&path, error))?;
        let mut content = vec![0; usize::try_from(head.length).unwrap_or(0)];
        read(&mut content)?;
        let part = head.check(self.number, &content).map_err(|error| bad(&path, error))?;
        self.number += 1;
        Ok((part, content))
    }
}

fn bad(path: &Path, error: SavedError) -> Failure {
    let failure = Failure::bad_input(format!("{}: {error}", path.display()));
    match error {
        SavedError::Version(_) => failure.help("use the Dunlin that has written it"),
        _ => failure,
    }
}

/// A flag that SIGINT, SIGTERM and SIGHUP set: the VM that stands still must go on.
fn catch_signals() -> Result<Arc<AtomicBool>, Failure> {
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, stopped.clone())
            .map_err(|error| Failure::failed(format!("signals cannot be caught: {error}")))?;
    }
    Ok(stopped)
}

#[cfg(test)]
mod tests;
