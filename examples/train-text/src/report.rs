//! The written outcome: `curves.json`, `sample.txt` and the closing lines.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::cli::Settings;
use crate::curves::Curve;
use crate::data::Corpus;
use crate::error::Error;

/// What a run is resumed with: written before training, compared when it is resumed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The settings.
    pub settings: Settings,
    /// The corpus.
    pub corpus: CorpusFacts,
    /// Whether a dense run follows.
    pub compare: bool,
}

/// Which text was trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CorpusFacts {
    /// Bytes.
    pub bytes: usize,
    /// Files joined.
    pub files: usize,
    /// Fingerprint of the bytes (FNV-1a).
    pub fingerprint: String,
    /// Entropy of one byte, in nats.
    pub unigram_entropy: f64,
}

impl CorpusFacts {
    /// The facts of a corpus.
    pub fn of(corpus: &Corpus) -> Self {
        Self {
            bytes: corpus.bytes.len(),
            files: corpus.files,
            fingerprint: corpus.fingerprint(),
            unigram_entropy: corpus.unigram_entropy(),
        }
    }
}

/// `curves.json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    plan: &'a Plan,
    /// Burn's name of the device.
    device: String,
    /// The commit of the working directory, with `-dirty` if it has changes.
    commit: Option<String>,
    runs: &'a [Curve],
}

/// The file in a run's directory that holds its [`Plan`].
pub const PLAN: &str = "plan.json";

/// Writes the plan of the run in `out`.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written.
pub fn write_plan(out: &Path, plan: &Plan) -> Result<(), Error> {
    let json = serde_json::to_string_pretty(plan).expect("a plan's keys are strings");
    let path = out.join(PLAN);
    fs::write(&path, json + "\n").map_err(Error::io(path))
}

/// Reads the plan of a run.
///
/// # Errors
///
/// [`Error::Io`] if there is none, [`Error::Unusable`] if it is not a plan.
pub fn read_plan(out: &Path) -> Result<Plan, Error> {
    let path = out.join(PLAN);
    let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
    serde_json::from_str(&text).map_err(|error| Error::Unusable {
        path,
        reason: error.to_string(),
    })
}

/// Writes `curves.json` in `out`.
///
/// # Errors
///
/// [`Error::Io`] if it cannot be written.
pub fn write_curves(out: &Path, plan: &Plan, device: String, runs: &[Curve]) -> Result<(), Error> {
    let report = Report {
        plan,
        device,
        commit: commit(),
        runs,
    };
    let json = serde_json::to_string(&report).expect("a report's keys are strings");
    let path = out.join("curves.json");
    fs::write(&path, json + "\n").map_err(Error::io(path))
}

/// One line on a finished run.
pub fn summary(curve: &Curve, entropy: f64) -> String {
    let loss = curve
        .final_valid()
        .map_or("none".to_string(), |loss| format!("{loss:.3}"));
    let speed = curve.timings.step_milliseconds;
    let speed = speed.map_or(String::new(), |time| format!(", {time:.1} ms a step"));
    format!(
        "{} (w = {}): validation loss {loss} nats a byte, unigram entropy {entropy:.3}{speed}",
        curve.label, curve.window
    )
}

/// The commit of the working directory, with `-dirty` if it has changes; `None` outside a repository.
pub fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let commit = git(&["rev-parse", "HEAD"])?;
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if clean { commit } else { commit + "-dirty" })
}
