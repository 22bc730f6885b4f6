//! Cross-entropy.

use crate::fallback::tensors::greatest_divisor;
use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

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
