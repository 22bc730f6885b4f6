//! The files that the records give: which, and whether they are what the records give today.

use super::commands::Commands;
use super::files::{json, text};
use super::first_call::FirstCalls;
use super::highlights::highlights;
use super::join::{Peers, Report};
use super::language::language_tables;
use super::learning::{recall_by_rate, recall_tables};
use super::learning_plots::recall_plots;
use super::markdown::replace_section;
use super::others::Others;
use super::products::Products;
use super::steps::Steps;
use super::suites::Runs;
use super::tutorial::Tutorial;
use crate::roof::Roof;
use crate::rows::Row;
use clap::Args;
use std::path::{Path, PathBuf};

/// What every mark begins with.
const MARK: &str = "bench-report";

/// Where the records are and where the report goes; paths are relative to the root.
#[derive(Args, Clone, Debug)]
pub struct Places {
    /// The repository.
    #[arg(long, default_value = ".")]
    pub root: PathBuf,
    /// Folder of one device's measurements: `peers.jsonl`, `roof.json`, `step.json`, `products.json`,
    /// `first-call.json`, `suite.json` and files of rows.
    #[arg(long, default_value = "bench-results/h200")]
    pub results: PathBuf,
    /// Files of rows in that folder; of two rows for the same workload, phase and engine, the later file's is kept.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "portable-f32.json,portable-bf16.json,mma.json,wgmma.json"
    )]
    pub rows: Vec<PathBuf>,
    /// Folder of the CPU's measurements.
    #[arg(long, default_value = "bench-results/cpu")]
    pub cpu: PathBuf,
    /// Folder of what models have learned.
    #[arg(long, default_value = "bench-results/learning")]
    pub learning: PathBuf,
    /// The table of generated code, which says what compiles.
    #[arg(long, default_value = "docs/codegen.tsv")]
    pub codegen: PathBuf,
    /// Receives the tables of what models have learned between its marks.
    #[arg(long, default_value = "book/src/learning.md")]
    pub learning_page: PathBuf,
    /// Receives what the tutorial's models learn between its marks.
    #[arg(long, default_value = "book/src/tutorial.md")]
    pub tutorial_page: PathBuf,
    /// Receives how long a first call takes between its marks.
    #[arg(long, default_value = "book/src/engines.md")]
    pub engines_page: PathBuf,
    /// Receives what ran where, the first call, and the short tables for newcomers, between its marks.
    #[arg(long, default_value = "README.md")]
    pub readme: PathBuf,
    /// Receives the tables of training steps between its marks.
    #[arg(long, default_value = "book/src/training-step.md")]
    pub step_page: PathBuf,
    /// Receives all tables of calls between its marks.
    #[arg(long, default_value = "book/src/performance.md")]
    pub page: PathBuf,
    /// Receives the plots.
    #[arg(long, default_value = "book/src/img")]
    pub plots: PathBuf,
}

/// A file as the records give it: a plot, or a page with its marked blocks.
#[derive(Clone, Debug)]
pub struct Output {
    /// Where it belongs.
    pub path: PathBuf,
    /// All of it.
    pub text: String,
}

impl Output {
    /// Where the file differs, or `None` if it is up to date.
    #[must_use]
    pub fn stale(&self) -> Option<String> {
        let path = self.path.display();
        let Ok(found) = std::fs::read_to_string(&self.path) else {
            return Some(format!("{path} cannot be read"));
        };
        if found == self.text {
            return None;
        }
        let (mut old, mut new) = (found.lines(), self.text.lines());
        for number in 1.. {
            let (old, new) = (old.next(), new.next());
            if old != new || old.is_none() {
                let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
                return Some(format!(
                    "{path}, line {number}, is\n    {old}\n  where the records give\n    {new}"
                ));
            }
        }
        None
    }
}

impl Places {
    /// Every file that the records give.
    ///
    /// # Errors
    ///
    /// When a record is missing or malformed, or a page lacks a mark or has one that nothing fills.
    pub fn outputs(&self) -> Result<Vec<Output>, String> {
        let at = |path: &Path| self.root.join(path);
        let (results, cpu) = (at(&self.results), at(&self.cpu));
        let report = self.report(&results)?;
        let others = Others::read(&results, &cpu)?;
        let steps = Steps::read(&results.join("step.json"))?;
        let products: Products = json(&results.join("products.json"))?;
        let commands: Commands = json(&cpu.join("commands.json"))?;
        let first_calls: FirstCalls = json(&results.join("first-call.json"))?;
        let runs = Runs::read(&results, &cpu, &at(&self.codegen))?;
        let learning = at(&self.learning);
        let tutorial = Tutorial::read(&learning)?;

        let recall = learning.join("recall-sweep-h200.json");
        let plots = report
            .plots()?
            .into_iter()
            .map(|(name, svg)| (name.to_owned(), svg));
        let plots = plots
            .chain(recall_plots(&learning)?)
            .map(|(name, text)| Output {
                path: at(&self.plots).join(format!("{name}.svg")),
                text,
            });
        let mut outputs: Vec<Output> = plots.collect();
        outputs.push(page(
            &at(&self.learning_page),
            &[
                ("rates", recall_by_rate(&recall)?),
                ("language", language_tables(&learning)?),
                ("", recall_tables(&learning)?),
            ],
        )?);
        outputs.push(page(
            &at(&self.tutorial_page),
            &[("arms", tutorial.arms()?), ("small", tutorial.small()?)],
        )?);
        outputs.push(page(
            &at(&self.engines_page),
            &[("first-call", first_calls.table())],
        )?);
        outputs.push(page(
            &at(&self.readme),
            &[
                ("commands", commands.table()),
                ("first-call", first_calls.sentence()?),
                ("runs", runs.platforms()?),
                ("step", steps.highlights()?),
                ("", highlights(&report, &others)?),
            ],
        )?);
        outputs.push(page(
            &at(&self.step_page),
            &[
                ("times", steps.times()),
                ("memory", steps.memory()),
                ("first-steps", steps.first_steps()?),
                ("before", steps.before()?),
                ("kinds", steps.kinds()?),
                ("products", products.table()),
            ],
        )?);
        let tables = report.full() + "\n" + &others.tables();
        outputs.push(page(&at(&self.page), &[("", tables)])?);
        Ok(outputs)
    }

    fn report(&self, results: &Path) -> Result<Report, String> {
        let mut rows: Vec<Row> = Vec::new();
        for file in &self.rows {
            rows.extend::<Vec<Row>>(json(&results.join(file))?);
        }
        let peers = Peers::parse(&text(&results.join("peers.jsonl"))?)?;
        let roof = results.join("roof.json");
        let roof: Option<Roof> = match roof.exists() {
            true => Some(json(&roof)?),
            false => None,
        };
        Ok(Report::new(rows, peers, roof))
    }
}

/// A page with the contents of its blocks: those between `<!-- bench-report: NAME -->` and the mark that ends it, or
/// without `: NAME` where the name is empty.
fn page(path: &Path, blocks: &[(&str, String)]) -> Result<Output, String> {
    let mut text = text(path)?;
    for (name, content) in blocks {
        let mark = match *name {
            "" => MARK.into(),
            name => format!("{MARK}: {name}"),
        };
        text = replace_section(&text, &mark, content)
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let marks = text.matches(&format!("<!-- {MARK}")).count();
    if marks != blocks.len() {
        let (path, known) = (path.display(), blocks.len());
        return Err(format!(
            "{path}: {marks} marks `<!-- {MARK}`, of which {known} are filled"
        ));
    }
    let path = path.to_owned();
    Ok(Output { path, text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        places: Places,
    }

    fn repository() -> Places {
        let mut places = Program::parse_from(["bench-report"]).places;
        places.root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        places
    }

    #[test]
    fn the_repository_says_what_its_records_give() {
        let outputs = repository().outputs().unwrap();
        assert!(outputs.len() >= 10, "six pages and four plots");
        let stale: Vec<String> = outputs.iter().filter_map(Output::stale).collect();
        assert!(
            stale.is_empty(),
            "not what bench-results/ gives (`cargo xtask bench-report` writes it anew):\n  {}",
            stale.join("\n  ")
        );
    }

    #[test]
    fn another_figure_in_a_block_is_found_by_its_line() {
        let outputs = repository().outputs().unwrap();
        let readme = outputs.iter().find(|o| o.path.ends_with("README.md"));
        let Output { path, text } = readme.unwrap();
        let mark = "<!-- bench-report: step -->\n";
        let place = text.find(mark).unwrap() + mark.len();
        let line = text[..place].lines().count() + 1;
        let changed = Output {
            path: path.clone(),
            text: format!("{}9{}", &text[..place], &text[place..]),
        };
        let said = changed.stale().unwrap();
        assert!(
            said.contains(&format!("README.md, line {line}, is")),
            "{said}"
        );
        let gone = Output {
            path: path.with_extension("absent"),
            text: String::new(),
        };
        assert!(gone.stale().unwrap().ends_with("cannot be read"));
    }

    #[test]
    fn a_mark_that_nothing_fills_is_refused() {
        let readme = repository().root.join("README.md");
        let filled = |name| page(&readme, &[(name, String::new())]).map(|_| ());
        assert!(filled("").unwrap_err().ends_with("of which 1 are filled"));
        let missing = filled("nowhere").unwrap_err();
        assert!(
            missing.contains("<!-- bench-report: nowhere --> is missing"),
            "{missing}"
        );
    }
}
