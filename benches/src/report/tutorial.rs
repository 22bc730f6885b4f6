//! What the models of the book's tutorial learn: the rows of the example `tutorial`.

use super::files::json;
use super::markdown::{distinct, range, wrapped};
use serde::Deserialize;
use std::fmt::Write;
use std::path::Path;

/// `tutorial-cpu.json`.
#[derive(Clone, Debug, Deserialize)]
struct Arms {
    commit: String,
    date: String,
    machine: String,
    command: String,
    rows: Vec<Run>,
}

/// What the table needs of a row of `tutorial`: an arm trained on one seed.
#[derive(Clone, Debug, Deserialize)]
struct Run {
    arm: String,
    window: usize,
    runners_up: usize,
    seed: u64,
    steps: usize,
    /// The share of the questions answered.
    right: f64,
    seconds: f64,
}

/// `tutorial-small.json`.
#[derive(Clone, Debug, Deserialize)]
struct Small {
    model: String,
    rows: Vec<SmallRun>,
}

/// A setting of the smaller model, trained on one seed.
#[derive(Clone, Debug, Deserialize)]
struct SmallRun {
    setting: String,
    seed: u64,
    right: f64,
}

/// The tutorial's blocks.
pub struct Tutorial {
    arms: Arms,
    small: Small,
}

impl Tutorial {
    /// Reads the two records of a folder.
    ///
    /// # Errors
    ///
    /// The name of a file that is missing or malformed.
    pub fn read(folder: &Path) -> Result<Self, String> {
        Ok(Self {
            arms: json(&folder.join("tutorial-cpu.json"))?,
            small: json(&folder.join("tutorial-small.json"))?,
        })
    }

    /// A line for each arm with the answers of each seed, and where that was.
    ///
    /// # Errors
    ///
    /// If an arm lacks a seed, or the runs differ in their length.
    pub fn arms(&self) -> Result<String, String> {
        let Arms { rows, .. } = &self.arms;
        let seeds = distinct(rows.iter().map(|run| run.seed));
        let [steps] = distinct(rows.iter().map(|run| run.steps))[..] else {
            return Err("tutorial-cpu.json: runs of different lengths".into());
        };
        let mut text = head(&["scores", "window", "runners-up"], &seeds);
        text += " seconds a run |\n";
        text += &rule(3 + seeds.len() + 1);
        for arm in distinct(rows.iter().map(|run| &run.arm[..])) {
            let runs: Vec<&Run> = rows.iter().filter(|run| run.arm == arm).collect();
            let answers = of_seeds(arm, &seeds, |seed| {
                let mut runs = runs.iter().filter(|run| run.seed == seed);
                runs.next().map(|run| run.right)
            })?;
            let times: Vec<f64> = runs.iter().map(|run| run.seconds.round()).collect();
            let seconds = range(&times, 0, "–");
            let _ = writeln!(
                text,
                "| {} | {} | {} |{answers} {seconds} |",
                called(arm),
                runs[0].window,
                runs[0].runners_up
            );
        }
        let Arms {
            commit,
            date,
            machine,
            command,
            ..
        } = &self.arms;
        let origin = format!(
            "The questions answered after {steps} steps: `{command}`; {machine}; commit `{commit}`, {date}."
        );
        Ok(text + "\n" + &wrapped(&origin, ""))
    }

    /// A line for each setting of the smaller model.
    ///
    /// # Errors
    ///
    /// If a setting lacks a seed.
    pub fn small(&self) -> Result<String, String> {
        let Small { model, rows } = &self.small;
        let seeds = distinct(rows.iter().map(|run| run.seed));
        let mut text = head(&[model], &seeds) + "\n";
        text += &rule(1 + seeds.len());
        for setting in distinct(rows.iter().map(|run| &run.setting[..])) {
            let answers = of_seeds(setting, &seeds, |seed| {
                let mut rows = rows.iter();
                let is = |run: &&SmallRun| run.setting == setting && run.seed == seed;
                rows.find(is).map(|run| run.right)
            })?;
            let _ = writeln!(text, "| {setting} |{answers}");
        }
        Ok(text)
    }
}

/// What the chapter calls an arm of the program.
fn called(arm: &str) -> &str {
    match arm {
        "zoh" => "zoh (the paper's form)",
        "random" => "noise",
        name => name,
    }
}

/// `| a | b | seed 9 | 10 |`, without an end of the line.
fn head(names: &[&str], seeds: &[u64]) -> String {
    let mut text = format!("| {} |", names.join(" | "));
    for (place, seed) in seeds.iter().enumerate() {
        let word = if place == 0 { "seed " } else { "" };
        let _ = write!(text, " {word}{seed} |");
    }
    text
}

fn rule(columns: usize) -> String {
    format!("|{}\n", "---|".repeat(columns))
}

/// The cells of one line.
fn of_seeds(
    line: &str,
    seeds: &[u64],
    right: impl Fn(u64) -> Option<f64>,
) -> Result<String, String> {
    let mut cells = String::new();
    for &seed in seeds {
        let right = right(seed).ok_or_else(|| format!("{line} lacks seed {seed}"))?;
        let _ = write!(cells, " {:.1} % |", 100.0 * right);
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tutorial(rows: &[(&str, u64, usize, f64)]) -> Tutorial {
        let rows = rows.iter().map(|&(arm, seed, steps, right)| Run {
            arm: arm.into(),
            window: 16,
            runners_up: 4,
            seed,
            steps,
            right,
            seconds: 10.4 + seed as f64,
        });
        let arms = Arms {
            commit: "c".into(),
            date: "d".into(),
            machine: "m".into(),
            command: "run".into(),
            rows: rows.collect(),
        };
        let small = Small {
            model: "half".into(),
            rows: vec![SmallRun {
                setting: "4 runners-up".into(),
                seed: 3,
                right: 0.834,
            }],
        };
        Tutorial { arms, small }
    }

    #[test]
    fn an_arm_is_a_line_and_a_seed_a_column() {
        let tutorial = tutorial(&[
            ("zoh", 9, 400, 0.5664),
            ("zoh", 10, 400, 1.0),
            ("random", 9, 400, 0.25),
            ("random", 10, 400, 0.5),
        ]);
        let expected = "\
| scores | window | runners-up | seed 9 | 10 | seconds a run |
|---|---|---|---|---|---|
| zoh (the paper's form) | 16 | 4 | 56.6 % | 100.0 % | 19–20 |
| noise | 16 | 4 | 25.0 % | 50.0 % | 19–20 |

The questions answered after 400 steps: `run`; m; commit `c`, d.
";
        assert_eq!(tutorial.arms().unwrap(), expected);
        let small = "| half | seed 3 |\n|---|---|\n| 4 runners-up | 83.4 % |\n";
        assert_eq!(tutorial.small().unwrap(), small);
    }

    #[test]
    fn a_run_that_is_missing_or_of_another_length_is_refused() {
        let missing = tutorial(&[
            ("zoh", 9, 400, 0.5),
            ("zoh", 10, 400, 0.5),
            ("dense", 9, 400, 1.0),
        ]);
        assert_eq!(missing.arms().unwrap_err(), "dense lacks seed 10");
        let shorter = tutorial(&[("zoh", 9, 400, 0.5), ("zoh", 10, 300, 0.5)]);
        assert!(shorter.arms().unwrap_err().contains("different lengths"));
    }
}
