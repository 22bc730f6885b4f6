//! Attention under an arbitrary mask and an arbitrary bias, with every broadcast.

use crate::compare::Exact;
use crate::naive::Mean;
use crate::rows::{self, At, Change, Grads, Keys, Pairs, Tensors};
use crate::{Forward, NaiveBackward, NaiveForward, naive};
use flash_dma_problem::Problem;

/// A tensor that broadcasts to `[batch, q_heads, q_len, k_len]`. Its shape is
/// `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]`; with `kv_heads` on the second axis a query head reads
/// the entry of its kv head.
#[derive(Clone, Debug)]
pub struct Broadcast<T> {
    /// Size of each axis.
    pub shape: [usize; 4],
    /// Contiguous.
    pub values: Vec<T>,
}

impl<T: Copy> Broadcast<T> {
    /// The index of a pair's element in `values`.
    ///
    /// # Panics
    ///
    /// If the shape does not broadcast to the problem's.
    #[must_use]
    pub fn index(&self, problem: &Problem, b: usize, h: usize, i: usize, j: usize) -> usize {
        let head = match self.shape[1] {
            n if n == problem.q_heads => h,
            n if n == problem.kv_heads => h / problem.group(),
            n => {
                assert_eq!(n, 1, "axis 1 of {:?} does not broadcast", self.shape);
                0
            }
        };
        let axis = |axis: usize, size: usize, at: usize| {
            let n = self.shape[axis];
            assert!(n == size || n == 1, "axis {axis} of {:?}", self.shape);
            if n == 1 { 0 } else { at }
        };
        let b = axis(0, problem.batch, b);
        let (i, j) = (axis(2, problem.q_len, i), axis(3, problem.k_len, j));
        ((b * self.shape[1] + head) * self.shape[2] + i) * self.shape[3] + j
    }
}

/// The inputs of attention under a mask and a bias. The problem has no scores; its causal masking
/// comes on top of the mask. Every method panics if a shape does not fit the problem.
#[derive(Clone, Debug)]
pub struct MaskedInputs {
    /// Sizes and options.
    pub problem: Problem,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Vec<f64>,
    /// `true` where a query sees a key.
    pub visible: Option<Broadcast<bool>>,
    /// Added to the logit after the softcap.
    pub bias: Option<Broadcast<f64>>,
}

/// The results of the backward pass.
#[derive(Clone, Debug)]
pub struct MaskedBackward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Exact,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Exact,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Exact,
    /// In the bias's own shape.
    pub bias: Option<Exact>,
}

impl Pairs for MaskedInputs {
    fn row(&self, at: At) -> Keys {
        self.keys_of(self.visible.as_ref(), at)
    }
}

impl MaskedInputs {
    /// The output and the LSE.
    #[must_use]
    pub fn forward(&self) -> Forward {
        rows::forward(&self.tensors(), self)
    }

    /// The probabilities with which the queries `rows` attend to each key, `[batch, q_heads, rows, k_len]`.
    ///
    /// # Panics
    ///
    /// If there is no such query.
    #[must_use]
    pub fn probabilities(&self, rows: &[usize]) -> Exact {
        rows::probabilities(&self.tensors(), self, rows)
    }

    /// The gradients, from the gradients of `out` and of the LSE (`None` is zero).
    #[must_use]
    pub fn backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> MaskedBackward {
        self.backward_of(&self.tensors(), (grad_out, grad_lse))
    }

    pub(crate) fn backward_of(&self, tensors: &Tensors<'_>, grads: Grads<'_>) -> MaskedBackward {
        let mut bias = self.bias.as_ref().map(|b| Exact::zeros(b.values.len()));
        let sink = |[b, h, i]: At, j, ds, size| {
            if let (Some(grad), Some(bias)) = (&mut bias, &self.bias) {
                grad.add(bias.index(&self.problem, b, h, i, j), ds, size);
            }
        };
        let [q, k, v] = rows::backward(tensors, self, grads, sink);
        MaskedBackward { q, k, v, bias }
    }

    /// The output and the LSE by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward(&self) -> NaiveForward {
        naive::forward(&self.tensors(), self)
    }

    /// The gradients of `q`, `k`, `v` and of the bias, by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_backward(
        &self,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> (NaiveBackward, Option<Vec<f64>>) {
        self.naive_gradients((grad_out, grad_lse), Mean::OfOutput)
    }

    /// [`naive_backward`](Self::naive_backward) by automatic differentiation of the naive forward pass: see
    /// [`Inputs::naive_autograd`](crate::Inputs::naive_autograd).
    #[must_use]
    pub fn naive_autograd(
        &self,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> (NaiveBackward, Option<Vec<f64>>) {
        self.naive_gradients((grad_out, grad_lse), Mean::OfPairs)
    }

    /// The gradient of the rank, `[batch, kv_heads, k_len]`, if the pairs shown by `runners_up`, none of which may be
    /// attended to, are those of runners-up; see [`Inputs::rank_gradient`](crate::Inputs::rank_gradient).
    #[must_use]
    pub fn rank_gradient(
        &self,
        runners_up: &Broadcast<bool>,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        let asked = (&self.shown(runners_up), Change::Added);
        rows::rank(&self.tensors(), self, asked, (grad_out, grad_lse))
    }

    /// [`rank_gradient`](Self::rank_gradient) by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_rank_gradient(
        &self,
        runners_up: &Broadcast<bool>,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let asked = (&self.shown(runners_up), Change::Added);
        naive::rank(&self.tensors(), self, asked, (grad_out, grad_lse))
    }

    /// The gradient of the rank, `[batch, kv_heads, k_len]`, for the pairs shown by `kept`, all of which must be
    /// attended to; see [`Inputs::left_out_gradient`](crate::Inputs::left_out_gradient).
    #[must_use]
    pub fn left_out_gradient(
        &self,
        kept: &Broadcast<bool>,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Exact {
        let asked = (&self.shown(kept), Change::LeftOut);
        rows::rank(&self.tensors(), self, asked, (grad_out, grad_lse))
    }

    /// [`left_out_gradient`](Self::left_out_gradient) by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_left_out_gradient(
        &self,
        kept: &Broadcast<bool>,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let asked = (&self.shown(kept), Change::LeftOut);
        naive::rank(&self.tensors(), self, asked, (grad_out, grad_lse))
    }

    fn shown(&self, shown: &Broadcast<bool>) -> impl Pairs {
        move |at: At| self.keys_of(Some(shown), at)
    }

    /// The keys that a query sees by `shown` and the causal masking, and their biases.
    fn keys_of(&self, shown: Option<&Broadcast<bool>>, [b, h, i]: At) -> Keys {
        let p = &self.problem;
        let sees = |&j: &usize| shown.is_none_or(|m| m.values[m.index(p, b, h, i, j)]);
        let bias = |j| (self.bias.as_ref()).map_or(0.0, |m| m.values[m.index(p, b, h, i, j)]);
        let keys = rows::visible(p, i).filter(sees);
        keys.map(|j| (j, bias(j))).collect()
    }

    fn naive_gradients(&self, grads: Grads<'_>, mean: Mean) -> (NaiveBackward, Option<Vec<f64>>) {
        let mut dbias = self.bias.as_ref().map(|b| vec![0.0f32; b.values.len()]);
        let sink = |[b, h, i]: At, j, ds| {
            if let (Some(grad), Some(bias)) = (&mut dbias, &self.bias) {
                grad[bias.index(&self.problem, b, h, i, j)] += ds;
            }
        };
        let grads = naive::backward(&self.tensors(), self, grads, mean, sink);
        (grads, dbias.map(|g| g.into_iter().map(f64::from).collect()))
    }

    pub(crate) fn tensors(&self) -> Tensors<'_> {
        assert!(!self.problem.has_scores, "scores go through `Inputs`");
        Tensors::new(&self.problem, [&self.q, &self.k, &self.v])
    }
}
