//! Dynamic-mask attention and its gradients, over the selected pairs.

use crate::compare::Exact;
use crate::rows::{self, At, Change, Forward, Grads, Keys, Pairs, Tensors, kv_head, kv_keys};
use crate::{compose, select};
use flash_dma_problem::{Problem, ScoreRole, SelectionRule};

/// The inputs of one problem: contiguous, in its shapes. Every method panics if a tensor has another shape.
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

/// Keys of a head with these scores, and the biases of their logits.
fn biased(keys: Vec<usize>, scores: &[f64], role: ScoreRole) -> Keys {
    let added = |j: usize| match role {
        ScoreRole::RankAndBias => scores[j],
        ScoreRole::Rank => 0.0,
    };
    keys.into_iter().map(|j| (j, added(j))).collect()
}

impl Selected<'_> {
    /// The keys that a query attends to with a window, ascending.
    fn take(&self, [b, h, i]: At, window: usize) -> Vec<usize> {
        let p = self.problem;
        select::take(&self.ranked[kv_head(p, b, h)], window, p.position(i))
    }

    /// Keys of the kv head that a query head reads, and the biases of their logits.
    fn biased(&self, [b, h, _]: At, keys: Vec<usize>) -> Keys {
        let scores = self.scores.expect("keys are selected by scores");
        biased(keys, &scores[kv_keys(self.problem, b, h)], self.role)
    }

    /// The runners-up of every row: the keys that a window of `more` keys would add to the selected pairs.
    pub(crate) fn runners_up(&self, more: usize) -> impl Pairs {
        let window = self.problem.window;
        move |at: At| {
            let selected = self.take(at, window);
            let mut outside = self.take(at, window.saturating_add(more));
            // Both are ascending.
            outside.retain(|key| selected.binary_search(key).is_err());
            self.biased(at, outside)
        }
    }

    /// Kept keys from the position on at which their rank keeps them: `from` is `[batch, kv_heads, k_len]`.
    pub(crate) fn kept_by_rank(&self, from: &[u32]) -> impl Pairs {
        let p = self.problem;
        move |[b, h, i]: At| {
            let from = &from[kv_keys(p, b, h)];
            let mut keys = self.row([b, h, i]);
            keys.retain(|&(j, _)| i64::from(from[j]) <= p.position(i));
            keys
        }
    }
}

impl Pairs for Selected<'_> {
    fn row(&self, at: At) -> Keys {
        if self.scores.is_none() {
            let visible = rows::visible(self.problem, at[2]);
            return visible.map(|j| (j, 0.0)).collect();
        }
        self.biased(at, self.take(at, self.problem.window))
    }
}

impl Inputs {
    /// The output and the LSE.
    #[must_use]
    pub fn forward(&self) -> Forward {
        self.forward_for(ScoreRole::default())
    }

    /// The output and the LSE with the scores in `role`.
    #[must_use]
    pub fn forward_for(&self, role: ScoreRole) -> Forward {
        rows::forward(&self.tensors(), &self.selected_for(role))
    }

    /// The output and LSE with the keys of a rule, whose window is the problem's, and the scores in `role`.
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
        let sink = |at, j, ds, size| {
            if let Some(scores) = &mut scores {
                scores.add(tensors.k_row(at, j), ds, size);
            }
        };
        let [q, k, v] = rows::backward(tensors, &self.selected(), grads, sink);
        Backward { q, k, v, scores }
    }

    /// The gradient of the rank, `[batch, kv_heads, k_len]`, if the `runners_up` keys that come after the window learn:
    /// for each query and each of its runners-up, with `x` the logit minus the LSE,
    /// `sigmoid(x) * grad_out . (v - out) + grad_lse * softplus(x)`, the change of the loss if the key were attended
    /// to.
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
        let selected = self.selected();
        let asked = (&selected.runners_up(more), Change::Added);
        rows::rank(tensors, &selected, asked, grads)
    }

    /// The gradient of the rank, `[batch, kv_heads, k_len]`, if kept keys learn by [leaving them
    /// out](flash_dma_problem::OWN_OUTPUT_WEIGHT): for each query and each key that it keeps and whose `from`,
    /// `[batch, kv_heads, k_len]`, is not after the query's position.
    ///
    /// # Panics
    ///
    /// If there are no scores.
    #[must_use]
    pub fn left_out_gradient(
        &self,
        from: &[u32],
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        self.left_out_gradient_of(&self.tensors(), from, (grad_out, grad_lse))
    }

    pub(crate) fn left_out_gradient_of(
        &self,
        tensors: &Tensors<'_>,
        from: &[u32],
        grads: Grads<'_>,
    ) -> Exact {
        let selected = self.selected();
        let asked = (&selected.kept_by_rank(from), Change::LeftOut);
        rows::rank(tensors, &selected, asked, grads)
    }

    pub(crate) fn tensors(&self) -> Tensors<'_> {
        Tensors::new(&self.problem, [&self.q, &self.k, &self.v])
    }

    /// The pairs of a rule, row by row by its definition.
    pub(crate) fn ruled(&self, rule: &SelectionRule, role: ScoreRole) -> impl Pairs {
        let p = &self.problem;
        assert_eq!(p.window, rule.window, "the window of the rule");
        let scores = self.scores.as_deref().expect("a rule ranks scores");
        assert_eq!(scores.len(), p.batch * p.kv_heads * p.k_len, "scores");
        move |[b, h, i]: At| {
            let Ok(position) = usize::try_from(p.position(i)) else {
                return Vec::new();
            };
            let scores = &scores[kv_keys(p, b, h)];
            biased(compose::attended(scores, rule, position), scores, role)
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
