//! The selections of other methods, pair by pair.

use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::{Intervals, Selector};
use tutorial::selectors::{
    delayed_eviction, picture, streaming, window_then_global, windows_per_head,
};

const KEYS: usize = 40;

fn scores() -> Tensor<3> {
    let normal = Distribution::Normal(0.0, 1.0);
    Tensor::random([1, 2, KEYS], normal, &Device::flex())
}

/// Checks every pair of position and key of every head.
fn check(intervals: &Intervals, attends: impl Fn(usize, usize, usize) -> bool) {
    let mask: Vec<bool> = intervals.as_mask(KEYS).into_data().iter().collect();
    for (at, is_live) in mask.into_iter().enumerate() {
        let (head, position, key) = (at / KEYS / KEYS, at / KEYS % KEYS, at % KEYS);
        let expected = key <= position && attends(head, position, key);
        let place = format!("head {head}, position {position}, key {key}");
        assert_eq!(is_live, expected, "{place}");
    }
}

#[test]
fn streaming_keeps_sinks_and_the_last_keys() {
    let intervals = streaming(scores(), 9, 2);
    check(&intervals, |_, position, key| key < 2 || key + 7 > position);
    let stats = intervals.stats();
    let rest = stats.recent + stats.sinks - 1.0;
    assert!(rest.abs() < 1e-12, "{stats:?}");
}

#[test]
fn evicted_keys_live_for_the_delay() {
    let scores = scores();
    let values: Vec<f32> = scores.to_data().iter().collect();
    let intervals = delayed_eviction(scores.lower_elem(0.3), 5).expect("good ends");
    check(&intervals, |head, position, key| {
        values[head * KEYS + key] >= 0.3 || position < key + 5
    });
}

#[test]
fn admitted_keys_stay_behind_the_window() {
    let scores = scores();
    let values: Vec<f32> = scores.to_data().iter().collect();
    let intervals = window_then_global(scores, 6, 0.5).expect("good ends");
    check(&intervals, |head, position, key| {
        position < key + 6 || values[head * KEYS + key] > 0.5
    });
}

#[test]
fn every_head_has_its_window() {
    let intervals = windows_per_head(scores(), vec![3, 11], 2);
    let mask: Vec<bool> = intervals.as_mask(KEYS).into_data().iter().collect();
    for (at, row) in mask.chunks(KEYS).enumerate() {
        let (head, position) = (at / KEYS, at % KEYS);
        let kept = row.iter().filter(|&&is_live| is_live).count();
        assert_eq!(kept, [3, 11][head].min(position + 1));
        assert!(row[position], "the last key is recent");
    }
    assert_eq!(intervals.max_live(), 11);
}

#[test]
fn a_picture_has_a_bar_per_live_key() {
    let svg = picture(&Selector::top(5).select(scores()), 1, 0);
    let live = Selector::top(KEYS).select(scores());
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    let full = picture(&live, 1, 0);
    assert_eq!(full.matches("<rect").count(), KEYS + 1);
    assert!(svg.matches("<rect").count() > 5);
}
