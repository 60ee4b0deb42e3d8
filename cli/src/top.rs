//! `dunlin top`: a running host, live.
//!
//! A [`Picture`] is the host's state at one moment. The tool shows the differences of two pictures, so all numbers are
//! of the last interval. Times are in per cent of one pCPU, as in top(1): a VM of four busy vCPUs has up to 400.

#[cfg(test)]
mod tests;

use std::fmt::{self, Write};
use std::io::{IsTerminal, stdout};
use std::time::{Duration, Instant};

use abi::control::VmInfo;
use abi::counters::VcpuCounters;
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table, TableState, Wrap};
use serde_json::{Map, Value, json};

use crate::args::TopArgs;
use crate::control::Client;
use crate::failure::Failure;
use crate::quantity::{parse_time, seconds, show_size};
use crate::share;
use crate::stats::{self, Emulation, Faults, Picture, Snapshot, printable};

/// Shortest and longest time between two pictures.
const DELAYS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(60)];

/// The activity of a VM or vCPU between two pictures.
#[derive(Clone, Debug, Default, PartialEq)]
struct Activity {
    /// Time in guest, host and waiting, in per cent of one pCPU.
    time: [f64; 3],
    /// Exits per second.
    exits: f64,
    /// Exits per second by reason, highest first.
    reasons: Vec<(&'static str, f64)>,
    /// Emulated accesses, as text; empty if there were none.
    emulation: String,
    /// Late mapping and dirty logs, as text; empty without either.
    faults: String,
    /// The same in numbers, per second, and the share of the time that it took in per cent.
    memory: Memory,
    /// Tags and remote flushes.
    flushes: Flushes,
}

/// Faults on memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Memory {
    /// Pages that were mapped when they were first touched, per second.
    populated: f64,
    /// Writes that a dirty log stopped, per second.
    recorded: f64,
    /// Large pages that these split, per second.
    split: f64,
    /// Share of the vCPUs' time for which they were held up, in per cent.
    stall: f64,
}

/// Tags and remote flushes, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Flushes {
    /// Entries that flushed TLB entries, and the number of them that flushed the entries of all tags.
    entries: [f64; 2],
    /// Tags that were assigned.
    assignments: f64,
    /// Calls for a flush of others.
    sent: f64,
    /// vCPUs that were kicked for one.
    kicked: f64,
    /// vCPUs that needed no kick: they flush before they next enter.
    deferred: f64,
}

impl Flushes {
    fn of(counters: &VcpuCounters, rate: impl Fn(u64) -> f64) -> Self {
        Self {
            entries: [rate(counters.tlb_flushes), rate(counters.tlb_flushes_all)],
            assignments: rate(counters.tag_assignments),
            sent: rate(counters.flush_calls),
            kicked: rate(counters.flush_kicks),
            deferred: rate(counters.flush_targets.saturating_sub(counters.flush_kicks)),
        }
    }
}

impl fmt::Display for Flushes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entries: [own, all], assignments, sent, kicked, deferred } = self;
        write!(f, "per s: {own:.0} entries flushed ({all:.0} all tags), {assignments:.0} tags assigned; ")?;
        write!(f, "shootdowns {sent:.0} sent, {kicked:.0} kicked, {deferred:.0} deferred")
    }
}

impl Activity {
    /// Between `old` and `new`, over `ns` nanoseconds of a clock with `clock_hz` ticks per second.
    fn between(old: &VcpuCounters, new: &VcpuCounters, ns: u64, clock_hz: u64) -> Self {
        let difference = stats::difference(old, new);
        let rate = |count: u64| if ns == 0 { 0.0 } else { count as f64 / seconds(ns) };
        let time = [difference.guest_ticks, difference.host_ticks, difference.wait_ticks]
            .map(|ticks| if clock_hz == 0 { 0.0 } else { 100.0 * rate(ticks) / clock_hz as f64 });
        let ranking = stats::ranking(&difference).into_iter();
        Self {
            time,
            exits: rate(stats::exits(&difference)),
            reasons: ranking.map(|(name, count)| (name, rate(count))).collect(),
            emulation: Emulation::of(&difference).map_or(String::new(), |emulation| emulation.to_string()),
            faults: Faults::of(&difference).map_or(String::new(), |faults| faults.to_string()),
            memory: Memory {
                populated: rate(difference.pages_populated),
                recorded: rate(difference.dirty_faults),
                split: rate(difference.dirty_splits),
                stall: Faults::of(&difference).map_or(0.0, Faults::stall_percent),
            },
            flushes: Flushes::of(&difference, rate),
        }
    }

    fn json(&self) -> Value {
        let Self { time: [guest, host, wait], exits, reasons, flushes, memory, .. } = self;
        let by_reason: Map<_, _> = reasons.iter().map(|&(name, rate)| (name.to_string(), json!(rate))).collect();
        json!({ "guest_percent": guest, "host_percent": host, "wait_percent": wait, "exits_per_second": exits,
            "exits_per_second_by_reason": by_reason, "flushing_entries_per_second": flushes.entries[0],
            "all_tags_flushed_per_second": flushes.entries[1], "tag_assignments_per_second": flushes.assignments,
            "shootdowns_per_second": flushes.sent, "kicked_per_second": flushes.kicked,
            "deferred_per_second": flushes.deferred, "pages_populated_per_second": memory.populated,
            "dirty_faults_per_second": memory.recorded, "dirty_splits_per_second": memory.split,
            "stage2_stall_percent": memory.stall })
    }

    /// Notes below the table of exits, one per line.
    fn notes(&self) -> Vec<String> {
        let notes = [self.flushes.to_string(), self.emulation.clone(), self.faults.clone()];
        notes.into_iter().filter(|note| !note.is_empty()).collect()
    }

    fn top_reasons(&self) -> String {
        let shown = self.reasons.iter().take(3);
        shown.map(|(name, rate)| format!("{name} {:.0} %", 100.0 * rate / self.exits)).collect::<Vec<_>>().join(", ")
    }
}

/// Activity of the VM on line `at` of the new picture and of each of its vCPUs, if both pictures have its counters.
fn activity(old: Option<&Picture>, new: &Picture, at: usize) -> Option<(Activity, Vec<Activity>)> {
    let (info, now) = new.vms.get(at)?;
    let now = now.as_ref()?;
    // Without an earlier picture, everything since the VM was created.
    let nothing = Snapshot { at_ns: 0, vcpus: vec![VcpuCounters::default(); now.vcpus.len()] };
    let before = match old {
        None => &nothing,
        Some(old) => old.vms.iter().find(|(vm, _)| vm.number == info.number)?.1.as_ref()?,
    };
    let ns = now.at_ns.saturating_sub(before.at_ns);
    let hz = new.host.clock_hz;
    let vcpus = before.vcpus.iter().zip(&now.vcpus).map(|(old, new)| Activity::between(old, new, ns, hz)).collect();
    Some((Activity::between(&before.total(), &now.total(), ns, hz), vcpus))
}

/// `dunlin top`.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    let delay = parse_time(&args.delay).map_err(|what| Failure::bad_input(format!("option '--delay': {what}")))?;
    let delay = delay.clamp(DELAYS[0], DELAYS[1]);
    let mut client = share::attach(args.host.host)?;
    if args.once {
        return plain(&mut client, delay, 1, args.json);
    }
    if args.batch || args.json || !stdout().is_terminal() {
        let forever = args.batch || args.json;
        let iterations = args.iterations.unwrap_or(if forever { u64::MAX } else { 1 });
        return plain(&mut client, delay, iterations, args.json);
    }
    let mut terminal = ratatui::init();
    let result = interactive(&mut terminal, &mut client, delay, args.iterations);
    ratatui::restore();
    result
}

fn plain(client: &mut Client, delay: Duration, iterations: u64, json: bool) -> Result<(), Failure> {
    let mut old = None;
    for round in 0..iterations {
        if round > 0 {
            std::thread::sleep(delay);
        }
        let new = Picture::take(client)?;
        if json {
            println!("{}", json_of(old.as_ref(), &new));
        } else {
            print!("{}", text(old.as_ref(), &new));
        }
        old = Some(new);
    }
    Ok(())
}

/// A picture as JSON: rates since the picture before; of the first one, since each VM was created.
fn json_of(old: Option<&Picture>, new: &Picture) -> Value {
    let vm = |(at, (info, snapshot)): (usize, &(VmInfo, Option<Snapshot>))| {
        let activity = activity(old, new, at);
        let vcpus = activity.as_ref().map(|(_, vcpus)| vcpus.iter().map(Activity::json).collect::<Vec<_>>());
        json!({ "vm": info.number, "name": info.name, "state": stats::state(&info.state), "memory_bytes": info.memory_bytes,
            "at_seconds": snapshot.as_ref().map(|snapshot| seconds(snapshot.at_ns)),
            "total": activity.as_ref().map(|(all, _)| all.json()), "vcpus": vcpus })
    };
    json!({ "pcpus": new.host.pcpus, "vms": new.vms.iter().enumerate().map(vm).collect::<Vec<_>>() })
}

/// A picture as plain text.
fn text(old: Option<&Picture>, new: &Picture) -> String {
    let mut text = header(new);
    text.push('\n');
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{:<20}{:>6}{:>9}{:>9}{:>9}{:>12}  EXITS BY REASON",
        "NAME", "vCPUs", "GUEST%", "HOST%", "WAIT%", "EXITS/s"
    );
    for (number, (vm, _)) in new.vms.iter().enumerate() {
        let name = printable(&vm.name);
        let _ = match activity(old, new, number) {
            Some((all, _)) if all.exits.is_finite() => {
                let Activity { time: [guest, host, wait], exits, .. } = &all;
                let reasons = all.top_reasons();
                let _ = writeln!(
                    text,
                    "{name:<20}{:>6}{guest:>9.1}{host:>9.1}{wait:>9.1}{exits:>12.0}  {reasons}",
                    vm.vcpus
                );
                all.notes().iter().try_for_each(|note| writeln!(text, "{:20}{note}", ""))
            }
            _ => writeln!(text, "{name:<20}{:>6}  {}", vm.vcpus, stats::state(&vm.state)),
        };
    }
    text
}

fn header(picture: &Picture) -> String {
    let host = &picture.host;
    let up = picture.vms.iter().filter_map(|(_, snapshot)| snapshot.as_ref()).map(|snapshot| snapshot.at_ns).max();
    let up = up.map_or(String::new(), |ns| format!(", up {:.0} s", seconds(ns)));
    let memory = show_size(host.memory_bytes >> 20 << 20);
    let (version, processor) = (printable(&host.version), printable(&host.processor));
    format!("dunlin {version}: {} pCPUs, {memory}{up}; {processor}", host.pcpus)
}

/// The choices made by keys.
struct View {
    delay: Duration,
    chosen: TableState,
    vcpus: bool,
    order: Order,
    reversed: bool,
}

/// The order of VMs; keys as in top(1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    /// As the host has them.
    #[default]
    Number,
    /// By time in guest and host, highest first.
    Time,
    /// By memory, highest first.
    Memory,
    /// By exits, highest first.
    Exits,
}

impl View {
    fn new(delay: Duration) -> Self {
        let chosen = TableState::new().with_selected(0);
        Self { delay, chosen, vcpus: false, order: Order::default(), reversed: false }
    }

    /// Numbers of the VMs, line by line.
    fn order(&self, old: Option<&Picture>, new: &Picture) -> Vec<usize> {
        let weight = |number: usize| match (self.order, activity(old, new, number)) {
            (Order::Number, _) => 0.0,
            (Order::Memory, _) => new.vms[number].0.memory_bytes as f64,
            (_, None) => -1.0,
            (Order::Time, Some((all, _))) => all.time[0] + all.time[1],
            (Order::Exits, Some((all, _))) => all.exits,
        };
        let mut weighed: Vec<(usize, f64)> = (0..new.vms.len()).map(|number| (number, weight(number))).collect();
        weighed.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        if self.reversed {
            weighed.reverse();
        }
        weighed.into_iter().map(|(number, _)| number).collect()
    }
}

fn interactive(
    terminal: &mut ratatui::DefaultTerminal,
    client: &mut Client,
    delay: Duration,
    iterations: Option<u64>,
) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::failed(format!("cannot use the terminal: {error}"));
    let mut view = View::new(delay);
    let mut old = None;
    let mut new = Picture::take(client)?;
    let mut rounds = 1;
    loop {
        let next = Instant::now() + view.delay;
        while Instant::now() < next {
            terminal.draw(|frame| draw(frame, old.as_ref(), &new, &mut view)).map_err(broken)?;
            let ready = event::poll(next.saturating_duration_since(Instant::now())).map_err(broken)?;
            if ready && obey(&event::read().map_err(broken)?, &mut view, new.vms.len()) {
                return Ok(());
            }
        }
        if iterations.is_some_and(|most| rounds >= most) {
            return Ok(());
        }
        rounds += 1;
        old = Some(std::mem::replace(&mut new, Picture::take(client)?));
    }
}

/// Handles a key; returns true to quit.
fn obey(event: &Event, view: &mut View, vms: usize) -> bool {
    let Event::Key(key) = event else { return false };
    if key.kind != KeyEventKind::Press {
        return false;
    }
    let chosen = view.chosen.selected().unwrap_or(0);
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return true,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
        KeyCode::Up | KeyCode::Char('k') => view.chosen.select(Some(chosen.saturating_sub(1))),
        KeyCode::Down | KeyCode::Char('j') => view.chosen.select(Some((chosen + 1).min(vms.saturating_sub(1)))),
        KeyCode::Char('v' | '1') => view.vcpus = !view.vcpus,
        KeyCode::Char('P') => view.order = Order::Time,
        KeyCode::Char('M') => view.order = Order::Memory,
        KeyCode::Char('E') => view.order = Order::Exits,
        KeyCode::Char('N') => view.order = Order::Number,
        KeyCode::Char('R') => view.reversed = !view.reversed,
        KeyCode::Char('+') => view.delay = (view.delay * 2).min(DELAYS[1]),
        KeyCode::Char('-') => view.delay = (view.delay / 2).max(DELAYS[0]),
        _ => {}
    }
    false
}

fn draw(frame: &mut Frame<'_>, old: Option<&Picture>, new: &Picture, view: &mut View) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let rows = u16::try_from(new.vms.len()).unwrap_or(u16::MAX).saturating_add(3).min(frame.area().height / 2);
    let [top, vms, below, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(rows), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());

    frame.render_widget(Paragraph::new(header(new)).style(bold), top);

    let order = view.order(old, new);
    let line = |number: usize| {
        let vm = &new.vms[number].0;
        let mut cells = vec![printable(&vm.name), vm.vcpus.to_string(), show_size(vm.memory_bytes)];
        match activity(old, new, number) {
            Some((all, _)) => {
                cells.extend(all.time.map(|share| format!("{share:.1}")));
                cells.extend([format!("{:.0}", all.exits), all.top_reasons()]);
            }
            None => cells.extend(["", "", "", "", &stats::state(&vm.state)].map(str::to_string)),
        }
        Row::new(cells)
    };
    let widths = [16, 6, 9, 7, 7, 7, 9].map(Constraint::Length).into_iter().chain([Constraint::Min(20)]);
    let table = Table::new(order.iter().copied().map(line), widths)
        .header(Row::new(["NAME", "vCPUs", "MEMORY", "GUEST%", "HOST%", "WAIT%", "EXITS/s", "MOST"]).style(bold))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered().title(" VMs "));
    frame.render_stateful_widget(table, vms, &mut view.chosen);

    let number = order.get(view.chosen.selected().unwrap_or(0)).copied().unwrap_or(0);
    let name = new.vms.get(number).map_or(String::new(), |(vm, _)| printable(&vm.name));
    if let Some((all, vcpus)) = activity(old, new, number) {
        let table = if view.vcpus { vcpu_table(&vcpus) } else { reason_table(&all) };
        let block = Block::bordered().title(format!(" {name} "));
        let inside = block.inner(below);
        let notes = Paragraph::new(all.notes().join("\n")).wrap(Wrap { trim: true });
        let lines = notes_height(&all.notes(), inside.width).min(inside.height / 2);
        let [upper, lower] = Layout::vertical([Constraint::Length(lines), Constraint::Min(0)]).areas(inside);
        frame.render_widget(block, below);
        frame.render_widget(notes, upper);
        frame.render_widget(table, lower);
    } else {
        frame.render_widget(Block::bordered().title(format!(" {name}: no counters ")), below);
    }

    let help = format!(
        " q quit  up/down VM  v vCPUs  sort: P time, E exits, M memory, N number, R reverse  +/- delay ({:.1} s)",
        view.delay.as_secs_f64()
    );
    frame.render_widget(Line::from(help), keys);
}

/// Number of lines that the notes need on a terminal of this width. Words that do not fit go to the next line, so a
/// line may be shorter than the width. One more line is for words that must be broken.
fn notes_height(notes: &[String], width: u16) -> u16 {
    let width = usize::from(width).max(1);
    let lines: usize = notes.iter().map(|note| note.chars().count()).map(|n| n.div_ceil(width) + n / width).sum();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

fn reason_table(all: &Activity) -> Table<'static> {
    let rows = all.reasons.iter().map(|&(name, rate)| {
        // As a fraction of the whole, so that the bars of all reasons together have one length.
        let share = rate / all.exits;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share is between 0 and 1")]
        let bar = "▇".repeat((share * 40.0) as usize);
        Row::new([name.to_string(), format!("{rate:.0}"), format!("{:.1}", 100.0 * share), bar])
    });
    Table::new(rows, [22, 12, 8, 40].map(Constraint::Length)).header(Row::new(["VM-EXIT", "per s", "%", ""]))
}

fn vcpu_table(vcpus: &[Activity]) -> Table<'static> {
    let rows = vcpus.iter().enumerate().map(|(number, vcpu)| {
        let [guest, host, wait] = vcpu.time.map(|share| format!("{share:.1}"));
        Row::new([number.to_string(), guest, host, wait, format!("{:.0}", vcpu.exits), vcpu.top_reasons()])
    });
    let widths = [5, 8, 8, 8, 10, 60].map(Constraint::Length);
    Table::new(rows, widths).header(Row::new(["vCPU", "GUEST%", "HOST%", "WAIT%", "EXITS/s", "MOST"]))
}
