//! Memory that each thread reuses from tile to tile.

use crate::Element;
use crate::Problem;
use crate::keys::intervals::{RangeKeys, TileKeys};
use crate::keys::planned::{MaskedKeys, TileBlocks};
use crate::keys::source::KeySource;
use crate::simd::LANES;
use std::cell::RefCell;

/// A grow-only buffer aligned to a cache line, which the widest vector loads want.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

// SAFETY: an array of f32, without padding since its size equals its alignment.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; `Copy`, `'static`, every bit pattern is valid.
unsafe impl bytemuck::Pod for Line {}

impl Buffer {
    /// The first `len` elements, which hold anything.
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    /// The first `len` elements, as the last writer left them.
    pub(crate) fn read(&self, len: usize) -> &[f32] {
        &bytemuck::cast_slice(&self.0)[..len]
    }
}

/// A block of keys, gathered: rows of K and V widened to f32, padded to whole SIMD registers with
/// rows of zeros that no query attends to.
#[derive(Default)]
pub(crate) struct KeyBlock {
    /// Keys in the block.
    pub(crate) len: usize,
    /// `len` rounded up to whole SIMD registers: the columns of the block's logits.
    pub(crate) columns: usize,
    /// `[columns, head_dim]`.
    pub(crate) k: Buffer,
    /// `[columns, head_dim]`.
    pub(crate) v: Buffer,
    /// Score of each column.
    pub(crate) z: Buffer,
    /// First query of the tile that attends to each column, and one past the last.
    pub(crate) start: Vec<i32>,
    pub(crate) end: Vec<i32>,
    /// The columns from here on must be tested against `start` and `end`; a multiple of the lanes.
    pub(crate) tested: usize,
}

impl KeyBlock {
    /// Gathers the keys `places` of the tile's list.
    pub(crate) fn gather<E: Element>(
        &mut self,
        problem: &Problem,
        source: &impl KeySource<E>,
        head: [usize; 2],
        keys: &RangeKeys,
        tile: &TileKeys,
        places: std::ops::Range<usize>,
    ) {
        let dim = problem.head_dim;
        self.len = places.len();
        self.columns = self.len.next_multiple_of(LANES);
        let full = tile.full.clamp(places.start, places.end) - places.start;
        let whole = full == self.columns;
        self.tested = if whole { full } else { full - full % LANES };
        self.start.clear();
        self.end.clear();
        self.start.resize(full, 0);
        self.end.resize(full, i32::MAX);
        let boundary =
            places.start.max(tile.full) - tile.full..places.end.max(tile.full) - tile.full;
        for &(start, end) in &tile.queries[boundary] {
            self.start.push(start);
            self.end.push(end);
        }
        self.start.resize(self.columns, 0);
        self.end.resize(self.columns, 0);

        let (k, v) = (
            self.k.get(self.columns * dim),
            self.v.get(self.columns * dim),
        );
        let z = self.z.get(self.columns);
        for (column, &slot) in tile.slots[places].iter().enumerate() {
            let key = keys.index[slot as usize] as usize;
            let row = column * dim..(column + 1) * dim;
            E::widen(source.key(head, key), &mut k[row.clone()]);
            E::widen(source.value(head, key), &mut v[row]);
            z[column] = source.score(head, key);
        }
        k[self.len * dim..].fill(0.0);
        v[self.len * dim..].fill(0.0);
        z[self.len..].fill(0.0);
    }

    /// The columns that some query of the tile must not attend to.
    pub(crate) fn boundary(&self) -> std::ops::Range<usize> {
        self.tested..self.len
    }

    /// Whether query `i` of the tile attends to a column.
    pub(crate) fn attends(&self, i: usize, column: usize) -> bool {
        self.start[column] <= i as i32 && (i as i32) < self.end[column]
    }
}

/// Whether every element is a finite number.
pub(crate) fn is_finite(row: &[f32]) -> bool {
    // 0 times anything finite is 0, times anything else NaN; the sum vectorises, a search does not.
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * 0.0;
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|x| x * 0.0).sum::<f32>() == 0.0
}

/// Everything a thread needs for one tile, forward or backward.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) tile: TileKeys,
    pub(crate) block: KeyBlock,
    /// Under a mask: the blocks of the tile, and some of them gathered.
    pub(crate) masked_blocks: TileBlocks,
    pub(crate) masked_keys: MaskedKeys,
    /// `[rows, head_dim]`: queries.
    pub(crate) q: Buffer,
    /// `[rows, head_dim]`: output accumulator forward, gradient of q backward.
    pub(crate) acc: Buffer,
    /// `[rows, columns]`: logits, then probabilities.
    pub(crate) p: Buffer,
    /// `[rows]`: running maximum forward, LSE backward.
    pub(crate) max: Buffer,
    /// `[rows]`: running sum forward, `delta` backward.
    pub(crate) sum: Buffer,
    /// Backward: `[rows, head_dim]`, gradient of the output.
    pub(crate) grad_out: Buffer,
    /// Backward: `[rows, columns]`, gradient of the probabilities, then of the scaled products.
    pub(crate) ds: Buffer,
    /// Backward under a mask: `[rows, columns]`, gradient of the logits.
    pub(crate) dlogit: Buffer,
    /// Backward: `[columns, head_dim]`, what a tile adds to the gradients of K and V.
    pub(crate) dk: Buffer,
    pub(crate) dv: Buffer,
    /// Backward: `[columns]`, what a tile adds to the gradient of the scores.
    pub(crate) dz: Buffer,
    /// Backward: q and the gradient of the output with their non-finite rows zeroed.
    pub(crate) finite_q: Buffer,
    pub(crate) finite_grad_out: Buffer,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Runs `task` with this thread's scratch memory.
pub(crate) fn with_scratch<R>(task: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(task)
}
