//! Dynamic-mask attention and its gradients, over the selected pairs.

use crate::compare::Exact;
use crate::naive;
use crate::rows::{self, Change, Grads, Pairs, Tensors, kv_head, kv_keys};
use crate::{compose, select};
use flash_dma_problem::{LeaveOneOut, Problem, ScoreRole, SelectionRule};

/// The inputs of one problem: contiguous, in the shapes of the problem. Every method panics if a tensor has another
/// shape.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Sizes and options.
    pub problem: Problem,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Vec<f64>,
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores.
    pub scores: Option<Vec<f64>>,
}

/// The results of the forward pass.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: Exact,
    /// `[batch, q_heads, q_len]`, natural logarithm.
    pub lse: Exact,
}

/// The results of the backward pass.
#[derive(Clone, Debug)]
pub struct Backward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Exact,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Exact,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Exact,
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores.
    pub scores: Option<Exact>,
}

/// The selected pairs: each head's keys in rank order, and their scores.
pub(crate) struct Selected<'a> {
    problem: &'a Problem,
    scores: Option<&'a [f64]>,
    role: ScoreRole,
    ranked: Vec<Vec<usize>>,
}

/// Keys of a head of these scores, and what is added to their logits.
fn biased(keys: Vec<usize>, scores: &[f64], role: ScoreRole) -> Vec<(usize, f64)> {
    let added = |j: usize| match role {
        ScoreRole::RankAndBias => scores[j],
        ScoreRole::Rank => 0.0,
    };
    keys.into_iter().map(|j| (j, added(j))).collect()
}

impl Selected<'_> {
    /// The keys that query `i` attends to with a window, ascending.
    fn take(&self, [b, h, i]: [usize; 3], window: usize) -> Vec<usize> {
        let p = self.problem;
        select::take(&self.ranked[kv_head(p, b, h)], window, p.position(i))
    }

    /// Keys of the kv head that a query head reads, and what is added to their logits.
    fn biased(&self, b: usize, h: usize, keys: Vec<usize>) -> Vec<(usize, f64)> {
        let scores = self.scores.expect("keys are selected by scores");
        biased(keys, &scores[kv_keys(self.problem, b, h)], self.role)
    }
}

impl Pairs for Selected<'_> {
    fn row(&self, b: usize, h: usize, i: usize) -> Vec<(usize, f64)> {
        if self.scores.is_none() {
            return rows::visible(self.problem, i).map(|j| (j, 0.0)).collect();
        }
        self.biased(b, h, self.take([b, h, i], self.problem.window))
    }
}

/// The pairs of a rule, row by row by its definition.
pub(crate) struct Ruled<'a> {
    problem: &'a Problem,
    scores: &'a [f64],
    rule: &'a SelectionRule,
    role: ScoreRole,
}

impl Pairs for Ruled<'_> {
    fn row(&self, b: usize, h: usize, i: usize) -> Vec<(usize, f64)> {
        let Ok(position) = usize::try_from(self.problem.position(i)) else {
            return Vec::new();
        };
        let scores = &self.scores[kv_keys(self.problem, b, h)];
        let attended = compose::attended(scores, self.rule, position);
        biased(attended, scores, self.role)
    }
}

/// The runners-up of every row: what a window that keeps `more` keys attends to beyond the selected pairs.
struct RunnersUp<'a> {
    selected: &'a Selected<'a>,
    more: usize,
}

impl Pairs for RunnersUp<'_> {
    fn row(&self, b: usize, h: usize, i: usize) -> Vec<(usize, f64)> {
        let window = self.selected.problem.window;
        let selected = self.selected.take([b, h, i], window);
        let mut outside = self
            .selected
            .take([b, h, i], window.saturating_add(self.more));
        // Both are ascending.
        outside.retain(|key| selected.binary_search(key).is_err());
        self.selected.biased(b, h, outside)
    }
}

/// Kept keys from the position on from which their rank keeps them.
struct KeptByRank<'a> {
    selected: &'a Selected<'a>,
    /// `[batch, kv_heads, k_len]`.
    from: &'a [u32],
}

impl Pairs for KeptByRank<'_> {
    fn row(&self, b: usize, h: usize, i: usize) -> Vec<(usize, f64)> {
        let p = self.selected.problem;
        let from = &self.from[kv_keys(p, b, h)];
        let mut keys = self.selected.row(b, h, i);
        keys.retain(|&(j, _)| i64::from(from[j]) <= p.position(i));
        keys
    }
}

impl Inputs {
    /// The output and the LSE.
    #[must_use]
    pub fn forward(&self) -> Forward {
        self.forward_for(ScoreRole::default())
    }

    /// The output and the LSE if the scores are for `role`.
    #[must_use]
    pub fn forward_for(&self, role: ScoreRole) -> Forward {
        rows::forward(&self.tensors(), &self.selected_for(role))
    }

    /// The output and the LSE if every position attends to the keys of a rule, whose window the problem has, and the
    /// scores are for `role`.
    ///
    /// # Panics
    ///
    /// If there are no scores.
    #[must_use]
    pub fn forward_by(&self, rule: &SelectionRule, role: ScoreRole) -> Forward {
        rows::forward(&self.tensors(), &self.ruled(rule, role))
    }

    /// The probabilities with which the queries `rows` attend to each key, `[batch, q_heads, rows, k_len]`.
    ///
    /// # Panics
    ///
    /// If there is no such query.
    #[must_use]
    pub fn probabilities(&self, rows: &[usize]) -> Exact {
        rows::probabilities(&self.tensors(), &self.selected(), rows)
    }

    /// The gradients, from the gradients of `out` (`[batch, q_heads, q_len, head_dim]`) and of the LSE
    /// (`[batch, q_heads, q_len]`, `None` is zero).
    #[must_use]
    pub fn backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> Backward {
        self.backward_of(&self.tensors(), (grad_out, grad_lse))
    }

    pub(crate) fn backward_of(&self, tensors: &Tensors<'_>, grads: Grads<'_>) -> Backward {
        let mut scores = self.scores.as_ref().map(|s| Exact::zeros(s.len()));
        let sink = |b, h, _, j, ds, size| {
            if let Some(scores) = &mut scores {
                scores.add(tensors.k_row(b, h, j), ds, size);
            }
        };
        let [q, k, v] = rows::backward(tensors, &self.selected(), grads, sink);
        Backward { q, k, v, scores }
    }

    /// The gradient of the tensor that ranks the keys, `[batch, kv_heads, k_len]`, if the `runners_up` keys that come
    /// after the window are to learn: for each query and each of its runners-up, with `x` the logit minus the LSE,
    /// `sigmoid(x) * grad_out . (v - out) + grad_lse * softplus(x)`, the change of the loss if the key were attended.
    ///
    /// # Panics
    ///
    /// If there are no scores.
    #[must_use]
    pub fn rank_gradient(
        &self,
        runners_up: usize,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        self.rank_gradient_of(&self.tensors(), runners_up, (grad_out, grad_lse))
    }

    pub(crate) fn rank_gradient_of(
        &self,
        tensors: &Tensors<'_>,
        more: usize,
        grads: Grads<'_>,
    ) -> Exact {
        let selected = &self.selected();
        let runners_up = (&RunnersUp { selected, more }, Change::Added);
        rows::rank(tensors, selected, runners_up, grads)
    }

    /// As [`Inputs::rank_gradient`], by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_rank_gradient(
        &self,
        runners_up: usize,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let (selected, more) = (&self.selected(), runners_up);
        let runners_up = (&RunnersUp { selected, more }, Change::Added);
        naive::rank(&self.tensors(), selected, runners_up, (grad_out, grad_lse))
    }

    /// The gradient of the tensor that ranks the keys, `[batch, kv_heads, k_len]`, if kept keys are to learn what they
    /// are worth: as [`LeaveOneOut`] says, for each query and each key that it keeps and whose `from`,
    /// `[batch, kv_heads, k_len]`, is not after the query's position.
    ///
    /// # Panics
    ///
    /// If there are no scores.
    #[must_use]
    pub fn left_out_gradient(
        &self,
        (from, how): (&[u32], LeaveOneOut),
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        self.left_out_gradient_of(&self.tensors(), (from, how), (grad_out, grad_lse))
    }

    pub(crate) fn left_out_gradient_of(
        &self,
        tensors: &Tensors<'_>,
        (from, how): (&[u32], LeaveOneOut),
        grads: Grads<'_>,
    ) -> Exact {
        let selected = &self.selected();
        let kept = (&KeptByRank { selected, from }, Change::LeftOut(how));
        rows::rank(tensors, selected, kept, grads)
    }

    /// As [`Inputs::left_out_gradient`], by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_left_out_gradient(
        &self,
        (from, how): (&[u32], LeaveOneOut),
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let selected = &self.selected();
        let kept = (&KeptByRank { selected, from }, Change::LeftOut(how));
        naive::rank(&self.tensors(), selected, kept, (grad_out, grad_lse))
    }

    pub(crate) fn tensors(&self) -> Tensors<'_> {
        Tensors::new(&self.problem, [&self.q, &self.k, &self.v])
    }

    pub(crate) fn ruled<'a>(&'a self, rule: &'a SelectionRule, role: ScoreRole) -> Ruled<'a> {
        let p = &self.problem;
        assert_eq!(p.window, rule.window, "the window of the rule");
        let scores = self.scores.as_deref().expect("a rule ranks scores");
        assert_eq!(scores.len(), p.batch * p.kv_heads * p.k_len, "scores");
        Ruled {
            problem: p,
            scores,
            rule,
            role,
        }
    }

    pub(crate) fn selected(&self) -> Selected<'_> {
        self.selected_for(ScoreRole::default())
    }

    pub(crate) fn selected_for(&self, role: ScoreRole) -> Selected<'_> {
        let p = &self.problem;
        assert_eq!(p.has_scores, self.scores.is_some(), "scores");
        let heads = p.batch * p.kv_heads;
        let ranked = self.scores.iter().flat_map(|scores| {
            assert_eq!(scores.len(), heads * p.k_len, "scores");
            // Heads without keys still count as heads.
            (0..heads).map(|head| select::ranked(&scores[head * p.k_len..(head + 1) * p.k_len]))
        });
        Selected {
            problem: p,
            scores: self.scores.as_deref(),
            role,
            ranked: ranked.collect(),
        }
    }
}
