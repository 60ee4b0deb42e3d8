//! A connection with a fault, for tests of moves: what arrives at one address goes on to another, until the fault.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

const HELP: &str = "\
faulty-wire LISTEN TO [cut N | end N | flip N]

Waits for one connection at LISTEN, and joins it with one to TO (both ADDRESS:PORT). After N bytes from the first to the
second it is cut, or the second hears an end where there is none, or one bit of the next byte is another. Without a
fault, or if fewer bytes come, all goes through. Prints how many bytes there were.
";

/// What goes wrong, after so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Both sides see the end of the connection.
    Cut(u64),
    /// The target sees the end. The source sends into nothing, and hears what the target says.
    End(u64),
    /// One bit changes.
    Flip(u64),
    None,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (ends, fault) = words.split_at(words.len().min(2));
    let &[listen, to] = ends else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    let result = parse(fault).and_then(|fault| run(listen, to, fault));
    match result {
        Ok(count) => {
            println!("faulty-wire: {count} bytes");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("faulty-wire: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(words: &[&str]) -> Result<Fault> {
    let number = |text: &str| text.parse().with_context(|| format!("`{text}` is no number of bytes"));
    Ok(match *words {
        [] => Fault::None,
        ["cut", count] => Fault::Cut(number(count)?),
        ["end", count] => Fault::End(number(count)?),
        ["flip", count] => Fault::Flip(number(count)?),
        _ => bail!("no fault `{}`\n\n{HELP}", words.join(" ")),
    })
}

fn run(listen: &str, to: &str, fault: Fault) -> Result<u64> {
    let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen at {listen}"))?;
    let (source, _) = listener.accept()?;
    let target = connect(to).with_context(|| format!("nobody listens at {to}"))?;
    let (mut from, mut back) = (target.try_clone()?, source.try_clone()?);
    let answers = thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut back);
        let _ = back.shutdown(Shutdown::Write);
    });
    let count = pass_on(source, target, fault)?;
    let _ = answers.join();
    Ok(count)
}

fn connect(to: &str) -> std::io::Result<TcpStream> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let until = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect(to) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < until => {
                thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

fn pass_on(mut source: TcpStream, mut target: TcpStream, fault: Fault) -> Result<u64> {
    let (mut count, mut bytes, mut is_open) = (0_u64, vec![0; 64 << 10], true);
    loop {
        let length = match source.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(length) => length,
        };
        let part = &mut bytes[..length];
        // What is before the fault, if it is in this part.
        let before = |at: u64| at.checked_sub(count).and_then(|at| usize::try_from(at).ok()).filter(|at| *at < length);
        match fault {
            Fault::Cut(at) => {
                if let Some(at) = before(at) {
                    let _ = target.write_all(&part[..at]);
                    let _ = source.shutdown(Shutdown::Both);
                    let _ = target.shutdown(Shutdown::Both);
                    return Ok(count + at as u64);
                }
            }
            Fault::End(at) => {
                if let Some(at) = before(at) {
                    let _ = target.write_all(&part[..at]);
                    target.shutdown(Shutdown::Write)?;
                    is_open = false;
                }
            }
            Fault::Flip(at) => {
                if let Some(at) = before(at) {
                    part[at] ^= 1 << (at % 8);
                }
            }
            Fault::None => {}
        }
        count += length as u64;
        if is_open && target.write_all(part).is_err() {
            break;
        }
    }
    // The other direction goes on until its own end.
    let _ = target.shutdown(Shutdown::Write);
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What arrives of these bytes.
    fn through(bytes: &[u8], fault: Fault) -> Vec<u8> {
        let pair = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
            let one = TcpStream::connect(listener.local_addr().expect("has one")).expect("somebody listens");
            (one, listener.accept().expect("somebody came").0)
        };
        let ((mut source, source_end), (target_end, mut target)) = (pair(), pair());
        let wire = thread::spawn(move || pass_on(source_end, target_end, fault));
        let _ = source.write_all(bytes);
        let _ = source.shutdown(Shutdown::Write);
        let mut arrived = Vec::new();
        target.read_to_end(&mut arrived).expect("ends");
        wire.join().expect("has not failed").expect("ends");
        arrived
    }

    #[test]
    fn fault_is_where_it_was_asked_for() {
        let sent: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
        assert_eq!(through(&sent, Fault::None), sent);
        for at in [0, 1, 65_535, 65_536, 150_000] {
            assert_eq!(through(&sent, Fault::Cut(at as u64)), sent[..at], "{at}");
            assert_eq!(through(&sent, Fault::End(at as u64)), sent[..at], "{at}");
            let flipped = through(&sent, Fault::Flip(at as u64));
            let others: Vec<usize> = (0..sent.len()).filter(|at| sent[*at] != flipped[*at]).collect();
            assert_eq!(others, [at]);
            assert_eq!((sent[at] ^ flipped[at]).count_ones(), 1);
        }
        assert_eq!(through(&sent, Fault::Cut(200_000)), sent, "there are no more bytes");
    }

    #[test]
    fn words_name_the_fault() {
        assert_eq!(parse(&["flip", "7"]).expect("is one"), Fault::Flip(7));
        assert_eq!(parse(&[]).expect("is none"), Fault::None);
        assert!(parse(&["cut"]).is_err() && parse(&["cut", "x"]).is_err());
    }
}
