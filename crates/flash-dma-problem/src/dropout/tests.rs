use super::*;
use crate::{AttentionOptions, ElementType, Problem};

/// Number of rows and of columns of the masks under test.
const SIDE: usize = 1024;

fn mask(rate: f32, seed: u64) -> PairMask {
    Dropout::new(rate, seed).unwrap().mask()
}

/// The dropped pairs of a head as booleans, row by row, from a position and a key on.
fn dropped(mask: PairMask, head: usize, [position, key]: [u32; 2]) -> Vec<bool> {
    let head = mask.head_word(head);
    let columns: Vec<u32> = (0..SIDE as u32)
        .map(|j| column_word(mask.columns, key + j))
        .collect();
    let rows = (0..SIDE as u32).map(|i| row_word(head, position + i));
    rows.flat_map(|row| columns.iter().map(move |&column| pair_word(row, column)))
        .map(|word| word < mask.threshold)
        .collect()
}

/// The index of pair `i` of a line of the mask.
type Place = fn(line: usize, i: usize) -> usize;

/// The deviation of a count of `true` among `len` independent draws from its mean, in standard deviations.
fn excess(count: usize, len: usize, probability: f64) -> f64 {
    let len = len as f64;
    (count as f64 - probability * len) / (len * probability * (1.0 - probability)).sqrt()
}

/// The chi-square statistic of cells with a known probability each, in standard deviations from its mean.
fn chi_square(counts: impl ExactSizeIterator<Item = usize>, len: usize, probability: f64) -> f64 {
    let cells = counts.len() as f64;
    let sum: f64 = counts
        .map(|count| excess(count, len, probability).powi(2))
        .sum();
    (sum - cells) / (2.0 * cells).sqrt()
}

/// Masks of several rates, heads, seeds and places.
fn samples() -> impl Iterator<Item = (f32, Vec<bool>)> {
    [0.1, 0.5, 0.02].into_iter().flat_map(|rate| {
        [
            (1, 0, [0, 0]),
            (2, 5, [0, 0]),
            (u64::MAX, 1000, [100_000, 7]),
            (1 << 40, 0, [0, 1 << 20]),
        ]
        .into_iter()
        .map(move |(seed, head, from)| (rate, dropped(mask(rate, seed), head, from)))
    })
}

#[test]
fn rates_outside_of_zero_to_one_are_refused() {
    for rate in [-0.1, 1.0, 1.5, f32::NAN, f32::INFINITY] {
        let error = Dropout::new(rate, 0).unwrap_err();
        assert!(matches!(error, AttentionError::DropoutRate { .. }));
    }
    assert!(Dropout::new(0.0, 3).unwrap().effective().is_none());
    let greatest = Dropout::new(1.0f32.next_down(), 3).unwrap();
    assert_eq!(greatest.mask().threshold, u32::MAX - 255);
    assert_eq!(greatest.mask().factor, 16_777_216.0);
    assert_eq!(mask(0.5, 0).threshold, 1 << 31);
    assert_eq!(mask(0.5, 0).factor, 2.0);
}

#[test]
fn pairs_are_dropped_at_the_rate_in_all_and_in_every_row_and_column() {
    for (rate, dropped) in samples() {
        let p = f64::from(rate);
        let all = dropped.iter().filter(|&&d| d).count();
        assert!(excess(all, SIDE * SIDE, p).abs() < 4.0, "rate {rate}");
        let lines: [(_, Place); 4] = [
            ("rows", |line, i| line * SIDE + i),
            ("columns", |line, i| i * SIDE + line),
            ("diagonals", |line, i| i * SIDE + (i + line) % SIDE),
            ("rising", |line, i| i * SIDE + (line + SIDE - i) % SIDE),
        ];
        for (name, pair) in lines {
            let count = |line| (0..SIDE).filter(|&i| dropped[pair(line, i)]).count();
            let sigma = chi_square((0..SIDE).map(count), SIDE, p);
            assert!(sigma.abs() < 5.0, "rate {rate}, {name}: {sigma}");
        }
    }
}

#[test]
fn pairs_at_the_distances_of_tiles_are_independent() {
    for (rate, dropped) in samples().step_by(3) {
        let p = f64::from(rate);
        for down in [0, 1, 2, 3, 8, 16, 64] {
            for right in [-64, -16, -8, -2, -1, 0, 1, 2, 3, 8, 16, 64i64] {
                if down == 0 && right <= 0 {
                    continue;
                }
                let (mut both, mut len) = (0, 0);
                for i in 0..SIDE - down {
                    let columns =
                        right.min(0).unsigned_abs() as usize..SIDE - right.max(0) as usize;
                    len += columns.len();
                    for j in columns {
                        let to = (i + down) * SIDE + (j as i64 + right) as usize;
                        both += usize::from(dropped[i * SIDE + j] && dropped[to]);
                    }
                }
                let sigma = excess(both, len, p * p);
                // The count also varies with the rate of this mask: more than that of independent pairs.
                assert!(sigma.abs() < 7.0, "rate {rate}, {down}, {right}: {sigma}");
            }
        }
    }
}

#[test]
fn blocks_of_pairs_have_all_patterns_equally_often() {
    // Two rows by four columns at rate one half: 256 patterns.
    for (rate, dropped) in samples().filter(|&(rate, _)| rate == 0.5) {
        for stride in [1, 8, 64] {
            let (mut counts, mut len) = (vec![0usize; 256], 0);
            for i in 0..SIDE - stride {
                for j in
                    (0..SIDE - 3 * stride).filter(|j| i / stride % 2 == 0 && j / stride % 4 == 0)
                {
                    let bit = |n: usize| dropped[(i + n / 4 * stride) * SIDE + j + n % 4 * stride];
                    counts[(0..8).map(|n| usize::from(bit(n)) << n).sum::<usize>()] += 1;
                    len += 1;
                }
            }
            let sigma = chi_square(counts.into_iter(), len, 1.0 / 256.0);
            assert!(sigma.abs() < 6.0, "rate {rate}, stride {stride}: {sigma}");
        }
    }
}

#[test]
fn other_heads_and_seeds_have_other_masks() {
    let first = dropped(mask(0.5, 1), 0, [0, 0]);
    let others = [(1, 1), (2, 0), (1 << 32 | 1, 0), (1 ^ 1 << 63, 0)];
    for (seed, head) in others.into_iter().chain((2..64).map(|head| (1, head))) {
        let other = dropped(mask(0.5, seed), head, [0, 0]);
        let equal = first.iter().zip(&other).filter(|(a, b)| a == b).count();
        let sigma = excess(equal, SIDE * SIDE, 0.5);
        assert!(sigma.abs() < 5.0, "seed {seed}, head {head}: {sigma}");
    }
}

#[test]
fn words_are_uniform() {
    let mask = mask(0.5, 9);
    let head = mask.head_word(3);
    let mut counts = vec![0usize; 4096];
    for i in 0..SIDE as u32 {
        for j in 0..SIDE as u32 {
            let word = pair_word(row_word(head, i), column_word(mask.columns, j));
            counts[(word >> 20) as usize] += 1;
        }
    }
    let sigma = chi_square(counts.into_iter(), SIDE * SIDE, 1.0 / 4096.0);
    assert!(sigma.abs() < 5.0, "{sigma}");
}

#[test]
fn a_suffix_of_queries_has_the_mask_of_the_whole_pass() {
    let problem = |q_len: usize, causal| {
        let options = AttentionOptions::new()
            .with_causal(causal)
            .with_dropout(Dropout::new(0.5, 4).unwrap());
        let (q, k) = ([1, 2, q_len, 8], [1, 2, 40, 8]);
        Problem::new(&q, &k, &k, None, ElementType::F32, &options).unwrap()
    };
    for causal in [true, false] {
        let (whole, suffix) = (problem(40, causal), problem(7, causal));
        for i in 0..7 {
            let (a, b) = (
                whole.dropout_weights(1, 33 + i),
                suffix.dropout_weights(1, i),
            );
            assert!((0..40).all(|j| a(j) == b(j)));
        }
    }
    // More queries than keys: the first stand before the first key.
    assert_eq!(problem(50, true).dropout_position(0), 0u32.wrapping_sub(10));
}
