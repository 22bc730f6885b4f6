//! Rows between global and shared memory.

use super::blueprint::{Blueprint, LANES};
use cubecl::prelude::*;

/// Four neighbouring elements of a row, f32.
pub(crate) type Row4 = Vector<f32, Const<4>>;

/// Loads rows of `src` into the shared tile `tile` (`rows` rows of `row_stride` vectors), converted to
/// f32. Row `r` comes from row `index[start + r]` of the matrix at element `base` (from row `start + r`
/// if not `listed`), rows at or past `end` and elements past `head_dim` are zero. All units cooperate;
/// the caller synchronises.
///
/// Sets `not_finite[slot]` to 1 if any element is NaN or infinite: then the products that weight these
/// rows must skip the pairs that are not selected, as zero times such an element is NaN.
#[cube]
pub(crate) fn load_rows<F: Float, N: Size>(
    src: &Tensor<Vector<F, N>>,
    base: usize,
    row_stride: usize,
    list: &Tensor<u32>,
    list_base: usize,
    start: usize,
    end: usize,
    tile: &mut Shared<[Row4]>,
    not_finite: &mut Shared<[u32]>,
    slot: usize,
    #[comptime] rows: usize,
    #[comptime] listed: bool,
    #[comptime] bp: Blueprint,
) {
    let vectors = comptime!(bp.vectors());
    let mut item = UNIT_POS as usize;
    while item < comptime!(rows * bp.vectors()) {
        let row = item / vectors;
        let vector = item % vectors;
        let mut value = Row4::new(0.0f32);
        if start + row < end && vector < comptime!(bp.head_dim / LANES) {
            let mut index = start + row;
            if comptime!(listed) {
                index = list[list_base + start + row] as usize;
            }
            value = load_vector::<F, N>(src, base + index * row_stride, vector);
            if !is_finite4(value) {
                not_finite[slot] = 1u32;
            }
        }
        tile[row * comptime!(bp.row_stride()) + vector] = value;
        item += comptime!(bp.units());
    }
}

/// The vector `vector` of the row that starts at element `base` of `src`, converted to f32.
#[cube]
pub(crate) fn load_vector<F: Float, N: Size>(
    src: &Tensor<Vector<F, N>>,
    base: usize,
    vector: usize,
) -> Row4 {
    let size = src.vector_size().comptime();
    let mut value = Row4::new(0.0f32);
    let at = base / size + vector * comptime!(LANES / size);
    #[unroll]
    for piece in 0..comptime!(LANES / size) {
        let part = src[at + piece];
        #[unroll]
        for e in 0..size {
            value.insert(comptime!(piece * size + e), f32::cast_from(part.extract(e)));
        }
    }
    value
}

/// Whether no element is NaN or infinite.
#[cube]
pub(crate) fn is_finite4(value: Row4) -> bool {
    let mut finite = true;
    #[unroll]
    for e in 0..LANES {
        // Written so that NaN is not finite, too.
        let is_number = value.extract(e).abs() <= f32::new(f32::MAX);
        if !is_number {
            finite = false;
        }
    }
    finite
}

/// Writes the vector `vector` of a row that starts at element `base` of `dst`, converted to its type;
/// nothing past `head_dim`.
#[cube]
pub(crate) fn store_row<F: Float, N: Size>(
    dst: &mut Tensor<Vector<F, N>>,
    base: usize,
    vector: usize,
    value: Row4,
    #[comptime] bp: Blueprint,
) {
    let size = dst.vector_size().comptime();
    if vector < comptime!(bp.head_dim / LANES) {
        #[unroll]
        for piece in 0..comptime!(LANES / size) {
            let mut part = Vector::<F, N>::empty();
            #[unroll]
            for e in 0..size {
                part.insert(e, F::cast_from(value.extract(comptime!(piece * size + e))));
            }
            dst[base / size + vector * comptime!(LANES / size) + piece] = part;
        }
    }
}
