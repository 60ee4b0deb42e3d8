//! Frames of the control port, in both directions.

use abi::control::{FRAME_LIMIT, FrameError, Message, Receiver, Request, encode};
use fuzz::{Input, target};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn read(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => stream::<Request>(input.rest()),
        1 => stream::<Message>(input.rest()),
        2 => message::<Request>(input.rest()),
        _ => message::<Message>(input.rest()),
    }
}

/// Any bytes.
fn stream<T: DeserializeOwned>(bytes: &[u8]) {
    let mut receiver = Receiver::default();
    let ends = bytes.iter().filter(|byte| **byte == 0).count();
    let answers = bytes.iter().filter_map(|byte| receiver.push::<T>(*byte)).count();
    assert!(answers <= ends, "an answer for each frame at most");
    // Two zeros later it is in step again, whatever came before.
    let _ = receiver.push::<T>(0);
    let frame = encode(&Request { id: 7, command: abi::control::Command::Hello }).expect("short");
    let told: Vec<_> = frame.iter().filter_map(|byte| receiver.push::<Request>(*byte)).collect();
    assert!(matches!(told[..], [Ok(Request { id: 7, .. })]), "{told:?}");
}

/// Bytes as the message of a frame whose checksum is right. What is understood can be sent again.
fn message<T: Serialize + DeserializeOwned + std::fmt::Debug>(bytes: &[u8]) {
    let Ok((decoded, [])) = postcard::take_from_bytes::<T>(bytes) else { return };
    let frame = match encode(&decoded) {
        Ok(frame) => frame,
        Err(error) => {
            assert!(error == FrameError::TooLong && bytes.len() > FRAME_LIMIT / 2, "{error}: {decoded:?}");
            return;
        }
    };
    assert!(frame.len() <= FRAME_LIMIT && frame.iter().position(|byte| *byte == 0) == Some(frame.len() - 1));
    let mut receiver = Receiver::default();
    let mut told: Vec<_> = frame.iter().filter_map(|byte| receiver.push::<T>(*byte)).collect();
    let again = told.pop().expect("a frame ends").expect("it was just encoded");
    assert_eq!(format!("{again:?}"), format!("{decoded:?}"));
}

#[test]
fn any_stream_is_answered_frame_by_frame_and_any_message_reads_the_same_after_it_was_sent() {
    target("frames", read);
}
