//! How long the first commands of a newcomer take: the README's table.

use super::markdown::wrapped;
use serde::Deserialize;
use std::fmt::Write;

/// `commands.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Commands {
    commit: String,
    date: String,
    device: String,
    rows: Vec<Timed>,
}

/// A command in a clone that has never been built.
#[derive(Clone, Debug, Deserialize)]
struct Timed {
    command: String,
    /// Of what it runs; `None` if it builds on the way.
    build_seconds: Option<f64>,
    /// From the command to its end.
    seconds: f64,
}

impl Commands {
    /// The README's table.
    #[must_use]
    pub fn table(&self) -> String {
        let Self {
            commit,
            date,
            device,
            rows,
        } = self;
        let origin = format!(
            "From a clean clone, with the crates downloaded ({device}; {date}, `{commit}`):"
        );
        let mut text = wrapped(&origin, "");
        text += "\n| | builds | in all |\n|---|---|---|\n";
        for row in rows {
            let build = row.build_seconds.map_or_else(|| "–".into(), shown);
            let _ = writeln!(
                text,
                "| `{}` | {build} | {} |",
                row.command,
                shown(row.seconds)
            );
        }
        text
    }
}

/// `63 s`, `2 min 9 s`, from ten minutes on `33 min`.
fn shown(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match (whole / 60, whole % 60) {
        (0, seconds) => format!("{seconds} s"),
        (1..10, _) if whole < 90 => format!("{whole} s"),
        (minutes @ 1..10, seconds) => format!("{minutes} min {seconds} s"),
        (minutes, seconds) => format!("{} min", minutes + u64::from(seconds >= 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_one_says_them() {
        let said = [8.4, 81.6, 128.6, 600.0, 1998.3, 2010.0].map(shown);
        let expected = ["8 s", "82 s", "2 min 9 s", "10 min", "33 min", "34 min"];
        assert_eq!(said, expected);
    }

    #[test]
    fn a_command_has_a_row() {
        let record = r#"{"commit":"c","date":"d","device":"CPU","rows":[
            {"command":"demo","build_seconds":63,"seconds":128.6},{"command":"test","seconds":1998.3}]}"#;
        let commands: Commands = serde_json::from_str(record).unwrap();
        let table = commands.table();
        assert!(table.contains("| `demo` | 63 s | 2 min 9 s |\n"), "{table}");
        assert!(table.contains("| `test` | – | 33 min |\n"), "{table}");
        assert!(table.contains("(CPU; d, `c`)"), "{table}");
    }
}
