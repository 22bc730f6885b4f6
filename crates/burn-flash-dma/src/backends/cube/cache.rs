//! Caches on every CubeCL runtime: the kernels write unshared tensors in place.

use super::tensors::{addressable, empty, run};
use crate::ops::cache::CacheOps;
use crate::types::{
    ChunkKeys, DecodedPages, DecodedSlots, OptionalFloat, PageMap, PageTensors, SlotTensors,
    TokenTensors,
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Bytes, DType};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use flash_dma_kernels::{
    Cache, ChunkOutputs, Pages, Slots, StepInputs, StepOutputs, Tokens, decode,
};
use flash_dma_problem::{AppendProblem, Appending, DecodeProblem};

impl CacheOps for CubeBackend {
    fn cache_append_slots(
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> SlotTensors<Self> {
        let client = slots.k.client.clone();
        let slots = map_slots(slots, own);
        let (bindings, tokens) = (slot_bindings(&slots), token_bindings(tokens));
        run(flash_dma_kernels::append(
            &client, &problem, bindings, tokens,
        ));
        slots
    }

    fn cache_decode_slots(
        q: FloatTensor<Self>,
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: DecodeProblem,
    ) -> DecodedSlots<Self> {
        let slots = map_slots(slots, access(problem.appending));
        let cache = Cache::Slots(slot_bindings(&slots));
        let (out, lse) = step(q, cache, tokens, &problem);
        DecodedSlots { out, lse, slots }
    }

    fn cache_chunk_keys(
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> ChunkKeys<Self> {
        let client = slots.k.client.clone();
        let slots = map_slots(slots, into_contiguous);
        let [batch, heads, window, dim] = problem.cache.kv_shape();
        let len = window + problem.tokens;
        let rows = [batch, heads, len, dim];
        let k = empty(&slots.k, rows, slots.k.dtype);
        let v = empty(&slots.k, rows, slots.k.dtype);
        let words = || empty(&slots.k, [batch, heads, len], DType::F32);
        let (scores, rank) = (words(), problem.cache.has_sinks().then(words));
        run(flash_dma_kernels::chunk_keys(
            &client,
            &problem,
            slot_bindings(&slots),
            token_bindings(tokens),
            ChunkOutputs {
                k: k.clone().binding(),
                v: v.clone().binding(),
                scores: scores.clone().binding(),
                rank: rank.clone().map(CubeTensor::binding),
            },
        ));
        let rank = OptionalFloat::from_option(rank);
        ChunkKeys { k, v, scores, rank }
    }

    fn cache_append_pages(
        pages: PageTensors<Self>,
        tokens: TokenTensors<Self>,
        _map: PageMap,
        problem: AppendProblem,
    ) -> PageTensors<Self> {
        let client = pages.k.client.clone();
        let pages = map_pages(pages, own);
        let (bindings, tokens) = (page_bindings(&pages), token_bindings(tokens));
        run(flash_dma_kernels::append_pages(
            &client, &problem, bindings, tokens,
        ));
        pages
    }

    fn cache_decode_pages(
        q: FloatTensor<Self>,
        pages: PageTensors<Self>,
        tokens: TokenTensors<Self>,
        _map: PageMap,
        problem: DecodeProblem,
    ) -> DecodedPages<Self> {
        let pages = map_pages(pages, access(problem.appending));
        let cache = Cache::Pages(page_bindings(&pages));
        let (out, lse) = step(q, cache, tokens, &problem);
        DecodedPages { out, lse, pages }
    }

    fn cache_overwrite(tokens: IntTensor<Self>, values: Vec<i32>) -> IntTensor<Self> {
        // Even if shared: a recorded graph shares it to read it.
        let tokens = into_contiguous(tokens);
        let client = tokens.client.clone();
        client.write(&tokens.handle, Bytes::from_elems(values));
        tokens
    }
}

fn step(
    q: CubeTensor,
    cache: Cache,
    tokens: TokenTensors<CubeBackend>,
    problem: &DecodeProblem,
) -> (CubeTensor, CubeTensor) {
    let client = q.client.clone();
    let out = empty(&q, problem.q_shape(), q.dtype);
    let lse = empty(&q, problem.lse_shape(), DType::F32);
    let inputs = StepInputs {
        q: addressable(q),
        tokens: token_bindings(tokens),
    };
    let outputs = StepOutputs {
        cache,
        out: out.clone().binding(),
        lse: lse.clone().binding(),
    };
    run(decode::plan(&client, problem, &inputs).and_then(|plan| plan.run(outputs)));
    (out, lse)
}

/// A contiguous tensor that nothing else shares, copied if it is shared or padded.
fn own(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    if tensor.can_mut() {
        tensor
    } else {
        into_contiguous(tensor.copy())
    }
}

fn map_slots(
    slots: SlotTensors<CubeBackend>,
    how: fn(CubeTensor) -> CubeTensor,
) -> SlotTensors<CubeBackend> {
    SlotTensors {
        k: how(slots.k),
        v: how(slots.v),
        score: how(slots.score),
        position: how(slots.position),
        seen: how(slots.seen),
    }
}

fn map_pages(
    pages: PageTensors<CubeBackend>,
    how: fn(CubeTensor) -> CubeTensor,
) -> PageTensors<CubeBackend> {
    PageTensors {
        k: how(pages.k),
        v: how(pages.v),
        scores: pages.scores.map(how),
        table: into_contiguous(pages.table),
        lengths: how(pages.lengths),
    }
}

/// How an operation takes the tensors of a cache: if it only reads them, they may be shared.
fn access(appending: Appending) -> fn(CubeTensor) -> CubeTensor {
    match appending {
        Appending::Now => own,
        Appending::Later => into_contiguous,
    }
}

fn slot_bindings(slots: &SlotTensors<CubeBackend>) -> Slots {
    Slots {
        k: slots.k.clone().binding(),
        v: slots.v.clone().binding(),
        score: slots.score.clone().binding(),
        position: slots.position.clone().binding(),
        seen: slots.seen.clone().binding(),
    }
}

fn page_bindings(pages: &PageTensors<CubeBackend>) -> Pages {
    Pages {
        k: pages.k.clone().binding(),
        v: pages.v.clone().binding(),
        scores: pages.scores.as_option().cloned().map(CubeTensor::binding),
        table: pages.table.clone().binding(),
        lengths: pages.lengths.clone().binding(),
    }
}

fn token_bindings(tokens: TokenTensors<CubeBackend>) -> Tokens {
    Tokens {
        k: addressable(tokens.k),
        v: addressable(tokens.v),
        scores: tokens.scores.into_option().map(addressable),
    }
}
