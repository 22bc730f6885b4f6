//! The gradient contributions of rows with NaN or infinite elements, on tiles where some pairs are not selected.
//!
//! A product over a tile also multiplies such a row by the zero weights of the pairs that are not selected, and
//! `0 * NaN` is NaN. There the products treat such elements as zero, and their contributions to the selected pairs are
//! added here, in memory, after the gradients are written: each lane adds to the elements that it has written. Rare,
//! hence simple: everything is read from global memory again.

use crate::alibi::AlibiRow;
use crate::backward::dkdv::shared::alibi::key_place;
use crate::backward::dkdv::shared::args::{BackwardInputs, GradientRows};
use crate::backward::dkdv::shared::keys::OwnKey;
use crate::backward::dkdv::shared::queries::Pairs;
use crate::dropout::{column_word, head_word, row_word};
use crate::finite::is_finite;
use crate::matrix::logit_scale::ExactLse;
use crate::matrix::stages::RowAddress;
use crate::vectors::pick;
use cubecl::prelude::*;

/// A pair of a key and a query whose row of Q or dO is not finite.
#[derive(CubeType, Clone, Copy)]
struct NotFinitePair {
    /// The starts of the query's row of Q, and of the row that is added: of dO for dV, of Q for dK.
    q: usize,
    added: usize,
    lse: f32,
    /// The score or the bias of the key.
    score: f32,
    /// The query's head among those of all sequences, and its index.
    head: usize,
    query: usize,
}

/// Adds the contributions of rows that are not finite (of dO to dV if `of_values`, of Q to dK) to the gradient of the
/// key `own`, over the queries that attend to it. `shared` is true if cubes of other chunks add to the gradient, too.
#[cube]
pub(crate) fn repair_key<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    own: &OwnKey,
    shared: bool,
    k_rows: &RowAddress,
    pairs: &Pairs,
    grad: &mut GradientRows<O>,
    #[comptime] of_values: bool,
) {
    let (rows, mask, bp) = (&pairs.rows, &pairs.mask, comptime!(pairs.bp));
    if own.valid && own.first < own.end {
        for head in 0..inputs.q.shape(1) / inputs.k.shape(1) {
            for query in own.first as usize..own.end as usize {
                let row = rows.row + head * rows.len + query;
                let mut score = own.score;
                if comptime!(bp.pattern.has_head_bias() || bp.pattern.has_pair_bias()) {
                    score = mask.bias(head, query, own.behind(mask));
                }
                score = with_alibi::<E>(score, inputs, own.key, head, query, pairs);
                let lse = inputs.lse[row];
                // With a softcap the row sum does not reveal Q.
                let mut not_finite = comptime!(bp.softcap) || !is_finite(inputs.delta[row]);
                if comptime!(bp.pattern.is_planned()) {
                    // Only rows with an LSE of -inf can have a non-finite Q that the row sum does not reveal.
                    let word = mask.word(head, query) >> (own.key % 32) as u32;
                    not_finite = not_finite && word & 1u32 == 1u32;
                }
                if not_finite && lse != f32::new(f32::NEG_INFINITY) {
                    let q = rows.q + (rows.head + head) * rows.q_head + query * rows.q_row;
                    let o = rows.o + (rows.head + head) * rows.o_head + query * rows.o_row;
                    let added = if comptime!(of_values) { o } else { q };
                    let pair = NotFinitePair {
                        q,
                        added,
                        lse,
                        score,
                        head: rows.row / rows.len + head,
                        query,
                    };
                    add_not_finite::<E, O>(
                        inputs, own, shared, k_rows, &pair, pairs, grad, of_values,
                    );
                }
            }
        }
    }
}

/// The score of a key for head `head` of the group, with ALiBi.
#[cube]
fn with_alibi<E: Float>(
    score: f32,
    inputs: &BackwardInputs<E>,
    key: usize,
    head: usize,
    query: usize,
    pairs: &Pairs,
) -> f32 {
    #[comptime]
    match &inputs.slopes {
        ComptimeOption::Some(slopes) => {
            let row = AlibiRow {
                slope: slopes[pairs.rows.head + head],
                place: f32::cast_from(query as u32),
            };
            let place = key_place(key, pairs.rows.len, inputs.k.shape(2), pairs.bp);
            row.biased(score, place)
        }
        ComptimeOption::None => score,
    }
}

#[cube]
fn weighed(p: f32, k_len: usize, own: &OwnKey, pair: &NotFinitePair, pairs: &Pairs) -> f32 {
    #[comptime]
    match &pairs.dropout {
        ComptimeOption::Some(seed) => {
            let head = head_word(pair.head, seed);
            let row = row_word(head, pair.query, pairs.rows.len, k_len);
            p * seed.weight(row, column_word(own.key, seed))
        }
        ComptimeOption::None => p,
    }
}

/// Adds the contributions of the non-finite elements of one query's row to the gradient of one key. Elements of dO add
/// to dV, times the pair's probability. Elements of Q add NaN to dK: such a query's logits are not finite, or capped
/// and without slope.
#[cube]
fn add_not_finite<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    own: &OwnKey,
    shared: bool,
    k_rows: &RowAddress,
    pair: &NotFinitePair,
    pairs: &Pairs,
    grad: &mut GradientRows<O>,
    #[comptime] of_values: bool,
) {
    let bp = comptime!(pairs.bp);
    let segments = comptime!(bp.segments());
    let quad = UNIT_POS_X as usize % 4;
    let mut weight = f32::new(f32::NAN);
    if comptime!(of_values) {
        let mut product = 0.0f32;
        for c in 0..segments {
            let a = inputs.q[pair.q + c];
            let b = inputs.k[k_rows.base + own.key * k_rows.stride + c];
            #[unroll]
            for e in 0..8usize {
                product += f32::cast_from(a.extract(e)) * f32::cast_from(b.extract(e));
            }
        }
        let x = (pairs.logit_scale).apply(product, pair.score);
        // Only the sign of a non-finite number's factor matters, so the rounded LSE serves.
        let lse = ExactLse {
            lse: pair.lse,
            rest: 0.0f32,
        };
        let p = lse.probability(x);
        weight = weighed(p, inputs.k.shape(2), own, pair, pairs);
    }
    for c in 0..segments {
        let segment = if comptime!(of_values) {
            inputs.grad_out[pair.added + c]
        } else {
            inputs.q[pair.added + c]
        };
        let values = pick::<E>(segment, quad);
        let at = own.row * comptime!(bp.head_dim / 2) + c * 4 + quad;
        let (x, y) = (values.extract(0usize), values.extract(1usize));
        if !is_finite(x) || !is_finite(y) {
            let mut more = Vector::<f32, Const<2>>::new(0.0f32);
            more.insert(0usize, select(is_finite(x), 0.0f32, x * weight));
            more.insert(1usize, select(is_finite(y), 0.0f32, y * weight));
            grad.add(at, more, shared, bp);
        }
    }
}
