//! Selected sets, exactly.

use flash_dma_problem::KeptKeys;
use flash_dma_reference::compose;
use flash_dma_tests::prelude::*;

every_engine!(
    random_problems,
    long_problems,
    scores_at_the_edges_of_f32,
    strided_scores
);

/// Compares an engine's intervals with the oracle's, head by head.
fn check<E: Engine>(
    engine: &E,
    heads: &[Vec<f64>],
    shape: [usize; 3],
    kept: impl Into<KeptKeys>,
    layout: Layout,
) {
    let kept = kept.into();
    let rule = SelectionRule::from(kept);
    let scores = Raw::new(&heads.concat(), &shape, F32, layout);
    let actual = engine.select(&scores, kept).expect("good scores");
    for (row, head) in heads.iter().enumerate() {
        let actual = &actual[row * shape[2]..(row + 1) * shape[2]];
        let exact = match shape[2] {
            ..600 => compose::intervals(head, &[shape[2]], &rule),
            len => compose::intervals_by_heap(head, &[len], &rule),
        };
        if let Some(key) = (0..shape[2]).find(|&j| actual[j] != exact[j]) {
            panic!(
                "{}: key {key} of head {row} of {shape:?}, {kept:?}, {layout:?}: {:?} instead of {:?}",
                E::NAME,
                actual[key],
                exact[key]
            );
        }
    }
}

/// More than 2,000 heads, each with its own scores and kind.
fn random_problems<E: Engine>(engine: &E) {
    let mut rng = Rng::new(11);
    let mut problems = 0;
    // Many heads per call: differences between heads cost no launch.
    let calls = [
        ([5, 50, 1], 1),
        ([7, 60, 2], 1),
        ([5, 60, 17], 3),
        ([5, 60, 64], 64),
        ([6, 50, 113], 16),
        ([4, 60, 239], 1),
        ([3, 60, 257], 100),
        ([3, 60, 300], 299),
    ];
    for (n, (shape, best)) in calls.into_iter().enumerate() {
        let heads: Vec<Vec<f64>> = (0..shape[0] * shape[1])
            .map(|row| Scores::ALL[row % Scores::ALL.len()].head(shape[2], &mut rng))
            .collect();
        // No or some recent keys, also more than there are keys.
        for recent in [0, [1, 7, 40, 400][n % 4]] {
            let kept = KeptKeys { best, recent };
            check(engine, &heads, shape, kept, Layout::Contiguous);
        }
        problems += heads.len();
    }
    assert!(problems >= 2000, "{problems}");
}

/// Rows of the lengths that the engines are meant for, on both sides of the length at which kernels change the method,
/// with windows of one key to all but one.
fn long_problems<E: Engine>(engine: &E) {
    const LONG: usize = 1 << 19;
    let mut rng = Rng::new(12);
    let large = [
        (1 << 17, 2048),
        ((1 << 17) + 5, 1),
        (LONG, 2048),
        (LONG, 1),
        (LONG - 3, LONG - 4),
        (LONG + 1, 2048),
    ];
    for (len, best) in E::cases([(4096, 512)], [(4099, 1), (20_000, 2048)], large) {
        let kinds = [
            Scores::Normal,
            Scores::Ties,
            Scores::Recency,
            Scores::Nan,
            Scores::Increasing,
            Scores::AllEqual,
        ];
        let heads: Vec<Vec<f64>> = kinds.iter().map(|kind| kind.head(len, &mut rng)).collect();
        for recent in [0, 128] {
            let kept = KeptKeys { best, recent };
            check(engine, &heads, [2, 3, len], kept, Layout::Contiguous);
        }
    }
}

/// Infinities, subnormals, both zeros, NaNs of both signs: the whole order in one head.
fn scores_at_the_edges_of_f32<E: Engine>(engine: &E) {
    let tiny = f64::from(f32::from_bits(1));
    let values = [
        f64::INFINITY,
        f64::from(f32::MAX),
        f64::from(f32::MIN),
        f64::from(f32::MIN_POSITIVE),
        tiny,
        -tiny,
        0.0,
        -0.0,
        1.0,
        -1.0,
        f64::NAN,
        -f64::NAN,
        f64::NEG_INFINITY,
    ];
    let mut rng = Rng::new(13);
    let heads: Vec<Vec<f64>> = (0..40)
        .map(|_| (0..90).map(|_| values[rng.below(values.len())]).collect())
        .collect();
    for window in [1, 5, 30, 89, 90, usize::MAX] {
        check(engine, &heads, [4, 10, 90], window, Layout::Contiguous);
    }
}

fn strided_scores<E: Engine>(engine: &E) {
    let mut rng = Rng::new(14);
    let heads: Vec<Vec<f64>> = (0..6).map(|_| Scores::Normal.head(75, &mut rng)).collect();
    for layout in [Layout::Transposed, Layout::Padded] {
        check(engine, &heads, [3, 2, 75], 9, layout);
    }
}
