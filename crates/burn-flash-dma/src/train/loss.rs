//! Cross-entropy.

use crate::fallback::tensors::greatest_divisor;
use crate::functions::product::check_product;
use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

/// Mean cross-entropy, `[1]` in f32 and nats, of `logits` `[tokens, classes]` of any float type and the classes
/// `targets` `[tokens]`. Without tokens it is 0, with zero gradients, where a mean would be NaN.
///
/// Equal to Burn's `CrossEntropyLoss` without weights, smoothing or padding. All arithmetic is f32, and the backward
/// pass keeps the logits as they are and two numbers per token, not their logarithms.
///
/// # Panics
///
/// If targets and rows of logits differ in number.
#[must_use]
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let losses = token_losses(logits, targets);
    let [tokens] = losses.dims();
    sum_losses(losses) / tokens.max(1) as f64
}

/// Sum of the losses of tokens, `[1]`, as Burn's `sum`, which gives all of them to one thread of a GPU; here a thread has
/// about as many as the root of their number.
#[must_use]
pub fn sum_losses(losses: Tensor<1>) -> Tensor<1> {
    let [tokens] = losses.dims();
    match greatest_divisor(tokens, tokens.isqrt()) {
        1 => losses.sum(),
        parts => losses.reshape([parts, tokens / parts]).sum_dim(1).sum(),
    }
}

/// Cross-entropy of each token, `[tokens]` in f32 and nats, for weighting or leaving out tokens. See
/// [`cross_entropy`].
///
/// # Panics
///
/// If targets and rows of logits differ in number.
#[must_use]
pub fn token_losses(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let ([tokens, _], [targets_len]) = (logits.dims(), targets.dims());
    assert_eq!(tokens, targets_len, "the number of targets");
    let losses = Dispatch::training_losses(logits.into_dispatch(), targets.into_dispatch());
    Tensor::from_dispatch(losses)
}

/// Numbers of the logits that [`linear_cross_entropy`] makes at a time: 512 MiB in 16 bits.
const LOGITS: usize = 1 << 28;

/// Tokens of a tile of the products, and fewer of them where there are very many classes. Tokens whose logits are made at a
/// time are a multiple of these: parts of all tensors then begin where the widest vectors do.
const TILE: usize = 128;
const PART_OF_TILE: usize = 32;

/// The weight of the layer that makes logits.
#[derive(Clone, Debug)]
pub enum Unembedding {
    /// Weight of a linear layer, `[width, classes]`.
    Linear(Tensor<2>),
    /// An embedding that is read backwards, `[classes, width]`. Its gradient has this layout, too: to that of the lookup it is
    /// added in the order of memory.
    Embedding(Tensor<2>),
}

/// Sum of the cross-entropies of tokens, each times its weight, `[1]` in f32 and nats, without the logits of all tokens: those
/// of 32 768 tokens and a vocabulary of as many take 2 GB in 16 bits, and as much again for their gradient.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `x` | `[tokens, width]` | f32, f16 or bf16 |
/// | `weight` | [`Unembedding`] | f32, f16 or bf16 |
/// | `targets` | `[tokens]` | integers |
/// | `weights` | `[tokens]` | f32 |
///
/// Logits are in the type of `x`, as those of [`product`](crate::product()). The gradients of `x` and `weight` are computed in the
/// forward pass and kept until the backward pass, which scales them; the weights have none. So give weights of the order of 1,
/// and divide the sum for a mean: f16 does not hold the gradients of logits for weights of a thousandth.
///
/// ```
/// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
/// # use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_flash_dma::product;
/// use burn_flash_dma::train::{Unembedding, cross_entropy, linear_cross_entropy};
///
/// # let device = Device::flex().autodiff();
/// # let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
/// let (x, weight) = (random([20, 16]), random([16, 50]));
/// let targets = Tensor::<1, Int>::arange(0..20, &device);
/// let layer = Unembedding::Linear(weight.clone());
/// let sum = linear_cross_entropy(x.clone(), layer, targets.clone(), Tensor::ones([20], &device));
/// let mean = cross_entropy(product(x, weight), targets);
/// assert!((sum / 20.0 - mean).abs().into_scalar::<f32>() < 1e-5);
/// # }
/// ```
///
/// # Panics
///
/// With the text of an [`AttentionError`](crate::AttentionError) if the shapes, element types or devices of `x` and `weight` do not
/// fit; if there are not as many targets and weights as tokens, or no class.
#[must_use]
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Unembedding,
    targets: Tensor<1, Int>,
    weights: Tensor<1>,
) -> Tensor<1> {
    let (weight, by_rows) = match weight {
        Unembedding::Linear(weight) => (weight, false),
        Unembedding::Embedding(table) => (table.transpose(), true),
    };
    if let Err(error) = check_product(&x, &weight) {
        panic!("{error}");
    }
    let ([tokens, _], [_, classes]) = (x.dims(), weight.dims());
    assert_eq!(targets.dims(), [tokens], "the number of targets");
    assert_eq!(weights.dims(), [tokens], "the number of weights");
    assert!(classes > 0, "there is no class");
    if tokens == 0 {
        return Tensor::zeros([1], (&x.device(), DType::F32));
    }
    let most = LOGITS / classes;
    let tile = if most < TILE { PART_OF_TILE } else { TILE };
    let rows = (most / tile).max(1) * tile;
    let sum = Dispatch::training_linear_losses(
        x.into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        weights.cast(DType::F32).into_dispatch(),
        rows,
        by_rows,
    );
    Tensor::from_dispatch(sum)
}
