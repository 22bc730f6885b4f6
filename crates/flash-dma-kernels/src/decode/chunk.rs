//! The keys of a chunk of a long sequence: the keys of the cache, in order, and the chunk's own.

use crate::decode::args::{ChunkOutputs, Slots, Tokens};
use crate::decode::tensors::{NewTokens, row_at};
use crate::finite::{infinity, negative_infinity};
use crate::host::check::{address_type, check_type, elem_type, vector_size};
use crate::host::range::range;
use crate::host::scratch::{one_unit_each, scratch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AppendProblem, AttentionError};

/// The entry of an order that represents an empty slot.
const EMPTY: u32 = u32::MAX;

/// Sorts the slots of each row by position, the empty ones first. One unit per slot counts the slots before its own.
///
/// `position` is contiguous `[rows, window]`, `order` likewise, overwritten with slots or [`EMPTY`].
#[cube(launch_unchecked, address_type = "dynamic")]
fn order_kernel(position: &[i32], order: &mut [u32], window: u32, rows: u32) {
    let row = ABSOLUTE_POS / window as usize;
    if row < rows as usize {
        let slot = (ABSOLUTE_POS % window as usize) as u32;
        let first = row * window as usize;
        let own = position[ABSOLUTE_POS];
        let mut rank = 0u32;
        for other in 0..window {
            let place = position[first + other as usize];
            rank += u32::cast_from(place < own || (place == own && other < slot));
        }
        order[first + rank as usize] = select(own < 0, comptime!(EMPTY), slot);
    }
}

/// A cache of slots, and their order.
#[derive(CubeType, CubeLaunch)]
struct OrderedSlots<E: Numeric, N: Size> {
    /// Contiguous `[batch, kv_heads, window, head_dim]`.
    k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    v: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[batch, kv_heads, window]`.
    score: Box<[f32]>,
    /// Contiguous `[batch * kv_heads, window]`.
    order: Box<[u32]>,
}

#[derive(CubeType, CubeLaunch)]
struct ChunkTensors<E: Numeric, N: Size> {
    /// Contiguous `[batch, kv_heads, window + tokens, head_dim]`.
    k: OwnedTensor<Vector<E, N>>,
    /// Like `k`.
    v: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[batch, kv_heads, window + tokens]`.
    scores: Box<[f32]>,
    /// Present if there are sinks.
    rank: ComptimeOption<SinkRanks>,
}

/// The numbers that rank the keys if they are not the scores.
#[derive(CubeType, CubeLaunch)]
struct SinkRanks {
    /// Contiguous `[batch, kv_heads, window + tokens]`, overwritten.
    rank: Box<[f32]>,
    /// The slots' positions, contiguous `[batch, kv_heads, window]`.
    position: Box<[i32]>,
    /// `[batch]`.
    seen: Box<[i32]>,
    sinks: i32,
}

/// Copies the slots in their order and then the new tokens. One unit per vector of a row; the first also writes the
/// score, and the rank: the score, but +∞ for a visible sink.
///
/// `has_sinks` is true if the rank is there; it is for CubeCL's disk cache, see `docs/upstream.md`.
///
/// | buffer | layout |
/// |---|---|
/// | `slots` | see [`OrderedSlots`] |
/// | `tokens_in` | see [`NewTokens`] |
/// | `keys` | see [`ChunkTensors`]; overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<E: Numeric, N: Size>(
    slots: &OrderedSlots<E, N>,
    tokens_in: &NewTokens<E, N>,
    keys: &mut ChunkTensors<E, N>,
    #[comptime] _has_sinks: bool,
    #[define(E)] _element: ElemType,
) {
    let (k, new_k, new_v) = (&slots.k, &tokens_in.k, &tokens_in.v);
    let new_scores = tokens_in.scores.as_ref().unwrap();
    let size = k.vector_size().comptime();
    let (heads, window, tokens) = (k.shape(1), k.shape(2), new_k.shape(2));
    let vectors = k.shape(3) / size;
    let vector = ABSOLUTE_POS % vectors;
    let at = ABSOLUTE_POS / vectors;
    let (row, n) = (at / (window + tokens), at % (window + tokens));
    if row < k.shape(0) * heads {
        let (batch, head) = (row / heads, row % heads);
        let mut key = Vector::<E, N>::new(E::from_int(0));
        let mut value = Vector::<E, N>::new(E::from_int(0));
        let mut own = negative_infinity();
        if n < window {
            let slot = slots.order[row * window + n];
            if slot != comptime!(EMPTY) {
                let from = row * window + slot as usize;
                key = k[from * vectors + vector];
                value = slots.v[from * vectors + vector];
                own = slots.score[from];
            }
        } else {
            let token = n - window;
            let from_k = row_at(new_k, batch, head, token);
            let from_v = row_at(new_v, batch, head, token);
            key = new_k[from_k / size + vector];
            value = new_v[from_v / size + vector];
            own = new_scores[batch * new_scores.stride(0) + head * new_scores.stride(1) + token];
        }
        keys.k[ABSOLUTE_POS] = key;
        keys.v[ABSOLUTE_POS] = value;
        if vector == 0 {
            keys.scores[at] = own;
        }
        #[comptime]
        match &mut keys.rank {
            ComptimeOption::Some(sinks) => {
                if vector == 0 {
                    let mut place = i32::new(-1);
                    if n >= window {
                        place = sinks.seen[batch] + (n - window) as i32;
                    } else {
                        let slot = slots.order[row * window + n];
                        if slot != comptime!(EMPTY) {
                            place = sinks.position[row * window + slot as usize];
                        }
                    }
                    // Empty slots are hidden.
                    let is_sink = place < sinks.sinks && own != negative_infinity();
                    sinks.rank[at] = select(is_sink, infinity(), own);
                }
            }
            ComptimeOption::None => {}
        }
    }
}

/// The keys that a chunk of new tokens attends to, for a prefill in chunks: the slots in order of position, the empty
/// ones first with scores of −∞ and rows of zeros, and then the tokens. The cache is unchanged.
///
/// They form a separate sequence. Select by the rank, or by the scores if there is none, as many keys as the cache's
/// rule keeps by rank; let every interval end later by the rule's number of recent keys, except that those of hidden
/// keys stay empty. Attended to causally by the chunk's queries (`q_len = tokens`), they give each query exactly the
/// result of one pass over the whole sequence, as no evicted key returns. Then [`append`](crate::append()) the chunk.
/// Two asynchronous launches.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or its cache has no slots. Nothing is launched in that case.
pub fn chunk_keys(
    client: &Client,
    problem: &AppendProblem,
    slots: Slots,
    tokens: Tokens,
    keys: ChunkOutputs,
) -> Result<(), AttentionError> {
    let cache = &problem.cache;
    check_type(client, cache.element)?;
    slots.check(cache)?;
    tokens.check(problem)?;
    keys.check(problem)?;
    let (window, size) = (cache.capacity(), cache.element.size());
    let len = window + problem.tokens;
    let rows = cache.batch * cache.kv_heads;
    if rows == 0 {
        return Ok(());
    }
    let _range = range!("chunk_keys");
    let order = scratch(client, [rows, window]);
    let (count, dim) = one_unit_each(client, rows * window);
    // SAFETY: units past the slots return; ranks are a permutation of the slots.
    unsafe {
        order_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(&[&order], size_of::<u32>()),
            slots.position.clone().into_buffer_arg(),
            order.clone().into_buffer_arg(),
            window as u32,
            rows as u32,
        );
    }
    let ChunkOutputs { k, v, scores, rank } = keys;
    let typed = [&slots.k, &slots.v, &tokens.k, &tokens.v, &k, &v];
    let vector = vector_size(&typed, size);
    let words: Vec<_> = [&slots.score, &order, &scores]
        .into_iter()
        .chain(&tokens.scores)
        .collect();
    let address = address_type(&typed, size).max(address_type(&words, size_of::<f32>()));
    let (count, dim) = one_unit_each(client, rows * len * (cache.head_dim / vector));
    let sinks = cache.rule().map_or(0, |rule| rule.sinks);
    let ranks = rank.map(|rank| {
        SinkRanksLaunch::new(
            rank.into_buffer_arg(),
            slots.position.into_buffer_arg(),
            slots.seen.into_buffer_arg(),
            sinks as i32,
        )
    });
    // SAFETY: units past the keys return; the tensors were checked to hold their shapes and strides.
    unsafe {
        gather_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            vector,
            OrderedSlotsLaunch::new(
                slots.k.into_tensor_arg(),
                slots.v.into_tensor_arg(),
                slots.score.into_buffer_arg(),
                order.into_buffer_arg(),
            ),
            tokens.into_launch(),
            ChunkTensorsLaunch::new(
                k.into_tensor_arg(),
                v.into_tensor_arg(),
                scores.into_buffer_arg(),
                ranks.into(),
            ),
            cache.has_sinks(),
            elem_type(cache.element),
        );
    }
    Ok(())
}
