//! The record of a run, by engine, type and pass.

use super::draw::Profile;
use super::options::CHOICES;
use super::run::{Outcome, Passed, passes};
use super::spec::{Spec, What};
use crate::engines::Pass;
use core::fmt;
use flash_dma_problem::ElementType;
use std::collections::BTreeMap;

/// The record of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Problems all of whose outputs were compared and right.
    pub passed: u64,
    /// Number of these with 1024 keys or more, in which the keys attended to fill four tiles of 64 or more.
    pub long: u64,
    /// Number of these that were right only by further yardsticks.
    pub looked_twice: u64,
    /// Problems that failed.
    pub failed: u64,
    /// Problems that do not count, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Problems that passed, by pass, implementation (empty if the engine has only one) and element type.
    pub cells: BTreeMap<Cell, u64>,
    /// Problems that passed, by the name of each [option](CHOICES).
    pub options: BTreeMap<String, u64>,
}

/// A pass, its implementation, and the name of the element type.
pub type Cell = (Pass, String, String);

/// A problem that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The problem.
    pub spec: Spec,
    /// The fault.
    pub what: String,
}

impl Record {
    /// Adds a problem.
    pub fn add(&mut self, spec: &Spec, outcome: &Outcome) {
        match outcome {
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(why) => *self.skipped.entry((*why).into()).or_default() += 1,
            Outcome::Passed(Passed {
                passes,
                is_long,
                looked_twice,
            }) => {
                self.passed += 1;
                self.long += u64::from(*is_long);
                self.looked_twice += u64::from(*looked_twice);
                for &(pass, by) in passes {
                    let cell = (pass, by.into(), spec.element.to_string());
                    *self.cells.entry(cell).or_default() += 1;
                }
                for option in CHOICES.iter().filter(|option| (option.is_in)(spec)) {
                    *self.options.entry(option.name.into()).or_default() += 1;
                }
            }
        }
    }

    /// Adds another record.
    pub fn join(&mut self, other: Self) {
        self.passed += other.passed;
        self.long += other.long;
        self.looked_twice += other.looked_twice;
        self.failed += other.failed;
        add(&mut self.skipped, other.skipped);
        add(&mut self.cells, other.cells);
        add(&mut self.options, other.options);
    }

    /// Problems that counted.
    pub fn counted(&self) -> u64 {
        self.passed + self.failed
    }

    /// The share of long problems, of those that passed.
    pub fn long_share(&self) -> f64 {
        self.long as f64 / self.passed.max(1) as f64
    }

    /// The cells with fewer problems than requested, recorded or of the types and operations that the engine has.
    pub fn wanting(&self, least: u64, elements: &[ElementType], decodes: bool) -> Vec<String> {
        let few = |(pass, by, element): &Cell, count| format!("{pass:?} {by} {element}: {count}");
        let mut wanting: Vec<String> = (self.cells.iter())
            .filter(|&(_, &count)| count < least)
            .map(|(cell, count)| few(cell, *count))
            .collect();
        let attention = passes(&What::Plain).iter();
        let masked = [Pass::MaskedForward, Pass::MaskedBackward];
        let decode = decodes.then_some(Pass::Decode);
        for &pass in attention.chain(&masked).chain(&decode) {
            for element in elements.iter().map(ToString::to_string) {
                let mut cells = self.cells.keys();
                if !cells.any(|cell| cell.0 == pass && cell.2 == element) {
                    wanting.push(few(&(pass, String::new(), element), 0));
                }
            }
        }
        wanting
    }

    /// Problems that passed with an option.
    pub fn count(&self, option: &str) -> u64 {
        self.options.get(option).copied().unwrap_or(0)
    }

    /// The options that problems of the profile have, with fewer problems than requested.
    pub fn rare(&self, least: u64, profile: &Profile) -> Vec<String> {
        let drawn = CHOICES.iter().filter(|option| (option.is_drawn)(profile));
        let counted = drawn.map(|option| (option.name, self.count(option.name)));
        let rare = counted.filter(|&(_, count)| count < least);
        rare.map(|(name, count)| format!("{name}: {count}"))
            .collect()
    }

    /// The record that was written as [`json`](Self::json); `None` if it is malformed.
    pub fn of_json(json: &serde_json::Value) -> Option<Self> {
        let count = |name: &str| json[name].as_u64();
        let failed = count("wrong")?;
        let counts = |name: &str| -> Option<BTreeMap<String, u64>> {
            let counts = json[name].as_object()?.iter();
            let counts = counts.map(|(name, count)| Some((name.clone(), count.as_u64()?)));
            counts.collect()
        };
        let cells = json["cells"].as_array()?.iter().map(|cell| {
            let text = |name: &str| cell[name].as_str();
            let mut passes = Pass::ALL.into_iter();
            let pass = passes.find(|pass| text("pass") == Some(&format!("{pass:?}")))?;
            let cell_of = (pass, text("served_by")?.into(), text("element")?.into());
            Some((cell_of, cell["problems"].as_u64()?))
        });
        Some(Self {
            passed: count("problems")? - failed,
            long: count("long")?,
            looked_twice: count("further_yardsticks")?,
            failed,
            skipped: counts("not_counted")?,
            cells: cells.collect::<Option<_>>()?,
            options: counts("options")?,
        })
    }

    /// The record as JSON, with a description of the run.
    pub fn json(&self, run: &[(&str, serde_json::Value)]) -> serde_json::Value {
        let cell = |((pass, by, element), count): (&Cell, &u64)| {
            serde_json::json!({
                "pass": format!("{pass:?}"),
                "served_by": by,
                "element": element,
                "problems": count,
            })
        };
        let mut json = serde_json::json!({
            "problems": self.counted(),
            "wrong": self.failed,
            "long": self.long,
            "long_share": self.long_share(),
            "further_yardsticks": self.looked_twice,
            "not_counted": self.skipped,
            "cells": self.cells.iter().map(cell).collect::<Vec<_>>(),
            "options": self.options,
        });
        for (name, value) in run {
            json[*name] = value.clone();
        }
        json
    }
}

fn add<K: Ord>(counts: &mut BTreeMap<K, u64>, others: BTreeMap<K, u64>) {
    for (key, count) in others {
        *counts.entry(key).or_default() += count;
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:<10} {:<5} {:>9}",
            "pass", "served by", "type", "problems"
        )?;
        for ((pass, by, element), count) in &self.cells {
            writeln!(
                f,
                "{:<16} {by:<10} {element:<5} {count:>9}",
                format!("{pass:?}")
            )?;
        }
        for (option, count) in &self.options {
            writeln!(f, "{option:<34} {count:>9}")?;
        }
        writeln!(
            f,
            "{} problems, {} wrong; {:.1} % with 1024 keys or more over four tiles or more; {} right by further \
             yardsticks",
            self.counted(),
            self.failed,
            100.0 * self.long_share(),
            self.looked_twice
        )?;
        for (why, count) in &self.skipped {
            writeln!(f, "not counted: {count}, {why}")?;
        }
        Ok(())
    }
}
