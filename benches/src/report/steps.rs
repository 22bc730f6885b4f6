//! The rows of `step.json`: which run stands for a setting.

use super::files::text;
use crate::stats::Millis;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The model of the tables; rows of another are not theirs.
const MODEL: (&str, usize, usize) = ("model", 8, 1024);

#[derive(Deserialize)]
struct StepFile {
    device: String,
    told: Option<Told>,
    rows: Vec<StepRow>,
}

/// Figures of the log that have no rows.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Told {
    pub(super) before: Before,
    pub(super) autotune: Autotune,
}

/// The step before this crate had norms and products of its own.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Before {
    pub(super) commit: String,
    pub(super) step_ms: f64,
    pub(super) norms_ms: f64,
    pub(super) products_ms: f64,
}

/// What the rows with autotune are read beside.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Autotune {
    pub(super) first_step_from_empty_s: f64,
    pub(super) beside: String,
    pub(super) without_ms: f64,
    pub(super) without_commit: String,
}

/// What the tables need of a row.
#[derive(Deserialize)]
pub(super) struct StepRow {
    /// Only ours name it.
    pub(super) commit: Option<String>,
    run: usize,
    pub(super) implementation: String,
    what: String,
    layers: usize,
    d_model: usize,
    seq: usize,
    batch: usize,
    window: Option<usize>,
    checkpoint: bool,
    #[serde(default)]
    autotune: bool,
    pub(super) parameters: u64,
    pub(super) first_step_ms: Option<f64>,
    /// Whether the first step had to compile everything.
    #[serde(default)]
    pub(super) empty_cache: bool,
    pub(super) step_ms: Millis,
    peak_bytes: u64,
    pub(super) profile: Option<Profile>,
}

/// The kernels of one step.
#[derive(Deserialize)]
pub(super) struct Profile {
    pub(super) launches: usize,
    pub(super) kinds: BTreeMap<String, Kind>,
}

/// The kernels of one kind.
#[derive(Deserialize)]
pub(super) struct Kind {
    pub(super) ms: f64,
}

/// Whose step it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Ours,
    Compiled,
    Eager,
}

/// One size of the work: what a line of a table is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Setting {
    pub(super) tokens: usize,
    pub(super) batch: usize,
    /// Dense attention comes behind every window.
    pub(super) dense: bool,
    pub(super) window: Option<usize>,
    pub(super) checkpoint: bool,
}

impl Setting {
    /// Tokens of a sequence.
    pub(super) fn seq(self) -> usize {
        self.tokens / self.batch
    }

    /// Whether it is the step that the peers' is compared with first.
    pub(super) fn is_plain(self) -> bool {
        !self.dense && !self.checkpoint
    }
}

impl StepRow {
    fn whose(&self) -> Option<Whose> {
        match &self.implementation[..] {
            "burn" => Some(Whose::Ours),
            name if name.ends_with(" compiled") => Some(Whose::Compiled),
            name if name.ends_with(" eager") => Some(Whose::Eager),
            _ => None,
        }
    }

    pub(super) fn setting(&self) -> Setting {
        Setting {
            tokens: self.seq * self.batch,
            batch: self.batch,
            dense: self.window.is_none(),
            window: self.window,
            checkpoint: self.checkpoint,
        }
    }

    fn is_of_the_model(&self) -> bool {
        (&self.what[..], self.layers, self.d_model) == MODEL
    }
}

/// What one run says of a setting.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) setting: Setting,
    /// The run.
    pub(super) at: usize,
    pub(super) ours: f64,
    pub(super) compiled: Option<f64>,
    pub(super) eager: Option<f64>,
}

/// All runs, from first to last.
pub struct Steps {
    pub(super) device: String,
    /// The commit of ours, and the rows beside one another.
    sessions: Vec<(String, Vec<StepRow>)>,
    /// Rows of builds with autotune, which no table has.
    pub(super) tuned: Vec<StepRow>,
    pub(super) told: Option<Told>,
}

impl Steps {
    /// Reads `step.json`.
    ///
    /// # Errors
    ///
    /// If it is missing or malformed.
    pub fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&text(path)?).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// A run is the rows of one number and one commit; a peer's row, which has none, is of the run before it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let file: StepFile = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut sessions: Vec<(String, Vec<StepRow>)> = Vec::new();
        let mut number = None;
        let rows = file.rows.into_iter().filter(StepRow::is_of_the_model);
        let (tuned, rows): (Vec<StepRow>, Vec<StepRow>) = rows.partition(|row| row.autotune);
        for row in rows {
            let same = match (sessions.last(), &row.commit) {
                (Some((of, _)), Some(commit)) => of == commit || of.is_empty(),
                (Some(_), None) => true,
                (None, _) => false,
            };
            if !same || number != Some(row.run) {
                sessions.push((String::new(), Vec::new()));
            }
            number = Some(row.run);
            if let Some((of, rows)) = sessions.last_mut() {
                if let Some(commit) = &row.commit {
                    of.clone_from(commit);
                }
                rows.push(row);
            }
        }
        Ok(Self {
            device: file.device,
            sessions,
            tuned,
            told: file.told,
        })
    }

    /// The settings of our rows, in the order of the tables.
    pub(super) fn settings(&self) -> Vec<Setting> {
        let rows = self.sessions.iter().flat_map(|(_, rows)| rows);
        let ours = rows.filter(|row| row.whose() == Some(Whose::Ours));
        let mut all: Vec<Setting> = ours.map(StepRow::setting).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The newest run of a setting, or the newest that timed this peer, too.
    pub(super) fn newest(&self, setting: Setting, beside: Option<Whose>) -> Option<Line> {
        let runs = (0..self.sessions.len()).rev();
        let mut lines = runs.filter_map(|at| self.line(at, setting));
        lines.find(|line| match beside {
            Some(Whose::Compiled) => line.compiled.is_some(),
            Some(Whose::Eager) => line.eager.is_some(),
            _ => true,
        })
    }

    /// The lines of a setting in a table: the newest run beside each peer, or the newest if no run has a peer.
    pub(super) fn lines(&self, setting: Setting) -> Vec<Line> {
        let beside = |peer| self.newest(setting, Some(peer));
        let mut lines = Vec::from_iter(beside(Whose::Compiled));
        lines.extend(beside(Whose::Eager).filter(|line| !lines.contains(line)));
        if lines.is_empty() {
            lines.extend(self.newest(setting, None));
        }
        lines
    }

    fn line(&self, at: usize, setting: Setting) -> Option<Line> {
        let ms = |whose| mean(self.rows(at, setting, whose).map(|row| row.step_ms.median));
        Some(Line {
            setting,
            at,
            ours: ms(Whose::Ours)?,
            compiled: ms(Whose::Compiled),
            eager: ms(Whose::Eager),
        })
    }

    /// The rows of a run: ours of this setting, or a peer's of as many tokens, which attends densely to all of them
    /// and keeps everything.
    pub(super) fn rows(
        &self,
        at: usize,
        setting: Setting,
        whose: Whose,
    ) -> impl Iterator<Item = &StepRow> {
        self.sessions[at].1.iter().filter(move |row| {
            let of = row.setting();
            row.whose() == Some(whose)
                && match whose {
                    Whose::Ours => of == setting,
                    _ => (of.tokens, of.batch) == (setting.tokens, setting.batch),
                }
        })
    }

    /// Our rows of a setting in every run.
    pub(super) fn ours(&self, setting: Setting) -> impl Iterator<Item = &StepRow> {
        let runs = 0..self.sessions.len();
        runs.flat_map(move |at| self.rows(at, setting, Whose::Ours))
    }

    /// The rows with a profile.
    pub(super) fn profiled(&self, at: usize, setting: Setting, whose: Whose) -> Vec<&StepRow> {
        let rows = self.rows(at, setting, whose);
        rows.filter(|row| row.profile.is_some()).collect()
    }

    /// The newest run that satisfies.
    pub(super) fn newest_run(&self, is: impl Fn(usize) -> bool) -> Option<usize> {
        (0..self.sessions.len()).rev().find(|&at| is(at))
    }

    /// The commit of a run's rows of ours.
    pub(super) fn commit(&self, at: usize) -> &str {
        &self.sessions[at].0
    }

    /// The newest run's peak of memory, in units of 10⁹ bytes, and its commit; of one commit if it is named.
    pub(super) fn gigabytes(
        &self,
        setting: Setting,
        whose: Whose,
        of: Option<&str>,
    ) -> Option<(&str, f64)> {
        let runs = self.sessions.iter().enumerate().rev();
        let mut runs = runs.filter(|(_, (commit, _))| of.is_none_or(|of| commit == of));
        runs.find_map(|(at, (commit, _))| {
            let peaks = self.rows(at, setting, whose);
            let peak = mean(peaks.map(|row| row.peak_bytes as f64))?;
            Some((&commit[..], peak / 1e9))
        })
    }
}

/// The mean, if there is any.
pub(super) fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let all: Vec<f64> = numbers.collect();
    (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(run: usize, who: &str, seq: usize, ms: f64) -> String {
        let (name, rest) = match who {
            "eager" | "compiled" => (format!("torch 2 {who}"), "\"window\":null".to_owned()),
            commit => (
                "burn".into(),
                format!("\"window\":2048,\"commit\":\"{commit}\""),
            ),
        };
        format!(
            r#"{{"run":{run},"implementation":"{name}","what":"model","layers":8,"d_model":1024,"seq":{seq},"batch":1,
            {rest},"checkpoint":false,"parameters":1,"peak_bytes":2000000000,"profile":null,
            "step_ms":{{"median":{ms},"q1":1,"q3":1,"runs":1}}}}"#
        )
    }

    fn steps(rows: &[String]) -> Steps {
        let text = format!(
            r#"{{"device":"a GPU, a driver","rows":[{}]}}"#,
            rows.join(",")
        );
        Steps::parse(&text).unwrap()
    }

    #[test]
    fn a_setting_is_taken_of_the_newest_run_with_the_peer() {
        let steps = steps(&[
            row(1, "a", 64, 10.0),
            row(1, "eager", 64, 30.0),
            row(1, "compiled", 64, 25.0),
            // One number for two commits: the peer below was not timed beside `a`.
            row(1, "b", 64, 8.0),
            row(1, "b", 64, 9.0),
            row(1, "compiled", 64, 20.0),
            row(2, "c", 64, 7.0),
        ]);
        let [setting] = steps.settings()[..] else {
            panic!("one setting")
        };
        let lines = steps.lines(setting);
        let shown = |line: &Line| (steps.commit(line.at), line.ours, line.compiled, line.eager);
        assert_eq!(lines.len(), 2);
        assert_eq!(shown(&lines[0]), ("b", 8.5, Some(20.0), None));
        assert_eq!(shown(&lines[1]), ("a", 10.0, Some(25.0), Some(30.0)));
        assert_eq!(steps.commit(steps.newest(setting, None).unwrap().at), "c");
    }

    #[test]
    fn a_peer_of_another_length_or_run_is_not_beside() {
        let steps = steps(&[
            row(1, "a", 64, 10.0),
            row(1, "compiled", 128, 25.0),
            row(2, "compiled", 64, 25.0),
        ]);
        let lines = steps.lines(steps.settings()[0]);
        assert_eq!(lines.len(), 1);
        assert_eq!((lines[0].compiled, lines[0].eager), (None, None));
    }
}
