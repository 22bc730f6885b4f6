//! `cargo xtask mutants`: breaks the code in one small place at a time, and reports which test notices.
//!
//! All mutants of `tests/mutants.txt` are built into one copy of the workspace, each behind a guard that the
//! environment variable `FLASH_DMA_MUTANT` opens: one build is enough for all of them. Kernels are expanded in the
//! process that runs them, so the same guard chooses there, too.

mod copy;
mod cuda;
mod run;
mod table;

use crate::process::{Result, root, write_file};
use crate::setup;
use run::{End, Programs};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use table::Mutant;

/// The requested options.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    list: bool,
    cuda: bool,
    record: Option<PathBuf>,
    names: Vec<String>,
}

impl Options {
    fn parse(options: &[String]) -> Result<Self> {
        let mut parsed = Self::default();
        let mut rest = options.iter();
        while let Some(option) = rest.next() {
            match option.as_str() {
                "--list" => parsed.list = true,
                "--cuda" => parsed.cuda = true,
                "--record" => {
                    let path = rest.next().ok_or("`--record` needs a file")?;
                    parsed.record = Some(root().join(path));
                }
                other if other.starts_with('-') => return Err(format!("unknown option `{other}`")),
                name => parsed.names.push(name.to_owned()),
            }
        }
        Ok(parsed)
    }
}

/// The mismatches between a checkout and the table of mutants, for the house rules.
pub(crate) fn faults(root: &Path) -> Vec<String> {
    match table::load(root) {
        Ok(mutants) => copy::faults(root, &mutants),
        Err(fault) => vec![fault],
    }
}

/// Runs all mutants, or those with the given names.
///
/// # Errors
/// When a mutant survives unexpectedly, does not apply or does not build, or when a test fails without any mutant.
pub fn run(options: &[String]) -> Result {
    let options = Options::parse(options)?;
    let all = table::load(&root())?;
    if let Some(unknown) = (options.names.iter()).find(|name| all.iter().all(|m| m.name != **name))
    {
        return Err(format!("no mutant is called `{unknown}`"));
    }
    let wanted = |m: &&Mutant| {
        m.cuda == options.cuda && (options.names.is_empty() || options.names.contains(&m.name))
    };
    if options.list {
        for mutant in &all {
            let on = if mutant.cuda { "cuda" } else { "cpu" };
            println!("{:<40} {on:<5} {}", mutant.name, mutant.breaks);
        }
        return Ok(());
    }
    let mutants: Vec<&Mutant> = all.iter().filter(wanted).collect();
    setup::run(setup::Needs::BUILD)?;
    copy::update(&all)?;
    if options.cuda {
        return cuda::pack(&mutants);
    }
    println!("mutants: building {} mutants", all.len());
    let programs = run::build()?;
    check_without(&programs, &mutants)?;

    let mut rows = Vec::new();
    let mut unexpected = Vec::new();
    for mutant in mutants {
        let start = Instant::now();
        let end = run::kill(&programs, mutant)?;
        let fate = match &end {
            End::Failed(test) => format!("killed by `{test}`"),
            End::Crashed(status) => format!("killed: the tests crashed ({status})"),
            End::TimedOut => "killed by the time limit".into(),
            End::Passed if !mutant.lives.is_empty() => format!("survives: {}", mutant.lives),
            End::Passed => "SURVIVED".into(),
        };
        println!(
            "{:<40} {fate} ({:.1} s)",
            mutant.name,
            start.elapsed().as_secs_f64()
        );
        if (end == End::Passed) == mutant.lives.is_empty() {
            unexpected.push(mutant.name.clone());
        }
        rows.push((mutant, fate));
    }
    let killed = rows
        .iter()
        .filter(|(_, fate)| fate.starts_with("killed"))
        .count();
    println!("mutants: {killed} of {} killed", rows.len());
    if let Some(path) = options.record {
        write_file(&path, record(&rows))?;
    }
    match unexpected.as_slice() {
        [] => Ok(()),
        names => Err(format!("not as the table says: {}", names.join(", "))),
    }
}

/// Runs the filters of all mutants without a mutant: a test that fails anyway proves nothing.
fn check_without(programs: &Programs, mutants: &[&Mutant]) -> Result {
    let mut filters: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (program, of_one) in mutants.iter().flat_map(|m| &m.kill) {
        let all = filters.entry(program).or_default();
        all.extend(of_one.iter().cloned());
    }
    for (program, mut filters) in filters {
        filters.sort();
        filters.dedup();
        let start = Instant::now();
        match run::tests(programs, program, &filters, None, None)? {
            End::Passed => {}
            other => return Err(format!("without a mutant `{program}` ends so: {other:?}")),
        }
        println!(
            "mutants: `{program}` passes without any ({:.1} s)",
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// The outcome as a table of Markdown.
fn record(rows: &[(&Mutant, String)]) -> String {
    let mut text =
        String::from("| mutant | what it breaks | where | outcome |\n|---|---|---|---|\n");
    for (mutant, fate) in rows {
        let file = mutant
            .file
            .trim_start_matches("crates/")
            .replace("/src/", "/");
        text += &format!(
            "| {} | {} | `{file}` | {fate} |\n",
            mutant.name, mutant.breaks
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_switches_a_file_and_names() {
        let parse = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|&o| o.into()).collect();
            Options::parse(&options)
        };
        let options = parse(&["a", "--cuda", "--record", "x.md", "b"]).unwrap();
        assert_eq!(options.names, ["a", "b"]);
        assert!(options.cuda && !options.list);
        assert_eq!(options.record, Some(root().join("x.md")));
        assert!(parse(&["--record"]).is_err() && parse(&["--all"]).is_err());
    }

    #[test]
    fn every_mutant_of_the_table_applies() {
        assert_eq!(faults(&root()), Vec::<String>::new());
    }
}
