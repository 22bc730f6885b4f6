//! Every mask builder, pair by pair.

use crate::case::data;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::{AttentionMask, BlockRule};
use flash_dma_reference::Rng;

/// Checks every entry of a mask of four axes.
fn check(mask: AttentionMask, shape: [usize; 4], shows: impl Fn([usize; 4]) -> bool) {
    assert_eq!(mask.dims(), shape);
    let [_, h, q, k] = shape;
    let entries = mask.into_visible().into_data();
    for (at, value) in entries.iter::<bool>().enumerate() {
        let index = [at / k / q / h, at / k / q % h, at / k % q, at % k];
        assert_eq!(value, shows(index), "{index:?} of {shape:?}");
    }
}

#[test]
fn causal_masks_and_windows_are_aligned_bottom_right() {
    let device = Device::flex();
    for (q_len, k_len) in [(5, 5), (3, 9), (9, 3), (1, 1)] {
        let behind = |i: usize, j: usize| (i + k_len) as i64 - q_len as i64 - j as i64;
        let shape = [1, 1, q_len, k_len];
        let mask = AttentionMask::causal([q_len, k_len], &device);
        check(mask, shape, |[_, _, i, j]| behind(i, j) >= 0);
        for window in [1, 3, usize::MAX] {
            let mask = AttentionMask::sliding_window([q_len, k_len], window, &device);
            check(mask, shape, |[_, _, i, j]| {
                behind(i, j) >= 0 && (behind(i, j) as usize) < window
            });
        }
    }
}

#[test]
fn padding_and_documents_follow_their_numbers() {
    let device = Device::flex();
    let lengths = [0, 3, 7];
    let mask = AttentionMask::padding(Tensor::<1, Int>::from_data([0, 3, 7], &device), 7);
    check(mask, [3, 1, 1, 7], |[b, _, _, j]| j < lengths[b]);
    let ids = [[0, 0, 1, 1, 2], [4, 4, 4, 1, 4]];
    let mask = AttentionMask::documents(Tensor::<2, Int>::from_data(ids, &device));
    check(mask, [2, 1, 5, 5], |[b, _, i, j]| ids[b][i] == ids[b][j]);
}

fn random(shape: [usize; 4], ties: bool) -> (Vec<f32>, Tensor<4>) {
    let mut rng = Rng::new(5);
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| match rng.below(12) {
            0 => f32::NEG_INFINITY,
            1 => f32::NAN,
            n if ties => (n % 3) as f32,
            _ => rng.normal() as f32,
        })
        .collect();
    let tensor = Tensor::from_data(data(values.clone(), shape), &Device::flex());
    (values, tensor)
}

#[test]
fn a_threshold_is_strict_and_nan_is_below_it() {
    let (values, bias) = random([2, 3, 4, 5], true);
    let mask = AttentionMask::above(bias, 1.0);
    check(mask, [2, 3, 4, 5], |[b, h, i, j]| {
        values[((b * 3 + h) * 4 + i) * 5 + j] > 1.0
    });
}

/// Against a sort of each row.
#[test]
fn the_top_keys_are_exact_whatever_ties_there_are() {
    for (ties, rows) in [(false, 6), (true, 6), (true, 1)] {
        let (values, bias) = random([2, 2, rows, 23], ties);
        for window in [1, 4, 22, 23, 50] {
            for causal in [false, true] {
                let among = causal.then(|| AttentionMask::causal([6, 23], &Device::flex()));
                let mask = AttentionMask::top(bias.clone(), window, 6, among);
                check(mask, [2, 2, 6, 23], |[b, h, i, j]| {
                    let row = ((b * 2 + h) * rows + i % rows) * 23;
                    let mut order: Vec<usize> = (0..23)
                        .filter(|&j| !causal || j <= i + 17)
                        .filter(|&j| values[row + j] > f32::NEG_INFINITY)
                        .collect();
                    // Stable: a tie goes to the lower index.
                    order.sort_by(|&a, &b| values[row + b].total_cmp(&values[row + a]));
                    order.iter().take(window).any(|&kept| kept == j)
                });
            }
        }
    }
}

#[test]
fn blocks_are_shown_or_hidden_whole() {
    let device = Device::flex();
    let (values, bias) = random([1, 2, 9, 22], false);
    for block in [1, 4, 22, 64] {
        for rule in [BlockRule::Any, BlockRule::Majority] {
            let mask = AttentionMask::above(bias.clone(), 0.0).in_key_blocks(block, rule);
            check(mask, [1, 2, 9, 22], |[_, h, i, j]| {
                let begin = j / block * block;
                let keys = begin..22.min(begin + block);
                let row = (h * 9 + i) * 22;
                let seen = keys.clone().filter(|&j| values[row + j] > 0.0).count();
                match rule {
                    BlockRule::Any => seen > 0,
                    BlockRule::Majority => 2 * seen > keys.len(),
                }
            });
        }
    }
    let padding = AttentionMask::padding(Tensor::<1, Int>::from_data([3, 9], &device), 9);
    let both = padding.clone().and(AttentionMask::causal([9, 9], &device));
    check(both, [2, 1, 9, 9], |[b, _, i, j]| j < [3, 9][b] && j <= i);
    let one = padding.or(AttentionMask::causal([9, 9], &device));
    check(one, [2, 1, 9, 9], |[b, _, i, j]| j < [3, 9][b] || j <= i);
}
