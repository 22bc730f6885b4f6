//! The README's table: a few rows that say where the library stands, losing cases among them.

use super::join::Report;
use super::markdown::{beside, wrapped};
use super::others::{Others, Pair};
use crate::rows::Phase;
use crate::workloads::find;
use std::fmt::Write;

const CUDNN: &str = "sdpa-cudnn dense";
const FLASH: &str = "sdpa-flash dense";

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

/// The dense layers that the closing sentence is about, from the shortest to the longest, and the first sparse one.
const DENSE: [&str; 4] = [
    "layer-n4k-dense",
    "layer-n8k-dense",
    "layer-n16k-dense",
    "layer-n32k-dense",
];
const SHORT: &str = "layer-n4k-w2048";

/// The eight rows, and the range of dense attention.
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
        let pair = |phase| {
            let missing = || format!("no {phase:?} of {name}");
            layer(report, name, CUDNN, phase).ok_or_else(missing)
        };
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
    let _ = write!(text, "\n{}", wrapped(&dense(report)?, ""));
    Ok(text)
}

/// How dense attention, and sparse attention of a short sequence, stand to the peers.
fn dense(report: &Report) -> Result<String, String> {
    let range = |peer, phase| {
        let ratios = DENSE.iter().map(|name| ratio(report, name, peer, phase));
        let ratios = ratios.collect::<Result<Vec<f64>, String>>()?;
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        Ok::<_, String>(format!("{low:.2}× to {high:.2}×"))
    };
    let forward = [CUDNN, FLASH].map(|peer| range(peer, Phase::EndToEnd));
    let backward = [CUDNN, FLASH].map(|peer| range(peer, Phase::Backward));
    let ([cudnn, flash], [cudnn_back, flash_back]) = (forward, backward);
    let short = |phase| ratio(report, SHORT, CUDNN, phase);
    Ok(format!(
        "Dense attention with heads of 128 takes {} of cuDNN's time forward and {} backward at 4K to 32K tokens, and {} \
         and {} of FlashAttention-2's. Sparse attention with `w` 2048 takes {:.2}× and {:.2}× of cuDNN's at 4K.",
        cudnn?,
        cudnn_back?,
        flash?,
        flash_back?,
        short(Phase::EndToEnd)?,
        short(Phase::Backward)?
    ))
}

/// Our time over a peer's.
fn ratio(report: &Report, name: &str, peer: &str, phase: Phase) -> Result<f64, String> {
    let pair = layer(report, name, peer, phase);
    let (ours, theirs) = pair.ok_or_else(|| format!("no {phase:?} of {name} beside {peer}"))?;
    Ok(ours / theirs)
}

fn layer(report: &Report, name: &str, peer: &str, phase: Phase) -> Option<Pair> {
    let workload = find(name)?;
    let ours = report.best(workload, phase)?.ms.median;
    let theirs = report.dense(workload, peer, phase)?;
    Some((ours, theirs))
}

fn sum(a: Pair, b: Pair) -> Pair {
    (a.0 + b.0, a.1 + b.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::join::Peers;
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

    /// Against 2 ms of every peer.
    #[test]
    fn the_range_of_dense_attention_is_that_of_all_lengths() {
        let names = DENSE.into_iter().chain([SHORT]).zip(1..);
        let row = |(name, ms): (&str, usize), phase: &str| {
            let ms = format!(r#"{{"median":{ms},"q1":1,"q3":1,"runs":1}}"#);
            format!(
                r#"{{"workload":"{name}","phase":"{phase}","ms":{ms},"tflops":null,"io_mib":0,"workspace_mib":0,
                "device":"d","commit":"c"}}"#
            )
        };
        let rows = names.flat_map(|row_of| ["end-to-end", "backward"].map(|p| row(row_of, p)));
        let rows = rows.collect::<Vec<String>>().join(",");
        let rows = serde_json::from_str(&format!("[{rows}]")).unwrap();
        let mut peers = String::new();
        for length in [4096, 8192, 16384, 32768] {
            for (peer, phase) in [
                (CUDNN, "fwd"),
                (CUDNN, "bwd"),
                (FLASH, "fwd"),
                (FLASH, "bwd"),
            ] {
                let case = format!("B1 H32/8 Q{length} K{length} D128");
                let _ = writeln!(
                    peers,
                    r#"{{"case":"{case}","peer":"{peer}","phase":"{phase}","ms":2.0}}"#
                );
            }
        }
        let report = Report::new(rows, Peers::parse(&peers).unwrap(), None);
        let said = dense(&report).unwrap();
        assert_eq!(said.matches("0.50× to 2.00×").count(), 4, "{said}");
        assert!(
            said.ends_with("takes 2.50× and 2.50× of cuDNN's at 4K."),
            "{said}"
        );
    }
}
