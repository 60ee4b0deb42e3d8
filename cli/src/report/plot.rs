//! Plots as inline SVG: lines over categories, and bars.
//!
//! The code is our own, because readers open the page on phones and in dark mode. Colours are the page's (CSS
//! variables), text is readable at the width of a phone, and legends are text of the page, which wraps. Plotting crates
//! write fixed colours and sizes (docs/decisions/0002-crates.md).

pub(super) mod over_time;

use maud::{Markup, html};

use super::number::number;
use crate::bench::Spread;

/// Of a plot's own coordinates. A phone shows about 360 of them one to one.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// Colours that the page has.
pub(super) const COLOURS: usize = 6;

/// A plot of lines.
pub(super) struct Lines {
    /// A description for readers who do not see the plot.
    pub(super) title: String,
    /// The label of the horizontal axis.
    pub(super) x_label: &'static str,
    /// The label of the vertical axis, with the unit.
    pub(super) y_label: &'static str,
    /// The places on the horizontal axis.
    pub(super) x: Vec<String>,
    /// Whether each line of the grid is ten times the one below.
    pub(super) is_logarithmic: bool,
    /// The lines.
    pub(super) lines: Vec<Line>,
}

/// One line.
pub(super) struct Line {
    /// Its name.
    pub(super) name: String,
    /// Number of its colour.
    pub(super) colour: usize,
    /// Whether it is dashed, and how.
    pub(super) dash: usize,
    /// A point for each category, if it has a value: the median, with a bar from minimum to maximum.
    pub(super) points: Vec<Option<Spread>>,
}

const DASHES: [&str; 3] = ["none", "7 4", "2 4"];

/// A vertical axis.
struct Axis {
    from: f64,
    to: f64,
    is_logarithmic: bool,
}

impl Axis {
    /// For these values, with some room.
    fn of(values: &[f64], is_logarithmic: bool) -> Option<Self> {
        let usable = |value: &&f64| value.is_finite() && (!is_logarithmic || **value > 0.0);
        let least = values.iter().filter(usable).copied().reduce(f64::min)?;
        let most = values.iter().filter(usable).copied().reduce(f64::max)?;
        let (from, to) = if is_logarithmic {
            (10_f64.powf(least.log10().floor()), 10_f64.powf((most * 1.001).log10().ceil()))
        } else {
            (least.min(0.0), if most > 0.0 { most * 1.05 } else { 1.0 })
        };
        Some(Self { from, to, is_logarithmic })
    }

    /// Where a value is, from 0 below to 1 above.
    fn place(&self, value: f64) -> f64 {
        let place = if self.is_logarithmic {
            (value.max(self.from) / self.from).log10() / (self.to / self.from).log10()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }

    /// Values at which there is a line of the grid.
    fn ticks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            let mut at = self.from;
            let mut ticks = Vec::new();
            while at <= self.to * 1.001 && ticks.len() < 30 {
                ticks.push(at);
                at *= 10.0;
            }
            return ticks;
        }
        let step = nice((self.to - self.from) / 4.0);
        let mut at = (self.from / step).ceil() * step;
        let mut ticks = Vec::new();
        while at <= self.to && ticks.len() < 30 {
            ticks.push(at);
            at += step;
        }
        ticks
    }

    /// The height of a value in the picture.
    fn y(&self, value: f64) -> f64 {
        TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - self.place(value))
    }
}

/// The next of 1, 2 and 5 times a power of ten.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.abs().max(f64::MIN_POSITIVE).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|by| by * power).find(|&nice| nice >= step).unwrap_or(10.0 * power)
}

impl Lines {
    /// The plot and its legend; nothing if there is no point.
    pub(super) fn draw(&self) -> Option<Markup> {
        let spreads = || self.lines.iter().flat_map(|line| line.points.iter().flatten());
        let values: Vec<f64> = spreads().flat_map(|spread| [spread.least, spread.greatest]).collect();
        let axis = Axis::of(&values, self.is_logarithmic)?;
        let step = (WIDTH - LEFT - RIGHT) / self.x.len().max(1) as f64;
        let at = |place: usize| LEFT + step * (place as f64 + 0.5);
        Some(html! {
            figure {
                svg class="plot" viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(self.title) {
                    @for tick in axis.ticks() {
                        line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(axis.y(tick))) y2=(short(axis.y(tick))) {}
                        text class="tick" x=(LEFT - 6.0) y=(short(axis.y(tick) + 4.0)) text-anchor="end" { (number(tick)) }
                    }
                    @for (place, label) in self.x.iter().enumerate() {
                        text class="tick" x=(short(at(place))) y=(HEIGHT - BOTTOM + 17.0) text-anchor="middle" { (label) }
                    }
                    text class="label" x=(short(f64::midpoint(LEFT, WIDTH - RIGHT))) y=(HEIGHT - 6.0) text-anchor="middle" { (self.x_label) }
                    text class="label" x="12" y=(short(f64::midpoint(TOP, HEIGHT - BOTTOM))) text-anchor="middle"
                        transform=(format!("rotate(-90 12 {})", short(f64::midpoint(TOP, HEIGHT - BOTTOM)))) { (self.y_label) }
                    @for (number, line) in self.lines.iter().enumerate() {
                        (self.line(number, line, &axis, &at))
                    }
                }
                figcaption { (self.title) (self.legend()) }
            }
        })
    }

    fn legend(&self) -> Markup {
        legend(self.lines.iter().map(|Line { name, colour, dash, .. }| {
            let look = html! {
                g class=(format!("c{}", colour % COLOURS)) {
                    line class="line" x1="0" x2="26" y1="5" y2="5" stroke-dasharray=(DASHES[dash % DASHES.len()]) {}
                }
            };
            (name.as_str(), look)
        }))
    }

    fn line(&self, number_of_line: usize, line: &Line, axis: &Axis, at: &dyn Fn(usize) -> f64) -> Markup {
        // Points with equal values are drawn side by side.
        let aside = 3.0 * (number_of_line as f64 - (self.lines.len() as f64 - 1.0) / 2.0);
        let points: Vec<(f64, Spread, &str)> = line
            .points
            .iter()
            .enumerate()
            .filter_map(|(place, spread)| Some((at(place) + aside, (*spread)?, self.x.get(place)?.as_str())))
            .collect();
        let path: Vec<String> =
            points.iter().map(|(x, spread, _)| format!("{},{}", short(*x), short(axis.y(spread.median)))).collect();
        html! {
            g class=(format!("c{}", line.colour % COLOURS)) {
                polyline class="line" points=(path.join(" ")) stroke-dasharray=(DASHES[line.dash % DASHES.len()]) {}
                @for (x, spread, place) in &points {
                    line class="spread" x1=(short(*x)) x2=(short(*x)) y1=(short(axis.y(spread.least))) y2=(short(axis.y(spread.greatest))) {}
                    circle class="dot" cx=(short(*x)) cy=(short(axis.y(spread.median))) r="3" {
                        title { (line.name) ", " (place) ": " (number(spread.median)) " (" (number(spread.least)) "–" (number(spread.greatest)) ")" }
                    }
                }
            }
        }
    }
}

/// A plot of horizontal bars.
pub(super) struct Bars {
    /// A description for readers who do not see the plot.
    pub(super) title: String,
    /// The unit of the numbers.
    pub(super) unit: &'static str,
    /// Groups of bars, each with a heading, which may be empty.
    pub(super) groups: Vec<(String, Vec<Bar>)>,
}

/// One bar.
pub(super) struct Bar {
    /// Its name.
    pub(super) name: String,
    /// Number of its colour.
    pub(super) colour: usize,
    /// Its length, with a mark from minimum to maximum.
    pub(super) value: Spread,
}

impl Bars {
    const BAR: f64 = 20.0;
    const HEADING: f64 = 24.0;
    /// Where bars begin, and where they end at the latest: their number follows.
    const FROM: f64 = 150.0;
    const TO: f64 = WIDTH - 62.0;

    /// The plot; nothing if there is no bar.
    pub(super) fn draw(&self) -> Option<Markup> {
        let bars = || self.groups.iter().flat_map(|(_, bars)| bars);
        let most = bars().map(|bar| bar.value.greatest).filter(|value| value.is_finite()).reduce(f64::max)?;
        let length = |value: f64| if most > 0.0 { (value.max(0.0) / most) * (Self::TO - Self::FROM) } else { 0.0 };
        let mut y = 4.0;
        let mut rows: Vec<Markup> = Vec::new();
        for (heading, bars) in &self.groups {
            if !heading.is_empty() {
                rows.push(html! { text class="heading" x="2" y=(short(y + 15.0)) { (heading) } });
                y += Self::HEADING;
            }
            for Bar { name, colour, value } in bars {
                let end = Self::FROM + length(value.median);
                let (least, greatest) = (Self::FROM + length(value.least), Self::FROM + length(value.greatest));
                rows.push(html! {
                    g class=(format!("c{}", colour % COLOURS)) {
                        title { (name) ": " (number(value.median)) " " (self.unit) " (" (number(value.least)) "–" (number(value.greatest)) ")" }
                        text class="tick" x=(Self::FROM - 6.0) y=(short(y + 14.0)) text-anchor="end" { (name) }
                        rect class="bar" x=(Self::FROM) y=(short(y + 2.0)) width=(short(end - Self::FROM)) height=(Self::BAR - 4.0) {}
                        @if greatest - least > 0.5 {
                            line class="spread" x1=(short(least)) x2=(short(greatest)) y1=(short(y + Self::BAR / 2.0)) y2=(short(y + Self::BAR / 2.0)) {}
                        }
                        text class="tick" x=(short(greatest.max(end) + 4.0)) y=(short(y + 14.0)) { (number(value.median)) }
                    }
                });
                y += Self::BAR;
            }
        }
        Some(html! {
            figure {
                svg class="plot" viewBox=(format!("0 0 {WIDTH} {}", short(y + 4.0))) role="img" aria-label=(self.title) {
                    @for row in &rows { (row) }
                }
                figcaption { (self.title) ", " (self.unit) }
            }
        })
    }
}

/// Names, each with what it looks like in 26 by 10, as text that wraps.
fn legend<'a>(entries: impl Iterator<Item = (&'a str, Markup)>) -> Markup {
    html! {
        ul class="legend" {
            @for (name, look) in entries {
                li {
                    svg width="26" height="10" viewBox="0 0 26 10" aria-hidden="true" { (look) }
                    " " (name)
                }
            }
        }
    }
}

/// A coordinate, rounded to visible digits.
fn short(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(value: f64) -> Option<Spread> {
        Spread::of(&[value])
    }

    fn lines(points: Vec<Option<Spread>>, is_logarithmic: bool) -> Lines {
        let x = (0..points.len()).map(|place| place.to_string()).collect();
        let line = Line { name: "a <b>".to_string(), colour: 1, dash: 0, points };
        Lines { title: "t".to_string(), x_label: "x", y_label: "y", x, is_logarithmic, lines: vec![line] }
    }

    #[test]
    fn what_is_greater_is_drawn_higher_and_inside() {
        for is_logarithmic in [false, true] {
            let axis = Axis::of(&[3.0, 50.0, 700.0], is_logarithmic).expect("has values");
            let heights = [3.0, 50.0, 700.0].map(|value| axis.y(value));
            assert!(heights.is_sorted_by(|low, high| low > high), "{heights:?}");
            assert!(heights.iter().all(|y| (TOP..=HEIGHT - BOTTOM).contains(y)), "{heights:?}");
            assert!(axis.ticks().len() >= 3, "{:?}", axis.ticks());
        }
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_odd_numbers_are_no_panic() {
        assert!(lines(vec![None, None], false).draw().is_none());
        assert!(Bars { title: String::new(), unit: "", groups: Vec::new() }.draw().is_none());
        for values in [[0.0, 0.0], [-5.0, 1e300], [1e-300, 1e-300], [f64::MAX, f64::MIN]] {
            for is_logarithmic in [false, true] {
                let _ = lines(values.into_iter().map(one).collect(), is_logarithmic).draw();
            }
        }
    }

    #[test]
    fn names_are_text_and_nothing_else() {
        let drawn = lines(vec![one(1.0), one(2.0)], false).draw().expect("has points").into_string();
        assert!(drawn.contains("a &lt;b&gt;") && !drawn.contains("a <b>"), "{drawn}");
    }

    #[test]
    fn longest_bar_leaves_room_for_its_number() {
        let bar = |name: &str, value| Bar { name: name.to_string(), colour: 0, value: one(value).expect("has one") };
        let groups = vec![("g".to_string(), vec![bar("long", 900.0), bar("short", 90.0)])];
        let drawn = Bars { title: String::new(), unit: "u", groups }.draw().expect("has bars").into_string();
        assert!(drawn.contains(r#"width="228""#) && drawn.contains(r#"width="22.8""#), "{drawn}");
    }

    #[test]
    fn steps_of_the_grid_are_round() {
        assert_eq!([0.3, 1.0, 1.1, 4.0, 26.0].map(nice), [0.5, 1.0, 2.0, 5.0, 50.0]);
    }
}
