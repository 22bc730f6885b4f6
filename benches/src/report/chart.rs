//! Plots on logarithmic axes, as SVG.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 60.0;
/// At most what a letter of the legend takes, in the mean over a name.
const LETTER: f64 = 6.6;
/// Distinguishable without colour vision; further series reuse them from the start.
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#999999",
];

/// One measurement in a plot.
#[derive(Clone, Debug)]
pub struct Point {
    /// Positive.
    pub x: f64,
    /// Positive.
    pub y: f64,
    /// The name of the measurement, for errors.
    pub name: String,
}

/// One line of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// For the legend.
    pub name: String,
    /// In any order; a line has at most one at each `x`.
    pub points: Vec<Point>,
    /// Joined by a line from left to right; otherwise points alone.
    pub line: bool,
}

impl Series {
    /// The points from left to right.
    ///
    /// # Errors
    ///
    /// The names of two points of a line at the same `x`: the series mixes points that should be separate.
    fn sorted(&self) -> Result<Vec<&Point>, String> {
        let mut points: Vec<&Point> = self.points.iter().collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        match points.windows(2).find(|pair| pair[0].x == pair[1].x) {
            Some([a, b]) if self.line => Err(format!(
                "the series `{}` has two points at {}: {} ({}) and {} ({})",
                self.name, a.x, a.name, a.y, b.name, b.y
            )),
            _ => Ok(points),
        }
    }
}

/// A plot.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above the plot.
    pub title: String,
    /// Below the plot.
    pub x: String,
    /// Beside the plot.
    pub y: String,
    /// In the order of the legend; those without points are left out.
    pub series: Vec<Series>,
}

/// A logarithmic axis between two numbers, in pixels.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), x| {
            (low.min(x), high.max(x))
        });
        // Some margin, so that no marker lies on the frame.
        let (low, high) = (low / 1.25, high * 1.25);
        Self {
            low,
            high,
            from,
            to,
        }
    }

    fn at(&self, x: f64) -> f64 {
        let part = (x / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    /// Powers of `base` inside the axis, with halves in between if there are few of them.
    fn ticks(&self, base: f64) -> Vec<f64> {
        let between = |steps: &[f64]| {
            let first = (self.low.ln() / base.ln()).floor() as i32;
            let last = (self.high.ln() / base.ln()).ceil() as i32;
            let all = (first..=last).flat_map(|e| steps.iter().map(move |s| s * base.powi(e)));
            all.filter(|x| (self.low..=self.high).contains(x))
                .collect::<Vec<f64>>()
        };
        let ticks = between(&[1.0]);
        match (ticks.len(), base as u32) {
            (0..4, 10) => between(&[1.0, 2.0, 5.0]),
            _ => ticks,
        }
    }
}

impl Chart {
    /// The plot as SVG, or `None` if there is no point. Numbers on the x axis are powers of `base`.
    ///
    /// # Errors
    ///
    /// When a line has two points at the same `x`.
    pub fn svg(&self, base: f64) -> Result<Option<String>, String> {
        let mut drawn: Vec<(&Series, Vec<&Point>)> = Vec::new();
        for series in self.series.iter().filter(|s| !s.points.is_empty()) {
            let points = series
                .sorted()
                .map_err(|e| format!("the plot `{}`: {e}", self.title))?;
            drawn.push((series, points));
        }
        if drawn.is_empty() {
            return Ok(None);
        }
        let points = || drawn.iter().flat_map(|(_, points)| points);
        let x = Axis::new(points().map(|p| p.x), LEFT, WIDTH - RIGHT);
        let y = Axis::new(points().map(|p| p.y), HEIGHT - BOTTOM, TOP);
        let names = drawn.iter().map(|(series, _)| series.name.chars().count());
        let legend = 30.0 + LETTER * names.max().unwrap_or_default() as f64;
        let width = (WIDTH - RIGHT + legend).max(WIDTH).ceil();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{width}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
        );
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{}</text>",
            escaped(&self.title)
        );
        frame(&mut svg, &x, &y, base);
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (x.from + x.to) / 2.0,
            HEIGHT - 16.0,
            escaped(&self.x),
            (y.from + y.to) / 2.0,
            escaped(&self.y),
        );
        for (n, (series, points)) in drawn.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let at: Vec<(f64, f64)> = points.iter().map(|p| (x.at(p.x), y.at(p.y))).collect();
            if series.line {
                let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let _ = writeln!(
                    svg,
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                    path.join(" ")
                );
            }
            for (x, y) in at {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"
                );
            }
            let (left, top) = (WIDTH - RIGHT + 14.0, TOP + 14.0 + 20.0 * n as f64);
            let _ = writeln!(
                svg,
                "<circle cx=\"{left}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>\
                 <text x=\"{}\" y=\"{top:.1}\">{}</text>",
                top - 4.0,
                left + 10.0,
                escaped(&series.name)
            );
        }
        svg += "</svg>\n";
        Ok(Some(svg))
    }
}

/// Grid, frame and numbers.
fn frame(svg: &mut String, x: &Axis, y: &Axis, base: f64) {
    for tick in x.ticks(base) {
        let at = x.at(tick);
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" y1=\"{}\" x2=\"{at:.1}\" y2=\"{}\" stroke=\"#dddddd\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            y.to,
            y.from,
            y.from + 16.0,
            number(tick, base)
        );
    }
    for tick in y.ticks(10.0) {
        let at = y.at(tick);
        let _ = writeln!(
            svg,
            "<line x1=\"{}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            x.from,
            x.to,
            x.from - 6.0,
            at + 4.0,
            number(tick, 10.0)
        );
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{}\" y=\"{}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"none\" stroke=\"#555555\"/>",
        x.from,
        y.to,
        x.to - x.from,
        y.from - y.to
    );
}

/// `4K` for powers of two, the shortest decimal otherwise.
fn number(x: f64, base: f64) -> String {
    if base == 2.0 && x >= 1024.0 {
        format!("{}K", x / 1024.0)
    } else {
        // Sums of powers carry an error in the last place.
        let rounded: f64 = format!("{x:.6}").parse().unwrap_or(x);
        format!("{rounded}")
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)]) -> Chart {
        let points = points.iter().enumerate().map(|(n, &(x, y))| Point {
            x,
            y,
            name: format!("row-{n}"),
        });
        Chart {
            title: "a < b".into(),
            x: "N".into(),
            y: "ms".into(),
            series: vec![Series {
                name: "ours".into(),
                points: points.collect(),
                line: true,
            }],
        }
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert_eq!(chart(&[]).svg(2.0), Ok(None));
    }

    #[test]
    fn a_line_with_two_points_at_one_length_is_refused_and_both_are_named() {
        let mut mixed = chart(&[(16384.0, 4.04), (4096.0, 0.316), (16384.0, 2.6)]);
        assert_eq!(
            mixed.svg(2.0).unwrap_err(),
            "the plot `a < b`: the series `ours` has two points at 16384: row-0 (4.04) and row-2 (2.6)"
        );
        // Points that no line joins may lie above one another.
        mixed.series[0].line = false;
        assert!(mixed.svg(2.0).unwrap().is_some());
    }

    #[test]
    fn a_line_runs_from_left_to_right() {
        let ordered = chart(&[(1.0, 2.0), (2.0, 3.0), (4.0, 1.0)]).svg(2.0);
        assert_eq!(
            chart(&[(4.0, 1.0), (1.0, 2.0), (2.0, 3.0)]).svg(2.0),
            ordered
        );
    }

    #[test]
    fn a_decade_takes_the_same_length_everywhere() {
        let axis = Axis::new([1.0, 100.0].into_iter(), 0.0, 100.0);
        let decades = [axis.at(10.0) - axis.at(1.0), axis.at(100.0) - axis.at(10.0)];
        assert!((decades[0] - decades[1]).abs() < 1e-9);
        assert!(axis.at(1.0) > 0.0 && axis.at(100.0) < 100.0);
    }

    #[test]
    fn every_point_and_power_of_two_is_there() {
        let svg = chart(&[(4096.0, 0.3), (32768.0, 7.7)]);
        let svg = svg.svg(2.0).unwrap().unwrap();
        // Two points and the legend's.
        assert_eq!(svg.matches("<circle").count(), 3);
        for text in [">4K<", ">8K<", ">32K<", "a &lt; b", ">1<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }
}
