//! Scores to intervals: the positions that attend to each key.

use crate::check;
use crate::view::View;
use flash_dma_problem::{AttentionError, Interval, KeptKeys};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Selects the keys: writes the positions that attend to each key, those at which it is among the last `kept.recent`
/// keys, or among the `kept.best` older ones of greatest score. A number stands for that many best keys.
///
/// `scores` is `[batch, kv_heads, k_len]`; `intervals` has the same shape, is contiguous and overwritten. A tie goes to
/// the lower index, NaN ranks below every number, a key of score −∞ is never attended to and takes no place among the
/// best. The intervals depend on the scores and `kept` only ([`Interval`]). O(k_len · log best) time per row; rows run
/// in parallel.
///
/// # Errors
///
/// [`AttentionError::ZeroWindow`], [`AttentionError::Strides`], [`AttentionError::Buffer`], or
/// [`AttentionError::TooLarge`] for more than `i32::MAX` keys. Nothing is written then.
pub fn select(
    scores: View<'_, f32, 3>,
    kept: impl Into<KeptKeys>,
    intervals: &mut [Interval],
) -> Result<(), AttentionError> {
    let kept = kept.into();
    check::select(&scores, kept, intervals)?;
    let [_, heads, k_len] = scores.shape;
    if k_len > 0 {
        let of_rows = intervals.par_chunks_exact_mut(k_len).enumerate();
        of_rows.for_each(|(row, intervals)| {
            select_row(scores.row(row / heads, row % heads), kept, intervals);
        });
    }
    Ok(())
}

/// The intervals of the keys that are kept for their ranks, prolonged by the number of recent keys.
fn select_row(scores: &[f32], kept: KeptKeys, intervals: &mut [Interval]) {
    let k_len = scores.len();
    let shown = |score: f32| score != f32::NEG_INFINITY;
    match kept.best {
        best if best >= k_len => {
            for (j, (interval, &score)) in intervals.iter_mut().zip(scores).enumerate() {
                let end = if shown(score) { k_len } else { j };
                *interval = interval_of(j, end);
            }
        }
        0 => (intervals.iter_mut().enumerate()).for_each(|(j, to)| *to = interval_of(j, j)),
        best => select_best(scores, best, intervals),
    }
    if kept.recent > 0 {
        for (interval, &score) in intervals.iter_mut().zip(scores) {
            if shown(score) {
                interval.end = kept.until(interval.end as usize, k_len) as u32;
            }
        }
    }
}

/// One pass over the positions with a heap of the `window` best keys seen so far, the worst on top:
/// O(k_len log window) time, O(window) memory. A key that finds the heap full of better ones is
/// never kept; one that is pushed out ends at the position of the key that replaces it.
fn select_best(scores: &[f32], window: usize, intervals: &mut [Interval]) {
    let k_len = scores.len();
    let mut best = BinaryHeap::with_capacity(window);
    for (j, &score) in scores.iter().enumerate() {
        intervals[j] = interval_of(j, j);
        if score == f32::NEG_INFINITY {
            continue;
        }
        let quality = quality(score, j);
        if best.len() < window {
            best.push(Reverse(quality));
        } else if let Some(mut worst) = best.peek_mut()
            && worst.0 < quality
        {
            let evicted = key_of(worst.0);
            *worst = Reverse(quality);
            intervals[evicted].end = j as u32;
        } else {
            continue;
        }
        intervals[j].end = k_len as u32;
    }
}

pub(crate) fn interval_of(first: usize, end: usize) -> Interval {
    Interval {
        first: first as u32,
        end: end as u32,
    }
}

/// A number that orders keys as they are selected: greater is better. The score is in the upper half,
/// NaN below every number and -0 equal to +0; a tie goes to the lower index.
pub(crate) fn quality(score: f32, key: usize) -> u64 {
    // Adding +0 turns -0 into +0 and changes nothing else.
    let bits = (score + 0.0).to_bits();
    let ordered = if score.is_nan() {
        0
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    u64::from(ordered) << 32 | u64::from(!(key as u32))
}

fn key_of(quality: u64) -> usize {
    !(quality as u32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_reference::Rng;
    use flash_dma_reference::compose::attended;

    fn check(scores: &[f32], kept: KeptKeys) {
        let mut intervals = vec![Interval { first: 7, end: 7 }; scores.len()];
        let row = View::contiguous(scores, [1, 1, scores.len()]);
        select(row, kept, &mut intervals).unwrap();
        for (j, interval) in intervals.iter().enumerate() {
            assert_eq!(interval.first as usize, j);
            assert!(interval.end >= interval.first && interval.end as usize <= scores.len());
        }
        let wide: Vec<f64> = scores.iter().map(|&z| z.into()).collect();
        let rule = kept.into();
        for position in 0..scores.len() {
            let attends = |&j: &usize| intervals[j].contains(position as i64);
            let got: Vec<usize> = (0..scores.len()).filter(attends).collect();
            let expected = attended(&wide, &rule, position);
            assert_eq!(
                got, expected,
                "{kept:?}, position {position}, scores {scores:?}"
            );
        }
    }

    #[test]
    fn every_position_attends_to_its_best_and_its_last_keys() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let (least, most) = (f32::MIN, f32::MAX);
        let special = [nan, -nan, -inf, inf, 0.0, -0.0, least, most, 1e-42, -1e-42];
        let mut rng = Rng::new(1);
        for _ in 0..300 {
            let mut score = || match rng.below(3) {
                0 => special[rng.below(special.len())],
                1 => rng.below(4) as f32 - 2.0,
                _ => rng.uniform() as f32 - 0.5,
            };
            let mut scores: Vec<f32> = (0..40).map(|_| score()).collect();
            scores.truncate(rng.below(40) + 1);
            for best in [1, 2, 3, scores.len(), usize::MAX, rng.below(40) + 1] {
                check(&scores, best.into());
                for recent in [1, rng.below(40) + 1, scores.len(), usize::MAX] {
                    check(&scores, KeptKeys { best, recent });
                }
            }
            check(&scores, KeptKeys { best: 0, recent: 3 });
        }
    }
}
