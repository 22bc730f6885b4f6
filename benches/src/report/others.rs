//! The measurements of programs other than `bench`: decoding, masks and the CPU engine, each beside its peers.

use super::cases::{DECODINGS, MASKS};
use super::files::{json, json_lines};
use crate::rows::DecodeRow;
use crate::stats::Millis;
use serde::Deserialize;
use std::path::Path;

/// A row of `peers-decode.jsonl`: dense attention of one token.
#[derive(Clone, Debug, Deserialize)]
struct DecodePeer {
    #[serde(default)]
    case: String,
    #[serde(default)]
    peer: String,
    /// Time of one call in a sequence of 20, as for our rows.
    ms_row: Option<f64>,
}

/// A row of `masks.json`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct MaskRow {
    pub(super) case: String,
    pub(super) phase: String,
    pub(super) ms: Millis,
    pub(super) device: String,
    pub(super) commit: String,
}

/// A row of `peers-masks.jsonl`.
#[derive(Clone, Debug, Deserialize)]
struct MaskPeer {
    #[serde(default, rename = "N")]
    len: usize,
    #[serde(default)]
    peer: String,
    #[serde(default)]
    mask: String,
    #[serde(default)]
    phase: String,
    ms: Option<f64>,
}

/// `cpu-vs-flex.json`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct CpuRows {
    pub(super) machine: String,
    pub(super) threads: usize,
    pub(super) commit: String,
    pub(super) rows: Vec<CpuRow>,
}

/// A window of a length: medians, and the median of the rounds' ratios.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct CpuRow {
    pub(super) n: usize,
    pub(super) w: usize,
    pub(super) heads: String,
    pub(super) d: usize,
    pub(super) phase: String,
    pub(super) ours_ms: f64,
    pub(super) flex_ms: f64,
    pub(super) ratio: f64,
    pub(super) ours_cpu_ms: f64,
    pub(super) flex_cpu_ms: f64,
    pub(super) cpu_ratio: f64,
}

/// Decoding, masks and the CPU.
#[derive(Clone, Debug)]
pub struct Others {
    pub(super) decode: Vec<DecodeRow>,
    decode_peers: Vec<DecodePeer>,
    pub(super) masks: Vec<MaskRow>,
    mask_peers: Vec<MaskPeer>,
    pub(super) cpu: CpuRows,
}

/// Our time and a peer's.
pub(super) type Pair = (f64, f64);

impl Others {
    /// Reads the files of a GPU's and a CPU's folder.
    ///
    /// # Errors
    ///
    /// The name of a file that is missing or malformed.
    pub fn read(gpu: &Path, cpu: &Path) -> Result<Self, String> {
        Ok(Self {
            decode: json(&gpu.join("decode.json"))?,
            decode_peers: json_lines(&gpu.join("peers-decode.jsonl"))?,
            masks: json(&gpu.join("masks.json"))?,
            mask_peers: json_lines(&gpu.join("peers-masks.jsonl"))?,
            cpu: json(&cpu.join("cpu-vs-flex.json"))?,
        })
    }

    /// A decode step, and a peer's over the same context.
    pub(super) fn decoding(&self, name: &str, peer: &str) -> Option<Pair> {
        let row = |r: &&DecodeRow| r.workload == name && r.phase == "decode";
        let ours = self.decode.iter().find(row)?.ms.median;
        let (_, _, case) = DECODINGS.iter().find(|(n, ..)| *n == name)?;
        let is = |p: &&DecodePeer| p.case == *case && p.peer == peer;
        let theirs = self.decode_peers.iter().filter(is).find_map(|p| p.ms_row)?;
        Some((ours, theirs))
    }

    /// A phase under a mask.
    pub(super) fn mask(&self, case: &str, phase: &str) -> Option<f64> {
        let is = |r: &&MaskRow| r.case == case && r.phase == phase;
        self.masks.iter().find(is).map(|r| r.ms.median)
    }

    /// A peer's time; the peer as in the table of masks.
    pub(super) fn mask_peer(
        &self,
        len: usize,
        (peer, mask, _): (&str, &str, &str),
        phase: &str,
    ) -> Option<f64> {
        // One of the scripts abbreviates the names of the phases.
        let short = if phase == "forward" { "fwd" } else { "bwd" };
        let is = |p: &&MaskPeer| {
            let same = p.len == len && p.peer == peer && p.mask == mask;
            same && (p.phase == phase || p.phase == short)
        };
        self.mask_peers.iter().filter(is).find_map(|p| p.ms)
    }

    /// Our time and that of the first peer.
    pub(super) fn masked(&self, case: &str, phase: &str) -> Option<Pair> {
        let mask = MASKS.iter().find(|m| m.case == case)?;
        let theirs = self.mask_peer(mask.len, *mask.peers.first()?, phase)?;
        Some((self.mask(case, phase)?, theirs))
    }

    /// Processor time of the CPU engine, and of Flex's dense attention.
    pub(super) fn cpu(&self, n: usize, w: usize, phase: &str) -> Option<Pair> {
        let is = |r: &&CpuRow| r.n == n && r.w == w && r.phase == phase;
        let row = self.cpu.rows.iter().find(is)?;
        Some((row.ours_cpu_ms, row.flex_cpu_ms))
    }
}
