//! Statistics of a selection together with its scores.

use crate::case::data;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::{Documents, Intervals, Selector, select};
use flash_dma_reference::Rng;

/// A selector's rule, in numbers.
#[derive(Clone, Debug)]
struct Rule {
    recent: usize,
    sinks: usize,
    /// Documents of one sequence; the rest of it is padding.
    documents: Vec<usize>,
}

/// The tie rate by definition: position by position, over the keys that compete there.
fn by_definition(rule: &Rule, scores: &[f32], live: impl Fn(usize, usize) -> bool) -> f64 {
    let (mut ties, mut positions, mut start) = (0, 0, 0);
    for len in &rule.documents {
        for position in start..start + len {
            let competes = |&key: &usize| {
                key + rule.recent <= position
                    && key >= start + rule.sinks
                    && scores[key] != f32::NEG_INFINITY
            };
            let keys = (start..=position).filter(competes);
            let (kept, left): (Vec<usize>, Vec<usize>) = keys.partition(|&key| live(position, key));
            // NaN ranks below every number.
            let rank = |key: &usize| match scores[*key].is_nan() {
                true => f32::NEG_INFINITY,
                false => scores[*key],
            };
            let Some(best) = left.iter().map(rank).reduce(f32::max) else {
                continue;
            };
            positions += 1;
            ties += u32::from(kept.iter().map(rank).reduce(f32::min) == Some(best));
        }
        start += len;
    }
    f64::from(ties) / f64::from(positions.max(1))
}

fn mask_of(intervals: &Intervals, len: usize) -> impl Fn(usize, usize) -> bool {
    let mask: Vec<bool> = intervals.as_mask(len).into_data().iter().collect();
    move |position, key| mask[position * len + key]
}

#[test]
fn the_tie_rate_is_that_of_the_definition() {
    let (device, len) = (Device::flex(), 60);
    let mut rng = Rng::new(7);
    let mut rates = Vec::new();
    for round in 0..120 {
        let window = 1 + rng.below(9);
        let recent = [0, rng.below(window + 1)][round % 2];
        let cut = rng.below(len);
        let rule = Rule {
            recent,
            sinks: rng.below(window - recent + 1),
            documents: match round % 3 {
                0 => vec![len],
                1 => vec![cut, len - cut],
                _ => vec![cut],
            },
        };
        // Few values, so that many tie; all of them once, so that none does.
        let values = [3, 8, 100_000][rng.below(3)];
        let mut scores: Vec<f32> = (0..len).map(|_| rng.below(values) as f32).collect();
        for special in [f32::NEG_INFINITY, f32::NAN, f32::NAN, -0.0] {
            scores[rng.below(len)] = special;
        }
        let tensor = Tensor::<3>::from_data(data(scores.clone(), [1, 1, len]), &device);
        let selector = Selector::top(window).recent(recent).sinks(rule.sinks);
        let selector = match round % 3 {
            0 => selector,
            1 => selector.documents(Documents::from_lengths([rule.documents.clone()])),
            _ => selector.documents(Documents::try_from_padded([cut], len).expect("it fits")),
        };
        let intervals = selector.select(tensor.clone());
        let rate = intervals.tie_rate(&tensor);
        let expected = by_definition(&rule, &scores, mask_of(&intervals, len));
        assert_eq!(rate, expected, "{rule:?} {scores:?}");
        rates.push(rate);
    }
    assert!(rates.contains(&0.0) && rates.iter().any(|&rate| rate > 0.5));
}

#[test]
fn equal_scores_tie_everywhere_and_different_ones_nowhere() {
    let device = Device::flex();
    let equal = Tensor::<3>::ones([2, 3, 40], &device);
    assert_eq!(select(equal.clone(), 8).tie_rate(&equal), 1.0);
    // No key is left out.
    assert_eq!(select(equal.clone(), 40).tie_rate(&equal), 0.0);
    let all = (0..240).map(|n| (n * 77 % 240) as f32);
    let different = Tensor::<3>::from_data(data(all, [2, 3, 40]), &device);
    assert_eq!(select(different.clone(), 8).tie_rate(&different), 0.0);
    // A window without places by rank has no threshold.
    let recents = Selector::top(8).recent(8).select(equal.clone());
    assert_eq!(recents.tie_rate(&equal), 0.0);
}

#[test]
#[should_panic(expected = "scores must have size 40 on axis 2")]
fn scores_of_other_keys_are_refused() {
    let equal = Tensor::<3>::ones([2, 3, 40], &Device::flex());
    let _ = select(equal.clone(), 8).tie_rate(&equal.narrow(2, 0, 39));
}
