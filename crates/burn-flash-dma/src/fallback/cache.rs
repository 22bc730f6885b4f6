//! Caches: [`CacheOps`](crate::ops::CacheOps). Each operation copies the cache.

use super::tensors::bool_dtype;
use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::{
    ChunkKeys, DecodedPages, DecodedSlots, OptionalFloat, PageMap, PageTensors, RunnersUp,
    Selection, SlotTensors, TokenTensors,
};
use crate::spans::span;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, Slice, TensorData};
use flash_dma_problem::{
    AppendProblem, Appending, AttentionOptions, CacheShape, DecodeProblem, KeptKeys, Problem,
    SelectionRule,
};

/// See [`CacheOps::cache_append_slots`](crate::ops::CacheOps::cache_append_slots). Selects over the slots and
/// the tokens, and keeps the keys that are attended at the last position.
pub fn append_slots<B: DynamicMaskOps>(
    slots: SlotTensors<B>,
    tokens: TokenTensors<B>,
    problem: AppendProblem,
) -> SlotTensors<B> {
    let _span = span!("append", engine = "default-bodies");
    let [batch, heads, window, _] = problem.cache.kv_shape();
    let (new, len) = (problem.tokens, window + problem.tokens);
    let all = Shape::new([batch, heads, len]);
    let device = slots.position.device();
    let bools = bool_dtype::<B>(&device);

    let rule = rule_of(&problem);
    let position = positions::<B>(&slots, &problem);
    let seen = B::int_add_scalar(slots.seen.clone(), (new as i64).into());
    let keys = chunk_keys::<B>(slots, tokens, problem);

    let intervals = chunk_intervals::<B>(&keys, rule);
    let last = [
        Slice::full(),
        Slice::full(),
        Slice::full(),
        (1usize..2).into(),
    ];
    let end = B::int_reshape(B::int_slice(intervals, &last), all.clone());
    let evicted = B::int_lower_elem(end, (len as i64).into(), bools);
    // The places of the survivors in order, then those of the others.
    let place = B::int_arange(0..len as i64, &device, IntDType::I32);
    let place = B::int_expand(B::int_reshape(place, Shape::new([1, 1, len])), all);
    // A recent token stays even if it is hidden.
    let border = (len - rule.recent) as i64;
    let recent = B::int_greater_equal_elem(place.clone(), border.into(), bools);
    let given = B::int_greater_equal_elem(position.clone(), 0.into(), bools);
    let evicted = B::bool_and(evicted, B::bool_not(B::bool_and(recent, given)));
    let behind = B::int_add_scalar(place.clone(), (len as i64).into());
    let rank = B::int_mask_where(place, evicted.clone(), behind);
    let order = B::int_argsort(rank, 2, false);
    let order = B::int_slice(order, &[Slice::full(), Slice::full(), (0..window).into()]);
    let evicted = B::bool_into_int(evicted, IntDType::I32);
    let empty = B::int_equal_elem(B::int_gather(2, evicted, order.clone()), 1.into(), bools);
    let score = B::float_gather(2, keys.scores, order.clone());
    let position = B::int_gather(2, position, order.clone());
    SlotTensors {
        k: rows::<B>(keys.k, order.clone()),
        v: rows::<B>(keys.v, order),
        score: B::float_mask_fill(score, empty.clone(), f32::NEG_INFINITY.into()),
        position: B::int_mask_fill(position, empty, (-1).into()),
        seen,
    }
}

/// See [`CacheOps::cache_decode_slots`](crate::ops::CacheOps::cache_decode_slots).
pub fn decode_slots<B: DynamicMaskOps>(
    q: FloatTensor<B>,
    slots: SlotTensors<B>,
    tokens: TokenTensors<B>,
    problem: DecodeProblem,
) -> DecodedSlots<B> {
    let _span = span!("decode", engine = "default-bodies");
    let (cache, window) = (problem.append.cache, problem.append.cache.capacity());
    let keys = chunk_keys::<B>(clone(&slots), clone_tokens(&tokens), problem.append);
    let options = AttentionOptions {
        keep_window: Some(window),
        scale: Some(problem.scale),
        softcap: problem.softcap,
        ..AttentionOptions::new()
    };
    let len = window + problem.append.tokens;
    let whole = forward_problem(&cache, problem.q_shape(), len, &options);
    let intervals = chunk_intervals::<B>(&keys, rule_of(&problem.append));
    let scores = match cache.adds_scores() {
        true => keys.scores,
        // Hidden keys are in no interval.
        false => {
            let (shape, device) = (keys.scores.shape(), keys.scores.device());
            B::float_zeros(shape, &device, burn::tensor::FloatDType::F32)
        }
    };
    let selection = Selection::Scored {
        scores,
        intervals,
        runners_up: RunnersUp::None,
    };
    let (out, lse) = B::dynamic_mask_forward(q, keys.k, keys.v, selection, whole);
    let slots = match problem.appending {
        Appending::Now => append_slots::<B>(slots, tokens, problem.append),
        Appending::Later => slots,
    };
    DecodedSlots { out, lse, slots }
}

/// See [`CacheOps::cache_chunk_keys`](crate::ops::CacheOps::cache_chunk_keys).
pub fn chunk_keys<B: Backend>(
    slots: SlotTensors<B>,
    tokens: TokenTensors<B>,
    problem: AppendProblem,
) -> ChunkKeys<B> {
    let _span = span!("chunk_keys", engine = "default-bodies");
    let sinks = rule_of(&problem).sinks;
    let position = (sinks > 0).then(|| positions::<B>(&slots, &problem));
    // Empty slots are at position -1.
    let order = B::int_argsort(slots.position, 2, false);
    let scores = B::float_gather(2, slots.score, order.clone());
    let scores = B::float_cat(vec![scores, present(tokens.scores)], 2);
    let rank = position.map(|position| {
        let bools = bool_dtype::<B>(&position.device());
        let first = B::int_lower_elem(position, (sinks as i64).into(), bools);
        let shown = B::float_not_equal_elem(scores.clone(), f32::NEG_INFINITY.into(), bools);
        let sink = B::bool_and(first, shown);
        B::float_mask_fill(scores.clone(), sink, f32::INFINITY.into())
    });
    ChunkKeys {
        k: B::float_cat(vec![rows::<B>(slots.k, order.clone()), tokens.k], 2),
        v: B::float_cat(vec![rows::<B>(slots.v, order), tokens.v], 2),
        scores,
        rank: OptionalFloat::from_option(rank),
    }
}

/// The rule of a cache of slots.
fn rule_of(problem: &AppendProblem) -> SelectionRule {
    let rule = problem.cache.rule();
    rule.unwrap_or_else(|| unreachable!("checked: the cache has slots"))
}

/// The positions of the slots, ascending, and those of the new tokens behind them:
/// `[batch, kv_heads, window + tokens]`.
fn positions<B: Backend>(slots: &SlotTensors<B>, problem: &AppendProblem) -> IntTensor<B> {
    let (
        CacheShape {
            batch, kv_heads, ..
        },
        new,
    ) = (problem.cache, problem.tokens);
    let first = B::int_reshape(slots.seen.clone(), Shape::new([batch, 1, 1]));
    let offsets = B::int_arange(0..new as i64, &slots.position.device(), IntDType::I32);
    let offsets = B::int_reshape(offsets, Shape::new([1, 1, new]));
    let by_token = Shape::new([batch, kv_heads, new]);
    let position = B::int_add(
        B::int_expand(first, by_token.clone()),
        B::int_expand(offsets, by_token),
    );
    let order = B::int_argsort(slots.position.clone(), 2, false);
    let old = B::int_gather(2, slots.position.clone(), order);
    B::int_cat(vec![old, position], 2)
}

/// The intervals of a chunk's keys in their own sequence, `[batch, kv_heads, window + tokens, 2]`: the older keys are
/// selected by rank, and a shown key is attended to while it is recent as well.
fn chunk_intervals<B: DynamicMaskOps>(keys: &ChunkKeys<B>, rule: SelectionRule) -> IntTensor<B> {
    let rank = match &keys.rank {
        OptionalFloat::Some(rank) => rank.clone(),
        OptionalFloat::None => keys.scores.clone(),
    };
    // A hidden key has no rank either.
    B::dynamic_mask_select(rank, rule.kept())
}

/// See [`CacheOps::cache_append_pages`](crate::ops::CacheOps::cache_append_pages). One assignment per page.
pub fn append_pages<B: Backend>(
    pages: PageTensors<B>,
    tokens: TokenTensors<B>,
    map: PageMap,
    problem: AppendProblem,
) -> PageTensors<B> {
    let _span = span!("append", engine = "default-bodies");
    let [_, _, page_len, _] = problem.cache.kv_shape();
    let (mut k, mut v, mut scores) = (pages.k, pages.v, pages.scores);
    for (batch, &held) in map.lengths.iter().enumerate() {
        let mut token = 0;
        while token < problem.tokens {
            let (page, offset) = ((held + token) / page_len, (held + token) % page_len);
            let count = (page_len - offset).min(problem.tokens - token);
            let page = map.table[batch][page] as usize;
            let to = [
                Slice::from(page..page + 1),
                Slice::full(),
                (offset..offset + count).into(),
            ];
            let from = [
                Slice::from(batch..batch + 1),
                Slice::full(),
                (token..token + count).into(),
            ];
            let rows = |x: &FloatTensor<B>| B::float_slice(x.clone(), &from);
            k = B::float_slice_assign(k, &to, rows(&tokens.k));
            v = B::float_slice_assign(v, &to, rows(&tokens.v));
            if let (OptionalFloat::Some(pool), OptionalFloat::Some(new)) = (&scores, &tokens.scores)
            {
                let pool = pool.clone();
                scores = OptionalFloat::Some(B::float_slice_assign(pool, &to, rows(new)));
            }
            token += count;
        }
    }
    PageTensors {
        k,
        v,
        scores,
        table: pages.table,
        lengths: B::int_add_scalar(pages.lengths, (problem.tokens as i64).into()),
    }
}

/// See [`CacheOps::cache_decode_pages`](crate::ops::CacheOps::cache_decode_pages). Gathers the pages of each
/// sequence. Serves any number of tokens.
pub fn decode_pages<B: DynamicMaskOps>(
    q: FloatTensor<B>,
    pages: PageTensors<B>,
    tokens: TokenTensors<B>,
    map: PageMap,
    problem: DecodeProblem,
) -> DecodedPages<B> {
    let _span = span!("decode", engine = "default-bodies");
    let append = problem.append;
    let before = match problem.appending {
        Appending::Now => None,
        Appending::Later => Some(clone_pages(&pages)),
    };
    let pages = append_pages::<B>(pages, tokens, map.clone(), append);
    let options = AttentionOptions {
        scale: Some(problem.scale),
        softcap: problem.softcap,
        ..AttentionOptions::new()
    };
    let (out, lse) = attend_pages::<B>(q, &pages, &map, &append, &options);
    let pages = before.unwrap_or(pages);
    DecodedPages { out, lse, pages }
}

/// Causal attention of the last queries over pages that hold their keys already, sequence by sequence.
pub(crate) fn attend_pages<B: DynamicMaskOps>(
    q: FloatTensor<B>,
    pages: &PageTensors<B>,
    map: &PageMap,
    problem: &AppendProblem,
    options: &AttentionOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let device = q.device();
    let [_, q_heads, tokens, dim] = q.shape().dims();
    let [_, heads, page_len, _] = problem.cache.kv_shape();
    if map.lengths.is_empty() {
        let lse = Shape::new([0, q_heads, tokens]);
        return (q, B::float_zeros(lse, &device, FloatDType::F32));
    }
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for (batch, &held) in map.lengths.iter().enumerate() {
        let len = held + problem.tokens;
        let used = &map.table[batch][..len.div_ceil(page_len)];
        let indices = B::int_from_data(burn::tensor::TensorData::from(used), &device);
        let gather = |pool: &FloatTensor<B>, width: &[usize]| {
            let rows = B::float_select(pool.clone(), 0, indices.clone());
            let rows = B::float_swap_dims(rows, 0, 1);
            let mut shape = vec![1, heads, used.len() * page_len];
            shape.extend(width);
            let rows = B::float_reshape(rows, Shape::from(shape));
            B::float_slice(rows, &[Slice::full(), Slice::full(), (0..len).into()])
        };
        let (k, v) = (gather(&pages.k, &[dim]), gather(&pages.v, &[dim]));
        let window = problem.cache.page_window();
        let scores = match (&pages.scores, window) {
            (OptionalFloat::Some(pool), _) => Some(gather(pool, &[])),
            // Scores of 0 add nothing; they have the window.
            (OptionalFloat::None, Some(_)) => {
                let shape = Shape::new([1, heads, len]);
                Some(B::float_zeros(shape, &device, FloatDType::F32))
            }
            (OptionalFloat::None, None) => None,
        };
        let (selection, options) = match scores {
            None => (Selection::All, *options),
            Some(scores) => {
                let kept = window.map_or(usize::MAX.into(), |recent| KeptKeys { best: 0, recent });
                let intervals = B::dynamic_mask_select(scores.clone(), kept);
                let selection = Selection::Scored {
                    scores,
                    intervals,
                    runners_up: RunnersUp::None,
                };
                (
                    selection,
                    options.with_keep_window(window.unwrap_or(usize::MAX)),
                )
            }
        };
        let q = B::float_slice(q.clone(), &[Slice::from(batch..batch + 1)]);
        let shape = [1, q_heads, tokens, dim];
        let one = forward_problem(&problem.cache, shape, len, &options);
        let (out, lse) = B::dynamic_mask_forward(q, k, v, selection, one);
        outs.push(out);
        lses.push(lse);
    }
    (B::float_cat(outs, 0), B::float_cat(lses, 0))
}

/// The problem of attention over `len` keys per head, the last of which are those of the queries.
pub(crate) fn forward_problem(
    cache: &CacheShape,
    q: [usize; 4],
    len: usize,
    options: &AttentionOptions,
) -> Problem {
    let kv = [q[0], cache.kv_heads, len, cache.head_dim];
    let scores = options.keep_window.map(|_| &kv[..3]);
    Problem::new(&q, &kv, &kv, scores, cache.element, options)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Rows of `[batch, heads, rows, dim]` by an index `[batch, heads, n]`.
fn rows<B: Backend>(tensor: FloatTensor<B>, index: IntTensor<B>) -> FloatTensor<B> {
    let [batch, heads, count] = index.shape().dims();
    let [_, _, _, dim] = tensor.shape().dims();
    let index = B::int_reshape(index, Shape::new([batch, heads, count, 1]));
    let index = B::int_expand(index, Shape::new([batch, heads, count, dim]));
    B::float_gather(2, tensor, index)
}

/// The scores of tokens for slots.
pub(crate) fn present<B: Backend>(scores: OptionalFloat<B>) -> FloatTensor<B> {
    match scores {
        OptionalFloat::Some(scores) => scores,
        OptionalFloat::None => unreachable!("checked: slots have scores"),
    }
}

fn clone<B: Backend>(slots: &SlotTensors<B>) -> SlotTensors<B> {
    SlotTensors {
        k: slots.k.clone(),
        v: slots.v.clone(),
        score: slots.score.clone(),
        position: slots.position.clone(),
        seen: slots.seen.clone(),
    }
}

fn clone_pages<B: Backend>(pages: &PageTensors<B>) -> PageTensors<B> {
    PageTensors {
        k: pages.k.clone(),
        v: pages.v.clone(),
        scores: pages.scores.cloned(),
        table: pages.table.clone(),
        lengths: pages.lengths.clone(),
    }
}

fn clone_tokens<B: Backend>(tokens: &TokenTensors<B>) -> TokenTensors<B> {
    TokenTensors {
        k: tokens.k.clone(),
        v: tokens.v.clone(),
        scores: tokens.scores.cloned(),
    }
}

/// See [`CacheOps::cache_overwrite`](crate::ops::CacheOps::cache_overwrite).
pub fn overwrite<B: Backend>(tokens: IntTensor<B>, values: Vec<i32>) -> IntTensor<B> {
    let data = TensorData::new(values, tokens.shape());
    B::int_from_data(data, &tokens.device())
}
