//! A plot over time: one panel for each setting, one below the other, on the same scales. Each panel marks the time of
//! an active log.
//!
//! Lines of several settings in one panel would hide each other, because the values change quickly.

use maud::{Markup, html};

use super::{COLOURS, nice, short};
use crate::bench::Spread;
use crate::report::number::number;

const WIDTH: f64 = 440.0;
const LEFT: f64 = 44.0;
const RIGHT: f64 = 8.0;
/// Heights in a panel: of its name, and of the plot.
const NAME: f64 = 22.0;
const GRAPH: f64 = 62.0;
const BELOW: f64 = 44.0;

/// Panels of one quantity.
pub(in crate::report) struct OverTime {
    /// A description for readers who do not see the plot.
    pub(in crate::report) title: String,
    /// The label of the horizontal axis.
    pub(in crate::report) x_label: &'static str,
    /// Where the vertical axis ends.
    pub(in crate::report) most: f64,
    /// Its lines of the grid.
    pub(in crate::report) ticks: &'static [f64],
    /// One below the other.
    pub(in crate::report) panels: Vec<Panel>,
}

/// One setting.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::report) struct Panel {
    /// Its name.
    pub(in crate::report) name: String,
    /// Number of its colour.
    pub(in crate::report) colour: usize,
    /// Seconds at which the first point is, and from one to the next.
    pub(in crate::report) from: f64,
    pub(in crate::report) step: f64,
    /// All runs together: medians, with minimum and maximum.
    pub(in crate::report) points: Vec<Spread>,
    /// When it was on.
    pub(in crate::report) on: (f64, f64),
    /// Moments within.
    pub(in crate::report) marks: Vec<f64>,
}

impl OverTime {
    /// The plot; nothing if there is nothing to show.
    pub(in crate::report) fn draw(&self) -> Option<Markup> {
        let ends = |panel: &Panel| (panel.from, panel.from + panel.step * panel.points.len() as f64);
        let (from, to) = self.panels.iter().map(ends).reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))?;
        let is_drawable = from < to && (to - from).is_finite() && self.most > 0.0;
        let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * ((at - from) / (to - from)).clamp(0.0, 1.0);
        let y = |value: f64, bottom: f64| bottom - GRAPH * (value / self.most).clamp(0.0, 1.0);
        let height = (NAME + GRAPH) * self.panels.len() as f64;
        is_drawable.then(|| {
            html! {
                figure {
                    svg class="plot" viewBox=(format!("0 0 {WIDTH} {}", short(height + BELOW))) role="img" aria-label=(self.title) {
                        @for (number_of_panel, panel) in self.panels.iter().enumerate() {
                            (self.panel(panel, (NAME + GRAPH) * (number_of_panel + 1) as f64, &x, &y))
                        }
                        @for tick in seconds(from, to) {
                            text class="tick" x=(short(x(tick))) y=(short(height + 16.0)) text-anchor="middle" { (number(tick)) }
                        }
                        text class="label" x=(short(f64::midpoint(LEFT, WIDTH - RIGHT))) y=(short(height + BELOW - 8.0)) text-anchor="middle" { (self.x_label) }
                    }
                    figcaption { (self.title) }
                }
            }
        })
    }

    fn panel(&self, panel: &Panel, bottom: f64, x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64, f64) -> f64) -> Markup {
        let Panel { name, colour, from, step, points, on, marks } = panel;
        let at = |place: usize| short(x(from + step * (place as f64 + 0.5)));
        let corner = |place: usize, value: f64| format!("{},{}", at(place), short(y(value, bottom)));
        let line: Vec<String> = points.iter().enumerate().map(|(place, it)| corner(place, it.median)).collect();
        let above = points.iter().enumerate().map(|(place, it)| corner(place, it.greatest));
        let below = points.iter().enumerate().rev().map(|(place, it)| corner(place, it.least));
        let band: Vec<String> = above.chain(below).collect();
        let (start, stop) = (x(on.0), x(on.1));
        html! {
            g class=(format!("c{}", colour % COLOURS)) {
                text class="heading" x=(LEFT) y=(short(bottom - GRAPH - 6.0)) { (name) }
                rect class="during" x=(short(start)) y=(short(bottom - GRAPH)) width=(short((stop - start).max(0.0))) height=(GRAPH) {}
                @for tick in self.ticks {
                    line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(y(*tick, bottom))) y2=(short(y(*tick, bottom))) {}
                    text class="tick" x=(LEFT - 6.0) y=(short(y(*tick, bottom) + 4.0)) text-anchor="end" { (number(*tick)) }
                }
                @for mark in marks {
                    line class="mark" x1=(short(x(*mark))) x2=(short(x(*mark))) y1=(short(bottom - GRAPH)) y2=(short(bottom)) {}
                }
                polygon class="band" points=(band.join(" ")) {}
                polyline class="line" points=(line.join(" ")) {}
            }
        }
    }
}

/// Round seconds between two moments.
fn seconds(from: f64, to: f64) -> Vec<f64> {
    let step = nice((to - from) / 8.0);
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

    fn plot(points: Vec<Spread>) -> OverTime {
        let panel = Panel {
            name: "a <b>".to_string(),
            colour: 7,
            from: -1.0,
            step: 0.5,
            points,
            on: (0.0, 1.0),
            marks: vec![0.5],
        };
        let panels = vec![panel.clone(), panel];
        OverTime { title: "t".to_string(), x_label: "s", most: 150.0, ticks: &[0.0, 100.0], panels }
    }

    fn spread(values: &[f64]) -> Spread {
        Spread::of(values).expect("has values")
    }

    #[test]
    fn each_setting_has_a_panel_with_line_band_and_marks() {
        let drawn = plot(vec![spread(&[100.0]), spread(&[10.0, 20.0, 40.0]), spread(&[900.0]), spread(&[100.0])]);
        let drawn = drawn.draw().expect("has points").into_string();
        for part in ["<polyline", "<polygon", "class=\"during\"", "class=\"mark\"", "a &lt;b&gt;"] {
            assert_eq!(drawn.matches(part).count(), 2, "{part} in {drawn}");
        }
        // The first panel ends at 84, the second at 168. A value beyond the axis is drawn at its end.
        assert!(drawn.contains(",22 ") && drawn.contains(",106 "), "{drawn}");
    }

    #[test]
    fn nothing_to_draw_is_no_plot_and_odd_numbers_are_no_panic() {
        assert!(plot(Vec::new()).draw().is_none());
        assert!(OverTime { panels: Vec::new(), ..plot(Vec::new()) }.draw().is_none());
        for odd in [f64::MAX, f64::MIN, 1e-300] {
            let mut odd_one = plot(vec![spread(&[odd, 1.0])]);
            odd_one.panels[0].from = odd;
            let _ = odd_one.draw();
        }
    }

    #[test]
    fn times_of_the_axis_are_round() {
        assert_eq!(seconds(-1.5, 4.0), [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(seconds(-0.05, 0.2).len(), 6);
    }
}
