//! Shared-memory tiles of 16-bit rows, and their products.

use crate::tile::mma::{Accumulators, Chunk, swizzle};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// A fragments, one a step along the columns or one a group of 16 rows.
pub(super) type Fragments<E, NA> = Sequence<Array<Vector<E, NA>>>;

/// The A fragment of the 16 rows from `row` and the columns `16 c ..` of the tile at chunk `base`.
#[cube]
pub(super) fn load_a<E: Float, NA: Size>(
    def: &MmaDefinition<E, E, f32>,
    tile: &[Chunk<E>],
    base: usize,
    row: usize,
    #[comptime] c: usize,
    #[comptime] chunks: usize,
) -> Array<Vector<E, NA>> {
    let lane = UNIT_POS_X as usize;
    let at = base + swizzle(row + lane % 16, comptime!(c * 2) + lane / 16, chunks);
    def.load_matrix::<_, NA>(&tile[at..at + 1], MatrixIdent::A, 4usize, false)
}

/// `out[m][n ..] += a[m] * B` for every fragment `m` of `a`, where `B` are 16 rows of the tile at chunk
/// `base` from row `row`, at the columns `16 c ..`. `out` holds `columns` accumulators a fragment.
///
/// Not transposed, the tile's rows are B's columns; transposed, they are B's rows.
#[cube]
pub(super) fn multiply_rows<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    a: &Fragments<E, NA>,
    tile: &[Chunk<E>],
    base: usize,
    row: usize,
    out: &mut Accumulators<NC>,
    #[comptime] fragments: usize,
    #[comptime] columns: usize,
    #[comptime] n: usize,
    #[comptime] c: usize,
    #[comptime] chunks: usize,
    #[comptime] transposed: bool,
) {
    let lane = UNIT_POS_X as usize;
    let mut at = base;
    if comptime!(transposed) {
        at += swizzle(row + lane % 16, comptime!(c * 2) + lane / 16, chunks);
    } else {
        let row = row + lane / 16 * 8 + lane % 8;
        at += swizzle(row, comptime!(c * 2) + lane / 8 % 2, chunks);
    }
    let r = def.load_matrix::<_, NB>(&tile[at..at + 1], MatrixIdent::B, 4usize, transposed);
    let mut first = Array::<Vector<E, NB>>::new(2usize);
    let mut second = Array::<Vector<E, NB>>::new(2usize);
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
    #[unroll]
    for m in 0..fragments {
        def.execute_inplace(&a[m], &first, &mut out[comptime!(m * columns + n)]);
        def.execute_inplace(&a[m], &second, &mut out[comptime!(m * columns + n + 1)]);
    }
}
