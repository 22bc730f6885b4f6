//! Tables, and their places in the documents.

use super::join::Report;
use crate::rows::Phase;
use crate::workloads::{WORKLOADS, Workload};
use flash_dma_reference::generate::Scores;
use std::fmt::Write;

/// The dense peers, as the peers' file calls them and as the tables do.
const PEERS: [(&str, &str); 2] = [
    ("sdpa-flash dense", "FlashAttention-2"),
    ("sdpa-cudnn dense", "cuDNN"),
];

const NOTE: &str = "\
Milliseconds of device time, medians; causal, one sequence, independent scores. Ours is selection and attention
together, sparse or dense as the row says; the peers are dense attention in PyTorch on the same shape. A ratio
below 1 means that ours is faster.
";

impl Report {
    /// The short tables: ours against the dense peers, with independent scores.
    fn summary(&self) -> String {
        let forward = self.beside_peers("Forward", &[Phase::EndToEnd]);
        let backward = self.beside_peers("Backward", &[Phase::Backward]);
        format!("{NOTE}\n{forward}{backward}{}", self.sources())
    }

    /// The sum of some phases' times beside the dense peers' sum, wherever there is a peer.
    fn beside_peers(&self, title: &str, phases: &[Phase]) -> String {
        let names: Vec<&str> = PEERS.iter().map(|(_, name)| *name).collect();
        let mut text = format!("| {title} | engine | ours | {} |\n", names.join(" | "));
        let _ = writeln!(text, "|---|---|---|{}", "---|".repeat(names.len()));
        let head = text.len();
        for workload in WORKLOADS.iter().filter(|w| w.scores == Scores::Normal) {
            let ours: Option<Vec<_>> = phases.iter().map(|&p| self.best(workload, p)).collect();
            let Some([.., last]) = ours.as_deref() else {
                continue;
            };
            let time: f64 = ours.iter().flatten().map(|row| row.ms.median).sum();
            let peers = PEERS.map(|(peer, _)| {
                let times = phases.iter().map(|&p| self.dense(workload, peer, p));
                times.sum::<Option<f64>>()
            });
            if peers.iter().all(Option::is_none) {
                continue;
            }
            let (what, engine) = (described(workload), &last.engine);
            let _ = write!(text, "| {what} | {engine} | {} |", ms(time));
            for peer in peers {
                let _ = match peer {
                    Some(peer) => write!(text, " {} |", times_theirs((time, peer))),
                    None => write!(text, " – |"),
                };
            }
            text.push('\n');
        }
        if text.len() == head {
            return String::new();
        }
        text + "\n"
    }

    /// Every row of `bench`.
    #[must_use]
    pub fn full(&self) -> String {
        let mut text = self.summary();
        let both = [Phase::EndToEnd, Phase::Backward];
        let _ = write!(
            text,
            "\n{}",
            self.beside_peers("Forward and backward, added up", &both)
        );
        if let Some(roof) = &self.roof {
            let _ = writeln!(
                text,
                "\nThe roof is what PyTorch reaches on this device: {:.0} TFLOP/s in bf16, {:.0} in f16 and {:.0} in f32\n\
                 (matrix products), {:.0} GB/s (a copy). \"Of the roof\" is the time it would allow for the active\n\
                 pairs and one pass over the tensors, over the time measured.",
                roof.bf16_tflops, roof.f16_tflops, roof.f32_tflops, roof.copy_gbs
            );
        }
        let phases = [
            (Phase::Select, "Selection"),
            (
                Phase::SelectRunnersUp,
                "Second selection, of a quarter of the window as runners-up",
            ),
            (Phase::Lists, "Key lists, a part of the forward pass"),
            (Phase::Forward, "Forward, given the intervals"),
            (
                Phase::ForwardResidual,
                "Forward with the residual, as in training",
            ),
            (Phase::EndToEnd, "Selection and forward"),
            (Phase::Backward, "Backward"),
            (
                Phase::BackwardResidual,
                "Backward with the residual, as in training",
            ),
            (
                Phase::BackwardRunnersUp,
                "Backward with the residual and runners-up, as in training",
            ),
            (
                Phase::BackwardLeaveOneOut,
                "The same with what kept keys are worth",
            ),
            (
                Phase::BackwardDeterministic,
                "Backward, sums in a fixed order",
            ),
            (Phase::Cold, "First call of a process"),
        ];
        for (phase, title) in phases {
            if self.phase(phase).next().is_none() {
                continue;
            }
            let _ = writeln!(text, "\n### {title}\n");
            if phase == Phase::Cold {
                text += "Select, forward and backward from the host: generating, compiling, loading, running. A\n\
                         program times its workloads in the order of the table, so later ones reuse kernels.\n\n";
            }
            text += "| workload | engine | ms | quartiles | TFLOP/s | of the roof | host µs | peak MiB, of it workspace |\n\
                     |---|---|---|---|---|---|---|---|\n";
            for (workload, row) in self.phase(phase) {
                let or_dash = |x: Option<f64>, digits: usize| {
                    x.map_or("–".into(), |x| format!("{x:.digits$}"))
                };
                let _ = writeln!(
                    text,
                    "| {} | {} | {} | {}–{} | {} | {} | {} | {}, {:.0} |",
                    described(workload),
                    row.engine,
                    ms(row.ms.median),
                    ms(row.ms.q1),
                    ms(row.ms.q3),
                    or_dash(row.tflops, 1),
                    row.roof_percent.map_or("–".into(), |p| format!("{p:.1} %")),
                    or_dash(row.host_us, 0),
                    or_dash(row.peak_mib, 0),
                    row.workspace_mib,
                );
            }
        }
        text
    }

    fn sources(&self) -> String {
        format!("Measured on {}.\n", self.origins().join("; "))
    }
}

/// `N 32K, w 2048, H 32/8, D 128, bf16`, and the kind of scores if they are not independent.
fn described(w: &Workload) -> String {
    let window = w.window.map_or("dense".into(), |w| format!("w {w}"));
    let n = match w.len {
        n if n % 1024 == 0 => format!("{}K", n / 1024),
        n => n.to_string(),
    };
    let scores = match w.scores {
        Scores::Normal => String::new(),
        other => format!(", scores {}", format!("{other:?}").to_lowercase()),
    };
    let queries = match w.q_len {
        q if q == w.len => String::new(),
        1 => ", 1 query".into(),
        q => format!(", {q} queries"),
    };
    format!(
        "N {n}{queries}, {window}, H {}/{}, D {}, {}{scores}",
        w.q_heads, w.kv_heads, w.head_dim, w.element
    )
}

/// `0.622 / 0.985 (0.63×)`: our time, a peer's, and their quotient.
pub(super) fn beside((ours, theirs): (f64, f64)) -> String {
    format!("{} / {}", ms(ours), times_theirs((ours, theirs)))
}

/// `0.985 (0.63×)`: a peer's time, and ours over it.
pub(super) fn times_theirs((ours, theirs): (f64, f64)) -> String {
    format!("{} ({:.2}×)", ms(theirs), ours / theirs)
}

/// Three significant digits.
pub(super) fn ms(x: f64) -> String {
    let digits = (2 - x.abs().max(1e-9).log10().floor() as i32).clamp(0, 4);
    format!("{x:.0$}", digits as usize)
}

/// Text on lines of at most 115 characters; those behind the first begin with `indent`. No line breaks at a no-break
/// space, which becomes a plain one.
pub(super) fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        let length = line.chars().count() + 1 + word.chars().count();
        match line.trim().is_empty() {
            true => *line += word,
            false if length <= 115 => *line += &format!(" {word}"),
            false => lines.push(format!("{indent}{word}")),
        }
    }
    lines.join("\n").replace('\u{a0}', " ") + "\n"
}

/// Replaces the text between the marks `<!-- name -->` and `<!-- /name -->`.
///
/// # Errors
///
/// When a mark is missing.
pub fn replace_section(page: &str, name: &str, content: &str) -> Result<String, String> {
    let (open, close) = (format!("<!-- {name} -->"), format!("<!-- /{name} -->"));
    let missing = |mark: &str| format!("the mark {mark} is missing");
    let (before, rest) = page.split_once(&open).ok_or_else(|| missing(&open))?;
    let (_, after) = rest.split_once(&close).ok_or_else(|| missing(&close))?;
    Ok(format!(
        "{before}{open}\n{}\n{close}{after}",
        content.trim_end()
    ))
}

/// Each value once, in the order of the first ones.
pub(super) fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for value in values {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all
}

/// The least and the greatest of some numbers with `between` between them, e.g. `15 to 24`, or one number where both are
/// the same in so many digits.
pub(super) fn range(numbers: &[f64], digits: usize, between: &str) -> String {
    let least = numbers.iter().copied().fold(f64::MAX, f64::min);
    let most = numbers.iter().copied().fold(f64::MIN, f64::max);
    let (least, most) = (format!("{least:.digits$}"), format!("{most:.digits$}"));
    match least == most {
        true => most,
        false => format!("{least}{between}{most}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_section_changes() {
        let page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n";
        let new = replace_section(page, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n");
        assert_eq!(replace_section(&new, "x", "new").unwrap(), new);
        assert!(
            replace_section(page, "y", "new")
                .unwrap_err()
                .contains("<!-- y -->")
        );
    }

    #[test]
    fn lines_are_filled_and_no_longer_than_allowed() {
        let text = format!("- {}", "word ".repeat(50));
        let lines = wrapped(&text, "  ");
        let lengths: Vec<usize> = lines.lines().map(|line| line.chars().count()).collect();
        assert_eq!(lengths, [111, 111, 31]);
        assert_eq!(lines.split_whitespace().count(), 51);
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")));
        let number = format!("{}20\u{a0}600", "word ".repeat(22));
        assert!(wrapped(&number, "").ends_with("word\n20 600\n"));
    }

    #[test]
    fn times_have_three_digits() {
        let shown = [0.03968, 0.2394, 7.7196, 29.618, 262.96, 1170.4].map(ms);
        assert_eq!(shown, ["0.0397", "0.239", "7.72", "29.6", "263", "1170"]);
    }

    #[test]
    fn equal_ends_are_one_number() {
        assert_eq!(range(&[0.36, 0.4], 1, " to "), "0.4");
        assert_eq!(range(&[23.8, 15.3, 20.0], 0, " to "), "15 to 24");
    }
}
