//! A decoder-only model, its blocks and their parts.
//!
//! A [`Decoder`] is a whole language model. A [`DecoderBlock`] is attention and a feed-forward network, each with a
//! norm before it and added to the residual stream, which a learned vector may scale. A [`FeedForward`] is a gated
//! network, optionally with routed [`Experts`] next to it. A [`TokenInput`] is the input of a whole model.

mod block;
mod decoder;
#[cfg(feature = "autodiff")]
mod decoder_loss;
mod experts;
mod feed_forward;
#[cfg(feature = "autodiff")]
mod in_parts;
mod input;
#[cfg(feature = "autodiff")]
mod loss;
mod stack;

pub use block::{DecoderBlock, DecoderBlockConfig, Residual};
pub use decoder::{Activations, Decoder, DecoderConfig, last_keys};
#[cfg(feature = "autodiff")]
pub use decoder_loss::Backward;
pub use experts::{Experts, ExpertsConfig, Routing};
pub use feed_forward::{FeedForward, FeedForwardConfig};
pub use input::{Sequences, TokenInput};
pub(crate) use stack::{Stack, whole_model};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::RmsNorm;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_flash_dma::{AttentionError, try_rms_norm, try_rms_norm_branch};

/// The norm of `x` by one pass over memory.
pub(crate) fn normalised<const D: usize>(
    norm: &RmsNorm,
    x: Tensor<D>,
) -> Result<Tensor<D>, AttentionError> {
    try_rms_norm(x, norm.gamma.val(), norm.epsilon as f32)
}

/// `x` and its norm, whose gradients are added in one pass.
pub(crate) fn branch<const D: usize>(
    norm: &RmsNorm,
    x: Tensor<D>,
) -> Result<[Tensor<D>; 2], AttentionError> {
    try_rms_norm_branch(x, norm.gamma.val(), norm.epsilon as f32)
}

/// A part of a model with its parameters cast within the autodiff graph: gradients arrive at the original parameters
/// through the casts.
#[must_use]
pub fn cast<M: Module>(part: &M, dtype: FloatDType) -> M {
    part.clone().map(&mut Cast(dtype))
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.dtype() == DType::from(self.0) {
            true => param,
            false => param.map(|value| value.cast(self.0)),
        }
    }
}

#[track_caller]
pub(crate) fn expect<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
