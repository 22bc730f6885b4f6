use crate::AttentionError;
use crate::select::blueprint::BlocksBlueprint;
use crate::select::{blocks, select};
use crate::team::Team;
use crate::testing::{client, read_u32, strided, zeros};
use flash_dma_problem::{Interval, KeptKeys, SelectionRule, TensorName};
use flash_dma_reference::Rng;
use flash_dma_reference::compose::{intervals, intervals_by_heap};
use flash_dma_reference::generate::Scores;

/// Selects `rows`, `[heads of a batch][n]`, without and with recent keys, and compares with the oracle.
fn check(rows: &[Vec<f32>], best: usize) {
    for recent in [0, rows[0].len() / 3 + 1] {
        check_kept(rows, KeptKeys { best, recent });
    }
}

fn check_kept(rows: &[Vec<f32>], kept: KeptKeys) {
    let n = rows[0].len();
    let client = client();
    // Rows at a distance of three elements, batches further: arbitrary strides except the last.
    let heads = if rows.len().is_multiple_of(2) { 2 } else { 1 };
    let shape = [rows.len() / heads, heads, n];
    let strides = [heads * (n + 3) + 5, n + 3, 1];
    let scores = strided(&client, &rows.concat(), &shape, &strides);
    let out = zeros(&client, &[shape[0], heads, n, 2]);
    select(&client, scores.clone(), kept, out.clone()).unwrap();
    compare(rows, kept, &read_u32(&client, out.clone()));
    if (1..n).contains(&kept.best) {
        let aligned = strided(&client, &rows.concat(), &shape, &[heads * n, n, 1]);
        for (scores, block) in [(scores, 32), (aligned, 256)] {
            blocks::launch(&client, scores, kept, out.clone(), blueprint(1, block));
            compare(rows, kept, &read_u32(&client, out.clone()));
        }
    }
}

fn blueprint(planes: usize, block: usize) -> BlocksBlueprint {
    BlocksBlueprint {
        team: Team { lanes: 1, planes },
        block,
        ptx: false,
    }
}

/// Compares the intervals of all rows with the oracle's.
fn compare(rows: &[Vec<f32>], kept: KeptKeys, actual: &[u32]) {
    let n = rows[0].len();
    let rule = SelectionRule::from(kept);
    for (r, row) in rows.iter().enumerate() {
        let wide: Vec<f64> = row.iter().map(|&z| f64::from(z)).collect();
        let expected = match n {
            ..=300 => intervals(&wide, &[n], &rule),
            _ => intervals_by_heap(&wide, &[n], &rule),
        };
        let (actual, _) = actual[r * n * 2..][..n * 2].as_chunks();
        for (j, (&[first, end], expected)) in actual.iter().zip(expected).enumerate() {
            let actual = Interval { first, end };
            assert_eq!(actual, expected, "row {r} of {n}, {kept:?}, key {j}");
        }
    }
}

fn rows_of_every_kind(n: usize, each: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut rng = Rng::new(seed);
    let kinds = Scores::ALL.iter().flat_map(|kind| vec![*kind; each]);
    kinds.map(|kind| narrow(&kind.head(n, &mut rng))).collect()
}

fn narrow(scores: &[f64]) -> Vec<f32> {
    scores.iter().map(|&z| z as f32).collect()
}

#[test]
fn short_rows_select_what_the_oracle_selects() {
    for n in [1, 2, 3, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129] {
        for window in [1, 2, 3, n / 2, n - 1, n, usize::MAX] {
            if window > 0 {
                let seed = (n * 1000 + window % 1000) as u64;
                check(&rows_of_every_kind(n, 10, seed), window);
            }
        }
    }
}

#[test]
fn long_rows_select_what_the_oracle_selects() {
    // Lengths off and on the edges of runs, spans and digits; one, two and three levels.
    for n in [257, 1000, 1024, 1025, 2048, 5000] {
        for window in [1, 2, 7, 64, n / 4, n - 1, n] {
            check(&rows_of_every_kind(n, 2, (n + window) as u64), window);
        }
    }
}

#[test]
fn recent_keys_need_no_rank() {
    for recent in [1, 5, 40, usize::MAX] {
        check_kept(&rows_of_every_kind(40, 2, 5), KeptKeys { best: 0, recent });
    }
}

#[test]
fn three_levels_of_digits_select_what_the_oracle_selects() {
    for window in [1, 2048, 10_000] {
        check(&rows_of_every_kind(20_000, 1, window as u64), window);
    }
}

#[test]
fn units_share_a_block() {
    let client = client();
    for kind in [Scores::Normal, Scores::Ties, Scores::Recency] {
        let row = narrow(&kind.head(300, &mut Rng::new(3)));
        let scores = strided(&client, &row, &[1, 1, 300], &[300, 300, 1]);
        let out = zeros(&client, &[1, 1, 300, 2]);
        let (best, recent) = (70, 9);
        let kept = KeptKeys { best, recent };
        blocks::launch(&client, scores, kept, out.clone(), blueprint(4, 128));
        compare(&[row], kept, &read_u32(&client, out));
    }
}

#[test]
fn special_values_are_ordered_by_the_contract() {
    // Both signs of zero and NaN, the greatest, least and smallest numbers, both infinities.
    let values = [
        f32::NAN,
        -f32::NAN,
        f32::from_bits(0x7F80_0001),
        0.0,
        -0.0,
        f32::MIN,
        f32::MAX,
        f32::from_bits(1),
        -f32::from_bits(1),
        f32::INFINITY,
        f32::NEG_INFINITY,
        1.0,
    ];
    let mut rng = Rng::new(7);
    let rows: Vec<Vec<f32>> = (0..64)
        .map(|_| (0..40).map(|_| values[rng.below(values.len())]).collect())
        .collect();
    for window in [1, 2, 5, 12, 39] {
        check(&rows, window);
    }
}

#[test]
fn bad_input_is_refused_and_nothing_is_written() {
    let client = client();
    let scores = || strided(&client, &[1.0; 12], &[1, 2, 6], &[12, 6, 1]);
    let out = zeros(&client, &[1, 2, 6, 2]);
    let error = |scores, window, out| select(&client, scores, window, out).unwrap_err();
    let wrong_strides = |error| match error {
        AttentionError::Strides { tensor, .. } => tensor,
        _ => panic!("{error}"),
    };
    assert_eq!(error(scores(), 0, out.clone()), AttentionError::ZeroWindow);
    assert!(matches!(
        error(scores(), 3, zeros(&client, &[1, 2, 5, 2])),
        AttentionError::Shape {
            tensor: TensorName::Intervals,
            axis: 2,
            expected: 6,
            actual: 5
        }
    ));
    let rank2 = strided(&client, &[1.0; 12], &[2, 6], &[6, 1]);
    assert!(matches!(
        error(rank2, 3, out.clone()),
        AttentionError::Rank {
            tensor: TensorName::Scores,
            expected: 3,
            actual: 2
        }
    ));
    let mut transposed = scores();
    transposed.strides = [12, 1, 2].into();
    let refused = wrong_strides(error(transposed, 3, out.clone()));
    assert_eq!(refused, TensorName::Scores);
    let mut short = scores();
    short.strides = [12, 4000, 1].into();
    assert!(matches!(
        error(short, 3, out.clone()),
        AttentionError::Buffer {
            tensor: TensorName::Scores,
            needed: 4006,
            ..
        }
    ));
    let mut gaps = out.clone();
    gaps.strides = [24, 12, 2, 2].into();
    let refused = wrong_strides(error(scores(), 3, gaps));
    assert_eq!(refused, TensorName::Intervals);
    assert!(read_u32(&client, out).iter().all(|&w| w == 0));
}

#[test]
fn no_keys_or_no_heads_is_no_work() {
    let client = client();
    for shape in [[1, 2, 0], [0, 2, 6], [2, 0, 6]] {
        let scores = strided(&client, &[0.0], &shape, &[12, 6, 1]);
        let out = zeros(&client, &[shape[0], shape[1], shape[2], 2]);
        select(&client, scores, 4, out).unwrap();
    }
}
