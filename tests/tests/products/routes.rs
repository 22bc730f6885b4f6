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
    let types = Kernels::<T>::cases([Bf16], [], [F32]);
    types
        .into_iter()
        .filter(move |&element| engine.supports(element))
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
    for [m, n, k] in sizes {
        let mut rng = Rng::new((m + n + k) as u64);
        let [a, b] = [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng));
        for element in types(engine) {
            let operands = [&a, &b].map(|matrix| matrix.raw(element, Lies::Rows));
            let actual = engine.product(operands.each_ref(), element, None);
            let what = format!("{m} x {k} x {n} of {element}");
            same(&actual.expect(&what), &a.times(&b, element), &what);
        }
    }
}

fn layouts<T: Target>(engine: &Kernels<T>) {
    let [m, n, k] = match Kernels::<T>::SIZE {
        Size::Large => [520, 264, 136],
        _ => [24, 16, 40],
    };
    let mut rng = Rng::new(3);
    let [a, b] = [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng));
    use Lies::{Columns, Gaps, Rows};
    let pairs = |element| match (Kernels::<T>::SIZE, element) {
        (Size::Large, F32) => vec![(Rows, Columns), (Columns, Rows), (Gaps(3), Gaps(3))],
        (Size::Large, _) => [Rows, Columns, Gaps(3), Gaps(8)]
            .map(|of| (of, of))
            .to_vec(),
        _ => vec![(Columns, Columns), (Gaps(3), Gaps(3))],
    };
    for element in types(engine) {
        let exact = a.times(&b, element);
        for (of_a, of_b) in pairs(element) {
            let operands = [a.raw(element, of_a), b.raw(element, of_b)];
            let actual = engine.product(operands.each_ref(), element, None);
            let what = format!("{of_a:?} by {of_b:?} of {element}");
            same(&actual.expect(&what), &exact, &what);
        }
    }
}

/// Operands of the gradient of a weight: `k` tokens.
fn tall(k: usize, [m, n]: [usize; 2], element: ElementType) -> (Matrix, Matrix, [Raw; 2]) {
    let mut rng = Rng::new(k as u64);
    let [a, b] = [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng));
    let raw = [a.raw(element, Lies::Columns), b.raw(element, Lies::Rows)];
    (a, b, raw)
}

fn sums_in_parts<T: Target>(engine: &Kernels<T>) {
    for (k, parts) in Kernels::<T>::cases([(300, 3)], [], [(4097, 64)]) {
        for element in types(engine) {
            let (a, b, raw) = tall(k, [24, 17], element);
            let choice = Choice {
                route: Route::Standard,
                parts,
            };
            let actual = engine.product(raw.each_ref(), element, Some(choice));
            let what = format!("{k} terms of {element} in {parts} parts");
            same(&actual.expect(&what), &a.times(&b, element), &what);
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
    let mut random = |shape: [usize; 2]| {
        let values = (0..shape[0] * shape[1]).map(|_| rng.normal());
        Matrix {
            shape,
            values: values.collect(),
        }
    };
    let (a, b) = (random([64, k]), random([k, 64]));
    let raw = [a.raw(F32, Lies::Columns), b.raw(F32, Lies::Rows)];
    for element in types(engine) {
        let raw = raw.each_ref().map(|raw| Raw {
            element,
            ..raw.clone()
        });
        let parts = Choice {
            route: Route::Standard,
            parts: 4,
        };
        let choices = Kernels::<T>::cases([Some(parts)], [], [None]);
        for choice in choices {
            let [first, second] = [(); 2].map(|()| {
                let result = engine.product(raw.each_ref(), F32, choice);
                result.expect("a good product")
            });
            assert!(first == second, "{choice:?} of {element}");
        }
    }
}

/// Both tiles, every layout, sizes off the tile, and parts of the sums.
fn tiles_of_wgmma<T: Target>(engine: &Kernels<T>) {
    let shapes = [[128, 256, 64], [72, 264, 136], [300, 520, 1000]];
    for tile in Tile::ALL {
        for [m, n, k] in shapes {
            let mut rng = Rng::new((m + n + k) as u64);
            let [a, b] = [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng));
            for (of_a, of_b) in [
                (Lies::Rows, Lies::Rows),
                (Lies::Rows, Lies::Columns),
                (Lies::Columns, Lies::Rows),
                (Lies::Columns, Lies::Columns),
                (Lies::Gaps(8), Lies::Gaps(16)),
            ] {
                for (element, parts) in [(Bf16, 1), (F16, 1), (Bf16, 3)] {
                    let route = Route::Wgmma(tile);
                    let operands = [a.raw(element, of_a), b.raw(element, of_b)];
                    // A column of A begins at a multiple of 16 bytes only then.
                    let rows = of_a != Lies::Columns || m % 8 == 0;
                    for out in [element, F32] {
                        let choice = Some(Choice { route, parts });
                        let actual = engine.product(operands.each_ref(), out, choice);
                        let what = format!(
                            "{m} x {k} x {n}, {of_a:?} by {of_b:?} of {element} in {out}, {tile:?}, {parts} parts"
                        );
                        match actual {
                            Ok(actual) => same(&actual, &a.times(&b, out), &what),
                            Err(AttentionError::Unsupported { .. }) if !rows => {}
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
    let choice = Some(Choice {
        route: Route::FewRows,
        parts: 1,
    });
    for [m, n, k] in shapes {
        let mut rng = Rng::new((m + n + k) as u64);
        let [a, b] = [[m, k], [k, n]].map(|shape| Matrix::random(shape, &mut rng));
        for element in types(engine) {
            for &(of_a, of_b) in &layouts {
                let operands = [a.raw(element, of_a), b.raw(element, of_b)];
                for out in Kernels::<T>::cases([F32], [], [element]) {
                    let actual = engine.product(operands.each_ref(), out, choice);
                    let what =
                        format!("{m} x {k} x {n}, {of_a:?} by {of_b:?} of {element} in {out}");
                    same(&actual.expect(&what), &a.times(&b, out), &what);
                }
            }
        }
    }
    // The rows of A must be contiguous.
    let mut rng = Rng::new(1);
    let [a, b] = [[4, 8], [8, 8]].map(|shape| Matrix::random(shape, &mut rng).raw(F32, Columns));
    let refused = engine.product([&a, &b], F32, choice);
    assert!(matches!(refused, Err(AttentionError::Unsupported { .. })));
}

/// A row alone and among others has the same sums, bit for bit, by the rule.
fn few_rows_do_not_depend_on_their_number<T: Target>(engine: &Kernels<T>) {
    let (k, n) = (264, 40);
    let mut rng = Rng::new(21);
    let mut random = |shape: [usize; 2]| Matrix {
        shape,
        values: (0..shape[0] * shape[1]).map(|_| rng.normal()).collect(),
    };
    let (a, b) = (random([16, k]), random([k, n]));
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

/// Sums over nothing are zeros, and results of no elements are written by no kernel.
fn empty_products<T: Target>(engine: &Kernels<T>) {
    for [m, n, k] in [[0, 5, 4], [5, 0, 4], [3, 4, 0], [0, 0, 0]] {
        let none = |shape: [usize; 2]| Matrix {
            shape,
            values: vec![1.0; shape[0] * shape[1]],
        };
        let (a, b) = (none([m, k]), none([k, n]));
        let raw = [&a, &b].map(|matrix| Raw {
            shape: matrix.shape.to_vec(),
            strides: vec![matrix.shape[1], 1],
            values: matrix.values.clone(),
            element: F32,
        });
        let actual = engine.product(raw.each_ref(), F32, None).unwrap();
        assert!(actual == vec![0.0; m * n], "{m} x {k} x {n}");
    }
}

fn bad_operands<T: Target>(engine: &Kernels<T>) {
    let mut rng = Rng::new(1);
    let (a, b) = (
        Matrix::random([6, 8], &mut rng),
        Matrix::random([8, 4], &mut rng),
    );
    let good = [a.raw(F32, Lies::Rows), b.raw(F32, Lies::Rows)];
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
