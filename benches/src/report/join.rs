//! Our rows beside the peers' of the same shape.

use crate::roof::Roof;
use crate::rows::{Phase, Row};
use crate::workloads::{WORKLOADS, Workload};
use flash_dma_problem::ElementType;
use serde::Deserialize;

/// A peer's time, as `peers.py` writes it. A peer that failed has an `error` instead of a time, and the
/// first line of a file names the device.
#[derive(Clone, Debug, Deserialize)]
pub struct Peer {
    /// The shape: `B1 H32/8 Q4096 K4096 D128 w2048`.
    #[serde(default)]
    pub case: String,
    /// The implementation.
    #[serde(default)]
    pub peer: String,
    /// `fwd`, `bwd` or `select`.
    #[serde(default)]
    pub phase: String,
    /// Median.
    pub ms: Option<f64>,
}

/// The rows of a peers' file.
#[derive(Clone, Debug, Default)]
pub struct Peers(Vec<Peer>);

impl Peers {
    /// Reads JSON lines.
    ///
    /// # Errors
    ///
    /// The number and the defect of the first line that is not a row.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().enumerate();
        let rows = lines
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(n, line)| {
                serde_json::from_str(line).map_err(|e| format!("line {}: {e}", n + 1))
            });
        Ok(Self(rows.collect::<Result<_, _>>()?))
    }

    /// The time of a dense peer on the shape of a workload; peers are timed in bf16. Dense attention has no window, so
    /// the window of the peer's case does not matter.
    #[must_use]
    pub fn dense(&self, workload: &Workload, peer: &str, phase: Phase) -> Option<f64> {
        if workload.element != ElementType::Bf16 {
            return None;
        }
        let shape = shape(workload);
        let phase = match phase {
            Phase::Forward | Phase::EndToEnd => "fwd",
            Phase::Backward => "bwd",
            Phase::Cold
            | Phase::Select
            | Phase::SelectRunnersUp
            | Phase::Lists
            | Phase::ForwardResidual
            | Phase::BackwardResidual
            | Phase::BackwardRunnersUp
            | Phase::BackwardLeaveOneOut
            | Phase::BackwardDeterministic => return None,
        };
        let is = |p: &&Peer| {
            let case = p
                .case
                .rsplit_once(" w")
                .map_or(&p.case[..], |(shape, _)| shape);
            case == shape && p.peer == peer && p.phase == phase
        };
        self.0.iter().filter(is).find_map(|p| p.ms)
    }
}

fn shape(w: &Workload) -> String {
    let (b, q_heads, kv_heads, d) = (w.batch, w.q_heads, w.kv_heads, w.head_dim);
    format!("B{b} H{q_heads}/{kv_heads} Q{} K{} D{d}", w.q_len, w.len)
}

/// Everything that was measured on a device.
#[derive(Debug)]
pub struct Report {
    rows: Vec<(&'static Workload, Row)>,
    peers: Peers,
    pub(super) roof: Option<Roof>,
}

impl Report {
    /// Sorts rows into the order of the workload table. Of two rows for the same workload, phase and engine, the later
    /// one is kept; a row of an unknown workload is dropped.
    #[must_use]
    pub fn new(rows: Vec<Row>, peers: Peers, roof: Option<Roof>) -> Self {
        let mut sorted: Vec<(&'static Workload, Row)> = Vec::new();
        for workload in WORKLOADS {
            for row in rows.iter().filter(|row| row.workload == workload.name) {
                let mut row = row.clone();
                row.complete(workload, roof.as_ref());
                let same = |(_, other): &(_, Row)| {
                    other.workload == row.workload
                        && other.phase == row.phase
                        && other.engine == row.engine
                };
                match sorted.iter().position(same) {
                    Some(at) => sorted[at].1 = row,
                    None => sorted.push((workload, row)),
                }
            }
        }
        Self {
            rows: sorted,
            peers,
            roof,
        }
    }

    /// The rows of one phase with their workloads, in the order of the workload table.
    pub fn phase(&self, phase: Phase) -> impl Iterator<Item = (&'static Workload, &Row)> {
        let rows = self.rows.iter().filter(move |(_, row)| row.phase == phase);
        rows.map(|(workload, row)| (*workload, row))
    }

    /// The workloads that were measured in a phase, each once, however many engines ran it.
    pub fn workloads(&self, phase: Phase) -> impl Iterator<Item = &'static Workload> {
        let measured =
            move |w: &&'static Workload| self.phase(phase).any(|(o, _)| o.name == w.name);
        WORKLOADS.iter().filter(measured)
    }

    /// The fastest engine's row of a workload.
    #[must_use]
    pub fn best(&self, workload: &Workload, phase: Phase) -> Option<&Row> {
        let rows = self.phase(phase).filter(|(w, _)| w.name == workload.name);
        let by_time = |a: &&Row, b: &&Row| a.ms.median.total_cmp(&b.ms.median);
        rows.map(|(_, row)| row).min_by(by_time)
    }

    /// As [`Peers::dense`].
    #[must_use]
    pub fn dense(&self, workload: &Workload, peer: &str, phase: Phase) -> Option<f64> {
        self.peers.dense(workload, peer, phase)
    }

    /// The devices and commits of the rows.
    #[must_use]
    pub fn origins(&self) -> Vec<String> {
        let mut all: Vec<String> = self
            .rows
            .iter()
            .map(|(_, row)| format!("{}, commit {}", row.device, row.commit))
            .collect();
        all.sort();
        all.dedup();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::find;

    const PEERS: &str = r#"{"device": "a GPU", "torch": "2"}
{"case": "B1 H32/8 Q4096 K4096 D128 w2048", "peer": "sdpa-flash dense", "phase": "fwd", "ms": 0.5}
{"case": "B1 H32/8 Q4096 K4096 D128 w2048", "peer": "sdpa-flash dense", "phase": "bwd", "error": "no memory"}
"#;

    fn row(workload: &str, engine: &str, ms: f64) -> Row {
        let ms = crate::stats::Millis::of(vec![ms]);
        Row {
            workload: workload.into(),
            phase: Phase::Forward,
            engine: engine.into(),
            ms,
            host_us: None,
            tflops: None,
            bytes: None,
            roof_percent: None,
            io_mib: 3.0,
            workspace_mib: 1.0,
            peak_mib: None,
            device: "a GPU".into(),
            commit: "c".into(),
        }
    }

    #[test]
    fn a_dense_peer_serves_every_window_of_its_shape() {
        let peers = Peers::parse(PEERS).unwrap();
        for name in ["layer-n4k-w2048", "layer-n4k-dense"] {
            let workload = find(name).unwrap();
            let time = peers.dense(workload, "sdpa-flash dense", Phase::EndToEnd);
            assert_eq!(time, Some(0.5));
            assert_eq!(
                peers.dense(workload, "sdpa-flash dense", Phase::Backward),
                None
            );
        }
        let longer = find("layer-n8k-w2048").unwrap();
        assert_eq!(
            peers.dense(longer, "sdpa-flash dense", Phase::Forward),
            None
        );
        assert!(Peers::parse("{").unwrap_err().starts_with("line 1"));
    }

    #[test]
    fn the_later_row_of_an_engine_stays_and_the_fastest_engine_is_the_best() {
        let rows = vec![
            row("layer-n4k-dense", "mma", 4.0),
            row("layer-n4k-dense", "portable", 5.0),
            row("layer-n4k-dense", "mma", 6.0),
            row("unknown", "mma", 1.0),
        ];
        let report = Report::new(rows, Peers::default(), None);
        assert_eq!(report.phase(Phase::Forward).count(), 2);
        assert_eq!(report.workloads(Phase::Forward).count(), 1);
        assert_eq!(report.workloads(Phase::Backward).count(), 0);
        let best = report.best(find("layer-n4k-dense").unwrap(), Phase::Forward);
        assert_eq!(best.unwrap().engine, "portable");
        assert_eq!(best.unwrap().peak_mib, Some(4.0));
        // 4 * 128 operations for each of 32 * 4096 * 4097 / 2 pairs in 5 ms.
        let tflops = best.unwrap().tflops.unwrap();
        assert!((tflops - 27.49).abs() < 0.01, "{tflops}");
    }
}
