//! Records, written and read again; and what is no record.

use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::reader::parse;
use super::*;

fn log(path: &Path) -> Log {
    Log::open("tlb", Some(path)).expect("can be written")
}

fn figure(samples: &[f64]) -> Figure {
    Figure::new("latency mean", Class::Time, "ns", samples).at("vcpus", 8).at("approach", "ipi")
}

fn run() -> Value {
    json!({ "qemu": "7.2.22", "accel": "tcg", "cpu_model": "max", "arch": "x86_64" })
}

#[test]
fn what_was_written_is_read_with_its_circumstances() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    let log = log(&path);
    log.emulated(&run(), figure(&[1.5, 2.0]).observations(2000).others(Some(0.25)));
    log.native(Figure::new("cycles", Class::Time, "cycles", [3.0]));
    log.failure("8 vCPUs", "the host died");
    assert!(log.is_whole());

    let read = read(&path).expect("is there");
    assert_eq!((read.records.len(), read.bad.len()), (3, 0));
    let first = &read.records[0];
    assert_eq!((first.schema, first.experiment.as_str(), first.circumstances.ground), (1, "tlb", Ground::Emulated));
    let qemu = Qemu { version: "7.2.22".into(), accel: "tcg".into(), cpu: "max".into(), arch: "x86_64".into() };
    assert_eq!(first.circumstances.qemu, Some(qemu));
    assert!(humantime::parse_rfc3339(&first.circumstances.date).is_ok(), "{}", first.circumstances.date);
    assert_eq!(first.circumstances.commit, env!("DUNLIN_COMMIT"));
    let native = &read.records[1].circumstances;
    assert_eq!((native.ground, native.qemu.as_ref()), (Ground::Native, None));
    assert!(matches!(&read.records[2].content, Content::Failure { why, .. } if why == "the host died"));
}

#[test]
fn figure_without_samples_is_not_written() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).native(figure(&[]));
    assert_eq!(std::fs::read(&path).expect("is there"), b"");
}

/// Of a guest that stood still from 0.2 s to 1.2 s.
fn course() -> Course {
    Course {
        quantity: "speed".to_string(),
        settings: Settings::from([("host".to_string(), json!("KVM"))]),
        unit: "% of the speed before".to_string(),
        class: Class::Ratio,
        from: -0.1,
        step: 0.1,
        samples: vec![100.0, 50.123_456_7, 0.0],
        middles: vec![-0.05, 0.05, 1.25],
        moments: BTreeMap::from([("stop".to_string(), vec![0.2]), ("resume".to_string(), vec![1.2])]),
        counts: BTreeMap::from([("rounds".to_string(), 3.0)]),
        others_share: None,
    }
}

#[test]
fn course_is_read_as_it_was_written_with_six_digits() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).course(&run(), course());
    let read = read(&path).expect("is there");
    let Content::Course(again) = &read.records[0].content else { panic!("is a course") };
    assert_eq!(again, &Course { samples: vec![100.0, 50.1235, 0.0], ..course() });
    assert_eq!(again.pieces().collect::<Vec<_>>(), [(-0.05, 100.0), (0.05, 50.1235), (1.25, 0.0)]);
    assert_eq!((again.moment("resume"), again.moment("round")), (Some(1.2), None));
}

#[test]
fn course_of_an_older_log_has_its_pieces_one_after_the_other() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).course(&run(), Course { middles: Vec::new(), counts: BTreeMap::new(), ..course() });
    let text = std::fs::read_to_string(&path).expect("is there");
    assert!(!text.contains("middles") && !text.contains("counts"), "{text}");
    let read = read(&path).expect("is there");
    let Content::Course(again) = &read.records[0].content else { panic!("is a course") };
    let middles: Vec<f64> = again.pieces().map(|(middle, _)| (middle * 100.0).round()).collect();
    assert_eq!(middles, [-5.0, 5.0, 15.0]);
}

#[test]
fn course_with_a_middle_too_few_is_no_record() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).course(&run(), Course { middles: vec![0.0], ..course() });
    let read = read(&path).expect("is there");
    assert_eq!((read.records.len(), read.bad[0].what.as_str()), (0, "`middles` are not as many as `samples`"));
}

#[test]
fn line_that_was_cut_off_costs_no_other_line() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).native(figure(&[1.0]));
    let whole = std::fs::read(&path).expect("is there");
    std::fs::write(&path, [&whole[..], &whole[..whole.len() / 2]].concat()).expect("can be written");
    log(&path).native(figure(&[2.0]));

    let read = read(&path).expect("is there");
    assert_eq!(read.records.len(), 2);
    let bad: Vec<_> = read.bad.iter().map(|bad| (bad.line, bad.what.split(':').next())).collect();
    assert_eq!(bad, [(2, Some("cut off"))]);
    assert!(read.bad[0].to_string().contains("results.jsonl:2: cut off: "), "{}", read.bad[0]);
}

#[test]
fn lines_that_are_no_records_are_told_with_what_is_wrong() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    log(&path).native(figure(&[1.0]));
    let good = std::fs::read_to_string(&path).expect("is there");
    let cases = [
        ("{\"schema\":1", "cut off"),
        ("hello\u{1b}[2J", "no JSON"),
        ("[1]", "not a record: the number `schema` is missing"),
        (&good.replace("\"schema\":1", "\"schema\":2"), "a record with schema 2; this dunlin knows schema 1"),
        (&good.replace("\"unit\":\"ns\",", ""), "not a complete record: missing field `unit`"),
        (&good.replace("[1.0]", "[]"), "a figure without samples"),
        (&good.replace("[1.0]", "[null]"), "not a complete record: "),
        (&good.replace("\"vcpus\":8", "\"vcpus\":[8]"), "setting `vcpus` is neither text nor number"),
        (&good.replace("\"kind\":\"figure\"", "\"kind\":\"rumour\""), "not a complete record: unknown variant"),
    ];
    for (line, expected) in cases {
        let text = format!("\n{}\n{good}", line.trim_end());
        let read = parse(Path::new("x"), text.as_bytes());
        assert_eq!((read.records.len(), read.bad.len()), (1, 1), "{line}");
        let bad = &read.bad[0];
        assert!(bad.line == 2 && bad.what.starts_with(expected), "{bad}");
        assert!(!bad.to_string().contains('\u{1b}'));
    }
    assert_eq!(parse(Path::new("x"), b"\xff\xfe{}\n").bad[0].what, "no UTF-8 text");
}

#[test]
fn samples_of_the_same_thing_are_taken_together_and_of_others_not() {
    let directory = tempfile::tempdir().expect("can be made");
    let path = directory.path().join("results.jsonl");
    let log = log(&path);
    log.emulated(&run(), figure(&[1.0]).observations(10).others(Some(0.1)));
    log.emulated(&run(), figure(&[3.0, 2.0]).observations(5).others(Some(0.3)));
    log.emulated(&run(), figure(&[9.0]).at("vcpus", 16));
    log.native(figure(&[7.0]));
    let pooled = pool(&read(&path).expect("is there").records);
    assert_eq!(pooled.len(), 3);
    let (key, series) = pooled.iter().find(|(_, series)| series.samples.len() == 3).expect("was pooled");
    assert_eq!((key.setting("approach"), key.setting("vcpus"), key.setting("none")), ("ipi", "8", ""));
    assert_eq!((series.observations, series.others_share), (Some(15), Some(0.3)));
    assert_eq!(series.spread().map(|spread| spread.median), Some(2.0));
    assert_eq!(key.to_string(), "tlb: latency mean; approach=ipi vcpus=8");
}

proptest! {
    #[test]
    fn no_bytes_can_upset_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let read = parse(Path::new("x"), &bytes);
        let lines = bytes.split(|&byte| byte == b'\n').filter(|line| !line.iter().all(u8::is_ascii_whitespace)).count();
        prop_assert_eq!(read.records.len() + read.bad.len(), lines);
    }

    #[test]
    fn figures_survive_being_written_down(samples in proptest::collection::vec(-1_000_000_000_000_i64..1_000_000_000_000, 1..5), name in "[a-z \"\\\\]{1,9}") {
        let directory = tempfile::tempdir().expect("can be made");
        let path = directory.path().join("results.jsonl");
        // Counts to the last digit, and six digits of what is no count.
        let samples: Vec<f64> = samples.iter().flat_map(|&it| [it as f64, it as f64 / 1024.0]).collect();
        log(&path).native(Figure::new(name.clone(), Class::Exact, "n", samples.clone()));
        let read = read(&path).expect("is there");
        let Content::Figure { quantity, samples: again, .. } = &read.records[0].content else { panic!("is a figure") };
        prop_assert_eq!((quantity, again.len()), (&name, samples.len()));
        for (one, other) in samples.iter().zip(again) {
            let allowed = if one.fract() == 0.0 { 0.0 } else { one.abs() * 1e-5 };
            prop_assert!((one - other).abs() <= allowed, "{one} came back as {other}");
        }
    }
}
