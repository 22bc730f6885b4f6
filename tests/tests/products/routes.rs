//! The kernels of products, by every route, and the parts of their sums.

use super::{Lies, Matrix, same};
use flash_dma_kernels::product::{Choice, Route, Tile};
use flash_dma_problem::TensorName;
use flash_dma_tests::prelude::*;

kernel_runtimes!(
    sizes_off_every_tile,
    layouts,
    sums_in_parts,
    repeats_are_bit_equal,
    tiles_of_wgmma,
    few_rows,
    few_rows_do_not_depend_on_their_number,
    empty_products,
    bad_operands,
);

/// Each variant of CubeK's kernels compiles for seconds, on CubeCL's CPU runtime for many, so there are few of them.
fn types<T: Target>(engine: &Kernels<T>) -> impl Iterator<Item = ElementType> {
    let types = Kernels::<T>::cases([Bf16], [], [F32]).into_iter();
    types.filter(move |&element| engine.supports(element))
}

fn factors([m, n, k]: [usize; 3], seed: usize) -> [Matrix; 2] {
    let mut rng = Rng::new(seed as u64);
    [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng))
}

fn by(route: Route, parts: usize) -> Option<Choice> {
    Some(Choice { route, parts })
}

/// Compares a product with the exact one: by one choice alone, or by the rule.
fn check<T: Target>(
    engine: &Kernels<T>,
    [a, b]: &[Matrix; 2],
    (of_a, of_b): (Lies, Lies),
    [element, out]: [ElementType; 2],
    choice: Option<Choice>,
) {
    let ([m, k], [_, n]) = (a.shape, b.shape);
    let what = format!("{m} x {k} x {n}, {of_a:?} by {of_b:?} of {element} in {out}, {choice:?}");
    let operands = [a.raw(element, of_a), b.raw(element, of_b)];
    let actual = engine.product(operands.each_ref(), out, choice);
    same(&actual.expect(&what), &a.times(b, out), &what);
}

fn sizes_off_every_tile<T: Target>(engine: &Kernels<T>) {
    let sizes = Kernels::<T>::cases(
        [[17, 3, 33]],
        [],
        [
            [5, 70, 1],
            [33, 1, 100],
            [257, 100, 1000],
            [1, 1024, 257],
            [2000, 264, 520],
        ],
    );
    for size in sizes {
        let factors = factors(size, size.iter().sum());
        for element in types(engine) {
            let rows = (Lies::Rows, Lies::Rows);
            check(engine, &factors, rows, [element; 2], None);
        }
    }
}

fn layouts<T: Target>(engine: &Kernels<T>) {
    use Lies::{Columns, Gaps, Rows};
    let size = match Kernels::<T>::SIZE {
        Size::Large => [520, 264, 136],
        _ => [24, 16, 40],
    };
    let factors = factors(size, 3);
    let pairs = |element| match (Kernels::<T>::SIZE, element) {
        (Size::Large, F32) => vec![(Rows, Columns), (Columns, Rows), (Gaps(3), Gaps(3))],
        (Size::Large, _) => [Rows, Columns, Gaps(3), Gaps(8)]
            .map(|of| (of, of))
            .to_vec(),
        _ => vec![(Columns, Columns), (Gaps(3), Gaps(3))],
    };
    for element in types(engine) {
        for lies in pairs(element) {
            check(engine, &factors, lies, [element; 2], None);
        }
    }
}

/// Operands of the gradient of a weight: many tokens.
fn sums_in_parts<T: Target>(engine: &Kernels<T>) {
    for (k, parts) in Kernels::<T>::cases([(300, 3)], [], [(4097, 64)]) {
        let factors = factors([24, 17, k], k);
        for element in types(engine) {
            let (lies, choice) = ((Lies::Columns, Lies::Rows), by(Route::Standard, parts));
            check(engine, &factors, lies, [element; 2], choice);
        }
    }
}

fn repeats_are_bit_equal<T: Target>(engine: &Kernels<T>) {
    let k = if Kernels::<T>::SIZE == Size::Large {
        32768
    } else {
        600
    };
    let mut rng = Rng::new(9);
    let [a, b] = [[64, k], [k, 64]].map(|shape| Matrix::normal(shape, &mut rng));
    let raw = [a.raw(F32, Lies::Columns), b.raw(F32, Lies::Rows)];
    for element in types(engine) {
        let raw = raw.each_ref().map(|raw| Raw {
            element,
            ..raw.clone()
        });
        for choice in Kernels::<T>::cases([by(Route::Standard, 4)], [], [None]) {
            let [first, second] = [(); 2].map(|()| {
                let result = engine.product(raw.each_ref(), F32, choice);
                result.expect("a good product")
            });
            assert!(first == second, "{choice:?} of {element}");
        }
    }
}

/// Both tiles, every layout, sizes off the tile, and parts of the sums; more tiles than an H200 has cubes, of few terms, and rows
/// of the result that are no segments of 16 bytes.
fn tiles_of_wgmma<T: Target>(engine: &Kernels<T>) {
    let shapes = [
        [128, 256, 64],
        [72, 264, 136],
        [300, 520, 1000],
        [1500, 3104, 8],
        [1500, 3100, 72],
    ];
    for tile in Tile::ALL {
        for [m, n, k] in shapes {
            let [a, b] = factors([m, n, k], m + n + k);
            for (of_a, of_b) in [
                (Lies::Rows, Lies::Rows),
                (Lies::Rows, Lies::Columns),
                (Lies::Columns, Lies::Rows),
                (Lies::Columns, Lies::Columns),
                (Lies::Gaps(8), Lies::Gaps(16)),
            ] {
                for (element, parts) in [(Bf16, 1), (F16, 1), (Bf16, 3)] {
                    let operands = [a.raw(element, of_a), b.raw(element, of_b)];
                    // Otherwise a column of A or a row of B does not begin at a multiple of 16 bytes.
                    let begins = (of_a != Lies::Columns || m % 8 == 0)
                        && (of_b == Lies::Columns || n % 8 == 0);
                    for out in [element, F32] {
                        let choice = by(Route::Wgmma(tile), parts);
                        let actual = engine.product(operands.each_ref(), out, choice);
                        let what = format!(
                            "{m} x {k} x {n}, {of_a:?} by {of_b:?} of {element} in {out}, {tile:?}, {parts} parts"
                        );
                        match actual {
                            Ok(actual) => same(&actual, &a.times(&b, out), &what),
                            Err(AttentionError::Unsupported { .. }) if !begins => {}
                            Err(AttentionError::Unsupported { what })
                                if what.contains("no wgmma") =>
                            {
                                return skip::<Kernels<T>>("products of wgmma");
                            }
                            Err(error) => panic!("{what}: {error}"),
                        }
                    }
                }
            }
        }
    }
}

/// Every layout and width of vectors, rests of terms, and columns and rows past the last of a cube.
fn few_rows<T: Target>(engine: &Kernels<T>) {
    use Lies::{Columns, Gaps, Rows};
    let shapes = Kernels::<T>::cases(
        [[1, 130, 17], [5, 3, 64]],
        [],
        [
            [16, 513, 500],
            [1, 1, 1],
            [3, 1024, 1024],
            [8, 2752, 264],
            [64, 40, 4096],
            [2, 32768, 72],
        ],
    );
    let layouts = Kernels::<T>::cases(
        [(Rows, Rows), (Rows, Columns)],
        [],
        [(Gaps(3), Gaps(1)), (Gaps(8), Gaps(8))],
    );
    let choice = by(Route::FewRows, 1);
    for shape in shapes {
        let factors = factors(shape, shape.iter().sum());
        for element in types(engine) {
            for &lies in &layouts {
                for out in Kernels::<T>::cases([F32], [], [element]) {
                    check(engine, &factors, lies, [element, out], choice);
                }
            }
        }
    }
    // The rows of A must be contiguous.
    let [a, b] = factors([4, 8, 8], 1).map(|matrix| matrix.raw(F32, Columns));
    let refused = engine.product([&a, &b], F32, choice);
    assert!(matches!(refused, Err(AttentionError::Unsupported { .. })));
}

/// A row alone and among others has the same sums, bit for bit, by the rule.
fn few_rows_do_not_depend_on_their_number<T: Target>(engine: &Kernels<T>) {
    let (k, n) = (264, 40);
    let mut rng = Rng::new(21);
    let [a, b] = [[16, k], [k, n]].map(|shape| Matrix::normal(shape, &mut rng));
    for element in types(engine) {
        for lies in Kernels::<T>::cases([Lies::Rows], [], [Lies::Columns]) {
            let weight = b.raw(element, lies);
            let product = |rows: usize| {
                let first = Matrix {
                    shape: [rows, k],
                    values: a.values[..rows * k].to_vec(),
                };
                let operands = [&first.raw(element, Lies::Rows), &weight];
                engine.product(operands, F32, None).expect("a good product")
            };
            let all = product(16);
            for rows in [1, 3] {
                assert!(product(rows) == all[..rows * n], "{rows} of {element}");
            }
        }
    }
}

/// Sums over nothing are zeros, and no kernel writes results without elements.
fn empty_products<T: Target>(engine: &Kernels<T>) {
    for [m, n, k] in [[0, 5, 4], [5, 0, 4], [3, 4, 0], [0, 0, 0]] {
        let raw = [[m, k], [k, n]].map(|shape| Matrix::drawn(shape, || 1.0).raw(F32, Lies::Rows));
        let actual = engine.product(raw.each_ref(), F32, None).unwrap();
        assert!(actual == vec![0.0; m * n], "{m} x {k} x {n}");
    }
}

fn bad_operands<T: Target>(engine: &Kernels<T>) {
    let good = factors([6, 4, 8], 1).map(|matrix| matrix.raw(F32, Lies::Rows));
    let error = |change: fn(&mut [Raw; 2])| {
        let mut raw = good.clone();
        change(&mut raw);
        let result = engine.product(raw.each_ref(), F32, None);
        result.expect_err("a bad operand")
    };
    let (left, right) = (TensorName::LeftFactor, TensorName::RightFactor);
    assert_eq!(
        error(|raw| raw[1].shape[0] = 7),
        AttentionError::Shape {
            tensor: right,
            axis: 0,
            expected: 8,
            actual: 7
        }
    );
    assert_eq!(
        error(|raw| raw[0].strides = vec![8, 2]),
        AttentionError::Strides {
            tensor: left,
            strides: vec![8, 2]
        }
    );
    assert_eq!(
        error(|raw| raw[1].values.truncate(31)),
        AttentionError::Buffer {
            tensor: right,
            needed: 32,
            actual: 31
        }
    );
    assert_eq!(
        error(|raw| {
            raw[0].shape.push(1);
            raw[0].strides.push(1);
        }),
        AttentionError::Rank {
            tensor: left,
            expected: 2,
            actual: 3
        }
    );
}
