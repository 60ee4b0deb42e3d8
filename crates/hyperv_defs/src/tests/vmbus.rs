use alloc::vec::Vec;

use super::bytes;
use crate::vmbus::{Posted, Reply};
use crate::{Call, Code, Control, Offered, Refusal, Request, Status, parse};

/// A message of this many bytes, as the guest posts it.
fn post(connection: u64, kind: u64, size: u64, message: &[u64]) -> Result<Posted, Status> {
    let mut input = Vec::from([connection, kind | size << 32]);
    input.extend(message);
    input.resize(32, 0);
    match parse(Control::new(Code::PostMessage), &bytes(&input), Offered::POST_MESSAGES) {
        Ok(Call::Partition(Request::PostMessage(posted))) => Ok(posted),
        Err(Refusal::Status(status)) => Err(status),
        other => panic!("not a message: {other:?}"),
    }
}

#[test]
fn guest_agrees_on_a_version_asks_for_channels_and_leaves() {
    // As Linux 7.3 sends it: version 6.0, vCPU 3, SINT 2, two pages that are never used.
    let contact = post(4, 1, 40, &[14, 3 << 32 | 0x6_0000, 2, 0x1000, 0x2000]);
    assert_eq!(contact, Ok(Posted::Contact { version: 0x6_0000, vcpu: 3 }));
    assert_eq!(post(4, 1, 8, &[3]), Ok(Posted::RequestOffers));
    assert_eq!(post(1, 1, 8, &[16]), Ok(Posted::Unload));
    assert_eq!(post(4, 1, 240, &[21]), Ok(Posted::Other));

    let reply = |posted: Result<Posted, Status>| Reply::to(posted.expect("is right")).map(Reply::payload);
    let mut version = [0; 16];
    (version[0], version[8], version[12]) = (15, 1, 4);
    assert_eq!(reply(contact), Some(version));
    version[8] = 0;
    assert_eq!(reply(post(1, 1, 40, &[14, 0x4_0000])), Some(version), "an old version has no SINT");
    assert_eq!(reply(post(4, 1, 8, &[3])).expect("an answer")[..8], [4, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(reply(post(4, 1, 8, &[16])).expect("an answer")[0], 17);
    assert_eq!(reply(post(4, 1, 8, &[5])), None);
}

#[test]
fn message_to_nobody_or_of_another_kind_is_refused() {
    for connection in [0, 2, 3, 5, 0x80_0074] {
        assert_eq!(post(connection, 1, 8, &[3]), Err(Status::InvalidConnectionId), "{connection:#x}");
    }
    for (kind, size) in [(0, 8), (2, 8), (0x8000_0010, 8), (1, 0), (1, 7), (1, 241), (1, 0xffff_ffff)] {
        assert_eq!(post(4, kind, size, &[3]), Err(Status::InvalidParameter), "{kind:#x}, {size}");
    }
    for listens_at in [0, 1, 3, 0xff, 0x102] {
        assert_eq!(post(4, 1, 40, &[14, 0x5_0000, listens_at]), Err(Status::InvalidParameter), "{listens_at:#x}");
    }
    assert_eq!(post(4, 1, 23, &[14, 0x5_0000, 2]), Ok(Posted::Other), "too short to be understood");
}

#[test]
fn only_who_may_post_messages_can() {
    let all_but = Offered::all().difference(Offered::POST_MESSAGES);
    let refused = parse(Control::new(Code::PostMessage), &[0; 256], all_but).expect_err("is not offered");
    assert_eq!(refused, Refusal::Status(Status::AccessDenied));
}
