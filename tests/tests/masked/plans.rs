//! Tile plans of masks and of ranges of keys, bit by bit.

use flash_dma_problem::{PlanGeometry, TensorName};
use flash_dma_tests::masked::plans::{Keys, Plan, PlanEngine, RawMask};
use flash_dma_tests::prelude::*;

every_engine!(
    masks_of_whole_words,
    masks_of_any_shape,
    ranges_of_any_shape,
);
raw_engines!(ranges_that_do_not_fit);

/// Random bytes, half of them 0, in blocks that are empty, full or mixed.
fn mask(shape: [usize; 4], seed: u64, hidden: bool, transposed: bool) -> RawMask {
    let mut rng = Rng::new(seed);
    let mut density = 0.5;
    let values = (0..shape.iter().product::<usize>())
        .map(|n| {
            if n % 48 == 0 {
                density = [0.0, 0.5, 1.0][rng.below(3)];
            }
            // Every bit of a byte sets it.
            u8::from(rng.uniform() < density) << rng.below(8)
        })
        .collect();
    RawMask {
        values,
        hidden,
        transposed,
    }
}

fn check_mask<E: PlanEngine>(engine: &E, geometry: &PlanGeometry, mask: &RawMask) {
    let [_, heads, queries, keys] = geometry.mask;
    let expected = Plan::expected(geometry, |[b, h, i, j]| {
        (mask.values[((b * heads + h) * queries + i) * keys + j] != 0) != mask.hidden
    });
    let plan = engine.plan(geometry, mask).specified(geometry);
    assert_eq!(plan.counts, expected.counts, "{geometry:?}");
    assert_eq!(plan.bits, expected.bits, "{geometry:?}");
}

/// Masks that are packed and counted in one pass: a row per query, lengths off every block, several cubes per row.
fn masks_of_whole_words<E: PlanEngine>(engine: &E) {
    let lengths = E::cases(
        [(1, 32), (19, 96), (70, 160)],
        [(33, 64), (160, 70 * 32), (200, 96)],
        [(100, 4160), (4160, 128), (1000, 9000 / 32 * 32)],
    );
    for (n, (q_len, k_len)) in lengths.into_iter().enumerate() {
        for (m, (batch, heads)) in [(1, 1), (2, 3)].into_iter().enumerate() {
            for causal in [false, true] {
                let shape = [batch, heads, q_len, k_len];
                let geometry = PlanGeometry::new(&shape, [q_len, k_len], causal).unwrap();
                let hidden = (n + m).is_multiple_of(2) == causal;
                check_mask(engine, &geometry, &mask(shape, n as u64, hidden, false));
            }
        }
    }
}

/// Masks that are not packed and counted in one pass: broadcast axes, keys that do not fill whole words, rows that are
/// not contiguous.
fn masks_of_any_shape<E: PlanEngine>(engine: &E) {
    let lengths = E::cases([(19, 70)], [(70, 19), (129, 200)], [(600, 1001)]);
    for (q_len, k_len) in lengths {
        for (batch, heads) in [(1, 1), (2, 3)] {
            for queries in [1, q_len] {
                for keys in [1, k_len] {
                    for causal in [false, true] {
                        let shape = [batch, heads, queries, keys];
                        let geometry = PlanGeometry::new(&shape, [q_len, k_len], causal).unwrap();
                        let seed = (queries + keys) as u64;
                        check_mask(engine, &geometry, &mask(shape, seed, causal, false));
                    }
                }
            }
        }
    }
    let shape = [2, 3, 40, 96];
    let geometry = PlanGeometry::new(&shape, [40, 96], true).unwrap();
    check_mask(engine, &geometry, &mask(shape, 5, false, true));
}

/// Every broadcast of either tensor, and numbers that no key has.
fn ranges_of_any_shape<E: PlanEngine>(engine: &E) {
    let lengths = E::cases(
        [(19, 70), (1, 1), (70, 19)],
        [(40, 1), (5, 130), (129, 1100)],
        [(1000, 2500), (2500, 1000)],
    );
    for (n, (q_len, k_len)) in lengths.into_iter().enumerate() {
        let shapes = [
            ([1, 1, q_len], [1, 1, q_len]),
            ([2, 3, q_len], [2, 3, q_len]),
            ([2, 1, 1], [1, 3, q_len]),
            ([1, 1, 1], [2, 1, 1]),
            ([2, 1, q_len], [1, 1, 1]),
        ];
        for (m, (first, end)) in shapes.into_iter().enumerate() {
            for causal in [false, true] {
                let geometry =
                    PlanGeometry::of_ranges(&first, &end, [q_len, k_len], causal).unwrap();
                let mut rng = Rng::new((10 * n + m) as u64);
                let mut draw = |shape: [usize; 3]| Keys {
                    shape,
                    values: (0..shape.iter().product())
                        .map(|_| match rng.below(12) {
                            0 => i32::MIN,
                            1 => i32::MAX,
                            2 => -1,
                            3 => k_len as i32,
                            _ => rng.below(k_len) as i32,
                        })
                        .collect(),
                };
                let (first, end) = (draw(first), draw(end));
                let at = |keys: &Keys, index: [usize; 4]| {
                    let at = (0..3).fold(0, |at, axis| {
                        let size = keys.shape[axis];
                        at * size + if size == 1 { 0 } else { index[axis] }
                    });
                    i64::from(keys.values[at])
                };
                let expected = Plan::expected(&geometry, |index| {
                    (at(&first, index)..at(&end, index)).contains(&(index[3] as i64))
                });
                let plan = engine.plan_ranges(&geometry, [&first, &end]);
                let plan = plan.expect("good ranges").specified(&geometry);
                let what = format!("{first:?} {end:?} {geometry:?}");
                assert_eq!(plan.counts, expected.counts, "{what}");
                assert_eq!(plan.bits, expected.bits, "{what}");
            }
        }
    }
}

/// Another size on each axis, too few numbers, and a mask that does not have all keys.
fn ranges_that_do_not_fit<E: PlanEngine>(engine: &E) {
    let good = Keys {
        shape: [2, 3, 5],
        values: vec![0; 30],
    };
    let geometry = PlanGeometry::new(&[2, 3, 5, 70], [5, 70], true).unwrap();
    let (first, end) = (TensorName::FirstKeys, TensorName::EndKeys);
    for axis in 0..3 {
        let mut other = good.clone();
        other.shape[axis] += 1;
        other.values.resize(100, 0);
        let error = |tensor| {
            Err(AttentionError::Shape {
                tensor,
                axis,
                expected: good.shape[axis],
                actual: other.shape[axis],
            })
        };
        assert_eq!(engine.plan_ranges(&geometry, [&other, &good]), error(first));
        assert_eq!(engine.plan_ranges(&geometry, [&good, &other]), error(end));
    }
    let mut short = good.clone();
    short.values.truncate(29);
    let error = engine.plan_ranges(&geometry, [&short, &good]).unwrap_err();
    assert!(matches!(error, AttentionError::Buffer { tensor, .. } if tensor == first));
    let one_key = PlanGeometry::new(&[2, 3, 5, 1], [5, 70], true).unwrap();
    let error = AttentionError::Shape {
        tensor: TensorName::Mask,
        axis: 3,
        expected: 70,
        actual: 1,
    };
    assert_eq!(engine.plan_ranges(&one_key, [&good; 2]), Err(error));
}
