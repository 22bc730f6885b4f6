//! The caches and the steps against the oracle, on cubecl-cpu.

mod cache;
mod step;

use crate::decode::args::{Pages, Slots};
use crate::testing::{Placement, contiguous, read_u32, upload};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{CacheShape, ElementType};

/// A tensor of one word.
fn filled(client: &Client, shape: &[usize], word: u32) -> TensorBinding {
    contiguous(client, &vec![word; shape.iter().product()], shape)
}

/// Rows of NaN, which no kernel may use.
fn unused_rows(client: &Client, shape: &[usize], element: ElementType) -> TensorBinding {
    upload(client, &[], shape, element, Placement::Contiguous)
}

/// A cache of slots.
struct SlotCache {
    shape: CacheShape,
    slots: Slots,
}

impl SlotCache {
    fn new(client: &Client, shape: CacheShape) -> Self {
        let kv = shape.kv_shape();
        let slots = Slots {
            k: unused_rows(client, &kv, shape.element),
            v: unused_rows(client, &kv, shape.element),
            score: filled(client, &kv[..3], f32::NEG_INFINITY.to_bits()),
            position: filled(client, &kv[..3], u32::MAX),
            seen: filled(client, &[shape.batch], 0),
        };
        Self { shape, slots }
    }

    fn slots(&self) -> Slots {
        self.slots.clone()
    }

    /// The positions of each row that its last token attends to, in order.
    fn live(&self, client: &Client) -> Vec<Vec<usize>> {
        let Slots {
            position, score, ..
        } = self.slots();
        let [position, score] = [position, score].map(|words| read_u32(client, words));
        let window = self.shape.capacity();
        let rows = (position.chunks(window).zip(score.chunks(window))).map(|(position, score)| {
            let shown = (position.iter().zip(score))
                .filter(|&(_, &score)| score != f32::NEG_INFINITY.to_bits());
            let mut live: Vec<usize> = shown.map(|(&x, _)| x as usize).collect();
            live.sort_unstable();
            live
        });
        rows.collect()
    }
}

/// A cache of pages, given to the sequences from the last one on and in turns.
struct PageCache {
    shape: CacheShape,
    pages: Pages,
}

impl PageCache {
    fn new(client: &Client, shape: CacheShape, max_pages: usize, pages: usize) -> Self {
        let kv = shape.kv_shape();
        let page = |n: usize| (pages - 1 - n % max_pages * shape.batch - n / max_pages) as u32;
        let table: Vec<u32> = (0..shape.batch * max_pages).map(page).collect();
        let pages = Pages {
            k: unused_rows(client, &kv, shape.element),
            v: unused_rows(client, &kv, shape.element),
            scores: (shape.has_scores()).then(|| unused_rows(client, &kv[..3], ElementType::F32)),
            table: contiguous(client, &table, &[shape.batch, max_pages]),
            lengths: filled(client, &[shape.batch], 0),
        };
        Self { shape, pages }
    }

    fn pages(&self) -> Pages {
        self.pages.clone()
    }
}
