//! Dropout in the oracle: the effect of its masks on outputs and gradients.

use crate::problem;
use flash_dma_problem::{AttentionOptions, Dropout};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Forward, Inputs};

fn inputs(dropout: Option<Dropout>) -> Inputs {
    let options = AttentionOptions::new()
        .with_keep_window(7)
        .with_dropout(dropout);
    let problem = problem([4, 6, 8], [2, 12], true, options);
    generate::inputs(problem, Scores::Normal, 1.0, 5)
}

fn forward(rate: f32, seed: u64) -> Forward {
    inputs(Some(Dropout::new(rate, seed).unwrap())).forward()
}

#[test]
fn the_expectation_over_seeds_is_the_output_without_dropout() {
    let seeds = 4000;
    let plain = inputs(None).forward();
    let [mut sums, mut squares] = [(); 2].map(|()| vec![0.0; plain.out.values.len()]);
    for seed in 0..seeds {
        let dropped = forward(0.3, seed);
        assert_eq!(dropped.lse.values, plain.lse.values, "the LSE has none");
        for (n, x) in dropped.out.values.iter().enumerate() {
            sums[n] += x;
            squares[n] += x * x;
        }
    }
    let len = seeds as f64;
    for (n, &exact) in plain.out.values.iter().enumerate() {
        let mean = sums[n] / len;
        let deviation = ((squares[n] / len - mean * mean) / len).sqrt();
        let close = (mean - exact).abs() < 5.0 * deviation;
        assert!(close, "{n}: {mean}, not {exact} to {deviation}");
    }
}

#[test]
fn a_rate_of_zero_changes_no_bit() {
    let (plain, zero) = (inputs(None), inputs(Some(Dropout::new(0.0, 1).unwrap())));
    assert_eq!(plain.problem, zero.problem);
}

#[test]
fn a_row_whose_pairs_are_all_dropped_is_zero_and_keeps_its_lse() {
    let most = forward(1.0f32.next_down(), 1);
    assert!(most.out.values.iter().all(|&x| x == 0.0));
    assert_eq!(most.lse.values, inputs(None).forward().lse.values);
}
