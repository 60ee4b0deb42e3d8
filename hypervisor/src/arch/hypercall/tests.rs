use abi::payload::{Role, VmConfig};
use addr::{Gpa, GpaRange};
use hyperv_defs::interrupt::{CreatePort, Port};
use hyperv_defs::partition::CreatePartitionInput;
use hyperv_defs::property::{ProcessorFeatures, SyntheticFeatures, XsaveFeatures};
use hyperv_defs::vp::Vp;
use hyperv_defs::wire::{U32, U64};
use hyperv_defs::{Answer, Call, Checked, Code, Control, Offered, PartitionId, Refusal, Status, check, msr};
use partition::Host;
use std::vec;
use std::vec::Vec;
use synic::{Interrupt, Message, Synic};
use vcpu_layout::OwnerGuard;

use super::{Children, Ended, SynicPage, parent as calls};
use crate::arch::fake::machine::{Simulation, run};
use crate::tests::{config, create, prepare};
use crate::vcpu::Owner;
use crate::vm::Vm;

/// Where outputs go. The VM has 2 MiB.
pub(super) const OUTPUT: Gpa = Gpa(0x1000);
const BEYOND: Gpa = Gpa(0x80_0000);

pub(super) fn children() -> Children {
    children_of(1)
}

/// The children of a parent with this number of vCPUs.
fn children_of(vcpus: u32) -> Children {
    let host = Host {
        features: ProcessorFeatures::SSE3,
        xsave_features: XsaveFeatures::XSAVE,
        xsave_states: 7,
        max_xsave_bytes: 832,
        synthetic_features: SyntheticFeatures::empty(),
        physical_address_width: 48,
        tsc_hertz: 1_000_000_000,
        vps: 4,
        pages_per_vp: 1,
    };
    Children::new(host, vcpus, GpaRange::new(Gpa(0), 2 << 20).into_iter()).expect("there is memory")
}

/// Runs this with a VM that never starts.
fn with_vm(script: fn(&Vm)) {
    run(1, move |simulation: &Simulation| {
        let config = VmConfig { role: Role::Parent, ..config("parent", 1) };
        prepare(core::slice::from_ref(&config));
        let vm = create(simulation, 0, &config, vec![vec![]]);
        let _held = held(&vm);
        script(&vm);
    });
}

/// As long as this lives, no pCPU runs a vCPU of the VM or takes what is posted to it.
fn held(vm: &Vm) -> Vec<OwnerGuard<'_, Owner>> {
    vm.vcpus().iter().map(|vcpu| vcpu.own()).collect()
}

/// A call with this input, as the VM makes it.
pub(super) fn call(
    vm: &Vm,
    children: Option<&Children>,
    control: Control,
    input: &[u8],
    output: Gpa,
) -> Result<Ended, Status> {
    let checked: Checked = match check(control, Offered::all()) {
        Ok(checked) => checked,
        Err(Refusal::Status(status)) => return Err(status),
        Err(Refusal::InvalidOpcode) => panic!("everything is offered"),
    };
    match checked.parse(input)? {
        Call::Partition(request) => calls::perform(vm, 0, &checked, &request, children, output),
        _ => Err(Status::InvalidHypercallCode),
    }
}

pub(super) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn word_at(vm: &Vm, at: Gpa) -> u64 {
    let mut bytes = [0; 8];
    assert!(vm.memory.read(at, &mut bytes));
    u64::from_le_bytes(bytes)
}

pub(super) fn create_input() -> Vec<u8> {
    let input = CreatePartitionInput {
        flags: U64::new(0x48_2110),
        compatibility_version: U32::new(0x609),
        ..CreatePartitionInput::default()
    };
    input.bytes().to_vec()
}

pub(super) const DONE: Result<Ended, Status> = Ok(Ended::With(Answer(0)));

#[test]
fn partition_is_created_once_its_id_can_be_told() {
    with_vm(|vm| {
        let children = children();
        let create = |output| call(vm, Some(&children), Control::new(Code::CreatePartition), &create_input(), output);
        assert_eq!(create(BEYOND), Err(Status::InvalidHypercallInput), "nobody could tell its id");
        assert_eq!(create(Gpa(OUTPUT.0 + 4)), Err(Status::InvalidAlignment));
        assert_eq!(children.count(), 0);

        assert_eq!(create(OUTPUT), DONE);
        let first = word_at(vm, OUTPUT);
        assert_eq!(create(OUTPUT), DONE);
        assert_ne!(word_at(vm, OUTPUT), first);
        assert_eq!(children.count(), 2);

        let by_id = |code, id| call(vm, Some(&children), Control::new(code).with_fast(), &words(&[id]), Gpa(!0));
        assert_eq!(by_id(Code::FinalizePartition, first), DONE);
        assert_eq!(by_id(Code::FinalizePartition, first), Err(Status::InvalidPartitionState));
        assert_eq!(by_id(Code::DeletePartition, first), DONE);
        assert_eq!(by_id(Code::DeletePartition, first), Err(Status::InvalidPartitionId));
        assert_eq!(children.count(), 1);
    });
}

#[test]
fn property_is_written_behind_nothing_else() {
    with_vm(|vm| {
        let children = children();
        assert!(vm.memory.write(OUTPUT, &[0xff; 32]));
        let ex = Control::new(Code::GetPartitionPropertyEx);
        assert_eq!(call(vm, Some(&children), ex, &words(&[!0, 0x9_0007, 0]), OUTPUT), DONE);
        assert_eq!([0, 8, 16].map(|offset| word_at(vm, Gpa(OUTPUT.0 + offset))), [1, 2, !0]);
        let get = Control::new(Code::GetPartitionProperty);
        assert_eq!(call(vm, Some(&children), get, &words(&[!0, 0x6_0009]), OUTPUT), DONE);
        assert_eq!([0, 8].map(|offset| word_at(vm, Gpa(OUTPUT.0 + offset))), [1_000_000_000, 2]);
    });
}

#[test]
fn vm_without_children_is_denied() {
    with_vm(|vm| {
        let create = Control::new(Code::CreatePartition);
        assert_eq!(call(vm, None, create, &create_input(), OUTPUT), Err(Status::AccessDenied));
        let own = Control::new(Code::GetPartitionProperty);
        assert_eq!(call(vm, None, own, &words(&[!0, 0x6_000a]), OUTPUT), Err(Status::AccessDenied));
    });
}

/// Any bytes: each call ends, and nothing is written outside of the output's page.
#[test]
fn random_calls_are_answered() {
    with_vm(|vm| {
        let children = children();
        let mut random = fastrand::Rng::with_seed(0x5eed_0001);
        let guard = [0xa5; 16];
        assert!(vm.memory.write(Gpa(OUTPUT.0 - 16), &guard) && vm.memory.write(Gpa(OUTPUT.0 + 0x1000), &guard));
        for _ in 0..200_000 {
            let code = Code::ALL[random.usize(7..Code::ALL.len())];
            let list = if code.shape().rep.is_some() { random.u16(..8) } else { 0 };
            let control = Control::new(code).with_rep_count(list);
            let input: Vec<u64> = (0..16)
                .map(|_| match random.u8(..6) {
                    0 => random.u64(..),
                    1 => !0,
                    2 => 0x100 + random.u64(..64),
                    3 => [0x1_0001, 0x9_0007, 0x6_000a, 0x48_2110, 0x609][random.usize(..5)],
                    _ => random.u64(..4),
                })
                .collect();
            let input = if random.u8(..4) == 0 { create_input() } else { words(&input) };
            let output = if random.u8(..8) == 0 { Gpa(random.u64(..)) } else { OUTPUT };
            match call(vm, Some(&children), control, &input, output) {
                Ok(Ended::With(answer)) => assert!(answer.reps() <= list),
                Ok(Ended::NotYet(next)) => assert_eq!(next, control),
                Ok(other) => panic!("{other:?}"),
                Err(status) => assert_ne!(status, Status::Success),
            }
        }
        let mut seen = [0; 16];
        for at in [OUTPUT.0 - 16, OUTPUT.0 + 0x1000] {
            // The parent may have deposited the page, and may have it back, cleared.
            let is_there = vm.memory.read(Gpa(at), &mut seen);
            assert!(!is_there || seen == guard || seen == [0; 16], "{seen:x?}");
        }
        assert!(children.count() <= partition::limits::CHILDREN);
    });
}

/// The page of messages, and what the parent's kernel does with slot 0.
const MESSAGES: Gpa = Gpa(0x4000);

/// Takes the message in slot 0: its sender, its payload, and whether the kernel writes EOM next.
fn take_message(vm: &Vm) -> Option<(u64, u64, bool)> {
    let [first, sender, payload] = [0, 8, 16].map(|offset| word_at(vm, Gpa(MESSAGES.0 + offset)));
    if first & 0xffff_ffff == 0 {
        return None;
    }
    assert!(vm.memory.write(MESSAGES, &[0; 4]));
    let is_pending = word_at(vm, MESSAGES) >> 40 & 1 != 0;
    Some((sender, payload, is_pending))
}

/// The page of event rings.
const RINGS: Gpa = Gpa(0x6000);

/// A SynIC with its pages, as Linux uses them: this interrupt for SINT 0, and SINT 5 for doorbells.
fn synic(vector: u64) -> Synic {
    let mut synic = Synic::with_pages(MESSAGES.0, 0x5000);
    const AS_INTERCEPT: u64 = 1 << 19;
    for (number, value) in [
        (msr::SINT0, vector),
        (msr::SINT0 + 5, vector | AS_INTERCEPT),
        (msr::SIMP, MESSAGES.0 | 1),
        (msr::SIRBP, RINGS.0 | 1),
        (msr::SCONTROL, 1),
    ] {
        synic.write(number, value).expect("the register exists");
    }
    synic
}

#[test]
fn messages_of_children_wait_for_slot_0_and_none_is_lost() {
    with_vm(|vm| {
        let children = children();
        let mail = &children.mail;
        let inbox = mail.inbox(0).expect("there is a vCPU");
        let page = SynicPage { memory: &vm.memory, gpa: MESSAGES };
        let synic = synic(0xf3);
        let deliver = || synic.pump_posted(0, &page, &inbox.senders, |sender| mail.message_of(sender));

        let vp = |index| Vp { partition: PartitionId(0x100), index };
        let senders: Vec<u32> = (0..200).map(|index| mail.add_sender(vp(index)).expect("there are numbers")).collect();
        for sender in &senders {
            mail.post(vm, 0, *sender);
        }
        assert!(vm.vcpus()[0].mailbox().has_work(), "the vCPU is to look");

        let mut heard = Vec::new();
        assert_eq!(deliver(), Some(Interrupt { vector: 0xf3, auto_eoi: false }));
        assert_eq!(deliver(), None, "the slot is occupied");
        while let Some((sender, payload, is_pending)) = take_message(vm) {
            assert_eq!(sender, 0x100);
            heard.push(payload);
            assert_eq!(is_pending, heard.len() < 200, "another one waits");
            let _ = deliver();
        }
        heard.sort_unstable();
        assert_eq!(heard, (0..200).collect::<Vec<_>>());
    });
}

#[test]
fn number_of_a_sender_that_has_ended_says_nothing_and_is_not_used_again_soon() {
    with_vm(|vm| {
        let children = children();
        let mail = &children.mail;
        let vp = |partition, index| Vp { partition: PartitionId(partition), index };
        let ended = mail.add_sender(vp(0x100, 255)).expect("there are numbers");
        let other = mail.add_sender(vp(0x101, 3)).expect("there are numbers");
        mail.post(vm, 0, ended);
        mail.post(vm, 0, other);
        mail.remove_senders_of(PartitionId(0x100), || {});
        assert_eq!(mail.message_of(ended as usize), None);
        assert_eq!(mail.message_of(other as usize), Some(Message::opaque_intercept(PartitionId(0x101), 3)));
        let inbox = mail.inbox(0).expect("there is a vCPU");
        assert_eq!((inbox.senders.take(), inbox.senders.take()), (Some(other as usize), None));

        let next = mail.add_sender(vp(0x102, 0)).expect("there are numbers");
        assert!(next != ended && next != other);
        // A parent with very many: the last free number is found, and then there is none.
        let more = (0..).map_while(|index| mail.add_sender(vp(0x103, index))).count();
        assert_eq!(more, 4096 - 64 - 2);
        assert_eq!((mail.remove_sender(other), mail.add_sender(vp(0x104, 0))), ((), Some(other)));
    });
}

#[test]
fn interrupt_is_asserted_in_those_vcpus_of_the_child_that_it_is_for() {
    run(1, |simulation: &Simulation| {
        let configs = [config("parent", 1), config("child", 3)];
        prepare(&configs);
        let parent = create(simulation, 0, &configs[0], vec![vec![]]);
        let child = create(simulation, 1, &configs[1], vec![vec![], vec![], vec![]]);
        let children = children();
        children.add_vm(PartitionId(0x100), child.clone());
        let _held = held(&child);
        let assert = |partition: u64, kind_and_flags: u64, destination: u64, vector: u64| {
            let input = words(&[partition, kind_and_flags, destination, vector]);
            call(&parent, Some(&children), Control::new(Code::AssertVirtualInterrupt), &input, Gpa(!0))
        };
        let hearers = || -> Vec<usize> {
            let vcpus = child.vcpus().iter().map(|vcpu| !vcpu.mailbox().take().is_empty());
            vcpus.enumerate().filter_map(|(index, has_heard)| has_heard.then_some(index)).collect()
        };
        let _ = hearers();
        const LEVEL: u64 = 1 << 32;
        const LOGICAL: u64 = 1 << 33;
        for (kind_and_flags, destination, heard) in [
            (0, 1, vec![1]),
            (LEVEL, 2, vec![2]),
            (0, 7, vec![]),
            (0, 0xff, vec![0, 1, 2]),
            (0, 0xffff_ffff, vec![0, 1, 2]),
            (LOGICAL, 0x7, vec![0, 1, 2]),
        ] {
            assert_eq!(assert(0x100, kind_and_flags, destination, 0x40), DONE);
            assert_eq!(hearers(), heard, "{kind_and_flags:#x} {destination:#x}");
        }
        for (kind, vector) in [(7, 0x20), (7, 0), (8, 0), (9, 0)] {
            assert_eq!(assert(0x100, kind, 2, vector), DONE);
            assert_eq!(hearers(), [2], "external, or at a pin: {kind}");
        }
        assert_eq!(assert(0x100, 2, 0, 0x40), DONE, "SMI");
        assert_eq!((hearers(), assert(0x101, 0, 0, 0x40)), (vec![], Err(Status::InvalidPartitionId)));
    });
}

#[test]
fn doorbells_wait_for_room_in_the_ring_and_none_is_lost() {
    /// Where the ring of SINT 5 is, and its first port.
    const RING: u64 = RINGS.0 + 5 * 256;
    with_vm(|vm| {
        let children = children();
        let mail = &children.mail;
        let inbox = mail.inbox(0).expect("there is a vCPU");
        let page = SynicPage { memory: &vm.memory, gpa: MESSAGES };
        let synic = synic(0xf3);
        let deliver = || {
            mail.fill_rings(vm, 0, &synic, |vector| panic!("{vector:#x}: SINT 5 tells by a message"));
            synic.pump_posted(0, &page, &inbox.senders, |sender| mail.message_of(sender))
        };
        let create = |number| CreatePort {
            port: Port { partition: PartitionId::SELF, number },
            sender: PartitionId(0x100),
            sint: 5,
            vp: None,
        };
        let ports: Vec<_> = (1..=100)
            .map(|number| {
                mail.add_port(&create(number)).expect("there is room");
                mail.port(number).expect("it is there now")
            })
            .collect();
        for port in &ports {
            assert!(mail.ring(vm, 0, *port) && mail.ring(vm, 0, *port), "twice is once");
        }
        assert!(vm.vcpus()[0].mailbox().has_work(), "the vCPU is to look");

        let mut heard = Vec::new();
        let mut tail = 0;
        let mut told = 0;
        let mut empties = 0;
        loop {
            let _ = deliver();
            let Some((sender, sint, _)) = take_message(vm) else { break };
            assert_eq!((sender, sint), (0, 5));
            told += 1;
            let place = |tail: u64| Gpa(RING + 4 + tail * 4);
            let mut port = [0; 4];
            while vm.memory.read(place(tail), &mut port) && port != [0; 4] {
                heard.push(u32::from_le_bytes(port));
                assert!(vm.memory.write(place(tail), &[0; 4]));
                tail = (tail + 1) % 63;
            }
            let mut is_full = [0];
            assert!(vm.memory.read(Gpa(RING + 1), &mut is_full) && vm.memory.write(Gpa(RING + 1), &[0]));
            if is_full == [1] {
                empties += 1;
                let input = words(&[5]);
                let notify = Control::new(Code::NotifyPortRingEmpty).with_fast();
                assert_eq!(call(vm, Some(&children), notify, &input, Gpa(!0)), DONE);
            }
        }
        heard.sort_unstable();
        assert_eq!(heard, (1..=100).collect::<Vec<u32>>());
        assert_eq!((empties, told), (1, 2), "63, then the rest");

        // One that the guest looks at anyway, and ports that are gone.
        assert!(vm.memory.write(Gpa(RING), &[1]) && mail.ring(vm, 0, ports[0]));
        assert_eq!((deliver(), take_message(vm)), (None, None));
        assert!(mail.ring(vm, 0, ports[1]));
        mail.remove_port(2);
        assert!(!mail.ring(vm, 0, ports[1]) && mail.ring(vm, 0, ports[2]));
        mail.remove_ports_of(PartitionId(0x100), || {});
        assert!(!mail.ring(vm, 0, ports[2]) && deliver().is_none());
        assert_eq!(word_at(vm, Gpa(RING + 8 + tail * 4)) & 0xffff_ffff, 0, "the ring has nothing more");
    });
}

#[test]
fn what_waits_for_a_vcpu_without_a_page_is_heard_by_another() {
    run(1, |simulation: &Simulation| {
        let config = VmConfig { role: Role::Parent, ..config("parent", 3) };
        prepare(core::slice::from_ref(&config));
        let vm = create(simulation, 0, &config, vec![vec![], vec![], vec![]]);
        let _held = held(&vm);
        let children = children_of(3);
        let mail = &children.mail;
        let vp = Vp { partition: PartitionId(0x100), index: 0 };
        let sender = mail.add_sender(vp).expect("there are numbers");
        let waits = || {
            let inboxes = (0..3).filter_map(|index| Some((index, mail.inbox(index)?)));
            inboxes.filter(|(_, inbox)| inbox.senders.has_some()).map(|(index, _)| index).collect::<Vec<_>>()
        };
        let is_to_look = |index: usize| !vm.vcpus()[index].mailbox().take().is_empty();

        // Nobody listens yet: it waits. The first that listens has it handed on.
        mail.post(&vm, 2, sender);
        assert_eq!(waits(), [0]);
        mail.close(&vm, 0);
        assert!(waits() == [0] && is_to_look(0));
        mail.open(&vm, 1);
        assert!(is_to_look(0) && !is_to_look(2));
        mail.close(&vm, 0);
        assert!(waits() == [1] && is_to_look(1));

        // The vCPU that is named, if it listens, and any other that does when it no longer listens.
        mail.open(&vm, 2);
        mail.post(&vm, 2, sender);
        assert_eq!(waits(), [1, 2]);
        mail.close(&vm, 1);
        assert_eq!(waits(), [2]);
        mail.open(&vm, 0);
        mail.close(&vm, 2);
        assert!(waits() == [0] && is_to_look(0));
        mail.post(&vm, 77, sender);
        assert_eq!(waits(), [0]);
    });
}

/// Pages of statistics, by their numbers.
const STATS: [u64; 4] = [0x20, 0x21, 0x22, 0x23];
const OF_HOST: u64 = 1;
const OF_PARTITION: u64 = 0x1_0001;
const OF_VP: u64 = 0x1_0002;

#[test]
fn statistics_are_written_until_their_page_is_unmapped_or_their_object_ends() {
    with_vm(|vm| {
        let children = children();
        let make = |code, input: &[u64]| call(vm, Some(&children), Control::new(code), &words(input), OUTPUT);
        let map = |object, id, page| make(Code::MapStatsPage2, &[object, id, 0, page]);
        let unmap = |object, id| make(Code::UnmapStatsPage, &[object, id, 0]);
        let shown = |page: u64, index: u64| word_at(vm, Gpa(page * 4096 + index * 8));
        let mark = |page: u64| assert!(vm.memory.write(Gpa(page * 4096), &[0xee; 4096]));
        const MARK: u64 = 0xeeee_eeee_eeee_eeee;
        let [own, of_child, of_host, of_vp] = STATS;
        let processors = crate::cpu::count() as u64;

        mark(own);
        assert_eq!(map(OF_PARTITION, !0, own), DONE);
        assert_eq!((word_at(vm, OUTPUT), shown(own, 511)), (own, 0), "nothing is left of what was there");
        children.renew_statistics(vm);
        // VPs, pages, id, children.
        assert_eq!([1, 6, 26, 46].map(|index| shown(own, index)), [1, 512, !0, 0]);

        assert_eq!(call(vm, Some(&children), Control::new(Code::CreatePartition), &create_input(), OUTPUT), DONE);
        let child = word_at(vm, OUTPUT);
        assert_eq!(map(OF_PARTITION, child, of_child), DONE);
        assert_eq!(map(OF_HOST, 0, of_host), DONE);
        assert_eq!(map(OF_VP, !0, of_vp), DONE);
        children.renew_statistics(vm);
        assert_eq!((shown(own, 46), shown(of_child, 26), shown(of_host, 1)), (1, child, processors));
        mark(own);
        children.renew_statistics(vm);
        assert_eq!(shown(own, 26), MARK, "it is not time yet");

        mark(of_child);
        assert_eq!((unmap(OF_PARTITION, !0), unmap(OF_HOST, 0)), (DONE, DONE));
        assert_eq!(make(Code::DeletePartition, &[child]), DONE);
        assert_eq!(map(OF_HOST, 0, of_host), DONE);
        children.renew_statistics(vm);
        assert_eq!((shown(own, 26), shown(of_child, 26), shown(of_host, 1)), (MARK, MARK, processors));

        // Another kernel takes the parent's place.
        mark(of_host);
        children.abandon();
        assert_eq!(map(OF_HOST, 0, of_child), Err(Status::OperationDenied), "the page's end is still to come");
        assert!(children.are_orphans(false));
        children.end_all(vm);
        assert!(!children.are_orphans(false));
        assert_eq!(map(OF_PARTITION, !0, own), DONE);
        children.renew_statistics(vm);
        assert_eq!((shown(own, 26), shown(of_host, 1)), (!0, MARK));
    });
}

#[test]
fn statistics_of_what_does_not_exist_or_to_where_nothing_is_are_refused() {
    with_vm(|vm| {
        let children = children();
        let make = |code, input: &[u64]| call(vm, Some(&children), Control::new(code), &words(input), OUTPUT);
        let map = |object, id, vp, page| make(Code::MapStatsPage2, &[object, id, vp, page]);
        let [page, ..] = STATS;
        let bad = Err(Status::InvalidParameter);
        let parents_area = 1 << 56;
        assert_eq!(map(OF_PARTITION, 0x1234, 0, page), Err(Status::InvalidPartitionId));
        assert_eq!(map(OF_VP, !0, 1, page), Err(Status::InvalidVpIndex));
        assert_eq!(map(OF_VP, !0, parents_area, page), bad);
        assert_eq!(map(OF_PARTITION, !0, 0, 0x200), bad, "behind the end of memory");
        assert_eq!((map(2, 9, 0, page), map(3, 0, 0, page)), (bad, bad));

        assert_eq!(make(Code::UnmapStatsPage, &[OF_PARTITION, !0, 0]), Err(Status::NotFound));
        assert_eq!(map(OF_PARTITION, !0, 0, page), DONE);
        assert_eq!(map(OF_PARTITION, !0, 0, page + 1), Err(Status::OperationDenied));
        let nowhere =
            call(vm, Some(&children), Control::new(Code::MapStatsPage2), &words(&[OF_HOST, 0, 0, page + 1]), BEYOND);
        assert_eq!(nowhere, Err(Status::InvalidHypercallInput), "its number cannot be told");
        assert_eq!(map(OF_HOST, 0, 0, page + 1), DONE, "and so it was not mapped");
        children.renew_statistics(vm);
        assert_eq!(word_at(vm, Gpa(page * 4096 + 26 * 8)), !0, "what failed has changed nothing");
    });
}
