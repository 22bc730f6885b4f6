//! Rows between global and shared memory.

use crate::portable::blueprint::{Blueprint, LANES};
use cubecl::prelude::*;

/// Four neighbouring elements of a row, f32.
pub(crate) type Row4 = Vector<f32, Const<4>>;

/// Rows of one head of a tensor `[batch, heads, len, head_dim]`: from row `first` on; rows at or past `end` do not
/// exist.
#[derive(CubeType)]
pub(crate) struct TileRows {
    pub batch: usize,
    pub head: usize,
    pub first: usize,
    pub end: usize,
}

/// [`load_rows`] of consecutive rows of a head.
#[cube]
pub(crate) fn load_tile<F: Float, N: Size>(
    src: &Tensor<Vector<F, N>>,
    from: &TileRows,
    tile: &mut Shared<[Row4]>,
    not_finite: &mut Shared<[u32]>,
    slot: usize,
    #[comptime] rows: usize,
    #[comptime] bp: Blueprint,
) {
    let base = from.batch * src.stride(0) + from.head * src.stride(1);
    let row_stride = src.stride(2);
    let mut item = UNIT_POS as usize;
    while item < comptime!(rows * bp.vectors()) {
        let (row, vector) = (
            item / comptime!(bp.vectors()),
            item % comptime!(bp.vectors()),
        );
        let mut value = Row4::new(0.0f32);
        if from.first + row < from.end && vector < comptime!(bp.head_dim / LANES) {
            let at = base + (from.first + row) * row_stride;
            value = load_checked::<F, N>(src, at, vector, not_finite, slot);
        }
        tile[row * comptime!(bp.row_stride()) + vector] = value;
        item += comptime!(bp.units());
    }
}

/// Loads rows of `src` into the shared tile `tile` (`rows` rows of `row_stride` vectors), converted to
/// f32. Row `r` comes from row `index[start + r]` of the matrix at element `base` (from row `start + r`
/// if not `listed`), rows at or past `end` and elements past `head_dim` are zero. All units cooperate;
/// the caller synchronises.
///
/// Sets `not_finite[slot]` to 1 if any element is NaN or infinite: in that case the products that weight these rows
/// must skip the pairs that are not selected, as zero times such an element is NaN.
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
            let at = base + index * row_stride;
            value = load_checked::<F, N>(src, at, vector, not_finite, slot);
        }
        tile[row * comptime!(bp.row_stride()) + vector] = value;
        item += comptime!(bp.units());
    }
}

/// [`load_vector`], which sets `not_finite[slot]` to 1 if an element is NaN or infinite.
#[cube]
fn load_checked<F: Float, N: Size>(
    src: &Tensor<Vector<F, N>>,
    base: usize,
    vector: usize,
    not_finite: &mut Shared<[u32]>,
    slot: usize,
) -> Row4 {
    let value = load_vector::<F, N>(src, base, vector);
    if !is_finite4(value) {
        not_finite[slot] = 1u32;
    }
    value
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

/// Whether all elements are finite.
#[cube]
pub(crate) fn is_finite4(value: Row4) -> bool {
    let mut finite = true;
    #[unroll]
    for e in 0..LANES {
        // Written so that NaN counts as not finite.
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

/// Writes each unit's part of an outer tile, `unit_vectors` vectors per row, to a contiguous tensor
/// `[batch, heads, len, head_dim]`; `to.end` is `len`.
#[cube]
pub(crate) fn store_tile<F: Float, N: Size>(
    dst: &mut Tensor<Vector<F, N>>,
    to: &TileRows,
    heads: usize,
    acc: &Array<Row4>,
    #[comptime] bp: Blueprint,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let row = to.first + y + o * comptime!(bp.micro.units_y);
        if row < to.end {
            let base = ((to.batch * heads + to.head) * to.end + row) * comptime!(bp.head_dim);
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let n = o * comptime!(bp.unit_vectors()) + c;
                store_row::<F, N>(dst, base, x + c * comptime!(bp.micro.units_x), acc[n], bp);
            }
        }
    }
}
