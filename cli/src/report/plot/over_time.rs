//! A plot over time: one panel for each setting, one below the other, on the same scales. Each panel marks the time of
//! what it is about, such as an active log.
//!
//! Lines of several settings in one panel would hide each other, because the values change quickly.

use maud::{Markup, html};

use super::{COLOURS, legend, nice, short};
use crate::bench::Spread;
use crate::report::number::number;

const WIDTH: f64 = 440.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 8.0;
/// Height of the name of a panel.
const NAME: f64 = 22.0;
const BELOW: f64 = 44.0;

/// Panels of one quantity.
pub(in crate::report) struct OverTime {
    /// The title, which is also for readers who do not see the plot.
    pub(in crate::report) title: String,
    /// The labels of the axes, with units.
    pub(in crate::report) x_label: &'static str,
    pub(in crate::report) y_label: &'static str,
    /// Where the vertical axis ends.
    pub(in crate::report) most: f64,
    /// Its lines of the grid.
    pub(in crate::report) ticks: &'static [f64],
    /// What the values shall not fall below.
    pub(in crate::report) wanted: Option<f64>,
    /// The height of a panel below its name.
    pub(in crate::report) height: f64,
    /// What its parts mean.
    pub(in crate::report) legend: Vec<(Look, String)>,
    /// One below the other.
    pub(in crate::report) panels: Vec<Panel>,
}

/// A part of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::report) enum Look {
    /// The line of the values, and the tint from least to greatest.
    Line,
    Band,
    /// The lines of other runs.
    Thin,
    /// [`OverTime::wanted`].
    Wanted,
    /// [`Panel::on`].
    During,
    /// [`Panel::marks`].
    Mark,
    /// [`Trace::still`].
    Still,
}

/// One setting.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::report) struct Panel {
    /// Its name.
    pub(in crate::report) name: String,
    /// More, in words, for readers who do not see the plot.
    pub(in crate::report) description: String,
    /// Number of its colour.
    pub(in crate::report) colour: usize,
    /// What it shows first.
    pub(in crate::report) trace: Trace,
    /// Other runs, behind it.
    pub(in crate::report) behind: Vec<Trace>,
    /// When it was on.
    pub(in crate::report) on: (f64, f64),
    /// Moments within.
    pub(in crate::report) marks: Vec<f64>,
}

/// A line over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::report) struct Trace {
    /// The value at each time in seconds: of all runs together medians, with minimum and maximum.
    pub(in crate::report) points: Vec<(f64, Spread)>,
    /// When there was nothing to measure, because time itself stood still.
    pub(in crate::report) still: Option<(f64, f64)>,
}

impl Look {
    /// Its class in the page's style.
    const fn class(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Band => "band",
            Self::Thin => "line thin",
            Self::Wanted => "wanted",
            Self::During => "during",
            Self::Mark => "mark",
            Self::Still => "still",
        }
    }

    /// An example of it.
    fn example(self) -> Markup {
        let class = self.class();
        html! {
            @match self {
                Self::Band | Self::During | Self::Still => rect class=(class) width="26" height="10" {},
                _ => line class=(class) x1="0" x2="26" y1="5" y2="5" {},
            }
        }
    }
}

impl Trace {
    /// The line before and after the time in which it stood still.
    fn parts(&self) -> impl Iterator<Item = &[(f64, Spread)]> {
        let middle = self.still.map_or(f64::INFINITY, |(from, to)| f64::midpoint(from, to));
        let (before, after) = self.points.split_at(self.points.partition_point(|(at, _)| *at < middle));
        [before, after].into_iter().filter(|part| !part.is_empty())
    }
}

impl Panel {
    /// All times that it has something at.
    fn times(&self) -> impl Iterator<Item = f64> {
        self.behind.iter().chain([&self.trace]).flat_map(|trace| trace.points.iter().map(|(at, _)| *at))
    }
}

/// Where times and values are in the picture.
struct Scale {
    from: f64,
    to: f64,
    most: f64,
    height: f64,
}

impl Scale {
    fn x(&self, at: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * ((at - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }

    /// In a panel with this bottom.
    fn y(&self, value: f64, bottom: f64) -> f64 {
        bottom - self.height * (value / self.most).clamp(0.0, 1.0)
    }

    fn corners<'a>(&self, points: impl Iterator<Item = (f64, f64)> + 'a, bottom: f64) -> String {
        let corner = |(at, value): (f64, f64)| format!("{},{}", short(self.x(at)), short(self.y(value, bottom)));
        points.map(corner).collect::<Vec<_>>().join(" ")
    }

    /// A part of the time, in a panel with this bottom.
    fn area(&self, look: Look, (from, to): (f64, f64), bottom: f64) -> Markup {
        let (from, to) = (self.x(from), self.x(to));
        html! {
            rect class=(look.class()) x=(short(from)) y=(short(bottom - self.height)) width=(short((to - from).max(0.0))) height=(self.height) {}
        }
    }
}

impl OverTime {
    /// The plot; nothing if there is nothing to show.
    pub(in crate::report) fn draw(&self) -> Option<Markup> {
        let times = || self.panels.iter().flat_map(Panel::times);
        let (from, to) = (times().reduce(f64::min)?, times().reduce(f64::max)?);
        let scale = Scale { from, to, most: self.most, height: self.height };
        let is_drawable = from < to && (to - from).is_finite() && self.most > 0.0;
        let panel = NAME + self.height;
        let height = panel * self.panels.len() as f64;
        is_drawable.then(|| {
            html! {
                figure {
                    svg class="plot" viewBox=(format!("0 0 {WIDTH} {}", short(height + BELOW))) role="img" aria-label=(self.title) {
                        desc { @for Panel { name, description, .. } in &self.panels { (name) ". " (description) " " } }
                        @for (number_of_panel, it) in self.panels.iter().enumerate() {
                            (self.panel(it, panel * (number_of_panel + 1) as f64, &scale))
                        }
                        @for tick in seconds(from, to) {
                            text class="tick" x=(short(scale.x(tick))) y=(short(height + 16.0)) text-anchor="middle" { (number(tick)) }
                        }
                        text class="label" x=(short(f64::midpoint(LEFT, WIDTH - RIGHT))) y=(short(height + BELOW - 8.0)) text-anchor="middle" { (self.x_label) }
                        @let middle = short(f64::midpoint(NAME, height));
                        text class="label" x="12" y=(middle) text-anchor="middle" transform=(format!("rotate(-90 12 {middle})")) { (self.y_label) }
                    }
                    figcaption {
                        (self.title)
                        @if !self.legend.is_empty() {
                            (legend(self.legend.iter().map(|(look, name)| (name.as_str(), look.example()))))
                        }
                    }
                }
            }
        })
    }

    fn panel(&self, panel: &Panel, bottom: f64, scale: &Scale) -> Markup {
        let Panel { name, description, colour, trace, behind, on, marks } = panel;
        let level = |look: Look, value: f64| {
            let y = short(scale.y(value, bottom));
            html! { line class=(look.class()) x1=(LEFT) x2=(WIDTH - RIGHT) y1=(y) y2=(y) {} }
        };
        let line = |look: Look, part: &[(f64, Spread)]| {
            let points = scale.corners(part.iter().map(|(at, it)| (*at, it.median)), bottom);
            html! { polyline class=(look.class()) points=(points) {} }
        };
        let band = |part: &[(f64, Spread)]| {
            let above = part.iter().map(|(at, it)| (*at, it.greatest));
            let below = part.iter().rev().map(|(at, it)| (*at, it.least));
            html! { polygon class=(Look::Band.class()) points=(scale.corners(above.chain(below), bottom)) {} }
        };
        let has_band = trace.points.iter().any(|(_, it)| it.least < it.greatest);
        html! {
            g class=(format!("c{}", colour % COLOURS)) {
                @if !description.is_empty() { title { (name) ". " (description) } }
                text class="heading" x=(LEFT) y=(short(bottom - self.height - 6.0)) { (name) }
                (scale.area(Look::During, *on, bottom))
                @if let Some(still) = trace.still { (scale.area(Look::Still, still, bottom)) }
                @for tick in self.ticks {
                    @let y = scale.y(*tick, bottom);
                    line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(y)) y2=(short(y)) {}
                    text class="tick" x=(LEFT - 6.0) y=(short(y + 4.0)) text-anchor="end" { (number(*tick)) }
                }
                @for mark in marks {
                    @let x = short(scale.x(*mark));
                    line class=(Look::Mark.class()) x1=(x) x2=(x) y1=(short(bottom - self.height)) y2=(short(bottom)) {}
                }
                @for part in behind.iter().flat_map(Trace::parts) { (line(Look::Thin, part)) }
                @for part in trace.parts() {
                    @if has_band { (band(part)) }
                    (line(Look::Line, part))
                }
                @if let Some(wanted) = self.wanted { (level(Look::Wanted, wanted)) }
            }
        }
    }
}

/// Round seconds between two moments.
fn seconds(from: f64, to: f64) -> Vec<f64> {
    let step = nice((to - from) / 10.0);
    let mut at = (from / step).ceil() * step;
    let mut ticks = Vec::new();
    while at <= to && ticks.len() < 20 {
        // Avoids a negative zero and digits from rounding.
        ticks.push((at / step).round() * step + 0.0);
        at += step;
    }
    ticks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(values: &[Spread]) -> OverTime {
        let points = (0..).zip(values).map(|(number, value)| (-1.0 + 0.5 * f64::from(number), *value)).collect();
        let panel = Panel {
            name: "a <b>".to_string(),
            description: "in words".to_string(),
            colour: 7,
            trace: Trace { points, still: None },
            on: (0.0, 1.0),
            marks: vec![0.5],
            ..Panel::default()
        };
        OverTime {
            title: "t".to_string(),
            x_label: "s",
            y_label: "%",
            most: 150.0,
            ticks: &[0.0, 100.0],
            wanted: None,
            height: 62.0,
            legend: Vec::new(),
            panels: vec![panel.clone(), panel],
        }
    }

    fn spread(values: &[f64]) -> Spread {
        Spread::of(values).expect("has values")
    }

    #[test]
    fn each_setting_has_a_panel_with_line_band_and_marks() {
        let drawn = plot(&[spread(&[100.0]), spread(&[10.0, 20.0, 40.0]), spread(&[900.0]), spread(&[100.0])]);
        let drawn = drawn.draw().expect("has points").into_string();
        for part in ["<polyline", "<polygon", "class=\"during\"", "class=\"mark\"", "<title>a &lt;b&gt;. in words"] {
            assert_eq!(drawn.matches(part).count(), 2, "{part} in {drawn}");
        }
        assert!(drawn.contains("<desc>a &lt;b&gt;. in words a &lt;b&gt;. in words </desc>"), "{drawn}");
        assert!(!drawn.contains("class=\"wanted\"") && !drawn.contains("class=\"still\""), "{drawn}");
        // The first panel ends at 84, the second at 168. A value beyond the axis is drawn at its end.
        assert!(drawn.contains(",22 ") && drawn.contains(",106 "), "{drawn}");
    }

    #[test]
    fn line_is_broken_where_time_stood_still_and_has_no_band_of_one_run() {
        let mut broken = plot(&[100.0, 50.0, 0.0, 100.0, 100.0].map(|value| spread(&[value])));
        broken.wanted = Some(50.0);
        broken.legend = vec![(Look::Still, "still".to_string()), (Look::Thin, "thin".to_string())];
        let still = Trace { still: Some((0.1, 0.4)), ..broken.panels[0].trace.clone() };
        broken.panels = vec![Panel { trace: still.clone(), behind: vec![still], ..Panel::default() }];
        let drawn = broken.draw().expect("has points").into_string();
        let corners = |class: &str| -> Vec<usize> {
            let begin = format!("<polyline class=\"{class}\" points=\"");
            drawn
                .split(&begin)
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap_or_default().split(' ').count())
                .collect()
        };
        assert_eq!((corners("line"), corners("line thin")), (vec![3, 2], vec![3, 2]), "{drawn}");
        assert_eq!(drawn.matches("class=\"still\"").count(), 2, "in the panel and in the legend: {drawn}");
        assert_eq!(drawn.matches("class=\"wanted\"").count(), 1, "{drawn}");
        assert!(!drawn.contains("<polygon") && !drawn.contains("NaN"), "{drawn}");
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_odd_numbers_are_no_panic() {
        assert!(plot(&[]).draw().is_none());
        assert!(OverTime { panels: Vec::new(), ..plot(&[]) }.draw().is_none());
        for odd in [f64::MAX, f64::MIN, 1e-300] {
            let mut odd_one = plot(&[spread(&[odd, 1.0]), spread(&[0.0])]);
            odd_one.panels[0].trace.points[0].0 = odd;
            let drawn = odd_one.draw().map(Markup::into_string).unwrap_or_default();
            assert!(!drawn.contains("NaN"), "{drawn}");
        }
    }

    #[test]
    fn times_of_the_axis_are_round() {
        assert_eq!(seconds(-1.5, 4.0), [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(seconds(-0.05, 0.2).len(), 6);
    }
}
