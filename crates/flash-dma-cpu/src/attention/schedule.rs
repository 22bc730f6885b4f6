//! The cut of a problem into tasks and tiles. The cut depends on the problem only, never on the number of threads, so
//! results are bit-equal on any machine with the same instruction set.

use crate::position::Positions;
use crate::queries::{KvHead, QueryRows};
use flash_dma_problem::Problem;

/// The most chunks a head's queries are cut into for the forward pass.
const FORWARD_CHUNKS: usize = 32;
/// The number of tasks that the backward pass aims at, and the most chunks into which it cuts one key/value head's
/// queries: each keeps gradients of the keys it touches, so their number bounds its memory.
const BACKWARD_TASKS: usize = 16;
const BACKWARD_CHUNKS: usize = 8;

/// Queries of a tile. With the heads of a group stacked these are the rows of the matrix products: enough of them to
/// hide the gather of the keys, few enough to keep boundary keys rare.
pub(crate) fn query_tile(problem: &Problem) -> usize {
    let wanted = (256 / problem.group()).clamp(16, 128);
    // A tile attends to up to window + tile keys: keep the tile small compared with the window.
    let useful = (problem.window / 4).clamp(16, 128);
    wanted.min(useful.next_power_of_two())
}

/// Keys of a block: the gathered rows of K and V stay in the L2 cache.
pub(crate) fn key_block(problem: &Problem) -> usize {
    (16384 / problem.head_dim).clamp(128, 256)
}

/// The chunks that the queries of every key/value head are cut into. A task is one chunk of one head.
pub(crate) struct Chunks<'a> {
    problem: &'a Problem,
    /// The starts of the chunks, and the end of the last: whole tiles, none empty.
    bounds: Vec<usize>,
}

impl<'a> Chunks<'a> {
    /// Chunks of equal length.
    pub(crate) fn forward(problem: &'a Problem) -> Self {
        let tile = query_tile(problem);
        let tiles = problem.q_len.div_ceil(tile);
        let step = tiles.div_ceil(FORWARD_CHUNKS).max(1) * tile;
        let mut bounds: Vec<usize> = (0..problem.q_len).step_by(step).collect();
        bounds.push(problem.q_len);
        Self { problem, bounds }
    }

    /// Chunks of about equal work.
    pub(crate) fn backward(problem: &'a Problem) -> Self {
        let tile = query_tile(problem);
        let heads = (problem.batch * problem.kv_heads).max(1);
        let chunks = BACKWARD_TASKS.div_ceil(heads).clamp(1, BACKWARD_CHUNKS) as u128;
        let positions = Positions::from(problem);
        let work = |query: usize| positions.visible(query).min(problem.window).max(1) as u128;
        let starts = || (0..problem.q_len).step_by(tile);
        let total: u128 = starts().map(work).sum();
        let mut bounds = vec![0];
        let mut done = 0;
        for start in starts() {
            // A new chunk begins where the work so far passes the next share of the total.
            if start > 0 && done * chunks >= total * bounds.len() as u128 {
                bounds.push(start);
            }
            done += work(start);
        }
        if problem.q_len > 0 {
            bounds.push(problem.q_len);
        }
        Self { problem, bounds }
    }

    pub(crate) fn per_head(&self) -> usize {
        self.bounds.len() - 1
    }

    pub(crate) fn rows(&self, task: usize) -> QueryRows {
        let (head, chunk) = (task / self.per_head(), task % self.per_head());
        QueryRows {
            kv_head: KvHead {
                batch: head / self.problem.kv_heads,
                head: head % self.problem.kv_heads,
            },
            group: self.problem.group(),
            queries: self.bounds[chunk]..self.bounds[chunk + 1],
        }
    }

    /// Cuts a `[batch, q_heads, q_len, width]` buffer into the tasks' rows, a slice for each head of the group.
    pub(crate) fn split<'b, T>(
        &self,
        mut buffer: &'b mut [T],
        width: usize,
    ) -> Vec<Vec<&'b mut [T]>> {
        let problem = self.problem;
        let chunks = self.per_head();
        let mut tasks: Vec<Vec<&mut [T]>> = Vec::new();
        tasks.resize_with(problem.batch * problem.kv_heads * chunks, Vec::new);
        for head in 0..problem.batch * problem.q_heads {
            for chunk in 0..chunks {
                let rows = self.bounds[chunk + 1] - self.bounds[chunk];
                let (slice, rest) = buffer.split_at_mut(rows * width);
                tasks[head / problem.group() * chunks + chunk].push(slice);
                buffer = rest;
            }
        }
        tasks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_problem::{AttentionOptions, ElementType};

    #[test]
    fn chunks_cover_every_query_once_in_whole_tiles() {
        let lengths = [
            (0, 5),
            (1, 1),
            (1000, 1000),
            (4096, 4096),
            (777, 3),
            (3, 9000),
        ];
        for (q_len, k_len) in lengths {
            for causal in [false, true] {
                for window in [1, 100, 5000] {
                    let options = AttentionOptions::new().with_causal(causal);
                    let options = options.with_keep_window(window);
                    let (q, k) = ([1, 8, q_len, 64], [1, 2, k_len, 64]);
                    let (scores, f32) = (Some(&k[..3]), ElementType::F32);
                    let p = Problem::new(&q, &k, &k, scores, f32, &options).unwrap();
                    for (Chunks { bounds, .. }, most) in [
                        (Chunks::forward(&p), FORWARD_CHUNKS),
                        (Chunks::backward(&p), BACKWARD_CHUNKS),
                    ] {
                        assert_eq!((bounds[0], *bounds.last().unwrap()), (0, q_len));
                        assert!(bounds.windows(2).all(|b| b[0] < b[1]));
                        assert!(bounds.len() <= most + 1, "{bounds:?}");
                        let inner = &bounds[..bounds.len() - 1];
                        assert!(inner.iter().all(|b| b.is_multiple_of(query_tile(&p))));
                    }
                }
            }
        }
    }
}
