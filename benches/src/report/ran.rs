//! The README's table and list of what ran where.

use super::compiled::{Code, alike, compiled, joined};
use super::markdown::wrapped;
use super::suites::{Fuzz, Runs, Suite};
use std::fmt::Write;

/// The column of the GPU whose suite is recorded.
const GPU: &str = "H200 (sm_90)";
const ELEMENTS: [&str; 3] = ["f32", "f16", "bf16"];

/// The rows of the table: engine as the records name it, and as the table does.
const ENGINES: [(&str, &str); 4] = [
    ("wgmma", "`wgmma` kernels"),
    ("mma", "`mma` kernels"),
    ("portable", "portable kernels"),
    ("cpu", "CPU engine"),
];

impl Runs {
    /// The table, and what the runs found.
    ///
    /// # Errors
    ///
    /// If a kind of run that the text is about is missing.
    pub fn platforms(&self) -> Result<String, String> {
        Ok(format!("{}\n{}", self.table(), self.points()?))
    }

    fn table(&self) -> String {
        let compiled = compiled(&self.codegen);
        let groups = alike(&compiled);
        let names = groups.iter().map(|archs| format!(" {} |", joined(archs)));
        let names: String = names.collect();
        let mut text = format!(
            "| engine | {} |{names} Vulkan | x86-64 CPU with AVX2 |\n|---|---|{}---|---|\n",
            GPU,
            "---|".repeat(groups.len())
        );
        for (engine, name) in ENGINES {
            let elements = self.elements(engine).join(", ");
            let _ = write!(text, "| {name}: {elements} | {} |", self.on_gpu(engine));
            for archs in &groups {
                let code = compiled[archs[0]].get(engine).copied();
                let _ = write!(text, " {} |", code.map_or("–", Code::shown));
            }
            let (vulkan, cpu) = (self.on_vulkan(engine), self.on_cpu(engine));
            let _ = writeln!(text, " {vulkan} | {cpu} |");
        }
        text
    }

    /// The element types in which an engine has run somewhere.
    fn elements(&self, engine: &str) -> Vec<&'static str> {
        let fuzzed = |fuzz: &Fuzz, element: &str| {
            let mut cells = fuzz.cells.iter().filter(|cell| cell.problems > 0);
            cells.any(|cell| cell.element == element && cell.served_by == engine)
        };
        let has = |element: &&str| match engine {
            // It is the only one of its runs, which leave the name empty.
            "cpu" => (self.fuzz_cpu.cells.iter()).any(|cell| cell.element == *element),
            _ => {
                self.fuzz.iter().any(|fuzz| fuzzed(fuzz, element))
                    || fuzzed(&self.fuzz_cubecl, element)
            }
        };
        ELEMENTS.into_iter().filter(has).collect()
    }

    fn on_gpu(&self, engine: &str) -> &'static str {
        let ended = self.cuda.iter().filter(|run| run.ended);
        match ended
            .flat_map(|run| &run.engines)
            .any(|name| name == engine)
        {
            true => "run",
            false => "–",
        }
    }

    fn on_vulkan(&self, engine: &str) -> &'static str {
        let runs = self.vulkan.iter().chain(&self.vulkan_cpu);
        let runs = runs.filter(|run| run.ended && run.engines.iter().any(|name| name == engine));
        let runs: Vec<&Suite> = latest(runs);
        match runs.iter().map(|run| run.failed).sum() {
            _ if runs.is_empty() => "–",
            0 => "run",
            _ => "run, see below",
        }
    }

    fn on_cpu(&self, engine: &str) -> &'static str {
        let served = |fuzz: &Fuzz| fuzz.cells.iter().any(|cell| cell.served_by == engine);
        match engine {
            "cpu" if self.fuzz_cpu.problems > 0 => "run",
            _ if served(&self.fuzz_cubecl) => "run (CubeCL's CPU runtime)",
            _ => "–",
        }
    }

    fn points(&self) -> Result<String, String> {
        let points = [self.on_cuda()?, self.on_vulkans()?, self.on_cpus()];
        let points = points
            .iter()
            .map(|point| wrapped(&format!("- {point}"), "  "));
        Ok(points.collect())
    }

    fn on_cuda(&self) -> Result<String, String> {
        let suite = self.cuda.iter().rev().find(|run| run.ended);
        let suite = suite.ok_or("no suite that ended on CUDA")?;
        let (passed, seconds) = suite
            .passed_of_all()
            .zip(suite.seconds)
            .ok_or_else(|| format!("the suite of {} lacks numbers", suite.commit))?;
        Ok(format!(
            "CUDA: {passed} tests of the GPU suite passed on {}, in {seconds:.0} s ({}, `{}`). {} \
             ([record](bench-results/h200/suite.md)).",
            suite.devices(),
            suite.date,
            suite.commit,
            self.fuzzed()
        ))
    }

    /// The random problems of the newest kinds, and those before.
    fn fuzzed(&self) -> String {
        let older: usize = self.fuzz.iter().map(|fuzz| fuzz.problems).sum();
        let wrong: usize = self.fuzz.iter().map(|fuzz| fuzz.wrong).sum();
        let before = format!("of {} before, {} wrong", spaced(older), amount(wrong));
        let runs: Vec<_> = (self.cuda.iter().filter_map(|run| run.fuzz.as_ref())).collect();
        let Some(last) = runs.last() else {
            return before.replacen('o', "O", 1);
        };
        let same = || runs.iter().filter(|run| run.kinds == last.kinds);
        let problems: usize = same().map(|run| run.problems).sum();
        let wrong: usize = same().map(|run| run.wrong).sum();
        let mut causes: Vec<&str> = same().filter_map(|run| run.cause.as_deref()).collect();
        causes.dedup();
        let causes = match causes[..] {
            [] => String::new(),
            _ => format!(", where {}", causes.join(" or ")),
        };
        format!(
            "Of {} random problems with {}, {} wrong{causes}; {before}",
            spaced(problems),
            last.kinds,
            amount(wrong)
        )
    }

    fn on_vulkans(&self) -> Result<String, String> {
        let told = |runs: &[Suite]| {
            let runs = latest(runs.iter().filter(|run| run.ended));
            let device = &runs.first().ok_or("no run on Vulkan")?.device;
            let of = |run: &&Suite| {
                let (through, elements) = (run.through.as_ref()?, run.elements.join(", "));
                let (passed, commit) = (run.passed_of_all()?, &run.commit);
                Some(format!(
                    "{passed} through {through} ({elements}; `{commit}`)"
                ))
            };
            let all: Option<Vec<String>> = runs.iter().map(of).collect();
            let all = all.ok_or("a run on Vulkan lacks a number or its language")?;
            Ok::<_, String>((
                device.trim_start_matches("NVIDIA ").to_owned(),
                all.join(", "),
            ))
        };
        let ((gpu, on_gpu), (driver, on_cpu)) = (told(&self.vulkan)?, told(&self.vulkan_cpu)?);
        Ok(format!(
            "Vulkan, tests of the kernels that passed: on the {gpu} {on_gpu}; on {driver} {on_cpu}."
        ))
    }

    fn on_cpus(&self) -> String {
        let fuzzed = |fuzz: &Fuzz| {
            let (problems, wrong, commit) = (spaced(fuzz.problems), fuzz.wrong, &fuzz.commit);
            format!("{problems} random problems, {wrong} wrong (`{commit}`)")
        };
        format!(
            "CPU engine: {}. CubeCL's CPU runtime: {}.",
            fuzzed(&self.fuzz_cpu),
            fuzzed(&self.fuzz_cubecl)
        )
    }
}

/// The last run on each device and through each language, in the order of the first ones.
fn latest<'a>(runs: impl Iterator<Item = &'a Suite>) -> Vec<&'a Suite> {
    let mut all: Vec<&Suite> = Vec::new();
    for run in runs {
        let key = |run: &'a Suite| (&run.device, &run.through);
        match all.iter_mut().find(|other| key(other) == key(run)) {
            Some(other) => *other = run,
            None => all.push(run),
        }
    }
    all
}

/// `none was`, `1 was`, `3 were`.
fn amount(count: usize) -> String {
    match count {
        0 => "none was".into(),
        1 => "1 was".into(),
        n => format!("{n} were"),
    }
}

/// `20 600` with a no-break space; four digits stay together.
fn spaced(n: usize) -> String {
    match n {
        0..10_000 => n.to_string(),
        _ => format!("{}\u{a0}{:03}", n / 1000, n % 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_told_in_words_of_the_text() {
        assert_eq!([0, 1, 3].map(amount), ["none was", "1 was", "3 were"]);
        assert_eq!(
            [547, 2400, 20_600, 100_000].map(spaced),
            ["547", "2400", "20\u{a0}600", "100\u{a0}000"]
        );
    }

    #[test]
    fn the_latest_run_of_each_device_and_language_counts() {
        let run = |through: &str, commit: &str| Suite {
            commit: commit.into(),
            date: String::new(),
            device: "a GPU".into(),
            machine: None,
            engines: Vec::new(),
            elements: Vec::new(),
            through: Some(through.into()),
            passed: Some(7),
            failed: 1,
            unknown: Some(2),
            seconds: None,
            ended: true,
            fuzz: None,
        };
        let runs = [run("WGSL", "a"), run("SPIR-V", "b"), run("WGSL", "c")];
        let commits: Vec<&str> = latest(runs.iter()).iter().map(|r| &r.commit[..]).collect();
        assert_eq!(commits, ["c", "b"]);
        assert_eq!(runs[0].passed_of_all().unwrap(), "7 of 10");
    }
}
