//! How long the first call of a process takes: the book's table, and the README's sentence.

use super::markdown::wrapped;
use serde::Deserialize;
use std::fmt::Write;

/// `first-call.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct FirstCalls {
    commit: String,
    date: String,
    device: String,
    command: String,
    case: String,
    rows: Vec<FirstCall>,
}

/// A fresh process with some of the caches filled.
#[derive(Clone, Debug, Deserialize)]
struct FirstCall {
    driver_cache: bool,
    cubecl_cache: bool,
    /// Selection and forward pass.
    forward_seconds: f64,
    /// These and the backward pass.
    with_backward_seconds: f64,
}

impl FirstCalls {
    /// The README's sentence: nothing is kept.
    ///
    /// # Errors
    ///
    /// If there is no such row.
    pub fn sentence(&self) -> Result<String, String> {
        let nothing = |row: &&FirstCall| !row.driver_cache && !row.cubecl_cache;
        let row = self.rows.iter().find(nothing);
        let row = row.ok_or("no first call without a cache")?;
        let text = format!(
            "On CUDA the first call of a process compiles its kernels: {:.1} s for selection and forward pass on an \
             {}, {:.1} s with the backward pass. The kernels [can be cached](book/src/engines.md#the-first-call).",
            row.forward_seconds, self.device, row.with_backward_seconds
        );
        Ok(wrapped(&text, ""))
    }

    /// The book's table.
    #[must_use]
    pub fn table(&self) -> String {
        let Self {
            commit,
            date,
            device,
            command,
            case,
            rows,
        } = self;
        let origin = format!(
            "First calls in a fresh process: {case} on an {device}, `{command}` ({date}, `{commit}`)."
        );
        let mut text = wrapped(&origin, "");
        text += "\n| | selection and forward | … and backward |\n|---|---|---|\n";
        for row in rows {
            let kept = match (row.driver_cache, row.cubecl_cache) {
                (false, false) => "nothing kept",
                (true, false) => "the driver's cache alone",
                (false, true) => "CubeCL's cache alone",
                (true, true) => "both",
            };
            let (forward, backward) =
                (shown(row.forward_seconds), shown(row.with_backward_seconds));
            let _ = writeln!(text, "| {kept} | {forward} | {backward} |");
        }
        text
    }
}

/// `2.00 s`, `16 ms`.
fn shown(seconds: f64) -> String {
    match seconds < 0.1 {
        true => format!("{:.0} ms", 1e3 * seconds),
        false => format!("{seconds:.2} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = r#"{"commit":"c","date":"d","device":"GPU","command":"bench","case":"N 4K","rows":[
        {"driver_cache":true,"cubecl_cache":true,"forward_seconds":0.016,"with_backward_seconds":0.5},
        {"driver_cache":false,"cubecl_cache":false,"forward_seconds":2.0,"with_backward_seconds":4.12}]}"#;

    #[test]
    fn the_sentence_is_of_empty_caches_and_the_table_of_all() {
        let calls: FirstCalls = serde_json::from_str(RECORD).unwrap();
        let sentence = calls.sentence().unwrap().replace('\n', " ");
        assert!(sentence.contains("2.0 s for selection"), "{sentence}");
        assert!(sentence.contains("4.1 s with"), "{sentence}");
        let table = calls.table();
        assert!(table.contains("| both | 16 ms | 0.50 s |"), "{table}");
        assert!(
            table.contains("| nothing kept | 2.00 s | 4.12 s |"),
            "{table}"
        );
        let mut filled = calls;
        filled.rows.truncate(1);
        assert!(filled.sentence().is_err());
    }
}
