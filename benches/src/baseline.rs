//! A gate for time: rows compared with those of an earlier run.

use crate::Result;
use crate::stats::Millis;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;

/// How much more than the baseline's a median may be.
const ALLOWED: f64 = 0.05;

/// Fields that are no settings: which build, how often, and the engine, as a slower one in place of a fast one is a fault.
const NOT_SETTINGS: [&str; 7] = [
    "commit", "date", "engine", "run", "runs", "versions", "warm_up",
];

/// Ends of the names of measured numbers.
const MEASURED: [&str; 9] = [
    "_us",
    "_ms",
    "_mib",
    "_percent",
    "_per_second",
    "bytes",
    "error",
    "seconds",
    "tflops",
];

/// Rows of an earlier run.
#[derive(Clone, Debug)]
pub struct Baseline(Vec<Value>);

impl Baseline {
    /// The rows of a file.
    pub fn read(path: &str) -> std::result::Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        Self::of(&text).map_err(|error| error.to_string())
    }

    /// Rows of a text: an array of objects, one that `rows` names, or an object per line.
    fn of(text: &str) -> serde_json::Result<Self> {
        let rows = match serde_json::from_str(text) {
            Ok(Value::Array(rows)) => rows,
            Ok(Value::Object(mut file)) => match file.remove("rows") {
                Some(Value::Array(rows)) => rows,
                _ => vec![Value::Object(file)],
            },
            _ => (text.lines())
                .map(serde_json::from_str)
                .collect::<serde_json::Result<_>>()?,
        };
        Ok(Self(rows))
    }

    /// Compares times with those of the same settings and device, of which the last counts, and prints how they differ.
    ///
    /// A time is slower if its median is more than 5 % above the baseline's, and its lower quartile above the baseline's upper
    /// one, so that their spreads do not meet.
    ///
    /// # Errors
    ///
    /// If a time is slower, or none can be compared.
    pub fn compare(&self, rows: &[Value]) -> Result {
        let before: BTreeMap<String, Millis> = self.0.iter().flat_map(named).collect();
        let (mut compared, mut alone, mut slower) = (0, 0, String::new());
        for (name, now) in rows.iter().flat_map(named) {
            let Some(then) = before.get(&name) else {
                alone += 1;
                continue;
            };
            compared += 1;
            let more = now.median / then.median - 1.0;
            let [was, is, percent] = [then.median, now.median, 100.0 * more];
            let line = format!("{name} {was:.4} → {is:.4} ({percent:+.1} %)");
            println!("{line}");
            if more > ALLOWED && now.q1 > then.q3 {
                let _ = write!(slower, "\n{line}");
            }
        }
        println!("times compared with the baseline: {compared}; times that it has not: {alone}");
        match (compared, slower.is_empty()) {
            (0, _) => Err("the baseline has no row of these settings on this device".into()),
            (_, true) => Ok(()),
            (_, false) => Err(format!("slower than the baseline by more than 5 %:{slower}").into()),
        }
    }
}

/// The times of a row, each with the row's settings as the first part of its name.
fn named(row: &Value) -> impl Iterator<Item = (String, Millis)> {
    let settings = settings(row);
    let times = times(row).into_iter();
    times.map(move |(name, time)| (format!("{settings}: {name}"), time))
}

/// The times of a row, at any depth, by name.
fn times(row: &Value) -> Vec<(String, Millis)> {
    let mut found = Vec::new();
    for (name, value) in fields(row) {
        match Millis::deserialize(value) {
            Ok(time) => found.push((name.clone(), time)),
            Err(_) => {
                let below = times(value).into_iter();
                found.extend(below.map(|(of, time)| (format!("{name}.{of}"), time)));
            }
        }
    }
    found
}

/// Settings of a row: its texts, numbers and switches that are on, without those that are measured or name the build.
fn settings(row: &Value) -> String {
    let said = fields(row).filter(|(name, value)| {
        let scalar = value.is_string() || value.is_number() || **value == Value::Bool(true);
        let measured = MEASURED.iter().any(|end| name.ends_with(end));
        scalar && !measured && !NOT_SETTINGS.contains(&name.as_str())
    });
    let mut said: Vec<String> = said
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    said.sort();
    said.join(", ")
}

fn fields(row: &Value) -> impl Iterator<Item = (&String, &Value)> {
    row.as_object().into_iter().flat_map(Map::iter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(phase: &str, sample: [f64; 5]) -> Value {
        json!({
            "workload": "n32k", "phase": phase, "device": "H200", "ms": Millis::of(sample.to_vec()),
            "host_us": sample[0], "bytes": 7, "commit": format!("{sample:?}"), "window": null,
        })
    }

    #[test]
    fn a_slower_kernel_fails_and_noise_does_not() {
        let baseline = [
            row("forward", [1.0, 1.01, 1.0, 1.02, 0.99]),
            row("backward", [2.0, 2.6, 2.0, 2.4, 2.0]),
        ];
        let earlier = Baseline(baseline.to_vec());
        let check = |rows: &[Value]| earlier.compare(rows);
        assert!(check(&baseline).is_ok());
        // 4 % more, and 10 % more of a time that varies by 20.
        let noisy = [
            row("forward", [1.04; 5]),
            row("backward", [2.2, 2.1, 2.2, 2.7, 2.2]),
        ];
        assert!(check(&noisy).is_ok());
        let faster = [row("forward", [0.5; 5])];
        assert!(check(&faster).is_ok());
        let slow = [row("forward", [1.07; 5]), noisy[1].clone()];
        let error = check(&slow).expect_err("7 % more").to_string();
        assert!(error.contains("\"forward\""), "{error}");
        assert!(error.contains("1.0000 → 1.0700 (+7.0 %)"), "{error}");
        assert!(!error.contains("backward"), "{error}");
    }

    #[test]
    fn times_are_found_at_any_depth() {
        let token =
            |ms| json!({"prompt": 64, "token_ms": {"queued": Millis::of(vec![ms]), "same": true}});
        let baseline = Baseline(vec![token(1.0)]);
        assert!(baseline.compare(&[token(1.0)]).is_ok());
        let error = baseline.compare(&[token(2.0)]).expect_err("twice as long");
        assert!(error.to_string().contains("token_ms.queued"), "{error}");
    }

    #[test]
    fn rows_of_another_device_or_setting_are_not_compared() {
        let own = row("forward", [1.0; 5]);
        let baseline = Baseline(vec![own.clone()]);
        for (field, value) in [("device", json!("H100")), ("dropout", json!(0.5))] {
            let mut other = row("forward", [9.0; 5]);
            other[field] = value;
            assert!(baseline.compare(std::slice::from_ref(&other)).is_err());
            assert!(baseline.compare(&[other, own.clone()]).is_ok());
        }
    }

    #[test]
    fn a_slower_engine_in_place_of_a_fast_one_fails() {
        let [mut before, mut now] = [row("forward", [1.0; 5]), row("forward", [3.0; 5])];
        before["engine"] = "wgmma".into();
        now["engine"] = "portable".into();
        assert!(Baseline(vec![before]).compare(&[now]).is_err());
    }

    #[test]
    fn every_kind_of_file_is_read() {
        let rows = [row("forward", [1.0; 5]), row("backward", [2.0; 5])];
        let line = |row: &Value| row.to_string() + "\n";
        for text in [
            json!(rows).to_string(),
            json!({"date": "2026-11-30", "rows": rows}).to_string(),
            rows.iter().map(line).collect(),
        ] {
            assert_eq!(Baseline::of(&text).expect("it is JSON").0, rows);
        }
        let one = Baseline::of(&line(&rows[0]));
        assert_eq!(one.expect("it is JSON").0, rows[..1]);
        assert!(Baseline::of("no JSON").is_err());
    }
}
