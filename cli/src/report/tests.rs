//! Pages of real results (`tests/results.jsonl`, of a short run), and of results that have something wrong with them;
//! read by a parser of HTML as browsers have it.

use std::path::Path;

use scraper::{Html, Selector};

use super::data::Data;
use super::page::page;
use super::sections::ALL;
use crate::bench::EXPERIMENTS;
use crate::records::{Records, parse};

const REAL: &str = include_str!("../../tests/results.jsonl");

fn records(text: &str) -> Records {
    parse(Path::new("r.jsonl"), text.as_bytes())
}

fn html_of(text: &str) -> String {
    page(&Data::of(vec![records(text)])).into_string()
}

/// The page, which must have no mistakes.
fn parsed(text: &str) -> Html {
    let html = Html::parse_document(&html_of(text));
    assert!(html.errors.is_empty(), "{:?}", html.errors);
    html
}

fn select<'a>(html: &'a Html, what: &str) -> Vec<scraper::ElementRef<'a>> {
    html.select(&Selector::parse(what).expect("is a selector")).collect()
}

fn text_of(html: &Html, what: &str) -> String {
    let text: Vec<_> = select(html, what).iter().flat_map(|element| element.text()).collect();
    text.concat()
}

#[test]
fn page_of_real_results_is_good_html_with_all_sections_and_plots() {
    let html = parsed(REAL);
    for experiment in EXPERIMENTS {
        assert!(!select(&html, &format!("section#{experiment} table tbody tr")).is_empty(), "{experiment}");
        let text = text_of(&html, &format!("section#{experiment}"));
        assert!(!text.contains("Not measured"), "{experiment}");
    }
    for experiment in ["tlb", "tags", "layout", "decode", "budget", "dirty"] {
        assert!(!select(&html, &format!("section#{experiment} figure svg.plot")).is_empty(), "no plot of {experiment}");
    }
    // In place, not at the end: ours first, then what others have.
    let tags = text_of(&html, "section#tags");
    assert!(tags.find("Entries that flush TLB") < tags.find("Biemueller"), "{tags}");
    assert_eq!(select(&html, "[role=note]").len(), 0, "{}", text_of(&html, "[role=note]"));
}

#[test]
fn page_needs_no_network_and_no_script() {
    let page = html_of(REAL);
    let html = Html::parse_document(&page);
    for forbidden in ["script", "link", "img", "iframe", "object", "[src]", "[style]", "[onclick]"] {
        assert!(select(&html, forbidden).is_empty(), "{forbidden}");
    }
    for link in select(&html, "[href]") {
        let to = link.value().attr("href").unwrap_or_default();
        let id = to.strip_prefix('#').unwrap_or_else(|| panic!("{to} is elsewhere"));
        assert_eq!(select(&html, &format!("[id=\"{id}\"]")).len(), 1, "{to} leads nowhere");
    }
    assert!(!page.contains("url(") && !page.contains("@import"));
}

#[test]
fn every_figure_that_was_read_is_in_the_last_table() {
    let data = Data::of(vec![records(REAL)]);
    let html = parsed(REAL);
    assert_eq!(select(&html, "section#all tbody tr").len(), data.figures.len());
    assert!(data.figures.len() > 100, "{}", data.figures.len());
}

#[test]
fn every_experiment_has_a_section_and_the_other_way_round() {
    let mut sections = ALL.map(|section| section.experiment);
    // Moves are not part of `dunlin bench all`.
    let mut experiments = [&EXPERIMENTS[..], &["move"]].concat();
    sections.sort_unstable();
    experiments.sort_unstable();
    assert_eq!(sections[..], experiments);
}

#[test]
fn lines_that_are_no_records_are_told_with_their_place() {
    let html = parsed(&format!("{REAL}{{\"schema\":1,\"expe\nwhat <b>is</b> this\n"));
    let note = text_of(&html, "[role=note]");
    let lines = REAL.lines().count();
    assert!(note.contains(&format!("r.jsonl:{}: cut off", lines + 1)), "{note}");
    assert!(
        note.contains(&format!("r.jsonl:{}: no JSON", lines + 2)) && note.contains("what <b>is</b> this"),
        "{note}"
    );
}

#[test]
fn missing_experiment_is_told_above_and_in_its_place() {
    let without: String =
        REAL.lines().filter(|line| !line.contains("\"experiment\":\"tags\"")).map(|line| format!("{line}\n")).collect();
    let html = parsed(&without);
    assert!(text_of(&html, "[role=note]").contains("Nothing of tags is there."));
    let section = text_of(&html, "section#tags");
    assert!(section.contains("Not measured. dunlin bench tags --record FILE measures it."), "{section}");
    assert!(section.contains("Biemueller"), "what others have stays");
}

#[test]
fn mixed_commits_are_told_and_marked_where_they_are() {
    let commit = &records(REAL).records[0].circumstances.commit.clone();
    let other: String = REAL
        .lines()
        .filter(|line| line.contains("\"experiment\":\"exits\""))
        .map(|line| format!("{}\n", line.replace(commit, "0123456789ab")))
        .collect();
    let html = parsed(&format!("{REAL}{other}"));
    assert!(text_of(&html, "[role=note]").contains("These are results of 2 commits."));
    assert!(text_of(&html, "dl").contains("0123456789ab"));
    assert!(text_of(&html, "section#exits").contains('†'));
    assert!(!text_of(&html, "section#tags").contains('†'), "only where commits are mixed");
}

#[test]
fn host_that_died_is_told_in_the_section_and_what_was_measured_before_stays() {
    let record = records(REAL).records.into_iter().find(|record| record.experiment == "tlb").expect("was measured");
    let failure = serde_json::json!({ "schema": 1, "experiment": "tlb", "kind": "failure", "what": "8 vCPUs on 2 pCPUs",
        "why": "the host is gone: <script>alert(1)</script>", "ground": "emulated",
        "machine": record.circumstances.machine, "commit": record.circumstances.commit, "date": "2026-11-21T00:00:00Z" });
    let html = parsed(&format!("{REAL}{failure}\n"));
    let section = text_of(&html, "section#tlb");
    assert!(
        section.contains("8 vCPUs on 2 pCPUs, 2026-11-21T00:00:00Z: failed: the host is gone: <script>"),
        "{section}"
    );
    assert!(select(&html, "script").is_empty());
    assert!(!select(&html, "section#tlb svg.plot").is_empty());
}

#[test]
fn step_that_did_not_come_to_its_end_is_told() {
    let without: String =
        REAL.lines().filter(|line| !line.contains("\"step\":\"decode\"")).map(|line| format!("{line}\n")).collect();
    let html = parsed(&without);
    let note = text_of(&html, "[role=note]");
    assert!(note.contains("The step decode did not complete.") && !note.contains("step tags"), "{note}");
}

#[test]
fn figures_of_two_architectures_are_told_apart() {
    let other: String = REAL
        .lines()
        .filter(|line| line.contains("\"experiment\":\"boot\"") && line.contains("\"arch\":\"x86_64\"}"))
        .map(|line| format!("{}\n", line.replace("\"arch\":\"x86_64\"}", "\"arch\":\"aarch64\"}")))
        .collect();
    assert!(!other.is_empty());
    let html = parsed(&format!("{REAL}{other}"));
    let headings: Vec<String> = select(&html, "section#boot h3").iter().map(|h3| h3.text().collect()).collect();
    assert!(headings.starts_with(&["aarch64".to_string(), "x86_64".to_string()]), "{headings:?}");
}

#[test]
fn promise_that_was_kept_in_some_runs_only_is_missed_and_the_runs_are_counted() {
    let promise = |met: bool| {
        let record = records(REAL).records.into_iter().next().expect("has records");
        serde_json::json!({ "schema": 1, "experiment": "tlb", "kind": "promise", "what": "as fast as light",
            "figures": if met { "at once" } else { "later" }, "met": met, "ground": "emulated",
            "machine": record.circumstances.machine, "commit": record.circumstances.commit, "date": "2026-11-21T00:00:00Z" })
    };
    let html = parsed(&format!("{REAL}{}\n{}\n{}\n", promise(true), promise(false), promise(true)));
    let section = text_of(&html, "section#tlb");
    assert!(section.contains("missed in 1 of 3 runs: as fast as light: later"), "{section}");
}

#[test]
fn hostile_names_are_text() {
    let hostile = REAL
        .lines()
        .find(|line| line.contains("\"experiment\":\"exits\"") && line.contains("\"kind\":\"figure\""))
        .expect("was measured")
        .replace("instructions of one exit", "</table><img src=x>");
    let html = parsed(&format!("{REAL}{hostile}\n"));
    assert!(select(&html, "img").is_empty());
    assert!(text_of(&html, "section#all").contains("</table><img src=x>"));
}

/// A line about a move: its settings are those of today, or those of records without a course.
fn line_of_move(host: &str, content: &serde_json::Value, is_old: bool) -> String {
    let settings = match is_old {
        true => serde_json::json!({ "host": host, "memory": 128, "rate": 4 }),
        false => serde_json::json!({ "host": host, "memory": 128, "rate": 4, "vcpus": 4, "slow_down": false }),
    };
    let mut line = serde_json::json!({ "schema": 1, "experiment": "move", "settings": settings, "ground": "emulated",
        "machine": { "processor": "p", "arch": "x86_64", "cores": 2 }, "commit": "c", "date": "2026-11-28T00:00:00Z" });
    let fields = content.as_object().cloned().unwrap_or_default();
    line.as_object_mut().expect("is one").extend(fields);
    format!("{line}\n")
}

fn still_of_move(host: &str, seconds: f64, is_old: bool) -> String {
    let content = serde_json::json!({ "kind": "figure", "quantity": "the guest stands still", "unit": "s",
        "class": "time", "samples": [seconds] });
    line_of_move(host, &content, is_old)
}

/// Ten samples before, ten until it stands still at 1 s, and ten afterwards.
fn move_of(host: &str, seconds: f64, speed: f64) -> String {
    let middle = |number: u32| f64::from(number) / 10.0 - 0.95 + if number < 20 { 0.0 } else { seconds };
    let content = serde_json::json!({ "kind": "course", "quantity": "speed", "unit": "% of the speed before",
        "class": "ratio", "from": -1.0, "step": 0.1, "samples": vec![speed; 30],
        "middles": (0..30).map(middle).collect::<Vec<_>>(), "counts": { "rounds": 4.0 },
        "moments": { "begin": [0.0], "stop": [1.0], "resume": [1.0 + seconds] } });
    still_of_move(host, seconds, false) + &line_of_move(host, &content, false)
}

#[test]
fn moves_are_drawn_with_the_median_first_and_broken_where_the_guest_stands_still() {
    let dunlin: String = [0.25, 0.75, 0.5].map(|seconds| move_of("Dunlin", seconds, 100.0)).concat();
    let html = parsed(&(dunlin + &move_of("KVM", 0.2, 0.0)));
    assert!(text_of(&html, "nav").contains("Moves between two hosts"));
    assert_eq!(text_of(&html, "section#move h3"), "4 vCPUs, writes 4 MiB/s, to 128 MiB in turn");
    let headings = text_of(&html, "section#move svg .heading");
    assert_eq!(headings, "Dunlin: stands still for 0.50 s, rounds: 4KVM: stands still for 0.20 s, rounds: 4");
    // Each line is broken into a part of 20 points before, and one of 10.
    let corners = |class: &str| -> Vec<usize> {
        let lines = select(&html, &format!("section#move svg.plot polyline[class='{class}']"));
        lines.iter().map(|line| line.attr("points").unwrap_or_default().split(' ').count()).collect()
    };
    assert_eq!((corners("line"), corners("line thin")), (vec![20, 10, 20, 10], vec![20, 10, 20, 10]));
    assert_eq!(select(&html, "section#move svg.plot .still").len(), 2);
    assert_eq!(select(&html, "section#move svg.plot .wanted").len(), 2);
    let words = text_of(&html, "section#move desc");
    assert!(words.contains("The median of 3 moves") && words.contains("slowest 100 ms: 0 % from the beg"), "{words}");
    assert!(text_of(&html, "section#move figcaption").contains("emulated"));
    assert!(text_of(&html, "section#move tbody").contains("0.50 (0.25–0.75)"));
    assert!(!html.html().contains("NaN"));
}

#[test]
fn older_records_of_moves_have_a_table_and_no_plot_and_are_not_taken_for_newer_ones() {
    let html = parsed(&(still_of_move("Dunlin", 3.0, true) + &still_of_move("Dunlin", 1.0, false)));
    let headings: Vec<String> = select(&html, "section#move h3").iter().map(|it| it.text().collect()).collect();
    let writes = "writes 4 MiB/s, to 128 MiB in turn";
    assert_eq!(headings, [writes.to_string(), format!("4 vCPUs, {writes}")]);
    let cells: Vec<String> = select(&html, "section#move td").iter().map(|it| it.text().collect()).collect();
    assert_eq!(cells, ["s", "3", "–", "", "1", "–", "%", "–", "–", "s", "1", "–", "", "1", "–", "%", "–", "–"]);
    assert!(select(&html, "section#move svg").is_empty());
}

#[test]
fn moves_that_all_failed_are_told_and_moves_that_nobody_asked_for_are_not_missed() {
    let failure = serde_json::json!({ "kind": "failure", "what": "a move", "why": "KVM: hung" });
    let html = parsed(&format!("{REAL}{}", line_of_move("KVM", &failure, false)));
    assert!(text_of(&html, "section#move").contains("failed: KVM: hung"));
    let html = parsed(REAL);
    assert!(select(&html, "section#move").is_empty() && !text_of(&html, "nav").contains("Moves"));
}
