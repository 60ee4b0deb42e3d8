//! Any file of a saved VM is read to its end, or refused in words, before a host hears of it.

use std::io::{Seek as _, SeekFrom, Write as _};

use abi::saved::{MAGIC, PART_BYTES, Part, VERSION};
use fuzz::Input;

use super::{Source, header};

const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);

/// A file of these bytes, or one with right sums around them, as somebody would make it who means harm.
fn file(bytes: &[u8]) -> Vec<u8> {
    let mut input = Input::new(bytes);
    let description = match input.byte() % 4 {
        0 => return input.rest().to_vec(),
        1 => {
            let length = usize::from(input.u16());
            input.bytes(length).to_vec()
        }
        _ => postcard::to_allocvec(&header()).expect("it is short"),
    };
    let mut file = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    file.extend(u32::try_from(description.len()).expect("it is short").to_le_bytes());
    file.extend(CRC.checksum(&description).to_le_bytes());
    file.extend(description);
    for number in 0_u64.. {
        if input.is_empty() {
            break;
        }
        let (kind, address) = match input.byte() {
            0 => (3, number),
            1..=0x3f => (1, 0),
            0x40..=0x7f => (2, u64::from(input.byte()) << 12),
            0x80..=0x9f => (2, input.u64()),
            kind => (kind, input.u64()),
        };
        let content = match input.byte() {
            length @ 0..=0x3f => input.bytes(length.into()).to_vec(),
            length => vec![length; usize::from(length) << 4],
        };
        let mut head = [0; PART_BYTES];
        head[0] = kind;
        head[1..9].copy_from_slice(&address.to_le_bytes());
        head[9..13].copy_from_slice(&u32::try_from(content.len()).expect("it is short").to_le_bytes());
        let mut digest = CRC.digest();
        [&number.to_le_bytes()[..], &head[..13], &content].iter().for_each(|bytes| digest.update(bytes));
        head[13..].copy_from_slice(&digest.finalize().to_le_bytes());
        file.extend(head);
        file.extend(content);
    }
    file
}

fn read(bytes: &[u8]) {
    let file = file(bytes);
    let mut on_disk = tempfile::NamedTempFile::new().expect("there is room");
    on_disk.write_all(&file).and_then(|()| on_disk.seek(SeekFrom::Start(0))).expect("it is written");
    let path = on_disk.path().display().to_string();

    let mut source = match Source::open(on_disk.path()) {
        Ok(source) => source,
        Err(failure) => return is_for_people(&failure.to_string(), &path),
    };
    let memory = match source.check() {
        Ok(memory) => memory,
        Err(failure) => return is_for_people(&failure.to_string(), &path),
    };
    // What was checked is what is sent.
    source.rewind().expect("it is a file");
    let (mut state, mut sent) = (0, 0);
    loop {
        let (part, content) = source.next().expect("it was checked");
        match part {
            Part::State => state += content.len() as u64,
            Part::Memory { gpa } => {
                sent += content.len() as u64;
                assert!(gpa.checked_add(content.len() as u64).is_some(), "memory behind the last address");
            }
            Part::End { parts } => {
                assert_eq!(parts + 1, source.number);
                break;
            }
        }
    }
    assert_eq!((sent, state), (memory, source.header.state_bytes));
}

/// A line that names the file, and perhaps a line of help; nothing of the file's content gets to the terminal.
fn is_for_people(message: &str, path: &str) {
    assert!(message.starts_with(path), "{message}");
    assert!(message.lines().count() <= 2 && !message.contains(|c: char| c.is_control() && c != '\n'), "{message:?}");
}

#[test]
fn any_file_is_read_to_its_end_or_refused_in_words() {
    fuzz::target("saved_files", read);
}
