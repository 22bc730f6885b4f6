//! What ran where: the runs of suites and of the fuzzer.

use super::files::{json, text};
use serde::Deserialize;
use std::path::Path;

#[derive(Deserialize)]
struct Suites {
    runs: Vec<Suite>,
}

/// A run of a suite: a row of a `suite*.json`, in which rows stand from first to last.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Suite {
    pub(super) commit: String,
    pub(super) date: String,
    pub(super) device: String,
    /// How many devices, then the cores and what else ran, where the account says it.
    #[serde(default)]
    pub(super) machine: Option<String>,
    /// The engines that the tests called.
    pub(super) engines: Vec<String>,
    /// Element types, where the device or the compiler decides on them.
    #[serde(default)]
    pub(super) elements: Vec<String>,
    /// The language that kernels were compiled through, on Vulkan.
    #[serde(default)]
    pub(super) through: Option<String>,
    /// `None` if the account does not say.
    pub(super) passed: Option<usize>,
    pub(super) failed: usize,
    pub(super) unknown: Option<usize>,
    pub(super) seconds: Option<f64>,
    /// Whether it was the whole suite, to its end.
    pub(super) ended: bool,
    #[serde(default)]
    pub(super) fuzz: Option<Beside>,
}

/// What the fuzzer did beside a suite.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Beside {
    pub(super) problems: usize,
    pub(super) wrong: usize,
    /// What the problems contain.
    pub(super) kinds: String,
    /// When a problem was wrong.
    #[serde(default)]
    pub(super) cause: Option<String>,
}

/// A run of the fuzzer with its table of cells.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Fuzz {
    pub(super) commit: String,
    pub(super) problems: usize,
    pub(super) wrong: usize,
    pub(super) cells: Vec<Cell>,
}

/// The problems of one pass, engine and element type.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Cell {
    pub(super) element: String,
    /// The engine that served, empty on the CPU engine.
    pub(super) served_by: String,
    pub(super) problems: usize,
}

impl Suite {
    /// The devices: how many of how many, if that is known.
    pub(super) fn devices(&self) -> &str {
        let machine = self.machine.as_deref().unwrap_or(&self.device);
        machine.split(',').next().unwrap_or(machine)
    }

    /// `157 of 158`, if the number of those passed is known.
    pub(super) fn passed_of_all(&self) -> Option<String> {
        let (passed, unknown) = (self.passed?, self.unknown?);
        Some(format!("{passed} of {}", passed + self.failed + unknown))
    }
}

/// Everything that is recorded of what ran, and what compiles.
pub struct Runs {
    /// The GPU suite on CUDA.
    pub(super) cuda: Vec<Suite>,
    /// The kernels' tests on the GPU's Vulkan driver.
    pub(super) vulkan: Vec<Suite>,
    /// The same on a driver for CPUs.
    pub(super) vulkan_cpu: Vec<Suite>,
    pub(super) fuzz: Vec<Fuzz>,
    pub(super) fuzz_cpu: Fuzz,
    pub(super) fuzz_cubecl: Fuzz,
    /// `docs/codegen.tsv`.
    pub(super) codegen: String,
}

impl Runs {
    /// Reads the records of a GPU's and a CPU's folder, and the table of generated code.
    ///
    /// # Errors
    ///
    /// The name of a file that is missing or malformed.
    pub fn read(gpu: &Path, cpu: &Path, codegen: &Path) -> Result<Self, String> {
        let suites = |path| json(path).map(|suites: Suites| suites.runs);
        Ok(Self {
            cuda: suites(&gpu.join("suite.json"))?,
            vulkan: suites(&gpu.join("suite-vulkan.json"))?,
            vulkan_cpu: suites(&cpu.join("suite-vulkan.json"))?,
            fuzz: json(&gpu.join("fuzz.json"))?,
            fuzz_cpu: json(&cpu.join("fuzz.json"))?,
            fuzz_cubecl: json(&cpu.join("fuzz-cubecl.json"))?,
            codegen: text(codegen)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows are what the account tells, so that neither is changed alone.
    #[test]
    fn every_suite_that_ended_is_in_the_account() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench-results");
        let account = text(&results.join("h200/suite.md")).unwrap();
        for file in [
            "h200/suite.json",
            "h200/suite-vulkan.json",
            "cpu/suite-vulkan.json",
        ] {
            let runs: Suites = json(&results.join(file)).unwrap();
            for run in runs.runs.iter().filter(|run| run.ended) {
                let passed = run.passed.unwrap();
                let told = [
                    format!("{passed} passed"),
                    format!("{passed} of {}", passed + run.failed + run.unknown.unwrap()),
                ];
                let commit = format!("`{}`", run.commit);
                assert!(account.contains(&commit), "{file}: {commit}");
                assert!(
                    told.iter().any(|told| account.contains(told)),
                    "{file}: {told:?}"
                );
            }
        }
    }
}
