//! Blueprints of several units a cube, as on a GPU, and of one, as on processors.

use super::blueprint::{Blueprint, Task};
use super::launch::Plan;
use crate::product::operands::{Major, Operands, Output};
use crate::testing::{client, read_f64, upload_strided, zeros};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::ElementType;
use flash_dma_reference::Rng;
use flash_dma_reference::compare::{Exact, OUTPUT, compare};
use flash_dma_reference::round::round;

/// A matrix in f64, rounded to an element type.
struct Matrix {
    shape: [usize; 2],
    values: Vec<f64>,
    element: ElementType,
}

impl Matrix {
    fn random(shape: [usize; 2], element: ElementType, rng: &mut Rng) -> Self {
        let values = (0..shape[0] * shape[1]).map(|_| round(rng.normal(), element));
        Self {
            shape,
            values: values.collect(),
            element,
        }
    }

    /// Uploads it, with `gap` elements after each row or column.
    fn upload(&self, major: Major, gap: usize) -> TensorBinding {
        let [rows, columns] = self.shape;
        let strides = match major {
            Major::Row => [columns + gap, 1],
            Major::Column => [1, rows + gap],
        };
        upload_strided(&client(), &self.values, &self.shape, &strides, self.element)
    }
}

/// The product in f64, and that of a plain loop in f32.
fn products(a: &Matrix, b: &Matrix) -> (Exact, Vec<f64>) {
    let ([m, k], n) = (a.shape, b.shape[1]);
    let pairs =
        |i: usize, j: usize| (0..k).map(move |t| (a.values[i * k + t], b.values[t * n + j]));
    let all = || (0..m).flat_map(move |i| (0..n).map(move |j| (i, j)));
    let values = all().map(|(i, j)| pairs(i, j).map(|(x, y)| x * y).sum());
    let magnitude = all().map(|(i, j)| pairs(i, j).map(|(x, y)| (x * y).abs()).sum());
    let naive = all().map(|(i, j)| {
        let sum = pairs(i, j).fold(0.0f32, |sum, (x, y)| sum + x as f32 * y as f32);
        f64::from(sum)
    });
    let exact = Exact {
        values: values.collect(),
        magnitude: magnitude.collect(),
    };
    (exact, naive.collect())
}

/// The configuration with which the kernel is launched, whatever the device.
#[derive(Clone, Copy, Debug)]
struct Shape {
    b: Major,
    gap: usize,
    vectors: [usize; 2],
    units: usize,
}

fn shape(b: Major, gap: usize, vectors: [usize; 2], units: usize) -> Shape {
    Shape {
        b,
        gap,
        vectors,
        units,
    }
}

/// The f32 product by cubes of these units.
fn run(a: &Matrix, b: &Matrix, shape: Shape) -> Vec<f64> {
    let client = client();
    let ([m, k], n) = (a.shape, b.shape[1]);
    let [a_vector, b_vector] = shape.vectors;
    let task = Task {
        b: shape.b,
        b_vector,
        m,
        n,
        size: a.element.size(),
    };
    let operands = Operands {
        a: a.upload(Major::Row, 0),
        b: b.upload(shape.b, shape.gap),
        element: a.element,
    };
    let operands = operands.canonical();
    let blueprint = Blueprint {
        a_vector,
        ..Blueprint::with(&task, shape.units, 1)
    };
    assert!(k.is_multiple_of(blueprint.terms()) || blueprint.has_rest());
    let plan = Plan::with(&client, &operands, blueprint).expect("a small product");
    let out = zeros(&client, &[m, n]);
    plan.launch(&client, Output::new(&out, ElementType::F32));
    read_f64(&client, out, ElementType::F32)
}

fn check([m, n, k]: [usize; 3], element: ElementType, shape: Shape) {
    let mut rng = Rng::new((m + n + k) as u64);
    let a = Matrix::random([m, k], element, &mut rng);
    let b = Matrix::random([k, n], element, &mut rng);
    let (exact, naive) = products(&a, &b);
    let actual = run(&a, &b, shape);
    let f32 = ElementType::F32;
    compare("product", &[m, n], &actual, &exact, &naive, f32, OUTPUT)
        .unwrap_or_else(|failure| panic!("{m} x {k} x {n} of {element}, {shape:?}: {failure}"));
}

/// All vectors and numbers of units: sizes off the tile, rests, columns and rows past the last.
#[test]
fn cubes_of_several_units_agree_with_the_oracle() {
    use ElementType::{Bf16, F16, F32};
    let (row, column) = (Major::Row, Major::Column);
    check([1, 130, 17], F32, shape(row, 0, [1, 2], 8));
    check([3, 3, 500], F32, shape(row, 3, [1, 1], 4));
    check([5, 24, 64], F32, shape(row, 4, [4, 4], 8));
    check([2, 513, 1], F32, shape(row, 0, [1, 1], 8));
    check([9, 16, 40], Bf16, shape(row, 8, [8, 8], 8));
    check([4, 136, 500], F16, shape(row, 0, [1, 8], 4));
    check([1, 3, 64], F32, shape(column, 0, [4, 4], 8));
    check([6, 17, 500], F32, shape(column, 2, [1, 2], 4));
    check([16, 9, 64], Bf16, shape(column, 0, [8, 8], 8));
    check([2, 1, 17], F32, shape(column, 0, [1, 1], 2));
    check([1, 40, 64], F32, shape(column, 0, [2, 4], 1));
}

/// Compared bit for bit, with any other rows.
#[test]
fn a_row_has_the_same_sums_in_any_number_of_rows() {
    let element = ElementType::F32;
    let (n, k) = (24, 200);
    let mut rng = Rng::new(3);
    let b = Matrix::random([k, n], element, &mut rng);
    let all = Matrix::random([16, k], element, &mut rng);
    for major in [Major::Row, Major::Column] {
        let shape = shape(major, 0, [4, 4], 8);
        let together = run(&all, &b, shape);
        for rows in [1, 3, 8] {
            let first = Matrix {
                shape: [rows, k],
                values: all.values[..rows * k].to_vec(),
                element,
            };
            assert!(run(&first, &b, shape) == together[..rows * n], "{rows}");
        }
    }
}

/// A NaN or infinity reaches only its row or its column, even next to rows and columns that do not exist.
#[test]
fn numbers_that_are_not_finite_stay_where_they_belong() {
    let element = ElementType::F32;
    let ([m, n], k) = ([3, 20], 21);
    let mut rng = Rng::new(4);
    let mut a = Matrix::random([m, k], element, &mut rng);
    let mut b = Matrix::random([k, n], element, &mut rng);
    a.values.iter_mut().for_each(|x| *x = x.abs() + 0.1);
    b.values.iter_mut().for_each(|x| *x = x.abs() + 0.1);
    a.values[2 * k + 20] = f64::NAN;
    b.values[20 * n + 19] = f64::INFINITY;
    b.values[7] = f64::NEG_INFINITY;
    let (exact, _) = products(&a, &b);
    for (b_major, vectors) in [(Major::Row, [1, 4]), (Major::Column, [1, 1])] {
        let actual = run(&a, &b, shape(b_major, 0, vectors, 4));
        for (at, (x, y)) in actual.iter().zip(&exact.values).enumerate() {
            let same = match y.is_finite() {
                true => x.is_finite(),
                false => x == y || x.is_nan() && y.is_nan(),
            };
            assert!(same, "{b_major:?}, element {at} is {x} instead of {y}");
        }
    }
}
