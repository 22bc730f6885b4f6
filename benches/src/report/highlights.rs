//! The README's table: a few rows that say where the library stands, losing cases among them.

use super::join::Report;
use super::markdown::beside;
use super::others::{Others, Pair};
use crate::rows::Phase;
use crate::workloads::find;
use std::fmt::Write;

const NOTE: &str = "\
Milliseconds, ours / theirs, and the ratio of the two: below 1× flash-dma is faster. Medians; causal, one sequence and
bf16 unless the row says otherwise; `w` is how many keys a query keeps. Selection is included; building the sliding
window's plan, once per mask, and appending the decoded token are not. Forward and backward on the GPU are timed apart
and added. The CPU row is processor time.
";

/// The rows of `bench`, against cuDNN's dense attention: workload and description.
const LAYERS: [(&str, &str); 5] = [
    ("layer-n8k-w2048", "8K tokens, w 2048, 32/8 heads of 128"),
    ("layer-n32k-w2048", "32K tokens, w 2048, 32/8 heads of 128"),
    (
        "layer-n128k-w2048",
        "128K tokens, w 2048, 32/8 heads of 128",
    ),
    (
        "layer-n16k-dense",
        "16K tokens, **dense**, 32/8 heads of 128",
    ),
    ("small-n32k-w1024", "32K tokens, w 1024, 2/1 heads of 64"),
];

/// The eight rows.
///
/// # Errors
///
/// The name of a row that was not measured: none is left out silently.
pub fn highlights(report: &Report, others: &Others) -> Result<String, String> {
    let mut text =
        format!("{NOTE}\n| | against | forward | forward and backward |\n|---|---|---|---|\n");
    let mut row = |what: &str, peer: &str, forward: Pair, both: Option<Pair>| {
        let both = both.map_or("–".into(), beside);
        let _ = writeln!(text, "| {what} | {peer} | {} | {both} |", beside(forward));
    };
    for (name, what) in LAYERS {
        let pair = |phase| layer(report, name, phase).ok_or(format!("no {phase:?} of {name}"));
        let (forward, backward) = (pair(Phase::EndToEnd)?, pair(Phase::Backward)?);
        row(what, "cuDNN, dense", forward, Some(sum(forward, backward)));
    }
    let window = "n32k-window1024";
    let masked = |phase| {
        let missing = || format!("no {phase} of {window}");
        others.masked(window, phase).ok_or_else(missing)
    };
    let (forward, backward) = (masked("forward")?, masked("backward")?);
    row(
        "32K tokens, sliding window of 1024, 32/8 heads of 128",
        "FlexAttention",
        forward,
        Some(sum(forward, backward)),
    );
    let step = "layer-b8-w2048-c128k";
    row(
        "one token after 128K, 8 sequences, w 2048, 32/8 heads of 128",
        "cuDNN, dense",
        others
            .decoding(step, "cudnn")
            .ok_or_else(|| format!("no decoding of {step}"))?,
        None,
    );
    let cpu = |phase| {
        let missing = || format!("no {phase} of 4096 tokens on the CPU");
        others.cpu(4096, 1024, phase).ok_or_else(missing)
    };
    row(
        "CPU, 4K tokens, w 1024, 8/2 heads of 64, f32",
        "Burn Flex, dense",
        cpu("forward")?,
        Some(cpu("forward+backward")?),
    );
    Ok(text)
}

fn layer(report: &Report, name: &str, phase: Phase) -> Option<Pair> {
    let workload = find(name)?;
    let ours = report.best(workload, phase)?.ms.median;
    let theirs = report.dense(workload, "sdpa-cudnn dense", phase)?;
    Some((ours, theirs))
}

fn sum(a: Pair, b: Pair) -> Pair {
    (a.0 + b.0, a.1 + b.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Peers;
    use std::path::Path;

    #[test]
    fn the_committed_measurements_have_the_eight_rows_and_a_missing_one_is_named() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench-results");
        let read = |file: &str| std::fs::read_to_string(results.join("h200").join(file)).unwrap();
        let rows = serde_json::from_str(&read("wgmma.json")).unwrap();
        let others = Others::read(&results.join("h200"), &results.join("cpu")).unwrap();
        let peers = || Peers::parse(&read("peers.jsonl")).unwrap();
        let table = highlights(&Report::new(rows, peers(), None), &others).unwrap();
        assert_eq!(table.matches("\n| ").count(), 9, "a head and eight rows");

        let nothing = Report::new(Vec::new(), peers(), None);
        assert_eq!(
            highlights(&nothing, &others).unwrap_err(),
            "no EndToEnd of layer-n8k-w2048"
        );
    }
}
