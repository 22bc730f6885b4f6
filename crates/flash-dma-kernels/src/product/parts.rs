//! Sums over `k` in parts: A and B as batches, and the addition of the results.

use super::operands::{Operands, Output};
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::one_unit_each;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The step of a part's length, so that all parts begin where vectors and boxes do.
const STEP: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// Terms of each part except a shorter last one.
    pub length: usize,
    /// Parts of that length.
    pub full: usize,
    /// Terms of the last part, if it is shorter; otherwise 0.
    pub rest: usize,
}

impl Division {
    /// `k` terms in at most `parts` parts.
    pub(crate) fn new(k: usize, parts: usize) -> Self {
        let length = k.div_ceil(parts.max(1)).next_multiple_of(STEP).min(k);
        Self {
            length,
            full: k / length,
            rest: k % length,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.full + usize::from(self.rest > 0)
    }
}

/// The parts of full length as a batch, `[full, m, length]` and `[full, length, n]`.
pub(crate) fn batch(operands: &Operands, division: &Division) -> [TensorBinding; 2] {
    let (full, length) = (division.full, division.length);
    let mut a = operands.a.clone();
    a.shape = [full, a.shape[0], length].into();
    a.strides = [length * a.strides[1], a.strides[0], a.strides[1]].into();
    let mut b = operands.b.clone();
    b.shape = [full, length, b.shape[1]].into();
    b.strides = [length * b.strides[0], b.strides[0], b.strides[1]].into();
    [a, b]
}

pub(crate) fn terms(operands: &Operands, first: usize, count: usize) -> [TensorBinding; 2] {
    let size = operands.element.size();
    let mut a = shifted(&operands.a, first * operands.a.strides[1] * size);
    a.shape = [a.shape[0], count].into();
    let mut b = shifted(&operands.b, first * operands.b.strides[0] * size);
    b.shape = [count, b.shape[1]].into();
    [a, b]
}

/// `count` of the parts `[parts, m, n]`, in f32, from `first` on, as a batch, or for one part as a matrix.
pub(crate) fn some_of(buffer: &TensorBinding, first: usize, count: usize) -> TensorBinding {
    let [m, n] = [buffer.shape[1], buffer.shape[2]];
    let mut some = shifted(buffer, first * m * n * size_of::<f32>());
    if count == 1 {
        (some.shape, some.strides) = ([m, n].into(), [n, 1].into());
    } else {
        some.shape = [count, m, n].into();
    }
    some
}

fn shifted(tensor: &TensorBinding, bytes: usize) -> TensorBinding {
    let mut tensor = tensor.clone();
    let begin = tensor.handle.offset_start.unwrap_or(0);
    tensor.handle.offset_start = Some(begin + bytes as u64);
    tensor
}

/// The sum of all parts, rounded once: `parts` `[count, len]` in f32, `out` `[len]`, overwritten. A unit owns an element
/// and adds its parts in their order.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_parts_kernel<O: Float>(
    parts: &[f32],
    out: &mut [O],
    len: usize,
    count: usize,
    #[define(O)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < len {
        let mut sum = parts[at];
        for part in 1..count {
            sum += parts[part * len + at];
        }
        out[at] = O::cast_from(sum);
    }
}

/// Writes the sum of the `parts`, `[count, m, n]`, to `out`, `[m, n]`, both contiguous.
pub(crate) fn add(client: &Client, parts: &TensorBinding, out: Output) {
    let len = out.tensor.shape.iter().product::<usize>();
    let (cubes, dim) = one_unit_each(client, len);
    let address = address_type(&[parts, out.tensor], size_of::<f32>());
    // SAFETY: a unit reads its element of every part and writes that of the result, and those past the last do nothing.
    unsafe {
        add_parts_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            address,
            parts.clone().into_buffer_arg(),
            out.tensor.clone().into_buffer_arg(),
            len,
            parts.shape[0],
            elem_type(out.element),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_division_covers_all_terms() {
        for k in [1, 17, 127, 128, 129, 1000, 32768, 32769] {
            for parts in [1, 2, 3, 7, 64] {
                let division = Division::new(k, parts);
                assert_eq!(division.full * division.length + division.rest, k);
                assert!(division.rest < division.length && division.count() <= parts);
                assert!(division.count() == 1 || division.length.is_multiple_of(STEP));
            }
        }
    }
}
