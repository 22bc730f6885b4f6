//! Caches on the CPU engine: unshared storage is written in place.

use super::tensors::{Stored, addressable, buffer, by_element, run, tensor, view};
use crate::ops::cache::CacheOps;
use crate::spans::span;
use crate::types::{
    ChunkKeys, DecodedPages, DecodedSlots, OptionalFloat, PageMap, PageTensors, SlotTensors,
    TokenTensors,
};
use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn_flex::FlexTensor;
use flash_dma_cpu::Element;
use flash_dma_cpu::cache::{self, Cache, CacheRef, Pages, PagesRef, Slots, SlotsRef, Tokens};
use flash_dma_problem::{AppendProblem, Appending, DecodeProblem};

impl CacheOps for Flex {
    fn cache_append_slots(
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> SlotTensors<Self> {
        let _span = span!("append", engine = "cpu");
        let (mut slots, tokens) = (whole_slots(slots), readable(tokens));
        by_element!(slots.k.dtype(), E => {
            let cache = Cache::Slots(slots_mut::<E>(&mut slots));
            run(cache::append(&problem, cache, tokens_ref(&tokens)))
        });
        slots
    }

    fn cache_decode_slots(
        q: FloatTensor<Self>,
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: DecodeProblem,
    ) -> DecodedSlots<Self> {
        let _span = span!("decode", engine = "cpu");
        let (mut slots, tokens, q) = (whole_slots(slots), readable(tokens), addressable(q));
        let (out, lse) = by_element!(q.dtype(), E => {
            let cache = match problem.appending {
                Appending::Now => Access::Write(Cache::Slots(slots_mut::<E>(&mut slots))),
                Appending::Later => Access::Read(CacheRef::Slots(slots_ref(&slots))),
            };
            step(&q, cache, &tokens, &problem)
        });
        DecodedSlots { out, lse, slots }
    }

    fn cache_chunk_keys(
        slots: SlotTensors<Self>,
        tokens: TokenTensors<Self>,
        problem: AppendProblem,
    ) -> ChunkKeys<Self> {
        let _span = span!("chunk_keys", engine = "cpu");
        let (slots, tokens) = (whole_slots(slots), readable(tokens));
        by_element!(slots.k.dtype(), E => chunk_keys::<E>(&slots, &tokens, &problem))
    }

    fn cache_append_pages(
        pages: PageTensors<Self>,
        tokens: TokenTensors<Self>,
        _map: PageMap,
        problem: AppendProblem,
    ) -> PageTensors<Self> {
        let _span = span!("append", engine = "cpu");
        let (mut pages, tokens) = (whole_pages(pages), readable(tokens));
        by_element!(pages.k.dtype(), E => {
            let cache = Cache::Pages(pages_mut::<E>(&mut pages));
            run(cache::append(&problem, cache, tokens_ref(&tokens)))
        });
        pages
    }

    fn cache_decode_pages(
        q: FloatTensor<Self>,
        pages: PageTensors<Self>,
        tokens: TokenTensors<Self>,
        _map: PageMap,
        problem: DecodeProblem,
    ) -> DecodedPages<Self> {
        let _span = span!("decode", engine = "cpu");
        let (mut pages, tokens, q) = (whole_pages(pages), readable(tokens), addressable(q));
        let (out, lse) = by_element!(q.dtype(), E => {
            let cache = match problem.appending {
                Appending::Now => Access::Write(Cache::Pages(pages_mut::<E>(&mut pages))),
                Appending::Later => Access::Read(CacheRef::Pages(pages_ref(&pages))),
            };
            step(&q, cache, &tokens, &problem)
        });
        DecodedPages { out, lse, pages }
    }
}

/// How a step takes a cache: one that it leaves unchanged is not copied if it is shared.
enum Access<'a, E> {
    Write(Cache<'a, E>),
    Read(CacheRef<'a, E>),
}

fn step<E: Element + Stored>(
    q: &FlexTensor,
    cache: Access<'_, E>,
    tokens: &TokenTensors<Flex>,
    problem: &DecodeProblem,
) -> (FlexTensor, FlexTensor) {
    let mut out = buffer::<E, 4>(problem.q_shape());
    let mut lse = buffer::<f32, 3>(problem.lse_shape());
    let (q, tokens) = (view(q), tokens_ref(tokens));
    run(match cache {
        Access::Write(cache) => cache::decode(problem, q, cache, tokens, &mut out, &mut lse),
        Access::Read(cache) => cache::attend(problem, q, cache, tokens, &mut out, &mut lse),
    });
    (
        tensor(out, problem.q_shape()),
        tensor(lse, problem.lse_shape()),
    )
}

fn chunk_keys<E: Element + Stored>(
    slots: &SlotTensors<Flex>,
    tokens: &TokenTensors<Flex>,
    problem: &AppendProblem,
) -> ChunkKeys<Flex> {
    let [batch, heads, window, dim] = problem.cache.kv_shape();
    let len = window + problem.tokens;
    let mut k = buffer::<E, 4>([batch, heads, len, dim]);
    let mut v = k.clone();
    let mut scores = buffer::<f32, 3>([batch, heads, len]);
    let mut rank = problem.cache.has_sinks().then(|| scores.clone());
    run(cache::chunk_keys(
        problem,
        slots_ref(slots),
        tokens_ref(tokens),
        cache::ChunkKeys {
            k: &mut k,
            v: &mut v,
            scores: &mut scores,
            rank: rank.as_deref_mut(),
        },
    ));
    let words = |values| tensor(values, [batch, heads, len]);
    ChunkKeys {
        k: tensor(k, [batch, heads, len, dim]),
        v: tensor(v, [batch, heads, len, dim]),
        scores: words(scores),
        rank: OptionalFloat::from_option(rank.map(words)),
    }
}

/// Tokens in a form the engine can address.
fn readable(tokens: TokenTensors<Flex>) -> TokenTensors<Flex> {
    TokenTensors {
        k: addressable(tokens.k),
        v: addressable(tokens.v),
        scores: tokens.scores.map(addressable),
    }
}

fn tokens_ref<E: Element + Stored>(tokens: &TokenTensors<Flex>) -> Tokens<'_, E> {
    Tokens {
        k: view(&tokens.k),
        v: view(&tokens.v),
        scores: tokens.scores.as_option().map(view),
    }
}

/// The tensor with storage that holds exactly its elements in order.
fn whole(tensor: FlexTensor) -> FlexTensor {
    let bytes = tensor.layout().num_elements() * tensor.dtype().size();
    if tensor.is_contiguous()
        && tensor.layout().start_offset() == 0
        && tensor.bytes().len() == bytes
    {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

fn whole_slots(slots: SlotTensors<Flex>) -> SlotTensors<Flex> {
    SlotTensors {
        k: whole(slots.k),
        v: whole(slots.v),
        score: whole(slots.score),
        position: whole(slots.position),
        seen: whole(slots.seen),
    }
}

fn whole_pages(pages: PageTensors<Flex>) -> PageTensors<Flex> {
    PageTensors {
        k: whole(pages.k),
        v: whole(pages.v),
        scores: pages.scores.map(whole),
        table: whole(pages.table),
        lengths: whole(pages.lengths),
    }
}

fn slots_ref<E: Stored>(slots: &SlotTensors<Flex>) -> SlotsRef<'_, E> {
    SlotsRef {
        k: slots.k.storage(),
        v: slots.v.storage(),
        score: slots.score.storage(),
        position: slots.position.storage(),
        seen: slots.seen.storage(),
    }
}

fn pages_ref<E: Stored>(pages: &PageTensors<Flex>) -> PagesRef<'_, E> {
    PagesRef {
        k: pages.k.storage(),
        v: pages.v.storage(),
        scores: pages.scores.as_option().map(FlexTensor::storage),
        table: pages.table.storage(),
        lengths: pages.lengths.storage(),
    }
}

/// The slots for writing. Shared storage is copied here, once.
fn slots_mut<E: Stored>(slots: &mut SlotTensors<Flex>) -> Slots<'_, E> {
    Slots {
        k: slots.k.storage_mut(),
        v: slots.v.storage_mut(),
        score: slots.score.storage_mut(),
        position: slots.position.storage_mut(),
        seen: slots.seen.storage_mut(),
    }
}

fn pages_mut<E: Stored>(pages: &mut PageTensors<Flex>) -> Pages<'_, E> {
    Pages {
        k: pages.k.storage_mut(),
        v: pages.v.storage_mut(),
        scores: match &mut pages.scores {
            OptionalFloat::None => None,
            OptionalFloat::Some(scores) => Some(scores.storage_mut()),
        },
        table: pages.table.storage(),
        lengths: pages.lengths.storage_mut(),
    }
}
