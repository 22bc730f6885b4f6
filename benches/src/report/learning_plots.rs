//! The plots of the rows of `recall`.

use super::chart::{Chart, Point, Series};
use super::files::json;
use super::learning::{ARMS, RecallRow, Setting, records};
use std::collections::BTreeMap;
use std::path::Path;

/// The plots of all files `recall*.json` in a folder, of each length that was trained on a GPU: name and SVG.
/// `FILE-LENGTH-curves` has what each arm answers along its run, and `FILE-LENGTH-windows`, where an arm has several
/// windows, what it answers with each.
///
/// # Errors
///
/// If a file is malformed, or has a run twice.
pub fn recall_plots(folder: &Path) -> Result<Vec<(String, String)>, String> {
    let mut plots = Vec::new();
    for file in records(folder, "recall")? {
        let mut lengths: BTreeMap<usize, Vec<RecallRow>> = BTreeMap::new();
        for row in json::<Vec<RecallRow>>(&file)? {
            if row.device == "cuda" {
                lengths.entry(row.tokens).or_default().push(row);
            }
        }
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        for (tokens, rows) in lengths {
            for (name, chart) in [("curves", curves(&rows)), ("windows", by_window(&rows))] {
                let svg = chart.map(|chart| chart.svg(2.0)).transpose();
                let svg = svg.map_err(|e| format!("{}: {e}", file.display()))?;
                plots.extend(
                    svg.flatten()
                        .map(|svg| (format!("{stem}-{tokens}-{name}"), svg)),
                );
            }
        }
    }
    Ok(plots)
}

/// The arms of these rows by their names, with the options that they differ in, those of the chapter first.
fn names(rows: &[&RecallRow]) -> Vec<String> {
    let mut names: Vec<(usize, String)> = Vec::new();
    for row in rows {
        let place = ARMS.iter().position(|(arm, _)| *arm == row.arm);
        let name = (place.unwrap_or(ARMS.len()), row.variant());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|&(place, _)| place);
    names.into_iter().map(|(_, name)| name).collect()
}

/// The rows of the setting that most rows have.
fn of_largest_setting(rows: &[RecallRow]) -> Vec<&RecallRow> {
    let mut settings: BTreeMap<Setting, Vec<&RecallRow>> = BTreeMap::new();
    for row in rows {
        settings.entry(row.setting()).or_default().push(row);
    }
    settings
        .into_values()
        .max_by_key(Vec::len)
        .unwrap_or_default()
}

/// What each arm answers along its run, of the lowest seed, with the rate that most arms have and the largest window.
fn curves(rows: &[RecallRow]) -> Option<Chart> {
    let rows = of_largest_setting(rows);
    let seed = rows.iter().map(|row| row.seed).min()?;
    let of_seed: Vec<&RecallRow> = rows.into_iter().filter(|row| row.seed == seed).collect();
    let arms = |rate: f64| names(&of_rate(&of_seed, rate)).len();
    // Of several such rates the lowest: the greatest is the last.
    let mut rates: Vec<f64> = of_seed.iter().map(|row| row.rate).collect();
    rates.sort_by(|a, b| b.total_cmp(a));
    let rate = rates.into_iter().max_by_key(|&rate| arms(rate))?;
    let of_rate = of_rate(&of_seed, rate);
    let series = names(&of_rate).into_iter().map(|name| {
        let runs = of_rate.iter().filter(|row| row.variant() == name);
        let run = runs.max_by_key(|row| row.window);
        let points = run
            .into_iter()
            .flat_map(|run| &run.curve)
            .map(|point| Point {
                x: point.step as f64,
                y: 100.0 * point.accuracy,
                name: format!("step {}", point.step),
            });
        Series {
            name,
            // The axes are logarithmic.
            points: points
                .filter(|point| point.x > 0.0 && point.y > 0.0)
                .collect(),
            line: true,
        }
    });
    let of = of_rate.first()?;
    Some(Chart {
        title: format!(
            "{} tokens, {} pairs, rate {rate}, seed {seed}",
            of.tokens, of.pairs
        ),
        x: "steps".into(),
        y: "questions answered, %".into(),
        series: series.collect(),
    })
}

fn of_rate<'a>(rows: &[&'a RecallRow], rate: f64) -> Vec<&'a RecallRow> {
    rows.iter()
        .copied()
        .filter(|row| row.rate == rate)
        .collect()
}

/// What each arm answers with each window, in the mean over seeds, with the rate that answered best; and the cap.
fn by_window(rows: &[RecallRow]) -> Option<Chart> {
    let rows = of_largest_setting(rows);
    let of = *rows.first()?;
    let windows = |name: &str| {
        let mut windows: Vec<usize> = (rows.iter())
            .filter(|row| row.variant() == name)
            .map(|row| row.window)
            .collect();
        windows.sort_unstable();
        windows.dedup();
        windows
    };
    let pruned: Vec<String> = names(&rows)
        .into_iter()
        .filter(|name| windows(name).len() > 1)
        .collect();
    let mut series: Vec<Series> = (pruned.iter())
        .map(|name| Series {
            name: name.clone(),
            points: windows(name)
                .into_iter()
                .filter_map(|window| {
                    let found = rows
                        .iter()
                        .filter(|row| row.variant() == *name && row.window == window);
                    let found: Vec<&RecallRow> = found.copied().collect();
                    let mean = |rate: f64| {
                        let of_rate = of_rate(&found, rate);
                        of_rate.iter().map(|row| row.accuracy).sum::<f64>() / of_rate.len() as f64
                    };
                    let best = found.iter().map(|row| mean(row.rate)).fold(0.0, f64::max);
                    let name = format!("{name}, window {window}");
                    let x = found.first()?.window_per_pair;
                    (best > 0.0).then_some(Point {
                        x,
                        y: 100.0 * best,
                        name,
                    })
                })
                .collect(),
            line: true,
        })
        .collect();
    if series.is_empty() {
        return None;
    }
    let mut caps: Vec<Point> = Vec::new();
    for row in rows.iter().filter(|row| pruned.contains(&row.variant())) {
        let x = row.window_per_pair;
        if caps.iter().all(|cap| cap.x != x) {
            let (y, name) = (100.0 * row.cap, format!("cap of window {}", row.window));
            caps.push(Point { x, y, name });
        }
    }
    series.push(Series {
        name: "cap of a layer".into(),
        points: caps,
        line: true,
    });
    Some(Chart {
        title: format!("{} tokens, {} pairs", of.tokens, of.pairs),
        x: "keys per head and pair".into(),
        y: "questions answered, %".into(),
        series,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(arm: &str, [window, seed]: [usize; 2], rate: f64, accuracy: f64) -> RecallRow {
        let (share, cap) = (window as f64 / 16.0, (window as f64 / 8.0).min(1.0));
        let text = format!(
            r#"{{"commit":"c","machine":"m","device":"cuda","arm":"{arm}","layout":"scattered","tokens":256,"pairs":16,
            "window":{window},"window_per_pair":{share},"cap":{cap},"width":32,"layers":1,"steps":600,"batch":16,
            "rate":{rate},"seed":{seed},"accuracy":{accuracy},"kept":1.0,"steps_done":300,"stopped":"flat",
            "seconds":20.0,"step_milliseconds":null,
            "curve":[{{"step":0,"accuracy":0.1}},{{"step":30,"accuracy":{accuracy}}}]}}"#
        );
        serde_json::from_str(&text).expect("a row")
    }

    #[test]
    fn curves_are_of_one_seed_and_of_the_rate_of_most_arms() {
        let rows = [
            row("frozen", [32, 4], 0.002, 0.5),
            row("ours", [32, 4], 0.002, 0.75),
            row("ours", [32, 4], 0.001, 1.0),
            row("ours", [32, 5], 0.002, 1.0),
            row("ours", [8, 4], 0.002, 0.25),
        ];
        let chart = curves(&rows).expect("there are rows");
        assert_eq!(chart.title, "256 tokens, 16 pairs, rate 0.002, seed 4");
        let ends: Vec<(&str, f64)> = (chart.series.iter())
            .map(|series| (&series.name[..], series.points.last().expect("a point").y))
            .collect();
        assert_eq!(ends, [("ours", 75.0), ("frozen", 50.0)]);
        // The beginning has no place on a logarithmic axis.
        assert!(chart.series.iter().all(|series| series.points.len() == 1));
    }

    #[test]
    fn windows_are_means_over_seeds_of_the_best_rate_beside_the_cap() {
        let mut rows = vec![
            row("dense", [256, 0], 0.002, 1.0),
            row("ours", [32, 0], 0.002, 1.0),
            row("ours", [32, 0], 0.001, 0.25),
        ];
        assert!(by_window(&rows).is_none(), "no arm has two windows");
        rows.extend([
            row("ours", [4, 0], 0.002, 0.25),
            row("ours", [4, 1], 0.002, 0.75),
        ]);
        let chart = by_window(&rows).expect("an arm has two windows");
        let of = |name: &str| {
            let series = chart.series.iter().find(|series| series.name == name);
            let mut points: Vec<[f64; 2]> = (series.expect("the name").points.iter())
                .map(|point| [point.x, point.y])
                .collect();
            points.sort_by(|a, b| a[0].total_cmp(&b[0]));
            points
        };
        assert_eq!(chart.series.len(), 2);
        assert_eq!(of("ours"), [[0.25, 50.0], [2.0, 100.0]]);
        assert_eq!(of("cap of a layer"), [[0.25, 50.0], [2.0, 100.0]]);
        assert!(chart.svg(2.0).expect("no point twice").is_some());
    }
}
