//! The rank and the bias of keys as two tensors: the bias gets the gradient of the logits, the rank that of the
//! runners-up, and one tensor for both gets both. Compared with the sums of the definition, in f64.

use burn::tensor::{Distribution, Gradients, Tensor};
use burn_flash_dma::{Attention, Selector};
use flash_dma_reference::select::selected;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{grad, values};

fast_burn!(
    another_tensor_is_added,
    nothing_is_added,
    the_rank_is_added,
    a_constant_rank_has_no_gradient,
);
// Through fusion, which passes the rank on with the ends.
on_burn_cpu!(another_tensor_is_added);

const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LEN: usize = 60;
const DIM: usize = 16;
const WINDOW: usize = 7;
const RUNNERS_UP: usize = 5;

/// The tensors of a call, all tracked except the weights of the loss.
struct Tensors {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    rank: Tensor<3>,
    bias: Tensor<3>,
    out: Tensor<4>,
    lse: Tensor<3>,
}

impl Tensors {
    fn random<B: Backend>(burn: &Burn<B>) -> Self {
        let device = &burn.device().clone().autodiff();
        let normal = Distribution::Normal(0.0, 1.0);
        let rows = |heads| Tensor::<4>::random([1, heads, LEN, DIM], normal, device);
        let keys = || Tensor::<3>::random([1, KV_HEADS, LEN], normal, device);
        Self {
            q: rows(Q_HEADS).require_grad(),
            k: rows(KV_HEADS).require_grad(),
            v: rows(KV_HEADS).require_grad(),
            rank: keys().require_grad(),
            bias: keys().require_grad(),
            out: rows(Q_HEADS),
            lse: Tensor::random([1, Q_HEADS, LEN], normal, device),
        }
    }

    /// The gradients of attention to the keys selected by `rank`, with `added` on their logits.
    fn backward(&self, rank: &Tensor<3>, added: Option<&Tensor<3>>) -> Gradients {
        let intervals = selector().select(rank.clone());
        let attention = Attention::new(self.q.clone(), self.k.clone(), self.v.clone());
        let (out, lse) = match added.cloned() {
            None => attention.intervals(&intervals).forward_with_lse(),
            Some(added) => (attention.scores(added).intervals(&intervals)).forward_with_lse(),
        };
        let loss = (out * self.out.clone()).sum() + (lse * self.lse.clone()).sum();
        loss.backward()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The gradients of the bias and of the rank, pair by pair.
fn expected(t: &Tensors, bias: &[f64]) -> [Vec<f64>; 2] {
    let [q, k, v, weights] = [&t.q, &t.k, &t.v, &t.out].map(|x| values(x.clone()));
    let [rank, lse_weights] = [&t.rank, &t.lse].map(|x| values(x.clone()));
    let mut grads = [vec![0.0; KV_HEADS * LEN], vec![0.0; KV_HEADS * LEN]];
    for (row, &grad_lse) in lse_weights.iter().enumerate() {
        let (head, position) = (row / LEN / (Q_HEADS / KV_HEADS), row % LEN);
        let at = |x: &'_ [f64], row: usize| x[row * DIM..(row + 1) * DIM].to_vec();
        let keys = |window| selected(&rank[head * LEN..(head + 1) * LEN], window, position as i64);
        let logit = |j: usize| {
            let product = dot(&at(&q, row), &at(&k, head * LEN + j));
            product / (DIM as f64).sqrt() + bias[head * LEN + j]
        };
        let attended = keys(WINDOW);
        let lse = attended.iter().map(|&j| logit(j).exp()).sum::<f64>().ln();
        let grad_out = at(&weights, row);
        // dO · v_j, and its mean over the attended keys: dO · out.
        let value = |j: usize| dot(&grad_out, &at(&v, head * LEN + j));
        let mean: f64 = (attended.iter())
            .map(|&j| (logit(j) - lse).exp() * value(j))
            .sum();
        for &j in &attended {
            let p = (logit(j) - lse).exp();
            grads[0][head * LEN + j] += p * (value(j) - mean + grad_lse);
        }
        let wider = keys(WINDOW + RUNNERS_UP).into_iter();
        for j in wider.filter(|j| !attended.contains(j)) {
            let x = logit(j) - lse;
            let p = 1.0 / (1.0 + (-x).exp());
            grads[1][head * LEN + j] += p * (value(j) - mean) + grad_lse * x.exp().ln_1p();
        }
    }
    grads
}

fn near(name: &str, x: &Tensor<3>, grads: &Gradients, expected: &[f64]) {
    let size = expected.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (key, (actual, expected)) in grad(x, grads).into_iter().zip(expected).enumerate() {
        let error = (actual - expected).abs();
        assert!(
            error < 1e-5 * size,
            "{name} of key {key}: {actual}, not {expected}"
        );
    }
}

/// The selection of a call's rank, with runners-up.
fn selector() -> Selector {
    Selector::top(WINDOW).runners_up(RUNNERS_UP)
}

fn another_tensor_is_added<B: Backend>(burn: &Burn<B>) {
    let t = Tensors::random(burn);
    let grads = t.backward(&t.rank, Some(&t.bias));
    let [bias, rank] = expected(&t, &values(t.bias.clone()));
    near("dbias", &t.bias, &grads, &bias);
    near("drank", &t.rank, &grads, &rank);
}

fn nothing_is_added<B: Backend>(burn: &Burn<B>) {
    let t = Tensors::random(burn);
    let grads = t.backward(&t.rank, None);
    let [_, rank] = expected(&t, &[0.0; KV_HEADS * LEN]);
    near("drank", &t.rank, &grads, &rank);
}

fn the_rank_is_added<B: Backend>(burn: &Burn<B>) {
    let t = Tensors::random(burn);
    let grads = t.backward(&t.rank, Some(&t.rank));
    let [bias, rank] = expected(&t, &values(t.rank.clone()));
    let both: Vec<f64> = bias.iter().zip(&rank).map(|(a, b)| a + b).collect();
    near("dscores", &t.rank, &grads, &both);
}

fn a_constant_rank_has_no_gradient<B: Backend>(burn: &Burn<B>) {
    let t = Tensors::random(burn);
    // A detached leaf would still be tracked.
    let rank = Tensor::from_inner(t.rank.clone().inner());
    assert!(selector().select(rank.clone()).runner_up_ends().is_none());
    let grads = t.backward(&rank, Some(&t.bias));
    let [bias, _] = expected(&t, &values(t.bias.clone()));
    near("dbias", &t.bias, &grads, &bias);
    assert!(rank.grad(&grads).is_none() && t.rank.grad(&grads).is_none());
}
