//! Integers in a row, running sums and running maxima, in linear time.
//!
//! Burn's running operations read all earlier elements again for each, so they are only called on pieces.

use burn::tensor::{Int, Tensor, TensorCreationOptions, TensorData};
use std::ops::Range;

/// Maximum length of a piece.
const PIECE: usize = 256;

/// The integers of a range, as `Tensor::arange`, which with fusion is a running sum (0.44 ms for 32 768 on an H200). Past a piece
/// they come from the host: one copy, where sums of pieces would take eight launches.
pub(crate) fn arange(
    range: Range<i64>,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<1, Int> {
    let options = options.into();
    let len = usize::try_from(range.end - range.start).unwrap_or(0);
    if len <= PIECE {
        return Tensor::arange(range, options);
    }
    let numbers: Vec<i64> = range.collect();
    Tensor::from_data(TensorData::new(numbers, [len]), options)
}

/// Running sum along the second axis.
pub(crate) fn running_sum(values: Tensor<2, Int>) -> Tensor<2, Int> {
    running(values, |piece| piece.cumsum(2), |all, more| all + more)
}

/// Running maximum of non-negative elements along the second axis.
pub(crate) fn running_max(values: Tensor<2, Int>) -> Tensor<2, Int> {
    running(values, |piece| piece.cummax(2), Tensor::max_pair)
}

type Pieces = Tensor<3, Int>;

/// Runs `within` over pieces of the second axis of `values`, which it gets as a third one, and joins their results. A zero
/// changes no result.
fn running(
    values: Tensor<2, Int>,
    within: impl Fn(Pieces) -> Pieces + Copy,
    join: impl Fn(Pieces, Pieces) -> Pieces + Copy,
) -> Tensor<2, Int> {
    let [batch, len] = values.dims();
    if len <= PIECE {
        return within(values.reshape([batch, 1, len])).reshape([batch, len]);
    }
    let pieces = len.div_ceil(PIECE);
    let device = values.device();
    let options = (&device, values.dtype());
    let mut padded = vec![values];
    if pieces * PIECE > len {
        padded.push(Tensor::zeros([batch, pieces * PIECE - len], options));
    }
    let shape = [batch, pieces, PIECE];
    let each = within(Tensor::cat(padded, 1).reshape(shape));
    let last = each.clone().narrow(2, PIECE - 1, 1);
    let up_to = running(last.reshape([batch, pieces]), within, join);
    let first = Tensor::zeros([batch, 1], options);
    let before = Tensor::cat(vec![first, up_to.narrow(1, 0, pieces - 1)], 1);
    let before = before.reshape([batch, pieces, 1]).expand(shape);
    let all: Tensor<2, Int> = join(each, before).reshape([batch, pieces * PIECE]);
    all.narrow(1, 0, len)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device};

    fn numbers<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
        tensor.into_data().iter::<i64>().collect()
    }

    #[test]
    fn pieces_join_to_what_one_loop_gives() {
        let device = Device::flex();
        let options = (&device, DType::I32);
        for len in [1, 2, 255, 256, 257, 511, 512, 1000, 65_535, 65_537] {
            for start in [-300, 0, 7] {
                let range = start..start + len;
                assert_eq!(
                    numbers(arange(range.clone(), options)),
                    range.collect::<Vec<_>>()
                );
            }
            // Two rows that differ, whose values go up and down.
            let len = len as usize;
            let row = |row: i64| (0..len as i64).map(move |at| (at * 7919 + row * 31) % 1013);
            let values = arange(0..2 * len as i64, options).reshape([2, len]);
            let values = (values.clone() % len as i64 * 7919 + values / len as i64 * 31) % 1013;
            let scan = |join: fn(i64, i64) -> i64| -> Vec<i64> {
                let scanned = |row_at| {
                    row(row_at).scan(0, move |all, more| {
                        *all = join(*all, more);
                        Some(*all)
                    })
                };
                scanned(0).chain(scanned(1)).collect()
            };
            assert_eq!(
                numbers(running_sum(values.clone())),
                scan(|a, b| a + b),
                "{len}"
            );
            assert_eq!(numbers(running_max(values)), scan(i64::max), "{len}");
        }
        assert!(numbers(arange(5..5, options)).is_empty());
    }
}
