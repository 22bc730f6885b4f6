//! The tables of training steps: the README's, and those of the book's page on them.

use super::markdown::{ms, times_theirs, wrapped};
use super::steps::{Line, Setting, StepRow, Steps, Whose, mean};
use std::fmt::Write;

/// The last commit before cheap results were made again in the backward pass.
const KEPT: &str = "f4c1521";

/// Lines of the table of kernels: name, and the kinds of the profile.
const KINDS: [(&str, &[&str]); 6] = [
    ("attention", &["attention"]),
    ("matrix products", &["product"]),
    ("norms and rotary encoding", &["norm"]),
    (
        "element by element, reductions",
        &["element_wise", "reduction"],
    ),
    ("clipping and AdamW", &["optimiser"]),
    ("copies and casts", &["copy"]),
];

impl Steps {
    /// The README's sentence and table: the newest run of each setting that timed a peer, too; without dense attention
    /// and checkpoints.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn highlights(&self) -> Result<String, String> {
        let plain = self.settings().into_iter().filter(|s| s.is_plain());
        let lines: Vec<Line> = plain.filter_map(|s| self.beside_a_peer(s)).collect();
        let first = lines
            .first()
            .ok_or("no training step has a peer in the same run")?;
        let row = |whose| self.rows(first.at, first.setting, whose).next();
        let ours = row(Whose::Ours).ok_or("no training step of ours")?;
        let theirs = row(Whose::Compiled).or_else(|| row(Whose::Eager));
        let theirs = theirs.ok_or("no training step of PyTorch")?;
        let sentence = format!(
            "A training step of a whole model on one {}, against {} with cuDNN's dense attention ({:.0} M parameters, \
             bf16, AdamW; ms; [the book](book/src/training-step.md) has the losing cases, the memory and where the \
             time goes):",
            self.device.split(',').next().unwrap_or_default(),
            pytorch(theirs),
            ours.parameters as f64 / 1e6,
        );
        let mut text = wrapped(&sentence, "");
        text += "\n| | ours | PyTorch, compiled | PyTorch, eager |\n|---|---|---|---|\n";
        for line in &lines {
            let _ = writeln!(
                text,
                "| {}, w {} | {} |",
                sequences(line.setting),
                line.setting.window.unwrap_or_default(),
                times(line)
            );
        }
        Ok(text)
    }

    fn beside_a_peer(&self, setting: Setting) -> Option<Line> {
        let beside = |peer| self.newest(setting, Some(peer));
        beside(Whose::Compiled).or_else(|| beside(Whose::Eager))
    }

    /// The book's table of times: of each setting the newest run beside each peer.
    #[must_use]
    pub fn times(&self) -> String {
        let mut text = String::from(
            "| sequences of tokens | ours | PyTorch, compiled | PyTorch, eager | commit |\n|---|---|---|---|---|\n",
        );
        for line in self.settings().into_iter().flat_map(|s| self.lines(s)) {
            let _ = writeln!(
                text,
                "| {}, {} | {} | `{}` |",
                sequences(line.setting),
                how(line.setting),
                times(&line),
                self.commit(line.at)
            );
        }
        text
    }

    /// The book's table of memory: of each length the newest run of each.
    #[must_use]
    pub fn memory(&self) -> String {
        let mut text = format!(
            "| reserved memory, GB | ours | when cheap results were kept, `{KEPT}` | ours, checkpointed | \
             PyTorch, compiled | PyTorch, eager |\n|---|---|---|---|---|---|\n",
        );
        for plain in self.settings().into_iter().filter(|s| s.is_plain()) {
            let Some((newest, ours)) = self.gigabytes(plain, Whose::Ours, None) else {
                continue;
            };
            let shown = |(commit, gigabytes): (&str, f64)| match commit == newest {
                true => format!("{gigabytes:.1}"),
                false => format!("{gigabytes:.1} (`{commit}`)"),
            };
            let theirs = |whose| {
                let peak = self.gigabytes(plain, whose, None);
                peak.map_or("–".into(), |(_, gigabytes)| format!("{gigabytes:.1}"))
            };
            let checkpointed = Setting {
                checkpoint: true,
                ..plain
            };
            let kept = self.gigabytes(plain, Whose::Ours, Some(KEPT));
            let checkpointed = self.gigabytes(checkpointed, Whose::Ours, None);
            let _ = writeln!(
                text,
                "| {}, {} (`{newest}`) | **{ours:.1}** | {} | {} | {} | {} |",
                sequences(plain),
                how(plain),
                kept.map_or("–".into(), |(_, gigabytes)| format!("{gigabytes:.1}")),
                checkpointed.map_or("–".into(), shown),
                theirs(Whose::Compiled),
                theirs(Whose::Eager),
            );
        }
        text
    }

    /// The setting that the sentences and the table of kernels are about: one sequence of 32K tokens.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(super) fn long(&self) -> Result<Setting, String> {
        let is = |s: &Setting| s.is_plain() && (s.seq(), s.batch) == (32768, 1);
        let setting = self.settings().into_iter().find(is);
        setting.ok_or_else(|| "no training step of 32K tokens".into())
    }

    /// The book's table of kernels by kind: the newest run of one sequence of 32K tokens with the compiled peer, and
    /// the newest eager peer.
    ///
    /// # Errors
    ///
    /// If one of the three has no profile.
    pub fn kinds(&self) -> Result<String, String> {
        let setting = self.long()?;
        let profiled = |at, whose| self.profiled(at, setting, whose);
        let with = |peer| {
            let has = |at, whose| !profiled(at, whose).is_empty();
            let run = self.newest_run(|at| has(at, Whose::Ours) && has(at, peer));
            run.ok_or_else(|| format!("no profile of {peer:?} beside ours at 32K tokens"))
        };
        let (now, before) = (with(Whose::Compiled)?, with(Whose::Eager)?);
        let columns = [
            profiled(now, Whose::Ours),
            profiled(now, Whose::Compiled),
            profiled(before, Whose::Eager),
        ];
        let mut text = format!(
            "| kind, ms | ours, `{}` | PyTorch, compiled | PyTorch, eager (beside `{}`) |\n|---|---|---|---|\n",
            self.commit(now),
            self.commit(before)
        );
        for (name, kinds) in KINDS {
            let cells = columns
                .iter()
                .map(|rows| sum(rows, |kind| kinds.contains(&kind)));
            line(&mut text, name, cells);
        }
        let known: Vec<&str> = KINDS
            .iter()
            .flat_map(|(_, kinds)| kinds.iter().copied())
            .collect();
        let cells = columns
            .iter()
            .map(|rows| sum(rows, |kind| !known.contains(&kind)));
        line(&mut text, "look-ups and others", cells);
        let cells = columns.iter().map(|rows| sum(rows, |_| true));
        line(&mut text, "all", cells);
        let launches = columns.iter().map(|rows| {
            let launches = rows.iter().filter_map(|row| row.profile.as_ref());
            let launches = mean(launches.map(|p| p.launches as f64));
            launches.map_or("–".into(), |n| format!("{n:.0}"))
        });
        let launches: Vec<String> = launches.collect();
        let _ = writeln!(text, "| launches | {} |", launches.join(" | "));
        Ok(text)
    }
}

fn line(text: &mut String, name: &str, cells: impl Iterator<Item = Option<f64>>) {
    let cells = cells.map(|ms| ms.map_or("–".into(), |ms| format!("{ms:.1}")));
    let cells: Vec<String> = cells.collect();
    let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
}

/// The time of some kinds, the mean over the rows.
fn sum(rows: &[&StepRow], is: impl Fn(&str) -> bool) -> Option<f64> {
    let profiles = rows.iter().filter_map(|row| row.profile.as_ref());
    mean(profiles.map(|profile| {
        let kinds = profile.kinds.iter().filter(|(name, _)| is(name));
        kinds.map(|(_, kind)| kind.ms).sum::<f64>()
    }))
}

/// `PyTorch 2.11` of `torch 2.11.0+cu130 compiled`.
fn pytorch(row: &StepRow) -> String {
    let version = row.implementation.split([' ', '+']).nth(1);
    let version = version.unwrap_or_default();
    format!("PyTorch {}", version.strip_suffix(".0").unwrap_or(version))
}

/// Ours, bold if no peer is faster, and the peers' with the quotients.
fn times(line: &Line) -> String {
    let peers = [line.compiled, line.eager];
    let wins = peers.iter().flatten().all(|&theirs| line.ours < theirs);
    let ours = match wins && peers.iter().any(Option::is_some) {
        true => format!("**{}**", ms(line.ours)),
        false => ms(line.ours),
    };
    let theirs =
        peers.map(|peer| peer.map_or("–".into(), |theirs| times_theirs((line.ours, theirs))));
    format!("{ours} | {}", theirs.join(" | "))
}

/// `32K tokens`, `4 × 8K tokens`.
pub(super) fn sequences(setting: Setting) -> String {
    let times = match setting.batch {
        1 => String::new(),
        batch => format!("{batch} × "),
    };
    match setting.seq() {
        n if n % 1024 == 0 => format!("{times}{}K tokens", n / 1024),
        n => format!("{times}{n} tokens"),
    }
}

pub(super) fn how(setting: Setting) -> String {
    let checkpointed = match setting.checkpoint {
        true => ", checkpointed",
        false => "",
    };
    match setting.window {
        Some(window) => format!("w {window}{checkpointed}"),
        None => format!("dense{checkpointed}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_committed_steps_have_a_table_each() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench-results/h200");
        let steps = Steps::read(&results.join("step.json")).unwrap();
        let readme = steps.highlights().unwrap();
        assert!(
            readme.contains("PyTorch 2.11 with") && readme.contains("(89 M"),
            "{readme}"
        );
        // Every length of the book's table of times is in that of memory.
        let (times, memory) = (steps.times(), steps.memory());
        for setting in steps.settings() {
            assert!(memory.contains(&sequences(setting)) && times.contains(&sequences(setting)));
        }
        let kinds = steps.kinds().unwrap();
        assert_eq!(kinds.lines().count(), 2 + KINDS.len() + 3, "{kinds}");
    }

    #[test]
    fn only_a_step_that_no_peer_beats_is_bold() {
        let line = |compiled, eager| Line {
            setting: Steps::parse(ONE).unwrap().settings()[0],
            at: 0,
            ours: 10.0,
            compiled,
            eager,
        };
        assert_eq!(
            times(&line(Some(20.0), None)),
            "**10.0** | 20.0 (0.50×) | –"
        );
        assert_eq!(
            times(&line(Some(8.0), Some(40.0))),
            "10.0 | 8.00 (1.25×) | 40.0 (0.25×)"
        );
        assert_eq!(times(&line(None, None)), "10.0 | – | –");
    }

    const ONE: &str = r#"{"device":"a GPU","rows":[{"run":1,"commit":"c","implementation":"burn","what":"model","layers":8,
        "d_model":1024,"seq":8192,"batch":4,"window":1024,"checkpoint":false,"parameters":1,"peak_bytes":1,
        "profile":null,"step_ms":{"median":10,"q1":1,"q3":1,"runs":1}}]}"#;
}
