//! The bias of the logits: one strided tensor, either the scores of the keys or a tensor that broadcasts.

use crate::queries::QueryRows;
use crate::view::{BroadcastView, View};

/// A bias of queries and keys: `data[sum(index * steps)]`, with a step of 0 on an axis that broadcasts.
#[derive(Clone, Copy)]
pub(crate) struct Bias<'a> {
    data: &'a [f32],
    /// Elements from one sequence, entry of the head axis, query and key to the next.
    steps: [usize; 4],
    /// Query heads that share an entry of the head axis.
    heads_each: usize,
}

impl<'a> Bias<'a> {
    /// The scores of the keys, which a group of query heads shares.
    pub(crate) fn of_scores(scores: &View<'a, f32, 3>, group: usize) -> Self {
        let [batch, head, _] = scores.strides;
        Self {
            data: scores.data,
            steps: [batch, head, 0, 1],
            heads_each: group,
        }
    }

    pub(crate) fn of_tensor(bias: &BroadcastView<'a, f32>, heads_each: usize) -> Self {
        Self {
            data: bias.data,
            steps: bias.steps(),
            heads_each,
        }
    }

    /// True if all rows have the same biases.
    pub(crate) fn is_one_row(&self, rows: &QueryRows) -> bool {
        self.steps[2] == 0 && self.heads_each >= rows.group
    }

    pub(crate) fn gather(&self, rows: &QueryRows, row: usize, keys: &[u32], target: &mut [f32]) {
        let [by_batch, by_head, by_query, by_key] = self.steps;
        let from = rows.kv_head.batch * by_batch
            + rows.q_head(row) / self.heads_each * by_head
            + rows.query(row) * by_query;
        for (bias, &key) in target.iter_mut().zip(keys) {
            *bias = self.data[from + key as usize * by_key];
        }
    }
}
