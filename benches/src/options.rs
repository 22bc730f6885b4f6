//! Options shared by the commands.

use crate::Result;
use crate::baseline::Baseline;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::process::Command;

/// Number of timed calls, and destination of the rows.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Common {
    /// Timed calls of each kind.
    #[arg(long, default_value_t = 9)]
    pub runs: usize,
    /// A file for the rows.
    #[arg(long)]
    #[serde(skip)]
    pub json: Option<PathBuf>,
    /// A file with rows of an earlier run on the same kind of device: the command fails if a time has grown by more than
    /// 5 %, and by more than the spread of both.
    #[arg(long, value_name = "FILE", value_parser = Baseline::read)]
    #[serde(skip)]
    pub baseline: Option<Baseline>,
    /// Commit of the build, for the rows [default: that of the working directory].
    #[arg(long, default_value_t = output("git", &["rev-parse", "--short", "HEAD"]))]
    pub commit: String,
}

impl Common {
    /// Writes the rows to the named file, if any.
    pub fn write(&self, rows: &impl Serialize) -> Result {
        let Some(path) = &self.json else {
            return Ok(());
        };
        let text = serde_json::to_string_pretty(rows)? + "\n";
        let told = |error| format!("cannot write {}: {error}", path.display());
        Ok(std::fs::write(path, text).map_err(told)?)
    }

    /// [Writes](Self::write) all rows and [compares](Self::compare) them.
    pub fn finish(&self, rows: &[impl Serialize]) -> Result {
        self.write(&rows)?;
        self.compare(rows)
    }

    /// Compares rows with the baseline, if any.
    pub fn compare(&self, rows: &[impl Serialize]) -> Result {
        let Some(baseline) = &self.baseline else {
            return Ok(());
        };
        let rows = rows.iter().map(serde_json::to_value);
        baseline.compare(&rows.collect::<serde_json::Result<Vec<_>>>()?)
    }
}

/// The output of a command, or "unknown".
pub fn output(program: &str, args: &[&str]) -> String {
    (Command::new(program).args(args).output().ok())
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map_or("unknown".into(), |text| text.trim().into())
}

/// The runtime that launches the kernels.
#[cfg(feature = "cube")]
#[derive(Args, Debug)]
pub struct Runtime {
    /// The runtime: cpu, cuda or wgpu, if compiled in.
    #[arg(long)]
    runtime: String,
    #[command(flatten)]
    pub common: Common,
}

#[cfg(feature = "cube")]
impl Runtime {
    /// Its client.
    pub fn client(&self) -> Result<cubecl::client::Client> {
        let name = &self.runtime;
        let missing = || format!("no runtime `{name}`: build with `--features {name}`");
        Ok(crate::device::client(name).ok_or_else(missing)?)
    }
}

/// The timed cases and phases.
#[cfg(feature = "cube")]
#[derive(Args, Debug)]
pub struct Selected {
    /// Cases by name; by default all.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Phases, by their names in the rows; by default all.
    #[arg(long, value_delimiter = ',')]
    phases: Vec<String>,
}

#[cfg(feature = "cube")]
impl Selected {
    /// The cases of a table.
    pub fn of<T: Copy>(&self, table: &[T], name: fn(&T) -> &'static str) -> Result<Vec<T>> {
        let known = |wanted: &String| table.iter().any(|case| name(case) == wanted);
        if let Some(unknown) = self.cases.iter().find(|wanted| !known(wanted)) {
            return Err(format!("no case `{unknown}`").into());
        }
        let wanted =
            |case: &&T| self.cases.is_empty() || self.cases.iter().any(|c| c == name(case));
        Ok(table.iter().filter(wanted).copied().collect())
    }

    /// True if the phase is timed.
    pub fn phase(&self, phase: &str) -> bool {
        self.phases.is_empty() || self.phases.iter().any(|name| name == phase)
    }
}

/// Each of the choices; if there are none, a single `None` that leaves the choice to the library.
#[cfg(feature = "cube")]
pub fn each<T: Copy>(choices: &[T]) -> Vec<Option<T>> {
    match choices {
        [] => vec![None],
        _ => choices.iter().copied().map(Some).collect(),
    }
}
