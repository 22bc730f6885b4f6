//! The caches and the steps against the oracle, on cubecl-cpu.

mod cache;
mod step;

use crate::decode::args::{Cache, Pages, Slots};
use crate::testing::{Placement, contiguous, read_u32, upload};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{CacheShape, ElementType, Storage};

fn filled(client: &Client, shape: &[usize], word: u32) -> TensorBinding {
    contiguous(client, &vec![word; shape.iter().product()], shape)
}

/// Rows of NaN, which no kernel may use.
fn unused_rows(client: &Client, shape: &[usize], element: ElementType) -> TensorBinding {
    upload(client, &[], shape, element, Placement::Contiguous)
}

fn empty_slots(client: &Client, shape: &CacheShape) -> Slots {
    let kv = shape.kv_shape();
    Slots {
        k: unused_rows(client, &kv, shape.element),
        v: unused_rows(client, &kv, shape.element),
        score: filled(client, &kv[..3], f32::NEG_INFINITY.to_bits()),
        position: filled(client, &kv[..3], u32::MAX),
        seen: filled(client, &[shape.batch], 0),
    }
}

/// A cache without tokens. Pages are given to the sequences from the last one on and in turns.
fn empty(client: &Client, shape: &CacheShape) -> Cache {
    let (kv, batch) = (shape.kv_shape(), shape.batch);
    let Storage::Pages { max_pages, .. } = shape.storage else {
        return Cache::Slots(empty_slots(client, shape));
    };
    let page = |n: usize| (kv[0] - 1 - n % max_pages * batch - n / max_pages) as u32;
    let table: Vec<u32> = (0..batch * max_pages).map(page).collect();
    Cache::Pages(Pages {
        k: unused_rows(client, &kv, shape.element),
        v: unused_rows(client, &kv, shape.element),
        scores: (shape.has_scores()).then(|| unused_rows(client, &kv[..3], ElementType::F32)),
        table: contiguous(client, &table, &[batch, max_pages]),
        lengths: filled(client, &[batch], 0),
    })
}

/// The positions of each row that its last token attends to, in order.
fn live(client: &Client, slots: &Slots) -> Vec<Vec<usize>> {
    let window = slots.score.shape[2];
    let [position, score] =
        [&slots.position, &slots.score].map(|words| read_u32(client, words.clone()));
    let rows = (position.chunks(window).zip(score.chunks(window))).map(|(position, score)| {
        let shown = (position.iter().zip(score))
            .filter(|&(_, &score)| score != f32::NEG_INFINITY.to_bits());
        let mut live: Vec<usize> = shown.map(|(&x, _)| x as usize).collect();
        live.sort_unstable();
        live
    });
    rows.collect()
}
