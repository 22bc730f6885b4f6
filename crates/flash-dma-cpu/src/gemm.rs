//! Matrix products on tiles, on the calling thread.

use gemm::Parallelism;

/// A matrix in a slice: element `(r, c)` is `data[r * rows + c * columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `width` contiguous elements.
    pub(crate) fn rows(data: &'a [f32], width: usize) -> Self {
        Self {
            data,
            row_stride: width,
            column_stride: 1,
        }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    fn check(&self, rows: usize, columns: usize) {
        let last = (rows - 1) * self.row_stride + (columns - 1) * self.column_stride;
        assert!(last < self.data.len(), "a matrix passes its buffer");
    }
}

/// `target = factor * left * right`, or `target += ..` if `accumulate`, with `target` of `m` rows of
/// `n` contiguous elements, `left` of `m` by `k`, `right` of `k` by `n`.
pub(crate) fn product(
    [m, n, k]: [usize; 3],
    target: &mut [f32],
    accumulate: bool,
    factor: f32,
    left: Matrix<'_>,
    right: Matrix<'_>,
) {
    assert!(m > 0 && n > 0 && k > 0 && target.len() >= m * n);
    left.check(m, k);
    right.check(k, n);
    // SAFETY: the three matrices lie in their slices (checked above), and `target` is borrowed
    // exclusively, so it overlaps neither operand.
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
            factor,
            false,
            false,
            false,
            Parallelism::None,
        );
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
                (0..k)
                    .map(|i| {
                        let x = if ta { a[i * m + r] } else { a[r * k + i] };
                        let y = if tb { b[c * k + i] } else { b[i * n + c] };
                        2.0 * x * y
                    })
                    .sum()
            };
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let left = if ta {
                    Matrix::rows(&a, m).transposed()
                } else {
                    Matrix::rows(&a, k)
                };
                let right = if tb {
                    Matrix::rows(&b, k).transposed()
                } else {
                    Matrix::rows(&b, n)
                };
                // A fresh product must not read what the target holds.
                let mut target = vec![f32::NAN; m * n];
                product([m, n, k], &mut target, false, 2.0, left, right);
                product([m, n, k], &mut target, true, 2.0, left, right);
                for r in 0..m {
                    for c in 0..n {
                        assert_eq!(target[r * n + c], 2.0 * exact(r, c, ta, tb));
                    }
                }
            }
        }
    }
}
