//! What the book says of training steps beside its tables: first steps, autotune, and the step as it was.

use super::markdown::{range, wrapped};
use super::step_tables::{how, sequences};
use super::steps::{StepRow, Steps, Told};

impl Steps {
    /// How long the first step of a process takes, and a step of a build with autotune.
    ///
    /// # Errors
    ///
    /// If there is no first step of one kind.
    pub fn first_steps(&self) -> Result<String, String> {
        let setting = self.long()?;
        let (empty, filled): (Vec<&StepRow>, Vec<&StepRow>) =
            self.ours(setting).partition(|row| row.empty_cache);
        let (empty, filled) = (seconds(&empty)?, seconds(&filled)?);
        let first = format!(
            "The first step of a process ({}, {}) took {} s with an empty cache of compiled kernels and {} s with a \
             filled one, over all runs.",
            sequences(setting),
            how(setting),
            range(&empty, 0, " to "),
            range(&filled, 1, " to ")
        );
        Ok(format!("{}\n{}", wrapped(&first, ""), self.autotuned()?))
    }

    fn autotuned(&self) -> Result<String, String> {
        let setting = self.long()?;
        let rows: Vec<&StepRow> = (self.tuned.iter())
            .filter(|row| row.setting() == setting)
            .collect();
        let commit = rows.first().and_then(|row| row.commit.as_ref());
        let commit = commit.ok_or("no training step with autotune")?;
        let steps: Vec<f64> = rows.iter().map(|row| row.step_ms.median).collect();
        let beside = &self.told()?.autotune;
        let text = format!(
            "With Burn's autotune, which the tables are without, the same step took {} ms (`{commit}`), on another \
             host than the {:.1} ms without it (`{}`); its first step took {} s with a filled cache, and {:.0} s from \
             an empty one while {}.",
            range(&steps, 1, " to "),
            beside.without_ms,
            beside.without_commit,
            range(&seconds(&rows)?, 1, " to "),
            beside.first_step_from_empty_s,
            beside.beside
        );
        Ok(wrapped(&text, ""))
    }

    /// The step before this crate had norms and products of its own.
    ///
    /// # Errors
    ///
    /// If it is not recorded.
    pub fn before(&self) -> Result<String, String> {
        let before = &self.told()?.before;
        let text = format!(
            "Before this crate had its own norms and products (`{}`), the same step took {:.0} ms: norms and rotary \
             encoding {:.0}, matrix products {:.0}.",
            before.commit, before.step_ms, before.norms_ms, before.products_ms
        );
        Ok(wrapped(&text, ""))
    }

    fn told(&self) -> Result<&Told, String> {
        let told = self.told.as_ref();
        told.ok_or_else(|| "step.json lacks what the log tells".into())
    }
}

fn seconds(rows: &[&StepRow]) -> Result<Vec<f64>, String> {
    let first = rows.iter().filter_map(|row| row.first_step_ms);
    let seconds: Vec<f64> = first.map(|ms| ms / 1e3).collect();
    match seconds.is_empty() {
        true => Err("no first step of a process".into()),
        false => Ok(seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_filled_caches_are_told_apart_and_autotune_from_both() {
        let row = |first: f64, rest: &str| {
            format!(
                r#"{{"run":1,"commit":"c","implementation":"burn","what":"model","layers":8,"d_model":1024,"seq":32768,
                "batch":1,"window":2048,"checkpoint":false,"parameters":1,"peak_bytes":1,"profile":null,
                "first_step_ms":{first},{rest}"step_ms":{{"median":76.04,"q1":1,"q3":1,"runs":1}}}}"#
            )
        };
        let rows = [
            row(15200.0, r#""empty_cache":true,"#),
            row(300.0, ""),
            row(800.0, ""),
            row(420.0, r#""autotune":true,"#),
        ];
        let told = r#"{"before":{"commit":"b","step_ms":924,"norms_ms":404,"products_ms":381},
            "autotune":{"first_step_from_empty_s":34.9,"beside":"others compiled","without_ms":78.1,"without_commit":"d"}}"#;
        let record = format!(
            r#"{{"device":"a GPU","told":{told},"rows":[{}]}}"#,
            rows.join(",")
        );
        let steps = Steps::parse(&record).unwrap();
        let text = steps.first_steps().unwrap().replace('\n', " ");
        assert!(
            text.contains(
                "took 15 s with an empty cache of compiled kernels and 0.3 to 0.8 s with"
            ),
            "{text}"
        );
        assert!(
            text.contains("took 76.0 ms (`c`)") && text.contains("took 0.4 s with a filled"),
            "{text}"
        );
        assert!(
            text.contains("35 s from an empty one while others compiled."),
            "{text}"
        );
        assert!(steps.before().unwrap().contains("924 ms"));
        let untold = record.replace("\"told\"", "\"untold\"");
        assert!(Steps::parse(&untold).unwrap().before().is_err());
    }
}
