//! What models with each kind of selection learn: the rows of the example `recall`.

use super::files::json;
use super::options::{LeaveOneOut, Narrowing, RankSoftmax, RoundRobin};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What a table needs of a row of `recall`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RecallRow {
    commit: String,
    machine: String,
    pub(super) device: String,
    pub(super) arm: String,
    layout: String,
    pub(super) tokens: usize,
    pub(super) pairs: usize,
    pub(super) window: usize,
    #[serde(default)]
    narrowing: Narrowing,
    round_robin: Option<RoundRobin>,
    leave_one_out: Option<LeaveOneOut>,
    rank_softmax: Option<RankSoftmax>,
    /// The share of the steps in which texts were shorter.
    #[serde(default)]
    lengthening: f64,
    /// Whether every other step had a window of half of the text.
    #[serde(default)]
    every_other_wide: bool,
    /// Whether the softmax had a logit without a key.
    #[serde(default)]
    sink: bool,
    /// Where it is not the arm's own number.
    runners_up: Option<usize>,
    /// Where it is not 1.
    token_gradient_scale: Option<f64>,
    pub(super) window_per_pair: f64,
    pub(super) cap: f64,
    width: usize,
    layers: usize,
    steps: usize,
    batch: usize,
    pub(super) rate: f64,
    pub(super) seed: u64,
    pub(super) accuracy: f64,
    kept: f64,
    #[serde(default)]
    by_layer: Vec<Layer>,
    steps_done: usize,
    /// `solved`, `flat`, or `steps` where the most that it might take are over.
    stopped: String,
    seconds: f64,
    step_milliseconds: Option<f64>,
    pub(super) curve: Vec<CurvePoint>,
}

/// What the heads of a layer hold. Rows from before 2026-11-25 have only the first number.
#[derive(Clone, Debug, Deserialize)]
struct Layer {
    kept: f64,
    kept_twice: Option<f64>,
    open_facts: Option<f64>,
    asked_facts: Option<f64>,
}

/// What a plot needs of a place on a run's curve.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct CurvePoint {
    pub(super) step: usize,
    pub(super) accuracy: f64,
}

/// What is one table: everything but the arm, its rate, its window and the seed.
pub(super) type Setting = (String, usize, usize, [usize; 4]);

impl RecallRow {
    pub(super) fn setting(&self) -> Setting {
        let sizes = [self.width, self.layers, self.batch, self.steps];
        (self.layout.clone(), self.tokens, self.pairs, sizes)
    }

    /// The arm, and what it has that the arm by itself has not.
    pub(super) fn variant(&self) -> String {
        let mut text = self.arm.clone();
        if let Some(runners_up) = self.runners_up {
            let _ = write!(text, ", {runners_up} runners-up");
        }
        if let Some(scale) = self.token_gradient_scale {
            let _ = write!(text, ", token gradient × {scale}");
        }
        if let Some(dealt) = self.round_robin {
            let _ = write!(text, "{dealt}");
        }
        if let Some(LeaveOneOut { besides }) = self.leave_one_out {
            let _ = write!(text, ", leave one out {besides}");
        }
        if let Some(softmax) = self.rank_softmax {
            let _ = write!(text, ", rank softmax {}", softmax.inverse_temperature);
        }
        let _ = write!(text, "{}", self.narrowing);
        if self.lengthening > 0.0 {
            let _ = write!(text, ", lengthening {}", self.lengthening);
        }
        for (has, what) in [
            (self.every_other_wide, ", every other step wide"),
            (self.sink, ", a sink"),
        ] {
            text += if has { what } else { "" };
        }
        text
    }
}

/// The tables of all files `recall*.json` in a folder, none if there are none. A line is an arm with its window and its
/// rate, over all seeds: the mean, and the range from the worst to the best seed.
///
/// # Errors
///
/// The name of a file that is malformed.
pub fn recall_tables(folder: &Path) -> Result<String, String> {
    tables(folder, "recall", of_file)
}

/// The text that `of_file` makes of the name and the rows of each file of [`records`].
///
/// # Errors
///
/// The name of a file that is malformed.
pub(super) fn tables<Row: DeserializeOwned>(
    folder: &Path,
    name: &str,
    of_file: fn(&str, &[Row]) -> String,
) -> Result<String, String> {
    let text = |file: PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        Ok(of_file(&name, &json::<Vec<Row>>(&file)?))
    };
    records(folder, name)?.into_iter().map(text).collect()
}

/// Rows by their setting, in its order, those of one in theirs.
pub(super) fn by_setting<Row, Key: Ord>(
    rows: &[Row],
    setting: fn(&Row) -> Key,
) -> BTreeMap<Key, Vec<&Row>> {
    let mut settings: BTreeMap<Key, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        settings.entry(setting(row)).or_default().push(row);
    }
    settings
}

/// The files of a folder whose names are `name`, anything, and `.json`, in order.
pub(super) fn records(folder: &Path, name: &str) -> Result<Vec<PathBuf>, String> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .map_err(|e| format!("cannot read {}: {e}", folder.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            file.starts_with(name) && file.ends_with(".json")
        })
        .collect();
    files.sort();
    Ok(files)
}

/// What the arms of one setting and seed answer at each rate, as the chapter words them.
///
/// # Errors
///
/// If the file is missing or malformed, or has a rate of an arm twice.
pub fn recall_by_rate(file: &Path) -> Result<String, String> {
    by_rate(&json::<Vec<RecallRow>>(file)?).map_err(|e| format!("{}: {e}", file.display()))
}

/// The arms in the order of the chapter, and as it words them; others come behind by their names.
pub(super) const ARMS: [(&str, &str); 7] = [
    ("dense", "dense"),
    ("ours", "**ours, scores that only rank**"),
    ("added", "… that are added to the logits as well (`added`)"),
    (
        "bounded",
        "… within bounds: `4 tanh(z / 4)` is added (`bounded`)",
    ),
    (
        "added-zoh",
        "the paper's form, added, with runners-up (`added-zoh`)",
    ),
    ("frozen", "frozen at random, not added"),
    (
        "added-no-runners-up",
        "linear, added, without runners-up (`added-no-runners-up`)",
    ),
];

fn by_rate(rows: &[RecallRow]) -> Result<String, String> {
    let mut rates: Vec<f64> = rows.iter().map(|row| row.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let mut arms: Vec<(&str, &str)> = Vec::new();
    let measured = |(arm, _): &(&str, &str)| rows.iter().any(|row| row.arm == *arm);
    arms.extend(ARMS.into_iter().filter(measured));
    for row in rows {
        if arms.iter().all(|(arm, _)| *arm != row.arm) {
            arms.push((&row.arm, &row.arm));
        }
    }
    let named = rates.iter().map(|rate| format!(" rate {rate} |"));
    let mut text = format!("| arm |{}\n", named.collect::<String>());
    let _ = writeln!(text, "|---|{}", "---|".repeat(rates.len()));
    for (arm, worded) in arms {
        let _ = write!(text, "| {worded} |");
        for &rate in &rates {
            let is = |row: &&RecallRow| row.arm == arm && row.rate == rate;
            let found: Vec<&RecallRow> = rows.iter().filter(is).collect();
            let _ = match found[..] {
                [] => write!(text, " – |"),
                [row] => {
                    let (answered, steps, stopped) =
                        (100.0 * row.accuracy, row.steps_done, &row.stopped);
                    let ended = match &stopped[..] {
                        "steps" => "",
                        "flat" => ", flat",
                        _ => ", solved",
                    };
                    write!(text, " {answered:.1} %, {steps} steps{ended} |")
                }
                _ => return Err(format!("rate {rate} of {arm} twice")),
            };
        }
        text.push('\n');
    }
    Ok(text)
}

fn of_file(name: &str, rows: &[RecallRow]) -> String {
    let mut text = String::new();
    let settings = by_setting(rows, RecallRow::setting);
    for ((layout, tokens, pairs, [width, layers, batch, steps]), rows) in settings {
        let _ = writeln!(
            text,
            "#### {tokens} tokens, {pairs} pairs, {layout} (`{name}`)\n\nWidth {width}, layers: {layers}; at most \
             {steps} steps of {batch} texts.\n"
        );
        text += &table(&rows);
        text += &places(&rows);
        text += &sources(rows.iter().map(|row| (&row.machine[..], &row.commit[..])));
    }
    text
}

/// The line below a table: every machine and every commit of its rows.
pub(super) fn sources<'a>(rows: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let (machines, commits): (BTreeSet<&str>, BTreeSet<&str>) = rows.unzip();
    let joined = |all: BTreeSet<&str>| Vec::from_iter(all).join(", ");
    format!("\n{}; commit {}.\n\n", joined(machines), joined(commits))
}

pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or("–".into(), |share| format!("{:.1} %", 100.0 * share))
}

/// The lines in the order in which the rows first have them.
fn table(rows: &[&RecallRow]) -> String {
    let mut lines: Vec<Vec<&RecallRow>> = Vec::new();
    for row in rows {
        let same = |line: &&mut Vec<&RecallRow>| {
            let first = line[0];
            let of = |row: &RecallRow| (row.variant(), row.window);
            of(first) == of(row) && first.rate == row.rate
        };
        match lines.iter_mut().find(same) {
            Some(line) => line.push(row),
            None => lines.push(vec![row]),
        }
    }
    let answered =
        |line: &[&RecallRow]| line.iter().map(|row| row.accuracy).sum::<f64>() / line.len() as f64;
    // Of its rates, the one that answered best.
    let dense = lines.iter().filter(|line| line[0].arm == "dense");
    let dense = dense.map(|line| answered(line)).fold(0.0, f64::max);
    let mut text = "| arm | w | w per pair | cap | rate | seeds | answered | of dense | worst to best | facts kept | \
                    steps | seconds a run | ms a step |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for line in lines {
        let first = line[0];
        let mean = |number: fn(&RecallRow) -> f64| {
            line.iter().map(|row| number(row)).sum::<f64>() / line.len() as f64
        };
        let all = line.iter().map(|row| row.accuracy);
        let (worst, best) = all.fold((f64::MAX, f64::MIN), |(worst, best), accuracy| {
            (worst.min(accuracy), best.max(accuracy))
        });
        let times: Option<Vec<f64>> = line.iter().map(|row| row.step_milliseconds).collect();
        let time = times.map_or("–".into(), |times| {
            format!("{:.1}", times.iter().sum::<f64>() / times.len() as f64)
        });
        // Dense attention that answers less than this has learned nothing to compare with.
        let of_dense = match dense > 0.05 {
            true => format!("{:.3}", answered(&line) / dense),
            false => "–".into(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {} | {} | {:.3} | {of_dense} | {worst:.3}–{best:.3} | {:.3} | {:.0} | {:.0} | {time} |",
            first.variant(),
            first.window,
            first.window_per_pair,
            first.cap,
            first.rate,
            line.len(),
            answered(&line),
            mean(|row| row.kept),
            mean(|row| row.steps_done as f64),
            mean(|row| row.seconds),
        );
    }
    text
}

/// What the heads of each layer hold when questions are asked, a line per run and layer; nothing if no row says it.
fn places(rows: &[&RecallRow]) -> String {
    let mut lines = String::new();
    for row in rows {
        for (index, layer) in row.by_layer.iter().enumerate() {
            if layer.kept_twice.is_none() {
                continue;
            }
            let facts = layer.open_facts.zip(layer.asked_facts);
            let _ = writeln!(
                lines,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                row.variant(),
                row.window,
                row.seed,
                index + 1,
                percent(Some(layer.kept)),
                percent(layer.kept_twice),
                percent(layer.open_facts),
                percent(layer.asked_facts),
                percent(facts.map(|(open, asked)| 1.0 - open - asked)),
            );
        }
    }
    match lines.is_empty() {
        true => lines,
        false => format!(
            "\n| arm | w | seed | layer | facts kept | by several heads | keys held: facts to be asked for | facts \
             asked for | others |\n|---|---|---|---|---|---|---|---|---|\n{lines}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_one_line_and_lengths_are_tables() {
        let row = |arm: &str, tokens: usize, accuracy: f64| {
            format!(
                r#"{{"commit":"c","machine":"m","device":"cuda","arm":"{arm}","layout":"scattered","tokens":{tokens},"pairs":4,
                "window":8,"window_per_pair":2.0,"cap":1.0,"width":32,"layers":1,"steps":600,"batch":16,"rate":0.002,"seed":0,"curve":[],
                "accuracy":{accuracy},"kept":1.0,"steps_done":300,"stopped":"flat","seconds":20.0,"step_milliseconds":null}}"#
            )
        };
        let rows = [
            row("ours", 64, 1.0),
            row("ours", 64, 0.5),
            row("frozen", 64, 0.25),
            row("ours", 128, 1.0),
        ];
        let rows: Vec<RecallRow> = serde_json::from_str(&format!("[{}]", rows.join(","))).unwrap();
        let text = of_file("recall.json", &rows);
        assert_eq!(text.matches("#### ").count(), 2);
        let line =
            "| ours | 8 | 2 | 1.00 | 0.002 | 2 | 0.750 | – | 0.500–1.000 | 1.000 | 300 | 20 | – |";
        assert!(text.contains(line), "{text}");
        assert_eq!(text.matches("| frozen |").count(), 1);

        let mut varied = rows[..2].to_vec();
        varied[1].runners_up = Some(4);
        varied[1].narrowing = Narrowing::Halving(0.5);
        let text = of_file("recall.json", &varied);
        assert!(
            text.contains("| ours | 8 | 2 | 1.00 | 0.002 | 1 |"),
            "{text}"
        );
        assert!(
            text.contains("| ours, 4 runners-up, narrowing 0.5 | 8 |"),
            "{text}"
        );
        let mut wide = varied[1].clone();
        (wide.every_other_wide, wide.sink) = (true, true);
        wide.lengthening = 0.25;
        assert_eq!(
            wide.variant(),
            "ours, 4 runners-up, narrowing 0.5, lengthening 0.25, every other step wide, a sink"
        );

        assert!(!text.contains("by several heads"), "{text}");
        let layer = |kept_twice| Layer {
            kept: 0.75,
            kept_twice,
            open_facts: Some(0.5),
            asked_facts: Some(0.125),
        };
        varied[1].by_layer = vec![layer(None), layer(Some(0.25))];
        let text = of_file("recall.json", &varied);
        let lines = "others |\n|---|---|---|---|---|---|---|---|---|\n| ours, 4 runners-up, narrowing 0.5 | 8 | 0 | 2 | \
                     75.0 % | 25.0 % | 50.0 % | 12.5 % | 37.5 % |\n\nm; commit c.";
        assert!(text.contains(lines), "{text}");

        let mut of_one_seed = rows[1..3].to_vec();
        of_one_seed.insert(0, of_one_seed[1].clone());
        of_one_seed[0].arm = "other".into();
        of_one_seed[2].rate = 0.001;
        let rates = by_rate(&of_one_seed).unwrap();
        let expected = "\
| arm | rate 0.001 | rate 0.002 |
|---|---|---|
| **ours, scores that only rank** | – | 50.0 %, 300 steps, flat |
| frozen at random, not added | 25.0 %, 300 steps, flat | – |
| other | – | 25.0 %, 300 steps, flat |
";
        assert_eq!(rates, expected);
        assert!(by_rate(&rows[..2]).unwrap_err().ends_with("ours twice"));
    }
}
