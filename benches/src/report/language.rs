//! What language models with each kind of selection lose: the rows of the example `language`.

use super::learning::{by_setting, percent, sources, tables};
use super::markdown::distinct;
use super::options::{LeaveOneOut, Narrowing, RankSoftmax, RoundRobin};
use super::steps::mean;
use serde::Deserialize;
use std::fmt::{self, Write};
use std::path::Path;

/// What a table needs of a row of `language`.
#[derive(Clone, Debug, Deserialize)]
struct Run {
    commit: String,
    machine: String,
    task: String,
    arm: String,
    tokens: usize,
    window: Option<usize>,
    /// The last keys, where they are not a quarter of the window.
    recent: Option<usize>,
    #[serde(default)]
    recency_slope: Option<f64>,
    #[serde(default)]
    token_gradient_scale: Option<f64>,
    #[serde(default)]
    runners_up: Option<usize>,
    #[serde(default)]
    narrowing: Narrowing,
    round_robin: Option<RoundRobin>,
    leave_one_out: Option<LeaveOneOut>,
    rank_softmax: Option<RankSoftmax>,
    /// Layers that attended to all keys.
    #[serde(default)]
    dense_layers: Vec<usize>,
    /// Whether the softmax had a logit without a key.
    #[serde(default)]
    sink: bool,
    width: usize,
    layers: usize,
    kv_heads: usize,
    parameters: usize,
    steps: usize,
    batch: usize,
    rate: f64,
    seed: u64,
    corpus: String,
    positions: Positions,
    texts: usize,
    step_milliseconds: Option<f64>,
    #[serde(default)]
    losses: Vec<Losses>,
    answers: Option<Answers>,
}

/// How the layers know where a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Positions {
    Rope,
    RopeInLocalLayers { window: usize },
}

impl fmt::Display for Positions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rotary encoding in every ")?;
        match self {
            Self::Rope => f.write_str("layer"),
            Self::RopeInLocalLayers { window } => {
                write!(f, "other layer, which attends to the last {window} bytes")
            }
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
struct Losses {
    length: usize,
    loss: f64,
    bins: Vec<Bin>,
    windows: Vec<f64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Bin {
    from: usize,
    to: usize,
    loss: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Answers {
    answered: Vec<Answered>,
    caches: Vec<Caches>,
}

/// The share of right answers to texts of one length, kind and depth.
#[derive(Clone, Debug, Deserialize)]
struct Answered {
    length: usize,
    kind: String,
    depth: f64,
    right: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Caches {
    length: usize,
    bytes: usize,
}

/// What is one table: all that decides the outcome, but the arm and the seed.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Setting {
    task: String,
    tokens: usize,
    width: usize,
    layers: usize,
    kv_heads: usize,
    steps: usize,
    batch: usize,
    texts: usize,
    /// As written.
    rate: String,
    positions: Positions,
    sink: bool,
    corpus: String,
}

impl Run {
    fn setting(&self) -> Setting {
        Setting {
            task: self.task.clone(),
            tokens: self.tokens,
            width: self.width,
            layers: self.layers,
            kv_heads: self.kv_heads,
            steps: self.steps,
            batch: self.batch,
            texts: self.texts,
            rate: self.rate.to_string(),
            positions: self.positions,
            sink: self.sink,
            corpus: self.corpus.clone(),
        }
    }

    /// The arm, and what it has that the arm by itself has not.
    fn variant(&self) -> String {
        let mut text = self.arm.clone();
        if let Some(recent) = self.recent {
            let _ = write!(text, ", {recent} recent");
        }
        if let Some(slope) = self.recency_slope {
            let _ = write!(text, ", recency {slope}");
        }
        if let Some(scale) = self.token_gradient_scale {
            let _ = write!(text, ", token gradient × {scale}");
        }
        if let Some(runners_up) = self.runners_up {
            let _ = write!(text, ", {runners_up} runners-up");
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
        if !self.dense_layers.is_empty() {
            let numbers: Vec<String> = self.dense_layers.iter().map(usize::to_string).collect();
            let _ = write!(text, ", dense in layer {}", numbers.join(" and "));
        }
        let _ = write!(text, "{}", self.narrowing);
        text
    }

    /// The variant, and its window if other runs have it with another one.
    fn label(&self, runs: &[&Self]) -> String {
        let variant = self.variant();
        let other = |run: &&Self| run.window != self.window && run.variant() == variant;
        match runs.iter().any(other) {
            true => format!("{variant}, {} keys", self.keys()),
            false => variant,
        }
    }

    fn keys(&self) -> String {
        self.window
            .map_or("all".into(), |window| window.to_string())
    }

    fn step(&self) -> String {
        self.step_milliseconds
            .map_or("–".into(), |ms| format!("{ms:.1}"))
    }
}

/// The tables of all files `language*.json` in a folder, none if there are none. A line is a run.
///
/// # Errors
///
/// The name of a file that is malformed.
pub fn language_tables(folder: &Path) -> Result<String, String> {
    tables(folder, "language", of_file)
}

fn of_file(name: &str, rows: &[Run]) -> String {
    let mut text = String::new();
    for (setting, runs) in by_setting(rows, Run::setting) {
        let (title, tables) = match &setting.task[..] {
            "text" => ("Running text", [losses(&runs), by_position(&runs)]),
            _ => ("Facts in running text", [answers(&runs), by_depth(&runs)]),
        };
        let Setting {
            tokens,
            width,
            layers,
            kv_heads,
            steps,
            batch,
            rate,
            positions,
            sink,
            corpus,
            ..
        } = setting;
        let sink = if sink { "; a sink in every layer" } else { "" };
        let _ = writeln!(
            text,
            "#### {title}, {tokens} bytes (`{name}`)\n\nWidth {width}, layers: {layers}, key/value heads: {kv_heads}, {:.1} million parameters; {steps} \
             steps of {batch} texts, peak rate {rate}; {positions}{sink}; corpus {corpus}.\n",
            runs[0].parameters as f64 / 1e6
        );
        text += &tables.join("\n");
        text += &sources(runs.iter().map(|run| (&run.machine[..], &run.commit[..])));
    }
    text
}

/// The head of a table whose columns after the first four are these.
fn head(columns: impl Iterator<Item = String>) -> String {
    let columns: Vec<String> = columns.collect();
    let names: String = columns
        .iter()
        .map(|column| format!(" {column} |"))
        .collect();
    let lines = "---|".repeat(4 + columns.len());
    format!("| arm | w | seed | ms a step |{names}\n|{lines}\n")
}

fn begin(run: &Run) -> String {
    format!(
        "| {} | {} | {} | {} |",
        run.variant(),
        run.keys(),
        run.seed,
        run.step()
    )
}

/// The loss at every length, and its difference to dense of the same seed.
fn losses(runs: &[&Run]) -> String {
    let mut text = head(runs[0].losses.iter().flat_map(|losses| {
        let length = losses.length;
        [format!("loss at {length}"), format!("to dense at {length}")]
    }));
    for run in runs {
        text += &begin(run);
        let dense = runs
            .iter()
            .find(|other| other.arm == "dense" && other.seed == run.seed);
        for (at, losses) in run.losses.iter().enumerate() {
            let dense = dense.and_then(|dense| dense.losses.get(at));
            let difference = match dense.filter(|_| run.arm != "dense") {
                Some(dense) => difference(&losses.windows, &dense.windows),
                None => "–".into(),
            };
            let _ = write!(text, " {:.4} | {difference} |", losses.loss);
        }
        text.push('\n');
    }
    text
}

/// The mean difference of paired windows in per cent of the others' mean, with half of its 95 % interval by the normal
/// distribution.
fn difference(windows: &[f64], others: &[f64]) -> String {
    let count = windows.len() as f64;
    if windows.len() != others.len() || windows.len() < 2 {
        return "–".into();
    }
    let each = || windows.iter().zip(others).map(|(a, b)| a - b);
    let mean = each().sum::<f64>() / count;
    let variance = each().map(|d| (d - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let to_percent = 100.0 * count / others.iter().sum::<f64>();
    let half = 1.96 * (variance / count).sqrt();
    format!("{:+.2} ± {:.2} %", mean * to_percent, half * to_percent)
}

/// The loss by position at every length, in the mean over the seeds of an arm.
fn by_position(runs: &[&Run]) -> String {
    let arms = arms(runs);
    let mut text = format!(
        "| length | positions |{}\n",
        arms.iter()
            .map(|arm| format!(" {arm} |"))
            .collect::<String>()
    );
    let _ = writeln!(text, "|---|---|{}", "---|".repeat(arms.len()));
    for (at, losses) in runs[0].losses.iter().enumerate() {
        for (bin, Bin { from, to, .. }) in losses.bins.iter().enumerate() {
            let _ = write!(text, "| {} | {from} to {to} |", losses.length);
            for arm in &arms {
                let of_arm = runs.iter().filter(|run| run.label(runs) == *arm);
                let found = of_arm.filter_map(|run| Some(run.losses.get(at)?.bins.get(bin)?.loss));
                let _ = write!(
                    text,
                    " {} |",
                    mean(found).map_or("–".into(), |mean| format!("{mean:.4}"))
                );
            }
            text.push('\n');
        }
    }
    text
}

/// The pass keys and the needles found at every length, over all depths.
fn answers(runs: &[&Run]) -> String {
    let lengths = lengths(runs);
    let longest = lengths.last().copied().unwrap_or_default();
    let columns = lengths
        .iter()
        .map(|length| format!("at {length}: pass keys, needles"));
    let mut text = head(columns.chain([format!("cache at {longest}")]));
    for run in runs {
        text += &begin(run);
        let Some(Answers { answered, caches }) = &run.answers else {
            continue;
        };
        for &length in &lengths {
            let right = |kind: &str| {
                let of = |a: &&Answered| a.length == length && a.kind == kind;
                percent(mean(answered.iter().filter(of).map(|a| a.right)))
            };
            let _ = write!(text, " {}, {} |", right("passkey"), right("needle"));
        }
        let cache = caches.iter().find(|cache| cache.length == longest);
        let bytes = cache.map_or("–".into(), |cache| {
            format!("{:.2} MiB", cache.bytes as f64 / (1 << 20) as f64)
        });
        let _ = writeln!(text, " {bytes} |");
    }
    text
}

/// The needles found by the depth of their fact, in the mean over the seeds of an arm.
fn by_depth(runs: &[&Run]) -> String {
    let Some(Answers { answered, .. }) = &runs[0].answers else {
        return String::new();
    };
    let mut depths: Vec<f64> = answered.iter().map(|a| a.depth).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let names: String = depths.iter().map(|depth| format!(" {depth} |")).collect();
    let mut text = format!(
        "| needles at depth | arm |{names}\n|---|---|{}\n",
        "---|".repeat(depths.len())
    );
    for length in lengths(runs) {
        for arm in arms(runs) {
            let _ = write!(text, "| {length} | {arm} |");
            for &depth in &depths {
                let of_arm = runs.iter().filter(|run| run.label(runs) == arm);
                let all = of_arm
                    .filter_map(|run| run.answers.as_ref())
                    .flat_map(|a| &a.answered);
                let of =
                    |a: &&Answered| a.length == length && a.depth == depth && a.kind == "needle";
                let _ = write!(
                    text,
                    " {} |",
                    percent(mean(all.filter(of).map(|a| a.right)))
                );
            }
            text.push('\n');
        }
    }
    text
}

/// The arms in the order in which the rows first have them.
fn arms(runs: &[&Run]) -> Vec<String> {
    distinct(runs.iter().map(|run| run.label(runs)))
}

fn lengths(runs: &[&Run]) -> Vec<usize> {
    let caches = runs[0].answers.iter().flat_map(|answers| &answers.caches);
    caches.map(|cache| cache.length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(each: &[(&str, u64, &str)]) -> Vec<Run> {
        let row = |&(arm, seed, outcome): &(&str, u64, &str)| {
            let task = if outcome.contains("answers") {
                "needles"
            } else {
                "text"
            };
            let window = if arm == "dense" { "null" } else { "16" };
            let text = format!(
                r#"{{"commit":"c","machine":"m","task":"{task}","arm":"{arm}","tokens":128,"window":{window},"width":64,
                "layers":2,"kv_heads":2,"parameters":1250000,"steps":150,"batch":8,"rate":0.003,"seed":{seed},"corpus":"own","positions":"rope","texts":4,
                "step_milliseconds":20.04,{outcome}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        each.iter().map(row).collect()
    }

    #[test]
    fn a_run_is_compared_with_dense_of_its_seed() {
        let losses = |first: f64, second: f64| {
            let loss = (first + second) / 2.0;
            format!(
                r#""losses":[{{"length":128,"loss":{loss},"bins":[{{"from":0,"to":64,"loss":{first}}},
                {{"from":64,"to":128,"loss":{second}}}],"windows":[{first},{second}]}}]"#
            )
        };
        let (dense, ours, other) = (losses(1.0, 3.0), losses(1.02, 3.02), losses(1.0, 3.2));
        let rows = rows(&[
            ("dense", 0, &dense),
            ("ours", 0, &ours),
            ("ours", 1, &other),
        ]);
        let text = of_file("language.json", &rows);
        for line in [
            "#### Running text, 128 bytes (`language.json`)",
            "| arm | w | seed | ms a step | loss at 128 | to dense at 128 |",
            "| dense | all | 0 | 20.0 | 2.0000 | – |",
            "| ours | 16 | 0 | 20.0 | 2.0200 | +1.00 ± 0.00 % |",
            "| ours | 16 | 1 | 20.0 | 2.1000 | – |",
            "| 128 | 0 to 64 | 1.0000 | 1.0100 |",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let mut wider = rows.clone();
        wider[2].window = Some(32);
        let text = of_file("language.json", &wider);
        let columns = "| length | positions | dense | ours, 16 keys | ours, 32 keys |";
        assert!(text.lines().any(|l| l == columns), "{text}");
        let mut beside_sinks = rows;
        beside_sinks[1].sink = true;
        let text = of_file("language.json", &beside_sinks);
        assert!(text.contains("; a sink in every layer; corpus"), "{text}");
        // Dense without a sink is no measure of it.
        assert!(
            text.contains("| ours | 16 | 0 | 20.0 | 2.0200 | – |"),
            "{text}"
        );
        assert_eq!(difference(&[1.0, 3.0], &[1.0, 1.0]), "+100.00 ± 196.00 %");
    }

    #[test]
    fn what_is_found_is_told_by_length_and_by_depth() {
        let answers = |passkey: f64, needle: f64| {
            let at = |kind: &str, depth: f64, right: f64| {
                format!(
                    r#"{{"length":256,"kind":"{kind}","depth":{depth},"right":{right},"digits":1.0}}"#
                )
            };
            let all = [
                at("passkey", 0.1, passkey),
                at("passkey", 0.9, 1.0),
                at("needle", 0.1, needle),
                at("needle", 0.9, 1.0),
            ];
            format!(
                r#""answers":{{"answered":[{}],"caches":[{{"length":256,"bytes":1572864,"reserved":1}}]}}"#,
                all.join(",")
            )
        };
        let (first, second) = (answers(0.5, 0.0), answers(1.0, 0.5));
        let text = of_file(
            "language.json",
            &rows(&[("ours", 0, &first), ("ours", 1, &second)]),
        );
        for line in [
            "#### Facts in running text, 128 bytes (`language.json`)",
            "| arm | w | seed | ms a step | at 256: pass keys, needles | cache at 256 |",
            "| ours | 16 | 0 | 20.0 | 75.0 %, 50.0 % | 1.50 MiB |",
            "| needles at depth | arm | 0.1 | 0.9 |",
            "| 256 | ours | 25.0 % | 100.0 % |",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }
}
