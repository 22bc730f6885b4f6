//! The caches and the steps against the oracle, on cubecl-cpu.

mod cache;
mod step;

use crate::decode::args::{Pages, Slots};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_problem::{CacheShape, ElementType, contiguous_strides};

/// A contiguous tensor of 32-bit elements, or of pairs of 16-bit ones.
struct Words {
    handle: Handle,
    shape: Vec<usize>,
}

impl Words {
    fn of(client: &Client, shape: &[usize], values: &[u32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self {
            handle: client.create_from_slice(&bytes),
            shape: shape.into(),
        }
    }

    fn new(client: &Client, shape: &[usize], value: u32) -> Self {
        Self::of(client, shape, &vec![value; shape.iter().product()])
    }

    /// Rows of NaN, which no kernel may use.
    fn unused_rows(client: &Client, shape: &[usize], element: ElementType) -> Self {
        let len = shape.iter().product::<usize>() * element.size() / 4;
        Self {
            shape: shape.into(),
            ..Self::new(client, &[len], u32::MAX)
        }
    }

    fn binding(&self) -> TensorBinding {
        TensorBinding {
            handle: self.handle.clone().binding(),
            strides: contiguous_strides(&self.shape).collect(),
            shape: self.shape.as_slice().into(),
            tiling: Default::default(),
        }
    }

    fn read(&self, client: &Client) -> Vec<u32> {
        let bytes = client.read_one(self.handle.clone()).expect("kernels run");
        let words = bytes.chunks_exact(4);
        words
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }
}

/// A cache of slots.
struct SlotCache {
    shape: CacheShape,
    k: Words,
    v: Words,
    score: Words,
    position: Words,
    seen: Words,
}

impl SlotCache {
    fn new(client: &Client, shape: CacheShape) -> Self {
        let kv = shape.kv_shape();
        Self {
            k: Words::unused_rows(client, &kv, shape.element),
            v: Words::unused_rows(client, &kv, shape.element),
            score: Words::new(client, &kv[..3], f32::NEG_INFINITY.to_bits()),
            position: Words::new(client, &kv[..3], u32::MAX),
            seen: Words::new(client, &[shape.batch], 0),
            shape,
        }
    }

    fn slots(&self) -> Slots {
        Slots {
            k: self.k.binding(),
            v: self.v.binding(),
            score: self.score.binding(),
            position: self.position.binding(),
            seen: self.seen.binding(),
        }
    }

    /// The positions of each row that its last token attends to, in order.
    fn live(&self, client: &Client) -> Vec<Vec<usize>> {
        let (position, score) = (self.position.read(client), self.score.read(client));
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
    k: Words,
    v: Words,
    scores: Option<Words>,
    table: Words,
    lengths: Words,
}

impl PageCache {
    fn new(client: &Client, shape: CacheShape, max_pages: usize, pages: usize) -> Self {
        let kv = shape.kv_shape();
        let page = |n: usize| (pages - 1 - n % max_pages * shape.batch - n / max_pages) as u32;
        let table: Vec<u32> = (0..shape.batch * max_pages).map(page).collect();
        Self {
            k: Words::unused_rows(client, &kv, shape.element),
            v: Words::unused_rows(client, &kv, shape.element),
            scores: (shape.has_scores())
                .then(|| Words::unused_rows(client, &kv[..3], ElementType::F32)),
            table: Words::of(client, &[shape.batch, max_pages], &table),
            lengths: Words::new(client, &[shape.batch], 0),
            shape,
        }
    }

    fn pages(&self) -> Pages {
        Pages {
            k: self.k.binding(),
            v: self.v.binding(),
            scores: self.scores.as_ref().map(Words::binding),
            table: self.table.binding(),
            lengths: self.lengths.binding(),
        }
    }
}
