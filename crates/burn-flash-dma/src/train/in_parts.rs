//! Training on a sequence in parts, one after the other, by the gradient of the whole.

use super::checkpointing::{add_gradients, untracked};
use super::part_layers::{PartLayers, sum};
use super::parts::Parts;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use flash_dma_problem::AttentionError;
use std::ops::Range;

/// The loss and the gradients of a model that reads sequences in parts: those of a pass over the whole sequences, up to
/// rounding, however long they are.
///
/// Behind a boundary between parts, a layer that keeps `window` keys needs at most that many of the earlier ones, and the
/// runners-up. So memory holds one part with its graph, and for every boundary and layer these rows. Each part is computed
/// without a graph first, and a second time, from the last part to the first, with one; gradients cross a boundary in f32.
///
/// - `features(model, tokens, layers)` computes the output of the last block for a part, the tokens of this range. It calls
///   all attention layers in the same order for every part, by [`PartLayers::attend`] in place of their `forward`.
/// - `loss(model, tokens, x)` computes the part's share of the loss, `[1]`, from that output, by which alone it may depend
///   on the layers. The shares add up to the returned loss.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::module::Module;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
/// use burn_flash_dma::train::{Parts, try_in_parts};
///
/// let device = Device::flex().autodiff();
/// let config = DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8));
/// let layer = config.init(&device);
/// let x = Tensor::<3>::random([1, 100, 32], Distribution::Default, &device);
///
/// // 100 tokens in parts of 25.
/// let (loss, gradients) = try_in_parts(
///     &layer,
///     &Parts::new(1, 100, 25),
///     |layer: &DynamicMaskAttention, tokens, layers| {
///         layers.try_attend(layer, x.clone().narrow(1, tokens.start, tokens.len()))
///     },
///     |_, _, out| Ok(out.powi_scalar(2).sum() / 100.0),
/// )?;
///
/// let whole = layer.forward(x.clone()).powi_scalar(2).sum() / 100.0;
/// assert!((loss - whole).abs().into_scalar::<f32>() < 1e-5);
/// assert!(gradients.get::<2>(layer.q_proj.weight.id).is_some());
/// # }
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// # Errors
///
/// Those of `features` and `loss`.
///
/// # Panics
///
/// If parts call different numbers of layers, or the loss has no graph.
pub fn try_in_parts<M: Module>(
    model: &M,
    parts: &Parts,
    features: impl Fn(&M, Range<usize>, &mut PartLayers) -> Result<Tensor<3>, AttentionError>,
    loss: impl Fn(&M, Range<usize>, Tensor<3>) -> Result<Tensor<1>, AttentionError>,
) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
    let mut layers = PartLayers::in_time();
    let untracked = untracked(model);
    let ranges = parts.ranges();
    let last = ranges.len() - 1;
    for (part, range) in ranges.iter().enumerate().take(last) {
        layers.begin(parts, part, false);
        features(&untracked, range.clone(), &mut layers)?;
    }
    let mut gradients = GradientsParams::new();
    let mut losses = Vec::with_capacity(ranges.len());
    for (part, range) in ranges.iter().enumerate().rev() {
        layers.begin(parts, part, true);
        let x = features(model, range.clone(), &mut layers)?;
        let loss = loss(model, range.clone(), x)?;
        losses.push(loss.clone().detach());
        let loss = sum(layers.asked().into_iter().chain([loss])).expect("a loss");
        let mut grads = loss.backward();
        let scores = layers.take_gradients(&mut grads)?;
        add_gradients(model, grads, &mut gradients);
        if let Some(zero) = scores {
            add_gradients(model, zero.backward(), &mut gradients);
        }
    }
    if let Some(zero) = layers.charged()? {
        add_gradients(model, zero.backward(), &mut gradients);
    }
    Ok((Tensor::cat(losses, 0).sum(), gradients))
}
