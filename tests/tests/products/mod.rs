//! Products of matrices and linear layers. Operands are small whole numbers: every product and every sum is exact in
//! f32, and in TF32, so results compare with `==` after the one rounding to their type. Sums pass 2048, past which an f16
//! sum would not be exact.

#[cfg(feature = "burn")]
mod layers;
mod routes;

use flash_dma_reference::round::round;
use flash_dma_tests::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    Rows,
    /// Columns, without gaps: a transposed tensor.
    Columns,
    /// Rows with a gap of this many elements after each.
    Gaps(usize),
}

/// A matrix, most often of whole numbers from 0 to 7.
struct Matrix {
    shape: [usize; 2],
    values: Vec<f64>,
}

impl Matrix {
    fn random(shape: [usize; 2], rng: &mut Rng) -> Self {
        Self::drawn(shape, || rng.below(8) as f64)
    }

    /// A matrix of numbers whose products and sums are rounded.
    fn normal(shape: [usize; 2], rng: &mut Rng) -> Self {
        Self::drawn(shape, || rng.normal())
    }

    fn drawn(shape: [usize; 2], mut draw: impl FnMut() -> f64) -> Self {
        let values = (0..shape[0] * shape[1]).map(|_| draw()).collect();
        Self { shape, values }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.shape[1] + column]
    }

    fn transposed(&self) -> Self {
        let [rows, columns] = self.shape;
        let all = (0..columns).flat_map(|j| (0..rows).map(move |i| self.at(i, j)));
        Self {
            shape: [columns, rows],
            values: all.collect(),
        }
    }

    /// The matrix in a layout; gaps hold NaN.
    fn raw(&self, element: ElementType, lies: Lies) -> Raw {
        let [rows, columns] = self.shape;
        let (values, strides) = match lies {
            Lies::Rows => (self.values.clone(), vec![columns, 1]),
            Lies::Columns => (self.transposed().values, vec![1, rows]),
            Lies::Gaps(gap) => {
                let gap = vec![f64::NAN; gap];
                let rows = self.values.chunks(columns);
                let all = rows.flat_map(|row| [row, &gap].concat()).collect();
                (all, vec![columns + gap.len(), 1])
            }
        };
        Raw {
            shape: self.shape.to_vec(),
            strides,
            values,
            element,
        }
    }

    /// The product with `other`, rounded once.
    fn times(&self, other: &Self, element: ElementType) -> Vec<f64> {
        let [m, k] = self.shape;
        let columns = other.transposed();
        let mut product = Vec::with_capacity(m * other.shape[1]);
        for row in self.values.chunks(k) {
            for column in columns.values.chunks(k) {
                let sum: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
                product.push(round(sum, element));
            }
        }
        product
    }
}

/// Compares exactly, and prints the first difference.
#[track_caller]
fn same(actual: &[f64], exact: &[f64], what: &str) {
    assert_eq!(actual.len(), exact.len(), "{what}");
    for (at, (a, b)) in actual.iter().zip(exact).enumerate() {
        assert!(a == b, "{what}: element {at} is {a} instead of {b}");
    }
}
