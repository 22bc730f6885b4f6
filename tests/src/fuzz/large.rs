//! Logits that are great numbers: of padding that is a bias of −1e9, or of scores or products that have grown.
//!
//! The right results are those of f64 attention over the logits as f32 rounds them: the f32 nearest to the scaled product
//! plus what is added to it. Products are small fractions and scales powers of two here, so a product is exact in any
//! order of its terms and there is one rounding.

use super::spec::{Decoding, Place, Spec};
use crate::Grads;
use crate::expected::{Expected, Learning, masked, visible};
use flash_dma_problem::ScoreRole;
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::{Exact, Inputs, select};

/// The cause of great logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Large {
    /// The approximate size of the logits.
    pub size: f32,
    /// True if only some keys have great logits.
    pub some: bool,
    /// True if they are great by the products of q and k, false if by the numbers added to these.
    pub products: bool,
}

impl Large {
    /// Numbers added to logits, positive or negative: round numbers, and the least of f32 and of bf16.
    pub const ADDED: [f32; 8] = [1e4, -1e4, 1e6, -1e6, 1e9, -1e9, f32::MIN, -3.389_531_4e38];
    /// Sizes of products, positive or negative.
    pub const PRODUCTS: [f32; 3] = [8192.0, 1_048_576.0, 1_073_741_824.0];

    /// True if a key has a great logit. If only some do, these are the last third, the first, or every third key: rows
    /// before them see none, those at the front nothing else.
    fn has(self, spec: &Spec, key: usize) -> bool {
        let last = 3 * key >= 2 * spec.k_len;
        let part = match spec.seed % 3 {
            0 => last,
            1 => 3 * key < spec.k_len,
            _ => key.is_multiple_of(3),
        };
        !self.some || part
    }

    /// Adds the size to the numbers that are added to the logits, along its last axis.
    pub(super) fn add(self, values: &mut [f64], spec: &Spec) {
        if self.products {
            return;
        }
        for row in values.chunks_mut(spec.k_len.max(1)) {
            for (key, x) in row.iter_mut().enumerate() {
                if self.has(spec, key) {
                    *x = f64::from(*x as f32 + self.size);
                }
            }
        }
    }

    /// Makes the rows of q and k such that their products are exact, and great if `products` is set.
    pub(super) fn fit_rows(self, [q, k]: [&mut [f64]; 2], spec: &Spec) {
        let units = if self.products { 1.0 } else { 2.0 };
        for x in q.iter_mut().chain(k.iter_mut()) {
            *x = (units * *x).round().clamp(-4.0, 4.0) / units;
        }
        if !self.products {
            return;
        }
        // One feature makes the size. There is no place for the others' digits next to the greatest.
        let bits = self.size.abs().log2() as i32;
        let parts = [(bits + 1) / 2, bits / 2].map(|bits| 2f64.powi(bits));
        let lone = bits > 24;
        let dim = spec.head_dim;
        for row in q.chunks_exact_mut(dim) {
            if lone {
                row.fill(0.0);
            }
            row[0] = parts[0];
        }
        for (n, row) in k.chunks_exact_mut(dim).enumerate() {
            if lone {
                row.fill(0.0);
            }
            // If all keys read one row, it is that of the first key.
            let key = match spec.places[Spec::K] {
                Place::Tokens => 0,
                _ => n % spec.k_len,
            };
            row[0] = match self.has(spec, key) {
                true => parts[1].copysign(f64::from(self.size)),
                false => 0.0,
            };
        }
    }
}

/// The results of a problem under a mask, and the gradients of `learning`'s rank: separate if `apart`, otherwise in
/// those of the bias, whose gradient has the given name.
pub(super) fn expected(
    inputs: &MaskedInputs,
    bias: &'static str,
    (learning, apart): (&Learning, bool),
    grads: &Grads,
) -> Expected {
    let Rounded {
        inputs: by_pair,
        less,
    } = Rounded::new(inputs);
    let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
    let mut expected = forward(&by_pair, &less);
    let exact = by_pair.backward(grad_out, grad_lse);
    let (naive, naive_bias) = by_pair.naive_backward(grad_out, grad_lse);
    expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
    let rank = learning.gradient(&by_pair, grads);
    let of_pairs = exact.bias.zip(naive_bias).expect("pairs have biases");
    let of_bias = inputs.bias.as_ref().map(|of| {
        let (exact, naive) = &of_pairs;
        let [values, magnitude, naive] =
            [&exact.values, &exact.magnitude, naive].map(|pairs| folded(inputs, of, pairs));
        (Exact { values, magnitude }, naive)
    });
    // Scores are those of a kv head and a key.
    let scores = p.scores_shape();
    let shape = match &inputs.bias {
        Some(of) if bias != "dscores" => &of.shape[..],
        _ => &scores[..],
    };
    expected.bias_and_rank((bias, shape), of_bias, rank, apart);
    expected
}

/// The outputs of a step of a cache, from the tokens up to its end.
pub(super) fn step(decoding: &Decoding, inputs: &Inputs) -> Expected {
    let p = &inputs.problem;
    let scores = inputs.scores.as_ref();
    let seen = visible(p, &|head, position| {
        let keys = 0..p.k_len;
        match (decoding.window(), scores) {
            (Some(window), Some(scores)) => {
                let scores = &scores[head * p.k_len..(head + 1) * p.k_len];
                let selected = select::selected(scores, window, position);
                keys.map(|key| selected.binary_search(&key).is_ok())
                    .collect()
            }
            _ => {
                let first = decoding.last().map_or(0, |last| position + 1 - last as i64);
                keys.map(|key| (first..=position).contains(&(key as i64)))
                    .collect()
            }
        }
    });
    let added = scores.filter(|_| decoding.role == ScoreRole::RankAndBias);
    let inputs = masked(inputs, Some(seen), added);
    let Rounded { inputs, less } = Rounded::new(&inputs);
    forward(&inputs, &less)
}

fn forward(by_pair: &MaskedInputs, less: &[f64]) -> Expected {
    let mut exact = by_pair.forward();
    for (lse, less) in exact.lse.values.iter_mut().zip(less) {
        *lse += less;
    }
    Expected::new(&by_pair.problem, exact, &by_pair.naive_forward())
}

/// The sums of pairs' numbers over the axes along which a bias is broadcast.
fn folded(inputs: &MaskedInputs, of: &Broadcast<f64>, pairs: &[f64]) -> Vec<f64> {
    let p = &inputs.problem;
    let mut sums = vec![0.0; of.values.len()];
    let mut pairs = pairs.iter();
    for (b, h) in (0..p.batch).flat_map(|b| (0..p.q_heads).map(move |h| (b, h))) {
        for (i, j) in (0..p.q_len).flat_map(|i| (0..p.k_len).map(move |j| (i, j))) {
            sums[of.index(p, b, h, i, j)] += pairs.next().expect("a number of each pair");
        }
    }
    sums
}

/// A problem with logits as rounded by f32, minus the greatest of each row.
struct Rounded {
    /// The problem with a bias for each pair.
    inputs: MaskedInputs,
    /// The numbers subtracted from each row's logits, and so from its LSE, `[batch, q_heads, q_len]`.
    less: Vec<f64>,
}

/// The difference from the greatest logit at which a key gets the weight 0 in f32, and so in f64 here: its size would
/// be that of the error that the others are allowed.
const VANISHES: f64 = -200.0;

impl Rounded {
    fn new(inputs: &MaskedInputs) -> Self {
        let p = &inputs.problem;
        let (dim, scale) = (p.head_dim, f64::from(p.scale));
        let (mut values, mut less) = (Vec::new(), Vec::new());
        for (b, h) in (0..p.batch).flat_map(|b| (0..p.q_heads).map(move |h| (b, h))) {
            for i in 0..p.q_len {
                let q = &inputs.q[((b * p.q_heads + h) * p.q_len + i) * dim..][..dim];
                let causal = |j: usize| j as i64 <= p.position(i);
                let product = |j: usize| {
                    let row = (b * p.kv_heads + h / p.group()) * p.k_len + j;
                    let k = &inputs.k[row * dim..][..dim];
                    scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
                };
                let bias = |j: usize| {
                    let of = inputs.bias.as_ref();
                    of.map_or(0.0, |of| of.values[of.index(p, b, h, i, j)])
                };
                let is_seen = |j: usize| {
                    let of = inputs.visible.as_ref();
                    causal(j) && of.is_none_or(|of| of.values[of.index(p, b, h, i, j)])
                };
                let products: Vec<f64> = (0..p.k_len).map(product).collect();
                let logits: Vec<f64> = (products.iter().enumerate())
                    .map(|(j, &x)| f64::from(x as f32 + bias(j) as f32))
                    .collect();
                let seen = (0..p.k_len).filter(|&j| is_seen(j)).map(|j| logits[j]);
                let most = seen
                    .filter(|x| x.is_finite())
                    .fold(f64::NEG_INFINITY, f64::max);
                let most = if most.is_finite() { most } else { 0.0 };
                less.push(most);
                values.extend(logits.iter().zip(&products).map(|(a, x)| match a - most {
                    gone if gone < VANISHES => f64::NEG_INFINITY,
                    rest => rest - x,
                }));
            }
        }
        let bias = Broadcast {
            shape: [p.batch, p.q_heads, p.q_len, p.k_len],
            values,
        };
        Self {
            inputs: MaskedInputs {
                bias: Some(bias),
                ..inputs.clone()
            },
            less,
        }
    }
}
