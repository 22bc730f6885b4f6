//! Dynamic-mask attention and its gradients, over the selected pairs.

use crate::compare::Exact;
use crate::naive;
use crate::rows::{self, Change, Logits, Pairs, Tensors};
use crate::{compose, select};
use flash_dma_problem::{LeaveOneOut, Problem, ScoreRole, SelectionRule};

/// The inputs of one problem: contiguous, in the shapes of the problem.
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

/// What is added to the logits of a key of this score.
fn added(role: ScoreRole, score: f64) -> f64 {
    match role {
        ScoreRole::RankAndBias => score,
        ScoreRole::Rank => 0.0,
    }
}

impl Pairs for Selected<'_> {
    fn row(&self, b: usize, h: usize, i: usize, keys: &mut Vec<(usize, f64)>) {
        let p = self.problem;
        let position = p.position(i);
        keys.clear();
        let Some(scores) = self.scores else {
            keys.extend(
                (0..p.k_len)
                    .filter(|&j| j as i64 <= position)
                    .map(|j| (j, 0.0)),
            );
            return;
        };
        let head = b * p.kv_heads + h / p.group();
        let scores = &scores[head * p.k_len..];
        let selected = select::take(&self.ranked[head], p.window, position);
        keys.extend(
            selected
                .into_iter()
                .map(|j| (j, added(self.role, scores[j]))),
        );
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
    fn row(&self, b: usize, h: usize, i: usize, keys: &mut Vec<(usize, f64)>) {
        let p = self.problem;
        keys.clear();
        let Ok(position) = usize::try_from(p.position(i)) else {
            return;
        };
        let head = b * p.kv_heads + h / p.group();
        let scores = &self.scores[head * p.k_len..(head + 1) * p.k_len];
        let attended = compose::attended(scores, self.rule, position);
        keys.extend(
            attended
                .into_iter()
                .map(|j| (j, added(self.role, scores[j]))),
        );
    }
}

/// The runners-up of every row: what a window that keeps `more` keys attends to beyond the selected pairs.
struct RunnersUp<'a> {
    selected: &'a Selected<'a>,
    more: usize,
}

impl Pairs for RunnersUp<'_> {
    fn row(&self, b: usize, h: usize, i: usize, keys: &mut Vec<(usize, f64)>) {
        let Selected {
            problem: p,
            scores,
            role,
            ranked,
        } = self.selected;
        let head = b * p.kv_heads + h / p.group();
        let take = |window| select::take(&ranked[head], window, p.position(i));
        let scores = &scores.expect("runners-up have scores")[head * p.k_len..];
        let selected = take(p.window);
        let wider = take(p.window.saturating_add(self.more));
        // Both are ascending.
        let outside = (wider.into_iter()).filter(|key| selected.binary_search(key).is_err());
        keys.clear();
        keys.extend(outside.map(|j| (j, added(*role, scores[j]))));
    }
}

/// Kept keys from the position on from which their rank keeps them.
struct KeptByRank<'a> {
    selected: &'a Selected<'a>,
    /// `[batch, kv_heads, k_len]`.
    from: &'a [u32],
}

impl Pairs for KeptByRank<'_> {
    fn row(&self, b: usize, h: usize, i: usize, keys: &mut Vec<(usize, f64)>) {
        let p = self.selected.problem;
        self.selected.row(b, h, i, keys);
        let head = b * p.kv_heads + h / p.group();
        let from = &self.from[head * p.k_len..(head + 1) * p.k_len];
        keys.retain(|&(j, _)| i64::from(from[j]) <= p.position(i));
    }
}

impl Inputs {
    /// The output and the LSE.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape.
    #[must_use]
    pub fn forward(&self) -> Forward {
        let (out, lse) = rows::forward(&self.tensors(), &self.selected());
        Forward { out, lse }
    }

    /// The output and the LSE if the scores are for `role`.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape.
    #[must_use]
    pub fn forward_for(&self, role: ScoreRole) -> Forward {
        let (out, lse) = rows::forward(&self.tensors(), &self.selected_for(role));
        Forward { out, lse }
    }

    /// The output and the LSE if every position attends to the keys of a rule, whose window the problem has, and the
    /// scores are for `role`.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape, or there are no scores.
    #[must_use]
    pub fn forward_by(&self, rule: &SelectionRule, role: ScoreRole) -> Forward {
        let (out, lse) = rows::forward(&self.tensors(), &self.ruled(rule, role));
        Forward { out, lse }
    }

    /// The probabilities with which the queries `rows` attend to each key, `[batch, q_heads, rows, k_len]`.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape, or there is no such query.
    #[must_use]
    pub fn probabilities(&self, rows: &[usize]) -> Exact {
        rows::probabilities(&self.tensors(), &self.selected(), rows)
    }

    /// The gradients, from the gradients of `out` (`[batch, q_heads, q_len, head_dim]`) and of the LSE
    /// (`[batch, q_heads, q_len]`, `None` is zero).
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape.
    #[must_use]
    pub fn backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> Backward {
        self.backward_of(&self.tensors(), grad_out, grad_lse)
    }

    pub(crate) fn backward_of(
        &self,
        tensors: &Tensors<'_>,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Backward {
        let p = &self.problem;
        let mut scores = self.scores.as_ref().map(|s| Exact::zeros(s.len()));
        let [q, k, v] = rows::backward(
            tensors,
            &self.selected(),
            grad_out,
            grad_lse,
            |b, h, _, j, ds, size| {
                if let Some(scores) = &mut scores {
                    scores.add((b * p.kv_heads + h / p.group()) * p.k_len + j, ds, size);
                }
            },
        );
        Backward { q, k, v, scores }
    }

    /// The gradient of the tensor that ranks the keys, `[batch, kv_heads, k_len]`, if the `runners_up` keys that come
    /// after the window are to learn: for each query and each of its runners-up, with `x` the logit minus the LSE,
    /// `sigmoid(x) * grad_out . (v - out) + grad_lse * softplus(x)`, the change of the loss if the key were attended.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape, or there are no scores.
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
        runners_up: usize,
        grads: (&[f64], Option<&[f64]>),
    ) -> Exact {
        let selected = self.selected();
        let runners = RunnersUp {
            selected: &selected,
            more: runners_up,
        };
        exact_rank(tensors, &selected, (&runners, Change::Added), grads)
    }

    /// As [`Inputs::rank_gradient`], by the same-dtype naive implementation.
    ///
    /// # Panics
    ///
    /// As it.
    #[must_use]
    pub fn naive_rank_gradient(
        &self,
        runners_up: usize,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let selected = self.selected();
        let runners = RunnersUp {
            selected: &selected,
            more: runners_up,
        };
        self.naive_rank(&selected, (&runners, Change::Added), grad_out, grad_lse)
    }

    /// The gradient of the tensor that ranks the keys, `[batch, kv_heads, k_len]`, if kept keys are to learn what they
    /// are worth: as [`LeaveOneOut`] says, for each query and each key that it keeps and whose `from`,
    /// `[batch, kv_heads, k_len]`, is not after the query's position.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape, or there are no scores.
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
        grads: (&[f64], Option<&[f64]>),
    ) -> Exact {
        let selected = &self.selected();
        let kept = (&KeptByRank { selected, from }, Change::LeftOut(how));
        exact_rank(tensors, selected, kept, grads)
    }

    /// As [`Inputs::left_out_gradient`], by the same-dtype naive implementation.
    ///
    /// # Panics
    ///
    /// As it.
    #[must_use]
    pub fn naive_left_out_gradient(
        &self,
        (from, how): (&[u32], LeaveOneOut),
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let selected = &self.selected();
        let kept = (&KeptByRank { selected, from }, Change::LeftOut(how));
        self.naive_rank(selected, kept, grad_out, grad_lse)
    }

    fn naive_rank(
        &self,
        selected: &Selected,
        asked: (&impl Pairs, Change),
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let mut rank = vec![0.0f32; self.problem.scores_shape().iter().product()];
        let t = self.tensors();
        let sink = |b, h, j, gradient| rank[t.k_row(b, h, j)] += gradient;
        naive::rank(&t, selected, asked, grad_out, grad_lse, sink);
        rank.into_iter().map(f64::from).collect()
    }

    pub(crate) fn tensors(&self) -> Tensors<'_> {
        let p = &self.problem;
        assert_eq!(self.q.len(), p.q_shape().iter().product::<usize>(), "q");
        assert_eq!(self.k.len(), p.kv_shape().iter().product::<usize>(), "k");
        assert_eq!(self.v.len(), self.k.len(), "v");
        Tensors {
            problem: p,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            logits: Logits::Exact,
        }
    }

    pub(crate) fn ruled<'a>(&'a self, rule: &'a SelectionRule, role: ScoreRole) -> Ruled<'a> {
        let p = &self.problem;
        assert_eq!(p.window, rule.window, "the window of the rule");
        let scores = self.scores.as_deref().expect("a rule ranks scores");
        assert_eq!(
            scores.len(),
            p.scores_shape().iter().product::<usize>(),
            "scores"
        );
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

fn exact_rank(
    t: &Tensors<'_>,
    selected: &Selected,
    asked: (&impl Pairs, Change),
    (grad_out, grad_lse): (&[f64], Option<&[f64]>),
) -> Exact {
    let mut rank = Exact::zeros(t.problem.scores_shape().iter().product());
    let sink = |b, h, j, gradient, size| rank.add(t.k_row(b, h, j), gradient, size);
    rows::rank(t, selected, asked, grad_out, grad_lse, sink);
    rank
}
