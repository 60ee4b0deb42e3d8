//! The frame around the sections: where and how the results were measured, doubts, and all figures at the end.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::data::{Data, Gap};
use super::number::spread;
use super::sections::{ALL, MIXED, Section};
use super::sources::beside;
use crate::bench::EXPERIMENTS;
use crate::records::{Class, Ground};

const STYLE: &str = include_str!("page.css");

/// The whole page.
pub(super) fn page(data: &Data) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Dunlin: measurements" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "Dunlin: results, next to published figures of other systems" }
                    (circumstances(data))
                    (doubts(data))
                    (how_to_read(data))
                    nav aria-label="Sections" {
                        ul {
                            @for section in sections(data) { li { a href=(format!("#{}", section.experiment)) { (section.title) } } }
                            li { a href="#all" { "All figures" } }
                        }
                    }
                }
                main {
                    @for part in sections(data) { (section(part, data)) }
                    (all_figures(data))
                }
            }
        }
    }
}

/// The sections that have results, or would have if `dunlin bench all` had been run to its end.
fn sections(data: &Data) -> impl Iterator<Item = &'static Section> {
    ALL.iter().filter(|it| EXPERIMENTS.contains(&it.experiment) || data.mentions(it.experiment))
}

/// The machines of the measurements.
fn circumstances(data: &Data) -> Markup {
    html! {
        dl class="box" {
            dt { "Computer" }
            @for machine in data.machines() { dd { (machine) } }
            @if !data.qemus().is_empty() {
                dt { "Emulator" }
                @for qemu in data.qemus() { dd { (qemu) } }
            }
            dt { "Dunlin" }
            @for (commit, count) in data.commits() { dd { "commit " code { (commit) } ", " (count) " records" } }
            @if let Some((first, last)) = data.dates() {
                dt { "Measured" }
                dd { (first) @if first != last { " to " (last) } }
            }
        }
    }
}

/// What a reader must know first.
fn how_to_read(data: &Data) -> Markup {
    html! {
        @if data.grounds().contains(&Ground::Emulated) {
            p {
                strong { "Emulated: " }
                "there was no hardware virtualization. Counts of instructions and exits are real; times are those of an emulator, and can be "
                "compared only as ratios within one run. Figures marked “natively” ran on the computer itself, without a guest."
            }
        }
        p class="soft" {
            "Figures are medians, with minimum and maximum in parentheses if they differ. A dash: not measured. "
            (MIXED) ": combined from several builds or computers."
            @if let Some(share) = data.others_share() {
                " While times were taken, other programs used up to " (format!("{:.0}", 100.0 * share)) " % of the computer."
            }
        }
    }
}

/// Missing or doubtful results.
fn doubts(data: &Data) -> Markup {
    let (commits, machines, emulators) = (data.commits(), data.machines(), data.emulators());
    let (missing, unfinished) = (data.missing(), data.unfinished());
    let is_clean = commits.len() < 2
        && machines.len() < 2
        && emulators.len() < 2
        && data.bad.is_empty()
        && missing.is_empty()
        && unfinished.is_empty();
    html! {
        @if !is_clean {
            div class="box doubt" role="note" {
                strong { "Missing or doubtful" }
                ul {
                    @if commits.len() > 1 {
                        li { "These are results of " (commits.len()) " commits. Figures that mix them are marked " (MIXED) "." }
                    }
                    @if machines.len() > 1 {
                        li { "These are results of " (machines.len()) " computers: their times cannot be compared." }
                    }
                    @if emulators.len() > 1 {
                        li { "These are results of " (emulators.len()) " versions or settings of QEMU: counts of instructions may differ for this reason." }
                    }
                    @for experiment in &missing {
                        li { "Nothing of " a href=(format!("#{experiment}")) { (experiment) } " is there." }
                    }
                    @for step in &unfinished { li { "The step " code { (step) } " did not complete." } }
                    @for bad in &data.bad { li { code { (bad) } } }
                }
            }
        }
    }
}

fn section(section: &Section, data: &Data) -> Markup {
    let Section { experiment, title, lead, command, body } = section;
    html! {
        section id=(experiment) {
            h2 { (title) }
            p { (lead) }
            @let archs = data.archs(experiment);
            @if archs.len() == 1 {
                (body(data))
            } @else if !archs.is_empty() {
                @for arch in archs {
                    h3 { (arch) }
                    (body(&data.of_arch(arch)))
                }
            } @else {
                p class="box doubt" { "Not measured. " code { (command) " --record FILE" } " measures it." }
            }
            (gaps(data, experiment))
            (promises(data, experiment))
            (others(experiment))
        }
    }
}

/// Measurements that failed, in the section of their experiment.
fn gaps(data: &Data, experiment: &str) -> Markup {
    let gaps: Vec<Gap<'_>> = data.gaps(experiment).collect();
    html! {
        @if !gaps.is_empty() {
            div class="box doubt" {
                strong { "Could not be measured" }
                ul {
                    @for Gap { is_failure, what, why, date } in &gaps {
                        li {
                            (what) ", " (date) ": "
                            @if *is_failure { span class="bad" { "failed" } ": " }
                            (shortened(why))
                        }
                    }
                }
            }
        }
    }
}

/// Letters of a failure's words that are shown.
const SHOWN: usize = 400;

fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

fn promises(data: &Data, experiment: &str) -> Markup {
    let promises = data.promises(experiment);
    html! {
        @if !promises.is_empty() {
            h3 { "Targets" }
            ul {
                @for (what, judgements) in &promises {
                    @let met = judgements.iter().filter(|(_, met)| *met == Some(true)).count();
                    @let missed = judgements.iter().filter(|(_, met)| *met == Some(false)).count();
                    li {
                        @match (met, missed) {
                            (0, 0) => span { "not judged" },
                            (_, 0) => span class="good" { "met" },
                            (0, _) => span class="bad" { "missed" },
                            (_, _) => span class="bad" { "missed in " (missed) " of " (met + missed) " runs" },
                        }
                        ": " (what) ": "
                        // The last judgement, or the last miss if there is one.
                        (judgements.iter().rfind(|(_, met)| missed == 0 || *met == Some(false)).map_or("", |(figures, _)| figures))
                    }
                }
            }
        }
    }
}

/// The figures of others.
fn others(experiment: &str) -> Markup {
    let Some(beside) = beside(experiment) else { return html! {} };
    html! {
        h3 { "Others" }
        div class="scroll" tabindex="0" {
            table class="words" {
                thead { tr { th scope="col" { "what" } th scope="col" { "figures" } th scope="col" { "source and machine" } } }
                tbody {
                    @for source in beside.sources {
                        tr { th scope="row" { (source.what) } td { (source.figures) } td { (source.circumstances) } }
                    }
                }
            }
        }
        p { strong { "Comparable: " } (beside.comparable) }
        p { strong { "Not comparable: " } (beside.not_comparable) }
    }
}

/// Every figure, so that nothing that was measured is left out.
fn all_figures(data: &Data) -> Markup {
    html! {
        section id="all" {
            h2 { "All figures" }
            details {
                summary { (data.figures.len()) " figures" }
                div class="scroll" tabindex="0" {
                    table class="words" {
                        thead { tr {
                            @for name in ["figure", "median (least–greatest)", "unit", "samples", "of observations", "class", "on"] {
                                th scope="col" { (name) }
                            }
                        } }
                        tbody {
                            @for (key, series) in &data.figures {
                                tr {
                                    th scope="row" { (key) }
                                    td { (series.spread().map_or("–".to_string(), spread)) @if series.is_mixed() { " " (MIXED) } }
                                    td { (key.unit) }
                                    td { (series.samples.len()) }
                                    td { (series.observations.map_or("–".to_string(), |count| count.to_string())) }
                                    td { (class(key.class, key.ground)) }
                                    td { (key.ground) ", " (key.arch) }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// How far a figure can be believed, in words.
fn class(class: Class, ground: Ground) -> &'static str {
    match (class, ground) {
        (Class::Time, Ground::Emulated) => "emulated time",
        _ => class.words(),
    }
}
