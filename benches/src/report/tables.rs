//! The book's tables of decoding, masks and the CPU engine.

use super::cases::{DECODINGS, MASKS};
use super::markdown::{ms, times_theirs};
use super::others::Others;
use crate::rows::DecodeRow;
use std::fmt::Write;

impl Others {
    /// The tables of all rows.
    #[must_use]
    pub fn tables(&self) -> String {
        self.decode_table() + &self.mask_table() + &self.cpu_table()
    }

    fn decode_table(&self) -> String {
        let mut text = String::from(
            "### Decoding\n\n\
             One token per step, if the row does not say otherwise; device time of a step in a row of 20, bf16, in\n\
             milliseconds; the peers are dense attention over the whole context. Appending a token to the cache is a\n\
             second call, in the last column.\n\n\
             | step | engine | ours | in a replayed graph | FlashAttention-2 | cuDNN | append |\n|---|---|---|---|---|---|---|\n",
        );
        for (name, what, _) in DECODINGS {
            let of = |phase: &str| {
                let is = |r: &&DecodeRow| r.workload == name && r.phase == phase;
                self.decode.iter().find(is)
            };
            let Some(row) = of("decode") else { continue };
            let peer = |peer| self.decoding(name, peer).map_or("–".into(), times_theirs);
            let dash = |x: Option<f64>| x.map_or("–".into(), ms);
            let _ = writeln!(
                text,
                "| {what} | {} | {} | {} | {} | {} | {} |",
                row.engine,
                ms(row.ms.median),
                dash(row.graph_ms.map(|m| m.median)),
                peer("flash"),
                peer("cudnn"),
                dash(of("append").map(|r| r.ms.median)),
            );
        }
        let origins = self.decode.iter().map(|r| (&r.device[..], &r.commit[..]));
        text + &origin(origins)
    }

    fn mask_table(&self) -> String {
        let mut text = String::from(
            "\n### Masks and biases\n\n\
             Milliseconds of device time, medians; causal, one sequence, H 32/8, D 128, bf16. A plan is built once per\n\
             mask and is not part of the times beside it. Backward includes the gradient of the bias. The peers ran in the same run.\n\n\
             | mask | plan | plan from ranges | forward | backward | peer | its forward | its backward |\n\
             |---|---|---|---|---|---|---|---|\n",
        );
        for m in &MASKS {
            let [plan, ranges, forward, backward] =
                ["plan", "plan-ranges", "forward", "backward"].map(|p| self.mask(m.case, p));
            let dash = |x: Option<f64>| x.map_or("–".into(), ms);
            let ours = [plan, ranges, forward, backward].map(dash).join(" | ");
            let against = |peer, phase, ours: Option<f64>| {
                let theirs = self.mask_peer(m.len, peer, phase);
                ours.zip(theirs).map_or("–".into(), times_theirs)
            };
            if m.peers.is_empty() {
                let _ = writeln!(text, "| {} | {ours} | – | – | – |", m.what);
            }
            for &peer in m.peers {
                let theirs = [
                    against(peer, "forward", forward),
                    against(peer, "backward", backward),
                ];
                let theirs = theirs.join(" | ");
                let _ = writeln!(text, "| {} | {ours} | {} | {theirs} |", m.what, peer.2);
            }
        }
        let origins = self.masks.iter().map(|r| (&r.device[..], &r.commit[..]));
        text + &origin(origins)
    }

    fn cpu_table(&self) -> String {
        let mut text = String::from(
            "\n### On a CPU\n\n\
             The CPU engine, selection included, beside the dense attention of Burn's Flex backend, which materialises\n\
             N×N; f32, milliseconds. Other programs ran on the machine; they disturb processor time less than wall time.\n\
             *Times as fast* is the median of five rounds' ratios.\n\n\
             | | wall time: ours | Flex | times as fast | processor time: ours | Flex | times as fast |\n\
             |---|---|---|---|---|---|---|\n",
        );
        let times = |x: f64| match x {
            x if x < 10.0 => format!("{x:.1}"),
            x => format!("{x:.0}"),
        };
        for phase in ["forward", "forward+backward"] {
            for r in self.cpu.rows.iter().filter(|r| r.phase == phase) {
                let _ = writeln!(
                    text,
                    "| {}, N {}, w {}, H {}, D {} | {} | {} | {} | {} | {} | {} |",
                    phase.replace('+', " and "),
                    r.n,
                    r.w,
                    r.heads,
                    r.d,
                    ms(r.ours_ms),
                    ms(r.flex_ms),
                    times(r.ratio),
                    ms(r.ours_cpu_ms),
                    ms(r.flex_cpu_ms),
                    times(r.cpu_ratio),
                );
            }
        }
        let (machine, threads, commit) = (&self.cpu.machine, self.cpu.threads, &self.cpu.commit);
        let _ = writeln!(
            text,
            "\nMeasured on {machine}, {threads} threads, commit {commit}."
        );
        text
    }
}

/// The distinct origins of the rows.
fn origin<'a>(rows: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut all: Vec<String> = rows
        .map(|(device, commit)| format!("{device}, commit {commit}"))
        .collect();
    all.sort();
    all.dedup();
    format!("\nMeasured on {}.\n", all.join("; "))
}
