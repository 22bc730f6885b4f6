//! The gradient of the scores or the bias.
//!
//! Scores and biases differ here. A score belongs to a key: its gradient is summed over the rows of a tile while the
//! columns are in registers, and kept for the keys that a chunk touches only. A bias may broadcast along any axis, so
//! the gradient of every pair is written first and then summed along the bias's own axes.

use crate::keys::block::KeyBlock;
use crate::queries::{KvHead, QueryRows};
use crate::simd::{LANES, add_scaled};
use flash_dma_problem::Problem;

/// The gradient to write; every slice is contiguous and overwritten.
pub(crate) enum BiasGradient<'a> {
    Ignored,
    /// `[batch, kv_heads, k_len]`.
    Scores(&'a mut [f32]),
    /// In the bias's own shape; `heads_each` query heads share an entry of its head axis. If all keys share an entry
    /// (`of_rows`), it is the gradient of the rows' LSE, and no pair is read.
    Bias {
        grad: &'a mut [f32],
        shape: [usize; 4],
        heads_each: usize,
        of_rows: bool,
    },
}

impl BiasGradient<'_> {
    /// The number of `tasks` that may run at once, where each head has `chunks` of them. Each task keeps a copy of the
    /// biases of its rows: heads that share them take turns.
    pub(crate) fn tasks_at_once(&self, problem: &Problem, tasks: usize, chunks: usize) -> usize {
        match self {
            Self::Bias {
                shape: [b, h, q, _],
                ..
            } if *q > 1 && (*b < problem.batch || *h < problem.kv_heads) => chunks,
            _ => tasks,
        }
    }

    pub(crate) fn clear(&mut self) {
        match self {
            Self::Ignored => {}
            Self::Scores(grad) | Self::Bias { grad, .. } => grad.fill(0.0),
        }
    }

    /// The sums of a chunk, at zero. `keys` is the number of the chunk's keys.
    pub(crate) fn of_chunk(&self, chunk: &QueryRows, keys: usize) -> BiasSums {
        match self {
            Self::Ignored => BiasSums::Ignored,
            Self::Scores(_) => BiasSums::PerKey(vec![0.0; keys]),
            Self::Bias {
                shape,
                heads_each,
                of_rows,
                ..
            } => {
                let sums = BroadcastSums::new(*shape, *heads_each, chunk);
                match of_rows {
                    true => BiasSums::Rows(sums),
                    false => BiasSums::Broadcast(sums),
                }
            }
        }
    }

    /// Adds the sums of a chunk of a head, whose keys are `index`. Chunks come in order.
    pub(crate) fn add(&mut self, problem: &Problem, head: usize, sums: &BiasSums, index: &[u32]) {
        match (self, sums) {
            (Self::Scores(grad), BiasSums::PerKey(sums)) => {
                let grad = &mut grad[head * problem.k_len..(head + 1) * problem.k_len];
                for (&key, x) in index.iter().zip(sums) {
                    grad[key as usize] += x;
                }
            }
            (Self::Bias { grad, .. }, BiasSums::Broadcast(sums) | BiasSums::Rows(sums)) => {
                sums.add_to(grad);
            }
            _ => {}
        }
    }
}

/// One chunk's share of the gradient.
pub(crate) enum BiasSums {
    Ignored,
    /// A number for each entry of the chunk's keys.
    PerKey(Vec<f32>),
    Broadcast(BroadcastSums),
    Rows(BroadcastSums),
}

/// The gradient of the biases that one chunk of queries reads.
pub(crate) struct BroadcastSums {
    /// `[heads, rows, keys]`, sizes of 1 for the axes that the bias broadcasts.
    sums: Vec<f32>,
    /// Heads of the group, or 1 if they share a bias.
    heads: usize,
    rows: usize,
    keys: usize,
    /// The first query; 0 if all share a bias.
    first: usize,
    /// The index of the first row in the bias, and the distance between heads.
    begin: usize,
    head_stride: usize,
}

impl BroadcastSums {
    fn new([b, h, q, keys]: [usize; 4], heads_each: usize, chunk: &QueryRows) -> Self {
        let KvHead { batch, head } = chunk.kv_head;
        let shared = heads_each >= chunk.group;
        let heads = if shared { 1 } else { chunk.group };
        let (rows, first) = match q {
            1 => (1, 0),
            _ => (chunk.queries.len(), chunk.queries.start),
        };
        let batch = if b == 1 { 0 } else { batch };
        let head = head * chunk.group / heads_each;
        Self {
            sums: vec![0.0; heads * rows * keys],
            heads,
            rows,
            keys,
            first,
            begin: ((batch * h + head) * q + first) * keys,
            head_stride: q * keys,
        }
    }

    /// Adds the gradients of a tile's logits, `[rows, columns]`, to those of their biases.
    pub(crate) fn add(&mut self, tile: &QueryRows, block: &KeyBlock<'_>, logits: &[f32]) {
        if self.sums.is_empty() {
            return;
        }
        let runs: Vec<&[u32]> = block.keys.chunk_by(|a, b| a + 1 == *b).collect();
        for (r, logits) in logits.chunks_exact(block.columns).enumerate() {
            let sums = self.of_row(tile, r);
            let mut column = 0;
            for run in &runs {
                let first = run[0] as usize;
                add_scaled(&mut sums[first..first + run.len()], 1.0, &logits[column..]);
                column += run.len();
            }
        }
    }

    pub(crate) fn add_rows(&mut self, tile: &QueryRows, gradients: impl Iterator<Item = f32>) {
        for (r, gradient) in gradients.enumerate() {
            self.of_row(tile, r)[0] += gradient;
        }
    }

    fn of_row(&mut self, tile: &QueryRows, r: usize) -> &mut [f32] {
        let head = if self.heads == 1 { 0 } else { tile.member(r) };
        let row = match self.rows {
            1 => 0,
            _ => tile.query(r) - self.first,
        };
        &mut self.sums[(head * self.rows + row) * self.keys..][..self.keys]
    }

    fn add_to(&self, dbias: &mut [f32]) {
        if self.sums.is_empty() {
            return;
        }
        let rows = self.rows * self.keys;
        for (head, sums) in self.sums.chunks_exact(rows).enumerate() {
            let begin = self.begin + head * self.head_stride;
            add_scaled(&mut dbias[begin..begin + rows], 1.0, sums);
        }
    }
}

/// Takes the gradients of a block's logits. The rows come in order, each with all columns.
pub(crate) trait LogitGradients {
    /// Takes [`LANES`] columns: group `lanes` of a row whose first group is number `row_lanes` of the block.
    fn add(&mut self, row_lanes: usize, lanes: usize, gradient: &[f32; LANES]);

    /// Takes row `row`, all of whose `lanes` groups are zero, and so adds nothing to a sum.
    #[inline(always)]
    fn clear_row(&mut self, _row: usize, _lanes: usize) {}
}

/// Keeps nothing.
pub(crate) struct NoLogits;

impl LogitGradients for NoLogits {
    #[inline(always)]
    fn add(&mut self, _: usize, _: usize, _: &[f32; LANES]) {}
}

/// Keeps the sums over the rows, `[columns]`.
pub(crate) struct ColumnSums<'a>(&'a mut [[f32; LANES]]);

impl<'a> ColumnSums<'a> {
    pub(crate) fn new(sums: &'a mut [f32]) -> Self {
        sums.fill(0.0);
        Self(sums.as_chunks_mut().0)
    }
}

impl LogitGradients for ColumnSums<'_> {
    #[inline(always)]
    fn add(&mut self, _: usize, lanes: usize, gradient: &[f32; LANES]) {
        for (sum, x) in self.0[lanes].iter_mut().zip(gradient) {
            *sum += x;
        }
    }
}

/// Keeps each of them, `[rows, columns]`.
pub(crate) struct AllLogits<'a>(&'a mut [[f32; LANES]]);

impl<'a> AllLogits<'a> {
    pub(crate) fn new(logits: &'a mut [f32]) -> Self {
        Self(logits.as_chunks_mut().0)
    }
}

impl LogitGradients for AllLogits<'_> {
    #[inline(always)]
    fn add(&mut self, row_lanes: usize, lanes: usize, gradient: &[f32; LANES]) {
        self.0[row_lanes + lanes] = *gradient;
    }

    #[inline(always)]
    fn clear_row(&mut self, row: usize, lanes: usize) {
        self.0[row * lanes..(row + 1) * lanes].fill([0.0; LANES]);
    }
}
