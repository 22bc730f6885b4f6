//! Matrix products on tiles, on the calling thread.

use gemm::Parallelism;

/// A matrix in a slice: element `(r, c)` is `data[r * row_stride + c * column_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// All of a slice, as rows of `width` contiguous elements.
    pub(crate) fn rows(data: &'a [f32], width: usize) -> Self {
        let whole = width > 0 && data.len().is_multiple_of(width);
        assert!(whole, "a matrix has whole rows");
        Self {
            data,
            rows: data.len() / width,
            columns: width,
            row_stride: width,
            column_stride: 1,
        }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// A product of two matrices times a number, to be written to rows of contiguous elements.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    factor: f32,
    left: Matrix<'a>,
    right: Matrix<'a>,
}

impl<'a> Product<'a> {
    pub(crate) fn new(left: Matrix<'a>, right: Matrix<'a>) -> Self {
        Self::scaled(1.0, left, right)
    }

    pub(crate) fn scaled(factor: f32, left: Matrix<'a>, right: Matrix<'a>) -> Self {
        Self {
            factor,
            left,
            right,
        }
    }

    /// `target = factor * left * right`; what `target` holds is not read.
    pub(crate) fn write_to(self, target: &mut [f32]) {
        self.run(target, false);
    }

    /// `target += factor * left * right`.
    pub(crate) fn add_to(self, target: &mut [f32]) {
        self.run(target, true);
    }

    fn run(self, target: &mut [f32], accumulate: bool) {
        let (left, right) = (self.left, self.right);
        let [m, n, k] = [left.rows, right.columns, left.columns];
        assert!(m > 0 && n > 0 && k > 0, "a product has elements");
        assert_eq!(k, right.rows, "the inner sizes of a product agree");
        assert_eq!(target.len(), m * n, "the target holds the product");
        // SAFETY: the operands have exactly the elements of their slices (`Matrix` is only made by `rows`,
        // which takes whole rows) and the target has `m` by `n`; `target` is borrowed exclusively, so it
        // overlaps neither operand.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                target.as_mut_ptr(),
                1,
                n as isize,
                accumulate,
                left.data.as_ptr(),
                left.column_stride as isize,
                left.row_stride as isize,
                right.data.as_ptr(),
                right.column_stride as isize,
                right.row_stride as isize,
                1.0,
                self.factor,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_every_orientation_agree_with_a_triple_loop() {
        for [m, n, k] in [[1, 1, 1], [3, 5, 7], [16, 1, 64], [1, 16, 64], [33, 48, 8]] {
            let a: Vec<f32> = (0..m * k).map(|i| (i % 13) as f32 - 6.0).collect();
            let b: Vec<f32> = (0..k * n).map(|i| (i % 7) as f32 - 3.0).collect();
            let exact = |r: usize, c: usize, ta: bool, tb: bool| -> f32 {
                let term = |i: usize| {
                    let x = if ta { a[i * m + r] } else { a[r * k + i] };
                    let y = if tb { b[c * k + i] } else { b[i * n + c] };
                    2.0 * x * y
                };
                (0..k).map(term).sum()
            };
            let left = [Matrix::rows(&a, k), Matrix::rows(&a, m).transposed()];
            let right = [Matrix::rows(&b, n), Matrix::rows(&b, k).transposed()];
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let (left, right) = (left[usize::from(ta)], right[usize::from(tb)]);
                // A fresh product must not read what the target holds.
                let mut target = vec![f32::NAN; m * n];
                Product::scaled(2.0, left, right).write_to(&mut target);
                Product::scaled(2.0, left, right).add_to(&mut target);
                for r in 0..m {
                    for c in 0..n {
                        assert_eq!(target[r * n + c], 2.0 * exact(r, c, ta, tb));
                    }
                }
            }
        }
    }
}
