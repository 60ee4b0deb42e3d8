//! `dunlin dirty watch`: live rounds, with a picture of the pages per second over time.

use std::collections::VecDeque;
use std::io::{IsTerminal, stdout};
use std::time::{Duration, Instant};

use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Sparkline};

use super::rate::{Interrupted, Interval, Rounds, interrupted};
use super::{cost_in_words, info_in_words};
use crate::args::RateArgs;
use crate::failure::Failure;
use crate::quantity::{show_count, show_size};
use crate::stats::printable;

/// Rounds that are kept: more than any terminal has columns.
const KEPT: usize = 512;
/// Interval between polls of the keyboard.
const TICK: Duration = Duration::from_millis(50);

/// `dunlin dirty watch`.
pub(super) fn run(args: &RateArgs) -> Result<(), Failure> {
    if args.which.json || !stdout().is_terminal() {
        return super::rate::run(args);
    }
    let (mut rounds, delay) = Rounds::begin(args)?;
    let interrupted = match interrupted() {
        Ok(interrupted) => interrupted,
        Err(failure) => return rounds.end(Err(failure)),
    };
    let mut terminal = ratatui::init();
    let result = interactive(&mut terminal, &mut rounds, &interrupted, delay, args.iterations);
    ratatui::restore();
    rounds.end(result)
}

/// The data to show.
#[derive(Default)]
struct View {
    name: String,
    intervals: VecDeque<Interval>,
    clock_hz: u64,
}

fn interactive(
    terminal: &mut ratatui::DefaultTerminal,
    rounds: &mut Rounds,
    interrupted: &Interrupted,
    delay: Duration,
    most: Option<u64>,
) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::failed(format!("cannot use the terminal: {error}"));
    let mut view = View { name: printable(&rounds.vm.name), clock_hz: rounds.clock_hz(), ..View::default() };
    for _ in 0..most.unwrap_or(u64::MAX) {
        let next = Instant::now() + delay;
        while Instant::now() < next {
            terminal.draw(|frame| draw(frame, &view)).map_err(broken)?;
            let patience = next.saturating_duration_since(Instant::now()).min(TICK);
            if event::poll(patience).map_err(broken)? && is_quit(&event::read().map_err(broken)?) {
                return Ok(());
            }
            if interrupted.wait(Duration::ZERO) {
                return Ok(());
            }
        }
        if view.intervals.len() == KEPT {
            view.intervals.pop_front();
        }
        view.intervals.push_back(rounds.next()?);
    }
    terminal.draw(|frame| draw(frame, &view)).map_err(broken)?;
    Ok(())
}

fn is_quit(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

fn draw(frame: &mut Frame<'_>, view: &View) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let [top, rate, stall, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(4),
        Constraint::Length(4),
        Constraint::Length(7),
        Constraint::Length(1),
    ])
    .areas(frame.area());

    let last = view.intervals.back();
    let head = last.map_or("the first round is under way".to_string(), |last| {
        format!(
            "round {}: {} pages, {:.0} pages/s ({:.1} MiB/s), tables {}",
            last.round.number,
            show_count(last.round.pages),
            last.pages_per_second(),
            last.pages_per_second() / 256.0,
            show_size(last.info.table_bytes)
        )
    });
    frame.render_widget(Paragraph::new(format!("{}: {head}", view.name)).style(bold), top);

    graph(frame, rate, view, "pages written per second", |interval| interval.pages_per_second());
    graph(frame, stall, view, "stopped by the log, in 0.1 % of the time", |interval| interval.stall() * 10.0);

    if let Some(last) = last {
        let counted = format!(
            "{}since the last round\n{}",
            info_in_words(&last.info),
            cost_in_words(&last.counters, view.clock_hz)
        );
        frame.render_widget(Paragraph::new(counted).block(Block::bordered()), below);
    }
    frame.render_widget(Line::from(" q quit"), keys);
}

/// The newest intervals, as many as there are columns, the newest at the right.
fn graph(
    frame: &mut Frame<'_>,
    area: ratatui::layout::Rect,
    view: &View,
    title: &str,
    value: impl Fn(&Interval) -> f64,
) {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a height in a picture; never negative"
    )]
    let values: Vec<u64> = view.intervals.iter().map(|interval| value(interval) as u64).collect();
    let columns = usize::from(area.width.saturating_sub(2));
    let shown = &values[values.len().saturating_sub(columns)..];
    let most = shown.iter().max().copied().unwrap_or(0);
    let block = Block::bordered().title(format!(" {title}, at most {} ", show_count(most)));
    frame.render_widget(Sparkline::default().data(shown).block(block), area);
}

#[cfg(test)]
mod tests {
    use abi::counters::VcpuCounters;
    use abi::dirty::{DirtyInfo, Round};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    #[test]
    fn picture_has_the_last_round_and_fits_any_terminal() {
        let info = DirtyInfo {
            at_ns: 0,
            running: None,
            mirror: false,
            paused: false,
            rounds: 7,
            pages: 70,
            splits_ahead: 3,
            is_splitting: false,
            flushes: 1,
            collapses: 0,
            is_collapsing: false,
            table_bytes: 8192,
        };
        let interval = |pages| {
            let round = Round { number: 7, pages, ..Round::default() };
            Interval::new(round, info, 500_000_000, VcpuCounters { dirty_faults: 5, ..VcpuCounters::default() })
        };
        let intervals = [100, 4000, 0].map(interval).into();
        let view = View { name: "default".to_string(), intervals, clock_hz: 1_000_000_000 };
        for size in [(100, 24), (1, 1), (30, 5)] {
            let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("is made of memory");
            terminal.draw(|frame| draw(frame, &view)).expect("is made of memory");
            let screen = terminal.backend().to_string();
            if size.0 == 100 {
                assert!(screen.contains("round 7: 0 pages") && screen.contains("at most 8,000"), "{screen}");
                assert!(screen.contains("5 faults of the log") && screen.contains("no log is active"), "{screen}");
            }
            terminal.draw(|frame| draw(frame, &View::default())).expect("is made of memory");
        }
    }
}
