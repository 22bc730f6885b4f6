//! The gradients of k, v and the scores on Hopper's tensor cores: key tiles stream the queries of a chunk.

use crate::backward::mma::{
    DkdvBlueprint, QueryRows, Range, STAGES, Step, Tiles, add_to, copy_queries, pick,
};
use crate::forward::mma::{LogitScale, RowAddress, exp_of};
use crate::tile::is_finite;
use crate::tile::mma::{Chunk, commit_copies, quad_sum, value, wait_copies};
use crate::tile::wgmma::{Panels, multiply_pv, multiply_two_nt, pack, panel_place, publish};
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

/// One of the two keys that a lane holds rows of.
#[derive(CubeType, Clone, Copy)]
struct OwnKey {
    /// Whether the slot holds a key.
    valid: bool,
    /// Its index in the head.
    key: usize,
    /// Its queries in the chunk.
    first: i32,
    end: i32,
    score: f32,
}

/// `dkdv_mma_kernel` with `wgmma`: the same cubes, buffers and order. A warpgroup owns 64 keys: their rows
/// of K and V lie in shared memory, their dK, dV and dz in its registers. Keys are the rows of all
/// products, so that `P^T` and `dS^T` turn from accumulators into A operands.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::backward) fn dkdv_wgmma_kernel<E: Float, O: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    v: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    lse: &[f32],
    delta: &[f32],
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &[u32],
    counts: &[u32],
    grad_k: &mut [Vector<O, Const<2>>],
    grad_v: &mut [Vector<O, Const<2>>],
    grad_scores: &mut [f32],
    scale: f32,
    softcap: f32,
    chunk: u32,
    chunk_count: u32,
    slots: u32,
    capacity: u32,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size!(NS) = comptime!(bp.rows);
    let size!(NO) = comptime!(bp.head_dim / 2);
    let size!(NP) = comptime!(bp.rows / 4);
    let chunks = comptime!(bp.chunks());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let unit = UNIT_POS as usize;
    let (q_heads, q_len) = (q.shape(1), q.shape(2));
    let (kv_heads, k_len) = (k.shape(1), k.shape(2));
    let group = q_heads / kv_heads;

    let item = CUBE_POS_X as usize / slots as usize;
    let kv_row = item / chunk_count as usize;
    let (batch, kv_head) = (kv_row / kv_heads, kv_row % kv_heads);
    let start = CUBE_POS_X as usize % slots as usize * comptime!(bp.keys());
    let chunk_first = (item % chunk_count as usize * chunk as usize) as i32;
    let chunk_end = min(chunk_first + chunk as i32, q_len as i32);
    let mut count = k_len;
    if comptime!(bp.sparse) {
        count = counts[item] as usize;
    }
    if start >= count {
        terminate!();
    }

    let list_row = item * capacity as usize + start;
    let mut tiles = Tiles::<E>::new(bp);
    if unit < comptime!(bp.keys()) {
        let own = own_key(
            unit,
            start,
            count,
            list,
            list_row,
            scores,
            0usize,
            intervals,
            kv_row * k_len,
            q_len,
            k_len,
            chunk_first,
            chunk_end,
            false,
            bp,
        );
        tiles.first[unit] = own.first;
        tiles.end[unit] = own.end;
    }
    let score_row = batch * scores.stride(0) + kv_head * scores.stride(1);
    let slot0 = warp * 16 + lane / 4;
    let key0 = own_key(
        slot0,
        start,
        count,
        list,
        list_row,
        scores,
        score_row,
        intervals,
        kv_row * k_len,
        q_len,
        k_len,
        chunk_first,
        chunk_end,
        comptime!(bp.sparse),
        bp,
    );
    let key1 = own_key(
        slot0 + 8,
        start,
        count,
        list,
        list_row,
        scores,
        score_row,
        intervals,
        kv_row * k_len,
        q_len,
        k_len,
        chunk_first,
        chunk_end,
        comptime!(bp.sparse),
        bp,
    );
    sync_cube();
    let range = query_range::<E>(&tiles, start, count, chunk_first, chunk_end, bp);
    let steps = range.tiles * (group / comptime!(bp.heads));

    let rows = QueryRows {
        q: batch * q.stride(0) / 8,
        q_head: q.stride(1) / 8,
        q_row: q.stride(2) / 8,
        o: batch * grad_out.stride(0) / 8,
        o_head: grad_out.stride(1) / 8,
        o_row: grad_out.stride(2) / 8,
        head: kv_head * group,
        row: (batch * q_heads + kv_head * group) * q_len,
        len: q_len,
    };
    let logit_scale = LogitScale::new(scale, softcap, bp.softcap);
    let mut dv = Vector::<f32, NO>::new(0.0f32);
    let mut dk = Vector::<f32, NO>::new(0.0f32);
    let mut dz0 = 0.0f32;
    let mut dz1 = 0.0f32;
    let mut any_broken = false;
    let log2e = comptime!(core::f32::consts::LOG2_E);

    if steps > 0 {
        let k_rows = RowAddress::of::<E>(k, batch, kv_head);
        let v_rows = RowAddress::of::<E>(v, batch, kv_head);
        let mut at = unit;
        while at < comptime!(bp.keys() * bp.chunks()) {
            let (row, col) = (at / chunks, at % chunks);
            let place =
                row / 64 * comptime!(64 * bp.chunks()) + panel_place(row % 64, col, 64usize);
            if start + row < count {
                let mut key = start + row;
                if comptime!(bp.sparse) {
                    key = list[list_row + row] as usize;
                }
                let from = k_rows.base + key * k_rows.stride + col;
                copy_async(&k[from..from + 1], &mut tiles.k[place..place + 1], 8u32);
                let from = v_rows.base + key * v_rows.stride + col;
                copy_async(&v[from..from + 1], &mut tiles.v[place..place + 1], 8u32);
            } else {
                tiles.k[place] = Vector::new(E::from_int(0));
                tiles.v[place] = Vector::new(E::from_int(0));
            }
            at += comptime!(bp.units());
        }
        copy_queries::<E>(
            q, grad_out, lse, delta, &rows, &range, 0usize, &mut tiles, bp,
        );
        commit_copies();

        let own = warp / 4 * comptime!(64 * bp.chunks());
        let k_panels = Panels::at::<E>(&tiles.k[own..own + 1]);
        let v_panels = Panels::at::<E>(&tiles.v[own..own + 1]);
        let q_panels = Panels::at::<E>(&tiles.q[0..1]);
        let o_panels = Panels::at::<E>(&tiles.grad_out[0..1]);
        for turn in 0..steps {
            // This unit's part of the tile has landed; behind the barrier, every unit's has, and nobody
            // needs the stage that is filled next.
            wait_copies(0u32);
            publish();
            sync_cube();
            if turn + 1 < steps {
                copy_queries::<E>(
                    q,
                    grad_out,
                    lse,
                    delta,
                    &rows,
                    &range,
                    turn + 1,
                    &mut tiles,
                    bp,
                );
            }
            commit_copies();
            let step = Step::new::<E>(turn, &range, &tiles, bp);
            let stage = turn % STAGES;
            let begin = (stage * comptime!(bp.rows * bp.chunks())) as u32;
            let q_tile = Panels {
                address: q_panels.address + begin,
            };
            let o_tile = Panels {
                address: o_panels.address + begin,
            };
            // S^T = K Q^T, and dP^T = V dO^T behind it.
            let products = multiply_two_nt::<NS>(
                &k_panels,
                &q_tile,
                &v_panels,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.rows),
                comptime!(bp.head_dim),
                64usize,
            );
            let mut p = Vector::<u32, NP>::new(0u32);
            let mut ds = Vector::<u32, NP>::new(0u32);
            #[unroll]
            for n in 0..comptime!(bp.rows / 8) {
                let mut ps = Vector::<f32, Const<4>>::new(0.0f32);
                let mut dss = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..2usize {
                    let row = comptime!(n * 8 + e) + quad * 2;
                    let at = stage * comptime!(bp.rows) + row;
                    let reference = -tiles.lse[at] * log2e;
                    let row_delta = tiles.delta[at];
                    let x0: f32 = logit_scale.apply(
                        products.extract(comptime!(n * 4 + e)),
                        key0.score,
                        bp.softcap,
                    );
                    let x1: f32 = logit_scale.apply(
                        products.extract(comptime!(n * 4 + 2 + e)),
                        key1.score,
                        bp.softcap,
                    );
                    let dp0: f32 = products.extract(comptime!(bp.rows / 2 + n * 4 + e));
                    let dp1: f32 = products.extract(comptime!(bp.rows / 2 + n * 4 + 2 + e));
                    let mut p0 = exp_of(x0, reference);
                    let mut p1 = exp_of(x1, reference);
                    let mut ds0 = p0 * (dp0 - row_delta);
                    let mut ds1 = p1 * (dp1 - row_delta);
                    if step.boundary {
                        let mut query = (step.query + row % comptime!(bp.queries())) as i32;
                        // Such a row is no query, or selects nothing.
                        if tiles.lse[at] == f32::new(f32::NEG_INFINITY)
                            || row >= comptime!(bp.queries() * bp.heads)
                        {
                            query = -1i32;
                        }
                        let keep0 = key0.first <= query && query < key0.end;
                        let keep1 = key1.first <= query && query < key1.end;
                        p0 = select(keep0, p0, 0.0f32);
                        p1 = select(keep1, p1, 0.0f32);
                        ds0 = select(keep0, ds0, 0.0f32);
                        ds1 = select(keep1, ds1, 0.0f32);
                    }
                    dz0 += ds0;
                    dz1 += ds1;
                    if comptime!(bp.softcap) {
                        ds0 *= logit_scale.slope(x0 - key0.score, bp.softcap);
                        ds1 *= logit_scale.slope(x1 - key1.score, bp.softcap);
                    }
                    ps.insert(e, p0);
                    ps.insert(comptime!(2 + e), p1);
                    dss.insert(e, ds0);
                    dss.insert(comptime!(2 + e), ds1);
                }
                #[unroll]
                for half in 0..2usize {
                    let (x, y) = comptime!((half * 2, half * 2 + 1));
                    let at = comptime!(n * 2 + half);
                    p.insert(
                        at,
                        pack(ps.extract(x), ps.extract(y), comptime!(bp.element)),
                    );
                    ds.insert(
                        at,
                        pack(dss.extract(x), dss.extract(y), comptime!(bp.element)),
                    );
                }
            }
            if step.broken {
                // All warps have their logits: only the products with P and dS are left to this tile.
                any_broken = true;
                sync_cube();
                zero_not_finite::<E>(&mut tiles.q, stage, bp);
                zero_not_finite::<E>(&mut tiles.grad_out, stage, bp);
                publish();
                sync_cube();
            }
            dv = multiply_pv::<NO, NP>(
                dv,
                p,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
            dk = multiply_pv::<NO, NP>(
                dk,
                ds,
                &q_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
        }
    }
    let base = kv_row * k_len;
    if key0.valid {
        let at = (base + key0.key) * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(grad_v, &dv, at, 1.0f32, 0usize, bp);
        write_row::<O, NO>(grad_k, &dk, at, scale, 0usize, bp);
    }
    if key1.valid {
        let at = (base + key1.key) * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(grad_v, &dv, at, 1.0f32, 1usize, bp);
        write_row::<O, NO>(grad_k, &dk, at, scale, 1usize, bp);
    }
    if comptime!(bp.sparse) {
        let dz0 = quad_sum(dz0);
        let dz1 = quad_sum(dz1);
        if quad == 0 {
            if key0.valid {
                write_score(grad_scores, base + key0.key, dz0, bp);
            }
            if key1.valid {
                write_score(grad_scores, base + key1.key, dz1, bp);
            }
        }
    }
    if any_broken {
        // What the zeroed elements of dO would have added to dV. Those of Q add nothing: a query that is
        // not finite has an LSE that is NaN, and P and dS with it.
        let k_rows = RowAddress::of::<E>(k, batch, kv_head);
        for head in 0..group {
            let first = range.first * comptime!(bp.queries());
            let last = min(first + range.tiles * comptime!(bp.queries()), q_len);
            for query in first..last {
                let row = rows.row + head * q_len + query;
                let row_lse = lse[row];
                if row_lse != f32::new(f32::NEG_INFINITY) && !is_finite(delta[row]) {
                    let q_at = rows.q + (rows.head + head) * rows.q_head + query * rows.q_row;
                    let o_at = rows.o + (rows.head + head) * rows.o_head + query * rows.o_row;
                    add_broken_row::<E, O>(
                        q,
                        k,
                        grad_out,
                        &key0,
                        &k_rows,
                        q_at,
                        o_at,
                        query,
                        row_lse,
                        &logit_scale,
                        grad_v,
                        base,
                        bp,
                    );
                    add_broken_row::<E, O>(
                        q,
                        k,
                        grad_out,
                        &key1,
                        &k_rows,
                        q_at,
                        o_at,
                        query,
                        row_lse,
                        &logit_scale,
                        grad_v,
                        base,
                        bp,
                    );
                }
            }
        }
    }
}

/// The key of slot `slot` of the tile; a slot past the last key is seen by no query, but does not narrow
/// the queries that all keys share.
#[cube]
fn own_key(
    slot: usize,
    start: usize,
    count: usize,
    list: &[u32],
    list_row: usize,
    scores: &Tensor<f32>,
    score_row: usize,
    intervals: &[Vector<u32, Const<2>>],
    interval_row: usize,
    q_len: usize,
    k_len: usize,
    chunk_first: i32,
    chunk_end: i32,
    #[comptime] scored: bool,
    #[comptime] bp: DkdvBlueprint,
) -> OwnKey {
    let mut own = OwnKey {
        valid: start + slot < count,
        key: 0usize,
        first: 0i32,
        end: i32::new(comptime!(i32::MAX as i64)),
        score: 0.0f32,
    };
    if own.valid {
        // Positions first, then queries.
        own.key = start + slot;
        let mut first = own.key as i32;
        let mut end = k_len as i32;
        if comptime!(bp.sparse) {
            own.key = list[list_row + slot] as usize;
            let interval = intervals[interval_row + own.key];
            first = interval.extract(0usize) as i32;
            end = interval.extract(1usize) as i32;
        }
        if comptime!(scored) {
            own.score = scores[score_row + own.key];
        }
        if comptime!(bp.causal) {
            first += q_len as i32 - k_len as i32;
            end += q_len as i32 - k_len as i32;
        } else {
            // All queries stand at the last key.
            end = select(end >= k_len as i32, q_len as i32, 0i32);
            first = 0i32;
        }
        own.first = max(first, chunk_first);
        own.end = min(end, chunk_end);
    }
    own
}

/// The query tiles of a key tile whose `first` and `end` are in shared memory.
#[cube]
fn query_range<E: Float>(
    tiles: &Tiles<E>,
    start: usize,
    count: usize,
    chunk_first: i32,
    chunk_end: i32,
    #[comptime] bp: DkdvBlueprint,
) -> Range {
    let mut any_from = chunk_end;
    let mut any_to = chunk_first;
    let mut full_from = chunk_first;
    let mut full_to = chunk_end;
    let mut slot = UNIT_POS_X as usize;
    while slot < comptime!(bp.keys()) {
        if start + slot < count {
            let (first, end) = (tiles.first[slot], tiles.end[slot]);
            any_from = min(any_from, first);
            any_to = max(any_to, end);
            full_from = max(full_from, first);
            full_to = min(full_to, end);
        }
        slot += 32;
    }
    any_from = plane_min(any_from);
    any_to = plane_max(any_to);
    let queries = comptime!(bp.queries());
    let mut range = Range {
        first: any_from as usize / queries,
        tiles: 0usize,
        full_from: plane_max(full_from),
        full_to: plane_min(full_to),
    };
    if any_from < any_to {
        range.tiles = (any_to as usize).div_ceil(queries) - range.first;
    }
    range
}

/// Zeroes the elements of a stage of queries or output gradients that are not finite.
#[cube]
fn zero_not_finite<E: Float>(
    rows: &mut Shared<[Chunk<E>]>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    let mut at = UNIT_POS as usize;
    while at < comptime!(bp.rows * bp.chunks()) {
        let place = stage * comptime!(bp.rows * bp.chunks()) + at;
        let mut values = rows[place];
        #[unroll]
        for e in 0..8usize {
            if !is_finite(f32::cast_from(values.extract(e))) {
                values.insert(e, E::from_int(0));
            }
        }
        rows[place] = values;
        at += comptime!(bp.units());
    }
}

/// Adds to dV of a key, in memory, what the elements of dO of one query that are not finite contribute, if
/// the query attends to the key. A lane adds to the elements that it has written. Rare, hence simple:
/// everything is read from global memory again.
#[cube]
fn add_broken_row<E: Float, O: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    own: &OwnKey,
    k_rows: &RowAddress,
    q_at: usize,
    o_at: usize,
    query: usize,
    lse: f32,
    logit_scale: &LogitScale,
    grad_v: &mut [Vector<O, Const<2>>],
    first_row: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    if own.valid && own.first <= query as i32 && (query as i32) < own.end {
        let chunks = comptime!(bp.chunks());
        let quad = UNIT_POS_X as usize % 4;
        let k_at = k_rows.base + own.key * k_rows.stride;
        let mut product = 0.0f32;
        for c in 0..chunks {
            let (a, b) = (q[q_at + c], k[k_at + c]);
            #[unroll]
            for e in 0..8usize {
                product += f32::cast_from(a.extract(e)) * f32::cast_from(b.extract(e));
            }
        }
        let x = logit_scale.apply(product, own.score, bp.softcap);
        let weight = exp_of(x, -lse * comptime!(core::f32::consts::LOG2_E));
        for c in 0..chunks {
            let pair = pick::<E>(grad_out[o_at + c], quad);
            let (x, y) = (pair.extract(0usize), pair.extract(1usize));
            if !is_finite(x) || !is_finite(y) {
                let more_x = select(is_finite(x), 0.0f32, weight * x);
                let more_y = select(is_finite(y), 0.0f32, weight * y);
                let at = (first_row + own.key) * comptime!(bp.head_dim / 2) + c * 4 + quad;
                if comptime!(bp.shared_keys) {
                    add_pair::<O>(&mut grad_v[at..at + 1], more_x, more_y);
                } else {
                    let mut sum = Vector::<f32, Const<2>>::cast_from(grad_v[at]);
                    sum.insert(0usize, sum.extract(0usize) + more_x);
                    sum.insert(1usize, sum.extract(1usize) + more_y);
                    grad_v[at] = Vector::cast_from(sum);
                }
            }
        }
    }
}

/// Writes or adds `factor` times one of the two rows that this lane holds elements of.
#[cube]
fn write_row<O: Float, N: Size>(
    grad: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    at: usize,
    factor: f32,
    #[comptime] lower: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    #[unroll]
    for c in 0..comptime!(bp.chunks()) {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x: f32 = acc.extract(comptime!(c * 4 + lower * 2 + e));
            pair.insert(e, x * factor);
        }
        let to = at + comptime!(c * 4);
        if comptime!(bp.shared_keys) {
            add_pair::<O>(
                &mut grad[to..to + 1],
                pair.extract(0usize),
                pair.extract(1usize),
            );
        } else {
            grad[to] = Vector::cast_from(pair);
        }
    }
}

#[cube]
fn write_score(grad: &mut [f32], at: usize, sum: f32, #[comptime] bp: DkdvBlueprint) {
    if comptime!(bp.shared_keys) {
        add_to(&mut grad[at..at + 1], sum);
    } else {
        grad[at] = sum;
    }
}

/// Adds to both elements of a pair of f32 in global memory.
#[cube]
fn add_pair<O: Float>(to: &mut [Vector<O, Const<2>>], x: f32, y: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.v2.f32 [g], {{{x}, {y}}}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        y = in(_) value::<f32>(y),
        options(explicit_mem)
    );
}
