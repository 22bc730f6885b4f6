//! The oracle's time for a problem, and making problems short enough.

use super::spec::{By, Spec, What};
use crate::masked::Pattern;
use flash_dma_reference::Rng;

/// The approximate number of multiplications of the oracle for a problem, or their equivalent in time.
pub fn work(spec: &Spec) -> usize {
    let (heads, dim) = (spec.batch * spec.q_heads(), spec.head_dim + 24);
    let visible = |i: usize| match spec.causal {
        true => (i + 1 + spec.k_len)
            .saturating_sub(spec.q_len)
            .min(spec.k_len),
        false => spec.k_len,
    };
    let rows = || (0..spec.q_len).map(visible);
    if spec.large.is_some() && !matches!(spec.what, What::Decoded(_)) {
        // The logits of all pairs are rounded first.
        return heads * dim * 2 * spec.q_len * spec.k_len;
    }
    match &spec.what {
        What::Plain => heads * dim * rows().sum::<usize>(),
        What::Scored {
            window, selecting, ..
        } => {
            let window = window.unwrap_or(usize::MAX);
            let more = selecting.runners_up.unwrap_or(0) / 2;
            let pairs = |n: usize| n.min(window.saturating_add(more));
            // Finding the selection of a row, pair by pair if it is not by a window alone, and attending to it.
            let found = match spec.selecting() {
                Some(_) => 14,
                None => 1,
            };
            heads * rows().map(|n| found * n + pairs(n) * dim).sum::<usize>()
        }
        What::Masked { mask, .. } => {
            let share = match mask.map(|(_, pattern)| pattern) {
                None => 1.0,
                Some(Pattern::Random(density)) => density,
                Some(Pattern::Tiles(..)) => 0.5,
                Some(Pattern::Nothing) => 0.0,
                Some(Pattern::Columns(every)) => 1.0 / every as f64,
                Some(Pattern::Top(w) | Pattern::Window(w)) => {
                    (w as f64 / spec.k_len.max(1) as f64).min(1.0)
                }
            };
            let pairs = heads * rows().sum::<usize>();
            16 * pairs + (share * (pairs * dim) as f64) as usize
        }
        What::Decoded(decoding) => {
            let window = decoding.window().unwrap_or(usize::MAX);
            let step = |step: core::ops::Range<usize>| {
                let copied = spec.batch * spec.kv_heads * step.end * (40 + spec.head_dim);
                copied + heads * step.len() * step.end.min(window) * dim / 2
            };
            super::decode::steps(decoding).map(step).sum()
        }
    }
}

/// The fewest sequences and heads with which a problem still has its options.
fn least(spec: &Spec) -> [usize; 2] {
    match &spec.what {
        What::Decoded(decoding) if decoding.shared_pages() > 0 => [2, 1],
        What::Scored { selecting, .. } => match selecting.by {
            By::Rank(parts) if parts.narrower > 0 => [1, 2],
            _ => [1, 1],
        },
        _ => [1, 1],
    }
}

/// Makes a problem smaller until it is within the budget.
pub(super) fn fit(rng: &mut Rng, spec: &mut Spec, budget: usize) {
    let same_lengths = spec.q_len == spec.k_len;
    let more_queries = spec.q_len > spec.k_len;
    let (narrow, together) = (rng.below(4) > 0, rng.below(2) == 0);
    // The part that grows with the keys alone, which is negligible in a problem of few keys.
    let keys = 16 * spec.k_len * spec.head_dim;
    let [batch, heads] = least(spec);
    while spec.batch * spec.kv_heads * keys > 8 * budget {
        if spec.batch > batch {
            spec.batch -= 1;
        } else if spec.kv_heads > heads {
            spec.kv_heads -= 1;
        } else {
            break;
        }
    }
    loop {
        let work = work(spec);
        if work <= budget {
            return;
        }
        let fewer = |n: usize| (n * budget / work).max(n / 3).max(1);
        if spec.batch > batch {
            spec.batch -= 1;
            continue;
        }
        if spec.kv_heads > heads {
            spec.kv_heads -= 1;
            continue;
        }
        let (q_len, k_len) = (&mut spec.q_len, &mut spec.k_len);
        match &mut spec.what {
            What::Scored {
                window: Some(window),
                ..
            } if same_lengths && narrow && *window > 48 => {
                *window = fewer(*window).max(32);
            }
            What::Decoded(decoding) => {
                if decoding.pieces.len() > 1 {
                    decoding.pieces.pop();
                } else if decoding.pieces[0] > 1 {
                    decoding.pieces[0] /= 2;
                } else if decoding.prefill > 0 {
                    decoding.prefill /= 2;
                } else {
                    return;
                }
                *k_len = decoding.prefill + decoding.pieces.iter().sum::<usize>();
                *q_len = *k_len;
            }
            _ if same_lengths && together && *q_len > 16 => {
                let root = (budget as f64 / work as f64).sqrt().clamp(0.5, 0.99);
                *q_len = (*q_len as f64 * root) as usize;
                *k_len = *q_len;
            }
            _ if more_queries && (2..1024).contains(k_len) => {
                *k_len = fewer(*k_len);
                *q_len = (*q_len).min(4 * *k_len);
            }
            _ if *q_len > 1 => *q_len = fewer(*q_len),
            _ if *k_len > 1 => *k_len /= 2,
            _ => return,
        }
    }
}
