//! Rows between global and shared memory.

use crate::finite::negative_infinity;
use crate::portable::args::{Operands, SavedRows, Sizes};
use crate::portable::blueprint::{Blueprint, LANES};
use cubecl::prelude::*;

/// Four neighbouring elements of a row, f32.
pub type Row4 = Vector<f32, Const<4>>;

/// Rows of one head of a tensor `[batch, heads, len, head_dim]`: from row `first` on, or from entry `first` of a list
/// on; those at or past `end` do not exist.
#[derive(CubeType)]
pub struct TileRows<'a> {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) first: usize,
    pub(crate) end: usize,
    pub(crate) list: ComptimeOption<RowList<'a>>,
}

/// A list of the rows of one head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowList<'a> {
    pub list: &'a Tensor<u32>,
    /// The list's first element.
    pub base: usize,
}

#[cube]
impl<'a> TileRows<'a> {
    /// Consecutive rows.
    pub fn new(batch: usize, head: usize, first: usize, end: usize) -> TileRows<'a> {
        TileRows::<'a> {
            batch,
            head,
            first,
            end,
            list: ComptimeOption::new_None(),
        }
    }

    /// The row of entry `n`, which is less than `end`.
    pub(crate) fn index(&self, n: usize) -> usize {
        #[comptime]
        match &self.list {
            ComptimeOption::Some(rows) => rows.list[rows.base + n] as usize,
            ComptimeOption::None => n,
        }
    }
}

/// Marks an inner tile as not finite: it holds NaN or infinities, so that the products that weight its rows must skip
/// the pairs that are not selected, as zero times such an element is NaN. Two flags in shared memory alternate: loading
/// a tile sets one while the other is cleared. A third belongs to the outer tile and is never read.
#[derive(CubeType)]
pub struct NotFinite {
    flags: Shared<[u32]>,
    /// The flag of the tile that is loaded or used.
    tile: usize,
}

#[cube]
impl NotFinite {
    /// The flags before the outer tile is loaded.
    pub fn new() -> NotFinite {
        let mut flags = Shared::<[u32]>::new_slice(3usize);
        if UNIT_POS == 0 {
            flags[0] = 0u32;
            flags[1] = 0u32;
        }
        NotFinite {
            flags,
            tile: 2usize,
        }
    }

    /// Begins with the flag of the first inner tile.
    pub(crate) fn first_tile(&mut self) {
        self.tile = 0usize;
    }

    /// Clears the next tile's flag. Call it between the synchronisations after loading this tile and before loading the
    /// next.
    pub(crate) fn clear_next(&mut self) {
        if UNIT_POS == 0 {
            self.flags[1 - self.tile] = 0u32;
        }
    }

    pub(crate) fn next_tile(&mut self) {
        self.tile = 1 - self.tile;
    }

    /// Marks the loaded tile as not finite unless `value` is finite.
    pub(crate) fn check(&mut self, value: Row4) {
        let mut finite = true;
        #[unroll]
        for e in 0..LANES {
            // Written so that NaN counts as not finite.
            let is_number = value.extract(e).abs() <= f32::new(f32::MAX);
            if !is_number {
                finite = false;
            }
        }
        if !finite {
            self.flags[self.tile] = 1u32;
        }
    }

    pub(crate) fn get(&self) -> bool {
        self.flags[self.tile] != 0u32
    }
}

/// Room for `rows` rows in shared memory.
#[cube]
pub fn shared_rows(#[comptime] rows: usize, #[comptime] bp: Blueprint) -> Shared<[Row4]> {
    Shared::<[Row4]>::new_aligned_slice(comptime!(rows * bp.row_stride()), 16usize)
}

/// Room for the weights of an outer and an inner tile in shared memory, in the layout that
/// [`accumulate`](crate::portable::product::accumulate) reads.
#[cube]
pub(crate) fn shared_weights(#[comptime] bp: Blueprint) -> Shared<[Row4]> {
    Shared::<[Row4]>::new_aligned_slice(comptime!(bp.outer_rows() * bp.weight_stride()), 16usize)
}

/// The rows of a tile of keys in shared memory, f32.
#[derive(CubeType)]
pub(crate) struct KeyRows {
    pub k: Shared<[Row4]>,
    pub v: Shared<[Row4]>,
    #[cube(comptime)]
    rows: usize,
}

#[cube]
impl KeyRows {
    /// Room for the outer or an inner tile.
    pub(crate) fn new(#[comptime] outer: bool, #[comptime] bp: Blueprint) -> KeyRows {
        let rows = comptime!(bp.rows(outer));
        KeyRows {
            k: shared_rows(rows, bp),
            v: shared_rows(rows, bp),
            rows,
        }
    }

    /// Loads a tile, as [`load_tile`] does.
    pub(crate) fn load<F: Float, N: Size>(
        &mut self,
        operands: &Operands<F, N>,
        from: &TileRows,
        not_finite: &mut NotFinite,
        #[comptime] bp: Blueprint,
    ) {
        load_tile::<F, N>(&operands.k, from, &mut self.k, not_finite, self.rows, bp);
        load_tile::<F, N>(&operands.v, from, &mut self.v, not_finite, self.rows, bp);
    }
}

/// The saved numbers of a tile of queries in shared memory, f32.
#[derive(CubeType)]
pub(crate) struct QueryRows {
    /// −∞ past the last query.
    pub lse: Shared<[f32]>,
    /// The rounding errors of the LSEs.
    pub lse_rest: Shared<[f32]>,
    pub delta: Shared<[f32]>,
    pub q: Shared<[Row4]>,
    pub grad_out: Shared<[Row4]>,
    #[cube(comptime)]
    rows: usize,
}

#[cube]
impl QueryRows {
    /// Room for the outer or an inner tile.
    pub(crate) fn new(#[comptime] outer: bool, #[comptime] bp: Blueprint) -> QueryRows {
        let rows = comptime!(bp.rows(outer));
        QueryRows {
            lse: Shared::<[f32]>::new_slice(rows),
            lse_rest: Shared::<[f32]>::new_slice(rows),
            delta: Shared::<[f32]>::new_slice(rows),
            q: shared_rows(rows, bp),
            grad_out: shared_rows(rows, bp),
            rows,
        }
    }

    /// Loads the LSEs and row sums of a tile. All units cooperate: row `r` is loaded by the unit that passes it if
    /// units pass the rows in turn. The caller synchronises.
    pub(crate) fn load_sums<F: Float, N: Size>(
        &mut self,
        saved: &SavedRows<F, N>,
        from: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        let base = (from.batch * sizes.q_heads + from.head) * sizes.q_len;
        let mut row = UNIT_POS as usize;
        while row < self.rows {
            let query = from.first + row;
            self.lse[row] = negative_infinity();
            if query < from.end {
                self.lse[row] = saved.lse[base + query];
                self.lse_rest[row] = saved.lse_rest[base + query];
                self.delta[row] = saved.delta[base + query];
            }
            row += comptime!(bp.units());
        }
    }

    /// The difference of a logit and the LSE of row `row`. The LSE is subtracted before its rounding error, so that
    /// nothing of the size of the logits is rounded.
    pub(crate) fn above_lse(&self, logit: f32, row: usize) -> f32 {
        (logit - self.lse[row]) - self.lse_rest[row]
    }

    /// The probability of a kept key's logit in row `row`: at most 1, though a logit of 1e9 may be recomputed 64 higher
    /// than the forward pass had it. NaN stays NaN.
    pub(crate) fn probability(&self, logit: f32, row: usize) -> f32 {
        let above = self.above_lse(logit, row);
        select(above > 0.0f32, 0.0f32, above).exp()
    }

    /// Loads the rows of a tile, as [`load_tile`] does.
    pub(crate) fn load<F: Float, N: Size>(
        &mut self,
        operands: &Operands<F, N>,
        saved: &SavedRows<F, N>,
        from: &TileRows,
        not_finite: &mut NotFinite,
        #[comptime] bp: Blueprint,
    ) {
        load_tile::<F, N>(&operands.q, from, &mut self.q, not_finite, self.rows, bp);
        let (src, rows) = (&saved.grad_out, comptime!(self.rows));
        load_tile::<F, N>(src, from, &mut self.grad_out, not_finite, rows, bp);
    }
}

/// Loads `rows` rows of `src` into the shared tile `tile`, converted to f32; rows that do not exist and elements past
/// `head_dim` are zero. All units cooperate; the caller synchronises.
#[cube]
pub fn load_tile<F: Float, N: Size>(
    src: &Tensor<Vector<F, N>>,
    from: &TileRows,
    tile: &mut Shared<[Row4]>,
    not_finite: &mut NotFinite,
    #[comptime] rows: usize,
    #[comptime] bp: Blueprint,
) {
    let base = from.batch * src.stride(0) + from.head * src.stride(1);
    let row_stride = src.stride(2);
    let mut item = UNIT_POS as usize;
    while item < comptime!(rows * bp.vectors()) {
        let row = item / comptime!(bp.vectors());
        let vector = item % comptime!(bp.vectors());
        let mut value = Row4::new(0.0f32);
        if from.first + row < from.end && vector < comptime!(bp.head_dim / LANES) {
            let at = base + from.index(from.first + row) * row_stride;
            value = load_vector::<F, N>(src, at, vector);
            not_finite.check(value);
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

/// Writes the vector `vector` of a row from element `base` of `dst` on, converted; nothing past `head_dim`.
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

/// Writes each unit's part of an outer tile, `unit_vectors` per row, to a contiguous `[batch, heads, len, head_dim]`.
#[cube]
pub(crate) fn store_tile<F: Float, N: Size>(
    dst: &mut Tensor<Vector<F, N>>,
    to: &TileRows,
    acc: &Array<Row4>,
    #[comptime] bp: Blueprint,
) {
    let (heads, len) = (dst.shape(1), dst.shape(2));
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let n = to.first + UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
        if n < to.end {
            let row = (to.batch * heads + to.head) * len + to.index(n);
            store_unit::<F, N>(dst, row * comptime!(bp.head_dim), acc, o, bp);
        }
    }
}

/// [`store_tile`] to a tensor of any strides with a contiguous last axis.
#[cube]
pub(crate) fn store_strided<F: Float, N: Size>(
    dst: &mut Tensor<Vector<F, N>>,
    to: &TileRows,
    acc: &Array<Row4>,
    #[comptime] bp: Blueprint,
) {
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let n = to.first + UNIT_POS_Y as usize + o * comptime!(bp.micro.units_y);
        if n < to.end {
            let of_head = to.batch * dst.stride(0) + to.head * dst.stride(1);
            let base = of_head + to.index(n) * dst.stride(2);
            store_unit::<F, N>(dst, base, acc, o, bp);
        }
    }
}

/// Writes a unit's part of its `o`-th row, which begins at element `base`.
#[cube]
fn store_unit<F: Float, N: Size>(
    dst: &mut Tensor<Vector<F, N>>,
    base: usize,
    acc: &Array<Row4>,
    o: usize,
    #[comptime] bp: Blueprint,
) {
    #[unroll(bp.unroll())]
    for c in 0..comptime!(bp.unit_vectors()) {
        let value = acc[o * comptime!(bp.unit_vectors()) + c];
        let vector = UNIT_POS_X as usize + c * comptime!(bp.micro.units_x);
        store_row::<F, N>(dst, base, vector, value, bp);
    }
}
